-- Ends the sharing of the principal's own project with a user; false when it was not shared with them.
-- project_id: text; member_user_id: bigint
select rag.unshare_project(%(project_id)s, %(member_user_id)s) as unshared
