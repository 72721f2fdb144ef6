-- Removes jobs that ended long ago, old idempotency keys and claims that ran out, as rag_worker; how many jobs.
-- keys_after, jobs_after: interval
select rag.expire_jobs(keys_after => %(keys_after)s, jobs_after => %(jobs_after)s) as removed
