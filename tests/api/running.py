"""The application, running on a real database, and the people who call it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from httpx2 import Response
from starlette.testclient import TestClient

from api.app import create_app
from api.identity import Door, loopback_door
from rag.database import Database
from rag.keys import NewKey, new_key
from rag.settings import Settings
from tests.conftest import SIGNER, Deployment
from tests.fakes import refusing_url

TOKEN = "the-token-that-serve-prints"
JSON = {"Content-Type": "application/json"}


def database_of(
    deployment: Deployment, *, publishes: bool = True, pool_size: int = 3, pool_timeout_s: float = 5.0
) -> Database:
    """The pools of the service, not yet opened."""
    return Database(
        deployment.url("rag_app"),
        signer=SIGNER,
        publisher_url=deployment.url("rag_publisher") if publishes else None,
        pool_size=pool_size,
        pool_timeout_s=pool_timeout_s,
    )


def nowhere() -> Database:
    """The pools of a database that does not answer, never to be opened."""
    return Database(refusing_url().replace("http", "postgresql"), signer=SIGNER)


@contextmanager
def running(
    deployment: Deployment,
    settings: Settings,
    *,
    door: Door | None = None,
    credential: str = TOKEN,
    database: Database | None = None,
    **pools: Any,
) -> Iterator[TestClient]:
    """A client of an application that has started; on loopback unless another door is given."""
    database = database or database_of(deployment, **pools)
    app = create_app(settings, database=database, door=door or loopback_door(TOKEN))
    with TestClient(
        app,
        base_url="http://127.0.0.1:8000",
        raise_server_exceptions=False,
        headers={"Authorization": f"Bearer {credential}"},
    ) as client:
        yield client


def issued_key(
    deployment: Deployment,
    *,
    tenant_id: str,
    actions: Sequence[str] = ("query", "ingest", "delete"),
    scopes: Sequence[str] = ("user", "project"),
    tags: Sequence[str] | None = None,
    act_as: bool = False,
    user_ids: Sequence[int] | None = None,
    project_ids: Sequence[str] | None = None,
    valid_for: str = "1 hour",
) -> NewKey:
    """A service key as the operator makes one."""
    key = new_key()
    with deployment.connect("rag_operator") as connection:
        connection.execute(
            "insert into rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, tags, act_as,"
            " user_ids, project_ids, expires_at)"
            " values (%s, %s, 'a service', %s, %s, %s, %s, %s, %s, %s, now() + cast(%s as interval))",
            (
                tenant_id,
                key.key_id,
                key.secret_sha256,
                list(actions),
                list(scopes),
                None if tags is None else list(tags),
                act_as,
                None if user_ids is None else list(user_ids),
                None if project_ids is None else list(project_ids),
                valid_for,
            ),
        )
    return key


@dataclass(frozen=True, kw_only=True)
class Person:
    """Somebody for whom requests are made; fields that are None are left out of them."""

    client: TestClient
    tenant_id: str | None = None
    credential: str | None = None
    """None = the client's own."""
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

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.credential is None else {"Authorization": f"Bearer {self.credential}"}

    def ask(self, query: str, **fields: Any) -> Response:
        return self.client.post("/rag/query", json={"query": query} | self.identity | fields, headers=self.headers)

    def finds(self, query: str, **fields: Any) -> list[str]:
        """The names of the documents of all hits, best first."""
        response = self.ask(query, generate=False, **fields)
        assert response.status_code == 200, response.text
        return [hit["document_name"] for hit in response.json()["hits"]]

    def ingest(self, source_id: str, content: str, **fields: Any) -> Response:
        return self.client.post(
            "/rag/ingest",
            json={"source_id": source_id, "content": content} | self.identity | fields,
            headers=self.headers,
        )

    def store(self, source_id: str, content: str, **fields: Any) -> str:
        """The id of a document that went in."""
        response = self.ingest(source_id, content, **fields)
        assert response.status_code == 201, response.text
        return str(response.json()["document_id"])

    def read(self, document_id: object) -> Response:
        return self.client.get(f"/rag/documents/{document_id}", params=self.identity, headers=self.headers)

    def delete(self, document_id: object) -> Response:
        return self.client.delete(f"/rag/documents/{document_id}", params=self.identity, headers=self.headers)


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
    if status != 429:
        assert response.headers.get("retry-after") == ("5" if status == 503 else None)
    assert response.headers.get("www-authenticate") == ("Bearer" if status == 401 else None)
    return found


def fields_of(problem: dict[str, Any]) -> list[str]:
    return [entry["field"] for entry in problem["errors"]]


def repeats(response: Response, sent: str, *, length: int = 257) -> bool:
    """Whether an answer has a stretch of so many characters of what was sent (SECURITY.md, Y12)."""
    text = response.text
    return any(text[start : start + length] in sent for start in range(len(text) - length + 1))
