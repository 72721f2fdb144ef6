"""Keeps what an asker made of an answer: opened a source, found it good or bad. The database checks whose it is."""

from __future__ import annotations

from uuid import UUID

from rag.cite import split_source_id
from rag.database import Database
from rag.errors import InvalidInput, QueryNotFound
from rag.principal import Principal

RATINGS = (-1, 0, 1)


async def keep_feedback(
    database: Database,
    principal: Principal,
    query_id: str,
    *,
    source_id: str | None,
    rating: int | None,
    clicked: bool,
) -> None:
    """Keep a rating or a click on a source of an answer, or on the answer itself where `source_id` is None.

    `rating`: 1 good, -1 bad, 0 neither.

    One for each user, question and source: the last rating holds, a click stays. Raises InvalidInput when
    nothing is said, and QueryNotFound for a question that is not the principal's own or did not return the source.
    """
    if rating is None and not clicked:
        raise InvalidInput("say a rating or a click", field="rating")
    if rating is not None and (isinstance(rating, bool) or rating not in RATINGS):
        raise InvalidInput("a rating is -1, 0 or 1", field="rating")
    try:
        asked = UUID(query_id)
    except ValueError as error:
        raise InvalidInput("query_id is the query_id of an answer", field="query_id") from error
    document_id, chunk_index = (None, None) if source_id is None else split_source_id(source_id, field="source_id")
    async with database.transaction(principal) as session:
        row = await session.row(
            "give_feedback",
            {
                "query_id": asked,
                "document_id": document_id,
                "chunk_index": chunk_index,
                "rating": rating,
                "clicked": clicked,
            },
        )
    if row is None or not row["kept"]:
        raise QueryNotFound
