-- Removes questions and assertions that are older; how many; as rag_operator.
-- older_than: interval; tenant_id: text or null for all
select rag.expire_logs(older_than => %(older_than)s, tenant_id => %(tenant_id)s) as rows_removed
