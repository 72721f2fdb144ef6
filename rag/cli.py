"""The command `rag`."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from typing import Annotated, NoReturn

import structlog
import typer

from rag import screen
from rag.analyst_command import analyst
from rag.command import JOBS_AT_ONCE, JsonOption
from rag.command import read_settings as _settings
from rag.command import run as _run
from rag.db_command import db
from rag.docs_command import docs
from rag.errors import InvalidInput, RAGServiceError
from rag.evaluate_command import calibration, evaluate
from rag.forget_command import explain_access, forget
from rag.ingest_command import ingest
from rag.invalidate_command import invalidate, reinstate, retractions
from rag.jobs_command import jobs
from rag.keys_command import keys
from rag.limits_command import limits
from rag.maintain_command import maintain
from rag.models_command import models
from rag.project_command import project
from rag.prompts_command import prompts
from rag.query_command import query
from rag.reindex_command import reindex
from rag.sync_command import reconcile, status, sync
from rag.tags_command import tags

app = typer.Typer(
    help="Palisade: documents go in, cited answers come out, and the database decides who may retrieve what.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(db, name="db")
app.add_typer(jobs, name="jobs")
app.add_typer(keys, name="keys")
app.add_typer(analyst, name="analyst")
app.add_typer(project, name="project")
app.add_typer(calibration, name="calibration")
app.add_typer(models, name="models")
app.add_typer(tags, name="tags")
app.add_typer(prompts, name="prompts")
app.add_typer(docs, name="docs")
app.command()(reindex)
app.add_typer(limits, name="limits")


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


# Between migrate and doctor, since `rag --help` lists commands in the order in which they are registered.
app.command()(ingest)
app.command()(query)
app.command()(sync)
app.command()(reconcile)
app.command()(status)
app.command("explain-access")(explain_access)
app.command()(forget)
app.command()(invalidate)
app.command()(reinstate)
app.command()(retractions)
app.command("eval")(evaluate)
app.command()(maintain)


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
