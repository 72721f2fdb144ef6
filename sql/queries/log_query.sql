-- Writes down that a question was answered, together with the chunks that it got.
-- Scalars as the columns of rag_query_logs; and arrays of one length: document_ids: uuid[],
-- chunk_indexes: integer[], scores, cosines: double precision[], cited: boolean[]
with logged as (
    insert into rag.rag_query_logs (
        tenant_id, id, user_id, project_id, scope, query_hash, query_length, query_text, mode,
        embedding_model, model_used, result_count, citation_count, context_tokens, confidence, action,
        route_tag, route_fallback, retrieval_ms, generation_ms, latency_ms
    )
    values (
        %(tenant_id)s, %(id)s, %(user_id)s, %(project_id)s, %(scope)s, %(query_hash)s, %(query_length)s,
        %(query_text)s, %(mode)s, %(embedding_model)s, %(model_used)s, %(result_count)s, %(citation_count)s,
        %(context_tokens)s, %(confidence)s, %(action)s, %(route_tag)s, %(route_fallback)s, %(retrieval_ms)s,
        %(generation_ms)s, %(latency_ms)s
    )
)

insert into rag.rag_query_log_chunks (
    tenant_id, query_id, user_id, rank, document_id, chunk_index, score, cosine, cited
)
select
    %(tenant_id)s, %(id)s, %(user_id)s, hit.rank, hit.document_id, hit.chunk_index, hit.score, hit.cosine, hit.cited
from unnest(
    cast(%(document_ids)s as uuid[]),
    cast(%(chunk_indexes)s as integer[]),
    cast(%(scores)s as double precision[]),
    cast(%(cosines)s as double precision[]),
    cast(%(cited)s as boolean[])
) with ordinality as hit (document_id, chunk_index, score, cosine, cited, rank)
