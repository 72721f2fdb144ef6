"""How fast the search is under row security, and how right: against itself without, and against the usual way.

Run: `make bench`, or `bench/speed.py --chunks 50000 --rounds 3`. Corpora come from `corpus.py`. With `--home DIR
--keep` they stay, and only what is new is loaded the next time; `--refresh-functions` puts the functions of
sql/schema into them, `--rebuild` the tables as well. Arms are interleaved, warm, on one connection each:

- ours: rag.search() as rag_app, with a signed identity.
- bare: the very same function on the very same pages, while row security is switched off on every table in a
  transaction that is rolled back; what is left are the function's own conditions on tenant and class.
- usual: a table of its own with one HNSW index, one GIN index, an index on the tenant and one ordinary policy on
  tenant, scope and user; any of the words, ordered by ts_rank_cd, and the nearest vectors, fused by reciprocal rank
  in one statement. Its GIN index does not help under row security, because @@ is not leakproof: that is how it ships.
- usual, indexed: the same, where somebody has also thought of an index on all columns of the policy.
- keyword, vector: the two arms of ours, alone.

The truth is worked out in numpy from the generator's rows, not from the database. This fails when ours and bare
return different rows, or when a principal sees another number of rows than were made for it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import multiprocessing
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psycopg
import uvicorn
from psycopg import sql

from api.app import create_app
from api.identity import loopback_door
from api.serve import _log_as_json as log_as_json
from bench import corpus as generated
from bench.arms import (
    OURS,
    SERVER_SETTINGS,
    TOP,
    TURNS,
    USUAL_VECTOR,
    Arm,
    Fusion,
    Place,
    Result,
    Turned,
    arms_of,
    keys,
    prepare,
    say,
    serving,
    truths,
)
from bench.corpus import Chunks, Question, Reader, Scope
from bench.ranking import PEERS, venvs
from rag.database import Database
from rag.embed import Purpose
from rag.errors import EmbeddingUnavailable
from rag.settings import Settings
from rag.sign import SITTING_S, Signer
from rag.store import halfvec

RESULT = Path(__file__).parent / "results" / "speed.md"

BATCH = 10  # questions that an arm is asked in one transaction, before it is the next one's turn
CUT_OFFS = 3  # statements of an arm that may run into the limit before it is left out
CLIENTS = (1, 4, 16)
HTTP_TOKEN = "the-token-of-the-bench"
LANGCHAIN = PEERS["langchain-postgres 0.0.19 hybrid, as shipped"]

# --- measuring -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Measured:
    """One principal in one corpus. Times in milliseconds, None where an arm ran into the limit again and again."""

    place: Place
    reader: Reader
    p50: dict[str, float | None] = field(default_factory=dict)
    p95: dict[str, float | None] = field(default_factory=dict)
    quality: dict[str, float | None] = field(default_factory=dict)
    floors: dict[str, float | None] = field(default_factory=dict)
    said: set[str] = field(default_factory=set)
    """What the search itself says about its recall."""


def measure(place: Place, reader: Reader, langchain: Path | None, options: argparse.Namespace) -> Measured:
    say(f"{place.database}: principal {reader.name}, {reader.visible:,} rows visible")
    rows = place.corpus.rows(reader.scopes)
    questions = place.corpus.questions(reader, rows, count=options.questions)
    near = [question for question in questions if question.kind == "near"]
    measured = Measured(place=place, reader=reader)
    arms = arms_of(place, langchain=langchain, limit_s=options.limit_s)
    try:
        run_interleaved(list(arms.values()), reader, near, rounds=options.rounds)
        for name, arm in arms.items():
            usable = arm.cut_offs < CUT_OFFS
            measured.p50[name] = statistics.median(arm.per_question_ms()) if usable else None
            measured.p95[name] = float(np.percentile(arm.all_ms(), 95)) if usable else None
        say(f"{place.database}: {reader.name}: p50 {measured.p50}")
        judge(measured, arms, rows, questions)
    finally:
        for arm in arms.values():
            arm.close()
    measured.floors = floors(place, reader, near, limit_s=options.limit_s)
    return measured


def run_interleaved(arms: list[Arm], reader: Reader, questions: Sequence[Question], *, rounds: int) -> None:
    """Ask all arms in turn, `rounds` times after one that warms up. Exits when ours and bare differ."""
    answers: dict[tuple[str, int], Result] = {}
    for number in range(rounds + 1):
        for start in range(0, len(questions), BATCH):
            batch = range(start, min(start + BATCH, len(questions)))
            turn = (number + start // BATCH) % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                if arm.cut_offs < CUT_OFFS:
                    _ask_batch(arm, reader, questions, batch, answers, counts=number > 0)
    for index, question in enumerate(questions):
        ours, bare = answers.get(("ours", index)), answers.get(("bare", index))
        if ours is not None and bare is not None and ours != bare:
            sys.exit(f"{reader.name}: with row security {keys(ours)}, without {keys(bare)} for {question.text!r}")


def _ask_batch(
    arm: Arm,
    reader: Reader,
    questions: Sequence[Question],
    batch: range,
    answers: dict[tuple[str, int], Result],
    *,
    counts: bool,
) -> None:
    done = None
    with arm.speaking(reader.principal):
        # The first statement of a transaction reads the catalog anew after row security was switched.
        arm.ask(questions[batch[0]])
        for index in batch:
            answers[arm.name, index], spent = arm.ask(questions[index])
            done = index
            if counts:
                arm.spent.setdefault(index, []).append(spent)
    if done != batch[-1]:
        arm.cut_offs += 1


def judge(measured: Measured, arms: dict[str, Arm], rows: Chunks, questions: Sequence[Question]) -> None:
    """Compare with the truth, each kind of question for itself."""
    place, reader = measured.place, measured.reader
    right = truths(rows, questions, Fusion.of(place))
    shares: dict[str, list[float]] = {}
    common_ms: list[float] = []
    usual_vector = Arm("usual vector", place, USUAL_VECTOR, limit_s=arms["usual"].limit_s)
    judged = [arms[name] for name in ("ours", "vector", "keyword", "usual", "filtered") if name in arms]
    for arm in (*judged, usual_vector):
        if arm.cut_offs >= CUT_OFFS:
            continue
        for question, truth in zip(questions, right, strict=True):
            if question.kind == "random" and arm.name not in ("vector", "usual vector", "filtered"):
                continue
            with arm.speaking(reader.principal):
                found, spent = arm.ask(question)
                expected = {
                    "vector": truth.vector,
                    "keyword": truth.keyword,
                    "usual vector": truth.vector_uncapped,
                    "filtered": truth.vector_uncapped,
                }.get(arm.name, truth.fused)
                shares.setdefault(f"{arm.name} {question.kind}", []).append(expected.share(keys(found)))
                if arm is arms["ours"] and question.kind == "common":
                    common_ms.append(spent * 1000)
    usual_vector.close()
    measured.quality = {name: statistics.mean(values) for name, values in shares.items()}
    measured.p50["ours, common words"] = statistics.median(common_ms) if common_ms else None
    with arms["ours"].speaking(reader.principal):
        said = (
            arms["ours"]
            .connection.execute(
                "select distinct recall from rag.search(question => %(question)s,"
                " embedding => cast(%(embedding)s as halfvec), embedding_model => %(model)s, top_k => 10)",
                arms["ours"].parameters(questions[0]),
            )
            .fetchall()
        )
        measured.said = {recall for (recall,) in said}


def has_own_index(place: Place, scope: Scope) -> bool:
    return place.value("select to_regclass(%s)", f"rag.rag_chunks_vector_{scope.access_id}") is not None


def floors(place: Place, reader: Reader, questions: Sequence[Question], *, limit_s: float) -> dict[str, float | None]:
    """What pgvector alone takes, as a superuser: its index scan, and the distances of all rows of the principal."""
    largest = max(reader.scopes, key=lambda scope: scope.chunks)
    statements = {
        "index of all": "select id from usual.chunks order by embedding <=> cast(%(embedding)s as halfvec) limit 10",
        "rows read once": sql.SQL(
            "select min(embedding <=> cast(%(embedding)s as halfvec)) from rag_chunks"
            " where tenant_id = {} and access_id = any({})"
        )
        .format(reader.principal.tenant_id, [scope.access_id for scope in reader.scopes])
        .as_string(),
    }
    if has_own_index(place, largest):
        statements["own index"] = (
            f"select id from rag_chunks where access_id = {largest.access_id}"
            " order by embedding <=> cast(%(embedding)s as halfvec) limit 10"
        )
    medians: dict[str, float | None] = {}
    with place.connect("postgres", limit_s=limit_s) as connection:
        for name, statement in statements.items():
            spent = []
            for question in (questions[0], *questions[:20]):
                started = time.perf_counter()
                try:
                    connection.execute(statement.encode(), {"embedding": halfvec(question.vector.tolist())}).fetchall()
                except psycopg.errors.QueryCanceled:
                    break
                spent.append((time.perf_counter() - started) * 1000)
            medians[name] = statistics.median(spent[1:]) if len(spent) > 1 else None
    return medians


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A principal that sees the same rows in every corpus: p50 in milliseconds by chunks, and whether answers agree."""

    reader: Reader
    p50: dict[int, float | None]
    same: dict[int, float]
    """The share of questions with the very rows of the smallest corpus."""


def grow(places: list[Place], reader: Reader, options: argparse.Namespace) -> Growth:
    """Ask the same questions in all corpora in turn."""
    say(f"growth: principal {reader.name}")
    smallest = places[0].corpus
    questions = smallest.questions(reader, smallest.rows(reader.scopes), count=options.questions)
    near = [question for question in questions if question.kind == "near"]
    arms = [
        Arm(str(place.corpus.chunks), place, OURS.format(arms="hybrid"), limit_s=options.limit_s) for place in places
    ]
    try:
        answers: dict[tuple[str, int], Result] = {}
        for number in range(options.rounds + 1):
            for start in range(0, len(near), BATCH):
                batch = range(start, min(start + BATCH, len(near)))
                turn = (number + start // BATCH) % len(arms)
                for arm in arms[turn:] + arms[:turn]:
                    if arm.cut_offs < CUT_OFFS:
                        _ask_batch(arm, reader, near, batch, answers, counts=number > 0)
        return Growth(
            reader=reader,
            p50={
                int(arm.name): statistics.median(arm.per_question_ms()) if arm.cut_offs < CUT_OFFS else None
                for arm in arms
            },
            same={
                int(arm.name): statistics.mean(
                    keys(answers.get((arm.name, index), [])) == keys(answers.get((arms[0].name, index), []))
                    for index in range(len(near))
                )
                for arm in arms
            },
        )
    finally:
        for arm in arms:
            arm.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one value of a turn gives to one principal; shares of the ten right rows by kind of question."""

    place: Place
    reader: Reader
    turn: str
    value: int
    p50: float | None
    shares: dict[str, float]


def frontier(place: Place, reader: Reader, options: argparse.Namespace) -> list[Point]:
    """Time against right rows, along what the functions have in their hands."""
    say(f"{place.database}: frontier, principal {reader.name}")
    rows = place.corpus.rows(reader.scopes)
    questions = place.corpus.questions(reader, rows, count=options.questions)
    near = [question for question in questions if question.kind == "near"]
    right = truths(rows, questions, Fusion.of(place))
    points = []
    for name, turn in TURNS.items():
        # Words are what the one kind differs in, vectors the other.
        kinds = ("near", "common" if turn.mode == "hybrid" else "random")
        arms = [Turned(place, turn, value, limit_s=options.limit_s) for value in turn.values]
        try:
            run_interleaved(list(arms), reader, near, rounds=options.rounds)
            for value, arm in zip(turn.values, arms, strict=True):
                shares: dict[str, list[float]] = {}
                for question, truth in zip(questions, right, strict=True):
                    if question.kind not in kinds:
                        continue
                    with arm.speaking(reader.principal):
                        found, _ = arm.ask(question)
                        expected = truth.fused if turn.mode == "hybrid" else truth.vector
                        shares.setdefault(question.kind, []).append(expected.share(keys(found)))
                points.append(
                    Point(
                        place=place,
                        reader=reader,
                        turn=name,
                        value=value,
                        p50=statistics.median(arm.per_question_ms()) if arm.cut_offs < CUT_OFFS else None,
                        shares={kind: statistics.mean(values) for kind, values in shares.items()},
                    )
                )
        finally:
            for arm in arms:
                arm.close()
    return points


def index_bytes(place: Place) -> dict[str, dict[str, float]]:
    """Bytes a chunk by kind: of classes that have indexes of their own, of the others, and of all."""
    with place.connect("postgres") as connection:
        own = {
            int(access_id)
            for (access_id,) in connection.execute(
                "select substring(relname from '^rag_chunks_vector_([0-9]+)$') from pg_class"
                " where relnamespace = 'rag'::regnamespace and relname ~ '^rag_chunks_vector_[0-9]+$'"
            )
        }
        relations = connection.execute(
            "select relname, relkind, pg_relation_size(oid), pg_table_size(oid) from pg_class"
            " where relnamespace = 'rag'::regnamespace and relkind in ('r', 'i')"
            " and relname ~ '^rag_(chunks|class_)'"
        ).fetchall()
        statistics_rows: dict[int, int] = {}
        for name, kind, _, _ in relations:
            if kind == "r" and name.startswith("rag_class_"):
                for access_id, count in connection.execute(
                    sql.SQL("select access_id, count(*) from {} group by access_id").format(sql.Identifier(name))
                ):
                    statistics_rows[access_id] = statistics_rows.get(access_id, 0) + count
    sizes = {scope.access_id: scope.chunks for scope in place.corpus.scopes}
    large = sum(size for access_id, size in sizes.items() if access_id in own)
    groups = {"large": large, "small": place.corpus.chunks - large, "all": place.corpus.chunks}
    rows_of = {
        "large": sum(count for access_id, count in statistics_rows.items() if access_id in own),
        "small": sum(count for access_id, count in statistics_rows.items() if access_id not in own),
        "all": sum(statistics_rows.values()),
    }
    table: dict[str, dict[str, float]] = {}

    def add(kind: str, group: str, size: float) -> None:
        if groups[group]:
            table.setdefault(kind, {})
            table[kind][group] = table[kind].get(group, 0.0) + size / groups[group]

    for name, relkind, size, table_size in relations:
        if name == "rag_chunks":
            for group in groups:
                add("the row itself", group, table_size * groups[group] / place.corpus.chunks)
        elif name.startswith("rag_class_") or re.match(r"rag_class_", name):
            for group in groups:
                share = rows_of[group] / rows_of["all"] if rows_of["all"] else 0
                add("statistics", group, (table_size if relkind == "r" else size) * share)
        elif own_index := re.search(r"_(vector|words)_\d+$", name):
            kind = {"vector": "own HNSW", "words": "own GIN"}
            add(kind[own_index[1]], "large", size)
            add(kind[own_index[1]], "all", size)
        else:
            for group in groups:
                add(f"B-tree {name}", group, size * groups[group] / place.corpus.chunks)
    return table


# --- clients at once -----------------------------------------------------------------------------


def statement_rate(place: Place, reader: Reader, questions: Sequence[Question], *, clients: int, seconds: int) -> float:
    """Transactions a second of pgbench: begin_as, the search, commit."""
    principal = reader.principal
    signature = place.signer.sign(principal, role="rag_app", valid_s=SITTING_S)
    with tempfile.TemporaryDirectory() as folder:
        command: list[str | Path] = [
            place.server.binary("pgbench"), "--no-vacuum", f"--client={clients}", f"--jobs={min(clients, 2)}",
            f"--time={seconds}",
        ]  # fmt: skip
        for number, question in enumerate(questions):
            script = sql.SQL(
                "begin read only;\nselect rag.begin_as({}, {}, {}, {}, {});\n"
                "select * from rag.search(question => {}, embedding => {}, embedding_model => {}, top_k => 10);\n"
                "commit;\n"
            ).format(
                principal.tenant_id,
                principal.user_id,
                principal.project_id,
                list(principal.tags),
                signature,
                question.text,
                halfvec(question.vector.tolist()),
                generated.MODEL,
            )
            path = Path(folder) / f"{number}.sql"
            path.write_text(script.as_string(), encoding="utf-8")
            command.append(f"--file={path}")
        command.append(place.server.conninfo("rag_app", place.database))
        done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^tps = ([0-9.]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        sys.exit(f"pgbench failed: {done.stderr[-2000:]}")
    return float(found[1])


class GivenVectors:
    """For the model of generated corpora, of which there are vectors alone: requests bring theirs."""

    model_id = generated.MODEL
    max_input_tokens = 512
    min_similarity = -1.0
    token_counter = "words"

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        raise EmbeddingUnavailable

    async def close(self) -> None:
        pass


def _serve(url: str, key: str, port: int) -> None:
    """The product's API as `rag serve` runs it, except for the embedder and where the log goes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    log_as_json()
    settings = Settings(_env_file=None)
    database = Database(
        url, signer=Signer.parse(key), pool_size=settings.rag_pool_size, pool_timeout_s=60.0,
        prepared_statements=settings.rag_prepared_statements,
    )  # fmt: skip
    app = create_app(settings, database=database, door=loopback_door(HTTP_TOKEN))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_config=None, access_log=False))

    async def run() -> None:
        serving = asyncio.create_task(server.serve())
        while not hasattr(app.state, "service"):
            if serving.done():
                return
            await asyncio.sleep(0.05)
        app.state.service.embedder = GivenVectors()
        await serving

    asyncio.run(run())


@contextlib.contextmanager
def serving_http(place: Place) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=_serve,
        args=(
            place.server.url("rag_app", place.database),
            f"{place.signer.key_id}.{place.signer.secret.hex()}",
            port,
        ),
    )
    process.start()
    try:
        for _ in range(600):
            if not process.is_alive():
                sys.exit("the API ended at once")
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        time.sleep(1)
        yield port
    finally:
        process.terminate()
        process.join()


def http_rate(port: int, reader: Reader, questions: Sequence[Question], *, clients: int, seconds: int) -> float:
    """Answers a second of POST /rag/query; requests are bytes made before, since the client has the same cores."""
    requests = []
    for question in questions:
        body = json.dumps(
            {
                "query": question.text,
                "tenant_id": reader.principal.tenant_id,
                "user_id": reader.principal.user_id,
                "project_id": reader.principal.project_id,
                "top_k": TOP,
                "generate": False,
                "embedding": [float(f"{value:.6g}") for value in question.vector],
                "embedding_model": generated.MODEL,
            }
        ).encode()
        head = (
            f"POST /rag/query HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {HTTP_TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        requests.append(head.encode() + body)
    answered = 0

    async def client(number: int, ends: float) -> None:
        nonlocal answered
        reading, writing = await asyncio.open_connection("127.0.0.1", port)
        position = number
        while time.perf_counter() < ends:
            writing.write(requests[position % len(requests)])
            position += 1
            head = await reading.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            body = await reading.readexactly(int(length[1])) if length else b""
            if not head.startswith(b"HTTP/1.1 200") or b'"hits":[]' in body.replace(b" ", b""):
                sys.exit(f"POST /rag/query: {head.decode()} {body[:500].decode()}")
            answered += 1
        writing.close()

    async def run() -> float:
        started = time.perf_counter()
        await asyncio.gather(*(client(number, started + seconds) for number in range(clients)))
        return answered / (time.perf_counter() - started)

    return asyncio.run(run())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    reader: Reader
    statement: dict[int, float]
    http: dict[int, float]


def rates(place: Place, reader: Reader, options: argparse.Namespace) -> Rate:
    say(f"{place.database}: clients at once, principal {reader.name}")
    questions = place.corpus.questions(reader, place.corpus.rows(reader.scopes), count=options.questions)
    near = [question for question in questions if question.kind == "near"][:20]
    statement, http = {}, {}
    with serving_http(place) as port:
        http_rate(port, reader, near, clients=2, seconds=1)
        for clients in CLIENTS:
            statement[clients] = statement_rate(place, reader, near, clients=clients, seconds=options.seconds)
            http[clients] = http_rate(port, reader, near, clients=clients, seconds=options.seconds)
    return Rate(reader=reader, statement=statement, http=http)


# --- reporting -----------------------------------------------------------------------------------


def _ms(value: float | None, limit_s: float | None = None) -> str:
    if value is None:
        return "" if limit_s is None else f"> {limit_s * 1000:.0f}"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(above: float | None, below: float | None) -> str:
    return "" if above is None or below is None else f"{above / below:.2f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> list[str]:
    return [
        f"## {title}",
        "",
        *(line for note in notes for line in (note, "")),
        f"| {' | '.join(header)} |",
        "|" + "---|" * len(header),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def report(
    places: list[Place],
    measurements: list[Measured],
    growths: list[Growth],
    points: list[Point],
    all_rates: list[Rate],
    options: argparse.Namespace,
) -> str:
    first = places[0]
    shown = {name: first.value("select current_setting(%s)", name) for name in (*SERVER_SETTINGS, "work_mem", "jit")}
    version = first.value("select current_setting('server_version')")
    extension = first.value("select extversion from pg_extension where extname = 'vector'")
    limit = options.limit_s
    machine = (
        f"{len(os.sched_getaffinity(0))} processors, {platform.machine()}, PostgreSQL {version}, pgvector {extension}"
    )
    configuration = ", ".join(f"{name} {value}" for name, value in shown.items())
    sizes = ", ".join(f"{place.corpus.chunks:,}" for place in places)
    lines = [
        "# Speed and recall of the search",
        "",
        f"{datetime.date.today().isoformat()}, {machine}; {configuration}. "
        f"Corpora of {sizes} generated chunks, seed {options.seed}, {generated.DIMENSIONS} dimensions. "
        f"{options.questions} questions a principal, {options.rounds} interleaved rounds after a warm one, one "
        "connection each; milliseconds as the client sees them, for the statement alone. A p50 is the median over "
        "questions of each one's median; a p95 is over all runs.",
        "",
    ]
    lines += table(
        "Time",
        (
            *("Chunks", "Principal", "Rows visible", "ours p50", "p95", "p95/p50", "RLS off p50", "on/off"),
            *("usual p50", "p95", "usual/ours", "usual, indexed p50", "usual, indexed/ours", "ours, common words p50"),
        ),
        [
            (
                f"{one.place.corpus.chunks:,}",
                one.reader.name,
                f"{one.reader.visible:,}",
                _ms(one.p50["ours"], limit),
                _ms(one.p95["ours"], limit),
                _ratio(one.p95["ours"], one.p50["ours"]),
                _ms(one.p50["bare"], limit),
                _ratio(one.p50["ours"], one.p50["bare"]),
                _ms(one.p50["usual"], limit),
                _ms(one.p95["usual"], limit),
                _ratio(one.p50["usual"], one.p50["ours"]),
                _ms(one.p50["usual, indexed"], limit),
                _ratio(one.p50["usual, indexed"], one.p50["ours"]),
                _ms(one.p50["ours, common words"]),
            )
            for one in measurements
        ],
        "Ours with row security on and off returned identical rows for every question. The usual way has an index on "
        "the tenant; indexed, one on all columns of its policy.",
    )
    if any("filtered" in one.p50 for one in measurements):
        lines += table(
            f"{LANGCHAIN.packages[0].replace('==', ' ')} with a metadata filter",
            (
                "Chunks",
                "Principal",
                "ours: vector alone, p50",
                "p50",
                "right, near",
                "random",
                "ours: right, near",
                "random",
            ),
            [
                (
                    f"{one.place.corpus.chunks:,}",
                    one.reader.name,
                    _ms(one.p50["vector"], limit),
                    _ms(one.p50.get("filtered"), limit),
                    *(
                        _share(one.quality.get(name))
                        for name in ("filtered near", "filtered random", "vector near", "vector random")
                    ),
                )
                for one in measurements
            ],
            "On the usual table and its HNSW, as the owner of the table: the filter is all that keeps rows apart. "
            "Its time is taken in its own process, around the call of the library.",
        )
    if growths:
        counts = [place.corpus.chunks for place in places]
        lines += table(
            "Growth: the same principal with the same rows, among more and more of other people's",
            ("Principal", *(f"p50 at {count:,}" for count in counts), "last/first", "same answers as in the first"),
            [
                (
                    one.reader.name,
                    *(_ms(one.p50[count], limit) for count in counts),
                    _ratio(one.p50[counts[-1]], one.p50[counts[0]]),
                    f"{min(one.same.values()):.0%}",
                )
                for one in growths
            ],
        )
    lines += table(
        "Recall",
        (
            *("Chunks", "Principal", "says", "vector arm, near", "vector arm, random", "keyword arm, near"),
            *("fused, near", "fused, common words", "usual: vector, near", "vector, random", "fused, near"),
        ),
        [
            (
                f"{one.place.corpus.chunks:,}",
                one.reader.name,
                " ".join(sorted(one.said)),
                *(
                    _share(one.quality.get(name))
                    for name in (
                        *("vector near", "vector random", "keyword near", "ours near", "ours common"),
                        *("usual vector near", "usual vector random", "usual near"),
                    )
                ),
            )
            for one in measurements
        ],
        "The share of the ten right rows that were found. Right is what numpy finds when it reads everything visible: "
        "cosine, BM25, and both fused as rag.search() fuses them, at most three rows of a document (of the usual way's "
        "vector arm: any number). Of rows that score the same any is right. Near questions have words of a visible "
        "chunk and a vector near it; random ones a "
        "vector unrelated to any; common ones words of the 30 first ranks alone.",
    )
    lines += table(
        "The whole against its two arms alone",
        ("Chunks", "Principal", "both p50", "keyword p50", "vector p50", "both/sum"),
        [
            (
                f"{one.place.corpus.chunks:,}",
                one.reader.name,
                *(_ms(one.p50[name], limit) for name in ("ours", "keyword", "vector")),
                _ratio(
                    one.p50["ours"],
                    None
                    if one.p50["keyword"] is None or one.p50["vector"] is None
                    else one.p50["keyword"] + one.p50["vector"],
                ),
            )
            for one in measurements
        ],
    )
    lines += table(
        "Floors",
        ("Chunks", "Principal", "ours p50", "pgvector, index of all", "pgvector, own index", "all own rows read once"),
        [
            (
                f"{one.place.corpus.chunks:,}",
                one.reader.name,
                _ms(one.p50["ours"], limit),
                *(_ms(one.floors.get(name)) for name in ("index of all", "own index", "rows read once")),
            )
            for one in measurements
        ],
        "As a superuser, so without row security: the ten nearest by one HNSW index over everything; by the index of "
        "the principal's largest class, where it has one; the distances of all rows that it may read.",
    )
    if points:
        lines += table(
            "The frontier",
            ("Chunks", "Principal", "turn", "value", "p50", "right, near", "right, common words", "right, random"),
            [
                (
                    f"{one.place.corpus.chunks:,}",
                    one.reader.name,
                    one.turn,
                    f"**{one.value:,}**" if one.value == TURNS[one.turn].shipped else f"{one.value:,}",
                    _ms(one.p50, limit),
                    *(_share(one.shares.get(kind)) for kind in ("near", "common", "random")),
                )
                for one in points
            ],
            "The share of the ten right rows against time, along the numbers that bound how much of a large class is "
            "read: rows that the keyword arm looks at, those whose words it counts beyond twice the depth (with both "
            "arms, against the fused truth), and hnsw.ef_search (the vector arm alone). What ships is bold.",
        )
    for place in places:
        kinds = index_bytes(place)
        beyond = {
            group: sum(kind.get(group, 0.0) for name, kind in kinds.items() if name != "the row itself")
            for group in ("large", "small", "all")
        }
        lines += table(
            f"Bytes a chunk, {place.corpus.chunks:,} chunks",
            ("Kind", "classes with indexes of their own", "other classes", "all"),
            [
                (name, *(f"{kind[group]:,.0f}" if group in kind else "" for group in ("large", "small", "all")))
                for name, kind in [*sorted(kinds.items()), ("**beyond the row**", beyond)]
            ],
        )
    if all_rates:
        lines += table(
            f"Clients at once, {places[-1].corpus.chunks:,} chunks",
            (
                "Principal",
                *(f"pgbench, {clients}" for clients in CLIENTS),
                *(f"HTTP, {clients}" for clients in CLIENTS),
                f"HTTP/pgbench at {CLIENTS[-1]}",
            ),
            [
                (
                    one.reader.name,
                    *(f"{one.statement[clients]:.0f}" for clients in CLIENTS),
                    *(f"{one.http[clients]:.0f}" for clients in CLIENTS),
                    _ratio(one.http[CLIENTS[-1]], one.statement[CLIENTS[-1]]),
                )
                for one in all_rates
            ],
            f"Answers a second over {options.seconds} s, clients on the same cores. pgbench: begin, begin_as, the "
            "search, commit. HTTP: POST /rag/query with the question's vector and generate false, one process of "
            "uvicorn with the shipped pool.",
        )
    steps = list(dict.fromkeys(step for place in places for step in place.seconds))
    lines += table(
        "Loading",
        ("Chunks", *(f"{step}, s" for step in steps)),
        [
            (
                f"{place.corpus.chunks:,}",
                *(f"{place.seconds[step]:.0f}" if step in place.seconds else "" for step in steps),
            )
            for place in places
        ],
    )
    return "\n".join(lines).rstrip() + "\n"


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    parser.add_argument("--questions", type=int, default=60, help="of each principal")
    parser.add_argument("--readers", nargs="+", help="names of principals; all when left out")
    parser.add_argument("--limit-s", type=float, default=20.0, help="seconds that a statement may take")
    parser.add_argument("--seconds", type=int, default=5, help="of each measurement with clients at once")
    parser.add_argument("--no-clients", action="store_true", help="leave clients at once out")
    parser.add_argument("--no-frontier", action="store_true", help="leave time against right rows out")
    parser.add_argument("--home", type=Path, help="where the server is; a temporary one when left out")
    parser.add_argument("--keep", action="store_true", help="keep what is in --home for the next run")
    parser.add_argument("--refresh-functions", action="store_true", help="put those of sql/schema into kept corpora")
    parser.add_argument("--rebuild", action="store_true", help="migrate and load kept corpora anew; usual tables stay")
    parser.add_argument("--only-load", action="store_true", help="make the corpora and measure nothing")
    parser.add_argument("--venvs", type=Path, help="where langchain-postgres is installed, and kept")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if options.keep != (options.home is not None):
        parser.error("--keep and --home come together")
    options.chunks.sort()
    return options


def main() -> None:
    options = parsed()
    with serving(options.home) as server, venvs(options.venvs) as install:
        places = [
            prepare(
                server,
                chunks=chunks,
                seed=options.seed,
                refresh=options.refresh_functions,
                rebuild=options.rebuild,
            )
            for chunks in options.chunks
        ]
        if options.only_load:
            return
        wanted = [
            [reader for reader in place.corpus.readers if options.readers is None or reader.name in options.readers]
            for place in places
        ]
        langchain = install(LANGCHAIN)
        if isinstance(langchain, str):
            say(f"without langchain-postgres: {langchain}")
        measurements = [
            measure(place, reader, langchain if isinstance(langchain, Path) else None, options)
            for place, readers in zip(places, wanted, strict=True)
            for reader in readers
        ]
        growths = [grow(places, reader, options) for reader in wanted[0] if reader.fixed] if len(places) > 1 else []
        points = (
            []
            if options.no_frontier
            else [
                point
                for reader in wanted[-1]
                if any(has_own_index(places[-1], scope) for scope in reader.scopes)
                for point in frontier(places[-1], reader, options)
            ]
        )
        text = report(places, measurements, growths, points, [], options)
        options.result.write_text(text, encoding="utf-8")
        if not options.no_clients:
            all_rates = [rates(places[-1], reader, options) for reader in wanted[-1]]
            text = report(places, measurements, growths, points, all_rates, options)
            options.result.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
