"""Conversations over HTTP: one's own alone, bounded, once; any text comes back as it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from api.identity import Door
from rag.keys import KeyRing
from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import Person, fields_of, issued_key, problem_of, repeats, running
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama
from tests.rag.jobbing import job_rows, until_empty
from tests.rag.talking import environment, model_servers
from tests.sql.test_limits import limit
from tests.text_zoo import zoo

ALL = 3_000


def path(thread: str) -> str:
    return f"/rag/conversations/{thread}"


def say(person: Person, thread: str, content: str, *, role: str = "user", **more: Any) -> Response:
    headers = {name.replace("_", "-"): value for name, value in more.pop("headers", {}).items()}
    # As any JSON library could send it, half surrogate pairs included.
    body = json.dumps({"role": role, "content": content} | person.identity | more)
    return person.client.post(
        f"{path(thread)}/messages",
        content=body,
        headers=person.headers | {"Content-Type": "application/json"} | headers,
    )


def read(person: Person, thread: str, **more: Any) -> Response:
    return person.client.get(path(thread), params=person.identity | more, headers=person.headers)


@pytest.fixture
def talking(deployment: Deployment) -> Iterator[tuple[TestClient, FakeOllama, dict[str, str]]]:
    """An application that has threads summed up after 40 characters; what writes; what a worker is given."""
    with model_servers(answer=lambda messages: "The ferry leaves at six.") as (writer, embedder):
        settings = Settings(
            _env_file=None,
            rag_llm_provider="ollama",
            ollama_base_url=writer.base_url,
            rag_embedding_provider="openai",
            rag_embedding_model="text-embedding-3-small",
            openai_base_url=embedder,
            openai_api_key="sk-test",
            rag_summarise_after_tokens=0,
            rag_summarise_after_characters=40,
        )
        with running(deployment, settings) as client:
            yield client, writer, environment(deployment, writer, embedder)


def test_a_conversation_is_posted_summed_up_and_found(
    talking: tuple[TestClient, FakeOllama, dict[str, str]], deployment: Deployment
) -> None:
    client, _, worker = talking
    mara = Person(client=client, tenant_id="acme", user_id=7)
    first = say(mara, "trip", "When does the ferry leave?")
    assert first.status_code == 201
    assert (first.json()["number"], first.json()["summary_job"]) == (1, None)
    second = say(mara, "trip", "It leaves at six.", role="assistant").json()
    assert second["summary_job"] == f"/rag/jobs/{job_rows(deployment)[0]['id']}"
    assert client.get(second["summary_job"], params=mara.identity).json()["status"] == "pending"
    until_empty(worker)
    job = client.get(second["summary_job"], params=mara.identity).json()
    assert (job["kind"], job["status"]) == ("summarise", "succeeded")
    assert (job["result"]["messages"], job["result"]["model"]) == (2, "llama3.2")
    seen = read(mara, "trip").json()
    assert [(one["number"], one["role"], one["content"]) for one in seen["messages"]] == [
        (1, "user", "When does the ferry leave?"),
        (2, "assistant", "It leaves at six."),
    ]
    assert all(one["summarised_at"] is not None for one in seen["messages"])
    (summary,) = seen["summaries"]
    assert (summary["summary_text"], summary["document_id"]) == (
        "The ferry leaves at six.",
        job["result"]["document_id"],
    )
    assert summary["message_ids"] == [one["message_id"] for one in seen["messages"]]
    assert seen["next_after"] is None
    assert mara.finds("ferry", min_similarity=-1.0) == ["Conversation trip"]
    document = mara.read(summary["document_id"]).json()
    assert (document["source_type"], document["scope"]) == ("conversation_summary", "user")
    for other in (
        Person(client=client, tenant_id="acme", user_id=8),
        Person(client=client, tenant_id="globex", user_id=7),
    ):
        assert other.finds("ferry", min_similarity=-1.0) == []
        assert other.read(summary["document_id"]).status_code == 404
        assert client.get(second["summary_job"], params=other.identity).status_code == 404
        assert read(other, "trip").status_code == 404
    assert mara.delete(summary["document_id"]).status_code == 204
    assert read(mara, "trip").json()["summaries"] == []


def test_a_foreign_conversation_and_a_missing_one_look_the_same(mara: Person, jonas: Person) -> None:
    assert say(mara, "trip", "hello").status_code == 201
    assert read(mara, "trip").status_code == 200
    told = []
    for person, thread in ((jonas, "trip"), (jonas, "none"), (mara, "none")):
        told.append({**problem_of(read(person, thread), 404, "not_found"), "request_id": "", "instance": ""})
    foreign = Person(client=mara.client, tenant_id="another", user_id=7)
    told.append({**problem_of(read(foreign, "trip"), 404, "not_found"), "request_id": "", "instance": ""})
    assert told == [told[0]] * 4
    # And one of a project, which the user has not named.
    orion = Person(client=mara.client, tenant_id=mara.tenant_id, user_id=7, project_id="orion")
    assert read(orion, "trip").status_code == 404
    assert say(orion, "trip", "of the project").json()["number"] == 1
    assert [one["content"] for one in read(orion, "trip").json()["messages"]] == ["of the project"]
    assert [one["content"] for one in read(mara, "trip").json()["messages"]] == ["hello"]


def test_the_same_key_adds_nothing_and_another_message_with_it_is_refused(mara: Person, jonas: Person) -> None:
    sent = say(mara, "trip", "hello", headers={"Idempotency_Key": "one"})
    again = say(mara, "trip", "hello", headers={"Idempotency_Key": "one"})
    assert (sent.status_code, again.status_code) == (201, 200)
    assert again.json() == sent.json()
    for thread, content in (("trip", "other"), ("else", "hello")):
        refused = say(mara, thread, content, headers={"Idempotency_Key": "one"})
        problem_of(refused, 422, "idempotency_key_reused")
    assert say(jonas, "trip", "mine", headers={"Idempotency_Key": "one"}).status_code == 201
    assert say(mara, "trip", "hello", headers={"Idempotency_Key": "a b"}).status_code == 422
    assert len(read(mara, "trip").json()["messages"]) == 1


@pytest.mark.parametrize(
    ("thread", "fields", "field"),
    [
        ("trip", {"content": ""}, "content"),
        ("trip", {"content": "   "}, "content"),
        ("trip", {"content": "x" * 32_769}, "content"),
        ("trip", {"content": "a\0b"}, "content"),
        ("trip", {"content": "a\ud800b"}, "content"),
        ("trip", {"role": "system"}, "role"),
        ("trip", {"user_id": 0}, "user_id"),
        ("trip", {"project_id": "*"}, "project_id"),
        ("trip", {"scope": "public"}, "scope"),
        ("a%00b", {}, "thread_id"),
        ("x" * 129, {}, "thread_id"),
        ("%20trip", {}, "thread_id"),
    ],
)
def test_what_is_no_message_is_refused(mara: Person, thread: str, fields: dict[str, Any], field: str) -> None:
    answer = say(mara, thread, **{"content": "hello"} | fields)
    assert field in fields_of(problem_of(answer, 422, "invalid_input"))
    assert not repeats(answer, json.dumps(fields))


def test_a_conversation_is_of_a_user(visitor: Person) -> None:
    assert fields_of(problem_of(say(visitor, "trip", "hello"), 422, "invalid_input")) == ["user_id"]
    assert fields_of(problem_of(read(visitor, "trip"), 422, "invalid_input")) == ["user_id"]


def test_pages_are_bounded(mara: Person) -> None:
    for number in range(1, 6):
        assert say(mara, "trip", f"message {number}").status_code == 201
    page = read(mara, "trip", limit=2).json()
    assert ([one["number"] for one in page["messages"]], page["next_after"]) == ([1, 2], 2)
    page = read(mara, "trip", limit=3, after=2).json()
    assert ([one["number"] for one in page["messages"]], page["next_after"]) == ([3, 4, 5], None)
    for wrong in ({"limit": 0}, {"limit": 1001}, {"after": -1}, {"after": 2**63}, {"other": 1}):
        assert read(mara, "trip", **wrong).status_code == 422


def test_a_body_is_bounded_while_it_is_read(mara: Person) -> None:
    answer = say(mara, "trip", "x" * (17 * 1024 * 1024))
    problem_of(answer, 413, "body_too_large")


def test_a_post_takes_a_token_of_ingests_and_reading_none(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, ingests_per_minute=2)
    assert [say(mara, "trip", "hello").status_code for _ in range(3)] == [201, 201, 429]
    assert len(read(mara, "trip").json()["messages"]) == 2


def test_a_key_posts_and_reads_within_its_grant(site: Deployment, settings: Settings) -> None:
    def caller(**grant: Any) -> TestClient:
        key = issued_key(site, tenant_id=ACME, **grant)
        stack = running(site, settings, door=Door(keys=KeyRing(refresh_s=0.05)), credential=key.text)
        opened.append(stack)
        return stack.__enter__()

    opened: list[Any] = []
    try:
        speaker = Person(client=caller(act_as=True, tags=["hr"]), user_id=7)
        assert say(speaker, "trip", "hello", user_tags=["hr"]).status_code == 201
        assert read(speaker, "trip", user_tags="hr").status_code == 200
        # What was said with the tag hr is not of a summary that others read.
        assert read(Person(client=caller(act_as=True, tags=["public"]), user_id=7), "trip").status_code == 404
        # One that speaks for nobody has no conversations.
        assert say(Person(client=caller(), user_id=7), "trip", "hello").status_code == 403
        asker = Person(client=caller(act_as=True, tags=["public"], actions=["query"]), user_id=7)
        assert say(asker, "trip", "hello").status_code == 403
        ingester = Person(client=caller(act_as=True, tags=["public"], actions=["ingest"]), user_id=7)
        assert read(ingester, "trip").status_code == 403
        public = Person(client=caller(act_as=True, tags=["public"], scopes=["public"]), user_id=7)
        assert say(public, "trip", "hello").status_code == 403
    finally:
        for stack in opened:
            stack.__exit__(None, None, None)


def test_any_text_comes_back_as_it_was_or_is_refused(
    mara: Person, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    texts = list(zoo(ALL))[:: scaled(test=50, ci=10, prove=1)]
    kept = refused = 0
    for number, text in enumerate(texts):
        answer = say(mara, f"zoo-{number}", text)
        storable = (
            bool(text.strip())
            and len(text) <= 32_768
            and "\0" not in text
            and not any("\ud800" <= mark <= "\udfff" for mark in text)
        )
        assert answer.status_code == (201 if storable else 422), repr(text[:50])
        if storable:
            (message,) = read(mara, f"zoo-{number}").json()["messages"]
            assert message["content"] == text
            kept += 1
        else:
            refused += 1
    figure(f"{len(texts):,} texts as messages: {kept:,} byte-exact, {refused} refused, 0 other")
