"""Lets people query the views with logins of their own, and shows the SQL that it takes."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rag.embedded import scram_verifier
from rag.errors import DatabaseError, InvalidInput
from rag.operate import Desk, Session
from rag.principal import ALL_PROJECTS, check_name, check_tags

UserScope = Literal["none", "metadata", "text"]

# What PostgreSQL takes for a role, in small letters: names of directories and mail addresses fit.
_NAME = re.compile(r"[a-z][a-z0-9_.@-]{0,62}", re.ASCII)
_TAKEN = re.compile(r"(rag|pg)_|(public|none)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyst:
    """A login role and how far it sees in one tenant. Raises InvalidInput for what can be none."""

    role_name: str
    tenant_id: str
    tags: tuple[str, ...]
    """Rows with one of these."""
    projects: tuple[str, ...]
    """Projects of any owner; * for all."""
    user_scope: UserScope
    """Of users' own documents: nothing, that they exist, or their text."""

    def __post_init__(self) -> None:
        check_role_name(self.role_name)
        check_name(self.tenant_id, field="tenant_id")
        check_tags(self.tags)
        for project_id in self.projects:
            check_name(project_id, field="projects")
        if ALL_PROJECTS in self.projects and len(self.projects) > 1:
            raise InvalidInput("* is all projects, beside which no other is named", field="projects")
        if self.user_scope not in get_args(UserScope):
            raise InvalidInput(f"user_scope must be one of {', '.join(get_args(UserScope))}", field="user_scope")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement that is still needed; `shown` is the same without the password."""

    by_administrator: bool
    makes_login: bool
    text: str
    shown: str


def check_role_name(name: str) -> str:
    """Return `name` when an analyst's login can be called so. Raises InvalidInput."""
    if not _NAME.fullmatch(name) or _TAKEN.match(name):
        raise InvalidInput(
            "an analyst's name has 1 to 63 of a-z, 0-9, _ . @ and -; it begins with a letter, and not with rag_ or pg_",
            field="name",
        )
    return name


def new_password() -> str:
    """A password of 192 random bits."""
    return secrets.token_urlsafe(24)


def needed(session: Session, analyst: Analyst, *, password: str | None = None) -> list[Statement]:
    """What has to be run until the analyst is admitted; nothing when they are already.

    The password is for a login that has to be made, and travels as a verifier, which lets nobody in.
    Raises InvalidInput for a login that would see more than an analyst may, or nothing.
    """
    if password is not None and not (password.isascii() and password.isprintable() and password):
        raise InvalidInput("the password must be printable ASCII", field="password")
    reasons = session.rows("find_obstacles", {"role_name": analyst.role_name, "tenant_id": analyst.tenant_id})
    if reasons:
        listed = ", ".join(row["reason"] for row in reasons)
        raise InvalidInput(f"{analyst.role_name} cannot be an analyst: it {listed}", field="name")
    wanted: dict[str, Any] = {
        "role_name": analyst.role_name,
        "tenant_id": analyst.tenant_id,
        "tags": list(analyst.tags),
        "projects": list(analyst.projects),
        "user_scope": analyst.user_scope,
        "verifier": None if password is None else scram_verifier(password),
    }
    return [
        Statement(
            by_administrator=row["by_administrator"],
            makes_login=row["makes_login"],
            text=row["statement"],
            shown=row["shown"],
        )
        for row in session.rows("admit_analyst", wanted)
    ]


def admit(desk: Desk, analyst: Analyst, statements: list[Statement]) -> None:
    """Run what is needed: the administrator's part first, without whose row the login sees nothing.

    Raises the DatabaseError family; also when the two logins are of different databases.
    """
    if any(statement.by_administrator for statement in statements):
        with desk.administration() as session:
            for statement in statements:
                if statement.by_administrator:
                    session.run_text(statement.text)
    with desk.session() as session:
        if any(statement.by_administrator for statement in needed(session, analyst)):
            raise DatabaseError("what the administrator ran is not seen here: RAG_ADMIN_DATABASE_URL is elsewhere")
        for statement in statements:
            if not statement.by_administrator:
                session.run_text(statement.text)


def dismiss(session: Session, role_name: str, *, tenant_id: str | None) -> list[str]:
    """Take the rights in a tenant, or in all, away from the next statement on; what an administrator still has to run.

    Raises InvalidInput for somebody who is no analyst there.
    """
    removed = session.rows("remove_analyst", {"role_name": role_name, "tenant_id": tenant_id})
    memberships = session.rows("dismiss_analyst", {"role_name": role_name})
    if not removed and (tenant_id is not None or not memberships):
        raise InvalidInput(f"{role_name} is no analyst{'' if tenant_id is None else f' of {tenant_id}'}", field="name")
    elsewhere = [row for row in session.rows("list_analysts", {"tenant_id": None}) if row["role_name"] == role_name]
    return [] if elsewhere else [row["statement"] for row in memberships]
