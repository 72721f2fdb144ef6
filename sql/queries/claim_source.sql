-- Claims a source, so that nobody else makes it searchable at the same time; source_digest is null while somebody else
-- does. What is stored of it then, since whoever held it before may have finished: a row for each of its documents, and
-- one row at least. And what the tenant may store, and has stored.
-- access_id, user_id: bigint; scope, project_id, source_type, source_id: text; token: uuid;
-- lease: interval, after which the claim ends by itself
select
    claimed.source_digest,
    found.id,
    found.document_access_id,
    found.source_hash,
    found.updated_at,
    found.generation,
    room.documents,
    room.bytes,
    room.documents_used,
    room.bytes_used
from (
    select
        rag.claim_source(
            access_id => %(access_id)s,
            source_type => %(source_type)s,
            source_id => %(source_id)s,
            token => %(token)s,
            lease => %(lease)s
        ) as source_digest
) as claimed
-- A left join without an equation: the claim comes first.
left join rag.find_source(
    access_id => %(access_id)s,
    scope => %(scope)s,
    user_id => %(user_id)s,
    project_id => %(project_id)s,
    source_type => %(source_type)s,
    source_id => %(source_id)s
) as found on claimed.source_digest is not null
cross join rag.my_limits() as room
