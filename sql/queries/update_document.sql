-- Replaces what a document says; its class, id and source stay. Parameters as in insert_document.
update rag.rag_documents
set source_uri = %(source_uri)s,
    source_hash = %(source_hash)s,
    source_updated_at = %(source_updated_at)s,
    language = %(language)s,
    title = %(title)s,
    content_updated_at = coalesce(%(content_updated_at)s, clock_timestamp()),
    body = %(body)s,
    domain = %(domain)s,
    doc_type = %(doc_type)s,
    provenance_id = %(provenance_id)s,
    task_id = %(task_id)s,
    verified = %(verified)s,
    metadata = %(metadata)s,
    updated_at = clock_timestamp()
where tenant_id = %(tenant_id)s
    and access_id = %(access_id)s
    -- The policies' own condition: either of the two is enough.
    and access_id = any((select rag.my_writable_access_ids())::bigint[])
    and id = %(id)s
returning id, body_bytes
