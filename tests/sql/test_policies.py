"""sql/schema/30_policies.sql: each policy lets its insiders through and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    Reach,
    begin,
    column,
    document_id,
    log_row,
    log_statement,
    protected_tables,
    query_id,
    refused_with,
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
INSERT_TOMBSTONE = """
    insert into rag_tombstones (tenant_id, access_id, source_type, source_id, reason)
    values (%(tenant)s, %(access)s, 'text', %(source)s, 'a test')
"""
INSERTS = {"rag_documents": INSERT_DOCUMENT, "rag_chunks": INSERT_CHUNK, "rag_tombstones": INSERT_TOMBSTONE}
CHANGES = {
    "rag_documents": "update rag_documents set title = 'changed' returning access_id",
    "rag_tombstones": "update rag_tombstones set generation = generation + 1 returning access_id",
}
REMOVALS = {
    "rag_documents": "delete from rag_documents returning access_id",
    "rag_chunks": "delete from rag_chunks returning access_id",
}


def new_row(access_id: int) -> dict[str, object]:
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


def writable(reach: Reach, role: str) -> frozenset[int]:
    return reach.writes | reach.publishes if role == "rag_publisher" else reach.writes


def role_of(connection: psycopg.Connection) -> str:
    return connection.info.user


every_reach = pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES.keys())


# --- rows of access classes -----------------------------------------------------------------------


@every_reach
@pytest.mark.parametrize("table", CLASS_TABLES)
def test_select_gives_the_principals_classes(service: psycopg.Connection, table: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        found = column(service, sql.SQL("select access_id from {}").format(sql.Identifier(table)))
    assert sorted(found) == sorted(reach.reads)


@every_reach
@pytest.mark.parametrize("view", ["v_documents", "v_chunks"])
def test_views_give_the_principals_classes(service: psycopg.Connection, view: str, reach: Reach) -> None:
    with speaking(service, reach.principal):
        found = column(service, sql.SQL("select document_id from {}").format(sql.Identifier(view)))
    assert sorted(found) == sorted(map(document_id, reach.reads))


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
        "update rag_tombstones set reason = 'taken' where tenant_id = %(tenant)s and access_id = %(access)s",
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


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator", "rag_search", "rag_analyst"])
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
    assert allowed == []


@pytest.mark.parametrize("table", ["rag_documents", "rag_chunks", "rag_tombstones", "rag_access_classes"])
@pytest.mark.parametrize("assignment", ["tenant_id = tenant_id", "access_id = 3"])
def test_moving_ones_own_row_is_refused(service: psycopg.Connection, table: str, assignment: str) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, f"update {table} set {assignment} where access_id = 3") == "42501"


@pytest.mark.parametrize(
    "statement",
    [
        "update rag_chunks set chunk_text = 'changed'",
        "delete from rag_tombstones",
        "delete from rag_query_logs",
        "update rag_query_logs set query_text = 'changed'",
        "delete from rag_query_log_chunks",
        "update rag_query_log_chunks set cited = true",
        "insert into rag_access_classes (tenant_id, scope, tags, tags_digest) values ('t1', 'public', '{hr}', '')",
        "update rag_access_classes set tags = '{public}'",
        "delete from rag_access_classes",
        "insert into rag_project_members values ('t1', 2, 'alpha', 1, true)",
        "update rag_project_members set may_write = true",
        "delete from rag_project_members",
        "update rag_documents set id = gen_random_uuid()",
        "update rag_documents set tags = '{public}'",
        "truncate rag_documents cascade",
    ],
)
def test_commands_that_are_not_granted_are_refused(service: psycopg.Connection, statement: str) -> None:
    with speaking(service, USER_1):
        assert refused_with(service, statement) == "42501"


def test_row_security_cannot_be_switched_off(service: psycopg.Connection) -> None:
    with speaking(service, USER_1):
        service.execute("set local row_security = off")
        for table in protected_tables(service):
            assert refused_with(service, f"select count(*) from {table}") == "42501"


def test_copy_reads_ones_own_rows_and_writes_none(service: psycopg.Connection) -> None:
    with speaking(service, USER_1), service.cursor() as cursor:
        with cursor.copy("copy rag_chunks (access_id) to stdout") as copied:
            seen = sorted(int(row[0]) for row in copied.rows())
        assert seen == [1, 3, 6, 7, 9, 10]
        with pytest.raises(psycopg.errors.FeatureNotSupported):
            cursor.execute("copy rag_tombstones (tenant_id, access_id, source_type, source_id, reason) from stdin")


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
        begin(superuser, USER_1)
        superuser.execute("select count(*) from rag_documents where pg_temp.leaky(body)")
        superuser.execute("select count(*) from v_chunks where pg_temp.leaky(chunk_text)")
        assert set(column(superuser, "select body from seen")) == {
            "palisade record one",
            "palisade record three",
            "palisade record six",
            "palisade record seven",
            "palisade record nine",
            "palisade record ten",
        }


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
        "on conflict (tenant_id, access_id, source_type, source_id) do nothing",
        "on conflict (tenant_id, access_id, source_type, source_id) do update set title = 'taken'",
        "on conflict (tenant_id, access_id, id) do update set title = 'taken'",
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


@pytest.mark.parametrize("source", ["a deleted source", "an unknown source"])
def test_tombstones_do_not_tell_whether_somebody_else_has_a_source(app: psycopg.Connection, source: str) -> None:
    statement = INSERT_TOMBSTONE + " on conflict (tenant_id, access_id, source_type, source_id) do nothing"
    with speaking(app, USER_1):
        assert refused_with(app, statement, new_row(5) | {"source": source}) == "42501"


def test_a_conflicting_row_of_ones_own_is_updated_in_place(app: psycopg.Connection) -> None:
    arbiter = " on conflict (tenant_id, access_id, source_type, source_id) do update set title = 'second'"
    with speaking(app, USER_1):
        app.execute(INSERT_DOCUMENT + arbiter, new_row(3) | {"source": "the source"})
        assert app.execute("select id, title from rag_documents where access_id = 3").fetchall() == [
            (document_id(3), "second")
        ]


def test_a_public_row_that_conflicts_is_not_updated_by_the_app(app: psycopg.Connection) -> None:
    arbiter = " on conflict (tenant_id, access_id, source_type, source_id) do update set title = 'poison'"
    with speaking(app, USER_1):
        assert refused_with(app, INSERT_DOCUMENT + arbiter, new_row(1) | {"source": "the source"}) == "42501"


# --- tombstones -----------------------------------------------------------------------------------


def test_a_tombstone_is_raised_and_never_removed(service: psycopg.Connection) -> None:
    with speaking(service, USER_1):
        raised = service.execute(
            "update rag_tombstones set generation = generation + 1 where access_id = 3 returning generation"
        ).fetchall()
        assert raised == [(2,)]
        assert refused_with(service, "delete from rag_tombstones where access_id = 3") == "42501"


# --- query logs -----------------------------------------------------------------------------------

LOG_TABLES = {"rag_query_logs": "id", "rag_query_log_chunks": "query_id"}


@pytest.mark.parametrize("table", LOG_TABLES)
@pytest.mark.parametrize(
    ("principal", "readable"),
    [
        (USER_1, {101}),
        (USER_2, {102}),
        (NAMESAKE, {104}),
        (NO_USER, set()),
        (Principal(tenant_id="t1", user_id=3), set()),
        (Principal(tenant_id="t1", user_id=1, tags=("unheld",)), {101}),
    ],
)
def test_each_user_reads_their_own_questions(
    service: psycopg.Connection, table: str, principal: Principal, readable: set[int]
) -> None:
    with speaking(service, principal):
        found = column(service, f"select {LOG_TABLES[table]} from {table}")
    assert sorted(found) == sorted(map(query_id, readable))


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
        row = log_row(query_id(101), tenant, user, rank=2)
        assert refused_with(service, log_statement("rag_query_log_chunks"), row) == state


def test_a_principal_without_user_logs_and_reads_nothing_back(service: psycopg.Connection) -> None:
    with speaking(service, NO_USER):
        service.execute(log_statement("rag_query_logs"), log_row(MISSING, "t1", None))
        service.execute(log_statement("rag_query_log_chunks"), log_row(MISSING, "t1", None))
        assert column(service, "select count(*) from rag_query_logs") == [0]
        assert column(service, "select count(*) from rag_query_log_chunks") == [0]
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
        (NAMESAKE, set()),
        (Principal(tenant_id="t2", user_id=2, project_id="*"), set()),
    ],
)
def test_owner_and_member_see_that_a_project_is_shared(
    service: psycopg.Connection, principal: Principal, projects: set[str]
) -> None:
    with speaking(service, principal):
        assert set(column(service, "select project_id from rag_project_members")) == projects


def test_operators_share_projects_in_every_tenant(operator: psycopg.Connection) -> None:
    with operator.transaction(force_rollback=True):
        added = operator.execute("insert into rag_project_members values ('t2', 1, 'alpha', 5, false)")
        assert added.rowcount == 1
        assert operator.execute("update rag_project_members set may_write = true").rowcount == 3
        assert sorted(column(operator, "select tenant_id from rag_project_members where may_write")) == [
            "t1",
            "t1",
            "t2",
        ]
        assert operator.execute("delete from rag_project_members").rowcount == 3


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
        "select count(*) from rag_query_logs",
        "select count(*) from rag_query_log_chunks",
        "select count(*) from v_documents",
        "select count(*) from v_chunks",
        "delete from rag_documents",
    ],
)
def test_operators_do_nothing_else(operator: psycopg.Connection, statement: str) -> None:
    assert refused_with(operator, statement) == "42501"


# --- the tenant belt ------------------------------------------------------------------------------


@contextmanager
def widened(superuser: psycopg.Connection, table: str, role: str) -> Iterator[psycopg.Connection]:
    """A table with one more policy that lets everything through, seen by user 1 of t2; undone at the end."""
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"create policy careless on {table} to {role} using (true) with check (true)")
        superuser.execute(f"set local session authorization {role}")
        begin(superuser, NAMESAKE)
        yield superuser


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
@pytest.mark.parametrize(
    "table",
    [
        "rag_access_classes",
        "rag_project_members",
        "rag_documents",
        "rag_chunks",
        "rag_tombstones",
        "rag_query_logs",
        "rag_query_log_chunks",
    ],
)
def test_no_further_policy_opens_another_tenant(superuser: psycopg.Connection, table: str, role: str) -> None:
    with widened(superuser, table, role):
        assert set(column(superuser, f"select tenant_id from {table}")) <= {"t2"}
        if table in CHANGES:
            assert sorted(column(superuser, CHANGES[table])) == [11, 12, 13]
        if table in REMOVALS:
            assert sorted(column(superuser, REMOVALS[table])) == [11, 12, 13]
        if table in INSERTS:
            assert refused_with(superuser, INSERTS[table], new_row(3)) == "42501"
        if table in LOG_TABLES:
            row = log_row(query_id(101), "t1", 1, rank=2)
            assert refused_with(superuser, log_statement(table), row) == "42501"


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_nobody_sees_nothing_even_through_a_further_policy(superuser: psycopg.Connection, role: str) -> None:
    tables = protected_tables(superuser)
    with superuser.transaction(force_rollback=True):
        for table in tables:
            superuser.execute(f"create policy careless on {table} for select to {role} using (true)")
        superuser.execute(f"set local session authorization {role}")
        assert [column(superuser, f"select count(*) from {table}") for table in tables] == [[0]] * len(tables)


# --- nothing is forgotten -------------------------------------------------------------------------


def test_the_policies_are_those_that_this_file_tests(superuser: psycopg.Connection) -> None:
    service = {
        *((table, "SELECT") for table in protected_tables(superuser)),
        *((table, "INSERT") for table in (*INSERTS, *LOG_TABLES)),
        *((table, "UPDATE") for table in CHANGES),
        *((table, "DELETE") for table in REMOVALS),
    }
    found = superuser.execute(
        "select tablename, cmd, permissive, array_to_string(array(select unnest(roles) order by 1), ' ')"
        " from pg_policies where schemaname = 'rag'"
    ).fetchall()
    assert sorted(found) == sorted(
        [
            *((table, command, "PERMISSIVE", "rag_app rag_publisher") for table, command in service),
            *((table, command, "RESTRICTIVE", "rag_app rag_publisher") for table, command in service),
            *(
                ("rag_project_members", command, "PERMISSIVE", "rag_operator")
                for command in ("SELECT", "INSERT", "UPDATE", "DELETE")
            ),
            ("rag_access_classes", "SELECT", "PERMISSIVE", "rag_search"),
            ("rag_access_classes", "INSERT", "PERMISSIVE", "rag_search"),
            ("rag_project_members", "SELECT", "PERMISSIVE", "rag_search"),
            ("rag_chunks", "SELECT", "PERMISSIVE", "rag_search"),
        ]
    )


def test_a_world_without_rows_for_a_policy_would_prove_nothing(world: Deployment) -> None:
    with world.cluster.superuser(world.name) as connection:
        for table in protected_tables(connection):
            tenants = set(column(connection, f"select tenant_id from rag.{table}"))
            assert tenants == ({"t1"} if table == "rag_project_members" else {"t1", "t2"})


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
    ("change", "state"),
    [
        ("update rag_tombstones set generation = 9223372036854775807", "23514"),
        ("update rag_tombstones set generation = -5", "23514"),
        ("update rag_documents set language = 'a1'", "23514"),
        ("update rag_documents set language = 'english'", "23514"),
    ],
)
def test_values_that_would_hurt_other_readers_are_refused(app: psycopg.Connection, change: str, state: str) -> None:
    with speaking(app, USER_1):
        assert refused_with(app, change, {}) == state


def test_a_chunk_cannot_claim_tokens_whose_sum_overflows(app: psycopg.Connection) -> None:
    with speaking(app, USER_1):
        statement = INSERT_CHUNK.replace("'hash', 1, 'words'", "'hash', 2147483647, 'words'")
        assert refused_with(app, statement, new_row(3)) == "23514"


# --- what a plan tells -----------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["eleven", "no such word"])
def test_a_plan_never_compares_rows_of_another_tenant_with_the_question(app: psycopg.Connection, word: str) -> None:
    """Text operators are leakproof and run before a policy that costs more; only the tenant's belt is before them."""
    with speaking(app, USER_1):
        for switch in ("enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"):
            app.execute(f"set local {switch} = off")
        # Chunk eleven is the other tenant's; its own rows, which are compared, all end in another word.
        plan = column(
            app,
            f"explain (analyze, costs off, timing off, summary off) select 1 from rag_chunks"
            f" where chunk_text >= '{word}' and chunk_text <= '{word}~' and tenant_id <> 't1'",
        )
        filters = [line for line in plan if "Filter:" in line]
    assert filters
    assert filters[0].index("ANY (ARRAY[") < filters[0].index("chunk_text")


def test_statistics_hold_no_text(superuser: psycopg.Connection) -> None:
    superuser.execute("analyze rag_documents, rag_chunks, rag_tombstones, rag_query_logs")
    found = column(
        superuser,
        """
        select tablename || '.' || attname
        from pg_stats
        where schemaname = 'rag'
            and attname in ('title', 'body', 'chunk_text', 'section', 'source_id', 'source_uri', 'tsv', 'embedding',
                'metadata', 'reason', 'query_text')
        """,
    )
    assert found == []
