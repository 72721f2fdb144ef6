-- Row security. Forced, so that it binds the owner as well; one policy for each command and role;
-- a restrictive policy on each table that no later permissive one can widen across tenants.
-- `(select …)` is evaluated once per statement, not once per row.

do $$
declare
    table_name text;
begin
    foreach table_name in array array[
        'rag_access_classes', 'rag_project_members', 'rag_documents', 'rag_chunks', 'rag_tombstones',
        'rag_erasures', 'rag_query_logs', 'rag_query_log_chunks', 'rag_signing_keys', 'rag_analysts',
        'rag_service_keys', 'rag_assertions', 'rag_class_indexes', 'rag_class_languages', 'rag_class_lexemes',
        'rag_calibrations', 'rag_feedback', 'rag_tags', 'rag_prompts', 'rag_retractions',
        'rag_limits', 'rag_rate_buckets', 'rag_usage', 'rag_models', 'rag_jobs', 'rag_claims',
        'rag_synchronisations', 'rag_conversation_messages', 'rag_conversation_summaries'
    ]
    loop
        execute format('alter table %I enable row level security', table_name);
        execute format('alter table %I force row level security', table_name);
    end loop;
end
$$;

-- The definer functions on the query path find the caller's classes, so their owner reads them all; and
-- they alone make new ones.
create policy find_classes on rag_access_classes
for select to rag_search
using (true);
comment on policy find_classes on rag_access_classes is 'my_access_ids() and its siblings look among all classes';

create policy make_classes on rag_access_classes
for insert to rag_search
with check (true);
comment on policy make_classes on rag_access_classes is 'access_class() adds the first document''s class';

create policy find_members on rag_project_members
for select to rag_search
using (true);
comment on policy find_members on rag_project_members is 'my_access_ids() resolves shared projects';

create policy find_candidates on rag_chunks
for select to rag_search
using (true);
comment on policy find_candidates on rag_chunks is 'keyword_candidates() scores within the classes that my_access_ids() gives it; its rows are joined again under the caller''s own policy';

create policy list_documents on rag_documents
for select to rag_search
using (true);
comment on policy list_documents on rag_documents is 'my_listed_documents() shows analysts that documents exist; no column of content is granted';

create policy verify_signatures on rag_signing_keys
for select to rag_search
using (true);
comment on policy verify_signatures on rag_signing_keys is 'signature_holds(); nobody else reads a key';

create policy find_analysts on rag_analysts
for select to rag_search
using (true);
comment on policy find_analysts on rag_analysts is 'my_principal() looks up the login';

create policy load_keys on rag_service_keys
for select to rag_search
using (true);
comment on policy load_keys on rag_service_keys is 'load_service_keys() hands them to the service';

-- Tenant belts, one for each command that is granted, so that no policy is FOR ALL. For the logins the
-- condition is said twice: the first time the planner may use it for an index; the second, which it
-- cannot merge with a condition of the query's own and takes for the cheapest one, comes before any of
-- these on a row. So no row of another tenant is ever compared with what the caller asks for, and
-- EXPLAIN ANALYZE has nothing to tell about it. What rag_principal asks for is fixed.
do $$
declare
    belt record;
    same_tenant constant text := 'tenant_id = (select my_tenant_id())';
    same_tenant_first constant text := same_tenant || ' and tenant_id = any(array[(select my_tenant_id())])';
begin
    for belt in
        select
            granted.table_name,
            granted.roles,
            command,
            case when granted.roles = 'rag_principal' then same_tenant else same_tenant_first end as condition
        from (values
            ('rag_project_members', 'rag_principal', array['select', 'insert', 'update', 'delete']),
            ('rag_documents', 'rag_principal', array['select']),
            ('rag_documents', 'rag_app, rag_publisher, rag_worker', array['select', 'insert', 'update', 'delete']),
            ('rag_chunks', 'rag_principal', array['select']),
            ('rag_chunks', 'rag_app, rag_publisher, rag_worker', array['select', 'insert', 'delete']),
            ('rag_tombstones', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_synchronisations', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_query_logs', 'rag_principal', array['select']),
            ('rag_query_logs', 'rag_app, rag_publisher', array['insert']),
            ('rag_query_log_chunks', 'rag_principal', array['select']),
            ('rag_calibrations', 'rag_principal', array['select']),
            ('rag_feedback', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_tags', 'rag_principal', array['select']),
            ('rag_prompts', 'rag_principal', array['select']),
            ('rag_jobs', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_claims', 'rag_principal', array['select', 'insert', 'update', 'delete']),
            ('rag_conversation_messages', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_conversation_summaries', 'rag_principal', array['select', 'insert']),
            ('rag_query_log_chunks', 'rag_app, rag_publisher', array['insert']),
            ('rag_assertions', 'rag_app, rag_publisher', array['insert']),
            ('rag_retractions', 'rag_app, rag_publisher', array['insert'])
        ) as granted (table_name, roles, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I as restrictive for %s to %s %s %s',
            case when belt.roles = 'rag_principal' then 'own_tenant_reading_' else 'own_tenant_' end || belt.command,
            belt.table_name,
            belt.command,
            belt.roles,
            case when belt.command <> 'insert' then format('using (%s)', belt.condition) end,
            case when belt.command in ('insert', 'update') then format('with check (%s)', belt.condition) end
        );
        execute format(
            'comment on policy %I on %I is %L',
            case when belt.roles = 'rag_principal' then 'own_tenant_reading_' else 'own_tenant_' end || belt.command,
            belt.table_name,
            'Never across tenants'
        );
    end loop;
end
$$;

-- Memberships: owner and member see them, the owner changes them; so may operators.
create policy read_members on rag_project_members
for select to rag_principal
using (owner_user_id = (select my_user_id()) or member_user_id = (select my_user_id()));
comment on policy read_members on rag_project_members is 'Projects that the principal shares or has been given';

create policy share_own_project on rag_project_members
for insert to rag_principal
with check (owner_user_id = (select my_user_id()));
comment on policy share_own_project on rag_project_members is 'A project is shared by its owner';

create policy change_own_sharing on rag_project_members
for update to rag_principal
using (owner_user_id = (select my_user_id()))
with check (owner_user_id = (select my_user_id()));
comment on policy change_own_sharing on rag_project_members is 'Whether a member may write is the owner''s to say';

create policy unshare_own_project on rag_project_members
for delete to rag_principal
using (owner_user_id = (select my_user_id()));
comment on policy unshare_own_project on rag_project_members is 'The owner ends it';

create policy operate_members_select on rag_project_members
for select to rag_operator
using (true);
comment on policy operate_members_select on rag_project_members is 'Operators see who shares what, in every tenant';

create policy operate_members_insert on rag_project_members
for insert to rag_operator
with check (true);
comment on policy operate_members_insert on rag_project_members is 'Operators share projects';

create policy operate_members_update on rag_project_members
for update to rag_operator
using (true)
with check (true);
comment on policy operate_members_update on rag_project_members is 'Operators change whether a member may write';

create policy operate_members_delete on rag_project_members
for delete to rag_operator
using (true);
comment on policy operate_members_delete on rag_project_members is 'Operators end the sharing of projects';

-- Documents.
create policy read_documents on rag_documents
for select to rag_app, rag_publisher, rag_worker, rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_documents on rag_documents is 'Documents of the classes that the principal may read';

create policy add_documents on rag_documents
for insert to rag_app, rag_publisher, rag_worker
with check (
    access_id = any((select my_writable_access_ids())::bigint[])
    -- What people read of scope, owner and tags must not lie.
    and class_reads(access_id, scope, user_id, project_id, tags)
);
comment on policy add_documents on rag_documents is 'Documents of the classes that the principal may write, with the scope, owner and tags of their class';

create policy change_documents on rag_documents
for update to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_documents on rag_documents is 'Documents of the classes that the principal may write';

create policy remove_documents on rag_documents
for delete to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_documents on rag_documents is 'Documents of the classes that the principal may write';

-- Chunks. They are replaced, never updated.
create policy read_chunks on rag_chunks
for select to rag_app, rag_publisher, rag_worker, rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_chunks on rag_chunks is 'Chunks of the classes that the principal may read';

create policy add_chunks on rag_chunks
for insert to rag_app, rag_publisher, rag_worker
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

create policy remove_chunks on rag_chunks
for delete to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

-- Tombstones. Nobody removes one; a retraction is lifted by its column.
create policy read_tombstones on rag_tombstones
for select to rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may read';

create policy add_tombstones on rag_tombstones
for insert to rag_principal
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

create policy raise_tombstones on rag_tombstones
for update to rag_principal
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy raise_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

-- What came of synchronisations.
create policy read_synchronisations on rag_synchronisations
for select to rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may read';

create policy add_synchronisations on rag_synchronisations
for insert to rag_principal
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may write';

create policy change_synchronisations on rag_synchronisations
for update to rag_principal
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may write';

create policy count_erasures on rag_erasures
for select to rag_principal
using (true);
comment on policy count_erasures on rag_erasures is 'find_source() counts the erasures of a source; digests only';

create policy read_calibrations on rag_calibrations
for select to rag_principal
using (tenant_id = (select my_tenant_id()));
comment on policy read_calibrations on rag_calibrations is 'What was found better for the principal''s tenant; it holds for everybody there';

-- Query logs: each user's own. A principal without a user writes them and reads none.
create policy read_logs on rag_query_logs
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_logs on rag_query_logs is 'The principal''s own questions; an analyst''s tenant''s';

create policy add_logs on rag_query_logs
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_logs on rag_query_logs is 'The principal''s own questions';

create policy read_log_chunks on rag_query_log_chunks
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions; of an analyst''s tenant''s';

create policy add_log_chunks on rag_query_log_chunks
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';

-- What people made of their answers.
create policy read_feedback on rag_feedback
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_feedback on rag_feedback is 'The principal''s own words; of an analyst''s tenant';

create policy give_feedback on rag_feedback
for insert to rag_principal
with check (
    user_id = (select my_user_id())
    and (access_id is null or access_id = any((select my_access_ids())::bigint[]))
);
comment on policy give_feedback on rag_feedback is 'The principal''s own words, in classes that it may read';

create policy change_feedback on rag_feedback
for update to rag_principal
using (user_id = (select my_user_id()))
with check (user_id = (select my_user_id()));
comment on policy change_feedback on rag_feedback is 'The principal''s own words; which class they count in is never changed';

create policy count_feedback on rag_feedback
for select to rag_search
using (true);
comment on policy count_feedback on rag_feedback is 'feedback_support() counts within the classes that my_access_ids() gives it';

-- Whom to ask, and what a tenant tells the model.
create policy read_tags on rag_tags
for select to rag_principal
using (name = any((select my_tags())::text[]));
comment on policy read_tags on rag_tags is 'Owners of the tags that the principal holds';

create policy read_prompts on rag_prompts
for select to rag_principal
using (tenant_id = (select my_tenant_id()));
comment on policy read_prompts on rag_prompts is 'The prompt of the principal''s tenant';

create policy add_assertions on rag_assertions
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_assertions on rag_assertions is 'For whom a service speaks, written as that principal';

create policy add_retractions on rag_retractions
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_retractions on rag_retractions is 'Who retracts, written as that principal';

-- Jobs: each principal's own. What a worker is handed, take_job() hands it.
do $$
declare
    allowed record;
    own constant text := 'user_id = coalesce((select my_user_id()), 0) and not (select i_am_analyst())';
begin
    for allowed in
        select *
        from (values
            ('rag_jobs', 'read_jobs', 'rag_principal', 'select', own, 'The principal''s own jobs'),
            ('rag_jobs', 'add_jobs', 'rag_principal', 'insert', own, 'The principal''s own jobs'),
            ('rag_jobs', 'change_jobs', 'rag_principal', 'update', own, 'The principal''s own jobs'),
            ('rag_jobs', 'work_jobs_select', 'rag_queue', 'select', 'true', 'The functions of workers, in every tenant'),
            ('rag_jobs', 'work_jobs_update', 'rag_queue', 'update', 'true', 'The functions of workers, in every tenant'),
            ('rag_jobs', 'work_jobs_delete', 'rag_queue', 'delete', 'true', 'expire_jobs() removes what ended long ago'),
            ('rag_claims', 'expire_claims_select', 'rag_queue', 'select', 'true', 'expire_jobs() removes what ran out'),
            ('rag_claims', 'expire_claims_delete', 'rag_queue', 'delete', 'true', 'expire_jobs() removes what ran out'),
            -- A claim is a digest; claim_source() makes it of a class that the principal may write.
            ('rag_claims', 'see_claims', 'rag_principal', 'select', 'true', 'claim_source() and its siblings; digests only'),
            ('rag_claims', 'add_claims', 'rag_principal', 'insert', 'true', 'claim_source(), of classes that the principal may write'),
            ('rag_claims', 'change_claims', 'rag_principal', 'update', 'true', 'claim_source() and renew_claim(); digests only'),
            ('rag_claims', 'end_claims', 'rag_principal', 'delete', 'true', 'release_claim(), by whose it is')
        ) as granted (table_name, policy_name, role_name, command, condition, remark)
    loop
        execute format(
            'create policy %I on %I for %s to %I %s %s',
            allowed.policy_name,
            allowed.table_name,
            allowed.command,
            allowed.role_name,
            case when allowed.command <> 'insert' then format('using (%s)', allowed.condition) end,
            case when allowed.command in ('insert', 'update') then format('with check (%s)', allowed.condition) end
        );
        execute format('comment on policy %I on %I is %L', allowed.policy_name, allowed.table_name, allowed.remark);
    end loop;
end
$$;

-- Conversations: each principal's own, in the classes that it reaches. A project may be shared; what somebody said in it
-- is not, and a summary is read here by whom it is of, and as a document by everybody who reads the project.
create policy read_messages on rag_conversation_messages
for select to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
comment on policy read_messages on rag_conversation_messages is 'What the principal posted itself, in classes that it may read';

create policy post_messages on rag_conversation_messages
for insert to rag_principal
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy post_messages on rag_conversation_messages is 'The principal''s own messages, in classes that it may write';

create policy mark_messages on rag_conversation_messages
for update to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]))
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy mark_messages on rag_conversation_messages is 'Which summary a message of the principal''s is of; nothing else of it is granted';

create policy read_summaries on rag_conversation_summaries
for select to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
comment on policy read_summaries on rag_conversation_summaries is 'Summaries of the principal''s own conversations, in classes that it may read';

create policy add_summaries on rag_conversation_summaries
for insert to rag_principal
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_summaries on rag_conversation_summaries is 'Summaries of the principal''s own conversations, in classes that it may write';

-- Operators, in every tenant: keys, analysts, calibrations, owners of tags, prompts and the record of what was
-- done; never a document.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_analysts', array['select', 'insert', 'update', 'delete']),
            ('rag_service_keys', array['select', 'insert', 'update']),
            ('rag_calibrations', array['select', 'insert', 'update', 'delete']),
            ('rag_tags', array['select', 'insert', 'update', 'delete']),
            ('rag_prompts', array['select', 'insert', 'update', 'delete']),
            ('rag_limits', array['select', 'insert', 'update', 'delete']),
            ('rag_usage', array['select']),
            ('rag_assertions', array['select']),
            ('rag_retractions', array['select']),
            ('rag_erasures', array['select'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_operator %s %s',
            'operate_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'operate_' || allowed.command, allowed.table_name, 'Operators, in every tenant'
        );
    end loop;
end
$$;

-- The functions of operators erase and explain without reading: keys of rows are all that is granted.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_access_classes', array['select', 'delete']),
            ('rag_project_members', array['select', 'delete']),
            ('rag_documents', array['select', 'delete']),
            ('rag_chunks', array['select']),
            ('rag_tombstones', array['select', 'delete']),
            ('rag_synchronisations', array['select', 'delete']),
            ('rag_erasures', array['select', 'insert', 'delete']),
            ('rag_query_logs', array['select', 'delete']),
            ('rag_query_log_chunks', array['select', 'delete']),
            ('rag_signing_keys', array['select', 'insert', 'delete']),
            ('rag_analysts', array['select', 'delete']),
            ('rag_service_keys', array['select', 'delete']),
            ('rag_calibrations', array['select', 'delete']),
            ('rag_feedback', array['select', 'delete']),
            ('rag_tags', array['select', 'delete']),
            ('rag_prompts', array['select', 'delete']),
            ('rag_limits', array['select', 'delete']),
            ('rag_rate_buckets', array['select', 'delete']),
            ('rag_usage', array['select', 'insert', 'update', 'delete']),
            ('rag_assertions', array['select', 'delete']),
            ('rag_retractions', array['select', 'delete']),
            ('rag_jobs', array['select', 'delete']),
            ('rag_claims', array['select', 'delete']),
            ('rag_conversation_messages', array['select', 'delete']),
            ('rag_conversation_summaries', array['select'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_steward %s %s',
            'steward_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'steward_' || allowed.command, allowed.table_name,
            'The functions of rag_operator, in every tenant; no column of content is granted'
        );
    end loop;
end
$$;

-- Indexes and statistics of large classes. The search reads them, for the classes that it gives the principal;
-- what rag maintain calls writes them.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_class_indexes', array['select', 'insert', 'update', 'delete']),
            ('rag_class_languages', array['select', 'insert', 'delete']),
            ('rag_class_lexemes', array['select', 'insert', 'delete'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_search %s %s',
            'measure_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'measure_' || allowed.command, allowed.table_name,
            'The functions of rag maintain, and the search, which looks up classes of the principal only'
        );
    end loop;
end
$$;

-- Limits: what functions on the path of every request look up and count, for the principal's tenant.
create policy find_limits on rag_limits
for select to rag_search
using (true);
comment on policy find_limits on rag_limits is 'limits_of(), which its callers ask about the principal''s tenant';

do $$
declare
    table_name text;
begin
    foreach table_name in array array['rag_rate_buckets', 'rag_usage']
    loop
        execute format('create policy count_select on %I for select to rag_search using (true)', table_name);
        execute format('create policy count_insert on %I for insert to rag_search with check (true)', table_name);
        execute format(
            'create policy count_update on %I for update to rag_search using (true) with check (true)', table_name
        );
        for command in 1..3 loop
            execute format(
                'comment on policy %I on %I is %L',
                (array['count_select', 'count_insert', 'count_update'])[command],
                table_name,
                'take_token() and charge_quota(), for the principal''s tenant'
            );
        end loop;
    end loop;
end
$$;

-- A change of the embedding model. Whoever fills the second column reads texts of all tenants: only through functions
-- that the owner alone may call, and only as long as there is a second model.
create policy read_models on rag_models
for select to rag_principal
using (true);
comment on policy read_models on rag_models is 'active_model() and check_model(); which model is used is no secret';

create policy fill_classes on rag_access_classes
for select to rag_embedder
using (true);
comment on policy fill_classes on rag_access_classes is 'chunks_to_fill() goes from class to class; numbers alone are granted';

create policy fill_documents on rag_documents
for select to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_documents on rag_documents is 'chunks_to_fill() gives out titles while there is a second model';

create policy fill_chunks_select on rag_chunks
for select to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_chunks_select on rag_chunks is 'chunks_to_fill() gives out texts while there is a second model';

create policy fill_chunks_update on rag_chunks
for update to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'))
with check (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_chunks_update on rag_chunks is 'fill_vectors() writes the second vector, and no other column';

create policy fill_class_indexes_select on rag_class_indexes
for select to rag_embedder
using (true);
comment on policy fill_class_indexes_select on rag_class_indexes is 'large_classes() lists those that need an index of the second model';

create policy fill_class_indexes_update on rag_class_indexes
for update to rag_embedder
using (true)
with check (true);
comment on policy fill_class_indexes_update on rag_class_indexes is 'set_models() notes the size of the other model''s indexes';

do $$
declare
    command text;
begin
    foreach command in array array['select', 'insert', 'update', 'delete']
    loop
        execute format(
            'create policy %I on rag_models for %s to rag_embedder %s %s',
            'change_models_' || command,
            command,
            case when command <> 'insert' then 'using (true)' end,
            case when command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on rag_models is %L',
            'change_models_' || command, 'The functions of rag models, which the owner alone may call'
        );
    end loop;
end
$$;
