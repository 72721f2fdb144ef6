"""Ollama's own protocol: `/api/chat` obeys num_ctx and can say when a prompt is too long, `/v1` cannot.

By default Ollama cuts an over-long prompt from the front and answers with status 200; `truncate: false`
and `shift: false` turn both kinds of cutting into an error or a `done_reason`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import httpx2

from rag.errors import (
    ContextOverflowError,
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelUnavailableError,
)

# A server on the other side of the world answers a connection in less than one.
CONNECT_TIMEOUT_S = 5.0
# Spec 001, "Model Selection".
TAGS_TIMEOUT_S = 5.0
# The longest answer allowed has 4,096 tokens, about 20 KiB; a loop is stopped here.
MAX_ANSWER_BYTES = 1024 * 1024
# A line carries one token, or the whole answer when a proxy gathered it.
MAX_LINE_BYTES = 2 * MAX_ANSWER_BYTES
# Of a server's explanation, so much may reach a message or a log.
MAX_QUOTE = 200

# llama.cpp's sentence, with the count, and the other ways in which Ollama says the same without it.
_OVERFLOW_COUNT = re.compile(r"request \((\d{1,9}) tokens\) exceeds the available context")
_OVERFLOW = re.compile(
    r"exceed_context_size|exceeds the (available context|context length)|longer than the context length"
    r"|exceeds maximum context length",
)
# As the server nests its errors: its own, and llama.cpp's as a string inside, with room for a proxy's.
_MAX_NESTING = 4

_NO_OLLAMA = "What answers at OLLAMA_BASE_URL is no Ollama server."
_NO_LINES = "The model server sends something else than lines of JSON."


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatResult:
    """A finished answer. Token counts are the server's, None when it gave none."""

    text: str
    prompt_tokens: int | None
    answer_tokens: int | None
    done_reason: str

    @property
    def truncated(self) -> bool:
        """The answer ends because num_predict or the context window was used up."""
        return self.done_reason == "length"


class OllamaClient:
    """One Ollama server. Close it in the event loop that used it."""

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        """`timeout_s` bounds a whole generation, from the first byte sent to the last received."""
        self._timeout_s = timeout_s
        try:
            self._http = http_client(base_url, timeout_s=timeout_s)
        except httpx2.InvalidURL as error:
            raise LLMConnectionError("the address of the model server is not a URL") from error

    async def available_models(self) -> list[str]:
        """The installed models' whole names, tag included.

        Raises LLMConnectionError, LLMTimeoutError, or LLMError when it is no Ollama that answers.
        """
        try:
            async with asyncio.timeout(min(self._timeout_s, TAGS_TIMEOUT_S)):
                async with self._http.stream("GET", "/api/tags") as response:
                    body = await _read(response)
        except TimeoutError as error:
            raise LLMTimeoutError("the model server does not answer in time") from error
        except httpx2.RequestError as error:
            raise LLMConnectionError from error
        if response.status_code != httpx2.codes.OK:
            raise _refusal(response.status_code, body, model=None)
        try:
            models = json.loads(body)["models"]
            return [str(model["name"]) for model in models]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise LLMError(_NO_OLLAMA) from error

    async def chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, str]],
        num_ctx: int,
        num_predict: int,
        temperature: float,
        schema: Mapping[str, object] | None = None,
        sink: Callable[[str], Awaitable[None]] | None = None,
        deadline: float | None = None,
    ) -> ChatResult:
        """Generate one answer to messages of `role` and `content`; `sink` gets its pieces as they arrive.

        `schema` is a JSON Schema that the answer shall fit; `deadline` a moment of the event loop's clock.
        Raises ContextOverflowError when the prompt does not fit into `num_ctx`, ModelUnavailableError,
        LLMConnectionError, LLMTimeoutError, LLMIncompleteError for an answer that breaks off or is
        empty, LLMError for what the server reports.
        """
        request: dict[str, object] = {
            "model": model,
            "messages": [{"role": turn["role"], "content": turn["content"]} for turn in messages],
            # A stream shows that the server is alive, and stops it when we hang up.
            "stream": True,
            "truncate": False,
            "shift": False,
            "think": False,
            "options": {"num_ctx": num_ctx, "num_predict": num_predict, "temperature": temperature},
        }
        if schema is not None:
            request["format"] = schema
        started = False
        due = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.timeout_at(due if deadline is None else min(due, deadline)):
                async with self._http.stream("POST", "/api/chat", json=request) as response:
                    if response.status_code != httpx2.codes.OK:
                        raise _refusal(response.status_code, await _read(response), model=model)
                    if "html" in response.headers.get("content-type", ""):
                        raise LLMError(_NO_OLLAMA)
                    started = True
                    return await _gather(response.aiter_bytes(), sink)
        except (TimeoutError, httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            raise LLMTimeoutError from error
        except httpx2.RequestError as error:
            if started:
                raise LLMIncompleteError from error
            raise LLMConnectionError from error

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


def same_model(left: str, right: str) -> bool:
    """Whether two names mean the same model on a server: compared whole, with Ollama's defaults filled in."""
    return _whole_name(left) == _whole_name(right)


def http_client(base_url: str, *, timeout_s: float) -> httpx2.AsyncClient:
    """A client for a model server; the system's proxies are not asked for this machine's own addresses.

    Raises httpx2.InvalidURL.
    """
    local = httpx2.URL(base_url).host in ("localhost", "127.0.0.1", "::1")
    return httpx2.AsyncClient(
        base_url=base_url,
        timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        trust_env=not local,
    )


def _whole_name(name: str) -> str:
    # Ollama fills in the namespace and the tag, and compares without regard to case.
    path, slash, last = name.strip().casefold().rpartition("/")
    if path == "library":
        path, slash = "", ""
    return f"{path}{slash}{last}" if ":" in last else f"{path}{slash}{last}:latest"


async def _gather(parts: AsyncIterator[bytes], sink: Callable[[str], Awaitable[None]] | None) -> ChatResult:
    """Join a stream of JSON lines to the answer that it carries."""
    text: list[str] = []
    size = 0
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise LLMIncompleteError(_NO_LINES)
        for line in filter(bytes.strip, lines):
            try:
                frame = _frame(line)
            except ContextOverflowError as error:
                if sink is None or not text:
                    raise
                # Whoever has heard half an answer cannot be given another one.
                raise LLMIncompleteError from error
            content = _content(frame)
            size += len(content.encode(errors="replace"))
            if size > MAX_ANSWER_BYTES:
                raise LLMIncompleteError("The model did not come to an end and was stopped.")
            if content:
                text.append(content)
                if sink is not None:
                    await sink(content)
            if frame.get("done") is True:
                return _result("".join(text), frame)
    if rest.strip():
        # Ollama ends every line; what has no end was cut, unless it is an error.
        _frame(rest)
    raise LLMIncompleteError


def _frame(line: bytes) -> dict[str, object]:
    try:
        frame = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise LLMIncompleteError(_NO_LINES) from error
    if not isinstance(frame, dict):
        raise LLMIncompleteError(_NO_LINES)
    if "error" in frame:
        raise _reported(frame["error"])
    return frame


def _content(frame: Mapping[str, object]) -> str:
    message = frame.get("message")
    content = message.get("content", "") if isinstance(message, dict) else ""
    return content if isinstance(content, str) else ""


def _result(text: str, last: Mapping[str, object]) -> ChatResult:
    reason = last.get("done_reason")
    result = ChatResult(
        text=text,
        prompt_tokens=_count(last.get("prompt_eval_count")),
        answer_tokens=_count(last.get("eval_count")),
        done_reason=reason if isinstance(reason, str) else "stop",
    )
    if not text.strip():
        raise LLMIncompleteError("The model returned an empty answer.")
    return result


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None


async def _read(response: httpx2.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_LINE_BYTES:
            raise LLMError("The model server's answer is too long to be one.")
    return bytes(body)


def _refusal(status: int, body: bytes, *, model: str | None) -> LLMError:
    """The error for an HTTP status other than 200."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    error = parsed.get("error") if isinstance(parsed, dict) else None
    # An HTML 404 comes from a server that is no Ollama, whatever models it might have.
    if status == 404 and model is not None and isinstance(error, str):
        return ModelUnavailableError(f"model '{model}' is not installed; run: ollama pull {model}")
    # 503 is a full queue, the others are proxies in front.
    if status in (429, 502, 503, 504):
        return LLMConnectionError()
    if error is None:
        return LLMError(f"The model server answers with HTTP {status}.")
    return _reported(error)


def _reported(error: object) -> LLMError:
    """What an `error` field says: a context overflow, or the server's own words, shortened."""
    prompt_tokens = _overflow(error)
    if prompt_tokens is not None:
        return ContextOverflowError(prompt_tokens=prompt_tokens or None)
    words = " ".join(str(error).split())
    return LLMError(f"The model server reports: {words[:MAX_QUOTE]}")


def _overflow(error: object, *, depth: int = 0) -> int | None:
    """The prompt's true length if this is a context overflow, 0 if it does not say; None for other errors.

    The body is `{"error": TEXT}`, where TEXT is llama.cpp's own body, again JSON, perhaps with more lines
    behind it: `{"error": {"type": "exceed_context_size_error", "n_prompt_tokens": 351, …}}`.
    """
    if isinstance(error, dict):
        if error.get("type") == "exceed_context_size_error":
            tokens = _count(error.get("n_prompt_tokens"))
            return tokens or _overflow(error.get("message"), depth=depth) or 0
        inner = error.get("error", error.get("message"))
        return None if depth >= _MAX_NESTING else _overflow(inner, depth=depth + 1)
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
    counted = _OVERFLOW_COUNT.search(error)
    if counted is not None:
        return int(counted[1])
    return 0 if _OVERFLOW.search(error) else None
