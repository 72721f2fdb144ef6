-- Tenants that have stored something else than was counted; as rag_operator. Reads every document's size.
select
    drift.tenant_id,
    drift.documents_counted,
    drift.documents_stored,
    drift.bytes_counted,
    drift.bytes_stored
from rag.usage_drift() as drift
