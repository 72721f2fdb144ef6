"""Who writes the answer: a model that is allowed and installed, or the sources' own sentences."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rag import generate, prompt
from rag.errors import (
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelNotAllowedError,
    ModelUnavailableError,
)
from rag.generate import AutomaticGenerator, ExtractiveGenerator, Generator, OllamaGenerator, open_generator
from rag.settings import DEFAULT_MODEL_LIMITS, ModelLimits, Settings
from tests.fakes import refusing_url
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.rag.passages import passage

PROMPT = prompt.build("When do backups run?", [passage("Backups run at night.")], [], nonce="0a1b2c")


@pytest.fixture
def server() -> Iterator[FakeOllama]:
    with fake_ollama(answer=lambda messages: "At night. [S1-0a1b2c]") as fake:
        yield fake


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(generate, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
async def opened() -> AsyncIterator[Any]:
    """`opened(provider, url, …)` is a generator, closed at the end of the test."""
    generators: list[Generator] = []

    def opens(provider: str | None, url: str, **changes: Any) -> Generator:
        settings = Settings(
            _env_file=None, rag_llm_provider=provider, ollama_base_url=url, chat_model="llama3.2", **changes
        )
        generators.append(open_generator(settings))
        return generators[-1]

    yield opens
    for generator in generators:
        await generator.close()


# --- the allow-list ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama3.2", "llama3.2:latest", "library/llama3.2", "qwen3:8b", "deepseek-r1:32b"])
def test_an_allowed_model_passes(name):
    assert generate.check_allowed(name, Settings(_env_file=None)).context_window > 0


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3:latest", "qwen3:14b", "llama3.2:1b", "llama3", "someone/llama3.2", "", "llama3.2 --help"]
)
def test_a_model_that_is_not_allowed_is_refused_and_the_allowed_ones_are_named(name):
    with pytest.raises(ModelNotAllowedError, match=r"llama3\.2, qwen3:8b, deepseek-r1:32b") as caught:
        generate.check_allowed(name, Settings(_env_file=None))
    assert caught.value.field == "model"


def test_the_default_limits_are_those_of_the_specification():
    assert {name: (limits.context_window, limits.max_response) for name, limits in DEFAULT_MODEL_LIMITS.items()} == {
        "llama3.2": (8192, 1024),
        "qwen3:8b": (32768, 2048),
        "deepseek-r1:32b": (65536, 4096),
    }


@pytest.mark.parametrize(
    ("requested", "installed"),
    [
        (None, "llama3.2:latest"),
        ("llama3.2", "llama3.2:latest"),
        ("llama3.2:latest", "llama3.2:latest"),
        ("qwen3:8b", "qwen3:8b"),
    ],
)
async def test_an_allowed_and_installed_model_writes(server, opened, requested, installed):
    server.models = (installed,)
    generator = opened("ollama", server.base_url)
    model = await generator.choose(requested)
    assert model == (requested or "llama3.2")
    draft = await generator.write(PROMPT, model=model)
    assert draft == generate.Draft(text="At night. [S1-0a1b2c]", model=model, truncated=False)
    assert server.requests[-1].body["model"] == model


@pytest.mark.parametrize(
    ("requested", "installed"),
    [
        ("qwen3:8b", ("qwen3:latest", "qwen3:14b", "llama3.2:latest")),
        (None, ("llama3.2:1b", "llama3:latest")),
        (None, ()),
    ],
)
async def test_a_model_of_another_size_or_version_does_not_stand_in(server, opened, requested, installed):
    server.models = installed
    wanted = requested or "llama3.2"
    with pytest.raises(ModelUnavailableError, match=f"ollama pull {wanted}"):
        await opened("ollama", server.base_url).choose(requested)


@pytest.mark.parametrize("provider", ["ollama", "extractive", None])
async def test_a_model_that_is_not_allowed_is_refused_before_anything_is_asked(server, opened, provider):
    server.models = ("mistral:latest",)
    with pytest.raises(ModelNotAllowedError):
        await opened(provider, server.base_url).choose("mistral")
    assert server.requests == []


# --- what Ollama is asked ------------------------------------------------------------------------


async def test_ollama_gets_the_prompt_as_two_messages_and_is_told_to_cut_nothing(server, opened):
    generator = opened("ollama", server.base_url, rag_temperature=0.3)
    await generator.write(PROMPT, model="llama3.2")
    assert server.requests[-1].body == {
        "model": "llama3.2",
        "messages": [{"role": "system", "content": PROMPT.system}, {"role": "user", "content": PROMPT.user}],
        "stream": True,
        "truncate": False,
        "shift": False,
        "think": False,
        # 500 system + 1,000 history + 3,000 context + 1,024 answer + 2,048 question
        "options": {"num_ctx": 7572, "num_predict": 1024, "temperature": 0.3},
    }


async def test_the_window_asked_for_is_one_number_a_model_whatever_the_prompt(server, opened):
    generator = opened("ollama", server.base_url)
    long = prompt.build("Why?", [passage("word " * 2000, number=number) for number in (1, 2)], [])
    for each in (PROMPT, long, PROMPT):
        await generator.write(each, model="llama3.2")
    assert {request.body["options"]["num_ctx"] for request in server.requests} == {7572}


@pytest.mark.parametrize(
    ("window", "max_response", "num_ctx", "num_predict"),
    [(4096, 512, 4096, 512), (7572, 1024, 7572, 1024), (65536, 4096, 7572, 1024)],
)
async def test_a_small_model_bounds_window_and_answer(server, opened, window, max_response, num_ctx, num_predict):
    limits = {"llama3.2": ModelLimits(context_window=window, max_response=max_response)}
    generator = opened("ollama", server.base_url, rag_model_limits=limits)
    await generator.write(PROMPT, model="llama3.2")
    options = server.requests[-1].body["options"]
    assert (options["num_ctx"], options["num_predict"]) == (num_ctx, num_predict)
    budget = generator.limits("llama3.2")
    assert (budget.window, budget.response) == (num_ctx, num_predict)
    assert (budget.context, budget.history) == (3000, 1000)


async def test_an_answer_at_its_limit_is_marked(server, opened):
    server.answer = lambda messages: "one two three four"
    generator = opened("ollama", server.base_url, rag_max_response_tokens=2)
    assert await generator.write(PROMPT, model="llama3.2") == generate.Draft(
        text="one two", model="llama3.2", truncated=True
    )


# --- extractive ----------------------------------------------------------------------------------


async def test_extractive_quotes_and_asks_nobody(server, opened):
    generator = opened("extractive", server.base_url)
    assert isinstance(generator, ExtractiveGenerator)
    assert await generator.choose(None) == await generator.choose("extractive") == "extractive"
    draft = await generator.write(PROMPT, model="extractive")
    assert draft == generate.Draft(text="Backups run at night. [S1-0a1b2c]", model="extractive", truncated=False)
    assert server.requests == []


async def test_extractive_cannot_be_asked_for_a_model(opened):
    with pytest.raises(ModelUnavailableError, match="quote their sources"):
        await opened("extractive", refusing_url()).choose("llama3.2")


# --- ollama, chosen explicitly -------------------------------------------------------------------


async def test_ollama_chosen_explicitly_never_falls_back(opened):
    generator = opened("ollama", refusing_url())
    assert isinstance(generator, OllamaGenerator)
    with pytest.raises(LLMConnectionError):
        await generator.choose(None)
    with pytest.raises(LLMConnectionError):
        await generator.write(PROMPT, model="llama3.2")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("error_line", LLMError),
        ("cut", LLMIncompleteError),
        ("no_done", LLMIncompleteError),
        ("empty", LLMIncompleteError),
        ("invalid_utf8", LLMIncompleteError),
        ("reset", LLMConnectionError),
        ("crash", LLMError),
    ],
)
@pytest.mark.parametrize("provider", ["ollama", None])
async def test_a_fault_while_writing_is_an_error_and_no_draft(server, opened, provider, fault, error):
    generator = opened(provider, server.base_url)
    model = await generator.choose(None)
    server.fault = fault
    with pytest.raises(error):
        await generator.write(PROMPT, model=model)


# --- automatic -----------------------------------------------------------------------------------


async def test_without_a_server_answers_quote_their_sources(opened):
    generator = opened(None, refusing_url())
    assert isinstance(generator, AutomaticGenerator)
    model = await generator.choose(None)
    assert model == "extractive"
    assert (await generator.write(PROMPT, model=model)).text == "Backups run at night. [S1-0a1b2c]"


@pytest.mark.parametrize("fault", ["reset", "html", "busy", "crash"])
async def test_a_server_that_is_no_ollama_or_in_trouble_is_no_server(server, opened, fault):
    server.fault = fault
    assert await opened(None, server.base_url).choose(None) == "extractive"


async def test_a_server_without_the_model_is_no_server(server, opened):
    server.models = ("llama3.2:1b",)
    assert await opened(None, server.base_url).choose(None) == "extractive"


async def test_a_server_that_hangs_is_no_server(server, opened, monkeypatch):
    monkeypatch.setattr(generate, "PROBE_TIMEOUT_S", 0.05)
    server.fault = "slow"
    assert await opened(None, server.base_url).choose(None) == "extractive"


async def test_a_server_with_the_model_is_used(server, opened):
    generator = opened(None, server.base_url)
    model = await generator.choose(None)
    assert model == "llama3.2"
    assert (await generator.write(PROMPT, model=model)).text == "At night. [S1-0a1b2c]"


async def test_a_server_that_comes_up_is_noticed_after_the_interval_and_not_asked_before(server, opened, clock):
    server.models = ()
    generator = opened(None, server.base_url)
    assert await generator.choose(None) == "extractive"
    assert len(server.requests) == 1

    server.models = ("llama3.2:latest",)
    clock.now += generate.PROBE_INTERVAL_S - 0.1
    assert await generator.choose(None) == "extractive"
    assert len(server.requests) == 1

    clock.now += 0.1
    assert await generator.choose(None) == "llama3.2"
    assert len(server.requests) == 2


async def test_a_server_that_goes_down_is_noticed_by_the_next_request(server, opened, clock):
    generator = opened(None, server.base_url)
    assert await generator.choose(None) == "llama3.2"
    server.fault = "reset"
    with pytest.raises(LLMConnectionError):
        await generator.write(PROMPT, model="llama3.2")
    asked = len(server.requests)
    assert await generator.choose(None) == "extractive"
    assert len(server.requests) == asked


async def test_a_model_that_is_asked_for_by_name_is_never_replaced_by_quotes(server, opened):
    with pytest.raises(LLMConnectionError):
        await opened(None, refusing_url()).choose("llama3.2")
    with pytest.raises(ModelUnavailableError):
        await opened(None, server.base_url).choose("qwen3:8b")


async def test_quotes_may_be_asked_for_by_name_although_a_model_is_there(server, opened):
    assert await opened(None, server.base_url).choose("extractive") == "extractive"
    assert server.requests == []


async def test_a_model_that_takes_too_long_is_a_timeout(server, opened):
    generator = opened("ollama", server.base_url, rag_timeout_seconds=0.2)
    server.fault = "slow"
    with pytest.raises(LLMTimeoutError):
        await generator.write(PROMPT, model="llama3.2")


@pytest.mark.parametrize("provider", [None, "ollama"])
def test_a_default_model_outside_the_allow_list_is_refused_at_once(provider):
    with pytest.raises(ModelNotAllowedError):
        open_generator(Settings(_env_file=None, rag_llm_provider=provider, chat_model="unknown"))
