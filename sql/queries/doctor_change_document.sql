-- Changes the title of a document of any class, which policies alone have to stop; a row when there was one.
-- For the canary of `rag doctor`.
-- tenant_id: text; access_id: bigint; document_id: uuid
update rag.rag_documents
set title = 'changed'
where tenant_id = %(tenant_id)s
    and access_id = %(access_id)s
    and id = %(document_id)s
returning id
