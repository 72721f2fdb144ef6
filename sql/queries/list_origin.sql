-- Documents of a synchronised source that one owner has, as far as the principal sees them; by source id.
-- source, scope: text; user_id: bigint or null; project_id: text or null
select
    document.id,
    document.source_type,
    document.source_id,
    document.source_hash,
    document.tags,
    document.updated_at,
    document.path,
    document.content_sha256 as sha256
from rag.my_origin(%(source)s) as document
where document.scope = %(scope)s
    and document.user_id is not distinct from %(user_id)s
    and document.project_id is not distinct from %(project_id)s
order by document.source_id, document.id
