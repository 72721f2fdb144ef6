-- The models that embedded what is stored, most used first. As a superuser, whom policies do not bind.
select
    chunk.embedding_model,
    count(*) as chunks
from rag.rag_chunks as chunk
group by chunk.embedding_model
order by count(*) desc, chunk.embedding_model
