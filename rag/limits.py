"""How much a tenant may ask and store: what requests and writers are held to, and what operators say.

The database decides: a rate by one statement before the work, a quota by the last one of the transaction that writes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from psycopg.rows import DictRow

from rag.database import Database
from rag.database import Session as ServiceSession
from rag.errors import InvalidInput, QuotaExceeded, RateLimited
from rag.principal import Principal, check_name

if TYPE_CHECKING:
    from rag.operate import Session

Kind = Literal["query", "ingest"]
ASKS: Mapping[Kind, str] = {"query": "questions", "ingest": "documents"}

EVERYBODY_ELSE = ""
"""Stands for the tenants that have no limits of their own."""
# As rag_limits allows.
MAX_RATE = 1_000_000
MAX_QUOTA = 2**63 - 1
RATES = ("queries_per_minute", "query_burst", "ingests_per_minute", "ingest_burst")
QUOTAS = ("documents", "bytes")
LIMITS = (*RATES, *QUOTAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a tenant has left of its rate, once a request was let through or refused."""

    kind: Kind
    per_minute: int
    burst: int
    left: int
    """Requests that may come at once."""
    wait_s: float | None
    """Until there is one; 0 for a request that was let through, None when none ever comes."""


async def take_token(database: Database, principal: Principal, kind: Kind) -> Rate | None:
    """Let a request through, or raise RateLimited; None when nothing limits it. Before the work: it costs 1 statement.

    Raises the DatabaseError family as well: what cannot be counted is not carried out.
    """
    (row,) = await database.rows_alone("take_token", principal, {"kind": kind})
    if row["per_minute"] is None:
        return None
    rate = Rate(
        kind=kind,
        per_minute=row["per_minute"],
        burst=row["burst"],
        left=math.floor(row["tokens_left"] or 0),
        wait_s=row["wait_s"],
    )
    if not row["granted"]:
        if rate.wait_s is None:
            raise RateLimited(f"this tenant may send no {ASKS[kind]}", rate=rate)
        raise RateLimited(
            f"this tenant may send {rate.per_minute} {ASKS[kind]} a minute, and {rate.burst} at once", rate=rate
        )
    return rate


async def charge(session: ServiceSession, *, documents: int, size: int, claim: Mapping[str, Any] | None = None) -> None:
    """Count what a transaction has added, `size` in bytes, less than 0 for what it removed; the last thing it does.

    With a `claim`, the parameters of `release_claim.sql`, it is let go of. Raises QuotaExceeded when the tenant has no
    room for it, and the transaction has to be undone.
    """
    if not documents and not size:
        if claim is not None:
            await session.run("release_claim", claim)
        return
    charged = {"documents": documents, "bytes": size}
    if claim is None:
        exceeded = await session.row("charge_quota", charged)
    else:
        exceeded = await session.row("charge_and_release", {**charged, **claim})
    if exceeded is not None and exceeded["quota"] is not None:
        raise _exceeded(exceeded["quota"], limit=exceeded["quota_limit"], used=exceeded["used"])


def check_room(room: Mapping[str, Any], *, size: int) -> None:
    """Raise QuotaExceeded when there is no room for one more document of so many bytes, before it costs anything.

    `room`: what may be stored, and what is, as `claim_source.sql` has it. Whether there is any when it is written,
    `charge` says.
    """
    for quota, more in (("documents", 1), ("bytes", size)):
        limit, used = room[quota], room[f"{quota}_used"]
        if limit is not None and more and used + more > limit:
            raise _exceeded(quota, limit=limit, used=used)


def _exceeded(quota: str, *, limit: int, used: int) -> QuotaExceeded:
    return QuotaExceeded(
        f"the tenant may store {limit} {quota} and has stored {used}, so that this does not fit; "
        "remove documents, or ask the operator for more",
        field=quota,
    )


# --- as rag_operator -----------------------------------------------------------------------------


def set_limits(session: Session, *, tenant_id: str, changed: Mapping[str, int | None]) -> None:
    """Set some of LIMITS, None for no limit; the others stay as they are. From the next request on.

    `tenant_id` may be EVERYBODY_ELSE. Raises InvalidInput.
    """
    _check_tenant(tenant_id)
    if not changed:
        raise InvalidInput(f"say which limit: {', '.join(LIMITS)}", field="limits")
    for name, value in changed.items():
        if name not in LIMITS:
            raise InvalidInput(f"there is no limit {name}", field="limits")
        least, most = int(name.endswith("burst")), MAX_RATE if name in RATES else MAX_QUOTA
        if value is not None and not least <= value <= most:
            raise InvalidInput(f"{name} must be a whole number from {least} to {most}, or none", field=name)
    for rate, burst in (("queries_per_minute", "query_burst"), ("ingests_per_minute", "ingest_burst")):
        # A rate that is lifted takes its burst with it.
        if rate in changed and changed[rate] is None:
            if changed.get(burst) is not None:
                raise InvalidInput(f"{burst} needs {rate}", field=burst)
            changed = {**changed, burst: None}
    present = next((row for row in list_limits(session, tenant_id) if row["own"]), None) or {}
    for rate, burst in (("queries_per_minute", "query_burst"), ("ingests_per_minute", "ingest_burst")):
        if changed.get(burst) is not None and changed.get(rate, present.get(rate)) is None:
            raise InvalidInput(f"{burst} needs {rate}", field=burst)
    session.run(
        "set_limits",
        {"tenant_id": tenant_id, "changed": list(changed), **dict.fromkeys(LIMITS), **changed},
    )


def list_limits(session: Session, tenant_id: str | None) -> list[DictRow]:
    """What tenants may do and have stored, by tenant; `own` says that the limits are of the tenant alone."""
    return session.rows("list_limits", {"tenant_id": tenant_id})


def remove_limits(session: Session, tenant_id: str) -> None:
    """Take a tenant's own limits away; what holds for everybody else holds for it. Raises InvalidInput for none."""
    _check_tenant(tenant_id)
    if session.row("remove_limits", {"tenant_id": tenant_id}) is None:
        raise InvalidInput("there are no such limits: `rag limits list` has all of them", field="tenant_id")


def recount(session: Session, tenant_ids: Collection[str]) -> None:
    """Count anew what tenants have stored, while nobody writes in them."""
    for tenant_id in sorted(tenant_ids):
        session.run("recount_usage", {"tenant_id": tenant_id})


def drifted(session: Session) -> list[DictRow]:
    """Tenants that have stored something else than was counted. Reads the size of every document."""
    return session.rows("usage_drift", {})


def _check_tenant(tenant_id: str) -> None:
    if tenant_id != EVERYBODY_ELSE:
        check_name(tenant_id, field="tenant_id")
