"""Conversations in tests: what people post, and what the database holds of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from rag import converse
from rag.converse import Posted, Said
from rag.database import Database
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import worker_environment
from tests.rag.stored import rows

MARA = Principal(tenant_id="acme", user_id=7)
JONAS = Principal(tenant_id="acme", user_id=8)
NOBODY = Principal(tenant_id="acme")
OTHER = Principal(tenant_id="globex", user_id=7)
ORION = Principal(tenant_id="acme", user_id=7, project_id="orion")


def count_words(text: str) -> int:
    return len(text.split())


def settings_of(**more: Any) -> Settings:
    """A service whose answers a model writes; a thread is summed up after six words."""
    return Settings(_env_file=None, **{"rag_llm_provider": "ollama", "rag_summarise_after_tokens": 6} | more)


async def say(
    database: Database,
    principal: Principal,
    thread_id: str,
    content: str,
    *,
    role: str = "user",
    settings: Settings | None = None,
    key: str | None = None,
) -> Posted:
    """Post a message, as POST /rag/conversations/{thread}/messages does."""
    return await converse.post(
        Said(thread_id=thread_id, role=role, content=content, idempotency_key=key),
        principal=principal,
        destination=destination_of(principal, scope="user" if principal.project_id is None else "project"),
        database=database,
        settings=settings or settings_of(),
        count=count_words,
    )


def said(deployment: Deployment, principal: Principal, thread_id: str, *contents: str, **options: Any) -> list[Posted]:
    """The same from a test that is not asynchronous, one message after the other."""

    async def run() -> list[Posted]:
        async with deployment.pools() as database:
            return [await say(database, principal, thread_id, content, **options) for content in contents]

    return asyncio.run(run())


def read(deployment: Deployment, principal: Principal, thread_id: str, **page: int) -> converse.Conversation:
    async def run() -> converse.Conversation:
        async with deployment.pools() as database:
            return await converse.read(database, principal, thread_id, **page)

    return asyncio.run(run())


def message_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """All messages, as the superuser sees them."""
    return rows(
        deployment.url("postgres"),
        "select * from rag.rag_conversation_messages order by tenant_id, user_id, project_id, thread_id, number",
    )


def summary_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """All summaries, with where their documents are."""
    return rows(
        deployment.url("postgres"),
        """
        select summary.*, document.scope, document.source_id, document.source_type, document.body, document.title,
            (select count(*) from rag.rag_chunks as chunk where chunk.document_id = document.id) as chunks
        from rag.rag_conversation_summaries as summary
        left join rag.rag_documents as document
            on document.tenant_id = summary.tenant_id
            and document.access_id = summary.access_id
            and document.id = summary.document_id
        order by summary.created_at, summary.id
        """,
    )


def found(deployment: Deployment, principal: Principal, question: str) -> list[str]:
    """The texts that a question of the principal's gets back, by its words."""
    with deployment.transaction(principal) as connection:
        return [text for (text,) in connection.execute("select chunk_text from rag.search(%s)", (question,))]


@contextmanager
def model_servers(**options: Any) -> Iterator[tuple[FakeOllama, str]]:
    """One that writes summaries, and the address of one that embeds."""
    with fake_ollama(**options) as writer, fake_openai() as embedder:
        yield writer, embedder.base_url


def environment(deployment: Deployment, writer: FakeOllama, embedder_url: str, **more: str) -> dict[str, str]:
    """What a worker is given that can do both."""
    return worker_environment(
        deployment, embedder_url, RAG_LLM_PROVIDER="ollama", OLLAMA_BASE_URL=writer.base_url, **more
    )


def age(deployment: Deployment, days: int) -> None:
    """Make all messages older."""
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(
            "update rag.rag_conversation_messages set created_at = created_at - make_interval(days => %s)", (days,)
        )
