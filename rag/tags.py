"""Who owns a tag: operators say so, and `route` asks. As rag_operator, in every tenant."""

from __future__ import annotations

import re
from dataclasses import dataclass

from psycopg.rows import DictRow

from rag.errors import InvalidInput
from rag.operate import Session
from rag.principal import PUBLIC_TAGS, check_name, check_tags, check_user_id

# As the table has it: RFC 5321 allows no longer path.
MAX_EMAIL_LENGTH = 254
_EMAIL = re.compile(r"[^@\s\x00-\x1f\x7f-\x9f]+@[^@\s\x00-\x1f\x7f-\x9f]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TagOwner:
    """A tag and who answers for it; a user, an address, or both. Raises InvalidInput for what can be none."""

    tenant_id: str
    name: str
    owner_user_id: int | None
    owner_email: str | None

    def __post_init__(self) -> None:
        check_name(self.tenant_id, field="tenant_id")
        check_tags([self.name], field="name")
        if self.name in PUBLIC_TAGS:
            raise InvalidInput("everybody has the tag public: it says nothing of whom to ask", field="name")
        if self.owner_user_id is None and self.owner_email is None:
            raise InvalidInput("a tag is owned by a user, an address, or both", field="owner")
        if self.owner_user_id is not None:
            check_user_id(self.owner_user_id, field="owner")
        if self.owner_email is not None and not (
            len(self.owner_email) <= MAX_EMAIL_LENGTH and _EMAIL.fullmatch(self.owner_email)
        ):
            raise InvalidInput(f"an address has one @ and at most {MAX_EMAIL_LENGTH} characters", field="email")


def set_owner(session: Session, owner: TagOwner) -> None:
    """Name the owner of a tag, instead of the one before."""
    session.run(
        "set_tag_owner",
        {
            "tenant_id": owner.tenant_id,
            "name": owner.name,
            "owner_user_id": owner.owner_user_id,
            "owner_email": owner.owner_email,
        },
    )


def list_owners(session: Session, tenant_id: str | None) -> list[DictRow]:
    """Tags with an owner, of one tenant or of all, by tenant and name."""
    return session.rows("list_tag_owners", {"tenant_id": tenant_id})


def remove_owner(session: Session, *, tenant_id: str, name: str) -> None:
    """From now on questions about the tag go to the administrator. Raises InvalidInput when it has no owner."""
    if session.row("remove_tag_owner", {"tenant_id": tenant_id, "name": name}) is None:
        raise InvalidInput("this tag has no owner: `rag tags list` has all of them", field="name")
