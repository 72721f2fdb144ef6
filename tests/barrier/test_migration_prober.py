"""Migrations up and down, on a database that is full, while logins without any identity ask for everything."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pytest
from psycopg import sql

from rag import migrate
from rag.errors import DatabaseError
from rag.resources import sql_folder
from tests.barrier.surface import Reachable, readings, says_something
from tests.conftest import DIMENSIONS, Deployment
from tests.sql.world import build, protected_tables

# What operators are there to see, in every tenant; not one of their rows holds a text or a title.
OPERATORS_OWN = frozenset(
    (
        *("rag_project_members", "rag_analysts", "rag_service_keys", "rag_assertions", "rag_erasures"),
        *("rag_calibrations", "rag_tags", "rag_prompts", "rag_retractions", "rag_limits", "rag_usage"),
        *("list_signing_keys()", "count_traces()", "explain_access()", "class_sizes()", "embeds_with()"),
        "usage_drift()",
        "count_expired()",
        "list_jobs()",
    )
)
# Not there yet or no longer, not permitted, and the loser of a deadlock with the migration.
REFUSALS = frozenset({"3F000", "42P01", "42883", "42501", "28000", "40P01"})
# An object that goes while a statement is being planned is an internal error of the server's.
GOING = ("cache lookup failed", "could not open relation")
LOGINS = ("rag_app", "rag_publisher", "rag_operator", "rag_migrator")
WATCH = "the watch on the catalog"
# Everybody may read the catalog, and see in it whether a table is open.
UNPROTECTED = Reachable(
    name="tables without forced row security or a policy",
    statement="""
        select coalesce(jsonb_agg(relname), '[]')
        from pg_class
        where relnamespace = (select oid from pg_namespace where nspname = 'rag')
            and relkind in ('r', 'p')
            and relname like 'rag\\_%'
            and not (
                relrowsecurity and relforcerowsecurity and exists (select from pg_policy where polrelid = pg_class.oid)
            )
    """,
)


@dataclass(slots=True, kw_only=True)
class Prober:
    """A login that asks for everything, over and over."""

    connection: psycopg.Connection
    asks: Sequence[Reachable]
    answers: dict[str, Any] = field(default_factory=dict)
    """What said something."""
    ends: Counter[str] = field(default_factory=Counter)
    """SQLSTATEs; empty for an answer."""
    rounds: int = 0
    failure: BaseException | None = None

    @property
    def probes(self) -> int:
        return self.ends.total()

    def ask_until(self, stop: threading.Event) -> None:
        try:
            while not stop.is_set():
                self.ask_everything()
        except BaseException as error:
            self.failure = error
            raise

    def ask_everything(self) -> None:
        for ask in self.asks:
            try:
                rows = self.connection.execute(ask.statement.encode()).fetchall()
            except psycopg.Error as error:
                state = error.sqlstate or ""
                if state not in REFUSALS and not any(word in str(error) for word in GOING):
                    self.answers.setdefault(ask.name, f"{state}: {error}")
                self.ends[state] += 1
                continue
            self.ends[""] += 1
            found = [value for row in rows for value in row]
            if says_something(found):
                self.answers.setdefault(ask.name, found)
        self.rounds += 1


def asks_of(deployment: Deployment, role: str) -> list[Reachable]:
    """All that a login may read and call, and each whole table, which it may not."""
    with deployment.cluster.superuser(deployment.name) as superuser:
        tables = protected_tables(superuser)
        superuser.execute(sql.SQL("set role {}").format(sql.Identifier(role)))
        asks = [ask for ask in readings(superuser) if role != "rag_operator" or ask.object not in OPERATORS_OWN]
    whole = (
        Reachable(name=f"all of {table}", statement=f"select * from rag.{table}")
        for table in tables
        if role != "rag_operator" or table not in OPERATORS_OWN
    )
    return [*asks, *whole, UNPROTECTED]


@contextmanager
def analyst_of(deployment: Deployment) -> Iterator[str]:
    """A login of the analysts' group that nobody has registered; roles are the cluster's, so it goes in the end."""
    name = f"prober_{secrets.token_hex(6)}"
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute(
            sql.SQL("create role {} login password {} in role rag_analyst").format(
                sql.Identifier(name), sql.Literal(deployment.cluster.password)
            )
        )
        try:
            yield name
        finally:
            superuser.execute(sql.SQL("drop role {}").format(sql.Identifier(name)))


@contextmanager
def probed(deployment: Deployment, roles: Sequence[str]) -> Iterator[Mapping[str, Prober]]:
    """While the block runs, each role asks in a thread of its own, and one more watches the catalog alone.

    What there is to ask is taken from the database as it is now.
    """
    asks = {role: (role, asks_of(deployment, role)) for role in roles} | {WATCH: ("rag_app", [UNPROTECTED])}
    with ExitStack() as stack:
        probers = {
            name: Prober(connection=stack.enter_context(deployment.connect(role)), asks=chosen)
            for name, (role, chosen) in asks.items()
        }
        stop = threading.Event()
        threads = [threading.Thread(target=prober.ask_until, args=(stop,)) for prober in probers.values()]
        for thread in threads:
            thread.start()
        try:
            yield probers
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def wait_for_a_round(probers: Mapping[str, Prober]) -> None:
    """Until each has asked everything once more, from the first question to the last."""
    begun = {role: prober.rounds for role, prober in probers.items()}
    while any(prober.rounds < begun[role] + 2 for role, prober in probers.items()):
        assert [prober.failure for prober in probers.values() if prober.failure is not None] == []
        time.sleep(0.001)


def fill(deployment: Deployment) -> None:
    with deployment.cluster.superuser(deployment.name) as superuser:
        build(superuser)


def up(deployment: Deployment) -> None:
    migrate.upgrade(deployment.url("rag_migrator"), dimensions=DIMENSIONS)


def down(deployment: Deployment) -> None:
    migrate.downgrade(deployment.url("rag_migrator"), dimensions=DIMENSIONS, revision="base")


def beyond_deadlocks(change: Callable[[Deployment], None], deployment: Deployment) -> int:
    """Repeat a change that lost a deadlock, which leaves nothing behind; returns how often it did."""
    for lost in range(20):
        try:
            change(deployment)
        except DatabaseError as error:
            if not isinstance(error.__cause__, psycopg.errors.DeadlockDetected):
                raise
        else:
            return lost
    raise AssertionError("it never wins")


def again(deployment: Deployment) -> None:
    """All that an administrator runs on a database that is there: what is in it stays."""
    migrate.bootstrap(deployment.url("postgres"))
    up(deployment)


def test_nobody_sees_a_row_while_migrations_go_up_and_down(
    deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    times = scaled(test=3, ci=8, prove=300)
    fill(deployment)
    with analyst_of(deployment) as analyst:
        began, deadlocks = time.monotonic(), 0
        with probed(deployment, (*LOGINS, analyst)) as probers:
            for _ in range(times):
                for change in (again, down, up, fill):
                    deadlocks += beyond_deadlocks(change, deployment)
                    wait_for_a_round(probers)
        took_s = time.monotonic() - began
    assert {name: prober.answers for name, prober in probers.items()} == {name: {} for name in probers}
    # Each was answered, and asked while there was nothing.
    assert all(prober.ends[""] and prober.ends["42P01"] for role, prober in probers.items() if role != WATCH)
    probes = sum(prober.probes for prober in probers.values())
    figure(
        f"migrations, up and down {times:,} times: {probes:,} probes by {len(LOGINS) + 1} logins without identity,"
        f" {probes / took_s:,.0f} a second: 0 rows, and no table without row security"
        + (f" ({deadlocks} times a migration lost a deadlock, and was repeated)" if deadlocks else "")
    )


# --- the prober is believed because it finds what is there to be found -------------------------------


def test_a_table_that_is_open_until_the_end_of_its_migration_is_noticed(deployment: Deployment) -> None:
    """The schema files one by one, each in a transaction of its own."""
    with probed(deployment, ("rag_app",)) as probers:
        beyond_deadlocks(down, deployment)
        with deployment.connect("rag_migrator") as migrator:
            migrator.execute("set role rag_owner")
            for file in sorted((sql_folder() / "schema").glob("*.sql")):
                script = file.read_text().replace(":embedding_dimensions", str(DIMENSIONS))
                migrator.execute(script.encode())
                wait_for_a_round(probers)
    assert set(probers[WATCH].answers) == {UNPROTECTED.name}
    assert set(probers["rag_app"].answers) == {UNPROTECTED.name}


@pytest.mark.parametrize(
    ("role", "damage", "noticed"),
    [
        ("rag_app", "alter table rag.rag_chunks disable row level security", "rag_chunks"),
        (
            "rag_app",
            """
            drop policy own_tenant_reading_select on rag.rag_chunks;
            create policy extra on rag.rag_chunks for select to rag_principal using (true)
            """,
            "my_chunks() 1",
        ),
        ("rag_publisher", "alter function rag.my_documents() owner to current_user", "v_documents"),
        (
            "rag_operator",
            """
            grant select on rag.rag_query_logs to rag_operator;
            create policy extra on rag.rag_query_logs for select to rag_operator using (true)
            """,
            "all of rag_query_logs",
        ),
        (
            "rag_migrator",
            """
            grant select on rag.rag_documents to rag_migrator;
            alter table rag.rag_documents disable row level security
            """,
            "rag_documents",
        ),
    ],
    ids=["no row security", "an open policy", "a superuser's function", "an operator's policy", "a migrator's table"],
)
def test_an_open_table_or_function_is_noticed(deployment: Deployment, role: str, damage: str, noticed: str) -> None:
    fill(deployment)
    with deployment.cluster.superuser(deployment.name) as superuser, deployment.connect(role) as connection:
        prober = Prober(connection=connection, asks=asks_of(deployment, role))
        prober.ask_everything()
        assert prober.answers == {}
        superuser.execute(damage.encode())
        prober = Prober(connection=connection, asks=asks_of(deployment, role))
        prober.ask_everything()
    assert noticed in prober.answers
