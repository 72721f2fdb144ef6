-- Tags with an owner, of one tenant or of all; as rag_operator.
-- tenant_id: text or null
select
    tag.tenant_id,
    tag.name,
    tag.owner_user_id,
    tag.owner_email,
    tag.updated_at
from rag.rag_tags as tag
where cast(%(tenant_id)s as text) is null or tag.tenant_id = %(tenant_id)s
order by tag.tenant_id, tag.name
