-- Summaries of a thread of the principal's own, latest first.
-- project_id: text, null for a thread of the user alone; thread_id: text; at_most: integer
select
    id,
    document_id,
    summary_text,
    message_ids,
    model,
    created_at
from rag.my_summaries(project_id => %(project_id)s, thread_id => %(thread_id)s, at_most => %(at_most)s)
order by created_at desc, id
