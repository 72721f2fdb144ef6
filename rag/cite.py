"""Turns the aliases in a model's answer into SourceIds and citations; nothing else in it counts as one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from rag.exchange import SNIPPET_FULL_LENGTH, SNIPPET_LENGTH, Citation, Passage

# Spec 001's pattern took 36 dashes and digits of any script; this takes UUIDs and ASCII digits.
SOURCEID_PATTERN = re.compile(
    r"\[SourceId:\s*([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}:[0-9]{1,9})\]"
)
_MARK = re.compile(r"\s?\[([^\[\]]+)\]")
_ALIAS = re.compile(r"\bS[0-9]{1,3}-[0-9a-f]{6}\b")
_SOURCE_ID_LIKE = re.compile(r"\[(?=\s*SourceId\b)", re.IGNORECASE)
# One that ends in its line goes whole; of one that was cut off, only what is part of an id.
_OWN_SOURCE_ID = re.compile(
    rf"\s?{_SOURCE_ID_LIKE.pattern}\s*SourceId(?:[^\[\]\n]*\]|:?(?:\s*[0-9a-f-]{{8,}}(?::[0-9]*)?)?\]?)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An answer whose aliases have become SourceIds, the passages it cites, and how many marks were refused."""

    text: str
    cited: tuple[Passage, ...]
    refused: int


def resolve(text: str, sources: Mapping[str, Passage]) -> Resolved:
    """Replace each alias of this prompt by `[SourceId: …]` and drop every other mark that reads like one.

    Passages come in the order of their first citation.
    """
    text, refused = _OWN_SOURCE_ID.subn("", text)
    cited: dict[str, Passage] = {}

    def exchange(match: re.Match[str]) -> str:
        nonlocal refused
        aliases = dict.fromkeys(_ALIAS.findall(match.group(1)))
        if not aliases:
            return match.group(0)
        marks = []
        for alias in aliases:
            passage = sources.get(alias)
            if passage is None:
                refused += 1
                continue
            cited[passage.source_id] = passage
            marks.append(f"[SourceId: {passage.source_id}]")
        return (" " if match.group(0)[0].isspace() else "") + " ".join(marks) if marks else ""

    replaced = _only(_MARK.sub(exchange, text), cited)
    return Resolved(text=replaced.strip(), cited=tuple(cited.values()), refused=refused)


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
    """`text` with no other SourceIds than these: what is taken out may leave the two halves of another one."""

    def check(match: re.Match[str]) -> str:
        ours = SOURCEID_PATTERN.match(text, match.start())
        return "[" if ours and ours[1] in source_ids else "("

    return _SOURCE_ID_LIKE.sub(check, text)


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
