"""A server that speaks the chat part of OpenAI's protocol: `GET /v1/models` and streams of `POST /v1/chat/completions`.

The shapes follow OpenAI's API reference (Models, Chat, Error codes). The sentence about a prompt that is too long is
the one that vLLM and others took over; like theirs, the window has to hold the prompt and what may be answered.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import Exchange, LoopbackServer, Recorded, serving
from tests.fakes.chat import OVERFLOW, Message, count_words, fill_in, prompt_tokens, refuse, speak, tokens_of


@dataclass
class OpenAIDialect:
    """Server-sent events with chunks of a chat completion."""

    model: str
    media_type: str = "text/event-stream; charset=utf-8"

    def token(self, text: str) -> bytes:
        return self._chunk({"content": text})

    def thought(self, text: str) -> bytes:
        return self._chunk({"content": None, "reasoning_content": text})

    def end(self, reason: str) -> bytes:
        return self._chunk({}, reason) + b"data: [DONE]\n\n"

    def problem(self, message: str, *, kind: str) -> object:
        return {"error": {"message": message, "type": kind, "param": None, "code": kind}}

    def overflow(self, prompt_tokens: int, window: int) -> object:
        completion = 1024
        message = (
            f"This model's maximum context length is {window} tokens. However, you requested"
            f" {prompt_tokens + completion} tokens ({prompt_tokens} in the messages, {completion} in the completion)."
            " Please reduce the length of the messages or completion."
        )
        error = {"message": message, "type": "invalid_request_error", "param": "messages"}
        return {"error": error | {"code": "context_length_exceeded"}}

    def error(self, body: object) -> bytes:
        return _event(body)

    def _chunk(self, delta: Mapping[str, object], reason: str | None = None) -> bytes:
        return _event(
            {
                "id": "chatcmpl-7",
                "object": "chat.completion.chunk",
                "created": 1_760_000_000,
                "model": self.model,
                "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}],
            }
        )


@dataclass
class FakeOpenAIChat:
    """`answer(messages)` writes, `fill(schema, messages)` where JSON is asked for; `count_tokens` is the
    model's own tokenizer, as harsh as a test wants it.

    `lengths` are said in the list of models, as vLLM does and OpenAI does not; `unsupported` are parameters that the
    models refuse.
    """

    answer: Callable[[list[Message]], str] = lambda messages: "It is so. [1]"
    fill: Callable[[Mapping[str, Any], list[Message]], str] = fill_in
    models: Sequence[str] = ("llama3.2",)
    window: int = 8192
    lengths: Mapping[str, int] = field(default_factory=dict)
    unsupported: Sequence[str] = ()
    api_key: str = "sk-test"
    count_tokens: Callable[[str], int] = count_words
    fault: str | None = None
    fault_count: int | None = None
    server: LoopbackServer = field(init=False)

    @property
    def base_url(self) -> str:
        return f"{self.server.url}/v1"

    @property
    def requests(self) -> list[Recorded]:
        return self.server.requests

    def serve(self, exchange: Exchange) -> None:
        self.serve_with(self._due_fault(), exchange)

    def serve_with(self, fault: str | None, exchange: Exchange) -> None:
        """Answer one request with a fault of its own; others that are under way have theirs."""
        dialect = OpenAIDialect((exchange.body or {}).get("model", ""))
        if refuse(exchange, fault, dialect):
            return
        match exchange.command, exchange.path:
            case _ if exchange.headers.get("authorization") != f"Bearer {self.api_key}":
                _error(exchange, 401, "Incorrect API key provided: sk-***.", code="invalid_api_key")
            case _ if fault == "insufficient_quota":
                message = "You exceeded your current quota, please check your plan and billing details."
                _error(exchange, 429, message, code="insufficient_quota")
            case "GET", "/v1/models":
                exchange.send(200, {"object": "list", "data": [self._listing(name) for name in self.models]})
            case "POST", "/v1/chat/completions":
                self._chat(exchange, dialect, fault)
            case _:
                _error(exchange, 404, f"Invalid URL ({exchange.command} {exchange.path})")

    def _due_fault(self) -> str | None:
        if self.fault is None or self.fault_count is None:
            return self.fault
        self.fault_count -= 1
        return self.fault if self.fault_count >= 0 else None

    def _listing(self, name: str) -> dict[str, Any]:
        listing = {"id": name, "object": "model", "created": 1_760_000_000, "owned_by": "somebody"}
        return listing | ({"max_model_len": self.lengths[name]} if name in self.lengths else {})

    def _chat(self, exchange: Exchange, dialect: OpenAIDialect, fault: str | None) -> None:
        body = exchange.body
        if body["model"] not in self.models:
            message = f"The model `{body['model']}` does not exist or you do not have access to it."
            _error(exchange, 404, message, code="model_not_found")
            return
        for name in self.unsupported:
            if name in body:
                message = f"Unsupported parameter: '{name}' is not supported with this model."
                _error(exchange, 400, message, code="unsupported_parameter", param=name)
                return
        length = prompt_tokens(body["messages"], self.count_tokens)
        limit = body.get("max_completion_tokens", body.get("max_tokens"))
        if fault == "overflow_without_count":
            exchange.send(400, dialect.problem(OVERFLOW, kind="invalid_request_error"))
            return
        if fault == "overflow" or length + (limit or 0) > self.window:
            exchange.send(400, dialect.overflow(length, self.window))
            return
        schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
        said = self.answer(body["messages"]) if schema is None else self.fill(schema, body["messages"])
        text = "" if fault == "empty" else said
        tokens = tokens_of(text)
        room = self.window - length if limit is None else limit
        assert body.get("stream") is True, "this fake streams only"
        reason = "stop" if len(tokens) <= room else "length"
        speak(exchange, dialect, tokens[:room], reason=reason, fault=fault)


@contextmanager
def fake_openai_chat(**options: Any) -> Iterator[FakeOpenAIChat]:
    """Run a FakeOpenAIChat until the block ends."""
    fake = FakeOpenAIChat(**options)
    with serving(fake.serve) as fake.server:
        yield fake


def _event(content: object) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"


def _error(exchange: Exchange, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    exchange.send(status, {"error": error})
