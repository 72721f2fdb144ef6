-- Ends a signing key; false when there was none of this name; as rag_operator.
-- key_id: text
select rag.retire_signing_key(%(key_id)s) as retired
