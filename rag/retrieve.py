"""Asks the database for the passages that answer a question: one statement, one read-only transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from psycopg.types.json import Jsonb

from rag.database import Database, Session
from rag.errors import ModelNotActive
from rag.exchange import Filters, Fusion, Mode, Narrowing, Passage, Stage, TenantPrompt
from rag.principal import Principal
from rag.settings import Settings
from rag.store import halfvec


async def retrieve(
    question: str,
    vector: Sequence[float] | None,
    *,
    principal: Principal,
    database: Database,
    settings: Settings,
    embedding_model: str,
    min_similarity: float | None,
    model_min_similarity: float,
    top_k: int,
    budget_tokens: int | None,
    scope: Narrowing | None = None,
    document_ids: Sequence[UUID] | None = None,
    include_dropped: bool = False,
    mode: Mode = "hybrid",
    fusion: Fusion = "rank",
    filters: Filters | None = None,
) -> tuple[list[Passage], str, TenantPrompt | None]:
    """The passages that the principal may read, best first, the arms that ran, and what the tenant tells the model.

    Keywords alone without a `vector`.

    `min_similarity` is a cosine; None is what was calibrated for the tenant, and `model_min_similarity` where
    nothing was. With `include_dropped` the candidates that did not make it follow, without rank. The arms are
    `hybrid`, `partial`, `vector` or `keyword`, and `none` where nothing can be read.
    """
    filters = filters or Filters()
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows(
            "search",
            {
                "question": question,
                "embedding": None if vector is None else halfvec(vector),
                "embedding_model": None if vector is None else embedding_model,
                "top_k": top_k,
                "scope": scope,
                "document_ids": None if document_ids is None else list(document_ids),
                "min_similarity": min_similarity,
                "model_min_similarity": model_min_similarity,
                "max_per_document": settings.rag_max_chunks_per_doc,
                "budget_tokens": budget_tokens,
                "duplicate_threshold": settings.rag_chunk_overlap_threshold,
                "duplicate_candidates": settings.rag_dedup_candidates_cap,
                "include_dropped": include_dropped,
                "arms": mode,
                "fusion": fusion,
                "only_verified": filters.verified_only,
                "only_domains": _listed(filters.domains),
                "only_doc_types": _listed(filters.doc_types),
                "only_source_types": _listed(filters.source_types),
                "only_languages": _listed(filters.languages),
                "only_tags": _listed(filters.tags),
                "updated_from": filters.updated_from,
                "updated_before": filters.updated_before,
                "only_metadata": None if filters.metadata is None else Jsonb(dict(filters.metadata)),
                "feedback_boost": settings.rag_feedback_boost,
            },
        )
        if rows:
            if vector is not None and rows[0]["mode"] in ("keyword", "partial"):
                await _check_active(session, embedding_model)
            return [_passage(row) for row in rows], rows[0]["mode"], _tenant_prompt(rows[0])
        empty = await session.row(
            "search_mode",
            {
                "embedding_model": None if vector is None else embedding_model,
                "scope": scope,
                "document_ids": None if document_ids is None else list(document_ids),
            },
        )
        assert empty is not None
        if vector is not None:
            await _check_active(session, embedding_model)
        return [], empty["mode"], None


async def explain(
    question: str,
    vector: Sequence[float] | None,
    *,
    document_id: UUID,
    chunk_index: int | None,
    principal: Principal,
    database: Database,
    settings: Settings,
    embedding_model: str,
    min_similarity: float | None,
    model_min_similarity: float,
    top_k: int,
    budget_tokens: int | None,
    scope: Narrowing | None = None,
    mode: Mode = "hybrid",
    fusion: Fusion = "rank",
) -> list[Stage]:
    """Why a chunk, or the best one of a document, is among the passages of `retrieve` or not, stage by stage.

    Empty for a document that the principal may not read, as for one that does not exist.
    """
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows(
            "explain",
            {
                "question": question,
                "document_id": document_id,
                "chunk_index": chunk_index,
                "embedding": None if vector is None else halfvec(vector),
                "embedding_model": None if vector is None else embedding_model,
                "top_k": top_k,
                "scope": scope,
                "min_similarity": min_similarity,
                "model_min_similarity": model_min_similarity,
                "max_per_document": settings.rag_max_chunks_per_doc,
                "budget_tokens": budget_tokens,
                "duplicate_threshold": settings.rag_chunk_overlap_threshold,
                "duplicate_candidates": settings.rag_dedup_candidates_cap,
                "arms": mode,
                "fusion": fusion,
                "feedback_boost": settings.rag_feedback_boost,
            },
        )
        if vector is not None:
            await _check_active(session, embedding_model)
    return [Stage(**row) for row in rows]


async def _check_active(session: Session, embedding_model: str) -> None:
    """Raise ModelNotActive where the vectors are another model's by now, of which this one's was compared with none.

    In a statement of its own: the search may have waited for the models to change places, and then sees the columns of
    after that with the rows of before. It compares vectors of equal models alone, but might find none.
    """
    row = await session.row("active_model", {})
    assert row is not None
    if row["model_id"] not in (None, embedding_model):
        raise ModelNotActive()


def _listed(values: Sequence[str] | None) -> list[str] | None:
    return None if values is None else list(values)


def _tenant_prompt(row: dict[str, Any]) -> TenantPrompt | None:
    if row["tenant_prompt"] is None:
        return None
    return TenantPrompt(
        prompt=row["tenant_prompt"],
        replaces=row["tenant_prompt_replaces"],
        generation=row["tenant_prompt_generation"],
    )


def _passage(row: dict[str, Any]) -> Passage:
    return Passage(
        rank=row["rank"],
        document_id=row["document_id"],
        chunk_index=row["chunk_index"],
        document_name=row["title"],
        source_type=row["source_type"],
        source_uri=row["source_uri"],
        section=row["section"],
        page_number=row["page_number"],
        language=row["language"],
        scope=row["document_scope"],
        tags=tuple(row["tags"]),
        verified=row["verified"],
        content_updated_at=row["content_updated_at"],
        text=row["chunk_text"],
        score=row["score"],
        keyword_rank=row["keyword_rank"],
        keyword_score=row["keyword_score"],
        keyword_share=row["keyword_share"],
        vector_rank=row["vector_rank"],
        cosine=row["cosine"],
        token_count=row["token_count"],
        tokens_total=row["tokens_total"],
        reason=row["reason"],
        duplicate_of=row["duplicate_of"],
        mode=row["mode"],
        recall=row["recall"],
    )
