-- How much a tenant may ask and store. Rates are token buckets: each request takes a token, and tokens come back
-- with time. Quotas are counted by what writes documents, within its transaction.

create function limits_of(tenant_id text)
returns table (
    queries_per_minute integer, query_burst integer, ingests_per_minute integer, ingest_burst integer,
    documents bigint, bytes bigint
)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        limits.queries_per_minute,
        limits.query_burst,
        limits.ingests_per_minute,
        limits.ingest_burst,
        limits.documents,
        limits.bytes
    from rag_limits as limits
    where limits.tenant_id in (limits_of.tenant_id, '')
    -- The tenant's own, all of it, before what holds for those that have none.
    order by length(limits.tenant_id) desc
    limit 1;
end
$$;

comment on function limits_of(text) is 'What holds for a tenant: its own row, else that of all others; no row where nothing is limited';

create function refilled_tokens(
    tokens double precision, refilled_at timestamptz, per_minute integer, burst integer, moment timestamptz
)
returns double precision
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    -- A clock that was put back takes nothing away.
    return least(
        burst,
        tokens + greatest(0, cast(extract(epoch from moment - refilled_at) as double precision)) * per_minute / 60
    );
end
$$;

comment on function refilled_tokens(double precision, timestamptz, integer, integer, timestamptz) is 'What a bucket holds at a moment, of what it held when it was last taken from; never more than burst';

create function take_token(kind text)
returns table (
    granted boolean, per_minute integer, burst integer, tokens_left double precision, wait_s double precision
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.tenant_id into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    if (take_token.kind in ('query', 'ingest')) is not true then
        raise exception 'unknown kind of request' using errcode = 'invalid_parameter_value';
    end if;
    select
        case take_token.kind when 'query' then limits.queries_per_minute else limits.ingests_per_minute end,
        case take_token.kind when 'query' then limits.query_burst else limits.ingest_burst end
    into per_minute, burst
    from limits_of(me.tenant_id) as limits;
    if per_minute is null then
        granted := true;
        return next;
        return;
    end if;
    granted := false;
    if per_minute = 0 then
        burst := 0;
        tokens_left := 0;
        return next;
        return;
    end if;
    burst := coalesce(burst, per_minute);

    -- Without a lock first: others can only have taken more, and a flood of requests that are refused
    -- neither waits nor writes.
    select refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp())
    into tokens_left
    from rag_rate_buckets as bucket
    where bucket.tenant_id = me.tenant_id and bucket.kind = take_token.kind;
    if not found then
        insert into rag_rate_buckets (tenant_id, kind, tokens, refilled_at)
        values (me.tenant_id, take_token.kind, burst, clock_timestamp())
        on conflict do nothing;
        tokens_left := burst;
    end if;
    if tokens_left >= 1 then
        -- Whoever waited for another one's token sees what that one left: both the condition and the new
        -- value are worked out again.
        update rag_rate_buckets as bucket
        set tokens = refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp()) - 1,
            refilled_at = clock_timestamp()
        where bucket.tenant_id = me.tenant_id
            and bucket.kind = take_token.kind
            and refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp()) >= 1
        returning bucket.tokens into tokens_left;
        granted := found;
        if not found then
            select refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp())
            into tokens_left
            from rag_rate_buckets as bucket
            where bucket.tenant_id = me.tenant_id and bucket.kind = take_token.kind;
        end if;
    end if;
    wait_s := case when granted then 0 else greatest(0, 1 - coalesce(tokens_left, 0)) * 60 / per_minute end;
    return next;
end
$$;

comment on function take_token(text) is 'Takes a token for a request of a kind, query or ingest, from the bucket of the principal''s tenant. One row: whether it was granted, how many a minute and at once, what is left, and in how many seconds there is one; nulls where nothing limits it, no seconds where none ever comes. Raises 42501 for nobody';

create function take_token_as(
    tenant_id text, user_id bigint, project_id text, tags text[], signature text, kind text
)
returns table (
    granted boolean, per_minute integer, burst integer, tokens_left double precision, wait_s double precision
)
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    perform begin_as(
        take_token_as.tenant_id, take_token_as.user_id, take_token_as.project_id, take_token_as.tags,
        take_token_as.signature
    );
    return query
    select taken.granted, taken.per_minute, taken.burst, taken.tokens_left, taken.wait_s
    from take_token(take_token_as.kind) as taken;
end
$$;

comment on function take_token_as(text, bigint, text, text[], text, text) is 'begin_as() and take_token() as one statement that is a transaction of its own: the bucket is locked while the server works, and not while it waits for the service';

create function charge_quota(more_documents bigint, more_bytes bigint)
returns table (quota text, quota_limit bigint, used bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
    limits record;
    stored record;
begin
    select principal.tenant_id into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    if charge_quota.more_documents is null or charge_quota.more_bytes is null then
        raise exception 'a charge is two numbers' using errcode = 'invalid_parameter_value';
    end if;
    select effective.documents, effective.bytes into limits from limits_of(me.tenant_id) as effective;
    -- What makes room is never refused, and waits for nobody.
    if (charge_quota.more_documents > 0 and limits.documents is not null)
        or (charge_quota.more_bytes > 0 and limits.bytes is not null) then
        -- To the end of the transaction: whoever comes next counts what this one has stored.
        perform pg_advisory_xact_lock(hashtextextended('palisade quota ' || me.tenant_id, 0));
        select coalesce(sum(usage.documents), 0) as documents, coalesce(sum(usage.bytes), 0) as bytes
        into stored
        from rag_usage as usage
        where usage.tenant_id = me.tenant_id;
        return query
        select exceeded.quota, exceeded.quota_limit, exceeded.used
        from (
            values
                (1, 'documents', limits.documents, cast(stored.documents as bigint), charge_quota.more_documents),
                (2, 'bytes', limits.bytes, cast(stored.bytes as bigint), charge_quota.more_bytes)
        ) as exceeded (place, quota, quota_limit, used, more)
        where exceeded.more > 0 and exceeded.used + exceeded.more > exceeded.quota_limit
        order by exceeded.place
        limit 1;
        if found then
            return;
        end if;
    end if;
    insert into rag_usage as usage (tenant_id, slot, documents, bytes)
    values (me.tenant_id, pg_backend_pid() % 16, charge_quota.more_documents, charge_quota.more_bytes)
    on conflict (tenant_id, slot) do update
    set documents = usage.documents + excluded.documents,
        bytes = usage.bytes + excluded.bytes;
end
$$;

comment on function charge_quota(bigint, bigint) is 'Counts what the transaction adds to the principal''s tenant, or less than 0 for what it removes; the last statement of one that writes documents, and once in it. No row, or the quota that does not allow it, its limit and what is used of it, and then nothing is counted and the transaction has to be undone. Raises 42501 for nobody';

create function my_limits()
returns table (
    queries_per_minute integer, query_burst integer, ingests_per_minute integer, ingest_burst integer,
    documents bigint, bytes bigint, documents_used bigint, bytes_used bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        limits.queries_per_minute,
        limits.query_burst,
        limits.ingests_per_minute,
        limits.ingest_burst,
        limits.documents,
        limits.bytes,
        cast(coalesce(stored.documents, 0) as bigint),
        cast(coalesce(stored.bytes, 0) as bigint)
    from my_principal() as me
    left join lateral limits_of(me.tenant_id) as limits on true
    left join lateral (
        select sum(usage.documents) as documents, sum(usage.bytes) as bytes
        from rag_usage as usage
        where usage.tenant_id = me.tenant_id
        offset 0
    ) as stored on true
    where me.user_scope is null;
end
$$;

comment on function my_limits() is 'What the principal''s tenant may ask and store, null for no limit, and what it has stored; one row, none for nobody and for an analyst';

create function usage_drift()
returns table (
    tenant_id text, documents_counted bigint, bytes_counted bigint, documents_stored bigint, bytes_stored bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with counted as (
        select usage.tenant_id, cast(sum(usage.documents) as bigint) as documents, cast(sum(usage.bytes) as bigint) as bytes
        from rag_usage as usage
        group by usage.tenant_id
    ),

    stored as (
        select document.tenant_id, count(*) as documents, sum(document.body_bytes) as bytes
        from rag_documents as document
        group by document.tenant_id
    )

    select
        coalesce(counted.tenant_id, stored.tenant_id),
        coalesce(counted.documents, 0),
        coalesce(counted.bytes, 0),
        coalesce(stored.documents, 0),
        coalesce(stored.bytes, 0)
    from counted
    full join stored on stored.tenant_id = counted.tenant_id
    where (coalesce(counted.documents, 0), coalesce(counted.bytes, 0))
        is distinct from (coalesce(stored.documents, 0), coalesce(stored.bytes, 0))
    order by 1;
end
$$;

comment on function usage_drift() is 'Tenants whose documents are not as many or as large as was counted, which only who writes past the service can bring about; reads every document''s size';

create function recount_usage(tenant_id text, out documents bigint, out bytes bigint)
returns record
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Whoever writes in the tenant is done, or waits.
    perform pg_advisory_xact_lock(tenant_lock(recount_usage.tenant_id));
    select count(*), coalesce(sum(document.body_bytes), 0)
    into recount_usage.documents, recount_usage.bytes
    from rag_documents as document
    where document.tenant_id = recount_usage.tenant_id;
    delete from rag_usage as usage where usage.tenant_id = recount_usage.tenant_id;
    insert into rag_usage (tenant_id, slot, documents, bytes)
    select recount_usage.tenant_id, 0, recount_usage.documents, recount_usage.bytes
    where recount_usage.documents > 0;
end
$$;

comment on function recount_usage(text) is 'Counts anew what a tenant has stored; waits for those who are writing in it';
