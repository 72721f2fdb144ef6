"""The ingest line: parse → chunk → embed → one transaction { lock, tombstone check, document, chunks }."""

from __future__ import annotations

import asyncio
import json
import operator
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal, Protocol
from uuid import UUID

from pgvector import HalfVector

from rag import chunk, claim, language, limits, parse, store
from rag.chunk import Chunk, Strategy
from rag.claim import Held
from rag.database import Database, Session
from rag.embed import Embedder
from rag.errors import EmbeddingInvalid, InvalidInput, SourceOvertaken
from rag.parse import ParsedDocument
from rag.principal import Principal, check_name
from rag.store import Destination, Former, Known

# Part of every source_hash: raise it when parsing or cutting changes, so that documents are made anew.
RECIPE = "1"

# A writer that loses the race reads again what the winner left. Losing three times in a row takes
# three others who write the same source within seconds; then the caller is told.
ATTEMPTS = 3

# What a jsonb column takes need not be what a reader's JSON parser takes.
MAX_METADATA_BYTES = 64 * 1024
MAX_METADATA_DEPTH = 16

# Spec 002, table of strategies: "Summaries only, not raw messages".
RAW_SOURCE_TYPES = frozenset({"conversation", "conversations"})

# Documents of a command that are under way at once, so that the model always has one to read. On 2 cores they took
# 1.20 times what the model takes alone with four and with six, 1.30 with two (1 KB each, by turns in one run).
PARALLEL_DOCUMENTS = 4

# Texts that are embedded at once: their vectors are numbers of Python's, 16 KB each, until they are packed.
EMBEDDED_AT_ONCE = 512
# Bytes or characters of a text that is read and cut in a millisecond or two.
PAGE_SIZE = 2_048
# As rag_tombstones counts.
MAX_GENERATION = 1_000_000_000

Status = Literal["created", "updated", "moved", "unchanged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Which synchronised source a document is of, and where it stands in it. Stored in the metadata.

    `version`, such as a commit, is the one with which this text came in. It says nothing of whether the text
    changed: a hundred commits that leave a file alone leave its document alone.
    """

    source: str
    path: str
    version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A document as it arrives: bytes of a file, or text.

    `name` tells the format by its suffix; `source_id` identifies the source within its owner, so
    that the next version replaces this one. None for `title` and `language` = what the document says;
    `encoding` is of bytes that are text and do not say it themselves.
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
    encoding: str | None = None
    origin: Origin | None = None
    generation: int | None = None
    """Above that of an invalidation: this content is newer, and goes in although the source is retracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingested:
    """What became of a source. `embedded` counts the chunks that the model had to read."""

    document_id: UUID
    status: Status
    chunks: int
    embedded: int
    tokens: int


# Told at the end of the transaction that stores a document, or that finds it unchanged; undoes it when it raises.
Also = Callable[[Session, Ingested], Awaitable[None]]


async def ingest(
    source: Source,
    *,
    principal: Principal,
    destination: Destination,
    database: Database,
    embedder: Embedder,
    max_bytes: int,
    chunking: Strategy = "rules",
    former: tuple[str, str] | None = None,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
    also: Also | None = None,
) -> Ingested:
    """Make a source searchable; the same source again replaces it, and unchanged costs nothing.

    Whoever brings the same source at the same time waits, and finds it unchanged. `also` is a part of the transaction.

    `former` is the source type and the id under which the document was known before its source was renamed: it
    keeps its id and its embeddings. With `force`, what is stored is written anew where it is not as it should be.

    `progress(done, total)` is called as chunks are embedded. Raises InvalidInput and its kin for
    what cannot be read, ScopeForbidden, QuotaExceeded, SourceInvalidated, SourceRetracted, EmbeddingError,
    DatabaseError; in each case nothing of the document is stored, and what was there stays.
    """
    check_source(source)
    source_type = source_type_of(source)
    digest = digest_of(source, embedder, chunking=chunking)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            async with claim.claimed(
                database,
                principal,
                destination,
                source_type=source_type,
                source_id=source.source_id,
                provenance_id=source.provenance_id,
                generation=source.generation,
                settled_hash=None if force else digest,
            ) as held:
                if held.source_digest is None:
                    return await _leave(source, source_type, held.known, principal, destination, database, also)
                before = None
                if former is not None and held.known.document_id is None:
                    before = await _look_up_former(database, principal, destination, former, source)
                return await _replace(
                    source,
                    source_type,
                    digest,
                    held,
                    before,
                    principal=principal,
                    destination=destination,
                    database=database,
                    embedder=embedder,
                    max_bytes=max_bytes,
                    chunking=chunking,
                    progress=progress,
                    also=also,
                )
        except SourceOvertaken:
            if attempt == ATTEMPTS:
                raise
    raise AssertionError("unreachable")


async def _leave(
    source: Source,
    source_type: str,
    known: Known,
    principal: Principal,
    destination: Destination,
    database: Database,
    also: Also | None,
) -> Ingested:
    """What becomes of a source that is stored as it should be. Raises SourceOvertaken when it is not any more."""
    assert known.document_id is not None
    unchanged = Ingested(document_id=known.document_id, status="unchanged", chunks=0, embedded=0, tokens=0)
    if also is not None:
        async with database.transaction(principal, publish=destination.publishes) as session:
            present = await store.look(
                session,
                destination,
                source_type=source_type,
                source_id=source.source_id,
                provenance_id=source.provenance_id,
                generation=source.generation,
            )
            if present != known:
                raise SourceOvertaken()
            await also(session, unchanged)
    return unchanged


async def _look_up_former(
    database: Database, principal: Principal, destination: Destination, former: tuple[str, str], source: Source
) -> Former | None:
    source_type, source_id = former
    known = await store.look_up(
        database,
        principal,
        destination,
        source_type=source_type,
        source_id=source_id,
        provenance_id=source.provenance_id,
        generation=source.generation,
    )
    if known.document_id is None:
        return None
    return Former(source_type=source_type, source_id=source_id, known=known)


async def _replace(
    source: Source,
    source_type: str,
    digest: str,
    held: Held,
    former: Former | None,
    *,
    principal: Principal,
    destination: Destination,
    database: Database,
    embedder: Embedder,
    max_bytes: int,
    chunking: Strategy,
    progress: Callable[[int, int], None] | None,
    also: Also | None,
) -> Ingested:
    known = held.known
    is_new = known.document_id is None and former is None

    def read() -> tuple[ParsedDocument, list[Chunk]]:
        parsed = _read(source, source_type, max_bytes)
        if is_new:
            # Before the model is asked; whether there is room is settled when the document is written.
            limits.check_room(held.room, size=len(parsed.body.encode()))
        return parsed, [] if chunking == "semantic" else _cut(parsed, embedder, chunking)

    # In a thread: a book takes seconds to read and cut, and other requests must not wait for it. What is read within
    # the interpreter's switch interval holds up nobody longer here.
    is_page = len(source.content) <= PAGE_SIZE and not parse.is_packed(source.content) and language.is_loaded()
    parsed, chunks = read() if is_page else await asyncio.to_thread(read)
    if chunking == "semantic":
        chunks = await cut(parsed, embedder, chunking=chunking)

    kept = await store.kept_embeddings(
        database,
        principal,
        known if former is None else former.known,
        chunk_hashes=[piece.hash for piece in chunks],
        embedding_model=embedder.model_id,
    )
    fresh = await embed_missing(chunks, kept, embedder, progress)
    embeddings = {**kept, **fresh}

    def became(document_id: UUID) -> Ingested:
        return Ingested(
            document_id=document_id,
            status="moved" if known.moves or former else "created" if known.document_id is None else "updated",
            chunks=len(chunks),
            embedded=len(fresh),
            tokens=sum(piece.token_count for piece in chunks),
        )

    async def finish(session: Session, document_id: UUID) -> None:
        if also is not None:
            await also(session, became(document_id))

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
            metadata={**parsed.metadata, **source.metadata, **_origin(source)},
        ),
        chunks,
        embeddings,
        former=former,
        embedding_model=embedder.model_id,
        token_counter=embedder.token_counter,
        generation=source.generation,
        also=finish,
        claim=held.named,
    )
    held.released = True
    return became(document_id)


def _half(vector: list[float]) -> HalfVector:
    try:
        return HalfVector(vector)
    except OverflowError as error:
        raise EmbeddingInvalid("the embedding holds a number that half precision cannot") from error


def _read(source: Source, source_type: str, max_bytes: int) -> ParsedDocument:
    """Parse a source; its language is the caller's word, else the document's own, else detected."""
    if isinstance(source.content, str):
        parsed = parse.parse_text(source.content, name=source.name, source_type=source_type, max_bytes=max_bytes)
    else:
        parsed = parse.parse(
            source.content,
            name=source.name,
            source_type=source_type,
            max_bytes=max_bytes,
            encoding=source.encoding,
        )
    return replace(
        parsed,
        # Before the cut: the title is a part of what is embedded and searched.
        title=source.title or parsed.title,
        language=source.language or _primary(parsed.language) or language.detect(parsed.body),
    )


async def cut(parsed: ParsedDocument, embedder: Embedder, *, chunking: Strategy) -> list[Chunk]:
    """The chunks of a document as the settings want them; `semantic` asks the model about its sentences."""
    kinship = await _kinship(parsed, embedder) if chunking == "semantic" else []
    return await asyncio.to_thread(_cut, parsed, embedder, chunking, kinship)


def _cut(parsed: ParsedDocument, embedder: Embedder, chunking: Strategy, kinship: Sequence[float] = ()) -> list[Chunk]:
    return chunk.split(
        parsed,
        limit_tokens=embedder.max_input_tokens,
        count=embedder.count_tokens,
        strategy=chunking,
        kinship=kinship,
    )


async def embed_missing(
    chunks: Sequence[Chunk],
    kept: Collection[str],
    embedder: Embedder,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, HalfVector]:
    """The vector of each chunk whose hash is not among those that are kept, by hash; each text is embedded once.

    `progress(done, total)` is called as they are embedded. Raises the EmbeddingError family.
    """
    fresh = {piece.hash: piece.embedded_text for piece in chunks if piece.hash not in kept}
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(fresh))

    embeddings: dict[str, HalfVector] = {}
    keys, texts = list(fresh), list(fresh.values())
    for start in range(0, len(keys), EMBEDDED_AT_ONCE):
        end = start + EMBEDDED_AT_ONCE
        vectors = await embedder.embed(texts[start:end], purpose="document", progress=report)
        embeddings |= {key: _half(vector) for key, vector in zip(keys[start:end], vectors, strict=True)}
    return embeddings


async def _kinship(parsed: ParsedDocument, embedder: Embedder) -> list[float]:
    """The cosine of each unit and the next one."""
    texts = await asyncio.to_thread(
        chunk.units, parsed, limit_tokens=embedder.max_input_tokens, count=embedder.count_tokens
    )
    kinship: list[float] = []
    last: Sequence[float] | None = None
    for start in range(0, len(texts), EMBEDDED_AT_ONCE):
        for vector in await embedder.embed(texts[start : start + EMBEDDED_AT_ONCE], purpose="document"):
            if last is not None:
                kinship.append(sum(map(operator.mul, last, vector)))
            last = vector
    return kinship


def _origin(source: Source) -> dict[str, Any]:
    """What a synchronisation will want to know of the document; a key of the metadata that is ours."""
    if source.origin is None:
        return {}
    origin = {"source": source.origin.source, "path": source.origin.path, "sha256": content_digest(source.content)}
    return {"origin": origin | ({} if source.origin.version is None else {"version": source.origin.version})}


def _primary(tag: str | None) -> str | None:
    """The two letters of a document's own word for its language (`de`, `de-CH`), None for any other word."""
    found = re.fullmatch(r"([a-z]{2})(?:[-_].*)?", (tag or "").strip().lower())
    return found[1] if found else None


def check_source(source: Source) -> None:
    """Raise InvalidInput, naming the field, for what no column would take, and for raw conversations."""
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
    if source.source_type in RAW_SOURCE_TYPES:
        raise InvalidInput(
            "conversations are ingested as summaries: use source_type conversation_summary", field="source_type"
        )
    if source.encoding is not None:
        parse.check_encoding(source.encoding)
    if source.generation is not None and not 1 <= source.generation <= MAX_GENERATION:
        raise InvalidInput(f"generation must be a whole number from 1 to {MAX_GENERATION}", field="generation")
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


def source_type_of(source: Source) -> str:
    """The caller's word, else what the name tells."""
    return source.source_type or parse.source_type_of(source.name)


def content_digest(content: bytes | str) -> str:
    """SHA-256 of what a source holds, hexadecimal."""
    return store.sha256(_bytes(content))


def _bytes(content: bytes | str) -> bytes:
    # A lone surrogate is refused by the parser, with the place where it stands.
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


class Measure(Protocol):
    """What of an embedding model decides how a document is cut."""

    @property
    def model_id(self) -> str: ...

    @property
    def max_input_tokens(self) -> int: ...

    @property
    def token_counter(self) -> str: ...


def digest_of(source: Source, embedder: Measure, *, chunking: Strategy = "rules") -> str:
    """Everything that decides what is stored; equal means that there is nothing to do."""
    described = [
        RECIPE,
        embedder.model_id,
        embedder.max_input_tokens,
        embedder.token_counter,
        source_type_of(source),
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
    ]
    # Only where they say something: what was stored before they were there stays as it is.
    if chunking != "rules":
        described.append({"chunking": chunking})
    if source.encoding is not None:
        described.append({"encoding": source.encoding})
    if source.origin is not None:
        described.append({"source": source.origin.source, "path": source.origin.path})
    return store.sha256(_bytes(source.content), json.dumps(described, sort_keys=True))
