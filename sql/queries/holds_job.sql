-- Whether a job is still this worker's, who keeps it until the transaction ends. As rag_worker, or its publishing sibling,
-- for the principal of the job.
-- id, claim: uuid
select rag.holds_job(id => %(id)s, claim => %(claim)s) as held
