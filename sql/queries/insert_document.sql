-- Adds a document to an access class; scope, owner and tags are those of the class.
-- tenant_id, source_type, source_id, source_uri, source_hash, language, title, body, domain, doc_type,
-- provenance_id, task_id: text; access_id: bigint; id: uuid or null for a new one;
-- verified: boolean; metadata: jsonb;
-- source_updated_at: timestamptz or null; created_at, content_updated_at: timestamptz, or null for now
insert into rag.rag_documents (
    tenant_id, id, access_id, scope, user_id, project_id, tags,
    source_type, source_id, source_uri, source_hash, source_updated_at,
    language, title, body, domain, doc_type, provenance_id, task_id, verified, metadata, created_at,
    content_updated_at
)
select
    class.tenant_id,
    coalesce(cast(%(id)s as uuid), gen_random_uuid()),
    class.access_id,
    class.scope,
    class.user_id,
    class.project_id,
    class.tags,
    %(source_type)s,
    %(source_id)s,
    %(source_uri)s,
    %(source_hash)s,
    %(source_updated_at)s,
    %(language)s,
    %(title)s,
    %(body)s,
    %(domain)s,
    %(doc_type)s,
    %(provenance_id)s,
    %(task_id)s,
    %(verified)s,
    %(metadata)s,
    coalesce(%(created_at)s, now()),
    coalesce(%(content_updated_at)s, now())
from rag.my_classes() as class
where class.tenant_id = %(tenant_id)s
    and class.access_id = %(access_id)s
returning id, body_bytes
