-- The service keys that are valid now, of all tenants.
-- proof: text, which shows that the service asks and not just somebody with its password (rag/sign.py)
select
    key.tenant_id,
    key.key_id,
    key.secret_sha256,
    key.actions,
    key.scopes,
    key.tags,
    key.act_as,
    key.user_ids,
    key.project_ids,
    key.expires_at
from rag.load_service_keys(%(proof)s) as key
