-- Writes vectors of the second model where there is none, and says how many; as rag_owner.
-- model_id: text; arrays of one length: tenant_ids: text[]; access_ids: bigint[]; chunk_ids: uuid[];
-- embeddings (halfvec as text): text[]
select rag.fill_vectors(
    %(model_id)s,
    cast(%(tenant_ids)s as text[]),
    cast(%(access_ids)s as bigint[]),
    cast(%(chunk_ids)s as uuid[]),
    cast(%(embeddings)s as text[])
) as filled
