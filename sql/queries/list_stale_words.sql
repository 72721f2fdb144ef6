-- Chunks whose words are not those that their text has now, as after a change of a text-search configuration.
-- document_id: uuid; language: text or null; chunk_indexes: integer[] and indexed_texts: text[] of one length
select chunk.chunk_index
from rag.my_document_chunks(%(document_id)s) as chunk
join unnest(
    cast(%(chunk_indexes)s as integer[]),
    cast(%(indexed_texts)s as text[])
) as wanted (chunk_index, indexed_text) on wanted.chunk_index = chunk.chunk_index
where chunk.tsv is distinct from rag.search_vector(%(language)s, wanted.indexed_text)
order by chunk.chunk_index
