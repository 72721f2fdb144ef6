"""Reranking: how many candidates, in which order they come out, and what happens when the reranker does not work."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from rag.answer import RAGService
from rag.database import Database
from rag.embed import Embedder
from rag.errors import RerankUnavailable
from rag.exchange import SKIP_REASONS, Passage, RAGRequest
from rag.principal import Principal
from rag.rerank import (
    MAX_RERANK_CANDIDATES,
    NOT_RERANKED,
    CandidatePool,
    Reranked,
    Skipped,
    build_fallback_confidence,
    compute_candidate_k,
    open_reranker,
    rerank,
)
from rag.settings import Settings
from tests.conftest import unit_vector
from tests.fakes import refusing_url
from tests.fakes.rerank import (
    BREAKS,
    REFUSALS,
    SCORE_FAULTS,
    SHAPE_FAULTS,
    SILENCES,
    FakeReranker,
    fake_reranker,
)

ANNA = Principal(tenant_id="acme", user_id=1)
QUESTION = "When do the nightly backups run?"


def passage(number: int, text: str = "A text.", *, tokens: int = 10, section: str | None = None) -> Passage:
    """The candidate at place `number` (from 1) of the search."""
    return Passage(
        rank=number,
        document_id=UUID(int=number),
        chunk_index=0,
        document_name=f"Document {number}",
        source_type="text",
        source_uri=None,
        section=section,
        page_number=None,
        language="en",
        scope="user",
        tags=("public",),
        verified=False,
        content_updated_at=datetime(2026, 11, 1, tzinfo=UTC),
        text=text,
        score=1 / number,
        keyword_rank=number,
        keyword_score=1.0,
        keyword_share=0.5,
        vector_rank=number,
        cosine=0.5,
        token_count=tokens,
        tokens_total=None,
        reason="keyword_and_vector",
        duplicate_of=None,
        mode="hybrid",
        recall="exact",
    )


class Fixed:
    """A reranker that gives these scores, whatever it is asked."""

    model = "fixed"

    def __init__(self, scores: Mapping[int, float], *, max_candidates: int = 100) -> None:
        self.scores = scores
        self.max_candidates = max_candidates
        self.read: list[Sequence[str]] = []

    async def score(self, question: str, texts: Sequence[str], *, deadline: float) -> Mapping[int, float]:
        self.read.append(texts)
        return self.scores

    async def close(self) -> None:
        return None


async def reranked(
    scores: Mapping[int, float],
    candidates: Sequence[Passage],
    *,
    top_k: int = 5,
    budget_tokens: int = 1000,
    **given: Any,
) -> Reranked:
    return await rerank(
        Fixed(scores, **given), QUESTION, candidates, top_k=top_k, budget_tokens=budget_tokens, deadline=_soon()
    )


def _soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


def places(passages: Sequence[Passage]) -> list[int]:
    """Which places the passages had in the search."""
    return [one.document_id.int for one in passages]


# --- how many candidates ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top_k", "reranker_max_k", "candidate_k", "truncated"),
    [
        (5, None, 20, False),
        (1, None, 20, False),  # for one result more than four are read
        (10, None, 40, False),
        (10, 32, 32, True),
        (25, None, 100, False),
        (26, None, 100, True),  # the ceiling of a request
        (5, 1000, 20, False),
        (50, 1000, 100, True),
        (10, 4, 10, True),  # never fewer than were asked for
        (100, 32, 100, True),
    ],
)
def test_the_pool_has_four_candidates_a_result_within_its_limits(
    top_k: int, reranker_max_k: int | None, candidate_k: int, truncated: bool
):
    assert compute_candidate_k(top_k, reranker_max_k) == CandidatePool(candidate_k=candidate_k, truncated=truncated)


def test_no_pool_is_larger_than_the_ceiling_or_smaller_than_what_was_asked_for():
    for top_k in range(1, 101):
        for limit in (None, *range(1, 200, 7)):
            assert top_k <= compute_candidate_k(top_k, limit).candidate_k <= MAX_RERANK_CANDIDATES


# --- the order -------------------------------------------------------------------------------------


async def test_the_best_score_comes_first_and_ranks_are_counted_anew():
    found = await reranked({0: 0.1, 1: 0.9, 2: 0.5}, [passage(1), passage(2), passage(3)])
    assert places(found.passages) == [2, 3, 1]
    assert [one.rank for one in found.passages] == [1, 2, 3]
    assert [one.rerank_score for one in found.passages] == [0.9, 0.5, 0.1]
    assert (found.dropped, found.degraded) == ([], [])


async def test_equal_scores_stand_as_the_search_had_them():
    found = await reranked(dict.fromkeys(range(9), 0.5), [passage(number) for number in range(1, 10)], top_k=9)
    assert places(found.passages) == list(range(1, 10))


async def test_what_was_not_scored_fills_up_in_the_order_of_the_search():
    found = await reranked({3: 0.2, 1: -7.5}, [passage(number) for number in range(1, 6)], top_k=4)
    # Also after a score that is negative.
    assert places(found.passages) == [4, 2, 1, 3]
    assert (found.metrics.returned_count, found.metrics.reranked_count) == (4, 2)
    assert places(found.dropped) == [5]
    assert [(one.rank, one.reason) for one in found.dropped] == [(None, "beyond_top_k")]


async def test_the_reranker_reads_no_more_than_it_can_take():
    reranker = Fixed({1: 1.0}, max_candidates=2)
    found = await rerank(
        reranker, QUESTION, [passage(number) for number in range(1, 5)], top_k=3, budget_tokens=100, deadline=_soon()
    )
    assert [len(texts) for texts in reranker.read] == [2]
    assert places(found.passages) == [2, 1, 3]


async def test_the_reranker_reads_where_a_text_stands_and_the_text():
    reranker = Fixed({0: 1.0})
    candidate = passage(1, "They run at night.", section="Operations")
    await rerank(reranker, QUESTION, [candidate], top_k=1, budget_tokens=100, deadline=_soon())
    assert reranker.read == [["Document 1\nOperations\nThey run at night."]]


async def test_the_token_budget_is_for_what_the_reranker_chose():
    candidates = [passage(1, tokens=80), passage(2, tokens=30), passage(3, tokens=60), passage(4, tokens=10)]
    found = await reranked({0: 0.1, 1: 0.2, 2: 0.9, 3: 0.3}, candidates, budget_tokens=100)
    # 60, 70, 100; the first of the search no longer fits.
    assert places(found.passages) == [3, 4, 2]
    assert [one.tokens_total for one in found.passages] == [60, 70, 100]
    assert [(one.document_id.int, one.reason) for one in found.dropped] == [(1, "over_budget")]


# --- the metrics -----------------------------------------------------------------------------------


async def test_the_metrics_are_of_the_scores_that_were_returned():
    found = await reranked({0: 0.25, 1: 1.0, 2: 0.75}, [passage(1), passage(2), passage(3)], top_k=2)
    metrics = found.metrics
    assert (metrics.candidate_pool_size, metrics.returned_count, metrics.reranked_count) == (3, 2, 2)
    assert (metrics.top_score, metrics.mean_score, metrics.spread) == (1.0, 0.875, 0.25)
    assert (metrics.reranked, metrics.model, metrics.skip_reason) == (True, "fixed", None)
    assert metrics.rerank_ms > 0


def test_the_metrics_of_an_order_of_the_search_have_no_scores():
    metrics = build_fallback_confidence(7, 5, truncated=True, skip_reason="timeout")
    assert (metrics.candidate_pool_size, metrics.returned_count, metrics.truncated) == (7, 5, True)
    assert (metrics.reranked, metrics.skip_reason) == (False, "timeout")
    assert (metrics.top_score, metrics.mean_score, metrics.spread) == (None, None, None)


async def test_without_candidates_nobody_is_asked():
    reranker = Fixed({})
    found = await rerank(reranker, QUESTION, [], top_k=5, budget_tokens=100, deadline=_soon())
    assert (found.passages, found.metrics.skip_reason, found.degraded) == ([], "no_candidates", [])
    assert reranker.read == []


@pytest.mark.parametrize("scores", [{}, {2: 1.0}, {-1: 1.0}, {0: float("nan")}, {0: 0.5, 1: float("inf")}], ids=repr)
async def test_scores_that_cannot_be_leave_the_order_of_the_search(scores: dict[int, float]):
    found = await reranked(scores, [passage(1), passage(2)])
    assert places(found.passages) == [1, 2]
    assert [one.rerank_score for one in found.passages] == [None, None]
    assert (found.metrics.skip_reason, found.degraded) == ("invalid_scores", [NOT_RERANKED])


# --- a server --------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[FakeReranker]:
    with fake_reranker() as fake:
        yield fake


def by(server: FakeReranker, shape: str = "tei", **changes: Any) -> Settings:
    fields: dict[str, Any] = {
        "rag_rerank_provider": "http",
        "rag_rerank_shape": shape,
        "rag_rerank_url": server.tei_url if shape == "tei" else server.cohere_url,
        "rag_rerank_model": "rerank-test",
        "rag_rerank_timeout_seconds": 1.0,
        "rag_llm_provider": "extractive",
    }
    return Settings(_env_file=None, **(fields | changes))


async def asked(settings: Settings, candidates: Sequence[Passage], *, deadline_s: float = 5.0) -> Reranked:
    reranker = open_reranker(settings)
    assert reranker is not None
    try:
        return await rerank(reranker, QUESTION, candidates, top_k=3, budget_tokens=1000, deadline=_soon(deadline_s))
    finally:
        await reranker.close()


TEXTS = [passage(1, "Lunch."), passage(2, "The backups are kept."), passage(3, "The nightly backups run at two.")]


@pytest.mark.parametrize("shape", ["tei", "cohere"])
async def test_a_server_orders_the_passages(server: FakeReranker, shape: str):
    found = await asked(by(server, shape), TEXTS)
    assert places(found.passages) == [3, 2, 1]
    assert [one.rerank_score for one in found.passages] == [4.0, 2.0, 0.0]
    assert (found.metrics.model, found.metrics.reranked, found.degraded) == ("rerank-test", True, [])


async def test_the_body_is_the_one_of_text_embeddings_inference(server: FakeReranker):
    await asked(by(server), TEXTS[:1])
    (request,) = server.requests
    assert request.path == "/rerank"
    assert request.body == {"query": QUESTION, "texts": ["Document 1\nLunch."], "truncate": True}
    assert "authorization" not in request.headers


async def test_the_body_is_the_one_of_cohere_and_jina(server: FakeReranker):
    await asked(by(server, "cohere", rag_rerank_api_key="secret"), TEXTS[:1])
    (request,) = server.requests
    assert request.path == "/v1/rerank"
    assert request.body == {
        "model": "rerank-test",
        "query": QUESTION,
        "documents": ["Document 1\nLunch."],
        "top_n": 1,
    }
    assert request.headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("shape", ["tei", "cohere"])
async def test_a_server_that_returns_fewer_is_filled_up_from_the_search(shape: str):
    with fake_reranker(returns=1) as server:
        found = await asked(by(server, shape), TEXTS)
    assert places(found.passages) == [3, 1, 2]
    assert (found.metrics.returned_count, found.metrics.reranked_count) == (3, 1)


async def test_no_more_is_sent_than_the_server_takes_at_once(server: FakeReranker):
    found = await asked(by(server), [passage(number, "x") for number in range(1, 41)])
    assert [len(request.body["texts"]) for request in server.requests] == [32]
    assert found.metrics.reranked


@pytest.mark.parametrize("shape", ["tei", "cohere"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        *((fault, "invalid_scores") for fault in (*SCORE_FAULTS, *SHAPE_FAULTS)),
        *((fault, "refused") for fault in REFUSALS),
        *((fault, "timeout") for fault in SILENCES),
        *((fault, "unavailable") for fault in BREAKS),
    ],
)
async def test_a_reranker_that_fails_costs_its_order_and_nothing_else(shape: str, fault: str, reason: str):
    with fake_reranker(fault=fault) as server:
        started = time.perf_counter()
        found = await asked(by(server, shape), TEXTS)
        assert time.perf_counter() - started < 2.5
    assert places(found.passages) == [1, 2, 3]
    assert [one.tokens_total for one in found.passages] == [10, 20, 30]
    assert (found.metrics.skip_reason, found.metrics.reranked) == (reason, False)
    assert found.degraded == [NOT_RERANKED]


async def test_a_server_that_is_not_there_is_unavailable(server: FakeReranker):
    found = await asked(by(server, rag_rerank_url=refusing_url()), TEXTS)
    assert (places(found.passages), found.metrics.skip_reason) == ([1, 2, 3], "unavailable")


async def test_a_server_that_hangs_is_left_at_the_deadline_of_the_answer():
    with fake_reranker(fault="hang") as server:
        started = time.perf_counter()
        found = await asked(by(server, rag_rerank_timeout_seconds=20.0), TEXTS, deadline_s=0.3)
        assert time.perf_counter() - started < 2
        assert found.metrics.skip_reason == "timeout"


async def test_a_server_that_hangs_is_not_waited_for_each_time():
    with fake_reranker(fault="hang") as server:
        reranker = open_reranker(by(server, rag_rerank_timeout_seconds=0.1))
        assert reranker is not None
        for _ in range(8):
            with pytest.raises(Skipped):
                await reranker.score(QUESTION, ["A text."], deadline=_soon())
        await reranker.close()
        assert len(server.requests) == 5


def test_every_reason_is_one_of_the_list():
    assert set(SKIP_REASONS) == {"disabled", "no_candidates", "timeout", "unavailable", "refused", "invalid_scores"}


# --- what is refused at the start ------------------------------------------------------------------


def test_none_is_opened_unless_one_is_configured():
    assert open_reranker(Settings(_env_file=None)) is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rag_rerank_provider": "http"}, "RAG_RERANK_URL"),
        ({"rag_rerank_provider": "http", "rag_rerank_url": "http://[::"}, "RAG_RERANK_URL"),
        (
            {"rag_rerank_provider": "http", "rag_rerank_shape": "cohere", "rag_rerank_url": "http://localhost/rerank"},
            "RAG_RERANK_MODEL",
        ),
    ],
)
def test_a_reranker_that_cannot_be_asked_is_refused_at_the_start(changes: dict[str, Any], named: str):
    with pytest.raises(RerankUnavailable, match=named):
        open_reranker(Settings(_env_file=None, **changes))


def test_without_the_extra_a_local_reranker_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, embedder: Embedder
):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    configured = settings.model_copy(update={"rag_rerank_provider": "local"})
    with pytest.raises(RerankUnavailable, match=r"palisade-rag\[rerank\]"):
        RAGService(configured, Database("postgresql://nobody@127.0.0.1:1/none", signer=None), embedder)


# --- on a database ---------------------------------------------------------------------------------

Store = Callable[..., UUID]


def three_documents(store: Store) -> None:
    """By the vectors, which all point the same way a little less, the search has A, B, C."""
    for place, (title, text) in enumerate(
        (("A", "Backups, backups, backups."), ("B", "Backups are kept."), ("C", "The nightly backups run at two.")), 1
    ):
        store(ANNA, text, title=title, embedding=unit_vector(1.0, 0.2 * place))


Opened = Callable[[Settings], RAGService]


@pytest.fixture
async def service(database: Database, embedder: Embedder) -> AsyncIterator[Opened]:
    """A service on this test's database; what it shares with other tests stays open."""
    services: list[RAGService] = []

    def opens(settings: Settings) -> RAGService:
        services.append(RAGService(settings, database, embedder))
        return services[-1]

    yield opens
    for opened in services:
        if opened.reranker is not None:
            await opened.reranker.close()


def names(passages: Sequence[Passage]) -> list[str]:
    return [one.document_name for one in passages]


KEYWORDS: dict[str, Any] = {"mode": "keyword"}


async def test_an_answer_is_written_from_what_the_reranker_chose(store: Store, service: Opened, server: FakeReranker):
    three_documents(store)
    server.score = lambda question, text: float(text.startswith("B"))
    opened = service(by(server))
    found = await opened.search(RAGRequest(query="backups", max_context_chunks=2, **KEYWORDS), principal=ANNA)
    assert names(found.passages)[0] == "B"
    assert len(found.passages) == 2
    assert (found.metrics.candidate_pool_size, found.metrics.returned_count) == (3, 2)
    # One more is asked for than is returned: the reranker had all three to choose from.
    assert len(server.requests[0].body["texts"]) == 3
    response = await opened.generate(RAGRequest(query="backups", max_context_chunks=1, **KEYWORDS), principal=ANNA)
    assert names(response.passages) == ["B"]
    assert response.confidence_metrics.reranked
    assert response.confidence_metrics.top_score == 1.0
    assert [one.document_name for one in response.citations] == ["B"]


async def test_what_the_reranker_did_not_choose_is_listed_among_the_dropped(
    store: Store, service: Opened, server: FakeReranker
):
    three_documents(store)
    opened = service(by(server))
    request = RAGRequest(query="backups", max_context_chunks=1, **KEYWORDS)
    assert (await opened.search(request, principal=ANNA)).dropped == []
    found = await opened.search(request, principal=ANNA, include_dropped=True)
    assert {(one.rank, one.reason) for one in found.dropped} == {(None, "beyond_top_k")}
    assert len(found.dropped) == 2


async def test_an_answer_without_its_reranker_says_so(store: Store, service: Opened, server: FakeReranker):
    three_documents(store)
    server.fault = "error"
    plain = service(Settings(_env_file=None, rag_llm_provider="extractive"))
    request = RAGRequest(query="backups run", max_context_chunks=2, **KEYWORDS)
    response = await service(by(server)).generate(request, principal=ANNA)
    expected = await plain.generate(request, principal=ANNA)
    assert names(response.passages) == names(expected.passages)
    assert response.degraded == [NOT_RERANKED]
    assert response.confidence_metrics.skip_reason == "refused"
    assert expected.degraded == []
    assert expected.confidence_metrics.skip_reason == "disabled"
    assert expected.confidence_metrics.returned_count == 2


async def test_the_metrics_are_there_when_nothing_was_found(service: Opened, server: FakeReranker):
    response = await service(by(server)).generate(RAGRequest(query="backups"), principal=ANNA)
    metrics = response.confidence_metrics
    assert (metrics.candidate_pool_size, metrics.returned_count, metrics.skip_reason) == (0, 0, "no_candidates")
    assert server.requests == []


async def test_the_reranker_is_given_nothing_that_the_asker_may_not_read(
    store: Store, service: Opened, server: FakeReranker
):
    store(Principal(tenant_id="acme", user_id=2), "The backups of somebody else.", title="Foreign")
    three_documents(store)
    await service(by(server)).search(RAGRequest(query="backups", **KEYWORDS), principal=ANNA)
    assert "somebody else" not in json.dumps([request.body for request in server.requests])


# --- a cross-encoder -------------------------------------------------------------------------------

needs_cross_encoder = pytest.mark.skipif(
    importlib.util.find_spec("sentence_transformers") is None,
    reason="no cross-encoder: the extra `rerank` is not installed",
)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "backups", "lunch", "run", "the", "document", "1", "2", "3"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder with one layer, random weights, and a vocabulary of some words."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-cross-encoder")
    (folder / "vocab.txt").write_text("\n".join(WORDS), encoding="utf-8")
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64, num_labels=1,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(vocab_file=str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


@needs_cross_encoder
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
async def test_a_cross_encoder_in_a_folder_gives_each_pair_its_own_score(tiny_model: Path):
    from sentence_transformers import CrossEncoder

    settings = Settings(_env_file=None, rag_rerank_provider="local", rag_rerank_model=str(tiny_model))
    candidates = [passage(1, "lunch"), passage(2, "the backups run"), passage(3, "backups " * 200)]
    expected = CrossEncoder(str(tiny_model), num_labels=1).predict(
        [(QUESTION, f"Document {one.document_id.int}\n{one.text}") for one in candidates]
    )
    found = await asked(settings, candidates)
    by_place = {one.document_id.int - 1: one.rerank_score for one in found.passages}
    assert by_place == pytest.approx(dict(enumerate(map(float, expected))), abs=1e-5)
    assert [one.rerank_score for one in found.passages] == sorted(by_place.values(), reverse=True)
    assert len(set(by_place.values())) == 3
    assert found.metrics.model == str(tiny_model)


@needs_cross_encoder
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
async def test_the_event_loop_goes_on_while_a_cross_encoder_reads(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    reranker = open_reranker(
        Settings(
            _env_file=None,
            rag_rerank_provider="local",
            rag_rerank_model=str(tiny_model),
            rag_rerank_timeout_seconds=0.2,
        )
    )
    assert reranker is not None
    monkeypatch.setattr(reranker, "_read", lambda question, texts: time.sleep(1) or [])
    started = time.perf_counter()
    with pytest.raises(Skipped, match="timeout"):
        await reranker.score(QUESTION, ["A text."], deadline=_soon())
    assert time.perf_counter() - started < 0.9
    await reranker.close()


@needs_cross_encoder
def test_a_cross_encoder_that_is_not_there_is_refused_at_the_start(tmp_path: Path):
    settings = Settings(_env_file=None, rag_rerank_provider="local", rag_rerank_model=str(tmp_path))
    with pytest.raises(RerankUnavailable, match="neither a folder"):
        open_reranker(settings)
