"""Ends logs by age, in batches that are each over in a moment: what people write meanwhile never waits for long.

As rag_operator, in all tenants. Questions go with what they got back and what was made of it. The record of for whom
services spoke has a time of its own, and so have messages of conversations, whose summaries stay; that of retractions
and erasures stays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from rag.errors import InvalidInput
from rag.operate import Desk
from rag.settings import Settings

Kind = Literal["questions", "assertions", "messages"]

# Rows of a transaction: of 40,000 questions with ten hits each, batches of 1,000 took 56 ms in the median, 80 at most.
BATCH = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """How long rows of a kind are kept."""

    kind: Kind
    older_than: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired:
    """How many rows of a kind were too old, and how many of them were removed."""

    kind: Kind
    older_than_days: int
    found: int
    removed: int


def terms(settings: Settings) -> list[Term]:
    """What the settings say of how long. Raises InvalidInput where they keep everything."""
    days: dict[Kind, int | None] = {
        "questions": settings.rag_log_retention_days,
        "assertions": settings.rag_audit_retention_days,
        "messages": settings.rag_message_retention_days,
    }
    found = [Term(kind=kind, older_than=timedelta(days=kept)) for kind, kept in days.items() if kept is not None]
    if not found:
        raise InvalidInput(
            "nothing has an end: set RAG_LOG_RETENTION_DAYS, RAG_AUDIT_RETENTION_DAYS or RAG_MESSAGE_RETENTION_DAYS",
            field="RAG_LOG_RETENTION_DAYS",
        )
    return found


def count(desk: Desk, term: Term) -> int:
    """How many rows are too old now."""
    with desk.session() as session:
        row = session.row("count_expired", {"kind": term.kind, "older_than": term.older_than})
    assert row is not None
    return int(row["rows_left"])


def expire(desk: Desk, term: Term, tell: Callable[[int], None], *, batch: int = BATCH) -> int:
    """Remove what is too old, each batch in a transaction of its own; how many rows.

    `tell` gets the number of each batch. Whatever stops it, the next run goes on. Raises the DatabaseError family.
    """
    removed = 0
    while True:
        with desk.session() as session:
            row = session.row("expire_batch", {"kind": term.kind, "older_than": term.older_than, "at_most": batch})
        assert row is not None
        done = int(row["rows_removed"])
        removed += done
        tell(done)
        # Another run that removed the same rows leaves a batch short as well, and goes on itself.
        if done < batch:
            return removed
