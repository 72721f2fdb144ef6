-- Jobs: what somebody has asked for and a worker does later, as that principal. rag_jobs says what and for whom, under
-- row security; the queue (12_queue.sql) holds ids alone. And claims: who is making a source searchable just now.

-- --- the queue, as rag_queue ---------------------------------------------------------------------

create function push_job(tenant_id text, id uuid, kind text, lock text, max_waiting integer)
returns table (queue_id bigint, turn integer)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    waiting bigint;
    latest integer;
    present integer;
begin
    -- One after the other within a tenant, so that the limit holds exactly and each gets a turn of its own.
    perform pg_advisory_xact_lock(hashtextextended('palisade jobs of ' || push_job.tenant_id, 0));
    select count(*), max(job.turn) into waiting, latest
    from rag_jobs as job
    where job.tenant_id = push_job.tenant_id
        and job.status in ('pending', 'processing');
    if push_job.max_waiting is not null and waiting >= push_job.max_waiting then
        return;
    end if;
    -- Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a tenant's jobs take turns one by one, from where
    -- the queue is now. Who has queued a thousand waits for them; who comes with one is next.
    select coalesce(
        (
            select -queued.priority
            from jobs.procrastinate_jobs as queued
            where queued.status = 'todo'
                and (queued.scheduled_at is null or queued.scheduled_at <= now())
            order by queued.priority desc, queued.id
            limit 1
        ),
        (select max(-queued.priority) from jobs.procrastinate_jobs as queued where queued.status = 'doing'),
        0
    ) into present;
    turn := greatest(present, coalesce(latest + 1, 0));
    queue_id := (
        jobs.procrastinate_defer_jobs_v1(array[cast(row(
            'rag', push_job.kind, -turn, push_job.lock, null, jsonb_build_object('id', push_job.id), null
        ) as jobs.procrastinate_job_to_defer_v1)])
    )[1];
    return next;
end
$$;

comment on function push_job(text, uuid, text, text, integer) is 'Puts a job into the queue at its tenant''s next turn, within the transaction; no row when max_waiting jobs of the tenant wait or are being done. For enqueue_job() and resubmit_jobs()';

create function drop_queued(queue_ids bigint[])
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from jobs.procrastinate_jobs as queued
    where queued.id = any(drop_queued.queue_ids) and queued.status = 'todo';
    -- What is being done is told to end, and its worker removes it. Until then it names nothing.
    update jobs.procrastinate_jobs as queued
    set lock = null, args = '{}', abort_requested = true
    where queued.id = any(drop_queued.queue_ids) and queued.status = 'doing';
end
$$;

comment on function drop_queued(bigint[]) is 'Takes jobs out of the queue; those that are being done are told to end. For cancel_my_job(), cancel_jobs() and forget()';

create function take_job(id uuid, queue_id bigint, proof text)
returns table (
    tenant_id text, user_id bigint, project_id text, tags text[], kind text, payload jsonb, body text,
    attempts integer, claim uuid
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- It hands out what tenants sent: the password of the worker alone does not open it.
    if not proof_holds('jobs', take_job.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    update rag_jobs as job
    set status = 'processing',
        attempts = job.attempts + 1,
        claim = gen_random_uuid(),
        started_at = now(),
        due_at = null
    from jobs.procrastinate_jobs as queued
    where job.id = take_job.id
        and job.queue_id = take_job.queue_id
        and job.status in ('pending', 'processing')
        and queued.id = job.queue_id
        and queued.status = 'doing'
        and not queued.abort_requested
    returning
        job.tenant_id, nullif(job.user_id, 0), job.project_id, job.tags, job.kind, job.payload, job.body,
        job.attempts, job.claim;
end
$$;

comment on function take_job(uuid, bigint, text) is 'What a worker has to do, and as whom: of the one job that the queue has just given out. Whoever took it before has lost it. No row when it is done, cancelled or erased; raises 28000 without a proof that the worker itself asks';

create function return_job(
    id uuid, claim uuid, reason text, detail text, due_in interval, counted boolean, proof text
)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    if not proof_holds('jobs', return_job.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    update rag_jobs as job
    set status = case when return_job.due_in is null then 'failed' else 'pending' end,
        reason = return_job.reason,
        detail = return_job.detail,
        attempts = job.attempts - case when return_job.counted then 0 else 1 end,
        claim = null,
        due_at = now() + return_job.due_in,
        finished_at = case when return_job.due_in is null then now() end
    where job.id = return_job.id
        and job.claim = return_job.claim
        and job.status = 'processing';
    return found;
end
$$;

comment on function return_job(uuid, uuid, text, text, interval, boolean, text) is 'Gives a job back that came to nothing: to be tried again after due_in, or with due_in null for good, for the reason given; false when it was no longer this worker''s';

create function recover_jobs(stalled_after interval, max_losses integer)
returns table (recovered bigint, parked bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    stalled record;
begin
    recovered := 0;
    parked := 0;
    for stalled in
        select queued.id as queue_id
        from jobs.procrastinate_jobs as queued
        left join jobs.procrastinate_workers as worker on worker.id = queued.worker_id
        where queued.status = 'doing'
            and (worker.id is null or worker.last_heartbeat < now() - recover_jobs.stalled_after)
        order by queued.id
        for update of queued skip locked
    loop
        -- One that ends its worker each time would end them all.
        update rag_jobs as job
        set losses = job.losses + 1,
            claim = null,
            status = case when job.losses + 1 >= recover_jobs.max_losses then 'failed' else 'pending' end,
            reason = 'worker_lost',
            detail = 'The worker ended while it did this job.',
            finished_at = case when job.losses + 1 >= recover_jobs.max_losses then now() end
        where job.queue_id = stalled.queue_id
            and job.status in ('pending', 'processing');
        if exists (
            select from rag_jobs as job where job.queue_id = stalled.queue_id and job.status = 'pending'
        ) then
            update jobs.procrastinate_jobs as queued
            set abort_requested = false
            where queued.id = stalled.queue_id and queued.abort_requested;
            perform jobs.procrastinate_retry_job_v2(stalled.queue_id, now(), null, null, null);
            recovered := recovered + 1;
        else
            delete from jobs.procrastinate_jobs as queued where queued.id = stalled.queue_id;
            parked := parked + 1;
        end if;
    end loop;
    delete from jobs.procrastinate_workers as worker
    where worker.last_heartbeat < now() - 10 * recover_jobs.stalled_after;
    return next;
end
$$;

comment on function recover_jobs(interval, integer) is 'Puts back what a worker was doing that has not said for so long that it is there; parks what has lost max_losses workers';

create function expire_jobs(keys_after interval, jobs_after interval)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    removed bigint;
    lost record;
    pushed record;
begin
    -- Nothing that is known of leaves a job that has not ended without its place in the queue; it is lost otherwise.
    for lost in
        select job.tenant_id, job.id, job.kind, job.lock
        from rag_jobs as job
        where job.status in ('pending', 'processing')
            and job.queue_id is not null
            and not exists (select from jobs.procrastinate_jobs as queued where queued.id = job.queue_id)
        for update skip locked
    loop
        select queued.* into pushed from push_job(lost.tenant_id, lost.id, lost.kind, lost.lock, null) as queued;
        update rag_jobs as job
        set status = 'pending', claim = null, queue_id = pushed.queue_id, turn = pushed.turn
        where job.tenant_id = lost.tenant_id and job.id = lost.id;
    end loop;
    update rag_jobs as job
    set request_key = null
    where job.request_key is not null and job.created_at < now() - expire_jobs.keys_after;
    delete from rag_jobs as job
    where job.status in ('succeeded', 'failed', 'cancelled')
        and job.finished_at < now() - expire_jobs.jobs_after;
    get diagnostics removed = row_count;
    delete from rag_claims as claim where claim.expires_at < now();
    return removed;
end
$$;

comment on function expire_jobs(interval, interval) is 'Puts jobs back that the queue does not know, forgets the idempotency keys of older requests, removes jobs that ended so long ago, and claims that ran out; how many jobs';

create function queue_depth(seen_within interval, proof text)
returns table (pending bigint, ready bigint, processing bigint, workers bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Figures of all tenants: a password alone does not open them.
    if not proof_holds('jobs', queue_depth.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    select
        count(*) filter (where queued.status = 'todo'),
        count(*) filter (
            where queued.status = 'todo' and (queued.scheduled_at is null or queued.scheduled_at <= now())
        ),
        count(*) filter (where queued.status = 'doing'),
        (select count(*) from jobs.procrastinate_workers as worker where worker.last_heartbeat > now() - queue_depth.seen_within)
    from jobs.procrastinate_jobs as queued;
end
$$;

comment on function queue_depth(interval, text) is 'Jobs of the whole deployment: those that wait, of these those that are not put off until later, and those that are being done; and workers that were there within so long';

-- --- the principal's own, as rag_principal --------------------------------------------------------

create function enqueue_job(
    kind text, lock text, source_type text, source_id text, payload jsonb, body text, max_waiting integer,
    request_key bytea, request_digest bytea
)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    job_id uuid := gen_random_uuid();
    pushed record;
begin
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    -- An erasure of the tenant comes before this or after it.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    select queued.* into pushed
    from push_job(me.tenant_id, job_id, enqueue_job.kind, enqueue_job.lock, enqueue_job.max_waiting) as queued;
    if not found then
        return null;
    end if;
    insert into rag_jobs (
        tenant_id, id, user_id, project_id, tags, kind, status, lock, queue_id, turn,
        source_type, source_id, payload, body, request_key, request_digest
    )
    values (
        me.tenant_id, job_id, coalesce(me.user_id, 0), me.project_id, me.tags, enqueue_job.kind, 'pending',
        enqueue_job.lock, pushed.queue_id, pushed.turn, enqueue_job.source_type, enqueue_job.source_id,
        enqueue_job.payload, enqueue_job.body, enqueue_job.request_key, enqueue_job.request_digest
    );
    return job_id;
end
$$;

comment on function enqueue_job(text, text, text, text, jsonb, text, integer, bytea, bytea) is 'Asks for a job to be done as the principal, once this transaction has committed; null when max_waiting jobs of the tenant are waiting. Jobs of one lock are done one after the other';

create function record_request(kind text, source_type text, source_id text, result jsonb, request_key bytea, request_digest bytea)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    job_id uuid := gen_random_uuid();
begin
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    insert into rag_jobs (
        tenant_id, id, user_id, project_id, tags, kind, status, attempts, source_type, source_id, result,
        request_key, request_digest, started_at, finished_at
    )
    values (
        me.tenant_id, job_id, coalesce(me.user_id, 0), me.project_id, me.tags, record_request.kind, 'succeeded', 1,
        record_request.source_type, record_request.source_id, record_request.result, record_request.request_key,
        record_request.request_digest, now(), now()
    );
    return job_id;
end
$$;

comment on function record_request(text, text, text, jsonb, bytea, bytea) is 'Records what came of a request that had an idempotency key, in the transaction that did it; raises 23505 when another one did it meanwhile';

create function my_request(request_key bytea, valid_for interval)
returns table (id uuid, request_digest bytea, queued boolean, result jsonb)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- A key is free again after its time, whenever the worker clears up.
    update rag_jobs as job
    set request_key = null
    where job.tenant_id = (select my_tenant_id())
        and job.request_key = my_request.request_key
        and job.created_at < now() - my_request.valid_for;
    return query
    select job.id, job.request_digest, job.queue_id is not null, job.result
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.request_key = my_request.request_key;
end
$$;

comment on function my_request(bytea, interval) is 'What the principal has asked for with this idempotency key within its time';

create function my_waiting_job(kind text, lock text)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
begin
    if tenant is null then
        return null;
    end if;
    -- The locks of enqueue_job() and push_job(), in their order: of two who ask at once the second sees the first's.
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    perform pg_advisory_xact_lock(hashtextextended('palisade jobs of ' || tenant, 0));
    return (
        select job.id
        from rag_jobs as job
        where job.tenant_id = tenant
            and job.kind = my_waiting_job.kind
            and job.lock = my_waiting_job.lock
            and job.status = 'pending'
        order by job.turn, job.id
        limit 1
    );
end
$$;

comment on function my_waiting_job(text, text) is 'One of the principal''s own jobs of this kind and lock that nobody has begun; null when there is none. Nobody else asks for one before this transaction has ended';

create function my_job(job_id uuid)
returns table (
    id uuid, kind text, status text, reason text, detail text, attempts integer, created_at timestamptz,
    started_at timestamptz, due_at timestamptz, finished_at timestamptz, result jsonb
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
        job.id, job.kind, job.status, job.reason, job.detail, job.attempts, job.created_at, job.started_at,
        job.due_at, job.finished_at, job.result
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.id = my_job.job_id;
end
$$;

comment on function my_job(uuid) is 'One of the principal''s own jobs';

create function cancel_my_job(id uuid)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    queued bigint;
begin
    update rag_jobs as job
    set status = 'cancelled', claim = null, payload = null, body = null, due_at = null, finished_at = now()
    where job.tenant_id = (select my_tenant_id())
        and job.id = cancel_my_job.id
        and job.status in ('pending', 'processing')
    returning job.queue_id into queued;
    if not found then
        return false;
    end if;
    perform drop_queued(array[queued]);
    return true;
end
$$;

comment on function cancel_my_job(uuid) is 'Cancels one of the principal''s own jobs; one that is being done stores nothing any more. False when there is none, or it has ended';

create function settle_job(id uuid, claim uuid, result jsonb)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_jobs as job
    set status = 'succeeded',
        reason = null,
        detail = null,
        claim = null,
        payload = null,
        body = null,
        result = settle_job.result,
        finished_at = now()
    where job.tenant_id = (select my_tenant_id())
        and job.id = settle_job.id
        and job.claim = settle_job.claim
        and job.status = 'processing';
    return found;
end
$$;

comment on function settle_job(uuid, uuid, jsonb) is 'Ends a job in the transaction that did it, as its principal, and lets go of what was sent; false when it was cancelled, erased or given to another worker, and then nothing may be stored';

create function holds_job(id uuid, claim uuid)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Locked, so that nobody is given the job before this transaction has ended.
    perform
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.id = holds_job.id
        and job.claim = holds_job.claim
        and job.status = 'processing'
    for share;
    return found;
end
$$;

comment on function holds_job(uuid, uuid) is 'Whether the job is still this worker''s, and until the end of the transaction nobody else''s: for one step of a job that has many';

-- --- claims ---------------------------------------------------------------------------------------

create function claim_source(
    access_id bigint, source_type text, source_id text, token uuid, lease interval
)
returns bytea
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    class record;
    digest bytea;
begin
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = claim_source.access_id and mine.may_write;
    if not found then
        raise exception 'no class of the principal''s to write in' using errcode = 'insufficient_privilege';
    end if;
    -- Of an owner, whatever the tags.
    digest := sha256(convert_to(
        array_to_json(array[
            class.scope, cast(class.user_id as text), class.project_id, claim_source.source_type, claim_source.source_id
        ])::text,
        'UTF8'
    ));
    insert into rag_claims as held (tenant_id, source_digest, token, expires_at)
    values (class.tenant_id, digest, claim_source.token, clock_timestamp() + claim_source.lease)
    on conflict (tenant_id, source_digest) do update
    set token = excluded.token, expires_at = excluded.expires_at
    where held.expires_at < clock_timestamp();
    return case when found then digest end;
end
$$;

comment on function claim_source(bigint, text, text, uuid, interval) is 'Claims a source of an owner whom the principal may write for, so that no second one embeds it at the same time; null while somebody else holds it. It ends by itself';

create function claim_source_as(
    tenant_id text, user_id bigint, project_id text, tags text[], signature text,
    scope text, owner_user_id bigint, owner_project_id text, document_tags text[],
    source_type text, source_id text, provenance_id text, settled_hash text, token uuid, lease interval
)
returns table (
    access_id bigint, source_digest bytea, is_settled boolean,
    id uuid, document_access_id bigint, source_hash text, updated_at timestamptz, generation bigint,
    retractions bigint, closed bigint,
    documents bigint, bytes bigint, documents_used bigint, bytes_used bigint
)
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    all_rows bigint;
begin
    perform begin_as(
        claim_source_as.tenant_id, claim_source_as.user_id, claim_source_as.project_id, claim_source_as.tags,
        claim_source_as.signature
    );
    access_id := access_class(
        claim_source_as.scope, claim_source_as.owner_user_id, claim_source_as.owner_project_id,
        claim_source_as.document_tags
    );
    source_digest := claim_source(
        access_id => access_id,
        source_type => claim_source_as.source_type,
        source_id => claim_source_as.source_id,
        token => claim_source_as.token,
        lease => claim_source_as.lease
    );
    -- After the claim: whoever held it before may have finished.
    for id, document_access_id, source_hash, updated_at, generation, retractions, closed,
        documents, bytes, documents_used, bytes_used, all_rows in
        select
            looked.id, looked.document_access_id, looked.source_hash, looked.updated_at, looked.generation,
            looked.retractions, looked.closed,
            room.documents, room.bytes, room.documents_used, room.bytes_used, count(*) over ()
        from look_at_source(
            access_id => access_id,
            scope => claim_source_as.scope,
            user_id => claim_source_as.owner_user_id,
            project_id => claim_source_as.owner_project_id,
            source_type => claim_source_as.source_type,
            source_id => claim_source_as.source_id,
            provenance_id => claim_source_as.provenance_id
        ) as looked
        cross join my_limits() as room
    loop
        is_settled := (
            all_rows = 1 and document_access_id = access_id and source_hash = claim_source_as.settled_hash
        ) is true;
        if is_settled then
            perform release_claim(source_digest => source_digest, token => claim_source_as.token);
            source_digest := null;
        end if;
        return next;
    end loop;
end
$$;

comment on function claim_source_as(text, bigint, text, text[], text, text, bigint, text, text[], text, text, text, text, uuid, interval) is 'begin_as(), and claim_source() of a source of an owner, as one statement that is a transaction of its own; then what look_at_source() and my_limits() say. is_settled: it is stored with this hash, alone and in its class, and nothing is claimed. source_digest: what was claimed; null then, and while somebody else holds it';

create function renew_claim(source_digest bytea, token uuid, lease interval)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_claims as held
    set expires_at = clock_timestamp() + renew_claim.lease
    where held.tenant_id = (select my_tenant_id())
        and held.source_digest = renew_claim.source_digest
        and held.token = renew_claim.token;
end
$$;

comment on function renew_claim(bytea, uuid, interval) is 'Keeps a claim for longer';

create function release_claim(source_digest bytea, token uuid)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_claims as held
    where held.tenant_id = (select my_tenant_id())
        and held.source_digest = release_claim.source_digest
        and held.token = release_claim.token;
end
$$;

comment on function release_claim(bytea, uuid) is 'Lets go of a claim';

-- --- operators, as rag_queue ----------------------------------------------------------------------

create function list_jobs(only_tenant_id text, only_status text, most integer)
returns table (
    tenant_id text, id uuid, user_id bigint, kind text, status text, reason text, attempts integer, losses integer,
    created_at timestamptz, started_at timestamptz, due_at timestamptz, finished_at timestamptz
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
        job.tenant_id, job.id, nullif(job.user_id, 0), job.kind, job.status, job.reason, job.attempts, job.losses,
        job.created_at, job.started_at, job.due_at, job.finished_at
    from rag_jobs as job
    where (list_jobs.only_tenant_id is null or job.tenant_id = list_jobs.only_tenant_id)
        and (list_jobs.only_status is null or job.status = list_jobs.only_status)
    order by job.created_at desc, job.id
    limit list_jobs.most;
end
$$;

comment on function list_jobs(text, text, integer) is 'Jobs of a tenant, or of all, latest first; nothing of what they are about';

create function resubmit_jobs(ids uuid[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    parked record;
    pushed record;
    done bigint := 0;
begin
    for parked in
        select job.tenant_id, job.id, job.kind, job.lock
        from rag_jobs as job
        where job.id = any(resubmit_jobs.ids) and job.status = 'failed' and job.payload is not null
        order by job.created_at, job.id
        for update
    loop
        select queued.* into pushed
        from push_job(parked.tenant_id, parked.id, parked.kind, parked.lock, null) as queued;
        update rag_jobs as job
        set status = 'pending', attempts = 0, losses = 0, queue_id = pushed.queue_id, turn = pushed.turn,
            finished_at = null, due_at = null
        where job.tenant_id = parked.tenant_id and job.id = parked.id;
        done := done + 1;
    end loop;
    return done;
end
$$;

comment on function resubmit_jobs(uuid[]) is 'Puts jobs that failed into the queue again, whatever its limit; how many';

create function cancel_jobs(ids uuid[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    queued bigint[];
begin
    with cancelled as (
        update rag_jobs as job
        set status = 'cancelled', claim = null, payload = null, body = null, due_at = null, finished_at = now()
        where job.id = any(cancel_jobs.ids) and job.status in ('pending', 'processing', 'failed')
        returning job.queue_id
    )
    select coalesce(array_agg(gone.queue_id), '{}') into queued from cancelled as gone;
    perform drop_queued(queued);
    return cardinality(queued);
end
$$;

comment on function cancel_jobs(uuid[]) is 'Cancels jobs that have not succeeded; what was sent with them is removed, and one that is being done stores nothing any more; how many';
