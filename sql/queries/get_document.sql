-- One document that the principal may see, with how many chunks it has.
-- id: uuid
select
    document.id,
    document.access_id,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    document.source_type,
    document.source_id,
    document.source_uri,
    document.source_hash,
    document.source_updated_at,
    document.title,
    document.language,
    document.domain,
    document.doc_type,
    document.provenance_id,
    document.task_id,
    document.verified,
    document.metadata,
    document.body,
    document.body_bytes,
    document.created_at,
    document.updated_at,
    document.content_updated_at,
    (
        select count(*)
        from rag.rag_chunks as chunk
        where chunk.tenant_id = document.tenant_id
            and chunk.access_id = document.access_id
            and chunk.document_id = document.id
    ) as chunk_count
from rag.my_document(%(id)s) as document
