"""A server that speaks Ollama's own protocol: tags, version, show, chat and embed, with its errors.

The shapes follow Ollama's docs/api.md and server/routes.go; the overflow error is llama.cpp's, which Ollama
passes on as a string.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.fakes import VECTOR_FAULTS, Exchange, LoopbackServer, Recorded, serving, spoil, unit_vector

Message = dict[str, str]

DEFAULT_NUM_CTX = 4096
# What a chat template adds around each message.
TEMPLATE_TOKENS = 4

CHAT_FAULTS = (
    "reset",
    "slow",  # says nothing until the client gives up
    "drip",  # sends tokens for ever, slowly
    "endless",  # the same, as fast as it can
    "endless_line",
    "error_line",  # an error inside a stream that began with 200
    "overflow_line",
    "cut",  # the connection breaks in the middle
    "no_done",  # the stream ends well, but the answer has not
    "invalid_utf8",
    "no_json",
    "empty",
    "overflow",
    "overflow_without_count",
    "busy",
    "crash",  # an error before the first token
    "html",
)
EMBED_FAULTS = (*VECTOR_FAULTS, "reset", "slow", "cut", "html", "no_json", "busy", "crash")


def count_words(text: str) -> int:
    """The default tokenizer of the fake."""
    return len(text.split())


@dataclass
class FakeOllama:
    """`answer(messages)` writes; `count_tokens` is the model's own tokenizer, as harsh as a test wants it."""

    answer: Callable[[list[Message]], str] = lambda messages: "It is so. [1]"
    models: Sequence[str] = ("llama3.2:latest",)
    embedding_models: Sequence[str] = ("nomic-embed-text:latest",)
    count_tokens: Callable[[str], int] = count_words
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
        fault = self._due_fault()
        match exchange.command, exchange.path:
            case _ if fault == "reset":
                exchange.reset()
            case _ if fault == "slow":
                exchange.hang()
            case _ if fault == "html":
                exchange.send_html()
            case _ if fault == "busy":
                message = "server busy, please try again.  maximum pending requests exceeded"
                exchange.send(503, {"error": message})
            case _ if fault == "crash":
                exchange.send(500, {"error": "llama runner process has terminated: signal: killed"})
            case "GET", "/api/version":
                exchange.send(200, {"version": "0.12.6"})
            case "GET", "/api/tags":
                names = (*self.models, *self.embedding_models)
                exchange.send(200, {"models": [_listing(name) for name in names]})
            case "POST", "/api/show":
                self._show(exchange)
            case "POST", "/api/chat":
                self._chat(exchange, fault)
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
        length = 131_072 if chat else self.embedding_context
        exchange.send(
            200,
            {
                "details": {"family": family, "format": "gguf", "quantization_level": "Q4_K_M"},
                "model_info": {"general.architecture": family, f"{family}.context_length": length},
                "capabilities": ["completion"] if chat else ["embedding"],
            },
        )

    # --- chat ------------------------------------------------------------------------------------

    def _chat(self, exchange: Exchange, fault: str | None) -> None:
        body = exchange.body
        name, messages = body["model"], body["messages"]
        if not self._has(name, self.models):
            exchange.send(404, {"error": f"model '{name}' not found"})
            return
        options = body.get("options", {})
        window = options.get("num_ctx", DEFAULT_NUM_CTX)
        prompt_tokens = self._prompt_tokens(messages)
        if fault == "overflow_without_count":
            exchange.send(400, {"error": "the input length exceeds the context length"})
            return
        if fault == "overflow" or (prompt_tokens >= window and body.get("truncate") is False):
            exchange.send(400, {"error": _overflow(prompt_tokens, window)})
            return
        # As the real one does it unless told otherwise: the oldest go first, nobody is told, and the
        # count is taken afterwards.
        while prompt_tokens >= window and len(messages) > 1:
            oldest = next((at for at, turn in enumerate(messages) if turn["role"] != "system"), 0)
            messages = messages[:oldest] + messages[oldest + 1 :]
            prompt_tokens = self._prompt_tokens(messages)
        text = "" if fault == "empty" else self.answer(messages)
        # -1, the default, means no limit.
        limit = options.get("num_predict", -1)
        room = max(0, window - prompt_tokens) if limit < 0 else min(limit, max(0, window - prompt_tokens))
        tokens = _tokens(text)
        last = {
            "done": True,
            "done_reason": "stop" if len(tokens) <= room else "length",
            "total_duration": 1_000_000,
            "load_duration": 1_000,
            "prompt_eval_count": prompt_tokens,
            "prompt_eval_duration": 1_000,
            "eval_count": min(len(tokens), room),
            "eval_duration": 1_000,
        }
        tokens = tokens[:room]
        if body.get("stream") is False:
            exchange.send(200, _frame(name, "".join(tokens)) | last)
            return
        exchange.begin_stream(media_type="application/x-ndjson")
        if fault is None or fault == "empty":
            for token in tokens:
                exchange.stream(_line(_frame(name, token)))
            exchange.stream(_line(_frame(name, "") | last))
            exchange.end_stream()
            return
        exchange.stream(_line(_frame(name, "It is")))
        match fault:
            case "error_line":
                exchange.stream(_line({"error": "model runner has unexpectedly stopped"}))
                exchange.end_stream()
            case "overflow_line":
                exchange.stream(_line({"error": _overflow(prompt_tokens, window)}))
                exchange.end_stream()
            case "cut":
                exchange.stream(_line(_frame(name, " so."))[:-20])
                exchange.cut()
            case "no_done":
                exchange.end_stream()
            case "invalid_utf8":
                exchange.stream(_line(_frame(name, "caf")).replace(b"caf", b"caf\xe9"))
                exchange.stream(_line(_frame(name, "") | last))
                exchange.end_stream()
            case "no_json":
                exchange.stream(b"data: {}\n")
                exchange.end_stream()
            case "drip":
                exchange.drip(_line(_frame(name, " and")))
            case "endless":
                exchange.drip(_line(_frame(name, " and on" * 1000)), every_s=0.0)
            case "endless_line":
                exchange.drip(b"x" * 100_000, every_s=0.0)

    def _prompt_tokens(self, messages: list[Message]) -> int:
        return sum(self.count_tokens(message["content"]) + TEMPLATE_TOKENS for message in messages)

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


def _frame(model: str, content: str) -> dict[str, Any]:
    return {
        "model": model,
        "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "message": {"role": "assistant", "content": content},
        "done": False,
    }


def _line(frame: dict[str, Any]) -> bytes:
    return json.dumps(frame, ensure_ascii=False).encode() + b"\n"


def _tokens(text: str) -> list[str]:
    """One token a word, each with the space in front of it."""
    return [word if at == 0 else f" {word}" for at, word in enumerate(text.split(" "))] if text else []


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
