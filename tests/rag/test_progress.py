"""Long work shows how far it has got: a bar on a terminal, plain lines elsewhere, and JSON without either."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import Deployment
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag
from tests.rag.test_gather import write

__all__ = ["named", "rag"]

AS_MARA = ("--user", "7", "--tenant", "acme")
PAGES = {f"p{number}_md": f"# Page {number}\n\nThe deploy window is on day {number}." for number in range(4)}
SOURCES = "- {name: handbook, directory: docs, tenant: acme, user: 7}\n"


def collection() -> None:
    """A directory in BEIR's layout, of four documents and two questions."""
    folder = Path("judged")
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{number}", "title": "", "text": text} for number, text in enumerate(PAGES.values())]
    questions = [{"_id": f"q{number}", "text": f"deploy window day {number}"} for number in range(2)]
    for name, entries in (("corpus", documents), ("queries", questions)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    judged = "query-id\tcorpus-id\tscore\n" + "".join(f"q{number}\td{number}\t1\n" for number in range(2))
    (folder / "qrels.tsv").write_text(judged, encoding="utf-8")


def questions_of_old(deployment: Deployment) -> None:
    rows(
        deployment.url("postgres"),
        "insert into rag.rag_query_logs (tenant_id, user_id, query_hash, query_length, mode, result_count,"
        " citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms, created_at)"
        " values ('acme', 7, 'hash', 4, 'hybrid', 1, 0, 0, 1, 0, 1, now() - interval '9 days') returning 1",
    )


# command: what it says beside the bar
COMMANDS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "ingest": (("ingest", "docs", *AS_MARA), "ingesting"),
    "sync": (("sync", "docs", "--name", "other", *AS_MARA), "reading other"),
    "reconcile": (("reconcile",), "reading handbook"),
    "reindex": (("reindex", *AS_MARA), "reindexing"),
    "docs rm": (("docs", "rm", "{document}", "--yes", *AS_MARA), "removing"),
    "maintain --retention": (("maintain", "--retention"), "removing questions"),
    "forget": (("forget", "--tenant", "acme", "--user", "7", "--yes"), "forgetting"),
    "eval": (("eval", "judged"), "judged: ingesting"),
}


@pytest.fixture
def prepared(rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The command line of each command, with something to do for it."""
    write(Path("docs"), **PAGES)
    collection()
    Path("sources.yaml").write_text(SOURCES, encoding="utf-8")
    questions_of_old(named)
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", named.url("rag_operator"))
    monkeypatch.setenv("RAG_SOURCES", "sources.yaml")
    monkeypatch.setenv("RAG_LOG_RETENTION_DAYS", "7")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    write(Path("before"), note_md="# Note\n\nIt is there already.")
    assert rag("ingest", "before", *AS_MARA).code == 0
    document = json.loads(rag("docs", "list", "--json", *AS_MARA).out)["documents"][0]["id"]

    def line(command: str) -> list[str]:
        arguments, _ = COMMANDS[command]
        return [sys.executable, "-m", "rag.cli", *(part.replace("{document}", document) for part in arguments)]

    return line


def on_a_terminal(command: list[str]) -> tuple[int, str, str]:
    """Exit code, what went to a pipe as standard output, and what a terminal got as standard error."""
    ours, theirs = pty.openpty()
    told: list[bytes] = []

    def listen() -> None:
        try:
            while piece := os.read(ours, 65_536):
                told.append(piece)
        except OSError:
            pass  # the other end is closed

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, timeout=300, check=False
        )
    finally:
        os.close(theirs)
        listener.join(30)
        os.close(ours)
    return done.returncode, done.stdout.decode(), b"".join(told).decode()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_sees_a_bar_and_a_program_nothing_but_json(prepared: Callable[[str], list[str]], command: str):
    code, out, told = on_a_terminal([*prepared(command), "--json"])
    assert code == 0, told
    assert isinstance(json.loads(out), dict)
    # A cursor that is hidden and moved, a bar, and how many of how many.
    assert "\x1b[?25l" in told
    assert re.search("[━╸╺]{10}", told)
    assert COMMANDS[command][1] in told
    assert re.search(r"\d+/\d+", told)


@pytest.mark.parametrize("command", COMMANDS)
def test_elsewhere_there_are_plain_lines(prepared: Callable[[str], list[str]], command: str):
    done = subprocess.run(
        [*prepared(command), "--json"], stdin=subprocess.DEVNULL, capture_output=True, timeout=300, check=False
    )
    out, told = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, told
    assert isinstance(json.loads(out), dict)
    assert "\x1b" not in told + out
    assert "━" not in told
    counted = [line for line in told.splitlines() if re.fullmatch(r".+: \d+/\d+", line)]
    assert any(line.startswith(COMMANDS[command][1]) for line in counted)
