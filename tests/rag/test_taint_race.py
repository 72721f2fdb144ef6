"""Validated and tainted in any order, from many hands, while others search (SECURITY.md, Y16).

Of each artifact there is an ingest and, but for one in five, an invalidation. Whichever comes first: no search that
starts after the invalidation has returned finds the artifact, and in the end it is not there. Now and then a worker is
stopped in the middle of either, and does it again, as a message is delivered again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from random import Random

import pytest

from rag.errors import SourceInvalidated, SourceRetracted
from rag.ingest import Source, ingest
from rag.invalidate import Targets, invalidate
from rag.principal import Principal
from rag.retrieve import retrieve
from rag.settings import Settings
from rag.store import destination_of
from tests.conftest import Deployment
from tests.rag.quick_embedder import QuickEmbedder
from tests.rag.stored import half_documents, rows

WORKERS = 4
SEARCHERS = 2
ASKED_AT_ONCE = 12
STOPPED = 0.1
MARA = Principal(tenant_id="acme", user_id=7)


@dataclass(frozen=True, slots=True)
class Artifact:
    """By what it is tainted: its own name, its provenance, or the origin that it names as its provenance."""

    number: int
    by: str

    @property
    def source_id(self) -> str:
        return f"zq{self.number:06d}"

    @property
    def provenance_id(self) -> str | None:
        return None if self.by == "source" else f"of-{self.source_id}"

    @property
    def targets(self) -> Targets:
        if self.by == "source":
            return Targets(source_ids=[self.source_id])
        if self.by == "provenance":
            return Targets(provenance_ids=[f"of-{self.source_id}"])
        return Targets(source_ids=[f"of-{self.source_id}"])  # which never comes itself


@dataclass
class World:
    """What the workers share. A number is added to `gone` after the invalidation has returned."""

    deployment: Deployment
    settings: Settings
    work: list[tuple[str, Artifact]]
    stays: frozenset[int]
    gone: set[int] = field(default_factory=set)
    stale: list[str] = field(default_factory=list)
    searches: int = 0
    refused: int = 0
    hits: int = 0
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    place: count[int] = field(default_factory=count)

    def next(self) -> tuple[str, Artifact] | None:
        with self.lock:
            place = next(self.place)
        return self.work[place] if place < len(self.work) else None


async def carry_out(world: World, seed: int) -> None:
    random = Random(seed)

    async def meanwhile() -> None:
        await asyncio.sleep(random.random() * 0.01)

    embedder = QuickEmbedder(meanwhile)
    async with world.deployment.pools(pool_size=2) as database:

        async def once(verb: str, artifact: Artifact) -> None:
            if verb == "tainted":
                await invalidate(artifact.targets, reason="a test", principal=MARA, database=database)
                return
            source = Source(
                name="artifact.txt",
                source_id=artifact.source_id,
                content=f"artifact {artifact.source_id}",
                title=artifact.source_id,
                provenance_id=artifact.provenance_id,
            )
            try:
                await ingest(
                    source,
                    principal=MARA,
                    destination=destination_of(MARA, scope="user"),
                    database=database,
                    embedder=embedder,
                    max_bytes=1000,
                )
            except (SourceInvalidated, SourceRetracted):
                assert artifact.number not in world.stays
                world.refused += 1

        while (task := world.next()) is not None:
            if random.random() < STOPPED:
                stopped = asyncio.create_task(once(*task))
                await asyncio.sleep(random.random() * 0.02)
                stopped.cancel()
                await asyncio.wait([stopped])
                # What it raised, but for being stopped, the second time raises as well.
                if not stopped.cancelled():
                    stopped.exception()
            await once(*task)
            if task[0] == "tainted":
                world.gone.add(task[1].number)


async def search(world: World, seed: int, artifacts: Sequence[Artifact]) -> None:
    random = Random(seed)
    async with world.deployment.pools(pool_size=1) as database:
        while not world.done.is_set():
            gone = sorted(world.gone)
            # Half of what is asked for went last, and is the likeliest to come back.
            numbers = random.sample(gone, min(len(gone), ASKED_AT_ONCE // 2))
            asked = [f"zq{number:06d}" for number in numbers]
            asked += [one.source_id for one in random.sample(artifacts, ASKED_AT_ONCE // 2)]
            hidden = {f"zq{number:06d}" for number in gone}
            passages, *_ = await retrieve(
                " ".join(asked),
                None,
                principal=MARA,
                database=database,
                settings=world.settings,
                embedding_model="test-model",
                min_similarity=None,
                model_min_similarity=-1.0,
                top_k=50,
                budget_tokens=100_000,
                mode="keyword",
            )
            found = {passage.document_name for passage in passages}
            world.stale += found & hidden
            world.hits += len(found)
            world.searches += 1


@pytest.mark.parametrize("seed", [1])
def test_nothing_that_was_tainted_is_found_again(
    deployment: Deployment,
    settings: Settings,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
    seed: int,
) -> None:
    pairs = scaled(test=40, ci=800, prove=10_000)
    random = Random(seed)
    artifacts = [Artifact(number, random.choice(("source", "provenance", "origin"))) for number in range(pairs)]
    stays = frozenset(number for number in range(pairs) if number % 5 == 0)
    work = [("validated", one) for one in artifacts]
    work += [("tainted", one) for one in artifacts if one.number not in stays]
    # Not too far apart, or hardly any two would meet.
    keys = {id(task): task[1].number + random.random() * 20 for task in work}
    work.sort(key=lambda task: keys[id(task)])
    world = World(deployment, settings, work, stays)
    with ThreadPoolExecutor(WORKERS + SEARCHERS) as threads:
        searchers = [threads.submit(asyncio.run, search(world, number, artifacts)) for number in range(SEARCHERS)]
        workers = [threads.submit(asyncio.run, carry_out(world, number)) for number in range(WORKERS)]
        wait(workers)
        world.done.set()
    for thread in (*workers, *searchers):
        thread.result()
    assert world.stale == []
    url = deployment.url("postgres")
    stored = [row["source_id"] for row in rows(url, "select source_id from rag.rag_documents order by source_id")]
    assert stored == [f"zq{number:06d}" for number in sorted(stays)]
    assert half_documents(url) == []
    # Else nothing was tried.
    assert world.refused > 0
    assert world.hits > 0
    figure(
        f"{pairs:,} artifacts by {WORKERS} workers, {len(work) - pairs:,} of them tainted, {world.refused:,} ingests"
        f" refused, {world.searches:,} searches meanwhile: 0 stale results, 0 resurrections"
    )
