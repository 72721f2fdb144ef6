"""Passages as the search would return them, for tests of what comes after it."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from rag.exchange import Passage

WRITTEN_AT = datetime(2026, 11, 2, 8, 30, tzinfo=UTC)


def document_id(number: int) -> UUID:
    """The id of the document with this number, of version 4 as the server makes them."""
    return UUID(f"{number:08x}-0000-4000-8000-000000000000")


def passage(text: str, *, number: int = 1, **changes: Any) -> Passage:
    """The passage of rank `number`, chunk 0 of the document with that number."""
    plain = Passage(
        rank=number,
        document_id=document_id(number),
        chunk_index=0,
        document_name=f"Document {number}",
        source_type="text",
        source_uri=None,
        section=None,
        page_number=None,
        language="en",
        scope="public",
        tags=("public",),
        verified=False,
        content_updated_at=WRITTEN_AT,
        text=text,
        score=0.1,
        keyword_rank=number,
        keyword_score=1.0,
        keyword_share=0.5,
        vector_rank=number,
        cosine=0.5,
        token_count=len(text.split()),
        tokens_total=None,
        reason="keyword_and_vector",
        duplicate_of=None,
        mode="hybrid",
        recall="exact",
    )
    return dataclasses.replace(plain, **changes)
