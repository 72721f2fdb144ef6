"""Access classes of many chunks, put into a database by its superuser, and what it has of their indexes."""

from __future__ import annotations

from typing import Any

from tests.conftest import DIMENSIONS, Deployment
from tests.rag.stored import rows

# Chunk n says which one it is, which seventh it belongs to, and what all say.
TEXT = "'palisade number' || n || ' group' || mod(n, 7)"

_CLASS = """
    insert into rag.rag_access_classes (tenant_id, access_id, scope, user_id, tags, tags_digest)
    values (%(tenant)s, %(access)s, 'user', %(access)s, '{public}', sha256('public'))
    on conflict do nothing
"""
_DOCUMENTS = """
    insert into rag.rag_documents (
        tenant_id, access_id, scope, user_id, tags, source_type, source_id, source_hash, title, body
    )
    select %(tenant)s, %(access)s, 'user', %(access)s, '{public}', 'text', 'document ' || n, 'hash', 'A title', 'a body'
    from generate_series(%(first)s::integer, %(last)s) as n
"""
_CHUNKS = f"""
    insert into rag.rag_chunks (
        tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count, token_counter,
        start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count, language
    )
    select
        document.tenant_id, document.access_id, document.id, 0, {TEXT}, 'hash', 3, 'words', 0, 6,
        array_prepend(n::numeric, array_fill(1.0, array[{DIMENSIONS - 1}]))::rag.halfvec, 'test-model', words.tsv,
        rag.lexeme_total(words.tsv), %(language)s
    from generate_series(%(first)s::integer, %(last)s) as n
    join rag.rag_documents as document
        on document.tenant_id = %(tenant)s
        and document.access_id = %(access)s
        and document.source_id = 'document ' || n
    cross join lateral to_tsvector(rag.text_search_config(%(language)s), {TEXT}) as words (tsv)
"""


def grow(deployment: Deployment, access_id: int, to: int, *, tenant: str = "acme", language: str | None = "en") -> None:
    """Give a class so many chunks, each in a document of its own; the class is made when it is not there."""
    with deployment.cluster.superuser(deployment.name) as connection, connection.transaction():
        place: dict[str, Any] = {"tenant": tenant, "access": access_id, "language": language}
        connection.execute(_CLASS, place)
        has = connection.execute(
            "select count(*) from rag.rag_chunks where tenant_id = %(tenant)s and access_id = %(access)s", place
        ).fetchone()[0]
        place |= {"first": has + 1, "last": to}
        connection.execute(_DOCUMENTS, place)
        connection.execute(_CHUNKS, place)


def shrink(deployment: Deployment, access_id: int, to: int) -> None:
    """Remove the newest documents of a class, until it has so many."""
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            "delete from rag.rag_documents where access_id = %s and substr(source_id, 10)::integer > %s",
            (access_id, to),
        )


def indexes(deployment: Deployment) -> dict[str, bool]:
    """Those of single classes by name, and whether they are valid; read from the catalog."""
    found = rows(
        deployment.url("postgres"),
        "select indexrelid::regclass::text as name, indisvalid from pg_index"
        " where indrelid = 'rag.rag_chunks'::regclass and indexrelid::regclass::text ~ '_[0-9]+(_|$)'",
    )
    return {row["name"].removeprefix("rag."): row["indisvalid"] for row in found}


def own(*access_ids: int) -> dict[str, bool]:
    """What `indexes` says of classes that have all of theirs."""
    return {f"rag_chunks_{kind}_{access_id}": True for access_id in access_ids for kind in ("vector", "words")}
