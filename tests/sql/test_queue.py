"""Schema jobs: procrastinate's own SQL, and nobody's but rag_queue's to touch."""

from __future__ import annotations

from importlib.metadata import version

import psycopg
import pytest
from procrastinate.schema import SchemaManager

from rag.resources import sql_folder
from tests.conftest import Deployment
from tests.sql.world import column, refused_with

TABLES = (
    "procrastinate_jobs",
    "procrastinate_workers",
    "procrastinate_events",
    "procrastinate_periodic_defers",
)
# What a worker's library calls by itself.
CALLED = {
    "procrastinate_fetch_job_v2",
    "procrastinate_finish_job_v1",
    "procrastinate_retry_job_v2",
    "procrastinate_register_worker_v1",
    "procrastinate_unregister_worker_v1",
    "procrastinate_update_heartbeat_v1",
    "procrastinate_prune_stalled_workers_v1",
}


def test_its_sql_is_that_of_the_package_that_is_installed() -> None:
    text = (sql_folder() / "schema" / "12_queue.sql").read_text(encoding="utf-8")
    assert SchemaManager.get_schema().replace("\t", "    ").strip() in text
    assert f"(version {version('procrastinate')}," in text


@pytest.mark.parametrize(
    "role", ["rag_app", "rag_publisher", "rag_worker", "rag_operator", "rag_migrator", "rag_analyst", "rag_search"]
)
def test_no_login_has_a_right_to_its_tables(superuser: psycopg.Connection, role: str) -> None:
    for table in TABLES:
        assert (
            column(
                superuser,
                "select privilege from unnest(array['select', 'insert', 'update', 'delete', 'truncate']) as privilege"
                " where has_table_privilege(%s, 'jobs.' || %s, privilege)"
                " or (privilege in ('select', 'insert', 'update')"
                " and has_any_column_privilege(%s, 'jobs.' || %s, privilege))",
                (role, table, role, table),
            )
            == []
        )


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("rag_app", set()),
        ("rag_publisher", set()),
        ("rag_operator", set()),
        ("rag_analyst", set()),
        ("rag_worker", CALLED),
    ],
)
def test_its_functions_are_the_workers_alone(superuser: psycopg.Connection, role: str, expected: set[str]) -> None:
    found = column(
        superuser,
        "select proname from pg_proc where pronamespace = 'jobs'::regnamespace"
        " and has_schema_privilege(%(role)s, 'jobs', 'usage') and has_function_privilege(%(role)s, oid, 'execute')",
        {"role": role},
    )
    assert set(found) == expected


def test_its_functions_run_as_rag_queue_and_look_nowhere_else(superuser: psycopg.Connection) -> None:
    assert (
        column(
            superuser,
            "select proname from pg_proc where pronamespace = 'jobs'::regnamespace and not coalesce("
            "prosecdef and pg_get_userbyid(proowner) = 'rag_queue'"
            " and proconfig = array['search_path=jobs, pg_temp'], false)",
        )
        == []
    )


def test_nobody_but_its_owner_makes_anything_there(world: Deployment) -> None:
    for role in ("rag_app", "rag_worker", "rag_operator"):
        with world.connect(role) as connection:
            assert refused_with(connection, "create table jobs.mine (id int)") == "42501"
    with world.cluster.superuser(world.name) as superuser:
        assert column(superuser, "select has_schema_privilege('rag_queue', 'jobs', 'create')") == [False]
