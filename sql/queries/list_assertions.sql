-- For whom trusted services spoke, newest first; as rag_operator.
-- tenant_id: text or null for all; since: interval before now; top: rows
select
    assertion.created_at,
    assertion.tenant_id,
    assertion.key_id,
    key.name,
    assertion.action,
    nullif(assertion.user_id, 0) as user_id,
    assertion.project_id,
    assertion.tags
from rag.rag_assertions as assertion
left join rag.rag_service_keys as key
    on key.tenant_id = assertion.tenant_id
    and key.key_id = assertion.key_id
where (cast(%(tenant_id)s as text) is null or assertion.tenant_id = %(tenant_id)s)
    and assertion.created_at >= now() - cast(%(since)s as interval)
order by assertion.created_at desc, assertion.id
limit %(top)s
