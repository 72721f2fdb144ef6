-- What the principal has asked for with an idempotency key within its time, no row when nothing.
-- request_key: bytea; valid_for: interval
select
    id,
    request_digest,
    queued,
    result
from rag.my_request(request_key => %(request_key)s, valid_for => %(valid_for)s)
