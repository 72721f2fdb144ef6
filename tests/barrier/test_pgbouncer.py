"""Identity through PgBouncer: SECURITY.md section 1, finding 3, and Y6."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path

import httpx2
import psycopg
import pytest
import structlog
from psycopg.rows import DictRow, dict_row

from rag import errors
from rag.connect import Connection, check_pooler
from rag.database import Database, Session
from rag.principal import Principal
from tests.api.test_serve import PATIENCE_S, serving
from tests.barrier import pgbouncer
from tests.barrier.disturbance import (
    MARA,
    NOAH,
    POISONS,
    Findings,
    World,
    ask,
    build,
    disturb,
    set_for_the_session,
    watch,
)
from tests.barrier.pgbouncer import PREPARES_SINCE, PgBouncer
from tests.conftest import DIMENSIONS, SIGNER, Deployment


@pytest.fixture(scope="module")
def shared(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A database for tests that leave it as it was."""
    pgbouncer.binary()
    with new_deployment() as clone:
        yield clone


@pytest.fixture(scope="module")
def world(shared: Deployment) -> World:
    return build(shared)


def service(pooler: PgBouncer, *, prepares: bool = False, pool_size: int = 5, wait_s: float = 60.0) -> Database:
    """The pools of the service, through the pooler."""
    return Database(
        pooler.url("rag_app"),
        publisher_url=pooler.url("rag_publisher"),
        signer=SIGNER,
        pool_size=pool_size,
        pool_timeout_s=wait_s,
        prepared_statements=prepares,
    )


async def check(database: Database) -> list[str]:
    async with database:
        return await database.check_barrier(dimensions=DIMENSIONS, strict=False)


def preparing(statements: int) -> dict[str, object]:
    """The setting of a pooler for prepared statements; 0 is all that an old one can do."""
    if pgbouncer.version() >= PREPARES_SINCE:
        return {"max_prepared_statements": statements}
    if statements:
        number = ".".join(map(str, pgbouncer.version()))
        pytest.skip(f"PgBouncer {number} does not keep track of prepared statements")
    return {}


# --- whatever happens to requests ----------------------------------------------------------------


@pytest.mark.parametrize("prepares", [False, True], ids=["prepared statements off", "prepared statements on"])
async def test_no_identity_and_no_statement_reaches_another_request(
    shared: Deployment,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
    prepares: bool,
):
    settings = preparing(200) if prepares else {}
    findings = Findings()
    watch(monkeypatch, findings)
    with pgbouncer.running(shared, pool_size=3, settings=settings) as pooler:
        async with service(pooler, prepares=prepares) as database, reconnecting(pooler) as reconnections:
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)
            await disturb(
                database,
                world,
                findings,
                deployment=shared,
                requests=scaled(test=120, ci=2_000, prove=50_000),
                seed=20261121,
                # The session is the server's, and other clients' too: see the test of it below.
                never={POISONS},
            )
    assert findings.leaks == []
    assert findings.hidden == []
    assert findings.wrong_statements == []
    # While PgBouncer connects to the server anew it may refuse somebody, who is told to try again.
    assert set(findings.collateral) <= {"DatabaseUnavailable"}
    number = ".".join(map(str, pgbouncer.version()))
    figure(
        f"identity through PgBouncer {number}, prepared statements {'on' if prepares else 'off'}: "
        f"{findings.requests:,} requests, {findings.disturbed:,} disturbed, {len(reconnections)} reconnections: "
        f"0 leaks, 0 wrong statements, {len(findings.collateral)} undisturbed requests told to try again"
    )


@asynccontextmanager
async def reconnecting(pooler: PgBouncer) -> AsyncIterator[list[float]]:
    """Have the pooler replace its connections to the server again and again."""
    done: list[float] = []

    async def reconnect() -> None:
        while True:
            await asyncio.sleep(0.2)
            await asyncio.to_thread(pooler.command, "RECONNECT")
            done.append(time.monotonic())

    task = asyncio.create_task(reconnect())
    try:
        yield done
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_pooler_that_keeps_no_track_runs_another_clients_statement_and_it_shows(
    shared: Deployment, world: World
):
    """The fault that the test above looks for, without an error of anybody: why the service refuses such a pooler."""
    mara, noah = Findings(), Findings()
    with pgbouncer.running(shared, pool_size=2, settings=preparing(0)) as pooler:
        async with client(pooler, prepares=True) as hers, client(pooler, prepares=True) as his:
            # Each has a connection to the server to itself, and calls its first statement by the same name.
            async with speaking(hers, MARA) as session, speaking(his, NOAH) as other_session:
                await ask(session, MARA, world, mara, token=0)
                await ask(other_session, NOAH, world, noah, token=1)
            assert (mara, noah) == (Findings(), Findings())
            # Hers was given back last, and is given out first.
            async with speaking(his, NOAH) as session:
                await ask(session, NOAH, world, noah, token=13)
    assert len(noah.wrong_statements) == 1
    assert noah.wrong_statements[0].startswith("statement 1 with 13 was answered by [{'statement': 0,")


@asynccontextmanager
async def client(pooler: PgBouncer, *, prepares: bool) -> AsyncIterator[psycopg.AsyncConnection[DictRow]]:
    """Another client with the service's login, which has every statement prepared or none."""
    async with await psycopg.AsyncConnection.connect(
        pooler.url("rag_app"), autocommit=True, prepare_threshold=0 if prepares else None, row_factory=dict_row
    ) as connection:
        yield connection


@asynccontextmanager
async def speaking(connection: psycopg.AsyncConnection[DictRow], principal: Principal) -> AsyncIterator[Session]:
    async with connection.transaction():
        await connection.execute(
            "select rag.begin_as(%s, %s, %s, %s, %s)",
            (
                principal.tenant_id,
                principal.user_id,
                principal.project_id,
                list(principal.tags),
                SIGNER.sign(principal, role="rag_app"),
            ),
            prepare=False,
        )
        yield Session(connection)


# --- what is refused at the start ----------------------------------------------------------------


async def test_a_pooler_in_transaction_mode_is_accepted(shared: Deployment):
    with pgbouncer.running(shared) as pooler:
        assert not [warning for warning in await check(service(pooler)) if "pooler" in warning]


async def test_a_pooler_in_session_mode_is_accepted(shared: Deployment):
    with pgbouncer.running(shared, pool_mode="session", pool_size=10) as pooler:
        assert not [warning for warning in await check(service(pooler)) if "pooler" in warning]


async def test_a_pooler_that_keeps_track_of_prepared_statements_is_accepted_with_them(shared: Deployment):
    with pgbouncer.running(shared, settings=preparing(200)) as pooler:
        assert not [warning for warning in await check(service(pooler, prepares=True)) if "pooler" in warning]


async def test_a_pooler_that_does_not_keep_track_of_prepared_statements_is_refused_with_them(shared: Deployment):
    with pgbouncer.running(shared, settings=preparing(0)) as pooler:
        with pytest.raises(errors.BarrierDown, match="does not keep track of prepared statements"):
            await check(service(pooler, prepares=True))
        await check(service(pooler))


async def test_a_pooler_in_session_mode_is_refused_with_prepared_statements(shared: Deployment):
    """It could do them, and looks like one that confuses them."""
    with (
        pgbouncer.running(shared, pool_mode="session", pool_size=10) as pooler,
        pytest.raises(errors.BarrierDown, match="does not keep track of prepared statements"),
    ):
        await check(service(pooler, prepares=True))


async def test_a_pooler_in_statement_mode_is_refused(shared: Deployment):
    with (
        pgbouncer.running(shared, pool_mode="statement") as pooler,
        pytest.raises(errors.BarrierDown, match="transaction mode"),
    ):
        await check(service(pooler))


async def test_a_pooler_that_spreads_a_transaction_over_several_is_refused(shared: Deployment):
    """PgBouncer refuses transactions in statement mode; another pooler may not say that it makes none."""

    class Spreading(Connection):
        @asynccontextmanager
        async def transaction(self, *_: object) -> AsyncIterator[None]:
            yield

    async with await Spreading.connect(shared.url("rag_app"), autocommit=True, row_factory=dict_row) as connection:
        with pytest.raises(errors.BarrierDown, match="spreads a transaction"):
            await check_pooler(connection, prepares=False)


@pytest.mark.parametrize(
    ("server_role", "refused"),
    [
        ("rag_app", "must log in as rag_publisher, not as rag_app"),
        ("rag_publisher", "must log in as rag_app, not as rag_publisher"),
        ("rag_migrator", "must log in as rag_app, not as rag_migrator"),
    ],
)
async def test_a_pooler_that_gives_several_users_one_role_is_refused(
    shared: Deployment, server_role: str, refused: str
):
    with pgbouncer.running(shared, server_role=server_role) as pooler, pytest.raises(errors.BarrierDown, match=refused):
        await check(service(pooler))


async def test_a_pooler_that_gives_its_connections_an_identity_is_refused(shared: Deployment):
    identity = "set app.user_id = ''7''"
    with (
        pgbouncer.running(shared, of_the_database=f"connect_query='{identity}'") as pooler,
        pytest.raises(errors.BarrierDown, match=r"rag_app has a default for app\.user_id"),
    ):
        await check(service(pooler))


@pytest.mark.parametrize("settings", [{}, {"ignore_startup_parameters": "options"}], ids=["refused", "ignored"])
async def test_an_identity_in_the_options_of_a_connection_does_not_pass_a_pooler(
    shared: Deployment, world: World, settings: dict[str, object]
):
    with pgbouncer.running(shared, settings=settings) as pooler:
        url = f"{pooler.url('rag_app')}&options=-c%20app.user_id%3D1"
        async with Database(url, signer=SIGNER, pool_timeout_s=0.5) as database:
            if settings:
                await database.check_barrier(dimensions=DIMENSIONS, strict=False)
                await assert_answered(database, world)
            else:
                with pytest.raises(errors.DatabaseUnavailable):
                    await database.check_barrier(dimensions=DIMENSIONS, strict=False)


# --- what happens later --------------------------------------------------------------------------


async def assert_answered(database: Database, world: World, principal: Principal = NOAH) -> None:
    findings = Findings()
    async with database.transaction(principal) as session:
        await ask(session, principal, world, findings, token=7)
    assert findings == Findings()


async def test_an_identity_that_another_client_left_behind_speaks_for_nobody(shared: Deployment, world: World):
    """Who has the service's password and leaves a signed identity on a connection of the pooler."""
    with pgbouncer.running(shared, pool_size=1) as pooler:
        async with service(pooler) as database, client(pooler, prepares=False) as hostile:
            await assert_answered(database, world)
            for _ in range(3):
                await set_for_the_session(hostile, MARA, SIGNER.sign(MARA, role="rag_app"))
                with structlog.testing.capture_logs() as logged, pytest.raises(errors.DatabaseUnavailable):
                    await assert_answered(database, world)
                assert [entry["event"] for entry in logged] == ["identity_left_behind"]
                # The pooler has closed it: nobody after this one is refused.
                for _ in range(5):
                    await assert_answered(database, world)


async def test_a_token_is_not_taken_in_a_session_that_another_client_left_behind(shared: Deployment):
    with pgbouncer.running(shared, pool_size=1) as pooler:
        async with service(pooler) as database:
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)
            assert (await database.rows_alone("take_token", NOAH, {"kind": "query"}))[0]["granted"]
            async with client(pooler, prepares=False) as somebody:
                await somebody.execute("set app.tenant_id = 'elsewhere'")
            with pytest.raises(errors.DatabaseUnavailable, match="not clean"):
                await database.rows_alone("take_token", NOAH, {"kind": "query"})
            # That ended the session; the next one is another.
            assert (await database.rows_alone("take_token", NOAH, {"kind": "query"}))[0]["granted"]


async def test_who_waits_too_long_for_the_pooler_is_told(shared: Deployment, world: World):
    with pgbouncer.running(shared, pool_size=1, settings={"query_wait_timeout": 1}) as pooler:
        async with service(pooler, wait_s=0.5) as database:
            await assert_answered(database, world)
            with pooler.connect() as holder, holder.transaction():
                holder.execute("select 1")
                with pytest.raises(errors.DatabaseUnavailable):
                    await assert_answered(database, world)
            await assert_answered(database, world)


async def test_once_statements_were_mixed_up_no_further_one_is_sent(shared: Deployment, world: World):
    """As when somebody puts such a pooler into the path of a service that runs already."""
    with pgbouncer.running(shared, pool_size=1, settings=preparing(0)) as pooler:
        async with service(pooler, prepares=True, pool_size=1) as database:
            for _ in range(10):
                await assert_answered(database, world)
            pooler.command("RECONNECT")
            with pytest.raises(errors.BarrierDown):
                await assert_answered(database, world)
            await assert_closed_for_good(database)


async def test_a_pooler_that_no_longer_keeps_track_ends_the_service(shared: Deployment, world: World):
    with pgbouncer.running(shared, pool_size=1, settings=preparing(200)) as pooler:
        async with service(pooler, prepares=True, pool_size=1) as database:
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)
            for _ in range(10):
                await assert_answered(database, world)
            pooler.command("RECONNECT")
            await assert_answered(database, world)
            pooler.configure(max_prepared_statements=0)
            with pytest.raises(errors.BarrierDown):
                await assert_answered(database, world)
            pooler.configure(max_prepared_statements=200)
            await assert_closed_for_good(database)


def test_the_process_ends_when_statements_are_mixed_up(deployment: Deployment, tmp_path: Path):
    with serving(tmp_path, RAG_DATABASE_URL=deployment.url("rag_app"), RAG_PREPARED_STATEMENTS="1") as server:
        server.wait_until_it_answers(lines=3)
        with deployment.cluster.superuser(deployment.name) as connection:
            # What the server says of a statement that it does not know.
            connection.execute("""
                create or replace function rag.begin_as(
                    tenant_id text, user_id bigint, project_id text, tags text[], signature text
                )
                returns void language plpgsql as $$
                begin
                    raise exception 'prepared statement "_pg3_0" does not exist' using errcode = '26000';
                end $$
            """)
        answer = httpx2.post(
            f"{server.url}/rag/query",
            json={"query": "Who is asking?", "tenant_id": "tenant-0", "user_id": 1},
            headers={"Authorization": f"Bearer {server.token}"},
            trust_env=False,
        )
        assert (answer.status_code, answer.json()["code"]) == (503, "barrier_down")
        assert server.process.wait(PATIENCE_S) == 1
        assert "prepared statements" in server.err


async def assert_closed_for_good(database: Database) -> None:
    for _ in range(3):
        with pytest.raises(errors.BarrierDown, match="prepared statements"):
            async with database.transaction(MARA):
                pytest.fail("it may run anybody's statements")
        with pytest.raises(errors.BarrierDown):
            await database.ping()
        with pytest.raises(errors.BarrierDown):
            async with database.proven():
                pytest.fail("it may run anybody's statements")
