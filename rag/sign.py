"""Signs the identity of a transaction, so that a password of the database alone speaks for nobody.

The database verifies it in `signature_holds()` (sql/schema/20_identity.sql).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import time
from dataclasses import dataclass, field

from rag.errors import InvalidInput
from rag.principal import Principal

# A transaction has to begin within it; one that began may end. Seconds.
VALID_S = 60
# For a person at psql; the database takes nothing that is signed for longer.
SITTING_S = 12 * 60 * 60

_KEY = re.compile(r"([a-z0-9]{1,32})\.([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signer:
    """A signing key; made by `rag keys sign` or rag.add_signing_key()."""

    key_id: str
    secret: bytes = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Signer:
        """The key from RAG_SIGNING_KEY: its name, a full stop, and 64 hexadecimal digits. Raises InvalidInput."""
        match = _KEY.fullmatch(text)
        if match is None:
            raise InvalidInput(
                "RAG_SIGNING_KEY must be a key's name, a full stop and 64 digits", field="RAG_SIGNING_KEY"
            )
        return cls(key_id=match[1], secret=bytes.fromhex(match[2]))

    def __str__(self) -> str:
        return f"{self.key_id}.…"

    def sign(self, principal: Principal, *, role: str, now: float | None = None, valid_s: int = VALID_S) -> str:
        """The value of app.signature for a transaction of `principal` that begins about now.

        `role` is the login that the transaction runs as: the signature is worthless for another one.
        `now` is in seconds since 1970, by the clock of the database.
        """
        named = (principal.tenant_id, str(principal.user_id or 0), principal.project_id or "")
        return self._signature([role, *named], list(principal.tags), now, valid_s)

    def prove(self, *, role: str, now: float | None = None, purpose: str = "service_keys") -> str:
        """A proof that the service itself asks: for the service keys, or for `jobs`."""
        return self._signature([role, purpose], [], now, VALID_S)

    def _signature(self, first: list[str], rest: list[str], now: float | None, valid_s: int) -> str:
        expires = str(int(time.time() if now is None else now) + valid_s)
        message = json.dumps([*first, expires, *rest], ensure_ascii=False, separators=(",", ":"))
        code = hmac.new(self.secret, message.encode(), hashlib.sha256).hexdigest()
        return f"{self.key_id}.{expires}.{code}"
