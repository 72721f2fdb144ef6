-- Puts back the jobs of workers that have not been heard of for so long, as rag_worker.
-- stalled_after: interval; max_losses: workers that one job may end before it is parked
select
    recovered,
    parked
from rag.recover_jobs(stalled_after => %(stalled_after)s, max_losses => %(max_losses)s)
