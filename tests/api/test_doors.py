"""Who is let in, and whom they may speak for: the printed token on loopback, the key of a trusted service."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from api.app import create_app
from api.identity import Door, loopback_door, service_door
from rag.database import Database
from rag.errors import AccessError
from rag.settings import Settings
from tests.api.conftest import ACME
from tests.api.running import JSON, KEY, KEY_SHA256, TOKEN, Person, fields_of, problem_of
from tests.conftest import SIGNER
from tests.fakes import refusing_url

MISSING = "00000000-0000-4000-8000-000000000001"
TEXT = "# Refunds\n\nA refund takes five working days."
# A valid request to every route that wants a credential.
REQUESTS = [
    ("POST", "/rag/query", b'{"query": "anything", "generate": false}'),
    ("POST", "/rag/ingest", b'{"source_id": "a.md", "content": "text", "user_id": 7}'),
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
    pytest.param(f"Bearer {KEY}", id="the key of another door"),
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


# --- the key of a trusted service ----------------------------------------------------------------


@pytest.fixture
def served(service: TestClient) -> Person:
    return Person(client=service, tenant_id=ACME, user_id=7)


def test_the_key_opens_its_tenant_whether_it_is_named_or_not(served: Person) -> None:
    document = served.store("doors/refunds.md", TEXT)
    unnamed = replace(served, tenant_id=None)
    assert unnamed.read(document).status_code == 200
    assert unnamed.delete(document).status_code == 204


@pytest.mark.parametrize("tenant_id", ["globex", "ACME", "acme ", "", "acme\0"])
def test_the_key_opens_no_other_tenant(served: Person, tenant_id: str, stored: Callable[..., int]) -> None:
    elsewhere = replace(served, tenant_id=tenant_id)
    before = stored()
    for response in (elsewhere.ask("anything"), elsewhere.ingest("a.md", TEXT), elsewhere.read(MISSING)):
        assert fields_of(problem_of(response, 403, "principal_mismatch")) == ["tenant_id"]
    assert fields_of(problem_of(elsewhere.delete(MISSING), 403, "principal_mismatch")) == ["tenant_id"]
    assert stored() == before


def test_tags_beyond_the_key_are_neither_asserted_nor_written(served: Person, stored: Callable[..., int]) -> None:
    before = stored()
    beyond = replace(served, user_tags=["public", "finance"])
    for response in (beyond.ask("anything"), beyond.ingest("a.md", TEXT), beyond.read(MISSING)):
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
    problem_of(served.read(document), 404, "not_found")
    assert in_hr.delete(document).status_code == 204


@pytest.mark.parametrize("scope", ["public", "user", "project"])
def test_a_key_writes_its_scopes_alone(service_settings: Settings, scope: str) -> None:
    others = {"public", "user", "project"} - {scope}
    narrow = service_settings.model_copy(update={"rag_service_scopes": frozenset(others)})
    caller = service_door(narrow).identify(request_of(KEY))
    asked = {"tenant_id": None, "user_id": 7, "project_id": "orion", "tags": None}
    principal = caller.principal(**asked)
    with pytest.raises(AccessError, match=f"may not write scope {scope}"):
        caller.destination(principal, scope=scope, tags=None)  # type: ignore[arg-type]
    for other in others:
        assert caller.destination(principal, scope=other, tags=None).scope == other  # type: ignore[arg-type]


def request_of(credential: str) -> Request:
    return Request({"type": "http", "headers": [(b"authorization", f"Bearer {credential}".encode())]})


@pytest.mark.parametrize("action", ["query", "ingest", "delete"])
def test_a_key_permits_its_actions_alone(unopened: Callable[..., TestClient], action: str, settings: Settings) -> None:
    permitted = settings.model_copy(
        update={
            "rag_service_key_sha256": KEY_SHA256,
            "rag_service_tenant_id": ACME,
            "rag_service_actions": frozenset({"query", "ingest", "delete"} - {action}),
        }
    )
    client = unopened(service_door(permitted), KEY)
    wanted = ["query", "ingest", "query", "delete"]
    for needed, request in zip(wanted, REQUESTS, strict=True):
        if needed == action:
            problem = problem_of(send(client, *request), 403, "forbidden")
            assert problem["detail"] == f"this credential does not permit {action}"


def test_a_trusted_service_may_be_called_by_any_name(service: TestClient) -> None:
    response = send(service, *REQUESTS[0], host="rag.internal.example", origin="https://intranet.example")
    assert response.status_code == 200


@pytest.mark.parametrize("credential", [TOKEN, KEY_SHA256, KEY[:-1]])
def test_another_key_is_refused(service: TestClient, credential: str) -> None:
    for request in REQUESTS:
        problem_of(send(service, *request, authorization=f"Bearer {credential}"), 401, "unauthenticated")


@pytest.mark.parametrize("missing", ["rag_service_key_sha256", "rag_service_tenant_id"])
def test_half_a_trusted_service_is_none(service_settings: Settings, missing: str) -> None:
    with pytest.raises(AccessError, match="must be set to serve beyond loopback"):
        service_door(service_settings.model_copy(update={missing: None}))


# --- nothing is spent on a stranger --------------------------------------------------------------


@pytest.fixture
def unopened(settings: Settings) -> Callable[..., TestClient]:
    """A client of an application whose database was never opened: whatever needs it answers 503."""

    def client_of(door: Door, credential: str) -> TestClient:
        database = Database(refusing_url().replace("http", "postgresql"), signer=SIGNER)
        app = create_app(settings, database=database, door=door)
        return TestClient(
            app,
            base_url="http://127.0.0.1:8000",
            raise_server_exceptions=False,
            headers={"Authorization": f"Bearer {credential}"},
        )

    return client_of


def test_a_refused_caller_takes_no_connection(unopened: Callable[..., TestClient]) -> None:
    client = unopened(loopback_door(TOKEN), TOKEN)
    # Two of the requests need nothing but the database, and find out that it is not there.
    for request in REQUESTS[2:]:
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
        "filters",
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
