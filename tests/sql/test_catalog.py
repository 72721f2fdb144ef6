"""What must hold for everything in the catalog, whatever is added later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import psycopg
import pytest

from tests.conftest import SIGNER
from tests.sql.world import (
    QUEUED,
    REACHES,
    column,
    document_id,
    job_id,
    proof,
    protected_tables,
    query_id,
    said_id,
    signature,
    speaking,
)

LOGINS = ("rag_app", "rag_publisher", "rag_worker", "rag_operator", "rag_migrator")
DEFINER_ROLES = ("rag_search", "rag_principal", "rag_steward", "rag_embedder", "rag_queue")
ROLES = (*LOGINS, *DEFINER_ROLES, "rag_owner", "rag_analyst")
# The only tables that no tenant's rows are in.
WITHOUT_TENANT = ("rag_models", "rag_signing_keys")

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
        "rag_analysts",
        "rag_assertions",
        "rag_calibrations",
        "rag_chunks",
        "rag_claims",
        "rag_class_indexes",
        "rag_class_languages",
        "rag_class_lexemes",
        "rag_conversation_messages",
        "rag_conversation_summaries",
        "rag_documents",
        "rag_erasures",
        "rag_feedback",
        "rag_jobs",
        "rag_limits",
        "rag_models",
        "rag_project_members",
        "rag_prompts",
        "rag_query_log_chunks",
        "rag_query_logs",
        "rag_rate_buckets",
        "rag_retractions",
        "rag_service_keys",
        "rag_signing_keys",
        "rag_synchronisations",
        "rag_tags",
        "rag_tombstones",
        "rag_usage",
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
    """A permissive one for everybody; a restrictive one as well, the tenant belt, for whoever acts for a principal."""
    lacking = superuser.execute(
        f"""
        select granted.role_name, granted.relname, granted.privilege_type from ({GRANTED}) as granted
        where granted.relname like 'rag\\_%%'
            and (
                %(permissive)s = 'PERMISSIVE'
                or granted.role_name in ('rag_app', 'rag_publisher', 'rag_principal')
                -- A tenant that was erased has no name left to compare with; models are of no tenant.
                and not (granted.role_name = 'rag_principal' and granted.relname in ('rag_erasures', 'rag_models'))
            )
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
            and regexp_replace(
                concat(qual, with_check), '\\( SELECT (my_[a-z_]+|i_am_analyst)\\(\\) AS [a-z_]+\\)', '', 'g'
            ) ~ 'my_|i_am_'
        """
    ).fetchall()
    assert bare == []


def test_policies_call_these_functions_and_no_others(superuser: psycopg.Connection) -> None:
    """class_reads() compares a row with its class, so it runs for each; and it is only asked of rows to be written."""
    called = superuser.execute(
        """
        select distinct function.proname, policy.polcmd
        from pg_depend as dependency
        join pg_proc as function on function.oid = dependency.refobjid
        join pg_policy as policy on policy.oid = dependency.objid
        where dependency.classid = 'pg_policy'::regclass
            and dependency.refclassid = 'pg_proc'::regclass
        """
    ).fetchall()
    assert {name for name, _ in called} == {
        *("my_tenant_id", "my_user_id", "my_access_ids", "my_writable_access_ids", "i_am_analyst", "class_reads"),
        "my_tags",
    }
    assert [command for name, command in called if name == "class_reads"] == ["a"]


# --- privileges -----------------------------------------------------------------------------------

DOCUMENT_UPDATE = (
    "source_uri source_hash source_updated_at language title body domain doc_type provenance_id task_id verified"
    " metadata updated_at content_updated_at"
)
VIEWS = (
    *("v_documents", "v_chunks", "v_query_latency", "v_empty_results", "v_stale_documents", "v_source_usage"),
    *("v_routed_queries", "v_feedback"),
)
SEEN = {(view, "SELECT"): "*" for view in VIEWS}
REVISION = {("alembic_version", "SELECT"): "*"}
SERVICE = {
    ("rag_documents", "SELECT"): "tenant_id access_id id body_bytes",
    ("rag_documents", "INSERT"): "*",
    ("rag_documents", "UPDATE"): DOCUMENT_UPDATE,
    ("rag_documents", "DELETE"): "*",
    ("rag_chunks", "SELECT"): "tenant_id access_id id document_id chunk_index",
    ("rag_chunks", "INSERT"): "*",
    ("rag_chunks", "DELETE"): "*",
    ("rag_query_logs", "INSERT"): "*",
    ("rag_query_log_chunks", "INSERT"): "*",
    ("rag_assertions", "INSERT"): "tenant_id key_id user_id project_id tags action",
    ("rag_retractions", "INSERT"): "tenant_id user_id project_id action reason cascade_id sources documents chunks",
    **SEEN,
    **REVISION,
}
PRIVILEGES = {
    "rag_app": SERVICE,
    "rag_publisher": SERVICE,
    "rag_worker": {
        ("rag_documents", "SELECT"): "tenant_id access_id id body_bytes",
        ("rag_documents", "INSERT"): "*",
        ("rag_documents", "UPDATE"): DOCUMENT_UPDATE,
        ("rag_documents", "DELETE"): "*",
        ("rag_chunks", "SELECT"): "tenant_id access_id id document_id chunk_index",
        ("rag_chunks", "INSERT"): "*",
        ("rag_chunks", "DELETE"): "*",
        **REVISION,
    },
    "rag_queue": {
        ("rag_jobs", "SELECT"): "*",
        ("rag_jobs", "UPDATE"): "status reason detail attempts losses queue_id turn claim payload body request_key"
        " started_at due_at finished_at",
        ("rag_jobs", "DELETE"): "*",
        ("rag_claims", "SELECT"): "tenant_id source_digest expires_at",
        ("rag_claims", "DELETE"): "*",
    },
    "rag_analyst": SEEN,
    "rag_operator": {
        ("rag_project_members", "SELECT"): "*",
        ("rag_project_members", "INSERT"): "*",
        ("rag_project_members", "UPDATE"): "may_write",
        ("rag_project_members", "DELETE"): "*",
        ("rag_analysts", "SELECT"): "*",
        ("rag_analysts", "INSERT"): "*",
        ("rag_analysts", "UPDATE"): "tags projects user_scope",
        ("rag_analysts", "DELETE"): "*",
        ("rag_service_keys", "SELECT"): "*",
        ("rag_service_keys", "INSERT"): "*",
        ("rag_service_keys", "UPDATE"): "revoked_at",
        ("rag_calibrations", "SELECT"): "*",
        ("rag_calibrations", "INSERT"): "*",
        ("rag_calibrations", "UPDATE"): "vector_share min_similarity questions ndcg_before ndcg_after calibrated_at",
        ("rag_calibrations", "DELETE"): "*",
        ("rag_tags", "SELECT"): "*",
        ("rag_tags", "INSERT"): "*",
        ("rag_tags", "UPDATE"): "owner_user_id owner_email updated_at",
        ("rag_tags", "DELETE"): "*",
        ("rag_prompts", "SELECT"): "*",
        ("rag_prompts", "INSERT"): "*",
        ("rag_prompts", "UPDATE"): "prompt replaces generation updated_at",
        ("rag_prompts", "DELETE"): "*",
        ("rag_limits", "SELECT"): "*",
        ("rag_limits", "INSERT"): "*",
        ("rag_limits", "UPDATE"): "queries_per_minute query_burst ingests_per_minute ingest_burst documents bytes"
        " updated_at",
        ("rag_limits", "DELETE"): "*",
        ("rag_usage", "SELECT"): "*",
        ("rag_assertions", "SELECT"): "*",
        ("rag_retractions", "SELECT"): "*",
        ("rag_erasures", "SELECT"): "*",
        **REVISION,
    },
    "rag_migrator": REVISION,
    "rag_search": {
        ("rag_access_classes", "SELECT"): "*",
        ("rag_access_classes", "INSERT"): "tenant_id scope user_id project_id tags tags_digest",
        ("rag_project_members", "SELECT"): "*",
        ("rag_chunks", "SELECT"): "tenant_id id access_id document_id tsv lexeme_count language embedding"
        " embedding_model",
        ("rag_documents", "SELECT"): "tenant_id access_id id scope user_id tags source_type language doc_type verified"
        " created_at updated_at content_updated_at source_updated_at",
        ("rag_feedback", "SELECT"): "tenant_id user_id access_id document_id rating clicked",
        ("rag_signing_keys", "SELECT"): "*",
        ("rag_analysts", "SELECT"): "*",
        ("rag_service_keys", "SELECT"): "*",
        **{
            (f"rag_class_{table}", command): "*"
            for table in ("indexes", "languages", "lexemes")
            for command in ("SELECT", "INSERT", "DELETE")
        },
        ("rag_class_indexes", "UPDATE"): "ready chunks measured_at vector_bytes_per_chunk words_bytes_per_chunk",
        ("rag_limits", "SELECT"): "*",
        ("rag_rate_buckets", "SELECT"): "*",
        ("rag_rate_buckets", "INSERT"): "*",
        ("rag_rate_buckets", "UPDATE"): "tokens refilled_at",
        ("rag_usage", "SELECT"): "*",
        ("rag_usage", "INSERT"): "*",
        ("rag_usage", "UPDATE"): "documents bytes",
    },
    "rag_principal": {
        ("rag_documents", "SELECT"): "*",
        ("rag_chunks", "SELECT"): "*",
        ("rag_query_logs", "SELECT"): "*",
        ("rag_query_log_chunks", "SELECT"): "*",
        ("rag_tombstones", "SELECT"): "*",
        ("rag_tombstones", "INSERT"): "*",
        ("rag_tombstones", "UPDATE"): "generation reason updated_at retracted cascade_id removed_id",
        ("rag_synchronisations", "SELECT"): "*",
        ("rag_synchronisations", "INSERT"): "*",
        ("rag_synchronisations", "UPDATE"): "version files written removed unchanged failed finished_at succeeded_at",
        ("rag_erasures", "SELECT"): "tenant_id subject_digest",
        ("rag_calibrations", "SELECT"): "*",
        ("rag_feedback", "SELECT"): "*",
        ("rag_feedback", "INSERT"): "*",
        ("rag_feedback", "UPDATE"): "rating clicked updated_at",
        ("rag_tags", "SELECT"): "*",
        ("rag_prompts", "SELECT"): "*",
        ("rag_jobs", "SELECT"): "*",
        ("rag_jobs", "INSERT"): "*",
        ("rag_jobs", "UPDATE"): "status reason detail claim payload body result request_key due_at finished_at",
        ("rag_claims", "SELECT"): "*",
        ("rag_claims", "INSERT"): "*",
        ("rag_claims", "UPDATE"): "token expires_at",
        ("rag_conversation_messages", "SELECT"): "*",
        ("rag_conversation_messages", "INSERT"): "tenant_id access_id user_id project_id thread_id number role content"
        " tokens request_key request_digest created_at",
        ("rag_conversation_messages", "UPDATE"): "summary_id summarised_at",
        ("rag_conversation_summaries", "SELECT"): "*",
        ("rag_conversation_summaries", "INSERT"): "tenant_id id access_id document_id user_id project_id thread_id"
        " summary_text message_ids model",
        ("rag_claims", "DELETE"): "*",
        ("rag_project_members", "SELECT"): "*",
        ("rag_project_members", "INSERT"): "*",
        ("rag_project_members", "UPDATE"): "may_write",
        ("rag_project_members", "DELETE"): "*",
        ("rag_models", "SELECT"): "place model_id is_former writes_paused_until changed_at",
    },
    "rag_embedder": {
        ("rag_access_classes", "SELECT"): "tenant_id access_id",
        ("rag_documents", "SELECT"): "tenant_id access_id id title",
        ("rag_chunks", "SELECT"): "tenant_id access_id id document_id section chunk_text chunk_hash"
        " second_embedding_model",
        ("rag_chunks", "UPDATE"): "second_embedding second_embedding_model",
        ("rag_class_indexes", "SELECT"): "access_id chunks ready",
        ("rag_class_indexes", "UPDATE"): "vector_bytes_per_chunk",
        ("rag_models", "SELECT"): "*",
        ("rag_models", "INSERT"): "*",
        ("rag_models", "UPDATE"): "*",
        ("rag_models", "DELETE"): "*",
    },
    "rag_steward": {
        ("rag_access_classes", "SELECT"): "tenant_id access_id scope user_id project_id tags",
        ("rag_access_classes", "DELETE"): "*",
        ("rag_project_members", "SELECT"): "tenant_id owner_user_id project_id member_user_id",
        ("rag_project_members", "DELETE"): "*",
        ("rag_documents", "SELECT"): "tenant_id access_id id user_id project_id source_type source_id body_bytes",
        ("rag_documents", "DELETE"): "*",
        ("rag_chunks", "SELECT"): "tenant_id access_id document_id embedding_model",
        ("rag_tombstones", "SELECT"): "tenant_id access_id",
        ("rag_tombstones", "DELETE"): "*",
        ("rag_synchronisations", "SELECT"): "tenant_id access_id",
        ("rag_synchronisations", "DELETE"): "*",
        ("rag_erasures", "SELECT"): "tenant_id",
        ("rag_erasures", "INSERT"): "*",
        ("rag_erasures", "DELETE"): "*",
        ("rag_query_logs", "SELECT"): "tenant_id id user_id project_id created_at",
        ("rag_query_logs", "DELETE"): "*",
        ("rag_query_log_chunks", "SELECT"): "tenant_id user_id query_id document_id",
        ("rag_query_log_chunks", "DELETE"): "*",
        ("rag_feedback", "SELECT"): "tenant_id user_id query_id document_id",
        ("rag_feedback", "DELETE"): "*",
        ("rag_tags", "SELECT"): "tenant_id owner_user_id",
        ("rag_tags", "DELETE"): "*",
        ("rag_prompts", "SELECT"): "tenant_id",
        ("rag_prompts", "DELETE"): "*",
        ("rag_signing_keys", "SELECT"): "key_id created_at",
        ("rag_signing_keys", "INSERT"): "*",
        ("rag_signing_keys", "DELETE"): "*",
        ("rag_analysts", "SELECT"): "tenant_id",
        ("rag_analysts", "DELETE"): "*",
        ("rag_service_keys", "SELECT"): "tenant_id",
        ("rag_service_keys", "DELETE"): "*",
        ("rag_calibrations", "SELECT"): "tenant_id",
        ("rag_calibrations", "DELETE"): "*",
        ("rag_assertions", "SELECT"): "tenant_id id user_id project_id created_at",
        ("rag_assertions", "DELETE"): "*",
        ("rag_retractions", "SELECT"): "tenant_id user_id project_id",
        ("rag_retractions", "DELETE"): "*",
        ("rag_limits", "SELECT"): "tenant_id",
        ("rag_limits", "DELETE"): "*",
        ("rag_rate_buckets", "SELECT"): "tenant_id",
        ("rag_rate_buckets", "DELETE"): "*",
        ("rag_usage", "SELECT"): "*",
        ("rag_usage", "INSERT"): "*",
        ("rag_usage", "UPDATE"): "documents bytes",
        ("rag_usage", "DELETE"): "*",
        ("rag_jobs", "SELECT"): "tenant_id user_id project_id source_type source_id queue_id",
        ("rag_jobs", "DELETE"): "*",
        ("rag_claims", "SELECT"): "tenant_id",
        ("rag_claims", "DELETE"): "*",
        ("rag_conversation_messages", "SELECT"): "tenant_id access_id id user_id project_id created_at",
        ("rag_conversation_messages", "DELETE"): "*",
        ("rag_conversation_summaries", "SELECT"): "tenant_id access_id document_id user_id project_id",
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


def test_memberships_are_these_without_inheritance(superuser: psycopg.Connection) -> None:
    found = superuser.execute(
        """
        select roleid::regrole::text, member::regrole::text, inherit_option, set_option, admin_option
        from pg_auth_members
        where pg_get_userbyid(member) = any(%(roles)s) or pg_get_userbyid(roleid) = any(%(roles)s)
        """,
        {"roles": list(ROLES)},
    ).fetchall()
    assert sorted(found) == [
        ("rag_embedder", "rag_owner", False, True, False),
        ("rag_owner", "rag_migrator", False, True, False),
        ("rag_principal", "rag_owner", False, True, False),
        ("rag_queue", "rag_owner", False, True, False),
        ("rag_search", "rag_owner", False, True, False),
        ("rag_steward", "rag_owner", False, True, False),
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
    ) == ["rag, jobs, pg_temp" if role == "rag_worker" else "rag, pg_temp"]


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

SEARCH = (
    "search(text,halfvec,text,integer,text,uuid[],double precision,integer,integer,double precision,integer,boolean,"
    "text,text,boolean,text[],text[],text[],text[],text[],timestamp with time zone,timestamp with time zone,jsonb,"
    "double precision)"
)
EXPLAIN = (
    "explain(text,uuid,halfvec,text,integer,integer,text,double precision,integer,integer,double precision,integer,"
    "text,text,double precision)"
)
NOTE_SYNCHRONISATION = "note_synchronisation(bigint,text,text,integer,integer,integer,integer,integer)"
POST_MESSAGE = "post_message(bigint,text,text,text,integer,bytea,bytea)"
ADD_SUMMARY = "add_summary(uuid,bigint,uuid,text,text,uuid[],text)"
DEFINERS = {
    "rag_search": [
        "access_class(text,bigint,text,text[])",
        "charge_quota(bigint,bigint)",
        "class_contents(text)",
        "class_reads(bigint,text,bigint,text,text[])",
        "class_sizes(bigint)",
        "demote_class(text,bigint)",
        "feedback_support(uuid[])",
        "indexed_among(bigint[])",
        "keyword_candidates(text,text,uuid[],integer,bigint[],uuid[],text[],halfvec,text)",
        "load_service_keys(text)",
        "measure_class(text,bigint,integer)",
        "my_access_ids()",
        "my_classes()",
        "my_limits()",
        "my_listed_documents()",
        "my_principal()",
        "my_writable_access_ids()",
        "narrowed_access_ids(text)",
        "proof_holds(text,text)",
        "set_class_ready(text,bigint,boolean)",
        "take_token(text)",
    ],
    "rag_embedder": [
        "chunks_to_fill(text,bigint,integer)",
        "count_fill()",
        "fill_vectors(text,text[],bigint[],uuid[],text[])",
        "lacks_vectors()",
        "large_classes()",
        "list_models()",
        "pause_writes(integer)",
        "set_models(text,text,boolean)",
    ],
    "rag_principal": [
        "active_model()",
        ADD_SUMMARY,
        "bury_source(bigint,text,text,text)",
        "cancel_my_job(uuid)",
        "check_model(text)",
        "claim_messages(bigint,text,uuid,bigint)",
        "claim_source(bigint,text,text,uuid,interval)",
        "claimed_messages(uuid)",
        "close_sources(bigint[],text[],text[],uuid[],text)",
        "compare_models(halfvec,halfvec,integer)",
        "derived_documents(uuid[],text[],text[],boolean)",
        "enqueue_job(text,text,text,text,jsonb,text,integer,bytea,bytea)",
        EXPLAIN,
        "find_source(bigint,text,bigint,text,text,text)",
        "give_feedback(uuid,uuid,integer,integer,boolean)",
        "holds_job(uuid,uuid)",
        "look_at_source(bigint,text,bigint,text,text,text,text)",
        "my_chunks()",
        "my_document(uuid)",
        "my_document_chunks(uuid)",
        "my_documents()",
        "my_documents_among(uuid[])",
        "my_feedback()",
        "my_job(uuid)",
        "my_members()",
        "my_messages(text,text,bigint,integer)",
        "my_min_similarity(text)",
        "my_origin(text)",
        "my_prompt()",
        "my_queries()",
        "my_query_chunks()",
        "my_request(bytea,interval)",
        "my_sources_among(text[])",
        "my_summaries(text,text,integer)",
        "my_synchronisations()",
        "my_tag_owner(text)",
        "my_waiting_job(text,text)",
        NOTE_SYNCHRONISATION,
        POST_MESSAGE,
        "record_request(text,text,text,jsonb,bytea,bytea)",
        "release_claim(bytea,uuid)",
        "renew_claim(bytea,uuid,interval)",
        "reopen_sources(text[],text[],uuid[],text[],text[])",
        "retraction_of(text,bigint,text,text,text)",
        SEARCH,
        "search_mode(text,text,uuid[])",
        "settle_job(uuid,uuid,jsonb)",
        "share_project(text,bigint,boolean)",
        "unshare_project(text,bigint)",
    ],
    "rag_steward": [
        "add_signing_key()",
        "count_traces(text,bigint,text,text,text)",
        "count_expired(text,interval)",
        "embeds_with(text,text)",
        "expire_batch(text,interval,integer)",
        "expire_logs(interval,text)",
        "explain_access(uuid,text,bigint,text,text[])",
        "forget(text,bigint,text,text,text)",
        "list_signing_keys()",
        "recount_usage(text)",
        "retire_signing_key(text)",
        "usage_drift()",
    ],
    "rag_queue": [
        "cancel_jobs(uuid[])",
        "drop_queued(bigint[])",
        "expire_jobs(interval,interval)",
        "list_jobs(text,text,integer)",
        "push_job(text,uuid,text,text,integer)",
        "queue_depth(interval,text)",
        "recover_jobs(interval,integer)",
        "resubmit_jobs(uuid[])",
        "return_job(uuid,uuid,text,text,interval,boolean,text)",
        "take_job(uuid,bigint,text)",
    ],
}
ALL_DEFINERS = [function for functions in DEFINERS.values() for function in functions]


def test_the_definer_functions_are_these(superuser: psycopg.Connection) -> None:
    assert functions(superuser, "function.prosecdef") == sorted(ALL_DEFINERS)


@pytest.mark.parametrize("role", DEFINER_ROLES)
def test_each_definer_function_belongs_to_the_role_that_it_needs(superuser: psycopg.Connection, role: str) -> None:
    assert functions(superuser, f"pg_get_userbyid(function.proowner) = '{role}'") == sorted(DEFINERS[role])


def test_all_other_functions_belong_to_the_owner(superuser: psycopg.Connection) -> None:
    others = functions(superuser, "not function.prosecdef and pg_get_userbyid(function.proowner) <> 'rag_owner'")
    assert others == []


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
        "candidate_query(text[],bigint[],bigint,bigint)",
        "erasure_digest(text,text,text[])",
        "erasure_kind(text,bigint,text,text,text)",
        "lexeme_query(text)",
        "lexeme_total(tsvector)",
        "prepared_vector(regconfig,text,boolean)",
        "provenance_digest(text)",
        "question_lexemes(text,text)",
        "refilled_tokens(double precision,timestamp with time zone,integer,integer,timestamp with time zone)",
        "search_vector(text,text)",
        "source_digest(text,text)",
        "tenant_lock(text)",
        "text_search_config(text)",
        "text_vector(text,text,boolean)",
        "thread_lock(text,bigint,text,text)",
        "unspaced_letters()",
        "unspaced_unit()",
        "unspaced_vector(text,boolean)",
        "vector_share(text,text,text)",
    ]
    assert functions(superuser, "function.proleakproof") == []


TWO_MODELS = "select rag.set_models('test-model', 'coming')"
KEY = rf"\x{sha256(b'a key').hexdigest()}"
JOB, OTHER_JOB = job_id("t1"), job_id("t2")
TAKEN = f"(select claim from rag.take_job('{JOB}', {QUEUED['t1']}, '{{jobs_proof}}'))"

# Called by each login that may; answers worked out from tests/sql/world.py. For the service: user 1 of t1 in project
# alpha. Of several statements the last one has the answer.
CALLS: dict[str, tuple[str, tuple[str, ...], object]] = {
    "access_class(text,bigint,text,text[])": (
        "rag_app",
        ("select rag.access_class('project', 1, 'alpha', '{public}')",),
        6,
    ),
    "class_contents(text)": (
        "rag_app",
        ("select array(select language from rag.class_contents(null) order by 1)",),
        ["en"],
    ),
    "class_reads(bigint,text,bigint,text,text[])": (
        "rag_app",
        (
            "select array[rag.class_reads(3, 'user', 1, null, '{public}'),"
            " rag.class_reads(5, 'user', 2, null, '{public}')]",
        ),
        [True, False],
    ),
    "class_sizes(bigint)": ("rag_operator", ("select sum(chunks) from rag.class_sizes(1)",), 13),
    "measure_class(text,bigint,integer)": ("rag_operator", ("select chunks from rag.measure_class('t1', 3, 1)",), 1),
    "set_class_ready(text,bigint,boolean)": (
        "rag_operator",
        ("select rag.measure_class('t1', 3, 1)", "select rag.set_class_ready('t1', 3, false)"),
        False,
    ),
    "demote_class(text,bigint)": (
        "rag_operator",
        ("select rag.measure_class('t1', 3, 1)", "select rag.demote_class('t1', 3)"),
        True,
    ),
    "indexed_among(bigint[])": (
        "rag_app",
        ("select rag.indexed_among(array[1, 2, 3, 6]::bigint[])",),
        [],
    ),
    "keyword_candidates(text,text,uuid[],integer,bigint[],uuid[],text[],halfvec,text)": (
        "rag_app",
        ("select array(select access_id from rag.keyword_candidates('palisade', null, null, 50) order by 1)",),
        [1, 3, 6],
    ),
    "load_service_keys(text)": (
        "rag_app",
        ("select array(select key_id from rag.load_service_keys('{proof}') order by 1)",),
        ["a" * 16, "b" * 16],
    ),
    "my_access_ids()": ("rag_app", ("select array(select unnest(rag.my_access_ids()) order by 1)",), [1, 3, 6]),
    "my_classes()": ("rag_app", ("select array(select access_id from rag.my_classes() order by 1)",), [1, 3, 6]),
    "my_listed_documents()": (
        "mallory",
        ("select array(select id from rag.my_listed_documents() order by 1)",),
        [document_id(3), document_id(5)],
    ),
    "my_principal()": ("rag_app", ("select array(select user_id from rag.my_principal())",), [1]),
    "my_writable_access_ids()": (
        "rag_app",
        ("select array(select unnest(rag.my_writable_access_ids()) order by 1)",),
        [3, 6],
    ),
    "narrowed_access_ids(text)": (
        "rag_app",
        ("select array(select unnest(rag.narrowed_access_ids('project')) order by 1)",),
        [6],
    ),
    "bury_source(bigint,text,text,text)": (
        "rag_app",
        ("select rag.bury_source(3, 'text', 'a deleted source', 'a test')",),
        2,
    ),
    "close_sources(bigint[],text[],text[],uuid[],text)": (
        "rag_app",
        (
            "select rag.close_sources('{3}', '{the source}', '{null}', array[null]::uuid[], 'a cascade')",
            "select rag.close_sources('{3,6}', '{the source,the source}', '{null,null}', '{null,null}', 'a cascade')",
        ),
        2,
    ),
    "derived_documents(uuid[],text[],text[],boolean)": (
        "rag_app",
        (
            f"select array(select document_id from rag.derived_documents('{{{document_id(5)},{document_id(12)}}}',"
            " '{the source}', '{}', true) where may_write order by 1)",
        ),
        [document_id(3), document_id(6)],
    ),
    "reopen_sources(text[],text[],uuid[],text[],text[])": (
        "rag_app",
        (
            "select rag.close_sources('{3,6}', '{the source,the source}', '{null,null}', '{null,null}', 'a cascade')",
            "select rag.reopen_sources('{the source}', '{}', '{}', '{}', '{user}')",
        ),
        1,
    ),
    "retraction_of(text,bigint,text,text,text)": (
        "rag_app",
        (
            "select rag.close_sources('{3}', '{the source}', '{null}', array[null]::uuid[], 'a cascade')",
            "select closed from rag.retraction_of('user', 1, null, 'the source', null)",
        ),
        1,
    ),
    "look_at_source(bigint,text,bigint,text,text,text,text)": (
        "rag_app",
        ("select array(select id from rag.look_at_source(3, 'user', 1, null, 'text', 'the source', null))",),
        [document_id(3)],
    ),
    "find_source(bigint,text,bigint,text,text,text)": (
        "rag_app",
        ("select array(select id from rag.find_source(3, 'user', 1, null, 'text', 'the source'))",),
        [document_id(3)],
    ),
    "my_chunks()": ("rag_app", ("select array(select access_id from rag.my_chunks() order by 1)",), [1, 3, 6]),
    "my_document(uuid)": (
        "rag_app",
        (f"select array(select body from rag.my_document('{document_id(3)}'))",),
        ["palisade record three"],
    ),
    "my_document_chunks(uuid)": (
        "rag_app",
        (f"select array(select chunk_text from rag.my_document_chunks('{document_id(3)}'))",),
        ["palisade record three"],
    ),
    "my_documents()": ("rag_app", ("select array(select access_id from rag.my_documents() order by 1)",), [1, 3, 6]),
    "my_origin(text)": (
        "rag_app",
        (
            "insert into rag.rag_documents (tenant_id, access_id, scope, user_id, tags, source_type, source_id,"
            " source_hash, title, body, metadata) values ('t1', 3, 'user', 1, '{public}', 'text', 'kept:a.md',"
            """ 'hash', 'A', 'b', '{"origin": {"source": "kept", "path": "a.md", "sha256": "c"}}')"""
            " returning access_id",
            "select array(select path from rag.my_origin('kept'))",
        ),
        ["a.md"],
    ),
    "my_documents_among(uuid[])": (
        "rag_app",
        (
            "select array(select document_id from rag.my_documents_among("
            f"array['{document_id(5)}', '{document_id(3)}', '{document_id(12)}']::uuid[]))",
        ),
        [document_id(3)],
    ),
    "my_sources_among(text[])": (
        "rag_app",
        ("select array(select document_id from rag.my_sources_among('{the source,another}') order by 1)",),
        [document_id(1), document_id(3), document_id(6)],
    ),
    "feedback_support(uuid[])": (
        "rag_app",
        (
            "select array(select access_id from rag.feedback_support("
            f"array['{document_id(3)}', '{document_id(5)}', '{document_id(12)}']::uuid[]))",
        ),
        [3],
    ),
    "give_feedback(uuid,uuid,integer,integer,boolean)": (
        "rag_app",
        (
            f"select array[rag.give_feedback('{query_id(101)}', '{document_id(3)}', 0, -1, true),"
            f" rag.give_feedback('{query_id(102)}', '{document_id(5)}', 0, -1, true)]",
        ),
        [True, False],
    ),
    "my_feedback()": ("rag_app", ("select array(select query_id from rag.my_feedback())",), [query_id(101)]),
    "my_synchronisations()": (
        "rag_app",
        ("select array(select source from rag.my_synchronisations() order by 1)",),
        ["source-1", "source-3", "source-6"],
    ),
    NOTE_SYNCHRONISATION: (
        "rag_app",
        (
            "select rag.note_synchronisation(3, 'another', null, 1, 1, 0, 0, 0)",
            "select array(select source from rag.my_synchronisations() order by 1)",
        ),
        ["another", "source-1", "source-3", "source-6"],
    ),
    POST_MESSAGE: (
        "rag_app",
        (
            "select rag.post_message(3, 'a thread', 'user', 'palisade record three said', 4, null, null)",
            "select array[open_tokens, number] from rag.post_message(3, 'a thread', 'user', 'x', 1, null, null)",
        ),
        [5, 2],
    ),
    "claim_messages(bigint,text,uuid,bigint)": (
        "rag_app",
        (f"select rag.claim_messages(3, 'the thread', '{JOB}', 1000)",),
        1,
    ),
    "claimed_messages(uuid)": (
        "rag_app",
        (f"select array(select content from rag.claimed_messages('{said_id(6)}'))",),
        ["palisade record six said"],
    ),
    "my_messages(text,text,bigint,integer)": (
        "rag_app",
        (
            "select array(select content from rag.my_messages(null, 'the thread', 0, 10))"
            " || array(select content from rag.my_messages('alpha', 'the thread', 0, 10))",
        ),
        ["palisade record three said", "palisade record six said"],
    ),
    "my_summaries(text,text,integer)": (
        "rag_app",
        ("select array(select document_id from rag.my_summaries('alpha', 'the thread', 10))",),
        [document_id(6)],
    ),
    ADD_SUMMARY: (
        "rag_app",
        (
            f"select rag.add_summary('{said_id(3)}', 3, '{document_id(3)}', 'the thread', 'a summary',"
            f" '{{{said_id(3)}}}', 'a model')",
        ),
        1,
    ),
    "my_prompt()": ("rag_app", ("select prompt from rag.my_prompt()",), "You speak for t1."),
    "my_tag_owner(text)": (
        "rag_app",
        ("select array[count(*), (select count(*) from rag.my_tag_owner('public'))] from rag.my_tag_owner('hr')",),
        [0, 0],
    ),
    "my_members()": (
        "rag_app",
        ("select array(select project_id from rag.my_members() order by 1)",),
        ["delta", "gamma"],
    ),
    "my_min_similarity(text)": ("rag_app", ("select rag.my_min_similarity('test-model')",), -0.25),
    "my_queries()": (
        "rag_app",
        ("select array(select query_id from rag.my_queries() order by 1)",),
        [query_id(101), query_id(201)],
    ),
    "my_query_chunks()": ("rag_app", ("select array(select query_id from rag.my_query_chunks())",), [query_id(101)]),
    EXPLAIN: (
        "rag_app",
        (f"select array(select passed from rag.explain('palisade', '{document_id(3)}'))",),
        [True, False, True, True, True, True, True, True, True, True, True],
    ),
    SEARCH: (
        "rag_app",
        ("select array(select document_id from rag.search('palisade', top_k => 20) order by 1)",),
        [document_id(1), document_id(3), document_id(6)],
    ),
    "search_mode(text,text,uuid[])": ("rag_app", ("select rag.search_mode('test-model', null, null)",), "hybrid"),
    "share_project(text,bigint,boolean)": (
        "rag_app",
        ("select rag.share_project('alpha', 2, true)", "select count(*) from rag.my_members()"),
        3,
    ),
    "unshare_project(text,bigint)": (
        "rag_app",
        ("select rag.share_project('alpha', 2, true)", "select rag.unshare_project('alpha', 2)"),
        True,
    ),
    "add_signing_key()": (
        "rag_operator",
        ("select rag.add_signing_key()", "select count(*) from rag.list_signing_keys()"),
        2,
    ),
    "count_traces(text,bigint,text,text,text)": (
        "rag_operator",
        ("select jsonb_object_agg(table_name, rows_left) from rag.count_traces('t1')",),
        {
            "rag_access_classes": 10,
            "rag_analysts": 1,
            "rag_assertions": 3,
            "rag_calibrations": 1,
            "rag_chunks": 10,
            "rag_claims": 1,
            "rag_conversation_messages": 8,
            "rag_conversation_summaries": 8,
            "rag_documents": 10,
            "rag_feedback": 2,
            "rag_jobs": 1,
            "rag_limits": 1,
            "rag_prompts": 1,
            "rag_tags": 2,
            "rag_project_members": 2,
            "rag_query_log_chunks": 3,
            "rag_query_logs": 6,
            "rag_rate_buckets": 1,
            "rag_retractions": 3,
            "rag_service_keys": 1,
            "rag_synchronisations": 10,
            "rag_tombstones": 10,
            "rag_usage": 1,
        },
    ),
    "embeds_with(text,text)": (
        "rag_operator",
        (
            "select array[rag.embeds_with('t1', 'test-model'), rag.embeds_with('t1', 'another'),"
            " rag.embeds_with('t3', 'test-model')]",
        ),
        [True, False, None],
    ),
    "count_expired(text,interval)": ("rag_operator", ("select rag.count_expired('questions', '0 days')",), 8),
    "expire_batch(text,interval,integer)": ("rag_operator", ("select rag.expire_batch('questions', '0 days', 5)",), 5),
    "expire_logs(interval,text)": ("rag_operator", ("select rag.expire_logs('0 days')",), 8 + 4),
    "explain_access(uuid,text,bigint,text,text[])": (
        "rag_operator",
        (
            f"select array(select distinct visible from rag.explain_access('{document_id(3)}', 't1', 1)) ||"
            f" array(select distinct visible from rag.explain_access('{document_id(5)}', 't1', 1))",
        ),
        [True, False],
    ),
    "forget(text,bigint,text,text,text)": (
        "rag_operator",
        ("select jsonb_object_agg(table_name, rows_removed) from rag.forget('t1', 1)",),
        {
            "rag_access_classes": 4,
            "rag_assertions": 1,
            "rag_chunks": 4,
            "rag_conversation_messages": 4,
            "rag_conversation_summaries": 4,
            "rag_documents": 4,
            "rag_feedback": 1,
            "rag_jobs": 1,
            "rag_claims": 1,
            "rag_tags": 0,
            "rag_project_members": 2,
            "rag_query_log_chunks": 1,
            "rag_query_logs": 2,
            "rag_retractions": 1,
            "rag_synchronisations": 4,
            "rag_tombstones": 4,
        },
    ),
    "charge_quota(bigint,bigint)": (
        "rag_app",
        (
            "select count(*) from rag.charge_quota(1, 7)",
            "select array[quota_limit, used] from rag.charge_quota(1000, 0)",
        ),
        [1000, 11],
    ),
    "my_limits()": ("rag_app", ("select array[documents, documents_used] from rag.my_limits()",), [1000, 10]),
    "take_token(text)": (
        "rag_app",
        ("select array[granted, per_minute = 1000000] from rag.take_token('query')",),
        [True, True],
    ),
    "recount_usage(text)": ("rag_operator", ("select documents from rag.recount_usage('t1')",), 10),
    "usage_drift()": ("rag_operator", ("select count(*) from rag.usage_drift()",), 0),
    "proof_holds(text,text)": ("rag_app", ("select rag.proof_holds('service_keys', '{proof}')",), True),
    "cancel_my_job(uuid)": (
        "rag_app",
        (f"select array[rag.cancel_my_job('{JOB}'), rag.cancel_my_job('{OTHER_JOB}')]",),
        [True, False],
    ),
    "claim_source(bigint,text,text,uuid,interval)": (
        "rag_app",
        (
            f"select rag.claim_source(3, 'text', 'x', '{JOB}', '1 min')",
            f"select rag.claim_source(3, 'text', 'x', '{OTHER_JOB}', '1 min') is null",
        ),
        True,
    ),
    "enqueue_job(text,text,text,text,jsonb,text,integer,bytea,bytea)": (
        "rag_app",
        (
            "select array[rag.enqueue_job('ingest', null, 'text', 'x', '{}', 'y', 1, null, null) is null,"
            " rag.enqueue_job('ingest', null, 'text', 'x', '{}', 'y', 2, null, null) is null]",
        ),
        [True, False],
    ),
    "holds_job(uuid,uuid)": ("rag_app", (f"select rag.holds_job('{JOB}', {TAKEN})",), True),
    "my_waiting_job(text,text)": (
        "rag_app",
        ("select array[rag.my_waiting_job('ingest', 'a lock'), rag.my_waiting_job('sync', 'a lock')]",),
        [job_id("t1"), None],
    ),
    "my_job(uuid)": (
        "rag_app",
        (f"select array(select id from rag.my_job('{JOB}')) || array(select id from rag.my_job('{OTHER_JOB}'))",),
        [job_id("t1")],
    ),
    "my_request(bytea,interval)": (
        "rag_app",
        (f"select array(select id from rag.my_request('{KEY}', '1 day'))",),
        [job_id("t1")],
    ),
    "record_request(text,text,text,jsonb,bytea,bytea)": (
        "rag_app",
        (
            "select rag.record_request('ingest', 'text', 'x', '{}', sha256('b'), sha256('c'))",
            "select array(select queued from rag.my_request(sha256('b'), '1 day'))",
        ),
        [False],
    ),
    "renew_claim(bytea,uuid,interval)": (
        "rag_app",
        (f"select rag.renew_claim(sha256('a source'), '{JOB}', '1 min')",),
        "",
    ),
    "release_claim(bytea,uuid)": ("rag_app", (f"select rag.release_claim(sha256('a source'), '{JOB}')",), ""),
    "settle_job(uuid,uuid,jsonb)": ("rag_app", (f"select rag.settle_job('{JOB}', {TAKEN}, '{{}}')",), True),
    "return_job(uuid,uuid,text,text,interval,boolean,text)": (
        "rag_app",
        (f"select rag.return_job('{JOB}', {TAKEN}, 'a reason', 'a text', null, true, '{{jobs_proof}}')",),
        True,
    ),
    "take_job(uuid,bigint,text)": (
        "rag_app",
        (f"select array(select body from rag.take_job('{JOB}', {QUEUED['t1']}, '{{jobs_proof}}'))",),
        ["palisade record waiting"],
    ),
    "push_job(text,uuid,text,text,integer)": (
        "rag_app",
        (f"select turn from rag.push_job('t1', '{JOB}', 'ingest', null, null)",),
        1,
    ),
    "drop_queued(bigint[])": ("rag_app", (f"select rag.drop_queued('{{{QUEUED['t1']}}}')",), ""),
    "queue_depth(interval,text)": (
        "rag_app",
        ("select processing from rag.queue_depth('30 s', '{jobs_proof}')",),
        2,
    ),
    "recover_jobs(interval,integer)": ("rag_operator", ("select recovered from rag.recover_jobs('6 s', 5)",), 2),
    "expire_jobs(interval,interval)": ("rag_operator", ("select rag.expire_jobs('1 day', '7 days')",), 0),
    "list_jobs(text,text,integer)": (
        "rag_operator",
        ("select array(select tenant_id from rag.list_jobs(null, 'pending', 9) order by 1)",),
        ["t1", "t2"],
    ),
    "cancel_jobs(uuid[])": ("rag_operator", (f"select rag.cancel_jobs('{{{JOB},{OTHER_JOB}}}')",), 2),
    "resubmit_jobs(uuid[])": ("rag_operator", (f"select rag.resubmit_jobs('{{{JOB}}}')",), 0),
    "list_signing_keys()": ("rag_operator", ("select array(select key_id from rag.list_signing_keys())",), ["test"]),
    "retire_signing_key(text)": ("rag_operator", ("select rag.retire_signing_key('test')",), True),
    "active_model()": ("rag_app", ("select rag.active_model() is null",), True),
    "check_model(text)": ("rag_app", ("select rag.check_model('test-model') is null",), True),
    # As the owner, whose functions these are; see `hijacking`, which lets everybody call them.
    "chunks_to_fill(text,bigint,integer)": (
        "rag_operator",
        (TWO_MODELS, "select array(select access_id from rag.chunks_to_fill('t1', 9, 3))"),
        [9, 10, 11],
    ),
    "count_fill()": ("rag_operator", (TWO_MODELS, "select chunks from rag.count_fill()"), 13),
    "fill_vectors(text,text[],bigint[],uuid[],text[])": (
        "rag_operator",
        (
            TWO_MODELS,
            "select rag.fill_vectors('coming', array_agg(tenant_id), array_agg(access_id), array_agg(chunk_id),"
            " array_agg((array_fill(1::real, array[512])::rag.halfvec)::pg_catalog.text))"
            " from rag.chunks_to_fill('t1', 9, 3)",
        ),
        3,
    ),
    "lacks_vectors()": ("rag_operator", (TWO_MODELS, "select rag.lacks_vectors()"), True),
    "large_classes()": (
        "rag_operator",
        ("select array(select access_id from rag.large_classes())",),
        [],
    ),
    "list_models()": (
        "rag_operator",
        (TWO_MODELS, "select array(select model_id from rag.list_models())"),
        ["test-model", "coming"],
    ),
    "compare_models(halfvec,halfvec,integer)": (
        "rag_app",
        (
            "select array[active_found, second_found, shared] from rag.compare_models("
            "array_fill(1::real, array[512])::rag.halfvec, array_fill(1::real, array[512])::rag.halfvec, 3)",
        ),
        [0, 0, 0],
    ),
    "pause_writes(integer)": ("rag_operator", (TWO_MODELS, "select rag.pause_writes(60)::pg_catalog.text"), ""),
    "set_models(text,text,boolean)": (
        "rag_operator",
        (TWO_MODELS, "select array(select place from rag.list_models())"),
        ["active", "second"],
    ),
}

# What an attacker puts before ours and Postgres' own, in a schema that their search path has first. The operators
# find everything equal and overlapping, the functions name another principal.
HIJACK = (
    *(
        f"create function mine.always({kind}, {kind}) returns boolean language sql as $$ select true $$;"
        f"create operator mine.= (leftarg = {kind}, rightarg = {kind}, function = mine.always);"
        f"create operator mine.&& (leftarg = {kind}, rightarg = {kind}, function = mine.always)"
        for kind in ("bigint", "text", "text[]", "bigint[]", "uuid", "bytea", "name")
    ),
    "create function mine.never(timestamptz, timestamptz) returns boolean language sql as $$ select false $$",
    "create operator mine.> (leftarg = timestamptz, rightarg = timestamptz, function = mine.never)",
    "create operator mine.< (leftarg = timestamptz, rightarg = timestamptz, function = mine.never)",
    """
    create function mine.my_principal(out tenant_id text, out user_id bigint, out project_id text, out tags text[],
        out projects text[], out user_scope text)
    returns setof record language sql
    as $$ select 't1', 2::bigint, '*', '{public,hr}'::text[], null::text[], null::text $$
    """,
    "create function mine.my_tenant_id() returns text language sql as $$ select 't2' $$",
    "create function mine.my_user_id() returns bigint language sql as $$ select 2::bigint $$",
    "create function mine.my_tags() returns text[] language sql as $$ select '{hr,legal}'::text[] $$",
    "create function mine.i_am_analyst() returns boolean language sql as $$ select true $$",
    "create function mine.my_access_ids() returns bigint[] language sql as $$ select '{1,2,3,4,5}'::bigint[] $$",
    "create function mine.my_writable_access_ids() returns bigint[] language sql as $$ select '{5}'::bigint[] $$",
    "create function mine.narrowed_access_ids(text) returns bigint[] language sql as $$ select '{5}'::bigint[] $$",
    "create function mine.signature_holds(text[], text) returns boolean language sql as $$ select true $$",
    "create function mine.tenant_lock(text) returns bigint language sql as $$ select 1 / 0 $$",
    "create function mine.source_digest(text, text) returns bytea language sql as $$ select ''::bytea $$",
    "create function mine.erasure_digest(text, text, text[]) returns bytea language sql as $$ select ''::bytea $$",
    "create function mine.erasure_kind(text, bigint, text, text, text) returns text language sql as $$ select '' $$",
    "create function mine.text_search_config(text) returns regconfig language sql as $$ select 'simple'::regconfig $$",
    "create function mine.now() returns timestamptz language sql as $$ select 'epoch'::timestamptz $$",
    "create function mine.sha256(bytea) returns bytea language sql as $$ select ''::bytea $$",
    "create function mine.current_setting(text, boolean) returns text language sql as $$ select '9' $$",
    "create domain pg_temp.tsquery as pg_catalog.tsquery check (false)",
    "create domain pg_temp.bigint as pg_catalog.int8 check (false)",
    "create domain pg_temp.int8 as pg_catalog.int8 check (false)",
    "create domain pg_temp.text as pg_catalog.text check (false)",
    "create domain mine.text as pg_catalog.text check (false)",
)


@contextmanager
def hijacking(superuser: psycopg.Connection, role: str) -> Iterator[psycopg.Connection]:
    """A login with objects of its own that shadow ours and Postgres', first in its search path; undone at the end.

    It has more rights here than in truth, where it can create nothing and call only some.
    """
    with superuser.transaction(force_rollback=True):
        if role == "mallory":
            superuser.execute("create role mallory login in role rag_analyst")
            superuser.execute("insert into rag.rag_analysts (tenant_id, role_name) values ('t1', 'mallory')")
        superuser.execute("create schema mine")
        for statement in HIJACK:
            superuser.execute(statement)
        for table in protected_tables(superuser):
            superuser.execute(f"create temporary table {table} (like rag.{table} including defaults)")
            superuser.execute(f"create table mine.{table} (like rag.{table} including defaults)")
        for schema in ("pg_temp", "mine"):
            superuser.execute(
                f"insert into {schema}.rag_access_classes (tenant_id, access_id, scope, tags, tags_digest)"
                " select 't1', number, 'public', '{public}', '' from generate_series(1, 13) as number;"
                f"insert into {schema}.rag_project_members values ('t1', 2, 'alpha', 1, true);"
                f"insert into {schema}.rag_analysts (tenant_id, role_name) values ('t2', 'mallory'), ('t2', 'rag_app');"
                f"insert into {schema}.rag_signing_keys values ('mine', '', '');"
            )
        superuser.execute(f"grant all on schema mine, rag to {role}; grant all on all tables in schema mine to {role}")
        superuser.execute(f"grant execute on all functions in schema rag to {role}")
        for table in protected_tables(superuser):
            superuser.execute(f"grant all on pg_temp.{table} to {role}")
        superuser.execute(f"set local session authorization {role}")
        superuser.execute("set local search_path = mine, pg_temp, rag, pg_catalog")
        if role == "rag_app":
            named = ("t1", 1, "alpha", ["public"], signature("rag_app", "t1", "1", "alpha", ["public"]))
            superuser.execute("select rag.begin_as(%s, %s, %s, %s, %s)", named)
        yield superuser


def answer(connection: psycopg.Connection, statements: tuple[str, ...]) -> object:
    for statement in statements:
        found = connection.execute(
            statement.replace("{proof}", proof("rag_app")).replace(
                "{jobs_proof}", SIGNER.prove(role="rag_app", purpose="jobs")
            )
        ).fetchone()
    assert found is not None
    return found[0]


def test_every_definer_function_has_a_hijack_test() -> None:
    assert sorted(CALLS) == sorted(ALL_DEFINERS)


@pytest.mark.parametrize("function", ALL_DEFINERS, ids=lambda function: function.partition("(")[0])
def test_objects_of_the_caller_change_nothing(superuser: psycopg.Connection, function: str) -> None:
    role, statements, expected = CALLS[function]
    with hijacking(superuser, role) as hijacker:
        shadowed = "select 'rag_documents'::regclass::oid = 'mine.rag_documents'::regclass::oid"
        assert hijacker.execute(shadowed).fetchone() == (True,)
        assert answer(hijacker, statements) == expected


@pytest.mark.parametrize("function", ["my_documents()", "my_classes()", "forget(text,bigint,text,text,text)"])
def test_a_function_without_its_search_path_would_have_been_noticed(
    superuser: psycopg.Connection, function: str
) -> None:
    role, statements, expected = CALLS[function]
    with superuser.transaction(force_rollback=True):
        superuser.execute(f"alter function rag.{function} reset search_path")
        try:
            with hijacking(superuser, role) as hijacker:
                found = answer(hijacker, statements)
        except psycopg.Error:
            found = "an error"
    assert found != expected


def test_objects_of_the_caller_do_not_open_a_table_or_a_view(superuser: psycopg.Connection) -> None:
    with hijacking(superuser, "rag_app") as hijacker:
        for table in ("rag_documents", "rag_chunks"):
            found = hijacker.execute(f"select array(select access_id from rag.{table} order by 1)").fetchone()
            assert found == ([1, 3, 6],)
        for view in ("v_documents", "v_chunks", "v_stale_documents", "v_source_usage"):
            found = hijacker.execute(f"select array(select document_id from rag.{view} order by 1)").fetchone()
            assert found == ([document_id(1), document_id(3), document_id(6)],)


# --- relations ------------------------------------------------------------------------------------


def test_every_view_runs_as_its_reader_and_is_a_barrier(superuser: psycopg.Connection) -> None:
    assert relations(superuser, "relation.relkind = 'v'") == sorted(VIEWS)
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
    """But for those that Postgres itself makes for foreign keys and views, and for the queue's own."""
    assert (
        column(
            superuser,
            """
        select tgname from pg_trigger
        join pg_class on pg_class.oid = tgrelid
        where not tgisinternal and relnamespace <> 'jobs'::regnamespace
        """,
        )
        == []
    )
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
            and relation.relname like 'rag\\_%%'
            and relation.relname <> all(%s)
            and not exists (
                select 1 from pg_attribute as attribute
                where attribute.attrelid = relation.oid
                    and attribute.attname = 'tenant_id'
                    and attribute.attnotnull
                    and attribute.attnum = any(keys.numbers)
            )
        """,
        (list(WITHOUT_TENANT),),
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
    assert len(found) == 11
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
    assert tenants == [table for table in protected_tables(superuser) if table not in WITHOUT_TENANT]


def test_what_an_exact_scan_reads_is_stored_in_the_row(superuser: psycopg.Connection) -> None:
    found = superuser.execute(
        "select attname, attstorage from pg_attribute"
        " where attrelid = 'rag.rag_chunks'::regclass and attname in ('embedding', 'second_embedding', 'tsv')"
        " order by attname"
    ).fetchall()
    assert found == [("embedding", "p"), ("second_embedding", "p"), ("tsv", "m")]


# Random numbers, times, sizes, and words of the product's own.
HARMLESS = {
    *("access_id", "id", "document_id", "query_id", "key_id", "subject_digest"),
    *("created_at", "updated_at", "content_updated_at", "source_updated_at", "expires_at", "revoked_at", "erased_at"),
    *("chunk_index", "token_count", "start_offset", "end_offset", "page_number", "lexeme_count", "rank", "generation"),
    *("query_length", "result_count", "citation_count", "context_tokens", "confidence", "rows_removed"),
    *("retrieval_ms", "generation_ms", "latency_ms", "score", "cosine"),
    *("scope", "mode", "action", "actions", "scopes", "kind", "user_scope", "act_as", "may_write", "verified", "cited"),
    *("language", "source_type", "embedding_model", "second_embedding_model", "model_used"),
    *("place", "is_former", "writes_paused_until", "changed_at"),
    *("ready", "chunks", "lexemes", "measured_at", "vector_bytes_per_chunk", "words_bytes_per_chunk"),
    *("fusion", "vector_share", "min_similarity", "questions", "ndcg_before", "ndcg_after", "calibrated_at"),
    *("user_id", "owner_user_id", "member_user_id"),
    *("status", "attempts", "losses", "queue_id", "turn", "claim", "token", "started_at", "due_at", "finished_at"),
    *("rating", "clicked", "replaces", "route_fallback", "retracted", "removed_id", "sources", "documents"),
    *("files", "written", "removed", "unchanged", "failed", "finished_at", "succeeded_at"),
}


def test_statistics_are_kept_of_harmless_columns_alone(superuser: psycopg.Connection) -> None:
    """The most common values of a column would tell of tenants, titles and words to whoever may EXPLAIN."""
    superuser.execute(f"analyze {', '.join(protected_tables(superuser))}")
    kept = set(column(superuser, "select attname from pg_stats where schemaname = 'rag' and tablename like 'rag\\_%'"))
    assert kept
    assert kept - HARMLESS == set()
    assert column(superuser, "select count(*) from pg_stats_ext where schemaname = 'rag'") == [0]


def test_nobody_reads_a_statistic(superuser: psycopg.Connection, app: psycopg.Connection) -> None:
    """Of tables under row security Postgres shows none, whatever is granted."""
    superuser.execute(f"analyze {', '.join(protected_tables(superuser))}")
    statement = "select count(*) from pg_stats where schemaname = 'rag' and tablename like 'rag\\_%'"
    assert column(superuser, statement) > [0]
    with speaking(app, REACHES["user 1, all projects"].principal):
        assert column(app, statement) == [0]
    for role in ROLES:
        with superuser.transaction(force_rollback=True):
            superuser.execute(f"set local role {role}")
            assert column(superuser, statement) == [0]
