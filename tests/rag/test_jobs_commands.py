"""`rag jobs` and `rag worker`, as they are typed."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest

from rag.principal import Principal
from tests.conftest import Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import asked, job_rows, queued, until_empty, worker_environment
from tests.rag.stored import rows
from tests.rag.test_cli import Rag, named, rag
from tests.sql.test_limits import limit

__all__ = ["named", "rag"]

MARA = Principal(tenant_id="acme", user_id=7)
OTHER = Principal(tenant_id="globex", user_id=9)


@pytest.fixture
def operating(named: Deployment, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", named.url("rag_operator"))
    return named


def listed(rag: Rag, *options: str) -> list[dict[str, Any]]:
    ran = rag("jobs", "list", *options, "--json")
    assert (ran.code, ran.errors) == (0, [])
    found: list[dict[str, Any]] = json.loads(ran.out)["jobs"]
    return found


def stored(deployment: Deployment) -> list[str]:
    found = rows(deployment.url("postgres"), "select source_id from rag.rag_documents order by source_id")
    return [row["source_id"] for row in found]


def work_off(deployment: Deployment) -> str:
    with fake_openai() as server:
        return until_empty(worker_environment(deployment, server.base_url))


def test_jobs_are_listed_with_their_reasons_and_nothing_of_what_they_are_about(rag: Rag, operating: Deployment) -> None:
    limit(operating, "acme", documents=0)
    failed = asked(operating, MARA, "secret-plans", "The vault code is 4711.")
    done = asked(operating, OTHER, "secret-guide", "The ferry leaves at six.")
    assert [(row["id"], row["status"]) for row in listed(rag)] == [(str(done), "pending"), (str(failed), "pending")]
    said = work_off(operating)
    assert '"event": "job_failed"' in said
    assert '"event": "job_done"' in said
    latest, earliest = listed(rag)
    assert (latest["id"], latest["tenant_id"], latest["status"], latest["reason"]) == (
        str(done),
        "globex",
        "succeeded",
        None,
    )
    assert (earliest["id"], earliest["status"], earliest["reason"]) == (str(failed), "failed", "quota_exceeded")
    assert [row["id"] for row in listed(rag, "--status", "failed")] == [str(failed)]
    assert [row["id"] for row in listed(rag, "--tenant", "globex")] == [str(done)]
    assert listed(rag, "--tenant", "globex", "--status", "failed") == []
    shown = rag("jobs", "list").out
    assert "quota_exceeded" in shown
    for word in ("secret", "vault", "ferry"):
        assert word not in shown + said + json.dumps(listed(rag))


def test_a_job_that_failed_is_tried_again_by_hand(rag: Rag, operating: Deployment) -> None:
    limit(operating, "acme", documents=0)
    failed = asked(operating, MARA, "guide", "The ferry leaves at six.")
    done = asked(operating, OTHER, "guide", "The plane leaves at seven.")
    work_off(operating)
    limit(operating, "acme", documents=1)
    # One that failed, one that did not, and one that is none.
    ran = rag("jobs", "retry", str(failed), str(done), str(uuid4()))
    assert (ran.code, ran.out) == (1, "1 of 3 jobs put into the queue again.\n")
    assert [row["status"] for row in listed(rag)] == ["succeeded", "pending"]
    work_off(operating)
    assert [row["status"] for row in listed(rag)] == ["succeeded", "succeeded"]
    assert stored(operating) == ["guide", "guide"]


def test_a_job_that_is_cancelled_is_never_done_and_keeps_nothing(rag: Rag, operating: Deployment) -> None:
    cancelled = asked(operating, MARA, "guide", "The ferry leaves at six.")
    kept = asked(operating, MARA, "other", "The plane leaves at seven.")
    ran = rag("jobs", "cancel", str(cancelled))
    assert (ran.code, ran.out) == (0, "1 of 1 job cancelled.\n")
    assert [entry["args"] for entry in queued(operating)] == [{"id": str(kept)}]
    first, _ = job_rows(operating)
    assert (first["id"], first["payload"], first["body"]) == (cancelled, None, None)
    work_off(operating)
    assert stored(operating) == ["other"]
    assert [row["status"] for row in listed(rag)] == ["succeeded", "cancelled"]
    # What is done stays done, and what was cancelled is not put back.
    assert rag("jobs", "cancel", str(kept)).out == "0 of 1 job cancelled.\n"
    assert rag("jobs", "retry", str(cancelled)).out == "0 of 1 job put into the queue again.\n"
    assert stored(operating) == ["other"]


def test_a_worker_with_nothing_to_do_ends(operating: Deployment) -> None:
    assert "job_" not in work_off(operating)


def test_what_is_mistyped_is_said(rag: Rag, operating: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rag("jobs", "list", "--status", "lost").errors[0].startswith("status must be one of pending, processing")
    assert rag("jobs", "retry", "seven").code != 0
    assert rag("jobs", "cancel").code != 0
    assert rag("worker", "--jobs", "0").code != 0
    monkeypatch.delenv("RAG_OPERATOR_DATABASE_URL")
    for command in (("list",), ("retry", str(uuid4())), ("cancel", str(uuid4()))):
        ran = rag("jobs", *command)
        assert ran.code == 1
        assert "RAG_OPERATOR_DATABASE_URL" in ran.errors[0]


def test_a_worker_that_is_not_rag_worker_is_refused(rag: Rag, operating: Deployment) -> None:
    ran = rag("worker", "--until-empty")
    assert ran.code == 1
    assert "must log in as rag_worker" in ran.errors[0]
