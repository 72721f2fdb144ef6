"""Probes: whether the process runs, whether it can answer, and nothing else for strangers."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from api.app import create_app
from api.identity import loopback_door
from rag.database import Database
from rag.settings import Settings
from tests.api.running import TOKEN, problem_of
from tests.conftest import SIGNER
from tests.fakes import refusing_url


@pytest.fixture
def stranger(client: TestClient) -> TestClient:
    """A client without a credential."""
    return TestClient(client.app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


@pytest.fixture
def without_database(settings: Settings) -> TestClient:
    """A stranger at an application whose database is not there."""
    database = Database(refusing_url().replace("http", "postgresql"), signer=SIGNER)
    app = create_app(settings, database=database, door=loopback_door(TOKEN))
    return TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def test_a_running_process_is_live_without_its_database(stranger: TestClient, without_database: TestClient) -> None:
    for client in (stranger, without_database):
        response = client.get("/livez")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_ready_means_that_the_database_answers(stranger: TestClient, without_database: TestClient) -> None:
    response = stranger.get("/readyz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    problem_of(without_database.get("/readyz"), 503, "database_unavailable")


def test_health_tells_a_stranger_its_status_alone(stranger: TestClient, without_database: TestClient) -> None:
    response = stranger.get("/health")
    assert (response.status_code, response.json()) == (200, {"status": "healthy"})
    response = without_database.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "unhealthy"})


def test_health_tells_the_holder_of_the_token_what_it_rests_on(client: TestClient) -> None:
    found = client.get("/health").json()
    assert found.pop("generation").pop("latency_ms") >= 0
    assert found == {
        "status": "healthy",
        "database": {"reachable": True},
        "embedding": {"model": "local/all-MiniLM-L6-v2"},
        "jobs": {"pending": 0, "processing": 0, "workers": 0},
    }


@pytest.mark.parametrize("credential", ["", "Bearer", "Bearer no", f"Basic {TOKEN}"])
def test_health_refuses_a_credential_that_is_not_ours(stranger: TestClient, credential: str) -> None:
    response = stranger.get("/health", headers={"authorization": credential})
    problem_of(response, 401, "unauthenticated")
