-- What came of the last synchronisation of each source that the principal sees, by source.
select
    last.source,
    last.scope,
    last.project_id,
    last.tags,
    last.version,
    last.files,
    last.written,
    last.removed,
    last.unchanged,
    last.failed,
    last.finished_at,
    last.succeeded_at
from rag.my_synchronisations() as last
order by last.source, last.scope, last.user_id, last.project_id
