"""`rag limits`: how much tenants may ask and store, and what is used of it."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from rag import screen
from rag.command import AllTenantsOption, JsonOption, TenantOption, open_desk, print_rows, tenant_of
from rag.errors import InvalidInput

limits = typer.Typer(
    help="How much tenants may ask and store; nothing is limited unless it is set.", no_args_is_help=True
)

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
    desk = open_desk()
    tenant_id = _limited(tenant, default, desk.default_tenant)
    with desk.session() as session:
        set_limits(session, tenant_id=tenant_id, changed=changed)
    said = ", ".join(f"{name} {'none' if value is None else value}" for name, value in changed.items())
    screen.out.print(f"{_limited_name(tenant_id)}: {said}.")


@limits.command("list")
def limits_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List limits and what is used of them; `own` are those of the tenant alone, the others hold by default."""
    from rag.limits import EVERYBODY_ELSE, list_limits

    with open_desk().session() as session:
        found = list_limits(session, tenant)
    if not as_json:
        found = [row | {"tenant_id": row["tenant_id"] or "(default)"} for row in found]
    else:
        found = [row | {"default": row["tenant_id"] == EVERYBODY_ELSE} for row in found]
    print_rows("limits", found, as_json=as_json)


@limits.command("remove")
def limits_remove(tenant: TenantOption = None, default: EveryOption = False) -> None:
    """Take a tenant's own limits away: what holds by default holds for it."""
    from rag.limits import remove_limits

    desk = open_desk()
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

    with open_desk().session() as session:
        found = [row for row in drifted(session) if tenant in (None, row["tenant_id"])]
        recount(session, [row["tenant_id"] for row in found])
    print_rows("differences", found, as_json=as_json)


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
    return EVERYBODY_ELSE if default else tenant_of(tenant, default_tenant)


def _limited_name(tenant_id: str) -> str:
    return f"Tenant {screen.shown(tenant_id)}" if tenant_id else "All other tenants"
