-- What there is to do and as whom, of a job that the queue has just given out, as rag_worker.
-- id: uuid; queue_id: bigint; proof: a signature over the worker's login and the word jobs
select
    tenant_id,
    user_id,
    project_id,
    tags,
    kind,
    payload,
    body,
    attempts,
    claim
from rag.take_job(id => %(id)s, queue_id => %(queue_id)s, proof => %(proof)s)
