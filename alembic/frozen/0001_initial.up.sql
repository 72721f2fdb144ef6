-- Tables. `tenant_id` is part of every primary, unique and foreign key, and is never updated, so
-- that the schema can be distributed by tenant. `access_id` is the only column that decides access.

create table rag_access_classes (
    tenant_id text not null,
    -- Random, so that it counts nothing and names nobody.
    access_id bigint not null default ('x' || substr(md5(gen_random_uuid()::text), 1, 15))::bit(60)::bigint,
    scope text not null,
    user_id bigint,
    project_id text,
    tags text[] not null,
    tags_digest bytea not null,
    created_at timestamptz not null default now(),
    constraint rag_access_classes_pkey primary key (tenant_id, access_id),
    constraint rag_access_classes_combination unique nulls not distinct (
        tenant_id, scope, user_id, project_id, tags_digest
    ),
    constraint rag_access_classes_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_access_classes_owner check (
        case scope
            when 'public' then user_id is null and project_id is null
            when 'user' then user_id > 0 and project_id is null
            when 'project' then user_id > 0 and length(project_id) between 1 and 128 and project_id <> '*'
            else false
        end is true
    ),
    -- 256 tags of 64 characters, of up to 4 bytes each.
    constraint rag_access_classes_tags check (
        cardinality(tags) between 1 and 256
        and array_position(tags, null) is null
        and octet_length(array_to_string(tags, '')) <= 65536
    )
);

comment on table rag_access_classes is 'One row for each combination of tenant, scope, owner, project and tags that some document has; a document belongs to exactly one';
comment on column rag_access_classes.tenant_id is 'The tenant; nothing is ever shared between two';
comment on column rag_access_classes.access_id is 'Opaque number of the class; the only thing that policies, indexes and statistics look at';
comment on column rag_access_classes.scope is 'public: everyone of the tenant; user: its owner; project: its owner and the members of the project';
comment on column rag_access_classes.user_id is 'The owner of a user or project class; null for public';
comment on column rag_access_classes.project_id is 'The project, a name chosen by its owner; null unless scope is project';
comment on column rag_access_classes.tags is 'Sorted, distinct; the class is visible only to principals that hold one of them';
comment on column rag_access_classes.tags_digest is 'SHA-256 of tags as JSON: 256 tags do not fit into an index entry';
comment on column rag_access_classes.created_at is 'When the first document of this class was written';

create table rag_project_members (
    tenant_id text not null,
    owner_user_id bigint not null,
    project_id text not null,
    member_user_id bigint not null,
    may_write boolean not null default false,
    created_at timestamptz not null default now(),
    constraint rag_project_members_pkey primary key (tenant_id, member_user_id, owner_user_id, project_id),
    constraint rag_project_members_ids check (
        length(tenant_id) between 1 and 128
        and owner_user_id > 0
        and member_user_id > 0
        and owner_user_id <> member_user_id
        and length(project_id) between 1 and 128
        and project_id <> '*'
    )
);

comment on table rag_project_members is 'Projects shared by their owner with other users of the same tenant';
comment on column rag_project_members.tenant_id is 'The tenant of owner and member';
comment on column rag_project_members.owner_user_id is 'The user who owns the project';
comment on column rag_project_members.project_id is 'The owner''s name of the project';
comment on column rag_project_members.member_user_id is 'The user whom it is shared with';
comment on column rag_project_members.may_write is 'Whether the member may also write documents of the project';
comment on column rag_project_members.created_at is 'When it was shared';

create table rag_documents (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    access_id bigint not null,
    scope text not null,
    user_id bigint,
    project_id text,
    tags text[] not null,
    source_type text not null,
    source_id text not null,
    source_uri text,
    source_hash text not null,
    source_updated_at timestamptz,
    language text,
    title text not null,
    body text not null,
    -- Kept, so that what goes can be counted without reading it.
    body_bytes integer not null generated always as (octet_length(body)) stored,
    domain text,
    doc_type text,
    provenance_id text,
    task_id text,
    verified boolean not null default false,
    metadata jsonb not null default '{}',
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    content_updated_at timestamptz not null default now(),
    constraint rag_documents_pkey primary key (tenant_id, access_id, id),
    constraint rag_documents_source unique (tenant_id, access_id, source_id, source_type),
    constraint rag_documents_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete restrict,
    constraint rag_documents_source_lengths check (
        length(source_type) between 1 and 64 and octet_length(source_id) between 1 and 512
    ),
    constraint rag_documents_language check (language ~ '^[a-z]{2}$'),
    constraint rag_documents_metadata check (jsonb_typeof(metadata) = 'object')
);

-- Where a retraction looks for what was derived from something; most documents name nothing.
create index rag_documents_provenance on rag_documents (tenant_id, access_id, provenance_id)
where provenance_id is not null;

-- Classes differ in size by a factor of a million. Taken for one, the planner counts with the largest, and
-- looks a document up in the index where it would otherwise read all of a class that it believes to be small.
alter table rag_documents alter column access_id set (n_distinct = 1);

comment on table rag_documents is 'One row for each ingested source in each access class';
comment on column rag_documents.tenant_id is 'The tenant';
comment on column rag_documents.id is 'Random UUIDv4 made by the server, kept when the content or the tags change';
comment on column rag_documents.access_id is 'The access class; decides who may see the row; never updated';
comment on column rag_documents.scope is 'For people to read: scope of the class';
comment on column rag_documents.user_id is 'For people to read: owner of the class';
comment on column rag_documents.project_id is 'For people to read: project of the class';
comment on column rag_documents.tags is 'For people to read: tags of the class';
comment on column rag_documents.source_type is 'What kind of source: markdown, readme, project_spec, decision, incident, pdf, …';
comment on column rag_documents.source_id is 'The source''s own identifier, such as its path; one document for each within a class; at most 512 bytes';
comment on column rag_documents.source_uri is 'Where a person finds the source';
comment on column rag_documents.source_hash is 'SHA-256 of the content and of how it was read and cut; equal means nothing to do';
comment on column rag_documents.source_updated_at is 'When the source itself says it changed';
comment on column rag_documents.language is 'ISO 639-1 code; chooses the text-search configuration; null when unknown';
comment on column rag_documents.title is 'What a citation calls the document';
comment on column rag_documents.body is 'The whole text; offsets of chunks count its characters';
comment on column rag_documents.body_bytes is 'Size of the body in UTF-8; what a quota of bytes counts';
comment on column rag_documents.domain is 'Subject area given by the caller';
comment on column rag_documents.doc_type is 'Kind of document given by the caller';
comment on column rag_documents.provenance_id is 'What the document was derived from';
comment on column rag_documents.task_id is 'The task that produced the document';
comment on column rag_documents.verified is 'Whether somebody has approved the content';
comment on column rag_documents.metadata is 'Whatever else the caller wants back, a JSON object';
comment on column rag_documents.created_at is 'When the document was first ingested';
comment on column rag_documents.updated_at is 'When any column last changed';
comment on column rag_documents.content_updated_at is 'When the body last changed; a citation of an earlier version is stale';

create table rag_chunks (
    -- In the order in which an exact scan wants them: of fixed width, then what a row is compared by, then the rest.
    -- To reach a column, all before it are stepped over: with the text in front a scan took a sixth longer.
    id uuid not null default gen_random_uuid(),
    access_id bigint not null,
    document_id uuid not null,
    created_at timestamptz not null default now(),
    chunk_index integer not null,
    lexeme_count integer not null,
    token_count integer not null,
    start_offset integer not null,
    end_offset integer not null,
    page_number integer,
    tenant_id text not null,
    language text,
    embedding_model text not null,
    second_embedding_model text,
    tsv tsvector not null,
    embedding halfvec(:embedding_dimensions) not null,
    second_embedding halfvec(:embedding_dimensions),
    chunk_hash text not null,
    token_counter text not null,
    section text,
    chunk_text text not null,
    constraint rag_chunks_pkey primary key (tenant_id, access_id, id),
    constraint rag_chunks_place unique (tenant_id, access_id, document_id, chunk_index),
    constraint rag_chunks_document foreign key (tenant_id, access_id, document_id)
        references rag_documents (tenant_id, access_id, id) on delete cascade,
    constraint rag_chunks_index check (chunk_index >= 0),
    -- A tsvector holds 1 MiB and ignores words beyond 2 KiB; 32 KiB of text stay clear of both.
    constraint rag_chunks_text check (octet_length(chunk_text) between 1 and 32768),
    -- No tokenizer makes more tokens than bytes; sums of far larger numbers would overflow for every reader.
    constraint rag_chunks_tokens check (token_count between 0 and 32768),
    constraint rag_chunks_language check (language ~ '^[a-z]{2}$'),
    constraint rag_chunks_offsets check (start_offset >= 0 and end_offset > start_offset),
    constraint rag_chunks_lexemes check (lexeme_count >= 0),
    -- A zero vector has no direction: its cosine is NaN, and an index leaves it out without a word.
    constraint rag_chunks_embedding check (
        (embedding is null) = (embedding_model is null) and l2_norm(embedding) > 0
    ),
    -- As the one above word by word: when models change places, so do the names.
    constraint rag_chunks_second_embedding check (
        (second_embedding is null) = (second_embedding_model is null) and l2_norm(second_embedding) > 0
    )
);

-- Read row by row during an exact scan, so both stay in the row: the vector as it is, the tsvector
-- uncompressed as long as two rows fit on a page. The text is the first to move out.
alter table rag_chunks alter column embedding set storage plain;
alter table rag_chunks alter column second_embedding set storage plain;
alter table rag_chunks alter column tsv set storage main;
alter table rag_chunks set (toast_tuple_target = 4080);

-- As for documents: on 50,000 chunks, a search looked its candidates up in 250 ms by reading their classes.
alter table rag_chunks alter column access_id set (n_distinct = 1);

-- Where a search sees which models and languages a class has. Equal keys share their entry, so it is small.
create index rag_chunks_contents on rag_chunks (tenant_id, access_id, embedding_model, (coalesce(language, '')));
alter index rag_chunks_contents alter column 4 set statistics 0;

comment on table rag_chunks is 'The passages that are searched; SourceId of a chunk is document_id:chunk_index';
comment on column rag_chunks.tenant_id is 'The tenant';
comment on column rag_chunks.id is 'Random identifier of this version of the chunk';
comment on column rag_chunks.access_id is 'The access class, always that of the document; decides who may see the row; never updated';
comment on column rag_chunks.document_id is 'The document';
comment on column rag_chunks.chunk_index is 'Position within the document, from 0';
comment on column rag_chunks.chunk_text is 'The text, exactly body[start_offset, end_offset) of the document; at most 32 KiB';
comment on column rag_chunks.chunk_hash is 'SHA-256 of what was embedded; equal means that the embedding can be kept';
comment on column rag_chunks.token_count is 'Tokens of chunk_text, as token_counter counts them';
comment on column rag_chunks.token_counter is 'How token_count was made: a tokenizer''s name, or bytes/3 for the estimate';
comment on column rag_chunks.start_offset is 'First character in the body, from 0';
comment on column rag_chunks.end_offset is 'Character after the last one in the body';
comment on column rag_chunks.page_number is 'Page of the source, from 1; null when it has no pages';
comment on column rag_chunks.section is 'Path of headings, outermost first; null when there is none';
comment on column rag_chunks.embedding is 'Unit vector of title, section and text; models of fewer dimensions are padded with zeros';
comment on column rag_chunks.embedding_model is 'The model that made the embedding; vectors of different models are never compared';
comment on column rag_chunks.second_embedding is 'The same of a second model, while one is added or kept; null where it has not been filled; no search reads it';
comment on column rag_chunks.second_embedding_model is 'The model that made second_embedding, null where that is';
comment on column rag_chunks.tsv is 'Lexemes of title, section and text in the configuration of the language';
comment on column rag_chunks.lexeme_count is 'Occurrences of lexemes in tsv: the length that BM25 normalises by';
comment on column rag_chunks.language is 'Language of the document';
comment on column rag_chunks.created_at is 'When this version of the chunk was written';

create table rag_class_indexes (
    tenant_id text not null,
    access_id bigint not null,
    ready boolean not null default false,
    chunks bigint not null,
    measured_at timestamptz not null default now(),
    vector_bytes_per_chunk double precision,
    words_bytes_per_chunk double precision,
    constraint rag_class_indexes_pkey primary key (tenant_id, access_id),
    constraint rag_class_indexes_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete cascade,
    constraint rag_class_indexes_chunks check (chunks >= 0)
);

comment on table rag_class_indexes is 'Large classes, which have indexes and statistics of their own; rag maintain keeps it';
comment on column rag_class_indexes.tenant_id is 'The tenant';
comment on column rag_class_indexes.access_id is 'The access class; its indexes are rag_chunks_vector_… and rag_chunks_words_… with this number';
comment on column rag_class_indexes.ready is 'Whether a search may use them: all indexes are valid, and the statistics are there';
comment on column rag_class_indexes.chunks is 'Chunks of the class when the statistics were made';
comment on column rag_class_indexes.measured_at is 'When the statistics were made';
comment on column rag_class_indexes.vector_bytes_per_chunk is 'Size of the vector index per chunk when it was taken into use, in bytes; tells later how much it has bloated';
comment on column rag_class_indexes.words_bytes_per_chunk is 'The same of the index of words';

create table rag_class_languages (
    tenant_id text not null,
    access_id bigint not null,
    language text not null,
    chunks bigint not null,
    lexemes bigint not null,
    constraint rag_class_languages_pkey primary key (tenant_id, access_id, language),
    constraint rag_class_languages_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete cascade,
    constraint rag_class_languages_counts check (chunks > 0 and lexemes >= 0)
);

comment on table rag_class_languages is 'How much a large class has in each language, each a collection of its own to BM25; as of rag_class_indexes.measured_at';
comment on column rag_class_languages.tenant_id is 'The tenant';
comment on column rag_class_languages.access_id is 'The access class';
comment on column rag_class_languages.language is 'As in rag_chunks; empty where that is null';
comment on column rag_class_languages.chunks is 'Chunks in this language';
comment on column rag_class_languages.lexemes is 'Sum of their lexeme_count';

create table rag_class_lexemes (
    tenant_id text not null,
    access_id bigint not null,
    language text not null,
    lexeme text not null,
    chunks integer not null,
    constraint rag_class_lexemes_pkey primary key (tenant_id, access_id, language, lexeme),
    constraint rag_class_lexemes_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete cascade,
    constraint rag_class_lexemes_chunks check (chunks > 0)
);

comment on table rag_class_lexemes is 'In how many chunks of a large class each lexeme is; content, read by functions of rag_search alone. Lexemes of few chunks have no row; as of rag_class_indexes.measured_at';
comment on column rag_class_lexemes.tenant_id is 'The tenant';
comment on column rag_class_lexemes.access_id is 'The access class';
comment on column rag_class_lexemes.language is 'As in rag_class_languages';
comment on column rag_class_lexemes.lexeme is 'The lexeme';
comment on column rag_class_lexemes.chunks is 'Chunks of this language that have it';

create table rag_calibrations (
    tenant_id text not null,
    embedding_model text not null,
    fusion text not null,
    language text not null,
    vector_share double precision,
    min_similarity double precision,
    questions integer not null,
    ndcg_before double precision not null,
    ndcg_after double precision not null,
    calibrated_at timestamptz not null default now(),
    constraint rag_calibrations_pkey primary key (tenant_id, embedding_model, fusion, language),
    constraint rag_calibrations_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_calibrations_fusion check (fusion in ('rank', 'score')),
    constraint rag_calibrations_language check (language ~ '^([a-z]{2})?$'),
    -- NaN is above every number.
    constraint rag_calibrations_vector_share check (vector_share between 0 and 1),
    constraint rag_calibrations_min_similarity check (min_similarity between -1 and 1),
    constraint rag_calibrations_something check (num_nonnulls(vector_share, min_similarity) > 0),
    constraint rag_calibrations_figures check (
        questions > 0 and ndcg_before between 0 and 1 and ndcg_after between 0 and 1
    )
);

comment on table rag_calibrations is 'What rag eval --calibrate found better for a tenant''s own collection than what is shipped; without a row that counts';
comment on column rag_calibrations.tenant_id is 'The tenant';
comment on column rag_calibrations.embedding_model is 'As in rag_chunks';
comment on column rag_calibrations.fusion is 'rank or score';
comment on column rag_calibrations.language is 'As in rag_chunks; empty where that is null';
comment on column rag_calibrations.vector_share is 'Instead of vector_share(), for chunks in this language; null for the shipped one';
comment on column rag_calibrations.min_similarity is 'Cosine below which a chunk does not answer. A question has one for all languages, the lowest of its tenant and model; null for the shipped one';
comment on column rag_calibrations.questions is 'Judged questions that it was chosen by';
comment on column rag_calibrations.ndcg_before is 'Their mean nDCG@10 with what counted before';
comment on column rag_calibrations.ndcg_after is 'The same with what was chosen, each half of the questions ranked by what the other half chose';
comment on column rag_calibrations.calibrated_at is 'When';

create table rag_tombstones (
    tenant_id text not null,
    access_id bigint not null,
    source_digest bytea not null,
    generation bigint not null default 1,
    reason text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    retracted boolean not null default false,
    cascade_id text,
    removed_id uuid,
    constraint rag_tombstones_pkey primary key (tenant_id, access_id, source_digest),
    constraint rag_tombstones_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete cascade,
    constraint rag_tombstones_digest check (octet_length(source_digest) = 32),
    -- Far from the end of bigint, where the next deletion would fail.
    constraint rag_tombstones_generation check (generation between 1 and 1000000000),
    constraint rag_tombstones_cascade check (length(cascade_id) between 1 and 128)
);

comment on table rag_tombstones is 'Sources that were deleted or retracted, without their names: an ingest that began before finds a newer generation here and gives up, and one of a retracted source is refused';
comment on column rag_tombstones.tenant_id is 'The tenant';
comment on column rag_tombstones.access_id is 'The access class of the deleted document';
comment on column rag_tombstones.source_digest is 'source_digest() of the deleted document''s source_type and source_id; without the type when it was retracted; provenance_digest() when all that is derived of it was';
comment on column rag_tombstones.generation is 'Number of deletions so far; only grows';
comment on column rag_tombstones.reason is 'Why it was deleted, a word of the service''s';
comment on column rag_tombstones.created_at is 'When it was first deleted';
comment on column rag_tombstones.updated_at is 'When it was last deleted, retracted or reinstated';
comment on column rag_tombstones.retracted is 'Whether an ingest is refused until the source is reinstated, unless it names a higher generation';
comment on column rag_tombstones.cascade_id is 'Of the last retraction, as in rag_retractions; null when it was deleted alone';
comment on column rag_tombstones.removed_id is 'Id of the document that was last retracted; null when there was none';

create table rag_synchronisations (
    tenant_id text not null,
    access_id bigint not null,
    source text not null,
    version text,
    files integer not null,
    written integer not null,
    removed integer not null,
    unchanged integer not null,
    failed integer not null,
    finished_at timestamptz not null default now(),
    succeeded_at timestamptz,
    constraint rag_synchronisations_pkey primary key (tenant_id, access_id, source),
    constraint rag_synchronisations_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete cascade,
    constraint rag_synchronisations_source check (source ~ '^[a-z0-9][a-z0-9._-]{0,63}$'),
    constraint rag_synchronisations_version check (length(version) between 1 and 128),
    constraint rag_synchronisations_counts check (
        files >= 0 and written >= 0 and removed >= 0 and unchanged >= 0 and failed >= 0
    )
);

comment on table rag_synchronisations is 'What came of the last synchronisation of each source, in the class to which its documents go';
comment on column rag_synchronisations.tenant_id is 'The tenant';
comment on column rag_synchronisations.access_id is 'The access class of the source''s documents; decides who may see the row';
comment on column rag_synchronisations.source is 'Name of the source, as in RAG_SOURCES';
comment on column rag_synchronisations.version is 'Commit that was read; null for a directory';
comment on column rag_synchronisations.files is 'Files that counted';
comment on column rag_synchronisations.written is 'Documents that were written: new, changed, moved, or mended';
comment on column rag_synchronisations.removed is 'Documents that were removed';
comment on column rag_synchronisations.unchanged is 'Documents that were as they should be';
comment on column rag_synchronisations.failed is 'Files that could not be taken in, and documents that stayed although they are gone';
comment on column rag_synchronisations.finished_at is 'When the last one ended';
comment on column rag_synchronisations.succeeded_at is 'When the last one ended that had no failures; null when none has';

create table rag_erasures (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    kind text not null,
    subject_digest bytea not null,
    rows_removed bigint not null,
    erased_at timestamptz not null default now(),
    erased_by text not null,
    constraint rag_erasures_pkey primary key (tenant_id, id),
    constraint rag_erasures_kind check (kind in ('tenant', 'user', 'project', 'source')),
    constraint rag_erasures_digest check (octet_length(subject_digest) = 32)
);

create index rag_erasures_subject on rag_erasures (tenant_id, subject_digest);

comment on table rag_erasures is 'What rag.forget() erased, without saying of whom: proof that it was done, and a stop for an ingest that began before';
comment on column rag_erasures.tenant_id is 'The tenant; the digest of its name once the tenant itself is erased';
comment on column rag_erasures.id is 'Random identifier';
comment on column rag_erasures.kind is 'Whether a tenant, a user, a project or a source was erased';
comment on column rag_erasures.subject_digest is 'erasure_digest() of what was erased';
comment on column rag_erasures.rows_removed is 'Rows of all tables that were removed';
comment on column rag_erasures.erased_at is 'When';
comment on column rag_erasures.erased_by is 'The login that asked for it';

create table rag_query_logs (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    user_id bigint not null,
    project_id text,
    scope text,
    query_hash text not null,
    query_length integer not null,
    query_text text,
    mode text not null,
    embedding_model text,
    model_used text,
    result_count integer not null,
    citation_count integer not null,
    context_tokens integer not null,
    confidence integer,
    action text,
    route_tag text,
    route_fallback boolean,
    retrieval_ms double precision not null,
    generation_ms double precision not null,
    latency_ms double precision not null,
    created_at timestamptz not null default now(),
    constraint rag_query_logs_pkey primary key (tenant_id, user_id, id)
);

create index rag_query_logs_time on rag_query_logs (tenant_id, created_at);

comment on table rag_query_logs is 'One row for each answered question';
comment on column rag_query_logs.tenant_id is 'The tenant';
comment on column rag_query_logs.id is 'Identifier of the question, also the request''s query_id';
comment on column rag_query_logs.user_id is 'Who asked; 0 for a principal without a user';
comment on column rag_query_logs.project_id is 'The principal''s project; * for all of theirs';
comment on column rag_query_logs.scope is 'How far the request was narrowed; null for not at all';
comment on column rag_query_logs.query_hash is 'SHA-256 of the question';
comment on column rag_query_logs.query_length is 'Characters of the question';
comment on column rag_query_logs.query_text is 'The question itself, only when RAG_LOG_QUERY_TEXT is on';
comment on column rag_query_logs.mode is 'Which arms ran: hybrid, partial, vector, keyword; none when nothing was found';
comment on column rag_query_logs.embedding_model is 'The model that embedded the question; null when it was not embedded';
comment on column rag_query_logs.model_used is 'What wrote the answer; null when only hits were asked for';
comment on column rag_query_logs.result_count is 'Chunks that the search returned';
comment on column rag_query_logs.citation_count is 'Citations that survived the re-check';
comment on column rag_query_logs.context_tokens is 'Tokens of context in the prompt';
comment on column rag_query_logs.confidence is 'Confidence from 0 to 100; null when nothing was generated';
comment on column rag_query_logs.action is 'CITE, ROUTE or DIRECT; null when nothing was generated';
comment on column rag_query_logs.route_tag is 'With action ROUTE: the tag whose owner the asker was sent to; system for the administrator';
comment on column rag_query_logs.route_fallback is 'With action ROUTE: whether it was the administrator, for want of an owner';
comment on column rag_query_logs.retrieval_ms is 'Milliseconds for embedding the question and searching';
comment on column rag_query_logs.generation_ms is 'Milliseconds for writing the answer';
comment on column rag_query_logs.latency_ms is 'Milliseconds in all';
comment on column rag_query_logs.created_at is 'When it was asked';

create table rag_query_log_chunks (
    tenant_id text not null,
    query_id uuid not null,
    user_id bigint not null,
    rank integer not null,
    document_id uuid not null,
    chunk_index integer not null,
    score double precision not null,
    cosine double precision,
    cited boolean not null,
    constraint rag_query_log_chunks_pkey primary key (tenant_id, user_id, query_id, rank),
    -- With the user in it, somebody else's question and a missing one give the same error.
    constraint rag_query_log_chunks_query foreign key (tenant_id, user_id, query_id)
        references rag_query_logs (tenant_id, user_id, id) on delete cascade
);

comment on table rag_query_log_chunks is 'The chunks that a question got back, one row each';
comment on column rag_query_log_chunks.tenant_id is 'The tenant';
comment on column rag_query_log_chunks.query_id is 'The question';
comment on column rag_query_log_chunks.user_id is 'Who asked, as in the question''s row';
comment on column rag_query_log_chunks.rank is 'Position in the result, from 1';
comment on column rag_query_log_chunks.document_id is 'The document, which may be gone by now';
comment on column rag_query_log_chunks.chunk_index is 'The chunk within the document';
comment on column rag_query_log_chunks.score is 'Fused score, larger is better';
comment on column rag_query_log_chunks.cosine is 'Cosine of question and chunk; null when they were not compared';
comment on column rag_query_log_chunks.cited is 'Whether the answer cites it';

create table rag_feedback (
    tenant_id text not null,
    user_id bigint not null,
    query_id uuid not null,
    rank integer not null,
    access_id bigint,
    document_id uuid,
    chunk_index integer,
    rating smallint,
    clicked boolean not null default false,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint rag_feedback_pkey primary key (tenant_id, user_id, query_id, rank),
    constraint rag_feedback_query foreign key (tenant_id, user_id, query_id)
        references rag_query_logs (tenant_id, user_id, id) on delete cascade,
    constraint rag_feedback_user check (user_id > 0),
    constraint rag_feedback_source check (
        case rank when 0 then num_nonnulls(access_id, document_id, chunk_index) = 0
        else rank > 0 and num_nulls(access_id, document_id, chunk_index) = 0 end
    ),
    constraint rag_feedback_rating check (rating between -1 and 1),
    constraint rag_feedback_something check (clicked or rating is not null)
);

-- What a search with a boost looks up of its candidates.
create index rag_feedback_document on rag_feedback (tenant_id, access_id, document_id) where document_id is not null;

comment on table rag_feedback is 'What people made of an answer and of its sources: one row for each user, question and source, the last word holds; goes with the question''s row';
comment on column rag_feedback.tenant_id is 'The tenant';
comment on column rag_feedback.user_id is 'Who asked, and says so';
comment on column rag_feedback.query_id is 'The question';
comment on column rag_feedback.rank is 'The source''s position in the result, as in rag_query_log_chunks; 0 for the answer itself';
comment on column rag_feedback.access_id is 'The document''s access class when it was first said: a ranking counts it within this class alone; null for the answer';
comment on column rag_feedback.document_id is 'The document, which may be gone by now; null for the answer';
comment on column rag_feedback.chunk_index is 'The chunk within the document; null for the answer';
comment on column rag_feedback.rating is '1 good, -1 bad, 0 neither; null when it was not rated';
comment on column rag_feedback.clicked is 'Whether it was opened';
comment on column rag_feedback.created_at is 'When it was first said';
comment on column rag_feedback.updated_at is 'When it last changed';

create table rag_tags (
    tenant_id text not null,
    name text not null,
    owner_user_id bigint,
    owner_email text,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint rag_tags_pkey primary key (tenant_id, name),
    constraint rag_tags_tenant check (length(tenant_id) between 1 and 128),
    -- Everybody has the tag public, so that it says nothing of whom to ask.
    constraint rag_tags_name check (length(name) between 1 and 64 and name <> 'public'),
    constraint rag_tags_owner check (owner_user_id > 0),
    -- RFC 5321, 4.5.3.1.3: a path has 256 characters, two of which are its brackets.
    constraint rag_tags_email check (length(owner_email) between 3 and 254 and owner_email ~ '^[^@[:space:][:cntrl:]]+@[^@[:space:][:cntrl:]]+$'),
    constraint rag_tags_somebody check (num_nonnulls(owner_user_id, owner_email) > 0)
);

comment on table rag_tags is 'Who owns a tag: whom to ask when an answer from its documents is not sure enough';
comment on column rag_tags.tenant_id is 'The tenant; a tag of the same name in another one is another tag';
comment on column rag_tags.name is 'The tag, as in rag_access_classes.tags';
comment on column rag_tags.owner_user_id is 'The user who owns it; null when only an address is known';
comment on column rag_tags.owner_email is 'Where the owner is reached; shown to askers who hold the tag unless RAG_EXPOSE_OWNER_EMAIL is off';
comment on column rag_tags.created_at is 'When an owner was first named';
comment on column rag_tags.updated_at is 'When the owner last changed';

create table rag_prompts (
    tenant_id text not null,
    prompt text not null,
    replaces boolean not null default false,
    generation bigint not null default 1,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint rag_prompts_pkey primary key (tenant_id),
    constraint rag_prompts_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_prompts_prompt check (octet_length(prompt) between 1 and 8192 and prompt ~ '[^[:space:]]'),
    constraint rag_prompts_generation check (generation between 1 and 1000000000)
);

comment on table rag_prompts is 'What a tenant tells the model before the rules of the service, which always stay';
comment on column rag_prompts.tenant_id is 'The tenant';
comment on column rag_prompts.prompt is 'The text, taken as it is; at most 8 KiB';
comment on column rag_prompts.replaces is 'Whether it stands instead of the service''s introduction, or follows it';
comment on column rag_prompts.generation is 'How often it was set';
comment on column rag_prompts.created_at is 'When it was first set';
comment on column rag_prompts.updated_at is 'When it was last set';

create table rag_signing_keys (
    key_id text not null,
    inner_pad bytea not null,
    outer_pad bytea not null,
    created_at timestamptz not null default now(),
    constraint rag_signing_keys_pkey primary key (key_id),
    constraint rag_signing_keys_id check (key_id ~ '^[a-z0-9]{1,32}$'),
    constraint rag_signing_keys_pads check (octet_length(inner_pad) = 64 and octet_length(outer_pad) = 64)
);

comment on table rag_signing_keys is 'Keys of the service''s signatures; all of them are valid, so that a new one can be handed out before the old one goes. The only table without a tenant: it says nothing of any';
comment on column rag_signing_keys.key_id is 'Name of the key, the first part of a signature';
comment on column rag_signing_keys.inner_pad is 'The secret, padded and combined with 0x36 (RFC 2104), so that a signature costs two digests and no loop';
comment on column rag_signing_keys.outer_pad is 'The secret, padded and combined with 0x5c (RFC 2104)';
comment on column rag_signing_keys.created_at is 'When it was made';

create table rag_models (
    place text not null,
    model_id text not null,
    is_former boolean not null default false,
    writes_paused_until timestamptz,
    changed_at timestamptz not null default now(),
    constraint rag_models_pkey primary key (place),
    constraint rag_models_place check (place in ('active', 'second')),
    constraint rag_models_id check (length(model_id) between 1 and 200)
);

comment on table rag_models is 'Which embedding models the two vector columns of rag_chunks are of; empty until a second one is added, and then binding: a service of another model is refused. Without a tenant: the columns are everybody''s';
comment on column rag_models.place is 'active: embedding, which is searched; second: second_embedding';
comment on column rag_models.model_id is 'The model, as in rag_chunks.embedding_model';
comment on column rag_models.is_former is 'Whether the second model was active before, and is kept for a way back';
comment on column rag_models.writes_paused_until is 'Until then new chunks are refused, so that the last vectors are filled and the models change places';
comment on column rag_models.changed_at is 'When it took this place';

create table rag_analysts (
    tenant_id text not null,
    role_name text not null,
    tags text[] not null default '{public}',
    projects text[] not null default '{}',
    user_scope text not null default 'metadata',
    created_at timestamptz not null default now(),
    constraint rag_analysts_pkey primary key (tenant_id, role_name),
    constraint rag_analysts_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_analysts_role check (length(role_name) between 1 and 63 and role_name !~ '^(rag|pg)_'),
    constraint rag_analysts_lists check (
        cardinality(tags) between 1 and 256
        and array_position(tags, null) is null
        and array_position(projects, null) is null
    ),
    constraint rag_analysts_user_scope check (user_scope in ('none', 'metadata', 'text'))
);

comment on table rag_analysts is 'People who query the views with their own login, and how far they see; a login in two tenants sees nothing';
comment on column rag_analysts.tenant_id is 'The tenant whose rows they see';
comment on column rag_analysts.role_name is 'The login role, a member of rag_analyst';
comment on column rag_analysts.tags is 'Rows with one of these tags';
comment on column rag_analysts.projects is 'Projects whose rows they see, of any owner; * for all';
comment on column rag_analysts.user_scope is 'Rows of scope user: none; metadata, that they exist, without title and text; text, all of them';
comment on column rag_analysts.created_at is 'When they were let in';

create table rag_service_keys (
    tenant_id text not null,
    key_id text not null,
    name text not null,
    secret_sha256 bytea not null,
    actions text[] not null,
    scopes text[] not null,
    tags text[],
    act_as boolean not null default false,
    user_ids bigint[],
    project_ids text[],
    created_at timestamptz not null default now(),
    expires_at timestamptz not null,
    revoked_at timestamptz,
    constraint rag_service_keys_pkey primary key (tenant_id, key_id),
    constraint rag_service_keys_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_service_keys_id check (key_id ~ '^[0-9a-f]{16}$'),
    constraint rag_service_keys_name check (length(name) between 1 and 128),
    constraint rag_service_keys_secret check (octet_length(secret_sha256) = 32),
    constraint rag_service_keys_actions check (
        cardinality(actions) > 0 and actions <@ array['query', 'ingest', 'delete']
    ),
    constraint rag_service_keys_scopes check (scopes <@ array['public', 'user', 'project']),
    constraint rag_service_keys_act_as check (act_as or (user_ids is null and project_ids is null))
);

comment on table rag_service_keys is 'Keys of trusted services, as digests, and what each may do; read by the service through load_service_keys() alone';
comment on column rag_service_keys.tenant_id is 'The one tenant that the service speaks for';
comment on column rag_service_keys.key_id is 'Public part of the key, random';
comment on column rag_service_keys.name is 'What the operator calls it';
comment on column rag_service_keys.secret_sha256 is 'SHA-256 of the secret part, which has too many bits to be guessed';
comment on column rag_service_keys.actions is 'Of query, ingest, delete';
comment on column rag_service_keys.scopes is 'Scopes that it may write: of public, user, project';
comment on column rag_service_keys.tags is 'Tags that it may assert and write; null for any';
comment on column rag_service_keys.act_as is 'Whether it may name a user and a project; without, it sees and writes what is public';
comment on column rag_service_keys.user_ids is 'Users that it may name; null for any';
comment on column rag_service_keys.project_ids is 'Projects that it may name; null for any';
comment on column rag_service_keys.created_at is 'When it was made';
comment on column rag_service_keys.expires_at is 'When it ends by itself';
comment on column rag_service_keys.revoked_at is 'When it was revoked; null while it is valid';

create table rag_assertions (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    key_id text not null,
    user_id bigint not null,
    project_id text,
    tags text[] not null,
    action text not null,
    created_at timestamptz not null default now(),
    constraint rag_assertions_pkey primary key (tenant_id, id),
    constraint rag_assertions_action check (action in ('query', 'ingest', 'delete'))
);

create index rag_assertions_time on rag_assertions (tenant_id, created_at);

comment on table rag_assertions is 'For whom trusted services spoke, one row for each request';
comment on column rag_assertions.tenant_id is 'The tenant';
comment on column rag_assertions.id is 'Random identifier';
comment on column rag_assertions.key_id is 'The service key';
comment on column rag_assertions.user_id is 'The user that it named; 0 for none';
comment on column rag_assertions.project_id is 'The project that it named';
comment on column rag_assertions.tags is 'The tags that it asserted';
comment on column rag_assertions.action is 'query, ingest or delete';
comment on column rag_assertions.created_at is 'When';

create table rag_retractions (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    user_id bigint not null,
    project_id text,
    action text not null,
    reason text not null,
    cascade_id text,
    sources integer not null,
    documents integer not null,
    chunks integer not null,
    created_at timestamptz not null default now(),
    constraint rag_retractions_pkey primary key (tenant_id, id),
    constraint rag_retractions_action check (action in ('invalidate', 'reinstate')),
    constraint rag_retractions_texts check (length(reason) between 1 and 1000 and length(cascade_id) between 1 and 128),
    constraint rag_retractions_counts check (sources >= 0 and documents >= 0 and chunks >= 0)
);

create index rag_retractions_time on rag_retractions (tenant_id, created_at);

comment on table rag_retractions is 'Who invalidated or reinstated sources and why, one row for each request; stays until its tenant, user or project is erased';
comment on column rag_retractions.tenant_id is 'The tenant';
comment on column rag_retractions.id is 'Random identifier';
comment on column rag_retractions.user_id is 'Who asked for it; 0 for a principal without a user';
comment on column rag_retractions.project_id is 'The principal''s project; * for all of theirs';
comment on column rag_retractions.action is 'invalidate or reinstate';
comment on column rag_retractions.reason is 'Why, in the words of whoever asked for it';
comment on column rag_retractions.cascade_id is 'Names what was retracted together; also in rag_tombstones';
comment on column rag_retractions.sources is 'Sources and provenances that were closed or opened, each once for each class';
comment on column rag_retractions.documents is 'Documents that were removed';
comment on column rag_retractions.chunks is 'Their chunks';
comment on column rag_retractions.created_at is 'When';

create table rag_limits (
    tenant_id text not null,
    queries_per_minute integer,
    query_burst integer,
    ingests_per_minute integer,
    ingest_burst integer,
    documents bigint,
    bytes bigint,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint rag_limits_pkey primary key (tenant_id),
    -- No tenant is called by the empty name.
    constraint rag_limits_tenant check (length(tenant_id) <= 128),
    constraint rag_limits_rates check (
        queries_per_minute between 0 and 1000000 and ingests_per_minute between 0 and 1000000
    ),
    constraint rag_limits_bursts check (
        query_burst between 1 and 1000000 and ingest_burst between 1 and 1000000
        and (query_burst is null or queries_per_minute is not null)
        and (ingest_burst is null or ingests_per_minute is not null)
    ),
    constraint rag_limits_quotas check (documents >= 0 and bytes >= 0)
);

comment on table rag_limits is 'How much tenants may ask and store, as operators say; null for no limit, and no row for none at all';
comment on column rag_limits.tenant_id is 'The tenant; empty for those that have no row of their own';
comment on column rag_limits.queries_per_minute is 'Questions a minute in the long run; 0 for none';
comment on column rag_limits.query_burst is 'Questions that may come at once after a pause; null for those of a minute';
comment on column rag_limits.ingests_per_minute is 'Documents a minute in the long run that may be sent; 0 for none';
comment on column rag_limits.ingest_burst is 'Documents that may come at once after a pause; null for those of a minute';
comment on column rag_limits.documents is 'Documents that may be stored';
comment on column rag_limits.bytes is 'Sum of their bodies, in UTF-8';
comment on column rag_limits.created_at is 'When a limit was first set';
comment on column rag_limits.updated_at is 'When one was last set';

-- Unlogged: a commit that writes nothing else waits for no disk. After a crash every bucket is full.
-- Room on each page, so that a row that changes often stays where it is.
create unlogged table rag_rate_buckets (
    tenant_id text not null,
    kind text not null,
    tokens double precision not null,
    refilled_at timestamptz not null,
    constraint rag_rate_buckets_pkey primary key (tenant_id, kind),
    constraint rag_rate_buckets_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_rate_buckets_kind check (kind in ('query', 'ingest')),
    constraint rag_rate_buckets_tokens check (tokens between 0 and 1000000)
) with (fillfactor = 50);

comment on table rag_rate_buckets is 'What a tenant has left of its rates; a row once it has used one';
comment on column rag_rate_buckets.tenant_id is 'The tenant';
comment on column rag_rate_buckets.kind is 'query or ingest';
comment on column rag_rate_buckets.tokens is 'Requests that were left at refilled_at';
comment on column rag_rate_buckets.refilled_at is 'When the last one was granted, by the clock of the database';

create table rag_usage (
    tenant_id text not null,
    slot smallint not null,
    documents bigint not null,
    bytes bigint not null,
    constraint rag_usage_pkey primary key (tenant_id, slot),
    constraint rag_usage_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_usage_slot check (slot between 0 and 15)
) with (fillfactor = 50);

comment on table rag_usage is 'How much a tenant has stored: the sum of its rows. Several, so that those who write at once do not wait for each other''s commit';
comment on column rag_usage.tenant_id is 'The tenant';
comment on column rag_usage.slot is 'Of the connection that wrote; says nothing else';
comment on column rag_usage.documents is 'Documents that were added less those that were removed; below 0 where they were added through another slot';
comment on column rag_usage.bytes is 'The same of the bytes of their bodies';

create table rag_jobs (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    -- 0: a principal without a user.
    user_id bigint not null,
    project_id text,
    tags text[] not null,
    kind text not null,
    status text not null,
    reason text,
    detail text,
    attempts integer not null default 0,
    losses integer not null default 0,
    lock text,
    queue_id bigint,
    turn integer not null default 0,
    claim uuid,
    source_type text,
    source_id text,
    payload jsonb,
    body text,
    result jsonb,
    request_key bytea,
    request_digest bytea,
    created_at timestamptz not null default now(),
    started_at timestamptz,
    due_at timestamptz,
    finished_at timestamptz,
    constraint rag_jobs_pkey primary key (tenant_id, id),
    constraint rag_jobs_request unique (tenant_id, user_id, request_key),
    constraint rag_jobs_tenant check (length(tenant_id) between 1 and 128),
    constraint rag_jobs_status check (status in ('pending', 'processing', 'succeeded', 'failed', 'cancelled')),
    constraint rag_jobs_kind check (length(kind) between 1 and 64),
    constraint rag_jobs_claim check (claim is null or status = 'processing')
);

-- What a worker looks a job up by: it knows of no tenant.
create index rag_jobs_queue on rag_jobs (queue_id) where status in ('pending', 'processing');
create index rag_jobs_open on rag_jobs (tenant_id, turn) where status in ('pending', 'processing');
create index rag_jobs_finished on rag_jobs (finished_at) where finished_at is not null;

comment on table rag_jobs is 'What somebody asked for that a worker does later, or that had an idempotency key; the queue itself is schema jobs';
comment on column rag_jobs.tenant_id is 'The tenant';
comment on column rag_jobs.id is 'Random; what a caller asks for its status by';
comment on column rag_jobs.user_id is 'The user who asked, and as whom it is done; 0 for a principal without one';
comment on column rag_jobs.project_id is 'The project of the principal, * for all';
comment on column rag_jobs.tags is 'The tags of the principal';
comment on column rag_jobs.kind is 'What is to be done: ingest, …';
comment on column rag_jobs.status is 'pending, processing, succeeded, failed (parked, with a reason) or cancelled';
comment on column rag_jobs.reason is 'The code of the last error; null when there was none';
comment on column rag_jobs.detail is 'The last error in words, as its requester would have been told';
comment on column rag_jobs.attempts is 'How often a worker has begun it';
comment on column rag_jobs.losses is 'How often a worker ended in the middle of it';
comment on column rag_jobs.lock is 'Digest; jobs of one are done one after the other';
comment on column rag_jobs.queue_id is 'Its number in the queue; null for a request that was answered at once';
comment on column rag_jobs.turn is 'When it is its turn among those of all tenants; smaller is sooner';
comment on column rag_jobs.claim is 'Whose it is: made anew each time a worker takes it';
comment on column rag_jobs.source_type is 'The source that it is about';
comment on column rag_jobs.source_id is 'The source that it is about';
comment on column rag_jobs.payload is 'What is to be done, as its kind reads it; removed when it succeeded or was cancelled';
comment on column rag_jobs.body is 'The document that was sent; removed with payload';
comment on column rag_jobs.result is 'Ids and counts';
comment on column rag_jobs.request_key is 'SHA-256 of the caller''s idempotency key; null without one, and once it has expired';
comment on column rag_jobs.request_digest is 'SHA-256 of what was asked for';
comment on column rag_jobs.created_at is 'When it was asked for';
comment on column rag_jobs.started_at is 'When a worker last began it';
comment on column rag_jobs.due_at is 'When it is tried again';
comment on column rag_jobs.finished_at is 'When it succeeded, failed for good or was cancelled';

create table rag_claims (
    tenant_id text not null,
    source_digest bytea not null,
    token uuid not null,
    expires_at timestamptz not null,
    constraint rag_claims_pkey primary key (tenant_id, source_digest)
);

comment on table rag_claims is 'Sources that somebody is making searchable at this moment, for seconds';
comment on column rag_claims.tenant_id is 'The tenant';
comment on column rag_claims.source_digest is 'SHA-256 of owner, source type and source id';
comment on column rag_claims.token is 'Whose claim it is';
comment on column rag_claims.expires_at is 'When it ends by itself, unless it is renewed';

create table rag_conversation_messages (
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    access_id bigint not null,
    user_id bigint not null,
    project_id text,
    thread_id text not null,
    number bigint not null,
    role text not null,
    content text not null,
    tokens integer not null,
    -- Kept, so that a thread can be measured without reading it.
    characters integer not null generated always as (length(content)) stored,
    request_key bytea,
    request_digest bytea,
    summary_id uuid,
    summarised_at timestamptz,
    created_at timestamptz not null default now(),
    constraint rag_conversation_messages_pkey primary key (tenant_id, access_id, id),
    constraint rag_conversation_messages_place unique (tenant_id, access_id, thread_id, number),
    constraint rag_conversation_messages_request unique (tenant_id, access_id, request_key),
    constraint rag_conversation_messages_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete restrict,
    constraint rag_conversation_messages_owner check (user_id > 0),
    constraint rag_conversation_messages_thread check (length(thread_id) between 1 and 128),
    constraint rag_conversation_messages_number check (number > 0),
    constraint rag_conversation_messages_role check (role in ('user', 'assistant')),
    constraint rag_conversation_messages_content check (length(content) between 1 and 32768),
    constraint rag_conversation_messages_tokens check (tokens between 0 and 131072),
    constraint rag_conversation_messages_summary check (summarised_at is null or summary_id is not null)
);

-- What a post measures, and what a summary is made of: nothing of what has been summarised.
create index rag_conversation_messages_open on rag_conversation_messages (tenant_id, access_id, thread_id)
where summarised_at is null;
-- Where retention finds what is too old.
create index rag_conversation_messages_time on rag_conversation_messages (tenant_id, created_at);

comment on table rag_conversation_messages is 'Messages of conversations, read by whoever posted them alone; never searched: what is searched is a summary';
comment on column rag_conversation_messages.tenant_id is 'The tenant';
comment on column rag_conversation_messages.id is 'Random identifier';
comment on column rag_conversation_messages.access_id is 'The access class to which a summary of it goes: of a user, or of a project of theirs';
comment on column rag_conversation_messages.user_id is 'Who posted it: the owner of the class';
comment on column rag_conversation_messages.project_id is 'Project of the class; null for a conversation of the user alone';
comment on column rag_conversation_messages.thread_id is 'The conversation, as the caller calls it; its own for each user and project';
comment on column rag_conversation_messages.number is 'Its place in the thread, from 1';
comment on column rag_conversation_messages.role is 'user or assistant';
comment on column rag_conversation_messages.content is 'What was said; at most 32,768 characters';
comment on column rag_conversation_messages.tokens is 'Tokens of content, as the service counted them';
comment on column rag_conversation_messages.characters is 'Characters of content';
comment on column rag_conversation_messages.request_key is 'SHA-256 of the caller''s idempotency key; null without one';
comment on column rag_conversation_messages.request_digest is 'SHA-256 of what was posted with that key';
comment on column rag_conversation_messages.summary_id is 'The summary that it was given to: the id of the job that writes it; null while the thread is below the threshold';
comment on column rag_conversation_messages.summarised_at is 'When that summary was stored; null until then';
comment on column rag_conversation_messages.created_at is 'When it was posted; what its expiry counts from';

create table rag_conversation_summaries (
    tenant_id text not null,
    id uuid not null,
    access_id bigint not null,
    document_id uuid not null,
    user_id bigint not null,
    project_id text,
    thread_id text not null,
    summary_text text not null,
    message_ids uuid[] not null,
    model text not null,
    created_at timestamptz not null default now(),
    constraint rag_conversation_summaries_pkey primary key (tenant_id, access_id, id),
    constraint rag_conversation_summaries_thread check (length(thread_id) between 1 and 128),
    constraint rag_conversation_summaries_owner check (user_id > 0),
    constraint rag_conversation_summaries_messages check (cardinality(message_ids) > 0),
    -- Whatever removes the document, an invalidation, an erasure, its owner, removes the text here as well.
    constraint rag_conversation_summaries_document foreign key (tenant_id, access_id, document_id)
        references rag_documents (tenant_id, access_id, id) on delete cascade
);

create index rag_conversation_summaries_thread on rag_conversation_summaries (tenant_id, access_id, thread_id, created_at);
create index rag_conversation_summaries_of on rag_conversation_summaries (tenant_id, access_id, document_id);

comment on table rag_conversation_summaries is 'Summaries of conversations: each is a document of its scope, which is what is searched; goes with that document';
comment on column rag_conversation_summaries.tenant_id is 'The tenant';
comment on column rag_conversation_summaries.id is 'The job that wrote it: a message is of one summary at most';
comment on column rag_conversation_summaries.access_id is 'The access class of its document and of its messages';
comment on column rag_conversation_summaries.document_id is 'The document that it is indexed as';
comment on column rag_conversation_summaries.user_id is 'Whose conversation it was';
comment on column rag_conversation_summaries.project_id is 'Project of the class; null for a conversation of the user alone';
comment on column rag_conversation_summaries.thread_id is 'The conversation, as its caller calls it';
comment on column rag_conversation_summaries.summary_text is 'The summary as the model wrote it';
comment on column rag_conversation_summaries.message_ids is 'The messages that it sums up, in their order; they may have expired since';
comment on column rag_conversation_summaries.model is 'The model that wrote it';
comment on column rag_conversation_summaries.created_at is 'When it was stored';

-- The planner's statistics hold common values of a column, of all tenants alike, and its estimates show
-- them to whoever may EXPLAIN. Columns that say something and choose no plan have none.
do $$
declare
    silent record;
begin
    for silent in
        select *
        from (values
            ('rag_access_classes', array['tenant_id', 'project_id', 'tags', 'tags_digest']),
            ('rag_project_members', array['tenant_id', 'project_id']),
            ('rag_documents', array[
                'tenant_id', 'source_id', 'source_uri', 'source_hash', 'title', 'body', 'domain', 'doc_type',
                'provenance_id', 'task_id', 'metadata', 'tags', 'project_id', 'body_bytes'
            ]),
            ('rag_chunks', array['tenant_id', 'chunk_text', 'chunk_hash', 'section', 'tsv', 'embedding', 'second_embedding', 'token_counter']),
            ('rag_class_indexes', array['tenant_id']),
            ('rag_class_languages', array['tenant_id']),
            ('rag_class_lexemes', array['tenant_id', 'lexeme', 'chunks']),
            ('rag_calibrations', array['tenant_id']),
            ('rag_tombstones', array['tenant_id', 'source_digest', 'reason', 'cascade_id']),
            ('rag_synchronisations', array['tenant_id', 'source', 'version']),
            ('rag_erasures', array['tenant_id', 'subject_digest', 'erased_by']),
            ('rag_query_logs', array['tenant_id', 'project_id', 'query_hash', 'query_text', 'route_tag']),
            ('rag_query_log_chunks', array['tenant_id']),
            ('rag_feedback', array['tenant_id']),
            ('rag_tags', array['tenant_id', 'name', 'owner_email']),
            ('rag_prompts', array['tenant_id', 'prompt']),
            ('rag_models', array['model_id']),
            ('rag_signing_keys', array['key_id', 'inner_pad', 'outer_pad']),
            ('rag_analysts', array['tenant_id', 'role_name', 'tags', 'projects']),
            ('rag_service_keys', array['tenant_id', 'name', 'secret_sha256', 'tags', 'user_ids', 'project_ids']),
            ('rag_assertions', array['tenant_id', 'project_id', 'tags']),
            ('rag_retractions', array['tenant_id', 'project_id', 'reason', 'cascade_id']),
            ('rag_limits', array[
                'tenant_id', 'queries_per_minute', 'query_burst', 'ingests_per_minute', 'ingest_burst', 'documents',
                'bytes'
            ]),
            ('rag_rate_buckets', array['tenant_id', 'tokens', 'refilled_at']),
            ('rag_usage', array['tenant_id', 'slot', 'documents', 'bytes']),
            ('rag_jobs', array[
                'tenant_id', 'project_id', 'tags', 'reason', 'detail', 'lock', 'source_id', 'payload', 'body', 'result',
                'request_key', 'request_digest'
            ]),
            ('rag_claims', array['tenant_id', 'source_digest']),
            ('rag_conversation_messages', array[
                'tenant_id', 'project_id', 'thread_id', 'number', 'role', 'content', 'tokens', 'characters',
                'request_key', 'request_digest', 'summary_id', 'summarised_at'
            ]),
            ('rag_conversation_summaries', array[
                'tenant_id', 'project_id', 'thread_id', 'summary_text', 'message_ids', 'model'
            ])
        ) as listed (table_name, columns)
        cross join lateral unnest(listed.columns) as column_name
    loop
        execute format('alter table %I alter column %I set statistics 0', silent.table_name, silent.column_name);
    end loop;
end
$$;
-- The queue of jobs: schema `jobs`, which is procrastinate's own SQL (version 3.10.0, `procrastinate/sql/schema.sql`;
-- MIT licence, © its contributors), with spaces for tabs; a test compares it with the package that is installed. It knows
-- nothing of tenants and has no row security: what stands in it are ids of rag_jobs, digests and numbers. Nobody
-- has a right to its tables but rag_queue, which owns its functions (36_jobs.sql, 60_grants.sql).

set local search_path = jobs, pg_temp;

-- Procrastinate Schema

DO $$
BEGIN
    CREATE EXTENSION IF NOT EXISTS plpgsql WITH SCHEMA pg_catalog;
EXCEPTION
    WHEN OTHERS THEN
        -- On managed PostgreSQL services (e.g. Azure Database for PostgreSQL, Amazon RDS,
        -- Google Cloud SQL), CREATE EXTENSION may fail with various error codes:
        -- insufficient_privilege, feature_not_supported, or provider-specific errors.
        -- Before ignoring, verify the extension actually exists — if it does not exist
        -- and cannot be created, re-raise so the failure is explicit.
        IF EXISTS (SELECT 1 FROM pg_extension WHERE extname = 'plpgsql') THEN
            RAISE NOTICE 'plpgsql extension already exists, skipping creation.';
        ELSE
            RAISE;
        END IF;
END;
$$;

-- Enums

CREATE TYPE procrastinate_job_status AS ENUM (
    'todo',  -- The job is queued
    'doing',  -- The job has been fetched by a worker
    'succeeded',  -- The job ended successfully
    'failed',  -- The job ended with an error
    'cancelled', -- The job was cancelled
    'aborting',  -- legacy, not used anymore since v3.0.0
    'aborted'  -- The job was aborted
);

CREATE TYPE procrastinate_job_event_type AS ENUM (
    'deferred',  -- Job created, in todo
    'started',  -- todo -> doing
    'deferred_for_retry',  -- doing -> todo
    'failed',  -- doing -> failed
    'succeeded',  -- doing -> succeeded
    'cancelled', -- todo -> cancelled
    'abort_requested', -- not a state transition, but set in a separate field
    'aborted', -- doing -> aborted (only allowed when abort_requested field is set)
    'scheduled', -- not a state transition, but recording when a task is scheduled for
    'retried' -- Manually retried failed job
);

-- Composite Types

CREATE TYPE procrastinate_job_to_defer_v1 AS (
    queue_name character varying,
    task_name character varying,
    priority integer,
    lock text,
    queueing_lock text,
    args jsonb,
    scheduled_at timestamp with time zone
);

-- Tables

CREATE TABLE procrastinate_workers(
    id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    last_heartbeat timestamp with time zone NOT NULL DEFAULT NOW()
);

CREATE TABLE procrastinate_jobs (
    id bigserial PRIMARY KEY,
    queue_name character varying(128) NOT NULL,
    task_name character varying(128) NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    lock text,
    queueing_lock text,
    args jsonb DEFAULT '{}' NOT NULL,
    status procrastinate_job_status DEFAULT 'todo'::procrastinate_job_status NOT NULL,
    scheduled_at timestamp with time zone NULL,
    attempts integer DEFAULT 0 NOT NULL,
    abort_requested boolean DEFAULT false NOT NULL,
    worker_id bigint REFERENCES procrastinate_workers(id) ON DELETE SET NULL,
    CONSTRAINT check_not_todo_abort_requested CHECK (NOT (status = 'todo' AND abort_requested = true))
);

CREATE TABLE procrastinate_periodic_defers (
    id bigserial PRIMARY KEY,
    task_name character varying(128) NOT NULL,
    defer_timestamp bigint,
    job_id bigint REFERENCES procrastinate_jobs(id) NULL,
    periodic_id character varying(128) NOT NULL DEFAULT '',
    CONSTRAINT procrastinate_periodic_defers_unique UNIQUE (task_name, periodic_id, defer_timestamp)
);

CREATE TABLE procrastinate_events (
    id bigserial PRIMARY KEY,
    job_id bigint NOT NULL REFERENCES procrastinate_jobs ON DELETE CASCADE,
    type procrastinate_job_event_type,
    at timestamp with time zone DEFAULT NOW() NULL
);

-- Constraints & Indices

-- this prevents from having several jobs with the same queueing lock in the "todo" state
CREATE UNIQUE INDEX procrastinate_jobs_queueing_lock_idx_v1 ON procrastinate_jobs (queueing_lock) WHERE status = 'todo';
-- this prevents from having several jobs with the same lock in the "doing" state
CREATE UNIQUE INDEX procrastinate_jobs_lock_idx_v1 ON procrastinate_jobs (lock) WHERE status = 'doing';

-- Index for select_stalled_jobs_by_heartbeat query
CREATE INDEX idx_procrastinate_jobs_worker_not_null ON procrastinate_jobs(worker_id) WHERE worker_id IS NOT NULL AND status = 'doing'::procrastinate_job_status;

CREATE INDEX procrastinate_jobs_queue_name_idx_v1 ON procrastinate_jobs(queue_name);
CREATE INDEX procrastinate_jobs_id_lock_idx_v1 ON procrastinate_jobs (id, lock) WHERE status = ANY (ARRAY['todo'::procrastinate_job_status, 'doing'::procrastinate_job_status]);
CREATE INDEX procrastinate_jobs_priority_idx_v1 ON procrastinate_jobs(priority desc, id asc) WHERE (status = 'todo'::procrastinate_job_status);

CREATE INDEX procrastinate_events_job_id_fkey_v1 ON procrastinate_events(job_id);

CREATE INDEX procrastinate_periodic_defers_job_id_fkey_v1 ON procrastinate_periodic_defers(job_id);

CREATE INDEX idx_procrastinate_workers_last_heartbeat ON procrastinate_workers(last_heartbeat);

-- Functions
CREATE FUNCTION procrastinate_defer_jobs_v1(
    jobs procrastinate_job_to_defer_v1[]
)
    RETURNS bigint[]
    LANGUAGE plpgsql
AS $$
DECLARE
    job_ids bigint[];
BEGIN
    WITH inserted_jobs AS (
        INSERT INTO procrastinate_jobs (queue_name, task_name, priority, lock, queueing_lock, args, scheduled_at)
        SELECT (job).queue_name,
               (job).task_name,
               (job).priority,
               (job).lock,
               (job).queueing_lock,
               (job).args,
               (job).scheduled_at
        FROM unnest(jobs) AS job
        RETURNING id
    )
    SELECT array_agg(id) FROM inserted_jobs INTO job_ids;

    RETURN job_ids;
END;
$$;

CREATE FUNCTION procrastinate_defer_periodic_job_v2(
    _queue_name character varying,
    _lock character varying,
    _queueing_lock character varying,
    _task_name character varying,
    _priority integer,
    _periodic_id character varying,
    _defer_timestamp bigint,
    _args jsonb
)
    RETURNS bigint
    LANGUAGE plpgsql
AS $$
DECLARE
    _job_id bigint;
    _defer_id bigint;
BEGIN
    INSERT
        INTO procrastinate_periodic_defers (task_name, periodic_id, defer_timestamp)
        VALUES (_task_name, _periodic_id, _defer_timestamp)
        ON CONFLICT DO NOTHING
        RETURNING id into _defer_id;

    IF _defer_id IS NULL THEN
        RETURN NULL;
    END IF;

    UPDATE procrastinate_periodic_defers
        SET job_id = (
            SELECT COALESCE((
                SELECT unnest(procrastinate_defer_jobs_v1(
                    ARRAY[
                        ROW(
                            _queue_name,
                            _task_name,
                            _priority,
                            _lock,
                            _queueing_lock,
                            _args,
                            NULL::timestamptz
                        )
                    ]::procrastinate_job_to_defer_v1[]
                ))
            ), NULL)
        )
        WHERE id = _defer_id
        RETURNING job_id INTO _job_id;

    DELETE
        FROM procrastinate_periodic_defers
        USING (
            SELECT id
            FROM procrastinate_periodic_defers
            WHERE procrastinate_periodic_defers.task_name = _task_name
            AND procrastinate_periodic_defers.periodic_id = _periodic_id
            AND procrastinate_periodic_defers.defer_timestamp < _defer_timestamp
            ORDER BY id
            FOR UPDATE
        ) to_delete
        WHERE procrastinate_periodic_defers.id = to_delete.id;

    RETURN _job_id;
END;
$$;

CREATE FUNCTION procrastinate_fetch_job_v2(
    target_queue_names character varying[],
    p_worker_id bigint
)
    RETURNS procrastinate_jobs
    LANGUAGE plpgsql
AS $$
DECLARE
    found_jobs procrastinate_jobs;
BEGIN
    WITH candidate AS (
        SELECT jobs.*
            FROM procrastinate_jobs AS jobs
            WHERE
                -- reject the job if its lock has earlier or higher priority jobs
                NOT EXISTS (
                    SELECT 1
                        FROM procrastinate_jobs AS other_jobs
                        WHERE
                            jobs.lock IS NOT NULL
                            AND other_jobs.lock = jobs.lock
                            AND (
                                -- job with same lock is already running
                                other_jobs.status = 'doing'
                                OR
                                -- job with same lock is waiting and has higher priority (or same priority but was queued first)
                                (
                                    other_jobs.status = 'todo'
                                    AND (
                                        other_jobs.priority > jobs.priority
                                        OR (
                                        other_jobs.priority = jobs.priority
                                        AND other_jobs.id < jobs.id
                                        )
                                    )
                                )
                            )
                )
                AND jobs.status = 'todo'
                AND (target_queue_names IS NULL OR jobs.queue_name = ANY( target_queue_names ))
                AND (jobs.scheduled_at IS NULL OR jobs.scheduled_at <= now())
            ORDER BY jobs.priority DESC, jobs.id ASC LIMIT 1
            FOR UPDATE OF jobs SKIP LOCKED
    )
    UPDATE procrastinate_jobs
        SET status = 'doing', worker_id = p_worker_id
        FROM candidate
        WHERE procrastinate_jobs.id = candidate.id
        RETURNING procrastinate_jobs.* INTO found_jobs;

 RETURN found_jobs;
END;
$$;

CREATE FUNCTION procrastinate_finish_job_v1(job_id bigint, end_status procrastinate_job_status, delete_job boolean)
    RETURNS void
    LANGUAGE plpgsql
AS $$
DECLARE
    _job_id bigint;
BEGIN
    IF end_status NOT IN ('succeeded', 'failed', 'aborted') THEN
        RAISE 'End status should be either "succeeded", "failed" or "aborted" (job id: %)', job_id;
    END IF;
    IF delete_job THEN
        DELETE FROM procrastinate_jobs
        WHERE id = job_id AND status IN ('todo', 'doing')
        RETURNING id INTO _job_id;
    ELSE
        UPDATE procrastinate_jobs
        SET status = end_status,
            abort_requested = false,
            attempts = CASE status
                WHEN 'doing' THEN attempts + 1 ELSE attempts
            END
        WHERE id = job_id AND status IN ('todo', 'doing')
        RETURNING id INTO _job_id;
    END IF;
    IF _job_id IS NULL THEN
        RAISE 'Job was not found or not in "doing" or "todo" status (job id: %)', job_id;
    END IF;
END;
$$;

CREATE FUNCTION procrastinate_cancel_job_v1(job_id bigint, abort boolean, delete_job boolean)
    RETURNS bigint
    LANGUAGE plpgsql
AS $$
DECLARE
    _job_id bigint;
BEGIN
    IF delete_job THEN
        DELETE FROM procrastinate_jobs
        WHERE id = job_id AND status = 'todo'
        RETURNING id INTO _job_id;
    END IF;
    IF _job_id IS NULL THEN
        IF abort THEN
            UPDATE procrastinate_jobs
            SET abort_requested = true,
                status = CASE status
                    WHEN 'todo' THEN 'cancelled'::procrastinate_job_status ELSE status
                END
            WHERE id = job_id AND status IN ('todo', 'doing')
            RETURNING id INTO _job_id;
        ELSE
            UPDATE procrastinate_jobs
            SET status = 'cancelled'::procrastinate_job_status
            WHERE id = job_id AND status = 'todo'
            RETURNING id INTO _job_id;
        END IF;
    END IF;
    RETURN _job_id;
END;
$$;

CREATE FUNCTION procrastinate_retry_job_v1(
    job_id bigint,
    retry_at timestamp with time zone,
    new_priority integer,
    new_queue_name character varying,
    new_lock character varying
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _job_id bigint;
    _abort_requested boolean;
BEGIN
    SELECT abort_requested FROM procrastinate_jobs
    WHERE id = job_id AND status = 'doing'
    FOR UPDATE
    INTO _abort_requested;
    IF _abort_requested THEN
        UPDATE procrastinate_jobs
        SET status = 'failed'::procrastinate_job_status
        WHERE id = job_id AND status = 'doing'
        RETURNING id INTO _job_id;
    ELSE
        UPDATE procrastinate_jobs
        SET status = 'todo'::procrastinate_job_status,
            attempts = attempts + 1,
            scheduled_at = retry_at,
            priority = COALESCE(new_priority, priority),
            queue_name = COALESCE(new_queue_name, queue_name),
            lock = COALESCE(new_lock, lock)
        WHERE id = job_id AND status = 'doing'
        RETURNING id INTO _job_id;
    END IF;

    IF _job_id IS NULL THEN
        RAISE 'Job was not found or not in "doing" status (job id: %)', job_id;
    END IF;
END;
$$;

CREATE FUNCTION procrastinate_retry_job_v2(
    job_id bigint,
    retry_at timestamp with time zone,
    new_priority integer,
    new_queue_name character varying,
    new_lock character varying
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    _job_id bigint;
    _abort_requested boolean;
    _current_status procrastinate_job_status;
BEGIN
    SELECT status, abort_requested FROM procrastinate_jobs
    WHERE id = job_id AND status IN ('doing', 'failed')
    FOR UPDATE
    INTO _current_status, _abort_requested;
    IF _current_status = 'doing' AND _abort_requested THEN
        UPDATE procrastinate_jobs
        SET status = 'failed'::procrastinate_job_status
        WHERE id = job_id AND status = 'doing'
        RETURNING id INTO _job_id;
    ELSE
        UPDATE procrastinate_jobs
        SET status = 'todo'::procrastinate_job_status,
            attempts = attempts + 1,
            scheduled_at = retry_at,
            priority = COALESCE(new_priority, priority),
            queue_name = COALESCE(new_queue_name, queue_name),
            lock = COALESCE(new_lock, lock)
        WHERE id = job_id AND status IN ('doing', 'failed')
        RETURNING id INTO _job_id;
    END IF;

    IF _job_id IS NULL THEN
        RAISE 'Job was not found or has an invalid status to retry (job id: %)', job_id;
    END IF;

END;
$$;

CREATE FUNCTION procrastinate_notify_queue_job_inserted_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
DECLARE
    payload TEXT;
BEGIN
    SELECT json_build_object('type', 'job_inserted', 'job_id', NEW.id)::text INTO payload;
    PERFORM pg_notify('procrastinate_queue_v1#' || NEW.queue_name, payload);
    PERFORM pg_notify('procrastinate_any_queue_v1', payload);
    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_notify_queue_abort_job_v1()
RETURNS trigger
    LANGUAGE plpgsql
AS $$
DECLARE
    payload TEXT;
BEGIN
    SELECT json_build_object('type', 'abort_job_requested', 'job_id', NEW.id)::text INTO payload;
    PERFORM pg_notify('procrastinate_queue_v1#' || NEW.queue_name, payload);
    PERFORM pg_notify('procrastinate_any_queue_v1', payload);
    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_trigger_function_status_events_insert_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO procrastinate_events(job_id, type)
        VALUES (NEW.id, 'deferred'::procrastinate_job_event_type);
    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_trigger_function_status_events_update_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    WITH t AS (
        SELECT CASE
            WHEN OLD.status = 'todo'::procrastinate_job_status
                AND NEW.status = 'doing'::procrastinate_job_status
                THEN 'started'::procrastinate_job_event_type
            WHEN OLD.status = 'doing'::procrastinate_job_status
                AND NEW.status = 'todo'::procrastinate_job_status
                THEN 'deferred_for_retry'::procrastinate_job_event_type
            WHEN OLD.status = 'doing'::procrastinate_job_status
                AND NEW.status = 'failed'::procrastinate_job_status
                THEN 'failed'::procrastinate_job_event_type
            WHEN OLD.status = 'doing'::procrastinate_job_status
                AND NEW.status = 'succeeded'::procrastinate_job_status
                THEN 'succeeded'::procrastinate_job_event_type
            WHEN OLD.status = 'todo'::procrastinate_job_status
                AND (
                    NEW.status = 'cancelled'::procrastinate_job_status
                    OR NEW.status = 'failed'::procrastinate_job_status
                    OR NEW.status = 'succeeded'::procrastinate_job_status
                )
                THEN 'cancelled'::procrastinate_job_event_type
            WHEN OLD.status = 'doing'::procrastinate_job_status
                AND NEW.status = 'aborted'::procrastinate_job_status
                THEN 'aborted'::procrastinate_job_event_type
            WHEN OLD.status = 'failed'::procrastinate_job_status
                AND NEW.status = 'todo'::procrastinate_job_status
                THEN 'retried'::procrastinate_job_event_type
            ELSE NULL
        END as event_type
    )
    INSERT INTO procrastinate_events(job_id, type)
        SELECT NEW.id, t.event_type
        FROM t
        WHERE t.event_type IS NOT NULL;
    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_trigger_function_scheduled_events_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO procrastinate_events(job_id, type, at)
        VALUES (NEW.id, 'scheduled'::procrastinate_job_event_type, NEW.scheduled_at);

    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_trigger_abort_requested_events_procedure_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    INSERT INTO procrastinate_events(job_id, type)
        VALUES (NEW.id, 'abort_requested'::procrastinate_job_event_type);
    RETURN NEW;
END;
$$;

CREATE FUNCTION procrastinate_unlink_periodic_defers_v1()
    RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE procrastinate_periodic_defers
    SET job_id = NULL
    WHERE job_id = OLD.id;
    RETURN OLD;
END;
$$;

CREATE FUNCTION procrastinate_register_worker_v1()
    RETURNS TABLE(worker_id bigint)
    LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY
    INSERT INTO procrastinate_workers DEFAULT VALUES
    RETURNING procrastinate_workers.id;
END;
$$;

CREATE FUNCTION procrastinate_unregister_worker_v1(worker_id bigint)
    RETURNS void
    LANGUAGE plpgsql
AS $$
BEGIN
    DELETE FROM procrastinate_workers
    WHERE id = worker_id;
END;
$$;

CREATE FUNCTION procrastinate_update_heartbeat_v1(worker_id bigint)
    RETURNS void
    LANGUAGE plpgsql
AS $$
BEGIN
    UPDATE procrastinate_workers
    SET last_heartbeat = NOW()
    WHERE id = worker_id;
END;
$$;

CREATE FUNCTION procrastinate_prune_stalled_workers_v1(seconds_since_heartbeat float)
    RETURNS TABLE(worker_id bigint)
    LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY
    DELETE FROM procrastinate_workers
    WHERE last_heartbeat < NOW() - (seconds_since_heartbeat || 'SECOND')::INTERVAL
    RETURNING procrastinate_workers.id;
END;
$$;

-- Triggers

CREATE TRIGGER procrastinate_jobs_notify_queue_job_inserted_v1
    AFTER INSERT ON procrastinate_jobs
    FOR EACH ROW WHEN ((new.status = 'todo'::procrastinate_job_status))
    EXECUTE PROCEDURE procrastinate_notify_queue_job_inserted_v1();

CREATE TRIGGER procrastinate_jobs_notify_queue_job_aborted_v1
    AFTER UPDATE OF abort_requested ON procrastinate_jobs
    FOR EACH ROW WHEN ((old.abort_requested = false AND new.abort_requested = true AND new.status = 'doing'::procrastinate_job_status))
    EXECUTE PROCEDURE procrastinate_notify_queue_abort_job_v1();

CREATE TRIGGER procrastinate_trigger_status_events_update_v1
    AFTER UPDATE OF status ON procrastinate_jobs
    FOR EACH ROW
    EXECUTE PROCEDURE procrastinate_trigger_function_status_events_update_v1();

CREATE TRIGGER procrastinate_trigger_status_events_insert_v1
    AFTER INSERT ON procrastinate_jobs
    FOR EACH ROW WHEN ((new.status = 'todo'::procrastinate_job_status))
    EXECUTE PROCEDURE procrastinate_trigger_function_status_events_insert_v1();

CREATE TRIGGER procrastinate_trigger_scheduled_events_v1
    AFTER UPDATE OR INSERT ON procrastinate_jobs
    FOR EACH ROW WHEN ((new.scheduled_at IS NOT NULL AND new.status = 'todo'::procrastinate_job_status))
    EXECUTE PROCEDURE procrastinate_trigger_function_scheduled_events_v1();

CREATE TRIGGER procrastinate_trigger_abort_requested_events_v1
    AFTER UPDATE OF abort_requested ON procrastinate_jobs
    FOR EACH ROW WHEN ((new.abort_requested = true))
    EXECUTE PROCEDURE procrastinate_trigger_abort_requested_events_procedure_v1();

CREATE TRIGGER procrastinate_trigger_delete_jobs_v1
    BEFORE DELETE ON procrastinate_jobs
    FOR EACH ROW EXECUTE PROCEDURE procrastinate_unlink_periodic_defers_v1();

set local search_path = rag, pg_temp;

-- Called by a login that may touch no table of it; and found whatever the search path of the caller.
do $$
declare
    found record;
begin
    for found in
        select cast(cast(process.oid as regprocedure) as text) as signature, type.typname
        from pg_proc as process
        join pg_type as type on type.oid = process.prorettype
        where process.pronamespace = to_regnamespace('jobs')
    loop
        execute format('alter function %s set search_path = jobs, pg_temp', found.signature);
        execute format('alter function %s security definer', found.signature);
    end loop;
end
$$;

-- Nothing of it is to be found by anybody who may not.
comment on table jobs.procrastinate_jobs is 'The queue: a job that waits or is being done; what it is about stands in rag.rag_jobs';
comment on table jobs.procrastinate_workers is 'Workers and when each last said that it is there';
comment on table jobs.procrastinate_events is 'What became of a job and when; goes with the job';
comment on table jobs.procrastinate_periodic_defers is 'Jobs that repeat; there are none';
-- Who is asking, and which access classes are theirs. `my_principal` is the only place where the
-- session variables are read, `begin_as` the only place where they are set.

-- HMAC-SHA-256 with what the server itself has; keys hold both padded forms of their secret.
create function signature_holds(parts text[], signature text)
returns boolean
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
declare
    -- Key, expiry, code. Longer texts are not even looked at. Taken apart without a regular expression:
    -- one that counts to 64 takes 50 to 180 µs, all the rest of this function 15.
    piece constant text[] := case
        when length(signature_holds.signature) <= 128 then string_to_array(signature_holds.signature, '.')
    end;
    message bytea;
    code text;
begin
    if (cardinality(piece) = 3 and length(piece[2]) <= 12 and piece[2] ~ '^[1-9][0-9]*$') is not true then
        return false;
    end if;
    -- The time at which the transaction began: what began in time may end. The service signs for a
    -- minute, `rag db psql` for half a day; nothing is signed for longer.
    if cast(piece[2] as numeric) - extract(epoch from now()) not between 0 and 43200 then
        return false;
    end if;
    -- The expiry comes before whatever may vary in number.
    message := convert_to(
        array_to_json(parts[1:4] || piece[2] || parts[5:])::text,
        'UTF8'
    );
    select encode(sha256(key.outer_pad || sha256(key.inner_pad || message)), 'hex') into code
    from rag_signing_keys as key
    where key.key_id = piece[1];
    return coalesce(code = piece[3], false);
end
$$;

comment on function signature_holds(text[], text) is 'Whether a signature, key.expiry.code, is one of the service over these values: the code is HMAC-SHA-256 of the JSON array of the first four, the expiry and the others. Expiry in seconds since 1970, compared with the start of the transaction';

create function my_principal(
    out tenant_id text, out user_id bigint, out project_id text, out tags text[],
    out projects text[], out user_scope text
)
returns setof record
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := current_setting('app.tenant_id', true);
    users constant text := current_setting('app.user_id', true);
    project constant text := coalesce(current_setting('app.project_id', true), '');
    tag_list constant text := current_setting('app.tags', true);
begin
    if session_user in ('rag_app', 'rag_publisher', 'rag_worker') then
        -- Malformed is nobody, without an error. The list of tags is checked by a pattern and not by
        -- `is json`, which runs out of stack on deep nesting and lets through escapes that jsonb
        -- refuses with an error.
        if (
            length(tenant) between 1 and 128 and tenant !~ '[[:cntrl:]]'
            and users ~ '^(0|[1-9][0-9]{0,17})$'
            and length(project) <= 128 and project !~ '[[:cntrl:]]'
            and octet_length(tag_list) <= 65536
            and tag_list ~ '^[ \t\n\r]*\[[ \t\n\r]*("([^"\\[:cntrl:]]|\\["\\/])*"([ \t\n\r]*,[ \t\n\r]*"([^"\\[:cntrl:]]|\\["\\/])*")*)?[ \t\n\r]*\][ \t\n\r]*$'
        ) is true then
            tags := array(select jsonb_array_elements_text(cast(tag_list as jsonb)));
            -- Whoever has the password of the service can set variables; only the service can sign.
            if signature_holds(
                array[cast(session_user as text), tenant, users, project] || tags,
                current_setting('app.signature', true)
            ) then
                tenant_id := tenant;
                user_id := nullif(cast(users as bigint), 0);
                project_id := nullif(project, '');
                tags := case when tags = '{}' then array['public'] else tags end;
                return next;
            end if;
        end if;
    elsif (select count(*) from rag_analysts as analyst where analyst.role_name = session_user) = 1 then
        return query
        select
            analyst.tenant_id,
            cast(null as bigint),
            cast(null as text),
            analyst.tags,
            analyst.projects,
            analyst.user_scope
        from rag_analysts as analyst
        where analyst.role_name = session_user;
    end if;
end
$$;

comment on function my_principal() is 'The principal of this session: one row, or none. For the logins of the service it is what the session variables name, when they are well-formed and app.signature was made by the service over exactly them; app.user_id 0 is a principal without a user. For an analyst it is their row in rag_analysts, user_scope saying so, and the variables mean nothing. The only place where the variables are read';

create function begin_as(tenant_id text, user_id bigint, project_id text, tags text[], signature text)
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    wanted text[] := array[
        begin_as.tenant_id,
        coalesce(begin_as.user_id, 0)::text,
        coalesce(begin_as.project_id, ''),
        array_to_json(coalesce(begin_as.tags, '{}'))::text
    ];
    -- After a transaction that set them, the variables read '' and not null.
    present text[] := array[
        nullif(current_setting('app.tenant_id', true), ''),
        nullif(current_setting('app.user_id', true), ''),
        nullif(current_setting('app.project_id', true), ''),
        nullif(current_setting('app.tags', true), '')
    ];
begin
    if coalesce(begin_as.tenant_id, '') = '' then
        raise exception 'a principal has a tenant' using errcode = 'insufficient_privilege';
    end if;
    if array_remove(present, null) <> '{}' and present is distinct from array[
        wanted[1], wanted[2], nullif(wanted[3], ''), wanted[4]
    ] then
        raise exception 'this transaction already has another principal'
            using errcode = 'insufficient_privilege';
    end if;
    -- set_config() does not reach the workers of a distributed database; set local does.
    execute format('set local app.tenant_id = %L', wanted[1]);
    execute format('set local app.user_id = %L', wanted[2]);
    execute format('set local app.project_id = %L', wanted[3]);
    execute format('set local app.tags = %L', wanted[4]);
    execute format('set local app.signature = %L', coalesce(begin_as.signature, ''));
    -- Nobody would see nothing, without an error; that is right for an attacker and a riddle for
    -- an operator whose key or clock is wrong.
    if not exists (select from my_principal()) then
        raise exception 'the signature of this identity does not hold'
            using errcode = 'invalid_authorization_specification';
    end if;
end
$$;

comment on function begin_as(text, bigint, text, text[], text) is 'Sets the principal for the rest of the transaction; first statement of each, outside any savepoint. user_id null: no user, public rows only; project_id null: no project, *: all of the user''s. Raises 42501 when another principal is already set, 28000 when the signature does not hold';

create function my_tenant_id()
returns text
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return (select me.tenant_id from my_principal() as me);
end
$$;

comment on function my_tenant_id() is 'The principal''s tenant, null for nobody';

create function my_user_id()
returns bigint
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return (select me.user_id from my_principal() as me);
end
$$;

comment on function my_user_id() is 'The principal''s user, null for nobody, for an analyst and for a principal without a user';

create function my_tags()
returns text[]
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return coalesce((select me.tags from my_principal() as me), '{}');
end
$$;

comment on function my_tags() is 'The principal''s tags, none for nobody';

create function i_am_analyst()
returns boolean
language plpgsql
stable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return exists (select from my_principal() as me where me.user_scope is not null);
end
$$;

comment on function i_am_analyst() is 'Whether the principal is a person of rag_analysts';

-- STABLE and never IMMUTABLE: a plan that has folded one caller's classes would serve them to the next.
create function my_access_ids()
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
declare
    me record;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        return '{}';
    end if;
    if me.user_scope is not null then
        return array(
            select class.access_id
            from rag_access_classes as class
            where class.tenant_id = me.tenant_id
                and class.tags && me.tags
                and case class.scope
                    when 'public' then true
                    when 'project' then '*' = any(me.projects) or class.project_id = any(me.projects)
                    when 'user' then me.user_scope = 'text'
                end
        );
    end if;
    return array(
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'public'
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'user'
            and class.user_id = me.user_id
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = 'project'
            and class.user_id = me.user_id
            and (me.project_id = '*' or class.project_id = me.project_id)
            and class.tags && me.tags
        union all
        select class.access_id
        from rag_project_members as membership
        join rag_access_classes as class
            on class.tenant_id = membership.tenant_id
            and class.scope = 'project'
            and class.user_id = membership.owner_user_id
            and class.project_id = membership.project_id
        where membership.tenant_id = me.tenant_id
            and membership.member_user_id = me.user_id
            and (me.project_id = '*' or membership.project_id = me.project_id)
            and class.tags && me.tags
    );
end
$$;

comment on function my_access_ids() is 'The access classes that the principal may read; empty for nobody. Policies compare access_id with it, evaluated once per statement';

create function my_classes()
returns table (
    tenant_id text, access_id bigint, scope text, user_id bigint, project_id text, tags text[], may_write boolean
)
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        return;
    end if;
    return query
    select
        class.tenant_id,
        class.access_id,
        class.scope,
        class.user_id,
        class.project_id,
        class.tags,
        (me.user_scope is null and case class.scope
            when 'public' then session_user = 'rag_publisher'
            else class.user_id = me.user_id or exists (
                select 1
                from rag_project_members as membership
                where membership.tenant_id = me.tenant_id
                    and membership.member_user_id = me.user_id
                    and membership.owner_user_id = class.user_id
                    and membership.project_id = class.project_id
                    and membership.may_write
            )
        end) is true
    from rag_access_classes as class
    where class.tenant_id = me.tenant_id
        and class.access_id = any((select my_access_ids())::bigint[]);
end
$$;

comment on function my_classes() is 'The access classes that the principal may read, one row each, and whether it may write them: of those it may read, its own, those of projects shared for writing, and the public ones when the login is rag_publisher';

create function my_writable_access_ids()
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return array(select mine.access_id from my_classes() as mine where mine.may_write);
end
$$;

comment on function my_writable_access_ids() is 'The access classes that the principal may write; empty for nobody';

create function narrowed_access_ids(only_scope text)
returns bigint[]
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    if narrowed_access_ids.only_scope is null
        or narrowed_access_ids.only_scope in ('organization', 'documents') then
        return my_access_ids();
    end if;
    if narrowed_access_ids.only_scope not in ('public', 'user', 'project') then
        raise exception 'unknown scope' using
            errcode = 'invalid_parameter_value',
            hint = 'One of public, user, project, organization, documents, or null for all that is visible.';
    end if;
    return array(
        select class.access_id
        from my_principal() as me
        join rag_access_classes as class
            on class.tenant_id = me.tenant_id
            and class.access_id = any((select my_access_ids())::bigint[])
        where case narrowed_access_ids.only_scope
            when 'public' then class.scope = 'public'
            when 'user' then class.user_id = me.user_id
            -- "That project only": a principal of all projects has not named one.
            when 'project' then class.scope = 'project' and me.project_id <> '*'
        end
    );
end
$$;

comment on function narrowed_access_ids(text) is 'Of the classes that the principal may read, those of a request''s scope. public; user: all that the user owns, projects included; project: the one that the principal names; organization, documents and null: all. Raises 22023 for any other word';

create function tenant_lock(tenant_id text)
returns bigint
language sql
immutable
parallel safe
begin atomic
    select hashtextextended('palisade tenant ' || tenant_id, 0);
end;

comment on function tenant_lock(text) is 'Number of the advisory lock of a tenant: shared by everybody who writes, exclusive for rag.forget()';

create function access_class(scope text, user_id bigint, project_id text, tags text[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    sorted_tags text[] := array(select distinct tag from unnest(access_class.tags) as tag order by tag);
    digest bytea;
    found_id bigint;
begin
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    -- Whoever is about to write in a tenant holds off its erasure until the transaction ends; taken
    -- before anything is looked up that an erasure changes.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    if sorted_tags = '{}' then
        sorted_tags := array['public'];
    end if;
    -- What one cannot read one cannot write: otherwise the next version would not find this one.
    if not sorted_tags && me.tags then
        raise exception 'none of the tags is the principal''s' using errcode = 'insufficient_privilege';
    end if;
    if (case access_class.scope
        when 'public' then session_user = 'rag_publisher'
        when 'user' then access_class.user_id = me.user_id
        when 'project' then
            (me.project_id = '*' or access_class.project_id = me.project_id)
            and (access_class.user_id = me.user_id or exists (
                select 1
                from rag_project_members as membership
                where membership.tenant_id = me.tenant_id
                    and membership.member_user_id = me.user_id
                    and membership.owner_user_id = access_class.user_id
                    and membership.project_id = access_class.project_id
                    and membership.may_write
            ))
        else false
    end) is not true then
        raise exception 'the principal may not write to this scope' using errcode = 'insufficient_privilege';
    end if;

    digest := sha256(convert_to(array_to_json(sorted_tags)::text, 'UTF8'));
    loop
        select class.access_id into found_id
        from rag_access_classes as class
        where class.tenant_id = me.tenant_id
            and class.scope = access_class.scope
            and class.user_id is not distinct from access_class.user_id
            and class.project_id is not distinct from access_class.project_id
            and class.tags_digest = digest;
        exit when found;
        insert into rag_access_classes (tenant_id, scope, user_id, project_id, tags, tags_digest)
        values (me.tenant_id, access_class.scope, access_class.user_id, access_class.project_id, sorted_tags, digest)
        on conflict do nothing;
    end loop;
    return found_id;
end
$$;

comment on function access_class(text, bigint, text, text[]) is 'The access class for a document that the principal wants to write, made when it is the first; raises 42501 when the principal may not write there';

create function class_reads(access_id bigint, scope text, user_id bigint, project_id text, tags text[])
returns boolean
language plpgsql
stable
security definer
parallel safe
set search_path = rag, pg_temp
as $$
begin
    return exists (
        select
        from rag_access_classes as class
        where class.tenant_id = (select my_tenant_id())
            and class.access_id = class_reads.access_id
            and class.access_id = any((select my_writable_access_ids())::bigint[])
            and class.scope = class_reads.scope
            and class.user_id is not distinct from class_reads.user_id
            and class.project_id is not distinct from class_reads.project_id
            and class.tags = class_reads.tags
    );
end
$$;

comment on function class_reads(bigint, text, bigint, text, text[]) is 'Whether a class that the principal may write has this scope, owner and tags; false for every other class';

create function whoami(
    out tenant_id text, out user_id bigint, out project_id text, out tags text[],
    out access_id bigint, out scope text, out class_user_id bigint, out class_project_id text,
    out class_tags text[], out may_write boolean
)
returns setof record
language sql
stable
begin atomic
    select
        me.tenant_id, me.user_id, me.project_id, me.tags,
        class.access_id, class.scope, class.user_id, class.project_id, class.tags, class.may_write
    from my_principal() as me
    left join my_classes() as class on true
    order by class.scope, class.user_id, class.project_id, class.tags, class.access_id;
end;

comment on function whoami() is 'The principal as the database understands it, one row for each access class that it may read (one row with nulls when there is none); no row for nobody';

create function load_service_keys(proof text)
returns table (
    key_id text, tenant_id text, secret_sha256 bytea, actions text[], scopes text[], tags text[],
    act_as boolean, user_ids bigint[], project_ids text[], expires_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- The table names tenants: the password of the service alone does not open it.
    if not signature_holds(array[cast(session_user as text), 'service_keys'], load_service_keys.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    select
        key.key_id, key.tenant_id, key.secret_sha256, key.actions, key.scopes, key.tags,
        key.act_as, key.user_ids, key.project_ids, key.expires_at
    from rag_service_keys as key
    where key.revoked_at is null
        and key.expires_at > now();
end
$$;

comment on function load_service_keys(text) is 'The service keys that are valid now, for a login that proves with a signature over its name and the word service_keys that it is the service; raises 28000 otherwise';

create function proof_holds(purpose text, proof text)
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return signature_holds(array[cast(session_user as text), proof_holds.purpose], proof_holds.proof);
end
$$;

comment on function proof_holds(text, text) is 'Whether the login proves, with a signature over its name and this word, that it is the service';
-- Row security. Forced, so that it binds the owner as well; one policy for each command and role;
-- a restrictive policy on each table that no later permissive one can widen across tenants.
-- `(select …)` is evaluated once per statement, not once per row.

do $$
declare
    table_name text;
begin
    foreach table_name in array array[
        'rag_access_classes', 'rag_project_members', 'rag_documents', 'rag_chunks', 'rag_tombstones',
        'rag_erasures', 'rag_query_logs', 'rag_query_log_chunks', 'rag_signing_keys', 'rag_analysts',
        'rag_service_keys', 'rag_assertions', 'rag_class_indexes', 'rag_class_languages', 'rag_class_lexemes',
        'rag_calibrations', 'rag_feedback', 'rag_tags', 'rag_prompts', 'rag_retractions',
        'rag_limits', 'rag_rate_buckets', 'rag_usage', 'rag_models', 'rag_jobs', 'rag_claims',
        'rag_synchronisations', 'rag_conversation_messages', 'rag_conversation_summaries'
    ]
    loop
        execute format('alter table %I enable row level security', table_name);
        execute format('alter table %I force row level security', table_name);
    end loop;
end
$$;

-- The definer functions on the query path find the caller's classes, so their owner reads them all; and
-- they alone make new ones.
create policy find_classes on rag_access_classes
for select to rag_search
using (true);
comment on policy find_classes on rag_access_classes is 'my_access_ids() and its siblings look among all classes';

create policy make_classes on rag_access_classes
for insert to rag_search
with check (true);
comment on policy make_classes on rag_access_classes is 'access_class() adds the first document''s class';

create policy find_members on rag_project_members
for select to rag_search
using (true);
comment on policy find_members on rag_project_members is 'my_access_ids() resolves shared projects';

create policy find_candidates on rag_chunks
for select to rag_search
using (true);
comment on policy find_candidates on rag_chunks is 'keyword_candidates() scores within the classes that my_access_ids() gives it; its rows are joined again under the caller''s own policy';

create policy list_documents on rag_documents
for select to rag_search
using (true);
comment on policy list_documents on rag_documents is 'my_listed_documents() shows analysts that documents exist; no column of content is granted';

create policy verify_signatures on rag_signing_keys
for select to rag_search
using (true);
comment on policy verify_signatures on rag_signing_keys is 'signature_holds(); nobody else reads a key';

create policy find_analysts on rag_analysts
for select to rag_search
using (true);
comment on policy find_analysts on rag_analysts is 'my_principal() looks up the login';

create policy load_keys on rag_service_keys
for select to rag_search
using (true);
comment on policy load_keys on rag_service_keys is 'load_service_keys() hands them to the service';

-- Tenant belts, one for each command that is granted, so that no policy is FOR ALL. For the logins the
-- condition is said twice: the first time the planner may use it for an index; the second, which it
-- cannot merge with a condition of the query's own and takes for the cheapest one, comes before any of
-- these on a row. So no row of another tenant is ever compared with what the caller asks for, and
-- EXPLAIN ANALYZE has nothing to tell about it. What rag_principal asks for is fixed.
do $$
declare
    belt record;
    same_tenant constant text := 'tenant_id = (select my_tenant_id())';
    same_tenant_first constant text := same_tenant || ' and tenant_id = any(array[(select my_tenant_id())])';
begin
    for belt in
        select
            granted.table_name,
            granted.roles,
            command,
            case when granted.roles = 'rag_principal' then same_tenant else same_tenant_first end as condition
        from (values
            ('rag_project_members', 'rag_principal', array['select', 'insert', 'update', 'delete']),
            ('rag_documents', 'rag_principal', array['select']),
            ('rag_documents', 'rag_app, rag_publisher, rag_worker', array['select', 'insert', 'update', 'delete']),
            ('rag_chunks', 'rag_principal', array['select']),
            ('rag_chunks', 'rag_app, rag_publisher, rag_worker', array['select', 'insert', 'delete']),
            ('rag_tombstones', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_synchronisations', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_query_logs', 'rag_principal', array['select']),
            ('rag_query_logs', 'rag_app, rag_publisher', array['insert']),
            ('rag_query_log_chunks', 'rag_principal', array['select']),
            ('rag_calibrations', 'rag_principal', array['select']),
            ('rag_feedback', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_tags', 'rag_principal', array['select']),
            ('rag_prompts', 'rag_principal', array['select']),
            ('rag_jobs', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_claims', 'rag_principal', array['select', 'insert', 'update', 'delete']),
            ('rag_conversation_messages', 'rag_principal', array['select', 'insert', 'update']),
            ('rag_conversation_summaries', 'rag_principal', array['select', 'insert']),
            ('rag_query_log_chunks', 'rag_app, rag_publisher', array['insert']),
            ('rag_assertions', 'rag_app, rag_publisher', array['insert']),
            ('rag_retractions', 'rag_app, rag_publisher', array['insert'])
        ) as granted (table_name, roles, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I as restrictive for %s to %s %s %s',
            case when belt.roles = 'rag_principal' then 'own_tenant_reading_' else 'own_tenant_' end || belt.command,
            belt.table_name,
            belt.command,
            belt.roles,
            case when belt.command <> 'insert' then format('using (%s)', belt.condition) end,
            case when belt.command in ('insert', 'update') then format('with check (%s)', belt.condition) end
        );
        execute format(
            'comment on policy %I on %I is %L',
            case when belt.roles = 'rag_principal' then 'own_tenant_reading_' else 'own_tenant_' end || belt.command,
            belt.table_name,
            'Never across tenants'
        );
    end loop;
end
$$;

-- Memberships: owner and member see them, the owner changes them; so may operators.
create policy read_members on rag_project_members
for select to rag_principal
using (owner_user_id = (select my_user_id()) or member_user_id = (select my_user_id()));
comment on policy read_members on rag_project_members is 'Projects that the principal shares or has been given';

create policy share_own_project on rag_project_members
for insert to rag_principal
with check (owner_user_id = (select my_user_id()));
comment on policy share_own_project on rag_project_members is 'A project is shared by its owner';

create policy change_own_sharing on rag_project_members
for update to rag_principal
using (owner_user_id = (select my_user_id()))
with check (owner_user_id = (select my_user_id()));
comment on policy change_own_sharing on rag_project_members is 'Whether a member may write is the owner''s to say';

create policy unshare_own_project on rag_project_members
for delete to rag_principal
using (owner_user_id = (select my_user_id()));
comment on policy unshare_own_project on rag_project_members is 'The owner ends it';

create policy operate_members_select on rag_project_members
for select to rag_operator
using (true);
comment on policy operate_members_select on rag_project_members is 'Operators see who shares what, in every tenant';

create policy operate_members_insert on rag_project_members
for insert to rag_operator
with check (true);
comment on policy operate_members_insert on rag_project_members is 'Operators share projects';

create policy operate_members_update on rag_project_members
for update to rag_operator
using (true)
with check (true);
comment on policy operate_members_update on rag_project_members is 'Operators change whether a member may write';

create policy operate_members_delete on rag_project_members
for delete to rag_operator
using (true);
comment on policy operate_members_delete on rag_project_members is 'Operators end the sharing of projects';

-- Documents.
create policy read_documents on rag_documents
for select to rag_app, rag_publisher, rag_worker, rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_documents on rag_documents is 'Documents of the classes that the principal may read';

create policy add_documents on rag_documents
for insert to rag_app, rag_publisher, rag_worker
with check (
    access_id = any((select my_writable_access_ids())::bigint[])
    -- What people read of scope, owner and tags must not lie.
    and class_reads(access_id, scope, user_id, project_id, tags)
);
comment on policy add_documents on rag_documents is 'Documents of the classes that the principal may write, with the scope, owner and tags of their class';

create policy change_documents on rag_documents
for update to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_documents on rag_documents is 'Documents of the classes that the principal may write';

create policy remove_documents on rag_documents
for delete to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_documents on rag_documents is 'Documents of the classes that the principal may write';

-- Chunks. They are replaced, never updated.
create policy read_chunks on rag_chunks
for select to rag_app, rag_publisher, rag_worker, rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_chunks on rag_chunks is 'Chunks of the classes that the principal may read';

create policy add_chunks on rag_chunks
for insert to rag_app, rag_publisher, rag_worker
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

create policy remove_chunks on rag_chunks
for delete to rag_app, rag_publisher, rag_worker
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

-- Tombstones. Nobody removes one; a retraction is lifted by its column.
create policy read_tombstones on rag_tombstones
for select to rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may read';

create policy add_tombstones on rag_tombstones
for insert to rag_principal
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

create policy raise_tombstones on rag_tombstones
for update to rag_principal
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy raise_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

-- What came of synchronisations.
create policy read_synchronisations on rag_synchronisations
for select to rag_principal
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may read';

create policy add_synchronisations on rag_synchronisations
for insert to rag_principal
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may write';

create policy change_synchronisations on rag_synchronisations
for update to rag_principal
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_synchronisations on rag_synchronisations is 'Sources whose documents are of classes that the principal may write';

create policy count_erasures on rag_erasures
for select to rag_principal
using (true);
comment on policy count_erasures on rag_erasures is 'find_source() counts the erasures of a source; digests only';

create policy read_calibrations on rag_calibrations
for select to rag_principal
using (tenant_id = (select my_tenant_id()));
comment on policy read_calibrations on rag_calibrations is 'What was found better for the principal''s tenant; it holds for everybody there';

-- Query logs: each user's own. A principal without a user writes them and reads none.
create policy read_logs on rag_query_logs
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_logs on rag_query_logs is 'The principal''s own questions; an analyst''s tenant''s';

create policy add_logs on rag_query_logs
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_logs on rag_query_logs is 'The principal''s own questions';

create policy read_log_chunks on rag_query_log_chunks
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions; of an analyst''s tenant''s';

create policy add_log_chunks on rag_query_log_chunks
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';

-- What people made of their answers.
create policy read_feedback on rag_feedback
for select to rag_principal
using (user_id = (select my_user_id()) or (select i_am_analyst()));
comment on policy read_feedback on rag_feedback is 'The principal''s own words; of an analyst''s tenant';

create policy give_feedback on rag_feedback
for insert to rag_principal
with check (
    user_id = (select my_user_id())
    and (access_id is null or access_id = any((select my_access_ids())::bigint[]))
);
comment on policy give_feedback on rag_feedback is 'The principal''s own words, in classes that it may read';

create policy change_feedback on rag_feedback
for update to rag_principal
using (user_id = (select my_user_id()))
with check (user_id = (select my_user_id()));
comment on policy change_feedback on rag_feedback is 'The principal''s own words; which class they count in is never changed';

create policy count_feedback on rag_feedback
for select to rag_search
using (true);
comment on policy count_feedback on rag_feedback is 'feedback_support() counts within the classes that my_access_ids() gives it';

-- Whom to ask, and what a tenant tells the model.
create policy read_tags on rag_tags
for select to rag_principal
using (name = any((select my_tags())::text[]));
comment on policy read_tags on rag_tags is 'Owners of the tags that the principal holds';

create policy read_prompts on rag_prompts
for select to rag_principal
using (tenant_id = (select my_tenant_id()));
comment on policy read_prompts on rag_prompts is 'The prompt of the principal''s tenant';

create policy add_assertions on rag_assertions
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_assertions on rag_assertions is 'For whom a service speaks, written as that principal';

create policy add_retractions on rag_retractions
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_retractions on rag_retractions is 'Who retracts, written as that principal';

-- Jobs: each principal's own. What a worker is handed, take_job() hands it.
do $$
declare
    allowed record;
    own constant text := 'user_id = coalesce((select my_user_id()), 0) and not (select i_am_analyst())';
begin
    for allowed in
        select *
        from (values
            ('rag_jobs', 'read_jobs', 'rag_principal', 'select', own, 'The principal''s own jobs'),
            ('rag_jobs', 'add_jobs', 'rag_principal', 'insert', own, 'The principal''s own jobs'),
            ('rag_jobs', 'change_jobs', 'rag_principal', 'update', own, 'The principal''s own jobs'),
            ('rag_jobs', 'work_jobs_select', 'rag_queue', 'select', 'true', 'The functions of workers, in every tenant'),
            ('rag_jobs', 'work_jobs_update', 'rag_queue', 'update', 'true', 'The functions of workers, in every tenant'),
            ('rag_jobs', 'work_jobs_delete', 'rag_queue', 'delete', 'true', 'expire_jobs() removes what ended long ago'),
            ('rag_claims', 'expire_claims_select', 'rag_queue', 'select', 'true', 'expire_jobs() removes what ran out'),
            ('rag_claims', 'expire_claims_delete', 'rag_queue', 'delete', 'true', 'expire_jobs() removes what ran out'),
            -- A claim is a digest; claim_source() makes it of a class that the principal may write.
            ('rag_claims', 'see_claims', 'rag_principal', 'select', 'true', 'claim_source() and its siblings; digests only'),
            ('rag_claims', 'add_claims', 'rag_principal', 'insert', 'true', 'claim_source(), of classes that the principal may write'),
            ('rag_claims', 'change_claims', 'rag_principal', 'update', 'true', 'claim_source() and renew_claim(); digests only'),
            ('rag_claims', 'end_claims', 'rag_principal', 'delete', 'true', 'release_claim(), by whose it is')
        ) as granted (table_name, policy_name, role_name, command, condition, remark)
    loop
        execute format(
            'create policy %I on %I for %s to %I %s %s',
            allowed.policy_name,
            allowed.table_name,
            allowed.command,
            allowed.role_name,
            case when allowed.command <> 'insert' then format('using (%s)', allowed.condition) end,
            case when allowed.command in ('insert', 'update') then format('with check (%s)', allowed.condition) end
        );
        execute format('comment on policy %I on %I is %L', allowed.policy_name, allowed.table_name, allowed.remark);
    end loop;
end
$$;

-- Conversations: each principal's own, in the classes that it reaches. A project may be shared; what somebody said in it
-- is not, and a summary is read here by whom it is of, and as a document by everybody who reads the project.
create policy read_messages on rag_conversation_messages
for select to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
comment on policy read_messages on rag_conversation_messages is 'What the principal posted itself, in classes that it may read';

create policy post_messages on rag_conversation_messages
for insert to rag_principal
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy post_messages on rag_conversation_messages is 'The principal''s own messages, in classes that it may write';

create policy mark_messages on rag_conversation_messages
for update to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]))
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy mark_messages on rag_conversation_messages is 'Which summary a message of the principal''s is of; nothing else of it is granted';

create policy read_summaries on rag_conversation_summaries
for select to rag_principal
using (user_id = (select my_user_id()) and access_id = any((select my_access_ids())::bigint[]));
comment on policy read_summaries on rag_conversation_summaries is 'Summaries of the principal''s own conversations, in classes that it may read';

create policy add_summaries on rag_conversation_summaries
for insert to rag_principal
with check (user_id = (select my_user_id()) and access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_summaries on rag_conversation_summaries is 'Summaries of the principal''s own conversations, in classes that it may write';

-- Operators, in every tenant: keys, analysts, calibrations, owners of tags, prompts and the record of what was
-- done; never a document.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_analysts', array['select', 'insert', 'update', 'delete']),
            ('rag_service_keys', array['select', 'insert', 'update']),
            ('rag_calibrations', array['select', 'insert', 'update', 'delete']),
            ('rag_tags', array['select', 'insert', 'update', 'delete']),
            ('rag_prompts', array['select', 'insert', 'update', 'delete']),
            ('rag_limits', array['select', 'insert', 'update', 'delete']),
            ('rag_usage', array['select']),
            ('rag_assertions', array['select']),
            ('rag_retractions', array['select']),
            ('rag_erasures', array['select'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_operator %s %s',
            'operate_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'operate_' || allowed.command, allowed.table_name, 'Operators, in every tenant'
        );
    end loop;
end
$$;

-- The functions of operators erase and explain without reading: keys of rows are all that is granted.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_access_classes', array['select', 'delete']),
            ('rag_project_members', array['select', 'delete']),
            ('rag_documents', array['select', 'delete']),
            ('rag_chunks', array['select']),
            ('rag_tombstones', array['select', 'delete']),
            ('rag_synchronisations', array['select', 'delete']),
            ('rag_erasures', array['select', 'insert', 'delete']),
            ('rag_query_logs', array['select', 'delete']),
            ('rag_query_log_chunks', array['select', 'delete']),
            ('rag_signing_keys', array['select', 'insert', 'delete']),
            ('rag_analysts', array['select', 'delete']),
            ('rag_service_keys', array['select', 'delete']),
            ('rag_calibrations', array['select', 'delete']),
            ('rag_feedback', array['select', 'delete']),
            ('rag_tags', array['select', 'delete']),
            ('rag_prompts', array['select', 'delete']),
            ('rag_limits', array['select', 'delete']),
            ('rag_rate_buckets', array['select', 'delete']),
            ('rag_usage', array['select', 'insert', 'update', 'delete']),
            ('rag_assertions', array['select', 'delete']),
            ('rag_retractions', array['select', 'delete']),
            ('rag_jobs', array['select', 'delete']),
            ('rag_claims', array['select', 'delete']),
            ('rag_conversation_messages', array['select', 'delete']),
            ('rag_conversation_summaries', array['select'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_steward %s %s',
            'steward_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'steward_' || allowed.command, allowed.table_name,
            'The functions of rag_operator, in every tenant; no column of content is granted'
        );
    end loop;
end
$$;

-- Indexes and statistics of large classes. The search reads them, for the classes that it gives the principal;
-- what rag maintain calls writes them.
do $$
declare
    allowed record;
begin
    for allowed in
        select granted.table_name, command
        from (values
            ('rag_class_indexes', array['select', 'insert', 'update', 'delete']),
            ('rag_class_languages', array['select', 'insert', 'delete']),
            ('rag_class_lexemes', array['select', 'insert', 'delete'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I for %s to rag_search %s %s',
            'measure_' || allowed.command,
            allowed.table_name,
            allowed.command,
            case when allowed.command <> 'insert' then 'using (true)' end,
            case when allowed.command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'measure_' || allowed.command, allowed.table_name,
            'The functions of rag maintain, and the search, which looks up classes of the principal only'
        );
    end loop;
end
$$;

-- Limits: what functions on the path of every request look up and count, for the principal's tenant.
create policy find_limits on rag_limits
for select to rag_search
using (true);
comment on policy find_limits on rag_limits is 'limits_of(), which its callers ask about the principal''s tenant';

do $$
declare
    table_name text;
begin
    foreach table_name in array array['rag_rate_buckets', 'rag_usage']
    loop
        execute format('create policy count_select on %I for select to rag_search using (true)', table_name);
        execute format('create policy count_insert on %I for insert to rag_search with check (true)', table_name);
        execute format(
            'create policy count_update on %I for update to rag_search using (true) with check (true)', table_name
        );
        for command in 1..3 loop
            execute format(
                'comment on policy %I on %I is %L',
                (array['count_select', 'count_insert', 'count_update'])[command],
                table_name,
                'take_token() and charge_quota(), for the principal''s tenant'
            );
        end loop;
    end loop;
end
$$;

-- A change of the embedding model. Whoever fills the second column reads texts of all tenants: only through functions
-- that the owner alone may call, and only as long as there is a second model.
create policy read_models on rag_models
for select to rag_principal
using (true);
comment on policy read_models on rag_models is 'active_model() and check_model(); which model is used is no secret';

create policy fill_classes on rag_access_classes
for select to rag_embedder
using (true);
comment on policy fill_classes on rag_access_classes is 'chunks_to_fill() goes from class to class; numbers alone are granted';

create policy fill_documents on rag_documents
for select to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_documents on rag_documents is 'chunks_to_fill() gives out titles while there is a second model';

create policy fill_chunks_select on rag_chunks
for select to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_chunks_select on rag_chunks is 'chunks_to_fill() gives out texts while there is a second model';

create policy fill_chunks_update on rag_chunks
for update to rag_embedder
using (exists (select from rag_models as model where model.place = 'second'))
with check (exists (select from rag_models as model where model.place = 'second'));
comment on policy fill_chunks_update on rag_chunks is 'fill_vectors() writes the second vector, and no other column';

create policy fill_class_indexes_select on rag_class_indexes
for select to rag_embedder
using (true);
comment on policy fill_class_indexes_select on rag_class_indexes is 'large_classes() lists those that need an index of the second model';

create policy fill_class_indexes_update on rag_class_indexes
for update to rag_embedder
using (true)
with check (true);
comment on policy fill_class_indexes_update on rag_class_indexes is 'set_models() notes the size of the other model''s indexes';

do $$
declare
    command text;
begin
    foreach command in array array['select', 'insert', 'update', 'delete']
    loop
        execute format(
            'create policy %I on rag_models for %s to rag_embedder %s %s',
            'change_models_' || command,
            command,
            case when command <> 'insert' then 'using (true)' end,
            case when command in ('insert', 'update') then 'with check (true)' end
        );
        execute format(
            'comment on policy %I on rag_models is %L',
            'change_models_' || command, 'The functions of rag models, which the owner alone may call'
        );
    end loop;
end
$$;
-- What a principal reads, and the little that it changes, through functions. They belong to
-- rag_principal, whom the same policies bind as the caller. The caller has no right of its own on text,
-- titles, names and tags: a condition on them, cheap and "leakproof" as equality is, would be evaluated
-- before the policies, and EXPLAIN ANALYZE would tell whether somebody else's row meets it.

create function source_digest(source_type text, source_id text)
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[source_type, source_id])::text, 'UTF8'));
end;

comment on function source_digest(text, text) is 'Stands for a source in a tombstone, which has to tell it again and nothing about it';

create function provenance_digest(provenance_id text)
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[null, null, provenance_id])::text, 'UTF8'));
end;

comment on function provenance_digest(text) is 'Stands in a tombstone for all that is derived of something; no source has this digest';

create function erasure_digest(kind text, tenant_id text, subject text[])
returns bytea
language sql
immutable
parallel safe
begin atomic
    select sha256(convert_to(array_to_json(array[kind, tenant_id] || subject)::text, 'UTF8'));
end;

comment on function erasure_digest(text, text, text[]) is 'Stands for what was erased: a tenant, or its user, project (name, owner) or source (id, type)';

create function my_documents()
returns setof rag_documents
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return query
    select document.*
    from rag_documents as document;
end
$$;

comment on function my_documents() is 'All documents that the principal may read';

-- What a synchronisation compares with its source: of a worker, which reads no texts in bulk, as of everybody.
create function my_origin(source text)
returns table (
    id uuid, scope text, user_id bigint, project_id text, tags text[], source_type text, source_id text,
    source_hash text, updated_at timestamptz, path text, content_sha256 text
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        document.id, document.scope, document.user_id, document.project_id, document.tags, document.source_type,
        document.source_id, document.source_hash, document.updated_at,
        document.metadata -> 'origin' ->> 'path', document.metadata -> 'origin' ->> 'sha256'
    from rag_documents as document
    where document.metadata -> 'origin' ->> 'source' = my_origin.source
        -- Both, so that what an ingest merely says of its origin makes nothing a part of a source.
        and starts_with(document.source_id, my_origin.source || ':');
end
$$;

comment on function my_origin(text) is 'Of the documents of a synchronised source that the principal may read: whose they are, their path, and digests; no text';

create function my_listed_documents()
returns table (
    tenant_id text, id uuid, scope text, user_id bigint, tags text[], source_type text, language text,
    doc_type text, verified boolean, created_at timestamptz, updated_at timestamptz,
    content_updated_at timestamptz, source_updated_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        document.tenant_id, document.id, document.scope, document.user_id, document.tags, document.source_type,
        document.language, document.doc_type, document.verified, document.created_at, document.updated_at,
        document.content_updated_at, document.source_updated_at
    from my_principal() as me
    join rag_access_classes as class
        on class.tenant_id = me.tenant_id
        and class.scope = 'user'
        and class.tags && me.tags
    join rag_documents as document
        on document.tenant_id = me.tenant_id
        and document.access_id = class.access_id
    where me.user_scope = 'metadata';
end
$$;

comment on function my_listed_documents() is 'For an analyst with user_scope metadata: that users'' own documents exist, without a word of them';

create function my_chunks()
returns table (
    tenant_id text, access_id bigint, document_id uuid, chunk_index integer, chunk_text text, section text,
    page_number integer, language text, token_count integer, token_counter text, embedding_model text,
    created_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        chunk.tenant_id, chunk.access_id, chunk.document_id, chunk.chunk_index, chunk.chunk_text, chunk.section,
        chunk.page_number, chunk.language, chunk.token_count, chunk.token_counter, chunk.embedding_model,
        chunk.created_at
    from rag_chunks as chunk;
end
$$;

comment on function my_chunks() is 'All chunks that the principal may read, without vectors';

-- Class by class, along the primary key: a foreign id and a missing one are looked for in the same
-- places, and found in none. `offset 0` keeps the planner from looking for the id among all of the tenant.
create function my_document(document_id uuid)
returns setof rag_documents
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    return query
    select found.*
    from my_principal() as me
    cross join lateral unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.*
        from rag_documents as document
        where document.tenant_id = me.tenant_id
            and document.access_id = mine.access_id
            and document.id = my_document.document_id
        offset 0
    ) as found;
end
$$;

comment on function my_document(uuid) is 'One document that the principal may read; no row when it is missing or hidden, at the same cost';

create function my_document_chunks(document_id uuid)
returns setof rag_chunks
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
begin
    return query
    select found.*
    from my_principal() as me
    cross join lateral unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select chunk.*
        from rag_chunks as chunk
        where chunk.tenant_id = me.tenant_id
            and chunk.access_id = mine.access_id
            and chunk.document_id = my_document_chunks.document_id
        offset 0
    ) as found
    order by found.chunk_index;
end
$$;

comment on function my_document_chunks(uuid) is 'The chunks of one document that the principal may read, in order';

-- What a list of ids or of sources stands for. Each class of the caller is looked through by itself: `offset 0`
-- keeps the planner from turning the loop around, which would look a listed value up among everybody's rows,
-- find a foreign one there, and take longer over it than over a missing one.
create function my_documents_among(document_ids uuid[])
returns table (document_id uuid)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
begin
    return query
    select found.id
    from unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.id
        from rag_documents as document
        where document.tenant_id = tenant
            and document.access_id = mine.access_id
            and document.id = any(my_documents_among.document_ids)
        offset 0
    ) as found;
end
$$;

comment on function my_documents_among(uuid[]) is 'Of the documents with these ids, those that the principal may read; a foreign id costs what a missing one does';

create function my_sources_among(source_ids text[])
returns table (source_id text, document_id uuid)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
begin
    return query
    select found.source_id, found.id
    from unnest(my_access_ids()) as mine (access_id)
    cross join lateral (
        select document.source_id, document.id
        from rag_documents as document
        where document.tenant_id = tenant
            and document.access_id = mine.access_id
            and document.source_id = any(my_sources_among.source_ids)
        offset 0
    ) as found;
end
$$;

comment on function my_sources_among(text[]) is 'The documents of these sources that the principal may read; several for a source that is in several classes, or of several types; a foreign source costs what a missing one does';

create function find_source(
    access_id bigint, scope text, user_id bigint, project_id text, source_type text, source_id text
)
returns table (id uuid, document_access_id bigint, source_hash text, updated_at timestamptz, generation bigint)
language plpgsql
-- It changes nothing, and has to see what the same statement did before: a class that was made, another's commit.
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    mine bigint[];
    may_write boolean;
    buried bigint;
begin
    select
        array_agg(class.access_id),
        bool_or(
            class.may_write
            and class.access_id = find_source.access_id
            and class.scope = find_source.scope
            and class.user_id is not distinct from find_source.user_id
            and class.project_id is not distinct from find_source.project_id
        )
    into mine, may_write
    from my_classes() as class;
    select coalesce(sum(tombstone.generation), 0) into buried
    from rag_tombstones as tombstone
    where tombstone.tenant_id = tenant
        and tombstone.access_id = find_source.access_id
        and tombstone.source_digest = source_digest(find_source.source_type, find_source.source_id);
    -- An erasure of the tenant, the owner, the project or the source counts as a deletion; of an owner and a
    -- project only for whoever may write there, since it is nobody else's business.
    select buried + count(*) into buried
    from rag_erasures as erasure
    where may_write
        and erasure.tenant_id in (tenant, encode(erasure_digest('tenant', tenant, '{}'), 'hex'))
        and erasure.subject_digest in (
            erasure_digest('tenant', tenant, '{}'),
            erasure_digest('user', tenant, array[find_source.user_id::text]),
            erasure_digest('project', tenant, array[find_source.project_id]),
            erasure_digest('project', tenant, array[find_source.project_id, find_source.user_id::text]),
            erasure_digest('source', tenant, array[find_source.source_id]),
            erasure_digest('source', tenant, array[find_source.source_id, find_source.source_type])
        );
    return query
    select found.id, found.access_id, found.source_hash, found.updated_at, buried
    from (select 1) as once
    left join (
        select document.id, document.access_id, document.source_hash, document.updated_at
        from unnest(mine) as readable (access_id)
        -- Class by class, as in my_document().
        cross join lateral (
            select
                source.id, source.access_id, source.source_hash, source.updated_at, source.scope, source.user_id,
                source.project_id
            from rag_documents as source
            where source.tenant_id = tenant
                and source.access_id = readable.access_id
                and source.source_type = find_source.source_type
                and source.source_id = find_source.source_id
            offset 0
        ) as document
        where document.scope = find_source.scope
            and document.user_id is not distinct from find_source.user_id
            and document.project_id is not distinct from find_source.project_id
    ) as found on true
    order by
        (found.access_id = find_source.access_id) desc nulls last,
        found.updated_at desc,
        found.id;
end
$$;

comment on function find_source(bigint, text, bigint, text, text, text) is 'What is stored of a source for this owner: its documents (more than one only while tags change), the one of the wanted class first, and how often it was deleted. One row at least, with nulls when nothing is stored';

create function bury_source(access_id bigint, source_type text, source_id text, reason text)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    buried bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    insert into rag_tombstones as tombstone (tenant_id, access_id, source_digest, reason)
    values (
        tenant,
        bury_source.access_id,
        source_digest(bury_source.source_type, bury_source.source_id),
        bury_source.reason
    )
    on conflict (tenant_id, access_id, source_digest) do update
    set generation = tombstone.generation + 1,
        reason = excluded.reason,
        updated_at = excluded.updated_at
    returning tombstone.generation into buried;
    return buried;
end
$$;

comment on function bury_source(bigint, text, text, text) is 'Remembers that a source was deleted, so that an ingest that began before does not bring it back; returns how often it was';

-- The recursion goes through documents that the principal may read and not write: what is derived of them is
-- no better for that. Class by class, as in my_document(), so that a foreign name costs what a missing one does.
create function derived_documents(document_ids uuid[], source_ids text[], provenance_ids text[], cascades boolean)
returns table (
    access_id bigint, document_id uuid, scope text, source_id text, is_named boolean, may_write boolean
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    readable constant bigint[] := my_access_ids();
    writable constant bigint[] := my_writable_access_ids();
    origins constant text[] := provenance_ids || case when cascades then source_ids end;
begin
    return query
    with recursive tainted as (
        (
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select document.access_id, document.id, document.scope, document.source_id, true as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.id = any(document_ids)
                offset 0
            ) as named
            union
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select document.access_id, document.id, document.scope, document.source_id, true as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.source_id = any(source_ids)
                offset 0
            ) as named
            union
            select named.access_id, named.id, named.scope, named.source_id, named.is_named
            from unnest(readable) as mine (access_id)
            cross join lateral (
                select
                    document.access_id, document.id, document.scope, document.source_id,
                    document.provenance_id = any(provenance_ids) as is_named
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = mine.access_id
                    and document.provenance_id = any(origins)
                offset 0
            ) as named
        )
        union
        select derived.access_id, derived.id, derived.scope, derived.source_id, false
        from tainted
        cross join lateral unnest(readable) as mine (access_id)
        cross join lateral (
            select document.access_id, document.id, document.scope, document.source_id
            from rag_documents as document
            where cascades
                and document.tenant_id = tenant
                and document.access_id = mine.access_id
                and document.provenance_id = tainted.source_id
            offset 0
        ) as derived
    )

    select
        tainted.access_id,
        tainted.id,
        tainted.scope,
        tainted.source_id,
        bool_or(tainted.is_named),
        tainted.access_id = any(writable)
    from tainted
    group by tainted.access_id, tainted.id, tainted.scope, tainted.source_id
    order by bool_or(tainted.is_named) desc, tainted.source_id, tainted.access_id, tainted.id;
end
$$;

comment on function derived_documents(uuid[], text[], text[], boolean) is 'Of what the principal may read: documents with these ids, of these sources, and of these provenances; with cascades also what is derived of them, whose provenance_id is the source_id of one of them, and so on. May_write says whether the principal may remove it';

create function retraction_of(
    scope text, user_id bigint, project_id text, source_id text, provenance_id text,
    out generation bigint, out closed bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    select coalesce(sum(tombstone.generation), 0), max(tombstone.generation) filter (where tombstone.retracted)
    into retraction_of.generation, retraction_of.closed
    from my_classes() as class
    join rag_tombstones as tombstone
        on tombstone.tenant_id = class.tenant_id
        and tombstone.access_id = class.access_id
        and tombstone.source_digest in (
            source_digest(null, retraction_of.source_id), provenance_digest(retraction_of.provenance_id)
        )
    where class.scope = retraction_of.scope
        and class.user_id is not distinct from retraction_of.user_id
        and class.project_id is not distinct from retraction_of.project_id;
end
$$;

comment on function retraction_of(text, bigint, text, text, text) is 'Whether a source of this owner, or what it is derived of, is retracted in a class that the principal may read. generation: grows with each retraction; closed: the highest that is in force, null when the source is open';

create function close_sources(
    access_ids bigint[], source_ids text[], provenance_ids text[], document_ids uuid[], cascade_id text
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    buried bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    with named as (
        select
            entry.access_id,
            entry.document_id,
            case
                when entry.provenance_id is null then source_digest(null, entry.source_id)
                else provenance_digest(entry.provenance_id)
            end as digest
        from unnest(
            close_sources.access_ids, close_sources.source_ids, close_sources.provenance_ids,
            close_sources.document_ids
        ) as entry (access_id, source_id, provenance_id, document_id)
    ),

    raised as (
        insert into rag_tombstones as tombstone (
            tenant_id, access_id, source_digest, reason, retracted, cascade_id, removed_id
        )
        select distinct on (named.access_id, named.digest)
            tenant, named.access_id, named.digest, 'invalidated', true, close_sources.cascade_id, named.document_id
        from named
        order by named.access_id, named.digest, named.document_id nulls last
        on conflict (tenant_id, access_id, source_digest) do update
        set retracted = true,
            generation = tombstone.generation + 1,
            reason = excluded.reason,
            updated_at = excluded.updated_at,
            cascade_id = excluded.cascade_id,
            removed_id = coalesce(excluded.removed_id, tombstone.removed_id)
        returning tombstone.generation
    )

    select max(raised.generation) into buried
    from raised;
    return buried;
end
$$;

comment on function close_sources(bigint[], text[], text[], uuid[], text) is 'Retracts in each class the source or, where the list of provenances has one, what is derived of it: an ingest is refused until it is reinstated, and one that began before gives up. Lists of one length; returns the highest generation';

create function reopen_sources(
    source_ids text[], provenance_ids text[], document_ids uuid[], cascade_ids text[], scopes text[]
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
    digests constant bytea[] := array(
        select source_digest(null, source)
        from unnest(reopen_sources.source_ids) as source
        union
        select provenance_digest(origin)
        from unnest(reopen_sources.source_ids || reopen_sources.provenance_ids) as origin
    );
    classes constant bigint[] := array(
        select class.access_id
        from my_classes() as class
        where class.may_write
            and class.scope = any(reopen_sources.scopes)
    );
    opened bigint;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    update rag_tombstones as tombstone
    set retracted = false,
        updated_at = now()
    where tombstone.tenant_id = tenant
        and tombstone.access_id = any(classes)
        and tombstone.retracted
        and (
            tombstone.source_digest = any(digests)
            or tombstone.removed_id = any(reopen_sources.document_ids)
            or tombstone.cascade_id = any(reopen_sources.cascade_ids)
        );
    get diagnostics opened = row_count;
    return opened;
end
$$;

comment on function reopen_sources(text[], text[], uuid[], text[], text[]) is 'Lets retracted sources, provenances, the sources of retracted documents and what was retracted under these cascades be ingested again, in the classes of these scopes that the principal may write; returns how many tombstones were lifted. What was removed does not come back by itself';

create function search_mode(embedding_model text, scope text, document_ids uuid[])
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
begin
    return (
        select case
            when count(*) = 0 then 'none'
            when count(*) filter (where chunk.embedding_model = search_mode.embedding_model) = 0 then 'keyword'
            when count(*) filter (where chunk.embedding_model = search_mode.embedding_model) < count(*) then 'partial'
            else 'hybrid'
        end
        from unnest(narrowed_access_ids(search_mode.scope)) as mine (access_id)
        -- Class by class, as in my_document().
        cross join lateral (
            select chunk.embedding_model
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = mine.access_id
                and (search_mode.document_ids is null or chunk.document_id = any(search_mode.document_ids))
            offset 0
        ) as chunk
    );
end
$$;

comment on function search_mode(text, text, uuid[]) is 'Which arms a search could use where it found nothing; the words of the column mode of rag.search, or none when the principal sees no chunk there';

create function my_min_similarity(embedding_model text)
returns double precision
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return (
        select min(calibration.min_similarity)
        from rag_calibrations as calibration
        where calibration.tenant_id = (select my_tenant_id())
            and calibration.embedding_model = my_min_similarity.embedding_model
    );
end
$$;

comment on function my_min_similarity(text) is 'The cosine below which chunks of the principal''s tenant do not answer, as rag eval --calibrate found it; null where the shipped one counts';

create function my_queries()
returns table (
    tenant_id text, query_id uuid, user_id bigint, project_id text, scope text, query_length integer,
    query_text text, mode text, embedding_model text, model_used text, result_count integer,
    citation_count integer, context_tokens integer, confidence integer, action text, route_tag text,
    route_fallback boolean, retrieval_ms double precision, generation_ms double precision,
    latency_ms double precision, asked_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.* into me from my_principal() as principal;
    if not found then
        return;
    end if;
    return query
    select
        log.tenant_id,
        log.id,
        case when me.user_scope is distinct from 'none' then log.user_id end,
        case
            when me.user_scope is null or '*' = any(me.projects) or log.project_id = any(me.projects)
                then log.project_id
        end,
        log.scope,
        log.query_length,
        case when me.user_scope is null or me.user_scope = 'text' then log.query_text end,
        log.mode, log.embedding_model, log.model_used, log.result_count,
        log.citation_count, log.context_tokens, log.confidence, log.action,
        case when me.user_scope is null or log.route_tag = any(me.tags || array['system']) then log.route_tag end,
        log.route_fallback,
        log.retrieval_ms, log.generation_ms, log.latency_ms,
        log.created_at
    from rag_query_logs as log;
end
$$;

comment on function my_queries() is 'The principal''s own questions; for an analyst those of the tenant: their text only with user_scope text, who asked not with none, projects and tags as far as they are the analyst''s';

create function my_query_chunks()
returns table (
    tenant_id text, query_id uuid, user_id bigint, rank integer, document_id uuid, chunk_index integer,
    score double precision, cosine double precision, cited boolean
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        hit.tenant_id,
        hit.query_id,
        case when me.user_scope is distinct from 'none' then hit.user_id end,
        hit.rank,
        hit.document_id,
        hit.chunk_index,
        hit.score,
        hit.cosine,
        hit.cited
    from my_principal() as me
    cross join rag_query_log_chunks as hit
    join rag_documents as document
        on document.tenant_id = hit.tenant_id
        and document.id = hit.document_id;
end
$$;

comment on function my_query_chunks() is 'What the questions of my_queries() got back, as far as the principal may read the documents';

create function my_feedback()
returns table (
    tenant_id text, query_id uuid, user_id bigint, document_id uuid, chunk_index integer, rating smallint,
    clicked boolean, created_at timestamptz, updated_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        given.tenant_id,
        given.query_id,
        case when me.user_scope is distinct from 'none' then given.user_id end,
        given.document_id,
        given.chunk_index,
        given.rating,
        given.clicked,
        given.created_at,
        given.updated_at
    from my_principal() as me
    cross join rag_feedback as given
    where given.document_id is null
        or exists (
            select
            from rag_documents as document
            where document.tenant_id = given.tenant_id
                and document.id = given.document_id
        );
end
$$;

comment on function my_feedback() is 'What was made of the questions of my_queries(): of the answers, and of sources as far as the principal may read the documents';

create function give_feedback(
    query_id uuid, document_id uuid, chunk_index integer, rating integer, clicked boolean
)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
    place integer := 0;
    class_id bigint;
begin
    select principal.tenant_id, principal.user_id into me from my_principal() as principal;
    if me.user_id is null then
        return false;
    end if;
    -- Before anything is looked up that an erasure takes away.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    perform
    from rag_query_logs as log
    where log.tenant_id = me.tenant_id
        and log.user_id = me.user_id
        and log.id = give_feedback.query_id;
    if not found then
        return false;
    end if;
    if give_feedback.document_id is not null then
        select hit.rank, document.access_id
        into place, class_id
        from rag_query_log_chunks as hit
        cross join lateral my_document(hit.document_id) as document
        where hit.tenant_id = me.tenant_id
            and hit.user_id = me.user_id
            and hit.query_id = give_feedback.query_id
            and hit.document_id = give_feedback.document_id
            and hit.chunk_index = give_feedback.chunk_index
        order by hit.rank
        limit 1;
        if not found then
            return false;
        end if;
    end if;
    insert into rag_feedback as given (
        tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index, rating, clicked
    )
    values (
        me.tenant_id, me.user_id, give_feedback.query_id, place, class_id, give_feedback.document_id,
        case when give_feedback.document_id is not null then give_feedback.chunk_index end,
        give_feedback.rating, give_feedback.clicked
    )
    on conflict (tenant_id, user_id, query_id, rank) do update
    set rating = coalesce(excluded.rating, given.rating),
        clicked = given.clicked or excluded.clicked,
        updated_at = excluded.updated_at;
    return true;
end
$$;

comment on function give_feedback(uuid, uuid, integer, integer, boolean) is 'Keeps what the principal made of a question of their own: of a source that it got back and that they still may read, or of the answer where document_id is null. rating 1, 0, -1, or null for the one before. False, and nothing is written, for a question or a source that is not theirs, as for one that is missing';

create function my_tag_owner(tag text)
returns table (owner_user_id bigint, owner_email text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select owned.owner_user_id, owned.owner_email
    from rag_tags as owned
    where owned.tenant_id = (select my_tenant_id())
        and owned.name = my_tag_owner.tag;
end
$$;

comment on function my_tag_owner(text) is 'Who owns a tag that the principal holds; no row for a tag without an owner, as for one that is not the principal''s';

create function my_prompt()
returns table (prompt text, replaces boolean, generation bigint)
language plpgsql
stable
security definer
rows 1
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select told.prompt, told.replaces, told.generation
    from rag_prompts as told
    where told.tenant_id = (select my_tenant_id());
end
$$;

comment on function my_prompt() is 'What the principal''s tenant tells the model; no row when it says nothing';

create function my_members()
returns table (owner_user_id bigint, project_id text, member_user_id bigint, may_write boolean, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        membership.owner_user_id, membership.project_id, membership.member_user_id, membership.may_write,
        membership.created_at
    from rag_project_members as membership
    order by 1, 2, 3;
end
$$;

comment on function my_members() is 'Projects that the principal''s user shares, or has been given';

create function share_project(project_id text, member_user_id bigint, may_write boolean)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.tenant_id, principal.user_id into me from my_principal() as principal;
    if me.user_id is null then
        raise exception 'a project belongs to a user' using errcode = 'insufficient_privilege';
    end if;
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    insert into rag_project_members (tenant_id, owner_user_id, project_id, member_user_id, may_write)
    values (me.tenant_id, me.user_id, share_project.project_id, share_project.member_user_id, share_project.may_write)
    on conflict (tenant_id, member_user_id, owner_user_id, project_id) do update
    set may_write = excluded.may_write;
end
$$;

comment on function share_project(text, bigint, boolean) is 'Shares the principal''s own project with another user of the tenant, or changes whether they may write';

create function unshare_project(project_id text, member_user_id bigint)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    delete from rag_project_members as membership
    where membership.owner_user_id = my_user_id()
        and membership.project_id = unshare_project.project_id
        and membership.member_user_id = unshare_project.member_user_id;
    return found;
end
$$;

comment on function unshare_project(text, bigint) is 'Ends the sharing of the principal''s own project with a user; false when it was not shared with them';

create function note_synchronisation(
    access_id bigint, source text, version text, files integer, written integer, removed integer, unchanged integer,
    failed integer
)
returns timestamptz
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    ended constant timestamptz := clock_timestamp();
    succeeded timestamptz;
begin
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    insert into rag_synchronisations as last (
        tenant_id, access_id, source, version, files, written, removed, unchanged, failed, finished_at, succeeded_at
    )
    values (
        tenant,
        note_synchronisation.access_id,
        note_synchronisation.source,
        note_synchronisation.version,
        note_synchronisation.files,
        note_synchronisation.written,
        note_synchronisation.removed,
        note_synchronisation.unchanged,
        note_synchronisation.failed,
        ended,
        case note_synchronisation.failed when 0 then ended end
    )
    on conflict (tenant_id, access_id, source) do update
    set version = excluded.version,
        files = excluded.files,
        written = excluded.written,
        removed = excluded.removed,
        unchanged = excluded.unchanged,
        failed = excluded.failed,
        finished_at = excluded.finished_at,
        succeeded_at = coalesce(excluded.succeeded_at, last.succeeded_at)
    returning last.succeeded_at into succeeded;
    return succeeded;
end
$$;

comment on function note_synchronisation(bigint, text, text, integer, integer, integer, integer, integer) is 'Keeps what came of a synchronisation, instead of the one before; returns when the last one ended that had no failures. Raises 42501 for a class that the principal may not write, as for one that is gone';

create function my_synchronisations()
returns table (
    scope text, user_id bigint, project_id text, tags text[], source text, version text, files integer,
    written integer, removed integer, unchanged integer, failed integer, finished_at timestamptz,
    succeeded_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    -- A source whose tags were changed has a row in its former class as well.
    select distinct on (class.scope, class.user_id, class.project_id, last.source)
        class.scope, class.user_id, class.project_id, class.tags, last.source, last.version, last.files,
        last.written, last.removed, last.unchanged, last.failed, last.finished_at, last.succeeded_at
    from my_classes() as class
    cross join lateral (
        select
            run.source, run.version, run.files, run.written, run.removed, run.unchanged, run.failed,
            run.finished_at, run.succeeded_at
        from rag_synchronisations as run
        where run.tenant_id = class.tenant_id
            and run.access_id = class.access_id
        offset 0
    ) as last
    order by class.scope, class.user_id, class.project_id, last.source, last.finished_at desc;
end
$$;

comment on function my_synchronisations() is 'What came of the last synchronisation of each source whose documents the principal may read, one row for each source and owner';
-- Jobs: what somebody has asked for and a worker does later, as that principal. rag_jobs says what and for whom, under
-- row security; the queue (12_queue.sql) holds ids alone. And claims: who is making a source searchable just now.

-- --- the queue, as rag_queue ---------------------------------------------------------------------

create function push_job(tenant_id text, id uuid, kind text, lock text, max_waiting integer)
returns table (queue_id bigint, turn integer)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    waiting bigint;
    latest integer;
    present integer;
begin
    -- One after the other within a tenant, so that the limit holds exactly and each gets a turn of its own.
    perform pg_advisory_xact_lock(hashtextextended('palisade jobs of ' || push_job.tenant_id, 0));
    select count(*), max(job.turn) into waiting, latest
    from rag_jobs as job
    where job.tenant_id = push_job.tenant_id
        and job.status in ('pending', 'processing');
    if push_job.max_waiting is not null and waiting >= push_job.max_waiting then
        return;
    end if;
    -- Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): a tenant's jobs take turns one by one, from where
    -- the queue is now. Who has queued a thousand waits for them; who comes with one is next.
    select coalesce(
        (
            select -queued.priority
            from jobs.procrastinate_jobs as queued
            where queued.status = 'todo'
                and (queued.scheduled_at is null or queued.scheduled_at <= now())
            order by queued.priority desc, queued.id
            limit 1
        ),
        (select max(-queued.priority) from jobs.procrastinate_jobs as queued where queued.status = 'doing'),
        0
    ) into present;
    turn := greatest(present, coalesce(latest + 1, 0));
    queue_id := (
        jobs.procrastinate_defer_jobs_v1(array[cast(row(
            'rag', push_job.kind, -turn, push_job.lock, null, jsonb_build_object('id', push_job.id), null
        ) as jobs.procrastinate_job_to_defer_v1)])
    )[1];
    return next;
end
$$;

comment on function push_job(text, uuid, text, text, integer) is 'Puts a job into the queue at its tenant''s next turn, within the transaction; no row when max_waiting jobs of the tenant wait or are being done. For enqueue_job() and resubmit_jobs()';

create function drop_queued(queue_ids bigint[])
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from jobs.procrastinate_jobs as queued
    where queued.id = any(drop_queued.queue_ids) and queued.status = 'todo';
    -- What is being done is told to end, and its worker removes it. Until then it names nothing.
    update jobs.procrastinate_jobs as queued
    set lock = null, args = '{}', abort_requested = true
    where queued.id = any(drop_queued.queue_ids) and queued.status = 'doing';
end
$$;

comment on function drop_queued(bigint[]) is 'Takes jobs out of the queue; those that are being done are told to end. For cancel_my_job(), cancel_jobs() and forget()';

create function take_job(id uuid, queue_id bigint, proof text)
returns table (
    tenant_id text, user_id bigint, project_id text, tags text[], kind text, payload jsonb, body text,
    attempts integer, claim uuid
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- It hands out what tenants sent: the password of the worker alone does not open it.
    if not proof_holds('jobs', take_job.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    update rag_jobs as job
    set status = 'processing',
        attempts = job.attempts + 1,
        claim = gen_random_uuid(),
        started_at = now(),
        due_at = null
    from jobs.procrastinate_jobs as queued
    where job.id = take_job.id
        and job.queue_id = take_job.queue_id
        and job.status in ('pending', 'processing')
        and queued.id = job.queue_id
        and queued.status = 'doing'
        and not queued.abort_requested
    returning
        job.tenant_id, nullif(job.user_id, 0), job.project_id, job.tags, job.kind, job.payload, job.body,
        job.attempts, job.claim;
end
$$;

comment on function take_job(uuid, bigint, text) is 'What a worker has to do, and as whom: of the one job that the queue has just given out. Whoever took it before has lost it. No row when it is done, cancelled or erased; raises 28000 without a proof that the worker itself asks';

create function return_job(
    id uuid, claim uuid, reason text, detail text, due_in interval, counted boolean, proof text
)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    if not proof_holds('jobs', return_job.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    update rag_jobs as job
    set status = case when return_job.due_in is null then 'failed' else 'pending' end,
        reason = return_job.reason,
        detail = return_job.detail,
        attempts = job.attempts - case when return_job.counted then 0 else 1 end,
        claim = null,
        due_at = now() + return_job.due_in,
        finished_at = case when return_job.due_in is null then now() end
    where job.id = return_job.id
        and job.claim = return_job.claim
        and job.status = 'processing';
    return found;
end
$$;

comment on function return_job(uuid, uuid, text, text, interval, boolean, text) is 'Gives a job back that came to nothing: to be tried again after due_in, or with due_in null for good, for the reason given; false when it was no longer this worker''s';

create function recover_jobs(stalled_after interval, max_losses integer)
returns table (recovered bigint, parked bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    stalled record;
begin
    recovered := 0;
    parked := 0;
    for stalled in
        select queued.id as queue_id
        from jobs.procrastinate_jobs as queued
        left join jobs.procrastinate_workers as worker on worker.id = queued.worker_id
        where queued.status = 'doing'
            and (worker.id is null or worker.last_heartbeat < now() - recover_jobs.stalled_after)
        order by queued.id
        for update of queued skip locked
    loop
        -- One that ends its worker each time would end them all.
        update rag_jobs as job
        set losses = job.losses + 1,
            claim = null,
            status = case when job.losses + 1 >= recover_jobs.max_losses then 'failed' else 'pending' end,
            reason = 'worker_lost',
            detail = 'The worker ended while it did this job.',
            finished_at = case when job.losses + 1 >= recover_jobs.max_losses then now() end
        where job.queue_id = stalled.queue_id
            and job.status in ('pending', 'processing');
        if exists (
            select from rag_jobs as job where job.queue_id = stalled.queue_id and job.status = 'pending'
        ) then
            update jobs.procrastinate_jobs as queued
            set abort_requested = false
            where queued.id = stalled.queue_id and queued.abort_requested;
            perform jobs.procrastinate_retry_job_v2(stalled.queue_id, now(), null, null, null);
            recovered := recovered + 1;
        else
            delete from jobs.procrastinate_jobs as queued where queued.id = stalled.queue_id;
            parked := parked + 1;
        end if;
    end loop;
    delete from jobs.procrastinate_workers as worker
    where worker.last_heartbeat < now() - 10 * recover_jobs.stalled_after;
    return next;
end
$$;

comment on function recover_jobs(interval, integer) is 'Puts back what a worker was doing that has not said for so long that it is there; parks what has lost max_losses workers';

create function expire_jobs(keys_after interval, jobs_after interval)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    removed bigint;
    lost record;
    pushed record;
begin
    -- Nothing that is known of leaves a job that has not ended without its place in the queue; it is lost otherwise.
    for lost in
        select job.tenant_id, job.id, job.kind, job.lock
        from rag_jobs as job
        where job.status in ('pending', 'processing')
            and job.queue_id is not null
            and not exists (select from jobs.procrastinate_jobs as queued where queued.id = job.queue_id)
        for update skip locked
    loop
        select queued.* into pushed from push_job(lost.tenant_id, lost.id, lost.kind, lost.lock, null) as queued;
        update rag_jobs as job
        set status = 'pending', claim = null, queue_id = pushed.queue_id, turn = pushed.turn
        where job.tenant_id = lost.tenant_id and job.id = lost.id;
    end loop;
    update rag_jobs as job
    set request_key = null
    where job.request_key is not null and job.created_at < now() - expire_jobs.keys_after;
    delete from rag_jobs as job
    where job.status in ('succeeded', 'failed', 'cancelled')
        and job.finished_at < now() - expire_jobs.jobs_after;
    get diagnostics removed = row_count;
    delete from rag_claims as claim where claim.expires_at < now();
    return removed;
end
$$;

comment on function expire_jobs(interval, interval) is 'Puts jobs back that the queue does not know, forgets the idempotency keys of older requests, removes jobs that ended so long ago, and claims that ran out; how many jobs';

create function queue_depth(seen_within interval, proof text)
returns table (pending bigint, ready bigint, processing bigint, workers bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Figures of all tenants: a password alone does not open them.
    if not proof_holds('jobs', queue_depth.proof) then
        raise exception 'the proof does not hold' using errcode = 'invalid_authorization_specification';
    end if;
    return query
    select
        count(*) filter (where queued.status = 'todo'),
        count(*) filter (
            where queued.status = 'todo' and (queued.scheduled_at is null or queued.scheduled_at <= now())
        ),
        count(*) filter (where queued.status = 'doing'),
        (select count(*) from jobs.procrastinate_workers as worker where worker.last_heartbeat > now() - queue_depth.seen_within)
    from jobs.procrastinate_jobs as queued;
end
$$;

comment on function queue_depth(interval, text) is 'Jobs of the whole deployment: those that wait, of these those that are not put off until later, and those that are being done; and workers that were there within so long';

-- --- the principal's own, as rag_principal --------------------------------------------------------

create function enqueue_job(
    kind text, lock text, source_type text, source_id text, payload jsonb, body text, max_waiting integer,
    request_key bytea, request_digest bytea
)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    job_id uuid := gen_random_uuid();
    pushed record;
begin
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    -- An erasure of the tenant comes before this or after it.
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    select queued.* into pushed
    from push_job(me.tenant_id, job_id, enqueue_job.kind, enqueue_job.lock, enqueue_job.max_waiting) as queued;
    if not found then
        return null;
    end if;
    insert into rag_jobs (
        tenant_id, id, user_id, project_id, tags, kind, status, lock, queue_id, turn,
        source_type, source_id, payload, body, request_key, request_digest
    )
    values (
        me.tenant_id, job_id, coalesce(me.user_id, 0), me.project_id, me.tags, enqueue_job.kind, 'pending',
        enqueue_job.lock, pushed.queue_id, pushed.turn, enqueue_job.source_type, enqueue_job.source_id,
        enqueue_job.payload, enqueue_job.body, enqueue_job.request_key, enqueue_job.request_digest
    );
    return job_id;
end
$$;

comment on function enqueue_job(text, text, text, text, jsonb, text, integer, bytea, bytea) is 'Asks for a job to be done as the principal, once this transaction has committed; null when max_waiting jobs of the tenant are waiting. Jobs of one lock are done one after the other';

create function record_request(kind text, source_type text, source_id text, result jsonb, request_key bytea, request_digest bytea)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    me record;
    job_id uuid := gen_random_uuid();
begin
    select principal.* into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    perform pg_advisory_xact_lock_shared(tenant_lock(me.tenant_id));
    insert into rag_jobs (
        tenant_id, id, user_id, project_id, tags, kind, status, attempts, source_type, source_id, result,
        request_key, request_digest, started_at, finished_at
    )
    values (
        me.tenant_id, job_id, coalesce(me.user_id, 0), me.project_id, me.tags, record_request.kind, 'succeeded', 1,
        record_request.source_type, record_request.source_id, record_request.result, record_request.request_key,
        record_request.request_digest, now(), now()
    );
    return job_id;
end
$$;

comment on function record_request(text, text, text, jsonb, bytea, bytea) is 'Records what came of a request that had an idempotency key, in the transaction that did it; raises 23505 when another one did it meanwhile';

create function my_request(request_key bytea, valid_for interval)
returns table (id uuid, request_digest bytea, queued boolean, result jsonb)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    -- A key is free again after its time, whenever the worker clears up.
    update rag_jobs as job
    set request_key = null
    where job.tenant_id = (select my_tenant_id())
        and job.request_key = my_request.request_key
        and job.created_at < now() - my_request.valid_for;
    return query
    select job.id, job.request_digest, job.queue_id is not null, job.result
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.request_key = my_request.request_key;
end
$$;

comment on function my_request(bytea, interval) is 'What the principal has asked for with this idempotency key within its time';

create function my_waiting_job(kind text, lock text)
returns uuid
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    tenant constant text := my_tenant_id();
begin
    if tenant is null then
        return null;
    end if;
    -- The locks of enqueue_job() and push_job(), in their order: of two who ask at once the second sees the first's.
    perform pg_advisory_xact_lock_shared(tenant_lock(tenant));
    perform pg_advisory_xact_lock(hashtextextended('palisade jobs of ' || tenant, 0));
    return (
        select job.id
        from rag_jobs as job
        where job.tenant_id = tenant
            and job.kind = my_waiting_job.kind
            and job.lock = my_waiting_job.lock
            and job.status = 'pending'
        order by job.turn, job.id
        limit 1
    );
end
$$;

comment on function my_waiting_job(text, text) is 'One of the principal''s own jobs of this kind and lock that nobody has begun; null when there is none. Nobody else asks for one before this transaction has ended';

create function my_job(job_id uuid)
returns table (
    id uuid, kind text, status text, reason text, detail text, attempts integer, created_at timestamptz,
    started_at timestamptz, due_at timestamptz, finished_at timestamptz, result jsonb
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        job.id, job.kind, job.status, job.reason, job.detail, job.attempts, job.created_at, job.started_at,
        job.due_at, job.finished_at, job.result
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.id = my_job.job_id;
end
$$;

comment on function my_job(uuid) is 'One of the principal''s own jobs';

create function cancel_my_job(id uuid)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    queued bigint;
begin
    update rag_jobs as job
    set status = 'cancelled', claim = null, payload = null, body = null, due_at = null, finished_at = now()
    where job.tenant_id = (select my_tenant_id())
        and job.id = cancel_my_job.id
        and job.status in ('pending', 'processing')
    returning job.queue_id into queued;
    if not found then
        return false;
    end if;
    perform drop_queued(array[queued]);
    return true;
end
$$;

comment on function cancel_my_job(uuid) is 'Cancels one of the principal''s own jobs; one that is being done stores nothing any more. False when there is none, or it has ended';

create function settle_job(id uuid, claim uuid, result jsonb)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_jobs as job
    set status = 'succeeded',
        reason = null,
        detail = null,
        claim = null,
        payload = null,
        body = null,
        result = settle_job.result,
        finished_at = now()
    where job.tenant_id = (select my_tenant_id())
        and job.id = settle_job.id
        and job.claim = settle_job.claim
        and job.status = 'processing';
    return found;
end
$$;

comment on function settle_job(uuid, uuid, jsonb) is 'Ends a job in the transaction that did it, as its principal, and lets go of what was sent; false when it was cancelled, erased or given to another worker, and then nothing may be stored';

create function holds_job(id uuid, claim uuid)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Locked, so that nobody is given the job before this transaction has ended.
    perform
    from rag_jobs as job
    where job.tenant_id = (select my_tenant_id())
        and job.id = holds_job.id
        and job.claim = holds_job.claim
        and job.status = 'processing'
    for share;
    return found;
end
$$;

comment on function holds_job(uuid, uuid) is 'Whether the job is still this worker''s, and until the end of the transaction nobody else''s: for one step of a job that has many';

-- --- claims ---------------------------------------------------------------------------------------

create function claim_source(
    access_id bigint, source_type text, source_id text, token uuid, lease interval
)
returns bytea
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    class record;
    digest bytea;
begin
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = claim_source.access_id and mine.may_write;
    if not found then
        raise exception 'no class of the principal''s to write in' using errcode = 'insufficient_privilege';
    end if;
    -- Of an owner, whatever the tags.
    digest := sha256(convert_to(
        array_to_json(array[
            class.scope, cast(class.user_id as text), class.project_id, claim_source.source_type, claim_source.source_id
        ])::text,
        'UTF8'
    ));
    insert into rag_claims as held (tenant_id, source_digest, token, expires_at)
    values (class.tenant_id, digest, claim_source.token, clock_timestamp() + claim_source.lease)
    on conflict (tenant_id, source_digest) do update
    set token = excluded.token, expires_at = excluded.expires_at
    where held.expires_at < clock_timestamp();
    return case when found then digest end;
end
$$;

comment on function claim_source(bigint, text, text, uuid, interval) is 'Claims a source of an owner whom the principal may write for, so that no second one embeds it at the same time; null while somebody else holds it. It ends by itself';

create function renew_claim(source_digest bytea, token uuid, lease interval)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_claims as held
    set expires_at = clock_timestamp() + renew_claim.lease
    where held.tenant_id = (select my_tenant_id())
        and held.source_digest = renew_claim.source_digest
        and held.token = renew_claim.token;
end
$$;

comment on function renew_claim(bytea, uuid, interval) is 'Keeps a claim for longer';

create function release_claim(source_digest bytea, token uuid)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_claims as held
    where held.tenant_id = (select my_tenant_id())
        and held.source_digest = release_claim.source_digest
        and held.token = release_claim.token;
end
$$;

comment on function release_claim(bytea, uuid) is 'Lets go of a claim';

-- --- operators, as rag_queue ----------------------------------------------------------------------

create function list_jobs(only_tenant_id text, only_status text, most integer)
returns table (
    tenant_id text, id uuid, user_id bigint, kind text, status text, reason text, attempts integer, losses integer,
    created_at timestamptz, started_at timestamptz, due_at timestamptz, finished_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        job.tenant_id, job.id, nullif(job.user_id, 0), job.kind, job.status, job.reason, job.attempts, job.losses,
        job.created_at, job.started_at, job.due_at, job.finished_at
    from rag_jobs as job
    where (list_jobs.only_tenant_id is null or job.tenant_id = list_jobs.only_tenant_id)
        and (list_jobs.only_status is null or job.status = list_jobs.only_status)
    order by job.created_at desc, job.id
    limit list_jobs.most;
end
$$;

comment on function list_jobs(text, text, integer) is 'Jobs of a tenant, or of all, latest first; nothing of what they are about';

create function resubmit_jobs(ids uuid[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    parked record;
    pushed record;
    done bigint := 0;
begin
    for parked in
        select job.tenant_id, job.id, job.kind, job.lock
        from rag_jobs as job
        where job.id = any(resubmit_jobs.ids) and job.status = 'failed' and job.payload is not null
        order by job.created_at, job.id
        for update
    loop
        select queued.* into pushed
        from push_job(parked.tenant_id, parked.id, parked.kind, parked.lock, null) as queued;
        update rag_jobs as job
        set status = 'pending', attempts = 0, losses = 0, queue_id = pushed.queue_id, turn = pushed.turn,
            finished_at = null, due_at = null
        where job.tenant_id = parked.tenant_id and job.id = parked.id;
        done := done + 1;
    end loop;
    return done;
end
$$;

comment on function resubmit_jobs(uuid[]) is 'Puts jobs that failed into the queue again, whatever its limit; how many';

create function cancel_jobs(ids uuid[])
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    queued bigint[];
begin
    with cancelled as (
        update rag_jobs as job
        set status = 'cancelled', claim = null, payload = null, body = null, due_at = null, finished_at = now()
        where job.id = any(cancel_jobs.ids) and job.status in ('pending', 'processing', 'failed')
        returning job.queue_id
    )
    select coalesce(array_agg(gone.queue_id), '{}') into queued from cancelled as gone;
    perform drop_queued(queued);
    return cardinality(queued);
end
$$;

comment on function cancel_jobs(uuid[]) is 'Cancels jobs that have not succeeded; what was sent with them is removed, and one that is being done stores nothing any more; how many';
-- Conversations: what a principal and an assistant said to each other, under row security and read by the principal
-- alone. Messages are never searched. Once enough of them are unsummarised they are claimed for a job, whose id becomes
-- that of their summary; a summary is a document like any other.

create function thread_lock(tenant_id text, user_id bigint, project_id text, thread_id text)
returns bigint
language sql
immutable
parallel safe
begin atomic
    select hashtextextended(
        'palisade thread ' || array_to_json(array[tenant_id, cast(user_id as text), project_id, thread_id])::text, 0
    );
end;

comment on function thread_lock(text, bigint, text, text) is 'Number of the advisory lock of a thread: whoever posts to it holds it until the transaction ends';

create function post_message(
    access_id bigint, thread_id text, role text, content text, tokens integer, request_key bytea, request_digest bytea
)
returns table (
    id uuid, number bigint, created_at timestamptz, summary_id uuid, repeated_digest bytea, open_tokens bigint,
    open_characters bigint
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    class record;
    last_number bigint;
    posted record;
begin
    -- A conversation is of somebody: not of a project of another owner, and not public.
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = post_message.access_id
        and mine.may_write
        and mine.user_id = (select my_user_id());
    if not found then
        raise exception 'no class of the principal''s own' using errcode = 'insufficient_privilege';
    end if;
    -- One after the other within a thread: a place is given once, and a volume is measured by whoever makes it grow.
    perform pg_advisory_xact_lock(
        thread_lock(class.tenant_id, class.user_id, class.project_id, post_message.thread_id)
    );
    select message.* into posted
    from rag_conversation_messages as message
    where message.tenant_id = class.tenant_id
        and message.access_id = class.access_id
        and message.request_key = post_message.request_key;
    if found then
        return query
        select posted.id, posted.number, posted.created_at, posted.summary_id, posted.request_digest,
            cast(0 as bigint), cast(0 as bigint);
        return;
    end if;
    -- Class by class, which the index has in order: a thread of 100,000 messages costs what one of ten does.
    select max(latest.number) into last_number
    from my_classes() as mine
    cross join lateral (
        select message.number
        from rag_conversation_messages as message
        where message.tenant_id = class.tenant_id
            and message.access_id = mine.access_id
            and message.thread_id = post_message.thread_id
        order by message.number desc
        limit 1
    ) as latest
    where mine.user_id = class.user_id and mine.project_id is not distinct from class.project_id;
    insert into rag_conversation_messages as message (
        tenant_id, access_id, user_id, project_id, thread_id, number, role, content, tokens, request_key,
        request_digest, created_at
    )
    values (
        class.tenant_id, class.access_id, class.user_id, class.project_id, post_message.thread_id,
        coalesce(last_number, 0) + 1, post_message.role, post_message.content, post_message.tokens,
        post_message.request_key, post_message.request_digest, clock_timestamp()
    )
    returning message.* into posted;
    return query
    select
        posted.id, posted.number, posted.created_at, posted.summary_id, cast(null as bytea),
        coalesce(sum(message.tokens), 0), coalesce(sum(message.characters), 0)
    from rag_conversation_messages as message
    where message.tenant_id = class.tenant_id
        and message.access_id = class.access_id
        and message.thread_id = post_message.thread_id
        and message.summarised_at is null
        and (message.summary_id is null or not exists (
            select
            from rag_jobs as job
            where job.tenant_id = class.tenant_id and job.id = message.summary_id
        ));
end
$$;

comment on function post_message(bigint, text, text, text, integer, bytea, bytea) is 'Adds a message at the end of a thread of the principal''s own, and says how much of the thread no summary has and no job is to make; with a key that was used before it adds nothing and says what was posted with it. Raises 42501 for a class that is not the principal''s, 23505 when the key was used in another thread meanwhile';

create function claim_messages(access_id bigint, thread_id text, summary_id uuid, most_characters bigint)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    claimed bigint;
begin
    -- Under the lock that post_message() took. What a job had that is known no more may be had again.
    with waiting as (
        select message.id, sum(message.characters) over (order by message.number) - message.characters as before
        from rag_conversation_messages as message
        where message.tenant_id = (select my_tenant_id())
            and message.access_id = claim_messages.access_id
            and message.thread_id = claim_messages.thread_id
            and message.summarised_at is null
            and (message.summary_id is null or not exists (
                select
                from rag_jobs as job
                where job.tenant_id = (select my_tenant_id()) and job.id = message.summary_id
            ))
    )

    update rag_conversation_messages as message
    set summary_id = claim_messages.summary_id
    from waiting
    where message.tenant_id = (select my_tenant_id())
        and message.access_id = claim_messages.access_id
        and message.id = waiting.id
        and waiting.before < claim_messages.most_characters;
    get diagnostics claimed = row_count;
    return claimed;
end
$$;

comment on function claim_messages(bigint, text, uuid, bigint) is 'Gives the oldest messages of a thread that no summary has, and no job that is known, to a job: until there are so many characters; how many messages';

create function my_messages(project_id text, thread_id text, after bigint, at_most integer)
returns table (
    id uuid, number bigint, role text, content text, tokens integer, characters integer, summarised_at timestamptz,
    created_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        page.id, page.number, page.role, page.content, page.tokens, page.characters, page.summarised_at,
        page.created_at
    from my_classes() as mine
    cross join lateral (
        select message.*
        from rag_conversation_messages as message
        where message.tenant_id = mine.tenant_id
            and message.access_id = mine.access_id
            and message.thread_id = my_messages.thread_id
            and message.number > my_messages.after
        order by message.number
        limit my_messages.at_most
    ) as page
    where mine.user_id = (select my_user_id()) and mine.project_id is not distinct from my_messages.project_id
    order by page.number
    -- What went in with other tags may have the same place, and a page begins after one.
    fetch first my_messages.at_most rows with ties;
end
$$;

comment on function my_messages(text, text, bigint, integer) is 'Messages of a thread of the principal''s own behind a place in it, in their order; project_id null: of the user alone';

create function my_summaries(project_id text, thread_id text, at_most integer)
returns table (
    id uuid, document_id uuid, summary_text text, message_ids uuid[], model text, created_at timestamptz
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        summary.id, summary.document_id, summary.summary_text, summary.message_ids, summary.model, summary.created_at
    from rag_conversation_summaries as summary
    where summary.tenant_id = (select my_tenant_id())
        and summary.access_id = any((select my_access_ids())::bigint[])
        and summary.project_id is not distinct from my_summaries.project_id
        and summary.thread_id = my_summaries.thread_id
    order by summary.created_at desc, summary.id
    limit my_summaries.at_most;
end
$$;

comment on function my_summaries(text, text, integer) is 'Summaries of a thread of the principal''s own, latest first';

create function claimed_messages(summary_id uuid)
returns table (id uuid, access_id bigint, thread_id text, role text, content text, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select message.id, message.access_id, message.thread_id, message.role, message.content, message.created_at
    from rag_conversation_messages as message
    where message.tenant_id = (select my_tenant_id())
        and message.access_id = any((select my_writable_access_ids())::bigint[])
        and message.summary_id = claimed_messages.summary_id
        and message.summarised_at is null
    order by message.number, message.id;
end
$$;

comment on function claimed_messages(uuid) is 'The principal''s own messages that a job is to sum up, in their order';

create function add_summary(
    id uuid, access_id bigint, document_id uuid, thread_id text, summary_text text, message_ids uuid[], model text
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    class record;
    marked uuid[];
begin
    select mine.* into class
    from my_classes() as mine
    where mine.access_id = add_summary.access_id
        and mine.may_write
        and mine.user_id = (select my_user_id());
    if not found then
        raise exception 'no class of the principal''s own' using errcode = 'insufficient_privilege';
    end if;
    -- Some may have expired since they were read: the summary knows of them, and nobody else.
    with done as (
        update rag_conversation_messages as message
        set summarised_at = now()
        where message.tenant_id = class.tenant_id
            and message.access_id = class.access_id
            and message.thread_id = add_summary.thread_id
            and message.id = any(add_summary.message_ids)
            and message.summary_id = add_summary.id
            and message.summarised_at is null
        returning message.id
    )

    select coalesce(array_agg(done.id), '{}') into marked from done;
    if marked = '{}' then
        return 0;
    end if;
    insert into rag_conversation_summaries (
        tenant_id, id, access_id, document_id, user_id, project_id, thread_id, summary_text, message_ids, model
    )
    values (
        class.tenant_id, add_summary.id, class.access_id, add_summary.document_id, class.user_id, class.project_id,
        add_summary.thread_id, add_summary.summary_text, add_summary.message_ids, add_summary.model
    );
    return cardinality(marked);
end
$$;

comment on function add_summary(uuid, bigint, uuid, text, text, uuid[], text) is 'Keeps a summary of messages of the principal''s own beside its document, and marks them as summarised, in one transaction with both; how many messages. 0, and no summary, when none of them is left that was given to it';
-- Text to lexemes, of chunks and of questions, in any language.
--
-- The parser of full text cuts words where letters end, and asks the database's locale what a letter is.
-- Under C, and so under the builtin C.UTF-8, every character beyond ASCII is one: „Haus“ is a word with
-- quotation marks inside. And it looks for words where none are marked: a Chinese sentence is one word under
-- every locale. Both are settled here before it reads the text, in the same way under every locale.

create function text_search_config(language text)
returns regconfig
language sql
immutable
parallel safe
begin atomic
    select case language
        when 'ar' then 'pg_catalog.arabic'
        when 'ca' then 'pg_catalog.catalan'
        when 'da' then 'pg_catalog.danish'
        when 'de' then 'pg_catalog.german'
        when 'el' then 'pg_catalog.greek'
        when 'en' then 'pg_catalog.english'
        when 'es' then 'pg_catalog.spanish'
        when 'eu' then 'pg_catalog.basque'
        when 'fi' then 'pg_catalog.finnish'
        when 'fr' then 'pg_catalog.french'
        when 'ga' then 'pg_catalog.irish'
        when 'hi' then 'pg_catalog.hindi'
        when 'hu' then 'pg_catalog.hungarian'
        when 'hy' then 'pg_catalog.armenian'
        when 'id' then 'pg_catalog.indonesian'
        when 'it' then 'pg_catalog.italian'
        when 'lt' then 'pg_catalog.lithuanian'
        when 'ne' then 'pg_catalog.nepali'
        when 'nl' then 'pg_catalog.dutch'
        when 'no' then 'pg_catalog.norwegian'
        when 'pt' then 'pg_catalog.portuguese'
        when 'ro' then 'pg_catalog.romanian'
        when 'ru' then 'pg_catalog.russian'
        when 'sr' then 'pg_catalog.serbian'
        when 'sv' then 'pg_catalog.swedish'
        when 'ta' then 'pg_catalog.tamil'
        when 'tr' then 'pg_catalog.turkish'
        when 'yi' then 'pg_catalog.yiddish'
        else 'pg_catalog.simple'
    end::regconfig;
end;

comment on function text_search_config(text) is 'The text-search configuration for an ISO 639-1 language code; simple for every other value and for null';

create function unspaced_letters()
returns text
language sql
immutable
parallel safe
begin atomic
    -- Han, kana, bopomofo and Hangul; then Thai, Lao, Myanmar, Khmer, and the Tai scripts.
    select '\u1100-\u11FF\u2E80-\u2FDF\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3038-\u303C\u3041-\u309A\u309D-\u309F'
        || '\u30A1-\u30FA\u30FC-\u30FF\u3105-\u312F\u3131-\u318E\u31A0-\u31BF\u31F0-\u31FF\u3400-\u4DBF\u4E00-\u9FFF'
        || '\uA960-\uA97C\uAC00-\uD7FB\uF900-\uFAFF\U0001AFF0-\U0001B16F\U00020000-\U0003FFFD'
        || '\u0E01-\u0E3A\u0E40-\u0E4E\u0E81-\u0ECE\u0EDC-\u0EDF\u1000-\u103F\u1050-\u108F\u109A-\u109D'
        || '\uA9E0-\uA9EF\uA9FA-\uA9FE\uAA60-\uAA7F\u1780-\u17D3\u17DC\u17DD\u1950-\u1974\u1980-\u19C9'
        || '\u1A20-\u1A7C\uAA80-\uAADD';
end;

comment on function unspaced_letters() is 'The letters and marks, for a bracket expression, of scripts where no space tells where a word begins; Hangul too, where a space tells little: endings are written onto the word';

create function unspaced_unit()
returns text
language sql
immutable
parallel safe
begin atomic
    -- A vowel that is written before its consonant but spoken after it, a letter, and the marks on it. No text
    -- has more than four of those; an unbounded number would make lexemes that are too long to be stored.
    select '[\u0E40-\u0E44\u0EC0-\u0EC4]?'
        || '[^ \u0E31\u0E34-\u0E3A\u0E47-\u0E4E\u0EB1\u0EB4-\u0EBC\u0EC8-\u0ECE\u102B-\u103E\u1056-\u1059\u105E-\u1060'
        || '\u1062-\u1064\u1067-\u106D\u1071-\u1074\u1082-\u108D\u108F\u109A-\u109D\u17B4-\u17D3\u17DD\u1A55-\u1A7C]'
        || '[\u0E31\u0E34-\u0E3A\u0E47-\u0E4E\u0EB1\u0EB4-\u0EBC\u0EC8-\u0ECE\u102B-\u103E\u1056-\u1059\u105E-\u1060'
        || '\u1062-\u1064\u1067-\u106D\u1071-\u1074\u1082-\u108D\u108F\u109A-\u109D\u17B4-\u17D3\u17DD\u1A55-\u1A7C]{0,6}'
        || '|.';
end;

comment on function unspaced_unit() is 'A regular expression for what pairs are made of: one letter of the unspaced scripts with its marks';

-- Pairs of neighbours are what words are made of in these scripts. On sections of the FastAPI manual in
-- Chinese, Japanese and Korean, asked for by 1,900 headings (nDCG@10 of BM25, k1 1.2, b 0.75): pairs .496, .435,
-- .441; triples .374, .399, .363; single letters .479, .389, .411; the parser's words .112, .075, .273. Singles
-- and pairs together gain .02 and double the index. Thai, with 44 headings of the React manual: pairs of
-- letters with their marks .598, of bare characters .574.
create function unspaced_vector(content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- With no delimiter, each character is a unit: three times as fast, and all that East Asia needs.
    with unit as (
        select
            entry.unit,
            lag(entry.unit, 1, ' ') over text_order as before,
            lead(entry.unit, 1, ' ') over text_order as after,
            entry.place
        from (
            select regexp_replace(unspaced_vector.content, '[^' || unspaced_letters() || ']+', ' ', 'g') as content
        ) as run
        cross join lateral (
            select run.content ~ '[\u0E00-\u0EFF\u1000-\u109F\u1780-\u17FF\u1950-\u19FF\u1A20-\u1AAF\uA9E0-\uA9FF\uAA60-\uAADF]'
        ) as script (has_marks)
        cross join lateral string_to_table(
            case
                when script.has_marks then regexp_replace(run.content, unspaced_unit(), '\&|', 'g')
                else run.content
            end,
            case when script.has_marks then '|' end
        ) with ordinality as entry (unit, place)
        window text_order as (order by entry.place)
    )

    select coalesce(cast(string_agg('''' || lexeme.lexeme || ''':' || unit.place, ' ') as tsvector), cast('' as tsvector))
    from unit
    cross join lateral (
        select case
            when unit.after not in (' ', '') then unit.unit || unit.after
            when not unspaced_vector.asked or unit.before = ' ' then unit.unit
        end as lexeme
    ) as lexeme
    where unit.unit not in (' ', '')
        and lexeme.lexeme is not null;
end;

comment on function unspaced_vector(text, boolean) is 'Each two neighbouring letters of the unspaced scripts as a lexeme, at its place in the text. The last letter of a run is a lexeme too, so that every letter begins exactly one; in a question it is one only where the run has no other';

create function prepared_vector(configuration regconfig, content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- What no one sees goes: soft hyphens, joiners, directions, variants of form. Then what no word contains
    -- becomes a space; in turn: Latin to Syriac; India; Thailand to Mongolia; general punctuation, symbols and
    -- East Asia; private use, where fonts keep their bullets; forms of presentation; pictures.
    with separated as materialized (
        select regexp_replace(
            regexp_replace(
                prepared_vector.content,
                '[\u00AD\u061C\u180B-\u180F\u200B-\u200F\u202A-\u202E\u2060-\u206F\uFE00-\uFE0F\uFEFF\uFFF9-\uFFFB'
                || '\U000E0001-\U000E01EF]',
                '',
                'g'
            ),
            '[\u0080-\u00A9\u00AB\u00AC\u00AE-\u00B1\u00B4\u00B6-\u00B8\u00BB-\u00BF\u00D7\u00F7'
            || '\u02C2-\u02C5\u02D2-\u02DF\u037E\u0384\u0385\u0387\u03F6\u0482\u055A-\u055F\u0589-\u058F'
            || '\u05BE\u05C0\u05C3\u05C6\u05F3\u05F4\u0606-\u060F\u061B\u061D-\u061F\u066A-\u066D\u06D4\u06DE\u06E9'
            || '\u06FD\u06FE\u0700-\u070D'
            || '\u0964\u0965\u0970\u09F2\u09F3\u09FA\u09FB\u09FD\u0A76\u0AF0\u0AF1\u0B70\u0BF3-\u0BFA\u0C77\u0C7F'
            || '\u0C84\u0D4F\u0D79\u0DF4'
            || '\u0E2F\u0E3F\u0E46\u0E4F\u0E5A\u0E5B\u0EAF\u0EC6\u0F01-\u0F17\u0F1A-\u0F1F\u0F34\u0F36\u0F38'
            || '\u0F3A-\u0F3D\u0F85\u0FBE-\u0FC5\u0FC7-\u0FDA\u104A-\u104F\u109E\u109F\u10FB\u1360-\u1368'
            || '\u1390-\u1399\u1400\u166D\u166E\u1680\u169B\u169C\u16EB-\u16ED\u1735\u1736\u17D4-\u17DB\u1800-\u180A'
            || '\u1FBD\u1FBF-\u1FC1\u1FCD-\u1FCF\u1FDD-\u1FDF\u1FED-\u1FEF\u1FFD-\u200A\u2010-\u2029\u202F-\u205F'
            || '\u207A-\u207E\u208A-\u208E\u20A0-\u20CF\u2100-\u2109\u2114-\u2118\u211E-\u2125\u2127\u2129'
            || '\u213A\u213B\u2140-\u2144\u214A-\u214D\u2150-\u215F\u2189-\u2BFF\u2E00-\u2E7F\u2FF0-\u3004'
            || '\u3008-\u3020\u3030\u3036\u3037\u303D-\u303F\u309B\u309C\u30A0\u30FB\u3190-\u319F\u31C0-\u31EF'
            || '\u4DC0-\u4DFF'
            || '\uE000-\uF8FF'
            || '\uFBB2-\uFBC2\uFD3E-\uFD4F\uFDFC-\uFDFF\uFE10-\uFE19\uFE30-\uFE6B\uFF01-\uFF0F\uFF1A-\uFF20'
            || '\uFF3B-\uFF40\uFF5B-\uFF65\uFFE0-\uFFEE\uFFFC\uFFFD'
            || '\U0001F000-\U0001FBCA]+',
            ' ',
            'g'
        ) as content
    ),

    -- Letters in full or half width, ligatures, accents in characters of their own: one form for all of them.
    composed as materialized (
        select case
            when separated.content is nfkc normalized then separated.content
            else normalize(separated.content, nfkc)
        end as content
        from separated
    )

    select case
        when composed.content !~ ('[' || unspaced_letters() || ']')
            then to_tsvector(prepared_vector.configuration, composed.content)
        else
            to_tsvector(
                prepared_vector.configuration,
                regexp_replace(composed.content, '[' || unspaced_letters() || ']+', ' ', 'g')
            )
            || unspaced_vector(composed.content, prepared_vector.asked)
    end
    from composed;
end;

comment on function prepared_vector(regconfig, text, boolean) is 'Lexemes of a text that the parser cannot take as it is, those of spaced scripts first; asked: of a question';

create function text_vector(language text, content text, asked boolean)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    -- ASCII, and of Latin, Greek, Cyrillic, Hebrew, Arabic and Vietnamese the letters that are composed. The
    -- preparation adds a third to what the parser costs, the test nothing that can be measured.
    select case
        when content !~ (
            '[^\x01-\x7F\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u0131\u0134-\u013E\u0141-\u0148\u014A-\u017E'
            || '\u0386\u0388-\u038A\u038E-\u03A1\u03A3-\u03CE\u0400-\u0481\u048A-\u052F\u05D0-\u05EA'
            || '\u0620-\u064A\u0660-\u0669\u066E\u066F\u0671-\u0674\u0679-\u06D3\u1EA0-\u1EFF]'
        ) then to_tsvector(text_search_config(language), content)
        else prepared_vector(text_search_config(language), content, asked)
    end;
end;

comment on function text_vector(text, text, boolean) is 'Lexemes of a text in the configuration of its language (ISO 639-1); asked: of a question';

create function search_vector(language text, content text)
returns tsvector
language sql
immutable
parallel safe
begin atomic
    select text_vector(language, content, false);
end;

comment on function search_vector(text, text) is 'What rag_chunks.tsv holds: the lexemes of a text in the configuration of its language (ISO 639-1; null: unknown). Raises for no text of up to 32 KiB';

create function question_lexemes(language text, question text)
returns table (lexeme text, weight integer, place integer)
language sql
immutable
parallel safe
rows 10
begin atomic
    -- 64 distinct lexemes are more than a question has; a pasted page is cut to its first ones.
    select
        entry.lexeme,
        cardinality(entry.positions),
        cast(row_number() over (order by entry.positions[1], entry.lexeme) as integer) as place
    from unnest(text_vector(question_lexemes.language, question_lexemes.question, true)) as entry
    order by place
    limit 64;
end;

comment on function question_lexemes(text, text) is 'The distinct lexemes of a question as search_vector makes them, first ones first, at most 64; those of scripts without spaces come after the others. weight: occurrences; place: 1, 2, …';

create function lexeme_total(document tsvector)
returns integer
language sql
immutable
parallel safe
begin atomic
    select cast(coalesce(sum(cardinality(entry.positions)), 0) as integer)
    from unnest(document) as entry;
end;

comment on function lexeme_total(tsvector) is 'Occurrences of all lexemes of a tsvector, the document length of BM25; a lexeme counts up to 255 times';

create function lexeme_query(lexeme text)
returns tsquery
language sql
immutable
parallel safe
begin atomic
    -- A single letter of the unspaced scripts asks for all pairs that begin with it, which is wherever it stands.
    select cast(
        '''' || replace(replace(lexeme, '\', '\\'), '''', '''''') || ''''
        || case
            when lexeme ~ ('^[' || unspaced_letters() || ']') and lexeme ~ ('^(?:' || unspaced_unit() || ')$') then ':*'
            else ''
        end
        as tsquery
    );
end;

comment on function lexeme_query(text) is 'The query for exactly this lexeme, whatever characters it has; for a single letter of the unspaced scripts, the query for every pair that begins with it';
-- Retrieval. `search` is what the service and psql call; it runs as rag_principal, under the caller's policies.
-- Nothing is indexed or counted across access classes. A small class is read whole, through the b-tree. A large
-- one (`ready` in rag_class_indexes) has statistics of its words, and indexes of its own: an HNSW and a GIN; a
-- statement reaches them by naming the class as a literal. `rag maintain` cares for these.

-- A definer function because the comparison of texts is not leakproof: under row security no index could serve it.
create function class_contents(only_scope text)
returns table (embedding_model text, language text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
-- Every step is one probe of rag_chunks_contents, which has this order.
set enable_seqscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tenant constant text := my_tenant_id();
begin
    return query
    with recursive content as (
        select class.access_id, first.embedding_model, first.language
        from unnest(narrowed_access_ids(class_contents.only_scope)) as class (access_id)
        cross join lateral (
            select chunk.embedding_model, coalesce(chunk.language, '') as language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = class.access_id
            order by chunk.embedding_model, coalesce(chunk.language, '')
            limit 1
        ) as first
        union all
        select content.access_id, next.embedding_model, next.language
        from content
        cross join lateral (
            select chunk.embedding_model, coalesce(chunk.language, '') as language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = content.access_id
                and (chunk.embedding_model, coalesce(chunk.language, '')) > (content.embedding_model, content.language)
            order by chunk.embedding_model, coalesce(chunk.language, '')
            limit 1
        ) as next
    )

    select content.embedding_model, nullif(content.language, '')
    from content
    group by 1, 2;
end
$$;

comment on function class_contents(text) is 'Which embedding models and languages the chunks that the principal may read have; two or three probes of an index for each class, whatever its size';

create function indexed_among(access_ids bigint[])
returns bigint[]
language sql
stable
security definer
set search_path = rag, pg_temp
begin atomic
    select array(
        select class.access_id
        from rag_class_indexes as class
        where class.tenant_id = (select me.tenant_id from my_principal() as me)
            and class.access_id = any(indexed_among.access_ids)
            and class.ready
        order by class.access_id
    );
end;

comment on function indexed_among(bigint[]) is 'Of these classes, those of the principal''s tenant that have indexes of their own';

-- Σ of document frequencies is bounded by the budget: every candidate is a row that has to be read.
create function candidate_query(lexemes text[], frequencies bigint[], chunks bigint, budget bigint)
returns tsquery
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
declare
    candidates tsquery;
    expected double precision := 0;
    term record;
    frequent text[] := '{}';
    counts bigint[] := '{}';
begin
    for term in
        select given.lexeme, given.frequency
        from unnest(candidate_query.lexemes, candidate_query.frequencies) as given (lexeme, frequency)
        order by given.frequency, given.lexeme
    loop
        if expected + term.frequency <= candidate_query.budget then
            candidates := coalesce(candidates || lexeme_query(term.lexeme), lexeme_query(term.lexeme));
            expected := expected + term.frequency;
        else
            frequent := frequent || term.lexeme;
            counts := counts || term.frequency;
        end if;
    end loop;
    -- Of the frequent ones, chunks that have two of them, those of the rarest pair first. Words that are
    -- asked for together occur together more often than by chance; three times as often is assumed.
    for term in
        select
            lexeme_query(frequent[a]) && lexeme_query(frequent[b]) as pair,
            3.0 * counts[a] * counts[b] / greatest(candidate_query.chunks, 1) as likely
        from generate_series(1, cardinality(frequent)) as a
        join generate_series(1, cardinality(frequent)) as b on a < b
        order by cast(counts[a] as numeric) * counts[b], a, b
    loop
        exit when expected + term.likely > candidate_query.budget;
        candidates := coalesce(candidates || term.pair, term.pair);
        expected := expected + term.likely;
    end loop;
    if candidates is null then
        -- Nothing but frequent words: chunks that have them all.
        select cast(string_agg('(' || lexeme_query(given.lexeme)::text || ')', ' & ') as tsquery)
        into candidates
        from unnest(frequent) as given (lexeme);
    end if;
    return candidates;
end
$$;

comment on function candidate_query(text[], bigint[], bigint, bigint) is 'Matches about budget chunks that can have a high BM25 score: those with a rare word of the question, and, as far as the budget reaches, those with two frequent ones. frequencies: chunks that have each lexeme; chunks: how many there are';

-- BM25 over the chunks that the caller may read. It is a definer function because the operator @@ is
-- not leakproof: under row security no full-text index could serve it. It takes its classes from the
-- principal and never from an argument, and gives out ids and numbers only; `search` joins them with
-- rag_chunks again, under the caller's policies, which stay the barrier. The rows of small classes are read
-- for their words; given a vector, their distances are taken on the same way.
create function keyword_candidates(
    question text,
    only_scope text,
    only_documents uuid[],
    depth integer,
    nominee_access_ids bigint[] default '{}',
    nominee_ids uuid[] default '{}',
    known_languages text[] default null,
    embedding halfvec default null,
    embedding_model text default null
)
returns table (
    access_id bigint,
    chunk_id uuid,
    keyword_score double precision,
    keyword_share double precision,
    nominated boolean,
    distance double precision
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
-- The planner guesses ten classes, which may be all there are, and would read everybody's chunks.
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(keyword_candidates.only_scope);
    indexed constant bigint[] := indexed_among(visible);
    scanned constant bigint[] := array(
        select mine.access_id from unnest(visible) as mine (access_id) where mine.access_id <> all(indexed)
    );
    -- Rows of a large class that are read for their score. Of the fused top ten in 200,000 chunks 95 % are right with
    -- 500, 99 % with 1,000, all with 2,000, and 4,000 take a tenth longer (bench/results/speed.md, the frontier).
    budget constant bigint := 2000 * greatest(1, keyword_candidates.depth / 50);
    -- The languages of what is visible. Each is a collection of its own: a question has other lexemes there.
    languages text[];
    sizes bigint[];
    lengths bigint[];
    -- The lexemes of the question in each language; bit is their place among them, from 0.
    places integer[];
    bits integer[];
    lexemes text[];
    weights integer[];
    frequencies bigint[];
    -- Pieces of the statement.
    occurrences text;
    occurring text;
    occurrence_columns text;
    score text;
    placed text;
    scans text;
begin
    languages := coalesce(
        keyword_candidates.known_languages,
        array(select distinct contents.language from class_contents(keyword_candidates.only_scope) as contents)
    );
    -- Of a large class they are counted beforehand; a language may have come after the counting.
    select
        array_agg(collection.language order by collection.language),
        array_agg(collection.chunks order by collection.language),
        array_agg(collection.lexemes order by collection.language)
    into languages, sizes, lengths
    from (
        select part.language, cast(sum(part.chunks) as bigint) as chunks, cast(sum(part.lexemes) as bigint) as lexemes
        from (
            select given.language, 0 as chunks, 0 as lexemes
            from unnest(languages) as given (language)
            union all
            select nullif(counted.language, ''), counted.chunks, counted.lexemes
            from unnest(indexed) as mine (access_id)
            cross join lateral (
                select class.language, class.chunks, class.lexemes
                from rag_class_languages as class
                where class.tenant_id = tenant
                    and class.access_id = mine.access_id
                offset 0
            ) as counted
        ) as part
        group by part.language
    ) as collection;

    select
        array_agg(term.place),
        array_agg(term.bit),
        array_agg(term.lexeme),
        array_agg(term.weight),
        array_agg(term.chunks)
    into places, bits, lexemes, weights, frequencies
    from (
        select
            cast(collection.place as integer) as place,
            cast(row_number() over (partition by collection.place order by entry.place) - 1 as integer) as bit,
            entry.lexeme,
            entry.weight,
            coalesce(counted.chunks, 0) as chunks
        from unnest(languages) with ordinality as collection (language, place)
        cross join lateral question_lexemes(collection.language, keyword_candidates.question) as entry
        left join lateral (
            select sum(class.chunks) as chunks
            from unnest(indexed) as mine (access_id)
            -- By the whole key: by a part of it, rows of others are read as well, and told from one's own afterwards.
            cross join lateral (
                select class.chunks
                from rag_class_lexemes as class
                where class.tenant_id = tenant
                    and class.access_id = mine.access_id
                    and class.language = coalesce(collection.language, '')
                    and class.lexeme = entry.lexeme
                offset 0
            ) as class
        ) as counted on true
    ) as term;
    if lexemes is null then
        return;
    end if;

    -- How often a chunk has each lexeme of the question in its language, null for never: columns t0, t1, …, so that
    -- its row is read once. With all four weights at 1, ts_rank_cd of a single lexeme is the number of its occurrences.
    select
        string_agg(format('case found.place %s end as t%s', term.cases, term.bit), ', ' order by term.bit),
        string_agg(format('count(matched.t%s)', term.bit), ', ' order by term.bit),
        string_agg(format('matched.t%s', term.bit), ', ' order by term.bit),
        -- n / (n + k) is 1 - k / (n + k), in which n is counted once.
        string_agg(
            format('coalesce(matched.weights[%s] * (1 - matched.k / (matched.t%s + matched.k)), 0)', term.bit + 1, term.bit),
            ' + ' order by term.bit
        )
    into occurrences, occurring, occurrence_columns, score
    from (
        select
            entry.bit,
            string_agg(
                format(
                    'when %1$s then case when found.tsv @@ %2$L::tsquery '
                    'then ts_rank_cd(''{1, 1, 1, 1}'', found.tsv, %2$L::tsquery) end',
                    entry.place, lexeme_query(entry.lexeme)
                ),
                ' '
                order by entry.place
            ) as cases
        from unnest(places, bits, lexemes) as entry (place, bit, lexeme)
        group by entry.bit
    ) as term;
    select
        format(
            'chunk.access_id, chunk.id, chunk.document_id, chunk.lexeme_count, chunk.tsv, chunk.embedding_model, '
            'chunk.embedding, case %s end as place',
            string_agg(format('when chunk.language is not distinct from %L then %s', given.language, given.place), ' ')
        )
    into placed
    from unnest(languages) with ordinality as given (language, place);

    scans := format(
        'select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, true as counted, '
        'case when found.embedding_model = $14 and ($3 is null or found.document_id = any($3)) '
        'then found.embedding <=> $15 end as distance, %s '
        'from (select %s from rag_chunks as chunk where chunk.tenant_id = $1 and chunk.access_id = any($2) offset 0) '
        'as found',
        occurrences, placed
    );
    if indexed <> '{}' then
        -- The planner, which has no statistics of tenants, takes the rows of one for few and would read the class
        -- through the b-tree; a comparison that no index serves leaves it the class's own.
        scans := scans || coalesce((
            select string_agg(
                format(
                    ' union all select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, '
                    'false, null, %s '
                    'from (select %s from rag_chunks as chunk '
                    'where coalesce(chunk.tenant_id = $1, false) and chunk.access_id = %L::bigint '
                    'and chunk.language is not distinct from %L and chunk.tsv @@ %L::tsquery '
                    'and ($3 is null or chunk.document_id = any($3)) limit %s) as found',
                    occurrences,
                    placed,
                    class.access_id,
                    class.language,
                    class.query,
                    budget * 3 / 2
                ),
                ''
            )
            from (
                select
                    mine.access_id,
                    collection.language,
                    candidate_query(
                        array_agg(entry.lexeme),
                        array_agg(coalesce(counted.chunks, 1)),
                        max(coalesce(collected.chunks, 1)),
                        budget
                    ) as query
                from unnest(indexed) as mine (access_id)
                cross join unnest(languages) with ordinality as collection (language, place)
                join unnest(places, lexemes) as entry (place, lexeme) on entry.place = collection.place
                left join lateral (
                    select class.chunks
                    from rag_class_languages as class
                    where class.tenant_id = tenant
                        and class.access_id = mine.access_id
                        and class.language = coalesce(collection.language, '')
                    offset 0
                ) as collected on true
                left join lateral (
                    select class.chunks
                    from rag_class_lexemes as class
                    where class.tenant_id = tenant
                        and class.access_id = mine.access_id
                        and class.language = coalesce(collection.language, '')
                        and class.lexeme = entry.lexeme
                    offset 0
                ) as counted on true
                group by mine.access_id, collection.language
            ) as class
        ), '');
    end if;

    return query execute format(
        $statement$
        with matched as materialized (
            %s
        ),

        -- What is not counted beforehand.
        counted as materialized (
            select
                matched.place,
                count(*) as chunks,
                sum(matched.lexeme_count) as lexemes,
                array[%s] as frequencies
            from matched
            where matched.counted
            group by matched.place
        ),

        collection as materialized (
            select
                given.place,
                given.chunks + coalesce(counted.chunks, 0) as chunks,
                greatest(
                    (given.lexemes + coalesce(counted.lexemes, 0))::double precision
                    / greatest(given.chunks + coalesce(counted.chunks, 0), 1),
                    1
                ) as mean_length,
                counted.frequencies
            from unnest($8::bigint[], $9::bigint[]) with ordinality as given (chunks, lexemes, place)
            left join counted on counted.place = given.place
        ),

        -- Robertson and Zaragoza 2009, with the idf of Lucene, which is never negative.
        weighted as materialized (
            select
                collection.place,
                min(collection.mean_length) as mean_length,
                array_agg(term.weight * idf.idf order by term.bit) as weights,
                sum(term.weight * idf.idf) as ceiling
            from unnest($4::integer[], $5::integer[], $6::integer[], $7::bigint[])
                as term (place, bit, weight, chunks)
            join collection on collection.place = term.place
            cross join lateral (
                select term.chunks + coalesce(collection.frequencies[term.bit + 1], 0) as chunks
            ) as frequency
            cross join lateral (
                select ln(
                    1 + (greatest(collection.chunks - frequency.chunks, 0) + 0.5) / (frequency.chunks + 0.5)
                )::double precision as idf
            ) as idf
            group by collection.place
        ),

        -- k1 = 1.2 and b = 0.75: the usual values, Manning, Raghavan and Schütze 2008, section 11.4.3. Scores of two
        -- languages compare as fractions of what each question could reach: in a collection of a few chunks every
        -- word is frequent, and has next to no weight.
        scored as materialized (
            select
                matched.access_id,
                matched.id,
                matched.likely,
                matched.score * (1.2 + 1) as score,
                matched.score / matched.ceiling as share
            from (
                select matched.access_id, matched.id, matched.likely, matched.ceiling, %s as score
                from (
                    select
                        matched.*,
                        weighted.weights,
                        weighted.ceiling,
                        1.2 * (1 - 0.75 + 0.75 * (matched.lexeme_count / weighted.mean_length)) as k
                    from (
                        select matched.*, true as likely
                        from matched
                        where coalesce(%s) is not null
                            and ($3 is null or matched.document_id = any($3))
                        %s
                    ) as matched
                    join weighted on weighted.place = matched.place
                    offset 0
                ) as matched
                offset 0
            ) as matched
        ),

        best as materialized (
            select scored.access_id, scored.id, scored.score, scored.share
            from scored
            where scored.likely
            order by scored.share desc, scored.id
            limit $10
        ),

        near as materialized (
            select matched.access_id, matched.id, matched.distance
            from matched
            where matched.distance is not null
            order by matched.distance, matched.id
            limit $10
        ),

        named as (
            select best.access_id, best.id, true as nominated, null as distance
            from best
            union all
            select near.access_id, near.id, false, near.distance
            from near
            union all
            select nominee.access_id, nominee.id, false, null
            from unnest($11::bigint[], $12::uuid[]) as nominee (access_id, id)
        )

        select
            named.access_id,
            named.id,
            coalesce(max(scored.score), 0),
            coalesce(max(scored.share), 0),
            bool_or(named.nominated),
            min(named.distance)
        from named
        left join scored on scored.access_id = named.access_id and scored.id = named.id
        group by named.access_id, named.id
        having max(scored.score) > 0 or min(named.distance) is not null
        order by 4 desc, 2
        $statement$,
        scans, occurring, score, occurrence_columns,
        -- Of those that another arm nominates, the ones of large classes may have been passed over.
        case when keyword_candidates.nominee_ids <> '{}' and indexed <> '{}' then format(
            'union all select found.access_id, found.id, found.document_id, found.lexeme_count, found.place, false, '
            'null, %s, false from unnest($11::bigint[], $12::uuid[]) as nominee (access_id, id) cross join lateral ('
            'select %s from rag_chunks as chunk '
            'where chunk.tenant_id = $1 and chunk.access_id = nominee.access_id and chunk.id = nominee.id '
            'offset 0) as found '
            'where nominee.access_id = any($13) and not exists ('
            'select from matched where matched.access_id = nominee.access_id and matched.id = nominee.id)',
            occurrences, placed
        ) end
    )
    using
        tenant, scanned, keyword_candidates.only_documents,
        places, bits, weights, frequencies,
        sizes, lengths,
        keyword_candidates.depth,
        keyword_candidates.nominee_access_ids, keyword_candidates.nominee_ids, indexed,
        keyword_candidates.embedding_model, keyword_candidates.embedding;
end
$$;

comment on function keyword_candidates(text, text, uuid[], integer, bigint[], uuid[], text[], halfvec, text) is 'The depth best chunks by BM25 among those that the principal may read, nominated; given a vector, the depth nearest of small classes with their distance; and of both, and of the given nominees of another arm, what has a word of the question its score, best first. keyword_share is the score as a fraction of the most that any chunk could reach. Small classes are read whole; of a large one those chunks are scored that have one of the rarer words. Takes its access classes from the principal alone';

create function nearest_indexed(
    class_id bigint, embedding halfvec, embedding_model text, only_documents uuid[], depth integer, breadth integer
)
returns table (access_id bigint, chunk_id uuid, distance double precision)
language plpgsql
stable
set search_path = rag, pg_temp
-- The order comes from the index or not at all: sorting the class would be exact and take its size.
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    statement constant text := format(
        'select array_agg(near.id), array_agg(near.distance), max(near.distance) < 1.1 * min(near.distance) from ('
        'select chunk.id, chunk.embedding <=> $1 as distance from rag_chunks as chunk '
        'where chunk.tenant_id = $2 and chunk.access_id = %L::bigint and chunk.embedding_model = $3 '
        'and ($4 is null or chunk.document_id = any($4)) '
        'order by chunk.embedding <=> $1 limit $5) as near',
        nearest_indexed.class_id
    );
    ids uuid[];
    distances double precision[];
    flat boolean;
begin
    -- In force until this function ends, like the settings above.
    perform
        set_config('hnsw.iterative_scan', 'relaxed_order', true),
        set_config('hnsw.ef_search', nearest_indexed.breadth::text, true);
    execute statement
    into ids, distances, flat
    using
        nearest_indexed.embedding, tenant, nearest_indexed.embedding_model, nearest_indexed.only_documents,
        nearest_indexed.depth;
    -- A question that is near to nothing has its nearest chunks all over the graph, at much the same distance, where
    -- one walk misses half of them: then it goes on through the best 3,000. In 200,000 generated chunks the farthest
    -- of 50 was 24 % or more beyond the nearest for 30 questions near a chunk, and at most 6 % for 30 random vectors.
    if flat and cardinality(ids) = nearest_indexed.depth then
        perform set_config('hnsw.ef_search', '1000', true);
        execute statement
        into ids, distances, flat
        using
            nearest_indexed.embedding, tenant, nearest_indexed.embedding_model, nearest_indexed.only_documents,
            greatest(3000, nearest_indexed.depth);
        select array_agg(best.id), array_agg(best.distance)
        into ids, distances
        from (
            select near.id, near.distance
            from unnest(ids, distances) as near (id, distance)
            order by near.distance, near.id
            limit nearest_indexed.depth
        ) as best;
    end if;
    -- The scan of the graph ends after some 20,000 chunks. What passes so few is looked for without it.
    if coalesce(cardinality(ids), 0) < nearest_indexed.depth then
        select array_agg(near.id), array_agg(near.distance)
        into ids, distances
        from (
            select chunk.id, chunk.embedding <=> nearest_indexed.embedding as distance
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = nearest_indexed.class_id
                and chunk.embedding_model = nearest_indexed.embedding_model
                and (
                    nearest_indexed.only_documents is null or chunk.document_id = any(nearest_indexed.only_documents)
                )
            order by distance
            limit nearest_indexed.depth
        ) as near;
    end if;
    return query
    select nearest_indexed.class_id, near.id, near.distance
    from unnest(ids, distances) as near (id, distance);
end
$$;

comment on function nearest_indexed(bigint, halfvec, text, uuid[], integer, integer) is 'The depth nearest chunks of one class that has an HNSW of its own, under the caller''s policies, in no order; breadth is hnsw.ef_search, more is slower and misses less';

-- How far an embedding model is believed against the words, from 0 to 1. Chosen on questions judged offline, with
-- all-MiniLM-L6-v2, exact cosines and the constants of fuse_candidates; nDCG@10 with it, by rank and by score:
-- SQuAD .900 .908, Cranfield .466 .472, CovidQA .710 .739, XQuAD de .922 .931, ru .941 .940. In Russian, which the
-- model does not know, its own order gives .276, the words alone .941; in German, which shares the script and many
-- pieces of words with English, .712 and .921.
create function vector_share(embedding_model text, language text, fusion text)
returns double precision
language sql
immutable
parallel safe
begin atomic
    select case
        when
            language <> 'en'
            -- Models that know English alone.
            and embedding_model ~* (
                '(all-minilm|all-mpnet|multi-qa-m|nomic-embed-text(-v1|:|$)|mxbai-embed-large'
                || '|snowflake-arctic-embed(:|-[a-z]+(:|$)|$)'
                || '|bge-(small|base|large)-en|gte-(small|base|large)(-en|$)|(^|[/:])e5-(small|base|large)(-v2)?$)'
            )
            then case
                when fusion = 'rank' then 0.08
                -- Languages of other scripts than Latin.
                when language = any(
                    '{am,ar,be,bg,bn,bo,cv,dv,dz,el,fa,gu,he,hi,hy,ii,ja,ka,kk,km,kn,ko,ky,lo,mk,ml,mn,mr,my,ne,or,os}'
                    || cast('{pa,ps,ru,sa,sd,si,sr,ta,te,tg,th,ti,tt,ug,uk,ur,yi,zh}' as text[])
                ) then 0.1
                else 0.6
            end
        else case fusion when 'score' then 0.6 else 0.46 end
    end;
end;

comment on function vector_share(text, text, text) is 'Weight of the vector arm in a fusion (rank or score), the rest being that of the keywords: less for a language that the model does not know, where it would outvote the right words. A language that is not known counts as one that the model knows. As shipped: a row of rag_calibrations comes before it';

-- What readers made of documents, each class by itself. A definer function, since it counts others' words; it takes
-- its classes from the principal and gives out one number for a document, never who said what.
create function feedback_support(document_ids uuid[])
returns table (access_id bigint, document_id uuid, support double precision)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    -- As many neutral voices are counted in, so that one person moves a document by a quarter of the boost at most.
    prior constant double precision := 3;
begin
    return query
    select voice.access_id, voice.document_id, sum(voice.vote) / (count(*) + prior)
    from (
        -- One voice a person, whatever they click: the mean of what they said. To open a source is half of praising it.
        select
            said.access_id,
            said.document_id,
            avg(coalesce(said.rating, case when said.clicked then 0.5 else 0 end)::double precision) as vote
        from unnest(my_access_ids()) as mine (access_id)
        cross join lateral (
            select given.access_id, given.document_id, given.user_id, given.rating, given.clicked
            from rag_feedback as given
            where given.tenant_id = tenant
                and given.access_id = mine.access_id
                and given.document_id = any(feedback_support.document_ids)
            offset 0
        ) as said
        group by said.access_id, said.document_id, said.user_id
    ) as voice
    group by voice.access_id, voice.document_id;
end
$$;

comment on function feedback_support(uuid[]) is 'How far readers of a class found its documents useful, from -1 to 1, of classes that the principal may read; no row for a document of which nobody said anything. Each person counts once';

-- What `search` returns; its columns are final.
create type search_hit as (
    rank integer,
    document_id uuid,
    chunk_index integer,
    chunk_id uuid,
    title text,
    source_type text,
    source_uri text,
    section text,
    page_number integer,
    language text,
    document_scope text,
    tags text[],
    verified boolean,
    metadata jsonb,
    content_updated_at timestamptz,
    chunk_text text,
    score double precision,
    keyword_rank integer,
    keyword_score double precision,
    keyword_share double precision,
    vector_rank integer,
    cosine double precision,
    token_count integer,
    tokens_total integer,
    reason text,
    duplicate_of text,
    mode text,
    recall text
);

comment on type search_hit is 'A row of rag.search()';

create function fuse_candidates(
    near_access_ids bigint[],
    near_ids uuid[],
    word_access_ids bigint[],
    word_ids uuid[],
    word_scores double precision[],
    word_shares double precision[],
    words_nominate boolean[],
    embedding halfvec,
    embedding_model text,
    mode text,
    fusion text,
    recall text,
    top_k integer,
    min_similarity double precision,
    max_per_document integer,
    budget_tokens integer,
    duplicate_threshold double precision,
    duplicate_candidates integer,
    include_dropped boolean,
    feedback_boost double precision
)
returns setof search_hit
language plpgsql
stable
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
-- Some hundred rows by their keys, whoever asks: planning this takes longer than running it.
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    -- Reciprocal rank: Cormack, Clarke and Büttcher 2009, who take 60 for all. With few candidates, whose places are
    -- exact, the first ones deserve more; and the order of the words falls off faster than that of the vectors: after
    -- the few chunks that have the rare words of a question come many that share its frequent ones. With 5 for both,
    -- at its best share, SQuAD, Cranfield and CovidQA had .892 .459 .704 instead of .900 .466 .710 (nDCG@10).
    words_k constant double precision := 3;
    vectors_k constant double precision := 10;
begin
    return query
    with recursive nominee as (
        select near.access_id, near.id, true as by_vector, false as by_keyword, 0.0 as keyword_score, 0.0 as keyword_share
        from unnest(near_access_ids, near_ids) as near (access_id, id)
        union all
        select word.access_id, word.id, false, word.nominates, word.score, word.share
        from unnest(word_access_ids, word_ids, word_scores, word_shares, words_nominate)
            as word (access_id, id, score, share, nominates)
    ),

    -- What was calibrated for the tenant, read once.
    calibrated as materialized (
        select calibration.language, calibration.vector_share
        from rag_calibrations as calibration
        where calibration.tenant_id = tenant
            and calibration.embedding_model = fuse_candidates.embedding_model
            and calibration.fusion = fuse_candidates.fusion
    ),

    -- Joined under the caller's policies: whatever a candidate function may give, this is the barrier.
    candidate as materialized (
        select
            chunk.access_id,
            chunk.id,
            chunk.document_id,
            chunk.chunk_index,
            chunk.chunk_text,
            chunk.section,
            chunk.page_number,
            chunk.language,
            chunk.token_count,
            document.title,
            document.source_type,
            document.source_uri,
            document.scope as document_scope,
            document.tags,
            document.verified,
            document.metadata,
            document.content_updated_at,
            coalesce(document.source_updated_at, document.created_at) as dated,
            united.keyword_score,
            united.keyword_share,
            case
                when chunk.embedding_model = fuse_candidates.embedding_model
                    then 1 - (chunk.embedding <=> fuse_candidates.embedding)
            end as cosine,
            united.by_keyword,
            united.by_vector,
            case fuse_candidates.mode
                when 'keyword' then 0
                when 'vector' then 1
                else coalesce(
                    calibrated.vector_share,
                    vector_share(fuse_candidates.embedding_model, chunk.language, fuse_candidates.fusion)
                )
            end as vector_share
        from (
            select
                nominee.access_id,
                nominee.id,
                max(nominee.keyword_score) as keyword_score,
                max(nominee.keyword_share) as keyword_share,
                bool_or(nominee.by_keyword) as by_keyword,
                bool_or(nominee.by_vector) as by_vector
            from nominee
            group by nominee.access_id, nominee.id
            -- Of another arm's nominees that were given a score, some did not stay among the nearest.
            having bool_or(nominee.by_keyword) or bool_or(nominee.by_vector)
        ) as united
        -- Look-ups by the whole key, whatever the planner believes of the size of a class.
        cross join lateral (
            select chunk.*
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = united.access_id
                and chunk.id = united.id
            offset 0
        ) as chunk
        cross join lateral (
            select document.*
            from rag_documents as document
            where document.tenant_id = tenant
                and document.access_id = chunk.access_id
                and document.id = chunk.document_id
            offset 0
        ) as document
        left join calibrated on calibrated.language = coalesce(chunk.language, '')
    ),

    -- Ranks over the completed union; equal scores share one. A chunk without any word of the question has nothing
    -- from the words.
    ranked as (
        select
            candidate.*,
            rank() over (order by candidate.keyword_share desc) as keyword_rank,
            rank() over (order by candidate.cosine desc nulls last) as vector_rank,
            max(candidate.keyword_share) over () as best_share
        from candidate
    ),

    weighed as (
        select
            ranked.*,
            case fuse_candidates.fusion
                when 'score' then
                    (1 - ranked.vector_share) * coalesce(ranked.keyword_share / nullif(ranked.best_share, 0), 0)
                    + ranked.vector_share * coalesce(ranked.cosine, 0)
                -- 1 for what is first in both arms, whatever the share: else chunks of two languages would not compare.
                else
                    case
                        when ranked.keyword_share > 0
                            then (1 - ranked.vector_share) * (words_k + 1) / (words_k + ranked.keyword_rank)
                        else 0
                    end
                    + ranked.vector_share * (vectors_k + 1) / (vectors_k + ranked.vector_rank)
            end as fusion_score,
            fuse_candidates.min_similarity is null
            or ranked.cosine is null
            or ranked.cosine >= fuse_candidates.min_similarity as similar_enough
        from ranked
    ),

    -- Without a boost nothing is counted, and the score is the fusion's to the last bit.
    supported as materialized (
        select counted.access_id, counted.document_id, counted.support
        from feedback_support(array(select distinct candidate.document_id from candidate)) as counted
        where fuse_candidates.feedback_boost > 0
    ),

    fused as (
        select
            weighed.*,
            weighed.fusion_score
            + abs(weighed.fusion_score) * fuse_candidates.feedback_boost * coalesce(supported.support, 0) as score
        from weighed
        left join supported
            on supported.access_id = weighed.access_id
            and supported.document_id = weighed.document_id
    ),

    -- From here on all candidates stay in one stream, and what becomes of each is written beside it: joined again
    -- by their places, they took a third of the time of this statement.
    ordered as materialized (
        select
            fused.*,
            case
                when fused.similar_enough then row_number() over (
                    partition by fused.similar_enough
                    order by fused.score desc, fused.cosine desc nulls last, fused.document_id, fused.chunk_index
                )
            end as place
        from fused
    ),

    -- Near-duplicates among the first few. Which of two goes is a matter of trust, then of age, then
    -- of rank: a verified or older source is never dropped for an unverified or newer one.
    -- The words of each are held as a tsvector, whose concatenation is a union; a word may have 2,046 bytes there.
    worded as materialized (
        select
            ordered.place,
            ordered.document_id || ':' || ordered.chunk_index as source_id,
            row_number() over (order by ordered.verified desc, ordered.dated, ordered.place) as precedence,
            array_to_tsvector(array_remove(
                case
                    when octet_length(spaced.content) <= 2046 then string_to_array(spaced.content, ' ')
                    else array(select left(word, 500) from string_to_table(spaced.content, ' ') as word)
                end,
                ''
            )) as words
        from ordered
        -- translate() takes four times as long: it looks at every character.
        cross join lateral replace(replace(replace(replace(replace(replace(
            lower(ordered.chunk_text), E'\t', ' '), E'\n', ' '), E'\x0B', ' '), E'\f', ' '), E'\r', ' '), E'\u00A0', ' '
        ) as spaced (content)
        where ordered.place <= fuse_candidates.duplicate_candidates
    ),

    -- Sets whose sizes differ too much cannot be that similar, which spares most comparisons.
    twin as materialized (
        select keeper.precedence as keeper, other.precedence as other
        from worded as keeper
        join worded as other
            on other.precedence > keeper.precedence
            and least(length(keeper.words), length(other.words))
            > fuse_candidates.duplicate_threshold * greatest(length(keeper.words), length(other.words))
        cross join lateral (select length(keeper.words || other.words) as united) as overlap
        where length(keeper.words) + length(other.words) - overlap.united
            > fuse_candidates.duplicate_threshold * overlap.united
    ),

    judged as (
        select cast(0 as bigint) as precedence, cast('{}' as bigint[]) as kept, cast(null as bigint) as duplicate_of
        union all
        select
            judged.precedence + 1,
            case when twin_kept.keeper is null then judged.kept || (judged.precedence + 1) else judged.kept end,
            twin_kept.keeper
        from judged
        cross join lateral (
            select min(twin.keeper) as keeper
            from twin
            where twin.other = judged.precedence + 1
                and twin.keeper = any(judged.kept)
        ) as twin_kept
        where judged.precedence < (select max(twin.other) from twin)
    ),

    duplicate as materialized (
        select dropped.place, keeper.source_id as duplicate_of
        from judged
        join worded as dropped on dropped.precedence = judged.precedence
        join worded as keeper on keeper.precedence = judged.duplicate_of
    ),

    capped as (
        select
            ordered.*,
            duplicate.duplicate_of,
            row_number() over (
                partition by ordered.access_id, ordered.document_id, ordered.similar_enough and duplicate.place is null
                order by ordered.place
            ) as place_in_document
        from ordered
        left join duplicate on duplicate.place = ordered.place
    ),

    queued as materialized (
        select
            capped.*,
            case
                when capped.is_left then row_number() over (partition by capped.is_left order by capped.place)
            end as position
        from (
            select
                capped.*,
                capped.similar_enough
                and capped.duplicate_of is null
                and capped.place_in_document <= fuse_candidates.max_per_document as is_left
            from capped
        ) as capped
    ),

    listed as materialized (
        select queued.position, queued.token_count
        from queued
        where queued.position <= fuse_candidates.top_k
    ),

    -- A chunk that does not fit is passed over, and a smaller one after it may still fit.
    budgeted as (
        select cast(0 as bigint) as position, 0 as tokens_total, cast(null as boolean) as fits, 0 as taken
        union all
        select
            listed.position,
            case when fit.fits then budgeted.tokens_total + listed.token_count else budgeted.tokens_total end,
            fit.fits,
            case when fit.fits then budgeted.taken + 1 else budgeted.taken end
        from budgeted
        join listed on listed.position = budgeted.position + 1
        cross join lateral (
            select fuse_candidates.budget_tokens is null
                or budgeted.tokens_total + listed.token_count <= fuse_candidates.budget_tokens as fits
        ) as fit
    ),

    seated as materialized (
        select budgeted.position, budgeted.fits, budgeted.taken, budgeted.tokens_total
        from budgeted
    )

    select
        case when seated.fits then seated.taken end,
        queued.document_id,
        queued.chunk_index,
        queued.id,
        queued.title,
        queued.source_type,
        queued.source_uri,
        queued.section,
        queued.page_number,
        queued.language,
        queued.document_scope,
        queued.tags,
        queued.verified,
        queued.metadata,
        queued.content_updated_at,
        queued.chunk_text,
        queued.score,
        case when queued.keyword_score > 0 then cast(queued.keyword_rank as integer) end,
        queued.keyword_score,
        queued.keyword_share,
        case when queued.cosine is not null then cast(queued.vector_rank as integer) end,
        queued.cosine,
        queued.token_count,
        case when seated.fits then seated.tokens_total end,
        case
            when not queued.similar_enough then 'below_min_similarity'
            when queued.duplicate_of is not null then 'duplicate'
            when queued.place_in_document > fuse_candidates.max_per_document then 'per_document_cap'
            when seated.position is null then 'beyond_top_k'
            when not seated.fits then 'over_budget'
            when queued.by_keyword and queued.by_vector then 'keyword_and_vector'
            when queued.by_vector then 'vector'
            else 'keyword'
        end,
        queued.duplicate_of,
        fuse_candidates.mode,
        fuse_candidates.recall
    from queued
    left join seated on seated.position = queued.position
    where seated.fits or fuse_candidates.include_dropped
    order by 1 nulls last, queued.place nulls last, queued.score desc, queued.id;
end
$$;

comment on function fuse_candidates(bigint[], uuid[], bigint[], uuid[], double precision[], double precision[], boolean[], halfvec, text, text, text, text, integer, double precision, integer, integer, double precision, integer, boolean, double precision) is 'The nominees of both arms, read under the caller''s policies, in the order of their fused score, which feedback_boost moves by that share of itself at most; then minimum cosine, near-duplicates, chunks per document, top_k, token budget';

create function search(
    question text,
    embedding halfvec default null,
    embedding_model text default null,
    top_k integer default 5,
    scope text default null,
    document_ids uuid[] default null,
    min_similarity double precision default null,
    max_per_document integer default 3,
    budget_tokens integer default null,
    duplicate_threshold double precision default 0.9,
    duplicate_candidates integer default 15,
    include_dropped boolean default false,
    arms text default 'hybrid',
    fusion text default 'rank',
    only_verified boolean default false,
    only_domains text[] default null,
    only_doc_types text[] default null,
    only_source_types text[] default null,
    only_languages text[] default null,
    only_tags text[] default null,
    updated_from timestamptz default null,
    updated_before timestamptz default null,
    only_metadata jsonb default null,
    feedback_boost double precision default 0
)
returns setof search_hit
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(search.scope);
    indexed constant bigint[] := indexed_among(visible);
    scanned constant bigint[] := array(
        select mine.access_id from unnest(visible) as mine (access_id) where mine.access_id <> all(indexed)
    );
    with_vectors constant boolean := search.arms <> 'keyword' and search.embedding is not null;
    -- Chunks that each arm nominates. The scores of both arms are computed for all of them, so an
    -- arm need not reach deep: 20 to 50 are enough.
    depth integer := greatest(50, 3 * search.top_k);
    wanted_documents uuid[] := search.document_ids;
    -- What was compared, and what was passed over because its vector is of another model.
    compared boolean := false;
    passed_over boolean := false;
    near_access_ids bigint[] := '{}';
    near_ids uuid[] := '{}';
    farthest double precision;
    languages text[];
    -- Of large classes.
    large_access_ids bigint[] := '{}';
    large_ids uuid[] := '{}';
    large_distances double precision[] := '{}';
    with_words boolean := search.arms <> 'vector';
    word_access_ids bigint[] := '{}';
    word_ids uuid[] := '{}';
    word_scores double precision[] := '{}';
    word_shares double precision[] := '{}';
    words_nominate boolean[] := '{}';
    word_distances double precision[] := '{}';
    hits search_hit[];
    returned bigint;
begin
    if (search.embedding is null) <> (search.embedding_model is null) then
        raise exception 'embedding and embedding_model come together or not at all'
            using errcode = 'invalid_parameter_value';
    end if;
    if (search.top_k between 1 and 1000) is not true then
        raise exception 'top_k must be from 1 to 1000' using errcode = 'invalid_parameter_value';
    end if;
    if (search.scope = 'documents') is true and search.document_ids is null then
        raise exception 'scope documents needs document_ids' using errcode = 'invalid_parameter_value';
    end if;
    if (search.arms in ('hybrid', 'vector', 'keyword')) is not true then
        raise exception 'arms must be hybrid, vector or keyword' using errcode = 'invalid_parameter_value';
    end if;
    if search.arms = 'vector' and search.embedding is null then
        raise exception 'arms vector needs an embedding' using errcode = 'invalid_parameter_value';
    end if;
    if (search.fusion in ('rank', 'score')) is not true then
        raise exception 'fusion must be rank or score' using errcode = 'invalid_parameter_value';
    end if;
    if (search.feedback_boost between 0 and 1) is not true then
        raise exception 'feedback_boost must be from 0 to 1' using errcode = 'invalid_parameter_value';
    end if;

    if search.only_verified or num_nonnulls(
        search.only_domains, search.only_doc_types, search.only_source_types, search.only_languages, search.only_tags,
        search.updated_from, search.updated_before, search.only_metadata
    ) > 0 then
        wanted_documents := array(
            select document.id
            from rag_documents as document
            where document.tenant_id = tenant
                and document.access_id = any(visible)
                and (search.document_ids is null or document.id = any(search.document_ids))
                and (not search.only_verified or document.verified)
                and (search.only_domains is null or document.domain = any(search.only_domains))
                and (search.only_doc_types is null or document.doc_type = any(search.only_doc_types))
                and (search.only_source_types is null or document.source_type = any(search.only_source_types))
                and (search.only_languages is null or document.language = any(search.only_languages))
                and (search.only_tags is null or document.tags && search.only_tags)
                and (
                    search.updated_from is null
                    or coalesce(document.source_updated_at, document.content_updated_at) >= search.updated_from
                )
                and (
                    search.updated_before is null
                    or coalesce(document.source_updated_at, document.content_updated_at) < search.updated_before
                )
                and (search.only_metadata is null or document.metadata @> search.only_metadata)
        );
    end if;

    select
        with_vectors and coalesce(bool_or(there.embedding_model = search.embedding_model), false),
        with_vectors and coalesce(bool_or(there.embedding_model <> search.embedding_model), false),
        coalesce(array_agg(distinct there.language), '{}')
    into compared, passed_over, languages
    from (
        select contents.embedding_model, contents.language
        from class_contents(search.scope) as contents
        where wanted_documents is null
        union all
        select chunk.embedding_model, chunk.language
        from unnest(visible) as class (access_id)
        cross join lateral (
            select chunk.embedding_model, chunk.language
            from rag_chunks as chunk
            where chunk.tenant_id = tenant
                and chunk.access_id = class.access_id
                and chunk.document_id = any(wanted_documents)
            offset 0
        ) as chunk
        where wanted_documents is not null
    ) as there;
    with_words := with_words and exists (
        select
        from unnest(languages) as given (language)
        cross join lateral question_lexemes(given.language, search.question)
    );

    loop
        if compared and indexed <> '{}' then
            select
                coalesce(array_agg(near.access_id), '{}'),
                coalesce(array_agg(near.chunk_id), '{}'),
                coalesce(array_agg(near.distance), '{}')
            into large_access_ids, large_ids, large_distances
            from unnest(indexed) as class (access_id)
            cross join lateral nearest_indexed(
                class.access_id, search.embedding, search.embedding_model, wanted_documents, depth,
                least(1000, greatest(400, 2 * depth))
            ) as near;
        end if;

        if with_words then
            select
                array_agg(candidate.access_id),
                array_agg(candidate.chunk_id),
                array_agg(candidate.keyword_score),
                array_agg(candidate.keyword_share),
                array_agg(candidate.nominated),
                array_agg(candidate.distance)
            into word_access_ids, word_ids, word_scores, word_shares, words_nominate, word_distances
            from keyword_candidates(
                search.question, search.scope, wanted_documents, depth, large_access_ids, large_ids, languages,
                case when compared then search.embedding end, case when compared then search.embedding_model end
            ) as candidate;
        end if;

        if compared then
            with nearest as (
                select large.access_id, large.id, large.distance
                from unnest(large_access_ids, large_ids, large_distances) as large (access_id, id, distance)
                union all
                select small.access_id, small.id, small.distance
                from unnest(word_access_ids, word_ids, word_distances) as small (access_id, id, distance)
                where small.distance is not null
                union all
                (
                    select chunk.access_id, chunk.id, chunk.embedding <=> search.embedding as distance
                    from rag_chunks as chunk
                    where not with_words
                        and chunk.tenant_id = tenant
                        and chunk.access_id = any(scanned)
                        and chunk.embedding_model = search.embedding_model
                        and (wanted_documents is null or chunk.document_id = any(wanted_documents))
                    order by distance, chunk.id
                    limit depth
                )
            )

            select array_agg(best.access_id), array_agg(best.id), max(best.distance)
            into near_access_ids, near_ids, farthest
            from (
                select nearest.access_id, nearest.id, nearest.distance
                from nearest
                order by nearest.distance, nearest.id
                limit depth
            ) as best;
        end if;

        hits := array(
            select hit
            from fuse_candidates(
                near_access_ids, near_ids,
                word_access_ids, word_ids, word_scores, word_shares, words_nominate,
                search.embedding, search.embedding_model,
                case
                    when search.arms = 'vector' then 'vector'
                    when not compared then 'keyword'
                    when passed_over then 'partial'
                    else 'hybrid'
                end,
                search.fusion,
                case when indexed = '{}' then 'exact' else 'approximate' end,
                search.top_k, search.min_similarity, search.max_per_document, search.budget_tokens,
                search.duplicate_threshold, search.duplicate_candidates, search.include_dropped, search.feedback_boost
            ) as hit
        );

        -- Duplicates, the cap of a document and the minimum similarity may have taken so many that top_k
        -- chunks are not left, although further ones would pass: then both arms reach deeper.
        select count(*) into returned
        from unnest(hits) as hit
        where hit.rank is not null or hit.reason = 'over_budget';
        exit when returned >= search.top_k;
        -- Of as few documents as that no more are permitted.
        exit when returned >= search.max_per_document * (
            select count(*)
            from (
                select
                from rag_documents as document
                where document.tenant_id = tenant
                    and document.access_id = any(visible)
                    and (wanted_documents is null or document.id = any(wanted_documents))
                limit search.top_k
            ) as document
        );
        -- No vector left, and no word either. A large class may have words beyond the budget of candidates.
        exit when coalesce(cardinality(near_ids), 0) < depth
            and (select count(*) filter (where word.nominates) from unnest(words_nominate) as word (nominates)) < depth
            and (compared and not passed_over or indexed = '{}' or depth > 20000);
        -- Whatever is further away is below the minimum.
        exit when compared and not passed_over and 1 - farthest < search.min_similarity;
        depth := depth * 8;
    end loop;

    return query
    select *
    from unnest(hits);
end
$$;

comment on function search(text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean, text, text, boolean, text[], text[], text[], text[], text[], timestamptz, timestamptz, jsonb, double precision) is 'The chunks that answer a question best, among those that the principal may read, best first. Full text (BM25) and cosine, fused by weighted reciprocal rank, or by score; then minimum cosine, near-duplicates (Jaccard of words), chunks per document, top_k, token budget. embedding and embedding_model may be left out: keywords alone. arms: hybrid, vector or keyword. only_…, updated_… narrow to documents; updated_… is the source''s own time where it is known. feedback_boost, 0 to 1: by what share of its score the feedback of readers of its class lifts or lowers a document at most. include_dropped adds the candidates that did not make it, without rank, reason saying why. mode: hybrid, partial (some chunks have vectors of another model, which are not compared), vector or keyword; recall: exact, or approximate when a class with indexes of its own was among those searched';

create function explain(
    question text,
    document_id uuid,
    embedding halfvec default null,
    embedding_model text default null,
    chunk_index integer default null,
    top_k integer default 5,
    scope text default null,
    min_similarity double precision default null,
    max_per_document integer default 3,
    budget_tokens integer default null,
    duplicate_threshold double precision default 0.9,
    duplicate_candidates integer default 15,
    arms text default 'hybrid',
    fusion text default 'rank',
    feedback_boost double precision default 0
)
returns table (stage text, passed boolean, value double precision, detail text)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := narrowed_access_ids(explain.scope);
    target record;
    hit search_hit;
    hits search_hit[];
    word record;
    matched text;
    missed text;
    place bigint;
begin
    hits := array(
        select candidate
        from search(
            question => explain.question, embedding => explain.embedding, embedding_model => explain.embedding_model,
            top_k => explain.top_k, scope => explain.scope, min_similarity => explain.min_similarity,
            max_per_document => explain.max_per_document, budget_tokens => explain.budget_tokens,
            duplicate_threshold => explain.duplicate_threshold, duplicate_candidates => explain.duplicate_candidates,
            include_dropped => true, arms => explain.arms, fusion => explain.fusion,
            feedback_boost => explain.feedback_boost
        ) as candidate
    );
    -- The chunk that was asked for; of a document the best one: first among the candidates, else the nearest.
    select chunk.*
    into target
    from unnest(visible) as class (access_id)
    cross join lateral (
        select
            chunk.access_id, chunk.id, chunk.document_id, chunk.chunk_index, chunk.language, chunk.tsv,
            chunk.embedding_model,
            case when chunk.embedding_model = explain.embedding_model then chunk.embedding <=> explain.embedding end
                as distance
        from rag_chunks as chunk
        where chunk.tenant_id = tenant
            and chunk.access_id = class.access_id
            and chunk.document_id = explain.document_id
            and (explain.chunk_index is null or chunk.chunk_index = explain.chunk_index)
        offset 0
    ) as chunk
    left join unnest(hits) with ordinality as found on found.chunk_id = chunk.id
    order by found.ordinality nulls last, chunk.distance, chunk.chunk_index
    limit 1;
    if not found then
        return;
    end if;
    return query values (
        'visible', true, cast(null as double precision), format('%s:%s', target.document_id, target.chunk_index)
    );

    return query values (
        'embedded', target.distance is not null, 1 - target.distance,
        case
            when explain.embedding is null then 'the question has no vector'
            when target.distance is null
                then format('its vector is of %s, the question''s of %s', target.embedding_model, explain.embedding_model)
            else 'cosine'
        end
    );

    select
        string_agg(entry.lexeme, ', ' order by entry.place) filter (where target.tsv @@ lexeme_query(entry.lexeme)),
        string_agg(entry.lexeme, ', ' order by entry.place) filter (where not target.tsv @@ lexeme_query(entry.lexeme))
    into matched, missed
    from question_lexemes(target.language, explain.question) as entry;
    select candidate.keyword_score, candidate.keyword_share, candidate.nominated
    into word
    from keyword_candidates(
        explain.question, explain.scope, null, greatest(50, 3 * explain.top_k), array[target.access_id], array[target.id]
    ) as candidate
    where candidate.chunk_id = target.id;
    return query values (
        'words', matched is not null, coalesce(word.keyword_score, 0),
        concat_ws('; ', 'matched: ' || matched, 'missed: ' || missed)
    );

    if target.distance is not null then
        select count(*) + 1
        into place
        from rag_chunks as chunk
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
            and chunk.embedding_model = explain.embedding_model
            and chunk.embedding <=> explain.embedding < target.distance;
        return query values (
            'vector arm', place <= greatest(50, 3 * explain.top_k) and explain.arms <> 'keyword',
            cast(place as double precision),
            'rank by cosine among all visible chunks'
        );
    end if;
    return query values (
        'keyword arm', coalesce(word.nominated, false) and explain.arms <> 'vector', word.keyword_share,
        'score as a fraction of what any chunk could reach'
    );

    select found.* into hit from unnest(hits) as found where found.chunk_id = target.id;
    if hit.chunk_id is null then
        return query values ('candidate', false, cast(null as double precision), 'nominated by no arm');
        return;
    end if;
    return query
    values
        (
            'fused', true, hit.score,
            format('rank %s of %s candidates', (
                select count(*) + 1 from unnest(hits) as other where other.score > hit.score
            ), cardinality(hits))
        ),
        (
            'minimum similarity', hit.reason <> 'below_min_similarity', hit.cosine,
            'at least ' || coalesce(explain.min_similarity::text, 'anything')
        );
    if hit.reason = 'below_min_similarity' then
        return;
    end if;
    return query values ('duplicate', hit.reason <> 'duplicate', cast(null as double precision), 'of ' || hit.duplicate_of);
    if hit.reason = 'duplicate' then
        return;
    end if;
    return query values (
        'chunks of its document', hit.reason <> 'per_document_cap',
        cast(explain.max_per_document as double precision), 'at most'
    );
    if hit.reason = 'per_document_cap' then
        return;
    end if;
    return query values ('top_k', hit.reason <> 'beyond_top_k', cast(explain.top_k as double precision), 'at most');
    if hit.reason = 'beyond_top_k' then
        return;
    end if;
    return query values (
        'token budget', hit.reason <> 'over_budget', cast(hit.token_count as double precision),
        case when explain.budget_tokens is null then 'no limit' else format('of %s', explain.budget_tokens) end
    );
    if hit.rank is not null then
        return query values ('returned', true, cast(hit.rank as double precision), 'rank; by ' || hit.reason);
    end if;
end
$$;

comment on function explain(text, uuid, halfvec, text, integer, integer, text, double precision, integer, integer, double precision, integer, text, text, double precision) is 'Why a chunk, or the best chunk of a document, is in the answer of search() or not: one row for each stage that it reached, passed or not, value in the unit that detail names. No row for a document that the principal may not read, as for one that does not exist';
-- Care of large classes: which there are, what indexes they have, and their statistics. Judging and building are
-- rag maintain's: an index is built concurrently, which no function can, and only by the owner of the table.
-- The definer functions belong to rag_search, which may read lexemes; they give out numbers alone.

create function class_indexes()
returns table (access_id bigint, kind text, index_name text, is_usable boolean, bytes bigint)
language sql
stable
begin atomic
    select
        cast(named.parts[2] as bigint),
        named.parts[1],
        cast(class.relname as text),
        index.indisvalid
        and named.parts[3] is null
        and case named.parts[1]
            when 'vector' then method.amname = 'hnsw' and operators.opcname = 'halfvec_cosine_ops'
            else method.amname = 'gin' and operators.opcname = 'tsvector_ops'
        end
        and pg_get_expr(index.indpred, index.indrelid) is not distinct from format(
            '(access_id = %L::bigint)', named.parts[2]
        ),
        pg_relation_size(class.oid)
    from pg_index as index
    join pg_class as class on class.oid = index.indexrelid
    join pg_am as method on method.oid = class.relam
    join pg_opclass as operators on operators.oid = index.indclass[0]
    cross join lateral (
        -- An access_id has 60 bits. A rebuild that was broken off leaves a copy with an ending.
        select regexp_match(
            class.relname, '^rag_chunks_(vector|words)_([1-9][0-9]{0,17}|1[0-9]{18})(_cc(?:new|old)[0-9]*)?$'
        ) as parts
    ) as named
    where index.indrelid = cast('rag_chunks' as regclass)
        and named.parts is not null;
end;

comment on function class_indexes() is 'The indexes that bear the name of a class''s own, also of classes that are gone; usable when valid, and what the name says. Kind: vector or words. In no order';

create function class_sizes(at_least bigint)
returns table (
    tenant_id text, access_id bigint, chunks bigint, is_ready boolean, measured_chunks bigint,
    measured_at timestamptz, vector_bytes_per_chunk double precision, words_bytes_per_chunk double precision,
    statistics_rows bigint, statistics_bytes bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with counted as materialized (
        -- Index-only over the primary key.
        select chunk.tenant_id, chunk.access_id, count(*) as chunks
        from rag_chunks as chunk
        group by chunk.tenant_id, chunk.access_id
    ),

    kept as materialized (
        select lexeme.tenant_id, lexeme.access_id, count(*) as lexemes
        from rag_class_lexemes as lexeme
        group by lexeme.tenant_id, lexeme.access_id
    )

    select
        class.tenant_id,
        class.access_id,
        -- An index of a number that two tenants had would be shared: it counts as none.
        case
            when exists (
                select
                from rag_access_classes as namesake
                where namesake.access_id = class.access_id and namesake.tenant_id <> class.tenant_id
            ) then 0
            else coalesce(counted.chunks, 0)
        end,
        own.ready is true,
        own.chunks,
        own.measured_at,
        own.vector_bytes_per_chunk,
        own.words_bytes_per_chunk,
        coalesce(kept.lexemes, 0),
        -- As large as its share of the table.
        coalesce(cast(
            kept.lexemes * pg_total_relation_size('rag_class_lexemes') / sum(kept.lexemes) over () as bigint
        ), 0)
    from rag_access_classes as class
    left join counted
        on counted.tenant_id = class.tenant_id
        and counted.access_id = class.access_id
    left join rag_class_indexes as own
        on own.tenant_id = class.tenant_id
        and own.access_id = class.access_id
    left join kept
        on kept.tenant_id = class.tenant_id
        and kept.access_id = class.access_id
    where counted.chunks >= class_sizes.at_least or own.access_id is not null;
end
$$;

comment on function class_sizes(bigint) is 'Classes of at least so many chunks, and those that have statistics: chunks now and when they were measured, whether the search uses their indexes, bytes per chunk of these at first, and rows and bytes of rag_class_lexemes. In no order';

create function measure_class(tenant_id text, access_id bigint, at_least integer)
returns table (chunks bigint, lexemes bigint, statistics_rows bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
-- Twice that for a hash: a million lexemes at once. With more of them, or less memory, it goes over the disk.
set work_mem = '64MB'
as $$
#variable_conflict use_column
declare
    languages text[];
    language_chunks bigint[];
    language_lexemes bigint[];
    word_languages text[];
    words text[];
    word_chunks integer[];
begin
    -- In one statement, so that no lexeme is in more chunks than there are. A lexeme is once in a tsvector.
    with language as materialized (
        select
            coalesce(chunk.language, '') as code,
            count(*) as chunks,
            sum(chunk.lexeme_count) as lexemes
        from rag_chunks as chunk
        where chunk.tenant_id = measure_class.tenant_id and chunk.access_id = measure_class.access_id
        group by coalesce(chunk.language, '')
    ),

    word as materialized (
        select
            coalesce(chunk.language, '') as code,
            entry.lexeme,
            cast(count(*) as integer) as chunks
        from rag_chunks as chunk
        cross join lateral unnest(chunk.tsv) as entry
        where chunk.tenant_id = measure_class.tenant_id and chunk.access_id = measure_class.access_id
        group by coalesce(chunk.language, ''), entry.lexeme
        having count(*) >= measure_class.at_least
    )

    select
        collection.codes, collection.chunks, collection.lexemes, vocabulary.codes, vocabulary.words, vocabulary.chunks
    into languages, language_chunks, language_lexemes, word_languages, words, word_chunks
    from (
        select
            array_agg(language.code) as codes,
            array_agg(language.chunks) as chunks,
            array_agg(language.lexemes) as lexemes
        from language
    ) as collection
    cross join (
        select
            array_agg(word.code) as codes,
            array_agg(word.lexeme) as words,
            array_agg(word.chunks) as chunks
        from word
    ) as vocabulary;

    -- Like everybody who writes in the tenant, so that an erasure waits, or is seen here. Not before, since it
    -- would have all others wait as long as the counting takes.
    perform pg_advisory_xact_lock_shared(tenant_lock(measure_class.tenant_id));
    perform
    from rag_access_classes as class
    where class.tenant_id = measure_class.tenant_id and class.access_id = measure_class.access_id;
    if not found then
        return;
    end if;

    delete from rag_class_languages as language
    where language.tenant_id = measure_class.tenant_id and language.access_id = measure_class.access_id;
    delete from rag_class_lexemes as lexeme
    where lexeme.tenant_id = measure_class.tenant_id and lexeme.access_id = measure_class.access_id;

    insert into rag_class_languages (tenant_id, access_id, language, chunks, lexemes)
    select measure_class.tenant_id, measure_class.access_id, measured.language, measured.chunks, measured.lexemes
    from unnest(languages, language_chunks, language_lexemes) as measured (language, chunks, lexemes);

    -- Sorted, so that those of a class lie side by side.
    insert into rag_class_lexemes (tenant_id, access_id, language, lexeme, chunks)
    select measure_class.tenant_id, measure_class.access_id, measured.language, measured.lexeme, measured.chunks
    from unnest(word_languages, words, word_chunks) as measured (language, lexeme, chunks)
    order by measured.language, measured.lexeme;
    get diagnostics statistics_rows = row_count;

    select coalesce(sum(amount.chunks), 0), coalesce(sum(amount.lexemes), 0)
    into chunks, lexemes
    from unnest(language_chunks, language_lexemes) as amount (chunks, lexemes);

    insert into rag_class_indexes as own (tenant_id, access_id, chunks)
    values (measure_class.tenant_id, measure_class.access_id, chunks)
    on conflict (tenant_id, access_id) do update
    set chunks = excluded.chunks,
        measured_at = excluded.measured_at;
    return next;
end
$$;

comment on function measure_class(text, bigint, integer) is 'Counts a class anew for BM25: chunks and lexemes of each language, and the chunks of each lexeme that at least so many have. Returns how many chunks, lexemes and rows; no row for a class that is gone';

create function set_class_ready(tenant_id text, access_id bigint, ready boolean)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    vector_bytes bigint;
    words_bytes bigint;
begin
    select
        max(index.bytes) filter (where index.kind = 'vector'),
        max(index.bytes) filter (where index.kind = 'words')
    into vector_bytes, words_bytes
    from class_indexes() as index
    where index.access_id = set_class_ready.access_id and index.is_usable;

    if set_class_ready.ready and num_nulls(vector_bytes, words_bytes) > 0 then
        raise exception 'a class is ready when both of its indexes are' using errcode = 'object_not_in_prerequisite_state';
    end if;
    update rag_class_indexes as own
    set ready = set_class_ready.ready,
        vector_bytes_per_chunk = cast(vector_bytes as double precision) / greatest(own.chunks, 1),
        words_bytes_per_chunk = cast(words_bytes as double precision) / greatest(own.chunks, 1)
    where own.tenant_id = set_class_ready.tenant_id
        and own.access_id = set_class_ready.access_id
        and own.ready <> set_class_ready.ready;
    return found;
end
$$;

comment on function set_class_ready(text, bigint, boolean) is 'Lets searches use a class''s own indexes and statistics, or not; false when nothing changed, or the class was not measured. Raises 55000 unless both indexes are usable';

create function demote_class(tenant_id text, access_id bigint)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    was_there boolean;
begin
    delete from rag_class_indexes as own
    where own.tenant_id = demote_class.tenant_id and own.access_id = demote_class.access_id;
    was_there := found;
    delete from rag_class_languages as language
    where language.tenant_id = demote_class.tenant_id and language.access_id = demote_class.access_id;
    delete from rag_class_lexemes as lexeme
    where lexeme.tenant_id = demote_class.tenant_id and lexeme.access_id = demote_class.access_id;
    return was_there;
end
$$;

comment on function demote_class(text, bigint) is 'Ends the use of a class''s own indexes, from the next statement on, and removes its statistics; the indexes can be dropped afterwards. False when it had none';
-- What operators do in every tenant: keys, erasure, and why a document is visible. The functions belong to
-- rag_steward, which sees keys of rows and never a text; only rag_operator may call them.

create function add_signing_key(out key_id text, out secret text)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
declare
    -- Three times 122 random bits.
    drawn constant bytea := sha256(
        uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())
    );
    padded constant bytea := drawn || decode(repeat('00', 32), 'hex');
    inner_pad bytea := padded;
    outer_pad bytea := padded;
begin
    for place in 0..63 loop
        inner_pad := set_byte(inner_pad, place, get_byte(padded, place) # 54); -- 0x36
        outer_pad := set_byte(outer_pad, place, get_byte(padded, place) # 92); -- 0x5c
    end loop;
    key_id := substr(md5(gen_random_uuid()::text), 1, 8);
    secret := encode(drawn, 'hex');
    insert into rag_signing_keys (key_id, inner_pad, outer_pad)
    values (key_id, inner_pad, outer_pad);
end
$$;

comment on function add_signing_key() is 'Makes a key with which the service signs identities, valid at once beside the others; its secret, 32 bytes in hexadecimal, is shown this once';

create function list_signing_keys()
returns table (key_id text, created_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select key.key_id, key.created_at
    from rag_signing_keys as key
    order by key.created_at, key.key_id;
end
$$;

comment on function list_signing_keys() is 'The signing keys that are valid, oldest first, without their secrets';

create function retire_signing_key(key_id text)
returns boolean
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_signing_keys as key where key.key_id = retire_signing_key.key_id;
    return found;
end
$$;

comment on function retire_signing_key(text) is 'Ends a signing key: what was signed with it is worthless from the next statement on; false when there was none';

create function erasure_kind(
    tenant_id text, user_id bigint, project_id text, source_type text, source_id text
)
returns text
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    -- 0 and * name nobody: in the logs they stand for whoever asked without a user, or in all projects.
    if coalesce(tenant_id, '') = ''
        or user_id <= 0
        or project_id in ('', '*')
        or source_id = ''
        or (source_type is not null and source_id is null)
        or (source_id is not null and (user_id is not null or project_id is not null)) then
        raise exception 'name a tenant, and at most one of: a user; a project, with its owner or without; a source'
            using errcode = 'invalid_parameter_value';
    end if;
    return case
        when source_id is not null then 'source'
        when project_id is not null then 'project'
        when user_id is not null then 'user'
        else 'tenant'
    end;
end
$$;

comment on function erasure_kind(text, bigint, text, text, text) is 'What the arguments of forget() name: tenant, user, project or source; raises 22023 for any other combination';

create function forget(
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    source_type text default null,
    source_id text default null
)
returns table (table_name text, rows_removed bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    kind constant text := erasure_kind(
        forget.tenant_id, forget.user_id, forget.project_id, forget.source_type, forget.source_id
    );
    class_ids bigint[];
    -- Class and id of each document: an id alone may be a neighbour's as well.
    document_classes bigint[];
    document_ids uuid[];
    -- A job has a kind of its own.
    erasing constant text := kind;
    -- Numbers of jobs in the queue.
    queue_ids bigint[];
    -- Whose questions and assertions go; null for everybody's.
    askers bigint[];
    removed_bytes bigint;
    removed bigint;
    total bigint := 0;
    digest constant bytea := erasure_digest(kind, forget.tenant_id, case kind
        when 'tenant' then '{}'
        when 'user' then array[forget.user_id::text]
        when 'project' then array_remove(array[forget.project_id, forget.user_id::text], null)
        when 'source' then array_remove(array[forget.source_id, forget.source_type], null)
    end);
begin
    -- Whoever writes in the tenant holds this lock shared: they are done, or wait and then find the
    -- erasure and give up.
    perform pg_advisory_xact_lock(tenant_lock(forget.tenant_id));

    class_ids := array(
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = forget.tenant_id
            and case kind
                when 'tenant' then true
                when 'user' then class.user_id = forget.user_id
                when 'project' then
                    class.project_id = forget.project_id
                    and (forget.user_id is null or class.user_id = forget.user_id)
                else false
            end
    );
    select coalesce(array_agg(document.access_id), '{}'), coalesce(array_agg(document.id), '{}')
    into document_classes, document_ids
    from rag_documents as document
    where document.tenant_id = forget.tenant_id
        and case kind
            when 'source' then
                document.source_id = forget.source_id
                and (forget.source_type is null or document.source_type = forget.source_type)
            else document.access_id = any(class_ids)
        end;
    -- In a project of one owner its members asked as well.
    if forget.user_id is not null then
        askers := array[forget.user_id] || array(
            select membership.member_user_id
            from rag_project_members as membership
            where membership.tenant_id = forget.tenant_id
                and membership.owner_user_id = forget.user_id
                and membership.project_id = forget.project_id
        );
    end if;

    -- They go with their documents.
    select count(*) into removed
    from unnest(document_classes, document_ids) as erased (access_id, id)
    join rag_conversation_summaries as summary
        on summary.tenant_id = forget.tenant_id
        and summary.access_id = erased.access_id
        and summary.document_id = erased.id;
    return query select 'rag_conversation_summaries', removed;
    total := total + removed;

    select count(*) into removed
    from unnest(document_classes, document_ids) as erased (access_id, id)
    join rag_chunks as chunk
        on chunk.tenant_id = forget.tenant_id
        and chunk.access_id = erased.access_id
        and chunk.document_id = erased.id;
    return query select 'rag_chunks', removed;
    total := total + removed;

    with gone as (
        delete from rag_documents as document
        using unnest(document_classes, document_ids) as erased (access_id, id)
        where document.tenant_id = forget.tenant_id
            and document.access_id = erased.access_id
            and document.id = erased.id
        returning document.body_bytes
    )

    select count(*), coalesce(sum(gone.body_bytes), 0) into removed, removed_bytes from gone;
    return query select 'rag_documents', removed;
    total := total + removed;
    if kind <> 'tenant' and removed > 0 then
        insert into rag_usage as usage (tenant_id, slot, documents, bytes)
        values (forget.tenant_id, 0, -removed, -removed_bytes)
        on conflict (tenant_id, slot) do update
        set documents = usage.documents + excluded.documents,
            bytes = usage.bytes + excluded.bytes;
    end if;

    -- Of others' feedback only what is about that which is erased.
    delete from rag_feedback as given
    where given.tenant_id = forget.tenant_id
        and (
            given.document_id = any(document_ids)
            or (
                kind <> 'source'
                and (askers is null or given.user_id = any(askers))
                and (kind <> 'project' or exists (
                    select
                    from rag_query_logs as log
                    where log.tenant_id = given.tenant_id
                        and log.user_id = given.user_id
                        and log.id = given.query_id
                        and log.project_id = forget.project_id
                ))
            )
        );
    get diagnostics removed = row_count;
    return query select 'rag_feedback', removed;
    total := total + removed;

    -- Of others' questions only the hits on what is erased.
    delete from rag_query_log_chunks as hit
    where hit.tenant_id = forget.tenant_id
        and (
            hit.document_id = any(document_ids)
            or (
                kind <> 'source'
                and (askers is null or hit.user_id = any(askers))
                and (kind <> 'project' or exists (
                    select
                    from rag_query_logs as log
                    where log.tenant_id = hit.tenant_id
                        and log.user_id = hit.user_id
                        and log.id = hit.query_id
                        and log.project_id = forget.project_id
                ))
            )
        );
    get diagnostics removed = row_count;
    return query select 'rag_query_log_chunks', removed;
    total := total + removed;

    delete from rag_query_logs as log
    where log.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or log.user_id = any(askers))
        and (kind <> 'project' or log.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_query_logs', removed;
    total := total + removed;

    delete from rag_assertions as assertion
    where assertion.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or assertion.user_id = any(askers))
        and (kind <> 'project' or assertion.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_assertions', removed;
    total := total + removed;

    delete from rag_tags as tag
    where tag.tenant_id = forget.tenant_id
        and (kind = 'tenant' or (kind = 'user' and tag.owner_user_id = forget.user_id));
    get diagnostics removed = row_count;
    return query select 'rag_tags', removed;
    total := total + removed;

    delete from rag_retractions as retraction
    where retraction.tenant_id = forget.tenant_id
        and kind <> 'source'
        and (askers is null or retraction.user_id = any(askers))
        and (kind <> 'project' or retraction.project_id = forget.project_id);
    get diagnostics removed = row_count;
    return query select 'rag_retractions', removed;
    total := total + removed;

    with gone as (
        delete from rag_jobs as job
        where job.tenant_id = forget.tenant_id
            and case erasing
                when 'source' then
                    job.source_id = forget.source_id
                    and (forget.source_type is null or job.source_type = forget.source_type)
                else
                    (askers is null or job.user_id = any(askers))
                    and (erasing <> 'project' or job.project_id = forget.project_id)
            end
        returning job.queue_id
    )
    select count(*), coalesce(array_agg(one.queue_id) filter (where one.queue_id is not null), '{}')
    into removed, queue_ids
    from gone as one;
    perform drop_queued(queue_ids);
    return query select 'rag_jobs', removed;
    total := total + removed;

    -- Of a claim nobody can tell what it is about; without it somebody embeds twice, once.
    delete from rag_claims as claim where claim.tenant_id = forget.tenant_id;
    get diagnostics removed = row_count;
    return query select 'rag_claims', removed;
    total := total + removed;

    delete from rag_project_members as membership
    where membership.tenant_id = forget.tenant_id
        and case kind
            when 'tenant' then true
            when 'user' then forget.user_id in (membership.owner_user_id, membership.member_user_id)
            when 'project' then
                membership.project_id = forget.project_id
                and (forget.user_id is null or membership.owner_user_id = forget.user_id)
            else false
        end;
    get diagnostics removed = row_count;
    return query select 'rag_project_members', removed;
    total := total + removed;

    delete from rag_tombstones as tombstone
    where tombstone.tenant_id = forget.tenant_id and tombstone.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_tombstones', removed;
    total := total + removed;

    delete from rag_synchronisations as run
    where run.tenant_id = forget.tenant_id and run.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_synchronisations', removed;
    total := total + removed;

    delete from rag_conversation_messages as message
    where message.tenant_id = forget.tenant_id and message.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_conversation_messages', removed;
    total := total + removed;

    delete from rag_access_classes as class
    where class.tenant_id = forget.tenant_id and class.access_id = any(class_ids);
    get diagnostics removed = row_count;
    return query select 'rag_access_classes', removed;
    total := total + removed;

    if kind = 'tenant' then
        delete from rag_service_keys as key where key.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_service_keys', removed;
        total := total + removed;
        delete from rag_analysts as analyst where analyst.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_analysts', removed;
        total := total + removed;
        delete from rag_calibrations as calibration where calibration.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_calibrations', removed;
        total := total + removed;
        delete from rag_prompts as prompt where prompt.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_prompts', removed;
        total := total + removed;
        delete from rag_limits as limits where limits.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_limits', removed;
        total := total + removed;
        delete from rag_rate_buckets as bucket where bucket.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_rate_buckets', removed;
        total := total + removed;
        delete from rag_usage as usage where usage.tenant_id = forget.tenant_id;
        get diagnostics removed = row_count;
        return query select 'rag_usage', removed;
        total := total + removed;
        delete from rag_erasures as erasure where erasure.tenant_id = forget.tenant_id;
    end if;

    insert into rag_erasures (tenant_id, kind, subject_digest, rows_removed, erased_by)
    values (
        case kind when 'tenant' then encode(digest, 'hex') else forget.tenant_id end,
        kind, digest, total, session_user
    );
end
$$;

comment on function forget(text, bigint, text, text, text) is 'Erases a tenant; or a user of it with all that they own, asked, rated and share, tags included; or a project, of one owner when user_id is given, with what was asked in it; or a source, in all classes. One transaction; returns the rows removed from each table, and leaves a digest, so that an ingest that began before gives up. Raises 22023 for arguments that name none of these';

create function count_traces(
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    source_type text default null,
    source_id text default null
)
returns table (table_name text, rows_left bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    kind constant text := erasure_kind(
        count_traces.tenant_id, count_traces.user_id, count_traces.project_id, count_traces.source_type,
        count_traces.source_id
    );
begin
    -- Written apart from forget(), along the readable columns and not along classes: it is its probe.
    return query
    with its_documents as (
        select document.access_id, document.id
        from rag_documents as document
        where document.tenant_id = count_traces.tenant_id
            and (count_traces.user_id is null or document.user_id = count_traces.user_id)
            and (count_traces.project_id is null or document.project_id = count_traces.project_id)
            and (count_traces.source_id is null or document.source_id = count_traces.source_id)
            and (count_traces.source_type is null or document.source_type = count_traces.source_type)
    ),

    its_classes as (
        select class.access_id
        from rag_access_classes as class
        where class.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.user_id is null or class.user_id = count_traces.user_id)
            and (count_traces.project_id is null or class.project_id = count_traces.project_id)
    ),

    its_members as (
        select membership.member_user_id
        from rag_project_members as membership
        where membership.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.project_id is null or membership.project_id = count_traces.project_id)
            and (
                count_traces.user_id is null
                or membership.owner_user_id = count_traces.user_id
                or (kind = 'user' and membership.member_user_id = count_traces.user_id)
            )
    ),

    its_askers as (
        select count_traces.user_id as asker
        union
        select membership.member_user_id
        from its_members as membership
        where kind = 'project'
    ),

    its_questions as (
        select log.user_id, log.id
        from rag_query_logs as log
        where log.tenant_id = count_traces.tenant_id
            and kind <> 'source'
            and (count_traces.user_id is null or log.user_id in (select person.asker from its_askers as person))
            and (count_traces.project_id is null or log.project_id = count_traces.project_id)
    )

    select 'rag_chunks', count(*)
    from rag_chunks as chunk
    left join rag_documents as document
        on document.tenant_id = chunk.tenant_id
        and document.access_id = chunk.access_id
        and document.id = chunk.document_id
    where chunk.tenant_id = count_traces.tenant_id
        and (
            document.id is null
            or (chunk.access_id, chunk.document_id) in (select its.access_id, its.id from its_documents as its)
        )
    union all
    select 'rag_documents', count(*)
    from its_documents
    union all
    select 'rag_feedback', count(*)
    from rag_feedback as given
    where given.tenant_id = count_traces.tenant_id
        and (
            given.document_id in (select its.id from its_documents as its)
            or (given.user_id, given.query_id) in (select its.user_id, its.id from its_questions as its)
        )
    union all
    select 'rag_query_log_chunks', count(*)
    from rag_query_log_chunks as hit
    where hit.tenant_id = count_traces.tenant_id
        and (
            hit.document_id in (select its.id from its_documents as its)
            or (hit.user_id, hit.query_id) in (select its.user_id, its.id from its_questions as its)
        )
    union all
    select 'rag_query_logs', count(*)
    from its_questions
    union all
    select 'rag_assertions', count(*)
    from rag_assertions as assertion
    where assertion.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or assertion.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or assertion.project_id = count_traces.project_id)
    union all
    select 'rag_jobs', count(*)
    from rag_jobs as job
    where job.tenant_id = count_traces.tenant_id
        and (count_traces.source_id is null or job.source_id = count_traces.source_id)
        and (count_traces.source_type is null or job.source_type = count_traces.source_type)
        and (count_traces.user_id is null or job.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or job.project_id = count_traces.project_id)
    union all
    select 'rag_claims', count(*)
    from rag_claims as claim
    where claim.tenant_id = count_traces.tenant_id
    union all
    select 'rag_tags', count(*)
    from rag_tags as tag
    where tag.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or (kind = 'user' and tag.owner_user_id = count_traces.user_id))
    union all
    select 'rag_retractions', count(*)
    from rag_retractions as retraction
    where retraction.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or retraction.user_id in (select person.asker from its_askers as person))
        and (count_traces.project_id is null or retraction.project_id = count_traces.project_id)
    union all
    select 'rag_project_members', count(*)
    from its_members
    union all
    select 'rag_tombstones', count(*)
    from rag_tombstones as tombstone
    where tombstone.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or tombstone.access_id in (select its.access_id from its_classes as its))
    union all
    select 'rag_synchronisations', count(*)
    from rag_synchronisations as run
    where run.tenant_id = count_traces.tenant_id
        and (kind = 'tenant' or run.access_id in (select its.access_id from its_classes as its))
    union all
    select 'rag_conversation_messages', count(*)
    from rag_conversation_messages as message
    where message.tenant_id = count_traces.tenant_id
        and kind <> 'source'
        and (count_traces.user_id is null or message.user_id = count_traces.user_id)
        and (count_traces.project_id is null or message.project_id = count_traces.project_id)
    union all
    select 'rag_conversation_summaries', count(*)
    from rag_conversation_summaries as summary
    where summary.tenant_id = count_traces.tenant_id
        and (count_traces.user_id is null or summary.user_id = count_traces.user_id)
        and (count_traces.project_id is null or summary.project_id = count_traces.project_id)
        and (
            kind <> 'source'
            or (summary.access_id, summary.document_id) in (select its.access_id, its.id from its_documents as its)
        )
    union all
    select 'rag_access_classes', count(*)
    from its_classes
    union all
    select 'rag_service_keys', count(*)
    from rag_service_keys as key
    where key.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_analysts', count(*)
    from rag_analysts as analyst
    where analyst.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_calibrations', count(*)
    from rag_calibrations as calibration
    where calibration.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_prompts', count(*)
    from rag_prompts as prompt
    where prompt.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_limits', count(*)
    from rag_limits as limits
    where limits.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_rate_buckets', count(*)
    -- Without its own column of the name kind.
    from (select rate.tenant_id from rag_rate_buckets as rate) as bucket
    where bucket.tenant_id = count_traces.tenant_id and kind = 'tenant'
    union all
    select 'rag_usage', count(*)
    from rag_usage as usage
    where usage.tenant_id = count_traces.tenant_id and kind = 'tenant';
end
$$;

comment on function count_traces(text, bigint, text, text, text) is 'How many rows each table still has of what the arguments name, as in forget(), after which all are 0';

create function expire_logs(older_than interval, tenant_id text default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    removed bigint;
    total bigint;
begin
    if expire_logs.older_than is null or expire_logs.older_than < interval '0' then
        raise exception 'older_than is an age' using errcode = 'invalid_parameter_value';
    end if;
    delete from rag_query_logs as log
    where (expire_logs.tenant_id is null or log.tenant_id = expire_logs.tenant_id)
        and log.created_at < now() - expire_logs.older_than;
    get diagnostics total = row_count;
    delete from rag_assertions as assertion
    where (expire_logs.tenant_id is null or assertion.tenant_id = expire_logs.tenant_id)
        and assertion.created_at < now() - expire_logs.older_than;
    get diagnostics removed = row_count;
    return total + removed;
end
$$;

comment on function expire_logs(interval, text) is 'Removes questions, what they got back and what was made of it, and assertions of service keys that are older, in one tenant or in all; returns how many questions and assertions';

-- Tenant by tenant along the index of each table, so that a batch reads what it removes and no more.
create function expired_questions(older_than interval, at_most bigint)
returns table (tenant_id text, user_id bigint, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select log.tenant_id from rag_query_logs as log order by log.tenant_id limit 1)
        union all
        select (
            select log.tenant_id
            from rag_query_logs as log
            where log.tenant_id > tenant.tenant_id
            order by log.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.user_id, found.id
    from tenant
    cross join lateral (
        select log.tenant_id, log.user_id, log.id
        from rag_query_logs as log
        where log.tenant_id = tenant.tenant_id
            and log.created_at < now() - expired_questions.older_than
        order by log.created_at
        limit expired_questions.at_most
    ) as found
    limit expired_questions.at_most;
end
$$;

comment on function expired_questions(interval, bigint) is 'Questions that are older, of all tenants, at most so many; null for all';

create function expired_assertions(older_than interval, at_most bigint)
returns table (tenant_id text, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select assertion.tenant_id from rag_assertions as assertion order by assertion.tenant_id limit 1)
        union all
        select (
            select assertion.tenant_id
            from rag_assertions as assertion
            where assertion.tenant_id > tenant.tenant_id
            order by assertion.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.id
    from tenant
    cross join lateral (
        select assertion.tenant_id, assertion.id
        from rag_assertions as assertion
        where assertion.tenant_id = tenant.tenant_id
            and assertion.created_at < now() - expired_assertions.older_than
        order by assertion.created_at
        limit expired_assertions.at_most
    ) as found
    limit expired_assertions.at_most;
end
$$;

comment on function expired_assertions(interval, bigint) is 'Assertions of service keys that are older, of all tenants, at most so many; null for all';

create function expired_messages(older_than interval, at_most bigint)
returns table (tenant_id text, access_id bigint, id uuid)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with recursive tenant as (
        (select message.tenant_id from rag_conversation_messages as message order by message.tenant_id limit 1)
        union all
        select (
            select message.tenant_id
            from rag_conversation_messages as message
            where message.tenant_id > tenant.tenant_id
            order by message.tenant_id
            limit 1
        )
        from tenant
        where tenant.tenant_id is not null
    )

    select found.tenant_id, found.access_id, found.id
    from tenant
    cross join lateral (
        select message.tenant_id, message.access_id, message.id
        from rag_conversation_messages as message
        where message.tenant_id = tenant.tenant_id
            and message.created_at < now() - expired_messages.older_than
        order by message.created_at
        limit expired_messages.at_most
    ) as found
    limit expired_messages.at_most;
end
$$;

comment on function expired_messages(interval, bigint) is 'Messages of conversations that are older, of all tenants, at most so many; null for all';

create function count_expired(kind text, older_than interval)
returns bigint
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    if count_expired.older_than is null or count_expired.older_than < interval '0' then
        raise exception 'older_than is an age' using errcode = 'invalid_parameter_value';
    end if;
    case count_expired.kind
        when 'questions' then
            return (select count(*) from expired_questions(count_expired.older_than, null));
        when 'assertions' then
            return (select count(*) from expired_assertions(count_expired.older_than, null));
        when 'messages' then
            return (select count(*) from expired_messages(count_expired.older_than, null));
        else
            raise exception 'kind is questions, assertions or messages' using errcode = 'invalid_parameter_value';
    end case;
end
$$;

comment on function count_expired(text, interval) is 'How many questions, assertions of service keys, or messages of conversations are older, in all tenants';

create function expire_batch(kind text, older_than interval, at_most integer)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
-- A batch against a table that may be a million times larger: row by row through the keys.
set enable_seqscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
    removed bigint;
begin
    if expire_batch.older_than is null or expire_batch.older_than < interval '0' or expire_batch.at_most is null then
        raise exception 'older_than is an age, and at_most a number' using errcode = 'invalid_parameter_value';
    end if;
    case expire_batch.kind
        when 'questions' then
            delete from rag_query_logs as log
            using expired_questions(expire_batch.older_than, expire_batch.at_most) as old
            where log.tenant_id = old.tenant_id and log.user_id = old.user_id and log.id = old.id;
        when 'assertions' then
            delete from rag_assertions as assertion
            using expired_assertions(expire_batch.older_than, expire_batch.at_most) as old
            where assertion.tenant_id = old.tenant_id and assertion.id = old.id;
        when 'messages' then
            delete from rag_conversation_messages as message
            using expired_messages(expire_batch.older_than, expire_batch.at_most) as old
            where message.tenant_id = old.tenant_id and message.access_id = old.access_id and message.id = old.id;
        else
            raise exception 'kind is questions, assertions or messages' using errcode = 'invalid_parameter_value';
    end case;
    get diagnostics removed = row_count;
    return removed;
end
$$;

comment on function expire_batch(text, interval, integer) is 'Removes at most so many of the questions, with what they got back and what was made of it, of the assertions of service keys, or of the messages of conversations, that are older, in all tenants; returns how many';

create function embeds_with(tenant_id text, embedding_model text)
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    if not exists (select from rag_chunks as chunk where chunk.tenant_id = embeds_with.tenant_id) then
        return null;
    end if;
    return exists (
        select
        from rag_chunks as chunk
        where chunk.tenant_id = embeds_with.tenant_id
            and chunk.embedding_model = embeds_with.embedding_model
    );
end
$$;

comment on function embeds_with(text, text) is 'Whether a tenant has a chunk that this model embedded; null when it has no chunk at all';

create function explain_access(
    document_id uuid,
    tenant_id text,
    user_id bigint default null,
    project_id text default null,
    tags text[] default '{}'
)
returns table (
    access_id bigint, scope text, owner_user_id bigint, owner_project_id text, class_tags text[],
    clause text, holds boolean, visible boolean
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    held constant text[] := case when coalesce(explain_access.tags, '{}') = '{}' then array['public'] else explain_access.tags end;
begin
    return query
    with judged as (
        select
            class.access_id,
            class.scope,
            class.user_id,
            class.project_id,
            class.tags,
            class.tenant_id = explain_access.tenant_id as same_tenant,
            class.tags && held as overlapping,
            class.scope = 'public' as is_public,
            class.scope = 'user' and (class.user_id = explain_access.user_id) is true as is_own,
            class.scope = 'project' and (class.user_id = explain_access.user_id) is true as is_own_project,
            class.scope = 'project' and exists (
                select
                from rag_project_members as membership
                where membership.tenant_id = explain_access.tenant_id
                    and membership.owner_user_id = class.user_id
                    and membership.project_id = class.project_id
                    and membership.member_user_id = explain_access.user_id
            ) as is_shared,
            (explain_access.project_id in ('*', class.project_id)) is true as is_chosen
        from rag_documents as document
        join rag_access_classes as class
            on class.tenant_id = document.tenant_id
            and class.access_id = document.access_id
        where document.id = explain_access.document_id
    )

    select
        judged.access_id,
        judged.scope,
        judged.user_id,
        judged.project_id,
        judged.tags,
        verdict.clause,
        verdict.holds,
        judged.same_tenant and judged.overlapping and (
            judged.is_public or judged.is_own or (judged.is_chosen and (judged.is_own_project or judged.is_shared))
        )
    from judged
    cross join lateral (
        values
            (1, 'the document is of the principal''s tenant', judged.same_tenant),
            (2, 'a tag of the class is the principal''s', judged.overlapping),
            (3, 'the class is public', judged.is_public),
            (4, 'the class is the principal''s own', judged.is_own),
            (5, 'the project is the principal''s own', judged.is_own_project),
            (6, 'the project is shared with the principal', judged.is_shared),
            (7, 'the principal names the project, or *', judged.is_chosen)
    ) as verdict (place, clause, holds)
    order by judged.access_id, verdict.place;
end
$$;

comment on function explain_access(uuid, text, bigint, text, text[]) is 'Why a principal of the service sees a document or does not: its class, and each clause of the rule. Visible: the first two and one of public, own, or a project of theirs or shared with them that they name. No row for a document that is not there';
-- How much a tenant may ask and store. Rates are token buckets: each request takes a token, and tokens come back
-- with time. Quotas are counted by what writes documents, within its transaction.

create function limits_of(tenant_id text)
returns table (
    queries_per_minute integer, query_burst integer, ingests_per_minute integer, ingest_burst integer,
    documents bigint, bytes bigint
)
language plpgsql
stable
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        limits.queries_per_minute,
        limits.query_burst,
        limits.ingests_per_minute,
        limits.ingest_burst,
        limits.documents,
        limits.bytes
    from rag_limits as limits
    where limits.tenant_id in (limits_of.tenant_id, '')
    -- The tenant's own, all of it, before what holds for those that have none.
    order by length(limits.tenant_id) desc
    limit 1;
end
$$;

comment on function limits_of(text) is 'What holds for a tenant: its own row, else that of all others; no row where nothing is limited';

create function refilled_tokens(
    tokens double precision, refilled_at timestamptz, per_minute integer, burst integer, moment timestamptz
)
returns double precision
language plpgsql
immutable
parallel safe
set search_path = rag, pg_temp
as $$
begin
    -- A clock that was put back takes nothing away.
    return least(
        burst,
        tokens + greatest(0, cast(extract(epoch from moment - refilled_at) as double precision)) * per_minute / 60
    );
end
$$;

comment on function refilled_tokens(double precision, timestamptz, integer, integer, timestamptz) is 'What a bucket holds at a moment, of what it held when it was last taken from; never more than burst';

create function take_token(kind text)
returns table (
    granted boolean, per_minute integer, burst integer, tokens_left double precision, wait_s double precision
)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
begin
    select principal.tenant_id into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    if (take_token.kind in ('query', 'ingest')) is not true then
        raise exception 'unknown kind of request' using errcode = 'invalid_parameter_value';
    end if;
    select
        case take_token.kind when 'query' then limits.queries_per_minute else limits.ingests_per_minute end,
        case take_token.kind when 'query' then limits.query_burst else limits.ingest_burst end
    into per_minute, burst
    from limits_of(me.tenant_id) as limits;
    if per_minute is null then
        granted := true;
        return next;
        return;
    end if;
    granted := false;
    if per_minute = 0 then
        burst := 0;
        tokens_left := 0;
        return next;
        return;
    end if;
    burst := coalesce(burst, per_minute);

    -- Without a lock first: others can only have taken more, and a flood of requests that are refused
    -- neither waits nor writes.
    select refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp())
    into tokens_left
    from rag_rate_buckets as bucket
    where bucket.tenant_id = me.tenant_id and bucket.kind = take_token.kind;
    if not found then
        insert into rag_rate_buckets (tenant_id, kind, tokens, refilled_at)
        values (me.tenant_id, take_token.kind, burst, clock_timestamp())
        on conflict do nothing;
        tokens_left := burst;
    end if;
    if tokens_left >= 1 then
        -- Whoever waited for another one's token sees what that one left: both the condition and the new
        -- value are worked out again.
        update rag_rate_buckets as bucket
        set tokens = refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp()) - 1,
            refilled_at = clock_timestamp()
        where bucket.tenant_id = me.tenant_id
            and bucket.kind = take_token.kind
            and refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp()) >= 1
        returning bucket.tokens into tokens_left;
        granted := found;
        if not found then
            select refilled_tokens(bucket.tokens, bucket.refilled_at, per_minute, burst, clock_timestamp())
            into tokens_left
            from rag_rate_buckets as bucket
            where bucket.tenant_id = me.tenant_id and bucket.kind = take_token.kind;
        end if;
    end if;
    wait_s := case when granted then 0 else greatest(0, 1 - coalesce(tokens_left, 0)) * 60 / per_minute end;
    return next;
end
$$;

comment on function take_token(text) is 'Takes a token for a request of a kind, query or ingest, from the bucket of the principal''s tenant. One row: whether it was granted, how many a minute and at once, what is left, and in how many seconds there is one; nulls where nothing limits it, no seconds where none ever comes. Raises 42501 for nobody';

create function take_token_as(
    tenant_id text, user_id bigint, project_id text, tags text[], signature text, kind text
)
returns table (
    granted boolean, per_minute integer, burst integer, tokens_left double precision, wait_s double precision
)
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    perform begin_as(
        take_token_as.tenant_id, take_token_as.user_id, take_token_as.project_id, take_token_as.tags,
        take_token_as.signature
    );
    return query
    select taken.granted, taken.per_minute, taken.burst, taken.tokens_left, taken.wait_s
    from take_token(take_token_as.kind) as taken;
end
$$;

comment on function take_token_as(text, bigint, text, text[], text, text) is 'begin_as() and take_token() as one statement that is a transaction of its own: the bucket is locked while the server works, and not while it waits for the service';

create function charge_quota(more_documents bigint, more_bytes bigint)
returns table (quota text, quota_limit bigint, used bigint)
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
declare
    me record;
    limits record;
    stored record;
begin
    select principal.tenant_id into me from my_principal() as principal where principal.user_scope is null;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
    if charge_quota.more_documents is null or charge_quota.more_bytes is null then
        raise exception 'a charge is two numbers' using errcode = 'invalid_parameter_value';
    end if;
    select effective.documents, effective.bytes into limits from limits_of(me.tenant_id) as effective;
    -- What makes room is never refused, and waits for nobody.
    if (charge_quota.more_documents > 0 and limits.documents is not null)
        or (charge_quota.more_bytes > 0 and limits.bytes is not null) then
        -- To the end of the transaction: whoever comes next counts what this one has stored.
        perform pg_advisory_xact_lock(hashtextextended('palisade quota ' || me.tenant_id, 0));
        select coalesce(sum(usage.documents), 0) as documents, coalesce(sum(usage.bytes), 0) as bytes
        into stored
        from rag_usage as usage
        where usage.tenant_id = me.tenant_id;
        return query
        select exceeded.quota, exceeded.quota_limit, exceeded.used
        from (
            values
                (1, 'documents', limits.documents, cast(stored.documents as bigint), charge_quota.more_documents),
                (2, 'bytes', limits.bytes, cast(stored.bytes as bigint), charge_quota.more_bytes)
        ) as exceeded (place, quota, quota_limit, used, more)
        where exceeded.more > 0 and exceeded.used + exceeded.more > exceeded.quota_limit
        order by exceeded.place
        limit 1;
        if found then
            return;
        end if;
    end if;
    insert into rag_usage as usage (tenant_id, slot, documents, bytes)
    values (me.tenant_id, pg_backend_pid() % 16, charge_quota.more_documents, charge_quota.more_bytes)
    on conflict (tenant_id, slot) do update
    set documents = usage.documents + excluded.documents,
        bytes = usage.bytes + excluded.bytes;
end
$$;

comment on function charge_quota(bigint, bigint) is 'Counts what the transaction adds to the principal''s tenant, or less than 0 for what it removes; the last statement of one that writes documents, and once in it. No row, or the quota that does not allow it, its limit and what is used of it, and then nothing is counted and the transaction has to be undone. Raises 42501 for nobody';

create function my_limits()
returns table (
    queries_per_minute integer, query_burst integer, ingests_per_minute integer, ingest_burst integer,
    documents bigint, bytes bigint, documents_used bigint, bytes_used bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select
        limits.queries_per_minute,
        limits.query_burst,
        limits.ingests_per_minute,
        limits.ingest_burst,
        limits.documents,
        limits.bytes,
        cast(coalesce(stored.documents, 0) as bigint),
        cast(coalesce(stored.bytes, 0) as bigint)
    from my_principal() as me
    left join lateral limits_of(me.tenant_id) as limits on true
    left join lateral (
        select sum(usage.documents) as documents, sum(usage.bytes) as bytes
        from rag_usage as usage
        where usage.tenant_id = me.tenant_id
        offset 0
    ) as stored on true
    where me.user_scope is null;
end
$$;

comment on function my_limits() is 'What the principal''s tenant may ask and store, null for no limit, and what it has stored; one row, none for nobody and for an analyst';

create function usage_drift()
returns table (
    tenant_id text, documents_counted bigint, bytes_counted bigint, documents_stored bigint, bytes_stored bigint
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    with counted as (
        select usage.tenant_id, cast(sum(usage.documents) as bigint) as documents, cast(sum(usage.bytes) as bigint) as bytes
        from rag_usage as usage
        group by usage.tenant_id
    ),

    stored as (
        select document.tenant_id, count(*) as documents, sum(document.body_bytes) as bytes
        from rag_documents as document
        group by document.tenant_id
    )

    select
        coalesce(counted.tenant_id, stored.tenant_id),
        coalesce(counted.documents, 0),
        coalesce(counted.bytes, 0),
        coalesce(stored.documents, 0),
        coalesce(stored.bytes, 0)
    from counted
    full join stored on stored.tenant_id = counted.tenant_id
    where (coalesce(counted.documents, 0), coalesce(counted.bytes, 0))
        is distinct from (coalesce(stored.documents, 0), coalesce(stored.bytes, 0))
    order by 1;
end
$$;

comment on function usage_drift() is 'Tenants whose documents are not as many or as large as was counted, which only who writes past the service can bring about; reads every document''s size';

create function recount_usage(tenant_id text, out documents bigint, out bytes bigint)
returns record
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    -- Whoever writes in the tenant is done, or waits.
    perform pg_advisory_xact_lock(tenant_lock(recount_usage.tenant_id));
    select count(*), coalesce(sum(document.body_bytes), 0)
    into recount_usage.documents, recount_usage.bytes
    from rag_documents as document
    where document.tenant_id = recount_usage.tenant_id;
    delete from rag_usage as usage where usage.tenant_id = recount_usage.tenant_id;
    insert into rag_usage (tenant_id, slot, documents, bytes)
    select recount_usage.tenant_id, 0, recount_usage.documents, recount_usage.bytes
    where recount_usage.documents > 0;
end
$$;

comment on function recount_usage(text) is 'Counts anew what a tenant has stored; waits for those who are writing in it';
-- A change of the embedding model: a second column of vectors beside the one that is searched, filled while the service
-- goes on, and a short transaction in which the two change names. What reads texts of all tenants, or writes vectors,
-- belongs to rag_embedder; only the owner of the tables may call it, whom rag_migrator alone becomes. What changes
-- tables runs as that owner.

create function active_model()
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return (select model.model_id from rag_models as model where model.place = 'active');
end
$$;

comment on function active_model() is 'The embedding model that searches compare; null as long as none was ever added beside it, when every service is taken at its word';

create function check_model(embedding_model text)
returns text
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
declare
    active rag_models;
begin
    select model.*
    into active
    from rag_models as model
    where model.place = 'active';
    if active.model_id <> check_model.embedding_model then
        raise exception 'chunks are embedded with %', active.model_id using errcode = '55M01';
    end if;
    if active.writes_paused_until > clock_timestamp() then
        raise exception 'the embedding model is being changed' using errcode = '55M02';
    end if;
    return active.model_id;
end
$$;

comment on function check_model(text) is 'The active model, when chunks of this one may be written now. Raises 55M01 when another one is active, 55M02 for the seconds in which two models change places';

-- --- filling --------------------------------------------------------------------------------------

create function chunks_to_fill(from_tenant_id text, from_access_id bigint, at_most integer)
returns table (
    tenant_id text, access_id bigint, chunk_id uuid, title text, section text, chunk_text text, chunk_hash text
)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
begin
    return query
    select
        lacking.tenant_id, lacking.access_id, lacking.id, document.title, lacking.section, lacking.chunk_text,
        lacking.chunk_hash
    from (
        select chunk.tenant_id, chunk.access_id, chunk.id, chunk.document_id, chunk.section, chunk.chunk_text,
            chunk.chunk_hash
        from (
            select class.tenant_id, class.access_id
            from rag_access_classes as class
            where (class.tenant_id, class.access_id) >= (chunks_to_fill.from_tenant_id, chunks_to_fill.from_access_id)
            order by class.tenant_id, class.access_id
        ) as class
        -- One probe of rag_chunks_second_contents for a class that has them all.
        cross join lateral (
            select found.tenant_id, found.access_id, found.id, found.document_id, found.section, found.chunk_text,
                found.chunk_hash
            from rag_chunks as found
            where found.tenant_id = class.tenant_id
                and found.access_id = class.access_id
                and found.second_embedding_model is null
            limit chunks_to_fill.at_most
        ) as chunk
        limit chunks_to_fill.at_most
    ) as lacking
    cross join lateral (
        select its.title
        from rag_documents as its
        where its.tenant_id = lacking.tenant_id
            and its.access_id = lacking.access_id
            and its.id = lacking.document_id
        offset 0
    ) as document;
end
$$;

comment on function chunks_to_fill(text, bigint, integer) is 'Chunks without a vector of the second model, with what is embedded of each, class after class from the given one on; none when there is no second model';

create function fill_vectors(
    model_id text, tenant_ids text[], access_ids bigint[], chunk_ids uuid[], embeddings text[]
)
returns bigint
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
    filled bigint;
begin
    -- The model is asked for in the statement that writes: its snapshot is of a moment when the table is locked
    -- already, so that the columns cannot change places in between.
    update rag_chunks as chunk
    set second_embedding = cast(given.embedding as halfvec),
        second_embedding_model = fill_vectors.model_id
    from unnest(
        fill_vectors.tenant_ids, fill_vectors.access_ids, fill_vectors.chunk_ids, fill_vectors.embeddings
    ) as given (tenant_id, access_id, chunk_id, embedding)
    where chunk.tenant_id = given.tenant_id
        and chunk.access_id = given.access_id
        and chunk.id = given.chunk_id
        and chunk.second_embedding_model is null
        and exists (
            select
            from rag_models as model
            where model.place = 'second' and model.model_id = fill_vectors.model_id
        );
    get diagnostics filled = row_count;
    if not exists (
        select
        from rag_models as model
        where model.place = 'second' and model.model_id = fill_vectors.model_id
    ) then
        raise exception 'the second model is not %', fill_vectors.model_id using errcode = '55M01';
    end if;
    return filled;
end
$$;

comment on function fill_vectors(text, text[], bigint[], uuid[], text[]) is 'Writes vectors of the second model where there is none; returns how many. A chunk that was replaced or removed meanwhile is passed over. Raises 55M01 when the second model is another one';

create function count_fill(out chunks bigint, out filled bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set jit = off
as $$
begin
    select count(*), count(chunk.second_embedding_model)
    into chunks, filled
    from rag_chunks as chunk;
end
$$;

comment on function count_fill() is 'How many chunks there are, and how many have a vector of the second model; 0 of both when there is none';

create function lacks_vectors()
returns boolean
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
begin
    return exists (select from chunks_to_fill('', 0, 1));
end
$$;

comment on function lacks_vectors() is 'Whether a chunk has no vector of the second model; one probe for each access class';

create function large_classes()
returns table (access_id bigint)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select class.access_id
    from rag_class_indexes as class
    where class.ready
    order by class.access_id;
end
$$;

comment on function large_classes() is 'Classes whose own indexes are searched, by number: each needs one of the second model before that can be active';

create function set_models(active text, second text default null, is_former boolean default false)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    delete from rag_models as model;
    insert into rag_models (place, model_id, is_former)
    select listed.place, listed.model_id, listed.is_former
    from (values
        ('active', set_models.active, false),
        ('second', set_models.second, set_models.is_former)
    ) as listed (place, model_id, is_former)
    where listed.model_id is not null;
    -- The size that an index of vectors had at first is another one with another model.
    update rag_class_indexes as own
    set vector_bytes_per_chunk = cast(index.bytes as double precision) / greatest(own.chunks, 1)
    from class_indexes() as index
    where index.access_id = own.access_id and index.kind = 'vector' and index.is_usable;
end
$$;

comment on function set_models(text, text, boolean) is 'Notes which models the two columns are of, as the last step of what makes it so';

create function pause_writes(seconds integer)
returns void
language plpgsql
volatile
security definer
set search_path = rag, pg_temp
as $$
begin
    update rag_models as model
    set writes_paused_until = clock_timestamp() + make_interval(secs => least(pause_writes.seconds, 600))
    where model.place = 'active';
end
$$;

comment on function pause_writes(integer) is 'Refuses new chunks for so many seconds, at most 600, so that the last vectors can be filled; 0 ends it';

create function list_models()
returns table (place text, model_id text, is_former boolean, dimensions integer, changed_at timestamptz)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
as $$
#variable_conflict use_column
begin
    return query
    select model.place, model.model_id, model.is_former, attribute.atttypmod, model.changed_at
    from rag_models as model
    join pg_attribute as attribute
        on attribute.attrelid = cast('rag_chunks' as regclass)
        and attribute.attname = case model.place when 'active' then 'embedding' else 'second_embedding' end
    order by model.place;
end
$$;

comment on function list_models() is 'The models of the two columns, the active one first, with their widths; no row before a second one was ever added';

-- --- comparing ------------------------------------------------------------------------------------

create function compare_models(embedding halfvec, second_embedding halfvec, top_k integer)
returns table (active_found integer, second_found integer, shared integer)
language plpgsql
stable
security definer
set search_path = rag, pg_temp
set jit = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    visible constant bigint[] := my_access_ids();
begin
    return query
    with active as (
        select chunk.id
        from rag_chunks as chunk
        join rag_models as model on model.place = 'active' and model.model_id = chunk.embedding_model
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
            and chunk.second_embedding is not null
        order by chunk.embedding <=> compare_models.embedding, chunk.id
        limit compare_models.top_k
    ),

    second as (
        select chunk.id
        from rag_chunks as chunk
        join rag_models as model on model.place = 'second' and model.model_id = chunk.second_embedding_model
        where chunk.tenant_id = tenant
            and chunk.access_id = any(visible)
        order by chunk.second_embedding <=> compare_models.second_embedding, chunk.id
        limit compare_models.top_k
    )

    select
        cast((select count(*) from active) as integer),
        cast((select count(*) from second) as integer),
        cast((select count(*) from active join second on second.id = active.id) as integer);
end
$$;

comment on function compare_models(halfvec, halfvec, integer) is 'How many of the top_k chunks that are nearest to a question by the active model, among those that the principal may read and that have both vectors, are so by the second one as well';

-- --- changing the columns, as the owner -------------------------------------------------------------

create function second_indexes()
returns table (access_id bigint, index_name text, is_usable boolean)
language sql
stable
begin atomic
    select
        cast(named.parts[1] as bigint),
        cast(class.relname as text),
        index.indisvalid
        and named.parts[2] is null
        and method.amname = 'hnsw'
        and attribute.attname = 'second_embedding'
        and pg_get_expr(index.indpred, index.indrelid) is not distinct from format(
            '(access_id = %L::bigint)', named.parts[1]
        )
    from pg_index as index
    join pg_class as class on class.oid = index.indexrelid
    join pg_am as method on method.oid = class.relam
    join pg_attribute as attribute on attribute.attrelid = index.indrelid and attribute.attnum = index.indkey[0]
    cross join lateral (
        select regexp_match(
            class.relname, '^rag_chunks_second_([1-9][0-9]{0,17}|1[0-9]{18})(_cc(?:new|old)[0-9]*)?$'
        ) as parts
    ) as named
    where index.indrelid = cast('rag_chunks' as regclass)
        and named.parts is not null;
end;

comment on function second_indexes() is 'The indexes of the second model''s vectors, each of one large class. In no order';

create function empty_second_column(dimensions integer)
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    about_vector constant text := col_description(
        cast('rag_chunks' as regclass),
        (select attnum from pg_attribute where attrelid = cast('rag_chunks' as regclass) and attname = 'second_embedding')
    );
    about_model constant text := col_description(
        cast('rag_chunks' as regclass),
        (
            select attnum
            from pg_attribute
            where attrelid = cast('rag_chunks' as regclass) and attname = 'second_embedding_model'
        )
    );
    rule constant text := (
        select pg_get_constraintdef(con.oid)
        from pg_constraint as con
        where con.conrelid = cast('rag_chunks' as regclass) and con.conname = 'rag_chunks_second_embedding'
    );
begin
    -- Without values: neither reads or writes a row. Constraint and indexes go with the columns.
    alter table rag_chunks drop column second_embedding, drop column second_embedding_model;
    execute format(
        'alter table rag_chunks add column second_embedding halfvec(%s), add column second_embedding_model text',
        empty_second_column.dimensions
    );
    alter table rag_chunks
    alter column second_embedding set storage plain,
    alter column second_embedding set statistics 0;
    -- Checked for rows to come; that it holds for those that are there is looked at without a lock.
    execute format(
        'alter table rag_chunks add constraint rag_chunks_second_embedding %s not valid', replace(rule, ' NOT VALID', '')
    );
    execute format('comment on column rag_chunks.second_embedding is %L', about_vector);
    execute format('comment on column rag_chunks.second_embedding_model is %L', about_model);
    perform grant_model_columns();
end
$$;

comment on function empty_second_column(integer) is 'Makes the second column anew, without values and of another width, in no time';

create function grant_model_columns()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
begin
    -- Rights are the columns', and go with them when they change names.
    revoke select (embedding, embedding_model, second_embedding, second_embedding_model)
    on rag_chunks from rag_search, rag_steward, rag_embedder;
    revoke update (embedding, embedding_model, second_embedding, second_embedding_model)
    on rag_chunks from rag_search, rag_steward, rag_embedder;
    grant select (embedding, embedding_model) on rag_chunks to rag_search;
    grant select (embedding_model) on rag_chunks to rag_steward;
    grant select (second_embedding_model), update (second_embedding, second_embedding_model)
    on rag_chunks to rag_embedder;
end
$$;

comment on function grant_model_columns() is 'Who may do what with the columns of vectors and models; after these changed places, or were made anew, as at first';

create function add_model(active text, coming text, dimensions integer)
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    widths integer[];
begin
    lock table rag_chunks in access exclusive mode;
    if exists (select from list_models() as model where model.place = 'second') then
        raise exception 'there is a second model already' using errcode = '55M03';
    end if;
    if add_model.active = add_model.coming then
        raise exception 'the second model is the active one' using errcode = '55M03';
    end if;
    widths := array(
        select attribute.atttypmod
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass)
            and attribute.attname in ('embedding', 'second_embedding')
        order by attribute.attname
    );
    -- Both stand in the row, which has to fit into a page: 3,800 of one, less the head of the other.
    if widths[1] + add_model.dimensions > 3790 then
        raise exception '% and % dimensions do not fit into a page: 3790 together', widths[1], add_model.dimensions
            using errcode = '55M04';
    end if;
    if widths[2] <> add_model.dimensions then
        perform empty_second_column(add_model.dimensions);
    end if;
    perform set_models(add_model.active, add_model.coming);
end
$$;

comment on function add_model(text, text, integer) is 'Declares the active model, and a second one of so many dimensions that is to be filled. Raises 55M03 when there is one, 55M04 when both together are too wide';

create function swap_models()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    active text;
    second text;
    was_former boolean;
    number text;
    comments text[];
begin
    lock table rag_chunks in access exclusive mode;
    select
        max(model.model_id) filter (where model.place = 'active'),
        max(model.model_id) filter (where model.place = 'second'),
        bool_or(model.is_former) filter (where model.place = 'second')
    into active, second, was_former
    from list_models() as model;
    if second is null then
        raise exception 'there is no second model' using errcode = '55M03';
    end if;
    if lacks_vectors() then
        raise exception 'chunks lack a vector of the second model' using errcode = '55M05';
    end if;
    if to_regclass('rag_chunks_second_contents') is null
        or exists (
            select from pg_index where indexrelid = to_regclass('rag_chunks_second_contents') and not indisvalid
        )
        or exists (
            select
            from large_classes() as class
            where not exists (
                select from second_indexes() as index where index.access_id = class.access_id and index.is_usable
            )
        ) then
        raise exception 'an index of the second model is missing' using errcode = '55M06';
    end if;

    comments := array(
        select col_description(attribute.attrelid, attribute.attnum)
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass)
            and attribute.attname in ('embedding', 'embedding_model', 'second_embedding', 'second_embedding_model')
        order by attribute.attname
    );
    alter table rag_chunks rename column embedding to leaving_embedding;
    alter table rag_chunks rename column embedding_model to leaving_embedding_model;
    alter table rag_chunks rename column second_embedding to embedding;
    alter table rag_chunks rename column second_embedding_model to embedding_model;
    alter table rag_chunks rename column leaving_embedding to second_embedding;
    alter table rag_chunks rename column leaving_embedding_model to second_embedding_model;
    alter table rag_chunks rename constraint rag_chunks_embedding to rag_chunks_leaving_embedding;
    alter table rag_chunks rename constraint rag_chunks_second_embedding to rag_chunks_embedding;
    alter table rag_chunks rename constraint rag_chunks_leaving_embedding to rag_chunks_second_embedding;
    alter index rag_chunks_contents rename to rag_chunks_leaving_contents;
    alter index rag_chunks_second_contents rename to rag_chunks_contents;
    alter index rag_chunks_leaving_contents rename to rag_chunks_second_contents;
    for number in
        select distinct substring(class.relname from '[0-9]+$')
        from pg_index as index
        join pg_class as class on class.oid = index.indexrelid
        where index.indrelid = cast('rag_chunks' as regclass)
            and class.relname ~ '^rag_chunks_(vector|second)_[0-9]+$'
    loop
        execute format('alter index if exists %I rename to %I', 'rag_chunks_vector_' || number, 'rag_chunks_leaving_' || number);
        execute format('alter index if exists %I rename to %I', 'rag_chunks_second_' || number, 'rag_chunks_vector_' || number);
        execute format('alter index if exists %I rename to %I', 'rag_chunks_leaving_' || number, 'rag_chunks_second_' || number);
    end loop;
    execute format('comment on column rag_chunks.embedding is %L', comments[1]);
    execute format('comment on column rag_chunks.embedding_model is %L', comments[2]);
    execute format('comment on column rag_chunks.second_embedding is %L', comments[3]);
    execute format('comment on column rag_chunks.second_embedding_model is %L', comments[4]);
    perform grant_model_columns();

    -- That no vector is missing has been looked at. `not null` says it as well, but would read all rows while
    -- nobody else can: finish_swap() does that later, and until then this stands for it.
    alter table rag_chunks
    alter column second_embedding drop not null,
    alter column second_embedding_model drop not null;
    alter table rag_chunks drop constraint if exists rag_chunks_embedding_there;
    alter table rag_chunks
    add constraint rag_chunks_embedding_there check (embedding is not null and embedding_model is not null) not valid;
    perform set_models(second, active, not was_former);
end
$$;

comment on function swap_models() is 'Makes the second model the active one and the active one the second, in one transaction: columns, indexes, constraints and rights change names. Raises 55M03 when there is no second model, 55M05 when a chunk lacks its vector, 55M06 when an index is missing';

create function finish_swap()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
begin
    if exists (
        select
        from pg_constraint as con
        where con.conrelid = cast('rag_chunks' as regclass)
            and con.conname = 'rag_chunks_embedding_there'
            and con.convalidated
    ) then
        -- Without reading a row, since the constraint says so.
        alter table rag_chunks
        alter column embedding set not null,
        alter column embedding_model set not null;
        alter table rag_chunks drop constraint rag_chunks_embedding_there;
    end if;
end
$$;

comment on function finish_swap() is 'Says `not null` of the active columns again, once the constraint that stands for it was validated';

create function drop_second_model()
returns void
language plpgsql
volatile
set search_path = rag, pg_temp
as $$
declare
    active text;
begin
    lock table rag_chunks in access exclusive mode;
    active := (select model.model_id from list_models() as model where model.place = 'active');
    perform empty_second_column((
        select attribute.atttypmod
        from pg_attribute as attribute
        where attribute.attrelid = cast('rag_chunks' as regclass) and attribute.attname = 'embedding'
    ));
    perform set_models(active);
end
$$;

comment on function drop_second_model() is 'Removes the vectors and indexes of the second model; the active one stays declared';
-- Views for people. They read through the functions of 35_reading.sql, so whoever queries them sees what
-- their principal may, and a condition of theirs is evaluated on nothing else.

create view v_documents
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.id as document_id,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    document.source_type,
    document.source_id,
    document.source_uri,
    document.title,
    document.language,
    document.domain,
    document.doc_type,
    document.verified,
    document.metadata,
    length(document.body) as body_characters,
    document.created_at,
    document.updated_at,
    document.content_updated_at,
    document.source_updated_at
from my_documents() as document
union all
select
    listed.tenant_id,
    listed.id,
    listed.scope,
    listed.user_id,
    cast(null as text),
    listed.tags,
    listed.source_type,
    cast(null as text),
    cast(null as text),
    cast(null as text),
    listed.language,
    cast(null as text),
    listed.doc_type,
    listed.verified,
    cast(null as jsonb),
    cast(null as integer),
    listed.created_at,
    listed.updated_at,
    listed.content_updated_at,
    listed.source_updated_at
from my_listed_documents() as listed;

comment on view v_documents is 'One row for each document that the reader may see, without its text; for an analyst with user_scope metadata also for users'' own documents, without anything that they say';

create view v_chunks
with (security_invoker = true, security_barrier = true)
as
select
    chunk.tenant_id,
    chunk.document_id,
    chunk.chunk_index,
    chunk.document_id || ':' || chunk.chunk_index as source_id,
    document.title,
    document.scope,
    document.user_id,
    document.project_id,
    document.tags,
    chunk.section,
    chunk.page_number,
    chunk.language,
    chunk.chunk_text,
    chunk.token_count,
    chunk.token_counter,
    chunk.embedding_model,
    chunk.created_at
from my_chunks() as chunk
join my_documents() as document
    on document.tenant_id = chunk.tenant_id
    and document.access_id = chunk.access_id
    and document.id = chunk.document_id;

comment on view v_chunks is 'One row for each chunk that the reader may see, with the scope, owner and tags of its document';

create view v_query_latency
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    date_trunc('hour', query.asked_at) as hour,
    query.mode,
    query.model_used,
    count(*) as queries,
    percentile_cont(0.5) within group (order by query.retrieval_ms) as retrieval_p50_ms,
    percentile_cont(0.95) within group (order by query.retrieval_ms) as retrieval_p95_ms,
    percentile_cont(0.5) within group (order by query.generation_ms) as generation_p50_ms,
    percentile_cont(0.95) within group (order by query.generation_ms) as generation_p95_ms,
    percentile_cont(0.5) within group (order by query.latency_ms) as latency_p50_ms,
    percentile_cont(0.95) within group (order by query.latency_ms) as latency_p95_ms,
    max(query.latency_ms) as latency_max_ms
from my_queries() as query
group by query.tenant_id, date_trunc('hour', query.asked_at), query.mode, query.model_used;

comment on view v_query_latency is 'One row for each hour, mode of search and model, of the questions that the reader may see; times in milliseconds';

create view v_empty_results
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    query.query_id,
    query.asked_at,
    query.user_id,
    query.project_id,
    query.scope,
    query.mode,
    query.query_length,
    query.query_text,
    query.latency_ms
from my_queries() as query
where query.result_count = 0;

comment on view v_empty_results is 'One row for each question that found nothing; mode none means that its principal could read nothing at all';

create view v_stale_documents
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.document_id,
    document.title,
    document.source_type,
    document.source_id,
    document.source_updated_at,
    document.content_updated_at,
    extract(epoch from now() - document.content_updated_at) / 86400 as content_age_days,
    coalesce(document.source_updated_at > document.updated_at, false) as source_is_newer
from v_documents as document
where document.source_updated_at > document.updated_at
    or document.content_updated_at < now() - interval '180 days';

comment on view v_stale_documents is 'One row for each document whose source changed after it was last ingested, or whose text is older than 180 days';

create view v_source_usage
with (security_invoker = true, security_barrier = true)
as
select
    document.tenant_id,
    document.document_id,
    document.title,
    document.source_type,
    document.source_id,
    count(hit.query_id) as times_retrieved,
    count(hit.query_id) filter (where hit.cited) as times_cited,
    avg(hit.rank) as mean_rank,
    max(query.asked_at) as last_retrieved_at
from v_documents as document
left join my_query_chunks() as hit
    on hit.tenant_id = document.tenant_id
    and hit.document_id = document.document_id
left join my_queries() as query on query.query_id = hit.query_id
group by
    document.tenant_id, document.document_id, document.title, document.source_type, document.source_id;

comment on view v_source_usage is 'One row for each document that the reader may see, with how often questions that the reader may see got it back and cited it';

create view v_routed_queries
with (security_invoker = true, security_barrier = true)
as
select
    query.tenant_id,
    query.query_id,
    query.asked_at,
    query.user_id,
    query.project_id,
    query.route_tag,
    query.route_fallback,
    query.confidence,
    query.result_count,
    query.citation_count,
    query.query_length,
    query.query_text
from my_queries() as query
where query.action = 'ROUTE';

comment on view v_routed_queries is 'One row for each question whose asker was sent to a person, with the tag of whose owner that was; confidence from 0 to 100';

create view v_feedback
with (security_invoker = true, security_barrier = true)
as
select
    given.tenant_id,
    given.query_id,
    query.asked_at,
    given.user_id,
    given.document_id,
    given.chunk_index,
    given.document_id || ':' || given.chunk_index as source_id,
    hit.rank,
    hit.cited,
    given.rating,
    given.clicked,
    query.confidence,
    query.action,
    given.created_at,
    given.updated_at
from my_feedback() as given
join my_queries() as query on query.query_id = given.query_id
left join my_query_chunks() as hit
    on hit.query_id = given.query_id
    and hit.document_id = given.document_id
    and hit.chunk_index = given.chunk_index;

comment on view v_feedback is 'One row for each answer, and for each source of one, that somebody made something of: rating 1, 0, -1 or null, clicked or not; of an answer itself document and rank are null';
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
            ('bury_source(bigint, text, text, text)', writers, 'rag_principal'),
            ('derived_documents(uuid[], text[], text[], boolean)', service, 'rag_principal'),
            ('retraction_of(text, bigint, text, text, text)', writers, 'rag_principal'),
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
