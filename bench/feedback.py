"""What the feedback of readers is worth in ranking (RAG_FEEDBACK_BOOST), with simulated readers.

Run: `make bench BENCH=feedback`, or with a part: `python bench/feedback.py --sets squad`. The collections are those of
RAG_TEST_DATA, by default `../shared/data` beside the checkout.

Half of the questions of a collection have been asked before, by READERS people: each got the product's first five
passages, opened the ones that answer more often than the others, and rated some. The other half is asked afterwards,
with several boosts. Once all questions are asked alike; once as questions are asked where some topics are in
everybody's mouth: a document's popularity falls with its place in a random order (Zipf, s = 1), before as after.
The rows are written as the readers' own would be; who reads them is the product's search.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import platform
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from uuid import UUID, uuid4

import psycopg

from rag import deployment, embedded, evaluate
from rag.embed import open_embedder
from rag.exchange import Passage
from rag.settings import Settings

RESULT = Path(__file__).parent / "results" / "feedback.md"
SETS = ("squad", "cranfield", "xquad_de")
BOOSTS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
# Of a collection, chosen at random: more change the third digit, and take minutes.
QUESTIONS = 400
READERS = 200
ASKED_BEFORE = 2000
ASKED_AFTERWARDS = 2000
SHOWN = 5
# Of a passage that answers: opened, and if so rated good. Of another one: opened, less often further down, and if so
# rated bad.
OPENS_RIGHT, PRAISES = 0.6, 0.2
OPENS_WRONG, BLAMES = 0.15, 0.2
SEED = 20261122

Rankings = dict[str, list[str]]
"""By question, documents, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a reader made of a passage."""

    reader: int
    query_id: UUID
    passage: Passage
    clicked: bool
    rating: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A collection that is stored, with its questions' vectors."""

    engine: evaluate.Engine
    corpus: evaluate.Corpus
    vectors: Mapping[str, Sequence[float] | None]
    url: str
    """Of a superuser, who writes what the readers say."""

    async def found(self, question: evaluate.Question, *, boost: float, top_k: int) -> list[Passage]:
        settings = self.engine.settings.model_copy(update={"rag_feedback_boost": boost})
        return await evaluate.search(
            question.text,
            self.vectors[question.id],
            engine=replace(self.engine, settings=settings),
            principal=self.corpus.principal,
            top_k=top_k,
            max_per_document=1,
            mode="hybrid",
            fusion="rank",
        )

    async def ranked(self, questions: Sequence[evaluate.Question], boost: float) -> Rankings:
        return {
            question.id: [
                self.corpus.stored[one.document_id].id for one in await self.found(question, boost=boost, top_k=10)
            ]
            for question in questions
        }

    def write(self, said: Sequence[Said]) -> None:
        """Instead of whatever was said before."""
        tenant = self.corpus.principal.tenant_id
        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            cursor.execute("delete from rag.rag_query_logs where tenant_id = %s", (tenant,))
            asked = {(one.reader, one.query_id) for one in said}
            cursor.executemany(
                "insert into rag.rag_query_logs (tenant_id, user_id, id, query_hash, query_length, mode, result_count,"
                " citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)"
                " values (%s, %s, %s, '', 0, 'hybrid', 5, 0, 0, 0, 0, 0)",
                [(tenant, reader, query_id) for reader, query_id in asked],
            )
            cursor.executemany(
                "insert into rag.rag_feedback (tenant_id, user_id, query_id, rank, access_id, document_id, chunk_index,"
                " rating, clicked)"
                " select document.tenant_id, %s, %s, %s, document.access_id, document.id, %s, %s, %s"
                " from rag.rag_documents as document where document.tenant_id = %s and document.id = %s",
                [
                    (
                        *(one.reader, one.query_id, one.passage.rank, one.passage.chunk_index, one.rating, one.clicked),
                        *(tenant, one.passage.document_id),
                    )
                    for one in said
                ],
            )


def popularity(questions: Sequence[evaluate.Question], *, skewed: bool, chance: random.Random) -> dict[str, float]:
    """How often each question is asked, in proportion: alike, or as often as its most relevant document."""
    if not skewed:
        return dict.fromkeys((question.id for question in questions), 1.0)
    about = {question.id: max(question.gains, key=question.gains.__getitem__) for question in questions}
    documents = sorted(set(about.values()))
    chance.shuffle(documents)
    weight = {document: 1 / place for place, document in enumerate(documents, start=1)}
    return {question_id: weight[document] for question_id, document in about.items()}


def reactions(
    shown: Sequence[Passage], right: Sequence[bool], reader: int, query_id: UUID, chance: random.Random
) -> list[Said]:
    said = []
    for place, (passage, answers) in enumerate(zip(shown, right, strict=True), start=1):
        if chance.random() >= (OPENS_RIGHT if answers else OPENS_WRONG / place):
            continue
        rates = chance.random() < (PRAISES if answers else BLAMES)
        rating = (1 if answers else -1) if rates else None
        said.append(Said(reader=reader, query_id=query_id, passage=passage, clicked=True, rating=rating))
    return said


def score(rankings: Rankings, asked: Sequence[evaluate.Question]) -> float:
    return mean(
        evaluate.ndcg(evaluate.document_gains(rankings[one.id], one), list(one.gains.values()), 10) for one in asked
    )


async def measure(bench: Bench, questions: Sequence[evaluate.Question], *, skewed: bool) -> dict[float, float]:
    """nDCG@10 of what is asked afterwards, by boost; fails when no boost is not what it was without feedback."""
    chance = random.Random(SEED)
    weights = popularity(questions, skewed=skewed, chance=chance)
    mixed = sorted(questions, key=lambda question: question.id)
    chance.shuffle(mixed)
    before, after = mixed[: len(mixed) // 2], mixed[len(mixed) // 2 :]
    bench.write([])
    untouched = await bench.ranked(after, 0)
    shown = {question.id: await bench.found(question, boost=0, top_k=SHOWN) for question in before}
    said: list[Said] = []
    for question in chance.choices(before, [weights[one.id] for one in before], k=ASKED_BEFORE):
        passages = shown[question.id]
        right = [question.gains.get(bench.corpus.stored[one.document_id].id, 0) > 0 for one in passages]
        said += reactions(passages, right, chance.randint(1, READERS), uuid4(), chance)
    bench.write(said)
    asked = chance.choices(after, [weights[one.id] for one in after], k=ASKED_AFTERWARDS)
    measured = {}
    for boost in BOOSTS:
        rankings = await bench.ranked(after, boost)
        if boost == 0 and rankings != untouched:
            sys.exit("with a boost of 0 the order is another one than without feedback")
        measured[boost] = score(rankings, asked)
    return measured


async def run(data: Path, names: Sequence[str], output: Path) -> None:
    settings = Settings(_env_file=None)
    rows: list[str] = []
    with embedded.ephemeral() as server:
        signer = deployment.prepare(server, settings)
        place = deployment.Deployment(
            app_url=server.url("rag_app"), publisher_url=server.url("rag_publisher"), signer=signer, server=server
        )
        embedder = open_embedder(settings)
        async with place.open(settings) as database:
            engine = evaluate.Engine(database=database, embedder=embedder, settings=settings)
            for name in names:
                collection = evaluate.load(data / name)
                async with evaluate.stored(collection, engine=engine, place=place) as corpus:
                    stored = {document.id for document in corpus.stored.values()}
                    questions = [one for one in collection.questions if one.is_judged and stored & one.gains.keys()]
                    questions = random.Random(SEED).sample(questions, min(QUESTIONS, len(questions)))
                    vectors = await evaluate.embed_questions([one.text for one in questions], embedder, name)
                    bench = Bench(
                        engine=engine,
                        corpus=corpus,
                        vectors=dict(zip((one.id for one in questions), vectors, strict=True)),
                        url=server.url("postgres"),
                    )
                    for skewed in (False, True):
                        measured = await measure(bench, questions, skewed=skewed)
                        cells = [f"{measured[boost]:.3f}" for boost in BOOSTS]
                        rows.append(f"| {name} | {'some topics more' if skewed else 'alike'} | {' | '.join(cells)} |")
                # After each, so that a run that is cut short has what it measured.
                output.write_text(page(rows, server.major, embedder.model_id), encoding="utf-8")
        await embedder.close()
        print(page(rows, server.major, embedder.model_id))


def page(rows: Sequence[str], major: int, embedding_model: str) -> str:
    lines = [
        "# What feedback is worth in ranking",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, PostgreSQL {major}, {embedding_model}. nDCG@10 "
        f"of {ASKED_AFTERWARDS:,} questions, drawn from one half of up to {QUESTIONS} of a collection, after {READERS} "
        f"simulated readers asked {ASKED_BEFORE:,} of the other half, saw {SHOWN} passages each time, opened one that "
        f"answers with probability {OPENS_RIGHT:g} and another one at place n with {OPENS_WRONG:g}/n, and rated a "
        "fifth of what they opened. By RAG_FEEDBACK_BOOST; with 0 each list was that without feedback: checked.",
        "",
        f"| collection | questions are asked | {' | '.join(f'{boost:g}' for boost in BOOSTS)} |",
        f"|---|---|{'---|' * len(BOOSTS)}",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    checkout = Path(__file__).resolve().parents[1]
    data = Path(os.environ.get("RAG_TEST_DATA", checkout.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(description="What feedback is worth in ranking")
    parser.add_argument("--sets", default=",".join(SETS), help="comma-separated names of collections")
    parser.add_argument("--output", type=Path, help=f"instead of {RESULT.relative_to(checkout)}")
    arguments = parser.parse_args()
    names = [name for name in arguments.sets.split(",") if name]
    if missing := [name for name in names if not (data / name / "qrels.tsv").is_file()]:
        print(f"these collections are absent: {', '.join(missing)}; set RAG_TEST_DATA to their folder", file=sys.stderr)
        return
    output = arguments.output or (RESULT if tuple(names) == SETS else Path(os.devnull))
    asyncio.run(run(data, names, output))


if __name__ == "__main__":
    main()
