"""Nothing of what somebody writes, asks or is called reaches a place that others read: the catalogs, statistics,
activity and locks of the server, its log, and what an error says.

A word that stands in every text and every name of one tenant is looked for in all of them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from rag import embedded, migrate
from rag.erase import Subject
from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from tests.api.running import Person, running
from tests.barrier.oracle_reading import analyst_logins
from tests.conftest import DIMENSIONS, LOGINS, Cluster, Deployment, know_signer, unit_vector
from tests.sql.world import column, protected_tables

Figure = Callable[[str], None]

CANARY = "kanarienvogel"
TENANT, PROJECT, TAG = f"{CANARY}-tenant", f"{CANARY}-project", f"{CANARY}-tag"
USER, MEMBER = 7_770_007_770_007, 7_770_007_770_008


# --- a server of one's own, and all that the service does ------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Site:
    deployment: Deployment
    log: Path


@contextmanager
def new_site() -> Iterator[Site]:
    """A server that logs as Postgres does without configuration; the embedded one keeps statements and details out."""
    with embedded.ephemeral() as server:
        password = secrets.token_hex(8)
        cluster = Cluster(superuser_url=server.url("postgres", "postgres"), password=password)
        deployment = Deployment(cluster, "palisade")
        migrate.bootstrap(deployment.url("postgres"), dict.fromkeys(LOGINS, password))
        migrate.upgrade(deployment.url("rag_migrator"), dimensions=DIMENSIONS)
        with cluster.superuser("palisade") as superuser:
            know_signer(superuser)
            for name in ("log_min_error_statement", "log_error_verbosity", "log_min_messages", "log_statement"):
                (value,) = column(superuser, "select boot_val from pg_settings where name = %s", (name,))
                superuser.execute(sql.SQL("alter system set {} = {}").format(sql.Identifier(name), value))
            superuser.execute("select pg_reload_conf()")
        yield Site(deployment=deployment, log=server.data.parent / "server.log")


def use_everything(client: Any, deployment: Deployment) -> dict[int, int]:
    """Everything that the service does for people, and what it refuses; how often it answered with each status."""
    statuses: dict[int, int] = {}

    def count(response: Any) -> Any:
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        return response

    mara = Person(client=client, tenant_id=TENANT, user_id=USER, project_id=PROJECT, user_tags=["public", TAG])
    jonas = Person(client=client, tenant_id=TENANT, user_id=MEMBER, project_id=PROJECT, user_tags=["public", TAG])
    nobody = Person(client=client, tenant_id=TENANT)
    stranger = Person(client=client, tenant_id="somewhere else", user_id=USER)
    described = {
        "title": f"{CANARY} title",
        "source_uri": f"https://example.com/{CANARY}",
        "domain": f"{CANARY} domain",
        "doc_type": f"{CANARY} kind",
        "provenance_id": f"{CANARY} provenance",
        "task_id": f"{CANARY} task",
        "metadata": {f"{CANARY} key": [f"{CANARY} value", {"nested": CANARY}]},
    }
    text = f"# The {CANARY} heading\n\nA {CANARY} sings in the harbour.\n\n" * 3
    found = [
        count(mara.ingest(f"{CANARY}/{scope}/{tag}", f"{text}{scope}", scope=scope, tags=[tag], **described))
        for scope in ("user", "project", "public")
        for tag in ("public", TAG)
    ]
    ids = [response.json()["document_id"] for response in found if response.status_code == 201]
    # Unchanged, changed, retagged, with control characters and the like, too long, not allowed, not JSON.
    count(mara.ingest(f"{CANARY}/user/public", f"{text}user", scope="user", tags=["public"], **described))
    count(mara.ingest(f"{CANARY}/user/public", f"{text}changed", scope="user", tags=["public"], **described))
    count(mara.ingest(f"{CANARY}/user/public", f"{text}changed", scope="user", tags=[TAG], **described))
    count(mara.ingest(f"{CANARY}/user/{TAG}", text, scope="user", tags=[f"{CANARY}-unheld"]))
    for content in (f"{CANARY} \x00", f"{CANARY} \\ud800", f"{CANARY} \x01\x1b", "", f"{CANARY} " * 1000):
        count(mara.ingest(f"{CANARY}/odd", content, scope="user"))
    for value in ("\x00", "\ud800", 10**400, [[[[]]]] * 9, CANARY * 10_000):
        with contextlib.suppress(UnicodeEncodeError):
            count(mara.ingest(f"{CANARY}/odd", f"{CANARY} odd", scope="user", metadata={CANARY: value}))
    count(mara.ingest(f"{CANARY}/odd", f"{CANARY} odd", scope="user", metadata={f"{CANARY}\x00": 1}))
    for source in (f"{CANARY}" * 100, f"{CANARY}\n", f"{CANARY}\x00", f"{CANARY}' or 1=1 --", f"../{CANARY}"):
        count(mara.ingest(source, f"{CANARY} source", scope="user"))
    count(mara.ingest(CANARY, f"{CANARY} language", scope="user", language="xx"))
    count(nobody.ingest(CANARY, f"{CANARY} of nobody", scope="user"))
    count(stranger.ingest(f"{CANARY}/user/public", f"{text}user", scope="user"))
    questions = (
        *(CANARY, f"where does the {CANARY} sing?", f"{CANARY}' & | ! <-> ( ) :*", f"to_tsquery('{CANARY}')"),
        *(f"\x00{CANARY}", f"{CANARY} " * 3000, f"{CANARY} \\ \" ' $$ ; -- /*"),
    )
    for person in (mara, jonas, nobody, stranger):
        for question in questions:
            count(person.ask(question))
            count(person.ask(question, generate=False, top_k=100))
    for scope in ("public", "user", "project", "organization", "documents", CANARY):
        count(mara.ask(CANARY, scope=scope, document_ids=ids[:2]))
    count(mara.ask(CANARY, scope="documents", document_ids=[f"{CANARY}/user/public", f"{CANARY}/missing"]))
    count(mara.ask(CANARY, model=CANARY))
    count(mara.ask(CANARY, chat_history=[{"role": "user", "content": f"{CANARY} before"}]))
    member = f"/rag/projects/{PROJECT}/members/{MEMBER}"
    asserted = {"tenant_id": TENANT, "user_id": str(USER)}
    for may_write in (False, True):
        count(client.put(member, json={"tenant_id": TENANT, "user_id": USER, "may_write": may_write}))
    count(client.get(f"/rag/projects/{PROJECT}/members", params=asserted))
    count(jonas.ask(CANARY, generate=False))
    count(client.delete(member, params=asserted))
    count(client.delete(member, params=asserted))
    for person in (mara, jonas, nobody, stranger):
        for identifier in (*ids, uuid4(), CANARY):
            count(person.read(identifier))
    for person in (stranger, nobody, jonas, mara):
        count(person.delete(ids[0]))
    count(mara.ingest(f"{CANARY}/user/public", f"{text}again", scope="user", tags=["public"]))
    with deployment.connect("rag_operator") as operator:
        asked = Principal(tenant_id=TENANT, user_id=USER, project_id=PROJECT, tags=(TAG,))
        explained = asdict(asked) | {"tags": [TAG], "document_id": UUID(ids[1])}
        operator.execute(query("explain_access"), explained).fetchall()
        for subject in (
            Subject(tenant_id=TENANT, source_id=f"{CANARY}/project/public"),
            Subject(tenant_id=TENANT, project_id=PROJECT, user_id=USER),
            Subject(tenant_id=TENANT, user_id=MEMBER),
        ):
            for name in ("count_traces", "forget", "count_traces"):
                operator.execute(query(name), asdict(subject)).fetchall()
        operator.execute(query("expire_logs"), {"older_than": "365 days", "tenant_id": TENANT}).fetchall()
    return statuses


class Watch(threading.Thread):
    """Reads what the server tells of the sessions of others, over and over."""

    def __init__(self, deployment: Deployment, logins: list[str]) -> None:
        super().__init__(daemon=True)
        self._deployment, self._logins = deployment, logins
        self._ended = threading.Event()
        self.looks = 0
        self.seen: set[str] = set()

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(self._deployment.connect(login)) for login in self._logins]
            while not self._ended.is_set():
                for connection in connections:
                    for view in ("pg_stat_activity", "pg_locks", "pg_prepared_statements", "pg_cursors"):
                        rows = connection.execute(f"select entry::text from {view} as entry")
                        self.seen |= {row[0] for row in rows if "entry::text" not in row[0]}
                self.looks += 1

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What was left and seen after everything was used."""

    site: Site
    statuses: Mapping[int, int]
    watch: Watch


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    settings = Settings(_env_file=None, rag_llm_provider="extractive", rag_log_query_text=True)
    analyst = f"anna_{secrets.token_hex(4)}"
    everybody = ["rag_app", "rag_publisher", "rag_operator", "postgres", analyst]
    with new_site() as site, analyst_logins(site.deployment, [analyst]), running(site.deployment, settings) as client:
        with Watch(site.deployment, everybody) as watch:
            statuses = use_everything(client, site.deployment)
        yield Traces(site=site, statuses=statuses, watch=watch)


def test_everything_was_used(traces: Traces) -> None:
    """Otherwise the silence below says nothing: the word is in the tables, and requests of each kind were answered."""
    assert {200, 201, 204, 403, 404, 422} <= set(traces.statuses)
    assert traces.statuses[201] >= 8
    assert traces.statuses[200] >= 40
    assert not any(status >= 500 for status in traces.statuses), traces.statuses
    holding = set()
    with traces.site.deployment.cluster.superuser("palisade") as superuser:
        for table in protected_tables(superuser):
            if column(superuser, f"select count(*) from rag.{table} as entry where entry::text ~ %s", (CANARY,)) != [0]:
                holding.add(table)
    assert holding >= {"rag_documents", "rag_chunks", "rag_access_classes", "rag_query_logs", "rag_erasures"}
    assert traces.watch.looks >= 20
    assert any("rag.search" in seen for seen in traces.watch.seen)
    assert any("begin_as" in seen for seen in traces.watch.seen)


def test_no_session_sees_a_word_of_another(traces: Traces, figure: Figure) -> None:
    """Statements carry their values apart; the same login would see them otherwise, and so would an administrator."""
    assert [seen for seen in traces.watch.seen if CANARY in seen.lower() or str(USER) in seen] == []
    figure(f"{traces.watch.looks} looks at pg_stat_activity, pg_locks and the like: 0 words")


def test_no_catalog_holds_a_word(traces: Traces, figure: Figure) -> None:
    """Names of objects, their definitions and comments, defaults of roles, statistics: as a superuser reads them."""
    with traces.site.deployment.cluster.superuser("palisade") as superuser:
        superuser.execute("analyze")
        relations = column(
            superuser,
            """
            select relation.oid::regclass::text
            from pg_class as relation
            join pg_namespace as namespace on namespace.oid = relation.relnamespace
            where namespace.nspname in ('pg_catalog', 'information_schema')
                and relation.relkind in ('r', 'v')
                -- Configuration files, which embedded.py writes before there is a word.
                and relation.relname not in ('pg_hba_file_rules', 'pg_ident_file_mappings', 'pg_file_settings')
                -- The reader's own memory; and what is absent on most machines.
                and relation.relname <> 'pg_backend_memory_contexts'
                and relation.relname not like '%numa%'
            order by 1
            """,
        )
        telling = [
            relation
            for relation in relations
            if column(
                superuser,
                f"select count(*) from {relation} as entry where entry::text ~* any(%s)",
                ([CANARY, str(USER)],),
            )
            != [0]
        ]
    assert len(relations) > 150
    # Numbers of users choose plans; nobody but a superuser reads these two.
    assert set(telling) <= {"pg_statistic", "pg_stats"}
    with traces.site.deployment.cluster.superuser("palisade") as superuser:
        for relation in telling:
            statement = f"select count(*) from {relation} as entry where entry::text ~* %s"
            assert column(superuser, statement, (CANARY,)) == [0]
    figure(f"{len(relations)} catalogs and views of the server: 0 words")


@pytest.mark.parametrize("login", ["rag_app", "rag_publisher", "rag_operator"])
def test_no_login_reads_a_statistic(traces: Traces, login: str) -> None:
    with traces.site.deployment.connect(login) as connection:
        for view in ("pg_stats", "pg_stats_ext", "pg_stats_ext_exprs"):
            statement = f"select count(*) from {view} where schemaname = 'rag' and tablename like 'rag\\_%%'"
            assert column(connection, statement) == [0]


def test_the_log_holds_no_word(traces: Traces) -> None:
    """Of what was refused it has the statement, at most, whose values are apart from it."""
    with (
        traces.site.deployment.cluster.superuser("palisade") as superuser,
        pytest.raises(psycopg.errors.UndefinedTable),
    ):
        superuser.execute("select 1 from a_table_that_is_missing")
    logged = traces.site.log.read_text(encoding="utf-8", errors="replace")
    assert "STATEMENT:  select 1 from a_table_that_is_missing" in logged
    lines = [line for line in logged.splitlines() if CANARY in line.lower() or str(USER) in line]
    assert lines == []


def test_a_word_inside_of_a_statement_would_have_been_seen(foreign: Foreign) -> None:
    with Watch(foreign.deployment, ["rag_app"]) as watch, foreign.deployment.connect() as connection:
        connection.execute(f"select pg_sleep(0.5), '{CANARY}'")
    assert any(CANARY in seen for seen in watch.seen)


def test_a_statistic_of_a_word_would_have_been_found(foreign: Foreign) -> None:
    superuser = foreign.deployment.cluster.superuser(foreign.deployment.name)
    with superuser, superuser.transaction(force_rollback=True):
        superuser.execute("alter table rag.rag_documents alter column title set statistics 100")
        superuser.execute("update rag.rag_documents set title = %s", (CANARY,))
        superuser.execute("analyze rag.rag_documents")
        statement = "select count(*) from pg_stats as entry where entry::text ~ %s"
        assert column(superuser, statement, (CANARY,)) == [1]


# --- what an error says ---------------------------------------------------------------------------

OWNER = Principal(tenant_id=TENANT, user_id=USER, project_id="*", tags=("public", TAG))
ASKER = Principal(tenant_id=TENANT, user_id=1, project_id="*")
NAMESAKE = Principal(tenant_id="umbra", user_id=USER, project_id="*", tags=("public", TAG))


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """A row of the owner's, and one of the asker's own."""

    deployment: Deployment
    access_id: int
    document_id: UUID
    own_access_id: int
    own_document_id: UUID


@pytest.fixture(scope="module")
def foreign(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Foreign]:
    with new_deployment() as clone:
        rows = {}
        for principal, word in ((OWNER, CANARY), (ASKER, "sparrow"), (NAMESAKE, "sparrow")):
            with clone.transaction(principal) as connection:
                scope = ("project", PROJECT) if principal is OWNER else ("user", None)
                tags = [TAG] if principal is OWNER else list(principal.tags)
                (access_id,) = column(
                    connection, "select access_class(%s, %s, %s, %s)", (scope[0], principal.user_id, scope[1], tags)
                )
                (document_id,) = column(
                    connection,
                    """
                    insert into rag_documents (tenant_id, access_id, scope, user_id, project_id, tags, source_type,
                        source_id, source_hash, title, body, metadata)
                    select tenant_id, access_id, scope, user_id, project_id, tags, %(word)s, %(word)s, %(word)s,
                        %(word)s, %(word)s, jsonb_build_object('word', %(word)s::text)
                    from my_classes() where access_id = %(access)s
                    returning id
                    """,
                    {"word": word, "access": access_id},
                )
                connection.execute(
                    INSERT_CHUNK, {"tenant": principal.tenant_id, "access": access_id, "id": document_id, "word": word}
                )
                rows[principal.tenant_id, principal.user_id] = access_id, document_id
        access_id, document_id = rows[TENANT, USER]
        own_access_id, own_document_id = rows[TENANT, 1]
        yield Foreign(
            deployment=clone,
            access_id=access_id,
            document_id=document_id,
            own_access_id=own_access_id,
            own_document_id=own_document_id,
        )


INSERT_CHUNK = f"""
    insert into rag_chunks (tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
        token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count)
    values (%(tenant)s, %(access)s, %(id)s, 0, %(word)s, %(word)s, 1, %(word)s, 0, 3, '{unit_vector(1.0)}',
        %(word)s, to_tsvector('simple', %(word)s), 1)
"""
INSERT_DOCUMENT = """
    insert into rag_documents (tenant_id, access_id, id, scope, user_id, tags, source_type, source_id, source_hash,
        title, body, language)
    values ({tenant}, {access}, {id}, 'user', 1, '{{public}}', 'sparrow', {source}, 'x', {title}, 'x', {language})
"""


def document(**values: str) -> str:
    """An insert of the asker's own document, but for these values in SQL."""
    usual = {
        "tenant": "%(tenant)s",
        "access": "%(own_access)s",
        "id": "gen_random_uuid()",
        "source": "'another'",
        "title": "'x'",
        "language": "null",
    }
    return INSERT_DOCUMENT.format(**usual | values)


# What goes wrong on rows of others, or on one's own while theirs are there; with the SQLSTATE.
CLOSE = "select close_sources(array[%s]::bigint[], array['x'], array[null], array[null]::uuid[], 'x')"
PROVOKED: Mapping[str, tuple[str, str]] = {
    "a foreign class": ("42501", document(access="%(access)s")),
    "a foreign tenant": ("42501", document(tenant="'umbra'")),
    "a source that is there": ("23505", document(source="'sparrow'")),
    "an id that is there": ("23505", document(id="%(own_id)s")),
    "no title": ("23502", document(title="null")),
    "a language that is none": ("23514", document(language="'xyz'")),
    "a long source": ("23514", document(source="repeat('x', 600)")),
    "a chunk of a foreign document": (
        "23503",
        INSERT_CHUNK.replace("%(access)s", "%(own_access)s").replace("%(word)s", "'x'"),
    ),
    "a chunk in a foreign class": ("42501", INSERT_CHUNK.replace("%(word)s", "'x'")),
    "a chunk without direction": (
        "23514",
        INSERT_CHUNK.replace("%(access)s", "%(own_access)s").replace("[1.0,", "[0,").replace("%(word)s", "'x'"),
    ),
    "a chunk of another width": (
        "22000",
        INSERT_CHUNK.replace(unit_vector(1.0), "[1,2,3]").replace("%(word)s", "'x'"),
    ),
    "a question for another": (
        "23503",
        "insert into rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index, score, cited)"
        " values (%(tenant)s, gen_random_uuid(), 1, 1, %(id)s, 0, 0, false)",
    ),
    "a class of another": ("42501", "select access_class('user', %(user)s, null, '{public}')"),
    "a project of another": ("42501", "select access_class('project', %(user)s, %(project)s, '{public}')"),
    "a foreign tombstone": ("42501", "select bury_source(%(access)s, 'x', 'x', 'x')"),
    "a missing tombstone": ("42501", "select bury_source(1, 'x', 'x', 'x')"),
    "a foreign retraction": ("42501", CLOSE % "%(access)s"),
    "a missing retraction": ("42501", CLOSE % "1"),
    "a share with oneself": ("23514", "select share_project('x', 1, true)"),
    "a share of nothing": ("23502", "select share_project(null, 2, true)"),
    "another principal": ("42501", "select begin_as(%(tenant)s, %(user)s, null, '{}', 'x')"),
    "a proof": ("28000", "select load_service_keys('x')"),
    "a column": ("42501", "select title from rag_documents"),
    "a table": ("42501", "select 1 from rag_access_classes"),
    "a number from a title": ("22P02", "select title::int from my_documents()"),
    "a number from metadata": ("22023", "select metadata::int from my_documents()"),
    "a date from a tag": ("22007", "select tags[1]::date from my_documents()"),
    "a division": ("22012", "select 1 / (length(title) - 7) from my_documents()"),
    "a long text": ("54000", "select repeat(title, 400000000) from my_documents()"),
    "a regular expression": ("2201B", "select 1 from my_documents() where '(' ~ ('(' || left(title, 0))"),
    "a scope": ("22023", "select 1 from search('x', scope => 'x')"),
    "a copy": ("0A000", "copy rag_documents (tenant_id) from stdin"),
    "a read-only transaction": ("25006", "set transaction read only; select bury_source(1, 'x', 'x', 'x')"),
    "a time limit": ("57014", "set local statement_timeout = 1; select pg_sleep(1), count(*) from my_documents()"),
    "a lock": (
        "55P03",
        "set local lock_timeout = 1; select pg_advisory_xact_lock(4711), count(*) from my_documents()",
    ),
    "a stack": ("54001", "select (repeat('[', 100000))::jsonb from my_documents()"),
    "row security": ("42501", "set local row_security = off; select 1 from my_documents()"),
}


def ask(deployment: Deployment, statement: str, values: Mapping[str, object]) -> None:
    """Run a statement as the asker, after others that are in front of it."""
    with deployment.transaction(ASKER) as connection:
        *before, last = statement.split("; ")
        for each in before:
            connection.execute(each)
        connection.execute(last, values or None)


@pytest.mark.parametrize("name", PROVOKED)
def test_an_error_says_nothing_of_foreign_rows(foreign: Foreign, name: str) -> None:
    """Neither message, detail, hint nor context; and nothing of one's own row that constraints were checked on."""
    state, statement = PROVOKED[name]
    values = {
        "tenant": TENANT,
        "user": USER,
        "project": PROJECT,
        "access": foreign.access_id,
        "id": foreign.document_id,
        "own_access": foreign.own_access_id,
        "own_id": foreign.own_document_id,
    }
    used = {key: value for key, value in values.items() if f"%({key})s" in statement}
    with foreign.deployment.connect() as holder, holder.transaction(force_rollback=True):
        holder.execute("select pg_advisory_xact_lock(4711)")
        with pytest.raises(psycopg.Error) as caught:
            ask(foreign.deployment, statement, used)
    assert caught.value.sqlstate == state, caught.value
    told = {
        part: getattr(caught.value.diag, part)
        for part in ("message_primary", "message_detail", "message_hint", "context", "internal_query")
    }
    said = str(told).lower()
    assert CANARY not in said
    assert str(USER) not in said
    assert str(foreign.access_id) not in said
    assert str(foreign.document_id) not in said
    if state.startswith("23"):
        assert told["message_detail"] in (
            None,
            'Key is not present in table "rag_documents".',
            'Key is not present in table "rag_query_logs".',
        )


def test_each_kind_of_error_is_provoked() -> None:
    assert {state for state, _ in PROVOKED.values()} >= {
        *("42501", "23502", "23503", "23505", "23514", "28000", "22000", "22007", "22012", "22023", "22P02"),
        *("2201B", "54000", "54001", "57014", "55P03", "0A000", "25006"),
    }


def test_a_lock_is_named_by_a_number(foreign: Foreign) -> None:
    """pg_locks is everybody's to read; whoever writes in a tenant appears there as a hash."""
    with foreign.deployment.transaction(ASKER) as writer:
        writer.execute("select access_class('user', 1, null, '{public}')")
        with foreign.deployment.connect("rag_operator") as reader:
            locks = column(reader, "select lock::text from pg_locks as lock where locktype = 'advisory'")
    assert len(locks) == 1
    assert CANARY not in locks[0]
