-- Remembers that a source was deleted, so that an ingest that began before does not bring it back.
-- tenant_id, source_type, source_id, reason: text; access_id: bigint
insert into rag.rag_tombstones as tombstone (tenant_id, access_id, source_type, source_id, reason)
values (%(tenant_id)s, %(access_id)s, %(source_type)s, %(source_id)s, %(reason)s)
on conflict (tenant_id, access_id, source_type, source_id) do update
set generation = tombstone.generation + 1,
    reason = excluded.reason,
    updated_at = excluded.updated_at
returning generation
