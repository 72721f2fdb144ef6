-- Shares a user's project with another user of the tenant, or changes whether they may write; as rag_operator.
-- tenant_id, project_id: text; owner_user_id, member_user_id: bigint; may_write: boolean
insert into rag.rag_project_members as membership (
    tenant_id, owner_user_id, project_id, member_user_id, may_write
)
values (%(tenant_id)s, %(owner_user_id)s, %(project_id)s, %(member_user_id)s, %(may_write)s)
on conflict (tenant_id, member_user_id, owner_user_id, project_id) do update
set may_write = excluded.may_write
