"""A small world written by hand: thirteen access classes of two tenants, a row of each in every table, and
what each of a dozen principals can reach in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from rag.principal import Principal
from tests.conftest import begin, unit_vector

# access_id: tenant, scope, owner, project, tags
CLASSES: Mapping[int, tuple[str, str, int | None, str | None, tuple[str, ...]]] = {
    1: ("t1", "public", None, None, ("public",)),
    2: ("t1", "public", None, None, ("hr",)),
    3: ("t1", "user", 1, None, ("public",)),
    4: ("t1", "user", 1, None, ("hr",)),
    5: ("t1", "user", 2, None, ("public",)),
    6: ("t1", "project", 1, "alpha", ("public",)),
    7: ("t1", "project", 1, "beta", ("public",)),
    8: ("t1", "project", 2, "alpha", ("public",)),
    9: ("t1", "project", 2, "gamma", ("public",)),  # shared with user 1 for reading
    10: ("t1", "project", 2, "delta", ("public",)),  # shared with user 1 for writing
    11: ("t2", "public", None, None, ("public",)),
    12: ("t2", "user", 1, None, ("public",)),
    13: ("t2", "project", 1, "alpha", ("public",)),
}
WORDS = (
    *("one", "two", "three", "four", "five", "six", "seven"),
    *("eight", "nine", "ten", "eleven", "twelve", "thirteen"),
)
MEMBERS = (("t1", 2, "gamma", 1, False), ("t1", 2, "delta", 1, True))
# id: tenant, user
QUERIES: Mapping[int, tuple[str, int | None]] = {101: ("t1", 1), 102: ("t1", 2), 103: ("t1", None), 104: ("t2", 1)}

CLASS_TABLES = ("rag_access_classes", "rag_documents", "rag_chunks", "rag_tombstones")


@dataclass(frozen=True, kw_only=True)
class Reach:
    """What a principal reads, what it writes as rag_app, and what more as rag_publisher; access_ids."""

    principal: Principal
    reads: frozenset[int]
    writes: frozenset[int] = frozenset()
    publishes: frozenset[int] = frozenset()


def _reach(
    tenant: str,
    user: int | None,
    project: str | None,
    tags: str,
    *,
    reads: set[int],
    writes: set[int],
    publishes: set[int],
) -> Reach:
    return Reach(
        principal=Principal(tenant_id=tenant, user_id=user, project_id=project, tags=tuple(tags.split())),
        reads=frozenset(reads),
        writes=frozenset(writes),
        publishes=frozenset(publishes),
    )


REACHES: Mapping[str, Reach] = {
    "user 1": _reach("t1", 1, None, "public", reads={1, 3}, writes={3}, publishes={1}),
    "user 1, all projects": _reach(
        "t1", 1, "*", "public", reads={1, 3, 6, 7, 9, 10}, writes={3, 6, 7, 10}, publishes={1}
    ),
    "user 1, own project": _reach("t1", 1, "alpha", "public", reads={1, 3, 6}, writes={3, 6}, publishes={1}),
    "user 1, shared for reading": _reach("t1", 1, "gamma", "public", reads={1, 3, 9}, writes={3}, publishes={1}),
    "user 1, shared for writing": _reach("t1", 1, "delta", "public", reads={1, 3, 10}, writes={3, 10}, publishes={1}),
    "user 1, unknown project": _reach("t1", 1, "omega", "public", reads={1, 3}, writes={3}, publishes={1}),
    "user 1, other tag": _reach("t1", 1, "*", "hr", reads={2, 4}, writes={4}, publishes={2}),
    "user 1, both tags": _reach("t1", 1, None, "hr public", reads={1, 2, 3, 4}, writes={3, 4}, publishes={1, 2}),
    "user 1, unknown tag": _reach("t1", 1, "*", "legal", reads=set(), writes=set(), publishes=set()),
    "user 2, all projects": _reach("t1", 2, "*", "public", reads={1, 5, 8, 9, 10}, writes={5, 8, 9, 10}, publishes={1}),
    "user 2, project named as user 1's": _reach(
        "t1", 2, "alpha", "public", reads={1, 5, 8}, writes={5, 8}, publishes={1}
    ),
    "user 3": _reach("t1", 3, "*", "public", reads={1}, writes=set(), publishes={1}),
    "no user": _reach("t1", None, "*", "public", reads={1}, writes=set(), publishes={1}),
    "user 1 of the other tenant": _reach("t2", 1, "*", "public", reads={11, 12, 13}, writes={12, 13}, publishes={11}),
    "unknown tenant": _reach("t3", 1, "*", "public", reads=set(), writes=set(), publishes=set()),
}


def document_id(access_id: int) -> UUID:
    """The one document of a class."""
    return UUID(f"00000000-0000-4000-8000-{access_id:012d}")


def query_id(number: int) -> UUID:
    return UUID(f"00000000-0000-4000-9000-{number:012d}")


def tenant_of(access_id: int) -> str:
    return CLASSES[access_id][0]


def build(connection: psycopg.Connection) -> None:
    """Fill every table, as a superuser: nothing of what is tested takes part."""
    for access_id, (tenant, scope, user, project, tags) in CLASSES.items():
        parameters = {
            "access": access_id,
            "tenant": tenant,
            "scope": scope,
            "user": user,
            "project": project,
            "tags": list(tags),
            "id": document_id(access_id),
            "text": f"palisade record {WORDS[access_id - 1]}",
            "embedding": unit_vector(1.0),
        }
        connection.execute(
            """
            insert into rag.rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest)
            values (%(tenant)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s::text[],
                sha256(convert_to(array_to_json(%(tags)s::text[])::text, 'UTF8')))
            """,
            parameters,
        )
        connection.execute(
            """
            insert into rag.rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type,
                source_id, source_hash, title, body, language)
            values (%(tenant)s, %(id)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s, 'text',
                'the source', 'hash', 'A record', %(text)s, 'en')
            """,
            parameters,
        )
        connection.execute(
            """
            insert into rag.rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash,
                token_count, token_counter, start_offset, end_offset, embedding, embedding_model, tsv,
                lexeme_count, language)
            values (%(tenant)s, %(access)s, %(id)s, 0, %(text)s, 'hash', 3, 'words', 0, length(%(text)s),
                %(embedding)s::rag.halfvec, 'test-model', to_tsvector('english', %(text)s), 3, 'en')
            """,
            parameters,
        )
        connection.execute(
            """
            insert into rag.rag_tombstones (tenant_id, access_id, source_digest, reason)
            values (%(tenant)s, %(access)s, rag.source_digest('text', 'a deleted source'), 'a test')
            """,
            parameters,
        )
    for member in MEMBERS:
        connection.execute("insert into rag.rag_project_members values (%s, %s, %s, %s, %s)", member)
    for number, (tenant, user) in QUERIES.items():
        connection.execute(log_statement("rag_query_logs"), log_row(query_id(number), tenant, user))
        connection.execute(log_statement("rag_query_log_chunks"), log_row(query_id(number), tenant, user))


def log_statement(table: str) -> str:
    """An insert into one of the two log tables; parameters: log_row()."""
    return {
        "rag_query_logs": """
            insert into rag.rag_query_logs (tenant_id, id, user_id, query_hash, query_length, mode, result_count,
                citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)
            values (%(tenant)s, %(id)s, %(user)s, 'hash', 4, 'hybrid', 1, 0, 0, 1.0, 0.0, 1.0)
        """,
        "rag_query_log_chunks": """
            insert into rag.rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index,
                score, cited)
            values (%(tenant)s, %(id)s, %(user)s, %(rank)s, gen_random_uuid(), 0, 0.5, false)
        """,
    }[table]


def log_row(identifier: UUID, tenant: str, user: int | None, *, rank: int = 1) -> dict[str, Any]:
    return {"id": identifier, "tenant": tenant, "user": user or 0, "rank": rank}


@contextmanager
def speaking(connection: psycopg.Connection, principal: Principal) -> Iterator[psycopg.Connection]:
    """A transaction of a principal that leaves nothing behind."""
    with connection.transaction(force_rollback=True):
        begin(connection, principal)
        yield connection


def column(connection: psycopg.Connection, statement: str, parameters: Any = None) -> list[Any]:
    """The first column of the result."""
    return [row[0] for row in connection.execute(statement, parameters)]


def refused_with(connection: psycopg.Connection, statement: str, parameters: Any = None) -> str | None:
    """The SQLSTATE that a statement fails with, None when it does not; undone either way."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(statement, parameters)
    except psycopg.Error as error:
        return error.sqlstate
    return None


def protected_tables(connection: psycopg.Connection) -> list[str]:
    """Every rag_ table that there is."""
    return column(
        connection,
        """
        select relname from pg_class
        where relnamespace = 'rag'::regnamespace and relkind in ('r', 'p') and relname like 'rag\\_%'
        order by relname
        """,
    )
