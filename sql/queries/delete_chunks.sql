-- Removes the chunks of a document that are not exactly the ones wanted, and returns the places of those that stay.
-- tenant_id, embedding_model: text; access_id: bigint; document_id: uuid;
-- language: text or null; wanted_indexes: integer[] and wanted_keys: text[] of one length, a key being
-- hash:start:end:page:counter, without the page when there is none
with wanted as materialized (
    select wanted.chunk_index, wanted.chunk_key
    from unnest(
        cast(%(wanted_indexes)s as integer[]),
        cast(%(wanted_keys)s as text[])
    ) as wanted (chunk_index, chunk_key)
),

present as materialized (
    select
        chunk.id,
        chunk.chunk_index,
        chunk.embedding_model = %(embedding_model)s
            and chunk.language is not distinct from %(language)s
            and wanted.chunk_key is not null as stays
    from rag.my_document_chunks(%(document_id)s) as chunk
    left join wanted
        on wanted.chunk_index = chunk.chunk_index
        and wanted.chunk_key = concat_ws(
            ':', chunk.chunk_hash, chunk.start_offset, chunk.end_offset, chunk.page_number, chunk.token_counter
        )
    where chunk.access_id = %(access_id)s
),

removed as (
    delete from rag.rag_chunks as chunk
    using present
    where chunk.tenant_id = %(tenant_id)s
        and chunk.access_id = %(access_id)s
        and chunk.access_id = any((select rag.my_writable_access_ids())::bigint[])
        and chunk.id = present.id
        and not present.stays
)

select present.chunk_index
from present
where present.stays
order by present.chunk_index
