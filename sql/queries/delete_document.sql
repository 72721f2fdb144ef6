-- Removes a document and its chunks; a row when there was one that the principal may write.
-- tenant_id: text; access_id: bigint; id: uuid
delete from rag.rag_documents
where tenant_id = %(tenant_id)s
    and access_id = %(access_id)s
    -- The policies' own condition: either of the two is enough.
    and access_id = any((select rag.my_writable_access_ids())::bigint[])
    and id = %(id)s
returning id, body_bytes
