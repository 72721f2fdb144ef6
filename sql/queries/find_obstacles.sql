-- What forbids a login role to be an analyst of a tenant, one row each; none for a role that is not there.
-- role_name, tenant_id: text; as rag_operator
select obstacle.reason
from pg_roles as role
cross join lateral (
    select 'is a superuser' as reason
    where role.rolsuper
    union all
    select 'bypasses row security'
    where role.rolbypassrls
    union all
    select 'may create roles'
    where role.rolcreaterole
    union all
    select 'may create databases'
    where role.rolcreatedb
    union all
    select 'may replicate'
    where role.rolreplication
    union all
    select 'cannot log in'
    where not role.rolcanlogin
    union all
    -- A superuser is a member of every role, and has been named.
    select 'belongs to ' || granted.rolname
    from pg_roles as granted
    where granted.oid <> role.oid
        and granted.rolname not in ('rag_analyst', 'pg_database_owner')
        and pg_has_role(role.oid, granted.oid, 'member')
        and not role.rolsuper
        and (
            granted.rolname ~ '^(rag|pg)_'
            or granted.rolsuper or granted.rolbypassrls or granted.rolcreaterole or granted.rolreplication
        )
    union all
    select 'owns this database'
    from pg_database as database
    where database.datname = current_database()
        and database.datdba = role.oid
    union all
    select 'owns ' || relation.relname
    from pg_class as relation
    where relation.relnamespace = to_regnamespace('rag')
        and relation.relowner = role.oid
    union all
    select 'is an analyst of ' || analyst.tenant_id || ', and in two tenants would see nothing'
    from rag.rag_analysts as analyst
    where analyst.role_name = role.rolname
        and not analyst.tenant_id = %(tenant_id)s
) as obstacle
where role.rolname = %(role_name)s
order by obstacle.reason
