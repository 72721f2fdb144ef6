"""What both clients of model servers owe: every test here runs against Ollama's protocol and against OpenAI's."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import chat
from rag.chat import ChatClient, ChatResult, Transcript
from rag.errors import (
    ContextOverflowError,
    LLMBusyError,
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelUnavailableError,
)
from tests.fakes import Exchange, refusing_url
from tests.rag.model_servers import (
    PATIENCE_S,
    PROVIDERS,
    Listener,
    ModelServer,
    client_of,
    model_server,
    question,
)

# For tests of the deadline itself.
IMPATIENCE_S = 0.3


@pytest.fixture(params=PROVIDERS)
def server(request: pytest.FixtureRequest) -> Iterator[ModelServer]:
    with model_server(request.param) as running:
        yield running


@pytest.fixture
async def client(server: ModelServer) -> AsyncIterator[ChatClient]:
    client = server.client()
    yield client
    await client.close()


# --- what comes back -----------------------------------------------------------------------------


async def test_an_answer_is_joined_from_its_stream(server: ModelServer, client: ChatClient) -> None:
    server.fake.answer = lambda messages: f"Yes: {messages[-1]['content']} Ça va — 好."
    assert await client.chat(question()) == ChatResult(text="Yes: Is it so? Ça va — 好.", truncated=False)


async def test_an_answer_at_its_limit_is_marked_truncated(server: ModelServer, client: ChatClient) -> None:
    server.fake.answer = lambda messages: "one two three four five"
    assert await client.chat(question(response_tokens=3)) == ChatResult(text="one two three", truncated=True)


async def test_the_model_gets_the_messages_and_its_temperature_and_streams(
    server: ModelServer, client: ChatClient
) -> None:
    turns = [*question().messages, {"role": "assistant", "content": "Yes.", "name": "not sent"}]
    await client.chat(question(messages=turns, temperature=0.25))
    (asked,) = server.chats
    assert asked["messages"] == [{"role": turn["role"], "content": turn["content"]} for turn in turns]
    assert asked["model"] == "llama3.2"
    assert asked["stream"] is True
    assert asked.get("options", asked)["temperature"] == 0.25
    # Nothing that would have to be unpacked.
    assert server.fake.requests[-1].headers["accept-encoding"] == "identity"


async def test_the_pieces_of_an_answer_are_handed_out_while_it_is_written(
    server: ModelServer, client: ChatClient
) -> None:
    sink = Listener()
    heard: list[bool] = []

    def stream(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        exchange.stream(server.dialect.token("It is"))
        # Goes on only when the first piece has arrived at the other end.
        heard.append(sink.heard.wait(PATIENCE_S / 2))
        exchange.stream(server.dialect.token(" so.") + server.dialect.end("stop"))
        exchange.end_stream()

    server.plays(stream)
    result = await client.chat(question(), sink=sink)
    assert heard == [True]
    assert sink.pieces == ["It is", " so."]
    assert result.text == "It is so."


async def test_a_cancelled_call_hangs_up_and_the_server_notices(server: ModelServer, client: ChatClient) -> None:
    server.fake.fault = "drip"
    sink = Listener()
    call = asyncio.create_task(client.chat(question(), sink=sink))
    assert await asyncio.to_thread(sink.heard.wait, PATIENCE_S)
    assert not server.fake.server.hung_up.is_set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(server.fake.server.hung_up.wait, PATIENCE_S)


async def test_what_the_sink_raises_ends_the_call_and_stops_the_server(server: ModelServer, client: ChatClient) -> None:
    class Gone(Exception):
        """The reader has left."""

    async def leave(piece: str) -> None:
        raise Gone

    server.fake.fault = "drip"
    with pytest.raises(Gone):
        await client.chat(question(), sink=leave)
    assert await asyncio.to_thread(server.fake.server.hung_up.wait, PATIENCE_S)


async def test_a_reader_that_times_out_by_itself_is_no_slow_model(server: ModelServer, client: ChatClient) -> None:
    async def wait(piece: str) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(PATIENCE_S)

    with pytest.raises(TimeoutError):
        await client.chat(question(), sink=wait)


# --- prompts that are too long -------------------------------------------------------------------


async def test_an_overlong_prompt_is_an_error_with_its_true_length(server: ModelServer, client: ChatClient) -> None:
    # A tokenizer that makes a token of every character: 15 + 9, and twice the template's 4.
    server.fake.count_tokens = len
    server.allot(32, response_tokens=100)
    with pytest.raises(ContextOverflowError) as caught:
        await client.chat(question(window_tokens=32))
    assert caught.value.prompt_tokens == 32
    assert caught.value.window_tokens == (32 if server.provider == "ollama" else 131)


async def test_a_prompt_that_fits_by_one_token_is_answered(server: ModelServer, client: ChatClient) -> None:
    server.fake.count_tokens = len
    server.allot(33, response_tokens=100)
    assert (await client.chat(question(window_tokens=33))).text.startswith("It")


async def test_an_overflow_inside_the_stream_is_recognised(server: ModelServer, client: ChatClient) -> None:
    server.fake.fault = "overflow_line"
    with pytest.raises(ContextOverflowError) as caught:
        await client.chat(question())
    assert (caught.value.prompt_tokens, caught.value.window_tokens) == (9000, 8192)


async def test_an_overflow_after_a_piece_was_handed_out_is_a_broken_answer(
    server: ModelServer, client: ChatClient
) -> None:
    """Whoever has heard half an answer cannot be given another one, so nobody shall shrink and try again."""
    server.fake.fault = "overflow_line"
    sink = Listener()
    with pytest.raises(LLMIncompleteError):
        await client.chat(question(), sink=sink)
    assert sink.pieces == ["It is"]


async def test_an_overflow_without_a_count_is_recognised(server: ModelServer, client: ChatClient) -> None:
    server.fake.fault = "overflow_without_count"
    with pytest.raises(ContextOverflowError) as caught:
        await client.chat(question())
    assert (caught.value.prompt_tokens, caught.value.window_tokens) == (None, None)


# --- thoughts ------------------------------------------------------------------------------------


async def test_thoughts_that_come_apart_are_no_part_of_the_answer(server: ModelServer, client: ChatClient) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        for frame in (
            server.dialect.thought("Hm, is it?"),
            server.dialect.token("\n\nIt is"),
            server.dialect.token(" so."),
        ):
            exchange.stream(frame)
        exchange.stream(server.dialect.end("stop"))
        exchange.end_stream()

    server.plays(stream)
    sink = Listener()
    assert (await client.chat(question(), sink=sink)).text == sink.text == "It is so."


async def test_thoughts_inside_the_answer_are_taken_out_wherever_their_marks_are_cut(
    server: ModelServer, client: ChatClient
) -> None:
    server.says(["<thi", "nk>Hm, 3 <", " 4?</", "thin", "k>", "\n", "\nIt is", " so: 3 <", " 4. [1]"])
    sink = Listener()
    assert (await client.chat(question(), sink=sink)).text == sink.text == "It is so: 3 < 4. [1]"


async def test_an_answer_cut_while_the_model_thinks_is_no_answer(server: ModelServer, client: ChatClient) -> None:
    server.says(["<think>", "Let me see"], reason="length")
    sink = Listener()
    with pytest.raises(LLMIncompleteError, match="by thinking"):
        await client.chat(question(), sink=sink)
    assert sink.pieces == []


async def test_thoughts_without_a_mark_at_their_beginning_are_left_out(server: ModelServer, client: ChatClient) -> None:
    server.says(["Hm, is it?", "</think>", "\n\nIt is", " so."])
    assert (await client.chat(question())).text == "It is so."


async def test_thoughts_that_were_handed_out_before_anybody_could_know_end_in_an_error_once(
    server: ModelServer, client: ChatClient
) -> None:
    server.says(["Hm, is it?", "</think>", "\n\nIt is", " so."])
    with pytest.raises(LLMIncompleteError, match="thoughts"):
        await client.chat(question(), sink=Listener())
    # From now on the model is known for it.
    sink = Listener()
    assert (await client.chat(question(), sink=sink)).text == "It is so."
    assert sink.pieces == ["It is", " so."]
    # And is heard all the same when it does not think.
    server.says(["It is", " so."])
    sink = Listener()
    await client.chat(question(), sink=sink)
    assert sink.pieces == ["It is so."]


THINKING = "<think>Hm? 1 < 2 </b> <THINKING> </ think></think>\n\nSo 1 < 2, <b>x</b>. <thin"
SHOWN = "So 1 < 2, <b>x</b>. <thin"


@settings(deadline=None)
@given(st.sets(st.integers(1, len(THINKING) - 1)))
def test_however_a_text_is_cut_its_thoughts_are_the_same(cuts: set[int]) -> None:
    places = [0, *sorted(cuts), len(THINKING)]
    pieces = [THINKING[start:end] for start, end in itertools.pairwise(places)]
    assert asyncio.run(heard(pieces)) == (SHOWN, SHOWN)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "<", "</", "<thinking>", "</THINK>", "think>", "b<"]))
)
def test_no_thought_is_ever_heard(words: Sequence[str]) -> None:
    """The marks are ours to find: between an opening and a closing one nothing may come out."""
    pieces = [word.replace("a", "SECRET") if depth else word for word, depth in nested(words)]
    try:
        text, listened = asyncio.run(heard(pieces))
    except LLMIncompleteError:
        return
    assert "SECRET" not in text
    assert text == listened


def nested(words: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Each word, and whether thoughts are open before it; words that make a mark together are no part of this."""
    text, inside = "", False
    for word in words:
        yield word, inside
        text += word
        marks = list(chat._THINKING.finditer(text))
        inside = bool(marks) and not marks[-1][1]


async def heard(pieces: Sequence[str]) -> tuple[str, str]:
    sink = Listener()
    transcript = Transcript(sink, hold=False)
    for piece in pieces:
        await transcript.add(piece)
    return (await transcript.finish("stop")).text, sink.text


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_a_server_that_is_down_is_a_connection_error_that_may_be_repeated(provider: str) -> None:
    client = client_of(provider, refusing_url())
    with pytest.raises(LLMConnectionError) as caught:
        await client.chat(question())
    assert caught.value.retry_after_s == 0
    with pytest.raises(LLMConnectionError):
        await client.available_models()
    await client.close()


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("address", ["http://no-such-host.invalid:11434", "localhost:11434", "ftp://localhost", ""])
async def test_an_address_without_a_server_is_a_connection_error(provider: str, address: str) -> None:
    client = client_of(provider, address)
    with pytest.raises(LLMConnectionError):
        await client.chat(question())
    await client.close()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_address_that_is_no_url_is_a_connection_error(provider: str) -> None:
    with pytest.raises(LLMConnectionError):
        client_of(provider, "http://[::1")


FAULTS = [
    ("reset", LLMConnectionError, "temporarily unavailable"),
    ("busy", LLMConnectionError, "temporarily unavailable"),
    ("bad_gateway", LLMConnectionError, "temporarily unavailable"),
    ("rate_limit", LLMBusyError, "Too many"),
    ("crash", LLMError, "llama runner process has terminated"),
    ("endless_refusal", LLMError, "too long"),
    ("missing_model", ModelUnavailableError, "llama3.2"),
    ("html", LLMError, "What answers at"),
    ("plain", LLMError, "What answers at"),
    ("redirect", LLMError, "HTTP 307"),
    ("compressed", LLMError, "compresses"),
    ("error_line", LLMError, "model runner has unexpectedly stopped"),
    ("cut", LLMIncompleteError, "in the middle"),
    ("reset_in_line", LLMIncompleteError, "in the middle"),
    ("no_done", LLMIncompleteError, "in the middle"),
    ("odd_end", LLMIncompleteError, "ended its answer early: unload"),
    ("invalid_utf8", LLMIncompleteError, "its protocol"),
    ("half_surrogate", LLMIncompleteError, "its protocol"),
    ("no_json", LLMIncompleteError, "its protocol"),
    ("deep_json", LLMIncompleteError, "its protocol"),
    ("nan", LLMIncompleteError, "its protocol"),
    ("repeated_key", LLMIncompleteError, "its protocol"),
    ("number_for_text", LLMIncompleteError, "its protocol"),
    ("endless_line", LLMIncompleteError, "its protocol"),
    ("endless", LLMIncompleteError, "did not come to an end"),
    ("endless_silence", LLMIncompleteError, "did not come to an end"),
    ("endless_thoughts", LLMIncompleteError, "did not come to an end"),
    ("empty", LLMIncompleteError, "empty"),
    ("thoughts_only", LLMIncompleteError, "by thinking"),
]


@pytest.mark.parametrize(("fault", "error", "says"), FAULTS)
async def test_a_fault_never_looks_like_an_answer(
    server: ModelServer, client: ChatClient, fault: str, error: type[LLMError], says: str
) -> None:
    server.fake.fault = fault
    with pytest.raises(LLMError, match=says) as caught:
        await client.chat(question())
    assert type(caught.value) is error
    assert len(caught.value.message) < 250


async def test_a_client_works_again_after_every_fault(server: ModelServer, client: ChatClient) -> None:
    for fault, error, _ in FAULTS:
        server.fake.fault = fault
        with pytest.raises(error):
            await client.chat(question())
        server.fake.fault = None
        assert (await client.chat(question())).text == "It is so. [1]"


async def test_an_answer_may_be_so_long_and_no_longer(server: ModelServer, client: ChatClient) -> None:
    most = ["x" * (chat.MAX_ANSWER_BYTES // 4)] * 4
    server.says(most)
    assert len((await client.chat(question())).text) == chat.MAX_ANSWER_BYTES
    server.says([*most, "x"])
    with pytest.raises(LLMIncompleteError, match="did not come to an end"):
        await client.chat(question())


async def test_thoughts_count_as_well(server: ModelServer, client: ChatClient) -> None:
    def stream(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        for _ in range(4):
            exchange.stream(server.dialect.thought("x" * (chat.MAX_ANSWER_BYTES // 4)))
        exchange.stream(server.dialect.token("Yes.") + server.dialect.end("stop"))
        exchange.end_stream()

    server.plays(stream)
    with pytest.raises(LLMIncompleteError, match="did not come to an end"):
        await client.chat(question())


async def test_a_redirect_is_not_followed_prompt_and_key_are_for_one_server(
    server: ModelServer, client: ChatClient
) -> None:
    server.fake.fault = "redirect"
    with pytest.raises(LLMError):
        await client.chat(question())
    with pytest.raises(LLMError):
        await client.available_models()
    assert [request.path for request in server.fake.requests if "elsewhere" in request.path] == []
    assert len(server.fake.requests) == 2


async def test_nothing_is_repeated_by_the_client_itself(server: ModelServer, client: ChatClient) -> None:
    for fault in ("reset", "busy", "busy_later", "rate_limit", "crash"):
        server.fake.fault = fault
        with pytest.raises(LLMError):
            await client.chat(question())
    assert len(server.chats) == 5


async def test_the_servers_words_are_quoted_in_short(server: ModelServer, client: ChatClient) -> None:
    server.plays(lambda exchange: exchange.send(500, server.dialect.problem("why " * 5000, kind="server_error")))
    with pytest.raises(LLMError, match="reports: why why") as caught:
        await client.chat(question())
    assert len(caught.value.message) < 250


# --- when to come back ---------------------------------------------------------------------------


async def test_a_busy_server_may_say_when_to_come_back(server: ModelServer, client: ChatClient) -> None:
    server.fake.fault = "busy_later"
    with pytest.raises(LLMConnectionError) as caught:
        await client.chat(question())
    assert caught.value.retry_after_s == 1


@pytest.mark.parametrize(("status", "error"), [(503, LLMConnectionError), (429, LLMBusyError)])
@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7),
        (" 7 ", 7),
        ("0", 0),
        ("9" * 400, float("inf")),
        ("soon", None),
        ("-3", None),
        ("7.5", None),
        ("٣", None),
    ],
)
async def test_the_header_is_read_as_it_is_defined(
    server: ModelServer, client: ChatClient, status: int, error: type[LLMError], header: str, seconds: float | None
) -> None:
    problem = server.dialect.problem("later", kind="server_error")
    raw = header.encode().decode("latin-1")
    server.plays(lambda exchange: exchange.send(status, problem, headers={"Retry-After": raw}))
    with pytest.raises(error) as caught:
        await client.chat(question())
    assert caught.value.retry_after_s == seconds


async def test_the_header_may_name_a_moment(server: ModelServer, client: ChatClient) -> None:
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    problem = server.dialect.problem("later", kind="server_error")
    server.plays(lambda exchange: exchange.send(503, problem, headers={"Retry-After": moment}))
    with pytest.raises(LLMConnectionError) as caught:
        await client.chat(question())
    assert caught.value.retry_after_s is not None
    assert 60 < caught.value.retry_after_s <= 90


# --- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["slow", "slow_headers"])
async def test_a_server_that_says_nothing_is_a_silent_timeout(server: ModelServer, fault: str) -> None:
    server.fake.fault = fault
    client = server.client(timeout_s=IMPATIENCE_S)
    with pytest.raises(LLMTimeoutError) as caught:
        await client.chat(question())
    assert caught.value.silent
    await client.close()


@pytest.mark.parametrize("fault", ["slow_body", "drip", "never_ends"])
async def test_the_deadline_holds_for_the_whole_answer(server: ModelServer, fault: str) -> None:
    server.fake.fault = fault
    client = server.client(timeout_s=IMPATIENCE_S)
    with pytest.raises(LLMTimeoutError) as caught:
        await client.chat(question())
    # It has spoken, so that it is not the server that is at fault.
    assert not caught.value.silent
    await client.close()


async def test_a_callers_deadline_comes_before_the_servers_time_and_blames_nobody(
    server: ModelServer, client: ChatClient
) -> None:
    server.fake.fault = "slow"
    started = time.monotonic()
    with pytest.raises(LLMTimeoutError) as caught:
        await client.chat(question(), deadline=asyncio.get_running_loop().time() + IMPATIENCE_S)
    assert time.monotonic() - started < PATIENCE_S / 2
    assert not caught.value.silent


async def test_a_deadline_in_the_past_is_a_timeout_at_once(server: ModelServer, client: ChatClient) -> None:
    with pytest.raises(LLMTimeoutError):
        await client.chat(question(), deadline=asyncio.get_running_loop().time() - 1)


# --- lists ---------------------------------------------------------------------------------------


async def test_a_slow_list_of_models_is_a_timeout(server: ModelServer) -> None:
    server.fake.fault = "slow"
    client = server.client(timeout_s=IMPATIENCE_S)
    with pytest.raises(LLMTimeoutError):
        await client.available_models()
    with pytest.raises(LLMTimeoutError):
        await client.context_length("llama3.2")
    await client.close()


@pytest.mark.parametrize("fault", ["html", "crash", "busy", "reset", "redirect", "compressed", "missing_model"])
async def test_a_list_of_models_from_a_faulty_server_is_an_error(
    server: ModelServer, client: ChatClient, fault: str
) -> None:
    server.fake.fault = fault
    with pytest.raises(LLMError):
        await client.available_models()
    with pytest.raises(LLMError):
        await client.context_length("llama3.2")


@pytest.mark.parametrize(
    "body", [b"[]", b"null", b"\xff", b'{"models": 7, "data": 7}', b'{"models": [{}], "data": [{}]}', b"[" * 100_000]
)
async def test_a_list_of_models_in_another_shape_is_an_error(
    server: ModelServer, client: ChatClient, body: bytes
) -> None:
    server.fake.server.answer_with = lambda exchange: exchange.send(200, body)
    with pytest.raises(LLMError, match="What answers at"):
        await client.available_models()


async def test_a_missing_model_is_called_by_its_name(server: ModelServer, client: ChatClient) -> None:
    with pytest.raises(ModelUnavailableError, match="qwen3:8b"):
        await client.chat(question(model="qwen3:8b"))
    with pytest.raises(ModelUnavailableError, match="qwen3:8b"):
        await client.context_length("qwen3:8b")


async def test_a_404_of_another_server_is_no_missing_model(server: ModelServer, client: ChatClient) -> None:
    server.plays(lambda exchange: exchange.send_html(404))
    with pytest.raises(LLMError, match="HTTP 404") as caught:
        await client.chat(question())
    assert not isinstance(caught.value, ModelUnavailableError)


@pytest.mark.parametrize("status", [401, 403])
async def test_a_refused_key_is_nothing_that_waiting_heals(
    server: ModelServer, client: ChatClient, status: int
) -> None:
    server.plays(lambda exchange: exchange.send(status, server.dialect.problem("no: sk-test", kind="invalid_api_key")))
    with pytest.raises(ModelUnavailableError, match=f"HTTP {status}") as caught:
        await client.chat(question())
    assert "sk-" not in caught.value.message
