"""How fast documents become searchable, against what the server takes for the same rows alone, and the model alone.

Run: `make bench BENCH=ingest`; covidqa_long and cranfield are those of RAG_TEST_DATA, by default `../shared/data`
beside the checkout. By turns, in one database with the product's own settings, on articles of some 24 chunks:

- ours: `rag.ingest` as rag_app, as `rag ingest` calls it: read, cut, look up, lock, one transaction a document under
  row security. The embedder answers at once with vectors that are ready.
- bare: the rows that ours stored, as multi-row INSERTs of a superuser into tables of the same columns, checks and
  indexes without row security, a transaction a document. The lexemes are made by the statement: no client can.
- bulk: the same in one transaction.

Then workers as processes: on all processors, which one worker and its server nearly fill when there are two; and each
on a slice of a processor, where they wait for nothing but each other (needs root, for a cgroup each). And abstracts of
1 KB with the local model, by turns with the model alone on the same batches, as many at once. This fails when a row is
missing afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import math
import multiprocessing
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
from pgvector.psycopg.halfvec import register_halfvec_info
from psycopg.rows import dict_row
from psycopg.types import TypeInfo
from psycopg.types.json import Jsonb

from rag import command, deployment, embedded, ingest, store
from rag.database import Database
from rag.embed import Embedder, Purpose, open_embedder
from rag.ingest import PARALLEL_DOCUMENTS
from rag.principal import Principal
from rag.settings import Settings
from rag.sign import Signer

RESULT = Path(__file__).parent / "results" / "ingest.md"
ROUNDS = 9
LOCAL_ROUNDS = 9
ABSTRACTS = 120
ABSTRACT_CHARACTERS = range(900, 1101)
WORKERS = (1, 2, 4)
WORKER_ROUNDS = 3
COPIES = 2
# Of a processor, for a worker and the server's processes that work for it: four together leave most of two free, as on
# a machine with cores to spare.
SLICE = 0.2
SLICE_PERIOD_US = 10_000
CGROUPS = Path("/sys/fs/cgroup")
DIMENSIONS = Settings(_env_file=None).rag_embedding_dimensions


class ReadyEmbedder:
    """A text's vector is one of a thousand, which are ready."""

    model_id = "ready"
    max_input_tokens = 256
    min_similarity = -1.0
    token_counter = "words"

    def __init__(self) -> None:
        numbers = random.Random(1)
        vectors = [[numbers.gauss(0, 1) for _ in range(DIMENSIONS)] for _ in range(1000)]
        self._vectors = []
        for vector in vectors:
            length = math.hypot(*vector)
            self._vectors.append([value / length for value in vector])

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        if progress is not None:
            progress(len(texts))
        return [self._vectors[hash(text) % len(self._vectors)] for text in texts]

    async def close(self) -> None:
        """There is nothing to close."""


class Watched:
    """The embedder, remembering the batches that it was given."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.batches: list[list[str]] = []
        self.model_id = embedder.model_id
        self.max_input_tokens = embedder.max_input_tokens
        self.min_similarity = embedder.min_similarity
        self.token_counter = embedder.token_counter
        self.count_tokens = embedder.count_tokens
        self.close = embedder.close

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.batches.append(list(texts))
        return await self._embedder.embed(texts, purpose=purpose, progress=progress)


# --- what goes in --------------------------------------------------------------------------------


def sources(data: Path, collection: str) -> list[ingest.Source]:
    lines = (data / collection / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        ingest.Source(name=f"{record['_id']}.txt", source_id=record["_id"], content=record["text"])
        for record in map(json.loads, lines)
    ]


async def take(texts: Sequence[ingest.Source], database: Database, embedder: Embedder, *, tenant_id: str) -> None:
    """Ingest as many documents at once as `rag ingest` does."""
    principal = Principal(tenant_id=tenant_id, user_id=1)
    waiting = list(reversed(texts))

    async def work() -> None:
        while waiting:
            await ingest.ingest(
                waiting.pop(),
                principal=principal,
                destination=store.Destination(scope="user", user_id=1),
                database=database,
                embedder=embedder,
                max_bytes=1 << 24,
            )

    await asyncio.gather(*(work() for _ in range(PARALLEL_DOCUMENTS)))


# --- the rows alone ------------------------------------------------------------------------------


@contextlib.contextmanager
def superuser(server: embedded.EmbeddedPostgres) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        connection.execute("set search_path = rag, pg_temp")
        halfvec = TypeInfo.fetch(connection, "rag.halfvec")
        assert halfvec is not None
        register_halfvec_info(connection, halfvec)
        yield connection


Rows = list[tuple[dict[str, Any], list[dict[str, Any]]]]


def rows_of(connection: psycopg.Connection, tenant_id: str) -> Rows:
    """What a tenant has: each document with its chunks, and the text that each chunk's lexemes are of."""
    with connection.cursor(row_factory=dict_row, binary=True) as cursor:
        documents = cursor.execute("select * from rag_documents where tenant_id = %s", (tenant_id,)).fetchall()
        chunks = cursor.execute(
            "select chunk.*, concat_ws(E'\\n', document.title, chunk.section, chunk.chunk_text) as indexed_text"
            " from rag_chunks as chunk join rag_documents as document"
            " on document.tenant_id = chunk.tenant_id and document.id = chunk.document_id"
            " where chunk.tenant_id = %s order by chunk.document_id, chunk.chunk_index",
            (tenant_id,),
        ).fetchall()
    found: dict[Any, list[dict[str, Any]]] = {document["id"]: [] for document in documents}
    for chunk in chunks:
        found[chunk["document_id"]].append(chunk)
    return [(document | {"metadata": Jsonb(document["metadata"])}, found[document["id"]]) for document in documents]


def bare(connection: psycopg.Connection, rows: Rows, *, bulk: bool) -> float:
    """Store rows in fresh tables without row security; seconds."""
    connection.execute("drop schema if exists bare cascade")
    connection.execute("create schema bare")
    for table in ("rag_documents", "rag_chunks"):
        connection.execute(f"create table bare.{table} (like rag.{table} including all)".encode())
    started = time.perf_counter()
    with connection.transaction() if bulk else contextlib.nullcontext():
        for document, chunks in rows:
            with contextlib.nullcontext() if bulk else connection.transaction():
                _insert(connection, "rag_documents", [document], "")
                _insert(connection, "rag_chunks", chunks, "indexed_text")
    spent = time.perf_counter() - started
    stored = connection.execute("select count(*) from bare.rag_chunks").fetchone()
    if stored != (sum(len(chunks) for _, chunks in rows),):
        sys.exit(f"{stored} chunks are stored")
    return spent


def _insert(connection: psycopg.Connection, table: str, rows: list[dict[str, Any]], indexed: str) -> None:
    # The lexemes are made by the statement, the size of a body by the table.
    columns = [name for name in rows[0] if name not in (indexed, "tsv", "body_bytes")]
    places = ["%b" if name == "embedding" else "%s" for name in columns]
    named, values = list(columns), [[row[name] for name in columns] for row in rows]
    if indexed:
        named.append("tsv")
        places.append("rag.search_vector(%s, %s)")
        values = [[*value, row["language"], row[indexed]] for value, row in zip(values, rows, strict=True)]
    row = f"({', '.join(places)})"
    statement = f"insert into bare.{table} ({', '.join(named)}) values {', '.join([row] * len(rows))}"
    connection.execute(statement.encode(), [value for one in values for value in one])


# --- measuring -----------------------------------------------------------------------------------


def worker(
    home: Path, key: str, texts: list[ingest.Source], tenant_id: str, ready: Event, start: Barrier, end: Barrier
) -> None:
    """A process that ingests its share between two barriers, on connections that are open."""

    async def work() -> None:
        command.keep_what_is_loaded()
        command.run_as_batch()
        async with opened(embedded.start(home, durable=False), Signer.parse(key)) as database:
            embedder = ReadyEmbedder()
            await take(texts[: 3 * PARALLEL_DOCUMENTS], database, embedder, tenant_id=f"{tenant_id}-first")
            ready.set()
            await asyncio.to_thread(start.wait)
            await take(texts, database, embedder, tenant_id=tenant_id)
            await asyncio.to_thread(end.wait)

    asyncio.run(work())


def opened(server: embedded.EmbeddedPostgres, signer: Signer) -> Database:
    # As the service opens its own server (rag/deployment.py).
    return Database(server.url("rag_app"), signer=signer, prepared_statements=True)


def by_workers(
    server: embedded.EmbeddedPostgres, key: str, texts: list[ingest.Source], count: int, *, apart: bool
) -> float:
    """Seconds for all texts, dealt to so many processes; what it takes to start them is left out.

    `apart`: each on `SLICE` of a processor, together with the server's processes that work for it.
    """
    context = multiprocessing.get_context("spawn")
    start, end, tenant_id = context.Barrier(count + 1), context.Barrier(count + 1), f"w{uuid4().hex}"
    processes, slices = [], []
    with superuser(server) as connection:
        known = backends(connection)
        for number in range(count):
            ready = context.Event()
            share = texts[number::count]
            process = context.Process(target=worker, args=(server.home, key, share, tenant_id, ready, start, end))
            process.start()
            processes.append(process)
            if not ready.wait(120):
                sys.exit("a worker did not start")
            if apart:
                slices.append(cut_slice(number, {process.pid, *(backends(connection) - known)}))
                known = backends(connection)
        start.wait(120)
        started = time.perf_counter()
        end.wait(600)
        spent = time.perf_counter() - started
        for process in processes:
            process.join()
        named = (tenant_id,)
        found = connection.execute("select count(*) from rag_documents where tenant_id = %s", named).fetchone()
    for place in slices:
        while (place / "cgroup.procs").read_text():
            time.sleep(0.05)
        place.rmdir()
    if found != (len(texts),):
        sys.exit(f"{count} workers: {found} documents are stored")
    return spent


def backends(connection: psycopg.Connection) -> set[int]:
    """Process ids of the server's that work for rag_app."""
    statement = "select pid from pg_stat_activity where usename = 'rag_app'"
    return {pid for (pid,) in connection.execute(statement).fetchall()}


def cut_slice(number: int, pids: Collection[int | None]) -> Path:
    """Give processes `SLICE` of a processor to share. Raises OSError for whoever may not."""
    first = CGROUPS / "cpu"
    place = (first if first.is_dir() else CGROUPS) / f"palisade-bench-{number}"
    place.mkdir(exist_ok=True)
    quota = int(SLICE * SLICE_PERIOD_US)
    if first.is_dir():
        (place / "cpu.cfs_period_us").write_text(str(SLICE_PERIOD_US))
        (place / "cpu.cfs_quota_us").write_text(str(quota))
    else:
        (place / "cpu.max").write_text(f"{quota} {SLICE_PERIOD_US}")
    for pid in pids:
        (place / "cgroup.procs").write_text(str(pid))
    return place


def by_all_workers(
    server: embedded.EmbeddedPostgres, key: str, texts: list[ingest.Source], *, apart: bool
) -> dict[int, float]:
    """Median seconds by the number of workers, by turns; nothing where no slices can be cut."""
    try:
        if apart:
            cut_slice(0, ()).rmdir()
    except OSError:
        return {}
    rounds = [
        {count: by_workers(server, key, texts, count, apart=apart) for count in WORKERS} for _ in range(WORKER_ROUNDS)
    ]
    return {count: statistics.median(spent[count] for spent in rounds) for count in WORKERS}


async def throughput(server: embedded.EmbeddedPostgres, signer: Signer, texts: list[ingest.Source]) -> dict[str, Any]:
    times: dict[str, list[float]] = {"ours": [], "bare": [], "bulk": []}
    chunks = 0
    async with opened(server, signer) as database:
        embedder = ReadyEmbedder()
        for number in range(ROUNDS + 1):
            tenant_id = f"t{uuid4().hex}"
            started = time.perf_counter()
            await take(texts, database, embedder, tenant_id=tenant_id)
            spent = {"ours": time.perf_counter() - started}
            with superuser(server) as connection:
                rows = rows_of(connection, tenant_id)
                for name in ("bare", "bulk") if number % 2 else ("bulk", "bare"):
                    spent[name] = bare(connection, rows, bulk=name == "bulk")
            chunks = sum(len(found) for _, found in rows)
            for name, seconds in spent.items():
                if number:  # the first round warms up
                    times[name].append(seconds)
    return {"chunks": chunks} | {name: statistics.median(seconds) for name, seconds in times.items()}


async def with_model(
    server: embedded.EmbeddedPostgres, signer: Signer, texts: list[ingest.Source]
) -> tuple[float, float, float]:
    """Median seconds with the local model, of the model alone, and of the one as a multiple of the other."""
    rounds = []
    embedder = open_embedder(Settings(_env_file=None))
    async with opened(server, signer) as database:
        for number in range(LOCAL_ROUNDS + 1):
            watched = Watched(embedder)
            started = time.perf_counter()
            await take(texts, database, watched, tenant_id=f"m{uuid4().hex}")
            ours = time.perf_counter() - started
            # In the same order: the other way round it would remember how the last ones are spelt in word pieces.
            waiting = list(reversed(watched.batches))

            async def work(waiting: list[list[str]] = waiting) -> None:
                while waiting:
                    await embedder.embed(waiting.pop(), purpose="document")

            started = time.perf_counter()
            await asyncio.gather(*(work() for _ in range(PARALLEL_DOCUMENTS)))
            alone = time.perf_counter() - started
            if number:  # the first round warms up
                rounds.append((ours, alone, ours / alone))
    await embedder.close()
    ours, alone, ratio = map(statistics.median, zip(*rounds, strict=True))
    return ours, alone, ratio


def rows_by_workers(spent: dict[int, float], chunks: int) -> list[str]:
    return [f"| {count} | {chunks / seconds:,.0f} | {spent[1] / seconds:.2f} |" for count, seconds in spent.items()]


def main() -> None:
    data = Path(os.environ.get("RAG_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (data / "covidqa_long").is_dir():
        print("the test collections are absent: set RAG_TEST_DATA to their folder", file=sys.stderr)
        return
    articles = sources(data, "covidqa_long")
    abstracts = [source for source in sources(data, "cranfield") if len(str(source.content)) in ABSTRACT_CHARACTERS][
        :ABSTRACTS
    ]
    with embedded.ephemeral() as server:
        signer = deployment.prepare(server, Settings(_env_file=None))
        command.keep_what_is_loaded()  # as every command does before its work, and those that ingest the other
        command.run_as_batch()
        measured = asyncio.run(throughput(server, signer, articles))
        key = server.signing_key()
        assert key is not None
        many = [
            ingest.Source(name=source.name, source_id=f"{copy}/{source.source_id}", content=source.content)
            for copy in range(COPIES)
            for source in articles
        ]
        together, apart = (by_all_workers(server, key, many, apart=apart) for apart in (False, True))
        ours, alone, ratio = asyncio.run(with_model(server, signer, abstracts))
    chunks = measured["chunks"]
    lines = [
        "# Ingestion against the rows alone, and against the model alone",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {os.cpu_count()} processors that client and "
        f"server share; PostgreSQL {server.major}; medians of {ROUNDS} rounds by turns.",
        "",
        f"| {len(articles)} articles, {chunks:,} chunks, {DIMENSIONS} dimensions | chunks/s | ours against it |",
        "|---|---|---|",
        f"| ours, one process, {PARALLEL_DOCUMENTS} documents at a time | {chunks / measured['ours']:,.0f} | |",
        *(
            f"| {what} | {chunks / measured[name]:,.0f} | {measured[name] / measured['ours']:.2f} |"
            for name, what in (
                ("bare", "bare INSERT, a transaction a document"),
                ("bulk", "bare INSERT, one transaction"),
            )
        ),
        "",
        f"| Workers on {len(many)} articles, on all processors | chunks/s | against one |",
        "|---|---|---|",
        *rows_by_workers(together, COPIES * chunks),
        "",
        f"| Workers, each with its part of the server on {SLICE:g} of a processor | chunks/s | against one |",
        "|---|---|---|",
        *(rows_by_workers(apart, COPIES * chunks) or ["| not measured: no right to make cgroups | | |"]),
        "",
        f"| {len(abstracts)} abstracts of 1 KB, local model | seconds | documents/s | against it |",
        "|---|---|---|---|",
        f"| the model alone | {alone:.2f} | {len(abstracts) / alone:.1f} | |",
        f"| read, embedded and stored | {ours:.2f} | {len(abstracts) / ours:.1f} | {ratio:.2f} |",
    ]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
