"""POST /rag/query with scope documents: a list of ids or of paths narrows, and hidden entries are missing ones."""

from __future__ import annotations

import json
from dataclasses import replace
from uuid import uuid4

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from tests.api.conftest import ACME
from tests.api.running import JSON, Person, fields_of, problem_of

ASKED = "When is the deploy window?"
MORNING = "# Morning\n\nThe deploy window is in the morning."
EVENING = "# Evening\n\nThe deploy window is in the evening."
NIGHT = "# Night\n\nThe deploy window is at night."


def seen(response: Response) -> tuple[int, dict[str, str], str]:
    """All that a caller sees of an answer, but for the id of the request."""
    headers = dict(response.headers)
    request_id = headers.pop("x-request-id")
    return response.status_code, headers, response.text.replace(request_id, "-")


# --- narrowing -----------------------------------------------------------------------------------


def test_a_list_of_ids_or_of_paths_narrows_to_those_documents(mara: Person) -> None:
    morning, evening = mara.store("rules/one.md", MORNING), mara.store("rules/two.md", EVENING)
    mara.store("rules/three.md", NIGHT)
    for listed, names in (
        ([morning], {"Morning"}),
        ([evening.upper(), morning], {"Morning", "Evening"}),
        (["rules/two.md"], {"Evening"}),
        (["rules/two.md", "rules/one.md"], {"Morning", "Evening"}),
    ):
        assert set(mara.finds(ASKED, scope="documents", document_ids=listed)) == names
    answer = mara.ask(ASKED, scope="documents", document_ids=["rules/two.md"]).json()
    assert [citation["document_id"] for citation in answer["citations"]] == [evening]


def test_a_path_names_what_each_asker_has_under_it(mara: Person, jonas: Person) -> None:
    mara.store("rules.md", MORNING)
    jonas.store("rules.md", EVENING)
    mara.store("rules.md", NIGHT, scope="public")
    listed = {"scope": "documents", "document_ids": ["rules.md"]}
    assert set(mara.finds(ASKED, **listed)) == {"Morning", "Night"}
    assert set(jonas.finds(ASKED, **listed)) == {"Evening", "Night"}


# --- hidden and missing --------------------------------------------------------------------------


@pytest.mark.parametrize("generate", [False, True])
def test_a_hidden_document_is_answered_as_a_missing_one(
    mara: Person, jonas: Person, visitor: Person, generate: bool
) -> None:
    hidden = mara.store("rules.md", MORNING)
    his = jonas.store("his.md", EVENING)
    elsewhere = replace(mara, tenant_id=f"{mara.tenant_id}-2")
    other_tags = replace(mara, user_tags=["hr"])
    missing = str(uuid4())
    for stranger, more in ((jonas, [his]), (visitor, []), (elsewhere, []), (other_tags, [])):
        answers = [
            stranger.ask(ASKED, scope="documents", document_ids=listed, generate=generate)
            for listed in ([hidden], [missing], [hidden, *more], [*more, missing], ["rules.md"], ["no-rules.md"])
        ]
        problem = problem_of(answers[0], 404, "not_found")
        assert problem["errors"] == [{"field": "document_ids", "message": "No such document."}]
        assert len({str(seen(answer)) for answer in answers}) == 1
    assert mara.finds(ASKED, scope="documents", document_ids=[hidden]) == ["Morning"]


def test_a_service_finds_nothing_of_another_tenant(service: TestClient, mara: Person) -> None:
    document = mara.store("rules.md", MORNING)
    served = Person(client=service, tenant_id=ACME, user_id=7)
    for listed in ([document], ["rules.md"], [str(uuid4())]):
        answer = served.ask(ASKED, scope="documents", document_ids=listed)
        assert fields_of(problem_of(answer, 404, "not_found")) == ["document_ids"]


def test_a_deleted_document_is_missing_from_then_on(mara: Person) -> None:
    document = mara.store("rules.md", MORNING)
    mara.delete(document)
    for listed in ([document], ["rules.md"]):
        problem_of(mara.ask(ASKED, scope="documents", document_ids=listed), 404, "not_found")


# --- malformed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "named"),
    [
        ([], "document_ids"),
        (["00000000-0000-4000-8000-000000000001", "rules.md"], "document_ids"),
        (["rules.md", "00000000-0000-4000-8000-000000000001"], "document_ids"),
        (["rules.md"] * 1001, "document_ids"),
        (["rules.md\0"], "document_ids"),
        ([" rules.md"], "document_ids"),
        (["rules.md", "\ud800"], "document_ids.1"),
        (["rules.md", ""], "document_ids.1"),
        (["r" * 513], "document_ids.0"),
        ([7], "document_ids.0"),
        ([None], "document_ids.0"),
        ([["rules.md"]], "document_ids.0"),
        ("rules.md", "document_ids"),
        ({"0": "rules.md"}, "document_ids"),
    ],
)
def test_a_malformed_list_is_refused_by_its_name(visitor: Person, listed: object, named: str) -> None:
    answer = visitor.client.post(
        "/rag/query",
        content=json.dumps({"query": ASKED, "scope": "documents", "document_ids": listed} | visitor.identity),
        headers=JSON,
    )
    assert fields_of(problem_of(answer, 422, "invalid_input")) == [named]


@pytest.mark.parametrize("fields", [{"document_ids": ["rules.md"]}, {"document_ids": ["rules.md"], "scope": "user"}])
def test_a_list_goes_with_its_scope_alone(mara: Person, fields: dict[str, object]) -> None:
    mara.store("rules.md", MORNING)
    assert fields_of(problem_of(mara.ask(ASKED, **fields), 422, "invalid_input")) == ["document_ids"]
