"""Keeps the index in step with a source: what is new or changed goes in, what moved stays itself, what is gone goes.

A document of a source has the source id `name:path`, and says in its metadata where it comes from. Only such
documents of the same owner are ever changed or removed, and only after the whole source could be listed.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol
from uuid import UUID

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rag import divide, store
from rag.database import Database, Session
from rag.embed import Embedder
from rag.errors import (
    DocumentNotFound,
    EmbeddingInvalid,
    InvalidInput,
    QuotaExceeded,
    RAGServiceError,
    ScopeForbidden,
    SourceInvalidated,
    SourceRetracted,
    first_of,
)
from rag.gather import File, Listing, PathFilter, list_commit, list_directory
from rag.ingest import (
    PARALLEL_DOCUMENTS,
    Ingested,
    Origin,
    Source,
    content_digest,
    digest_of,
    ingest,
    source_type_of,
)
from rag.principal import PUBLIC_TAGS, Principal, check_name
from rag.settings import Settings
from rag.store import Destination, destination_of

# Spec 002, "v1 sources": specs, README, decisions, incidents, summaries.
V1_TYPES = frozenset({"project_spec", "readme", "adr", "decision", "incident", "conversation_summary"})

Reason = Literal["new", "changed", "moved", "tags", "no chunks", "other model"]


class SourceSpec(BaseModel):
    """A source as RAG_SOURCES or a command names it: where it is, what of it counts, and whose it becomes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
    directory: Path | None = None
    git: str | None = None
    github: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9._-]{1,100}$")] | None = None
    """The repository on GitHub whose pushes start a synchronisation; fetched from there unless `git` says otherwise."""
    askpass: Path | None = None
    """A program that git asks for the name and the password of a private repository."""
    ref: str = "HEAD"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    """Source types that count; `v1` for those of spec 002, none for all."""
    tenant: str | None = None
    scope: Literal["public", "user", "project"] = "user"
    user: int | None = None
    project: str | None = None
    tags: tuple[str, ...] = PUBLIC_TAGS
    language: Annotated[str, Field(pattern="^[a-z]{2}$")] | None = None
    encoding: str | None = None
    verified: bool = False
    """Whether everything in it has been approved, as what is on the main branch often is."""

    @model_validator(mode="after")
    def _one_place(self) -> SourceSpec:
        if (self.directory is None) == (self.repository is None):
            raise ValueError("a source is either a directory or a git repository")
        if self.askpass is not None and self.directory is not None:
            raise ValueError("askpass is for a git repository")
        if self.github is not None and self.tenant is None:
            # Whose it becomes is said here, and by no default: a push comes from outside.
            raise ValueError("a source with github must name its tenant")
        return self

    @property
    def repository(self) -> str | None:
        """Where the git repository is; None for a directory."""
        if self.git is None and self.github is not None:
            return f"https://github.com/{self.github}.git"
        return self.git

    def listing(self) -> AbstractContextManager[Listing]:
        """All files that count, as long as the block lasts. Raises SourceUnavailable, InvalidInput."""
        paths = PathFilter(include=self.include, exclude=self.exclude)
        if self.repository is not None:
            return list_commit(self.repository, self.ref, paths, askpass=self.askpass)
        assert self.directory is not None
        return list_directory(self.directory, paths)

    def principal(self, default_tenant: str | None) -> Principal:
        """Who writes it. Raises InvalidInput."""
        tenant = self.tenant or default_tenant
        if tenant is None:
            raise InvalidInput(f"source {self.name}: tenant is required", field="tenant")
        # What went in without tags must be seen by whoever restricts it, or a copy would stay open.
        tags = tuple(dict.fromkeys((*self.tags, *PUBLIC_TAGS)))
        return Principal(tenant_id=tenant, user_id=self.user, project_id=self.project, tags=tags)

    def counts(self, source_type: str) -> bool:
        """Whether files of a source type are wanted."""
        wanted = set(self.types)
        return not wanted or source_type in wanted or ("v1" in wanted and source_type in V1_TYPES)


def load_specs(path: Path) -> list[SourceSpec]:
    """The sources of a YAML file: a list, or a mapping with the key `sources`; directories are relative to the file.

    Raises InvalidInput, naming the entry.
    """
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"RAG_SOURCES: {path} cannot be read", field="RAG_SOURCES") from error
    entries = read.get("sources") if isinstance(read, dict) else read
    if not isinstance(entries, list):
        raise InvalidInput(f"RAG_SOURCES: {path} holds no list of sources", field="RAG_SOURCES")
    specs: list[SourceSpec] = []
    for number, entry in enumerate(entries, start=1):
        try:
            spec = SourceSpec.model_validate(entry)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise InvalidInput(
                f"RAG_SOURCES: source {number}: {where}: {first['msg']}".replace(": :", ":"), field="RAG_SOURCES"
            ) from error
        if spec.directory is not None:
            spec = spec.model_copy(update={"directory": path.parent / spec.directory})
        elif spec.git is not None and "://" not in spec.git:
            spec = spec.model_copy(update={"git": str(path.parent / spec.git)})
        if spec.askpass is not None:
            spec = spec.model_copy(update={"askpass": (path.parent / spec.askpass).absolute()})
        specs.append(spec)
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        raise InvalidInput("RAG_SOURCES: two sources have one name", field="RAG_SOURCES")
    return specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One document that differs from its source. `path` has the number of the part, of a file that is in parts."""

    path: str
    reason: Reason
    former_path: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A file that could not be taken in, and why; what was stored of it stays."""

    path: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a synchronisation found, and did unless it was a dry run."""

    source: str
    version: str | None = None
    files: int = 0
    left_out: int = 0
    unchanged: int = 0
    changes: list[Change] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Paths whose documents were removed, or would be."""
    kept: list[str] = field(default_factory=list)
    """Paths that are gone and whose documents stay: the source was empty."""
    failures: list[Failure] = field(default_factory=list)
    embedded: int = 0
    full: str | None = None
    """Which quota is full, when one is."""
    waiting: list[str] = field(default_factory=list)
    """Paths that were not taken in for lack of room."""

    @property
    def drift(self) -> int:
        """How many documents were not as their source has them."""
        return len(self.changes) + len(self.gone) + len(self.kept)


class Watcher(Protocol):
    """Who is told how far a synchronisation has got."""

    def start(self, total: int, what: str) -> None:
        """So many things are about to be done."""

    def note(self, text: str) -> None:
        """What is being worked on."""

    def step(self) -> None:
        """One of them is done."""


class Silent:
    """A watcher that keeps it to itself."""

    def start(self, total: int, what: str) -> None: ...

    def note(self, text: str) -> None: ...

    def step(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A document that the source asks for."""

    file: File
    part: int | None
    source_type: str
    source_id: str
    digest: str
    sha256: str

    @property
    def path(self) -> str:
        return divide.shown(self.file.path, self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    wanted: _Wanted
    reason: Reason
    former: Mapping[str, Any] | None = None

    @property
    def change(self) -> Change:
        former_path = None if self.former is None else str(self.former["path"])
        return Change(path=self.wanted.path, reason=self.reason, former_path=former_path)


@dataclass(slots=True, kw_only=True)
class Synchroniser:
    """Synchronises sources with one database and one embedding model."""

    settings: Settings
    database: Database
    embedder: Embedder
    default_tenant: str | None = None
    watcher: Watcher = field(default_factory=Silent)
    also: Callable[[Session], Awaitable[None]] | None = None
    """A part of each transaction that changes something; what it raises ends the synchronisation."""

    async def sync(
        self, spec: SourceSpec, *, dry_run: bool = False, allow_empty: bool = False, thorough: bool = False
    ) -> Outcome:
        """Make the index what the source is; with `dry_run` only say what would be done.

        `thorough` also looks at the chunks of what has not changed, and writes anew what has none or has some of
        another model. An empty source removes nothing unless `allow_empty`: a folder that is not mounted is empty.
        Raises SourceUnavailable, in which case nothing was changed, and the errors of ingest that are of no single
        file.
        """
        principal = spec.principal(self.default_tenant)
        destination = destination_of(principal, scope=spec.scope, tags=spec.tags)
        outcome = Outcome(source=spec.name)
        async with _listed(spec) as listing:
            wanted, unread = await self._wanted(spec, listing, outcome)
            stored = await self._stored(spec, principal, destination)
            tasks, gone = await self._compare(wanted, unread, stored, destination, outcome, principal, thorough)
            outcome.changes = [task.change for task in tasks]
            if gone and not listing.files and not allow_empty:
                outcome.kept, gone = sorted({str(row["path"]) for row in gone}), []
            outcome.gone = sorted({str(row["path"]) for row in gone})
            if not dry_run:
                access_id = await store.find_class(self.database, principal, destination)
                outcome.changes = []
                left = await self._write(spec, listing, tasks, principal, destination, outcome)
                await self._remove(gone, principal, outcome)
                if left and gone:
                    # What is gone has made room.
                    outcome.full = None
                    left = await self._write(spec, listing, left, principal, destination, outcome)
                outcome.waiting = [task.wanted.path for task in left]
                await self._note(principal, destination, access_id, outcome)
        return outcome

    async def _note(self, principal: Principal, destination: Destination, access_id: int, outcome: Outcome) -> None:
        done = store.Synchronised(
            source=outcome.source,
            version=outcome.version,
            files=outcome.files,
            written=len(outcome.changes),
            removed=len(outcome.gone),
            unchanged=outcome.unchanged,
            failed=len(outcome.failures) + len(outcome.kept),
        )
        # The owner may have been erased meanwhile, and nothing of them is to come back.
        with suppress(ScopeForbidden):
            await store.note_synchronisation(self.database, principal, destination, access_id, done, also=self.also)

    async def _wanted(
        self, spec: SourceSpec, listing: Listing, outcome: Outcome
    ) -> tuple[dict[tuple[str, str], _Wanted], set[str]]:
        """What the source asks for, by type and id; and the paths of which that could not be found out."""
        wanted: dict[tuple[str, str], _Wanted] = {}
        unread: set[str] = set()
        outcome.version, outcome.left_out = listing.version, listing.left_out
        self.watcher.start(len(listing.files), f"reading {spec.name}")
        for file in listing.files:
            self.watcher.note(file.path)
            try:
                found = await asyncio.to_thread(self._described, spec, listing, file)
            except (InvalidInput, OSError) as error:
                unread.add(file.path)
                outcome.failures.append(_failure(file.path, error))
                found = []
            if found is None:
                outcome.left_out += 1
            else:
                outcome.files += 1
                wanted |= {(each.source_type, each.source_id): each for each in found}
            self.watcher.step()
        return wanted, unread

    def _described(self, spec: SourceSpec, listing: Listing, file: File) -> list[_Wanted] | None:
        """The documents that a file asks for; None when its type is not wanted."""
        found = []
        for part, source in self._sources(spec, listing, file):
            source_type = source_type_of(source)
            # A file that was emptied has taken back what it said.
            if not spec.counts(source_type) or not source.content.strip():
                return None
            found.append(
                _Wanted(
                    file=file,
                    part=part,
                    source_type=source_type,
                    source_id=source.source_id,
                    digest=digest_of(source, self.embedder, chunking=self.settings.rag_chunking),
                    sha256=content_digest(source.content),
                )
            )
        return found

    def _sources(
        self, spec: SourceSpec, listing: Listing, file: File
    ) -> Generator[tuple[int | None, Source], None, None]:
        check_name(file.path, field="path", max_length=1024)
        with listing.open(file) as opened:
            for part, content in divide.contents(
                opened,
                name=file.path,
                size=file.size,
                max_bytes=self.settings.rag_max_document_bytes,
                max_file_bytes=self.settings.rag_max_file_bytes,
                encoding=spec.encoding,
            ):
                yield (
                    part,
                    Source(
                        name=file.path,
                        source_id=divide.id_of(f"{spec.name}:{file.path}", part),
                        content=content,
                        title=divide.title_of(file.path, part),
                        source_uri=listing.uri(file),
                        source_updated_at=file.updated_at,
                        language=spec.language,
                        encoding=spec.encoding,
                        verified=spec.verified,
                        origin=Origin(source=spec.name, path=file.path, version=listing.version),
                    ),
                )

    async def _stored(
        self, spec: SourceSpec, principal: Principal, destination: Destination
    ) -> dict[tuple[str, str], Mapping[str, Any]]:
        async with self.database.transaction(principal, read_only=True) as session:
            rows = await session.rows(
                "list_origin",
                {
                    "source": spec.name,
                    "scope": destination.scope,
                    "user_id": destination.user_id,
                    "project_id": destination.project_id,
                },
            )
        # More than one only while tags change; the ingest removes the others.
        return {(row["source_type"], row["source_id"]): row for row in rows}

    async def _compare(
        self,
        wanted: Mapping[tuple[str, str], _Wanted],
        unread: set[str],
        stored: Mapping[tuple[str, str], Mapping[str, Any]],
        destination: Destination,
        outcome: Outcome,
        principal: Principal,
        thorough: bool,
    ) -> tuple[list[_Task], list[Mapping[str, Any]]]:
        """What is to be written, and the rows of what is to be removed."""
        gone = {key: row for key, row in stored.items() if key not in wanted and row["path"] not in unread}
        by_content: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for key, left in gone.items():
            by_content[left["sha256"]].append(key)
        unfit: dict[UUID, Reason] = {}
        if thorough:
            unfit = await self._unfit([row["id"] for key, row in stored.items() if key in wanted], principal)
        tasks: list[_Task] = []
        for key, each in wanted.items():
            row = stored.get(key)
            if row is None:
                if twins := by_content.get(each.sha256):
                    tasks.append(_Task(wanted=each, reason="moved", former=gone.pop(twins.pop(0))))
                else:
                    tasks.append(_Task(wanted=each, reason="new"))
            elif row["id"] in unfit:
                tasks.append(_Task(wanted=each, reason=unfit[row["id"]]))
            elif row["source_hash"] != each.digest:
                tasks.append(_Task(wanted=each, reason="changed"))
            elif sorted(row["tags"]) != sorted(set(destination.tags)):
                tasks.append(_Task(wanted=each, reason="tags"))
            else:
                outcome.unchanged += 1
        return tasks, list(gone.values())

    async def _unfit(self, document_ids: Sequence[UUID], principal: Principal) -> dict[UUID, Reason]:
        async with self.database.transaction(principal, read_only=True) as session:
            rows = await session.rows(
                "list_unfit",
                {"document_ids": list(document_ids), "embedding_model": self.embedder.model_id},
            )
        return {row["id"]: "other model" if row["chunks"] else "no chunks" for row in rows}

    async def _write(
        self,
        spec: SourceSpec,
        listing: Listing,
        tasks: Sequence[_Task],
        principal: Principal,
        destination: Destination,
        outcome: Outcome,
    ) -> list[_Task]:
        """Write what has changed; what is left because a quota is full, from the first refusal on."""
        by_file: dict[str, list[_Task]] = defaultdict(list)
        for task in tasks:
            by_file[task.wanted.file.path].append(task)
        self.watcher.start(len(tasks), f"ingesting {spec.name}")
        turn = asyncio.Semaphore(PARALLEL_DOCUMENTS)
        failed: set[str] = set()
        left: list[_Task] = []

        async def one(file_tasks: list[_Task]) -> None:
            async with turn:
                if outcome.full is not None:
                    left.extend(file_tasks)
                    return
                file = file_tasks[0].wanted.file
                waiting = {task.wanted.part: task for task in file_tasks}
                try:
                    # Part by part, so that no more than one is in memory.
                    async with aclosing(divide.in_threads(self._sources(spec, listing, file))) as parts:
                        async for part, source in parts:
                            if part in waiting:
                                await self._ingest(waiting[part], source, principal, destination, outcome)
                                del waiting[part]
                                self.watcher.step()
                except QuotaExceeded as error:
                    outcome.full = error.message
                    left.extend(waiting.values())
                    return
                except (InvalidInput, EmbeddingInvalid, SourceInvalidated, SourceRetracted, OSError) as error:
                    # Of this file alone; what the database or the provider lacks, all others lack as well.
                    outcome.failures.append(_failure(file.path, error))
                    failed.add(file.path)
                for _ in waiting:
                    self.watcher.step()

        try:
            async with asyncio.TaskGroup() as group:
                for file_tasks in by_file.values():
                    group.create_task(one(file_tasks))
        except* RAGServiceError as errors:
            raise first_of(errors) from errors
        written = [task for task in tasks if task.wanted.file.path not in failed and task not in left]
        outcome.changes += [task.change for task in written]
        return [task for task in tasks if task in left]

    async def _ingest(
        self, task: _Task, source: Source, principal: Principal, destination: Destination, outcome: Outcome
    ) -> None:
        self.watcher.note(task.wanted.path)
        former, also = task.former, self.also

        async def with_document(session: Session, _: Ingested) -> None:
            if also is not None:
                await also(session)

        done = await ingest(
            source,
            principal=principal,
            destination=destination,
            database=self.database,
            embedder=self.embedder,
            max_bytes=divide.bound(task.wanted.part, self.settings.rag_max_document_bytes),
            chunking=self.settings.rag_chunking,
            former=None if former is None else (former["source_type"], former["source_id"]),
            force=task.reason in ("no chunks", "other model"),
            progress=lambda embedded, total: self.watcher.note(f"{task.wanted.path} {embedded}/{total}"),
            also=with_document,
        )
        outcome.embedded += done.embedded

    async def _remove(self, gone: Sequence[Mapping[str, Any]], principal: Principal, outcome: Outcome) -> None:
        self.watcher.start(len(gone), f"removing from {outcome.source}")
        for row in gone:
            self.watcher.note(row["path"])
            try:
                await store.remove_document(
                    self.database,
                    principal,
                    row["id"],
                    reason="gone at the source",
                    updated_at=row["updated_at"],
                    also=self.also,
                )
            except DocumentNotFound:
                pass  # somebody else was quicker
            except SourceRetracted:
                outcome.gone.remove(row["path"])
                outcome.failures.append(Failure(path=row["path"], reason="was written meanwhile"))
            self.watcher.step()


@asynccontextmanager
async def _listed(spec: SourceSpec) -> AsyncIterator[Listing]:
    """The listing of a source, made and ended in a thread: a fetch takes minutes."""
    context = spec.listing()
    listing = await asyncio.to_thread(context.__enter__)
    try:
        yield listing
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def _failure(path: str, error: Exception) -> Failure:
    if isinstance(error, OSError):
        reason = (error.strerror or "cannot be read").lower()
    else:
        reason = str(error).removeprefix(path).lstrip(": ")
    # A name of the file system may hold bytes that are no text.
    return Failure(path=path.encode("utf-8", "replace").decode(), reason=reason)
