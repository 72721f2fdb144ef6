"""Whether the sources of a stored message still say what they said (spec 004, recomputeStaleCitations)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from rag.cite import split_source_id
from rag.database import Database
from rag.errors import InvalidInput
from rag.principal import Principal

# A long conversation at five sources an answer.
MAX_CITATIONS = 500

State = Literal["current", "stale", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CitedSource:
    """A source as a message cites it."""

    source_id: str
    cited_at: datetime
    """When the answer was given; with a time zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CitationState:
    """What became of a cited source. Gone: deleted, or not the asker's to read, which look the same."""

    source_id: str
    state: State


async def recheck(database: Database, principal: Principal, cited: Sequence[CitedSource]) -> list[CitationState]:
    """The state of each source, in the order given: stale when the text of its document changed after `cited_at`.

    A change of title, tags or other metadata makes nothing stale. One statement. Raises InvalidInput.
    """
    if not 1 <= len(cited) <= MAX_CITATIONS:
        raise InvalidInput(f"citations must list 1 to {MAX_CITATIONS} sources", field="citations")
    for one in cited:
        if one.cited_at.tzinfo is None:
            raise InvalidInput("cited_at needs a time zone", field="citations.cited_at")
    places = [split_source_id(one.source_id, field="citations.source_id") for one in cited]
    # Each once, however often it is cited.
    asked = list(dict.fromkeys(places))
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows(
            "recheck_citations",
            {
                "document_ids": [document_id for document_id, _ in asked],
                "chunk_indexes": [chunk_index for _, chunk_index in asked],
            },
        )
    changed_at = {(row["document_id"], row["chunk_index"]): row["content_updated_at"] for row in rows}
    return [
        CitationState(source_id=one.source_id, state=_state(changed_at.get(place), one.cited_at))
        for one, place in zip(cited, places, strict=True)
    ]


def _state(changed_at: datetime | None, cited_at: datetime) -> State:
    if changed_at is None:
        return "gone"
    return "stale" if changed_at > cited_at else "current"
