"""A foreign row and a missing row are the same: the same bytes, SQLSTATE, buffers and plan nodes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from tests.api.running import Person, running
from tests.conftest import Deployment, begin, unit_vector

TENANT = "acme"
ASKER = Principal(tenant_id=TENANT, user_id=1, project_id="*")
PUBLISHER = Principal(tenant_id=TENANT, user_id=9)
DOCUMENTS = 60


@pytest.fixture(scope="module")
def site(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """Documents of the asker, and of those whom the asker may not see: another user, tag and tenant."""
    with new_deployment() as clone:
        for principal, scope, tags in (
            (ASKER, "user", ["public"]),
            (Principal(tenant_id=TENANT, user_id=2), "user", ["public"]),
            (Principal(tenant_id=TENANT, user_id=1, tags=("hr",)), "user", ["hr"]),
            (Principal(tenant_id="umbra", user_id=1), "user", ["public"]),
        ):
            with clone.transaction(principal) as connection:
                access_id = connection.execute(
                    "select access_class(%s, %s, null, %s)", (scope, principal.user_id, tags)
                ).fetchone()[0]
                for number in range(DOCUMENTS):
                    plant(connection, principal, access_id, number)
        with clone.cluster.superuser(clone.name) as connection:
            connection.execute("vacuum analyze rag.rag_documents, rag.rag_chunks, rag.rag_access_classes")
        yield clone


def plant(connection: psycopg.Connection, principal: Principal, access_id: int, number: int) -> None:
    document_id = uuid4()
    text = f"The vault of harbour {number} opens at six."
    connection.execute(
        """
        insert into rag_documents (
            tenant_id, access_id, id, scope, user_id, project_id, tags, source_type, source_id, source_hash, title, body
        )
        select tenant_id, access_id, %s, scope, user_id, project_id, tags, 'text', %s, 'hash', 'A harbour', %s
        from my_classes() where access_id = %s
        """,
        (document_id, f"harbour-{number}", text, access_id),
    )
    connection.execute(
        """
        insert into rag_chunks (
            tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count, token_counter,
            start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count
        )
        values (%s, %s, %s, 0, %s, 'hash', 8, 'words', 0, 10, cast(%s as halfvec), 'model',
            to_tsvector('simple', %s), 8)
        """,
        (principal.tenant_id, access_id, document_id, text, unit_vector(1.0), text),
    )


@pytest.fixture(scope="module")
def foreign(site: Deployment) -> list[UUID]:
    """The ids of what the asker may not see."""
    with site.cluster.superuser(site.name) as connection:
        rows = connection.execute(
            "select id from rag.rag_documents where (tenant_id, user_id, tags) <> ('acme', 1, '{public}') order by id"
        ).fetchall()
    assert len(rows) == 3 * DOCUMENTS
    return [row[0] for row in rows]


def neighbour(document_id: UUID) -> UUID:
    """An id of nothing, next to this one in every index."""
    return UUID(int=document_id.int ^ 1)


# Everything that takes a document's id; parameters by name, `id` among them.
STATEMENTS = {
    "my_document": "select * from rag.my_document(%(id)s)",
    "explain": "select * from rag.explain('palisade record', %(id)s)",
    "my_document_chunks": "select * from rag.my_document_chunks(%(id)s)",
    "get_document": query("get_document"),
    "recheck_citations": query("recheck_citations"),
    "search by keyword": "select * from rag.search('vault harbour', document_ids => array[%(id)s]::uuid[])",
    "search by vector": """
        select * from rag.search(
            'vault', cast(%(embedding)s as halfvec), 'model', document_ids => array[%(id)s]::uuid[]
        )
    """,
    "search_mode": query("search_mode"),
    "documents of the view": "select * from rag.v_documents where document_id = %(id)s",
    "chunks of the view": "select * from rag.v_chunks where document_id = %(id)s",
    "usage of the view": "select * from rag.v_source_usage where document_id = %(id)s",
    "find_embeddings": query("find_embeddings"),
    "documents_among": query("documents_among"),
    "delete_document": query("delete_document"),
    "a title": """
        update rag.rag_documents set title = 'mine' where tenant_id = 'acme' and access_id = %(own)s and id = %(id)s
    """,
}
# Written by hand, without the class: the rows are the same, and what it costs is not promised to somebody
# who knows the id (docs/security.md).
KEYS = {
    "key of a document": "select count(*) from rag.rag_documents where tenant_id = 'acme' and id = %(id)s",
    "key of a chunk": "select count(*) from rag.rag_chunks where tenant_id = 'acme' and document_id = %(id)s",
    "update": "update rag.rag_documents set title = 'mine' where tenant_id = 'acme' and id = %(id)s",
    "delete": "delete from rag.rag_documents where tenant_id = 'acme' and id = %(id)s",
    "delete chunks": "delete from rag.rag_chunks where tenant_id = 'acme' and document_id = %(id)s",
}
# What fails, and has to fail alike.
REFUSED = {
    "a chunk of it": """
        insert into rag.rag_chunks (
            tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count, token_counter,
            start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count
        )
        values ('acme', %(own)s, %(id)s, 7, 'x', 'h', 1, 'words', 0, 1, cast(%(embedding)s as halfvec), 'model', '', 0)
    """,
    "its id in another class": """
        insert into rag.rag_documents (
            tenant_id, access_id, id, scope, user_id, tags, source_type, source_id, source_hash, title, body
        )
        values ('acme', %(own)s + 1, %(id)s, 'user', 1, '{public}', 'text', 'x', 'h', 't', 'b')
    """,
}


def parameters(document_id: UUID, own: int) -> dict[str, object]:
    return {
        "id": document_id,
        "document_id": document_id,
        "document_ids": [document_id],
        "chunk_indexes": [0],
        "chunk_hashes": ["hash"],
        "embedding": unit_vector(1.0),
        "embedding_model": "model",
        "scope": None,
        "tenant_id": TENANT,
        "access_id": own,
        "own": own,
    }


def outcome(connection: psycopg.Connection, statement: str, given: dict[str, object]) -> tuple[object, ...]:
    """Rows or SQLSTATE and message, then the plan with its buffers; ids replaced by a word."""
    said: list[object] = []
    for prefix in ("", "explain (analyze, buffers, timing off, costs off, summary off) "):
        try:
            with connection.transaction(force_rollback=True):
                rows = (
                    connection.execute((prefix + statement).encode(), given).fetchall()
                    if prefix or (statement.lstrip().startswith(("select", "with", "--")))
                    else [("rows", connection.execute(statement.encode(), given).rowcount)]
                )
            said.append(repr(rows))
        except psycopg.Error as error:
            diagnostics = error.diag
            said += [error.sqlstate, diagnostics.message_primary, diagnostics.message_detail, diagnostics.context]
    return tuple(
        None if part is None else re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", str(part)) for part in said
    )


@pytest.mark.parametrize("plans", ["auto", "force_generic_plan", "force_custom_plan"])
def test_a_foreign_document_and_a_missing_one_cost_and_say_the_same(
    site: Deployment,
    foreign: list[UUID],
    plans: str,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    pairs = scaled(test=60, ci=510, prove=5010) // 3
    numbers = random.Random(20261121)
    compared = 0
    with site.connect() as connection:
        connection.execute(f"set plan_cache_mode = {plans}")
        with connection.transaction(force_rollback=True):
            begin(connection, ASKER)
            own = connection.execute("select access_id from my_classes() where scope = 'user'").fetchone()[0]
            named = STATEMENTS | REFUSED | KEYS
            for statement in named.values():
                # Reading the catalog, and planning anew (after five runs, with plans chosen by
                # themselves), cost buffers that are nobody's.
                for _ in range(4):
                    outcome(connection, statement, parameters(neighbour(foreign[0]), own))
            for pair in range(pairs):
                there = numbers.choice(foreign)
                name = list(named)[pair % len(named)]
                # Which of the two comes first must not matter either.
                ids = [there, neighbour(there)]
                numbers.shuffle(ids)
                # Whoever analyses a table meanwhile empties our caches of the catalog; a leak is there each time.
                for _ in range(3):
                    first, second = (outcome(connection, named[name], parameters(one, own)) for one in ids)
                    if name in KEYS:
                        first, second = first[:1], second[:1]
                    if first == second:
                        break
                assert first == second, (name, there)
                compared += 1
    figure(f"foreign against missing in SQL, {plans}: {compared} pairs, {len(named)} statements, 0 differ")


def test_what_is_compared_can_differ(site: Deployment) -> None:
    with site.connect() as connection, connection.transaction(force_rollback=True):
        begin(connection, ASKER)
        mine = connection.execute("select id from my_documents() limit 1").fetchone()[0]
        for name in ("my_document", "get_document", "search by keyword", "documents of the view", "delete"):
            outcomes = {
                outcome(connection, (STATEMENTS | KEYS)[name], parameters(one, 0)) for one in (mine, neighbour(mine))
            }
            assert len(outcomes) == 2, name


def test_over_http_a_foreign_document_and_a_missing_one_are_the_same_answer(
    site: Deployment,
    settings: Settings,
    foreign: list[UUID],
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    pairs = scaled(test=8, ci=60, prove=1500)
    numbers = random.Random(20261122)
    with running(site, settings) as client:
        asker = Person(client=client, tenant_id=TENANT, user_id=1, project_id="*")

        def said(document_id: UUID) -> list[tuple[int, str, str]]:
            answers = [
                asker.read(document_id),
                asker.delete(document_id),
                asker.ask("vault harbour", scope="documents", document_ids=[str(document_id)], generate=False),
            ]
            return [
                (
                    answer.status_code,
                    json.dumps(sorted(set(answer.headers) - {"date"})),
                    re.sub(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|"\w+_ms": ?[0-9.]+', "…", answer.text),
                )
                for answer in answers
            ]

        for _ in range(pairs):
            there = numbers.choice(foreign)
            ids = [there, neighbour(there)]
            numbers.shuffle(ids)
            first, second = map(said, ids)
            assert first == second, there
            assert [status for status, *_ in first][:2] == [404, 404]
    figure(f"foreign against missing over HTTP: {pairs} pairs, three routes, 0 differ")
