-- Who shares which project with whom in a tenant, by owner and project; as rag_operator.
-- tenant_id: text; project_id: text or null for all; owner_user_id: bigint or null for all
select
    membership.owner_user_id,
    membership.project_id,
    membership.member_user_id,
    membership.may_write,
    membership.created_at
from rag.rag_project_members as membership
where membership.tenant_id = %(tenant_id)s
    and (cast(%(project_id)s as text) is null or membership.project_id = %(project_id)s)
    and (cast(%(owner_user_id)s as bigint) is null or membership.owner_user_id = %(owner_user_id)s)
order by membership.owner_user_id, membership.project_id, membership.member_user_id
