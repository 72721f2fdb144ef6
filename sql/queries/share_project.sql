-- Shares the principal's own project with another user of the tenant, or changes whether they may write.
-- project_id: text; member_user_id: bigint; may_write: boolean
select rag.share_project(%(project_id)s, %(member_user_id)s, %(may_write)s)
