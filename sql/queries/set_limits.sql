-- Sets the limits of a tenant that are named as changed, the others stay; as rag_operator.
-- tenant_id: text, empty for all without a row; queries_per_minute, query_burst, ingests_per_minute, ingest_burst,
-- documents, bytes: bigint or null for no limit; changed: text[], which of them
insert into rag.rag_limits as present (
    tenant_id, queries_per_minute, query_burst, ingests_per_minute, ingest_burst, documents, bytes
)
values (
    %(tenant_id)s, %(queries_per_minute)s, %(query_burst)s, %(ingests_per_minute)s, %(ingest_burst)s, %(documents)s,
    %(bytes)s
)
on conflict (tenant_id) do update
set queries_per_minute = case
        when 'queries_per_minute' = any(cast(%(changed)s as text[])) then excluded.queries_per_minute
        else present.queries_per_minute
    end,
    query_burst = case
        when 'query_burst' = any(cast(%(changed)s as text[])) then excluded.query_burst
        else present.query_burst
    end,
    ingests_per_minute = case
        when 'ingests_per_minute' = any(cast(%(changed)s as text[])) then excluded.ingests_per_minute
        else present.ingests_per_minute
    end,
    ingest_burst = case
        when 'ingest_burst' = any(cast(%(changed)s as text[])) then excluded.ingest_burst
        else present.ingest_burst
    end,
    documents = case
        when 'documents' = any(cast(%(changed)s as text[])) then excluded.documents
        else present.documents
    end,
    bytes = case
        when 'bytes' = any(cast(%(changed)s as text[])) then excluded.bytes
        else present.bytes
    end,
    updated_at = excluded.updated_at
returning present.tenant_id
