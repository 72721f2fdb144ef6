"""What must hold for everything in the catalog, whatever is added later."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.sql.world import REACHES, column, protected_tables, speaking

LOGINS = ("rag_app", "rag_publisher", "rag_operator", "rag_migrator")
ROLES = (*LOGINS, "rag_owner", "rag_search", "rag_analyst")

# Objects of pgvector, which lives in the same schema, depend on it with deptype 'e'.
OURS = """
    not exists (
        select 1 from pg_depend as membership
        where membership.classid = {catalog}::regclass and membership.objid = {oid} and membership.deptype = 'e'
    )
"""


def functions(connection: psycopg.Connection, condition: str) -> list[str]:
    """Signatures of our functions for which the condition on `function` holds."""
    ours = OURS.format(catalog="'pg_proc'", oid="function.oid")
    return column(
        connection,
        f"""
        select function.oid::regprocedure::text from pg_proc as function
        where function.pronamespace = 'rag'::regnamespace and {ours} and ({condition})
        order by 1
        """,
    )


def relations(connection: psycopg.Connection, condition: str) -> list[str]:
    """Names of our relations for which the condition on `relation` holds."""
    return column(
        connection,
        f"""
        select relation.relname from pg_class as relation
        where relation.relnamespace = 'rag'::regnamespace and ({condition})
        order by 1
        """,
    )


# --- row security ---------------------------------------------------------------------------------


def test_there_are_these_tables(superuser: psycopg.Connection) -> None:
    assert protected_tables(superuser) == [
        "rag_access_classes",
        "rag_chunks",
        "rag_documents",
        "rag_project_members",
        "rag_query_log_chunks",
        "rag_query_logs",
        "rag_tombstones",
    ]


def test_row_security_is_enabled_and_forced_on_every_table(superuser: psycopg.Connection) -> None:
    unprotected = relations(
        superuser, "relation.relkind in ('r', 'p') and not (relation.relrowsecurity and relation.relforcerowsecurity)"
    )
    assert unprotected == ["alembic_version"]


GRANTED = """
    select distinct granted.grantee::regrole::text as role_name, relation.relname, granted.privilege_type
    from pg_class as relation
    left join pg_attribute as attribute on attribute.attrelid = relation.oid and attribute.attacl is not null
    cross join lateral (
        select acl.grantee, acl.privilege_type from aclexplode(relation.relacl) as acl
        union all
        select acl.grantee, acl.privilege_type from aclexplode(attribute.attacl) as acl
    ) as granted
    where relation.relnamespace = 'rag'::regnamespace
        and relation.relkind in ('r', 'p')
        and granted.grantee <> relation.relowner
"""


@pytest.mark.parametrize("permissive", ["PERMISSIVE", "RESTRICTIVE"])
def test_every_granted_command_has_a_policy(superuser: psycopg.Connection, permissive: str) -> None:
    """A permissive one for everybody; for the service a restrictive one as well, the tenant belt."""
    lacking = superuser.execute(
        f"""
        select granted.role_name, granted.relname, granted.privilege_type from ({GRANTED}) as granted
        where granted.relname like 'rag\\_%%'
            and (%(permissive)s = 'PERMISSIVE' or granted.role_name in ('rag_app', 'rag_publisher'))
            and not exists (
                select 1 from pg_policies as policy
                where policy.schemaname = 'rag'
                    and policy.tablename = granted.relname
                    and policy.cmd = granted.privilege_type
                    and policy.permissive = %(permissive)s
                    and granted.role_name = any(policy.roles)
            )
        """,
        {"permissive": permissive},
    ).fetchall()
    assert lacking == []


def test_no_policy_serves_all_commands_or_everybody(superuser: psycopg.Connection) -> None:
    assert (
        superuser.execute(
            "select tablename, policyname from pg_policies"
            " where cmd = 'ALL' or 'public' = any(roles) or schemaname <> 'rag'"
        ).fetchall()
        == []
    )


def test_policies_evaluate_the_principal_once_per_statement(superuser: psycopg.Connection) -> None:
    """Every function of identity stands in a sub-select; a bare call would run once per row."""
    bare = superuser.execute(
        """
        select tablename, policyname from pg_policies
        where schemaname = 'rag'
            and regexp_replace(concat(qual, with_check), '\\( SELECT my_[a-z_]+\\(\\) AS [a-z_]+\\)', '', 'g') ~ 'my_'
        """
    ).fetchall()
    assert bare == []


# --- privileges -----------------------------------------------------------------------------------

DOCUMENT_UPDATE = (
    "source_uri source_hash source_updated_at language title body domain doc_type provenance_id task_id verified"
    " metadata updated_at content_updated_at"
)
SERVICE = {
    ("rag_access_classes", "SELECT"): "*",
    ("rag_project_members", "SELECT"): "*",
    ("rag_documents", "SELECT"): "*",
    ("rag_documents", "INSERT"): "*",
    ("rag_documents", "UPDATE"): DOCUMENT_UPDATE,
    ("rag_documents", "DELETE"): "*",
    ("rag_chunks", "SELECT"): "*",
    ("rag_chunks", "INSERT"): "*",
    ("rag_chunks", "DELETE"): "*",
    ("rag_tombstones", "SELECT"): "*",
    ("rag_tombstones", "INSERT"): "*",
    ("rag_tombstones", "UPDATE"): "generation reason updated_at",
    ("rag_query_logs", "SELECT"): "*",
    ("rag_query_logs", "INSERT"): "*",
    ("rag_query_log_chunks", "SELECT"): "*",
    ("rag_query_log_chunks", "INSERT"): "*",
    ("v_documents", "SELECT"): "*",
    ("v_chunks", "SELECT"): "*",
    ("alembic_version", "SELECT"): "*",
}
PRIVILEGES = {
    "rag_app": SERVICE,
    "rag_publisher": SERVICE,
    "rag_operator": {
        ("rag_project_members", "SELECT"): "*",
        ("rag_project_members", "INSERT"): "*",
        ("rag_project_members", "UPDATE"): "may_write",
        ("rag_project_members", "DELETE"): "*",
        ("alembic_version", "SELECT"): "*",
    },
    "rag_migrator": {("alembic_version", "SELECT"): "*"},
    "rag_search": {
        ("rag_access_classes", "SELECT"): "*",
        ("rag_access_classes", "INSERT"): "tenant_id scope user_id project_id tags tags_digest",
        ("rag_project_members", "SELECT"): "*",
        ("rag_chunks", "SELECT"): "tenant_id id access_id document_id tsv lexeme_count language",
    },
}


def test_exactly_these_privileges_are_granted_on_relations(superuser: psycopg.Connection) -> None:
    found: dict[str, dict[tuple[str, str], str]] = {}
    for role, relation, privilege, columns in superuser.execute(
        """
        select granted.grantee::regrole::text, relation.relname, granted.privilege_type, granted.columns
        from pg_class as relation
        cross join lateral (
            select acl.grantee, acl.privilege_type, '*' as columns from aclexplode(relation.relacl) as acl
            union all
            select acl.grantee, acl.privilege_type, string_agg(attribute.attname, ' ' order by attribute.attnum)
            from pg_attribute as attribute
            cross join aclexplode(attribute.attacl) as acl
            where attribute.attrelid = relation.oid
            group by acl.grantee, acl.privilege_type
        ) as granted
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'p', 'v', 'm', 'S', 'f')
            and granted.grantee <> relation.relowner
        """
    ):
        found.setdefault(role, {})[relation, privilege] = columns

    def sorted_columns(granted: dict[tuple[str, str], str]) -> dict[tuple[str, str], list[str]]:
        return {place: sorted(columns.split()) for place, columns in granted.items()}

    assert {role: sorted_columns(granted) for role, granted in found.items()} == {
        role: sorted_columns(granted) for role, granted in PRIVILEGES.items()
    }


def test_nothing_of_ours_is_granted_with_grant_option(superuser: psycopg.Connection) -> None:
    assert (
        relations(
            superuser,
            "exists (select 1 from aclexplode(relation.relacl) as acl where acl.is_grantable"
            " and acl.grantee <> relation.relowner)",
        )
        == []
    )


def test_no_function_of_ours_is_executable_by_everybody(superuser: psycopg.Connection) -> None:
    public = functions(
        superuser,
        """
        exists (
            select 1 from aclexplode(coalesce(function.proacl, acldefault('f', function.proowner))) as acl
            where acl.grantee = 0
        )
        """,
    )
    assert public == []


def test_a_function_that_is_added_later_is_not_executable_by_everybody(superuser: psycopg.Connection) -> None:
    with superuser.transaction(force_rollback=True):
        superuser.execute("set local role rag_owner")
        superuser.execute("create function later() returns integer language sql return 1")
        assert column(superuser, "select has_function_privilege('rag_app', 'later()', 'execute')") == [False]


def test_schemas_and_database_are_closed_to_everybody(superuser: psycopg.Connection) -> None:
    everybody = column(
        superuser,
        """
        select nspname || ' ' || acl.privilege_type
        from pg_namespace
        cross join aclexplode(coalesce(nspacl, acldefault('n', nspowner))) as acl
        where nspname in ('rag', 'public') and acl.grantee = 0
        union all
        select 'database ' || acl.privilege_type
        from pg_database
        cross join aclexplode(coalesce(datacl, acldefault('d', datdba))) as acl
        where datname = current_database() and acl.grantee = 0
        """,
    )
    assert everybody == ["public USAGE"]


@pytest.mark.parametrize("role", [role for role in ROLES if role != "rag_owner"])
def test_only_the_owner_creates_in_the_schema(superuser: psycopg.Connection, role: str) -> None:
    for schema in ("rag", "public"):
        assert column(superuser, "select has_schema_privilege(%s, %s, 'create')", (role, schema)) == [False]
    assert column(superuser, "select has_database_privilege(%s, current_database(), 'temporary')", (role,)) == [False]


# --- roles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_a_power_of_its_own(superuser: psycopg.Connection, role: str) -> None:
    row = superuser.execute(
        """
        select rolcanlogin, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb, rolreplication, rolinherit
        from pg_roles where rolname = %s
        """,
        (role,),
    ).fetchone()
    assert row == (role in LOGINS, False, False, False, False, False, False)


def test_memberships_are_these_two_without_inheritance(superuser: psycopg.Connection) -> None:
    found = superuser.execute(
        """
        select roleid::regrole::text, member::regrole::text, inherit_option, set_option, admin_option
        from pg_auth_members
        where pg_get_userbyid(member) = any(%(roles)s) or pg_get_userbyid(roleid) = any(%(roles)s)
        """,
        {"roles": list(ROLES)},
    ).fetchall()
    assert sorted(found) == [
        ("rag_owner", "rag_migrator", False, True, False),
        ("rag_search", "rag_owner", False, True, False),
    ]


@pytest.mark.parametrize("role", [role for role in ROLES if role != "rag_analyst"])
def test_the_search_path_of_every_role_that_runs_something_ends_with_pg_temp(
    superuser: psycopg.Connection, role: str
) -> None:
    assert column(
        superuser,
        """
        select substr(entry, length('search_path=') + 1)
        from pg_db_role_setting
        cross join unnest(setconfig) as entry
        where setrole = %s::regrole and entry like 'search\\_path=%%'
        """,
        (role,),
    ) == ["rag, pg_temp"]


@pytest.mark.parametrize("role", ["rag_app", "rag_publisher"])
def test_the_server_limits_the_service(superuser: psycopg.Connection, role: str) -> None:
    settings = column(
        superuser,
        "select unnest(setconfig) from pg_db_role_setting where setrole = %s::regrole and setdatabase = 0",
        (role,),
    )
    names = {setting.partition("=")[0] for setting in settings}
    assert names == {"search_path", "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"}


# --- comments -------------------------------------------------------------------------------------


def test_every_relation_and_every_column_of_a_table_has_a_comment(superuser: psycopg.Connection) -> None:
    kind = "relation.relkind in ('r', 'p', 'v', 'm', 'f', 'S')"
    assert relations(superuser, f"{kind} and obj_description(relation.oid, 'pg_class') is null") == []
    columns = column(
        superuser,
        """
        select relation.relname || '.' || attribute.attname
        from pg_class as relation
        join pg_attribute as attribute on attribute.attrelid = relation.oid
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'p')
            and relation.relname <> 'alembic_version'
            and attribute.attnum > 0
            and not attribute.attisdropped
            and col_description(relation.oid, attribute.attnum) is null
        """,
    )
    assert columns == []


def test_every_function_has_a_comment(superuser: psycopg.Connection) -> None:
    assert functions(superuser, "obj_description(function.oid, 'pg_proc') is null") == []


def test_every_policy_has_a_comment(superuser: psycopg.Connection) -> None:
    assert (
        column(
            superuser,
            "select polname from pg_policy where obj_description(oid, 'pg_policy') is null",
        )
        == []
    )


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_a_comment(superuser: psycopg.Connection, role: str) -> None:
    (comment,) = column(superuser, "select shobj_description(%s::regrole, 'pg_authid')", (role,))
    assert comment.startswith("Palisade: ")


# --- functions ------------------------------------------------------------------------------------

DEFINERS = [
    "access_class(text,bigint,text,text[])",
    "keyword_candidates(text,text,uuid[],integer)",
    "my_access_ids()",
    "my_writable_access_ids()",
    "narrowed_access_ids(text)",
]


def test_the_definer_functions_are_these(superuser: psycopg.Connection) -> None:
    assert functions(superuser, "function.prosecdef") == DEFINERS


def test_the_definer_functions_belong_to_rag_search(superuser: psycopg.Connection) -> None:
    assert functions(superuser, "pg_get_userbyid(function.proowner) = 'rag_search'") == DEFINERS
    assert functions(superuser, "pg_get_userbyid(function.proowner) not in ('rag_search', 'rag_owner')") == []


def test_definer_functions_and_those_in_plpgsql_pin_their_search_path(superuser: psycopg.Connection) -> None:
    """pg_temp last: a relation of the caller's own is found after all others, or never."""
    unpinned = functions(
        superuser,
        """
        (function.prosecdef or function.prolang = (select oid from pg_language where lanname = 'plpgsql'))
        and not coalesce(function.proconfig && array['search_path=rag, pg_temp'], false)
        """,
    )
    assert unpinned == []


def test_every_other_function_was_bound_when_it_was_made(superuser: psycopg.Connection) -> None:
    """`begin atomic` keeps object numbers and not names, so that no search path can redirect it."""
    assert functions(superuser, "function.proconfig is null and function.prosqlbody is null") == []


def test_functions_that_read_the_principal_are_never_immutable(superuser: psycopg.Connection) -> None:
    """A plan that has folded one principal's classes would serve them to the next."""
    assert functions(superuser, "function.provolatile = 'i'") == [
        "lexeme_query(text)",
        "lexeme_total(tsvector)",
        "text_search_config(text)",
    ]
    assert functions(superuser, "function.proleakproof") == []


CALLS = {
    "my_access_ids()": "select array(select unnest(rag.my_access_ids()) order by 1)",
    "my_writable_access_ids()": "select array(select unnest(rag.my_writable_access_ids()) order by 1)",
    "narrowed_access_ids(text)": "select array(select unnest(rag.narrowed_access_ids('project')) order by 1)",
    "access_class(text,bigint,text,text[])": "select rag.access_class('project', 1, 'alpha', '{public}')",
    "keyword_candidates(text,text,uuid[],integer)": (
        "select array(select access_id from rag.keyword_candidates('palisade', null, null, 50) order by 1)"
    ),
}
# Worked out from tests/sql/world.py for user 1 of t1 in project alpha.
ANSWERS = {
    "my_access_ids()": [1, 3, 6],
    "my_writable_access_ids()": [3, 6],
    "narrowed_access_ids(text)": [6],
    "access_class(text,bigint,text,text[])": 6,
    "keyword_candidates(text,text,uuid[],integer)": [1, 3, 6],
}


@pytest.fixture
def hijacker(superuser: psycopg.Connection) -> Iterator[psycopg.Connection]:
    """rag_app with objects of its own that shadow ours and Postgres', first in its search path.

    It has more rights here than in truth, where it can create neither.
    """
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"grant temporary on database {superuser.info.dbname} to rag_app")
        superuser.execute("create schema mine authorization rag_app")
        superuser.execute("set local session authorization rag_app")
        for statement in HIJACK:
            superuser.execute(statement)
        for table in protected_tables(superuser):
            superuser.execute(f"create temporary table {table} (like rag.{table} including defaults)")
            superuser.execute(f"create table mine.{table} (like rag.{table} including defaults)")
        for schema in ("pg_temp", "mine"):
            superuser.execute(
                f"insert into {schema}.rag_access_classes (tenant_id, access_id, scope, tags, tags_digest)"
                " select 't1', number, 'public', '{public}', '' from generate_series(1, 13) as number"
            )
            superuser.execute(f"insert into {schema}.rag_project_members values ('t1', 2, 'alpha', 1, true)")
        superuser.execute("set local search_path = mine, pg_temp, rag, pg_catalog")
        superuser.execute("select rag.begin_as('t1', 1, 'alpha', '{public}')")
        yield superuser


HIJACK = (
    """
    create function mine.my_principal(out tenant_id text, out user_id bigint, out project_id text, out tags text[])
    returns setof record language sql as $$ select 't1', 2::bigint, '*', '{public,hr}'::text[] $$
    """,
    "create function mine.my_access_ids() returns bigint[] language sql as $$ select '{1,2,3,4,5}'::bigint[] $$",
    "create function mine.text_search_config(text) returns regconfig language sql as $$ select 'simple'::regconfig $$",
    "create function mine.always(bigint, bigint) returns boolean language sql as $$ select true $$",
    "create operator mine.= (leftarg = bigint, rightarg = bigint, function = mine.always)",
    "create function mine.always(text, text) returns boolean language sql as $$ select true $$",
    "create operator mine.= (leftarg = text, rightarg = text, function = mine.always)",
    "create function mine.always(text[], text[]) returns boolean language sql as $$ select true $$",
    "create operator mine.&& (leftarg = text[], rightarg = text[], function = mine.always)",
    "create domain pg_temp.tsquery as pg_catalog.tsquery check (false)",
    "create domain pg_temp.bigint as pg_catalog.int8 check (false)",
)


def test_every_definer_function_has_a_hijack_test() -> None:
    assert sorted(CALLS) == DEFINERS
    assert sorted(ANSWERS) == DEFINERS


@pytest.mark.parametrize("function", DEFINERS)
def test_temporary_objects_of_the_caller_change_nothing(hijacker: psycopg.Connection, function: str) -> None:
    assert column(hijacker, "select 'rag_access_classes'::regclass::oid = 'mine.rag_access_classes'::regclass") == [
        True
    ]
    assert column(hijacker, CALLS[function]) == [ANSWERS[function]]


def test_temporary_objects_of_the_caller_do_not_open_a_table(hijacker: psycopg.Connection) -> None:
    for table in ("rag_access_classes", "rag_documents", "rag_chunks"):
        assert sorted(column(hijacker, f"select access_id from rag.{table}")) == [1, 3, 6]
    found = column(hijacker, "select document_id from rag.search('palisade', top_k => 20)")
    assert len(found) == 3


# --- relations ------------------------------------------------------------------------------------


def test_every_view_runs_as_its_reader_and_is_a_barrier(superuser: psycopg.Connection) -> None:
    assert relations(superuser, "relation.relkind = 'v'") == ["v_chunks", "v_documents"]
    assert (
        relations(
            superuser,
            "relation.relkind = 'v' and not coalesce("
            "relation.reloptions @> '{security_invoker=true,security_barrier=true}', false)",
        )
        == []
    )


def test_there_is_no_materialised_view_partition_sequence_or_foreign_table(superuser: psycopg.Connection) -> None:
    assert relations(superuser, "relation.relkind not in ('r', 'i', 'v', 'c')") == []


def test_everything_belongs_to_the_owner(superuser: psycopg.Connection) -> None:
    assert relations(superuser, "pg_get_userbyid(relation.relowner) <> 'rag_owner'") == []


def test_there_is_no_trigger_and_no_rule(superuser: psycopg.Connection) -> None:
    """But for those that Postgres itself makes for foreign keys and views."""
    assert column(superuser, "select tgname from pg_trigger where not tgisinternal") == []
    assert (
        column(
            superuser,
            """
        select rulename from pg_rewrite
        join pg_class on pg_class.oid = ev_class
        where relnamespace = 'rag'::regnamespace and rulename <> '_RETURN'
        """,
        )
        == []
    )
    assert column(superuser, "select evtname from pg_event_trigger") == []


def test_every_key_contains_the_tenant(superuser: psycopg.Connection) -> None:
    """Primary, unique and foreign keys, and unique indexes: none compares rows of two tenants."""
    keys = column(
        superuser,
        """
        select keys.name
        from (
            select conname::text as name, conrelid as relation, conkey as numbers
            from pg_constraint
            where contype in ('p', 'u', 'f', 'x')
            union all
            select indexrelid::regclass::text, indrelid, indkey::smallint[]
            from pg_index
            where indisunique
            union all
            select conname || ' (referenced)', confrelid, confkey
            from pg_constraint
            where contype = 'f'
        ) as keys
        join pg_class as relation on relation.oid = keys.relation
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relname like 'rag\\_%'
            and not exists (
                select 1 from pg_attribute as attribute
                where attribute.attrelid = relation.oid
                    and attribute.attname = 'tenant_id'
                    and attribute.attnotnull
                    and attribute.attnum = any(keys.numbers)
            )
        """,
    )
    assert keys == []


def test_every_column_of_a_foreign_key_is_not_null(superuser: psycopg.Connection) -> None:
    """A composite key with a null in it is not checked at all."""
    assert (
        column(
            superuser,
            """
        select conname || '.' || attname
        from pg_constraint
        join pg_attribute on attrelid = conrelid and attnum = any(conkey)
        where contype = 'f' and connamespace = 'rag'::regnamespace and not attnotnull
        """,
        )
        == []
    )


def test_foreign_keys_cascade_or_restrict(superuser: psycopg.Connection) -> None:
    found = superuser.execute(
        "select conname, confdeltype, confupdtype from pg_constraint"
        " where contype = 'f' and connamespace = 'rag'::regnamespace"
    ).fetchall()
    assert len(found) == 4
    assert [name for name, delete, update in found if delete not in ("c", "r", "a") or update not in ("r", "a")] == []


def test_tables_have_a_primary_key_and_a_tenant(superuser: psycopg.Connection) -> None:
    without_key = relations(
        superuser,
        "relation.relkind = 'r' and not exists"
        " (select 1 from pg_constraint where conrelid = relation.oid and contype = 'p')",
    )
    assert without_key == []
    tenants = column(
        superuser,
        """
        select relation.relname from pg_class as relation
        join pg_attribute as attribute on attribute.attrelid = relation.oid
        where relation.relnamespace = 'rag'::regnamespace and relation.relkind = 'r'
            and attribute.attname = 'tenant_id' and attribute.attnotnull
        order by 1
        """,
    )
    assert tenants == protected_tables(superuser)


def test_what_an_exact_scan_reads_is_stored_in_the_row(superuser: psycopg.Connection) -> None:
    found = superuser.execute(
        "select attname, attstorage from pg_attribute"
        " where attrelid = 'rag.rag_chunks'::regclass and attname in ('embedding', 'tsv') order by attname"
    ).fetchall()
    assert found == [("embedding", "p"), ("tsv", "m")]


def test_no_statistic_tells_of_a_tenant(superuser: psycopg.Connection, app: psycopg.Connection) -> None:
    """The most common values of a column would; under row security the service cannot read them."""
    superuser.execute("analyze rag_documents")
    statement = "select count(*) > 0 from pg_stats where schemaname = 'rag' and tablename = 'rag_documents'"
    assert column(superuser, statement) == [True]
    with speaking(app, REACHES["user 1, all projects"].principal):
        assert column(app, statement) == [False]
