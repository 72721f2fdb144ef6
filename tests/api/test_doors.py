"""Who is let in, and whom they may speak for: the printed token on loopback, the keys of trusted services, the
tokens of end users.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import structlog
from httpx2 import Response
from starlette.testclient import TestClient

from api.app import create_app
from api.identity import MAX_CREDENTIAL_LENGTH, Caller, Door, Grant, configured_door, loopback_door
from api.tokens import TokenVerifier
from rag.database import Database
from rag.errors import AccessError, PrincipalMismatch
from rag.keys import KeyRing, new_key
from rag.principal import Principal
from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import JSON, TOKEN, Person, database_of, fields_of, issued_key, nowhere, problem_of, running
from tests.conftest import Deployment
from tests.fakes import refusing_url
from tests.fakes.issuer import AUDIENCE, FakeIssuer, fake_issuer, signing_key

# What is waited for takes a moment.
PATIENCE_S = 20.0
MISSING = "00000000-0000-4000-8000-000000000001"
TEXT = "# Refunds\n\nA refund takes five working days."
# A valid request to every route that wants a credential.
REQUESTS = [
    ("POST", "/rag/query", b'{"query": "anything", "generate": false}'),
    ("POST", "/rag/ingest", b'{"source_id": "a.md", "content": "text", "user_id": 7}'),
    ("POST", "/rag/feedback", f'{{"query_id": "{MISSING}", "rating": 1}}'.encode()),
    (
        *("POST", "/rag/citations/check"),
        f'{{"citations": [{{"source_id": "{MISSING}:0", "cited_at": "2026-11-02T08:30:00Z"}}]}}'.encode(),
    ),
    ("POST", "/rag/enrich", b'{"message": "anything"}'),
    ("POST", "/rag/skill", b'{"query": "anything", "schema": {"type": "object"}}'),
    ("POST", "/rag/invalidate", b'{"source_ids": ["a.md"], "reason": "a test", "user_id": 7}'),
    ("POST", "/rag/reinstate", b'{"source_ids": ["a.md"], "reason": "a test", "user_id": 7}'),
    ("GET", f"/rag/documents/{MISSING}", None),
    ("DELETE", f"/rag/documents/{MISSING}", None),
]
BAD_CREDENTIALS = [
    pytest.param("", id="empty"),
    pytest.param("Bearer", id="no token"),
    pytest.param("Bearer ", id="empty token"),
    pytest.param(f"Bearer {TOKEN}x", id="a longer token"),
    pytest.param(f"Bearer {TOKEN[:-1]}", id="a shorter token"),
    pytest.param(f"Bearer  {TOKEN}", id="two spaces"),
    pytest.param(f"Bearer {TOKEN.upper()}", id="other case"),
    pytest.param(f"Basic {TOKEN}", id="another scheme"),
    pytest.param(TOKEN, id="no scheme"),
    pytest.param(f"Bearer {hashlib.sha256(TOKEN.encode()).hexdigest()}", id="the digest"),
    pytest.param(f"Bearer {new_key().text}", id="the key of another door"),
    pytest.param("Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiI3In0.", id="a token of another door"),
    pytest.param("Bearer " + "x" * 1_000_000, id="a megabyte"),
    pytest.param("Bearer " + TOKEN + " " * 5000, id="padding"),
    pytest.param("Bearer \xff\xfe", id="no ASCII"),
]


def send(client: TestClient, method: str, path: str, body: bytes | None, **headers: str) -> Any:
    return client.request(method, path, content=body, headers=(JSON if body else {}) | headers)


# --- the token on loopback -----------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_without_a_credential_nothing_is_answered(
    client: TestClient, method: str, path: str, body: bytes | None
) -> None:
    request = client.build_request(method, path, content=body, headers=JSON)
    request.headers.pop("authorization")
    problem_of(client.send(request), 401, "unauthenticated")


@pytest.mark.parametrize("credential", BAD_CREDENTIALS)
def test_a_credential_that_is_not_ours_is_refused(client: TestClient, credential: str) -> None:
    response = client.get(f"/rag/documents/{MISSING}", headers=[(b"authorization", credential.encode("latin-1"))])
    problem = problem_of(response, 401, "unauthenticated")
    assert problem["detail"] == "A valid credential is required."


def test_the_scheme_may_be_written_in_any_case(client: TestClient) -> None:
    response = client.get(f"/rag/documents/{MISSING}", headers={"authorization": f"bEARER {TOKEN}"})
    problem_of(response, 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/rag/query", b"{"),
        ("POST", "/rag/query", b"[" * 100_000),
        ("POST", "/rag/ingest", b'{"unknown": 1}'),
        ("POST", "/rag/ingest", b"x" * (17 * 1024 * 1024)),
        *(
            ("POST", path, body)
            for path in ("/rag/enrich", "/rag/skill", "/rag/feedback", "/rag/citations/check")
            for body in (b"{", b"x" * (17 * 1024 * 1024))
        ),
        ("GET", "/rag/documents/not-an-id", None),
        ("DELETE", "/rag/documents/not-an-id", None),
    ],
)
def test_a_stranger_learns_nothing_about_a_malformed_request(
    client: TestClient, method: str, path: str, body: bytes | None
) -> None:
    problem_of(send(client, method, path, body, authorization="Bearer no"), 401, "unauthenticated")


def test_the_holder_of_the_token_speaks_for_any_tenant_and_scope(client: TestClient, tenant: str) -> None:
    anyone = Person(client=client, tenant_id=tenant, user_id=7, project_id="orion")
    for scope in ("public", "user", "project"):
        assert anyone.ingest(f"{scope}.md", TEXT, scope=scope, tags=["hr"]).status_code == 201


# --- web pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000"])
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    problem_of(send(client, "GET", f"/rag/documents/{MISSING}", None, host=host), 404, "not_found")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "evil.example#@localhost",
        "localhost.",
        "0.0.0.0:8000",
        "10.0.0.1:8000",
        "",
        "[::1",
        "[evil]",
        "//localhost",
    ],
)
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_another_host_is_refused_even_with_the_token(
    client: TestClient, host: str, method: str, path: str, body: bytes | None
) -> None:
    problem_of(send(client, method, path, body, host=host), 421, "wrong_host")


@pytest.mark.parametrize(
    "origin",
    [
        "https://evil.example",
        "http://127.0.0.1:9000",
        "http://localhost:8000",
        "http://127.0.0.1:8000.evil.example",
        "null",
        "",
        "http://[",
    ],
)
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_another_origin_is_refused_even_with_the_token(
    client: TestClient, origin: str, method: str, path: str, body: bytes | None
) -> None:
    problem_of(send(client, method, path, body, origin=origin), 403, "forbidden")


def test_a_page_of_the_service_itself_is_answered(client: TestClient) -> None:
    response = send(client, *REQUESTS[0], origin="http://127.0.0.1:8000")
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


# --- keys of trusted services --------------------------------------------------------------------


@pytest.fixture
def served(service: TestClient) -> Person:
    """Mara of acme, through the service that speaks for people."""
    return Person(client=service, tenant_id=ACME, user_id=7)


@pytest.fixture
def holder(site: Deployment, service: TestClient) -> Callable[..., Person]:
    """`holder(act_as=True, …)`: whoever holds a new key of acme; names nobody."""

    def issue(**grant: Any) -> Person:
        person = Person(client=service, credential=issued_key(site, tenant_id=ACME, **grant).text)
        end = time.monotonic() + PATIENCE_S
        while person.read(MISSING).status_code == 401:
            assert time.monotonic() < end
            time.sleep(0.02)
        return person

    return issue


# Beside a question, what needs the action query; a form is tried apart, as it takes a model.
ASKED = {
    "/rag/enrich": {"message": "anything"},
    "/rag/feedback": {"query_id": MISSING, "rating": 1},
    "/rag/citations/check": {"citations": [{"source_id": f"{MISSING}:0", "cited_at": "2026-11-02T08:30:00Z"}]},
}
FORM = {"query": "anything", "schema": {"type": "object"}}


def post(person: Person, path: str, body: dict[str, Any]) -> Response:
    return person.client.post(path, json=body | person.identity, headers=person.headers)


def requests_of(person: Person) -> list[Response]:
    """One request of each kind."""
    return [
        person.ask("anything", generate=False),
        person.ingest("doors/a.md", TEXT),
        person.read(MISSING),
        person.delete(MISSING),
        *(post(person, path, body) for path, body in ASKED.items()),
    ]


def test_the_key_opens_its_tenant_whether_it_is_named_or_not(served: Person) -> None:
    document = served.store("doors/refunds.md", TEXT)
    unnamed = replace(served, tenant_id=None)
    assert unnamed.read(document).status_code == 200
    assert unnamed.delete(document).status_code == 204


@pytest.mark.parametrize("tenant_id", ["globex", "ACME", "acme ", "", "acme\0"])
def test_the_key_opens_no_other_tenant(served: Person, tenant_id: str, stored: Callable[..., int]) -> None:
    before = stored()
    stranger = replace(served, tenant_id=tenant_id)
    for response in (*requests_of(stranger), post(stranger, "/rag/skill", FORM)):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == ["tenant_id"]
    assert stored() == before


def test_tags_beyond_the_key_are_neither_asserted_nor_written(served: Person, stored: Callable[..., int]) -> None:
    before = stored()
    for response in requests_of(replace(served, user_tags=["public", "finance"])):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == ["user_tags"]
    problem_of(served.ingest("a.md", TEXT, tags=["finance"]), 403, "principal_mismatch")
    within = replace(served, user_tags=["public"])
    problem = problem_of(within.ingest("a.md", TEXT, tags=["public", "finance"]), 403, "scope_forbidden")
    assert fields_of(problem) == ["tags"]
    assert stored() == before


def test_tags_of_the_key_are_asserted(served: Person) -> None:
    in_hr = replace(served, user_tags=["hr"])
    document = in_hr.store("doors/salaries.md", "# Salaries\n\nSalaries are paid on the 25th.")
    assert in_hr.read(document).json()["tags"] == ["hr"]
    # Somebody for whom it speaks has the tags that it names for them, and else public.
    problem_of(served.read(document), 404, "not_found")
    assert in_hr.delete(document).status_code == 204


@pytest.mark.parametrize("scope", ["public", "user", "project"])
def test_a_key_writes_its_scopes_alone(holder: Callable[..., Person], scope: str) -> None:
    others = sorted({"public", "user", "project"} - {scope})
    person = replace(holder(act_as=True, scopes=others), user_id=7, project_id="orion")
    problem = problem_of(person.ingest("doors/a.md", TEXT, scope=scope), 403, "scope_forbidden")
    assert problem["detail"] == f"this credential may not write scope {scope}"
    for other in others:
        assert person.ingest("doors/scopes.md", TEXT, scope=other).status_code in (200, 201)


@pytest.mark.parametrize("action", ["query", "ingest", "delete"])
def test_a_key_permits_its_actions_alone(holder: Callable[..., Person], action: str) -> None:
    permitted = {"query", "ingest", "delete"} - {action}
    person = replace(holder(act_as=True, actions=sorted(permitted)), user_id=7)
    needs = ["query", "ingest", "query", "delete", *("query" for _ in ASKED)]
    for needed, response in zip(needs, requests_of(person), strict=True):
        if needed == action:
            problem = problem_of(response, 403, "forbidden")
            assert problem["detail"] == f"this credential does not permit {action}"
        else:
            assert response.status_code in (200, 201, 404)
    response = post(person, "/rag/skill", FORM)
    assert response.status_code == (403 if action == "query" else 503)


def test_a_key_that_speaks_for_nobody_names_nobody(holder: Callable[..., Person], stored: Callable[..., int]) -> None:
    crawler = holder(scopes=["public"])
    before = stored()
    for naming, field in (({"user_id": 7}, "user_id"), ({"project_id": "orion"}, "project_id")):
        for response in requests_of(replace(crawler, **naming)):
            assert fields_of(problem_of(response, 403, "principal_mismatch")) == [field]
    for response in requests_of(replace(crawler, project_id="*")):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == ["project_id"]
    assert stored() == before


def test_a_key_that_speaks_for_nobody_reads_and_writes_what_is_public(
    holder: Callable[..., Person], served: Person
) -> None:
    private = served.store("doors/private.md", "# Private\n\nThe crawler must not read this.")
    crawler = holder(scopes=["public"], tags=["hr", "ops"])
    document = crawler.store("doors/crawled.md", "# Crawled\n\nThe crawler put this here.", scope="public")
    # Its own tags are its own, named or not.
    assert crawler.read(document).json()["tags"] == ["hr", "ops"]
    assert crawler.finds("What did the crawler put here?") == ["Crawled"]
    problem_of(crawler.read(private), 404, "not_found")
    assert replace(served, user_tags=["hr"]).read(document).status_code == 200
    problem_of(served.read(document), 404, "not_found")
    assert crawler.delete(document).status_code == 204


def test_a_key_speaks_for_its_users_and_projects_alone(
    holder: Callable[..., Person], stored: Callable[..., int]
) -> None:
    person = holder(act_as=True, user_ids=[7, 8], project_ids=["orion"])
    before = stored()
    for naming, field in (
        ({"user_id": 9}, "user_id"),
        ({"user_id": "78"}, "user_id"),
        ({"user_id": 7, "project_id": "lyra"}, "project_id"),
        ({"user_id": 7, "project_id": "Orion"}, "project_id"),
        ({"user_id": 7, "project_id": "*"}, "project_id"),
        ({"user_id": 9, "project_id": "orion"}, "user_id"),
    ):
        for response in requests_of(replace(person, **naming)):
            assert fields_of(problem_of(response, 403, "principal_mismatch")) == [field]
    assert stored() == before
    for naming in ({}, {"user_id": 7}, {"user_id": "8"}, {"user_id": 7, "project_id": "orion"}):
        assert replace(person, **naming).ask("anything", generate=False).status_code == 200


def test_a_key_for_all_projects_at_once_is_one_for_each(holder: Callable[..., Person]) -> None:
    person = replace(holder(act_as=True, project_ids=["*"]), user_id=7)
    for project_id in ("*", "orion"):
        assert replace(person, project_id=project_id).ask("anything", generate=False).status_code == 200


def test_a_trusted_service_may_be_called_by_any_name(service: TestClient) -> None:
    response = send(service, *REQUESTS[0], host="rag.internal.example", origin="https://intranet.example")
    assert response.status_code == 200


def test_another_key_is_refused(site: Deployment, service: TestClient) -> None:
    revoked = issued_key(site, tenant_id=ACME)
    with site.connect("rag_operator") as connection:
        connection.execute("update rag_service_keys set revoked_at = now() where key_id = %s", (revoked.key_id,))
    # Known once these are.
    keys = (issued_key(site, tenant_id=ACME, act_as=True) for _ in iter(int, None))
    # One id in 1,800 is of digits alone, and the same in capitals.
    ours = next(key for key in keys if not key.key_id.isdigit())
    other = next(keys)
    until_known(service, ours.text)
    until_known(service, other.text)
    secret = ours.text[-48:]
    for text in (
        revoked.text,
        issued_key(site, tenant_id=ACME, valid_for="-1 second").text,
        new_key().text,
        f"rag_{other.key_id}_{secret}",
        f"rag_{'0' * 16}_{secret}",
        f"rag_{ours.key_id}_{secret[:-1]}",
        f"rag_{ours.key_id}_{secret}A",
        f"rag_{ours.key_id}_{secret.swapcase()}",
        f"rag_{ours.key_id}_{'A' * 48}",
        f"rag_{ours.key_id}_",
        f"rag_{ours.key_id}_{ours.secret_sha256.hex()}",
        f"rag_{ours.key_id.upper()}_{secret}",
        f"rag__{secret}",
        "rag_",
        secret,
        ours.key_id,
        f"RAG_{ours.key_id}_{secret}",
        f"{ours.text}\t",
        TOKEN,
    ):
        for request in REQUESTS:
            problem = problem_of(send(service, *request, authorization=f"Bearer {text}"), 401, "unauthenticated")
            assert problem["detail"] == "A valid credential is required."


def until_known(service: TestClient, credential: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while send(service, *REQUESTS[2], authorization=f"Bearer {credential}").status_code == 401:
        assert time.monotonic() < end
        time.sleep(0.02)


# --- tokens of end users -------------------------------------------------------------------------


@pytest.fixture(scope="session")
def issuer() -> Iterator[FakeIssuer]:
    with fake_issuer() as running_issuer:
        yield running_issuer


@pytest.fixture(scope="session")
def trusting(settings: Settings, issuer: FakeIssuer) -> Settings:
    """The settings of a service that trusts the issuer, whose editors publish."""
    return settings.model_copy(
        update={
            "rag_jwt_issuer": issuer.url,
            "rag_jwt_audience": AUDIENCE,
            "rag_jwt_jwks_url": issuer.key_set_url,
            "rag_jwt_publisher_role": "editor",
        }
    )


@pytest.fixture(scope="session")
def portal(site: Deployment, trusting: Settings) -> Iterator[TestClient]:
    """What `rag serve` runs for end users, without a credential of its own."""
    door = configured_door(trusting)
    assert door is not None
    with running(site, trusting, door=door, credential="") as started:
        yield started


@pytest.fixture
def bearer(portal: TestClient, issuer: FakeIssuer, tenant: str) -> Callable[..., Person]:
    """`bearer(sub="8", …)`: whoever holds a token with these claims, for this test's tenant; names nobody."""

    def of(**claims: Any) -> Person:
        return Person(client=portal, credential=issuer.token(**({"tenant_id": tenant} | claims)))

    return of


def test_a_token_is_enough_to_be_somebody(bearer: Callable[..., Person], tenant: str) -> None:
    mara, jonas, elsewhere = bearer(sub="7"), bearer(sub="8"), bearer(sub="7", tenant_id=f"{tenant}-2")
    document = mara.store("refunds.md", TEXT)
    assert (mara.read(document).json()["user_id"], mara.read(document).json()["scope"]) == (7, "user")
    assert mara.finds("How long does a refund take?") == ["Refunds"]
    for other in (jonas, elsewhere, bearer(sub=None)):
        assert other.finds("How long does a refund take?") == []
        problem_of(other.read(document), 404, "not_found")
        problem_of(other.delete(document), 404, "not_found")
    assert mara.delete(document).status_code == 204


def test_a_request_may_repeat_what_the_token_says(bearer: Callable[..., Person], tenant: str) -> None:
    mara = bearer(projects=["orion"], tags=["hr", "public"])
    document = mara.store("refunds.md", TEXT, tags=["hr"])
    for naming in (
        {"tenant_id": tenant},
        {"user_id": 7},
        {"user_id": "7"},
        {"user_tags": ["public", "hr"]},
        {"user_tags": ["hr"]},
        {"tenant_id": tenant, "user_id": 7, "project_id": "orion", "user_tags": ["hr", "hr"]},
    ):
        assert replace(mara, **naming).read(document).status_code == 200
    # Fewer tags than the token's show less.
    problem_of(replace(mara, user_tags=["public"]).read(document), 404, "not_found")


@pytest.mark.parametrize(
    ("claims", "naming", "field"),
    [
        ({}, {"tenant_id": "globex"}, "tenant_id"),
        ({}, {"tenant_id": ""}, "tenant_id"),
        ({}, {"user_id": 8}, "user_id"),
        ({}, {"user_id": "77"}, "user_id"),
        ({"sub": None}, {"user_id": 7}, "user_id"),
        ({"projects": []}, {"project_id": "orion"}, "project_id"),
        ({"projects": ["orion"]}, {"project_id": "lyra"}, "project_id"),
        ({"projects": ["orion"]}, {"project_id": "Orion"}, "project_id"),
        ({"projects": ["orion"]}, {"project_id": "*"}, "project_id"),
        ({}, {"user_tags": ["hr"]}, "user_tags"),
        ({"tags": ["hr"]}, {"user_tags": ["public"]}, "user_tags"),
        ({"tags": ["hr", "ops"]}, {"user_tags": ["hr", "finance"]}, "user_tags"),
    ],
)
def test_a_request_does_not_go_beyond_the_token(
    bearer: Callable[..., Person],
    stored: Callable[..., int],
    claims: dict[str, Any],
    naming: dict[str, Any],
    field: str,
) -> None:
    before = stored()
    beyond = replace(bearer(**claims), **naming)
    for response in (*requests_of(beyond), post(beyond, "/rag/skill", FORM)):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == [field]
    assert stored() == before


def test_no_tags_are_the_tag_public_which_a_token_need_not_have(bearer: Callable[..., Person]) -> None:
    nothing = replace(bearer(tags=["hr"]), user_tags=[])
    for response in (nothing.ask("anything"), nothing.ingest("doors/a.md", TEXT)):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == ["user_tags"]
    assert replace(nothing, user_tags=None).ask("anything", generate=False).status_code == 200


def test_projects_are_those_of_the_token_or_else_those_of_the_database(bearer: Callable[..., Person]) -> None:
    text = "# Windows\n\nThe deploy window opens on Tuesday."
    mara = replace(bearer(), project_id="orion")
    assert mara.ingest("windows.md", text).status_code == 201
    asked = "When does the deploy window open?"
    for claims in ({}, {"projects": ["orion"]}, {"projects": ["*"]}):
        assert replace(bearer(**claims), project_id="orion").finds(asked) == ["Windows"]
        assert bearer(**claims).finds(asked) == []
    assert replace(bearer(projects=["*"]), project_id="*").finds(asked) == ["Windows"]
    # Jonas may name a project of that name; it is his own, or nobody shared hers with him.
    assert replace(bearer(sub="8"), project_id="orion").finds(asked) == []


def test_what_one_writes_has_the_tags_of_the_token(bearer: Callable[..., Person]) -> None:
    in_hr = bearer(tags=["hr", "ops"])
    document = in_hr.store("salaries.md", TEXT)
    assert in_hr.read(document).json()["tags"] == ["hr", "ops"]
    problem = problem_of(in_hr.ingest("other.md", TEXT, tags=["public"]), 403, "scope_forbidden")
    assert fields_of(problem) == ["tags"]
    assert in_hr.ingest("salaries.md", TEXT, tags=["hr"]).json()["document_id"] == document


def test_only_an_editor_publishes(bearer: Callable[..., Person]) -> None:
    for roles in (None, ["reader"], []):
        problem = problem_of(bearer(roles=roles).ingest("news.md", TEXT, scope="public"), 403, "scope_forbidden")
        assert fields_of(problem) == ["scope"]
    document = bearer(roles=["editor"]).store("news.md", TEXT, scope="public")
    assert bearer(sub="8").read(document).status_code == 200
    problem_of(bearer(sub="7").delete(document), 403, "scope_forbidden")
    assert bearer(sub="8", roles=["editor"]).delete(document).status_code == 204


def test_a_token_that_is_not_believed_is_refused_without_a_reason(
    portal: TestClient, issuer: FakeIssuer, service: TestClient
) -> None:
    whole = issuer.token()
    bad = [
        issuer.token(exp=int(time.time()) - 3600),
        issuer.token(nbf=int(time.time()) + 3600),
        issuer.token(aud="other"),
        issuer.token(iss="https://elsewhere.example"),
        issuer.token(tenant_id=None),
        issuer.token(sub="mara"),
        issuer.token(key=signing_key("EdDSA", 666)),
        issuer.token(key_id="../../../dev/null", key=signing_key("EdDSA", 666)),
        issuer.token(header={"crit": ["exp"]}),
        whole[:-1],
        whole + "A" * 1_000_000,
        new_key().text,
        TOKEN,
    ]
    details = set()
    for token in bad:
        for request in REQUESTS:
            problem = problem_of(send(portal, *request, authorization=f"Bearer {token}"), 401, "unauthenticated")
            details.add((problem["title"], problem["detail"], str(problem["errors"])))
    assert details == {("A valid credential is required", "A valid credential is required.", "[]")}
    # Where only services are let in, nobody's token is looked at.
    for request in REQUESTS:
        problem_of(send(service, *request, authorization=f"Bearer {whole}"), 401, "unauthenticated")


def test_a_token_that_is_too_long_is_not_even_looked_at(portal: TestClient, issuer: FakeIssuer) -> None:
    for length, status in ((MAX_CREDENTIAL_LENGTH - 1000, 200), (MAX_CREDENTIAL_LENGTH, 401)):
        token = issuer.token(groups=["x" * (length * 3 // 4 - 200)])
        assert (len(token) > MAX_CREDENTIAL_LENGTH) == (status == 401)
        assert send(portal, *REQUESTS[0], authorization=f"Bearer {token}").status_code == status


def test_the_log_says_what_was_wrong_with_a_token_and_nothing_of_it(portal: TestClient, issuer: FakeIssuer) -> None:
    wrong = {
        "ExpiredSignatureError": issuer.token(exp=int(time.time()) - 3600),
        "InvalidAudienceError": issuer.token(aud="other-4711"),
        "InvalidSignatureError": issuer.token(key=signing_key("EdDSA", 666)),
        "InvalidKeyError": issuer.token(key_id="key-4711", key=signing_key("EdDSA")),
        "InvalidInput": issuer.token(sub="mara-4711"),
    }
    for cause, token in wrong.items():
        with structlog.testing.capture_logs() as entries:
            response = send(portal, *REQUESTS[2], authorization=f"Bearer {token}")
        (entry,) = [entry for entry in entries if entry["event"] == "credential_refused"]
        assert (entry["cause"], entry["request_id"]) == (cause, response.json()["request_id"])
        assert entry["field"] == ("sub" if cause == "InvalidInput" else None)
        assert not any(part in str(entries) for part in ("4711", *token.split(".")))


def test_an_issuer_that_cannot_be_asked_is_nobodys_fault(
    site: Deployment, trusting: Settings, issuer: FakeIssuer
) -> None:
    unknown = trusting.model_copy(update={"rag_jwt_jwks_url": f"{refusing_url()}/keys.json"})
    door = configured_door(unknown)
    assert door is not None
    with running(site, unknown, door=door, credential=issuer.token()) as client:
        for request in REQUESTS:
            problem_of(send(client, *request), 503, "issuer_unavailable")
            problem_of(send(client, *request, authorization="Bearer no"), 401, "unauthenticated")


# --- which door there is -------------------------------------------------------------------------


def test_end_users_and_services_may_come_through_one_door(
    site: Deployment, trusting: Settings, issuer: FakeIssuer
) -> None:
    both = trusting.model_copy(update={"rag_service_keys": True})
    door = configured_door(both)
    assert door is not None
    key = issued_key(site, tenant_id=ACME, act_as=True)
    with running(site, both, door=door, credential="") as client:
        for credential, status in ((key.text, 200), (issuer.token(), 200), (new_key().text, 401), (TOKEN, 401)):
            assert send(client, *REQUESTS[0], authorization=f"Bearer {credential}").status_code == status


def test_nobody_else_comes_through_the_door_of_the_printed_token(trusting: Settings) -> None:
    with pytest.raises(AccessError):
        Door(printed_token=TOKEN, keys=KeyRing())
    with pytest.raises(AccessError):
        Door(printed_token=TOKEN, tokens=TokenVerifier(trusting))


def test_without_settings_there_is_no_door(settings: Settings) -> None:
    assert configured_door(settings) is None


@pytest.mark.parametrize("missing", ["rag_jwt_issuer", "rag_jwt_audience", "rag_jwt_jwks_url"])
def test_half_an_issuer_is_none(trusting: Settings, missing: str) -> None:
    for rest in (False, True):
        update = {missing: None, "rag_service_keys": rest}
        with pytest.raises(AccessError, match="must be set together"):
            configured_door(trusting.model_copy(update=update))


# --- whom a caller speaks for, in all combinations -----------------------------------------------

USERS, PROJECTS, TAGS = (7, 8, 9), ("orion", "lyra", "*"), ("public", "hr", "ops")


def some(values: Sequence[Any], chance: random.Random) -> list[Any]:
    return [value for value in values if chance.random() < 0.5]


def test_nobody_is_named_beyond_a_credential(scaled: Callable[..., int], figure: Callable[[str], None]) -> None:
    """Against a model that knows no defaults: whoever comes out is within what the credential says."""
    cases = scaled(test=5_000, ci=50_000, prove=1_000_000)
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    outcomes = {"named": 0, "refused": 0}
    for _ in range(cases):
        may_tags = chance.choice([None, some(TAGS, chance)])
        may_users = chance.choice([None, some(USERS, chance)])
        may_projects = chance.choice([None, some(PROJECTS, chance)])
        own_user = chance.choice(may_users) if may_users else None
        own_tags = tuple(may_tags) if may_tags and chance.random() < 0.5 else None
        grant = Grant(
            tenant_id="acme",
            actions=frozenset(),
            scopes=frozenset(),
            tags=None if may_tags is None else frozenset(may_tags),
            own_tags=own_tags,
            user_id=own_user,
            user_ids=None if may_users is None else frozenset(may_users),
            project_ids=None if may_projects is None else frozenset(may_projects),
        )
        asked: dict[str, Any] = {
            "tenant_id": chance.choice([None, "acme", "globex"]),
            "user_id": chance.choice([None, *USERS, "7"]),
            "project_id": chance.choice([None, *PROJECTS]),
            "tags": chance.choice([None, some(TAGS, chance)]),
        }
        means_tags = {"public"} if not asked["tags"] else set(asked["tags"])
        if asked["tags"] is None and own_tags is not None:
            means_tags = set(own_tags)
        permitted = (
            asked["tenant_id"] != "globex"
            and (asked["user_id"] is None or may_users is None or int(asked["user_id"]) in may_users)
            and (asked["project_id"] is None or may_projects is None or asked["project_id"] in may_projects)
            and (may_tags is None or means_tags <= set(may_tags))
        )
        try:
            found = Caller(grant=grant).principal(**asked)
        except PrincipalMismatch:
            assert not permitted, (seed, grant, asked)
            outcomes["refused"] += 1
            continue
        assert permitted, (seed, grant, asked)
        assert found == Principal(
            tenant_id="acme",
            user_id=own_user if asked["user_id"] is None else int(asked["user_id"]),
            project_id=asked["project_id"],
            tags=tuple(sorted(means_tags)),
        ), (seed, grant, asked)
        outcomes["named"] += 1
    assert min(outcomes.values()) > cases // 20
    figure(
        f"{cases:,} credentials and what they were used for: 0 beyond ({outcomes['refused']:,} refused; seed {seed})"
    )


# --- nothing is spent on a stranger --------------------------------------------------------------


def test_a_refused_caller_takes_no_connection_and_none_of_the_body_is_read(
    site: Deployment,
    settings: Settings,
    trusting: Settings,
    issuer: FakeIssuer,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    cases = scaled(test=600, ci=6_000, prove=100_000)
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    both = trusting.model_copy(update={"rag_service_keys": True})
    key = issued_key(site, tenant_id=ACME, act_as=True)
    mallory = signing_key("EdDSA", 666)
    bad: list[Callable[[], str]] = [
        lambda: "",
        lambda: "Basic " + TOKEN,
        lambda: "Bearer " + chance.randbytes(24).hex(),
        lambda: "Bearer " + "x" * 100_000,
        lambda: "Bearer " + new_key().text,
        lambda: f"Bearer rag_{key.key_id}_{new_key().text[-48:]}",
        lambda: "Bearer " + issuer.token(key=mallory, sub=str(chance.randrange(1, 99))),
        lambda: "Bearer " + issuer.token(key=mallory, key_id=chance.randbytes(4).hex()),
        lambda: "Bearer " + issuer.token(exp=1),
        lambda: "Bearer " + issuer.token(aud="other"),
    ]
    routes = [(method, path) for method, path, _ in REQUESTS] + [("GET", "/health")]
    for given, good in ((settings, TOKEN), (both, key.text), (both, issuer.token())):
        database = database_of(site)
        door = configured_door(given) or loopback_door(TOKEN)
        with running(site, given, door=door, credential=good, database=database) as client:
            taken = asked_of_pools(database)
            for _ in range(cases // 3):
                method, path = chance.choice(routes)
                unread = Unread()
                response = client.request(
                    method,
                    path,
                    content=None if method in ("GET", "DELETE") else unread,
                    headers=JSON | {"authorization": chance.choice(bad)()},
                )
                assert response.status_code == 401, seed
                assert not unread.began
            assert asked_of_pools(database) == taken, seed
            # What is let in takes one, so that this would be seen.
            problem_of(send(client, *REQUESTS[2]), 404, "not_found")
            assert asked_of_pools(database) > taken
    figure(f"{cases:,} requests with bad credentials: 0 connections taken, 0 bodies read (seed {seed})")


class Unread:
    """A body that knows whether anybody wanted it."""

    def __init__(self) -> None:
        self.began = False

    def __iter__(self) -> Iterator[bytes]:
        self.began = True
        yield b'{"query": "x"}'


def asked_of_pools(database: Database) -> int:
    """How often a connection was asked for, of the pools that requests use."""
    pools = [pool for pool in (database._app, database._publisher) if pool is not None]
    return sum(pool.get_stats().get("requests_num", 0) for pool in pools)


@pytest.fixture
def unopened(settings: Settings) -> Callable[..., TestClient]:
    """A client of an application whose database was never opened: whatever needs it answers 503."""

    def client_of(door: Door, credential: str) -> TestClient:
        app = create_app(settings, database=nowhere(), door=door)
        return TestClient(
            app,
            base_url="http://127.0.0.1:8000",
            raise_server_exceptions=False,
            headers={"Authorization": f"Bearer {credential}"},
        )

    return client_of


def test_a_refused_caller_needs_no_database(unopened: Callable[..., TestClient]) -> None:
    client = unopened(loopback_door(TOKEN), TOKEN)
    # Two of the requests need nothing but the database, and find out that it is not there.
    for request in REQUESTS[-2:]:
        problem_of(send(client, *request), 503, "database_unavailable")
    for request in REQUESTS:
        problem_of(send(client, *request, authorization="Bearer no"), 401, "unauthenticated")
        problem_of(send(client, *request, host="evil.example"), 421, "wrong_host")
        problem_of(send(client, *request, origin="https://evil.example"), 403, "forbidden")


# --- what a body may say of the asker ------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        "app.user_id",
        "app.tenant_id",
        "app",
        "filter",
        "role",
        "is_admin",
        "access_id",
        "exclude_tainted",
        "User_id",
        "user_id ",
        "__proto__",
        "",
        "ключ",
    ],
)
@pytest.mark.parametrize("route", ["query", "ingest"])
def test_a_field_that_is_none_of_ours_is_refused(
    mara: Person, route: str, field: str, stored: Callable[..., int]
) -> None:
    required = {"query": "anything"} if route == "query" else {"source_id": "a.md", "content": TEXT}
    for value in (8, {"app.tenant_id": "globex"}):
        response = mara.client.post(f"/rag/{route}", json=required | mara.identity | {field: value})
        problem = problem_of(response, 422, "invalid_input")
        assert problem["errors"] == [{"field": field or "body", "message": "Extra inputs are not permitted"}]
    assert stored(mara.tenant_id) == 0


def test_tags_of_a_document_are_no_tags_of_the_asker(mara: Person) -> None:
    problem = problem_of(mara.ask("anything", tags=["hr"]), 422, "invalid_input")
    assert fields_of(problem) == ["tags"]
    document = mara.store("a.md", TEXT, user_tags=["hr", "public"], tags=["hr"])
    assert replace(mara, user_tags=["hr"]).read(document).json()["tags"] == ["hr"]
    # Without tags of its own a document has those of its writer.
    document = mara.store("b.md", TEXT, user_tags=["hr", "legal"])
    assert replace(mara, user_tags=["legal"]).read(document).json()["tags"] == ["hr", "legal"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"user_id": 0}, "user_id"),
        ({"user_id": -1}, "user_id"),
        ({"user_id": 10**18}, "user_id"),
        ({"user_id": 10**100}, "user_id"),
        ({"user_id": "0"}, "user_id"),
        ({"user_id": "07"}, "user_id"),
        ({"user_id": " 7"}, "user_id"),
        ({"user_id": "7\n"}, "user_id"),
        ({"user_id": "0x1"}, "user_id"),
        ({"user_id": "1e3"}, "user_id"),
        ({"user_id": "１"}, "user_id"),
        ({"user_id": "7,8"}, "user_id"),
        ({"user_id": "7" * 1_000_000}, "user_id"),
        ({"user_id": ""}, "user_id"),
        ({"tenant_id": ""}, "tenant_id"),
        ({"tenant_id": " "}, "tenant_id"),
        ({"tenant_id": "x" * 129}, "tenant_id"),
        ({"tenant_id": "x" * 1_000_000}, "tenant_id"),
        ({"tenant_id": "a\0b"}, "tenant_id"),
        ({"tenant_id": 7}, "tenant_id"),
        ({"project_id": ""}, "project_id"),
        ({"project_id": "x" * 129}, "project_id"),
        ({"project_id": "a\u0000"}, "project_id"),
        ({"project_id": "orion "}, "project_id"),
        ({"project_id": ["orion"]}, "project_id"),
        ({"user_tags": "public"}, "user_tags"),
        ({"user_tags": {"public": True}}, "user_tags"),
        ({"user_tags": [""]}, "user_tags"),
        ({"user_tags": ["x" * 65]}, "user_tags"),
        ({"user_tags": [f"tag-{number}" for number in range(257)]}, "user_tags"),
        ({"user_tags": ["a\nb"]}, "user_tags"),
        ({"user_tags": [["public"]]}, "user_tags.0"),
        ({"user_tags": [None]}, "user_tags.0"),
    ],
)
def test_an_identity_that_can_be_none_is_refused(mara: Person, fields: dict[str, Any], named: str) -> None:
    problem = problem_of(mara.ask("anything", **fields), 422, "invalid_input")
    assert fields_of(problem) == [named]


@pytest.mark.parametrize("user_id", [True, False, 7.0, [7], {"id": 7}])
def test_a_user_is_of_no_other_type(mara: Person, user_id: object) -> None:
    problem = problem_of(mara.ask("anything", user_id=user_id), 422, "invalid_input")
    assert {name.split(".")[0] for name in fields_of(problem)} == {"user_id"}


@pytest.mark.parametrize("tag", ["a,b", '"quoted"', "back\\slash", "[", "'", "{}", "标签", "😀", "%s", "$$"])
def test_a_tag_is_one_tag_whatever_it_looks_like(mara: Person, tag: str) -> None:
    document = mara.store("a.md", TEXT, tags=[tag])
    assert replace(mara, user_tags=[tag]).read(document).json()["tags"] == [tag]
    for other in ("a", "b", "public"):
        problem_of(replace(mara, user_tags=[other]).read(document), 404, "not_found")
