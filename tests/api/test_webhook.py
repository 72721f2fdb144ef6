"""POST /rag/webhooks/github: what is forged does nothing, what is genuine does it once, and no body takes memory."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import hmac
import http.client
import json
import os
import re
import socket
import subprocess
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import pytest
import structlog
from httpx2 import Response
from starlette.testclient import TestClient

import api.webhook
from api.app import create_app
from api.identity import loopback_door
from api.webhook import IN_MEMORY_BYTES, LARGE_AT_ONCE, load_secrets
from rag.errors import InvalidInput
from rag.settings import Settings
from tests.api.pushing import (
    OLD_SECRET,
    ORGANISATION_SECRET,
    OTHER_SECRET,
    PATH,
    SECRET,
    SECRETS,
    bearer,
    configured,
    headers,
    pushed,
    signature,
    token,
)
from tests.api.running import TOKEN, nowhere, problem_of, running
from tests.api.test_serve import Server, serving
from tests.conftest import Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import job_rows, queued, until_empty, worker_environment
from tests.rag.test_gather import commit, git, write

MIB = 1024 * 1024
Sent = tuple[bytes, list[tuple[str, str]]]


class Site:
    """A service with a webhook, the folder of its files, and what a superuser sees of its jobs."""

    def __init__(self, client: TestClient, folder: Path, deployment: Deployment) -> None:
        self.client = client
        self.folder = folder
        self.deployment = deployment

    def post(self, body: bytes, sent: dict[str, str] | list[tuple[str, str]] | None = None) -> Response:
        given = headers(body) if sent is None else sent
        pairs = list(given.items()) if isinstance(given, dict) else given
        return self.client.post(
            PATH, content=body, headers=[(name.encode(), value.encode("latin-1")) for name, value in pairs]
        )

    def jobs(self) -> list[tuple[str, int, str, str]]:
        """Of which tenant and user, which source, and how it is, of what was asked for."""
        return [
            (row["tenant_id"], row["user_id"], row["source_id"], row["status"]) for row in job_rows(self.deployment)
        ]

    def clear(self) -> None:
        with psycopg.connect(self.deployment.url("postgres")) as superuser:
            superuser.execute("delete from rag.rag_jobs")
            superuser.execute("delete from jobs.procrastinate_jobs")


@pytest.fixture(scope="module")
def place(
    new_deployment: Callable[[], Any], settings: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("webhook")
    used = settings.model_copy(update=configured(folder))
    with (
        pytest.MonkeyPatch.context() as patched,
        new_deployment() as deployment,
        running(deployment, used) as client,
    ):
        # However busy the machine is; the deadline has a test of its own, with the real server.
        patched.setattr(api.webhook, "QUEUED_WITHIN_S", 60.0)
        del client.headers["authorization"]
        yield Site(client, folder, deployment)


@pytest.fixture
def hook(place: Site) -> Site:
    """The same for every test, without jobs."""
    configured(place.folder)
    place.clear()
    return place


def accepted(response: Response, status: int, answer: str) -> None:
    assert (response.status_code, response.json()) == (status, {"status": answer}), response.text


# --- whether there is one -------------------------------------------------------------------------


def test_without_secrets_there_is_no_webhook(client: TestClient) -> None:
    body = pushed()
    problem_of(client.post(PATH, content=body, headers=headers(body)), 404, "not_found")
    assert PATH not in client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"secrets": ""}, "names no repository"),
        ({"secrets": "- a list"}, "names no repository"),
        ({"secrets": "acme/handbook: short"}, "no text of 32 bytes"),
        ({"secrets": f"acme/handbook: ['', {SECRET}]"}, "no text of 32 bytes"),
        ({"secrets": "acme/handbook:"}, "no text of 32 bytes"),
        ({"secrets": "acme/handbook: []"}, "has no secret for acme/handbook"),
        ({"secrets": f"acme/handbook: {'1' * 40}"}, "no text of 32 bytes"),
        ({"secrets": f"'acme/*': {SECRET}"}, "neither owner/name nor owner"),
        ({"secrets": f"https://github.com/acme/handbook: {SECRET}"}, "neither owner/name nor owner"),
        ({"secrets": f"acme/handbook: [{', '.join([SECRET] * 101)}]"}, "more than 100 secrets"),
        ({"secrets": "a: [" + SECRET}, "cannot be read"),
        ({"sources": "- {name: a}"}, "RAG_SOURCES: source 1"),
        ({"sources": "- {name: a, github: acme/handbook}"}, "must name its tenant"),
        ({"sources": "- {name: a, github: acme/handbook, tenant: acme}"}, "source a: scope user needs a user"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value,
)
def test_a_service_does_not_start_with_files_that_cannot_be_used(
    settings: Settings, tmp_path: Path, changed: dict[str, str], said: str
) -> None:
    used = settings.model_copy(update=configured(tmp_path, **changed))
    with pytest.raises(InvalidInput, match=said) as refused:
        create_app(used, database=nowhere(), door=loopback_door(TOKEN))
    assert SECRET not in str(refused.value)
    assert SECRET not in str(refused.value.__cause__)


def test_secrets_need_sources(settings: Settings, tmp_path: Path) -> None:
    used = settings.model_copy(update=configured(tmp_path) | {"rag_sources": None})
    with pytest.raises(InvalidInput, match="RAG_SOURCES"):
        create_app(used, database=nowhere(), door=loopback_door(TOKEN))
    missing = settings.model_copy(update=configured(tmp_path) | {"rag_webhook_secrets": tmp_path / "none"})
    with pytest.raises(InvalidInput, match="cannot be read"):
        create_app(missing, database=nowhere(), door=loopback_door(TOKEN))


def test_it_is_described(hook: Site) -> None:
    described = hook.client.get("/openapi.json").json()["paths"][PATH]["post"]
    assert set(described["responses"]) == {"202", *map(str, api.webhook.PROBLEM_CODES)}
    assert "security" not in described
    problem_of(hook.client.get(PATH), 405, "method_not_allowed")


# --- what is genuine ------------------------------------------------------------------------------


def test_a_push_is_a_job_of_each_source_that_it_concerns_and_of_its_owner(hook: Site) -> None:
    accepted(hook.post(pushed("guide.md")), 202, "queued")
    assert hook.jobs() == [("acme", 7, "handbook", "pending")]
    hook.clear()
    accepted(hook.post(pushed("notices/pier.md")), 202, "queued")
    assert hook.jobs() == [("acme", 7, "handbook", "pending"), ("globex", 0, "notices", "pending")]


def test_whose_a_source_becomes_is_never_said_by_the_payload(hook: Site) -> None:
    claimed: dict[str, Any] = {
        **{"tenant": "globex", "tenant_id": "globex", "user": 1, "user_id": 1, "project": "x", "scope": "public"},
        **{"source": "other", "name": "other", "sources": ["other"], "git": "https://evil.example/x.git"},
    }
    accepted(hook.post(pushed("guide.md", **claimed)), 202, "queued")
    assert hook.jobs() == [("acme", 7, "handbook", "pending")]
    (job,) = job_rows(hook.deployment)
    assert job["payload"] == {"source": "handbook"}
    assert job["body"] is None


def test_a_token_is_as_good_as_a_signature(hook: Site) -> None:
    body = json.dumps({"ref": "refs/heads/main", "repository": {"full_name": "acme/handbook"}}).encode()
    given = token(body)
    accepted(hook.post(body, bearer(body, given)), 202, "queued")
    accepted(hook.post(body, bearer(body, given)), 200, "duplicate")
    # The same commits pushed again: another token, and another effect.
    accepted(hook.post(body, bearer(body, token(body, jti="2"))), 202, "queued")


def test_the_token_of_the_documented_workflow_is_accepted(hook: Site, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "webhook.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```sh\n(url64.*?)```", page, re.DOTALL)
    body = pushed("guide.md")
    (tmp_path / "event.json").write_bytes(body)
    environment = {"PATH": os.environ["PATH"], "SECRET": SECRET, "GITHUB_EVENT_PATH": str(tmp_path / "event.json")}
    said = subprocess.run(
        ["sh", "-eu", "-c", script.partition("curl")[0] + 'printf %s "$token"'],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    accepted(hook.post(body, bearer(body, said.stdout)), 202, "queued")


def test_a_token_spelled_otherwise_is_the_same_delivery(hook: Site) -> None:
    body = pushed("guide.md")
    given = token(body)
    accepted(hook.post(body, bearer(body, given)), 202, "queued")
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    # The last character holds two bits that say nothing.
    twin = given[:-1] + alphabet[alphabet.index(given[-1]) ^ 1]
    assert base64.urlsafe_b64decode(twin.rpartition(".")[2] + "=") == base64.urlsafe_b64decode(
        given.rpartition(".")[2] + "="
    )
    assert hook.post(body, bearer(body, twin)).status_code in (200, 401)
    assert len(hook.jobs()) == 1


def test_one_secret_may_be_of_all_repositories_of_an_owner(hook: Site) -> None:
    (hook.folder / "sources.yaml").write_text("- {name: a, github: Initech/Manual, tenant: initech, user: 3}\n")
    body = pushed("a.md", repository="Initech/Manual")
    accepted(hook.post(body, headers(body, ORGANISATION_SECRET)), 202, "queued")
    assert hook.jobs() == [("initech", 3, "a", "pending")]
    body = pushed("a.md", repository="initech-evil/manual")
    problem_of(hook.post(body, headers(body, ORGANISATION_SECRET)), 401, "unauthenticated")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(pushed("guide.md", ref="refs/heads/feature"), id="another branch"),
        pytest.param(pushed("guide.md", ref="refs/tags/v1"), id="a tag"),
        pytest.param(pushed("guide.md", ref="main"), id="a ref that is none"),
        pytest.param(pushed("drafts/guide.md"), id="a path that does not count"),
        pytest.param(pushed("src/main.c", "../../etc/passwd"), id="no document"),
        pytest.param(pushed(deleted=True), id="a branch that is gone"),
        pytest.param(pushed("a.md", ref="refs/heads/\u202e\u0000\U0001f600"), id="a name that is none"),
    ],
)
def test_what_concerns_no_source_is_ignored(hook: Site, body: bytes) -> None:
    answer = hook.post(body)
    assert answer.status_code == 202
    assert answer.json()["status"] == ("queued" if b'"main"' in body and b'"ref": "main"' in body else "ignored")


def test_a_repository_without_a_source_is_ignored(hook: Site) -> None:
    body = pushed("a.md", repository="initech/other")
    accepted(hook.post(body, headers(body, ORGANISATION_SECRET)), 202, "ignored")
    assert hook.jobs() == []


@pytest.mark.parametrize(
    "more",
    [{"forced": True}, {"commits": []}, {"commits": [{"id": "1"}]}, {"commits": [{"id": "1", "added": []}] * 3}],
    ids=["forced", "no commits", "no paths", "some paths"],
)
def test_a_push_that_does_not_say_all_that_it_touches_may_touch_anything(hook: Site, more: dict[str, Any]) -> None:
    accepted(hook.post(pushed("drafts/a.md", **more)), 202, "queued")


def test_a_ping_is_answered_and_other_events_are_ignored(hook: Site) -> None:
    body = b'{"zen": "Design for failure.", "hook_id": 1}'
    accepted(hook.post(body, headers(body, X_GitHub_Event="ping")), 200, "pong")
    for event in ("issues", "pull_request", "workflow_run", "create"):
        accepted(hook.post(pushed("guide.md"), headers(pushed("guide.md"), X_GitHub_Event=event)), 202, "ignored")
    assert hook.jobs() == []


def test_forms_and_compressed_bodies_are_refused_by_name(hook: Site) -> None:
    body = b"payload=" + urllib.parse.quote(pushed()).encode()
    sent = headers(body, Content_Type="application/x-www-form-urlencoded")
    assert "application/json" in problem_of(hook.post(body, sent), 415, "unsupported_media_type")["detail"]
    packed = gzip.compress(pushed())
    problem_of(hook.post(packed, headers(packed, Content_Encoding="gzip")), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"{}",
        b'{"ref": 1, "repository": {"full_name": "acme/handbook"}}',
        b'{"ref": "refs/heads/main"}',
        b'{"ref": "refs/heads/main", "repository": "acme/handbook"}',
        b'{"ref": "refs/heads/main", "repository": {"full_name": null}}',
        b'{"ref": "refs/heads/main", "repository": {"full_name": "acme/handbook"}, "commits": "many"}',
        b'{"ref": "refs/heads/main", "repository": {"full_name": "acme/handbook"}, "deleted": "no"}',
        b'{"ref": "refs/heads/\xff", "repository": {"full_name": "acme/handbook"}}',
        b'{"ref": "refs/heads/\\ud800", "repository": {"full_name": "acme/handbook"}}',
        b'{"ref": NaN}',
        b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
        b"[" * 1_000_000,
        pushed().decode().encode("utf-16"),
        b'{"ref": "refs/heads/main", "repository": {"full_name": "acme/handbook"}} {}',
    ],
    ids=lambda body: f"{body[:40]!r} {len(body)}",
)
def test_what_is_signed_and_no_push_is_malformed(hook: Site, body: bytes) -> None:
    problem = problem_of(hook.post(body), 400, "bad_request")
    assert problem["detail"] == "The body is not the JSON of a push event"
    assert hook.jobs() == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("X-GitHub-Event", []),
        ("X-GitHub-Event", ["push", "push"]),
        ("X-GitHub-Event", ["PUSH"]),
        ("X-GitHub-Event", ["push\xe9"]),
        ("X-GitHub-Event", ["x" * 65]),
        ("X-GitHub-Delivery", []),
        ("X-GitHub-Delivery", [""]),
        ("X-GitHub-Delivery", ["a", "b"]),
        ("X-GitHub-Delivery", ["../../etc/passwd"]),
        ("X-GitHub-Delivery", ["x" * 10_000]),
    ],
)
def test_the_headers_are_githubs(hook: Site, name: str, values: list[str]) -> None:
    body = pushed("guide.md")
    sent = [pair for pair in headers(body).items() if pair[0] != name] + [(name, value) for value in values]
    assert name.lower() in problem_of(hook.post(body, sent), 400, "bad_request")["detail"]
    assert hook.jobs() == []


def test_a_full_queue_says_when_to_come_back(deployment: Deployment, settings: Settings, tmp_path: Path) -> None:
    used = settings.model_copy(update=configured(tmp_path) | {"rag_queue_max_size": 1})
    sources = (
        "- {name: a, github: acme/handbook, tenant: acme, user: 7}\n"
        "- {name: b, github: acme/handbook, tenant: acme, user: 8}\n"
    )
    (tmp_path / "sources.yaml").write_text(sources)
    with running(deployment, used) as client:
        del client.headers["authorization"]
        answer = Site(client, tmp_path, deployment).post(pushed("a.md"))
        problem_of(answer, 429, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1


# --- what is forged -------------------------------------------------------------------------------


def altered(body: bytes, random: Random) -> bytes:
    """The body with one byte that is another."""
    place = random.randrange(len(body))
    return body[:place] + bytes([body[place] ^ random.randrange(1, 256)]) + body[place + 1 :]


def signed(body: bytes, value: str | None, *more: tuple[str, str]) -> Sent:
    sent = [*headers(body, None).items(), *more]
    return body, sent if value is None else [*sent, ("X-Hub-Signature-256", value)]


def with_token(body: bytes, given: str) -> Sent:
    return body, list(bearer(body, given).items())


def unsigned_token(body: bytes, algorithm: str) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    now = int(time.time())
    claims = {"iat": now, "exp": now + 300, "body_sha256": hashlib.sha256(body).hexdigest()}
    return f"{part({'alg': algorithm, 'typ': 'JWT'})}.{part(claims)}."


def tampered(given: str, random: Random) -> str:
    """A token of which another word is said in the middle."""
    head, middle, end = given.split(".")
    claims = json.loads(base64.urlsafe_b64decode(middle + "=" * (-len(middle) % 4)))
    claims["exp"] += random.randrange(1, 300)
    return f"{head}.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.{end}"


def resign(body: bytes) -> bytes:
    """The same JSON, written another way."""
    return json.dumps(json.loads(body), indent=1, sort_keys=True).encode()


NOW = int(time.time())
Forger = Callable[[bytes, Random], Sent]
FORGERIES: dict[str, Forger] = {
    "no signature": lambda body, _: signed(body, None),
    "an empty signature": lambda body, _: signed(body, ""),
    "the scheme alone": lambda body, _: signed(body, "sha256="),
    "no scheme": lambda body, _: signed(body, signature(body)[7:]),
    "sha1": lambda body, _: signed(body, "sha1=" + hmac.new(SECRET.encode(), body, "sha1").hexdigest()),
    "sha1 in its own header": lambda body, _: signed(
        body, None, ("X-Hub-Signature", "sha1=" + hmac.new(SECRET.encode(), body, "sha1").hexdigest())
    ),
    "sha256 called sha1": lambda body, _: signed(body, signature(body).replace("sha256", "sha1")),
    "sha512": lambda body, _: signed(body, "sha512=" + hmac.new(SECRET.encode(), body, "sha512").hexdigest()),
    "truncated": lambda body, random: signed(body, signature(body)[: random.randrange(8, 71)]),
    "longer": lambda body, random: signed(body, signature(body) + random.choice("0a")),
    "upper case": lambda body, _: signed(body, "sha256=" + signature(body)[7:].upper() + ""),
    "the scheme in upper case": lambda body, _: signed(body, signature(body).replace("sha256", "SHA256")),
    "space within": lambda body, _: signed(body, signature(body).replace("=", "= ")),
    "no ASCII": lambda body, _: signed(body, "sha256=" + "\xe9" * 64),
    "digits of another script": lambda body, _: signed(body, "sha256=" + "\xb2" * 64),
    "one digit is another": lambda body, random: signed(
        body, (lambda s, n: s[:n] + f"{int(s[n], 16) ^ 1:x}" + s[n + 1 :])(signature(body), random.randrange(7, 71))
    ),
    "zeros": lambda body, _: signed(body, "sha256=" + "0" * 64),
    "at random": lambda body, random: signed(body, f"sha256={random.getrandbits(256):064x}"),
    "the digest without a key": lambda body, _: signed(body, "sha256=" + hashlib.sha256(body).hexdigest()),
    "key and body in a row": lambda body, _: signed(
        body, "sha256=" + hashlib.sha256(SECRET.encode() + body).hexdigest()
    ),
    "an empty secret": lambda body, _: signed(body, signature(body, "")),
    "the secret with a line feed": lambda body, _: signed(body, signature(body, SECRET + "\n")),
    "the secret of another repository": lambda body, _: signed(body, signature(body, OTHER_SECRET)),
    "the secret of another organisation": lambda body, _: signed(body, signature(body, ORGANISATION_SECRET)),
    "the name of the repository as secret": lambda body, _: signed(body, signature(body, "acme/handbook")),
    "one byte of the body is another": lambda body, random: signed(altered(body, random), signature(body)),
    "a byte more": lambda body, random: signed(body + random.choice([b" ", b"\n", b"\0"]), signature(body)),
    "a byte less": lambda body, _: signed(body[:-1], signature(body)),
    "written another way": lambda body, _: signed(resign(body), signature(body)),
    "an empty body": lambda body, _: signed(b"", signature(body)),
    "the body twice": lambda body, _: signed(body * 2, signature(body)),
    "the signature of another body": lambda body, _: signed(body, signature(pushed("another.md"))),
    "the header twice, the same": lambda body, _: signed(
        body, signature(body), ("X-Hub-Signature-256", signature(body))
    ),
    "the header twice, one genuine": lambda body, random: signed(
        body, f"sha256={random.getrandbits(256):064x}", ("x-hub-signature-256", signature(body))
    ),
    "two in one header": lambda body, _: signed(body, f"{signature(body)}, {signature(body)}"),
    "a signature and a token": lambda body, _: signed(
        body, signature(body), ("Authorization", f"Bearer {token(body)}")
    ),
    "the token of the developer": lambda body, _: signed(body, None, ("Authorization", f"Bearer {TOKEN}")),
    "basic": lambda body, _: signed(
        body, None, ("Authorization", "Basic " + base64.b64encode(f"x:{SECRET}".encode()).decode())
    ),
    "the secret itself": lambda body, _: signed(body, None, ("Authorization", f"Bearer {SECRET}")),
    "token: none": lambda body, _: with_token(body, unsigned_token(body, "none")),
    "token: None": lambda body, _: with_token(body, unsigned_token(body, "None") + "x"),
    "token: without its signature": lambda body, _: with_token(body, token(body).rpartition(".")[0] + "."),
    "token: another key": lambda body, _: with_token(body, token(body, OTHER_SECRET)),
    "token: an empty key": lambda body, _: with_token(body, token(body, "x" * 64)),
    "token: another algorithm": lambda body, random: with_token(
        body, token(body, algorithm=random.choice(["HS384", "HS512"]))
    ),
    "token: of another body": lambda body, _: with_token(body, token(pushed("another.md"))),
    "token: the body altered": lambda body, random: with_token(altered(body, random), token(body)),
    "token: expired": lambda body, random: with_token(
        body, token(body, iat=NOW - 900 - random.randrange(9999), exp=NOW - 400)
    ),
    "token: from the future": lambda body, _: with_token(body, token(body, iat=NOW + 3600, exp=NOW + 3900)),
    "token: not yet": lambda body, _: with_token(body, token(body, nbf=NOW + 3600)),
    "token: for too long": lambda body, random: with_token(
        body, token(body, iat=NOW, exp=NOW + 601 + random.randrange(10**6))
    ),
    "token: ends before it begins": lambda body, _: with_token(body, token(body, iat=NOW + 30, exp=NOW + 20)),
    "token: a claim is missing": lambda body, random: with_token(
        body, token(body, without=random.choice(["exp", "iat", "body_sha256"]))
    ),
    "token: a claim is no digest": lambda body, random: with_token(
        body, token(body, body_sha256=random.choice([None, 1, "", "x", [hashlib.sha256(body).hexdigest()]]))
    ),
    "token: the digest in upper case": lambda body, _: with_token(
        body, token(body, body_sha256=hashlib.sha256(body).hexdigest().upper())
    ),
    "token: times that are none": lambda body, random: with_token(
        body, token(body, exp=random.choice([str(NOW + 300), True, None, float(2**1000)]))
    ),
    "token: for somebody": lambda body, _: with_token(body, token(body, aud="another service")),
    "token: of another purpose": lambda body, _: with_token(body, token(body, head={"typ": "logout+jwt"})),
    "token: with an extension": lambda body, _: with_token(body, token(body, head={"crit": ["b64"], "b64": False})),
    "token: with a key of its own": lambda body, _: with_token(
        body, token(body, OTHER_SECRET, head={"jwk": {"kty": "oct", "k": "eA"}})
    ),
    "token: tampered with": lambda body, random: with_token(body, tampered(token(body), random)),
    "token: four parts": lambda body, _: with_token(body, token(body) + ".x"),
    "token: too long": lambda body, _: with_token(body, token(body, filler="x" * 9000)),
    "token: twice": lambda body, _: (
        body,
        [*bearer(body).items(), ("Authorization", f"Bearer {token(body)}")],
    ),
    "token: no ASCII": lambda body, _: with_token(body, "\xe9.\xe9.\xe9"),
}


@pytest.mark.parametrize("family", FORGERIES)
def test_every_family_of_forgeries_is_refused(hook: Site, family: str) -> None:
    """And with the one answer, which says nothing of why."""
    body = pushed("guide.md")
    problem = problem_of(hook.post(*FORGERIES[family](body, Random(7))), 401, "unauthenticated")
    assert problem["detail"] == "A valid credential is required."
    assert hook.jobs() == []


def test_no_forgery_is_accepted(
    hook: Site, scaled: Callable[..., int], figure: Callable[[str], None], capfd: pytest.CaptureFixture[str]
) -> None:
    count = scaled(test=40, ci=200, prove=5000)
    random = Random(count)
    families = list(FORGERIES)
    said: set[str] = set()
    for number in range(count):
        forge = FORGERIES[families[number % len(families)] if count > len(families) else random.choice(families)]
        body = pushed(f"guide-{random.getrandbits(64)}.md", after=f"{random.getrandbits(160):040x}")
        answer = hook.post(*forge(body, random))
        assert answer.status_code == 401, answer.text
        found = answer.json()
        said.add(json.dumps({name: found[name] for name in found if name not in ("request_id", "instance")}))
    assert len(said) == 1
    assert hook.jobs() == []
    assert queued(hook.deployment) == []
    # What passes does so among the forged ones as well.
    accepted(hook.post(pushed("guide.md")), 202, "queued")
    figure(f"{count:,} forged deliveries of {len(families)} families: 0 accepted, one answer")


def test_nothing_of_a_forged_body_is_read_and_no_connection_is_taken(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database is not there, and what would read a body fails."""

    def read(_: bytes) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(api.webhook, "_understood", read)
    used = settings.model_copy(update=configured(tmp_path))
    app = create_app(used, database=nowhere(), door=loopback_door(TOKEN))
    body = pushed("guide.md")
    client = TestClient(app, raise_server_exceptions=True)
    assert client.post(PATH, content=body, headers=headers(body, OTHER_SECRET + "x")).status_code == 401
    with pytest.raises(AssertionError, match="read"):
        client.post(PATH, content=body, headers=headers(body))


def test_nothing_that_is_secret_or_sent_is_logged(hook: Site) -> None:
    with structlog.testing.capture_logs() as logged:
        hook.post(pushed("canary-4711.md"))
        body = pushed("canary-4711.md")
        hook.post(body, headers(body, OTHER_SECRET + "x"))
        hook.post(body, bearer(body, token(body, OTHER_SECRET)))
    said = repr(logged)
    assert "webhook" in said
    for word in ("canary", SECRET, OTHER_SECRET, signature(body)):
        assert word not in said


# --- secrets that change --------------------------------------------------------------------------


def test_secrets_are_changed_while_it_runs(hook: Site) -> None:
    def status(secret: str) -> int:
        body = pushed("guide.md", after=hashlib.sha1(secret.encode()).hexdigest())
        return hook.post(body, headers(body, secret)).status_code

    new = "s9-" + "f0e1d2c3" * 8
    assert [status(secret) for secret in (SECRET, OLD_SECRET, new)] == [202, 202, 401]
    (hook.folder / "secrets.yaml").write_text(f"acme/handbook: [{new}, {SECRET}]")
    assert [status(secret) for secret in (SECRET, OLD_SECRET, new)] == [200, 401, 202]
    # At once, and with a file of the same length.
    (hook.folder / "secrets.yaml").write_text(f"acme/handbook: [{new}, {OLD_SECRET}]")
    assert [status(secret) for secret in (SECRET, OLD_SECRET, new)] == [401, 200, 200]


@pytest.mark.parametrize("broken", ["", "acme/handbook: [", "acme/handbook: short", None])
@pytest.mark.parametrize("name", ["secrets.yaml", "sources.yaml"])
def test_files_that_are_broken_meanwhile_let_nobody_in(hook: Site, name: str, broken: str | None) -> None:
    if broken is None:
        (hook.folder / name).unlink()
    else:
        (hook.folder / name).write_text(broken)
    problem_of(hook.post(pushed("guide.md")), 503, "unavailable")
    assert hook.jobs() == []
    configured(hook.folder)
    accepted(hook.post(pushed("guide.md")), 202, "queued")


def test_a_source_that_is_taken_from_the_file_is_synchronised_no_more(hook: Site) -> None:
    (hook.folder / "sources.yaml").write_text("[]")
    accepted(hook.post(pushed("guide.md")), 202, "ignored")


def test_secrets_are_loaded_for_repositories_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "secrets.yaml").write_text(SECRETS)
    found = load_secrets(tmp_path / "secrets.yaml")
    assert [secret.of for secret in found] == ["acme/handbook", "acme/handbook", "globex/code", "initech"]
    assert [secret.covers("INITECH/x") for secret in found] == [False, False, False, True]
    assert [secret.covers("acme/handbook/x") for secret in found] == [False] * 4
    assert [secret.covers("Acme/Handbook") for secret in found] == [True, True, False, False]


# --- once -----------------------------------------------------------------------------------------


def test_the_same_delivery_again_has_one_effect_whatever_it_calls_itself(
    hook: Site, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    """X-GitHub-Delivery is not signed."""
    count = scaled(test=30, ci=100, prove=500)
    body = pushed("guide.md")

    def send(number: int) -> str:
        answer = hook.post(body, headers(body, X_GitHub_Delivery=f"delivery-{number % 7}"))
        assert answer.status_code == {"queued": 202, "duplicate": 200}[answer.json()["status"]]
        return str(answer.json()["status"])

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(count)))
    assert answers.count("queued") == 1
    assert len(hook.jobs()) == len(queued(hook.deployment)) == 1
    figure(f"one delivery replayed {count} times, 8 at once: one effect")


def test_a_replay_after_the_job_was_done_does_nothing(hook: Site) -> None:
    body = pushed("guide.md")
    accepted(hook.post(body), 202, "queued")
    with psycopg.connect(hook.deployment.url("postgres")) as superuser:
        superuser.execute("update rag.rag_jobs set status = 'succeeded', finished_at = now()")
        superuser.execute("delete from jobs.procrastinate_jobs")
    accepted(hook.post(body), 200, "duplicate")
    assert queued(hook.deployment) == []
    accepted(hook.post(pushed("guide.md", after="2" * 40)), 202, "queued")
    assert len(queued(hook.deployment)) == 1


def test_pushes_that_wait_for_one_source_are_one_job(hook: Site) -> None:
    for number in range(10):
        accepted(hook.post(pushed("guide.md", after=f"{number:040d}")), 202, "queued")
    assert len(queued(hook.deployment)) == 1


# --- bodies without end ---------------------------------------------------------------------------


@asynccontextmanager
async def receiving(settings: Settings, folder: Path, **more: Any) -> AsyncIterator[Callable[..., Any]]:
    """Requests whose parts come when the test says so; nothing of the database is needed."""
    used = settings.model_copy(update=configured(folder) | more)
    app = create_app(used, database=nowhere(), door=loopback_door(TOKEN))

    async def call(parts: AsyncIterator[dict[str, Any]], sent: dict[str, str]) -> int:
        status = 0

        async def receive() -> dict[str, Any]:
            return await anext(parts)

        async def send(message: dict[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)

        scope = {
            **{"type": "http", "method": "POST", "path": PATH, "raw_path": PATH.encode(), "query_string": b""},
            **{"http_version": "1.1", "scheme": "http", "root_path": "", "server": ("127.0.0.1", 8000)},
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        }
        await app(scope, receive, send)
        return status

    yield call


def part(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_body_that_comes_too_slowly_is_given_up(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.webhook, "BODY_WITHIN_S", 0.2)

    async def slowly() -> AsyncIterator[dict[str, Any]]:
        while True:
            yield part(b"x")
            await asyncio.sleep(0.05)

    async with receiving(settings, tmp_path) as call:
        assert await call(slowly(), headers(pushed())) == 408


async def test_a_body_that_is_cut_off_is_no_delivery(settings: Settings, tmp_path: Path) -> None:
    async def cut() -> AsyncIterator[dict[str, Any]]:
        yield part(pushed("guide.md"))
        yield {"type": "http.disconnect"}

    async with receiving(settings, tmp_path) as call:
        assert await call(cut(), headers(pushed("guide.md"))) == 400


async def test_few_large_bodies_are_taken_in_at_once_and_small_ones_always(settings: Settings, tmp_path: Path) -> None:
    ends = asyncio.Event()

    async def large() -> AsyncIterator[dict[str, Any]]:
        yield part(b"x" * (IN_MEMORY_BYTES + 1))
        await ends.wait()
        yield part(b"", more=False)

    async def small() -> AsyncIterator[dict[str, Any]]:
        yield part(b"{}", more=False)

    async with receiving(settings, tmp_path) as call:
        first = [asyncio.create_task(call(large(), headers(b"x"))) for _ in range(LARGE_AT_ONCE)]
        await asyncio.sleep(0.1)
        assert await call(large(), headers(b"x")) == 503
        assert await call(small(), headers(b"x")) == 401
        ends.set()
        assert await asyncio.gather(*first) == [401] * LARGE_AT_ONCE
        assert await call(large(), headers(b"x")) == 401, "places are free again"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_the_limit_is_taken_and_one_byte_more_is_not(
    settings: Settings, tmp_path: Path, chunked: bool
) -> None:
    used = settings.model_copy(update=configured(tmp_path) | {"rag_webhook_max_bytes": 2048})
    client = TestClient(create_app(used, database=nowhere(), door=loopback_door(TOKEN)))
    for size, status in ((2048, 401), (2049, 413)):
        content = iter([b"x" * 1024, b"x" * (size - 1024)]) if chunked else b"x" * size
        answer = client.post(PATH, content=content, headers=headers(b"x"))  # type: ignore[arg-type]
        assert answer.status_code == status
    assert "2048" in answer.json()["detail"]


# --- the real server ------------------------------------------------------------------------------


class Real:
    """`rag serve` with a webhook, and what it takes of memory."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def memory(self, field: str = "VmRSS") -> int:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024

    @contextmanager
    def growth(self) -> Iterator[Callable[[], int]]:
        """What the process had at its peak in the block, more than before, in bytes."""
        before = self.memory()
        Path(f"/proc/{self.server.process.pid}/clear_refs").write_text("5")
        yield lambda: self.memory("VmHWM") - before

    def post(self, body: Any, sent: dict[str, str]) -> tuple[int, float]:
        """The status, and after how many seconds; an iterable is sent in chunks, without its length."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        began = time.perf_counter()
        # When it has answered already, it reads no more.
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", PATH, body=body, headers=sent, encode_chunked=not isinstance(body, bytes))
        try:
            return connection.getresponse().status, time.perf_counter() - began
        finally:
            connection.close()


@pytest.fixture(scope="module")
def real(
    new_deployment: Callable[[], Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Real, Deployment, Path]]:
    folder = tmp_path_factory.mktemp("serving")
    git(folder, "init", "--quiet", "repository")
    configured(
        folder,
        sources="- {name: handbook, github: acme/handbook, git: repository, ref: main, tenant: acme, user: 7}\n",
    )
    with new_deployment() as deployment, fake_openai() as embeddings:
        settings = {
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_EMBEDDING_PROVIDER": "openai",
            "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
            "OPENAI_BASE_URL": embeddings.base_url,
            "OPENAI_API_KEY": "sk-test",
            "RAG_WEBHOOK_SECRETS": str(folder / "secrets.yaml"),
            "RAG_SOURCES": str(folder / "sources.yaml"),
        }
        with serving(folder, **settings) as server:
            server.wait_until_it_answers(lines=3)
            yield Real(server), deployment, folder


def in_parts(size: int, unit: bytes = b"x" * 65536) -> Iterator[bytes]:
    for _ in range(-(-size // len(unit))):
        yield unit


class Bombs:
    """Bodies that are larger than they may be, in every manner of sending."""

    def __init__(self, random: Random) -> None:
        self.packed = gzip.compress(bytes(200 * MIB), 1)
        self.random = random
        self.kinds = [self.announced, self.chunked, self.lying, self.gzipped, self.gzip_bomb, self.tokened]

    def sent(self, **more: str) -> dict[str, str]:
        return headers(b"x", None) | {"X-Hub-Signature-256": f"sha256={self.random.getrandbits(256):064x}"} | more

    def announced(self, real: Real) -> int:
        return real.post(b"x" * (26 * MIB), self.sent())[0]

    def chunked(self, real: Real) -> int:
        return real.post(in_parts(self.random.randrange(26, 60) * MIB), self.sent())[0]

    def lying(self, real: Real) -> int:
        """A length of many digits, of which nothing comes."""
        return real.post(b"x", self.sent(**{"Content-Length": "9" * self.random.randrange(9, 18)}))[0]

    def gzipped(self, real: Real) -> int:
        return real.post(
            in_parts(26 * MIB, self.random.randbytes(65536)), self.sent(**{"Transfer-Encoding": "chunked"})
        )[0]

    def gzip_bomb(self, real: Real) -> int:
        """Small until somebody unpacks it, which nobody does."""
        status = real.post(self.packed, self.sent(**{"Content-Encoding": "gzip"}))[0]
        assert status == 415
        return 413

    def tokened(self, real: Real) -> int:
        body = in_parts(30 * MIB)
        sent = headers(b"x", None) | {"Authorization": f"Bearer {token(b'x')}"}
        return real.post(body, sent)[0]


def test_oversized_bodies_are_refused_and_take_no_memory(
    real: tuple[Real, Deployment, Path], scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    server, deployment, _ = real
    count = scaled(test=12, ci=24, prove=50)
    bombs = Bombs(Random(50))
    for _ in range(5):
        assert server.post(b"{}", headers(b"{}", None))[0] == 401
    with server.growth() as grown:
        assert {bombs.kinds[number % len(bombs.kinds)](server) for number in range(count)} == {413}
        with ThreadPoolExecutor(12) as pool:
            statuses = set(pool.map(lambda _: server.post(in_parts(26 * MIB), bombs.sent())[0], range(12)))
        assert statuses <= {413, 503}
        # Up to the limit, and forged.
        forged = {server.post(in_parts(15 * MIB), bombs.sent())[0] for _ in range(3)}
        assert forged == {401}
        growth = grown()
    assert job_rows(deployment) == []
    assert growth <= 32 * MIB
    figure(f"{count} oversized deliveries and 12 at once: refused, {growth / MIB:.1f} MiB of memory at the peak")


def large_push(size: int, *, after: str = "3" * 40) -> bytes:
    """A genuine push of about so many bytes, of which every commit touches a hundred paths."""
    paths = [f"documents/of/the/department/number-{number:06d}.md" for number in range(100)]
    commit_ = {"id": after, "message": "A change.", "added": paths, "removed": [], "modified": []}
    return pushed(commits=[commit_] * (size // (len(json.dumps(commit_)) + 2)), after=after)


def test_a_genuine_push_of_almost_the_limit_takes_little_memory_and_its_replay_does_nothing(
    real: tuple[Real, Deployment, Path], figure: Callable[[str], None]
) -> None:
    server, deployment, _ = real
    body = large_push(16 * MIB - 4096)
    assert 15 * MIB < len(body) < 16 * MIB
    with server.growth() as grown:
        first, again = (server.post(body, headers(body)) for _ in range(2))
        growth = grown()
    assert (first[0], again[0]) == (202, 200)
    assert len(queued(deployment)) == 1
    assert growth <= 32 * MIB
    figure(
        f"a genuine push of {len(body) / MIB:.1f} MiB: {first[1]:.2f} s, {growth / MIB:.1f} MiB of memory at the peak"
    )


def test_who_sends_nothing_more_is_given_up_and_stops_nobody(real: tuple[Real, Deployment, Path]) -> None:
    server, _, _ = real
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n"
    held = []
    for _ in range(50):
        connection = socket.create_connection(("127.0.0.1", server.server.port), timeout=30)
        connection.sendall(f"{head}X-Hub-Signature-256: sha256={'0' * 64}\r\n\r\nx".encode())
        held.append(connection)
    assert server.post(b"{}", headers(b"{}", None))[0] == 401
    for connection in held:
        assert b" 408 " in connection.recv(100)
        connection.close()


def test_it_answers_within_two_seconds_and_a_worker_does_the_rest(
    real: tuple[Real, Deployment, Path], scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    server, deployment, folder = real
    tip = ""
    for number in range(3):
        write(folder / "repository", guide_md=f"# Guide\n\nNumber {number}.", **{f"page{number}_md": "# Page\n\nText."})
        tip = commit(folder / "repository")
    count = scaled(test=30, ci=100, prove=500)
    deliveries = [pushed("guide.md", after=f"{number:040x}") for number in range(count)]
    Random(2).shuffle(deliveries)
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda body: server.post(body, headers(body)), deliveries))
    slowest = max(seconds for _, seconds in answers)
    assert {status for status, _ in answers} == {202}
    assert len(queued(deployment)) == 1
    assert slowest < 2
    with fake_openai() as embeddings:
        until_empty(worker_environment(deployment, embeddings.base_url, RAG_SOURCES=str(folder / "sources.yaml")))
    with psycopg.connect(deployment.url("postgres")) as superuser:
        documents = superuser.execute(
            "select tenant_id, user_id, source_id, body, metadata -> 'origin' ->> 'version'"
            " from rag.rag_documents order by source_id"
        ).fetchall()
    assert documents[0] == ("acme", 7, "handbook:guide.md", "# Guide\n\nNumber 2.", tip)
    assert len(documents) == 4
    figure(f"{count} deliveries, 10 at once: the slowest answer after {slowest:.2f} s, and one synchronisation")


def test_a_database_that_waits_is_an_error_within_two_seconds_and_the_delivery_may_come_again(
    real: tuple[Real, Deployment, Path],
) -> None:
    server, deployment, _ = real
    body = pushed("guide.md", after="9" * 40)
    with psycopg.connect(deployment.url("postgres")) as superuser:
        # As an erasure of the tenant holds it.
        superuser.execute("select pg_advisory_xact_lock(rag.tenant_lock('acme'))")
        status, seconds = server.post(body, headers(body))
        assert (status, seconds < 2) == (504, True)
    assert server.post(body, headers(body))[0] == 202
