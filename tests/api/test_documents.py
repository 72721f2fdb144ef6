"""GET and DELETE /rag/documents/{id}: a document that one may not see does not differ from one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import uuid4

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from api.identity import Door
from rag.keys import KeyRing
from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import Person, fields_of, issued_key, problem_of, running
from tests.conftest import Deployment

REFUNDS = "# Refunds\n\nA refund takes five working days."
ASKED = "How long does a refund take?"


def stripped(response: Response) -> tuple[int, dict[str, str], str]:
    """All that a caller sees of an answer, but for the id of the request."""
    headers = dict(response.headers)
    request_id = headers.pop("x-request-id")
    return response.status_code, headers, response.text.replace(request_id, "-")


# --- reading -------------------------------------------------------------------------------------


def test_the_owner_reads_what_was_stored(mara: Person) -> None:
    details = {
        "source_uri": "https://wiki.example/refunds",
        "source_updated_at": "2026-03-01T08:00:00+01:00",
        "language": "en",
        "domain": "support",
        "doc_type": "policy",
        "verified": True,
        "metadata": {"team": "payments"},
    }
    document = mara.store("refunds.md", REFUNDS, **details)
    response = mara.read(document)
    assert response.status_code == 200
    found = response.json()
    times = [datetime.fromisoformat(found.pop(name)) for name in ("created_at", "updated_at", "content_updated_at")]
    assert all(time.tzinfo is not None for time in times)
    assert found == details | {
        "source_updated_at": "2026-03-01T07:00:00Z",
        "document_id": document,
        "title": "Refunds",
        "scope": "user",
        "user_id": 7,
        "project_id": None,
        "tags": ["public"],
        "source_type": "markdown",
        "source_id": "refunds.md",
        "body": REFUNDS,
        "chunk_count": 1,
    }


def test_a_project_document_is_read_by_who_names_the_project(mara: Person) -> None:
    on_orion = replace(mara, project_id="orion")
    document = on_orion.store("refunds.md", REFUNDS)
    assert on_orion.read(document).status_code == 200
    assert replace(mara, project_id="*").read(document).status_code == 200
    problem_of(mara.read(document), 404, "not_found")
    problem_of(replace(mara, project_id="lyra").read(document), 404, "not_found")


# --- foreign and missing -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["read", "delete"])
def test_a_foreign_document_answers_as_a_missing_one(method: str, mara: Person, jonas: Person, visitor: Person) -> None:
    document = mara.store("refunds.md", REFUNDS)
    strangers = [jonas, visitor, replace(mara, tenant_id=f"{mara.tenant_id}-2"), replace(mara, user_tags=["hr"])]
    for stranger in strangers:
        foreign = getattr(stranger, method)(document)
        missing = getattr(stranger, method)(uuid4())
        problem_of(foreign, 404, "not_found")
        assert stripped(foreign) == stripped(missing)
    assert mara.read(document).status_code == 200


# --- deleting ------------------------------------------------------------------------------------


def test_a_deleted_document_is_found_nowhere(mara: Person, stored: Callable[[str], int]) -> None:
    document = mara.store("refunds.md", REFUNDS)
    response = mara.delete(document)
    assert (response.status_code, response.content) == (204, b"")
    assert mara.finds(ASKED) == []
    problem_of(mara.read(document), 404, "not_found")
    problem_of(mara.delete(document), 404, "not_found")
    assert stored(str(mara.tenant_id)) == 0


def test_a_deleted_source_that_comes_again_is_a_new_document(mara: Person) -> None:
    document = mara.store("refunds.md", REFUNDS)
    mara.delete(document)
    assert mara.store("refunds.md", REFUNDS) != document
    assert mara.finds(ASKED) == ["Refunds"]


def test_deleting_one_document_leaves_the_others(mara: Person, jonas: Person) -> None:
    document = mara.store("refunds.md", REFUNDS)
    mara.store("more.md", "# More\n\nA refund takes longer on holidays.")
    jonas.store("refunds.md", REFUNDS)
    mara.delete(document)
    assert mara.finds(ASKED) == ["More"]
    assert jonas.finds(ASKED) == ["Refunds"]


# --- public documents ----------------------------------------------------------------------------


def test_whoever_may_publish_deletes_a_public_document(mara: Person, jonas: Person) -> None:
    document = mara.store("refunds.md", REFUNDS, scope="public")
    assert jonas.delete(document).status_code == 204
    problem_of(mara.read(document), 404, "not_found")


def test_without_rag_publisher_a_public_document_stays(deployment: Deployment, settings: Settings) -> None:
    with running(deployment, settings) as client:
        document = Person(client=client, tenant_id="acme", user_id=7).store("refunds.md", REFUNDS, scope="public")
    with running(deployment, settings, publishes=False) as client:
        mara = Person(client=client, tenant_id="acme", user_id=7)
        problem_of(mara.delete(document), 403, "scope_forbidden")
        assert mara.read(document).status_code == 200


def test_a_service_without_the_scope_deletes_no_public_document(client: TestClient, service: TestClient) -> None:
    document = Person(client=client, tenant_id=ACME, user_id=7).store("refunds.md", REFUNDS, scope="public")
    served = Person(client=service, tenant_id=ACME, user_id=7)
    assert served.read(document).status_code == 200
    assert fields_of(problem_of(served.delete(document), 403, "scope_forbidden")) == ["scope"]
    assert served.read(document).status_code == 200


def test_a_service_with_the_scope_publishes_and_deletes(site: Deployment, settings: Settings) -> None:
    key = issued_key(site, tenant_id=ACME, act_as=True, scopes=["public"])
    with running(site, settings, door=Door(keys=KeyRing()), credential=key.text) as client:
        editor = Person(client=client, tenant_id=ACME, user_id=7)
        document = editor.store("announcement.md", REFUNDS, scope="public")
        assert editor.delete(document).status_code == 204
        problem_of(editor.ingest("note.md", REFUNDS, scope="user"), 403, "scope_forbidden")


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    ("path", "parameters", "named"),
    [
        ("not-an-id", {}, "document_id"),
        ("'; drop table rag_documents; --", {}, "document_id"),
        ("00000000-0000-4000-8000-00000000000١", {}, "document_id"),
        ("00000000-0000-4000-8000-000000000001", {"app.user_id": "7"}, "app.user_id"),
        ("00000000-0000-4000-8000-000000000001", {"userid": "7"}, "userid"),
        ("00000000-0000-4000-8000-000000000001", {"user_id": "0"}, "user_id"),
        ("00000000-0000-4000-8000-000000000001", {"user_id": "7 or true"}, "user_id"),
        ("00000000-0000-4000-8000-000000000001", {"user_id": "٧"}, "user_id"),
        ("00000000-0000-4000-8000-000000000001", {"user_id": ""}, "user_id"),
        ("00000000-0000-4000-8000-000000000001", {"tenant_id": ""}, "tenant_id"),
        ("00000000-0000-4000-8000-000000000001", {"tenant_id": "a\0b"}, "tenant_id"),
        ("00000000-0000-4000-8000-000000000001", {"project_id": "x" * 129}, "project_id"),
        ("00000000-0000-4000-8000-000000000001", {"user_tags": ["hr", "a\nb"]}, "user_tags"),
    ],
)
def test_a_parameter_that_is_none_of_ours_or_malformed_is_named(
    client: TestClient, method: str, path: str, parameters: dict[str, Any], named: str
) -> None:
    problem = problem_of(client.request(method, f"/rag/documents/{path}", params=parameters), 422, "invalid_input")
    assert fields_of(problem) == [named]
