"""Answers with sentences of the sources, each cited; no model, no network, the same answer every time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rag.confidence import key_terms
from rag.exchange import Passage
from rag.prompt import INSUFFICIENT_CONTEXT, neutral

MAX_SENTENCES = 3
MAX_SENTENCE_LENGTH = 600
MIN_SENTENCE_WORDS = 3
# Words count as the same from five common letters on, when they differ by no more than three at the
# end: enough for plurals and case endings in the languages that have them.
MIN_STEM_LENGTH = 5
MAX_ENDING_LENGTH = 3
# A further sentence must carry at least this part of the best one's weight.
FOLLOW_UP_SHARE = 0.6
# The search has ranked the passages already: the first counts fully, the fifth half.
RANK_DISCOUNT = 0.25

_FENCE = re.compile(r"^\s*(```|~~~).*?^\s*\1[^\n]*$", re.MULTILINE | re.DOTALL)
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d+[.)])\s)|\n(?=#)")
_SENTENCE = re.compile(r"(?<=[.!?。！？])[\"'»”)]*\s+(?=[^\Wa-z])|(?<=[。！？])")
_HEADING = re.compile(r"^\s*#{1,6}\s")
_MARKUP = re.compile(r"^\s*(?:[-*+>]|\d+[.)])\s+|[*_`]{1,3}(?=\S)|(?<=\S)[*_`]{1,3}|\{\s*#[\w-]+\s*\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentence:
    alias: str
    place: int
    text: str
    terms: frozenset[str]
    rank: int


def answer(question: str, sources: Mapping[str, Passage]) -> str:
    """One to three sentences of the sources that share most with the question, each with its alias.

    Best first. The refusal of the prompt when no sentence shares a word with the question.
    """
    languages = {passage.language for passage in sources.values()} | {"en"}
    wanted = key_terms(question, languages) or key_terms(question, ())
    sentences = list(_sentences(sources, languages))
    frequency = Counter(
        term for sentence in sentences for term in wanted if any(_same(term, word) for word in sentence.terms)
    )
    weights = {term: math.log(1 + len(sentences) / frequency[term]) for term in wanted if frequency[term]}

    def found(sentence: _Sentence) -> set[str]:
        return {term for term in weights if any(_same(term, word) for word in sentence.terms)}

    def weight(sentence: _Sentence) -> float:
        # Long sentences find more words; the root keeps them from winning by length alone.
        length = math.sqrt(max(len(sentence.terms), 8))
        discount = 1 + RANK_DISCOUNT * (sentence.rank - 1)
        return sum(weights[term] for term in found(sentence)) / length / discount

    ranked = sorted(sentences, key=lambda sentence: (-weight(sentence), sentence.rank, sentence.place))
    if not ranked or weight(ranked[0]) == 0:
        return INSUFFICIENT_CONTEXT
    chosen = [ranked[0]]
    for sentence in ranked[1:]:
        if len(chosen) == MAX_SENTENCES or weight(sentence) < FOLLOW_UP_SHARE * weight(ranked[0]):
            break
        if all(sentence.text != other.text for other in chosen):
            chosen.append(sentence)
    return " ".join(f"{sentence.text} [{sentence.alias}]" for sentence in chosen)


def _sentences(sources: Mapping[str, Passage], languages: set[str | None]) -> Iterator[_Sentence]:
    for rank, (alias, passage) in enumerate(sources.items(), start=1):
        prose = _FENCE.sub("\n\n", passage.text)
        # A passage that is all code still has something to say.
        pieces = list(_split(prose)) or list(_split(passage.text))
        for place, piece in enumerate(pieces):
            text = neutral(piece)
            yield _Sentence(alias=alias, place=place, text=text, terms=frozenset(key_terms(text, languages)), rank=rank)


def _split(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH.split(text):
        if _HEADING.match(paragraph) and "\n" not in paragraph.strip():
            continue
        lines = [line for line in paragraph.splitlines() if not _HEADING.match(line)]
        joined = " ".join(_MARKUP.sub("", line).strip() for line in lines)
        for sentence in _SENTENCE.split(joined):
            sentence = " ".join(sentence.split())
            if len(sentence.split()) >= MIN_SENTENCE_WORDS or len(sentence) > 3 * MIN_STEM_LENGTH:
                yield (sentence if len(sentence) <= MAX_SENTENCE_LENGTH else sentence[:MAX_SENTENCE_LENGTH] + "…")


def _same(first: str, second: str) -> bool:
    if first == second:
        return True
    common = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        common += 1
    return common >= MIN_STEM_LENGTH and max(len(first), len(second)) - common <= MAX_ENDING_LENGTH
