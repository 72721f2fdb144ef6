"""Prompts that a model counts quite differently from us: the server has the last word, and nothing is cut silently."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest

from rag import answer
from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import ContextOverflowError, TokenBudgetExceededError
from rag.events import Done
from rag.exchange import ChatMessage, RAGRequest, RAGResponse
from rag.generate import open_generator
from rag.grade import UNGRADED
from rag.principal import Principal
from rag.settings import ModelLimits
from rag.store import halfvec
from tests.fakes.chat import Message, prompt_tokens
from tests.rag.model_servers import PROVIDERS, ModelServer, model_server

ANNA = Principal(tenant_id="acme", user_id=1)
LABEL = re.compile(r"^\[(S\d+-[0-9a-f]{6})\]$", re.MULTILINE)

PROSE = "Backups of the orders database run every night and are kept for five weeks in another region."
DIGITS = "Order 84810327755 of 20261102083000 has 1.3e308 and 0x7fb2c4e1 in box 990127."
HAN = "订单数据库的备份每天夜间运行，并在另一个地区保留五周。"
EMOJI = "🗄️💾🌙🔁 🕑🕒🕓 ✅✅✅ 🧯🚒🧑‍🚒"
KINDS = (PROSE, DIGITS, HAN, EMOJI)


def harsh(text: str) -> int:
    """One token a byte for digits, Han and emoji; a third of the bytes of all else."""
    hard = [character for character in text if character.isdigit() or ord(character) >= 0x2000]
    hard_bytes = len("".join(hard).encode())
    return hard_bytes + -(-(len(text.encode()) - hard_bytes) // 3)


@dataclass
class Watched:
    """A server with that tokenizer, and what its model got to see."""

    server: ModelServer
    seen: list[list[Message]] = field(default_factory=list)
    graded: list[list[Message]] = field(default_factory=list)

    def answer(self, messages: list[Message]) -> str:
        self.seen.append(messages)
        # It cites, so that it is graded.
        (label, *_) = LABEL.findall(messages[-1]["content"])
        return f"They run at night. [{label}]"

    def grade(self, schema: Mapping[str, Any], messages: list[Message]) -> str:
        self.graded.append(messages)
        return '{"score": 90}'


@pytest.fixture(params=PROVIDERS)
def watched(request: pytest.FixtureRequest) -> Iterator[Watched]:
    with model_server(request.param, count_tokens=harsh) as server:
        watched = Watched(server)
        server.fake.answer = watched.answer
        server.fake.fill = watched.grade
        yield watched


@pytest.fixture
async def corpus(store: Callable[..., UUID], embedder: Embedder) -> None:
    """Documents of every kind and mixture, from a line to as long as a chunk can be."""
    numbers = random.Random(7)
    texts = [
        "Backups: " + " ".join(numbers.choice(kinds) for _ in range(numbers.choice((1, 3, 8))))
        for kinds in (*((kind,) for kind in KINDS), KINDS, KINDS)
        for _ in range(4)
    ]
    # As much of each as the embedding model takes: where it lies does not matter here.
    vectors = await embedder.embed([text[:150] for text in texts], purpose="document")
    for text, vector in zip(texts, vectors, strict=True):
        store(ANNA, text, embedding=halfvec(vector), embedding_model=embedder.model_id)


@pytest.fixture
async def opened(watched: Watched, database: Database, embedder: Embedder) -> AsyncIterator[Callable[..., RAGService]]:
    services: list[RAGService] = []

    def opens(**changes: Any) -> RAGService:
        settings = watched.server.settings(**changes)
        services.append(RAGService(settings, database, embedder, open_generator(settings)))
        return services[-1]

    yield opens
    for service in services:
        await service.generator.close()


@pytest.mark.usefixtures("corpus")
async def test_no_prompt_is_cut_silently_and_an_overflow_is_answered_by_one_shorter_prompt_or_an_error(
    watched: Watched, opened: Callable[..., RAGService], scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    prompts = scaled(test=40, ci=80, prove=2000)
    numbers = random.Random(11)
    overflown = shrunk = refused = ungraded = 0
    for _ in range(prompts // 10):
        window, response = numbers.choice((1024, 2048, 4096, 8192)), numbers.choice((64, 512))
        # The settings may know the model's window, or overrate it.
        limits = ModelLimits(context_window=window * numbers.choice((1, 1, 4)), max_response=response)
        if watched.server.provider == "ollama":
            watched.server.fake.context_length = window
        else:
            watched.server.fake.window = window
        service = opened(
            rag_model_limits={"llama3.2": limits}, rag_max_context_tokens=numbers.choice((500, 3000)), rag_llm_queue=0
        )
        for _ in range(10):
            before, seen, graded = len(watched.server.chats), len(watched.seen), len(watched.graded)
            try:
                response_given = await answered(service, a_question(numbers), streamed=numbers.random() < 0.5)
            except (ContextOverflowError, TokenBudgetExceededError):
                response_given = None
            chats = watched.server.chats[before:]
            asked = [chat["messages"] for chat in chats if not is_form(chat)]
            grades = [chat["messages"] for chat in chats if is_form(chat)]
            # Whatever the model answered, it had read all of it, and had room for the answer's beginning.
            assert all(messages in asked for messages in watched.seen[seen:])
            assert all(messages in grades for messages in watched.graded[graded:])
            assert all(
                prompt_tokens(messages, harsh) < window for messages in (*watched.seen[seen:], *watched.graded[graded:])
            )
            assert len(asked) <= 2
            assert len(grades) <= 1
            if len(asked) == 2:
                overflown += 1
                assert len(asked[1][-1]["content"]) < len(asked[0][-1]["content"])
            if response_given is None:
                refused += 1
                assert len(watched.seen) == seen
            else:
                shrunk += len(asked) == 2
                assert (answer.SHRUNK in response_given.degraded) == (len(asked) == 2)
                assert len(watched.seen) - seen == min(1, len(asked))
                # An answer that stands on a source is graded on a prompt that was read whole, or says that it is not.
                if response_given.grounded:
                    unread = len(watched.graded) == graded
                    ungraded += unread
                    assert (UNGRADED in response_given.degraded) == unread
                    assert response_given.confidence.llm_score == (0 if unread else 90)
    assert shrunk > 0
    figure(
        f"{watched.server.provider}: {prompts} prompts: 0 cut silently, {overflown} too long and tried once more,"
        f" {shrunk} of these answered, {refused} typed errors;"
        f" grades: {len(watched.graded)} read whole, {ungraded} refused"
    )


async def answered(service: RAGService, request: RAGRequest, *, streamed: bool) -> RAGResponse:
    if not streamed:
        return await service.generate(request, principal=ANNA)
    async with aclosing(service.stream(request, principal=ANNA)) as events:
        told = [event async for event in events]
    assert isinstance(told[-1], Done)
    return told[-1].response


def is_form(chat: Mapping[str, Any]) -> bool:
    """Whether a chat asks for JSON, as a grade does."""
    return "format" in chat or "response_format" in chat


def a_question(numbers: random.Random) -> RAGRequest:
    kind = numbers.choice(KINDS)
    history = [
        ChatMessage(role=numbers.choice(("user", "assistant")), content=numbers.choice(KINDS) * numbers.randint(1, 6))
        for _ in range(numbers.choice((0, 0, 3)))
    ]
    return RAGRequest(
        query="When do backups run? " + kind * numbers.choice((0, 0, 1, 4)),
        chat_history=history,
        min_similarity=-1.0,
        max_context_chunks=numbers.choice((1, 5, 20)),
    )
