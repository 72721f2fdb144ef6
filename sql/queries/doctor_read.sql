-- What the present principal gets through every way of reading that people and the service have, one row for each
-- way and each thing; nothing but what the canary of `rag doctor` has planted may come.
-- question, embedding (halfvec as text), embedding_model: text; document_ids: uuid[]
-- path: the way; thing: id of a document or class; member, query or latency for what has no such id
with planted as (
    select id
    from unnest(cast(%(document_ids)s as uuid[])) as given (id)
)

select distinct
    seen.path,
    seen.thing
from (
    select arm.path, cast(hit.document_id as text) as thing
    from rag.search(
        question => %(question)s,
        embedding => cast(%(embedding)s as rag.halfvec),
        embedding_model => %(embedding_model)s,
        top_k => 100,
        include_dropped => true
    ) as hit
    cross join lateral (
        values ('search by words', hit.keyword_rank), ('search by vector', hit.vector_rank), ('search', 0)
    ) as arm (path, rank)
    where arm.rank is not null
    union all
    select 'search_mode', 'something'
    where rag.search_mode(%(embedding_model)s, null, null) <> 'none'
    union all
    select 'explain', cast(planted.id as text)
    from planted
    cross join lateral rag.explain(
        %(question)s, planted.id, cast(%(embedding)s as rag.halfvec), %(embedding_model)s
    ) as stage
    union all
    select 'my_document', cast(document.id as text)
    from planted
    cross join lateral rag.my_document(planted.id) as document
    union all
    (
        select 'my_documents', cast(document.id as text)
        from rag.my_documents() as document
        limit 100
    )
    union all
    (
        select 'my_listed_documents', cast(document.id as text)
        from rag.my_listed_documents() as document
        limit 100
    )
    union all
    (
        select 'my_chunks', cast(chunk.document_id as text)
        from rag.my_chunks() as chunk
        limit 100
    )
    union all
    (
        select 'my_queries', 'query'
        from rag.my_queries() as asked
        limit 1
    )
    union all
    (
        select 'my_query_chunks', cast(hit.document_id as text)
        from rag.my_query_chunks() as hit
        limit 100
    )
    union all
    (
        select 'my_feedback', cast(given.document_id as text)
        from rag.my_feedback() as given
        limit 100
    )
    union all
    (
        select 'v_feedback', cast(given.document_id as text)
        from rag.v_feedback as given
        limit 100
    )
    union all
    (
        select 'v_routed_queries', 'query'
        from rag.v_routed_queries as asked
        limit 1
    )
    union all
    (
        select 'my_classes', cast(class.access_id as text)
        from rag.my_classes() as class
        limit 100
    )
    union all
    (
        select 'whoami', cast(me.access_id as text)
        from rag.whoami() as me
        where me.access_id is not null
        limit 100
    )
    union all
    (
        select 'my_access_ids', cast(class.access_id as text)
        from unnest(rag.my_access_ids()) as class (access_id)
        limit 100
    )
    union all
    (
        select 'v_documents', cast(document.document_id as text)
        from rag.v_documents as document
        limit 100
    )
    union all
    (
        select 'titles of v_documents', cast(document.document_id as text)
        from rag.v_documents as document
        where document.title is not null
        limit 100
    )
    union all
    (
        select 'v_chunks', cast(chunk.document_id as text)
        from rag.v_chunks as chunk
        limit 100
    )
    union all
    (
        select 'v_stale_documents', cast(document.document_id as text)
        from rag.v_stale_documents as document
        limit 100
    )
    union all
    (
        select 'v_source_usage', cast(document.document_id as text)
        from rag.v_source_usage as document
        limit 100
    )
    union all
    (
        select 'v_query_latency', 'query'
        from rag.v_query_latency as latency
        limit 1
    )
    union all
    (
        select 'v_empty_results', 'query'
        from rag.v_empty_results as asked
        limit 1
    )
) as seen
