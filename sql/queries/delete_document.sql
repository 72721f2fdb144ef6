-- Removes a document and its chunks; a row when there was one that the principal may write.
-- tenant_id: text; access_id: bigint; id: uuid
delete from rag.rag_documents
where tenant_id = %(tenant_id)s
    and access_id = %(access_id)s
    and id = %(id)s
returning id
