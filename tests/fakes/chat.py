"""How a chat can go wrong, whatever the protocol: each fault is told in the dialect of the server that has it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tests.fakes import Exchange

Message = dict[str, str]

# What a chat template adds around each message.
TEMPLATE_TOKENS = 4
# Of zeros, which travel as a thousandth.
BOMB_MIB = 256


class Dialect(Protocol):
    """How a protocol says it."""

    media_type: str

    def token(self, text: str) -> bytes:
        """A frame with the next piece of the answer."""

    def thought(self, text: str) -> bytes:
        """A frame with a thought that is kept apart from the answer."""

    def end(self, reason: str) -> bytes:
        """The last frame: `stop` or `length`."""

    def problem(self, message: str, *, kind: str) -> object:
        """The body of an error."""

    def overflow(self, prompt_tokens: int, window: int) -> object:
        """The body of the error about a prompt that is too long."""

    def error(self, body: object) -> bytes:
        """A frame with such a body, in the middle of a stream."""


# Instead of an answer, whatever was asked.
REFUSALS = (
    "reset",
    "slow",  # says nothing until the client gives up
    "slow_headers",
    "html",
    "plain",  # an answer that says to be something else
    "redirect",
    "compressed",
    "crash",
    "busy",
    "busy_later",  # and says when to come back
    "bad_gateway",
    "rate_limit",
    "missing_model",
    "endless_refusal",
)
# In an answer that began well.
INTERRUPTIONS = (
    "slow_body",
    "drip",  # sends tokens for ever, slowly
    "endless",  # the same, as fast as it can
    "endless_line",
    "endless_silence",  # frames without content
    "endless_thoughts",
    "thoughts_only",
    "error_line",
    "overflow_line",
    "cut",  # the connection breaks in the middle of a frame
    "reset_in_line",
    "no_done",  # the stream ends well, but the answer has not
    "never_ends",  # all of the answer, and then silence
    "odd_end",  # for a reason that is none
    "invalid_utf8",
    "half_surrogate",
    "no_json",
    "nan",
    "repeated_key",
    "deep_json",
    "number_for_text",
    "empty",
)
# Of a prompt alone; how long it is, the server counts.
OVERFLOWS = ("overflow", "overflow_without_count")
FAULTS = (*REFUSALS, *OVERFLOWS, *INTERRUPTIONS)
OVERFLOW = "the input length exceeds the context length"


def refuse(exchange: Exchange, fault: str | None, dialect: Dialect) -> bool:
    """Answer as one of the REFUSALS; False when the fault is another one."""
    match fault:
        case "reset":
            exchange.reset()
        case "slow":
            exchange.hang()
        case "slow_headers":
            exchange.begin_slowly()
        case "html":
            exchange.send_html()
        case "plain":
            whole = dialect.token("It is so.") + dialect.end("stop")
            exchange.send(200, whole, media_type="text/plain")
        case "redirect":
            exchange.send(307, b"", headers={"Location": f"{exchange.server.url}/elsewhere"})
        case "compressed":
            exchange.send(200, _bomb(), media_type=dialect.media_type, headers={"Content-Encoding": "gzip"})
        case "crash":
            message = "llama runner process has terminated: signal: killed"
            exchange.send(500, dialect.problem(message, kind="server_error"))
        case "busy":
            message = "server busy, please try again.  maximum pending requests exceeded"
            exchange.send(503, dialect.problem(message, kind="server_error"))
        case "busy_later":
            message = "server busy, please try again.  maximum pending requests exceeded"
            exchange.send(503, dialect.problem(message, kind="server_error"), headers={"Retry-After": "1"})
        case "bad_gateway":
            exchange.send_html(502)
        case "rate_limit":
            exchange.send(429, dialect.problem("Rate limit reached", kind="rate_limit_exceeded"))
        case "missing_model":
            exchange.send(404, dialect.problem("model 'llama3.2' not found", kind="model_not_found"))
        case "endless_refusal":
            exchange.send_response(500)
            exchange.send_header("Content-Type", "application/json")
            exchange.send_header("Transfer-Encoding", "chunked")
            exchange.end_headers()
            exchange.drip(b" " * 100_000, every_s=0.0)
        case _:
            return False
    return True


def speak(exchange: Exchange, dialect: Dialect, tokens: Sequence[str], *, reason: str, fault: str | None) -> None:
    """Stream an answer, or begin to and fall into one of the INTERRUPTIONS."""
    exchange.begin_stream(media_type=dialect.media_type)
    if fault not in INTERRUPTIONS or fault in ("empty", "never_ends"):
        for token in tokens:
            exchange.stream(dialect.token(token))
        if fault == "never_ends":
            exchange.hang()
        exchange.stream(dialect.end(reason))
        exchange.end_stream()
        return
    if fault == "thoughts_only":
        exchange.stream(dialect.thought("Is it so?"))
        exchange.stream(dialect.token("<think>It may be"))
        exchange.stream(dialect.end("length"))
        exchange.end_stream()
        return
    exchange.stream(dialect.token("It is"))
    match fault:
        case "slow_body":
            exchange.hang()
        case "drip":
            exchange.drip(dialect.token(" and"))
        case "endless":
            exchange.drip(dialect.token(" and on" * 1000), every_s=0.0)
        case "endless_line":
            exchange.drip(b"x" * 100_000, every_s=0.0)
        case "endless_silence":
            exchange.drip(dialect.token("") * 500, every_s=0.0)
        case "endless_thoughts":
            exchange.drip(dialect.thought(" and on" * 1000), every_s=0.0)
        case "error_line":
            body = dialect.problem("model runner has unexpectedly stopped", kind="server_error")
            exchange.stream(dialect.error(body))
            exchange.end_stream()
        case "overflow_line":
            exchange.stream(dialect.error(dialect.overflow(9000, 8192)))
            exchange.end_stream()
        case "cut":
            exchange.stream(dialect.token(" so.")[:-20])
            exchange.cut()
        case "reset_in_line":
            exchange.stream(dialect.token(" so.")[:-20])
            exchange.reset()
        case "no_done":
            exchange.end_stream()
        case "no_json":
            exchange.stream(b"data: {]\n\n")
            exchange.end_stream()
        case "deep_json":
            exchange.stream(_spoilt(dialect, b'" so."', b"[" * 100_000))
            _end(exchange, dialect)
        case "nan":
            exchange.stream(_spoilt(dialect, b'" so."', b'" so.", "score": NaN'))
            _end(exchange, dialect)
        case "repeated_key":
            exchange.stream(_spoilt(dialect, b'" so."', b'" so.", "content": " not."'))
            _end(exchange, dialect)
        case "number_for_text":
            exchange.stream(_spoilt(dialect, b'" so."', b"7"))
            _end(exchange, dialect)
        case "invalid_utf8":
            exchange.stream(_spoilt(dialect, b" so.", b" caf\xe9"))
            _end(exchange, dialect)
        case "half_surrogate":
            exchange.stream(_spoilt(dialect, b" so.", b" \\ud83d"))
            _end(exchange, dialect)
        case "odd_end":
            exchange.stream(dialect.end("unload"))
            exchange.end_stream()
        case _:
            raise ValueError(fault)


def _bomb() -> bytes:
    packer = zlib.compressobj(level=9, wbits=-zlib.MAX_WBITS)
    # What is flushed fully stands alone, and can be repeated without being made again.
    mebibyte = packer.compress(bytes(1024 * 1024)) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + mebibyte * BOMB_MIB


def _spoilt(dialect: Dialect, whole: bytes, damaged: bytes) -> bytes:
    frame = dialect.token(" so.")
    assert whole in frame
    return frame.replace(whole, damaged)


def _end(exchange: Exchange, dialect: Dialect) -> None:
    exchange.stream(dialect.end("stop"))
    exchange.end_stream()


def fill_in(schema: Mapping[str, Any], messages: Sequence[Message]) -> str:
    """What a server writes that is held to a JSON Schema, whatever it thinks: the shortest that fits."""
    return json.dumps(_filled(schema))


def _filled(schema: Mapping[str, Any]) -> object:
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            return {name: _filled(fields.get(name, {})) for name in schema.get("required", fields)}
        case "array":
            return [_filled(schema["items"])] * schema.get("minItems", 0)
        case "integer" | "number":
            return min(80, schema.get("maximum", 80))
        case "boolean":
            return True
        case _:
            return "It is so."


def count_words(text: str) -> int:
    """The default tokenizer of the fakes."""
    return len(text.split())


def prompt_tokens(messages: Sequence[Message], count: Callable[[str], int]) -> int:
    """What a template makes of messages, in tokens of a tokenizer."""
    return sum(count(message["content"]) + TEMPLATE_TOKENS for message in messages)


def tokens_of(text: str) -> list[str]:
    """One token a word, each with the space in front of it."""
    return [word if at == 0 else f" {word}" for at, word in enumerate(text.split(" "))] if text else []
