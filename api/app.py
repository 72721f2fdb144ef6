"""The HTTP application: what each route does, in a screen or two."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import structlog
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from api.contract import (
    DocumentAnswer,
    IngestAnswer,
    IngestBody,
    Problem,
    QueryAnswer,
    QueryBody,
    strict_route,
)
from api.errors import add_handlers
from api.identity import Door
from rag import store
from rag.answer import RAGService
from rag.database import Database
from rag.errors import RAGServiceError
from rag.exchange import ChatMessage, RAGRequest
from rag.ingest import Source, ingest
from rag.principal import Principal
from rag.settings import Settings

log = structlog.get_logger(__name__)

# Text as JSON grows: every quote and line feed takes two bytes, a control character six.
JSON_GROWTH = 2
SUFFIX = {"markdown": ".md", "text": ".txt", "yaml": ".yaml"}
PROBLEMS: dict[int | str, dict[str, object]] = {
    status: {"model": Problem, "content": {"application/problem+json": {}}}
    for status in (400, 401, 403, 404, 409, 413, 415, 422, 502, 503, 504)
}


def create_app(settings: Settings, *, database: Database, door: Door) -> FastAPI:
    """The application on an unopened `database`; starting it up refuses a barrier that would not hold."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with database:
            for warning in await database.check_barrier(
                dimensions=settings.rag_embedding_dimensions, strict=settings.rag_strict
            ):
                log.warning("startup_check", finding=warning)
            async with RAGService(settings, database) as service:
                app.state.service = service
                yield

    app = FastAPI(
        title="Palisade",
        summary="Documents go in, cited answers come out, and the database decides who may retrieve what.",
        version=importlib.metadata.version("palisade-rag"),
        lifespan=lifespan,
    )
    app.middleware("http")(_observe)
    add_handlers(app)
    app.include_router(_probes(database, door))
    app.include_router(_rag(settings, database, door))
    return app


def _rag(settings: Settings, database: Database, door: Door) -> APIRouter:
    router = APIRouter(
        prefix="/rag",
        tags=["rag"],
        responses=PROBLEMS,
        route_class=strict_route(JSON_GROWTH * settings.rag_max_document_bytes),
    )

    @router.post("/query", summary="Answer a question, or return its passages")
    async def query(request: Request, body: QueryBody) -> QueryAnswer:
        caller = door.admit(request, "query")
        principal = caller.principal(
            tenant_id=body.tenant_id, user_id=body.user_id, project_id=body.project_id, tags=body.user_tags
        )
        question = RAGRequest(
            query=body.query,
            chat_history=[ChatMessage(role=one.role, content=one.content) for one in body.chat_history or []],
            model=body.model,
            max_context_chunks=body.top_k,
            max_context_tokens=body.max_tokens,
            scope=body.scope,
            document_ids=body.document_ids,
            min_similarity=body.min_similarity,
        )
        service: RAGService = request.app.state.service
        if body.generate:
            return QueryAnswer.of(await service.generate(question, principal=principal))
        found = await service.search(question, principal=principal)
        return QueryAnswer.of_passages(found.passages, degraded=found.degraded, retrieval_ms=found.retrieval_ms)

    @router.post("/ingest", status_code=201, summary="Add or replace a document")
    async def ingest_document(request: Request, response: Response, body: IngestBody) -> IngestAnswer:
        caller = door.admit(request, "ingest")
        principal = caller.principal(
            tenant_id=body.tenant_id,
            user_id=body.user_id,
            project_id=body.project_id,
            # What one writes one must be able to read: without other words the document's tags are asserted.
            tags=body.tags if body.user_tags is None else body.user_tags,
        )
        service: RAGService = request.app.state.service
        ingested = await ingest(
            Source(
                name=_name(body),
                source_id=body.source_id,
                content=body.content,
                source_type=body.source_type,
                source_uri=body.source_uri,
                source_updated_at=body.source_updated_at,
                title=body.title,
                language=body.language,
                domain=body.domain,
                doc_type=body.doc_type,
                provenance_id=body.provenance_id,
                task_id=body.task_id,
                verified=body.verified,
                metadata=body.metadata,
            ),
            principal=principal,
            destination=caller.destination(principal, scope=body.scope, tags=body.tags),
            database=database,
            embedder=service.embedder,
            max_bytes=settings.rag_max_document_bytes,
        )
        if ingested.status != "created":
            response.status_code = 200
        return IngestAnswer.of(ingested)

    @router.get("/documents/{document_id}", summary="Read one document")
    async def read_document(
        request: Request,
        document_id: UUID,
        tenant_id: str | None = None,
        user_id: str | None = None,
        project_id: str | None = None,
    ) -> DocumentAnswer:
        principal = _asserted(door, request, "query", tenant_id, user_id, project_id)
        row = await store.read_document(database, principal, document_id)
        return DocumentAnswer.model_validate({"document_id": row["id"], **row})

    @router.delete("/documents/{document_id}", status_code=204, summary="Delete one document")
    async def delete_document(
        request: Request,
        document_id: UUID,
        tenant_id: str | None = None,
        user_id: str | None = None,
        project_id: str | None = None,
    ) -> None:
        principal = _asserted(door, request, "delete", tenant_id, user_id, project_id)
        await store.remove_document(database, principal, document_id, reason="deleted")

    return router


def _asserted(
    door: Door,
    request: Request,
    action: str,
    tenant_id: str | None,
    user_id: str | None,
    project_id: str | None,
) -> Principal:
    """The principal of a request without a body: query parameters, `user_tags` any number of times."""
    caller = door.admit(request, "delete" if action == "delete" else "query")
    tags = request.query_params.getlist("user_tags")
    return caller.principal(tenant_id=tenant_id, user_id=user_id, project_id=project_id, tags=tags or None)


def _probes(database: Database, door: Door) -> APIRouter:
    router = APIRouter(tags=["probes"])

    @router.get("/livez", summary="Whether the process runs")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="Whether requests can be answered", responses={503: {"model": Problem}})
    async def readyz() -> dict[str, str]:
        await database.ping()
        return {"status": "ok"}

    @router.get("/health", summary="Health; with a credential also what it rests on")
    async def health(request: Request) -> JSONResponse:
        try:
            await database.ping()
            reachable = True
        except RAGServiceError:
            reachable = False
        body: dict[str, object] = {"status": "healthy" if reachable else "unhealthy"}
        if request.headers.get("authorization") is not None:
            door.admit(request, "query")
            service: RAGService = request.app.state.service
            body |= {
                "database": {"reachable": reachable},
                "generation": await service.health_check(),
                "embedding": {"model": service.embedder.model_id},
            }
        return JSONResponse(body, status_code=200 if reachable else 503)

    return router


def _name(body: IngestBody) -> str:
    """A file name that tells the format: the caller's word, else the source's own suffix."""
    return body.source_id + (SUFFIX[body.format] if body.format else "")


async def _observe(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    """One log line and one request id for each request; never a body, a query string or a credential."""
    request.state.request_id = str(uuid4())
    started = time.perf_counter()
    response = await call_next(request)
    response.headers["X-Request-ID"] = request.state.request_id
    response.headers["Cache-Control"] = "no-store"
    route = request.scope.get("route")
    log.info(
        "request",
        request_id=request.state.request_id,
        method=request.method,
        route=getattr(route, "path", "unmatched"),
        status=response.status_code,
        ms=round((time.perf_counter() - started) * 1000, 1),
    )
    return response
