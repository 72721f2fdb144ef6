"""Identity through the service's own pool of connections, whatever happens to a request: SECURITY.md I8 to I13,
F4, F6 to F8, Y5."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
import structlog

from rag import embedded, errors, migrate
from rag.connect import Connection
from rag.database import Database
from rag.principal import Principal
from tests.barrier.disturbance import (
    MARA,
    NOAH,
    VARIABLES,
    Findings,
    World,
    ask,
    build,
    carried,
    disturb,
    set_for_the_session,
    watch,
)
from tests.conftest import DIMENSIONS, LOGINS, SIGNER, Cluster, Deployment, know_signer


@pytest.fixture(scope="module")
def shared(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A database for tests that leave it as it was."""
    with new_deployment() as clone:
        yield clone


@pytest.fixture(scope="module")
def world(shared: Deployment) -> World:
    return build(shared)


def service(deployment: Deployment, *, url: str | None = None, pool_size: int = 1, wait_s: float = 60.0) -> Database:
    return Database(url or deployment.url("rag_app"), signer=SIGNER, pool_size=pool_size, pool_timeout_s=wait_s)


@asynccontextmanager
async def next_borrower(database: Database) -> AsyncIterator[Connection]:
    """What the next request gets, before it has begun a transaction."""
    async with database._app.connection() as connection:
        yield connection


async def assert_clean(database: Database, world: World, *principals: Principal) -> None:
    """The next borrower finds no identity, and those who come after it their own rows and no others."""
    async with next_borrower(database) as connection:
        assert await carried(connection) == {}
    findings = Findings()
    for token, principal in enumerate(principals or (NOAH, MARA)):
        async with database.transaction(principal) as session:
            await ask(session, principal, world, findings, token=token)
    assert findings == Findings()


# --- whatever happens to requests ----------------------------------------------------------------


async def test_no_identity_outlives_a_request_that_is_cancelled_or_fails(
    shared: Deployment,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
):
    findings = Findings()
    watch(monkeypatch, findings)
    async with service(shared, pool_size=3) as database:
        started = time.monotonic()
        await disturb(
            database,
            world,
            findings,
            deployment=shared,
            requests=scaled(test=300, ci=5_000, prove=200_000),
            seed=20261121,
        )
        seconds = time.monotonic() - started
        for _ in range(3):
            await assert_clean(database, world)
    assert findings.leaks == []
    assert findings.hidden == []
    assert findings.wrong_statements == []
    assert findings.collateral == []
    figure(
        f"identity through the pool: {findings.requests:,} requests, {findings.disturbed:,} disturbed, "
        f"{findings.requests / seconds:,.0f} a second: 0 leaks"
    )


# --- what a session could keep ------------------------------------------------------------------

KEEPSAKES = {
    "an identity": "set session app.user_id = '1'",
    "a search path": "set session search_path = pg_catalog",
    "a time limit": "set session statement_timeout = '1ms'",
    "a way of planning": "set session plan_cache_mode = force_generic_plan",
    "a lock": "select pg_advisory_lock(1)",
    "rows": "declare kept cursor with hold for select title from rag.v_documents",
}
KEPT = """
    select name from pg_settings where source = 'session'
    union all select 'a lock' from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()
    union all select 'a cursor' from pg_cursors where is_holdable
"""


@pytest.mark.parametrize("statement", KEEPSAKES.values(), ids=KEEPSAKES)
@pytest.mark.parametrize("within_a_transaction", [True, False])
async def test_what_a_request_left_in_its_session_is_gone_before_the_next(
    shared: Deployment, world: World, statement: str, within_a_transaction: bool
):
    async with service(shared) as database:
        if within_a_transaction:
            async with database.transaction(MARA) as session:
                await session._connection.execute(statement.encode())
        else:
            async with next_borrower(database) as connection:
                await connection.execute(statement.encode())
                process = connection.info.backend_pid
        async with next_borrower(database) as connection:
            cursor = await connection.execute(KEPT)
            assert await cursor.fetchall() == []
            # The same session: it was cleaned, and not replaced.
            assert within_a_transaction or connection.info.backend_pid == process
        await assert_clean(database, world)


async def test_a_signed_identity_left_in_the_session_speaks_for_nobody_else(shared: Deployment, world: World):
    async with service(shared) as database:
        async with database.transaction(MARA) as session:
            await set_for_the_session(session._connection, MARA, database.sign(MARA, role="rag_app"))
        await assert_clean(database, world, NOAH)


async def test_a_connection_that_carries_an_identity_when_it_is_borrowed_is_closed(
    deployment: Deployment,
):
    """A default set while the service runs: every connection that is made from then on has it."""
    world = build(deployment)
    async with service(deployment) as database:
        await assert_clean(database, world)
        with deployment.cluster.superuser(deployment.name) as connection:
            connection.execute(f"alter database {deployment.name} set app.tenant_id = 'tenant-0'")
            _cut(connection)
        with structlog.testing.capture_logs() as logged:
            for _ in range(2):
                with pytest.raises(errors.DatabaseUnavailable, match="not clean"):
                    async with database.transaction(NOAH):
                        pytest.fail("it carries somebody else's tenant")
        assert [entry["event"] for entry in logged] == ["identity_left_behind"] * 2
        with deployment.cluster.superuser(deployment.name) as connection:
            connection.execute(f"alter database {deployment.name} reset app.tenant_id")
            _cut(connection)
        await assert_clean(database, world)


def _cut(connection: psycopg.Connection) -> None:
    """End the service's connections, as an administrator does."""
    connection.execute(
        """
        select pg_terminate_backend(pid, 10000)
        from pg_stat_activity
        where datname = current_database() and application_name = 'palisade'
        """
    )


async def test_an_identity_set_outside_a_transaction_is_lost_at_once(shared: Deployment, world: World):
    async with service(shared) as database, next_borrower(database) as connection:
        cursor = await connection.execute(
            "select rag.begin_as(%s, %s, %s, %s, %s)",
            (MARA.tenant_id, MARA.user_id, MARA.project_id, list(MARA.tags), database.sign(MARA, role="rag_app")),
        )
        assert await cursor.fetchall() != []
        assert await carried(connection) == {}
        cursor = await connection.execute("select title from rag.v_documents")
        assert await cursor.fetchall() == []


async def test_a_commit_in_the_middle_ends_the_identity(shared: Deployment, world: World):
    async with service(shared) as database:
        async with database.transaction(MARA) as session:
            session._connection.pgconn.exec_(b"commit")
            assert await carried(session._connection) == {}
            cursor = await session._connection.execute("select title from rag.v_documents")
            assert await cursor.fetchall() == []
        await assert_clean(database, world)


ROOT = Path(__file__).parents[2]
LINES = [
    (path.relative_to(ROOT).as_posix(), line.strip())
    for folder in ("rag", "api", "sql")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".sql")
    for line in path.read_text(encoding="utf-8").splitlines()
]


def test_no_code_sets_a_variable_for_longer_than_its_transaction():
    """SECURITY.md I11."""
    assert len(LINES) > 5_000
    # What the session of a build has until it ends, which speaks for nobody.
    building = "role|statement_timeout|lock_timeout|maintenance_work_mem|max_parallel_maintenance_workers"
    lasting = re.compile(rf"\bset\s+(session\s+)?app\.|set_config\((?!.*, true\))(?!'({building})', )", re.IGNORECASE)
    assert [found for found in LINES if lasting.search(found[1]) and not found[1].startswith("--")] == []


def test_an_identity_is_set_by_one_function_and_by_the_doctor_who_tries_to_forge_it():
    """SECURITY.md I15."""
    setting = re.compile(r"\bset local app\.|set_config\('app\.")
    assert {path for path, line in LINES if setting.search(line)} == {
        "sql/schema/20_identity.sql",
        "sql/queries/doctor_speak.sql",
    }


# --- an identity by default ----------------------------------------------------------------------


async def refusal(database: Database) -> str:
    async with database:
        with pytest.raises(errors.BarrierDown) as refused:
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)
    return refused.value.message


@pytest.mark.parametrize("name", VARIABLES)
async def test_a_default_identity_of_the_environment_is_refused(
    shared: Deployment, monkeypatch: pytest.MonkeyPatch, name: str
):
    monkeypatch.setenv("PGOPTIONS", f"-c {name}=1")
    assert await refusal(service(shared)) == f"rag_app has a default for {name}"


@pytest.mark.parametrize("name", VARIABLES)
async def test_a_default_identity_of_the_connection_string_is_refused(shared: Deployment, name: str):
    url = f"{shared.url('rag_app')}&options=-c%20{name}%3D1"
    assert await refusal(service(shared, url=url)) == f"rag_app has a default for {name}"


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(
    "whose", ["role rag_app", "role all", "database {database}", "role rag_app in database {database}"]
)
async def test_a_default_identity_of_a_role_or_a_database_is_refused(deployment: Deployment, whose: str, name: str):
    place = whose.format(database=deployment.name)
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(f"alter {place} set {name} = '1'")
        try:
            assert await refusal(service(deployment)) == f"rag_app has a default for {name}"
        finally:
            connection.execute(f"alter {place} reset {name}")


# --- faults of the database and the network ------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "statement", "error"),
    [
        ("statement_timeout", "select pg_sleep(60)", errors.DatabaseTimeout),
        ("lock_timeout", "select pg_advisory_xact_lock(1)", errors.DatabaseTimeout),
        # These two end the session.
        ("idle_in_transaction_session_timeout", None, (errors.DatabaseTimeout, errors.DatabaseUnavailable)),
        ("transaction_timeout", "select pg_sleep(60)", (errors.DatabaseTimeout, errors.DatabaseUnavailable)),
    ],
)
async def test_a_time_limit_of_the_server_is_a_typed_error_and_leaves_nothing(
    shared: Deployment, world: World, limit: str, statement: str | None, error: type[Exception]
):
    with shared.connect("postgres") as holder, holder.transaction():
        holder.execute("select pg_advisory_xact_lock(1)")
        if not holder.execute("select from pg_settings where name = %s", (limit,)).fetchall():
            assert (limit, holder.info.server_version < 170000) == ("transaction_timeout", True)
            return
        async with service(shared) as database:

            async def reach_the_limit() -> None:
                async with database.transaction(MARA) as session:
                    await session._connection.execute(f"set local {limit} = '20ms'".encode())
                    if statement is None:
                        await asyncio.to_thread(_wait_until_gone, holder, session._connection.info.backend_pid)
                    await session._connection.execute((statement or "select 1").encode())

            with pytest.raises(error):
                await reach_the_limit()
            await assert_clean(database, world)


def _wait_until_gone(connection: psycopg.Connection, process: int) -> None:
    while connection.execute("select from pg_stat_activity where pid = %s", (process,)).fetchall():
        # Within a transaction the view stays as it was first seen.
        connection.execute("select pg_stat_clear_snapshot()")


async def test_a_database_that_takes_no_more_connections_is_unavailable_and_recovers(deployment: Deployment):
    world = build(deployment)
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(f"alter database {deployment.name} connection limit 0")
        async with service(deployment, wait_s=0.2) as database:
            with pytest.raises(errors.DatabaseUnavailable):
                async with database.transaction(MARA):
                    pytest.fail("the database takes no connections")
            connection.execute(f"alter database {deployment.name} connection limit -1")
            await _until_answered(database)
            await assert_clean(database, world)


async def _until_answered(database: Database) -> None:
    """Ask until the pool has a connection again; it tries ever more seldom."""
    deadline = time.monotonic() + 30
    while True:
        try:
            await database.ping()
        except errors.DatabaseUnavailable:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        else:
            return


async def test_after_a_server_process_is_killed_the_service_recovers_by_itself():
    """The server ends all sessions and starts again; F4."""
    with embedded.ephemeral() as server:
        migrate.bootstrap(server.url("postgres"), dict.fromkeys(LOGINS, "pw"))
        deployment = Deployment(Cluster(superuser_url=server.url("postgres"), password="pw"), embedded.DATABASE)
        migrate.upgrade(deployment.url("rag_migrator"), dimensions=DIMENSIONS)
        with deployment.cluster.superuser(deployment.name) as connection:
            know_signer(connection)
        world = build(deployment)
        with deployment.cluster.superuser(deployment.name) as connection:
            # This server does not wait for its disk; what is not there yet would be lost.
            connection.execute("checkpoint")
        async with service(deployment, pool_size=3, wait_s=1.0) as database:
            ends = []

            async def request(principal: Principal, *, kill: bool) -> None:
                try:
                    async with database.transaction(principal) as session:
                        if kill:
                            os.kill(session._connection.info.backend_pid, signal.SIGKILL)
                        await session._connection.execute("select pg_sleep(60)")
                except errors.RAGServiceError as error:
                    ends.append(type(error))

            await asyncio.gather(
                *(request(one, kill=one is NOAH) for one in (MARA, Principal(tenant_id="tenant-2"), NOAH))
            )
            assert ends == [errors.DatabaseUnavailable] * 3
            await _until_answered(database)
            await assert_clean(database, world)


class Wire:
    """A relay in front of the server, which can fall silent or break."""

    def __init__(self, url: str) -> None:
        self._server = urlsplit(url)
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.delay_s = 0.0
        self._ends: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        login = self._server.netloc.rpartition("@")[0]
        try:
            yield urlunsplit(self._server._replace(netloc=f"{login}@127.0.0.1:{port}"))
        finally:
            listener.close()
            self.flow()
            self.reset()

    def silence(self) -> None:
        self._flowing.clear()

    def flow(self) -> None:
        self._flowing.set()

    def reset(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(self._server.hostname, self._server.port)
        ends = {writer, server_writer}
        self._ends |= ends
        await asyncio.gather(self._pump(reader, server_writer), self._pump(server_reader, writer))
        self._ends -= ends

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._flowing.wait()
                await asyncio.sleep(self.delay_s)
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()


async def test_a_connection_that_is_reset_by_the_network_is_a_typed_error_and_is_replaced(
    shared: Deployment, world: World
):
    wire = Wire(shared.url("rag_app"))
    async with wire() as url, service(shared, url=url) as database:

        async def be_reset() -> None:
            async with database.transaction(MARA) as session:
                wire.reset()
                await session._connection.execute("select pg_sleep(60)")

        for _ in range(5):
            with pytest.raises(errors.DatabaseUnavailable):
                await be_reset()
            await assert_clean(database, world)


async def test_a_slow_network_changes_nothing_but_the_time(shared: Deployment, world: World):
    wire = Wire(shared.url("rag_app"))
    async with wire() as url, service(shared, url=url) as database:
        wire.delay_s = 0.02
        await assert_clean(database, world)


async def test_a_request_over_a_network_that_fell_silent_can_be_cancelled_and_leaves_nothing(
    shared: Deployment, world: World, scaled: Callable[..., int]
):
    # The driver tries to cancel in the database as well, for ten seconds at most; then it closes the connection.
    silence_s = scaled(test=1, ci=12, prove=12)
    wire = Wire(shared.url("rag_app"))
    async with wire() as url, service(shared, url=url) as database:

        async def ask_into_the_silence() -> None:
            async with database.transaction(MARA) as session:
                wire.silence()
                asyncio.get_running_loop().call_later(silence_s, wire.flow)
                await session._connection.execute("select title from rag.v_documents")

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask_into_the_silence()
        await assert_clean(database, world)
