-- What operators do in every tenant: keys, erasure, and why a document is visible. The functions belong to
-- rag_steward, which sees keys of rows and never a text; only rag_operator may call them.

create function add_signing_key(out key_id text, out secret text)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    -- Three times 122 random bits.
    drawn constant bytea := sha256(
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
    );
    padded constant bytea := drawn || decode(repeat('00', 32), 'hex');
    inner_pad bytea := padded;
    outer_pad bytea := padded;
begin
    for place in 0..63 loop
        inner_pad := set_byte(inner_pad, place, get_byte(padded, place) # 54); -- 0x36
        outer_pad := set_byte(outer_pad, place, get_byte(padded, place) # 92); -- 0x5c
    end loop;
    key_id := substr(md5(gen_random_uuid()::text), 1, 8);
    secret := encode(drawn, 'hex');
    insert into rag_signing_keys (key_id, inner_pad, outer_pad)
    values (key_id, inner_pad, outer_pad);
end
$$;

comment on function add_signing_key() is 'Makes a key with which the service signs identities, valid at once beside the others; its secret, 32 bytes in hexadecimal, is shown this once';

create function list_signing_keys()
returns table (key_id text, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select key.key_id, key.created_at
    from rag_signing_keys as key
    order by key.created_at, key.key_id;
end
$$;

comment on function list_signing_keys() is 'The signing keys that are valid, oldest first, without their secrets';

create function retire_signing_key(key_id text)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_signing_keys as key where key.key_id = retire_signing_key.key_id;
    return found;
end
$$;

comment on function retire_signing_key(text) is 'Ends a signing key: what was signed with it is worthless from the next transaction on; false when there was none';

create function erasure_kind(
    tenant_id text, user_id bigint, project_id text, source_type text, source_id text
)
returns text
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    if coalesce(tenant_id, '') = ''
        or (source_type is not null and source_id is null)
        or (source_id is not null and (user_id is not null or project_id is not null)) then
        raise exception 'name a tenant, and at most one of: a user; a project, with its owner or without; a source'
            using errcode = 'invalid_parameter_value';
    end if;
    return case
        when source_id is not null then 'source'
        when project_id is not null then 'project'
        when user_id is not null then 'user'
        else 'tenant'
    end;
end
$$;

comment on function erasure_kind(text, bigint, text, text, text) is 'What the arguments of forget() name: tenant, user, project or source; raises 22023 for any other combination';

create function forget(
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    source_type text default null,
    source_id text default null
)
returns table (table_name text, rows_removed bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    kind constant text := erasure_kind(
        forget.tenant_id, forget.user_id, forget.project_id, forget.source_type, forget.source_id
    );
    class_ids bigint[];
    document_ids uuid[];
    removed bigint;
    total bigint := 0;
    digest constant bytea := erasure_digest(kind, forget.tenant_id, case kind
        when 'tenant' then '{}'
        when 'user' then array[forget.user_id::text]
        when 'project' then array_remove(array[forget.project_id, forget.user_id::text], null)
        when 'source' then array_remove(array[forget.source_id, forget.source_type], null)
    end);
begin
    -- Whoever writes in the tenant holds this lock shared: they are done, or wait and then find the
    -- erasure and give up.
    perform pg_advisory_xact_lock(tenant_lock(forget.tenant_id));

    class_ids := array(
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = forget.tenant_id
            and case kind
                when 'tenant' then true
                when 'user' then class.user_id = forget.user_id
                when 'project' then
                    class.project_id = forget.project_id
                    and (forget.user_id is null or class.user_id = forget.user_id)
                else false
            end
    );
    document_ids := array(
        select document.id
        from rag_documents as document
        where document.tenant_id = forget.tenant_id
            and case kind
                when 'source' then
                    document.source_id = forget.source_id
                    and (forget.source_type is null or document.source_type = forget.source_type)
                else document.access_id = any(class_ids)
            end
    );

    select count(*) into removed
    from rag_chunks as chunk
    where chunk.tenant_id = forget.tenant_id and chunk.document_id = any(document_ids);
    return query select 'rag_chunks', removed;
    total := total + removed;

    delete from rag_documents as document
    where document.tenant_id = forget.tenant_id and document.id = any(document_ids);
    get diagnostics removed = row_count;
    return query select 'rag_documents', removed;
    total := total + removed;

    -- Of others' questions only the hits on what is erased.
    delete from rag_query_log_chunks as hit
    where hit.tenant_id = forget.tenant_id
        and (
            kind = 'tenant'
            or (kind = 'user' and hit.user_id = forget.user_id)
            or hit.document_id = any(document_ids)
        );
    get diagnostics removed = row_count;
    return query select 'rag_query_log_chunks', removed;
    total := total + removed;

    delete from rag_query_logs as log
    where log.tenant_id = forget.tenant_id
        and case kind
            when 'tenant' then true
            when 'user' then log.user_id = forget.user_id
            when 'project' then
                log.project_id = forget.project_id
                and (forget.user_id is null or log.user_id = forget.user_id or exists (
                    select
                    from rag_project_members as membership
                    where membership.tenant_id = forget.tenant_id
                        and membership.owner_user_id = forget.user_id
                        and membership.project_id = forget.project_id
                        and membership.member_user_id = log.user_id
                ))
            else false
        end;
    get diagnostics removed = row_count;
    return query select 'rag_query_logs', removed;
    total := total + removed;

    delete from rag_assertions as assertion
    where assertion.tenant_id = forget.tenant_id
        and case kind
            when 'tenant' then true
            when 'user' then assertion.user_id = forget.user_id
            when 'project' then
                assertion.project_id = forget.project_id
                and (forget.user_id is null or assertion.user_id = forget.user_id)
            else false
        end;
    get diagnostics removed = row_count;
    return query select 'rag_assertions', removed;
    total := total + removed;

    delete from rag_project_members as membership
    where membership.tenant_id = forget.tenant_id
        and case kind
            when 'tenant' then true
            when 'user' then forget.user_id in (membership.owner_user_id, membership.member_user_id)
            when 'project' then
                membership.project_id = forget.project_id
                and (forget.user_id is null or membership.owner_user_id = forget.user_id)
            else false
        end;
    get diagnostics removed = row_count;
    return query select 'rag_project_members', removed;
    total := total + removed;

    delete from rag_tombstones as tombstone
    where tombstone.tenant_id = forget.tenant_id and tombstone.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_tombstones', removed;
    total := total + removed;

    delete from rag_access_classes as class
    where class.tenant_id = forget.tenant_id and class.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_access_classes', removed;
    total := total + removed;

    if kind = 'tenant' then
        delete from rag_service_keys as key where key.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_service_keys', removed;
        total := total + removed;
        delete from rag_analysts as analyst where analyst.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_analysts', removed;
        total := total + removed;
        delete from rag_erasures as erasure where erasure.tenant_id = forget.tenant_id;
    end if;

    insert into rag_erasures (tenant_id, kind, subject_digest, rows_removed, erased_by)
    values (
        case kind when 'tenant' then encode(digest, 'hex') else forget.tenant_id end,
        kind, digest, total, session_user
    );
end
$$;

comment on function forget(text, bigint, text, text, text) is 'Erases a tenant; or a user of it with all that they own, asked and share; or a project, of one owner when user_id is given; or a source, in all classes. One transaction; returns the rows removed from each table, and leaves a digest, so that an ingest that began before gives up. Raises 22023 for arguments that name none of these';

create function count_traces(
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    source_type text default null,
    source_id text default null
)
returns table (table_name text, rows_left bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    kind constant text := erasure_kind(
        count_traces.tenant_id, count_traces.user_id, count_traces.project_id, count_traces.source_type,
        count_traces.source_id
    );
begin
    -- Written apart from forget(), along the readable columns and not along classes: it is its probe.
    return query
    select 'rag_documents', count(*)
    from rag_documents as document
    where document.tenant_id = count_traces.tenant_id
        and (kind <> 'user' or document.user_id = count_traces.user_id)
        and (
            kind <> 'project'
            or document.project_id = count_traces.project_id
            and (count_traces.user_id is null or document.user_id = count_traces.user_id)
        )
        and (
            kind <> 'source'
            or document.source_id = count_traces.source_id
            and (count_traces.source_type is null or document.source_type = count_traces.source_type)
        )
    union all
    select 'rag_chunks', count(*)
    from rag_chunks as chunk
    left join rag_documents as document
        on document.tenant_id = chunk.tenant_id
        and document.access_id = chunk.access_id
        and document.id = chunk.document_id
    where chunk.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or document.id is null or (
            (kind <> 'user' or document.user_id = count_traces.user_id)
            and (
                kind <> 'project'
                or document.project_id = count_traces.project_id
                and (count_traces.user_id is null or document.user_id = count_traces.user_id)
            )
            and (
                kind <> 'source'
                or document.source_id = count_traces.source_id
                and (count_traces.source_type is null or document.source_type = count_traces.source_type)
            )
        ))
    union all
    select 'rag_query_logs', count(*)
    from rag_query_logs as log
    where log.tenant_id = count_traces.tenant_id
        and kind in ('tenant', 'user')
        and (kind = 'tenant' or log.user_id = count_traces.user_id)
    union all
    select 'rag_query_log_chunks', count(*)
    from rag_query_log_chunks as hit
    where hit.tenant_id = count_traces.tenant_id
        and kind in ('tenant', 'user')
        and (kind = 'tenant' or hit.user_id = count_traces.user_id)
    union all
    select 'rag_assertions', count(*)
    from rag_assertions as assertion
    where assertion.tenant_id = count_traces.tenant_id
        and kind in ('tenant', 'user')
        and (kind = 'tenant' or assertion.user_id = count_traces.user_id)
    union all
    select 'rag_project_members', count(*)
    from rag_project_members as membership
    where membership.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (kind <> 'user' or count_traces.user_id in (membership.owner_user_id, membership.member_user_id))
        and (
            kind <> 'project'
            or membership.project_id = count_traces.project_id
            and (count_traces.user_id is null or membership.owner_user_id = count_traces.user_id)
        )
    union all
    select 'rag_access_classes', count(*)
    from rag_access_classes as class
    where class.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (kind <> 'user' or class.user_id = count_traces.user_id)
        and (
            kind <> 'project'
            or class.project_id = count_traces.project_id
            and (count_traces.user_id is null or class.user_id = count_traces.user_id)
        )
    union all
    select 'rag_tombstones', count(*)
    from rag_tombstones as tombstone
    where tombstone.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_service_keys', count(*)
    from rag_service_keys as key
    where key.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_analysts', count(*)
    from rag_analysts as analyst
    where analyst.tenant_id = count_traces.tenant_id and kind = 'tenant';
end
$$;

comment on function count_traces(text, bigint, text, text, text) is 'How many rows each table still has of what the arguments name, as in forget(), after which all are 0';

create function expire_logs(older_than interval, tenant_id text default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    removed bigint;
    total bigint;
begin
    if expire_logs.older_than is null or expire_logs.older_than < interval '0' then
        raise exception 'older_than is an age' using errcode = 'invalid_parameter_value';
    end if;
    delete from rag_query_logs as log
    where (expire_logs.tenant_id is null or log.tenant_id = expire_logs.tenant_id)
        and log.created_at < now() - expire_logs.older_than;
    get diagnostics total = row_count;
    delete from rag_assertions as assertion
    where (expire_logs.tenant_id is null or assertion.tenant_id = expire_logs.tenant_id)
        and assertion.created_at < now() - expire_logs.older_than;
    get diagnostics removed = row_count;
    return total + removed;
end
$$;

comment on function expire_logs(interval, text) is 'Removes questions, what they got back, and assertions of service keys that are older, in one tenant or in all; returns how many questions and assertions';

create function explain_access(
    document_id uuid,
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    tags text[] default '{}'
)
returns table (
    access_id bigint, scope text, owner_user_id bigint, owner_project_id text, class_tags text[],
    clause text, holds boolean, visible boolean
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    held constant text[] := case when coalesce(explain_access.tags, '{}') = '{}' then array['public'] else explain_access.tags end;
begin
    return query
    with judged as (
        select
            class.*,
            class.tenant_id = explain_access.tenant_id as same_tenant,
            class.tags && held as overlapping,
            class.scope = 'public' as is_public,
            class.scope = 'user' and (class.user_id = explain_access.user_id) is true as is_own,
            class.scope = 'project' and (class.user_id = explain_access.user_id) is true as is_own_project,
            class.scope = 'project' and exists (
                select
                from rag_project_members as membership
                where membership.tenant_id = explain_access.tenant_id
                    and membership.owner_user_id = class.user_id
                    and membership.project_id = class.project_id
                    and membership.member_user_id = explain_access.user_id
            ) as is_shared,
            (explain_access.project_id in ('*', class.project_id)) is true as is_chosen
        from rag_documents as document
        join rag_access_classes as class
            on class.tenant_id = document.tenant_id
            and class.access_id = document.access_id
        where document.id = explain_access.document_id
    )

    select
        judged.access_id,
        judged.scope,
        judged.user_id,
        judged.project_id,
        judged.tags,
        verdict.clause,
        verdict.holds,
        judged.same_tenant and judged.overlapping and (
            judged.is_public or judged.is_own or (judged.is_chosen and (judged.is_own_project or judged.is_shared))
        )
    from judged
    cross join lateral (
        values
            (1, 'the document is of the principal''s tenant', judged.same_tenant),
            (2, 'a tag of the class is the principal''s', judged.overlapping),
            (3, 'the class is public', judged.is_public),
            (4, 'the class is the principal''s own', judged.is_own),
            (5, 'the project is the principal''s own', judged.is_own_project),
            (6, 'the project is shared with the principal', judged.is_shared),
            (7, 'the principal names the project, or *', judged.is_chosen)
    ) as verdict (place, clause, holds)
    order by judged.access_id, verdict.place;
end
$$;

comment on function explain_access(uuid, text, bigint, text, text[]) is 'Why a principal of the service sees a document or does not: its class, and each clause of the rule. Visible: the first two and one of public, own, or a project of theirs or shared with them that they name. No row for a document that is not there';
