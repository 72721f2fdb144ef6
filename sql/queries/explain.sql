-- Why one chunk, or the best one of a document, is among the passages for a question or not: one row for each stage.
-- question: text; document_id: uuid; chunk_index: integer or null; embedding: halfvec as text, or null;
-- embedding_model: text or null; top_k: rows; scope: text or null; min_similarity, model_min_similarity: as for
-- search; max_per_document: chunks; budget_tokens: tokens or null; duplicate_threshold: Jaccard;
-- duplicate_candidates: rows; arms: hybrid, vector or keyword; fusion: rank or score;
-- feedback_boost: share of the score, 0 to 1
select
    stage,
    passed,
    value,
    detail
from rag.explain(
    question => %(question)s,
    document_id => %(document_id)s,
    embedding => cast(%(embedding)s as halfvec),
    embedding_model => %(embedding_model)s,
    chunk_index => %(chunk_index)s,
    top_k => %(top_k)s,
    scope => %(scope)s,
    min_similarity => coalesce(
        cast(%(min_similarity)s as double precision),
        rag.my_min_similarity(%(embedding_model)s),
        cast(%(model_min_similarity)s as double precision)
    ),
    max_per_document => %(max_per_document)s,
    budget_tokens => %(budget_tokens)s,
    duplicate_threshold => %(duplicate_threshold)s,
    duplicate_candidates => %(duplicate_candidates)s,
    arms => %(arms)s,
    fusion => %(fusion)s,
    feedback_boost => %(feedback_boost)s
)
