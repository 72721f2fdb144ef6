"""What Ollama has for itself: its request, its names, its windows, its ways to say that a prompt is too long.

What it shares with other servers is in test_chat.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import pytest

from rag.errors import ContextOverflowError, LLMError, ModelUnavailableError
from rag.ollama import OllamaClient, same_model
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.rag.model_servers import PATIENCE_S, QUESTION, question


@pytest.fixture
def server() -> Iterator[FakeOllama]:
    with fake_ollama() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeOllama) -> AsyncIterator[OllamaClient]:
    client = OllamaClient(server.base_url, timeout_s=PATIENCE_S)
    yield client
    await client.close()


async def test_the_server_is_told_to_cut_nothing(server: FakeOllama, client: OllamaClient) -> None:
    await client.chat(question(window_tokens=6000, response_tokens=77, temperature=0.25))
    assert server.requests[-1].body == {
        "model": "llama3.2",
        "messages": list(QUESTION),
        "stream": True,
        "truncate": False,
        "shift": False,
        "think": False,
        "options": {"num_ctx": 6000, "num_predict": 77, "temperature": 0.25},
    }


async def test_a_schema_is_the_format_of_the_answer(server: FakeOllama, client: OllamaClient) -> None:
    schema = {"type": "object", "properties": {"grade": {"type": "integer"}}}
    await client.chat(question(schema=schema))
    assert server.requests[-1].body["format"] == schema


async def test_installed_models_are_listed_with_their_tags(server: FakeOllama, client: OllamaClient) -> None:
    server.models = ("llama3.2:latest", "qwen3:8b")
    assert await client.available_models() == ["llama3.2:latest", "qwen3:8b", "nomic-embed-text:latest"]


async def test_a_missing_model_says_how_to_get_it(server: FakeOllama, client: OllamaClient) -> None:
    with pytest.raises(ModelUnavailableError, match="ollama pull qwen3:8b"):
        await client.chat(question(model="qwen3:8b"))


@pytest.mark.parametrize("body", [{"done": True}, {"done": True, "done_reason": None}])
async def test_older_versions_give_no_reason_for_the_end(
    server: FakeOllama, client: OllamaClient, body: dict[str, object]
) -> None:
    frame = {"message": {"role": "assistant", "content": "Yes."}} | body
    server.server.answer_with = lambda exchange: exchange.send(200, frame)
    assert not (await client.chat(question())).truncated


# --- names ---------------------------------------------------------------------------------------


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


# --- windows -------------------------------------------------------------------------------------

STOP = 'stop                           "<|eot_id|>"'


@pytest.mark.parametrize(
    ("parameters", "length"),
    [
        (STOP, 8192),
        ("num_ctx                        4096\n" + STOP, 4096),
        (STOP + "\nnum_ctx                        2048", 2048),
        ("num_ctx                        16384", 8192),
        ("num_ctx                        many", 8192),
        ('stop "num_ctx 12"', 8192),
        ("", 8192),
        (None, 8192),
    ],
)
async def test_a_models_window_is_what_it_was_trained_for_or_what_its_builder_set(
    server: FakeOllama, client: OllamaClient, parameters: str, length: int
) -> None:
    server.context_length, server.parameters = 8192, parameters
    assert await client.context_length("llama3.2") == length
    assert server.requests[-1].body == {"model": "llama3.2"}


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"model_info": None},
        {"model_info": {}},
        {"model_info": {"general.architecture": "llama", "gemma.context_length": 8192}},
        {"model_info": {"general.architecture": "llama", "llama.context_length": "8192"}},
        {"model_info": {"general.architecture": "llama", "llama.context_length": True}},
        {"model_info": {"general.architecture": "llama", "llama.context_length": 0}},
        {"parameters": 7},
    ],
)
async def test_a_model_that_is_described_without_its_window_has_none_that_we_know(
    server: FakeOllama, client: OllamaClient, described: dict[str, object]
) -> None:
    server.server.answer_with = lambda exchange: exchange.send(200, described)
    assert await client.context_length("llama3.2") is None


# --- prompts that are too long -------------------------------------------------------------------


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
        await client.chat(question())
    assert caught.value.prompt_tokens == prompt_tokens


@pytest.mark.parametrize(
    "error", ["", None, 7, [], {}, "{" * 5000, "[" * 5000, '{"error": {"type": "invalid_request_error"}}']
)
async def test_other_errors_are_no_overflow(server: FakeOllama, client: OllamaClient, error: object) -> None:
    server.server.answer_with = lambda exchange: exchange.send(400, {"error": error})
    with pytest.raises(LLMError) as caught:
        await client.chat(question())
    assert type(caught.value) is LLMError
    assert len(caught.value.message) < 250


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
    assert seen == [list(QUESTION)]
    with pytest.raises(ContextOverflowError) as caught:
        await client.chat(question(messages=turns, window_tokens=32))
    assert caught.value.prompt_tokens == 57
