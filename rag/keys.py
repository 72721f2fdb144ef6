"""Keys of trusted services: what one is, and those that are valid, held in memory.

In memory, so that a stranger's guess costs no database connection; asked for again every two seconds, so
that a revoked key is refused within five.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import structlog

from rag.database import Database
from rag.errors import BarrierDown, DatabaseError, DatabaseTimeout, DatabaseUnavailable, RAGServiceError, ScopeForbidden
from rag.principal import Principal

log = structlog.get_logger(__name__)

Action = Literal["query", "ingest", "delete"]
ACTIONS: tuple[Action, ...] = get_args(Action)

KEY_PREFIX = "rag_"
_KEY = re.compile(r"rag_([0-9a-f]{16})_([A-Za-z0-9_-]{48})", re.ASCII)

# A revocation is seen after so long and one statement; the issue promises five seconds.
REFRESH_S = 2.0
# A statement that takes longer hangs, and the next one may not.
LOAD_TIMEOUT_S = 2.5
# Without the database no request is answered anyway, so what this bridges is short: a connection limit
# that is reached, a pooler that restarts. So much later a revocation may count at worst.
STALE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceKey:
    """A valid key, without its secret. None = no bound."""

    tenant_id: str
    key_id: str
    secret_sha256: bytes = field(repr=False)
    actions: frozenset[str]
    scopes: frozenset[str]
    tags: frozenset[str] | None
    act_as: bool
    """Whether it may name a user and a project, within `user_ids` and `project_ids`."""
    user_ids: frozenset[int] | None
    project_ids: frozenset[str] | None
    expires_at: datetime

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> ServiceKey:
        return cls(
            tenant_id=row["tenant_id"],
            key_id=row["key_id"],
            secret_sha256=bytes(row["secret_sha256"]),
            actions=frozenset(row["actions"]),
            scopes=frozenset(row["scopes"]),
            tags=_bound(row["tags"]),
            act_as=row["act_as"],
            user_ids=_bound(row["user_ids"]),
            project_ids=_bound(row["project_ids"]),
            expires_at=row["expires_at"],
        )


def _bound(listed: list[Any] | None) -> frozenset[Any] | None:
    return None if listed is None else frozenset(listed)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key at the one moment when its text exists."""

    key_id: str
    text: str = field(repr=False)
    """What the service sends as its bearer credential."""
    secret_sha256: bytes
    """What the database keeps of it."""


def new_key() -> NewKey:
    """A key of 288 random bits, and a public id that finds it."""
    key_id = secrets.token_hex(8)
    secret = secrets.token_urlsafe(36)
    return NewKey(key_id=key_id, text=f"{KEY_PREFIX}{key_id}_{secret}", secret_sha256=_digest(secret))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("ascii")).digest()


async def load(database: Database) -> list[ServiceKey]:
    """The keys that are valid now, of all tenants. Raises the DatabaseError family, and BarrierDown when
    the login may not ask for them.
    """
    try:
        async with asyncio.timeout(LOAD_TIMEOUT_S), database.proven() as (session, proof):
            rows = await session.rows("load_keys", {"proof": proof})
    except TimeoutError as error:
        raise DatabaseTimeout from error
    except ScopeForbidden as error:
        raise BarrierDown("rag_app may not execute load_service_keys()") from error
    return [ServiceKey.of(row) for row in rows]


async def record_assertion(database: Database, principal: Principal, *, key_id: str, action: str) -> None:
    """Record that a key speaks for a principal. Raises the DatabaseError family."""
    recorded = {
        "tenant_id": principal.tenant_id,
        "key_id": key_id,
        "user_id": principal.user_id or 0,
        "project_id": principal.project_id,
        "tags": list(principal.tags),
        "action": action,
    }
    try:
        async with database.transaction(principal) as session:
            await session.run("audit_assertion", recorded)
    except ScopeForbidden as error:
        # The caller asked for nothing that it may not do.
        raise DatabaseError("the use of the key could not be recorded") from error


class KeyRing:
    """The valid keys as of a moment ago."""

    def __init__(self, *, refresh_s: float = REFRESH_S, stale_s: float = STALE_S) -> None:
        self._refresh_s = refresh_s
        self._stale_s = stale_s
        # By id; an id belongs to one key of a tenant, so that two tenants may have the same.
        self._keys: Mapping[str, list[ServiceKey]] = {}
        # When the question began that these are the answer to, on the monotonic clock.
        self._known_at = float("-inf")
        # What a credential without a key is compared with.
        self._nobody = secrets.token_bytes(32)

    @asynccontextmanager
    async def kept_current(self, database: Database) -> AsyncIterator[None]:
        """Load the keys, and again every `refresh_s` until the block ends. Raises when they cannot be loaded."""
        await self._load(database)
        keeping = asyncio.create_task(self._keep(database))
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.wait([keeping])

    def find(self, credential: str) -> ServiceKey | None:
        """The valid key whose text this is, compared in constant time, whether its id is known or not.

        Raises DatabaseUnavailable when the keys are older than `stale_s`: any of them may be revoked.
        """
        if time.monotonic() - self._known_at > self._stale_s:
            raise DatabaseUnavailable("service keys could not be checked for too long; try again shortly")
        parts = _KEY.fullmatch(credential)
        key_id, secret = parts.groups() if parts else ("", "")
        digest = _digest(secret)
        found = None
        for key in self._keys.get(key_id, [None]):
            expected = self._nobody if key is None else key.secret_sha256
            if hmac.compare_digest(digest, expected) and key is not None and key.expires_at > datetime.now(UTC):
                found = key
        return found

    async def _load(self, database: Database) -> None:
        began = time.monotonic()
        keys: dict[str, list[ServiceKey]] = {}
        for key in await load(database):
            keys.setdefault(key.key_id, []).append(key)
        self._keys = keys
        self._known_at = began

    async def _keep(self, database: Database) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            try:
                await self._load(database)
            except RAGServiceError as error:
                log.warning("service_keys_not_loaded", cause=type(error.__cause__ or error).__name__)
