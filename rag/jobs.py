"""Asks for work that a worker does later, and says what became of it; `rag.work` does it.

A job is asked for in the caller's transaction: it exists when that has committed, and not before. What it is about
stands in rag_jobs, under the same barrier as documents; the queue holds its id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args
from uuid import UUID

from psycopg.types.json import Jsonb

from rag import operate
from rag.database import Database, Session
from rag.errors import IdempotencyKeyReused, InvalidInput, JobNotFound, QueueFull, RAGServiceError
from rag.principal import Principal

Status = Literal["pending", "processing", "succeeded", "failed", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)

# An idempotency key is for a caller who did not see the answer and asks again: clients give up within hours.
KEY_VALID_FOR = timedelta(hours=24)
# RFC draft-ietf-httpapi-idempotency-key-header has no limit; a UUID takes 36.
MAX_KEY_LENGTH = 255
# Somebody who is refused may come back when a worker has made room; a document takes seconds.
QUEUE_FULL_RETRY_AFTER_S = 10.0
# A worker says every 2 s that it is there (rag/work.py).
WORKER_SEEN_WITHIN = timedelta(seconds=30)
# `rag jobs list` shows so many, the latest.
MOST_LISTED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What became of a job. `reason` is the code of the last error, `detail` its message; `result` ids and counts."""

    id: UUID
    kind: str
    status: Status
    reason: str | None
    detail: str | None
    attempts: int
    created_at: datetime
    started_at: datetime | None
    due_at: datetime | None
    """When it is tried again."""
    finished_at: datetime | None
    result: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What tells a request again: its idempotency key and what it asked for, as digests."""

    key: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that was made before: the job that it became, or with `result` what was answered at once."""

    id: UUID
    queued: bool
    result: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A job as it is asked for. Jobs of one `lock` are done one after the other; `body` is text that was sent."""

    kind: str
    payload: Mapping[str, Any]
    body: str | None = None
    lock: str | None = None
    source_type: str | None = None
    source_id: str | None = None


def request_of(key: str, *asked: object) -> Request:
    """A request by its Idempotency-Key and everything that it asked for. Raises InvalidInput for no key."""
    if not re.fullmatch(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}", key):
        raise InvalidInput(
            f"Idempotency-Key must be 1 to {MAX_KEY_LENGTH} printable ASCII characters", field="Idempotency-Key"
        )
    said = json.dumps(asked, sort_keys=True, default=str)
    return Request(
        key=hashlib.sha256(key.encode()).digest(), digest=hashlib.sha256(said.encode("utf-8", "surrogatepass")).digest()
    )


async def answered(session: Session, request: Request) -> Answered | None:
    """What the principal asked for with this key before. Raises IdempotencyKeyReused when that was something else."""
    row = await session.row("my_request", {"request_key": request.key, "valid_for": KEY_VALID_FOR})
    if row is None:
        return None
    if bytes(row["request_digest"]) != request.digest:
        raise IdempotencyKeyReused(field="Idempotency-Key")
    return Answered(id=row["id"], queued=row["queued"], result=row["result"])


async def record(session: Session, wanted: Wanted, request: Request, *, result: Mapping[str, Any]) -> None:
    """Keep what was answered at once, in the transaction that did it. Raises psycopg's UniqueViolation for a twin."""
    await session.run(
        "record_request",
        {
            "kind": wanted.kind,
            "source_type": wanted.source_type,
            "source_id": wanted.source_id,
            "result": Jsonb(dict(result)),
            "request_key": request.key,
            "request_digest": request.digest,
        },
    )


async def enqueue(session: Session, wanted: Wanted, *, max_waiting: int | None, request: Request | None = None) -> UUID:
    """Ask for a job in this transaction; its id. Raises QueueFull when `max_waiting` of the tenant have not ended."""
    row = await session.row(
        "enqueue_job",
        {
            "kind": wanted.kind,
            "lock": wanted.lock,
            "source_type": wanted.source_type,
            "source_id": wanted.source_id,
            "payload": Jsonb(dict(wanted.payload)),
            "body": wanted.body,
            "max_waiting": max_waiting,
            "request_key": None if request is None else request.key,
            "request_digest": None if request is None else request.digest,
        },
    )
    assert row is not None
    job_id: UUID | None = row["id"]
    if job_id is None:
        raise QueueFull(retry_after_s=QUEUE_FULL_RETRY_AFTER_S)
    return job_id


async def waiting(session: Session, wanted: Wanted) -> UUID | None:
    """One of the principal's jobs of the same kind and lock that nobody has begun; the queue is held till the end."""
    row = await session.row("my_waiting_job", {"kind": wanted.kind, "lock": wanted.lock})
    assert row is not None
    job_id: UUID | None = row["id"]
    return job_id


async def find(database: Database, principal: Principal, job_id: UUID) -> Job:
    """One of the principal's jobs. Raises JobNotFound, the same for a missing and a foreign one."""
    async with database.transaction(principal, read_only=True) as session:
        row = await session.row("my_job", {"id": job_id})
    if row is None:
        raise JobNotFound()
    return Job(**row)


async def cancel(database: Database, principal: Principal, job_id: UUID) -> None:
    """End one of the principal's jobs; it stores nothing any more. One that has ended stays. Raises JobNotFound."""
    async with database.transaction(principal) as session:
        row = await session.row("cancel_my_job", {"id": job_id})
        assert row is not None
        if not row["cancelled"] and await session.row("my_job", {"id": job_id}) is None:
            raise JobNotFound()


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """Jobs of the whole deployment, and workers that were there within the last half minute."""

    pending: int
    ready: int
    """Of those pending, the ones that are not put off until a later attempt."""
    processing: int
    workers: int


async def depth(database: Database) -> Depth:
    """How much there is to do. Raises the DatabaseError family."""
    async with database.proven("jobs") as (session, proof):
        row = await session.row("queue_depth", {"seen_within": WORKER_SEEN_WITHIN, "proof": proof})
    assert row is not None
    return Depth(**row)


def described(depth: Depth) -> dict[str, int]:
    """As `/health` shows it."""
    return {"pending": depth.pending, "processing": depth.processing, "workers": depth.workers}


def reason_of(error: RAGServiceError) -> str:
    """The name of an error as a job shows it: `UnreadableDocument` is unreadable_document."""
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", type(error).__name__).lower()


# --- operators ------------------------------------------------------------------------------------


def listed(session: operate.Session, *, tenant_id: str | None, status: str | None) -> list[dict[str, Any]]:
    """Jobs, latest first, at most `MOST_LISTED`. Raises InvalidInput for a status that is none."""
    if status is not None and status not in STATUSES:
        raise InvalidInput(f"status must be one of {', '.join(STATUSES)}", field="status")
    return session.rows("list_jobs", {"tenant_id": tenant_id, "status": status, "most": MOST_LISTED})


def resubmit(session: operate.Session, ids: list[UUID]) -> int:
    """Put failed jobs into the queue again; how many of them were."""
    row = session.row("resubmit_jobs", {"ids": ids})
    assert row is not None
    return int(row["resubmitted"])


def cancel_all(session: operate.Session, ids: list[UUID]) -> int:
    """Cancel jobs of any tenant that have not succeeded; how many of them were."""
    row = session.row("cancel_jobs", {"ids": ids})
    assert row is not None
    return int(row["cancelled"])
