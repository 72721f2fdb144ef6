-- Replaces what a document says; its class, id and source stay. content_updated_at moves only with the body.
-- Parameters as in insert_document
update rag.rag_documents
set source_uri = %(source_uri)s,
    source_hash = %(source_hash)s,
    source_updated_at = %(source_updated_at)s,
    language = %(language)s,
    title = %(title)s,
    content_updated_at = case when body = %(body)s then content_updated_at else clock_timestamp() end,
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
    and id = %(id)s
returning id
