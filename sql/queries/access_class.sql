-- The class of documents with this scope, owner and tags; refused with 42501 where the principal may not write.
-- scope: text; user_id: bigint or null; project_id: text or null; tags: text[]
select rag.access_class(%(scope)s, %(user_id)s, %(project_id)s, %(tags)s) as access_id
