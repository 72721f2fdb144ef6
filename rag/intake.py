"""Takes in a document that was sent: at once, or as a job; the same request once, by its idempotency key."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from uuid import UUID

import psycopg

from rag import jobs, store, tasks
from rag.database import Database, Session
from rag.embed import Embedder
from rag.errors import DocumentTooLarge, EmptyDocument, InvalidInput, RAGServiceError
from rag.ingest import Ingested, Source, check_source, ingest, source_type_of
from rag.jobs import Answered, Job, Request, Wanted
from rag.principal import Principal
from rag.settings import Settings
from rag.store import Destination


class _TwinError(RAGServiceError):
    """Another request with this key was done meanwhile."""


@dataclass(frozen=True, kw_only=True)
class Intake:
    """A document, who sends it and where it goes."""

    database: Database
    settings: Settings
    principal: Principal
    destination: Destination
    source: Source
    idempotency_key: str | None = None

    @property
    def is_large(self) -> bool:
        """Whether it takes longer than whoever sends it should wait."""
        return len(self._bytes) > self.settings.rag_ingest_async_bytes

    async def now(self, embedder: Embedder) -> Ingested | Job:
        """Make it searchable, or give the answer that this request got before. Raises like `ingest`."""
        before = await self._before()
        if before is not None:
            return before
        try:
            return await ingest(
                self.source,
                principal=self.principal,
                destination=self.destination,
                database=self.database,
                embedder=embedder,
                max_bytes=self.settings.rag_max_document_bytes,
                chunking=self.settings.rag_chunking,
                also=self._record if self._request is not None else None,
            )
        except _TwinError:
            again = await self._before()
            assert again is not None
            return again

    async def later(self) -> Job:
        """Ask for it to be made searchable. Raises QueueFull, and at once whatever no worker could get past."""
        check_source(self.source)
        if len(self._bytes) > self.settings.rag_max_document_bytes:
            raise DocumentTooLarge(
                f"the document is larger than {self.settings.rag_max_document_bytes} bytes", field="content"
            )
        if not self._text.strip():
            raise EmptyDocument(field="content")
        if "\0" in self._text:
            raise InvalidInput("the text contains a NUL character, which the database cannot store", field="content")
        try:
            async with self.database.transaction(self.principal, publish=self.destination.publishes) as session:
                if self._request is not None and (known := await jobs.answered(session, self._request)) is not None:
                    job_id = known.id
                else:
                    # The earliest refusal: where it may not go, or what is retracted.
                    await store.look(
                        session,
                        self.destination,
                        source_type=source_type_of(self.source),
                        source_id=self.source.source_id,
                        provenance_id=self.source.provenance_id,
                        generation=self.source.generation,
                    )
                    with_twin = self._request
                    try:
                        job_id = await jobs.enqueue(
                            session, self._wanted, max_waiting=self.settings.rag_queue_max_size, request=with_twin
                        )
                    except psycopg.errors.UniqueViolation as error:
                        raise _TwinError() from error
        except _TwinError:
            return await self.later()
        return await self._job(job_id)

    @cached_property
    def _text(self) -> str:
        assert isinstance(self.source.content, str)
        return self.source.content

    @cached_property
    def _bytes(self) -> bytes:
        try:
            return self._text.encode()
        except UnicodeEncodeError as error:
            raise InvalidInput("the text contains a lone surrogate, which is no character", field="content") from error

    @cached_property
    def _wanted(self) -> Wanted:
        return tasks.ingestion(self.source, self.principal, self.destination)

    @cached_property
    def _request(self) -> Request | None:
        if self.idempotency_key is None:
            return None
        return jobs.request_of(
            self.idempotency_key, asdict(self.principal), asdict(self.destination), asdict(self.source)
        )

    async def _before(self) -> Ingested | Job | None:
        if self._request is None:
            return None
        async with self.database.transaction(self.principal) as session:
            known = await jobs.answered(session, self._request)
        return None if known is None else await self._answer(known)

    async def _answer(self, known: Answered) -> Ingested | Job:
        if known.queued or known.result is None:
            return await self._job(known.id)
        return Ingested(**dict(known.result) | {"document_id": UUID(known.result["document_id"])})

    async def _job(self, job_id: UUID) -> Job:
        return await jobs.find(self.database, self.principal, job_id)

    async def _record(self, session: Session, ingested: Ingested) -> None:
        assert self._request is not None
        try:
            await jobs.record(session, self._wanted, self._request, result=tasks.result_of(ingested))
        except psycopg.errors.UniqueViolation as error:
            raise _TwinError() from error
