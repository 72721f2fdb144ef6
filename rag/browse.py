"""What a principal sees of the index: page after page of documents, and where each of them came from."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from rag.database import Database
from rag.errors import InvalidInput
from rag.principal import Principal, check_name
from rag.store import SCOPES

MAX_PAGE = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which documents; None = all. `prefix` is of the source id. Raises InvalidInput for what no document has."""

    prefix: str | None = None
    source_type: str | None = None
    scope: str | None = None

    def __post_init__(self) -> None:
        if self.prefix is not None:
            check_name(self.prefix, field="source", max_length=512)
        if self.source_type is not None:
            check_name(self.source_type, field="type", max_length=64)
        if self.scope is not None and self.scope not in SCOPES:
            raise InvalidInput(f"scope must be one of {', '.join(SCOPES)}", field="scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some documents by source id, and where the next page begins; None = there is none."""

    rows: list[dict[str, Any]]
    cursor: str | None


async def browse(
    database: Database, principal: Principal, wanted: Wanted, *, limit: int = 50, cursor: str | None = None
) -> Page:
    """A page of the documents that the principal may see, without their text; at most `limit`, up to MAX_PAGE.

    What is written meanwhile is in a later page or in none, and no other document is left out or told twice.
    Raises InvalidInput for a cursor that no page gave.
    """
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(f"limit must be 1 to {MAX_PAGE}", field="limit")
    after_source, after_id = (None, None) if cursor is None else _opened(cursor)
    async with database.transaction(principal, read_only=True) as session:
        found = await session.rows(
            "list_documents",
            {
                "prefix": wanted.prefix,
                "source_type": wanted.source_type,
                "scope": wanted.scope,
                "after_source": after_source,
                "after_id": after_id,
                "at_most": limit + 1,
            },
        )
    rows = found[:limit]
    return Page(rows=rows, cursor=_cursor(rows[-1]) if len(found) > limit else None)


def _cursor(row: dict[str, Any]) -> str:
    # No secret: it holds what the row before it shows, and the page after it is read as whoever asks for it.
    return base64.urlsafe_b64encode(json.dumps([row["source_id"], str(row["id"])]).encode()).decode()


def _opened(cursor: str) -> tuple[str, UUID]:
    try:
        source_id, document_id = json.loads(base64.b64decode(cursor.encode(), altchars=b"-_", validate=True))
        return check_name(source_id, field="cursor", max_length=512), UUID(document_id)
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidInput) as error:
        raise InvalidInput("cursor must be what the page before gave", field="cursor") from error
