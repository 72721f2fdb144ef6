"""`rag maintain`: large classes get indexes of their own and lose them, whatever happens in between."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from rag import cli, erase, maintain
from rag.database import Database
from rag.erase import Subject
from rag.errors import DatabaseTimeout, DatabaseUnavailable, InvalidInput
from rag.maintain import Limits, Step
from rag.operate import Desk
from rag.principal import Principal
from rag.settings import Settings
from tests.conftest import DIMENSIONS, SIGNING_KEY, Deployment, Store
from tests.fakes import refusing_url
from tests.rag.large_classes import grow, indexes, own, shrink
from tests.rag.stored import rows

LIMITS = Limits(threshold=40, most_classes=2)


@pytest.fixture
def desk(deployment: Deployment) -> Desk:
    return Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)


class Care:
    """Runs as the command does, on a test's database and with its limits."""

    def __init__(self, deployment: Deployment, desk: Desk, settings: Settings) -> None:
        self.deployment = deployment
        self.desk = desk
        self.settings = settings
        self.told: list[tuple[Step, str, float | None]] = []

    def turn(
        self, *, owner: str | None = "rag_migrator", memory_mb: int | None = None
    ) -> AbstractContextManager[maintain.Turn | None]:
        url = None if owner is None else self.deployment.url(owner)
        return maintain.alone(self.desk, self.settings, owner_url=url, limits=LIMITS, memory_mb=memory_mb)

    def plan(self, *, refresh: bool = False) -> maintain.Plan:
        with self.desk.session() as session:
            return maintain.plan(maintain.survey(session, LIMITS), LIMITS, refresh=refresh)

    def run(
        self,
        *,
        owner: str | None = "rag_migrator",
        steps: int | None = None,
        tell: maintain.Tell | None = None,
        refresh: bool = False,
    ) -> list[str]:
        """What was left for somebody else. `steps`: stop after so many, as a run that dies."""
        with self.turn(owner=owner) as turn:
            assert turn is not None
            wanted = maintain.plan(turn.survey(), turn.limits, refresh=refresh)
            return [str(step) for step in turn.carry_out(wanted.steps[:steps], tell or self._note)]

    def _note(self, step: Step, phase: str, share: float | None) -> None:
        self.told.append((step, phase, share))

    @property
    def actions(self) -> list[str]:
        """What the next run would do."""
        return [step.action for step in self.plan().steps]

    @property
    def ready(self) -> list[int]:
        """Classes whose own indexes searches use."""
        found = rows(
            self.deployment.url("postgres"), "select access_id from rag.rag_class_indexes where ready order by 1"
        )
        return [row["access_id"] for row in found]

    @property
    def counted(self) -> dict[int, int]:
        """Classes that have statistics, and of how many chunks."""
        found = rows(self.deployment.url("postgres"), "select access_id, chunks from rag.rag_class_indexes")
        return {row["access_id"]: row["chunks"] for row in found}


@pytest.fixture
def care(deployment: Deployment, desk: Desk, settings: Settings) -> Care:
    return Care(deployment, desk, settings)


# --- promotion ------------------------------------------------------------------------------------


def test_a_class_that_outgrows_the_threshold_gets_indexes_and_statistics(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    grow(deployment, 2, 40)
    assert care.run() == []
    assert indexes(deployment) == own(1)
    assert (care.ready, care.counted) == ([1], {1: 41})
    definitions = rows(
        deployment.url("postgres"),
        "select regexp_replace(pg_get_indexdef(index_name::text::regclass), '^.* USING ', '') as definition"
        " from (values ('rag.rag_chunks_vector_1'), ('rag.rag_chunks_words_1')) as named (index_name)",
    )
    assert [row["definition"] for row in definitions] == [
        "hnsw (embedding rag.halfvec_cosine_ops) WITH (m='16', ef_construction='200') WHERE (access_id = '1'::bigint)",
        "gin (tsv) WITH (fastupdate=off) WHERE (access_id = '1'::bigint)",
    ]
    # Of 41 chunks with "palisade number<n> group<n mod 7>", six are of group 1; one has number1.
    found = rows(deployment.url("postgres"), "select lexeme, chunks from rag.rag_class_lexemes where access_id = 1")
    assert {row["lexeme"]: row["chunks"] for row in found} == {
        "palisad": 41,
        **{f"group{number}": 6 for number in (1, 2, 3, 4, 5, 6)},
        "group0": 5,
    }


def test_there_is_nothing_left_to_do_afterwards(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    care.run()
    before = rows(deployment.url("postgres"), "select oid, relfilenode from pg_class where relname ~ '_1$' order by 1")
    assert care.actions == []
    assert care.run() == []
    assert (
        rows(deployment.url("postgres"), "select oid, relfilenode from pg_class where relname ~ '_1$' order by 1")
        == before
    )


def test_the_planner_uses_them_for_a_query_that_names_the_class(deployment: Deployment, care: Care):
    grow(deployment, 1, 60)
    grow(deployment, 2, 30)
    care.run()
    assert found_by_index(deployment, 1) == found_by_reading(deployment, 1)


def test_each_chunk_of_the_class_is_in_its_indexes(deployment: Deployment, care: Care):
    """Those that were there, and those that come afterwards."""
    grow(deployment, 1, 60)
    grow(deployment, 2, 30)
    care.run()
    grow(deployment, 1, 80)
    shrink(deployment, 1, 75)
    assert found_by_index(deployment, 1) == found_by_reading(deployment, 1)
    assert len(found_by_reading(deployment, 1)) == 75


def found_by_index(deployment: Deployment, access_id: int) -> set[str]:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("set enable_seqscan = off; set enable_indexscan = off")
        query = f"select id::text from rag.rag_chunks where access_id = {access_id} and tsv @@ 'palisad'"
        (plan,) = [str(connection.execute(f"explain {query}").fetchall())]
        assert f"rag_chunks_words_{access_id}" in plan
        by_words = {row[0] for row in connection.execute(query)}
        connection.execute("set enable_indexscan = on; set enable_sort = off; set hnsw.ef_search = 1000")
        query = f"select id::text from rag.rag_chunks where access_id = {access_id} order by embedding"
        query += " operator(rag.<=>) array_fill(1.0, array[512])::rag.halfvec limit 1000"
        assert f"rag_chunks_vector_{access_id}" in str(connection.execute(f"explain {query}").fetchall())
        by_vector = {row[0] for row in connection.execute(query)}
    assert by_words == by_vector
    return by_words


def found_by_reading(deployment: Deployment, access_id: int) -> set[str]:
    found = rows(deployment.url("postgres"), f"select id::text from rag.rag_chunks where access_id = {access_id}")
    return {row["id"] for row in found}


def test_classes_are_served_although_somebody_writes(deployment: Deployment, care: Care, store: Store):
    """Inserts and deletes of the service go on while both indexes are built and dropped, and none fails."""
    grow(deployment, 9, 60)
    mara = Principal(tenant_id="acme", user_id=9)
    over, begun = threading.Event(), threading.Event()

    def write() -> int:
        written = 0
        while not over.is_set():
            document = store(mara, "a note of mara's")
            if written % 2:
                with deployment.transaction(mara) as connection:
                    connection.execute("delete from rag_documents where tenant_id = 'acme' and id = %s", (document,))
            written += 1
            begun.set()
        return written

    with ThreadPoolExecutor() as aside:
        writing = aside.submit(write)
        try:
            assert begun.wait(30)
            for _ in range(3):
                assert care.run() == []
                assert care.ready == [9]
                shrink_everything_known(deployment, care)
            care.run()
        finally:
            over.set()
        assert writing.result(30) > 0
    assert indexes(deployment) == own(9)
    assert found_by_index(deployment, 9) == found_by_reading(deployment, 9)


def shrink_everything_known(deployment: Deployment, care: Care) -> None:
    """Demote by hand, as if nobody had ever maintained."""
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("delete from rag.rag_class_indexes")
        for name in indexes(deployment):
            connection.execute(f"drop index concurrently rag.{name}")


# --- broken off -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_died_is_taken_up_where_it_ended(deployment: Deployment, care: Care, steps: int):
    grow(deployment, 1, 41)
    assert care.actions == ["build", "build", "measure", "ready"]
    care.run(steps=steps)
    assert care.ready == []
    assert care.actions == ["build", "build", "measure", "ready"][steps:]
    built = rows(deployment.url("postgres"), "select oid from pg_class where relname ~ '^rag_chunks_.*_1$'")
    care.run()
    assert (care.ready, indexes(deployment)) == ([1], own(1))
    kept = rows(deployment.url("postgres"), "select oid from pg_class where relname ~ '^rag_chunks_.*_1$'")
    assert all(index in kept for index in built)


def test_a_build_that_was_cancelled_is_made_again(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    with (
        deployment.cluster.superuser(deployment.name) as admin,
        deployment.cluster.superuser(deployment.name) as writer,
        ThreadPoolExecutor() as aside,
        writer.transaction(),
    ):
        writer.execute("delete from rag.rag_chunks where false")
        broken = aside.submit(care.run)
        cancel = (
            "select pg_cancel_backend(activity.pid) from pg_stat_activity as activity"
            " where activity.query ilike 'create index concurrently%' and activity.wait_event_type = 'Lock'"
            " and activity.datname = current_database()"
        )
        while not admin.execute(cancel).fetchall():
            assert not broken.done()
        with pytest.raises(DatabaseTimeout):
            broken.result(60)
    assert indexes(deployment) == {"rag_chunks_vector_1": False}
    assert care.ready == []
    assert care.actions == ["drop", "build", "build", "measure", "ready"]
    assert care.run() == []
    assert (care.ready, indexes(deployment)) == ([1], own(1))


def test_a_class_whose_index_is_gone_is_not_ready_until_it_is_back(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    care.run()
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("drop index rag.rag_chunks_words_1")
    assert care.actions == ["unready", "build", "ready"]
    care.run(steps=1)
    assert care.ready == []
    care.run()
    assert (care.ready, indexes(deployment)) == ([1], own(1))


def test_what_a_rebuild_left_is_dropped(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    care.run()
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            "create index rag_chunks_words_1_ccnew on rag.rag_chunks using gin (tsv) where access_id = 1"
        )
    assert care.actions == ["drop"]
    care.run()
    assert (care.ready, indexes(deployment)) == ([1], own(1))


# --- demotion -------------------------------------------------------------------------------------


def test_a_class_keeps_its_indexes_down_to_half_of_the_threshold(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    care.run()
    shrink(deployment, 1, 21)
    care.run()
    assert (care.ready, care.counted, indexes(deployment)) == ([1], {1: 21}, own(1))
    shrink(deployment, 1, 20)
    assert care.actions == ["demote", "drop", "drop"]
    # From the first step on no search uses them; whatever is left of them is dropped by the next run.
    care.run(steps=1)
    assert (care.ready, indexes(deployment)) == ([], own(1))
    care.run(steps=1)
    assert list(indexes(deployment)) == ["rag_chunks_words_1"]
    care.run()
    assert indexes(deployment) == {}
    assert rows(deployment.url("postgres"), "select lexeme from rag.rag_class_lexemes") == []
    grow(deployment, 1, 40)
    assert care.actions == []


def test_indexes_of_an_erased_class_are_dropped(deployment: Deployment, care: Care, desk: Desk):
    grow(deployment, 1, 41)
    grow(deployment, 2, 42)
    care.run()
    with desk.session() as session:
        erase.forget(session, Subject(tenant_id="acme", user_id=1))
    assert (care.ready, indexes(deployment)) == ([2], own(1, 2))
    assert care.actions == ["drop", "drop"]
    care.run()
    assert (care.ready, indexes(deployment)) == ([2], own(2))


def test_a_class_that_is_erased_while_it_is_promoted_stops_nothing(deployment: Deployment, care: Care, desk: Desk):
    grow(deployment, 1, 42)
    grow(deployment, 2, 41)

    def tell(step: Step, phase: str, share: float | None) -> None:
        if step.action == "measure" and step.access_id == 1:
            with desk.session() as session:
                erase.forget(session, Subject(tenant_id="acme", user_id=1))

    assert care.run(tell=tell) == []
    assert care.ready == [2]
    care.run()
    assert indexes(deployment) == own(2)


# --- how many -------------------------------------------------------------------------------------


def test_the_largest_classes_have_indexes_when_there_is_no_room_for_all(deployment: Deployment, care: Care):
    for access_id, chunks in {1: 45, 2: 60, 3: 50}.items():
        grow(deployment, access_id, chunks)
    care.run()
    assert care.ready == [2, 3]
    assert [each.access_id for each in care.plan().left_out] == [1]
    # It takes the place of one of 50 chunks with more than 100.
    grow(deployment, 1, 100)
    assert care.actions == []
    grow(deployment, 1, 101)
    assert [(step.action, step.access_id) for step in care.plan().steps[:3]] == [
        ("demote", 3),
        ("drop", 3),
        ("drop", 3),
    ]
    care.run()
    assert (care.ready, indexes(deployment)) == ([1, 2], own(1, 2))
    assert [each.access_id for each in care.plan().left_out] == [3]


# --- statistics -----------------------------------------------------------------------------------


def test_words_are_counted_again_when_a_fifth_has_changed(deployment: Deployment, care: Care):
    grow(deployment, 1, 50)
    care.run()
    grow(deployment, 1, 60)
    assert care.actions == []
    grow(deployment, 1, 61)
    assert care.actions == ["measure"]
    care.run()
    assert care.counted == {1: 61}
    shrink(deployment, 1, 49)
    assert care.actions == []
    shrink(deployment, 1, 48)
    assert care.actions == ["measure"]


def test_words_are_counted_again_when_somebody_asks(deployment: Deployment, care: Care):
    grow(deployment, 1, 50)
    care.run()
    grow(deployment, 1, 51)
    assert [step.action for step in care.plan(refresh=True).steps] == ["measure"]
    care.run(refresh=True)
    assert (care.counted, care.ready) == ({1: 51}, [1])


# --- who runs -------------------------------------------------------------------------------------


def test_one_run_at_a_time(deployment: Deployment, care: Care):
    for owner in ("rag_migrator", None):
        with care.turn(owner=owner) as first:
            assert first is not None
            for other in ("rag_migrator", None):
                with care.turn(owner=other) as second:
                    assert second is None
    with care.turn() as later:
        assert later is not None


def test_without_the_owner_it_says_what_the_owner_has_to_run(deployment: Deployment, care: Care):
    grow(deployment, 1, 41)
    assert care.run(owner=None) == [
        "class 1: build the index of vectors",
        "class 1: build the index of words",
        "class 1: count its words",
        "class 1: searches use its own indexes",
    ]
    assert (care.ready, indexes(deployment)) == ([], {})
    with deployment.cluster.superuser(deployment.name) as connection:
        for step in care.plan().steps[:2]:
            connection.execute(step.statement)
    assert care.run(owner=None) == []
    assert (care.ready, indexes(deployment)) == ([1], own(1))
    # A demotion counts at once; what it leaves is the owner's to drop.
    shrink(deployment, 1, 20)
    assert sorted(care.run(owner=None)) == [
        "class 1: remove the index of vectors",
        "class 1: remove the index of words",
    ]
    assert (care.ready, indexes(deployment)) == ([], own(1))


def test_both_logins_are_of_one_database(
    deployment: Deployment, care: Care, new_deployment: Callable[[], AbstractContextManager[Deployment]]
):
    grow(deployment, 1, 41)
    with new_deployment() as other:
        elsewhere = maintain.alone(care.desk, care.settings, owner_url=other.url("rag_migrator"))
        with pytest.raises(InvalidInput, match="name two databases"), elsewhere:
            raise AssertionError("not reached")


@pytest.mark.parametrize("role", ["rag_operator", "rag_app"])
def test_a_login_that_may_not_become_the_owner_is_told_so(deployment: Deployment, care: Care, role: str):
    grow(deployment, 1, 41)
    with pytest.raises(InvalidInput, match="may not become rag_owner"):
        care.run(owner=role)
    assert indexes(deployment) == {}


def test_an_owner_that_does_not_answer_is_said_without_its_password(care: Care):
    away = refusing_url().replace("http://", "postgresql://rag_migrator:secret@") + "/palisade"
    with (
        pytest.raises(DatabaseUnavailable) as raised,
        maintain.alone(care.desk, care.settings, owner_url=away),
    ):
        raise AssertionError("not reached")
    assert "RAG_MIGRATION_DATABASE_URL" in raised.value.message
    assert "secret" not in raised.value.message


def test_progress_is_told_while_an_index_is_built(deployment: Deployment, care: Care):
    """Here of the wait for a transaction that writes, which goes on until it has been told."""
    grow(deployment, 1, 41)
    heard = threading.Event()

    def tell(step: Step, phase: str, share: float | None) -> None:
        if step.action == "build" and phase.startswith("waiting for writers"):
            heard.set()

    with deployment.cluster.superuser(deployment.name) as writer, ThreadPoolExecutor() as aside:
        with writer.transaction():
            writer.execute("delete from rag.rag_chunks where false")
            building = aside.submit(care.run, tell=tell)
            assert heard.wait(60)
        assert building.result(60) == []
    assert care.ready == [1]


@pytest.mark.parametrize(("given", "used"), [(None, "64MB"), (70, "70MB")])
def test_the_memory_of_a_build_is_set_for_its_session(deployment: Deployment, care: Care, given: int | None, used: str):
    grow(deployment, 1, 41)
    with care.turn(memory_mb=given) as turn:
        turn.carry_out(maintain.plan(turn.survey(), LIMITS).steps, care._note)
        assert turn.owner.execute("show maintenance_work_mem").fetchone() == {"maintenance_work_mem": used}


def test_the_memory_of_a_build_follows_the_size_of_the_class(care: Care):
    with care.turn() as turn:
        sizes = {chunks: turn._memory_for(chunks) for chunks in (5_001, 100_000, 2_000_000)}
    # 512 dimensions: 1,744 bytes a chunk, and a quarter more.
    assert sizes == {5_001: 64, 100_000: 208, 2_000_000: 1024}


def test_an_index_that_has_bloated_is_reported_with_its_rebuild(deployment: Deployment, care: Care):
    grow(deployment, 1, 400)
    care.run()
    with care.turn() as turn:
        assert maintain.bloated(turn.survey()) == []
        (before,) = maintain.report(turn.survey())
    assert (before.bloat, before.ready, before.chunks, before.counted_chunks) == (1.0, True, 400, 400)
    assert before.bytes_per_chunk == round((before.vector_bytes + before.words_bytes + before.statistics_bytes) / 400)
    shrink(deployment, 1, 100)
    with care.turn() as turn:
        (after,) = maintain.report(turn.survey())
        assert after.bloat == 4.0
        (statement, *_) = maintain.bloated(turn.survey())
    assert statement == "reindex index concurrently rag.rag_chunks_vector_1"
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("vacuum rag.rag_chunks")
        connection.execute(statement)
    with care.turn() as turn:
        assert statement not in maintain.bloated(turn.survey())


def test_an_index_that_has_bloated_is_rebuilt_while_it_serves(deployment: Deployment, care: Care):
    grow(deployment, 1, 400)
    care.run()
    shrink(deployment, 1, 100)
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("vacuum rag.rag_chunks")
    care.run()
    with care.turn() as turn:
        assert maintain.plan(turn.survey(), turn.limits).steps == ()
        wanted = maintain.plan(turn.survey(), turn.limits, rebuild=True)
        assert {(step.action, step.access_id) for step in wanted.steps} == {("rebuild", 1)}
        assert turn.carry_out(wanted.steps, lambda *_: None) == []
        found = turn.survey()
        assert (maintain.bloated(found), found.classes[0].is_ready) == ([], True)
        assert maintain.plan(found, turn.limits, rebuild=True).steps == ()
    assert found_by_index(deployment, 1) == found_by_reading(deployment, 1)


# --- the command ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str


Rag = Callable[..., Ran]


@pytest.fixture
def rag(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, deployment: Deployment
) -> Rag:
    """`rag("maintain", …)` with all logins of the test's database and with its limits; None takes a setting away."""
    for name in os.environ:
        if name.startswith(("RAG_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(maintain, "Limits", functools.partial(Limits, threshold=40, most_classes=2))

    def run(*arguments: str, **settings: str | None) -> Ran:
        logins = {
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_OPERATOR_DATABASE_URL": deployment.url("rag_operator"),
            "RAG_MIGRATION_DATABASE_URL": deployment.url("rag_migrator"),
            "RAG_SIGNING_KEY": SIGNING_KEY,
        }
        for name, value in (logins | settings).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["rag", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        return Ran(code, printed.out, printed.err)

    return run


def test_the_command_shows_what_it_does_and_what_there_is(rag: Rag, deployment: Deployment):
    grow(deployment, 7, 41)
    ran = rag("maintain")
    assert ran.code == 0
    assert [line for line in ran.err.splitlines() if "(" not in line] == [
        "class 7: build the index of vectors",
        "maintaining: 1/4",
        "class 7: build the index of words",
        "maintaining: 2/4",
        "class 7: count its words",
        "maintaining: 3/4",
        "class 7: searches use its own indexes",
        "maintaining: 4/4",
    ]
    head, line = ran.out.splitlines()
    values = dict(zip(head.split(), line.split(), strict=True))
    assert {name: values[name] for name in ("access_id", "chunks", "ready", "bloat")} == {
        "access_id": "7",
        "chunks": "41",
        "ready": "yes",
        "bloat": "1.0",
    }
    assert "acme" not in ran.out + ran.err


def test_the_command_as_json(rag: Rag, deployment: Deployment):
    for access_id in (5, 6, 7):
        grow(deployment, access_id, 40 + access_id)
    ran = rag("maintain", "--json")
    found: dict[str, Any] = json.loads(ran.out)
    assert (ran.code, found["left"], found["bloated"]) == (0, [], [])
    assert len(found["done"]) == 8
    assert found["left_out"] == [{"access_id": 5, "chunks": 45}]
    assert [(each["access_id"], each["ready"]) for each in found["classes"]] == [(7, True), (6, True)]
    again = rag("maintain")
    assert "class 5 has 45 chunks and no room" in again.err
    assert json.loads(rag("maintain", "--json").out)["done"] == []


def test_a_plan_changes_nothing(rag: Rag, deployment: Deployment):
    grow(deployment, 7, 41)
    ran = rag("maintain", "--plan")
    assert (ran.code, ran.out.splitlines()) == (
        0,
        [
            "class 7: build the index of vectors",
            "class 7: build the index of words",
            "class 7: count its words",
            "class 7: searches use its own indexes",
        ],
    )
    assert len(json.loads(rag("maintain", "--plan", "--json").out)["planned"]) == 4
    assert indexes(deployment) == {}
    assert rows(deployment.url("postgres"), "select access_id from rag.rag_class_indexes") == []


def test_without_a_migrator_it_prints_a_script_for_the_owner(rag: Rag, deployment: Deployment):
    grow(deployment, 7, 41)
    ran = rag("maintain", RAG_MIGRATION_DATABASE_URL=None)
    assert ran.code == 1
    assert "RAG_MIGRATION_DATABASE_URL is not set" in ran.err
    with deployment.connect("rag_migrator") as connection:
        connection.execute("set role rag_owner")
        for line in ran.out.splitlines():
            connection.execute(line)
    assert indexes(deployment) == own(7)
    assert rag("maintain", RAG_MIGRATION_DATABASE_URL=None).code == 0
    assert json.loads(rag("maintain", "--json", RAG_MIGRATION_DATABASE_URL=None).out)["done"] == []


def test_a_second_command_says_that_one_is_at_work(rag: Rag, care: Care, deployment: Deployment):
    grow(deployment, 7, 41)
    with care.turn():
        ran = rag("maintain")
        assert (ran.code, ran.out) == (0, "")
        assert ran.err == "Another `rag maintain` is at work; nothing is done.\n"
        assert json.loads(rag("maintain", "--json").out) == {"running": True}
    assert indexes(deployment) == {}


# --- rag doctor -----------------------------------------------------------------------------------


def said_of_indexes(ran: Ran) -> list[tuple[str, str]]:
    found = json.loads(ran.out)["findings"]
    return [
        (each["severity"], each["object"])
        for each in found
        if "class" in each["object"] or each["object"].startswith("index ")
    ]


def test_the_doctor_tells_what_waits_for_maintenance(rag: Rag, care: Care, deployment: Deployment, desk: Desk):
    assert said_of_indexes(rag("doctor", "--json")) == []
    for access_id in (5, 6, 7):
        grow(deployment, access_id, 40 + access_id)
    assert said_of_indexes(rag("doctor", "--json")) == [
        ("warning", "large access classes"),
        ("warning", "further large access classes"),
    ]
    care.run()
    assert said_of_indexes(rag("doctor", "--json")) == [("warning", "further large access classes")]
    with desk.session() as session:
        erase.forget(session, Subject(tenant_id="acme", user_id=5))
        erase.forget(session, Subject(tenant_id="acme", user_id=7))
    assert said_of_indexes(rag("doctor", "--json")) == [
        ("warning", "index rag_chunks_vector_7 on rag_chunks"),
        ("warning", "index rag_chunks_words_7 on rag_chunks"),
    ]
    with deployment.cluster.superuser(deployment.name) as connection:
        for finding in json.loads(rag("doctor", "--json").out)["findings"]:
            if finding["object"].startswith("index "):
                connection.execute(finding["mend"])
    assert said_of_indexes(rag("doctor", "--json")) == []
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            "update pg_index set indisvalid = false where indexrelid = 'rag.rag_chunks_words_6'::regclass"
        )
    assert said_of_indexes(rag("doctor", "--json")) == [
        ("warning", "large access classes"),
        ("warning", "index rag_chunks_words_6 on rag_chunks"),
    ]


async def test_a_service_starts_while_an_index_is_built(deployment: Deployment, care: Care, database: Database):
    """Which the catalog calls invalid; strict, it starts without a warning only."""
    grow(deployment, 1, 41)
    care.run()
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(
            "update pg_index set indisvalid = false where indexrelid = 'rag.rag_chunks_words_1'::regclass"
        )
    assert await database.examine(dimensions=DIMENSIONS, thorough=False) == []
