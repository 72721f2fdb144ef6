"""What EXPLAIN tells of a statement, made comparable; and rows outside of somebody's access to ask it about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from tests.conftest import unit_vector
from tests.sql.world import CLASSES, document_id

# Planning reads the catalog, more of it the first time.
_PLANNING = re.compile(r"Planning:.*", re.DOTALL)
# Of the value that was asked for, and of what was computed from it.
_LITERAL = re.compile(r"'(?:[^']|'')*'")


def told(connection: psycopg.Connection, statement: str, value: str) -> str:
    """The plan of a statement with `{0}` for a literal, as it was carried out, with rows and buffers; or its error.

    Carried out twice: the first time fills caches and sets hint bits.
    """
    query = sql.SQL("explain (analyze, buffers, verbose, timing off, summary off) " + statement).format(value)
    text = ""
    for _ in range(2):
        try:
            with connection.transaction(force_rollback=True):
                text = "\n".join(row[0] for row in connection.execute(query))
        except psycopg.Error as error:
            text = f"{error.sqlstate} {error.diag.message_primary} {error.diag.message_detail} {error.diag.context}"
    text = _LITERAL.sub("'…'", _PLANNING.sub("", text))
    # A number stands there as a literal, and counts of rows and buffers look like one.
    return text if value.isdigit() else text.replace(value, "…")


def tells_apart(connection: psycopg.Connection, statement: str, one: str, other: str) -> bool:
    """Whether the plans for two values differ, three times in a row: once, a count of buffers may by somebody else's
    work."""
    return all(told(connection, statement, one) != told(connection, statement, other) for _ in range(3))


# Every value of a row outside has the first word, and the row inside the second.
OUTSIDE, INSIDE, NOWHERE = "Zanzibar1", "Bordeaux", "Zanzibar2"
USERS = {OUTSIDE: 4711, INSIDE: 4712, NOWHERE: 4713}


def planted(access_id: int) -> UUID:
    return document_id(1000 + access_id)


def plant(connection: psycopg.Connection, access_id: int, word: str) -> None:
    """A document of a class with one chunk, and a word in every column that takes one."""
    tenant, scope, user, project, tags = {
        **CLASSES,
        20: ("t1", "user", USERS[OUTSIDE], None, ("hr", OUTSIDE)),
        21: ("t1", "project", USERS[OUTSIDE], OUTSIDE, ("public",)),
        22: ("t2", "public", None, None, ("public", OUTSIDE)),
        23: ("t1", "project", USERS[INSIDE], "alpha", ("public", INSIDE)),
    }[access_id]
    values = {
        "tenant": tenant,
        "access": access_id,
        "scope": scope,
        "user": user,
        "project": project,
        "tags": sorted(tags),
        "id": planted(access_id),
        "word": word,
        # What is shown of a listed document is not outside.
        "kind": "text" if access_id == 3 else word,
        "metadata": Jsonb({word: word}),
        "vector": unit_vector(1.0),
    }
    if access_id >= 20:
        connection.execute(
            """
            insert into rag.rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest)
            values (%(tenant)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s, sha256(%(word)s::text::bytea))
            """,
            values,
        )
    connection.execute(
        """
        insert into rag.rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type,
            source_id, source_uri, source_hash, title, body, domain, doc_type, provenance_id, task_id, metadata)
        values (%(tenant)s, %(id)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s, %(kind)s, %(word)s,
            %(word)s, %(word)s, %(word)s, %(word)s, %(word)s, %(kind)s, %(word)s, %(word)s, %(metadata)s)
        """,
        values,
    )
    connection.execute(
        """
        insert into rag.rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
            token_counter, start_offset, end_offset, section, embedding, embedding_model, tsv, lexeme_count)
        values (%(tenant)s, %(access)s, %(id)s, 0, %(word)s, %(word)s, 1, %(word)s, 0, 8, %(word)s,
            %(vector)s::rag.halfvec, %(word)s, to_tsvector('simple', %(word)s), 1)
        """,
        values,
    )


# `{0}` is the word.
CONDITIONS: Mapping[str, tuple[str, ...]] = {
    "text": (
        "{column} = {{0}}",
        "{column} <> {{0}}",
        "{column} is not distinct from {{0}}",
        "{column} between {{0}} and {{0}} || '~'",
        "{column} in ({{0}}, 'x')",
        "starts_with({column}, {{0}})",
        "{column} like left({{0}}, 4) || '%'",
        "{column} ilike lower({{0}})",
        "{column} ~ ('^' || {{0}} || '$')",
        "{column} similar to {{0}}",
        "position({{0}} in {column}) > 0",
        "md5({column}) = md5({{0}})",
        "{column}::int = 1",
        "{column}::uuid is not null",
        "cast({column} as date) is null",
        "1 / (case when {column} = {{0}} then 0 else 1 end) = 1",
        "to_tsvector('simple', {column}) @@ to_tsquery('simple', {{0}})",
        "convert_from({column}::bytea, 'SQL_ASCII') = {{0}}",
        "repeat({column}, case when {column} = {{0}} then 2000000000 else 1 end) <> ''",
    ),
    "text[]": (
        "{column} && array[{{0}}]",
        "{column} @> array[{{0}}]",
        "{column} = array[{{0}}]",
        "{{0}} = any({column})",
        "array_position({column}, {{0}}) > 0",
        "{column}[1]::int = 1",
        "array_to_string({column}, ',') like '%' || {{0}} || '%'",
    ),
    "jsonb": (
        "{column} ? {{0}}",
        "{column} @> jsonb_build_object({{0}}, {{0}})",
        "{column} ->> {{0}} = {{0}}",
        "({column} -> {{0}})::int = 1",
        "{column}::text ~ {{0}}",
        "jsonb_path_exists({column}, ('$.' || {{0}})::jsonpath)",
    ),
}


def columns(connection: psycopg.Connection, relation: str) -> list[tuple[str, str]]:
    """Names and types of the columns that a word is asked for in."""
    cursor = connection.execute(f"select * from {relation} limit 0")
    kinds = {25: "text", 1009: "text[]", 3802: "jsonb"}
    return [(entry.name, kinds[entry.type_code]) for entry in cursor.description or () if entry.type_code in kinds]
