-- What tenants tell the model, of one tenant or of all; as rag_operator.
-- tenant_id: text or null
select
    told.tenant_id,
    told.generation,
    told.replaces,
    told.prompt,
    told.updated_at
from rag.rag_prompts as told
where cast(%(tenant_id)s as text) is null or told.tenant_id = %(tenant_id)s
order by told.tenant_id
