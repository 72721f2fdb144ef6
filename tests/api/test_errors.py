"""One table from error classes to HTTP, and one shape for every error."""

from __future__ import annotations

import inspect

import pytest
import structlog
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from api.app import create_app
from api.errors import STATUS, add_handlers, status_of
from api.identity import loopback_door
from rag import errors
from rag.database import Database
from rag.settings import Settings
from tests.api.running import TOKEN, fields_of, problem_of
from tests.conftest import SIGNER
from tests.fakes import refusing_url

CLASSES = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.RAGServiceError) and kind.__module__ == errors.__name__
]
# SECURITY.md, the end of section 3; 400 for a model is spec 001's.
ALLOWED = {400, 401, 403, 404, 409, 413, 415, 422, 429, 500, 502, 503, 504, 507}


def failing(error: Exception) -> TestClient:
    """A client of an application whose only route fails so."""
    app = FastAPI()
    add_handlers(app)

    @app.get("/")
    async def fail() -> None:
        raise error

    return TestClient(app, raise_server_exceptions=False)


def answer_to(error: Exception) -> dict[str, object]:
    found = failing(error).get("/").json()
    assert isinstance(found, dict)
    return found


# --- the table -----------------------------------------------------------------------------------


def test_every_error_is_in_the_table() -> None:
    assert set(STATUS) == set(CLASSES)


def test_every_status_is_one_of_the_mapping() -> None:
    assert {status for status, _ in STATUS.values()} <= ALLOWED


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_becomes_a_problem_with_its_status(kind: type[errors.RAGServiceError]) -> None:
    status, code = STATUS[kind]
    response = failing(kind()).get("/")
    # There is no request id where there is no middleware that gives one.
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert ("www-authenticate" in response.headers) == (status == 401)
    docstring = str(kind.__doc__)
    assert response.json() == {
        "type": f"urn:palisade:problem:{code}",
        "title": docstring.rstrip("."),
        "status": status,
        "detail": docstring,
        "instance": "urn:uuid:",
        "code": code,
        "request_id": "",
        "errors": [],
    }


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.InvalidInput, 422),
        (errors.EmptyDocument, 422),
        (errors.DocumentTooLarge, 413),
        (errors.UnsupportedFormat, 415),
        (errors.Unauthenticated, 401),
        (errors.AccessError, 403),
        (errors.PrincipalMismatch, 403),
        (errors.ScopeForbidden, 403),
        (errors.RateLimited, 429),
        (errors.QuotaExceeded, 403),
        (errors.DocumentNotFound, 404),
        (errors.SourceRetracted, 409),
        (errors.DatabaseUnavailable, 503),
        (errors.DatabaseTimeout, 504),
        (errors.StorageFull, 507),
        (errors.DatabaseError, 500),
        (errors.EmbeddingUnavailable, 503),
        (errors.EmbeddingTimeout, 504),
        (errors.EmbeddingInvalid, 502),
        (errors.LLMConnectionError, 503),
        (errors.LLMTimeoutError, 504),
        (errors.LLMBusyError, 503),
        (errors.LLMIncompleteError, 502),
        (errors.ModelNotAllowedError, 400),
        (errors.RAGServiceError, 500),
    ],
)
def test_the_statuses_that_clients_rely_on(kind: type[errors.RAGServiceError], status: int) -> None:
    assert STATUS[kind][0] == status


def test_an_error_without_a_line_of_its_own_has_that_of_its_parent() -> None:
    class BreakerOpen(errors.EmbeddingUnavailable):
        """The embedding provider failed too often."""

    assert status_of(BreakerOpen()) == (503, "embedding_unavailable")


@pytest.mark.parametrize("kind", [errors.LLMConnectionError, errors.LLMBusyError])
@pytest.mark.parametrize(
    ("known", "header"),
    [(None, "5"), (0.0, "5"), (0.2, "1"), (7.0, "7"), (7.1, "8"), (1e9, "3600"), (float("inf"), "3600")],
)
def test_whoever_knows_when_to_come_back_says_it(
    kind: type[errors.LLMConnectionError] | type[errors.LLMBusyError], known: float | None, header: str
) -> None:
    response = failing(kind(retry_after_s=known)).get("/")
    assert (response.status_code, response.headers["retry-after"]) == (503, header)


# --- what a problem says -------------------------------------------------------------------------


def test_an_error_names_its_field_and_says_what_is_wrong_with_it() -> None:
    found = answer_to(errors.InvalidInput("top_k must be a whole number", field="top_k"))
    assert found["title"] == "The request is malformed"
    assert found["detail"] == "top_k must be a whole number"
    assert found["errors"] == [{"field": "top_k", "message": "top_k must be a whole number"}]


def test_what_nobody_foresaw_is_a_problem_without_its_text() -> None:
    response = failing(RuntimeError("password=4711")).get("/")
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["code"] == "internal_error"
    assert "4711" not in response.text


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 413, 415, 418, 421, 500, 503])
def test_errors_of_the_framework_have_the_same_shape(status: int) -> None:
    found = answer_to(HTTPException(status, "what happened"))
    assert (found["status"], found["detail"], found["errors"]) == (status, "what happened", [])


@pytest.mark.parametrize("path", ["/", "/rag", "/rag/nothing", "/../etc/passwd", "/rag/documents/", "/%00"])
def test_a_path_that_is_not_there_is_a_problem_too(client: TestClient, path: str) -> None:
    problem_of(client.get(path), 404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/rag/ingest", "POST"),
        ("PUT", "/rag/query", "POST"),
        ("POST", "/livez", "GET"),
        ("PATCH", "/rag/documents/00000000-0000-4000-8000-000000000001", None),
    ],
)
def test_a_method_that_is_not_there_is_a_problem_too(
    client: TestClient, method: str, path: str, allowed: str | None
) -> None:
    response = client.request(method, path)
    problem_of(response, 405, "method_not_allowed")
    assert allowed is None or response.headers["allow"] == allowed


# --- the log -------------------------------------------------------------------------------------


def test_the_id_of_a_failed_request_finds_its_entry_in_the_log(settings: Settings) -> None:
    app = create_app(
        settings,
        database=Database(refusing_url().replace("http", "postgresql"), signer=SIGNER),
        door=loopback_door(TOKEN),
    )
    client = TestClient(
        app,
        base_url="http://127.0.0.1",
        raise_server_exceptions=False,
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    with structlog.testing.capture_logs() as entries:
        # Not started, the application has no service to ask: nobody foresaw that.
        unforeseen = client.post(
            "/rag/feedback", json={"query_id": "00000000-0000-4000-8000-000000000002", "rating": 1, "user_id": 4711}
        )
        foreseen = client.get("/rag/documents/00000000-0000-4000-8000-000000000001")
    problem = problem_of(unforeseen, 500, "internal_error")
    (entry,) = [entry for entry in entries if entry["event"] == "unexpected_error"]
    assert (entry["request_id"], entry["cause"]) == (problem["request_id"], "AttributeError")

    problem = problem_of(foreseen, 503, "database_unavailable")
    (entry,) = [entry for entry in entries if entry["event"] == "request_failed"]
    assert (entry["request_id"], entry["code"]) == (problem["request_id"], "database_unavailable")
    assert "4711" not in str([{**entry, "exc_info": None} for entry in entries])


def test_a_request_leaves_one_line_without_its_text(client: TestClient, tenant: str) -> None:
    with structlog.testing.capture_logs() as entries:
        response = client.post(
            "/rag/query?x=vault", json={"query": "the vault code is 4711", "tenant_id": tenant, "generate": False}
        )
        client.get("/rag/documents/00000000-0000-4000-8000-000000000001", params={"tenant_id": tenant})
        client.get("/vault/4711")
    first, second, third = entries
    assert first.pop("ms") > 0
    assert first == {
        "event": "request",
        "log_level": "info",
        "request_id": response.headers["x-request-id"],
        "method": "POST",
        "route": "/rag/query",
        "status": 200,
    }
    assert (second["route"], second["status"]) == ("/rag/documents/{document_id}", 404)
    assert (third["route"], third["status"]) == ("unmatched", 404)
    for canary in ("vault", "4711", tenant, TOKEN):
        assert canary not in str(entries)


def test_fields_of_a_problem_are_those_of_the_request(client: TestClient) -> None:
    response = client.post("/rag/query", json={"query": "", "top_k": 0, "chat_history": [{"role": "user"}]})
    problem = problem_of(response, 422, "invalid_input")
    assert fields_of(problem) == ["query", "top_k", "chat_history.0.content"]
    assert problem["detail"] == "query: String should have at least 1 character"
