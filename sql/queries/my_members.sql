-- With whom the principal shares a project of its own, by user.
-- owner_user_id: bigint, the principal's user; project_id: text
select
    member.member_user_id,
    member.may_write,
    member.created_at
from rag.my_members() as member
where member.owner_user_id = %(owner_user_id)s
    and member.project_id = %(project_id)s
order by member.member_user_id
