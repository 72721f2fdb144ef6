"""Turns the aliases in a model's answer into SourceIds and citations; nothing else in it counts as one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from rag.disarm import edited, fold
from rag.errors import InvalidInput
from rag.exchange import SNIPPET_FULL_LENGTH, SNIPPET_LENGTH, Citation, Passage
from rag.flow import GROWTH, Flow, Line, by

# Spec 001's pattern took 36 dashes and digits of any script; this takes UUIDs and ASCII digits.
_SOURCE_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}:[0-9]{1,9}")
SOURCEID_PATTERN = re.compile(rf"\[SourceId:\s*({_SOURCE_ID.pattern})\]")
# The bounds are what a reader waits for at most who is shown the answer while it is written: the labels of
# a hundred sources in one bracket, and more room than anybody leaves in one.
_MARK = re.compile(r"\s?\[([^\[\]\n]{1,2000})\]")
_ALIAS = re.compile(r"\bS[0-9]{1,3}-[0-9a-f]{6}\b")
_SOURCE_ID_LIKE = re.compile(r"\[(?=\s{0,20}SourceId\b)", re.IGNORECASE)
_ID = "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}:[0-9]+"
# An id at the end of a bracket, or behind the word.
_ID_LIKE = re.compile(rf"\bSourceId[\s:]*({_ID})|\b({_ID})(?=\s*\])", re.IGNORECASE)
# One that ends in its line goes whole; of one that was cut off, only what is part of an id.
_OWN_SOURCE_ID = re.compile(
    rf"\s?{_SOURCE_ID_LIKE.pattern}\s{{0,20}}SourceId"
    r"(?:[^\[\]\n]{0,6000}\]|:?(?:\s{0,20}[0-9a-f-]{8,6000}(?::[0-9]{0,6000})?)?\]?)",
    re.IGNORECASE,
)
# What may become one of these, from a bracket to the end of what has arrived.
_BEGUN_MARK = re.compile(r"\[[^\[\]\n]{0,2000}")
_BEGUN_LABEL_PATTERN = r"\[\s{0,20}(?:" + "|".join("sourceid"[:length] for length in range(8, -1, -1)) + ")"
# The same in whatever letters, and an id.
_BEGUN_LIKENESS = re.compile(
    r"(?:(?:\[\s{0,20}|\b)(?:s|so|sou|sour|sourc|source|sourcei|sourceid[\s:]*(?:[0-9a-f-]{1,36}(?::[0-9]*)?)?)"
    r"|\[\s{0,20}|\b[0-9a-f]{1,8}(?:-[0-9a-f-]{0,27}(?::[0-9]*)?)?\s*)\Z",
    re.IGNORECASE,
)
_BEGUN_SOURCE_ID = re.compile(
    _BEGUN_LABEL_PATTERN
    + r"|\[\s{0,20}sourceid(?!\w)(?:[^\[\]\n]{0,6000}|:?\s{0,20}[0-9a-f-]{0,6000}(?::[0-9]{0,6000})?)",
    re.IGNORECASE,
)
# Stand for our own brackets until the others are judged; in a draft they mean nothing and are dropped.
_OPEN, _CLOSE = "\ue000", "\ue001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An answer whose aliases have become SourceIds, the passages it cites, and how many marks were refused."""

    text: str
    cited: tuple[Passage, ...]
    refused: int


class Marks:
    """A draft on its way to the reader: its aliases become SourceIds, and what else reads like one goes.

    What may be the beginning of a mark is held back until more has arrived.
    """

    def __init__(self, sources: Mapping[str, Passage], *, nonce: str | None = None) -> None:
        """`nonce` is this request's: where it stands outside of a mark, it is left out."""
        self._sources = sources
        self.refused = 0
        self._cited: dict[str, Passage] = {}
        # Twice, for what closes up around the first.
        secret = [
            Flow(re.compile(rf"(?:\bS[0-9]{{1,3}}-)?{one}"), by(""), _begun_nonce(one))
            for one in ([] if nonce is None else [nonce, nonce])
        ]
        self._line = Line(
            Flow(_OWN_SOURCE_ID, self._refuse, _begun(_BEGUN_SOURCE_ID)),
            Flow(_MARK, self._exchange, _begun(_BEGUN_MARK)),
            *secret,
            _Unmarked(),
        )

    @property
    def cited(self) -> tuple[Passage, ...]:
        """In the order of their first citation."""
        return tuple(self._cited.values())

    def feed(self, text: str) -> str:
        """Take the next piece, and return what can be shown by now."""
        return self._line.feed(text.replace(_OPEN, "").replace(_CLOSE, ""))

    def finish(self) -> str:
        """The rest."""
        return self._line.finish()

    def _refuse(self, match: re.Match[str]) -> str:
        self.refused += 1
        return ""

    def _exchange(self, match: re.Match[str]) -> str:
        aliases = dict.fromkeys(_ALIAS.findall(match.group(1)))
        if not aliases:
            return match.group(0)
        marks = []
        for alias in aliases:
            passage = self._sources.get(alias)
            if passage is None:
                self.refused += 1
                continue
            self._cited[passage.source_id] = passage
            marks.append(f"{_OPEN}{passage.source_id}{_CLOSE}")
        return (" " if match.group(0)[0].isspace() else "") + " ".join(marks) if marks else ""


def resolve(text: str, sources: Mapping[str, Passage], *, nonce: str | None = None) -> Resolved:
    """Replace each alias of this prompt by `[SourceId: …]` and drop every other mark that reads like one.

    Passages come in the order of their first citation.
    """
    marks = Marks(sources, nonce=nonce)
    shown = marks.feed(text) + marks.finish()
    return Resolved(text=shown.strip(), cited=marks.cited, refused=marks.refused)


def _begun(pattern: re.Pattern[str]) -> Callable[[str], int]:
    """Where the last bracket stands if what it begins is undecided, the space before it included; else the end."""

    def undecided(text: str) -> int:
        # An earlier bracket is decided by this one.
        at = text.rfind("[")
        if at < 0 or not pattern.fullmatch(text, at):
            at = len(text)
        return at - 1 if at and text[at - 1].isspace() else at

    return undecided


class _Unmarked:
    """Puts our own marks in their place, and takes from all other text what reads like one."""

    def __init__(self) -> None:
        self._rest = ""
        self._before = ""
        self._again = 0

    def feed(self, text: str) -> str:
        self._rest += text
        if len(self._rest) < self._again:
            return ""
        shown: list[str] = []
        while (at := self._rest.find(_OPEN)) >= 0:
            end = self._rest.index(_CLOSE, at)
            shown += self._take(at), f"[SourceId: {self._rest[1 : end - at]}]"
            self._rest = self._rest[end - at + 1 :]
            self._before = ""
        shown.append(self._take(self._undecided()))
        self._again = len(self._rest) + len(self._rest) // GROWTH
        return "".join(shown)

    def finish(self) -> str:
        return self._take(len(self._rest))

    def _undecided(self) -> int:
        folded = fold(self._rest)
        # No beginning is longer, but for spaces and digits without an end.
        tail = max(0, len(folded.rstrip().rstrip("0123456789")) - 200)
        begun = _BEGUN_LIKENESS.search(self._before + folded, len(self._before) + tail)
        if begun is None:
            return len(self._rest)
        start = begun.start() - len(self._before)
        # Not in the middle of what reads like a mark by now.
        for match in _ID_LIKE.finditer(self._before + folded):
            if match.start() < begun.start() < match.end():
                start = max(0, match.start() - len(self._before))
        if folded is self._rest:
            return start
        size = 0
        for place, character in enumerate(self._rest):
            size += len(fold(character))
            if size > start:
                return place
        return len(self._rest)

    def _take(self, end: int) -> str:
        text = self._rest[:end]
        shown = _unmarked(self._before + text)[len(self._before) :]
        if folded := fold(text):
            # In the place of the character before, for patterns that begin with a word.
            self._before = "_" if re.match(r"\w", folded[-1]) else " "
        self._rest = self._rest[end:]
        return shown


def _begun_nonce(nonce: str) -> Callable[[str], int]:
    begun = re.compile(rf"(?:\bS(?:[0-9]{{1,3}}-?)?)?(?:{'|'.join(nonce[:length] for length in range(5, 0, -1))})?\Z")

    def undecided(text: str) -> int:
        start = max(0, len(text) - 11)
        found = begun.search(text, start)
        return len(text) if found is None else found.start()

    return undecided


def split_source_id(source_id: str, *, field: str) -> tuple[UUID, int]:
    """Document and chunk of a SourceId. Raises InvalidInput for what is none."""
    if not _SOURCE_ID.fullmatch(source_id):
        raise InvalidInput("a source id is {document_id}:{chunk_index}", field=field)
    document_id, _, chunk_index = source_id.partition(":")
    return UUID(document_id), int(chunk_index)


def extract(text: str) -> list[str]:
    """The SourceIds in an answer, each once, in order; anything malformed is passed over."""
    return list(dict.fromkeys(SOURCEID_PATTERN.findall(text)))


def keep_readable(resolved: Resolved, readable: Mapping[tuple[UUID, int], datetime]) -> tuple[str, list[Citation]]:
    """The answer and its citations without those that the asker can no longer read.

    `readable` maps document and chunk to when the document's text last changed.
    """
    text = resolved.text
    citations = []
    for passage in resolved.cited:
        changed_at = readable.get((passage.document_id, passage.chunk_index))
        if changed_at is None:
            text = re.sub(rf"\s?\[SourceId: {re.escape(passage.source_id)}\]", "", text)
        else:
            citations.append(_citation(passage, stale=changed_at != passage.content_updated_at))
    return _only(text, [citation.source_id for citation in citations]).strip(), citations


def _only(text: str, source_ids: Collection[str]) -> str:
    """`text` with no other SourceIds than these: what is taken out may leave the two halves of another one.

    What reads like one in other letters is none either. Nothing is taken out here, so that no halves are left.
    """
    parts: list[str] = []
    start = 0
    for ours in SOURCEID_PATTERN.finditer(text):
        if ours[1] in source_ids:
            parts += (_unmarked(text[start : ours.start()]), ours[0])
            start = ours.end()
    return "".join(parts) + _unmarked(text[start:])


def _unmarked(text: str) -> str:
    folded = fold(text)
    edits = [
        *((match.start(), match.end(), "(") for match in _SOURCE_ID_LIKE.finditer(folded)),
        *((*match.span(match.lastindex or 0), "…") for match in _ID_LIKE.finditer(folded)),
    ]
    return edited(text, folded, edits)


def _citation(passage: Passage, *, stale: bool) -> Citation:
    relevance = passage.keyword_share if passage.cosine is None else passage.cosine
    return Citation(
        source_id=passage.source_id,
        document_id=str(passage.document_id),
        document_name=passage.document_name,
        chunk_index=passage.chunk_index,
        page_number=passage.page_number,
        section=passage.section,
        relevance_score=min(1.0, max(0.0, relevance)),
        snippet=_cut(passage.text, SNIPPET_LENGTH),
        snippet_full=passage.text[:SNIPPET_FULL_LENGTH],
        stale=stale,
    )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + "..."
