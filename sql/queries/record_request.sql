-- Records what came of a request that had an idempotency key, in the transaction that did it.
-- kind, source_type, source_id: text; result: jsonb; request_key, request_digest: bytea
select
    rag.record_request(
        kind => %(kind)s,
        source_type => %(source_type)s,
        source_id => %(source_id)s,
        result => %(result)s,
        request_key => %(request_key)s,
        request_digest => %(request_digest)s
    ) as id
