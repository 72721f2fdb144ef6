-- Which arms a search could use where it found nothing; the words of the column `mode` of rag.search, or
-- none when the principal sees no chunk there.
-- tenant_id, embedding_model, scope: text; document_ids: uuid[] or null
select case
    when count(*) = 0 then 'none'
    when count(*) filter (where chunk.embedding_model = %(embedding_model)s) = 0 then 'keyword'
    when count(*) filter (where chunk.embedding_model = %(embedding_model)s) < count(*) then 'partial'
    else 'hybrid'
end as mode
from rag.rag_chunks as chunk
where chunk.tenant_id = %(tenant_id)s
    and chunk.access_id = any(cast((select rag.narrowed_access_ids(%(scope)s)) as bigint[]))
    and (cast(%(document_ids)s as uuid[]) is null or chunk.document_id = any(cast(%(document_ids)s as uuid[])))
