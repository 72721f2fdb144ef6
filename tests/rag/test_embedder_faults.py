"""Whatever is wrong with a provider's answer: nothing of it is stored, and the error says what kind (SECURITY.md, Y21).

Two providers' protocols, each fault as long as it lasts; then the provider is well, and the same documents go in.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from api.errors import status_of
from rag import embed
from rag.database import Database
from rag.embed import Embedder, open_embedder
from rag.errors import EmbeddingError, EmbeddingInvalid, EmbeddingTimeout, EmbeddingUnavailable, InsufficientQuota
from rag.ingest import Ingested, Source, ingest
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of
from tests.conftest import DIMENSIONS, SIGNER, Deployment
from tests.fakes import VECTOR_FAULTS, unit_vector
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai
from tests.rag.stored import half_documents, rows

MARA = Principal(tenant_id="acme", user_id=7)
AT_ONCE = 20
# For what ends by itself a machine may be as slow as it likes.
PATIENCE_S = 300.0
# For what ends with nothing else.
IMPATIENCE_S = 0.5

BROKEN = (*VECTOR_FAULTS, "html", "no_json")
MODES: dict[tuple[str, str], type[EmbeddingError]] = {
    **{("openai", fault): EmbeddingInvalid for fault in BROKEN},
    **{("openai", fault): EmbeddingInvalid for fault in ("duplicate_index", "no_index", "deep_json", "endless")},
    **{("openai", fault): EmbeddingUnavailable for fault in ("reset", "cut", "server_error", "rate_limit")},
    ("openai", "insufficient_quota"): InsufficientQuota,
    **{("openai", fault): EmbeddingTimeout for fault in ("hang", "drip")},
    **{("ollama", fault): EmbeddingInvalid for fault in BROKEN},
    **{("ollama", fault): EmbeddingUnavailable for fault in ("reset", "cut", "busy", "crash")},
    ("ollama", "slow"): EmbeddingTimeout,
}
STATUS = {EmbeddingInvalid: 502, EmbeddingUnavailable: 503, InsufficientQuota: 503, EmbeddingTimeout: 504}


@contextmanager
def provider(name: str) -> Iterator[tuple[FakeOpenAI | FakeOllama, Settings]]:
    """A fake server, and the settings that name it."""
    if name == "openai":
        with fake_openai() as openai:
            yield (
                openai,
                Settings(
                    _env_file=None,
                    rag_embedding_provider="openai",
                    rag_embedding_model="text-embedding-3-small",
                    openai_base_url=openai.base_url,
                    openai_api_key="sk-test",
                ),
            )
    else:
        with fake_ollama(embedding_models=("all-minilm:latest",), embedding_dimensions=384) as ollama:
            yield (
                ollama,
                Settings(
                    _env_file=None,
                    rag_embedding_provider="ollama",
                    rag_embedding_model="all-minilm",
                    ollama_base_url=ollama.base_url,
                ),
            )


# What is stored, and the text that each vector has to be of.
VECTORS = """
    select chunk.chunk_text, document.title, cast(chunk.embedding as text) as embedding
    from rag.rag_chunks as chunk
    join rag.rag_documents as document on document.id = chunk.document_id
"""


def test_there_are_thirty_modes() -> None:
    assert len(MODES) >= 30


@pytest.mark.parametrize("name", ["openai", "ollama"])
async def test_no_fault_of_a_provider_is_stored(
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
    name: str,
) -> None:
    monkeypatch.setattr(embed, "RETRY_DELAY_S", 0.001)
    times = scaled(test=2, ci=10, prove=100)
    url = deployment.url("postgres")
    modes = {fault: error for (provider_name, fault), error in MODES.items() if provider_name == name}
    answers: Counter[int] = Counter()
    with provider(name) as (fake, settings):
        patient = open_embedder(settings.model_copy(update={"rag_embedding_timeout_seconds": PATIENCE_S}))
        impatient = open_embedder(settings.model_copy(update={"rag_embedding_timeout_seconds": IMPATIENCE_S}))
        async with Database(
            deployment.url("rag_app"), signer=SIGNER, pool_size=4, pool_timeout_s=PATIENCE_S
        ) as database:

            async def put(source_id: str, embedder: Embedder) -> Ingested:
                parts = "".join(f"## {part}\n\nThe {part} of {source_id}.\n\n" for part in ("first", "second"))
                return await ingest(
                    # Two chunks, so that an order can be wrong.
                    Source(
                        name="guide.md",
                        source_id=source_id,
                        content=f"# Guide\n\n{parts}",
                        source_type="readme",
                        title=source_id,
                    ),
                    principal=MARA,
                    destination=destination_of(MARA, scope="user"),
                    database=database,
                    embedder=embedder,
                    max_bytes=10_000,
                )

            turn = asyncio.Semaphore(AT_ONCE)

            async def refused(source_id: str, expected: type[EmbeddingError]) -> None:
                async with turn:
                    with pytest.raises(EmbeddingError) as raised:
                        await put(source_id, impatient if expected is EmbeddingTimeout else patient)
                assert type(raised.value) is expected, (source_id, raised.value)
                status, _ = status_of(raised.value)
                assert status == STATUS[expected]
                answers[status] += 1

            async def accepted(source_id: str) -> None:
                async with turn:
                    assert (await put(source_id, patient)).status == "created"

            for fault, expected in modes.items():
                fake.fault = fault
                await asyncio.gather(*(refused(f"{fault} {number}", expected) for number in range(times)))
                assert rows(url, "select id from rag.rag_documents where title like %s", (f"{fault} %",)) == []
            assert rows(url, "select id from rag.rag_documents") == []

            fake.fault = None
            await asyncio.gather(*(accepted(f"{fault} 0") for fault in modes))
            if name == "openai":
                # Out of order and numbered truly is no fault.
                fake.fault = "permuted"
                await accepted("permuted 0")
        await patient.close()
        await impatient.close()
    stored = rows(url, VECTORS)
    assert len(stored) == 2 * (len(modes) + (name == "openai"))
    assert half_documents(url) == []
    width = DIMENSIONS if name == "openai" else 384
    sent = {text for request in fake.requests for text in _inputs(request.body)}
    for row in stored:
        (text,) = [text for text in sent if row["chunk_text"].split("\n")[-1] in text and row["title"] in text]
        wanted = unit_vector(text, width)
        found = [float(value) for value in row["embedding"].strip("[]").split(",")]
        assert sum(one * other for one, other in zip(wanted, found, strict=False)) > 0.999, row["title"]
    figure(
        f"{name}: {len(modes)} faults of a provider, {times} times each: no vector stored, "
        + ", ".join(f"{count:,} × {status}" for status, count in sorted(answers.items()))
    )


def _inputs(body: Any) -> list[str]:
    given = (body or {}).get("input", [])
    return [given] if isinstance(given, str) else given
