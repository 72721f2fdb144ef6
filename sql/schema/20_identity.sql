-- Who is asking, and which access classes are theirs. `my_principal` is the only place where the
-- session variables are read, `begin_as` the only place where they are set.

-- HMAC-SHA-256 with what the server itself has; keys hold both padded forms of their secret.
create function signature_holds(parts text[], signature text)
returns boolean
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
declare
    -- Key, expiry, code. Longer texts are not even looked at. Taken apart without a regular expression:
    -- one that counts to 64 takes 50 to 180 µs, all the rest of this function 15.
    piece constant text[] := case
        when length(signature_holds.signature) <= 128 then string_to_array(signature_holds.signature, '.')
    end;
    message bytea;
    code text;
begin
    if (cardinality(piece) = 3 and length(piece[2]) <= 12 and piece[2] ~ '^[1-9][0-9]*$') is not true then
        return false;
    end if;
    -- The time at which the transaction began: what began in time may end. The service signs for a
    -- minute, `rag db psql` for half a day; nothing is signed for longer.
    if cast(piece[2] as numeric) - extract(epoch from now()) not between 0 and 43200 then
        return false;
    end if;
    -- The expiry comes before whatever may vary in number.
    message := convert_to(
        array_to_json(parts[1:4] || piece[2] || parts[5:])::text,
        'UTF8'
    );
    select encode(sha256(key.outer_pad || sha256(key.inner_pad || message)), 'hex') into code
    from rag_signing_keys as key
    where key.key_id = piece[1];
    return coalesce(code = piece[3], false);
end
$$;

comment on function signature_holds(text[], text) is 'Whether a signature, key.expiry.code, is one of the service over these values: the code is HMAC-SHA-256 of the JSON array of the first four, the expiry and the others. Expiry in seconds since 1970, compared with the start of the transaction';

create function my_principal(
    out tenant_id text, out user_id bigint, out project_id text, out tags text[],
    out projects text[], out user_scope text
)
returns setof record
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := current_setting('app.tenant_id', true);
    users constant text := current_setting('app.user_id', true);
    project constant text := coalesce(current_setting('app.project_id', true), '');
    tag_list constant text := current_setting('app.tags', true);
begin
    if session_user in ('rag_app', 'rag_publisher', 'rag_worker') then
        -- Malformed is nobody, without an error. The list of tags is checked by a pattern and not by
        -- `is json`, which runs out of stack on deep nesting and lets through escapes that jsonb
        -- refuses with an error.
        if (
            length(tenant) between 1 and 128 and tenant !~ '[[:cntrl:]]'
            and users ~ '^(0|[1-9][0-9]{0,17})$'
            and length(project) <= 128 and project !~ '[[:cntrl:]]'
            and octet_length(tag_list) <= 65536
            and tag_list ~ '^[ \t\n\r]*\[[ \t\n\r]*("([^"\\[:cntrl:]]|\\["\\/])*"([ \t\n\r]*,[ \t\n\r]*"([^"\\[:cntrl:]]|\\["\\/])*")*)?[ \t\n\r]*\][ \t\n\r]*$'
        ) is true then
            tags := array(select jsonb_array_elements_text(cast(tag_list as jsonb)));
            -- Whoever has the password of the service can set variables; only the service can sign.
            if signature_holds(
                array[cast(session_user as text), tenant, users, project] || tags,
                current_setting('app.signature', true)
            ) then
                tenant_id := tenant;
                user_id := nullif(cast(users as bigint), 0);
                project_id := nullif(project, '');
                tags := case when tags = '{}' then array['public'] else tags end;
                return next;
            end if;
        end if;
    elsif (select count(*) from rag_analysts as analyst where analyst.role_name = session_user) = 1 then
        return query
        select
            analyst.tenant_id,
            cast(null as bigint),
            cast(null as text),
            analyst.tags,
            analyst.projects,
            analyst.user_scope
        from rag_analysts as analyst
        where analyst.role_name = session_user;
    end if;
end
$$;

comment on function my_principal() is 'The principal of this session: one row, or none. For the logins of the service it is what the session variables name, when they are well-formed and app.signature was made by the service over exactly them; app.user_id 0 is a principal without a user. For an analyst it is their row in rag_analysts, user_scope saying so, and the variables mean nothing. The only place where the variables are read';

create function begin_as(tenant_id text, user_id bigint, project_id text, tags text[], signature text)
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
    execute format('set local app.signature = %L', coalesce(begin_as.signature, ''));
    -- Nobody would see nothing, without an error; that is right for an attacker and a riddle for
    -- an operator whose key or clock is wrong.
    if not exists (select from my_principal()) then
        raise exception 'the signature of this identity does not hold'
            using errcode = 'invalid_authorization_specification';
    end if;
end
$$;

comment on function begin_as(text, bigint, text, text[], text) is 'Sets the principal for the rest of the transaction; first statement of each, outside any savepoint. user_id null: no user, public rows only; project_id null: no project, *: all of the user''s. Raises 42501 when another principal is already set, 28000 when the signature does not hold';

create function my_tenant_id()
returns text
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return (select me.tenant_id from my_principal() as me);
end
$$;

comment on function my_tenant_id() is 'The principal''s tenant, null for nobody';

create function my_user_id()
returns bigint
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return (select me.user_id from my_principal() as me);
end
$$;

comment on function my_user_id() is 'The principal''s user, null for nobody, for an analyst and for a principal without a user';

create function my_tags()
returns text[]
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return coalesce((select me.tags from my_principal() as me), '{}');
end
$$;

comment on function my_tags() is 'The principal''s tags, none for nobody';

create function i_am_analyst()
returns boolean
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return exists (select from my_principal() as me where me.user_scope is not null);
end
$$;

comment on function i_am_analyst() is 'Whether the principal is a person of rag_analysts';

create function classes_of(me record)
returns bigint[]
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
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

comment on function classes_of(record) is 'The access classes that a principal, a row of my_principal(), may read';

-- STABLE and never IMMUTABLE: a plan that has folded one caller's classes would serve them to the next.
create function my_access_ids()
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
    return classes_of(me);
end
$$;

comment on function my_access_ids() is 'The access classes that the principal may read; empty for nobody. Policies compare access_id with it, evaluated once per statement';

create function my_classes()
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
        -- Asked once who speaks, which costs more than all else here. As a sub-select, so that the plan is kept.
        and class.access_id = any((select classes_of(me))::bigint[]);
end
$$;

comment on function my_classes() is 'The access classes that the principal may read, one row each, and whether it may write them: of those it may read, its own, those of projects shared for writing, and the public ones when the login is rag_publisher';

create function my_writable_access_ids()
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return array(select mine.access_id from my_classes() as mine where mine.may_write);
end
$$;

comment on function my_writable_access_ids() is 'The access classes that the principal may write; empty for nobody';

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
    return array(
        select class.access_id
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

create function tenant_lock(tenant_id text)
returns bigint
language sql
immutable
parallel safe
begin atomic
    select hashtextextended('palisade tenant ' || tenant_id, 0);
end;

comment on function tenant_lock(text) is 'Number of the advisory lock of a tenant: shared by everybody who writes, exclusive for rag.forget()';

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
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    -- Whoever is about to write in a tenant holds off its erasure until the transaction ends; taken
    -- before anything is looked up that an erasure changes.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
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

create function class_reads(access_id bigint, scope text, user_id bigint, project_id text, tags text[])
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
        from my_classes() as class
        where class.may_write
            and class.access_id = class_reads.access_id
            and class.scope = class_reads.scope
            and class.user_id is not distinct from class_reads.user_id
            and class.project_id is not distinct from class_reads.project_id
            and class.tags = class_reads.tags
    );
end
$$;

comment on function class_reads(bigint, text, bigint, text, text[]) is 'Whether a class that the principal may write has this scope, owner and tags; false for every other class';

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
        class.access_id, class.scope, class.user_id, class.project_id, class.tags, class.may_write
    from my_principal() as me
    left join my_classes() as class on true
    order by class.scope, class.user_id, class.project_id, class.tags, class.access_id;
end;

comment on function whoami() is 'The principal as the database understands it, one row for each access class that it may read (one row with nulls when there is none); no row for nobody';

create function load_service_keys(proof text)
returns table (
    key_id text, tenant_id text, secret_sha256 bytea, actions text[], scopes text[], tags text[],
    act_as boolean, user_ids bigint[], project_ids text[], expires_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- The table names tenants: the password of the service alone does not open it.
    if not signature_holds(array[cast(session_user as text), 'service_keys'], load_service_keys.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    select
        key.key_id, key.tenant_id, key.secret_sha256, key.actions, key.scopes, key.tags,
        key.act_as, key.user_ids, key.project_ids, key.expires_at
    from rag_service_keys as key
    where key.revoked_at is null
        and key.expires_at > now();
end
$$;

comment on function load_service_keys(text) is 'The service keys that are valid now, for a login that proves with a signature over its name and the word service_keys that it is the service; raises 28000 otherwise';

create function proof_holds(purpose text, proof text)
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return signature_holds(array[cast(session_user as text), proof_holds.purpose], proof_holds.proof);
end
$$;

comment on function proof_holds(text, text) is 'Whether the login proves, with a signature over its name and this word, that it is the service';
