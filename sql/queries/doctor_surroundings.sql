-- What around schema rag decides whether its barrier holds: roles, memberships, settings, rights on the database,
-- and whatever else in the database reads our tables; rows as in doctor_schema, and to be asked the same way.
-- name of the database in make: {database}, so that all deployments have the same
with ours as materialized (
    select role.oid, role.rolname
    from pg_roles as role
    where role.rolname in (
        'rag_owner', 'rag_search', 'rag_principal', 'rag_steward', 'rag_embedder', 'rag_queue', 'rag_analyst',
        'rag_migrator', 'rag_app', 'rag_publisher', 'rag_worker', 'rag_operator'
    )
),

-- People: whoever may query the views.
analyst as materialized (
    select distinct member.oid, member.rolname
    from pg_auth_members as membership
    join pg_roles as member on member.oid = membership.member
    where membership.roleid in (select ours.oid from ours where ours.rolname = 'rag_analyst')
        and membership.member not in (select ours.oid from ours)
        and not member.rolsuper
        and not member.rolcreaterole
),

relation as materialized (
    select class.oid, class.relname
    from pg_class as class
    where class.relnamespace = to_regnamespace('rag')
        and class.relkind in ('r', 'p', 'v', 'm')
),

fact as (
    select
        'role' as kind,
        cast(role.rolname as text) as name,
        concat_ws(' ', case when role.rolcanlogin then 'login' else 'nologin' end, powers.held) as state,
        format(
            'alter role %%I nosuperuser nobypassrls nocreaterole nocreatedb noreplication %%s;',
            role.rolname, case when role.rolcanlogin then 'login' else 'nologin' end
        ) as make,
        cast(null as text) as unmake,
        'error' as severity,
        'it is ' || coalesce(powers.held || ', ', '')
        || case when role.rolcanlogin then 'a login' else 'not a login' end as remark
    from ours
    join pg_roles as role on role.oid = ours.oid
    cross join lateral (
        select nullif(
            concat_ws(
                ', ',
                case when role.rolsuper then 'superuser' end,
                case when role.rolbypassrls then 'bypassrls' end,
                case when role.rolcreaterole then 'createrole' end,
                case when role.rolcreatedb then 'createdb' end,
                case when role.rolreplication then 'replication' end
            ),
            ''
        ) as held
    ) as powers

    union all
    select
        'analyst',
        cast(role.rolname as text),
        'unfit',
        null,
        format('alter role %%I nosuperuser nobypassrls nocreaterole nocreatedb noreplication;', role.rolname),
        'error',
        'a member of rag_analyst who could switch row security off'
    from analyst
    join pg_roles as role on role.oid = analyst.oid
    where role.rolbypassrls
        or role.rolcreatedb
        or role.rolreplication

    -- An administrator of a managed server is no superuser and has to belong to a role to act for it; a superuser
    -- need not belong to anything. That people belong to rag_analyst is what it is there for.
    union all
    select
        'membership',
        format('of %%s in %%s', quote_ident(member.rolname), quote_ident(taken.rolname)),
        format(
            'inherit %%s, set %%s, admin %%s',
            cast(bool_or(membership.inherit_option) as text), cast(bool_or(membership.set_option) as text), cast(bool_or(membership.admin_option) as text)
        ),
        format(
            'grant %%I to %%I with inherit %%s, set %%s, admin %%s;',
            taken.rolname,
            member.rolname,
            cast(bool_or(membership.inherit_option) as text),
            cast(bool_or(membership.set_option) as text),
            cast(bool_or(membership.admin_option) as text)
        ),
        string_agg(
            format(
                'revoke %%I from %%I granted by %%I cascade;',
                taken.rolname, member.rolname, pg_get_userbyid(membership.grantor)
            ),
            chr(10)
        ),
        case
            when member.oid in (select ours.oid from ours union all select analyst.oid from analyst) then 'error'
            when member.rolcreaterole then 'note'
            else 'warning'
        end,
        case
            when member.rolcreaterole then 'as an administrator has to be'
            else 'it may act with the rights of that role'
        end
    from pg_auth_members as membership
    join pg_roles as member on member.oid = membership.member
    join pg_roles as taken on taken.oid = membership.roleid
    where (
        membership.member in (select ours.oid from ours)
        or membership.roleid in (select ours.oid from ours)
        or (
            membership.member in (select analyst.oid from analyst)
            and (
                taken.rolname ~ '^pg_'
                or taken.rolsuper or taken.rolbypassrls or taken.rolcreaterole or taken.rolreplication
            )
        )
    )
        and (taken.rolname <> 'rag_analyst' or member.oid in (select ours.oid from ours))
        and not (member.rolsuper and member.oid not in (select ours.oid from ours))
    group by member.oid, member.rolname, member.rolcreaterole, taken.oid, taken.rolname

    union all
    select
        'setting',
        concat(
            entry.name,
            ' of ',
            coalesce(quote_ident(role.rolname), 'every role'),
            case when preset.setdatabase <> 0 then ' in this database' end
        ),
        entry.value,
        case
            when preset.setdatabase = 0 and ours.oid is not null
                then format('alter role %%I set %%s = %%s;', role.rolname, entry.name, shape.written)
        end,
        case
            when preset.setrole = 0 and preset.setdatabase = 0 then format('alter role all reset %%s;', entry.name)
            when preset.setrole = 0 then format('alter database %%I reset %%s;', current_database(), entry.name)
            when preset.setdatabase = 0 then format('alter role %%I reset %%s;', role.rolname, entry.name)
            else format('alter role %%I in database %%I reset %%s;', role.rolname, current_database(), entry.name)
        end,
        case
            when entry.name like 'app.%%' or entry.name in ('row_security', 'session_replication_role', 'role') then 'error'
            when entry.name = 'search_path' then 'error'
            else 'note'
        end,
        case
            when entry.name like 'app.%%' then 'a default identity: whoever forgets to name one has this'
            else 'it is ' || entry.value
        end
    from pg_db_role_setting as preset
    cross join lateral (
        select split_part(setting, '=', 1) as name, substr(setting, strpos(setting, '=') + 1) as value
        from unnest(preset.setconfig) as setting
    ) as entry
    cross join lateral (
        select case when entry.name = 'search_path' then entry.value else quote_literal(entry.value) end as written
    ) as shape
    left join pg_roles as role on role.oid = preset.setrole
    left join ours on ours.oid = preset.setrole
    where preset.setdatabase in (0, (select base.oid from pg_database as base where base.datname = current_database()))
        and (
            ours.oid is not null
            or (
                (preset.setrole = 0 or preset.setrole in (select analyst.oid from analyst))
                and (entry.name like 'app.%%' or entry.name in ('row_security', 'session_replication_role', 'role'))
            )
        )

    union all
    select
        'right',
        format('%%s on the database to %%s', lower(privilege.privilege_type), receiver.name),
        case when privilege.is_grantable then 'may be passed on' else 'given' end,
        format('grant %%s on database {database} to %%s;', lower(privilege.privilege_type), receiver.name),
        format(
            'revoke %%s on database %%I from %%s cascade;', lower(privilege.privilege_type), current_database(), receiver.name
        ),
        'warning',
        case
            when lower(privilege.privilege_type) = 'connect' then 'only those who need it should reach the database'
            else 'objects of their own are how people shadow those of others'
        end
    from pg_database as base
    cross join lateral aclexplode(coalesce(base.datacl, acldefault('d', base.datdba))) as privilege
    cross join lateral (
        select case privilege.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(privilege.grantee)) end as name
    ) as receiver
    where base.datname = current_database()
        and privilege.grantee <> base.datdba
        and (
            privilege.grantee = 0
            or privilege.grantee in (select ours.oid from ours)
            or (privilege.grantee in (select analyst.oid from analyst) and privilege.privilege_type <> 'CONNECT')
        )

    union all
    select
        'right',
        format('create on schema public to %%s', receiver.name),
        'given',
        null,
        format('revoke create on schema public from %%s;', receiver.name),
        'warning',
        'objects of their own are how people shadow those of others'
    from pg_namespace as namespace
    cross join lateral aclexplode(coalesce(namespace.nspacl, acldefault('n', namespace.nspowner))) as privilege
    cross join lateral (
        select case privilege.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(privilege.grantee)) end as name
    ) as receiver
    where namespace.nspname = 'public'
        and privilege.privilege_type = 'CREATE'
        and privilege.grantee <> namespace.nspowner
        and (
            privilege.grantee = 0
            or privilege.grantee in (select ours.oid from ours union all select analyst.oid from analyst)
        )

    union all
    select
        'owner',
        'of the database',
        'unfit',
        null,
        format('alter database %%I owner to %%I;', base.datname, pg_get_userbyid(10)),
        'error',
        'it belongs to ' || pg_get_userbyid(base.datdba)
    from pg_database as base
    where base.datname = current_database()
        and base.datdba in (select ours.oid from ours union all select analyst.oid from analyst)

    union all
    select
        'publication',
        cast(published.pubname as text),
        'published',
        null,
        case
            when publication.puballtables then format('drop publication %%I;', published.pubname)
            when exists (
                select
                from pg_publication_namespace as whole
                where whole.pnpubid = publication.oid and whole.pnnspid = to_regnamespace('rag')
            ) then format('alter publication %%I drop tables in schema rag;', published.pubname)
            else format(
                'alter publication %%I drop table %%s;',
                published.pubname,
                string_agg(format('rag.%%I', published.tablename), ', ' order by published.tablename)
            )
        end,
        'warning',
        'it sends out ' || string_agg(cast(published.tablename as text), ', ' order by published.tablename)
        || ', and row security does not apply to what is replicated'
    from pg_publication_tables as published
    join pg_publication as publication on publication.pubname = published.pubname
    where published.schemaname = 'rag'
    group by published.pubname, publication.oid, publication.puballtables

    union all
    select
        'event trigger',
        cast(trigger.evtname as text),
        'there',
        null,
        format('drop event trigger %%I;', trigger.evtname),
        case when trigger.evtevent = 'login' then 'warning' else 'note' end,
        format('on %%s it calls %%s', trigger.evtevent, cast(trigger.evtfoid as regprocedure))
    from pg_event_trigger as trigger
    where trigger.evtenabled <> 'D'

    -- Copies of our rows, and views of others that read them with rights that policies do not bind.
    union all
    select distinct
        case reader.relkind when 'm' then 'materialized view' else 'view' end || ' elsewhere',
        cast(cast(reader.oid as regclass) as text),
        'there',
        null,
        format(
            'drop %%s %%s;', case reader.relkind when 'm' then 'materialized view' else 'view' end, cast(reader.oid as regclass)
        ),
        case when reader.relkind = 'm' or owner.rolsuper or owner.rolbypassrls then 'error' else 'warning' end,
        case reader.relkind
            when 'm' then 'it holds rows of ours and can have no row security'
            else 'it reads our tables with the rights of ' || quote_ident(owner.rolname)
        end
    from pg_depend as depend
    join pg_rewrite as rewrite on rewrite.oid = depend.objid
    join pg_class as reader on reader.oid = rewrite.ev_class
    join pg_roles as owner on owner.oid = reader.relowner
    where depend.classid = cast('pg_rewrite' as regclass)
        and depend.refclassid = cast('pg_class' as regclass)
        and depend.refobjid in (select relation.oid from relation)
        and reader.relnamespace <> to_regnamespace('rag')
        and (reader.relkind = 'm' or not coalesce('security_invoker=true' = any(reader.reloptions), false))

    union all
    select
        'foreign key elsewhere',
        format('%%s on %%s', con.conname, cast(con.conrelid as regclass)),
        'there',
        null,
        format('alter table %%s drop constraint %%I;', cast(con.conrelid as regclass), con.conname),
        'warning',
        'it tells whether a row of ours exists, whoever may see it'
    from pg_constraint as con
    join pg_class as class on class.oid = con.conrelid
    where con.contype = 'f'
        and con.confrelid in (select relation.oid from relation)
        and class.relnamespace <> to_regnamespace('rag')

    -- What it does nobody can tell from the catalog; that the service or an analyst may call it is enough to look.
    union all
    select
        'definer function elsewhere',
        cast(cast(process.oid as regprocedure) as text),
        'there',
        null,
        format(
            'revoke execute on function %%s from public, rag_app, rag_publisher, rag_operator, rag_analyst cascade;',
            cast(process.oid as regprocedure)
        ),
        'warning',
        'it runs with the rights of ' || quote_ident(owner.rolname) || ', whom policies do not bind, and our logins may call it'
    from pg_proc as process
    join pg_roles as owner on owner.oid = process.proowner
    join pg_namespace as namespace on namespace.oid = process.pronamespace
    where process.prosecdef
        and process.oid >= 16384
        and namespace.nspname <> 'rag'
        and (
            owner.rolsuper
            or owner.rolbypassrls
            or owner.rolname in ('rag_owner', 'rag_search', 'rag_principal', 'rag_steward', 'rag_embedder')
        )
        and exists (
            select
            from ours
            where ours.rolname in ('rag_app', 'rag_publisher', 'rag_operator', 'rag_analyst')
                and has_function_privilege(ours.oid, process.oid, 'execute')
        )
        and not exists (
            select
            from pg_depend as membership
            where membership.classid = cast('pg_proc' as regclass)
                and membership.objid = process.oid
                and membership.deptype = 'e'
        )

    -- With its statements a server logs their parameters, which are questions and texts.
    union all
    select
        'setting',
        'log_parameter_max_length of the server',
        'logged',
        null,
        format('alter database %%I set log_parameter_max_length = 0;', current_database()),
        'note',
        'statements that are logged are logged with their parameters, which are questions and texts'
    where current_setting('log_parameter_max_length') <> '0'
        and (
            current_setting('log_statement') in ('mod', 'all')
            or current_setting('log_min_duration_statement') <> '-1'
            or current_setting('log_min_duration_sample') <> '-1'
            or current_setting('log_transaction_sample_rate') <> '0'
        )

    -- Row security evaluates a leakproof condition of the caller's before its own.
    union all
    select
        'leakproof function',
        cast(cast(process.oid as regprocedure) as text),
        'leakproof',
        null,
        format('alter function %%s not leakproof;', cast(process.oid as regprocedure)),
        'warning',
        'an index that serves it tells by its time whether a word or a vector is in the rows of others'
    from pg_proc as process
    where process.proleakproof
        and (
            process.oid >= 16384
            or exists (
                select
                from unnest(process.proargtypes) as argument (type_id)
                where argument.type_id in (
                    cast('tsvector' as regtype), cast('tsquery' as regtype), cast('jsonb' as regtype),
                    cast('anyarray' as regtype), cast('anycompatiblearray' as regtype)
                )
            )
        )
        and process.pronamespace is distinct from to_regnamespace('rag')
)

select
    fact.kind,
    fact.name,
    cast(null as text) as part_of,
    md5(fact.state) as state,
    fact.make,
    fact.unmake,
    fact.severity,
    fact.remark
from fact
order by fact.kind, fact.name
