"""Whom to ask instead: the owner of the tag that most of the passages have (spec 001, "Tag Owner Lookup")."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rag.database import Session
from rag.exchange import Passage, RouteTarget
from rag.principal import PUBLIC_TAGS, Principal
from rag.settings import Settings

# Spec 001: the tag of a target that is nobody's owner but the administrator.
SYSTEM_TAG = "system"

NOTHING_FOUND = "No relevant documents found"


def primary_tag(passages: Sequence[Passage], *, held: Sequence[str]) -> str | None:
    """The tag that most passages have, `public` apart; of equals that of the best passage, then by name.

    Only tags that the asker holds count: what else a document is filed under is no business of theirs.
    """
    counted = Counter(
        tag for passage in passages for tag in sorted(set(passage.tags) & set(held)) if tag not in PUBLIC_TAGS
    )
    # The first of equals: passages come best first.
    return max(counted, key=counted.__getitem__, default=None)


async def find_target(
    session: Session, passages: Sequence[Passage], *, principal: Principal, settings: Settings, why: str
) -> RouteTarget:
    """The owner of the primary tag in the asker's tenant, else the administrator.

    `session` speaks for `principal`. `why` is the first part of the reason, such as "Low confidence: 45%".
    """
    if not passages:
        return administrator(settings, f"{why}. No context available - routing to admin")
    tag = primary_tag(passages, held=principal.tags)
    if tag is None:
        return administrator(settings, f"{why}. No specific tags in context - routing to admin")
    owner = await session.row("my_tag_owner", {"tag": tag})
    if owner is None:
        return administrator(settings, f"{why}. No owner for tag '{tag}' - routing to admin")
    return RouteTarget(
        tag=tag,
        owner_user_id=None if owner["owner_user_id"] is None else str(owner["owner_user_id"]),
        owner_email=owner["owner_email"] if settings.rag_expose_owner_email else None,
        reason=f"{why}. Routing to {tag} owner",
        fallback=False,
    )


def administrator(settings: Settings, reason: str) -> RouteTarget:
    """Where everything goes that has no owner; the address is a setting, and no secret of a tenant."""
    return RouteTarget(
        tag=SYSTEM_TAG, owner_user_id=None, owner_email=settings.rag_admin_email, reason=reason, fallback=True
    )
