"""A server that reranks: text-embeddings-inference's `POST /rerank`, and Cohere's and Jina's `POST /v1/rerank`.

The shapes follow TEI's OpenAPI description and the references of Cohere (v2) and Jina. By default a text scores by
how many words it shares with the question, so that a test can say what comes first.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import Exchange, LoopbackServer, Recorded, serving

# Of an answer that has the right shape around them.
SCORE_FAULTS = (
    "index_beyond",
    "index_negative",
    "index_twice",
    "index_missing",
    "index_text",
    "index_bool",
    "score_nan",
    "score_infinite",
    "score_beyond_float",
    "score_text",
    "score_null",
    "score_bool",
    "no_scores",
)
# Something else than an answer.
SHAPE_FAULTS = ("html", "no_json", "deep_json", "object_for_list", "number", "invalid_utf8")
REFUSALS = ("error", "too_large", "unauthorized", "rate_limit", "redirect")
SILENCES = ("hang", "slow_headers", "drip")
BREAKS = ("reset", "cut", "compressed", "endless")


def shared_words(question: str, text: str) -> float:
    """How many of the question's words the text has."""
    return float(len(set(re.findall(r"\w+", question.lower())) & set(re.findall(r"\w+", text.lower()))))


@dataclass
class FakeReranker:
    """`score(question, text)` judges; `returns` is how many results come back, all unless given."""

    score: Callable[[str, str], float] = shared_words
    returns: int | None = None
    max_batch: int = 32
    fault: str | None = None
    server: LoopbackServer = field(init=False)

    @property
    def tei_url(self) -> str:
        return f"{self.server.url}/rerank"

    @property
    def cohere_url(self) -> str:
        return f"{self.server.url}/v1/rerank"

    @property
    def requests(self) -> list[Recorded]:
        return self.server.requests

    def serve(self, exchange: Exchange) -> None:
        match exchange.command, exchange.path:
            case "POST", "/rerank":
                self._tei(exchange)
            case "POST", "/v1/rerank":
                self._cohere(exchange)
            case _:
                exchange.send(404, {"message": "not found"})

    def _tei(self, exchange: Exchange) -> None:
        body = exchange.body
        if len(body["texts"]) > self.max_batch:
            message = f"batch size {len(body['texts'])} > maximum allowed batch size {self.max_batch}"
            exchange.send(413, {"error": message, "error_type": "Validation"})
            return
        ranked = self._ranked(body["query"], body["texts"])
        self._answer(exchange, [{"index": index, "score": score} for index, score in ranked], "score")

    def _cohere(self, exchange: Exchange) -> None:
        body = exchange.body
        ranked = self._ranked(body["query"], body["documents"])[: body["top_n"]]
        results = [{"index": index, "relevance_score": score} for index, score in ranked]
        self._answer(exchange, results, "relevance_score", around=lambda listed: {"id": "7", "results": listed})

    def _ranked(self, question: str, texts: Sequence[str]) -> list[tuple[int, float]]:
        scored = [(index, self.score(question, text)) for index, text in enumerate(texts)]
        return sorted(scored, key=lambda one: -one[1])[: self.returns]

    def _answer(
        self,
        exchange: Exchange,
        results: list[dict[str, Any]],
        score: str,
        *,
        around: Callable[[list[Any]], object] = lambda listed: listed,
    ) -> None:
        match self.fault:
            case "hang":
                exchange.hang()
            case "slow_headers":
                exchange.begin_slowly()
            case "drip":
                exchange.begin_stream(media_type="application/json")
                exchange.drip(b" ")
            case "endless":
                exchange.begin_stream(media_type="application/json")
                while not exchange.server.stopping.is_set():
                    exchange.stream(b" " * 65536)
            case "reset":
                exchange.reset()
            case "cut":
                exchange.begin_stream(media_type="application/json")
                exchange.stream(b'[{"index": 0')
                exchange.cut()
            case "compressed":
                exchange.send(200, b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
            case "error":
                exchange.send(500, {"error": "backend failed", "error_type": "Backend"})
            case "too_large":
                exchange.send(413, {"error": "batch size 40 > maximum allowed batch size 32"})
            case "unauthorized":
                exchange.send(401, {"message": "invalid api token"})
            case "rate_limit":
                exchange.send(429, {"error": "Model is overloaded", "error_type": "Overloaded"})
            case "redirect":
                exchange.send(307, b"", headers={"Location": f"{exchange.server.url}/elsewhere"})
            case "html":
                exchange.send_html()
            case "no_json":
                exchange.send(200, b"[{'index': 0}]")
            case "deep_json":
                exchange.send(200, b"[" * 100_000)
            case "invalid_utf8":
                exchange.send(200, b'[{"index": 0, "score": "\xff"}]')
            case "object_for_list":
                exchange.send(200, {"results": {"0": 1.0}})
            case "number":
                exchange.send(200, 7)
            case None:
                exchange.send(200, around(results))
            case fault:
                exchange.send(200, around(_spoilt(results, score, fault)))


def _spoilt(results: list[dict[str, Any]], score: str, fault: str) -> list[Any]:
    """Damage the results in the way that the fault is called."""
    first, *others = results
    changes: dict[str, object] = {
        "index_beyond": {"index": len(results)},
        "index_negative": {"index": -1},
        "index_twice": {"index": others[0]["index"] if others else None},
        "index_text": {"index": "0"},
        "index_bool": {"index": True},
        "score_nan": {score: math.nan},
        "score_infinite": {score: math.inf},
        "score_beyond_float": {score: 10**400},
        "score_text": {score: "1.0"},
        "score_null": {score: None},
        "score_bool": {score: True},
    }
    match fault:
        case "no_scores":
            return []
        case "index_missing":
            return [{score: 1.0}, *others]
    change = changes[fault]
    assert isinstance(change, dict)
    return [first | change, *others]


@contextmanager
def fake_reranker(**options: Any) -> Iterator[FakeReranker]:
    """Run a FakeReranker until the block ends."""
    fake = FakeReranker(**options)
    with serving(fake.serve) as fake.server:
        yield fake
