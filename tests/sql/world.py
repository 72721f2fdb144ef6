"""A small world written by hand: thirteen access classes of two tenants, a row of each in every table, and
what each of a dozen principals can reach in it."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from rag.principal import Principal
from rag.resources import query
from tests.conftest import SIGNER, unit_vector

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
MEMBERS = (("t1", 2, "gamma", 1, False), ("t1", 2, "delta", 1, True), ("t2", 1, "alpha", 2, False))
# id: tenant, user, class of the one document that the question got back; each has a twin, 100 further, without any
QUERIES: Mapping[int, tuple[str, int | None, int]] = {
    101: ("t1", 1, 3),
    102: ("t1", 2, 5),
    103: ("t1", None, 1),
    104: ("t2", 1, 12),
}
# login: tenant
ANALYSTS: Mapping[str, str] = {"world_anna": "t1", "world_boris": "t2"}
# key_id: tenant
SERVICE_KEYS: Mapping[str, str] = {"a" * 16: "t1", "b" * 16: "t2"}
# tenant: user who owns the tags hr and legal there
TAG_OWNERS: Mapping[str, int] = {"t1": 2, "t2": 1}

# tenant: documents that it may store
QUOTAS: Mapping[str, int] = {"t1": 1000, "t2": 2000}

CLASS_TABLES = ("rag_access_classes", "rag_documents", "rag_chunks", "rag_tombstones")
# What the service may read, in rows_everywhere().
SERVICE_READS = frozenset(
    (
        *("rag_documents", "rag_chunks"),
        *("v_documents", "v_chunks", "v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"),
        *("v_routed_queries", "v_feedback", "my_feedback()", "my_prompt()"),
        *("my_principal()", "whoami()", "my_classes()", "my_documents()", "my_listed_documents()", "my_chunks()"),
        *("my_queries()", "my_query_chunks()", "my_members()", "my_limits()", "my_synchronisations()"),
    )
)
VARIABLES = ("app.tenant_id", "app.user_id", "app.project_id", "app.tags", "app.signature")


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


def job_id(tenant: str) -> UUID:
    """The one job of a tenant, of its user 1; and the token of its one claim."""
    return UUID(f"00000000-0000-4000-a000-{int(tenant[1:]):012d}")


def said_id(access_id: int) -> UUID:
    """The one message of a class, which was given to a summary of this id as well."""
    return UUID(f"00000000-0000-4000-b000-{access_id:012d}")


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
                source_id, source_hash, source_updated_at, title, body, language)
            values (%(tenant)s, %(id)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s, 'text',
                'the source', 'hash', now() + interval '1 day', 'A record', %(text)s, 'en')
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
        connection.execute(
            """
            insert into rag.rag_synchronisations (tenant_id, access_id, source, files, written, removed, unchanged,
                failed, succeeded_at)
            values (%(tenant)s, %(access)s, 'source-' || %(access)s, 1, 1, 0, 0, 0, now())
            """,
            parameters,
        )
        if user is not None:
            connection.execute(MESSAGE, parameters | {"said": said_id(access_id)})
            connection.execute(SUMMARY, parameters)
    for member in MEMBERS:
        connection.execute("insert into rag.rag_project_members values (%s, %s, %s, %s, %s)", member)
    for number, (tenant, user, access_id) in QUERIES.items():
        row = log_row(query_id(number), tenant, user, document=document_id(access_id))
        for table in ("rag_query_logs", "rag_query_log_chunks", "rag_assertions", "rag_retractions"):
            connection.execute(log_statement(table), row)
        if user is not None:
            connection.execute(FEEDBACK, row | {"access": access_id})
        empty = log_row(query_id(number + 100), tenant, user, results=0)
        connection.execute(log_statement("rag_query_logs"), empty)
    for role, tenant in ANALYSTS.items():
        connection.execute("insert into rag.rag_analysts (tenant_id, role_name) values (%s, %s)", (tenant, role))
    for key_id, tenant in SERVICE_KEYS.items():
        connection.execute(
            """
            insert into rag.rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, expires_at)
            values (%s, %s, 'an agent', sha256('a secret'), '{query}', '{public}', now() + interval '1 day')
            """,
            (tenant, key_id),
        )
    for statement in (
        "insert into rag.rag_class_indexes (tenant_id, access_id, chunks) select tenant_id, access_id, 1",
        "insert into rag.rag_class_languages select tenant_id, access_id, 'en', 1, 3",
        "insert into rag.rag_class_lexemes select tenant_id, access_id, 'en', 'record', 1",
    ):
        connection.execute(f"{statement} from rag.rag_access_classes")
    for tenant, minimum in (("t1", -0.25), ("t2", -0.75)):
        connection.execute(
            """
            insert into rag.rag_calibrations (tenant_id, embedding_model, fusion, language, vector_share,
                min_similarity, questions, ndcg_before, ndcg_after)
            values (%s, 'test-model', 'rank', 'en', 0.4, %s, 100, 0.8, 0.9)
            """,
            (tenant, minimum),
        )
    for tenant, owner in TAG_OWNERS.items():
        for tag in ("hr", "legal"):
            connection.execute(
                "insert into rag.rag_tags (tenant_id, name, owner_user_id, owner_email) values (%s, %s, %s, %s)",
                (tenant, tag, owner, f"{tag}@{tenant}.example"),
            )
        connection.execute(
            "insert into rag.rag_prompts (tenant_id, prompt) values (%s, %s)", (tenant, f"You speak for {tenant}.")
        )
    for tenant, quota in QUOTAS.items():
        connection.execute(
            "insert into rag.rag_limits (tenant_id, queries_per_minute, documents) values (%s, 1000000, %s)",
            (tenant, quota),
        )
        connection.execute("insert into rag.rag_rate_buckets values (%s, 'query', 5, now())", (tenant,))
    connection.execute(
        "insert into rag.rag_usage"
        " select tenant_id, 0, count(*), sum(body_bytes) from rag.rag_documents group by tenant_id"
    )
    for tenant in ("t1", "t2"):
        connection.execute(
            """
            insert into rag.rag_jobs (tenant_id, id, user_id, tags, kind, status, source_type, source_id, payload, body,
                request_key, request_digest, queue_id, lock)
            values (%(tenant)s, %(id)s, 1, '{public}', 'ingest', 'pending', 'text', 'a job''s source', '{}',
                'palisade record waiting', sha256('a key'), sha256('a request'), %(queue)s, 'a lock')
            """,
            {"tenant": tenant, "id": job_id(tenant), "queue": QUEUED[tenant]},
        )
        # Given out by the queue, to a worker that is gone.
        connection.execute(
            "insert into jobs.procrastinate_jobs (id, queue_name, task_name, status)"
            " values (%s, 'rag', 'ingest', 'doing')",
            (QUEUED[tenant],),
        )
        connection.execute(
            "insert into rag.rag_claims (tenant_id, source_digest, token, expires_at)"
            " values (%s, sha256('a source'), %s, 'infinity')",
            (tenant, job_id(tenant)),
        )
    connection.execute("update rag.rag_query_logs set action = 'ROUTE', route_tag = 'hr' where result_count > 0")
    for tenant in ("t1", "t2"):
        connection.execute(
            """
            insert into rag.rag_erasures (tenant_id, kind, subject_digest, rows_removed, erased_by)
            values (%(tenant)s, 'source',
                rag.erasure_digest('source', %(tenant)s, array['an erased source', 'text']), 1, 'rag_operator')
            """,
            {"tenant": tenant},
        )


# Of the owner of a class, one that no summary has; and a summary of another one, which has expired.
MESSAGE = """
    insert into rag.rag_conversation_messages (tenant_id, id, access_id, user_id, project_id, thread_id, number, role,
        content, tokens, request_key, request_digest, summary_id)
    values (%(tenant)s, %(said)s, %(access)s, %(user)s, %(project)s, 'the thread', 1, 'user', %(text)s || ' said', 4,
        sha256('a key'), sha256('a request'), %(said)s)
"""
SUMMARY = """
    insert into rag.rag_conversation_summaries (tenant_id, id, access_id, document_id, user_id, project_id, thread_id,
        summary_text, message_ids, model)
    values (%(tenant)s, %(id)s, %(access)s, %(id)s, %(user)s, %(project)s, 'the thread', %(text)s || ' summed up',
        array[%(id)s]::uuid[], 'a model')
"""

# The number of each tenant's one job in the queue.
QUEUED = {"t1": 9001, "t2": 9002}

FEEDBACK = """
    insert into rag.rag_feedback (tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index, rating)
    values (%(tenant)s, %(user)s, %(id)s, %(rank)s, %(access)s, %(document)s, 0, 1)
"""


def log_statement(table: str) -> str:
    """An insert into one of the tables that only grow; parameters: log_row()."""
    return {
        "rag_query_logs": """
            insert into rag.rag_query_logs (tenant_id, id, user_id, query_hash, query_length, mode, result_count,
                citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)
            values (%(tenant)s, %(id)s, %(user)s, 'hash', 4, 'hybrid', %(results)s, 0, 0, 1.0, 0.0, 1.0)
        """,
        "rag_query_log_chunks": """
            insert into rag.rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index,
                score, cited)
            values (%(tenant)s, %(id)s, %(user)s, %(rank)s, %(document)s, 0, 0.5, false)
        """,
        "rag_assertions": """
            insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action)
            values (%(tenant)s, 'aaaaaaaaaaaaaaaa', %(user)s, '{public}', 'query')
        """,
        "rag_retractions": """
            insert into rag.rag_retractions (tenant_id, user_id, action, reason, sources, documents, chunks)
            values (%(tenant)s, %(user)s, 'invalidate', 'a test', 1, 1, 1)
        """,
    }[table]


def log_row(
    identifier: UUID,
    tenant: str,
    user: int | None,
    *,
    rank: int = 1,
    results: int = 1,
    document: UUID | None = None,
) -> dict[str, Any]:
    return {
        "id": identifier,
        "tenant": tenant,
        "user": user or 0,
        "rank": rank,
        "results": results,
        "document": document or document_id(1),
    }


def signature(
    role: str,
    tenant: str,
    user: str,
    project: str,
    tags: Sequence[str],
    *,
    key_id: str = SIGNER.key_id,
    secret: bytes = SIGNER.secret,
    expires: int | None = None,
) -> str:
    """What the service would sign these values with, whatever they are; written apart from rag/sign.py."""
    until = int(time.time()) + 60 if expires is None else expires
    return _coded(key_id, secret, until, [role, tenant, user, project, str(until), *tags])


def proof(role: str, *, expires: int | None = None) -> str:
    """What the service asks for the service keys with."""
    until = int(time.time()) + 3600 if expires is None else expires
    return _coded(SIGNER.key_id, SIGNER.secret, until, [role, "service_keys", str(until)])


def _coded(key_id: str, secret: bytes, until: int, values: list[str]) -> str:
    message = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return f"{key_id}.{until}.{hmac.new(secret, message.encode(), hashlib.sha256).hexdigest()}"


def set_variables(connection: psycopg.Connection, variables: Mapping[str, str]) -> None:
    """Set session variables to the end of the transaction, as whoever has the password of the service can."""
    for name, value in variables.items():
        connection.execute("select set_config(%s, %s, true)", (name, value))


def begin(connection: psycopg.Connection, principal: Principal, *, login: str | None = None) -> None:
    """Make the transaction speak for a principal; `login` when the session is not that of the connection's own."""
    parameters = {
        "tenant_id": principal.tenant_id,
        "user_id": principal.user_id,
        "project_id": principal.project_id,
        "tags": list(principal.tags),
        "signature": SIGNER.sign(principal, role=login or connection.info.user),
    }
    connection.execute(query("begin_as"), parameters)


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


def rows_everywhere(connection: psycopg.Connection) -> dict[str, int]:
    """Number of rows of all that the current role may read: tables, views, and functions without arguments."""
    sources = connection.execute(
        """
        select relation.relname, relation.relname
        from pg_class as relation
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'p', 'v', 'm')
            and relation.relname <> 'alembic_version'
            and has_any_column_privilege(relation.oid, 'select')
        union all
        select function.proname || '()', 'rag.' || quote_ident(function.proname) || '()'
        from pg_proc as function
        where function.pronamespace = 'rag'::regnamespace
            and function.proretset
            and function.pronargs = 0
            and has_function_privilege(function.oid, 'execute')
        order by 1
        """
    ).fetchall()
    counts = [
        sql.SQL("(select count(*) from {})").format(
            sql.SQL(source) if name.endswith("()") else sql.Identifier("rag", source)
        )
        for name, source in sources
    ]
    row = connection.execute(sql.SQL("select {}").format(sql.SQL(", ").join(counts))).fetchone()
    assert row is not None
    return dict(zip((name for name, _ in sources), row, strict=True))


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
