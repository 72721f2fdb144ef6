"""Writes the draft of an answer: with a model on Ollama, or from the sources' own sentences."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rag import extract
from rag.budget import Limits
from rag.errors import LLMConnectionError, LLMError, ModelNotAllowedError, ModelUnavailableError
from rag.ollama import OllamaClient, same_model
from rag.prompt import Prompt
from rag.settings import ModelLimits, Settings

EXTRACTIVE = "extractive"

Sink = Callable[[str], Awaitable[None]]
"""Takes the pieces of an answer as they arrive."""

# How long a finding about Ollama holds: a server that comes up is noticed within seconds, and one
# that is down costs a request nothing in between.
PROBE_INTERVAL_S = 10.0
# Loopback and local networks answer in milliseconds.
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An answer that cites by alias. `truncated`: the model reached its limit of tokens."""

    text: str
    model: str
    truncated: bool


class Generator(Protocol):
    """Something that writes answers."""

    async def choose(self, requested: str | None) -> str:
        """The model that will write. Raises ModelNotAllowedError, ModelUnavailableError, LLMConnectionError."""

    def limits(self, model: str) -> Limits:
        """What that model's prompt may hold."""

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        """Write a draft. `sink` gets its text in pieces meanwhile; joined they are the draft's text.

        `deadline` is a moment of the event loop's clock, which bounds the call beside RAG_TIMEOUT_SECONDS.
        Raises the LLMError family, of which ContextOverflowError only before the first piece; what the sink
        raises ends the call, and so does cancelling it: the server is hung up on and stops.
        """

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        response_tokens: int,
        schema: Mapping[str, object] | None = None,
        deadline: float | None = None,
    ) -> Draft:
        """A short answer to messages of `role` and `content`, at temperature 0: to grade, to route, to fill a form.

        With a JSON Schema the server is told to write JSON that fits; whether it did is for the caller to check.
        Raises as `write` does, and ModelUnavailableError where no model writes.
        """

    async def close(self) -> None: ...


class ExtractiveGenerator:
    """Quotes the sources. Needs no model, so any prompt fits."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def choose(self, requested: str | None) -> str:
        if requested is not None and requested != EXTRACTIVE:
            check_allowed(requested, self._settings)
            raise ModelUnavailableError("no model server is configured, and answers quote their sources")
        return EXTRACTIVE

    def limits(self, model: str) -> Limits:
        return _limits(self._settings, None)

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        first, *others = extract.sentences(prompt.question, prompt.sources)
        pieces = [first, *(f" {sentence}" for sentence in others)]
        if sink is not None:
            for piece in pieces:
                await sink(piece)
        return Draft(text="".join(pieces), model=EXTRACTIVE, truncated=False)

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        response_tokens: int,
        schema: Mapping[str, object] | None = None,
        deadline: float | None = None,
    ) -> Draft:
        raise ModelUnavailableError("no model answers here: answers quote their sources")

    async def close(self) -> None:
        return None


class OllamaGenerator:
    """Asks a model on an Ollama server."""

    def __init__(self, settings: Settings, client: OllamaClient) -> None:
        self._settings = settings
        self._client = client

    async def choose(self, requested: str | None) -> str:
        model = requested or self._settings.chat_model
        check_allowed(model, self._settings)
        if not any(same_model(model, name) for name in await self._client.available_models()):
            raise ModelUnavailableError(f"model '{model}' is not installed; run: ollama pull {model}")
        return model

    def limits(self, model: str) -> Limits:
        return _limits(self._settings, check_allowed(model, self._settings))

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        limits = self.limits(model)
        result = await self._client.chat(
            model=model,
            messages=[{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
            num_ctx=limits.window,
            num_predict=limits.response,
            temperature=self._settings.rag_temperature,
            sink=sink,
            deadline=deadline,
        )
        return Draft(text=result.text, model=model, truncated=result.truncated)

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        response_tokens: int,
        schema: Mapping[str, object] | None = None,
        deadline: float | None = None,
    ) -> Draft:
        limits = self.limits(model)
        result = await self._client.chat(
            model=model,
            messages=messages,
            # The same window as for an answer, or Ollama would load the model anew.
            num_ctx=limits.window,
            num_predict=min(response_tokens, limits.response),
            temperature=0.0,
            schema=schema,
            deadline=deadline,
        )
        return Draft(text=result.text, model=model, truncated=result.truncated)

    async def close(self) -> None:
        await self._client.close()


class AutomaticGenerator:
    """Ollama while it answers with the model installed, the sources' own sentences otherwise."""

    def __init__(self, settings: Settings) -> None:
        self._extractive = ExtractiveGenerator(settings)
        self._ollama = OllamaGenerator(
            settings, OllamaClient(settings.ollama_base_url, timeout_s=settings.rag_timeout_seconds)
        )
        self._probe = OllamaGenerator(settings, OllamaClient(settings.ollama_base_url, timeout_s=PROBE_TIMEOUT_S))
        self._absent_until = 0.0

    async def choose(self, requested: str | None) -> str:
        if requested == EXTRACTIVE:
            return EXTRACTIVE
        if requested is not None:
            return await self._ollama.choose(requested)
        if time.monotonic() < self._absent_until:
            return EXTRACTIVE
        try:
            return await self._probe.choose(None)
        except LLMError:
            self._absent_until = time.monotonic() + PROBE_INTERVAL_S
            return EXTRACTIVE

    def limits(self, model: str) -> Limits:
        return self._writer(model).limits(model)

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        try:
            return await self._writer(model).write(prompt, model=model, sink=sink, deadline=deadline)
        except LLMConnectionError:
            self._absent_until = time.monotonic() + PROBE_INTERVAL_S
            raise

    async def ask(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        model: str,
        response_tokens: int,
        schema: Mapping[str, object] | None = None,
        deadline: float | None = None,
    ) -> Draft:
        return await self._writer(model).ask(
            messages, model=model, response_tokens=response_tokens, schema=schema, deadline=deadline
        )

    async def close(self) -> None:
        await self._ollama.close()
        await self._probe.close()

    def _writer(self, model: str) -> Generator:
        return self._extractive if model == EXTRACTIVE else self._ollama


def open_generator(settings: Settings) -> Generator:
    """The generator that the settings ask for; nothing is contacted yet.

    Raises ModelNotAllowedError when CHAT_MODEL is not in RAG_MODEL_LIMITS.
    """
    if settings.rag_llm_provider == EXTRACTIVE:
        return ExtractiveGenerator(settings)
    check_allowed(settings.chat_model, settings)
    if settings.rag_llm_provider == "ollama":
        return OllamaGenerator(settings, OllamaClient(settings.ollama_base_url, timeout_s=settings.rag_timeout_seconds))
    return AutomaticGenerator(settings)


def check_allowed(model: str, settings: Settings) -> ModelLimits:
    """The limits of an allowed model. Raises ModelNotAllowedError; the tag `latest` may be left out."""
    for name, limits in settings.rag_model_limits.items():
        if same_model(model, name):
            return limits
    allowed = ", ".join(settings.rag_model_limits)
    raise ModelNotAllowedError(f"model is not allowed; available: {allowed}", field="model")


def _limits(settings: Settings, model: ModelLimits | None) -> Limits:
    response = settings.rag_max_response_tokens
    # The question may be long as well: 8 KiB of prose are about 2,000 tokens.
    question = 2048
    asked = (
        settings.rag_system_prompt_tokens
        + settings.rag_max_history_tokens
        + settings.rag_max_context_tokens
        + response
        + question
    )
    if model is not None:
        response = min(response, model.max_response)
    return Limits(
        # One number for each model, never one for each prompt: Ollama loads a model anew when it changes.
        window=asked if model is None else min(asked, model.context_window),
        context=settings.rag_max_context_tokens,
        history=settings.rag_max_history_tokens,
        response=response,
    )
