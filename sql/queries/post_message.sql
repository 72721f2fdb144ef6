-- Adds a message to a thread of the principal's own; how much of the thread no summary has, and no job is to make.
-- access_id: bigint, of the class of the thread; thread_id, role, content: text; tokens: integer; request_key,
-- request_digest: bytea, null without an idempotency key. repeated_digest: of the request that had the key before
select
    id,
    number,
    created_at,
    summary_id,
    repeated_digest,
    open_tokens,
    open_characters
from rag.post_message(
    access_id => %(access_id)s,
    thread_id => %(thread_id)s,
    role => %(role)s,
    content => %(content)s,
    tokens => %(tokens)s,
    request_key => %(request_key)s,
    request_digest => %(request_digest)s
)
