-- Asks for a job to be done as the principal once the transaction has committed; null when too many wait.
-- kind, lock, source_type, source_id, body: text; payload: jsonb; max_waiting: jobs of the tenant, null for any number;
-- request_key, request_digest: bytea, null without an idempotency key
select
    rag.enqueue_job(
        kind => %(kind)s,
        lock => %(lock)s,
        source_type => %(source_type)s,
        source_id => %(source_id)s,
        payload => %(payload)s,
        body => %(body)s,
        max_waiting => %(max_waiting)s,
        request_key => %(request_key)s,
        request_digest => %(request_digest)s
    ) as id
