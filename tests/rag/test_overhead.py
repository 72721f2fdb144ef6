"""What the service itself costs, beside the statement that searches."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from rag.answer import RAGService
from rag.chat import Sink
from rag.database import Database, Session
from rag.embed import Embedder
from rag.exchange import RAGRequest
from rag.generate import Draft, ExtractiveGenerator
from rag.principal import Principal
from rag.prompt import Prompt
from rag.settings import Settings
from tests.conftest import Deployment
from tests.rag.large_classes import grow

CHUNKS = 2000
MAX_RATIO = 2.0
MAX_ROUNDS = 4
ANNA = Principal(tenant_id="acme", user_id=1)


class Timed(ExtractiveGenerator):
    """The sources' own sentences, and how long they took: that is the model's time."""

    seconds = 0.0

    async def write(
        self, prompt: Prompt, *, model: str, sink: Sink | None = None, deadline: float | None = None
    ) -> Draft:
        started = time.perf_counter()
        try:
            return await super().write(prompt, model=model, sink=sink, deadline=deadline)
        finally:
            self.seconds = time.perf_counter() - started


async def test_the_service_takes_at_most_twice_the_time_of_its_statement(
    deployment: Deployment,
    database: Database,
    embedder: Embedder,
    monkeypatch: Any,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    grow(deployment, 1, CHUNKS)
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("update rag.rag_chunks set embedding_model = %s", (embedder.model_id,))
        connection.execute("analyze")
    settings = Settings(_env_file=None, rag_llm_provider="extractive")
    generator = Timed(settings)
    service = RAGService(settings, database, embedder, generator)
    (vector,) = await embedder.embed(["palisade number"], purpose="query")

    asked: list[tuple[str, Mapping[str, Any]]] = []
    rows = Session.rows

    async def recording(self: Session, name: str, values: Mapping[str, Any] | None = None) -> Any:
        if name == "search":
            asked.append((name, values or {}))
        return await rows(self, name, values)

    def request(number: int) -> RAGRequest:
        return RAGRequest(
            query=f"Which is palisade number {number} of group{number % 7}?",
            embedding=vector,
            min_similarity=-1.0,
            embedding_model=embedder.model_id,
        )

    with monkeypatch.context() as patched:
        # The very statement that the service sends.
        patched.setattr(Session, "rows", recording)
        for number in range(3):
            assert (await service.generate(request(number), principal=ANNA)).passages
    bare: list[float] = []
    whole: list[float] = []
    name, values = asked[0]
    ratio = math.inf
    # By turns. What else the machine does falls on single ones, and a few more outvote it.
    for _ in range(MAX_ROUNDS):
        for number in range(scaled(test=30, ci=100, prove=500)):
            async with database.transaction(ANNA, read_only=True) as session:
                started = time.perf_counter()
                await session.rows(name, {**values, "question": request(number).query})
                bare.append(time.perf_counter() - started)
            started = time.perf_counter()
            await service.generate(request(number), principal=ANNA)
            whole.append(time.perf_counter() - started - generator.seconds)
        ratio = statistics.median(whole) / statistics.median(bare)
        if ratio <= MAX_RATIO:
            break
    figure(
        f"{CHUNKS:,} visible chunks: the service {statistics.median(whole) * 1000:.1f} ms, its statement"
        f" {statistics.median(bare) * 1000:.1f} ms, {ratio:.2f}× p50"
    )
    assert ratio <= MAX_RATIO
