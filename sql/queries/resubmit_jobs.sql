-- Puts jobs that failed into the queue again, as rag_operator; how many.
-- ids: array of uuid
select rag.resubmit_jobs(%(ids)s) as resubmitted
