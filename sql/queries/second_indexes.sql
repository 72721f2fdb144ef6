-- What indexes the second model lacks or has in vain, with the SQL that builds or removes one; as rag_owner.
-- Built as list_class_sizes has those of the active model.
with wanted as (
    select
        'rag_chunks_second_contents' as index_name,
        cast(null as bigint) as access_id,
        'create index concurrently rag_chunks_second_contents on rag.rag_chunks '
        || '(tenant_id, access_id, second_embedding_model, (coalesce(language, '''')))' as build_statement
    union all
    select
        'rag_chunks_second_' || class.access_id,
        class.access_id,
        format(
            'create index concurrently %%I on rag.rag_chunks using hnsw (second_embedding rag.halfvec_cosine_ops)'
            || ' with (m = 16, ef_construction = 200) where access_id = cast(%%L as bigint)',
            'rag_chunks_second_' || class.access_id, class.access_id
        )
    from rag.large_classes() as class
),

present as (
    select index.index_name, index.is_usable
    from rag.second_indexes() as index
    union all
    select 'rag_chunks_second_contents', index.indisvalid
    from pg_index as index
    where index.indexrelid = to_regclass('rag.rag_chunks_second_contents')
)

select
    coalesce(wanted.index_name, present.index_name) as index_name,
    wanted.access_id,
    case when present.is_usable is not true then wanted.build_statement end as build_statement,
    case
        when present.is_usable is false or wanted.index_name is null
            then format('drop index concurrently if exists rag.%%I', present.index_name)
    end as drop_statement
from wanted
full join present on present.index_name = wanted.index_name
where present.is_usable is not true
    or wanted.index_name is null
order by wanted.access_id nulls first, 1
