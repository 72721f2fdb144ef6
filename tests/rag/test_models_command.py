"""`rag models`, as it is typed, against a fake OpenAI; and what is left when a switch is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rag.answer import RAGService
from rag.exchange import RAGRequest
from tests.conftest import SIGNING_KEY, Deployment
from tests.fakes.openai_embeddings import FakeOpenAI
from tests.rag.test_cli import Rag, named, rag, with_embedded
from tests.rag.test_models import (
    ALICE,
    NEW,
    NEW_WIDTH,
    OLD,
    WIDTH,
    look,
    models_of,
    provider,
    put,
    settings,
    settings_for,
    world,
)

__all__ = ["named", "provider", "rag", "settings"]
AS_JSON = pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])


@pytest.fixture
def environment(named: Deployment, provider: FakeOpenAI) -> dict[str, str]:
    """Both models, and the login that changes them."""
    return {
        "RAG_DATABASE_URL": named.url("rag_app"),
        "RAG_SIGNING_KEY": SIGNING_KEY,
        "RAG_MIGRATION_DATABASE_URL": named.url("rag_migrator"),
        "RAG_EMBEDDING_PROVIDER": "openai",
        "RAG_EMBEDDING_MODEL": "text-embedding-3-small",
        "RAG_EMBEDDING_DIMENSIONS": str(WIDTH),
        "RAG_EMBEDDING_NEXT_MODEL": "text-embedding-3-large",
        "RAG_EMBEDDING_NEXT_DIMENSIONS": str(NEW_WIDTH),
        # The vectors of the fake mean nothing.
        "RAG_MIN_SIMILARITY_SCORE": "-1",
        "OPENAI_BASE_URL": provider.base_url,
        "OPENAI_API_KEY": provider.api_key,
    }


@pytest.fixture
def change(rag: Rag, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Rag:
    """`change("add")` runs `rag models add` with both models in the environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str):  # type: ignore[no-untyped-def]
        return rag("models", *arguments)

    return run


@pytest.fixture
def bears(change: Rag, rag: Rag) -> None:
    """Six documents of one user."""
    folder = Path("bears")
    folder.mkdir()
    for number in range(6):
        text = f"# Bear {number}\n\nBear number {number} sleeps for {number} weeks in den {number * 7}.\n"
        (folder / f"bear{number}.md").write_text(text, encoding="utf-8")
    assert rag("ingest", "bears", "--tenant", "acme", "--user", "1").code == 0
    Path("questions.txt").write_text("Where does bear 3 sleep?\n\n  Which den?  \n", encoding="utf-8")


def places(said: dict[str, object]) -> list[tuple[object, ...]]:
    return [(place["place"], place["model_id"], place["is_former"]) for place in said["places"]]  # type: ignore[attr-defined]


COMPARE = ("compare", "--questions", "questions.txt", "--tenant", "acme", "--user", "1", "--top-k", "3")


@pytest.mark.usefixtures("bears")
def test_all_steps_as_text(change: Rag, named: Deployment) -> None:
    def said(*arguments: str) -> list[str]:
        ran = change(*arguments)
        assert (ran.code, ran.errors) == (0, [])
        return ran.out.splitlines()

    assert said("list") == ["No model was ever added beside the first one: RAG_EMBEDDING_MODEL is taken at its word."]
    assert said("add") == [f"Added {NEW} beside {OLD}: 6 chunks are to be filled.", "Next: rag models fill"]
    active, coming, filled = said("list")
    assert (active, coming) == (f"active: {OLD}, 512 dimensions", f"coming: {NEW}, 768 dimensions")
    assert filled.startswith("  0 of 6 chunks have its vector")
    (done,) = said("fill")
    assert done.startswith("Filled 6 chunks, ")
    assert said("list")[2] == "  6 of 6 chunks have its vector"
    head, overlap, *each = said(*COMPARE)
    assert head == f"{OLD} (active) and {NEW}, 2 questions:"
    assert overlap.startswith("  overlap@3: mean ")
    assert len(each) == 2
    assert said("switch") == [f"Active: {NEW}; {OLD} is kept for a way back."]
    assert said("list")[1] == f"former: {OLD}, 512 dimensions"
    assert said(*COMPARE)[0] == f"{NEW} (active) and {OLD}, 2 questions:"
    assert said("rollback") == [f"Active: {OLD}; {NEW} is kept for a way back."]
    assert said("drop") == [f"Dropped {NEW}."]
    assert said("list") == [f"active: {OLD}, 512 dimensions"]
    assert models_of(named) == [(OLD, WIDTH, None, None, 6)]


@pytest.mark.usefixtures("bears")
def test_all_steps_as_json(change: Rag) -> None:
    def said(*arguments: str) -> dict[str, object]:
        ran = change(*arguments, "--json")
        assert (ran.code, ran.errors) == (0, [])
        return dict(json.loads(ran.out))

    assert said("list") == {"places": [], "chunks": 0, "filled": 0, "missing_indexes": 0, "is_ready": False}
    added = said("add")
    assert places(added) == [("active", OLD, False), ("second", NEW, False)]
    assert (added["chunks"], added["filled"], added["is_ready"]) == (6, 0, False)
    filled = said("fill")
    assert (filled["chunks"], filled["recomposed"]) == (6, 0)
    assert said("list")["is_ready"] is True
    compared = said(*COMPARE)
    assert (compared["active"], compared["second"], compared["top_k"]) == (OLD, NEW, 3)
    assert compared["overlap"]["questions"] == 2  # type: ignore[index]
    shares = [entry["share"] for entry in compared["questions"]]  # type: ignore[attr-defined]
    assert compared["overlap"]["mean"] == pytest.approx(sum(shares) / 2)  # type: ignore[index]
    assert compared["eval"] == {OLD: [], NEW: []}
    assert places(said("switch")) == [("active", NEW, False), ("second", OLD, True)]
    assert places(said("rollback")) == [("active", OLD, False), ("second", NEW, False)]
    assert places(said("drop")) == [("active", OLD, False)]


@pytest.mark.usefixtures("bears")
def test_what_cannot_be_done_is_one_line_and_code_1(change: Rag, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str) -> str:
        ran = change(*arguments)
        assert ran.code == 1
        (line,) = ran.errors
        return line

    for step in ("fill", "switch", "rollback", "drop"):
        assert "there is no second model" in refused(step)
    # Nothing to compare is not agreement.
    assert "vector of both models" in refused(*COMPARE)
    Path("empty.txt").write_text("\n\n", encoding="utf-8")
    assert "has no question" in refused("compare", "--questions", "empty.txt", "--tenant", "acme", "--user", "1")
    assert "cannot be read" in refused("compare", "--questions", "none.txt", "--tenant", "acme", "--user", "1")
    assert change("add").code == 0
    assert "second model already" in refused("add")
    assert "vector of both models" in refused(*COMPARE)
    assert "is not a former model" in refused("rollback")
    monkeypatch.delenv("RAG_EMBEDDING_NEXT_MODEL")
    monkeypatch.delenv("RAG_EMBEDDING_NEXT_DIMENSIONS")
    assert "RAG_EMBEDDING_NEXT_MODEL must name the other model" in refused("add")
    assert "names" in refused("fill")
    monkeypatch.setenv("RAG_MIGRATION_DATABASE_URL", os.environ["RAG_DATABASE_URL"])
    assert "may not become rag_owner" in refused("list")


@with_embedded
@AS_JSON
@pytest.mark.usefixtures("bears")
def test_a_judged_collection_is_measured_with_each_model_in_a_database_of_its_own(
    change: Rag, named: Deployment, provider: FakeOpenAI, as_json: bool
) -> None:
    """Each question's words are in its own document alone, so that the words find it whatever the vectors are."""
    folder = Path("judged")
    folder.mkdir()
    texts = {"harbour": "The harbour opens at six.", "moss": "Moss grows slowly.", "violin": "A violin has strings."}
    asked = {"q1": ("harbour opens", "harbour"), "q2": ("moss grows", "moss")}
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"_id": name, "title": "", "text": text}) + "\n" for name, text in texts.items())
    )
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps({"_id": name, "text": text}) + "\n" for name, (text, _) in asked.items())
    )
    (folder / "qrels.tsv").write_text(
        "query-id\tcorpus-id\tscore\n" + "".join(f"{name}\t{right}\t1\n" for name, (_, right) in asked.items())
    )
    assert change("add").code == 0
    before = models_of(named)
    asked_before = len(provider.requests)
    ran = change("compare", "--eval", "judged", *(["--json"] if as_json else []))
    assert (ran.code, ran.errors) == (0, [])
    if as_json:
        said = json.loads(ran.out)
        assert (said["overlap"], said["questions"]) == (None, [])
        assert list(said["eval"]) == [OLD, NEW]
        for (report,) in said["eval"].values():
            assert (report["name"], report["documents"], report["judged"]) == ("judged", 3, 2)
            assert report["scores"]["recall_at_10"] == 1
    else:
        assert [line for line in ran.out.splitlines() if line.startswith("openai/")] == [f"{OLD}:", f"{NEW}:"]
        assert ran.out.count("judged") == 2
    # Each model embedded, with its own width, and nothing of it is in the database that is served.
    requests = [request.body for request in provider.requests[asked_before:]]
    assert {(body["model"], body["dimensions"]) for body in requests} == {
        ("text-embedding-3-small", WIDTH),
        ("text-embedding-3-large", NEW_WIDTH),
    }
    assert models_of(named) == before


# --- killed in the middle of a switch ---------------------------------------------------------------

BEFORE, HELD, AFTER = "before the transaction", "in the transaction", "after the transaction"
# Where the command stands for a while, so that it can be killed there: by what it calls next.
STANDS = {
    BEFORE: "real = models._locking\nasync def stand(at, statement, parameters):\n"
    "    if 'swap_models' in statement: halt()\n    await real(at, statement, parameters)\nmodels._locking = stand",
    HELD: "real = models._alone\ndef stand(at, statement, parameters):\n    found = real(at, statement, parameters)\n"
    "    if 'swap_models' in statement: halt()\n    return found\nmodels._alone = stand",
    AFTER: "real = models._locking\nasync def stand(at, statement, parameters):\n"
    "    await real(at, statement, parameters)\n    if 'swap_models' in statement: halt()\nmodels._locking = stand",
}
PROGRAM = """
import sys, time
from rag import cli, models

def halt():
    print("here", flush=True)
    time.sleep(600)

{stand}
sys.argv = ["rag", "models", "switch"]
cli.main()
"""


@pytest.fixture
def killed_switch(environment: dict[str, str]) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Runs `rag models switch` until it stands where it is to be killed."""
    running = []

    def run(where: str) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAG_", "OPENAI_"))}
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(stand=STANDS[where])],
            env=kept | environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        return process

    yield run
    for process in running:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("where", [BEFORE, HELD, AFTER])
async def test_a_switch_that_is_killed_is_finished_by_the_next_command(
    where: str,
    change: Rag,
    named: Deployment,
    provider: FakeOpenAI,
    killed_switch: Callable[[str], subprocess.Popen[str]],
) -> None:
    """Before its transaction has committed everything is of the old model, afterwards everything of the new one."""
    settings = settings_for(provider)
    has_switched = where == AFTER
    async with world(named, settings) as (database, old, new), RAGService(settings, database) as service:
        for number in range(6):
            await put(database, old.embedder, number)

        async def is_right(model: str) -> None:
            found = await service.search(RAGRequest(query="bear 3 sleeps"), principal=ALICE)
            assert (found.embedding_model, found.mode, found.degraded) == (model, "hybrid", [])
            assert "number 3" in found.passages[0].text

        # Typed in a thread: a command has an event loop of its own.
        assert (await asyncio.to_thread(change, "add")).code == 0
        assert (await asyncio.to_thread(change, "fill")).code == 0
        await is_right(OLD)
        process = await asyncio.to_thread(killed_switch, where)
        # A search that meets the transaction waits for it, and is answered when it is gone.
        meanwhile = asyncio.create_task(is_right(NEW if has_switched else OLD))
        if where != HELD:
            await meanwhile
        process.send_signal(signal.SIGKILL)
        process.wait()
        await meanwhile
        await is_right(NEW if has_switched else OLD)
        whole = [(OLD, WIDTH, NEW, NEW_WIDTH, 6)] if not has_switched else [(NEW, NEW_WIDTH, OLD, WIDTH, 6)]
        assert models_of(named) == whole
        assert _leftover(named) == has_switched
        # Its turn ends with its connection.
        deadline = time.monotonic() + 20
        while "at work" in (ran := await asyncio.to_thread(change, "rollback" if has_switched else "switch")).err:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        assert (ran.code, ran.errors) == (0, [])
        after = OLD if has_switched else NEW
        await is_right(after)
        assert not _leftover(named)
        assert look(
            named,
            "select bool_and(attnotnull) from pg_attribute where attrelid = 'rag.rag_chunks'::regclass"
            " and attname in ('embedding', 'embedding_model')",
        ) == [(True,)]
        assert await database.examine(dimensions=settings.embedding_widths, thorough=True) == []
        # Whether writers were refused when it was killed or not: they are not now.
        await put(database, (old if after == OLD else new).embedder, 77)


def _leftover(deployment: Deployment) -> bool:
    """Whether the constraint is there that stands for `not null` until a switch is finished."""
    found = look(deployment, "select count(*) from pg_constraint where conname = 'rag_chunks_embedding_there'")
    return bool(found[0][0])
