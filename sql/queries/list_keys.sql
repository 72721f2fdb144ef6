-- Keys of trusted services, newest first, without their digests; as rag_operator.
-- tenant_id: text or null for all
select
    key.tenant_id,
    key.key_id,
    key.name,
    case
        when key.revoked_at is not null then 'revoked'
        when key.expires_at <= now() then 'expired'
        else 'valid'
    end as state,
    key.actions,
    key.scopes,
    key.tags,
    key.act_as,
    key.user_ids,
    key.project_ids,
    key.created_at,
    key.expires_at,
    key.revoked_at
from rag.rag_service_keys as key
where cast(%(tenant_id)s as text) is null
    or key.tenant_id = %(tenant_id)s
order by key.created_at desc, key.tenant_id, key.key_id
