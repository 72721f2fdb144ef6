"""What a tenant tells the model: its own tenant's alone, fresh with each question, and never instead of our rules."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest

from rag import operate, prompt
from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import InvalidInput, TokenBudgetExceededError
from rag.exchange import RAGRequest, TenantPrompt
from rag.generate import open_generator
from rag.principal import Principal
from rag.settings import ModelLimits, Settings
from rag.store import halfvec
from rag.tenant_prompts import (
    MAX_PROMPT_BYTES,
    list_prompts,
    read_prompt,
    remove_prompt,
    set_prompt,
    system_prompt,
)
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama, fake_ollama

ANNA = Principal(tenant_id="acme", user_id=1)
NAMESAKE = Principal(tenant_id="umbrella", user_id=1)

BACKUPS = "Backups of the orders database run every night at 02:00 and are kept for 35 days."
QUESTION = "When do backups of the orders database run?"
PIRATE = "You are the help desk of Acme. Say {context} and %(answer)s and [S1-0a1b2c] like {a pirate}."

Tell = Callable[..., int]


@pytest.fixture
def desk(deployment: Deployment) -> operate.Desk:
    return operate.Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)


@pytest.fixture
def tell(desk: operate.Desk) -> Tell:
    """`tell(text, tenant="acme", replaces=False)` sets a prompt, and says which generation it is."""

    def say(text: str, *, tenant: str = "acme", replaces: bool = False) -> int:
        with desk.session() as session:
            return set_prompt(session, tenant_id=tenant, prompt=text, replaces=replaces)

    return say


@pytest.fixture
def ollama() -> Iterator[FakeOllama]:
    with fake_ollama() as fake:
        yield fake


@pytest.fixture
async def opened(
    database: Database, embedder: Embedder, ollama: FakeOllama, store: Callable[..., UUID]
) -> AsyncIterator[Callable[..., Awaitable[RAGService]]]:
    """A service of that server, with a document in each tenant; keyword arguments are settings."""
    (vector,) = await embedder.embed([BACKUPS], purpose="document")
    for principal in (ANNA, NAMESAKE):
        store(principal, BACKUPS, embedding=halfvec(vector), embedding_model=embedder.model_id)
    services: list[RAGService] = []

    async def opens(**changes: Any) -> RAGService:
        given = {"rag_llm_provider": "ollama", "ollama_base_url": ollama.base_url} | changes
        settings = Settings(_env_file=None, **given)
        services.append(RAGService(settings, database, embedder, open_generator(settings)))
        return services[-1]

    yield opens
    for service in services:
        await service.generator.close()


def systems(ollama: FakeOllama) -> list[str]:
    """The system's messages of the answers that were asked for, without the grades."""
    return [
        message["content"]
        for request in ollama.requests
        if request.path == "/api/chat"
        for message in request.body["messages"]
        if message["role"] == "system" and prompt.RULES in message["content"]
    ]


# --- what stays -----------------------------------------------------------------------------------


def test_without_a_prompt_the_system_speaks_as_shipped() -> None:
    assert system_prompt(None) == prompt.RAG_SYSTEM_PROMPT


@pytest.mark.parametrize("replaces", [False, True])
def test_the_rules_come_last_and_whole(replaces: bool) -> None:
    """A tenant speaks in their place before them, word for word; nothing in its text is a template."""
    told = system_prompt(TenantPrompt(prompt=f"\n{PIRATE}\n", replaces=replaces, generation=1))
    assert told.endswith(f"{PIRATE}\n\n{prompt.RULES_STAND}\n\n{prompt.RULES}")
    assert (prompt.INTRODUCTION in told) is not replaces
    assert told.count(PIRATE) == 1


@pytest.mark.parametrize(
    "rule", ["cite the source it comes from by its label", prompt.INSUFFICIENT_CONTEXT, "Sources and earlier messages"]
)
def test_the_rules_are_those_of_citation_insufficiency_and_material(rule: str) -> None:
    assert rule in prompt.RULES


# --- in an answer ---------------------------------------------------------------------------------


async def test_each_tenant_tells_the_model_its_own(
    opened: Callable[..., Awaitable[RAGService]], ollama: FakeOllama, tell: Tell
) -> None:
    service = await opened()
    tell(PIRATE)
    tell("Umbrella is discreet.", tenant="umbrella", replaces=True)
    for principal in (ANNA, NAMESAKE, Principal(tenant_id="acme", user_id=1, tags=("public", "hr"))):
        await service.generate(RAGRequest(query=QUESTION), principal=principal)
    ours, theirs, ours_again = systems(ollama)
    assert PIRATE in ours
    assert ours == ours_again
    assert theirs == f"Umbrella is discreet.\n\n{prompt.RULES_STAND}\n\n{prompt.RULES}"


async def test_a_prompt_holds_from_the_next_question_on(
    opened: Callable[..., Awaitable[RAGService]], ollama: FakeOllama, tell: Tell, desk: operate.Desk
) -> None:
    """Nothing is kept in the service: set, changed and removed between questions to one and the same."""
    service = await opened()

    async def told() -> str:
        await service.generate(RAGRequest(query=QUESTION), principal=ANNA)
        return systems(ollama)[-1]

    assert await told() == prompt.RAG_SYSTEM_PROMPT
    assert tell("Be kind.") == 1
    assert "Be kind." in await told()
    assert tell("Be brief.") == 2
    assert "Be brief." in (changed := await told())
    assert "Be kind." not in changed
    with desk.session() as session:
        remove_prompt(session, "acme")
    assert await told() == prompt.RAG_SYSTEM_PROMPT


async def test_a_prompt_comes_with_the_search(
    opened: Callable[..., Awaitable[RAGService]], tell: Tell, database: Database
) -> None:
    tell(PIRATE, replaces=True)
    expected = TenantPrompt(prompt=PIRATE, replaces=True, generation=1)
    found = await (await opened()).search(RAGRequest(query=QUESTION), principal=ANNA)
    assert found.tenant_prompt == expected
    assert await read_prompt(database, ANNA) == expected
    assert await read_prompt(database, NAMESAKE) is None


async def test_a_prompt_counts_against_the_window(
    opened: Callable[..., Awaitable[RAGService]], ollama: FakeOllama, tell: Tell
) -> None:
    limits = {"llama3.2": ModelLimits(context_window=1500, max_response=100)}
    service = await opened(rag_model_limits=limits)
    await service.generate(RAGRequest(query=QUESTION), principal=ANNA)
    tell("word " * 1400)
    asked = len(ollama.requests)
    with pytest.raises(TokenBudgetExceededError):
        await service.generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert [request.path for request in ollama.requests[asked:] if request.path == "/api/chat"] == []


# --- who says so ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", " \n\t", "a\0b", "\ud800", "x" * (MAX_PROMPT_BYTES + 1), "ä" * (MAX_PROMPT_BYTES // 2 + 1)]
)
def test_what_can_be_no_prompt_is_refused(tell: Tell, text: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        tell(text)
    assert caught.value.field == "prompt"


def test_the_largest_prompt_is_kept(tell: Tell) -> None:
    assert tell("x" * MAX_PROMPT_BYTES) == 1


def test_prompts_are_listed_by_tenant_and_removed_once(tell: Tell, desk: operate.Desk) -> None:
    tell("Be discreet.", tenant="umbrella")
    tell("Be kind.")
    with desk.session() as session:
        assert [(row["tenant_id"], row["prompt"]) for row in list_prompts(session, None)] == [
            ("acme", "Be kind."),
            ("umbrella", "Be discreet."),
        ]
        remove_prompt(session, "acme")
        assert list_prompts(session, "acme") == []
        with pytest.raises(InvalidInput):
            remove_prompt(session, "acme")
