"""Ingests and jobs in processes of their own, one of whose steps fails: forked for each, so that it may die.

Reads a case a line, answers with a line. A step is what reaches out of the process: a file that is opened, a connection
taken and given back, a statement, the begin and the end of a transaction, a request; each before and after. What an
ingest does is the product's; only the calls of the driver, of the HTTP client and of the file are wrapped.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai  # noqa: F401 - once, and not in each process
import psycopg
import structlog
from psycopg.transaction import AsyncTransaction
from psycopg_pool import AsyncConnectionPool

from rag import claim, divide, embed, store, work
from rag.active_model import Model
from rag.database import Database
from rag.embed import Purpose, open_embedder
from rag.errors import EmbeddingUnavailable, RAGServiceError
from rag.generate import open_generator
from rag.ingest import Source, ingest
from rag.intake import Intake
from rag.invalidate import Targets, invalidate
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of, remove_document
from tests.conftest import SIGNER

WAYS = ("exception", "kill", "drop")
TENANT = "acme"
NAME = "guide.md"
FIRST = [f"The harbour of pier {number} opens at six." for number in range(5)]
# Two chunks stay, one changes, two go, three are new.
SECOND = [*FIRST[:2], "The third pier is closed.", *(f"The ferry of pier {number} leaves." for number in range(3))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`step` counts from 1; 0 fails nowhere. Without `prepare` it is the second time.

    `acknowledged`: the first time ended well, so that it need not be asked for again.
    """

    url: str
    publisher_url: str
    worker_url: str
    embedder_url: str
    folder: str
    scenario: str
    user_id: int
    step: int = 0
    way: str = "exception"
    prepare: bool = True
    acknowledged: bool = False


@dataclass
class Fault:
    """Armed after the preparation; then it counts, and does what it is for once."""

    step: int
    way: str
    armed: bool = False
    names: list[str] = field(default_factory=list)

    def reach(self, name: str, error: Callable[[str], Exception], drop: Callable[[], None] | None = None) -> None:
        if not self.armed:
            return
        self.names.append(name)
        if len(self.names) != self.step:
            return
        if self.way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.way == "drop" and drop is not None:
            drop()
        else:
            raise error(name)


def wrap(fault: Fault) -> None:
    """Put the fault around every step; in a process that ends afterwards."""

    def broken(name: str) -> Exception:
        return psycopg.OperationalError(f"broken {name}")

    def hang_up(connection: psycopg.AsyncConnection[Any]) -> Callable[[], None]:
        def drop() -> None:
            with socket.socket(fileno=os.dup(connection.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)

        return drop

    execute = psycopg.AsyncCursor.execute

    async def executing(self: psycopg.AsyncCursor[Any], text: Any, *rest: Any, **options: Any) -> Any:
        fault.reach("before a statement", broken, hang_up(self.connection))
        cursor = await execute(self, text, *rest, **options)
        fault.reach("after a statement", broken, hang_up(self.connection))
        return cursor

    begin, end = AsyncTransaction.__aenter__, AsyncTransaction.__aexit__

    async def beginning(self: AsyncTransaction) -> AsyncTransaction:
        fault.reach("before the begin", broken, hang_up(self._conn))
        await begin(self)
        return self

    async def ending(self: AsyncTransaction, kind: Any, error: Any, trace: Any) -> bool:
        if kind is None:
            fault.reach("before the commit", broken, hang_up(self._conn))
        done = await end(self, kind, error, trace)
        if kind is None:
            fault.reach("after the commit", broken, hang_up(self._conn))
        return done

    take, give = AsyncConnectionPool.getconn, AsyncConnectionPool.putconn

    async def taking(self: Any, *rest: Any, **options: Any) -> Any:
        fault.reach("before a connection", broken)
        connection = await take(self, *rest, **options)
        try:
            fault.reach("after a connection", broken, hang_up(connection))
        except psycopg.Error:
            # A pool that never gets it back is no fault that there is.
            await give(self, connection)
            raise
        return connection

    async def giving(self: Any, connection: Any) -> None:
        try:
            fault.reach("before giving a connection back", broken, hang_up(connection))
        finally:
            await give(self, connection)

    send = httpx2.AsyncHTTPTransport.handle_async_request

    async def sending(self: Any, request: httpx2.Request) -> httpx2.Response:
        fault.reach("before a request", httpx2.ConnectError)
        response = await send(self, request)
        fault.reach("after a request", httpx2.ReadError)
        return response

    read = divide.contents

    def reading(*rest: Any, **options: Any) -> Iterator[tuple[int | None, bytes | str]]:
        fault.reach("before the file", OSError)
        yield from read(*rest, **options)
        fault.reach("after the file", OSError)

    psycopg.AsyncCursor.execute = executing  # type: ignore[method-assign]
    AsyncTransaction.__aenter__ = beginning  # type: ignore[method-assign]
    AsyncTransaction.__aexit__ = ending  # type: ignore[method-assign]
    AsyncConnectionPool.getconn = taking  # type: ignore[method-assign]
    AsyncConnectionPool.putconn = giving  # type: ignore[method-assign]
    httpx2.AsyncHTTPTransport.handle_async_request = sending  # type: ignore[method-assign]
    divide.contents = reading


@dataclass(kw_only=True)
class Stage:
    """Everything that a scenario needs."""

    case: Case
    database: Database
    embedder: embed.Embedder
    settings: Settings

    @property
    def mara(self) -> Principal:
        return Principal(tenant_id=TENANT, user_id=self.case.user_id, tags=("hr", "public"))

    async def put(self, version: str, *, tags: tuple[str, ...] = ("public",), generation: int | None = None) -> Any:
        path = Path(self.case.folder) / version / NAME
        with path.open("rb") as file:
            ((_, content),) = divide.contents(
                file, name=NAME, size=path.stat().st_size, max_bytes=100_000, max_file_bytes=100_000, encoding=None
            )
        return await ingest(
            Source(name=NAME, source_id=NAME, content=content, generation=generation, language="en"),
            principal=self.mara,
            destination=destination_of(self.mara, scope="user", tags=tags),
            database=self.database,
            embedder=self.embedder,
            max_bytes=100_000,
        )

    async def ask_for(self, version: str) -> Any:
        """What POST /rag/ingest with Prefer: respond-async does, with an idempotency key."""
        text = (Path(self.case.folder) / version / NAME).read_text(encoding="utf-8")
        return await Intake(
            database=self.database,
            settings=self.settings,
            principal=self.mara,
            destination=destination_of(self.mara, scope="user", tags=("public",)),
            source=Source(name=NAME, source_id=NAME, content=text, language="en"),
            idempotency_key=f"{self.case.scenario} {version}".replace(" ", "-"),
        ).later()

    async def work_off(self, embedder: embed.Embedder | None = None) -> None:
        """What `rag worker --until-empty` does."""
        model = Model(embedder=embedder or self.embedder, settings=self.settings)
        async with Database(
            self.case.worker_url, signer=SIGNER, role="rag_worker", pool_size=1, pool_timeout_s=20
        ) as database:
            bench = work.Bench(
                settings=self.settings,
                database=database,
                models=[model],
                model=model,
                generator=open_generator(self.settings),
            )
            await work.work(bench, url=self.case.worker_url, concurrency=1, until_empty=True)

    async def take_back(self) -> Any:
        targets = Targets(source_ids=[NAME])
        return await invalidate(targets, reason="a test", principal=self.mara, database=self.database, cascade_id="c")


class OverloadedAtFirst:
    """An embedder whose provider does not answer the first time."""

    def __init__(self, embedder: embed.Embedder) -> None:
        self._embedder = embedder
        self._overloaded = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        if self._overloaded:
            self._overloaded = False
            raise EmbeddingUnavailable()
        return await self._embedder.embed(texts, purpose=purpose, progress=progress)


async def nothing(stage: Stage) -> None:
    """There is nothing before."""


async def first(stage: Stage) -> None:
    await stage.put("first")


async def first_for_few(stage: Stage) -> None:
    await stage.put("first", tags=("hr",))


async def deleted(stage: Stage) -> None:
    done = await stage.put("first")
    await remove_document(stage.database, stage.mara, done.document_id, reason="deleted")


async def taken_back(stage: Stage) -> None:
    await stage.put("first")
    await stage.take_back()


async def asked_for(stage: Stage) -> None:
    await stage.ask_for("second")


async def asked_for_again(stage: Stage) -> None:
    await first(stage)
    await asked_for(stage)


async def ask_unless_acknowledged(stage: Stage) -> None:
    if not stage.case.acknowledged:
        await asked_for(stage)
    await stage.work_off()


async def worked_off(stage: Stage) -> None:
    await stage.work_off()


async def worked_off_twice(stage: Stage) -> None:
    overloaded: Any = OverloadedAtFirst(stage.embedder)
    await stage.work_off(overloaded)


Step = Callable[[Stage], Awaitable[Any]]
SCENARIOS: dict[str, tuple[Step, Step]] = {
    "a new document": (nothing, lambda stage: stage.put("second")),
    "a changed document": (first, lambda stage: stage.put("second")),
    "a document for others": (first_for_few, lambda stage: stage.put("second")),
    "a document that was deleted": (deleted, lambda stage: stage.put("second")),
    "newer content of a retracted one": (taken_back, lambda stage: stage.put("second", generation=9)),
    "a retraction": (first, lambda stage: stage.take_back()),
    "a job that is asked for": (first, asked_for),
    "a job of a new document": (asked_for, worked_off),
    "a job of a changed document": (asked_for_again, worked_off),
    "a job that is given back": (asked_for, worked_off_twice),
}
# The second time, where that is not the same once more: what was acknowledged need not be asked for again, and a job
# has been acknowledged before a worker begins it.
AGAIN: dict[str, Step] = {
    "a job that is asked for": ask_unless_acknowledged,
    "a job of a new document": worked_off,
    "a job of a changed document": worked_off,
    "a job that is given back": worked_off,
}
ASKING = "a job that is asked for"


async def play(case: Case, fault: Fault, tell: Callable[[dict[str, Any]], None]) -> None:
    settings = Settings(
        _env_file=None,
        rag_embedding_provider="openai",
        rag_embedding_model="text-embedding-3-small",
        openai_base_url=case.embedder_url,
        openai_api_key="sk-test",
    )
    prepare, act = SCENARIOS[case.scenario]
    if not case.prepare:
        act = AGAIN.get(case.scenario, act)
    embedder = open_embedder(settings)
    database = Database(case.url, signer=SIGNER, publisher_url=case.publisher_url, pool_size=1, pool_timeout_s=20)
    async with database:
        stage = Stage(case=case, database=database, embedder=embedder, settings=settings)
        if case.prepare:
            await prepare(stage)
            tell({"prepared": True})
        fault.armed = True
        try:
            await act(stage)
        except (RAGServiceError, OSError) as error:
            tell({"error": type(error).__name__})
        else:
            tell({"acknowledged": True})
        fault.armed = False
        tell({"steps": fault.names})


def child(case: Case, out: int) -> None:
    # Several requests and several statements, of a document that is small.
    embed.OPENAI_BATCH_TEXTS = store.CHUNKS_PER_STATEMENT = 2
    embed.RETRY_DELAY_S = 0.0
    # What a process that died had claimed is free soon, and what failed is tried again at once.
    claim.LEASE_S = 1.0
    # On a machine that is slow it would be further steps, which the next run does not have.
    claim.RENEW_EVERY_S = 60.0
    work.RETRY_AFTER_S = (0.0, 0.0, 0.0)
    # One that hangs ends with an exit code of its own, and the test names the step.
    faulthandler.dump_traceback_later(60, exit=True)
    fault = Fault(case.step, case.way)
    wrap(fault)
    asyncio.run(play(case, fault, lambda told: void(os.write(out, json.dumps(told).encode() + b"\n"))))


def void(_: object) -> None:
    """A lambda that writes has something to return."""


def main() -> None:
    # Standard output is for the answers.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    for line in sys.stdin:
        case = Case(**json.loads(line))
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            code = 1
            try:
                os.close(reading)
                child(case, writing)
                code = 0
            finally:
                os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as told:
            report: dict[str, Any] = {}
            for entry in told:
                report |= json.loads(entry)
        _, status = os.waitpid(process, 0)
        report["ended"] = os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
