-- The embedding model that is searched; null where every service is taken at its word.
select rag.active_model() as model_id
