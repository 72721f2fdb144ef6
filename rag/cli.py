"""The command `rag`."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer

from rag import screen
from rag.errors import (
    DatabaseUnavailable,
    DocumentTooLarge,
    EmbeddingInvalid,
    InvalidInput,
    RAGServiceError,
    SourceRetracted,
)
from rag.settings import Settings

app = typer.Typer(
    help="Palisade: documents go in, cited answers come out, and the database decides who may retrieve what.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
db = typer.Typer(help="The embedded database.", no_args_is_help=True)
app.add_typer(db, name="db")

TenantOption = Annotated[str | None, typer.Option("--tenant", help="Tenant; the embedded database has `default`.")]
UserOption = Annotated[str | None, typer.Option("--user", help="User id, a positive whole number.")]
ProjectOption = Annotated[str | None, typer.Option("--project", help="Project of the user; * for all of them.")]
TagsOption = Annotated[str | None, typer.Option("--tags", help="Comma-separated; `public` unless given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

# Documents that are read and cut while another one is being embedded.
PARALLEL_DOCUMENTS = 2


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


def _settings() -> Settings:
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name, *inside = (str(part) for part in first["loc"])
        where = ".".join([name.upper(), *inside])
        raise InvalidInput(f"{where}: {first['msg']}", field=name.upper()) from error
    except SettingsError as error:
        # A list or a table that is no JSON; the message has the name of the setting, and not its value.
        raise InvalidInput(str(error)) from error


def _run(work: Coroutine[Any, Any, int]) -> None:
    code = asyncio.run(work)
    if code:
        raise SystemExit(code)


def _tags(text: str | None) -> tuple[str, ...]:
    from rag.principal import check_tags

    return check_tags([tag.strip() for tag in (text or "").split(",") if tag.strip()])


def _tenant(given: str | None, default: str | None) -> str:
    if given is None and default is None:
        raise InvalidInput("--tenant is required: only the embedded database has a default one", field="tenant_id")
    return given or default or ""


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
    """Serve the API. On loopback it prints a token; elsewhere it needs the key of a trusted service."""
    from api.serve import run

    run(_settings(), host=host, port=port)


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
    as_json: JsonOption = False,
) -> None:
    """Add or replace documents. A file that cannot be read is named, and the others go in."""
    _run(_ingest(paths, scope, user, project, tags, tenant, language, as_json))


async def _ingest(
    paths: list[Path],
    scope: str | None,
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
    language: str | None,
    as_json: bool,
) -> int:
    from rag import deployment
    from rag.embed import open_embedder
    from rag.ingest import Ingested, Source, ingest
    from rag.principal import PUBLIC_TAGS, Principal, check_user_id
    from rag.store import destination_of

    settings = _settings()
    wanted_tags = _tags(tags)
    user_id = None if user is None else check_user_id(user)
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
    embedder = open_embedder(settings)
    database = place.open(settings)
    turn = asyncio.Semaphore(PARALLEL_DOCUMENTS)

    async def one(path: Path, counter: screen.Counter) -> None:
        async with turn:
            counter.note(path.name)
            try:
                source = Source(
                    name=_source_id(path),
                    source_id=_source_id(path),
                    content=_read(path, settings.rag_max_document_bytes),
                    source_uri=path.resolve().as_uri(),
                    source_updated_at=datetime.fromtimestamp(path.stat().st_mtime, UTC),
                    language=language,
                )
                ingested = await ingest(
                    source,
                    principal=principal,
                    destination=destination,
                    database=database,
                    embedder=embedder,
                    max_bytes=settings.rag_max_document_bytes,
                    progress=lambda embedded, total: counter.note(f"{path.name} {embedded}/{total}"),
                )
            except (InvalidInput, EmbeddingInvalid, SourceRetracted) as error:
                # Of this document alone; what the database or the provider lacks, all others lack as well.
                # Most messages name the document, and the line begins with the path already.
                reason = error.message.removeprefix(_source_id(path)).lstrip(": ")
                failures.append(Failure(path=path, reason=reason))
            except OSError as error:
                failures.append(_unreadable(path, error))
            else:
                done.append((path, ingested))
            counter.step()

    try:
        async with database:
            await database.check_barrier(dimensions=settings.rag_embedding_dimensions, strict=settings.rag_strict)
            with screen.counting(len(files), "ingesting") as counter:
                async with asyncio.TaskGroup() as group:
                    for path in files:
                        group.create_task(one(path, counter))
    except* RAGServiceError as group_error:
        raise _first(group_error) from group_error
    finally:
        await embedder.close()
    _report(done, failures, skipped, principal.tenant_id, as_json=as_json)
    return 1 if failures else 0


def _first(group: BaseExceptionGroup[RAGServiceError]) -> RAGServiceError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RAGServiceError)
    return error


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


def _read(path: Path, max_bytes: int) -> bytes:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise DocumentTooLarge(f"has {size:,} bytes; the limit is {max_bytes:,}")
        # One byte more than allowed, which the parser then refuses: it may grow, or be no plain file.
        return file.read(max_bytes + 1)


def _report(done: list[tuple[Path, Any]], failures: list[Failure], skipped: int, tenant: str, *, as_json: bool) -> None:
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
    as_json: JsonOption = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate and why it was kept.")] = False,
) -> None:
    """Ask a question as somebody."""
    _run(_query(question, user, project, tags, tenant, scope, top_k, model, as_json, explain))


async def _query(
    question: str,
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
    scope: str | None,
    top_k: int | None,
    model: str | None,
    as_json: bool,
    explain: bool,
) -> int:
    from rag import deployment
    from rag.answer import RAGService, check_request
    from rag.exchange import RAGRequest
    from rag.principal import Principal, check_user_id

    if explain and as_json:
        raise InvalidInput("--explain is a table; --json has the same figures under `passages`", field="--explain")
    settings = _settings()
    request = RAGRequest(query=question, scope=scope, max_context_chunks=top_k, model=model)  # type: ignore[arg-type]
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
        await database.check_barrier(dimensions=settings.rag_embedding_dimensions, strict=settings.rag_strict)
        async with RAGService(settings, database) as service:
            if explain:
                found = await service.search(request, principal=principal, include_dropped=True)
                screen.print_passages(found.passages, found.dropped)
                for note in found.degraded:
                    screen.out.print(f"[yellow]note:[/yellow] {screen.shown(note)}")
                return 0
            response = await service.generate(request, principal=principal)
    if as_json:
        screen.print_json(screen.as_json(response))
    else:
        screen.print_answer(response)
    return 0


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
    """Open psql on the embedded database as somebody; further arguments go to psql (`-- -c 'select …'`)."""
    from rag import deployment, embedded
    from rag.principal import Principal, check_user_id
    from rag.sign import SITTING_S

    settings = _settings()
    server = embedded.start(settings.rag_home)
    signer = deployment.prepare(server, settings)
    principal = Principal(
        tenant_id=tenant or deployment.EMBEDDED_TENANT,
        user_id=None if user is None else check_user_id(user),
        project_id=project,
        tags=_tags(tags),
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    signature = signer.sign(principal, role=role, valid_s=SITTING_S)
    environment["PGOPTIONS"] = _session_options(principal, signature)
    command = [str(server.binary("psql")), server.conninfo(role), *context.args]
    raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)  # noqa: S603


def _session_options(principal: Any, signature: str) -> str:
    """The variables of a principal for a whole session, as libpq's `options` wants them escaped."""
    import json

    values = {
        "app.tenant_id": principal.tenant_id,
        "app.user_id": str(principal.user_id or 0),
        "app.project_id": principal.project_id or "",
        "app.tags": json.dumps(list(principal.tags), ensure_ascii=False),
        "app.signature": signature,
    }
    return " ".join(
        "-c " + f"{name}={value}".replace("\\", r"\\").replace(" ", r"\ ") for name, value in values.items()
    )


if __name__ == "__main__":
    main()
    sys.exit(0)
