"""All that a login may reach in schema rag, as the catalog has it: what is added later is attacked as well.

Arguments are those of three rows of the world in tests/sql/world.py, chosen by the name of the parameter and else by
its type: user 1's own in t1, a public one in t1, and one of t2.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from tests.sql.world import CLASSES, document_id, job_id, log_row, log_statement, query_id, said_id

ROWS = (3, 1, 12)  # access classes, and documents
# By the name of a parameter, with its function or without, in SQL; one for each of ROWS.
BY_NAME: Mapping[str, tuple[str, str, str]] = {
    "share_project.project_id": ("'alpha'",) * 3,
    "unshare_project.project_id": ("'alpha'",) * 3,
    "bury_source.source_id": ("'a deleted source'",) * 3,
    "note_synchronisation.source": ("'another-source'",) * 3,
    "note_synchronisation.failed": ("0",) * 3,
    "expire_batch.kind": ("'questions'",) * 3,
    "count_expired.kind": ("'questions'",) * 3,
    "query_id": tuple(f"'{query_id(number)}'" for number in (101, 103, 104)),  # type: ignore[dict-item]
    "chunk_index": ("0",) * 3,
    "rating": ("-1",) * 3,
    "tag": ("'hr'",) * 3,
    "access_id": ("3", "1", "12"),
    "access_ids": ("'{3}'", "'{1}'", "'{12}'"),
    "scopes": ("'{public,user,project}'",) * 3,
    "document_id": tuple(f"'{document_id(access_id)}'" for access_id in ROWS),  # type: ignore[dict-item]
    "scope": ("'user'", "'public'", "'user'"),
    "user_id": ("1", "null", "1"),
    "project_id": ("null", "null", "null"),
    "tenant_id": ("'t1'", "'t1'", "'t2'"),
    "tags": ("'{public}'",) * 3,
    "member_user_id": ("2",) * 3,
    "question": ("'palisade record'",) * 3,
    "embedding_model": ("'test-model'",) * 3,
    "document_ids": tuple(f"array['{document_id(access_id)}']::uuid[]" for access_id in ROWS),  # type: ignore[dict-item]
    "source_ids": ("array['the source']",) * 3,
    "source_type": ("'text'",) * 3,
    "source_id": ("'the source'",) * 3,
    "key_id": ("'no such key'",) * 3,
    "older_than": ("'0 days'",) * 3,
    "kind": ("'query'",) * 3,
    "signature": ("current_setting('app.signature', true)",) * 3,
    # As tests/barrier/test_forgery.py signs it.
    "take_token_as.user_id": ("1",) * 3,
    "take_token_as.project_id": ("'*'",) * 3,
    "claim_source_as.user_id": ("1",) * 3,
    "claim_source_as.project_id": ("'*'",) * 3,
    "owner_user_id": ("1", "null", "1"),
    "owner_project_id": ("null",) * 3,
    # More than the quota first: what says something is a refusal.
    "more_documents": ("1000000", "1", "-1"),
    "more_bytes": ("1", "1", "-1"),
    "proof": ("current_setting('app.signature', true)",) * 3,
    "job_id": tuple(f"'{job_id(tenant)}'" for tenant in ("t1", "t1", "t2")),  # type: ignore[dict-item]
    "cancel_my_job.id": tuple(f"'{job_id(tenant)}'" for tenant in ("t1", "t1", "t2")),  # type: ignore[dict-item]
    "settle_job.id": tuple(f"'{job_id(tenant)}'" for tenant in ("t1", "t1", "t2")),  # type: ignore[dict-item]
    "holds_job.id": tuple(f"'{job_id(tenant)}'" for tenant in ("t1", "t1", "t2")),  # type: ignore[dict-item]
    "my_waiting_job.kind": ("'ingest'",) * 3,
    "my_waiting_job.lock": ("'a lock'",) * 3,
    "my_request.request_key": ("sha256('a key')",) * 3,
    "source_digest": ("sha256('a source')",) * 3,
    "thread_id": ("'the thread'",) * 3,
    "role": ("'user'",) * 3,
    "after": ("0",) * 3,
    "summary_id": tuple(f"'{said_id(access_id)}'" for access_id in ROWS),  # type: ignore[dict-item]
    "add_summary.id": tuple(f"'{said_id(access_id)}'" for access_id in ROWS),  # type: ignore[dict-item]
    "message_ids": tuple(f"array['{said_id(access_id)}']::uuid[]" for access_id in ROWS),  # type: ignore[dict-item]
}
# They say nothing, and find no row rather than refuse; whoever calls them looks at the tables.
WORDLESS = frozenset({"renew_claim", "release_claim"})
# By its type, for whatever has another name.
BY_TYPE: Mapping[str, tuple[str, str, str]] = {
    "text": ("'public'", "'user'", "'t2'"),
    "text[]": ("'{public}'",) * 3,
    "bigint": ("1", "3", "12"),
    "integer": ("5",) * 3,
    "double precision": ("0.5",) * 3,
    "boolean": ("true",) * 3,
    "uuid": BY_NAME["document_id"],
    "uuid[]": tuple(f"array[{value}]::uuid[]" for value in BY_NAME["document_id"]),  # type: ignore[dict-item]
    "bigint[]": ("'{1,3,12}'",) * 3,
    "interval": ("'1 day'",) * 3,
    "tsvector": ("'palisade'",) * 3,
    "halfvec": ("null",) * 3,
    "jsonb": ("'{}'",) * 3,
    "timestamp with time zone": ("now()",) * 3,
    "bytea": ("sha256('a')", "sha256('b')", "sha256('c')"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reachable:
    """Something to try; what it gives is one array of JSON, but for a command on a table."""

    name: str
    statement: str
    is_command: bool = False

    @property
    def object(self) -> str:
        """The name without the number of the variant."""
        return self.name.rstrip(" 0123456789")


def readings(connection: psycopg.Connection) -> list[Reachable]:
    """Every relation and function that the current role may read or call and that changes nothing."""
    return [*_relations(connection), *(call for call, volatile in _calls(connection) if not volatile)]


def writings(connection: psycopg.Connection) -> list[Reachable]:
    """Every volatile function that the current role may call, and every command on a table but select."""
    return [*(call for call, volatile in _calls(connection) if volatile), *_commands(connection)]


def all_at_once(reachable: Sequence[Reachable]) -> str:
    """One statement for all of them, which none may refuse: name, and rows as JSON."""
    return " union all ".join(f"select '{entry.name}', ({entry.statement})" for entry in reachable)


OUTCOMES = "select cast(current_setting('surface.outcomes') as jsonb)"


def one_by_one(reachable: Sequence[Reachable]) -> str:
    """One statement that tries each; OUTCOMES then gives the SQLSTATE, the number of rows, or the rows, by name."""
    attempts = "".join(
        f"""
        begin
            execute {_quoted(entry.statement)} {"" if entry.is_command else "into found"};
            get diagnostics touched = row_count;
            outcome := {"to_jsonb(touched)" if entry.is_command else "found"};
        exception
            when others then outcome := to_jsonb(sqlstate);
        end;
        outcomes := outcomes || jsonb_build_object({_quoted(entry.name)}, outcome);
        """
        for entry in reachable
    )
    return f"""
        do $attempts$
        declare
            outcomes jsonb := '{{}}';
            outcome jsonb;
            found jsonb;
            touched bigint;
        begin
            {attempts}
            perform set_config('surface.outcomes', outcomes::text, true);
        end
        $attempts$
    """


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def says_something(value: Any) -> bool:
    """Whether there is anything in these rows but nulls, false, 0, nothing, and the word none."""
    if isinstance(value, dict):
        return any(map(says_something, value.values()))
    if isinstance(value, list):
        return any(map(says_something, value))
    return value not in (None, False, 0, "", "none")


def _relations(connection: psycopg.Connection) -> Iterator[Reachable]:
    for relation, columns in connection.execute(
        """
        select relation.relname, string_agg(quote_ident(attribute.attname), ', ' order by attribute.attnum)
        from pg_class as relation
        join pg_attribute as attribute
            on attribute.attrelid = relation.oid
            and attribute.attnum > 0
            and not attribute.attisdropped
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'p', 'v', 'm', 'f')
            and relation.relname <> 'alembic_version'
            and has_column_privilege(relation.oid, attribute.attnum, 'select')
        group by relation.relname
        order by relation.relname
        """
    ):
        yield Reachable(name=relation, statement=_as_json(f"select {columns} from rag.{relation}"))


def _calls(connection: psycopg.Connection) -> Iterator[tuple[Reachable, bool]]:
    """Calls of each function, and whether it is volatile; without arguments that have a default."""
    for name, names, types, volatile, is_void in connection.execute(
        """
        select
            function.proname,
            array(
                select coalesce(function.proargnames[place], '')
                from generate_series(1, function.pronargs - function.pronargdefaults) as place
                order by place
            ),
            array(
                select format_type(argument.type_id, null)
                from unnest(function.proargtypes::oid[]) with ordinality as argument (type_id, place)
                where argument.place <= function.pronargs - function.pronargdefaults
                order by argument.place
            ),
            function.provolatile = 'v',
            function.prorettype = 'void'::regtype
        from pg_proc as function
        where function.pronamespace = 'rag'::regnamespace
            -- Nothing that only computes, and not what sets the principal.
            and (function.provolatile <> 'i' or function.prosecdef)
            and function.proname <> 'begin_as'
            and has_function_privilege(function.oid, 'execute')
            and not exists (
                select
                from pg_depend as membership
                where membership.classid = 'pg_proc'::regclass
                    and membership.objid = function.oid
                    and membership.deptype = 'e'
            )
        order by function.proname, function.oid
        """,
    ):
        variants = []
        for row in range(len(ROWS)):
            arguments = [
                (BY_NAME.get(f"{name}.{argument}") or BY_NAME.get(argument) or BY_TYPE[kind.removeprefix("rag.")])[row]
                for argument, kind in zip(names, types, strict=True)
            ]
            variants.append(", ".join(arguments))
        for row, arguments in enumerate(dict.fromkeys(variants)):
            given = "result.*" if not is_void else "false" if name in WORDLESS else "true"
            statement = f"select {given} from rag.{name}({arguments}) as result"
            yield Reachable(name=f"{name}() {row + 1}", statement=_as_json(statement)), volatile


def _as_json(statement: str) -> str:
    return f"select coalesce(jsonb_agg(to_jsonb(found)), '[]') from ({statement}) as found"


def _commands(connection: psycopg.Connection) -> Iterator[Reachable]:
    for table, command, column in connection.execute(
        """
        select relation.relname, command.name, min(attribute.attname)
        from pg_class as relation
        join pg_attribute as attribute
            on attribute.attrelid = relation.oid
            and attribute.attnum > 0
            and not attribute.attisdropped
        cross join (values ('insert'), ('update'), ('delete')) as command (name)
        where relation.relnamespace = 'rag'::regnamespace
            and relation.relkind in ('r', 'p', 'v')
            and case command.name
                when 'delete' then has_table_privilege(relation.oid, 'delete')
                else has_column_privilege(relation.oid, attribute.attnum, command.name)
            end
        group by relation.relname, command.name
        order by relation.relname, command.name
        """
    ):
        if command == "delete":
            yield Reachable(name=f"delete {table}", statement=f"delete from rag.{table}", is_command=True)
        elif command == "update":
            statement = f"update rag.{table} set {column} = default"
            yield Reachable(name=f"update {table}", statement=statement, is_command=True)
        else:
            yield from (
                Reachable(name=f"insert {table} {number + 1}", statement=statement, is_command=True)
                for number, statement in enumerate(_inserts(table))
            )


def _inserts(table: str) -> list[str]:
    """Rows that a policy alone refuses: as each of ROWS, or with nothing but a tenant in a table that came later."""
    parts = ("tenant", "scope", "user", "project", "tags")
    rows = [dict(zip(parts, CLASSES[access_id], strict=True)) for access_id in ROWS]
    if table == "rag_documents":
        return [
            f"""
            insert into rag.rag_documents (tenant_id, access_id, scope, user_id, tags, source_type, source_id,
                source_hash, title, body)
            values ('{row["tenant"]}', {access_id}, '{row["scope"]}', {row["user"] or "null"}, '{{public}}', 'text',
                'a new source', 'hash', 'title', 'body')
            """
            for access_id, row in zip(ROWS, rows, strict=True)
        ]
    if table == "rag_chunks":
        return [
            f"""
            insert into rag.rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash,
                token_count, token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count)
            values ('{row["tenant"]}', {access_id}, '{document_id(access_id)}', 1, 'new', 'hash', 1, 'words', 0, 3,
                cast('[1' || repeat(',0', 511) || ']' as rag.halfvec), 'test-model', '', 0)
            """
            for access_id, row in zip(ROWS, rows, strict=True)
        ]
    if table in ("rag_query_logs", "rag_query_log_chunks", "rag_assertions", "rag_retractions"):
        inserts = []
        for number, row in enumerate(rows):
            values = log_row(document_id(900 + number), str(row["tenant"]), row["user"], rank=9)  # type: ignore[arg-type]
            literals = {name: json.dumps(value, default=str).replace('"', "'") for name, value in values.items()}
            inserts.append(log_statement(table) % literals)
        return inserts
    return ["insert into rag.{} (tenant_id) values ('{}')".format(table, row["tenant"]) for row in rows]
