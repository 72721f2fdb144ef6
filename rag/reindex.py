"""Cuts documents anew from the text that is stored, after the settings or the rules that cut them changed.

Of Markdown, text and YAML the body has all that the cut goes by. What is cut as before stays untouched; chunks that
say the same keep their embeddings; a document is written in one transaction, so that readers see the old or the new.
A run that was stopped is run again: what it did is found done. It does what the principal may write, and no more.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, get_args
from uuid import UUID

from pgvector import HalfVector

from rag import chunk, store
from rag.chunk import STRATEGIES, Strategy
from rag.database import Database
from rag.embed import Embedder
from rag.errors import (
    DocumentNotFound,
    EmbeddingInvalid,
    InvalidInput,
    ScopeForbidden,
    SourceOvertaken,
    SourceRetracted,
)
from rag.ingest import ATTEMPTS, MAX_GENERATION, Origin, Source, cut, digest_of, embed_missing
from rag.parse import SUFFIXES, Format, format_of_text, reread
from rag.principal import Principal
from rag.store import Destination, Known
from rag.sync import Silent, Watcher

# The body of these is what was cut; of all others it is a rendering without its pages, cells or headings.
REREADABLE: tuple[Format, ...] = ("markdown", "text", "yaml")
# What a request's `format` adds to a source id.
ADDED_SUFFIXES = ("", ".md", ".txt", ".yaml")
# Input limits that the models of rag/embed.py have had; the one of the settings comes first.
KNOWN_LIMITS = (256, 512, 2048, 8191, 8192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recut:
    """A document that is cut otherwise now, or would be: its chunks before and after, and what the model has to read.

    `words` counts chunks that stay as they are but for the words by which they are found.
    """

    document_id: UUID
    source_id: str
    before: int
    after: int
    embedded: int
    words: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A document that was left as it is, and why."""

    document_id: UUID
    source_id: str
    reason: str
    source: str | None = None
    """The synchronised source from which it can be read anew."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run found, and did unless it was a dry run."""

    documents: int = 0
    unchanged: int = 0
    recut: list[Recut] = field(default_factory=list)
    kept: list[Left] = field(default_factory=list)
    """Of formats whose structure is not in the body."""
    failures: list[Left] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """An embedding model as it was when something was cut."""

    model_id: str
    max_input_tokens: int
    token_counter: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reindexer:
    """Cuts documents of one database anew for one embedding model."""

    database: Database
    embedder: Embedder
    chunking: Strategy
    watcher: Watcher = field(default_factory=Silent)
    per_minute: int | None = None
    """Documents that are written a minute at most; None = as fast as it goes."""

    async def reindex(
        self,
        principal: Principal,
        *,
        prefix: str | None = None,
        source_type: str | None = None,
        dry_run: bool = False,
    ) -> Outcome:
        """Cut what the principal may write anew; with `dry_run` only say what would be done, and embed nothing.

        `prefix` is of source ids. Raises the EmbeddingError and DatabaseError families; what was done until then
        stays, and is right.
        """
        wanted = {"prefix": prefix, "source_type": source_type}
        # Public documents are rag_publisher's to write, where there is one.
        publish = self.database.can_publish
        async with self.database.transaction(principal, read_only=True, publish=publish) as session:
            rows = await session.rows("list_writable", wanted)
        outcome = Outcome(documents=len(rows))
        self.watcher.start(len(rows), "reindexing")
        turn = time.monotonic()
        for row in rows:
            self.watcher.note(row["source_id"])
            left = {"document_id": row["id"], "source_id": row["source_id"]}
            try:
                done = await self._one(principal, row["id"], dry_run=dry_run)
            except DocumentNotFound:
                outcome.documents -= 1  # somebody removed it, or it is being moved to other tags
            except (InvalidInput, EmbeddingInvalid, SourceRetracted, ScopeForbidden) as error:
                outcome.failures.append(Left(**left, reason=error.message))
            else:
                if isinstance(done, Recut):
                    outcome.recut.append(done)
                    if self.per_minute is not None and not dry_run:
                        turn = max(turn + 60 / self.per_minute, time.monotonic())
                        await asyncio.sleep(turn - time.monotonic())
                elif isinstance(done, Left):
                    outcome.kept.append(done)
                else:
                    outcome.unchanged += 1
            self.watcher.step()
        return outcome

    async def _one(self, principal: Principal, document_id: UUID, *, dry_run: bool) -> Recut | Left | None:
        """What became of a document; None when it is as it should be."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._recut(principal, document_id, dry_run=dry_run)
            except SourceOvertaken:
                if attempt == ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    async def _recut(self, principal: Principal, document_id: UUID, *, dry_run: bool) -> Recut | Left | None:
        row, destination, known = await store.look_up_stored(self.database, principal, document_id)
        found = await store.chunk_keys(self.database, principal, document_id)
        stored = [(each["chunk_key"], each["embedding_model"], each["language"]) for each in found]
        models, counters = {each["embedding_model"] for each in found}, {each["token_counter"] for each in found}
        proven = await asyncio.to_thread(lambda: next(self._proofs(row, models, counters), None))
        text_format = format_of_text(proven.name, row["source_type"]) if proven else _likely_format(row)
        has_pages = any(each["page_number"] is not None for each in found)
        if text_format not in REREADABLE or has_pages:
            return _kept(row, "pdf" if has_pages else text_format)
        parsed = await asyncio.to_thread(
            lambda: reread(
                row["body"],
                text_format=text_format,
                title=row["title"],
                source_type=row["source_type"],
                language=row["language"],
            )
        )
        chunks = await cut(parsed, self.embedder, chunking=self.chunking)
        wanted = [
            (store.chunk_key(each, self.embedder.token_counter), self.embedder.model_id, row["language"])
            for each in chunks
        ]
        same = [each for each, key in zip(chunks, wanted, strict=True) if stored[each.index : each.index + 1] == [key]]
        words = await store.stale_words(self.database, principal, document_id, same, language=row["language"])
        if wanted == stored and not words:
            return None
        kept = await store.kept_embeddings(
            self.database,
            principal,
            known,
            chunk_hashes=[each.hash for each in chunks],
            embedding_model=self.embedder.model_id,
        )
        recut = Recut(
            document_id=document_id,
            source_id=row["source_id"],
            before=len(stored),
            after=len(chunks),
            embedded=len({each.hash for each in chunks} - set(kept)),
            words=len(words),
        )
        if not dry_run:
            digest = _digest(proven, row, self.embedder, self.chunking)
            await self._write(principal, destination, known, row, chunks, kept, digest, words)
        return recut

    async def _write(
        self,
        principal: Principal,
        destination: Destination,
        known: Known,
        row: Mapping[str, Any],
        chunks: list[chunk.Chunk],
        kept: Mapping[str, HalfVector],
        digest: str,
        words: set[int],
    ) -> None:
        def told(done: int, total: int) -> None:
            self.watcher.note(f"{row['source_id']} {done}/{total}")

        fresh = await embed_missing(chunks, kept, self.embedder, told)
        await store.replace(
            self.database,
            principal,
            destination,
            known,
            store.Record(
                source_type=row["source_type"],
                source_id=row["source_id"],
                source_uri=row["source_uri"],
                source_hash=digest,
                source_updated_at=row["source_updated_at"],
                language=row["language"],
                title=row["title"],
                body=row["body"],
                domain=row["domain"],
                doc_type=row["doc_type"],
                provenance_id=row["provenance_id"],
                task_id=row["task_id"],
                verified=row["verified"],
                metadata=row["metadata"],
            ),
            chunks,
            {**kept, **fresh},
            embedding_model=self.embedder.model_id,
            token_counter=self.embedder.token_counter,
            # It is there, whatever was invalidated before it came; what is invalidated since then is noticed.
            generation=MAX_GENERATION,
            renewed=words,
        )

    def _proofs(self, row: Mapping[str, Any], models: set[str], counters: set[str]) -> Iterator[Source]:
        """The source as it once arrived, when the digest that is stored proves it."""
        limits = dict.fromkeys((self.embedder.max_input_tokens, *KNOWN_LIMITS))
        for source in _arrivals(row):
            for model, limit, counter, chunking in itertools.product(models, limits, counters, STRATEGIES):
                measure = _Measure(model_id=model, max_input_tokens=limit, token_counter=counter)
                if digest_of(source, measure, chunking=chunking) == row["source_hash"]:
                    yield source


def _arrivals(row: Mapping[str, Any]) -> Iterator[Source]:
    """What may have arrived: a text without anything that parsing takes off, under the names that there can be."""
    metadata = dict(row["metadata"])
    told = metadata.pop("origin", None)
    origin = None
    if isinstance(told, dict) and {"source", "path"} <= set(told):
        origin = Origin(source=told["source"], path=told["path"], version=told.get("version"))
    names = [] if origin is None else [origin.path]
    names += [_undivided(row["source_id"]) + suffix for suffix in ADDED_SUFFIXES]
    for name, title, language in itertools.product(names, {None, row["title"]}, {None, row["language"]}):
        yield Source(
            name=name,
            source_id=row["source_id"],
            content=row["body"],
            source_type=row["source_type"],
            source_uri=row["source_uri"],
            source_updated_at=row["source_updated_at"],
            title=title,
            language=language,
            domain=row["domain"],
            doc_type=row["doc_type"],
            provenance_id=row["provenance_id"],
            task_id=row["task_id"],
            verified=row["verified"],
            metadata=metadata,
            origin=origin,
        )


def _undivided(source_id: str) -> str:
    """The source id without the number of a part."""
    return source_id.partition("//")[0]


def _likely_format(row: Mapping[str, Any]) -> Format | None:
    """The format by the name of the file, as far as it is known, else by a type that says it; None = unknown."""
    told = row["metadata"].get("origin")
    path = told.get("path") if isinstance(told, dict) else None
    for name in (path, _undivided(row["source_id"]), row["source_uri"]):
        found = SUFFIXES.get(PurePosixPath(name).suffix.lower()) if isinstance(name, str) else None
        if found is not None:
            return found
    return row["source_type"] if row["source_type"] in get_args(Format) else None


def _kept(row: Mapping[str, Any], text_format: Format | None) -> Left:
    told = row["metadata"].get("origin")
    return Left(
        document_id=row["id"],
        source_id=row["source_id"],
        reason="its format is not known"
        if text_format is None
        else f"{text_format}: its pages, headings or cells are not in the text that is stored",
        source=told.get("source") if isinstance(told, dict) else None,
    )


def _digest(proven: Source | None, row: Mapping[str, Any], embedder: Embedder, chunking: Strategy) -> str:
    """The digest that the source would have now, so that ingesting it again has nothing to do; where its exact form
    is not known, one that no source has, so that it is read again and then keeps all chunks that are the same.
    """
    if proven is not None:
        return digest_of(proven, embedder, chunking=chunking)
    return store.sha256("reindexed", row["source_hash"])
