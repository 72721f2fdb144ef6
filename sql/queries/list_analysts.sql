-- Who may query the views, and whether their login lets them, by tenant and name; as rag_operator.
-- tenant_id: text or null for all
with listed as (
    select
        analyst.tenant_id,
        analyst.role_name,
        analyst.tags,
        analyst.projects,
        analyst.user_scope,
        analyst.created_at,
        count(*) over (partition by analyst.role_name) as tenants
    from rag.rag_analysts as analyst
)

select
    analyst.tenant_id,
    analyst.role_name,
    case
        when role.oid is null then 'no such role'
        when not pg_has_role(role.oid, to_regrole('rag_analyst'), 'usage') then 'not in rag_analyst'
        when analyst.tenants > 1 then 'in several tenants'
        else 'admitted'
    end as state,
    analyst.tags,
    analyst.projects,
    analyst.user_scope,
    analyst.created_at
from listed as analyst
left join pg_roles as role on role.rolname = analyst.role_name
where cast(%(tenant_id)s as text) is null
    or analyst.tenant_id = %(tenant_id)s
order by analyst.tenant_id, analyst.role_name
