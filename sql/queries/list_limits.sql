-- Limits and what is used of them: tenants that have either, then those without a row as one; as rag_operator.
-- tenant_id: text or null for all
with used as (
    select
        usage.tenant_id,
        cast(sum(usage.documents) as bigint) as documents,
        cast(sum(usage.bytes) as bigint) as bytes
    from rag.rag_usage as usage
    where cast(%(tenant_id)s as text) is null or usage.tenant_id = %(tenant_id)s
    group by usage.tenant_id
)

select
    coalesce(own.tenant_id, used.tenant_id) as tenant_id,
    own.tenant_id is not null as own,
    limits.queries_per_minute,
    limits.query_burst,
    limits.ingests_per_minute,
    limits.ingest_burst,
    limits.documents,
    coalesce(used.documents, 0) as documents_used,
    limits.bytes,
    coalesce(used.bytes, 0) as bytes_used
from (
    select named.tenant_id
    from rag.rag_limits as named
    where cast(%(tenant_id)s as text) is null or named.tenant_id = %(tenant_id)s
) as own
full join used on used.tenant_id = own.tenant_id
-- A tenant without a row has what holds for all of these.
left join rag.rag_limits as limits on limits.tenant_id = coalesce(own.tenant_id, '')
order by coalesce(own.tenant_id, used.tenant_id) = '', coalesce(own.tenant_id, used.tenant_id)
