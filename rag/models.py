"""A change of the embedding model while the service goes on: `rag models`.

A second column of vectors is added, filled in the background, compared with the first, and changes places with it in
one short transaction; the same again is the way back, until the old vectors are dropped. Whatever stops a step, the
next run finds what is there and goes on.

All of it is the owner's, whom rag_migrator alone becomes: it builds indexes, changes columns, and reads the texts of
all tenants to embed them, which no login of the service or of operators may.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import psycopg
from psycopg import Connection
from psycopg.rows import DictRow

from rag import embedded
from rag.active_model import Model
from rag.embed import Embedder
from rag.errors import (
    EmbeddingTimeout,
    EmbeddingUnavailable,
    InsufficientQuota,
    InvalidInput,
    ModelChangeRefused,
)
from rag.maintain import GRAPH_BYTES, LEAST_MEMORY, MOST_MEMORY, OWNER_URL
from rag.operate import Session, connected
from rag.resources import query
from rag.settings import Settings

# Chunks between two transactions of the fill; as many as a request to OpenAI takes of us.
BATCH_CHUNKS = 256
# With a rate limit, as much as may be read in so many seconds is one batch, so that a limit a minute is kept within it.
PACED_S = 5.0
# A provider that does not answer is asked again after these; the embedder itself has tried three times by then.
PATIENCE_S = (5.0, 15.0, 60.0, 300.0)
# How long the switch waits for running statements, while all that come after it wait behind it.
LOCK_TIMEOUT_MS = 2_000
LOCK_ATTEMPTS = 20
# Between two attempts those who waited get their turn.
LOCK_PAUSE_S = 0.5
# Writers are refused for as long as this at most, in which the last chunks are filled and the models change places.
PAUSE_S = 60
SWITCH_ATTEMPTS = 10

Tell = Callable[[int, int, str], None]
"""Called with the number of chunks that are filled, of how many, and what is being done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One of the two columns."""

    place: Literal["active", "second"]
    model_id: str
    is_former: bool
    """Of the second: whether it was active before, and is kept for a way back."""
    dimensions: int
    changed_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What there is; without any place every service is taken at its word."""

    places: tuple[Place, ...]
    chunks: int
    filled: int
    """Chunks that have a vector of the second model."""
    missing_indexes: int
    """Of the second model; they are built when it is filled."""

    @property
    def active(self) -> Place | None:
        return next((place for place in self.places if place.place == "active"), None)

    @property
    def second(self) -> Place | None:
        return next((place for place in self.places if place.place == "second"), None)

    @property
    def is_ready(self) -> bool:
        """Whether the models could change places now."""
        return self.second is not None and self.filled == self.chunks and not self.missing_indexes


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What a fill did. `recomposed`: chunks whose title and headings had to be put in front of the text anew,
    otherwise than they were embedded first, such as those that were cut for a model of a shorter input."""

    chunks: int
    tokens: int
    recomposed: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Pace:
    """A rate limit. None = none."""

    chunks_per_minute: int | None = None
    tokens_per_minute: int | None = None
    _free_at: float = 0.0

    @property
    def batch_chunks(self) -> int:
        if self.chunks_per_minute is None:
            return BATCH_CHUNKS
        return max(1, min(BATCH_CHUNKS, int(self.chunks_per_minute * PACED_S / 60)))

    @property
    def batch_tokens(self) -> float:
        return float("inf") if self.tokens_per_minute is None else self.tokens_per_minute * PACED_S / 60

    async def take(self, *, chunks: int, tokens: int) -> None:
        """Wait until so much may be sent, and count it as sent."""
        now = time.monotonic()
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
        needed = max(
            0.0 if self.chunks_per_minute is None else chunks * 60 / self.chunks_per_minute,
            0.0 if self.tokens_per_minute is None else tokens * 60 / self.tokens_per_minute,
        )
        self._free_at = max(self._free_at, now) + needed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The turn of one who changes models: the owner's connection, each statement a transaction of its own."""

    owner: Connection[DictRow]

    @property
    def session(self) -> Session:
        return Session(self.owner)

    def state(self) -> State:
        with self.owner.transaction():
            places = tuple(Place(**row) for row in self.session.rows("list_models", {}))
            count = self.session.row("count_fill", {})
            missing = [] if len(places) < 2 else self.session.rows("second_indexes", {})
        assert count is not None
        return State(
            places=places,
            chunks=count["chunks"],
            filled=count["filled"],
            missing_indexes=sum(row["build_statement"] is not None for row in missing),
        )


def owner_url(settings: Settings) -> str:
    """From where models are changed: as rag_migrator. Raises InvalidInput when the settings do not say."""
    if settings.rag_migration_database_url is not None:
        return settings.rag_migration_database_url.get_secret_value()
    if settings.rag_database_url is not None:
        raise InvalidInput(
            f"{OWNER_URL} must be set: only the owner of the tables changes the model, and reads what it embeds",
            field=OWNER_URL,
        )
    return embedded.start(settings.rag_home).url("rag_migrator")


@contextmanager
def bench(url: str) -> Iterator[Bench]:
    """The turn of this run. Raises ModelChangeRefused while another one is at work, and the DatabaseError family."""
    with connected(url, OWNER_URL, autocommit=True) as owner:
        session = Session(owner)
        try:
            session.run("prepare_building", {"memory_mb": LEAST_MEMORY, "workers": 2})
        except psycopg.errors.InsufficientPrivilege as error:
            raise InvalidInput(
                f"the login of {OWNER_URL} may not become rag_owner, to whom the tables belong", field=OWNER_URL
            ) from error
        row = session.row("lock_models", {})
        assert row is not None
        if not row["locked"]:
            raise ModelChangeRefused("another `rag models` is at work")
        yield Bench(owner=owner)


async def add(at: Bench, *, active: Model, coming: Model) -> None:
    """Add a second model beside the active one. Nothing is filled yet, and no search looks at it.

    Raises ModelChangeRefused when there is a second one, or both are too wide for a row.
    """
    declared = at.state().active
    if declared is not None and declared.model_id not in (active.id, coming.id):
        raise ModelChangeRefused(f"the active model is {declared.model_id}, and the settings name {active.id}")
    parameters = {
        "active": active.id,
        "coming": coming.id,
        "dimensions": coming.settings.rag_embedding_dimensions,
    }
    await _locking(at, query("add_model"), parameters)
    _settle(at)


async def fill(
    at: Bench,
    embedder: Embedder,
    *,
    pace: Pace | None = None,
    patience_s: Sequence[float] = PATIENCE_S,
    tell: Tell | None = None,
) -> Filled:
    """Give every chunk that lacks one a vector of the second model, then build the indexes.

    Small transactions, none of them open while the model is asked; run it again after whatever stopped it. Raises
    ModelChangeRefused when there is no second model, or it is another one; InsufficientQuota, and other errors of
    the EmbeddingError family when they last: what was filled until then stays.
    """
    pace = pace or Pace()
    state = at.state()
    if state.second is None:
        raise ModelChangeRefused("there is no second model: `rag models add` adds it")
    if state.second.model_id != embedder.model_id:
        raise ModelChangeRefused(
            f"the second model is {state.second.model_id}, and the settings name {embedder.model_id}"
        )
    _settle(at)
    started = time.monotonic()
    # First the index in which the chunks that are left are found.
    _build(at, only_contents=True)
    total, done = state.chunks, state.filled

    def told(count: int) -> None:
        nonlocal total, done
        done += count
        total = max(total, done)
        if tell is not None:
            tell(done, total, "filling")

    chunks, tokens, recomposed = await _fill_rest(at, embedder, pace, patience_s, told)
    _build(at, only_contents=False, dimensions=state.second.dimensions, chunks=total, tell=tell)
    return Filled(chunks=chunks, tokens=tokens, recomposed=recomposed, seconds=time.monotonic() - started)


async def _fill_rest(
    at: Bench, embedder: Embedder, pace: Pace, patience_s: Sequence[float], told: Callable[[int], None]
) -> tuple[int, int, int]:
    """Fill until a whole round over the classes finds nothing: chunks, tokens, and how many were put together anew."""
    chunks = tokens = recomposed = 0
    where: dict[str, Any] = {"tenant_id": "", "access_id": 0}
    came_round = False
    while True:
        rows = at.session.rows("chunks_to_fill", where | {"at_most": pace.batch_chunks})
        if not rows:
            # From the front again: chunks were written meanwhile in classes that had been filled.
            if came_round or where["tenant_id"] == "":
                break
            where, came_round = {"tenant_id": "", "access_id": 0}, True
            continue
        came_round = False
        texts, weight, anew = _texts(rows, embedder, most=pace.batch_tokens)
        rows = rows[: len(texts)]
        where = {"tenant_id": rows[-1]["tenant_id"], "access_id": rows[-1]["access_id"]}
        await pace.take(chunks=len(texts), tokens=weight)
        vectors = await _patiently(embedder, texts, patience_s)
        written = _alone(
            at,
            query("fill_vectors"),
            {
                "model_id": embedder.model_id,
                "tenant_ids": [row["tenant_id"] for row in rows],
                "access_ids": [row["access_id"] for row in rows],
                "chunk_ids": [row["chunk_id"] for row in rows],
                "embeddings": [_notation(vector) for vector in vectors],
            },
        )
        assert written is not None
        chunks += written["filled"]
        tokens += weight
        recomposed += anew
        told(written["filled"])
    return chunks, tokens, recomposed


def _notation(vector: Sequence[float]) -> str:
    """A vector as text that gives the very halves that an ingest stores: it sends floats of 32 bits."""
    return "[" + ",".join(f"{value:.9g}" for value in array("f", vector)) + "]"


async def _patiently(embedder: Embedder, texts: Sequence[str], patience_s: Sequence[float]) -> list[list[float]]:
    """Embed; a provider that does not answer is asked again, one without quota is not."""
    for wait_s in patience_s:
        try:
            return await embedder.embed(texts, purpose="document")
        except InsufficientQuota:
            raise
        except (EmbeddingUnavailable, EmbeddingTimeout):
            await asyncio.sleep(wait_s)
    return await embedder.embed(texts, purpose="document")


def _texts(rows: Sequence[dict[str, Any]], embedder: Embedder, *, most: float) -> tuple[list[str], int, int]:
    """What is embedded of the first chunks, at least one, up to so many tokens; the tokens; how many are put together
    anew. Raises ModelChangeRefused for a chunk that the model would have to cut."""
    texts: list[str] = []
    weight = recomposed = 0
    for row in rows:
        text, tokens = _text(row, embedder)
        if texts and weight + tokens > most:
            break
        texts.append(text)
        weight += tokens
        recomposed += hashlib.sha256(text.encode()).hexdigest() != row["chunk_hash"]
    return texts, weight, recomposed


def _text(row: dict[str, Any], embedder: Embedder) -> tuple[str, int]:
    """A chunk with where it stands in front, as an ingest puts it together, and its tokens."""
    title, section = row["title"], row["section"] or ""
    headings = "" if section == title else section.removeprefix(f"{title} > ")
    innermost = headings.rpartition(" > ")[2]
    for lines in ((title, headings), (title, innermost), (title,), ()):
        prefix = "\n".join(line for line in lines if line)
        text = f"{prefix}\n\n{row['chunk_text']}" if prefix else row["chunk_text"]
        tokens = embedder.count_tokens(text)
        if tokens <= embedder.max_input_tokens:
            return text, tokens
    raise ModelChangeRefused(
        f"a chunk has {tokens} tokens, and {embedder.model_id} reads {embedder.max_input_tokens}: "
        "it takes the documents ingested anew, not their chunks"
    )


async def switch(at: Bench, embedder: Embedder, *, back: bool = False, tell: Tell | None = None) -> State:
    """Make the second model the active one, in one short transaction; `back` when it was that before.

    What was written since the fill is filled first: `embedder` is of the second model. Writers are refused for the
    last moments of that (ModelChanging), readers never wait longer than LOCK_TIMEOUT_MS. Raises ModelChangeRefused
    for what cannot be switched, and as `fill`.
    """
    await _finish(at)
    state = at.state()
    if state.second is None:
        raise ModelChangeRefused("there is no second model: `rag models add` adds it")
    if state.second.is_former != back:
        raise ModelChangeRefused(
            f"{state.second.model_id} is not a former model: `rag models switch` makes it the active one"
            if back
            else f"{state.second.model_id} was active before: `rag models rollback` makes it that again"
        )
    await fill(at, embedder, tell=tell)
    try:
        for _ in range(SWITCH_ATTEMPTS):
            _alone(at, query("pause_writes"), {"seconds": PAUSE_S})
            # The few that came meanwhile.
            await _fill_rest(at, embedder, Pace(), (), lambda count: None)
            try:
                await _locking(at, query("swap_models"), {})
                break
            except _StillLacking:
                continue
        else:
            raise ModelChangeRefused("chunks go on being written without a vector of the second model; try again")
    except BaseException:
        at.session.run("pause_writes", {"seconds": 0})
        raise
    await _finish(at)
    return at.state()


async def drop(at: Bench) -> None:
    """Remove the second model with its vectors and indexes. Raises ModelChangeRefused when there is none."""
    await _finish(at)
    if at.state().second is None:
        raise ModelChangeRefused("there is no second model")
    await _locking(at, query("drop_model"), {})
    _settle(at)


class _StillLacking(Exception):
    """Chunks came between the fill and the lock."""


_REFUSALS = {
    "55M03": "there is a second model already, or the active one was named: `rag models list`",
    "55M04": "both models are too wide for a row: at most 3,790 dimensions together. Many models can be asked for less "
    "(RAG_EMBEDDING_NEXT_DIMENSIONS)",
    "55M06": "an index of the second model is missing: `rag models fill` builds it",
    "55M01": "the second model is another one by now",
}


def _alone(at: Bench, statement: str, parameters: dict[str, Any]) -> DictRow | None:
    """One statement, one transaction."""
    try:
        with at.owner.transaction():
            return at.owner.execute(statement.encode(), parameters).fetchone()
    except psycopg.Error as error:
        if error.sqlstate == "55M05":
            raise _StillLacking from error
        if error.sqlstate in _REFUSALS:
            raise ModelChangeRefused(_REFUSALS[error.sqlstate]) from error
        raise


async def _locking(at: Bench, statement: str, parameters: dict[str, Any]) -> None:
    """A statement that needs the table for itself, for some milliseconds; again when it had to wait too long."""
    for attempt in range(1, LOCK_ATTEMPTS + 1):
        try:
            with at.owner.transaction():
                at.session.run("limit_waiting", {"milliseconds": LOCK_TIMEOUT_MS})
                _alone(at, statement, parameters)
            return
        except psycopg.errors.LockNotAvailable:
            if attempt == LOCK_ATTEMPTS:
                raise
        await asyncio.sleep(LOCK_PAUSE_S)


def _settle(at: Bench) -> None:
    """Look at the rows that were there before a constraint was, while reading and writing go on."""
    for row in at.session.rows("unchecked_models", {}):
        at.session.run_text(row["statement"])


async def _finish(at: Bench) -> None:
    """What a switch leaves for afterwards."""
    _settle(at)
    await _locking(at, query("finish_swap"), {})


def _build(at: Bench, *, only_contents: bool, dimensions: int = 0, chunks: int = 0, tell: Tell | None = None) -> None:
    """Build what indexes the second model lacks, and drop what nobody needs."""
    # The graph of the largest class is no larger than that of all chunks.
    memory_mb = round(min(max(chunks * (2 * dimensions + GRAPH_BYTES) / 2**20, LEAST_MEMORY), MOST_MEMORY))
    at.session.run("prepare_building", {"memory_mb": memory_mb, "workers": 2})
    for row in at.session.rows("second_indexes", {}):
        if only_contents and row["access_id"] is not None:
            continue
        if tell is not None:
            tell(chunks, chunks, f"building {row['index_name']}")
        if row["drop_statement"] is not None:
            at.session.run_text(row["drop_statement"])
        if row["build_statement"] is not None:
            at.session.run_text(row["build_statement"])
