-- Takes a tenant's limits away; no row when it had none of its own; as rag_operator.
-- tenant_id: text, empty for what holds for all without a row
delete from rag.rag_limits as limits
where limits.tenant_id = %(tenant_id)s
returning limits.tenant_id
