-- Views for people. They run with the rights of whoever queries them, under that role's policies.

create view v_documents
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.id as document_id,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    document.source_type,
    document.source_id,
    document.source_uri,
    document.title,
    document.language,
    document.domain,
    document.doc_type,
    document.verified,
    document.metadata,
    length(document.body) as body_characters,
    document.created_at,
    document.updated_at,
    document.content_updated_at,
    document.source_updated_at
from rag_documents as document;

comment on view v_documents is 'One row for each document that the reader may see, without its text';

create view v_chunks
with (security_invoker = true, security_barrier = true)
as
select
    chunk.tenant_id,
    chunk.document_id,
    chunk.chunk_index,
    chunk.document_id || ':' || chunk.chunk_index as source_id,
    document.title,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    chunk.section,
    chunk.page_number,
    chunk.language,
    chunk.chunk_text,
    chunk.token_count,
    chunk.token_counter,
    chunk.embedding_model,
    chunk.created_at
from rag_chunks as chunk
join rag_documents as document
    on document.tenant_id = chunk.tenant_id
    and document.access_id = chunk.access_id
    and document.id = chunk.document_id;

comment on view v_chunks is 'One row for each chunk that the reader may see, with the scope, owner and tags of its document';
