-- Ends a key of a trusted service; a row when it was not revoked before; as rag_operator.
-- key_id: text; tenant_id: text or null for any
update rag.rag_service_keys as key
set revoked_at = now()
where key.key_id = %(key_id)s
    and (cast(%(tenant_id)s as text) is null or key.tenant_id = %(tenant_id)s)
    and key.revoked_at is null
returning key.tenant_id, key.name
