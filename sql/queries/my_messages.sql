-- Messages of a thread of the principal's own, in their order.
-- project_id: text, null for a thread of the user alone; thread_id: text; after: bigint, a place in the thread;
-- at_most: integer
select
    id,
    number,
    role,
    content,
    tokens,
    characters,
    summarised_at,
    created_at
from rag.my_messages(
    project_id => %(project_id)s, thread_id => %(thread_id)s, after => %(after)s, at_most => %(at_most)s
)
order by number, id
