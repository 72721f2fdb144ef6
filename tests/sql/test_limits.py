"""Token buckets and quotas in the database: nobody gets more than the operator says, whoever asks at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from rag.principal import Principal
from rag.resources import query
from tests.conftest import SIGNER, Deployment, named

MARA = Principal(tenant_id="acme", user_id=7)
JONAS = Principal(tenant_id="acme", user_id=8)
EVE = Principal(tenant_id="other", user_id=7)

type_row = dict[str, Any]


def limit(deployment: Deployment, tenant_id: str, **limits: int | None) -> None:
    """Set a tenant's limits, all of them; '' is everybody else."""
    names = ", ".join(("tenant_id", *limits))
    places = ", ".join(["%s"] * (1 + len(limits)))
    with deployment.connect("rag_operator") as operator:
        operator.execute("delete from rag_limits where tenant_id = %s", (tenant_id,))
        operator.execute(f"insert into rag_limits ({names}) values ({places})", (tenant_id, *limits.values()))


def take(connection: psycopg.Connection, principal: Principal, kind: str = "query") -> type_row:
    """What the service asks before its work."""
    cursor = connection.cursor(row_factory=dict_row)
    cursor.execute(query("take_token"), named(principal, role=connection.info.user) | {"kind": kind})
    row = cursor.fetchone()
    assert row is not None
    return row


def charge(connection: psycopg.Connection, documents: int, size: int) -> tuple[Any, ...] | None:
    return connection.execute("select * from charge_quota(%s, %s)", (documents, size)).fetchone()


def used(deployment: Deployment, tenant_id: str) -> tuple[int, int]:
    with deployment.cluster.superuser(deployment.name) as superuser:
        return superuser.execute(
            "select coalesce(sum(documents), 0), coalesce(sum(bytes), 0) from rag.rag_usage where tenant_id = %s",
            (tenant_id,),
        ).fetchone()  # type: ignore[return-value]


def wind_back(deployment: Deployment, seconds: float) -> None:
    """Let so much time pass for every bucket."""
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute(
            "update rag.rag_rate_buckets set refilled_at = refilled_at - make_interval(secs => %s)", (seconds,)
        )


def taken(deployment: Deployment, principal: Principal, times: int, kind: str = "query") -> list[bool]:
    with deployment.connect() as connection:
        return [take(connection, principal, kind)["granted"] for _ in range(times)]


# --- rates ----------------------------------------------------------------------------------------


def test_nothing_is_limited_unless_an_operator_says_so(deployment: Deployment) -> None:
    with deployment.connect() as connection:
        assert take(connection, MARA) == {
            "granted": True,
            "per_minute": None,
            "burst": None,
            "tokens_left": None,
            "wait_s": None,
        }
    with deployment.cluster.superuser(deployment.name) as superuser:
        assert superuser.execute("select count(*) from rag.rag_rate_buckets").fetchone() == (0,)


def test_a_burst_passes_and_then_as_many_as_time_brings(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=6, query_burst=4)
    assert taken(deployment, MARA, 6) == [True] * 4 + [False] * 2
    wind_back(deployment, 9.5)
    assert taken(deployment, MARA, 1) == [False]
    wind_back(deployment, 0.6)
    assert taken(deployment, MARA, 2) == [True, False]
    # However long the pause, no more than a burst.
    wind_back(deployment, 86_400)
    assert taken(deployment, MARA, 6) == [True] * 4 + [False] * 2


def test_what_it_says_of_the_wait_is_so(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=6, query_burst=1)
    assert taken(deployment, MARA, 1) == [True]
    with deployment.connect() as connection:
        row = take(connection, MARA)
        assert (row["granted"], row["per_minute"], row["burst"]) == (False, 6, 1)
        assert 9 < row["wait_s"] <= 10
        wind_back(deployment, row["wait_s"])
        assert take(connection, MARA)["granted"]


def test_the_burst_is_that_of_a_minute_unless_it_is_said(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=3)
    assert taken(deployment, MARA, 4) == [True] * 3 + [False]


def test_zero_allows_nothing_and_no_wait_is_long_enough(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=0)
    with deployment.connect() as connection:
        row = take(connection, MARA)
    assert (row["granted"], row["wait_s"]) == (False, None)


def test_kinds_have_buckets_of_their_own_and_a_tenant_has_one_for_all_its_users(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=2, ingests_per_minute=1)
    assert taken(deployment, MARA, 1) + taken(deployment, JONAS, 2) == [True, True, False]
    assert taken(deployment, MARA, 2, "ingest") == [True, False]


def test_a_tenants_own_limits_come_before_those_of_everybody_else(deployment: Deployment) -> None:
    limit(deployment, "", queries_per_minute=1)
    limit(deployment, "acme", queries_per_minute=2)
    assert taken(deployment, MARA, 3) == [True, True, False]
    assert taken(deployment, EVE, 2) == [True, False]
    # A row of its own counts as a whole: what it does not limit is not limited.
    limit(deployment, "acme", documents=5)
    assert taken(deployment, MARA, 9) == [True] * 9


def test_a_limit_that_is_changed_holds_from_the_next_request_on(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=100)
    assert taken(deployment, MARA, 1) == [True]
    limit(deployment, "acme", queries_per_minute=2)
    assert taken(deployment, MARA, 3) == [True, True, False]


def test_a_clock_that_was_put_back_takes_nothing_away(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=60, query_burst=3)
    assert taken(deployment, MARA, 1) == [True]
    wind_back(deployment, -3600)
    assert taken(deployment, MARA, 3) == [True, True, False]


def test_other_tenants_are_not_affected(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=1)
    limit(deployment, "other", queries_per_minute=2)
    assert taken(deployment, MARA, 5) == [True] + [False] * 4
    assert taken(deployment, EVE, 3) == [True, True, False]


def test_a_token_is_taken_from_ones_own_bucket(deployment: Deployment) -> None:
    limit(deployment, "", queries_per_minute=1, query_burst=10)
    assert taken(deployment, EVE, 1) == [True]
    assert taken(deployment, MARA, 4) == [True] * 4
    with deployment.connect() as connection:
        assert [round(take(connection, who)["tokens_left"]) for who in (EVE, MARA)] == [8, 5]


def test_of_many_at_once_exactly_the_burst_passes(
    deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    callers, rounds = scaled(test=20, ci=50, prove=50), scaled(test=3, ci=10, prove=100)
    # One a minute, so that none comes back meanwhile.
    limit(deployment, "acme", queries_per_minute=1, query_burst=30)
    ready = threading.Barrier(callers)
    granted = 0

    def calls(_: int) -> int:
        with deployment.connect() as connection:
            ready.wait()
            return sum(take(connection, MARA)["granted"] for _ in range(4))

    with ThreadPoolExecutor(callers) as pool:
        for _ in range(rounds):
            with deployment.cluster.superuser(deployment.name) as superuser:
                superuser.execute("delete from rag.rag_rate_buckets")
            passed = sum(pool.map(calls, range(callers)))
            assert passed == 30
            granted += passed
    figure(f"rate: {callers} callers at once, {rounds} rounds: {granted} of {30 * rounds} tokens taken, none twice")


def test_a_refused_request_waits_for_nobody_and_writes_nothing(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=1)
    assert taken(deployment, MARA, 1) == [True]
    with deployment.cluster.superuser(deployment.name) as superuser, superuser.transaction():
        superuser.execute("select from rag.rag_rate_buckets for update")
        with deployment.connect() as connection:
            connection.execute("set statement_timeout = '2s'")
            assert take(connection, MARA)["granted"] is False
            assert connection.execute("select pg_current_xact_id_if_assigned()").fetchone() == (None,)


def test_a_bucket_is_not_locked_while_the_service_is_waited_for(deployment: Deployment) -> None:
    """One statement that is a transaction: the next one does not wait for the first caller's commit."""
    limit(deployment, "acme", queries_per_minute=10)
    with deployment.connect() as first, deployment.connect() as second:
        second.execute("set statement_timeout = '2s'")
        assert take(first, MARA)["granted"]
        assert first.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        assert take(second, MARA)["granted"]


@pytest.mark.parametrize("call", ["take_token('query')", "charge_quota(1, 1)", "charge_quota(-1, -1)"])
def test_without_an_identity_nothing_is_taken_or_counted(deployment: Deployment, call: str) -> None:
    limit(deployment, "", queries_per_minute=5, documents=5)
    with deployment.connect() as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(f"select * from {call}")
    with deployment.cluster.superuser(deployment.name) as superuser:
        assert superuser.execute("select count(*) from rag.rag_usage").fetchone() == (0,)
        assert superuser.execute("select count(*) from rag.rag_rate_buckets").fetchone() == (0,)


def test_a_token_is_taken_for_who_signed_and_nobody_else(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=5)
    forged = {"tenant_id": "acme", "user_id": 7, "project_id": None, "tags": ["public"], "kind": "query"}
    with deployment.connect() as connection:
        with pytest.raises(psycopg.errors.InvalidAuthorizationSpecification):
            connection.execute(query("take_token"), forged | {"signature": SIGNER.sign(EVE, role="rag_app")})
        # Nor within a transaction that speaks for somebody else.
        with deployment.transaction(EVE) as speaking, pytest.raises(psycopg.errors.InsufficientPrivilege):
            speaking.execute(query("take_token"), forged | {"signature": SIGNER.sign(MARA, role="rag_app")})


def test_an_unknown_kind_is_refused(deployment: Deployment) -> None:
    with deployment.connect() as connection, pytest.raises(psycopg.errors.InvalidParameterValue):
        take(connection, MARA, "delete")


def test_a_tenant_sees_its_own_limits_and_no_others(deployment: Deployment) -> None:
    limit(deployment, "acme", queries_per_minute=5, documents=7)
    limit(deployment, "other", bytes=9)

    def seen(principal: Principal) -> list[tuple[Any, ...]]:
        with deployment.transaction(principal) as connection:
            charge(connection, 1, 2)
            return connection.execute("select * from my_limits()").fetchall()

    assert seen(MARA) == [(5, None, None, None, 7, None, 1, 2)]
    assert seen(EVE) == [(None, None, None, None, None, 9, 1, 2)]
    assert seen(Principal(tenant_id="third")) == [(None,) * 6 + (1, 2)]
    with deployment.connect() as connection:
        assert connection.execute("select * from my_limits()").fetchall() == []


@pytest.mark.parametrize("table", ["rag_limits", "rag_rate_buckets", "rag_usage"])
@pytest.mark.parametrize(
    "statement",
    ["select tenant_id from {}", "delete from {}", "insert into {} (tenant_id) values ('acme')", "truncate {}"],
)
@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_a_tenant_neither_reads_nor_changes_limits_buckets_and_counts(
    deployment: Deployment, table: str, statement: str, role: str
) -> None:
    with (
        deployment.transaction(MARA, role=role) as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege),
    ):
        connection.execute(statement.format(table))


@pytest.mark.parametrize(
    "statement",
    [
        "update rag_limits set documents = null",
        "update rag_rate_buckets set tokens = 1000",
        "update rag_usage set documents = 0",
        "select * from recount_usage('acme')",
        "select * from usage_drift()",
        "select * from limits_of('other')",
    ],
)
def test_a_tenant_does_not_reset_what_it_is_held_to(deployment: Deployment, statement: str) -> None:
    with deployment.transaction(MARA) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute(statement)


# --- quotas ---------------------------------------------------------------------------------------


@contextmanager
def writing(deployment: Deployment, principal: Principal = MARA) -> Iterator[psycopg.Connection]:
    with deployment.transaction(principal) as connection:
        yield connection


def test_a_quota_is_exact_and_says_what_is_full(deployment: Deployment) -> None:
    limit(deployment, "acme", documents=2, bytes=100)
    with writing(deployment, EVE) as connection:
        assert charge(connection, 5, 500) is None
    with writing(deployment) as connection:
        assert charge(connection, 1, 60) is None
    with writing(deployment) as connection:
        assert charge(connection, 1, 41) == ("bytes", 100, 60)
    with writing(deployment) as connection:
        assert charge(connection, 1, 40) is None
    with writing(deployment) as connection:
        assert charge(connection, 1, 1) == ("documents", 2, 2)
    assert used(deployment, "acme") == (2, 100)
    with writing(deployment, EVE) as connection:
        assert charge(connection, 5, 500) is None


def test_a_quota_of_zero_allows_nothing(deployment: Deployment) -> None:
    limit(deployment, "acme", documents=0)
    with writing(deployment) as connection:
        assert charge(connection, 1, 0) == ("documents", 0, 0)


def test_what_makes_room_is_never_refused(deployment: Deployment) -> None:
    with writing(deployment) as connection:
        charge(connection, 5, 500)
    limit(deployment, "acme", documents=1, bytes=10)
    with writing(deployment) as connection:
        assert charge(connection, -1, -100) is None
    with writing(deployment) as connection:
        assert charge(connection, 0, -100) is None
    with writing(deployment) as connection:
        assert charge(connection, 0, 1) == ("bytes", 10, 300)
    assert used(deployment, "acme") == (4, 300)


def test_what_is_undone_was_not_counted(deployment: Deployment) -> None:
    with writing(deployment) as connection:
        with connection.transaction(force_rollback=True):
            charge(connection, 3, 30)
        charge(connection, 1, 10)
    assert used(deployment, "acme") == (1, 10)


def test_of_many_who_write_at_once_exactly_as_many_as_fit_commit(
    deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    writers, rounds = 16, scaled(test=3, ci=10, prove=100)
    limit(deployment, "acme", documents=10)
    ready = threading.Barrier(writers)

    def write(number: int) -> bool:
        pause = Random(number)
        with deployment.connect() as plain:
            plain.execute("select 1")
            ready.wait()
            with writing(deployment) as connection:
                if charge(connection, 1, 5) is not None:
                    connection.execute("rollback")
                    return False
                # Counted, and not committed yet.
                time.sleep(pause.random() / 100)
                return True

    with ThreadPoolExecutor(writers) as pool:
        for _ in range(rounds):
            with deployment.cluster.superuser(deployment.name) as superuser:
                superuser.execute("delete from rag.rag_usage")
            assert sum(pool.map(write, range(writers))) == 10
            assert used(deployment, "acme") == (10, 50)
    figure(f"quota: {writers} writers at once, {rounds} rounds: 10 of 10 stored in each, 0 beyond the quota")


def test_without_a_quota_nobody_waits_for_another_ones_commit(deployment: Deployment) -> None:
    """But where two connections share a slot, which their process numbers decide."""
    with writing(deployment) as held:
        charge(held, 1, 1)
        passed = 0
        for _ in range(8):
            with writing(deployment) as connection:
                if connection.info.backend_pid % 16 != held.info.backend_pid % 16:
                    connection.execute("set local statement_timeout = '2s'")
                    assert charge(connection, 1, 1) is None
                    passed += 1
        assert passed
    assert used(deployment, "acme") == (1 + passed, 1 + passed)


def test_recounting_finds_the_truth_again(deployment: Deployment, store: Callable[..., Any]) -> None:
    store(MARA, "twelve bytes")
    store(EVE, "ä")
    with deployment.connect("rag_operator") as operator:
        drift = operator.execute(
            "select tenant_id, documents_counted, documents_stored, bytes_stored from usage_drift()"
        )
        assert drift.fetchall() == [("acme", 0, 1, 12), ("other", 0, 1, 2)]
        assert operator.execute("select documents, bytes from recount_usage('acme')").fetchone() == (1, 12)
        assert operator.execute("select tenant_id from usage_drift()").fetchall() == [("other",)]
        # Nothing is left of a tenant without documents.
        operator.execute("select * from recount_usage('third')")
    assert used(deployment, "acme") == (1, 12)
    with deployment.cluster.superuser(deployment.name) as superuser:
        assert superuser.execute("select distinct tenant_id from rag.rag_usage").fetchall() == [("acme",)]
