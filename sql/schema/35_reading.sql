-- What a principal reads, and the little that it changes, through functions. They belong to
-- rag_principal, whom the same policies bind as the caller. The caller has no right of its own on text,
-- titles, names and tags: a condition on them, cheap and "leakproof" as equality is, would be evaluated
-- before the policies, and EXPLAIN ANALYZE would tell whether somebody else's row meets it.

create function source_digest(source_type text, source_id text)
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[source_type, source_id])::text, 'UTF8'));
end;

comment on function source_digest(text, text) is 'Stands for a source in a tombstone, which has to tell it again and nothing about it';

create function provenance_digest(provenance_id text)
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[null, null, provenance_id])::text, 'UTF8'));
end;

comment on function provenance_digest(text) is 'Stands in a tombstone for all that is derived of something; no source has this digest';

create function erasure_digest(kind text, tenant_id text, subject text[])
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[kind, tenant_id] || subject)::text, 'UTF8'));
end;

comment on function erasure_digest(text, text, text[]) is 'Stands for what was erased: a tenant, or its user, project (name, owner) or source (id, type)';

create function my_documents()
returns setof rag_documents
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return query
    select document.*
    from rag_documents as document;
end
$$;

comment on function my_documents() is 'All documents that the principal may read';

-- What a synchronisation compares with its source: of a worker, which reads no texts in bulk, as of everybody.
create function my_origin(source text)
returns table (
    id uuid, scope text, user_id bigint, project_id text, tags text[], source_type text, source_id text,
    source_hash text, updated_at timestamptz, path text, content_sha256 text
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
        document.id, document.scope, document.user_id, document.project_id, document.tags, document.source_type,
        document.source_id, document.source_hash, document.updated_at,
        document.metadata -> 'origin' ->> 'path', document.metadata -> 'origin' ->> 'sha256'
    from rag_documents as document
    where document.metadata -> 'origin' ->> 'source' = my_origin.source
        -- Both, so that what an ingest merely says of its origin makes nothing a part of a source.
        and starts_with(document.source_id, my_origin.source || ':');
end
$$;

comment on function my_origin(text) is 'Of the documents of a synchronised source that the principal may read: whose they are, their path, and digests; no text';

create function my_listed_documents()
returns table (
    tenant_id text, id uuid, scope text, user_id bigint, tags text[], source_type text, language text,
    doc_type text, verified boolean, created_at timestamptz, updated_at timestamptz,
    content_updated_at timestamptz, source_updated_at timestamptz
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
        document.tenant_id, document.id, document.scope, document.user_id, document.tags, document.source_type,
        document.language, document.doc_type, document.verified, document.created_at, document.updated_at,
        document.content_updated_at, document.source_updated_at
    from my_principal() as me
    join rag_access_classes as class
        on class.tenant_id = me.tenant_id
        and class.scope = 'user'
        and class.tags && me.tags
    join rag_documents as document
        on document.tenant_id = me.tenant_id
        and document.access_id = class.access_id
    where me.user_scope = 'metadata';
end
$$;

comment on function my_listed_documents() is 'For an analyst with user_scope metadata: that users'' own documents exist, without a word of them';

create function my_chunks()
returns table (
    tenant_id text, access_id bigint, document_id uuid, chunk_index integer, chunk_text text, section text,
    page_number integer, language text, token_count integer, token_counter text, embedding_model text,
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
        chunk.tenant_id, chunk.access_id, chunk.document_id, chunk.chunk_index, chunk.chunk_text, chunk.section,
        chunk.page_number, chunk.language, chunk.token_count, chunk.token_counter, chunk.embedding_model,
        chunk.created_at
    from rag_chunks as chunk;
end
$$;

comment on function my_chunks() is 'All chunks that the principal may read, without vectors';

-- Class by class, along the primary key: a foreign id and a missing one are looked for in the same
-- places, and found in none. `offset 0` keeps the planner from looking for the id among all of the tenant.
create function my_document(document_id uuid)
returns setof rag_documents
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    return query
    select found.*
    from my_principal() as me
    cross join lateral unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.*
        from rag_documents as document
        where document.tenant_id = me.tenant_id
            and document.access_id = mine.access_id
            and document.id = my_document.document_id
        offset 0
    ) as found;
end
$$;

comment on function my_document(uuid) is 'One document that the principal may read; no row when it is missing or hidden, at the same cost';

create function my_document_chunks(document_id uuid)
returns setof rag_chunks
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    return query
    select found.*
    from my_principal() as me
    cross join lateral unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select chunk.*
        from rag_chunks as chunk
        where chunk.tenant_id = me.tenant_id
            and chunk.access_id = mine.access_id
            and chunk.document_id = my_document_chunks.document_id
        offset 0
    ) as found
    order by found.chunk_index;
end
$$;

comment on function my_document_chunks(uuid) is 'The chunks of one document that the principal may read, in order';

-- What a list of ids or of sources stands for. Each class of the caller is looked through by itself: `offset 0`
-- keeps the planner from turning the loop around, which would look a listed value up among everybody's rows,
-- find a foreign one there, and take longer over it than over a missing one.
create function my_documents_among(document_ids uuid[])
returns table (document_id uuid)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
begin
    return query
    select found.id
    from unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.id
        from rag_documents as document
        where document.tenant_id = tenant
            and document.access_id = mine.access_id
            and document.id = any(my_documents_among.document_ids)
        offset 0
    ) as found;
end
$$;

comment on function my_documents_among(uuid[]) is 'Of the documents with these ids, those that the principal may read; a foreign id costs what a missing one does';

create function my_sources_among(source_ids text[])
returns table (source_id text, document_id uuid)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
begin
    return query
    select found.source_id, found.id
    from unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.source_id, document.id
        from rag_documents as document
        where document.tenant_id = tenant
            and document.access_id = mine.access_id
            and document.source_id = any(my_sources_among.source_ids)
        offset 0
    ) as found;
end
$$;

comment on function my_sources_among(text[]) is 'The documents of these sources that the principal may read; several for a source that is in several classes, or of several types; a foreign source costs what a missing one does';

create function find_source(
    access_id bigint, scope text, user_id bigint, project_id text, source_type text, source_id text
)
returns table (id uuid, document_access_id bigint, source_hash text, updated_at timestamptz, generation bigint)
language plpgsql
-- It changes nothing, and has to see what the same statement did before: a class that was made, another's commit.
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    mine bigint[];
    may_write boolean;
    buried bigint;
begin
    select
        array_agg(class.access_id),
        bool_or(
            class.may_write
            and class.access_id = find_source.access_id
            and class.scope = find_source.scope
            and class.user_id is not distinct from find_source.user_id
            and class.project_id is not distinct from find_source.project_id
        )
    into mine, may_write
    from my_classes() as class;
    select coalesce(sum(tombstone.generation), 0) into buried
    from rag_tombstones as tombstone
    where tombstone.tenant_id = tenant
        and tombstone.access_id = find_source.access_id
        and tombstone.source_digest = source_digest(find_source.source_type, find_source.source_id);
    -- An erasure of the tenant, the owner, the project or the source counts as a deletion; of an owner and a
    -- project only for whoever may write there, since it is nobody else's business.
    select buried + count(*) into buried
    from rag_erasures as erasure
    where may_write
        and erasure.tenant_id in (tenant, encode(erasure_digest('tenant', tenant, '{}'), 'hex'))
        and erasure.subject_digest in (
            erasure_digest('tenant', tenant, '{}'),
            erasure_digest('user', tenant, array[find_source.user_id::text]),
            erasure_digest('project', tenant, array[find_source.project_id]),
            erasure_digest('project', tenant, array[find_source.project_id, find_source.user_id::text]),
            erasure_digest('source', tenant, array[find_source.source_id]),
            erasure_digest('source', tenant, array[find_source.source_id, find_source.source_type])
        );
    return query
    select found.id, found.access_id, found.source_hash, found.updated_at, buried
    from (select 1) as once
    left join (
        select document.id, document.access_id, document.source_hash, document.updated_at
        from unnest(mine) as readable (access_id)
        -- Class by class, as in my_document().
        cross join lateral (
            select
                source.id, source.access_id, source.source_hash, source.updated_at, source.scope, source.user_id,
                source.project_id
            from rag_documents as source
            where source.tenant_id = tenant
                and source.access_id = readable.access_id
                and source.source_type = find_source.source_type
                and source.source_id = find_source.source_id
            offset 0
        ) as document
        where document.scope = find_source.scope
            and document.user_id is not distinct from find_source.user_id
            and document.project_id is not distinct from find_source.project_id
    ) as found on true
    order by
        (found.access_id = find_source.access_id) desc nulls last,
        found.updated_at desc,
        found.id;
end
$$;

comment on function find_source(bigint, text, bigint, text, text, text) is 'What is stored of a source for this owner: its documents (more than one only while tags change), the one of the wanted class first, and how often it was deleted. One row at least, with nulls when nothing is stored';

-- find_source() and retraction_of() are for processes of version 0.1.0, which may run on while a database is migrated; this
-- says both, and asks once who speaks.
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

create function bury_source(access_id bigint, source_type text, source_id text, reason text)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    buried bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    insert into rag_tombstones as tombstone (tenant_id, access_id, source_digest, reason)
    values (
        tenant,
        bury_source.access_id,
        source_digest(bury_source.source_type, bury_source.source_id),
        bury_source.reason
    )
    on conflict (tenant_id, access_id, source_digest) do update
    set generation = tombstone.generation + 1,
        reason = excluded.reason,
        updated_at = excluded.updated_at
    returning tombstone.generation into buried;
    return buried;
end
$$;

comment on function bury_source(bigint, text, text, text) is 'Remembers that a source was deleted, so that an ingest that began before does not bring it back; returns how often it was';

-- The recursion goes through documents that the principal may read and not write: what is derived of them is
-- no better for that. Class by class, as in my_document(), so that a foreign name costs what a missing one does.
create function derived_documents(document_ids uuid[], source_ids text[], provenance_ids text[], cascades boolean)
returns table (
    access_id bigint, document_id uuid, scope text, source_id text, is_named boolean, may_write boolean
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    readable constant bigint[] := my_access_ids();
    writable constant bigint[] := my_writable_access_ids();
    origins constant text[] := provenance_ids || case when cascades then source_ids end;
begin
    return query
    with recursive tainted as (
        (
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select document.access_id, document.id, document.scope, document.source_id, true as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.id = any(document_ids)
                offset 0
            ) as named
            union
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select document.access_id, document.id, document.scope, document.source_id, true as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.source_id = any(source_ids)
                offset 0
            ) as named
            union
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select
                    document.access_id, document.id, document.scope, document.source_id,
                    document.provenance_id = any(provenance_ids) as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.provenance_id = any(origins)
                offset 0
            ) as named
        )
        union
        select derived.access_id, derived.id, derived.scope, derived.source_id, false
        from tainted
        cross join lateral unnest(readable) as mine (access_id)
        cross join lateral (
            select document.access_id, document.id, document.scope, document.source_id
            from rag_documents as document
            where cascades
                and document.tenant_id = tenant
                and document.access_id = mine.access_id
                and document.provenance_id = tainted.source_id
            offset 0
        ) as derived
    )

    select
        tainted.access_id,
        tainted.id,
        tainted.scope,
        tainted.source_id,
        bool_or(tainted.is_named),
        tainted.access_id = any(writable)
    from tainted
    group by tainted.access_id, tainted.id, tainted.scope, tainted.source_id
    order by bool_or(tainted.is_named) desc, tainted.source_id, tainted.access_id, tainted.id;
end
$$;

comment on function derived_documents(uuid[], text[], text[], boolean) is 'Of what the principal may read: documents with these ids, of these sources, and of these provenances; with cascades also what is derived of them, whose provenance_id is the source_id of one of them, and so on. May_write says whether the principal may remove it';

create function retraction_of(
    scope text, user_id bigint, project_id text, source_id text, provenance_id text,
    out generation bigint, out closed bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    select coalesce(sum(tombstone.generation), 0), max(tombstone.generation) filter (where tombstone.retracted)
    into retraction_of.generation, retraction_of.closed
    from my_classes() as class
    join rag_tombstones as tombstone
        on tombstone.tenant_id = class.tenant_id
        and tombstone.access_id = class.access_id
        and tombstone.source_digest in (
            source_digest(null, retraction_of.source_id), provenance_digest(retraction_of.provenance_id)
        )
    where class.scope = retraction_of.scope
        and class.user_id is not distinct from retraction_of.user_id
        and class.project_id is not distinct from retraction_of.project_id;
end
$$;

comment on function retraction_of(text, bigint, text, text, text) is 'Whether a source of this owner, or what it is derived of, is retracted in a class that the principal may read. generation: grows with each retraction; closed: the highest that is in force, null when the source is open';

create function close_sources(
    access_ids bigint[], source_ids text[], provenance_ids text[], document_ids uuid[], cascade_id text
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    buried bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    with named as (
        select
            entry.access_id,
            entry.document_id,
            case
                when entry.provenance_id is null then source_digest(null, entry.source_id)
                else provenance_digest(entry.provenance_id)
            end as digest
        from unnest(
            close_sources.access_ids, close_sources.source_ids, close_sources.provenance_ids,
            close_sources.document_ids
        ) as entry (access_id, source_id, provenance_id, document_id)
    ),

    raised as (
        insert into rag_tombstones as tombstone (
            tenant_id, access_id, source_digest, reason, retracted, cascade_id, removed_id
        )
        select distinct on (named.access_id, named.digest)
            tenant, named.access_id, named.digest, 'invalidated', true, close_sources.cascade_id, named.document_id
        from named
        order by named.access_id, named.digest, named.document_id nulls last
        on conflict (tenant_id, access_id, source_digest) do update
        set retracted = true,
            generation = tombstone.generation + 1,
            reason = excluded.reason,
            updated_at = excluded.updated_at,
            cascade_id = excluded.cascade_id,
            removed_id = coalesce(excluded.removed_id, tombstone.removed_id)
        returning tombstone.generation
    )

    select max(raised.generation) into buried
    from raised;
    return buried;
end
$$;

comment on function close_sources(bigint[], text[], text[], uuid[], text) is 'Retracts in each class the source or, where the list of provenances has one, what is derived of it: an ingest is refused until it is reinstated, and one that began before gives up. Lists of one length; returns the highest generation';

create function reopen_sources(
    source_ids text[], provenance_ids text[], document_ids uuid[], cascade_ids text[], scopes text[]
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
    digests constant bytea[] := array(
        select source_digest(null, source)
        from unnest(reopen_sources.source_ids) as source
        union
        select provenance_digest(origin)
        from unnest(reopen_sources.source_ids || reopen_sources.provenance_ids) as origin
    );
    classes constant bigint[] := array(
        select class.access_id
        from my_classes() as class
        where class.may_write
            and class.scope = any(reopen_sources.scopes)
    );
    opened bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    update rag_tombstones as tombstone
    set retracted = false,
        updated_at = now()
    where tombstone.tenant_id = tenant
        and tombstone.access_id = any(classes)
        and tombstone.retracted
        and (
            tombstone.source_digest = any(digests)
            or tombstone.removed_id = any(reopen_sources.document_ids)
            or tombstone.cascade_id = any(reopen_sources.cascade_ids)
        );
    get diagnostics opened = row_count;
    return opened;
end
$$;

comment on function reopen_sources(text[], text[], uuid[], text[], text[]) is 'Lets retracted sources, provenances, the sources of retracted documents and what was retracted under these cascades be ingested again, in the classes of these scopes that the principal may write; returns how many tombstones were lifted. What was removed does not come back by itself';

create function search_mode(embedding_model text, scope text, document_ids uuid[])
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
begin
    return (
        select case
            when count(*) = 0 then 'none'
            when count(*) filter (where chunk.embedding_model = search_mode.embedding_model) = 0 then 'keyword'
            when count(*) filter (where chunk.embedding_model = search_mode.embedding_model) < count(*) then 'partial'
            else 'hybrid'
        end
        from unnest(narrowed_access_ids(search_mode.scope)) as mine (access_id)
        -- Class by class, as in my_document().
        cross join lateral (
            select chunk.embedding_model
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = mine.access_id
                and (search_mode.document_ids is null or chunk.document_id = any(search_mode.document_ids))
            offset 0
        ) as chunk
    );
end
$$;

comment on function search_mode(text, text, uuid[]) is 'Which arms a search could use where it found nothing; the words of the column mode of rag.search, or none when the principal sees no chunk there';

create function my_min_similarity(embedding_model text)
returns double precision
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return (
        select min(calibration.min_similarity)
        from rag_calibrations as calibration
        where calibration.tenant_id = (select my_tenant_id())
            and calibration.embedding_model = my_min_similarity.embedding_model
    );
end
$$;

comment on function my_min_similarity(text) is 'The cosine below which chunks of the principal''s tenant do not answer, as rag eval --calibrate found it; null where the shipped one counts';

create function my_queries()
returns table (
    tenant_id text, query_id uuid, user_id bigint, project_id text, scope text, query_length integer,
    query_text text, mode text, embedding_model text, model_used text, result_count integer,
    citation_count integer, context_tokens integer, confidence integer, action text, route_tag text,
    route_fallback boolean, retrieval_ms double precision, generation_ms double precision,
    latency_ms double precision, asked_at timestamptz
)
language plpgsql
stable
security definer
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
        log.tenant_id,
        log.id,
        case when me.user_scope is distinct from 'none' then log.user_id end,
        case
            when me.user_scope is null or '*' = any(me.projects) or log.project_id = any(me.projects)
                then log.project_id
        end,
        log.scope,
        log.query_length,
        case when me.user_scope is null or me.user_scope = 'text' then log.query_text end,
        log.mode, log.embedding_model, log.model_used, log.result_count,
        log.citation_count, log.context_tokens, log.confidence, log.action,
        case when me.user_scope is null or log.route_tag = any(me.tags || array['system']) then log.route_tag end,
        log.route_fallback,
        log.retrieval_ms, log.generation_ms, log.latency_ms,
        log.created_at
    from rag_query_logs as log;
end
$$;

comment on function my_queries() is 'The principal''s own questions; for an analyst those of the tenant: their text only with user_scope text, who asked not with none, projects and tags as far as they are the analyst''s';

create function my_query_chunks()
returns table (
    tenant_id text, query_id uuid, user_id bigint, rank integer, document_id uuid, chunk_index integer,
    score double precision, cosine double precision, cited boolean
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
        hit.tenant_id,
        hit.query_id,
        case when me.user_scope is distinct from 'none' then hit.user_id end,
        hit.rank,
        hit.document_id,
        hit.chunk_index,
        hit.score,
        hit.cosine,
        hit.cited
    from my_principal() as me
    cross join rag_query_log_chunks as hit
    join rag_documents as document
        on document.tenant_id = hit.tenant_id
        and document.id = hit.document_id;
end
$$;

comment on function my_query_chunks() is 'What the questions of my_queries() got back, as far as the principal may read the documents';

create function my_feedback()
returns table (
    tenant_id text, query_id uuid, user_id bigint, document_id uuid, chunk_index integer, rating smallint,
    clicked boolean, created_at timestamptz, updated_at timestamptz
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
        given.tenant_id,
        given.query_id,
        case when me.user_scope is distinct from 'none' then given.user_id end,
        given.document_id,
        given.chunk_index,
        given.rating,
        given.clicked,
        given.created_at,
        given.updated_at
    from my_principal() as me
    cross join rag_feedback as given
    where given.document_id is null
        or exists (
            select
            from rag_documents as document
            where document.tenant_id = given.tenant_id
                and document.id = given.document_id
        );
end
$$;

comment on function my_feedback() is 'What was made of the questions of my_queries(): of the answers, and of sources as far as the principal may read the documents';

create function give_feedback(
    query_id uuid, document_id uuid, chunk_index integer, rating integer, clicked boolean
)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
    place integer := 0;
    class_id bigint;
begin
    select principal.tenant_id, principal.user_id into me from my_principal() as principal;
    if me.user_id is null then
        return false;
    end if;
    -- Before anything is looked up that an erasure takes away.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    perform
    from rag_query_logs as log
    where log.tenant_id = me.tenant_id
        and log.user_id = me.user_id
        and log.id = give_feedback.query_id;
    if not found then
        return false;
    end if;
    if give_feedback.document_id is not null then
        select hit.rank, document.access_id
        into place, class_id
        from rag_query_log_chunks as hit
        cross join lateral my_document(hit.document_id) as document
        where hit.tenant_id = me.tenant_id
            and hit.user_id = me.user_id
            and hit.query_id = give_feedback.query_id
            and hit.document_id = give_feedback.document_id
            and hit.chunk_index = give_feedback.chunk_index
        order by hit.rank
        limit 1;
        if not found then
            return false;
        end if;
    end if;
    insert into rag_feedback as given (
        tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index, rating, clicked
    )
    values (
        me.tenant_id, me.user_id, give_feedback.query_id, place, class_id, give_feedback.document_id,
        case when give_feedback.document_id is not null then give_feedback.chunk_index end,
        give_feedback.rating, give_feedback.clicked
    )
    on conflict (tenant_id, user_id, query_id, rank) do update
    set rating = coalesce(excluded.rating, given.rating),
        clicked = given.clicked or excluded.clicked,
        updated_at = excluded.updated_at;
    return true;
end
$$;

comment on function give_feedback(uuid, uuid, integer, integer, boolean) is 'Keeps what the principal made of a question of their own: of a source that it got back and that they still may read, or of the answer where document_id is null. rating 1, 0, -1, or null for the one before. False, and nothing is written, for a question or a source that is not theirs, as for one that is missing';

create function my_tag_owner(tag text)
returns table (owner_user_id bigint, owner_email text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select owned.owner_user_id, owned.owner_email
    from rag_tags as owned
    where owned.tenant_id = (select my_tenant_id())
        and owned.name = my_tag_owner.tag;
end
$$;

comment on function my_tag_owner(text) is 'Who owns a tag that the principal holds; no row for a tag without an owner, as for one that is not the principal''s';

create function my_prompt()
returns table (prompt text, replaces boolean, generation bigint)
language plpgsql
stable
security definer
rows 1
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select told.prompt, told.replaces, told.generation
    from rag_prompts as told
    where told.tenant_id = (select my_tenant_id());
end
$$;

comment on function my_prompt() is 'What the principal''s tenant tells the model; no row when it says nothing';

create function my_members()
returns table (owner_user_id bigint, project_id text, member_user_id bigint, may_write boolean, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        membership.owner_user_id, membership.project_id, membership.member_user_id, membership.may_write,
        membership.created_at
    from rag_project_members as membership
    order by 1, 2, 3;
end
$$;

comment on function my_members() is 'Projects that the principal''s user shares, or has been given';

create function share_project(project_id text, member_user_id bigint, may_write boolean)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.tenant_id, principal.user_id into me from my_principal() as principal;
    if me.user_id is null then
        raise exception 'a project belongs to a user' using errcode = 'insufficient_privilege';
    end if;
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    insert into rag_project_members (tenant_id, owner_user_id, project_id, member_user_id, may_write)
    values (me.tenant_id, me.user_id, share_project.project_id, share_project.member_user_id, share_project.may_write)
    on conflict (tenant_id, member_user_id, owner_user_id, project_id) do update
    set may_write = excluded.may_write;
end
$$;

comment on function share_project(text, bigint, boolean) is 'Shares the principal''s own project with another user of the tenant, or changes whether they may write';

create function unshare_project(project_id text, member_user_id bigint)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    delete from rag_project_members as membership
    where membership.owner_user_id = my_user_id()
        and membership.project_id = unshare_project.project_id
        and membership.member_user_id = unshare_project.member_user_id;
    return found;
end
$$;

comment on function unshare_project(text, bigint) is 'Ends the sharing of the principal''s own project with a user; false when it was not shared with them';

create function note_synchronisation(
    access_id bigint, source text, version text, files integer, written integer, removed integer, unchanged integer,
    failed integer
)
returns timestamptz
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    ended constant timestamptz := clock_timestamp();
    succeeded timestamptz;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    insert into rag_synchronisations as last (
        tenant_id, access_id, source, version, files, written, removed, unchanged, failed, finished_at, succeeded_at
    )
    values (
        tenant,
        note_synchronisation.access_id,
        note_synchronisation.source,
        note_synchronisation.version,
        note_synchronisation.files,
        note_synchronisation.written,
        note_synchronisation.removed,
        note_synchronisation.unchanged,
        note_synchronisation.failed,
        ended,
        case note_synchronisation.failed when 0 then ended end
    )
    on conflict (tenant_id, access_id, source) do update
    set version = excluded.version,
        files = excluded.files,
        written = excluded.written,
        removed = excluded.removed,
        unchanged = excluded.unchanged,
        failed = excluded.failed,
        finished_at = excluded.finished_at,
        succeeded_at = coalesce(excluded.succeeded_at, last.succeeded_at)
    returning last.succeeded_at into succeeded;
    return succeeded;
end
$$;

comment on function note_synchronisation(bigint, text, text, integer, integer, integer, integer, integer) is 'Keeps what came of a synchronisation, instead of the one before; returns when the last one ended that had no failures. Raises 42501 for a class that the principal may not write, as for one that is gone';

create function my_synchronisations()
returns table (
    scope text, user_id bigint, project_id text, tags text[], source text, version text, files integer,
    written integer, removed integer, unchanged integer, failed integer, finished_at timestamptz,
    succeeded_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    -- A source whose tags were changed has a row in its former class as well.
    select distinct on (class.scope, class.user_id, class.project_id, last.source)
        class.scope, class.user_id, class.project_id, class.tags, last.source, last.version, last.files,
        last.written, last.removed, last.unchanged, last.failed, last.finished_at, last.succeeded_at
    from my_classes() as class
    cross join lateral (
        select
            run.source, run.version, run.files, run.written, run.removed, run.unchanged, run.failed,
            run.finished_at, run.succeeded_at
        from rag_synchronisations as run
        where run.tenant_id = class.tenant_id
            and run.access_id = class.access_id
        offset 0
    ) as last
    order by class.scope, class.user_id, class.project_id, last.source, last.finished_at desc;
end
$$;

comment on function my_synchronisations() is 'What came of the last synchronisation of each source whose documents the principal may read, one row for each source and owner';
