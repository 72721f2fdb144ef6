"""The Ollama client against a server that speaks the protocol, faults included."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rag.errors import (
    ContextOverflowError,
    LLMConnectionError,
    LLMError,
    LLMIncompleteError,
    LLMTimeoutError,
    ModelUnavailableError,
)
from rag.ollama import ChatResult, OllamaClient, same_model
from tests.fakes import refusing_url
from tests.fakes.ollama import FakeOllama, fake_ollama

QUESTION = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "Is it so?"}]
# Long enough for a loaded machine; no test that succeeds waits for it.
PATIENCE_S = 20.0
# For tests of the deadline itself.
IMPATIENCE_S = 0.3


@pytest.fixture
def server() -> Iterator[FakeOllama]:
    with fake_ollama() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeOllama) -> AsyncIterator[OllamaClient]:
    client = OllamaClient(server.base_url, timeout_s=PATIENCE_S)
    yield client
    await client.close()


async def ask(client: OllamaClient, **changes: Any) -> ChatResult:
    options = {"model": "llama3.2", "num_ctx": 8192, "num_predict": 100, "temperature": 0.1} | changes
    messages = options.pop("messages", QUESTION)
    return await client.chat(messages=messages, **options)


# --- what is sent and what comes back ------------------------------------------------------------


async def test_an_answer_is_joined_from_its_stream(server: FakeOllama, client: OllamaClient) -> None:
    server.answer = lambda messages: f"Yes: {messages[-1]['content']} Ça va — 好."
    result = await ask(client)
    assert result.text == "Yes: Is it so? Ça va — 好."
    assert result.done_reason == "stop"
    assert not result.truncated
    # "Answer briefly." and "Is it so?" are 2 + 3 words, and each message costs 4 tokens of template.
    assert result.prompt_tokens == 13
    assert result.answer_tokens == 8


async def test_the_server_is_told_to_cut_nothing(server: FakeOllama, client: OllamaClient) -> None:
    await ask(client, num_ctx=6000, num_predict=77, temperature=0.25)
    assert server.requests[-1].body == {
        "model": "llama3.2",
        "messages": QUESTION,
        "stream": True,
        "truncate": False,
        "shift": False,
        "think": False,
        "options": {"num_ctx": 6000, "num_predict": 77, "temperature": 0.25},
    }


async def test_an_answer_at_its_limit_is_marked_truncated(server: FakeOllama, client: OllamaClient) -> None:
    server.answer = lambda messages: "one two three four five"
    result = await ask(client, num_predict=3)
    assert result.text == "one two three"
    assert result.done_reason == "length"
    assert result.truncated


async def test_installed_models_are_listed_with_their_tags(server: FakeOllama, client: OllamaClient) -> None:
    server.models = ("llama3.2:latest", "qwen3:8b")
    assert await client.available_models() == ["llama3.2:latest", "qwen3:8b", "nomic-embed-text:latest"]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("llama3.2", "llama3.2:latest"),
        ("qwen3:8b", "qwen3:8b"),
        ("Llama3.2:Latest", "llama3.2"),
        ("library/llama3.2", "llama3.2"),
        ("hf.co/someone/model:Q4_K_M", "hf.co/someone/model:q4_k_m"),
        ("localhost:5000/team/model", "localhost:5000/team/model:latest"),
    ],
)
def test_names_of_one_model_are_the_same(left: str, right: str) -> None:
    assert same_model(left, right)
    assert same_model(right, left)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("qwen3:8b", "qwen3"),
        ("qwen3:8b", "qwen3:14b"),
        ("llama3.2", "llama3"),
        ("someone/llama3.2", "llama3.2"),
        ("hf.co/library/llama3.2", "llama3.2"),
        ("", "llama3.2"),
    ],
)
def test_names_of_two_models_differ(left: str, right: str) -> None:
    assert not same_model(left, right)


# --- prompts that are too long -------------------------------------------------------------------


async def test_an_overlong_prompt_is_an_error_with_its_true_length(server: FakeOllama, client: OllamaClient) -> None:
    # A tokenizer that makes a token of every character.
    server.count_tokens = len
    with pytest.raises(ContextOverflowError) as caught:
        await ask(client, num_ctx=32)
    # 15 + 9 characters and twice the template's 4.
    assert caught.value.prompt_tokens == 32


async def test_a_prompt_that_fits_by_one_token_is_answered(server: FakeOllama, client: OllamaClient) -> None:
    server.count_tokens = len
    assert (await ask(client, num_ctx=34)).prompt_tokens == 32


async def test_an_overflow_inside_the_stream_is_recognised(server: FakeOllama, client: OllamaClient) -> None:
    server.fault = "overflow_line"
    with pytest.raises(ContextOverflowError) as caught:
        await ask(client)
    assert caught.value.prompt_tokens == 13


async def test_an_overflow_without_a_count_is_recognised(server: FakeOllama, client: OllamaClient) -> None:
    server.fault = "overflow_without_count"
    with pytest.raises(ContextOverflowError) as caught:
        await ask(client)
    assert caught.value.prompt_tokens is None


LLAMA_CPP = {
    "code": 400,
    "message": "request (351 tokens) exceeds the available context size (256 tokens), try increasing it",
    "type": "exceed_context_size_error",
    "n_prompt_tokens": 351,
    "n_ctx": 256,
}


@pytest.mark.parametrize(
    ("error", "prompt_tokens"),
    [
        (json.dumps({"error": LLAMA_CPP}), 351),
        (json.dumps({"error": LLAMA_CPP}) + "\nggml: out of memory", 351),
        (json.dumps({"error": json.dumps({"error": LLAMA_CPP})}), 351),
        ({"error": LLAMA_CPP}, 351),
        (LLAMA_CPP, 351),
        (LLAMA_CPP["message"], 351),
        (json.dumps({"error": LLAMA_CPP | {"n_prompt_tokens": "many"}}), 351),
        (json.dumps({"error": LLAMA_CPP | {"n_prompt_tokens": True, "message": ""}}), None),
        (json.dumps({"error": {"type": "exceed_context_size_error"}})[:-1], None),
        ("the prompt is longer than the context length currently available to the model", None),
    ],
)
async def test_an_overflow_is_found_however_it_is_wrapped(
    server: FakeOllama, client: OllamaClient, error: object, prompt_tokens: int | None
) -> None:
    server.server.answer_with = lambda exchange: exchange.send(400, {"error": error})
    with pytest.raises(ContextOverflowError) as caught:
        await ask(client)
    assert caught.value.prompt_tokens == prompt_tokens


@pytest.mark.parametrize(
    "error", ["", None, 7, [], {}, "{" * 5000, "[" * 5000, '{"error": {"type": "invalid_request_error"}}']
)
async def test_other_errors_are_no_overflow(server: FakeOllama, client: OllamaClient, error: object) -> None:
    server.server.answer_with = lambda exchange: exchange.send(400, {"error": error})
    with pytest.raises(LLMError) as caught:
        await ask(client)
    assert type(caught.value) is LLMError
    assert len(caught.value.message) < 250


# --- faults --------------------------------------------------------------------------------------


async def test_a_server_that_is_down_is_a_connection_error() -> None:
    client = OllamaClient(refusing_url(), timeout_s=PATIENCE_S)
    with pytest.raises(LLMConnectionError):
        await ask(client)
    with pytest.raises(LLMConnectionError):
        await client.available_models()
    await client.close()


@pytest.mark.parametrize("address", ["http://no-such-host.invalid:11434", "localhost:11434", "ftp://localhost", ""])
async def test_an_address_without_a_server_is_a_connection_error(address: str) -> None:
    client = OllamaClient(address, timeout_s=PATIENCE_S)
    with pytest.raises(LLMConnectionError):
        await ask(client)
    await client.close()


def test_an_address_that_is_no_url_is_a_connection_error() -> None:
    with pytest.raises(LLMConnectionError):
        OllamaClient("http://[::1", timeout_s=PATIENCE_S)


FAULTS = [
    ("reset", LLMConnectionError, "temporarily unavailable"),
    ("busy", LLMConnectionError, "temporarily unavailable"),
    ("crash", LLMError, "llama runner process has terminated"),
    ("html", LLMError, "no Ollama server"),
    ("error_line", LLMError, "model runner has unexpectedly stopped"),
    ("cut", LLMIncompleteError, "in the middle"),
    ("no_done", LLMIncompleteError, "in the middle"),
    ("invalid_utf8", LLMIncompleteError, "lines of JSON"),
    ("no_json", LLMIncompleteError, "lines of JSON"),
    ("empty", LLMIncompleteError, "empty"),
    ("endless", LLMIncompleteError, "did not come to an end"),
    ("endless_line", LLMIncompleteError, "lines of JSON"),
]


@pytest.mark.parametrize(("fault", "error", "says"), FAULTS)
async def test_a_fault_never_looks_like_an_answer(
    server: FakeOllama, client: OllamaClient, fault: str, error: type[LLMError], says: str
) -> None:
    server.fault = fault
    with pytest.raises(LLMError, match=says) as caught:
        await ask(client)
    assert type(caught.value) is error


@pytest.mark.parametrize("fault", ["slow", "drip"])
async def test_the_deadline_holds_for_the_whole_answer(server: FakeOllama, fault: str) -> None:
    server.fault = fault
    client = OllamaClient(server.base_url, timeout_s=IMPATIENCE_S)
    with pytest.raises(LLMTimeoutError):
        await ask(client)
    await client.close()


async def test_a_slow_list_of_models_is_a_timeout(server: FakeOllama) -> None:
    server.fault = "slow"
    client = OllamaClient(server.base_url, timeout_s=IMPATIENCE_S)
    with pytest.raises(LLMTimeoutError):
        await client.available_models()
    await client.close()


@pytest.mark.parametrize("fault", ["html", "crash", "busy", "reset"])
async def test_a_list_of_models_from_a_faulty_server_is_an_error(
    server: FakeOllama, client: OllamaClient, fault: str
) -> None:
    server.fault = fault
    with pytest.raises(LLMError):
        await client.available_models()


@pytest.mark.parametrize("body", [b"[]", b"null", b'{"models": 7}', b'{"models": [{}]}', b"[" * 100_000])
async def test_a_list_of_models_in_another_shape_is_an_error(
    server: FakeOllama, client: OllamaClient, body: bytes
) -> None:
    server.server.answer_with = lambda exchange: exchange.send(200, body)
    with pytest.raises(LLMError, match="no Ollama server"):
        await client.available_models()


async def test_a_missing_model_says_how_to_get_it(server: FakeOllama, client: OllamaClient) -> None:
    with pytest.raises(ModelUnavailableError, match="ollama pull qwen3:8b"):
        await ask(client, model="qwen3:8b")


async def test_a_404_of_another_server_is_no_missing_model(server: FakeOllama, client: OllamaClient) -> None:
    server.server.answer_with = lambda exchange: exchange.send_html(404)
    with pytest.raises(LLMError, match="HTTP 404") as caught:
        await ask(client)
    assert not isinstance(caught.value, ModelUnavailableError)


async def test_the_servers_words_are_quoted_in_short(server: FakeOllama, client: OllamaClient) -> None:
    server.server.answer_with = lambda exchange: exchange.send(500, {"error": "why " * 5000})
    with pytest.raises(LLMError) as caught:
        await ask(client)
    assert len(caught.value.message) < 250


async def test_an_endless_error_body_comes_to_an_end(server: FakeOllama, client: OllamaClient) -> None:
    server.server.answer_with = lambda exchange: exchange.send(500, b"x" * (3 * 1024 * 1024))
    with pytest.raises(LLMError, match="too long"):
        await ask(client)


async def test_a_body_that_cannot_be_unpacked_is_an_error(server: FakeOllama, client: OllamaClient) -> None:
    server.server.answer_with = lambda exchange: exchange.send(200, b"no gzip", headers={"Content-Encoding": "gzip"})
    with pytest.raises(LLMIncompleteError):
        await ask(client)
    with pytest.raises(LLMError):
        await client.available_models()


async def test_a_client_works_again_after_every_fault(server: FakeOllama, client: OllamaClient) -> None:
    for fault, error, _ in FAULTS:
        server.fault = fault
        with pytest.raises(error):
            await ask(client)
        server.fault = None
        assert (await ask(client)).text == "It is so. [1]"


async def test_the_fake_cuts_a_long_prompt_silently_unless_told_not_to(
    server: FakeOllama, client: OllamaClient
) -> None:
    """What our `truncate: false` is for: without it the oldest message is lost under status 200."""
    seen: list[list[dict[str, str]]] = []

    def answer(messages: list[dict[str, str]]) -> str:
        seen.append(messages)
        return "Yes."

    server.answer = answer
    turns = [QUESTION[0], {"role": "user", "content": "a " * 40}, QUESTION[1]]
    response = await client._http.post(
        "/api/chat",
        json={"model": "llama3.2", "messages": turns, "stream": False, "options": {"num_ctx": 32}},
    )
    assert response.status_code == 200
    assert response.json()["prompt_eval_count"] == 13
    assert seen == [QUESTION]
    with pytest.raises(ContextOverflowError) as caught:
        await ask(client, messages=turns, num_ctx=32)
    assert caught.value.prompt_tokens == 57
