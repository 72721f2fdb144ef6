"""Care of large access classes: each gets indexes of vectors and of words that no other class shares, and statistics.

A class that outgrows the threshold is promoted, one that shrinks below half of it is demoted, while the service goes
on reading and writing. Whatever stops a run, the next one finds what is there and goes on: searches use the indexes of
a class only from the last step on, and no longer from the first step of its demotion on.

Judging, counting and bookkeeping are rag_operator's; building and dropping indexes is the owner's, which rag_migrator
may become.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import psycopg
from psycopg import Connection
from psycopg.rows import DictRow

from rag.database import translated_errors
from rag.errors import InvalidInput, RAGServiceError
from rag.operate import Desk, Session, connected
from rag.settings import Settings

# Chunks. Up to here all of a class is compared with the question in 2 to 4 ms.
THRESHOLD = 5_000
# Classes. Every index costs every statement planning time: 600 of them 1.5 ms, and 10 ms on a new connection.
MOST_CLASSES = 100
# A class that has indexes counts twice, so that it keeps them down to half of the threshold, and yields its place
# only to one of twice its size: what a day adds and removes must not have them built and dropped again.
STAYING = 2
# Share of the chunks. When a class has grown by a fifth since it was counted, and a lexeme has not, its idf is wrong
# by ln 1.2 = 0.18, of 2 to 10.
MOVED = 0.2
# Chunks that a lexeme must be in to be counted. Of 190,000 chunks of 66 lexemes each, 970,000 lexemes in all, 127,000
# are in so many (0.7 a chunk), 247,000 in three, 419,000 in two. The search takes those without a row for rare.
FEWEST_CHUNKS = 5
# Bytes of a chunk's entry in the graph while it is built, besides the vector at 2 bytes a dimension: 8 MB held
# 4,823 chunks of 512 dimensions, 16 MB 9,638.
GRAPH_BYTES = 720
# Chunks that come while the index is built.
GRAPH_HEADROOM = 1.25
# Megabytes. The first is PostgreSQL's own default; as much as the last is not taken without being asked for.
LEAST_MEMORY, MOST_MEMORY = 64, 1024
# Times its bytes per chunk at first. An index that is so much larger is a third air.
BLOATED = 1.5
# Between two looks at a build.
WATCH_S = 0.5

# From where indexes are built.
OWNER_URL = "RAG_MIGRATION_DATABASE_URL"

Kind = Literal["vector", "words"]
KINDS: tuple[Kind, ...] = get_args(Kind)
INDEXED: Mapping[Kind, str] = {"vector": "vectors", "words": "words"}
Action = Literal["demote", "unready", "drop", "build", "rebuild", "measure", "ready"]
OWNERS: tuple[Action, ...] = ("drop", "build", "rebuild")
DONE: Mapping[Action, str] = {
    "demote": "searches read it as a small class",
    "unready": "searches read it as a small class until its indexes are whole",
    "drop": "remove the index",
    "build": "build the index",
    "rebuild": "rebuild the index",
    "measure": "count its words",
    "ready": "searches use its own indexes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeClass:
    """An access class that is large, or has statistics."""

    tenant_id: str
    access_id: int
    chunks: int
    is_ready: bool
    """Whether searches use its own indexes."""
    measured_chunks: int | None
    """How many there were when its words were counted; None when they never were."""
    measured_at: Any
    vector_bytes_per_chunk: float | None
    words_bytes_per_chunk: float | None
    statistics_rows: int
    statistics_bytes: int
    vector_build: str
    """SQL."""
    words_build: str

    @property
    def is_stale(self) -> bool:
        """Whether its words have to be counted, for the first time or again."""
        before = self.measured_chunks
        return before is None or abs(self.chunks - before) > MOVED * before

    def build(self, kind: Kind) -> str:
        return {"vector": self.vector_build, "words": self.words_build}[kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnIndex:
    """An index of a single class, which may be gone."""

    access_id: int
    kind: Kind
    index_name: str
    is_usable: bool
    """Valid, and what its name says; otherwise a build was broken off, or somebody made it by hand."""
    bytes: int
    drop_statement: str
    rebuild_statement: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What there is: classes by size, largest first; indexes by class."""

    classes: tuple[LargeClass, ...]
    indexes: tuple[OwnIndex, ...]

    @classmethod
    def of_rows(cls, sizes: Sequence[Mapping[str, Any]], indexes: Sequence[Mapping[str, Any]]) -> Survey:
        """From what the queries `list_class_sizes` and `list_class_indexes` return."""
        return cls(
            classes=tuple(LargeClass(**row) for row in sizes),
            indexes=tuple(OwnIndex(**row) for row in indexes),
        )

    def of(self, access_id: int) -> list[OwnIndex]:
        return [index for index in self.indexes if index.access_id == access_id]

    def usable(self, access_id: int) -> dict[Kind, OwnIndex]:
        return {index.kind: index for index in self.of(access_id) if index.is_usable}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Which classes get indexes of their own."""

    threshold: int = THRESHOLD
    """Chunks; those with more."""
    most_classes: int = MOST_CLASSES
    """The largest win."""

    @property
    def least_chunks(self) -> int:
        """Smaller classes need not be looked at: they keep no indexes."""
        return self.threshold // STAYING + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do; each is whole by itself."""

    action: Action
    access_id: int
    tenant_id: str | None = None
    """None when the class is gone."""
    kind: Kind | None = None
    """Of the index that is built or dropped."""
    index_name: str | None = None
    """Of the index that is dropped."""
    chunks: int = 0
    statement: str | None = None
    """What the owner of the tables runs."""

    def __str__(self) -> str:
        index = "" if self.kind is None else f" of {INDEXED[self.kind]}"
        return f"class {self.access_id}: {DONE[self.action]}{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do, in order; and the classes above the threshold for which there is no room, largest first."""

    steps: tuple[Step, ...]
    left_out: tuple[LargeClass, ...]


Tell = Callable[[Step, str, float | None], None]
"""Called with a step, '' and None when it begins, and with '' and 1 when it is done; while an index is built also with
the phase, and the share of it that is done, None where that is not known. Then from another thread."""


def survey(session: Session, limits: Limits) -> Survey:
    """Look at all classes that limits may concern; reads the primary key of all chunks."""
    sizes = session.rows("list_class_sizes", {"at_least": limits.least_chunks})
    indexes = session.rows("list_class_indexes", {})
    return Survey.of_rows(sizes, indexes)


def plan(found: Survey, limits: Limits, *, refresh: bool = False, rebuild: bool = False) -> Plan:
    """What has to be done about it.

    `refresh` counts the words of every large class, `rebuild` makes indexes anew that have bloated: the old one serves
    until the new one is whole.
    """

    def is_settled(each: LargeClass) -> bool:
        return each.measured_chunks is not None or bool(found.usable(each.access_id))

    def weight(each: LargeClass) -> int:
        return each.chunks * (STAYING if is_settled(each) else 1)

    large = sorted(
        (each for each in found.classes if weight(each) > limits.threshold),
        key=lambda each: (-weight(each), not is_settled(each), each.access_id),
    )
    kept = large[: limits.most_classes]
    kept_ids = {each.access_id for each in kept}
    gone = [each for each in found.classes if each.access_id not in kept_ids and each.measured_chunks is not None]
    steps = [Step(action="demote", access_id=each.access_id, tenant_id=each.tenant_id) for each in gone]
    # Those of classes that were erased are among them.
    steps += [_dropped(index) for index in found.indexes if index.access_id not in kept_ids]
    for each in kept:
        steps += _kept(each, found, refresh=refresh)
        if rebuild:
            steps += [_rebuilt(each, index) for factor, index in _bloat(each, found) if factor > BLOATED]
    left_out = [each for each in found.classes if each.chunks > limits.threshold and each.access_id not in kept_ids]
    return Plan(steps=tuple(steps), left_out=tuple(left_out))


def _rebuilt(each: LargeClass, index: OwnIndex) -> Step:
    return Step(
        action="rebuild",
        access_id=each.access_id,
        tenant_id=each.tenant_id,
        kind=index.kind,
        index_name=index.index_name,
        chunks=each.chunks,
        statement=index.rebuild_statement,
    )


def _dropped(index: OwnIndex, tenant_id: str | None = None) -> Step:
    return Step(
        action="drop",
        access_id=index.access_id,
        tenant_id=tenant_id,
        kind=index.kind,
        index_name=index.index_name,
        statement=index.drop_statement,
    )


def _kept(each: LargeClass, found: Survey, *, refresh: bool) -> list[Step]:
    """What a class lacks that is to have indexes of its own."""

    def step(action: Action, kind: Kind | None = None, statement: str | None = None) -> Step:
        return Step(
            action=action,
            access_id=each.access_id,
            tenant_id=each.tenant_id,
            kind=kind,
            chunks=each.chunks,
            statement=statement,
        )

    missing = [kind for kind in KINDS if kind not in found.usable(each.access_id)]
    steps = [step("unready")] if each.is_ready and missing else []
    steps += [_dropped(index, each.tenant_id) for index in found.of(each.access_id) if not index.is_usable]
    steps += [step("build", kind, each.build(kind)) for kind in missing]
    if refresh or each.is_stale:
        steps.append(step("measure"))
    if missing or not each.is_ready:
        steps.append(step("ready"))
    return steps


# --- carrying it out -----------------------------------------------------------------------------


def owner_url(desk: Desk, settings: Settings) -> str | None:
    """From where indexes are built: as rag_migrator. None when the settings do not say."""
    if desk.server is not None:
        return desk.server.url("rag_migrator")
    named = settings.rag_migration_database_url
    return None if named is None else named.get_secret_value()


@dataclass(slots=True, kw_only=True)
class Turn:
    """The one run that maintains a database at a time."""

    desk: Desk
    dimensions: int
    """Of the vectors."""
    owner_url: str | None
    owner: Connection[DictRow] | None
    memory_mb: int | None = None
    """For building an index of vectors; None = as its size needs, at most MOST_MEMORY."""
    limits: Limits = field(default_factory=Limits)

    def survey(self) -> Survey:
        with self.desk.session() as session:
            return survey(session, self.limits)

    def carry_out(self, steps: Sequence[Step], tell: Tell) -> list[Step]:
        """Take the steps, each in a transaction of its own; returns those that somebody else has to take.

        Without an owner these are the building and dropping of indexes, and what has to wait for it.
        Raises the DatabaseError family, and InvalidInput for a login that may not become the owner.
        """
        left: list[Step] = []
        waiting: set[int] = set()
        for step in steps:
            if (step.action in OWNERS and self.owner is None) or (
                step.access_id in waiting and step.action in ("measure", "ready")
            ):
                left.append(step)
                waiting.add(step.access_id)
                continue
            tell(step, "", None)
            if not self._take(step, tell):
                waiting.add(step.access_id)
            tell(step, "", 1.0)
        # Those of a class that was erased meanwhile are nobody's.
        return [step for step in left if step.action in OWNERS or self.owner is None]

    def _take(self, step: Step, tell: Tell) -> bool:
        """Take one step; False when its class is gone."""
        if step.statement is not None:
            self._run_as_owner(step, tell)
            if step.action == "rebuild":
                self._weigh_again(step)
            return True
        whose = {"tenant_id": step.tenant_id, "access_id": step.access_id}
        with self.desk.session() as session:
            if step.action == "demote":
                session.run("demote_class", whose)
            elif step.action == "measure":
                return session.row("measure_class", whose | {"at_least": FEWEST_CHUNKS}) is not None
            else:
                session.run("set_class_ready", whose | {"ready": step.action == "ready"})
        return True

    def _weigh_again(self, step: Step) -> None:
        """Take the size of now for the one to compare with: what a rebuild does not mend is not rebuilt every night."""
        whose = {"tenant_id": step.tenant_id, "access_id": step.access_id}
        # In one transaction, so that no search sees it without its indexes.
        with self.desk.session() as session:
            row = session.row("set_class_ready", whose | {"ready": False})
            if row is not None and row["changed"]:
                session.run("set_class_ready", whose | {"ready": True})

    def _run_as_owner(self, step: Step, tell: Tell) -> None:
        assert self.owner is not None
        assert self.owner_url is not None
        assert step.statement is not None
        with _errors_of_the_owner():
            session = Session(self.owner)
            memory = {"memory_mb": self._memory_for(step.chunks), "workers": 2}
            session.run("prepare_building", memory)
            process = self.owner.info.backend_pid
            with _watched(self.owner_url, process, lambda phase, share: tell(step, phase, share)):
                try:
                    session.run_text(step.statement)
                except psycopg.errors.DiskFull:
                    if step.action != "build":
                        raise
                    # Processes share the graph in /dev/shm, of which a container has 64 MB. One alone needs none.
                    session.run("prepare_building", memory | {"workers": 0})
                    for index in session.rows("list_class_indexes", {}):
                        if (index["access_id"], index["kind"], index["is_usable"]) == (
                            step.access_id,
                            step.kind,
                            False,
                        ):
                            session.run_text(index["drop_statement"])
                    session.run_text(step.statement)

    def _memory_for(self, chunks: int) -> int:
        """Megabytes in which the graph of a class of this size is built without a detour over the disk."""
        if self.memory_mb is not None:
            return self.memory_mb
        needed = chunks * (2 * self.dimensions + GRAPH_BYTES) * GRAPH_HEADROOM / 2**20
        return round(min(max(needed, LEAST_MEMORY), MOST_MEMORY))


@contextmanager
def alone(
    desk: Desk,
    settings: Settings,
    *,
    owner_url: str | None,
    limits: Limits | None = None,
    memory_mb: int | None = None,
) -> Iterator[Turn | None]:
    """The turn of this run; None while another one is at work.

    Raises the DatabaseError family; InvalidInput for logins that cannot do it, or are of two databases.
    """

    def turn(owner: Connection[DictRow] | None) -> Turn:
        return Turn(
            desk=desk,
            dimensions=settings.rag_embedding_dimensions,
            owner_url=owner_url,
            owner=owner,
            memory_mb=memory_mb,
            limits=limits or Limits(),
        )

    if owner_url is None:
        with desk.session() as session:
            yield turn(None) if _locked(session) else None
        return
    # By the session that builds: when this process is killed, its build goes on, and so does its turn.
    with connected(owner_url, OWNER_URL, autocommit=True) as owner:
        if not _locked(Session(owner)):
            yield None
            return
        with desk.session() as session:
            if _locked(session):
                raise InvalidInput(
                    "RAG_OPERATOR_DATABASE_URL and RAG_MIGRATION_DATABASE_URL name two databases",
                    field=OWNER_URL,
                )
        yield turn(owner)


def _locked(session: Session) -> bool:
    row = session.row("lock_maintenance", {})
    assert row is not None
    return bool(row["locked"])


@contextmanager
def _errors_of_the_owner() -> Iterator[None]:
    with translated_errors():
        try:
            yield
        except psycopg.errors.InsufficientPrivilege as error:
            raise InvalidInput(
                "the login of RAG_MIGRATION_DATABASE_URL may not become rag_owner, to whom the tables belong",
                field=OWNER_URL,
            ) from error


@contextmanager
def _watched(url: str, process: int, note: Callable[[str, float | None], None]) -> Iterator[None]:
    """Note the progress of a session's build as long as the block runs."""
    over = threading.Event()

    def watch() -> None:
        try:
            with connected(url, OWNER_URL, autocommit=True) as connection:
                while not over.wait(WATCH_S):
                    row = Session(connection).row("building_progress", {"process": process})
                    # Of another login's session everything but its number is null.
                    if row is not None and row["phase"] is not None:
                        note(row["phase"], row["share"])
        except (RAGServiceError, psycopg.Error):
            return  # nobody needs it

    watcher = threading.Thread(target=watch, name="progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


# --- what there is, in numbers -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """Indexes and statistics of a class, in bytes. None where there is none."""

    access_id: int
    chunks: int
    ready: bool
    vector_bytes: int | None
    words_bytes: int | None
    statistics_bytes: int
    bytes_per_chunk: int | None
    """Of all three."""
    bloat: float | None
    """How many times larger an index of vectors or words is, per chunk, than when it was taken into use."""
    counted_chunks: int | None
    """How many there were when its words were counted."""


def report(found: Survey) -> list[ClassReport]:
    """The classes with indexes or statistics, largest first."""
    reports = []
    for each in found.classes:
        indexes = found.usable(each.access_id)
        if not indexes and each.measured_chunks is None:
            continue
        sizes = {kind: index.bytes for kind, index in indexes.items()}
        total = sum(sizes.values()) + each.statistics_bytes
        bloat = [factor for factor, _ in _bloat(each, found)]
        reports.append(
            ClassReport(
                access_id=each.access_id,
                chunks=each.chunks,
                ready=each.is_ready,
                vector_bytes=sizes.get("vector"),
                words_bytes=sizes.get("words"),
                statistics_bytes=each.statistics_bytes,
                bytes_per_chunk=None if each.chunks == 0 else round(total / each.chunks),
                bloat=round(max(bloat), 1) if bloat else None,
                counted_chunks=each.measured_chunks,
            )
        )
    return reports


def bloated(found: Survey) -> list[str]:
    """The SQL that rebuilds indexes that have become too large; it takes as long as building them."""
    return [
        index.rebuild_statement for each in found.classes for factor, index in _bloat(each, found) if factor > BLOATED
    ]


def _bloat(each: LargeClass, found: Survey) -> list[tuple[float, OwnIndex]]:
    first = {"vector": each.vector_bytes_per_chunk, "words": each.words_bytes_per_chunk}
    return [
        (index.bytes / each.chunks / before, index)
        for kind, index in found.usable(each.access_id).items()
        if each.chunks and (before := first.get(kind))
    ]


def as_rows(reports: Sequence[ClassReport]) -> list[dict[str, Any]]:
    """The reports as a table's rows."""
    return [asdict(each) for each in reports]
