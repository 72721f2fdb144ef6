-- Keeps what came of a synchronisation; a row with when the last one ended that had no failures, or null.
-- access_id: bigint, of the class to which the documents go; source: text; version: text or null; files, written,
-- removed, unchanged, failed: integer
select
    rag.note_synchronisation(
        access_id => %(access_id)s,
        source => %(source)s,
        version => %(version)s,
        files => %(files)s,
        written => %(written)s,
        removed => %(removed)s,
        unchanged => %(unchanged)s,
        failed => %(failed)s
    ) as succeeded_at
