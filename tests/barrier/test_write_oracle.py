"""The write oracle: no statement changes a row that the model says it must not; and the oracle finds leaks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.barrier.oracle_planting import Plant, altered, rewritten
from tests.barrier.oracle_world import seed_of_run
from tests.barrier.oracle_writing import RELATIONS, write_oracle
from tests.conftest import Deployment

NewDeployment = Callable[[], AbstractContextManager[Deployment]]


def test_random_writes_change_what_the_model_says(
    new_deployment: NewDeployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    acts = scaled(test=300, ci=5_000, prove=100_000)
    corpora = scaled(test=8, ci=60, prove=1_000)
    with new_deployment() as deployment, write_oracle(deployment, seed=seed_of_run()) as oracle:
        report = oracle.run(acts=acts, corpora=corpora)
    assert report.is_clean, str(report)
    assert report.checks == acts
    # Where nothing may be written, nothing crosses.
    assert oracle.done > acts / 5
    if acts >= 5_000:
        assert {met for _, met in oracle.met} == set(RELATIONS)
        assert {(name, met) for name in ("insert a document", "update documents") for met in RELATIONS} <= set(
            oracle.met
        )
    figure(
        f"write oracle, seed {oracle.seed}: {acts:,} statements, {oracle.done:,} of them allowed, {len(oracle.met)}"
        f" pairs of statement and class: 0 rows cross, 0 wrongly refused, 0 other errors"
    )


READABLE = "access_id = any((select my_access_ids())::bigint[])"

PLANTS = {
    "documents added where one may only read": Plant(
        make=altered(f"alter policy add_documents on rag_documents with check ({READABLE})"),
        path="insert a document",
    ),
    "documents changed where one may only read": Plant(
        make=altered(f"alter policy change_documents on rag_documents using ({READABLE}) with check ({READABLE})"),
        path="update documents",
    ),
    "documents removed where one may only read": Plant(
        seed=2,
        make=altered(f"alter policy remove_documents on rag_documents using ({READABLE})"),
        path="delete documents",
    ),
    "chunks added where one may only read": Plant(
        seed=2, make=altered(f"alter policy add_chunks on rag_chunks with check ({READABLE})"), path="insert a chunk"
    ),
    "chunks removed where one may only read": Plant(
        make=altered(f"alter policy remove_chunks on rag_chunks using ({READABLE})"), path="delete chunks"
    ),
    "no tenant belt on new chunks": Plant(
        seed=5, make=altered("drop policy own_tenant_insert on rag_chunks"), path="insert a chunk"
    ),
    "no tenant belt on changed documents": Plant(
        seed=3,
        make=altered(
            "drop policy own_tenant_update on rag_documents", "drop policy own_tenant_select on rag_documents"
        ),
        path="update documents",
    ),
    "no row security on documents": Plant(
        make=altered("alter table rag_documents disable row level security"), path="insert a document"
    ),
    "a class that can be updated": Plant(
        seed=7, make=altered("grant update (access_id) on rag_documents to rag_app"), path="move documents"
    ),
    "documents whose readable owner is not their class's": Plant(
        seed=7, make=rewritten("class_reads", "and class.scope = class_reads.scope", ""), path="insert a document"
    ),
    "public classes for everybody": Plant(
        seed=3,
        make=rewritten("access_class", "when 'public' then session_user = 'rag_publisher'", "when 'public' then true"),
        path="access_class",
    ),
    "public documents from everybody": Plant(
        seed=2,
        make=rewritten("my_classes", "session_user = 'rag_publisher'", "true"),
        path="insert a document",
    ),
    "shared for reading and written": Plant(
        seed=7, make=rewritten("my_classes", "and membership.may_write", ""), path="insert a chunk"
    ),
    "classes of an owner who is somebody else": Plant(
        make=rewritten("access_class", "when 'user' then access_class.user_id = me.user_id", "when 'user' then true"),
        path="access_class",
    ),
    "classes with nobody's tags": Plant(
        make=rewritten("access_class", "if not sorted_tags && me.tags then", "if false then"), path="access_class"
    ),
    "sharing that a member can end": Plant(
        make=lambda superuser: (
            rewritten("unshare_project", "membership.owner_user_id = my_user_id() and", "")(superuser),
            altered("alter policy unshare_own_project on rag_project_members using (true)")(superuser),
        )[0],
        path="unshare_project",
    ),
    "chunks without a document": Plant(
        seed=4, make=altered("alter table rag_chunks drop constraint rag_chunks_document"), path="insert a chunk"
    ),
    "tombstones for others' sources": Plant(
        seed=2, make=altered("alter policy add_tombstones on rag_tombstones with check (true)"), path="bury_source"
    ),
    "questions in somebody else's name": Plant(
        seed=2, make=altered("alter policy add_logs on rag_query_logs with check (true)"), path="log a question"
    ),
    "text that the service reads itself": Plant(
        seed=4, make=altered("grant select on rag_documents to rag_app, rag_publisher"), path="what nobody may"
    ),
    "no signature needed": Plant(
        seed=3, make=rewritten("my_principal", "if signature_holds(", "if true or signature_holds(")
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_the_oracle_finds_a_planted_hole(new_deployment: NewDeployment, name: str) -> None:
    hole = PLANTS[name]
    with new_deployment() as deployment, write_oracle(deployment, seed=hole.seed, spoil=hole.make) as oracle:
        report = oracle.run(acts=4_000, corpora=50, until=hole.noticed)
    assert hole.noticed(report), str(report)
