"""Who writes the answer: a model that is allowed and installed, or the sources' own sentences."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from rag import admit, generate, prompt
from rag.errors import (
    LLMBusyError,
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelNotAllowedError,
    ModelUnavailableError,
)
from rag.generate import AutomaticGenerator, ExtractiveGenerator, Generator, ServerGenerator, open_generator
from rag.settings import DEFAULT_MODEL_LIMITS, ModelLimits, Settings
from tests.fakes import Exchange, refusing_url, serving
from tests.fakes.chat import speak
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.rag.model_servers import PATIENCE_S, PROVIDERS, Listener, ModelServer, model_server, settings_of
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


def lists(server: FakeOllama) -> list[str]:
    return [request.path for request in server.requests if request.path == "/api/tags"]


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
    assert isinstance(generator, ServerGenerator)
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
    assert len(lists(server)) == 1

    server.models = ("llama3.2:latest",)
    clock.now += generate.PROBE_INTERVAL_S - 0.1
    assert await generator.choose(None) == "extractive"
    assert len(lists(server)) == 1

    clock.now += 0.1
    assert await generator.choose(None) == "llama3.2"
    assert len(lists(server)) == 2


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


@pytest.mark.parametrize("provider", [None, "ollama", "openai"])
def test_a_default_model_outside_the_allow_list_is_refused_at_once_and_the_setting_is_named(provider):
    with pytest.raises(ModelNotAllowedError, match="CHAT_MODEL=unknown is not in RAG_MODEL_LIMITS"):
        open_generator(Settings(_env_file=None, rag_llm_provider=provider, chat_model="unknown"))


# --- what holds for every model server -----------------------------------------------------------


@pytest.fixture(params=PROVIDERS)
def peer(request: pytest.FixtureRequest) -> Iterator[ModelServer]:
    with model_server(request.param, answer=lambda messages: "At night. [S1-0a1b2c]") as running:
        yield running


@pytest.fixture
async def asking() -> AsyncIterator[Callable[..., Generator]]:
    """`asking(peer, …)` is a generator for that server; keyword arguments are settings."""
    generators: list[Generator] = []

    def opens(peer: ModelServer, **changes: Any) -> Generator:
        generators.append(open_generator(peer.settings(**changes)))
        return generators[-1]

    yield opens
    for generator in generators:
        await generator.close()


async def test_a_model_that_is_offered_writes_and_its_pieces_are_heard(peer, asking):
    generator = asking(peer)
    model = await generator.choose(None)
    sink = Listener()
    draft = await generator.write(PROMPT, model=model, sink=sink)
    assert draft == generate.Draft(text="At night. [S1-0a1b2c]", model="llama3.2", truncated=False)
    assert sink.pieces == ["At", " night.", " [S1-0a1b2c]"]


async def test_the_sentences_of_an_extract_are_heard_one_by_one(opened):
    sources = [passage("Backups run at night. Backups of orders run at noon."), passage("Backups run.", number=2)]
    question = prompt.build("When do backups run?", sources, [], nonce="0a1b2c")
    sink = Listener()
    draft = await opened("extractive", refusing_url()).write(question, model="extractive", sink=sink)
    assert len(sink.pieces) > 1
    assert sink.text == draft.text
    assert all("[S" in piece for piece in sink.pieces)


async def test_a_short_question_is_asked_coldly_in_the_same_window_and_with_its_own_limit(peer, asking):
    generator = asking(peer)
    peer.fake.fill = lambda schema, messages: '{"grade": 7}'
    schema = {"type": "object", "required": ["grade"]}
    messages = [{"role": "user", "content": "Grade it."}]
    draft = await generator.ask(messages, model="llama3.2", response_tokens=9, schema=schema)
    assert draft == generate.Draft(text='{"grade": 7}', model="llama3.2", truncated=False)
    await generator.write(PROMPT, model="llama3.2")
    asked, written = peer.chats
    assert asked["messages"] == messages
    assert asked.get("options", asked)["temperature"] == 0
    if peer.provider == "ollama":
        assert asked["format"] == schema
        assert asked["options"]["num_predict"] == 9
        assert asked["options"]["num_ctx"] == written["options"]["num_ctx"]
    else:
        assert asked["response_format"]["json_schema"]["schema"] == schema
        assert asked["max_tokens"] == 9


async def test_a_short_answer_is_no_longer_than_the_model_may_write(peer, asking):
    limits = {"llama3.2": ModelLimits(context_window=8192, max_response=5)}
    await asking(peer, rag_model_limits=limits).ask([], model="llama3.2", response_tokens=100)
    (asked,) = peer.chats
    assert asked.get("options", asked).get("num_predict", asked.get("max_tokens")) == 5


async def test_where_no_model_writes_none_is_asked(opened):
    with pytest.raises(ModelUnavailableError):
        await opened("extractive", refusing_url()).ask([], model="extractive", response_tokens=5)
    with pytest.raises(ModelUnavailableError):
        await opened(None, refusing_url()).ask([], model="extractive", response_tokens=5)


async def test_the_names_of_openais_protocol_are_compared_as_they_are(asking):
    with model_server("openai", models=("llama3.2:latest", "gpt-4.1-mini")) as peer:
        limits = {name: ModelLimits(context_window=8192, max_response=100) for name in ("llama3.2", "gpt-4.1-mini")}
        generator = asking(peer, rag_model_limits=limits)
        assert await generator.choose("gpt-4.1-mini") == "gpt-4.1-mini"
        for name in ("llama3.2:latest", "GPT-4.1-mini"):
            with pytest.raises(ModelNotAllowedError):
                await generator.choose(name)
        with pytest.raises(ModelUnavailableError, match=r"does not have a model 'llama3\.2'"):
            await generator.choose(None)


# --- true windows --------------------------------------------------------------------------------


def small(peer: ModelServer, window: int) -> None:
    """Make the server's model a small one."""
    if peer.provider == "ollama":
        peer.fake.context_length = window
    else:
        peer.fake.lengths = {"llama3.2": window}


def corrections(entries: list[Any]) -> list[Any]:
    return [entry for entry in entries if entry["event"] == "model_window_corrected"]


async def test_a_window_larger_than_the_truth_is_corrected_once_and_said(peer, asking):
    small(peer, 2048)
    generator = asking(peer)
    assert generator.limits("llama3.2").window == 7572
    with capture_logs() as entries:
        await generator.check()
        for name in (None, "llama3.2"):
            await generator.choose(name)
    (warning,) = corrections(entries)
    assert warning["log_level"] == "warning"
    assert (warning["model"], warning["configured_tokens"], warning["actual_tokens"]) == ("llama3.2", 8192, 2048)
    assert generator.limits("llama3.2").window == 2048
    await generator.write(PROMPT, model="llama3.2")
    if peer.provider == "ollama":
        assert peer.chats[-1]["options"]["num_ctx"] == 2048


async def test_a_window_is_never_corrected_upwards(peer, asking):
    small(peer, 1_000_000)
    generator = asking(peer, rag_model_limits={"llama3.2": ModelLimits(context_window=4096, max_response=100)})
    with capture_logs() as entries:
        await generator.check()
    assert corrections(entries) == []
    assert generator.limits("llama3.2").window == 4096


async def test_every_model_that_is_allowed_and_offered_is_looked_at_when_the_service_starts(asking):
    with model_server("ollama", models=("llama3.2:latest", "qwen3:8b", "mistral:latest"), context_length=1024) as peer:
        generator = asking(peer)
        with capture_logs() as entries:
            await generator.check()
        assert [entry["model"] for entry in corrections(entries)] == ["llama3.2", "qwen3:8b"]
        assert [one.body["model"] for one in peer.fake.requests if one.path == "/api/show"] == ["llama3.2", "qwen3:8b"]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_server_that_is_down_keeps_nobody_from_starting_and_is_asked_at_first_use(provider):
    with serving(lambda exchange: None) as reserved:
        port = reserved.server_address[1]
    url = f"http://127.0.0.1:{port}" + ("/v1" if provider == "openai" else "")
    generator = open_generator(settings_of(provider, url))
    with capture_logs() as entries:
        await generator.check()
    assert [(entry["event"], entry["log_level"]) for entry in entries] == [("models_unchecked", "info")]
    with model_server(provider) as peer:
        small(peer, 2048)
        with serving(peer.fake.serve, port=port) as peer.fake.server, capture_logs() as entries:
            await generator.choose(None)
    assert len(corrections(entries)) == 1
    assert generator.limits("llama3.2").window == 2048
    await generator.close()


async def test_a_server_that_hangs_delays_nobodys_start(peer, asking, monkeypatch):
    monkeypatch.setattr(generate, "CHECK_TIMEOUT_S", 0.1)
    peer.fake.fault = "slow"
    generator = asking(peer)
    # A list has 5 s of its own.
    async with asyncio.timeout(4):
        await generator.check()


async def test_a_server_that_does_not_know_its_windows_is_believed_the_settings(opened, server):
    server.context_length = 0
    generator = opened("ollama", server.base_url)
    await generator.choose(None)
    assert generator.limits("llama3.2").window == 7572
    await generator.choose(None)
    assert len([one for one in server.requests if one.path == "/api/show"]) == 1


# --- again, where nothing was done ---------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the pauses that we choose ourselves."""
    monkeypatch.setattr(generate, "RETRY_DELAY_S", 0.0)


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_refused_connection_is_tried_again_and_the_server_that_came_up_answers(provider, monkeypatch):
    with serving(lambda exchange: None) as reserved:
        port = reserved.server_address[1]
    url = f"http://127.0.0.1:{port}" + ("/v1" if provider == "openai" else "")
    generator = open_generator(settings_of(provider, url))
    with ExitStack() as servers:
        peer = servers.enter_context(model_server(provider))
        tried = []

        def up() -> float:
            tried.append(True)
            if len(tried) == 2:
                peer.fake.server = servers.enter_context(serving(peer.fake.serve, port=port))
            return 0.01

        monkeypatch.setattr(generate, "_jitter", up)
        assert (await generator.write(PROMPT, model="llama3.2")).text == "It is so. [1]"
    assert len(tried) == 2
    await generator.close()


async def test_a_server_that_stays_down_is_an_error_after_three_attempts(opened, monkeypatch):
    pauses = []
    monkeypatch.setattr(generate, "_jitter", lambda: pauses.append(True) or 0.01)
    with pytest.raises(LLMConnectionError):
        await opened("ollama", refusing_url()).write(PROMPT, model="llama3.2")
    assert len(pauses) == generate.ATTEMPTS - 1


async def test_a_busy_server_is_asked_again_when_it_said(peer, asking):
    peer.fake.fault, peer.fake.fault_count = "busy_later", 1
    started = time.monotonic()
    draft = await asking(peer).write(PROMPT, model="llama3.2")
    assert draft.text == "At night. [S1-0a1b2c]"
    assert time.monotonic() - started >= 1
    assert len(peer.chats) == 2


async def test_nobody_waits_for_a_busy_server_beyond_the_deadline(peer, asking):
    peer.fake.fault = "busy_later"
    deadline = asyncio.get_running_loop().time() + 0.9
    with pytest.raises(LLMConnectionError) as caught:
        await asking(peer).write(PROMPT, model="llama3.2", deadline=deadline)
    assert asyncio.get_running_loop().time() < deadline
    assert caught.value.retry_after_s == 1
    assert len(peer.chats) == 1


@pytest.mark.parametrize(
    "fault", ["reset", "busy", "bad_gateway", "rate_limit", "crash", "cut", "no_done", "empty", "error_line", "html"]
)
async def test_what_may_have_been_done_is_not_asked_for_again(peer, asking, impatient, fault):
    peer.fake.fault = fault
    with pytest.raises(LLMError):
        await asking(peer).write(PROMPT, model="llama3.2")
    assert len(peer.chats) == 1


# --- deadlines -----------------------------------------------------------------------------------


async def test_one_response_has_its_time_and_a_whole_answer_its_own(peer, asking):
    peer.fake.fault = "slow"
    for changes in ({"rag_timeout_seconds": 0.2}, {"rag_answer_timeout_seconds": 0.2}):
        started = time.monotonic()
        with pytest.raises(LLMTimeoutError):
            await asking(peer, **changes).write(PROMPT, model="llama3.2")
        assert time.monotonic() - started < PATIENCE_S / 2


def test_without_a_word_a_whole_answer_has_twice_the_time_of_a_response():
    assert Settings(_env_file=None, rag_timeout_seconds=7).answer_timeout_seconds == 14
    assert Settings(_env_file=None, rag_answer_timeout_seconds=20).answer_timeout_seconds == 20


# --- places at the server ------------------------------------------------------------------------


class Slow:
    """Answers when a test says so, and counts who is being answered."""

    def __init__(self, peer: ModelServer) -> None:
        self.open = threading.Event()
        self.most = 0
        self._now = 0
        self._changed = threading.Condition()
        self._peer = peer
        peer.plays(self._answer)

    def _answer(self, exchange: Exchange) -> None:
        with self._changed:
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
        assert self.open.wait(PATIENCE_S)
        with self._changed:
            self._now -= 1
        speak(exchange, self._peer.dialect, ["Yes."], reason="stop", fault=None)

    async def busy(self, count: int) -> None:
        """Until so many are being answered."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: self._now >= count, PATIENCE_S)

        assert await asyncio.to_thread(wait)


def write(generator: Generator, **changes: Any) -> asyncio.Task[generate.Draft]:
    return asyncio.create_task(generator.write(PROMPT, model="llama3.2", **changes))


async def test_so_many_are_answered_at_once_so_many_wait_and_the_next_is_told_to_come_back(peer, asking):
    slow = Slow(peer)
    generator = asking(peer, rag_llm_concurrency=2, rag_llm_queue=3)
    calls = [write(generator) for _ in range(5)]
    await slow.busy(2)
    started = time.monotonic()
    with pytest.raises(LLMBusyError):
        await generator.write(PROMPT, model="llama3.2")
    with pytest.raises(LLMBusyError):
        await generator.ask([], model="llama3.2", response_tokens=5)
    assert time.monotonic() - started < PATIENCE_S / 2
    slow.open.set()
    drafts = await asyncio.gather(*calls)
    assert [draft.text for draft in drafts] == ["Yes."] * 5
    assert slow.most == 2
    assert len(peer.chats) == 5


async def test_whoever_gives_up_leaves_a_place_for_others(peer, asking):
    slow = Slow(peer)
    generator = asking(peer, rag_llm_concurrency=1, rag_llm_queue=1)
    first = write(generator)
    await slow.busy(1)
    waiting = write(generator)
    await asyncio.sleep(0.05)
    with pytest.raises(LLMBusyError):
        await generator.write(PROMPT, model="llama3.2")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    successor = write(generator)
    await asyncio.sleep(0.05)
    first.cancel()
    slow.open.set()
    assert (await successor).text == "Yes."


async def test_the_time_in_the_queue_is_part_of_the_whole_answers(peer, asking):
    slow = Slow(peer)
    generator = asking(peer, rag_llm_concurrency=1)
    first = write(generator)
    await slow.busy(1)
    with pytest.raises(LLMBusyError):
        await generator.write(PROMPT, model="llama3.2", deadline=asyncio.get_running_loop().time() + 0.1)
    slow.open.set()
    await first


@pytest.mark.parametrize(("provider", "places"), [("ollama", 1), (None, 1), ("openai", 8)])
def test_one_ollama_writes_one_answer_at_a_time(provider, places):
    assert Settings(_env_file=None, rag_llm_provider=provider).llm_concurrency == places
    assert Settings(_env_file=None, rag_llm_provider=provider, rag_llm_concurrency=3).llm_concurrency == 3


# --- while a server is down ----------------------------------------------------------------------


async def test_a_server_that_fails_again_and_again_is_left_alone_until_a_try_succeeds(peer, asking, monkeypatch):
    monkeypatch.setattr(admit, "PAUSE_S", 60.0)
    generator = asking(peer)
    peer.fake.fault = "reset"
    for _ in range(admit.FAILURES_TO_OPEN):
        with pytest.raises(LLMConnectionError):
            await generator.write(PROMPT, model="llama3.2")
    assert len(peer.chats) == admit.FAILURES_TO_OPEN
    peer.fake.fault = None
    asked = len(peer.fake.requests)
    for call in (generator.choose(None), generator.write(PROMPT, model="llama3.2")):
        with pytest.raises(LLMConnectionError) as caught:
            await call
        assert caught.value.retry_after_s is not None
        assert 0 < caught.value.retry_after_s <= 60
    assert len(peer.fake.requests) == asked

    generator._breaker._open_until = 0.0
    assert (await generator.write(PROMPT, model="llama3.2")).text == "At night. [S1-0a1b2c]"
    assert await generator.choose(None) == "llama3.2"


async def test_nobody_waits_for_a_place_at_a_server_that_is_down(peer, asking):
    slow = Slow(peer)
    generator = asking(peer, rag_llm_concurrency=1)
    first = write(generator)
    await slow.busy(1)
    peer.fake.fault = "reset"
    for _ in range(admit.FAILURES_TO_OPEN):
        with pytest.raises(LLMConnectionError):
            await generator.choose(None)
    async with asyncio.timeout(PATIENCE_S / 2):
        with pytest.raises(LLMConnectionError):
            await generator.write(PROMPT, model="llama3.2")
    slow.open.set()
    assert (await first).text == "Yes."


async def test_a_server_that_hangs_is_left_alone_as_well(peer, asking):
    peer.fake.fault = "slow"
    generator = asking(peer, rag_timeout_seconds=0.05)
    for _ in range(admit.FAILURES_TO_OPEN):
        with pytest.raises(LLMTimeoutError):
            await generator.write(PROMPT, model="llama3.2")
    with pytest.raises(LLMConnectionError):
        await generator.write(PROMPT, model="llama3.2")


@pytest.mark.parametrize("fault", ["crash", "cut", "empty", "html", "rate_limit", "error_line", "missing_model"])
async def test_a_server_that_answers_is_not_down_whatever_it_says(peer, asking, fault):
    peer.fake.fault = fault
    generator = asking(peer)
    for _ in range(admit.FAILURES_TO_OPEN + 1):
        with pytest.raises(LLMError):
            await generator.write(PROMPT, model="llama3.2")
    assert len(peer.chats) == admit.FAILURES_TO_OPEN + 1
