-- Writes what was found better for a language of a tenant's collection, in place of what was there; as rag_operator.
-- tenant_id, embedding_model, fusion: text; language: text, empty for none; vector_share: 0 to 1, or null;
-- min_similarity: cosine or null; questions: integer; ndcg_before, ndcg_after: 0 to 1
insert into rag.rag_calibrations as calibration (
    tenant_id, embedding_model, fusion, language, vector_share, min_similarity, questions, ndcg_before, ndcg_after
)
values (
    %(tenant_id)s, %(embedding_model)s, %(fusion)s, %(language)s, %(vector_share)s, %(min_similarity)s, %(questions)s,
    %(ndcg_before)s, %(ndcg_after)s
)
on conflict (tenant_id, embedding_model, fusion, language) do update
set vector_share = excluded.vector_share,
    min_similarity = excluded.min_similarity,
    questions = excluded.questions,
    ndcg_before = excluded.ndcg_before,
    ndcg_after = excluded.ndcg_after,
    calibrated_at = excluded.calibrated_at
