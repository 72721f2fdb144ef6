"""Every step of an ingest and of a job fails in turn, in three ways (SECURITY.md, Y19).

Whatever fails: the document is as it was before or as it is afterwards and nothing in between, what was acknowledged
is there, and the same once more leads to the state that it leads to without a fault.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from tests.conftest import Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.failing_ingest import AGAIN, ASKING, FIRST, NAME, SCENARIOS, SECOND, WAYS, Case
from tests.rag.stored import content, half_documents, least_cosine, rows

CHECKOUT = Path(__file__).resolve().parents[2]
Ask = Callable[[Case], dict[str, Any]]

LEFT_BEHIND = """
    select encode(tombstone.source_digest, 'hex') as digest, tombstone.retracted
    from rag.rag_tombstones as tombstone
    join rag.rag_access_classes as class using (tenant_id, access_id)
    where class.user_id = %s
    order by 1
"""


def state(superuser: str, user_id: int) -> str:
    """A digest of everything that an ingest decides for one owner; without ids, times and counts of deletions."""
    found = (content(superuser, user_id=user_id), rows(superuser, LEFT_BEHIND, (user_id,)))
    return hashlib.sha256(repr(found).encode()).hexdigest()


@contextmanager
def forking() -> Iterator[Ask]:
    """A process that plays cases, each in a fork of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.rag.failing_ingest"],
        cwd=CHECKOUT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(case: Case) -> dict[str, Any]:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
            process.stdin.flush()
            told: dict[str, Any] = json.loads(process.stdout.readline())
            return told

        yield ask
        process.stdin.close()


def let_time_pass(superuser: str) -> None:
    """Workers that died have said nothing for long, and what was put off is due."""
    with psycopg.connect(superuser) as connection:
        connection.execute("update jobs.procrastinate_jobs set scheduled_at = null where status = 'todo'")
        connection.execute("update jobs.procrastinate_workers set last_heartbeat = now() - interval '1 hour'")


def unfinished(superuser: str) -> list[dict[str, Any]]:
    """Jobs that have not succeeded, and what is left in the queue."""
    return rows(
        superuser,
        "select status, reason from rag.rag_jobs where status <> 'succeeded'"
        " union all select status::text, 'queued' from jobs.procrastinate_jobs",
    )


def write_versions(folder: Path) -> None:
    for version, sections in (("first", FIRST), ("second", SECOND)):
        path = folder / version / NAME
        path.parent.mkdir()
        body = "\n\n".join(f"## Part {number}\n\n{text}" for number, text in enumerate(sections))
        path.write_text(f"# Guide\n\n{body}\n", encoding="utf-8")


def test_every_step_may_fail(
    deployment: Deployment, tmp_path: Path, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    write_versions(tmp_path)
    superuser = deployment.url("postgres")
    users = count(100)
    tried = acknowledged = 0
    with fake_openai() as server, forking() as play:

        def case(scenario: str, **options: Any) -> Case:
            return Case(
                url=deployment.url("rag_app"),
                publisher_url=deployment.url("rag_publisher"),
                worker_url=deployment.url("rag_worker"),
                embedder_url=server.base_url,
                folder=str(tmp_path),
                scenario=scenario,
                **{"user_id": next(users)} | options,
            )

        # What each scenario begins and ends with, and the steps between.
        begun: dict[str, str] = {}
        ended: dict[str, tuple[int, str]] = {}
        steps: list[tuple[str, int, str]] = []
        for scenario in SCENARIOS:
            # It dies before its first step.
            dead = case(scenario, step=1, way="kill")
            assert play(dead).get("prepared")
            begun[scenario] = state(superuser, dead.user_id)
            if scenario in AGAIN:
                # The next worker is to find its own job and no other one.
                let_time_pass(superuser)
                assert play(dataclasses.replace(dead, step=0, prepare=False)).get("acknowledged")
            calm = case(scenario)
            told = play(calm)
            assert told.get("acknowledged"), told
            if scenario == ASKING:
                assert state(superuser, calm.user_id) == begun[scenario]
                assert play(dataclasses.replace(calm, prepare=False, acknowledged=True)).get("acknowledged")
            ended[scenario] = (calm.user_id, state(superuser, calm.user_id))
            steps += [(scenario, place, name) for place, name in enumerate(told["steps"], start=1)]
        assert begun["a changed document"] != ended["a changed document"][1]
        assert len(steps) >= 60
        kinds = {name for _, _, name in steps}
        assert {"before the file", "after a request", "after a statement", "before the commit"} <= kinds

        everything = [(*step, way) for step in steps for way in WAYS]
        wanted = min(scaled(test=18, ci=60, prove=len(everything)), len(everything))
        for scenario, place, name, way in Random(3).sample(everything, wanted):
            failing = case(scenario, step=place, way=way)
            told = play(failing)
            where = (scenario, place, name, way, told)
            assert told.get("prepared"), where
            assert told["ended"] == (-9 if way == "kill" else 0), where
            found = state(superuser, failing.user_id)
            twin, wanted_state = ended[scenario]
            assert found in (begun[scenario], wanted_state), where
            done = bool(told.get("acknowledged"))
            if scenario == ASKING:
                # No one but a worker does it.
                assert found == begun[scenario], where
            elif done and scenario not in AGAIN:
                assert found == wanted_state, where
            # What a worker begins was acknowledged before.
            acknowledged += done or (scenario in AGAIN and scenario != ASKING)
            let_time_pass(superuser)
            again = play(dataclasses.replace(failing, step=0, prepare=False, acknowledged=done))
            assert again.get("acknowledged"), (*where, again)
            assert unfinished(superuser) == [], where
            assert state(superuser, failing.user_id) == wanted_state, where
            if scenario != "a retraction":
                assert least_cosine(superuser, failing.user_id, twin) > 0.999, where
            tried += 1
    assert half_documents(superuser) == []
    (asked,) = rows(
        superuser, "select count(*) as jobs, count(distinct (user_id, source_id)) as sources from rag.rag_jobs"
    )
    assert asked["jobs"] == asked["sources"] > 0
    figure(
        f"{len(steps)} steps of {len(SCENARIOS)} kinds of ingest and job, {tried:,} faults (exception, kill -9, dropped"
        f" connection): 0 half documents, 0 of {acknowledged:,} acknowledgements lost, the same state after one retry"
    )
