"""How sure an answer is: 30 parts retrieval, 40 parts coverage, 30 parts grading (spec 001)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rag.exchange import ConfidenceScore, Passage
from rag.language import stop_words

RETRIEVAL_WEIGHT = 30
COVERAGE_WEIGHT = 40
LLM_WEIGHT = 30
# Percent: as probably answered as not.
EVEN = 50

# Spec 001, "extract_key_terms".
MIN_TERM_LENGTH = 3

# Words count as the same from five common letters on, when they differ by no more than three at the
# end: enough for plurals and case endings in the languages that have them.
MIN_STEM_LENGTH = 5
MAX_ENDING_LENGTH = 3

# Spec 001 counted [a-z0-9]+, under which no answer in another script covers anything.
_WORD = re.compile(r"\w+")
_SOURCE_MARK = re.compile(r"\[SourceId:[^\]]*\]")


def key_terms(text: str, languages: Iterable[str | None] = ("en",)) -> set[str]:
    """Words of 3 letters or more, lower-cased, without the stop words of these languages."""
    ignored = frozenset[str]().union(*(stop_words(language) for language in languages if language))
    words = _WORD.findall(_SOURCE_MARK.sub(" ", text).lower())
    return {word for word in words if len(word) >= MIN_TERM_LENGTH and word not in ignored}


def found_terms(wanted: set[str], words: set[str]) -> set[str]:
    """Those of the terms that are among some words, but for their endings."""
    found = wanted & words
    missing = {term for term in wanted - found if len(term) >= MIN_STEM_LENGTH}
    stems = {term[:MIN_STEM_LENGTH] for term in missing}
    near = [word for word in words if word[:MIN_STEM_LENGTH] in stems]
    return found | {term for term in missing if any(same_word(term, word) for word in near)}


def same_word(first: str, second: str) -> bool:
    """Whether two words differ in nothing or in their endings alone."""
    if first == second:
        return True
    common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        common += 1
    return common >= MIN_STEM_LENGTH and max(len(first), len(second)) - common <= MAX_ENDING_LENGTH


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What of a question is in some passages; the more of each, the likelier they answer it."""

    cosine: float
    """The best one; 0 where none was compared."""
    share: float
    """The best share of what BM25 could reach for this question: how much of its words, the rare ones above all."""
    found: int
    """The most of the question's key terms that one passage has."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Of a logistic regression on the signals; none is negative, so that more of a signal is never less sure."""

    cosine: float
    share: float
    found: float
    """Of the logarithm of 1 + the terms found."""
    bias: float

    def probability(self, signals: Signals) -> float:
        logit = (
            self.cosine * signals.cosine
            + self.share * signals.share
            + self.found * math.log1p(signals.found)
            + self.bias
        )
        # Beyond 30 there is no difference, and exp() would overflow at 710.
        return 1 / (1 + math.exp(-max(-30.0, min(30.0, logit))))


# Fitted by bench/confidence.py, which judges each half of the questions by constants of the other half
# (bench/results/confidence.md). English: SQuAD's questions against those about other articles; German and
# Russian: XQuAD's with half of the articles stored, so that the questions about the others have no answer. Answerable
# and other questions count the same: .5 is where a question is as probably the one as the other.
COSINES: Mapping[str, Mapping[str, Weights]] = {
    # It knows English; a Russian question has a cosine of .5 and more with any Russian text.
    "local/all-MiniLM-L6-v2": {
        "en": Weights(13.9, 15.4, 1.4, -11.8),
        "de": Weights(10.2, 22.3, 1.3, -9.4),
        "ru": Weights(2.8, 26.9, 3.8, -10.3),
    },
}
# Without a cosine, or with one of a model that was not measured.
WORDS: Mapping[str, Weights] = {
    "en": Weights(0.0, 20.6, 3.0, -9.6),
    "de": Weights(0.0, 27.4, 1.9, -6.7),
    "ru": Weights(0.0, 26.8, 3.9, -8.7),
}
# Of other languages: all three together.
OTHER_WORDS = Weights(0.0, 21.6, 2.9, -7.7)


def signals(question: str, passages: Sequence[Passage]) -> Signals:
    """The signals of passages in one language. Raises ValueError without a passage."""
    languages = {passage.language for passage in passages} | {"en"}
    wanted = key_terms(question, languages)
    return Signals(
        cosine=max(passage.cosine or 0.0 for passage in passages),
        share=max(passage.keyword_share for passage in passages),
        found=max(
            len(
                found_terms(
                    wanted, key_terms(f"{passage.document_name} {passage.section or ''} {passage.text}", languages)
                )
            )
            for passage in passages
        ),
    )


def answerable(question: str, passages: Sequence[Passage], *, embedding_model: str | None) -> float:
    """How probable it is that the passages answer the question, 0 to 1; 0 without one.

    That of the language whose passages answer best. It stands in for the grade of a model where no model grades.
    """
    groups: dict[tuple[str, bool], list[Passage]] = {}
    for passage in passages:
        groups.setdefault((passage.language or "", passage.cosine is not None), []).append(passage)
    measured = COSINES.get(embedding_model or "", {})
    return max(
        (
            ((measured.get(language) if compared else None) or WORDS.get(language, OTHER_WORDS)).probability(
                signals(question, group)
            )
            for (language, compared), group in groups.items()
        ),
        default=0.0,
    )


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


def suffices(score: ConfidenceScore, *, grounded: bool, graded: bool, threshold: int) -> bool:
    """Whether an answer stands for itself, or somebody should be asked instead.

    `threshold`: of the whole. An extract, which no model `graded`, covers all that it says by its nature: so its
    sources have to answer the question more probably than not as well, or as probably as a lower threshold says.
    """
    if not grounded or score.overall < threshold:
        return False
    return graded or score.llm_score >= min(EVEN, threshold)
