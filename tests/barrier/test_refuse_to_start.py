"""Set-ups on which the service must not open its port: one line says why, and the exit code is not 0."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict

from rag import deployment as deployments
from rag.errors import RAGServiceError
from rag.settings import Settings
from tests.api.test_serve import check_refusal, refused
from tests.barrier import pgbouncer
from tests.conftest import SIGNER, SIGNING_KEY, Cluster, Deployment, create_database, drop_database

NewDeployment = Callable[[], AbstractContextManager[Deployment]]


@dataclass(frozen=True)
class Setup:
    """What is wrong, in words; the SQL of a superuser that makes it so; and the reason that must be given."""

    name: str
    reason: str
    sql: str = ""
    undo: str = ""
    """For what all databases of the cluster share."""
    settings: dict[str, str] = field(default_factory=dict)
    """Besides the right ones; `{role}` is that role's URL."""
    is_empty: bool = False
    """Not even bootstrapped, let alone migrated."""


POWERS = "rag_app could switch row security off: take its superuser-like rights away"

SETUPS = [
    # who logs in
    Setup(
        "the service logs in as a superuser",
        "the service must log in as rag_app, not as postgres",
        settings={"RAG_DATABASE_URL": "{postgres}"},
    ),
    Setup(
        "the service logs in as the migrator",
        "the service must log in as rag_app, not as rag_migrator",
        settings={"RAG_DATABASE_URL": "{rag_migrator}"},
    ),
    Setup(
        "the two logins are exchanged",
        "the service must log in as rag_app, not as rag_publisher",
        settings={"RAG_DATABASE_URL": "{rag_publisher}", "RAG_PUBLISHER_DATABASE_URL": "{rag_app}"},
    ),
    Setup("rag_app is a superuser", POWERS, "alter role rag_app superuser", "alter role rag_app nosuperuser"),
    Setup("rag_app bypasses row security", POWERS, "alter role rag_app bypassrls", "alter role rag_app nobypassrls"),
    Setup("rag_app may make roles", POWERS, "alter role rag_app createrole", "alter role rag_app nocreaterole"),
    Setup(
        "rag_app may become the owner",
        POWERS,
        "grant rag_owner to rag_app with inherit false",
        "revoke rag_owner from rag_app",
    ),
    Setup(
        "rag_publisher may read all tables",
        "membership of rag_publisher in pg_read_all_data: is not Palisade's",
        "grant pg_read_all_data to rag_publisher",
        "revoke pg_read_all_data from rag_publisher",
    ),
    Setup(
        "the functions that read are not bound by policies",
        "role rag_principal: is not as it was made: it is bypassrls",
        "alter role rag_principal bypassrls",
        "alter role rag_principal nobypassrls",
    ),
    Setup("rag_app owns a table", "rag_app owns rag_query_logs", "alter table rag.rag_query_logs owner to rag_app"),
    # identity
    Setup(
        "a default tenant",
        "rag_app has a default for app.tenant_id",
        "alter role rag_app in database {database} set app.tenant_id = 'acme'",
    ),
    Setup("a default user", "rag_app has a default for app.user_id", "alter database {database} set app.user_id = '7'"),
    Setup(
        "an identity in the connection's options",
        "rag_app has a default for app.tenant_id",
        settings={"RAG_DATABASE_URL": "{rag_app} options='-c app.tenant_id=acme'"},
    ),
    Setup("no signing key", "RAG_SIGNING_KEY must be a key's name", settings={"RAG_SIGNING_KEY": ""}),
    Setup(
        "the signing key of another database",
        "does not accept the service's signature",
        settings={"RAG_SIGNING_KEY": f"{SIGNER.key_id}.{'00' * 32}"},
    ),
    Setup(
        "a database without a signing key",
        "does not accept the service's signature",
        "delete from rag.rag_signing_keys",
    ),
    # row security and policies
    Setup(
        "row security is off for the login",
        "row_security is not on",
        "alter role rag_app in database {database} set row_security = off",
    ),
    Setup(
        "row security is off for a table",
        "row security is not forced on rag_chunks",
        "alter table rag.rag_chunks disable row level security",
    ),
    Setup(
        "row security is not forced",
        "row security is not forced on rag_tombstones",
        "alter table rag.rag_tombstones no force row level security",
    ),
    Setup(
        "a second policy",
        "policy second on rag_chunks: is not Palisade's: permissive for select to rag_app using (true)",
        "create policy second on rag.rag_chunks for select to rag_app using (true)",
    ),
    Setup(
        "a policy that ignores who asks",
        "policy read_documents on rag_documents: is not as it was made",
        "alter policy read_documents on rag.rag_documents using (true)",
    ),
    Setup(
        "no belt around the tenants",
        "policy own_tenant_select on rag_chunks: is missing",
        "drop policy own_tenant_select on rag.rag_chunks",
    ),
    Setup(
        "a granted table without a policy",
        "policy add_logs on rag_query_logs: is missing",
        "drop policy add_logs on rag.rag_query_logs",
    ),
    # what policies rest on
    Setup(
        "every class is everybody's",
        "function my_access_ids(): is not as it was made",
        "create or replace function rag.my_access_ids() returns bigint[] language sql stable security definer"
        " parallel safe set search_path = rag, pg_temp as 'select array(select access_id from rag_access_classes)'",
    ),
    Setup(
        "every signature holds",
        "function signature_holds(text[],text): is not as it was made",
        "create or replace function rag.signature_holds(parts text[], signature text) returns boolean language sql"
        " stable parallel safe set search_path = rag, pg_temp as 'select true'",
    ),
    Setup(
        "a function of a superuser",
        "owner of function my_documents(): is not as it was made",
        "alter function rag.my_documents() owner to current_user",
    ),
    Setup(
        "a definer function that nobody knows",
        "function peek(): is not Palisade's",
        "create function rag.peek() returns bigint language sql security definer"
        " begin atomic select count(*) from rag.rag_chunks; end",
    ),
    Setup(
        "a view with the rights of its owner",
        "view v_chunks: is not as it was made",
        "alter view rag.v_chunks set (security_invoker = false)",
    ),
    Setup(
        "a materialized view",
        "materialized view v_copy: is not Palisade's: it holds all rows",
        "create materialized view rag.v_copy as select chunk_text from rag.rag_chunks",
    ),
    Setup(
        "a trigger",
        "trigger spy on rag_chunks: is not Palisade's",
        "create function public.spy() returns trigger language plpgsql as 'begin return new; end';"
        " create trigger spy before insert on rag.rag_chunks for each row execute function public.spy()",
    ),
    # rights
    Setup(
        "rag_app may truncate",
        "right truncate on rag_documents to rag_app: is not Palisade's",
        "grant truncate on rag.rag_documents to rag_app",
    ),
    Setup(
        "everybody may read a table",
        "right select on rag_documents to public: is not Palisade's",
        "grant select on rag.rag_documents to public",
    ),
    Setup(
        "rag_app may make objects beside ours",
        "right create on schema rag to rag_app: is not Palisade's",
        "grant create on schema rag to rag_app",
    ),
    # another schema than that of this version
    Setup("not migrated", "this database has not been migrated", is_empty=True),
    Setup("a pending migration", "migrations are pending", "update rag.alembic_version set version_num = '0000'"),
    Setup(
        "another draft of the migration",
        "another draft of migration 0001_initial",
        "comment on table rag.alembic_version is '0001_initial=0'",
    ),
    Setup(
        "a newer version's database",
        "migrated by a newer version",
        "comment on table rag.alembic_version is '9999_later=0'",
    ),
    Setup(
        "vectors of another width",
        "RAG_EMBEDDING_DIMENSIONS is 384, and this database was migrated with 512",
        settings={"RAG_EMBEDDING_DIMENSIONS": "384"},
    ),
]


def test_the_matrix_has_all_that_was_asked_for() -> None:
    assert len({setup.name for setup in SETUPS}) == len(SETUPS) >= 25


@contextmanager
def broken(cluster: Cluster, new_deployment: NewDeployment, setup: Setup) -> Iterator[dict[str, str]]:
    """A deployment that is set up so, and the settings of a service that would use it."""
    with new_deployment() as deployment:
        if setup.is_empty:
            drop_database(cluster, deployment.name)
            create_database(cluster, deployment.name)
        if setup.sql:
            with cluster.superuser(deployment.name) as connection:
                connection.execute(setup.sql.format(database=deployment.name))
        try:
            yield settings_of(deployment, setup)
        finally:
            if setup.undo:
                with cluster.superuser("postgres") as connection:
                    connection.execute(setup.undo)


def settings_of(deployment: Deployment, setup: Setup) -> dict[str, str]:
    roles = ("rag_app", "rag_publisher", "rag_migrator", "postgres")
    urls = {role: as_words(deployment.url(role)) for role in roles}
    right = {
        "RAG_DATABASE_URL": "{rag_app}",
        "RAG_PUBLISHER_DATABASE_URL": "{rag_publisher}",
        "RAG_SIGNING_KEY": SIGNING_KEY,
    }
    given = right | setup.settings
    return {name: value.format(**urls) for name, value in given.items()}


def as_words(url: str) -> str:
    """A connection string to which options can be added."""
    return " ".join(f"{name}={value}" for name, value in conninfo_to_dict(url).items())


async def refusal(settings: dict[str, str]) -> str:
    """The reason that the start gives, up to where it would open the port; '' when it gives none."""
    given = Settings(_env_file=None, **{name.lower(): value for name, value in settings.items()})
    try:
        place = deployments.locate(given)
        async with place.open(given) as database:
            await database.prove_barrier(dimensions=given.rag_embedding_dimensions, strict=given.rag_strict)
    except RAGServiceError as error:
        return error.message
    return ""


async def test_a_bad_set_up_is_refused(
    cluster: Cluster,
    new_deployment: NewDeployment,
    tmp_path: Path,
    scaled: Callable[..., int],
    figure: Callable[[str], None],
) -> None:
    # As a process, at whose port somebody knocks, as many as there is time for: each takes a second or two.
    as_processes = set(random.sample(range(len(SETUPS)), scaled(test=3, ci=25, prove=len(SETUPS))))
    accepted = {}
    for number, setup in enumerate(SETUPS):
        with broken(cluster, new_deployment, setup) as settings:
            reason = await refusal(settings)
            if setup.reason not in reason or "\n" in reason:
                accepted[setup.name] = reason
            if number in as_processes and setup.name not in accepted:
                check_refusal(refused(tmp_path, **settings), setup.reason)
    assert accepted == {}
    figure(
        f"refuse to start: {len(SETUPS)} of {len(SETUPS)} bad set-ups refused, "
        f"{len(as_processes)} as processes: exit code 1, port never open"
    )


async def test_a_good_set_up_is_not_refused(deployment: Deployment) -> None:
    assert await refusal(settings_of(deployment, Setup("good", ""))) == ""


async def test_the_logins_of_two_databases_are_refused(deployment: Deployment, new_deployment: NewDeployment) -> None:
    with new_deployment() as other:
        settings = settings_of(deployment, Setup("two", ""))
        reason = await refusal(settings | {"RAG_PUBLISHER_DATABASE_URL": other.url("rag_publisher")})
    assert reason == "rag_app and rag_publisher are logged in to different databases"


@pytest.mark.parametrize(("pool_mode", "reason"), [("transaction", ""), ("statement", "transaction mode")])
async def test_through_a_pooler_the_same_is_proved(deployment: Deployment, pool_mode: str, reason: str) -> None:
    with pgbouncer.running(deployment, pool_mode=pool_mode) as pooler:
        pooled = {
            "RAG_DATABASE_URL": pooler.url("rag_app"),
            "RAG_PUBLISHER_DATABASE_URL": pooler.url("rag_publisher"),
        }
        said = await refusal(settings_of(deployment, Setup("pooled", "")) | pooled)
    assert (said == "") == (reason == "")
    assert reason in said
