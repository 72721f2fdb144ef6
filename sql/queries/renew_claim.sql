-- Keeps a claim for another lease, if it is still there.
-- source_digest: bytea; token: uuid; lease: interval
select rag.renew_claim(source_digest => %(source_digest)s, token => %(token)s, lease => %(lease)s)
