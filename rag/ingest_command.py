"""`rag ingest`: files and directories go in, and what cannot is named with its reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rag import screen
from rag.command import (
    FULL,
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    read_settings,
    run,
    run_as_batch,
    tags_of,
    tenant_of,
)
from rag.errors import (
    EmbeddingInvalid,
    InvalidInput,
    QuotaExceeded,
    RAGServiceError,
    SourceInvalidated,
    SourceRetracted,
    first_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A file that was not ingested, and why."""

    path: Path
    reason: str


def ingest(
    # Not checked by typer: one that is not readable would keep the others out.
    paths: Annotated[list[Path], typer.Argument(help="Files and directories.", readable=False)],
    scope: Annotated[str | None, typer.Option(help="public, user or project.")] = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    language: Annotated[str | None, typer.Option(help="ISO 639-1 code; detected when left out.")] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of text that is not UTF-8 and does not say so, such as cp1252 or shift_jis.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Add or replace documents: Markdown, text, YAML, HTML, PDF, Word, Excel, CSV, EPUB.

    A file that cannot be read is named, and the others go in. A text or table that is too large for one document
    becomes several. Exit code 1: a file failed. 3: a quota is full, and what had not been taken in was left out.
    """
    run(_ingest(paths, scope, user, project, tags, tenant, language, encoding, as_json))


async def _ingest(
    paths: list[Path],
    scope: str | None,
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
    language: str | None,
    encoding: str | None,
    as_json: bool,
) -> int:
    from rag import deployment, divide
    from rag.active_model import close_models, find_active, open_models
    from rag.ingest import PARALLEL_DOCUMENTS, Ingested, Source, ingest
    from rag.parse import check_encoding
    from rag.principal import PUBLIC_TAGS, Principal, check_user_id
    from rag.store import destination_of

    settings = read_settings()
    wanted_tags = tags_of(tags)
    user_id = None if user is None else check_user_id(user)
    if encoding is not None:
        check_encoding(encoding)
    if scope is None:
        scope = "project" if project is not None else "user"
    # Checked before anything is started: these need no database.
    draft = Principal(tenant_id=tenant or "unchecked", user_id=user_id, project_id=project, tags=wanted_tags)
    destination = destination_of(draft, scope=scope, tags=wanted_tags)
    failures, files, skipped = _gather(paths)
    place = deployment.locate(settings)
    run_as_batch()
    principal = Principal(
        tenant_id=tenant_of(tenant, place.default_tenant),
        user_id=user_id,
        project_id=project,
        # A document that went in without tags must be seen by whoever restricts it, or a copy would stay open.
        tags=(*wanted_tags, *PUBLIC_TAGS),
    )

    done: list[tuple[Path, Ingested]] = []
    opened = open_models(settings)
    embedder = opened[0].embedder
    database = place.open(settings)
    turn = asyncio.Semaphore(PARALLEL_DOCUMENTS)
    # What was to be written when a quota was found full, and why.
    left: list[Path] = []
    full: QuotaExceeded | None = None

    async def one(path: Path, counter: screen.Counter) -> None:
        nonlocal full
        async with turn:
            if full is not None:
                left.append(path)
                return
            counter.note(path.name)
            name = _source_id(path)
            try:
                known = path.stat()
                with path.open("rb") as file:
                    contents = divide.contents(
                        file,
                        name=name,
                        size=known.st_size,
                        max_bytes=settings.rag_max_document_bytes,
                        max_file_bytes=settings.rag_max_file_bytes,
                        encoding=encoding,
                    )
                    # Part by part, so that no more than one is in memory.
                    async with contextlib.aclosing(divide.in_threads(contents)) as parts:
                        async for part, content in parts:
                            shown = divide.shown(path.name, part)
                            source = Source(
                                name=name,
                                source_id=divide.id_of(name, part),
                                content=content,
                                title=divide.title_of(name, part),
                                source_uri=path.resolve().as_uri(),
                                source_updated_at=datetime.fromtimestamp(known.st_mtime, UTC),
                                language=language,
                                encoding=encoding,
                            )
                            ingested = await ingest(
                                source,
                                principal=principal,
                                destination=destination,
                                database=database,
                                embedder=embedder,
                                max_bytes=divide.bound(part, settings.rag_max_document_bytes),
                                chunking=settings.rag_chunking,
                                progress=partial(counter.told, shown),
                            )
                            done.append((path if part is None else path.with_name(shown), ingested))
            except QuotaExceeded as error:
                full = error
                left.append(path)
            except (InvalidInput, EmbeddingInvalid, SourceInvalidated, SourceRetracted) as error:
                # Of this document alone; what the database or the provider lacks, all others lack as well.
                # Most messages name the document, and the line begins with the path already.
                reason = error.message.removeprefix(_source_id(path)).lstrip(": ")
                failures.append(Failure(path=path, reason=reason))
            except OSError as error:
                failures.append(_unreadable(path, error))
            counter.step()

    try:
        async with database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            with screen.counting(len(files), "ingesting") as counter:
                async with asyncio.TaskGroup() as group:
                    for path in files:
                        group.create_task(one(path, counter))
    except* RAGServiceError as group_error:
        raise first_of(group_error) from group_error
    finally:
        await close_models(opened)
    why = None if full is None else full.message
    _report(done, failures, skipped, principal.tenant_id, full=why, left=left, as_json=as_json)
    return FULL if full is not None else 1 if failures else 0


def _gather(paths: list[Path]) -> tuple[list[Failure], list[Path], int]:
    """Files to ingest, in order; what was named and is not there; how many of other formats were left out.

    Of a directory, hidden files (but project specifications) and links to elsewhere are passed over.
    """
    from rag.parse import SUFFIXES

    failures: list[Failure] = []
    files: list[Path] = []
    skipped = 0

    def below(folder: Path) -> Iterator[Path]:
        try:
            for entry in sorted(folder.iterdir()):
                if entry.is_symlink():
                    continue
                if entry.is_dir() and not entry.name.startswith("."):
                    yield from below(entry)
                elif entry.is_file() and (not entry.name.startswith(".") or entry.stem == ".project-spec"):
                    yield entry
        except OSError as error:
            failures.append(_unreadable(folder, error))

    for path in paths:
        try:
            if path.is_dir():
                for file in below(path):
                    if file.suffix.lower() in SUFFIXES:
                        files.append(file)
                    else:
                        skipped += 1
            elif path.is_file():
                files.append(path)
            else:
                # Reading a pipe would wait for whoever writes into it.
                path.stat()
                failures.append(Failure(path=path, reason="neither a file nor a directory"))
        except OSError as error:
            failures.append(_unreadable(path, error))
    return failures, list(dict.fromkeys(files)), skipped


def _unreadable(path: Path, error: OSError) -> Failure:
    return Failure(path=path, reason=(error.strerror or "cannot be read").lower())


def _source_id(path: Path) -> str:
    """The path below the working directory, or the absolute one elsewhere.

    From the same directory the same file is the same document; a project may move with its database.
    """
    resolved = path.resolve()
    try:
        return resolved.relative_to(Path.cwd()).as_posix()
    except ValueError:
        return resolved.as_posix()


def _report(
    done: list[tuple[Path, Any]],
    failures: list[Failure],
    skipped: int,
    tenant: str,
    *,
    full: str | None,
    left: Sequence[Path],
    as_json: bool,
) -> None:
    counts = dict.fromkeys(("created", "updated", "moved", "unchanged"), 0)
    for _, ingested in done:
        counts[ingested.status] += 1
    embedded = sum(ingested.embedded for _, ingested in done)
    if as_json:
        import json

        screen.print_json(
            json.dumps(
                {
                    "tenant_id": tenant,
                    **counts,
                    "failed": len(failures),
                    "skipped": skipped,
                    "chunks_embedded": embedded,
                    "documents": [
                        {
                            "path": str(path),
                            "document_id": str(ingested.document_id),
                            "status": ingested.status,
                            "chunks": ingested.chunks,
                            "embedded": ingested.embedded,
                        }
                        for path, ingested in done
                    ],
                    "failures": [{"path": str(failure.path), "reason": failure.reason} for failure in failures],
                    "full": full,
                    "waiting": [str(path) for path in left],
                }
            )
        )
    else:
        said = ", ".join(f"{number} {status}" for status, number in counts.items() if number) or "nothing"
        screen.out.print(f"tenant {screen.shown(tenant)}: {said}; {embedded} chunks embedded")
        if skipped:
            screen.out.print(f"{skipped} files of other formats left out")
    for failure in failures:
        screen.err.print(f"[red]error:[/red] {screen.shown(str(failure.path))}: {screen.shown(failure.reason)}")
    if full is not None:
        # Those that went in are named as well: this is where somebody goes on by hand.
        if not as_json:
            for path, ingested in done:
                screen.out.print(f"  {ingested.status:<11} {screen.shown(str(path))}")
        screen.err.print(
            f"[red]error:[/red] {screen.shown(full)}; {len(left)} files were not taken in, or not all of each"
        )
