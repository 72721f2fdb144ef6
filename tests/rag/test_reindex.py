"""Documents are cut anew from what is stored: as an ingest would, and nothing else is touched."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rag import store
from rag.chunk import Strategy
from rag.database import Database
from rag.errors import EmbeddingUnavailable, SourceRetracted
from rag.ingest import Ingested, Origin, Source, ingest
from rag.principal import Principal
from rag.reindex import Outcome, Reindexer
from rag.store import Destination, destination_of
from tests.conftest import Deployment
from tests.rag.quick_embedder import QuickEmbedder
from tests.rag.stored import content, half_documents, rows
from tests.rag.test_cli import Rag, named, rag
from tests.rag.test_gather import write

__all__ = ["named", "rag"]

MARA = Principal(tenant_id="acme", user_id=7)
ILSE = Principal(tenant_id="acme", user_id=8)
MINE = Destination(scope="user", user_id=7)
PAGE = "# Harbour\n\n" + "\n\n".join(
    f"## Quay {number}\n\n" + f"The crane of quay {number} lifts forty tons and rests on Sunday. " * 12
    for number in range(1, 6)
)
LOG = "\n\n".join(f"Entry {number}. " + "The tide came in and went out again. " * 10 for number in range(1, 8))
SPEC = "title: orion\n" + "".join(
    f"part_{number}: a value that says something about {number}\n" for number in range(80)
)
TABLE = "name,tons\n" + "".join(f"crane {number},{number}\n" for number in range(1, 60))


async def put(
    database: Database,
    embedder: QuickEmbedder,
    *,
    content: bytes | str = PAGE,
    chunking: Strategy = "rules",
    principal: Principal = MARA,
    destination: Destination = MINE,
    **described: Any,
) -> Ingested:
    described = {"name": "page.md", "source_id": "page.md"} | described
    return await ingest(
        Source(content=content, **described),
        principal=principal,
        destination=destination,
        database=database,
        embedder=embedder,
        max_bytes=1_000_000,
        chunking=chunking,
    )


async def cut_anew(
    database: Database,
    embedder: QuickEmbedder,
    chunking: Strategy = "fixed",
    principal: Principal = MARA,
    **options: Any,
) -> Outcome:
    per_minute = options.pop("per_minute", None)
    reindexer = Reindexer(database=database, embedder=embedder, chunking=chunking, per_minute=per_minute)
    return await reindexer.reindex(principal, **options)


def chunks_of(deployment: Deployment) -> list[Mapping[str, Any]]:
    return rows(
        deployment.url("postgres"),
        "select document_id, chunk_index, id, chunk_text, chunk_hash, section, tsv::text, embedding_model"
        " from rag.rag_chunks order by document_id, chunk_index",
    )


# What can be proved: the digest tells in which form the text came.
ARRIVALS: Mapping[str, dict[str, Any]] = {
    "a file": {"content": PAGE.encode()},
    "a file of a source": {
        "source_id": "handbook:docs/page.md",
        "name": "docs/page.md",
        "origin": Origin(source="handbook", path="docs/page.md", version="abc"),
    },
    "with a title and a language": {"title": "Named", "language": "de", "content": PAGE.encode()},
    "a request without a suffix": {"name": "notes.md", "source_id": "notes"},
    "a request of plain text": {"name": "notes.txt", "source_id": "notes", "content": LOG},
    "plain text": {"name": "log.txt", "source_id": "log.txt", "content": LOG},
    "a part": {"name": "log.txt", "source_id": "log.txt//3", "title": "log, part 3", "content": LOG},
    "YAML": {"name": "orion.yaml", "source_id": "orion.yaml", "content": SPEC},
    "metadata": {"metadata": {"team": "ops"}, "domain": "port", "doc_type": "manual", "task_id": "t", "verified": True},
    "a type of its own": {"source_type": "manual", "provenance_id": "p"},
}


@pytest.mark.parametrize(
    ("arrival", "chunking"),
    # Lines of YAML have no sentences: the others cut them alike.
    [
        (name, chunking)
        for name in ARRIVALS
        for chunking in ("fixed", "sentence", "semantic")[: 1 if name == "YAML" else 3]
    ],
)
async def test_what_is_cut_anew_is_what_an_ingest_would_store(
    database: Database, deployment: Deployment, arrival: str, chunking: Strategy
):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    first = await put(database, embedder, **ARRIVALS[arrival])
    outcome = await cut_anew(database, embedder, chunking)
    assert (outcome.documents, outcome.unchanged, outcome.kept, outcome.failures) == (1, 0, [], [])
    assert [each.document_id for each in outcome.recut] == [first.document_id]
    cut = content(deployment.url("postgres"), user_id=7)
    assert half_documents(deployment.url("postgres")) == []

    # The same again has nothing to do, whoever does it.
    before = list(embedder.texts)
    assert (await cut_anew(database, embedder, chunking)).unchanged == 1
    again = await put(database, embedder, chunking=chunking, **ARRIVALS[arrival])
    assert (again.status, again.document_id) == ("unchanged", first.document_id)
    if chunking != "semantic":
        assert embedder.texts == before

    # And from nothing the same is stored.
    await store.remove_document(database, MARA, first.document_id, reason="deleted")
    await put(database, embedder, chunking=chunking, **ARRIVALS[arrival])
    assert content(deployment.url("postgres"), user_id=7) == cut

    # Back to what it was, an ingest sees that it is not.
    back = await put(database, embedder, **ARRIVALS[arrival])
    assert back.status == "updated"


# What cannot be proved: parsing took something off, and the body does not say what.
TAKEN_OFF: Mapping[str, bytes] = {
    "front matter": b"---\nowner: mara\n---\n" + PAGE.encode(),
    "line ends": PAGE.replace("\n", "\r\n").encode(),
    "a byte order mark": b"\xef\xbb\xbf" + PAGE.encode(),
}


@pytest.mark.parametrize("case", TAKEN_OFF)
async def test_a_text_that_came_in_another_form_is_read_again_by_the_next_ingest_and_embedded_never(
    database: Database, deployment: Deployment, case: str
):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    source = {"content": TAKEN_OFF[case]}
    await put(database, embedder, **source)
    assert len((await cut_anew(database, embedder)).recut) == 1
    present = chunks_of(deployment)
    # Neither with the settings of now nor with those of then it passes for the same.
    again = await put(database, embedder, chunking="fixed", **source)
    assert (again.status, again.embedded) == ("updated", 0)
    assert chunks_of(deployment) == present
    await cut_anew(database, embedder, "sentence")
    assert (await put(database, embedder, chunking="fixed", **source)).status == "updated"


async def test_a_smaller_input_limit_cuts_anew_and_what_stays_keeps_its_vector(
    database: Database, deployment: Deployment
):
    embedder = QuickEmbedder()
    mixed = (
        "# A\n\nA short one.\n\n## B\n\n" + "A crane lifts forty tons and rests on Sunday. " * 30 + "\n\n## C\n\nEnd.\n"
    )
    await put(database, embedder, content=mixed)
    wide = {row["chunk_hash"] for row in chunks_of(deployment)}
    narrow = QuickEmbedder()
    narrow.max_input_tokens = 100
    outcome = await cut_anew(database, narrow, "rules")
    now = {row["chunk_hash"] for row in chunks_of(deployment)}
    assert outcome.recut[0].embedded == len(narrow.texts) == len(now - wide) > 0
    assert (await put(database, narrow, content=mixed)).status == "unchanged"


async def test_a_dry_run_says_what_would_be_done_and_does_nothing(database: Database, deployment: Deployment):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    await put(database, embedder)
    await put(database, embedder, name="log.txt", source_id="log.txt", content=LOG)
    present, stored = chunks_of(deployment), content(deployment.url("postgres"), user_id=7)
    embedder.texts.clear()
    said = await cut_anew(database, embedder, dry_run=True)
    assert (chunks_of(deployment), content(deployment.url("postgres"), user_id=7), embedder.texts) == (
        present,
        stored,
        [],
    )
    done = await cut_anew(database, embedder)
    assert said == done
    assert [each.source_id for each in done.recut] == ["log.txt", "page.md"]
    assert sum(each.embedded for each in done.recut) == len(embedder.texts)
    assert (await cut_anew(database, embedder, dry_run=True)).recut == []


async def test_words_are_taken_anew_when_the_database_takes_them_otherwise(database: Database, deployment: Deployment):
    embedder = QuickEmbedder()
    await put(database, embedder, language="en")
    right = chunks_of(deployment)
    # As if another configuration had been in force: the owner's word, since nobody of the service updates a chunk.
    rows(
        deployment.url("postgres"),
        "update rag.rag_chunks set tsv = to_tsvector('simple', chunk_text) where chunk_index = 1 returning 1",
    )
    embedder.texts.clear()
    outcome = await cut_anew(database, embedder, "rules")
    assert [(each.words, each.embedded, each.before) for each in outcome.recut] == [(1, 0, len(right))]
    assert embedder.texts == []
    mended = chunks_of(deployment)
    assert [row["tsv"] for row in mended] == [row["tsv"] for row in right]
    kept = {row["id"] for row in right} & {row["id"] for row in mended}
    assert len(kept) == len(right) - 1
    assert (await put(database, embedder, language="en")).status == "unchanged"


async def test_what_the_body_does_not_tell_is_kept_and_named(database: Database, deployment: Deployment):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    page = "<html><body><h1>Harbour</h1>" + "".join(f"<p>{line}</p>" for line in LOG.split("\n\n")) + "</body></html>"
    await put(database, embedder, content=page.encode(), name="page.html", source_id="page.html")
    await put(
        database,
        embedder,
        content=TABLE,
        name="cranes.csv",
        source_id="handbook:cranes.csv",
        origin=Origin(source="handbook", path="cranes.csv"),
    )
    # The type says nothing of how it was read, and no digest proves that it was Markdown.
    await put(database, embedder, content=page, name="notes.html", source_id="notes", source_type="manual")
    present = chunks_of(deployment)
    outcome = await cut_anew(database, embedder)
    assert (outcome.documents, outcome.recut, outcome.unchanged, outcome.failures) == (3, [], 0, [])
    assert {(left.source_id, left.reason.partition(":")[0], left.source) for left in outcome.kept} == {
        ("page.html", "html", None),
        ("handbook:cranes.csv", "csv", "handbook"),
        ("notes", "its format is not known", None),
    }
    assert chunks_of(deployment) == present


async def test_nobody_cuts_what_they_may_not_write(deployment: Deployment):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    theirs = Principal(tenant_id="acme", user_id=8, project_id="read")
    shared = Principal(tenant_id="acme", user_id=8, project_id="write")
    everybody = Destination(scope="public")
    other = Principal(tenant_id="other", user_id=7)
    secret = Principal(tenant_id="acme", user_id=7, tags=("hr",))
    async with deployment.pools() as database:
        for who, where in (
            (MARA, MINE),
            (ILSE, destination_of(ILSE, scope="user")),
            (theirs, destination_of(theirs, scope="project")),
            (shared, destination_of(shared, scope="project")),
            (other, destination_of(other, scope="user")),
            (secret, destination_of(secret, scope="user")),
            (MARA, everybody),
        ):
            await put(database, embedder, principal=who, destination=where)
        for project, may_write in (("read", False), ("write", True)):
            rows(
                deployment.url("postgres"),
                "insert into rag.rag_project_members (tenant_id, owner_user_id, project_id, member_user_id, may_write)"
                f" values ('acme', 8, '{project}', 7, {may_write}) returning 1",
            )
        before = {row["id"] for row in chunks_of(deployment)}
        member = Principal(tenant_id="acme", user_id=7, project_id="*")
        outcome = await cut_anew(database, embedder, principal=member)
        assert (outcome.documents, len(outcome.recut), outcome.failures) == (3, 3, [])
    touched = rows(
        deployment.url("postgres"),
        "select distinct scope, user_id, project_id, tags from rag.rag_documents as document"
        " join rag.rag_chunks as chunk on chunk.document_id = document.id"
        " where not chunk.id = any(array[" + ",".join(f"'{each}'::uuid" for each in before) + "])"
        " order by scope",
    )
    assert [tuple(row.values()) for row in touched] == [
        ("project", 8, "write", ["public"]),
        ("public", None, None, ["public"]),
        ("user", 7, None, ["public"]),
    ]


async def test_a_run_that_breaks_off_leaves_whole_documents_and_the_next_one_goes_on(
    database: Database, deployment: Deployment
):
    calls = 0

    async def fails_at_the_third() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise EmbeddingUnavailable("the model is gone")

    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    for number in range(5):
        await put(
            database, embedder, source_id=f"page{number}.md", name=f"page{number}.md", content=f"{PAGE}\n{number}"
        )
    broken = QuickEmbedder(fails_at_the_third)
    broken.max_input_tokens = 60
    with pytest.raises(EmbeddingUnavailable):
        await cut_anew(database, broken)
    assert half_documents(deployment.url("postgres")) == []
    embedder.texts.clear()
    rest = await cut_anew(database, embedder)
    assert (len(rest.recut), rest.unchanged) == (3, 2)
    assert len(embedder.texts) == sum(each.embedded for each in rest.recut)


async def test_what_is_written_meanwhile_stays(database: Database, deployment: Deployment):
    writer = QuickEmbedder()
    writer.max_input_tokens = 60
    first = await put(database, writer)
    once = iter([None])

    async def others_write() -> None:
        if next(once, first) is None:
            await put(database, writer, content="# Harbour\n\nIt is closed.")

    meanwhile = QuickEmbedder(others_write)
    meanwhile.max_input_tokens = 60
    outcome = await cut_anew(database, meanwhile)
    assert outcome.failures == []
    row = await store.read_document(database, MARA, first.document_id)
    assert (row["body"], row["chunk_count"]) == ("# Harbour\n\nIt is closed.", 1)
    # Its text is what Ilse's citations of it are compared with: cutting is no change of it.
    await put(database, writer)
    changed_at = (await store.read_document(database, MARA, first.document_id))["content_updated_at"]
    assert len((await cut_anew(database, writer)).recut) == 1
    row = await store.read_document(database, MARA, first.document_id)
    assert (row["content_updated_at"], row["updated_at"] > changed_at) == (changed_at, True)


async def test_what_is_deleted_meanwhile_does_not_come_back(database: Database, deployment: Deployment):
    writer = QuickEmbedder()
    writer.max_input_tokens = 60
    first = await put(database, writer)

    async def it_is_deleted() -> None:
        await store.remove_document(database, MARA, first.document_id, reason="deleted")

    meanwhile = QuickEmbedder(it_is_deleted)
    meanwhile.max_input_tokens = 60
    outcome = await cut_anew(database, meanwhile)
    assert [left.reason for left in outcome.failures] == [SourceRetracted().message]
    assert chunks_of(deployment) == []


async def test_an_erased_owner_leaves_no_class_behind(database: Database, deployment: Deployment):
    writer = QuickEmbedder()
    writer.max_input_tokens = 60
    await put(database, writer)

    async def they_are_forgotten() -> None:
        def erase() -> None:
            rows(deployment.url("rag_operator"), "select * from rag.forget('acme', 7)")

        await asyncio.to_thread(erase)

    meanwhile = QuickEmbedder(they_are_forgotten)
    meanwhile.max_input_tokens = 60
    await cut_anew(database, meanwhile)
    assert rows(deployment.url("postgres"), "select 1 from rag.rag_access_classes") == []


async def test_readers_see_a_document_as_it_was_or_as_it_is(database: Database, deployment: Deployment):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    ids = [
        (await put(database, embedder, source_id=f"p{number}.md", name=f"p{number}.md")).document_id
        for number in range(8)
    ]
    whole = {tuple(row["chunk_index"] for row in chunks_of(deployment) if row["document_id"] == ids[0])}
    seen: set[tuple[int, ...]] = set()
    over = asyncio.Event()

    async def read() -> None:
        while not over.is_set():
            for document_id in ids:
                async with database.transaction(MARA, read_only=True) as session:
                    spans = await session.rows("chunk_spans", {"id": document_id})
                seen.add(tuple(row["chunk_index"] for row in spans))

    reader = asyncio.create_task(read())
    for chunking in ("fixed", "sentence", "rules"):
        await cut_anew(database, embedder, chunking)  # type: ignore[arg-type]
        whole.add(tuple(row["chunk_index"] for row in chunks_of(deployment) if row["document_id"] == ids[0]))
    over.set()
    await reader
    assert seen
    assert seen <= whole


async def test_a_rate_is_kept(database: Database):
    embedder = QuickEmbedder()
    embedder.max_input_tokens = 60
    for number in range(3):
        await put(database, embedder, source_id=f"p{number}.md", name=f"p{number}.md")
    began = time.monotonic()
    await cut_anew(database, embedder, per_minute=120)
    assert time.monotonic() - began >= 1.5
    began = time.monotonic()
    assert (await cut_anew(database, embedder, per_minute=1)).unchanged == 3
    assert time.monotonic() - began < 55


def test_the_command(rag: Rag, named: Deployment, monkeypatch: pytest.MonkeyPatch):
    as_mara = ("--user", "7", "--tenant", "acme")
    write(Path("docs"), a_md=PAGE, b_txt=LOG, c_csv=TABLE)
    assert rag("sync", "docs", "--name", "handbook", *as_mara).code == 0
    assert (
        rag("reindex", *as_mara).out.splitlines()[0]
        == "3 documents: 0 cut anew, 2 as they should be, 1 kept; 0 chunks embedded"
    )

    monkeypatch.setenv("RAG_CHUNKING", "sentence")
    dry = rag("reindex", "--dry-run", *as_mara)
    assert dry.code == 1
    assert "; nothing was changed" in dry.out
    done = rag("reindex", "--json", *as_mara)
    assert done.code == 0
    said = json.loads(done.out)
    assert [each["source_id"] for each in said["recut"]] == ["handbook:a.md", "handbook:b.txt"]
    assert [each["source"] for each in said["kept"]] == ["handbook"]
    assert done.err.splitlines()[-1] == "reindexing: 3/3"
    # What was cut anew the source need not send; what was kept it does.
    synchronised = rag("sync", "docs", "--name", "handbook", *as_mara)
    assert synchronised.out.splitlines()[0].split() == ["changed", "c.csv"]
    assert "1 changed, 2 unchanged" in synchronised.out
    assert rag("reindex", "--source", "handbook:a", "--dry-run", *as_mara).out.startswith(
        "1 document: 0 cut anew, 1 as"
    )
