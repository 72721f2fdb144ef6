-- What schema rag holds, as the catalog has it, one row for each fact; sql/manifest.json is this of a database
-- that was just migrated. To be asked with an empty search path, so that every name is written in full.
-- kind, name: the fact; part_of: kind and name of what it belongs to; state: differs when the fact does;
-- make: SQL that makes it so; unmake: SQL that removes it; severity: how bad it is when it is not as expected;
-- remark: what to say about it when it is not
with schema as materialized (
    select namespace.oid, namespace.nspowner, namespace.nspacl
    from pg_namespace as namespace
    where namespace.nspname = 'rag'
),

-- pgvector's own objects live in the same schema.
foreign_member as materialized (
    select depend.classid, depend.objid
    from pg_depend as depend
    where depend.refclassid = cast('pg_extension' as regclass)
        and depend.deptype = 'e'
),

relation as materialized (
    select
        class.oid,
        cast(class.relname as text) as name,
        case class.relkind
            when 'r' then 'table'
            when 'p' then 'partitioned table'
            when 'v' then 'view'
            when 'm' then 'materialized view'
            when 'f' then 'foreign table'
            when 'S' then 'sequence'
        end as kind,
        class.relkind,
        class.relowner,
        class.relacl,
        class.relpersistence,
        class.reloptions,
        class.relrowsecurity,
        class.relforcerowsecurity
    from pg_class as class
    join schema on schema.oid = class.relnamespace
    where class.relkind in ('r', 'p', 'v', 'm', 'f', 'S')
        and not exists (
            select
            from foreign_member
            where foreign_member.classid = cast('pg_class' as regclass) and foreign_member.objid = class.oid
        )
),

function as materialized (
    select
        process.oid,
        replace(cast(cast(process.oid as regprocedure) as text), 'rag.', '') as name,
        cast(cast(process.oid as regprocedure) as text) as signature,
        case process.prokind
            when 'p' then 'procedure'
            when 'a' then 'aggregate'
            else 'function'
        end as kind,
        process.prokind,
        process.proowner,
        process.proacl,
        process.prosecdef
    from pg_proc as process
    join schema on schema.oid = process.pronamespace
    where not exists (
        select
        from foreign_member
        where foreign_member.classid = cast('pg_proc' as regclass) and foreign_member.objid = process.oid
    )
),

-- Everybody's rights but the owner's, which the owner could give back at any time, and superusers', who need none.
entitlement as materialized (
    select
        given.part_of,
        given.what,
        given.object,
        given.definer,
        lower(given.privilege_type) as privilege,
        lower(given.privilege_type) || coalesce(' (' || given.columns || ')', '') as phrase,
        given.is_grantable,
        case given.grantee
            when 0 then 'public'
            else quote_ident(pg_get_userbyid(given.grantee))
        end as grantee,
        given.grantee = 0 or pg_get_userbyid(given.grantee) like 'rag\_%%' as is_ours
    from (
        select
            relation.kind || ' ' || relation.name as part_of,
            relation.name as what,
            format('%%I.%%I', 'rag', relation.name) as object,
            false as definer,
            cast(null as text) as columns,
            privilege.privilege_type,
            privilege.is_grantable,
            privilege.grantee,
            relation.relowner as owner
        from relation
        cross join lateral aclexplode(relation.relacl) as privilege
        union all
        select
            relation.kind || ' ' || relation.name,
            relation.name,
            format('%%I.%%I', 'rag', relation.name),
            false,
            quote_ident(attribute.attname),
            privilege.privilege_type,
            privilege.is_grantable,
            privilege.grantee,
            relation.relowner
        from relation
        join pg_attribute as attribute on attribute.attrelid = relation.oid and not attribute.attisdropped
        cross join lateral aclexplode(attribute.attacl) as privilege
        union all
        select
            function.kind || ' ' || function.name,
            function.kind || ' ' || function.name,
            function.kind || ' ' || function.signature,
            function.prosecdef,
            null,
            privilege.privilege_type,
            privilege.is_grantable,
            privilege.grantee,
            function.proowner
        from function
        cross join lateral aclexplode(coalesce(function.proacl, acldefault('f', function.proowner))) as privilege
        union all
        select
            'schema rag',
            'schema rag',
            'schema rag',
            false,
            null,
            privilege.privilege_type,
            privilege.is_grantable,
            privilege.grantee,
            schema.nspowner
        from schema
        cross join lateral aclexplode(schema.nspacl) as privilege
    ) as given
    left join pg_roles as role on role.oid = given.grantee
    where given.grantee <> given.owner
        and role.rolsuper is not true
),

fact as (
    select
        'schema' as kind,
        'rag' as name,
        cast(null as text) as part_of,
        'owner ' || pg_get_userbyid(schema.nspowner) as state,
        format('alter schema rag owner to %%I;', pg_get_userbyid(schema.nspowner)) as make,
        cast(null as text) as unmake,
        'error' as severity,
        'it belongs to ' || pg_get_userbyid(schema.nspowner) as remark
    from schema

    union all
    select
        relation.kind,
        relation.name,
        null,
        cast(relation.relpersistence as text) || coalesce(
            ' ' || array_to_string(array(select unnest(relation.reloptions) order by 1), ' ')
            || ' ' || pg_get_viewdef(relation.oid),
            ''
        ),
        case
            when relation.relkind = 'v' then concat_ws(
                chr(10),
                format(
                    'create or replace view rag.%%I with (%%s) as',
                    relation.name, array_to_string(relation.reloptions, ', ')
                ),
                pg_get_viewdef(relation.oid),
                format('alter view rag.%%I owner to %%I;', relation.name, pg_get_userbyid(relation.relowner)),
                (
                    select string_agg(
                        format('grant %%s on rag.%%I to %%s;', entitlement.phrase, relation.name, entitlement.grantee),
                        chr(10)
                        order by entitlement.phrase, entitlement.grantee
                    )
                    from entitlement
                    where entitlement.part_of = 'view ' || relation.name
                ),
                format('comment on view rag.%%I is %%L;', relation.name, obj_description(relation.oid, 'pg_class'))
            )
        end,
        format('drop %%s rag.%%I;', replace(relation.kind, 'partitioned ', ''), relation.name),
        case
            when relation.relkind in ('m', 'f') then 'error'
            when relation.relkind in ('r', 'p') and not (relation.relrowsecurity and relation.relforcerowsecurity)
                then 'error'
            when relation.relkind = 'v' and not coalesce('security_invoker=true' = any(relation.reloptions), false)
                then 'error'
            else 'warning'
        end,
        case
            when relation.relkind = 'm' then 'it holds all rows and can have no row security'
            when relation.relkind = 'f' then 'row security does not reach it'
            when relation.relkind = 'S' then 'what it counts is to be read by whoever may use it'
            when relation.relkind = 'v' and not coalesce('security_invoker=true' = any(relation.reloptions), false)
                then 'it reads with the rights of ' || pg_get_userbyid(relation.relowner)
            when relation.relkind in ('r', 'p') and not (relation.relrowsecurity and relation.relforcerowsecurity)
                then 'row security is not forced on it'
        end
    from relation

    union all
    select
        'owner',
        'of ' || relation.kind || ' ' || relation.name,
        relation.kind || ' ' || relation.name,
        pg_get_userbyid(relation.relowner),
        format(
            'alter %%s rag.%%I owner to %%I;',
            replace(relation.kind, 'partitioned ', ''), relation.name, pg_get_userbyid(relation.relowner)
        ),
        null,
        'error',
        'it belongs to ' || pg_get_userbyid(relation.relowner)
    from relation

    union all
    select
        'row security',
        'of ' || relation.name,
        relation.kind || ' ' || relation.name,
        format('%%s, %%s', relation.relrowsecurity, relation.relforcerowsecurity),
        format(
            'alter table rag.%%I %%s row level security, %%s row level security;',
            relation.name,
            case when relation.relrowsecurity then 'enable' else 'disable' end,
            case when relation.relforcerowsecurity then 'force' else 'no force' end
        ),
        null,
        'error',
        case
            when not relation.relrowsecurity then 'it is off'
            when not relation.relforcerowsecurity then 'it is not forced, so it does not bind the owner'
        end
    from relation
    where relation.relkind in ('r', 'p')

    union all
    select
        'column',
        relation.name || '.' || attribute.attname,
        relation.kind || ' ' || relation.name,
        concat_ws(
            ' ', shape.type_name, attribute.attnotnull, attribute.attgenerated, attribute.attidentity, shape.expression,
            attribute.attstorage, cast(attribute.attcollation as regcollation)
        ),
        format('alter table rag.%%I add column if not exists %%I %%s;', relation.name, attribute.attname, shape.type_name)
        || chr(10) || format(
            'alter table rag.%%I alter column %%I %%s, alter column %%I %%s, alter column %%I set storage %%s;',
            relation.name,
            attribute.attname,
            coalesce('set default ' || shape.expression, 'drop default'),
            attribute.attname,
            case when attribute.attnotnull then 'set' else 'drop' end || ' not null',
            attribute.attname,
            case attribute.attstorage
                when 'p' then 'plain'
                when 'm' then 'main'
                when 'x' then 'extended'
                when 'e' then 'external'
            end
        ),
        format('alter table rag.%%I drop column %%I;', relation.name, attribute.attname),
        case when shape.expression is null then 'warning' else 'error' end,
        case
            when attribute.attgenerated <> '' then 'it is computed by ' || shape.expression
            when shape.expression is not null then 'its default is ' || shape.expression
        end
    from relation
    join pg_attribute as attribute on attribute.attrelid = relation.oid
    left join pg_attrdef as preset on preset.adrelid = attribute.attrelid and preset.adnum = attribute.attnum
    cross join lateral (
        select
            pg_get_expr(preset.adbin, preset.adrelid) as expression,
            -- The width is a setting of each deployment.
            regexp_replace(
                format_type(attribute.atttypid, attribute.atttypmod), '^rag\.halfvec\(\d+\)$', 'rag.halfvec({dimensions})'
            ) as type_name
    ) as shape
    where relation.relkind in ('r', 'p')
        and attribute.attnum > 0
        and not attribute.attisdropped

    -- As far as somebody said how many values of a column are to be kept.
    union all
    select
        'statistics',
        'of ' || relation.name || '.' || attribute.attname,
        'column ' || relation.name || '.' || attribute.attname,
        cast(attribute.attstattarget as text),
        format(
            'alter table rag.%%I alter column %%I set statistics %%s;',
            relation.name, attribute.attname, attribute.attstattarget
        ),
        format('alter table rag.%%I alter column %%I set statistics -1;', relation.name, attribute.attname),
        case when attribute.attstattarget = 0 then 'warning' else 'note' end,
        format('common values to keep: %%s', attribute.attstattarget)
    from relation
    join pg_attribute as attribute on attribute.attrelid = relation.oid
    where relation.relkind in ('r', 'p')
        and attribute.attnum > 0
        and not attribute.attisdropped
        and attribute.attstattarget >= 0

    union all
    select
        'constraint',
        con.conname || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        -- Read back from a dump, nested conditions are in fewer parentheses.
        translate(pg_get_constraintdef(con.oid), '()', ''),
        format('alter table rag.%%I drop constraint if exists %%I;', relation.name, con.conname)
        || chr(10)
        || format('alter table rag.%%I add constraint %%I %%s;', relation.name, con.conname, pg_get_constraintdef(con.oid)),
        format('alter table rag.%%I drop constraint %%I;', relation.name, con.conname),
        case when con.contype = 'c' then 'warning' else 'error' end,
        pg_get_constraintdef(con.oid)
    from relation
    join pg_constraint as con on con.conrelid = relation.oid
    where con.contype in ('c', 'f', 'p', 'u', 'x')

    union all
    select
        'index',
        class.relname || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        pg_get_indexdef(index.indexrelid) || case when index.indisvalid then '' else ' (invalid)' end,
        format('drop index if exists rag.%%I;', class.relname) || chr(10) || pg_get_indexdef(index.indexrelid) || ';',
        format('drop index rag.%%I;', class.relname),
        case
            when index.indisunique then 'error'
            when method.amname in ('hnsw', 'ivfflat', 'gin', 'gist', 'spgist') and not fenced.by_class then 'warning'
            else 'note'
        end,
        case
            when not index.indisvalid then 'it is invalid, as a build that was broken off leaves it'
            when index.indisunique then 'it tells whether a value exists in another tenant'
            when method.amname in ('hnsw', 'ivfflat', 'gin', 'gist', 'spgist') and not fenced.by_class
                then 'all access classes share it, so that time and results tell of the rows of others'
            else pg_get_indexdef(index.indexrelid)
        end
    from relation
    join pg_index as index on index.indrelid = relation.oid
    join pg_class as class on class.oid = index.indexrelid
    join pg_am as method on method.oid = class.relam
    cross join lateral (
        select
            coalesce(pg_get_expr(index.indpred, index.indrelid) ~ '\maccess_id = ', false) as by_class,
            coalesce(
                not index.indisunique
                and relation.name = 'rag_chunks'
                and class.relname in (
                    select format('rag_chunks_%%s_%%s', kind, substring(predicate, '\d+'))
                    from pg_get_expr(index.indpred, index.indrelid) as predicate
                    cross join unnest(array['vector', 'words', 'second']) as kind
                    where predicate ~ '^\(access_id = ''\d+''::bigint\)$'
                ),
                false
            ) as maintained
    ) as fenced
    -- Those of single classes come and go with rag maintain, whose own query finds what is wrong with one.
    -- That of the contents of a second model comes and goes with it.
    where not fenced.maintained and class.relname <> 'rag_chunks_second_contents' and not exists (
        select
        from pg_constraint as con
        where con.conindid = index.indexrelid and con.conrelid = index.indrelid
    )

    union all
    select
        'trigger',
        trigger.tgname || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        pg_get_triggerdef(trigger.oid),
        null,
        format('drop trigger %%I on rag.%%I;', trigger.tgname, relation.name),
        'error',
        'it calls ' || cast(cast(trigger.tgfoid as regprocedure) as text)
    from relation
    join pg_trigger as trigger on trigger.tgrelid = relation.oid
    where not trigger.tgisinternal

    union all
    select distinct
        'disabled triggers',
        'of ' || relation.name,
        relation.kind || ' ' || relation.name,
        'disabled',
        null,
        format('alter table rag.%%I enable trigger all;', relation.name),
        'error',
        'its foreign keys are not enforced'
    from relation
    join pg_trigger as trigger on trigger.tgrelid = relation.oid
    where trigger.tgisinternal
        and trigger.tgenabled <> 'O'

    union all
    select
        'rule',
        rewrite.rulename || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        pg_get_ruledef(rewrite.oid),
        null,
        format('drop rule %%I on rag.%%I;', rewrite.rulename, relation.name),
        'error',
        null
    from relation
    join pg_rewrite as rewrite on rewrite.ev_class = relation.oid
    where rewrite.rulename <> '_RETURN'

    union all
    select
        'inheritance',
        cast(cast(inherits.inhrelid as regclass) as text) || ' from ' || cast(cast(inherits.inhparent as regclass) as text),
        null,
        'inherits',
        null,
        format(
            'alter table %%s no inherit %%s;', cast(inherits.inhrelid as regclass), cast(inherits.inhparent as regclass)
        ),
        'error',
        'the policies of a table do not go with its rows'
    from pg_inherits as inherits
    join pg_class as child on child.oid = inherits.inhrelid and child.relkind in ('r', 'p', 'f')
    where inherits.inhrelid in (select relation.oid from relation)
        or inherits.inhparent in (select relation.oid from relation)

    union all
    select
        'extended statistics',
        statistic.stxname || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        pg_get_statisticsobjdef(statistic.oid),
        null,
        'drop statistics ' || format('%%I.%%I;', namespace.nspname, statistic.stxname),
        'warning',
        'estimates of the planner may tell common values, of all tenants'
    from relation
    join pg_statistic_ext as statistic on statistic.stxrelid = relation.oid
    join pg_namespace as namespace on namespace.oid = statistic.stxnamespace

    union all
    select
        'policy',
        policy.polname || ' on ' || relation.name,
        relation.kind || ' ' || relation.name,
        rule.definition,
        format('drop policy if exists %%I on rag.%%I;', policy.polname, relation.name)
        || chr(10) || rule.definition
        || coalesce(
            chr(10) || format(
                'comment on policy %%I on rag.%%I is %%L;', policy.polname, relation.name, obj_description(policy.oid, 'pg_policy')
            ),
            ''
        ),
        format('drop policy %%I on rag.%%I;', policy.polname, relation.name),
        case when policy.polpermissive then 'error' else 'warning' end,
        rule.shape
    from relation
    join pg_policy as policy on policy.polrelid = relation.oid
    cross join lateral (
        select
            concat(
                case when policy.polpermissive then 'permissive' else 'restrictive' end,
                ' for ',
                case policy.polcmd
                    when 'r' then 'select'
                    when 'a' then 'insert'
                    when 'w' then 'update'
                    when 'd' then 'delete'
                    else 'all'
                end,
                ' to ',
                array_to_string(
                    array(
                        select case member when 0 then 'public' else quote_ident(pg_get_userbyid(member)) end
                        from unnest(policy.polroles) as member
                        order by 1
                    ),
                    ', '
                )
            ) as shape,
            ' using (' || pg_get_expr(policy.polqual, policy.polrelid) || ')' as visible,
            ' with check (' || pg_get_expr(policy.polwithcheck, policy.polrelid) || ')' as writable
    ) as spoken
    cross join lateral (
        select
            concat(spoken.shape, spoken.visible, spoken.writable) as shape,
            format(
                'create policy %%I on rag.%%I as %%s%%s%%s;',
                policy.polname, relation.name, spoken.shape, spoken.visible, spoken.writable
            ) as definition
    ) as rule

    union all
    select
        function.kind,
        function.name,
        null,
        case when function.prokind = 'a' then 'aggregate' else pg_get_functiondef(function.oid) end,
        case
            when function.prokind <> 'a' then concat_ws(
                chr(10),
                rtrim(pg_get_functiondef(function.oid), chr(10)) || ';',
                format('alter function %%s owner to %%I;', function.signature, pg_get_userbyid(function.proowner)),
                format('revoke all on function %%s from public;', function.signature),
                (
                    select string_agg(
                        format('grant execute on function %%s to %%s;', function.signature, entitlement.grantee),
                        chr(10)
                        order by entitlement.grantee
                    )
                    from entitlement
                    where entitlement.object = 'function ' || function.signature
                ),
                format('comment on function %%s is %%L;', function.signature, obj_description(function.oid, 'pg_proc'))
            )
        end,
        format('drop routine %%s;', function.signature),
        case when function.prosecdef then 'error' else 'warning' end,
        case
            when function.prosecdef then 'it runs with the rights of ' || pg_get_userbyid(function.proowner)
            else 'the functions of Palisade could call it instead of the server''s'
        end
    from function

    union all
    select
        'owner',
        'of ' || function.kind || ' ' || function.name,
        function.kind || ' ' || function.name,
        pg_get_userbyid(function.proowner),
        format('alter routine %%s owner to %%I;', function.signature, pg_get_userbyid(function.proowner)),
        null,
        'error',
        'it belongs to ' || pg_get_userbyid(function.proowner)
    from function

    union all
    select
        'right',
        format('%%s on %%s to %%s', entitlement.phrase, entitlement.what, entitlement.grantee),
        entitlement.part_of,
        case when entitlement.is_grantable then 'may be passed on' else 'given' end,
        format('grant %%s on %%s to %%s;', entitlement.phrase, entitlement.object, entitlement.grantee)
        || case
            when entitlement.is_grantable then ''
            else chr(10) || format(
                'revoke grant option for %%s on %%s from %%s cascade;',
                entitlement.phrase, entitlement.object, entitlement.grantee
            )
        end,
        format('revoke %%s on %%s from %%s cascade;', entitlement.phrase, entitlement.object, entitlement.grantee),
        case
            when entitlement.what = 'schema rag' and entitlement.privilege = 'usage' then 'warning'
            when not entitlement.is_ours and entitlement.privilege <> 'create' then 'warning'
            when entitlement.part_of like 'function %%' and not entitlement.definer then 'warning'
            else 'error'
        end,
        case when entitlement.is_grantable then 'it may be passed on' end
    from entitlement

    union all
    select
        'default right',
        case
            when privilege.grantee is null then format('of every function of %%s not to be called by all', owner.name)
            else format('%%s on %%s of %%s to %%s', lower(privilege.privilege_type), objects.word, owner.name, receiver.name)
        end,
        null,
        'given',
        case
            when privilege.grantee is null
                then format('alter default privileges for role %%s revoke execute on functions from public;', owner.name)
        end,
        format(
            'alter default privileges for role %%s%%s revoke %%s on %%s from %%s;',
            owner.name,
            case when preset.defaclnamespace = 0 then '' else ' in schema rag' end,
            lower(privilege.privilege_type),
            objects.word,
            receiver.name
        ),
        'warning',
        'objects that are made later will have it'
    from pg_default_acl as preset
    cross join lateral (select quote_ident(pg_get_userbyid(preset.defaclrole)) as name) as owner
    cross join lateral (
        select
            case preset.defaclobjtype
                when 'r' then 'tables'
                when 'S' then 'sequences'
                when 'f' then 'functions'
                when 'T' then 'types'
                when 'n' then 'schemas'
            end as word
    ) as objects
    cross join lateral (
        select entry.grantee, entry.privilege_type
        from aclexplode(preset.defaclacl) as entry
        where entry.grantee <> preset.defaclrole
        union all
        select null, null
        where preset.defaclobjtype = 'f'
            and preset.defaclnamespace = 0
            and not exists (select from aclexplode(preset.defaclacl) as entry where entry.grantee = 0)
    ) as privilege
    cross join lateral (
        select case privilege.grantee when 0 then 'public' else quote_ident(pg_get_userbyid(privilege.grantee)) end as name
    ) as receiver
    where preset.defaclnamespace in (select schema.oid from schema)
        or (preset.defaclnamespace = 0 and pg_get_userbyid(preset.defaclrole) like 'rag\_%%')

    union all
    select
        'extension',
        extension.extname,
        null,
        'in schema rag',
        'alter extension ' || quote_ident(extension.extname) || ' set schema rag;',
        'drop extension ' || quote_ident(extension.extname) || ';',
        'warning',
        'its functions and operators are found before those of other schemas'
    from pg_extension as extension
    join schema on schema.oid = extension.extnamespace

    -- Whatever else a schema can hold: operators, types, text-search configurations, …
    union all
    select
        identity.type,
        identity.identity,
        null,
        'there',
        null,
        format('drop %%s %%s;', identity.type, identity.identity),
        case when identity.type like 'operator%%' then 'error' else 'warning' end,
        'the functions of Palisade could use it instead of the server''s'
    from pg_depend as depend
    join schema on schema.oid = depend.refobjid
    cross join lateral pg_identify_object(depend.classid, depend.objid, 0) as identity
    where depend.refclassid = cast('pg_namespace' as regclass)
        and depend.deptype = 'n'
        and depend.classid in (
            cast('pg_type' as regclass), cast('pg_operator' as regclass), cast('pg_opclass' as regclass),
            cast('pg_opfamily' as regclass), cast('pg_collation' as regclass), cast('pg_conversion' as regclass),
            cast('pg_ts_config' as regclass), cast('pg_ts_dict' as regclass), cast('pg_ts_parser' as regclass),
            cast('pg_ts_template' as regclass)
        )
        and not exists (
            select
            from foreign_member
            where foreign_member.classid = depend.classid and foreign_member.objid = depend.objid
        )
)

select
    fact.kind,
    fact.name,
    fact.part_of,
    md5(fact.state) as state,
    fact.make,
    fact.unmake,
    fact.severity,
    fact.remark
from fact
order by fact.kind, fact.name
