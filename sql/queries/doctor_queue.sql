-- Where schema jobs is not as the migrations made it: who owns what, who has a right, where functions look.
-- object, severity: of what and how bad; message: what is wrong; mend: SQL that makes it right, null for what is gone
with member as (
    select
        cast('table' as text) as kind, relation.relname as name, relation.relowner as owner, relation.relacl as rights,
        cast('rag_owner' as text) as wanted, cast(relation.oid as regclass)::text as signature,
        case relation.relkind when 'S' then 'sequence' else 'table' end as noun,
        cast(null as text) as path
    from pg_catalog.pg_class as relation
    where relation.relnamespace = to_regnamespace('jobs') and relation.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
    union all
    select
        'function', process.proname, process.proowner, coalesce(process.proacl, acldefault('f', process.proowner)),
        'rag_queue', cast(process.oid as regprocedure)::text, 'function',
        case when process.prosecdef then array_to_string(process.proconfig, '; ') end
    from pg_catalog.pg_proc as process
    where process.pronamespace = to_regnamespace('jobs')
    union all
    select
        'schema', namespace.nspname, namespace.nspowner, namespace.nspacl, 'rag_owner', quote_ident(namespace.nspname),
        'schema', null
    from pg_catalog.pg_namespace as namespace
    where namespace.nspname = 'jobs'
),

-- What a worker's library calls by itself.
called (name) as (
    values
    ('procrastinate_fetch_job_v2'), ('procrastinate_finish_job_v1'), ('procrastinate_retry_job_v2'),
    ('procrastinate_register_worker_v1'), ('procrastinate_unregister_worker_v1'),
    ('procrastinate_update_heartbeat_v1'), ('procrastinate_prune_stalled_workers_v1')
),

granted as (
    select
        member.kind,
        member.name,
        member.signature,
        member.noun,
        entry.privilege_type,
        case when entry.grantee = 0 then 'public' else quote_ident(pg_get_userbyid(entry.grantee)) end as grantee
    from member
    cross join lateral aclexplode(member.rights) as entry
    where entry.grantee <> member.owner
)

select
    member.noun || ' ' || member.signature as object,
    'error' as severity,
    'belongs to ' || pg_get_userbyid(member.owner) || ' and not to ' || member.wanted as message,
    format('alter %%s %%s owner to %%s;', member.noun, member.signature, member.wanted) as mend
from member
where pg_get_userbyid(member.owner) <> member.wanted
union all
select
    granted.noun || ' ' || granted.signature,
    'error',
    lower(granted.privilege_type) || ' is granted to ' || granted.grantee,
    format('revoke %%s on %%s %%s from %%s;', granted.privilege_type, granted.noun, granted.signature, granted.grantee)
from granted
where not (
    (granted.kind = 'table' and granted.grantee = 'rag_queue')
    or (granted.kind = 'schema' and granted.privilege_type = 'USAGE' and granted.grantee in ('rag_queue', 'rag_worker'))
    or (granted.kind = 'function' and granted.grantee in ('rag_owner', 'rag_queue'))
    or (
        granted.kind = 'function' and granted.grantee = 'rag_worker'
        and granted.name in (select called.name from called)
    )
)
union all
select
    'function ' || member.signature,
    'error',
    'does not run as its owner, or not with the search_path jobs, pg_temp',
    format('alter function %%s security definer set search_path = jobs, pg_temp;', member.signature)
from member
where member.kind = 'function' and member.path is distinct from 'search_path=jobs, pg_temp'
union all
select
    'function jobs.' || called.name,
    'error',
    case when member.name is null then 'is missing: workers do nothing' else 'is not rag_worker''s to call' end,
    'grant execute on function ' || member.signature || ' to rag_worker;'
from called
left join member on member.kind = 'function' and member.name = called.name
where not exists (
    select
    from granted
    where granted.signature = member.signature and granted.grantee = 'rag_worker'
)
union all
select
    'schema jobs',
    'error',
    'is not open to ' || login.name || ': no job is done',
    format('grant usage on schema jobs to %%s;', login.name)
from (values ('rag_queue'), ('rag_worker')) as login (name)
where to_regnamespace('jobs') is not null
    and not exists (
        select
        from granted
        where granted.kind = 'schema' and granted.grantee = login.name and granted.privilege_type = 'USAGE'
    )
order by object, message
