"""Which language a text is written in, and which of its words carry no meaning."""

from __future__ import annotations

import functools
import re
from typing import Protocol, cast

from stop_words import LANGUAGE_MAPPING, get_stop_words

# Measured with py3langid 0.4 on 2,757 random windows of SQuAD, XQuAD (de, ru) and the FastAPI pages. At
# 40 characters, accepting everything is wrong in 5.2 % of cases; accepting from .7 on answers 73 % and is
# wrong in 2 of them (0.1 %); at 160 it answers 98 % with no error. At 20 characters it would have to stay
# silent on 60 %, so that shorter texts are not worth loading it for.
MIN_CHARACTERS = 40
MIN_PROBABILITY = 0.7
# Where a character stands for half a word, 14 are enough: of 700 such windows of Japanese, Korean and Thai
# manuals all were right, of Chinese ones 66 %, and the others silent.
CHARACTERS_AN_IDEOGRAPH_COUNTS = 3
# Detection costs 0.2 µs a byte; its answer is settled long before this (no error at 1,000 characters).
MAX_CHARACTERS = 2_000

# Spec 001, "Coverage Calculation".
_ENGLISH = """
    the a an is are was were be been being have has had do does did will would could should may might
    must shall can need dare to of in for on with at by from as into through during before after above
    below between under again further then once here there when where why how all each few more most
    other some such no nor not only own same so than too very just and but if or because until while
    this that these those i me my myself we our ours you your yours he him his she her hers it its they
    them
"""
STOPWORDS = frozenset(_ENGLISH.split())

# The detector says no (or nn), the lists say nb; both are Norwegian.
_LIST_OF = {"no": "nb", "nn": "nb"}
_ISO_639_1 = re.compile(r"[a-z]{2}")
# Thai, Lao, Myanmar, Khmer, kana, Han, Hangul.
_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3]")


class _Identifier(Protocol):
    def classify(self, text: str) -> tuple[str, float]: ...


@functools.cache
def _identifier() -> _Identifier | None:
    # Loading the model takes 1.3 s and numpy, so it waits for the first text.
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        return None
    return cast("_Identifier", LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True))


def is_loaded() -> bool:
    """Whether `detect` answers at once; the first text waits for its model."""
    return _identifier.cache_info().currsize > 0


def detect(text: str) -> str | None:
    """Return the ISO 639-1 code of the text's language, or None rather than a guess.

    None means: the extra `lang` is not installed, the text is shorter than `MIN_CHARACTERS`
    (one of a script without spaces counts `CHARACTERS_AN_IDEOGRAPH_COUNTS` times), the detector is less sure
    than `MIN_PROBABILITY`, or the language has no two-letter code. Only the first `MAX_CHARACTERS` are read.
    """
    sample = text.strip()[:MAX_CHARACTERS]
    if len(sample) < MIN_CHARACTERS and _weight(sample) < MIN_CHARACTERS:
        return None
    identifier = _identifier()
    if identifier is None:
        return None
    language, probability = identifier.classify(sample)
    if probability < MIN_PROBABILITY or not _ISO_639_1.fullmatch(language):
        return None
    return language


def _weight(text: str) -> int:
    return len(text) + (CHARACTERS_AN_IDEOGRAPH_COUNTS - 1) * len(_UNSPACED.findall(text))


@functools.cache
def stop_words(language: str | None) -> frozenset[str]:
    """Return the lower-case stop words of an ISO 639-1 language; none for an unknown one.

    English has the list of spec 001, since its coverage scores are defined by it.
    """
    if language == "en":
        return STOPWORDS
    code = _LIST_OF.get(language or "", language)
    if code not in LANGUAGE_MAPPING:
        return frozenset()
    # Some lists hold phrases, which no single word can match, and the Hebrew one its own quotation marks.
    words = (entry.strip("\"',#").lower() for entry in get_stop_words(code))
    return frozenset(word for word in words if word and not any(c.isspace() for c in word))
