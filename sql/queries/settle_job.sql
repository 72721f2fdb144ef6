-- Ends a job in the transaction that did it; false when it is not this worker's any more. As rag_worker, or its
-- publishing sibling, for the principal of the job.
-- id, claim: uuid; result: jsonb
select rag.settle_job(id => %(id)s, claim => %(claim)s, result => %(result)s) as settled
