-- Documents of a synchronised source that one owner has, as far as the principal sees them; by source id.
-- source, scope: text; user_id: bigint or null; project_id: text or null
select
    document.id,
    document.source_type,
    document.source_id,
    document.source_hash,
    document.tags,
    document.updated_at,
    document.metadata -> 'origin' ->> 'path' as path,
    document.metadata -> 'origin' ->> 'sha256' as sha256
from rag.my_documents() as document
where document.metadata -> 'origin' ->> 'source' = %(source)s
    -- Both, so that what an ingest merely says of its origin makes nothing a part of a source.
    and starts_with(document.source_id, %(source)s || ':')
    and document.scope = %(scope)s
    and document.user_id is not distinct from %(user_id)s
    and document.project_id is not distinct from %(project_id)s
order by document.source_id, document.id
