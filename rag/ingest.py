"""The ingest line: parse → chunk → embed → one transaction { lock, tombstone check, document, chunks }."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from rag import chunk, language, parse, store
from rag.chunk import Chunk
from rag.database import Database
from rag.embed import Embedder
from rag.errors import InvalidInput, SourceOvertaken
from rag.parse import ParsedDocument
from rag.principal import Principal, check_name
from rag.store import Destination, Known

# Part of every source_hash: raise it when parsing or cutting changes, so that documents are made anew.
RECIPE = "1"

# A writer that loses the race reads again what the winner left. Losing three times in a row takes
# three others who write the same source within seconds; then the caller is told.
ATTEMPTS = 3

# What a jsonb column takes need not be what a reader's JSON parser takes.
MAX_METADATA_BYTES = 64 * 1024
MAX_METADATA_DEPTH = 16

Status = Literal["created", "updated", "moved", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A document as it arrives: bytes of a file, or text.

    `name` tells the format by its suffix; `source_id` identifies the source within its owner, so
    that the next version replaces this one. None for `title` and `language` = what the document says.
    """

    name: str
    source_id: str
    content: bytes | str
    source_type: str | None = None
    source_uri: str | None = None
    source_updated_at: datetime | None = None
    title: str | None = None
    language: str | None = None
    domain: str | None = None
    doc_type: str | None = None
    provenance_id: str | None = None
    task_id: str | None = None
    verified: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What became of a source. `embedded` counts the chunks that the model had to read."""

    document_id: UUID
    status: Status
    chunks: int
    embedded: int
    tokens: int


async def ingest(
    source: Source,
    *,
    principal: Principal,
    destination: Destination,
    database: Database,
    embedder: Embedder,
    max_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> Ingested:
    """Make a source searchable; the same source again replaces it, and unchanged costs nothing.

    `progress(done, total)` is called as chunks are embedded. Raises InvalidInput and its kin for
    what cannot be read, ScopeForbidden, SourceRetracted, EmbeddingError, DatabaseError; in each
    case nothing of the document is stored, and what was there stays.
    """
    check_source(source)
    source_type = source.source_type or parse.source_type_of(source.name)
    digest = _digest(source, source_type, embedder)
    for attempt in range(1, ATTEMPTS + 1):
        known = await store.look_up(
            database, principal, destination, source_type=source_type, source_id=source.source_id
        )
        if known.document_id is not None and known.source_hash == digest and not (known.moves or known.surplus):
            return Ingested(document_id=known.document_id, status="unchanged", chunks=0, embedded=0, tokens=0)
        try:
            return await _replace(
                source,
                source_type,
                digest,
                known,
                principal=principal,
                destination=destination,
                database=database,
                embedder=embedder,
                max_bytes=max_bytes,
                progress=progress,
            )
        except SourceOvertaken:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _replace(
    source: Source,
    source_type: str,
    digest: str,
    known: Known,
    *,
    principal: Principal,
    destination: Destination,
    database: Database,
    embedder: Embedder,
    max_bytes: int,
    progress: Callable[[int, int], None] | None,
) -> Ingested:
    # In a thread: a book takes seconds to read and cut, and other requests must not wait for it.
    parsed, chunks = await asyncio.to_thread(_cut, source, source_type, embedder, max_bytes)

    embeddings = await store.kept_embeddings(
        database,
        principal,
        known,
        chunk_hashes=[piece.hash for piece in chunks],
        embedding_model=embedder.model_id,
    )
    fresh = {piece.hash: piece.embedded_text for piece in chunks if piece.hash not in embeddings}
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(fresh))

    vectors = await embedder.embed(list(fresh.values()), purpose="document", progress=report)
    embeddings |= {key: store.halfvec(vector) for key, vector in zip(fresh, vectors, strict=True)}

    document_id = await store.replace(
        database,
        principal,
        destination,
        known,
        store.Record(
            source_type=source_type,
            source_id=source.source_id,
            source_uri=source.source_uri,
            source_hash=digest,
            source_updated_at=source.source_updated_at,
            language=parsed.language,
            title=parsed.title,
            body=parsed.body,
            domain=source.domain,
            doc_type=source.doc_type,
            provenance_id=source.provenance_id,
            task_id=source.task_id,
            verified=source.verified,
            metadata={**parsed.metadata, **source.metadata},
        ),
        chunks,
        embeddings,
        embedding_model=embedder.model_id,
        token_counter=embedder.token_counter,
    )
    return Ingested(
        document_id=document_id,
        status="moved" if known.moves else "created" if known.document_id is None else "updated",
        chunks=len(chunks),
        embedded=len(fresh),
        tokens=sum(piece.token_count for piece in chunks),
    )


def _cut(source: Source, source_type: str, embedder: Embedder, max_bytes: int) -> tuple[ParsedDocument, list[Chunk]]:
    """Parse and chunk a source; its language is the caller's word, else the document's own, else detected."""
    if isinstance(source.content, str):
        parsed = parse.parse_text(source.content, name=source.name, source_type=source_type, max_bytes=max_bytes)
    else:
        parsed = parse.parse(source.content, name=source.name, source_type=source_type, max_bytes=max_bytes)
    parsed = replace(
        parsed,
        # Before the cut: the title is a part of what is embedded and searched.
        title=source.title or parsed.title,
        language=source.language or _primary(parsed.language) or language.detect(parsed.body),
    )
    return parsed, chunk.split(parsed, limit_tokens=embedder.max_input_tokens, count=embedder.count_tokens)


def _primary(tag: str | None) -> str | None:
    """The two letters of a document's own word for its language (`de`, `de-CH`), None for any other word."""
    found = re.fullmatch(r"([a-z]{2})(?:[-_].*)?", (tag or "").strip().lower())
    return found[1] if found else None


def check_source(source: Source) -> None:
    """Raise InvalidInput, naming the field, for what no column would take."""
    if not source.source_id or len(source.source_id.encode("utf-8", "replace")) > 512:
        raise InvalidInput("source_id must be 1 to 512 bytes", field="source_id")
    check_name(source.source_id, field="source_id", max_length=512)
    for name, limit in (
        ("source_type", 64),
        ("source_uri", 2048),
        ("title", 512),
        ("domain", 128),
        ("doc_type", 128),
        ("provenance_id", 256),
        ("task_id", 256),
    ):
        value = getattr(source, name)
        if value is not None:
            check_name(value, field=name, max_length=limit)
    if source.language is not None and not re.fullmatch(r"[a-z]{2}", source.language):
        raise InvalidInput("language must be an ISO 639-1 code of two letters, such as en", field="language")
    check_metadata(source.metadata)


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise InvalidInput unless this is JSON that every reader can read back."""
    try:
        text = json.dumps(metadata, allow_nan=False)
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput("metadata must be a JSON object", field="metadata") from error
    if len(text) > MAX_METADATA_BYTES:
        raise InvalidInput(f"metadata must be at most {MAX_METADATA_BYTES} bytes of JSON", field="metadata")
    _check_value(metadata, depth=1)


def _check_value(value: Any, *, depth: int) -> None:
    if depth > MAX_METADATA_DEPTH and isinstance(value, Mapping | list | tuple):
        raise InvalidInput(f"metadata must be at most {MAX_METADATA_DEPTH} levels deep", field="metadata")
    if isinstance(value, Mapping):
        for key, member in value.items():
            # json.dumps would make strings of numbers, and two keys of one.
            if not isinstance(key, str):
                raise InvalidInput("metadata must have strings as keys", field="metadata")
            _check_value(key, depth=depth)
            _check_value(member, depth=depth + 1)
    elif isinstance(value, list | tuple):
        for member in value:
            _check_value(member, depth=depth + 1)
    elif isinstance(value, str) and any(mark == "\0" or "\ud800" <= mark <= "\udfff" for mark in value):
        raise InvalidInput("metadata must not contain NUL or lone surrogates", field="metadata")


def _digest(source: Source, source_type: str, embedder: Embedder) -> str:
    """Everything that decides what is stored; equal means that there is nothing to do."""
    content = source.content
    if isinstance(content, str):
        # A lone surrogate is refused by the parser, with the place where it stands.
        content = content.encode("utf-8", "surrogatepass")
    described = json.dumps(
        [
            RECIPE,
            embedder.model_id,
            embedder.max_input_tokens,
            embedder.token_counter,
            source_type,
            source.name,
            source.source_uri,
            source.title,
            source.language,
            source.domain,
            source.doc_type,
            source.provenance_id,
            source.task_id,
            source.verified,
            source.metadata,
        ],
        sort_keys=True,
    )
    return store.sha256(content, described)
