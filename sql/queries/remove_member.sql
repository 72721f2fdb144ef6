-- Ends the sharing of a project with a user; a row when it was shared with them; as rag_operator.
-- tenant_id, project_id: text; owner_user_id, member_user_id: bigint
delete from rag.rag_project_members as membership
where membership.tenant_id = %(tenant_id)s
    and membership.owner_user_id = %(owner_user_id)s
    and membership.project_id = %(project_id)s
    and membership.member_user_id = %(member_user_id)s
returning membership.member_user_id
