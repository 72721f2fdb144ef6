-- Waits until nobody writes or erases in the tenant; held to the end of the transaction.
-- tenant_id: text
select pg_advisory_xact_lock(rag.tenant_lock(%(tenant_id)s))
