"""Who calls, and whom they may speak for.

Three kinds of credential, each with a door of its own: the token of an end user, the key of a trusted
service, and the token that `rag serve` prints on loopback. All end in one `Grant`, and what happens after
that does not depend on which it was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from api.tokens import EndUser, TokenVerifier
from rag.database import Database
from rag.errors import AccessError, PrincipalMismatch, ScopeForbidden, Unauthenticated
from rag.keys import ACTIONS, KEY_PREFIX, Action, KeyRing, ServiceKey, record_assertion
from rag.principal import ALL_PROJECTS, MAX_TAGS, PUBLIC_TAGS, Principal, check_tags, check_user_id
from rag.settings import Settings
from rag.store import SCOPES, Destination, Scope, destination_of

# A megabyte of credential is refused before anything is computed from it. Proxies
# allow a header about so much.
MAX_CREDENTIAL_LENGTH = 8192
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the holder of a credential may do, and whom they may name. None = no bound."""

    tenant_id: str
    actions: frozenset[str]
    scopes: frozenset[str]
    tags: frozenset[str] | None
    user_ids: frozenset[int] | None
    project_ids: frozenset[str] | None
    user_id: int | None = None
    """Who asks when the request names nobody."""
    own_tags: tuple[str, ...] | None = None
    """Those of the holder, who asks with them when the request names none. None = the holder speaks for
    others, whose tags are public unless the request names them."""
    key_id: str | None = None
    """The service key, whose use is recorded."""
    any_tenant: bool = False
    """Loopback only: the developer at the keyboard owns the database anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A verified caller of one request."""

    grant: Grant

    def check_action(self, action: Action) -> None:
        """Raise AccessError unless the credential permits the action."""
        if action not in self.grant.actions:
            raise AccessError(f"this credential does not permit {action}")

    def principal(
        self,
        *,
        tenant_id: str | None,
        user_id: int | str | None,
        project_id: str | None,
        tags: list[str] | None,
    ) -> Principal:
        """The principal that a request names, filled up from the credential and within its bounds.

        Raises PrincipalMismatch beyond these, InvalidInput for malformed ids.
        """
        grant = self.grant
        tenant = grant.tenant_id if tenant_id is None else tenant_id
        if tenant != grant.tenant_id and not grant.any_tenant:
            raise PrincipalMismatch("this credential is for another tenant", field="tenant_id")
        user = grant.user_id if user_id is None else check_user_id(user_id)
        if user is not None and grant.user_ids is not None and user not in grant.user_ids:
            raise PrincipalMismatch("this credential does not speak for this user", field="user_id")
        if project_id is not None and grant.project_ids is not None and project_id not in grant.project_ids:
            raise PrincipalMismatch("this credential does not speak for this project", field="project_id")
        asserted = check_tags((grant.own_tags or PUBLIC_TAGS) if tags is None else tags, field="user_tags")
        if grant.tags is not None and not grant.tags.issuperset(asserted):
            raise PrincipalMismatch("this credential may not assert these tags", field="user_tags")
        return Principal(tenant_id=tenant, user_id=user, project_id=project_id, tags=asserted)

    def writing_tags(self, tags: list[str] | None) -> list[str]:
        """What the writer of a document with these tags asserts, when the request does not say.

        What one writes one must be able to read. And whoever restricts a document that went in without
        tags must see it, or the open copy would stay.
        """
        if self.grant.own_tags is not None:
            return list(self.grant.own_tags)
        public = PUBLIC_TAGS if self.grant.tags is None or self.grant.tags.issuperset(PUBLIC_TAGS) else ()
        return [*check_tags(tags or [], field="tags"), *public][:MAX_TAGS]

    def destination(self, principal: Principal, *, scope: Scope | None, tags: list[str] | None) -> Destination:
        """Where a document of this principal goes: the narrowest scope that the principal names, unless told.

        Raises ScopeForbidden for a scope or a tag that the credential does not allow.
        """
        if scope is None:
            scope = "project" if principal.project_id is not None else "user"
        self.check_scope(scope)
        destination = destination_of(principal, scope=scope, tags=tags)
        if self.grant.tags is not None and not self.grant.tags.issuperset(destination.tags):
            raise ScopeForbidden("this credential may not write these tags", field="tags")
        return destination

    def scopes(self, wanted: Scope | None) -> frozenset[Scope]:
        """The scopes in which the credential may delete, or the wanted one of them. Raises ScopeForbidden."""
        if wanted is None:
            return frozenset(scope for scope in SCOPES if scope in self.grant.scopes)
        self.check_scope(wanted)
        return frozenset({wanted})

    def check_scope(self, scope: str) -> None:
        """Raise ScopeForbidden unless the credential may write, and so delete, in this scope."""
        if scope not in self.grant.scopes:
            raise ScopeForbidden(f"this credential may not write scope {scope}", field="scope")

    async def record(self, database: Database, principal: Principal, action: Action) -> None:
        """Leave a record that a service key speaks for this principal, before it does anything.

        Raises the DatabaseError family: what cannot be recorded is not carried out.
        """
        if self.grant.key_id is not None:
            await record_assertion(database, principal, key_id=self.grant.key_id, action=action)


class Door:
    """Lets callers in by their bearer credential: end users and services, or on loopback the developer."""

    def __init__(
        self,
        *,
        tokens: TokenVerifier | None = None,
        keys: KeyRing | None = None,
        printed_token: str | None = None,
    ) -> None:
        if printed_token is not None and (tokens is not None or keys is not None):
            raise AccessError("the printed token is for loopback, where nobody else calls")
        self._tokens = tokens
        self._keys = keys
        self._printed_sha256 = None if printed_token is None else _digest(printed_token)

    @asynccontextmanager
    async def opened(self, database: Database) -> AsyncIterator[None]:
        """Keep what callers are checked against up to date, from an open database."""
        async with AsyncExitStack() as stack:
            if self._keys is not None:
                await stack.enter_async_context(self._keys.kept_current(database))
            if self._tokens is not None:
                stack.push_async_callback(self._tokens.keys.close)
                await self._tokens.keys.load()
            yield

    async def identify(self, request: Request) -> Caller:
        """The caller, from the headers alone and without a database connection.

        Raises Unauthenticated, HTTPException (421, 403) for other web pages, IssuerUnavailable and
        DatabaseUnavailable when a credential can be neither believed nor refused.
        """
        self._check_origin(request)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential or len(credential) > MAX_CREDENTIAL_LENGTH:
            raise Unauthenticated
        if self._printed_sha256 is not None:
            if not hmac.compare_digest(_digest(credential), self._printed_sha256):
                raise Unauthenticated
            return Caller(grant=_DEVELOPER)
        if self._keys is not None and credential.startswith(KEY_PREFIX):
            key = self._keys.find(credential)
            if key is None:
                raise Unauthenticated
            return Caller(grant=_service_grant(key))
        if self._tokens is not None:
            return Caller(grant=_end_user_grant(await self._tokens.verify(credential)))
        raise Unauthenticated

    def _check_origin(self, request: Request) -> None:
        """On loopback, refuse other Hosts (DNS rebinding) and other Origins (any page can reach loopback)."""
        if self._printed_sha256 is None:
            return
        host = request.headers.get("host", "")
        if _split(f"//{host}").hostname not in LOOPBACK:
            raise HTTPException(421, "This service answers on loopback only")
        origin = request.headers.get("origin")
        if origin is not None and _split(origin).netloc != host:
            raise HTTPException(403, "Requests of other web pages are refused")


def _split(address: str) -> SplitResult:
    """The parts of an address; of a malformed one, none."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _digest(credential: str) -> bytes:
    return hashlib.sha256(credential.encode("latin-1", "replace")).digest()


_DEVELOPER = Grant(
    tenant_id="default",
    actions=frozenset(ACTIONS),
    scopes=frozenset({"public", "user", "project"}),
    tags=None,
    user_ids=None,
    project_ids=None,
    any_tenant=True,
)


def _end_user_grant(user: EndUser) -> Grant:
    return Grant(
        tenant_id=user.tenant_id,
        actions=frozenset(ACTIONS),
        scopes=frozenset({"user", "project", "public"} if user.may_publish else {"user", "project"}),
        tags=frozenset(user.tags),
        own_tags=user.tags,
        user_id=user.user_id,
        user_ids=frozenset(() if user.user_id is None else (user.user_id,)),
        project_ids=_bounded(user.project_ids),
    )


def _service_grant(key: ServiceKey) -> Grant:
    return Grant(
        key_id=key.key_id,
        tenant_id=key.tenant_id,
        actions=key.actions,
        scopes=key.scopes,
        tags=key.tags,
        own_tags=None if key.act_as or key.tags is None else tuple(sorted(key.tags)),
        user_ids=key.user_ids if key.act_as else frozenset(),
        project_ids=_bounded(key.project_ids) if key.act_as else frozenset(),
    )


def _bounded(project_ids: frozenset[str] | None) -> frozenset[str] | None:
    """Who may name all projects at once may name each of them."""
    return None if project_ids is not None and ALL_PROJECTS in project_ids else project_ids


def loopback_door(token: str) -> Door:
    """For `rag serve`: whoever knows the printed token may act for anyone in any tenant."""
    return Door(printed_token=token)


def configured_door(settings: Settings) -> Door | None:
    """For the end users and the services that the settings let in; None when they let in nobody.

    Raises AccessError for settings that say half of it.
    """
    issuer = (settings.rag_jwt_issuer, settings.rag_jwt_audience, settings.rag_jwt_jwks_url)
    tokens = None if issuer == (None, None, None) else TokenVerifier(settings)
    keys = KeyRing() if settings.rag_service_keys else None
    return Door(tokens=tokens, keys=keys) if tokens or keys else None


def new_token() -> str:
    """A token for one run of the server, of 192 random bits."""
    return secrets.token_urlsafe(24)
