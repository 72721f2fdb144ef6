-- The class of a document, each clause of the rule, and whether a principal sees it; as rag_operator.
-- document_id: uuid; tenant_id: text; user_id: bigint or null; project_id: text, * or null; tags: text[]
select
    verdict.access_id,
    verdict.scope,
    verdict.owner_user_id,
    verdict.owner_project_id,
    verdict.class_tags,
    verdict.clause,
    verdict.holds,
    verdict.visible
from rag.explain_access(
    document_id => %(document_id)s,
    tenant_id => %(tenant_id)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    tags => %(tags)s
) as verdict
