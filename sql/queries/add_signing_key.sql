-- Makes a key with which the service signs; its secret is shown this once; as rag_operator.
select
    key_id,
    secret
from rag.add_signing_key()
