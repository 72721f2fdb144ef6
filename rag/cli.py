"""The command `rag`."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn
from uuid import UUID

import structlog
import typer

from rag import screen
from rag.command import (
    JOBS_AT_ONCE,
    AllTenantsOption,
    DryRunOption,
    JsonOption,
    MemberOption,
    OwnerOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    YesOption,
)
from rag.command import age_of as _age
from rag.command import as_principal as _as_principal
from rag.command import cell as _cell
from rag.command import noun as _noun
from rag.command import open_desk as _desk
from rag.command import print_rows as _print_rows
from rag.command import read_settings as _settings
from rag.command import run as _run
from rag.command import tags_of as _tags
from rag.command import tenant_of as _tenant
from rag.command import words_of as _list
from rag.docs_command import docs
from rag.errors import (
    DatabaseUnavailable,
    DocumentNotFound,
    EmbeddingInvalid,
    InvalidInput,
    QuotaExceeded,
    RAGServiceError,
    SourceInvalidated,
    SourceRetracted,
    first_of,
)
from rag.reindex_command import reindex

if TYPE_CHECKING:
    from rag.calibrate import Calibration
    from rag.database import Database
    from rag.evaluate import Report
    from rag.operate import Desk
    from rag.principal import Principal
    from rag.store import Scope
    from rag.sync import Outcome, SourceSpec

app = typer.Typer(
    help="Palisade: documents go in, cited answers come out, and the database decides who may retrieve what.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
db = typer.Typer(help="The embedded database.", no_args_is_help=True)
app.add_typer(db, name="db")
jobs = typer.Typer(help="What the service has put off for workers.", no_args_is_help=True)
app.add_typer(jobs, name="jobs")
keys = typer.Typer(help="Keys of trusted services, and those that the service signs with.", no_args_is_help=True)
app.add_typer(keys, name="keys")
analyst = typer.Typer(help="People who query the views with a login of their own.", no_args_is_help=True)
app.add_typer(analyst, name="analyst")
project = typer.Typer(help="Projects that their owner shares.", no_args_is_help=True)
app.add_typer(project, name="project")
calibration = typer.Typer(help="What `rag eval --calibrate` wrote.", no_args_is_help=True)
app.add_typer(calibration, name="calibration")
models = typer.Typer(no_args_is_help=True, help="Change the embedding model while the service goes on.")
app.add_typer(models, name="models")
tags = typer.Typer(help="Who owns a tag: whom to ask when an answer is not sure enough.", no_args_is_help=True)
app.add_typer(tags, name="tags")
prompts = typer.Typer(help="What tenants tell the model, before the rules that always hold.", no_args_is_help=True)
app.add_typer(prompts, name="prompts")
app.add_typer(docs, name="docs")
app.command()(reindex)
limits = typer.Typer(
    help="How much tenants may ask and store; nothing is limited unless it is set.", no_args_is_help=True
)
app.add_typer(limits, name="limits")


# Exit code when a quota is full.
FULL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A file that was not ingested, and why."""

    path: Path
    reason: str


def main() -> None:
    """Run a command; an error of ours is one line and exit code 1, without a traceback."""
    # Standard output belongs to what was asked for.
    structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    # Each failed attempt to connect is a warning of two lines; the error that follows is one.
    logging.getLogger("psycopg.pool").setLevel(logging.CRITICAL)
    try:
        app()
    except RAGServiceError as error:
        _fail(error)


def _fail(error: RAGServiceError) -> NoReturn:
    field = f" ({error.field})" if error.field and error.field not in error.message else ""
    screen.err.print(f"[red]error:[/red] {screen.shown(error.message)}{screen.shown(field)}")
    raise SystemExit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(importlib.metadata.version("palisade-rag"))
        raise typer.Exit


@app.callback()
def _before(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo() -> None:
    """Ingest a sample corpus and ask the same questions as several people."""
    from rag.demo import run

    _run(run(_settings()))


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve the API: for end users and services, as the settings say; else on loopback, with a token that it prints."""
    from api.serve import run

    run(_settings(), host=host, port=port)


@app.command()
def worker(
    concurrency: Annotated[
        int, typer.Option("--jobs", min=1, max=100, help="Jobs that are done at once.")
    ] = JOBS_AT_ONCE,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when no job is waiting.")] = False,
) -> None:
    """Do the jobs that the service has put off; on any number of machines. RAG_DATABASE_URL logs in as rag_worker.

    On SIGTERM the jobs under way are ended first; a second later nothing new has begun.
    """
    from rag import deployment, log, work

    settings = _settings()
    log.as_json()

    async def run() -> int:
        place = deployment.locate(settings)
        async with work.opened(settings, place.open_worker(settings)) as bench:
            await work.work(bench, url=place.worker_url, concurrency=concurrency, until_empty=until_empty)
        return 0

    _run(run())


@jobs.command("list")
def jobs_list(
    status: Annotated[str | None, typer.Option(help="pending, processing, succeeded, failed or cancelled.")] = None,
    tenant: AllTenantsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Jobs, latest first, and why those failed that did; as rag_operator."""
    from rag.jobs import listed

    with _desk().session() as session:
        _print_rows("jobs", listed(session, tenant_id=tenant, status=status), as_json=as_json)


@jobs.command("retry")
def jobs_retry(ids: Annotated[list[UUID], typer.Argument(help="Jobs that failed.")]) -> None:
    """Put jobs that failed into the queue again; as rag_operator."""
    from rag.jobs import resubmit

    with _desk().session() as session:
        done = resubmit(session, ids)
    _tell_of(done, len(ids), "put into the queue again")


@jobs.command("cancel")
def jobs_cancel(ids: Annotated[list[UUID], typer.Argument(help="Jobs that have not succeeded.")]) -> None:
    """Cancel jobs, and remove what was sent with them; one that is under way stores nothing. As rag_operator."""
    from rag.jobs import cancel_all

    with _desk().session() as session:
        done = cancel_all(session, ids)
    _tell_of(done, len(ids), "cancelled")


def _tell_of(done: int, wanted: int, what: str) -> None:
    screen.out.print(f"{done} of {wanted} {_noun(wanted, 'job')} {what}.")
    if done < wanted:
        raise SystemExit(1)


@app.command()
def migrate(
    sql: Annotated[bool, typer.Option("--sql", help="Print the script instead of running it.")] = False,
) -> None:
    """Bring the database to the schema of this version."""
    from rag import deployment
    from rag import migrate as migrations

    settings = _settings()
    dimensions = settings.rag_embedding_dimensions
    if sql:
        migrations.print_script(dimensions=dimensions)
    elif settings.rag_migration_database_url is not None:
        migrations.upgrade(settings.rag_migration_database_url.get_secret_value(), dimensions=dimensions)
    elif settings.rag_database_url is not None:
        raise InvalidInput(
            "RAG_MIGRATION_DATABASE_URL must be set as well: rag_app may not migrate",
            field="RAG_MIGRATION_DATABASE_URL",
        )
    else:
        deployment.locate(settings)
    if not sql:
        screen.out.print(f"The database is at revision {migrations.head_revision()}.")


@app.command()
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
    _run(_ingest(paths, scope, user, project, tags, tenant, language, encoding, as_json))


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

    settings = _settings()
    wanted_tags = _tags(tags)
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
    principal = Principal(
        tenant_id=_tenant(tenant, place.default_tenant),
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


@app.command()
def query(
    question: Annotated[str, typer.Argument(help="The question.")],
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    scope: Annotated[str | None, typer.Option(help="Narrow to public, user, project or organization.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Passages to read.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model of the allow-list.")] = None,
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    fusion: Annotated[str, typer.Option(help="rank or score.")] = "rank",
    as_json: JsonOption = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the answer while it is written; with --json an event a line.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate and why it was kept.")] = False,
    source: Annotated[
        str | None, typer.Option(help="With --explain: each stage of this document (its id) or passage (id:index).")
    ] = None,
) -> None:
    """Ask a question as somebody."""
    _run(
        _query(
            question, user, project, tags, tenant, scope, top_k, model, mode, fusion, as_json, stream, explain, source
        )
    )


async def _query(
    question: str,
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
    scope: str | None,
    top_k: int | None,
    model: str | None,
    mode: str,
    fusion: str,
    as_json: bool,
    stream: bool,
    explain: bool,
    source: str | None,
) -> int:
    from rag import deployment
    from rag.answer import RAGService, check_request
    from rag.exchange import RAGRequest
    from rag.principal import Principal, check_user_id

    if explain and as_json:
        raise InvalidInput("--explain is a table; --json has the same figures under `passages`", field="--explain")
    if explain and stream:
        raise InvalidInput("--explain is a table and writes no answer", field="--stream")
    if source is not None and not explain:
        raise InvalidInput("--source goes with --explain", field="--source")
    document_id, chunk_index = (None, None) if source is None else _source(source)
    settings = _settings()
    request = RAGRequest(
        query=question,
        scope=scope,  # type: ignore[arg-type]
        max_context_chunks=top_k,
        model=model,
        mode=mode,  # type: ignore[arg-type]
        fusion=fusion,  # type: ignore[arg-type]
    )
    asker = {
        "user_id": None if user is None else check_user_id(user),
        "project_id": project,
        "tags": _tags(tags),
    }
    check_request(request, Principal(tenant_id=tenant or "unchecked", **asker))  # type: ignore[arg-type]
    if settings.rag_database_url is None and not settings.rag_home.exists():
        # Made here it would be empty, and no answer would tell that it is the wrong one.
        home = settings.rag_home.absolute()
        raise DatabaseUnavailable(f"there is no embedded database in {home}; `rag ingest` makes one, or set RAG_HOME")
    place = deployment.locate(settings)
    principal = Principal(tenant_id=_tenant(tenant, place.default_tenant), **asker)  # type: ignore[arg-type]
    async with place.open(settings) as database:
        await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
        async with RAGService(settings, database) as service:
            if document_id is not None:
                stages = await service.explain(request, document_id, chunk_index, principal=principal)
                screen.print_stages(stages)
                return 0 if stages else 1
            if explain:
                found = await service.search(request, principal=principal, include_dropped=True)
                screen.print_passages(found.passages, found.dropped)
                for note in found.degraded:
                    screen.out.print(f"[yellow]note:[/yellow] {screen.shown(note)}")
                return 0
            if stream:
                async with contextlib.aclosing(service.stream(request, principal=principal)) as told:
                    async for event in told:
                        screen.print_event(event, as_json=as_json)
                return 0
            response = await service.generate(request, principal=principal)
    if as_json:
        screen.print_json(screen.as_json(response))
    else:
        screen.print_answer(response)
    return 0


def _source(named: str) -> tuple[UUID, int | None]:
    document, colon, index = named.partition(":")
    try:
        if colon and not (index.isascii() and index.isdecimal() and len(index) < 10):
            raise ValueError(index)
        return UUID(document), int(index) if colon else None
    except ValueError as error:
        raise InvalidInput("--source must be a document's id, or a passage's: id:index", field="--source") from error


@db.command("start")
def db_start() -> None:
    """Start the embedded database, and make it when there is none."""
    from rag import deployment, embedded

    settings = _settings()
    server = embedded.start(settings.rag_home)
    deployment.prepare(server, settings)
    screen.out.print(
        f"PostgreSQL {server.major} runs on port {server.port}, its home is {screen.shown(str(server.home))}."
    )


@db.command("stop")
def db_stop() -> None:
    """Stop the embedded database."""
    from rag import embedded

    stopped = embedded.stop(_settings().rag_home)
    screen.out.print("Stopped." if stopped else "It was not running.")


@db.command("rebuild")
def db_rebuild(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the embedded database with everything in it, and make it anew."""
    from rag import deployment

    settings = _settings()
    if not yes:
        typer.confirm(f"Delete everything in {settings.rag_home}?", abort=True)
    server = deployment.rebuild(settings)
    screen.out.print(f"Made anew, on port {server.port}.")


@db.command("url")
def db_url(
    role: Annotated[
        str, typer.Option(help="rag_app, rag_publisher, rag_migrator, rag_operator or postgres.")
    ] = "rag_app",
) -> None:
    """Print a connection URL of the embedded database, password included."""
    from rag import deployment, embedded

    settings = _settings()
    server = embedded.start(settings.rag_home)
    deployment.prepare(server, settings)
    screen.print_json(server.url(role))


@db.command("psql", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def db_psql(
    context: typer.Context,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    role: Annotated[str, typer.Option(help="Login role.")] = "rag_app",
) -> None:
    """Open psql as somebody, signed for 12 hours; further arguments go to psql (`-- -c 'select …'`)."""
    from rag import terminal
    from rag.principal import Principal, check_user_id

    place = terminal.reach(_settings(), role)
    principal = Principal(
        tenant_id=_tenant(tenant, place.default_tenant),
        user_id=None if user is None else check_user_id(user),
        project_id=project,
        tags=_tags(tags),
    )
    raise SystemExit(terminal.run(place, principal, role, context.args))


# --- sources -------------------------------------------------------------------------------------

EmptyOption = Annotated[
    bool, typer.Option("--allow-empty", help="Let a source without any file remove all that came from it.")
]


@app.command()
def sync(
    place: Annotated[str, typer.Argument(help="A directory, or with --git a repository or its https address.")],
    name: Annotated[str, typer.Option(help="What to call the source, for good: it is in each document's source id.")],
    git: Annotated[bool, typer.Option("--git", help="Take the files of a commit and not of the folder.")] = False,
    ref: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "HEAD",
    include: Annotated[list[str] | None, typer.Option(help="Only paths like this: 'docs/**/*.md'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No paths like this: 'drafts/'.")] = None,
    types: Annotated[
        str | None, typer.Option(help="Only these source types, comma-separated; v1 for spec 002's.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="public, user or project.")] = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    language: Annotated[str | None, typer.Option(help="ISO 639-1 code; detected when left out.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of text that is not UTF-8 and does not say so.")] = None,
    dry_run: DryRunOption = False,
    allow_empty: EmptyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the documents of a source what its files are: new, changed, moved and removed ones.

    What was ingested otherwise is never touched. Exit code 1: something failed, or --dry-run found
    something to do. 3: a quota is full.
    """
    from pydantic import ValidationError

    from rag.principal import check_user_id
    from rag.sync import SourceSpec

    where: dict[str, Any] = {"git": place} if git else {"directory": Path(place)}
    try:
        spec = SourceSpec(
            name=name,
            **where,
            ref=ref,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            types=_list(types),
            tenant=tenant,
            scope=scope or ("project" if project is not None else "user"),  # type: ignore[arg-type]
            user=None if user is None else check_user_id(user),
            project=project,
            tags=_tags(tags),
            language=language,
            encoding=encoding,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"{field}: {first['msg']}", field=field) from error
    _run(_synchronise([spec], dry_run=dry_run, allow_empty=allow_empty, thorough=False, as_json=as_json))


@app.command()
def reconcile(
    names: Annotated[list[str] | None, typer.Argument(help="Sources of RAG_SOURCES; all unless given.")] = None,
    dry_run: DryRunOption = False,
    allow_empty: EmptyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find and mend what differs from the sources that RAG_SOURCES names, and what a search would miss of them.

    Exit code 0: nothing is left to mend. 1: something is, or failed. 2: a source could not be listed; of that one
    nothing was changed. 3: a quota is full.
    """
    from rag.sync import load_specs

    settings = _settings()
    if settings.rag_sources is None:
        raise InvalidInput("RAG_SOURCES must name a file of sources (docs/sources.md)", field="RAG_SOURCES")
    specs = load_specs(settings.rag_sources)
    unknown = set(names or ()) - {spec.name for spec in specs}
    if unknown:
        raise InvalidInput(f"RAG_SOURCES has no source {sorted(unknown)[0]}", field="RAG_SOURCES")
    chosen = [spec for spec in specs if not names or spec.name in names]
    _run(_synchronise(chosen, dry_run=dry_run, allow_empty=allow_empty, thorough=True, as_json=as_json))


async def _synchronise(
    specs: Sequence[SourceSpec], *, dry_run: bool, allow_empty: bool, thorough: bool, as_json: bool
) -> int:
    from rag import deployment
    from rag.active_model import close_models, find_active, open_models
    from rag.errors import SourceUnavailable
    from rag.sync import Synchroniser

    settings = _settings()
    place = deployment.locate(settings)
    opened = open_models(settings)
    outcomes: list[Outcome] = []
    unavailable: dict[str, str] = {}
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            with screen.watching() as watcher:
                synchroniser = Synchroniser(
                    settings=settings,
                    database=database,
                    embedder=embedder,
                    default_tenant=place.default_tenant,
                    watcher=watcher,
                )
                for spec in specs:
                    try:
                        outcomes.append(
                            await synchroniser.sync(spec, dry_run=dry_run, allow_empty=allow_empty, thorough=thorough)
                        )
                    except SourceUnavailable as error:
                        # The others are not to wait for it.
                        unavailable[spec.name] = error.message
    finally:
        await close_models(opened)
    _report_sources(outcomes, unavailable, dry_run=dry_run, as_json=as_json)
    if unavailable:
        return 2
    if any(outcome.full for outcome in outcomes):
        return FULL
    left = any(outcome.failures or outcome.kept or (dry_run and outcome.drift) for outcome in outcomes)
    return 1 if left else 0


def _report_sources(
    outcomes: Sequence[Outcome], unavailable: Mapping[str, str], *, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        sources = [asdict(outcome) | {"drift": outcome.drift} for outcome in outcomes]
        broken = [{"source": name, "reason": reason} for name, reason in unavailable.items()]
        screen.print_json(json.dumps({"dry_run": dry_run, "sources": sources, "unavailable": broken}))
    else:
        for outcome in outcomes:
            counts: dict[str, int] = {}
            for change in outcome.changes:
                counts[change.reason] = counts.get(change.reason, 0) + 1
                former = "" if change.former_path is None else f" (was {change.former_path})"
                screen.out.print(f"  {change.reason:<11} {screen.shown(change.path + former)}")
            for path in outcome.gone:
                screen.out.print(f"  {'gone':<11} {screen.shown(path)}")
            counts |= {"gone": len(outcome.gone), "unchanged": outcome.unchanged}
            said = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "nothing"
            version = f" at {outcome.version[:12]}" if outcome.version else ""
            done = "; nothing was changed" if dry_run else f"; {outcome.embedded} chunks embedded"
            screen.out.print(f"{screen.shown(outcome.source)}{version}: {said}{done}")
            if outcome.left_out:
                screen.out.print(f"{outcome.left_out} files of other formats or types left out")
    for outcome in outcomes:
        if outcome.kept:
            screen.err.print(
                f"[red]error:[/red] {screen.shown(outcome.source)}: the source is empty, and its {len(outcome.kept)} "
                "documents stay; --allow-empty removes them"
            )
        for failure in outcome.failures:
            place = f"{outcome.source}:{failure.path}"
            screen.err.print(f"[red]error:[/red] {screen.shown(place)}: {screen.shown(failure.reason)}")
        if outcome.full is not None:
            said = f"{outcome.source}: {outcome.full}; {len(outcome.waiting)} documents were not taken in"
            screen.err.print(f"[red]error:[/red] {screen.shown(said)}")
    for name, reason in unavailable.items():
        screen.err.print(f"[red]error:[/red] {screen.shown(name)}: {screen.shown(reason)}")


@app.command()
def status(
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count what somebody sees of each source: documents, chunks, and what is old, behind or not found by a search.

    Then what came of the last synchronisation of each; `succeeded_at` is of the last one without failures.
    """
    _run(_as_principal(partial(_status, as_json=as_json), user, project, tags, tenant))


async def _status(database: Database, principal: Principal, *, as_json: bool) -> int:
    from rag.active_model import active_model
    from rag.store import count_sources, list_synchronisations

    async with active_model(_settings(), database) as model:
        rows = await count_sources(database, principal, embedding_model=model.id)
    runs = await list_synchronisations(database, principal)
    if as_json:
        import json

        found = {"sources": rows, "synchronisations": runs}
        screen.print_json(json.dumps(found, default=str, ensure_ascii=False))
        return 0
    _print_rows("sources", rows, as_json=False)
    if runs:
        screen.out.print()
        _print_rows("synchronisations", runs, as_json=False)
    return 0


# --- what an operator does -----------------------------------------------------------------------


@keys.command("sign")
def keys_sign() -> None:
    """Print a new key for the service to sign with, once; it counts beside the others."""
    from rag import operate

    screen.print_json(f"RAG_SIGNING_KEY={operate.add_signing_key(_desk())}")
    screen.err.print(
        "Give it to the service, restart that, and then retire the old key: `rag keys signing` lists them."
    )


@keys.command("signing")
def keys_signing(as_json: JsonOption = False) -> None:
    """List the keys that the service may sign with, oldest first; their secrets are shown to nobody."""
    with _desk().session() as session:
        _print_rows("signing_keys", session.rows("list_signing_keys", {}), as_json=as_json)


@keys.command("retire")
def keys_retire(
    key_id: Annotated[str, typer.Argument(help="The part of RAG_SIGNING_KEY before the full stop.")],
    yes: Annotated[bool, typer.Option("--yes", help="Even the last one.")] = False,
) -> None:
    """End a signing key: what was signed with it is worthless from the next statement on."""
    from rag import operate

    replaced = operate.retire_signing_key(_desk(), key_id, even_last=yes)
    screen.out.print(f"Retired {screen.shown(key_id)}.")
    if replaced:
        screen.out.print("The embedded database signs with a new key; restart what runs on it.")


@keys.command("add")
def keys_add(
    name: Annotated[str, typer.Argument(help="What to call it.")],
    tenant: TenantOption = None,
    actions: Annotated[str, typer.Option(help="Comma-separated: query, ingest, delete.")] = "query",
    scopes: Annotated[str, typer.Option(help="Scopes to write, comma-separated: public, user, project.")] = "",
    tags: Annotated[str, typer.Option(help="Tags to assert and write, comma-separated; * for any.")] = "public",
    act_as: Annotated[bool, typer.Option("--act-as", help="It may name a user and a project.")] = False,
    user: Annotated[list[str] | None, typer.Option(help="A user that it may name; any unless given.")] = None,
    project: Annotated[list[str] | None, typer.Option(help="A project that it may name; any unless given.")] = None,
    expires: Annotated[str, typer.Option(help="How long it is valid: 90d, 12h, 4w.")] = "90d",
) -> None:
    """Print a new key of a trusted service, once."""
    from rag import operate
    from rag.principal import check_user_id

    valid_for = _age(expires, "expires")
    desk = _desk()
    grant = operate.KeyGrant(
        tenant_id=_tenant(tenant, desk.default_tenant),
        name=name,
        actions=_list(actions),
        scopes=_list(scopes),
        tags=None if tags == "*" else _tags(tags),
        act_as=act_as,
        user_ids=tuple(map(check_user_id, user)) if user else None,
        project_ids=tuple(project) if project else None,
        valid_for=valid_for,
    )
    with desk.session() as session:
        key = operate.add_key(session, grant)
    screen.print_json(key.text)
    screen.err.print(f"Key {key.key_id} of tenant {screen.shown(grant.tenant_id)}, valid for {expires}.")


@keys.command("list")
def keys_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List the keys of trusted services, also those that ended."""
    with _desk().session() as session:
        _print_rows("keys", session.rows("list_keys", {"tenant_id": tenant}), as_json=as_json)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The 16 digits after rag_.")],
    tenant: AllTenantsOption = None,
) -> None:
    """End a key of a trusted service; the running service sees it within five seconds."""
    from rag import operate

    with _desk().session() as session:
        for row in operate.revoke_key(session, key_id, tenant_id=tenant):
            screen.out.print(f"Revoked {screen.shown(row['name'])} of tenant {screen.shown(row['tenant_id'])}.")


@keys.command("audit")
def keys_audit(
    tenant: AllTenantsOption = None,
    since: Annotated[str, typer.Option(help="How far back: 7d, 24h.")] = "7d",
    top: Annotated[int, typer.Option(min=1, max=100_000, help="Rows, newest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List for whom trusted services spoke."""
    wanted = {"tenant_id": tenant, "since": _age(since, "since"), "top": top}
    with _desk().session() as session:
        _print_rows("assertions", session.rows("list_assertions", wanted), as_json=as_json)


@analyst.command("add")
def analyst_add(
    name: Annotated[str, typer.Argument(help="The login role; made when there is none.")],
    tenant: TenantOption = None,
    tags: TagsOption = None,
    projects: Annotated[str | None, typer.Option(help="Projects of any owner, comma-separated; * for all.")] = None,
    user_scope: Annotated[str, typer.Option(help="Of users' own documents: none, metadata or text.")] = "metadata",
    ask_password: Annotated[bool, typer.Option(help="Ask for the password of a new login; else it is made.")] = False,
    only_print: Annotated[bool, typer.Option("--print", help="Print the SQL, and run nothing.")] = False,
) -> None:
    """Let a person query the views of a tenant, and print the SQL that it took."""
    from rag import analysts

    desk = _desk()
    wanted = analysts.Analyst(
        role_name=name,
        tenant_id=_tenant(tenant, desk.default_tenant),
        tags=_tags(tags),
        projects=_list(projects),
        user_scope=user_scope,  # type: ignore[arg-type]
    )
    with desk.session() as session:
        statements = analysts.needed(session, wanted)
        password = None
        if not only_print and any(statement.makes_login for statement in statements):
            password = _typed_password() if ask_password else analysts.new_password()
            statements = analysts.needed(session, wanted, password=password)
    if not only_print:
        analysts.admit(desk, wanted, statements)
    for statement in statements:
        screen.print_json(f"{statement.shown};")
    if only_print and any(statement.makes_login for statement in statements):
        screen.print_json(f"\\password {name}")
    if not statements:
        screen.err.print(f"{name} is admitted already, to exactly this.")
    if password is not None and not ask_password:
        screen.err.print(f"Password, shown this once: {password}")


def _typed_password() -> str:
    return str(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))


@analyst.command("list")
def analyst_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List the analysts, and whether their logins let them see."""
    with _desk().session() as session:
        _print_rows("analysts", session.rows("list_analysts", {"tenant_id": tenant}), as_json=as_json)


@analyst.command("remove")
def analyst_remove(
    name: Annotated[str, typer.Argument(help="The login role.")],
    tenant: AllTenantsOption = None,
) -> None:
    """Take an analyst's rights away, from their next statement on. The login itself stays."""
    from rag import analysts

    desk = _desk()
    with desk.session() as session:
        leaving = analysts.dismiss(session, name, tenant_id=tenant)
    screen.out.print(f"{screen.shown(name)} sees nothing any more.")
    if leaving and desk.administrator_url is not None:
        with desk.administration() as session:
            for statement in leaving:
                session.run_text(statement)
    else:
        screen.err.print("An administrator has yet to run:" if leaving else "")
    for statement in leaving:
        screen.print_json(f"{statement};")
    screen.err.print(screen.shown(f'To drop the login: drop role "{name}";'))


@project.command("share")
def project_share(
    name: Annotated[str, typer.Argument(help="The owner's name of the project.", metavar="PROJECT")],
    owner: OwnerOption,
    member: MemberOption,
    tenant: TenantOption = None,
    write: Annotated[bool, typer.Option("--write", help="They may also write to it.")] = False,
) -> None:
    """Share a user's project with another user of the tenant, or change whether they may write."""
    from rag import operate

    desk = _desk()
    membership = _membership(desk, name, owner, member, tenant)
    with desk.session() as session:
        operate.share(session, membership, may_write=write)
    screen.out.print(f"User {member} {'writes' if write else 'reads'} {screen.shown(name)} of user {owner}.")


@project.command("unshare")
def project_unshare(
    name: Annotated[str, typer.Argument(help="The owner's name of the project.", metavar="PROJECT")],
    owner: OwnerOption,
    member: MemberOption,
    tenant: TenantOption = None,
) -> None:
    """End the sharing of a project with a user."""
    from rag import operate

    desk = _desk()
    membership = _membership(desk, name, owner, member, tenant)
    with desk.session() as session:
        operate.unshare(session, membership)
    screen.out.print(f"User {member} does not see {screen.shown(name)} of user {owner} any more.")


def _membership(desk: Desk, name: str, owner: str, member: str, tenant: str | None) -> Any:
    from rag.operate import Membership
    from rag.principal import check_user_id

    return Membership(
        tenant_id=_tenant(tenant, desk.default_tenant),
        owner_user_id=check_user_id(owner, field="owner"),
        project_id=name,
        member_user_id=check_user_id(member, field="member"),
    )


@project.command("members")
def project_members(
    name: Annotated[str | None, typer.Argument(help="A project; all unless given.", metavar="[PROJECT]")] = None,
    owner: Annotated[str | None, typer.Option(help="User id of who owns it.")] = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """List who shares which project with whom."""
    from rag.principal import check_user_id

    desk = _desk()
    wanted = {
        "tenant_id": _tenant(tenant, desk.default_tenant),
        "project_id": name,
        "owner_user_id": None if owner is None else check_user_id(owner, field="owner"),
    }
    with desk.session() as session:
        _print_rows("members", session.rows("list_members", wanted), as_json=as_json)


@tags.command("set")
def tags_set(
    name: Annotated[str, typer.Argument(help="The tag.", metavar="TAG")],
    owner: Annotated[str | None, typer.Option(help="User id of who owns it.")] = None,
    email: Annotated[str | None, typer.Option(help="Where the owner is reached.")] = None,
    tenant: TenantOption = None,
) -> None:
    """Name the owner of a tag: a user, an address, or both; instead of the one before."""
    from rag.principal import check_user_id
    from rag.tags import TagOwner, set_owner

    desk = _desk()
    owned = TagOwner(
        tenant_id=_tenant(tenant, desk.default_tenant),
        name=name,
        owner_user_id=None if owner is None else check_user_id(owner, field="owner"),
        owner_email=email,
    )
    with desk.session() as session:
        set_owner(session, owned)
    whom = " ".join(part for part in (owner and f"user {owner}", email) if part)
    screen.out.print(f"Questions about {screen.shown(name)} go to {screen.shown(whom)}.")


@tags.command("list")
def tags_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List tags and their owners."""
    from rag.tags import list_owners

    with _desk().session() as session:
        _print_rows("tags", list_owners(session, tenant), as_json=as_json)


@tags.command("remove")
def tags_remove(
    name: Annotated[str, typer.Argument(help="The tag.", metavar="TAG")],
    tenant: TenantOption = None,
) -> None:
    """Take a tag's owner away; what is asked about it goes to the administrator."""
    from rag.tags import remove_owner

    desk = _desk()
    tenant_id = _tenant(tenant, desk.default_tenant)
    with desk.session() as session:
        remove_owner(session, tenant_id=tenant_id, name=name)
    screen.out.print(f"Questions about {screen.shown(name)} go to the administrator.")


@prompts.command("set")
def prompts_set(
    file: Annotated[Path, typer.Argument(help="The text, in UTF-8; - for standard input.", metavar="FILE")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Instead of the service's introduction, and not after it.")
    ] = False,
    tenant: TenantOption = None,
) -> None:
    """Set what a tenant tells the model, from its next question on."""
    from rag.tenant_prompts import MAX_PROMPT_BYTES, set_prompt

    desk = _desk()
    tenant_id = _tenant(tenant, desk.default_tenant)
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if str(file) == "-" else file.open("rb") as given:
            # One byte more than permitted says that there is too much, however large it is.
            prompt = given.read(MAX_PROMPT_BYTES + 1).decode()
    except OSError as error:
        raise InvalidInput(f"{file} cannot be read: {error.strerror}", field="FILE") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the prompt is not UTF-8, or is longer than {MAX_PROMPT_BYTES} bytes", field="FILE"
        ) from error
    with desk.session() as session:
        generation = set_prompt(session, tenant_id=tenant_id, prompt=prompt, replaces=replace)
    screen.out.print(f"Tenant {screen.shown(tenant_id)} has its prompt, generation {generation}.")


@prompts.command("show")
def prompts_show(tenant: TenantOption = None) -> None:
    """Print what a tenant tells the model."""
    from rag.tenant_prompts import list_prompts

    desk = _desk()
    tenant_id = _tenant(tenant, desk.default_tenant)
    with desk.session() as session:
        found = list_prompts(session, tenant_id)
    if not found:
        raise InvalidInput("this tenant has no prompt: `rag prompts list` has all of them", field="tenant_id")
    for line in found[0]["prompt"].splitlines():
        screen.out.print(screen.shown(line))


@prompts.command("list")
def prompts_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List which tenants tell the model something, and how much; with --json also what."""
    from rag.tenant_prompts import list_prompts

    with _desk().session() as session:
        found = list_prompts(session, tenant)
    if not as_json:
        found = [{name: value for name, value in row.items() if name != "prompt"} for row in found]
    _print_rows("prompts", found, as_json=as_json)


@prompts.command("remove")
def prompts_remove(tenant: TenantOption = None) -> None:
    """Take a tenant's prompt away, from its next question on."""
    from rag.tenant_prompts import remove_prompt

    desk = _desk()
    tenant_id = _tenant(tenant, desk.default_tenant)
    with desk.session() as session:
        remove_prompt(session, tenant_id)
    screen.out.print(f"Tenant {screen.shown(tenant_id)} tells the model nothing of its own.")


EveryOption = Annotated[bool, typer.Option("--default", help="Of all tenants that have no limits of their own.")]


@limits.command("set")
def limits_set(
    tenant: TenantOption = None,
    default: EveryOption = False,
    queries_per_minute: Annotated[str | None, typer.Option(metavar="N|none", help="Questions in the long run.")] = None,
    query_burst: Annotated[
        str | None,
        typer.Option(metavar="N|none", help="Questions at once after a pause; those of a minute unless set."),
    ] = None,
    ingests_per_minute: Annotated[
        str | None, typer.Option(metavar="N|none", help="Documents sent in the long run.")
    ] = None,
    ingest_burst: Annotated[
        str | None, typer.Option(metavar="N|none", help="Documents sent at once after a pause.")
    ] = None,
    documents: Annotated[str | None, typer.Option(metavar="N|none", help="Documents stored.")] = None,
    size: Annotated[str | None, typer.Option("--bytes", metavar="N|none", help="Of the text stored, in UTF-8.")] = None,
) -> None:
    """Set limits of a tenant, from its next request on; those that are not named stay. 0 allows nothing."""
    from rag.limits import set_limits

    given = {
        "queries_per_minute": queries_per_minute,
        "query_burst": query_burst,
        "ingests_per_minute": ingests_per_minute,
        "ingest_burst": ingest_burst,
        "documents": documents,
        "bytes": size,
    }
    changed = {name: _limit(text, name) for name, text in given.items() if text is not None}
    desk = _desk()
    tenant_id = _limited(tenant, default, desk.default_tenant)
    with desk.session() as session:
        set_limits(session, tenant_id=tenant_id, changed=changed)
    said = ", ".join(f"{name} {'none' if value is None else value}" for name, value in changed.items())
    screen.out.print(f"{_limited_name(tenant_id)}: {said}.")


@limits.command("list")
def limits_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List limits and what is used of them; `own` are those of the tenant alone, the others hold by default."""
    from rag.limits import EVERYBODY_ELSE, list_limits

    with _desk().session() as session:
        found = list_limits(session, tenant)
    if not as_json:
        found = [row | {"tenant_id": row["tenant_id"] or "(default)"} for row in found]
    else:
        found = [row | {"default": row["tenant_id"] == EVERYBODY_ELSE} for row in found]
    _print_rows("limits", found, as_json=as_json)


@limits.command("remove")
def limits_remove(tenant: TenantOption = None, default: EveryOption = False) -> None:
    """Take a tenant's own limits away: what holds by default holds for it."""
    from rag.limits import remove_limits

    desk = _desk()
    tenant_id = _limited(tenant, default, desk.default_tenant)
    with desk.session() as session:
        remove_limits(session, tenant_id)
    screen.out.print(f"{_limited_name(tenant_id)}: no limits of its own.")


@limits.command("recount")
def limits_recount(
    tenant: Annotated[str | None, typer.Option("--tenant", help="This one; unless given those that differ.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Count anew what tenants have stored, after somebody changed documents by hand; writers wait meanwhile."""
    from rag.limits import drifted, recount

    with _desk().session() as session:
        found = [row for row in drifted(session) if tenant in (None, row["tenant_id"])]
        recount(session, [row["tenant_id"] for row in found])
    _print_rows("differences", found, as_json=as_json)


def _limit(text: str, name: str) -> int | None:
    if text == "none":
        return None
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        raise InvalidInput(f"{name} must be a whole number, or none", field=name)
    return int(text)


def _limited(tenant: str | None, default: bool, default_tenant: str | None) -> str:
    from rag.limits import EVERYBODY_ELSE

    if default and tenant is not None:
        raise InvalidInput("--default is for those that --tenant does not name", field="tenant_id")
    return EVERYBODY_ELSE if default else _tenant(tenant, default_tenant)


def _limited_name(tenant_id: str) -> str:
    return f"Tenant {screen.shown(tenant_id)}" if tenant_id else "All other tenants"


@app.command("explain-access")
def explain_access(
    document: Annotated[UUID, typer.Argument(help="The document's id.")],
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show why somebody sees a document, or does not: its class, and each clause of the rule."""
    from rag import operate
    from rag.principal import Principal, check_user_id

    desk = _desk()
    somebody = Principal(
        tenant_id=_tenant(tenant, desk.default_tenant),
        user_id=None if user is None else check_user_id(user),
        project_id=project,
        tags=_tags(tags),
    )
    with desk.session() as session:
        found = operate.explain_access(session, document, somebody)
    if not found:
        raise DocumentNotFound
    if as_json:
        _print_rows("clauses", found, as_json=True)
        return
    for access_id in dict.fromkeys(row["access_id"] for row in found):
        clauses = [row for row in found if row["access_id"] == access_id]
        about = {name: clauses[0][name] for name in ("access_id", "scope", "owner_user_id", "owner_project_id")}
        _print_rows("class", [about | {"tags": clauses[0]["class_tags"]}], as_json=False)
        for row in clauses:
            screen.out.print(f"  {_cell(row['holds']):<4}{screen.shown(row['clause'])}")
        screen.out.print("visible" if clauses[0]["visible"] else "not visible")


@app.command()
def forget(
    tenant: AllTenantsOption = None,
    user: Annotated[str | None, typer.Option(help="A user, with all that they own, asked and share.")] = None,
    project: Annotated[str | None, typer.Option(help="A project; of every owner unless --owner is given.")] = None,
    owner: Annotated[str | None, typer.Option(help="User id of who owns the project.")] = None,
    source: Annotated[str | None, typer.Option(help="A source, by its source_id, in all classes.")] = None,
    source_type: Annotated[str | None, typer.Option(help="Of this type alone.")] = None,
    logs_older_than: Annotated[str | None, typer.Option(help="Instead: questions and assertions, by age: 90d.")] = None,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Erase what is stored of a tenant, a user, a project or a source, and look whether it is gone."""
    from rag.erase import Subject
    from rag.principal import check_user_id

    named = (user, project, owner, source, source_type)
    if logs_older_than is not None:
        if named != (None,) * len(named):
            raise InvalidInput("--logs-older-than goes with --tenant alone", field="logs_older_than")
        _forget_logs(_age(logs_older_than, "logs_older_than"), tenant, yes=yes, as_json=as_json)
        return
    if tenant is None:
        raise InvalidInput("--tenant is required", field="tenant_id")
    if owner is not None and (project is None or user is not None):
        raise InvalidInput("--owner goes with --project, and a user without one is --user", field="owner")
    if user is not None and project is not None:
        raise InvalidInput("either --user with all that they own, or --project with its --owner", field="user_id")
    somebody = user if owner is None else owner
    subject = Subject(
        tenant_id=tenant,
        user_id=None if somebody is None else check_user_id(somebody),
        project_id=project,
        source_type=source_type,
        source_id=source,
    )
    if not _forget(subject, yes=yes, as_json=as_json):
        raise SystemExit(1)


def _forget(subject: Any, *, yes: bool, as_json: bool) -> bool:
    """Show, ask, erase, count again, each by itself; True when nothing is left."""
    from rag import erase

    desk = _desk()
    with desk.session() as session:
        found = erase.count_traces(session, subject)
    if not as_json:
        _print_rows("traces", [{"table": table, "rows": rows} for table, rows in found.items()], as_json=False)
    if not yes:
        typer.confirm(f"Erase {screen.shown(str(subject))}, for ever?", abort=True, err=True)
    with screen.counting(2, "forgetting") as counter:
        counter.note("erasing, in one transaction")
        with desk.session() as session:
            removed = erase.forget(session, subject)
        counter.step()
        counter.note("looking whether it is gone")
        with desk.session() as session:
            left = erase.count_traces(session, subject)
        counter.step()
    if as_json:
        import json

        screen.print_json(
            json.dumps({"subject": str(subject), "found": found, "removed": removed, "left": left}, ensure_ascii=False)
        )
    else:
        screen.out.print(f"Erased {screen.shown(str(subject))}: {sum(removed.values())} rows.")
    for table, rows in left.items():
        if rows:
            screen.err.print(f"[red]error:[/red] {rows} rows in {table} were written since: run it again")
    return not any(left.values())


def _forget_logs(older_than: timedelta, tenant: str | None, *, yes: bool, as_json: bool) -> None:
    from rag import erase

    desk = _desk()
    if not yes:
        whose = "all tenants" if tenant is None else f"tenant {screen.shown(tenant)}"
        typer.confirm(f"Remove what was asked in {whose} and is older than that?", abort=True, err=True)
    with screen.counting(1, "removing what is older") as counter, desk.session() as session:
        removed = erase.expire_logs(session, older_than=older_than, tenant_id=tenant)
        counter.step()
    if as_json:
        screen.print_json(f'{{"removed": {removed}}}')
    else:
        screen.out.print(f"Removed {removed} questions and assertions.")


# --- what is taken back ---------------------------------------------------------------------------


DocumentsOption = Annotated[list[UUID] | None, typer.Option("--document", help="Id of a document; repeatable.")]
SourcesOption = Annotated[list[str] | None, typer.Option("--source", help="Id of a source; repeatable.")]
ProvenancesOption = Annotated[
    list[str] | None, typer.Option("--provenance", help="What documents were derived of; repeatable.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; stays in the record.")]
OnlyScopeOption = Annotated[str | None, typer.Option("--scope", help="Only public, user or project.")]


@app.command()
def invalidate(
    reason: ReasonOption,
    document: DocumentsOption = None,
    source: SourcesOption = None,
    provenance: ProvenancesOption = None,
    cascade: Annotated[
        bool, typer.Option("--cascade/--no-cascade", help="Also what is derived of them, and so on.")
    ] = True,
    cascade_id: Annotated[
        str | None, typer.Option("--cascade-id", help="Names what is invalidated together; made when left out.")
    ] = None,
    scope: OnlyScopeOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove documents, and refuse their sources until they are reinstated."""
    from dataclasses import asdict

    from rag import invalidate as room
    from rag.store import destination_of

    targets = room.Targets(document_ids=document or (), source_ids=source or (), provenance_ids=provenance or ())

    async def work(database: Database, principal: Principal) -> int:
        done = await room.invalidate(
            targets,
            reason=reason,
            principal=principal,
            database=database,
            cascade_id=cascade_id,
            cascades=cascade,
            destination=None if scope is None else destination_of(principal, scope=scope),
            scopes=_scopes(scope),
        )
        if as_json:
            import json

            screen.print_json(json.dumps(asdict(done), default=str))
            return 0
        count = len(done.documents)
        screen.out.print(f"Removed {count} {_noun(count, 'document')} ({done.chunks} {_noun(done.chunks, 'chunk')}).")
        if done.kept:
            screen.err.print(f"Kept, since they are not yours to remove: {', '.join(map(str, done.kept))}")
        if done.generation is not None:
            screen.out.print(f"Cascade {screen.shown(done.cascade_id)}, generation {done.generation}.")
        return 0

    _run(_as_principal(work, user, project, tags, tenant))


@app.command()
def reinstate(
    reason: ReasonOption,
    document: DocumentsOption = None,
    source: SourcesOption = None,
    provenance: ProvenancesOption = None,
    cascade_id: Annotated[
        list[str] | None, typer.Option("--cascade-id", help="All that was invalidated under it; repeatable.")
    ] = None,
    scope: OnlyScopeOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let sources that were invalidated be ingested again; what was removed has to be sent again."""
    from rag import invalidate as room

    targets = room.Targets(
        document_ids=document or (),
        source_ids=source or (),
        provenance_ids=provenance or (),
        cascade_ids=cascade_id or (),
    )

    async def work(database: Database, principal: Principal) -> int:
        opened = await room.reinstate(
            targets, reason=reason, principal=principal, database=database, scopes=_scopes(scope)
        )
        if as_json:
            screen.print_json(f'{{"reinstated": {opened}}}')
        else:
            screen.out.print(f"Reinstated {opened}.")
        return 0

    _run(_as_principal(work, user, project, tags, tenant))


@app.command()
def retractions(
    tenant: AllTenantsOption = None,
    since: Annotated[str, typer.Option(help="How far back: 7d, 24h.")] = "7d",
    top: Annotated[int, typer.Option(min=1, max=100_000, help="Rows, newest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List who invalidated and reinstated what, and why."""
    wanted = {"tenant_id": tenant, "since": _age(since, "since"), "top": top}
    with _desk().session() as session:
        _print_rows("retractions", session.rows("list_retractions", wanted), as_json=as_json)


def _scopes(scope: str | None) -> tuple[Scope, ...]:
    from rag.store import SCOPES

    found = tuple(one for one in SCOPES if scope in (None, one))
    if not found:
        raise InvalidInput(f"scope must be one of {', '.join(SCOPES)}", field="scope")
    return found


# --- how well it retrieves ------------------------------------------------------------------------


@app.command("eval")
def evaluate(
    folders: Annotated[list[Path], typer.Argument(help="Directories in BEIR's layout.", metavar="DIR…")],
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    fusion: Annotated[str, typer.Option(help="rank or score.")] = "rank",
    corpus: Annotated[
        Path | None, typer.Option(help="Whose corpus.jsonl the questions are about, when it is not the directory's.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Then find weights and a minimum similarity that are better for a tenant."),
    ] = False,
    tenant: Annotated[
        str | None,
        typer.Option(help="With --calibrate: whose searches go by them; the embedded database has `default`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure retrieval on judged collections: recall, MRR, nDCG, latency, and what is told from foreign questions.

    A directory has corpus.jsonl, queries.jsonl and qrels.tsv, or abstain.jsonl, or both. It is ingested into a tenant
    of its own, which is erased at the end. What is measured is what is shipped, whatever was calibrated for a tenant.
    """
    if not calibrate:
        if tenant is not None:
            raise InvalidInput(
                "--tenant goes with --calibrate: a measurement has a tenant of its own", field="--tenant"
            )
        _run(_evaluate(folders, mode, fusion, corpus, as_json))
        return
    if mode != "hybrid":
        raise InvalidInput(f"--calibrate weighs two arms, and mode {mode} has one", field="--mode")
    if len(folders) > 1:
        raise InvalidInput("--calibrate takes one directory, the tenant's own questions", field="DIR")
    _run(_calibrate(folders[0], fusion, corpus, tenant, as_json))


async def _evaluate(folders: list[Path], mode: str, fusion: str, corpus: Path | None, as_json: bool) -> int:
    from rag import deployment, evaluate
    from rag.active_model import close_models, find_active, open_models
    from rag.exchange import FUSIONS, MODES

    if mode not in MODES:
        raise InvalidInput(f"--mode must be one of {', '.join(MODES)}", field="--mode")
    if fusion not in FUSIONS:
        raise InvalidInput(f"--fusion must be one of {', '.join(FUSIONS)}", field="--fusion")
    settings = _settings()
    collections = [evaluate.load(folder, corpus=corpus) for folder in folders]
    place = deployment.locate(settings)
    opened = open_models(settings)
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            reports = await evaluate.evaluate(
                collections,
                engine=evaluate.Engine(database=database, embedder=embedder, settings=settings),
                place=place,
                mode=mode,
                fusion=fusion,
            )
    finally:
        await close_models(opened)
    if as_json:
        _print_measured(reports, embedder.model_id, mode, fusion, {})
    else:
        _print_reports(reports)
    return 0


async def _calibrate(folder: Path, fusion: str, corpus: Path | None, tenant: str | None, as_json: bool) -> int:
    import dataclasses

    from rag import deployment, evaluate, operate
    from rag.active_model import close_models, find_active, open_models
    from rag.calibrate import calibrate
    from rag.exchange import FUSIONS
    from rag.principal import check_name

    if fusion not in FUSIONS:
        raise InvalidInput(f"--fusion must be one of {', '.join(FUSIONS)}", field="--fusion")
    settings = _settings()
    collection = evaluate.load(folder, corpus=corpus)
    desk = operate.locate(settings)
    tenant_id = check_name(_tenant(tenant, desk.default_tenant), field="--tenant")
    place = deployment.locate(settings)
    opened = open_models(settings)
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            report, found = await calibrate(
                collection,
                engine=evaluate.Engine(database=database, embedder=embedder, settings=settings),
                place=place,
                desk=desk,
                tenant_id=tenant_id,
                fusion=fusion,
            )
    finally:
        await close_models(opened)
    if as_json:
        _print_measured([report], embedder.model_id, "hybrid", fusion, {"calibration": dataclasses.asdict(found)})
    else:
        _print_reports([report])
        _print_calibration(found)
    return 0


def _print_measured(
    reports: Sequence[Report], embedding_model: str, mode: str, fusion: str, more: Mapping[str, Any]
) -> None:
    import dataclasses
    import json

    described = {"embedding_model": embedding_model, "mode": mode, "fusion": fusion}
    collections = [dataclasses.asdict(report) for report in reports]
    screen.print_json(json.dumps({**described, "collections": collections, **more}, ensure_ascii=False))


def _print_calibration(found: Calibration) -> None:
    """What was found for each language, from what to what; what it was measured to be worth; and how to undo it."""
    import shlex

    from rag.calibrate import MIN_QUESTIONS, named

    def change(before: float, after: float, form: str) -> str:
        return format(before, form) if before == after else f"{before:{form}} → {after:{form}}"

    rows = [
        {
            "language": named(each.language),
            "questions": each.questions,
            "weight of the vectors": change(each.before.vector_share, each.after.vector_share, ".2f"),
            "minimum similarity": change(each.before.min_similarity, each.after.min_similarity, ".2f"),
            "nDCG@10": change(each.ndcg_before, each.ndcg_after, ".3f"),
            "written": each.is_better,
        }
        for each in found.refinements
    ]
    _print_rows("calibration", rows, as_json=False)
    for language, questions in found.too_few.items():
        screen.err.print(
            f"{named(language)}: {questions} judged questions say nothing certain; it takes {MIN_QUESTIONS}"
        )
    if any(each.is_better for each in found.refinements):
        undo = ["rag", "calibration", "remove", "--tenant", found.tenant_id]
        undo += ["--model", found.embedding_model, "--fusion", found.fusion]
        screen.err.print(f"Searches of tenant {screen.shown(found.tenant_id)} go by it from now on.")
        screen.err.print("To go back to what is shipped:")
        screen.err.print(screen.shown(shlex.join(undo)))
    else:
        screen.err.print("Nothing was better on questions that did not choose it: nothing is changed.")


def _print_reports(reports: Sequence[Report]) -> None:
    judged = [
        {
            "collection": report.name,
            "documents": report.documents,
            "chunks": report.chunks,
            "questions": report.judged,
            "R@1": f"{report.scores.recall_at_1:.3f}",
            "R@5": f"{report.scores.recall_at_5:.3f}",
            "R@10": f"{report.scores.recall_at_10:.3f}",
            "MRR@10": f"{report.scores.mrr_at_10:.3f}",
            "nDCG@10": f"{report.scores.ndcg_at_10:.3f}",
            "p50 ms": f"{report.latency_p50_ms:.1f}",
            "p95 ms": f"{report.latency_p95_ms:.1f}",
        }
        for report in reports
        if report.scores is not None
    ]
    refused = [
        {
            "collection": report.name,
            "kind": kind,
            "questions": group.questions,
            "refused": f"{group.refused:.1%}",
            "kept answerable": f"{report.abstention.kept:.1%} of {report.abstention.answerable}",
            "threshold": f"{report.abstention.threshold:.3f}",
            "p50 ms": f"{report.latency_p50_ms:.1f}",
            "p95 ms": f"{report.latency_p95_ms:.1f}",
        }
        for report in reports
        if report.abstention is not None
        for kind, group in sorted(report.abstention.others.items())
    ]
    if judged:
        _print_rows("collections", judged, as_json=False)
    if refused:
        _print_rows("kinds of questions", refused, as_json=False)
    for report in reports:
        for number, what in (
            (len(report.left_out), "documents were left out, such as those without text"),
            (report.unjudged, "questions without a relevant document were not asked"),
            (report.unreachable, "questions count as not found: no chunk has half of their answer"),
        ):
            if number:
                screen.err.print(f"{screen.shown(report.name)}: {number} {what}")


@calibration.command("list")
def calibration_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List what counts for tenants instead of what is shipped, and what it was measured to be worth."""
    with _desk().session() as session:
        _print_rows("calibrations", session.rows("list_calibrations", {"tenant_id": tenant}), as_json=as_json)


@calibration.command("remove")
def calibration_remove(
    tenant: TenantOption = None,
    model: Annotated[str | None, typer.Option(help="Of this embedding model alone.")] = None,
    fusion: Annotated[str | None, typer.Option(help="Of this fusion alone: rank or score.")] = None,
) -> None:
    """Let what is shipped count again for a tenant, from its next search on."""
    desk = _desk()
    wanted = {"tenant_id": _tenant(tenant, desk.default_tenant), "embedding_model": model, "fusion": fusion}
    with desk.session() as session:
        removed = session.rows("remove_calibrations", wanted)
    if not removed:
        raise InvalidInput("there is no such calibration: `rag calibration list` has all of them", field="--tenant")
    screen.out.print(f"Removed {len(removed)} of tenant {screen.shown(wanted['tenant_id'] or '')}.")


@app.command()
def maintain(
    refresh: Annotated[bool, typer.Option("--refresh", help="Count the words of every large class anew.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also rebuild indexes that have bloated, while they are used.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Instead: remove questions and assertions that are too old.")
    ] = False,
    only_plan: Annotated[
        bool, typer.Option("--plan", "--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(min=1, max=1_048_576, help="MB for building an index of vectors; as it needs, at most 1,024."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give large access classes indexes and statistics of their own, and take them from those that shrank.

    Reading and writing go on meanwhile. Exit code 1 when something is left for a DBA, whose SQL it prints.

    With --retention it goes by RAG_LOG_RETENTION_DAYS, RAG_AUDIT_RETENTION_DAYS and RAG_MESSAGE_RETENTION_DAYS, in all
    tenants.
    """
    from rag import maintain as care
    from rag import operate

    if retention:
        if refresh or rebuild or memory is not None:
            raise InvalidInput("--retention goes with --dry-run and --json alone", field="--retention")
        from rag.retention_command import retention as retain

        retain(dry_run=only_plan, as_json=as_json)
        return
    settings = _settings()
    desk = operate.locate(settings)
    if only_plan:
        with desk.session() as session:
            found = care.survey(session, care.Limits())
        _print_care(care.plan(found, care.Limits(), refresh=refresh, rebuild=rebuild), None, found, as_json=as_json)
        return
    with care.alone(desk, settings, owner_url=care.owner_url(desk, settings), memory_mb=memory) as turn:
        if turn is None:
            screen.err.print("Another `rag maintain` is at work; nothing is done.")
            if as_json:
                screen.print_json('{"running": true}')
            return
        wanted = care.plan(turn.survey(), turn.limits, refresh=refresh, rebuild=rebuild)
        with screen.counting(len(wanted.steps), "maintaining") as counter:
            left = turn.carry_out(wanted.steps, _told(counter))
        found = turn.survey()
    _print_care(wanted, left, found, as_json=as_json)
    if left:
        raise SystemExit(1)


def _told(counter: screen.Counter) -> Any:
    """What is being done: on a terminal beside the bar, elsewhere a line for each step and each quarter of it."""
    last: list[object] = []

    def tell(step: object, phase: str, share: float | None) -> None:
        if not phase and share is not None:
            counter.step()
            return
        percent = "" if share is None else f" {share:.0%}"
        said = f"{step}" if not phase else f"{step} ({phase}{percent})"
        counter.note(said)
        now = [step, phase, None if share is None else int(share * 4)]
        if not screen.err.is_terminal and now != last:
            screen.err.print(screen.shown(said))
        last[:] = now

    return tell


def _print_care(plan: Any, left: Any, found: Any, *, as_json: bool) -> None:
    """What was done, or would be when `left` is None; what is left; and what there is."""
    from rag import maintain as care

    reports = care.as_rows(care.report(found))
    if as_json:
        import json

        steps = {
            "planned" if left is None else "done": [str(step) for step in plan.steps if step not in (left or ())],
            "left": [{"step": str(step), "statement": step.statement} for step in left or ()],
        }
        more = {
            "left_out": [{"access_id": each.access_id, "chunks": each.chunks} for each in plan.left_out],
            "bloated": care.bloated(found),
            "classes": reports,
        }
        screen.print_json(json.dumps(steps | more))
        return
    if left is None:
        for step in plan.steps:
            screen.out.print(screen.shown(str(step)))
    _print_rows("classes_with_indexes_of_their_own", reports, as_json=False)
    for each in plan.left_out:
        screen.err.print(
            f"class {each.access_id} has {each.chunks} chunks and no room among the {care.MOST_CLASSES} that have "
            "indexes of their own: searches read all of it"
        )
    for statement in care.bloated(found):
        screen.err.print(f"An index has bloated; at a quiet hour --rebuild, or as its owner: {statement};")
    if left:
        screen.err.print(
            "RAG_MIGRATION_DATABASE_URL is not set, and only the owner of the tables builds indexes: run this as "
            "rag_owner, and `rag maintain` again afterwards"
        )
    for step in left or ():
        if step.statement is not None:
            screen.print_json(f"{step.statement};")


@models.command("list")
def models_list(as_json: JsonOption = False) -> None:
    """List the embedding models of the database, and how far the second one is filled."""
    from rag import models as change

    with change.bench(change.owner_url(_settings())) as at:
        state = at.state()
    if as_json:
        _print_state(state)
        return
    if not state.places:
        screen.out.print("No model was ever added beside the first one: RAG_EMBEDDING_MODEL is taken at its word.")
        return
    for place in state.places:
        kind = "active" if place.place == "active" else "former" if place.is_former else "coming"
        screen.out.print(screen.shown(f"{kind}: {place.model_id}, {place.dimensions} dimensions"))
    if state.second is not None:
        missing = f"; {state.missing_indexes} indexes are missing" if state.missing_indexes else ""
        screen.out.print(f"  {state.filled} of {state.chunks} chunks have its vector{missing}")


def _print_state(state: Any) -> None:
    import dataclasses
    import json

    screen.print_json(json.dumps(dataclasses.asdict(state) | {"is_ready": state.is_ready}, default=str))


def _two_models() -> tuple[Any, Any]:
    """The model of the settings and the one that is to come, opened."""
    from rag.active_model import open_models

    opened = open_models(_settings())
    if len(opened) < 2:
        raise InvalidInput("RAG_EMBEDDING_NEXT_MODEL must name the other model", field="RAG_EMBEDDING_NEXT_MODEL")
    return opened[0], opened[1]


def _second_of(at: Any) -> Any:
    """The embedder of the second model, which may be either of the settings'."""
    from rag.active_model import open_models

    second = at.state().second
    if second is None:
        raise InvalidInput("there is no second model: `rag models add` adds it", field="RAG_EMBEDDING_NEXT_MODEL")
    for model in open_models(_settings()):
        if model.id == second.model_id:
            return model.embedder
    raise InvalidInput(
        f"the second model is {second.model_id}, which neither RAG_EMBEDDING_MODEL nor RAG_EMBEDDING_NEXT_MODEL names",
        field="RAG_EMBEDDING_NEXT_MODEL",
    )


async def _closing(embedder: Any, step: Any) -> Any:
    """Do a step, and let go of the embedder's connections in the loop that opened them."""
    try:
        return await step
    finally:
        await embedder.close()


@models.command("add")
def models_add(as_json: JsonOption = False) -> None:
    """Add a column for the model that RAG_EMBEDDING_NEXT_MODEL names, beside the one of RAG_EMBEDDING_MODEL."""
    from rag import models as change

    settings = _settings()
    active, coming = _two_models()
    with change.bench(change.owner_url(settings)) as at:
        asyncio.run(change.add(at, active=active, coming=coming))
        state = at.state()
    if as_json:
        _print_state(state)
        return
    screen.out.print(screen.shown(f"Added {coming.id} beside {active.id}: {state.chunks} chunks are to be filled."))
    screen.out.print("Next: rag models fill")


@models.command("fill")
def models_fill(
    chunks_per_minute: Annotated[int | None, typer.Option(min=1, help="As many chunks a minute at most.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="As many tokens a minute at most.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Give every chunk a vector of the second model; reading and writing go on. Run it again after whatever stopped it.

    Exit code 1 when it stopped before the end; what was filled stays.
    """
    import dataclasses
    import json

    from rag import models as change

    pace = change.Pace(chunks_per_minute=chunks_per_minute, tokens_per_minute=tokens_per_minute)
    with change.bench(change.owner_url(_settings())) as at:
        embedder = _second_of(at)
        state = at.state()
        with screen.counting(max(state.chunks - state.filled, 1), "filling") as counter:
            before = state.filled

            def tell(done: int, total: int, what: str) -> None:
                nonlocal before
                counter.note(what)
                for _ in range(done - before):
                    counter.step()
                before = done

            found = asyncio.run(_closing(embedder, change.fill(at, embedder, pace=pace, tell=tell)))
    if as_json:
        screen.print_json(json.dumps(dataclasses.asdict(found)))
        return
    screen.out.print(f"Filled {found.chunks} chunks, {found.tokens} tokens, in {found.seconds:.0f} s.")
    if found.recomposed:
        screen.out.print(f"  {found.recomposed} of them with more or less of their headings than before.")


@models.command("compare")
def models_compare(
    questions: Annotated[
        Path | None, typer.Option(help="A file with a question a line; else what was asked last.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Chunks.")] = 10,
    judged: Annotated[
        list[Path] | None, typer.Option("--eval", help="A judged collection, as for `rag eval`; may be repeated.")
    ] = None,
    tenant: TenantOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the second model with the active one: the share of nearest chunks in common, and `rag eval` on both.

    With --eval and without --questions it runs `rag eval` alone.
    """
    _run(_compare_models(questions, top_k, judged or [], tenant, user, project, tags, as_json))


async def _compare_models(
    file: Path | None,
    top_k: int,
    folders: list[Path],
    tenant: str | None,
    user: str | None,
    project: str | None,
    tags: str | None,
    as_json: bool,
) -> int:
    import dataclasses
    import json

    from rag import compare_models as comparing
    from rag import deployment, evaluate
    from rag.active_model import close_models, find_active
    from rag.principal import Principal, check_user_id

    settings = _settings()
    collections = [evaluate.load(folder) for folder in folders]
    opened = _two_models()
    place = deployment.locate(settings)
    agreement = None
    overlaps = []
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            active = await find_active(opened, database)
            (second,) = (model for model in opened if model is not active)
            if file is not None or not folders:
                principal = Principal(
                    tenant_id=_tenant(tenant, place.default_tenant),
                    user_id=None if user is None else check_user_id(user),
                    project_id=project,
                    tags=_tags(tags),
                )
                if file is None:
                    asked = await comparing.questions_of(database, principal)
                else:
                    asked = comparing.questions_in(file)
                overlaps = await comparing.compare(
                    asked, principal=principal, database=database, active=active, second=second, top_k=top_k
                )
                agreement = comparing.Agreement.of(overlaps)
        reports = await comparing.evaluate_both(collections, (active, second), mode="hybrid", fusion="rank")
    finally:
        await close_models(opened)
    if as_json:
        described = {
            "active": active.id,
            "second": second.id,
            "top_k": top_k,
            "overlap": None if agreement is None else dataclasses.asdict(agreement),
            "questions": [dataclasses.asdict(overlap) | {"share": overlap.share} for overlap in overlaps],
            "eval": {
                model.id: [dataclasses.asdict(report) for report in of]
                for model, of in zip((active, second), reports, strict=True)
            },
        }
        screen.print_json(json.dumps(described, default=str, ensure_ascii=False))
        return 0
    if agreement is not None:
        screen.out.print(screen.shown(f"{active.id} (active) and {second.id}, {agreement.questions} questions:"))
        screen.out.print(
            f"  overlap@{top_k}: mean {agreement.mean:.2f}, median {agreement.median:.2f}, least {agreement.least:.2f}"
        )
        for overlap in sorted(overlaps, key=lambda overlap: overlap.share)[:5]:
            screen.out.print(screen.shown(f"    {overlap.shared}/{overlap.active_found}  {overlap.question}"))
    for model, of in zip((active, second), reports, strict=True):
        if of:
            screen.out.print(screen.shown(f"{model.id}:"))
            _print_reports(of)
    return 0


@models.command("switch")
def models_switch(as_json: JsonOption = False) -> None:
    """Make the second model the active one, in one short transaction; services that name both go over by themselves."""
    _switch(back=False, as_json=as_json)


@models.command("rollback")
def models_rollback(as_json: JsonOption = False) -> None:
    """Make the former model the active one again, after what was written since is filled."""
    _switch(back=True, as_json=as_json)


def _switch(*, back: bool, as_json: bool) -> None:
    from rag import models as change

    with change.bench(change.owner_url(_settings())) as at:
        embedder = _second_of(at)
        state = asyncio.run(_closing(embedder, change.switch(at, embedder, back=back)))
    if as_json:
        _print_state(state)
        return
    assert state.active is not None
    assert state.second is not None
    screen.out.print(screen.shown(f"Active: {state.active.model_id}; {state.second.model_id} is kept for a way back."))


@models.command("drop")
def models_drop(as_json: JsonOption = False) -> None:
    """Remove the second model, former or coming, with its vectors and indexes. There is no way back from that."""
    from rag import models as change

    with change.bench(change.owner_url(_settings())) as at:
        second = at.state().second
        asyncio.run(change.drop(at))
        state = at.state()
    if as_json:
        _print_state(state)
        return
    assert second is not None
    screen.out.print(screen.shown(f"Dropped {second.model_id}."))


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Look whether the barrier of the database holds, and print the SQL that mends what does not.

    Exit code 0 for nothing or notes, 1 for warnings, 2 for errors.
    """
    from rag.doctor import run

    raise SystemExit(run(_settings(), as_json=as_json))


if __name__ == "__main__":
    main()
    sys.exit(0)
