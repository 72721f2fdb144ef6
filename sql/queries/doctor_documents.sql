-- How many documents show another scope, owner or tags than their class has, with the SQL that mends it.
-- As a superuser, whom policies do not bind.
select
    count(*) as documents,
    'update rag.rag_documents as document'
    || ' set scope = class.scope, user_id = class.user_id, project_id = class.project_id, tags = class.tags'
    || ' from rag.rag_access_classes as class'
    || ' where class.tenant_id = document.tenant_id and class.access_id = document.access_id'
    || ' and (document.scope, document.user_id, document.project_id, document.tags)'
    || ' is distinct from (class.scope, class.user_id, class.project_id, class.tags);' as mend
from rag.rag_documents as document
join rag.rag_access_classes as class
    on class.tenant_id = document.tenant_id
    and class.access_id = document.access_id
where (document.scope, document.user_id, document.project_id, document.tags)
    is distinct from (class.scope, class.user_id, class.project_id, class.tags)
