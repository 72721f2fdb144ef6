-- Everything that a superuser ever does for Palisade: the extension, the roles, the schema.
-- Run once per database, by a superuser, before the first `rag migrate`, and again after a restore: rights
-- on the database itself are in no dump. Running it again sets the same once more.
--
--   psql -v ON_ERROR_STOP=1 -1 -d palisade -f sql/bootstrap.sql
--
-- Login roles get no password here. Give them one (`alter role rag_app password '…'`), or a certificate,
-- the way the rest of your cluster does it.

-- Roles are shared by all databases of a cluster. None is a superuser or bypasses row security.
-- Another database may be making them at this moment, which shows only when its transaction ends.
do $$
declare
    made record;
begin
    for made in
        select *
        from (values
            ('rag_owner', 'nologin'),
            ('rag_search', 'nologin'),
            ('rag_principal', 'nologin'),
            ('rag_steward', 'nologin'),
            ('rag_embedder', 'nologin'),
            ('rag_queue', 'nologin'),
            ('rag_analyst', 'nologin'),
            ('rag_migrator', 'login'),
            ('rag_app', 'login'),
            ('rag_publisher', 'login'),
            ('rag_worker', 'login'),
            ('rag_operator', 'login')
        ) as role (role_name, may_login)
        where to_regrole(role.role_name) is null
    loop
        begin
            execute format('create role %I %s noinherit', made.role_name, made.may_login);
        exception
            when duplicate_object or unique_violation then null;
        end;
    end loop;
end
$$;

-- Roles that were there before are not taken on trust.
do $$
declare
    unfit text;
begin
    select string_agg(role.rolname, ', ' order by role.rolname) into unfit
    from pg_roles as role
    where role.rolname in (
        'rag_owner', 'rag_search', 'rag_principal', 'rag_steward', 'rag_embedder', 'rag_queue', 'rag_analyst',
        'rag_migrator', 'rag_app', 'rag_publisher', 'rag_worker', 'rag_operator'
    )
        and (role.rolsuper or role.rolbypassrls or role.rolcreaterole or role.rolcreatedb or role.rolreplication);
    if unfit is not null then
        raise exception 'these roles have rights that no role of Palisade may have: %', unfit
            using hint = 'alter role … nosuperuser nobypassrls nocreaterole nocreatedb noreplication;';
    end if;
    -- On a managed server the administrator is no superuser, and must belong to a role to act for it.
    if not (select rolsuper from pg_roles where rolname = current_user) then
        execute format('grant rag_owner to %I with inherit true, set true', current_user);
    end if;
end
$$;

comment on role rag_owner is 'Palisade: owns schema rag and all tables; nobody logs in as it';
comment on role rag_search is 'Palisade: owns the definer functions on the query path; nobody logs in as it';
comment on role rag_principal is 'Palisade: owns the functions that read for a principal, bound by the same policies; nobody logs in as it';
comment on role rag_steward is 'Palisade: owns the functions of rag_operator; sees keys of rows, no text; nobody logs in as it';
comment on role rag_embedder is 'Palisade: owns the functions that fill a second embedding model; reads texts while there is one; nobody logs in as it';
comment on role rag_queue is 'Palisade: owns the functions of workers and of the queue; sees jobs, no document; nobody logs in as it';
comment on role rag_analyst is 'Palisade: group of people who query the views with their own login';
comment on role rag_migrator is 'Palisade: runs the migrations, by becoming rag_owner';
comment on role rag_app is 'Palisade: the service; queries and ingestion';
comment on role rag_publisher is 'Palisade: the service; the only role that may write scope public';
comment on role rag_worker is 'Palisade: workers; what a job asks for, as the principal who asked';
comment on role rag_operator is 'Palisade: people who maintain, erase and audit; never in the service';

-- Membership without inheritance: rights are taken on by an explicit `set role`, never by accident.
grant rag_owner to rag_migrator with inherit false, set true;
grant rag_search, rag_principal, rag_steward, rag_embedder, rag_queue to rag_owner with inherit false, set true;

-- pg_temp last, so that nobody's temporary object shadows ours.
alter role rag_owner set search_path = rag, pg_temp;
alter role rag_search set search_path = rag, pg_temp;
alter role rag_principal set search_path = rag, pg_temp;
alter role rag_steward set search_path = rag, pg_temp;
alter role rag_embedder set search_path = rag, pg_temp;
alter role rag_queue set search_path = rag, pg_temp;
alter role rag_migrator set search_path = rag, pg_temp;
alter role rag_app set search_path = rag, pg_temp;
alter role rag_publisher set search_path = rag, pg_temp;
-- A worker's library calls the functions of the queue by their names alone.
alter role rag_worker set search_path = rag, jobs, pg_temp;
alter role rag_operator set search_path = rag, pg_temp;

-- Defaults held by the server, so that no client forgets them (it may still set its own). A query takes milliseconds, an ingest
-- transaction of a large document seconds; a transaction that idles holds a connection of the pool.
alter role rag_app set statement_timeout = '30s';
alter role rag_app set lock_timeout = '10s';
alter role rag_app set idle_in_transaction_session_timeout = '30s';
alter role rag_publisher set statement_timeout = '30s';
alter role rag_publisher set lock_timeout = '10s';
alter role rag_publisher set idle_in_transaction_session_timeout = '30s';
alter role rag_worker set statement_timeout = '30s';
alter role rag_worker set lock_timeout = '10s';
alter role rag_worker set idle_in_transaction_session_timeout = '30s';

create schema if not exists rag authorization rag_owner;
do $$
begin
    if (select nspowner from pg_namespace where nspname = 'rag') <> to_regrole('rag_owner') then
        raise exception 'schema rag belongs to somebody else than rag_owner'
            using hint = 'Look at what is in it; then: alter schema rag owner to rag_owner;';
    end if;
end
$$;
comment on schema rag is 'Palisade: documents, chunks and who may retrieve them';

-- The queue of jobs.
create schema if not exists jobs authorization rag_owner;
do $$
begin
    if (select nspowner from pg_namespace where nspname = 'jobs') <> to_regrole('rag_owner') then
        raise exception 'schema jobs belongs to somebody else than rag_owner'
            using hint = 'Palisade needs it for its queue: rename yours, or use a database of its own.';
    end if;
end
$$;
comment on schema jobs is 'Palisade: the queue of jobs, which is procrastinate''s; ids only';

create extension if not exists vector with schema rag;

-- The search path of every role is schema rag alone, so pgvector has to be there.
do $$
declare
    found_in text := (
        select namespace.nspname
        from pg_extension as extension
        join pg_namespace as namespace on namespace.oid = extension.extnamespace
        where extension.extname = 'vector'
    );
begin
    if found_in is distinct from 'rag' then
        raise exception 'extension vector is in schema %, and Palisade needs it in schema rag', coalesce(found_in, '(none)')
            using hint = 'Run: alter extension vector set schema rag;  or use a database of its own.';
    end if;
end
$$;

revoke all on schema rag from public;
grant usage on schema rag
to rag_search, rag_principal, rag_steward, rag_embedder, rag_queue, rag_migrator, rag_app, rag_publisher, rag_worker,
rag_operator, rag_analyst;
revoke all on schema jobs from public;
grant usage on schema jobs to rag_queue, rag_worker;

-- Functions are executable by everyone unless this says otherwise; it cannot be said per schema.
alter default privileges for role rag_owner revoke execute on functions from public;

-- No temporary objects, no objects in schema public, no connections of other roles.
do $$
begin
    execute format('revoke all on database %I from public', current_database());
    execute format(
        'grant connect on database %I to rag_migrator, rag_app, rag_publisher, rag_worker, rag_operator, rag_analyst',
        current_database()
    );
    if to_regnamespace('public') is not null then
        revoke create on schema public from public;
    end if;
end
$$;
