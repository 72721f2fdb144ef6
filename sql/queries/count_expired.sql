-- How many questions or assertions are older, in all tenants; as rag_operator.
-- kind: text, questions or assertions; older_than: interval
select rag.count_expired(kind => %(kind)s, older_than => %(older_than)s) as rows_left
