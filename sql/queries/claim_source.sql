-- Claims a source, so that nobody else makes it searchable at the same time; null while somebody else does.
-- access_id: bigint; source_type, source_id: text; token: uuid; lease: interval, after which the claim ends by itself
select
    rag.claim_source(
        access_id => %(access_id)s,
        source_type => %(source_type)s,
        source_id => %(source_id)s,
        token => %(token)s,
        lease => %(lease)s
    ) as source_digest
