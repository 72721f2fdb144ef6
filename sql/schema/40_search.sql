-- Retrieval. `search` is what the service and psql call; it runs as rag_principal, under the caller's policies.

create function text_search_config(language text)
returns regconfig
language sql
immutable
parallel safe
begin atomic
    select case language
        when 'ar' then 'pg_catalog.arabic'
        when 'ca' then 'pg_catalog.catalan'
        when 'da' then 'pg_catalog.danish'
        when 'de' then 'pg_catalog.german'
        when 'el' then 'pg_catalog.greek'
        when 'en' then 'pg_catalog.english'
        when 'es' then 'pg_catalog.spanish'
        when 'eu' then 'pg_catalog.basque'
        when 'fi' then 'pg_catalog.finnish'
        when 'fr' then 'pg_catalog.french'
        when 'ga' then 'pg_catalog.irish'
        when 'hi' then 'pg_catalog.hindi'
        when 'hu' then 'pg_catalog.hungarian'
        when 'hy' then 'pg_catalog.armenian'
        when 'id' then 'pg_catalog.indonesian'
        when 'it' then 'pg_catalog.italian'
        when 'lt' then 'pg_catalog.lithuanian'
        when 'ne' then 'pg_catalog.nepali'
        when 'nl' then 'pg_catalog.dutch'
        when 'no' then 'pg_catalog.norwegian'
        when 'pt' then 'pg_catalog.portuguese'
        when 'ro' then 'pg_catalog.romanian'
        when 'ru' then 'pg_catalog.russian'
        when 'sr' then 'pg_catalog.serbian'
        when 'sv' then 'pg_catalog.swedish'
        when 'ta' then 'pg_catalog.tamil'
        when 'tr' then 'pg_catalog.turkish'
        when 'yi' then 'pg_catalog.yiddish'
        else 'pg_catalog.simple'
    end::regconfig;
end;

comment on function text_search_config(text) is 'The text-search configuration for an ISO 639-1 language code; simple for every other value and for null';

create function lexeme_total(document tsvector)
returns integer
language sql
immutable
parallel safe
begin atomic
    select cast(coalesce(sum(cardinality(entry.positions)), 0) as integer)
    from unnest(document) as entry;
end;

comment on function lexeme_total(tsvector) is 'Occurrences of all lexemes of a tsvector, the document length of BM25; a lexeme counts up to 255 times';

create function lexeme_query(lexeme text)
returns tsquery
language sql
immutable
parallel safe
begin atomic
    select cast('''' || replace(replace(lexeme, '\', '\\'), '''', '''''') || '''' as tsquery);
end;

comment on function lexeme_query(text) is 'The query for exactly this lexeme, whatever characters it has';

-- BM25 over the chunks that the caller may read. It is a definer function because the operator @@ is
-- not leakproof: under row security no full-text index could serve it. It takes its classes from the
-- principal and never from an argument, and gives out ids and scores only; `search` joins them with
-- rag_chunks again, under the caller's policies, which stay the barrier.
create function keyword_candidates(question text, only_scope text, only_documents uuid[], depth integer)
returns table (access_id bigint, chunk_id uuid, keyword_score double precision, keyword_share double precision)
language sql
stable
security definer
set search_path = rag, pg_temp
set plan_cache_mode = force_custom_plan
-- The planner guesses ten classes, which may be all there are, and would read everybody's chunks.
set enable_seqscan = off
begin atomic
    with scope as materialized (
        select me.tenant_id, narrowed_access_ids(only_scope) as access_ids
        from my_principal() as me
    ),

    -- Each language of the caller's chunks is a collection of its own: a question has other lexemes there.
    collection as materialized (
        select
            chunk.language,
            count(*) as chunks,
            greatest(avg(chunk.lexeme_count), 1) as mean_length
        from scope
        join rag_chunks as chunk
            on chunk.tenant_id = scope.tenant_id
            and chunk.access_id = any(scope.access_ids)
        group by chunk.language
    ),

    -- 64 distinct lexemes are more than a question has; a pasted page is cut to its first ones.
    term as materialized (
        select
            collection.language,
            entry.lexeme,
            lexeme_query(entry.lexeme) as query,
            entry.weight
        from collection
        cross join lateral (
            select
                word.lexeme,
                cardinality(word.positions) as weight
            from unnest(to_tsvector(text_search_config(collection.language), question)) as word
            order by word.positions[1], word.lexeme
            limit 64
        ) as entry
    ),

    any_term as materialized (
        select
            term.language,
            cast(string_agg(cast(term.query as text), ' | ') as tsquery) as query
        from term
        group by term.language
    ),

    -- Read once, whatever the number of terms.
    matched as materialized (
        select chunk.access_id, chunk.id, chunk.document_id, chunk.lexeme_count, chunk.language, chunk.tsv
        from scope
        join rag_chunks as chunk
            on chunk.tenant_id = scope.tenant_id
            and chunk.access_id = any(scope.access_ids)
        join any_term
            on any_term.language is not distinct from chunk.language
            and chunk.tsv @@ any_term.query
    ),

    -- With all four weights at 1, ts_rank_cd of a single lexeme is the number of its occurrences.
    posting as materialized (
        select
            matched.access_id,
            matched.id,
            matched.document_id,
            matched.lexeme_count,
            term.language,
            term.lexeme,
            term.weight,
            ts_rank_cd('{1, 1, 1, 1}', matched.tsv, term.query) as occurrences
        from matched
        join term
            on term.language is not distinct from matched.language
            and matched.tsv @@ term.query
    ),

    -- Robertson and Zaragoza 2009, with the idf of Lucene, which is never negative.
    weighted_term as materialized (
        select
            term.language,
            term.lexeme,
            term.weight * ln(
                1 + (collection.chunks - coalesce(frequency.chunks, 0) + 0.5) / (coalesce(frequency.chunks, 0) + 0.5)
            ) as weight
        from term
        join collection on collection.language is not distinct from term.language
        left join (
            select posting.language, posting.lexeme, count(*) as chunks
            from posting
            group by posting.language, posting.lexeme
        ) as frequency
            on frequency.language is not distinct from term.language
            and frequency.lexeme = term.lexeme
    ),

    -- k1 = 1.2 and b = 0.75: the usual values, Manning, Raghavan and Schütze 2008, section 11.4.3.
    scored as (
        select
            posting.access_id,
            posting.id,
            posting.language,
            sum(
                weighted_term.weight * posting.occurrences * (1.2 + 1)
                / (posting.occurrences + 1.2 * (1 - 0.75 + 0.75 * posting.lexeme_count / collection.mean_length))
            ) as score
        from posting
        join weighted_term
            on weighted_term.language is not distinct from posting.language
            and weighted_term.lexeme = posting.lexeme
        join collection on collection.language is not distinct from posting.language
        where only_documents is null or posting.document_id = any(only_documents)
        group by posting.access_id, posting.id, posting.language
    )

    select
        scored.access_id,
        scored.id,
        cast(scored.score as double precision),
        cast(scored.score / ceiling.score as double precision)
    from scored
    join (
        select weighted_term.language, sum(weighted_term.weight) * (1.2 + 1) as score
        from weighted_term
        group by weighted_term.language
    ) as ceiling on ceiling.language is not distinct from scored.language
    order by scored.score desc, scored.id
    limit depth;
end;

comment on function keyword_candidates(text, text, uuid[], integer) is 'The depth best chunks by BM25 among those that the principal may read, best first; keyword_share is the score as a fraction of the most that any chunk could reach. Takes its access classes from the principal alone';

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
    include_dropped boolean default false
)
returns table (
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
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    access_ids constant bigint[] := narrowed_access_ids(search.scope);
    -- Chunks that each arm nominates. The scores of both arms are computed for all of them, so an
    -- arm need not reach deep: 20 to 50 are enough.
    arm_depth constant integer := greatest(50, 3 * search.top_k);
    -- The keyword function ranks its matches anyway; the further ones give the vector arm's
    -- nominees their BM25 score.
    keyword_depth constant integer := 1000;
    -- Reciprocal rank: Cormack, Clarke and Büttcher 2009. Their k of 60 with equal weights gave
    -- .720 nDCG@10 in the mean of 17 collections, 10 with keywords weighted 1.5 gave .791.
    rrf_k constant double precision := 10;
    keyword_weight constant double precision := 1.5;
    vector_weight constant double precision := 1.0;
begin
    if (search.embedding is null) <> (search.embedding_model is null) then
        raise exception 'embedding and embedding_model come together or not at all'
            using errcode = 'invalid_parameter_value';
    end if;
    if search.top_k not between 1 and 1000 then
        raise exception 'top_k must be from 1 to 1000' using errcode = 'invalid_parameter_value';
    end if;
    if (search.scope = 'documents') is true and search.document_ids is null then
        raise exception 'scope documents needs document_ids' using errcode = 'invalid_parameter_value';
    end if;

    return query
    with recursive measured as materialized (
        select
            chunk.access_id,
            chunk.id,
            case
                when chunk.embedding_model = search.embedding_model then chunk.embedding <=> search.embedding
            end as distance
        from rag_chunks as chunk
        where search.embedding is not null
            and chunk.tenant_id = tenant
            and chunk.access_id = any(access_ids)
            and (search.document_ids is null or chunk.document_id = any(search.document_ids))
    ),

    -- Vectors of another model are never compared; the caller is told that some or all were passed over.
    arms as materialized (
        select case
            when count(measured.distance) = 0 then 'keyword'
            when count(measured.distance) < count(*) then 'partial'
            else 'hybrid'
        end as mode
        from measured
    ),

    nearest as materialized (
        select measured.access_id, measured.id
        from measured
        where measured.distance is not null
        order by measured.distance, measured.id
        limit arm_depth
    ),

    matching as materialized (
        select
            candidate.access_id,
            candidate.chunk_id,
            candidate.keyword_score,
            candidate.keyword_share,
            row_number() over (order by candidate.keyword_score desc, candidate.chunk_id) <= arm_depth as nominated
        from keyword_candidates(search.question, search.scope, search.document_ids, keyword_depth) as candidate
    ),

    nominee as (
        select nearest.access_id, nearest.id from nearest
        union
        select matching.access_id, matching.chunk_id from matching where matching.nominated
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
            coalesce(matching.keyword_score, 0) as keyword_score,
            coalesce(matching.keyword_share, 0) as keyword_share,
            case
                when chunk.embedding_model = search.embedding_model
                    then 1 - (chunk.embedding <=> search.embedding)
            end as cosine,
            coalesce(matching.nominated, false) as by_keyword,
            nearest.id is not null as by_vector
        from nominee
        join rag_chunks as chunk
            on chunk.tenant_id = tenant
            and chunk.access_id = nominee.access_id
            and chunk.id = nominee.id
        join rag_documents as document
            on document.tenant_id = tenant
            and document.access_id = chunk.access_id
            and document.id = chunk.document_id
        left join matching on matching.access_id = nominee.access_id and matching.chunk_id = nominee.id
        left join nearest on nearest.access_id = nominee.access_id and nearest.id = nominee.id
    ),

    -- Ranks over the completed union. Equal scores share a rank, so chunks without any word of the
    -- question come after all that have one, and none of them is preferred.
    ranked as (
        select
            candidate.*,
            rank() over (order by candidate.keyword_score desc) as keyword_rank,
            rank() over (order by candidate.cosine desc nulls last) as vector_rank
        from candidate
    ),

    fused as (
        select
            ranked.*,
            keyword_weight / (rrf_k + ranked.keyword_rank)
            + case when arms.mode = 'keyword' then 0 else vector_weight / (rrf_k + ranked.vector_rank) end as score
        from ranked
        cross join arms
    ),

    ordered as materialized (
        select
            fused.*,
            row_number() over (
                order by fused.score desc, fused.cosine desc nulls last, fused.document_id, fused.chunk_index
            ) as place
        from fused
        where search.min_similarity is null
            or fused.cosine is null
            or fused.cosine >= search.min_similarity
    ),

    -- Near-duplicates among the first few. Which of two goes is a matter of trust, then of age, then
    -- of rank: a verified or older source is never dropped for an unverified or newer one.
    worded as materialized (
        select
            ordered.place,
            row_number() over (order by ordered.verified desc, ordered.dated, ordered.place) as precedence,
            array(
                select distinct word
                from regexp_split_to_table(lower(ordered.chunk_text), '\s+') as word
                where word <> ''
            ) as words
        from ordered
        where ordered.place <= search.duplicate_candidates
    ),

    -- Sets whose sizes differ too much cannot be that similar, which spares most comparisons.
    twin as materialized (
        select keeper.precedence as keeper, other.precedence as other
        from worded as keeper
        join worded as other
            on other.precedence > keeper.precedence
            and least(cardinality(keeper.words), cardinality(other.words))
            > search.duplicate_threshold * greatest(cardinality(keeper.words), cardinality(other.words))
        cross join lateral (
            select count(*) as shared
            from unnest(keeper.words) as word
            where word = any(other.words)
        ) as overlap
        where overlap.shared > search.duplicate_threshold * (
            cardinality(keeper.words) + cardinality(other.words) - overlap.shared
        )
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
        where judged.precedence < (select count(*) from worded)
    ),

    duplicate as materialized (
        select dropped.place, keeper.place as keeper_place
        from judged
        join worded as dropped on dropped.precedence = judged.precedence
        join worded as keeper on keeper.precedence = judged.duplicate_of
    ),

    capped as (
        select
            ordered.place,
            row_number() over (
                partition by ordered.access_id, ordered.document_id
                order by ordered.place
            ) as place_in_document
        from ordered
        where not exists (select 1 from duplicate where duplicate.place = ordered.place)
    ),

    listed as materialized (
        select
            capped.place,
            row_number() over (order by capped.place) as position,
            ordered.token_count
        from capped
        join ordered on ordered.place = capped.place
        where capped.place_in_document <= search.max_per_document
        order by capped.place
        limit search.top_k
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
            select search.budget_tokens is null
                or budgeted.tokens_total + listed.token_count <= search.budget_tokens as fits
        ) as fit
    ),

    verdict as (
        select
            fused.id,
            fused.access_id,
            case when budgeted.fits then budgeted.taken end as rank,
            case when budgeted.fits then budgeted.tokens_total end as tokens_total,
            case
                when ordered.place is null then 'below_min_similarity'
                when duplicate.place is not null then 'duplicate'
                when listed.place is null and capped.place_in_document > search.max_per_document then 'per_document_cap'
                when listed.place is null then 'beyond_top_k'
                when not budgeted.fits then 'over_budget'
                when fused.by_keyword and fused.by_vector then 'keyword_and_vector'
                when fused.by_vector then 'vector'
                else 'keyword'
            end as reason,
            keeper.document_id || ':' || keeper.chunk_index as duplicate_of,
            ordered.place
        from fused
        left join ordered on ordered.access_id = fused.access_id and ordered.id = fused.id
        left join duplicate on duplicate.place = ordered.place
        left join ordered as keeper on keeper.place = duplicate.keeper_place
        left join capped on capped.place = ordered.place
        left join listed on listed.place = ordered.place
        left join budgeted on budgeted.position = listed.position
    )

    select
        verdict.rank,
        fused.document_id,
        fused.chunk_index,
        fused.id,
        fused.title,
        fused.source_type,
        fused.source_uri,
        fused.section,
        fused.page_number,
        fused.language,
        fused.document_scope,
        fused.tags,
        fused.verified,
        fused.metadata,
        fused.content_updated_at,
        fused.chunk_text,
        fused.score,
        case when fused.keyword_score > 0 then cast(fused.keyword_rank as integer) end,
        fused.keyword_score,
        fused.keyword_share,
        case when fused.cosine is not null then cast(fused.vector_rank as integer) end,
        fused.cosine,
        fused.token_count,
        verdict.tokens_total,
        verdict.reason,
        verdict.duplicate_of,
        arms.mode,
        'exact'
    from verdict
    join fused on fused.access_id = verdict.access_id and fused.id = verdict.id
    cross join arms
    where verdict.rank is not null or search.include_dropped
    order by verdict.rank nulls last, verdict.place nulls last, fused.score desc, fused.id;
end
$$;

comment on function search(text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean) is 'The chunks that answer a question best, among those that the principal may read, best first. Full text (BM25) and cosine, fused by reciprocal rank; then minimum cosine, near-duplicates (Jaccard of words), chunks per document, top_k, token budget. embedding and embedding_model may be left out: keywords alone. include_dropped adds the candidates that did not make it, without rank, reason saying why. mode: hybrid, partial (some chunks have vectors of another model, which are not compared) or keyword';
