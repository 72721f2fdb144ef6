"""Connections and transactions: every one of them speaks for a principal, from its first statement on.

Two pools, because two roles write: `rag_app`, and `rag_publisher` for scope public. Driver errors
leave this module as the errors of `rag.errors`, never with text of the database in them, which may
quote what a user wrote.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial
from typing import Any

import psycopg
import structlog
from psycopg import AsyncConnection, pq
from psycopg.rows import DictRow
from psycopg_pool import AsyncConnectionPool, PoolTimeout, TooManyRequests

from rag import connect, errors, manifest
from rag.canary import Canary
from rag.finding import Finding, worst_first
from rag.frozen import head_revision, other_draft
from rag.principal import Principal
from rag.resources import query
from rag.sign import Signer

# PostgreSQL 16 has IS JSON and `grant … with set`, which bootstrap.sql uses.
MIN_SERVER_VERSION = 160000
# Releases of August 2026 fix CVE-2026-14666, where cached plans outlive a change of role.
SECURITY_FLOOR = {16: 160016, 17: 170012, 18: 180006}
# CVE-2026-3172, a parallel HNSW build.
PGVECTOR_FLOOR = (0, 8, 2)

log = structlog.get_logger(__name__)

MIXED_UP = (
    "the server did not find a statement where this service had put it: a connection pooler does not keep track "
    "of prepared statements, and may run other people's"
)

type_row = Mapping[str, Any]


class Session:
    """One transaction of one principal."""

    def __init__(self, connection: AsyncConnection[DictRow]) -> None:
        self._connection = connection

    async def rows(self, name: str, parameters: Mapping[str, Any]) -> list[DictRow]:
        """The rows of `sql/queries/{name}.sql`."""
        cursor = await self._connection.execute(query(name).encode(), parameters)
        return await cursor.fetchall()

    async def row(self, name: str, parameters: Mapping[str, Any]) -> DictRow | None:
        """The first row of `sql/queries/{name}.sql`, None when there is none."""
        cursor = await self._connection.execute(query(name).encode(), parameters)
        return await cursor.fetchone()

    async def run(self, name: str, parameters: Mapping[str, Any]) -> None:
        """Run `sql/queries/{name}.sql` for its effect."""
        await self._connection.execute(query(name).encode(), parameters)

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """A transaction, or a part of one, that is undone at the end, whatever came of it."""
        async with self._connection.transaction(force_rollback=True):
            yield


class Database:
    """The pools of the service. Open it with `async with`.

    role: as which `url` logs in: rag_app, or rag_worker for workers.
    prepared_statements: let the server keep statements that are asked often; a pooler in the path then has
    to keep track of them.
    """

    def __init__(
        self,
        url: str,
        *,
        signer: Signer,
        publisher_url: str | None = None,
        role: str = "rag_app",
        pool_size: int = 5,
        pool_timeout_s: float = 5.0,
        prepared_statements: bool = False,
    ) -> None:
        self._signer = signer
        self._role = role
        self._clock_ahead_s = 0.0
        self._prepares = prepared_statements
        self._mixed_up = False
        pool = partial(connect.pool, timeout_s=pool_timeout_s, prepares=prepared_statements)
        self._app = pool(url, size=pool_size)
        self._publisher = pool(publisher_url, size=pool_size) if publisher_url else None
        # One connection, made when it is first wanted.
        self._aside = pool(url, size=1, min_size=0)

    async def __aenter__(self) -> Database:
        await self._app.open()
        await self._aside.open()
        if self._publisher is not None:
            await self._publisher.open()
        return self

    def sign(self, principal: Principal, *, role: str) -> str:
        """The signature of a transaction that begins about now, by the clock of the database."""
        return self._signer.sign(principal, role=role, now=time.time() + self._clock_ahead_s)

    async def __aexit__(self, *_: object) -> None:
        await self._app.close()
        await self._aside.close()
        if self._publisher is not None:
            await self._publisher.close()

    @property
    def can_publish(self) -> bool:
        return self._publisher is not None

    @property
    def _pools(self) -> dict[str, AsyncConnectionPool[connect.Connection]]:
        """By the role that logs in."""
        return {self._role: self._app} | ({} if self._publisher is None else {"rag_publisher": self._publisher})

    @property
    def is_down(self) -> bool:
        """Whether statements were mixed up: every call raises BarrierDown from then on."""
        return self._mixed_up

    @asynccontextmanager
    async def transaction(
        self, principal: Principal, *, read_only: bool = False, publish: bool = False
    ) -> AsyncIterator[Session]:
        """A transaction that speaks for `principal`; as rag_publisher when `publish`.

        Never holds the connection longer than the block: no model is called inside one. Raises
        the DatabaseError family, ScopeForbidden for a write that a policy refuses, InvalidInput
        for a value that the database cannot store. BarrierDown is final: no transaction follows it.
        """
        async with (
            self._borrowed(publish=publish) as connection,
            self._speaking(connection, principal, read_only=read_only, publish=publish) as session,
        ):
            yield session

    async def rows_alone(
        self, name: str, principal: Principal, parameters: Mapping[str, Any], *, publish: bool = False
    ) -> list[DictRow]:
        """The rows of `sql/queries/{name}.sql`, which says itself who speaks and is a transaction of its own.

        One round trip where `transaction` takes four, and nothing stays locked on the way to us. Raises like that.
        """
        async with self._borrowed(publish=publish) as connection:
            # The pool's connections are in autocommit, and this one was found clean. A pooler may hand on a session
            # that is not, which can only be ended within a transaction.
            speaking = (
                nullcontext(Session(connection))
                if connection.direct
                else self._speaking(connection, principal, read_only=False, publish=publish)
            )
            async with speaking as session:
                return await session.rows(name, {**parameters, **self._named(principal, publish=publish)})

    @asynccontextmanager
    async def _borrowed(self, *, publish: bool) -> AsyncIterator[connect.Connection]:
        pool = self._publisher if publish else self._app
        if pool is None:
            raise errors.ScopeForbidden(
                "public documents are written by rag_publisher: set RAG_PUBLISHER_DATABASE_URL", field="scope"
            )
        task = asyncio.current_task()
        cancellations = task.cancelling() if task else 0
        with self._translated_errors():
            async with pool.connection() as connection:
                # The pool waits in wait_for(), which up to Python 3.11 loses a cancellation that comes
                # together with the connection; what was asked to end would run on.
                if task is not None and task.cancelling() > cancellations:
                    raise asyncio.CancelledError
                yield connection

    @asynccontextmanager
    async def _speaking(
        self, connection: connect.Connection, principal: Principal, *, read_only: bool, publish: bool
    ) -> AsyncIterator[Session]:
        await connection.set_read_only(read_only)
        async with connection.transaction():
            session = Session(connection)
            assert connection.info.transaction_status == pq.TransactionStatus.INTRANS
            try:
                await session.run("begin_as", self._named(principal, publish=publish))
            except psycopg.errors.InsufficientPrivilege as error:
                raise await _left_behind(connection) from error
            yield session

    def _named(self, principal: Principal, *, publish: bool) -> dict[str, Any]:
        """What `begin_as` is told."""
        return {
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "project_id": principal.project_id,
            "tags": list(principal.tags),
            "signature": self.sign(principal, role="rag_publisher" if publish else self._role),
        }

    @asynccontextmanager
    async def proven(self, purpose: str = "service_keys") -> AsyncIterator[tuple[Session, str]]:
        """A session without a principal, to which no row is visible, and a proof that the service asks.

        On a connection that requests cannot use up: a key that is revoked ends while all others are busy.
        """
        with self._translated_errors():
            async with self._aside.connection() as connection:
                proof = self._signer.prove(role=self._role, now=time.time() + self._clock_ahead_s, purpose=purpose)
                yield Session(connection), proof

    async def ping(self) -> None:
        """Raise DatabaseUnavailable unless the database answers."""
        with self._translated_errors():
            async with self._app.connection():
                pass  # the pool asks a connection before it gives it out

    async def check_barrier(self, *, dimensions: int | Collection[int], strict: bool) -> list[str]:
        """Raise BarrierDown or SchemaMismatch unless access control will hold; return the warnings.

        `dimensions`: the width of the vectors, or those that they may have while the model is changed. With `strict` a
        warning is raised as well.
        """
        warnings: list[str] = []
        databases = set()
        for role, pool in self._pools.items():
            with translated_errors():
                async with pool.connection() as connection:
                    found = await Session(connection).row("check_barrier", {})
                    assert found is not None
                    # Signatures expire by the database's clock, which may differ from ours.
                    self._clock_ahead_s = found["seconds"] - time.time()
                    _check_role(found, role=role)
                    await connect.check_pooler(connection, prepares=self._prepares)
                    await check_schema(connection, found, dimensions=dimensions)
                    warnings += _version_warnings(found)
                    databases.add(found["database_id"])
        if len(databases) > 1:
            raise errors.BarrierDown(f"{self._role} and rag_publisher are logged in to different databases")
        warnings = list(dict.fromkeys(warnings))
        if strict and warnings:
            raise errors.BarrierDown("; ".join(warnings))
        return warnings

    async def prove_barrier(self, *, dimensions: int | Collection[int], strict: bool) -> None:
        """Like `check_barrier`; and look for what only shows in the catalog, or when somebody tries.

        Takes a quarter of a second on two cores: for a service that starts, not for every command.
        """
        await self.check_barrier(dimensions=dimensions, strict=strict)
        findings = await self.examine(dimensions=dimensions, thorough=False)
        fatal = [
            finding for finding in findings if finding.severity == "error" or (strict and finding.severity == "warning")
        ]
        if fatal:
            more = f", and {len(fatal) - 1} more" if len(fatal) > 1 else ""
            raise errors.BarrierDown(f"{fatal[0]}{more}; `rag doctor` prints the SQL that mends it")
        for finding in findings:
            if finding.severity == "warning":
                log.warning("startup_check", finding=str(finding))

    async def examine(self, *, dimensions: int | Collection[int], thorough: bool) -> list[Finding]:
        """What is not as it must be in the catalog, and who gets at a canary of each login and must not.

        Only for a database that `check_barrier` has found migrated.
        """

        width = await self._width(dimensions)

        async def compare() -> list[Finding]:
            async with self._app.connection() as connection:
                return await manifest.differences(Session(connection), dimensions=width)

        async def fly(role: str) -> list[Finding]:
            async with self._pools[role].connection() as connection:
                # A search may have left it so, and a canary is planted.
                await connection.set_read_only(False)
                if connection.info.user != role:
                    message = f"cannot be planted by {connection.info.user}, who is logged in instead"
                    return [Finding(severity="error", object=f"canary as {role}", message=message)]
                now = time.time() + self._clock_ahead_s
                return await Canary(
                    session=Session(connection),
                    signer=self._signer,
                    role=role,
                    now=now,
                    dimensions=width,
                    thorough=thorough,
                ).findings()

        with self._translated_errors():
            found = await asyncio.gather(compare(), *(fly(role) for role in self._pools))
        return worst_first(finding for findings in found for finding in findings)

    async def _width(self, dimensions: int | Collection[int]) -> int:
        """Of the widths that the vectors may have the one that they have."""
        if isinstance(dimensions, int):
            return dimensions
        with self._translated_errors():
            async with self._app.connection() as connection:
                found = await Session(connection).row("check_barrier", {})
        assert found is not None
        width: int = found["embedding_dimensions"]
        return width

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Like `translated_errors`; once statements were mixed up, no further one is sent."""
        if self._mixed_up:
            raise errors.BarrierDown(MIXED_UP)
        with translated_errors():
            try:
                yield
            except (psycopg.errors.InvalidSqlStatementName, psycopg.errors.DuplicatePreparedStatement):
                self._mixed_up = True
                raise


async def _left_behind(connection: AsyncConnection[DictRow]) -> errors.DatabaseUnavailable:
    """Somebody set an identity for the whole session.

    Closed within the transaction, so that a pooler ends its connection to the server as well and gives it to nobody.
    """
    log.error("identity_left_behind")
    await connection.close()
    return errors.DatabaseUnavailable("a database connection was not clean and has been closed; try again")


def _check_role(found: type_row, *, role: str) -> None:
    if found["server_version"] < MIN_SERVER_VERSION:
        raise errors.BarrierDown("PostgreSQL 16 or newer is required")
    if found["role_name"] != role:
        raise errors.BarrierDown(f"the service must log in as {role}, not as {found['role_name']}")
    if found["is_powerful"] or found["may_become_powerful"]:
        raise errors.BarrierDown(f"{role} could switch row security off: take its superuser-like rights away")
    if found["owned_tables"]:
        raise errors.BarrierDown(f"{role} owns {', '.join(found['owned_tables'])}")
    if found["unprotected_tables"]:
        raise errors.BarrierDown(f"row security is not forced on {', '.join(found['unprotected_tables'])}")
    if found["default_identity"]:
        raise errors.BarrierDown(f"{role} has a default for {', '.join(found['default_identity'])}")
    if found["row_security"] != "on":
        raise errors.BarrierDown("row_security is not on")


async def check_schema(
    connection: AsyncConnection[DictRow], found: type_row, *, dimensions: int | Collection[int]
) -> None:
    """Raise SchemaMismatch unless the schema is that of this version; `found` is the row of `check_barrier`."""
    try:
        revision = await Session(connection).row("schema_revision", {})
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise errors.SchemaMismatch("this database has not been migrated: run `rag migrate`") from error
    draft = other_draft(revision["digests"] if revision else None)
    if draft is not None:
        raise errors.SchemaMismatch(
            f"this database was built by another draft of migration {draft}, from before the first release"
        )
    if revision is None or revision["revision"] != head_revision():
        raise errors.SchemaMismatch("migrations are pending: run `rag migrate`")
    widths = [dimensions] if isinstance(dimensions, int) else list(dimensions)
    if found["embedding_dimensions"] not in widths:
        raise errors.SchemaMismatch(
            f"RAG_EMBEDDING_DIMENSIONS is {' or '.join(map(str, widths))}, and this database was migrated with "
            f"{found['embedding_dimensions']}"
        )


def _version_warnings(found: type_row) -> list[str]:
    warnings = []
    server = found["server_version"]
    floor = SECURITY_FLOOR.get(server // 10000)
    if floor is not None and server < floor:
        warnings.append(
            f"PostgreSQL {server // 10000}.{server % 10000} lacks security fixes of "
            f"{floor // 10000}.{floor % 10000} (CVE-2026-14666)"
        )
    pgvector = tuple(int(part) for part in (found["pgvector_version"] or "0").split("."))
    if pgvector < PGVECTOR_FLOOR:
        warnings.append(f"pgvector {found['pgvector_version']} is older than 0.8.2 (CVE-2026-3172)")
    return warnings


@contextmanager
def translated_errors() -> Iterator[None]:
    """Driver errors become those of `rag.errors`; messages of the server stay behind."""
    try:
        yield
    except TooManyRequests as error:
        raise errors.DatabaseUnavailable("all database connections are busy; try again shortly") from error
    except PoolTimeout as error:
        # The pool cannot tell which: it goes on trying to connect in the background.
        raise errors.DatabaseUnavailable(
            "the database does not answer, or all connections to it are busy; try again shortly"
        ) from error
    except psycopg.Error as error:
        raise _translation(error) from error
    except UnicodeEncodeError as error:
        raise errors.InvalidInput("the text contains a lone surrogate, which is no character") from error


def _translation(error: psycopg.Error) -> errors.RAGServiceError:
    state = error.sqlstate or ""
    if state == "42501":
        return errors.ScopeForbidden()
    if state in ("26000", "42P05"):
        return errors.BarrierDown(MIXED_UP)
    if state == "28000":
        return errors.SignatureRefused()
    if state == "55M01":
        return errors.ModelNotActive()
    if state == "55M02":
        return errors.ModelChanging()
    if state == "23503":
        # What a write belongs to is there when it begins: its class or document was erased meanwhile.
        return errors.SourceRetracted()
    if state in ("57014", "55P03", "25P03", "25P04"):
        return errors.DatabaseTimeout()
    if state == "53100":
        return errors.StorageFull()
    if state.startswith(("53", "08", "57P", "40")):
        return errors.DatabaseUnavailable()
    if state.startswith("22") or state == "54000":
        return errors.InvalidInput("the database cannot store or search this value")
    if not state and isinstance(error, psycopg.DataError):
        return errors.InvalidInput("the text contains a NUL character, which the database cannot store")
    if not state and isinstance(error, psycopg.OperationalError):
        return errors.DatabaseUnavailable()
    return errors.DatabaseError()
