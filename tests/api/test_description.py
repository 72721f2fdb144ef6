"""The description of the API at /openapi.json, from which clients are made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.api.running import Person

ROUTES = {
    ("post", "/rag/query"),
    ("post", "/rag/enrich"),
    ("post", "/rag/skill"),
    ("post", "/rag/feedback"),
    ("post", "/rag/citations/check"),
    ("post", "/rag/ingest"),
    ("post", "/rag/invalidate"),
    ("post", "/rag/reinstate"),
    ("get", "/rag/documents/{document_id}"),
    ("delete", "/rag/documents/{document_id}"),
    ("post", "/rag/conversations/{thread_id}/messages"),
    ("get", "/rag/conversations/{thread_id}"),
    ("get", "/rag/jobs/{job_id}"),
    ("delete", "/rag/jobs/{job_id}"),
    ("get", "/rag/projects/{project_id}/members"),
    ("put", "/rag/projects/{project_id}/members/{member_user_id}"),
    ("delete", "/rag/projects/{project_id}/members/{member_user_id}"),
    ("get", "/livez"),
    ("get", "/readyz"),
    ("get", "/health"),
}
PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}


@pytest.fixture(scope="module")
def description(client: TestClient) -> dict[str, Any]:
    response = client.get("/openapi.json")
    assert response.status_code == 200
    found: dict[str, Any] = response.json()
    return found


@pytest.fixture(scope="module")
def operations(description: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): operation
        for path, methods in description["paths"].items()
        for method, operation in methods.items()
    }


def references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for name, member in node.items():
            if name == "$ref":
                yield member
            else:
                yield from references(member)
    elif isinstance(node, list):
        for member in node:
            yield from references(member)


def test_the_routes_are_these(operations: dict[tuple[str, str], Any], description: dict[str, Any]) -> None:
    assert set(operations) == ROUTES
    assert description["openapi"].startswith("3.1")
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", description["info"]["version"])
    assert description["info"]["title"] == "Palisade"


def test_every_reference_leads_somewhere(description: dict[str, Any]) -> None:
    found = set(references(description))
    assert "#/components/schemas/Problem" in found
    for reference in found:
        node: Any = description
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]


def test_every_route_says_what_it_does_under_a_name_of_its_own(operations: dict[tuple[str, str], Any]) -> None:
    assert all(operation["summary"] for operation in operations.values())
    assert all(operation["tags"] for operation in operations.values())
    names = [operation["operationId"] for operation in operations.values()]
    assert len(set(names)) == len(names)


def test_every_route_declares_its_problems(operations: dict[tuple[str, str], Any]) -> None:
    for (_, path), operation in operations.items():
        responses = operation["responses"]
        problems = {status for status, response in responses.items() if response.get("content") == PROBLEM}
        failures = {status for status in responses if not status.startswith("2")}
        if path.startswith("/rag/"):
            assert problems == failures
            assert problems >= {"400", "401", "403", "404", "413", "415", "422", "503", "504"}
    assert operations["get", "/readyz"]["responses"]["503"]["content"] == PROBLEM
    assert operations["get", "/health"]["responses"]["401"]["content"] == PROBLEM


def test_a_problem_is_described_as_it_is_sent(description: dict[str, Any], client: TestClient) -> None:
    sent = client.get("/nothing").json()
    described = description["components"]["schemas"]["Problem"]
    assert set(described["properties"]) == set(described["required"]) == set(sent)
    assert "HTTPValidationError" not in description["components"]["schemas"]


def test_routes_that_want_a_credential_say_so(operations: dict[tuple[str, str], Any], description: Any) -> None:
    schemes = description["components"]["securitySchemes"]
    (name,) = schemes
    assert (schemes[name]["type"], schemes[name]["scheme"]) == ("http", "bearer")
    for (_, path), operation in operations.items():
        assert ("security" in operation) == path.startswith("/rag/")


def test_documents_are_asked_for_with_the_asserted_principal(operations: dict[tuple[str, str], Any]) -> None:
    for method in ("get", "delete"):
        parameters = operations[method, "/rag/documents/{document_id}"]["parameters"]
        assert [(one["name"], one["in"], one["required"]) for one in parameters] == [
            ("document_id", "path", True),
            ("tenant_id", "query", False),
            ("user_id", "query", False),
            ("project_id", "query", False),
            ("user_tags", "query", False),
        ]


def test_the_examples_work(description: dict[str, Any], mara: Person) -> None:
    schemas = description["components"]["schemas"]
    (document,) = schemas["IngestBody"]["examples"]
    tenant = {"tenant_id": mara.tenant_id}
    assert mara.client.post("/rag/ingest", json=document | tenant).status_code == 201
    answer, hits = schemas["QueryBody"]["examples"]
    response = mara.client.post("/rag/query", json=answer | tenant)
    assert response.status_code == 200
    assert response.json()["answer"].startswith("A refund takes five working days.")
    assert mara.client.post("/rag/query", json=hits | tenant).status_code == 200


def test_answers_have_the_fields_that_are_described(description: dict[str, Any], mara: Person) -> None:
    schemas = description["components"]["schemas"]
    document = mara.store("refunds.md", "# Refunds\n\nA refund takes five working days.")
    answer = mara.ask("How long does a refund take?").json()
    for name, sent in {
        "QueryAnswer": answer,
        "Hit": answer["hits"][0],
        "CitationOut": answer["citations"][0],
        "Confidence": answer["confidence"],
        "DocumentAnswer": mara.read(document).json(),
        "IngestAnswer": mara.ingest("a.md", "text").json(),
    }.items():
        assert set(schemas[name]["properties"]) == set(sent)
