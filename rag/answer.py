"""The query line: embed → search → budget → prompt → generate → cite → re-check → confidence → route.

No model is called while a transaction is open: the search has one, the re-check has another.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any
from uuid import UUID, uuid4

import structlog

from rag import budget, cite, confidence, prompt
from rag.budget import Allocation, Limits
from rag.database import Database, Session
from rag.embed import Embedder, asked_vector, open_embedder
from rag.errors import (
    ContextOverflowError,
    EmbeddingError,
    InvalidInput,
    LLMError,
    PrincipalMismatch,
    TokenBudgetExceededError,
)
from rag.exchange import (
    FUSIONS,
    MAX_HISTORY_MESSAGES,
    MODES,
    NARROWINGS,
    Action,
    ConfidenceScore,
    Passage,
    RAGRequest,
    RAGResponse,
    RouteTarget,
    Stage,
    check_filters,
    check_question,
)
from rag.generate import Draft, Generator, open_generator
from rag.principal import Principal, check_tags
from rag.prompt import Prompt
from rag.retrieve import explain, retrieve
from rag.scope import resolve_scope_ids
from rag.settings import Settings
from rag.tokens import TokenCounter, open_counter

log = structlog.get_logger(__name__)

INSUFFICIENT_CONTEXT = (
    "I don't have enough information in the available documents to answer this question. "
    "Please contact the relevant team for assistance."
)

NO_EMBEDDING = "the question could not be embedded, so only keywords were searched"
OTHER_MODEL = "no document is embedded with the configured model, so only keywords were searched"
SOME_OTHER_MODEL = "some documents are embedded with another model and were found by keywords only"
NO_ROOM = "none of the sources fits into what the prompt may hold"
SHRUNK = "the model's window was smaller than expected, so fewer sources were read"
TRUNCATED = "the model reached its limit, and the answer is cut"
REVOKED = "a source became unavailable while the answer was written, and is no longer cited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search gave. Times in milliseconds."""

    passages: list[Passage]
    dropped: list[Passage]
    mode: str
    degraded: list[str]
    retrieval_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A draft, and the prompt and passages that it was written from."""

    draft: Draft
    prompt: Prompt
    passages: tuple[Passage, ...]
    context_tokens: int
    generation_ms: float
    degraded: list[str]


class RAGService:
    """Answers questions from the documents that the asker may read. Stateless; use it with `async with`.

    Without further arguments it opens what the settings name, and closes it again.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        embedder: Embedder | None = None,
        generator: Generator | None = None,
    ) -> None:
        self.settings = settings
        self.database = database
        self.embedder = embedder or open_embedder(settings)
        self.generator = generator or open_generator(settings)
        # A chat model's own tokenizer is not at hand; its server has the last word, see `_write`.
        self._count = open_counter(TokenCounter(self.embedder.token_counter, self.embedder.count_tokens)).count

    async def __aenter__(self) -> RAGService:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.generator.close()
        await self.embedder.close()

    async def generate(self, request: RAGRequest, *, principal: Principal) -> RAGResponse:
        """Answer a question for a principal.

        Raises InvalidInput, PrincipalMismatch, DocumentNotFound, TokenBudgetExceededError, the LLMError
        and the DatabaseError family. An embedding provider that is down degrades the search to keywords.
        """
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.settings.answer_timeout_seconds
        check_request(request, principal)
        model = await self.generator.choose(request.model)
        found = await self.search(request, principal=principal)
        if found.passages:
            written = await self._write(request, found.passages, model, deadline)
        else:
            written = _nothing_to_quote(model)
        return await self._finish(request, principal, found, written, started)

    async def search(self, request: RAGRequest, *, principal: Principal, include_dropped: bool = False) -> Found:
        """The passages for a question, without an answer; with `include_dropped` those that fell out as well.

        Raises as `generate` does, but for what concerns the model.
        """
        started = time.perf_counter()
        check_request(request, principal)
        if request.filters is not None:
            check_filters(request.filters, metadata_keys=self.settings.rag_metadata_filter_keys)
        document_ids = None
        if request.document_ids is not None:
            document_ids = (await resolve_scope_ids(self.database, [principal], request.document_ids)).document_ids
        vector, degraded = await self._embedded(request)
        passages, mode = await retrieve(
            request.query,
            vector,
            principal=principal,
            database=self.database,
            settings=self.settings,
            embedding_model=self.embedder.model_id,
            min_similarity=self._min_similarity(request),
            model_min_similarity=self.embedder.min_similarity,
            top_k=request.max_context_chunks or self.settings.rag_total_context_chunks,
            budget_tokens=request.max_context_tokens or self.settings.rag_max_context_tokens,
            scope=request.scope,
            document_ids=document_ids,
            include_dropped=include_dropped,
            mode=request.mode,
            fusion=request.fusion,
            filters=request.filters,
        )
        if vector is not None and mode == "keyword":
            degraded.append(OTHER_MODEL)
        elif mode == "partial":
            degraded.append(SOME_OTHER_MODEL)
        return Found(
            passages=[passage for passage in passages if passage.rank is not None],
            dropped=[passage for passage in passages if passage.rank is None],
            mode=mode,
            degraded=degraded,
            retrieval_ms=_ms_since(started),
        )

    async def health_check(self) -> dict[str, Any]:
        """`{"healthy", "model", "latency_ms"}`: whether an answer could be written now, and by what."""
        started = time.perf_counter()
        try:
            model: str | None = await self.generator.choose(None)
        except LLMError:
            model = None
        return {"healthy": model is not None, "model": model, "latency_ms": _ms_since(started)}

    async def explain(
        self, request: RAGRequest, document_id: UUID, chunk_index: int | None = None, *, principal: Principal
    ) -> list[Stage]:
        """Why a chunk, or the best one of a document, is among what `search` returns or not; filters do not count.

        Empty for a document that the principal may not read, as for one that does not exist. Raises as `search`.
        """
        check_request(request, principal)
        vector, _ = await self._embedded(request)
        return await explain(
            request.query,
            vector,
            document_id=document_id,
            chunk_index=chunk_index,
            principal=principal,
            database=self.database,
            settings=self.settings,
            embedding_model=self.embedder.model_id,
            min_similarity=self._min_similarity(request),
            model_min_similarity=self.embedder.min_similarity,
            top_k=request.max_context_chunks or self.settings.rag_total_context_chunks,
            budget_tokens=request.max_context_tokens or self.settings.rag_max_context_tokens,
            scope=request.scope,
            mode=request.mode,
            fusion=request.fusion,
        )

    async def _embedded(self, request: RAGRequest) -> tuple[Sequence[float] | None, list[str]]:
        """The question's vector, and what has to be said when there is none."""
        if request.embedding_model not in (None, self.embedder.model_id):
            raise InvalidInput(f"the documents are embedded with {self.embedder.model_id}", field="embedding_model")
        given = None
        if request.embedding is not None:
            given = asked_vector(request.embedding, width=self.settings.rag_embedding_dimensions)
        if request.mode == "keyword":
            return None, []
        if given is not None:
            return given, []
        try:
            (vector,) = await self.embedder.embed([request.query], purpose="query")
        except EmbeddingError:
            # Without a vector there is nothing that the vectors alone could find.
            if request.mode == "vector":
                raise
            return None, [NO_EMBEDDING]
        return vector, []

    def _min_similarity(self, request: RAGRequest) -> float | None:
        """What somebody said; else None, and it is what was calibrated, or the model's."""
        return self.settings.rag_min_similarity_score if request.min_similarity is None else request.min_similarity

    async def _write(self, request: RAGRequest, passages: Sequence[Passage], model: str, deadline: float) -> Written:
        """Fit, lay out and generate. A server that counts more tokens than we did gets a shorter prompt, once."""
        limits = self.generator.limits(model)
        if request.max_context_tokens is not None:
            limits = dataclasses.replace(limits, context=request.max_context_tokens)
        started = time.perf_counter()
        fitted, laid_out = self._fit(request, passages, limits)
        if not fitted.passages:
            return dataclasses.replace(_nothing_to_quote(model), degraded=[NO_ROOM])
        degraded = []
        try:
            draft = await self.generator.write(laid_out, model=model, deadline=deadline)
        except ContextOverflowError as overflow:
            ours = self._count(laid_out.system) + self._count(laid_out.user)
            try:
                fitted, laid_out = self._fit(request, passages, _shrink(limits, ours, overflow))
            except TokenBudgetExceededError:
                raise overflow from None
            if not fitted.passages:
                raise
            draft = await self.generator.write(laid_out, model=model, deadline=deadline)
            degraded.append(SHRUNK)
        if draft.truncated:
            degraded.append(TRUNCATED)
        return Written(
            draft=draft,
            prompt=laid_out,
            passages=fitted.passages,
            context_tokens=fitted.context_tokens,
            generation_ms=_ms_since(started),
            degraded=degraded,
        )

    def _fit(self, request: RAGRequest, passages: Sequence[Passage], limits: Limits) -> tuple[Allocation, Prompt]:
        fitted = budget.allocate(
            system_prompt=prompt.RAG_SYSTEM_PROMPT,
            question=request.query,
            history=request.chat_history or [],
            passages=passages,
            limits=limits,
            count=self._count,
        )
        return fitted, prompt.build(request.query, fitted.passages, fitted.history)

    async def _finish(
        self, request: RAGRequest, principal: Principal, found: Found, written: Written, started: float
    ) -> RAGResponse:
        """Re-read what is cited under the asker's rights, weigh the answer, and write down that it was given."""
        query_id = uuid4()
        resolved = cite.resolve(written.draft.text, written.prompt.sources)
        if resolved.refused:
            log.warning("citations_refused", query_id=str(query_id), count=resolved.refused)
        degraded = [*found.degraded, *written.degraded]
        async with self.database.transaction(principal) as session:
            readable = await _readable(session, resolved.cited)
            answer, citations = cite.keep_readable(resolved, readable)
            if len(citations) < len(resolved.cited):
                degraded.append(REVOKED)
            refused = prompt.INSUFFICIENT_CONTEXT in answer
            grade = 0 if refused else round(100 * confidence.answerable(written.passages))
            score = confidence.score(answer, written.passages, llm_score=grade, grounded=bool(citations))
            action, route_to = self._route(score, found=bool(found.passages), grounded=bool(citations))
            response = RAGResponse(
                answer=answer,
                confidence=score,
                citations=citations,
                action=action,
                route_to=route_to,
                model_used=written.draft.model,
                context_chunks_used=len(written.passages),
                context_tokens_used=written.context_tokens,
                generation_time_ms=_ms_since(started),
                grounded=bool(citations),
                query_id=str(query_id),
                degraded=degraded,
                passages=list(written.passages),
            )
            await session.run(
                "log_query",
                _log_entry(request, principal, found, written, response, self.settings, self.embedder),
            )
        return response

    def _route(self, score: ConfidenceScore, *, found: bool, grounded: bool) -> tuple[Action, RouteTarget | None]:
        """Below the threshold, or without a citation, somebody should be asked instead."""
        if grounded and score.overall >= self.settings.rag_confidence_threshold:
            return "CITE", None
        reason = f"Low confidence: {score.overall}%" if found else "No relevant documents found"
        target = RouteTarget(
            tag="system",
            owner_user_id=None,
            owner_email=self.settings.rag_admin_email,
            reason=reason,
            fallback=True,
        )
        return "ROUTE", target


def check_request(request: RAGRequest, principal: Principal) -> None:
    """Raise InvalidInput for a malformed request, PrincipalMismatch for one that speaks for somebody else."""
    check_question(request.query)
    if request.tenant_id is not None and request.tenant_id != principal.tenant_id:
        raise PrincipalMismatch(field="tenant_id")
    if request.user_tags is not None and check_tags(request.user_tags, field="user_tags") != principal.tags:
        raise PrincipalMismatch(field="user_tags")
    for name, low, high in (("max_context_chunks", 1, 100), ("max_context_tokens", 1, 1_000_000)):
        value = getattr(request, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high):
            raise InvalidInput(f"{name} must be a whole number from {low} to {high}", field=name)
    if request.min_similarity is not None and not -1 <= request.min_similarity <= 1:
        raise InvalidInput("min_similarity must be from -1 to 1", field="min_similarity")
    if request.scope is not None and request.scope not in NARROWINGS:
        raise InvalidInput(f"scope must be one of {', '.join(NARROWINGS)}", field="scope")
    if request.mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}", field="mode")
    if request.fusion not in FUSIONS:
        raise InvalidInput(f"fusion must be one of {', '.join(FUSIONS)}", field="fusion")
    if (request.embedding is None) != (request.embedding_model is None):
        raise InvalidInput("embedding and embedding_model go together", field="embedding_model")
    if (request.scope == "documents") != (request.document_ids is not None):
        raise InvalidInput("scope documents and document_ids go together", field="document_ids")
    if request.scope == "project" and principal.project_id in (None, "*"):
        raise InvalidInput("scope project needs a project_id", field="project_id")
    if request.scope == "user" and principal.user_id is None:
        raise InvalidInput("scope user needs a user_id", field="user_id")
    history = request.chat_history or []
    if len(history) > MAX_HISTORY_MESSAGES:
        raise InvalidInput(f"at most {MAX_HISTORY_MESSAGES} messages of history", field="chat_history")
    for message in history:
        if message.role not in ("user", "assistant"):
            raise InvalidInput("the role of a message is user or assistant", field="chat_history")


async def _readable(session: Session, cited: Sequence[Passage]) -> dict[tuple[UUID, int], datetime]:
    rows = await session.rows(
        "recheck_citations",
        {
            "document_ids": [passage.document_id for passage in cited],
            "chunk_indexes": [passage.chunk_index for passage in cited],
        },
    )
    return {(row["document_id"], row["chunk_index"]): row["content_updated_at"] for row in rows}


def _log_entry(
    request: RAGRequest,
    principal: Principal,
    found: Found,
    written: Written,
    response: RAGResponse,
    settings: Settings,
    embedder: Embedder,
) -> dict[str, Any]:
    cited = {citation.source_id for citation in response.citations}
    passages = found.passages
    return {
        "tenant_id": principal.tenant_id,
        "id": UUID(response.query_id),
        "user_id": principal.user_id or 0,
        "project_id": principal.project_id,
        "scope": request.scope,
        "query_hash": hashlib.sha256(request.query.encode()).hexdigest(),
        "query_length": len(request.query),
        "query_text": request.query if settings.rag_log_query_text else None,
        "mode": found.mode,
        "embedding_model": None if NO_EMBEDDING in found.degraded else embedder.model_id,
        "model_used": response.model_used,
        "result_count": len(passages),
        "citation_count": len(response.citations),
        "context_tokens": response.context_tokens_used,
        "confidence": response.confidence.overall,
        "action": response.action,
        "retrieval_ms": found.retrieval_ms,
        "generation_ms": written.generation_ms,
        "latency_ms": response.generation_time_ms,
        "document_ids": [passage.document_id for passage in passages],
        "chunk_indexes": [passage.chunk_index for passage in passages],
        "scores": [passage.score for passage in passages],
        "cosines": [passage.cosine for passage in passages],
        "cited": [passage.source_id in cited for passage in passages],
    }


def _nothing_to_quote(model: str) -> Written:
    """Spec 001, "Zero-Context Handling": no model is asked."""
    return Written(
        draft=Draft(text=INSUFFICIENT_CONTEXT, model=model, truncated=False),
        prompt=Prompt(system="", user="", question="", sources={}),
        passages=(),
        context_tokens=0,
        generation_ms=0.0,
        degraded=[],
    )


def _shrink(limits: Limits, ours: int, overflow: ContextOverflowError) -> Limits:
    """Limits under which a prompt fits that we counted as `ours` tokens and its server as too many.

    The window stands for what we may fill by our own count; the server is asked for the same one again.
    """
    theirs, window = overflow.prompt_tokens, overflow.window_tokens
    if window is None and theirs is not None and theirs >= limits.window:
        window = limits.window
    # Without a count, or with a window of the model's own that nobody names: who knows how much fits.
    room = ours // 2
    if theirs is not None and window is not None:
        # Some servers keep the answer's share free, and refuse a prompt that is shorter than the window.
        fits = min(window, limits.window) - limits.response
        if theirs > fits:
            # A tenth of slack: the count of the shorter prompt scales only roughly.
            room = int(0.9 * fits * ours / theirs)
    return dataclasses.replace(limits, window=limits.response + room)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
