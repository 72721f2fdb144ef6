-- A change of the embedding model: a second column of vectors beside the one that is searched, filled while the service
-- goes on, and a short transaction in which the two change names. What reads texts of all tenants, or writes vectors,
-- belongs to rag_embedder; only the owner of the tables may call it, whom rag_migrator alone becomes. What changes
-- tables runs as that owner.

create function active_model()
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return (select model.model_id from rag_models as model where model.place = 'active');
end
$$;

comment on function active_model() is 'The embedding model that searches compare; null as long as none was ever added beside it, when every service is taken at its word';

create function check_model(embedding_model text)
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
declare
    active rag_models;
begin
    select model.*
    into active
    from rag_models as model
    where model.place = 'active';
    if active.model_id <> check_model.embedding_model then
        raise exception 'chunks are embedded with %', active.model_id using errcode = '55M01';
    end if;
    if active.writes_paused_until > clock_timestamp() then
        raise exception 'the embedding model is being changed' using errcode = '55M02';
    end if;
    return active.model_id;
end
$$;

comment on function check_model(text) is 'The active model, when chunks of this one may be written now. Raises 55M01 when another one is active, 55M02 for the seconds in which two models change places';

-- --- filling --------------------------------------------------------------------------------------

create function chunks_to_fill(from_tenant_id text, from_access_id bigint, at_most integer)
returns table (
    tenant_id text, access_id bigint, chunk_id uuid, title text, section text, chunk_text text, chunk_hash text
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    select
        lacking.tenant_id, lacking.access_id, lacking.id, document.title, lacking.section, lacking.chunk_text,
        lacking.chunk_hash
    from (
        select chunk.tenant_id, chunk.access_id, chunk.id, chunk.document_id, chunk.section, chunk.chunk_text,
            chunk.chunk_hash
        from (
            select class.tenant_id, class.access_id
            from rag_access_classes as class
            where (class.tenant_id, class.access_id) >= (chunks_to_fill.from_tenant_id, chunks_to_fill.from_access_id)
            order by class.tenant_id, class.access_id
        ) as class
        -- One probe of rag_chunks_second_contents for a class that has them all.
        cross join lateral (
            select found.tenant_id, found.access_id, found.id, found.document_id, found.section, found.chunk_text,
                found.chunk_hash
            from rag_chunks as found
            where found.tenant_id = class.tenant_id
                and found.access_id = class.access_id
                and found.second_embedding_model is null
            limit chunks_to_fill.at_most
        ) as chunk
        limit chunks_to_fill.at_most
    ) as lacking
    cross join lateral (
        select its.title
        from rag_documents as its
        where its.tenant_id = lacking.tenant_id
            and its.access_id = lacking.access_id
            and its.id = lacking.document_id
        offset 0
    ) as document;
end
$$;

comment on function chunks_to_fill(text, bigint, integer) is 'Chunks without a vector of the second model, with what is embedded of each, class after class from the given one on; none when there is no second model';

create function fill_vectors(
    model_id text, tenant_ids text[], access_ids bigint[], chunk_ids uuid[], embeddings text[]
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    filled bigint;
begin
    -- The model is asked for in the statement that writes: its snapshot is of a moment when the table is locked
    -- already, so that the columns cannot change places in between.
    update rag_chunks as chunk
    set second_embedding = cast(given.embedding as halfvec),
        second_embedding_model = fill_vectors.model_id
    from unnest(
        fill_vectors.tenant_ids, fill_vectors.access_ids, fill_vectors.chunk_ids, fill_vectors.embeddings
    ) as given (tenant_id, access_id, chunk_id, embedding)
    where chunk.tenant_id = given.tenant_id
        and chunk.access_id = given.access_id
        and chunk.id = given.chunk_id
        and chunk.second_embedding_model is null
        and exists (
            select
            from rag_models as model
            where model.place = 'second' and model.model_id = fill_vectors.model_id
        );
    get diagnostics filled = row_count;
    if not exists (
        select
        from rag_models as model
        where model.place = 'second' and model.model_id = fill_vectors.model_id
    ) then
        raise exception 'the second model is not %', fill_vectors.model_id using errcode = '55M01';
    end if;
    return filled;
end
$$;

comment on function fill_vectors(text, text[], bigint[], uuid[], text[]) is 'Writes vectors of the second model where there is none; returns how many. A chunk that was replaced or removed meanwhile is passed over. Raises 55M01 when the second model is another one';

create function count_fill(out chunks bigint, out filled bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set jit = off
as $$
begin
    select count(*), count(chunk.second_embedding_model)
    into chunks, filled
    from rag_chunks as chunk;
end
$$;

comment on function count_fill() is 'How many chunks there are, and how many have a vector of the second model; 0 of both when there is none';

create function lacks_vectors()
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return exists (select from chunks_to_fill('', 0, 1));
end
$$;

comment on function lacks_vectors() is 'Whether a chunk has no vector of the second model; one probe for each access class';

create function large_classes()
returns table (access_id bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select class.access_id
    from rag_class_indexes as class
    where class.ready
    order by class.access_id;
end
$$;

comment on function large_classes() is 'Classes whose own indexes are searched, by number: each needs one of the second model before that can be active';

create function set_models(active text, second text default null, is_former boolean default false)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_models as model;
    insert into rag_models (place, model_id, is_former)
    select listed.place, listed.model_id, listed.is_former
    from (values
        ('active', set_models.active, false),
        ('second', set_models.second, set_models.is_former)
    ) as listed (place, model_id, is_former)
    where listed.model_id is not null;
    -- The size that an index of vectors had at first is another one with another model.
    update rag_class_indexes as own
    set vector_bytes_per_chunk = cast(index.bytes as double precision) / greatest(own.chunks, 1)
    from class_indexes() as index
    where index.access_id = own.access_id and index.kind = 'vector' and index.is_usable;
end
$$;

comment on function set_models(text, text, boolean) is 'Notes which models the two columns are of, as the last step of what makes it so';

create function pause_writes(seconds integer)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_models as model
    set writes_paused_until = clock_timestamp() + make_interval(secs => least(pause_writes.seconds, 600))
    where model.place = 'active';
end
$$;

comment on function pause_writes(integer) is 'Refuses new chunks for so many seconds, at most 600, so that the last vectors can be filled; 0 ends it';

create function list_models()
returns table (place text, model_id text, is_former boolean, dimensions integer, changed_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select model.place, model.model_id, model.is_former, attribute.atttypmod, model.changed_at
    from rag_models as model
    join pg_attribute as attribute
        on attribute.attrelid = cast('rag_chunks' as regclass)
        and attribute.attname = case model.place when 'active' then 'embedding' else 'second_embedding' end
    order by model.place;
end
$$;

comment on function list_models() is 'The models of the two columns, the active one first, with their widths; no row before a second one was ever added';

-- --- comparing ------------------------------------------------------------------------------------

create function compare_models(embedding halfvec, second_embedding halfvec, top_k integer)
returns table (active_found integer, second_found integer, shared integer)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := my_access_ids();
begin
    return query
    with active as (
        select chunk.id
        from rag_chunks as chunk
        join rag_models as model on model.place = 'active' and model.model_id = chunk.embedding_model
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
            and chunk.second_embedding is not null
        order by chunk.embedding <=> compare_models.embedding, chunk.id
        limit compare_models.top_k
    ),

    second as (
        select chunk.id
        from rag_chunks as chunk
        join rag_models as model on model.place = 'second' and model.model_id = chunk.second_embedding_model
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
        order by chunk.second_embedding <=> compare_models.second_embedding, chunk.id
        limit compare_models.top_k
    )

    select
        cast((select count(*) from active) as integer),
        cast((select count(*) from second) as integer),
        cast((select count(*) from active join second on second.id = active.id) as integer);
end
$$;

comment on function compare_models(halfvec, halfvec, integer) is 'How many of the top_k chunks that are nearest to a question by the active model, among those that the principal may read and that have both vectors, are so by the second one as well';

-- --- changing the columns, as the owner -------------------------------------------------------------

create function second_indexes()
returns table (access_id bigint, index_name text, is_usable boolean)
language sql
stable
begin atomic
    select
        cast(named.parts[1] as bigint),
        cast(class.relname as text),
        index.indisvalid
        and named.parts[2] is null
        and method.amname = 'hnsw'
        and attribute.attname = 'second_embedding'
        and pg_get_expr(index.indpred, index.indrelid) is not distinct from format(
            '(access_id = %L::bigint)', named.parts[1]
        )
    from pg_index as index
    join pg_class as class on class.oid = index.indexrelid
    join pg_am as method on method.oid = class.relam
    join pg_attribute as attribute on attribute.attrelid = index.indrelid and attribute.attnum = index.indkey[0]
    cross join lateral (
        select regexp_match(
            class.relname, '^rag_chunks_second_([1-9][0-9]{0,17}|1[0-9]{18})(_cc(?:new|old)[0-9]*)?$'
        ) as parts
    ) as named
    where index.indrelid = cast('rag_chunks' as regclass)
        and named.parts is not null;
end;

comment on function second_indexes() is 'The indexes of the second model''s vectors, each of one large class. In no order';

create function empty_second_column(dimensions integer)
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    about_vector constant text := col_description(
        cast('rag_chunks' as regclass),
        (select attnum from pg_attribute where attrelid = cast('rag_chunks' as regclass) and attname = 'second_embedding')
    );
    about_model constant text := col_description(
        cast('rag_chunks' as regclass),
        (
            select attnum
            from pg_attribute
            where attrelid = cast('rag_chunks' as regclass) and attname = 'second_embedding_model'
        )
    );
    rule constant text := (
        select pg_get_constraintdef(con.oid)
        from pg_constraint as con
        where con.conrelid = cast('rag_chunks' as regclass) and con.conname = 'rag_chunks_second_embedding'
    );
begin
    -- Without values: neither reads or writes a row. Constraint and indexes go with the columns.
    alter table rag_chunks drop column second_embedding, drop column second_embedding_model;
    execute format(
        'alter table rag_chunks add column second_embedding halfvec(%s), add column second_embedding_model text',
        empty_second_column.dimensions
    );
    alter table rag_chunks
    alter column second_embedding set storage plain,
    alter column second_embedding set statistics 0;
    -- Checked for rows to come; that it holds for those that are there is looked at without a lock.
    execute format(
        'alter table rag_chunks add constraint rag_chunks_second_embedding %s not valid', replace(rule, ' NOT VALID', '')
    );
    execute format('comment on column rag_chunks.second_embedding is %L', about_vector);
    execute format('comment on column rag_chunks.second_embedding_model is %L', about_model);
    perform grant_model_columns();
end
$$;

comment on function empty_second_column(integer) is 'Makes the second column anew, without values and of another width, in no time';

create function grant_model_columns()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
begin
    -- Rights are the columns', and go with them when they change names.
    revoke select (embedding, embedding_model, second_embedding, second_embedding_model)
    on rag_chunks from rag_search, rag_steward, rag_embedder;
    revoke update (embedding, embedding_model, second_embedding, second_embedding_model)
    on rag_chunks from rag_search, rag_steward, rag_embedder;
    grant select (embedding, embedding_model) on rag_chunks to rag_search;
    grant select (embedding_model) on rag_chunks to rag_steward;
    grant select (second_embedding_model), update (second_embedding, second_embedding_model)
    on rag_chunks to rag_embedder;
end
$$;

comment on function grant_model_columns() is 'Who may do what with the columns of vectors and models; after these changed places, or were made anew, as at first';

create function add_model(active text, coming text, dimensions integer)
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    widths integer[];
begin
    lock table rag_chunks in access exclusive mode;
    if exists (select from list_models() as model where model.place = 'second') then
        raise exception 'there is a second model already' using errcode = '55M03';
    end if;
    if add_model.active = add_model.coming then
        raise exception 'the second model is the active one' using errcode = '55M03';
    end if;
    widths := array(
        select attribute.atttypmod
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass)
            and attribute.attname in ('embedding', 'second_embedding')
        order by attribute.attname
    );
    -- Both stand in the row, which has to fit into a page: 3,800 of one, less the head of the other.
    if widths[1] + add_model.dimensions > 3790 then
        raise exception '% and % dimensions do not fit into a page: 3790 together', widths[1], add_model.dimensions
            using errcode = '55M04';
    end if;
    if widths[2] <> add_model.dimensions then
        perform empty_second_column(add_model.dimensions);
    end if;
    perform set_models(add_model.active, add_model.coming);
end
$$;

comment on function add_model(text, text, integer) is 'Declares the active model, and a second one of so many dimensions that is to be filled. Raises 55M03 when there is one, 55M04 when both together are too wide';

create function swap_models()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    active text;
    second text;
    was_former boolean;
    number text;
    comments text[];
begin
    lock table rag_chunks in access exclusive mode;
    select
        max(model.model_id) filter (where model.place = 'active'),
        max(model.model_id) filter (where model.place = 'second'),
        bool_or(model.is_former) filter (where model.place = 'second')
    into active, second, was_former
    from list_models() as model;
    if second is null then
        raise exception 'there is no second model' using errcode = '55M03';
    end if;
    if lacks_vectors() then
        raise exception 'chunks lack a vector of the second model' using errcode = '55M05';
    end if;
    if to_regclass('rag_chunks_second_contents') is null
        or exists (
            select from pg_index where indexrelid = to_regclass('rag_chunks_second_contents') and not indisvalid
        )
        or exists (
            select
            from large_classes() as class
            where not exists (
                select from second_indexes() as index where index.access_id = class.access_id and index.is_usable
            )
        ) then
        raise exception 'an index of the second model is missing' using errcode = '55M06';
    end if;

    comments := array(
        select col_description(attribute.attrelid, attribute.attnum)
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass)
            and attribute.attname in ('embedding', 'embedding_model', 'second_embedding', 'second_embedding_model')
        order by attribute.attname
    );
    alter table rag_chunks rename column embedding to leaving_embedding;
    alter table rag_chunks rename column embedding_model to leaving_embedding_model;
    alter table rag_chunks rename column second_embedding to embedding;
    alter table rag_chunks rename column second_embedding_model to embedding_model;
    alter table rag_chunks rename column leaving_embedding to second_embedding;
    alter table rag_chunks rename column leaving_embedding_model to second_embedding_model;
    alter table rag_chunks rename constraint rag_chunks_embedding to rag_chunks_leaving_embedding;
    alter table rag_chunks rename constraint rag_chunks_second_embedding to rag_chunks_embedding;
    alter table rag_chunks rename constraint rag_chunks_leaving_embedding to rag_chunks_second_embedding;
    alter index rag_chunks_contents rename to rag_chunks_leaving_contents;
    alter index rag_chunks_second_contents rename to rag_chunks_contents;
    alter index rag_chunks_leaving_contents rename to rag_chunks_second_contents;
    for number in
        select distinct substring(class.relname from '[0-9]+$')
        from pg_index as index
        join pg_class as class on class.oid = index.indexrelid
        where index.indrelid = cast('rag_chunks' as regclass)
            and class.relname ~ '^rag_chunks_(vector|second)_[0-9]+$'
    loop
        execute format('alter index if exists %I rename to %I', 'rag_chunks_vector_' || number, 'rag_chunks_leaving_' || number);
        execute format('alter index if exists %I rename to %I', 'rag_chunks_second_' || number, 'rag_chunks_vector_' || number);
        execute format('alter index if exists %I rename to %I', 'rag_chunks_leaving_' || number, 'rag_chunks_second_' || number);
    end loop;
    execute format('comment on column rag_chunks.embedding is %L', comments[1]);
    execute format('comment on column rag_chunks.embedding_model is %L', comments[2]);
    execute format('comment on column rag_chunks.second_embedding is %L', comments[3]);
    execute format('comment on column rag_chunks.second_embedding_model is %L', comments[4]);
    perform grant_model_columns();

    -- That no vector is missing has been looked at. `not null` says it as well, but would read all rows while
    -- nobody else can: finish_swap() does that later, and until then this stands for it.
    alter table rag_chunks
    alter column second_embedding drop not null,
    alter column second_embedding_model drop not null;
    alter table rag_chunks drop constraint if exists rag_chunks_embedding_there;
    alter table rag_chunks
    add constraint rag_chunks_embedding_there check (embedding is not null and embedding_model is not null) not valid;
    perform set_models(second, active, not was_former);
end
$$;

comment on function swap_models() is 'Makes the second model the active one and the active one the second, in one transaction: columns, indexes, constraints and rights change names. Raises 55M03 when there is no second model, 55M05 when a chunk lacks its vector, 55M06 when an index is missing';

create function finish_swap()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
begin
    if exists (
        select
        from pg_constraint as con
        where con.conrelid = cast('rag_chunks' as regclass)
            and con.conname = 'rag_chunks_embedding_there'
            and con.convalidated
    ) then
        -- Without reading a row, since the constraint says so.
        alter table rag_chunks
        alter column embedding set not null,
        alter column embedding_model set not null;
        alter table rag_chunks drop constraint rag_chunks_embedding_there;
    end if;
end
$$;

comment on function finish_swap() is 'Says `not null` of the active columns again, once the constraint that stands for it was validated';

create function drop_second_model()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    active text;
begin
    lock table rag_chunks in access exclusive mode;
    active := (select model.model_id from list_models() as model where model.place = 'active');
    perform empty_second_column((
        select attribute.atttypmod
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass) and attribute.attname = 'embedding'
    ));
    perform set_models(active);
end
$$;

comment on function drop_second_model() is 'Removes the vectors and indexes of the second model; the active one stays declared';
