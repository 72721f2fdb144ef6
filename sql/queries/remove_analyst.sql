-- Takes an analyst's rights away, from their next statement on; a row for each tenant; as rag_operator.
-- role_name: text; tenant_id: text or null for all
delete from rag.rag_analysts as analyst
where analyst.role_name = %(role_name)s
    and (cast(%(tenant_id)s as text) is null or analyst.tenant_id = %(tenant_id)s)
returning analyst.tenant_id
