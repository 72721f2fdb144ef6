-- Lets go of a claim, if it is still there.
-- source_digest: bytea; token: uuid
select rag.release_claim(source_digest => %(source_digest)s, token => %(token)s)
