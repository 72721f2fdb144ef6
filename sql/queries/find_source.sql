-- What is stored of a source for this owner, the wanted class first; one row at least.
-- access_id, user_id: bigint; scope, project_id, source_type, source_id: text
select
    id,
    document_access_id,
    source_hash,
    updated_at,
    generation
from rag.find_source(
    access_id => %(access_id)s,
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s
)
