-- Takes a token for a request, as a principal; a transaction of its own, in which nothing else may stand.
-- tenant_id: text; user_id: bigint or null; project_id: text, * or null; tags: text[]; signature: text;
-- kind: query or ingest
select
    taken.granted,
    taken.per_minute,
    taken.burst,
    taken.tokens_left,
    taken.wait_s
from rag.take_token_as(
    tenant_id => %(tenant_id)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    tags => %(tags)s,
    signature => %(signature)s,
    kind => %(kind)s
) as taken
