-- How many rows each table has of a tenant, a user, a project or a source; as rag_operator.
-- tenant_id: text; user_id: bigint or null; project_id, source_type, source_id: text or null
select
    traces.table_name,
    traces.rows_left
from rag.count_traces(
    tenant_id => %(tenant_id)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s
) as traces
