-- Of the listed documents, those that the principal may read; no order.
-- document_ids: uuid[]
select document.document_id
from rag.my_documents_among(%(document_ids)s) as document
