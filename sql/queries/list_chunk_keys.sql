-- What has to be equal for each chunk of a document to stay as it is, in order; the key as in delete_chunks.
-- document_id: uuid
select
    concat_ws(
        ':', chunk.chunk_hash, chunk.start_offset, chunk.end_offset, chunk.page_number, chunk.token_counter
    ) as chunk_key,
    chunk.embedding_model,
    chunk.language,
    chunk.token_counter,
    chunk.page_number
from rag.my_document_chunks(%(document_id)s) as chunk
order by chunk.chunk_index
