"""Many askers and a slow model: nobody holds a connection while it writes, and searches go on as ever."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable

from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.exchange import RAGRequest, RAGResponse
from rag.generate import open_generator
from rag.principal import Principal
from rag.settings import Settings
from tests.conftest import SIGNER, Deployment
from tests.fakes import Exchange
from tests.rag.model_servers import model_server, settings_of

ANNA = Principal(tenant_id="acme", user_id=1)
BACKUPS = "Backups of the orders database run every night at 02:00 and are kept for 35 days."
ARRIVING_S = 120.0
# Longer than the searches take.
PATIENCE_S = 600.0
POOL = 5
UNAFFECTED = 1.3
ROUNDS = 4


async def test_a_slow_model_holds_no_connection_and_slows_no_search(
    deployment: Deployment,
    store: Callable[..., object],
    embedder: Embedder,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    askers = scaled(test=100, ci=100, prove=200)
    searches = scaled(test=300, ci=300, prove=2000)
    store(ANNA, BACKUPS)
    writes = threading.Event()
    waiting = threading.Semaphore(0)
    with model_server("ollama") as server:

        def slow(exchange: Exchange) -> None:
            if exchange.body.get("format"):
                server.fake.serve(exchange)
                return
            exchange.begin_stream(media_type=server.dialect.media_type)
            waiting.release()
            writes.wait(PATIENCE_S)
            exchange.stream(server.dialect.token("They run at night.") + server.dialect.end("stop"))
            exchange.end_stream()

        server.plays(slow)
        server.fake.server.request_queue_size = 256
        server.fake.server.socket.listen(256)
        # Everybody is at the model server at once: more than a client's own limit of connections would let in.
        settings: Settings = settings_of(
            "ollama",
            server.fake.base_url,
            rag_llm_concurrency=askers,
            rag_llm_queue=askers,
            rag_timeout_seconds=PATIENCE_S,
        )
        request = RAGRequest(query="When do backups of the orders database run?", mode="keyword", min_similarity=-1.0)
        async with pools(deployment) as crowded_pool, pools(deployment) as quiet_pool:
            crowded = RAGService(settings, crowded_pool, embedder, open_generator(settings))
            quiet = RAGService(settings, quiet_pool, embedder, open_generator(settings))

            async def search(service: RAGService) -> float:
                started = time.perf_counter()
                assert (await service.search(request, principal=ANNA)).passages
                return time.perf_counter() - started

            for service in (crowded, quiet):
                await asyncio.gather(*(search(service) for _ in range(20 * POOL)))
            alone = [await search(quiet) for _ in range(searches)]
            answers: list[asyncio.Task[RAGResponse]] = []
            end = time.monotonic() + ARRIVING_S
            arrived = 0
            while arrived < askers:
                assert time.monotonic() < end, f"{arrived} of {askers} reached the model"
                # The pool has a queue of its own, and that is not what is measured.
                while len(answers) < min(askers, arrived + 20):
                    answers.append(asyncio.create_task(crowded.generate(request, principal=ANNA)))
                arrived += waiting.acquire(blocking=False)
                await asyncio.sleep(0)
            assert busy(deployment) == 0
            # Nor is one taken out of the pool: five searches at once do not wait for any.
            await asyncio.gather(*(search(crowded) for _ in range(POOL)))
            times: dict[RAGService, list[float]] = {crowded: [], quiet: []}
            # By turns, and each as often first: whatever else the machine does meets both. In doubt, more of them:
            # the tail of a few hundred moves by a quarter where others keep the machine busy.
            for _ in range(ROUNDS):
                for number in range(searches):
                    for service in (crowded, quiet) if number % 2 else (quiet, crowded):
                        times[service].append(await search(service))
                if p95(times[crowded]) <= UNAFFECTED * p95(times[quiet]):
                    break
            still = busy(deployment)
            assert not any(one.done() for one in answers)
            writes.set()
            responses = await asyncio.gather(*answers)
            for service in times:
                await service.generator.close()
    assert all(response.answer == "They run at night." for response in responses)
    assert still == 0
    with_askers, without, before = p95(times[crowded]), p95(times[quiet]), p95(alone)
    figure(
        f"{askers} askers of a slow model, pool of {POOL}: {still} connections busy; p95 of {len(times[quiet]):,}"
        f" searches {with_askers * 1000:.1f} ms in their service, {without * 1000:.1f} ms by turns in one without"
        f" askers: {with_askers / without:.2f}× ({before * 1000:.1f} ms there before they came)"
    )
    assert with_askers <= UNAFFECTED * without


def p95(times: list[float]) -> float:
    return statistics.quantiles(times, n=20)[-1]


def pools(deployment: Deployment) -> Database:
    """Of one service, not yet opened."""
    return Database(deployment.url("rag_app"), signer=SIGNER, publisher_url=None, pool_size=POOL, pool_timeout_s=30.0)


def busy(deployment: Deployment) -> int:
    """How many connections of services have a statement or a transaction open."""
    with deployment.cluster.superuser("postgres") as watch:
        row = watch.execute(
            "select count(*) from pg_stat_activity where datname = %s and state <> 'idle' and usename = 'rag_app'",
            (deployment.name,),
        ).fetchone()
    assert row is not None
    return int(row[0])
