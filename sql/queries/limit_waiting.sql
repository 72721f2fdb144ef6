-- Waits for no lock longer than this, in milliseconds, in this transaction: whoever waits for the whole table has all
-- that come after it wait as well.
-- milliseconds: integer
select set_config('lock_timeout', cast(%(milliseconds)s as text), true) as lock_timeout
