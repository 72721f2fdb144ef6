"""What holds for every model server: how an answer is gathered, what of it is believed, what a refusal means."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol

import httpx2

from rag.errors import (
    ContextOverflowError,
    LLMBusyError,
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelUnavailableError,
)

Sink = Callable[[str], Awaitable[None]]
"""Takes the pieces of an answer as they arrive. While it waits, so does the model."""

# A server on the other side of the world answers a connection in less than one.
CONNECT_TIMEOUT_S = 5.0
# Spec 001, "Model Selection".
LIST_TIMEOUT_S = 5.0
# The longest answer allowed has 4,096 tokens, about 20 KiB; a loop is stopped here, thoughts included.
MAX_ANSWER_BYTES = 1024 * 1024
# A line carries one token, or the whole answer when a proxy gathered it.
MAX_LINE_BYTES = 2 * MAX_ANSWER_BYTES
# Around each token stand 100 to 400 bytes of JSON.
MAX_STREAM_BYTES = 8 * MAX_ANSWER_BYTES
# Of a server's explanation, so much may reach a message or a log.
MAX_QUOTE = 200

_ENDLESS = "The model did not come to an end and was stopped."
_NO_FRAMES = "The model server sends something else than its protocol has."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What a model is asked."""

    model: str
    messages: Sequence[Mapping[str, str]]
    """Each with `role` and `content`."""
    window_tokens: int
    """For prompt and answer together, where a server can be told."""
    response_tokens: int
    temperature: float
    schema: Mapping[str, object] | None = None
    """A JSON Schema that the answer shall fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """A finished answer."""

    text: str
    truncated: bool
    """The answer ends because its limit of tokens or the context window was used up."""


class ChatClient(Protocol):
    """One model server. Close it in the event loop that used it."""

    async def available_models(self) -> list[str]:
        """The models' whole names.

        Raises LLMConnectionError, LLMTimeoutError, or LLMError when it is no such server that answers.
        """

    async def context_length(self, model: str) -> int | None:
        """How many tokens the model can read and write together, None when the server does not say.

        Raises as `available_models` does, and ModelUnavailableError.
        """

    async def chat(
        self, request: ChatRequest, *, sink: Sink | None = None, deadline: float | None = None
    ) -> ChatResult:
        """Generate one answer; `sink` gets its pieces as they arrive. `deadline`: of the event loop's clock.

        Raises ContextOverflowError when the prompt does not fit (and never after the sink was given a piece),
        ModelUnavailableError, LLMConnectionError, LLMBusyError, LLMTimeoutError, LLMIncompleteError for an
        answer that breaks off or is empty, LLMError for what else the server reports.
        """

    def same_model(self, left: str, right: str) -> bool:
        """Whether two names mean one model on this server."""

    def missing(self, model: str) -> str:
        """What to say when the server does not have a model."""

    async def close(self) -> None:
        """Close the connections."""


# --- the connection ------------------------------------------------------------------------------


def http_client(base_url: str, *, timeout_s: float) -> httpx2.AsyncClient:
    """A client for a model server; the system's proxies are not asked for this machine's own addresses.

    Raises httpx2.InvalidURL.
    """
    local = httpx2.URL(base_url).host in ("localhost", "127.0.0.1", "::1")
    return httpx2.AsyncClient(
        base_url=base_url,
        timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        # Its own limit of 100 would be a second queue, in which nobody is told to come back later.
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=20),
        trust_env=not local,
    )


def chat_http(base_url: str, *, timeout_s: float) -> httpx2.AsyncClient:
    """A client that raises Refused for every status but 200, and takes no compressed bodies.

    Nothing follows a redirect: the prompt and the key are for this server alone.
    Raises LLMConnectionError for an address that is none.
    """
    try:
        client = http_client(base_url, timeout_s=timeout_s)
    except httpx2.InvalidURL as error:
        raise LLMConnectionError("the address of the model server is not a URL") from error
    client.headers["Accept-Encoding"] = "identity"
    client.event_hooks = {"response": [_refuse]}
    return client


class Refused(Exception):
    """The server answered with another status than 200."""

    def __init__(self, status: int, body: bytes, *, retry_after_s: float | None) -> None:
        super().__init__(status)
        self.status = status
        self.error = _error_in(body)
        self.retry_after_s = retry_after_s


async def _refuse(response: httpx2.Response) -> None:
    # A few kilobytes that unpack to gigabytes would have to be stopped at every place that reads.
    if response.headers.get("content-encoding", "identity") != "identity":
        raise LLMError("The model server compresses its answers, although it was asked not to.")
    if response.status_code != httpx2.codes.OK:
        raise Refused(
            response.status_code,
            await read(response),
            retry_after_s=_retry_after(response.headers.get("retry-after")),
        )


def _retry_after(header: str | None) -> float | None:
    """Seconds, from either form of the header (RFC 9110, section 10.2.3)."""
    if header is None:
        return None
    if header.isascii() and header.isdecimal():
        return float(header)
    try:
        moment = parsedate_to_datetime(header)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


async def read(response: httpx2.Response) -> bytes:
    """A whole body. Raises LLMError when it is too long to be an answer."""
    body = bytearray()
    async with aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            body += part
            if len(body) > MAX_LINE_BYTES:
                raise LLMError("The model server's answer is too long to be one.")
    return bytes(body)


@dataclass(slots=True)
class Call:
    """One request under way."""

    answered: bool = False
    """The server has begun to answer with status 200."""


@asynccontextmanager
async def calling(timeout_s: float, *, deadline: float | None = None) -> AsyncIterator[Call]:
    """Run a request within its time, and say in our errors what the connection did."""
    call = Call()
    now = asyncio.get_running_loop().time()
    short = deadline is not None and deadline < now + timeout_s
    try:
        async with asyncio.timeout_at(deadline if short else now + timeout_s) as limit:
            yield call
    except TimeoutError as error:
        if not limit.expired():
            raise
        # A deadline that the caller had nearly used up says nothing about the server.
        raise LLMTimeoutError(silent=not call.answered and not short) from error
    except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
        raise LLMTimeoutError(silent=not call.answered) from error
    except httpx2.ConnectError as error:
        # Nothing was sent, so that nothing is done twice.
        raise LLMConnectionError(retry_after_s=0.0) from error
    except httpx2.RequestError as error:
        if call.answered:
            raise LLMIncompleteError from error
        raise LLMConnectionError from error


# --- what is read --------------------------------------------------------------------------------


async def lines(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """The lines of a stream, without the empty ones; the last one may lack its end."""
    rest = b""
    size = 0
    async with aclosing(response.aiter_bytes()) as parts:
        async for part in parts:
            size += len(part)
            *whole, rest = (rest + part).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise LLMIncompleteError(_NO_FRAMES)
            if size > MAX_STREAM_BYTES:
                raise LLMIncompleteError(_ENDLESS)
            for line in whole:
                if line.strip():
                    yield line.strip()
    if rest.strip():
        yield rest.strip()


def parse(text: bytes) -> dict[str, object]:
    """A JSON object. Raises ValueError for anything else, NaN and repeated keys included."""
    try:
        parsed = json.loads(text.decode(), parse_constant=_no_constant, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(parsed, dict):
        raise ValueError("no object")
    return parsed


def frame_in(text: bytes) -> dict[str, object]:
    """The JSON object of a stream's frame. Raises LLMIncompleteError as `parse` raises ValueError."""
    try:
        return parse(text)
    except ValueError as error:
        raise LLMIncompleteError(_NO_FRAMES) from error


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    # Of `"done": true` and `"done": false` one is wrong, and nobody knows which.
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def count(value: object) -> int | None:
    """A number of tokens, if it is one."""
    return value if type(value) is int and value >= 0 else None


# A model that thinks although it was told not to, on a server that does not keep its thoughts apart.
_THINKING = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_MARKS = ("<think>", "</think>", "<thinking>", "</thinking>")


class Transcript:
    """An answer while it arrives. The thoughts of the model are left out, the rest goes to the sink."""

    def __init__(self, sink: Sink | None, *, hold: bool) -> None:
        """`hold` keeps everything back until the thoughts have ended: for a model that does not mark their start."""
        self._sink = sink
        self._hold = hold
        self._text: list[str] = []
        self._rest = ""
        self._size = 0
        self._thinking = False
        self._thought = False
        self.sent = False
        """The sink has had a piece."""
        self.unmarked = False
        """Thoughts ended that had not begun: what came before was one, without the mark."""

    def think(self, thoughts: object) -> None:
        """Take note of thoughts that came apart from the answer."""
        if isinstance(thoughts, str) and thoughts:
            self._thought = True
            self._grow(thoughts)

    async def add(self, content: object) -> None:
        """Take the next piece; None is one without content."""
        if content is None:
            return
        if not isinstance(content, str):
            raise LLMIncompleteError(_NO_FRAMES)
        self._grow(content)
        text = self._rest + content
        shown: list[str] = []
        start = 0
        for mark in _THINKING.finditer(text):
            if not self._thinking:
                shown.append(text[start : mark.start()])
                if mark[1]:
                    self._forget()
                    shown.clear()
            self._thinking = not mark[1]
            self._thought = True
            start = mark.end()
        cut = _begun_mark(text, start)
        self._rest = text[cut:]
        if not self._thinking:
            shown.append(text[start:cut])
        await self._show("".join(shown))

    async def finish(self, reason: object) -> ChatResult:
        """The whole answer, given the server's reason for its end.

        Raises LLMIncompleteError for one without a word, and where the reason is none for an answer to end: a
        filter, an abort, a model that was unloaded.
        """
        if reason not in ("stop", "length"):
            raise LLMIncompleteError(f"The model ended its answer early: {str(reason)[:MAX_QUOTE]}.")
        if not self._thinking:
            await self._show(self._rest)
        text = "".join(self._text)
        if not text.strip():
            said = "used up its answer by thinking" if self._thought else "returned an empty answer"
            raise LLMIncompleteError(f"The model {said}.")
        if self._hold and self._sink is not None:
            await self._sink(text)
        return ChatResult(text=text, truncated=reason == "length")

    def _grow(self, text: str) -> None:
        try:
            self._size += len(text.encode())
        except UnicodeEncodeError as error:
            # Half of a surrogate pair, which no reader could be sent.
            raise LLMIncompleteError(_NO_FRAMES) from error
        if self._size > MAX_ANSWER_BYTES:
            raise LLMIncompleteError(_ENDLESS)

    def _forget(self) -> None:
        self.unmarked = True
        if self.sent:
            raise LLMIncompleteError("The model's thoughts came without a mark where they begin; ask again.")
        self._text.clear()
        self._hold = False

    async def _show(self, text: str) -> None:
        if self._thought and not self._text:
            text = text.lstrip()
        if not text:
            return
        self._text.append(text)
        if self._sink is not None and not self._hold:
            self.sent = True
            await self._sink(text)


def _begun_mark(text: str, start: int) -> int:
    """Where a mark begins that the end of `text` cuts, else the end."""
    at = text.rfind("<", start)
    begun = at >= 0 and any(mark.startswith(text[at:].lower()) for mark in _MARKS)
    return at if begun else len(text)


# --- what a refusal means ------------------------------------------------------------------------

# As servers nest their errors: their own, and llama.cpp's as a string inside, with room for a proxy's.
_MAX_NESTING = 4
_OVERFLOW_CODES = ("exceed_context_size_error", "context_length_exceeded")
# The sentences of llama.cpp and Ollama, of OpenAI, and of vLLM and those that follow it.
_OVERFLOW = re.compile(
    r"exceed_context_size|context_length_exceeded|exceeds the (available context|context length)"
    r"|longer than the (context|maximum model) length|longer than the model's context length"
    r"|exceeds maximum context length|maximum context length is|prompt is too long"
)
_PROMPT_TOKENS = re.compile(
    r"request \((\d{1,9}) tokens\) exceeds|\((\d{1,9}) in the messages|resulted in (\d{1,9}) tokens"
    r"|(\d{1,9})\s+input tokens|prompt is too long: (\d{1,9}) tokens"
)
_WINDOW_TOKENS = re.compile(r"context size \((\d{1,9}) tokens\)|maximum context length is (\d{1,9})")


def refusal(refused: Refused, *, missing: str) -> LLMError:
    """The error for a status; `missing` is the message where the model is what is not found."""
    status, error = refused.status, refused.error
    # An HTML 404 comes from something else, whatever models it might have.
    if status == 404 and error is not None:
        return ModelUnavailableError(missing)
    if status in (401, 403):
        return ModelUnavailableError(f"the model server refuses the API key (HTTP {status})")
    if status == 408:
        return LLMTimeoutError()
    if status == 429:
        if "insufficient_quota" in _codes(error):
            return ModelUnavailableError("the account at the model server has no quota left")
        return LLMBusyError(retry_after_s=refused.retry_after_s)
    # 503 is a full queue, the others are proxies in front.
    if status in (502, 503, 504):
        return LLMConnectionError(retry_after_s=refused.retry_after_s if status == 503 else None)
    if error is None:
        return LLMError(f"The model server answers with HTTP {status}.")
    return reported(error)


def reported(error: object, *, begun: bool = False) -> LLMError:
    """What an `error` field says: a context overflow, or the server's own words, shortened.

    `begun`: a reader has heard half an answer, and cannot be given another one in its place.
    """
    overflow = _overflow(error)
    if overflow is not None and begun:
        return LLMIncompleteError()
    if overflow is not None:
        return ContextOverflowError(prompt_tokens=overflow[0], window_tokens=overflow[1])
    message = error.get("message") if isinstance(error, dict) else None
    words = " ".join(str(message or error).split())
    return LLMError(f"The model server reports: {words[:MAX_QUOTE]}")


def _codes(error: object) -> list[object]:
    return [error.get("code"), error.get("type")] if isinstance(error, dict) else []


def _error_in(body: bytes) -> object:
    """The error that a body carries, None when it is none of a model server's."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parsed, dict):
        return None
    if parsed.get("error") is not None:
        return parsed["error"]
    # vLLM's own; a bare `detail` is what a framework says of a path that it does not have.
    return parsed if isinstance(parsed.get("message"), str) else None


def _overflow(error: object, *, depth: int = 0) -> tuple[int | None, int | None] | None:
    """The tokens of the prompt and of the window if this is a context overflow, as far as it says; else None.

    Ollama's body is `{"error": TEXT}`, where TEXT is llama.cpp's own body, again JSON, perhaps with more lines
    behind it: `{"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 351, "n_ctx": 256, …}}`.
    """
    if isinstance(error, dict):
        inner = error.get("error", error.get("message"))
        found = None if depth >= _MAX_NESTING else _overflow(inner, depth=depth + 1)
        if found is None and any(code in _OVERFLOW_CODES for code in _codes(error)):
            found = (None, None)
        if found is None:
            return None
        prompt, window = found
        return count(error.get("n_prompt_tokens")) or prompt, count(error.get("n_ctx")) or window
    if not isinstance(error, str):
        return None
    if error.lstrip().startswith("{") and depth < _MAX_NESTING:
        try:
            parsed, _ = json.JSONDecoder().raw_decode(error.lstrip())
        except (ValueError, RecursionError):
            parsed = None
        found = _overflow(parsed, depth=depth + 1)
        if found is not None:
            return found
    if not _OVERFLOW.search(error):
        return None
    return _number(_PROMPT_TOKENS, error), _number(_WINDOW_TOKENS, error)


def _number(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else next(int(group) for group in found.groups() if group is not None)
