"""A change of the embedding model on a real database, with a fake OpenAI that has models of several widths."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from uuid import UUID

import psycopg
import pytest

from rag import maintain, models
from rag.active_model import Model, close_models, find_active, open_models
from rag.answer import RAGService
from rag.compare_models import Agreement, compare
from rag.database import Database
from rag.embed import Embedder
from rag.errors import (
    InsufficientQuota,
    ModelChangeRefused,
    ModelChanging,
    ModelNotActive,
    RAGServiceError,
    SchemaMismatch,
)
from rag.exchange import RAGRequest
from rag.ingest import Source, ingest
from rag.operate import Desk
from rag.principal import Principal
from rag.settings import Settings
from rag.store import Destination, remove_document
from tests.conftest import Deployment
from tests.fakes import VECTOR_FAULTS
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai
from tests.rag.jobbing import ask, job_rows, wait_until, worker_environment, working

ALICE = Principal(tenant_id="acme", user_id=1)
BOB = Principal(tenant_id="other", user_id=2)
OLD, NEW = "openai/text-embedding-3-small:512", "openai/text-embedding-3-large:768"
ALIKE = "openai/text-embedding-3-large:512"
WIDTH, NEW_WIDTH = 512, 768


@pytest.fixture
def provider() -> Iterator[FakeOpenAI]:
    with fake_openai() as fake:
        yield fake


@pytest.fixture
def settings(provider: FakeOpenAI) -> Settings:
    return settings_for(provider)


def settings_for(provider: FakeOpenAI, **changes: Any) -> Settings:
    values = {
        "rag_embedding_provider": "openai",
        "rag_embedding_model": "text-embedding-3-small",
        "rag_embedding_dimensions": WIDTH,
        "rag_embedding_next_model": "text-embedding-3-large",
        "rag_embedding_next_dimensions": NEW_WIDTH,
        "openai_base_url": provider.base_url,
        "openai_api_key": provider.api_key,
        "rag_llm_provider": "extractive",
        # The vectors of the fake mean nothing.
        "rag_min_similarity_score": -1.0,
    }
    return Settings(_env_file=None, **(values | changes))


@asynccontextmanager
async def world(deployment: Deployment, settings: Settings) -> AsyncIterator[tuple[Database, Model, Model]]:
    """The pools, the model of the settings, and the one that is to come."""
    old, new = open_models(settings)
    try:
        async with deployment.pools() as database:
            yield database, old, new
    finally:
        await close_models((old, new))


def text_of(number: int) -> str:
    return f"# Bears\n\n## Their winter\n\nBear number {number} sleeps for {number} weeks in den {number * 7}.\n"


async def put(database: Database, embedder: Embedder, number: int, *, who: Principal = ALICE, text: str = "") -> UUID:
    ingested = await ingest(
        Source(name=f"bear{number}.md", source_id=f"bear{number}.md", content=text or text_of(number)),
        principal=who,
        destination=Destination(scope="user", user_id=who.user_id, project_id=None, tags=("public",)),
        database=database,
        embedder=embedder,
        max_bytes=100_000,
    )
    return ingested.document_id


def bench(deployment: Deployment) -> Any:
    return models.bench(deployment.url("rag_migrator"))


def look(deployment: Deployment, statement: str) -> list[tuple[Any, ...]]:
    with deployment.cluster.superuser(deployment.name) as connection:
        return connection.execute(statement).fetchall()


MODELS_OF = """
    select embedding_model, rag.vector_dims(embedding), second_embedding_model, rag.vector_dims(second_embedding),
        count(*)
    from rag.rag_chunks group by 1, 2, 3, 4 order by 1, 3
"""


def models_of(deployment: Deployment) -> list[tuple[Any, ...]]:
    return look(deployment, MODELS_OF)


async def added(deployment: Deployment, old: Model, new: Model) -> None:
    with bench(deployment) as at:
        await models.add(at, active=old, coming=new)


async def changed(deployment: Deployment, old: Model, new: Model) -> None:
    await added(deployment, old, new)
    with bench(deployment) as at:
        await models.switch(at, new.embedder)


# --- the whole way ---------------------------------------------------------------------------------


async def test_add_fill_switch_roll_back_and_drop(deployment: Deployment, settings: Settings) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(5):
            await put(database, old.embedder, number)
        await put(database, old.embedder, 9, who=BOB)
        await added(deployment, old, new)
        assert models_of(deployment) == [(OLD, WIDTH, None, None, 6)]
        with bench(deployment) as at:
            filled = await models.fill(at, new.embedder)
            assert (filled.chunks, filled.recomposed) == (6, 0)
            assert at.state().is_ready
        assert models_of(deployment) == [(OLD, WIDTH, NEW, NEW_WIDTH, 6)]
        async with RAGService(settings, database) as service:
            before = await service.search(RAGRequest(query="bear 3 sleeps"), principal=ALICE)
            with bench(deployment) as at:
                state = await models.switch(at, new.embedder)
            assert (state.active.model_id, state.second.model_id) == (NEW, OLD)  # type: ignore[union-attr]
            assert models_of(deployment) == [(NEW, NEW_WIDTH, OLD, WIDTH, 6)]
            after = await service.search(RAGRequest(query="bear 3 sleeps"), principal=ALICE)
            assert (before.embedding_model, before.mode) == (OLD, "hybrid")
            assert (after.embedding_model, after.mode, after.degraded) == (NEW, "hybrid", [])
            assert {passage.text for passage in after.passages} == {passage.text for passage in before.passages}
            # Written with the new one alone; the way back fills the old one first.
            await service.with_active_model(lambda embedder: put(database, embedder, 77))
            assert models_of(deployment)[-1] == (NEW, NEW_WIDTH, None, None, 1)
            with bench(deployment) as at:
                await models.switch(at, old.embedder, back=True)
            assert models_of(deployment) == [(OLD, WIDTH, NEW, NEW_WIDTH, 7)]
            again = await service.search(RAGRequest(query="bear 77 sleeps"), principal=ALICE)
            assert (again.embedding_model, again.mode) == (OLD, "hybrid")
            assert "number 77" in again.passages[0].text
            with bench(deployment) as at:
                await models.switch(at, new.embedder)
                await models.drop(at)
                assert at.state().second is None
            assert models_of(deployment) == [(NEW, NEW_WIDTH, None, None, 7)]
            last = await service.search(RAGRequest(query="bear 77 sleeps"), principal=ALICE)
            assert (last.embedding_model, last.mode) == (NEW, "hybrid")


async def test_the_vectors_filled_are_those_that_an_ingest_would_have_written(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await changed(deployment, old, new)
        filled = look(deployment, "select embedding::text, chunk_hash from rag.rag_chunks")
        await put(database, new.embedder, 1, who=BOB)
        written = look(deployment, "select embedding::text, chunk_hash from rag.rag_chunks where tenant_id = 'other'")
        assert filled == written


async def test_the_schema_is_as_it_was_made_at_every_step_but_for_the_width(
    deployment: Deployment, settings: Settings
) -> None:
    """The same catalog that `rag doctor` and the start of the service compare: rights, constraints, indexes, all."""

    async def differing(database: Database) -> list[str]:
        found = await database.examine(dimensions=settings.embedding_widths, thorough=True)
        return [str(finding) for finding in found]

    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        assert await differing(database) == []
        await added(deployment, old, new)
        assert await differing(database) == []
        with bench(deployment) as at:
            await models.fill(at, new.embedder)
            assert await differing(database) == []
            await models.switch(at, new.embedder)
            assert await differing(database) == []
            await models.switch(at, old.embedder, back=True)
            assert await differing(database) == []
            await models.switch(at, new.embedder)
            await models.drop(at)
        assert await differing(database) == []
        await database.check_barrier(dimensions=settings.embedding_widths, strict=False)
        with pytest.raises(SchemaMismatch, match="was migrated with 768"):
            await database.check_barrier(dimensions=WIDTH, strict=False)


async def test_a_worker_goes_on_with_the_model_that_is_searched(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings
) -> None:
    """One job before the switch, one that is being embedded meanwhile, and one afterwards."""
    environment = worker_environment(
        deployment,
        provider.base_url,
        RAG_EMBEDDING_DIMENSIONS=str(WIDTH),
        RAG_EMBEDDING_NEXT_MODEL="text-embedding-3-large",
        RAG_EMBEDDING_NEXT_DIMENSIONS=str(NEW_WIDTH),
    )

    async def succeeded(many: int) -> None:
        await asyncio.to_thread(
            wait_until,
            lambda: [row["status"] for row in job_rows(deployment)] == ["succeeded"] * many,
            timeout_s=60,
        )

    async with world(deployment, settings) as (database, old, new):
        await added(deployment, old, new)
        with working(environment):
            await ask(database, ALICE, "before", text_of(1))
            await succeeded(1)
            assert models_of(deployment) == [(OLD, WIDTH, None, None, 1)]
            with bench(deployment) as at:
                await models.fill(at, new.embedder)
                so_far = len(provider.requests)
                provider.gate = threading.Event()
                await ask(database, ALICE, "meanwhile", text_of(2))
                await asyncio.to_thread(wait_until, lambda: len(provider.requests) > so_far, timeout_s=60)
                await models.switch(at, new.embedder)
            provider.gate.set()
            await succeeded(2)
            await ask(database, ALICE, "afterwards", text_of(3))
            await succeeded(3)
        assert models_of(deployment) == [(NEW, NEW_WIDTH, OLD, WIDTH, 1), (NEW, NEW_WIDTH, None, None, 2)]
        # The refusal costs the job no attempt.
        assert [row["attempts"] for row in job_rows(deployment)] == [1, 1, 1]


# --- filling ---------------------------------------------------------------------------------------


async def test_a_rewritten_chunk_is_filled_again_and_a_removed_one_is_gone(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        kept, removed = [await put(database, old.embedder, number) for number in (1, 2)]
        await added(deployment, old, new)
        with bench(deployment) as at:
            await models.fill(at, new.embedder)
            await put(database, old.embedder, 1, text="# Bears\n\nAnother text about them.\n")
            await remove_document(database, ALICE, removed, reason="a test")
            assert models_of(deployment) == [(OLD, WIDTH, None, None, 1)]
            assert (await models.fill(at, new.embedder)).chunks == 1
        assert look(deployment, "select document_id, second_embedding_model from rag.rag_chunks") == [(kept, NEW)]


async def test_a_chunk_that_is_replaced_while_its_vector_is_made_gets_none_of_it(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)

        class Meanwhile:
            """The new model, behind whose back the text changes once."""

            def __init__(self) -> None:
                self.asked = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(new.embedder, name)

            async def embed(self, texts: Any, **more: Any) -> list[list[float]]:
                self.asked += 1
                if self.asked == 1:
                    await put(database, old.embedder, 1, text="# Bears\n\nQuite another text.\n")
                return await new.embedder.embed(texts, **more)

        embedder = Meanwhile()
        with bench(deployment) as at:
            filled = await models.fill(at, embedder)  # type: ignore[arg-type]
        (vector,) = await new.embedder.embed(["bear1\n\n# Bears"], purpose="document")
        assert (embedder.asked, filled.chunks) == (2, 1)
        assert len(vector) == NEW_WIDTH
        assert models_of(deployment) == [(OLD, WIDTH, NEW, NEW_WIDTH, 1)]


async def test_a_fill_without_quota_stops_with_the_reason_and_goes_on_later(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "BATCH_CHUNKS", 2)
    async with world(deployment, settings) as (database, old, new):
        for number in range(6):
            await put(database, old.embedder, number)
        await added(deployment, old, new)
        told: list[tuple[int, int]] = []

        def tell(done: int, total: int, what: str) -> None:
            told.append((done, total))
            if done == 4:
                provider.fault = "insufficient_quota"

        with bench(deployment) as at:
            with pytest.raises(InsufficientQuota, match="no quota left"):
                await models.fill(at, new.embedder, tell=tell)
            asked = len(provider.requests)
            assert told == [(2, 6), (4, 6)]
            provider.fault = None
            assert (await models.fill(at, new.embedder)).chunks == 2
        # One request for the rest, and none again for what was there.
        assert len(provider.requests) == asked + 1


async def test_a_provider_that_fails_for_a_while_is_waited_for(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)
        provider.fault, provider.fault_count = "server_error", 4
        with bench(deployment) as at:
            assert (await models.fill(at, new.embedder, patience_s=(0.1, 0.1))).chunks == 1


@pytest.mark.parametrize("fault", [*VECTOR_FAULTS, "duplicate_index", "no_index"])
async def test_no_bad_vector_is_filled_in(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings, fault: str
) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(3):
            await put(database, old.embedder, number)
        await added(deployment, old, new)
        provider.fault = fault
        with bench(deployment) as at, pytest.raises(RAGServiceError):
            await models.fill(at, new.embedder, patience_s=())
        assert models_of(deployment) == [(OLD, WIDTH, None, None, 3)]


async def test_requests_stay_within_the_limits_of_the_provider(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings
) -> None:
    """The fake refuses more than 2,048 texts or 300,000 tokens a request, as OpenAI does."""
    async with world(deployment, settings) as (_, _, new):
        many = [f"a text with the number {number}" for number in range(2_100)]
        long = [f"{number} " + "word " * 6_000 for number in range(60)]  # 450,000 tokens of the fake's
        assert len(await new.embedder.embed(many, purpose="document")) == 2_100
        assert len(await new.embedder.embed(long, purpose="document")) == 60
        inputs = [len(request.body["input"]) for request in provider.requests]
        assert sum(inputs) == 2_160
        assert max(inputs) <= 2_048
        # In one request both are refused, so that what was seen above is not for nothing.
        for texts in (many, long):
            answer = await _ask_at_once(provider, texts)
            assert answer == 400


async def _ask_at_once(provider: FakeOpenAI, texts: list[str]) -> int:
    import httpx2

    async with httpx2.AsyncClient(timeout=60) as client:
        answer = await client.post(
            f"{provider.base_url}/embeddings",
            headers={"Authorization": f"Bearer {provider.api_key}"},
            json={"model": "text-embedding-3-large", "input": texts},
        )
    return answer.status_code


async def test_a_rate_limit_holds(deployment: Deployment, settings: Settings) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(9):
            await put(database, old.embedder, number)
        await added(deployment, old, new)
        with bench(deployment) as at:
            # 60 a minute, 5 at a time: the second batch after 5 s.
            filled = await models.fill(at, new.embedder, pace=models.Pace(chunks_per_minute=60))
        assert filled.chunks == 9
        assert filled.seconds >= 5


async def test_a_fill_that_is_killed_is_taken_up_where_it_was(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(12):
            await put(database, old.embedder, number)
        await added(deployment, old, new)
        environment = {
            **os.environ,
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_MIGRATION_DATABASE_URL": deployment.url("rag_migrator"),
            "RAG_EMBEDDING_PROVIDER": "openai",
            "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
            "RAG_EMBEDDING_DIMENSIONS": str(WIDTH),
            "RAG_EMBEDDING_NEXT_MODEL": "text-embedding-3-large",
            "RAG_EMBEDDING_NEXT_DIMENSIONS": str(NEW_WIDTH),
            "OPENAI_BASE_URL": provider.base_url,
            "OPENAI_API_KEY": provider.api_key,
        }
        # 48 a minute, four at a time.
        command = [sys.executable, "-m", "rag.cli", "models", "fill", "--chunks-per-minute", "48"]
        process = await asyncio.to_thread(
            subprocess.Popen, command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(600):
                (filled,) = look(deployment, "select count(second_embedding) from rag.rag_chunks")[0]
                if filled:
                    break
                await asyncio.sleep(0.1)
            assert 0 < filled < 12
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        # The turn ends with its connection.
        for _ in range(50):
            try:
                with bench(deployment) as at:
                    rest = await models.fill(at, new.embedder)
                break
            except ModelChangeRefused:
                await asyncio.sleep(0.1)
        (whole,) = look(deployment, "select count(second_embedding) from rag.rag_chunks")[0]
        assert (rest.chunks, whole) == (12 - filled, 12)


# --- switching -------------------------------------------------------------------------------------


async def test_queries_and_writes_under_a_switch_never_mix_models(
    deployment: Deployment, settings: Settings, scaled: Callable[..., int]
) -> None:
    """To and fro: every search is hybrid and of one model, or says that it is changing."""
    rounds = scaled(test=2, ci=6, prove=30)
    async with world(deployment, settings) as (database, old, new):
        for number in range(20):
            await put(database, old.embedder, number)
        await added(deployment, old, new)
        over = threading.Event()
        seen: list[tuple[str | None, str]] = []
        refused: list[str] = []
        async with RAGService(settings, database) as service, deployment.pools() as others:

            async def ask() -> None:
                while not over.is_set():
                    try:
                        found = await service.search(RAGRequest(query="bear 3 sleeps"), principal=ALICE)
                    except (ModelNotActive, ModelChanging) as error:
                        refused.append(type(error).__name__)
                        continue
                    assert found.passages
                    assert found.degraded == []
                    seen.append((found.embedding_model, found.mode))

            async def write() -> None:
                number = 100
                while not over.is_set():
                    number += 1
                    try:
                        await service.with_active_model(partial(put, others, number=100 + number % 5))
                    except (ModelNotActive, ModelChanging) as error:
                        refused.append(type(error).__name__)
                    await asyncio.sleep(0.05)

            tasks = [asyncio.create_task(work()) for work in (ask, ask, write)]

            def change() -> None:
                for _ in range(rounds):
                    with bench(deployment) as at:
                        asyncio.run(_switched(at, settings, back=False))
                        time.sleep(0.3)
                        asyncio.run(_switched(at, settings, back=True))
                        time.sleep(0.3)
                        # What was there is the coming one again.
                        at.owner.execute("select rag.set_models(%s, %s)", (OLD, NEW))

            try:
                await asyncio.to_thread(change)
            finally:
                over.set()
                await asyncio.gather(*tasks)
    assert {mode for _, mode in seen} == {"hybrid"}
    assert {model for model, _ in seen} == {OLD, NEW}
    assert set(refused) <= {"ModelNotActive", "ModelChanging"}
    assert {row[:2] for row in models_of(deployment)} == {(OLD, WIDTH)}


async def _switched(at: models.Bench, settings: Settings, *, back: bool) -> None:
    opened = open_models(settings)
    try:
        await models.switch(at, opened[0 if back else 1].embedder, back=back)
    finally:
        await close_models(opened)


async def test_a_service_of_another_model_is_refused_and_mixes_nothing(
    deployment: Deployment, provider: FakeOpenAI, settings: Settings
) -> None:
    """Also where both are of one width, so that nothing else would tell them apart."""
    alike = settings_for(provider, rag_embedding_next_dimensions=WIDTH)
    single = settings_for(provider, rag_embedding_next_model=None)
    async with world(deployment, alike) as (database, old, new):
        await put(database, old.embedder, 1)
        await changed(deployment, old, new)
        async with RAGService(single, database) as service:
            with pytest.raises(ModelNotActive):
                await service.search(RAGRequest(query="bear 1 sleeps"), principal=ALICE)
            with pytest.raises(ModelNotActive):
                await service.with_active_model(lambda embedder: put(database, embedder, 2))
            with pytest.raises(ModelNotActive, match="text-embedding-3-large:512, and the settings name"):
                await find_active(open_models(single), database)
        with pytest.raises(ModelNotActive):
            await put(database, old.embedder, 3)
        assert models_of(deployment) == [(ALIKE, WIDTH, OLD, WIDTH, 1)]


async def test_a_query_that_waits_for_the_switch_is_answered_with_the_new_model(
    deployment: Deployment, settings: Settings
) -> None:
    """Its snapshot is of before, the names of the columns of after: it would find words alone."""
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)
        with bench(deployment) as at:
            await models.fill(at, new.embedder)
            async with RAGService(settings, database) as service:
                with at.owner.transaction():
                    at.owner.execute("select rag.swap_models()")
                    waiting = asyncio.create_task(service.search(RAGRequest(query="bear 1 sleeps"), principal=ALICE))
                    for _ in range(100):
                        blocked = look(
                            deployment, "select count(*) from pg_locks where not granted and locktype = 'relation'"
                        )
                        if blocked[0][0]:
                            break
                        await asyncio.sleep(0.05)
                    assert blocked[0][0] >= 1
                found = await waiting
        assert (found.mode, found.embedding_model, found.degraded) == ("hybrid", NEW, [])


async def test_writers_are_refused_while_the_last_chunks_are_filled_and_no_longer(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)
        with bench(deployment) as at:
            at.owner.execute("select rag.pause_writes(60)")
            with pytest.raises(ModelChanging):
                await put(database, old.embedder, 2)
            at.owner.execute("select rag.pause_writes(0)")
            await put(database, old.embedder, 2)
            await models.switch(at, new.embedder)
        await put(database, new.embedder, 3)


async def test_models_change_places_only_when_every_chunk_has_both(deployment: Deployment, settings: Settings) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)
        with bench(deployment) as at:
            with pytest.raises(psycopg.Error) as refused:
                at.owner.execute("select rag.swap_models()")
            assert refused.value.sqlstate == "55M05"
            await models.fill(at, new.embedder)
            await put(database, old.embedder, 2)
            with pytest.raises(psycopg.Error) as refused:
                at.owner.execute("select rag.swap_models()")
            assert refused.value.sqlstate == "55M05"
            at.owner.execute("drop index rag.rag_chunks_second_contents")
            await models.fill(at, new.embedder)
            at.owner.execute("drop index rag.rag_chunks_second_contents")
            with pytest.raises(psycopg.Error) as refused:
                at.owner.execute("select rag.swap_models()")
            assert refused.value.sqlstate == "55M06"
        assert models_of(deployment) == [(OLD, WIDTH, NEW, NEW_WIDTH, 2)]


async def test_what_makes_no_sense_is_refused_by_name(deployment: Deployment, settings: Settings) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        with bench(deployment) as at:
            for attempt in (
                models.fill(at, new.embedder),
                models.switch(at, new.embedder),
                models.drop(at),
            ):
                with pytest.raises(ModelChangeRefused, match="no second model"):
                    await attempt
            wide = Model(
                embedder=new.embedder, settings=new.settings.model_copy(update={"rag_embedding_dimensions": 3_300})
            )
            with pytest.raises(ModelChangeRefused, match="3,790"):
                await models.add(at, active=old, coming=wide)
            await models.add(at, active=old, coming=new)
            with pytest.raises(ModelChangeRefused, match="second model already"):
                await models.add(at, active=old, coming=new)
            with pytest.raises(ModelChangeRefused, match="is not a former model"):
                await models.switch(at, new.embedder, back=True)
            with pytest.raises(ModelChangeRefused, match="the second model is"):
                await models.fill(at, old.embedder)
            with pytest.raises(ModelChangeRefused, match="at work"), bench(deployment):
                pass
            await models.switch(at, new.embedder)
            with pytest.raises(ModelChangeRefused, match="rollback"):
                await models.switch(at, old.embedder)


async def test_the_widest_two_models_fit_into_a_row(deployment: Deployment) -> None:
    """With a text that moves out, and words that do not compress."""
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("set search_path = rag; set role rag_owner")
        connection.execute("select add_model('a', 'b', 3790 - 512)")
        connection.execute("reset role")
        connection.execute("insert into rag_access_classes values ('t', 1, 'user', 1, null, '{public}', '')")
        connection.execute(
            "insert into rag_documents (tenant_id, access_id, scope, user_id, tags, source_type, source_id,"
            " source_hash, title, body) values ('t', 1, 'user', 1, '{public}', 'text', 'x', 'x', 'x', 'x')"
        )
        connection.execute(
            """
            insert into rag_chunks (access_id, document_id, chunk_index, lexeme_count, token_count, start_offset,
                end_offset, tenant_id, embedding_model, tsv, embedding, chunk_hash, token_counter, chunk_text, section)
            select 1, id, 0, 1, 1, 0, 1, 't', 'a', to_tsvector('simple', long.text),
                array_fill(1::real, array[512])::halfvec, repeat('f', 64), 'x', left(long.text, 30000),
                left(long.text, 500)
            from rag_documents
            cross join (
                select string_agg(md5(number::text), ' ') as text from generate_series(1, 3000) as number
            ) as long
            """
        )
        connection.execute(
            "update rag_chunks set second_embedding = array_fill(1::real, array[3790 - 512])::halfvec,"
            " second_embedding_model = 'b'"
        )
        row = connection.execute("select vector_dims(second_embedding) from rag_chunks").fetchone()
    assert row == (3790 - 512,)


# --- large classes ---------------------------------------------------------------------------------


async def test_a_large_class_is_searched_through_its_own_index_of_the_new_model(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(60):
            await put(database, old.embedder, number)
        desk = Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)
        limits = maintain.Limits(threshold=20)

        def care() -> None:
            owner = deployment.url("rag_migrator")
            with maintain.alone(desk, settings, owner_url=owner, limits=limits) as turn:
                assert turn is not None
                turn.carry_out(maintain.plan(turn.survey(), limits).steps, lambda *_: None)

        care()
        ((access_id,),) = look(deployment, "select access_id from rag.rag_class_indexes where ready")
        await changed(deployment, old, new)
        definitions = dict(
            look(
                deployment,
                "select indexrelid::regclass::text, pg_get_indexdef(indexrelid) from pg_index"
                " where indrelid = 'rag.rag_chunks'::regclass",
            )
        )
        assert "hnsw (embedding " in definitions[f"rag.rag_chunks_vector_{access_id}"]
        assert "hnsw (second_embedding " in definitions[f"rag.rag_chunks_second_{access_id}"]
        usable = look(deployment, "select kind, is_usable from rag.class_indexes() order by 1")
        assert usable == [("vector", True), ("words", True)]
        async with RAGService(settings, database) as service:
            found = await service.search(RAGRequest(query="bear 3 sleeps"), principal=ALICE)
        assert (found.embedding_model, found.passages[0].recall) == (NEW, "approximate")
        # There is nothing left to do for maintenance, and nothing that it takes for bloated.
        with desk.session() as session:
            survey = maintain.survey(session, limits)
        assert maintain.plan(survey, limits).steps == ()
        assert maintain.bloated(survey) == []
    # Statistics come when the connections end.
    scans = "select idx_scan from pg_stat_user_indexes where indexrelname = %s"
    with deployment.cluster.superuser(deployment.name) as connection:
        for _ in range(50):
            row = connection.execute(scans, (f"rag_chunks_vector_{access_id}",)).fetchone()
            if row is not None and row[0]:
                break
            await asyncio.sleep(0.1)
    assert row is not None
    assert row[0] >= 1


# --- comparing -------------------------------------------------------------------------------------


async def test_a_comparison_counts_what_both_models_find_among_what_the_asker_may_read(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        for number in range(8):
            await put(database, old.embedder, number)
        for number in range(20, 40):
            await put(database, old.embedder, number, who=BOB)
        await added(deployment, old, new)
        with bench(deployment) as at:
            await models.fill(at, new.embedder)
        asked = ["bear 3 sleeps", "which den"]
        common: dict[str, Any] = {"database": database, "active": old, "second": new}
        overlaps = await compare(asked, principal=ALICE, top_k=100, **common)
        assert [(found.active_found, found.second_found, found.shared) for found in overlaps] == [(8, 8, 8)] * 2
        assert Agreement.of(overlaps) == Agreement(questions=2, mean=1.0, median=1.0, least=1.0)
        few = await compare(asked, principal=ALICE, top_k=3, **common)
        assert all(0 <= found.shared <= 3 and found.active_found == 3 for found in few)
        nobody = Principal(tenant_id="third", user_id=3)
        with pytest.raises(ModelChangeRefused, match="vector of both models"):
            await compare(asked, principal=nobody, top_k=3, **common)


# --- who may ---------------------------------------------------------------------------------------

OWNERS_ALONE: tuple[str, ...] = (
    "select * from rag.chunks_to_fill('', 0, 10)",
    "select rag.fill_vectors('x', '{}', '{}', '{}', '{}')",
    "select * from rag.count_fill()",
    "select rag.lacks_vectors()",
    "select * from rag.large_classes()",
    "select rag.set_models('x', 'y')",
    "select rag.pause_writes(600)",
    "select rag.add_model('x', 'y', 8)",
    "select rag.swap_models()",
    "select rag.finish_swap()",
    "select rag.drop_second_model()",
    "select rag.empty_second_column(8)",
    "select rag.grant_model_columns()",
    "update rag.rag_chunks set second_embedding = null",
    "select second_embedding from rag.rag_chunks",
    "select * from rag.rag_models",
    "set role rag_embedder",
)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator"])
async def test_a_fill_opens_no_text_to_any_login_of_the_service_or_of_operators(
    deployment: Deployment, settings: Settings, role: str
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await put(database, old.embedder, 2, who=BOB)
        await added(deployment, old, new)
        with deployment.connect(role) as connection:
            for statement in OWNERS_ALONE:
                with pytest.raises(psycopg.Error) as refused:
                    connection.execute(statement)
                assert refused.value.sqlstate == "42501", statement
        with deployment.transaction(ALICE) as connection:
            texts = connection.execute("select chunk_text from rag.my_chunks()").fetchall()
        assert len(texts) == 1


async def test_texts_are_given_out_for_filling_only_while_there_is_a_second_model(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await put(database, old.embedder, 2, who=BOB)

        def given() -> tuple[int, int]:
            with deployment.connect("rag_migrator") as connection:
                connection.execute("set role rag_owner")
                given = connection.execute("select count(*) from rag.chunks_to_fill('', 0, 10)").fetchone()
                connection.execute("set role rag_embedder")
                seen = connection.execute("select count(chunk_text) from rag.rag_chunks").fetchone()
                titles = connection.execute("select count(title) from rag.rag_documents").fetchone()
            assert given is not None
            assert seen is not None
            assert seen == titles
            return given[0], seen[0]

        assert given() == (0, 0)
        await added(deployment, old, new)
        assert given() == (2, 2)
        with bench(deployment) as at:
            await models.fill(at, new.embedder)
            # Those that are filled are not given out again, although they could be read.
            assert given() == (0, 2)
            await models.drop(at)
        assert given() == (0, 0)


async def test_whoever_fills_writes_no_column_that_is_searched(deployment: Deployment, settings: Settings) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await changed(deployment, old, new)
        with deployment.connect("rag_migrator") as connection:
            connection.execute("set role rag_embedder")
            for statement in (
                "update rag.rag_chunks set embedding = null",
                "update rag.rag_chunks set embedding_model = 'x'",
                "update rag.rag_chunks set chunk_text = 'x'",
                "select embedding from rag.rag_chunks",
                "select body from rag.rag_documents",
                "insert into rag.rag_chunks default values",
                "delete from rag.rag_chunks",
            ):
                with pytest.raises(psycopg.Error) as refused:
                    connection.execute(statement)
                assert refused.value.sqlstate == "42501", statement


async def test_vectors_of_another_model_than_the_second_are_not_taken(
    deployment: Deployment, settings: Settings
) -> None:
    async with world(deployment, settings) as (database, old, new):
        await put(database, old.embedder, 1)
        await added(deployment, old, new)
        with bench(deployment) as at:
            (row,) = at.session.rows("chunks_to_fill", {"tenant_id": "", "access_id": 0, "at_most": 5})
            vector = "[" + ",".join(["1"] * NEW_WIDTH) + "]"
            call = "select rag.fill_vectors(%s, %s, %s, %s, %s)"
            named = ([row["tenant_id"]], [row["access_id"]], [row["chunk_id"]], [vector])
            with pytest.raises(psycopg.Error) as refused:
                at.owner.execute(call, ("another", *named))
            assert refused.value.sqlstate == "55M01"
            with pytest.raises(psycopg.Error):
                at.owner.execute(call, (NEW, *named[:3], ["[" + ",".join(["0"] * NEW_WIDTH) + "]"]))
            with pytest.raises(psycopg.Error):
                at.owner.execute(call, (NEW, *named[:3], ["[1,2,3]"]))
            assert models_of(deployment) == [(OLD, WIDTH, None, None, 1)]
            assert at.owner.execute(call, (NEW, *named)).fetchone() == {"fill_vectors": 1}
