-- Erases a tenant, a user, a project or a source; the rows removed from each table; as rag_operator.
-- tenant_id: text; user_id: bigint or null; project_id, source_type, source_id: text or null
select
    erased.table_name,
    erased.rows_removed
from rag.forget(
    tenant_id => %(tenant_id)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s
) as erased
