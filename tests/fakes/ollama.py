"""A server that speaks Ollama's own protocol: tags, version, show, chat and embed, with its errors.

The shapes follow Ollama's docs/api.md and server/routes.go; the overflow error is llama.cpp's, which Ollama
passes on as a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.fakes import VECTOR_FAULTS, Exchange, LoopbackServer, Recorded, serving, spoil, unit_vector
from tests.fakes.chat import OVERFLOW, Message, count_words, fill_in, prompt_tokens, refuse, speak, tokens_of

DEFAULT_NUM_CTX = 4096

EMBED_FAULTS = (*VECTOR_FAULTS, "reset", "slow", "cut", "html", "no_json", "busy", "crash")


@dataclass
class OllamaDialect:
    """Lines of JSON."""

    model: str
    counts: dict[str, int] = field(default_factory=dict)
    media_type: str = "application/x-ndjson"

    def token(self, text: str) -> bytes:
        return self._line({"content": text})

    def thought(self, text: str) -> bytes:
        return self._line({"content": "", "thinking": text})

    def end(self, reason: str) -> bytes:
        return self._line({"content": ""}, {"done": True, "done_reason": reason} | self.counts)

    def problem(self, message: str, *, kind: str) -> object:
        return {"error": message}

    def overflow(self, prompt_tokens: int, window: int) -> object:
        return {"error": _overflow(prompt_tokens, window)}

    def error(self, body: object) -> bytes:
        return json.dumps(body).encode() + b"\n"

    def _line(self, message: dict[str, str], last: dict[str, object] | None = None) -> bytes:
        frame = _frame(self.model, message) | (last or {})
        return json.dumps(frame, ensure_ascii=False).encode() + b"\n"


@dataclass
class FakeOllama:
    """`answer(messages)` writes, `fill(schema, messages)` where JSON is asked for; `count_tokens` is the
    model's own tokenizer, as harsh as a test wants it.
    """

    answer: Callable[[list[Message]], str] = lambda messages: "It is so. [1]"
    fill: Callable[[Mapping[str, Any], list[Message]], str] = fill_in
    models: Sequence[str] = ("llama3.2:latest",)
    embedding_models: Sequence[str] = ("nomic-embed-text:latest",)
    count_tokens: Callable[[str], int] = count_words
    context_length: int = 131_072
    parameters: str = 'stop                           "<|eot_id|>"'
    embedding_dimensions: int = 768
    embedding_context: int = 2048
    fault: str | None = None
    fault_count: int | None = None
    server: LoopbackServer = field(init=False)

    @property
    def base_url(self) -> str:
        return self.server.url

    @property
    def requests(self) -> list[Recorded]:
        return self.server.requests

    def serve(self, exchange: Exchange) -> None:
        self.serve_with(self._due_fault(), exchange)

    def serve_with(self, fault: str | None, exchange: Exchange) -> None:
        """Answer one request with a fault of its own; others that are under way have theirs."""
        dialect = OllamaDialect((exchange.body or {}).get("model", ""))
        if refuse(exchange, fault, dialect):
            return
        match exchange.command, exchange.path:
            case "GET", "/api/version":
                exchange.send(200, {"version": "0.12.6"})
            case "GET", "/api/tags":
                names = (*self.models, *self.embedding_models)
                exchange.send(200, {"models": [_listing(name) for name in names]})
            case "POST", "/api/show":
                self._show(exchange)
            case "POST", "/api/chat":
                self._chat(exchange, dialect, fault)
            case "POST", "/api/embed":
                self._embed(exchange, fault)
            case _:
                exchange.send(404, b"404 page not found", media_type="text/plain")

    def _due_fault(self) -> str | None:
        if self.fault is None or self.fault_count is None:
            return self.fault
        self.fault_count -= 1
        return self.fault if self.fault_count >= 0 else None

    def _has(self, name: str, installed: Sequence[str]) -> bool:
        return (name if ":" in name else f"{name}:latest") in installed

    def _show(self, exchange: Exchange) -> None:
        name = exchange.body["model"]
        chat = self._has(name, self.models)
        if not chat and not self._has(name, self.embedding_models):
            exchange.send(404, {"error": f"model '{name}' not found"})
            return
        family = "llama" if chat else "nomic-bert"
        length = self.context_length if chat else self.embedding_context
        exchange.send(
            200,
            {
                "parameters": self.parameters,
                "details": {"family": family, "format": "gguf", "quantization_level": "Q4_K_M"},
                "model_info": {"general.architecture": family, f"{family}.context_length": length},
                "capabilities": ["completion"] if chat else ["embedding"],
            },
        )

    # --- chat ------------------------------------------------------------------------------------

    def _chat(self, exchange: Exchange, dialect: OllamaDialect, fault: str | None) -> None:
        body = exchange.body
        name, messages = body["model"], body["messages"]
        if not self._has(name, self.models):
            exchange.send(404, {"error": f"model '{name}' not found"})
            return
        options = body.get("options", {})
        # Ollama allots no more than the model was trained for, whatever is asked.
        window = min(options.get("num_ctx", DEFAULT_NUM_CTX), self.context_length)
        length = prompt_tokens(messages, self.count_tokens)
        if fault == "overflow_without_count":
            exchange.send(400, dialect.problem(OVERFLOW, kind="invalid_request_error"))
            return
        if fault == "overflow" or (length >= window and body.get("truncate") is False):
            exchange.send(400, dialect.overflow(length, window))
            return
        # As the real one does it unless told otherwise: the oldest go first, nobody is told, and the
        # count is taken afterwards.
        while length >= window and len(messages) > 1:
            oldest = next((at for at, turn in enumerate(messages) if turn["role"] != "system"), 0)
            messages = messages[:oldest] + messages[oldest + 1 :]
            length = prompt_tokens(messages, self.count_tokens)
        schema = body.get("format")
        said = self.answer(messages) if schema is None else self.fill(schema, messages)
        text = "" if fault == "empty" else said
        # -1, the default, means no limit.
        limit = options.get("num_predict", -1)
        room = max(0, window - length) if limit < 0 else min(limit, max(0, window - length))
        tokens = tokens_of(text)
        reason = "stop" if len(tokens) <= room else "length"
        dialect.counts = {"prompt_eval_count": length, "eval_count": min(len(tokens), room)}
        if body.get("stream") is False:
            last = {"done": True, "done_reason": reason} | dialect.counts
            exchange.send(200, _frame(name, {"content": "".join(tokens[:room])}) | last)
            return
        speak(exchange, dialect, tokens[:room], reason=reason, fault=fault)

    # --- embeddings ------------------------------------------------------------------------------

    def _embed(self, exchange: Exchange, fault: str | None) -> None:
        body = exchange.body
        name = body["model"]
        if not self._has(name, self.embedding_models):
            exchange.send(404, {"error": f"model '{name}' not found"})
            return
        inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
        counts = [self.count_tokens(text) for text in inputs]
        if any(count > self.embedding_context for count in counts):
            if body.get("truncate") is False:
                exchange.send(400, {"error": "the input length exceeds the context length"})
                return
            inputs = [" ".join(text.split()[: self.embedding_context]) for text in inputs]
        dimensions = body.get("dimensions") or self.embedding_dimensions
        vectors: list[Any] = [_shortened(unit_vector(text, self.embedding_dimensions), dimensions) for text in inputs]
        if fault in VECTOR_FAULTS:
            vectors = spoil(vectors, fault)
        content = {
            "model": name,
            "embeddings": vectors,
            "total_duration": 1_000_000,
            "load_duration": 1_000,
            "prompt_eval_count": sum(counts),
        }
        match fault:
            case "cut":
                exchange.begin_stream(media_type="application/json")
                exchange.stream(json.dumps(content).encode()[:-100])
                exchange.cut()
            case "no_json":
                exchange.send(200, b'{"embeddings": [[')
            case _:
                exchange.send(200, content)


@contextmanager
def fake_ollama(**options: Any) -> Iterator[FakeOllama]:
    """Run a FakeOllama until the block ends."""
    fake = FakeOllama(**options)
    with serving(fake.serve) as fake.server:
        yield fake


def _listing(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": "2026-11-01T08:00:00Z",
        "size": 2_019_393_189,
        "digest": "a80c4f17acd55265feec403c7aef86be0c25983ab279d83f3bcd3abbcb5b8b72",
        "details": {"format": "gguf", "family": "llama", "parameter_size": "3.2B"},
    }


def _frame(model: str, message: dict[str, str]) -> dict[str, Any]:
    return {
        "model": model,
        "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "message": {"role": "assistant"} | message,
        "done": False,
    }


def _shortened(vector: list[float], dimensions: int) -> list[float]:
    front = vector[:dimensions]
    norm = math.hypot(*front)
    return [value / norm for value in front]


def _overflow(prompt_tokens: int, window: int) -> str:
    error = {
        "code": 400,
        "message": f"request ({prompt_tokens} tokens) exceeds the available context size ({window} tokens),"
        " try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": prompt_tokens,
        "n_ctx": window,
    }
    return json.dumps({"error": error})
