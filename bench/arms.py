"""The databases of the speed bench, the ways to ask them, and what would be right; `speed.py` measures with it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg import sql

from bench import corpus as generated
from bench.corpus import Chunks, Corpus, Question
from rag import deployment, embedded, migrate
from rag.frozen import digest
from rag.principal import Principal
from rag.resources import query, sql_folder
from rag.sign import Signer
from rag.store import halfvec

# Of a server with 8 GB for itself. All else is as the product's embedded database has it.
SERVER_SETTINGS = {
    "shared_buffers": "3GB",
    "effective_cache_size": "8GB",
    "maintenance_work_mem": "2GB",
    "max_wal_size": "16GB",
    # It would run in the midst of a measurement; tables are vacuumed and analysed once they are loaded.
    "autovacuum": "off",
}

TOP = 10
# The usual way, as tutorials have it: 60 by Cormack, Clarke and Büttcher, 50 candidates an arm, ef_search 40.
USUAL_RRF_K = 60
USUAL_DEPTH = 50

Result = list[tuple[Any, ...]]


def say(text: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


# --- databases -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """A loaded corpus."""

    server: embedded.EmbeddedPostgres
    database: str
    corpus: Corpus
    signer: Signer
    seconds: dict[str, float]
    """How long loading and each kind of index took."""

    def connect(self, role: str, *, limit_s: float | None = None) -> psycopg.Connection:
        connection = psycopg.connect(self.server.url(role, self.database), autocommit=True, prepare_threshold=None)
        connection.execute("set search_path = rag, pg_temp")
        connection.execute("set idle_in_transaction_session_timeout = 0")
        connection.execute(sql.SQL("set statement_timeout = {}").format(int((limit_s or 0) * 1000)))
        return connection

    def value(self, statement: str, *parameters: object) -> Any:
        """The first value that a superuser gets."""
        with self.connect("postgres") as connection:
            row = connection.execute(statement.encode(), parameters).fetchone()
        return None if row is None else row[0]


@contextlib.contextmanager
def serving(home: Path | None) -> Iterator[embedded.EmbeddedPostgres]:
    """A server with SERVER_SETTINGS; without a home it is gone at the end, with one it is stopped."""
    with contextlib.ExitStack() as stack:
        if home is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="palisade-bench-"))) / "home"
            stack.callback(embedded.remove, home)
        else:
            stack.callback(embedded.stop, home)
        server = embedded.start(home, durable=False)
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            for name, value in SERVER_SETTINGS.items():
                connection.execute(sql.SQL("alter system set {} = {}").format(sql.Identifier(name), value))
        embedded.stop(home)
        yield embedded.start(home, durable=False)


def prepare(
    server: embedded.EmbeddedPostgres, *, chunks: int, seed: int, refresh: bool = False, rebuild: bool = False
) -> Place:
    """The database of a corpus, loaded unless it is there already.

    refresh: put the functions of sql/schema into it. rebuild: make all of the schema anew and load it; the table of
    the usual way, whose index takes longest, stays.
    """
    corpus = Corpus(chunks=chunks, seed=seed)
    name = f"speed_{chunks}_{seed}"
    record = server.home / f"{name}.json"
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        if not record.exists():
            connection.execute(sql.SQL("drop database if exists {}").format(sql.Identifier(name)))
            connection.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    seconds: dict[str, float] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if rebuild and seconds:
        _drop_schema(server, name)
        for step in ("load", "own indexes"):
            seconds.pop(step, None)
        # Whatever happens from here on, the next run must not take an empty schema for a loaded one.
        record.write_text(json.dumps(seconds), encoding="utf-8")
    if "load" not in seconds:
        verifiers = {role: embedded.scram_verifier(server.password(role)) for role in deployment.LOGIN_ROLES}
        migrate.bootstrap(server.url("postgres", name), verifiers)
        migrate.upgrade(server.url("rag_migrator", name), dimensions=generated.DIMENSIONS)
    signer = Signer.parse(deployment.add_signing_key(server.url("rag_operator", name)))
    place = Place(server=server, database=name, corpus=corpus, signer=signer, seconds=seconds)
    steps: list[tuple[str, Callable[[Place], bool]]] = [
        ("load", load),
        ("usual: table", make_usual_table),
        ("usual: HNSW", make_usual_hnsw),
        ("usual: GIN", make_usual_gin),
    ]
    for step, run in steps:
        _timed(place, step, run, record)
    if refresh:
        refresh_functions(place)
        place.seconds.pop("own indexes", None)
    _timed(place, "own indexes", maintain, record)
    check_visible(place)
    return place


def _drop_schema(server: embedded.EmbeddedPostgres, database: str) -> None:
    """Everything of the product; the extension, which the usual way's table needs, is put back for its bootstrap."""
    with psycopg.connect(server.url("postgres", database)) as connection:
        connection.execute("alter extension vector set schema usual")
        connection.execute("drop schema rag cascade")
        connection.execute("create schema rag authorization rag_owner")
        connection.execute("alter extension vector set schema rag")


def _timed(place: Place, step: str, run: Callable[[Place], bool], record: Path) -> None:
    """Run a step that was not done yet; it is written down as done when it says so."""
    if step in place.seconds:
        return
    say(f"{place.database}: {step}")
    started = time.perf_counter()
    if run(place):
        place.seconds[step] = time.perf_counter() - started
        say(f"{place.database}: {step} took {place.seconds[step]:.0f} s")
        record.write_text(json.dumps(place.seconds), encoding="utf-8")


def load(place: Place) -> bool:
    corpus = place.corpus
    tenants = {scope.access_id: scope.tenant_id for scope in corpus.scopes}
    scopes = {scope.access_id: scope for scope in corpus.scopes}
    with place.connect("postgres") as connection, connection.cursor() as cursor:
        # No foreign key is looked up for a row: classes and documents come first. Checks hold.
        cursor.execute("set session_replication_role = replica")
        cursor.executemany(
            "insert into rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest)"
            " values (%s, %s, %s, %s, %s, '{public}', sha256(convert_to('[\"public\"]', 'UTF8')))",
            [(one.tenant_id, one.access_id, one.scope, one.user_id, one.project_id) for one in corpus.scopes],
        )
        for wave in range(generated.WAVES):
            rows = corpus.wave(wave)
            with cursor.copy(
                "copy rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type,"
                " source_id, source_hash, language, title, body) from stdin"
            ) as copy:
                for row in np.flatnonzero(rows.places == 0):
                    scope = scopes[int(rows.access_ids[row])]
                    identifier = str(generated.uuid_of(rows.document_ids[row]))
                    # The body is never read by a search.
                    copy.write_row(
                        (
                            *(scope.tenant_id, identifier, scope.access_id, scope.scope, scope.user_id),
                            *(scope.project_id, ["public"], "text", identifier, "generated", generated.LANGUAGE),
                            *(f"Document {identifier[:8]}", "generated"),
                        )
                    )
            with cursor.copy(
                sql.SQL("copy rag_chunks ({}) from stdin (format binary)").format(
                    sql.SQL(", ").join(map(sql.Identifier, generated.CHUNK_COLUMNS))
                )
            ) as copy:
                copy.write(generated.COPY_HEADER)
                for line in corpus.copied(rows, tenants):
                    copy.write(line)
                copy.write(generated.COPY_TRAILER)
        cursor.execute("vacuum (analyze, freeze) rag_documents, rag_chunks, rag_access_classes")
    return True


def make_usual_table(place: Place) -> bool:
    """Chunks as most people store them: scope, owner and project in each row, no classes."""
    with place.connect("postgres") as connection:
        connection.execute("drop schema if exists usual cascade")
        connection.execute("create schema usual")
        connection.execute(
            """
            create table usual.chunks as
            select
                chunk.id, chunk.tenant_id, class.scope, class.user_id, class.project_id, chunk.document_id,
                chunk.chunk_index, chunk.chunk_text, chunk.embedding, chunk.tsv
            from rag_chunks as chunk
            join rag_access_classes as class using (tenant_id, access_id)
            """
        )
        connection.execute("alter table usual.chunks alter embedding set storage plain, alter tsv set storage main")
        connection.execute("alter table usual.chunks add primary key (id)")
        # Under its first column for the one policy, under all of them for the other, which is written as they are.
        connection.execute("create index on usual.chunks (tenant_id, (scope || ''), (user_id + 0))")
        connection.execute("alter table usual.chunks enable row level security")
        for role, scope, user in (("rag_app", "scope", "user_id"), ("rag_publisher", "(scope || '')", "(user_id + 0)")):
            connection.execute(
                f"""
                create policy {role} on usual.chunks for select to {role} using (
                    tenant_id = current_setting('app.tenant_id')
                    and ({scope} = 'public' or {user} = cast(current_setting('app.user_id') as bigint))
                )
                """.encode()
            )
            connection.execute(f"grant usage on schema usual to {role}".encode())
            connection.execute(f"grant select on usual.chunks to {role}".encode())
        connection.execute("vacuum (analyze, freeze) usual.chunks")
    return True


def make_usual_hnsw(place: Place) -> bool:
    with place.connect("postgres") as connection:
        connection.execute("create index chunks_vector on usual.chunks using hnsw (embedding halfvec_cosine_ops)")
    return True


def make_usual_gin(place: Place) -> bool:
    with place.connect("postgres") as connection:
        connection.execute("create index chunks_words on usual.chunks using gin (tsv)")
    return True


def maintain(place: Place) -> bool:
    """Have large classes get their indexes."""
    program = Path(sys.executable).with_name("rag")
    urls = {
        "RAG_DATABASE_URL": place.server.url("rag_app", place.database),
        "RAG_OPERATOR_DATABASE_URL": place.server.url("rag_operator", place.database),
        "RAG_MIGRATION_DATABASE_URL": place.server.url("rag_migrator", place.database),
        "RAG_SIGNING_KEY": f"{place.signer.key_id}.{place.signer.secret.hex()}",
    }
    subprocess.run([program, "maintain"], env=os.environ | urls, stdout=sys.stderr, check=True)
    with place.connect("postgres") as connection:
        connection.execute("vacuum (analyze)")
    return True


def refresh_functions(place: Place) -> None:
    """Put the functions of sql/schema in the place of those that the database has; tables must not have changed."""
    files = {path.name: path.read_text(encoding="utf-8") for path in sorted((sql_folder() / "schema").glob("*.sql"))}
    tables = set(re.findall(r"^create table (\w+)", "".join(files.values()), re.MULTILINE))
    with place.connect("postgres") as connection:
        there = {
            name
            for (name,) in connection.execute("select relname from pg_class where relnamespace = 'rag'::regnamespace")
        }
        if not tables <= there:
            sys.exit(f"{place.database} lacks {', '.join(sorted(tables - there))}: --rebuild makes it anew")
        with connection.transaction():
            for name, text in files.items():
                functions = re.findall(r"^create function (\w+)", text, re.MULTILINE)
                if not functions or re.search(r"^create (table|view|policy)", text, re.MULTILINE):
                    continue
                # What only searching and maintaining need is dropped, since its columns may have changed; policies
                # and views depend on the others.
                dropped = re.match(r"(38|40|42)_", name) is not None
                if dropped:
                    _drop_functions(connection, functions)
                    for type_name in re.findall(r"^create type (\w+)", text, re.MULTILINE):
                        connection.execute(f"drop type if exists {type_name} cascade".encode())
                    connection.execute("set local role rag_owner")
                else:
                    text = re.sub(r"^create function", "create or replace function", text, flags=re.MULTILINE)
                connection.execute(text.encode())
                connection.execute("reset role")
            connection.execute(files["60_grants.sql"].encode())
            # What the service compares when it starts.
            known = f"0001_initial={digest('0001_initial.up.sql')}"
            connection.execute(sql.SQL("comment on table alembic_version is {}").format(known))
    say(f"{place.database}: functions are those of sql/schema")


def _drop_functions(connection: psycopg.Connection, names: Sequence[str]) -> None:
    found = connection.execute(
        "select cast(oid as regprocedure) from pg_proc where pronamespace = 'rag'::regnamespace and proname = any(%s)",
        (list(names),),
    ).fetchall()
    for (signature,) in found:
        connection.execute(f"drop function if exists {signature} cascade".encode())


def check_visible(place: Place) -> None:
    with place.connect("rag_app") as connection:
        for reader in place.corpus.readers:
            with connection.transaction():
                begin(connection, place, reader.principal)
                row = connection.execute("select count(*) from rag.rag_chunks").fetchone()
            if row is None or row[0] != reader.visible:
                sys.exit(f"{reader.name}: sees {row} rows, {reader.visible} were made")


def begin(connection: psycopg.Connection, place: Place, principal: Principal, *, role: str = "rag_app") -> None:
    connection.execute(
        query("begin_as").encode(),
        {
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "project_id": principal.project_id,
            "tags": list(principal.tags),
            "signature": place.signer.sign(principal, role=role),
        },
    )


# --- arms ----------------------------------------------------------------------------------------

# document_id and chunk_index come first in every arm.
OURS = """
select document_id, chunk_index, rank, score, title, chunk_text, keyword_score, cosine, token_count
from rag.search(
    question => %(question)s,
    embedding => cast(%(embedding)s as halfvec),
    embedding_model => %(model)s,
    top_k => 10,
    arms => '{arms}'
)
"""

USUAL = f"""
with question as materialized (
    select
        cast(%(embedding)s as halfvec) as embedding,
        cast(replace(cast(plainto_tsquery('english', %(question)s) as text), '&', '|') as tsquery) as words
),
matching as (
    select id, row_number() over (order by relevance desc) as place
    from (
        select chunk.id, ts_rank_cd(chunk.tsv, question.words) as relevance
        from usual.chunks as chunk
        join question on chunk.tsv @@ question.words
        order by relevance desc
        limit {USUAL_DEPTH}
    ) as best
),
nearest as (
    select id, row_number() over (order by distance) as place
    from (
        select chunk.id, chunk.embedding <=> cast(%(embedding)s as halfvec) as distance
        from usual.chunks as chunk
        order by distance
        limit {USUAL_DEPTH}
    ) as best
)
select
    chunk.document_id,
    chunk.chunk_index,
    coalesce(1.0 / ({USUAL_RRF_K} + matching.place), 0) + coalesce(1.0 / ({USUAL_RRF_K} + nearest.place), 0) as score,
    chunk.chunk_text
from matching
full join nearest using (id)
join usual.chunks as chunk using (id)
order by score desc, chunk.id
limit {TOP}
"""

USUAL_VECTOR = f"""
select document_id, chunk_index
from usual.chunks
order by embedding <=> cast(%(embedding)s as halfvec)
limit {TOP}
"""


class Arm:
    """One way to ask, on a connection of its own; `spent` are seconds by question, one for each round."""

    def __init__(
        self,
        name: str,
        place: Place,
        statement: str,
        *,
        secured: bool = True,
        role: str = "rag_app",
        limit_s: float,
    ) -> None:
        self.name = name
        self.place = place
        self.statement = statement.encode()
        self.secured = secured
        self.role = role
        self.limit_s = limit_s
        self.connection = place.connect(role if secured else "postgres", limit_s=limit_s)
        self.spent: dict[int, list[float]] = {}
        self.cut_offs = 0

    @contextlib.contextmanager
    def speaking(self, principal: Principal) -> Iterator[None]:
        """A transaction of the principal, undone at the end."""
        with contextlib.suppress(psycopg.errors.QueryCanceled), self.connection.transaction(force_rollback=True):
            if not self.secured:
                _switch_row_security_off(self.connection)
            begin(self.connection, self.place, principal, role=self.role)
            yield

    def ask(self, question: Question) -> tuple[Result, float]:
        started = time.perf_counter()
        found = self.connection.execute(self.statement, self.parameters(question)).fetchall()
        return found, time.perf_counter() - started

    def parameters(self, question: Question) -> dict[str, Any]:
        return {"question": question.text, "embedding": halfvec(question.vector.tolist()), "model": generated.MODEL}

    def close(self) -> None:
        self.connection.close()

    # Medians of each question first, so that a disturbance counts once.
    def per_question_ms(self) -> list[float]:
        return [statistics.median(values) * 1000 for values in self.spent.values()]

    def all_ms(self) -> list[float]:
        return [value * 1000 for values in self.spent.values() for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A number in a function that trades time for right rows, `shipped` as it stands there."""

    function: str
    text: str
    shipped: int
    values: tuple[int, ...]
    mode: str
    """The arms that show it."""


TURNS = {
    "keyword budget": Turn(
        function="keyword_candidates",
        text="budget constant bigint := {} *",
        shipped=2000,
        values=(500, 1000, 2000, 4000, 8000),
        mode="hybrid",
    ),
    "breadth of the graph": Turn(
        function="search", text="greatest({}, 2 * depth)", shipped=400, values=(50, 100, 200, 400, 800), mode="vector"
    ),
}


class Turned(Arm):
    """Ours with another number in a function, replaced in a transaction that is undone."""

    def __init__(self, place: Place, turn: Turn, value: int, *, limit_s: float) -> None:
        super().__init__(str(value), place, OURS.format(arms=turn.mode), secured=False, limit_s=limit_s)
        text = place.value(
            "select pg_get_functiondef(oid) from pg_proc where proname = %s and pronamespace = 'rag'::regnamespace",
            turn.function,
        )
        assert text.count(turn.text.format(turn.shipped)) == 1
        self._function = text.replace(turn.text.format(turn.shipped), turn.text.format(value)).encode()

    @contextlib.contextmanager
    def speaking(self, principal: Principal) -> Iterator[None]:
        with contextlib.suppress(psycopg.errors.QueryCanceled), self.connection.transaction(force_rollback=True):
            self.connection.execute(self._function)
            self.connection.execute("set local session authorization rag_app")
            begin(self.connection, self.place, principal)
            yield


class Filtered(Arm):
    """langchain-postgres with a metadata filter on the usual table, the vector alone, as the table's owner."""

    def __init__(self, place: Place, python: Path, *, limit_s: float) -> None:
        super().__init__("filtered", place, "", limit_s=limit_s)
        self._asker = subprocess.Popen(
            [python, Path(__file__).parent / "peers" / "filtered.py", "usual", "chunks", str(round(limit_s * 1000))],
            # Without the variables of this venv.
            env={"PATH": os.environ["PATH"], "PEER_DATABASE_URL": place.server.url("postgres", place.database)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._filter: object = None

    @contextlib.contextmanager
    def speaking(self, principal: Principal) -> Iterator[None]:
        everybody, own = {"scope": {"$eq": "public"}}, {"user_id": {"$eq": principal.user_id}}
        self._filter = {"$and": [{"tenant_id": {"$eq": principal.tenant_id}}, {"$or": [everybody, own]}]}
        with contextlib.suppress(psycopg.errors.QueryCanceled):
            yield

    def ask(self, question: Question) -> tuple[Result, float]:
        assert self._asker.stdin is not None
        assert self._asker.stdout is not None
        asked = {"embedding": question.vector.tolist(), "filter": self._filter, "k": TOP}
        print(json.dumps(asked), file=self._asker.stdin, flush=True)
        answer = json.loads(self._asker.stdout.readline() or '{"error": "it ended"}')
        if "statement timeout" in answer.get("error", ""):
            raise psycopg.errors.QueryCanceled
        if "error" in answer:
            sys.exit(f"langchain-postgres: {answer['error']}")
        return [(UUID(hex=document), place) for document, place in answer["found"]], answer["spent_s"]

    def close(self) -> None:
        super().close()
        self._asker.communicate()


def _switch_row_security_off(connection: psycopg.Connection) -> None:
    """For the rest of the transaction, on every table; and speak as rag_app, which only a superuser can take back."""
    secured = connection.execute(
        "select cast(oid as regclass)::text from pg_class where relnamespace = 'rag'::regnamespace and relrowsecurity"
    ).fetchall()
    for (table,) in secured:
        connection.execute(f"alter table {table} disable row level security".encode())
    connection.execute("set local session authorization rag_app")


def arms_of(place: Place, *, langchain: Path | None, limit_s: float) -> dict[str, Arm]:
    """All of them; langchain-postgres where it is installed, by the Python of its venv."""
    arms = [
        Arm("ours", place, OURS.format(arms="hybrid"), limit_s=limit_s),
        Arm("bare", place, OURS.format(arms="hybrid"), secured=False, limit_s=limit_s),
        Arm("usual", place, USUAL, limit_s=limit_s),
        Arm("usual, indexed", place, USUAL, role="rag_publisher", limit_s=limit_s),
        Arm("keyword", place, OURS.format(arms="keyword"), limit_s=limit_s),
        Arm("vector", place, OURS.format(arms="vector"), limit_s=limit_s),
    ]
    if langchain is not None:
        arms.append(Filtered(place, langchain, limit_s=limit_s))
    return {arm.name: arm for arm in arms}


def keys(found: Result) -> list[tuple[str, int]]:
    """Rows as the truth has them."""
    return [(row[0].hex, row[1]) for row in found]


# --- truth ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """How rag.search() fuses. Read from its text, so that the truth follows where a constant is changed."""

    keyword_k: float
    vector_k: float
    keyword_weight: float
    vector_weight: float
    arm_depth: int = 50
    max_per_document: int = 3

    @classmethod
    def of(cls, place: Place) -> Fusion:
        text = place.value("select prosrc from pg_proc where oid = 'rag.fuse_candidates'::regproc")
        share = place.value("select rag.vector_share(%s, %s, 'rank')", generated.MODEL, generated.LANGUAGE)
        k = dict(re.findall(r"(words|vectors)_k constant double precision := ([0-9.]+);", text))
        return cls(
            keyword_k=float(k["words"]), vector_k=float(k["vectors"]), keyword_weight=1 - share, vector_weight=share
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """The rows that belong among the TOP best of a question: those that score `least` or more, which ties allow."""

    scores: dict[tuple[str, int], float]
    """Of document and place in it: candidates only."""
    least: float
    count: int

    def share(self, found: Sequence[tuple[str, int]]) -> float:
        """The share of the right rows that were found; of equal scores any will do."""
        if not self.count:
            return 1.0
        return min(1.0, sum(self.scores.get(row, -np.inf) >= self.least for row in set(found)) / self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """What is right for a question when everything visible is read: by each arm and fused."""

    vector: Right
    keyword: Right
    fused: Right
    vector_uncapped: Right
    """However many of one document."""


def truths(rows: Chunks, questions: Sequence[Question], fusion: Fusion) -> list[Truth]:
    """BM25 (k1 1.2, b .75, Lucene's idf) and cosine of every row, in the float16 values that the database holds."""
    vectors = rows.vectors.astype(np.float32)
    norms = np.linalg.norm(vectors, axis=1)
    wanted = np.zeros(generated.VOCABULARY, dtype=bool)
    wanted[[word for question in questions for word in question.words]] = True
    where = np.flatnonzero(wanted[rows.tokens])
    pairs = rows.tokens[where].astype(np.int64) * len(rows) + np.searchsorted(rows.ends, where, side="right")
    pairs, occurrences = np.unique(pairs, return_counts=True)
    normal = 1.2 * (0.25 + 0.75 * rows.lengths / rows.lengths.mean())
    documents = [raw.tobytes().hex() for raw in rows.document_ids]
    ids = np.array([raw.tobytes() for raw in rows.ids], dtype="S16")

    def keyword_scores(words: Sequence[int]) -> NDArray[np.float64]:
        scores = np.zeros(len(rows))
        for word in words:
            low, high = np.searchsorted(pairs, [word * len(rows), (word + 1) * len(rows)])
            having = pairs[low:high] - word * len(rows)
            idf = np.log(1 + (len(rows) - len(having) + 0.5) / (len(having) + 0.5))
            scores[having] += idf * occurrences[low:high] * 2.2 / (occurrences[low:high] + normal[having])
        return scores

    def right(candidates: NDArray[np.int64], values: NDArray[Any], most: int) -> Right:
        """Of candidates, the best first, with the value of each; at most `most` of a document."""
        seen: dict[str, int] = {}
        scores: dict[tuple[str, int], float] = {}
        for row, value in zip(candidates.tolist(), values.tolist(), strict=True):
            seen[documents[row]] = seen.get(documents[row], 0) + 1
            if seen[documents[row]] <= most:
                scores[documents[row], int(rows.places[row])] = value
        best = sorted(scores.values(), reverse=True)[:TOP]
        # Sums of the same numbers in another order differ by less, different scores by more.
        return Right(scores=scores, least=best[-1] - 1e-7 if best else 0.0, count=len(best))

    def answer(question: Question) -> Truth:
        asked = question.vector.astype(np.float16).astype(np.float32)
        cosines = vectors @ asked / (norms * np.linalg.norm(asked))
        scores = keyword_scores(question.words)
        nearest = _largest(cosines, fusion.arm_depth, ids)
        matching = _largest(scores.round(9), fusion.arm_depth, ids)
        matching = matching[scores[matching] > 0]
        union = np.union1d(nearest, matching)
        # Equal scores share a rank, whatever the order in which they were summed up.
        worth = (fusion.keyword_k + 1) / (fusion.keyword_k + _ranks(scores[union].round(9)))
        fused = fusion.keyword_weight * np.where(scores[union] > 0, worth, 0)
        fused += fusion.vector_weight * (fusion.vector_k + 1) / (fusion.vector_k + _ranks(cosines[union]))
        order = np.lexsort((-cosines[union], -fused))
        return Truth(
            vector=right(nearest, cosines[nearest], fusion.max_per_document),
            vector_uncapped=right(nearest, cosines[nearest], TOP),
            keyword=right(matching, scores[matching], fusion.max_per_document),
            fused=right(union[order], fused[order], fusion.max_per_document),
        )

    return [answer(question) for question in questions]


def _largest(values: NDArray[Any], count: int, ids: NDArray[np.bytes_]) -> NDArray[np.int64]:
    """Indexes of the largest values, the largest first, of equal ones that with the smaller id, as the search does."""
    count = min(count, len(values))
    least = np.partition(values, len(values) - count)[len(values) - count]
    chosen = np.flatnonzero(values >= least)
    ordered: NDArray[np.int64] = chosen[np.lexsort((np.argsort(np.argsort(ids[chosen])), -values[chosen]))][:count]
    return ordered


def _ranks(values: NDArray[Any]) -> NDArray[np.int64]:
    """From 1, the largest first; equal values share the first rank among them, as rank() does."""
    ascending = np.sort(-values)
    ranks: NDArray[np.int64] = np.searchsorted(ascending, -values, side="left") + 1
    return ranks
