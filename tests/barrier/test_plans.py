"""Whoever writes SQL may EXPLAIN it. What is asked about a value that only rows outside have tells the same as about
one that is nowhere: plan, rows, buffers and error. What is told all the same is listed at the end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psycopg
import pytest
from psycopg import sql

from tests.barrier.oracle_reading import analyst_logins
from tests.barrier.plans import CONDITIONS, INSIDE, NOWHERE, OUTSIDE, USERS, columns, plant, planted, tells_apart, told
from tests.conftest import Deployment, unit_vector
from tests.sql.world import VARIABLES, build, column, signature

VIEWS = (
    *("v_documents", "v_chunks", "v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"),
    *("v_routed_queries", "v_feedback"),
)
RELATIONS = (
    *VIEWS,
    *("my_documents()", "my_listed_documents()", "my_chunks()", "my_queries()", "my_query_chunks()"),
    *("my_classes()", "whoami()", "my_feedback()"),
)

PLAN_MODES = ("force_generic_plan", "force_custom_plan")


@pytest.fixture(scope="module")
def site(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A word inside, and one in four rows outside: of a user, of a user whose documents are listed, of another
    project and of another tenant."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            build(connection)
            for access_id in (20, 3, 21, 22):
                plant(connection, access_id, OUTSIDE)
            plant(connection, 23, INSIDE)
        with clone.cluster.superuser(clone.name) as connection:
            connection.execute("vacuum analyze")
        yield clone


@pytest.fixture(scope="module")
def analyst(site: Deployment) -> Iterator[psycopg.Connection]:
    """Of the tags public and Bordeaux and the project alpha, to whom users' documents are listed."""
    role = f"anna_{secrets.token_hex(4)}"
    with site.cluster.superuser(site.name) as superuser:
        superuser.execute(
            "insert into rag.rag_analysts (tenant_id, role_name, tags, projects)"
            " values ('t1', %s, array['public', %s], '{alpha}')",
            (role, INSIDE),
        )
    with analyst_logins(site, [role]), site.connect(role) as connection:
        connection.execute("set search_path = rag, pg_temp")
        yield connection


@pytest.fixture(scope="module")
def service(site: Deployment) -> Iterator[psycopg.Connection]:
    """rag_app as the owner of the row inside, in all transactions of the session."""
    named = ("t1", str(USERS[INSIDE]), "alpha")
    code = signature("rag_app", *named, ["public", INSIDE], expires=int(time.time()) + 3600)
    with site.connect("rag_app") as connection:
        for name, value in zip(VARIABLES, (*named, f'["public","{INSIDE}"]', code), strict=True):
            connection.execute("select set_config(%s, %s, false)", (name, value))
        assert sorted(column(connection, "select access_id from my_documents()")) == [1, 23]
        yield connection


@pytest.fixture(params=[(reader, mode) for reader in ("analyst", "service") for mode in PLAN_MODES], ids="-".join)
def reader(request: pytest.FixtureRequest) -> psycopg.Connection:
    """Either of them; with auto the first five calls of a function plan anew, and read the catalog for it."""
    name, mode = request.param
    connection: psycopg.Connection = request.getfixturevalue(name)
    connection.execute(sql.SQL("set plan_cache_mode = {}").format(mode))
    return connection


@pytest.fixture(params=["analyst", "service"])
def asker(request: pytest.FixtureRequest) -> psycopg.Connection:
    """Either of them; for what does not depend on the plans inside functions."""
    connection: psycopg.Connection = request.getfixturevalue(request.param)
    connection.execute("set plan_cache_mode = force_generic_plan")
    return connection


@pytest.fixture(params=PLAN_MODES)
def app(request: pytest.FixtureRequest, service: psycopg.Connection) -> psycopg.Connection:
    service.execute(sql.SQL("set plan_cache_mode = {}").format(request.param))
    return service


def who(connection: psycopg.Connection) -> str:
    return "rag_app" if connection.info.user == "rag_app" else "analyst"


@pytest.mark.parametrize("relation", RELATIONS)
def test_explain_says_nothing_of_a_word_outside(
    asker: psycopg.Connection, relation: str, figure: Callable[[str], None]
) -> None:
    """Plan, rows, buffers and error are those of a word that is nowhere."""
    compared, differing = 0, []
    for name, kind in columns(asker, relation):
        for condition in CONDITIONS[kind]:
            statement = f"select count(*) from {relation} where {condition.format(column=name)}"
            if tells_apart(asker, statement, OUTSIDE, NOWHERE):
                differing.append(statement)
            compared += 1
    assert differing == []
    assert compared >= 7
    figure(f"{who(asker)}, {relation}: {compared} conditions on words outside and nowhere: the same plans")


@pytest.mark.parametrize(
    ("relation", "name"),
    [
        *(("v_documents", name) for name in ("title", "source_id", "source_uri", "doc_type", "tags", "metadata")),
        *(("v_chunks", name) for name in ("title", "chunk_text", "section", "token_counter", "embedding_model")),
        ("v_source_usage", "title"),
    ],
)
def test_explain_does_say_something_of_a_word_inside(asker: psycopg.Connection, relation: str, name: str) -> None:
    """So the comparison above can tell two plans apart."""
    kind = dict(columns(asker, relation))[name]
    condition = CONDITIONS[kind][0].format(column=name)
    statement = f"select count(*) from {relation} where {condition}"
    assert tells_apart(asker, statement, INSIDE, NOWHERE)


# Where the row inside is found.
SHOWS_ONE = (
    *(f"select * from v_documents where document_id {operator} {{0}}" for operator in ("=", "<=", ">", "<>")),
    "select * from v_chunks where document_id = {0}",
    "select * from v_chunks where source_id = {0} || ':0'",
    "select * from v_source_usage where document_id = {0}",
    "select * from my_documents() where id = {0}",
    "select * from my_document({0})",
    "select * from my_chunks() where document_id = {0}",
)


@pytest.mark.parametrize(
    "statement",
    [
        *SHOWS_ONE,
        "select * from v_stale_documents where document_id = {0}",
        "select * from my_listed_documents() where id = {0}",
        "select * from my_query_chunks() where document_id = {0}",
        "select search_mode('test-model', null, array[{0}::uuid])",
        "select * from search('palisade', document_ids => array[{0}::uuid])",
        "select * from search('x', scope => 'documents', document_ids => array[{0}::uuid], include_dropped => true)",
    ],
)
def test_explain_says_nothing_of_a_document_outside(reader: psycopg.Connection, statement: str) -> None:
    """Of another user, another project, another tenant; and one that is not there, beside them in every order."""
    for access_id in (20, 21, 22):
        assert not tells_apart(reader, statement, str(planted(access_id)), str(planted(19)))
    if statement in SHOWS_ONE:
        assert tells_apart(reader, statement, str(planted(23)), str(planted(19)))


@pytest.mark.parametrize(
    "statement",
    [
        "select * from search({0})",
        "select * from search({0}, include_dropped => true)",
        "select * from search('record ' || {0}, top_k => 100, include_dropped => true)",
        f"select * from search({{0}}, '{unit_vector(1.0)}', {{0}}, include_dropped => true)",
        f"select * from search('record', '{unit_vector(1.0)}', {{0}}, include_dropped => true)",
        "select search_mode({0}, null, null)",
    ],
)
def test_explain_says_nothing_of_a_question_that_only_others_could_answer(
    reader: psycopg.Connection, statement: str
) -> None:
    assert not tells_apart(reader, statement, OUTSIDE, NOWHERE)
    answers = [reader.execute(sql.SQL(statement).format(word)).fetchall() for word in (OUTSIDE, NOWHERE)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("view", VIEWS)
def test_a_user_outside_is_as_unknown_as_one_who_is_nobody(reader: psycopg.Connection, view: str) -> None:
    """User 4711 owns documents that the analyst does not see, and has asked nothing; 4713 is not there."""
    names = [entry.name for entry in reader.execute(f"select * from {view} limit 0").description or ()]
    for condition in ("user_id = {0}::bigint", "user_id in ({0}::bigint, 0)", "1 / (user_id - {0}::bigint) = 0"):
        if "user_id" in names:
            statement = f"select count(*) from {view} where {condition}"
            assert not tells_apart(reader, statement, str(USERS[OUTSIDE]), str(USERS[NOWHERE]))


# --- what the service has more --------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "select * from my_document_chunks({0})",
        "select * from my_documents_among(array[{0}]::uuid[])",
        "select * from derived_documents(array[{0}]::uuid[], '{{}}', '{{}}', true)",
        "select * from my_document({0}) where body = 'x'",
        "update rag_documents set title = 'x' from my_document({0}) as mine where mine.id = rag_documents.id",
    ],
)
def test_functions_of_the_service_say_nothing_of_a_document_outside(app: psycopg.Connection, statement: str) -> None:
    for access_id in (20, 3, 21, 22):
        assert not tells_apart(app, statement, str(planted(access_id)), str(planted(19)))
    assert tells_apart(app, statement, str(planted(23)), str(planted(19)))


@pytest.mark.parametrize(
    "statement",
    [
        "select * from my_sources_among(array[{0}])",
        "select * from my_sources_among(array['x', {0}, 'y'])",
        *(
            f"select * from {function}({access_id}, '{scope}', {user}, {project}, {{0}}, {{0}}{more})"
            for function, more in (("find_source", ""), ("look_at_source", ", {0}"))
            for access_id, scope, user, project in (
                (1, "public", "null", "null"),
                (20, "user", USERS[OUTSIDE], "null"),
                (3, "user", 1, "null"),
                (21, "project", USERS[OUTSIDE], "{0}"),
                (22, "public", "null", "null"),
                (23, "project", USERS[INSIDE], "'alpha'"),
            )
        ),
        "select bury_source(20, {0}, {0}, 'a test')",
        "select bury_source(23, {0}, {0}, 'a test')",
        "select * from derived_documents('{{}}', array[{0}], array[{0}], true)",
        "select * from retraction_of('public', null, null, {0}, {0})",
        f"select * from retraction_of('user', {USERS[OUTSIDE]}, null, {{0}}, {{0}})",
        "select close_sources(array[20]::bigint[], array[{0}], array[null], array[null]::uuid[], 'x')",
        "select reopen_sources(array[{0}], array[{0}], '{{}}', array[{0}], array['user', 'public'])",
        "select class_reads(20, 'user', 4711, null, array['hr', {0}])",
        "select access_class('user', 4711, null, array['hr', {0}])",
        "select access_class('project', 4711, {0}, array['public'])",
        "select access_class('project', 4712, {0}, array['public', {0}])",
        "select share_project({0}, 4711, true)",
        "select unshare_project({0}, 4711)",
        "select * from my_members() where project_id = {0}",
        "select load_service_keys({0})",
    ],
)
def test_functions_of_the_service_say_nothing_of_a_word_outside(app: psycopg.Connection, statement: str) -> None:
    assert not tells_apart(app, statement, OUTSIDE, NOWHERE)


# Not even the name of a column is of use: none of these may be read.
UNREAD = {
    "rag_documents": (
        *("title", "body", "source_id", "source_type", "source_hash", "metadata", "tags", "scope", "user_id"),
        *("project_id", "created_at"),
    ),
    "rag_chunks": ("chunk_text", "tsv", "embedding", "section", "embedding_model", "language", "lexeme_count"),
}


@pytest.mark.parametrize(("table", "name"), [(table, name) for table, names in UNREAD.items() for name in names])
def test_a_column_with_content_is_not_even_planned(app: psycopg.Connection, table: str, name: str) -> None:
    for statement in (
        f"select 1 from {table} where {name}::text = {{0}}",
        f"delete from {table} where {name}::text = {{0}}",
        f"select 1 from {table} order by {name}",
        f"select count({name}) from {table}",
        f"select {table} from {table}",
    ):
        assert told(app, statement, OUTSIDE).startswith("42501")


# --- what is told all the same --------------------------------------------------------------------

KEYS = {
    "rag_documents": ("tenant_id", "access_id", "id"),
    "rag_chunks": ("tenant_id", "access_id", "id", "document_id"),
}
# Values that only a row outside has, and others that are nowhere.
SAME_TENANT = {"access_id": "20", "id": str(planted(20)), "document_id": str(planted(20))}
OTHER_TENANT = {"tenant_id": "t2", "access_id": "22", "id": str(planted(22)), "document_id": str(planted(22))}
ALIKE = {"tenant_id": "t9", "access_id": "19", "id": str(planted(19)), "document_id": str(planted(19))}
OPERATORS = ("= {0}", "<> {0}", "in ({0}, null)", "is not distinct from {0}", "between {0} and {0}")
SWITCHES = (None, "enable_seqscan", "enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan")


def differing(connection: psycopg.Connection, table: str, outside: dict[str, str]) -> set[str]:
    """Keys of which a condition on a value outside tells something else, whatever way the planner is sent."""
    found = set()
    for name in set(KEYS[table]) & set(outside):
        for command in ("select count(*) from", "delete from"):
            for operator in OPERATORS:
                for switch in SWITCHES:
                    with connection.transaction(force_rollback=True):
                        if switch:
                            connection.execute(f"set local {switch} = off")
                        statement = f"{command} {table} where {name} {operator}"
                        if tells_apart(connection, statement, outside[name], ALIKE[name]):
                            found.add(name)
    return found


@pytest.mark.parametrize("table", KEYS)
def test_a_key_of_another_tenant_cannot_be_confirmed(service: psycopg.Connection, table: str) -> None:
    assert differing(service, table, OTHER_TENANT) == set()


@pytest.mark.parametrize(
    ("table", "keys"), [("rag_documents", {"access_id", "id"}), ("rag_chunks", {"access_id", "document_id"})]
)
def test_a_key_of_the_same_tenant_can_be_confirmed(service: psycopg.Connection, table: str, keys: set[str]) -> None:
    """And found by halving ranges, by whoever has the signature of a principal of that tenant: a comparison of keys
    costs less than the policy and comes before it. Keys are random; nothing that means anything is among them."""
    assert differing(service, table, SAME_TENANT) >= keys


def test_the_number_of_all_rows_is_told(service: psycopg.Connection) -> None:
    """By a scan, as by pg_class: 18 documents, of which the principal sees two."""
    with service.transaction(force_rollback=True):
        for switch in SWITCHES[2:]:
            service.execute(f"set local {switch} = off")
        assert "Rows Removed by Filter: 18" in told(service, "select 1 from rag_documents where id = {0}", ALIKE["id"])
        assert column(service, "select reltuples from pg_class where relname = 'rag_documents'") == [18]
