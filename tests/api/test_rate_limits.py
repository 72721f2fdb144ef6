"""Limits as callers meet them: 429 with the time to wait, 403 for a full quota, and nobody else affected."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from api.identity import Door
from rag.keys import KeyRing
from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import Person, fields_of, issued_key, problem_of, running
from tests.conftest import SIGNING_KEY, Deployment
from tests.sql.test_limits import limit, used, wind_back

SCHEMA = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}


@pytest.fixture(autouse=True)
def without_limits(site: Deployment) -> Iterator[None]:
    """Every test begins and ends without any."""
    yield
    with site.cluster.superuser(site.name) as superuser:
        superuser.execute("delete from rag.rag_limits")
        superuser.execute("delete from rag.rag_rate_buckets")


def search(person: Person) -> Response:
    return person.ask("How long does a refund take?", generate=False)


def statuses(responses: list[Response]) -> list[int]:
    return [response.status_code for response in responses]


# --- rates ----------------------------------------------------------------------------------------


def test_by_default_nothing_is_limited_and_no_header_speaks_of_it(mara: Person) -> None:
    response = search(mara)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("ratelimit")]


def test_exactly_as_many_as_allowed_pass_and_the_refusal_says_when_to_come_back(
    site: Deployment, mara: Person, tenant: str
) -> None:
    limit(site, tenant, queries_per_minute=7, query_burst=3)
    passed = [search(mara) for _ in range(3)]
    assert statuses(passed) == [200] * 3
    assert [response.headers["ratelimit-policy"] for response in passed] == ['"query";q=7;w=60'] * 3
    assert [response.headers["ratelimit"] for response in passed] == [f'"query";r={left}' for left in (2, 1, 0)]

    refused = search(mara)
    problem = problem_of(refused, 429, "rate_limited")
    assert problem["detail"] == "this tenant may send 7 questions a minute, and 3 at once"
    # Sixty seconds for seven: 8.57 for one, less what has passed, in whole seconds.
    wait = int(refused.headers["retry-after"])
    assert 5 <= wait <= 9
    assert refused.headers["ratelimit"] == f'"query";r=0;t={wait}'
    # What was said is so: not a second earlier than needed, and after it one passes.
    wind_back(site, wait)
    assert statuses([search(mara), search(mara)]) == [200, 429]


def test_the_wait_is_rounded_up_and_true_on_the_clock(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, queries_per_minute=60, query_burst=1)
    assert search(mara).status_code == 200
    refused = search(mara)
    assert refused.headers["retry-after"] == "1"
    threading.Event().wait(int(refused.headers["retry-after"]))
    assert search(mara).status_code == 200


def test_zero_allows_nothing_and_tells_nobody_to_wait(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, queries_per_minute=0, ingests_per_minute=0)
    refused = search(mara)
    assert problem_of(refused, 429, "rate_limited")["detail"] == "this tenant may send no questions"
    assert "retry-after" not in refused.headers
    problem_of(mara.ingest("a.md", "# A"), 429, "rate_limited")


def test_every_user_of_the_tenant_draws_on_one_bucket_and_other_tenants_have_their_own(
    site: Deployment, mara: Person, jonas: Person, tenant: str
) -> None:
    limit(site, tenant, queries_per_minute=2)
    elsewhere = replace(mara, tenant_id=f"{tenant}-elsewhere")
    assert statuses([search(mara), search(jonas), search(mara)]) == [200, 200, 429]
    assert statuses([search(elsewhere) for _ in range(5)]) == [200] * 5


def test_these_routes_cost_a_token_and_no_others(site: Deployment, mara: Person, tenant: str) -> None:
    document = mara.store("refunds.md", "# Refunds\n\nA refund takes five working days.")
    limit(site, tenant, queries_per_minute=0, ingests_per_minute=0)

    def post(route: str, **body: Any) -> int:
        return mara.client.post(f"/rag/{route}", json=body | mara.identity).status_code

    limited = {
        "query": post("query", query="How long?"),
        "stream": post("query", query="How long?", stream=True),
        "enrich": post("enrich", message="How long?"),
        "skill": post("skill", query="How long?", schema=SCHEMA),
        "ingest": post("ingest", source_id="b.md", content="# B"),
    }
    assert limited == dict.fromkeys(limited, 429)
    # What takes back is never held up, and what is small is not counted.
    targets = {"document_ids": [document], "reason": "wrong"}
    free = {
        "read": mara.read(document).status_code,
        "citations": post(
            "citations/check", citations=[{"source_id": f"{document}:0", "cited_at": "2026-11-01T00:00:00Z"}]
        ),
        "invalidate": post("invalidate", **targets),
        "reinstate": post("reinstate", **targets),
        "health": mara.client.get("/health").status_code,
        "livez": mara.client.get("/livez").status_code,
        "readyz": mara.client.get("/readyz").status_code,
    }
    assert free == dict.fromkeys(free, 200)
    assert mara.delete(document).status_code == 404  # it was invalidated


def test_a_refused_request_reaches_no_model_and_leaves_no_record(site: Deployment, settings: Settings) -> None:
    key = issued_key(site, tenant_id=ACME, act_as=True)
    limit(site, ACME, queries_per_minute=0, ingests_per_minute=0)
    asked: list[str] = []
    with running(site, settings, door=Door(keys=KeyRing(refresh_s=0.05)), credential=key.text) as client:
        embedder = client.app.state.service.embedder  # type: ignore[attr-defined]

        async def embed(texts: list[str], **_: Any) -> list[list[float]]:
            asked.extend(texts)
            raise AssertionError

        embedder.embed, kept = embed, embedder.embed
        try:
            mara = Person(client=client, user_id=7)
            problem_of(search(mara), 429, "rate_limited")
            problem_of(mara.ingest("a.md", "# A"), 429, "rate_limited")
        finally:
            embedder.embed = kept
    assert asked == []
    with site.connect("rag_operator") as operator:
        found = operator.execute("select count(*) from rag_assertions where key_id = %s", (key.key_id,)).fetchone()
    assert found == (0,)


def test_what_is_malformed_or_not_permitted_costs_no_token(site: Deployment, settings: Settings) -> None:
    key = issued_key(site, tenant_id=ACME, act_as=True, actions=["query"])
    limit(site, ACME, queries_per_minute=1, ingests_per_minute=1)
    with running(site, settings, door=Door(keys=KeyRing(refresh_s=0.05)), credential=key.text) as client:
        mara = Person(client=client, user_id=7)
        assert mara.ask("").status_code == 422
        problem_of(mara.ingest("a.md", "# A"), 403, "forbidden")
        problem_of(search(replace(mara, tenant_id="elsewhere")), 403, "principal_mismatch")
        assert search(replace(mara, credential="rag_nonsense")).status_code == 401
        assert statuses([search(mara), search(mara)]) == [200, 429]


def test_a_credential_of_one_tenant_never_takes_from_another(site: Deployment, settings: Settings) -> None:
    limit(site, "victim", queries_per_minute=1)
    key = issued_key(site, tenant_id=ACME, act_as=True)
    with running(site, settings, door=Door(keys=KeyRing(refresh_s=0.05)), credential=key.text) as client:
        for tenant_id in ("victim", "Victim", "victim ", "", "*"):
            assert search(Person(client=client, tenant_id=tenant_id, user_id=7)).status_code in (403, 422)
    with site.cluster.superuser(site.name) as superuser:
        assert superuser.execute("select count(*) from rag.rag_rate_buckets").fetchone() == (0,)


def test_several_services_let_exactly_the_allowed_number_through_between_them(
    site: Deployment,
    settings: Settings,
    tenant: str,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    """Each has its own pools and its own event loop, as processes have."""
    services, threads = 3, scaled(test=12, ci=50, prove=50)
    limit(site, tenant, queries_per_minute=1, query_burst=20)
    with ExitStack() as stack:
        clients = [
            stack.enter_context(running(site, settings, pool_size=4, pool_timeout_s=60.0)) for _ in range(services)
        ]
        people = [Person(client=clients[number % services], tenant_id=tenant, user_id=7) for number in range(threads)]
        with ThreadPoolExecutor(threads) as pool:
            found = Counter(pool.map(lambda person: search(person).status_code, people * 3))
    assert found == {200: 20, 429: 3 * threads - 20}
    figure(f"rate over HTTP: {threads} threads on {services} services: {found[200]} of 20 passed, the others 429")


PROCESS = """
import asyncio, sys
from rag.database import Database
from rag.errors import RateLimited
from rag.limits import take_token
from rag.principal import Principal
from rag.sign import Signer

async def main():
    passed = 0
    async with Database(sys.argv[1], signer=Signer.parse(sys.argv[2]), pool_size=4, pool_timeout_s=60) as database:
        print("ready", flush=True)
        sys.stdin.readline()
        async def one():
            nonlocal passed
            try:
                await take_token(database, Principal(tenant_id=sys.argv[3], user_id=7), "query")
                passed += 1
            except RateLimited as refused:
                assert 0 < refused.rate.wait_s <= 60
        await asyncio.gather(*(one() for _ in range(20)))
    print(passed)

asyncio.run(main())
"""


def test_several_processes_let_exactly_the_allowed_number_through_between_them(site: Deployment, tenant: str) -> None:
    limit(site, tenant, queries_per_minute=1, query_burst=35)
    command = [sys.executable, "-c", PROCESS, site.url("rag_app"), SIGNING_KEY, tenant]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    passed = [int(process.communicate("go\n", timeout=60)[0]) for process in processes]
    assert sum(passed) == 35


# --- quotas ---------------------------------------------------------------------------------------


def test_a_full_quota_is_named_with_its_limit_and_its_use(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, documents=2)
    assert statuses([mara.ingest(f"{number}.md", f"# {number}") for number in range(2)]) == [201, 201]
    refused = problem_of(mara.ingest("2.md", "# 2"), 403, "quota_exceeded")
    assert refused["detail"] == (
        "the tenant may store 2 documents and has stored 2, so that this does not fit; "
        "remove documents, or ask the operator for more"
    )
    assert fields_of(refused) == ["documents"]
    # Not another one, but another text.
    assert mara.ingest("1.md", "# Changed").status_code == 200
    assert mara.ingest("1.md", "# Changed").json()["status"] == "unchanged"
    assert used(site, tenant)[0] == 2


def test_bytes_are_those_of_the_stored_text(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, bytes=20)
    assert mara.ingest("a.txt", "ä" * 9).status_code == 201
    assert used(site, tenant) == (1, 18)
    refused = problem_of(mara.ingest("b.txt", "abc"), 403, "quota_exceeded")
    assert fields_of(refused) == ["bytes"]
    problem_of(mara.ingest("a.txt", "ä" * 11), 403, "quota_exceeded")
    assert mara.finds("ä" * 9) is not None
    assert mara.ingest("a.txt", "abc").status_code == 200
    assert used(site, tenant) == (1, 3)


def test_what_is_removed_makes_room(site: Deployment, mara: Person, tenant: str) -> None:
    limit(site, tenant, documents=1)
    first = mara.store("a.md", "# A")
    problem_of(mara.ingest("b.md", "# B"), 403, "quota_exceeded")
    assert mara.delete(first).status_code == 204
    second = mara.store("b.md", "# B")
    body = {"document_ids": [second], "reason": "wrong"} | mara.identity
    assert mara.client.post("/rag/invalidate", json=body).status_code == 200
    assert used(site, tenant) == (0, 0)
    mara.store("c.md", "# C")


def test_one_tenant_cannot_fill_anothers_quota(site: Deployment, mara: Person, tenant: str) -> None:
    elsewhere = replace(mara, tenant_id=f"{tenant}-elsewhere")
    limit(site, "", documents=1)
    mara.store("a.md", "# A")
    elsewhere.store("a.md", "# A")
    problem_of(elsewhere.ingest("b.md", "# B"), 403, "quota_exceeded")
    assert used(site, tenant)[0] == 1


def test_a_refused_document_is_not_embedded(
    site: Deployment, client: TestClient, mara: Person, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(site, tenant, bytes=5)
    embedded: list[str] = []

    async def embed(texts: list[str], **_: Any) -> list[list[float]]:
        embedded.extend(texts)
        raise AssertionError

    monkeypatch.setattr(client.app.state.service.embedder, "embed", embed)  # type: ignore[attr-defined]
    problem_of(mara.ingest("a.md", "# Too long"), 403, "quota_exceeded")
    assert embedded == []


def test_many_ingests_at_once_store_exactly_the_quota(
    site: Deployment, settings: Settings, tenant: str, stored: Callable[[str], int]
) -> None:
    limit(site, tenant, documents=5)
    with running(site, settings, pool_size=8, pool_timeout_s=60.0) as client:
        mara = Person(client=client, tenant_id=tenant, user_id=7)
        with ThreadPoolExecutor(12) as pool:
            found = Counter(pool.map(lambda n: mara.ingest(f"{n}.md", f"# {n}").status_code, range(12)))
    assert found == {201: 5, 403: 7}
    assert stored(tenant) == 10  # each with a chunk
    assert used(site, tenant)[0] == 5
