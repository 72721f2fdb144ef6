-- Says of the active columns again that none is null, once that was looked at; as rag_owner.
select rag.finish_swap() as finished
