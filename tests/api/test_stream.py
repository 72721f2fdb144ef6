"""POST /rag/query with `stream`: what a reader is told and when, and that nothing broken looks whole."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import structlog
import uvicorn
from starlette.testclient import TestClient

import api.tell
from api.app import create_app
from api.identity import loopback_door
from rag.settings import Settings
from tests.api.running import TOKEN, Person, database_of, fields_of, problem_of, running
from tests.conftest import Deployment
from tests.fakes import Exchange
from tests.fakes.chat import FAULTS
from tests.rag.model_servers import ModelServer, model_server

REFUNDS = "# Refunds\n\nA refund takes five working days to reach the customer."
ASKED = "How long does a refund take?"
# For what happens at once, on however slow a machine.
PATIENCE_S = 20.0
LABEL = "[S1-"


@dataclass(frozen=True)
class Told:
    name: str
    data: dict[str, Any]


def told_in(text: str) -> list[Told]:
    """The events of a whole stream."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line and not line.startswith(":")]
        if lines:
            name, data = lines
            found.append(Told(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def names(told: list[Told]) -> list[str]:
    """The names, each once where it is repeated."""
    return [one.name for at, one in enumerate(told) if at == 0 or told[at - 1].name != one.name]


def text_of(told: list[Told]) -> str:
    return "".join(one.data["text"] for one in told if one.name == "token")


def the(told: list[Told], name: str) -> dict[str, Any]:
    (found,) = (one.data for one in told if one.name == name)
    return found


def cites(messages: list[dict[str, str]]) -> str:
    """An answer from the first source of the prompt."""
    user = messages[-1]["content"]
    at = user.find(LABEL)
    return f"A refund takes five working days {user[at : at + 11]}." if at >= 0 else "A refund takes a while."


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with model_server("ollama", answer=cites) as started:
        yield started


@pytest.fixture
def site_of_model(settings: Settings, server: ModelServer) -> Settings:
    """Settings under which this server writes the answers."""
    changes = {"rag_llm_provider": "ollama", "ollama_base_url": server.fake.base_url, "chat_model": "llama3.2"}
    return settings.model_copy(update=changes | {"rag_timeout_seconds": 2, "rag_llm_concurrency": 4})


@pytest.fixture
def asker(site: Deployment, site_of_model: Settings, tenant: str) -> Iterator[Person]:
    """Somebody whose answers the server writes, who has a document about refunds."""
    with running(site, site_of_model) as client:
        person = Person(client=client, tenant_id=tenant, user_id=7)
        person.store("refunds.md", REFUNDS)
        yield person


# --- what is told --------------------------------------------------------------------------------


def test_sources_come_first_then_the_text_then_what_it_rests_on(mara: Person) -> None:
    refunds = mara.store("refunds.md", REFUNDS)
    whole = mara.ask(ASKED).json()
    response = mara.ask(ASKED, stream=True)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert len(response.headers["x-request-id"]) == 36

    told = told_in(response.text)
    assert names(told) == ["sources", "token", "citations", "confidence", "action", "done"]
    assert [one["source_id"] for one in told[0].data["sources"]] == [f"{refunds}:0"]
    done = the(told, "done")
    assert text_of(told) == done["answer"] == whole["answer"]
    assert the(told, "citations")["citations"] == done["citations"] == whole["citations"]
    assert the(told, "confidence") == done["confidence"] == whole["confidence"]
    assert the(told, "action") == {"action": "CITE", "grounded": True}
    assert told[0].data["query_id"] == done["query_id"]
    assert set(done) == set(whole)


def test_without_a_source_the_refusal_is_told_and_whom_to_ask(mara: Person) -> None:
    told = told_in(mara.ask(ASKED, stream=True).text)
    assert names(told) == ["sources", "token", "citations", "confidence", "action", "route", "done"]
    assert told[0].data["sources"] == []
    assert the(told, "action")["action"] == "ROUTE"
    assert the(told, "route") == the(told, "done")["route_to"]


def test_a_model_is_read_along_and_its_labels_are_never_seen(asker: Person, server: ModelServer) -> None:
    told = told_in(asker.ask(ASKED, stream=True).text)
    done = the(told, "done")
    assert text_of(told) == done["answer"]
    assert done["model_used"] == "llama3.2"
    assert len([one for one in told if one.name == "token"]) > 3
    assert all(LABEL not in one.data["text"] for one in told if one.name == "token")
    assert done["grounded"]


def test_a_source_that_is_deleted_meanwhile_is_retracted(asker: Person, server: ModelServer) -> None:
    document = asker.store("more.md", "# Refunds of shoes\n\nA refund of shoes takes nine working days.")

    def deletes(messages: list[dict[str, str]]) -> str:
        user = messages[-1]["content"]
        labels = [
            user[at : at + 11] for at in range(len(user)) if user.startswith(LABEL[:2], at) and user[at + 2].isdigit()
        ]
        assert asker.delete(document).status_code in (204, 404)
        return "It takes days " + " ".join(dict.fromkeys(labels))

    server.fake.answer = deletes
    told = told_in(asker.ask("How long does a refund of shoes take?", stream=True).text)
    retracted, done = the(told, "retracted"), the(told, "done")
    assert f"[SourceId: {document}:0]" in text_of(told)
    assert retracted["text"] == done["answer"]
    assert document not in done["answer"]
    assert retracted["reason"] in done["degraded"]
    assert names(told)[:4] == ["sources", "token", "retracted", "citations"]


# --- what is refused before anything is told -----------------------------------------------------


def test_passages_alone_are_not_streamed(mara: Person) -> None:
    problem = problem_of(mara.ask(ASKED, stream=True, generate=False), 422, "invalid_input")
    assert fields_of(problem) == ["stream"]


def test_what_fails_before_the_first_event_has_its_own_status(asker: Person) -> None:
    problem_of(asker.ask(ASKED, stream=True, model="gpt-9"), 400, "model_not_allowed")
    problem_of(asker.ask(" ", stream=True), 422, "invalid_input")
    response = asker.client.post(
        "/rag/query", json={"query": ASKED, "stream": True}, headers={"Authorization": "Bearer wrong"}
    )
    problem_of(response, 401, "unauthenticated")


# --- what goes wrong in the middle ---------------------------------------------------------------


def test_every_fault_of_a_model_ends_in_one_error_and_never_looks_whole(
    asker: Person, server: ModelServer, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    trials = scaled(test=1, ci=1, prove=20)
    short = ("error_line", "cut", "no_done", "odd_end", "invalid_utf8", "half_surrogate", "no_json", "empty", "crash")
    modes = short if trials == 1 else FAULTS
    codes = set()
    for mode in modes:
        for _ in range(trials):
            server.fails(mode)
            response = asker.ask(ASKED, stream=True)
            if response.status_code != 200:
                # The breaker is open by now, or the queue full: said before anything is told.
                assert response.json()["status"] == response.status_code >= 500
                codes.add(response.json()["code"])
                continue
            told = told_in(response.text)
            assert told[-1].name == "error", mode
            assert [one.name for one in told].count("error") == 1
            assert not {"done", "citations", "action"} & {one.name for one in told}
            error = told[-1].data
            assert error["status"] >= 500
            assert error["request_id"] == response.headers["x-request-id"]
            assert error["type"] == f"urn:palisade:problem:{error['code']}"
            assert (error["status"] == 503) == ("retry_after" in error)
            codes.add(error["code"])
    figure(f"{len(modes)} faults × {trials} in streams: each ended in one error, 0 looked whole, {len(codes)} codes")


# --- over a real connection ----------------------------------------------------------------------


class Line:
    """A connection that has asked for a stream."""

    def __init__(self, port: int, person: Person, *, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        body = json.dumps({"query": ASKED, "stream": True} | person.identity).encode()
        head = (
            f"POST /rag/query HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)
        self.read = b""

    def until(self, mark: bytes) -> bytes:
        """All that was read, once the mark is in it."""
        while mark not in self.read:
            part = self.socket.recv(65536)
            assert part, self.read[-2000:]
            self.read += part
        return self.read


@contextmanager
def listening(site: Deployment, settings: Settings, **pools: Any) -> Iterator[int]:
    """The application under uvicorn, on a port."""
    app = create_app(settings, database=database_of(site, **pools), door=loopback_door(TOKEN))
    with socket.socket() as reserved:
        # What is not read stays with us, and does not vanish into the kernel.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        reserved.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [reserved]}, daemon=True)
        thread.start()
        end = time.monotonic() + PATIENCE_S
        while not server.started:
            assert time.monotonic() < end
            time.sleep(0.01)
        try:
            yield int(reserved.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(PATIENCE_S)


def speaking(server: ModelServer, chat: Callable[[Exchange], None]) -> None:
    """Write answers byte by byte; what is asked for a grade is answered as ever."""
    server.plays(lambda exchange: server.fake.serve(exchange) if exchange.body.get("format") else chat(exchange))


def until(happened: Callable[[], bool]) -> float:
    """The seconds until it happened."""
    started = time.monotonic()
    while not happened():
        assert time.monotonic() < started + PATIENCE_S
        time.sleep(0.01)
    return time.monotonic() - started


@pytest.fixture
def with_refunds(client: TestClient, tenant: str) -> Person:
    person = Person(client=client, tenant_id=tenant, user_id=7)
    person.store("refunds.md", REFUNDS)
    return person


def logged(site: Deployment, tenant: str) -> int:
    with site.cluster.superuser(site.name) as connection:
        row = connection.execute("select count(*) from rag.rag_query_logs where tenant_id = %s", (tenant,)).fetchone()
    assert row is not None
    return int(row[0])


def test_sources_are_there_before_the_model_has_said_a_word_and_heartbeats_meanwhile(
    site: Deployment,
    site_of_model: Settings,
    server: ModelServer,
    with_refunds: Person,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api.tell, "HEARTBEAT_S", 0.05)
    seen = threading.Event()

    def thinks(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        assert seen.wait(PATIENCE_S)
        exchange.stream(server.dialect.token("Five days.") + server.dialect.end("stop"))
        exchange.end_stream()

    speaking(server, thinks)
    with listening(site, site_of_model) as port:
        line = Line(port, with_refunds)
        assert b"event: token" not in line.until(b": ping\n\n")
        assert b"event: sources" in line.read
        seen.set()
        line.until(b"event: done")
        line.socket.close()


def test_a_reader_who_hangs_up_stops_the_model_and_what_was_read_is_in_the_log(
    site: Deployment, site_of_model: Settings, server: ModelServer, with_refunds: Person, tenant: str
) -> None:
    def endless(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        exchange.drip(server.dialect.token(" and on"))

    speaking(server, endless)
    with listening(site, site_of_model.model_copy(update={"rag_timeout_seconds": 60})) as port:
        before = logged(site, tenant)
        with structlog.testing.capture_logs() as entries:
            line = Line(port, with_refunds)
            line.until(b"event: token")
            line.socket.close()
            assert server.fake.server.hung_up.wait(PATIENCE_S)
            until(lambda: any(entry.get("ended") for entry in entries))
        (entry,) = (entry for entry in entries if entry["event"] == "request")
        assert (entry["ended"], entry["status"], entry["route"]) == ("hung_up", 200, "/rag/query")
        until(lambda: logged(site, tenant) == before + 1)


def test_a_reader_who_does_not_read_holds_no_place_and_no_connection(
    site: Deployment, site_of_model: Settings, server: ModelServer, with_refunds: Person
) -> None:
    word = "word " * 200

    def long(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=server.dialect.media_type)
        # More than the sockets between take, and what the server keeps for them.
        for _ in range(200):
            exchange.stream(server.dialect.token(word))
        exchange.stream(server.dialect.end("stop"))
        exchange.end_stream()

    speaking(server, long)
    settings = site_of_model.model_copy(update={"rag_llm_concurrency": 1, "rag_timeout_seconds": 60})
    with listening(site, settings, pool_size=1) as port:
        sleepy = Line(port, with_refunds, receive_buffer=4096)
        sleepy.until(b"event: sources")
        awake = Line(port, with_refunds)
        awake.until(b"event: done")
        awake.socket.close()
        # And it loses nothing by it.
        assert b"event: done" not in sleepy.read
        assert sleepy.until(b"event: done").count(b"event: token") >= 200
        sleepy.socket.close()
