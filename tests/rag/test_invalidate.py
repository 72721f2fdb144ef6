"""What is invalidated is gone, stays out until it is reinstated, and tells a stranger nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.database import Database
from rag.errors import InvalidInput, ScopeForbidden, SourceInvalidated, SourceRetracted
from rag.ingest import Ingested, Source, ingest
from rag.invalidate import Invalidated, Targets, invalidate, reinstate
from rag.principal import Principal
from rag.store import Destination, destination_of, remove_document
from tests.conftest import Deployment, begin
from tests.rag.quick_embedder import QuickEmbedder
from tests.rag.stored import half_documents, rows

MARA = Principal(tenant_id="acme", user_id=7)
ILSE = Principal(tenant_id="acme", user_id=8)
ORION = Principal(tenant_id="acme", user_id=7, project_id="orion")
STRANGER = Principal(tenant_id="other", user_id=7)
TEXT = "The harbour opens at six."


async def put(
    database: Database,
    source_id: str,
    *,
    principal: Principal = MARA,
    scope: str = "user",
    tags: tuple[str, ...] | None = None,
    embedder: QuickEmbedder | None = None,
    destination: Destination | None = None,
    **fields: Any,
) -> Ingested:
    return await ingest(
        Source(name="note.txt", source_id=source_id, content=f"{TEXT} {source_id}", **fields),
        principal=principal,
        destination=destination or destination_of(principal, scope=scope, tags=tags),
        database=database,
        embedder=embedder or QuickEmbedder(),
        max_bytes=100_000,
    )


async def take_back(database: Database, *source_ids: str, principal: Principal = MARA, **options: Any) -> Invalidated:
    return await invalidate(
        Targets(source_ids=source_ids), reason="a test", principal=principal, database=database, **options
    )


def stored(deployment: Deployment) -> list[str]:
    """The source ids of all documents, after a look whether any is half there."""
    url = deployment.url("postgres")
    assert half_documents(url) == []
    return [row["source_id"] for row in rows(url, "select source_id from rag.rag_documents order by source_id")]


def chunk_count(deployment: Deployment) -> int:
    (row,) = rows(deployment.url("postgres"), "select count(*) as count from rag.rag_chunks")
    return int(row["count"])


# --- removing ------------------------------------------------------------------------------------


async def test_an_invalidated_source_is_removed_with_its_chunks(database: Database, deployment: Deployment):
    document = (await put(database, "art-1")).document_id
    await put(database, "art-2")
    done = await take_back(database, "art-1", cascade_id="cascade-1")
    assert done == Invalidated(documents=[document], kept=[], chunks=1, cascade_id="cascade-1", generation=1)
    assert stored(deployment) == ["art-2"]
    assert chunk_count(deployment) == 1


async def test_a_batch_by_id_by_source_and_by_provenance_is_one_call(database: Database, deployment: Deployment):
    by_id = (await put(database, "art-1")).document_id
    by_source = (await put(database, "art-2")).document_id
    by_provenance = [(await put(database, name, provenance_id="run-5")).document_id for name in ("art-3", "art-4")]
    await put(database, "art-5", provenance_id="run-6")
    done = await invalidate(
        Targets(document_ids=[by_id], source_ids=["art-2"], provenance_ids=["run-5"]),
        reason="a test",
        principal=MARA,
        database=database,
    )
    assert set(done.documents) == {by_id, by_source, *by_provenance}
    assert (done.chunks, stored(deployment)) == (4, ["art-5"])


async def test_what_is_derived_goes_too_however_far(database: Database, deployment: Deployment):
    await put(database, "origin")
    await put(database, "summary", provenance_id="origin")
    await put(database, "translation", provenance_id="summary")
    await put(database, "bystander", provenance_id="something else")
    done = await take_back(database, "origin")
    assert (len(done.documents), stored(deployment)) == (3, ["bystander"])


async def test_what_is_derived_goes_although_its_origin_is_gone(database: Database, deployment: Deployment):
    await put(database, "summary", provenance_id="origin")
    await put(database, "translation", provenance_id="summary")
    assert len((await take_back(database, "origin")).documents) == 2
    assert stored(deployment) == []


async def test_documents_derived_of_each_other_go_once(database: Database, deployment: Deployment):
    await put(database, "egg", provenance_id="hen")
    await put(database, "hen", provenance_id="egg")
    assert len((await take_back(database, "hen")).documents) == 2
    assert stored(deployment) == []


async def test_without_the_cascade_only_what_is_named_goes(database: Database, deployment: Deployment):
    await put(database, "origin")
    await put(database, "summary", provenance_id="origin")
    assert len((await take_back(database, "origin", cascades=False)).documents) == 1
    assert stored(deployment) == ["summary"]
    await put(database, "second summary", provenance_id="origin")


async def test_a_source_goes_in_every_class_that_the_principal_may_write(database: Database, deployment: Deployment):
    everywhere = replace(ORION, tags=("hr", "public"))
    await put(database, "art-1", principal=everywhere, scope="public", tags=("public",))
    await put(database, "art-1", principal=everywhere, scope="user", tags=("hr",))
    await put(database, "art-1", principal=everywhere, scope="project", tags=("public",))
    assert len((await take_back(database, "art-1", principal=everywhere)).documents) == 3
    assert stored(deployment) == []


async def test_a_scope_narrows_what_goes(database: Database, deployment: Deployment):
    await put(database, "art-1", scope="public")
    await put(database, "art-1", principal=ORION, scope="project")
    mine = (await put(database, "art-1", principal=ORION)).document_id
    done = await take_back(database, "art-1", principal=ORION, scopes=["user"])
    assert done.documents == [mine]
    assert len(done.kept) == 2
    assert stored(deployment) == ["art-1", "art-1"]


# --- keeping out ---------------------------------------------------------------------------------


async def test_an_invalidated_source_is_refused_until_it_is_reinstated(database: Database, deployment: Deployment):
    await put(database, "art-1")
    await take_back(database, "art-1")
    embedder = QuickEmbedder()
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", embedder=embedder)
    assert embedder.texts == []
    opened = await reinstate(Targets(source_ids=["art-1"]), reason="a test", principal=MARA, database=database)
    assert opened == 2  # the source, and what is derived of it
    assert (await put(database, "art-1")).status == "created"
    assert stored(deployment) == ["art-1"]


async def test_a_source_that_was_not_there_yet_is_refused_when_it_comes(database: Database):
    done = await take_back(database, "art-1")
    assert (done.documents, done.generation) == ([], 1)
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1")
    with pytest.raises(SourceInvalidated):
        await put(database, "summary", provenance_id="art-1")
    await put(database, "art-2")


async def test_a_provenance_is_closed_for_what_comes_later(database: Database):
    await invalidate(Targets(provenance_ids=["run-5"]), reason="a test", principal=MARA, database=database)
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", provenance_id="run-5")
    await put(database, "art-1", provenance_id="run-6")
    # Of that name there is a source as well, which nobody spoke of.
    await put(database, "run-5")


async def test_a_document_that_is_derived_is_closed_as_its_origin_is(database: Database):
    await put(database, "origin")
    await put(database, "summary", provenance_id="origin")
    await take_back(database, "origin")
    with pytest.raises(SourceInvalidated):
        await put(database, "summary")
    with pytest.raises(SourceInvalidated):
        await put(database, "translation", provenance_id="summary")


async def test_newer_content_goes_in_with_a_higher_generation(database: Database, deployment: Deployment):
    await put(database, "art-1")
    first = await take_back(database, "art-1")
    assert first.generation == 1
    for generation in (None, 1):
        with pytest.raises(SourceInvalidated):
            await put(database, "art-1", generation=generation)
    assert (await put(database, "art-1", generation=2)).status == "created"
    second = await take_back(database, "art-1")
    assert second.generation == 2
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", generation=2)
    assert stored(deployment) == []


async def test_other_tags_are_no_way_around(database: Database):
    wide = replace(MARA, tags=("hr", "public"))
    await put(database, "art-1", principal=wide, tags=("public",))
    await take_back(database, "art-1", principal=MARA)
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", principal=wide, tags=("hr",))


async def test_a_source_of_another_owner_is_not_closed(database: Database):
    await put(database, "art-1")
    await take_back(database, "art-1")
    await put(database, "art-1", principal=ILSE)
    await put(database, "art-1", principal=ORION, scope="project")
    await put(database, "art-1", principal=STRANGER)


async def test_what_is_closed_for_one_owner_is_open_for_another(database: Database):
    """Of the same scope and seen by the same people: a project shared with Mara, and one of hers by that name."""
    await take_back(database, "art-1", principal=ORION, scopes=["project"])
    ilses = replace(ORION, user_id=8)
    async with database.transaction(ilses) as session:
        await session.run("share_project", {"project_id": "orion", "member_user_id": 7, "may_write": True})
    theirs = Destination(scope="project", user_id=8, project_id="orion")
    await put(database, "art-1", principal=ORION, destination=theirs)


async def test_what_is_deleted_may_come_again_as_before(database: Database):
    document = (await put(database, "art-1")).document_id
    await remove_document(database, MARA, document, reason="deleted")
    assert (await put(database, "art-1")).status == "created"


async def test_an_owner_of_very_many_projects_may_invalidate_in_all(database: Database, deployment: Deployment):
    """More owners than locks are taken for: the whole tenant is locked instead."""
    everywhere = replace(MARA, project_id="*")
    with deployment.connect() as connection, connection.transaction():
        begin(connection, everywhere)
        for number in range(70):
            connection.execute("select access_class('project', 7, %s, '{public}')", (f"project-{number}",))
    await put(database, "art-1", principal=replace(MARA, project_id="project-69"), scope="project")
    assert len((await take_back(database, "art-1", principal=everywhere)).documents) == 1
    assert stored(deployment) == []


# --- what is in flight ---------------------------------------------------------------------------


async def test_an_ingest_that_began_before_gives_up(database: Database, deployment: Deployment):
    async def meanwhile() -> None:
        await take_back(database, "art-1")

    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", embedder=QuickEmbedder(meanwhile))
    assert stored(deployment) == []


async def test_an_ingest_that_began_before_gives_up_although_it_was_reinstated(
    database: Database, deployment: Deployment
):
    happened: list[bool] = []

    async def meanwhile() -> None:
        # Once: whoever only looked again would find it open.
        if not happened:
            happened.append(True)
            await take_back(database, "art-1")
            await reinstate(Targets(source_ids=["art-1"]), reason="a test", principal=MARA, database=database)

    with pytest.raises(SourceRetracted):
        await put(database, "art-1", embedder=QuickEmbedder(meanwhile))
    assert stored(deployment) == []
    await put(database, "art-1")


async def test_an_ingest_of_something_derived_gives_up_as_well(database: Database, deployment: Deployment):
    await put(database, "origin")

    async def meanwhile() -> None:
        await take_back(database, "origin")

    with pytest.raises(SourceInvalidated):
        await put(database, "summary", provenance_id="origin", embedder=QuickEmbedder(meanwhile))
    assert stored(deployment) == []


async def test_newer_content_in_flight_gives_up_when_it_is_invalidated_too(database: Database, deployment: Deployment):
    await take_back(database, "art-1")

    async def meanwhile() -> None:
        await take_back(database, "art-1")

    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", generation=2, embedder=QuickEmbedder(meanwhile))
    assert stored(deployment) == []


async def test_an_invalidation_waits_for_whoever_is_writing_and_removes_it(database: Database, deployment: Deployment):
    """The document is written and not yet committed when the invalidation is asked for."""
    lock = "select pg_advisory_lock(4711)"
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute(
            """
            create function rag.hold() returns trigger language plpgsql as $$
            begin
                perform pg_advisory_xact_lock(4711);
                return new;
            end
            $$;
            grant execute on function rag.hold() to rag_app;
            create constraint trigger hold after insert on rag.rag_documents
            deferrable initially deferred for each row execute function rag.hold();
            """
        )
        superuser.execute(lock)
        writing = asyncio.create_task(put(database, "art-1"))
        await until_waiting(superuser, 1)
        removing = asyncio.create_task(take_back(database, "art-1"))
        await until_waiting(superuser, 2)
        superuser.execute("select pg_advisory_unlock(4711)")
    document = (await writing).document_id
    assert (await removing).documents == [document]
    assert stored(deployment) == []


async def until_waiting(superuser: psycopg.Connection, count: int) -> None:
    """Until so many of the service's connections wait for an advisory lock."""
    async with asyncio.timeout(30):
        while True:
            row = superuser.execute(
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'"
            ).fetchone()
            if row == (count,):
                return
            await asyncio.sleep(0.01)


# --- foreign, missing, kept ----------------------------------------------------------------------


@pytest.mark.parametrize("stranger", [ILSE, STRANGER, replace(MARA, tags=("hr",)), Principal(tenant_id="acme")])
async def test_foreign_and_missing_are_one(database: Database, deployment: Deployment, stranger: Principal):
    document = (await put(database, "art-1", provenance_id="run-5")).document_id
    await take_back(database, "art-2")

    async def asked(*, document_id: UUID, source_id: str, provenance_id: str) -> tuple[Invalidated, int]:
        targets = Targets(document_ids=[document_id], source_ids=[source_id], provenance_ids=[provenance_id])
        return (
            await invalidate(
                targets, reason="a test", principal=stranger, database=database, cascade_id="c", scopes=["user"]
            ),
            await reinstate(targets, reason="a test", principal=stranger, database=database, scopes=["project"]),
        )

    foreign = await asked(document_id=document, source_id="art-1", provenance_id="run-5")
    missing = await asked(document_id=uuid4(), source_id="no such", provenance_id="no such")
    assert foreign == missing
    assert foreign[0].documents == foreign[0].kept == []
    assert stored(deployment) == ["art-1"]
    assert (await put(database, "art-1", provenance_id="run-5")).status == "unchanged"


async def test_a_strangers_reinstatement_opens_nothing(database: Database):
    document = (await put(database, "art-1")).document_id
    await take_back(database, "art-1", cascade_id="cascade-1")
    for stranger in (ILSE, STRANGER, Principal(tenant_id="acme")):
        targets = Targets(document_ids=[document], source_ids=["art-1"], cascade_ids=["cascade-1"])
        assert await reinstate(targets, reason="a test", principal=stranger, database=database) == 0
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1")


async def test_what_one_may_read_and_not_write_is_kept_and_named(database: Database, deployment: Deployment):
    public = (await put(database, "art-1", scope="public")).document_id
    async with replace_publisher(deployment) as without_publisher:
        done = await take_back(without_publisher, "art-1")
    assert (done.documents, done.kept) == ([], [public])
    assert stored(deployment) == ["art-1"]


async def test_what_is_derived_of_something_kept_goes(database: Database, deployment: Deployment):
    await put(database, "origin", scope="public")
    mine = (await put(database, "summary", provenance_id="origin")).document_id
    done = await take_back(database, "origin", scopes=["user"])
    assert done.documents == [mine]
    assert stored(deployment) == ["origin"]


def replace_publisher(deployment: Deployment) -> Database:
    """The service without a login that may write public documents."""
    from tests.conftest import SIGNER

    return Database(deployment.url("rag_app"), signer=SIGNER, pool_size=2)


async def test_a_destination_that_one_may_not_write_is_refused(database: Database):
    theirs = Destination(scope="user", user_id=8)
    with pytest.raises(ScopeForbidden):
        await take_back(database, "art-1", destination=theirs)


# --- reinstating ---------------------------------------------------------------------------------


async def test_a_cascade_is_reinstated_by_its_name(database: Database):
    await put(database, "origin")
    await put(database, "summary", provenance_id="origin")
    await take_back(database, "origin", cascade_id="cascade-1")
    await take_back(database, "art-9", cascade_id="cascade-2")
    targets = Targets(cascade_ids=["cascade-1"])
    assert await reinstate(targets, reason="a test", principal=MARA, database=database) == 4
    assert await reinstate(targets, reason="a test", principal=MARA, database=database) == 0
    await put(database, "origin")
    await put(database, "summary", provenance_id="origin")
    with pytest.raises(SourceInvalidated):
        await put(database, "art-9")


async def test_a_source_is_reinstated_by_the_document_that_it_had(database: Database):
    document = (await put(database, "art-1")).document_id
    await take_back(database, "art-1")
    targets = Targets(document_ids=[document])
    assert await reinstate(targets, reason="a test", principal=MARA, database=database) == 2
    await put(database, "art-1")


async def test_reinstating_one_of_a_cascade_leaves_the_others_closed(database: Database):
    await take_back(database, "art-1", "art-2", cascade_id="cascade-1")
    await reinstate(Targets(source_ids=["art-1"]), reason="a test", principal=MARA, database=database)
    await put(database, "art-1")
    with pytest.raises(SourceInvalidated):
        await put(database, "art-2")


async def test_who_may_only_read_reinstates_nothing(database: Database):
    await put(database, "art-1", principal=ORION, scope="project")
    await take_back(database, "art-1", principal=ORION)
    async with database.transaction(ORION) as session:
        await session.run("share_project", {"project_id": "orion", "member_user_id": 8, "may_write": False})
    reader = replace(ORION, user_id=8)
    assert await reinstate(Targets(source_ids=["art-1"]), reason="a test", principal=reader, database=database) == 0
    with pytest.raises(SourceInvalidated):
        await put(database, "art-1", principal=ORION, scope="project")


async def test_only_the_scopes_of_the_caller_are_reinstated(database: Database):
    await take_back(database, "art-1")
    targets = Targets(source_ids=["art-1"])
    assert await reinstate(targets, reason="a test", principal=MARA, database=database, scopes=["public"]) == 0
    assert await reinstate(targets, reason="a test", principal=MARA, database=database, scopes=["user"]) == 2


# --- who and why ---------------------------------------------------------------------------------


async def test_who_and_why_stay_on_record(database: Database, deployment: Deployment):
    await put(database, "art-1", principal=ORION, scope="project")
    await invalidate(
        Targets(source_ids=["art-1"]), reason="upstream_taint", principal=ORION, database=database, cascade_id="c-1"
    )
    await reinstate(Targets(cascade_ids=["c-1"]), reason="false alarm", principal=ORION, database=database)
    recorded = rows(
        deployment.url("postgres"),
        "select tenant_id, user_id, project_id, action, reason, cascade_id, sources, documents, chunks"
        " from rag.rag_retractions order by created_at",
    )
    who = {"tenant_id": "acme", "user_id": 7, "project_id": "orion", "cascade_id": "c-1", "sources": 2}
    assert recorded == [
        who | {"action": "invalidate", "reason": "upstream_taint", "documents": 1, "chunks": 1},
        who | {"action": "reinstate", "reason": "false alarm", "documents": 0, "chunks": 0},
    ]


async def test_a_tombstone_holds_no_name(database: Database, deployment: Deployment):
    await put(database, "the secret plan", provenance_id="the secret origin")
    await take_back(database, "the secret plan")
    left = rows(deployment.url("postgres"), "select tombstone::text as text from rag.rag_tombstones as tombstone")
    assert len(left) == 2
    assert not any("secret" in row["text"] for row in left)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, None),
        ({"source_ids": ["x"] * 1001}, None),
        ({"source_ids": ["a\0b"]}, "source_ids"),
        ({"source_ids": [""]}, "source_ids"),
        ({"source_ids": ["x" * 513]}, "source_ids"),
        ({"provenance_ids": ["\ud800"]}, "provenance_ids"),
        ({"cascade_ids": ["x" * 129]}, "cascade_ids"),
    ],
)
def test_targets_that_no_document_could_have_are_refused(fields: dict[str, Any], named: str | None):
    with pytest.raises(InvalidInput) as refused:
        Targets(**fields)
    assert refused.value.field == named


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reason": ""}, "reason"),
        ({"reason": "x" * 1001}, "reason"),
        ({"reason": "a\nb"}, "reason"),
        ({"reason": "a test", "cascade_id": ""}, "cascade_id"),
        ({"reason": "a test", "cascade_id": "x" * 129}, "cascade_id"),
    ],
)
async def test_a_reason_and_a_cascade_are_plain_text(database: Database, options: dict[str, Any], named: str):
    with pytest.raises(InvalidInput) as refused:
        await invalidate(Targets(source_ids=["art-1"]), principal=MARA, database=database, **options)
    assert refused.value.field == named


@pytest.mark.parametrize("generation", [0, -1, 1_000_000_001])
async def test_a_generation_is_one_that_is_counted(database: Database, generation: int):
    with pytest.raises(InvalidInput) as refused:
        await put(database, "art-1", generation=generation)
    assert refused.value.field == "generation"
