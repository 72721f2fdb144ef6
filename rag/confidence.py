"""How sure an answer is: 30 parts retrieval, 40 parts coverage, 30 parts grading (spec 001)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rag.exchange import ConfidenceScore, Passage
from rag.language import stop_words

RETRIEVAL_WEIGHT = 30
COVERAGE_WEIGHT = 40
LLM_WEIGHT = 30

# Spec 001, "extract_key_terms".
MIN_TERM_LENGTH = 3

# Spec 001 counted [a-z0-9]+, under which no answer in another script covers anything.
_WORD = re.compile(r"\w+")
_SOURCE_MARK = re.compile(r"\[SourceId:[^\]]*\]")


def key_terms(text: str, languages: Iterable[str | None] = ("en",)) -> set[str]:
    """Words of 3 letters or more, lower-cased, without the stop words of these languages."""
    ignored = frozenset[str]().union(*(stop_words(language) for language in languages if language))
    words = _WORD.findall(_SOURCE_MARK.sub(" ", text).lower())
    return {word for word in words if len(word) >= MIN_TERM_LENGTH and word not in ignored}


def coverage(answer: str, passages: Sequence[Passage]) -> float:
    """The fraction of the answer's key terms that occur in the passages, 0 to 1; 0 for an empty answer."""
    languages = {passage.language for passage in passages} | {"en"}
    terms = key_terms(answer, languages)
    if not terms:
        return 0.0
    context = " ".join(f"{passage.document_name} {passage.section or ''} {passage.text}" for passage in passages)
    return len(terms & key_terms(context, languages)) / len(terms)


def similarity(passages: Sequence[Passage]) -> float:
    """Mean cosine of the passages, 0 to 1; where none was compared, the mean share of the best possible BM25."""
    if not passages:
        return 0.0
    values = [passage.keyword_share if passage.cosine is None else passage.cosine for passage in passages]
    return min(1.0, max(0.0, sum(values) / len(values)))


def answerable(passages: Sequence[Passage]) -> float:
    """How much the best passage has to do with the question, 0 to 1: half its cosine, half its share of BM25.

    The signal that best told answerable questions from foreign ones in DESIGN.md, section 4. It stands
    in for the grade of a model where no model grades.
    """
    signals = [
        passage.keyword_share if passage.cosine is None else (passage.cosine + passage.keyword_share) / 2
        for passage in passages
    ]
    return min(1.0, max(0.0, max(signals, default=0.0)))


def score(answer: str, passages: Sequence[Passage], *, llm_score: int, grounded: bool) -> ConfidenceScore:
    """Confidence in an answer. Without passages it is 0; without a citation the grade does not count."""
    if not passages:
        return ConfidenceScore(overall=0, retrieval_score=0.0, coverage_score=0.0, llm_score=0)
    llm_score = min(100, max(0, llm_score))
    retrieval_score = similarity(passages)
    coverage_score = coverage(answer, passages)
    counted = llm_score if grounded else 0
    weighted = retrieval_score * RETRIEVAL_WEIGHT + coverage_score * COVERAGE_WEIGHT + counted / 100 * LLM_WEIGHT
    return ConfidenceScore(
        # Rounded first: 0.7 * 30 + 0.4 * 30 must not become 32.999….
        overall=min(100, max(0, int(round(weighted, 6)))),
        retrieval_score=retrieval_score,
        coverage_score=coverage_score,
        llm_score=llm_score,
    )
