"""What a push means: which sources it concerns, one effect each, and the tip of the branch whatever the order."""

from __future__ import annotations

import asyncio
import signal
import stat
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from rag import jobs, tasks
from rag.database import Database
from rag.embed import Embedder
from rag.errors import InvalidInput, JobLost, QueueFull, SourceUnavailable
from rag.gather import PathFilter, list_commit
from rag.generate import open_generator
from rag.principal import Principal
from rag.push import MAX_PATHS, Push, announce, concerned
from rag.settings import Settings
from rag.store import count_sources
from rag.sync import SourceSpec, Synchroniser, load_specs
from tests.conftest import SIGNER, Deployment
from tests.fakes.openai_embeddings import fake_openai
from tests.rag.jobbing import job_rows, queued, start_worker, until_empty, wait_until, worker_environment, working
from tests.rag.test_gather import commit, git, served, write
from tests.rag.test_work import set_due

MARA = Principal(tenant_id="acme", user_id=7)


def change(place: Path, **files: str) -> str:
    write(place, **files)
    return commit(place)


def spec(**fields: Any) -> SourceSpec:
    return SourceSpec(
        **{"name": "handbook", "github": "acme/handbook", "tenant": "acme", "user": 7, "ref": "main", **fields}
    )


def push(*paths: str, **fields: Any) -> Push:
    touched = {"paths": paths} if paths else {}
    return Push(
        **{"repository": "acme/handbook", "ref": "refs/heads/main", "default_branch": "main", **touched, **fields}
    )


# --- which sources it concerns --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "moved", "concerns"),
    [
        ({}, {}, True),
        ({"github": "Acme/HandBook"}, {"repository": "aCME/handbook"}, True),
        ({}, {"repository": "acme/handbook2"}, False),
        ({}, {"repository": "globex/handbook"}, False),
        ({"github": None, "git": "https://github.com/acme/handbook.git"}, {}, False),
        ({}, {"ref": "refs/heads/main2"}, False),
        ({}, {"ref": "refs/heads/feature/main"}, False),
        ({}, {"ref": "refs/heads/feature"}, False),
        ({}, {"ref": "refs/tags/main"}, True),
        ({"ref": "refs/heads/main"}, {}, True),
        ({"ref": "v1"}, {"ref": "refs/tags/v1"}, True),
        ({"ref": "docs/next"}, {"ref": "refs/heads/docs/next"}, True),
        ({"ref": "HEAD"}, {}, True),
        ({"ref": "HEAD"}, {"ref": "refs/heads/feature"}, False),
        ({"ref": "HEAD"}, {"ref": "refs/heads/trunk", "default_branch": None}, True),
        ({"ref": "HEAD"}, {"ref": "refs/tags/main"}, False),
        ({}, {"deleted": True}, False),
    ],
)
def test_a_push_concerns_the_sources_of_its_repository_and_branch(
    source: dict[str, Any], moved: dict[str, Any], concerns: bool
) -> None:
    assert concerned(push(**moved), [spec(**source)]) == ([spec(**source)] if concerns else [])


@pytest.mark.parametrize(
    ("paths", "concerns"),
    [
        (["docs/guide.md"], True),
        (["src/main.c", "docs/guide.md"], True),
        (["docs/drafts/guide.md"], False),
        (["src/main.c"], False),
        (["guide.md"], False),
        (["docs/.hidden/guide.md"], False),
        (["docs/logo.png"], False),
        (["docs/../../etc/passwd.md"], False),
        (["../docs/guide.md", "/etc/passwd", "docs/\0.png", "", "/" * 1000], False),
        ([f"src/{number}.c" for number in range(MAX_PATHS)], False),
        ([f"src/{number}.c" for number in range(MAX_PATHS + 1)], True),
        ([f"src/{number}.c" for number in range(100_000)], True),
        ([], True),
    ],
    ids=lambda value: f"{len(value)} paths" if isinstance(value, list) else str(value),
)
def test_a_push_that_touches_only_what_is_filtered_out_concerns_nobody(paths: list[str], concerns: bool) -> None:
    source = spec(include=["docs/"], exclude=["docs/drafts/", "docs/../"])
    assert bool(concerned(push(*paths), [source])) is concerns


def test_one_push_may_concern_several_sources() -> None:
    sources = [spec(), spec(name="decisions", include=["adr/"], tenant="globex"), spec(name="old", ref="v1")]
    assert [each.name for each in concerned(push("adr/1.md"), sources)] == ["handbook", "decisions"]


# --- the configuration ----------------------------------------------------------------------------


def test_a_source_with_github_is_fetched_from_there_unless_it_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "sources.yaml").write_text(
        "- {name: a, github: acme/handbook, tenant: acme, user: 7, askpass: ask}\n"
        "- {name: b, github: acme/handbook, git: mirror, tenant: acme, user: 7}\n"
    )
    far, near = load_specs(tmp_path / "sources.yaml")
    assert (far.repository, far.askpass) == ("https://github.com/acme/handbook.git", tmp_path / "ask")
    assert near.repository == str(tmp_path / "mirror")


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{name: a, github: acme/handbook, user: 7}", "must name its tenant"),
        ("{name: a, github: acme, tenant: t}", "github"),
        ("{name: a, github: 'acme/hand book', tenant: t}", "github"),
        ("{name: a, github: 'https://github.com/acme/handbook', tenant: t}", "github"),
        ("{name: a, github: acme/handbook, directory: x, tenant: t}", "either a directory or a git"),
        ("{name: a, directory: x, askpass: ask}", "askpass is for a git repository"),
    ],
)
def test_what_a_source_with_github_must_not_be(tmp_path: Path, entry: str, said: str) -> None:
    (tmp_path / "sources.yaml").write_text(f"- {entry}\n")
    with pytest.raises(InvalidInput, match=said):
        load_specs(tmp_path / "sources.yaml")


def test_a_private_repository_is_fetched_with_what_askpass_says(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet", "repository")
    change(tmp_path / "repository", README_md="# Private")
    ask = tmp_path / "ask"
    ask.write_text('#!/bin/sh\ncase "$1" in Username*) echo x-access-token;; *) echo ghs_4711;; esac\n')
    with served(tmp_path / "repository" / ".git", password="x-access-token:ghs_4711") as address:
        with pytest.raises(SourceUnavailable), list_commit(address, "main", PathFilter()):
            pass
        with (
            pytest.raises(SourceUnavailable, match="cannot be run"),
            list_commit(address, "main", PathFilter(), askpass=ask),
        ):
            pass
        ask.chmod(stat.S_IRWXU)
        with list_commit(address, "main", PathFilter(), askpass=ask) as listing:
            assert [file.path for file in listing.files] == ["README.md"]
            assert "ghs_4711" not in listing.uri(listing.files[0])
        ask.write_text("#!/bin/sh\necho wrong\n")
        with pytest.raises(SourceUnavailable) as refused, list_commit(address, "main", PathFilter(), askpass=ask):
            pass
        assert "wrong" not in refused.value.message


# --- one effect each ------------------------------------------------------------------------------


def digest(number: int) -> bytes:
    return sha256(str(number).encode()).digest()


def waiting(deployment: Deployment) -> list[dict[str, Any]]:
    return [row for row in job_rows(deployment) if row["status"] == "pending"]


async def test_pushes_that_wait_for_one_source_are_one_job(database: Database, deployment: Deployment) -> None:
    effects = await asyncio.gather(
        *(announce(database, [spec()], delivery=digest(number), max_waiting=10) for number in range(30))
    )
    assert effects == [{"handbook": "queued"}] * 30
    assert (len(waiting(deployment)), len(queued(deployment)), len(job_rows(deployment))) == (1, 1, 30)
    (job,) = waiting(deployment)
    assert (job["kind"], job["tenant_id"], job["user_id"], job["payload"]) == (
        "sync",
        "acme",
        7,
        {"source": "handbook"},
    )
    # Of a delivery that found a job waiting, where that is.
    assert {row["result"]["job"] for row in job_rows(deployment) if row["status"] == "succeeded"} == {str(job["id"])}


async def test_the_same_delivery_again_has_no_effect(
    database: Database, deployment: Deployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    count = scaled(test=40, ci=200, prove=500)
    random = Random(8)
    sent = [number for number in range(count // 10) for _ in range(10)]
    random.shuffle(sent)
    turn = asyncio.Semaphore(20)

    async def one(number: int) -> str:
        async with turn:
            (effect,) = (await announce(database, [spec()], delivery=digest(number), max_waiting=10)).values()
            return effect

    effects = await asyncio.gather(*map(one, sent))
    assert effects.count("queued") == count // 10
    assert len(job_rows(deployment)) == count // 10
    assert len(waiting(deployment)) == len(queued(deployment)) == 1
    figure(f"{count} deliveries, each of {count // 10} ten times and many at once: one effect each")


async def test_sources_of_different_owners_are_jobs_of_their_own(database: Database, deployment: Deployment) -> None:
    sources = [
        spec(),
        spec(name="decisions"),
        spec(tenant="globex"),
        spec(user=8),
        spec(name="notices", user=None, scope="public"),
        spec(name="kiosk", scope="project", project="kiosk"),
    ]
    for source in sources:
        assert set((await announce(database, [source], delivery=digest(1), max_waiting=10)).values()) == {"queued"}
    assert [(row["tenant_id"], row["user_id"], row["project_id"], row["source_id"]) for row in waiting(deployment)] == [
        ("acme", 7, None, "handbook"),
        ("acme", 7, None, "decisions"),
        ("globex", 7, None, "handbook"),
        ("acme", 8, None, "handbook"),
        ("acme", 0, None, "notices"),
        ("acme", 7, "kiosk", "kiosk"),
    ]


async def test_a_full_queue_refuses_and_the_same_delivery_asks_for_the_rest(
    database: Database, deployment: Deployment
) -> None:
    sources = [spec(), spec(name="decisions")]
    with pytest.raises(QueueFull):
        await announce(database, sources, delivery=digest(1), max_waiting=1)
    assert [row["source_id"] for row in waiting(deployment)] == ["handbook"]
    effects = await announce(database, sources, delivery=digest(1), max_waiting=2)
    assert effects == {"handbook": "duplicate", "decisions": "queued"}


async def test_an_idempotency_key_of_somebody_is_never_that_of_a_delivery(database: Database) -> None:
    await announce(database, [spec()], delivery=digest(1), max_waiting=10)
    async with database.transaction(MARA) as session:
        for key in ("push", digest(1).hex(), "handbook"):
            assert await jobs.answered(session, jobs.request_of(key)) is None


# --- what a worker makes of it --------------------------------------------------------------------


class Hosted:
    """A repository that is pushed to, the index of it, and a worker that keeps it in step."""

    def __init__(self, top: Path, deployment: Deployment, embedder_url: str) -> None:
        self.top = top
        self.deployment = deployment
        self.repository = top / "repository"
        git(top, "init", "--quiet", "repository")
        (top / "sources.yaml").write_text(
            "- {name: handbook, github: acme/handbook, git: repository, ref: main, exclude: [drafts/],"
            " tenant: acme, user: 7}\n"
        )
        self.environment = worker_environment(deployment, embedder_url, RAG_SOURCES=str(top / "sources.yaml"))

    @property
    def spec(self) -> SourceSpec:
        return load_specs(self.top / "sources.yaml")[0]

    def push(self, **files: str) -> str:
        """The new tip."""
        return change(self.repository, **files)

    def told(self, number: int) -> None:
        async def run() -> None:
            async with self.deployment.pools() as database:
                await announce(database, [self.spec], delivery=digest(number), max_waiting=10)

        asyncio.run(run())

    def work(self) -> str:
        return until_empty(self.environment)

    def index(self) -> dict[str, str]:
        with psycopg.connect(self.deployment.url("postgres")) as connection:
            rows = connection.execute(
                "select source_id, body from rag.rag_documents where tenant_id = 'acme' and user_id = 7 order by 1"
            ).fetchall()
        return dict(rows)

    def version(self) -> str | None:
        with psycopg.connect(self.deployment.url("postgres")) as connection:
            row = connection.execute("select version from rag.rag_synchronisations").fetchone()
        return None if row is None else str(row[0])


@pytest.fixture
def hosted(tmp_path: Path, deployment: Deployment):  # type: ignore[no-untyped-def]
    with fake_openai() as server:
        yield Hosted(tmp_path, deployment, server.base_url)


def test_a_worker_brings_a_source_to_the_tip_of_its_branch(hosted: Hosted, deployment: Deployment) -> None:
    tip = hosted.push(guide_md="# Guide\n\nSix.", old_md="# Old\n\nGone soon.", drafts__a_md="# Draft")
    hosted.told(1)
    hosted.work()
    assert hosted.index() == {"handbook:guide.md": "# Guide\n\nSix.", "handbook:old.md": "# Old\n\nGone soon."}
    (job,) = job_rows(deployment)
    assert (job["status"], job["payload"]) == ("succeeded", None)
    assert job["result"] == {"version": tip, "files": 2, "written": 2, "removed": 0, "unchanged": 0, "failed": 0}

    (hosted.repository / "old.md").unlink()
    tip = hosted.push(guide_md="# Guide\n\nSeven.")
    hosted.told(2)
    hosted.work()
    assert hosted.index() == {"handbook:guide.md": "# Guide\n\nSeven."}
    assert hosted.version() == tip
    assert job_rows(deployment)[-1]["result"]["removed"] == 1


def test_whatever_the_order_of_deliveries_the_index_ends_at_the_tip(hosted: Hosted, scaled: Callable[..., int]) -> None:
    random = Random(21)
    numbers = list(range(scaled(test=4, ci=12, prove=40)))
    tips = []
    for number in numbers:
        tips.append(hosted.push(guide_md=f"# Guide\n\nNumber {number}."))
        if number % 3 == 0:
            hosted.work()
    random.shuffle(numbers)
    for number in numbers:
        hosted.told(number)
        if random.random() < 0.3:
            hosted.work()
    hosted.work()
    assert hosted.index() == {"handbook:guide.md": f"# Guide\n\nNumber {max(numbers)}."}
    assert hosted.version() == tips[-1]


def test_commits_that_were_taken_back_by_force_are_taken_back(hosted: Hosted) -> None:
    first = hosted.push(guide_md="# Guide\n\nSix.")
    hosted.push(guide_md="# Guide\n\nSeven.", more_md="# More\n\nText.")
    hosted.told(1)
    hosted.work()
    assert len(hosted.index()) == 2
    git(hosted.repository, "reset", "--quiet", "--hard", first)
    hosted.told(2)
    hosted.work()
    assert hosted.index() == {"handbook:guide.md": "# Guide\n\nSix."}


def test_a_job_of_another_than_the_workers_file_names_changes_nothing(hosted: Hosted, deployment: Deployment) -> None:
    hosted.push(guide_md="# Guide\n\nSix.")

    async def ask() -> None:
        async with deployment.pools() as database:
            for principal, name in (
                (Principal(tenant_id="acme", user_id=8), "handbook"),
                (Principal(tenant_id="globex", user_id=7), "handbook"),
                (Principal(tenant_id="acme", user_id=7, tags=("public", "hr")), "handbook"),
                (MARA, "another"),
            ):
                wanted = tasks.synchronisation(spec(name=name))
                async with database.transaction(principal) as session:
                    await jobs.enqueue(session, wanted, max_waiting=None)

    asyncio.run(ask())
    hosted.work()
    assert {(row["status"], row["reason"]) for row in job_rows(deployment)} == {("failed", "invalid_input")}
    with psycopg.connect(deployment.url("postgres")) as connection:
        assert connection.execute("select count(*) from rag.rag_documents").fetchone() == (0,)


def test_a_repository_that_cannot_be_read_is_tried_again(hosted: Hosted, deployment: Deployment) -> None:
    hosted.told(1)
    hosted.work()
    (job,) = job_rows(deployment)
    assert (job["status"], job["reason"]) == ("pending", "source_unavailable")
    hosted.push(guide_md="# Guide\n\nSix.")
    set_due(deployment)
    hosted.work()
    assert job_rows(deployment)[0]["status"] == "succeeded"
    assert list(hosted.index()) == ["handbook:guide.md"]


def test_public_documents_are_published_by_the_worker(hosted: Hosted, deployment: Deployment) -> None:
    (hosted.top / "sources.yaml").write_text(
        "- {name: notices, github: acme/handbook, git: repository, ref: main, tenant: acme, scope: public}\n"
    )
    hosted.push(notice_md="# Notice\n\nThe pier is closed.", old_md="# Old\n\nText.")
    hosted.told(1)
    hosted.work()
    (hosted.repository / "old.md").unlink()
    hosted.push()
    hosted.told(2)
    hosted.work()
    with psycopg.connect(deployment.url("postgres")) as connection:
        assert connection.execute("select scope, source_id from rag.rag_documents").fetchall() == [
            ("public", "notices:notice.md")
        ]


async def test_who_has_lost_the_job_writes_and_removes_nothing_more(
    database: Database, settings: Settings, embedder: Embedder, tmp_path: Path
) -> None:
    """A worker that slept through its time must not bring an older state over that of the one who took over."""
    write(tmp_path / "handbook", a_md="# A\n\nOne.", b_md="# B\n\nTwo.")
    source = SourceSpec(name="handbook", directory=tmp_path / "handbook", tenant="acme", user=7)
    lost = False

    async def also(_: object) -> None:
        if lost:
            raise JobLost

    synchroniser = Synchroniser(settings=settings, database=database, embedder=embedder, also=also)
    await synchroniser.sync(source)
    before = await count_sources(database, MARA, embedding_model=embedder.model_id)
    lost = True
    (tmp_path / "handbook" / "a.md").unlink()
    with pytest.raises(JobLost):
        await synchroniser.sync(source)
    write(tmp_path / "handbook", a_md="# A\n\nOne.", b_md="# B\n\nAnother.")
    with pytest.raises(JobLost):
        await synchroniser.sync(source)
    assert await count_sources(database, MARA, embedding_model=embedder.model_id) == before


async def test_a_job_that_is_anothers_stores_nothing(
    hosted: Hosted, deployment: Deployment, settings: Settings, embedder: Embedder
) -> None:
    hosted.push(guide_md="# Guide\n\nSix.")
    async with deployment.pools() as database:
        await announce(database, [hosted.spec], delivery=digest(1), max_waiting=10)
    (job,) = job_rows(deployment)
    generator = open_generator(settings)
    async with Database(deployment.url("rag_worker"), signer=SIGNER, role="rag_worker") as database:
        task = tasks.Task(
            id=job["id"],
            claim=uuid4(),
            principal=MARA,
            payload=job["payload"],
            body=None,
            database=database,
            embedder=embedder,
            generator=generator,
            settings=settings.model_copy(update={"rag_sources": hosted.top / "sources.yaml"}),
        )
        with pytest.raises(JobLost):
            await tasks.KINDS["sync"](task)
        await generator.close()
    assert (hosted.index(), hosted.version()) == ({}, None)


def test_a_worker_that_is_killed_in_the_middle_leaves_it_to_another(hosted: Hosted, deployment: Deployment) -> None:
    tip = hosted.push(**{f"page{number}_md": f"# Page {number}\n\nText." for number in range(60)})
    hosted.told(1)
    first = start_worker(hosted.environment)
    try:
        wait_until(lambda: len(hosted.index()) >= 3, timeout_s=60)
        first.send_signal(signal.SIGKILL)
    finally:
        first.kill()
        first.wait()
    second = start_worker(hosted.environment)
    try:
        wait_until(lambda: job_rows(deployment)[0]["status"] == "succeeded", timeout_s=60)
    finally:
        second.send_signal(signal.SIGTERM)
        second.wait(40)
    assert (len(hosted.index()), hosted.version()) == (60, tip)


def test_a_worker_that_slept_while_another_went_on_takes_nothing_back(
    hosted: Hosted, deployment: Deployment, tmp_path: Path
) -> None:
    pages = [f"page{number}_md" for number in range(60)]
    hosted.push(**dict.fromkeys(pages, "# Page\n\nOld."))
    hosted.told(1)
    sleeper = start_worker(hosted.environment, log=tmp_path / "log")
    try:
        wait_until(lambda: len(hosted.index()) >= 3, timeout_s=60)
        sleeper.send_signal(signal.SIGSTOP)
        tip = hosted.push(**dict.fromkeys(pages, "# Page\n\nNew."))
        hosted.told(2)
        with working(hosted.environment):
            # The database ends a transaction in which somebody has slept for 30 s.
            wait_until(lambda: {row["status"] for row in job_rows(deployment)} == {"succeeded"}, timeout_s=120)
        assert (set(hosted.index().values()), hosted.version()) == ({"# Page\n\nNew."}, tip)
        sleeper.send_signal(signal.SIGCONT)
        # It lost the job, or the transaction in which it slept.
        wait_until(
            lambda: any(word in (tmp_path / "log").read_text() for word in ("job_lost", "job_failed")), timeout_s=60
        )
    finally:
        sleeper.send_signal(signal.SIGCONT)
        sleeper.send_signal(signal.SIGTERM)
        sleeper.wait(40)
    assert (set(hosted.index().values()), len(hosted.index()), hosted.version()) == ({"# Page\n\nNew."}, 60, tip)
