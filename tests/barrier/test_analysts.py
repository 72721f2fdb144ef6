"""People with a login of their own, who write SQL themselves: what each setting shows, and what no SQL does."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from tests.barrier.oracle_reading import analyst_logins
from tests.barrier.surface import all_at_once, readings, says_something
from tests.conftest import Deployment
from tests.sql.world import (
    CLASSES,
    QUERIES,
    build,
    column,
    document_id,
    protected_tables,
    query_id,
    refused_with,
    rows_everywhere,
    signature,
)

ANNA = f"anna_{secrets.token_hex(4)}"  # logins are the whole server's
VIEWS = (
    *("v_documents", "v_chunks", "v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"),
    *("v_routed_queries", "v_feedback"),
)
FUNCTIONS = (
    *("my_principal()", "whoami()", "my_classes()", "my_documents()", "my_listed_documents()", "my_chunks()"),
    *("my_queries()", "my_query_chunks()", "my_feedback()"),
)


@pytest.fixture(scope="module")
def site(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """The world of tests/sql/world.py, whose questions have projects and texts here, and Anna's login."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            build(connection)
            connection.execute("update rag.rag_query_logs set query_text = 'asked by ' || user_id")
            for number, project in {101: "alpha", 102: "beta", 103: "*", 201: "alpha", 202: None, 203: "gamma"}.items():
                connection.execute(
                    "update rag.rag_query_logs set project_id = %s where id = %s", (project, query_id(number))
                )
            # What was made of answers; the world has what was made of users' own documents.
            connection.execute(
                "insert into rag.rag_feedback (tenant_id, user_id, query_id, rank, rating)"
                " select tenant_id, user_id, id, 0, 1 from rag.rag_query_logs where user_id > 0"
            )
        with analyst_logins(clone, [ANNA]):
            yield clone


@pytest.fixture(scope="module")
def superuser(site: Deployment) -> Iterator[psycopg.Connection]:
    with site.cluster.superuser(site.name) as connection:
        yield connection


@pytest.fixture(scope="module")
def anna(site: Deployment) -> Iterator[psycopg.Connection]:
    with site.connect(ANNA) as connection:
        connection.execute("set search_path = rag, pg_temp")
        yield connection


Admit = Callable[..., None]


@pytest.fixture
def admit(superuser: psycopg.Connection) -> Iterator[Admit]:
    """`admit(tags=…, projects=…, user_scope=…)` is Anna's only mapping until the end of the test."""

    def admitted(
        *,
        tenant: str = "t1",
        tags: Sequence[str] = ("public",),
        projects: Sequence[str] = (),
        user_scope: str = "metadata",
    ) -> None:
        superuser.execute("delete from rag.rag_analysts where role_name = %s", (ANNA,))
        superuser.execute(
            "insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)"
            " values (%s, %s, %s, %s, %s)",
            (tenant, ANNA, list(tags), list(projects), user_scope),
        )

    yield admitted
    superuser.execute("delete from rag.rag_analysts where role_name = %s", (ANNA,))


# --- what each setting shows ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A row of rag_analysts in t1; the classes that it opens, and those of which it shows that they exist."""

    tags: tuple[str, ...]
    projects: tuple[str, ...]
    user_scope: str
    reads: frozenset[int]
    lists: frozenset[int] = frozenset()


def _setting(tags: str, projects: str, user_scope: str, reads: set[int], lists: set[int] | None = None) -> Setting:
    return Setting(
        tags=tuple(tags.split()),
        projects=tuple(projects.split()),
        user_scope=user_scope,
        reads=frozenset(reads),
        lists=frozenset(lists or set()),
    )


SETTINGS = (
    _setting("public", "", "none", {1}),
    _setting("public", "", "metadata", {1}, {3, 5}),
    _setting("public", "", "text", {1, 3, 5}),
    _setting("public", "alpha", "none", {1, 6, 8}),
    _setting("public", "alpha", "metadata", {1, 6, 8}, {3, 5}),
    _setting("public", "alpha gamma", "text", {1, 3, 5, 6, 8, 9}),
    _setting("public", "*", "none", {1, 6, 7, 8, 9, 10}),
    _setting("public", "*", "metadata", {1, 6, 7, 8, 9, 10}, {3, 5}),
    _setting("public", "* alpha", "text", {1, 3, 5, 6, 7, 8, 9, 10}),
    _setting("hr", "", "none", {2}),
    _setting("hr", "*", "metadata", {2}, {4}),
    _setting("hr", "*", "text", {2, 4}),
    _setting("public hr", "beta", "metadata", {1, 2, 7}, {3, 4, 5}),
    _setting("hr public", "*", "text", {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}),
    _setting("legal", "*", "text", set()),
    _setting("Public PUBLIC %", "*", "text", set()),
    _setting("public", "omega Alpha al% ALPHA", "none", {1}),
)
every_setting = pytest.mark.parametrize(
    "setting", SETTINGS, ids=lambda setting: f"{setting.tags} {setting.projects} {setting.user_scope}"
)


def ids(classes: frozenset[int]) -> list[UUID]:
    return sorted(map(document_id, classes))


@every_setting
def test_an_analyst_reads_these_documents_and_chunks(anna: psycopg.Connection, admit: Admit, setting: Setting) -> None:
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    assert sorted(column(anna, "select unnest(my_access_ids())")) == sorted(setting.reads)
    assert sorted(column(anna, "select access_id from my_classes()")) == sorted(setting.reads)
    assert not any(column(anna, "select may_write from my_classes()"))
    for source, name in {
        "my_documents()": "id",
        "my_chunks()": "document_id",
        "v_chunks": "document_id",
        "search('palisade', top_k => 100)": "document_id",
    }.items():
        assert sorted(column(anna, f"select {name} from {source}")) == ids(setting.reads), source
    for view in ("v_documents", "v_stale_documents", "v_source_usage"):
        assert sorted(column(anna, f"select document_id from {view}")) == ids(setting.reads | setting.lists), view
    assert sorted(column(anna, "select id from my_listed_documents()")) == ids(setting.lists)
    for access_id in CLASSES:
        found = column(anna, "select access_id from my_document(%s)", (document_id(access_id),))
        assert found == ([access_id] if access_id in setting.reads else [])
        mode = column(anna, "select search_mode('test-model', null, array[%s])", (document_id(access_id),))
        assert mode == ["hybrid" if access_id in setting.reads else "none"]


@every_setting
def test_of_a_listed_document_not_a_word_is_shown(anna: psycopg.Connection, admit: Admit, setting: Setting) -> None:
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    said = "title, source_id, source_uri, project_id, domain, metadata, body_characters"
    for view, names in {
        "v_documents": said,
        "v_stale_documents": "title, source_id",
        "v_source_usage": "title, source_id",
    }.items():
        rows = anna.execute(f"select document_id, {names} from {view}").fetchall()
        silent = {row[0] for row in rows if not any(value is not None for value in row[1:])}
        assert silent == set(map(document_id, setting.lists)), view
    listed = anna.execute("select scope, user_id, tags, source_type, language from v_documents where title is null")
    assert sorted(listed) == sorted(
        ("user", CLASSES[access_id][2], list(CLASSES[access_id][4]), "text", "en") for access_id in setting.lists
    )


@every_setting
def test_an_analyst_is_told_who_they_are(anna: psycopg.Connection, admit: Admit, setting: Setting) -> None:
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    assert anna.execute("select * from my_principal()").fetchall() == [
        ("t1", None, None, list(setting.tags), list(setting.projects), setting.user_scope)
    ]
    assert column(anna, "select my_tenant_id()") == ["t1"]
    assert column(anna, "select my_user_id()") == [None]
    found = anna.execute("select distinct tenant_id, user_id, project_id, tags from whoami()").fetchall()
    assert found == [("t1", None, None, list(setting.tags))]
    assert sorted(column(anna, "select access_id from whoami() where access_id is not null")) == sorted(setting.reads)


# Of t1: who asked, project; 201 to 203 found nothing.
ASKED = {
    101: (1, "alpha"),
    102: (2, "beta"),
    103: (0, "*"),
    201: (1, "alpha"),
    202: (2, None),
    203: (0, "gamma"),
}


@every_setting
def test_questions_are_shown_as_far_as_the_setting_goes(
    anna: psycopg.Connection, admit: Admit, setting: Setting
) -> None:
    """All of the tenant's; who asked, of which project and what depends."""
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)

    def shown(number: int) -> tuple[Any, ...]:
        user, project = ASKED[number]
        names_project = project is not None and ("*" in setting.projects or project in setting.projects)
        return (
            query_id(number),
            user if setting.user_scope != "none" else None,
            project if names_project else None,
            f"asked by {user}" if setting.user_scope == "text" else None,
        )

    columns = "query_id, user_id, project_id, query_text"
    assert sorted(anna.execute(f"select {columns} from my_queries()")) == list(map(shown, sorted(ASKED)))
    assert sorted(anna.execute(f"select {columns} from v_empty_results")) == list(map(shown, (201, 202, 203)))
    assert column(anna, "select sum(queries) from v_query_latency") == [len(ASKED)]


@every_setting
def test_hits_are_shown_of_documents_that_are_read(anna: psycopg.Connection, admit: Admit, setting: Setting) -> None:
    """Of the questions 101 to 103 on documents 3, 5 and 1; and not who asked, where questions do not say it."""
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    expected = [
        (query_id(number), user if setting.user_scope != "none" else None, document_id(access_id))
        for number, (tenant, _, access_id) in QUERIES.items()
        for user in [ASKED[number][0] if number in ASKED else None]
        if tenant == "t1" and access_id in setting.reads
    ]
    assert sorted(anna.execute("select query_id, user_id, document_id from my_query_chunks()")) == sorted(expected)
    retrieved = anna.execute("select document_id from v_source_usage where times_retrieved > 0").fetchall()
    assert sorted(row[0] for row in retrieved) == sorted(row[2] for row in expected)


@every_setting
def test_feedback_is_shown_of_answers_and_of_documents_that_are_read(
    anna: psycopg.Connection, admit: Admit, setting: Setting
) -> None:
    """Users 1 and 2 rated all their answers, and documents 3 and 5; who did is not said where questions do not."""
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    said = {(number, None) for number in (101, 102, 201, 202)}
    said |= {(number, access_id) for number, access_id in ((101, 3), (102, 5)) if access_id in setting.reads}
    expected = {
        (
            query_id(number),
            ASKED[number][0] if setting.user_scope != "none" else None,
            None if access_id is None else document_id(access_id),
            1,
        )
        for number, access_id in said
    }
    for source in ("my_feedback()", "v_feedback"):
        found = anna.execute(f"select query_id, user_id, document_id, rating from {source}").fetchall()
        assert set(found) == expected
        assert len(found) == len(expected)


@every_setting
def test_routes_name_the_tags_that_the_analyst_holds(anna: psycopg.Connection, admit: Admit, setting: Setting) -> None:
    """All questions that found something went to the owner of hr."""
    admit(tags=setting.tags, projects=setting.projects, user_scope=setting.user_scope)
    found = anna.execute("select query_id, route_tag from v_routed_queries").fetchall()
    tag = "hr" if "hr" in setting.tags else None
    assert sorted(found) == [(query_id(number), tag) for number in (101, 102, 103)]


def test_the_default_is_what_is_public_and_that_users_have_documents(
    anna: psycopg.Connection, superuser: psycopg.Connection, admit: Admit
) -> None:
    admit()
    superuser.execute("delete from rag.rag_analysts where role_name = %s", (ANNA,))
    superuser.execute("insert into rag.rag_analysts (tenant_id, role_name) values ('t1', %s)", (ANNA,))
    assert column(anna, "select my_access_ids()") == [[1]]
    assert sorted(column(anna, "select document_id from v_documents")) == ids(frozenset({1, 3, 5}))


# --- whom nothing is shown to ---------------------------------------------------------------------


def test_a_login_without_a_mapping_sees_nothing(anna: psycopg.Connection) -> None:
    counts = rows_everywhere(anna)
    assert counts == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)
    told_all = dict(anna.execute(all_at_once(readings(anna))).fetchall())
    assert {name: rows for name, rows in told_all.items() if says_something(rows)} == {}


def test_everything_that_an_analyst_may_ask_says_something_to_one_who_is_mapped(
    anna: psycopg.Connection, admit: Admit
) -> None:
    """So that the test above, and the one in test_forgery.py, speak of something."""
    admit(projects=["*"])
    told_all = dict(anna.execute(all_at_once(readings(anna))).fetchall())
    said = {name.rstrip(" 0123456789") for name, rows in told_all.items() if says_something(rows)}
    asked = {name.rstrip(" 0123456789") for name in told_all}
    assert asked - said == {"my_user_id()"}
    assert asked >= {*VIEWS, *FUNCTIONS, "my_document()", "search()", "search_mode()", "my_access_ids()"}


def test_a_login_in_two_tenants_sees_nothing(
    anna: psycopg.Connection, superuser: psycopg.Connection, admit: Admit
) -> None:
    admit(projects=["*"], user_scope="text")
    assert max(rows_everywhere(anna).values()) > 0
    superuser.execute("insert into rag.rag_analysts (tenant_id, role_name) values ('t2', %s)", (ANNA,))
    assert rows_everywhere(anna) == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)


@pytest.mark.parametrize("transaction", ["read committed", "repeatable read", "serializable"])
def test_a_mapping_that_ends_ends_at_once(
    site: Deployment, superuser: psycopg.Connection, admit: Admit, transaction: str
) -> None:
    """With the next statement, or where a snapshot is held with the next transaction."""
    admit(projects=["*"], user_scope="text")
    with site.connect(ANNA) as anna:
        anna.execute("set search_path = rag, pg_temp")
        for _ in range(8):  # so that plans are kept
            assert anna.execute("select count(*) from my_documents()", prepare=True).fetchone() == (8,)
        with anna.transaction():
            anna.execute(f"set transaction isolation level {transaction}")
            assert anna.execute("select count(*) from my_documents()", prepare=True).fetchone() == (8,)
            superuser.execute("delete from rag.rag_analysts where role_name = %s", (ANNA,))
            if transaction == "read committed":
                assert rows_everywhere(anna) == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)
        assert anna.execute("select count(*) from my_documents()", prepare=True).fetchone() == (0,)
        assert rows_everywhere(anna) == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)


@pytest.mark.parametrize("tenant", ["t2", "t3", "T1", "t1 ", " t1", "t%", "*"])
def test_another_tenant_is_another_tenant(anna: psycopg.Connection, admit: Admit, tenant: str) -> None:
    admit(tenant=tenant, tags=["public", "hr"], projects=["*"], user_scope="text")
    found = set(column(anna, "select id from my_documents()"))
    assert found == ({document_id(11), document_id(12), document_id(13)} if tenant == "t2" else set())
    for view in VIEWS:
        assert set(column(anna, f"select tenant_id from {view}")) <= {tenant}


def test_a_login_is_not_another_one_of_a_like_name(
    site: Deployment, superuser: psycopg.Connection, admit: Admit
) -> None:
    for name in (ANNA.upper(), f"{ANNA} ", f"{ANNA}%", ANNA[:-1]):
        superuser.execute("insert into rag.rag_analysts (tenant_id, role_name) values ('t1', %s)", (name,))
    with site.connect(ANNA) as anna:
        anna.execute("set search_path = rag, pg_temp")
        assert rows_everywhere(anna) == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)
    superuser.execute("delete from rag.rag_analysts where role_name <> all('{world_anna,world_boris}')")


def test_the_login_counts_and_not_the_role(site: Deployment, superuser: psycopg.Connection, admit: Admit) -> None:
    """Somebody who may act as Anna is not her."""
    admit(projects=["*"], user_scope="text")
    other = f"olga_{secrets.token_hex(4)}"
    with analyst_logins(site, [other]):
        superuser.execute(sql.SQL("grant {} to {}").format(sql.Identifier(ANNA), sql.Identifier(other)))
        with site.connect(other) as olga, olga.transaction():
            olga.execute(sql.SQL("set local role {}").format(sql.Identifier(ANNA)))
            olga.execute("set local search_path = rag, pg_temp")
            assert rows_everywhere(olga) == dict.fromkeys((*VIEWS, *FUNCTIONS), 0)
        superuser.execute(sql.SQL("revoke {} from {}").format(sql.Identifier(ANNA), sql.Identifier(other)))


def test_variables_have_no_effect_on_any_view_or_function(anna: psycopg.Connection, admit: Admit) -> None:
    """Set in every way that a person has; what each gives is compared by value."""
    admit(projects=["alpha"], user_scope="none")
    everything = all_at_once(readings(anna))
    named = {"app.tenant_id": "t2", "app.user_id": "1", "app.project_id": "*", "app.tags": '["public","hr"]'}
    with anna.transaction(force_rollback=True):
        without = dict(anna.execute(everything).fetchall())
        for login in (ANNA, "rag_app", "rag_analyst"):
            code = signature(login, "t2", "1", "*", ["public", "hr"])
            for statement in ("select set_config(%s, %s, true)", "select set_config(%s, %s, false)"):
                with anna.transaction(force_rollback=True):
                    for name, value in (named | {"app.signature": code}).items():
                        anna.execute(statement, (name, value))
                    assert dict(anna.execute(everything).fetchall()) == without
    assert says_something(without)


# --- what nobody may do ---------------------------------------------------------------------------

FORBIDDEN = (
    "create table mine (id int)",
    "create table rag.mine (id int)",
    "create table public.mine (id int)",
    "create temporary table mine (id int)",
    "create temporary view mine as select 1",
    "create temporary sequence mine",
    "select 1 as id into temporary mine",
    "create view rag.mine as select 1",
    "create schema mine",
    "create function rag.mine() returns int language sql return 1",
    "create function public.mine() returns int language sql return 1",
    "create function pg_temp.mine() returns int language sql return 1",
    "create type public.mine as (id int)",
    "create domain public.mine as text",
    "create operator public.=== (leftarg = text, rightarg = text, function = texteq)",
    "create role mine",
    "create publication mine for all tables",
    "create statistics public.mine on id, title from rag.rag_documents",
    "create index on rag.rag_documents (title)",
    "create trigger mine after insert on rag.rag_documents execute function suppress_redundant_updates_trigger()",
    "create policy mine on rag.rag_documents using (true)",
    "alter table rag.rag_documents disable row level security",
    "alter view rag.v_documents set (security_invoker = false)",
    "alter function rag.my_documents() immutable",
    "alter role rag_analyst bypassrls",
    "alter role {anna} bypassrls",
    "alter role {anna} superuser",
    "alter role {anna} createrole",
    "grant select on rag.rag_documents to public",
    "grant rag_app to {anna}",
    "drop view rag.v_documents",
    "comment on table rag.rag_documents is 'mine'",
    "vacuum rag.rag_documents",
    "truncate rag.rag_documents",
    "lock table rag.rag_documents in access share mode",
    "lock table rag.rag_documents in access exclusive mode",
    "copy rag.v_documents to '/tmp/mine'",
    "copy rag.v_documents to program 'true'",
    "copy rag.rag_documents to stdout",
    "select pg_read_file('/etc/passwd')",
    "select pg_ls_dir('.')",
    "select lo_import('/etc/passwd')",
    "select pg_terminate_backend(pid) from pg_stat_activity where usename <> session_user",
    "select pg_cancel_backend(pid) from pg_stat_activity where usename <> session_user",
    "set role rag_app",
    "set role rag_search",
    "set role rag_principal",
    "set role postgres",
    "set session authorization rag_app",
    "set session_replication_role = replica",
    "set log_statement = 'all'",
    "set row_security = off; select * from rag.my_documents()",
    "alter system set log_statement = 'all'",
    "load 'auto_explain'",
    "select * from pg_authid",
    "select * from pg_statistic",
    "select * from pg_user_mapping",
    "select * from pg_hba_file_rules",
    "select * from rag.begin_as('t1', 1, null, '{public}', '')",
    "select * from rag.load_service_keys('')",
    "select * from rag.my_document_chunks(gen_random_uuid())",
    "select * from rag.my_members()",
    "select * from rag.my_writable_access_ids()",
    "select rag.share_project('alpha', 2, true)",
    "select rag.access_class('public', null, null, '{public}')",
    "select rag.bury_source(1, 'text', 'x', 'y')",
    "select * from rag.find_source(1, 'public', null, null, 'text', 'x')",
    "select * from rag.look_at_source(1, 'public', null, null, 'text', 'x', null)",
    "select * from rag.derived_documents('{}', '{x}', '{}', true)",
    "select * from rag.retraction_of('public', null, null, 'x', null)",
    "select rag.close_sources('{1}', '{x}', '{null}', array[null]::uuid[], 'y')",
    "select rag.reopen_sources('{x}', '{}', '{}', '{}', '{public}')",
    "select * from rag.class_reads(1, 'public', null, null, '{public}')",
    "select * from rag.keyword_candidates('palisade', null, null, 10)",
    "select rag.narrowed_access_ids(null)",
    "select rag.signature_holds('{}', '')",
    "select * from rag.forget('t1')",
    "select * from rag.count_traces('t1')",
    "select * from rag.explain_access(gen_random_uuid(), 't1')",
    "select rag.add_signing_key()",
)


@pytest.mark.parametrize("statement", FORBIDDEN)
def test_an_analyst_may_not(anna: psycopg.Connection, admit: Admit, statement: str) -> None:
    admit(tags=["public", "hr"], projects=["*"], user_scope="text")
    # 25001: vacuum is refused in a transaction before anything else.
    assert refused_with(anna, statement.replace("{anna}", ANNA)) in ("42501", "25001")


def test_vacuum_passes_tables_of_others_over(anna: psycopg.Connection, superuser: psycopg.Connection) -> None:
    """With a warning and not an error, since it may be asked for all tables at once."""
    statement = "select sum(vacuum_count + analyze_count) from pg_stat_all_tables where schemaname = 'rag'"
    before = column(superuser, statement)
    for command in ("vacuum rag.rag_documents", "analyze rag.rag_documents"):
        anna.execute(command)
    anna.execute("select pg_stat_force_next_flush()")
    assert column(superuser, statement) == before


def test_no_table_is_an_analysts(anna: psycopg.Connection, superuser: psycopg.Connection, admit: Admit) -> None:
    admit(tags=["public", "hr"], projects=["*"], user_scope="text")
    tables = protected_tables(superuser)
    assert len(tables) >= 12
    for table in (*tables, "alembic_version"):
        for statement in (
            f"select count(*) from rag.{table}",
            f"select from rag.{table}",
            f"insert into rag.{table} default values",
            f"delete from rag.{table}",
        ):
            assert refused_with(anna, statement) == "42501", statement
    names = "select attname from pg_attribute where attrelid = 'rag.rag_chunks'::regclass and attnum > 0"
    for name in column(superuser, names):
        assert refused_with(anna, f"select {name} from rag.rag_chunks") == "42501"
        assert refused_with(anna, f"update rag.rag_chunks set {name} = default") == "42501"


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_only_read(anna: psycopg.Connection, admit: Admit, view: str) -> None:
    admit(tags=["public", "hr"], projects=["*"], user_scope="text")
    for statement in (
        f"insert into rag.{view} (tenant_id) values ('t1')",
        f"update rag.{view} set tenant_id = 't2'",
        f"delete from rag.{view}",
        f"merge into rag.{view} as target using (select 1) as source on true when matched then delete",
    ):
        # 55000: a view over functions takes no rows, whoever writes.
        assert refused_with(anna, statement) in ("42501", "55000", "0A000"), statement
    assert refused_with(anna, f"select 1 from rag.{view} for update") in ("42501", "0A000")
