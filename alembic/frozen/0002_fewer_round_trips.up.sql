-- What ingestion knows of a source comes in one statement where it took five, and once more in one where it took three;
-- and who speaks is asked once where it was asked twice.

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

grant execute on function classes_of(record) to rag_search;

grant create on schema rag to rag_search, rag_principal;
set local role rag_search;

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
    return classes_of(me);
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
        -- Asked once who speaks, which costs more than all else here. As a sub-select, so that the plan is kept.
        and class.access_id = any((select classes_of(me))::bigint[]);
end
$$;

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

set local role rag_owner;

create function look_at_source(
    access_id bigint, scope text, user_id bigint, project_id text, source_type text, source_id text, provenance_id text
)
returns table (
    id uuid, document_access_id bigint, source_hash text, updated_at timestamptz,
    generation bigint, retractions bigint, closed bigint
)
language plpgsql
-- It changes nothing, and has to see what the same statement did before: a class that was made, another's commit.
volatile
security definer
set search_path = rag, pg_temp
-- A plan is kept, and may have been made while a table was empty.
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    named constant bytea := source_digest(look_at_source.source_type, look_at_source.source_id);
    of_any_type constant bytea := source_digest(null, look_at_source.source_id);
    of_what_it_is_of constant bytea := provenance_digest(look_at_source.provenance_id);
    tenant constant text := my_tenant_id();
    mine bigint[];
    -- The owner's among these, whatever their tags.
    owned bigint[];
    may_write boolean;
    buried bigint;
    raised bigint;
    closing bigint;
begin
    select
        array_agg(class.access_id),
        coalesce(array_agg(class.access_id) filter (where class.is_owners), '{}'),
        bool_or(class.is_owners and class.may_write and class.access_id = look_at_source.access_id)
    into mine, owned, may_write
    from (
        select
            one.access_id,
            one.may_write,
            one.scope = look_at_source.scope
            and one.user_id is not distinct from look_at_source.user_id
            and one.project_id is not distinct from look_at_source.project_id as is_owners
        from my_classes() as one
    ) as class;
    -- The list as a sub-select, and further down not by unnest(): the planner would know how long it is this time, and
    -- plan anew each time, which takes as long as all the rest.
    select
        coalesce(sum(stone.generation) filter (
            where stone.source_digest = named and stone.access_id = look_at_source.access_id
        ), 0),
        coalesce(sum(stone.generation) filter (
            where stone.source_digest in (of_any_type, of_what_it_is_of) and stone.access_id = any(owned)
        ), 0),
        max(stone.generation) filter (
            where stone.retracted
                and stone.source_digest in (of_any_type, of_what_it_is_of) and stone.access_id = any(owned)
        )
    into buried, raised, closing
    from rag_tombstones as stone
    where stone.tenant_id = tenant
        and stone.access_id = any((select owned || look_at_source.access_id)::bigint[])
        and stone.source_digest in (named, of_any_type, of_what_it_is_of);
    -- An erasure of the tenant, the owner, the project or the source counts as a deletion; of an owner and a
    -- project only for whoever may write there, since it is nobody else's business.
    select buried + count(*) into buried
    from rag_erasures as erasure
    where may_write
        and erasure.tenant_id in (tenant, encode(erasure_digest('tenant', tenant, '{}'), 'hex'))
        and erasure.subject_digest in (
            erasure_digest('tenant', tenant, '{}'),
            erasure_digest('user', tenant, array[look_at_source.user_id::text]),
            erasure_digest('project', tenant, array[look_at_source.project_id]),
            erasure_digest('project', tenant, array[look_at_source.project_id, look_at_source.user_id::text]),
            erasure_digest('source', tenant, array[look_at_source.source_id]),
            erasure_digest('source', tenant, array[look_at_source.source_id, look_at_source.source_type])
        );
    return query
    select found.id, found.access_id, found.source_hash, found.updated_at, buried, raised, closing
    from (select 1) as once
    left join (
        select document.id, document.access_id, document.source_hash, document.updated_at
        from generate_subscripts(mine, 1) as place
        -- Class by class, as in my_document().
        cross join lateral (
            select
                source.id, source.access_id, source.source_hash, source.updated_at, source.scope, source.user_id,
                source.project_id
            from rag_documents as source
            where source.tenant_id = tenant
                and source.access_id = mine[place]
                and source.source_type = look_at_source.source_type
                and source.source_id = look_at_source.source_id
            offset 0
        ) as document
        where document.scope = look_at_source.scope
            and document.user_id is not distinct from look_at_source.user_id
            and document.project_id is not distinct from look_at_source.project_id
    ) as found on true
    order by
        (found.access_id = look_at_source.access_id) desc nulls last,
        found.updated_at desc,
        found.id;
end
$$;

comment on function look_at_source(bigint, text, bigint, text, text, text, text) is 'What is stored of a source for this owner: its documents (more than one only while tags change), the one of the wanted class first, and how often it was deleted; one row at least, with nulls when nothing is stored. And whether the source, or what it is derived of, is retracted in a class of this owner that the principal may read. retractions: grows with each; closed: the highest that is in force, null when the source is open';

grant execute on function look_at_source(bigint, text, bigint, text, text, text, text) to rag_app, rag_publisher, rag_worker;
alter function look_at_source(bigint, text, bigint, text, text, text, text) owner to rag_principal;
revoke create on schema rag from rag_search, rag_principal;

create function open_source(
    owner_name text, source_name text, tenant_id text, scope text, user_id bigint, project_id text, tags text[],
    source_type text, source_id text, provenance_id text, embedding_model text
)
returns table (
    access_id bigint, id uuid, document_access_id bigint, source_hash text, updated_at timestamptz, generation bigint,
    retractions bigint, closed bigint
)
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    perform
        pg_advisory_xact_lock_shared(tenant_lock(open_source.tenant_id)),
        pg_advisory_xact_lock_shared(hashtextextended(open_source.owner_name, 0)),
        pg_advisory_xact_lock(hashtextextended(open_source.source_name, 0));
    -- Statements of their own, so that they see what was committed while this one waited.
    return query
    select
        granted.access_id, found.id, found.document_access_id, found.source_hash, found.updated_at, found.generation,
        found.retractions, found.closed
    from (
        select access_class(
            open_source.scope, open_source.user_id, open_source.project_id, open_source.tags
        ) as access_id
    ) as granted
    cross join lateral look_at_source(
        access_id => granted.access_id,
        scope => open_source.scope,
        user_id => open_source.user_id,
        project_id => open_source.project_id,
        source_type => open_source.source_type,
        source_id => open_source.source_id,
        provenance_id => open_source.provenance_id
    ) as found;
    -- From here on until the transaction ends no two models can change places.
    lock table rag_chunks in row exclusive mode;
    perform check_model(open_source.embedding_model);
end
$$;

comment on function open_source(text, text, text, text, bigint, text, text[], text, text, text, text) is 'Begins the writing of a source: waits until nobody erases in the tenant, retracts among what this owner has, or writes this source, and keeps them out until the transaction ends; the class that its document belongs to and what look_at_source() says of it then; raises as check_model() does. The names stand for the owner, and for the source of this owner, in a lock';

grant execute on function open_source(text, text, text, text, bigint, text, text[], text, text, text, text) to rag_app, rag_publisher, rag_worker;

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

grant execute on function claim_source_as(
    text, bigint, text, text[], text, text, bigint, text, text[], text, text, text, text, uuid, interval
) to rag_app, rag_publisher, rag_worker;
