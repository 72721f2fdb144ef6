-- Refuses new chunks for so many seconds; 0 ends it; as rag_owner.
-- seconds: integer
select rag.pause_writes(%(seconds)s) as paused
