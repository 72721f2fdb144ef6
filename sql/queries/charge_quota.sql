-- Counts what a transaction adds to the tenant; last in it. A row for a quota that does not allow it.
-- documents, bytes: bigint, below 0 for what is removed
select
    exceeded.quota,
    exceeded.quota_limit,
    exceeded.used
from rag.charge_quota(%(documents)s, %(bytes)s) as exceeded
