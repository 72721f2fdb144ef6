-- Who may do what. Everything not granted here is refused; docs/access.md has it as a table.

-- The owner of the functions on the query path.
grant select on rag_access_classes to rag_search;
grant insert (tenant_id, scope, user_id, project_id, tags, tags_digest) on rag_access_classes to rag_search;
grant select on rag_project_members to rag_search;
grant select (tenant_id, id, access_id, document_id, tsv, lexeme_count, language, embedding, embedding_model)
on rag_chunks to rag_search;
grant select (
    tenant_id, access_id, id, scope, user_id, tags, source_type, language, doc_type, verified, created_at, updated_at,
    content_updated_at, source_updated_at
) on rag_documents to rag_search;
grant select (tenant_id, user_id, access_id, document_id, rating, clicked) on rag_feedback to rag_search;
grant select on rag_signing_keys to rag_search;
grant select on rag_analysts to rag_search;
grant select on rag_service_keys to rag_search;
grant select, insert, delete on rag_class_indexes, rag_class_languages, rag_class_lexemes to rag_search;
grant update (ready, chunks, measured_at, vector_bytes_per_chunk, words_bytes_per_chunk) on rag_class_indexes
to rag_search;

-- The owner of the functions that read for the principal.
grant select on rag_documents, rag_chunks, rag_query_logs, rag_query_log_chunks to rag_principal;
grant select, insert on rag_tombstones to rag_principal;
grant update (generation, reason, updated_at, retracted, cascade_id, removed_id) on rag_tombstones to rag_principal;
grant select (tenant_id, subject_digest) on rag_erasures to rag_principal;
grant select on rag_calibrations, rag_tags, rag_prompts to rag_principal;
grant select, insert on rag_feedback to rag_principal;
grant update (rating, clicked, updated_at) on rag_feedback to rag_principal;
grant select, insert, delete on rag_project_members to rag_principal;
grant update (may_write) on rag_project_members to rag_principal;

-- The owner of the operators' functions: keys of rows, never a text.
grant select (tenant_id, access_id, scope, user_id, project_id, tags), delete on rag_access_classes to rag_steward;
grant select (tenant_id, owner_user_id, project_id, member_user_id), delete on rag_project_members to rag_steward;
grant select (tenant_id, access_id, id, user_id, project_id, source_type, source_id), delete on rag_documents
to rag_steward;
grant select (tenant_id, access_id, document_id, embedding_model) on rag_chunks to rag_steward;
grant select (tenant_id, access_id), delete on rag_tombstones to rag_steward;
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
grant select (tenant_id, user_id, project_id, created_at), delete on rag_assertions to rag_steward;
grant select (tenant_id, user_id, project_id), delete on rag_retractions to rag_steward;

-- The service. Of what it may delete and count it reads the keys; all else through functions.
grant select (tenant_id, access_id, id), insert, delete on rag_documents to rag_app, rag_publisher;
grant update (
    source_uri, source_hash, source_updated_at, language, title, body, domain, doc_type,
    provenance_id, task_id, verified, metadata, updated_at, content_updated_at
) on rag_documents to rag_app, rag_publisher;
grant select (tenant_id, access_id, id, document_id, chunk_index), insert, delete on rag_chunks
to rag_app, rag_publisher;
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
grant select on rag_assertions, rag_retractions, rag_erasures to rag_operator;

-- Views, for the service and for analysts.
grant select on v_documents, v_chunks, v_query_latency, v_empty_results, v_stale_documents, v_source_usage,
v_routed_queries, v_feedback
to rag_app, rag_publisher, rag_analyst;

-- Functions, by who may call them. Definer functions go to their owners, which may create nothing
-- once they are there.
grant create on schema rag to rag_search, rag_principal, rag_steward;
do $$
declare
    allowed record;
    service constant text[] := array['rag_app', 'rag_publisher'];
    people constant text[] := service || array['rag_analyst'];
begin
    for allowed in
        select *
        from (values
            -- identity
            ('begin_as(text, bigint, text, text[], text)', service, null),
            ('signature_holds(text[], text)', array['rag_search'], null),
            ('my_principal()', people || array['rag_principal', 'rag_search'], 'rag_search'),
            ('my_tenant_id()', people || array['rag_principal', 'rag_search'], null),
            ('my_user_id()', people || array['rag_principal'], null),
            ('my_tags()', array['rag_principal'], null),
            ('i_am_analyst()', array['rag_principal'], null),
            ('my_access_ids()', people || array['rag_principal'], 'rag_search'),
            ('my_writable_access_ids()', service || array['rag_principal'], 'rag_search'),
            ('narrowed_access_ids(text)', array['rag_principal'], 'rag_search'),
            ('access_class(text, bigint, text, text[])', service, 'rag_search'),
            ('class_reads(bigint, text, bigint, text, text[])', service, 'rag_search'),
            ('my_classes()', people || array['rag_principal'], 'rag_search'),
            ('whoami()', people, null),
            ('load_service_keys(text)', service, 'rag_search'),
            ('tenant_lock(text)', service || array['rag_search', 'rag_principal', 'rag_steward'], null),
            -- reading
            ('source_digest(text, text)', array['rag_principal'], null),
            ('provenance_digest(text)', array['rag_principal'], null),
            ('erasure_digest(text, text, text[])', array['rag_principal', 'rag_steward'], null),
            ('my_documents()', people, 'rag_principal'),
            ('my_listed_documents()', people, 'rag_search'),
            ('my_chunks()', people, 'rag_principal'),
            ('my_document(uuid)', people, 'rag_principal'),
            ('my_document_chunks(uuid)', service, 'rag_principal'),
            ('my_documents_among(uuid[])', service, 'rag_principal'),
            ('my_sources_among(text[])', service, 'rag_principal'),
            ('find_source(bigint, text, bigint, text, text, text)', service, 'rag_principal'),
            ('bury_source(bigint, text, text, text)', service, 'rag_principal'),
            ('derived_documents(uuid[], text[], text[], boolean)', service, 'rag_principal'),
            ('retraction_of(text, bigint, text, text, text)', service, 'rag_principal'),
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
            ('my_members()', service, 'rag_principal'),
            ('share_project(text, bigint, boolean)', service, 'rag_principal'),
            ('unshare_project(text, bigint)', service, 'rag_principal'),
            -- retrieval
            ('text_search_config(text)', people || array['rag_search', 'rag_principal'], null),
            ('unspaced_letters()', service || array['rag_search', 'rag_principal'], null),
            ('unspaced_unit()', service || array['rag_search', 'rag_principal'], null),
            ('unspaced_vector(text, boolean)', service || array['rag_search', 'rag_principal'], null),
            ('prepared_vector(regconfig, text, boolean)', service || array['rag_search', 'rag_principal'], null),
            ('text_vector(text, text, boolean)', service || array['rag_search', 'rag_principal'], null),
            ('search_vector(text, text)', service, null),
            ('lexeme_total(tsvector)', service, null),
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
            ('class_indexes()', array['rag_operator', 'rag_search'], null),
            ('class_sizes(bigint)', array['rag_operator'], 'rag_search'),
            ('measure_class(text, bigint, integer)', array['rag_operator'], 'rag_search'),
            ('set_class_ready(text, bigint, boolean)', array['rag_operator'], 'rag_search'),
            ('demote_class(text, bigint)', array['rag_operator'], 'rag_search'),
            -- operating
            ('add_signing_key()', array['rag_operator'], 'rag_steward'),
            ('list_signing_keys()', array['rag_operator'], 'rag_steward'),
            ('retire_signing_key(text)', array['rag_operator'], 'rag_steward'),
            ('erasure_kind(text, bigint, text, text, text)', array['rag_steward'], null),
            ('forget(text, bigint, text, text, text)', array['rag_operator'], 'rag_steward'),
            ('count_traces(text, bigint, text, text, text)', array['rag_operator'], 'rag_steward'),
            ('expire_logs(interval, text)', array['rag_operator'], 'rag_steward'),
            ('explain_access(uuid, text, bigint, text, text[])', array['rag_operator'], 'rag_steward'),
            ('embeds_with(text, text)', array['rag_operator'], 'rag_steward')
        ) as listed (signature, callers, owner)
    loop
        execute format(
            'grant execute on function %s to %s',
            cast(allowed.signature as regprocedure),
            array_to_string(allowed.callers, ', ')
        );
        if allowed.owner is not null then
            execute format(
                'alter function %s owner to %I', cast(allowed.signature as regprocedure), allowed.owner
            );
        end if;
    end loop;
end
$$;
revoke create on schema rag from rag_search, rag_principal, rag_steward;
