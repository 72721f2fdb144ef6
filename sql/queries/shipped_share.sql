-- How far a model is believed against the words in a language, as shipped; as rag_operator.
-- embedding_model, fusion: text; language: text, empty for none
select rag.vector_share(%(embedding_model)s, nullif(%(language)s, ''), %(fusion)s) as vector_share
