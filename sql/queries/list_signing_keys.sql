-- The signing keys that are valid, oldest first, without their secrets; as rag_operator.
select
    key.key_id,
    key.created_at
from rag.list_signing_keys() as key
