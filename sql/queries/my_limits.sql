-- What the principal's tenant may ask and store, and what it has stored.
select
    limits.queries_per_minute,
    limits.query_burst,
    limits.ingests_per_minute,
    limits.ingest_burst,
    limits.documents,
    limits.bytes,
    limits.documents_used,
    limits.bytes_used
from rag.my_limits() as limits
