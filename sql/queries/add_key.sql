-- A new key of a trusted service, of whose secret the database keeps a digest; as rag_operator.
-- tenant_id, key_id, name: text; secret_sha256: bytea; actions, scopes: text[]; act_as: boolean;
-- tags, project_ids: text[] or null for any; user_ids: bigint[] or null for any; valid_for: interval
insert into rag.rag_service_keys (
    tenant_id, key_id, name, secret_sha256, actions, scopes, tags, act_as, user_ids, project_ids, expires_at
)
values (
    %(tenant_id)s, %(key_id)s, %(name)s, %(secret_sha256)s, %(actions)s, %(scopes)s, %(tags)s, %(act_as)s,
    %(user_ids)s, %(project_ids)s, now() + cast(%(valid_for)s as interval)
)
returning expires_at
