-- Which arms a search could use where it found nothing; the words of the column `mode` of rag.search, or
-- none when the principal sees no chunk there.
-- embedding_model, scope: text; document_ids: uuid[] or null
select rag.search_mode(%(embedding_model)s, %(scope)s, %(document_ids)s) as mode
