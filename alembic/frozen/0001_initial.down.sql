-- Removes everything that 0001_initial.up.sql made, with all documents in it. The schema, the roles
-- and the extension stay: they are bootstrap.sql's.

drop view v_feedback;
drop view v_routed_queries;
drop view v_source_usage;
drop view v_stale_documents;
drop view v_empty_results;
drop view v_query_latency;
drop view v_chunks;
drop view v_documents;

drop function explain(
    text, uuid, halfvec, text, integer, integer, text, double precision, integer, integer, double precision, integer, text,
    text, double precision
);
drop function search(
    text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean,
    text, text, boolean, text[], text[], text[], text[], text[], timestamptz, timestamptz, jsonb, double precision
);
drop function fuse_candidates(
    bigint[], uuid[], bigint[], uuid[], double precision[], double precision[], boolean[], halfvec, text, text, text, text,
    integer, double precision, integer, integer, double precision, integer, boolean, double precision
);
drop type search_hit;
drop function feedback_support(uuid[]);
drop function vector_share(text, text, text);
drop function nearest_indexed(bigint, halfvec, text, uuid[], integer, integer);
drop function keyword_candidates(text, text, uuid[], integer, bigint[], uuid[], text[], halfvec, text);
drop function candidate_query(text[], bigint[], bigint, bigint);
drop function indexed_among(bigint[]);
drop function class_contents(text);

drop function demote_class(text, bigint);
drop function set_class_ready(text, bigint, boolean);
drop function measure_class(text, bigint, integer);
drop function class_sizes(bigint);
drop function class_indexes();

drop function embeds_with(text, text);
drop function explain_access(uuid, text, bigint, text, text[]);
drop function expire_logs(interval, text);
drop function count_traces(text, bigint, text, text, text);
drop function forget(text, bigint, text, text, text);
drop function erasure_kind(text, bigint, text, text, text);
drop function retire_signing_key(text);
drop function list_signing_keys();
drop function add_signing_key();

drop function unshare_project(text, bigint);
drop function share_project(text, bigint, boolean);
drop function my_members();
drop function my_prompt();
drop function my_tag_owner(text);
drop function give_feedback(uuid, uuid, integer, integer, boolean);
drop function my_feedback();
drop function my_query_chunks();
drop function my_queries();
drop function my_min_similarity(text);
drop function search_mode(text, text, uuid[]);
drop function reopen_sources(text[], text[], uuid[], text[], text[]);
drop function close_sources(bigint[], text[], text[], uuid[], text);
drop function retraction_of(text, bigint, text, text, text);
drop function derived_documents(uuid[], text[], text[], boolean);
drop function bury_source(bigint, text, text, text);
drop function find_source(bigint, text, bigint, text, text, text);
drop function my_document_chunks(uuid);
drop function my_sources_among(text[]);
drop function my_documents_among(uuid[]);
drop function my_document(uuid);
drop function my_chunks();
drop function my_listed_documents();
drop function my_documents();
drop function erasure_digest(text, text, text[]);
drop function provenance_digest(text);
drop function source_digest(text, text);

-- With the tables go their policies, and with these the last uses of the functions of identity.
drop table rag_retractions;
drop table rag_assertions;
drop table rag_service_keys;
drop table rag_analysts;
drop table rag_signing_keys;
drop table rag_prompts;
drop table rag_tags;
drop table rag_feedback;
drop table rag_query_log_chunks;
drop table rag_query_logs;
drop table rag_erasures;
drop table rag_tombstones;
drop table rag_class_lexemes;
drop table rag_class_languages;
drop table rag_class_indexes;
drop table rag_chunks;
drop table rag_documents;
-- After what a search reads before it, so that neither waits for the other.
drop table rag_calibrations;
drop table rag_project_members;
drop table rag_access_classes;

drop function load_service_keys(text);
drop function whoami();
drop function my_classes();
drop function class_reads(bigint, text, bigint, text, text[]);
drop function access_class(text, bigint, text, text[]);
drop function tenant_lock(text);
drop function narrowed_access_ids(text);
drop function my_writable_access_ids();
drop function my_access_ids();
drop function i_am_analyst();
drop function my_tags();
drop function my_user_id();
drop function my_tenant_id();
drop function begin_as(text, bigint, text, text[], text);
drop function my_principal();
drop function signature_holds(text[], text);
drop function lexeme_query(text);
drop function lexeme_total(tsvector);
drop function question_lexemes(text, text);
drop function search_vector(text, text);
drop function text_vector(text, text, boolean);
drop function prepared_vector(regconfig, text, boolean);
drop function unspaced_vector(text, boolean);
drop function unspaced_unit();
drop function unspaced_letters();
drop function text_search_config(text);
