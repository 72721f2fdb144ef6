"""POST /rag/ingest later: 202 and a job, idempotency keys, a full queue; and what others see of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from starlette.testclient import TestClient

from rag.settings import Settings
from tests.api.running import running
from tests.conftest import Deployment
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai
from tests.rag.jobbing import job_rows, queued, until_empty, worker_environment
from tests.sql.test_limits import limit

LATER = {"Prefer": "respond-async"}


@pytest.fixture
def server() -> Iterator[FakeOpenAI]:
    with fake_openai() as started:
        yield started


@pytest.fixture
def settings_of(server: FakeOpenAI) -> Callable[..., Settings]:
    def made(**more: Any) -> Settings:
        return Settings(
            _env_file=None,
            rag_embedding_provider="openai",
            rag_embedding_model="text-embedding-3-small",
            openai_base_url=server.base_url,
            openai_api_key="sk-test",
            rag_llm_provider="extractive",
            **more,
        )

    return made


@pytest.fixture
def caller(deployment: Deployment, settings_of: Callable[..., Settings]) -> Iterator[TestClient]:
    with running(deployment, settings_of(rag_ingest_async_bytes=1000, rag_queue_max_size=3)) as client:
        yield client


def body(source_id: str = "guide", **more: Any) -> dict[str, Any]:
    return {
        "source_id": source_id,
        "content": "The ferry leaves at six.",
        "tenant_id": "acme",
        "user_id": 7,
        "language": "en",
    } | more


def ingest(client: TestClient, sent: dict[str, Any], **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return client.post("/rag/ingest", content=json.dumps(sent), headers={"Content-Type": "application/json"} | named)


def job(client: TestClient, url: str, *, tenant: str = "acme", user: int = 7) -> Any:
    return client.get(url, params={"tenant_id": tenant, "user_id": str(user)})


def test_a_large_document_is_taken_in_later_and_a_small_one_at_once(
    caller: TestClient, deployment: Deployment, server: FakeOpenAI
) -> None:
    assert ingest(caller, body("small")).status_code == 201
    answer = ingest(caller, body("large", content="The ferry leaves at six. " * 60))
    assert answer.status_code == 202
    assert answer.headers["Location"] == answer.json()["status_url"] == f"/rag/jobs/{answer.json()['job_id']}"
    assert "Preference-Applied" not in answer.headers
    assert job(caller, answer.headers["Location"]).json()["status"] == "pending"
    health = caller.get("/health").json()
    assert (health["jobs"]["pending"], health["jobs"]["processing"]) == (1, 0)
    until_empty(worker_environment(deployment, server.base_url))
    done = job(caller, answer.headers["Location"]).json()
    assert (done["status"], done["attempts"], done["reason"]) == ("succeeded", 1, None)
    assert done["result"]["status"] == "created"
    found = caller.get(f"/rag/documents/{done['result']['document_id']}", params={"tenant_id": "acme", "user_id": "7"})
    assert found.json()["source_id"] == "large"


def test_whoever_asks_for_it_is_answered_later(caller: TestClient) -> None:
    answer = ingest(caller, body(), Prefer="respond-async, wait=10")
    assert answer.status_code == 202
    assert answer.headers["Preference-Applied"] == "respond-async"


def test_a_document_that_is_taken_in_later_costs_its_token_when_it_is_accepted(
    caller: TestClient, deployment: Deployment, server: FakeOpenAI
) -> None:
    limit(deployment, "acme", ingests_per_minute=2)
    answers = [ingest(caller, body(f"guide-{number}"), **LATER) for number in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[2].json()["type"].endswith("rate_limited")
    assert len(job_rows(deployment)) == 2
    # And none when it is done.
    until_empty(worker_environment(deployment, server.base_url))
    assert {row["status"] for row in job_rows(deployment)} == {"succeeded"}


def test_a_foreign_job_and_a_missing_one_look_the_same(caller: TestClient) -> None:
    url = ingest(caller, body(), **LATER).headers["Location"]
    assert job(caller, url).status_code == 200
    missing = "/rag/jobs/00000000-0000-4000-8000-000000000000"
    answers = [
        job(caller, missing),
        job(caller, url, user=8),
        job(caller, url, tenant="globex"),
        caller.get(url, params={"tenant_id": "acme"}),
        caller.delete(url, params={"tenant_id": "acme", "user_id": "8"}),
        caller.delete(missing, params={"tenant_id": "acme", "user_id": "7"}),
    ]
    assert {answer.status_code for answer in answers} == {404}
    unlike = {"request_id", "instance"}
    assert len({json.dumps({k: v for k, v in answer.json().items() if k not in unlike}) for answer in answers}) == 1


def test_ones_own_job_can_be_cancelled(caller: TestClient, deployment: Deployment) -> None:
    url = ingest(caller, body(), **LATER).headers["Location"]
    for _ in range(2):
        assert caller.delete(url, params={"tenant_id": "acme", "user_id": "7"}).status_code == 204
    assert job(caller, url).json()["status"] == "cancelled"
    assert queued(deployment) == []


def test_the_same_key_and_body_is_one_job(caller: TestClient, deployment: Deployment) -> None:
    first, second = (ingest(caller, body(), Idempotency_Key="k-1", **LATER) for _ in range(2))
    assert first.status_code == second.status_code == 202
    assert first.json() == second.json()
    assert len(job_rows(deployment)) == 1


def test_the_same_key_and_body_is_one_answer(caller: TestClient, deployment: Deployment, server: FakeOpenAI) -> None:
    first = ingest(caller, body(), Idempotency_Key="k-1")
    # Without the key it would be answered as unchanged.
    second = ingest(caller, body(), Idempotency_Key="k-1")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json()
    assert ingest(caller, body()).json()["status"] == "unchanged"
    assert len(server.requests) == 1
    (row,) = job_rows(deployment)
    assert (row["status"], row["body"], row["payload"]) == ("succeeded", None, None)


@pytest.mark.parametrize("headers", [{}, LATER])
def test_the_same_key_and_another_body_is_refused(caller: TestClient, headers: dict[str, str]) -> None:
    assert ingest(caller, body(), Idempotency_Key="k-1", **headers).status_code in (201, 202)
    other = ingest(caller, body(content="The ferry leaves at seven."), Idempotency_Key="k-1", **headers)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_a_key_is_of_one_principal(caller: TestClient) -> None:
    assert ingest(caller, body(), Idempotency_Key="k-1").status_code == 201
    assert ingest(caller, body(user_id=8, content="Another."), Idempotency_Key="k-1").status_code == 201
    assert ingest(caller, body(tenant_id="globex", content="A third."), Idempotency_Key="k-1").status_code == 201


def test_a_key_is_free_again_after_a_day(caller: TestClient, deployment: Deployment) -> None:
    assert ingest(caller, body(), Idempotency_Key="k-1").status_code == 201
    with psycopg.connect(deployment.url("postgres")) as superuser:
        superuser.execute("update rag.rag_jobs set created_at = now() - interval '25 hours'")
    assert ingest(caller, body(content="Another."), Idempotency_Key="k-1").status_code == 200


@pytest.mark.parametrize("key", ["", "a b", "é", "x" * 256])
def test_a_key_that_is_none_is_refused(caller: TestClient, key: str) -> None:
    answer = caller.post(
        "/rag/ingest",
        content=json.dumps(body()),
        headers=[(b"content-type", b"application/json"), (b"idempotency-key", key.encode())],
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_input")


def test_a_request_that_failed_leaves_its_key_free(caller: TestClient) -> None:
    assert ingest(caller, body(content=" "), Idempotency_Key="k-1").status_code == 422
    assert ingest(caller, body(), Idempotency_Key="k-1").status_code == 201


def test_a_full_queue_says_when_to_come_back(caller: TestClient) -> None:
    for number in range(3):
        assert ingest(caller, body(f"guide-{number}"), **LATER).status_code == 202
    answer = ingest(caller, body("guide-3"), **LATER)
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert int(answer.headers["Retry-After"]) >= 1
    assert ingest(caller, body("guide-3", tenant_id="globex"), **LATER).status_code == 202


@pytest.mark.parametrize(
    ("more", "status"),
    [
        ({"content": " "}, 422),
        ({"content": "a\0b"}, 422),
        ({"content": "a\ud800b"}, 422),
        ({"language": "eng"}, 422),
        ({"metadata": {"key": "a\0b"}}, 422),
        ({"source_type": "conversation"}, 422),
    ],
)
def test_what_no_worker_could_store_is_refused_at_once(
    caller: TestClient, deployment: Deployment, more: dict[str, Any], status: int
) -> None:
    assert ingest(caller, body(**more), **LATER).status_code == status
    assert job_rows(deployment) == []


def test_a_retracted_source_is_refused_at_once(caller: TestClient, deployment: Deployment) -> None:
    assert ingest(caller, body()).status_code == 201
    taken_back = {"source_ids": ["guide"], "reason": "a test", "tenant_id": "acme", "user_id": 7}
    assert caller.post("/rag/invalidate", json=taken_back).status_code == 200
    answer = ingest(caller, body(), **LATER)
    assert (answer.status_code, answer.json()["code"]) == (409, "source_invalidated")
    assert job_rows(deployment) == []


def test_what_nobody_publishes_here_is_refused_at_once(
    deployment: Deployment, settings_of: Callable[..., Settings]
) -> None:
    with running(deployment, settings_of(), publishes=False) as client:
        assert ingest(client, body(scope="public"), **LATER).status_code == 403
