-- Whether a source of this owner, or what it is derived of, is retracted: closed is null when it is open.
-- scope, project_id, source_id, provenance_id: text; user_id: bigint
select
    retraction.generation,
    retraction.closed
from rag.retraction_of(
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_id => %(source_id)s,
    provenance_id => %(provenance_id)s
) as retraction
