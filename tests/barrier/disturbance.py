"""Requests of many principals over few connections, half of them disturbed, and what they found."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import psycopg
import pytest
from psycopg import AsyncConnection, sql
from psycopg.rows import DictRow, dict_row

import rag.database
from rag import errors
from rag.database import Database, Session
from rag.principal import Principal
from tests.conftest import Deployment

VARIABLES = ("app.tenant_id", "app.user_id", "app.project_id", "app.tags", "app.signature")
CONCURRENCY = 12
"""Requests at a time; with three connections most of them wait for one."""

# The answer of a statement says which one was run, with which parameter, and for whom. They take the same
# number of parameters, so that a pooler that confuses two of them would not notice either.
STATEMENTS = tuple(
    f"select {number} as statement, %(token)s::text as token, tenant_id, user_id, project_id, tags "
    "from rag.my_principal()"
    for number in range(12)
)
TITLES = "select title from rag.v_documents"
HELD_LOCK = 4711
POISONS = "sets another identity for the session"


def person(tenant: str, user: int) -> Principal:
    project = f"project-{user % 3}" if user % 2 else None
    tags = ("public", *(f"tag-{number}" for number in range(user % 4)))
    return Principal(tenant_id=tenant, user_id=user, project_id=project, tags=tags)


MARA = person("tenant-0", 1)
NOAH = person("tenant-1", 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Principals, each with the one document that nobody else sees and the public one of its tenant."""

    titles: Mapping[Principal, frozenset[str]]

    @property
    def principals(self) -> list[Principal]:
        return list(self.titles)


def build(deployment: Deployment, *, tenants: int = 4, users: int = 10) -> World:
    """Fill the database as its superuser: nothing of what is tested takes part."""
    titles: dict[Principal, frozenset[str]] = {}
    with deployment.cluster.superuser(deployment.name) as connection:
        for tenant in (f"tenant-{number}" for number in range(tenants)):
            public = f"{tenant}: public"
            _insert(connection, tenant, None, public)
            titles[Principal(tenant_id=tenant)] = frozenset({public})
            for user in range(1, users):
                own = f"{tenant}: user {user}"
                _insert(connection, tenant, user, own)
                titles[person(tenant, user)] = frozenset({public, own})
    return World(titles=titles)


def _insert(connection: psycopg.Connection, tenant: str, user: int | None, title: str) -> None:
    connection.execute(
        """
        with class as (
            insert into rag.rag_access_classes (tenant_id, scope, user_id, tags, tags_digest)
            values (%(tenant)s, %(scope)s, %(user)s, '{public}', sha256(convert_to('["public"]', 'UTF8')))
            returning *
        )
        insert into rag.rag_documents (
            tenant_id, access_id, scope, user_id, tags, source_type, source_id, source_hash, title, body, language
        )
        select tenant_id, access_id, scope, user_id, tags, 'text', 'marker', 'hash', %(title)s, %(title)s, 'en'
        from class
        """,
        {"tenant": tenant, "scope": "public" if user is None else "user", "user": user, "title": title},
    )


@dataclass(slots=True, kw_only=True)
class Findings:
    """What went on, and what must stay empty."""

    requests: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """`fate: how the request ended`."""
    leaks: list[str] = field(default_factory=list)
    """An identity before the transaction set its own, an answer for somebody else, foreign rows."""
    hidden: list[str] = field(default_factory=list)
    """A principal's own rows were missing."""
    wrong_statements: list[str] = field(default_factory=list)
    collateral: list[str] = field(default_factory=list)
    """Requests that nobody disturbed, and that failed."""

    @property
    def disturbed(self) -> int:
        return self.requests - sum(count for end, count in self.ends.items() if end.startswith("undisturbed: "))


def watch(monkeypatch: pytest.MonkeyPatch, findings: Findings) -> None:
    """Have every transaction report the identity that its connection carries before it sets its own."""

    class Watched(Session):
        async def run(self, name: str, parameters: Mapping[str, object]) -> None:
            if name == "begin_as":
                present = await carried(self._connection)
                if present:
                    findings.leaks.append(f"carried at the start of a transaction: {present}")
            await super().run(name, parameters)

    monkeypatch.setattr(rag.database, "Session", Watched)


async def carried(connection: AsyncConnection[DictRow]) -> dict[str, str]:
    """The identity variables that are set on a connection."""
    cursor = await connection.execute(
        """
        select name, current_setting(name, true) as value
        from unnest(%s::text[]) as name
        where coalesce(current_setting(name, true), '') <> ''
        """,
        (list(VARIABLES),),
    )
    return {row["name"]: row["value"] for row in await cursor.fetchall()}


async def ask(session: Session, principal: Principal, world: World, findings: Findings, *, token: int) -> None:
    """Ask who one is and what one sees, and compare."""
    number = token % len(STATEMENTS)
    cursor = await session._connection.execute(STATEMENTS[number], {"token": str(token)})
    answer = await cursor.fetchall()
    who = {
        "tenant_id": principal.tenant_id,
        "user_id": principal.user_id,
        "project_id": principal.project_id,
        "tags": list(principal.tags),
    }
    if answer != [{"statement": number, "token": str(token)} | who]:
        asked = [{name: row.get(name) for name in ("statement", "token")} for row in answer]
        if asked == [{"statement": number, "token": str(token)}]:
            findings.leaks.append(f"{principal} was taken for {answer}")
        else:
            findings.wrong_statements.append(f"statement {number} with {token} was answered by {answer}")
    cursor = await session._connection.execute(TITLES)
    seen = {row["title"] for row in await cursor.fetchall()}
    expected = world.titles[principal]
    if seen - expected:
        findings.leaks.append(f"{principal} saw {sorted(seen - expected)}")
    if expected - seen:
        findings.hidden.append(f"{principal} did not see {sorted(expected - seen)}")


# --- what may happen to a request ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturber:
    """The means by which requests are disturbed."""

    database: Database
    superuser: AsyncConnection[DictRow]
    numbers: random.Random
    principals: list[Principal]


type_fate = Callable[[Session, Disturber], Awaitable[None]]


async def _fail(session: Session, _: Disturber) -> None:
    await session._connection.execute("select 1 / 0")


async def _time_out(session: Session, _: Disturber) -> None:
    await session._connection.execute("set local statement_timeout = '1ms'")
    await session._connection.execute("select pg_sleep(10)")


async def _wait_for_a_lock(session: Session, _: Disturber) -> None:
    await session._connection.execute("set local lock_timeout = '1ms'")
    await session._connection.execute(f"select pg_advisory_xact_lock({HELD_LOCK})")


async def _raise(_: Session, __: Disturber) -> None:
    raise LookupError("the caller's own")


async def _be_terminated(session: Session, disturber: Disturber) -> None:
    cursor = await session._connection.execute("select pg_backend_pid() as pid")
    row = await cursor.fetchone()
    assert row is not None
    await disturber.superuser.execute("select pg_terminate_backend(%s)", (row["pid"],))


async def _lose_the_connection(session: Session, _: Disturber) -> None:
    with socket.socket(fileno=socket.dup(session._connection.fileno())) as wire:
        wire.shutdown(socket.SHUT_RDWR)


async def _set_another_identity_and_undo_it(session: Session, disturber: Disturber) -> None:
    connection = session._connection
    for undoing in ("the caller's own", "select 1 / 0"):
        try:
            async with connection.transaction():
                await connection.execute("set local app.tenant_id = 'tenant-0'")
                async with connection.transaction():
                    await connection.execute("set local app.user_id = '1'")
                if disturber.numbers.random() < 0.5:
                    await connection.execute("select 1 / 0")
                raise LookupError(undoing)
        except (LookupError, psycopg.errors.DivisionByZero):
            pass


async def set_for_the_session(connection: AsyncConnection[DictRow], principal: Principal, signature: str) -> None:
    """Set an identity that holds, and not for the transaction alone."""
    values = {
        "app.tenant_id": principal.tenant_id,
        "app.user_id": str(principal.user_id or 0),
        "app.project_id": principal.project_id or "",
        "app.tags": json.dumps(principal.tags, ensure_ascii=False),
        "app.signature": signature,
    }
    for name, value in values.items():
        await connection.execute(sql.SQL("set session {} = {}").format(sql.Identifier(*name.split(".")), value))


async def _set_another_identity_for_the_session(session: Session, disturber: Disturber) -> None:
    other = disturber.numbers.choice(disturber.principals)
    await set_for_the_session(session._connection, other, disturber.database.sign(other, role="rag_app"))


async def _nothing(_: Session, __: Disturber) -> None:
    pass


FATES: Mapping[str, type_fate] = {
    "fails": _fail,
    "times out": _time_out,
    "waits for a lock": _wait_for_a_lock,
    "raises": _raise,
    "is terminated": _be_terminated,
    "loses its connection": _lose_the_connection,
    "undoes another identity": _set_another_identity_and_undo_it,
    "is cancelled": _nothing,
    POISONS: _set_another_identity_for_the_session,
}
WEIGHTS = {"is cancelled": 8, "is terminated": 1, "loses its connection": 1}
"""Three where nothing is said. Every lost connection has to be replaced, which takes its time."""


async def disturb(
    database: Database,
    world: World,
    findings: Findings,
    *,
    deployment: Deployment,
    requests: int,
    seed: int,
    never: Collection[str] = (),
) -> None:
    """Send requests until `requests` have ended, every second one disturbed by something that is not in `never`."""
    numbers = random.Random(seed)
    names = [name for name in FATES if name not in never]
    weights = [WEIGHTS.get(name, 3) for name in names]
    tokens = iter(range(requests))

    superuser = await AsyncConnection.connect(deployment.url("postgres"), row_factory=dict_row)
    async with superuser:
        await superuser.execute(f"select pg_advisory_xact_lock({HELD_LOCK})")
        disturber = Disturber(database=database, superuser=superuser, numbers=numbers, principals=world.principals)

        async def request(token: int, fate: str) -> None:
            principal = numbers.choice(world.principals)
            async with database.transaction(principal, read_only=numbers.random() < 0.5) as session:
                await ask(session, principal, world, findings, token=token)
                if fate != "undisturbed":
                    await FATES[fate](session, disturber)
                if fate != POISONS:
                    await ask(session, principal, world, findings, token=token)

        async def keep_asking() -> None:
            for token in tokens:
                fate = "undisturbed" if token % 2 else numbers.choices(names, weights)[0]
                task = asyncio.create_task(request(token, fate))
                if fate == "is cancelled":
                    # Anywhere: in the queue for a connection, in its check, in any statement.
                    asyncio.get_running_loop().call_later(numbers.uniform(0, 0.06), task.cancel)
                end = await _end(task)
                findings.requests += 1
                findings.ends[f"{fate}: {end}"] += 1
                if fate == "undisturbed" and end != "answered":
                    findings.collateral.append(end)

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(keep_asking())


async def _end(task: asyncio.Task[None]) -> str:
    try:
        await task
    except asyncio.CancelledError:
        return "cancelled"
    except (LookupError, errors.RAGServiceError) as error:
        return type(error).__name__
    return "answered"
