"""`rag tags`: who owns a tag, and is asked when an answer is not sure enough."""

from __future__ import annotations

from typing import Annotated

import typer

from rag import screen
from rag.command import AllTenantsOption, JsonOption, TenantOption, open_desk, print_rows, tenant_of

tags = typer.Typer(help="Who owns a tag: whom to ask when an answer is not sure enough.", no_args_is_help=True)


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

    desk = open_desk()
    owned = TagOwner(
        tenant_id=tenant_of(tenant, desk.default_tenant),
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

    with open_desk().session() as session:
        print_rows("tags", list_owners(session, tenant), as_json=as_json)


@tags.command("remove")
def tags_remove(
    name: Annotated[str, typer.Argument(help="The tag.", metavar="TAG")],
    tenant: TenantOption = None,
) -> None:
    """Take a tag's owner away; what is asked about it goes to the administrator."""
    from rag.tags import remove_owner

    desk = open_desk()
    tenant_id = tenant_of(tenant, desk.default_tenant)
    with desk.session() as session:
        remove_owner(session, tenant_id=tenant_id, name=name)
    screen.out.print(f"Questions about {screen.shown(name)} go to the administrator.")
