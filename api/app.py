"""The HTTP application: what each route does, in a screen or two."""

from __future__ import annotations

import importlib.metadata
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any
from uuid import UUID, uuid4

import structlog
from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi.sse import EventSourceResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.contract import (
    PROBLEM_JSON,
    Asker,
    CitationsAnswer,
    CitationsBody,
    CitationStateOut,
    ConversationAnswer,
    ConversationAsker,
    DocumentAnswer,
    EnrichAnswer,
    EnrichBody,
    FeedbackBody,
    IngestAnswer,
    IngestBody,
    InvalidateAnswer,
    InvalidateBody,
    JobAnswer,
    Member,
    MemberBody,
    MembersAnswer,
    MessageAnswer,
    MessageBody,
    Owner,
    Problem,
    QueryAnswer,
    QueryBody,
    QuestionBody,
    ReinstateAnswer,
    ReinstateBody,
    SkillAnswer,
    SkillBody,
    asker_of,
    strict_route,
)
from api.errors import add_handlers
from api.identity import Caller, Door
from api.tell import tell
from api.webhook import webhook
from rag import converse, jobs, share, store
from rag.answer import RAGService
from rag.database import Database
from rag.errors import InvalidInput, RAGServiceError
from rag.ingest import Source
from rag.intake import Intake
from rag.invalidate import invalidate, reinstate
from rag.jobs import Job
from rag.keys import Action
from rag.limits import Kind, Rate, take_token
from rag.principal import Principal, check_user_id
from rag.recheck import CitedSource
from rag.settings import Settings
from rag.tokens import open_counter

log = structlog.get_logger(__name__)

CREDENTIALS = "A token of your identity provider, a service key, or the token that `rag serve` prints"
# Text as JSON grows: every quote and line feed takes two bytes, a control character six.
JSON_GROWTH = 2
MEMBER = "/projects/{project_id}/members/{member_user_id}"
SUFFIX = {"markdown": ".md", "text": ".txt", "yaml": ".yaml"}
# Named here and defined in `_describe`: a `model` would be declared as application/json.
PROBLEM: dict[str, Any] = {"content": {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
PROBLEMS: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 409, 413, 415, 421, 422, 429, 500, 502, 503, 504, 507), PROBLEM
)

STREAMED: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}


def create_app(settings: Settings, *, database: Database, door: Door) -> FastAPI:
    """The application on an unopened `database`; starting it up refuses a barrier that would not hold."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with database:
            for warning in await database.check_barrier(
                dimensions=settings.embedding_widths, strict=settings.rag_strict
            ):
                log.warning("startup_check", finding=warning)
            async with door.opened(database), RAGService(settings, database) as service:
                await service.generator.check()
                await service.notice_model()
                app.state.service = service
                yield

    app = FastAPI(
        title="Palisade",
        summary="Documents go in, cited answers come out, and the database decides who may retrieve what.",
        version=importlib.metadata.version("palisade-rag"),
        lifespan=lifespan,
    )
    app.add_middleware(_Observed)
    add_handlers(app)
    app.include_router(_probes(database, door))
    app.include_router(_rag(settings, database, door))
    if settings.rag_webhook_secrets is not None:
        app.include_router(webhook(settings, database, problems=PROBLEMS))
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

    # For the thresholds of conversations, where an estimate is enough.
    counter = open_counter()

    async def admit(
        request: Request,
        action: Action,
        named: QuestionBody
        | EnrichBody
        | IngestBody
        | MessageBody
        | FeedbackBody
        | CitationsBody
        | InvalidateBody
        | ReinstateBody
        | Asker,
        *,
        tags: list[str] | None,
        kind: Kind | None = None,
    ) -> tuple[Caller, Principal]:
        """The caller and whom it speaks for, once that is permitted and recorded; `kind` of what has a rate."""
        caller: Caller = request.state.caller
        caller.check_action(action)
        principal = caller.principal(
            tenant_id=named.tenant_id, user_id=named.user_id, project_id=named.project_id, tags=tags
        )
        if kind is not None:
            # Before the record, so that a flood of refused requests writes nothing.
            request.state.rate = await take_token(database, principal, kind)
        await caller.record(database, principal, action)
        return caller, principal

    @router.post(
        "/query", summary="Answer a question, or return its passages", response_model=QueryAnswer, responses=STREAMED
    )
    async def query(request: Request, body: QueryBody) -> QueryAnswer | EventSourceResponse:
        if body.stream and not body.generate:
            raise InvalidInput("passages alone are not streamed", field="stream")
        _, principal = await admit(request, "query", body, tags=body.user_tags, kind="query")
        question = body.as_request()
        service: RAGService = request.app.state.service
        if body.stream:
            return await tell(request, service.stream(question, principal=principal))
        if body.generate:
            return QueryAnswer.of(await service.generate(question, principal=principal))
        found = await service.search(question, principal=principal)
        return QueryAnswer.of_found(found)

    @router.post("/feedback", status_code=204, summary="Say what an answer or a source of it was good for")
    async def feedback(request: Request, body: FeedbackBody) -> None:
        _, principal = await admit(request, "query", body, tags=body.user_tags)
        service: RAGService = request.app.state.service
        await service.feedback(
            str(body.query_id),
            principal=principal,
            source_id=body.source_id,
            rating=body.rating,
            clicked=body.clicked,
        )

    @router.post("/citations/check", summary="Whether the sources of stored messages still say what they said")
    async def check_citations(request: Request, body: CitationsBody) -> CitationsAnswer:
        _, principal = await admit(request, "query", body, tags=body.user_tags)
        service: RAGService = request.app.state.service
        cited = [CitedSource(source_id=one.source_id, cited_at=one.cited_at) for one in body.citations]
        states = await service.recheck(cited, principal=principal)
        return CitationsAnswer(citations=[CitationStateOut.model_validate(one, from_attributes=True) for one in states])

    @router.post("/enrich", summary="Context for a message, with its sources, beside the message and not in its place")
    async def enrich(request: Request, body: EnrichBody) -> EnrichAnswer:
        _, principal = await admit(request, "query", body, tags=body.user_tags, kind="query")
        service: RAGService = request.app.state.service
        return EnrichAnswer.of(await service.enrich(body.as_request(), principal=principal))

    @router.post("/skill", summary="Fill in a form from the documents: JSON by a schema of your own")
    async def skill(request: Request, body: SkillBody) -> SkillAnswer:
        _, principal = await admit(request, "query", body, tags=body.user_tags, kind="query")
        service: RAGService = request.app.state.service
        filled = await service.skill(body.as_request(), schema=body.output_schema, principal=principal)
        return SkillAnswer.of(filled)

    @router.post(
        "/ingest",
        status_code=201,
        summary="Add or replace a document",
        description=(
            "A large document, or one with `Prefer: respond-async`, is answered with 202, and `Location` says where "
            "its job tells what became of it. The same `Idempotency-Key` with the same body gets the same answer for "
            "24 hours."
        ),
        response_model=IngestAnswer | JobAnswer,
        responses={200: {"model": IngestAnswer}, 202: {"model": JobAnswer}, 429: PROBLEM},
    )
    async def ingest_document(
        request: Request,
        response: Response,
        body: IngestBody,
        prefer: Annotated[str | None, Header()] = None,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> IngestAnswer | JobAnswer:
        tags = body.user_tags
        if tags is None:
            tags = request.state.caller.writing_tags(body.tags)
        caller, principal = await admit(request, "ingest", body, tags=tags, kind="ingest")
        service: RAGService = request.app.state.service
        intake = Intake(
            database=database,
            settings=settings,
            principal=principal,
            destination=caller.destination(principal, scope=body.scope, tags=body.tags),
            source=_source(body),
            idempotency_key=idempotency_key,
        )
        asked = {word.split(";")[0].strip().lower() for word in (prefer or "").split(",")}
        later = "respond-async" in asked or intake.is_large
        taken = await (intake.later() if later else service.with_active_model(intake.now))
        if isinstance(taken, Job):
            response.status_code = 202
            answer = JobAnswer.of(taken)
            response.headers["Location"] = answer.status_url
            if "respond-async" in asked:
                response.headers["Preference-Applied"] = "respond-async"
            return answer
        if taken.status != "created":
            response.status_code = 200
        return IngestAnswer.of(taken)

    @router.post(
        "/conversations/{thread_id}/messages",
        status_code=201,
        summary="Add a message to a conversation of one's own",
        description=(
            "Messages are kept and never searched. Once enough of them have gathered a job sums them up, and the "
            "summary is a document of the user, or of the project that is named. The same `Idempotency-Key` with the "
            "same message adds nothing."
        ),
        responses={200: {"model": MessageAnswer}, 429: PROBLEM},
    )
    async def post_message(
        request: Request,
        response: Response,
        thread_id: str,
        body: MessageBody,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> MessageAnswer:
        tags = body.user_tags
        if tags is None:
            tags = request.state.caller.writing_tags(None)
        caller, principal = await admit(request, "ingest", body, tags=tags, kind="ingest")
        posted = await converse.post(
            converse.Said(thread_id=thread_id, role=body.role, content=body.content, idempotency_key=idempotency_key),
            principal=principal,
            destination=caller.destination(principal, scope=None, tags=None),
            database=database,
            settings=settings,
            count=counter.count,
        )
        if posted.repeated:
            response.status_code = 200
        return MessageAnswer.of(posted)

    @router.get("/conversations/{thread_id}", summary="Read a conversation of one's own, with its summaries")
    async def read_conversation(
        request: Request, thread_id: str, asker: Annotated[ConversationAsker, Query()]
    ) -> ConversationAnswer:
        _, principal = await admit(request, "query", asker, tags=asker.user_tags)
        found = await converse.read(database, principal, thread_id, after=asker.after, limit=asker.limit)
        return ConversationAnswer.of(found)

    @router.get("/jobs/{job_id}", summary="What became of a document that was taken in later")
    async def read_job(request: Request, job_id: UUID, asker: Annotated[Asker, Query()]) -> JobAnswer:
        _, principal = await admit(request, "ingest", asker, tags=asker.user_tags)
        return JobAnswer.of(await jobs.find(database, principal, job_id))

    @router.delete("/jobs/{job_id}", status_code=204, summary="Cancel a job that has not ended")
    async def cancel_job(request: Request, job_id: UUID, asker: Annotated[Asker, Query()]) -> None:
        _, principal = await admit(request, "ingest", asker, tags=asker.user_tags)
        await jobs.cancel(database, principal, job_id)

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

    @router.post("/invalidate", summary="Remove what must not be found any more, and keep it out")
    async def invalidate_documents(request: Request, body: InvalidateBody) -> InvalidateAnswer:
        caller, principal = await admit(request, "delete", body, tags=body.user_tags)
        destination = None if body.scope is None else caller.destination(principal, scope=body.scope, tags=None)
        done = await invalidate(
            body.targets(),
            reason=body.reason,
            principal=principal,
            database=database,
            cascade_id=body.cascade_id,
            cascades=body.cascade,
            destination=destination,
            scopes=caller.scopes(body.scope),
        )
        return InvalidateAnswer.of(done)

    @router.post("/reinstate", summary="Let what was invalidated be ingested again")
    async def reinstate_sources(request: Request, body: ReinstateBody) -> ReinstateAnswer:
        caller, principal = await admit(request, "delete", body, tags=body.user_tags)
        opened = await reinstate(
            body.targets(),
            reason=body.reason,
            principal=principal,
            database=database,
            scopes=caller.scopes(body.scope),
        )
        return ReinstateAnswer(reinstated=opened)

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
            if reachable:
                body["jobs"] = jobs.described(await jobs.depth(database))
        return JSONResponse(body, status_code=200 if reachable else 503)

    return router


def _name(body: IngestBody) -> str:
    """A file name that tells the format: the caller's word, else the source's own suffix."""
    return body.source_id + (SUFFIX[body.format] if body.format else "")


def _source(body: IngestBody) -> Source:
    return Source(
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
        generation=body.generation,
    )


def _describe(app: FastAPI) -> None:
    """Put the shape of errors, which no route returns by itself, into the description of the API."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        described = generate()
        described["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        return described

    app.openapi = openapi  # type: ignore[method-assign]


class _Observed:
    """One log line and one request id for each request; never a body, a query string or a credential."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["request_id"] = request_id = str(uuid4())
        started = time.perf_counter()
        status = 0

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = request_id
                headers["Cache-Control"] = "no-store"
                rate: Rate | None = state.get("rate")
                if rate is not None:
                    # draft-ietf-httpapi-ratelimit-headers-10: so many in 60 seconds; so many left, and when the next.
                    headers["RateLimit-Policy"] = f'"{rate.kind}";q={rate.per_minute};w=60'
                    wait = f";t={math.ceil(rate.wait_s)}" if rate.wait_s else ""
                    headers["RateLimit"] = f'"{rate.kind}";r={rate.left}{wait}'
            await send(message)

        await self._app(scope, receive, observed)
        # How an answer came to its end that was streamed: done, error, or hung_up.
        ended = {"ended": state["ended"]} if "ended" in state else {}
        log.info(
            "request",
            request_id=request_id,
            method=scope["method"],
            route=getattr(scope.get("route"), "path", "unmatched"),
            status=status,
            ms=round((time.perf_counter() - started) * 1000, 1),
            **ended,
        )
