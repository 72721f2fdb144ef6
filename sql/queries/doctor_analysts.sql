-- Admitted analysts whose login does not let them, or lets them too much, with the SQL that mends it; as rag_operator.
with admitted as (
    select
        analyst.tenant_id,
        analyst.role_name,
        role.oid as role,
        row_number() over (
            partition by analyst.role_name
            order by analyst.created_at, analyst.tenant_id
        ) as place
    from rag.rag_analysts as analyst
    left join pg_roles as role on role.rolname = analyst.role_name
)

select
    admitted.role_name as name,
    problem.message,
    problem.mend
from admitted
cross join lateral (
    select
        format('is admitted to tenant %%s, and there is no such login', admitted.tenant_id) as message,
        format(
            'delete from rag.rag_analysts where tenant_id = %%L and role_name = %%L;', admitted.tenant_id, admitted.role_name
        ) as mend
    where admitted.role is null
    union all
    select
        format('is admitted to tenant %%s besides another one, and so sees nothing', admitted.tenant_id),
        format(
            'delete from rag.rag_analysts where tenant_id = %%L and role_name = %%L;', admitted.tenant_id, admitted.role_name
        )
    where admitted.place > 1
    union all
    select
        format('is admitted to tenant %%s, and may not query the views', admitted.tenant_id),
        format('grant rag_analyst to %%I with inherit true, set false;', admitted.role_name)
    where admitted.role is not null
        and not pg_has_role(admitted.role, to_regrole('rag_analyst'), 'usage')
    union all
    select
        format('has no %%s of its own in this database', setting.name),
        format(
            'alter role %%I in database %%I set %%s = %%s;',
            admitted.role_name, current_database(), setting.name, setting.value
        )
    from (values
        ('search_path', 'rag, pg_temp'), ('statement_timeout', '''30s'''), ('default_transaction_read_only', 'on')
    ) as setting (name, value)
    where admitted.role is not null
        and admitted.place = 1
        and not exists (
            select
            from pg_db_role_setting as preset
            cross join lateral unnest(preset.setconfig) as entry
            where preset.setrole = admitted.role
                and preset.setdatabase in (
                    0, (select base.oid from pg_database as base where base.datname = current_database())
                )
                and starts_with(entry, setting.name || '=')
        )
) as problem
order by admitted.role_name, problem.message
