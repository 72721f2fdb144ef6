"""POST /rag/invalidate and /rag/reinstate: what goes, what stays out, and what a stranger learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


def invalidate(person: Person, **fields: Any) -> Response:
    body = {"reason": "a test"} | person.identity | fields
    return person.client.post("/rag/invalidate", json=body, headers=person.headers)


def reinstate(person: Person, **fields: Any) -> Response:
    body = {"reason": "a test"} | person.identity | fields
    return person.client.post("/rag/reinstate", json=body, headers=person.headers)


def done(response: Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_source_is_gone_and_refused_until_it_is_reinstated(mara: Person, stored: Callable[[str], int]) -> None:
    document = mara.store("refunds.md", REFUNDS)
    assert done(invalidate(mara, source_ids=["refunds.md"], cascade_id="cascade-123")) == {
        "invalidated": 1,
        "chunks_removed": 1,
        "cascade_id": "cascade-123",
        "generation": 1,
        "documents": [document],
        "kept": [],
    }
    assert mara.finds(ASKED) == []
    problem_of(mara.read(document), 404, "not_found")
    assert stored(str(mara.tenant_id)) == 0
    problem_of(mara.ingest("refunds.md", REFUNDS), 409, "source_invalidated")
    assert done(reinstate(mara, cascade_ids=["cascade-123"])) == {"reinstated": 2}
    assert mara.store("refunds.md", REFUNDS) != document


def test_a_batch_and_what_is_derived_of_it_go_together(mara: Person) -> None:
    mara.store("art-1.md", REFUNDS)
    mara.store("summary.md", REFUNDS, provenance_id="art-1.md")
    by_id = mara.store("art-2.md", REFUNDS)
    mara.store("art-3.md", REFUNDS, provenance_id="run-5")
    mara.store("art-4.md", "# More\n\nA refund takes longer on holidays.")
    answer = done(invalidate(mara, source_ids=["art-1.md"], document_ids=[by_id], provenance_ids=["run-5"]))
    assert (answer["invalidated"], answer["chunks_removed"]) == (4, 4)
    assert mara.finds(ASKED) == ["More"]


def test_newer_content_names_a_higher_generation(mara: Person) -> None:
    mara.store("refunds.md", REFUNDS)
    generation = done(invalidate(mara, source_ids=["refunds.md"]))["generation"]
    problem_of(mara.ingest("refunds.md", REFUNDS, generation=generation), 409, "source_invalidated")
    mara.store("refunds.md", REFUNDS, generation=generation + 1)
    assert mara.finds(ASKED) == ["Refunds"]


def test_foreign_and_missing_have_one_answer(mara: Person, jonas: Person, visitor: Person) -> None:
    document = mara.store("refunds.md", REFUNDS, provenance_id="run-5")
    strangers = [jonas, visitor, replace(mara, tenant_id=f"{mara.tenant_id}-2"), replace(mara, user_tags=["hr"])]
    for stranger in strangers:
        foreign = {"document_ids": [document], "source_ids": ["refunds.md"], "provenance_ids": ["run-5"]}
        missing = {"document_ids": [str(uuid4())], "source_ids": ["nowhere.md"], "provenance_ids": ["run-6"]}
        answers = [done(invalidate(stranger, **named, cascade_id="c", scope=None)) for named in (foreign, missing)]
        assert answers[0] == answers[1]
        assert (answers[0]["invalidated"], answers[0]["documents"], answers[0]["kept"]) == (0, [], [])
        assert done(reinstate(stranger, **foreign)) == done(reinstate(stranger, **missing))
    assert mara.finds(ASKED) == ["Refunds"]


def test_a_public_document_is_kept_for_whoever_may_not_publish(client: TestClient, service: TestClient) -> None:
    mara = Person(client=client, tenant_id=ACME, user_id=7)
    document = mara.store("public-refunds.md", REFUNDS, scope="public")
    served = Person(client=service, tenant_id=ACME, user_id=7)
    answer = done(invalidate(served, document_ids=[document]))
    assert (answer["invalidated"], answer["kept"]) == (0, [document])
    problem_of(invalidate(served, document_ids=[document], scope="public"), 403, "scope_forbidden")
    problem_of(reinstate(served, document_ids=[document], scope="public"), 403, "scope_forbidden")
    assert mara.read(document).status_code == 200
    assert done(invalidate(mara, document_ids=[document]))["documents"] == [document]


def test_a_service_opens_nothing_outside_its_scopes(site: Deployment, settings: Settings, client: TestClient) -> None:
    mara = Person(client=client, tenant_id=ACME, user_id=7)
    done(invalidate(mara, source_ids=["closed.md"]))
    key = issued_key(site, tenant_id=ACME, act_as=True, scopes=["public"])
    with running(site, settings, door=Door(keys=KeyRing()), credential=key.text) as other:
        editor = Person(client=other, tenant_id=ACME, user_id=7)
        assert done(reinstate(editor, source_ids=["closed.md"])) == {"reinstated": 0}
    problem_of(mara.ingest("closed.md", REFUNDS), 409, "source_invalidated")


def test_a_key_that_may_not_delete_invalidates_and_reinstates_nothing(site: Deployment, settings: Settings) -> None:
    key = issued_key(site, tenant_id=ACME, act_as=True, actions=["query", "ingest"])
    with running(site, settings, door=Door(keys=KeyRing()), credential=key.text) as client:
        writer = Person(client=client, tenant_id=ACME, user_id=7)
        problem_of(invalidate(writer, source_ids=["refunds.md"]), 403, "forbidden")
        problem_of(reinstate(writer, source_ids=["refunds.md"]), 403, "forbidden")


@pytest.mark.parametrize("route", ["/rag/invalidate", "/rag/reinstate"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, []),
        ({"source_ids": ["x"], "reason": ""}, ["reason"]),
        ({"source_ids": ["x"], "reason": "x" * 1001}, ["reason"]),
        ({"source_ids": ["x"] * 1001}, ["source_ids"]),
        ({"source_ids": ["x" * 513]}, ["source_ids.0"]),
        ({"source_ids": ["a\0b"]}, ["source_ids"]),
        ({"document_ids": ["no id"]}, ["document_ids.0"]),
        ({"document_ids": "x"}, ["document_ids"]),
        ({"source_ids": ["x"], "scope": "team"}, ["scope"]),
        ({"source_ids": ["x"], "exclude_tainted": False}, ["exclude_tainted"]),
    ],
)
def test_what_is_malformed_is_named(mara: Person, route: str, fields: dict[str, Any], named: list[str]) -> None:
    body = {"reason": "a test"} | mara.identity | fields
    response = mara.client.post(route, json=body)
    assert fields_of(problem_of(response, 422, "invalid_input")) == named


def test_a_source_of_a_project_is_closed_where_a_project_is_named(mara: Person) -> None:
    problem = problem_of(invalidate(mara, source_ids=["x"], scope="project"), 422, "invalid_input")
    assert fields_of(problem) == ["project_id"]


def test_a_reason_is_required(mara: Person) -> None:
    response = mara.client.post("/rag/invalidate", json={"source_ids": ["x"]} | mara.identity)
    assert fields_of(problem_of(response, 422, "invalid_input")) == ["reason"]
