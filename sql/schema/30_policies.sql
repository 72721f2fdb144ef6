-- Row security. Forced, so that it binds the owner as well; one policy for each command and role;
-- a restrictive policy on each table that no later permissive one can widen across tenants.
-- `(select …)` is evaluated once per statement, not once per row.

alter table rag_access_classes enable row level security;
alter table rag_access_classes force row level security;
alter table rag_project_members enable row level security;
alter table rag_project_members force row level security;
alter table rag_documents enable row level security;
alter table rag_documents force row level security;
alter table rag_chunks enable row level security;
alter table rag_chunks force row level security;
alter table rag_tombstones enable row level security;
alter table rag_tombstones force row level security;
alter table rag_query_logs enable row level security;
alter table rag_query_logs force row level security;
alter table rag_query_log_chunks enable row level security;
alter table rag_query_log_chunks force row level security;

-- The definer functions find the caller's classes, so their owner reads them all; and they alone
-- make new ones.
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

-- Tenant belts, one for each command that is granted, so that no policy is FOR ALL. The condition is
-- said twice: the first time the planner may use it for an index; the second, which it cannot merge with
-- a condition of the query's own and takes for the cheapest one, comes before any of these on a row. So
-- no row of another tenant is ever compared with what the caller asks for, and EXPLAIN ANALYZE has
-- nothing to tell about it.
do $$
declare
    belt record;
    same_tenant constant text :=
        'tenant_id = (select my_tenant_id()) and tenant_id = any(array[(select my_tenant_id())])';
begin
    for belt in
        select *
        from (values
            ('rag_access_classes', array['select']),
            ('rag_project_members', array['select']),
            ('rag_documents', array['select', 'insert', 'update', 'delete']),
            ('rag_chunks', array['select', 'insert', 'delete']),
            ('rag_tombstones', array['select', 'insert', 'update']),
            ('rag_query_logs', array['select', 'insert']),
            ('rag_query_log_chunks', array['select', 'insert'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I as restrictive for %s to rag_app, rag_publisher %s %s',
            'own_tenant_' || belt.command,
            belt.table_name,
            belt.command,
            case when belt.command <> 'insert' then format('using (%s)', same_tenant) end,
            case when belt.command in ('insert', 'update') then format('with check (%s)', same_tenant) end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'own_tenant_' || belt.command, belt.table_name, 'Never across tenants'
        );
    end loop;
end
$$;

-- Access classes: the caller sees its own.
create policy read_classes on rag_access_classes
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_classes on rag_access_classes is 'The classes that the principal may read';

-- Memberships: owner and member see them; changing them is the operator's.
create policy read_members on rag_project_members
for select to rag_app, rag_publisher
using (owner_user_id = (select my_user_id()) or member_user_id = (select my_user_id()));
comment on policy read_members on rag_project_members is 'Projects that the principal shares or has been given';

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
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_documents on rag_documents is 'Documents of the classes that the principal may read';

create policy add_documents on rag_documents
for insert to rag_app, rag_publisher
with check (
    access_id = any((select my_writable_access_ids())::bigint[])
    -- What people read of scope, owner and tags must not lie.
    and exists (
        select 1
        from rag_access_classes as class
        where class.tenant_id = rag_documents.tenant_id
            and class.access_id = rag_documents.access_id
            and class.scope = rag_documents.scope
            and class.user_id is not distinct from rag_documents.user_id
            and class.project_id is not distinct from rag_documents.project_id
            and class.tags = rag_documents.tags
    )
);
comment on policy add_documents on rag_documents is 'Documents of the classes that the principal may write, with the scope, owner and tags of their class';

create policy change_documents on rag_documents
for update to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_documents on rag_documents is 'Documents of the classes that the principal may write';

create policy remove_documents on rag_documents
for delete to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_documents on rag_documents is 'Documents of the classes that the principal may write';

-- Chunks. They are replaced, never updated.
create policy read_chunks on rag_chunks
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_chunks on rag_chunks is 'Chunks of the classes that the principal may read';

create policy add_chunks on rag_chunks
for insert to rag_app, rag_publisher
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

create policy remove_chunks on rag_chunks
for delete to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

-- Tombstones. Nobody removes one.
create policy read_tombstones on rag_tombstones
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may read';

create policy add_tombstones on rag_tombstones
for insert to rag_app, rag_publisher
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

create policy raise_tombstones on rag_tombstones
for update to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy raise_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

-- Query logs: each user's own. A principal without a user writes them and reads none.
create policy read_logs on rag_query_logs
for select to rag_app, rag_publisher
using (user_id = (select my_user_id()));
comment on policy read_logs on rag_query_logs is 'The principal''s own questions';

create policy add_logs on rag_query_logs
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_logs on rag_query_logs is 'The principal''s own questions';

create policy read_log_chunks on rag_query_log_chunks
for select to rag_app, rag_publisher
using (user_id = (select my_user_id()));
comment on policy read_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';

create policy add_log_chunks on rag_query_log_chunks
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';
