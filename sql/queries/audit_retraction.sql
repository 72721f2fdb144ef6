-- Records who invalidated or reinstated and why; in the transaction that does it.
-- tenant_id, project_id (null: none), action, reason, cascade_id (null: none): text; user_id: bigint (0: none);
-- sources, documents, chunks: counts
insert into rag.rag_retractions (
    tenant_id, user_id, project_id, action, reason, cascade_id, sources, documents, chunks
)
values (
    %(tenant_id)s, %(user_id)s, %(project_id)s, %(action)s, %(reason)s, %(cascade_id)s, %(sources)s, %(documents)s,
    %(chunks)s
)
