-- Claims a source, so that nobody else makes it searchable at the same time, and says what is known of it once that is
-- done: what look_at_source.sql says, a row for each of its documents and one row at least, and what the tenant may store
-- and has stored. As a principal, and a transaction of its own, in which nothing else may stand. Nothing is claimed of
-- what is settled: the one document of the source, in its class, has this hash already. source_digest is null then, and
-- while somebody else holds the source. Refused with 42501 where the principal may not write.
-- tenant_id, signature: text; user_id: bigint or null; project_id: text, * or null; tags: text[]; and of the document
-- scope, owner_project_id, source_type, source_id, provenance_id, settled_hash: text; owner_user_id: bigint;
-- document_tags: text[]; token: uuid; lease: interval, after which the claim ends by itself
select
    claimed.access_id,
    claimed.source_digest,
    claimed.is_settled,
    claimed.id,
    claimed.document_access_id,
    claimed.source_hash,
    claimed.updated_at,
    claimed.generation,
    claimed.retractions,
    claimed.closed,
    claimed.documents,
    claimed.bytes,
    claimed.documents_used,
    claimed.bytes_used
from rag.claim_source_as(
    tenant_id => %(tenant_id)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    tags => %(tags)s,
    signature => %(signature)s,
    scope => %(scope)s,
    owner_user_id => %(owner_user_id)s,
    owner_project_id => %(owner_project_id)s,
    document_tags => %(document_tags)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s,
    provenance_id => %(provenance_id)s,
    settled_hash => %(settled_hash)s,
    token => %(token)s,
    lease => %(lease)s
) as claimed
