-- Cancels jobs that have not succeeded, as rag_operator; how many.
-- ids: array of uuid
select rag.cancel_jobs(%(ids)s) as cancelled
