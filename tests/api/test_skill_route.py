"""`POST /rag/skill`: a form over HTTP, its answer, and the problems of forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from rag.settings import Settings
from tests.api.running import Person, fields_of, problem_of, running
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama, Message, fake_ollama

LABEL = re.compile(r"^\[(S\d+-[0-9a-f]{6})\]$", re.MULTILINE)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer"}},
    "required": ["days"],
    "additionalProperties": False,
}
ASKED = {"query": "How long does a refund take?", "schema": SCHEMA, "mode": "keyword"}


def fills(schema: Mapping[str, Any], messages: list[Message]) -> str:
    (source,) = LABEL.findall(messages[1]["content"])
    cited = [{"path": "/days", "source": source}]
    return json.dumps({"found": True, "data": {"days": 5}, "source_citations": cited, "confidence": "high"})


@pytest.fixture
def ollama() -> Iterator[FakeOllama]:
    with fake_ollama(fill=fills) as fake:
        yield fake


@pytest.fixture
def anna(deployment: Deployment, ollama: FakeOllama) -> Iterator[Person]:
    settings = Settings(_env_file=None, rag_llm_provider="ollama", ollama_base_url=ollama.base_url)
    with running(deployment, settings) as client:
        yield Person(client=client, tenant_id="acme", user_id=7)


def skill(person: Person, **fields: Any) -> Any:
    body = {name: value for name, value in (ASKED | person.identity | fields).items() if value is not ...}
    return person.client.post("/rag/skill", json=body, headers=person.headers)


def test_a_form_comes_back_filled_with_the_source_of_each_value(anna: Person):
    document = anna.store("refunds.md", "A refund takes five working days.")
    response = skill(anna)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["found"], answer["data"], answer["repaired"]) == (True, {"days": 5}, False)
    assert answer["source_citations"] == [{"path": "/days", "source_id": f"{document}:0"}]
    assert [citation["source_id"] for citation in answer["citations"]] == [f"{document}:0"]
    assert answer["confidence"] in ("high", "medium", "low")
    assert answer["confidence_score"]["llm_score"] == 90
    assert answer["confidence_metrics"]["skip_reason"] == "disabled"
    assert [hit["document_id"] for hit in answer["hits"]] == [document]
    assert answer["query_id"]
    assert "answer" not in answer


def test_somebody_else_gets_an_empty_form(anna: Person):
    anna.store("refunds.md", "A refund takes five working days.")
    boris = Person(client=anna.client, tenant_id="acme", user_id=8)
    answer = skill(boris).json()
    assert (answer["found"], answer["data"], answer["citations"], answer["hits"]) == (False, None, [], [])
    assert (answer["confidence"], answer["action"]) == ("low", "ROUTE")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"schema": ...}, "schema"),
        ({"schema": [1]}, "schema"),
        ({"schema": {"type": "array"}}, "schema.type"),
        ({"schema": SCHEMA | {"properties": {"days": {"pattern": "(a+)+"}}}}, "schema.properties.days.pattern"),
        ({"schema": SCHEMA | {"$ref": "https://example.com/x"}}, "schema.$ref"),
        ({"generate": False}, "generate"),
        ({"direct": True}, "direct"),
        ({"output_schema": {}}, "output_schema"),
        ({"query": ""}, "query"),
    ],
)
def test_what_is_no_form_is_refused_by_its_place(anna: Person, fields: dict[str, Any], field: str):
    problem = problem_of(skill(anna, **fields), 422, "invalid_input")
    assert fields_of(problem) == [field]


def test_a_model_that_cannot_fill_the_form_is_a_bad_gateway_that_repeats_nothing_of_it(
    anna: Person, ollama: FakeOllama
):
    anna.store("refunds.md", "A refund takes five working days.")
    ollama.fill = lambda schema, messages: '{"data": "the vault code is 4711"}'
    response = skill(anna)
    problem_of(response, 502, "output_invalid")
    assert "4711" not in response.text


def test_without_a_model_it_is_unavailable(deployment: Deployment, settings: Settings):
    with running(deployment, settings) as client:
        problem_of(skill(Person(client=client, tenant_id="acme", user_id=7)), 503, "model_unavailable")


def test_nobody_fills_a_form_without_a_credential(anna: Person):
    response = anna.client.post("/rag/skill", json=ASKED, headers={"Authorization": "Bearer wrong"})
    problem_of(response, 401, "unauthenticated")


def test_an_answer_without_a_bottom_is_unfit_and_no_failure_of_ours(deployment: Deployment):
    def bottomless(schema: Mapping[str, Any], messages: list[Message]) -> str:
        return (
            '{"found": true, "data": '
            + '{"a": ' * 900
            + "1"
            + "}" * 900
            + ', "source_citations": [], "confidence": "low"}'
        )

    with fake_ollama(fill=bottomless) as fake:
        settings = Settings(_env_file=None, rag_llm_provider="ollama", ollama_base_url=fake.base_url)
        with running(deployment, settings) as client:
            person = Person(client=client, tenant_id="acme", user_id=7)
            person.store("refunds.md", "A refund takes five working days.")
            problem_of(skill(person, schema={"type": "object"}), 502, "output_invalid")
