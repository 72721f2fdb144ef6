-- Names the owner of a tag, instead of the one before; as rag_operator.
-- tenant_id, name: text; owner_user_id: bigint or null; owner_email: text or null
insert into rag.rag_tags as tag (tenant_id, name, owner_user_id, owner_email)
values (%(tenant_id)s, %(name)s, %(owner_user_id)s, %(owner_email)s)
on conflict (tenant_id, name) do update
set owner_user_id = excluded.owner_user_id,
    owner_email = excluded.owner_email,
    updated_at = excluded.updated_at
