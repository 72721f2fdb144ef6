"""What callers see when something that the service needs is away: a problem that says when to come back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
import structlog
from psycopg import sql
from pydantic import SecretStr
from starlette.testclient import TestClient

from rag.errors import BarrierDown, DatabaseUnavailable, SchemaMismatch
from rag.settings import Settings
from tests.api.running import Person, problem_of, running
from tests.conftest import Deployment
from tests.fakes import refusing_url
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai
from tests.rag.model_servers import ModelServer, model_server

REFUNDS = "# Refunds\n\nA refund takes five working days."
ASKED = "How long does a refund take?"
MISSING = "00000000-0000-4000-8000-000000000001"
# For what happens by itself within a second or two, on however slow a machine.
PATIENCE_S = 60.0


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    with fake_openai() as started:
        yield started


@pytest.fixture
def remote(settings: Settings, fake: FakeOpenAI) -> Settings:
    """Embeddings come from a server, which can fail; and nothing has to be loaded."""
    return settings.model_copy(
        update={
            "rag_embedding_provider": "openai",
            "openai_base_url": fake.base_url,
            "openai_api_key": SecretStr(fake.api_key),
            "rag_embedding_timeout_seconds": 1.5,
        }
    )


def counted(deployment: Deployment) -> int:
    with deployment.cluster.superuser(deployment.name) as connection:
        row = connection.execute(
            "select (select count(*) from rag.rag_documents) + (select count(*) from rag.rag_chunks)"
        ).fetchone()
    assert row is not None
    return int(row[0])


def someone(client: TestClient) -> Person:
    return Person(client=client, tenant_id="acme", user_id=7)


@contextmanager
def locked(deployment: Deployment) -> Iterator[Callable[[], None]]:
    """Nobody reads a document until the block ends; the yielded function returns once somebody waits."""
    waiters = "select pid from pg_locks join pg_database on oid = database where not granted and datname = %s"
    with (
        deployment.cluster.superuser("postgres") as watch,
        deployment.cluster.superuser(deployment.name) as holder,
        holder.transaction(),
    ):
        holder.execute("lock table rag.rag_documents in access exclusive mode")
        yield lambda: until(lambda: watch.execute(waiters, (deployment.name,)).fetchone() is not None)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def set_for_the_app(deployment: Deployment, name: str, value: str) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            sql.SQL("alter role rag_app in database {} set {} = {}").format(
                sql.Identifier(deployment.name), sql.Identifier(name), sql.Literal(value)
            )
        )


def admit_connections(deployment: Deployment, allowed: bool) -> None:
    """Let the database accept connections or not; when not, those that are there end."""
    with deployment.cluster.superuser("postgres") as connection:
        connection.execute(
            sql.SQL("alter database {} with allow_connections {}").format(
                sql.Identifier(deployment.name), sql.Literal(allowed)
            )
        )
        if not allowed:
            end_connections(connection, deployment)


def end_connections(connection: psycopg.Connection, deployment: Deployment) -> None:
    connection.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", (deployment.name,)
    )


# --- the database --------------------------------------------------------------------------------


def test_while_the_database_is_away_callers_are_asked_to_come_back_and_then_served(
    deployment: Deployment, remote: Settings
) -> None:
    with running(deployment, remote, pool_timeout_s=0.2) as client:
        mara = someone(client)
        document = mara.store("refunds.md", REFUNDS)
        admit_connections(deployment, False)
        try:
            for response in (
                mara.ask(ASKED),
                mara.ask(ASKED, generate=False),
                mara.ingest("refunds.md", "# Refunds\n\nNone."),
                mara.read(document),
                mara.delete(document),
                client.get("/readyz"),
            ):
                problem = problem_of(response, 503, "database_unavailable")
                assert deployment.name not in response.text
                assert problem["errors"] == []
            assert client.get("/livez").status_code == 200
        finally:
            admit_connections(deployment, True)
        until(lambda: client.get("/readyz").status_code == 200)
        assert mara.read(document).json()["body"] == REFUNDS


def test_connections_that_were_cut_are_replaced_and_nobody_notices(deployment: Deployment, remote: Settings) -> None:
    with running(deployment, remote) as client:
        mara = someone(client)
        document = mara.store("refunds.md", REFUNDS)
        with deployment.cluster.superuser("postgres") as connection:
            end_connections(connection, deployment)
        assert mara.read(document).status_code == 200
        assert mara.ingest("refunds.md", REFUNDS).json()["status"] == "unchanged"


def test_when_all_connections_are_busy_the_next_caller_is_told_to_come_back(
    deployment: Deployment, remote: Settings
) -> None:
    with running(deployment, remote, pool_size=1, pool_timeout_s=0.2) as client, ThreadPoolExecutor(1) as thread:
        mara = someone(client)
        document = mara.store("refunds.md", REFUNDS)
        with locked(deployment) as wait_for_a_waiter:
            first = thread.submit(mara.read, document)
            wait_for_a_waiter()
            problem_of(mara.read(document), 503, "database_unavailable")
            problem_of(client.get("/readyz"), 503, "database_unavailable")
        assert first.result().status_code == 200
        assert mara.read(document).status_code == 200


@pytest.mark.parametrize("limit", ["statement_timeout", "lock_timeout"])
def test_a_statement_beyond_its_time_is_a_timeout(deployment: Deployment, remote: Settings, limit: str) -> None:
    set_for_the_app(deployment, limit, "100ms")
    with running(deployment, remote, pool_size=1) as client:
        mara = someone(client)
        document = mara.store("refunds.md", REFUNDS)
        before = counted(deployment)
        with locked(deployment):
            for response in (
                mara.read(document),
                mara.delete(document),
                mara.ask(ASKED),
                mara.ingest("more.md", REFUNDS),
            ):
                problem = problem_of(response, 504, "database_timeout")
                assert problem["detail"] == "The database took longer than the statement may."
        assert counted(deployment) == before
        # The connection is as good as before.
        assert mara.read(document).status_code == 200


# --- embeddings ----------------------------------------------------------------------------------

FAULTS = [
    ("insufficient_quota", 503, "insufficient_quota"),
    ("reset", 503, "embedding_unavailable"),
    ("hang", 504, "embedding_timeout"),
    ("html", 502, "embedding_invalid"),
    ("zeros", 502, "embedding_invalid"),
    ("nan", 502, "embedding_invalid"),
    ("wrong_dimension", 502, "embedding_invalid"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
def test_without_embeddings_nothing_is_stored_and_questions_find_by_keyword(
    deployment: Deployment, remote: Settings, fake: FakeOpenAI, fault: str, status: int, code: str
) -> None:
    with running(deployment, remote) as client:
        mara = someone(client)
        document = mara.store("refunds.md", REFUNDS)
        before = counted(deployment)
        fake.fault = fault
        problem_of(mara.ingest("more.md", "# More\n\nAnother text."), status, code)
        problem_of(mara.ingest("refunds.md", "# Refunds\n\nAnother text."), status, code)
        assert counted(deployment) == before

        answer = mara.ask(ASKED).json()
        assert [one["source_id"] for one in answer["citations"]] == [f"{document}:0"]
        assert answer["degraded"] == ["the question could not be embedded, so only keywords were searched"]
        (hit,) = answer["hits"]
        assert (hit["keyword_rank"], hit["vector_rank"], hit["cosine"]) == (1, None, None)

        fake.fault = None
        assert mara.ingest("more.md", "# More\n\nAnother text.").status_code == 201


def test_a_document_of_another_model_is_found_by_keyword_and_the_answer_says_so(
    deployment: Deployment, remote: Settings
) -> None:
    with running(deployment, remote) as client:
        someone(client).store("refunds.md", REFUNDS)
    other = remote.model_copy(update={"rag_embedding_model": "text-embedding-3-large"})
    with running(deployment, other) as client:
        answer = someone(client).ask(ASKED, generate=False).json()
    assert [hit["document_name"] for hit in answer["hits"]] == ["Refunds"]
    assert answer["degraded"] == ["no document is embedded with the configured model, so only keywords were searched"]


# --- the chat model ------------------------------------------------------------------------------


def test_without_the_chosen_chat_model_there_are_still_hits(deployment: Deployment, remote: Settings) -> None:
    chosen = remote.model_copy(update={"rag_llm_provider": "ollama", "ollama_base_url": refusing_url()})
    with running(deployment, chosen) as client:
        mara = someone(client)
        mara.store("refunds.md", REFUNDS)
        problem_of(mara.ask(ASKED), 503, "model_unreachable")
        # Vectors of the fake say nothing of likeness.
        assert mara.ask(ASKED, generate=False, min_similarity=-1).json()["hits"][0]["document_name"] == "Refunds"


# --- starting up ---------------------------------------------------------------------------------


def start(deployment: Deployment, settings: Settings) -> None:
    with running(deployment, settings, pool_timeout_s=0.5):
        pass


def test_the_application_does_not_start_without_its_database(deployment: Deployment, remote: Settings) -> None:
    admit_connections(deployment, False)
    try:
        with pytest.raises(DatabaseUnavailable):
            start(deployment, remote)
    finally:
        admit_connections(deployment, True)


def test_the_application_does_not_start_where_row_security_is_off(deployment: Deployment, remote: Settings) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("alter table rag.rag_chunks no force row level security")
    with pytest.raises(BarrierDown, match="row security is not forced on rag_chunks"):
        start(deployment, remote)


def test_the_application_does_not_start_on_vectors_of_another_width(deployment: Deployment, remote: Settings) -> None:
    with pytest.raises(SchemaMismatch, match="RAG_EMBEDDING_DIMENSIONS is 768"):
        start(deployment, remote.model_copy(update={"rag_embedding_dimensions": 768}))


def test_with_strict_a_warning_is_a_refusal(
    deployment: Deployment, remote: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rag.database.PGVECTOR_FLOOR", (999, 0, 0))
    start(deployment, remote)
    with pytest.raises(BarrierDown, match=r"older than"):
        start(deployment, remote.model_copy(update={"rag_strict": True}))


# --- the model server ----------------------------------------------------------------------------

MODEL_FAULTS = [
    ("reset", 503, "model_unreachable"),
    ("bad_gateway", 503, "model_unreachable"),
    ("rate_limit", 503, "model_busy"),
    ("missing_model", 503, "model_unavailable"),
    ("slow", 504, "model_timeout"),
    ("crash", 502, "model_failed"),
    ("cut", 502, "model_incomplete"),
    ("empty", 502, "model_incomplete"),
    ("overflow", 502, "context_overflow"),
]


def written_by(server: ModelServer, remote: Settings) -> Settings:
    given = server.settings(rag_timeout_seconds=3.0)
    names = ("rag_llm_provider", "ollama_base_url", "rag_timeout_seconds")
    return remote.model_copy(update={name: getattr(given, name) for name in names})


def test_a_model_server_in_trouble_is_a_problem_that_says_what_and_a_search_goes_on(
    deployment: Deployment, remote: Settings
) -> None:
    with (
        model_server("ollama", answer=lambda messages: "Five days.") as server,
        running(deployment, written_by(server, remote)) as client,
    ):
        mara = someone(client)
        mara.store("refunds.md", REFUNDS)
        for fault, status, code in MODEL_FAULTS:
            server.fails(None)
            assert mara.ask(ASKED, min_similarity=-1).status_code == 200
            server.fails(fault)
            response = mara.ask(ASKED, min_similarity=-1)
            problem_of(response, status, code)
            assert ("retry-after" in response.headers) == (status == 503)
            assert mara.ask(ASKED, generate=False).status_code == 200


def test_the_service_looks_at_its_models_when_it_starts(deployment: Deployment, remote: Settings) -> None:
    with model_server("ollama", context_length=2048) as server:
        settings = written_by(server, remote)
        with structlog.testing.capture_logs() as entries, running(deployment, settings):
            pass
    (warning,) = [entry for entry in entries if entry["event"] == "model_window_corrected"]
    assert (warning["model"], warning["actual_tokens"]) == ("llama3.2", 2048)
    # And starts without them.
    with running(deployment, settings) as client:
        assert client.get("/readyz").status_code == 200
