-- Removes everything that 0001_initial.up.sql made, with all documents in it. The schema, the roles
-- and the extension stay: they are bootstrap.sql's.

drop view v_chunks;
drop view v_documents;

drop function search(
    text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean
);
drop function keyword_candidates(text, text, uuid[], integer);

drop table rag_query_log_chunks;
drop table rag_query_logs;
drop table rag_tombstones;
drop table rag_chunks;
drop table rag_documents;

drop function whoami();
drop function access_class(text, bigint, text, text[]);
drop function narrowed_access_ids(text);

-- Functions and policies of these two depend on each other: the policies go first.
drop policy own_tenant_select on rag_access_classes;
drop policy read_classes on rag_access_classes;
drop policy own_tenant_select on rag_project_members;
drop policy read_members on rag_project_members;
drop function my_writable_access_ids();
drop function my_access_ids();
drop table rag_project_members;
drop table rag_access_classes;

drop function my_user_id();
drop function my_tenant_id();
drop function my_principal();
drop function begin_as(text, bigint, text, text[]);
drop function lexeme_query(text);
drop function lexeme_total(tsvector);
drop function text_search_config(text);
