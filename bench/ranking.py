"""How well the product ranks, against its peers: the same chunk texts and the same vectors, in one run.

Run: `make bench`, or with a part: `python bench/ranking.py --sets squad,xquad_de`. The collections are those of
RAG_TEST_DATA, by default `../shared/data` beside the checkout. Each peer is installed into a venv of its own, in a
temporary directory or where --venvs says; one that cannot be installed or does not run is in the table, with why.

The product is asked as `rag eval` asks it. Peers get the chunks that the product made, with the title and headings
that it indexes in front of each, and the vectors of the product's embedding model.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import venv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np
import psycopg

from rag import deployment, embedded, evaluate, ingest
from rag.embed import Embedder, Purpose, open_embedder
from rag.exchange import Fusion, Mode
from rag.settings import Settings

RESULT = Path(__file__).parent / "results" / "ranking.md"
PEER_PROGRAM = Path(__file__).parent / "peers" / "rank.py"
PEER_DATABASE = "peers"
# A smaller set tells little: one question of 20 is .05.
ENOUGH_QUESTIONS = 100
RRF_K = 60  # Cormack, Clarke and Büttcher 2009
# Chunks that an arm of the fusion in Python gives; more change the third digit.
RRF_DEPTH = 100
# What a peer is asked for where documents are judged: a document may have many chunks among the best.
PEER_CHUNKS = 100

# Of the collection's language, which the stemmers call by its English name.
STEMMERS = {
    **{"ar": "arabic", "da": "danish", "de": "german", "en": "english", "es": "spanish", "fi": "finnish"},
    **{"fr": "french", "it": "italian", "nl": "dutch", "no": "norwegian", "pt": "portuguese", "ru": "russian"},
    **{"sv": "swedish", "tr": "turkish"},
}

OURS: dict[str, tuple[Mode, Fusion]] = {
    "**Palisade**, default (reciprocal rank)": ("hybrid", "rank"),
    "**Palisade**, score fusion": ("hybrid", "score"),
    "Palisade, keywords alone": ("keyword", "rank"),
    "Palisade, vectors alone": ("vector", "rank"),
}


@dataclass(frozen=True)
class Peer:
    """A peer, the packages that it takes, and whether pip installs what these depend on."""

    program: str
    packages: tuple[str, ...]
    with_dependencies: bool = True


# txtai declares torch (3 GB), which it does not import where the vectors are given.
PEERS = {
    "bm25s 0.3.16, as shipped": Peer("bm25s_as_shipped", ("bm25s==0.3.16",)),
    "bm25s 0.3.16, stemmed": Peer("bm25s_stemmed", ("bm25s==0.3.16", "PyStemmer>=2.2")),
    "langchain-postgres 0.0.19 hybrid, as shipped": Peer("langchain_as_shipped", ("langchain-postgres==0.0.19",)),
    "langchain-postgres 0.0.19 hybrid, helped": Peer("langchain_helped", ("langchain-postgres==0.0.19",)),
    "llama-index-vector-stores-postgres 0.9.0 hybrid": Peer(
        "llama_index", ("llama-index-vector-stores-postgres==0.9.0",)
    ),
    "txtai 9.14.0 hybrid": Peer(
        "txtai", ("txtai==9.14.0", "numpy>=2", "msgpack", "regex", "pyyaml", "networkx"), with_dependencies=False
    ),
}
MINILM = "MiniLM alone, exact"


class Remembered:
    """The embedder, with each text's vector kept: four arms ask the same questions, and peers take the same vectors."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.known: dict[tuple[Purpose, str], list[float]] = {}
        self.model_id = embedder.model_id
        self.max_input_tokens = embedder.max_input_tokens
        self.min_similarity = embedder.min_similarity
        self.token_counter = embedder.token_counter
        self.count_tokens = embedder.count_tokens
        self.close = embedder.close

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        missing = [text for text in dict.fromkeys(texts) if (purpose, text) not in self.known]
        if missing:
            vectors = await self._embedder.embed(missing, purpose=purpose)
            self.known |= {(purpose, text): vector for text, vector in zip(missing, vectors, strict=True)}
        if progress is not None:
            progress(len(texts))
        return [self.known[purpose, text] for text in texts]


@dataclass(frozen=True)
class Chunk:
    document_id: str
    start: int
    end: int
    text: str
    """As it is indexed: with title and headings."""


@dataclass(frozen=True)
class Outcome:
    """What an arm reached on a collection, or why it reached nothing."""

    scores: evaluate.Scores | None
    note: str = ""


# --- peers ----------------------------------------------------------------------------------------


@contextmanager
def venvs(folder: Path | None) -> Iterator[Callable[[Peer], Path | str]]:
    """A function that installs a peer once; its Python, or why there is none."""
    with tempfile.TemporaryDirectory(prefix="palisade-peers-") as temporary:
        home = folder or Path(temporary)
        done: dict[tuple[str, ...], Path | str] = {}

        def install(peer: Peer) -> Path | str:
            if peer.packages not in done:
                done[peer.packages] = _install(peer, home / peer.program)
            return done[peer.packages]

        yield install


def _install(peer: Peer, place: Path) -> Path | str:
    python = place / "bin" / "python"
    wanted = " ".join(peer.packages)
    if python.exists() and (place / "installed").exists() and (place / "installed").read_text() == wanted:
        return python
    print(f"installing {wanted}", file=sys.stderr)
    venv.create(place, clear=True, with_pip=True)
    ran = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        + ([] if peer.with_dependencies else ["--no-deps"])
        + list(peer.packages),
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        return f"not installed: {_last_line(ran.stderr)}"
    (place / "installed").write_text(wanted)
    return python


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def ask_peer(peer: Peer, python: Path, folder: Path, limit: int, url: str) -> tuple[list[list[int]], str] | str:
    """The chunks found for each question and what went wrong with some; or why it did not run."""
    (folder / "ranking.json").unlink(missing_ok=True)
    ran = subprocess.run(
        [python, PEER_PROGRAM, peer.program, folder, str(limit)],
        # Without the variables of this venv.
        env={"PATH": os.environ["PATH"], "HOME": str(folder), "PEER_DATABASE_URL": url},
        capture_output=True,
        text=True,
    )
    if ran.returncode or not (folder / "ranking.json").exists():
        return f"did not run: {_last_line(ran.stderr)}"
    ranking = json.loads((folder / "ranking.json").read_text(encoding="utf-8"))
    failed = sum(found is None for found in ranking["found"])
    note = f"{failed} of {len(ranking['found'])} questions failed: {_last_line(ranking['error'])}" if failed else ""
    return [found or [] for found in ranking["found"]], note


# --- one collection -------------------------------------------------------------------------------


def cut(collection: evaluate.Collection, corpus: evaluate.Corpus, engine: evaluate.Engine) -> tuple[list[Chunk], str]:
    """The chunks that ingestion made, by ingestion's own code, and the language of most. Exits when they differ."""
    chunks: list[Chunk] = []
    languages: Counter[str] = Counter()
    for document in corpus.stored.values():
        source = evaluate.source_of(document)
        parsed, pieces = ingest._cut(
            source, source.source_type or "", engine.embedder, engine.settings.rag_max_document_bytes
        )
        languages[parsed.language or "en"] += len(pieces)
        chunks += [Chunk(document.id, piece.start, piece.end, piece.embedded_text) for piece in pieces]
    if len(chunks) != corpus.chunks:
        sys.exit(f"{collection.name}: {len(chunks)} chunks here, {corpus.chunks} in the database")
    return chunks, STEMMERS.get(languages.most_common(1)[0][0], "english")


def judge(
    questions: Sequence[evaluate.Question],
    documents: dict[str, evaluate.Document],
    chunks: Sequence[Chunk],
    found: Sequence[Sequence[int]],
) -> evaluate.Scores | None:
    """The scores of chunks found, by `rag eval`'s own measures."""
    results = []
    for question, numbers in zip(questions, found, strict=True):
        ranked = [chunks[number] for number in numbers]
        if question.span is not None and question.span.document_id in documents:
            span = evaluate.in_body(question.span, documents[question.span.document_id])
            gains = evaluate.span_gains([(chunk.document_id, chunk.start, chunk.end) for chunk in ranked], span)
            results.append((gains, [1.0]))
        else:
            gains = evaluate.document_gains([chunk.document_id for chunk in ranked], question)
            results.append((gains, list(question.gains.values())))
    return evaluate.score(results)


def reciprocal_rank_fusion(arms: Sequence[Sequence[int]]) -> list[int]:
    """Best first; a chunk that an arm does not have gets nothing from it."""
    scores: defaultdict[int, float] = defaultdict(float)
    for arm in arms:
        for rank, chunk in enumerate(arm[:RRF_DEPTH], start=1):
            scores[chunk] += 1 / (RRF_K + rank)
    return sorted(scores, key=lambda chunk: (-scores[chunk], chunk))


async def compare(
    collection: evaluate.Collection,
    *,
    engine: evaluate.Engine,
    place: deployment.Deployment,
    install: Callable[[Peer], Path | str],
) -> dict[str, Outcome]:
    """What each arm reaches on a collection, by its name in the table."""
    outcomes: dict[str, Outcome] = {}
    async with evaluate.stored(collection, engine=engine, place=place) as corpus:
        for name, (mode, fusion) in OURS.items():
            report = await evaluate.measure(collection, corpus, engine=engine, mode=mode, fusion=fusion)
            outcomes[name] = Outcome(report.scores)
        chunks, language = cut(collection, corpus, engine)
        questions = [question for question in collection.questions if question.is_judged]
        chunk_vectors = np.array(
            await engine.embedder.embed([chunk.text for chunk in chunks], purpose="document"), dtype=np.float32
        )
        question_vectors = np.array(
            await engine.embedder.embed([question.text for question in questions], purpose="query"), dtype=np.float32
        )
    documents = {document.id: document for document in corpus.stored.values()}
    nearest = np.argsort(-(question_vectors @ chunk_vectors.T), axis=1, kind="stable").tolist()
    outcomes[MINILM] = Outcome(judge(questions, documents, chunks, nearest))

    limit = evaluate.TOP_K if all(question.span is not None for question in questions) else PEER_CHUNKS
    assert place.server is not None
    parts = urlsplit(place.server.url("postgres", PEER_DATABASE))
    url = urlunsplit(parts._replace(query=""))  # not all drivers know what stands there
    with tempfile.TemporaryDirectory(prefix="palisade-ranking-") as temporary:
        folder = Path(temporary)
        given = {
            "chunks": [chunk.text for chunk in chunks],
            "questions": [question.text for question in questions],
            "language": language,
        }
        (folder / "collection.json").write_text(json.dumps(given), encoding="utf-8")
        np.save(folder / "chunks.npy", chunk_vectors)
        np.save(folder / "questions.npy", question_vectors)
        for name, peer in PEERS.items():
            print(f"{collection.name}: {name}", file=sys.stderr)
            python = install(peer)
            is_arm = peer.program.startswith("bm25s")
            # One arm of a fusion has to give as much as the other.
            depth = max(limit, RRF_DEPTH) if is_arm else limit
            ran = python if isinstance(python, str) else ask_peer(peer, python, folder, depth, url)
            fused = f"RRF{RRF_K} of MiniLM and {name}"
            if isinstance(ran, str):
                outcomes[name] = Outcome(None, ran)
                if is_arm:
                    outcomes[fused] = Outcome(None, ran)
                continue
            found, note = ran
            outcomes[name] = Outcome(judge(questions, documents, chunks, found), note)
            if is_arm:
                both = [reciprocal_rank_fusion(arms) for arms in zip(nearest, found, strict=True)]
                outcomes[fused] = Outcome(judge(questions, documents, chunks, both), note)
    return outcomes


# --- the table ------------------------------------------------------------------------------------


def table(
    measure: Callable[[evaluate.Scores], float],
    collections: Sequence[evaluate.Collection],
    outcomes: dict[str, dict[str, Outcome]],
) -> list[str]:
    """One row an arm, one column a collection; the mean leaves out sets with few questions."""
    large = [one.name for one in collections if sum(q.is_judged for q in one.questions) >= ENOUGH_QUESTIONS]
    names = [collection.name for collection in collections]
    lines = ["| | " + " | ".join([*names, "mean"]) + " |", "|---|" + "---|" * (len(names) + 1)]
    arms = list(dict.fromkeys(arm for by_arm in outcomes.values() for arm in by_arm))
    for arm in arms:
        values = {name: measure(scores) for name in names if (scores := outcomes[name][arm].scores) is not None}
        mean = math.fsum(values[name] for name in large) / len(large) if large and set(large) <= set(values) else None
        cells = [*(values.get(name) for name in names), mean]
        lines.append(f"| {arm} | " + " | ".join("–" if cell is None else f"{cell:.3f}" for cell in cells) + " |")
    return lines


async def run(data: Path, names: Sequence[str], folder: Path | None, output: Path) -> None:
    collections = [evaluate.load(data / name) for name in names]
    settings = Settings(_env_file=None)
    outcomes: dict[str, dict[str, Outcome]] = {}
    with embedded.ephemeral() as server, venvs(folder) as install:
        signer = deployment.prepare(server, settings)
        place = deployment.Deployment(
            app_url=server.url("rag_app"), publisher_url=server.url("rag_publisher"), signer=signer, server=server
        )
        with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
            connection.execute(f"create database {PEER_DATABASE}")
        with psycopg.connect(server.url("postgres", PEER_DATABASE), autocommit=True) as connection:
            connection.execute("create extension vector")
            row = connection.execute("select extversion from pg_extension where extname = 'vector'").fetchone()
        assert row is not None
        embedder = Remembered(open_embedder(settings))
        async with place.open(settings) as database:
            engine = evaluate.Engine(database=database, embedder=embedder, settings=settings)
            for collection in collections:
                outcomes[collection.name] = await compare(collection, engine=engine, place=place, install=install)
                embedder.known.clear()
        await embedder.close()
    small = [one.name for one in collections if sum(q.is_judged for q in one.questions) < ENOUGH_QUESTIONS]
    lines = [
        "# Ranking, against its peers",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, PostgreSQL {server.major}, pgvector {row[0]}, "
        f"{embedder.model_id}; the same chunks and vectors for all. Documents are judged by their best chunk; where "
        "the answer's place is known, the first chunk that has half of it counts.",
        "",
        "Questions: "
        + ", ".join(f"{one.name} {sum(q.is_judged for q in one.questions):,}" for one in collections)
        + "."
        + (f" The mean leaves out {', '.join(small)}: fewer than {ENOUGH_QUESTIONS} questions." if small else ""),
    ]
    for title, measure in (
        ("nDCG@10", lambda scores: scores.ndcg_at_10),
        ("Recall@10", lambda scores: scores.recall_at_10),
        ("MRR@10", lambda scores: scores.mrr_at_10),
    ):
        lines += ["", f"## {title}", "", *table(measure, collections, outcomes)]
    notes = [
        f"- {arm}, {name}: {outcome.note}"
        for name, by_arm in outcomes.items()
        for arm, outcome in by_arm.items()
        if outcome.note
    ]
    if notes:
        lines += ["", "## What did not run", "", *notes]
    lines += [
        "",
        "bm25s stemmed: stop words and Snowball stemmer of the collection's language. langchain-postgres as shipped "
        "keeps the words of the first question for all that follow, and takes four candidates from each arm; helped: "
        "a configuration of its own for each question, 50 candidates. llama-index gives what the vectors found before "
        "what the words found. txtai weighs both equally, without its own embedding model.",
    ]
    text = "\n".join(lines) + "\n"
    output.write_text(text, encoding="utf-8")
    print(text)


def main() -> None:
    checkout = Path(__file__).resolve().parents[1]
    data = Path(os.environ.get("RAG_TEST_DATA", checkout.parent / "shared" / "data"))
    known = sorted(folder.parent.name for folder in data.glob("*/qrels.tsv"))
    parser = argparse.ArgumentParser(description="Ranking, against its peers")
    parser.add_argument("--sets", default=",".join(known), help="comma-separated names of collections")
    parser.add_argument("--venvs", type=Path, help="where the peers are installed, and kept")
    parser.add_argument("--output", type=Path, help=f"instead of {RESULT.relative_to(checkout)}")
    arguments = parser.parse_args()
    names = [name for name in arguments.sets.split(",") if name]
    if not names:
        print("the test collections are absent: set RAG_TEST_DATA to their folder", file=sys.stderr)
        return
    if unknown := set(names) - set(known):
        sys.exit(f"no such collection: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    # A part is not what the committed page stands for.
    output = arguments.output or (RESULT if names == known else Path(os.devnull))
    asyncio.run(run(data, names, arguments.venvs, output))


if __name__ == "__main__":
    main()
