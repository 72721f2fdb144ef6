-- Indexes of single classes, also of those that are gone, by class, and the SQL that removes or rebuilds one;
-- as rag_operator.
select
    index.access_id,
    index.kind,
    index.index_name,
    index.is_usable,
    index.bytes,
    format('drop index concurrently if exists rag.%%I', index.index_name) as drop_statement,
    format('reindex index concurrently rag.%%I', index.index_name) as rebuild_statement
from rag.class_indexes() as index
order by index.access_id, index.index_name
