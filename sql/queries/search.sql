-- The chunks that answer a question best, best first; the work is done by the function rag.search.
-- question: text; embedding: halfvec as text, or null for keywords alone; embedding_model: text or null;
-- top_k: rows; scope: text or null; document_ids: uuid[] or null; min_similarity: cosine or null;
-- max_per_document: chunks; budget_tokens: tokens or null; duplicate_threshold: Jaccard;
-- duplicate_candidates: rows; include_dropped: boolean
select
    rank,
    document_id,
    chunk_index,
    title,
    source_type,
    source_uri,
    section,
    page_number,
    language,
    document_scope,
    tags,
    verified,
    metadata,
    content_updated_at,
    chunk_text,
    score,
    keyword_rank,
    keyword_score,
    keyword_share,
    vector_rank,
    cosine,
    token_count,
    tokens_total,
    reason,
    duplicate_of,
    mode,
    recall
from rag.search(
    question => %(question)s,
    embedding => cast(%(embedding)s as halfvec),
    embedding_model => %(embedding_model)s,
    top_k => %(top_k)s,
    scope => %(scope)s,
    document_ids => %(document_ids)s,
    min_similarity => %(min_similarity)s,
    max_per_document => %(max_per_document)s,
    budget_tokens => %(budget_tokens)s,
    duplicate_threshold => %(duplicate_threshold)s,
    duplicate_candidates => %(duplicate_candidates)s,
    include_dropped => %(include_dropped)s
)
