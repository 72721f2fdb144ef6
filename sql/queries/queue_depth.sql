-- How many jobs of the deployment wait and are being done, and how many workers there are.
-- seen_within: interval in which a worker has to have said that it is there; proof: text, of purpose jobs
select
    pending,
    ready,
    processing,
    workers
from rag.queue_depth(%(seen_within)s, %(proof)s)
