"""Takes back what must not be found any more, and keeps it out: one transaction { locks, remove, tombstones, audit }.

An ingest holds the lock of its owner shared while it writes, an invalidation holds those of all owners that it may
write for alone: whoever began before has committed and is removed, or waits, finds the tombstone and gives up.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID, uuid4

import structlog

from rag import limits
from rag.database import Database, Session
from rag.errors import InvalidInput
from rag.principal import ALL_PROJECTS, Principal, check_name
from rag.store import SCOPES, Destination, Scope, class_of, destination_of, lock_name

log = structlog.get_logger(__name__)

# A statement stays small; a larger batch is several, under one cascade id.
MAX_NAMED = 1000
MAX_REASON_LENGTH = 1000
MAX_CASCADE_ID_LENGTH = 128
# The server keeps 64 locks for each of its connections, all in one table; of an owner of more projects the whole
# tenant is locked instead.
MAX_OWNER_LOCKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is meant: documents by id, by the id of their source, and by what they were derived of.

    Raises InvalidInput for none, for more than a thousand, and for what no document could have.
    """

    document_ids: Sequence[UUID] = ()
    source_ids: Sequence[str] = ()
    provenance_ids: Sequence[str] = ()
    cascade_ids: Sequence[str] = ()
    """To reinstate what was retracted together; nothing is invalidated by it."""

    def __post_init__(self) -> None:
        named = [*self.document_ids, *self.source_ids, *self.provenance_ids, *self.cascade_ids]
        if not 1 <= len(named) <= MAX_NAMED:
            raise InvalidInput(f"name 1 to {MAX_NAMED} documents, sources or provenances")
        for field, limit in (("source_ids", 512), ("provenance_ids", 256), ("cascade_ids", MAX_CASCADE_ID_LENGTH)):
            for name in getattr(self, field):
                check_name(name, field=field, max_length=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidated:
    """What was removed. An ingest of the same source goes in again with a generation above this one."""

    documents: list[UUID]
    kept: list[UUID]
    """Meant as well and readable, but not the principal's to remove."""
    chunks: int
    cascade_id: str
    generation: int | None
    """None when nothing was found and there was no place to close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Closing:
    """A source or, with `provenance_id`, all that is derived of it, in one class."""

    access_id: int
    source_id: str | None = None
    provenance_id: str | None = None
    document_id: UUID | None = None


async def invalidate(
    targets: Targets,
    *,
    reason: str,
    principal: Principal,
    database: Database,
    cascade_id: str | None = None,
    cascades: bool = True,
    destination: Destination | None = None,
    scopes: Collection[Scope] = SCOPES,
) -> Invalidated:
    """Remove documents with their chunks, and refuse their sources until they are reinstated.

    What is foreign, or not there, is not removed, and nothing tells the two apart. With `cascades` goes whatever
    names one of them as its provenance, and so on. Sources and provenances that are not there yet are closed in
    `destination`, by default where the principal would ingest. `scopes` bounds what may be removed. A query that
    starts after the return finds nothing of it. Raises InvalidInput, ScopeForbidden for a destination that the
    principal may not write, and the DatabaseError family; then nothing has changed.
    """
    _check_reason(reason)
    if cascade_id is not None:
        check_name(cascade_id, field="cascade_id", max_length=MAX_CASCADE_ID_LENGTH)
    if targets.cascade_ids:
        raise InvalidInput("a cascade is reinstated, and not invalidated again", field="cascade_ids")
    cascade_id = cascade_id or str(uuid4())
    publish = "public" in scopes and database.can_publish
    place = destination or _usual_destination(principal, scopes if publish else set(scopes) - {"public"})
    async with database.transaction(principal, publish=publish) as session:
        await _lock(session, principal, place)
        rows = await session.rows(
            "retract_documents",
            {
                "tenant_id": principal.tenant_id,
                "document_ids": list(targets.document_ids),
                "source_ids": list(targets.source_ids),
                "provenance_ids": list(targets.provenance_ids),
                "cascades": cascades,
                "scopes": sorted(scopes),
            },
        )
        removed = [row for row in rows if row["is_removed"]]
        # Each class where something was, and the one where it would be.
        classes = dict.fromkeys(row["access_id"] for row in removed)
        if place is not None and (targets.source_ids or targets.provenance_ids):
            classes[await class_of(session, place)] = None
        closings = [
            _Closing(access_id=row["access_id"], source_id=row["source_id"], document_id=row["document_id"])
            for row in removed
        ]
        if cascades:
            closings += [
                _Closing(access_id=row["access_id"], provenance_id=row["source_id"], document_id=row["document_id"])
                for row in removed
            ]
        origins = [*targets.provenance_ids, *(targets.source_ids if cascades else ())]
        for access_id in classes:
            closings += [_Closing(access_id=access_id, source_id=name) for name in targets.source_ids]
            closings += [_Closing(access_id=access_id, provenance_id=name) for name in origins]
        chunks = sum(row["chunks"] for row in removed)
        await _audit(
            session,
            principal,
            "invalidate",
            reason=reason,
            cascade_id=cascade_id,
            sources=len({(one.access_id, one.source_id, one.provenance_id) for one in closings}),
            documents=len(removed),
            chunks=chunks,
        )
        generation = await _close(session, closings, cascade_id)
        await limits.charge(session, documents=-len(removed), size=-sum(row["body_bytes"] for row in removed))
    log.info("invalidated", documents=len(removed), chunks=chunks, closed=len(closings))
    return Invalidated(
        documents=[row["document_id"] for row in removed],
        kept=[row["document_id"] for row in rows if not row["is_removed"]],
        chunks=chunks,
        cascade_id=cascade_id,
        generation=generation,
    )


async def reinstate(
    targets: Targets,
    *,
    reason: str,
    principal: Principal,
    database: Database,
    scopes: Collection[Scope] = SCOPES,
) -> int:
    """Let sources that were invalidated be ingested again; how many, each counted in each class.

    What was removed does not come back by itself: send it again. Foreign and missing ones count nothing. Raises
    InvalidInput and the DatabaseError family.
    """
    _check_reason(reason)
    publish = "public" in scopes and database.can_publish
    async with database.transaction(principal, publish=publish) as session:
        row = await session.row(
            "reopen_sources",
            {
                "source_ids": list(targets.source_ids),
                "provenance_ids": list(targets.provenance_ids),
                "document_ids": list(targets.document_ids),
                "cascade_ids": list(targets.cascade_ids),
                "scopes": sorted(scopes),
            },
        )
        assert row is not None
        opened: int = row["opened"]
        (cascade_id,) = targets.cascade_ids if len(targets.cascade_ids) == 1 else (None,)
        await _audit(
            session,
            principal,
            "reinstate",
            reason=reason,
            cascade_id=cascade_id,
            sources=opened,
            documents=0,
            chunks=0,
        )
    log.info("reinstated", opened=opened)
    return opened


def _check_reason(reason: str) -> None:
    check_name(reason, field="reason", max_length=MAX_REASON_LENGTH)


def _usual_destination(principal: Principal, scopes: Collection[Scope]) -> Destination | None:
    """Where the principal's documents go when nothing else is said; None where it may write nothing."""
    if principal.user_id is None:
        scope: Scope = "public"
    elif principal.project_id in (None, ALL_PROJECTS):
        scope = "user"
    else:
        scope = "project"
    return destination_of(principal, scope=scope) if scope in scopes else None


async def _lock(session: Session, principal: Principal, place: Destination | None) -> None:
    """Keep out whoever writes for an owner that the principal may write for."""
    owners = {(row["scope"], row["user_id"], row["project_id"]) for row in await session.rows("writable_owners", {})}
    if place is not None:
        owners.add((place.scope, place.user_id, place.project_id))
    if len(owners) > MAX_OWNER_LOCKS:
        await session.run("lock_tenant", {"tenant_id": principal.tenant_id})
        return
    # Sorted, so that two who wait for each other's cannot be.
    names = sorted(lock_name(principal.tenant_id, *owner) for owner in owners)
    await session.run("lock_owners", {"tenant_id": principal.tenant_id, "owners": names})


async def _close(session: Session, closings: Sequence[_Closing], cascade_id: str) -> int | None:
    if not closings:
        return None
    row = await session.row(
        "close_sources",
        {
            "access_ids": [one.access_id for one in closings],
            "source_ids": [one.source_id for one in closings],
            "provenance_ids": [one.provenance_id for one in closings],
            "document_ids": [one.document_id for one in closings],
            "cascade_id": cascade_id,
        },
    )
    assert row is not None
    generation: int | None = row["generation"]
    return generation


async def _audit(
    session: Session,
    principal: Principal,
    action: str,
    *,
    reason: str,
    cascade_id: str | None,
    sources: int,
    documents: int,
    chunks: int,
) -> None:
    await session.run(
        "audit_retraction",
        {
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id or 0,
            "project_id": principal.project_id,
            "action": action,
            "reason": reason,
            "cascade_id": cascade_id,
            "sources": sources,
            "documents": documents,
            "chunks": chunks,
        },
    )
