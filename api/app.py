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
    Member,
    MemberBody,
    MembersAnswer,
    Owner,
    Problem,
    QueryAnswer,
    QueryBody,
    asker_of,
    strict_route,
)
from api.errors import add_handlers
from api.identity import Caller, Door
from rag import share, store
from rag.answer import RAGService
from rag.database import Database
from rag.errors import RAGServiceError
from rag.exchange import ChatMessage, RAGRequest
from rag.ingest import Source, ingest
from rag.keys import Action
from rag.principal import Principal, check_user_id
from rag.settings import Settings

log = structlog.get_logger(__name__)

CREDENTIALS = "A token of your identity provider, a service key, or the token that `rag serve` prints"
# Text as JSON grows: every quote and line feed takes two bytes, a control character six.
JSON_GROWTH = 2
MEMBER = "/projects/{project_id}/members/{member_user_id}"
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
            async with door.opened(database), RAGService(settings, database) as service:
                await service.generator.check()
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
        dependencies=[Depends(HTTPBearer(auto_error=False, description=CREDENTIALS))],
    )

    async def admit(
        request: Request,
        action: Action,
        named: QueryBody | IngestBody | Asker,
        *,
        tags: list[str] | None,
    ) -> tuple[Caller, Principal]:
        """The caller and whom it speaks for, once that is permitted and recorded."""
        caller: Caller = request.state.caller
        caller.check_action(action)
        principal = caller.principal(
            tenant_id=named.tenant_id, user_id=named.user_id, project_id=named.project_id, tags=tags
        )
        await caller.record(database, principal, action)
        return caller, principal

    @router.post("/query", summary="Answer a question, or return its passages")
    async def query(request: Request, body: QueryBody) -> QueryAnswer:
        _, principal = await admit(request, "query", body, tags=body.user_tags)
        question = RAGRequest(
            query=body.query,
            chat_history=[ChatMessage(role=one.role, content=one.content) for one in body.chat_history or []],
            model=body.model,
            max_context_chunks=body.top_k,
            max_context_tokens=body.max_tokens,
            scope=body.scope,
            document_ids=body.document_ids,
            min_similarity=body.min_similarity,
            mode=body.mode,
            fusion=body.fusion,
            filters=None if body.filters is None else body.filters.as_filters(),
            embedding=body.embedding,
            embedding_model=body.embedding_model,
        )
        service: RAGService = request.app.state.service
        if body.generate:
            return QueryAnswer.of(await service.generate(question, principal=principal))
        found = await service.search(question, principal=principal)
        return QueryAnswer.of_passages(found.passages, degraded=found.degraded, retrieval_ms=found.retrieval_ms)

    @router.post("/ingest", status_code=201, summary="Add or replace a document")
    async def ingest_document(request: Request, response: Response, body: IngestBody) -> IngestAnswer:
        tags = body.user_tags
        if tags is None:
            tags = request.state.caller.writing_tags(body.tags)
        caller, principal = await admit(request, "ingest", body, tags=tags)
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
        _, principal = await admit(request, "query", asker, tags=asker.user_tags)
        row = await store.read_document(database, principal, document_id)
        return DocumentAnswer.model_validate({"document_id": row["id"], **row})

    @router.delete("/documents/{document_id}", status_code=204, summary="Delete one document")
    async def delete_document(request: Request, document_id: UUID, asker: Annotated[Asker, Query()]) -> None:
        caller, principal = await admit(request, "delete", asker, tags=asker.user_tags)
        caller.check_scope((await store.read_document(database, principal, document_id))["scope"])
        await store.remove_document(database, principal, document_id, reason="deleted")

    @router.get("/projects/{project_id}/members", summary="List with whom one's own project is shared")
    async def list_members(request: Request, project_id: str, owner: Annotated[Owner, Query()]) -> MembersAnswer:
        _, principal = await admit(request, "query", asker_of(owner, project_id), tags=owner.user_tags)
        found = await share.members(database, principal)
        return MembersAnswer(members=[Member.model_validate(row) for row in found])

    @router.put(MEMBER, status_code=204, summary="Share one's own project, or change what a member may do")
    async def put_member(request: Request, project_id: str, member_user_id: str, body: MemberBody) -> None:
        caller, principal = await admit(request, "ingest", asker_of(body, project_id), tags=body.user_tags)
        caller.check_scope("project")
        member = check_user_id(member_user_id, field="member_user_id")
        await share.share(database, principal, member_user_id=member, may_write=body.may_write)

    @router.delete(MEMBER, status_code=204, summary="End the sharing of one's own project with a user")
    async def remove_member(
        request: Request, project_id: str, member_user_id: str, owner: Annotated[Owner, Query()]
    ) -> None:
        caller, principal = await admit(request, "delete", asker_of(owner, project_id), tags=owner.user_tags)
        caller.check_scope("project")
        member = check_user_id(member_user_id, field="member_user_id")
        await share.unshare(database, principal, member_user_id=member)

    return router


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
        # First, since what follows takes a connection.
        caller = await door.identify(request) if "authorization" in request.headers else None
        try:
            await database.ping()
            reachable = True
        except RAGServiceError:
            reachable = False
        body: dict[str, object] = {"status": "healthy" if reachable else "unhealthy"}
        if caller is not None:
            caller.check_action("query")
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
