-- What counts for a tenant's collection instead of what is shipped, by tenant, model, fusion and language;
-- as rag_operator. tenant_id: text or null for all
select
    calibration.tenant_id,
    calibration.embedding_model,
    calibration.fusion,
    calibration.language,
    calibration.vector_share,
    rag.vector_share(
        calibration.embedding_model, nullif(calibration.language, ''), calibration.fusion
    ) as shipped_vector_share,
    calibration.min_similarity,
    calibration.questions,
    calibration.ndcg_before,
    calibration.ndcg_after,
    calibration.calibrated_at
from rag.rag_calibrations as calibration
where cast(%(tenant_id)s as text) is null
    or calibration.tenant_id = %(tenant_id)s
order by calibration.tenant_id, calibration.embedding_model, calibration.fusion, calibration.language
