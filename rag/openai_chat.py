"""Chat with any server that speaks OpenAI's protocol: `GET /models`, `POST /chat/completions` with a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx2

from rag.chat import (
    LIST_TIMEOUT_S,
    Call,
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
from rag.errors import LLMConnectionError, LLMError, LLMIncompleteError, ModelUnavailableError

if TYPE_CHECKING:
    from openai import AsyncAPIResponse

_NO_SERVER = "What answers at OPENAI_BASE_URL does not speak OpenAI's protocol."
_DONE = b"[DONE]"
# Where a server says in its list how much a model takes: vLLM, llama.cpp, OpenRouter and Together, Groq, Mistral.
_LENGTHS = ("max_model_len", "n_ctx", "context_length", "context_window", "max_context_length")
# Of what we send, newer models of OpenAI refuse these: they are told the first by another name, and not the second.
_REPLACED, _REPLACEMENT = "max_tokens", "max_completion_tokens"
_LEFT_OUT = "temperature"


class OpenAIClient:
    """One OpenAI-compatible server. Close it in the event loop that used it."""

    def __init__(self, base_url: str, *, api_key: str | None, timeout_s: float) -> None:
        """`timeout_s` bounds a whole generation, from the first byte sent to the last received.

        Raises ModelUnavailableError without a key for OpenAI itself.
        """
        # Here and below: a third of a second that every command with another provider is spared.
        import openai

        if api_key is None and "api.openai.com" in base_url:
            raise ModelUnavailableError("OPENAI_API_KEY is not set")
        self._timeout_s = timeout_s
        self._client = openai.AsyncOpenAI(
            # Servers of one's own often want no key; the SDK insists on one.
            api_key=api_key or "none",
            base_url=base_url,
            # What may be sent twice is decided in one place for all servers.
            max_retries=0,
            http_client=chat_http(base_url, timeout_s=timeout_s),
        )
        self._refused: set[tuple[str, str]] = set()
        """Models, each with a parameter that it does not take."""
        self._unmarked: set[str] = set()
        """Models that were heard to think without a mark where it begins."""

    async def available_models(self) -> list[str]:
        return [str(model["id"]) for model in await self._models()]

    async def context_length(self, model: str) -> int | None:
        for found in await self._models():
            if found["id"] == model:
                meta = found.get("meta")
                said = [*map(found.get, _LENGTHS), *(map(meta.get, _LENGTHS) if isinstance(meta, dict) else ())]
                return min((length for length in map(count, said) if length), default=None)
        raise ModelUnavailableError(self.missing(model))

    async def chat(
        self, request: ChatRequest, *, sink: Sink | None = None, deadline: float | None = None
    ) -> ChatResult:
        """As ChatClient says; the window is the server's own, and not told to it."""
        async with calling(self._timeout_s, deadline=deadline) as call:
            while True:
                transcript = Transcript(sink, hold=request.model in self._unmarked)
                try:
                    return await self._generate(self._body(request), transcript, call)
                except Refused as refused:
                    if not self._adapt(request.model, refused):
                        raise refusal(refused, missing=self.missing(request.model)) from None
                finally:
                    if transcript.unmarked:
                        self._unmarked.add(request.model)

    def same_model(self, left: str, right: str) -> bool:
        # The names belong to the server, which may tell two by case alone.
        return left == right

    def missing(self, model: str) -> str:
        return f"the model server does not have a model '{model}'"

    async def close(self) -> None:
        await self._client.close()

    def _body(self, request: ChatRequest) -> dict[str, Any]:
        # Servers of one's own know the older name and may ignore the newer one, and then nothing is limited.
        limit = _REPLACEMENT if (request.model, _REPLACED) in self._refused else _REPLACED
        body: dict[str, Any] = {
            "model": request.model,
            "messages": [{"role": turn["role"], "content": turn["content"]} for turn in request.messages],
            "stream": True,
            limit: request.response_tokens,
        }
        if (request.model, _LEFT_OUT) not in self._refused:
            body["temperature"] = request.temperature
        if request.schema is not None:
            # Not `strict`: that takes a small part of JSON Schema, and the caller checks the answer anyway.
            named = {"name": "answer", "schema": dict(request.schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        return body

    def _adapt(self, model: str, refused: Refused) -> bool:
        """Whether a refusal is about a parameter that can be sent otherwise; it is from now on."""
        error = refused.error
        if refused.status != 400 or not isinstance(error, dict):
            return False
        for name in (_REPLACED, _LEFT_OUT):
            if error.get("param") == name and error.get("code") in ("unsupported_parameter", "unsupported_value"):
                known = (model, name) in self._refused
                self._refused.add((model, name))
                return not known
        return False

    async def _generate(self, body: dict[str, Any], transcript: Transcript, call: Call) -> ChatResult:
        async with _connection(self._client.chat.completions.with_streaming_response.create(**body)) as response:
            if response.headers.get("content-type", "").partition(";")[0].strip().lower() != "text/event-stream":
                raise LLMError(_NO_SERVER)
            call.answered = True
            return await _gather(response, transcript)

    async def _models(self) -> list[dict[str, object]]:
        try:
            async with (
                calling(min(self._timeout_s, LIST_TIMEOUT_S)),
                _connection(self._client.models.with_streaming_response.list()) as response,
            ):
                models = parse(await read(response)).get("data")
        except Refused as refused:
            raise refusal(refused, missing=_NO_SERVER) from None
        except ValueError as error:
            raise LLMError(_NO_SERVER) from error
        if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
            raise LLMError(_NO_SERVER)
        return models


@asynccontextmanager
async def _connection(
    request: AbstractAsyncContextManager[AsyncAPIResponse[Any]],
) -> AsyncIterator[httpx2.Response]:
    """The response to a request of the SDK; what the connection did wrong is raised as httpx2 has it."""
    import openai

    try:
        async with request as response:
            yield response.http_response
    except openai.APIConnectionError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, httpx2.RequestError) else LLMConnectionError() from error


async def _gather(response: httpx2.Response, transcript: Transcript) -> ChatResult:
    """Join server-sent events to the answer that they carry."""
    async with aclosing(lines(response)) as stream:
        async for line in stream:
            field, _, value = line.partition(b":")
            # Older versions of llama.cpp have a field of this name.
            if field not in (b"data", b"error"):
                continue
            if value.strip() == _DONE:
                break
            frame = frame_in(value.strip())
            error = frame.get("error") if field == b"data" else frame
            if error is not None:
                raise reported(error, begun=transcript.sent)
            choices = frame.get("choices")
            # A frame without one is about something else, such as the filters of Azure.
            if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
                continue
            delta, reason = choices[0].get("delta"), choices[0].get("finish_reason")
            if isinstance(delta, dict):
                transcript.think(delta.get("reasoning_content", delta.get("reasoning")))
                await transcript.add(delta.get("content"))
            if reason is not None:
                return await transcript.finish(reason)
    raise LLMIncompleteError
