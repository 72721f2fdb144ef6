"""What a push to a repository means: which sources it concerns, and the jobs that bring these up to date.

A job brings a source to the tip that its branch has when the job begins. So the order in which pushes are told of does
not matter, and an old one takes nothing back. Whose a source becomes is said by RAG_SOURCES and never by a push.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from rag import jobs, tasks
from rag.database import Database
from rag.errors import InvalidInput
from rag.gather import PathFilter, is_listed
from rag.jobs import Request
from rag.parse import SUFFIXES
from rag.sync import SourceSpec, load_specs

# More are not looked at: to read a source for nothing costs less than to compare them all.
MAX_PATHS = 5_000

Effect = Literal["queued", "duplicate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """A branch or a tag of a repository that has moved."""

    repository: str
    """`owner/name`, in any case: GitHub's names have none."""
    ref: str
    """In full: `refs/heads/main`."""
    default_branch: str | None = None
    deleted: bool = False
    paths: Collection[str] | None = None
    """What its commits touch; None when that is not known, and then it may be anything."""


def load_followed(path: Path) -> list[SourceSpec]:
    """The sources of a file that follow a repository on GitHub. Raises InvalidInput, and for one that is nobody's."""
    specs = [spec for spec in load_specs(path) if spec.github is not None]
    for spec in specs:
        try:
            tasks.synchronisation(spec)
        except InvalidInput as error:
            raise InvalidInput(f"RAG_SOURCES: source {spec.name}: {error.message}", field="RAG_SOURCES") from error
    return specs


def concerned(push: Push, specs: Iterable[SourceSpec]) -> list[SourceSpec]:
    """The sources that may not be as their repository has them since the push."""
    if push.deleted:
        # There is no tip to go to; what is in the index stays.
        return []
    return [
        spec
        for spec in specs
        if spec.github is not None
        and spec.github.lower() == push.repository.lower()
        and _follows(spec, push)
        and _touches(push.paths, spec)
    ]


def _follows(spec: SourceSpec, push: Push) -> bool:
    if spec.ref == "HEAD":
        branch = push.ref.removeprefix("refs/heads/")
        return branch != push.ref and push.default_branch in (None, branch)
    return push.ref in (spec.ref, f"refs/heads/{spec.ref}", f"refs/tags/{spec.ref}")


def _touches(paths: Collection[str] | None, spec: SourceSpec) -> bool:
    if not paths or len(paths) > MAX_PATHS:
        return True
    chosen = PathFilter(include=spec.include, exclude=spec.exclude)
    return any(
        PurePosixPath(path).suffix.lower() in SUFFIXES and is_listed(path) and chosen.allows(path) for path in paths
    )


async def announce(
    database: Database, specs: Sequence[SourceSpec], *, delivery: bytes, max_waiting: int
) -> dict[str, Effect]:
    """Ask for each source to be brought up to date, as its owner; what came of that, by the name of the source.

    `delivery` is a digest of what was sent and signed. The same again is a duplicate for as long as an idempotency key
    is kept, and does nothing. A source whose job nobody has begun gets no second one: that one will see this push as
    well. Raises QueueFull, DatabaseError; what was asked for before that stays asked for, and the same delivery once
    more asks for the rest.
    """
    return {spec.name: await _announce(database, spec, delivery, max_waiting) for spec in specs}


async def _announce(database: Database, spec: SourceSpec, delivery: bytes, max_waiting: int) -> Effect:
    wanted = tasks.synchronisation(spec)
    # With a NUL, which no Idempotency-Key has.
    named = hashlib.sha256(b"push\0" + spec.name.encode() + b"\0" + delivery).digest()
    request = Request(key=named, digest=delivery)
    async with database.transaction(spec.principal(None)) as session:
        if await jobs.answered(session, request) is not None:
            return "duplicate"
        waiting = await jobs.waiting(session, wanted)
        # Once more: whoever brought the same at the same time has ended by now.
        if await jobs.answered(session, request) is not None:
            return "duplicate"
        if waiting is None:
            await jobs.enqueue(session, wanted, max_waiting=max_waiting, request=request)
        else:
            await jobs.record(session, wanted, request, result={"job": str(waiting)})
    return "queued"
