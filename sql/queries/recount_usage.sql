-- Counts anew what a tenant has stored, while nobody writes in it; as rag_operator.
-- tenant_id: text
select
    counted.documents,
    counted.bytes
from rag.recount_usage(%(tenant_id)s) as counted
