-- Embeddings of a document's present chunks that can be kept, one row for each distinct hash.
-- tenant_id, embedding_model: text; access_id: bigint; document_id: uuid; chunk_hashes: text[]
select distinct on (chunk.chunk_hash)
    chunk.chunk_hash,
    cast(chunk.embedding as text) as embedding
from rag.rag_chunks as chunk
where chunk.tenant_id = %(tenant_id)s
    and chunk.access_id = %(access_id)s
    and chunk.document_id = %(document_id)s
    and chunk.embedding_model = %(embedding_model)s
    and chunk.chunk_hash = any(%(chunk_hashes)s)
order by chunk.chunk_hash
