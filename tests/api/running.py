"""The application, running on a real database, and the people who call it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from httpx2 import Response
from starlette.testclient import TestClient

from api.app import create_app
from api.identity import Door, loopback_door
from rag.database import Database
from rag.settings import Settings
from tests.conftest import SIGNER, Deployment

TOKEN = "the-token-that-serve-prints"
KEY = "the-key-of-the-trusted-service"
KEY_SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
JSON = {"Content-Type": "application/json"}


@contextmanager
def running(
    deployment: Deployment,
    settings: Settings,
    *,
    door: Door | None = None,
    credential: str = TOKEN,
    publishes: bool = True,
    pool_size: int = 3,
    pool_timeout_s: float = 5.0,
) -> Iterator[TestClient]:
    """A client of an application that has started; on loopback unless another door is given."""
    database = Database(
        deployment.url("rag_app"),
        signer=SIGNER,
        publisher_url=deployment.url("rag_publisher") if publishes else None,
        pool_size=pool_size,
        pool_timeout_s=pool_timeout_s,
    )
    app = create_app(settings, database=database, door=door or loopback_door(TOKEN))
    with TestClient(
        app,
        base_url="http://127.0.0.1:8000",
        raise_server_exceptions=False,
        headers={"Authorization": f"Bearer {credential}"},
    ) as client:
        yield client


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody for whom requests are made; fields that are None are left out of them."""

    client: TestClient
    tenant_id: str | None
    user_id: int | str | None = None
    project_id: str | None = None
    user_tags: list[str] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        fields = {
            "tenant_id": self.tenant_id,
            "user_id": self.user_id,
            "project_id": self.project_id,
            "user_tags": self.user_tags,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def ask(self, query: str, **fields: Any) -> Response:
        return self.client.post("/rag/query", json={"query": query} | self.identity | fields)

    def finds(self, query: str, **fields: Any) -> list[str]:
        """The names of the documents of all hits, best first."""
        response = self.ask(query, generate=False, **fields)
        assert response.status_code == 200, response.text
        return [hit["document_name"] for hit in response.json()["hits"]]

    def ingest(self, source_id: str, content: str, **fields: Any) -> Response:
        return self.client.post(
            "/rag/ingest", json={"source_id": source_id, "content": content} | self.identity | fields
        )

    def store(self, source_id: str, content: str, **fields: Any) -> str:
        """The id of a document that went in."""
        response = self.ingest(source_id, content, **fields)
        assert response.status_code == 201, response.text
        return str(response.json()["document_id"])

    def read(self, document_id: object) -> Response:
        return self.client.get(f"/rag/documents/{document_id}", params=self.identity)

    def delete(self, document_id: object) -> Response:
        return self.client.delete(f"/rag/documents/{document_id}", params=self.identity)


def problem_of(response: Response, status: int, code: str) -> dict[str, Any]:
    """The problem that a response describes, after checking that it is a whole one (RFC 9457)."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = json.loads(response.text)
    assert set(found) == {"type", "title", "status", "detail", "instance", "code", "request_id", "errors"}
    assert found["type"] == f"urn:palisade:problem:{code}"
    assert (found["status"], found["code"]) == (status, code)
    assert found["title"]
    assert found["detail"]
    assert found["request_id"] == response.headers["x-request-id"]
    assert found["instance"] == f"urn:uuid:{found['request_id']}"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers.get("retry-after") == ("5" if status == 503 else None)
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    return found


def fields_of(problem: dict[str, Any]) -> list[str]:
    return [entry["field"] for entry in problem["errors"]]


def repeats(response: Response, sent: str, *, length: int = 257) -> bool:
    """Whether an answer has a stretch of so many characters of what was sent (SECURITY.md, Y12)."""
    text = response.text
    return any(text[start : start + length] in sent for start in range(len(text) - length + 1))
