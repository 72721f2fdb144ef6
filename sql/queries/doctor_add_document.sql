-- Adds a document to whichever class is named, with whichever scope and owner: policies have to stop what does not
-- fit. For the canary of `rag doctor`.
-- tenant_id, scope, project_id, source_type, source_id: text; access_id, user_id: bigint; tags: text[]
insert into rag.rag_documents (
    tenant_id, access_id, scope, user_id, project_id, tags, source_type, source_id, source_hash, title, body
)
values (
    %(tenant_id)s, %(access_id)s, %(scope)s, %(user_id)s, %(project_id)s, %(tags)s, %(source_type)s, %(source_id)s,
    'canary', 'canary', 'canary'
)
