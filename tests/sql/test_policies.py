"""sql/schema/30_policies.sql: each policy lets its insiders through and nobody else.

The logins of the service read keys alone; what rag_principal reads for them is asked of its policies directly,
through a function that runs any statement as rag_principal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql
from psycopg.errors import ForeignKeyViolation

from rag.principal import Principal
from tests.conftest import Deployment, unit_vector
from tests.sql.world import (
    CLASS_TABLES,
    CLASSES,
    QUERIES,
    REACHES,
    WORDS,
    Reach,
    begin,
    column,
    document_id,
    log_row,
    log_statement,
    protected_tables,
    query_id,
    refused_with,
    said_id,
    speaking,
    tenant_of,
)

USER_1 = Principal(tenant_id="t1", user_id=1, project_id="*")
USER_2 = Principal(tenant_id="t1", user_id=2, project_id="*")
NAMESAKE = Principal(tenant_id="t2", user_id=1, project_id="*")
NO_USER = Principal(tenant_id="t1")

MISSING_CLASS = 999
MISSING = UUID("00000000-0000-4000-8000-000000009999")

INSERT_DOCUMENT = """
    insert into rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type, source_id,
        source_hash, title, body)
    values (%(tenant)s, %(id)s, %(access)s, %(scope)s, %(user)s, %(project)s, %(tags)s, 'text', %(source)s, 'hash',
        'A record', 'new')
"""
INSERT_CHUNK = f"""
    insert into rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
        token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count)
    values (%(tenant)s, %(access)s, %(document)s, 1, 'new', 'hash', 1, 'words', 0, 3, '{unit_vector(1.0)}',
        'test-model', '', 0)
"""
INSERTS = {"rag_documents": INSERT_DOCUMENT, "rag_chunks": INSERT_CHUNK}
CHANGES = {"rag_documents": "update rag_documents set title = 'changed' returning access_id"}
REMOVALS = {
    "rag_documents": "delete from rag_documents returning access_id",
    "rag_chunks": "delete from rag_chunks returning access_id",
}
# As rag_principal, with values for {tenant} and {access}.
INSERT_TOMBSTONE = """
    insert into rag_tombstones (tenant_id, access_id, source_digest, reason)
    values ('{tenant}', {access}, sha256('a new source'), 'a test')
    returning access_id
"""
CLOSE = "select close_sources(array[%s]::bigint[], array[%s], array[null], array[null]::uuid[], 'a cascade')"
CHANGE_TOMBSTONES = "update rag_tombstones set generation = generation + 1 returning access_id, generation"


def new_row(access_id: int) -> dict[str, Any]:
    """Parameters for a row of a class that collides with nothing; its chunk goes to the class's document."""
    _, scope, user, project, tags = CLASSES.get(access_id, ("t1", "user", 1, None, ("public",)))
    return {
        "tenant": "t1" if access_id == MISSING_CLASS else tenant_of(access_id),
        "access": access_id,
        "scope": scope,
        "user": user,
        "project": project,
        "tags": list(tags),
        "id": MISSING,
        "document": document_id(access_id),
        "source": "a new source",
    }


@pytest.fixture(scope="module", autouse=True)
def _as_principal(world: Deployment) -> None:
    """Add as_principal(statement), which runs it as rag_principal for the session's principal."""
    with world.cluster.superuser(world.name) as connection:
        connection.execute(
            """
            create function rag.as_principal(statement text)
            returns setof jsonb
            language plpgsql
            security definer
            set search_path = rag, pg_temp
            as $$
            begin
                return query execute 'with result as (' || statement || ') select to_jsonb(result) from result';
            end
            $$;
            alter function rag.as_principal(text) owner to rag_principal;
            grant execute on function rag.as_principal(text) to rag_app, rag_publisher;
            """
        )


def as_principal(connection: psycopg.Connection, statement: str) -> list[Any]:
    """The first column of what rag_principal gets."""
    rows = column(connection, "select as_principal(%s)", (statement,))
    return [next(iter(row.values())) for row in rows]


def principal_refused_with(connection: psycopg.Connection, statement: str) -> str | None:
    return refused_with(connection, "select as_principal(%s)", (statement,))


def writable(reach: Reach, role: str) -> frozenset[int]:
    return reach.writes | reach.publishes if role == "rag_publisher" else reach.writes


def role_of(connection: psycopg.Connection) -> str:
    return connection.info.user


every_reach = pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())


# --- rows of access classes -----------------------------------------------------------------------


CLASSES_READ = (
    *("rag_documents", "rag_chunks"),
    *("my_classes()", "my_documents()", "my_chunks()"),
)


@every_reach
@pytest.mark.parametrize("source", CLASSES_READ)
def test_the_service_gets_the_principals_classes(service: psycopg.Connection, source: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        assert sorted(column(service, f"select access_id from {source}")) == sorted(reach.reads)


@every_reach
@pytest.mark.parametrize("function", ["my_document", "my_document_chunks"])
def test_a_document_is_given_to_those_who_read_its_class(
    service: psycopg.Connection, function: str, reach: Reach
) -> None:
    with speaking(service, reach.principal):
        found = {
            access_id
            for number in (*CLASSES, MISSING_CLASS)
            for access_id in column(service, f"select access_id from {function}(%s)", (document_id(number),))
        }
    assert found == reach.reads


@pytest.mark.parametrize(("function", "more"), [("find_source", ""), ("look_at_source", ", null")])
@every_reach
def test_a_source_is_found_by_those_who_read_its_class(
    service: psycopg.Connection, reach: Reach, function: str, more: str
) -> None:
    """And so is the tombstone beside it; an erasure counts for those who write there."""
    statement = f"""
        select document_access_id, generation
        from {function}(%(access)s, %(scope)s, %(user)s, %(project)s, 'text', %(source)s{more})
    """
    documents: set[int] = set()
    buried: dict[int, int] = {}
    with speaking(service, reach.principal):
        for access_id in CLASSES:
            found = service.execute(statement, new_row(access_id) | {"source": "the source"}).fetchall()
            documents |= {row[0] for row in found if row[0] is not None}
            assert {row[1] for row in found} == {0}
            for source in ("a deleted source", "an erased source", "an unknown source"):
                ((document, buried[access_id, source]),) = service.execute(
                    statement, new_row(access_id) | {"source": source}
                ).fetchall()
                assert document is None
    assert documents == reach.reads
    assert {key for key, generation in buried.items() if generation} == {
        *((access_id, "a deleted source") for access_id in reach.reads),
        *((access_id, "an erased source") for access_id in writable(reach, role_of(service))),
    }
    assert set(buried.values()) <= {0, 1}


@every_reach
@pytest.mark.parametrize("view", ["v_documents", "v_chunks", "v_stale_documents", "v_source_usage"])
def test_views_give_the_principals_classes(service: psycopg.Connection, view: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        found = column(service, sql.SQL("select document_id from {}").format(sql.Identifier(view)))
    assert sorted(found) == sorted(map(document_id, reach.reads))


@every_reach
@pytest.mark.parametrize("table", [table for table in CLASS_TABLES if table != "rag_access_classes"])
def test_rag_principal_reads_for_the_principal_alone(service: psycopg.Connection, table: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        assert sorted(as_principal(service, f"select access_id from {table}")) == sorted(reach.reads)


@every_reach
def test_rag_principal_buries_sources_where_the_principal_writes(service: psycopg.Connection, reach: Reach) -> None:
    allowed = writable(reach, role_of(service))
    with speaking(service, reach.principal):
        states = {
            access_id: (
                principal_refused_with(
                    service, INSERT_TOMBSTONE.format(tenant=new_row(access_id)["tenant"], access=access_id)
                ),
                refused_with(service, "select bury_source(%s, 'text', 'a new source', 'a test')", (access_id,)),
                refused_with(service, "select bury_source(%s, 'text', 'a deleted source', 'a test')", (access_id,)),
                refused_with(service, CLOSE, (access_id, "a deleted source")),
                refused_with(service, CLOSE, (access_id, "a new source")),
            )
            for access_id in (*CLASSES, MISSING_CLASS)
        }
        assert sorted(as_principal(service, CHANGE_TOMBSTONES)) == sorted(allowed)
    assert states == {access_id: (None,) * 5 if access_id in allowed else ("42501",) * 5 for access_id in states}


@every_reach
@pytest.mark.parametrize("table", CHANGES)
def test_update_reaches_the_writable_classes(service: psycopg.Connection, table: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        changed = column(service, CHANGES[table])
    assert sorted(changed) == sorted(writable(reach, role_of(service)))


@every_reach
@pytest.mark.parametrize("table", REMOVALS)
def test_delete_reaches_the_writable_classes(service: psycopg.Connection, table: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        removed = column(service, REMOVALS[table])
    assert sorted(removed) == sorted(writable(reach, role_of(service)))


@every_reach
@pytest.mark.parametrize("table", INSERTS)
def test_insert_reaches_the_writable_classes(service: psycopg.Connection, table: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        states = {
            access_id: refused_with(service, INSERTS[table], new_row(access_id))
            for access_id in (*CLASSES, MISSING_CLASS)
        }
    allowed = writable(reach, role_of(service))
    assert states == {access_id: None if access_id in allowed else "42501" for access_id in states}


@pytest.mark.parametrize("access_id", [1, 2, 5, 8, 9, 12])
@pytest.mark.parametrize(
    "statement",
    [
        "update rag_documents set title = 'taken' where tenant_id = %(tenant)s and id = %(id)s",
        "delete from rag_documents where tenant_id = %(tenant)s and id = %(id)s",
        "delete from rag_chunks where tenant_id = %(tenant)s and document_id = %(id)s",
    ],
)
def test_a_foreign_row_that_is_named_is_not_there(app: psycopg.Connection, statement: str, access_id: int) -> None:
    parameters = {"tenant": tenant_of(access_id), "access": access_id, "id": document_id(access_id)}
    with speaking(app, USER_1):
        assert app.execute(statement, parameters).rowcount == 0


def test_a_row_cannot_be_written_into_another_tenant_with_ones_own_class(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        for statement in INSERTS.values():
            assert refused_with(app, statement, new_row(3) | {"tenant": "t2"}) == "42501"


IMMOVABLE = ("tenant_id", "access_id", "id", "document_id", "query_id", "scope", "user_id", "project_id", "tags")
# How far an analyst sees is the operator's to say.
DECIDED_BY_OPERATORS = ["rag_analysts.tags"]


@pytest.mark.parametrize(
    "role",
    [
        *("rag_app", "rag_publisher", "rag_operator", "rag_search", "rag_principal", "rag_steward", "rag_embedder"),
        *("rag_analyst", "rag_migrator", "rag_worker", "rag_queue"),
    ],
)
def test_nobody_may_update_what_decides_access(superuser: psycopg.Connection, role: str) -> None:
    allowed = column(
        superuser,
        """
        select relation.relname || '.' || attribute.attname
        from pg_class as relation
        join pg_attribute as attribute on attribute.attrelid = relation.oid
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'v')
            and attribute.attname = any(%s)
            and has_column_privilege(%s, relation.oid, attribute.attnum, 'update')
        """,
        (list(IMMOVABLE), role),
    )
    assert allowed == (DECIDED_BY_OPERATORS if role == "rag_operator" else [])


@pytest.mark.parametrize("table", ["rag_documents", "rag_chunks", "rag_tombstones", "rag_access_classes"])
@pytest.mark.parametrize("assignment", ["tenant_id = tenant_id", "access_id = 3"])
def test_moving_ones_own_row_is_refused(service: psycopg.Connection, table: str, assignment: str) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, f"update {table} set {assignment} where access_id = 3") == "42501"


UNREAD = (
    *("rag_access_classes", "rag_project_members", "rag_tombstones", "rag_query_logs", "rag_query_log_chunks"),
    *("rag_signing_keys", "rag_analysts", "rag_service_keys", "rag_assertions", "rag_retractions", "rag_erasures"),
    *("rag_class_indexes", "rag_class_languages", "rag_class_lexemes"),
    *("rag_feedback", "rag_tags", "rag_prompts"),
    *("rag_limits", "rag_rate_buckets", "rag_usage"),
    *("rag_models", "rag_synchronisations"),
    *("rag_jobs", "rag_claims"),
    *("rag_conversation_messages", "rag_conversation_summaries"),
)


@pytest.mark.parametrize(
    "statement",
    [
        *(f"select {name} from rag_documents" for name in ("title", "body", "tags", "user_id", "source_id")),
        *(f"select {name} from rag_chunks" for name in ("chunk_text", "embedding", "tsv", "lexeme_count")),
        *(f"select count(*) from {table}" for table in UNREAD),
        "insert into rag_documents default values returning title",
        "update rag_documents set title = title",
        "delete from rag_documents where title = 'A record'",
        "delete from rag_chunks where chunk_text = 'a text'",
        "update rag_chunks set chunk_text = 'changed'",
        "insert into rag_tombstones values ('t1', 3, sha256(''), 1, 'a test')",
        "update rag_tombstones set generation = 2",
        "delete from rag_tombstones",
        "insert into rag_synchronisations default values",
        "insert into rag_conversation_messages default values",
        "update rag_conversation_messages set summarised_at = now()",
        "delete from rag_conversation_messages",
        "insert into rag_conversation_summaries default values",
        "update rag_conversation_summaries set summary_text = 'x'",
        "delete from rag_conversation_summaries",
        "update rag_synchronisations set files = 2",
        "delete from rag_synchronisations",
        "delete from rag_query_logs",
        "update rag_query_logs set query_text = 'changed'",
        "delete from rag_query_log_chunks",
        "update rag_query_log_chunks set cited = true",
        "insert into rag_access_classes (tenant_id, scope, tags, tags_digest) values ('t1', 'public', '{hr}', '')",
        "update rag_access_classes set tags = '{public}'",
        "delete from rag_access_classes",
        "insert into rag_project_members values ('t1', 1, 'alpha', 2, true)",
        "update rag_project_members set may_write = true",
        "delete from rag_project_members",
        "insert into rag_analysts values ('t1', 'rag_app')",
        "insert into rag_service_keys default values",
        "insert into rag_signing_keys values ('mine', '', '')",
        "insert into rag_erasures default values",
        "insert into rag_assertions (tenant_id, id, key_id, user_id, tags, action)"
        " values ('t1', gen_random_uuid(), 'a', 1, '{}', 'query')",
        "insert into rag_assertions (tenant_id, key_id, user_id, tags, action, created_at)"
        " values ('t1', 'a', 1, '{}', 'query', now())",
        "update rag_assertions set action = 'delete'",
        "delete from rag_assertions",
        "insert into rag_retractions (tenant_id, id, user_id, action, reason, sources, documents, chunks)"
        " values ('t1', gen_random_uuid(), 1, 'reinstate', 'x', 0, 0, 0)",
        "update rag_retractions set reason = 'another'",
        "delete from rag_retractions",
        "update rag_documents set id = gen_random_uuid()",
        "update rag_documents set tags = '{public}'",
        "truncate rag_documents cascade",
    ],
)
def test_commands_that_are_not_granted_are_refused(service: psycopg.Connection, statement: str) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, statement) == "42501"


def test_row_security_cannot_be_switched_off(service: psycopg.Connection) -> None:
    reading = ("rag_documents", "rag_chunks", "my_documents()", "my_chunks()", "my_classes()", "my_queries()")
    with speaking(service, USER_1):
        service.execute("set local row_security = off")
        for source in (*reading, "my_document(gen_random_uuid())", "v_documents", "v_chunks", "search('palisade')"):
            assert refused_with(service, f"select count(*) from {source}") == "42501", source


def test_copy_reads_ones_own_rows_and_writes_none(service: psycopg.Connection) -> None:
    with speaking(service, USER_1), service.cursor() as cursor:
        with cursor.copy("copy rag_chunks (access_id) to stdout") as copied:
            seen = sorted(int(row[0]) for row in copied.rows())
        assert seen == [1, 3, 6, 7, 9, 10]
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            cursor.execute("copy rag_chunks (tenant_id, access_id) from stdin")


def test_a_function_in_the_condition_sees_ones_own_rows_only(superuser: psycopg.Connection) -> None:
    """A cheap leaky function runs before a costly policy unless the policy is a barrier (SECURITY.md B7)."""
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"grant temporary on database {superuser.info.dbname} to rag_app")
        superuser.execute("set local session authorization rag_app")
        superuser.execute("create temp table seen (body text)")
        superuser.execute(
            "create function pg_temp.leaky(body text) returns boolean language plpgsql cost 0.0001"
            " as $$ begin insert into seen values (body); return true; end $$"
        )
        begin(superuser, USER_1, login="rag_app")
        superuser.execute("select count(*) from my_documents() where pg_temp.leaky(body)")
        superuser.execute("select count(*) from my_chunks() where pg_temp.leaky(chunk_text)")
        superuser.execute("select count(*) from v_chunks where pg_temp.leaky(chunk_text)")
        readable = [1, 3, 6, 7, 9, 10]
        assert sorted(column(superuser, "select body from seen")) == sorted(
            3 * [f"palisade record {WORDS[access_id - 1]}" for access_id in readable]
        )
        superuser.execute("delete from seen")
        superuser.execute("select count(*) from rag_documents where pg_temp.leaky(cast(access_id as text))")
        superuser.execute("select count(*) from rag_chunks where pg_temp.leaky(cast(access_id as text))")
        assert sorted(column(superuser, "select body from seen")) == sorted(2 * [str(number) for number in readable])


# --- keys tell nothing of foreign rows ------------------------------------------------------------


@pytest.mark.parametrize("document", [document_id(5), document_id(1), document_id(12), MISSING])
def test_a_chunk_cannot_be_attached_to_a_foreign_document(app: psycopg.Connection, document: UUID) -> None:
    """The document of user 2, a public one, one of another tenant, and none at all: the same answer."""
    with speaking(app, USER_1):
        with pytest.raises(ForeignKeyViolation) as caught, app.transaction():
            app.execute(INSERT_CHUNK, new_row(3) | {"document": document})
        assert caught.value.diag.message_primary == (
            'insert or update on table "rag_chunks" violates foreign key constraint "rag_chunks_document"'
        )
        assert caught.value.diag.message_detail == 'Key is not present in table "rag_documents".'


@pytest.mark.parametrize("document", [document_id(5), MISSING])
def test_a_chunk_cannot_be_put_into_a_foreign_class(app: psycopg.Connection, document: UUID) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, INSERT_CHUNK, new_row(5) | {"document": document}) == "42501"


@pytest.mark.parametrize("identifier", [document_id(5), document_id(1), document_id(12), MISSING])
def test_an_id_that_is_taken_elsewhere_is_as_free_as_any(app: psycopg.Connection, identifier: UUID) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, INSERT_DOCUMENT, new_row(3) | {"id": identifier}) is None


@pytest.mark.parametrize("source", ["the source", "an unknown source"])
@pytest.mark.parametrize(
    "arbiter",
    [
        "on conflict do nothing",
        "on conflict (tenant_id, access_id, id) do nothing",
        "on conflict (tenant_id, access_id, id) do update set title = 'taken'",
        "on conflict on constraint rag_documents_pkey do update set title = 'taken'",
    ],
)
def test_on_conflict_does_not_tell_whether_somebody_else_has_a_source(
    app: psycopg.Connection, arbiter: str, source: str
) -> None:
    """In a foreign class both are refused; in one's own (7, emptied) both are new, though class 5 has one."""
    with speaking(app, USER_1):
        app.execute("delete from rag_documents where access_id = 7")
        assert refused_with(app, INSERT_DOCUMENT + arbiter, new_row(5) | {"source": source}) == "42501"
        same_id = new_row(5) | {"source": source, "id": document_id(5)}
        assert refused_with(app, INSERT_DOCUMENT + arbiter, same_id) == "42501"
        with app.transaction(force_rollback=True):
            assert app.execute(INSERT_DOCUMENT + arbiter, new_row(7) | {"source": source}).rowcount == 1
        with app.transaction(force_rollback=True):
            assert app.execute(INSERT_DOCUMENT + arbiter, new_row(7) | {"id": same_id["id"]}).rowcount == 1


@pytest.mark.parametrize(
    "arbiter", ["(tenant_id, access_id, source_type, source_id)", "on constraint rag_documents_source"]
)
def test_the_key_of_sources_is_no_arbiter(app: psycopg.Connection, arbiter: str) -> None:
    """A conflict with it would be told apart from none; the service asks find_source() instead."""
    with speaking(app, USER_1):
        for access_id in (3, 5, 7):
            for action in ("do nothing", "do update set title = 'second'"):
                statement = f"{INSERT_DOCUMENT} on conflict {arbiter} {action}"
                assert refused_with(app, statement, new_row(access_id)) == "42501"


def test_a_conflicting_row_of_ones_own_is_updated_in_place(app: psycopg.Connection) -> None:
    arbiter = " on conflict (tenant_id, access_id, id) do update set title = 'second'"
    with speaking(app, USER_1):
        app.execute(INSERT_DOCUMENT + arbiter, new_row(3) | {"id": document_id(3)})
        assert app.execute("select id, title from my_documents() where access_id = 3").fetchall() == [
            (document_id(3), "second")
        ]


def test_a_public_row_that_conflicts_is_not_updated_by_the_app(app: psycopg.Connection) -> None:
    arbiter = " on conflict (tenant_id, access_id, id) do update set title = 'poison'"
    with speaking(app, USER_1):
        assert refused_with(app, INSERT_DOCUMENT + arbiter, new_row(1) | {"id": document_id(1)}) == "42501"


# --- tombstones -----------------------------------------------------------------------------------


def test_a_tombstone_is_raised_and_never_removed(service: psycopg.Connection) -> None:
    with speaking(service, USER_1):
        for generation in (2, 3):
            raised = column(service, "select bury_source(3, 'text', 'a deleted source', 'a test')")
            assert raised == [generation]
        removal = "delete from rag_tombstones where access_id = 3 returning access_id"
        assert principal_refused_with(service, removal) == "42501"


# --- synchronisations -----------------------------------------------------------------------------

NOTE = "select note_synchronisation(%s, 'handbook', 'abc', 3, 1, 0, 2, %s)"


@pytest.mark.parametrize("name", REACHES)
def test_what_came_of_a_synchronisation_is_read_with_its_documents(service: psycopg.Connection, name: str) -> None:
    with speaking(service, REACHES[name].principal):
        seen = column(service, "select source from my_synchronisations()")
        assert set(seen) == {f"source-{access_id}" for access_id in REACHES[name].reads}
        assert set(as_principal(service, "select access_id from rag_synchronisations")) == REACHES[name].reads


@pytest.mark.parametrize("name", REACHES)
def test_it_is_written_by_whoever_writes_the_documents(service: psycopg.Connection, name: str) -> None:
    reach = REACHES[name]
    publisher = service.info.user == "rag_publisher"
    writable = reach.writes | (reach.publishes if publisher else frozenset())
    for access_id in (*CLASSES, 777):
        with speaking(service, reach.principal):
            refused = refused_with(service, NOTE, (access_id, 0))
            assert refused == (None if access_id in writable else "42501"), access_id


def test_the_last_success_stays_known_and_there_is_one_row_for_each_source(service: psycopg.Connection) -> None:
    with speaking(service, USER_1):
        assert column(service, NOTE, (3, 2)) == [None]
        (succeeded,) = column(service, NOTE, (3, 0))
        assert succeeded is not None
        assert column(service, NOTE, (3, 1)) == [succeeded]
        found = service.execute(
            "select version, files, written, removed, unchanged, failed, succeeded_at, finished_at > succeeded_at"
            " from my_synchronisations() where source = 'handbook'"
        ).fetchall()
        assert found == [("abc", 3, 1, 0, 2, 1, succeeded, True)]


def test_a_source_of_new_tags_is_shown_once(service: psycopg.Connection) -> None:
    with speaking(service, REACHES["user 1, both tags"].principal):
        for access_id, tags in ((3, ["public"]), (4, ["hr"])):
            service.execute(NOTE, (access_id, 0))
            assert column(service, "select tags from my_synchronisations() where source = 'handbook'") == [tags]


# --- conversations --------------------------------------------------------------------------------

POST = "select id from post_message(%s, 'the thread', 'user', 'hello', 1, null, null)"
ADD = "select add_summary(%(said)s, %(access)s, %(id)s, 'the thread', 'a summary', array[%(said)s]::uuid[], 'a model')"


def own_of(reach: Reach, access_ids: frozenset[int]) -> set[int]:
    """Of classes those that the principal owns."""
    user_id = reach.principal.user_id
    return {access_id for access_id in access_ids if user_id is not None and CLASSES[access_id][2] == user_id}


@pytest.mark.parametrize("name", REACHES)
def test_a_conversation_is_read_by_its_owner_alone(service: psycopg.Connection, name: str) -> None:
    """Not by the members of a project that is shared, who read its documents."""
    reach = REACHES[name]
    own = own_of(reach, reach.reads)
    with speaking(service, reach.principal):
        for table in ("rag_conversation_messages", "rag_conversation_summaries"):
            assert set(as_principal(service, f"select access_id from {table}")) == own, table
        messages, summaries = set(), set()
        for project in (None, *{project for _, _, _, project, _ in CLASSES.values() if project}):
            messages |= set(column(service, "select id from my_messages(%s, 'the thread', 0, 100)", (project,)))
            summaries |= set(column(service, "select document_id from my_summaries(%s, 'the thread', 100)", (project,)))
        assert messages == {said_id(access_id) for access_id in own}
        assert summaries == {document_id(access_id) for access_id in own}


@pytest.mark.parametrize("name", REACHES)
def test_a_conversation_is_carried_on_by_its_owner_alone(service: psycopg.Connection, name: str) -> None:
    reach = REACHES[name]
    own = own_of(reach, reach.writes)
    for access_id in (*CLASSES, 777):
        with speaking(service, reach.principal):
            assert refused_with(service, POST, (access_id,)) == (None if access_id in own else "42501"), access_id
        with speaking(service, reach.principal):
            claimed = column(service, "select claim_messages(%s, 'the thread', %s, 100)", (access_id, MISSING))
            assert claimed == [1 if access_id in own else 0], access_id
        # Nothing of the row is returned, which a policy of reading would refuse as well.
        insert = (
            "insert into rag_conversation_messages (tenant_id, access_id, user_id, thread_id, number, role, content,"
            f" tokens) values ('{reach.principal.tenant_id}', {access_id}, {{user}}, 'x', 1, 'user', 'x', 1)"
            " returning 1"
        )
        with speaking(service, reach.principal):
            statement = insert.format(user=reach.principal.user_id or 1)
            refused = principal_refused_with(service, statement)
            # A member of a project writes its documents, and says nothing in its owner's name.
            writes = access_id in reach.writes | (
                reach.publishes if service.info.user == "rag_publisher" else frozenset()
            )
            assert refused == (None if writes and reach.principal.user_id else "42501"), access_id
            assert principal_refused_with(service, insert.format(user=9)) == "42501"


@pytest.mark.parametrize("name", REACHES)
def test_a_summary_is_kept_by_a_worker_for_its_owner_alone(world: Deployment, name: str) -> None:
    reach = REACHES[name]
    own = own_of(reach, reach.writes)
    with world.connect("rag_worker") as worker:
        worker.execute("set search_path = rag, pg_temp")
        for access_id in (*CLASSES, 777):
            row = {"said": said_id(access_id), "access": access_id, "id": document_id(access_id)}
            with speaking(worker, reach.principal):
                content = column(worker, "select content from claimed_messages(%(said)s)", row)
                assert len(content) == (access_id in own), access_id
            with speaking(worker, reach.principal):
                assert refused_with(worker, ADD, row) == (None if access_id in own else "42501"), access_id


def test_a_message_is_marked_once_and_by_the_job_that_it_was_given_to(world: Deployment) -> None:
    row = {"said": said_id(3), "access": 3, "id": document_id(3)}
    with world.connect("rag_worker") as worker, speaking(worker, USER_1):
        worker.execute("set search_path = rag, pg_temp")
        assert refused_with(worker, ADD, row | {"access": 4}) == "42501"
        # Of another job, and of another message.
        assert column(worker, ADD.replace("(%(said)s,", "(%(other)s,"), row | {"other": MISSING}) == [0]
        assert column(worker, ADD.replace("[%(said)s]", "[%(other)s]"), row | {"other": MISSING}) == [0]
        assert column(worker, ADD, row) == [1]
        assert column(worker, "select count(*) from claimed_messages(%(said)s)", row) == [0]
        assert column(worker, ADD, row) == [0]


# --- query logs -----------------------------------------------------------------------------------

LOG_TABLES = ("rag_query_logs", "rag_query_log_chunks", "rag_assertions", "rag_retractions")


def asked(connection: psycopg.Connection) -> dict[str, set[UUID]]:
    """The questions in all that shows them: rag_principal's tables, functions, views."""
    return {
        "rag_query_logs": {UUID(found) for found in as_principal(connection, "select id from rag_query_logs")},
        "rag_query_log_chunks": {
            UUID(found) for found in as_principal(connection, "select query_id from rag_query_log_chunks")
        },
        "my_queries()": set(column(connection, "select query_id from my_queries()")),
        "my_query_chunks()": set(column(connection, "select query_id from my_query_chunks()")),
        "v_empty_results": set(column(connection, "select query_id from v_empty_results")),
    }


@pytest.mark.parametrize(
    ("principal", "readable"),
    [
        (USER_1, {101}),
        (USER_2, {102}),
        (NAMESAKE, {104}),
        (NO_USER, set()),
        (Principal(tenant_id="t1", user_id=3), set()),
        (Principal(tenant_id="t3", user_id=1), set()),
    ],
)
def test_each_user_reads_their_own_questions(
    service: psycopg.Connection, principal: Principal, readable: set[int]
) -> None:
    hits = set(map(query_id, readable))
    empty = {query_id(number + 100) for number in readable}
    with speaking(service, principal):
        assert asked(service) == {
            "rag_query_logs": hits | empty,
            "rag_query_log_chunks": hits,
            "my_queries()": hits | empty,
            "my_query_chunks()": hits,
            "v_empty_results": empty,
        }
        latency = service.execute("select sum(queries) from v_query_latency").fetchall()
        assert latency == [(2 * len(readable) or None,)]


def test_hits_on_documents_that_one_may_no_longer_read_are_not_shown(service: psycopg.Connection) -> None:
    """The question stays; what it got back is as gone as the document."""
    with speaking(service, Principal(tenant_id="t1", user_id=1, tags=("unheld",))):
        assert asked(service)["my_queries()"] == {query_id(101), query_id(201)}
        assert asked(service)["my_query_chunks()"] == set()
        assert column(service, "select count(*) from v_source_usage") == [0]


@pytest.mark.parametrize(
    ("tenant", "user", "state"),
    [
        ("t1", 1, None),
        ("t1", 2, "42501"),
        ("t1", None, "42501"),
        ("t2", 1, "42501"),
        ("t2", None, "42501"),
    ],
)
def test_each_user_logs_under_their_own_name(
    service: psycopg.Connection, tenant: str, user: int | None, state: str | None
) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, log_statement("rag_query_logs"), log_row(MISSING, tenant, user)) == state
        assert refused_with(service, log_statement("rag_assertions"), log_row(MISSING, tenant, user)) == state
        assert refused_with(service, log_statement("rag_retractions"), log_row(MISSING, tenant, user)) == state
        row = log_row(query_id(101), tenant, user, rank=2)
        assert refused_with(service, log_statement("rag_query_log_chunks"), row) == state


def test_a_principal_without_user_logs_and_reads_nothing_back(service: psycopg.Connection) -> None:
    with speaking(service, NO_USER):
        for table in LOG_TABLES:
            service.execute(log_statement(table), log_row(MISSING, "t1", None))
        assert {name: ids for name, ids in asked(service).items() if ids} == {}
        assert refused_with(service, log_statement("rag_query_logs"), log_row(query_id(9), "t1", 1)) == "42501"


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("foreign", sorted(set(QUERIES) - {101}))
def test_results_cannot_be_attached_to_a_foreign_question(app: psycopg.Connection, foreign: int, rank: int) -> None:
    """A foreign question, and a foreign result's rank in it, look like a question that does not exist."""
    statement = log_statement("rag_query_log_chunks")
    with speaking(app, USER_1):
        missing = refused_with(app, statement, log_row(MISSING, "t1", 1, rank=rank))
        assert missing == "23503"
        assert refused_with(app, statement, log_row(query_id(foreign), "t1", 1, rank=rank)) == missing


# --- members --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("principal", "projects"),
    [
        (USER_1, {"gamma", "delta"}),
        (Principal(tenant_id="t1", user_id=1), {"gamma", "delta"}),
        (USER_2, {"gamma", "delta"}),
        (Principal(tenant_id="t1", user_id=3, project_id="*"), set()),
        (NO_USER, set()),
        (NAMESAKE, {"alpha"}),
        (Principal(tenant_id="t2", user_id=2, project_id="*"), {"alpha"}),
        (Principal(tenant_id="t3", user_id=2, project_id="*"), set()),
    ],
)
def test_owner_and_member_see_that_a_project_is_shared(
    service: psycopg.Connection, principal: Principal, projects: set[str]
) -> None:
    with speaking(service, principal):
        assert set(column(service, "select project_id from my_members()")) == projects
        assert set(as_principal(service, "select project_id from rag_project_members")) == projects


def test_members_are_listed_with_what_they_may(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        assert app.execute(
            "select owner_user_id, project_id, member_user_id, may_write from my_members()"
        ).fetchall() == [
            (2, "delta", 1, True),
            (2, "gamma", 1, False),
        ]


def test_the_owner_shares_changes_and_ends_the_sharing_of_a_project(service: psycopg.Connection) -> None:
    listed = "select member_user_id, may_write from my_members() where project_id = 'alpha'"
    with speaking(service, USER_2):
        service.execute("select share_project('alpha', 3, false)")
        service.execute("select share_project('alpha', 4, true)")
        assert service.execute(listed).fetchall() == [(3, False), (4, True)]
        service.execute("select share_project('alpha', 3, true)")
        assert service.execute(listed).fetchall() == [(3, True), (4, True)]
        assert column(service, "select unshare_project('alpha', 3)") == [True]
        assert column(service, "select unshare_project('alpha', 3)") == [False]
        assert service.execute(listed).fetchall() == [(4, True)]


@pytest.mark.parametrize(
    ("principal", "arguments", "state"),
    [
        (USER_1, ("alpha", 1, True), "23514"),  # with oneself
        (USER_1, ("*", 2, True), "23514"),
        (USER_1, ("", 2, True), "23514"),
        (USER_1, ("p" * 129, 2, True), "23514"),
        (USER_1, ("alpha", 0, True), "23514"),
        (USER_1, ("alpha", -2, True), "23514"),
        (USER_1, (None, 2, True), "23502"),
        (USER_1, ("alpha", None, True), "23502"),
        (USER_1, ("alpha", 2, None), "23502"),
        (NO_USER, ("alpha", 2, True), "42501"),
    ],
)
def test_what_cannot_be_shared(
    service: psycopg.Connection, principal: Principal, arguments: tuple[object, ...], state: str
) -> None:
    with speaking(service, principal):
        assert refused_with(service, "select share_project(%s, %s, %s)", arguments) == state


def test_a_member_cannot_share_on_or_raise_their_own_rights(service: psycopg.Connection) -> None:
    """share_project() of a project shared with one shares one's own project of that name, which is another one."""
    with speaking(service, USER_1):
        service.execute("select share_project('gamma', 3, true)")
        assert service.execute(
            "select owner_user_id, member_user_id, may_write from my_members() where project_id = 'gamma'"
        ).fetchall() == [(1, 3, True), (2, 1, False)]
        assert column(service, "select unshare_project('delta', 1)") == [False]
        assert sorted(column(service, "select unnest(my_writable_access_ids())")) == sorted(
            writable(REACHES["user 1, all projects"], role_of(service))
        )


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("insert into rag_project_members values ('t1', 2, 'alpha', 1, true) returning 1", "42501"),
        ("insert into rag_project_members values ('t2', 1, 'alpha', 3, true) returning 1", "42501"),
        ("insert into rag_project_members values ('t1', 1, 'alpha', 3, true) returning 1", None),
        ("update rag_project_members set owner_user_id = 1 returning 1", "42501"),
    ],
)
def test_rag_principal_shares_the_principals_own_projects(
    service: psycopg.Connection, statement: str, state: str | None
) -> None:
    with speaking(service, USER_1):
        assert principal_refused_with(service, statement) == state


def test_rag_principal_changes_and_ends_nobody_elses_sharing(service: psycopg.Connection) -> None:
    """User 1 is a member in two rows and the owner in none; user 2 is the owner in both."""
    changes = (
        "update rag_project_members set may_write = true returning project_id",
        "delete from rag_project_members returning project_id",
    )
    for principal, projects in ((USER_1, set()), (USER_2, {"gamma", "delta"}), (NAMESAKE, {"alpha"}), (NO_USER, set())):
        for change in changes:
            with speaking(service, principal):
                assert set(as_principal(service, change)) == projects


def test_operators_share_projects_in_every_tenant(operator: psycopg.Connection) -> None:
    with operator.transaction(force_rollback=True):
        added = operator.execute("insert into rag_project_members values ('t2', 1, 'alpha', 5, false)")
        assert added.rowcount == 1
        assert operator.execute("update rag_project_members set may_write = true").rowcount == 4
        assert sorted(column(operator, "select tenant_id from rag_project_members where may_write")) == [
            *("t1", "t1", "t2", "t2")
        ]
        assert operator.execute("delete from rag_project_members").rowcount == 4


def test_operators_manage_keys_and_analysts_and_read_records_in_every_tenant(operator: psycopg.Connection) -> None:
    with operator.transaction(force_rollback=True):
        counts = {
            "rag_analysts": 2,
            "rag_service_keys": 2,
            "rag_assertions": 4,
            "rag_retractions": 4,
            "rag_erasures": 2,
            "rag_calibrations": 2,
            "rag_tags": 4,
            "rag_prompts": 2,
            "rag_limits": 2,
            "rag_usage": 2,
        }
        for table, rows in counts.items():
            assert column(operator, f"select count(*) from {table}") == [rows]
            assert set(column(operator, f"select tenant_id from {table}")) == {"t1", "t2"}
        operator.execute("insert into rag_analysts (tenant_id, role_name) values ('t2', 'world_anna')")
        assert operator.execute("update rag_analysts set tags = '{hr}', projects = '{*}'").rowcount == 3
        assert operator.execute("update rag_analysts set user_scope = 'none'").rowcount == 3
        assert operator.execute("delete from rag_analysts").rowcount == 3
        operator.execute(
            "insert into rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, expires_at)"
            " values ('t2', 'cccccccccccccccc', 'an agent', sha256('x'), '{ingest}', '{user}', now())"
        )
        assert operator.execute("update rag_service_keys set revoked_at = now()").rowcount == 3
        operator.execute(
            "insert into rag_calibrations (tenant_id, embedding_model, fusion, language, vector_share, questions,"
            " ndcg_before, ndcg_after) values ('t2', 'test-model', 'score', 'en', 0.5, 100, 0.8, 0.9)"
        )
        assert operator.execute("update rag_calibrations set vector_share = 0.6, min_similarity = 0").rowcount == 3
        assert operator.execute("delete from rag_calibrations").rowcount == 3
        operator.execute("insert into rag_tags (tenant_id, name, owner_user_id) values ('t2', 'it', 5)")
        assert operator.execute("update rag_tags set owner_user_id = 6, owner_email = 'a@b.c'").rowcount == 5
        assert operator.execute("delete from rag_tags").rowcount == 5
        operator.execute("insert into rag_prompts (tenant_id, prompt) values ('t3', 'Be kind.')")
        assert operator.execute("update rag_prompts set prompt = 'Be brief.', replaces = true").rowcount == 3
        assert operator.execute("delete from rag_prompts").rowcount == 3
        operator.execute("insert into rag_limits (tenant_id, documents) values ('', 10)")
        assert operator.execute("update rag_limits set documents = 5, ingests_per_minute = 0").rowcount == 3
        assert operator.execute("delete from rag_limits").rowcount == 3


VIEWS = (
    *("v_documents", "v_chunks", "v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"),
    *("v_routed_queries", "v_feedback"),
)


@pytest.mark.parametrize(
    "statement",
    [
        "update rag_project_members set tenant_id = 't2'",
        "update rag_project_members set member_user_id = 9",
        "update rag_project_members set project_id = 'alpha'",
        "select count(*) from rag_access_classes",
        "select count(*) from rag_documents",
        "select count(*) from rag_chunks",
        "select count(*) from rag_tombstones",
        "select count(*) from rag_synchronisations",
        "select count(*) from rag_conversation_messages",
        "delete from rag_conversation_messages",
        "select count(*) from rag_conversation_summaries",
        "delete from rag_synchronisations",
        "select count(*) from rag_query_logs",
        "select count(*) from rag_query_log_chunks",
        "select count(*) from rag_signing_keys",
        *(f"select count(*) from {view}" for view in VIEWS),
        "delete from rag_documents",
        "delete from rag_assertions",
        "delete from rag_retractions",
        "delete from rag_erasures",
        "delete from rag_service_keys",
        "delete from rag_signing_keys",
        "insert into rag_signing_keys values ('mine', '', '')",
        "insert into rag_assertions default values",
        "insert into rag_retractions default values",
        "insert into rag_erasures default values",
        "update rag_service_keys set tenant_id = 't2'",
        "update rag_service_keys set expires_at = 'infinity'",
        "update rag_service_keys set actions = '{ingest}'",
        "update rag_service_keys set secret_sha256 = sha256('')",
        "update rag_analysts set tenant_id = 't2'",
        "update rag_analysts set role_name = 'somebody'",
        "update rag_calibrations set tenant_id = 't2'",
        "update rag_calibrations set language = 'de'",
        "update rag_tags set tenant_id = 't2'",
        "update rag_tags set name = 'legal'",
        "update rag_prompts set tenant_id = 't2'",
        "select count(*) from rag_feedback",
        "delete from rag_feedback",
        "update rag_limits set tenant_id = 't2'",
        "select count(*) from rag_rate_buckets",
        "delete from rag_rate_buckets",
        "update rag_usage set documents = 0",
        "insert into rag_usage values ('t1', 1, -5, 0)",
        "delete from rag_usage",
    ],
)
def test_operators_do_nothing_else(operator: psycopg.Connection, statement: str) -> None:
    assert refused_with(operator, statement) == "42501"


# --- calibrations ---------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", REACHES)
def test_a_search_reads_the_calibrations_of_its_own_tenant(service: psycopg.Connection, reach: str) -> None:
    principal = REACHES[reach].principal
    with speaking(service, principal):
        tenants = as_principal(service, "select tenant_id from rag_calibrations")
    assert tenants == [tenant for tenant in ("t1", "t2") if tenant == principal.tenant_id]


def test_nobody_reads_a_calibration(service: psycopg.Connection) -> None:
    assert as_principal(service, "select tenant_id from rag_calibrations") == []


@pytest.mark.parametrize(
    "statement",
    [
        "select vector_share from rag_calibrations",
        "update rag_calibrations set vector_share = 1",
        "insert into rag_calibrations default values",
        "delete from rag_calibrations",
    ],
)
def test_the_service_itself_neither_reads_nor_changes_a_calibration(
    service: psycopg.Connection, statement: str
) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, statement) == "42501"
        if not statement.startswith("select"):
            assert principal_refused_with(service, f"{statement} returning 1") == "42501"


# --- feedback -------------------------------------------------------------------------------------

# As rag_principal, for the question that user 1 of t1 asked.
INSERT_FEEDBACK = """
    insert into rag_feedback (tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index, rating)
    values ('{tenant}', {user}, '{query}', 2, {access}, '{document}', 0, 1)
    returning tenant_id
"""


@pytest.mark.parametrize(
    ("principal", "readable"),
    [
        (USER_1, {101}),
        (USER_2, {102}),
        (NAMESAKE, {104}),
        (NO_USER, set()),
        (Principal(tenant_id="t1", user_id=3), set()),
        (Principal(tenant_id="t3", user_id=1), set()),
    ],
)
def test_each_user_reads_and_changes_their_own_feedback(
    service: psycopg.Connection, principal: Principal, readable: set[int]
) -> None:
    expected = set(map(query_id, readable))
    with speaking(service, principal):
        for source in ("my_feedback()", "v_feedback"):
            assert set(column(service, f"select query_id from {source}")) == expected
        for statement in (
            "select query_id from rag_feedback",
            "update rag_feedback set rating = -1 returning query_id",
        ):
            assert {UUID(found) for found in as_principal(service, statement)} == expected


@pytest.mark.parametrize(
    ("tenant", "user", "access", "state"),
    [
        ("t1", 1, 3, None),
        ("t1", 1, 5, "42501"),  # a class of somebody else
        ("t1", 2, 3, "42501"),
        ("t2", 1, 3, "42501"),
        ("t1", 0, 3, "42501"),
    ],
)
def test_each_user_gives_feedback_under_their_own_name_and_in_their_own_classes(
    service: psycopg.Connection, tenant: str, user: int, access: int, state: str | None
) -> None:
    row = {"tenant": tenant, "user": user, "access": access, "query": query_id(101), "document": document_id(3)}
    with speaking(service, USER_1):
        assert principal_refused_with(service, INSERT_FEEDBACK.format(**row)) == state


def given(connection: psycopg.Connection, number: int, access_id: int | None, *, index: int = 0) -> bool:
    """Whether feedback on a question of the world, and on a document in it, is kept."""
    document = None if access_id is None else document_id(access_id)
    statement = "select give_feedback(%s, %s, %s, 1, false)"
    (kept,) = column(connection, statement, (query_id(number), document, index))
    return bool(kept)


def test_feedback_is_for_ones_own_question_and_what_it_returned(service: psycopg.Connection) -> None:
    """Whatever is not theirs is what does not exist: not kept, and no error."""
    with speaking(service, USER_1):
        assert (given(service, 101, None), given(service, 101, 3)) == (True, True)
        others = [(102, None), (102, 5), (103, None), (104, None), (104, 12), (999, None)]
        assert [case for case in others if given(service, *case)] == []
        # Readable, but not what the question got back; and no chunk of that number.
        assert (given(service, 101, 1), given(service, 101, 3, index=1)) == (False, False)
    for stranger in (USER_2, NAMESAKE, NO_USER):
        with speaking(service, stranger):
            assert (given(service, 101, None), given(service, 101, 3)) == (False, False)


def test_feedback_ends_where_reading_ends(service: psycopg.Connection) -> None:
    with speaking(service, Principal(tenant_id="t1", user_id=1, tags=("unheld",))):
        assert given(service, 101, 3) is False
        assert column(service, "select count(*) from my_feedback()") == [0]
        assert column(service, "select count(*) from v_feedback") == [0]


def test_the_last_rating_holds_and_a_click_stays(service: psycopg.Connection) -> None:
    place = (query_id(101), document_id(3))
    with speaking(service, USER_1):
        for rating, clicked in ((1, False), (None, True), (-1, False)):
            service.execute("select give_feedback(%s, %s, 0, %s, %s)", (*place, rating, clicked))
        said = service.execute("select rating, clicked from my_feedback() where document_id is not null").fetchall()
        assert said == [(-1, True)]


@pytest.mark.parametrize("rating", [2, -2, None])
def test_feedback_that_says_nothing_or_too_much_is_refused(service: psycopg.Connection, rating: int | None) -> None:
    with speaking(service, USER_1):
        statement = "select give_feedback(%s, null, null, %s, false)"
        assert refused_with(service, statement, (query_id(101), rating)) == "23514"


def test_what_others_said_counts_in_the_classes_that_the_principal_reads(
    service: psycopg.Connection,
) -> None:
    """The world has a word of one person each in the classes 3, 5 and 12."""
    listed = ", ".join(f"'{document_id(access_id)}'" for access_id in CLASSES)
    support = f"from feedback_support(array[{listed}]::uuid[])"
    for reach in REACHES.values():
        with speaking(service, reach.principal):
            found = as_principal(service, f"select access_id {support}")
        assert set(found) == reach.reads & {3, 5, 12}
    with speaking(service, USER_1):
        assert as_principal(service, f"select support {support}") == [1 / (1 + 3)]


@pytest.mark.parametrize("statement", ["select rating from rag_feedback", "delete from rag_feedback"])
def test_the_service_itself_reads_and_removes_no_feedback(service: psycopg.Connection, statement: str) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, statement) == "42501"
        if statement.startswith("delete"):
            assert principal_refused_with(service, f"{statement} returning rank") == "42501"


# --- owners of tags, and prompts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tenant", "tags", "owners"),
    [
        ("t1", "public", {}),
        ("t1", "hr", {"hr": (2, "hr@t1.example")}),
        ("t1", "hr legal public", {"hr": (2, "hr@t1.example"), "legal": (2, "legal@t1.example")}),
        ("t1", "unheld", {}),
        ("t2", "hr", {"hr": (1, "hr@t2.example")}),
        ("t3", "hr legal", {}),
    ],
)
def test_owners_are_named_to_those_who_hold_the_tag_in_its_tenant(
    service: psycopg.Connection, tenant: str, tags: str, owners: dict[str, tuple[int, str]]
) -> None:
    with speaking(service, Principal(tenant_id=tenant, user_id=1, tags=tuple(tags.split()))):
        found = {
            tag: row
            for tag in ("hr", "legal", "public", "unheld")
            for row in service.execute("select * from my_tag_owner(%s)", (tag,)).fetchall()
        }
        assert found == owners
        assert set(as_principal(service, "select name from rag_tags")) == set(owners)


@pytest.mark.parametrize("tenant", ["t1", "t2", "t3"])
def test_a_tenant_has_its_own_prompt(service: psycopg.Connection, tenant: str) -> None:
    expected = [] if tenant == "t3" else [f"You speak for {tenant}."]
    with speaking(service, Principal(tenant_id=tenant)):
        assert column(service, "select prompt from my_prompt()") == expected
        assert as_principal(service, "select prompt from rag_prompts") == expected


def test_nobody_has_an_owner_or_a_prompt(service: psycopg.Connection) -> None:
    assert column(service, "select count(*) from my_tag_owner('hr')") == [0]
    assert column(service, "select count(*) from my_prompt()") == [0]


@pytest.mark.parametrize("table", ["rag_tags", "rag_prompts", "rag_limits"])
@pytest.mark.parametrize(
    "statement", ["update {} set updated_at = now()", "insert into {} default values", "delete from {}"]
)
def test_nobody_but_operators_says_who_owns_a_tag_what_a_tenant_tells_the_model_and_how_much_it_may(
    service: psycopg.Connection, table: str, statement: str
) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, statement.format(table)) == "42501"
        assert principal_refused_with(service, f"{statement.format(table)} returning tenant_id") == "42501"


@pytest.mark.parametrize(
    ("statement", "state"),
    [
        ("insert into rag_tags (tenant_id, name) values ('t1', 'it')", "23514"),
        ("insert into rag_tags (tenant_id, name, owner_user_id) values ('t1', 'public', 1)", "23514"),
        ("insert into rag_tags (tenant_id, name, owner_user_id) values ('t1', 'it', 0)", "23514"),
        ("insert into rag_tags (tenant_id, name, owner_email) values ('t1', 'it', 'nobody')", "23514"),
        ("insert into rag_tags (tenant_id, name, owner_email) values ('t1', 'it', E'a@b\n.c')", "23514"),
        (
            "insert into rag_tags (tenant_id, name, owner_email) values ('t1', 'it', repeat('a', 250) || '@b.cd')",
            "23514",
        ),
        ("insert into rag_prompts (tenant_id, prompt) values ('t3', '')", "23514"),
        ("insert into rag_prompts (tenant_id, prompt) values ('t3', E' \n')", "23514"),
        ("insert into rag_prompts (tenant_id, prompt) values ('t3', repeat('ä', 4097))", "23514"),
        ("insert into rag_prompts (tenant_id, prompt) values ('t3', repeat('ä', 4096))", None),
        ("insert into rag_limits (tenant_id, documents) values ('t3', -1)", "23514"),
        ("insert into rag_limits (tenant_id, bytes) values ('t3', -1)", "23514"),
        ("insert into rag_limits (tenant_id, queries_per_minute) values ('t3', -1)", "23514"),
        ("insert into rag_limits (tenant_id, query_burst) values ('t3', 1)", "23514"),
        ("insert into rag_limits (tenant_id, queries_per_minute, query_burst) values ('t3', 1, 0)", "23514"),
        ("insert into rag_limits (tenant_id, documents) values (repeat('a', 129), 1)", "23514"),
        ("insert into rag_limits (tenant_id, documents) values ('', 0)", None),
    ],
)
def test_what_operators_cannot_say(operator: psycopg.Connection, statement: str, state: str | None) -> None:
    assert refused_with(operator, statement) == state


# --- the tenant belt ------------------------------------------------------------------------------


@contextmanager
def widened(superuser: psycopg.Connection, table: str, role: str, login: str) -> Iterator[psycopg.Connection]:
    """A table with one more policy that lets a role through, used by user 1 of t2; undone at the end."""
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"create policy careless on {table} to {role} using (true) with check (true)")
        superuser.execute(f"set local session authorization {login}")
        begin(superuser, NAMESAKE, login=login)
        yield superuser


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize("table", ["rag_documents", "rag_chunks"])
def test_no_further_policy_of_the_service_opens_another_tenant(
    superuser: psycopg.Connection, table: str, login: str
) -> None:
    with widened(superuser, table, login, login):
        assert sorted(column(superuser, f"select access_id from {table}")) == [11, 12, 13]
        assert sorted(column(superuser, REMOVALS[table])) == [11, 12, 13]
        if table in CHANGES:
            assert sorted(column(superuser, CHANGES[table])) == []
        assert refused_with(superuser, INSERTS[table], new_row(3)) == "42501"


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
def test_no_further_policy_of_the_service_changes_another_tenant(superuser: psycopg.Connection, login: str) -> None:
    with widened(superuser, "rag_documents", login, login):
        assert sorted(column(superuser, CHANGES["rag_documents"])) == [11, 12, 13]


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize("table", LOG_TABLES)
def test_no_further_policy_of_the_service_writes_down_for_another_tenant(
    superuser: psycopg.Connection, table: str, login: str
) -> None:
    with widened(superuser, table, login, login):
        assert refused_with(superuser, log_statement(table), log_row(query_id(101), "t1", 1, rank=2)) == "42501"
        assert refused_with(superuser, log_statement(table), log_row(MISSING, "t2", 2, rank=2)) in (None, "23503")


PRINCIPAL_BELTS: Mapping[str, tuple[str, ...]] = {
    "rag_calibrations": (),
    "rag_feedback": ("update rag_feedback set rating = 0 returning tenant_id",),
    "rag_tags": (),
    "rag_prompts": (),
    "rag_jobs": ("update rag_jobs set status = 'cancelled' returning tenant_id",),
    "rag_claims": (
        "update rag_claims set expires_at = now() returning tenant_id",
        "delete from rag_claims returning tenant_id",
    ),
    "rag_documents": (),
    "rag_chunks": (),
    "rag_tombstones": (CHANGE_TOMBSTONES.replace("access_id, generation", "tenant_id"),),
    "rag_synchronisations": ("update rag_synchronisations set files = 2 returning tenant_id",),
    "rag_conversation_messages": ("update rag_conversation_messages set summarised_at = now() returning tenant_id",),
    "rag_conversation_summaries": (),
    "rag_query_logs": (),
    "rag_query_log_chunks": (),
    "rag_project_members": (
        "update rag_project_members set may_write = true returning tenant_id",
        "delete from rag_project_members returning tenant_id",
    ),
}


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize("table", PRINCIPAL_BELTS)
def test_no_further_policy_of_rag_principal_opens_another_tenant(
    superuser: psycopg.Connection, table: str, login: str
) -> None:
    with widened(superuser, table, "rag_principal", login):
        for statement in (f"select tenant_id from {table}", *PRINCIPAL_BELTS[table]):
            assert set(as_principal(superuser, statement)) == {"t2"}, statement
        if table == "rag_tombstones":
            statement = INSERT_TOMBSTONE.format(tenant="t1", access=3)
            assert principal_refused_with(superuser, statement) == "42501"
        if table == "rag_project_members":
            statement = "insert into rag_project_members values ('t1', 1, 'alpha', 3, true) returning 1"
            assert principal_refused_with(superuser, statement) == "42501"


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
def test_nobody_sees_nothing_even_through_a_further_policy(superuser: psycopg.Connection, login: str) -> None:
    with superuser.transaction(force_rollback=True):
        for table in PRINCIPAL_BELTS:
            superuser.execute(f"create policy careless on {table} for select to rag_principal, {login} using (true)")
        superuser.execute(f"set local session authorization {login}")
        for table in PRINCIPAL_BELTS:
            assert as_principal(superuser, f"select tenant_id from {table}") == []
        for table in ("rag_documents", "rag_chunks"):
            assert column(superuser, f"select count(*) from {table}") == [0]


# --- nothing is forgotten -------------------------------------------------------------------------

ALL = ("SELECT", "INSERT", "UPDATE", "DELETE")
SERVICE_POLICIES = {
    "rag_documents": ALL,
    "rag_chunks": ("SELECT", "INSERT", "DELETE"),
    **dict.fromkeys(LOG_TABLES, ("INSERT",)),
}
PRINCIPAL_POLICIES = {
    "rag_documents": ("SELECT",),
    "rag_chunks": ("SELECT",),
    "rag_tombstones": ("SELECT", "INSERT", "UPDATE"),
    "rag_synchronisations": ("SELECT", "INSERT", "UPDATE"),
    "rag_query_logs": ("SELECT",),
    "rag_query_log_chunks": ("SELECT",),
    "rag_project_members": ALL,
    "rag_calibrations": ("SELECT",),
    "rag_feedback": ("SELECT", "INSERT", "UPDATE"),
    "rag_tags": ("SELECT",),
    "rag_prompts": ("SELECT",),
    "rag_jobs": ("SELECT", "INSERT", "UPDATE"),
    "rag_claims": ALL,
    "rag_conversation_messages": ("SELECT", "INSERT", "UPDATE"),
    "rag_conversation_summaries": ("SELECT", "INSERT"),
}
WORKER_POLICIES = {"rag_documents": ALL, "rag_chunks": ("SELECT", "INSERT", "DELETE")}
POLICIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "rag_app": SERVICE_POLICIES,
    "rag_publisher": SERVICE_POLICIES,
    "rag_worker": WORKER_POLICIES,
    "rag_queue": {"rag_jobs": ("SELECT", "UPDATE", "DELETE"), "rag_claims": ("SELECT", "DELETE")},
    "rag_principal": PRINCIPAL_POLICIES | {"rag_erasures": ("SELECT",), "rag_models": ("SELECT",)},
    "rag_embedder": {
        "rag_access_classes": ("SELECT",),
        "rag_documents": ("SELECT",),
        "rag_chunks": ("SELECT", "UPDATE"),
        "rag_class_indexes": ("SELECT", "UPDATE"),
        "rag_models": ALL,
    },
    "rag_search": {
        "rag_access_classes": ("SELECT", "INSERT"),
        "rag_project_members": ("SELECT",),
        "rag_documents": ("SELECT",),
        "rag_chunks": ("SELECT",),
        "rag_signing_keys": ("SELECT",),
        "rag_analysts": ("SELECT",),
        "rag_service_keys": ("SELECT",),
        "rag_feedback": ("SELECT",),
        "rag_limits": ("SELECT",),
        "rag_rate_buckets": ("SELECT", "INSERT", "UPDATE"),
        "rag_usage": ("SELECT", "INSERT", "UPDATE"),
        "rag_class_indexes": ALL,
        "rag_class_languages": ("SELECT", "INSERT", "DELETE"),
        "rag_class_lexemes": ("SELECT", "INSERT", "DELETE"),
    },
    "rag_operator": {
        "rag_project_members": ALL,
        "rag_analysts": ALL,
        "rag_service_keys": ("SELECT", "INSERT", "UPDATE"),
        "rag_calibrations": ALL,
        "rag_tags": ALL,
        "rag_prompts": ALL,
        "rag_limits": ALL,
        "rag_usage": ("SELECT",),
        "rag_assertions": ("SELECT",),
        "rag_retractions": ("SELECT",),
        "rag_erasures": ("SELECT",),
    },
    "rag_steward": {
        "rag_access_classes": ("SELECT", "DELETE"),
        "rag_project_members": ("SELECT", "DELETE"),
        "rag_documents": ("SELECT", "DELETE"),
        "rag_chunks": ("SELECT",),
        "rag_tombstones": ("SELECT", "DELETE"),
        "rag_synchronisations": ("SELECT", "DELETE"),
        "rag_erasures": ("SELECT", "INSERT", "DELETE"),
        "rag_query_logs": ("SELECT", "DELETE"),
        "rag_query_log_chunks": ("SELECT", "DELETE"),
        "rag_signing_keys": ("SELECT", "INSERT", "DELETE"),
        "rag_analysts": ("SELECT", "DELETE"),
        "rag_service_keys": ("SELECT", "DELETE"),
        "rag_calibrations": ("SELECT", "DELETE"),
        "rag_feedback": ("SELECT", "DELETE"),
        "rag_tags": ("SELECT", "DELETE"),
        "rag_prompts": ("SELECT", "DELETE"),
        "rag_limits": ("SELECT", "DELETE"),
        "rag_rate_buckets": ("SELECT", "DELETE"),
        "rag_usage": ALL,
        "rag_assertions": ("SELECT", "DELETE"),
        "rag_retractions": ("SELECT", "DELETE"),
        "rag_jobs": ("SELECT", "DELETE"),
        "rag_claims": ("SELECT", "DELETE"),
        "rag_conversation_messages": ("SELECT", "DELETE"),
        "rag_conversation_summaries": ("SELECT",),
    },
}
BELTS = {
    "rag_app": SERVICE_POLICIES,
    "rag_publisher": SERVICE_POLICIES,
    "rag_worker": WORKER_POLICIES,
    "rag_principal": PRINCIPAL_POLICIES,
}


@pytest.mark.parametrize(("permissive", "expected"), [("PERMISSIVE", POLICIES), ("RESTRICTIVE", BELTS)])
def test_the_policies_are_those_that_this_file_tests(
    superuser: psycopg.Connection, permissive: str, expected: Mapping[str, Mapping[str, tuple[str, ...]]]
) -> None:
    """One for each command and role, and one belt."""
    found = superuser.execute(
        "select unnest(roles)::text, tablename, cmd from pg_policies where schemaname = 'rag' and permissive = %s",
        (permissive,),
    ).fetchall()
    assert sorted(found) == sorted(
        (role, table, command)
        for role, tables in expected.items()
        for table, commands in tables.items()
        for command in commands
    )


def test_a_world_without_rows_for_a_policy_would_prove_nothing(superuser: psycopg.Connection) -> None:
    for table in protected_tables(superuser):
        if table not in ("rag_models", "rag_signing_keys"):
            assert set(column(superuser, f"select tenant_id from rag.{table}")) == {"t1", "t2"}, table


# --- what a writer may not say ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "lie",
    [
        {"scope": "public", "user": None},
        {"user": 2},
        {"scope": "project", "project": "alpha"},
        {"tags": ["hr", "public"]},
    ],
)
def test_a_document_cannot_claim_another_scope_owner_or_tags_than_its_class(
    app: psycopg.Connection, lie: dict[str, object]
) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, INSERT_DOCUMENT, new_row(3) | lie) == "42501"
        assert refused_with(app, INSERT_DOCUMENT, new_row(3)) is None


@pytest.mark.parametrize(
    "change",
    [
        "update rag_documents set language = 'a1' where access_id = 3",
        "update rag_documents set language = 'english' where access_id = 3",
    ],
)
def test_values_that_would_hurt_other_readers_are_refused(app: psycopg.Connection, change: str) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, change) == "23514"


@pytest.mark.parametrize("generation", ["0", "-5", "9223372036854775807"])
def test_a_tombstone_cannot_be_raised_out_of_reach(app: psycopg.Connection, generation: str) -> None:
    with speaking(app, USER_1):
        change = f"update rag_tombstones set generation = {generation} returning generation"
        assert principal_refused_with(app, change) == "23514"


def test_a_chunk_cannot_claim_tokens_whose_sum_overflows(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        statement = INSERT_CHUNK.replace("'hash', 1, 'words'", "'hash', 2147483647, 'words'")
        assert refused_with(app, statement, new_row(3)) == "23514"


# --- what a plan tells -----------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["rag_documents", "rag_chunks"])
def test_a_plan_never_compares_rows_of_another_tenant_with_the_question(app: psycopg.Connection, table: str) -> None:
    """Comparisons of keys are leakproof and run before a policy that costs more; only the tenant's belt is before."""
    with speaking(app, USER_1):
        for switch in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
            app.execute(f"set local {switch} = off")
        plan = column(
            app,
            f"explain (analyze, costs off, timing off, summary off) select 1 from {table}"
            f" where id >= '{document_id(1)}' and access_id <> 7 and tenant_id <> 't1'",
        )
        filters = [line for line in plan if "Filter:" in line and "id" in line]
    assert filters
    belt = filters[0].index("ANY (ARRAY[")
    assert belt < filters[0].index("(id >=")
    assert belt < filters[0].index("access_id <>")
    assert belt < filters[0].index("tenant_id <>")
