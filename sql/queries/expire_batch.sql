-- Removes at most so many questions, assertions or messages that are older, in all tenants; how many; as rag_operator.
-- kind: text, questions, assertions or messages; older_than: interval; at_most: integer
select rag.expire_batch(kind => %(kind)s, older_than => %(older_than)s, at_most => %(at_most)s) as rows_removed
