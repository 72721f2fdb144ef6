"""Tokens of end users (JWT), and the keys of the identity provider that signs them (JWKS)."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2
import jwt
import structlog

from rag.errors import AccessError, InvalidInput, IssuerUnavailable, Unauthenticated
from rag.principal import PUBLIC_TAGS, check_name, check_tags, check_user_id
from rag.settings import Settings

log = structlog.get_logger(__name__)

# Clocks that differ.
LEEWAY_S = 60
# A key that the issuer withdraws is honoured for at most so long.
REFRESH_S = 300.0
# While the issuer does not answer, its last keys serve for so long: an outage of the usual length stops
# nobody, and who holds a withdrawn key gains an hour at most by keeping us from asking.
STALE_S = 3600.0
# Between two requests to the issuer, whatever key ids strangers make up. A new key that was not announced
# beforehand is known after so long at the latest.
COOL_DOWN_S = 5.0
FETCH_TIMEOUT_S = 5.0
# A hundred keys with their certificates.
MAX_KEY_SET_BYTES = 256 * 1024

_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+", re.ASCII)
# RFC 8725, 3.11: what was made for another purpose (a logout, a proof of possession) names it here.
_TYPES = frozenset({"jwt", "at+jwt", "application/at+jwt"})
_TIMES = ("exp", "nbf", "iat")


class KeySet:
    """The public keys at one address, kept in memory and asked for again in the background."""

    def __init__(
        self,
        url: str,
        *,
        algorithms: Collection[str],
        refresh_s: float = REFRESH_S,
        stale_s: float = STALE_S,
        cool_down_s: float = COOL_DOWN_S,
        timeout_s: float = FETCH_TIMEOUT_S,
    ) -> None:
        local = httpx2.URL(url).host in ("localhost", "127.0.0.1", "::1")
        self._url = url
        # Made once, since that reads all certificate authorities; its connections would not live as long.
        self._http = httpx2.AsyncClient(
            timeout=timeout_s, trust_env=not local, limits=httpx2.Limits(max_keepalive_connections=0)
        )
        self._algorithms = tuple(algorithms)
        self._refresh_s = refresh_s
        self._stale_s = stale_s
        self._cool_down_s = cool_down_s
        self._timeout_s = timeout_s
        self._keys: Mapping[tuple[str, str], jwt.PyJWK] = {}
        # On the monotonic clock: when the request began that brought the keys, and the last one at all.
        self._known_at = self._asked_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None

    async def find(self, key_id: str, algorithm: str) -> jwt.PyJWK | None:
        """The key of that id for that algorithm, None when the issuer has none.

        Waits for the issuer only for a key that is not known. Raises IssuerUnavailable when it has not
        answered for so long that nothing is known.
        """
        key = self._keys.get((key_id, algorithm))
        age_s = time.monotonic() - self._known_at
        if key is not None and age_s < self._refresh_s:
            return key
        fetching = self._fetch_soon()
        if key is not None and age_s < self._stale_s:
            return key
        if fetching is not None:
            # One request waits no longer than another, and none takes the answer from the others.
            await asyncio.shield(fetching)
        if time.monotonic() - self._known_at >= self._stale_s:
            raise IssuerUnavailable
        return self._keys.get((key_id, algorithm))

    async def load(self) -> None:
        """Ask for the keys before anybody needs them; an issuer that does not answer is no error yet."""
        fetching = self._fetch_soon()
        if fetching is not None:
            await asyncio.shield(fetching)

    async def close(self) -> None:
        """Give up a request that is under way."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        await self._http.aclose()

    def _fetch_soon(self) -> asyncio.Task[None] | None:
        """The one request that is under way, a new one if it may be made, else None."""
        if self._fetching is None or self._fetching.done():
            now = time.monotonic()
            if now - self._asked_at < self._cool_down_s:
                return None
            self._asked_at = now
            self._fetching = asyncio.create_task(self._fetch())
        return self._fetching

    async def _fetch(self) -> None:
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._keys = _keys_of(await self._read(), self._algorithms)
        except (TimeoutError, httpx2.HTTPError, ValueError) as error:
            log.warning("issuer_keys_not_loaded", cause=type(error).__name__)
        else:
            self._known_at = began

    async def _read(self) -> bytes:
        # Uncompressed, so that what arrives is as long as what it becomes.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with self._http.stream("GET", self._url, headers=headers) as response:
            if response.status_code != httpx2.codes.OK:
                raise ValueError("the issuer does not answer with its keys")
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_KEY_SET_BYTES:
                    raise ValueError("the issuer's key set is too long to be one")
        return bytes(body)


def _keys_of(body: bytes, algorithms: Collection[str]) -> dict[tuple[str, str], jwt.PyJWK]:
    """The usable keys of a JWKS, each bound to an algorithm; those of other uses and kinds are left out.

    Raises ValueError when it is no JWKS.
    """
    try:
        listed = json.loads(body)["keys"]
    except (LookupError, TypeError, RecursionError) as error:
        raise ValueError("not a key set") from error
    if not isinstance(listed, list):
        raise ValueError("not a key set")
    found: dict[tuple[str, str], jwt.PyJWK] = {}
    for one in listed:
        if isinstance(one, dict) and isinstance(key_id := one.get("kid"), str) and _verifies(one):
            for algorithm in algorithms:
                key = _bound(one, algorithm)
                if key is not None:
                    found.setdefault((key_id, algorithm), key)
    return found


def _verifies(key: Mapping[str, Any]) -> bool:
    """Whether a key is for checking signatures. One that is published with its secret half is nobody's."""
    uses = key.get("key_ops", ["verify"])
    return key.get("use", "sig") == "sig" and isinstance(uses, list) and "verify" in uses and "d" not in key


def _bound(key: dict[str, Any], algorithm: str) -> jwt.PyJWK | None:
    """The key for one algorithm, None unless it is of its kind, strong enough and not meant for another."""
    if key.get("alg", algorithm) != algorithm:
        return None
    try:
        bound = jwt.PyJWK(key, algorithm)
        prepared = bound.Algorithm.prepare_key(bound.key)
    except (jwt.PyJWTError, TypeError, ValueError):
        return None
    return None if bound.Algorithm.check_key_length(prepared) else bound


@dataclass(frozen=True, slots=True, kw_only=True)
class EndUser:
    """What a token says of its holder."""

    tenant_id: str
    user_id: int | None
    project_ids: frozenset[str] | None
    """None when the token does not say: then the database alone decides."""
    tags: tuple[str, ...]
    may_publish: bool


class TokenVerifier:
    """Checks tokens against the settings RAG_JWT_*."""

    def __init__(self, settings: Settings, *, keys: KeySet | None = None) -> None:
        """Raises AccessError for settings that leave out what a token must be compared with."""
        url = settings.rag_jwt_jwks_url
        if settings.rag_jwt_issuer is None or settings.rag_jwt_audience is None or url is None:
            raise AccessError("RAG_JWT_ISSUER, RAG_JWT_AUDIENCE and RAG_JWT_JWKS_URL must be set together")
        self._settings = settings
        try:
            self.keys = keys or KeySet(url, algorithms=settings.rag_jwt_algorithms)
        except httpx2.InvalidURL as error:
            raise AccessError("RAG_JWT_JWKS_URL is not an address") from error

    async def verify(self, token: str) -> EndUser:
        """The holder of a token. Raises Unauthenticated, from what was wrong; IssuerUnavailable."""
        try:
            if not _SHAPE.fullmatch(token):
                raise jwt.DecodeError
            key = await self._key(jwt.get_unverified_header(token))
            claims = jwt.decode(
                token,
                key,
                algorithms=sorted(self._settings.rag_jwt_algorithms),
                issuer=self._settings.rag_jwt_issuer,
                audience=self._settings.rag_jwt_audience,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
            # The library takes "1e10" and true for a time.
            if any(type(claims.get(name, 0)) not in (int, float) for name in _TIMES):
                raise jwt.DecodeError
            return self._end_user(claims)
        except (jwt.PyJWTError, InvalidInput) as error:
            raise Unauthenticated from error

    async def _key(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        """The key that a header names; where else it says that keys can be found is not looked at."""
        algorithm, key_id, kind = header.get("alg"), header.get("kid"), header.get("typ", "JWT")
        if not isinstance(algorithm, str) or algorithm not in self._settings.rag_jwt_algorithms:
            raise jwt.InvalidAlgorithmError
        # Neither extensions that must be understood nor payloads that are not encoded.
        if "crit" in header or "b64" in header:
            raise jwt.InvalidTokenError
        if not isinstance(kind, str) or kind.lower() not in _TYPES:
            raise jwt.InvalidTokenError
        key = await self.keys.find(key_id, algorithm) if isinstance(key_id, str) else None
        if key is None:
            raise jwt.InvalidKeyError
        return key

    def _end_user(self, claims: Mapping[str, Any]) -> EndUser:
        settings = self._settings
        user_id = claims.get(settings.rag_jwt_user_claim)
        roles = claims.get(settings.rag_jwt_roles_claim, [])
        return EndUser(
            tenant_id=_name(claims.get(settings.rag_jwt_tenant_claim), field=settings.rag_jwt_tenant_claim),
            user_id=None if user_id is None else check_user_id(user_id, field=settings.rag_jwt_user_claim),
            project_ids=_projects(claims, field=settings.rag_jwt_projects_claim),
            tags=check_tags(claims.get(settings.rag_jwt_tags_claim, PUBLIC_TAGS), field=settings.rag_jwt_tags_claim),
            # A list, or words of one text as in OAuth's `scope`.
            may_publish=settings.rag_jwt_publisher_role is not None
            and settings.rag_jwt_publisher_role in (roles.split() if isinstance(roles, str) else _list(roles)),
        )


def _name(value: object, *, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"{field} must be a string", field=field)
    return check_name(value, field=field)


def _projects(claims: Mapping[str, Any], *, field: str) -> frozenset[str] | None:
    if field not in claims:
        return None
    if not isinstance(claims[field], list):
        raise InvalidInput(f"{field} must be a list of strings", field=field)
    return frozenset(_name(project, field=field) for project in claims[field])


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
