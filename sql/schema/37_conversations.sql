-- Conversations: what a principal and an assistant said to each other, under row security and read by the principal
-- alone. Messages are never searched. Once enough of them are unsummarised they are claimed for a job, whose id becomes
-- that of their summary; a summary is a document like any other.

create function thread_lock(tenant_id text, user_id bigint, project_id text, thread_id text)
returns bigint
language sql
immutable
parallel safe
begin atomic
    select hashtextextended(
        'palisade thread ' || array_to_json(array[tenant_id, cast(user_id as text), project_id, thread_id])::text, 0
    );
end;

comment on function thread_lock(text, bigint, text, text) is 'Number of the advisory lock of a thread: whoever posts to it holds it until the transaction ends';

create function post_message(
    access_id bigint, thread_id text, role text, content text, tokens integer, request_key bytea, request_digest bytea
)
returns table (
    id uuid, number bigint, created_at timestamptz, summary_id uuid, repeated_digest bytea, open_tokens bigint,
    open_characters bigint
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    class record;
    last_number bigint;
    posted record;
begin
    -- A conversation is of somebody: not of a project of another owner, and not public.
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = post_message.access_id
        and mine.may_write
        and mine.user_id = (select my_user_id());
    if not found then
        raise exception 'no class of the principal''s own' using errcode = 'insufficient_privilege';
    end if;
    -- One after the other within a thread: a place is given once, and a volume is measured by whoever makes it grow.
    perform pg_advisory_xact_lock(
        thread_lock(class.tenant_id, class.user_id, class.project_id, post_message.thread_id)
    );
    select message.* into posted
    from rag_conversation_messages as message
    where message.tenant_id = class.tenant_id
        and message.access_id = class.access_id
        and message.request_key = post_message.request_key;
    if found then
        return query
        select posted.id, posted.number, posted.created_at, posted.summary_id, posted.request_digest,
            cast(0 as bigint), cast(0 as bigint);
        return;
    end if;
    -- Class by class, which the index has in order: a thread of 100,000 messages costs what one of ten does.
    select max(latest.number) into last_number
    from my_classes() as mine
    cross join lateral (
        select message.number
        from rag_conversation_messages as message
        where message.tenant_id = class.tenant_id
            and message.access_id = mine.access_id
            and message.thread_id = post_message.thread_id
        order by message.number desc
        limit 1
    ) as latest
    where mine.user_id = class.user_id and mine.project_id is not distinct from class.project_id;
    insert into rag_conversation_messages as message (
        tenant_id, access_id, user_id, project_id, thread_id, number, role, content, tokens, request_key,
        request_digest, created_at
    )
    values (
        class.tenant_id, class.access_id, class.user_id, class.project_id, post_message.thread_id,
        coalesce(last_number, 0) + 1, post_message.role, post_message.content, post_message.tokens,
        post_message.request_key, post_message.request_digest, clock_timestamp()
    )
    returning message.* into posted;
    return query
    select
        posted.id, posted.number, posted.created_at, posted.summary_id, cast(null as bytea),
        coalesce(sum(message.tokens), 0), coalesce(sum(message.characters), 0)
    from rag_conversation_messages as message
    where message.tenant_id = class.tenant_id
        and message.access_id = class.access_id
        and message.thread_id = post_message.thread_id
        and message.summarised_at is null
        and (message.summary_id is null or not exists (
            select
            from rag_jobs as job
            where job.tenant_id = class.tenant_id and job.id = message.summary_id
        ));
end
$$;

comment on function post_message(bigint, text, text, text, integer, bytea, bytea) is 'Adds a message at the end of a thread of the principal''s own, and says how much of the thread no summary has and no job is to make; with a key that was used before it adds nothing and says what was posted with it. Raises 42501 for a class that is not the principal''s, 23505 when the key was used in another thread meanwhile';

create function claim_messages(access_id bigint, thread_id text, summary_id uuid, most_characters bigint)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    claimed bigint;
begin
    -- Under the lock that post_message() took. What a job had that is known no more may be had again.
    with waiting as (
        select message.id, sum(message.characters) over (order by message.number) - message.characters as before
        from rag_conversation_messages as message
        where message.tenant_id = (select my_tenant_id())
            and message.access_id = claim_messages.access_id
            and message.thread_id = claim_messages.thread_id
            and message.summarised_at is null
            and (message.summary_id is null or not exists (
                select
                from rag_jobs as job
                where job.tenant_id = (select my_tenant_id()) and job.id = message.summary_id
            ))
    )

    update rag_conversation_messages as message
    set summary_id = claim_messages.summary_id
    from waiting
    where message.tenant_id = (select my_tenant_id())
        and message.access_id = claim_messages.access_id
        and message.id = waiting.id
        and waiting.before < claim_messages.most_characters;
    get diagnostics claimed = row_count;
    return claimed;
end
$$;

comment on function claim_messages(bigint, text, uuid, bigint) is 'Gives the oldest messages of a thread that no summary has, and no job that is known, to a job: until there are so many characters; how many messages';

create function my_messages(project_id text, thread_id text, after bigint, at_most integer)
returns table (
    id uuid, number bigint, role text, content text, tokens integer, characters integer, summarised_at timestamptz,
    created_at timestamptz
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
        page.id, page.number, page.role, page.content, page.tokens, page.characters, page.summarised_at,
        page.created_at
    from my_classes() as mine
    cross join lateral (
        select message.*
        from rag_conversation_messages as message
        where message.tenant_id = mine.tenant_id
            and message.access_id = mine.access_id
            and message.thread_id = my_messages.thread_id
            and message.number > my_messages.after
        order by message.number
        limit my_messages.at_most
    ) as page
    where mine.user_id = (select my_user_id()) and mine.project_id is not distinct from my_messages.project_id
    order by page.number
    -- What went in with other tags may have the same place, and a page begins after one.
    fetch first my_messages.at_most rows with ties;
end
$$;

comment on function my_messages(text, text, bigint, integer) is 'Messages of a thread of the principal''s own behind a place in it, in their order; project_id null: of the user alone';

create function my_summaries(project_id text, thread_id text, at_most integer)
returns table (
    id uuid, document_id uuid, summary_text text, message_ids uuid[], model text, created_at timestamptz
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
        summary.id, summary.document_id, summary.summary_text, summary.message_ids, summary.model, summary.created_at
    from rag_conversation_summaries as summary
    where summary.tenant_id = (select my_tenant_id())
        and summary.access_id = any((select my_access_ids())::bigint[])
        and summary.project_id is not distinct from my_summaries.project_id
        and summary.thread_id = my_summaries.thread_id
    order by summary.created_at desc, summary.id
    limit my_summaries.at_most;
end
$$;

comment on function my_summaries(text, text, integer) is 'Summaries of a thread of the principal''s own, latest first';

create function claimed_messages(summary_id uuid)
returns table (id uuid, access_id bigint, thread_id text, role text, content text, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select message.id, message.access_id, message.thread_id, message.role, message.content, message.created_at
    from rag_conversation_messages as message
    where message.tenant_id = (select my_tenant_id())
        and message.access_id = any((select my_writable_access_ids())::bigint[])
        and message.summary_id = claimed_messages.summary_id
        and message.summarised_at is null
    order by message.number, message.id;
end
$$;

comment on function claimed_messages(uuid) is 'The principal''s own messages that a job is to sum up, in their order';

create function add_summary(
    id uuid, access_id bigint, document_id uuid, thread_id text, summary_text text, message_ids uuid[], model text
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    class record;
    marked uuid[];
begin
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = add_summary.access_id
        and mine.may_write
        and mine.user_id = (select my_user_id());
    if not found then
        raise exception 'no class of the principal''s own' using errcode = 'insufficient_privilege';
    end if;
    -- Some may have expired since they were read: the summary knows of them, and nobody else.
    with done as (
        update rag_conversation_messages as message
        set summarised_at = now()
        where message.tenant_id = class.tenant_id
            and message.access_id = class.access_id
            and message.thread_id = add_summary.thread_id
            and message.id = any(add_summary.message_ids)
            and message.summary_id = add_summary.id
            and message.summarised_at is null
        returning message.id
    )

    select coalesce(array_agg(done.id), '{}') into marked from done;
    if marked = '{}' then
        return 0;
    end if;
    insert into rag_conversation_summaries (
        tenant_id, id, access_id, document_id, user_id, project_id, thread_id, summary_text, message_ids, model
    )
    values (
        class.tenant_id, add_summary.id, class.access_id, add_summary.document_id, class.user_id, class.project_id,
        add_summary.thread_id, add_summary.summary_text, add_summary.message_ids, add_summary.model
    );
    return cardinality(marked);
end
$$;

comment on function add_summary(uuid, bigint, uuid, text, text, uuid[], text) is 'Keeps a summary of messages of the principal''s own beside its document, and marks them as summarised, in one transaction with both; how many messages. 0, and no summary, when none of them is left that was given to it';
