"""`rag analyst`: logins of people, what they are given, what they are refused, and the SQL that it takes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator

import psycopg
import pytest
from psycopg import sql

from rag import analysts, embedded
from rag.analysts import Analyst, Statement
from rag.errors import DatabaseError, DatabaseUnavailable, InvalidInput
from rag.operate import Desk
from rag.principal import Principal
from tests.conftest import Cluster, Deployment, Store
from tests.fakes import refusing_url
from tests.rag.stored import rows

PASSWORD = "correct horse battery staple"
MARA = Principal(tenant_id="acme", user_id=7, tags=("hr", "public"))
ON_ORION = Principal(tenant_id="acme", user_id=7, project_id="orion")


@pytest.fixture
def desk(deployment: Deployment) -> Desk:
    return Desk(operator_url=deployment.url("rag_operator"), administrator_url=deployment.url("postgres"))


@pytest.fixture
def new_name(cluster: Cluster, deployment: Deployment) -> Iterator[Callable[[], str]]:
    """Names of roles, which all databases of the server share; gone after the test."""
    names: list[str] = []

    def name() -> str:
        names.append(f"person-{secrets.token_hex(4)}@acme")
        return names[-1]

    yield name
    with cluster.superuser(deployment.name) as superuser:
        for made in names:
            if superuser.execute("select to_regrole(quote_ident(%s))", (made,)).fetchone() != (None,):
                superuser.execute(sql.SQL("drop owned by {}").format(sql.Identifier(made)))
                superuser.execute(sql.SQL("drop role {}").format(sql.Identifier(made)))


@pytest.fixture
def name(new_name: Callable[[], str]) -> str:
    return new_name()


def analyst(
    name: str, *, tenant: str = "acme", tags: str = "public", projects: str = "", scope: str = "none"
) -> Analyst:
    return Analyst(
        role_name=name,
        tenant_id=tenant,
        tags=tuple(tags.split()),
        projects=tuple(projects.split()),
        user_scope=scope,  # type: ignore[arg-type]
    )


def admit(desk: Desk, wanted: Analyst, *, password: str | None = PASSWORD) -> list[Statement]:
    with desk.session() as session:
        statements = analysts.needed(session, wanted, password=password)
    analysts.admit(desk, wanted, statements)
    return statements


def login(deployment: Deployment, name: str, password: str = PASSWORD) -> psycopg.Connection:
    return psycopg.connect(deployment.url("postgres"), user=name, password=password, autocommit=True)


def refusal(connection: psycopg.Connection, statement: str) -> str | None:
    """The SQLSTATE that a statement fails with, None when it does not."""
    try:
        connection.execute(statement)
    except psycopg.Error as error:
        return error.sqlstate
    return None


# --- what an analyst is given ----------------------------------------------------------------------


def test_an_analyst_queries_the_views_by_their_names(desk: Desk, deployment: Deployment, store: Store, name: str):
    store(MARA, "public text", scope="public", title="A public page")
    store(MARA, "hr text", scope="public", tags=("hr",), title="For HR")
    store(ON_ORION, "orion text", scope="project", project_id="orion", title="Of orion")
    store(MARA, "own text", title="Mara's own")
    store(Principal(tenant_id="other"), "elsewhere", scope="public", title="Elsewhere")
    admit(desk, analyst(name, projects="orion", scope="metadata"))
    with login(deployment, name) as connection:
        seen = connection.execute("select title, scope from v_documents order by title").fetchall()
        assert seen == [("A public page", "public"), ("Of orion", "project"), (None, "user")]
        texts = connection.execute("select chunk_text from v_chunks order by chunk_text").fetchall()
        assert texts == [("orion text",), ("public text",)]
        for view in ("v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"):
            assert refusal(connection, f"select * from {view}") is None


def test_the_server_limits_an_analyst(desk: Desk, deployment: Deployment, name: str):
    admit(desk, analyst(name))
    with login(deployment, name) as connection:
        for setting, value in {
            "search_path": "rag, pg_temp",
            "statement_timeout": "30s",
            "default_transaction_read_only": "on",
        }.items():
            assert connection.execute(f"show {setting}").fetchone() == (value,)
        assert refusal(connection, "create temp table mine (id integer)") == "25006"
        assert refusal(connection, "delete from rag_documents") == "25006"
        # A default is what they may change; what they may do they may not.
        connection.execute("set default_transaction_read_only = off")
        for statement in (
            "create temp table mine (id integer)",
            "create table rag.mine (id integer)",
            "delete from rag_documents",
            "select * from rag_documents",
            "select * from rag_analysts",
            "insert into rag_analysts values ('other', 'me')",
            "set role rag_analyst",
            "set role rag_app",
            "select begin_as('acme', 7, null, '{}', '')",
            "select * from forget('acme')",
        ):
            assert refusal(connection, statement) == "42501", statement
        connection.execute("set statement_timeout = '50ms'")
        assert refusal(connection, "select pg_sleep(5)") == "57014"


def test_the_settings_are_of_this_database_alone(desk: Desk, deployment: Deployment, name: str):
    admit(desk, analyst(name))
    settings = rows(
        deployment.url("postgres"),
        "select setdatabase <> 0 as here from pg_db_role_setting where setrole = to_regrole(quote_ident(%s))",
        (name,),
    )
    assert settings == [{"here": True}]


def test_the_login_inherits_rag_analyst_and_has_no_other_right(desk: Desk, deployment: Deployment, name: str):
    admit(desk, analyst(name))
    memberships = rows(
        deployment.url("postgres"),
        "select roleid::regrole::text as role, inherit_option, set_option, admin_option from pg_auth_members"
        " where member = to_regrole(quote_ident(%s))",
        (name,),
    )
    assert memberships == [{"role": "rag_analyst", "inherit_option": True, "set_option": False, "admin_option": False}]
    (role,) = rows(
        deployment.url("postgres"),
        "select rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication, rolinherit, rolcanlogin"
        " from pg_roles where rolname = %s",
        (name,),
    )
    assert [right for right, given in role.items() if given] == ["rolcanlogin"]


def test_how_far_an_analyst_sees_can_be_changed(desk: Desk, deployment: Deployment, store: Store, name: str):
    store(MARA, "hr text", scope="public", tags=("hr",), title="For HR")
    store(MARA, "own text", title="Mara's own")
    admit(desk, analyst(name))
    with login(deployment, name) as connection:
        assert connection.execute("select title from v_documents").fetchall() == []
        (changed,) = admit(desk, analyst(name, tags="hr public", scope="text"))
        assert changed.by_administrator is False
        assert connection.execute("select title from v_documents order by 1").fetchall() == [
            ("For HR",),
            ("Mara's own",),
        ]
    assert admit(desk, analyst(name, tags="hr public", scope="text")) == []


def test_a_login_that_is_there_keeps_its_password(desk: Desk, deployment: Deployment, name: str):
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(sql.SQL("create role {} login password 'its own'").format(sql.Identifier(name)))
    statements = admit(desk, analyst(name), password="another one")
    assert [statement.makes_login for statement in statements] == [False] * 5
    with login(deployment, name, "its own") as connection:
        assert connection.execute("select count(*) from v_documents").fetchone() == (0,)
    with pytest.raises(psycopg.OperationalError):
        login(deployment, name, "another one")


def test_the_statements_are_these_and_show_no_password(
    desk: Desk, deployment: Deployment, name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(analysts, "scram_verifier", lambda password: f"verifier of {len(password)} characters")
    with desk.session() as session:
        statements = analysts.needed(session, analyst(name, tags="hr it's", projects="a,b *c"), password=PASSWORD)
    role, database = f'"{name}"', deployment.name
    assert [statement.shown for statement in statements] == [
        f"create role {role} login noinherit password '…'",
        f"grant rag_analyst to {role} with inherit true, set false",
        f"alter role {role} in database {database} set search_path = rag, pg_temp",
        f"alter role {role} in database {database} set statement_timeout = '30s'",
        f"alter role {role} in database {database} set default_transaction_read_only = on",
        "insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)"
        f" values ('acme', '{name}', '{{hr,it''s}}', '{{\"a,b\",*c}}', 'none')"
        " on conflict (tenant_id, role_name) do update"
        " set tags = excluded.tags, projects = excluded.projects, user_scope = excluded.user_scope",
    ]
    first, *others = statements
    assert first.text == f"create role {role} login noinherit password 'verifier of 28 characters'"
    assert [statement.text for statement in others] == [statement.shown for statement in others]
    assert [statement.by_administrator for statement in statements] == [True] * 5 + [False]


def test_the_password_stands_in_no_statement(desk: Desk, deployment: Deployment, name: str):
    with desk.session() as session:
        statements = analysts.needed(session, analyst(name), password=PASSWORD)
        assert PASSWORD not in str(statements)
        (verifier,) = [part for part in statements[0].text.split("'") if part.startswith("SCRAM-SHA-256$")]
        assert len(verifier) > 100


def test_an_administrator_need_not_be_a_superuser(deployment: Deployment, new_name: Callable[[], str], store: Store):
    """On a managed server nobody is: CREATEROLE, and rag_analyst to give."""
    store(MARA, "public text", scope="public", title="A public page")
    administrator, person = new_name(), new_name()
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        identifier = sql.Identifier(administrator)
        superuser.execute(sql.SQL("create role {} login createrole password 'admin'").format(identifier))
        superuser.execute(
            sql.SQL("grant rag_analyst to {} with admin true, inherit false, set false").format(identifier)
        )
        superuser.execute(
            sql.SQL("grant connect on database {} to {}").format(sql.Identifier(deployment.name), identifier)
        )
    url = psycopg.conninfo.make_conninfo(deployment.url("postgres"), user=administrator, password="admin")
    managed = Desk(operator_url=deployment.url("rag_operator"), administrator_url=url)
    admit(managed, analyst(person))
    with login(deployment, person) as connection:
        assert connection.execute("select title from v_documents").fetchall() == [("A public page",)]
    with managed.session() as session:
        leaving = analysts.dismiss(session, person, tenant_id=None)
    assert leaving == [f'revoke rag_analyst from "{person}" granted by "{administrator}"']
    with managed.administration() as session:
        for statement in leaving:
            session.run_text(statement)
    with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
        login(deployment, person)


# --- who cannot be one -----------------------------------------------------------------------------

UNFIT = {
    "superuser": ("superuser", "is a superuser"),
    "bypassrls": ("bypassrls", "bypasses row security"),
    "createrole": ("createrole", "may create roles"),
    "createdb": ("createdb", "may create databases"),
    "replication": ("replication", "may replicate"),
}


@pytest.mark.parametrize("right", UNFIT)
def test_a_login_with_a_right_of_its_own_is_refused(desk: Desk, deployment: Deployment, name: str, right: str):
    option, reason = UNFIT[right]
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(sql.SQL("create role {} login " + option).format(sql.Identifier(name)))
    with pytest.raises(InvalidInput) as refused:
        admit(desk, analyst(name))
    assert refused.value.message == f"{name} cannot be an analyst: it {reason}"


@pytest.mark.parametrize("group", ["rag_app", "rag_operator", "rag_owner", "pg_read_all_data", "pg_monitor"])
@pytest.mark.parametrize(
    "inherited", ["inherit true, set false", "inherit false, set true", "inherit false, set false"]
)
def test_a_member_of_a_role_that_sees_more_is_refused(
    desk: Desk, deployment: Deployment, new_name: Callable[[], str], group: str, inherited: str
):
    """Also through another role."""
    name, between = new_name(), new_name()
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for made in (name, between):
            superuser.execute(sql.SQL("create role {} login").format(sql.Identifier(made)))
        for role, member in ((group, between), (between, name)):
            superuser.execute(
                sql.SQL("grant {} to {} with " + inherited).format(sql.Identifier(role), sql.Identifier(member))
            )
    with pytest.raises(InvalidInput, match=f"cannot be an analyst: .*belongs to {group}\\b"):
        admit(desk, analyst(name))


def test_a_role_that_cannot_log_in_or_owns_something_here_is_refused(
    desk: Desk, deployment: Deployment, new_name: Callable[[], str]
):
    group, owner = new_name(), new_name()
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(sql.SQL("create role {}").format(sql.Identifier(group)))
        superuser.execute(sql.SQL("create role {} login").format(sql.Identifier(owner)))
        superuser.execute("create table rag.their_copy (id integer)")
        superuser.execute(sql.SQL("alter table rag.their_copy owner to {}").format(sql.Identifier(owner)))
        with pytest.raises(InvalidInput, match=r"it cannot log in$"):
            admit(desk, analyst(group))
        with pytest.raises(InvalidInput, match=r"it owns their_copy$"):
            admit(desk, analyst(owner))
        superuser.execute("drop table rag.their_copy")
        database = sql.Identifier(deployment.name)
        superuser.execute(sql.SQL("alter database {} owner to {}").format(database, sql.Identifier(owner)))
        try:
            with pytest.raises(InvalidInput, match=r"it owns this database$"):
                admit(desk, analyst(owner))
        finally:
            superuser.execute(sql.SQL("alter database {} owner to postgres").format(database))


def test_an_analyst_of_two_tenants_would_see_nothing_and_is_refused(desk: Desk, name: str):
    admit(desk, analyst(name))
    with pytest.raises(InvalidInput, match=r"it is an analyst of acme, and in two tenants would see nothing$"):
        admit(desk, analyst(name, tenant="other"))


@pytest.mark.parametrize(
    "name",
    [
        *("", "rag_app", "rag_anybody", "pg_monitor", "public", "none", "Mara", "7mara", "mara smith", "mara;drop"),
        *('ma"ra', "ma'ra", "-mara", "mära", "mara\n", "x" * 64),
    ],
)
def test_a_name_that_no_role_should_have_is_refused(name: str):
    with pytest.raises(InvalidInput) as refused:
        analyst(name)
    assert refused.value.field == "name"


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("tenant_id", {"tenant": ""}),
        ("tags", {"tags": "x" * 65}),
        ("projects", {"projects": "x" * 129}),
        ("projects", {"projects": "* orion"}),
        ("user_scope", {"scope": "all"}),
    ],
)
def test_a_range_of_sight_that_is_none_is_refused(field: str, changed: dict[str, str]):
    with pytest.raises(InvalidInput) as refused:
        analyst("mara", **changed)
    assert refused.value.field == field


@pytest.mark.parametrize("password", ["", "pässword", "tab\t", "nul\0"])
def test_a_password_that_cannot_be_typed_everywhere_is_refused(desk: Desk, name: str, password: str):
    with desk.session() as session, pytest.raises(InvalidInput, match="printable ASCII"):
        analysts.needed(session, analyst(name), password=password)


# --- without an administrator ----------------------------------------------------------------------


def test_nothing_is_changed_without_an_administrator(desk: Desk, deployment: Deployment, name: str):
    alone = Desk(operator_url=desk.operator_url, administrator_url=None)
    with pytest.raises(InvalidInput, match="RAG_ADMIN_DATABASE_URL must be set"):
        admit(alone, analyst(name))
    assert rows(deployment.url("postgres"), "select role_name from rag.rag_analysts") == []


def test_what_an_administrator_has_prepared_needs_none_any_more(desk: Desk, deployment: Deployment, name: str):
    with desk.session() as session:
        statements = analysts.needed(session, analyst(name), password=PASSWORD)
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        for statement in statements:
            if statement.by_administrator:
                superuser.execute(statement.text)
    alone = Desk(operator_url=desk.operator_url, administrator_url=None)
    (row,) = admit(alone, analyst(name), password=None)
    assert row.shown.startswith("insert into rag.rag_analysts")
    with login(deployment, name) as connection:
        assert connection.execute("select count(*) from v_documents").fetchone() == (0,)


def test_an_administrator_of_another_database_is_noticed(
    desk: Desk, deployment: Deployment, cluster: Cluster, name: str
):
    """The settings are made for one database; here the names of two are mixed up."""
    elsewhere = Desk(operator_url=desk.operator_url, administrator_url=cluster.url("rag_operator", deployment.name))
    with pytest.raises(InvalidInput, match="the login of RAG_ADMIN_DATABASE_URL has not the rights for this"):
        admit(elsewhere, analyst(name))
    with embedded.ephemeral() as other:
        elsewhere = Desk(operator_url=desk.operator_url, administrator_url=other.url("postgres", "postgres"))
        with psycopg.connect(other.url("postgres", "postgres"), autocommit=True) as superuser:
            superuser.execute("create role rag_analyst")
            superuser.execute(sql.SQL("create database {}").format(sql.Identifier(deployment.name)))
        with pytest.raises(DatabaseError, match="RAG_ADMIN_DATABASE_URL is elsewhere"):
            admit(elsewhere, analyst(name))
    assert rows(deployment.url("postgres"), "select role_name from rag.rag_analysts") == []


def test_an_administrator_who_is_away_is_named_and_the_password_is_not(desk: Desk, name: str):
    url = refusing_url().replace("http://", "postgresql://postgres:secret@") + "/x"
    away = Desk(operator_url=desk.operator_url, administrator_url=url)
    with pytest.raises(DatabaseUnavailable) as refused:
        admit(away, analyst(name))
    assert refused.value.message == "the database of RAG_ADMIN_DATABASE_URL does not answer, or refuses the login"


# --- and when they leave ---------------------------------------------------------------------------


def test_who_leaves_sees_nothing_from_the_next_statement_on(
    desk: Desk, deployment: Deployment, store: Store, name: str
):
    store(MARA, "public text", scope="public")
    admit(desk, analyst(name))
    with login(deployment, name) as connection:
        assert connection.execute("select count(*) from v_documents").fetchone() == (1,)
        with desk.session() as session:
            leaving = analysts.dismiss(session, name, tenant_id=None)
        assert connection.execute("select count(*) from v_documents").fetchone() == (0,)
        with desk.administration() as session:
            for statement in leaving:
                session.run_text(statement)
        assert refusal(connection, "select count(*) from rag.v_documents") == "42501"
    with desk.session() as session, pytest.raises(InvalidInput, match=r"is no analyst$"):
        analysts.dismiss(session, name, tenant_id=None)


def test_who_leaves_one_tenant_of_two_stays_in_the_group(desk: Desk, deployment: Deployment, name: str):
    admit(desk, analyst(name))
    with psycopg.connect(deployment.url("rag_operator"), autocommit=True) as operator:
        operator.execute("insert into rag_analysts (tenant_id, role_name) values ('other', %s)", (name,))
    with desk.session() as session:
        with pytest.raises(InvalidInput, match=r"is no analyst of third$"):
            analysts.dismiss(session, name, tenant_id="third")
        assert analysts.dismiss(session, name, tenant_id="other") == []
    assert rows(deployment.url("postgres"), "select tenant_id from rag.rag_analysts") == [{"tenant_id": "acme"}]


def test_the_list_says_whose_login_lets_them_see(desk: Desk, deployment: Deployment, new_name: Callable[[], str]):
    admitted, twice, outside = new_name(), new_name(), new_name()
    for one in (admitted, twice):
        admit(desk, analyst(one))
    with psycopg.connect(deployment.url("postgres"), autocommit=True) as superuser:
        superuser.execute(sql.SQL("create role {} login").format(sql.Identifier(outside)))
    with psycopg.connect(deployment.url("rag_operator"), autocommit=True) as operator:
        for tenant, one in (("other", twice), ("acme", outside), ("acme", "gone")):
            operator.execute("insert into rag_analysts (tenant_id, role_name) values (%s, %s)", (tenant, one))
    with desk.session() as session:
        listed = session.rows("list_analysts", {"tenant_id": "acme"})
    assert {row["role_name"]: row["state"] for row in listed} == {
        admitted: "admitted",
        twice: "in several tenants",
        outside: "not in rag_analyst",
        "gone": "no such role",
    }
