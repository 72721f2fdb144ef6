"""Writes the draft of an answer: with a model on a server, or from the sources' own sentences."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from rag import extract
from rag.admit import Breaker, Queue
from rag.budget import Limits
from rag.chat import ChatClient, ChatRequest, ChatResult
from rag.chat import Sink as Sink
from rag.errors import LLMBusyError, LLMConnectionError, LLMError, ModelNotAllowedError, ModelUnavailableError
from rag.ollama import OllamaClient, same_model
from rag.openai_chat import OpenAIClient
from rag.prompt import Prompt
from rag.settings import ModelLimits, Settings

log = structlog.get_logger(__name__)

EXTRACTIVE = "extractive"

# How long a finding about Ollama holds: a server that comes up is noticed within seconds, and one
# that is down costs a request nothing in between.
PROBE_INTERVAL_S = 10.0
# Loopback and local networks answer in milliseconds.
PROBE_TIMEOUT_S = 1.0
# The same, once for every model of the allow-list; a service does not start later than this for it.
CHECK_TIMEOUT_S = 2.0

# Where nothing was done yet the same may be sent again, so often in all and with such pauses, doubled each time.
ATTEMPTS = 3
RETRY_DELAY_S = 0.25


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

    async def check(self) -> None:
        """Compare the allow-list with the models' true windows, within `CHECK_TIMEOUT_S`.

        What a server that is down cannot say now is asked when a model is first chosen. Raises nothing.
        """

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        """Write a draft. `sink` gets its text in pieces meanwhile; joined they are the draft's text.

        `deadline` is a moment of the event loop's clock, until which the whole call must be over; without one it
        has the time of a whole answer from now. Waiting for a place at the server counts.
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

    async def check(self) -> None:
        return None

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


class ServerGenerator:
    """Asks a model on a server: as many at once as it can take, and again where nothing was done."""

    def __init__(self, settings: Settings, client: ChatClient) -> None:
        self._settings = settings
        self._client = client
        self._queue = Queue(places=settings.llm_concurrency, waiting=settings.rag_llm_queue)
        self._breaker = Breaker()
        self._windows: dict[str, int] = {}
        """Of models whose server was asked, by their names in the allow-list, in tokens."""

    async def choose(self, requested: str | None) -> str:
        model = requested or self._settings.chat_model
        name, _ = _allowed(model, self._settings)
        if not any(self._client.same_model(model, offered) for offered in await self._offered()):
            raise ModelUnavailableError(self._client.missing(model))
        await self._learn(name)
        return model

    def limits(self, model: str) -> Limits:
        name, limits = _allowed(model, self._settings)
        window = min(limits.context_window, self._windows.get(name, limits.context_window))
        return _limits(self._settings, limits.model_copy(update={"context_window": window}))

    async def check(self) -> None:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                offered = await self._offered()
                for name in self._settings.rag_model_limits:
                    if any(self._client.same_model(name, other) for other in offered):
                        await self._learn(name)
        except (TimeoutError, LLMError) as error:
            log.info("models_unchecked", cause=type(error).__name__)

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        limits = self.limits(model)
        request = ChatRequest(
            model=model,
            messages=[{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.user}],
            window_tokens=limits.window,
            response_tokens=limits.response,
            temperature=self._settings.rag_temperature,
        )
        return await self._chat(request, sink=sink, deadline=deadline)

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
        request = ChatRequest(
            model=model,
            messages=messages,
            # The same as for an answer: Ollama loads a model anew when its window changes.
            window_tokens=limits.window,
            response_tokens=min(response_tokens, limits.response),
            temperature=0.0,
            schema=schema,
        )
        return await self._chat(request, sink=None, deadline=deadline)

    async def close(self) -> None:
        await self._client.close()

    async def _offered(self) -> list[str]:
        with self._breaker.watching():
            return await self._client.available_models()

    async def _learn(self, name: str) -> None:
        """Ask once how much a model of the allow-list takes, and believe its server where that is less."""
        if name in self._windows:
            return
        try:
            length = await self._client.context_length(name)
        except LLMError:
            return  # it will be asked the next time
        if name in self._windows:
            return  # somebody else was faster
        configured = self._settings.rag_model_limits[name].context_window
        self._windows[name] = configured if length is None else length
        if length is not None and length < configured:
            log.warning("model_window_corrected", model=name, configured_tokens=configured, actual_tokens=length)

    async def _chat(self, request: ChatRequest, *, sink: Sink | None, deadline: float | None) -> Draft:
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._settings.answer_timeout_seconds
        # Before the queue as well: nobody shall wait for a server that is known to be down.
        self._breaker.check()
        async with self._queue.place(deadline=deadline):
            with self._breaker.watching():
                result = await self._persist(request, sink=sink, deadline=deadline)
        return Draft(text=result.text, model=request.model, truncated=result.truncated)

    async def _persist(self, request: ChatRequest, *, sink: Sink | None, deadline: float) -> ChatResult:
        """Ask, and ask again while the server says that it has done nothing yet, and there is time."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._client.chat(request, sink=sink, deadline=deadline)
            except (LLMConnectionError, LLMBusyError) as error:
                if error.retry_after_s is None or attempt == ATTEMPTS:
                    raise
                delay_s = max(error.retry_after_s, RETRY_DELAY_S * 2 ** (attempt - 1) * _jitter())
                if asyncio.get_running_loop().time() + delay_s >= deadline:
                    raise
            await asyncio.sleep(delay_s)
        raise AssertionError("every attempt returns or raises")


class AutomaticGenerator:
    """Ollama while it answers with the model installed, the sources' own sentences otherwise."""

    def __init__(self, settings: Settings) -> None:
        self._extractive = ExtractiveGenerator(settings)
        self._ollama = _open_ollama(settings)
        self._absent_until = 0.0

    async def choose(self, requested: str | None) -> str:
        if requested == EXTRACTIVE:
            return EXTRACTIVE
        if requested is not None:
            return await self._ollama.choose(requested)
        if time.monotonic() < self._absent_until:
            return EXTRACTIVE
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                return await self._ollama.choose(None)
        except (TimeoutError, LLMError):
            self._absent_until = time.monotonic() + PROBE_INTERVAL_S
            return EXTRACTIVE

    def limits(self, model: str) -> Limits:
        return self._writer(model).limits(model)

    async def check(self) -> None:
        await self._ollama.check()

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

    def _writer(self, model: str) -> Generator:
        return self._extractive if model == EXTRACTIVE else self._ollama


def open_generator(settings: Settings) -> Generator:
    """The generator that the settings ask for; nothing is contacted yet.

    Raises ModelNotAllowedError when CHAT_MODEL is not in RAG_MODEL_LIMITS, ModelUnavailableError when OpenAI
    is to be asked without OPENAI_API_KEY.
    """
    if settings.rag_llm_provider == EXTRACTIVE:
        return ExtractiveGenerator(settings)
    try:
        _allowed(settings.chat_model, settings)
    except ModelNotAllowedError as error:
        raise ModelNotAllowedError(
            f"CHAT_MODEL={settings.chat_model} is not in RAG_MODEL_LIMITS, which has "
            + ", ".join(settings.rag_model_limits)
        ) from error
    if settings.rag_llm_provider == "ollama":
        return _open_ollama(settings)
    if settings.rag_llm_provider == "openai":
        return _open_openai(settings)
    return AutomaticGenerator(settings)


def _open_ollama(settings: Settings) -> ServerGenerator:
    return ServerGenerator(settings, OllamaClient(settings.ollama_base_url, timeout_s=settings.rag_timeout_seconds))


def _open_openai(settings: Settings) -> ServerGenerator:
    key = settings.openai_api_key
    return ServerGenerator(
        settings,
        OpenAIClient(
            settings.openai_base_url,
            api_key=None if key is None else key.get_secret_value(),
            timeout_s=settings.rag_timeout_seconds,
        ),
    )


def check_allowed(model: str, settings: Settings) -> ModelLimits:
    """The limits of an allowed model. Raises ModelNotAllowedError; Ollama's tag `latest` may be left out."""
    return _allowed(model, settings)[1]


def _allowed(model: str, settings: Settings) -> tuple[str, ModelLimits]:
    """An allowed model's name in the allow-list, and its limits."""
    for name, limits in settings.rag_model_limits.items():
        if model == name or (settings.rag_llm_provider != "openai" and same_model(model, name)):
            return name, limits
    allowed = ", ".join(settings.rag_model_limits)
    raise ModelNotAllowedError(f"model is not allowed; available: {allowed}", field="model")


def _jitter() -> float:
    return random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing


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
