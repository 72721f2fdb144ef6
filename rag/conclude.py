"""Closes every kind of answer in one short transaction: re-check, confidence, route, and the row of the log."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import structlog

from rag import cite, confidence, prompt, route
from rag.database import Database, Session
from rag.exchange import Action, ConfidenceScore, Found, Passage, RAGRequest, RAGResponse, RouteTarget
from rag.generate import EXTRACTIVE
from rag.principal import Principal
from rag.release import released
from rag.settings import Settings
from rag.show import show

log = structlog.get_logger(__name__)

REVOKED = "a source became unavailable while the answer was written, and is no longer cited"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question under way."""

    request: RAGRequest
    principal: Principal
    deadline: float
    """A moment of the event loop's clock; until then the whole answer has to be there."""
    started: float = field(default_factory=time.perf_counter)
    query_id: UUID = field(default_factory=uuid4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was said, and from what."""

    text: str
    """With aliases, as the model wrote it."""
    model: str
    sources: Mapping[str, Passage] = field(default_factory=dict)
    """Alias to passage: what the text may cite."""
    system: str = ""
    """What the model was told of itself: none of it is said."""
    nonce: str | None = None
    """That of the prompt, which is not said either."""
    shown: cite.Resolved | None = None
    """What is shown of the text, where that is known; somebody may have read it already."""
    context_tokens: int = 0
    generation_ms: float = 0.0
    degraded: Sequence[str] = ()
    direct: bool = False
    """Nothing was searched: the model speaks for itself."""

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The context, best first."""
        return tuple(self.sources.values())


async def conclude(
    asked: Asked,
    found: Found,
    written: Written,
    *,
    grade: int,
    database: Database,
    settings: Settings,
    embedding_model: str | None,
) -> RAGResponse:
    """Re-read what is cited under the asker's rights, weigh the answer, and write down that it was given.

    `grade`: how well the sources answer the question, 0 to 100; a refusal counts as 0, whatever is said here.
    `embedding_model`: what embedded the question, None when nothing did.
    """
    resolved = written.shown or show(
        written.text, written.sources, system=written.system, question=asked.request.query, nonce=written.nonce
    )
    if resolved.refused:
        log.warning("citations_refused", query_id=str(asked.query_id), count=resolved.refused)
    degraded = [*found.degraded, *written.degraded]
    passages = written.passages
    async with database.transaction(asked.principal) as session:
        readable = await _readable(session, resolved.cited)
        answer, citations = cite.keep_readable(resolved, readable)
        if len(citations) < len(resolved.cited):
            degraded.append(REVOKED)
            kept = {citation.source_id for citation in citations}
            answer = released(answer, [passage for passage in resolved.cited if passage.source_id in kept])
        refused = prompt.INSUFFICIENT_CONTEXT in answer
        score = confidence.score(answer, passages, llm_score=0 if refused else grade, grounded=bool(citations))
        action, route_to = (
            ("DIRECT", None)
            if written.direct
            else await _route(
                session,
                asked,
                found,
                score,
                grounded=bool(citations),
                graded=written.model != EXTRACTIVE,
                settings=settings,
            )
        )
        response = RAGResponse(
            answer=answer,
            confidence=score,
            citations=citations,
            action=action,
            route_to=route_to,
            model_used=written.model,
            context_chunks_used=len(passages),
            context_tokens_used=written.context_tokens,
            generation_time_ms=(time.perf_counter() - asked.started) * 1000,
            grounded=bool(citations),
            query_id=str(asked.query_id),
            degraded=degraded,
            passages=list(passages),
            confidence_metrics=found.metrics,
        )
        await session.run("log_query", _log_entry(asked, found, written, response, settings, embedding_model))
    return response


async def _route(
    session: Session,
    asked: Asked,
    found: Found,
    score: ConfidenceScore,
    *,
    grounded: bool,
    graded: bool,
    settings: Settings,
) -> tuple[Action, RouteTarget | None]:
    """Where the answer does not stand for itself, somebody should be asked instead."""
    if confidence.suffices(score, grounded=grounded, graded=graded, threshold=settings.rag_confidence_threshold):
        return "CITE", None
    if not found.passages:
        return "ROUTE", route.administrator(settings, route.NOTHING_FOUND)
    why = f"Low confidence: {score.overall}%"
    if grounded and score.overall >= settings.rag_confidence_threshold:
        why = f"Low confidence: {score.llm_score}% that the sources answer the question"
    return "ROUTE", await route.find_target(
        session, found.passages, principal=asked.principal, settings=settings, why=why
    )


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
    asked: Asked,
    found: Found,
    written: Written,
    response: RAGResponse,
    settings: Settings,
    embedding_model: str | None,
) -> dict[str, Any]:
    request, principal = asked.request, asked.principal
    cited = {citation.source_id for citation in response.citations}
    passages = found.passages
    return {
        "tenant_id": principal.tenant_id,
        "id": asked.query_id,
        "user_id": principal.user_id or 0,
        "project_id": principal.project_id,
        "scope": request.scope,
        "query_hash": hashlib.sha256(request.query.encode()).hexdigest(),
        "query_length": len(request.query),
        "query_text": request.query if settings.rag_log_query_text else None,
        "mode": found.mode,
        "embedding_model": embedding_model,
        "model_used": response.model_used,
        "result_count": len(passages),
        "citation_count": len(response.citations),
        "context_tokens": response.context_tokens_used,
        "confidence": response.confidence.overall,
        "action": response.action,
        "route_tag": None if response.route_to is None else response.route_to.tag,
        "route_fallback": None if response.route_to is None else response.route_to.fallback,
        "retrieval_ms": found.retrieval_ms,
        "generation_ms": written.generation_ms,
        "latency_ms": response.generation_time_ms,
        "document_ids": [passage.document_id for passage in passages],
        "chunk_indexes": [passage.chunk_index for passage in passages],
        "scores": [passage.score for passage in passages],
        "cosines": [passage.cosine for passage in passages],
        "cited": [passage.source_id in cited for passage in passages],
    }
