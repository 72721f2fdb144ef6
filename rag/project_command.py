"""`rag project`: projects that their owner shares, with whom, and who may write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag import screen
from rag.command import JsonOption, MemberOption, OwnerOption, TenantOption, open_desk, print_rows, tenant_of

if TYPE_CHECKING:
    from rag.operate import Desk

project = typer.Typer(help="Projects that their owner shares.", no_args_is_help=True)


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

    desk = open_desk()
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

    desk = open_desk()
    membership = _membership(desk, name, owner, member, tenant)
    with desk.session() as session:
        operate.unshare(session, membership)
    screen.out.print(f"User {member} does not see {screen.shown(name)} of user {owner} any more.")


def _membership(desk: Desk, name: str, owner: str, member: str, tenant: str | None) -> Any:
    from rag.operate import Membership
    from rag.principal import check_user_id

    return Membership(
        tenant_id=tenant_of(tenant, desk.default_tenant),
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

    desk = open_desk()
    wanted = {
        "tenant_id": tenant_of(tenant, desk.default_tenant),
        "project_id": name,
        "owner_user_id": None if owner is None else check_user_id(owner, field="owner"),
    }
    with desk.session() as session:
        print_rows("members", session.rows("list_members", wanted), as_json=as_json)
