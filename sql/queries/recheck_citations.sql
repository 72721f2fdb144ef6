-- Of the cited chunks, those that the principal may still read, with when their document's text last changed.
-- tenant_id: text; document_ids: uuid[], chunk_indexes: integer[], of one length
select
    cited.document_id,
    cited.chunk_index,
    document.content_updated_at
from unnest(cast(%(document_ids)s as uuid[]), cast(%(chunk_indexes)s as integer[])) as cited (document_id, chunk_index)
join rag.rag_chunks as chunk
    on chunk.tenant_id = %(tenant_id)s
    and chunk.document_id = cited.document_id
    and chunk.chunk_index = cited.chunk_index
join rag.rag_documents as document
    on document.tenant_id = %(tenant_id)s
    and document.access_id = chunk.access_id
    and document.id = chunk.document_id
