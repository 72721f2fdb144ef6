-- Of the cited chunks, those that the principal may still read, with when their document's text last changed.
-- document_ids: uuid[], chunk_indexes: integer[], of one length
select
    cited.document_id,
    cited.chunk_index,
    document.content_updated_at
from unnest(cast(%(document_ids)s as uuid[]), cast(%(chunk_indexes)s as integer[])) as cited (document_id, chunk_index)
cross join lateral rag.my_document(cited.document_id) as document
join rag.rag_chunks as chunk
    on chunk.tenant_id = document.tenant_id
    and chunk.access_id = document.access_id
    and chunk.document_id = document.id
    and chunk.chunk_index = cited.chunk_index
