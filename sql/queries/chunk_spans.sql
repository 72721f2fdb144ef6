-- Where the chunks of a document that the principal may read lie in its body, in order.
-- id: uuid
select
    chunk.chunk_index,
    chunk.start_offset,
    chunk.end_offset
from rag.my_document_chunks(%(id)s) as chunk
