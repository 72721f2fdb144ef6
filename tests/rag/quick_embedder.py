"""An embedder that costs nothing, for tests in which meaning plays no part; something may happen while it embeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from rag.embed import Purpose
from tests.conftest import DIMENSIONS


class QuickEmbedder:
    """One vector for every text; counts words; remembers what it was given."""

    model_id = "test-model"
    max_input_tokens = 256
    min_similarity = -1.0
    token_counter = "words"

    def __init__(self, meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
        self.texts: list[str] = []
        self.meanwhile = meanwhile

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.texts += texts
        if self.meanwhile is not None:
            await self.meanwhile()
        if progress is not None:
            progress(len(texts))
        return [[1.0] + [0.0] * (DIMENSIONS - 1) for _ in texts]

    async def close(self) -> None:
        """There is nothing to close."""
