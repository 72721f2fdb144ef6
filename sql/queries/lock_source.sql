-- Waits until nobody else writes this source; held to the end of the transaction.
-- source: text that names tenant, owner and source
select pg_advisory_xact_lock(hashtextextended(%(source)s, 0))
