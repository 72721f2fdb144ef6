"""Mutants of what keeps tenants, users and projects apart: one mistake each, and the test that must notice it.

Texts are compared without regard to white space. A mutant that opens nothing by itself, because something else
still closes the door, is here as well: each of the two has to be watched over.
"""

from __future__ import annotations

from dataclasses import dataclass

BOOTSTRAP = "sql/bootstrap.sql"
TABLES = "sql/schema/10_tables.sql"
IDENTITY = "sql/schema/20_identity.sql"
POLICIES = "sql/schema/30_policies.sql"
READING = "sql/schema/35_reading.sql"
JOBS = "sql/schema/36_jobs.sql"
CONVERSATIONS = "sql/schema/37_conversations.sql"
SEARCH = "sql/schema/40_search.sql"
MAINTAINING = "sql/schema/42_maintaining.sql"
OPERATING = "sql/schema/45_operating.sql"
LIMITS = "sql/schema/46_limits.sql"
MODELS = "sql/schema/47_models.sql"
VIEWS = "sql/schema/50_views.sql"
GRANTS = "sql/schema/60_grants.sql"

CATALOG = "sql/test_catalog.py"
WHO = "sql/test_identity.py"
WHAT = "sql/test_policies.py"
HELD = "sql/test_limits.py"
FORGED = "barrier/test_forgery.py"
NEIGHBOURS = "barrier/test_foreign_neighbours.py"
CHANGE = "rag/test_models.py"
HOOK = "api/test_webhook.py"
JOBS_OF_OTHERS = "barrier/test_jobs_barrier.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands in `file` exactly `times`; `killed_by` is a test below tests/, with or without parameters."""

    name: str
    file: str
    old: str
    new: str
    killed_by: str
    times: int = 1


MUTANTS = (
    # --- who is asking -------------------------------------------------------------------------------
    Mutant(
        "an immutable identity",
        IDENTITY,
        "create function my_access_ids() returns bigint[] language plpgsql stable",
        "create function my_access_ids() returns bigint[] language plpgsql immutable",
        "sql/test_search.py::test_no_plan_remembers_a_principal",
    ),
    Mutant(
        "an immutable tenant",
        IDENTITY,
        "create function my_tenant_id() returns text language plpgsql stable",
        "create function my_tenant_id() returns text language plpgsql immutable",
        f"{CATALOG}::test_functions_that_read_the_principal_are_never_immutable",
    ),
    Mutant(
        "no signature needed",
        IDENTITY,
        "if signature_holds(",
        "if true or signature_holds(",
        f"{FORGED}::test_no_forgery_gets_or_changes_a_row",
    ),
    Mutant(
        "any code for a known key",
        IDENTITY,
        "return coalesce(code = piece[3], false);",
        "return coalesce(code <> '', false);",
        f"{WHO}::test_a_signature_is_for_exactly_its_values",
    ),
    Mutant(
        "a signature for any login",
        IDENTITY,
        "if signature_holds(",
        """
        if signature_holds(
            array['rag_app', tenant, users, project] || tags, current_setting('app.signature', true)
        ) or signature_holds(
        """,
        f"{WHO}::test_a_signature_is_for_one_login",
    ),
    Mutant(
        "a signature for ever",
        IDENTITY,
        "not between 0 and 43200 then",
        "not between -1000000000 and 43200 then",
        f"{WHO}::test_a_signature_ends_at_its_second_and_is_for_half_a_day_at_most",
    ),
    Mutant(
        "a signature from the far future",
        IDENTITY,
        "not between 0 and 43200 then",
        "< 0 then",
        f"{WHO}::test_a_signature_ends_at_its_second_and_is_for_half_a_day_at_most",
    ),
    Mutant(
        "only the first tag is signed",
        IDENTITY,
        "array_to_json(parts[1:4] || piece[2] || parts[5:])::text",
        "array_to_json(parts[1:4] || piece[2] || parts[5:5])::text",
        f"{FORGED}::test_no_forgery_gets_or_changes_a_row",
    ),
    Mutant(
        "the role counts and not the login",
        IDENTITY,
        "if session_user in ('rag_app', 'rag_publisher', 'rag_worker') then",
        "if current_user in ('rag_search') then",
        f"{FORGED}::test_no_variable_has_an_effect_on_operators_migrators_and_analysts",
    ),
    Mutant(
        "a user number that is read leniently",
        IDENTITY,
        "and users ~ '^(0|[1-9][0-9]{0,17})$'",
        r"and users ~ '^\s*[0-9]{1,18}\s*$'",
        f"{WHO}::test_a_malformed_variable_is_nobody_though_the_service_signed_it",
    ),
    Mutant(
        "a list of tags that need not end",
        IDENTITY,
        r"[ \t\n\r]*\][ \t\n\r]*$'",
        "'",
        f"{WHO}::test_a_malformed_variable_is_nobody_though_the_service_signed_it",
    ),
    Mutant(
        "an analyst of two tenants sees both",
        IDENTITY,
        "where analyst.role_name = session_user) = 1 then",
        "where analyst.role_name = session_user) >= 1 then",
        "barrier/test_analysts.py::test_a_login_in_two_tenants_sees_nothing",
    ),
    Mutant(
        "begin_as() changes the principal",
        IDENTITY,
        "if array_remove(present, null) <> '{}' and present",
        "if false and present",
        f"{WHO}::test_a_second_principal_is_refused_and_the_first_one_stays",
    ),
    Mutant(
        "begin_as() takes a principal without tenant",
        IDENTITY,
        "if coalesce(begin_as.tenant_id, '') = '' then",
        "if begin_as.tenant_id is null then",
        f"{WHO}::test_begin_as_refuses_a_principal_without_tenant",
    ),
    Mutant(
        "begin_as() does not say that a signature is worthless",
        IDENTITY,
        "if not exists (select from my_principal()) then",
        "if false then",
        f"{WHO}::test_begin_as_says_that_a_signature_does_not_hold",
    ),
    Mutant(
        "an identity that outlives its transaction",
        IDENTITY,
        "execute format('set local app.",
        "execute format('set app.",
        f"{WHO}::test_nothing_is_left_after_commit",
        times=5,
    ),
    Mutant(
        "service keys without a proof",
        IDENTITY,
        "if not signature_holds(array[cast(session_user as text), 'service_keys'], load_service_keys.proof) then",
        "if load_service_keys.proof is null then",
        f"{FORGED}::test_service_keys_are_given_for_a_proof_alone",
    ),
    Mutant(
        "service keys that have been revoked",
        IDENTITY,
        "where key.revoked_at is null and key.expires_at > now()",
        "where key.expires_at > now()",
        "api/test_keys.py::test_ended_keys_are_not_even_loaded",
    ),
    # --- which classes are theirs ----------------------------------------------------------------------
    Mutant(
        "public in all tenants",
        IDENTITY,
        "where class.tenant_id = me.tenant_id and class.scope = 'public'",
        "where class.scope = 'public'",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "tags contained instead of overlapping",
        IDENTITY,
        "and class.scope = 'public' and class.tags && me.tags",
        "and class.scope = 'public' and class.tags <@ me.tags",
        "barrier/test_oracle.py::test_random_sessions_read_what_the_model_says",
    ),
    Mutant(
        "tags of users' own documents not compared",
        IDENTITY,
        "and class.scope = 'user' and class.user_id = me.user_id and class.tags && me.tags",
        "and class.scope = 'user' and class.user_id = me.user_id",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "the owner of a document not compared",
        IDENTITY,
        "and class.scope = 'user' and class.user_id = me.user_id",
        "and class.scope = 'user'",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "the owner of a project not compared",
        IDENTITY,
        "and class.scope = 'project' and class.user_id = me.user_id and (me.project_id = '*'",
        "and class.scope = 'project' and (me.project_id = '*'",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "the name of a project not compared",
        IDENTITY,
        "and (me.project_id = '*' or class.project_id = me.project_id)",
        "and me.project_id is not null",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "a project shared with one is shared with all",
        IDENTITY,
        "and membership.member_user_id = me.user_id and (me.project_id = '*'",
        "and (me.project_id = '*'",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "the name of a shared project not compared",
        IDENTITY,
        "and (me.project_id = '*' or membership.project_id = me.project_id)",
        "",
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "a project is shared in all tenants",
        IDENTITY,
        """
        on class.tenant_id = membership.tenant_id
            and class.scope = 'project'
            and class.user_id = membership.owner_user_id
            and class.project_id = membership.project_id
        where membership.tenant_id = me.tenant_id
            and
        """,
        """
        on class.tenant_id = me.tenant_id
            and class.scope = 'project'
            and class.user_id = membership.owner_user_id
            and class.project_id = membership.project_id
        where
        """,
        f"{WHO}::test_each_principal_reads_its_classes",
    ),
    Mutant(
        "an analyst reads users' own documents",
        IDENTITY,
        "when 'user' then me.user_scope = 'text'",
        "when 'user' then me.user_scope <> 'none'",
        "barrier/test_analysts.py::test_an_analyst_reads_these_documents_and_chunks",
    ),
    Mutant(
        "an analyst reads all projects",
        IDENTITY,
        "when 'project' then '*' = any(me.projects) or class.project_id = any(me.projects)",
        "when 'project' then true",
        "barrier/test_analysts.py::test_an_analyst_reads_these_documents_and_chunks",
    ),
    Mutant(
        "whoever reads a shared project writes it",
        IDENTITY,
        """
                        and membership.owner_user_id = class.user_id
                        and membership.project_id = class.project_id
                        and membership.may_write
        """,
        """
                        and membership.owner_user_id = class.user_id
                        and membership.project_id = class.project_id
        """,
        f"{WHO}::test_each_principal_writes_its_classes",
    ),
    Mutant(
        "whoever reads a shared project makes classes of it",
        IDENTITY,
        """
                    and membership.owner_user_id = access_class.user_id
                    and membership.project_id = access_class.project_id
                    and membership.may_write
        """,
        """
                    and membership.owner_user_id = access_class.user_id
                    and membership.project_id = access_class.project_id
        """,
        f"{WHO}::test_access_class_of_a_shared_project_needs_may_write",
    ),
    Mutant(
        "anybody publishes",
        IDENTITY,
        "when 'public' then session_user = 'rag_publisher' else",
        "when 'public' then true else",
        f"{WHO}::test_each_principal_writes_its_classes",
    ),
    Mutant(
        "anybody makes a public class",
        IDENTITY,
        "when 'public' then session_user = 'rag_publisher' when 'user'",
        "when 'public' then true when 'user'",
        f"{WHO}::test_access_class_refuses",
    ),
    Mutant(
        "a document with tags that its writer does not hold",
        IDENTITY,
        "if not sorted_tags && me.tags then",
        "if false then",
        f"{WHO}::test_access_class_refuses",
    ),
    Mutant(
        "a document of a project that is not named",
        IDENTITY,
        "(me.project_id = '*' or access_class.project_id = me.project_id) and (access_class.user_id",
        "(access_class.user_id",
        f"{WHO}::test_access_class_refuses",
    ),
    Mutant(
        "a document that lies about its tags",
        IDENTITY,
        "and class.project_id is not distinct from class_reads.project_id and class.tags = class_reads.tags",
        "and class.project_id is not distinct from class_reads.project_id",
        f"{WHAT}::test_a_document_cannot_claim_another_scope_owner_or_tags_than_its_class",
    ),
    Mutant(
        "all classes of a tenant are listed",
        IDENTITY,
        """
        where class.tenant_id = me.tenant_id
            -- Asked once who speaks, which costs more than all else here. As a sub-select, so that the plan is kept.
            and class.access_id = any((select classes_of(me))::bigint[]);
        """,
        "where class.tenant_id = me.tenant_id;",
        f"{WHO}::test_whoami_lists_the_classes_and_which_may_be_written",
    ),
    Mutant(
        "an analyst may write",
        IDENTITY,
        "(me.user_scope is null and case class.scope when 'public' then session_user = 'rag_publisher' else",
        "(case class.scope when 'public' then me.user_scope is not null or session_user = 'rag_publisher' else",
        "barrier/test_analysts.py::test_an_analyst_reads_these_documents_and_chunks",
    ),
    Mutant(
        "a scope that narrows nothing",
        IDENTITY,
        "when 'public' then class.scope = 'public'",
        "when 'public' then true",
        "sql/test_search.py::test_a_scope_narrows_what_is_visible",
    ),
    Mutant(
        "classes of the whole tenant are scored",
        IDENTITY,
        "return my_access_ids();",
        "return array(select access_id from rag_access_classes where tenant_id = my_tenant_id());",
        f"{NEIGHBOURS}::test_foreign_words_change_no_answer",
    ),
    Mutant(
        "a search path that is not pinned",
        IDENTITY,
        """
        create function my_access_ids() returns bigint[] language plpgsql stable security definer parallel safe
        set search_path = rag, pg_temp
        """,
        "create function my_access_ids() returns bigint[] language plpgsql stable security definer parallel safe",
        f"{CATALOG}::test_definer_functions_and_those_in_plpgsql_pin_their_search_path",
    ),
    Mutant(
        "temporary objects before ours",
        IDENTITY,
        """
        tenant_id text, access_id bigint, scope text, user_id bigint, project_id text, tags text[], may_write boolean
        ) language plpgsql stable security definer parallel safe set search_path = rag, pg_temp
        """,
        """
        tenant_id text, access_id bigint, scope text, user_id bigint, project_id text, tags text[], may_write boolean
        ) language plpgsql stable security definer parallel safe set search_path = pg_temp, rag
        """,
        f"{CATALOG}::test_objects_of_the_caller_change_nothing",
    ),
    # --- policies --------------------------------------------------------------------------------------
    Mutant(
        "row security that does not bind the owner",
        POLICIES,
        "execute format('alter table %I force row level security', table_name);",
        "",
        f"{CATALOG}::test_row_security_is_enabled_and_forced_on_every_table",
    ),
    Mutant(
        "a second permissive policy",
        POLICIES,
        "-- Documents.",
        "create policy extra on rag_documents for select to rag_app, rag_publisher using (true);",
        f"{WHAT}::test_the_service_gets_the_principals_classes",
    ),
    Mutant(
        "belts that widen",
        POLICIES,
        "'create policy %I on %I as restrictive for %s to %s %s %s'",
        "'create policy %I on %I as permissive for %s to %s %s %s'",
        f"{WHAT}::test_the_service_gets_the_principals_classes",
    ),
    Mutant(
        "no belt on the service's documents",
        POLICIES,
        "('rag_documents', 'rag_app, rag_publisher, rag_worker', array['select', 'insert', 'update', 'delete']),",
        "",
        f"{WHAT}::test_no_further_policy_of_the_service_opens_another_tenant",
    ),
    Mutant(
        "no belt on what is read for the principal",
        POLICIES,
        "('rag_chunks', 'rag_principal', array['select']),",
        "",
        f"{WHAT}::test_no_further_policy_of_rag_principal_opens_another_tenant",
    ),
    Mutant(
        "no belt on what is written down",
        POLICIES,
        "('rag_assertions', 'rag_app, rag_publisher', array['insert'])",
        "('rag_assertions', 'rag_app', array['insert'])",
        f"{WHAT}::test_no_further_policy_of_the_service_writes_down_for_another_tenant",
    ),
    Mutant(
        "foreign rows compared with the question",
        POLICIES,
        "same_tenant || ' and tenant_id = any(array[(select my_tenant_id())])'",
        "same_tenant",
        f"{WHAT}::test_a_plan_never_compares_rows_of_another_tenant_with_the_question",
    ),
    Mutant(
        "all chunks may be read",
        POLICIES,
        """
        create policy read_chunks on rag_chunks for select to rag_app, rag_publisher, rag_worker, rag_principal
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        """
        create policy read_chunks on rag_chunks for select to rag_app, rag_publisher, rag_worker, rag_principal
        using (true);
        """,
        f"{WHAT}::test_the_service_gets_the_principals_classes",
    ),
    Mutant(
        "chunks may be added anywhere",
        POLICIES,
        """
        create policy add_chunks on rag_chunks for insert to rag_app, rag_publisher, rag_worker
        with check (access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        """
        create policy add_chunks on rag_chunks for insert to rag_app, rag_publisher, rag_worker
        with check (true);
        """,
        f"{WHAT}::test_insert_reaches_the_writable_classes",
    ),
    Mutant(
        "whoever reads a document changes it",
        POLICIES,
        """
        create policy change_documents on rag_documents for update to rag_app, rag_publisher, rag_worker
        using (access_id = any((select my_writable_access_ids())::bigint[]))
        with check (access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        """
        create policy change_documents on rag_documents for update to rag_app, rag_publisher, rag_worker
        using (access_id = any((select my_access_ids())::bigint[]))
        with check (access_id = any((select my_access_ids())::bigint[]));
        """,
        f"{WHAT}::test_update_reaches_the_writable_classes",
    ),
    Mutant(
        "whoever reads a document removes it",
        POLICIES,
        """
        create policy remove_documents on rag_documents for delete to rag_app, rag_publisher, rag_worker
        using (access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        """
        create policy remove_documents on rag_documents for delete to rag_app, rag_publisher, rag_worker
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        f"{WHAT}::test_delete_reaches_the_writable_classes",
    ),
    Mutant(
        "deleted sources of everybody",
        POLICIES,
        """
        create policy read_tombstones on rag_tombstones for select to rag_principal
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        "create policy read_tombstones on rag_tombstones for select to rag_principal using (true);",
        f"{WHAT}::test_rag_principal_reads_for_the_principal_alone",
    ),
    Mutant(
        "projects that others share",
        POLICIES,
        "for insert to rag_principal with check (owner_user_id = (select my_user_id()));",
        "for insert to rag_principal with check (true);",
        f"{WHAT}::test_rag_principal_shares_the_principals_own_projects",
    ),
    Mutant(
        "questions of everybody in the tenant",
        POLICIES,
        """
        create policy read_logs on rag_query_logs for select to rag_principal
        using (user_id = (select my_user_id()) or (select i_am_analyst()));
        """,
        "create policy read_logs on rag_query_logs for select to rag_principal using (true);",
        f"{WHAT}::test_each_user_reads_their_own_questions",
    ),
    Mutant(
        "questions under another's name",
        POLICIES,
        """
        create policy add_logs on rag_query_logs for insert to rag_app, rag_publisher
        with check (user_id = coalesce((select my_user_id()), 0));
        """,
        "create policy add_logs on rag_query_logs for insert to rag_app, rag_publisher with check (true);",
        f"{WHAT}::test_each_user_logs_under_their_own_name",
    ),
    Mutant(
        "feedback of everybody in the tenant",
        POLICIES,
        """
        create policy read_feedback on rag_feedback for select to rag_principal
        using (user_id = (select my_user_id()) or (select i_am_analyst()));
        """,
        "create policy read_feedback on rag_feedback for select to rag_principal using (true);",
        f"{WHAT}::test_each_user_reads_and_changes_their_own_feedback",
    ),
    Mutant(
        "feedback in anybody's class",
        POLICIES,
        "and (access_id is null or access_id = any((select my_access_ids())::bigint[]))",
        "",
        f"{WHAT}::test_each_user_gives_feedback_under_their_own_name_and_in_their_own_classes",
    ),
    Mutant(
        "owners of tags that the asker does not hold",
        POLICIES,
        "using (name = any((select my_tags())::text[]));",
        "using (true);",
        f"{WHAT}::test_owners_are_named_to_those_who_hold_the_tag_in_its_tenant",
    ),
    Mutant(
        "owners of another tenant's tags",
        POLICIES,
        "('rag_tags', 'rag_principal', array['select']),",
        "",
        f"{CATALOG}::test_every_granted_command_has_a_policy",
    ),
    Mutant(
        "a migration whose tables are open until its end",
        POLICIES,
        "do $$ declare table_name text; begin foreach table_name in array array[ 'rag_access_classes',",
        """
        commit;
        begin;
        set local role rag_owner;
        set local search_path = rag, pg_temp;
        do $$ declare table_name text; begin foreach table_name in array array[ 'rag_access_classes',
        """,
        "barrier/test_migration_prober.py::test_nobody_sees_a_row_while_migrations_go_up_and_down",
    ),
    # --- tables ----------------------------------------------------------------------------------------
    Mutant(
        "a chunk of anybody's document",
        TABLES,
        """
        constraint rag_chunks_document foreign key (tenant_id, access_id, document_id)
            references rag_documents (tenant_id, access_id, id) on delete cascade,
        """,
        "",
        f"{WHAT}::test_a_chunk_cannot_be_attached_to_a_foreign_document",
    ),
    Mutant(
        "a key that tells whether a foreign row is there",
        TABLES,
        "constraint rag_chunks_place unique (tenant_id, access_id, document_id, chunk_index),",
        "constraint rag_chunks_place unique (tenant_id, document_id, chunk_index),",
        "barrier/test_unique_keys.py::test_a_chunk_of_a_foreign_document_is_refused_like_one_of_a_missing_document",
    ),
    # --- functions and views ---------------------------------------------------------------------------
    Mutant(
        "a reading function of the owner of all candidates",
        GRANTS,
        "('my_chunks()', people, 'rag_principal'),",
        "('my_chunks()', people, 'rag_search'),",
        f"{CATALOG}::test_each_definer_function_belongs_to_the_role_that_it_needs",
    ),
    Mutant(
        "titles of users' own documents listed",
        READING,
        "where me.user_scope = 'metadata';",
        ";",
        "barrier/test_analysts.py::test_an_analyst_reads_these_documents_and_chunks",
    ),
    Mutant(
        "hits on documents that are no longer the reader's",
        READING,
        """
        cross join rag_query_log_chunks as hit
        join rag_documents as document
            on document.tenant_id = hit.tenant_id
            and document.id = hit.document_id;
        """,
        "cross join rag_query_log_chunks as hit;",
        f"{WHAT}::test_hits_on_documents_that_one_may_no_longer_read_are_not_shown",
    ),
    Mutant(
        "feedback on documents that are no longer the reader's",
        READING,
        """
        where given.document_id is null
            or exists (
                select
                from rag_documents as document
                where document.tenant_id = given.tenant_id
                    and document.id = given.document_id
            );
        """,
        ";",
        f"{WHAT}::test_feedback_ends_where_reading_ends",
    ),
    Mutant(
        "feedback counted in classes of others",
        SEARCH,
        "and given.access_id = mine.access_id",
        "",
        f"{WHAT}::test_what_others_said_counts_in_the_classes_that_the_principal_reads",
    ),
    Mutant(
        "feedback on what a question did not return",
        READING,
        "and hit.document_id = give_feedback.document_id and hit.chunk_index = give_feedback.chunk_index",
        "",
        f"{WHAT}::test_feedback_is_for_ones_own_question_and_what_it_returned",
    ),
    Mutant(
        "an analyst reads what was asked",
        READING,
        "case when me.user_scope is null or me.user_scope = 'text' then log.query_text end",
        "log.query_text",
        "barrier/test_analysts.py::test_questions_are_shown_as_far_as_the_setting_goes",
    ),
    Mutant(
        "a deletion that is not counted",
        READING,
        "set generation = tombstone.generation + 1",
        "set generation = tombstone.generation",
        f"{WHAT}::test_a_tombstone_is_raised_and_never_removed",
    ),
    Mutant(
        "a cascade that ends after one step",
        READING,
        "where cascades and document.tenant_id = tenant",
        "where false and document.tenant_id = tenant",
        "rag/test_invalidate.py::test_what_is_derived_goes_too_however_far",
    ),
    Mutant(
        "a retraction of another owner's source",
        READING,
        "one.scope = look_at_source.scope and one.user_id is not distinct from look_at_source.user_id",
        "one.scope = look_at_source.scope",
        "rag/test_invalidate.py::test_what_is_closed_for_one_owner_is_open_for_another",
    ),
    Mutant(
        "a reinstatement in scopes that are not the caller's",
        READING,
        "where class.may_write and class.scope = any(reopen_sources.scopes)",
        "where class.may_write",
        "rag/test_invalidate.py::test_only_the_scopes_of_the_caller_are_reinstated",
    ),
    Mutant(
        "a retraction that counts for nobody",
        READING,
        "where stone.retracted and stone.source_digest in",
        "where false and stone.source_digest in",
        "rag/test_invalidate.py::test_an_invalidated_source_is_refused_until_it_is_reinstated",
    ),
    Mutant(
        "removal in scopes that are not the caller's",
        "sql/queries/retract_documents.sql",
        "document.may_write and document.scope = any(cast(%(scopes)s as text[])) as goes",
        "document.may_write as goes",
        "rag/test_invalidate.py::test_a_scope_narrows_what_goes",
    ),
    Mutant(
        "an invalidation that waits for nobody",
        "rag/invalidate.py",
        "await _lock(session, principal, place)",
        "",
        "rag/test_invalidate.py::test_an_invalidation_waits_for_whoever_is_writing_and_removes_it",
    ),
    Mutant(
        "an ingest that an invalidation does not wait for",
        READING,
        "pg_advisory_xact_lock_shared(hashtextextended(open_source.owner_name, 0)),",
        "hashtextextended(open_source.owner_name, 0),",
        "rag/test_invalidate.py::test_an_invalidation_waits_for_whoever_is_writing_and_removes_it",
    ),
    Mutant(
        "a source that is settled wherever its document is",
        JOBS,
        "all_rows = 1 and document_access_id = access_id and source_hash",
        "all_rows = 1 and source_hash",
        "rag/test_ingest.py::test_other_tags_move_the_document_and_leave_no_copy",
    ),
    Mutant(
        "copies that are settled",
        JOBS,
        "all_rows = 1 and document_access_id = access_id and source_hash",
        "document_access_id = access_id and source_hash",
        "rag/test_ingest.py::test_copies_under_tags_that_did_not_see_each_other_become_one",
    ),
    Mutant(
        "an invalidation that is over before an ingest looks again",
        "rag/store.py",
        "or present.retractions != self.retractions",
        "",
        "rag/test_invalidate.py::test_an_ingest_that_began_before_gives_up_although_it_was_reinstated",
    ),
    Mutant(
        "an invalidation that nobody can be asked about",
        POLICIES,
        """
        create policy add_retractions on rag_retractions for insert to rag_app, rag_publisher
        with check (user_id = coalesce((select my_user_id()), 0));
        """,
        """
        create policy add_retractions on rag_retractions for insert to rag_app, rag_publisher
        with check (true);
        """,
        f"{WHAT}::test_each_user_logs_under_their_own_name",
    ),
    Mutant(
        "an erasure that is not counted",
        READING,
        "select buried + count(*) into buried from",
        "select buried + 0 * count(*) into buried from",
        "rag/test_erase.py::test_what_is_erased_while_it_is_ingested_stays_away",
        times=2,
    ),
    Mutant(
        "scores of everybody's words",
        SEARCH,
        "where chunk.tenant_id = $1 and chunk.access_id = any($2) offset 0",
        "where chunk.tenant_id = $1 offset 0",
        "sql/test_search.py::test_words_of_other_principals_do_not_change_a_score",
    ),
    Mutant(
        "scores of somebody else's nominees",
        SEARCH,
        "where nominee.access_id = any($13)",
        "where nominee.access_id is not null",
        "sql/test_engine.py::test_a_nominee_of_somebody_else_has_no_score",
    ),
    Mutant(
        "models and languages of any class",
        SEARCH,
        "from unnest(narrowed_access_ids(class_contents.only_scope)) as class (access_id)",
        "from rag_access_classes as class",
        "sql/test_engine.py::test_languages_of_others_are_not_told",
    ),
    Mutant(
        "words of the whole tenant are counted",
        MAINTAINING,
        "and chunk.access_id = measure_class.access_id",
        "",
        f"{NEIGHBOURS}::test_foreign_words_change_no_answer",
        times=2,
    ),
    Mutant(
        "an erasure that leaves the classes",
        OPERATING,
        "where class.tenant_id = forget.tenant_id and class.access_id = any(class_ids);",
        "where class.tenant_id = forget.tenant_id and class.access_id = any(class_ids) and false;",
        "sql/test_operating.py::test_an_erasure_takes_these_rows_and_its_neighbours_lose_nothing",
    ),
    Mutant(
        "an erasure that waits for nobody",
        OPERATING,
        "perform pg_advisory_xact_lock(tenant_lock(forget.tenant_id));",
        "",
        "sql/test_operating.py::test_an_erasure_waits_for_who_is_writing_in_the_tenant",
    ),
    Mutant(
        "an explanation that is wrong about sharing",
        OPERATING,
        "and membership.member_user_id = explain_access.user_id",
        "",
        "sql/test_operating.py::test_an_explanation_agrees_with_what_the_principal_may_read",
    ),
    Mutant(
        "a view that runs as its owner",
        VIEWS,
        "create view v_chunks with (security_invoker = true, security_barrier = true)",
        "create view v_chunks with (security_barrier = true)",
        f"{CATALOG}::test_every_view_runs_as_its_reader_and_is_a_barrier",
    ),
    Mutant(
        "a view that is no barrier",
        VIEWS,
        "create view v_documents with (security_invoker = true, security_barrier = true)",
        "create view v_documents with (security_invoker = true)",
        f"{CATALOG}::test_every_view_runs_as_its_reader_and_is_a_barrier",
    ),
    # --- grants ----------------------------------------------------------------------------------------
    Mutant(
        "the service reads titles",
        GRANTS,
        "(tenant_id, access_id, id, body_bytes), insert, delete on rag_documents to rag_app, rag_publisher;",
        "(tenant_id, access_id, id, body_bytes, title), insert, delete on rag_documents to rag_app, rag_publisher;",
        f"{CATALOG}::test_exactly_these_privileges_are_granted_on_relations",
    ),
    Mutant(
        "a document may change its class",
        GRANTS,
        "grant update ( source_uri,",
        "grant update ( access_id, source_uri,",
        f"{WHAT}::test_nobody_may_update_what_decides_access",
        times=2,
    ),
    Mutant(
        "the service reads the signing keys",
        GRANTS,
        "grant select on rag_signing_keys to rag_search;",
        """
        grant select on rag_signing_keys to rag_search, rag_app;
        create policy extra on rag_signing_keys for select to rag_app using (true);
        """,
        f"{FORGED}::test_no_login_reads_or_adds_a_key_or_signs",
    ),
    Mutant(
        "operators' functions read texts",
        GRANTS,
        "source_type, source_id, body_bytes), delete on rag_documents to rag_steward;",
        "source_type, source_id, body_bytes, body), delete on rag_documents to rag_steward;",
        f"{CATALOG}::test_exactly_these_privileges_are_granted_on_relations",
    ),
    Mutant(
        "everybody executes everything",
        GRANTS,
        "array_to_string(allowed.callers, ', ')",
        "array_to_string(allowed.callers, ', ') || ', public'",
        f"{CATALOG}::test_no_function_of_ours_is_executable_by_everybody",
    ),
    Mutant(
        "the service erases",
        GRANTS,
        "('forget(text, bigint, text, text, text)', array['rag_operator'], 'rag_steward'),",
        "('forget(text, bigint, text, text, text)', array['rag_operator', 'rag_app'], 'rag_steward'),",
        "sql/test_operating.py::test_operating_is_for_operators",
    ),
    Mutant(
        "owners of functions go on creating",
        GRANTS,
        "revoke create on schema rag from rag_search, rag_principal, rag_steward, rag_embedder, rag_queue;",
        "",
        f"{CATALOG}::test_only_the_owner_creates_in_the_schema",
    ),
    # --- jobs ------------------------------------------------------------------------------------------
    Mutant(
        "jobs are everybody's in the tenant",
        POLICIES,
        "own constant text := 'user_id = coalesce((select my_user_id()), 0) and not (select i_am_analyst())';",
        "own constant text := 'not (select i_am_analyst())';",
        f"{JOBS_OF_OTHERS}::test_nobody_else_sees_or_changes_it",
    ),
    Mutant(
        "jobs without a user are the analysts'",
        POLICIES,
        "own constant text := 'user_id = coalesce((select my_user_id()), 0) and not (select i_am_analyst())';",
        "own constant text := 'user_id = coalesce((select my_user_id()), 0)';",
        f"{JOBS_OF_OTHERS}::test_what_an_analyst_may_not_own_a_principal_without_a_user_does",
    ),
    Mutant(
        "a worker is handed jobs for its password",
        JOBS,
        "if not proof_holds('jobs', take_job.proof) then",
        "if false then",
        f"{JOBS_OF_OTHERS}::test_the_password_of_the_worker_alone_is_handed_nothing",
    ),
    Mutant(
        "a worker is handed jobs that it was not given",
        JOBS,
        "and queued.id = job.queue_id and queued.status = 'doing'",
        "and queued.id = job.queue_id",
        f"{JOBS_OF_OTHERS}::test_a_worker_is_handed_the_job_that_it_was_given_and_no_other",
    ),
    Mutant(
        "a job is settled by whoever had it before",
        JOBS,
        "and job.claim = settle_job.claim and job.status = 'processing'",
        "and job.status = 'processing'",
        f"{JOBS_OF_OTHERS}::test_a_job_is_settled_by_whoever_took_it_last_and_as_its_principal",
    ),
    # --- pushes --------------------------------------------------------------------------------------
    Mutant(
        "webhook: a signature that is not compared",
        "api/webhook.py",
        "return [secret for secret, fit in zip(self._secrets, fits, strict=True) if fit]",
        "return list(self._secrets)",
        f"{HOOK}::test_no_forgery_is_accepted",
    ),
    Mutant(
        "webhook: a secret that signs for every repository",
        "api/webhook.py",
        "if not any(secret.covers(push.repository) for secret in signers):",
        "if False:",
        f"{HOOK}::test_every_family_of_forgeries_is_refused",
    ),
    Mutant(
        "webhook: a token for any body",
        "api/webhook.py",
        "return [secret for secret, digest in self._signers if hmac.compare_digest(digest, body)]",
        "return [secret for secret, digest in self._signers if digest and body]",
        f"{HOOK}::test_every_family_of_forgeries_is_refused",
    ),
    Mutant(
        "webhook: the job of whoever asks for the source of another",
        "rag/tasks.py",
        "if spec is None or spec.tenant is None or spec.principal(None) != task.principal:",
        "if spec is None or spec.tenant is None:",
        "rag/test_push.py::test_a_job_of_another_than_the_workers_file_names_changes_nothing",
    ),
    Mutant(
        "webhook: a synchronisation that goes on when its job is another's",
        JOBS,
        "and job.claim = holds_job.claim and job.status = 'processing' for share;",
        "and job.status = 'processing' for share;",
        f"{JOBS_OF_OTHERS}::test_a_job_that_is_held_is_given_to_nobody_before_the_step_ends",
    ),
    Mutant(
        "webhook: a synchronisation that never asks whose its job is",
        "rag/tasks.py",
        "settings=task.settings, database=task.database, embedder=task.embedder, also=task.hold",
        "settings=task.settings, database=task.database, embedder=task.embedder",
        "rag/test_push.py::test_a_job_that_is_anothers_stores_nothing",
    ),
    Mutant(
        "webhook: a source that has what merely says so",
        READING,
        """
        where document.metadata -> 'origin' ->> 'source' = my_origin.source
            -- Both, so that what an ingest merely says of its origin makes nothing a part of a source.
            and starts_with(document.source_id, my_origin.source || ':');
        """,
        "where document.metadata -> 'origin' ->> 'source' = my_origin.source;",
        f"{JOBS_OF_OTHERS}::test_what_a_synchronisation_compares_is_its_principals_own_and_no_text",
    ),
    # --- set-up ----------------------------------------------------------------------------------------
    Mutant(
        "the migrator is the owner all the time",
        BOOTSTRAP,
        "grant rag_owner to rag_migrator with inherit false, set true;",
        "grant rag_owner to rag_migrator with inherit true, set true;",
        f"{CATALOG}::test_memberships_are_these_without_inheritance",
    ),
    Mutant(
        "the service may become the owner",
        BOOTSTRAP,
        "grant rag_owner to rag_migrator with inherit false, set true;",
        "grant rag_owner to rag_migrator, rag_app with inherit false, set true;",
        f"{WHO}::test_the_service_and_operators_cannot_become_another_role",
    ),
    Mutant(
        "functions that come later are everybody's",
        BOOTSTRAP,
        "alter default privileges for role rag_owner revoke execute on functions from public;",
        "",
        f"{CATALOG}::test_a_function_that_is_added_later_is_not_executable_by_everybody",
    ),
    Mutant(
        "everybody makes temporary tables",
        BOOTSTRAP,
        "execute format('revoke all on database %I from public', current_database());",
        "",
        f"{CATALOG}::test_schemas_and_database_are_closed_to_everybody",
    ),
    Mutant(
        "the service looks among temporary objects first",
        BOOTSTRAP,
        "alter role rag_app set search_path = rag, pg_temp;",
        "alter role rag_app set search_path = pg_temp, rag;",
        f"{CATALOG}::test_the_search_path_of_every_role_that_runs_something_ends_with_pg_temp",
    ),
    Mutant(
        "roles that were there are taken on trust",
        BOOTSTRAP,
        "if unfit is not null then",
        "if false then",
        "barrier/test_bootstrap.py::test_a_role_that_was_there_with_a_power_of_its_own_is_refused",
    ),
    # --- the service -----------------------------------------------------------------------------------
    Mutant(
        "connections that nobody checks",
        "rag/connect.py",
        "check=_forget,",
        "",
        "rag/test_database.py::test_a_connection_that_was_cut_while_it_waited_is_replaced",
    ),
    Mutant(
        "public documents through the service's own login",
        "rag/database.py",
        "pool = self._publisher if publish else self._app",
        "pool = self._app",
        "rag/test_database.py::test_only_the_publishers_login_publishes",
    ),
    Mutant(
        "a violated key that is told",
        "rag/database.py",
        """if state == "23503":""",
        """if state == "never":""",
        "rag/test_database.py::test_an_error_of_the_database_becomes_one_of_ours_without_its_words",
    ),
    Mutant(
        "errors in the words of the database",
        "rag/database.py",
        "return errors.DatabaseError()",
        "return errors.DatabaseError(str(error))",
        "rag/test_database.py::test_a_violated_key_is_an_error_that_quotes_nothing",
    ),
    Mutant(
        "a service that starts without row security",
        "rag/database.py",
        """if found["unprotected_tables"]:""",
        """if False:""",
        "sql/test_migrations.py::test_every_table_without_forced_row_security_stops_the_service",
    ),
    Mutant(
        "a service that starts with an identity of its own",
        "rag/database.py",
        """if found["default_identity"]:""",
        """if False:""",
        "sql/test_migrations.py::test_a_default_for_any_variable_stops_the_service",
    ),
    Mutant(
        "a service that starts as a superuser",
        "rag/database.py",
        """if found["is_powerful"] or found["may_become_powerful"]:""",
        """if found["may_become_powerful"]:""",
        "rag/test_database.py::test_a_login_that_could_switch_row_security_off_is_a_refusal",
    ),
    Mutant(
        "synchronisations of everybody",
        POLICIES,
        """
        create policy read_synchronisations on rag_synchronisations for select to rag_principal
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        "create policy read_synchronisations on rag_synchronisations for select to rag_principal using (true);",
        f"{WHAT}::test_what_came_of_a_synchronisation_is_read_with_its_documents",
    ),
    Mutant(
        "a synchronisation noted where one only reads",
        POLICIES,
        """
        create policy add_synchronisations on rag_synchronisations for insert to rag_principal
        with check (access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        "create policy add_synchronisations on rag_synchronisations for insert to rag_principal with check (true);",
        f"{WHAT}::test_it_is_written_by_whoever_writes_the_documents",
    ),
    Mutant(
        "a conversation that members of the project read",
        POLICIES,
        """
        create policy read_messages on rag_conversation_messages for select to rag_principal
        using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
        """,
        """
        create policy read_messages on rag_conversation_messages for select to rag_principal
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        f"{WHAT}::test_a_conversation_is_read_by_its_owner_alone",
    ),
    Mutant(
        "a conversation read without its tags",
        POLICIES,
        """
        create policy read_messages on rag_conversation_messages for select to rag_principal
        using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
        """,
        """
        create policy read_messages on rag_conversation_messages for select to rag_principal
        using (user_id = (select my_user_id()));
        """,
        f"{WHAT}::test_a_conversation_is_read_by_its_owner_alone",
    ),
    Mutant(
        "a summary of a conversation that members of the project read as theirs",
        POLICIES,
        """
        create policy read_summaries on rag_conversation_summaries for select to rag_principal
        using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
        """,
        """
        create policy read_summaries on rag_conversation_summaries for select to rag_principal
        using (access_id = any((select my_access_ids())::bigint[]));
        """,
        f"{WHAT}::test_a_conversation_is_read_by_its_owner_alone",
    ),
    Mutant(
        "a conversation in which somebody else's name is put",
        POLICIES,
        """
        create policy post_messages on rag_conversation_messages for insert to rag_principal
        with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        """
        create policy post_messages on rag_conversation_messages for insert to rag_principal
        with check (access_id = any((select my_writable_access_ids())::bigint[]));
        """,
        f"{WHAT}::test_a_conversation_is_carried_on_by_its_owner_alone",
    ),
    Mutant(
        "a message of a conversation in two summaries",
        CONVERSATIONS,
        "and message.summary_id = add_summary.id and message.summarised_at is null",
        "",
        f"{WHAT}::test_a_message_is_marked_once_and_by_the_job_that_it_was_given_to",
    ),
    Mutant(
        "a conversation to which two post at once",
        CONVERSATIONS,
        """
        perform pg_advisory_xact_lock(
            thread_lock(class.tenant_id, class.user_id, class.project_id, post_message.thread_id)
        );
        """,
        "",
        "rag/test_conversations.py::test_posts_at_once_lose_no_message_and_no_message_is_summed_up_twice",
    ),
    Mutant(
        "a synchronisation that makes the class of an erased owner anew",
        "rag/sync.py",
        "await store.note_synchronisation(self.database, principal, destination, access_id, done, also=self.also)",
        """access_id = await store.find_class(self.database, principal, destination)
            await store.note_synchronisation(self.database, principal, destination, access_id, done, also=self.also)""",
        "rag/test_sync.py::test_an_owner_who_is_erased_meanwhile_leaves_nothing_behind",
    ),
    Mutant(
        "a cut of documents that one may only read",
        "sql/queries/list_writable.sql",
        "and class.may_write",
        "",
        "rag/test_reindex.py::test_nobody_cuts_what_they_may_not_write",
    ),
    Mutant(
        "a deletion that nobody remembers",
        "rag/store.py",
        """await session.run("bury_source", source | {"access_id": present["access_id"], "reason": reason})""",
        "",
        "rag/test_store.py::test_a_deleted_document_leaves_a_tombstone_and_no_chunk",
    ),
    Mutant(
        "an erasure that an earlier deletion hides",
        "rag/store.py",
        "or present.access_id != self.access_id",
        "",
        "rag/test_erase.py::test_neither_does_an_earlier_deletion_open_a_door",
    ),
    Mutant(
        "an erasure of a source that an ingest does not notice",
        "rag/store.py",
        "present.generation != self.generation",
        "False",
        "rag/test_erase.py::test_what_is_erased_while_it_is_ingested_stays_away",
    ),
    Mutant(
        "a deletion that an ingest with other tags does not notice",
        "rag/store.py",
        "or (self.document_id is not None and present.document_id != self.document_id)",
        "",
        "rag/test_ingest.py::test_a_deletion_wins_over_an_ingest_that_moves_the_document",
    ),
    Mutant(
        "a service key that is over",
        "rag/keys.py",
        "and key is not None and key.expires_at > datetime.now(UTC)",
        "and key is not None",
        "api/test_keys.py::test_a_key_expires_when_it_says_and_not_when_keys_are_loaded",
    ),
    Mutant(
        "a service key with any secret",
        "rag/keys.py",
        "if hmac.compare_digest(digest, expected) and key is not None",
        "if key is not None",
        "api/test_keys.py::test_no_guessed_or_changed_key_is_honoured",
    ),
    # --- the door --------------------------------------------------------------------------------------
    Mutant(
        "a credential for all tenants",
        "api/identity.py",
        "if tenant != grant.tenant_id and not grant.any_tenant:",
        "if not tenant:",
        "api/test_doors.py::test_the_key_opens_no_other_tenant",
    ),
    Mutant(
        "a credential for all users",
        "api/identity.py",
        "and user not in grant.user_ids:",
        "and user in ():",
        "api/test_doors.py::test_a_key_speaks_for_its_users_and_projects_alone",
    ),
    Mutant(
        "a credential for all tags",
        "api/identity.py",
        "if grant.tags is not None and not grant.tags.issuperset(asserted):",
        "if False:",
        "api/test_doors.py::test_tags_beyond_the_key_are_neither_asserted_nor_written",
    ),
    Mutant(
        "a key that may not act as others and does",
        "api/identity.py",
        "user_ids=key.user_ids if key.act_as else frozenset(),",
        "user_ids=key.user_ids,",
        "api/test_doors.py::test_a_key_that_speaks_for_nobody_names_nobody",
    ),
    Mutant(
        "an end user who writes for everybody",
        "api/identity.py",
        """scopes=frozenset({"user", "project", "public"} if user.may_publish else {"user", "project"}),""",
        """scopes=frozenset({"user", "project", "public"}),""",
        "api/test_doors.py::test_only_an_editor_publishes",
    ),
    Mutant(
        "an action that is not permitted",
        "api/identity.py",
        "if action not in self.grant.actions:",
        "if False:",
        "api/test_doors.py::test_a_key_permits_its_actions_alone",
    ),
    Mutant(
        "a loopback service for every page",
        "api/identity.py",
        "if origin is not None and _split(origin).netloc != host:",
        "if False:",
        "api/test_doors.py::test_another_origin_is_refused_even_with_the_token",
    ),
    Mutant(
        "a token of any issuer",
        "api/tokens.py",
        "issuer=self._settings.rag_jwt_issuer,",
        "",
        "api/test_end_user_tokens.py::test_no_forged_or_changed_token_is_believed",
    ),
    Mutant(
        "a token for somebody else",
        "api/tokens.py",
        """options={"require": ["exp", "iss", "aud"]},""",
        """options={"require": ["exp", "iss", "aud"], "verify_aud": False},""",
        "api/test_end_user_tokens.py::test_no_forged_or_changed_token_is_believed",
    ),
    # --- how much a tenant may ask and store ---------------------------------------------------------
    Mutant(
        "limits without an identity",
        LIMITS,
        """
        raise exception 'no principal' using errcode = 'insufficient_privilege';
        end if;
        if (take_token.kind
        """,
        """
        granted := true;
        return next;
        return;
        end if;
        if (take_token.kind
        """,
        f"{HELD}::test_without_an_identity_nothing_is_taken_or_counted",
    ),
    Mutant(
        "limits of every tenant",
        LIMITS,
        "where limits.tenant_id in (limits_of.tenant_id, '')",
        "where true",
        f"{HELD}::test_a_tenant_sees_its_own_limits_and_no_others",
    ),
    Mutant(
        "limits that take from every tenant's bucket",
        LIMITS,
        "where bucket.tenant_id = me.tenant_id and bucket.kind = take_token.kind and refilled_tokens(",
        "where bucket.kind = take_token.kind and refilled_tokens(",
        f"{HELD}::test_a_token_is_taken_from_ones_own_bucket",
    ),
    Mutant(
        "limits without a second look",
        LIMITS,
        """
        and bucket.kind = take_token.kind
            and refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp()) >= 1
        """,
        "and bucket.kind = take_token.kind",
        f"{HELD}::test_of_many_at_once_exactly_the_burst_passes",
    ),
    Mutant(
        "limits that are checked without a lock",
        LIMITS,
        "perform pg_advisory_xact_lock(hashtextextended('palisade quota ' || me.tenant_id, 0));",
        "",
        f"{HELD}::test_of_many_who_write_at_once_exactly_as_many_as_fit_commit",
    ),
    Mutant(
        "limits that count what others have stored",
        LIMITS,
        "from rag_usage as usage where usage.tenant_id = me.tenant_id;",
        "from rag_usage as usage;",
        f"{HELD}::test_a_quota_is_exact_and_says_what_is_full",
    ),
    Mutant(
        "limits that show what others have stored",
        LIMITS,
        "where usage.tenant_id = me.tenant_id offset 0",
        "offset 0",
        f"{HELD}::test_a_tenant_sees_its_own_limits_and_no_others",
    ),
    Mutant(
        "limits that the service lifts",
        GRANTS,
        "grant select on rag_usage to rag_operator;",
        "grant select on rag_usage to rag_operator; grant delete on rag_rate_buckets to rag_app;",
        f"{HELD}::test_a_tenant_neither_reads_nor_changes_limits_buckets_and_counts",
    ),
    Mutant(
        "limits that the service recounts",
        GRANTS,
        "('recount_usage(text)', array['rag_operator'], 'rag_steward')",
        "('recount_usage(text)', service || array['rag_operator'], 'rag_steward')",
        f"{HELD}::test_a_tenant_does_not_reset_what_it_is_held_to",
    ),
    # --- a change of the embedding model -------------------------------------------------------------
    Mutant(
        "texts are given out without a second model",
        POLICIES,
        """
        create policy fill_chunks_select on rag_chunks for select to rag_embedder
        using (exists (select from rag_models as model where model.place = 'second'));
        """,
        "create policy fill_chunks_select on rag_chunks for select to rag_embedder using (true);",
        f"{CHANGE}::test_texts_are_given_out_for_filling_only_while_there_is_a_second_model",
    ),
    Mutant(
        "operators are given texts to fill",
        GRANTS,
        "('chunks_to_fill(text, bigint, integer)', array['rag_owner'], 'rag_embedder'),",
        "('chunks_to_fill(text, bigint, integer)', array['rag_owner', 'rag_operator'], 'rag_embedder'),",
        f"{CHANGE}::test_a_fill_opens_no_text_to_any_login_of_the_service_or_of_operators",
    ),
    Mutant(
        "a fill writes what is searched",
        MODELS,
        "update (second_embedding, second_embedding_model) on rag_chunks to rag_embedder;",
        "update (second_embedding, second_embedding_model, embedding) on rag_chunks to rag_embedder;",
        f"{CHANGE}::test_whoever_fills_writes_no_column_that_is_searched",
    ),
    Mutant(
        "vectors of any model fill the second column",
        MODELS,
        "where model.place = 'second' and model.model_id = fill_vectors.model_id",
        "where model.place = 'second'",
        f"{CHANGE}::test_vectors_of_another_model_than_the_second_are_not_taken",
        times=2,
    ),
    Mutant(
        "a service of another model goes on writing",
        MODELS,
        "if active.model_id <> check_model.embedding_model then",
        "if false then",
        f"{CHANGE}::test_a_service_of_another_model_is_refused_and_mixes_nothing",
    ),
    Mutant(
        "rights stay with the columns that change places",
        MODELS,
        "perform grant_model_columns();",
        "",
        f"{CHANGE}::test_the_schema_is_as_it_was_made_at_every_step_but_for_the_width",
        times=2,
    ),
)
