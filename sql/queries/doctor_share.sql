-- Shares a project of the principal with another user, for reading.
-- project_id: text; member_user_id: bigint
select rag.share_project(%(project_id)s, %(member_user_id)s, false)
