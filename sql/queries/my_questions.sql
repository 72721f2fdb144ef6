-- What the principal asked last, each once, newest first; as far as the words of questions are kept.
-- at_most: rows
select asked.query_text
from (
    select distinct on (query.query_text) query.query_text, query.asked_at
    from rag.my_queries() as query
    where query.query_text is not null
    order by query.query_text, query.asked_at desc
) as asked
order by asked.asked_at desc
limit %(at_most)s
