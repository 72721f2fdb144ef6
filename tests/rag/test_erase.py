"""Erasure against what is in flight: an ingest that began before brings nothing back, and nobody blocks for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from rag import erase, operate
from rag.database import Database
from rag.embed import Embedder, Purpose
from rag.erase import Subject
from rag.errors import DocumentNotFound, InvalidInput, RAGServiceError, ScopeForbidden, SourceRetracted
from rag.ingest import Ingested, Source, ingest
from rag.operate import Desk
from rag.principal import Principal
from rag.store import Destination, remove_document
from tests.conftest import DIMENSIONS, Deployment, Store
from tests.rag.stored import rows

MARA = Principal(tenant_id="acme", user_id=7, project_id="orion")
JONAS = Principal(tenant_id="acme", user_id=8, project_id="orion")
TEXT = "The deploy window of orion is Tuesday, 09:40 to 11:10."


class Interrupted:
    """Answers every text with one vector, since meaning plays no part here; meanwhile something happens."""

    def __init__(self, real: Embedder, meanwhile: Callable[[], Awaitable[object]]) -> None:
        self._meanwhile = meanwhile
        self.model_id = real.model_id
        self.max_input_tokens = real.max_input_tokens
        self.min_similarity = real.min_similarity
        self.token_counter = real.token_counter
        self.count_tokens = real.count_tokens

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        await self._meanwhile()
        return [[1.0] + [0.0] * (DIMENSIONS - 1) for _ in texts]

    async def close(self) -> None:
        """The real one belongs to the session."""


@pytest.fixture
def desk(deployment: Deployment) -> Desk:
    return Desk(operator_url=deployment.url("rag_operator"), administrator_url=deployment.url("postgres"))


Put = Callable[..., Awaitable[Ingested]]


@pytest.fixture
def put(database: Database, embedder: Embedder) -> Put:
    """`put(…)` ingests a note of Mara's project, and meanwhile something happens."""

    async def nothing() -> None: ...

    async def write(
        principal: Principal = MARA,
        *,
        source_id: str = "notes/deploy.md",
        content: str = TEXT,
        meanwhile: Callable[[], Awaitable[object]] = nothing,
    ) -> Ingested:
        return await ingest(
            Source(name=source_id, source_id=source_id, content=content),
            principal=principal,
            destination=Destination(scope="project", user_id=7, project_id="orion", tags=principal.tags),
            database=database,
            embedder=Interrupted(embedder, meanwhile),
            max_bytes=10_000,
        )

    return write


def forget(desk: Desk, **named: Any) -> dict[str, int]:
    with desk.session() as session:
        return erase.forget(session, Subject(**{"tenant_id": "acme", **named}))


def forgetting(desk: Desk, **named: Any) -> Callable[[], Awaitable[object]]:
    """Erases once, however often it is asked to: a second attempt of an ingest is left alone."""
    erasures = iter([named])

    async def run() -> None:
        for subject in erasures:
            await asyncio.to_thread(forget, desk, **subject)

    return run


def left(deployment: Deployment) -> list[dict[str, Any]]:
    """Of all tenants, what would give somebody away."""
    return rows(
        deployment.url("postgres"),
        "select scope, user_id, project_id from rag.rag_access_classes"
        " union all select source_id, user_id, project_id from rag.rag_documents",
    )


SUBJECTS: dict[str, dict[str, Any]] = {
    "tenant": {},
    "user": {"user_id": 7},
    "project": {"project_id": "orion"},
    "project of one": {"project_id": "orion", "user_id": 7},
    "source": {"source_id": "notes/deploy.md"},
    "source of a type": {"source_id": "notes/deploy.md", "source_type": "markdown"},
}
# What an erased source leaves: the class that it was in.
CLASS = {"scope": "project", "user_id": 7, "project_id": "orion"}
LEFT = {"source": [CLASS], "source of a type": [CLASS]}
OTHERS: dict[str, dict[str, Any]] = {
    "another tenant": {"tenant_id": "other"},
    "another user": {"user_id": 8},
    "another project": {"project_id": "lyra"},
    "that project of another user": {"project_id": "orion", "user_id": 8},
    "another source": {"source_id": "notes/other.md"},
    "that source of another type": {"source_id": "notes/deploy.md", "source_type": "text"},
}


# --- what began before -----------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_what_is_erased_while_it_is_ingested_stays_away(
    put: Put, desk: Desk, deployment: Deployment, subject: str
):
    with pytest.raises(SourceRetracted):
        await put(meanwhile=forgetting(desk, **SUBJECTS[subject]))
    assert left(deployment) == LEFT.get(subject, [])


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_neither_does_an_earlier_deletion_open_a_door(
    put: Put, database: Database, desk: Desk, deployment: Deployment, subject: str
):
    """An erasure takes the tombstones of its classes along: the number of deletions alone would not change."""
    first = await put()
    await remove_document(database, MARA, first.document_id, reason="a test")
    with pytest.raises(SourceRetracted):
        await put(meanwhile=forgetting(desk, **SUBJECTS[subject]))
    assert left(deployment) == LEFT.get(subject, [])


async def test_nor_does_an_earlier_erasure(put: Put, desk: Desk, deployment: Deployment):
    """The erasure of a tenant takes the records of its users' along."""
    forget(desk, user_id=7)
    with pytest.raises(SourceRetracted):
        await put(meanwhile=forgetting(desk))
    assert left(deployment) == []


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_a_new_version_that_is_on_its_way_stays_away_as_well(
    put: Put, desk: Desk, deployment: Deployment, subject: str
):
    await put()
    rewritten = Principal(tenant_id="acme", user_id=7, project_id="orion", tags=("public", "hr"))
    with pytest.raises(SourceRetracted):
        await put(rewritten, content=TEXT + " It moved.", meanwhile=forgetting(desk, **SUBJECTS[subject]))
    assert rows(deployment.url("postgres"), "select id from rag.rag_documents") == []


@pytest.mark.parametrize("subject", OTHERS)
async def test_who_is_not_erased_is_not_disturbed(put: Put, desk: Desk, deployment: Deployment, subject: str):
    assert (await put(meanwhile=forgetting(desk, **OTHERS[subject]))).status == "created"
    assert len(rows(deployment.url("postgres"), "select id from rag.rag_documents")) == 1


@pytest.mark.parametrize("subject", ["user", "project", "project of one"])
async def test_a_member_who_writes_to_an_erased_project_is_refused(
    put: Put, desk: Desk, deployment: Deployment, subject: str
):
    with desk.session() as session:
        membership = operate.Membership(tenant_id="acme", owner_user_id=7, project_id="orion", member_user_id=8)
        operate.share(session, membership, may_write=True)
    with pytest.raises((SourceRetracted, ScopeForbidden)):
        await put(JONAS, meanwhile=forgetting(desk, **SUBJECTS[subject]))
    assert left(deployment) == []


@pytest.mark.parametrize("subject", SUBJECTS)
async def test_afterwards_everybody_may_begin_anew(put: Put, desk: Desk, subject: str):
    first = await put()
    forget(desk, **SUBJECTS[subject])
    again = await put()
    assert (again.status, again.document_id == first.document_id) == ("created", False)
    assert (await put()).status == "unchanged"


async def test_of_many_that_are_being_written_none_survives_the_erasure(
    put: Put, desk: Desk, deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
):
    """They were all looked up before, and are written while the erasure waits, runs, or is over."""
    writers, rounds = 8, scaled(test=6, ci=50, prove=500)
    counts = {"written": 0, "refused": 0}

    async def write(number: int, start: asyncio.Barrier) -> None:
        async def together() -> None:
            await start.wait()
            await asyncio.sleep(number * 0.002)

        try:
            await put(source_id=f"notes/{number}.md", meanwhile=together)
            counts["written"] += 1
        except SourceRetracted:
            counts["refused"] += 1

    async def erase_user(start: asyncio.Barrier, delay_s: float) -> None:
        await start.wait()
        await asyncio.sleep(delay_s)
        await asyncio.to_thread(forget, desk, user_id=7)

    for attempt in range(rounds):
        start = asyncio.Barrier(writers + 1)
        await asyncio.gather(
            erase_user(start, attempt % 6 * 0.004), *(write(number, start) for number in range(writers))
        )
        assert left(deployment) == []
    assert counts["written"] + counts["refused"] == writers * rounds
    figure(
        f"{writers * rounds} documents in flight during {rounds} erasures: {counts['written']} written before, "
        f"{counts['refused']} refused, 0 left"
    )


def wait_for_locks(deployment: Deployment, roles: set[str]) -> None:
    """Return when sessions of exactly these roles wait for a lock."""
    waiting = "select usename from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
    while {row["usename"] for row in rows(deployment.url("postgres"), waiting)} != roles:
        time.sleep(0.01)


async def test_who_deletes_a_document_and_who_erases_its_owner_do_not_wait_for_each_other(
    database: Database, desk: Desk, deployment: Deployment, store: Store
):
    """Both wait for a third one who writes, the erasure first: what it will want next must not be locked."""
    document = store(MARA, TEXT, scope="project", project_id="orion")

    with deployment.transaction(Principal(tenant_id="acme", user_id=9)) as writer:
        writer.execute("select access_class('user', 9, null, '{public}')")
        erasing = asyncio.create_task(asyncio.to_thread(forget, desk, user_id=7))
        await asyncio.to_thread(wait_for_locks, deployment, {"rag_operator"})
        deleting = asyncio.create_task(remove_document(database, MARA, document, reason="a test"))
        await asyncio.to_thread(wait_for_locks, deployment, {"rag_operator", "rag_app"})
    outcomes = await asyncio.gather(erasing, deleting, return_exceptions=True)
    assert isinstance(outcomes[0], dict)
    assert isinstance(outcomes[1], DocumentNotFound)
    assert rows(deployment.url("postgres"), "select id from rag.rag_documents") == []


# --- what can be erased ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "field"),
    [
        ({"tenant_id": ""}, "tenant_id"),
        ({"user_id": 0}, "user_id"),
        ({"user_id": -7}, "user_id"),
        ({"project_id": ""}, "project_id"),
        ({"project_id": "*"}, "project_id"),
        ({"source_id": ""}, "source_id"),
        ({"source_id": "a\nb"}, "source_id"),
        ({"source_type": "text"}, "source_type"),
        ({"source_id": "notes", "source_type": "x" * 65}, "source_type"),
        ({"source_id": "notes", "user_id": 7}, "source_id"),
        ({"source_id": "notes", "project_id": "orion"}, "source_id"),
    ],
)
def test_what_names_nothing_is_refused(named: dict[str, Any], field: str):
    with pytest.raises(InvalidInput) as refused:
        Subject(**{"tenant_id": "acme", **named})
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({}, "tenant acme"),
        ({"user_id": 7}, "user 7 of tenant acme"),
        ({"project_id": "orion"}, "project orion of all owners in tenant acme"),
        ({"project_id": "orion", "user_id": 7}, "project orion of user 7 in tenant acme"),
        ({"source_id": "notes"}, "source notes in tenant acme"),
        ({"source_id": "notes", "source_type": "text"}, "source notes of type text in tenant acme"),
    ],
)
def test_a_subject_is_said_in_words(named: dict[str, Any], said: str):
    assert str(Subject(tenant_id="acme", **named)) == said


def test_each_field_reaches_the_database(desk: Desk, store: Store):
    """Of five documents only the one that all fields name."""
    store(MARA, TEXT, scope="project", project_id="orion")
    store(MARA, TEXT, scope="project", project_id="orion", tags=("public", "hr"))
    store(MARA, TEXT)
    store(JONAS, TEXT, scope="project", project_id="orion")
    store(Principal(tenant_id="other", user_id=7, project_id="orion"), TEXT, scope="project", project_id="orion")
    counts = {
        "tenant": 4,
        "user": 3,
        "project": 3,
        "project of one": 2,
    }
    with desk.session() as session:
        for name, expected in counts.items():
            subject = Subject(**{"tenant_id": "acme", **SUBJECTS[name]})
            assert erase.count_traces(session, subject)["rag_documents"] == expected, asdict(subject)
        for source_type, expected in ((None, 1), ("text", 1), ("markdown", 0)):
            subject = Subject(tenant_id="acme", source_id="source-2", source_type=source_type)
            assert erase.count_traces(session, subject)["rag_documents"] == expected
    assert forget(desk, **SUBJECTS["project of one"])["rag_documents"] == 2
    with desk.session() as session:
        assert erase.count_traces(session, Subject(tenant_id="acme", user_id=7))["rag_documents"] == 1


def test_an_erasure_that_fails_leaves_everything(desk: Desk, deployment: Deployment, store: Store):
    store(MARA, TEXT, scope="project", project_id="orion")
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(
            "alter table rag.rag_erasures add constraint nothing_can_be_recorded check (erased_by = 'nobody') not valid"
        )
    with pytest.raises(RAGServiceError):
        forget(desk)
    assert len(left(deployment)) == 2


def test_logs_end_by_age(desk: Desk, deployment: Deployment):
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for tenant, days in (("acme", 100), ("acme", 10), ("other", 100)):
            superuser.execute(
                "insert into rag.rag_assertions (tenant_id, key_id, user_id, tags, action, created_at)"
                " values (%s, 'key', 7, '{public}', 'query', now() - make_interval(days => %s))",
                (tenant, days),
            )
    with desk.session() as session:
        assert erase.expire_logs(session, older_than=timedelta(days=90), tenant_id="acme") == 1
        assert erase.expire_logs(session, older_than=timedelta(days=90), tenant_id=None) == 1
        assert erase.expire_logs(session, older_than=timedelta(0), tenant_id=None) == 1
