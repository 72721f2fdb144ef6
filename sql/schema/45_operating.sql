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

comment on function retire_signing_key(text) is 'Ends a signing key: what was signed with it is worthless from the next statement on; false when there was none';

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
    -- 0 and * name nobody: in the logs they stand for whoever asked without a user, or in all projects.
    if coalesce(tenant_id, '') = ''
        or user_id <= 0
        or project_id in ('', '*')
        or source_id = ''
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
    -- Class and id of each document: an id alone may be a neighbour's as well.
    document_classes bigint[];
    document_ids uuid[];
    -- A job has a kind of its own.
    erasing constant text := kind;
    -- Numbers of jobs in the queue.
    queue_ids bigint[];
    -- Whose questions and assertions go; null for everybody's.
    askers bigint[];
    removed_bytes bigint;
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
    select coalesce(array_agg(document.access_id), '{}'), coalesce(array_agg(document.id), '{}')
    into document_classes, document_ids
    from rag_documents as document
    where document.tenant_id = forget.tenant_id
        and case kind
            when 'source' then
                document.source_id = forget.source_id
                and (forget.source_type is null or document.source_type = forget.source_type)
            else document.access_id = any(class_ids)
        end;
    -- In a project of one owner its members asked as well.
    if forget.user_id is not null then
        askers := array[forget.user_id] || array(
            select membership.member_user_id
            from rag_project_members as membership
            where membership.tenant_id = forget.tenant_id
                and membership.owner_user_id = forget.user_id
                and membership.project_id = forget.project_id
        );
    end if;

    -- They go with their documents.
    select count(*) into removed
    from unnest(document_classes, document_ids) as erased (access_id, id)
    join rag_conversation_summaries as summary
        on summary.tenant_id = forget.tenant_id
        and summary.access_id = erased.access_id
        and summary.document_id = erased.id;
    return query select 'rag_conversation_summaries', removed;
    total := total + removed;

    select count(*) into removed
    from unnest(document_classes, document_ids) as erased (access_id, id)
    join rag_chunks as chunk
        on chunk.tenant_id = forget.tenant_id
        and chunk.access_id = erased.access_id
        and chunk.document_id = erased.id;
    return query select 'rag_chunks', removed;
    total := total + removed;

    with gone as (
        delete from rag_documents as document
        using unnest(document_classes, document_ids) as erased (access_id, id)
        where document.tenant_id = forget.tenant_id
            and document.access_id = erased.access_id
            and document.id = erased.id
        returning document.body_bytes
    )

    select count(*), coalesce(sum(gone.body_bytes), 0) into removed, removed_bytes from gone;
    return query select 'rag_documents', removed;
    total := total + removed;
    if kind <> 'tenant' and removed > 0 then
        insert into rag_usage as usage (tenant_id, slot, documents, bytes)
        values (forget.tenant_id, 0, -removed, -removed_bytes)
        on conflict (tenant_id, slot) do update
        set documents = usage.documents + excluded.documents,
            bytes = usage.bytes + excluded.bytes;
    end if;

    -- Of others' feedback only what is about that which is erased.
    delete from rag_feedback as given
    where given.tenant_id = forget.tenant_id
        and (
            given.document_id = any(document_ids)
            or (
                kind <> 'source'
                and (askers is null or given.user_id = any(askers))
                and (kind <> 'project' or exists (
                    select
                    from rag_query_logs as log
                    where log.tenant_id = given.tenant_id
                        and log.user_id = given.user_id
                        and log.id = given.query_id
                        and log.project_id = forget.project_id
                ))
            )
        );
    get diagnostics removed = row_count;
    return query select 'rag_feedback', removed;
    total := total + removed;

    -- Of others' questions only the hits on what is erased.
    delete from rag_query_log_chunks as hit
    where hit.tenant_id = forget.tenant_id
        and (
            hit.document_id = any(document_ids)
            or (
                kind <> 'source'
                and (askers is null or hit.user_id = any(askers))
                and (kind <> 'project' or exists (
                    select
                    from rag_query_logs as log
                    where log.tenant_id = hit.tenant_id
                        and log.user_id = hit.user_id
                        and log.id = hit.query_id
                        and log.project_id = forget.project_id
                ))
            )
        );
    get diagnostics removed = row_count;
    return query select 'rag_query_log_chunks', removed;
    total := total + removed;

    delete from rag_query_logs as log
    where log.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or log.user_id = any(askers))
        and (kind <> 'project' or log.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_query_logs', removed;
    total := total + removed;

    delete from rag_assertions as assertion
    where assertion.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or assertion.user_id = any(askers))
        and (kind <> 'project' or assertion.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_assertions', removed;
    total := total + removed;

    delete from rag_tags as tag
    where tag.tenant_id = forget.tenant_id
        and (kind = 'tenant' or (kind = 'user' and tag.owner_user_id = forget.user_id));
    get diagnostics removed = row_count;
    return query select 'rag_tags', removed;
    total := total + removed;

    delete from rag_retractions as retraction
    where retraction.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or retraction.user_id = any(askers))
        and (kind <> 'project' or retraction.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_retractions', removed;
    total := total + removed;

    with gone as (
        delete from rag_jobs as job
        where job.tenant_id = forget.tenant_id
            and case erasing
                when 'source' then
                    job.source_id = forget.source_id
                    and (forget.source_type is null or job.source_type = forget.source_type)
                else
                    (askers is null or job.user_id = any(askers))
                    and (erasing <> 'project' or job.project_id = forget.project_id)
            end
        returning job.queue_id
    )
    select count(*), coalesce(array_agg(one.queue_id) filter (where one.queue_id is not null), '{}')
    into removed, queue_ids
    from gone as one;
    perform drop_queued(queue_ids);
    return query select 'rag_jobs', removed;
    total := total + removed;

    -- Of a claim nobody can tell what it is about; without it somebody embeds twice, once.
    delete from rag_claims as claim where claim.tenant_id = forget.tenant_id;
    get diagnostics removed = row_count;
    return query select 'rag_claims', removed;
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

    delete from rag_synchronisations as run
    where run.tenant_id = forget.tenant_id and run.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_synchronisations', removed;
    total := total + removed;

    delete from rag_conversation_messages as message
    where message.tenant_id = forget.tenant_id and message.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_conversation_messages', removed;
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
        delete from rag_calibrations as calibration where calibration.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_calibrations', removed;
        total := total + removed;
        delete from rag_prompts as prompt where prompt.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_prompts', removed;
        total := total + removed;
        delete from rag_limits as limits where limits.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_limits', removed;
        total := total + removed;
        delete from rag_rate_buckets as bucket where bucket.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_rate_buckets', removed;
        total := total + removed;
        delete from rag_usage as usage where usage.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_usage', removed;
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

comment on function forget(text, bigint, text, text, text) is 'Erases a tenant; or a user of it with all that they own, asked, rated and share, tags included; or a project, of one owner when user_id is given, with what was asked in it; or a source, in all classes. One transaction; returns the rows removed from each table, and leaves a digest, so that an ingest that began before gives up. Raises 22023 for arguments that name none of these';

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
    with its_documents as (
        select document.access_id, document.id
        from rag_documents as document
        where document.tenant_id = count_traces.tenant_id
            and (count_traces.user_id is null or document.user_id = count_traces.user_id)
            and (count_traces.project_id is null or document.project_id = count_traces.project_id)
            and (count_traces.source_id is null or document.source_id = count_traces.source_id)
            and (count_traces.source_type is null or document.source_type = count_traces.source_type)
    ),

    its_classes as (
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.user_id is null or class.user_id = count_traces.user_id)
            and (count_traces.project_id is null or class.project_id = count_traces.project_id)
    ),

    its_members as (
        select membership.member_user_id
        from rag_project_members as membership
        where membership.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.project_id is null or membership.project_id = count_traces.project_id)
            and (
                count_traces.user_id is null
                or membership.owner_user_id = count_traces.user_id
                or (kind = 'user' and membership.member_user_id = count_traces.user_id)
            )
    ),

    its_askers as (
        select count_traces.user_id as asker
        union
        select membership.member_user_id
        from its_members as membership
        where kind = 'project'
    ),

    its_questions as (
        select log.user_id, log.id
        from rag_query_logs as log
        where log.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.user_id is null or log.user_id in (select person.asker from its_askers as person))
            and (count_traces.project_id is null or log.project_id = count_traces.project_id)
    )

    select 'rag_chunks', count(*)
    from rag_chunks as chunk
    left join rag_documents as document
        on document.tenant_id = chunk.tenant_id
        and document.access_id = chunk.access_id
        and document.id = chunk.document_id
    where chunk.tenant_id = count_traces.tenant_id
        and (
            document.id is null
            or (chunk.access_id, chunk.document_id) in (select its.access_id, its.id from its_documents as its)
        )
    union all
    select 'rag_documents', count(*)
    from its_documents
    union all
    select 'rag_feedback', count(*)
    from rag_feedback as given
    where given.tenant_id = count_traces.tenant_id
        and (
            given.document_id in (select its.id from its_documents as its)
            or (given.user_id, given.query_id) in (select its.user_id, its.id from its_questions as its)
        )
    union all
    select 'rag_query_log_chunks', count(*)
    from rag_query_log_chunks as hit
    where hit.tenant_id = count_traces.tenant_id
        and (
            hit.document_id in (select its.id from its_documents as its)
            or (hit.user_id, hit.query_id) in (select its.user_id, its.id from its_questions as its)
        )
    union all
    select 'rag_query_logs', count(*)
    from its_questions
    union all
    select 'rag_assertions', count(*)
    from rag_assertions as assertion
    where assertion.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or assertion.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or assertion.project_id = count_traces.project_id)
    union all
    select 'rag_jobs', count(*)
    from rag_jobs as job
    where job.tenant_id = count_traces.tenant_id
        and (count_traces.source_id is null or job.source_id = count_traces.source_id)
        and (count_traces.source_type is null or job.source_type = count_traces.source_type)
        and (count_traces.user_id is null or job.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or job.project_id = count_traces.project_id)
    union all
    select 'rag_claims', count(*)
    from rag_claims as claim
    where claim.tenant_id = count_traces.tenant_id
    union all
    select 'rag_tags', count(*)
    from rag_tags as tag
    where tag.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or (kind = 'user' and tag.owner_user_id = count_traces.user_id))
    union all
    select 'rag_retractions', count(*)
    from rag_retractions as retraction
    where retraction.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or retraction.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or retraction.project_id = count_traces.project_id)
    union all
    select 'rag_project_members', count(*)
    from its_members
    union all
    select 'rag_tombstones', count(*)
    from rag_tombstones as tombstone
    where tombstone.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or tombstone.access_id in (select its.access_id from its_classes as its))
    union all
    select 'rag_synchronisations', count(*)
    from rag_synchronisations as run
    where run.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or run.access_id in (select its.access_id from its_classes as its))
    union all
    select 'rag_conversation_messages', count(*)
    from rag_conversation_messages as message
    where message.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or message.user_id = count_traces.user_id)
        and (count_traces.project_id is null or message.project_id = count_traces.project_id)
    union all
    select 'rag_conversation_summaries', count(*)
    from rag_conversation_summaries as summary
    where summary.tenant_id = count_traces.tenant_id
        and (count_traces.user_id is null or summary.user_id = count_traces.user_id)
        and (count_traces.project_id is null or summary.project_id = count_traces.project_id)
        and (
            kind <> 'source'
            or (summary.access_id, summary.document_id) in (select its.access_id, its.id from its_documents as its)
        )
    union all
    select 'rag_access_classes', count(*)
    from its_classes
    union all
    select 'rag_service_keys', count(*)
    from rag_service_keys as key
    where key.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_analysts', count(*)
    from rag_analysts as analyst
    where analyst.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_calibrations', count(*)
    from rag_calibrations as calibration
    where calibration.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_prompts', count(*)
    from rag_prompts as prompt
    where prompt.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_limits', count(*)
    from rag_limits as limits
    where limits.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_rate_buckets', count(*)
    -- Without its own column of the name kind.
    from (select rate.tenant_id from rag_rate_buckets as rate) as bucket
    where bucket.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_usage', count(*)
    from rag_usage as usage
    where usage.tenant_id = count_traces.tenant_id and kind = 'tenant';
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

comment on function expire_logs(interval, text) is 'Removes questions, what they got back and what was made of it, and assertions of service keys that are older, in one tenant or in all; returns how many questions and assertions';

-- Tenant by tenant along the index of each table, so that a batch reads what it removes and no more.
create function expired_questions(older_than interval, at_most bigint)
returns table (tenant_id text, user_id bigint, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select log.tenant_id from rag_query_logs as log order by log.tenant_id limit 1)
        union all
        select (
            select log.tenant_id
            from rag_query_logs as log
            where log.tenant_id > tenant.tenant_id
            order by log.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.user_id, found.id
    from tenant
    cross join lateral (
        select log.tenant_id, log.user_id, log.id
        from rag_query_logs as log
        where log.tenant_id = tenant.tenant_id
            and log.created_at < now() - expired_questions.older_than
        order by log.created_at
        limit expired_questions.at_most
    ) as found
    limit expired_questions.at_most;
end
$$;

comment on function expired_questions(interval, bigint) is 'Questions that are older, of all tenants, at most so many; null for all';

create function expired_assertions(older_than interval, at_most bigint)
returns table (tenant_id text, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select assertion.tenant_id from rag_assertions as assertion order by assertion.tenant_id limit 1)
        union all
        select (
            select assertion.tenant_id
            from rag_assertions as assertion
            where assertion.tenant_id > tenant.tenant_id
            order by assertion.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.id
    from tenant
    cross join lateral (
        select assertion.tenant_id, assertion.id
        from rag_assertions as assertion
        where assertion.tenant_id = tenant.tenant_id
            and assertion.created_at < now() - expired_assertions.older_than
        order by assertion.created_at
        limit expired_assertions.at_most
    ) as found
    limit expired_assertions.at_most;
end
$$;

comment on function expired_assertions(interval, bigint) is 'Assertions of service keys that are older, of all tenants, at most so many; null for all';

create function expired_messages(older_than interval, at_most bigint)
returns table (tenant_id text, access_id bigint, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select message.tenant_id from rag_conversation_messages as message order by message.tenant_id limit 1)
        union all
        select (
            select message.tenant_id
            from rag_conversation_messages as message
            where message.tenant_id > tenant.tenant_id
            order by message.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.access_id, found.id
    from tenant
    cross join lateral (
        select message.tenant_id, message.access_id, message.id
        from rag_conversation_messages as message
        where message.tenant_id = tenant.tenant_id
            and message.created_at < now() - expired_messages.older_than
        order by message.created_at
        limit expired_messages.at_most
    ) as found
    limit expired_messages.at_most;
end
$$;

comment on function expired_messages(interval, bigint) is 'Messages of conversations that are older, of all tenants, at most so many; null for all';

create function count_expired(kind text, older_than interval)
returns bigint
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    if count_expired.older_than is null or count_expired.older_than < interval '0' then
        raise exception 'older_than is an age' using errcode = 'invalid_parameter_value';
    end if;
    case count_expired.kind
        when 'questions' then
            return (select count(*) from expired_questions(count_expired.older_than, null));
        when 'assertions' then
            return (select count(*) from expired_assertions(count_expired.older_than, null));
        when 'messages' then
            return (select count(*) from expired_messages(count_expired.older_than, null));
        else
            raise exception 'kind is questions, assertions or messages' using errcode = 'invalid_parameter_value';
    end case;
end
$$;

comment on function count_expired(text, interval) is 'How many questions, assertions of service keys, or messages of conversations are older, in all tenants';

create function expire_batch(kind text, older_than interval, at_most integer)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
-- A batch against a table that may be a million times larger: row by row through the keys.
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    removed bigint;
begin
    if expire_batch.older_than is null or expire_batch.older_than < interval '0' or expire_batch.at_most is null then
        raise exception 'older_than is an age, and at_most a number' using errcode = 'invalid_parameter_value';
    end if;
    case expire_batch.kind
        when 'questions' then
            delete from rag_query_logs as log
            using expired_questions(expire_batch.older_than, expire_batch.at_most) as old
            where log.tenant_id = old.tenant_id and log.user_id = old.user_id and log.id = old.id;
        when 'assertions' then
            delete from rag_assertions as assertion
            using expired_assertions(expire_batch.older_than, expire_batch.at_most) as old
            where assertion.tenant_id = old.tenant_id and assertion.id = old.id;
        when 'messages' then
            delete from rag_conversation_messages as message
            using expired_messages(expire_batch.older_than, expire_batch.at_most) as old
            where message.tenant_id = old.tenant_id and message.access_id = old.access_id and message.id = old.id;
        else
            raise exception 'kind is questions, assertions or messages' using errcode = 'invalid_parameter_value';
    end case;
    get diagnostics removed = row_count;
    return removed;
end
$$;

comment on function expire_batch(text, interval, integer) is 'Removes at most so many of the questions, with what they got back and what was made of it, of the assertions of service keys, or of the messages of conversations, that are older, in all tenants; returns how many';

create function embeds_with(tenant_id text, embedding_model text)
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    if not exists (select from rag_chunks as chunk where chunk.tenant_id = embeds_with.tenant_id) then
        return null;
    end if;
    return exists (
        select
        from rag_chunks as chunk
        where chunk.tenant_id = embeds_with.tenant_id
            and chunk.embedding_model = embeds_with.embedding_model
    );
end
$$;

comment on function embeds_with(text, text) is 'Whether a tenant has a chunk that this model embedded; null when it has no chunk at all';

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
            class.access_id,
            class.scope,
            class.user_id,
            class.project_id,
            class.tags,
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
