-- Who may do what. Everything not granted here is refused; docs/access.md has it as a table.

-- The owner of the functions on the query path.
grant select on rag_access_classes to rag_search;
grant insert (tenant_id, scope, user_id, project_id, tags, tags_digest) on rag_access_classes to rag_search;
grant select on rag_project_members to rag_search;
grant select (tenant_id, id, access_id, document_id, tsv, lexeme_count, language) on rag_chunks to rag_search;
grant select (
    tenant_id, access_id, id, scope, user_id, tags, source_type, language, doc_type, verified, created_at, updated_at,
    content_updated_at, source_updated_at
) on rag_documents to rag_search;
grant select (tenant_id, user_id, access_id, document_id, rating, clicked) on rag_feedback to rag_search;
grant select on rag_signing_keys to rag_search;
grant select on rag_limits to rag_search;
grant select, insert on rag_rate_buckets, rag_usage to rag_search;
grant update (tokens, refilled_at) on rag_rate_buckets to rag_search;
grant update (documents, bytes) on rag_usage to rag_search;
grant select on rag_analysts to rag_search;
grant select on rag_service_keys to rag_search;
grant select, insert, delete on rag_class_indexes, rag_class_languages, rag_class_lexemes to rag_search;
grant update (ready, chunks, measured_at, vector_bytes_per_chunk, words_bytes_per_chunk) on rag_class_indexes
to rag_search;

-- The owner of the functions that read for the principal.
grant select on rag_documents, rag_chunks, rag_query_logs, rag_query_log_chunks to rag_principal;
grant select, insert on rag_tombstones to rag_principal;
grant update (generation, reason, updated_at, retracted, cascade_id, removed_id) on rag_tombstones to rag_principal;
grant select, insert on rag_synchronisations to rag_principal;
grant update (version, files, written, removed, unchanged, failed, finished_at, succeeded_at) on rag_synchronisations
to rag_principal;
grant select (tenant_id, subject_digest) on rag_erasures to rag_principal;
grant select on rag_calibrations, rag_tags, rag_prompts to rag_principal;
grant select, insert on rag_feedback to rag_principal;
grant update (rating, clicked, updated_at) on rag_feedback to rag_principal;
grant select, insert, delete on rag_project_members to rag_principal;
grant update (may_write) on rag_project_members to rag_principal;

grant select, insert on rag_jobs to rag_principal;
grant update (
    status, reason, detail, claim, payload, body, result, request_key, due_at, finished_at
) on rag_jobs to rag_principal;
grant select, insert, delete on rag_claims to rag_principal;
grant update (token, expires_at) on rag_claims to rag_principal;
grant select on rag_conversation_messages, rag_conversation_summaries to rag_principal;
-- Its id and time, and whether it is summarised, are not a caller's to say.
grant insert (
    tenant_id, access_id, user_id, project_id, thread_id, number, role, content, tokens, request_key, request_digest,
    created_at
) on rag_conversation_messages to rag_principal;
grant update (summary_id, summarised_at) on rag_conversation_messages to rag_principal;
grant insert (
    tenant_id, id, access_id, document_id, user_id, project_id, thread_id, summary_text, message_ids, model
) on rag_conversation_summaries to rag_principal;

-- The owner of the workers' functions, and of the queue's: nothing of documents.
grant select, delete on rag_jobs to rag_queue;
grant update (
    status, reason, detail, attempts, losses, queue_id, turn, claim, payload, body, request_key, started_at, due_at,
    finished_at
) on rag_jobs to rag_queue;
grant select (tenant_id, source_digest, expires_at), delete on rag_claims to rag_queue;
grant select, insert, update, delete on
    jobs.procrastinate_jobs, jobs.procrastinate_workers, jobs.procrastinate_events, jobs.procrastinate_periodic_defers
to rag_queue;
grant usage on all sequences in schema jobs to rag_queue;

-- The owner of the operators' functions: keys of rows, never a text.
grant select (tenant_id, access_id, scope, user_id, project_id, tags), delete on rag_access_classes to rag_steward;
grant select (tenant_id, owner_user_id, project_id, member_user_id), delete on rag_project_members to rag_steward;
grant select (tenant_id, access_id, id, user_id, project_id, source_type, source_id, body_bytes), delete
on rag_documents to rag_steward;
grant select (tenant_id, access_id, document_id, embedding_model) on rag_chunks to rag_steward;
grant select (tenant_id, access_id), delete on rag_tombstones to rag_steward;
grant select (tenant_id, access_id), delete on rag_synchronisations to rag_steward;
grant select (tenant_id), insert, delete on rag_erasures to rag_steward;
grant select (tenant_id, id, user_id, project_id, created_at), delete on rag_query_logs to rag_steward;
grant select (tenant_id, user_id, query_id, document_id), delete on rag_query_log_chunks to rag_steward;
grant select (tenant_id, user_id, query_id, document_id), delete on rag_feedback to rag_steward;
grant select (tenant_id, owner_user_id), delete on rag_tags to rag_steward;
grant select (tenant_id), delete on rag_prompts to rag_steward;
grant select (key_id, created_at), insert, delete on rag_signing_keys to rag_steward;
grant select (tenant_id), delete on rag_analysts to rag_steward;
grant select (tenant_id), delete on rag_service_keys to rag_steward;
grant select (tenant_id), delete on rag_calibrations to rag_steward;
grant select (tenant_id, id, user_id, project_id, created_at), delete on rag_assertions to rag_steward;
grant select (tenant_id, user_id, project_id), delete on rag_retractions to rag_steward;
grant select (tenant_id, user_id, project_id, source_type, source_id, queue_id), delete on rag_jobs to rag_steward;
grant select (tenant_id), delete on rag_claims to rag_steward;
grant select (tenant_id, access_id, id, user_id, project_id, created_at), delete on rag_conversation_messages
to rag_steward;
grant select (tenant_id, access_id, document_id, user_id, project_id) on rag_conversation_summaries to rag_steward;
grant select (tenant_id), delete on rag_limits, rag_rate_buckets to rag_steward;
grant select, insert, delete on rag_usage to rag_steward;
grant update (documents, bytes) on rag_usage to rag_steward;

-- The owner of the functions that fill a second model. Texts, and nothing that says whose they are.
grant select (tenant_id, access_id) on rag_access_classes to rag_embedder;
grant select (tenant_id, access_id, id, title) on rag_documents to rag_embedder;
grant select (tenant_id, access_id, id, document_id, section, chunk_text, chunk_hash) on rag_chunks to rag_embedder;
grant select (access_id, chunks, ready), update (vector_bytes_per_chunk) on rag_class_indexes to rag_embedder;
grant select, insert, update, delete on rag_models to rag_embedder;
grant select (place, model_id, is_former, writes_paused_until, changed_at) on rag_models to rag_principal;
select grant_model_columns();

-- The service. Of what it may delete and count it reads the keys; all else through functions.
grant select (tenant_id, access_id, id, body_bytes), insert, delete on rag_documents to rag_app, rag_publisher;
grant update (
    source_uri, source_hash, source_updated_at, language, title, body, domain, doc_type,
    provenance_id, task_id, verified, metadata, updated_at, content_updated_at
) on rag_documents to rag_app, rag_publisher;
grant select (tenant_id, access_id, id, document_id, chunk_index), insert, delete on rag_chunks
to rag_app, rag_publisher;
-- A worker writes documents as the service does, and asks nothing of them.
grant select (tenant_id, access_id, id, body_bytes), insert, delete on rag_documents to rag_worker;
grant update (
    source_uri, source_hash, source_updated_at, language, title, body, domain, doc_type,
    provenance_id, task_id, verified, metadata, updated_at, content_updated_at
) on rag_documents to rag_worker;
grant select (tenant_id, access_id, id, document_id, chunk_index), insert, delete on rag_chunks to rag_worker;
grant insert on rag_query_logs, rag_query_log_chunks to rag_app, rag_publisher;
-- Its id and time are the database's to say.
grant insert (tenant_id, key_id, user_id, project_id, tags, action) on rag_assertions to rag_app, rag_publisher;
grant insert (tenant_id, user_id, project_id, action, reason, cascade_id, sources, documents, chunks)
on rag_retractions to rag_app, rag_publisher;

-- People who operate it.
grant select, insert, delete on rag_project_members to rag_operator;
grant update (may_write) on rag_project_members to rag_operator;
grant select, insert, delete on rag_analysts to rag_operator;
grant update (tags, projects, user_scope) on rag_analysts to rag_operator;
grant select, insert on rag_service_keys to rag_operator;
grant update (revoked_at) on rag_service_keys to rag_operator;
grant select, insert, delete on rag_calibrations to rag_operator;
grant update (vector_share, min_similarity, questions, ndcg_before, ndcg_after, calibrated_at) on rag_calibrations
to rag_operator;
grant select, insert, delete on rag_tags, rag_prompts to rag_operator;
grant update (owner_user_id, owner_email, updated_at) on rag_tags to rag_operator;
grant update (prompt, replaces, generation, updated_at) on rag_prompts to rag_operator;
grant select, insert, delete on rag_limits to rag_operator;
grant update (
    queries_per_minute, query_burst, ingests_per_minute, ingest_burst, documents, bytes, updated_at
) on rag_limits to rag_operator;
grant select on rag_usage to rag_operator;
grant select on rag_assertions, rag_retractions, rag_erasures to rag_operator;

-- Views, for the service and for analysts.
grant select on v_documents, v_chunks, v_query_latency, v_empty_results, v_stale_documents, v_source_usage,
v_routed_queries, v_feedback
to rag_app, rag_publisher, rag_analyst;

-- Functions, by who may call them. Definer functions go to their owners, which may create nothing
-- once they are there.
grant create on schema rag to rag_search, rag_principal, rag_steward, rag_embedder, rag_queue;
grant create on schema jobs to rag_queue;
do $$
declare
    allowed record;
    own boolean;
    service constant text[] := array['rag_app', 'rag_publisher'];
    people constant text[] := service || array['rag_analyst'];
    writers constant text[] := service || array['rag_worker'];
begin
    for allowed in
        select *
        from (values
            -- identity
            ('begin_as(text, bigint, text, text[], text)', writers, null),
            ('signature_holds(text[], text)', array['rag_search'], null),
            ('classes_of(record)', array['rag_search'], null),
            ('my_principal()', people || array['rag_worker'] || array['rag_principal', 'rag_search'], 'rag_search'),
            ('my_tenant_id()', people || array['rag_worker'] || array['rag_principal', 'rag_search'], null),
            ('my_user_id()', people || array['rag_worker', 'rag_principal'], null),
            ('my_tags()', array['rag_principal'], null),
            ('i_am_analyst()', array['rag_principal'], null),
            ('my_access_ids()', people || array['rag_worker'] || array['rag_principal'], 'rag_search'),
            ('my_writable_access_ids()', writers || array['rag_principal'], 'rag_search'),
            ('narrowed_access_ids(text)', array['rag_principal'], 'rag_search'),
            ('access_class(text, bigint, text, text[])', writers, 'rag_search'),
            ('class_reads(bigint, text, bigint, text, text[])', writers, 'rag_search'),
            ('my_classes()', people || array['rag_worker', 'rag_principal'], 'rag_search'),
            ('whoami()', people, null),
            ('load_service_keys(text)', service, 'rag_search'),
            ('tenant_lock(text)', writers || array['rag_search', 'rag_principal', 'rag_steward'], null),
            ('proof_holds(text, text)', array['rag_queue'], 'rag_search'),
            -- jobs
            ('push_job(text, uuid, text, text, integer)', array['rag_principal', 'rag_queue'], 'rag_queue'),
            ('drop_queued(bigint[])', array['rag_principal', 'rag_queue', 'rag_steward'], 'rag_queue'),
            ('take_job(uuid, bigint, text)', array['rag_worker'], 'rag_queue'),
            ('return_job(uuid, uuid, text, text, interval, boolean, text)', array['rag_worker'], 'rag_queue'),
            ('recover_jobs(interval, integer)', array['rag_worker'], 'rag_queue'),
            ('expire_jobs(interval, interval)', array['rag_worker', 'rag_operator'], 'rag_queue'),
            ('queue_depth(interval, text)', writers, 'rag_queue'),
            ('enqueue_job(text, text, text, text, jsonb, text, integer, bytea, bytea)', service, 'rag_principal'),
            ('record_request(text, text, text, jsonb, bytea, bytea)', service, 'rag_principal'),
            ('my_request(bytea, interval)', service, 'rag_principal'),
            ('my_job(uuid)', service, 'rag_principal'),
            ('my_waiting_job(text, text)', service, 'rag_principal'),
            ('cancel_my_job(uuid)', service, 'rag_principal'),
            ('settle_job(uuid, uuid, jsonb)', array['rag_worker', 'rag_publisher'], 'rag_principal'),
            ('holds_job(uuid, uuid)', array['rag_worker', 'rag_publisher'], 'rag_principal'),
            ('claim_source(bigint, text, text, uuid, interval)', writers, 'rag_principal'),
            (
                'claim_source_as(text, bigint, text, text[], text, text, bigint, text, text[], text, text, text, text, uuid, '
                || 'interval)',
                writers, null
            ),
            ('renew_claim(bytea, uuid, interval)', writers, 'rag_principal'),
            ('release_claim(bytea, uuid)', writers, 'rag_principal'),
            ('list_jobs(text, text, integer)', array['rag_operator'], 'rag_queue'),
            ('resubmit_jobs(uuid[])', array['rag_operator'], 'rag_queue'),
            ('cancel_jobs(uuid[])', array['rag_operator'], 'rag_queue'),
            -- conversations
            ('thread_lock(text, bigint, text, text)', array['rag_principal'], null),
            (
                'post_message(bigint, text, text, text, integer, bytea, bytea)', service, 'rag_principal'
            ),
            ('claim_messages(bigint, text, uuid, bigint)', service, 'rag_principal'),
            ('my_messages(text, text, bigint, integer)', service, 'rag_principal'),
            ('my_summaries(text, text, integer)', service, 'rag_principal'),
            ('claimed_messages(uuid)', array['rag_worker'], 'rag_principal'),
            ('add_summary(uuid, bigint, uuid, text, text, uuid[], text)', array['rag_worker'], 'rag_principal'),
            -- reading
            ('source_digest(text, text)', array['rag_principal'], null),
            ('provenance_digest(text)', array['rag_principal'], null),
            ('erasure_digest(text, text, text[])', array['rag_principal', 'rag_steward'], null),
            ('my_documents()', people, 'rag_principal'),
            ('my_origin(text)', writers, 'rag_principal'),
            ('my_listed_documents()', people, 'rag_search'),
            ('my_chunks()', people, 'rag_principal'),
            ('my_document(uuid)', people || array['rag_worker'], 'rag_principal'),
            ('my_document_chunks(uuid)', writers, 'rag_principal'),
            ('my_documents_among(uuid[])', service, 'rag_principal'),
            ('my_sources_among(text[])', service, 'rag_principal'),
            ('find_source(bigint, text, bigint, text, text, text)', writers, 'rag_principal'),
            ('look_at_source(bigint, text, bigint, text, text, text, text)', writers, 'rag_principal'),
            ('retraction_of(text, bigint, text, text, text)', writers, 'rag_principal'),
            ('bury_source(bigint, text, text, text)', writers, 'rag_principal'),
            ('derived_documents(uuid[], text[], text[], boolean)', service, 'rag_principal'),
            ('open_source(text, text, text, text, bigint, text, text[], text, text, text, text)', writers, null),
            ('close_sources(bigint[], text[], text[], uuid[], text)', service, 'rag_principal'),
            ('reopen_sources(text[], text[], uuid[], text[], text[])', service, 'rag_principal'),
            ('search_mode(text, text, uuid[])', people, 'rag_principal'),
            ('my_min_similarity(text)', service, 'rag_principal'),
            ('my_queries()', people, 'rag_principal'),
            ('my_query_chunks()', people, 'rag_principal'),
            ('my_feedback()', people, 'rag_principal'),
            ('give_feedback(uuid, uuid, integer, integer, boolean)', service, 'rag_principal'),
            ('my_tag_owner(text)', service, 'rag_principal'),
            ('my_prompt()', service, 'rag_principal'),
            ('my_synchronisations()', service, 'rag_principal'),
            (
                'note_synchronisation(bigint, text, text, integer, integer, integer, integer, integer)',
                writers, 'rag_principal'
            ),
            ('my_members()', service, 'rag_principal'),
            ('share_project(text, bigint, boolean)', service, 'rag_principal'),
            ('unshare_project(text, bigint)', service, 'rag_principal'),
            -- retrieval
            ('text_search_config(text)', people || array['rag_worker'] || array['rag_search', 'rag_principal'], null),
            ('unspaced_letters()', writers || array['rag_search', 'rag_principal'], null),
            ('unspaced_unit()', writers || array['rag_search', 'rag_principal'], null),
            ('unspaced_vector(text, boolean)', writers || array['rag_search', 'rag_principal'], null),
            ('prepared_vector(regconfig, text, boolean)', writers || array['rag_search', 'rag_principal'], null),
            ('text_vector(text, text, boolean)', writers || array['rag_search', 'rag_principal'], null),
            ('search_vector(text, text)', writers, null),
            ('lexeme_total(tsvector)', writers, null),
            ('lexeme_query(text)', array['rag_search', 'rag_principal'], null),
            ('question_lexemes(text, text)', array['rag_search', 'rag_principal'], null),
            ('class_contents(text)', array['rag_principal', 'rag_search'], 'rag_search'),
            ('indexed_among(bigint[])', array['rag_principal', 'rag_search'], 'rag_search'),
            ('candidate_query(text[], bigint[], bigint, bigint)', array['rag_search'], null),
            ('keyword_candidates(text, text, uuid[], integer, bigint[], uuid[], text[], halfvec, text)', array['rag_principal'], 'rag_search'),
            ('nearest_indexed(bigint, halfvec, text, uuid[], integer, integer)', array['rag_principal'], null),
            ('feedback_support(uuid[])', array['rag_principal'], 'rag_search'),
            ('vector_share(text, text, text)', array['rag_principal', 'rag_operator'], null),
            (
                'fuse_candidates(bigint[], uuid[], bigint[], uuid[], double precision[], double precision[], boolean[], '
                || 'halfvec, text, text, text, text, integer, double precision, integer, integer, double precision, '
                || 'integer, boolean, double precision)',
                array['rag_principal'], null
            ),
            (
                'search(text, halfvec, text, integer, text, uuid[], double precision, integer, integer, '
                || 'double precision, integer, boolean, text, text, boolean, text[], text[], text[], text[], text[], '
                || 'timestamptz, timestamptz, jsonb, double precision)',
                people, 'rag_principal'
            ),
            (
                'explain(text, uuid, halfvec, text, integer, integer, text, double precision, integer, integer, '
                || 'double precision, integer, text, text, double precision)',
                people, 'rag_principal'
            ),
            -- maintaining
            ('class_indexes()', array['rag_operator', 'rag_search', 'rag_embedder'], null),
            ('class_sizes(bigint)', array['rag_operator'], 'rag_search'),
            ('measure_class(text, bigint, integer)', array['rag_operator'], 'rag_search'),
            ('set_class_ready(text, bigint, boolean)', array['rag_operator'], 'rag_search'),
            ('demote_class(text, bigint)', array['rag_operator'], 'rag_search'),
            -- changing the model; the owner alone may fill
            ('active_model()', writers || array['rag_operator'], 'rag_principal'),
            ('check_model(text)', writers, 'rag_principal'),
            ('compare_models(halfvec, halfvec, integer)', service, 'rag_principal'),
            ('chunks_to_fill(text, bigint, integer)', array['rag_owner'], 'rag_embedder'),
            ('fill_vectors(text, text[], bigint[], uuid[], text[])', array['rag_owner'], 'rag_embedder'),
            ('count_fill()', array['rag_owner'], 'rag_embedder'),
            ('lacks_vectors()', array['rag_owner'], 'rag_embedder'),
            ('large_classes()', array['rag_owner'], 'rag_embedder'),
            ('set_models(text, text, boolean)', array['rag_owner'], 'rag_embedder'),
            ('pause_writes(integer)', array['rag_owner'], 'rag_embedder'),
            ('list_models()', array['rag_owner', 'rag_operator'], 'rag_embedder'),
            -- operating
            ('add_signing_key()', array['rag_operator'], 'rag_steward'),
            ('list_signing_keys()', array['rag_operator'], 'rag_steward'),
            ('retire_signing_key(text)', array['rag_operator'], 'rag_steward'),
            ('erasure_kind(text, bigint, text, text, text)', array['rag_steward'], null),
            ('forget(text, bigint, text, text, text)', array['rag_operator'], 'rag_steward'),
            ('count_traces(text, bigint, text, text, text)', array['rag_operator'], 'rag_steward'),
            ('expire_logs(interval, text)', array['rag_operator'], 'rag_steward'),
            ('expired_questions(interval, bigint)', array['rag_steward'], null),
            ('expired_assertions(interval, bigint)', array['rag_steward'], null),
            ('expired_messages(interval, bigint)', array['rag_steward'], null),
            ('count_expired(text, interval)', array['rag_operator'], 'rag_steward'),
            ('expire_batch(text, interval, integer)', array['rag_operator'], 'rag_steward'),
            ('explain_access(uuid, text, bigint, text, text[])', array['rag_operator'], 'rag_steward'),
            ('embeds_with(text, text)', array['rag_operator'], 'rag_steward'),
            -- limits
            ('limits_of(text)', array['rag_search'], null),
            (
                'refilled_tokens(double precision, timestamptz, integer, integer, timestamptz)',
                array['rag_search'], null
            ),
            ('take_token(text)', service, 'rag_search'),
            ('take_token_as(text, bigint, text, text[], text, text)', service, null),
            ('charge_quota(bigint, bigint)', writers, 'rag_search'),
            ('my_limits()', writers, 'rag_search'),
            ('usage_drift()', array['rag_operator'], 'rag_steward'),
            ('recount_usage(text)', array['rag_operator'], 'rag_steward')
        ) as listed (signature, callers, owner)
    loop
        execute format(
            'grant execute on function %s to %s',
            cast(allowed.signature as regprocedure),
            array_to_string(allowed.callers, ', ')
        );
        -- To the owner of the tables only by the function's own, whom its right would go to with the function.
        own := 'rag_owner' = any(allowed.callers);
        if allowed.owner is not null then
            execute format(
                'alter function %s owner to %I', cast(allowed.signature as regprocedure), allowed.owner
            );
        end if;
        if own then
            execute format('set local role %I', allowed.owner);
            execute format(
                'grant execute on function %s to rag_owner', cast(allowed.signature as regprocedure)
            );
            set local role rag_owner;
        end if;
    end loop;
end
$$;
revoke create on schema rag from rag_search, rag_principal, rag_steward, rag_embedder, rag_queue;

-- What a worker calls of the queue by itself; all else only the functions above do.
do $$
declare
    found record;
begin
    for found in
        select cast(process.oid as regprocedure) as signature, process.proname
        from pg_proc as process
        where process.pronamespace = to_regnamespace('jobs')
    loop
        if found.proname in (
            'procrastinate_fetch_job_v2', 'procrastinate_finish_job_v1', 'procrastinate_retry_job_v2',
            'procrastinate_register_worker_v1', 'procrastinate_unregister_worker_v1',
            'procrastinate_update_heartbeat_v1', 'procrastinate_prune_stalled_workers_v1'
        ) then
            execute format('grant execute on function %s to rag_worker', found.signature);
        end if;
        execute format('alter function %s owner to rag_queue', found.signature);
    end loop;
end
$$;
revoke create on schema jobs from rag_queue;
