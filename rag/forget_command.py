"""`rag explain-access` and `rag forget`: why somebody sees a document, and erasing all of somebody."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any
from uuid import UUID

import typer

from rag import screen
from rag.command import (
    AllTenantsOption,
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    YesOption,
    age_of,
    cell,
    open_desk,
    print_rows,
    tags_of,
    tenant_of,
)
from rag.errors import DocumentNotFound, InvalidInput


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

    desk = open_desk()
    somebody = Principal(
        tenant_id=tenant_of(tenant, desk.default_tenant),
        user_id=None if user is None else check_user_id(user),
        project_id=project,
        tags=tags_of(tags),
    )
    with desk.session() as session:
        found = operate.explain_access(session, document, somebody)
    if not found:
        raise DocumentNotFound
    if as_json:
        print_rows("clauses", found, as_json=True)
        return
    for access_id in dict.fromkeys(row["access_id"] for row in found):
        clauses = [row for row in found if row["access_id"] == access_id]
        about = {name: clauses[0][name] for name in ("access_id", "scope", "owner_user_id", "owner_project_id")}
        print_rows("class", [about | {"tags": clauses[0]["class_tags"]}], as_json=False)
        for row in clauses:
            screen.out.print(f"  {cell(row['holds']):<4}{screen.shown(row['clause'])}")
        screen.out.print("visible" if clauses[0]["visible"] else "not visible")


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
        _forget_logs(age_of(logs_older_than, "logs_older_than"), tenant, yes=yes, as_json=as_json)
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

    desk = open_desk()
    with desk.session() as session:
        found = erase.count_traces(session, subject)
    if not as_json:
        print_rows("traces", [{"table": table, "rows": rows} for table, rows in found.items()], as_json=False)
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

    desk = open_desk()
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
