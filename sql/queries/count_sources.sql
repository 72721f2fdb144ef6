-- What the principal sees of each source, and how old it is; by source, type and scope.
-- embedding_model: text
with counted as (
    select
        chunk.document_id,
        chunk.access_id,
        count(*) as chunks,
        count(*) filter (where chunk.embedding_model <> %(embedding_model)s) as foreign_model
    from rag.my_chunks() as chunk
    group by chunk.document_id, chunk.access_id
)

select
    coalesce(document.metadata -> 'origin' ->> 'source', '') as source,
    document.source_type,
    document.scope,
    count(*) as documents,
    cast(coalesce(sum(counted.chunks), 0) as bigint) as chunks,
    count(*) filter (where counted.chunks is null) as without_chunks,
    cast(coalesce(sum(counted.foreign_model), 0) as bigint) as other_model_chunks,
    count(*) filter (where document.source_updated_at > document.updated_at) as source_is_newer,
    count(*) filter (where document.content_updated_at < now() - interval '180 days') as older_than_180_days,
    count(*) filter (
        where document.source_updated_at > document.updated_at
            or document.content_updated_at < now() - interval '180 days'
    ) as stale,
    max(document.updated_at) as last_written_at,
    min(document.content_updated_at) as oldest_text_at
from rag.my_documents() as document
left join counted
    on counted.document_id = document.id
    and counted.access_id = document.access_id
group by 1, 2, 3
order by 1, 2, 3
