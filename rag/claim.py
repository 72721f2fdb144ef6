"""Claims a source before it is made searchable, so that of many who bring the same at once one embeds it.

A row with a lease and no lock: nothing is held open while a model reads, and a pooler may stand in the path. It
spares work and nothing else: who writes what is decided under the locks of `store.replace`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from rag import store
from rag.database import Database, Session
from rag.errors import DatabaseError
from rag.principal import Principal
from rag.store import Destination, Known

# Of a process that died, a source is free again after this; less than the 10 s in which its job is taken up again.
LEASE_S = 8.0
RENEW_EVERY_S = 2.0
# Who waits asks again: soon, since most are done in a moment, then a few times a second.
FIRST_WAIT_S = 0.02
LONGEST_WAIT_S = 0.25

Settled = Callable[[Session, Known], Awaitable[bool]]


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
    settled: Settled,
) -> AsyncIterator[Held]:
    """Look at a source, and hold it unless it is `settled`; waits while somebody else holds it.

    `settled` is asked within the transaction that looks. Raises like `store.look_up`.
    """
    token = uuid4()
    wait_s = FIRST_WAIT_S
    while True:
        held: Held | None = None
        async with database.transaction(principal, publish=destination.publishes) as session:
            rows = await session.rows(
                "claim_source",
                store.source_named(destination, source_type, source_id, provenance_id)
                | {"token": token, "lease": timedelta(seconds=LEASE_S)},
            )
            known = store.known_of(rows)
            store.check_open(known, generation)
            seen = Held(known=known, token=token, source_digest=rows[0]["source_digest"], room=rows[0])
            if await settled(session, known):
                if seen.source_digest is not None:
                    await session.run("release_claim", seen.named)
                held = replace(seen, source_digest=None)
            elif seen.source_digest is not None:
                held = seen
        if held is not None:
            break
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    if held.source_digest is None:
        yield held
        return
    renewing = asyncio.create_task(_renew(database, principal, destination, held))
    try:
        yield held
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        if not held.released:
            # It ends by itself as well; what failed before is what counts.
            with contextlib.suppress(DatabaseError):
                async with database.transaction(principal, publish=destination.publishes) as session:
                    await session.run("release_claim", held.named)


async def _renew(database: Database, principal: Principal, destination: Destination, held: Held) -> None:
    while True:
        await asyncio.sleep(RENEW_EVERY_S)
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
