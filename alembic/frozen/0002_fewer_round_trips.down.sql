-- As version 0.1.0 has it.

drop function claim_source_as(
    text, bigint, text, text[], text, text, bigint, text, text[], text, text, text, text, uuid, interval
);
drop function open_source(text, text, text, text, bigint, text, text[], text, text, text, text);
drop function look_at_source(bigint, text, bigint, text, text, text, text);

grant create on schema rag to rag_search;
set local role rag_search;

create or replace function class_reads(access_id bigint, scope text, user_id bigint, project_id text, tags text[])
returns boolean
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return exists (
        select
        from rag_access_classes as class
        where class.tenant_id = (select my_tenant_id())
            and class.access_id = class_reads.access_id
            and class.access_id = any((select my_writable_access_ids())::bigint[])
            and class.scope = class_reads.scope
            and class.user_id is not distinct from class_reads.user_id
            and class.project_id is not distinct from class_reads.project_id
            and class.tags = class_reads.tags
    );
end
$$;

create or replace function my_classes()
returns table (
    tenant_id text, access_id bigint, scope text, user_id bigint, project_id text, tags text[], may_write boolean
)
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        return;
    end if;
    return query
    select
        class.tenant_id,
        class.access_id,
        class.scope,
        class.user_id,
        class.project_id,
        class.tags,
        (me.user_scope is null and case class.scope
            when 'public' then session_user = 'rag_publisher'
            else class.user_id = me.user_id or exists (
                select 1
                from rag_project_members as membership
                where membership.tenant_id = me.tenant_id
                    and membership.member_user_id = me.user_id
                    and membership.owner_user_id = class.user_id
                    and membership.project_id = class.project_id
                    and membership.may_write
            )
        end) is true
    from rag_access_classes as class
    where class.tenant_id = me.tenant_id
        and class.access_id = any((select my_access_ids())::bigint[]);
end
$$;

create or replace function my_access_ids()
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
declare
    me record;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        return '{}';
    end if;
    if me.user_scope is not null then
        return array(
            select class.access_id
            from rag_access_classes as class
            where class.tenant_id = me.tenant_id
                and class.tags && me.tags
                and case class.scope
                    when 'public' then true
                    when 'project' then '*' = any(me.projects) or class.project_id = any(me.projects)
                    when 'user' then me.user_scope = 'text'
                end
        );
    end if;
    return array(
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'public'
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'user'
            and class.user_id = me.user_id
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'project'
            and class.user_id = me.user_id
            and (me.project_id = '*' or class.project_id = me.project_id)
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_project_members as membership
        join rag_access_classes as class
            on class.tenant_id = membership.tenant_id
            and class.scope = 'project'
            and class.user_id = membership.owner_user_id
            and class.project_id = membership.project_id
        where membership.tenant_id = me.tenant_id
            and membership.member_user_id = me.user_id
            and (me.project_id = '*' or membership.project_id = me.project_id)
            and class.tags && me.tags
    );
end
$$;

set local role rag_owner;

drop function classes_of(record);
revoke create on schema rag from rag_search;
