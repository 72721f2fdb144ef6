-- The same for the ways that only the service has; rows as in doctor_read.
-- tenant_id: text; and of the planted documents, of one length: document_ids: uuid[], access_ids: bigint[],
-- scopes: text[]; and of their source: user_id: bigint; project_id, source_type, source_id: text; and tag: text
with planted as (
    select given.id, given.access_id, given.scope
    from unnest(
        cast(%(document_ids)s as uuid[]), cast(%(access_ids)s as bigint[]), cast(%(scopes)s as text[])
    ) as given (id, access_id, scope)
)

select distinct
    seen.path,
    seen.thing
from (
    select 'rag_documents' as path, cast(document.id as text) as thing
    from rag.rag_documents as document
    where document.tenant_id = %(tenant_id)s
    union all
    select 'rag_chunks', cast(chunk.document_id as text)
    from rag.rag_chunks as chunk
    where chunk.tenant_id = %(tenant_id)s
    union all
    select 'my_document_chunks', cast(chunk.document_id as text)
    from planted
    cross join lateral rag.my_document_chunks(planted.id) as chunk
    union all
    select 'my_documents_among', cast(document.document_id as text)
    from rag.my_documents_among(cast(%(document_ids)s as uuid[])) as document
    union all
    select 'my_sources_among', cast(document.document_id as text)
    from rag.my_sources_among(array[%(source_id)s]) as document
    union all
    select 'derived_documents', cast(document.document_id as text)
    from rag.derived_documents(
        document_ids => '{}',
        source_ids => array[%(source_id)s],
        provenance_ids => '{}',
        cascades => true
    ) as document
    union all
    select 'look_at_source', cast(source.id as text)
    from planted
    cross join lateral rag.look_at_source(
        access_id => planted.access_id,
        scope => planted.scope,
        user_id => case when planted.scope <> 'public' then cast(%(user_id)s as bigint) end,
        project_id => case when planted.scope = 'project' then cast(%(project_id)s as text) end,
        source_type => %(source_type)s,
        source_id => %(source_id)s,
        provenance_id => null
    ) as source
    where source.id is not null
    union all
    select 'look_at_source of a deleted one', cast(planted.access_id as text)
    from planted
    cross join lateral rag.look_at_source(
        access_id => planted.access_id,
        scope => planted.scope,
        user_id => cast(%(user_id)s as bigint),
        project_id => null,
        source_type => %(source_type)s,
        source_id => %(source_id)s || ' deleted',
        provenance_id => null
    ) as source
    where planted.scope = 'user'
        and source.generation > 0
    union all
    (
        select 'my_tag_owner', 'owner'
        from rag.my_tag_owner(%(tag)s) as owner
        limit 1
    )
    union all
    (
        select 'my_prompt', 'prompt'
        from rag.my_prompt() as told
        limit 1
    )
    union all
    (
        select 'my_members', 'member'
        from rag.my_members() as membership
        limit 1
    )
) as seen
