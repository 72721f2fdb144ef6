-- Lets searches use a class's own indexes, or not; as rag_operator.
-- tenant_id: text; access_id: bigint; ready: boolean
select rag.set_class_ready(
    tenant_id => %(tenant_id)s, access_id => %(access_id)s, ready => %(ready)s
) as changed
