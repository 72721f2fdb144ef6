"""Workers do what was put off: as whoever asked, once, and whatever ends in between."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rag import errors, jobs, tasks, work
from rag.database import Database
from rag.embed import open_embedder
from rag.erase import Subject, count_traces, forget
from rag.ingest import Source, ingest
from rag.operate import Desk
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of
from tests.conftest import SIGNER, Deployment
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai
from tests.rag.jobbing import (
    ask,
    asked,
    job_rows,
    queued,
    start_worker,
    until_empty,
    wait_until,
    worker_environment,
    working,
)
from tests.sql.test_limits import limit

MARA = Principal(tenant_id="acme", user_id=7)
JONAS = Principal(tenant_id="acme", user_id=8)
OTHER = Principal(tenant_id="globex", user_id=7)


def statuses(deployment: Deployment) -> dict[str, str]:
    return {row["source_id"]: row["status"] for row in job_rows(deployment)}


def documents(deployment: Deployment) -> list[tuple[Any, ...]]:
    with psycopg.connect(deployment.url("postgres")) as connection:
        return connection.execute(
            "select tenant_id, user_id, scope, source_id, body from rag.rag_documents order by 1, 2, 4"
        ).fetchall()


def set_due(deployment: Deployment) -> None:
    """Nobody waits in a test for the time at which a job is tried again."""
    with psycopg.connect(deployment.url("postgres")) as connection:
        connection.execute("update jobs.procrastinate_jobs set scheduled_at = now() where status = 'todo'")


def desk_of(deployment: Deployment) -> Desk:
    return Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)


def test_a_worker_does_a_job_as_who_asked_for_it_and_lets_go_of_what_was_sent(deployment: Deployment) -> None:
    job_id = asked(deployment, MARA, "guide", "# Guide\n\nThe ferry leaves at six.")
    asked(deployment, OTHER, "guide", "The plane leaves at seven.")
    asked(deployment, MARA, "notice", "The pier is closed.", scope="public")
    assert set(statuses(deployment).values()) == {"pending"}
    with fake_openai() as server:
        until_empty(worker_environment(deployment, server.base_url))
    first, *others = job_rows(deployment)
    assert (first["id"], first["status"], first["attempts"]) == (job_id, "succeeded", 1)
    assert first["result"]["status"] == "created"
    assert {row["status"] for row in others} == {"succeeded"}
    assert all(row["payload"] is None and row["body"] is None for row in [first, *others])
    assert queued(deployment) == []
    assert [row[:4] for row in documents(deployment)] == [
        ("acme", 7, "user", "guide"),
        ("acme", None, "public", "notice"),
        ("globex", 7, "user", "guide"),
    ]


def test_the_queue_names_nobody_and_nothing(deployment: Deployment) -> None:
    asked(deployment, MARA, "secret-plans", "The vault code is 4711.")
    said = repr(queued(deployment))
    for word in ("acme", "secret", "4711"):
        assert word not in said


def test_a_job_that_was_asked_for_in_a_transaction_that_failed_is_none(deployment: Deployment) -> None:
    async def run() -> None:
        async with deployment.pools() as database:
            wanted = tasks.ingestion(
                Source(name="a.md", source_id="a", content="text"), MARA, destination_of(MARA, scope="user")
            )

            async def fail() -> None:
                async with database.transaction(MARA) as session:
                    await jobs.enqueue(session, wanted, max_waiting=None)
                    raise RuntimeError

            with pytest.raises(RuntimeError):
                await fail()

    asyncio.run(run())
    assert job_rows(deployment) == []
    assert queued(deployment) == []


def test_what_no_attempt_can_heal_is_parked_at_once_with_its_reason(deployment: Deployment) -> None:
    asked(deployment, MARA, "empty", "   ")
    asked(deployment, MARA, "notice", "The pier is closed.", scope="public")
    with fake_openai() as server:
        until_empty(worker_environment(deployment, server.base_url, publishes=False))
    found = {row["source_id"]: (row["status"], row["reason"], row["attempts"]) for row in job_rows(deployment)}
    assert found == {
        "empty": ("failed", "empty_document", 1),
        "notice": ("failed", "scope_forbidden", 1),
    }
    assert queued(deployment) == []


def test_an_account_without_quota_parks_jobs_instead_of_asking_again(deployment: Deployment) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    with fake_openai() as server:
        server.fault = "insufficient_quota"
        until_empty(worker_environment(deployment, server.base_url))
        (row,) = job_rows(deployment)
        assert (row["status"], row["reason"], row["attempts"]) == ("failed", "insufficient_quota", 1)
        assert len(server.requests) == 1
        server.fault = None
        with desk_of(deployment).session() as session:
            assert jobs.resubmit(session, [row["id"]]) == 1
        until_empty(worker_environment(deployment, server.base_url))
    assert statuses(deployment) == {"guide": "succeeded"}


def test_a_fault_that_may_pass_is_tried_three_times_more_and_ever_later(deployment: Deployment) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    waits = []
    with fake_openai() as server:
        server.fault = "server_error"
        environment = worker_environment(deployment, server.base_url)
        for attempt in (1, 2, 3, 4):
            until_empty(environment)
            (row,) = job_rows(deployment)
            assert row["attempts"] == attempt
            assert row["reason"] == "embedding_unavailable"
            if attempt < 4:
                assert row["status"] == "pending"
                waits.append((row["due_at"] - row["started_at"]).total_seconds())
                (entry,) = queued(deployment)
                assert entry["status"] == "todo"
                set_due(deployment)
    assert row["status"] == "failed"
    assert queued(deployment) == []
    # 2, 10 and 60 s, give or take a fifth, after what the attempt itself took.
    assert 1.5 < waits[0] < 8 < waits[1] < 20 < 45 < waits[2] < 80


def test_a_killed_workers_job_is_done_by_another_within_ten_seconds(deployment: Deployment, tmp_path: Path) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    with fake_openai() as server:
        server.fault = "hang"
        environment = worker_environment(deployment, server.base_url)
        victim = start_worker(environment, log=tmp_path / "log")
        wait_until(lambda: len(server.requests) == 1, timeout_s=60)
        with working(environment):
            # It is there and idle before the other one dies.
            wait_until(lambda: workers_of(deployment) == 2, timeout_s=60)
            server.fault = None
            victim.kill()
            victim.wait()
            took_s = wait_until(lambda: statuses(deployment) == {"guide": "succeeded"}, timeout_s=60)
    (row,) = job_rows(deployment)
    assert (row["attempts"], row["losses"]) == (2, 1)
    # By design 8 s and the job itself; the rest is head-room on a machine that does something else as well.
    assert took_s < 20
    assert [row[3] for row in documents(deployment)] == ["guide"]


@contextlib.contextmanager
def broken_once(deployment: Deployment, when: str) -> Iterator[None]:
    """The first connection that is about to do that to the queue ends, as when the server does."""
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        # A sequence: what is rolled back does not put it back.
        superuser.execute("create sequence public.breaks")
        superuser.execute(
            "create function public.break_once() returns trigger language plpgsql security definer as $$ begin"
            " if nextval('public.breaks') = 1 then perform pg_terminate_backend(pg_backend_pid()); end if;"
            " return coalesce(new, old); end $$"
        )
        superuser.execute(
            f"create trigger break_once before {when} execute function public.break_once()".encode(),
        )
        try:
            yield
        finally:
            superuser.execute("drop function public.break_once() cascade")
            superuser.execute("drop sequence public.breaks")


@pytest.mark.parametrize("until_end", [True, False])
def test_a_job_whose_end_could_not_be_written_holds_nothing_up(
    deployment: Deployment, tmp_path: Path, until_end: bool
) -> None:
    """The next of the same document waits for its lock, which is the worker's for as long as that lives."""
    for version in range(2):
        asked(deployment, MARA, "guide", f"The ferry leaves at {version}.")
    with fake_openai() as server, broken_once(deployment, "delete on jobs.procrastinate_jobs for each row"):
        environment = worker_environment(deployment, server.base_url)
        if until_end:
            until_empty(environment)
        else:
            with working(environment, log=tmp_path / "log") as worker:
                wait_until(lambda: queued(deployment) == [], timeout_s=60)
                assert worker.poll() is None
    assert [row["status"] for row in job_rows(deployment)] == ["succeeded", "succeeded"]
    assert [row[4] for row in documents(deployment)] == ["The ferry leaves at 1."]


def test_a_job_that_could_not_be_put_back_is_tried_again(deployment: Deployment) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    back = "update on jobs.procrastinate_jobs for each row when (old.status = 'doing' and new.status = 'todo')"
    with fake_openai() as server, broken_once(deployment, back):
        server.fault = "server_error"
        with working(worker_environment(deployment, server.base_url)):
            wait_until(lambda: job_rows(deployment)[0]["attempts"] >= 1, timeout_s=60)
            server.fault = None
            wait_until(lambda: statuses(deployment) == {"guide": "succeeded"}, timeout_s=60)
    assert [row[3] for row in documents(deployment)] == ["guide"]


def workers_of(deployment: Deployment) -> int:
    with psycopg.connect(deployment.url("postgres")) as connection:
        row = connection.execute("select count(*) from jobs.procrastinate_workers").fetchone()
    assert row is not None
    return int(row[0])


def test_recovery_takes_less_than_ten_seconds_by_its_settings() -> None:
    assert work.STALLED_AFTER_S + work.LOOK_EVERY_S + work.POLL_S < 10
    assert work.STALLED_AFTER_S >= 3 * work.HEARTBEAT_S


def test_a_job_that_ends_every_worker_is_parked(deployment: Deployment) -> None:
    asked(deployment, MARA, "bomb", "The ferry leaves at six.")
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for loss in range(1, work.MAX_LOSSES + 1):
            # As a worker that dies leaves it: being done, by nobody.
            superuser.execute("update jobs.procrastinate_jobs set status = 'doing', worker_id = null")
            superuser.execute("update rag.rag_jobs set status = 'processing'")
            with psycopg.connect(deployment.url("rag_worker")) as worker:
                worker.execute("select rag.recover_jobs(interval '6 s', %s)", (work.MAX_LOSSES,))
            (row,) = job_rows(deployment)
            assert row["losses"] == loss
            assert row["status"] == ("failed" if loss == work.MAX_LOSSES else "pending")
    assert row["reason"] == "worker_lost"
    assert queued(deployment) == []


def test_a_document_beyond_the_quota_is_parked_until_there_is_room(deployment: Deployment) -> None:
    limit(deployment, "acme", documents=1)
    for name in ("first", "second"):
        asked(deployment, MARA, name, f"The {name} ferry leaves at six.")
    asked(deployment, OTHER, "other", "The plane leaves at seven.")
    with fake_openai() as server:
        environment = worker_environment(deployment, server.base_url)
        until_empty(environment, "--jobs", "1")
        assert statuses(deployment) == {"first": "succeeded", "second": "failed", "other": "succeeded"}
        (parked,) = [row for row in job_rows(deployment) if row["status"] == "failed"]
        # No attempt makes room; what was sent is kept for when there is some.
        assert (parked["reason"], parked["attempts"]) == ("quota_exceeded", 1)
        assert "The second ferry" in parked["body"]
        assert queued(deployment) == []
        limit(deployment, "acme", documents=2)
        with desk_of(deployment).session() as session:
            assert jobs.resubmit(session, [parked["id"]]) == 1
        until_empty(environment)
    assert set(statuses(deployment).values()) == {"succeeded"}
    assert [row[3] for row in documents(deployment)] == ["first", "second", "other"]


def test_a_job_at_which_the_worker_itself_fails_is_parked(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")

    async def fail(task: tasks.Task) -> None:
        raise ZeroDivisionError("ferry")

    async def run() -> None:
        database = Database(deployment.url("rag_worker"), signer=SIGNER, role="rag_worker")
        with fake_openai() as server:
            async with work.opened(_settings(server), database) as bench:
                await work.work(bench, url=deployment.url("rag_worker"), concurrency=1, until_empty=True)

    monkeypatch.setattr(work, "KINDS", {"ingest": fail})
    asyncio.run(run())
    (row,) = job_rows(deployment)
    assert (row["status"], row["reason"], row["detail"]) == ("failed", "internal_error", "The worker failed.")
    assert queued(deployment) == []


def test_one_that_is_stopped_while_it_connects_ends(
    deployment: Deployment, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        stopping = asyncio.Event()
        recover = work._recover

        async def stopped(bench: work.Bench) -> None:
            await recover(bench)
            stopping.set()

        monkeypatch.setattr(work, "_recover", stopped)
        url = deployment.url("rag_worker")
        async with work.opened(settings, Database(url, signer=SIGNER, role="rag_worker", pool_size=1)) as bench:
            ending = work.work(bench, url=url, concurrency=1, until_empty=False, stopping=stopping)
            await asyncio.wait_for(ending, 60)

    asyncio.run(run())
    assert workers_of(deployment) == 0


def test_sigterm_lets_a_job_end_and_begins_no_other(deployment: Deployment, tmp_path: Path) -> None:
    for number in range(3):
        asked(deployment, MARA, f"guide-{number}", f"Ferry {number} leaves at six.")
    with fake_openai() as server:
        gate = slow(server)
        worker = start_worker(worker_environment(deployment, server.base_url), "--jobs", "1", log=tmp_path / "log")
        wait_until(lambda: "processing" in statuses(deployment).values() and len(server.requests) > 0, timeout_s=60)
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert worker.poll() is None
        gate.set()
        assert worker.wait(40) == 0
    assert sorted(statuses(deployment).values()) == ["pending", "pending", "succeeded"]
    assert workers_of(deployment) == 0
    log = (tmp_path / "log").read_text()
    assert '"event": "job_done"' in log
    assert '"event": "worker_stopped"' in log
    # Nothing of what was said or by whom.
    assert "Ferry" not in log
    assert "acme" not in log


def test_a_job_that_takes_its_time_after_sigterm_is_not_taken_for_lost(deployment: Deployment, tmp_path: Path) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    with fake_openai() as server:
        gate = slow(server)
        environment = worker_environment(deployment, server.base_url)
        ending = start_worker(environment, log=tmp_path / "log")
        wait_until(lambda: len(server.requests) > 0, timeout_s=60)
        with working(environment):
            ending.send_signal(signal.SIGTERM)
            time.sleep(work.STALLED_AFTER_S + 3)
            assert len(server.requests) == 1
            gate.set()
            assert ending.wait(40) == 0
    (row,) = job_rows(deployment)
    assert (row["status"], row["attempts"], row["losses"]) == ("succeeded", 1, 0)


def slow(server: FakeOpenAI) -> threading.Event:
    """Requests wait until the event is set."""
    server.gate = threading.Event()
    return server.gate


def test_a_job_that_is_cancelled_while_it_is_done_stores_nothing(deployment: Deployment) -> None:
    job_id = asked(deployment, MARA, "guide", "The ferry leaves at six.")

    async def cancel(principal: Principal) -> None:
        async with deployment.pools() as database:
            await jobs.cancel(database, principal, job_id)

    with fake_openai() as server:
        gate = slow(server)
        with working(worker_environment(deployment, server.base_url)):
            wait_until(lambda: len(server.requests) > 0, timeout_s=60)
            with pytest.raises(errors.JobNotFound):
                asyncio.run(cancel(JONAS))
            asyncio.run(cancel(MARA))
            gate.set()
            wait_until(lambda: queued(deployment) == [], timeout_s=30)
    (row,) = job_rows(deployment)
    assert (row["status"], row["payload"], row["body"]) == ("cancelled", None, None)
    assert documents(deployment) == []


def test_an_erasure_reaches_what_waits_and_what_is_being_done(deployment: Deployment) -> None:
    asked(deployment, MARA, "guide", "The ferry leaves at six.")
    asked(deployment, JONAS, "other", "The plane leaves at seven.")
    subject = Subject(tenant_id="acme", user_id=7)
    with fake_openai() as server:
        gate = slow(server)
        with working(worker_environment(deployment, server.base_url), "--jobs", "1"):
            wait_until(lambda: len(server.requests) > 0, timeout_s=60)
            with desk_of(deployment).session() as session:
                assert count_traces(session, subject)["rag_jobs"] == 1
                assert forget(session, subject)["rag_jobs"] == 1
            gate.set()
            wait_until(lambda: queued(deployment) == [], timeout_s=60)
    with desk_of(deployment).session() as session:
        assert set(count_traces(session, subject).values()) == {0}
    assert [row[3] for row in documents(deployment)] == ["other"]


def test_of_a_source_the_jobs_are_done_in_the_order_in_which_they_were_asked_for(deployment: Deployment) -> None:
    for version in range(6):
        asked(deployment, MARA, "guide", f"The ferry leaves at {version}.")
    with fake_openai() as server:
        until_empty(worker_environment(deployment, server.base_url), "--jobs", "6")
    assert set(statuses(deployment).values()) == {"succeeded"}
    assert [row[4] for row in documents(deployment)] == ["The ferry leaves at 5."]


def test_a_tenant_with_many_jobs_does_not_hold_up_another_ones(
    deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    many = scaled(test=60, ci=300, prove=1000)

    async def fill() -> None:
        async with deployment.pools() as database:
            for number in range(many):
                await ask(database, MARA, f"guide-{number}", f"Ferry {number} leaves at six.")
            await ask(database, OTHER, "urgent", "The plane leaves at seven.")
            await ask(database, OTHER, "later", "The plane leaves at eight.")

    asyncio.run(fill())
    order = [row["args"]["id"] for row in sorted(queued(deployment), key=lambda row: (-row["priority"], row["id"]))]
    sources = {str(row["id"]): row["source_id"] for row in job_rows(deployment)}
    place = [sources[id] for id in order].index("urgent")
    assert place == 1
    with fake_openai() as server, working(worker_environment(deployment, server.base_url), "--jobs", "1"):
        wait_until(lambda: statuses(deployment)["urgent"] == "succeeded", timeout_s=120)
        done = list(statuses(deployment).values()).count("succeeded")
    assert done < 20
    figure(f"a tenant's one job beside another's {many:,} that wait: the {place + 1}nd to be done")


def test_a_stream_of_jobs_of_one_tenant_does_not_starve_another(deployment: Deployment) -> None:
    """Turns go on from where the queue is, and not from 0."""

    async def run() -> None:
        async with deployment.pools() as database:
            for number in range(10):
                await ask(database, MARA, f"old-{number}", "text")
            with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
                # The first five are done.
                superuser.execute("delete from jobs.procrastinate_jobs where priority > -5")
                superuser.execute("update rag.rag_jobs set status = 'succeeded' where turn < 5")
            for number in range(3):
                await ask(database, OTHER, f"new-{number}", "text")

    asyncio.run(run())
    turns = {row["source_id"]: row["turn"] for row in job_rows(deployment)}
    assert [turns[f"new-{number}"] for number in range(3)] == [5, 6, 7]


def test_the_limit_is_each_tenants_own_and_exact(deployment: Deployment) -> None:
    async def run() -> list[object]:
        async with deployment.pools(pool_size=8) as database:
            found = await asyncio.gather(
                *(ask(database, MARA, f"guide-{number}", "text", max_waiting=5) for number in range(12)),
                return_exceptions=True,
            )
            await ask(database, OTHER, "guide", "text", max_waiting=5)
            return list(found)

    found = asyncio.run(run())
    full = [one for one in found if isinstance(one, errors.QueueFull)]
    assert len(full) == 7
    assert len(job_rows(deployment)) == 6


def test_jobs_that_the_queue_has_lost_are_put_back(deployment: Deployment) -> None:
    job_id = asked(deployment, MARA, "guide", "The ferry leaves at six.")
    with psycopg.connect(deployment.url("postgres")) as superuser:
        superuser.execute("delete from jobs.procrastinate_jobs")
    with psycopg.connect(deployment.url("rag_worker")) as worker:
        worker.execute("select rag.expire_jobs(interval '1 day', interval '7 days')")
    (entry,) = queued(deployment)
    assert entry["args"] == {"id": str(job_id)}


def test_what_ended_long_ago_is_removed_and_what_waits_is_not(deployment: Deployment) -> None:
    for name in ("old", "new", "waiting"):
        asked(deployment, MARA, name, "text")
    with psycopg.connect(deployment.url("postgres")) as superuser:
        superuser.execute(
            "update rag.rag_jobs set status = 'succeeded', created_at = created_at - interval '8 days',"
            " finished_at = now() - case source_id when 'old' then interval '8 days' else interval '6 days' end"
            " where source_id <> 'waiting'"
        )
        superuser.execute("update rag.rag_jobs set created_at = created_at - interval '8 days'")
    with psycopg.connect(deployment.url("rag_worker")) as worker:
        assert worker.execute("select rag.expire_jobs(interval '1 day', interval '7 days')").fetchone() == (1,)
    assert set(statuses(deployment)) == {"new", "waiting"}


def _settings(server: FakeOpenAI) -> Settings:
    return Settings(
        _env_file=None,
        rag_embedding_provider="openai",
        rag_embedding_model="text-embedding-3-small",
        openai_base_url=server.base_url,
        openai_api_key="sk-test",
    )


def _embedded(server: FakeOpenAI) -> int:
    return sum(len(request.body["input"]) for request in server.requests)


def test_of_twenty_who_bring_the_same_at_once_one_embeds_it(
    deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    """Half of them in one process, on pools of their own, and half in another thread's."""
    rounds = scaled(test=2, ci=20, prove=1000)
    with fake_openai() as server:
        settings = _settings(server)

        async def half(number: int, statuses: list[str]) -> None:
            embedder = open_embedder(settings)
            async with (
                deployment.pools(pool_size=4) as first,
                Database(deployment.url("rag_worker"), signer=SIGNER, role="rag_worker", pool_size=4) as second,
            ):

                async def one(database: Database) -> None:
                    done = await ingest(
                        Source(name="a.md", source_id=f"guide-{number}", content="The ferry leaves.", language="en"),
                        principal=MARA,
                        destination=destination_of(MARA, scope="user"),
                        database=database,
                        embedder=embedder,
                        max_bytes=10_000,
                    )
                    statuses.append(done.status)

                await asyncio.gather(*(one(database) for database in (first, second) for _ in range(5)))
            await embedder.close()

        for number in range(rounds):
            before = _embedded(server)
            statuses: list[str] = []
            threads = [threading.Thread(target=lambda: asyncio.run(half(number, statuses))) for _ in range(2)]  # noqa: B023
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(statuses) == ["created", *["unchanged"] * 19]
            assert _embedded(server) - before == 1
    assert len(documents(deployment)) == rounds
    with psycopg.connect(deployment.url("postgres")) as superuser:
        assert superuser.execute("select count(*) from rag.rag_claims").fetchone() == (0,)
    figure(f"{rounds:,} rounds of 20 identical concurrent ingests: one document and one embedding run each")


def test_a_claim_of_a_process_that_died_ends_by_itself(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_openai() as server:
        settings = _settings(server)

        async def run() -> str:
            embedder = open_embedder(settings)
            async with deployment.pools() as database:
                bring = Source(name="a.md", source_id="guide", content="The ferry leaves.", language="en")
                with deployment.transaction(MARA) as connection:
                    connection.execute("select rag.access_class('user', 7, null, array['public'])")
                    connection.execute(
                        "select rag.claim_source(access_id, 'markdown', 'guide', gen_random_uuid(), interval '1 s')"
                        " from rag.my_classes()"
                    )
                began = time.monotonic()
                done = await ingest(
                    bring,
                    principal=MARA,
                    destination=destination_of(MARA, scope="user"),
                    database=database,
                    embedder=embedder,
                    max_bytes=10_000,
                )
                assert time.monotonic() - began > 0.5
            await embedder.close()
            return done.status

        assert asyncio.run(run()) == "created"
