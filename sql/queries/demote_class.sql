-- Ends the use of a class's own indexes and removes its statistics; as rag_operator.
-- tenant_id: text; access_id: bigint
select rag.demote_class(tenant_id => %(tenant_id)s, access_id => %(access_id)s) as changed
