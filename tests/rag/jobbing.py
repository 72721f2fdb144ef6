"""Workers as processes of their own, and jobs to give them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import dict_row

from rag import jobs, tasks
from rag.database import Database
from rag.ingest import Source
from rag.principal import Principal
from rag.store import destination_of
from tests.conftest import SIGNER, Deployment

CHECKOUT = Path(__file__).resolve().parents[2]


def worker_environment(
    deployment: Deployment, embedder_url: str, *, publishes: bool = True, **more: str
) -> dict[str, str]:
    """What a worker of its own is given: its login, the signing key, and a model server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAG_", "OPENAI_", "PG"))}
    return (
        kept
        | {
            "RAG_DATABASE_URL": deployment.url("rag_worker"),
            "RAG_SIGNING_KEY": f"{SIGNER.key_id}.{SIGNER.secret.hex()}",
            "RAG_EMBEDDING_PROVIDER": "openai",
            "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
            "OPENAI_BASE_URL": embedder_url,
            "OPENAI_API_KEY": "sk-test",
        }
        | ({"RAG_PUBLISHER_DATABASE_URL": deployment.url("rag_publisher")} if publishes else {})
        | more
    )


def start_worker(environment: dict[str, str], *options: str, log: Path | None = None) -> subprocess.Popen[bytes]:
    # Inherited by the worker, and closed here.
    with Path(os.devnull if log is None else log).open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "rag.cli", "worker", *options],
            cwd=CHECKOUT,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


@contextmanager
def working(environment: dict[str, str], *options: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A worker that runs meanwhile, and is killed if it does not end."""
    process = start_worker(environment, *options, log=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until_empty(environment: dict[str, str], *options: str) -> str:
    """Run a worker until no job is waiting; what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "rag.cli", "worker", "--until-empty", *options],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


async def ask(
    database: Database,
    principal: Principal,
    source_id: str,
    text: str,
    *,
    scope: str = "user",
    max_waiting: int | None = None,
    tags: tuple[str, ...] = ("public",),
) -> UUID:
    """Ask for a document to be taken in, as POST /rag/ingest does."""
    destination = destination_of(principal, scope=scope, tags=tags)
    wanted = tasks.ingestion(
        Source(name=source_id + ".md", source_id=source_id, content=text, language="en"), principal, destination
    )
    async with database.transaction(principal, publish=destination.publishes) as session:
        return await jobs.enqueue(session, wanted, max_waiting=max_waiting)


def asked(deployment: Deployment, principal: Principal, source_id: str, text: str, **options: Any) -> UUID:
    """The same from a test that is not asynchronous."""

    async def run() -> UUID:
        async with deployment.pools() as database:
            return await ask(database, principal, source_id, text, **options)

    return asyncio.run(run())


def job_rows(deployment: Deployment) -> list[dict[str, Any]]:
    """All jobs, as the superuser sees them, first asked for first."""
    with psycopg.connect(deployment.url("postgres"), row_factory=dict_row) as connection:
        return connection.execute("select * from rag.rag_jobs order by created_at, id").fetchall()


def queued(deployment: Deployment) -> list[dict[str, Any]]:
    """What stands in the queue."""
    with psycopg.connect(deployment.url("postgres"), row_factory=dict_row) as connection:
        return connection.execute("select * from jobs.procrastinate_jobs order by id").fetchall()


def wait_until(condition: Callable[[], bool], *, timeout_s: float) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, "it did not come to hold"
        time.sleep(0.05)
    return time.monotonic() - began
