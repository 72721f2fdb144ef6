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
    constraint rag_documents_source unique (tenant_id, access_id, source_type, source_id),
    constraint rag_documents_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete restrict,
    constraint rag_documents_source_lengths check (
        length(source_type) between 1 and 64 and octet_length(source_id) between 1 and 512
    ),
    constraint rag_documents_language check (language ~ '^[a-z]{2}$'),
    constraint rag_documents_metadata check (jsonb_typeof(metadata) = 'object')
);

-- Documents are looked up by their id alone: the caller knows no access_id.
-- With the class in the index, a hidden document is told apart without a visit to the table, so that it
-- takes as long as a missing one.
create index rag_documents_id on rag_documents (tenant_id, id, access_id);

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
    tenant_id text not null,
    id uuid not null default gen_random_uuid(),
    access_id bigint not null,
    document_id uuid not null,
    chunk_index integer not null,
    chunk_text text not null,
    chunk_hash text not null,
    token_count integer not null,
    token_counter text not null,
    start_offset integer not null,
    end_offset integer not null,
    page_number integer,
    section text,
    embedding halfvec(:embedding_dimensions) not null,
    embedding_model text not null,
    tsv tsvector not null,
    lexeme_count integer not null,
    language text,
    created_at timestamptz not null default now(),
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
    constraint rag_chunks_embedding check (l2_norm(embedding) > 0)
);

-- Read row by row during an exact scan, so both stay in the row: the vector as it is, the tsvector
-- uncompressed as long as two rows fit on a page. The text is the first to move out.
alter table rag_chunks alter column embedding set storage plain;
alter table rag_chunks alter column tsv set storage main;
alter table rag_chunks set (toast_tuple_target = 4080);

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
comment on column rag_chunks.tsv is 'Lexemes of title, section and text in the configuration of the language';
comment on column rag_chunks.lexeme_count is 'Occurrences of lexemes in tsv: the length that BM25 normalises by';
comment on column rag_chunks.language is 'Language of the document';
comment on column rag_chunks.created_at is 'When this version of the chunk was written';

create table rag_tombstones (
    tenant_id text not null,
    access_id bigint not null,
    source_type text not null,
    source_id text not null,
    generation bigint not null default 1,
    reason text not null,
    created_at timestamptz not null default now(),
    updated_at timestamptz not null default now(),
    constraint rag_tombstones_pkey primary key (tenant_id, access_id, source_type, source_id),
    constraint rag_tombstones_class foreign key (tenant_id, access_id)
        references rag_access_classes (tenant_id, access_id) on delete restrict,
    constraint rag_tombstones_source_lengths check (
        length(source_type) between 1 and 64 and octet_length(source_id) between 1 and 512
    ),
    -- Far from the end of bigint, where the next deletion would fail.
    constraint rag_tombstones_generation check (generation between 1 and 1000000000)
);

comment on table rag_tombstones is 'Sources that were deleted: an ingest that began before the deletion finds a newer generation here and gives up';
comment on column rag_tombstones.tenant_id is 'The tenant';
comment on column rag_tombstones.access_id is 'The access class of the deleted document';
comment on column rag_tombstones.source_type is 'The deleted document''s source_type';
comment on column rag_tombstones.source_id is 'The deleted document''s source_id';
comment on column rag_tombstones.generation is 'Number of deletions so far; only grows';
comment on column rag_tombstones.reason is 'Why it was deleted';
comment on column rag_tombstones.created_at is 'When it was first deleted';
comment on column rag_tombstones.updated_at is 'When it was last deleted';

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
comment on column rag_query_logs.mode is 'Which arms ran: hybrid, partial, keyword; none when nothing was found';
comment on column rag_query_logs.embedding_model is 'The model that embedded the question; null when it was not embedded';
comment on column rag_query_logs.model_used is 'What wrote the answer; null when only hits were asked for';
comment on column rag_query_logs.result_count is 'Chunks that the search returned';
comment on column rag_query_logs.citation_count is 'Citations that survived the re-check';
comment on column rag_query_logs.context_tokens is 'Tokens of context in the prompt';
comment on column rag_query_logs.confidence is 'Confidence from 0 to 100; null when nothing was generated';
comment on column rag_query_logs.action is 'CITE or ROUTE; null when nothing was generated';
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

-- The planner's statistics hold common values of a column, of all tenants alike, and its estimates show
-- them to whoever may EXPLAIN. Columns that say something and choose no plan have none.
do $$
declare
    silent record;
begin
    for silent in
        select *
        from (values
            ('rag_access_classes', array['tags_digest']),
            ('rag_documents', array[
                'source_id', 'source_uri', 'source_hash', 'title', 'body', 'domain', 'doc_type',
                'provenance_id', 'task_id', 'metadata', 'tags', 'project_id'
            ]),
            ('rag_chunks', array['chunk_text', 'chunk_hash', 'section', 'tsv', 'embedding', 'token_counter']),
            ('rag_tombstones', array['source_id', 'reason']),
            ('rag_query_logs', array['project_id', 'query_hash', 'query_text'])
        ) as listed (table_name, columns)
        cross join lateral unnest(listed.columns) as column_name
    loop
        execute format('alter table %I alter column %I set statistics 0', silent.table_name, silent.column_name);
    end loop;
end
$$;
-- Who is asking, and which access classes are theirs. `my_principal` is the only place where the
-- session variables are read, `begin_as` the only place where they are set.

create function begin_as(tenant_id text, user_id bigint, project_id text, tags text[])
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
end
$$;

comment on function begin_as(text, bigint, text, text[]) is 'Sets the principal for the rest of the transaction; first statement of each, outside any savepoint. user_id null: no user, public rows only; project_id null: no project, *: all of the user''s. Raises when another principal is already set';

create function my_principal(out tenant_id text, out user_id bigint, out project_id text, out tags text[])
returns setof record
language sql
stable
parallel safe
begin atomic
    with variable as materialized (
        select
            current_setting('app.tenant_id', true) as tenant,
            current_setting('app.user_id', true) as users,
            coalesce(current_setting('app.project_id', true), '') as project,
            current_setting('app.tags', true) as tags
    ),

    -- Each null means malformed. The order of the tests matters, so it is spelled out as cases: a
    -- cast is reached only by text that it takes. The list of tags is checked by a pattern and not
    -- by `is json`, which runs out of stack on deep nesting and lets through escapes that jsonb
    -- refuses with an error.
    parsed as materialized (
        select
            case
                when length(tenant) between 1 and 128 and tenant !~ '[[:cntrl:]]' then tenant
            end as tenant_id,
            case
                when users ~ '^(0|[1-9][0-9]{0,17})$' then cast(users as bigint)
            end as user_id,
            case
                when length(project) <= 128 and project !~ '[[:cntrl:]]' then project
            end as project_id,
            case
                when octet_length(tags) <= 65536
                    and tags ~ '^\s*\[\s*("([^"\\[:cntrl:]]|\\["\\/])*"(\s*,\s*"([^"\\[:cntrl:]]|\\["\\/])*")*)?\s*\]\s*$'
                    then array(select jsonb_array_elements_text(cast(tags as jsonb)))
            end as tags
        from variable
    )

    select
        parsed.tenant_id,
        nullif(parsed.user_id, 0),
        nullif(parsed.project_id, ''),
        case when parsed.tags = '{}' then array['public'] else parsed.tags end
    from parsed
    where session_user in ('rag_app', 'rag_publisher')
        and parsed.tenant_id is not null
        and parsed.user_id is not null
        and parsed.project_id is not null
        and parsed.tags is not null;
end;

comment on function my_principal() is 'The principal that the session variables name: one row, or none when a variable is missing, empty (but for app.project_id) or malformed, or when the login is not one of the service. The only place where the variables are read. app.user_id 0 is a principal without a user';

create function my_tenant_id()
returns text
language sql
stable
parallel safe
begin atomic
    select me.tenant_id from my_principal() as me;
end;

comment on function my_tenant_id() is 'The principal''s tenant, null for nobody';

create function my_user_id()
returns bigint
language sql
stable
parallel safe
begin atomic
    select me.user_id from my_principal() as me;
end;

comment on function my_user_id() is 'The principal''s user, null for nobody and for a principal without a user';

-- STABLE and never IMMUTABLE: a plan that has folded one caller's classes would serve them to the next.
create function my_access_ids()
returns bigint[]
language sql
stable
security definer
parallel safe
set search_path = rag, pg_temp
begin atomic
    select coalesce(array_agg(mine.access_id), '{}')
    from my_principal() as me
    cross join lateral (
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
    ) as mine;
end;

comment on function my_access_ids() is 'The access classes that the principal may read; empty for nobody. Policies compare access_id with it, evaluated once per statement';

create function my_writable_access_ids()
returns bigint[]
language sql
stable
security definer
parallel safe
set search_path = rag, pg_temp
begin atomic
    select coalesce(array_agg(class.access_id), '{}')
    from my_principal() as me
    join rag_access_classes as class
        on class.tenant_id = me.tenant_id
        and class.access_id = any((select my_access_ids())::bigint[])
    where case class.scope
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
    end;
end;

comment on function my_writable_access_ids() is 'The access classes that the principal may write: of those it may read, its own, those of projects shared for writing, and the public ones when the login is rag_publisher';

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
    return (
        select coalesce(array_agg(class.access_id), '{}')
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
    select principal.* into me from my_principal() as principal;
    if not found then
        raise exception 'no principal' using errcode = 'insufficient_privilege';
    end if;
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
        class.access_id, class.scope, class.user_id, class.project_id, class.tags,
        class.access_id = any((select my_writable_access_ids())::bigint[])
    from my_principal() as me
    left join rag_access_classes as class on class.tenant_id = me.tenant_id
    order by class.scope, class.user_id, class.project_id, class.tags, class.access_id;
end;

comment on function whoami() is 'The principal as the database understands it, one row for each access class that it may read (one row with nulls when there is none); no row for nobody';
-- Row security. Forced, so that it binds the owner as well; one policy for each command and role;
-- a restrictive policy on each table that no later permissive one can widen across tenants.
-- `(select …)` is evaluated once per statement, not once per row.

alter table rag_access_classes enable row level security;
alter table rag_access_classes force row level security;
alter table rag_project_members enable row level security;
alter table rag_project_members force row level security;
alter table rag_documents enable row level security;
alter table rag_documents force row level security;
alter table rag_chunks enable row level security;
alter table rag_chunks force row level security;
alter table rag_tombstones enable row level security;
alter table rag_tombstones force row level security;
alter table rag_query_logs enable row level security;
alter table rag_query_logs force row level security;
alter table rag_query_log_chunks enable row level security;
alter table rag_query_log_chunks force row level security;

-- The definer functions find the caller's classes, so their owner reads them all; and they alone
-- make new ones.
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

-- Tenant belts, one for each command that is granted, so that no policy is FOR ALL. The condition is
-- said twice: the first time the planner may use it for an index; the second, which it cannot merge with
-- a condition of the query's own and takes for the cheapest one, comes before any of these on a row. So
-- no row of another tenant is ever compared with what the caller asks for, and EXPLAIN ANALYZE has
-- nothing to tell about it.
do $$
declare
    belt record;
    same_tenant constant text :=
        'tenant_id = (select my_tenant_id()) and tenant_id = any(array[(select my_tenant_id())])';
begin
    for belt in
        select *
        from (values
            ('rag_access_classes', array['select']),
            ('rag_project_members', array['select']),
            ('rag_documents', array['select', 'insert', 'update', 'delete']),
            ('rag_chunks', array['select', 'insert', 'delete']),
            ('rag_tombstones', array['select', 'insert', 'update']),
            ('rag_query_logs', array['select', 'insert']),
            ('rag_query_log_chunks', array['select', 'insert'])
        ) as granted (table_name, commands)
        cross join lateral unnest(granted.commands) as command
    loop
        execute format(
            'create policy %I on %I as restrictive for %s to rag_app, rag_publisher %s %s',
            'own_tenant_' || belt.command,
            belt.table_name,
            belt.command,
            case when belt.command <> 'insert' then format('using (%s)', same_tenant) end,
            case when belt.command in ('insert', 'update') then format('with check (%s)', same_tenant) end
        );
        execute format(
            'comment on policy %I on %I is %L',
            'own_tenant_' || belt.command, belt.table_name, 'Never across tenants'
        );
    end loop;
end
$$;

-- Access classes: the caller sees its own.
create policy read_classes on rag_access_classes
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_classes on rag_access_classes is 'The classes that the principal may read';

-- Memberships: owner and member see them; changing them is the operator's.
create policy read_members on rag_project_members
for select to rag_app, rag_publisher
using (owner_user_id = (select my_user_id()) or member_user_id = (select my_user_id()));
comment on policy read_members on rag_project_members is 'Projects that the principal shares or has been given';

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
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_documents on rag_documents is 'Documents of the classes that the principal may read';

create policy add_documents on rag_documents
for insert to rag_app, rag_publisher
with check (
    access_id = any((select my_writable_access_ids())::bigint[])
    -- What people read of scope, owner and tags must not lie.
    and exists (
        select 1
        from rag_access_classes as class
        where class.tenant_id = rag_documents.tenant_id
            and class.access_id = rag_documents.access_id
            and class.scope = rag_documents.scope
            and class.user_id is not distinct from rag_documents.user_id
            and class.project_id is not distinct from rag_documents.project_id
            and class.tags = rag_documents.tags
    )
);
comment on policy add_documents on rag_documents is 'Documents of the classes that the principal may write, with the scope, owner and tags of their class';

create policy change_documents on rag_documents
for update to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy change_documents on rag_documents is 'Documents of the classes that the principal may write';

create policy remove_documents on rag_documents
for delete to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_documents on rag_documents is 'Documents of the classes that the principal may write';

-- Chunks. They are replaced, never updated.
create policy read_chunks on rag_chunks
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_chunks on rag_chunks is 'Chunks of the classes that the principal may read';

create policy add_chunks on rag_chunks
for insert to rag_app, rag_publisher
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

create policy remove_chunks on rag_chunks
for delete to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy remove_chunks on rag_chunks is 'Chunks of the classes that the principal may write';

-- Tombstones. Nobody removes one.
create policy read_tombstones on rag_tombstones
for select to rag_app, rag_publisher
using (access_id = any((select my_access_ids())::bigint[]));
comment on policy read_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may read';

create policy add_tombstones on rag_tombstones
for insert to rag_app, rag_publisher
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy add_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

create policy raise_tombstones on rag_tombstones
for update to rag_app, rag_publisher
using (access_id = any((select my_writable_access_ids())::bigint[]))
with check (access_id = any((select my_writable_access_ids())::bigint[]));
comment on policy raise_tombstones on rag_tombstones is 'Deleted sources of the classes that the principal may write';

-- Query logs: each user's own. A principal without a user writes them and reads none.
create policy read_logs on rag_query_logs
for select to rag_app, rag_publisher
using (user_id = (select my_user_id()));
comment on policy read_logs on rag_query_logs is 'The principal''s own questions';

create policy add_logs on rag_query_logs
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_logs on rag_query_logs is 'The principal''s own questions';

create policy read_log_chunks on rag_query_log_chunks
for select to rag_app, rag_publisher
using (user_id = (select my_user_id()));
comment on policy read_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';

create policy add_log_chunks on rag_query_log_chunks
for insert to rag_app, rag_publisher
with check (user_id = coalesce((select my_user_id()), 0));
comment on policy add_log_chunks on rag_query_log_chunks is 'Results of the principal''s own questions';
-- Retrieval. `search` is what the service and psql call; it runs as its caller, under row security.

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
    select cast('''' || replace(replace(lexeme, '\', '\\'), '''', '''''') || '''' as tsquery);
end;

comment on function lexeme_query(text) is 'The query for exactly this lexeme, whatever characters it has';

-- BM25 over the chunks that the caller may read. It is a definer function because the operator @@ is
-- not leakproof: under row security no full-text index could serve it. It takes its classes from the
-- principal and never from an argument, and gives out ids and scores only; `search` joins them with
-- rag_chunks again, under the caller's policies, which stay the barrier.
create function keyword_candidates(question text, only_scope text, only_documents uuid[], depth integer)
returns table (access_id bigint, chunk_id uuid, keyword_score double precision, keyword_share double precision)
language sql
stable
security definer
set search_path = rag, pg_temp
set plan_cache_mode = force_custom_plan
-- The planner guesses ten classes, which may be all there are, and would read everybody's chunks.
set enable_seqscan = off
begin atomic
    with scope as materialized (
        select me.tenant_id, narrowed_access_ids(only_scope) as access_ids
        from my_principal() as me
    ),

    -- Each language of the caller's chunks is a collection of its own: a question has other lexemes there.
    collection as materialized (
        select
            chunk.language,
            count(*) as chunks,
            greatest(avg(chunk.lexeme_count), 1) as mean_length
        from scope
        join rag_chunks as chunk
            on chunk.tenant_id = scope.tenant_id
            and chunk.access_id = any(scope.access_ids)
        group by chunk.language
    ),

    -- 64 distinct lexemes are more than a question has; a pasted page is cut to its first ones.
    term as materialized (
        select
            collection.language,
            entry.lexeme,
            lexeme_query(entry.lexeme) as query,
            entry.weight
        from collection
        cross join lateral (
            select
                word.lexeme,
                cardinality(word.positions) as weight
            from unnest(to_tsvector(text_search_config(collection.language), question)) as word
            order by word.positions[1], word.lexeme
            limit 64
        ) as entry
    ),

    any_term as materialized (
        select
            term.language,
            cast(string_agg(cast(term.query as text), ' | ') as tsquery) as query
        from term
        group by term.language
    ),

    -- Read once, whatever the number of terms.
    matched as materialized (
        select chunk.access_id, chunk.id, chunk.document_id, chunk.lexeme_count, chunk.language, chunk.tsv
        from scope
        join rag_chunks as chunk
            on chunk.tenant_id = scope.tenant_id
            and chunk.access_id = any(scope.access_ids)
        join any_term
            on any_term.language is not distinct from chunk.language
            and chunk.tsv @@ any_term.query
    ),

    -- With all four weights at 1, ts_rank_cd of a single lexeme is the number of its occurrences.
    posting as materialized (
        select
            matched.access_id,
            matched.id,
            matched.document_id,
            matched.lexeme_count,
            term.language,
            term.lexeme,
            term.weight,
            ts_rank_cd('{1, 1, 1, 1}', matched.tsv, term.query) as occurrences
        from matched
        join term
            on term.language is not distinct from matched.language
            and matched.tsv @@ term.query
    ),

    -- Robertson and Zaragoza 2009, with the idf of Lucene, which is never negative.
    weighted_term as materialized (
        select
            term.language,
            term.lexeme,
            term.weight * ln(
                1 + (collection.chunks - coalesce(frequency.chunks, 0) + 0.5) / (coalesce(frequency.chunks, 0) + 0.5)
            ) as weight
        from term
        join collection on collection.language is not distinct from term.language
        left join (
            select posting.language, posting.lexeme, count(*) as chunks
            from posting
            group by posting.language, posting.lexeme
        ) as frequency
            on frequency.language is not distinct from term.language
            and frequency.lexeme = term.lexeme
    ),

    -- k1 = 1.2 and b = 0.75: the usual values, Manning, Raghavan and Schütze 2008, section 11.4.3.
    scored as (
        select
            posting.access_id,
            posting.id,
            posting.language,
            sum(
                weighted_term.weight * posting.occurrences * (1.2 + 1)
                / (posting.occurrences + 1.2 * (1 - 0.75 + 0.75 * posting.lexeme_count / collection.mean_length))
            ) as score
        from posting
        join weighted_term
            on weighted_term.language is not distinct from posting.language
            and weighted_term.lexeme = posting.lexeme
        join collection on collection.language is not distinct from posting.language
        where only_documents is null or posting.document_id = any(only_documents)
        group by posting.access_id, posting.id, posting.language
    )

    select
        scored.access_id,
        scored.id,
        cast(scored.score as double precision),
        cast(scored.score / ceiling.score as double precision)
    from scored
    join (
        select weighted_term.language, sum(weighted_term.weight) * (1.2 + 1) as score
        from weighted_term
        group by weighted_term.language
    ) as ceiling on ceiling.language is not distinct from scored.language
    order by scored.score desc, scored.id
    limit depth;
end;

comment on function keyword_candidates(text, text, uuid[], integer) is 'The depth best chunks by BM25 among those that the principal may read, best first; keyword_share is the score as a fraction of the most that any chunk could reach. Takes its access classes from the principal alone';

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
    include_dropped boolean default false
)
returns table (
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
)
language plpgsql
stable
set search_path = rag, pg_temp
set plan_cache_mode = force_custom_plan
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
    tenant constant text := my_tenant_id();
    access_ids constant bigint[] := narrowed_access_ids(search.scope);
    -- Chunks that each arm nominates. The scores of both arms are computed for all of them, so an
    -- arm need not reach deep: 20 to 50 are enough.
    arm_depth constant integer := greatest(50, 3 * search.top_k);
    -- The keyword function ranks its matches anyway; the further ones give the vector arm's
    -- nominees their BM25 score.
    keyword_depth constant integer := 1000;
    -- Reciprocal rank: Cormack, Clarke and Büttcher 2009. Their k of 60 with equal weights gave
    -- .720 nDCG@10 in the mean of 17 collections, 10 with keywords weighted 1.5 gave .791.
    rrf_k constant double precision := 10;
    keyword_weight constant double precision := 1.5;
    vector_weight constant double precision := 1.0;
begin
    if (search.embedding is null) <> (search.embedding_model is null) then
        raise exception 'embedding and embedding_model come together or not at all'
            using errcode = 'invalid_parameter_value';
    end if;
    if search.top_k not between 1 and 1000 then
        raise exception 'top_k must be from 1 to 1000' using errcode = 'invalid_parameter_value';
    end if;
    if (search.scope = 'documents') is true and search.document_ids is null then
        raise exception 'scope documents needs document_ids' using errcode = 'invalid_parameter_value';
    end if;

    return query
    with recursive measured as materialized (
        select
            chunk.access_id,
            chunk.id,
            case
                when chunk.embedding_model = search.embedding_model then chunk.embedding <=> search.embedding
            end as distance
        from rag_chunks as chunk
        where search.embedding is not null
            and chunk.tenant_id = tenant
            and chunk.access_id = any(access_ids)
            and (search.document_ids is null or chunk.document_id = any(search.document_ids))
    ),

    -- Vectors of another model are never compared; the caller is told that some or all were passed over.
    arms as materialized (
        select case
            when count(measured.distance) = 0 then 'keyword'
            when count(measured.distance) < count(*) then 'partial'
            else 'hybrid'
        end as mode
        from measured
    ),

    nearest as materialized (
        select measured.access_id, measured.id
        from measured
        where measured.distance is not null
        order by measured.distance, measured.id
        limit arm_depth
    ),

    matching as materialized (
        select
            candidate.access_id,
            candidate.chunk_id,
            candidate.keyword_score,
            candidate.keyword_share,
            row_number() over (order by candidate.keyword_score desc, candidate.chunk_id) <= arm_depth as nominated
        from keyword_candidates(search.question, search.scope, search.document_ids, keyword_depth) as candidate
    ),

    nominee as (
        select nearest.access_id, nearest.id from nearest
        union
        select matching.access_id, matching.chunk_id from matching where matching.nominated
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
            coalesce(matching.keyword_score, 0) as keyword_score,
            coalesce(matching.keyword_share, 0) as keyword_share,
            case
                when chunk.embedding_model = search.embedding_model
                    then 1 - (chunk.embedding <=> search.embedding)
            end as cosine,
            coalesce(matching.nominated, false) as by_keyword,
            nearest.id is not null as by_vector
        from nominee
        join rag_chunks as chunk
            on chunk.tenant_id = tenant
            and chunk.access_id = nominee.access_id
            and chunk.id = nominee.id
        join rag_documents as document
            on document.tenant_id = tenant
            and document.access_id = chunk.access_id
            and document.id = chunk.document_id
        left join matching on matching.access_id = nominee.access_id and matching.chunk_id = nominee.id
        left join nearest on nearest.access_id = nominee.access_id and nearest.id = nominee.id
    ),

    -- Ranks over the completed union. Equal scores share a rank, so chunks without any word of the
    -- question come after all that have one, and none of them is preferred.
    ranked as (
        select
            candidate.*,
            rank() over (order by candidate.keyword_score desc) as keyword_rank,
            rank() over (order by candidate.cosine desc nulls last) as vector_rank
        from candidate
    ),

    fused as (
        select
            ranked.*,
            keyword_weight / (rrf_k + ranked.keyword_rank)
            + case when arms.mode = 'keyword' then 0 else vector_weight / (rrf_k + ranked.vector_rank) end as score
        from ranked
        cross join arms
    ),

    ordered as materialized (
        select
            fused.*,
            row_number() over (
                order by fused.score desc, fused.cosine desc nulls last, fused.document_id, fused.chunk_index
            ) as place
        from fused
        where search.min_similarity is null
            or fused.cosine is null
            or fused.cosine >= search.min_similarity
    ),

    -- Near-duplicates among the first few. Which of two goes is a matter of trust, then of age, then
    -- of rank: a verified or older source is never dropped for an unverified or newer one.
    worded as materialized (
        select
            ordered.place,
            row_number() over (order by ordered.verified desc, ordered.dated, ordered.place) as precedence,
            array(
                select distinct word
                from regexp_split_to_table(lower(ordered.chunk_text), '\s+') as word
                where word <> ''
            ) as words
        from ordered
        where ordered.place <= search.duplicate_candidates
    ),

    -- Sets whose sizes differ too much cannot be that similar, which spares most comparisons.
    twin as materialized (
        select keeper.precedence as keeper, other.precedence as other
        from worded as keeper
        join worded as other
            on other.precedence > keeper.precedence
            and least(cardinality(keeper.words), cardinality(other.words))
            > search.duplicate_threshold * greatest(cardinality(keeper.words), cardinality(other.words))
        cross join lateral (
            select count(*) as shared
            from unnest(keeper.words) as word
            where word = any(other.words)
        ) as overlap
        where overlap.shared > search.duplicate_threshold * (
            cardinality(keeper.words) + cardinality(other.words) - overlap.shared
        )
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
        where judged.precedence < (select count(*) from worded)
    ),

    duplicate as materialized (
        select dropped.place, keeper.place as keeper_place
        from judged
        join worded as dropped on dropped.precedence = judged.precedence
        join worded as keeper on keeper.precedence = judged.duplicate_of
    ),

    capped as (
        select
            ordered.place,
            row_number() over (
                partition by ordered.access_id, ordered.document_id
                order by ordered.place
            ) as place_in_document
        from ordered
        where not exists (select 1 from duplicate where duplicate.place = ordered.place)
    ),

    listed as materialized (
        select
            capped.place,
            row_number() over (order by capped.place) as position,
            ordered.token_count
        from capped
        join ordered on ordered.place = capped.place
        where capped.place_in_document <= search.max_per_document
        order by capped.place
        limit search.top_k
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
            select search.budget_tokens is null
                or budgeted.tokens_total + listed.token_count <= search.budget_tokens as fits
        ) as fit
    ),

    verdict as (
        select
            fused.id,
            fused.access_id,
            case when budgeted.fits then budgeted.taken end as rank,
            case when budgeted.fits then budgeted.tokens_total end as tokens_total,
            case
                when ordered.place is null then 'below_min_similarity'
                when duplicate.place is not null then 'duplicate'
                when listed.place is null and capped.place_in_document > search.max_per_document then 'per_document_cap'
                when listed.place is null then 'beyond_top_k'
                when not budgeted.fits then 'over_budget'
                when fused.by_keyword and fused.by_vector then 'keyword_and_vector'
                when fused.by_vector then 'vector'
                else 'keyword'
            end as reason,
            keeper.document_id || ':' || keeper.chunk_index as duplicate_of,
            ordered.place
        from fused
        left join ordered on ordered.access_id = fused.access_id and ordered.id = fused.id
        left join duplicate on duplicate.place = ordered.place
        left join ordered as keeper on keeper.place = duplicate.keeper_place
        left join capped on capped.place = ordered.place
        left join listed on listed.place = ordered.place
        left join budgeted on budgeted.position = listed.position
    )

    select
        verdict.rank,
        fused.document_id,
        fused.chunk_index,
        fused.id,
        fused.title,
        fused.source_type,
        fused.source_uri,
        fused.section,
        fused.page_number,
        fused.language,
        fused.document_scope,
        fused.tags,
        fused.verified,
        fused.metadata,
        fused.content_updated_at,
        fused.chunk_text,
        fused.score,
        case when fused.keyword_score > 0 then cast(fused.keyword_rank as integer) end,
        fused.keyword_score,
        fused.keyword_share,
        case when fused.cosine is not null then cast(fused.vector_rank as integer) end,
        fused.cosine,
        fused.token_count,
        verdict.tokens_total,
        verdict.reason,
        verdict.duplicate_of,
        arms.mode,
        'exact'
    from verdict
    join fused on fused.access_id = verdict.access_id and fused.id = verdict.id
    cross join arms
    where verdict.rank is not null or search.include_dropped
    order by verdict.rank nulls last, verdict.place nulls last, fused.score desc, fused.id;
end
$$;

comment on function search(text, halfvec, text, integer, text, uuid[], double precision, integer, integer, double precision, integer, boolean) is 'The chunks that answer a question best, among those that the principal may read, best first. Full text (BM25) and cosine, fused by reciprocal rank; then minimum cosine, near-duplicates (Jaccard of words), chunks per document, top_k, token budget. embedding and embedding_model may be left out: keywords alone. include_dropped adds the candidates that did not make it, without rank, reason saying why. mode: hybrid, partial (some chunks have vectors of another model, which are not compared) or keyword';
-- Views for people. They run with the rights of whoever queries them, under that role's policies.

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
from rag_documents as document;

comment on view v_documents is 'One row for each document that the reader may see, without its text';

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
from rag_chunks as chunk
join rag_documents as document
    on document.tenant_id = chunk.tenant_id
    and document.access_id = chunk.access_id
    and document.id = chunk.document_id;

comment on view v_chunks is 'One row for each chunk that the reader may see, with the scope, owner and tags of its document';
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
