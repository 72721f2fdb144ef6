"""What rag_operator does in every tenant: erasure, retention, why a document is visible, and signing keys."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from rag.principal import Principal
from rag.sign import Signer
from tests.conftest import SIGNER, Deployment, Store, unit_vector
from tests.sql.world import CLASSES, REACHES, column, document_id, protected_tables, refused_with, speaking

LOGINS = ("rag_app", "rag_publisher", "rag_worker", "rag_migrator", "rag_operator")

# --- a world of neighbours, written by hand -------------------------------------------------------

ONE, TWO = "tenant-one", "tenant-two"
ANNA, BORIS, CARLA = 7001, 7002, 7003

# class: tenant, scope, owner, project
NEIGHBOURS: Mapping[int, tuple[str, str, int | None, str | None]] = {
    1: (ONE, "public", None, None),
    2: (ONE, "user", ANNA, None),
    3: (ONE, "user", BORIS, None),
    4: (ONE, "project", ANNA, "alpha"),  # shared with Carla
    5: (ONE, "project", BORIS, "alpha"),
    6: (ONE, "project", BORIS, "beta"),  # shared with Anna
    7: (TWO, "user", ANNA, None),
    8: (TWO, "project", ANNA, "alpha"),  # shared with Boris
    9: (TWO, "public", None, None),
}
# Every class has these three, as document class * 10 + 1, 2, 3.
SOURCES = {1: ("text", "notes"), 2: ("markdown", "notes"), 3: ("text", "minutes")}
MEMBERS = ((ONE, ANNA, "alpha", CARLA), (ONE, BORIS, "beta", ANNA), (TWO, ANNA, "alpha", BORIS))
# question: tenant, user, project, what it got back
QUESTIONS: Mapping[int, tuple[str, int, str | None, tuple[int, ...]]] = {
    101: (ONE, ANNA, None, (21, 11)),
    102: (ONE, ANNA, "beta", (61,)),
    103: (ONE, BORIS, "alpha", (51, 52, 53)),
    104: (ONE, CARLA, "alpha", (41, 13)),
    105: (ONE, 0, None, (11, 12)),
    106: (TWO, ANNA, "alpha", (81, 71)),
    107: (ONE, ANNA, "*", (41, 61)),
    108: (ONE, BORIS, "*", (51, 61, 22)),
}
# What askers made of their questions: of a document, or of the answer.
FEEDBACK: tuple[tuple[int, int | None], ...] = (
    *((101, 21), (101, 11), (102, 61), (103, None), (104, 41), (104, None), (106, 81), (108, 22)),
)
# tenant, tag, owner
TAG_OWNERS = ((ONE, "hr", ANNA), (ONE, "it", BORIS), (TWO, "hr", ANNA))
# assertion: tenant, user, project
ASSERTIONS: Mapping[int, tuple[str, int, str | None]] = {
    201: (ONE, ANNA, None),
    202: (ONE, ANNA, "alpha"),
    203: (ONE, BORIS, "alpha"),
    204: (ONE, CARLA, "alpha"),
    205: (ONE, 0, None),
    206: (TWO, ANNA, "alpha"),
}


# Of these the jobs are about a source that is erased; of the others about another one.
JOB_SOURCES = {201: ("text", "notes"), 203: ("markdown", "notes"), 206: ("text", "notes")}


def uuid_of(number: int) -> UUID:
    return UUID(f"00000000-0000-4000-8000-{number:012d}")


def build_neighbours(superuser: psycopg.Connection) -> None:
    for access_id, (tenant, scope, owner, project) in NEIGHBOURS.items():
        place = {"tenant": tenant, "access": access_id, "scope": scope, "owner": owner, "project": project}
        superuser.execute(
            "insert into rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest)"
            " values (%(tenant)s, %(access)s, %(scope)s, %(owner)s, %(project)s, '{public}', sha256('public'))",
            place,
        )
        superuser.execute(
            "insert into rag_tombstones (tenant_id, access_id, source_digest, reason)"
            " values (%(tenant)s, %(access)s, source_digest('text', 'gone'), 'deleted')",
            place,
        )
        superuser.execute(
            "insert into rag_synchronisations"
            " (tenant_id, access_id, source, files, written, removed, unchanged, failed)"
            " values (%(tenant)s, %(access)s, 'handbook', 1, 1, 0, 0, 0)",
            place,
        )
        for number in SOURCES:
            add_document(superuser, access_id, access_id * 10 + number, *SOURCES[number])
        if owner is not None:
            superuser.execute(
                "insert into rag_conversation_messages (tenant_id, id, access_id, user_id, project_id, thread_id,"
                " number, role, content, tokens) values (%(tenant)s, %(id)s, %(access)s, %(owner)s, %(project)s,"
                " 'a thread', 1, 'user', 'a text', 2)",
                place | {"id": uuid_of(400 + access_id)},
            )
            superuser.execute(
                "insert into rag_conversation_summaries (tenant_id, id, access_id, document_id, user_id, project_id,"
                " thread_id, summary_text, message_ids, model) values (%(tenant)s, %(id)s, %(access)s, %(document)s,"
                " %(owner)s, %(project)s, 'a thread', 'a text', array[%(id)s]::uuid[], 'a model')",
                place | {"id": uuid_of(400 + access_id), "document": uuid_of(access_id * 10 + 1)},
            )
    superuser.execute(
        "insert into rag_usage select tenant_id, 0, count(*), sum(body_bytes) from rag_documents group by tenant_id"
    )
    for member in MEMBERS:
        superuser.execute("insert into rag_project_members values (%s, %s, %s, %s, true)", member)
    for number, (tenant, user, project, hits) in QUESTIONS.items():
        superuser.execute(
            "insert into rag_query_logs (tenant_id, id, user_id, project_id, query_hash, query_length, mode,"
            " result_count, citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)"
            " values (%s, %s, %s, %s, 'hash', 4, 'hybrid', 1, 0, 0, 1, 0, 1)",
            (tenant, uuid_of(number), user, project),
        )
        for rank, hit in enumerate(hits, start=1):
            superuser.execute(
                "insert into rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index,"
                " score, cited) values (%s, %s, %s, %s, %s, 0, 1, true)",
                (tenant, uuid_of(number), user, rank, uuid_of(hit)),
            )
    for number, hit in FEEDBACK:
        tenant, user, _, hits = QUESTIONS[number]
        superuser.execute(
            "insert into rag_feedback (tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index, rating)"
            " values (%(tenant)s, %(user)s, %(query)s, %(rank)s, %(access)s, %(document)s, %(index)s, 1)",
            {
                "tenant": tenant,
                "user": user,
                "query": uuid_of(number),
                "rank": 0 if hit is None else hits.index(hit) + 1,
                "access": None if hit is None else hit // 10,
                "document": None if hit is None else uuid_of(hit),
                "index": None if hit is None else 0,
            },
        )
    for owned in TAG_OWNERS:
        superuser.execute("insert into rag_tags (tenant_id, name, owner_user_id) values (%s, %s, %s)", owned)
    for number, (tenant, user, project) in ASSERTIONS.items():
        superuser.execute(
            "insert into rag_assertions (tenant_id, id, key_id, user_id, project_id, tags, action)"
            " values (%s, %s, 'aaaaaaaaaaaaaaaa', %s, %s, '{public}', 'query')",
            (tenant, uuid_of(number), user, project),
        )
        superuser.execute(
            "insert into rag_retractions"
            " (tenant_id, id, user_id, project_id, action, reason, sources, documents, chunks)"
            " values (%s, %s, %s, %s, 'invalidate', 'a test', 1, 1, 1)",
            (tenant, uuid_of(number), user, project),
        )
        source_type, source_id = JOB_SOURCES.get(number, ("text", "minutes"))
        superuser.execute(
            "insert into rag_jobs (tenant_id, id, user_id, project_id, tags, kind, status, source_type, source_id)"
            " values (%s, %s, %s, %s, '{public}', 'ingest', 'failed', %s, %s)",
            (tenant, uuid_of(number), user, project, source_type, source_id),
        )
    for number, tenant in ((301, ONE), (302, TWO)):
        superuser.execute(
            "insert into rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, expires_at)"
            " values (%s, 'aaaaaaaaaaaaaaaa', 'a service', sha256('secret'), '{query}', '{}', 'infinity')",
            (tenant,),
        )
        superuser.execute(
            "insert into rag_analysts (tenant_id, role_name) values (%s, %s)", (tenant, f"person_of_{number}")
        )
        superuser.execute(
            "insert into rag_calibrations (tenant_id, embedding_model, fusion, language, vector_share, questions,"
            " ndcg_before, ndcg_after) values (%s, 'test-model', 'rank', 'en', 0.5, 100, 0.8, 0.9)",
            (tenant,),
        )
        superuser.execute("insert into rag_prompts (tenant_id, prompt) values (%s, 'Be kind.')", (tenant,))
        superuser.execute("insert into rag_limits (tenant_id, documents) values (%s, 1000)", (tenant,))
        superuser.execute("insert into rag_rate_buckets values (%s, 'query', 5, now())", (tenant,))
        superuser.execute(
            "insert into rag_erasures (tenant_id, id, kind, subject_digest, rows_removed, erased_by)"
            " values (%s, %s, 'user', sha256('somebody'), 5, 'rag_operator')",
            (tenant, uuid_of(number)),
        )


def add_document(superuser: psycopg.Connection, access_id: int, number: int, source_type: str, source_id: str) -> None:
    tenant, scope, owner, project = NEIGHBOURS[access_id]
    row = {
        "tenant": tenant,
        "access": access_id,
        "id": uuid_of(number),
        "scope": scope,
        "owner": owner,
        "project": project,
        "type": source_type,
        "source": source_id,
        "vector": unit_vector(1.0),
    }
    superuser.execute(
        "insert into rag_documents (tenant_id, access_id, id, scope, user_id, project_id, tags, source_type, source_id,"
        " source_hash, title, body) values (%(tenant)s, %(access)s, %(id)s, %(scope)s, %(owner)s, %(project)s,"
        " '{public}', %(type)s, %(source)s, 'hash', 'A title', 'a text')",
        row,
    )
    superuser.execute(
        "insert into rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,"
        " token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count)"
        " values (%(tenant)s, %(access)s, %(id)s, 0, 'a text', 'hash', 2, 'words', 0, 6, %(vector)s::halfvec,"
        " 'test-model', to_tsvector('english', 'a text'), 1)",
        row,
    )


@pytest.fixture(scope="module")
def town(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A database with the neighbours; tests leave it as it was."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            connection.execute("set local search_path = rag, pg_temp")
            build_neighbours(connection)
        yield clone


@pytest.fixture
def registrar(town: Deployment) -> Iterator[psycopg.Connection]:
    """A superuser's connection, whose transaction is undone after the test."""
    with town.cluster.superuser(town.name) as connection, connection.transaction(force_rollback=True):
        connection.execute("set local search_path = rag, pg_temp")
        yield connection


@contextmanager
def as_operator(superuser: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """The session of rag_operator, within the superuser's transaction."""
    superuser.execute("set local session authorization rag_operator")
    yield superuser
    superuser.execute("reset session authorization")


def number_of(text: str) -> int:
    return int(text[-12:])


# table: what names a row of it in the tests
NAMED_BY: Mapping[str, Callable[[dict[str, Any]], object]] = {
    "rag_access_classes": lambda row: row["access_id"],
    "rag_documents": lambda row: (row["access_id"], number_of(row["id"])),
    "rag_chunks": lambda row: (row["access_id"], number_of(row["document_id"])),
    "rag_tombstones": lambda row: row["access_id"],
    "rag_synchronisations": lambda row: row["access_id"],
    "rag_project_members": lambda row: (
        row["tenant_id"],
        row["owner_user_id"],
        row["project_id"],
        row["member_user_id"],
    ),
    "rag_query_logs": lambda row: number_of(row["id"]),
    "rag_query_log_chunks": lambda row: (number_of(row["query_id"]), number_of(row["document_id"])),
    "rag_feedback": lambda row: (
        number_of(row["query_id"]),
        None if row["document_id"] is None else number_of(row["document_id"]),
    ),
    "rag_tags": lambda row: (row["tenant_id"], row["name"]),
    "rag_prompts": lambda row: row["tenant_id"],
    "rag_limits": lambda row: row["tenant_id"],
    "rag_rate_buckets": lambda row: row["tenant_id"],
    "rag_usage": lambda row: row["tenant_id"],
    "rag_assertions": lambda row: number_of(row["id"]),
    "rag_retractions": lambda row: number_of(row["id"]),
    "rag_jobs": lambda row: number_of(row["id"]),
    "rag_claims": lambda row: row["tenant_id"],
    "rag_conversation_messages": lambda row: number_of(row["id"]),
    "rag_conversation_summaries": lambda row: number_of(row["id"]),
    "rag_service_keys": lambda row: row["tenant_id"],
    "rag_analysts": lambda row: row["tenant_id"],
    "rag_calibrations": lambda row: row["tenant_id"],
    "rag_erasures": lambda row: number_of(row["id"]) if row["id"].startswith("00000000") else "new",
    "rag_signing_keys": lambda row: row["key_id"],
}

Contents = dict[str, dict[object, dict[str, Any]]]


def contents(superuser: psycopg.Connection) -> Contents:
    """All columns of all rows of all tables."""
    found: Contents = {}
    for table in protected_tables(superuser):
        rows = column(superuser, sql.SQL("select to_jsonb(one) from {} as one").format(sql.Identifier("rag", table)))
        found[table] = {NAMED_BY[table](row): row for row in rows}
        assert len(found[table]) == len(rows), f"{table}: two rows of one name"
    return found


def documents_of(*access_ids: int, numbers: tuple[int, ...] = (1, 2, 3)) -> set[object]:
    return {(access_id, access_id * 10 + number) for access_id in access_ids for number in numbers}


# What each erasure takes, by hand; whatever is not listed has to stay as it is.
FORGOTTEN: Mapping[str, tuple[dict[str, Any], dict[str, set[object]]]] = {
    "tenant": (
        {"tenant_id": ONE},
        {
            "rag_access_classes": {1, 2, 3, 4, 5, 6},
            "rag_documents": documents_of(1, 2, 3, 4, 5, 6),
            "rag_tombstones": {1, 2, 3, 4, 5, 6},
            "rag_synchronisations": {1, 2, 3, 4, 5, 6},
            "rag_conversation_messages": {402, 403, 404, 405, 406},
            "rag_conversation_summaries": {402, 403, 404, 405, 406},
            "rag_project_members": {(ONE, ANNA, "alpha", CARLA), (ONE, BORIS, "beta", ANNA)},
            "rag_query_logs": {101, 102, 103, 104, 105, 107, 108},
            "rag_query_log_chunks": {
                *((101, 21), (101, 11), (102, 61), (103, 51), (103, 52), (103, 53), (104, 41), (104, 13)),
                *((105, 11), (105, 12), (107, 41), (107, 61), (108, 51), (108, 61), (108, 22)),
            },
            "rag_assertions": {201, 202, 203, 204, 205},
            "rag_retractions": {201, 202, 203, 204, 205},
            "rag_jobs": {201, 202, 203, 204, 205},
            "rag_service_keys": {ONE},
            "rag_analysts": {ONE},
            "rag_calibrations": {ONE},
            "rag_prompts": {ONE},
            "rag_limits": {ONE},
            "rag_rate_buckets": {ONE},
            "rag_usage": {ONE},
            "rag_tags": {(ONE, "hr"), (ONE, "it")},
            "rag_feedback": {
                *((101, 21), (101, 11), (102, 61), (103, None), (104, 41), (104, None), (108, 22)),
            },
            "rag_erasures": {301},
        },
    ),
    "user": (
        {"tenant_id": ONE, "user_id": ANNA},
        {
            "rag_access_classes": {2, 4},
            "rag_documents": documents_of(2, 4),
            "rag_tombstones": {2, 4},
            "rag_synchronisations": {2, 4},
            "rag_conversation_messages": {402, 404},
            "rag_conversation_summaries": {402, 404},
            "rag_project_members": {(ONE, ANNA, "alpha", CARLA), (ONE, BORIS, "beta", ANNA)},
            "rag_query_logs": {101, 102, 107},
            # Others' hits on what was hers as well.
            "rag_query_log_chunks": {(101, 21), (101, 11), (102, 61), (107, 41), (107, 61), (104, 41), (108, 22)},
            # Others' words on what was hers as well.
            "rag_feedback": {(101, 21), (101, 11), (102, 61), (104, 41), (108, 22)},
            "rag_tags": {(ONE, "hr")},
            "rag_assertions": {201, 202},
            "rag_retractions": {201, 202},
            "rag_jobs": {201, 202},
        },
    ),
    "project of everybody": (
        {"tenant_id": ONE, "project_id": "alpha"},
        {
            "rag_access_classes": {4, 5},
            "rag_documents": documents_of(4, 5),
            "rag_tombstones": {4, 5},
            "rag_synchronisations": {4, 5},
            "rag_conversation_messages": {404, 405},
            "rag_conversation_summaries": {404, 405},
            "rag_project_members": {(ONE, ANNA, "alpha", CARLA)},
            "rag_query_logs": {103, 104},
            "rag_query_log_chunks": {
                *((103, 51), (103, 52), (103, 53), (104, 41), (104, 13)),
                *((107, 41), (108, 51)),
            },
            "rag_feedback": {(103, None), (104, 41), (104, None)},
            "rag_assertions": {202, 203, 204},
            "rag_retractions": {202, 203, 204},
            "rag_jobs": {202, 203, 204},
        },
    ),
    "project of one": (
        {"tenant_id": ONE, "project_id": "alpha", "user_id": ANNA},
        {
            "rag_access_classes": {4},
            "rag_documents": documents_of(4),
            "rag_tombstones": {4},
            "rag_synchronisations": {4},
            "rag_conversation_messages": {404},
            "rag_conversation_summaries": {404},
            "rag_project_members": {(ONE, ANNA, "alpha", CARLA)},
            # Carla asked in Anna's project; Boris in his own of that name.
            "rag_query_logs": {104},
            "rag_query_log_chunks": {(104, 41), (104, 13), (107, 41)},
            "rag_feedback": {(104, 41), (104, None)},
            "rag_assertions": {202, 204},
            "rag_retractions": {202, 204},
            "rag_jobs": {202, 204},
        },
    ),
    "source": (
        {"tenant_id": ONE, "source_id": "notes"},
        {
            "rag_jobs": {201, 203},
            "rag_documents": documents_of(1, 2, 3, 4, 5, 6, numbers=(1, 2)),
            "rag_conversation_summaries": {402, 403, 404, 405, 406},
            "rag_query_log_chunks": {
                *((101, 21), (101, 11), (102, 61), (103, 51), (103, 52), (104, 41)),
                *((105, 11), (105, 12), (107, 41), (107, 61), (108, 51), (108, 61), (108, 22)),
            },
            "rag_feedback": {(101, 21), (101, 11), (102, 61), (104, 41), (108, 22)},
        },
    ),
    "source of a type": (
        {"tenant_id": ONE, "source_id": "notes", "source_type": "text"},
        {
            "rag_jobs": {201},
            "rag_documents": documents_of(1, 2, 3, 4, 5, 6, numbers=(1,)),
            "rag_conversation_summaries": {402, 403, 404, 405, 406},
            "rag_query_log_chunks": {
                *((101, 21), (101, 11), (102, 61), (103, 51), (104, 41)),
                *((105, 11), (107, 41), (107, 61), (108, 51), (108, 61)),
            },
            "rag_feedback": {(101, 21), (101, 11), (102, 61), (104, 41)},
        },
    ),
    "nothing": ({"tenant_id": ONE, "user_id": 7009}, {}),
    "unknown tenant": ({"tenant_id": "tenant-three"}, {}),
}
# Of each, what its digest is made of (erasure_digest()).
SUBJECTS: Mapping[str, list[str]] = {
    "tenant": ["tenant", ONE],
    "user": ["user", ONE, "7001"],
    "project of everybody": ["project", ONE, "alpha"],
    "project of one": ["project", ONE, "alpha", "7001"],
    "source": ["source", ONE, "notes"],
    "source of a type": ["source", ONE, "notes", "text"],
    "nothing": ["user", ONE, "7009"],
    "unknown tenant": ["tenant", "tenant-three"],
}
every_erasure = pytest.mark.parametrize("case", FORGOTTEN)


def named(function: str, arguments: Mapping[str, Any]) -> sql.Composed:
    """A call with these arguments by name."""
    return sql.SQL("select * from {}({})").format(
        sql.Identifier("rag", function),
        sql.SQL(", ").join(
            sql.SQL("{} => {}").format(sql.Identifier(name), value) for name, value in arguments.items()
        ),
    )


def call(operator: psycopg.Connection, function: str, arguments: Mapping[str, Any]) -> dict[str, int]:
    return dict(operator.execute(named(function, arguments)).fetchall())


def erase(registrar: psycopg.Connection, case: str) -> dict[str, int]:
    with as_operator(registrar) as operator:
        return call(operator, "forget", FORGOTTEN[case][0])


def expected_rows(case: str) -> dict[str, set[object]]:
    """Rows that an erasure takes; a document has one chunk."""
    taken = FORGOTTEN[case][1]
    return taken | {"rag_chunks": taken.get("rag_documents", set())}


# --- forget ---------------------------------------------------------------------------------------


@every_erasure
def test_an_erasure_takes_these_rows_and_its_neighbours_lose_nothing(registrar: psycopg.Connection, case: str) -> None:
    before = contents(registrar)
    erase(registrar, case)
    after = contents(registrar)
    assert after["rag_erasures"].pop("new")
    # Counted as the sum of several rows.
    assert column(registrar, "select count(*) from usage_drift()") == [0]
    assert before["rag_usage"].pop(TWO) == after["rag_usage"].pop(TWO)
    if case != "tenant":
        gone = len(expected_rows(case).get("rag_documents", ()))
        assert after["rag_usage"].pop(ONE)["documents"] == before["rag_usage"].pop(ONE)["documents"] - gone
    for table, rows in before.items():
        stays = {name: row for name, row in rows.items() if name not in expected_rows(case).get(table, set())}
        assert after[table] == stays, table


@every_erasure
def test_an_erasure_says_how_many_rows_of_each_table_it_took(registrar: psycopg.Connection, case: str) -> None:
    removed = erase(registrar, case)
    expected = {table: len(rows) for table, rows in expected_rows(case).items() if table != "rag_erasures"}
    assert {table: rows for table, rows in removed.items() if rows} == {t: n for t, n in expected.items() if n}


@every_erasure
def test_an_erasure_leaves_a_digest_and_no_name(registrar: psycopg.Connection, case: str) -> None:
    removed = erase(registrar, case)
    record = contents(registrar)["rag_erasures"]["new"]
    digest = hashlib.sha256(json.dumps(SUBJECTS[case], separators=(",", ":")).encode()).hexdigest()
    kind = SUBJECTS[case][0]
    assert record == {
        "id": record["id"],
        "erased_at": record["erased_at"],
        "tenant_id": digest if kind == "tenant" else ONE,
        "kind": kind,
        "subject_digest": f"\\x{digest}",
        "rows_removed": sum(removed.values()),
        "erased_by": "rag_operator",
    }


def test_after_a_tenant_is_erased_no_table_has_its_name(registrar: psycopg.Connection) -> None:
    assert ONE in json.dumps(list(contents(registrar).values()), default=str, skipkeys=True)
    erase(registrar, "tenant")
    assert ONE not in str(contents(registrar))


@every_erasure
def test_the_probe_counts_what_an_erasure_takes_and_nothing_afterwards(
    registrar: psycopg.Connection, case: str
) -> None:
    arguments = FORGOTTEN[case][0]
    with as_operator(registrar) as operator:
        found = call(operator, "count_traces", arguments)
        removed = call(operator, "forget", arguments)
        left = call(operator, "count_traces", arguments)
    assert found == {table: removed.get(table, 0) for table in found}
    assert set(removed) <= set(found)
    assert set(left.values()) == {0}


def test_a_document_id_that_somebody_else_uses_as_well_is_erased_in_one_place(registrar: psycopg.Connection) -> None:
    """Ids are unique within a class, so a neighbour can have a document of the same id."""
    add_document(registrar, 3, 21, "text", "a copy")
    assert erase(registrar, "user")["rag_documents"] == 6
    assert (3, 21) in contents(registrar)["rag_documents"]
    assert (3, 21) in contents(registrar)["rag_chunks"]


NO_SUBJECT: Mapping[str, dict[str, Any]] = {
    "no tenant": {"tenant_id": None},
    "an empty tenant": {"tenant_id": ""},
    "a user of no tenant": {"tenant_id": None, "user_id": ANNA},
    "a type without a source": {"tenant_id": ONE, "source_type": "text"},
    "a source of a user": {"tenant_id": ONE, "user_id": ANNA, "source_id": "notes"},
    "a source of a project": {"tenant_id": ONE, "project_id": "alpha", "source_id": "notes"},
    "a type and a user": {"tenant_id": ONE, "user_id": ANNA, "source_type": "text"},
    "nobody, who asked without a user": {"tenant_id": ONE, "user_id": 0},
    "a negative user": {"tenant_id": ONE, "user_id": -1},
    "all projects, in which many asked": {"tenant_id": ONE, "project_id": "*"},
    "an empty project": {"tenant_id": ONE, "project_id": ""},
    "an empty source": {"tenant_id": ONE, "source_id": ""},
}


@pytest.mark.parametrize("function", ["forget", "count_traces"])
@pytest.mark.parametrize("case", NO_SUBJECT)
def test_arguments_that_name_no_subject_are_refused(registrar: psycopg.Connection, case: str, function: str) -> None:
    before = contents(registrar)
    with as_operator(registrar) as operator:
        assert refused_with(operator, named(function, NO_SUBJECT[case])) == "22023"
    assert contents(registrar) == before


# Of each function a call that would be right.
OPERATING: Mapping[str, dict[str, Any]] = {
    "forget": {"tenant_id": ONE},
    "count_traces": {"tenant_id": ONE},
    "expire_logs": {"older_than": "1 day"},
    "count_expired": {"kind": "questions", "older_than": "1 day"},
    "expire_batch": {"kind": "questions", "older_than": "1 day", "at_most": 1},
    "explain_access": {"document_id": uuid_of(11), "tenant_id": ONE},
    "add_signing_key": {},
    "list_signing_keys": {},
    "retire_signing_key": {"key_id": "test"},
    "usage_drift": {},
    "recount_usage": {"tenant_id": ONE},
}


@pytest.mark.parametrize("function", OPERATING)
@pytest.mark.parametrize("role", LOGINS)
def test_operating_is_for_operators(town: Deployment, role: str, function: str) -> None:
    with town.connect(role) as connection:
        refused = refused_with(connection, named(function, OPERATING[function]))
    assert refused == (None if role == "rag_operator" else "42501")


def test_not_even_a_principal_may_operate(town: Deployment) -> None:
    with town.transaction(Principal(tenant_id=ONE, user_id=ANNA)) as connection:
        for function, arguments in OPERATING.items():
            assert refused_with(connection, named(function, arguments)) == "42501"


# --- what is in flight -----------------------------------------------------------------------------

MARA = Principal(tenant_id="acme", user_id=7, project_id="*")
CLASS_OF_MARA = "select access_class('user', 7, null, '{public}')"


def test_an_erasure_waits_for_who_is_writing_in_the_tenant(deployment: Deployment, store: Store) -> None:
    """And takes what they wrote; a writer in another tenant holds nobody up."""
    store(MARA, "a first text")
    elsewhere = Principal(tenant_id="other", user_id=7)
    with deployment.transaction(elsewhere) as neighbour:
        neighbour.execute(CLASS_OF_MARA)
        with deployment.transaction(MARA) as writer, deployment.connect("rag_operator") as operator:
            writer.execute(CLASS_OF_MARA)
            operator.execute("set lock_timeout = '200ms'")
            assert refused_with(operator, "select * from rag.forget('acme', 7)") == "55P03"
            assert refused_with(operator, "select * from rag.forget('third', 7)") is None
        with deployment.connect("rag_operator") as operator:
            operator.execute("set lock_timeout = '200ms'")
            removed = call(operator, "forget", {"tenant_id": "acme", "user_id": 7})
    assert removed["rag_documents"] == 1


def wait_until_blocked(deployment: Deployment, role: str, work: Future[None]) -> None:
    """Return when a session of the role waits for a lock; `work` is what does."""
    with deployment.cluster.superuser(deployment.name) as superuser:
        while not column(
            superuser,
            "select 1 from pg_stat_activity"
            " where usename = %s and datname = current_database() and wait_event_type = 'Lock'",
            (role,),
        ):
            assert not work.done(), work.exception()
            time.sleep(0.01)


def test_a_member_who_waited_for_the_erasure_of_the_project_makes_no_class_of_it(
    deployment: Deployment, store: Store
) -> None:
    """Otherwise the owner's number and the project's name would be back."""
    store(MARA, "a text", scope="project", project_id="orion")
    with deployment.connect("rag_operator") as operator:
        operator.execute("insert into rag_project_members values ('acme', 7, 'orion', 8, true)")
    member = Principal(tenant_id="acme", user_id=8, project_id="orion")
    refusals: list[str | None] = []

    def write() -> None:
        with deployment.transaction(member) as connection:
            refusals.append(refused_with(connection, "select access_class('project', 7, 'orion', '{public}')"))

    with ThreadPoolExecutor() as threads, deployment.connect("rag_operator") as operator:
        with operator.transaction():
            call(operator, "forget", {"tenant_id": "acme", "user_id": 7})
            writing = threads.submit(write)
            wait_until_blocked(deployment, "rag_app", writing)
        writing.result()
    assert refusals == ["42501"]
    with deployment.cluster.superuser(deployment.name) as superuser:
        assert column(superuser, "select count(*) from rag.rag_access_classes") == [0]


# --- retention ------------------------------------------------------------------------------------


def age(superuser: psycopg.Connection, table: str, number: int, days: int) -> None:
    superuser.execute(
        sql.SQL("update {} set created_at = now() - make_interval(days => %s) where id = %s").format(
            sql.Identifier("rag", table)
        ),
        (days, uuid_of(number)),
    )


RETAINED: Mapping[str, tuple[dict[str, Any], dict[str, set[object]]]] = {
    "one tenant": (
        {"older_than": "90 days", "tenant_id": ONE},
        {"rag_query_logs": {101, 103}, "rag_assertions": {202}},
    ),
    "every tenant": (
        {"older_than": "90 days"},
        {"rag_query_logs": {101, 103, 106}, "rag_assertions": {202, 206}},
    ),
    "older than any": ({"older_than": "1000 days"}, {}),
    "all of one tenant": (
        {"older_than": "0 days", "tenant_id": TWO},
        {"rag_query_logs": {106}, "rag_assertions": {206}},
    ),
}


@pytest.mark.parametrize("case", RETAINED)
def test_logs_end_by_age_and_nothing_else_does(registrar: psycopg.Connection, case: str) -> None:
    arguments, taken = RETAINED[case]
    for number, days in ((101, 91), (103, 400), (102, 89), (106, 91)):
        age(registrar, "rag_query_logs", number, days)
    for number, days in ((202, 91), (203, 89), (206, 91)):
        age(registrar, "rag_assertions", number, days)
    before = contents(registrar)
    with as_operator(registrar) as operator:
        assert column(operator, named("expire_logs", arguments)) == [sum(map(len, taken.values()))]
    after = contents(registrar)
    # What a question got back goes with it.
    hits = {name for name in before["rag_query_log_chunks"] if name[0] in taken.get("rag_query_logs", set())}  # type: ignore[index]
    said = {name for name in before["rag_feedback"] if name[0] in taken.get("rag_query_logs", set())}  # type: ignore[index]
    taken = taken | {"rag_query_log_chunks": hits, "rag_feedback": said}
    for table, rows in before.items():
        assert after[table] == {name: row for name, row in rows.items() if name not in taken.get(table, set())}, table


@pytest.mark.parametrize("older_than", [None, "-1 second"])
def test_an_age_that_is_none_expires_nothing(registrar: psycopg.Connection, older_than: str | None) -> None:
    with as_operator(registrar) as operator:
        assert refused_with(operator, named("expire_logs", {"older_than": older_than})) == "22023"


@pytest.mark.parametrize("kind", ["questions", "assertions", "messages"])
@pytest.mark.parametrize("at_most", [1, 2, 3, 100])
def test_batches_remove_what_is_too_old_and_nothing_else(
    registrar: psycopg.Connection, kind: str, at_most: int
) -> None:
    table, old, young = {
        "questions": ("rag_query_logs", (101, 103, 106), 102),
        "assertions": ("rag_assertions", (202, 204, 206), 203),
        "messages": ("rag_conversation_messages", (402, 405, 408), 403),
    }[kind]
    for number in old:
        age(registrar, table, number, 91)
    age(registrar, table, young, 89)
    before = contents(registrar)
    arguments = {"kind": kind, "older_than": "90 days"}
    batches = []
    with as_operator(registrar) as operator:
        while (left := column(operator, named("count_expired", arguments))) != [0]:
            assert left == [3 - sum(batches)]
            batches += column(operator, named("expire_batch", arguments | {"at_most": at_most}))
            assert batches[-1] > 0
        assert column(operator, named("expire_batch", arguments | {"at_most": at_most})) == [0]
    assert (sum(batches), max(batches)) == (3, min(at_most, 3))
    after = contents(registrar)
    gone = {name: set(before[name]) - set(after[name]) for name in before}
    assert gone.pop(table) == set(old)
    goes_with_it = ("rag_query_log_chunks", "rag_feedback") if kind == "questions" else ()
    for other in goes_with_it:
        assert gone.pop(other) == {name for name in before[other] if name[0] in old}  # type: ignore[index]
    assert gone == {name: set() for name in gone}


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("count_expired", {"kind": "questions", "older_than": None}),
        ("count_expired", {"kind": "retractions", "older_than": "1 day"}),
        ("count_expired", {"kind": "assertions", "older_than": "-1 day"}),
        ("expire_batch", {"kind": "questions", "older_than": "1 day", "at_most": None}),
        ("expire_batch", {"kind": "questions", "older_than": "-1 day", "at_most": 1}),
        ("expire_batch", {"kind": None, "older_than": "1 day", "at_most": 1}),
        ("expire_batch", {"kind": "rag_documents", "older_than": "1 day", "at_most": 1}),
    ],
)
def test_what_has_no_end_or_no_age_is_refused(
    registrar: psycopg.Connection, function: str, arguments: dict[str, Any]
) -> None:
    before = contents(registrar)
    with as_operator(registrar) as operator:
        assert refused_with(operator, named(function, arguments)) in ("22023", "20000")
    assert contents(registrar) == before


# --- nothing of a tenant is left ------------------------------------------------------------------


def test_an_erased_tenant_is_in_no_table_that_has_a_tenant(registrar: psycopg.Connection) -> None:
    """The tables are the catalog's: one that is added later is looked at as well, and has to have had a row."""
    tables = column(
        registrar,
        "select relation.relname from pg_class as relation"
        " join pg_attribute as attribute on attribute.attrelid = relation.oid and attribute.attname = 'tenant_id'"
        " where relation.relnamespace = 'rag'::regnamespace and relation.relkind in ('r', 'p')",
    )
    assert set(tables) >= {"rag_documents", "rag_synchronisations", "rag_class_lexemes"}
    for statement in (
        "insert into rag_class_indexes (tenant_id, access_id, chunks) select tenant_id, access_id, 1",
        "insert into rag_class_languages select tenant_id, access_id, 'en', 1, 3",
        "insert into rag_class_lexemes select tenant_id, access_id, 'en', 'record', 1",
    ):
        registrar.execute(f"{statement} from rag_access_classes")
    registrar.execute(
        "insert into rag_claims (tenant_id, source_digest, token, expires_at)"
        " select tenant_id, sha256('a source'), gen_random_uuid(), now()"
        " from (select distinct tenant_id from rag_documents) as tenant"
    )

    def of_tenant(table: str, tenant: str) -> int:
        (count,) = column(
            registrar,
            sql.SQL("select count(*) from {} where tenant_id = {}").format(sql.Identifier("rag", table), tenant),
        )
        return int(count)  # type: ignore[call-overload]

    others = {table: of_tenant(table, TWO) for table in tables}
    assert [table for table in tables if of_tenant(table, ONE) == 0] == [], "give the tenants a row of each table"
    with as_operator(registrar) as operator:
        operator.execute("select * from rag.forget(%s)", (ONE,))
    assert {table: of_tenant(table, ONE) for table in tables} == dict.fromkeys(tables, 0)
    assert {table: of_tenant(table, TWO) for table in tables} == others


# --- explain_access -------------------------------------------------------------------------------

EXPLAIN = "select distinct access_id, visible from rag.explain_access(%s, %s, %s, %s, %s)"


def explained(operator: psycopg.Connection, access_id: int, principal: Principal) -> list[tuple[int, bool]]:
    return operator.execute(
        EXPLAIN,
        (
            document_id(access_id),
            principal.tenant_id,
            principal.user_id,
            principal.project_id,
            list(principal.tags),
        ),
    ).fetchall()


def test_an_explanation_agrees_with_what_the_principal_may_read(
    operator: psycopg.Connection, app: psycopg.Connection, figure: Callable[[str], None]
) -> None:
    pairs = 0
    for name, reach in REACHES.items():
        with speaking(app, reach.principal):
            (mine,) = column(app, "select my_access_ids()")
        for access_id in CLASSES:
            assert explained(operator, access_id, reach.principal) == [(access_id, access_id in mine)], name
            pairs += 1
    figure(f"explain_access agrees with my_access_ids(): {pairs} of {pairs} pairs of principal and document")


TENANT, TAG, PUBLIC, OWN, OWN_PROJECT, SHARED, CHOSEN = (
    "the document is of the principal's tenant",
    "a tag of the class is the principal's",
    "the class is public",
    "the class is the principal's own",
    "the project is the principal's own",
    "the project is shared with the principal",
    "the principal names the project, or *",
)
# user of t1, the project they name, a class: the clauses that hold
CLAUSES: Mapping[str, tuple[int | None, str | None, int, set[str]]] = {
    "public": (None, None, 1, {TENANT, TAG, PUBLIC}),
    "public, another tag": (None, None, 2, {TENANT, PUBLIC}),
    "public, of another tenant": (None, None, 11, {TAG, PUBLIC}),
    "own": (1, None, 3, {TENANT, TAG, OWN}),
    "own number, in another tenant": (1, None, 12, {TAG, OWN}),
    "somebody else's": (2, None, 3, {TENANT, TAG}),
    "own project": (1, "alpha", 6, {TENANT, TAG, OWN_PROJECT, CHOSEN}),
    "own project, another one named": (1, "beta", 6, {TENANT, TAG, OWN_PROJECT}),
    "own project, none named": (1, None, 6, {TENANT, TAG, OWN_PROJECT}),
    "own project, all of them": (1, "*", 6, {TENANT, TAG, OWN_PROJECT, CHOSEN}),
    "shared": (1, "gamma", 9, {TENANT, TAG, SHARED, CHOSEN}),
    "shared with somebody else": (3, "gamma", 9, {TENANT, TAG, CHOSEN}),
}


@pytest.mark.parametrize("case", CLAUSES)
def test_each_clause_is_said_to_hold_or_not(operator: psycopg.Connection, case: str) -> None:
    user, project, access_id, holding = CLAUSES[case]
    rows = operator.execute(
        "select clause, holds from rag.explain_access(%s, 't1', %s, %s)", (document_id(access_id), user, project)
    ).fetchall()
    assert [clause for clause, _ in rows] == [TENANT, TAG, PUBLIC, OWN, OWN_PROJECT, SHARED, CHOSEN]
    assert {clause for clause, holds in rows if holds} == holding


def test_an_explanation_names_the_class_and_no_text(operator: psycopg.Connection) -> None:
    rows = operator.execute(
        "select distinct access_id, scope, owner_user_id, owner_project_id, class_tags"
        " from rag.explain_access(%s, 't1', 1)",
        (document_id(10),),
    ).fetchall()
    assert rows == [(10, "project", 2, "delta", ["public"])]
    everything = operator.execute("select * from rag.explain_access(%s, 't1', 1)", (document_id(10),)).fetchall()
    assert "record" not in str(everything)


def test_a_document_that_is_not_there_has_no_explanation(operator: psycopg.Connection) -> None:
    assert operator.execute("select * from rag.explain_access(gen_random_uuid(), 't1', 1)").fetchall() == []


def test_an_explanation_says_nothing_to_others_whether_the_document_is_there_or_not(
    service: psycopg.Connection,
) -> None:
    """A foreign document, a missing one and one's own: the same refusal."""
    anna = Principal(tenant_id="t1", user_id=1)
    with speaking(service, anna):
        for document in (document_id(3), document_id(12), UUID(int=0)):
            with pytest.raises(psycopg.errors.InsufficientPrivilege) as refused, service.transaction():
                service.execute("select * from rag.explain_access(%s, 't1', 1)", (document,))
            assert str(refused.value).splitlines()[0] == "permission denied for function explain_access"


# --- signing keys ---------------------------------------------------------------------------------


def signed(signer: Signer, principal: Principal) -> tuple[object, ...]:
    return (
        principal.tenant_id,
        principal.user_id,
        principal.project_id,
        list(principal.tags),
        signer.sign(principal, role="rag_app"),
    )


BEGIN = "select rag.begin_as(%s, %s, %s, %s, %s)"


def test_two_signing_keys_are_valid_at_once_and_a_retired_one_is_worthless(deployment: Deployment) -> None:
    """Rotation: add, hand out, retire."""
    mara = Principal(tenant_id="acme", user_id=7)
    with deployment.connect("rag_operator") as operator, deployment.connect() as app:

        def holds(signer: Signer) -> bool:
            return refused_with(app, BEGIN, signed(signer, mara)) is None

        (added,) = column(operator, "select key_id || '.' || secret from rag.add_signing_key()")
        newer = Signer.parse(added)
        assert column(operator, "select key_id from rag.list_signing_keys()") == [SIGNER.key_id, newer.key_id]
        assert (holds(SIGNER), holds(newer)) == (True, True)

        assert column(operator, "select rag.retire_signing_key(%s)", (SIGNER.key_id,)) == [True]
        assert (holds(SIGNER), holds(newer)) == (False, True)
        assert column(operator, "select rag.retire_signing_key(%s)", (SIGNER.key_id,)) == [False]

        column(operator, "select rag.retire_signing_key(%s)", (newer.key_id,))
        assert holds(newer) is False
        assert column(operator, "select key_id from rag.list_signing_keys()") == []


def test_a_transaction_whose_key_is_retired_sees_nothing_from_its_next_statement_on(
    deployment: Deployment, store: Store
) -> None:
    mara = Principal(tenant_id="acme", user_id=7)
    store(mara, "a text")
    with deployment.transaction(mara) as connection, deployment.connect("rag_operator") as operator:
        assert len(column(connection, "select id from my_documents()")) == 1
        column(operator, "select rag.retire_signing_key(%s)", (SIGNER.key_id,))
        assert column(connection, "select id from my_documents()") == []
        assert refused_with(connection, "select access_class('user', 7, null, '{public}')") == "42501"


@pytest.mark.parametrize("role", LOGINS)
@pytest.mark.parametrize("columns", ["key_id", "inner_pad", "outer_pad", "created_at", "count(*)"])
def test_no_login_reads_the_signing_keys(town: Deployment, role: str, columns: str) -> None:
    with town.connect(role) as connection:
        assert refused_with(connection, f"select {columns} from rag.rag_signing_keys") == "42501"


def test_the_functions_of_signing_keys_show_a_secret_once_and_never_again(deployment: Deployment) -> None:
    with deployment.connect("rag_operator") as operator:
        ((key_id, secret),) = operator.execute("select * from rag.add_signing_key()").fetchall()
        assert len(bytes.fromhex(secret)) == 32
        listed = operator.execute("select * from rag.list_signing_keys()").fetchall()
        assert key_id in [row[0] for row in listed]
        assert secret not in str(listed)
        for role in ("rag_steward", "rag_search", "rag_owner"):
            assert refused_with(operator, f"set role {role}") == "42501"
