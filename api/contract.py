"""Bodies of requests and responses, and how a body is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from rag.converse import MAX_PAGE, Conversation, Posted, Role
from rag.embed import MAX_DIMENSIONS
from rag.enrich import Enrichment
from rag.exchange import (
    MAX_FILTER_LENGTH,
    MAX_FILTER_VALUES,
    MAX_HISTORY_MESSAGES,
    MAX_QUESTION_BYTES,
    ChatMessage,
    Filters,
    Found,
    Fusion,
    Mode,
    Narrowing,
    Passage,
    RAGRequest,
    RAGResponse,
    SkipReason,
    check_question,
)
from rag.history import MAX_FACT_LENGTH, MAX_KEY_FACTS, MAX_MESSAGE_LENGTH
from rag.ingest import MAX_GENERATION, Ingested
from rag.invalidate import MAX_CASCADE_ID_LENGTH, MAX_NAMED, MAX_REASON_LENGTH, Invalidated, Targets
from rag.jobs import Job
from rag.recheck import MAX_CITATIONS, State
from rag.scope import MAX_LISTED, MAX_PATH_LENGTH
from rag.skill import SkillResponse
from rag.store import Scope

PROBLEM_JSON = "application/problem+json"

UserId = Annotated[int | str | None, Field(description="A positive whole number, or its decimal string")]
ProjectId = Annotated[str | None, Field(max_length=128, description="A project of the user, or * for all")]
Tags = Annotated[list[str] | None, Field(max_length=256)]


class Body(BaseModel):
    """Strict: no unknown fields, no `"5"` or `true` for 5."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Message(Body):
    """A message of the conversation so far."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_MESSAGE_LENGTH)]


FilterValues = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_FILTER_LENGTH)]] | None,
    Field(min_length=1, max_length=MAX_FILTER_VALUES),
]


class FilterBody(Body):
    """Which documents count; all conditions have to hold."""

    verified_only: bool = False
    domains: FilterValues = None
    doc_types: FilterValues = None
    source_types: FilterValues = None
    languages: FilterValues = None
    tags: FilterValues = None
    updated_from: Annotated[AwareDatetime | None, Field(strict=False)] = None
    updated_before: Annotated[AwareDatetime | None, Field(strict=False)] = None
    metadata: Annotated[
        dict[str, str | int | float | bool] | None,
        Field(max_length=16, description="Values that the metadata must have, of the keys that the service permits"),
    ] = None

    def as_filters(self) -> Filters:
        return Filters(**{name: getattr(self, name) for name in type(self).model_fields})


class QuestionBody(Body):
    """What is asked and where it is searched; identity fields are the asserted principal (specs 001 and 002)."""

    query: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_BYTES)]
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None
    scope: Narrowing | None = None
    document_ids: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_PATH_LENGTH)]] | None,
        Field(
            min_length=1,
            max_length=MAX_LISTED,
            description="With scope documents: ids, or the source_id of each; not both",
        ),
    ] = None
    top_k: Annotated[int | None, Field(ge=1, le=100)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    min_similarity: Annotated[float | None, Field(ge=-1, le=1, allow_inf_nan=False)] = None
    mode: Mode = "hybrid"
    fusion: Fusion = "rank"
    filters: FilterBody | None = None
    embedding: Annotated[
        list[Annotated[float, Field(allow_inf_nan=False)]] | None,
        Field(min_length=1, max_length=MAX_DIMENSIONS, description="The question's own vector, if you have it"),
    ] = None
    embedding_model: Annotated[
        str | None, Field(max_length=256, description="What made it: must be the model of this service")
    ] = None
    chat_history: Annotated[
        list[Message] | None, Field(max_length=MAX_HISTORY_MESSAGES, description="The latest messages, oldest first")
    ] = None
    history_summary: Annotated[
        str | None, Field(max_length=MAX_MESSAGE_LENGTH, description="Of the conversation before them")
    ] = None
    key_facts: Annotated[
        list[Annotated[str, Field(max_length=MAX_FACT_LENGTH)]] | None,
        Field(max_length=MAX_KEY_FACTS, description="What the conversation has established, most important first"),
    ] = None
    domain: Annotated[str | None, Field(max_length=128, description="The key of a domain pack")] = None
    model: Annotated[str | None, Field(max_length=128)] = None

    def as_request(self) -> RAGRequest:
        return RAGRequest(
            query=self.query,
            chat_history=[ChatMessage(role=one.role, content=one.content) for one in self.chat_history or []],
            history_summary=self.history_summary,
            key_facts=self.key_facts,
            domain=self.domain,
            model=self.model,
            max_context_chunks=self.top_k,
            max_context_tokens=self.max_tokens,
            scope=self.scope,
            document_ids=self.document_ids,
            min_similarity=self.min_similarity,
            mode=self.mode,
            fusion=self.fusion,
            filters=None if self.filters is None else self.filters.as_filters(),
            embedding=self.embedding,
            embedding_model=self.embedding_model,
        )


class QueryBody(QuestionBody):
    """A question, to be answered."""

    generate: Annotated[bool, Field(description="false returns the passages alone")] = True
    stream: Annotated[
        bool, Field(description="Answer as text/event-stream while it is written; docs/answers.md has the events")
    ] = False
    direct: Annotated[
        bool,
        Field(description="Answer without documents where a model finds that none is needed, if the service allows it"),
    ] = False

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"query": "How long does a refund take?", "user_id": 7, "project_id": "orion"},
                {
                    "query": "deploy window",
                    "user_id": 7,
                    "scope": "project",
                    "project_id": "orion",
                    "generate": False,
                },
            ]
        }
    )

    def as_request(self) -> RAGRequest:
        return dataclasses.replace(super().as_request(), direct=self.direct)


class EnrichBody(Body):
    """A message that is looked for context (spec 002); identity fields are the asserted principal."""

    message: Annotated[str, Field(min_length=1, max_length=MAX_QUESTION_BYTES)]
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None
    scope: Narrowing | None = None
    top_k: Annotated[int | None, Field(ge=1, le=100)] = None
    max_tokens: Annotated[int | None, Field(ge=1, le=1_000_000)] = None
    min_similarity: Annotated[float | None, Field(ge=-1, le=1, allow_inf_nan=False)] = None
    mode: Mode = "hybrid"
    filters: FilterBody | None = None
    domain: Annotated[str | None, Field(max_length=128, description="The key of a domain pack")] = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"message": "Can you plan my refund?", "user_id": 7, "top_k": 3}]}
    )

    def as_request(self) -> RAGRequest:
        return RAGRequest(
            query=check_question(self.message, field="message"),
            scope=self.scope,
            max_context_chunks=self.top_k,
            max_context_tokens=self.max_tokens,
            min_similarity=self.min_similarity,
            mode=self.mode,
            filters=None if self.filters is None else self.filters.as_filters(),
            domain=self.domain,
        )


class SkillBody(QuestionBody):
    """A question, and the form of its answer."""

    output_schema: Annotated[
        dict[str, Any],
        Field(
            alias="schema", description="A JSON Schema (draft 2020-12) with type object; docs/answers.md has its limits"
        ),
    ]

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "query": "Which refund rules are there?",
                    "user_id": 7,
                    "schema": {
                        "type": "object",
                        "properties": {
                            "days": {"type": ["integer", "null"]},
                            "conditions": {"type": "array", "items": {"type": "string"}},
                        },
                        "required": ["days", "conditions"],
                    },
                }
            ]
        }
    )


class IngestBody(Body):
    """A document as text. Its owner is the asserted principal."""

    source_id: Annotated[str, Field(min_length=1, max_length=512)]
    content: str
    source_type: Annotated[str | None, Field(max_length=64)] = None
    format: Literal["markdown", "text", "yaml"] | None = None
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None
    scope: Scope | None = None
    tags: Tags = None
    title: Annotated[str | None, Field(max_length=512)] = None
    language: Annotated[str | None, Field(pattern=r"^[a-z]{2}$")] = None
    source_uri: Annotated[str | None, Field(max_length=2048)] = None
    source_updated_at: Annotated[datetime | None, Field(strict=False)] = None
    domain: Annotated[str | None, Field(max_length=128)] = None
    doc_type: Annotated[str | None, Field(max_length=128)] = None
    provenance_id: Annotated[str | None, Field(max_length=256)] = None
    task_id: Annotated[str | None, Field(max_length=256)] = None
    verified: bool = False
    metadata: dict[str, Any] = Field(default_factory=dict)
    generation: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_GENERATION,
            description="Above that of an invalidation: newer content, which goes in although the source is closed",
        ),
    ] = None

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "source_id": "handbook/refunds.md",
                    "content": "# Refunds\n\nA refund takes five working days.",
                    "user_id": 7,
                    "scope": "user",
                }
            ]
        }
    )


class MessageBody(Body):
    """What was said in a conversation; identity fields are the asserted principal, whose own it is."""

    role: Role
    content: Annotated[str, Field(min_length=1, max_length=MAX_MESSAGE_LENGTH)]
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: Annotated[
        str | None, Field(max_length=128, description="Of the user; a conversation of theirs alone without one")
    ] = None
    user_tags: Tags = None

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"role": "user", "content": "When does the ferry leave?", "user_id": 7}]}
    )


class FeedbackBody(Body):
    """What was made of an answer, or of a source of it; identity fields are the asserted principal."""

    query_id: Annotated[UUID, Field(strict=False, description="Of an answer of one's own")]
    source_id: Annotated[
        str | None, Field(max_length=64, description="Of a passage that the question returned; without, the answer")
    ] = None
    rating: Annotated[int | None, Field(ge=-1, le=1, description="1 good, -1 bad, 0 neither; the last one holds")] = (
        None
    )
    clicked: Annotated[bool, Field(description="Whether it was opened")] = False
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None


class CitedBody(Body):
    """A source as a stored message cites it."""

    source_id: Annotated[str, Field(max_length=64)]
    cited_at: Annotated[AwareDatetime, Field(strict=False, description="When the answer was given")]


class CitationsBody(Body):
    """Sources of stored messages; identity fields are the asserted principal."""

    citations: Annotated[list[CitedBody], Field(min_length=1, max_length=MAX_CITATIONS)]
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None


class Asker(BaseModel):
    """The asserted principal of a request without a body."""

    tenant_id: str | None = None
    user_id: Annotated[str | None, Field(description="A positive whole number")] = None
    project_id: ProjectId = None
    user_tags: Tags = None

    model_config = ConfigDict(extra="forbid")


class ConversationAsker(Asker):
    """The asserted principal of whoever reads a conversation, and which page of it."""

    after: Annotated[int, Field(ge=0, lt=2**63, description="Place in the thread, behind which the page begins")] = 0
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100


class Owner(BaseModel):
    """The asserted principal of a request about a project of theirs, which the path names."""

    tenant_id: str | None = None
    user_id: Annotated[str | None, Field(description="A positive whole number")] = None
    user_tags: Tags = None

    model_config = ConfigDict(extra="forbid")


class MemberBody(Body):
    """What a member may do; identity fields are the asserted principal, who owns the project."""

    tenant_id: str | None = None
    user_id: UserId = None
    user_tags: Tags = None
    may_write: bool = False


def asker_of(owner: Owner | MemberBody, project_id: str) -> Asker:
    """The owner, naming the project that the path names."""
    user_id = None if owner.user_id is None else str(owner.user_id)
    return Asker.model_construct(
        tenant_id=owner.tenant_id, user_id=user_id, project_id=project_id, user_tags=owner.user_tags
    )


class Member(BaseModel):
    """Somebody with whom a project is shared."""

    member_user_id: int
    may_write: bool
    created_at: datetime


class MembersAnswer(BaseModel):
    """With whom a project is shared, by user."""

    members: list[Member]


class IngestAnswer(BaseModel):
    """What became of a source."""

    document_id: UUID
    status: Literal["created", "updated", "moved", "unchanged"]
    chunks: Annotated[int, Field(description="0 when unchanged")]
    embedded: Annotated[int, Field(description="Chunks that the embedding model had to read")]
    tokens: int

    @classmethod
    def of(cls, ingested: Ingested) -> IngestAnswer:
        return cls.model_validate(ingested, from_attributes=True)


class MessageAnswer(BaseModel):
    """What became of a message."""

    message_id: UUID
    number: Annotated[int, Field(description="Its place in the thread, from 1")]
    created_at: datetime
    summary_job: Annotated[str | None, Field(description="Where to ask what became of its summary, once it has one")]

    @classmethod
    def of(cls, posted: Posted) -> MessageAnswer:
        return cls(
            message_id=posted.id,
            number=posted.number,
            created_at=posted.created_at,
            summary_job=None if posted.summary_job is None else f"/rag/jobs/{posted.summary_job}",
        )


class MessageOut(BaseModel):
    """A message as it is stored."""

    message_id: UUID
    number: int
    role: Role
    content: str
    tokens: int
    summarised_at: Annotated[datetime | None, Field(description="When a summary had it; null until then")]
    created_at: datetime


class SummaryOut(BaseModel):
    """A summary, and the document that it is found as."""

    summary_id: UUID
    document_id: UUID
    summary_text: str
    message_ids: Annotated[list[UUID], Field(description="They may have expired since")]
    model: str
    created_at: datetime


class ConversationAnswer(BaseModel):
    """A page of one's own conversation, and its latest summaries, oldest first."""

    thread_id: str
    messages: list[MessageOut]
    summaries: list[SummaryOut]
    next_after: Annotated[int | None, Field(description="after of the next page; null on the last one")]

    @classmethod
    def of(cls, found: Conversation) -> ConversationAnswer:
        return cls(
            thread_id=found.thread_id,
            messages=[
                MessageOut(
                    message_id=message.id,
                    number=message.number,
                    role=message.role,
                    content=message.content,
                    tokens=message.tokens,
                    summarised_at=message.summarised_at,
                    created_at=message.created_at,
                )
                for message in found.messages
            ],
            summaries=[
                SummaryOut(
                    summary_id=summary.id,
                    document_id=summary.document_id,
                    summary_text=summary.summary_text,
                    message_ids=list(summary.message_ids),
                    model=summary.model,
                    created_at=summary.created_at,
                )
                for summary in found.summaries
            ],
            next_after=found.next_after,
        )


class SummarisedAnswer(BaseModel):
    """What a job made of messages; no document where all of them had expired."""

    document_id: UUID | None
    messages: int
    model: str | None


class JobAnswer(BaseModel):
    """A job, and what has become of it."""

    job_id: UUID
    kind: str
    status: Literal["pending", "processing", "succeeded", "failed", "cancelled"]
    reason: Annotated[str | None, Field(description="The code of the last error")]
    detail: str | None
    attempts: int
    created_at: datetime
    started_at: datetime | None
    due_at: Annotated[datetime | None, Field(description="When it is tried again")]
    finished_at: datetime | None
    result: IngestAnswer | SummarisedAnswer | None
    status_url: str

    @classmethod
    def of(cls, job: Job) -> JobAnswer:
        fields = {name: getattr(job, name) for name in cls.model_fields if name not in ("job_id", "status_url")}
        return cls.model_validate({"job_id": job.id, "status_url": f"/rag/jobs/{job.id}", **fields})


class TargetsBody(Body):
    """Documents by id, by the id of their source, or by what they were derived of; at least one."""

    document_ids: Annotated[list[Annotated[UUID, Field(strict=False)]], Field(max_length=MAX_NAMED)] = Field(
        default_factory=list
    )
    source_ids: Annotated[list[Annotated[str, Field(max_length=512)]], Field(max_length=MAX_NAMED)] = Field(
        default_factory=list
    )
    provenance_ids: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=MAX_NAMED)] = Field(
        default_factory=list
    )
    reason: Annotated[str, Field(min_length=1, max_length=MAX_REASON_LENGTH, description="Stays in the record")]
    scope: Annotated[Scope | None, Field(description="Only there; also where a source that is not there is closed")] = (
        None
    )
    tenant_id: str | None = None
    user_id: UserId = None
    project_id: ProjectId = None
    user_tags: Tags = None


class InvalidateBody(TargetsBody):
    """What must not be found any more."""

    cascade_id: Annotated[
        str | None, Field(min_length=1, max_length=MAX_CASCADE_ID_LENGTH, description="Made when left out")
    ] = None
    cascade: Annotated[bool, Field(description="Also whatever names one of them as its provenance, and so on")] = True

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "source_ids": ["art-789", "art-790"],
                    "reason": "upstream_taint",
                    "cascade_id": "cascade-123",
                    "user_id": 7,
                }
            ]
        }
    )

    def targets(self) -> Targets:
        return Targets(document_ids=self.document_ids, source_ids=self.source_ids, provenance_ids=self.provenance_ids)


class ReinstateBody(TargetsBody):
    """What may be ingested again."""

    cascade_ids: Annotated[
        list[Annotated[str, Field(max_length=MAX_CASCADE_ID_LENGTH)]],
        Field(max_length=MAX_NAMED, description="All that was invalidated under one of these"),
    ] = Field(default_factory=list)

    def targets(self) -> Targets:
        return Targets(
            document_ids=self.document_ids,
            source_ids=self.source_ids,
            provenance_ids=self.provenance_ids,
            cascade_ids=self.cascade_ids,
        )


class InvalidateAnswer(BaseModel):
    """What was removed; what is foreign or not there does not count and is not told apart."""

    invalidated: Annotated[int, Field(description="Documents that were removed")]
    chunks_removed: int
    cascade_id: str
    generation: Annotated[int | None, Field(description="An ingest with a higher one goes in again")]
    documents: list[UUID]
    kept: Annotated[list[UUID], Field(description="Meant as well, and not the caller's to remove")]

    @classmethod
    def of(cls, done: Invalidated) -> InvalidateAnswer:
        return cls(
            invalidated=len(done.documents),
            chunks_removed=done.chunks,
            cascade_id=done.cascade_id,
            generation=done.generation,
            documents=done.documents,
            kept=done.kept,
        )


class ReinstateAnswer(BaseModel):
    """How many sources and provenances may be ingested again, each counted in each access class."""

    reinstated: int


class Hit(BaseModel):
    """A passage and why it was chosen; larger scores are better."""

    source_id: str
    document_id: UUID
    chunk_index: int
    document_name: str
    source_type: str
    source_uri: str | None
    section: str | None
    page_number: int | None
    language: str | None
    scope: str
    tags: list[str]
    verified: bool
    text: str
    score: float
    keyword_rank: int | None
    keyword_score: float
    keyword_share: float
    vector_rank: int | None
    cosine: float | None
    token_count: int
    tokens_total: int | None
    reason: str
    recall: str
    rerank_score: float | None

    @classmethod
    def of(cls, passage: Passage) -> Hit:
        return cls.model_validate(passage, from_attributes=True)


class Confidence(BaseModel):
    """How sure the answer is, and what that is made of (spec 001)."""

    overall: Annotated[int, Field(ge=0, le=100)]
    retrieval_score: float
    coverage_score: float
    llm_score: int


class CitationOut(BaseModel):
    """A source that the answer names."""

    model_config = ConfigDict(from_attributes=True)

    source_id: Annotated[str, Field(description="{document_id}:{chunk_index}")]
    document_id: str
    document_name: str
    chunk_index: int
    page_number: int | None
    section: str | None
    relevance_score: float
    snippet: str
    snippet_full: str
    stale: bool


class CitationStateOut(BaseModel):
    """What became of a cited source."""

    source_id: str
    state: Annotated[State, Field(description="gone: deleted, or not the asker's to read")]


class CitationsAnswer(BaseModel):
    """The states of cited sources, in the order in which they were listed."""

    citations: list[CitationStateOut]


class Route(BaseModel):
    """Whom to ask instead."""

    tag: str
    owner_user_id: str | None
    owner_email: str | None
    reason: str
    fallback: bool


class Metrics(BaseModel):
    """How the passages were chosen (spec 004); scores are the reranker's own."""

    candidate_pool_size: int
    returned_count: int
    truncated: Annotated[bool, Field(description="A limit made the pool smaller than wanted")]
    reranked: bool
    reranked_count: int
    model: str | None
    top_score: float | None
    mean_score: float | None
    spread: float | None
    skip_reason: Annotated[SkipReason | None, Field(description="Why the reranker did not run")]
    rerank_ms: float


class QueryAnswer(BaseModel):
    """The RAGResponse of spec 001; with `generate: false` only `hits` and `degraded` say something."""

    answer: str | None
    confidence: Confidence | None
    citations: list[CitationOut]
    action: Literal["CITE", "ROUTE", "DIRECT"] | None
    route_to: Route | None
    model_used: str | None
    context_chunks_used: int
    context_tokens_used: int
    generation_time_ms: float
    grounded: bool
    query_id: str | None
    degraded: list[str]
    hits: list[Hit]
    confidence_metrics: Metrics

    @classmethod
    def of(cls, response: RAGResponse) -> QueryAnswer:
        return cls(
            answer=response.answer,
            confidence=Confidence.model_validate(response.confidence, from_attributes=True),
            citations=[CitationOut.model_validate(one, from_attributes=True) for one in response.citations],
            action=response.action,
            route_to=None
            if response.route_to is None
            else Route.model_validate(response.route_to, from_attributes=True),
            model_used=response.model_used,
            context_chunks_used=response.context_chunks_used,
            context_tokens_used=response.context_tokens_used,
            generation_time_ms=response.generation_time_ms,
            grounded=response.grounded,
            query_id=response.query_id,
            degraded=response.degraded,
            hits=[Hit.of(passage) for passage in response.passages],
            confidence_metrics=Metrics.model_validate(response.confidence_metrics, from_attributes=True),
        )

    @classmethod
    def of_found(cls, found: Found) -> QueryAnswer:
        return cls(
            answer=None,
            confidence=None,
            citations=[],
            action=None,
            route_to=None,
            model_used=None,
            context_chunks_used=len(found.passages),
            context_tokens_used=sum(passage.token_count for passage in found.passages),
            generation_time_ms=found.retrieval_ms,
            grounded=False,
            query_id=None,
            degraded=found.degraded,
            hits=[Hit.of(passage) for passage in found.passages],
            confidence_metrics=Metrics.model_validate(found.metrics, from_attributes=True),
        )


class SourceCitationOut(BaseModel):
    """Where a value was taken from."""

    path: Annotated[str, Field(description="A JSON Pointer into data; / is all of it")]
    source_id: str


class EnrichAnswer(BaseModel):
    """What to put beside the message; the message itself stays as it is."""

    context: Annotated[str, Field(description="Empty when no document has to do with the message")]
    citations: list[CitationOut]
    context_tokens: int
    retrieval_ms: float
    query_id: str
    degraded: list[str]

    @classmethod
    def of(cls, enrichment: Enrichment) -> EnrichAnswer:
        return cls.model_validate(enrichment, from_attributes=True)


class SkillAnswer(BaseModel):
    """A structured answer (spec 004)."""

    found: Annotated[bool, Field(description="false: the sources do not have it, and data is null")]
    data: Annotated[dict[str, Any] | None, Field(description="Fits the schema of the request")]
    source_citations: list[SourceCitationOut]
    confidence: Literal["high", "medium", "low"]
    confidence_score: Confidence
    citations: list[CitationOut]
    action: Literal["CITE", "ROUTE"]
    route_to: Route | None
    model_used: str
    repaired: Annotated[bool, Field(description="The model's first answer did not fit, and its second did")]
    context_chunks_used: int
    context_tokens_used: int
    generation_time_ms: float
    query_id: str
    degraded: list[str]
    hits: list[Hit]
    confidence_metrics: Metrics

    @classmethod
    def of(cls, skill: SkillResponse) -> SkillAnswer:
        whole = QueryAnswer.of(skill.response).model_dump()
        return cls.model_validate(
            {name: whole[name] for name in cls.model_fields.keys() & whole.keys()}
            | {
                "found": skill.found,
                "data": skill.data,
                "source_citations": [{"path": one.path, "source_id": one.source_id} for one in skill.source_citations],
                "confidence": skill.confidence,
                "confidence_score": whole["confidence"],
                "repaired": skill.repaired,
            }
        )


class DocumentAnswer(BaseModel):
    """A document as it is stored."""

    document_id: UUID
    title: str
    scope: str
    user_id: int | None
    project_id: str | None
    tags: list[str]
    source_type: str
    source_id: str
    source_uri: str | None
    language: str | None
    domain: str | None
    doc_type: str | None
    verified: bool
    metadata: dict[str, Any]
    body: str
    chunk_count: int
    created_at: datetime
    updated_at: datetime
    content_updated_at: datetime
    source_updated_at: datetime | None


class Problem(BaseModel):
    """RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str
    errors: list[dict[str, str]]


def strict_route(max_body_bytes: int, *, identify: Callable[[Request], Awaitable[object]]) -> type[APIRoute]:
    """A route that reads bodies of at most so many bytes, and JSON as RFC 8259 has it.

    `identify` raises for a caller that is not known, before anything of the body is read; one that is
    known stands in `request.state.caller`. The library would take UTF-16, NaN, and the last of two equal
    keys.
    """

    class StrictRequest(Request):
        async def body(self) -> bytes:
            if not hasattr(self, "_body"):
                parts = []
                size = 0
                async for part in self.stream():
                    size += len(part)
                    if size > max_body_bytes:
                        raise HTTPException(413, f"The body is larger than {max_body_bytes} bytes")
                    parts.append(part)
                self._body = b"".join(parts)
            return self._body

        async def json(self) -> Any:
            body = await self.body()
            try:
                return json.loads(body.decode("utf-8"), object_pairs_hook=_distinct, parse_constant=_refuse_constant)
            except UnicodeDecodeError as error:
                raise HTTPException(400, "The body is not UTF-8") from error
            except RecursionError as error:
                raise HTTPException(400, "The body is nested too deeply") from error
            except json.JSONDecodeError:
                raise
            except _NotStrict as error:
                raise HTTPException(400, str(error)) from error
            except ValueError as error:
                raise HTTPException(400, "The body has a number with too many digits") from error

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def strictly(request: Request) -> Response:
                request.state.caller = await identify(request)
                if self.body_field is not None and not _is_json(request.headers.get("content-type", "")):
                    raise HTTPException(415, "The body must be application/json")
                length = request.headers.get("content-length", "")
                if length.isdecimal() and int(length[:19]) > max_body_bytes:
                    raise HTTPException(413, f"The body is larger than {max_body_bytes} bytes")
                return await handle(StrictRequest(request.scope, request.receive))

            return strictly

    return StrictRoute


class _NotStrict(ValueError):
    """Python's parser would take it."""


def _is_json(content_type: str) -> bool:
    media_type = content_type.partition(";")[0].strip().lower()
    return media_type == "application/json" or (media_type.startswith("application/") and media_type.endswith("+json"))


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _NotStrict("The body has the same key twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise _NotStrict(f"{name} is not JSON")
