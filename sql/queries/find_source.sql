-- What is stored of a source for this owner: its documents (more than one only while tags change) with the
-- one of the wanted class first, and the generation of its tombstone in that class (0 = never deleted).
-- One row at least, with null document columns when nothing is stored.
-- tenant_id, scope, project_id, source_type, source_id: text; user_id, access_id: bigint
select
    document.id,
    document.access_id,
    document.source_hash,
    document.updated_at,
    coalesce(tombstone.generation, 0) as generation
from (select 1) as once
left join rag.rag_documents as document
    on document.tenant_id = %(tenant_id)s
    and document.scope = %(scope)s
    and document.user_id is not distinct from %(user_id)s
    and document.project_id is not distinct from %(project_id)s
    and document.source_type = %(source_type)s
    and document.source_id = %(source_id)s
left join rag.rag_tombstones as tombstone
    on tombstone.tenant_id = %(tenant_id)s
    and tombstone.access_id = %(access_id)s
    and tombstone.source_type = %(source_type)s
    and tombstone.source_id = %(source_id)s
order by (document.access_id = %(access_id)s) desc nulls last, document.updated_at desc, document.id
