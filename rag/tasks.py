"""The kinds of jobs: how each is asked for and how it is done, in one table.

A kind is a function from a `Task` to nothing. It does its work as the principal of the job, through what everybody else
goes through, and calls `task.settle` in the transaction that does it: then the work is done once, whatever ends in
between. Which errors are worth another attempt is the worker's to say (`rag.work`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from rag import store
from rag.database import Database, Session
from rag.embed import Embedder
from rag.errors import InvalidInput, JobLost, QuotaExceeded, RAGServiceError
from rag.exchange import ChatMessage
from rag.generate import Generator
from rag.ingest import Ingested, Source, check_source, ingest, source_type_of
from rag.jobs import Wanted
from rag.principal import Principal
from rag.settings import Settings
from rag.store import Destination, destination_of
from rag.summarise import summarise
from rag.sync import Outcome, SourceSpec, Synchroniser, load_specs

# What a summary is called as a source: its own id, so that no thread can name another one's.
SUMMARY_TYPE = "conversation_summary"
# Of messages that expired before they were summed up.
NO_SUMMARY: Mapping[str, Any] = {"document_id": None, "messages": 0, "model": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A job that a worker has taken, and what it works with."""

    id: UUID
    claim: UUID
    principal: Principal
    payload: Mapping[str, Any]
    body: str | None
    database: Database
    embedder: Embedder
    generator: Generator
    settings: Settings

    async def settle(self, session: Session, result: Mapping[str, Any]) -> None:
        """End the job in the transaction that does it. Raises JobLost when it is this worker's no more."""
        row = await session.row("settle_job", {"id": self.id, "claim": self.claim, "result": Jsonb(dict(result))})
        assert row is not None
        if not row["settled"]:
            raise JobLost()

    async def hold(self, session: Session) -> None:
        """Keep the job until this transaction has ended: a step of many. Raises JobLost like `settle`."""
        row = await session.row("holds_job", {"id": self.id, "claim": self.claim})
        assert row is not None
        if not row["held"]:
            raise JobLost()


async def _ingest(task: Task) -> None:
    source, destination = _source_of(task.payload, task.body)

    async def settle(session: Session, ingested: Ingested) -> None:
        await task.settle(session, result_of(ingested))

    await ingest(
        source,
        principal=task.principal,
        destination=destination,
        database=task.database,
        embedder=task.embedder,
        max_bytes=task.settings.rag_max_document_bytes,
        chunking=task.settings.rag_chunking,
        also=settle,
    )


async def _synchronise(task: Task) -> None:
    """Bring a source to the state that it has now, whatever it had when the job was asked for.

    Whoever may ask for jobs says by name which source, and the worker's own file says whose it is: the job of another
    principal is refused.
    """
    name = task.payload["source"]
    path = task.settings.rag_sources
    specs = [] if path is None else await asyncio.to_thread(load_specs, path)
    spec = next((spec for spec in specs if spec.name == name), None)
    if spec is None or spec.tenant is None or spec.principal(None) != task.principal:
        raise InvalidInput(f"RAG_SOURCES of the worker has no source {name} of who asked", field="RAG_SOURCES")
    synchroniser = Synchroniser(settings=task.settings, database=task.database, embedder=task.embedder, also=task.hold)
    outcome = await synchroniser.sync(spec)
    if outcome.full is not None:
        raise QuotaExceeded(outcome.full)
    async with task.database.transaction(task.principal) as session:
        await task.settle(session, summary_of(outcome))


class _NothingLeftError(RAGServiceError):
    """None of the messages is left that were summed up."""


async def _summarise(task: Task) -> None:
    destination = _destination_of(task.payload["destination"])
    thread_id: str = task.payload["thread_id"]
    rows = await _claimed(task)
    if not rows:
        return
    written = await summarise(
        [ChatMessage(role=row["role"], content=row["content"], timestamp=row["created_at"]) for row in rows],
        generator=task.generator,
        model=task.settings.chat_model,
    )
    # Looked at again: an ingest would make the class of an owner anew who was erased while the model wrote.
    if not await _claimed(task):
        return

    async def settle(session: Session, ingested: Ingested) -> None:
        marked = await session.row(
            "add_summary",
            {
                "id": task.id,
                "access_id": rows[0]["access_id"],
                "document_id": ingested.document_id,
                "thread_id": thread_id,
                "summary_text": written.text,
                "message_ids": [row["id"] for row in rows],
                "model": written.model,
            },
        )
        assert marked is not None
        if not marked["marked"]:
            raise _NothingLeftError()
        result = {"document_id": str(ingested.document_id), "messages": marked["marked"], "model": written.model}
        await task.settle(session, result)

    try:
        await ingest(
            Source(
                name=f"{task.id}.txt",
                source_id=f"conversation/{task.id}",
                source_type=SUMMARY_TYPE,
                content=written.text,
                title=f"Conversation {thread_id}",
                # So that all summaries of a thread can be taken back at once, and kept out.
                provenance_id=f"conversation/{thread_id}",
                source_updated_at=rows[-1]["created_at"],
                metadata={"thread_id": thread_id, "messages": len(rows)},
            ),
            principal=task.principal,
            destination=destination,
            database=task.database,
            embedder=task.embedder,
            max_bytes=task.settings.rag_max_document_bytes,
            chunking=task.settings.rag_chunking,
            also=settle,
        )
    except _NothingLeftError:
        await _claimed(task)


async def _claimed(task: Task) -> list[dict[str, Any]]:
    """The messages that are to be summed up; without any, which have expired, the job is settled.

    Raises JobLost when that cannot be: it was cancelled, erased or given to another worker.
    """
    async with task.database.transaction(task.principal) as session:
        rows = await session.rows("claimed_messages", {"summary_id": task.id})
        if not rows:
            await task.settle(session, NO_SUMMARY)
        return rows


# A new kind is a function above and a line here; an older worker parks what it does not know.
KINDS: Mapping[str, Callable[[Task], Awaitable[None]]] = {
    "ingest": _ingest,
    "sync": _synchronise,
    "summarise": _summarise,
}


def ingestion(source: Source, principal: Principal, destination: Destination) -> Wanted:
    """The job that makes a document searchable. Raises InvalidInput for what no worker could store."""
    check_source(source)
    if not isinstance(source.content, str):
        raise TypeError("a job takes text")
    described = asdict(replace(source, content=""))
    updated_at = source.source_updated_at
    source_type = source_type_of(source)
    return Wanted(
        kind="ingest",
        payload={
            "source": described | {"source_updated_at": None if updated_at is None else updated_at.isoformat()},
            "destination": asdict(destination),
        },
        body=source.content,
        lock=store.sha256(store.lock_name(*_owner(principal, destination), source_type, source.source_id)),
        source_type=source_type,
        source_id=source.source_id,
    )


def synchronisation(spec: SourceSpec) -> Wanted:
    """The job that brings a source of RAG_SOURCES up to date. Raises InvalidInput for one that names no tenant."""
    principal = spec.principal(None)
    destination = destination_of(principal, scope=spec.scope, tags=spec.tags)
    return Wanted(
        kind="sync",
        payload={"source": spec.name},
        lock=store.sha256(store.lock_name(*_owner(principal, destination), "sync", spec.name)),
        source_id=spec.name,
    )


def summary(thread_id: str, principal: Principal, destination: Destination) -> Wanted:
    """The job that sums up messages of a thread: those that are claimed for it."""
    return Wanted(
        kind="summarise",
        payload={"thread_id": thread_id, "destination": asdict(destination)},
        lock=store.sha256(store.lock_name(*_owner(principal, destination), SUMMARY_TYPE, thread_id)),
    )


def _owner(principal: Principal, destination: Destination) -> tuple[str | int | None, ...]:
    return (principal.tenant_id, destination.scope, destination.user_id, destination.project_id)


def _source_of(payload: Mapping[str, Any], body: str | None) -> tuple[Source, Destination]:
    described = dict(payload["source"])
    updated_at = described.pop("source_updated_at")
    source = Source(
        **described
        | {
            "content": body or "",
            "source_updated_at": None if updated_at is None else datetime.fromisoformat(updated_at),
        }
    )
    return source, _destination_of(payload["destination"])


def _destination_of(described: Mapping[str, Any]) -> Destination:
    return Destination(**dict(described) | {"tags": tuple(described["tags"])})


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """What a job says of a source: its version and counts."""
    return {
        "version": outcome.version,
        "files": outcome.files,
        "written": len(outcome.changes),
        "removed": len(outcome.gone),
        "unchanged": outcome.unchanged,
        "failed": len(outcome.failures) + len(outcome.kept),
    }


def result_of(ingested: Ingested) -> dict[str, Any]:
    """What a job says of a document: ids and counts."""
    return asdict(ingested) | {"document_id": str(ingested.document_id)}
