-- Embeddings of a document's present chunks that can be kept, one row for each distinct hash.
-- embedding_model: text; document_id: uuid; chunk_hashes: text[]
select distinct on (chunk.chunk_hash)
    chunk.chunk_hash,
    chunk.embedding
from rag.my_document_chunks(%(document_id)s) as chunk
where chunk.embedding_model = %(embedding_model)s
    and chunk.chunk_hash = any(%(chunk_hashes)s)
order by chunk.chunk_hash
