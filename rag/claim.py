"""Claims a source before it is made searchable, so that of many who bring the same at once one embeds it.

A row with a lease and no lock: nothing is held open while a model reads, and a pooler may stand in the path. It
spares work and nothing else: who writes what is decided under the locks of `store.replace`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from rag import store
from rag.database import Database
from rag.errors import DatabaseError
from rag.principal import Principal
from rag.store import Destination, Known

# Of a process that died, a source is free again after this; less than the 10 s in which its job is taken up again.
LEASE_S = 8.0
RENEW_EVERY_S = 2.0
# Who waits asks again: soon, since most are done in a moment, then a few times a second.
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.25


@dataclass(kw_only=True)
class Held:
    """What is known of a source. Without a digest there is nothing to do, and nothing was claimed."""

    known: Known
    token: UUID
    source_digest: bytes | None
    room: Mapping[str, Any] = field(default_factory=dict)
    """What the tenant may store and has stored; for `limits.check_room`."""
    released: bool = field(default=False)

    @property
    def named(self) -> dict[str, Any]:
        """The parameters of `release_claim.sql`, for a transaction that does something else as well."""
        return {"source_digest": self.source_digest, "token": self.token}


@asynccontextmanager
async def claimed(
    database: Database,
    principal: Principal,
    destination: Destination,
    *,
    source_type: str,
    source_id: str,
    provenance_id: str | None,
    generation: int | None,
    settled_hash: str | None,
) -> AsyncIterator[Held]:
    """Look at a source, and hold it unless it is stored with `settled_hash`; waits while somebody else holds it.

    Raises like `store.look_up`.
    """
    token = uuid4()
    wanted = {
        "scope": destination.scope,
        "owner_user_id": destination.user_id,
        "owner_project_id": destination.project_id,
        "document_tags": list(destination.tags),
        "source_type": source_type,
        "source_id": source_id,
        "provenance_id": provenance_id,
        "settled_hash": settled_hash,
        "token": token,
        "lease": timedelta(seconds=LEASE_S),
    }
    wait_s = FIRST_WAIT_S
    while True:
        rows = await database.rows_alone("claim_source", principal, wanted, publish=destination.publishes)
        held = Held(known=store.known_of(rows), token=token, source_digest=rows[0]["source_digest"], room=rows[0])
        if held.source_digest is not None:
            break
        store.check_open(held.known, generation)
        if rows[0]["is_settled"]:
            yield held
            return
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    renewing: list[asyncio.Task[None]] = []

    def renew() -> None:
        renewing.append(asyncio.create_task(_renew(database, principal, destination, held)))

    # Most are done before that.
    timer = asyncio.get_running_loop().call_later(RENEW_EVERY_S, renew)
    try:
        store.check_open(held.known, generation)
        yield held
    finally:
        timer.cancel()
        for task in renewing:
            task.cancel()
            await asyncio.wait([task])
        if not held.released:
            # It ends by itself as well; what failed before is what counts.
            with contextlib.suppress(DatabaseError):
                async with database.transaction(principal, publish=destination.publishes) as session:
                    await session.run("release_claim", held.named)


async def _renew(database: Database, principal: Principal, destination: Destination, held: Held) -> None:
    while True:
        with contextlib.suppress(DatabaseError):
            async with database.transaction(principal, publish=destination.publishes) as session:
                await session.run(
                    "renew_claim",
                    {
                        "source_digest": held.source_digest,
                        "token": held.token,
                        "lease": timedelta(seconds=LEASE_S),
                    },
                )
        await asyncio.sleep(RENEW_EVERY_S)
