-- Large classes, and those that have statistics, largest first; with the SQL that builds a class's own indexes, whose
-- names hold its number and no name of anybody; as rag_operator.
-- at_least: chunks
select
    class.tenant_id,
    class.access_id,
    class.chunks,
    class.is_ready,
    class.measured_chunks,
    class.measured_at,
    class.vector_bytes_per_chunk,
    class.words_bytes_per_chunk,
    class.statistics_rows,
    class.statistics_bytes,
    -- Built with three times the care of pgvector's default of 64: of a class of 200,000 generated chunks, a walk of
    -- 1,000 then met .91 of the ten nearest to 30 vectors that had nothing to do with them, and .77 otherwise. 32
    -- links instead of 16, at a care of 128, met .86 and took longer.
    format(
        'create index concurrently %%I on %%I.%%I using hnsw (embedding rag.halfvec_cosine_ops)'
        || ' with (m = 16, ef_construction = 200) where access_id = cast(%%L as bigint)',
        'rag_chunks_vector_' || class.access_id, 'rag', 'rag_chunks', class.access_id
    ) as vector_build,
    -- Without a list of pending entries, which every search would read through.
    format(
        'create index concurrently %%I on %%I.%%I using gin (tsv) with (fastupdate = off)'
        || ' where access_id = cast(%%L as bigint)',
        'rag_chunks_words_' || class.access_id, 'rag', 'rag_chunks', class.access_id
    ) as words_build
from rag.class_sizes(at_least => %(at_least)s) as class
order by class.chunks desc, class.access_id
