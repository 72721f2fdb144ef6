"""`rag db`: the embedded database is started, stopped, made anew and opened in psql as somebody."""

from __future__ import annotations

from typing import Annotated

import typer

from rag import screen
from rag.command import ProjectOption, TagsOption, TenantOption, UserOption, read_settings, tags_of, tenant_of

db = typer.Typer(help="The embedded database.", no_args_is_help=True)


@db.command("start")
def db_start() -> None:
    """Start the embedded database, and make it when there is none."""
    from rag import deployment, embedded

    settings = read_settings()
    server = embedded.start(settings.rag_home)
    deployment.prepare(server, settings)
    screen.out.print(
        f"PostgreSQL {server.major} runs on port {server.port}, its home is {screen.shown(str(server.home))}."
    )


@db.command("stop")
def db_stop() -> None:
    """Stop the embedded database."""
    from rag import embedded

    stopped = embedded.stop(read_settings().rag_home)
    screen.out.print("Stopped." if stopped else "It was not running.")


@db.command("rebuild")
def db_rebuild(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the embedded database with everything in it, and make it anew."""
    from rag import deployment

    settings = read_settings()
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

    settings = read_settings()
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

    place = terminal.reach(read_settings(), role)
    principal = Principal(
        tenant_id=tenant_of(tenant, place.default_tenant),
        user_id=None if user is None else check_user_id(user),
        project_id=project,
        tags=tags_of(tags),
    )
    raise SystemExit(terminal.run(place, principal, role, context.args))
