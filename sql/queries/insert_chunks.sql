-- Adds chunks to a document, at most 1,000 a statement.
-- tenant_id, embedding_model, token_counter, language: text; access_id: bigint; document_id: uuid;
-- and arrays of one length: chunk_indexes, token_counts, start_offsets, end_offsets, page_numbers: integer[];
-- chunk_texts, chunk_hashes, sections, indexed_texts: text[]; embeddings: halfvec[]
insert into rag.rag_chunks (
    tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count, token_counter,
    start_offset, end_offset, page_number, section, embedding, embedding_model, tsv, lexeme_count, language
)
select
    %(tenant_id)s,
    %(access_id)s,
    %(document_id)s,
    chunk.chunk_index,
    chunk.chunk_text,
    chunk.chunk_hash,
    chunk.token_count,
    %(token_counter)s,
    chunk.start_offset,
    chunk.end_offset,
    chunk.page_number,
    chunk.section,
    chunk.embedding,
    %(embedding_model)s,
    indexed.tsv,
    rag.lexeme_total(indexed.tsv),
    %(language)s
from unnest(
    cast(%(chunk_indexes)s as integer[]),
    cast(%(chunk_texts)s as text[]),
    cast(%(chunk_hashes)s as text[]),
    cast(%(token_counts)s as integer[]),
    cast(%(start_offsets)s as integer[]),
    cast(%(end_offsets)s as integer[]),
    cast(%(page_numbers)s as integer[]),
    cast(%(sections)s as text[]),
    cast(%(indexed_texts)s as text[]),
    cast(%(embeddings)b as halfvec[])
) as chunk (
    chunk_index, chunk_text, chunk_hash, token_count, start_offset, end_offset, page_number, section,
    indexed_text, embedding
)
cross join lateral (
    -- Without the offset it would be worked out once for the row and once more for its count.
    select rag.search_vector(%(language)s, chunk.indexed_text) as tsv
    offset 0
) as indexed
