"""Ollama's own protocol: `/api/chat` obeys num_ctx and can say when a prompt is too long, `/v1` cannot.

By default Ollama cuts an over-long prompt from the front and answers with status 200; `truncate: false`
and `shift: false` turn both kinds of cutting into an error or a `done_reason`.
"""

from __future__ import annotations

import re
from contextlib import aclosing

import httpx2

from rag.chat import (
    LIST_TIMEOUT_S,
    ChatRequest,
    ChatResult,
    Refused,
    Sink,
    Transcript,
    calling,
    chat_http,
    count,
    frame_in,
    lines,
    parse,
    read,
    refusal,
    reported,
)
from rag.errors import LLMError, LLMIncompleteError

# Newer versions stream the first; a single answer, or a proxy that gathers one, is the second.
_STREAMS = ("application/x-ndjson", "application/json")

_NO_OLLAMA = "What answers at OLLAMA_BASE_URL is no Ollama server."

# A Modelfile's parameters come as text, one a line.
_NUM_CTX = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)


class OllamaClient:
    """One Ollama server. Close it in the event loop that used it."""

    def __init__(self, base_url: str, *, timeout_s: float) -> None:
        """`timeout_s` bounds a whole generation, from the first byte sent to the last received."""
        self._timeout_s = timeout_s
        self._http = chat_http(base_url, timeout_s=timeout_s)
        self._unmarked: set[str] = set()
        """Models that were heard to think without a mark where it begins."""

    async def available_models(self) -> list[str]:
        models = (await self._ask("GET", "/api/tags")).get("models")
        if not isinstance(models, list) or not all(isinstance(model, dict) and "name" in model for model in models):
            raise LLMError(_NO_OLLAMA)
        return [str(model["name"]) for model in models]

    async def context_length(self, model: str) -> int | None:
        """What the model was trained for, or its Modelfile's num_ctx where that is less."""
        found = await self._ask("POST", "/api/show", model=model)
        info = found.get("model_info")
        trained = None
        if isinstance(info, dict):
            trained = count(info.get(f"{info.get('general.architecture')}.context_length"))
        parameters = found.get("parameters")
        set_to = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
        known = [length for length in (trained, int(set_to[1]) if set_to else None) if length]
        return min(known, default=None)

    async def chat(
        self, request: ChatRequest, *, sink: Sink | None = None, deadline: float | None = None
    ) -> ChatResult:
        transcript = Transcript(sink, hold=request.model in self._unmarked)
        try:
            async with (
                calling(self._timeout_s, deadline=deadline) as call,
                self._http.stream("POST", "/api/chat", json=_body(request)) as response,
            ):
                if response.headers.get("content-type", "").partition(";")[0].strip().lower() not in _STREAMS:
                    raise LLMError(_NO_OLLAMA)
                call.answered = True
                return await _gather(response, transcript)
        except Refused as refused:
            raise refusal(refused, missing=self.missing(request.model)) from None
        finally:
            if transcript.unmarked:
                self._unmarked.add(request.model)

    def same_model(self, left: str, right: str) -> bool:
        return same_model(left, right)

    def missing(self, model: str) -> str:
        return f"model '{model}' is not installed; run: ollama pull {model}"

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, method: str, path: str, *, model: str | None = None) -> dict[str, object]:
        """A short question about the server or a model, and its answer's JSON object."""
        request = None if model is None else {"model": model}
        try:
            async with (
                calling(min(self._timeout_s, LIST_TIMEOUT_S)),
                self._http.stream(method, path, json=request) as response,
            ):
                return parse(await read(response))
        except Refused as refused:
            raise refusal(refused, missing=_NO_OLLAMA if model is None else self.missing(model)) from None
        except ValueError as error:
            raise LLMError(_NO_OLLAMA) from error


def same_model(left: str, right: str) -> bool:
    """Whether two names mean the same model on a server: compared whole, with Ollama's defaults filled in."""
    return _whole_name(left) == _whole_name(right)


def _whole_name(name: str) -> str:
    # Ollama fills in the namespace and the tag, and compares without regard to case.
    path, slash, last = name.strip().casefold().rpartition("/")
    if path == "library":
        path, slash = "", ""
    return f"{path}{slash}{last}" if ":" in last else f"{path}{slash}{last}:latest"


def _body(request: ChatRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": request.model,
        "messages": [{"role": turn["role"], "content": turn["content"]} for turn in request.messages],
        # A stream shows that the server is alive, and stops it when we hang up.
        "stream": True,
        "truncate": False,
        "shift": False,
        "think": False,
        "options": {
            "num_ctx": request.window_tokens,
            "num_predict": request.response_tokens,
            "temperature": request.temperature,
        },
    }
    if request.schema is not None:
        body["format"] = request.schema
    return body


async def _gather(response: httpx2.Response, transcript: Transcript) -> ChatResult:
    """Join a stream of JSON lines to the answer that it carries."""
    async with aclosing(lines(response)) as stream:
        async for line in stream:
            frame = frame_in(line)
            if "error" in frame:
                raise reported(frame["error"], begun=transcript.sent)
            message = frame.get("message")
            if isinstance(message, dict):
                transcript.think(message.get("thinking"))
                await transcript.add(message.get("content"))
            if frame.get("done") is True:
                # Older versions give no reason.
                return await transcript.finish(frame.get("done_reason") or "stop")
    raise LLMIncompleteError
