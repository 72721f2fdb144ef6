-- The statements that a login role still lacks to be an analyst, in order; `shown` is what may be printed of them.
-- As rag_operator, who runs those that need no administrator.
-- role_name, tenant_id, user_scope: text; tags, projects: text[]; verifier: text or null for no password
with wanted as (
    select
        cast(%(role_name)s as text) as role_name,
        cast(%(tenant_id)s as text) as tenant_id,
        cast(%(tags)s as text[]) as tags,
        cast(%(projects)s as text[]) as projects,
        cast(%(user_scope)s as text) as user_scope,
        cast(%(verifier)s as text) as verifier,
        to_regrole(quote_ident(%(role_name)s)) as role
),

present as (
    select setting.setconfig as settings
    from wanted
    join pg_db_role_setting as setting on setting.setrole = wanted.role
    join pg_database as database
        on database.oid = setting.setdatabase
        and database.datname = current_database()
),

needed as (
    select
        1 as place,
        true as by_administrator,
        format('create role %%I login noinherit', wanted.role_name)
            || coalesce(format(' password %%L', wanted.verifier), '') as statement,
        format('create role %%I login noinherit', wanted.role_name)
            || case when wanted.verifier is not null then ' password ''…''' else '' end as shown
    from wanted
    where wanted.role is null
    union all
    select 2, true, granted.statement, granted.statement
    from wanted
    cross join lateral (
        select format('grant rag_analyst to %%I with inherit true, set false', wanted.role_name) as statement
    ) as granted
    where not exists (
        select
        from pg_auth_members as membership
        where membership.roleid = to_regrole('rag_analyst')
            and membership.member = wanted.role
            and membership.inherit_option
            and not membership.set_option
    )
    union all
    select 3 + setting.place, true, setting.statement, setting.statement
    from wanted
    cross join lateral (
        select
            listed.place,
            listed.name || '=' || listed.value as entry,
            format(
                'alter role %%I in database %%I set %%s = %%s',
                wanted.role_name, current_database(), listed.name, listed.literal
            ) as statement
        from (values
            (0, 'search_path', 'rag, pg_temp', 'rag, pg_temp'),
            (1, 'statement_timeout', '30s', '''30s'''),
            (2, 'default_transaction_read_only', 'on', 'on')
        ) as listed (place, name, value, literal)
    ) as setting
    where not exists (
        select
        from present
        where setting.entry = any(present.settings)
    )
    union all
    select 9, false, admission.statement, admission.statement
    from wanted
    cross join lateral (
        select format(
            'insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)'
            || ' values (%%L, %%L, %%L, %%L, %%L)'
            || ' on conflict (tenant_id, role_name) do update'
            || ' set tags = excluded.tags, projects = excluded.projects, user_scope = excluded.user_scope',
            wanted.tenant_id, wanted.role_name, wanted.tags, wanted.projects, wanted.user_scope
        ) as statement
    ) as admission
    where not exists (
        select
        from rag.rag_analysts as analyst
        where analyst.tenant_id = wanted.tenant_id
            and analyst.role_name = wanted.role_name
            and analyst.tags = wanted.tags
            and analyst.projects = wanted.projects
            and analyst.user_scope = wanted.user_scope
    )
)

select
    needed.by_administrator,
    needed.place = 1 as makes_login,
    needed.statement,
    needed.shown
from needed
order by needed.place
