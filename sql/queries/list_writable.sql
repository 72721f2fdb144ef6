-- Documents that the principal may write, by source id.
-- prefix: text, of the source id, or null; source_type: text or null
select
    document.id,
    document.source_type,
    document.source_id
from rag.my_documents() as document
join rag.my_classes() as class
    on class.access_id = document.access_id
    and class.may_write
where (cast(%(prefix)s as text) is null or starts_with(document.source_id, %(prefix)s))
    and (cast(%(source_type)s as text) is null or document.source_type = %(source_type)s)
order by document.source_id collate ucs_basic, document.id
