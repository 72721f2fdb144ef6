"""Conversations of others: nobody reads one, adds to one, or has one summed up; by user, tenant, project and login."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.principal import Principal
from rag.resources import query
from tests.conftest import Deployment
from tests.rag.talking import JONAS, MARA, NOBODY, ORION, OTHER, message_rows, said, summary_rows
from tests.sql.world import refused_with

MEMBER = Principal(tenant_id="acme", user_id=8, project_id="orion")
TAGGED = Principal(tenant_id="acme", user_id=7, tags=("hr",))
OUTSIDERS = {
    "another user": JONAS,
    "without a user": NOBODY,
    "another tenant": OTHER,
    "another tag": TAGGED,
    "a member of the project, who may write there": MEMBER,
}
LOGINS = ["rag_app", "rag_publisher"]
TABLES = ("rag_conversation_messages", "rag_conversation_summaries")


def rows(connection: psycopg.Connection, name: str, **parameters: object) -> list[tuple[object, ...]]:
    return connection.execute(query(name), parameters).fetchall()


@pytest.fixture
def job(deployment: Deployment) -> UUID:
    """Of a thread of Mara's, which has a summary as well; and there is one of hers in a project that is shared."""
    asked = said(deployment, MARA, "trip", "The vault code is four seven eleven")[-1].summary_job
    assert asked is not None
    said(deployment, ORION, "trip", "The vault code of Orion is eight")
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute("set search_path = rag, pg_temp")
        superuser.execute(
            "insert into rag_project_members (tenant_id, owner_user_id, project_id, member_user_id, may_write)"
            " values ('acme', 7, 'orion', 8, true)"
        )
        superuser.execute(
            """
            with document as (
                insert into rag_documents (tenant_id, access_id, scope, user_id, project_id, tags, source_type,
                    source_id, source_hash, title, body)
                select tenant_id, access_id, scope, user_id, project_id, tags, 'conversation_summary', 'a summary',
                    'hash', 'A conversation', 'The vault code is 4711.'
                from rag_access_classes
                returning *
            )

            insert into rag_conversation_summaries (tenant_id, id, access_id, document_id, user_id, project_id,
                thread_id, summary_text, message_ids, model)
            select tenant_id, gen_random_uuid(), access_id, id, user_id, project_id, 'trip', body,
                array[gen_random_uuid()], 'a model'
            from document
            """
        )
    return asked


def read(connection: psycopg.Connection, project_id: str | None = None) -> tuple[int, int]:
    """How many messages and summaries of the thread the principal gets."""
    named = {"project_id": project_id, "thread_id": "trip"}
    return (
        len(rows(connection, "my_messages", **named, after=0, at_most=100)),
        len(rows(connection, "my_summaries", **named, at_most=100)),
    )


@pytest.mark.parametrize("login", LOGINS)
def test_its_owner_reads_it(deployment: Deployment, job: UUID, login: str) -> None:
    with deployment.transaction(MARA, role=login) as connection:
        assert read(connection) == (1, 1)
        assert read(connection, "orion") == (0, 0)
    with deployment.transaction(ORION, role=login) as connection:
        assert read(connection, "orion") == (1, 1)


@pytest.mark.parametrize("name", OUTSIDERS)
@pytest.mark.parametrize("login", LOGINS)
def test_nobody_else_reads_or_changes_it(deployment: Deployment, job: UUID, name: str, login: str) -> None:
    outsider = OUTSIDERS[name]
    before = message_rows(deployment), summary_rows(deployment)
    classes = {row["access_id"] for row in before[0]}
    assert len(classes) == 2
    for project_id in (None, "orion"):
        with deployment.transaction(outsider, role=login) as connection:
            assert read(connection, project_id) == (0, 0)
    for access_id in classes:
        with deployment.transaction(outsider, role=login) as connection:
            claim = {"access_id": access_id, "thread_id": "trip", "summary_id": uuid4(), "most_characters": 1000}
            assert rows(connection, "claim_messages", **claim) == [(0,)]
        post = {"access_id": access_id, "thread_id": "trip", "role": "user", "content": "x", "tokens": 1}
        with (
            deployment.transaction(outsider, role=login) as connection,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            rows(connection, "post_message", **post, request_key=None, request_digest=None)
    assert (message_rows(deployment), summary_rows(deployment)) == before


@pytest.mark.parametrize("name", OUTSIDERS)
def test_a_worker_sums_up_nothing_of_others(deployment: Deployment, job: UUID, name: str) -> None:
    before = message_rows(deployment), summary_rows(deployment)
    (message, *_) = before[0]
    (summary, *_) = before[1]
    with deployment.transaction(OUTSIDERS[name], role="rag_worker") as connection:
        assert rows(connection, "claimed_messages", summary_id=job) == []
    with (
        deployment.transaction(OUTSIDERS[name], role="rag_worker") as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        rows(
            connection,
            "add_summary",
            id=job,
            access_id=message["access_id"],
            document_id=summary["document_id"],
            thread_id="trip",
            summary_text="x",
            message_ids=[message["id"]],
            model="x",
        )
    assert (message_rows(deployment), summary_rows(deployment)) == before
    with deployment.transaction(MARA, role="rag_worker") as connection:
        assert len(rows(connection, "claimed_messages", summary_id=job)) == 1


FORGERIES: dict[str, dict[str, str]] = {
    "nothing": {},
    "no signature": {"app.tenant_id": "acme", "app.user_id": "7", "app.tags": '["public"]'},
    "a made-up signature": {
        "app.tenant_id": "acme",
        "app.user_id": "7",
        "app.tags": '["public"]',
        "app.signature": "test.9999999999.00",
    },
    "malformed": {"app.tenant_id": "acme", "app.user_id": "7 or 1=1", "app.tags": "[", "app.signature": "x"},
    "empty": {"app.tenant_id": "", "app.user_id": "", "app.tags": "", "app.signature": ""},
}


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("login", LOGINS)
def test_a_forged_variable_reads_nothing(deployment: Deployment, job: UUID, forgery: str, login: str) -> None:
    with deployment.connect(login) as connection, connection.transaction():
        for name, value in FORGERIES[forgery].items():
            connection.execute("select set_config(%s, %s, true)", (name, value))
        assert read(connection) == read(connection, "orion") == (0, 0)
        (message, *_) = message_rows(deployment)
        claim = {"access_id": message["access_id"], "thread_id": "trip", "summary_id": job, "most_characters": 1}
        assert rows(connection, "claim_messages", **claim) == [(0,)]


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher", "rag_worker", "rag_operator"])
@pytest.mark.parametrize("table", TABLES)
def test_no_login_reads_or_writes_the_tables(deployment: Deployment, job: UUID, login: str, table: str) -> None:
    with deployment.connect(login) as connection:
        for statement in (
            f"select count(*) from rag.{table}",
            f"select thread_id from rag.{table}",
            f"update rag.{table} set thread_id = 'x'",
            f"delete from rag.{table}",
            f"insert into rag.{table} default values",
        ):
            assert refused_with(connection, statement) == "42501", statement


@pytest.mark.parametrize(
    ("login", "calls"),
    [
        ("rag_worker", ["my_messages(null, 'trip', 0, 9)", "my_summaries(null, 'trip', 9)"]),
        ("rag_worker", ["post_message(1, 'trip', 'user', 'x', 1, null, null)", "claim_messages(1, 'trip', null, 1)"]),
        ("rag_app", ["claimed_messages(null)", "add_summary(null, 1, null, 'trip', 'x', '{}', 'x')"]),
        ("rag_operator", ["my_messages(null, 'trip', 0, 9)", "claimed_messages(null)"]),
    ],
)
def test_each_login_calls_what_it_needs(deployment: Deployment, login: str, calls: list[str]) -> None:
    with deployment.connect(login) as connection:
        for call in calls:
            assert refused_with(connection, f"select * from rag.{call}") == "42501", call


def test_an_analyst_of_everything_reads_no_conversation(deployment: Deployment, job: UUID) -> None:
    with deployment.cluster.superuser(deployment.name) as superuser, superuser.transaction(force_rollback=True):
        superuser.execute("create role talk_person login in role rag_analyst")
        superuser.execute(
            "insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)"
            " values ('acme', 'talk_person', '{public}', '{*}', 'text')"
        )
        superuser.execute("set local session authorization talk_person")
        for statement in (
            *(f"select count(*) from rag.{table}" for table in TABLES),
            "select * from rag.my_messages(null, 'trip', 0, 9)",
            "select * from rag.my_summaries(null, 'trip', 9)",
        ):
            assert refused_with(superuser, statement) == "42501", statement
        # Nor would one who could call it: no row is an analyst's own.
        superuser.execute("reset session authorization")
        superuser.execute("grant execute on function rag.my_messages(text, text, bigint, integer) to rag_analyst")
        superuser.execute("grant execute on function rag.my_summaries(text, text, integer) to rag_analyst")
        superuser.execute("set local session authorization talk_person")
        assert read(superuser) == read(superuser, "orion") == (0, 0)


def test_an_operator_counts_and_erases_without_reading_a_text(deployment: Deployment, job: UUID) -> None:
    def permitted(table: str) -> list[Any]:
        with deployment.cluster.superuser(deployment.name) as superuser:
            return superuser.execute(
                "select attname from pg_attribute where attrelid = cast(%s as regclass) and attnum > 0"
                " and has_column_privilege('rag_steward', attrelid, attnum, 'select') order by 1",
                (f"rag.{table}",),
            ).fetchall()

    for table in TABLES:
        assert not {"content", "summary_text", "thread_id"} & {name for (name,) in permitted(table)}
