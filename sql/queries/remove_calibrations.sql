-- Lets what is shipped count again, for a tenant or one model or fusion of it; as rag_operator.
-- tenant_id: text; embedding_model, fusion: text or null for all
delete from rag.rag_calibrations as calibration
where calibration.tenant_id = %(tenant_id)s
    and (cast(%(embedding_model)s as text) is null or calibration.embedding_model = %(embedding_model)s)
    and (cast(%(fusion)s as text) is null or calibration.fusion = %(fusion)s)
returning calibration.embedding_model, calibration.fusion, calibration.language
