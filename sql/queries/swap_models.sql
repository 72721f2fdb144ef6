-- Makes the second model the active one, and the active one the second; as rag_owner.
select rag.swap_models() as swapped
