-- Chunks without a vector of the second model, class after class from the given one on; as rag_owner.
-- tenant_id: text; access_id: bigint; at_most: integer
select
    chunk.tenant_id,
    chunk.access_id,
    chunk.chunk_id,
    chunk.title,
    chunk.section,
    chunk.chunk_text,
    chunk.chunk_hash
from rag.chunks_to_fill(%(tenant_id)s, %(access_id)s, %(at_most)s) as chunk
