"""Who calls, and whom they may speak for. Until end users bring tokens of their own there are two doors:
the token that `rag serve` prints, on loopback only, and the key of one trusted service.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from rag.errors import AccessError, PrincipalMismatch, ScopeForbidden, Unauthenticated
from rag.principal import MAX_TAGS, PUBLIC_TAGS, Principal, check_tags, check_user_id
from rag.settings import Settings
from rag.store import Destination, Scope, destination_of

Action = Literal["query", "ingest", "delete"]

# SECURITY.md A2: a megabyte of credential is refused before anything is computed from it.
MAX_CREDENTIAL_LENGTH = 4096
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the holder of a credential may assert. None = no bound."""

    credential_sha256: str
    tenant_id: str
    actions: frozenset[str]
    scopes: frozenset[str]
    tags: frozenset[str] | None
    any_tenant: bool = False
    """Loopback only: the developer at the keyboard owns the database anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A verified caller of one request."""

    grant: Grant

    def principal(
        self,
        *,
        tenant_id: str | None,
        user_id: int | str | None,
        project_id: str | None,
        tags: list[str] | None,
    ) -> Principal:
        """The principal that the body asserts, within what the credential allows.

        Raises PrincipalMismatch beyond that, InvalidInput for malformed ids.
        """
        tenant = self.grant.tenant_id if tenant_id is None else tenant_id
        if tenant != self.grant.tenant_id and not self.grant.any_tenant:
            raise PrincipalMismatch("this key speaks for another tenant", field="tenant_id")
        asserted = check_tags(tags or [], field="user_tags")
        if self.grant.tags is not None and not self.grant.tags.issuperset(asserted):
            raise PrincipalMismatch("this key may not assert these tags", field="user_tags")
        return Principal(
            tenant_id=tenant,
            user_id=None if user_id is None else check_user_id(user_id),
            project_id=project_id,
            tags=asserted,
        )

    def writing_tags(self, tags: list[str] | None) -> list[str]:
        """What the writer of a document with these tags asserts, when the body does not say.

        What one writes one must be able to read. And whoever restricts a document that went in without
        tags must see it, or the open copy would stay.
        """
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

    def check_scope(self, scope: str) -> None:
        """Raise ScopeForbidden unless the credential may write, and so delete, in this scope."""
        if scope not in self.grant.scopes:
            raise ScopeForbidden(f"this credential may not write scope {scope}", field="scope")


class Door:
    """Lets callers in by their bearer credential, and refuses requests that a web page sent."""

    def __init__(self, grant: Grant, *, loopback: bool) -> None:
        self._grant = grant
        self._loopback = loopback

    def admit(self, request: Request, action: Action) -> Caller:
        """The caller, when it may do this. Raises as `identify` does, and AccessError."""
        caller = self.identify(request)
        if action not in caller.grant.actions:
            raise AccessError(f"this credential does not permit {action}")
        return caller

    def identify(self, request: Request) -> Caller:
        """The caller, from the headers alone. Raises Unauthenticated, HTTPException (421, 403) for other pages."""
        self.check_origin(request)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential or len(credential) > MAX_CREDENTIAL_LENGTH:
            raise Unauthenticated()
        digest = hashlib.sha256(credential.encode("latin-1", "replace")).hexdigest()
        if not hmac.compare_digest(digest.encode(), self._grant.credential_sha256.encode()):
            raise Unauthenticated()
        return Caller(grant=self._grant)

    def check_origin(self, request: Request) -> None:
        """On loopback, refuse other Hosts (DNS rebinding) and other Origins (any page can reach loopback)."""
        if not self._loopback:
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


def loopback_door(token: str) -> Door:
    """For `rag serve`: whoever knows the printed token may act for anyone in any tenant."""
    return Door(
        Grant(
            credential_sha256=hashlib.sha256(token.encode()).hexdigest(),
            tenant_id="default",
            actions=frozenset({"query", "ingest", "delete"}),
            scopes=frozenset({"public", "user", "project"}),
            tags=None,
            any_tenant=True,
        ),
        loopback=True,
    )


def service_door(settings: Settings) -> Door:
    """For one trusted service, whose key's SHA-256 is in the settings. Raises AccessError when it is not."""
    if settings.rag_service_key_sha256 is None or settings.rag_service_tenant_id is None:
        raise AccessError("RAG_SERVICE_KEY_SHA256 and RAG_SERVICE_TENANT_ID must be set to serve beyond loopback")
    return Door(
        Grant(
            credential_sha256=settings.rag_service_key_sha256,
            tenant_id=settings.rag_service_tenant_id,
            actions=frozenset(settings.rag_service_actions),
            scopes=frozenset(settings.rag_service_scopes),
            tags=settings.rag_service_tags,
        ),
        loopback=False,
    )


def new_token() -> str:
    """A token for one run of the server, of 192 random bits."""
    return secrets.token_urlsafe(24)
