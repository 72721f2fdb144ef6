-- Takes a tag's owner away; no row when it had none; as rag_operator.
-- tenant_id, name: text
delete from rag.rag_tags as tag
where tag.tenant_id = %(tenant_id)s
    and tag.name = %(name)s
returning tag.name
