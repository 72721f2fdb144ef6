-- Takes a tenant's prompt away; no row when it had none; as rag_operator.
-- tenant_id: text
delete from rag.rag_prompts as told
where told.tenant_id = %(tenant_id)s
returning told.generation
