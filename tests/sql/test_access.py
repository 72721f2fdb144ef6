"""docs/access.md says for every table and role what may be read and written; the catalog has the last word.

After a change of grants or policies: `RAG_UPDATE_DOCS=1 pytest tests/sql/test_access.py`, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "access.md"

ROLES = (
    *("rag_app", "rag_publisher", "rag_operator", "rag_analyst", "rag_principal", "rag_search", "rag_steward"),
    *("rag_embedder", "rag_migrator", "rag_owner", "rag_queue", "rag_worker"),
)

HEAD = """\
# Who may read and write what

Made from the catalog by `tests/sql/test_access.py`, which fails when the two differ. A role not listed for a
table may do nothing with it. *Rows* is the condition of the policy that lets the role in; the restrictive
policies, which apply on top of it, keep every row of `rag_app`, `rag_publisher`, `rag_worker` and `rag_principal`
within the principal's tenant. Row security is forced on every table, so it binds `rag_owner` as well: without a policy
of its own it sees nothing.

`rag_app` and `rag_publisher` are the service, `rag_worker` its workers; `rag_operator` and the members of `rag_analyst`
are people. Nobody logs in as `rag_principal`, `rag_search`, `rag_steward`, `rag_queue`, `rag_embedder` or `rag_owner`:
the first five own the functions at the end of this page, which run with their rights, for whoever is named there and
for the principal of that session alone; those of `rag_queue` for the one job that a worker was given. Those of
`rag_embedder`, which read texts of all tenants while a second embedding model is filled, are for `rag_owner`, whom
`rag_migrator` alone becomes.

"""

FUNCTIONS_HEAD = """\
## Functions

Whoever is not listed may not call it. *Runs as* is the owner for a definer function, whose rights it has, and nobody
else for the others: they can do what their caller can.

| Function | Runs as | May be called by |
|---|---|---|
"""

FUNCTIONS = """
    select
        function.proname,
        case when function.prosecdef then pg_get_userbyid(function.proowner) else 'the caller' end,
        string_agg(grantee.rolname, ', ' order by array_position(cast(%s as name[]), grantee.rolname))
    from pg_proc as function
    left join lateral aclexplode(function.proacl) as privilege on privilege.grantee <> function.proowner
    left join pg_roles as grantee on grantee.oid = privilege.grantee
    where function.pronamespace = 'rag'::regnamespace
        and not exists (
            select 1 from pg_depend where classid = 'pg_proc'::regclass and objid = function.oid and deptype = 'e'
        )
    group by function.oid
    order by function.proname
"""

GRANTS = """
    select
        relation.relname,
        grantee.rolname,
        lower(privilege.privilege_type),
        null::text
    from pg_class as relation
    cross join lateral aclexplode(relation.relacl) as privilege
    join pg_roles as grantee on grantee.oid = privilege.grantee
    where relation.relnamespace = 'rag'::regnamespace
        and relation.relkind in ('r', 'v')
        and relation.relname <> 'alembic_version'
        and privilege.grantee <> relation.relowner
    union all
    select
        relation.relname,
        grantee.rolname,
        lower(privilege.privilege_type),
        string_agg(attribute.attname, ', ' order by attribute.attnum)
    from pg_attribute as attribute
    join pg_class as relation on relation.oid = attribute.attrelid
    cross join lateral aclexplode(attribute.attacl) as privilege
    join pg_roles as grantee on grantee.oid = privilege.grantee
    where relation.relnamespace = 'rag'::regnamespace
        and relation.relkind in ('r', 'v')
    group by relation.relname, grantee.rolname, privilege.privilege_type
    order by 1, 2, 3
"""

POLICIES = """
    select tablename, cmd, unnest(roles)::text, coalesce(with_check, qual)
    from pg_policies
    where schemaname = 'rag'
        and permissive = 'PERMISSIVE'
"""

COMMANDS = ("select", "insert", "update", "delete")


def describe(connection) -> str:
    grants: dict[str, dict[tuple[str, str], str]] = {}
    for table, role, command, columns in connection.execute(GRANTS):
        grants.setdefault(table, {})[role, command] = "" if columns is None else f" ({columns})"
    policies: dict[tuple[str, str, str], str] = {}
    for table, command, role, condition in connection.execute(POLICIES):
        policies[table, command.lower(), role] = " ".join(condition.split())
    tables = {row[0] for row in connection.execute("select tablename from pg_tables where schemaname = 'rag'")}
    parts = [HEAD]
    for table in sorted(grants):
        parts.append(f"## {table}\n\n| Role | May | Rows |\n|---|---|---|\n")
        for role in ROLES:
            for command in COMMANDS:
                if (role, command) not in grants[table]:
                    continue
                rows = policies.get((table, command, role), "none" if table in tables else "as the functions beneath")
                parts.append(f"| {role} | {command}{grants[table][role, command]} | `{rows}` |\n")
        parts.append("\n")
    parts.append(FUNCTIONS_HEAD)
    for name, owner, callers in connection.execute(FUNCTIONS, (list(ROLES),)):
        parts.append(f"| `{name}` | {owner} | {callers or 'nobody else'} |\n")
    return "".join(parts)


def test_the_access_matrix_in_the_docs_is_that_of_the_catalog(deployment):
    with deployment.cluster.superuser(deployment.name) as connection:
        # Names without their schema read better, and there is only one.
        connection.execute("set search_path = rag, pg_temp")
        found = describe(connection)
    if os.environ.get("RAG_UPDATE_DOCS") == "1":
        DOCUMENT.write_text(found, encoding="utf-8")
    assert DOCUMENT.read_text(encoding="utf-8") == found


def test_no_role_outside_the_matrix_is_granted_anything(deployment):
    with deployment.cluster.superuser(deployment.name) as connection:
        found = {(row[1], row[2]) for row in connection.execute(GRANTS)}
        callers = {row[2] for row in connection.execute(FUNCTIONS, (list(ROLES),)) if row[2]}
    assert {role for role, _ in found} <= set(ROLES)
    assert {command for _, command in found} <= set(COMMANDS)
    assert {role for listed in callers for role in listed.split(", ")} <= set(ROLES)
