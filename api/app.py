"""The HTTP application: what each route does, in a screen or two."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID, uuid4

import structlog
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer

from api.contract import (
    PROBLEM_JSON,
    Asker,
    DocumentAnswer,
    IngestAnswer,
    IngestBody,
    Problem,
    QueryAnswer,
    QueryBody,
    strict_route,
)
from api.errors import add_handlers
from api.identity import Caller, Door
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
# Named here and defined in `_describe`: a `model` would be declared as application/json.
PROBLEM: dict[str, Any] = {"content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
PROBLEMS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 409, 413, 415, 421, 422, 500, 502, 503, 504, 507), PROBLEM
)


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
    _describe(app)
    return app


def _rag(settings: Settings, database: Database, door: Door) -> APIRouter:
    router = APIRouter(
        prefix="/rag",
        tags=["rag"],
        responses=PROBLEMS,
        route_class=strict_route(JSON_GROWTH * settings.rag_max_document_bytes, identify=door.identify),
        # Says so in the description of the API; the route class has the credential checked before this runs.
        dependencies=[Depends(HTTPBearer(auto_error=False, description="The token that `rag serve` prints, or a key"))],
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
            tags=caller.writing_tags(body.tags) if body.user_tags is None else body.user_tags,
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
    async def read_document(request: Request, document_id: UUID, asker: Annotated[Asker, Query()]) -> DocumentAnswer:
        principal = _asserted(door.admit(request, "query"), asker)
        row = await store.read_document(database, principal, document_id)
        return DocumentAnswer.model_validate({"document_id": row["id"], **row})

    @router.delete("/documents/{document_id}", status_code=204, summary="Delete one document")
    async def delete_document(request: Request, document_id: UUID, asker: Annotated[Asker, Query()]) -> None:
        caller = door.admit(request, "delete")
        principal = _asserted(caller, asker)
        caller.check_scope((await store.read_document(database, principal, document_id))["scope"])
        await store.remove_document(database, principal, document_id, reason="deleted")

    return router


def _asserted(caller: Caller, asker: Asker) -> Principal:
    return caller.principal(
        tenant_id=asker.tenant_id, user_id=asker.user_id, project_id=asker.project_id, tags=asker.user_tags
    )


def _probes(database: Database, door: Door) -> APIRouter:
    router = APIRouter(tags=["probes"])

    @router.get("/livez", summary="Whether the process runs")
    async def livez() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/readyz", summary="Whether requests can be answered", responses={503: PROBLEM})
    async def readyz() -> dict[str, str]:
        await database.ping()
        return {"status": "ok"}

    @router.get(
        "/health",
        summary="Health; with a credential also what it rests on",
        responses={401: PROBLEM, 403: PROBLEM, 421: PROBLEM, 503: {"description": "Unhealthy"}},
    )
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


def _describe(app: FastAPI) -> None:
    """Put the shape of errors, which no route returns by itself, into the description of the API."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        return described

    app.openapi = openapi  # type: ignore[method-assign]


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
