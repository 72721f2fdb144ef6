-- Cancels one of the principal's own jobs; false when there is none that has not ended.
-- id: uuid
select rag.cancel_my_job(%(id)s) as cancelled
