"""Who is asking: the one value that every transaction starts from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rag.errors import InvalidInput

# Postgres itself takes a megabyte; nobody's name is that long.
MAX_ID_LENGTH = 128
MAX_TAGS = 256
MAX_TAG_LENGTH = 64
# bigint holds 19 digits; 18 always fit.
USER_ID = re.compile(r"[1-9][0-9]{0,17}", re.ASCII)
# No control characters, no surrogates: the value goes into a session variable and into keys.
_PLAIN = re.compile(r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]+")

ALL_PROJECTS = "*"
PUBLIC_TAGS = ("public",)


def check_name(value: str, *, field: str, max_length: int = MAX_ID_LENGTH) -> str:
    """Return `value` when it can be an identifier: 1 to `max_length` characters, none of them a control."""
    if not value or len(value) > max_length or not _PLAIN.fullmatch(value) or value != value.strip():
        raise InvalidInput(
            f"{field} must be 1 to {max_length} characters, without control characters or outer spaces",
            field=field,
        )
    return value


def check_tags(tags: object, *, field: str = "tags") -> tuple[str, ...]:
    """Return the tags sorted and distinct; an empty list means `public`."""
    if not isinstance(tags, list | tuple | set | frozenset) or len(tags) > MAX_TAGS:
        raise InvalidInput(f"{field} must be a list of at most {MAX_TAGS} strings", field=field)
    for tag in tags:
        if not isinstance(tag, str):
            raise InvalidInput(f"{field} must be a list of strings", field=field)
        check_name(tag, field=field, max_length=MAX_TAG_LENGTH)
    return tuple(sorted(set(tags))) or PUBLIC_TAGS


def check_user_id(user_id: object, *, field: str = "user_id") -> int:
    """Return a user id from a positive integer or its decimal string."""
    if isinstance(user_id, bool) or not isinstance(user_id, int | str) or not USER_ID.fullmatch(str(user_id)):
        raise InvalidInput(f"{field} must be a positive whole number of at most 18 digits", field=field)
    return int(user_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """A verified identity inside one tenant.

    `user_id` None is a principal that sees public rows only. `project_id` names one project of the
    user or one shared with them, `"*"` means all of these, None none. `tags` empty means `{public}`.
    Raises InvalidInput for a value that can be no identity.
    """

    tenant_id: str
    user_id: int | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = PUBLIC_TAGS

    def __post_init__(self) -> None:
        check_name(self.tenant_id, field="tenant_id")
        if self.user_id is not None:
            check_user_id(self.user_id)
        if self.project_id is not None:
            check_name(self.project_id, field="project_id")
        object.__setattr__(self, "tags", check_tags(self.tags))
