-- Whether nobody maintains this database; from then on the session does, until it ends.
select pg_try_advisory_lock(hashtextextended('palisade maintenance', 0)) as locked
