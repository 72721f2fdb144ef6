"""Who calls, and whom they may speak for. Until end users bring tokens of their own there are two doors:
the token that `rag serve` prints, on loopback only, and the key of one trusted service.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request

from rag.errors import AccessError, PrincipalMismatch, ScopeForbidden, Unauthenticated
from rag.principal import Principal, check_tags, check_user_id
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
        tenant = tenant_id or self.grant.tenant_id
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

    def destination(self, principal: Principal, *, scope: Scope | None, tags: list[str] | None) -> Destination:
        """Where a document of this principal goes: the narrowest scope that the principal names, unless told."""
        if scope is None:
            scope = "project" if principal.project_id is not None else "user"
        if scope not in self.grant.scopes:
            raise ScopeForbidden(f"this credential may not write scope {scope}", field="scope")
        return destination_of(principal, scope=scope, tags=tags)


class Door:
    """Lets callers in by their bearer credential, and refuses requests that a web page sent."""

    def __init__(self, grant: Grant, *, loopback: bool) -> None:
        self._grant = grant
        self._loopback = loopback

    def admit(self, request: Request, action: Action) -> Caller:
        """Raises Unauthenticated, AccessError, HTTPException (421) for a foreign Host."""
        self.check_origin(request)
        scheme, _, credential = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not credential or len(credential) > MAX_CREDENTIAL_LENGTH:
            raise Unauthenticated()
        digest = hashlib.sha256(credential.encode("latin-1", "replace")).hexdigest()
        if not hmac.compare_digest(digest.encode(), self._grant.credential_sha256.encode()):
            raise Unauthenticated()
        if action not in self._grant.actions:
            raise AccessError(f"this credential does not permit {action}")
        return Caller(grant=self._grant)

    def check_origin(self, request: Request) -> None:
        """On loopback, refuse other Hosts (DNS rebinding) and other Origins (any page can reach loopback)."""
        if not self._loopback:
            return
        host = request.headers.get("host", "")
        if urlsplit(f"//{host}").hostname not in LOOPBACK:
            raise HTTPException(421, "This service answers on loopback only")
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            raise HTTPException(403, "Requests of other web pages are refused")


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
    return secrets.token_urlsafe(24)
