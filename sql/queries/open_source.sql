-- Begins the writing of a source: waits until nobody erases in the tenant, retracts among what its owner has, or writes
-- it, and until the embedding model is not being changed; held to the end of the transaction. Then what
-- look_at_source.sql says. Raises as check_model() does where chunks of this model may not be written now.
-- owner_name: text that names tenant and owner; source_name: text that names tenant, owner and source;
-- tenant_id, scope, project_id, source_type, source_id, provenance_id, embedding_model: text; user_id: bigint;
-- tags: text[]
select
    found.access_id,
    found.id,
    found.document_access_id,
    found.source_hash,
    found.updated_at,
    found.generation,
    found.retractions,
    found.closed
from rag.open_source(
    owner_name => %(owner_name)s,
    source_name => %(source_name)s,
    tenant_id => %(tenant_id)s,
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    tags => %(tags)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s,
    provenance_id => %(provenance_id)s,
    embedding_model => %(embedding_model)s
) as found
