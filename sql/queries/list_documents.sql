-- Documents that the principal may see, without their text, by source id; one page.
-- prefix: text, of the source id, or null; source_type, scope: text or null; after_source: text and after_id: uuid of
-- the last row of the page before, or null; at_most: rows, 1 to 1,001
with page as (
    select
        document.id,
        document.tenant_id,
        document.access_id,
        document.scope,
        document.user_id,
        document.project_id,
        document.tags,
        document.source_type,
        document.source_id,
        document.title,
        document.language,
        document.metadata -> 'origin' ->> 'source' as source,
        document.updated_at
    from rag.my_documents() as document
    where (cast(%(prefix)s as text) is null or starts_with(document.source_id, %(prefix)s))
        and (cast(%(source_type)s as text) is null or document.source_type = %(source_type)s)
        and (cast(%(scope)s as text) is null or document.scope = %(scope)s)
        and (
            cast(%(after_source)s as text) is null
            or (document.source_id collate ucs_basic, document.id) > (%(after_source)s, cast(%(after_id)s as uuid))
        )
    order by document.source_id collate ucs_basic, document.id
    limit %(at_most)s
)

select
    page.id,
    page.scope,
    page.user_id,
    page.project_id,
    page.tags,
    page.source_type,
    page.source_id,
    page.title,
    page.language,
    page.source,
    (
        select count(*)
        from rag.rag_chunks as chunk
        where chunk.tenant_id = page.tenant_id
            and chunk.access_id = page.access_id
            and chunk.document_id = page.id
    ) as chunks,
    page.updated_at
from page
order by page.source_id collate ucs_basic, page.id
