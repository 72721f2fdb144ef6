-- Of the listed documents, those that a search finds in part or not at all, and why; by id.
-- document_ids: uuid[]; embedding_model: text
select
    document.document_id as id,
    part.chunks,
    part.other_model
from rag.my_documents_among(%(document_ids)s) as document
cross join lateral (
    select
        count(*) as chunks,
        count(*) filter (where chunk.embedding_model <> %(embedding_model)s) as other_model
    from rag.my_document_chunks(document.document_id) as chunk
) as part
where part.chunks = 0
    or part.other_model > 0
order by document.document_id
