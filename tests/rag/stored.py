"""What a database holds, read as its superuser: nothing of what is tested stands between."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

# A document is whole when its chunks are numbered from 0 without a gap, each one the slice of the body that
# its offsets name, and when nothing of the body but white space is outside of them.
HALF_DOCUMENTS = """
    with place as (
        select
            chunk.tenant_id, chunk.access_id, chunk.document_id, chunk.chunk_index, chunk.end_offset,
            chunk.chunk_text = substr(document.body, start_offset + 1, end_offset - start_offset) as is_slice,
            substr(
                document.body,
                1 + coalesce(max(end_offset) over earlier, 0),
                greatest(0, start_offset - coalesce(max(end_offset) over earlier, 0))
            ) as gap
        from rag.rag_chunks as chunk
        join rag.rag_documents as document
            on (document.tenant_id, document.access_id, document.id)
            = (chunk.tenant_id, chunk.access_id, chunk.document_id)
        window earlier as (
            partition by chunk.document_id, chunk.access_id order by chunk_index
            rows between unbounded preceding and 1 preceding
        )
    ),
    measured as (
        select
            document.id, document.source_id,
            count(place.chunk_index) as chunks,
            min(place.chunk_index) as first,
            max(place.chunk_index) as last,
            bool_and(place.is_slice and place.gap !~ '\\S') as covers,
            substr(document.body, max(place.end_offset) + 1) as tail
        from rag.rag_documents as document
        left join place
            on (document.tenant_id, document.access_id, document.id)
            = (place.tenant_id, place.access_id, place.document_id)
        group by document.tenant_id, document.access_id, document.id
    )
    select source_id
    from measured
    where (chunks > 0 and first = 0 and last = chunks - 1 and covers and tail !~ '\\S') is not true
"""

# Everything that an ingest decides; not the ids and times, which no two runs share, nor the embeddings, whose
# last digit depends on what else was in the batch.
CONTENT = """
    select
        document.tenant_id, document.scope, document.project_id, document.tags, document.source_type,
        document.source_id, document.source_uri, document.source_hash, document.source_updated_at,
        document.language, document.title, document.body, document.verified, document.metadata,
        array_agg(
            (chunk_index, chunk_text, chunk_hash, token_count, token_counter, start_offset, end_offset, page_number,
            section, embedding_model, tsv::text, lexeme_count, chunk.language)::text
            order by chunk_index
        ) as chunks
    from rag.rag_documents as document
    join rag.rag_chunks as chunk
        on (chunk.tenant_id, chunk.access_id, chunk.document_id)
        = (document.tenant_id, document.access_id, document.id)
    where document.user_id is not distinct from %s
    group by document.tenant_id, document.access_id, document.id
    order by document.source_id, document.tags
"""

# Where a row stands and who wrote it: equal means that nothing touched it.
VERSIONS = """
    select 'document' as kind, id, xmin::text, ctid::text from rag.rag_documents
    union all
    select 'chunk', id, xmin::text, ctid::text from rag.rag_chunks
    order by 1, 2
"""


LEAST_COSINE = """
    select min(1 - (one.embedding operator(rag.<=>) other.embedding)) as least
    from rag.rag_documents as document
    join rag.rag_documents as twin on (twin.source_type, twin.source_id) = (document.source_type, document.source_id)
    join rag.rag_chunks as one on one.document_id = document.id
    join rag.rag_chunks as other on other.document_id = twin.id and other.chunk_index = one.chunk_index
    where document.user_id = %s and twin.user_id = %s
"""


def rows(url: str, statement: str, parameters: Any = None) -> list[dict[str, Any]]:
    """The rows of a statement; `url` is a superuser's."""
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as connection:
        return connection.execute(statement, parameters).fetchall()


def half_documents(url: str) -> list[str]:
    """The source ids of documents that their chunks do not cover exactly."""
    return [row["source_id"] for row in rows(url, HALF_DOCUMENTS)]


def content(url: str, *, user_id: int | None) -> list[dict[str, Any]]:
    """The documents of one owner with their chunks."""
    return rows(url, CONTENT, (user_id,))


def versions(url: str) -> list[dict[str, Any]]:
    """Which version each row is."""
    return rows(url, VERSIONS)


def least_cosine(url: str, one: int, other: int) -> float:
    """How near the embeddings of two owners' copies of the same sources are, at worst."""
    (row,) = rows(url, LEAST_COSINE, (one, other))
    return float(row["least"])
