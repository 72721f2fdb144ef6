"""The ingest line: what it stores, what it leaves alone, and that nobody ever sees half of it."""

from __future__ import annotations

import asyncio
import math
import time
import zipfile
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from rag import language, store
from rag.database import Database
from rag.embed import Embedder, Purpose, open_embedder
from rag.errors import (
    DatabaseError,
    DatabaseUnavailable,
    DocumentNotFound,
    DocumentTooLarge,
    EmbeddingInvalid,
    EmbeddingTimeout,
    EmbeddingUnavailable,
    EmptyDocument,
    InvalidInput,
    ScopeForbidden,
    SourceOvertaken,
    SourceRetracted,
)
from rag.ingest import PAGE_SIZE, Also, Ingested, Source, check_metadata, check_source, ingest
from rag.principal import Principal
from rag.settings import Settings
from rag.store import Destination, destination_of, read_document, remove_document
from tests.conftest import DIMENSIONS, SIGNER, Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.stored import half_documents, rows, versions

SAMPLE = Path(__file__).resolve().parents[2] / "rag" / "_sample"
MAX_BYTES = 1_000_000
MARA = Principal(tenant_id="acme", user_id=7)
BOTH_TAGS = Principal(tenant_id="acme", user_id=7, tags=("hr", "public"))


class Recording:
    """The real model, with a note of what it was given, and something that happens meanwhile."""

    def __init__(self, real: Embedder, *, model_id: str | None = None) -> None:
        self._real = real
        self.model_id = model_id or real.model_id
        self.max_input_tokens = real.max_input_tokens
        self.min_similarity = real.min_similarity
        self.token_counter = real.token_counter
        self.texts: list[str] = []
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    def count_tokens(self, text: str) -> int:
        return self._real.count_tokens(text)

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.texts += texts
        vectors = await self._real.embed(texts, purpose=purpose, progress=progress)
        if self.meanwhile is not None:
            await self.meanwhile()
        return vectors

    async def close(self) -> None:
        """The real one belongs to the session."""


class Constant(Recording):
    """Answers every text with one vector, where meaning plays no part or the vector itself is the point."""

    def __init__(self, real: Embedder, vector: Sequence[float]) -> None:
        super().__init__(real)
        self.vector = list(vector)

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.texts += texts
        if progress is not None:
            progress(len(texts))
        return [self.vector for _ in texts]


@pytest.fixture
def recording(embedder: Embedder) -> Recording:
    return Recording(embedder)


@pytest.fixture
def superuser(deployment: Deployment) -> str:
    return deployment.url("postgres")


Put = Callable[..., Awaitable[Ingested]]


@pytest.fixture
def put(database: Database, recording: Recording) -> Put:
    """`put(text, …)` ingests a source of Mara's; keyword arguments change the source or its surroundings."""

    async def write(
        content: str | bytes,
        *,
        principal: Principal = MARA,
        scope: str = "user",
        tags: tuple[str, ...] | None = None,
        embedder: Embedder | None = None,
        progress: Callable[[int, int], None] | None = None,
        also: Also | None = None,
        **fields: Any,
    ) -> Ingested:
        fields.setdefault("name", "README.md")
        fields.setdefault("source_id", fields["name"])
        return await ingest(
            Source(content=content, **fields),
            principal=principal,
            destination=destination_of(principal, scope=scope, tags=tags),
            database=database,
            embedder=embedder or recording,
            max_bytes=MAX_BYTES,
            progress=progress,
            also=also,
        )

    return write


def readme(**sections: str) -> str:
    """A README, which is cut at every `##`: one section, one chunk, whatever its size."""
    parts = [f"## {name.capitalize()}\n\n{text}" for name, text in sections.items()]
    return "\n\n".join(["# Guide", *parts]) + "\n"


ONE = "The harbour opens at six."
TWO = "The ferry leaves at seven."
THREE = "The kiosk sells coffee."


def chunks(superuser: str) -> list[dict[str, Any]]:
    return rows(superuser, "select * from rag.rag_chunks order by document_id, chunk_index")


def documents(superuser: str) -> list[dict[str, Any]]:
    return rows(superuser, "select * from rag.rag_documents order by created_at")


async def visible(database: Database, principal: Principal) -> int:
    """How many chunks the principal can reach through its documents."""
    async with database.transaction(principal, read_only=True) as session:
        hits = await session.rows("search", search_for("harbour ferry kiosk"))
    return len(hits)


def search_for(question: str) -> dict[str, Any]:
    return {
        "question": question,
        "embedding": None,
        "embedding_model": None,
        "top_k": 50,
        "scope": None,
        "document_ids": None,
        "min_similarity": None,
        "model_min_similarity": -1.0,
        "max_per_document": 50,
        "budget_tokens": None,
        "duplicate_threshold": 1.0,
        "duplicate_candidates": 50,
        "include_dropped": False,
        "arms": "keyword",
        "fusion": "rank",
        "only_verified": False,
        "only_domains": None,
        "only_doc_types": None,
        "only_source_types": None,
        "only_languages": None,
        "only_tags": None,
        "updated_from": None,
        "updated_before": None,
        "only_metadata": None,
        "feedback_boost": 0.0,
    }


# --- once, and again -----------------------------------------------------------------------------


async def test_a_new_source_is_created_with_a_chunk_for_each_section(put: Put, recording: Recording, superuser: str):
    ingested = await put(readme(one=ONE, two=TWO))
    assert (ingested.status, ingested.chunks, ingested.embedded) == ("created", 2, 2)
    assert [document["id"] for document in documents(superuser)] == [ingested.document_id]
    assert [chunk["chunk_text"] for chunk in chunks(superuser)] == [f"# Guide\n\n## One\n\n{ONE}", f"## Two\n\n{TWO}"]
    assert len(recording.texts) == 2
    assert half_documents(superuser) == []


async def test_the_same_source_again_embeds_nothing_and_touches_no_row(put: Put, recording: Recording, superuser: str):
    first = await put(readme(one=ONE, two=TWO))
    before, recording.texts = versions(superuser), []
    again = await put(readme(one=ONE, two=TWO))
    assert again == Ingested(document_id=first.document_id, status="unchanged", chunks=0, embedded=0, tokens=0)
    assert recording.texts == []
    assert versions(superuser) == before


async def test_an_edit_embeds_its_own_section_and_leaves_the_rows_in_front_of_it(
    put: Put, recording: Recording, superuser: str
):
    await put(readme(one=ONE, two=TWO, three=THREE))
    before, recording.texts = chunks(superuser), []
    edited = await put(readme(one=ONE, two=TWO, three="The kiosk sells tea."))
    after = chunks(superuser)
    assert (edited.status, edited.chunks, edited.embedded) == ("updated", 3, 1)
    assert [text.splitlines()[-1] for text in recording.texts] == ["The kiosk sells tea."]
    assert after[:2] == before[:2]
    assert after[2]["id"] != before[2]["id"]
    assert after[2]["chunk_text"] == "## Three\n\nThe kiosk sells tea."


async def test_sections_that_an_edit_pushes_down_keep_their_embeddings(put: Put, recording: Recording, superuser: str):
    await put(readme(one=ONE, two=TWO, three=THREE))
    mark = [0.0] * (DIMENSIONS - 1) + [1.0]  # what no model would make of them
    with psycopg.connect(superuser, autocommit=True) as connection:
        connection.execute("update rag.rag_chunks set embedding = %s::rag.halfvec", (str(mark),))
    before, recording.texts = chunks(superuser), []
    await put(readme(one=ONE, between="Dogs are welcome.", two=TWO, three=THREE))
    after = chunks(superuser)
    assert [text.splitlines()[-1] for text in recording.texts] == ["Dogs are welcome."]
    assert [chunk["chunk_index"] for chunk in after] == [0, 1, 2, 3]
    assert after[0] == before[0]
    assert [chunk["chunk_text"] for chunk in after[2:]] == [chunk["chunk_text"] for chunk in before[1:]]
    assert {chunk["embedding"] for chunk in after[2:]} == {before[0]["embedding"]}
    assert after[1]["embedding"] != before[0]["embedding"]
    assert not {chunk["id"] for chunk in after[1:]} & {chunk["id"] for chunk in before}
    assert half_documents(superuser) == []


async def test_sections_that_are_gone_take_their_chunks_with_them(put: Put, recording: Recording, superuser: str):
    await put(readme(one=ONE, two=TWO, three=THREE))
    recording.texts = []
    edited = await put(readme(one=ONE))
    assert (edited.status, edited.chunks, edited.embedded) == ("updated", 1, 0)
    assert [chunk["chunk_index"] for chunk in chunks(superuser)] == [0]
    assert recording.texts == []


async def test_a_metadata_edit_embeds_nothing_and_is_no_change_of_content(
    put: Put, recording: Recording, superuser: str
):
    await put(readme(one=ONE), metadata={"owner": "ops"})
    (before,), kept, recording.texts = documents(superuser), chunks(superuser), []
    edited = await put(readme(one=ONE), metadata={"owner": "hr"})
    (after,) = documents(superuser)
    assert (edited.status, edited.embedded) == ("updated", 0)
    assert after["metadata"] == {"owner": "hr"}
    assert after["updated_at"] > before["updated_at"]
    assert after["content_updated_at"] == before["content_updated_at"]
    assert chunks(superuser) == kept
    assert recording.texts == []


async def test_an_edit_of_the_body_is_a_change_of_content(put: Put, superuser: str):
    await put(readme(one=ONE))
    (before,) = documents(superuser)
    await put(readme(one=ONE, two=TWO))
    (after,) = documents(superuser)
    assert after["id"] == before["id"]
    assert after["content_updated_at"] > before["content_updated_at"]
    assert after["created_at"] == before["created_at"]


async def test_a_newer_time_of_the_source_alone_changes_nothing(put: Put, superuser: str):
    await put(readme(one=ONE), source_updated_at=datetime(2026, 1, 1, tzinfo=UTC))
    again = await put(readme(one=ONE), source_updated_at=datetime(2026, 2, 2, tzinfo=UTC))
    assert again.status == "unchanged"


async def test_a_title_that_the_caller_gives_is_embedded_and_searched(put: Put, recording: Recording, superuser: str):
    await put("Open from six.", name="hours.txt", title="Kestrel kiosk", language="en")
    assert recording.texts == ["Kestrel kiosk\n\nOpen from six."]
    assert documents(superuser)[0]["title"] == "Kestrel kiosk"
    assert rows(superuser, "select tsv @@ 'kestrel'::tsquery as found from rag.rag_chunks") == [{"found": True}]


async def test_another_title_embeds_all_again(put: Put, recording: Recording, superuser: str):
    await put("Open from six.", name="hours.txt", title="Kestrel kiosk")
    recording.texts = []
    edited = await put("Open from six.", name="hours.txt", title="Puffin kiosk")
    assert (edited.status, edited.embedded) == ("updated", 1)
    assert recording.texts == ["Puffin kiosk\n\nOpen from six."]


async def test_another_embedding_model_embeds_all_again(put: Put, recording: Recording, superuser: str):
    first = await put(readme(one=ONE, two=TWO))
    other = Recording(recording._real, model_id="other/model")
    switched = await put(readme(one=ONE, two=TWO), embedder=other)
    assert (switched.status, switched.embedded, switched.document_id) == ("updated", 2, first.document_id)
    assert len(other.texts) == 2
    assert {chunk["embedding_model"] for chunk in chunks(superuser)} == {"other/model"}


async def test_progress_counts_the_chunks_that_are_embedded(put: Put):
    said: list[tuple[int, int]] = []
    await put(readme(one=ONE, two=TWO, three=THREE), progress=lambda done, total: said.append((done, total)))
    assert said[-1] == (3, 3)
    assert said == sorted(said)


async def test_the_same_text_twice_in_a_document_is_embedded_once(put: Put, recording: Recording, superuser: str):
    ingested = await put("# Guide\n\n## One\n\nSame.\n\n## Two\n\nx\n\n## Two\n\nx\n")
    assert (ingested.chunks, ingested.embedded, len(recording.texts)) == (3, 2, 2)
    assert half_documents(superuser) == []


async def test_a_document_may_have_more_chunks_than_one_statement_writes(put: Put, embedder: Embedder, superuser: str):
    many = {f"part{number}": f"Number {number}." for number in range(1200)}
    ingested = await put(readme(**many), embedder=Constant(embedder, unit(0)))
    assert ingested.chunks == 1200
    assert half_documents(superuser) == []


def unit(axis: int) -> list[float]:
    return [float(number == axis) for number in range(DIMENSIONS)]


# --- whose it is ---------------------------------------------------------------------------------


async def test_other_tags_move_the_document_and_leave_no_copy(
    put: Put, database: Database, recording: Recording, superuser: str
):
    first = await put(readme(one=ONE, two=TWO), principal=BOTH_TAGS, tags=("public",))
    (before,), recording.texts = documents(superuser), []
    assert await visible(database, MARA) == 2
    moved = await put(readme(one=ONE, two=TWO), principal=BOTH_TAGS, tags=("hr",))
    assert (moved.status, moved.document_id, moved.embedded) == ("moved", first.document_id, 0)
    assert recording.texts == []
    assert await visible(database, MARA) == 0
    assert await visible(database, BOTH_TAGS) == 2
    (after,) = documents(superuser)
    assert after["tags"] == ["hr"]
    assert after["access_id"] != before["access_id"]
    assert {chunk["access_id"] for chunk in chunks(superuser)} == {after["access_id"]}
    assert len(chunks(superuser)) == 2
    with pytest.raises(DocumentNotFound):
        await read_document(database, MARA, first.document_id)


async def test_a_move_is_no_change_of_content(put: Put, superuser: str):
    await put(readme(one=ONE), principal=BOTH_TAGS, tags=("public",))
    (before,) = documents(superuser)
    await put(readme(one=ONE), principal=BOTH_TAGS, tags=("hr",))
    (after,) = documents(superuser)
    assert after["created_at"] == before["created_at"]
    assert after["content_updated_at"] == before["content_updated_at"]
    assert after["updated_at"] > before["updated_at"]


async def test_a_move_with_an_edit_is_a_change_of_content_and_embeds_the_edit(
    put: Put, recording: Recording, superuser: str
):
    await put(readme(one=ONE, two=TWO), principal=BOTH_TAGS, tags=("public",))
    (before,), recording.texts = documents(superuser), []
    moved = await put(readme(one=ONE, two=THREE), principal=BOTH_TAGS, tags=("hr", "public"))
    (after,) = documents(superuser)
    assert (moved.status, moved.embedded) == ("moved", 1)
    assert [text.splitlines()[-1] for text in recording.texts] == [THREE]
    assert after["content_updated_at"] > before["content_updated_at"]
    assert after["created_at"] == before["created_at"]
    assert half_documents(superuser) == []


async def test_copies_under_tags_that_did_not_see_each_other_become_one(put: Put, database: Database, superuser: str):
    hr = Principal(tenant_id="acme", user_id=7, tags=("hr",))
    await put(readme(one=ONE), tags=("public",))
    newer = await put(readme(one=TWO), principal=hr, tags=("hr",))
    assert len(documents(superuser)) == 2
    joined = await put(readme(one=TWO), principal=BOTH_TAGS, tags=("hr",))
    assert joined.document_id == newer.document_id
    assert [document["tags"] for document in documents(superuser)] == [["hr"]]
    assert await visible(database, MARA) == 0


async def test_one_source_in_each_scope_is_a_document_of_its_own(put: Put, database: Database, superuser: str):
    orion = Principal(tenant_id="acme", user_id=7, project_id="orion")
    mine = await put(readme(one=ONE), principal=orion, scope="user")
    ours = await put(readme(one=ONE), principal=orion, scope="project")
    all_of_us = await put(readme(one=ONE), principal=orion, scope="public")
    assert [one.status for one in (mine, ours, all_of_us)] == ["created"] * 3
    assert len({mine.document_id, ours.document_id, all_of_us.document_id}) == 3

    edited = await put(readme(one=ONE, two=TWO), principal=orion, scope="project")
    assert edited.document_id == ours.document_id
    counts = "select scope, count(*) from rag.rag_chunks join rag.rag_documents as d on d.id = document_id group by 1"
    assert {row["scope"]: row["count"] for row in rows(superuser, counts)} == {"user": 1, "project": 2, "public": 1}
    assert await visible(database, orion) == 4
    assert await visible(database, Principal(tenant_id="acme", user_id=7, project_id="lyra")) == 2
    assert await visible(database, Principal(tenant_id="acme", user_id=8, project_id="orion")) == 1
    assert await visible(database, Principal(tenant_id="other", user_id=7, project_id="orion")) == 0


async def test_the_same_file_of_two_people_is_two_documents(put: Put, database: Database):
    ilse = Principal(tenant_id="acme", user_id=8)
    mine, hers = await put(readme(one=ONE)), await put(readme(one=ONE, two=TWO), principal=ilse)
    assert hers.status == "created"
    assert hers.document_id != mine.document_id
    assert await visible(database, MARA) == 1
    assert await visible(database, ilse) == 2


async def test_who_may_not_write_there_is_told_before_anything_is_embedded(
    put: Put, deployment: Deployment, recording: Recording, superuser: str
):
    async with Database(deployment.url("rag_app"), signer=SIGNER) as without_publisher:
        with pytest.raises(ScopeForbidden, match="rag_publisher"):
            await ingest(
                Source(name="README.md", source_id="README.md", content=readme(one=ONE)),
                principal=MARA,
                destination=Destination(scope="public"),
                database=without_publisher,
                embedder=recording,
                max_bytes=MAX_BYTES,
            )
        with pytest.raises(ScopeForbidden):
            await ingest(
                Source(name="README.md", source_id="README.md", content=readme(one=ONE)),
                principal=MARA,
                destination=Destination(scope="user", user_id=8),
                database=without_publisher,
                embedder=recording,
                max_bytes=MAX_BYTES,
            )
    with pytest.raises(ScopeForbidden):
        await put(readme(one=ONE), tags=("hr",))
    assert recording.texts == []
    assert documents(superuser) == []


# --- what is stored of a text --------------------------------------------------------------------


async def test_a_chunk_is_its_slice_of_the_body_whatever_the_script(put: Put, superuser: str):
    text = readme(one="Fähre 🚢 nach Ærø.\r\nZweite Zeile.", two="Паром 🛳️ в порт.", three="渡し船は七時に出ます。")
    await put(text.encode("utf-8-sig"))
    (document,) = documents(superuser)
    for chunk in chunks(superuser):
        assert chunk["chunk_text"] == document["body"][chunk["start_offset"] : chunk["end_offset"]]
    assert half_documents(superuser) == []
    assert "\r" not in document["body"]
    assert document["body"].startswith("# Guide")


async def test_a_chunk_carries_its_counts(put: Put, superuser: str):
    await put("Ferries sail. Ferries return.", name="note.txt", language="en")
    (chunk,) = chunks(superuser)
    # note, ferri twice, sail, return
    assert chunk["lexeme_count"] == 5
    # [CLS] ferries sail . ferries return . [SEP]
    assert (chunk["token_count"], chunk["token_counter"]) == (8, "minilm-wordpiece")


@pytest.mark.parametrize(
    ("text", "language", "lexemes"),
    [
        # Snowball's stems: the plural of Haus loses its umlaut, Hafen its ending.
        (
            "Die Häuser am Hafen werden im Winter nicht geheizt, weil niemand darin wohnt.",
            "de",
            {"haus", "haf", "wint"},
        ),
        ("Паромы отходят от причала каждый час, кроме воскресенья и праздничных дней.", "ru", {"паром", "прича"}),
        ("The ferries were leaving the harbour every hour, except on Sundays.", "en", {"ferri", "leav", "hour"}),
    ],
)
async def test_the_language_of_a_text_decides_how_its_words_are_stemmed(
    put: Put, superuser: str, text: str, language: str, lexemes: set[str]
):
    pytest.importorskip("py3langid", reason="the extra `lang` is not installed")
    await put(text, name="note.txt")
    assert documents(superuser)[0]["language"] == language
    (chunk,) = rows(superuser, "select language, tsvector_to_array(tsv) as lexemes from rag.rag_chunks")
    assert chunk["language"] == language
    assert lexemes <= set(chunk["lexemes"])


async def test_the_language_that_is_given_counts_before_what_the_text_declares_and_seems(put: Put, superuser: str):
    front = "---\nlanguage: de\n---\nThe ferries were leaving the harbour every hour, except on Sundays.\n"
    await put(front, name="a.md")
    await put(front, name="b.md", language="fr")
    assert [document["language"] for document in documents(superuser)] == ["de", "fr"]


async def test_another_language_makes_the_words_anew_and_keeps_the_embeddings(
    put: Put, recording: Recording, superuser: str
):
    await put("Die Fähren im Hafen", name="note.txt", language="en")
    recording.texts = []
    edited = await put("Die Fähren im Hafen", name="note.txt", language="de")
    assert (edited.status, edited.embedded) == ("updated", 0)
    (chunk,) = rows(superuser, "select language, tsvector_to_array(tsv) as lexemes from rag.rag_chunks")
    # `die` and `im` are stop words of German only.
    assert chunk == {"language": "de", "lexemes": ["fahr", "haf", "not"]}


async def test_a_chunk_of_markdown_knows_its_section(put: Put, superuser: str):
    await put(readme(one=ONE, two=f"{TWO}\n\n### Night\n\n{THREE}"))
    assert [chunk["section"] for chunk in chunks(superuser)] == ["Guide > One", "Guide > Two"]


async def test_a_project_specification_stays_whole(put: Put, superuser: str):
    content = (SAMPLE / "projects/orion/.project-spec.yaml").read_bytes()
    await put(content, name="projects/orion/.project-spec.yaml")
    (document,) = documents(superuser)
    assert document["source_type"] == "project_spec"
    assert yaml.safe_load(document["body"])["project"] == "orion"
    assert half_documents(superuser) == []


async def test_a_chunk_of_a_pdf_knows_its_page(put: Put, superuser: str):
    await put((SAMPLE / "safety/deck-safety.pdf").read_bytes(), name="safety/deck-safety.pdf")
    stored = chunks(superuser)
    assert documents(superuser)[0]["source_type"] == "pdf"
    assert {chunk["page_number"] for chunk in stored if "17 m/s" in chunk["chunk_text"]} == {3}
    assert min(chunk["page_number"] for chunk in stored) == 1
    assert half_documents(superuser) == []


async def test_what_the_caller_says_of_a_source_is_stored(put: Put, superuser: str):
    await put(
        "---\nowner: ops\nreviewed: true\n---\nText.\n",
        name="a.md",
        source_id="wiki/17",
        source_type="wiki",
        source_uri="https://wiki.example/17",
        domain="harbour",
        doc_type="page",
        provenance_id="p1",
        task_id="t1",
        verified=True,
        metadata={"owner": "hr", "list": [1, {"a": None}]},
    )
    (document,) = documents(superuser)
    assert {
        name: document[name]
        for name in ("source_id", "source_type", "source_uri", "domain", "doc_type", "provenance_id", "task_id")
    } == {
        "source_id": "wiki/17",
        "source_type": "wiki",
        "source_uri": "https://wiki.example/17",
        "domain": "harbour",
        "doc_type": "page",
        "provenance_id": "p1",
        "task_id": "t1",
    }
    assert document["verified"] is True
    assert document["metadata"] == {"owner": "hr", "reviewed": True, "list": [1, {"a": None}]}


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"source_id": ""}, "source_id"),
        ({"source_id": "x" * 513}, "source_id"),
        ({"source_id": "é" * 257}, "source_id"),
        ({"source_id": "a\nb"}, "source_id"),
        ({"source_id": "a\ud800"}, "source_id"),
        ({"source_type": "x" * 65}, "source_type"),
        ({"source_uri": "x" * 2049}, "source_uri"),
        ({"title": "two\nlines"}, "title"),
        ({"title": ""}, "title"),
        ({"language": "not a code"}, "language"),
        ({"domain": "x" * 129}, "domain"),
        ({"doc_type": "\x00"}, "doc_type"),
        ({"provenance_id": "x" * 257}, "provenance_id"),
        ({"task_id": " x"}, "task_id"),
        ({"metadata": {"a": "x" * 65_536}}, "metadata"),
        ({"metadata": {"a": math.nan}}, "metadata"),
        ({"metadata": {"a": math.inf}}, "metadata"),
        ({"metadata": {"a": "nul \0"}}, "metadata"),
        ({"metadata": {"half \udc80": 1}}, "metadata"),
        ({"metadata": {"a": {1, 2}}}, "metadata"),
        ({"metadata": {1: "a", "1": "b"}}, "metadata"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_field_that_no_column_takes_is_refused_by_its_name(fields: dict[str, Any], field: str):
    with pytest.raises(InvalidInput) as refused:
        check_source(Source(**{"name": "README.md", "source_id": "README.md", "content": ONE} | fields))
    assert refused.value.field == field


async def test_a_field_at_its_limit_is_stored(put: Put, superuser: str):
    limits = {
        "source_id": 512,
        "source_type": 64,
        "source_uri": 2048,
        "title": 512,
        "domain": 128,
        "doc_type": 128,
        "provenance_id": 256,
        "task_id": 256,
    }
    await put(readme(one=ONE), **{name: "x" * limit for name, limit in limits.items()})
    (document,) = documents(superuser)
    assert {name: len(document[name]) for name in limits} == limits


async def test_a_refused_field_costs_no_embedding(put: Put, recording: Recording, superuser: str):
    with pytest.raises(InvalidInput):
        await put(readme(one=ONE), title="two\nlines")
    assert recording.texts == []
    assert documents(superuser) == []


def test_metadata_may_be_sixteen_levels_deep_and_no_deeper():
    deep: dict[str, Any] = {"level 16": 1}
    for level in range(15, 0, -1):
        deep = {f"level {level}": deep}
    check_metadata(deep)
    with pytest.raises(InvalidInput, match="16 levels"):
        check_metadata({"level 0": deep})
    with pytest.raises(InvalidInput, match="16 levels"):
        check_metadata({"level 0": [deep]})


def test_metadata_that_is_deeper_than_the_stack_is_refused():
    endless: dict[str, Any] = {}
    for _ in range(100_000):
        endless = {"a": endless}
    with pytest.raises(InvalidInput) as refused:
        check_metadata(endless)
    assert refused.value.field == "metadata"


@pytest.mark.parametrize(
    ("content", "name", "error"),
    [
        (b"", "a.md", EmptyDocument),
        ("  \n\t ", "a.md", EmptyDocument),
        ("x" * (MAX_BYTES + 1), "a.md", DocumentTooLarge),
        ("half a pair: \ud800", "a.md", InvalidInput),
        (b"nul: \0", "a.md", InvalidInput),
        (b"latin 1: \xe9", "a.md", InvalidInput),
        (b"text", "a.docx", InvalidInput),
        (b"%PDF-1.7 broken", "a.pdf", InvalidInput),
    ],
    ids=["empty", "blank", "large", "surrogate", "nul", "encoding", "suffix", "pdf"],
)
async def test_a_version_that_cannot_be_read_leaves_the_one_before(
    put: Put, superuser: str, content: str | bytes, name: str, error: type[Exception]
):
    await put(readme(one=ONE), name="README.md", source_id="the source", source_type="readme")
    before = versions(superuser)
    with pytest.raises(error):
        await put(content, name=name, source_id="the source", source_type="readme")
    assert versions(superuser) == before


# --- embedders that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("wrong_count", EmbeddingInvalid),
        ("wrong_dimension", EmbeddingInvalid),
        ("nan", EmbeddingInvalid),
        ("zeros", EmbeddingInvalid),
        ("duplicate_index", EmbeddingInvalid),
        ("insufficient_quota", EmbeddingUnavailable),
        ("hang", EmbeddingTimeout),
    ],
)
async def test_a_provider_that_fails_leaves_the_version_before(
    put: Put, superuser: str, fault: str, error: type[Exception]
):
    with fake_openai() as fake:
        provider = open_embedder(
            Settings(
                _env_file=None,
                rag_embedding_provider="openai",
                openai_base_url=fake.base_url,
                openai_api_key=fake.api_key,
                rag_embedding_timeout_seconds=0.5 if fault == "hang" else 30.0,
            )
        )
        await put(readme(one=ONE), embedder=provider)
        before, fake.fault = versions(superuser), fault
        with pytest.raises(error):
            await put(readme(one=TWO, two=THREE), embedder=provider)
        with pytest.raises(error):
            await put(readme(one=TWO, two=THREE), embedder=provider, source_id="another")
        assert versions(superuser) == before
        fake.fault = None
        assert (await put(readme(one=TWO, two=THREE), embedder=provider)).status == "updated"
        await provider.close()


@pytest.mark.parametrize(
    "vector",
    [[0.0] * DIMENSIONS, [math.nan, *unit(0)[1:]], [math.inf, *unit(0)[1:]], [1e6, *unit(0)[1:]], [1.0]],
    ids=["zeros", "nan", "infinity", "beyond half precision", "narrow"],
)
async def test_a_vector_that_got_past_every_check_is_not_stored(
    put: Put, embedder: Embedder, superuser: str, vector: list[float]
):
    await put(readme(one=ONE))
    before = versions(superuser)
    with pytest.raises((DatabaseError, InvalidInput, EmbeddingInvalid)):
        await put(readme(one=ONE, two=TWO), embedder=Constant(embedder, vector))
    assert versions(superuser) == before


# --- others at the same time ---------------------------------------------------------------------


async def test_ten_identical_ingests_at_once_all_succeed_and_make_one_document(put: Put, superuser: str):
    done = await asyncio.gather(*(put(readme(one=ONE, two=TWO)) for _ in range(10)))
    assert sorted(one.status for one in done) == ["created", *["unchanged"] * 9]
    assert {one.document_id for one in done} == {documents(superuser)[0]["id"]}
    assert len(chunks(superuser)) == 2
    assert half_documents(superuser) == []


async def test_of_versions_that_race_one_is_stored_whole(put: Put, superuser: str):
    async def version(number: int) -> Ingested:
        return await put(readme(one=f"Version {number}.", two=f"Also {number}."))

    done = await asyncio.gather(*(version(number) for number in range(6)), return_exceptions=True)
    assert {type(one) for one in done} <= {Ingested, SourceOvertaken}
    assert len({one.document_id for one in done if isinstance(one, Ingested)}) == 1
    (document,) = documents(superuser)
    number = int(document["body"].split("Version ")[1][0])
    assert document["body"] == readme(one=f"Version {number}.", two=f"Also {number}.")
    assert half_documents(superuser) == []


async def test_only_a_page_of_text_is_read_where_requests_wait(
    put: Put, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    aside: list[object] = []
    in_thread = asyncio.to_thread

    async def noted(read: Callable[..., Any], *given: Any) -> Any:
        aside.append(read)
        return await in_thread(read, *given)

    language.detect(ONE + TWO)  # loads its model, for which the first text waits elsewhere
    monkeypatch.setattr(asyncio, "to_thread", noted)
    await put(ONE, source_id="a page")
    assert aside == []
    await put(ONE * (PAGE_SIZE // len(ONE) + 1), source_id="a book")
    assert len(aside) == 1
    # Unpacked, it may be anything.
    archive = tmp_path / "small.docx"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("word/document.xml", "<nothing/>")
    with pytest.raises(InvalidInput):
        await put(archive.read_bytes(), name="small.docx")
    assert len(aside) == 2
    monkeypatch.setattr(language, "is_loaded", lambda: False)
    await put(TWO, source_id="the first page")
    assert len(aside) == 3


async def test_what_is_told_of_an_unchanged_source_is_so_when_it_is_told(
    put: Put, superuser: str, monkeypatch: pytest.MonkeyPatch
):
    """Between the claim, which finds nothing to do, and the transaction that says so, somebody else may write."""
    look, told = store.look, []
    await put(ONE)

    async def look_after_another(*args: Any, **named: Any) -> store.Known:
        monkeypatch.undo()
        await put(TWO)
        return await look(*args, **named)

    async def also(_: object, done: Ingested) -> None:
        told.append(done.status)

    assert (await put(ONE, also=also)).status == "unchanged"
    monkeypatch.setattr(store, "look", look_after_another)
    assert (await put(ONE, also=also)).status == "updated"
    assert told == ["unchanged", "updated"]
    assert [row["chunk_text"] for row in chunks(superuser)] == [ONE]


async def test_what_is_told_of_an_unchanged_source_undoes_nothing_when_it_fails(put: Put, superuser: str):
    await put(ONE)

    async def also(_: object, __: Ingested) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        await put(ONE, also=also)
    # Nothing was claimed that another one would have to wait for.
    assert rows(superuser, "select * from rag.rag_claims") == []
    assert (await put(TWO)).status == "updated"


async def test_a_writer_that_lost_a_race_reads_again_and_wins(put: Put, recording: Recording, superuser: str):
    await put(readme(one=ONE))
    slow = Recording(recording._real)

    async def overtake() -> None:
        slow.meanwhile = None
        # As if the first one's claim had ended; with it, the second one would wait.
        execute(superuser, "delete from rag.rag_claims")
        await put(readme(one=TWO))

    slow.meanwhile = overtake
    assert (await put(readme(one=THREE), embedder=slow)).status == "updated"
    assert documents(superuser)[0]["body"] == readme(one=THREE)
    assert half_documents(superuser) == []


async def test_a_deletion_wins_over_an_ingest_that_is_embedding(
    put: Put, database: Database, recording: Recording, superuser: str
):
    first = await put(readme(one=ONE))

    async def delete() -> None:
        await remove_document(database, MARA, first.document_id, reason="a test")

    recording.meanwhile = delete
    with pytest.raises(SourceRetracted):
        await put(readme(one=ONE, two=TWO))
    assert documents(superuser) == []
    assert chunks(superuser) == []
    assert await visible(database, MARA) == 0


async def test_a_deletion_wins_over_an_ingest_that_moves_the_document(
    put: Put, database: Database, recording: Recording, superuser: str
):
    first = await put(readme(one=ONE), principal=BOTH_TAGS, tags=("public",))

    async def delete() -> None:
        await remove_document(database, BOTH_TAGS, first.document_id, reason="a test")

    recording.meanwhile = delete
    with pytest.raises(SourceRetracted):
        await put(readme(one=ONE, two=TWO), principal=BOTH_TAGS, tags=("hr",))
    assert documents(superuser) == []


async def test_what_was_deleted_can_be_ingested_again(put: Put, database: Database, superuser: str):
    first = await put(readme(one=ONE))
    await remove_document(database, MARA, first.document_id, reason="a test")
    again = await put(readme(one=ONE))
    assert again.status == "created"
    assert again.document_id != first.document_id
    assert await visible(database, MARA) == 1
    assert half_documents(superuser) == []


async def test_a_reader_sees_the_old_version_or_the_new_one_and_never_a_mix(
    put: Put, database: Database, embedder: Embedder, superuser: str
):
    def edition(number: int) -> str:
        # Sections come and go, so that chunks are kept, moved, added and removed.
        parts = {f"part{part}": f"Edition word{number} of this part." for part in range(3 + number % 3)}
        return readme(lasting="Edition of all years.", **parts)

    cheap = Constant(embedder, unit(0))
    await put(edition(0), embedder=cheap)
    finished = asyncio.Event()

    async def read() -> list[int]:
        seen: list[int] = []
        while not finished.is_set():
            async with database.transaction(MARA, read_only=True) as session:
                hits = await session.rows("search", search_for("edition"))
            texts = {hit["chunk_index"]: hit["chunk_text"] for hit in hits}
            number = int(texts[1].split("word")[1].split()[0])
            expected = {0: "# Guide\n\n## Lasting\n\nEdition of all years."}
            for part in range(3 + number % 3):
                expected[part + 1] = f"## Part{part}\n\nEdition word{number} of this part."
            assert texts == expected
            seen.append(number)
        return seen

    async def write() -> None:
        try:
            for number in range(1, 16):
                await put(edition(number), embedder=cheap)
        finally:
            finished.set()

    *readers, _ = await asyncio.gather(read(), read(), write())
    for seen in readers:
        assert seen == sorted(seen)
        assert set(seen) <= set(range(16))
    assert half_documents(superuser) == []


# --- a database that fails in the middle ---------------------------------------------------------


async def test_a_right_that_is_lost_in_the_middle_of_the_write_undoes_all_of_it(
    put: Put, recording: Recording, superuser: str
):
    await put(readme(one=ONE))
    before = versions(superuser)

    async def revoke() -> None:
        execute(superuser, "revoke insert on rag.rag_chunks from rag_app")

    recording.meanwhile = revoke
    with pytest.raises(ScopeForbidden):
        await put(readme(one=ONE, two=TWO))
    with pytest.raises(ScopeForbidden):
        await put(readme(one=ONE), source_id="another")
    assert versions(superuser) == before


async def test_a_chunk_that_the_database_refuses_undoes_all_of_it(put: Put, superuser: str):
    await put(readme(one=ONE))
    before = versions(superuser)
    execute(
        superuser,
        "alter table rag.rag_chunks add constraint no_kiosk check (chunk_text not like '%kiosk%') not valid",
    )
    with pytest.raises(DatabaseError) as failed:
        await put(readme(one=TWO, two=THREE))
    assert "kiosk" not in failed.value.message
    assert versions(superuser) == before


async def test_a_connection_that_is_cut_in_the_middle_of_the_write_undoes_all_of_it(put: Put, superuser: str):
    await put(readme(one=ONE))
    before = versions(superuser)
    with psycopg.connect(superuser) as blocker:
        # The document is updated, and the chunks wait.
        blocker.execute("lock table rag.rag_chunks in share mode")
        writing = asyncio.create_task(put(readme(one=ONE, two=TWO)))
        process = await asyncio.to_thread(blocked_process, superuser)
        rows(superuser, "select pg_terminate_backend(%s)", (process,))
        with pytest.raises(DatabaseUnavailable):
            await writing
    assert versions(superuser) == before
    assert (await put(readme(one=ONE, two=TWO))).status == "updated"
    assert half_documents(superuser) == []


async def test_a_caller_that_gives_up_in_the_middle_of_the_write_undoes_all_of_it(put: Put, superuser: str):
    await put(readme(one=ONE))
    before = versions(superuser)
    with psycopg.connect(superuser) as blocker:
        blocker.execute("lock table rag.rag_chunks in share mode")
        writing = asyncio.create_task(put(readme(one=ONE, two=TWO)))
        await asyncio.to_thread(blocked_process, superuser)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert rows(superuser, WAITING) == []
    assert versions(superuser) == before


WAITING = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


def blocked_process(superuser: str) -> int:
    """The server process that waits for a lock, as soon as there is one."""
    while not (found := rows(superuser, WAITING)):
        time.sleep(0.01)
    return found[0]["pid"]


def execute(superuser: str, statement: str) -> None:
    """Run a statement that returns no rows."""
    with psycopg.connect(superuser, autocommit=True) as connection:
        connection.execute(statement)
