"""Answers with sentences of the sources, each cited; no model, no network, the same answer every time."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rag.confidence import MIN_STEM_LENGTH, key_terms, same_word
from rag.disarm import unlabelled
from rag.exchange import Passage
from rag.prompt import INSUFFICIENT_CONTEXT

MAX_SENTENCES = 3
MAX_SENTENCE_LENGTH = 600
MIN_SENTENCE_WORDS = 3
# A further sentence must carry at least this part of the best one's weight.
FOLLOW_UP_SHARE = 0.6
ENDINGS = (".", "!", "?", "。", "！", "？", "…")
# Text of a PDF is wrapped near its margin; half as wide as the widest line is not wrapped but ended.
SHORT_LINE = 0.5
# The search has ranked the passages already: the first counts fully, the fifth half.
RANK_DISCOUNT = 0.25

# After these a full stop ends no sentence, whatever follows; nor does it after a single letter or up to
# two digits: initials, "z. B.", the German "31. März".
ABBREVIATIONS = (
    "Dr",
    "Mr",
    "Mrs",
    "Ms",
    "Prof",
    "St",
    "vs",
    "Nr",
    "ca",
    "vgl",
    "bzw",
    "inkl",
    "стр",
    "рис",
    "ул",
    "см",
)

_FENCE = re.compile(r"^[ \t]*(```|~~~).*?(?:^[ \t]*\1[^\n]*$|\Z)", re.MULTILINE | re.DOTALL)
_FENCE_LINE = re.compile(r"^[ \t]*(?:```|~~~)[^\n]*$", re.MULTILINE)
# Numbers of one or two digits: a line of running text may begin with a year.
_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*+]|\d{1,2}[.)])\s)|\n(?=\s*#{1,6}\s)")
_SENTENCE = re.compile(
    r"(?:(?<=[.!?。！？])"
    + "".join(rf"(?<!\b{word}\.)" for word in (r"\w", r"\d\d", *ABBREVIATIONS))
    + r"|(?<=[.!?][\"'»”)]))\s+(?=[^\Wa-zß-öø-ÿа-яё])|(?<=[。！？])"
)
_HEADING = re.compile(r"^\s*#{1,6}\s")
_BULLET = re.compile(r"^\s*(?:[-*+>]|\d{1,2}[.)])\s+|\{\s*#[\w-]+\s*\}")
# Emphasis is a few words; the bound keeps asterisks without a partner cheap.
_EMPHASIS = re.compile(
    r"`[^`]*`|(?<![\w*])(?P<stars>\*{1,3})(?=[^\s*])(?P<starred>.{1,200}?)(?<=[^\s*])(?P=stars)(?![\w*])"
    r"|(?<!\w)(?P<lines>_{1,3})(?=[^\s_])(?P<lined>.{1,200}?)(?<=[^\s_])(?P=lines)(?!\w)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sentence:
    alias: str
    place: int
    text: str
    terms: frozenset[str]
    rank: int


def sentences(question: str, sources: Mapping[str, Passage]) -> list[str]:
    """One to three sentences of the sources that share most with the question, each with its alias.

    Best first. The refusal of the prompt alone when no sentence shares a word with the question.
    """
    languages = {passage.language for passage in sources.values()} | {"en"}
    wanted = key_terms(question, languages)
    candidates = list(_sentences(sources, languages))
    frequency = Counter(
        term for sentence in candidates for term in wanted if any(same_word(term, word) for word in sentence.terms)
    )
    weights = {term: math.log(1 + len(candidates) / frequency[term]) for term in wanted if frequency[term]}

    def found(sentence: _Sentence) -> set[str]:
        return {term for term in weights if any(same_word(term, word) for word in sentence.terms)}

    def weight(sentence: _Sentence) -> float:
        # Long sentences find more words; the root keeps them from winning by length alone.
        length = math.sqrt(max(len(sentence.terms), 8))
        discount = 1 + RANK_DISCOUNT * (sentence.rank - 1)
        return sum(weights[term] for term in found(sentence)) / length / discount

    ranked = sorted(candidates, key=lambda sentence: (-weight(sentence), sentence.rank, sentence.place))
    if not ranked or weight(ranked[0]) == 0:
        return [INSUFFICIENT_CONTEXT]
    chosen = [ranked[0]]
    for sentence in ranked[1:]:
        if len(chosen) == MAX_SENTENCES or weight(sentence) < FOLLOW_UP_SHARE * weight(ranked[0]):
            break
        # Half a line of a list says little behind somebody else's sentence.
        if sentence.text.rstrip("\"'»”)").endswith(ENDINGS) and all(sentence.text != other.text for other in chosen):
            chosen.append(sentence)
    return [f"{sentence.text} [{sentence.alias}]" for sentence in chosen]


def _sentences(sources: Mapping[str, Passage], languages: set[str | None]) -> Iterator[_Sentence]:
    for rank, (alias, passage) in enumerate(sources.items(), start=1):
        prose = _FENCE.sub("\n\n", passage.text)
        # A passage that is all code still has something to say.
        pieces = list(_split(prose)) or list(_split(_FENCE_LINE.sub("", passage.text)))
        for place, piece in enumerate(pieces):
            text = unlabelled(piece)
            yield _Sentence(alias=alias, place=place, text=text, terms=frozenset(key_terms(text, languages)), rank=rank)


def _split(text: str) -> Iterator[str]:
    for paragraph in _PARAGRAPH.split(text):
        lines = [_BULLET.sub("", line).strip() for line in paragraph.splitlines() if not _HEADING.match(line)]
        for block in _wrapped(lines):
            for sentence in _SENTENCE.split(_unmarked(block)):
                sentence = " ".join(sentence.split())
                if len(sentence.split()) >= MIN_SENTENCE_WORDS or len(sentence) > 3 * MIN_STEM_LENGTH:
                    yield sentence if len(sentence) <= MAX_SENTENCE_LENGTH else sentence[:MAX_SENTENCE_LENGTH] + "…"


def _wrapped(lines: list[str]) -> Iterator[str]:
    """Join the lines of running text; a short line before a capital is a heading or an item of its own."""
    widest = max(map(len, lines), default=0)
    block: list[str] = []
    for line in lines:
        if block and len(block[-1]) < SHORT_LINE * widest and line[:1].isupper():
            yield " ".join(block)
            block = []
        block.append(line)
    yield " ".join(block)


def _unmarked(text: str) -> str:
    """`text` without asterisks, underscores and backticks that are Markdown; names such as RAG_HOME stay whole."""

    def inside(match: re.Match[str]) -> str:
        return match["starred"] or match["lined"] or match[0]

    # Twice, for bold inside italics; code comes last, since nothing in it is markup.
    return _EMPHASIS.sub(inside, _EMPHASIS.sub(inside, text)).replace("`", "")
