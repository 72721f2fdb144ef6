-- Makes the transaction speak for a principal; the first statement of every transaction.
-- tenant_id: text; user_id: bigint or null; project_id: text, * or null; tags: text[]; signature: text
select rag.begin_as(%(tenant_id)s, %(user_id)s, %(project_id)s, %(tags)s, %(signature)s)
