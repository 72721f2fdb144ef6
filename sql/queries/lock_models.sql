-- Whether nobody else changes the models of this database; from then on the session does, until it ends.
select pg_try_advisory_lock(hashtextextended('palisade models', 0)) as locked
