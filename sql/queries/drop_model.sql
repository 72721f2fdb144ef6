-- Removes the vectors and indexes of the second model; as rag_owner.
select rag.drop_second_model() as dropped
