"""Logs end by age: what is too old goes in batches, all else stays, and nobody waits."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from rag import operate
from rag.retain import Term, count, expire
from tests.conftest import Deployment
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag

__all__ = ["named", "rag"]


@pytest.fixture
def operated(named: Deployment, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """A database with 25 questions of two tenants, one of each every ten days back, and as many assertions."""
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", named.url("rag_operator"))
    rows(
        named.url("postgres"),
        """
        with question as (
            insert into rag.rag_query_logs (tenant_id, user_id, query_hash, query_length, mode, result_count,
                citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms, created_at)
            select tenant, 7, 'hash', 4, 'hybrid', 1, 0, 0, 1, 0, 1, now() - make_interval(days => 10 * age)
            from unnest(array['acme', 'zeta']) as tenant
            cross join generate_series(0, 24) as age
            returning tenant_id, id, user_id
        ),

        hit as (
            insert into rag.rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index, score,
                cited)
            select question.tenant_id, question.id, question.user_id, rank, gen_random_uuid(), 0, 0.5, false
            from question
            cross join generate_series(1, 3) as rank
            returning 1
        ),

        assertion as (
            insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action, created_at)
            select tenant, 'aaaaaaaaaaaaaaaa', 7, '{public}', 'query', now() - make_interval(days => 10 * age)
            from unnest(array['acme', 'zeta']) as tenant
            cross join generate_series(0, 24) as age
            returning 1
        )

        insert into rag.rag_retractions (tenant_id, user_id, action, reason, sources, documents, chunks, created_at)
        select 'acme', 7, 'invalidate', 'a test', 1, 1, 1, now() - interval '9 years'
        from (select count(*) from hit union all select count(*) from assertion) as both_of_them
        returning 1
        """,
    )
    return named


def left(deployment: Deployment) -> dict[str, int]:
    tables = ("rag_query_logs", "rag_query_log_chunks", "rag_assertions", "rag_retractions")
    return {
        table: rows(deployment.url("postgres"), f"select count(*) as rows from rag.{table}")[0]["rows"]
        for table in tables
    }


ALL = {"rag_query_logs": 50, "rag_query_log_chunks": 150, "rag_assertions": 50, "rag_retractions": 2}


def test_nothing_ends_unless_the_settings_say_so(rag: Rag, operated: Deployment):
    ran = rag("maintain", "--retention")
    assert (ran.code, ran.out) == (1, "")
    (error,) = ran.errors
    assert error.startswith(
        "nothing has an end: set RAG_LOG_RETENTION_DAYS, RAG_AUDIT_RETENTION_DAYS or RAG_MESSAGE_RETENTION_DAYS"
    )
    assert left(operated) == ALL


def test_questions_end_and_the_record_of_services_has_a_time_of_its_own(
    rag: Rag, operated: Deployment, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAG_LOG_RETENTION_DAYS", "95")
    dry = rag("maintain", "--retention", "--dry-run", "--json")
    assert json.loads(dry.out) == {
        "dry_run": True,
        "retention": [{"kind": "questions", "older_than_days": 95, "found": 30, "removed": 0}],
    }
    assert left(operated) == ALL
    done = rag("maintain", "--retention")
    assert [line.split() for line in done.out.splitlines()] == [
        ["kind", "older_than_days", "found", "removed"],
        ["questions", "95", "30", "30"],
    ]
    assert done.err.splitlines()[-1] == "removing questions: 1/1"
    assert left(operated) == ALL | {"rag_query_logs": 20, "rag_query_log_chunks": 60}

    monkeypatch.setenv("RAG_AUDIT_RETENTION_DAYS", "200")
    both = rag("maintain", "--retention", "--json")
    assert [(row["kind"], row["removed"]) for row in json.loads(both.out)["retention"]] == [
        ("questions", 0),
        ("assertions", 10),
    ]
    assert left(operated) == ALL | {"rag_query_logs": 20, "rag_query_log_chunks": 60, "rag_assertions": 40}


def test_other_work_does_not_go_with_it(rag: Rag, operated: Deployment):
    for other in ("--refresh", "--rebuild", "--memory=64"):
        assert rag("maintain", "--retention", other).code == 1


def test_it_is_an_operators(rag: Rag, operated: Deployment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAG_LOG_RETENTION_DAYS", "1")
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", operated.url("rag_app"))
    assert rag("maintain", "--retention").code == 1
    assert left(operated) == ALL


@pytest.mark.parametrize("batch", [1, 4, 15, 30, 31])
def test_batches_are_bounded_and_a_run_that_stopped_is_taken_up(operated: Deployment, batch: int):
    desk = operate.Desk(operator_url=operated.url("rag_operator"), administrator_url=None)
    term = Term(kind="questions", older_than=timedelta(days=95))
    assert count(desk, term) == 30
    told: list[int] = []

    def stops(done: int) -> None:
        told.append(done)
        if len(told) == 2:
            raise KeyboardInterrupt

    try:
        expire(desk, term, stops, batch=batch)
    except KeyboardInterrupt:
        assert count(desk, term) == 30 - sum(told)
    expire(desk, term, told.append, batch=batch)
    assert (max(told), sum(told), count(desk, term)) == (min(batch, 30), 30, 0)
    assert left(operated)["rag_query_logs"] == 20


def test_a_batch_reads_what_it_removes_and_not_all_that_is_young(operated: Deployment):
    """Along the index by tenant and time: 20,000 further questions of today cost it no pages."""
    superuser = operated.url("postgres")
    rows(
        superuser,
        """
        insert into rag.rag_query_logs (tenant_id, user_id, query_hash, query_length, mode, result_count,
            citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)
        select 'acme', 7, 'hash', 4, 'hybrid', 1, 0, 0, 1, 0, 1 from generate_series(1, 20000)
        returning 1
        """,
    )
    with operated.cluster.superuser(operated.name) as connection:
        connection.execute("vacuum analyze rag.rag_query_logs")
        connection.execute("set session authorization rag_operator")
        pages = []
        for _ in range(2):  # the first one reads the catalog as well
            plan = connection.execute(
                "explain (analyze, buffers, format json) select rag.expire_batch('questions', '95 days', 10)"
            ).fetchone()[0][0]["Plan"]
            pages.append(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
    table = rows(superuser, "select pg_relation_size('rag.rag_query_logs') / 8192 as pages")[0]["pages"]
    print("pages of two batches, and of the table:", pages, table)
    assert table > 300
    assert pages[1] < table
