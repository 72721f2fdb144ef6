-- The chunks that answer a question best, best first; the work is done by the function rag.search.
-- question: text; embedding: halfvec as text, or null for keywords alone; embedding_model: text or null;
-- top_k: rows; scope: text or null; document_ids: uuid[] or null; min_similarity: cosine, or null for the one that
-- was calibrated, else model_min_similarity; max_per_document: chunks; budget_tokens: tokens or null;
-- duplicate_threshold: Jaccard; duplicate_candidates: rows; include_dropped: boolean; arms: hybrid, vector or keyword; fusion: rank or score;
-- only_verified: boolean; only_domains, only_doc_types, only_source_types, only_languages, only_tags: text[] or null;
-- updated_from, updated_before: timestamptz or null; only_metadata: jsonb object or null;
-- feedback_boost: share of the score, 0 to 1. Beside each row stands what the tenant tells the model, or nulls: one
-- round trip for both, and never older than the search.
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
    recall,
    told.prompt as tenant_prompt,
    told.replaces as tenant_prompt_replaces,
    told.generation as tenant_prompt_generation
from rag.search(
    question => %(question)s,
    embedding => cast(%(embedding)s as halfvec),
    embedding_model => %(embedding_model)s,
    top_k => %(top_k)s,
    scope => %(scope)s,
    document_ids => %(document_ids)s,
    min_similarity => coalesce(
        cast(%(min_similarity)s as double precision),
        rag.my_min_similarity(%(embedding_model)s),
        cast(%(model_min_similarity)s as double precision)
    ),
    max_per_document => %(max_per_document)s,
    budget_tokens => %(budget_tokens)s,
    duplicate_threshold => %(duplicate_threshold)s,
    duplicate_candidates => %(duplicate_candidates)s,
    include_dropped => %(include_dropped)s,
    arms => %(arms)s,
    fusion => %(fusion)s,
    only_verified => %(only_verified)s,
    only_domains => %(only_domains)s,
    only_doc_types => %(only_doc_types)s,
    only_source_types => %(only_source_types)s,
    only_languages => %(only_languages)s,
    only_tags => %(only_tags)s,
    updated_from => %(updated_from)s,
    updated_before => %(updated_before)s,
    only_metadata => %(only_metadata)s,
    feedback_boost => %(feedback_boost)s
)
left join rag.my_prompt() as told on true
