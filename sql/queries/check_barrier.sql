-- What the start-up check needs to know about this connection and this database, one row.
select
    current_setting('server_version_num')::integer as server_version,
    login.rolname as role_name,
    login.rolsuper or login.rolbypassrls or login.rolcreaterole or login.rolreplication as is_powerful,
    exists (
        select 1
        from pg_roles as powerful
        where pg_has_role(login.oid, powerful.oid, 'member')
            and powerful.oid <> login.oid
            and (powerful.rolsuper or powerful.rolbypassrls or powerful.rolname in (
                'rag_owner', 'rag_search', 'rag_principal', 'rag_steward', 'rag_embedder', 'rag_queue'
            ))
    ) as may_become_powerful,
    (
        select coalesce(array_agg(relation.relname order by relation.relname), '{}')
        from pg_class as relation
        where relation.relnamespace = to_regnamespace('rag')
            and relation.relkind in ('r', 'p')
            and relation.relname like 'rag\_%%'
            and not (relation.relrowsecurity and relation.relforcerowsecurity)
    ) as unprotected_tables,
    (
        select coalesce(array_agg(relation.relname order by relation.relname), '{}')
        from pg_class as relation
        where relation.relnamespace = to_regnamespace('rag')
            and relation.relowner = login.oid
    ) as owned_tables,
    (
        select attribute.atttypmod
        from pg_attribute as attribute
        where attribute.attrelid = to_regclass('rag.rag_chunks')
            and attribute.attname = 'embedding'
    ) as embedding_dimensions,
    (select extension.extversion from pg_extension as extension where extension.extname = 'vector') as pgvector_version,
    (
        select coalesce(array_agg(setting.name order by setting.name), '{}')
        from (values ('app.tenant_id'), ('app.user_id'), ('app.project_id'), ('app.tags'), ('app.signature')) as setting (name)
        where coalesce(current_setting(setting.name, true), '') <> ''
    ) as default_identity,
    current_setting('row_security') as row_security,
    (
        select format('%%s since %%s', base.oid, pg_postmaster_start_time())
        from pg_database as base
        where base.datname = current_database()
    ) as database_id,
    cast(extract(epoch from clock_timestamp()) as double precision) as seconds
from pg_roles as login
where login.rolname = session_user
