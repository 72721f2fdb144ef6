"""Jobs of others: nobody sees one, changes one, or is handed one; by user, by tenant, by login."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from rag.principal import Principal
from rag.resources import query
from tests.conftest import SIGNER, Deployment, named
from tests.rag.jobbing import asked, job_rows, queued
from tests.sql.world import refused_with

MARA = Principal(tenant_id="acme", user_id=7)
JONAS = Principal(tenant_id="acme", user_id=8)
NOBODY = Principal(tenant_id="acme")
OTHER = Principal(tenant_id="globex", user_id=7)
OUTSIDERS = [JONAS, NOBODY, OTHER]


def rows(connection: psycopg.Connection, name: str, **parameters: object) -> list[tuple[object, ...]]:
    return connection.execute(query(name), parameters).fetchall()


@pytest.fixture
def job(deployment: Deployment) -> UUID:
    return asked(deployment, MARA, "guide", "The vault code is 4711.")


def give_out(deployment: Deployment) -> int:
    """What a worker's library does to be given the next job."""
    with deployment.connect("rag_worker") as worker:
        (number,) = worker.execute("select worker_id from procrastinate_register_worker_v1()").fetchone() or (0,)
        (queue_id,) = worker.execute(
            "select id from procrastinate_fetch_job_v2(array['rag']::varchar[], %s)", (number,)
        ).fetchone() or (0,)
    return int(queue_id)


def proof(role: str = "rag_worker", purpose: str = "jobs") -> str:
    return SIGNER.prove(role=role, purpose=purpose)


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
def test_its_owner_sees_and_cancels_it(deployment: Deployment, job: UUID, login: str) -> None:
    with deployment.transaction(MARA, role=login) as connection:
        assert len(rows(connection, "my_job", id=job)) == 1
        assert rows(connection, "cancel_my_job", id=job) == [(True,)]


@pytest.mark.parametrize("outsider", OUTSIDERS, ids=["another user", "without a user", "another tenant"])
@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
def test_nobody_else_sees_or_changes_it(deployment: Deployment, job: UUID, outsider: Principal, login: str) -> None:
    before = job_rows(deployment)
    with deployment.transaction(outsider, role=login) as connection:
        assert rows(connection, "my_job", id=job) == []
        assert rows(connection, "cancel_my_job", id=job) == [(False,)]
    assert job_rows(deployment) == before
    assert len(queued(deployment)) == 1


@pytest.mark.parametrize("outsider", OUTSIDERS, ids=["another user", "without a user", "another tenant"])
@pytest.mark.parametrize("login", ["rag_app", "rag_publisher"])
def test_nobody_else_finds_it_waiting(deployment: Deployment, job: UUID, outsider: Principal, login: str) -> None:
    (row,) = job_rows(deployment)
    named = {"kind": "ingest", "lock": row["lock"]}
    with deployment.transaction(MARA, role=login) as connection:
        assert rows(connection, "my_waiting_job", **named) == [(job,)]
        assert rows(connection, "my_waiting_job", kind="sync", lock=row["lock"]) == [(None,)]
    with deployment.transaction(outsider, role=login) as connection:
        assert rows(connection, "my_waiting_job", **named) == [(None,)]
    give_out(deployment)
    with deployment.transaction(MARA, role=login) as connection:
        assert rows(connection, "my_waiting_job", **named) == [(job,)], "given out and not begun"


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher", "rag_worker", "rag_operator"])
def test_no_login_reads_or_writes_the_table(deployment: Deployment, job: UUID, login: str) -> None:
    with deployment.connect(login) as connection:
        for statement in (
            "select id from rag.rag_jobs",
            "select body from rag.rag_jobs",
            "update rag.rag_jobs set status = 'cancelled'",
            "delete from rag.rag_jobs",
            "insert into rag.rag_jobs (tenant_id, user_id, tags, kind, status)"
            " values ('acme', 7, '{}', 'x', 'pending')",
            "select token from rag.rag_claims",
            "select args from jobs.procrastinate_jobs",
            "update jobs.procrastinate_jobs set args = '{}'",
        ):
            assert refused_with(connection, statement) == "42501", statement
    assert job_rows(deployment)[0]["id"] == job


def test_an_analyst_of_everything_sees_no_job(deployment: Deployment, job: UUID) -> None:
    with deployment.cluster.superuser(deployment.name) as superuser, superuser.transaction(force_rollback=True):
        superuser.execute("create role jobs_person login in role rag_analyst")
        superuser.execute(
            "insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)"
            " values ('acme', 'jobs_person', '{public}', '{*}', 'text')"
        )
        superuser.execute("set local session authorization jobs_person")
        for statement in (
            "select id from rag.rag_jobs",
            f"select id from rag.my_job('{job}')",
            "select id from rag.list_jobs(null, null, 10)",
            "select pending from rag.queue_depth('30 s', 'a proof')",
        ):
            assert refused_with(superuser, statement) == "42501", statement
        # Nor would one who could call it: no row is an analyst's own.
        superuser.execute("reset session authorization")
        superuser.execute("grant execute on function rag.my_job(uuid) to rag_analyst")
        superuser.execute("set local session authorization jobs_person")
        assert superuser.execute("select id from rag.my_job(%s)", (job,)).fetchall() == []


def test_what_an_analyst_may_not_own_a_principal_without_a_user_does(deployment: Deployment) -> None:
    job = asked(deployment, NOBODY, "notice", "The pier is closed.", scope="public")
    with deployment.transaction(NOBODY) as connection:
        assert len(rows(connection, "my_job", id=job)) == 1
    with deployment.cluster.superuser(deployment.name) as superuser, superuser.transaction(force_rollback=True):
        superuser.execute("create role jobs_person login in role rag_analyst")
        superuser.execute("insert into rag.rag_analysts (tenant_id, role_name) values ('acme', 'jobs_person')")
        superuser.execute("grant execute on function rag.my_job(uuid) to rag_analyst")
        superuser.execute("set local session authorization jobs_person")
        assert superuser.execute("select id from rag.my_job(%s)", (job,)).fetchall() == []


def test_a_worker_is_handed_the_job_that_it_was_given_and_no_other(deployment: Deployment, job: UUID) -> None:
    waiting = asked(deployment, OTHER, "plans", "The other vault code is 1174.")
    queue_id = give_out(deployment)
    by_job = {row["id"]: row["queue_id"] for row in job_rows(deployment)}
    assert by_job[job] == queue_id
    with deployment.connect("rag_worker") as worker:
        # Waiting still; and under the number of the one that was given out.
        for id, number in (
            (waiting, by_job[waiting]),
            (waiting, queue_id),
            (job, by_job[waiting]),
            (uuid4(), queue_id),
        ):
            assert rows(worker, "take_job", id=id, queue_id=number, proof=proof()) == []
        (taken,) = rows(worker, "take_job", id=job, queue_id=queue_id, proof=proof())
    assert taken[:4] == ("acme", 7, None, ["public"])
    assert "4711" in repr(taken)


@pytest.mark.parametrize(
    "shown",
    [None, "", "test.1.00", proof(purpose="service_keys"), proof(role="rag_app"), SIGNER.sign(MARA, role="rag_worker")],
    ids=["none", "empty", "made up", "for the keys", "of another login", "a principal's"],
)
def test_the_password_of_the_worker_alone_is_handed_nothing(
    deployment: Deployment, job: UUID, shown: str | None
) -> None:
    queue_id = give_out(deployment)
    with deployment.connect("rag_worker") as worker:
        for name, more in (
            ("take_job", {"queue_id": queue_id}),
            ("return_job", {"claim": uuid4(), "reason": "x", "detail": "x", "due_in": None, "counted": True}),
        ):
            with pytest.raises(psycopg.errors.InvalidAuthorizationSpecification):
                rows(worker, name, id=job, proof=shown, **more)
    assert job_rows(deployment)[0]["status"] == "pending"


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher", "rag_operator"])
def test_only_a_worker_is_handed_jobs(deployment: Deployment, job: UUID, login: str) -> None:
    queue_id = give_out(deployment)
    with deployment.connect(login) as connection:
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows(connection, "take_job", id=job, queue_id=queue_id, proof=proof(role=login))
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select jobs.procrastinate_fetch_job_v2(null, 1)")


def test_a_job_is_settled_by_whoever_took_it_last_and_as_its_principal(deployment: Deployment, job: UUID) -> None:
    queue_id = give_out(deployment)
    with deployment.connect("rag_worker") as worker:
        claims = [rows(worker, "take_job", id=job, queue_id=queue_id, proof=proof())[0][8] for _ in range(2)]
    for principal, claim, settled in (
        (MARA, claims[0], False),
        (MARA, uuid4(), False),
        (JONAS, claims[1], False),
        (OTHER, claims[1], False),
        (MARA, claims[1], True),
        (MARA, claims[1], False),
    ):
        with deployment.transaction(principal, role="rag_worker") as connection:
            assert rows(connection, "holds_job", id=job, claim=claim) == [(settled,)]
            assert rows(connection, "settle_job", id=job, claim=claim, result="{}") == [(settled,)]
    (row,) = job_rows(deployment)
    assert (row["status"], row["body"]) == ("succeeded", None)


def test_a_job_that_is_held_is_given_to_nobody_before_the_step_ends(deployment: Deployment, job: UUID) -> None:
    queue_id = give_out(deployment)
    with deployment.connect("rag_worker") as worker:
        ((*_, claim),) = rows(worker, "take_job", id=job, queue_id=queue_id, proof=proof())
    with deployment.transaction(MARA, role="rag_worker") as step:
        assert rows(step, "holds_job", id=job, claim=claim) == [(True,)]
        with deployment.connect("rag_worker") as other:
            other.execute("set lock_timeout = '200ms'")
            with pytest.raises(psycopg.errors.LockNotAvailable):
                rows(other, "take_job", id=job, queue_id=queue_id, proof=proof())
    with deployment.connect("rag_worker") as other:
        rows(other, "take_job", id=job, queue_id=queue_id, proof=proof())
    with deployment.transaction(MARA, role="rag_worker") as late:
        assert rows(late, "holds_job", id=job, claim=claim) == [(False,)]


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher", "rag_worker"])
def test_what_a_synchronisation_compares_is_its_principals_own_and_no_text(deployment: Deployment, login: str) -> None:
    stored = (
        "insert into rag.rag_documents (tenant_id, access_id, scope, user_id, tags, source_type, source_id,"
        " source_hash, title, body, metadata)"
        " values ('acme', %s, 'user', 7, '{public}', 'markdown', %s, 'hash', 'Plans', 'The vault code is 4711.',"
        """ '{"origin": {"source": "plans", "path": "a.md", "sha256": "digest"}}')"""
    )
    with deployment.transaction(MARA) as connection:
        named = "select access_class('user', 7, null, '{public}')"
        (access_id,) = connection.execute(named).fetchone() or (0,)
        for source_id in ("plans:a.md", "plansa.md", "a.md"):
            connection.execute(stored, (access_id, source_id))
    with deployment.transaction(MARA, role=login) as connection:
        (row,) = connection.execute("select * from rag.my_origin('plans')").fetchall()
        assert "plans:a.md" in row
        assert "4711" not in repr(row)
    for outsider in OUTSIDERS:
        with deployment.transaction(outsider, role=login) as connection:
            assert connection.execute("select * from rag.my_origin('plans')").fetchall() == []


def test_a_worker_speaks_for_nobody_without_a_signature_and_searches_for_nobody(deployment: Deployment) -> None:
    with deployment.connect("rag_worker") as worker:
        assert worker.execute("select rag.my_access_ids()").fetchone() == ([],)
        statement = "select begin_as('acme', 7, null, '{public}', 'test.1.00')"
        assert refused_with(worker, statement) == "28000"
        for statement in (
            "select * from rag.search('vault')",
            "select * from rag.my_documents()",
            "select * from rag.my_chunks()",
            "select * from rag.v_chunks",
            "select body from rag.rag_documents",
            "select chunk_text from rag.rag_chunks",
            "select rag.load_service_keys('x')",
            "select rag.forget('acme')",
            "select * from rag.list_jobs(null, null, 10)",
            "select rag.enqueue_job('ingest', null, null, null, '{}', null, null, null, null)",
        ):
            assert refused_with(worker, statement) == "42501", statement


def test_nobody_claims_a_source_that_they_may_not_write(deployment: Deployment) -> None:
    with deployment.transaction(MARA) as connection:
        (mine,) = connection.execute("select access_class('user', 7, null, '{public}')").fetchone() or (0,)
    claim: dict[str, Any] = {
        "scope": "user",
        "owner_user_id": 7,
        "owner_project_id": None,
        "document_tags": ["public"],
        "settled_hash": None,
        "source_type": "text",
        "source_id": "guide",
        "provenance_id": None,
        "token": uuid4(),
        "lease": "1 min",
    }
    for outsider in OUTSIDERS:
        for login in ("rag_app", "rag_worker"):
            with (
                deployment.transaction(outsider, role=login) as connection,
                pytest.raises(psycopg.errors.InsufficientPrivilege),
            ):
                connection.execute("select rag.claim_source(%s, 'text', 'guide', %s, '1 min')", (mine, claim["token"]))
    for outsider in (JONAS, NOBODY):
        with deployment.transaction(outsider) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
            rows(connection, "claim_source", **claim, **named(outsider, role="rag_app"))
    # In another tenant the same names are another source, and nothing to wait for.
    with deployment.transaction(OTHER) as connection:
        ((_, elsewhere, *_),) = rows(connection, "claim_source", **claim, **named(OTHER, role="rag_app"))
        assert elsewhere is not None
    with deployment.transaction(MARA) as connection:
        ((_, digest, *_),) = rows(connection, "claim_source", **claim, **named(MARA, role="rag_app"))
        assert digest is not None
    for outsider in (JONAS, OTHER):
        with deployment.transaction(outsider) as connection:
            rows(connection, "release_claim", source_digest=digest, token=uuid4())
    with deployment.transaction(MARA) as connection:
        again = claim | {"token": uuid4()}
        ((_, still_held, *_),) = rows(connection, "claim_source", **again, **named(MARA, role="rag_app"))
        assert still_held is None


def test_an_idempotency_key_is_each_principals_own(deployment: Deployment) -> None:
    recorded = {
        "kind": "ingest",
        "source_type": "text",
        "source_id": "guide",
        "result": "{}",
        "request_key": b"key",
        "request_digest": b"digest",
    }
    for principal in (MARA, *OUTSIDERS):
        with deployment.transaction(principal) as connection:
            assert rows(connection, "my_request", request_key=b"key", valid_for="1 day") == []
            rows(connection, "record_request", **recorded)
            assert len(rows(connection, "my_request", request_key=b"key", valid_for="1 day")) == 1
