-- Who is asking, and which access classes are theirs. `my_principal` is the only place where the
-- session variables are read, `begin_as` the only place where they are set.

create function begin_as(tenant_id text, user_id bigint, project_id text, tags text[])
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    wanted text[] := array[
        begin_as.tenant_id,
        coalesce(begin_as.user_id, 0)::text,
        coalesce(begin_as.project_id, ''),
        array_to_json(coalesce(begin_as.tags, '{}'))::text
    ];
    -- After a transaction that set them, the variables read '' and not null.
    present text[] := array[
        nullif(current_setting('app.tenant_id', true), ''),
        nullif(current_setting('app.user_id', true), ''),
        nullif(current_setting('app.project_id', true), ''),
        nullif(current_setting('app.tags', true), '')
    ];
begin
    if coalesce(begin_as.tenant_id, '') = '' then
        raise exception 'a principal has a tenant' using errcode = 'insufficient_privilege';
    end if;
    if array_remove(present, null) <> '{}' and present is distinct from array[
        wanted[1], wanted[2], nullif(wanted[3], ''), wanted[4]
    ] then
        raise exception 'this transaction already has another principal'
            using errcode = 'insufficient_privilege';
    end if;
    -- set_config() does not reach the workers of a distributed database; set local does.
    execute format('set local app.tenant_id = %L', wanted[1]);
    execute format('set local app.user_id = %L', wanted[2]);
    execute format('set local app.project_id = %L', wanted[3]);
    execute format('set local app.tags = %L', wanted[4]);
end
$$;

comment on function begin_as(text, bigint, text, text[]) is 'Sets the principal for the rest of the transaction; first statement of each, outside any savepoint. user_id null: no user, public rows only; project_id null: no project, *: all of the user''s. Raises when another principal is already set';

create function my_principal(out tenant_id text, out user_id bigint, out project_id text, out tags text[])
returns setof record
language sql
stable
parallel safe
begin atomic
    with variable as materialized (
        select
            current_setting('app.tenant_id', true) as tenant,
            current_setting('app.user_id', true) as users,
            coalesce(current_setting('app.project_id', true), '') as project,
            current_setting('app.tags', true) as tags
    ),

    -- Each null means malformed. The order of the tests matters, so it is spelled out as cases: a
    -- cast is reached only by text that it takes. The list of tags is checked by a pattern and not
    -- by `is json`, which runs out of stack on deep nesting and lets through escapes that jsonb
    -- refuses with an error.
    parsed as materialized (
        select
            case
                when length(tenant) between 1 and 128 and tenant !~ '[[:cntrl:]]' then tenant
            end as tenant_id,
            case
                when users ~ '^(0|[1-9][0-9]{0,17})$' then cast(users as bigint)
            end as user_id,
            case
                when length(project) <= 128 and project !~ '[[:cntrl:]]' then project
            end as project_id,
            case
                when octet_length(tags) <= 65536
                    and tags ~ '^\s*\[\s*("([^"\\[:cntrl:]]|\\["\\/])*"(\s*,\s*"([^"\\[:cntrl:]]|\\["\\/])*")*)?\s*\]\s*$'
                    then array(select jsonb_array_elements_text(cast(tags as jsonb)))
            end as tags
        from variable
    )

    select
        parsed.tenant_id,
        nullif(parsed.user_id, 0),
        nullif(parsed.project_id, ''),
        case when parsed.tags = '{}' then array['public'] else parsed.tags end
    from parsed
    where session_user in ('rag_app', 'rag_publisher')
        and parsed.tenant_id is not null
        and parsed.user_id is not null
        and parsed.project_id is not null
        and parsed.tags is not null;
end;

comment on function my_principal() is 'The principal that the session variables name: one row, or none when a variable is missing, empty (but for app.project_id) or malformed, or when the login is not one of the service. The only place where the variables are read. app.user_id 0 is a principal without a user';

create function my_tenant_id()
returns text
language sql
stable
parallel safe
begin atomic
    select me.tenant_id from my_principal() as me;
end;

comment on function my_tenant_id() is 'The principal''s tenant, null for nobody';

create function my_user_id()
returns bigint
language sql
stable
parallel safe
begin atomic
    select me.user_id from my_principal() as me;
end;

comment on function my_user_id() is 'The principal''s user, null for nobody and for a principal without a user';

-- STABLE and never IMMUTABLE: a plan that has folded one caller's classes would serve them to the next.
create function my_access_ids()
returns bigint[]
language sql
stable
security definer
parallel safe
set search_path = rag, pg_temp
begin atomic
    select coalesce(array_agg(mine.access_id), '{}')
    from my_principal() as me
    cross join lateral (
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
    ) as mine;
end;

comment on function my_access_ids() is 'The access classes that the principal may read; empty for nobody. Policies compare access_id with it, evaluated once per statement';

create function my_writable_access_ids()
returns bigint[]
language sql
stable
security definer
parallel safe
set search_path = rag, pg_temp
begin atomic
    select coalesce(array_agg(class.access_id), '{}')
    from my_principal() as me
    join rag_access_classes as class
        on class.tenant_id = me.tenant_id
        and class.access_id = any((select my_access_ids())::bigint[])
    where case class.scope
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
    end;
end;

comment on function my_writable_access_ids() is 'The access classes that the principal may write: of those it may read, its own, those of projects shared for writing, and the public ones when the login is rag_publisher';

create function narrowed_access_ids(only_scope text)
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    if narrowed_access_ids.only_scope is null
        or narrowed_access_ids.only_scope in ('organization', 'documents') then
        return my_access_ids();
    end if;
    if narrowed_access_ids.only_scope not in ('public', 'user', 'project') then
        raise exception 'unknown scope' using
            errcode = 'invalid_parameter_value',
            hint = 'One of public, user, project, organization, documents, or null for all that is visible.';
    end if;
    return (
        select coalesce(array_agg(class.access_id), '{}')
        from my_principal() as me
        join rag_access_classes as class
            on class.tenant_id = me.tenant_id
            and class.access_id = any((select my_access_ids())::bigint[])
        where case narrowed_access_ids.only_scope
            when 'public' then class.scope = 'public'
            when 'user' then class.user_id = me.user_id
            -- "That project only": a principal of all projects has not named one.
            when 'project' then class.scope = 'project' and me.project_id <> '*'
        end
    );
end
$$;

comment on function narrowed_access_ids(text) is 'Of the classes that the principal may read, those of a request''s scope. public; user: all that the user owns, projects included; project: the one that the principal names; organization, documents and null: all. Raises 22023 for any other word';

create function access_class(scope text, user_id bigint, project_id text, tags text[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    sorted_tags text[] := array(select distinct tag from unnest(access_class.tags) as tag order by tag);
    digest bytea;
    found_id bigint;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    if sorted_tags = '{}' then
        sorted_tags := array['public'];
    end if;
    -- What one cannot read one cannot write: otherwise the next version would not find this one.
    if not sorted_tags && me.tags then
        raise exception 'none of the tags is the principal''s' using errcode = 'insufficient_privilege';
    end if;
    if (case access_class.scope
        when 'public' then session_user = 'rag_publisher'
        when 'user' then access_class.user_id = me.user_id
        when 'project' then
            (me.project_id = '*' or access_class.project_id = me.project_id)
            and (access_class.user_id = me.user_id or exists (
                select 1
                from rag_project_members as membership
                where membership.tenant_id = me.tenant_id
                    and membership.member_user_id = me.user_id
                    and membership.owner_user_id = access_class.user_id
                    and membership.project_id = access_class.project_id
                    and membership.may_write
            ))
        else false
    end) is not true then
        raise exception 'the principal may not write to this scope' using errcode = 'insufficient_privilege';
    end if;

    digest := sha256(convert_to(array_to_json(sorted_tags)::text, 'UTF8'));
    loop
        select class.access_id into found_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = access_class.scope
            and class.user_id is not distinct from access_class.user_id
            and class.project_id is not distinct from access_class.project_id
            and class.tags_digest = digest;
        exit when found;
        insert into rag_access_classes (tenant_id, scope, user_id, project_id, tags, tags_digest)
        values (me.tenant_id, access_class.scope, access_class.user_id, access_class.project_id, sorted_tags, digest)
        on conflict do nothing;
    end loop;
    return found_id;
end
$$;

comment on function access_class(text, bigint, text, text[]) is 'The access class for a document that the principal wants to write, made when it is the first; raises 42501 when the principal may not write there';

create function whoami(
    out tenant_id text, out user_id bigint, out project_id text, out tags text[],
    out access_id bigint, out scope text, out class_user_id bigint, out class_project_id text,
    out class_tags text[], out may_write boolean
)
returns setof record
language sql
stable
begin atomic
    select
        me.tenant_id, me.user_id, me.project_id, me.tags,
        class.access_id, class.scope, class.user_id, class.project_id, class.tags,
        class.access_id = any((select my_writable_access_ids())::bigint[])
    from my_principal() as me
    left join rag_access_classes as class on class.tenant_id = me.tenant_id
    order by class.scope, class.user_id, class.project_id, class.tags, class.access_id;
end;

comment on function whoami() is 'The principal as the database understands it, one row for each access class that it may read (one row with nulls when there is none); no row for nobody';
