"""Synchronising a source: what goes in, what moves, what goes, and what must never be removed."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psycopg
import pytest

from rag import divide
from rag.database import Database
from rag.embed import Embedder, Purpose
from rag.errors import EmbeddingTimeout, InvalidInput, SourceUnavailable
from rag.ingest import Source, ingest
from rag.invalidate import Targets, invalidate
from rag.principal import Principal
from rag.settings import Settings
from rag.store import destination_of
from rag.sync import Outcome, SourceSpec, Synchroniser, load_specs
from tests.conftest import DIMENSIONS, Deployment
from tests.rag.stored import half_documents, rows, versions
from tests.rag.test_gather import commit, git, write

MARA = Principal(tenant_id="acme", user_id=7)
ROOT = os.geteuid() == 0


class Counting:
    """A model that gives every text one vector, and remembers the texts."""

    def __init__(self, real: Embedder, *, model_id: str = "test/constant") -> None:
        self.model_id = model_id
        self.max_input_tokens = real.max_input_tokens
        self.min_similarity = real.min_similarity
        self.token_counter = real.token_counter
        self.count_tokens = real.count_tokens
        self.texts: list[str] = []

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.texts += texts
        return [[1.0] + [0.0] * (DIMENSIONS - 1) for _ in texts]

    async def close(self) -> None: ...


class Place:
    """A folder, the index of it, and what a superuser sees of that."""

    def __init__(self, top: Path, database: Database, model: Counting, settings: Settings, url: str) -> None:
        self.top = top
        self.database = database
        self.model = model
        self.settings = settings
        self.url = url

    async def sync(self, spec: SourceSpec | None = None, **options: Any) -> Outcome:
        self.model.texts.clear()
        synchroniser = Synchroniser(
            settings=self.settings, database=self.database, embedder=self.model, default_tenant="acme"
        )
        return await synchroniser.sync(spec or self.spec(), **options)

    def spec(self, **fields: Any) -> SourceSpec:
        place = {} if "git" in fields else {"directory": self.top}
        return SourceSpec(**{"name": "handbook", "user": 7, **place, **fields})

    def documents(self) -> dict[str, Any]:
        """Ids of the documents by their source id."""
        found = rows(self.url, "select source_id, id from rag.rag_documents order by source_id")
        return {row["source_id"]: row["id"] for row in found}

    def one(self, source_id: str) -> dict[str, Any]:
        (row,) = rows(self.url, "select * from rag.rag_documents where source_id = %s", (source_id,))
        return row


@pytest.fixture
async def place(
    tmp_path: Path, database: Database, embedder: Embedder, settings: Settings, deployment: Deployment
) -> AsyncIterator[Place]:
    top = tmp_path / "handbook"
    top.mkdir()
    here = Place(top, database, Counting(embedder), settings, deployment.url("postgres"))
    yield here
    assert half_documents(here.url) == []


def said(outcome: Outcome) -> dict[str, str]:
    return {change.path: change.reason for change in outcome.changes} | dict.fromkeys(outcome.gone, "gone")


# --- what changes --------------------------------------------------------------------------------


async def test_new_changed_and_removed_files_are_followed(place: Place):
    write(place.top, a_md="# A\n\nOne.", deep__b_txt="Two.", c_md="# C\n\nThree.")
    first = await place.sync()
    assert said(first) == {"a.md": "new", "deep/b.txt": "new", "c.md": "new"}
    assert (first.embedded, first.files, first.drift) == (3, 3, 3)
    before = place.documents()
    assert list(before) == ["handbook:a.md", "handbook:c.md", "handbook:deep/b.txt"]

    write(place.top, a_md="# A\n\nOne, and more.")
    (place.top / "c.md").unlink()
    second = await place.sync()
    assert said(second) == {"a.md": "changed", "c.md": "gone"}
    assert (second.unchanged, second.embedded) == (1, 1)
    assert place.documents() == {name: id for name, id in before.items() if name != "handbook:c.md"}
    assert place.one("handbook:a.md")["body"] == "# A\n\nOne, and more."


async def test_nothing_is_written_when_nothing_changed(place: Place):
    write(place.top, a_md="# A\n\nOne.", b_txt="Two.")
    await place.sync()
    before = versions(place.url)
    again = await place.sync()
    assert (said(again), again.unchanged, place.model.texts) == ({}, 2, [])
    assert versions(place.url) == before


async def test_unchanged_chunks_keep_their_embedding(place: Place):
    sections = {name: f"## {name}\n\nThe text of {name}." for name in ("one", "two", "three")}
    write(place.top, README_md="# Guide\n\n" + "\n\n".join(sections.values()))
    await place.sync()
    sections["two"] += " With an addition."
    write(place.top, README_md="# Guide\n\n" + "\n\n".join(sections.values()))
    await place.sync()
    assert len(place.model.texts) == 1
    assert "addition" in place.model.texts[0]


async def test_a_file_that_moved_is_the_same_document_and_embeds_nothing(place: Place):
    write(place.top, a_md="# A\n\nOne.")
    await place.sync()
    old = place.one("handbook:a.md")
    (place.top / "deep").mkdir()
    (place.top / "a.md").rename(place.top / "deep/renamed.md")
    outcome = await place.sync()
    assert [(change.path, change.reason, change.former_path) for change in outcome.changes] == [
        ("deep/renamed.md", "moved", "a.md")
    ]
    assert (outcome.gone, outcome.embedded, place.model.texts) == ([], 0, [])
    new = place.one("handbook:deep/renamed.md")
    assert place.documents() == {"handbook:deep/renamed.md": old["id"]}
    assert new["created_at"] == old["created_at"]
    # Citations of the text are not stale, since it is the same.
    assert new["content_updated_at"] == old["content_updated_at"]
    assert new["source_uri"] == (place.top / "deep/renamed.md").as_uri()
    assert new["metadata"]["origin"]["path"] == "deep/renamed.md"


async def test_two_files_that_change_places_are_both_there(place: Place):
    write(place.top, a_md="# A\n\nOne.", b_md="# B\n\nTwo.")
    await place.sync()
    write(place.top, a_md="# B\n\nTwo.", b_md="# A\n\nOne.")
    assert said(await place.sync()) == {"a.md": "changed", "b.md": "changed"}
    assert place.one("handbook:a.md")["body"] == "# B\n\nTwo."


async def test_of_copies_one_moves_and_the_other_is_new(place: Place):
    write(place.top, a_md="# A\n\nOne.")
    await place.sync()
    (place.top / "a.md").rename(place.top / "b.md")
    write(place.top, c_md="# A\n\nOne.")
    assert said(await place.sync()) == {"b.md": "moved", "c.md": "new"}


async def test_other_tags_move_the_documents(place: Place):
    write(place.top, a_md="# A\n\nOne.")
    await place.sync()
    (id,) = place.documents().values()
    outcome = await place.sync(place.spec(tags=("hr",)))
    assert said(outcome) == {"a.md": "tags"}
    assert place.model.texts == []
    row = place.one("handbook:a.md")
    assert (row["id"], row["tags"]) == (id, ["hr"])


async def test_a_file_that_was_emptied_is_gone(place: Place):
    write(place.top, a_md="# A\n\nOne.", b_md="Two.")
    await place.sync()
    write(place.top, a_md="  \n")
    outcome = await place.sync()
    assert (said(outcome), outcome.left_out) == ({"a.md": "gone"}, 1)
    assert list(place.documents()) == ["handbook:b.md"]


async def test_filters_and_types_decide_what_is_there(place: Place):
    write(place.top, README_md="# R", adr__1_md="# D", notes_md="# N", drafts__d_md="# X")
    spec = place.spec(exclude=("drafts/",), types=("v1",))
    assert set(said(await place.sync(spec))) == {"README.md", "adr/1.md"}
    assert set(said(await place.sync(place.spec(exclude=("drafts/",))))) == {"notes.md"}
    assert said(await place.sync(place.spec(include=("adr/",)))) == {"README.md": "gone", "notes.md": "gone"}


async def test_what_spec_002_calls_whole_is_one_chunk(place: Place):
    text = "# Use Postgres\n\n" + "\n\n".join(f"## Part {number}\n\nWe decide {number}." for number in range(8))
    write(place.top, adr__1_md=text, README_md=text)
    await place.sync()
    chunks = rows(
        place.url,
        "select source_type, count(*) as chunks from rag.rag_documents as document join rag.rag_chunks as chunk "
        "on chunk.document_id = document.id group by 1",
    )
    counted = {row["source_type"]: row["chunks"] for row in chunks}
    assert counted["adr"] == 1
    assert counted["readme"] >= 8


# --- what must not be removed --------------------------------------------------------------------


async def test_a_listing_that_fails_removes_nothing(place: Place, monkeypatch: pytest.MonkeyPatch):
    write(place.top, a_md="# A", deep__b_md="# B")
    await place.sync()
    before = versions(place.url)
    real = os.scandir

    def scandir(path):
        if Path(path).name == "deep":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr("rag.gather.os.scandir", scandir)
    with pytest.raises(SourceUnavailable):
        await place.sync()
    monkeypatch.undo()
    place.top.rename(place.top.parent / "elsewhere")
    with pytest.raises(SourceUnavailable):
        await place.sync()
    assert versions(place.url) == before


async def test_an_empty_source_removes_nothing_unless_it_may(place: Place):
    write(place.top, a_md="# A")
    await place.sync()
    (place.top / "a.md").unlink()
    outcome = await place.sync()
    assert (outcome.kept, outcome.gone, outcome.drift) == (["a.md"], [], 1)
    assert list(place.documents()) == ["handbook:a.md"]
    assert (await place.sync(allow_empty=True)).gone == ["a.md"]
    assert place.documents() == {}


async def test_a_file_that_cannot_be_read_keeps_its_document(place: Place, monkeypatch: pytest.MonkeyPatch):
    write(place.top, a_md="# A", b_md="# B")
    await place.sync()
    real = os.open

    def denied(path, *arguments, **options):
        if Path(path).name == "a.md":
            raise PermissionError(13, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr("rag.gather.os.open", denied)
    outcome = await place.sync()
    assert [(failure.path, failure.reason) for failure in outcome.failures] == [("a.md", "permission denied")]
    assert (outcome.gone, outcome.unchanged) == ([], 1)
    assert len(place.documents()) == 2


async def test_a_file_that_is_refused_keeps_its_document_and_the_others_go_in(place: Place):
    write(place.top, a_md="# A", b_md="# B")
    await place.sync()
    (place.top / "a.md").write_bytes(b"\xff\xff")
    write(place.top, b_md="# B\n\nMore.", c_md="# C")
    outcome = await place.sync()
    assert said(outcome) == {"b.md": "changed", "c.md": "new"}
    assert [(failure.path, failure.reason) for failure in outcome.failures] == [
        ("a.md", "is not UTF-8 text: byte 0 cannot be decoded")
    ]
    assert place.one("handbook:a.md")["body"] == "# A"


class Reading:
    """The second reading of b.md, with which it is written, takes a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.closed = False
        self._times = 0
        self._real = divide.contents
        monkeypatch.setattr(divide, "contents", self._contents)

    def _contents(self, file: BinaryIO, *, name: str, **bounds: Any) -> Iterator[tuple[int | None, bytes | str]]:
        self._times += name == "b.md"
        slow = name == "b.md" and self._times == 2
        try:
            if slow:
                self.begun.set()
                time.sleep(0.3)
            assert not file.closed
            yield from self._real(file, name=name, **bounds)
        finally:
            self.closed = self.closed or slow


async def test_what_the_model_lacks_is_told_while_another_file_is_being_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    write(place.top, a_md="# A\n\nOne.", b_md="# B\n\nTwo.")
    reading = Reading(monkeypatch)

    async def late(texts: Sequence[str], **_: Any) -> list[list[float]]:
        assert await asyncio.to_thread(reading.begun.wait, 30)
        raise EmbeddingTimeout("the model does not answer")

    monkeypatch.setattr(place.model, "embed", late)
    with pytest.raises(EmbeddingTimeout):
        await place.sync()
    assert reading.closed
    assert place.documents() == {}


async def test_a_synchronisation_is_cancelled_while_a_file_is_being_read(place: Place, monkeypatch: pytest.MonkeyPatch):
    write(place.top, b_md="# B\n\nTwo.")
    reading = Reading(monkeypatch)
    running = asyncio.ensure_future(place.sync())
    assert await asyncio.to_thread(reading.begun.wait, 30)
    # The second comes while the first is waiting for the reader.
    for _ in range(2):
        running.cancel()
        await asyncio.sleep(0.05)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reading.closed
    assert place.documents() == {}


async def test_what_is_invalidated_stays_out_and_the_others_go_in(place: Place):
    write(place.top, good_md="# Good\n\nThis one.", tainted_md="# Tainted\n\nThat one.")
    await place.sync()
    await invalidate(
        Targets(source_ids=("handbook:tainted.md",)), reason="a test", principal=MARA, database=place.database
    )
    assert list(place.documents()) == ["handbook:good.md"]
    outcome = await place.sync()
    (failure,) = outcome.failures
    assert (failure.path, "was invalidated" in failure.reason) == ("tainted.md", True)
    assert list(place.documents()) == ["handbook:good.md"]


async def test_what_came_otherwise_or_belongs_to_others_is_never_touched(place: Place):
    async def put(source_id: str, principal: Principal, **fields: Any) -> None:
        await ingest(
            Source(name="a.md", source_id=source_id, content="# Mine", **fields),
            principal=principal,
            destination=destination_of(principal, scope="user"),
            database=place.database,
            embedder=place.model,
            max_bytes=1_000,
        )

    await put("handbook:by-hand.md", MARA)
    await put("note.md", MARA, metadata={"origin": {"source": "handbook", "path": "note.md"}})
    write(place.top, a_md="# A", b_md="# B")
    await place.sync()
    await place.sync(place.spec(user=8))
    await place.sync(place.spec(name="handbook2"))
    (place.top / "a.md").unlink()
    assert said(await place.sync()) == {"a.md": "gone"}
    left = rows(place.url, "select user_id, source_id from rag.rag_documents order by 1, 2")
    assert [(row["user_id"], row["source_id"]) for row in left] == [
        (7, "handbook2:a.md"),
        (7, "handbook2:b.md"),
        (7, "handbook:b.md"),
        (7, "handbook:by-hand.md"),
        (7, "note.md"),
        (8, "handbook:a.md"),
        (8, "handbook:b.md"),
    ]


async def test_a_document_that_was_written_meanwhile_is_not_removed(place: Place, monkeypatch: pytest.MonkeyPatch):
    write(place.top, a_md="# A", b_md="# B")
    await place.sync()
    (place.top / "a.md").unlink()
    real = Synchroniser._write

    async def slow(self, *arguments):
        write(place.top, a_md="# A\n\nBack again.")
        other = Synchroniser(
            settings=place.settings, database=place.database, embedder=place.model, default_tenant="acme"
        )
        monkeypatch.setattr(Synchroniser, "_write", real)
        await other.sync(place.spec())
        return await real(self, *arguments)

    monkeypatch.setattr(Synchroniser, "_write", slow)
    outcome = await place.sync()
    assert [failure.reason for failure in outcome.failures] == ["was written meanwhile"]
    assert place.one("handbook:a.md")["body"] == "# A\n\nBack again."


async def test_an_owner_who_is_erased_meanwhile_leaves_nothing_behind(place: Place, monkeypatch: pytest.MonkeyPatch):
    """Not a class either: a synchronisation that ends afterwards has nothing to say of them."""
    write(place.top, a_md="# A\n\nOne.")
    embed = place.model.embed

    async def they_are_forgotten(*given: Any, **named: Any) -> list[list[float]]:
        rows(place.url, "select * from rag.forget('acme', 7)")
        return await embed(*given, **named)

    monkeypatch.setattr(place.model, "embed", they_are_forgotten)
    outcome = await place.sync()
    assert len(outcome.failures) == 1
    assert rows(place.url, "select 1 from rag.rag_synchronisations") == []
    assert rows(place.url, "select 1 from rag.rag_access_classes where user_id = 7") == []


async def test_a_dry_run_says_what_would_be_done_and_writes_nothing(place: Place):
    write(place.top, a_md="# A", b_md="# B", c_md="# C")
    await place.sync()
    before = versions(place.url)
    write(place.top, a_md="# A\n\nMore.", e_md="# E")
    (place.top / "b.md").rename(place.top / "d.md")
    (place.top / "c.md").unlink()
    outcome = await place.sync(dry_run=True)
    assert said(outcome) == {"a.md": "changed", "d.md": "moved", "e.md": "new", "c.md": "gone"}
    assert (outcome.drift, place.model.texts) == (4, [])
    assert versions(place.url) == before


# --- reconciling ---------------------------------------------------------------------------------


async def test_documents_without_chunks_or_with_those_of_another_model_are_mended(place: Place):
    write(place.top, a_md="# A\n\nOne.", b_md="# B\n\nTwo.", c_md="# C\n\nThree.")
    await place.sync()
    with psycopg.connect(place.url, autocommit=True) as superuser:
        for statement, name in (
            ("delete from rag.rag_chunks as chunk using rag.rag_documents as document", "handbook:a.md"),
            (
                "update rag.rag_chunks as chunk set embedding_model = 'other' from rag.rag_documents as document",
                "handbook:b.md",
            ),
        ):
            superuser.execute(f"{statement} where chunk.document_id = document.id and document.source_id = %s", (name,))
    assert said(await place.sync()) == {}
    found = await place.sync(dry_run=True, thorough=True)
    assert said(found) == {"a.md": "no chunks", "b.md": "other model"}
    mended = await place.sync(thorough=True)
    assert (said(mended), mended.embedded) == ({"a.md": "no chunks", "b.md": "other model"}, 2)
    assert said(await place.sync(thorough=True)) == {}
    left = rows(place.url, "select distinct embedding_model from rag.rag_chunks")
    assert [row["embedding_model"] for row in left] == ["test/constant"]


# --- git -----------------------------------------------------------------------------------------


async def test_a_repository_is_followed_commit_by_commit(place: Place):
    git(place.top, "init", "--quiet")
    write(place.top, a_md="# A", b_md="# B")
    first = commit(place.top)
    spec = place.spec(git=str(place.top))
    assert (await place.sync(spec)).version == first
    (place.top / "a.md").rename(place.top / "renamed.md")
    write(place.top, c_md="# C")
    assert said(await place.sync(spec)) == {}
    second = commit(place.top)
    outcome = await place.sync(spec)
    assert (outcome.version, said(outcome)) == (second, {"renamed.md": "moved", "c.md": "new"})
    versions_of = {name: place.one(name)["metadata"]["origin"]["version"] for name in place.documents()}
    # What a commit left alone stays as it came in.
    assert versions_of == {"handbook:b.md": first, "handbook:renamed.md": second, "handbook:c.md": second}
    assert place.one("handbook:c.md")["source_updated_at"].isoformat() == "2026-11-01T10:00:00+00:00"

    back = await place.sync(place.spec(git=str(place.top), ref=first))
    assert said(back) == {"a.md": "moved", "c.md": "gone"}


# --- parts of large files ------------------------------------------------------------------------


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, place: Place) -> Place:
    monkeypatch.setattr(divide, "PART_BYTES", 2_000)
    monkeypatch.setattr(divide, "READ_BYTES", 300)
    place.settings = place.settings.model_copy(update={"rag_max_document_bytes": 3_000, "rag_max_file_bytes": 50_000})
    return place


def paragraphs(count: int, *, first: int = 0) -> str:
    return "".join(f"Paragraph {number} says that {number} is a number.\n\n" for number in range(first, first + count))


async def test_a_large_text_is_followed_part_by_part(small_parts: Place):
    place = small_parts
    write(place.top, big_txt=paragraphs(200), small_txt="small")
    outcome = await place.sync()
    parts = [change.path for change in outcome.changes if change.path != "small.txt"]
    assert len(parts) > 4
    assert parts[0] == "big.txt (part 1)"
    assert place.one("handbook:big.txt//2")["title"] == "big, part 2"
    whole = "".join(place.one(f"handbook:big.txt//{number}")["body"] for number in range(1, len(parts) + 1))
    assert whole == paragraphs(200)

    (place.top / "big.txt").write_text(paragraphs(200) + "And one at the end.\n", encoding="utf-8")
    assert said(await place.sync()) == {f"big.txt (part {len(parts)})": "changed"}
    (place.top / "big.txt").write_text(paragraphs(80), encoding="utf-8")
    shorter = await place.sync()
    assert shorter.gone == ["big.txt"]
    assert all(name == "handbook:small.txt" or "//" in name for name in place.documents())
    (place.top / "big.txt").write_text("now small", encoding="utf-8")
    await place.sync()
    assert list(place.documents()) == ["handbook:big.txt", "handbook:small.txt"]


async def test_what_is_larger_than_that_or_cannot_be_divided_is_refused(small_parts: Place):
    place = small_parts
    write(place.top, big_txt="x" * 60_000, big_yaml="a: b\n" * 1_000)
    outcome = await place.sync()
    assert {failure.path: failure.reason for failure in outcome.failures} == {
        "big.txt": "has 60,000 bytes; the limit of a text is 50,000",
        "big.yaml": "has 5,000 bytes; the limit is 3,000",
    }


# --- configuration -------------------------------------------------------------------------------


def specs(tmp_path: Path, text: str) -> list[SourceSpec]:
    path = tmp_path / "sources.yaml"
    path.write_text(text, encoding="utf-8")
    return load_specs(path)


def test_sources_are_read_from_a_file_and_places_are_beside_it(tmp_path: Path):
    found = specs(
        tmp_path,
        "sources:\n"
        "- {name: handbook, directory: docs, scope: project, user: 7, project: kiosk, tags: [hr], exclude: [drafts/]}\n"
        "- {name: code, git: repository, ref: main, types: [v1], user: 7, verified: true}\n"
        "- {name: far, git: 'https://host.example/x.git', tenant: acme, user: 7}\n",
    )
    assert [spec.name for spec in found] == ["handbook", "code", "far"]
    assert found[0].directory == tmp_path / "docs"
    assert found[1].git == str(tmp_path / "repository")
    assert found[2].git == "https://host.example/x.git"
    assert found[0].principal("default").tags == ("hr", "public")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing: here", "holds no list of sources"),
        ("- {name: a}", "source 1: "),
        ("- {name: a, directory: x, git: y}", "either a directory or a git repository"),
        ("- {name: a, directory: x, colour: red}", "colour"),
        ("- {name: 'A b', directory: x}", "name"),
        ("- {name: a, directory: x}\n- {name: a, directory: y}", "two sources have one name"),
        ("- {name: a, directory: x, scope: world}", "scope"),
        ("{", "cannot be read"),
    ],
)
def test_a_file_of_sources_that_says_something_else_is_refused(tmp_path: Path, text: str, says: str):
    with pytest.raises(InvalidInput, match=says) as refused:
        specs(tmp_path, text)
    assert refused.value.field == "RAG_SOURCES"


async def test_a_source_needs_an_owner_and_a_tenant(place: Place):
    with pytest.raises(InvalidInput, match="needs a user"):
        await place.sync(place.spec(user=None))
    with pytest.raises(InvalidInput, match="tenant is required"):
        place.spec().principal(None)


async def test_raw_conversations_are_refused(place: Place):
    with pytest.raises(InvalidInput, match="ingested as summaries"):
        await ingest(
            Source(name="chat.md", source_id="chat.md", content="Hi!", source_type="conversation"),
            principal=MARA,
            destination=destination_of(MARA, scope="user"),
            database=place.database,
            embedder=place.model,
            max_bytes=1_000,
        )
