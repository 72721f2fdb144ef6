"""Which of the embedding models that a process is set up for the database is searched with.

There are two while the model is being changed: the settings name both, and `rag models switch` decides.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rag import embed
from rag.database import Database
from rag.embed import Embedder
from rag.errors import ModelNotActive
from rag.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """An embedding model, opened, and the settings as they are with it."""

    embedder: Embedder
    settings: Settings

    @property
    def id(self) -> str:
        return self.embedder.model_id


def open_models(settings: Settings, embedder: Embedder | None = None) -> tuple[Model, ...]:
    """The model of the settings, or the given one, and the one that is to come if they name one.

    Raises as `open_embedder`.
    """
    first = Model(embedder=embedder or embed.open_embedder(settings), settings=settings)
    coming = settings.next_model
    if coming is None:
        return (first,)
    return (first, Model(embedder=embed.open_embedder(coming), settings=coming))


async def find_active(models: Sequence[Model], database: Database) -> Model:
    """The one that is searched: the first when the database leaves it to the settings. Raises ModelNotActive."""
    async with database.proven() as (session, _):
        row = await session.row("active_model", {})
    assert row is not None
    active = row["model_id"]
    for model in models:
        if active in (None, model.id):
            return model
    raise ModelNotActive(
        f"the database is searched with {active}, and the settings name {' and '.join(model.id for model in models)}"
    )


async def close_models(models: Sequence[Model]) -> None:
    """Release their connections and threads."""
    for model in models:
        await model.embedder.close()


@asynccontextmanager
async def active_model(settings: Settings, database: Database) -> AsyncIterator[Model]:
    """The model that is searched, for as long as the block lasts. Raises ModelNotActive, and as `open_embedder`."""
    models = open_models(settings)
    try:
        yield await find_active(models, database)
    finally:
        await close_models(models)
