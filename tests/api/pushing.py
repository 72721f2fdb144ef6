"""Pushes as GitHub sends them, and the files that say whose they are."""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from pathlib import Path
from typing import Any

import jwt

PATH = "/rag/webhooks/github"
REPOSITORY = "acme/handbook"
SECRET = "s1-" + "a1b2c3d4" * 8
OLD_SECRET = "s0-" + "e5f6a7b8" * 8
OTHER_SECRET = "s2-" + "0918273645" * 6
ORGANISATION_SECRET = "s3-" + "5647382910" * 6
SECRETS = f"""
acme/handbook: [{SECRET}, {OLD_SECRET}]
Globex/Code: {OTHER_SECRET}
initech: {ORGANISATION_SECRET}
"""
SOURCES = """
- {name: handbook, github: Acme/Handbook, ref: main, exclude: [drafts/], tenant: acme, user: 7}
- {name: notices, github: acme/handbook, ref: main, include: [notices/], tenant: globex, scope: public}
- {name: code, github: globex/code, tenant: globex, user: 9}
- {name: other, directory: elsewhere, tenant: acme, user: 7}
"""


def configured(folder: Path, *, secrets: str = SECRETS, sources: str = SOURCES) -> dict[str, Any]:
    """The settings of a service with a webhook, whose files are in this folder."""
    (folder / "secrets.yaml").write_text(secrets)
    (folder / "sources.yaml").write_text(sources)
    return {"rag_webhook_secrets": folder / "secrets.yaml", "rag_sources": folder / "sources.yaml"}


def pushed(
    *paths: str, repository: str = REPOSITORY, ref: str = "refs/heads/main", after: str = "1" * 40, **more: Any
) -> bytes:
    """The body of a push that has touched these paths."""
    commit = {"id": after, "message": "A change.", "added": [], "removed": [], "modified": list(paths)}
    event = {
        "ref": ref,
        "before": "0" * 40,
        "after": after,
        "created": False,
        "deleted": False,
        "forced": False,
        "repository": {"id": 35129377, "full_name": repository, "default_branch": "main", "private": True},
        "pusher": {"name": "mara"},
        "commits": [commit] if paths else [],
    }
    return json.dumps(event | more).encode()


def signature(body: bytes, secret: str = SECRET) -> str:
    return "sha256=" + hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def headers(body: bytes, secret: str | None = SECRET, **more: str) -> dict[str, str]:
    """As GitHub sends them; signed unless `secret` is None. Underlines in names of headers are hyphens."""
    sent = {
        "Content-Type": "application/json",
        "X-GitHub-Event": "push",
        "X-GitHub-Delivery": "72d3162e-cc78-11e3-81ab-4c9367dc0958",
        "X-GitHub-Hook-ID": "292430182",
        "User-Agent": "GitHub-Hookshot/044aadd",
    }
    if secret is not None:
        sent["X-Hub-Signature-256"] = signature(body, secret)
    return sent | {name.replace("_", "-"): value for name, value in more.items()}


def token(
    body: bytes,
    secret: str = SECRET,
    *,
    algorithm: str = "HS256",
    head: dict[str, Any] | None = None,
    without: str | None = None,
    **claims: Any,
) -> str:
    """As a workflow makes one."""
    now = int(time.time())
    said = {"iat": now, "exp": now + 300, "body_sha256": hashlib.sha256(body).hexdigest()} | claims
    if without is not None:
        del said[without]
    return jwt.encode(said, secret, algorithm=algorithm, headers=head)


def bearer(body: bytes, given: str | None = None, **more: str) -> dict[str, str]:
    """The headers of a request with a token instead of a signature."""
    return headers(body, None) | {"Authorization": f"Bearer {given or token(body)}"} | more
