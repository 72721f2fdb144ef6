"""Owners share their projects. The database lets nobody share another one's (rag.share_project())."""

from __future__ import annotations

from psycopg.rows import DictRow

from rag.database import Database
from rag.errors import InvalidInput, MemberNotFound
from rag.principal import ALL_PROJECTS, Principal, check_user_id


def _owned(principal: Principal) -> str:
    """The project that the principal names; theirs, for project names are each owner's own."""
    if principal.user_id is None:
        raise InvalidInput("a project belongs to a user", field="user_id")
    if principal.project_id in (None, ALL_PROJECTS):
        raise InvalidInput("a project is shared by its name, and * is none", field="project_id")
    assert principal.project_id is not None
    return principal.project_id


async def members(database: Database, principal: Principal) -> list[DictRow]:
    """With whom the principal's user shares the project that the principal names, by user."""
    wanted = {"owner_user_id": principal.user_id, "project_id": _owned(principal)}
    async with database.transaction(principal, read_only=True) as session:
        return await session.rows("my_members", wanted)


async def share(database: Database, principal: Principal, *, member_user_id: int, may_write: bool) -> None:
    """Let another user of the tenant see the project, and write to it or not; also changes what they may."""
    project_id = _owned(principal)
    if check_user_id(member_user_id, field="member_user_id") == principal.user_id:
        raise InvalidInput("the owner of a project is no member of it", field="member_user_id")
    async with database.transaction(principal) as session:
        await session.run(
            "share_project", {"project_id": project_id, "member_user_id": member_user_id, "may_write": may_write}
        )


async def unshare(database: Database, principal: Principal, *, member_user_id: int) -> None:
    """End it. Raises MemberNotFound when the project is not shared with them."""
    project_id = _owned(principal)
    async with database.transaction(principal) as session:
        row = await session.row("unshare_project", {"project_id": project_id, "member_user_id": member_user_id})
    if row is None or not row["unshared"]:
        raise MemberNotFound
