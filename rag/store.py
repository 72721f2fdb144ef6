"""What ingestion and reading write and read, one function a transaction step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

from pgvector import HalfVector
from psycopg.types.json import Jsonb

from rag import limits
from rag.chunk import Chunk
from rag.database import Database, Session
from rag.errors import (
    DocumentNotFound,
    InvalidInput,
    ScopeForbidden,
    SourceInvalidated,
    SourceOvertaken,
    SourceRetracted,
)
from rag.principal import ALL_PROJECTS, Principal, check_tags

Scope = Literal["public", "user", "project"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# More than 65,535 parameters are refused, and a statement should stay a few megabytes.
CHUNKS_PER_STATEMENT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a document goes: its scope, its owner and its tags."""

    scope: Scope
    user_id: int | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ("public",)

    @property
    def publishes(self) -> bool:
        """Whether only rag_publisher may write there."""
        return self.scope == "public"


def destination_of(principal: Principal, *, scope: str, tags: Iterable[str] | None = None) -> Destination:
    """A destination whose owner is the principal; its tags are the principal's unless given.

    Raises InvalidInput for a scope that is none, or that lacks its owner.
    """
    if scope not in SCOPES:
        raise InvalidInput(f"scope must be one of {', '.join(SCOPES)}", field="scope")
    if scope != "public" and principal.user_id is None:
        raise InvalidInput(f"scope {scope} needs a user", field="user_id")
    if scope == "project" and principal.project_id in (None, ALL_PROJECTS):
        raise InvalidInput("scope project needs a project, and * names none", field="project_id")
    return Destination(
        scope=scope,
        user_id=None if scope == "public" else principal.user_id,
        project_id=principal.project_id if scope == "project" else None,
        tags=principal.tags if tags is None else check_tags(list(tags)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A document as it is written; the columns of rag_documents that come from outside."""

    source_type: str
    source_id: str
    source_uri: str | None
    source_hash: str
    source_updated_at: datetime | None
    language: str | None
    title: str
    body: str
    domain: str | None
    doc_type: str | None
    provenance_id: str | None
    task_id: str | None
    verified: bool
    metadata: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the database holds of a source before it is written."""

    access_id: int
    """The class that the document will belong to."""
    generation: int
    """How often the source has been deleted from that class."""
    retractions: int
    """How often the source, or what it is derived of, was invalidated, in all classes of its owner."""
    closed: int | None
    """The generation of the invalidation that is in force; None = none is."""
    document_id: UUID | None
    document_access_id: int | None
    """Another class than `access_id` while the tags change."""
    source_hash: str | None
    updated_at: datetime | None
    surplus: tuple[tuple[int, UUID], ...]
    """Class and id of further documents of the same source, to be removed."""

    @property
    def moves(self) -> bool:
        return self.document_id is not None and self.document_access_id != self.access_id

    def is_retracted(self, present: Known) -> bool:
        """Whether the source was deleted or erased between this and `present`."""
        return (
            present.generation != self.generation
            or present.retractions != self.retractions
            # A class that was made anew was erased, and with it the count of earlier deletions.
            or present.access_id != self.access_id
            # A tombstone is of one class: when the tags change as well, all that shows is that the document is gone.
            or (self.document_id is not None and present.document_id != self.document_id)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Former:
    """A document under the source that it had before it was renamed."""

    source_type: str
    source_id: str
    known: Known


async def look_up(
    database: Database,
    principal: Principal,
    destination: Destination,
    *,
    source_type: str,
    source_id: str,
    provenance_id: str | None = None,
    generation: int | None = None,
) -> Known:
    """What is known of a source; also the earliest refusal.

    `generation` says that the content is newer than every invalidation below it. Raises ScopeForbidden,
    and SourceInvalidated for a source that is retracted.
    """
    async with database.transaction(principal, publish=destination.publishes) as session:
        return await look(
            session,
            destination,
            source_type=source_type,
            source_id=source_id,
            provenance_id=provenance_id,
            generation=generation,
        )


async def look(
    session: Session,
    destination: Destination,
    *,
    source_type: str,
    source_id: str,
    provenance_id: str | None = None,
    generation: int | None = None,
) -> Known:
    """Like `look_up`, in a transaction that is open."""
    known = await _known(session, destination, source_type, source_id, provenance_id)
    check_open(known, generation)
    return known


async def look_up_stored(
    database: Database, principal: Principal, document_id: UUID
) -> tuple[dict[str, Any], Destination, Known]:
    """A document that is there, where it belongs, and what is known of its source; for whoever writes it anew.

    Raises DocumentNotFound, the same for a missing and a hidden one; ScopeForbidden for one that the principal may
    read and not write.
    """
    row = await read_document(database, principal, document_id)
    destination = _destination(row)
    async with database.transaction(principal, publish=destination.publishes) as session:
        # Under the lock an erasure is over or has not begun: the class of an erased owner is not made anew.
        await _lock(session, principal, destination, row["source_type"], row["source_id"])
        present = await session.row("get_document", {"id": document_id})
        if present is None or _destination(present) != destination:
            raise DocumentNotFound()
        known = await _known(session, destination, row["source_type"], row["source_id"], row["provenance_id"])
    if known.document_id != document_id or known.moves:
        raise DocumentNotFound()
    return present, destination, known


def _destination(row: Mapping[str, Any]) -> Destination:
    return Destination(
        scope=row["scope"], user_id=row["user_id"], project_id=row["project_id"], tags=tuple(row["tags"])
    )


async def stale_words(
    database: Database, principal: Principal, document_id: UUID, chunks: Sequence[Chunk], *, language: str | None
) -> set[int]:
    """Indexes of chunks whose words are not as the database would take them from their text now."""
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows(
            "list_stale_words",
            {
                "document_id": document_id,
                "language": language,
                "chunk_indexes": [chunk.index for chunk in chunks],
                "indexed_texts": [chunk.embedded_text for chunk in chunks],
            },
        )
    return {row["chunk_index"] for row in rows}


async def chunk_keys(database: Database, principal: Principal, document_id: UUID) -> list[dict[str, Any]]:
    """What has to be equal for the chunks of a document to stay: `chunk_key`, model and language of each, in order."""
    async with database.transaction(principal, read_only=True) as session:
        return await session.rows("list_chunk_keys", {"document_id": document_id})


def check_open(known: Known, generation: int | None) -> None:
    """Raise SourceInvalidated for a source that is retracted, unless its content is of a newer `generation`."""
    if known.closed is not None and (generation is None or generation <= known.closed):
        raise SourceInvalidated()


async def _known(
    session: Session, destination: Destination, source_type: str, source_id: str, provenance_id: str | None
) -> Known:
    return known_of(
        await session.rows("look_at_source", source_named(destination, source_type, source_id, provenance_id))
    )


def source_named(
    destination: Destination, source_type: str, source_id: str, provenance_id: str | None
) -> dict[str, Any]:
    """A source as the statements that look at it name it."""
    return _owner(destination) | {
        "tags": list(destination.tags),
        "source_type": source_type,
        "source_id": source_id,
        "provenance_id": provenance_id,
    }


def known_of(rows: Sequence[Mapping[str, Any]]) -> Known:
    """What the rows of `look_at_source.sql`, `claim_source.sql` or `open_source.sql` say."""
    first, *others = rows
    return Known(
        access_id=first["access_id"],
        generation=first["generation"],
        retractions=first["retractions"],
        closed=first["closed"],
        document_id=first["id"],
        document_access_id=first["document_access_id"],
        source_hash=first["source_hash"],
        updated_at=first["updated_at"],
        surplus=tuple((row["document_access_id"], row["id"]) for row in others),
    )


def _owner(destination: Destination) -> dict[str, Any]:
    return {
        "scope": destination.scope,
        "user_id": destination.user_id,
        "project_id": destination.project_id,
    }


async def class_of(session: Session, destination: Destination) -> int:
    """The access class of a destination, made when there is none. Raises ScopeForbidden."""
    granted = await session.row("access_class", _owner(destination) | {"tags": list(destination.tags)})
    assert granted is not None
    access_id: int = granted["access_id"]
    return access_id


async def kept_embeddings(
    database: Database,
    principal: Principal,
    known: Known,
    *,
    chunk_hashes: Sequence[str],
    embedding_model: str,
) -> dict[str, HalfVector]:
    """Embeddings of those hashes that the present document already has."""
    if known.document_id is None:
        return {}
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows(
            "find_embeddings",
            {
                "document_id": known.document_id,
                "embedding_model": embedding_model,
                "chunk_hashes": list(chunk_hashes),
            },
        )
    return {row["chunk_hash"]: row["embedding"] for row in rows}


async def replace(
    database: Database,
    principal: Principal,
    destination: Destination,
    known: Known,
    record: Record,
    chunks: Sequence[Chunk],
    embeddings: Mapping[str, HalfVector],
    *,
    embedding_model: str,
    token_counter: str,
    former: Former | None = None,
    generation: int | None = None,
    renewed: Collection[int] = (),
    also: Callable[[Session, UUID], Awaitable[None]] | None = None,
    claim: Mapping[str, Any] | None = None,
) -> UUID:
    """Write a document and its chunks in one transaction; readers see the old or the new, never a mix.

    `also` is done at its end, with the id of the document, and undoes all of it when it raises. A `claim`, the
    parameters of `release_claim.sql`, is let go of last.

    `embeddings` maps each chunk hash to its vector. Chunks with an index of `renewed` are written anew although they
    are the same. A document with a `former`
    source moves from there: its id and times stay, and the former source counts as deleted. Raises SourceInvalidated
    and SourceRetracted when a source was invalidated or deleted since what is known of it was read, SourceOvertaken
    when it was written by somebody else;
    ModelNotActive and ModelChanging while the embedding model is changed.
    """
    async with database.transaction(principal, publish=destination.publishes) as session:
        sources = [(record.source_type, record.source_id, known)]
        if former is not None:
            sources.append((former.source_type, former.source_id, former.known))
            # In one order everywhere: two files that change places are moved at once.
            for source_type, source_id, _ in sorted(sources, key=lambda source: source[:2]):
                await _lock(session, principal, destination, source_type, source_id)
        for source_type, source_id, expected in sources:
            present = known_of(
                await session.rows(
                    "open_source",
                    source_named(destination, source_type, source_id, record.provenance_id)
                    | _lock_names(principal, destination, source_type, source_id)
                    | {"embedding_model": embedding_model},
                )
            )
            check_open(present, generation)
            # Told here and not by looking again afterwards, which would make the class of an erased owner anew.
            if expected.is_retracted(present):
                raise SourceRetracted()
            if present != expected:
                raise SourceOvertaken()

        document: dict[str, Any] = {
            "tenant_id": principal.tenant_id,
            "access_id": known.access_id,
            "id": known.document_id,
            "source_type": record.source_type,
            "source_id": record.source_id,
            "source_uri": record.source_uri,
            "source_hash": record.source_hash,
            "source_updated_at": record.source_updated_at,
            "language": record.language,
            "title": record.title,
            "body": record.body,
            "domain": record.domain,
            "doc_type": record.doc_type,
            "provenance_id": record.provenance_id,
            "task_id": record.task_id,
            "verified": record.verified,
            "metadata": Jsonb(dict(record.metadata)),
            "created_at": None,
            "content_updated_at": None,
        }
        surplus = list(known.surplus)
        staying: set[int] = set()
        chunk_place = {
            "tenant_id": principal.tenant_id,
            "access_id": known.access_id,
            "embedding_model": embedding_model,
            "language": record.language,
        }
        # What the tenant has more, or less, in the end.
        documents, size = 0, 0
        stored = None
        stored_id = known.document_id if former is None else former.known.document_id
        if stored_id is not None:
            stored = await session.row("get_document", {"id": stored_id})
            assert stored is not None
            document["created_at"] = stored["created_at"]
            # Citations of the same text are not stale, whatever else changes, and whoever may read it.
            if stored["body"] == record.body:
                document["content_updated_at"] = stored["content_updated_at"]
        if known.document_id is not None and not known.moves:
            updated = await session.row("update_document", document)
            if updated is None:
                raise ScopeForbidden()
            assert stored is not None
            size = updated["body_bytes"] - stored["body_bytes"]
            rows = await session.rows(
                "delete_chunks",
                chunk_place
                | {
                    "document_id": known.document_id,
                    "wanted_indexes": [chunk.index for chunk in chunks if chunk.index not in renewed],
                    "wanted_keys": [chunk_key(chunk, token_counter) for chunk in chunks if chunk.index not in renewed],
                },
            )
            staying = {row["chunk_index"] for row in rows}
        else:
            # Another class or source means a rewrite: the id stays, the row is new, and the old one goes.
            if former is not None:
                document["id"] = stored_id
                documents, size = await _retire(session, principal, former)
            if known.moves:
                assert known.document_id is not None
                assert known.document_access_id is not None
                surplus.append((known.document_access_id, known.document_id))
            inserted = await session.row("insert_document", document)
            if inserted is None:
                raise ScopeForbidden()
            document["id"] = inserted["id"]
            documents, size = documents + 1, size + inserted["body_bytes"]
        document_id: UUID = document["id"]

        missing = [chunk for chunk in chunks if chunk.index not in staying]
        for start in range(0, len(missing), CHUNKS_PER_STATEMENT):
            batch = missing[start : start + CHUNKS_PER_STATEMENT]
            await session.run(
                "insert_chunks",
                chunk_place
                | {
                    "document_id": document_id,
                    "token_counter": token_counter,
                    "chunk_indexes": [chunk.index for chunk in batch],
                    "chunk_texts": [chunk.text for chunk in batch],
                    "chunk_hashes": [chunk.hash for chunk in batch],
                    "token_counts": [chunk.token_count for chunk in batch],
                    "start_offsets": [chunk.start for chunk in batch],
                    "end_offsets": [chunk.end for chunk in batch],
                    "page_numbers": [chunk.page_number for chunk in batch],
                    "sections": [chunk.section for chunk in batch],
                    "indexed_texts": [chunk.embedded_text for chunk in batch],
                    "embeddings": [embeddings[chunk.hash] for chunk in batch],
                },
            )
        for access_id, surplus_id in surplus:
            removed = await session.row(
                "delete_document",
                {"tenant_id": principal.tenant_id, "access_id": access_id, "id": surplus_id},
            )
            if removed is not None:
                documents, size = documents - 1, size - removed["body_bytes"]
        if also is not None:
            await also(session, document_id)
        await limits.charge(session, documents=documents, size=size, claim=claim)
    return document_id


async def _retire(session: Session, principal: Principal, former: Former) -> tuple[int, int]:
    """Remove a document from the source that it leaves, so that nothing that is in flight brings it back there.

    Returns what the tenant has more: documents and bytes, less than 0.
    """
    documents, size = 0, 0
    known = former.known
    places = [(known.document_access_id, known.document_id), *known.surplus]
    for access_id, document_id in places:
        place = {"tenant_id": principal.tenant_id, "access_id": access_id}
        removed = await session.row("delete_document", place | {"id": document_id})
        if removed is None:
            raise ScopeForbidden()
        documents, size = documents - 1, size - removed["body_bytes"]
        named = {"source_type": former.source_type, "source_id": former.source_id}
        await session.run("bury_source", named | {"access_id": access_id, "reason": "renamed"})
    return documents, size


async def read_document(database: Database, principal: Principal, document_id: UUID) -> dict[str, Any]:
    """One document with its text. Raises DocumentNotFound, the same for a missing and a hidden one."""
    async with database.transaction(principal, read_only=True) as session:
        row = await session.row("get_document", {"id": document_id})
    if row is None:
        raise DocumentNotFound()
    return row


async def count_sources(database: Database, principal: Principal, *, embedding_model: str) -> list[dict[str, Any]]:
    """What the principal sees of each source, with its age; `source` is empty for what no source keeps in step."""
    async with database.transaction(principal, read_only=True) as session:
        return await session.rows("count_sources", {"embedding_model": embedding_model})


@dataclass(frozen=True, slots=True, kw_only=True)
class Synchronised:
    """What came of the synchronisation of a source, in documents; `files` and `failed` count files as well."""

    source: str
    version: str | None
    files: int
    written: int
    removed: int
    unchanged: int
    failed: int


async def find_class(database: Database, principal: Principal, destination: Destination) -> int:
    """The access class of a destination, made when there is none. Raises ScopeForbidden."""
    async with database.transaction(principal, publish=destination.publishes) as session:
        return await class_of(session, destination)


async def note_synchronisation(
    database: Database,
    principal: Principal,
    destination: Destination,
    access_id: int,
    done: Synchronised,
    *,
    also: Callable[[Session], Awaitable[None]] | None = None,
) -> None:
    """Keep what came of a synchronisation, instead of the one before. `also` is a part of the transaction.

    Raises ScopeForbidden for a class that is gone, or not the principal's to write.
    """
    async with database.transaction(principal, publish=destination.publishes) as session:
        if also is not None:
            await also(session)
        await session.run("note_synchronisation", asdict(done) | {"access_id": access_id})


async def list_synchronisations(database: Database, principal: Principal) -> list[dict[str, Any]]:
    """What came of the last synchronisation of each source that the principal sees."""
    async with database.transaction(principal, read_only=True) as session:
        return await session.rows("list_synchronisations", {})


async def remove_document(
    database: Database,
    principal: Principal,
    document_id: UUID,
    *,
    reason: str,
    updated_at: datetime | None = None,
    also: Callable[[Session], Awaitable[None]] | None = None,
) -> None:
    """Delete a document so that nothing that is in flight brings it back. `also` is a part of the transaction.

    Raises DocumentNotFound, the same for a missing and a hidden one; ScopeForbidden for one that the
    principal may read and not write; SourceOvertaken for one that was written since `updated_at`.
    """
    row = await read_document(database, principal, document_id)
    destination = _destination(row)
    source = {"source_type": row["source_type"], "source_id": row["source_id"]}
    async with database.transaction(principal, publish=destination.publishes) as session:
        await _lock(session, principal, destination, row["source_type"], row["source_id"])
        # Read again under the lock: it may be gone, or in another class since its tags changed.
        present = await session.row("get_document", {"id": document_id})
        if present is None:
            raise DocumentNotFound()
        if updated_at is not None and present["updated_at"] != updated_at:
            raise SourceOvertaken()
        if also is not None:
            await also(session)
        place = {"tenant_id": principal.tenant_id, "access_id": present["access_id"]}
        removed = await session.row("delete_document", place | {"id": document_id})
        if removed is None:
            raise ScopeForbidden()
        await session.run("bury_source", source | {"access_id": present["access_id"], "reason": reason})
        await limits.charge(session, documents=-1, size=-removed["body_bytes"])


async def _lock(
    session: Session, principal: Principal, destination: Destination, source_type: str, source_id: str
) -> None:
    """One writer at a time for a source of one owner, whatever its tags; and none while the owner's are invalidated."""
    await session.run("lock_source", _lock_names(principal, destination, source_type, source_id))


def _lock_names(principal: Principal, destination: Destination, source_type: str, source_id: str) -> dict[str, str]:
    owner = (principal.tenant_id, destination.scope, destination.user_id, destination.project_id)
    return {
        "tenant_id": principal.tenant_id,
        "owner_name": lock_name(*owner),
        "source_name": lock_name(*owner, source_type, source_id),
    }


def lock_name(*named: str | int | None) -> str:
    """What stands for an owner, or for a source of one, in a lock: tenant, scope, user, project; type and id."""
    return json.dumps(named)


def chunk_key(chunk: Chunk, token_counter: str) -> str:
    """What has to be equal for a stored chunk to stay; the text that delete_chunks puts together as well."""
    parts = (chunk.hash, chunk.start, chunk.end, chunk.page_number, token_counter)
    return ":".join(str(part) for part in parts if part is not None)


def halfvec(vector: Sequence[float]) -> str:
    """A vector in the notation that the database reads; 6 digits hold more than the 11 bits of a half."""
    return "[" + ",".join(f"{value:.6g}" for value in vector) + "]"


def sha256(*parts: str | bytes | None) -> str:
    """One digest over parts that cannot run into each other; hexadecimal."""
    total = hashlib.sha256()
    for part in parts:
        data = b"\xff" if part is None else part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big"))
        total.update(data)
    return total.hexdigest()
