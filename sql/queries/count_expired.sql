-- How many questions, assertions or messages are older, in all tenants; as rag_operator.
-- kind: text, questions, assertions or messages; older_than: interval
select rag.count_expired(kind => %(kind)s, older_than => %(older_than)s) as rows_left
