-- The messages that a job is to sum up, in their order, as rag_worker.
-- summary_id: uuid, the job
select
    id,
    access_id,
    thread_id,
    role,
    content,
    created_at
from rag.claimed_messages(summary_id => %(summary_id)s)
