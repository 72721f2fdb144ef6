-- Removes documents and their chunks, with all that is derived of them; one row for each that the principal may read,
-- removed or not, the named ones first.
-- tenant_id: text; document_ids: uuid[]; source_ids, provenance_ids: text[]; cascades: boolean;
-- scopes: text[] within which it may remove
with tainted as materialized (
    select
        document.access_id,
        document.document_id,
        document.source_id,
        document.is_named,
        document.may_write and document.scope = any(cast(%(scopes)s as text[])) as goes,
        (
            select count(*)
            from rag.rag_chunks as chunk
            where chunk.tenant_id = %(tenant_id)s
                and chunk.access_id = document.access_id
                and chunk.document_id = document.document_id
        ) as chunks
    from rag.derived_documents(
        document_ids => %(document_ids)s,
        source_ids => %(source_ids)s,
        provenance_ids => %(provenance_ids)s,
        cascades => %(cascades)s
    ) as document
),

removed as (
    delete from rag.rag_documents as document
    using tainted
    where document.tenant_id = %(tenant_id)s
        -- The policies' own condition: either of the two is enough.
        and document.access_id = any((select rag.my_writable_access_ids())::bigint[])
        and document.access_id = tainted.access_id
        and document.id = tainted.document_id
        and tainted.goes
    returning document.access_id, document.id, document.body_bytes
)

select
    tainted.access_id,
    tainted.document_id,
    tainted.source_id,
    tainted.chunks,
    removed.body_bytes,
    removed.id is not null as is_removed
from tainted
left join removed
    on removed.access_id = tainted.access_id
    and removed.id = tainted.document_id
order by tainted.is_named desc, tainted.source_id, tainted.document_id
