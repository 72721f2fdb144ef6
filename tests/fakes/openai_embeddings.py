"""A server that speaks OpenAI's `POST /v1/embeddings`, with its limits, its errors and more faults than it has.

The shapes follow OpenAI's API reference (Embeddings, Error codes).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import VECTOR_FAULTS, Exchange, LoopbackServer, Recorded, serving, spoil, unit_vector

NATIVE_DIMENSIONS = {
    "text-embedding-3-small": 1536,
    "text-embedding-3-large": 3072,
    "text-embedding-ada-002": 1536,
}
MAX_INPUTS = 2048
MAX_REQUEST_TOKENS = 300_000
MAX_INPUT_TOKENS = 8192

FAULTS = (
    *VECTOR_FAULTS,
    "permuted",  # the rows out of order, their `index` true
    "duplicate_index",
    "no_index",
    "reset",
    "hang",
    "drip",
    "cut",
    "html",
    "no_json",
    "deep_json",
    "endless",
    "server_error",
    "rate_limit",
    "insufficient_quota",
)


@dataclass
class FakeOpenAI:
    """`fault` is set while the server runs; with `fault_count` it passes after so many requests."""

    api_key: str = "sk-test"
    fault: str | None = None
    fault_count: int | None = None
    retry_after: str | None = None
    gate: threading.Event | None = None
    """Requests wait until it is set."""
    server: LoopbackServer = field(init=False)

    @property
    def base_url(self) -> str:
        return f"{self.server.url}/v1"

    @property
    def requests(self) -> list[Recorded]:
        return self.server.requests

    def answer(self, exchange: Exchange) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        fault = self._due_fault()
        body = exchange.body
        if exchange.path != "/v1/embeddings" or exchange.command != "POST":
            _error(exchange, 404, f"Invalid URL ({exchange.command} {exchange.path})", "invalid_request_error")
        elif exchange.headers.get("authorization") != f"Bearer {self.api_key}":
            _error(exchange, 401, "Incorrect API key provided: sk-***.", "invalid_request_error", "invalid_api_key")
        elif fault in ("reset", "hang", "html", "server_error", "rate_limit", "insufficient_quota"):
            self._fail(exchange, fault)
        elif body["model"] not in NATIVE_DIMENSIONS:
            message = f"The model `{body['model']}` does not exist or you do not have access to it."
            _error(exchange, 404, message, "invalid_request_error", "model_not_found")
        elif (complaint := _complaint(body)) is not None:
            _error(exchange, 400, complaint, "invalid_request_error")
        else:
            self._embed(exchange, body, fault)

    def _due_fault(self) -> str | None:
        if self.fault is None or self.fault_count is None:
            return self.fault
        self.fault_count -= 1
        return self.fault if self.fault_count >= 0 else None

    def _fail(self, exchange: Exchange, fault: str) -> None:
        match fault:
            case "reset":
                exchange.reset()
            case "hang":
                exchange.hang()
            case "html":
                exchange.send_html()
            case "server_error":
                _error(exchange, 500, "The server had an error while processing your request.", "server_error")
            case "rate_limit":
                headers = {"Retry-After": self.retry_after} if self.retry_after else {}
                message = "Rate limit reached for text-embedding-3-small: Limit 1000000."
                _error(exchange, 429, message, "tokens", "rate_limit_exceeded", headers=headers)
            case "insufficient_quota":
                message = "You exceeded your current quota, please check your plan and billing details."
                _error(exchange, 429, message, "insufficient_quota", "insufficient_quota")

    def _embed(self, exchange: Exchange, body: dict[str, Any], fault: str | None) -> None:
        dimensions = body.get("dimensions", NATIVE_DIMENSIONS[body["model"]])
        inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
        vectors: list[Any] = [unit_vector(text, dimensions) for text in inputs]
        if fault in VECTOR_FAULTS:
            vectors = spoil(vectors, fault)
        rows: list[dict[str, Any]] = [
            {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
        ]
        match fault:
            case "permuted":
                rows.reverse()
            case "duplicate_index":
                rows[-1]["index"] = 0
            case "no_index":
                del rows[-1]["index"]
        tokens = sum(_tokens(text) for text in inputs)
        content = {
            "object": "list",
            "data": rows,
            "model": body["model"],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
        match fault:
            case "cut":
                exchange.begin_stream(media_type="application/json")
                exchange.stream(json.dumps(content).encode()[:-100])
                exchange.cut()
            case "drip":
                exchange.begin_stream(media_type="application/json")
                exchange.drip(b" ")
            case "endless":
                exchange.begin_stream(media_type="application/json")
                exchange.drip(b" " * 1_000_000, every_s=0.0)
            case "no_json":
                exchange.send(200, b'{"object": "list", "data": [')
            case "deep_json":
                exchange.send(200, b"[" * 100_000)
            case _:
                exchange.send(200, content)


@contextmanager
def fake_openai(**options: Any) -> Iterator[FakeOpenAI]:
    """Run a FakeOpenAI until the block ends."""
    fake = FakeOpenAI(**options)
    with serving(fake.answer) as fake.server:
        yield fake


def _tokens(text: str) -> int:
    # About what a byte-pair encoding of English makes of it.
    return -(-len(text.encode()) // 4)


def _complaint(body: dict[str, Any]) -> str | None:
    inputs = [body["input"]] if isinstance(body["input"], str) else body["input"]
    native = NATIVE_DIMENSIONS[body["model"]]
    if not inputs or any(text == "" for text in inputs):
        return "'$.input' is invalid. Please check the API reference."
    if len(inputs) > MAX_INPUTS:
        return f"'$.input' is too long: array must have at most {MAX_INPUTS} items."
    longest = max(map(_tokens, inputs))
    if longest > MAX_INPUT_TOKENS:
        return (
            f"This model's maximum context length is {MAX_INPUT_TOKENS} tokens, however you requested {longest}"
            f" tokens ({longest} in your prompt; 0 for the completion). Please reduce your prompt."
        )
    if sum(map(_tokens, inputs)) > MAX_REQUEST_TOKENS:
        return f"Requested too many tokens, max {MAX_REQUEST_TOKENS} tokens per request"
    if "dimensions" in body and body["model"] == "text-embedding-ada-002":
        return "This model does not support specifying dimensions."
    if body.get("dimensions", 1) > native:
        return f"Invalid value for 'dimensions': must be at most {native}."
    if body.get("encoding_format", "float") != "float":
        return "this fake answers in floats only"
    return None


def _error(
    exchange: Exchange,
    status: int,
    message: str,
    kind: str,
    code: str | None = None,
    *,
    headers: dict[str, str] | None = None,
) -> None:
    error = {"message": message, "type": kind, "param": None, "code": code}
    exchange.send(status, {"error": error}, headers=headers)
