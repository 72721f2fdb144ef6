"""What specs 000 and 001 say of answers over HTTP: one body for all doors, messages that are fixed, silent logs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator

import pytest
import structlog
from starlette.testclient import TestClient

from rag import screen
from rag.answer import RAGService
from rag.exchange import RAGRequest
from rag.principal import Principal
from rag.settings import Settings
from tests.api.running import Person, database_of, problem_of, running
from tests.conftest import SIGNER, Deployment
from tests.rag.model_servers import ModelServer, model_server

# Longer than a full snippet, each part of it recognisable.
REFUNDS = "# Refunds\n\nA refund takes five working days. " + " ".join(f"Zanzibar{number}" for number in range(150))
ASKED = "How long does a refund take, says quokka?"


def test_the_command_prints_what_the_service_sends(site: Deployment, mara: Person, settings: Settings) -> None:
    """Under the same names, but for the passages: over HTTP they are `hits`, without what only the database needs."""
    mara.store("refunds.md", REFUNDS)
    sent = mara.ask(ASKED).json()

    async def printed() -> str:
        async with database_of(site) as database, RAGService(settings, database) as service:
            principal = Principal(tenant_id=mara.tenant_id or "", user_id=7)
            return screen.as_json(await service.generate(RAGRequest(query=ASKED), principal=principal))

    answer = json.loads(asyncio.run(printed()))
    assert sent.keys() - {"hits"} == answer.keys() - {"passages"}
    for name in sent.keys() - {"hits", "query_id", "generation_time_ms", "confidence_metrics"}:
        assert sent[name] == answer[name], name
    assert sent["confidence_metrics"].keys() == answer["confidence_metrics"].keys()
    for hit, passage in zip(sent["hits"], answer["passages"], strict=True):
        source_id = f"{passage['document_id']}:{passage['chunk_index']}"
        assert hit == {"source_id": source_id} | {name: passage[name] for name in hit if name != "source_id"}


# --- spec 000, "Error Responses" -----------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server("ollama", answer=lambda messages: "Five days.") as started:
        yield started


@pytest.fixture
def written(site: Deployment, server: ModelServer) -> Iterator[TestClient]:
    """A service that a model server writes the answers of."""
    with running(site, server.settings(rag_timeout_seconds=3.0)) as started:
        yield started


def test_the_messages_of_the_specification(written: TestClient, server: ModelServer, tenant: str) -> None:
    mara = Person(client=written, tenant_id=tenant, user_id=7)
    nothing = mara.ask(ASKED)
    assert nothing.status_code == 200
    assert nothing.json()["answer"].startswith("I don't have enough information in the available documents")
    assert (nothing.json()["action"], nothing.json()["confidence"]["overall"]) == ("ROUTE", 0)
    mara.store("refunds.md", REFUNDS)
    problem = problem_of(mara.ask(ASKED, model="gpt-9"), 400, "model_not_allowed")
    assert problem["title"] == "Requested model not available"
    server.fails("slow")
    problem = problem_of(mara.ask(ASKED), 504, "model_timeout")
    assert problem["detail"] == "Response generation timed out. Please try again."
    server.fails("reset")
    problem = problem_of(mara.ask(ASKED), 503, "model_unreachable")
    assert problem["detail"] == "AI service temporarily unavailable."


# --- spec 001, "Snippet Rules" -------------------------------------------------------------------


def test_no_log_has_a_word_of_a_document_a_question_or_an_answer(
    written: TestClient,
    server: ModelServer,
    site: Deployment,
    tenant: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mara = Person(client=written, tenant_id=tenant, user_id=7)
    caplog.set_level(logging.DEBUG)
    with structlog.testing.capture_logs() as events:
        mara.store("refunds.md", REFUNDS)
        # Answered, with a mark that is refused; and failed in several ways.
        server.fake.answer = lambda messages: "Five days, says wombat [S1-ffffff]."
        assert mara.ask(ASKED).json()["answer"] == "Five days, says wombat."
        for fault in ("reset", "cut", "error_line", "empty", "overflow", "crash"):
            server.fails(fault)
            assert mara.ask(ASKED).status_code >= 500
    assert [event for event in events if event["event"] == "citations_refused"]
    assert [event for event in events if event["event"] == "request_failed"]
    with site.cluster.superuser(site.name) as connection:
        stored = connection.execute(
            "select log::text from rag.rag_query_logs as log where tenant_id = %s"
            " union all select hit::text from rag.rag_query_log_chunks as hit where tenant_id = %s",
            (tenant, tenant),
        ).fetchall()
    assert stored
    out, err = capfd.readouterr()
    said = "\n".join([str(events), caplog.text, out, err, str(stored)])
    for word in ("Zanzibar", "five working days", "quokka", "wombat", SIGNER.secret.hex()):
        assert word not in said, word
