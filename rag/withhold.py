"""Keeps what the system prompt says out of answers, whoever asks for it.

Withheld is a run of `RUN_WORDS` words of the prompt in its order, and a whole sentence of it from
`SENTENCE_WORDS` words on. Case, punctuation and emphasis do not count. What a source or the question says
as well is theirs and may be said; so may the sentence that a refusal consists of.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from rag.flow import GROWTH
from rag.prompt import INSUFFICIENT_CONTEXT

WITHHELD = "(withheld)"

# Runs of 7 are in honest answers: "the sources do not contain the answer". tests/rag/test_withhold.py
# counts how often one of 8 is in other people's text.
RUN_WORDS = 8
SENTENCE_WORDS = 5

# A letter of a script without spaces counts as half a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
# A mark of ours is between words, and stays whole.
_WORD_OR_MARK = re.compile(rf"\[SourceId: [0-9a-f:-]+\]|{_WORD.pattern}")
_LAST_WORD = re.compile(rf"[^\W_{_UNSPACED}]+")
_SENTENCE_END = re.compile(r"[.!?:](?=\s|$)|[。！？]|\n")

Phrase = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Secrets:
    """What of a prompt is withheld, and with which words that begins."""

    phrases: frozenset[Phrase]
    beginnings: frozenset[Phrase]
    lengths: tuple[int, ...]
    """Of the phrases, in words; the longest first."""


class Withhold:
    """A stage of `rag.flow`: it holds back what could become a phrase of the prompt."""

    def __init__(self, system: str, *, quotable: Collection[str] = ()) -> None:
        """`system` is the prompt, `quotable` are texts that may be repeated although they stand in it."""
        self._secrets = _secrets(system)
        self._theirs = quotable
        self._tail = ""
        self._again = 0
        self._words: list[str] = []
        """Those held back, as they are compared."""
        self._texts: list[str] = []
        """The same as they were written, each with what stands before it."""
        self._hit: list[bool] = []
        self._withheld = False
        """The last word that was decided is one that is not shown."""

    def feed(self, text: str) -> str:
        text = self._tail = self._tail + text
        if len(text) < self._again:
            return ""
        shown: list[str] = []
        at = 0
        for match in _WORD_OR_MARK.finditer(text):
            if match[0].startswith("["):
                continue
            # The last word may go on.
            if match.end() == len(text) and _LAST_WORD.fullmatch(match[0]):
                break
            self._take(_normal(match[0]), text[at : match.end()])
            shown.append(self._decide(self._begun()))
            at = match.end()
        self._tail = text[at:]
        # What is between words waits for the words before it, and is left out between two that are.
        if not self._words and not self._withheld and (at == len(text) or not _LAST_WORD.fullmatch(text[-1])):
            shown.append(self._tail)
            self._tail = ""
        self._again = len(self._tail) + len(self._tail) // GROWTH
        return "".join(shown)

    def finish(self) -> str:
        self._again = 0
        shown = [self.feed("")]
        last = next((match for match in _WORD_OR_MARK.finditer(self._tail) if not match[0].startswith("[")), None)
        if last is not None:
            self._take(_normal(last[0]), self._tail[: last.end()])
            self._tail = self._tail[last.end() :]
        shown.append(self._decide(0))
        shown.append(self._tail)
        self._tail = ""
        return "".join(shown)

    def _take(self, word: str, text: str) -> None:
        self._words.append(word)
        self._texts.append(text)
        self._hit.append(False)
        for length in self._secrets.lengths:
            phrase = tuple(self._words[-length:])
            if len(phrase) == length and phrase in self._secrets.phrases and not self._is_quotable(phrase):
                self._hit[-length:] = [True] * length
                break

    def _begun(self) -> int:
        """How many of the last words could be the beginning of a phrase."""
        longest = min(len(self._words), self._secrets.lengths[0] if self._secrets.lengths else 0)
        for length in range(longest, 0, -1):
            if tuple(self._words[-length:]) in self._secrets.beginnings:
                return length
        return 0

    def _decide(self, held: int) -> str:
        """Show, or leave out, all words but the last `held` ones."""
        decided = len(self._words) - held
        shown = []
        for text, hit in zip(self._texts[:decided], self._hit[:decided], strict=True):
            if not hit:
                shown.append(text)
            elif not self._withheld:
                shown.append(text[: text.rindex(_WORD.findall(text)[-1])] + WITHHELD)
            self._withheld = hit
        del self._words[:decided], self._texts[:decided], self._hit[:decided]
        return "".join(shown)

    def _is_quotable(self, phrase: Phrase) -> bool:
        return f" {' '.join(phrase)} " in self._quotable

    @cached_property
    def _quotable(self) -> str:
        return " . ".join(f" {' '.join(_words(text))} " for text in (INSUFFICIENT_CONTEXT, *self._theirs))


def withheld(text: str, system: str, *, quotable: Collection[str] = ()) -> str:
    """`text` without what is withheld."""
    stage = Withhold(system, quotable=quotable)
    return stage.feed(text) + stage.finish()


@lru_cache(maxsize=64)
def _secrets(system: str) -> _Secrets:
    phrases = set(_runs(_words(system)))
    for sentence in _SENTENCE_END.split(system):
        words = _words(sentence)
        if _weight(words) >= SENTENCE_WORDS:
            phrases.add(tuple(words))
    # Those with a run inside are found by it.
    phrases = {phrase for phrase in phrases if _weight(phrase[:-1]) < RUN_WORDS}
    return _Secrets(
        phrases=frozenset(phrases),
        beginnings=frozenset(phrase[:length] for phrase in phrases for length in range(1, len(phrase))),
        lengths=tuple(sorted({len(phrase) for phrase in phrases}, reverse=True)),
    )


def _runs(words: Sequence[str]) -> Iterator[Phrase]:
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            if _weight(words[start:end]) >= RUN_WORDS:
                yield tuple(words[start:end])
                break


def _weight(words: Sequence[str]) -> float:
    return sum(1.0 if _LAST_WORD.match(word) else 0.5 for word in words)


def _words(text: str) -> list[str]:
    return [_normal(word) for word in _WORD.findall(text)]


def _normal(word: str) -> str:
    return unicodedata.normalize("NFKC", word).casefold()
