"""A worker: takes jobs from the queue one by one and does each as the principal who asked for it.

The queue is procrastinate's, in schema `jobs`; it gives out ids. Everything else is of rag_jobs: what the job is,
whether it was cancelled, how it ended. A worker that dies has said so by its silence: another one puts its job back,
and what it had begun leaves no trace, since a job ends in the transaction that does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, LiteralString
from uuid import UUID

import procrastinate
import psycopg
import structlog
from procrastinate import exceptions, retry
from procrastinate.job_context import AbortReason, JobContext
from procrastinate.worker import Worker

from rag import errors
from rag.active_model import Model, close_models, find_active, open_models
from rag.database import Database
from rag.generate import Generator, open_generator
from rag.jobs import KEY_VALID_FOR, depth, reason_of
from rag.principal import Principal
from rag.settings import Settings
from rag.tasks import KINDS, Task

log = structlog.get_logger(__name__)

QUEUE = "rag"
# A job of a worker that was killed is taken up again in under 10 s: at most 6 s of silence, 1 s until somebody looks,
# 1 s until somebody asks for a job. Three beats may be missed, on a machine that is busy with something else.
HEARTBEAT_S = 2.0
STALLED_AFTER_S = 6.0
LOOK_EVERY_S = 1.0
POLL_S = 1.0
# After the first attempt three more: a provider that is overloaded, a database that restarts, a limit by the minute.
RETRY_AFTER_S = (2.0, 10.0, 60.0)
# So that jobs that failed together do not come back together.
JITTER = 0.2
# One job that ended so many workers is parked: it would end them all.
MAX_LOSSES = 5
# On SIGTERM a job has so long to end; it is given back when it has not. Kubernetes kills after 30 s.
GRACE_S = 25.0
# What ended is kept for a week: for whoever asks what became of it, and to be tried again by hand.
KEPT_FOR = timedelta(days=7)
TIDY_EVERY_S = 600.0
# Until a database that does not answer is asked again.
RECONNECT_S = 0.5

# What another attempt may heal; all else is parked at once.
_PASSING = (
    errors.DatabaseUnavailable,
    errors.DatabaseTimeout,
    errors.StorageFull,
    errors.EmbeddingUnavailable,
    errors.EmbeddingTimeout,
    errors.SourceOvertaken,
    # A repository that cannot be fetched just now.
    errors.SourceUnavailable,
    # Two models are changing places, or this worker has not been told of the one that is searched now.
    errors.ModelChanging,
    errors.ModelNotActive,
    # A model server that restarts, is busy, or broke off; also a summary without a word.
    errors.LLMError,
)
# What the next attempt would only meet again.
_LASTING = (
    errors.InsufficientQuota,
    errors.ModelNotAllowedError,
    errors.ModelUnavailableError,
    errors.ContextOverflowError,
)


def passes(error: BaseException) -> bool:
    """Whether the same job may succeed when it is tried again."""
    return isinstance(error, _PASSING) and not isinstance(error, _LASTING)


class _AgainError(Exception):
    """The job goes back into the queue."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"again in {after_s:.0f} s")
        self.after_s = after_s


class _Again(retry.BaseRetryStrategy):
    def get_retry_decision(self, *, exception: BaseException, job: Any) -> retry.RetryDecision | None:
        if not isinstance(exception, _AgainError):
            return None
        return retry.RetryDecision(retry_at=datetime.now(UTC) + timedelta(seconds=exception.after_s))


@dataclass(slots=True, kw_only=True)
class Bench:
    """What a worker works with; `model` is the one of its models that was searched when it last looked."""

    settings: Settings
    database: Database
    models: Sequence[Model]
    model: Model
    generator: Generator
    worker_id: int | None = None
    """As which it was last known to the queue."""


class _Line(procrastinate.PsycopgConnector):
    """Says so when the queue could not be told something.

    procrastinate forgets a job whose end it could not write: the queue would wait for that worker for as long as it
    lives, and for its lock all later jobs of the same document.
    """

    def __init__(self, broken: asyncio.Event, **options: Any) -> None:
        super().__init__(**options)
        self._broken = broken

    async def execute_query_async(self, query: LiteralString, **arguments: Any) -> None:
        try:
            await super().execute_query_async(query, **arguments)
        except exceptions.ConnectorException:
            self._broken.set()
            raise


async def work(
    bench: Bench, *, url: str, concurrency: int, until_empty: bool, stopping: asyncio.Event | None = None
) -> None:
    """Do jobs until SIGTERM or an interrupt, or until there is none; `url` logs in as rag_worker.

    With `stopping` until that is set, and signals are left to the caller. Goes on when the database restarts. Raises
    BarrierDown when statements are mixed up by a pooler.
    """
    with contextlib.nullcontext(stopping) if stopping is not None else _signals() as stopping:
        while not stopping.is_set():
            began = time.monotonic()
            try:
                done = await _shift(bench, url=url, concurrency=concurrency, until_empty=until_empty, stopping=stopping)
                # Of one source the next may only be given out once the one before has ended.
                if done and until_empty and (await depth(bench.database)).ready == 0:
                    return
            except (psycopg.Error, exceptions.ConnectorException, errors.DatabaseError) as error:
                if isinstance(error, errors.BarrierDown):
                    raise
                log.warning("worker_interrupted", cause=type(error).__name__)
            if not stopping.is_set() and time.monotonic() - began < RECONNECT_S:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), RECONNECT_S)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    try:
        yield stopping
    finally:
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(name)


async def _shift(bench: Bench, *, url: str, concurrency: int, until_empty: bool, stopping: asyncio.Event) -> bool:
    """Work on one set of connections; whether it ended as it was meant to."""
    broken = asyncio.Event()
    connector = _Line(
        broken,
        conninfo=url,
        min_size=1,
        max_size=2,
        timeout=bench.settings.rag_pool_timeout_seconds,
        kwargs={"connect_timeout": 10, "prepare_threshold": None, "application_name": "palisade worker"},
    )
    app = procrastinate.App(connector=connector)
    for kind in KINDS:
        app.task(name=kind, queue=QUEUE, pass_context=True, retry=_Again())(_doing(bench))
    async with app.open_async():
        # Of before the interruption: what it did it does no more.
        if bench.worker_id is not None:
            await app.job_manager.unregister_worker(worker_id=bench.worker_id)
            bench.worker_id = None
        # Before it is asked whether there is anything to do.
        await _recover(bench)
        worker = Worker(
            app=app,
            queues=[QUEUE],
            name="rag",
            concurrency=concurrency,
            wait=not until_empty,
            fetch_job_polling_interval=POLL_S,
            # Told by a notification; whoever misses it finds out when the job would be settled.
            abort_job_polling_interval=float(10**9),
            shutdown_graceful_timeout=GRACE_S,
            delete_jobs="always",
            install_signal_handlers=False,
            update_heartbeat_interval=HEARTBEAT_S,
            stalled_worker_timeout=STALLED_AFTER_S,
        )
        # Before those who may stop it: what was asked of it before it begins, it forgets.
        run = asyncio.create_task(worker.run())  # type: ignore[no-untyped-call, unused-ignore]
        side = [
            asyncio.create_task(_stop(worker, stopping)),
            asyncio.create_task(_begin_again(worker, broken)),
            asyncio.create_task(_look_after(bench, worker)),
        ]
        if not until_empty:
            log.info("worker_started", jobs=concurrency)
        try:
            while not run.done():
                await asyncio.wait([run], timeout=HEARTBEAT_S)
                bench.worker_id = worker.worker_id or bench.worker_id
                # procrastinate's own beats end when it is asked to stop, and the jobs under way may still end.
                if stopping.is_set() and worker.worker_id is not None and not run.done():
                    with contextlib.suppress(exceptions.ConnectorException):
                        await app.job_manager.update_heartbeat(worker.worker_id)
            run.result()
        finally:
            for task in side:
                task.cancel()
            await asyncio.gather(*side, return_exceptions=True)
    if stopping.is_set():
        log.info("worker_stopped")
    return stopping.is_set() or (until_empty and not broken.is_set())


async def _stop(worker: Worker, stopping: asyncio.Event) -> None:
    await stopping.wait()
    worker.stop()  # type: ignore[no-untyped-call, unused-ignore]


async def _begin_again(worker: Worker, broken: asyncio.Event) -> None:
    """End the shift soon, so that what the queue was not told is put back like a dead worker's."""
    await broken.wait()
    log.warning("worker_interrupted", cause="ConnectorException")
    worker.shutdown_graceful_timeout = STALLED_AFTER_S
    worker.stop()  # type: ignore[no-untyped-call, unused-ignore]


async def _recover(bench: Bench) -> None:
    async with bench.database.proven("jobs") as (session, _):
        row = await session.row(
            "recover_jobs", {"stalled_after": timedelta(seconds=STALLED_AFTER_S), "max_losses": MAX_LOSSES}
        )
    if row is not None and (row["recovered"] or row["parked"]):
        log.warning("jobs_recovered", recovered=row["recovered"], parked=row["parked"])


async def _look_after(bench: Bench, worker: Worker) -> None:
    """Put back what other workers left when they died, and clear up, while this one runs."""
    tidied = -TIDY_EVERY_S
    while True:
        try:
            await _recover(bench)
            if time.monotonic() - tidied >= TIDY_EVERY_S:
                async with bench.database.proven("jobs") as (session, _):
                    await session.run("expire_jobs", {"keys_after": KEY_VALID_FOR, "jobs_after": KEPT_FOR})
                tidied = time.monotonic()
        except errors.BarrierDown:
            worker.stop()  # type: ignore[no-untyped-call, unused-ignore]
            raise
        except errors.DatabaseError as error:
            log.warning("recovery_failed", cause=type(error).__name__)
        await asyncio.sleep(LOOK_EVERY_S)


def _doing(bench: Bench) -> Any:
    async def do(context: JobContext, id: str | None = None) -> None:
        await _do(bench, context, id)

    return do


async def _do(bench: Bench, context: JobContext, job_id: str | None) -> None:
    """Take the job, do it, and say what came of it. Raises _AgainError for the queue to give it out again."""
    # What was cancelled or erased while it was given out names nothing any more.
    if job_id is None or context.job.id is None:
        return
    began = time.monotonic()
    try:
        taken = await _take(bench, UUID(job_id), context.job.id)
    except errors.DatabaseError as error:
        log.warning("job_not_taken", job=job_id, cause=type(error).__name__)
        raise _AgainError(RECONNECT_S) from error
    if taken is None:
        return
    task, kind, attempts = taken
    told = {"job": job_id, "kind": kind, "attempt": attempts}
    try:
        if kind not in KINDS:
            raise errors.InvalidInput(f"this version knows no jobs of kind {kind}")
        try:
            await KINDS[kind](task)
        except errors.ModelNotActive:
            bench.model = await find_active(bench.models, bench.database)
            # Nothing of it was written: what writes is what is refused.
            await KINDS[kind](replace(task, embedder=bench.model.embedder))
    except asyncio.CancelledError:
        if context.abort_reason() is AbortReason.USER_REQUEST:
            log.info("job_cancelled", **told)
            raise
        # Given back and not counted: the next worker begins it anew.
        await _give_back(bench, task, reason="worker_stopped", detail="The worker was stopped.", due_in_s=0.0)
        log.info("job_given_back", **told)
        raise _AgainError(0.0) from None
    except errors.JobLost:
        log.info("job_lost", **told)
    except errors.RAGServiceError as error:
        after_s = RETRY_AFTER_S[attempts - 1] if passes(error) and attempts <= len(RETRY_AFTER_S) else None
        if after_s is not None:
            after_s *= random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - spreads, and hides nothing
        log.warning("job_failed", **told, reason=reason_of(error), again_in_s=after_s and round(after_s, 1))
        await _give_back(bench, task, reason=reason_of(error), detail=error.message, due_in_s=after_s, counted=True)
        if after_s is not None:
            raise _AgainError(after_s) from error
    except Exception as error:
        # A fault of ours: the job is kept, and nothing that it said of a document is.
        log.error("job_broke", **told, cause=type(error).__name__, exc_info=error)
        await _give_back(bench, task, reason="internal_error", detail="The worker failed.", due_in_s=None, counted=True)
        # To procrastinate, which takes it out of the queue.
        raise
    else:
        log.info("job_done", **told, ms=round((time.monotonic() - began) * 1000))


async def _take(bench: Bench, job_id: UUID, queue_id: int) -> tuple[Task, str, int] | None:
    async with bench.database.proven("jobs") as (session, proof):
        row = await session.row("take_job", {"id": job_id, "queue_id": queue_id, "proof": proof})
    if row is None:
        return None
    task = Task(
        id=job_id,
        claim=row["claim"],
        principal=Principal(
            tenant_id=row["tenant_id"],
            user_id=row["user_id"],
            project_id=row["project_id"],
            tags=tuple(row["tags"]),
        ),
        payload=row["payload"],
        body=row["body"],
        database=bench.database,
        embedder=bench.model.embedder,
        generator=bench.generator,
        settings=bench.settings,
    )
    return task, row["kind"], row["attempts"]


async def _give_back(
    bench: Bench, task: Task, *, reason: str, detail: str, due_in_s: float | None, counted: bool = False
) -> None:
    """Say what came of a job. Raises _AgainError when the database does not answer: nobody may take it for done."""
    try:
        async with bench.database.proven("jobs") as (session, proof):
            await session.run(
                "return_job",
                {
                    "id": task.id,
                    "claim": task.claim,
                    "reason": reason,
                    "detail": detail,
                    "due_in": None if due_in_s is None else timedelta(seconds=due_in_s),
                    "counted": counted,
                    "proof": proof,
                },
            )
    except errors.DatabaseError as error:
        raise _AgainError(RECONNECT_S) from error


@contextlib.asynccontextmanager
async def opened(settings: Settings, database: Database) -> AsyncIterator[Bench]:
    """What a worker works with, on a database that is not open yet; refuses a barrier that would not hold."""
    models = open_models(settings)
    generator = open_generator(settings)
    try:
        async with database:
            for warning in await database.check_barrier(
                dimensions=settings.embedding_widths, strict=settings.rag_strict
            ):
                log.warning("startup_check", finding=warning)
            yield Bench(settings=settings, database=database, models=models, model=models[0], generator=generator)
    finally:
        await generator.close()
        await close_models(models)
