"""POST /rag/feedback and /rag/citations/check: for one's own questions, and for what one may read."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from httpx2 import Response

from tests.api.running import Person, fields_of, problem_of
from tests.conftest import Deployment

REFUNDS = "# Refunds\n\nA refund takes five working days to reach the customer."
DEPLOYS = "# Deploy window\n\nOrion is deployed on Tuesday between 09:40 and 11:10."
ASKED = "How long does a refund take?"


def say(person: Person, query_id: object, **fields: Any) -> Response:
    body = {"query_id": str(query_id)} | person.identity | fields
    return person.client.post("/rag/feedback", json=body, headers=person.headers)


def check(person: Person, *citations: tuple[str, datetime]) -> Response:
    listed = [{"source_id": source_id, "cited_at": cited_at.isoformat()} for source_id, cited_at in citations]
    return person.client.post(
        "/rag/citations/check", json={"citations": listed} | person.identity, headers=person.headers
    )


def states(response: Response) -> list[tuple[str, str]]:
    assert response.status_code == 200, response.text
    return [(one["source_id"], one["state"]) for one in response.json()["citations"]]


def kept(site: Deployment, tenant: str) -> list[tuple[Any, ...]]:
    with site.cluster.superuser(site.name) as connection:
        return connection.execute(
            "select user_id, rank, rating, clicked from rag.rag_feedback where tenant_id = %s order by rank", (tenant,)
        ).fetchall()


# --- feedback -------------------------------------------------------------------------------------


def test_an_answer_and_its_source_are_rated(mara: Person, site: Deployment, tenant: str) -> None:
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    query_id = mara.ask(ASKED).json()["query_id"]
    assert say(mara, query_id, rating=1).status_code == 204
    response = say(mara, query_id, source_id=f"{refunds}:0", clicked=True)
    assert (response.status_code, response.content) == (204, b"")
    assert kept(site, tenant) == [(7, 0, 1, False), (7, 1, None, True)]


def test_the_last_rating_holds(mara: Person, site: Deployment, tenant: str) -> None:
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    query_id = mara.ask(ASKED).json()["query_id"]
    for said in ({"rating": 1}, {"clicked": True}, {"rating": -1}, {"rating": -1}):
        assert say(mara, query_id, source_id=f"{refunds}:0", **said).status_code == 204
    assert kept(site, tenant) == [(7, 1, -1, True)]


def test_what_is_not_ones_own_is_what_does_not_exist(
    mara: Person, jonas: Person, visitor: Person, site: Deployment, tenant: str
) -> None:
    """One and the same 404: a question of somebody else, one that nobody asked, a source that it did not return."""
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    query_id = mara.ask(ASKED).json()["query_id"]
    deploys = mara.store("handbook/deploys.md", DEPLOYS)
    refused = [
        say(jonas, query_id, rating=1),
        say(visitor, query_id, rating=1),
        say(jonas, query_id, source_id=f"{refunds}:0", rating=1),
        say(mara, uuid4(), rating=1),
        say(mara, query_id, source_id=f"{refunds}:7", rating=1),
        say(mara, query_id, source_id=f"{deploys}:0", rating=1),
        say(mara, query_id, source_id=f"{uuid4()}:0", rating=1),
    ]
    problems = [problem_of(response, 404, "not_found") for response in refused]
    for problem in problems:
        for name in ("instance", "request_id"):
            del problem[name]
    assert [problem for problem in problems if problem != problems[0]] == []
    assert kept(site, tenant) == []


def test_hits_without_an_answer_have_no_question_to_rate(mara: Person) -> None:
    mara.store("handbook/refunds.md", REFUNDS)
    assert mara.ask(ASKED, generate=False).json()["query_id"] is None


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "rating"),
        ({"clicked": False}, "rating"),
        ({"rating": 2}, "rating"),
        ({"rating": "1"}, "rating"),
        ({"rating": True}, "rating"),
        ({"rating": 1, "source_id": "the first"}, "source_id"),
        ({"rating": 1, "source_id": f"{uuid4()}:-1"}, "source_id"),
        ({"rating": 1, "query_id": "mine"}, "query_id"),
        ({"rating": 1, "comment": "nice"}, "comment"),
    ],
)
def test_feedback_that_says_nothing_or_nonsense_is_refused(mara: Person, body: dict[str, Any], field: str) -> None:
    problem = problem_of(say(mara, **({"query_id": uuid4()} | body)), 422, "invalid_input")
    assert any(field in named for named in fields_of(problem))


# --- stored citations -----------------------------------------------------------------------------


def test_stored_citations_are_current_stale_or_gone(mara: Person) -> None:
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    deploys = mara.store("handbook/deploys.md", DEPLOYS)
    dropped = mara.store("handbook/dropped.md", "# Dropped\n\nNobody needs this page.")
    cited_at = datetime.now(UTC) + timedelta(seconds=1)
    cited = [(f"{document}:0", cited_at) for document in (refunds, deploys, dropped)]
    assert [state for _, state in states(check(mara, *cited))] == ["current"] * 3
    mara.delete(dropped)
    before = cited_at - timedelta(hours=1)
    assert states(check(mara, *cited, (f"{refunds}:0", before))) == [
        (f"{refunds}:0", "current"),
        (f"{deploys}:0", "current"),
        (f"{dropped}:0", "gone"),
        # Its text is younger than that message.
        (f"{refunds}:0", "stale"),
    ]


def test_a_changed_text_is_stale_and_a_changed_title_is_not(mara: Person, site: Deployment, tenant: str) -> None:
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    with site.cluster.superuser(site.name) as connection:
        connection.execute(
            "update rag.rag_documents set content_updated_at = now() - interval '1 day' where tenant_id = %s", (tenant,)
        )
    cited = (f"{refunds}:0", datetime.now(UTC) - timedelta(hours=1))
    assert mara.ingest("handbook/refunds.md", REFUNDS, title="Money back").json()["status"] == "updated"
    assert states(check(mara, cited)) == [(f"{refunds}:0", "current")]
    mara.ingest("handbook/refunds.md", REFUNDS.replace("five", "six"))
    assert states(check(mara, cited)) == [(f"{refunds}:0", "stale")]


def test_a_foreign_source_is_as_gone_as_a_missing_one(mara: Person, jonas: Person) -> None:
    refunds = mara.store("handbook/refunds.md", REFUNDS)
    now = datetime.now(UTC)
    cited = [(f"{refunds}:0", now), (f"{uuid4()}:0", now), (f"{refunds}:99", now)]
    assert [state for _, state in states(check(jonas, *cited))] == ["gone"] * 3
    stranger = Person(client=mara.client, tenant_id="another-tenant", user_id=7)
    assert [state for _, state in states(check(stranger, *cited))] == ["gone"] * 3
    assert [state for _, state in states(check(mara, *cited))] == ["current", "gone", "gone"]


@pytest.mark.parametrize(
    ("citations", "field"),
    [
        ([], "citations"),
        ([{"source_id": f"{uuid4()}:0", "cited_at": "2026-11-02T08:30:00Z"}] * 501, "citations"),
        ([{"source_id": "nonsense", "cited_at": "2026-11-02T08:30:00Z"}], "source_id"),
        ([{"source_id": f"{uuid4()}:0", "cited_at": "2026-11-02T08:30:00"}], "cited_at"),
        ([{"source_id": f"{uuid4()}:0"}], "cited_at"),
    ],
)
def test_a_list_that_is_none_is_refused(mara: Person, citations: list[dict[str, str]], field: str) -> None:
    response = mara.client.post("/rag/citations/check", json={"citations": citations} | mara.identity)
    assert any(field in named for named in fields_of(problem_of(response, 422, "invalid_input")))
