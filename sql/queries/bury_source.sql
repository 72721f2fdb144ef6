-- Remembers that a source was deleted, so that an ingest that began before does not bring it back.
-- access_id: bigint; source_type, source_id, reason: text
select rag.bury_source(%(access_id)s, %(source_type)s, %(source_id)s, %(reason)s) as generation
