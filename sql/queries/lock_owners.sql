-- Waits until nobody erases in the tenant or writes for these owners; held to the end of the transaction.
-- tenant_id: text; owners: text[] that name tenant and owner, in one order for everybody
select
    pg_advisory_xact_lock_shared(rag.tenant_lock(%(tenant_id)s)),
    pg_advisory_xact_lock(hashtextextended(owner.name, 0))
from unnest(cast(%(owners)s as text[])) as owner (name)
