-- Documents of the listed sources that the principal may read, one row each; no order.
-- source_ids: text[]
select
    document.source_id,
    document.document_id
from rag.my_sources_among(%(source_ids)s) as document
