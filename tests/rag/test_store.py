"""What ingestion and reading write and read: destinations, what is known of a source, deletions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag import chunk, parse
from rag.database import Database
from rag.errors import DocumentNotFound, InvalidInput, ScopeForbidden, SourceOvertaken, SourceRetracted
from rag.principal import Principal
from rag.store import (
    Destination,
    Known,
    Record,
    destination_of,
    halfvec,
    look_up,
    read_document,
    remove_document,
    replace,
    sha256,
)
from tests.conftest import SIGNER, Deployment, Store, unit_vector
from tests.rag.stored import half_documents, rows

MARA = Principal(tenant_id="acme", user_id=7)
ILSE = Principal(tenant_id="acme", user_id=8)
BOTH_TAGS = Principal(tenant_id="acme", user_id=7, tags=("hr", "public"))
MINE = Destination(scope="user", user_id=7)


async def write(
    database: Database,
    text: str,
    *,
    principal: Principal = MARA,
    destination: Destination = MINE,
    known: Known | None = None,
    source_id: str = "note",
) -> UUID:
    """Write a text of one chunk over what is known, by default what is there now."""
    parsed = parse.parse_text(text, name="note.txt", max_bytes=10_000)
    pieces = chunk.split(parsed, limit_tokens=256, count=lambda piece: len(piece.split()))
    if known is None:
        known = await look_up(database, principal, destination, source_type="text", source_id=source_id)
    return await replace(
        database,
        principal,
        destination,
        known,
        Record(
            source_type="text",
            source_id=source_id,
            source_uri=None,
            source_hash=sha256(text),
            source_updated_at=None,
            language="en",
            title="note",
            body=text,
            domain=None,
            doc_type=None,
            provenance_id=None,
            task_id=None,
            verified=False,
            metadata={},
        ),
        pieces,
        {piece.hash: unit_vector(1.0) for piece in pieces},
        embedding_model="test-model",
        token_counter="words",
    )


# --- where a document goes -----------------------------------------------------------------------


def test_a_destination_belongs_to_the_principal():
    orion = Principal(tenant_id="acme", user_id=7, project_id="orion", tags=("ops", "public"))
    assert destination_of(orion, scope="user") == Destination(scope="user", user_id=7, tags=("ops", "public"))
    assert destination_of(orion, scope="project", tags=["ops"]) == Destination(
        scope="project", user_id=7, project_id="orion", tags=("ops",)
    )
    assert destination_of(orion, scope="public", tags=[]) == Destination(scope="public", tags=("public",))


@pytest.mark.parametrize(
    ("principal", "scope", "field"),
    [
        (MARA, "team", "scope"),
        (MARA, "", "scope"),
        (Principal(tenant_id="acme"), "user", "user_id"),
        (Principal(tenant_id="acme", project_id="orion"), "project", "user_id"),
        (MARA, "project", "project_id"),
        (Principal(tenant_id="acme", user_id=7, project_id="*"), "project", "project_id"),
    ],
)
def test_a_destination_without_an_owner_is_refused(principal: Principal, scope: str, field: str):
    with pytest.raises(InvalidInput) as refused:
        destination_of(principal, scope=scope)
    assert refused.value.field == field


def test_a_destination_takes_no_malformed_tag():
    with pytest.raises(InvalidInput) as refused:
        destination_of(MARA, scope="user", tags=["hr\n"])
    assert refused.value.field == "tags"


def test_only_public_documents_are_published():
    assert [Destination(scope=scope).publishes for scope in ("public", "user", "project")] == [True, False, False]


# --- small things --------------------------------------------------------------------------------


def test_a_vector_is_written_in_the_notation_of_the_database():
    assert halfvec([1.0, -0.25, 1 / 3, 1e-7, 0.0]) == "[1,-0.25,0.333333,1e-07,0]"


def test_the_digits_of_a_vector_are_enough_for_every_half_precision_number(deployment: Deployment):
    # All numbers of a half between 0.5 and 1, as many just below 1/16, and the smallest that is not denormal.
    halves = [0.5 + step / 2**11 for step in range(1025)] + [2**-5 + step / 2**15 for step in range(1024)] + [2**-14]
    (row,) = rows(
        deployment.url("postgres"),
        "select %s::rag.halfvec operator(rag.=) %s::real[]::rag.halfvec as same",
        (halfvec(halves), halves),
    )
    assert row["same"]


def test_parts_of_a_digest_do_not_run_into_each_other():
    assert sha256("abc") == hashlib.sha256(b"\0\0\0\0\0\0\0\x03abc").hexdigest()
    assert len({sha256("ab", "c"), sha256("a", "bc"), sha256("abc"), sha256("abc", ""), sha256("abc", None)}) == 5


# --- what is known of a source -------------------------------------------------------------------


async def test_of_a_new_source_nothing_is_known(database: Database):
    known = await look_up(database, MARA, MINE, source_type="text", source_id="note")
    assert (known.document_id, known.source_hash, known.generation, known.moves, known.surplus) == (
        None,
        None,
        0,
        False,
        (),
    )


async def test_of_a_written_source_its_document_and_hash_are_known(database: Database):
    document_id = await write(database, "The harbour opens at six.")
    known = await look_up(database, MARA, MINE, source_type="text", source_id="note")
    assert (known.document_id, known.source_hash) == (document_id, sha256("The harbour opens at six."))
    assert not known.moves


async def test_a_source_is_known_to_move_while_its_tags_differ(database: Database):
    await write(database, "The harbour opens at six.")
    elsewhere = Destination(scope="user", user_id=7, tags=("hr",))
    known = await look_up(database, BOTH_TAGS, elsewhere, source_type="text", source_id="note")
    assert known.moves


async def test_of_two_copies_the_one_of_the_wanted_tags_is_kept_and_the_other_is_surplus(database: Database):
    hr = Principal(tenant_id="acme", user_id=7, tags=("hr",))
    in_hr = Destination(scope="user", user_id=7, tags=("hr",))
    restricted = await write(database, "one", principal=hr, destination=in_hr)
    open_to_all = await write(database, "two")
    known = await look_up(database, BOTH_TAGS, in_hr, source_type="text", source_id="note")
    assert known.document_id == restricted
    assert [document_id for _, document_id in known.surplus] == [open_to_all]


async def test_what_others_hold_of_a_source_is_not_known(database: Database):
    await write(database, "The harbour opens at six.")
    hers = Destination(scope="user", user_id=8)
    assert (await look_up(database, ILSE, hers, source_type="text", source_id="note")).document_id is None


async def test_who_knows_too_little_writes_nothing(database: Database, deployment: Deployment):
    stale = await look_up(database, MARA, MINE, source_type="text", source_id="note")
    document_id = await write(database, "first")
    with pytest.raises(SourceRetracted):
        await write(database, "second", known=stale)
    outdated = await look_up(database, MARA, MINE, source_type="text", source_id="note")
    await write(database, "third")
    with pytest.raises(SourceRetracted):
        await write(database, "fourth", known=outdated)
    stored = rows(deployment.url("postgres"), "select id, body from rag.rag_documents")
    assert stored == [{"id": document_id, "body": "third"}]


async def test_two_writers_with_different_tags_leave_one_document(database: Database, deployment: Deployment):
    await write(database, "before", principal=BOTH_TAGS)
    places = [Destination(scope="user", user_id=7, tags=tags) for tags in (("hr",), ("hr", "public"))]
    done = await asyncio.gather(
        *(write(database, "after", principal=BOTH_TAGS, destination=place) for place in places),
        return_exceptions=True,
    )
    assert {type(one) for one in done} <= {UUID, SourceOvertaken}
    superuser = deployment.url("postgres")
    assert [row["body"] for row in rows(superuser, "select body from rag.rag_documents")] == ["after"]
    assert half_documents(superuser) == []


# --- reading and deleting ------------------------------------------------------------------------


async def test_a_document_is_read_with_its_text_and_the_number_of_its_chunks(database: Database, store: Store):
    document_id = store(MARA, "The harbour opens at six.", title="Hours")
    row = await read_document(database, MARA, document_id)
    assert (row["id"], row["title"], row["body"], row["chunk_count"]) == (
        document_id,
        "Hours",
        "The harbour opens at six.",
        1,
    )
    assert (row["scope"], row["user_id"], row["project_id"], row["tags"]) == ("user", 7, None, ["public"])


async def test_a_hidden_document_and_a_missing_one_are_the_same_error(database: Database, store: Store):
    hidden, missing = store(MARA, "The harbour opens at six."), uuid4()
    said = set()
    for document_id in (hidden, missing):
        for act in (
            read_document(database, ILSE, document_id),
            remove_document(database, ILSE, document_id, reason="a test"),
        ):
            with pytest.raises(DocumentNotFound) as refused:
                await act
            said.add((refused.value.message, refused.value.field))
    assert said == {("No such document.", None)}
    assert (await read_document(database, MARA, hidden))["id"] == hidden


async def test_a_deleted_document_leaves_a_tombstone_and_no_chunk(database: Database, deployment: Deployment):
    superuser = deployment.url("postgres")
    # Not the source's name: SHA-256 of its type and name as JSON.
    digest = hashlib.sha256(b'["text","note"]').digest()
    for generation in (1, 2):
        document_id = await write(database, "The harbour opens at six.")
        await remove_document(database, MARA, document_id, reason=f"test {generation}")
        with pytest.raises(DocumentNotFound):
            await read_document(database, MARA, document_id)
        assert rows(superuser, "select source_digest, generation, reason from rag.rag_tombstones") == [
            {"source_digest": digest, "generation": generation, "reason": f"test {generation}"}
        ]
        assert rows(superuser, "select id from rag.rag_chunks") == []


async def test_of_two_deletions_at_once_one_finds_nothing(database: Database, deployment: Deployment):
    document_id = await write(database, "The harbour opens at six.")
    done = await asyncio.gather(
        *(remove_document(database, MARA, document_id, reason="a test") for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(one) for one in done if one is not None) == [DocumentNotFound]
    assert rows(deployment.url("postgres"), "select generation from rag.rag_tombstones") == [{"generation": 1}]


@pytest.mark.parametrize("may_write", [False, True])
async def test_a_shared_document_is_deleted_only_by_members_who_may_write(
    database: Database, deployment: Deployment, store: Store, may_write: bool
):
    owner = Principal(tenant_id="acme", user_id=7, project_id="orion")
    member = Principal(tenant_id="acme", user_id=8, project_id="orion")
    document_id = store(owner, "The harbour opens at six.", scope="project", project_id="orion")
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            "insert into rag.rag_project_members values ('acme', 7, 'orion', 8, %(may_write)s)",
            {"may_write": may_write},
        )
    if may_write:
        await remove_document(database, member, document_id, reason="a test")
        with pytest.raises(DocumentNotFound):
            await read_document(database, owner, document_id)
    else:
        with pytest.raises(ScopeForbidden):
            await remove_document(database, member, document_id, reason="a test")
        assert (await read_document(database, owner, document_id))["chunk_count"] == 1


async def test_a_public_document_is_deleted_only_by_a_service_that_may_publish(
    database: Database, deployment: Deployment, store: Store
):
    document_id = store(MARA, "The harbour opens at six.", scope="public")
    async with Database(deployment.url("rag_app"), signer=SIGNER) as without_publisher:
        with pytest.raises(ScopeForbidden):
            await remove_document(without_publisher, MARA, document_id, reason="a test")
    assert (await read_document(database, ILSE, document_id))["chunk_count"] == 1
    await remove_document(database, MARA, document_id, reason="a test")
    with pytest.raises(DocumentNotFound):
        await read_document(database, ILSE, document_id)


async def test_a_deletion_finds_a_document_that_moved_while_it_waited(database: Database, deployment: Deployment):
    document_id = await write(database, "The harbour opens at six.", principal=BOTH_TAGS)
    superuser = deployment.url("postgres")
    with psycopg.connect(superuser) as holder:
        named = json.dumps(["acme", "user", 7, None, "text", "note"])
        holder.execute("select pg_advisory_xact_lock(hashtextextended(%s, 0))", (named,))
        restricted = Destination(scope="user", user_id=7, tags=("hr",))
        moving = asyncio.create_task(
            write(database, "The harbour opens at six.", principal=BOTH_TAGS, destination=restricted)
        )
        await asyncio.to_thread(wait_for_waiters, superuser, 1)
        deleting = asyncio.create_task(remove_document(database, BOTH_TAGS, document_id, reason="a test"))
        await asyncio.to_thread(wait_for_waiters, superuser, 2)
    # They get the lock in the order in which they asked for it.
    assert await moving == document_id
    await deleting
    assert rows(superuser, "select id from rag.rag_documents") == []
    buried = (
        "select class.tags from rag.rag_tombstones join rag.rag_access_classes as class using (tenant_id, access_id)"
    )
    assert rows(superuser, buried) == [{"tags": ["hr"]}]


def wait_for_waiters(superuser: str, number: int) -> None:
    """Return when so many server processes wait for an advisory lock."""
    waiting = """
        select count(*) from pg_locks
        where locktype = 'advisory' and not granted
            and database = (select oid from pg_database where datname = current_database())
    """
    while counted(rows(superuser, waiting)) < number:
        time.sleep(0.01)


def counted(result: list[dict[str, Any]]) -> int:
    return int(result[0]["count"])
