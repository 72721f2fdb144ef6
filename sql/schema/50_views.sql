-- Views for people. They read through the functions of 35_reading.sql, so whoever queries them sees what
-- their principal may, and a condition of theirs is evaluated on nothing else.

create view v_documents
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.id as document_id,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    document.source_type,
    document.source_id,
    document.source_uri,
    document.title,
    document.language,
    document.domain,
    document.doc_type,
    document.verified,
    document.metadata,
    length(document.body) as body_characters,
    document.created_at,
    document.updated_at,
    document.content_updated_at,
    document.source_updated_at
from my_documents() as document
union all
select
    listed.tenant_id,
    listed.id,
    listed.scope,
    listed.user_id,
    cast(null as text),
    listed.tags,
    listed.source_type,
    cast(null as text),
    cast(null as text),
    cast(null as text),
    listed.language,
    cast(null as text),
    listed.doc_type,
    listed.verified,
    cast(null as jsonb),
    cast(null as integer),
    listed.created_at,
    listed.updated_at,
    listed.content_updated_at,
    listed.source_updated_at
from my_listed_documents() as listed;

comment on view v_documents is 'One row for each document that the reader may see, without its text; for an analyst with user_scope metadata also for users'' own documents, without anything that they say';

create view v_chunks
with (security_invoker = true, security_barrier = true)
as
select
    chunk.tenant_id,
    chunk.document_id,
    chunk.chunk_index,
    chunk.document_id || ':' || chunk.chunk_index as source_id,
    document.title,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    chunk.section,
    chunk.page_number,
    chunk.language,
    chunk.chunk_text,
    chunk.token_count,
    chunk.token_counter,
    chunk.embedding_model,
    chunk.created_at
from my_chunks() as chunk
join my_documents() as document
    on document.tenant_id = chunk.tenant_id
    and document.access_id = chunk.access_id
    and document.id = chunk.document_id;

comment on view v_chunks is 'One row for each chunk that the reader may see, with the scope, owner and tags of its document';

create view v_query_latency
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    date_trunc('hour', query.asked_at) as hour,
    query.mode,
    query.model_used,
    count(*) as queries,
    percentile_cont(0.5) within group (order by query.retrieval_ms) as retrieval_p50_ms,
    percentile_cont(0.95) within group (order by query.retrieval_ms) as retrieval_p95_ms,
    percentile_cont(0.5) within group (order by query.generation_ms) as generation_p50_ms,
    percentile_cont(0.95) within group (order by query.generation_ms) as generation_p95_ms,
    percentile_cont(0.5) within group (order by query.latency_ms) as latency_p50_ms,
    percentile_cont(0.95) within group (order by query.latency_ms) as latency_p95_ms,
    max(query.latency_ms) as latency_max_ms
from my_queries() as query
group by query.tenant_id, date_trunc('hour', query.asked_at), query.mode, query.model_used;

comment on view v_query_latency is 'One row for each hour, mode of search and model, of the questions that the reader may see; times in milliseconds';

create view v_empty_results
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    query.query_id,
    query.asked_at,
    query.user_id,
    query.project_id,
    query.scope,
    query.mode,
    query.query_length,
    query.query_text,
    query.latency_ms
from my_queries() as query
where query.result_count = 0;

comment on view v_empty_results is 'One row for each question that found nothing; mode none means that its principal could read nothing at all';

create view v_stale_documents
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.document_id,
    document.title,
    document.source_type,
    document.source_id,
    document.source_updated_at,
    document.content_updated_at,
    extract(epoch from now() - document.content_updated_at) / 86400 as content_age_days,
    coalesce(document.source_updated_at > document.updated_at, false) as source_is_newer
from v_documents as document
where document.source_updated_at > document.updated_at
    or document.content_updated_at < now() - interval '180 days';

comment on view v_stale_documents is 'One row for each document whose source changed after it was last ingested, or whose text is older than 180 days';

create view v_source_usage
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.document_id,
    document.title,
    document.source_type,
    document.source_id,
    count(hit.query_id) as times_retrieved,
    count(hit.query_id) filter (where hit.cited) as times_cited,
    avg(hit.rank) as mean_rank,
    max(query.asked_at) as last_retrieved_at
from v_documents as document
left join my_query_chunks() as hit
    on hit.tenant_id = document.tenant_id
    and hit.document_id = document.document_id
left join my_queries() as query on query.query_id = hit.query_id
group by
    document.tenant_id, document.document_id, document.title, document.source_type, document.source_id;

comment on view v_source_usage is 'One row for each document that the reader may see, with how often questions that the reader may see got it back and cited it';

create view v_routed_queries
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    query.query_id,
    query.asked_at,
    query.user_id,
    query.project_id,
    query.route_tag,
    query.route_fallback,
    query.confidence,
    query.result_count,
    query.citation_count,
    query.query_length,
    query.query_text
from my_queries() as query
where query.action = 'ROUTE';

comment on view v_routed_queries is 'One row for each question whose asker was sent to a person, with the tag of whose owner that was; confidence from 0 to 100';

create view v_feedback
with (security_invoker = true, security_barrier = true)
as
select
    given.tenant_id,
    given.query_id,
    query.asked_at,
    given.user_id,
    given.document_id,
    given.chunk_index,
    given.document_id || ':' || given.chunk_index as source_id,
    hit.rank,
    hit.cited,
    given.rating,
    given.clicked,
    query.confidence,
    query.action,
    given.created_at,
    given.updated_at
from my_feedback() as given
join my_queries() as query on query.query_id = given.query_id
left join my_query_chunks() as hit
    on hit.query_id = given.query_id
    and hit.document_id = given.document_id
    and hit.chunk_index = given.chunk_index;

comment on view v_feedback is 'One row for each answer, and for each source of one, that somebody made something of: rating 1, 0, -1 or null, clicked or not; of an answer itself document and rank are null';
