-- Claims a source, so that nobody else makes it searchable at the same time; source_digest is null while somebody else
-- does. With it all that look_at_source.sql says, as it is once the claim is made, since whoever held it before may have
-- finished: a row for each of its documents, and one row at least. And what the tenant may store, and has stored.
-- Refused with 42501 where the principal may not write.
-- scope, project_id, source_type, source_id, provenance_id: text; user_id: bigint; tags: text[]; token: uuid;
-- lease: interval, after which the claim ends by itself
select
    claimed.access_id,
    claimed.source_digest,
    found.id,
    found.document_access_id,
    found.source_hash,
    found.updated_at,
    found.generation,
    retraction.generation as retractions,
    retraction.closed,
    room.documents,
    room.bytes,
    room.documents_used,
    room.bytes_used
from (
    select
        granted.access_id,
        rag.claim_source(
            access_id => granted.access_id,
            source_type => %(source_type)s,
            source_id => %(source_id)s,
            token => %(token)s,
            lease => %(lease)s
        ) as source_digest
    from (select rag.access_class(%(scope)s, %(user_id)s, %(project_id)s, %(tags)s) as access_id) as granted
) as claimed
-- It takes the class from there, so the claim comes first.
cross join lateral rag.find_source(
    access_id => claimed.access_id,
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s
) as found
cross join rag.retraction_of(
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_id => %(source_id)s,
    provenance_id => %(provenance_id)s
) as retraction
cross join rag.my_limits() as room
