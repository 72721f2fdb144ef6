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
