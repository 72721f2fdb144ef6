-- Who may do what. Everything not granted here is refused; docs/access.md has it as a table.

-- The owner of the functions on the query path.
grant select on rag_access_classes to rag_search;
grant insert (tenant_id, scope, user_id, project_id, tags, tags_digest) on rag_access_classes to rag_search;
grant select on rag_project_members to rag_search;
grant select (tenant_id, id, access_id, document_id, tsv, lexeme_count, language) on rag_chunks to rag_search;

-- The service.
grant select on rag_access_classes to rag_app, rag_publisher;
grant select on rag_project_members to rag_app, rag_publisher;

grant select, delete on rag_documents to rag_app, rag_publisher;
grant insert on rag_documents to rag_app, rag_publisher;
grant update (
    source_uri, source_hash, source_updated_at, language, title, body, domain, doc_type,
    provenance_id, task_id, verified, metadata, updated_at, content_updated_at
) on rag_documents to rag_app, rag_publisher;

grant select, insert, delete on rag_chunks to rag_app, rag_publisher;

grant select, insert on rag_tombstones to rag_app, rag_publisher;
grant update (generation, reason, updated_at) on rag_tombstones to rag_app, rag_publisher;

grant select, insert on rag_query_logs to rag_app, rag_publisher;
grant select, insert on rag_query_log_chunks to rag_app, rag_publisher;

grant select on v_documents, v_chunks to rag_app, rag_publisher;

-- People who operate it.
grant select, insert, delete on rag_project_members to rag_operator;
grant update (may_write) on rag_project_members to rag_operator;

-- Functions. Definer functions belong to rag_search, which may create nothing once they are there.
grant execute on function begin_as(text, bigint, text, text[]) to rag_app, rag_publisher;
grant execute on function my_principal() to rag_app, rag_publisher, rag_search;
grant execute on function my_tenant_id() to rag_app, rag_publisher, rag_search;
grant execute on function my_user_id() to rag_app, rag_publisher, rag_search;
grant execute on function my_access_ids() to rag_app, rag_publisher;
grant execute on function my_writable_access_ids() to rag_app, rag_publisher;
grant execute on function narrowed_access_ids(text) to rag_app, rag_publisher;
grant execute on function access_class(text, bigint, text, text[]) to rag_app, rag_publisher;
grant execute on function whoami() to rag_app, rag_publisher;
grant execute on function text_search_config(text) to rag_app, rag_publisher, rag_search;
grant execute on function lexeme_total(tsvector) to rag_app, rag_publisher;
grant execute on function lexeme_query(text) to rag_search;
grant execute on function keyword_candidates(text, text, uuid[], integer) to rag_app, rag_publisher;
grant execute on function search(
    text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean
) to rag_app, rag_publisher;

grant create on schema rag to rag_search;
alter function my_access_ids() owner to rag_search;
alter function my_writable_access_ids() owner to rag_search;
alter function narrowed_access_ids(text) owner to rag_search;
alter function access_class(text, bigint, text, text[]) owner to rag_search;
alter function keyword_candidates(text, text, uuid[], integer) owner to rag_search;
revoke create on schema rag from rag_search;
