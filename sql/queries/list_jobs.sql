-- Jobs, latest first, as rag_operator; nothing of what they are about.
-- tenant_id, status: text, null for all; most: rows
select
    tenant_id,
    id,
    user_id,
    kind,
    status,
    reason,
    attempts,
    losses,
    created_at,
    started_at,
    due_at,
    finished_at
from rag.list_jobs(only_tenant_id => %(tenant_id)s, only_status => %(status)s, most => %(most)s)
