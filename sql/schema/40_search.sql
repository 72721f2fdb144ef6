-- Retrieval. `search` is what the service and psql call; it runs as rag_principal, under the caller's policies.
-- Nothing is indexed or counted across access classes. A small class is read whole, through the b-tree. A large
-- one (`ready` in rag_class_indexes) has statistics of its words, and indexes of its own: an HNSW and a GIN; a
-- statement reaches them by naming the class as a literal. `rag maintain` cares for these.

-- A definer function because the comparison of texts is not leakproof: under row security no index could serve it.
create function class_contents(only_scope text)
returns table (embedding_model text, language text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
-- Every step is one probe of rag_chunks_contents, which has this order.
set enable_seqscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tenant constant text := my_tenant_id();
begin
    return query
    with recursive content as (
        select class.access_id, first.embedding_model, first.language
        from unnest(narrowed_access_ids(class_contents.only_scope)) as class (access_id)
        cross join lateral (
            select chunk.embedding_model, coalesce(chunk.language, '') as language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = class.access_id
            order by chunk.embedding_model, coalesce(chunk.language, '')
            limit 1
        ) as first
        union all
        select content.access_id, next.embedding_model, next.language
        from content
        cross join lateral (
            select chunk.embedding_model, coalesce(chunk.language, '') as language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = content.access_id
                and (chunk.embedding_model, coalesce(chunk.language, '')) > (content.embedding_model, content.language)
            order by chunk.embedding_model, coalesce(chunk.language, '')
            limit 1
        ) as next
    )

    select content.embedding_model, nullif(content.language, '')
    from content
    group by 1, 2;
end
$$;

comment on function class_contents(text) is 'Which embedding models and languages the chunks that the principal may read have; two or three probes of an index for each class, whatever its size';

create function indexed_among(access_ids bigint[])
returns bigint[]
language sql
stable
security definer
set search_path = rag, pg_temp
begin atomic
    select array(
        select class.access_id
        from rag_class_indexes as class
        where class.tenant_id = (select me.tenant_id from my_principal() as me)
            and class.access_id = any(indexed_among.access_ids)
            and class.ready
        order by class.access_id
    );
end;

comment on function indexed_among(bigint[]) is 'Of these classes, those of the principal''s tenant that have indexes of their own';

-- Σ of document frequencies is bounded by the budget: every candidate is a row that has to be read.
create function candidate_query(lexemes text[], frequencies bigint[], chunks bigint, budget bigint)
returns tsquery
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
declare
    candidates tsquery;
    expected double precision := 0;
    term record;
    frequent text[] := '{}';
    counts bigint[] := '{}';
begin
    for term in
        select given.lexeme, given.frequency
        from unnest(candidate_query.lexemes, candidate_query.frequencies) as given (lexeme, frequency)
        order by given.frequency, given.lexeme
    loop
        if expected + term.frequency <= candidate_query.budget then
            candidates := coalesce(candidates || lexeme_query(term.lexeme), lexeme_query(term.lexeme));
            expected := expected + term.frequency;
        else
            frequent := frequent || term.lexeme;
            counts := counts || term.frequency;
        end if;
    end loop;
    -- Of the frequent ones, chunks that have two of them, those of the rarest pair first. Words that are
    -- asked for together occur together more often than by chance; three times as often is assumed.
    for term in
        select
            lexeme_query(frequent[a]) && lexeme_query(frequent[b]) as pair,
            3.0 * counts[a] * counts[b] / greatest(candidate_query.chunks, 1) as likely
        from generate_series(1, cardinality(frequent)) as a
        join generate_series(1, cardinality(frequent)) as b on a < b
        order by cast(counts[a] as numeric) * counts[b], a, b
    loop
        exit when expected + term.likely > candidate_query.budget;
        candidates := coalesce(candidates || term.pair, term.pair);
        expected := expected + term.likely;
    end loop;
    if candidates is null then
        -- Nothing but frequent words: chunks that have them all.
        select cast(string_agg('(' || lexeme_query(given.lexeme)::text || ')', ' & ') as tsquery)
        into candidates
        from unnest(frequent) as given (lexeme);
    end if;
    return candidates;
end
$$;

comment on function candidate_query(text[], bigint[], bigint, bigint) is 'Matches about budget chunks that can have a high BM25 score: those with a rare word of the question, and, as far as the budget reaches, those with two frequent ones. frequencies: chunks that have each lexeme; chunks: how many there are';

-- BM25 over the chunks that the caller may read. It is a definer function because the operator @@ is
-- not leakproof: under row security no full-text index could serve it. It takes its classes from the
-- principal and never from an argument, and gives out ids and numbers only; `search` joins them with
-- rag_chunks again, under the caller's policies, which stay the barrier. The rows of small classes are read
-- for their words; given a vector, their distances are taken on the same way.
create function keyword_candidates(
    question text,
    only_scope text,
    only_documents uuid[],
    depth integer,
    nominee_access_ids bigint[] default '{}',
    nominee_ids uuid[] default '{}',
    known_languages text[] default null,
    embedding halfvec default null,
    embedding_model text default null
)
returns table (
    access_id bigint,
    chunk_id uuid,
    keyword_score double precision,
    keyword_share double precision,
    nominated boolean,
    distance double precision
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
-- The planner guesses ten classes, which may be all there are, and would read everybody's chunks.
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(keyword_candidates.only_scope);
    indexed constant bigint[] := indexed_among(visible);
    scanned constant bigint[] := array(
        select mine.access_id from unnest(visible) as mine (access_id) where mine.access_id <> all(indexed)
    );
    -- Rows of a large class that are read for their score. Of the fused top ten in 200,000 chunks 95 % are right with
    -- 500, 99 % with 1,000, all with 2,000, and 4,000 take a tenth longer (bench/results/speed.md, the frontier).
    budget constant bigint := 2000 * greatest(1, keyword_candidates.depth / 50);
    -- The languages of what is visible. Each is a collection of its own: a question has other lexemes there.
    languages text[];
    sizes bigint[];
    lengths bigint[];
    -- The lexemes of the question in each language; bit is their place among them, from 0.
    places integer[];
    bits integer[];
    lexemes text[];
    weights integer[];
    frequencies bigint[];
    -- Pieces of the statement.
    occurrences text;
    occurring text;
    occurrence_columns text;
    score text;
    placed text;
    scans text;
begin
    languages := coalesce(
        keyword_candidates.known_languages,
        array(select distinct contents.language from class_contents(keyword_candidates.only_scope) as contents)
    );
    -- Of a large class they are counted beforehand; a language may have come after the counting.
    select
        array_agg(collection.language order by collection.language),
        array_agg(collection.chunks order by collection.language),
        array_agg(collection.lexemes order by collection.language)
    into languages, sizes, lengths
    from (
        select part.language, cast(sum(part.chunks) as bigint) as chunks, cast(sum(part.lexemes) as bigint) as lexemes
        from (
            select given.language, 0 as chunks, 0 as lexemes
            from unnest(languages) as given (language)
            union all
            select nullif(counted.language, ''), counted.chunks, counted.lexemes
            from unnest(indexed) as mine (access_id)
            cross join lateral (
                select class.language, class.chunks, class.lexemes
                from rag_class_languages as class
                where class.tenant_id = tenant
                    and class.access_id = mine.access_id
                offset 0
            ) as counted
        ) as part
        group by part.language
    ) as collection;

    select
        array_agg(term.place),
        array_agg(term.bit),
        array_agg(term.lexeme),
        array_agg(term.weight),
        array_agg(term.chunks)
    into places, bits, lexemes, weights, frequencies
    from (
        select
            cast(collection.place as integer) as place,
            cast(row_number() over (partition by collection.place order by entry.place) - 1 as integer) as bit,
            entry.lexeme,
            entry.weight,
            coalesce(counted.chunks, 0) as chunks
        from unnest(languages) with ordinality as collection (language, place)
        cross join lateral question_lexemes(collection.language, keyword_candidates.question) as entry
        left join lateral (
            select sum(class.chunks) as chunks
            from unnest(indexed) as mine (access_id)
            -- By the whole key: by a part of it, rows of others are read as well, and told from one's own afterwards.
            cross join lateral (
                select class.chunks
                from rag_class_lexemes as class
                where class.tenant_id = tenant
                    and class.access_id = mine.access_id
                    and class.language = coalesce(collection.language, '')
                    and class.lexeme = entry.lexeme
                offset 0
            ) as class
        ) as counted on true
    ) as term;
    if lexemes is null then
        return;
    end if;

    -- How often a chunk has each lexeme of the question in its language, null for never: columns t0, t1, …, so that
    -- its row is read once. With all four weights at 1, ts_rank_cd of a single lexeme is the number of its occurrences.
    select
        string_agg(format('case found.place %s end as t%s', term.cases, term.bit), ', ' order by term.bit),
        string_agg(format('count(matched.t%s)', term.bit), ', ' order by term.bit),
        string_agg(format('matched.t%s', term.bit), ', ' order by term.bit),
        -- n / (n + k) is 1 - k / (n + k), in which n is counted once.
        string_agg(
            format('coalesce(matched.weights[%s] * (1 - matched.k / (matched.t%s + matched.k)), 0)', term.bit + 1, term.bit),
            ' + ' order by term.bit
        )
    into occurrences, occurring, occurrence_columns, score
    from (
        select
            entry.bit,
            string_agg(
                format(
                    'when %1$s then case when found.tsv @@ %2$L::tsquery '
                    'then ts_rank_cd(''{1, 1, 1, 1}'', found.tsv, %2$L::tsquery) end',
                    entry.place, lexeme_query(entry.lexeme)
                ),
                ' '
                order by entry.place
            ) as cases
        from unnest(places, bits, lexemes) as entry (place, bit, lexeme)
        group by entry.bit
    ) as term;
    select
        format(
            'chunk.access_id, chunk.id, chunk.document_id, chunk.lexeme_count, chunk.tsv, chunk.embedding_model, '
            'chunk.embedding, case %s end as place',
            string_agg(format('when chunk.language is not distinct from %L then %s', given.language, given.place), ' ')
        )
    into placed
    from unnest(languages) with ordinality as given (language, place);

    scans := format(
        'select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, true as counted, '
        'case when found.embedding_model = $14 and ($3 is null or found.document_id = any($3)) '
        'then found.embedding <=> $15 end as distance, %s '
        'from (select %s from rag_chunks as chunk where chunk.tenant_id = $1 and chunk.access_id = any($2) offset 0) '
        'as found',
        occurrences, placed
    );
    if indexed <> '{}' then
        -- The planner, which has no statistics of tenants, takes the rows of one for few and would read the class
        -- through the b-tree; a comparison that no index serves leaves it the class's own.
        scans := scans || coalesce((
            select string_agg(
                format(
                    ' union all select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, '
                    'false, null, %s '
                    'from (select %s from rag_chunks as chunk '
                    'where coalesce(chunk.tenant_id = $1, false) and chunk.access_id = %L::bigint '
                    'and chunk.language is not distinct from %L and chunk.tsv @@ %L::tsquery '
                    'and ($3 is null or chunk.document_id = any($3)) limit %s) as found',
                    occurrences,
                    placed,
                    class.access_id,
                    class.language,
                    class.query,
                    budget * 3 / 2
                ),
                ''
            )
            from (
                select
                    mine.access_id,
                    collection.language,
                    candidate_query(
                        array_agg(entry.lexeme),
                        array_agg(coalesce(counted.chunks, 1)),
                        max(coalesce(collected.chunks, 1)),
                        budget
                    ) as query
                from unnest(indexed) as mine (access_id)
                cross join unnest(languages) with ordinality as collection (language, place)
                join unnest(places, lexemes) as entry (place, lexeme) on entry.place = collection.place
                left join lateral (
                    select class.chunks
                    from rag_class_languages as class
                    where class.tenant_id = tenant
                        and class.access_id = mine.access_id
                        and class.language = coalesce(collection.language, '')
                    offset 0
                ) as collected on true
                left join lateral (
                    select class.chunks
                    from rag_class_lexemes as class
                    where class.tenant_id = tenant
                        and class.access_id = mine.access_id
                        and class.language = coalesce(collection.language, '')
                        and class.lexeme = entry.lexeme
                    offset 0
                ) as counted on true
                group by mine.access_id, collection.language
            ) as class
        ), '');
    end if;

    return query execute format(
        $statement$
        with matched as materialized (
            %s
        ),

        -- What is not counted beforehand.
        counted as materialized (
            select
                matched.place,
                count(*) as chunks,
                sum(matched.lexeme_count) as lexemes,
                array[%s] as frequencies
            from matched
            where matched.counted
            group by matched.place
        ),

        collection as materialized (
            select
                given.place,
                given.chunks + coalesce(counted.chunks, 0) as chunks,
                greatest(
                    (given.lexemes + coalesce(counted.lexemes, 0))::double precision
                    / greatest(given.chunks + coalesce(counted.chunks, 0), 1),
                    1
                ) as mean_length,
                counted.frequencies
            from unnest($8::bigint[], $9::bigint[]) with ordinality as given (chunks, lexemes, place)
            left join counted on counted.place = given.place
        ),

        -- Robertson and Zaragoza 2009, with the idf of Lucene, which is never negative.
        weighted as materialized (
            select
                collection.place,
                min(collection.mean_length) as mean_length,
                array_agg(term.weight * idf.idf order by term.bit) as weights,
                sum(term.weight * idf.idf) as ceiling
            from unnest($4::integer[], $5::integer[], $6::integer[], $7::bigint[])
                as term (place, bit, weight, chunks)
            join collection on collection.place = term.place
            cross join lateral (
                select term.chunks + coalesce(collection.frequencies[term.bit + 1], 0) as chunks
            ) as frequency
            cross join lateral (
                select ln(
                    1 + (greatest(collection.chunks - frequency.chunks, 0) + 0.5) / (frequency.chunks + 0.5)
                )::double precision as idf
            ) as idf
            group by collection.place
        ),

        -- k1 = 1.2 and b = 0.75: the usual values, Manning, Raghavan and Schütze 2008, section 11.4.3. Scores of two
        -- languages compare as fractions of what each question could reach: in a collection of a few chunks every
        -- word is frequent, and has next to no weight.
        scored as materialized (
            select
                matched.access_id,
                matched.id,
                matched.likely,
                matched.score * (1.2 + 1) as score,
                matched.score / matched.ceiling as share
            from (
                select matched.access_id, matched.id, matched.likely, matched.ceiling, %s as score
                from (
                    select
                        matched.*,
                        weighted.weights,
                        weighted.ceiling,
                        1.2 * (1 - 0.75 + 0.75 * (matched.lexeme_count / weighted.mean_length)) as k
                    from (
                        select matched.*, true as likely
                        from matched
                        where coalesce(%s) is not null
                            and ($3 is null or matched.document_id = any($3))
                        %s
                    ) as matched
                    join weighted on weighted.place = matched.place
                    offset 0
                ) as matched
                offset 0
            ) as matched
        ),

        best as materialized (
            select scored.access_id, scored.id, scored.score, scored.share
            from scored
            where scored.likely
            order by scored.share desc, scored.id
            limit $10
        ),

        near as materialized (
            select matched.access_id, matched.id, matched.distance
            from matched
            where matched.distance is not null
            order by matched.distance, matched.id
            limit $10
        ),

        named as (
            select best.access_id, best.id, true as nominated, null as distance
            from best
            union all
            select near.access_id, near.id, false, near.distance
            from near
            union all
            select nominee.access_id, nominee.id, false, null
            from unnest($11::bigint[], $12::uuid[]) as nominee (access_id, id)
        )

        select
            named.access_id,
            named.id,
            coalesce(max(scored.score), 0),
            coalesce(max(scored.share), 0),
            bool_or(named.nominated),
            min(named.distance)
        from named
        left join scored on scored.access_id = named.access_id and scored.id = named.id
        group by named.access_id, named.id
        having max(scored.score) > 0 or min(named.distance) is not null
        order by 4 desc, 2
        $statement$,
        scans, occurring, score, occurrence_columns,
        -- Of those that another arm nominates, the ones of large classes may have been passed over.
        case when keyword_candidates.nominee_ids <> '{}' and indexed <> '{}' then format(
            'union all select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, false, '
            'null, %s, false from unnest($11::bigint[], $12::uuid[]) as nominee (access_id, id) cross join lateral ('
            'select %s from rag_chunks as chunk '
            'where chunk.tenant_id = $1 and chunk.access_id = nominee.access_id and chunk.id = nominee.id '
            'offset 0) as found '
            'where nominee.access_id = any($13) and not exists ('
            'select from matched where matched.access_id = nominee.access_id and matched.id = nominee.id)',
            occurrences, placed
        ) end
    )
    using
        tenant, scanned, keyword_candidates.only_documents,
        places, bits, weights, frequencies,
        sizes, lengths,
        keyword_candidates.depth,
        keyword_candidates.nominee_access_ids, keyword_candidates.nominee_ids, indexed,
        keyword_candidates.embedding_model, keyword_candidates.embedding;
end
$$;

comment on function keyword_candidates(text, text, uuid[], integer, bigint[], uuid[], text[], halfvec, text) is 'The depth best chunks by BM25 among those that the principal may read, nominated; given a vector, the depth nearest of small classes with their distance; and of both, and of the given nominees of another arm, what has a word of the question its score, best first. keyword_share is the score as a fraction of the most that any chunk could reach. Small classes are read whole; of a large one those chunks are scored that have one of the rarer words. Takes its access classes from the principal alone';

create function nearest_indexed(
    class_id bigint, embedding halfvec, embedding_model text, only_documents uuid[], depth integer, breadth integer
)
returns table (access_id bigint, chunk_id uuid, distance double precision)
language plpgsql
stable
set search_path = rag, pg_temp
-- The order comes from the index or not at all: sorting the class would be exact and take its size.
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    statement constant text := format(
        'select array_agg(near.id), array_agg(near.distance), max(near.distance) < 1.1 * min(near.distance) from ('
        'select chunk.id, chunk.embedding <=> $1 as distance from rag_chunks as chunk '
        'where chunk.tenant_id = $2 and chunk.access_id = %L::bigint and chunk.embedding_model = $3 '
        'and ($4 is null or chunk.document_id = any($4)) '
        'order by chunk.embedding <=> $1 limit $5) as near',
        nearest_indexed.class_id
    );
    ids uuid[];
    distances double precision[];
    flat boolean;
begin
    -- In force until this function ends, like the settings above.
    perform
        set_config('hnsw.iterative_scan', 'relaxed_order', true),
        set_config('hnsw.ef_search', nearest_indexed.breadth::text, true);
    execute statement
    into ids, distances, flat
    using
        nearest_indexed.embedding, tenant, nearest_indexed.embedding_model, nearest_indexed.only_documents,
        nearest_indexed.depth;
    -- A question that is near to nothing has its nearest chunks all over the graph, at much the same distance, where
    -- one walk misses half of them: then it goes on through the best 3,000. In 200,000 generated chunks the farthest
    -- of 50 was 24 % or more beyond the nearest for 30 questions near a chunk, and at most 6 % for 30 random vectors.
    if flat and cardinality(ids) = nearest_indexed.depth then
        perform set_config('hnsw.ef_search', '1000', true);
        execute statement
        into ids, distances, flat
        using
            nearest_indexed.embedding, tenant, nearest_indexed.embedding_model, nearest_indexed.only_documents,
            greatest(3000, nearest_indexed.depth);
        select array_agg(best.id), array_agg(best.distance)
        into ids, distances
        from (
            select near.id, near.distance
            from unnest(ids, distances) as near (id, distance)
            order by near.distance, near.id
            limit nearest_indexed.depth
        ) as best;
    end if;
    -- The scan of the graph ends after some 20,000 chunks. What passes so few is looked for without it.
    if coalesce(cardinality(ids), 0) < nearest_indexed.depth then
        select array_agg(near.id), array_agg(near.distance)
        into ids, distances
        from (
            select chunk.id, chunk.embedding <=> nearest_indexed.embedding as distance
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = nearest_indexed.class_id
                and chunk.embedding_model = nearest_indexed.embedding_model
                and (
                    nearest_indexed.only_documents is null or chunk.document_id = any(nearest_indexed.only_documents)
                )
            order by distance
            limit nearest_indexed.depth
        ) as near;
    end if;
    return query
    select nearest_indexed.class_id, near.id, near.distance
    from unnest(ids, distances) as near (id, distance);
end
$$;

comment on function nearest_indexed(bigint, halfvec, text, uuid[], integer, integer) is 'The depth nearest chunks of one class that has an HNSW of its own, under the caller''s policies, in no order; breadth is hnsw.ef_search, more is slower and misses less';

-- How far an embedding model is believed against the words, from 0 to 1. Chosen on questions judged offline, with
-- all-MiniLM-L6-v2, exact cosines and the constants of fuse_candidates; nDCG@10 with it, by rank and by score:
-- SQuAD .900 .908, Cranfield .466 .472, CovidQA .710 .739, XQuAD de .922 .931, ru .941 .940. In Russian, which the
-- model does not know, its own order gives .276, the words alone .941; in German, which shares the script and many
-- pieces of words with English, .712 and .921.
create function vector_share(embedding_model text, language text, fusion text)
returns double precision
language sql
immutable
parallel safe
begin atomic
    select case
        when
            language <> 'en'
            -- Models that know English alone.
            and embedding_model ~* (
                '(all-minilm|all-mpnet|multi-qa-m|nomic-embed-text(-v1|:|$)|mxbai-embed-large'
                || '|snowflake-arctic-embed(:|-[a-z]+(:|$)|$)'
                || '|bge-(small|base|large)-en|gte-(small|base|large)(-en|$)|(^|[/:])e5-(small|base|large)(-v2)?$)'
            )
            then case
                when fusion = 'rank' then 0.08
                -- Languages of other scripts than Latin.
                when language = any(
                    '{am,ar,be,bg,bn,bo,cv,dv,dz,el,fa,gu,he,hi,hy,ii,ja,ka,kk,km,kn,ko,ky,lo,mk,ml,mn,mr,my,ne,or,os}'
                    || cast('{pa,ps,ru,sa,sd,si,sr,ta,te,tg,th,ti,tt,ug,uk,ur,yi,zh}' as text[])
                ) then 0.1
                else 0.6
            end
        else case fusion when 'score' then 0.6 else 0.46 end
    end;
end;

comment on function vector_share(text, text, text) is 'Weight of the vector arm in a fusion (rank or score), the rest being that of the keywords: less for a language that the model does not know, where it would outvote the right words. A language that is not known counts as one that the model knows. As shipped: a row of rag_calibrations comes before it';

-- What readers made of documents, each class by itself. A definer function, since it counts others' words; it takes
-- its classes from the principal and gives out one number for a document, never who said what.
create function feedback_support(document_ids uuid[])
returns table (access_id bigint, document_id uuid, support double precision)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    -- As many neutral voices are counted in, so that one person moves a document by a quarter of the boost at most.
    prior constant double precision := 3;
begin
    return query
    select voice.access_id, voice.document_id, sum(voice.vote) / (count(*) + prior)
    from (
        -- One voice a person, whatever they click: the mean of what they said. To open a source is half of praising it.
        select
            said.access_id,
            said.document_id,
            avg(coalesce(said.rating, case when said.clicked then 0.5 else 0 end)::double precision) as vote
        from unnest(my_access_ids()) as mine (access_id)
        cross join lateral (
            select given.access_id, given.document_id, given.user_id, given.rating, given.clicked
            from rag_feedback as given
            where given.tenant_id = tenant
                and given.access_id = mine.access_id
                and given.document_id = any(feedback_support.document_ids)
            offset 0
        ) as said
        group by said.access_id, said.document_id, said.user_id
    ) as voice
    group by voice.access_id, voice.document_id;
end
$$;

comment on function feedback_support(uuid[]) is 'How far readers of a class found its documents useful, from -1 to 1, of classes that the principal may read; no row for a document of which nobody said anything. Each person counts once';

-- What `search` returns; its columns are final.
create type search_hit as (
    rank integer,
    document_id uuid,
    chunk_index integer,
    chunk_id uuid,
    title text,
    source_type text,
    source_uri text,
    section text,
    page_number integer,
    language text,
    document_scope text,
    tags text[],
    verified boolean,
    metadata jsonb,
    content_updated_at timestamptz,
    chunk_text text,
    score double precision,
    keyword_rank integer,
    keyword_score double precision,
    keyword_share double precision,
    vector_rank integer,
    cosine double precision,
    token_count integer,
    tokens_total integer,
    reason text,
    duplicate_of text,
    mode text,
    recall text
);

comment on type search_hit is 'A row of rag.search()';

create function fuse_candidates(
    near_access_ids bigint[],
    near_ids uuid[],
    word_access_ids bigint[],
    word_ids uuid[],
    word_scores double precision[],
    word_shares double precision[],
    words_nominate boolean[],
    embedding halfvec,
    embedding_model text,
    mode text,
    fusion text,
    recall text,
    top_k integer,
    min_similarity double precision,
    max_per_document integer,
    budget_tokens integer,
    duplicate_threshold double precision,
    duplicate_candidates integer,
    include_dropped boolean,
    feedback_boost double precision
)
returns setof search_hit
language plpgsql
stable
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
-- Some hundred rows by their keys, whoever asks: planning this takes longer than running it.
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    -- Reciprocal rank: Cormack, Clarke and Büttcher 2009, who take 60 for all. With few candidates, whose places are
    -- exact, the first ones deserve more; and the order of the words falls off faster than that of the vectors: after
    -- the few chunks that have the rare words of a question come many that share its frequent ones. With 5 for both,
    -- at its best share, SQuAD, Cranfield and CovidQA had .892 .459 .704 instead of .900 .466 .710 (nDCG@10).
    words_k constant double precision := 3;
    vectors_k constant double precision := 10;
begin
    return query
    with recursive nominee as (
        select near.access_id, near.id, true as by_vector, false as by_keyword, 0.0 as keyword_score, 0.0 as keyword_share
        from unnest(near_access_ids, near_ids) as near (access_id, id)
        union all
        select word.access_id, word.id, false, word.nominates, word.score, word.share
        from unnest(word_access_ids, word_ids, word_scores, word_shares, words_nominate)
            as word (access_id, id, score, share, nominates)
    ),

    -- What was calibrated for the tenant, read once.
    calibrated as materialized (
        select calibration.language, calibration.vector_share
        from rag_calibrations as calibration
        where calibration.tenant_id = tenant
            and calibration.embedding_model = fuse_candidates.embedding_model
            and calibration.fusion = fuse_candidates.fusion
    ),

    -- Joined under the caller's policies: whatever a candidate function may give, this is the barrier.
    candidate as materialized (
        select
            chunk.access_id,
            chunk.id,
            chunk.document_id,
            chunk.chunk_index,
            chunk.chunk_text,
            chunk.section,
            chunk.page_number,
            chunk.language,
            chunk.token_count,
            document.title,
            document.source_type,
            document.source_uri,
            document.scope as document_scope,
            document.tags,
            document.verified,
            document.metadata,
            document.content_updated_at,
            coalesce(document.source_updated_at, document.created_at) as dated,
            united.keyword_score,
            united.keyword_share,
            case
                when chunk.embedding_model = fuse_candidates.embedding_model
                    then 1 - (chunk.embedding <=> fuse_candidates.embedding)
            end as cosine,
            united.by_keyword,
            united.by_vector,
            case fuse_candidates.mode
                when 'keyword' then 0
                when 'vector' then 1
                else coalesce(
                    calibrated.vector_share,
                    vector_share(fuse_candidates.embedding_model, chunk.language, fuse_candidates.fusion)
                )
            end as vector_share
        from (
            select
                nominee.access_id,
                nominee.id,
                max(nominee.keyword_score) as keyword_score,
                max(nominee.keyword_share) as keyword_share,
                bool_or(nominee.by_keyword) as by_keyword,
                bool_or(nominee.by_vector) as by_vector
            from nominee
            group by nominee.access_id, nominee.id
            -- Of another arm's nominees that were given a score, some did not stay among the nearest.
            having bool_or(nominee.by_keyword) or bool_or(nominee.by_vector)
        ) as united
        -- Look-ups by the whole key, whatever the planner believes of the size of a class.
        cross join lateral (
            select chunk.*
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = united.access_id
                and chunk.id = united.id
            offset 0
        ) as chunk
        cross join lateral (
            select document.*
            from rag_documents as document
            where document.tenant_id = tenant
                and document.access_id = chunk.access_id
                and document.id = chunk.document_id
            offset 0
        ) as document
        left join calibrated on calibrated.language = coalesce(chunk.language, '')
    ),

    -- Ranks over the completed union; equal scores share one. A chunk without any word of the question has nothing
    -- from the words.
    ranked as (
        select
            candidate.*,
            rank() over (order by candidate.keyword_share desc) as keyword_rank,
            rank() over (order by candidate.cosine desc nulls last) as vector_rank,
            max(candidate.keyword_share) over () as best_share
        from candidate
    ),

    weighed as (
        select
            ranked.*,
            case fuse_candidates.fusion
                when 'score' then
                    (1 - ranked.vector_share) * coalesce(ranked.keyword_share / nullif(ranked.best_share, 0), 0)
                    + ranked.vector_share * coalesce(ranked.cosine, 0)
                -- 1 for what is first in both arms, whatever the share: else chunks of two languages would not compare.
                else
                    case
                        when ranked.keyword_share > 0
                            then (1 - ranked.vector_share) * (words_k + 1) / (words_k + ranked.keyword_rank)
                        else 0
                    end
                    + ranked.vector_share * (vectors_k + 1) / (vectors_k + ranked.vector_rank)
            end as fusion_score,
            fuse_candidates.min_similarity is null
            or ranked.cosine is null
            or ranked.cosine >= fuse_candidates.min_similarity as similar_enough
        from ranked
    ),

    -- Without a boost nothing is counted, and the score is the fusion's to the last bit.
    supported as materialized (
        select counted.access_id, counted.document_id, counted.support
        from feedback_support(array(select distinct candidate.document_id from candidate)) as counted
        where fuse_candidates.feedback_boost > 0
    ),

    fused as (
        select
            weighed.*,
            weighed.fusion_score
            + abs(weighed.fusion_score) * fuse_candidates.feedback_boost * coalesce(supported.support, 0) as score
        from weighed
        left join supported
            on supported.access_id = weighed.access_id
            and supported.document_id = weighed.document_id
    ),

    -- From here on all candidates stay in one stream, and what becomes of each is written beside it: joined again
    -- by their places, they took a third of the time of this statement.
    ordered as materialized (
        select
            fused.*,
            case
                when fused.similar_enough then row_number() over (
                    partition by fused.similar_enough
                    order by fused.score desc, fused.cosine desc nulls last, fused.document_id, fused.chunk_index
                )
            end as place
        from fused
    ),

    -- Near-duplicates among the first few. Which of two goes is a matter of trust, then of age, then
    -- of rank: a verified or older source is never dropped for an unverified or newer one.
    -- The words of each are held as a tsvector, whose concatenation is a union; a word may have 2,046 bytes there.
    worded as materialized (
        select
            ordered.place,
            ordered.document_id || ':' || ordered.chunk_index as source_id,
            row_number() over (order by ordered.verified desc, ordered.dated, ordered.place) as precedence,
            array_to_tsvector(array_remove(
                case
                    when octet_length(spaced.content) <= 2046 then string_to_array(spaced.content, ' ')
                    else array(select left(word, 500) from string_to_table(spaced.content, ' ') as word)
                end,
                ''
            )) as words
        from ordered
        -- translate() takes four times as long: it looks at every character.
        cross join lateral replace(replace(replace(replace(replace(replace(
            lower(ordered.chunk_text), E'\t', ' '), E'\n', ' '), E'\x0B', ' '), E'\f', ' '), E'\r', ' '), E'\u00A0', ' '
        ) as spaced (content)
        where ordered.place <= fuse_candidates.duplicate_candidates
    ),

    -- Sets whose sizes differ too much cannot be that similar, which spares most comparisons.
    twin as materialized (
        select keeper.precedence as keeper, other.precedence as other
        from worded as keeper
        join worded as other
            on other.precedence > keeper.precedence
            and least(length(keeper.words), length(other.words))
            > fuse_candidates.duplicate_threshold * greatest(length(keeper.words), length(other.words))
        cross join lateral (select length(keeper.words || other.words) as united) as overlap
        where length(keeper.words) + length(other.words) - overlap.united
            > fuse_candidates.duplicate_threshold * overlap.united
    ),

    judged as (
        select cast(0 as bigint) as precedence, cast('{}' as bigint[]) as kept, cast(null as bigint) as duplicate_of
        union all
        select
            judged.precedence + 1,
            case when twin_kept.keeper is null then judged.kept || (judged.precedence + 1) else judged.kept end,
            twin_kept.keeper
        from judged
        cross join lateral (
            select min(twin.keeper) as keeper
            from twin
            where twin.other = judged.precedence + 1
                and twin.keeper = any(judged.kept)
        ) as twin_kept
        where judged.precedence < (select max(twin.other) from twin)
    ),

    duplicate as materialized (
        select dropped.place, keeper.source_id as duplicate_of
        from judged
        join worded as dropped on dropped.precedence = judged.precedence
        join worded as keeper on keeper.precedence = judged.duplicate_of
    ),

    capped as (
        select
            ordered.*,
            duplicate.duplicate_of,
            row_number() over (
                partition by ordered.access_id, ordered.document_id, ordered.similar_enough and duplicate.place is null
                order by ordered.place
            ) as place_in_document
        from ordered
        left join duplicate on duplicate.place = ordered.place
    ),

    queued as materialized (
        select
            capped.*,
            case
                when capped.is_left then row_number() over (partition by capped.is_left order by capped.place)
            end as position
        from (
            select
                capped.*,
                capped.similar_enough
                and capped.duplicate_of is null
                and capped.place_in_document <= fuse_candidates.max_per_document as is_left
            from capped
        ) as capped
    ),

    listed as materialized (
        select queued.position, queued.token_count
        from queued
        where queued.position <= fuse_candidates.top_k
    ),

    -- A chunk that does not fit is passed over, and a smaller one after it may still fit.
    budgeted as (
        select cast(0 as bigint) as position, 0 as tokens_total, cast(null as boolean) as fits, 0 as taken
        union all
        select
            listed.position,
            case when fit.fits then budgeted.tokens_total + listed.token_count else budgeted.tokens_total end,
            fit.fits,
            case when fit.fits then budgeted.taken + 1 else budgeted.taken end
        from budgeted
        join listed on listed.position = budgeted.position + 1
        cross join lateral (
            select fuse_candidates.budget_tokens is null
                or budgeted.tokens_total + listed.token_count <= fuse_candidates.budget_tokens as fits
        ) as fit
    ),

    seated as materialized (
        select budgeted.position, budgeted.fits, budgeted.taken, budgeted.tokens_total
        from budgeted
    )

    select
        case when seated.fits then seated.taken end,
        queued.document_id,
        queued.chunk_index,
        queued.id,
        queued.title,
        queued.source_type,
        queued.source_uri,
        queued.section,
        queued.page_number,
        queued.language,
        queued.document_scope,
        queued.tags,
        queued.verified,
        queued.metadata,
        queued.content_updated_at,
        queued.chunk_text,
        queued.score,
        case when queued.keyword_score > 0 then cast(queued.keyword_rank as integer) end,
        queued.keyword_score,
        queued.keyword_share,
        case when queued.cosine is not null then cast(queued.vector_rank as integer) end,
        queued.cosine,
        queued.token_count,
        case when seated.fits then seated.tokens_total end,
        case
            when not queued.similar_enough then 'below_min_similarity'
            when queued.duplicate_of is not null then 'duplicate'
            when queued.place_in_document > fuse_candidates.max_per_document then 'per_document_cap'
            when seated.position is null then 'beyond_top_k'
            when not seated.fits then 'over_budget'
            when queued.by_keyword and queued.by_vector then 'keyword_and_vector'
            when queued.by_vector then 'vector'
            else 'keyword'
        end,
        queued.duplicate_of,
        fuse_candidates.mode,
        fuse_candidates.recall
    from queued
    left join seated on seated.position = queued.position
    where seated.fits or fuse_candidates.include_dropped
    order by 1 nulls last, queued.place nulls last, queued.score desc, queued.id;
end
$$;

comment on function fuse_candidates(bigint[], uuid[], bigint[], uuid[], double precision[], double precision[], boolean[], halfvec, text, text, text, text, integer, double precision, integer, integer, double precision, integer, boolean, double precision) is 'The nominees of both arms, read under the caller''s policies, in the order of their fused score, which feedback_boost moves by that share of itself at most; then minimum cosine, near-duplicates, chunks per document, top_k, token budget';

create function search(
    question text,
    embedding halfvec default null,
    embedding_model text default null,
    top_k integer default 5,
    scope text default null,
    document_ids uuid[] default null,
    min_similarity double precision default null,
    max_per_document integer default 3,
    budget_tokens integer default null,
    duplicate_threshold double precision default 0.9,
    duplicate_candidates integer default 15,
    include_dropped boolean default false,
    arms text default 'hybrid',
    fusion text default 'rank',
    only_verified boolean default false,
    only_domains text[] default null,
    only_doc_types text[] default null,
    only_source_types text[] default null,
    only_languages text[] default null,
    only_tags text[] default null,
    updated_from timestamptz default null,
    updated_before timestamptz default null,
    only_metadata jsonb default null,
    feedback_boost double precision default 0
)
returns setof search_hit
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(search.scope);
    indexed constant bigint[] := indexed_among(visible);
    scanned constant bigint[] := array(
        select mine.access_id from unnest(visible) as mine (access_id) where mine.access_id <> all(indexed)
    );
    with_vectors constant boolean := search.arms <> 'keyword' and search.embedding is not null;
    -- Chunks that each arm nominates. The scores of both arms are computed for all of them, so an
    -- arm need not reach deep: 20 to 50 are enough.
    depth integer := greatest(50, 3 * search.top_k);
    wanted_documents uuid[] := search.document_ids;
    -- What was compared, and what was passed over because its vector is of another model.
    compared boolean := false;
    passed_over boolean := false;
    near_access_ids bigint[] := '{}';
    near_ids uuid[] := '{}';
    farthest double precision;
    languages text[];
    -- Of large classes.
    large_access_ids bigint[] := '{}';
    large_ids uuid[] := '{}';
    large_distances double precision[] := '{}';
    with_words boolean := search.arms <> 'vector';
    word_access_ids bigint[] := '{}';
    word_ids uuid[] := '{}';
    word_scores double precision[] := '{}';
    word_shares double precision[] := '{}';
    words_nominate boolean[] := '{}';
    word_distances double precision[] := '{}';
    hits search_hit[];
    returned bigint;
begin
    if (search.embedding is null) <> (search.embedding_model is null) then
        raise exception 'embedding and embedding_model come together or not at all'
            using errcode = 'invalid_parameter_value';
    end if;
    if (search.top_k between 1 and 1000) is not true then
        raise exception 'top_k must be from 1 to 1000' using errcode = 'invalid_parameter_value';
    end if;
    if (search.scope = 'documents') is true and search.document_ids is null then
        raise exception 'scope documents needs document_ids' using errcode = 'invalid_parameter_value';
    end if;
    if (search.arms in ('hybrid', 'vector', 'keyword')) is not true then
        raise exception 'arms must be hybrid, vector or keyword' using errcode = 'invalid_parameter_value';
    end if;
    if search.arms = 'vector' and search.embedding is null then
        raise exception 'arms vector needs an embedding' using errcode = 'invalid_parameter_value';
    end if;
    if (search.fusion in ('rank', 'score')) is not true then
        raise exception 'fusion must be rank or score' using errcode = 'invalid_parameter_value';
    end if;
    if (search.feedback_boost between 0 and 1) is not true then
        raise exception 'feedback_boost must be from 0 to 1' using errcode = 'invalid_parameter_value';
    end if;

    if search.only_verified or num_nonnulls(
        search.only_domains, search.only_doc_types, search.only_source_types, search.only_languages, search.only_tags,
        search.updated_from, search.updated_before, search.only_metadata
    ) > 0 then
        wanted_documents := array(
            select document.id
            from rag_documents as document
            where document.tenant_id = tenant
                and document.access_id = any(visible)
                and (search.document_ids is null or document.id = any(search.document_ids))
                and (not search.only_verified or document.verified)
                and (search.only_domains is null or document.domain = any(search.only_domains))
                and (search.only_doc_types is null or document.doc_type = any(search.only_doc_types))
                and (search.only_source_types is null or document.source_type = any(search.only_source_types))
                and (search.only_languages is null or document.language = any(search.only_languages))
                and (search.only_tags is null or document.tags && search.only_tags)
                and (
                    search.updated_from is null
                    or coalesce(document.source_updated_at, document.content_updated_at) >= search.updated_from
                )
                and (
                    search.updated_before is null
                    or coalesce(document.source_updated_at, document.content_updated_at) < search.updated_before
                )
                and (search.only_metadata is null or document.metadata @> search.only_metadata)
        );
    end if;

    select
        with_vectors and coalesce(bool_or(there.embedding_model = search.embedding_model), false),
        with_vectors and coalesce(bool_or(there.embedding_model <> search.embedding_model), false),
        coalesce(array_agg(distinct there.language), '{}')
    into compared, passed_over, languages
    from (
        select contents.embedding_model, contents.language
        from class_contents(search.scope) as contents
        where wanted_documents is null
        union all
        select chunk.embedding_model, chunk.language
        from unnest(visible) as class (access_id)
        cross join lateral (
            select chunk.embedding_model, chunk.language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = class.access_id
                and chunk.document_id = any(wanted_documents)
            offset 0
        ) as chunk
        where wanted_documents is not null
    ) as there;
    with_words := with_words and exists (
        select
        from unnest(languages) as given (language)
        cross join lateral question_lexemes(given.language, search.question)
    );

    loop
        if compared and indexed <> '{}' then
            select
                coalesce(array_agg(near.access_id), '{}'),
                coalesce(array_agg(near.chunk_id), '{}'),
                coalesce(array_agg(near.distance), '{}')
            into large_access_ids, large_ids, large_distances
            from unnest(indexed) as class (access_id)
            cross join lateral nearest_indexed(
                class.access_id, search.embedding, search.embedding_model, wanted_documents, depth,
                least(1000, greatest(400, 2 * depth))
            ) as near;
        end if;

        if with_words then
            select
                array_agg(candidate.access_id),
                array_agg(candidate.chunk_id),
                array_agg(candidate.keyword_score),
                array_agg(candidate.keyword_share),
                array_agg(candidate.nominated),
                array_agg(candidate.distance)
            into word_access_ids, word_ids, word_scores, word_shares, words_nominate, word_distances
            from keyword_candidates(
                search.question, search.scope, wanted_documents, depth, large_access_ids, large_ids, languages,
                case when compared then search.embedding end, case when compared then search.embedding_model end
            ) as candidate;
        end if;

        if compared then
            with nearest as (
                select large.access_id, large.id, large.distance
                from unnest(large_access_ids, large_ids, large_distances) as large (access_id, id, distance)
                union all
                select small.access_id, small.id, small.distance
                from unnest(word_access_ids, word_ids, word_distances) as small (access_id, id, distance)
                where small.distance is not null
                union all
                (
                    select chunk.access_id, chunk.id, chunk.embedding <=> search.embedding as distance
                    from rag_chunks as chunk
                    where not with_words
                        and chunk.tenant_id = tenant
                        and chunk.access_id = any(scanned)
                        and chunk.embedding_model = search.embedding_model
                        and (wanted_documents is null or chunk.document_id = any(wanted_documents))
                    order by distance, chunk.id
                    limit depth
                )
            )

            select array_agg(best.access_id), array_agg(best.id), max(best.distance)
            into near_access_ids, near_ids, farthest
            from (
                select nearest.access_id, nearest.id, nearest.distance
                from nearest
                order by nearest.distance, nearest.id
                limit depth
            ) as best;
        end if;

        hits := array(
            select hit
            from fuse_candidates(
                near_access_ids, near_ids,
                word_access_ids, word_ids, word_scores, word_shares, words_nominate,
                search.embedding, search.embedding_model,
                case
                    when search.arms = 'vector' then 'vector'
                    when not compared then 'keyword'
                    when passed_over then 'partial'
                    else 'hybrid'
                end,
                search.fusion,
                case when indexed = '{}' then 'exact' else 'approximate' end,
                search.top_k, search.min_similarity, search.max_per_document, search.budget_tokens,
                search.duplicate_threshold, search.duplicate_candidates, search.include_dropped, search.feedback_boost
            ) as hit
        );

        -- Duplicates, the cap of a document and the minimum similarity may have taken so many that top_k
        -- chunks are not left, although further ones would pass: then both arms reach deeper.
        select count(*) into returned
        from unnest(hits) as hit
        where hit.rank is not null or hit.reason = 'over_budget';
        exit when returned >= search.top_k;
        -- Of as few documents as that no more are permitted.
        exit when returned >= search.max_per_document * (
            select count(*)
            from (
                select
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = any(visible)
                    and (wanted_documents is null or document.id = any(wanted_documents))
                limit search.top_k
            ) as document
        );
        -- No vector left, and no word either. A large class may have words beyond the budget of candidates.
        exit when coalesce(cardinality(near_ids), 0) < depth
            and (select count(*) filter (where word.nominates) from unnest(words_nominate) as word (nominates)) < depth
            and (compared and not passed_over or indexed = '{}' or depth > 20000);
        -- Whatever is further away is below the minimum.
        exit when compared and not passed_over and 1 - farthest < search.min_similarity;
        depth := depth * 8;
    end loop;

    return query
    select *
    from unnest(hits);
end
$$;

comment on function search(text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean, text, text, boolean, text[], text[], text[], text[], text[], timestamptz, timestamptz, jsonb, double precision) is 'The chunks that answer a question best, among those that the principal may read, best first. Full text (BM25) and cosine, fused by weighted reciprocal rank, or by score; then minimum cosine, near-duplicates (Jaccard of words), chunks per document, top_k, token budget. embedding and embedding_model may be left out: keywords alone. arms: hybrid, vector or keyword. only_…, updated_… narrow to documents; updated_… is the source''s own time where it is known. feedback_boost, 0 to 1: by what share of its score the feedback of readers of its class lifts or lowers a document at most. include_dropped adds the candidates that did not make it, without rank, reason saying why. mode: hybrid, partial (some chunks have vectors of another model, which are not compared), vector or keyword; recall: exact, or approximate when a class with indexes of its own was among those searched';

create function explain(
    question text,
    document_id uuid,
    embedding halfvec default null,
    embedding_model text default null,
    chunk_index integer default null,
    top_k integer default 5,
    scope text default null,
    min_similarity double precision default null,
    max_per_document integer default 3,
    budget_tokens integer default null,
    duplicate_threshold double precision default 0.9,
    duplicate_candidates integer default 15,
    arms text default 'hybrid',
    fusion text default 'rank',
    feedback_boost double precision default 0
)
returns table (stage text, passed boolean, value double precision, detail text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(explain.scope);
    target record;
    hit search_hit;
    hits search_hit[];
    word record;
    matched text;
    missed text;
    place bigint;
begin
    hits := array(
        select candidate
        from search(
            question => explain.question, embedding => explain.embedding, embedding_model => explain.embedding_model,
            top_k => explain.top_k, scope => explain.scope, min_similarity => explain.min_similarity,
            max_per_document => explain.max_per_document, budget_tokens => explain.budget_tokens,
            duplicate_threshold => explain.duplicate_threshold, duplicate_candidates => explain.duplicate_candidates,
            include_dropped => true, arms => explain.arms, fusion => explain.fusion,
            feedback_boost => explain.feedback_boost
        ) as candidate
    );
    -- The chunk that was asked for; of a document the best one: first among the candidates, else the nearest.
    select chunk.*
    into target
    from unnest(visible) as class (access_id)
    cross join lateral (
        select
            chunk.access_id, chunk.id, chunk.document_id, chunk.chunk_index, chunk.language, chunk.tsv,
            chunk.embedding_model,
            case when chunk.embedding_model = explain.embedding_model then chunk.embedding <=> explain.embedding end
                as distance
        from rag_chunks as chunk
        where chunk.tenant_id = tenant
            and chunk.access_id = class.access_id
            and chunk.document_id = explain.document_id
            and (explain.chunk_index is null or chunk.chunk_index = explain.chunk_index)
        offset 0
    ) as chunk
    left join unnest(hits) with ordinality as found on found.chunk_id = chunk.id
    order by found.ordinality nulls last, chunk.distance, chunk.chunk_index
    limit 1;
    if not found then
        return;
    end if;
    return query values (
        'visible', true, cast(null as double precision), format('%s:%s', target.document_id, target.chunk_index)
    );

    return query values (
        'embedded', target.distance is not null, 1 - target.distance,
        case
            when explain.embedding is null then 'the question has no vector'
            when target.distance is null
                then format('its vector is of %s, the question''s of %s', target.embedding_model, explain.embedding_model)
            else 'cosine'
        end
    );

    select
        string_agg(entry.lexeme, ', ' order by entry.place) filter (where target.tsv @@ lexeme_query(entry.lexeme)),
        string_agg(entry.lexeme, ', ' order by entry.place) filter (where not target.tsv @@ lexeme_query(entry.lexeme))
    into matched, missed
    from question_lexemes(target.language, explain.question) as entry;
    select candidate.keyword_score, candidate.keyword_share, candidate.nominated
    into word
    from keyword_candidates(
        explain.question, explain.scope, null, greatest(50, 3 * explain.top_k), array[target.access_id], array[target.id]
    ) as candidate
    where candidate.chunk_id = target.id;
    return query values (
        'words', matched is not null, coalesce(word.keyword_score, 0),
        concat_ws('; ', 'matched: ' || matched, 'missed: ' || missed)
    );

    if target.distance is not null then
        select count(*) + 1
        into place
        from rag_chunks as chunk
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
            and chunk.embedding_model = explain.embedding_model
            and chunk.embedding <=> explain.embedding < target.distance;
        return query values (
            'vector arm', place <= greatest(50, 3 * explain.top_k) and explain.arms <> 'keyword',
            cast(place as double precision),
            'rank by cosine among all visible chunks'
        );
    end if;
    return query values (
        'keyword arm', coalesce(word.nominated, false) and explain.arms <> 'vector', word.keyword_share,
        'score as a fraction of what any chunk could reach'
    );

    select found.* into hit from unnest(hits) as found where found.chunk_id = target.id;
    if hit.chunk_id is null then
        return query values ('candidate', false, cast(null as double precision), 'nominated by no arm');
        return;
    end if;
    return query
    values
        (
            'fused', true, hit.score,
            format('rank %s of %s candidates', (
                select count(*) + 1 from unnest(hits) as other where other.score > hit.score
            ), cardinality(hits))
        ),
        (
            'minimum similarity', hit.reason <> 'below_min_similarity', hit.cosine,
            'at least ' || coalesce(explain.min_similarity::text, 'anything')
        );
    if hit.reason = 'below_min_similarity' then
        return;
    end if;
    return query values ('duplicate', hit.reason <> 'duplicate', cast(null as double precision), 'of ' || hit.duplicate_of);
    if hit.reason = 'duplicate' then
        return;
    end if;
    return query values (
        'chunks of its document', hit.reason <> 'per_document_cap',
        cast(explain.max_per_document as double precision), 'at most'
    );
    if hit.reason = 'per_document_cap' then
        return;
    end if;
    return query values ('top_k', hit.reason <> 'beyond_top_k', cast(explain.top_k as double precision), 'at most');
    if hit.reason = 'beyond_top_k' then
        return;
    end if;
    return query values (
        'token budget', hit.reason <> 'over_budget', cast(hit.token_count as double precision),
        case when explain.budget_tokens is null then 'no limit' else format('of %s', explain.budget_tokens) end
    );
    if hit.rank is not null then
        return query values ('returned', true, cast(hit.rank as double precision), 'rank; by ' || hit.reason);
    end if;
end
$$;

comment on function explain(text, uuid, halfvec, text, integer, integer, text, double precision, integer, integer, double precision, integer, text, text, double precision) is 'Why a chunk, or the best chunk of a document, is in the answer of search() or not: one row for each stage that it reached, passed or not, value in the unit that detail names. No row for a document that the principal may not read, as for one that does not exist';
