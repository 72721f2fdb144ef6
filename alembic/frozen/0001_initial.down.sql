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

drop function drop_second_model();
drop function finish_swap();
drop function swap_models();
drop function add_model(text, text, integer);
drop function grant_model_columns();
drop function empty_second_column(integer);
drop function second_indexes();
drop function list_models();
drop function pause_writes(integer);
drop function set_models(text, text, boolean);
drop function large_classes();
drop function lacks_vectors();
drop function count_fill();
drop function fill_vectors(text, text[], bigint[], uuid[], text[]);
drop function chunks_to_fill(text, bigint, integer);
drop function check_model(text);
drop function active_model();
drop function compare_models(halfvec, halfvec, integer);

drop function demote_class(text, bigint);
drop function set_class_ready(text, bigint, boolean);
drop function measure_class(text, bigint, integer);
drop function class_sizes(bigint);
drop function class_indexes();

drop function cancel_jobs(uuid[]);
drop function add_summary(uuid, bigint, uuid, text, text, uuid[], text);
drop function claimed_messages(uuid);
drop function my_summaries(text, text, integer);
drop function my_messages(text, text, bigint, integer);
drop function claim_messages(bigint, text, uuid, bigint);
drop function post_message(bigint, text, text, text, integer, bytea, bytea);
drop function thread_lock(text, bigint, text, text);
drop function resubmit_jobs(uuid[]);
drop function list_jobs(text, text, integer);
drop function release_claim(bytea, uuid);
drop function renew_claim(bytea, uuid, interval);
drop function claim_source(bigint, text, text, uuid, interval);
drop function holds_job(uuid, uuid);
drop function settle_job(uuid, uuid, jsonb);
drop function cancel_my_job(uuid);
drop function my_job(uuid);
drop function my_waiting_job(text, text);
drop function my_request(bytea, interval);
drop function record_request(text, text, text, jsonb, bytea, bytea);
drop function enqueue_job(text, text, text, text, jsonb, text, integer, bytea, bytea);
drop function queue_depth(interval, text);
drop function expire_jobs(interval, interval);
drop function recover_jobs(interval, integer);
drop function return_job(uuid, uuid, text, text, interval, boolean, text);
drop function take_job(uuid, bigint, text);
drop function drop_queued(bigint[]);
drop function push_job(text, uuid, text, text, integer);
drop function recount_usage(text);
drop function usage_drift();
drop function my_limits();
drop function charge_quota(bigint, bigint);
drop function take_token_as(text, bigint, text, text[], text, text);
drop function take_token(text);
drop function refilled_tokens(double precision, timestamptz, integer, integer, timestamptz);
drop function limits_of(text);

drop function embeds_with(text, text);
drop function explain_access(uuid, text, bigint, text, text[]);
drop function expire_batch(text, interval, integer);
drop function count_expired(text, interval);
drop function expired_messages(interval, bigint);
drop function expired_assertions(interval, bigint);
drop function expired_questions(interval, bigint);
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
drop function my_synchronisations();
drop function note_synchronisation(bigint, text, text, integer, integer, integer, integer, integer);
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
drop function my_origin(text);
drop function my_documents();
drop function erasure_digest(text, text, text[]);
drop function provenance_digest(text);
drop function source_digest(text, text);

-- The queue, with the triggers on its tables.
drop table jobs.procrastinate_events;
drop table jobs.procrastinate_periodic_defers;
drop function jobs.procrastinate_fetch_job_v2;
drop table jobs.procrastinate_jobs;
drop table jobs.procrastinate_workers;
drop function jobs.procrastinate_defer_jobs_v1;
drop function jobs.procrastinate_defer_periodic_job_v2;
drop function jobs.procrastinate_finish_job_v1;
drop function jobs.procrastinate_cancel_job_v1;
drop function jobs.procrastinate_retry_job_v1;
drop function jobs.procrastinate_retry_job_v2;
drop function jobs.procrastinate_notify_queue_job_inserted_v1;
drop function jobs.procrastinate_notify_queue_abort_job_v1;
drop function jobs.procrastinate_trigger_function_status_events_insert_v1;
drop function jobs.procrastinate_trigger_function_status_events_update_v1;
drop function jobs.procrastinate_trigger_function_scheduled_events_v1;
drop function jobs.procrastinate_trigger_abort_requested_events_procedure_v1;
drop function jobs.procrastinate_unlink_periodic_defers_v1;
drop function jobs.procrastinate_register_worker_v1;
drop function jobs.procrastinate_unregister_worker_v1;
drop function jobs.procrastinate_update_heartbeat_v1;
drop function jobs.procrastinate_prune_stalled_workers_v1;
drop type jobs.procrastinate_job_to_defer_v1;
drop type jobs.procrastinate_job_event_type;
drop type jobs.procrastinate_job_status;

-- With the tables go their policies, and with these the last uses of the functions of identity.
drop table rag_conversation_summaries;
drop table rag_conversation_messages;
drop table rag_claims;
drop table rag_jobs;
drop table rag_usage;
drop table rag_rate_buckets;
drop table rag_limits;
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
drop table rag_synchronisations;
drop table rag_tombstones;
drop table rag_class_lexemes;
drop table rag_class_languages;
drop table rag_class_indexes;
drop table rag_chunks;
drop table rag_documents;
drop table rag_models;
-- After what a search reads before it, so that neither waits for the other.
drop table rag_calibrations;
drop table rag_project_members;
drop table rag_access_classes;

drop function proof_holds(text, text);
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
