"""Any text through every door: it comes back as it was, or is refused with a 4xx (SECURITY.md, Y24)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from httpx2 import Response
from starlette.testclient import TestClient

from rag import cli
from rag.errors import InvalidInput
from rag.ingest import Source, ingest
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of, read_document
from tests.api.running import Person, running
from tests.conftest import SIGNING_KEY, Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import worker_environment, working
from tests.rag.quick_embedder import QuickEmbedder
from tests.rag.stored import half_documents, rows
from tests.text_zoo import giants, yaml_bombs, zoo

ALL = 3_000
METADATA_DEPTHS = (1, 16, 17, 100, 5_000, 100_000)


def as_read(text: str) -> str:
    """How a document has it: without a byte order mark, its lines ended by line feeds."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


# A file that begins like this is none of text, whatever its name says; over HTTP it is.
NO_TEXT = {"PK\x03\x04": "ZIP archive", "%PDF-": "PDF file"}


def chosen(scaled: Callable[..., int]) -> list[str]:
    wanted = scaled(test=60, ci=150, prove=ALL)
    texts = list(zoo(ALL))
    return texts if wanted >= ALL else Random(wanted).sample(texts, wanted)


def is_text(text: str) -> bool:
    """Whether the database can hold it."""
    return "\0" not in text and not any("\ud800" <= mark <= "\udfff" for mark in text)


@pytest.fixture(scope="module")
def zoo_client(new_deployment: Callable[..., Any], settings: Settings) -> Iterator[tuple[TestClient, Deployment]]:
    """The application with a provider of embeddings that reads anything, so that a megabyte takes a moment."""
    with fake_openai() as server, new_deployment() as clone:
        changed = settings.model_copy(
            update={
                "rag_embedding_provider": "openai",
                "rag_embedding_model": "text-embedding-3-small",
                "openai_base_url": server.base_url,
                "openai_api_key": Settings(_env_file=None, openai_api_key="sk-test").openai_api_key,
            }
        )
        # What is large is taken in by a worker.
        with running(clone, changed) as client, working(worker_environment(clone, server.base_url)):
            yield client, clone


@pytest.fixture
def mara(zoo_client: tuple[TestClient, Deployment], tenant: str) -> Person:
    return Person(client=zoo_client[0], tenant_id=tenant, user_id=7)


def sent(person: Person, route: str, **fields: Any) -> Response:
    """What any JSON library could send, half surrogate pairs included."""
    body = json.dumps(fields | person.identity)
    return person.client.post(route, content=body, headers={"Content-Type": "application/json"})


def check(response: Response, what: object) -> bool:
    """Whether it was done; a refusal is a whole problem with a status of the caller's."""
    if response.status_code in (200, 201):
        return True
    assert 400 <= response.status_code < 500, (what, response.status_code, response.text[:300])
    assert response.json()["status"] == response.status_code
    return False


def stored(person: Person, response: Response, what: object) -> str | None:
    """The id of the document that became of it, at once or by a job; None for a refusal of either."""
    if response.status_code != 202:
        return str(response.json()["document_id"]) if check(response, what) else None
    asked_at = time.monotonic()
    while True:
        job = person.client.get(response.headers["Location"], params=person.identity).json()
        if job["status"] == "succeeded":
            return str(job["result"]["document_id"])
        if job["status"] == "failed":
            # A fault of ours is retried, or is called one.
            assert job["attempts"] == 1, (what, job)
            assert job["reason"] != "internal_error", (what, job)
            return None
        assert time.monotonic() - asked_at < 120, (what, job)
        time.sleep(0.05)


# --- short texts, every door ---------------------------------------------------------------------


def test_a_text_comes_back_as_it_went_in_or_is_refused(
    mara: Person, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    texts, kept = chosen(scaled), 0
    for number, text in enumerate(texts):
        response = sent(mara, "/rag/ingest", source_id=f"{number}.txt", content=text)
        if check(response, text):
            document = mara.read(response.json()["document_id"]).json()
            assert document["body"] == as_read(text), repr(text)
            kept += 1
        else:
            assert not is_text(text) or not as_read(text).strip(), (repr(text), response.text)
    figure(f"{len(texts):,} texts over HTTP: {kept:,} came back byte for byte, the others were refused, no 500")


def test_every_field_takes_a_text_or_refuses_it(mara: Person, scaled: Callable[..., int]) -> None:
    fields = ("title", "source_uri", "domain", "doc_type", "provenance_id", "task_id", "source_type", "source_id")
    for number, text in enumerate(chosen(scaled)):
        name = fields[number % len(fields)]
        usual = {"source_id": f"field-{number}.txt", "content": "The harbour opens at six."}
        response = sent(mara, "/rag/ingest", **usual | {name: text, "metadata": {"a text": text, text[:100]: "as key"}})
        if check(response, (name, text)):
            document = mara.read(response.json()["document_id"]).json()
            assert document["metadata"]["a text"] == text
            if name in document:
                assert document[name] == text, (name, text)


def test_a_question_of_any_text_is_answered_or_refused(mara: Person, scaled: Callable[..., int]) -> None:
    mara.store("page.md", "# Harbour\n\nThe harbour opens at six.")
    for text in chosen(scaled):
        check(sent(mara, "/rag/query", query=text, generate=False), text)
        check(sent(mara, "/rag/query", query=f"When does the harbour open? {text}"), text)


def test_any_text_may_be_invalidated_or_is_refused(mara: Person, scaled: Callable[..., int]) -> None:
    for number, text in enumerate(chosen(scaled)):
        fields = (
            {"source_ids": [text], "reason": "a test"},
            {"provenance_ids": [text], "reason": "a test"},
            {"source_ids": ["x"], "reason": text},
            {"source_ids": ["x"], "reason": "a test", "cascade_id": text},
        )[number % 4]
        check(sent(mara, "/rag/invalidate", **fields), fields)
        check(
            sent(mara, "/rag/reinstate", **fields | {"cascade_ids": [text]})
            if "cascade_id" not in fields
            else sent(mara, "/rag/reinstate", source_ids=["x"], reason="a test", cascade_ids=[text]),
            fields,
        )


async def test_python_stores_a_text_or_names_what_is_wrong(deployment: Deployment, scaled: Callable[..., int]) -> None:
    mara = Principal(tenant_id="acme", user_id=7)
    async with deployment.pools() as database:
        for number, text in enumerate(chosen(scaled)):
            source = Source(name=f"{number}.txt", source_id=f"{number}.txt", content=text, metadata={"text": text})
            try:
                done = await ingest(
                    source,
                    principal=mara,
                    destination=destination_of(mara, scope="user"),
                    database=database,
                    embedder=QuickEmbedder(),
                    max_bytes=100_000,
                )
            except InvalidInput:
                assert not is_text(text) or not as_read(text).strip(), repr(text)
            else:
                row = await read_document(database, mara, done.document_id)
                assert (row["body"], row["metadata"]["text"]) == (as_read(text), text)


def test_the_command_stores_a_file_or_names_it(
    deployment: Deployment,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    scaled: Callable[..., int],
) -> None:
    for name in list(os.environ):
        if name.startswith(("RAG_", "OPENAI_", "OLLAMA_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    with fake_openai() as server:
        for name, value in {
            "RAG_HOME": str(tmp_path / "home"),
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_SIGNING_KEY": SIGNING_KEY,
            "RAG_LLM_PROVIDER": "extractive",
            "RAG_EMBEDDING_PROVIDER": "openai",
            "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": "sk-test",
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        folder = Path("texts")
        folder.mkdir()
        texts = {f"texts/{number}.txt": text for number, text in enumerate(chosen(scaled))}
        for path, text in texts.items():
            Path(path).write_bytes(text.encode("utf-8", "surrogatepass"))

        def rag(*arguments: str) -> tuple[int, str, str]:
            monkeypatch.setattr(sys, "argv", ["rag", *arguments])
            code = 0
            try:
                cli.main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            printed = capfd.readouterr()
            assert "Traceback" not in printed.err
            return code, printed.out, printed.err

        _, out, _ = rag("ingest", "texts", "--user", "7", "--tenant", "acme", "--json")
        refused = {entry["path"]: entry["reason"] for entry in json.loads(out)["failures"]}
        found = rows(deployment.url("postgres"), "select source_id, body from rag.rag_documents")
        bodies = {row["source_id"]: row["body"] for row in found}
        assert bodies.keys() | refused.keys() == texts.keys()
        for path, text in texts.items():
            if path in bodies:
                # Of a file a mark is the encoding's; what follows is text.
                assert bodies[path] == as_read(text.removeprefix("\ufeff")), repr(text)
            elif text.startswith(tuple(NO_TEXT)):
                assert any(text.startswith(start) and what in refused[path] for start, what in NO_TEXT.items())
            else:
                assert not is_text(text) or not as_read(text).strip(), repr(text)
        for text in Random(1).sample(sorted(texts.values(), key=repr), 10):
            # No command line has a NUL.
            question = text.replace("\0", "")
            code, _, err = rag("query", "--user", "7", "--tenant", "acme", "--json", "--", question)
            assert code in (0, 1, 2), (question, err)
            targets = ("--source", question or "x", "--reason", "a test")
            assert rag("invalidate", *targets, "--user", "7", "--tenant", "acme")[0] in (0, 1, 2)


# --- long and deep -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", giants())
def test_what_is_long_or_deep_comes_back_or_is_refused(mara: Person, name: str) -> None:
    text = giants()[name]
    for suffix in ("txt", "md"):
        response = sent(mara, "/rag/ingest", source_id=f"giant.{suffix}", content=text)
        if (document_id := stored(mara, response, name)) is not None:
            assert mara.read(document_id).json()["body"] == as_read(text)
    check(sent(mara, "/rag/query", query=text, generate=False), name)
    check(sent(mara, "/rag/query", query=text[:8_000], generate=False), name)


@pytest.mark.parametrize("name", yaml_bombs())
def test_a_bomb_of_yaml_does_not_go_off(mara: Person, name: str) -> None:
    text = yaml_bombs()[name]
    response = sent(mara, "/rag/ingest", source_id="bomb.yaml", content=text)
    if (document_id := stored(mara, response, name)) is not None:
        assert mara.read(document_id).json()["body"] == as_read(text)
    # And as what stands in front of a page.
    response = sent(mara, "/rag/ingest", source_id="bomb.md", content=f"---\n{text}\n---\n\nThe harbour opens at six.")
    stored(mara, response, name)


@pytest.mark.parametrize("depth", METADATA_DEPTHS)
def test_metadata_of_any_depth_are_kept_or_refused(mara: Person, depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        value = opening * (depth - 1) + "1" + closing * (depth - 1)
        fields = json.dumps({"source_id": f"deep-{depth}.txt", "content": "text"} | mara.identity)[1:-1]
        response = mara.client.post(
            "/rag/ingest",
            content=f'{{{fields}, "metadata": {{"deep": {value}}}}}',
            headers={"Content-Type": "application/json"},
        )
        done = check(response, depth)
        assert done == (depth <= 16), (depth, opening)


def test_nothing_of_it_is_half_there(zoo_client: tuple[TestClient, Deployment]) -> None:
    assert half_documents(zoo_client[1].url("postgres")) == []
