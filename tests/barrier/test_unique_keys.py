"""Unique and foreign keys look past row security, so each has the access class in it."""

from __future__ import annotations

import psycopg
import pytest

from rag.principal import Principal
from tests.conftest import Deployment, unit_vector
from tests.sql.world import build, document_id

USER_1 = Principal(tenant_id="t1", user_id=1)
MISSING = 999
ADD_CHUNK = """
    insert into rag.rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
        token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count)
    values ('t1', 3, %(document)s, 0, 'new', 'hash', 1, 'words', 0, 3, %(embedding)s::rag.halfvec, 'test-model', '', 0)
"""


@pytest.fixture
def world(deployment: Deployment) -> Deployment:
    with deployment.cluster.superuser(deployment.name) as connection:
        build(connection)
    return deployment


def test_keys_of_tables_with_classes_contain_tenant_and_class(deployment: Deployment) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        rows = connection.execute(
            """
            select
                key.conname,
                array(
                    select attribute.attname::text
                    from unnest(key.conkey) as place
                    join pg_attribute as attribute on attribute.attrelid = key.conrelid and attribute.attnum = place
                )
            from pg_constraint as key
            where key.connamespace = 'rag'::regnamespace
                and key.contype in ('p', 'u', 'f')
                and exists (select from pg_attribute where attrelid = key.conrelid and attname = 'access_id')
                -- What finds the class itself: made and looked for by access_class() alone.
                and key.conname <> 'rag_access_classes_combination'
                -- The class is only noted there: a row belongs to a question, which is its user's.
                and key.conrelid <> 'rag.rag_feedback'::regclass
            """
        ).fetchall()
    keys: dict[str, list[str]] = dict(rows)
    assert len(keys) >= 9
    assert [name for name, columns in keys.items() if not {"tenant_id", "access_id"} <= set(columns)] == []


def test_a_chunk_of_a_foreign_document_is_refused_like_one_of_a_missing_document(world: Deployment) -> None:
    """In the place of a chunk that is there: user 2's, a public one, another tenant's."""
    refusals = {}
    for number in (5, 1, 12, MISSING):
        with world.transaction(USER_1) as connection, pytest.raises(psycopg.Error) as caught, connection.transaction():
            connection.execute(ADD_CHUNK, {"document": document_id(number), "embedding": unit_vector(1.0)})
        refusals[number] = (caught.value.sqlstate, caught.value.diag.message_primary, caught.value.diag.message_detail)
    assert refusals[MISSING][0] == "23503"
    assert set(refusals.values()) == {refusals[MISSING]}
