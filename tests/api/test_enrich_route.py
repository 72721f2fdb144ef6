"""POST /rag/enrich: context for a message, with its sources, for those who may read them."""

from __future__ import annotations

from typing import Any

from httpx2 import Response

from rag.enrich import END, HEADING
from tests.api.running import Person, fields_of, problem_of
from tests.conftest import Deployment

REFUNDS = "# Refunds\n\nA refund takes five working days to reach the customer."
SHOES = "# Shoes\n\nA refund of shoes takes nine working days to reach the customer."
MESSAGE = "How many working days does a refund take to reach the customer?"


def enrich(person: Person, message: str, **fields: Any) -> Response:
    body = {"message": message} | person.identity | fields
    return person.client.post("/rag/enrich", json=body, headers=person.headers)


def logged(site: Deployment, tenant: str) -> list[tuple[str, int, int]]:
    with site.cluster.superuser(site.name) as connection:
        return connection.execute(
            "select model_used, result_count, citation_count from rag.rag_query_logs where tenant_id = %s", (tenant,)
        ).fetchall()


def test_a_message_gets_a_block_of_passages_below_their_source_ids(mara: Person, site: Deployment, tenant: str) -> None:
    refunds = mara.store("refunds.md", REFUNDS)
    answer = enrich(mara, MESSAGE).json()
    assert answer["context"] == f"{HEADING}\n\n[SourceId: {refunds}:0]\nRefunds, Refunds\n{REFUNDS}\n\n{END}"
    (citation,) = answer["citations"]
    assert citation["source_id"] == f"{refunds}:0"
    assert answer["context_tokens"] > 0
    assert MESSAGE not in answer["context"]
    assert logged(site, tenant) == [("none", 1, 1)]


def test_nothing_relevant_is_no_context(mara: Person) -> None:
    mara.store("refunds.md", REFUNDS)
    answer = enrich(mara, "Which moons does Jupiter have?").json()
    assert (answer["context"], answer["citations"], answer["context_tokens"]) == ("", [], 0)


def test_nobody_gets_context_from_what_they_may_not_read(mara: Person, jonas: Person) -> None:
    mara.store("refunds.md", REFUNDS)
    assert enrich(jonas, MESSAGE).json()["context"] == ""


def test_the_block_keeps_to_its_budget(mara: Person) -> None:
    mara.store("refunds.md", REFUNDS)
    mara.store("shoes.md", SHOES)
    whole = enrich(mara, MESSAGE).json()
    assert len(whole["citations"]) == 2
    assert len(enrich(mara, MESSAGE, top_k=1).json()["citations"]) == 1
    small = enrich(mara, MESSAGE, max_tokens=whole["context_tokens"] - 1).json()
    assert len(small["citations"]) == 1
    assert small["context_tokens"] < whole["context_tokens"]


def test_a_message_without_a_word_is_refused(mara: Person) -> None:
    assert fields_of(problem_of(enrich(mara, ""), 422, "invalid_input")) == ["message"]
