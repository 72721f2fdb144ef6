-- Care of large classes: which there are, what indexes they have, and their statistics. Judging and building are
-- rag maintain's: an index is built concurrently, which no function can, and only by the owner of the table.
-- The definer functions belong to rag_search, which may read lexemes; they give out numbers alone.

create function class_indexes()
returns table (access_id bigint, kind text, index_name text, is_usable boolean, bytes bigint)
language sql
stable
begin atomic
    select
        cast(named.parts[2] as bigint),
        named.parts[1],
        cast(class.relname as text),
        index.indisvalid
        and named.parts[3] is null
        and case named.parts[1]
            when 'vector' then method.amname = 'hnsw' and operators.opcname = 'halfvec_cosine_ops'
            else method.amname = 'gin' and operators.opcname = 'tsvector_ops'
        end
        and pg_get_expr(index.indpred, index.indrelid) is not distinct from format(
            '(access_id = %L::bigint)', named.parts[2]
        ),
        pg_relation_size(class.oid)
    from pg_index as index
    join pg_class as class on class.oid = index.indexrelid
    join pg_am as method on method.oid = class.relam
    join pg_opclass as operators on operators.oid = index.indclass[0]
    cross join lateral (
        -- An access_id has 60 bits. A rebuild that was broken off leaves a copy with an ending.
        select regexp_match(
            class.relname, '^rag_chunks_(vector|words)_([1-9][0-9]{0,17}|1[0-9]{18})(_cc(?:new|old)[0-9]*)?$'
        ) as parts
    ) as named
    where index.indrelid = cast('rag_chunks' as regclass)
        and named.parts is not null;
end;

comment on function class_indexes() is 'The indexes that bear the name of a class''s own, also of classes that are gone; usable when valid, and what the name says. Kind: vector or words. In no order';

create function class_sizes(at_least bigint)
returns table (
    tenant_id text, access_id bigint, chunks bigint, is_ready boolean, measured_chunks bigint,
    measured_at timestamptz, vector_bytes_per_chunk double precision, words_bytes_per_chunk double precision,
    statistics_rows bigint, statistics_bytes bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with counted as materialized (
        -- Index-only over the primary key.
        select chunk.tenant_id, chunk.access_id, count(*) as chunks
        from rag_chunks as chunk
        group by chunk.tenant_id, chunk.access_id
    ),

    kept as materialized (
        select lexeme.tenant_id, lexeme.access_id, count(*) as lexemes
        from rag_class_lexemes as lexeme
        group by lexeme.tenant_id, lexeme.access_id
    )

    select
        class.tenant_id,
        class.access_id,
        -- An index of a number that two tenants had would be shared: it counts as none.
        case
            when exists (
                select
                from rag_access_classes as namesake
                where namesake.access_id = class.access_id and namesake.tenant_id <> class.tenant_id
            ) then 0
            else coalesce(counted.chunks, 0)
        end,
        own.ready is true,
        own.chunks,
        own.measured_at,
        own.vector_bytes_per_chunk,
        own.words_bytes_per_chunk,
        coalesce(kept.lexemes, 0),
        -- As large as its share of the table.
        coalesce(cast(
            kept.lexemes * pg_total_relation_size('rag_class_lexemes') / sum(kept.lexemes) over () as bigint
        ), 0)
    from rag_access_classes as class
    left join counted
        on counted.tenant_id = class.tenant_id
        and counted.access_id = class.access_id
    left join rag_class_indexes as own
        on own.tenant_id = class.tenant_id
        and own.access_id = class.access_id
    left join kept
        on kept.tenant_id = class.tenant_id
        and kept.access_id = class.access_id
    where counted.chunks >= class_sizes.at_least or own.access_id is not null;
end
$$;

comment on function class_sizes(bigint) is 'Classes of at least so many chunks, and those that have statistics: chunks now and when they were measured, whether the search uses their indexes, bytes per chunk of these at first, and rows and bytes of rag_class_lexemes. In no order';

create function measure_class(tenant_id text, access_id bigint, at_least integer)
returns table (chunks bigint, lexemes bigint, statistics_rows bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
-- Twice that for a hash: a million lexemes at once. With more of them, or less memory, it goes over the disk.
set work_mem = '64MB'
as $$
#variable_conflict use_column
declare
    languages text[];
    language_chunks bigint[];
    language_lexemes bigint[];
    word_languages text[];
    words text[];
    word_chunks integer[];
begin
    -- In one statement, so that no lexeme is in more chunks than there are. A lexeme is once in a tsvector.
    with language as materialized (
        select
            coalesce(chunk.language, '') as code,
            count(*) as chunks,
            sum(chunk.lexeme_count) as lexemes
        from rag_chunks as chunk
        where chunk.tenant_id = measure_class.tenant_id and chunk.access_id = measure_class.access_id
        group by coalesce(chunk.language, '')
    ),

    word as materialized (
        select
            coalesce(chunk.language, '') as code,
            entry.lexeme,
            cast(count(*) as integer) as chunks
        from rag_chunks as chunk
        cross join lateral unnest(chunk.tsv) as entry
        where chunk.tenant_id = measure_class.tenant_id and chunk.access_id = measure_class.access_id
        group by coalesce(chunk.language, ''), entry.lexeme
        having count(*) >= measure_class.at_least
    )

    select
        collection.codes, collection.chunks, collection.lexemes, vocabulary.codes, vocabulary.words, vocabulary.chunks
    into languages, language_chunks, language_lexemes, word_languages, words, word_chunks
    from (
        select
            array_agg(language.code) as codes,
            array_agg(language.chunks) as chunks,
            array_agg(language.lexemes) as lexemes
        from language
    ) as collection
    cross join (
        select
            array_agg(word.code) as codes,
            array_agg(word.lexeme) as words,
            array_agg(word.chunks) as chunks
        from word
    ) as vocabulary;

    -- Like everybody who writes in the tenant, so that an erasure waits, or is seen here. Not before, since it
    -- would have all others wait as long as the counting takes.
    perform pg_advisory_xact_lock_shared(tenant_lock(measure_class.tenant_id));
    perform
    from rag_access_classes as class
    where class.tenant_id = measure_class.tenant_id and class.access_id = measure_class.access_id;
    if not found then
        return;
    end if;

    delete from rag_class_languages as language
    where language.tenant_id = measure_class.tenant_id and language.access_id = measure_class.access_id;
    delete from rag_class_lexemes as lexeme
    where lexeme.tenant_id = measure_class.tenant_id and lexeme.access_id = measure_class.access_id;

    insert into rag_class_languages (tenant_id, access_id, language, chunks, lexemes)
    select measure_class.tenant_id, measure_class.access_id, measured.language, measured.chunks, measured.lexemes
    from unnest(languages, language_chunks, language_lexemes) as measured (language, chunks, lexemes);

    -- Sorted, so that those of a class lie side by side.
    insert into rag_class_lexemes (tenant_id, access_id, language, lexeme, chunks)
    select measure_class.tenant_id, measure_class.access_id, measured.language, measured.lexeme, measured.chunks
    from unnest(word_languages, words, word_chunks) as measured (language, lexeme, chunks)
    order by measured.language, measured.lexeme;
    get diagnostics statistics_rows = row_count;

    select coalesce(sum(amount.chunks), 0), coalesce(sum(amount.lexemes), 0)
    into chunks, lexemes
    from unnest(language_chunks, language_lexemes) as amount (chunks, lexemes);

    insert into rag_class_indexes as own (tenant_id, access_id, chunks)
    values (measure_class.tenant_id, measure_class.access_id, chunks)
    on conflict (tenant_id, access_id) do update
    set chunks = excluded.chunks,
        measured_at = excluded.measured_at;
    return next;
end
$$;

comment on function measure_class(text, bigint, integer) is 'Counts a class anew for BM25: chunks and lexemes of each language, and the chunks of each lexeme that at least so many have. Returns how many chunks, lexemes and rows; no row for a class that is gone';

create function set_class_ready(tenant_id text, access_id bigint, ready boolean)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    vector_bytes bigint;
    words_bytes bigint;
begin
    select
        max(index.bytes) filter (where index.kind = 'vector'),
        max(index.bytes) filter (where index.kind = 'words')
    into vector_bytes, words_bytes
    from class_indexes() as index
    where index.access_id = set_class_ready.access_id and index.is_usable;

    if set_class_ready.ready and num_nulls(vector_bytes, words_bytes) > 0 then
        raise exception 'a class is ready when both of its indexes are' using errcode = 'object_not_in_prerequisite_state';
    end if;
    update rag_class_indexes as own
    set ready = set_class_ready.ready,
        vector_bytes_per_chunk = cast(vector_bytes as double precision) / greatest(own.chunks, 1),
        words_bytes_per_chunk = cast(words_bytes as double precision) / greatest(own.chunks, 1)
    where own.tenant_id = set_class_ready.tenant_id
        and own.access_id = set_class_ready.access_id
        and own.ready <> set_class_ready.ready;
    return found;
end
$$;

comment on function set_class_ready(text, bigint, boolean) is 'Lets searches use a class''s own indexes and statistics, or not; false when nothing changed, or the class was not measured. Raises 55000 unless both indexes are usable';

create function demote_class(tenant_id text, access_id bigint)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    was_there boolean;
begin
    delete from rag_class_indexes as own
    where own.tenant_id = demote_class.tenant_id and own.access_id = demote_class.access_id;
    was_there := found;
    delete from rag_class_languages as language
    where language.tenant_id = demote_class.tenant_id and language.access_id = demote_class.access_id;
    delete from rag_class_lexemes as lexeme
    where lexeme.tenant_id = demote_class.tenant_id and lexeme.access_id = demote_class.access_id;
    return was_there;
end
$$;

comment on function demote_class(text, bigint) is 'Ends the use of a class''s own indexes, from the next statement on, and removes its statistics; the indexes can be dropped afterwards. False when it had none';
