"""`rag analyst`: who queries the views with a login of their own, and the SQL that lets them."""

from __future__ import annotations

from typing import Annotated

import typer

from rag import screen
from rag.command import (
    AllTenantsOption,
    JsonOption,
    TagsOption,
    TenantOption,
    open_desk,
    print_rows,
    tags_of,
    tenant_of,
    words_of,
)

analyst = typer.Typer(help="People who query the views with a login of their own.", no_args_is_help=True)


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

    desk = open_desk()
    wanted = analysts.Analyst(
        role_name=name,
        tenant_id=tenant_of(tenant, desk.default_tenant),
        tags=tags_of(tags),
        projects=words_of(projects),
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
    with open_desk().session() as session:
        print_rows("analysts", session.rows("list_analysts", {"tenant_id": tenant}), as_json=as_json)


@analyst.command("remove")
def analyst_remove(
    name: Annotated[str, typer.Argument(help="The login role.")],
    tenant: AllTenantsOption = None,
) -> None:
    """Take an analyst's rights away, from their next statement on. The login itself stays."""
    from rag import analysts

    desk = open_desk()
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
