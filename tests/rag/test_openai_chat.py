"""What servers of OpenAI's protocol have for themselves: keys, parameters, lists, sentences about length.

What they share with Ollama is in test_chat.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rag.errors import ContextOverflowError, LLMError, LLMIncompleteError, ModelUnavailableError
from rag.openai_chat import OpenAIClient
from tests.fakes.openai_chat import FakeOpenAIChat, fake_openai_chat
from tests.rag.model_servers import PATIENCE_S, QUESTION, question


@pytest.fixture
def server() -> Iterator[FakeOpenAIChat]:
    with fake_openai_chat() as fake:
        yield fake


@pytest.fixture
async def client(server: FakeOpenAIChat) -> AsyncIterator[OpenAIClient]:
    client = OpenAIClient(server.base_url, api_key="sk-test", timeout_s=PATIENCE_S)
    yield client
    await client.close()


# --- what is sent --------------------------------------------------------------------------------


async def test_the_server_is_asked_for_a_stream_of_so_many_tokens(server: FakeOpenAIChat, client: OpenAIClient) -> None:
    await client.chat(question(window_tokens=6000, response_tokens=77, temperature=0.25))
    assert server.requests[-1].body == {
        "model": "llama3.2",
        "messages": list(QUESTION),
        "stream": True,
        "max_tokens": 77,
        "temperature": 0.25,
    }
    assert server.requests[-1].headers["authorization"] == "Bearer sk-test"


async def test_a_schema_is_the_format_of_the_answer(server: FakeOpenAIChat, client: OpenAIClient) -> None:
    schema = {"type": "object", "properties": {"grade": {"type": "integer"}}}
    await client.chat(question(schema=schema))
    assert server.requests[-1].body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema},
    }


async def test_a_model_that_refuses_a_parameter_is_asked_without_it_and_that_is_remembered(
    server: FakeOpenAIChat, client: OpenAIClient
) -> None:
    """As OpenAI's reasoning models do: another name for the limit, and no temperature."""
    server.unsupported = ("max_tokens", "temperature")
    assert (await client.chat(question(response_tokens=3))).truncated
    sent = [
        sorted(set(request.body) & {"max_tokens", "max_completion_tokens", "temperature"})
        for request in server.requests
    ]
    assert sent == [["max_tokens", "temperature"], ["max_completion_tokens", "temperature"], ["max_completion_tokens"]]
    assert server.requests[-1].body["max_completion_tokens"] == 3

    await client.chat(question())
    assert len(server.requests) == 4

    # What one model refuses, another may take.
    server.models, server.unsupported = ("llama3.2", "other"), ()
    await client.chat(question(model="other"))
    assert "temperature" in server.requests[-1].body


async def test_a_refusal_that_no_other_request_could_heal_is_an_error(
    server: FakeOpenAIChat, client: OpenAIClient
) -> None:
    server.unsupported = ("messages",)
    with pytest.raises(LLMError, match="Unsupported parameter: 'messages'"):
        await client.chat(question())
    # Both names of the limit: the second refusal ends it.
    server.unsupported = ("max_tokens", "max_completion_tokens")
    with pytest.raises(LLMError, match="max_completion_tokens"):
        await client.chat(question())
    assert len(server.requests) == 3


async def test_a_server_that_refuses_what_it_was_not_sent_is_not_asked_for_ever(
    server: FakeOpenAIChat, client: OpenAIClient
) -> None:
    error = {"message": "No temperature, please.", "param": "temperature", "code": "unsupported_value"}
    server.server.answer_with = lambda exchange: exchange.send(400, {"error": error})
    with pytest.raises(LLMError, match="No temperature"):
        await client.chat(question())
    assert len(server.requests) == 2


def test_openai_itself_is_not_asked_without_a_key() -> None:
    with pytest.raises(ModelUnavailableError, match="OPENAI_API_KEY"):
        OpenAIClient("https://api.openai.com/v1", api_key=None, timeout_s=1)


async def test_a_server_of_ones_own_is_asked_without_a_key(server: FakeOpenAIChat) -> None:
    server.api_key = "none"
    client = OpenAIClient(server.base_url, api_key=None, timeout_s=PATIENCE_S)
    assert (await client.chat(question())).text == "It is so. [1]"
    await client.close()


async def test_a_wrong_key_is_refused_and_not_repeated_in_the_error(server: FakeOpenAIChat) -> None:
    client = OpenAIClient(server.base_url, api_key="sk-wrong", timeout_s=PATIENCE_S)
    with pytest.raises(ModelUnavailableError, match="refuses the API key") as caught:
        await client.available_models()
    assert "sk-" not in caught.value.message
    await client.close()


async def test_an_account_without_quota_is_nothing_that_waiting_heals(
    server: FakeOpenAIChat, client: OpenAIClient
) -> None:
    server.fault = "insufficient_quota"
    with pytest.raises(ModelUnavailableError, match="no quota"):
        await client.chat(question())


# --- lists ---------------------------------------------------------------------------------------


async def test_models_are_called_by_their_whole_names(server: FakeOpenAIChat, client: OpenAIClient) -> None:
    server.models = ("meta-llama/Llama-3.2", "gpt-4.1-mini")
    assert await client.available_models() == ["meta-llama/Llama-3.2", "gpt-4.1-mini"]
    assert client.same_model("gpt-4.1-mini", "gpt-4.1-mini")
    for other in ("gpt-4.1", "gpt-4.1-mini:latest", "GPT-4.1-mini", "gpt-4.1-mini "):
        assert not client.same_model(other, "gpt-4.1-mini")


@pytest.mark.parametrize(
    ("said", "length"),
    [
        ({}, None),
        ({"max_model_len": 4096}, 4096),
        ({"context_length": 131_072}, 131_072),
        ({"context_window": 8192}, 8192),
        ({"max_context_length": 32_768}, 32_768),
        ({"meta": {"n_ctx": 4096, "n_ctx_train": 131_072}}, 4096),
        ({"meta": None, "max_model_len": None}, None),
        ({"max_model_len": "4096"}, None),
        ({"max_model_len": 0}, None),
    ],
)
async def test_a_window_is_what_the_list_says_of_it(
    server: FakeOpenAIChat, client: OpenAIClient, said: dict[str, Any], length: int | None
) -> None:
    models = [{"id": "other", "max_model_len": 17}, {"id": "llama3.2"} | said]
    server.server.answer_with = lambda exchange: exchange.send(200, {"object": "list", "data": models})
    assert await client.context_length("llama3.2") == length


# --- streams -------------------------------------------------------------------------------------


def event(delta: object, reason: object = None) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}).encode() + b"\n\n"
    )


async def told(server: FakeOpenAIChat, client: OpenAIClient, stream: bytes) -> str:
    server.server.answer_with = lambda exchange: exchange.send(200, stream, media_type="text/event-stream")
    return (await client.chat(question())).text


async def test_what_is_no_part_of_the_answer_is_passed_over(server: FakeOpenAIChat, client: OpenAIClient) -> None:
    stream = (
        b": OPENROUTER PROCESSING\r\n\r\n"
        + b'data: {"choices": [], "prompt_filter_results": []}\n\n'
        + b"event: message\nid: 1\nretry: 10\n"
        + event({"role": "assistant", "content": ""})
        + event({"content": "It is"}).replace(b"\n\n", b"\r\n\r\n")
        + event({"content": " so."}).replace(b"data: ", b"data:")
        + event({}, "stop")
    )
    assert await told(server, client, stream) == "It is so."


async def test_an_answer_is_whole_with_its_reason_and_needs_no_more(
    server: FakeOpenAIChat, client: OpenAIClient
) -> None:
    assert await told(server, client, event({"content": "Yes."}, "stop").strip()) == "Yes."
    with pytest.raises(LLMIncompleteError, match="in the middle"):
        await told(server, client, event({"content": "Yes."}) + b"data: [DONE]\n\n")


@pytest.mark.parametrize("reason", ["content_filter", "tool_calls", "function_call", "abort", "error", 7, {}, "STOP"])
async def test_an_answer_that_ends_for_another_reason_is_none(
    server: FakeOpenAIChat, client: OpenAIClient, reason: object
) -> None:
    with pytest.raises(LLMIncompleteError, match="ended its answer early"):
        await told(server, client, event({"content": "Yes."}, reason))


async def test_llama_cpps_own_field_of_errors_is_read(server: FakeOpenAIChat, client: OpenAIClient) -> None:
    error = b'error: {"code": 500, "message": "failed to decode", "type": "server_error"}\n\n'
    with pytest.raises(LLMError, match="reports: failed to decode"):
        await told(server, client, event({"content": "Yes."}) + error)


# --- prompts that are too long -------------------------------------------------------------------

SENTENCES = [
    # OpenAI
    (
        {
            "error": {
                "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000"
                " tokens. Please reduce the length of the messages.",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "context_length_exceeded",
            }
        },
        (9000, 8192),
    ),
    (
        {
            "error": {
                "message": "Your input exceeds the context window of this model. Please adjust your input.",
                "type": "invalid_request_error",
                "code": "context_length_exceeded",
            }
        },
        (None, None),
    ),
    # vLLM, through the years
    (
        {
            "object": "error",
            "message": "This model's maximum context length is 4096 tokens. However, you requested 5024 tokens (4000 in"
            " the messages, 1024 in the completion). Please reduce the length of the messages or completion.",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
        (4000, 4096),
    ),
    (
        {
            "error": {
                "message": "'max_tokens' or 'max_completion_tokens' is too large: 1024. This model's maximum context"
                " length is 4096 tokens and your request has 3500 input tokens (1024 > 4096 - 3500).",
                "type": "BadRequestError",
                "code": 400,
            }
        },
        (3500, 4096),
    ),
    (
        {
            "error": {
                "message": "This model's maximum context length is 16384 tokens. However, you requested 8192 output"
                " tokens and your prompt contains at least 8193 input tokens, for a total of at least 16385 tokens.",
                "code": 400,
            }
        },
        (8193, 16384),
    ),
    # llama.cpp
    (
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size, try increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 351,
                "n_ctx": 256,
            }
        },
        (351, 256),
    ),
]


@pytest.mark.parametrize(("body", "counts"), SENTENCES)
async def test_an_overflow_is_found_in_every_servers_words(
    server: FakeOpenAIChat, client: OpenAIClient, body: object, counts: tuple[int | None, int | None]
) -> None:
    server.server.answer_with = lambda exchange: exchange.send(400, body)
    with pytest.raises(ContextOverflowError) as caught:
        await client.chat(question())
    assert (caught.value.prompt_tokens, caught.value.window_tokens) == counts


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "Invalid value: 'tool'.", "code": ["context_length_exceeded"], "type": {}}},
        {"error": {"code": None, "message": None}},
        {"error": 7},
        {"detail": "Not Found"},
        [],
        None,
    ],
)
async def test_other_refusals_are_no_overflow(server: FakeOpenAIChat, client: OpenAIClient, body: object) -> None:
    server.server.answer_with = lambda exchange: exchange.send(400, body)
    with pytest.raises(LLMError) as caught:
        await client.chat(question())
    assert type(caught.value) is LLMError
