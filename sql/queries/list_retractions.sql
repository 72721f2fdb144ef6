-- Who invalidated or reinstated what and why, newest first; as rag_operator.
-- tenant_id: text or null for all; since: interval before now; top: rows
select
    retraction.created_at,
    retraction.tenant_id,
    nullif(retraction.user_id, 0) as user_id,
    retraction.project_id,
    retraction.action,
    retraction.sources,
    retraction.documents,
    retraction.chunks,
    retraction.cascade_id,
    retraction.reason
from rag.rag_retractions as retraction
where (cast(%(tenant_id)s as text) is null or retraction.tenant_id = %(tenant_id)s)
    and retraction.created_at >= now() - cast(%(since)s as interval)
order by retraction.created_at desc, retraction.id
limit %(top)s
