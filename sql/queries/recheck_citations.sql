-- Of the cited chunks, those that the principal may still read, with when their document's text last changed.
-- document_ids: uuid[], chunk_indexes: integer[], of one length
-- Materialized, so that the few documents are read first: the planner takes the function for a thousand rows each
-- and would read every chunk of the class instead.
with document as materialized (
    select
        cited.document_id,
        cited.chunk_index,
        found.tenant_id,
        found.access_id,
        found.content_updated_at
    from unnest(cast(%(document_ids)s as uuid[]), cast(%(chunk_indexes)s as integer[]))
        as cited (document_id, chunk_index)
    cross join lateral rag.my_document(cited.document_id) as found
)

select
    document.document_id,
    document.chunk_index,
    document.content_updated_at
from document
cross join lateral (
    select chunk.chunk_index
    from rag.rag_chunks as chunk
    where
        chunk.tenant_id = document.tenant_id
        and chunk.access_id = document.access_id
        and chunk.document_id = document.document_id
        and chunk.chunk_index = document.chunk_index
    offset 0
) as chunk
