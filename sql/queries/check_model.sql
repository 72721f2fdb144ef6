-- Raises when chunks of this model may not be written: another one is active, or two are changing places. Locks the
-- table first, so that they cannot change places until this transaction has ended.
-- tenant_id, embedding_model: text
select rag.check_model(%(embedding_model)s) as active
where not exists (select from rag.rag_chunks as chunk where chunk.tenant_id = %(tenant_id)s and false)
