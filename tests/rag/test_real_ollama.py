"""The same client, and the whole line, against an Ollama of one's own: OLLAMA_BASE_URL, and CHAT_MODEL unless any model
will do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import httpx2
import pytest

from rag import prompt
from rag.answer import INSUFFICIENT_CONTEXT, RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import ContextOverflowError, ModelUnavailableError
from rag.events import Done, Retracted, Sources, Token
from rag.exchange import RAGRequest
from rag.generate import Generator, open_generator
from rag.principal import Principal
from rag.settings import ModelLimits, Settings
from rag.store import halfvec
from tests.rag.model_servers import Listener
from tests.rag.passages import passage

PROMPT = prompt.build("When do backups run?", [passage("Backups run every night at two.")], [], nonce="0a1b2c")
ANNA = Principal(tenant_id="acme", user_id=1)
OTTO = Principal(tenant_id="acme", user_id=2)
# A model that has to be loaded from a slow disk first.
PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def model() -> str:
    """The model to ask; skips where there is none."""
    url = os.environ.get("OLLAMA_BASE_URL")
    if url is None:
        pytest.skip("no Ollama of its own: set OLLAMA_BASE_URL")
    try:
        listed = httpx2.get(f"{url}/api/tags", timeout=5.0).json()["models"]
    except (httpx2.HTTPError, ValueError, LookupError) as error:
        pytest.skip(f"no Ollama answers at OLLAMA_BASE_URL ({type(error).__name__})")
    wanted = os.environ.get("CHAT_MODEL") or next((one["name"] for one in listed if "embed" not in one["name"]), None)
    if wanted is None:
        pytest.skip("the Ollama at OLLAMA_BASE_URL has no model: run ollama pull llama3.2")
    return wanted


@pytest.fixture
async def generator(model: str) -> AsyncIterator[Generator]:
    generator = open_generator(settings(model))
    yield generator
    await generator.close()


def settings(model: str, *, window: int = 4096, **changes: Any) -> Settings:
    limits = {model: ModelLimits(context_window=window, max_response=256)}
    given = {"rag_llm_provider": "ollama", "chat_model": model, "rag_model_limits": limits}
    url = os.environ["OLLAMA_BASE_URL"]
    return Settings(_env_file=None, ollama_base_url=url, rag_timeout_seconds=PATIENCE_S, **(given | changes))


async def test_a_model_writes_from_its_source_and_is_heard_while_it_does(model: str, generator: Generator) -> None:
    assert await generator.choose(None) == model
    sink = Listener()
    draft = await generator.write(PROMPT, model=model, sink=sink)
    assert draft.text == sink.text
    assert len(sink.pieces) > 1
    assert "<think" not in draft.text
    assert "night" in draft.text.lower() or "two" in draft.text.lower()


async def test_the_whole_line_cites_what_it_was_given_and_nothing_else(
    model: str, generator: Generator, database: Database, embedder: Embedder, store: Callable[..., UUID]
) -> None:
    text = "Backups of the orders database run every night at 02:00 and are kept for 35 days."
    (vector,) = await embedder.embed([text], purpose="document")
    stored = store(ANNA, text, embedding=halfvec(vector), embedding_model=embedder.model_id, title="Backups")
    service = RAGService(settings(model), database, embedder, generator)
    asked = RAGRequest(query="When do backups of the orders database run?")

    response = await service.generate(asked, principal=ANNA)
    assert {citation.source_id for citation in response.citations} <= {f"{stored}:0"}
    assert response.grounded == bool(response.citations)
    assert 0 <= response.confidence.llm_score <= 100
    assert response.model_used == model

    events = [event async for event in service.stream(asked, principal=ANNA)]
    assert isinstance(events[0], Sources)
    assert isinstance(events[-1], Done)
    retracted = any(isinstance(event, Retracted) for event in events)
    shown = "".join(event.text for event in events if isinstance(event, Token))
    assert retracted or shown == events[-1].response.answer

    # Somebody who may read none of it: no model is asked.
    empty = await service.generate(asked, principal=OTTO)
    assert (empty.answer, empty.action, empty.grounded) == (INSUFFICIENT_CONTEXT, "ROUTE", False)


async def test_a_schema_is_obeyed(model: str, generator: Generator) -> None:
    schema = {"type": "object", "properties": {"grade": {"type": "integer"}}, "required": ["grade"]}
    messages = [{"role": "user", "content": "Grade this answer from 0 to 100: it is right."}]
    draft = await generator.ask(messages, model=model, response_tokens=64, schema=schema)
    assert draft.text.lstrip().startswith("{")


async def test_a_prompt_that_is_too_long_is_refused_with_its_length(model: str) -> None:
    generator = open_generator(settings(model, window=512))
    long = prompt.build("Why?", [passage("word " * 3000)], [])
    with pytest.raises(ContextOverflowError) as caught:
        await generator.write(long, model=model)
    assert caught.value.prompt_tokens is None or caught.value.prompt_tokens > 512
    await generator.close()


async def test_the_true_window_is_known_after_the_check(model: str) -> None:
    generator = open_generator(settings(model, window=100_000_000, rag_max_context_tokens=50_000_000))
    await generator.check()
    assert generator.limits(model).window < 100_000_000
    await generator.close()


async def test_a_model_that_is_not_there_is_said_to_be_missing(model: str) -> None:
    absent = "palisade-no-such-model"
    generator = open_generator(settings(absent))
    with pytest.raises(ModelUnavailableError, match="ollama pull"):
        await generator.choose(None)
    with pytest.raises(ModelUnavailableError, match="ollama pull"):
        await generator.write(PROMPT, model=absent)
    await generator.close()


async def test_a_cancelled_answer_leaves_the_server_free_for_the_next(model: str, generator: Generator) -> None:
    sink = Listener()
    call = asyncio.create_task(generator.write(PROMPT, model=model, sink=sink))
    assert await asyncio.to_thread(sink.heard.wait, PATIENCE_S)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await generator.write(PROMPT, model=model)).text
