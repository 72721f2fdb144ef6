-- Counts what a transaction adds, as charge_quota.sql does, and lets go of the claim on the source that it wrote; last in it.
-- documents, bytes: bigint, below 0 for what is removed; source_digest: bytea; token: uuid
select
    exceeded.quota,
    exceeded.quota_limit,
    exceeded.used
from (select rag.release_claim(source_digest => %(source_digest)s, token => %(token)s) as released) as claim
-- Both are done: what is not counted is no reason to keep the claim, and what exceeds is undone with all the rest.
left join rag.charge_quota(%(documents)s, %(bytes)s) as exceeded on true
