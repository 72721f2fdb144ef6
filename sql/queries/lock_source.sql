-- Waits until nobody erases in the tenant, retracts among what this owner has, or writes this source; held to the end
-- of the transaction.
-- tenant_id: text; owner_name: text that names tenant and owner; source_name: text that names tenant, owner and source
select
    pg_advisory_xact_lock_shared(rag.tenant_lock(%(tenant_id)s)),
    pg_advisory_xact_lock_shared(hashtextextended(%(owner_name)s, 0)),
    pg_advisory_xact_lock(hashtextextended(%(source_name)s, 0))
