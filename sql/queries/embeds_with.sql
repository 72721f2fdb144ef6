-- Whether a tenant has a chunk that this model embedded, null when it has no chunk at all; as rag_operator.
-- tenant_id, embedding_model: text
select rag.embeds_with(%(tenant_id)s, %(embedding_model)s) as embeds_with
