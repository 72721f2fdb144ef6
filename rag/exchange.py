"""What a question and its answer consist of; names and fields of spec 001."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, get_args
from uuid import UUID

from rag.errors import InvalidInput

Action = Literal["CITE", "ROUTE", "DIRECT"]
Narrowing = Literal["public", "user", "project", "organization", "documents"]
NARROWINGS: tuple[Narrowing, ...] = ("public", "user", "project", "organization", "documents")

Mode = Literal["hybrid", "vector", "keyword"]
MODES: tuple[Mode, ...] = get_args(Mode)
Fusion = Literal["rank", "score"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)

SkipReason = Literal["disabled", "no_candidates", "timeout", "unavailable", "refused", "invalid_scores"]
SKIP_REASONS: tuple[SkipReason, ...] = get_args(SkipReason)

# Full-text parsing of longer questions costs seconds of server time.
MAX_QUESTION_BYTES = 8 * 1024
MAX_HISTORY_MESSAGES = 200

# Of one list of a filter; more than any form has boxes to tick.
MAX_FILTER_VALUES = 100
MAX_FILTER_LENGTH = 1000

# Spec 001, "Snippet Rules".
SNIPPET_LENGTH = 200
SNIPPET_FULL_LENGTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A message of the conversation so far. Spec 001 also had the role `system`, which let a client speak for us."""

    role: Literal["user", "assistant"]
    content: str
    timestamp: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which documents count, beside who may read them; None for no condition. All of them have to hold."""

    verified_only: bool = False
    domains: Sequence[str] | None = None
    doc_types: Sequence[str] | None = None
    source_types: Sequence[str] | None = None
    languages: Sequence[str] | None = None
    tags: Sequence[str] | None = None
    """Documents with one of them."""
    updated_from: datetime | None = None
    """By the source's own time where it is known, else when the content last changed; inclusive."""
    updated_before: datetime | None = None
    metadata: Mapping[str, str | int | float | bool] | None = None
    """Values that the metadata must have; keys of RAG_METADATA_FILTER_KEYS only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RAGRequest:
    """A question. Identity fields may be left out; when given they must be the principal's.

    `scope` narrows within what the principal sees. None for a limit = the setting.
    """

    query: str
    user_tags: list[str] | None = None
    tenant_id: str | None = None
    chat_history: list[ChatMessage] | None = None
    """The latest messages, oldest first."""
    history_summary: str | None = None
    """Of what came before them, as the caller keeps it."""
    key_facts: list[str] | None = None
    """What the conversation has established, most important first."""
    domain: str | None = None
    """The key of a domain pack; one that is not installed counts as none."""
    model: str | None = None
    max_context_chunks: int | None = None
    max_context_tokens: int | None = None
    scope: Narrowing | None = None
    document_ids: list[UUID] | list[str] | None = None
    """With scope `documents`: ids, or paths (source ids), not both."""
    min_similarity: float | None = None
    mode: Mode = "hybrid"
    """Which arms search: both, the vectors alone, the words alone."""
    fusion: Fusion = "rank"
    """How two arms become one list: weighted reciprocal rank, or weighted scores."""
    filters: Filters | None = None
    embedding: Sequence[float] | None = None
    """The question's vector, when the caller has it: then it is not embedded here."""
    embedding_model: str | None = None
    """The model that made `embedding`: must be the service's own, as vectors of two models do not compare."""
    direct: bool = False
    """Let a model decide whether the question needs documents, and answer without any if not (`rag/direct.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A chunk that the search returned, and why. Scores: larger is better."""

    rank: int | None
    """From 1; None for a candidate that did not make it, see `reason`."""
    document_id: UUID
    chunk_index: int
    document_name: str
    source_type: str
    source_uri: str | None
    section: str | None
    page_number: int | None
    language: str | None
    scope: str
    tags: tuple[str, ...]
    verified: bool
    content_updated_at: datetime
    text: str
    score: float
    """Fusion of both arms; comparable within one result only."""
    keyword_rank: int | None
    keyword_score: float
    """BM25."""
    keyword_share: float
    """BM25 as a fraction of what a chunk could reach for this question, 0 to 1."""
    vector_rank: int | None
    cosine: float | None
    """None when the chunk was embedded by another model."""
    token_count: int
    tokens_total: int | None
    """Tokens of this passage and all before it."""
    reason: str
    duplicate_of: str | None
    mode: str
    recall: str
    rerank_score: float | None = None
    """As the reranker gave it; None where none read the passage."""

    @property
    def source_id(self) -> str:
        """`{document_id}:{chunk_index}`, the SourceId of spec 001."""
        return f"{self.document_id}:{self.chunk_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceMetrics:
    """How the passages of an answer were chosen. Scores are the reranker's own, and None where it did not run."""

    candidate_pool_size: int
    """Passages that the search found for the reranker to choose from."""
    returned_count: int
    truncated: bool
    """The pool was smaller than wanted, because of what the reranker or a request can take."""
    reranked: bool
    reranked_count: int
    """Passages that have a score; when fewer than were returned, the rest are the search's next best."""
    model: str | None
    top_score: float | None
    mean_score: float | None
    spread: float | None
    """Between the best and the worst score that was returned."""
    skip_reason: SkipReason | None
    """Why the reranker did not run; None exactly when it did."""
    rerank_ms: float


NOTHING_SEARCHED = ConfidenceMetrics(
    candidate_pool_size=0,
    returned_count=0,
    truncated=False,
    reranked=False,
    reranked_count=0,
    model=None,
    top_score=None,
    mean_score=None,
    spread=None,
    skip_reason="no_candidates",
    rerank_ms=0.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantPrompt:
    """What a tenant tells the model, as its operator set it."""

    prompt: str
    replaces: bool
    """Whether it stands instead of our introduction, or follows it."""
    generation: int
    """How often it was set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search gave. Times in milliseconds."""

    passages: list[Passage]
    dropped: list[Passage]
    mode: str
    degraded: list[str]
    retrieval_ms: float
    metrics: ConfidenceMetrics = NOTHING_SEARCHED
    tenant_prompt: TenantPrompt | None = None
    """As it was when the search ran; None as well when nothing was found."""
    embedding_model: str | None = None
    """The model that was active when the search ran; None when nothing was searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of the search that a chunk passed, or at which it fell out."""

    stage: str
    passed: bool
    value: float | None
    """In the unit that `detail` names."""
    detail: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """A source that the answer names, re-read under the asker's rights after the answer was written."""

    source_id: str
    document_id: str
    document_name: str
    chunk_index: int
    page_number: int | None
    section: str | None
    relevance_score: float
    """Cosine of question and chunk, or its share of the best possible BM25 where there is no cosine; 0 to 1."""
    snippet: str
    snippet_full: str
    """At most 1,000 characters, for display on demand; never logged."""
    stale: bool = False
    """Whether the document's text changed while the answer was being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceScore:
    """How sure the answer is, 0 to 100, and what that is made of."""

    overall: int
    retrieval_score: float
    coverage_score: float
    llm_score: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteTarget:
    """Whom to ask instead."""

    tag: str
    owner_user_id: str | None
    owner_email: str | None
    reason: str
    fallback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RAGResponse:
    """An answer with its sources. `grounded` is true exactly when there is a citation."""

    answer: str
    confidence: ConfidenceScore
    citations: list[Citation]
    action: Action
    route_to: RouteTarget | None
    model_used: str
    context_chunks_used: int
    context_tokens_used: int
    generation_time_ms: float
    """Milliseconds for the whole request."""
    grounded: bool
    query_id: str
    degraded: list[str] = field(default_factory=list)
    """What this answer had to do without, in words; empty when nothing."""
    passages: list[Passage] = field(default_factory=list)
    """The context, best first, with the scores that put it there."""
    confidence_metrics: ConfidenceMetrics = NOTHING_SEARCHED
    """How the search's passages were chosen (spec 004); always present."""


def check_question(query: str, *, field: str = "query") -> str:
    """Return the question. Raises InvalidInput when it is empty, too long or no text; `field` has it."""
    if not query.strip():
        raise InvalidInput(f"{field} must not be empty", field=field)
    try:
        size = len(query.encode())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"{field} contains a lone surrogate, which is no character", field=field) from error
    if size > MAX_QUESTION_BYTES:
        raise InvalidInput(f"{field} must be at most {MAX_QUESTION_BYTES} bytes", field=field)
    if "\0" in query:
        raise InvalidInput(f"{field} contains a NUL character", field=field)
    return query


def check_filters(filters: Filters, *, metadata_keys: Collection[str]) -> None:
    """Raise InvalidInput for filters that are malformed, or that name metadata outside of `metadata_keys`."""
    for name in ("domains", "doc_types", "source_types", "languages", "tags"):
        values = getattr(filters, name)
        if values is None:
            continue
        if isinstance(values, str) or not 1 <= len(values) <= MAX_FILTER_VALUES:
            raise InvalidInput(f"{name} must be a list of 1 to {MAX_FILTER_VALUES} texts", field=f"filters.{name}")
        for value in values:
            _check_filter_text(value, f"filters.{name}")
    for name, value in (filters.metadata or {}).items():
        if name not in metadata_keys:
            raise InvalidInput(
                "metadata can be filtered by the keys of RAG_METADATA_FILTER_KEYS only", field="filters.metadata"
            )
        if isinstance(value, str):
            _check_filter_text(value, "filters.metadata")
        elif not isinstance(value, (bool, int, float)) or not math.isfinite(value):
            raise InvalidInput("a value of metadata must be a text, a number or a boolean", field="filters.metadata")


def _check_filter_text(value: object, name: str) -> None:
    if not isinstance(value, str) or not 1 <= len(value) <= MAX_FILTER_LENGTH:
        raise InvalidInput(f"a value must be a text of 1 to {MAX_FILTER_LENGTH} characters", field=name)
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise InvalidInput("a value has a character that the database cannot hold", field=name)
