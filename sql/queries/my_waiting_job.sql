-- One of the principal's own jobs that nobody has begun, null when there is none. Holds the queue of the tenant until the
-- transaction ends.
-- kind, lock: text
select rag.my_waiting_job(kind => %(kind)s, lock => %(lock)s) as id
