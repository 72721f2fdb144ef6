-- One of the principal's own jobs, no row for another's.
-- id: uuid
select
    id,
    kind,
    status,
    reason,
    detail,
    attempts,
    created_at,
    started_at,
    due_at,
    finished_at,
    result
from rag.my_job(%(id)s)
