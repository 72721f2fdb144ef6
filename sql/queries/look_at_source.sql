-- The class that a source's document belongs to, what is stored of the source for its owner, and whether it is retracted
-- (closed is null when it is not); a row for each of its documents, the wanted class first, and one row at least. Refused
-- with 42501 where the principal may not write.
-- scope, project_id, source_type, source_id, provenance_id: text; user_id: bigint; tags: text[]
select
    granted.access_id,
    found.id,
    found.document_access_id,
    found.source_hash,
    found.updated_at,
    found.generation,
    found.retractions,
    found.closed
from (select rag.access_class(%(scope)s, %(user_id)s, %(project_id)s, %(tags)s) as access_id) as granted
cross join lateral rag.look_at_source(
    access_id => granted.access_id,
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s,
    provenance_id => %(provenance_id)s
) as found
