"""Reads the best candidates of the search once more, question and text together, and orders them by that.

A reranker that fails costs its order and nothing else: the answer keeps the one of the search, and says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from rag.admit import Breaker
from rag.chat import Refused, calling, chat_http, read
from rag.errors import LLMConnectionError, LLMError, LLMTimeoutError, RerankUnavailable
from rag.exchange import ConfidenceMetrics, Passage, SkipReason
from rag.settings import Settings

log = structlog.get_logger(__name__)

# Of the candidates that a caller's number of results stands for. A cross-encoder gains most from the first
# dozens (Nogueira and Cho 2019 took 1,000 for ten; from 50 on the gain is small), and costs by the piece.
CANDIDATES_PER_RESULT = 4
# One result is worth looking for as well.
LEAST_CANDIDATES = 20
# Whatever a reranker can take: 100 passages of 512 tokens are 200 KiB of a request.
MAX_RERANK_CANDIDATES = 100
# What the providers take at once: the default of TEI's --max-client-batch-size; what two cores read in about a
# second with a model of 22 million parameters.
TEI_CANDIDATES = 32
LOCAL_CANDIDATES = 32

NOT_RERANKED = "the reranker did not answer, so the sources stand in the order of the search"


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePool:
    """How many passages the search shall find for the reranker."""

    candidate_k: int
    truncated: bool
    """A limit made it smaller than what would have been read for so many results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranked:
    """The passages that were chosen, best first, those that were not, and how it went."""

    passages: list[Passage]
    dropped: list[Passage]
    metrics: ConfidenceMetrics
    degraded: list[str]


class Skipped(Exception):
    """A reranker gave no order that could be used."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Reranker(Protocol):
    """Something that reads a question and a text together."""

    model: str
    max_candidates: int
    """So many texts at once, at most."""

    async def score(self, question: str, texts: Sequence[str], *, deadline: float) -> Mapping[int, float]:
        """How well each text answers, by its index; larger is better, and some may be missing.

        `deadline` is a moment of the event loop's clock. Raises Skipped.
        """

    async def close(self) -> None: ...


def compute_candidate_k(effective_top_k: int, reranker_max_k: int | None) -> CandidatePool:
    """How many candidates `effective_top_k` results need, within what the reranker and a request can take.

    Never fewer than the results: what the reranker cannot take, the search's order fills.
    """
    wanted = max(LEAST_CANDIDATES, effective_top_k * CANDIDATES_PER_RESULT)
    limit = MAX_RERANK_CANDIDATES if reranker_max_k is None else min(reranker_max_k, MAX_RERANK_CANDIDATES)
    return CandidatePool(candidate_k=max(effective_top_k, min(wanted, limit)), truncated=wanted > limit)


def build_fallback_confidence(
    candidate_pool_size: int,
    returned_count: int,
    *,
    truncated: bool,
    skip_reason: SkipReason,
    model: str | None = None,
    rerank_ms: float = 0.0,
) -> ConfidenceMetrics:
    """The metrics of passages that stand in the order of the search."""
    return ConfidenceMetrics(
        candidate_pool_size=candidate_pool_size,
        returned_count=returned_count,
        truncated=truncated,
        reranked=False,
        reranked_count=0,
        model=model,
        top_score=None,
        mean_score=None,
        spread=None,
        skip_reason=skip_reason,
        rerank_ms=rerank_ms,
    )


async def rerank(
    reranker: Reranker,
    question: str,
    candidates: Sequence[Passage],
    *,
    top_k: int,
    budget_tokens: int,
    truncated: bool = False,
    deadline: float,
) -> Reranked:
    """Choose `top_k` of the candidates, which come in the order of the search, within `budget_tokens`.

    By score, descending; equal scores stand as the search had them. What has no score, because the reranker takes
    or returns fewer, comes after what has one. Raises nothing of the reranker's.
    """
    started = time.perf_counter()
    scores: Mapping[int, float] = {}
    skipped: SkipReason | None = None
    if candidates:
        texts = [_text(passage) for passage in candidates[: reranker.max_candidates]]
        try:
            scores = _checked(await reranker.score(question, texts, deadline=deadline), len(texts))
        except Skipped as failure:
            skipped = failure.reason
            log.warning("rerank_skipped", reason=skipped, candidates=len(texts))
    else:
        skipped = "no_candidates"
    scored = [dataclasses.replace(one, rerank_score=scores.get(place)) for place, one in enumerate(candidates)]
    # Python sorts stably.
    ordered = sorted(scored, key=lambda one: math.inf if one.rerank_score is None else -one.rerank_score)
    passages, dropped = _seat(ordered, top_k=top_k, budget_tokens=budget_tokens)
    rerank_ms = (time.perf_counter() - started) * 1000
    if skipped is None:
        metrics = _measure(
            passages, pool=len(candidates), truncated=truncated, model=reranker.model, rerank_ms=rerank_ms
        )
    else:
        metrics = build_fallback_confidence(
            len(candidates),
            len(passages),
            truncated=truncated,
            skip_reason=skipped,
            model=reranker.model,
            rerank_ms=rerank_ms,
        )
    degraded = [] if skipped in (None, "no_candidates") else [NOT_RERANKED]
    return Reranked(passages=passages, dropped=dropped, metrics=metrics, degraded=degraded)


def _text(passage: Passage) -> str:
    """What is read beside the question: where the text stands, and the text, as for its embedding."""
    return "\n".join(part for part in (passage.document_name, passage.section, passage.text) if part)


def _checked(scores: Mapping[int, float], count: int) -> Mapping[int, float]:
    if not scores or not all(0 <= index < count for index in scores) or not all(map(math.isfinite, scores.values())):
        raise Skipped("invalid_scores")
    return scores


def _seat(ordered: Sequence[Passage], *, top_k: int, budget_tokens: int) -> tuple[list[Passage], list[Passage]]:
    """The first `top_k`, as far as they fit, with new ranks and sums; and the others, with the reason.

    As the search does it: one that does not fit is passed over, and a smaller one after it may still fit.
    """
    passages: list[Passage] = []
    dropped: list[Passage] = []
    total = 0
    for place, passage in enumerate(ordered):
        if place >= top_k:
            dropped.append(dataclasses.replace(passage, rank=None, tokens_total=None, reason="beyond_top_k"))
        elif total + passage.token_count > budget_tokens:
            dropped.append(dataclasses.replace(passage, rank=None, tokens_total=None, reason="over_budget"))
        else:
            total += passage.token_count
            passages.append(dataclasses.replace(passage, rank=len(passages) + 1, tokens_total=total))
    return passages, dropped


def _measure(
    passages: Sequence[Passage], *, pool: int, truncated: bool, model: str, rerank_ms: float
) -> ConfidenceMetrics:
    scores = [passage.rerank_score for passage in passages if passage.rerank_score is not None]
    return ConfidenceMetrics(
        candidate_pool_size=pool,
        returned_count=len(passages),
        truncated=truncated,
        reranked=True,
        reranked_count=len(scores),
        model=model,
        top_score=max(scores, default=None),
        mean_score=math.fsum(scores) / len(scores) if scores else None,
        spread=max(scores) - min(scores) if scores else None,
        skip_reason=None,
        rerank_ms=rerank_ms,
    )


# --- the providers -------------------------------------------------------------------------------


def open_reranker(settings: Settings) -> Reranker | None:
    """The reranker that the settings name; a local model is loaded, nothing else is contacted.

    Raises RerankUnavailable when it is not installed, not there or not configured.
    """
    if settings.rag_rerank_provider == "local":
        return LocalReranker(settings)
    if settings.rag_rerank_provider == "http":
        return ServerReranker(settings)
    return None


class LocalReranker:
    """A cross-encoder in this process, by sentence-transformers; one question at a time."""

    def __init__(self, settings: Settings) -> None:
        self.model = settings.rag_rerank_model or DEFAULT_LOCAL_MODEL
        self.max_candidates = settings.rag_rerank_max_candidates or LOCAL_CANDIDATES
        self._timeout_s = settings.rag_rerank_timeout_seconds
        self._encoder = _load_cross_encoder(self.model)
        # torch takes all processors for one batch; two at once would only be slower.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="rerank")

    async def score(self, question: str, texts: Sequence[str], *, deadline: float) -> Mapping[int, float]:
        until = min(deadline, asyncio.get_running_loop().time() + self._timeout_s)
        # Given up while it waits for its turn, it never begins.
        running = asyncio.get_running_loop().run_in_executor(self._pool, self._read, question, list(texts))
        try:
            async with asyncio.timeout_at(until):
                scores = await running
        except TimeoutError as error:
            raise Skipped("timeout") from error
        except (RuntimeError, ValueError) as error:
            # torch's words for a lack of memory, and for a model that is no cross-encoder.
            log.warning("rerank_failed", cause=type(error).__name__)
            raise Skipped("unavailable") from error
        return dict(enumerate(scores))

    def _read(self, question: str, texts: Sequence[str]) -> list[float]:
        pairs = [(question, text) for text in texts]
        return [float(score) for score in self._encoder.predict(pairs, show_progress_bar=False)]

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


# 22 million parameters, trained on MS MARCO, English.
DEFAULT_LOCAL_MODEL = "cross-encoder/ms-marco-MiniLM-L6-v2"


def _load_cross_encoder(name: str) -> Any:
    try:
        from sentence_transformers import CrossEncoder
    except ImportError as error:
        raise RerankUnavailable(
            "RAG_RERANK_PROVIDER=local needs sentence-transformers: pip install 'palisade-rag[rerank]'"
        ) from error
    try:
        # One score a pair; code that a model brings along is never run.
        return CrossEncoder(name, num_labels=1, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise RerankUnavailable(
            f"RAG_RERANK_MODEL={name} is neither a folder with a cross-encoder nor one that its hub gave"
        ) from error


class ServerReranker:
    """A rerank endpoint: of text-embeddings-inference (`tei`), or of Cohere, Jina and others (`cohere`)."""

    def __init__(self, settings: Settings) -> None:
        if settings.rag_rerank_url is None:
            raise RerankUnavailable("RAG_RERANK_PROVIDER=http needs RAG_RERANK_URL, the address that is posted to")
        self._shape = settings.rag_rerank_shape
        if self._shape == "cohere" and settings.rag_rerank_model is None:
            raise RerankUnavailable("RAG_RERANK_SHAPE=cohere needs RAG_RERANK_MODEL")
        self.model = settings.rag_rerank_model or "tei"
        default = TEI_CANDIDATES if self._shape == "tei" else MAX_RERANK_CANDIDATES
        self.max_candidates = settings.rag_rerank_max_candidates or default
        self._url = settings.rag_rerank_url
        self._timeout_s = settings.rag_rerank_timeout_seconds
        try:
            self._http = chat_http(self._url, timeout_s=self._timeout_s)
        except LLMConnectionError as error:
            raise RerankUnavailable("RAG_RERANK_URL is not a URL") from error
        if settings.rag_rerank_api_key is not None:
            self._http.headers["Authorization"] = f"Bearer {settings.rag_rerank_api_key.get_secret_value()}"
        self._breaker = Breaker()

    async def score(self, question: str, texts: Sequence[str], *, deadline: float) -> Mapping[int, float]:
        try:
            with self._breaker.watching():
                body = await self._post(question, texts, deadline)
        except Refused as refused:
            log.warning("rerank_refused", status=refused.status)
            raise Skipped("refused") from refused
        except LLMTimeoutError as error:
            raise Skipped("timeout") from error
        except LLMError as error:
            raise Skipped("unavailable") from error
        return _scores_in(body, shape=self._shape)

    async def _post(self, question: str, texts: Sequence[str], deadline: float) -> bytes:
        asked: dict[str, object] = {"query": question}
        if self._shape == "tei":
            # A text that is longer than the model takes is read as far as it goes, not refused.
            asked |= {"texts": list(texts), "truncate": True}
        else:
            asked |= {"model": self.model, "documents": list(texts), "top_n": len(texts)}
        async with (
            calling(self._timeout_s, deadline=deadline) as call,
            self._http.stream("POST", self._url, json=asked) as response,
        ):
            call.answered = True
            return await read(response)

    async def close(self) -> None:
        await self._http.aclose()


def _scores_in(body: bytes, *, shape: str) -> dict[int, float]:
    """Scores by index. Raises Skipped for what is none: a text's index twice, no number, another shape."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Skipped("invalid_scores") from error
    if shape == "cohere":
        parsed = parsed.get("results") if isinstance(parsed, dict) else None
    if not isinstance(parsed, list):
        raise Skipped("invalid_scores")
    name = "score" if shape == "tei" else "relevance_score"
    scores: dict[int, float] = {}
    for entry in parsed:
        index = entry.get("index") if isinstance(entry, dict) else None
        score = entry.get(name) if isinstance(entry, dict) else None
        if type(index) is not int or index in scores or isinstance(score, bool) or not isinstance(score, int | float):
            raise Skipped("invalid_scores")
        try:
            scores[index] = float(score)
        except OverflowError as error:
            raise Skipped("invalid_scores") from error
    return scores
