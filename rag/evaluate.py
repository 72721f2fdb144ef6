"""Measures retrieval on a judged collection in BEIR's layout, through the product's own ingest and search.

A collection is written into a tenant of its own, asked, and erased again. Measures are trec_eval's, with
linear gains; one that needs judgements leaves out questions without a relevant document.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

from rag import confidence, erase, screen
from rag.database import Database
from rag.deployment import Deployment
from rag.embed import Embedder
from rag.errors import EmbeddingInvalid, InvalidInput, RAGServiceError, first_of
from rag.exchange import Fusion, Mode, Passage, check_question
from rag.ingest import PARALLEL_DOCUMENTS, Source, ingest
from rag.operate import OPERATOR, Desk
from rag.parse import SUFFIXES
from rag.principal import Principal
from rag.retrieve import retrieve
from rag.settings import Settings
from rag.store import destination_of, look_up

TOP_K = 10
KEPT_SHARE = 0.95
"""Of the answerable questions, when the abstain rate of the others is told."""
ANSWERABLE = "answerable"

# Connections plan anew and caches are cold for the first ones; they are asked once before the clock runs.
WARM_UP = 5
# rag.ingest takes as much; longer "titles" are abstracts.
MAX_TITLE_CHARACTERS = 512
# Of an id such as `tutorial/cors.md`; all else is plain text, where nothing is taken for markup.
_TEXT_SUFFIXES = tuple(suffix for suffix, name in SUFFIXES.items() if name != "pdf")


# --- what is measured ----------------------------------------------------------------------------


def recall(found: Sequence[float], judged: Sequence[float], k: int) -> float:
    """The share of all relevant items that is among the first k. `found` as in `ndcg`; raises as it does."""
    relevant = _relevant(judged)
    return sum(gain > 0 for gain in found[:k]) / len(relevant)


def reciprocal_rank(found: Sequence[float], judged: Sequence[float], k: int) -> float:
    """One over the rank of the first relevant item among the first k, else 0. Raises as `ndcg` does."""
    _relevant(judged)
    return next((1 / rank for rank, gain in enumerate(found[:k], start=1) if gain > 0), 0.0)


def ndcg(found: Sequence[float], judged: Sequence[float], k: int) -> float:
    """Discounted gain of the first k over the most that any order could have, 0 to 1.

    `found`: gain of each item in the order found, each item once, 0 for an unjudged one; `judged`: gains
    of all that were judged, in any order. Gains count linearly (Järvelin and Kekäläinen 2002), as in
    trec_eval's ndcg_cut. Raises ValueError when nothing is relevant: there is nothing to divide by.
    """
    ideal = sorted(_relevant(judged), reverse=True)
    return _discounted(found[:k]) / _discounted(ideal[:k])


def _relevant(judged: Sequence[float]) -> list[float]:
    relevant = [gain for gain in judged if gain > 0]
    if not relevant:
        raise ValueError("no item is relevant")
    return relevant


def _discounted(gains: Sequence[float]) -> float:
    # trec_eval takes a gain below 0 for 0.
    return sum(max(gain, 0) / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    # Without the rounding, .95 * 20 would ask for the 20th of 20.
    return sorted(values)[max(0, math.ceil(round(share * len(values), 9)) - 1)]


def threshold(signals: Sequence[float], share: float = KEPT_SHARE) -> float:
    """The highest value that at least this share of the signals reaches. Raises ValueError for none."""
    return -percentile([-signal for signal in signals], share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Means over the questions that have something relevant; 0 to 1."""

    recall_at_1: float
    recall_at_5: float
    recall_at_10: float
    mrr_at_10: float
    ndcg_at_10: float


def score(results: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Scores | None:
    """Means over pairs of `found` and `judged` as in `ndcg`; None when no question has something relevant."""
    judged = [result for result in results if any(gain > 0 for gain in result[1])]
    if not judged:
        return None

    def mean(values: Iterator[float]) -> float:
        return math.fsum(values) / len(judged)

    return Scores(
        recall_at_1=mean(recall(*result, 1) for result in judged),
        recall_at_5=mean(recall(*result, 5) for result in judged),
        recall_at_10=mean(recall(*result, 10) for result in judged),
        mrr_at_10=mean(reciprocal_rank(*result, 10) for result in judged),
        ndcg_at_10=mean(ndcg(*result, 10) for result in judged),
    )


# --- what is read --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document of a collection; `title` may be empty."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where the answer stands in a long document: characters of its text, from 0, `end` excluded."""

    document_id: str
    start: int
    end: int

    def is_covered_by(self, start: int, end: int) -> bool:
        """Whether this part of the text has at least half of the answer."""
        return 2 * (min(end, self.end) - max(start, self.start)) >= self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with its judgements. With a span, the chunks are judged and not the documents."""

    id: str
    text: str
    gains: Mapping[str, float] = field(default_factory=dict)
    """Of each judged document; above 0 is relevant."""
    span: Span | None = None

    @property
    def is_judged(self) -> bool:
        return any(gain > 0 for gain in self.gains.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A question that the collection does, or does not, answer."""

    id: str
    text: str
    kind: str
    """`answerable`, or in what way it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a directory holds; `corpus` is where its documents came from, which may be another one's."""

    name: str
    corpus: Path
    documents: tuple[Document, ...]
    questions: tuple[Question, ...]
    probes: tuple[Probe, ...]


def load(folder: Path, *, corpus: Path | None = None) -> Collection:
    """Read a directory: corpus.jsonl, queries.jsonl with qrels.tsv or qrels/test.tsv, abstain.jsonl.

    Probes may come without documents; these are then `corpus`'s, else those of the neighbour whose name
    with `_abstain` is this one's. Raises InvalidInput, with file and line, for what is missing or malformed.
    """
    if not folder.is_dir():
        raise InvalidInput(f"{folder} is no directory", field="DIR")
    if corpus is None:
        corpus = folder
        if not (folder / "corpus.jsonl").is_file():
            name = folder.resolve().name
            corpus = folder.resolve().parent / name.removesuffix("_abstain")
    if not (corpus / "corpus.jsonl").is_file():
        raise InvalidInput(f"{folder} has no corpus.jsonl; name the directory of its documents", field="--corpus")
    documents = tuple(
        Document(id=_text(row, "_id", place), title=_text(row, "title", place, ""), text=_text(row, "text", place))
        for row, place in _lines(corpus / "corpus.jsonl")
    )
    known = {document.id for document in documents}
    if len(known) < len(documents):
        raise InvalidInput(f"{corpus / 'corpus.jsonl'}: two documents have the same _id", field="DIR")
    probes = []
    for row, place in _lines(folder / "abstain.jsonl") if (folder / "abstain.jsonl").is_file() else ():
        if row.get("gold_doc") is not None and row["gold_doc"] not in known:
            raise InvalidInput(f"{place}: its gold_doc is not in {corpus / 'corpus.jsonl'}", field="--corpus")
        probes.append(Probe(id=_text(row, "_id", place), text=_question(row, place), kind=_text(row, "kind", place)))
    questions: tuple[Question, ...] = ()
    if (folder / "queries.jsonl").is_file():
        questions = _questions(folder)
    if not questions and not probes:
        raise InvalidInput(f"{folder} has neither queries.jsonl nor abstain.jsonl", field="DIR")
    return Collection(
        name=folder.resolve().name,
        corpus=corpus.resolve(),
        documents=documents,
        questions=questions,
        probes=tuple(probes),
    )


def _questions(folder: Path) -> tuple[Question, ...]:
    path = next((path for path in (folder / "qrels.tsv", folder / "qrels" / "test.tsv") if path.is_file()), None)
    if path is None:
        raise InvalidInput(f"{folder} has no qrels.tsv", field="DIR")
    gains: dict[str, dict[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        cells = line.split("\t")
        if not line.strip() or (number == 1 and cells[-1] == "score"):
            continue
        try:
            query_id, document_id, gain = cells[0], cells[1], float(cells[2])
        except (IndexError, ValueError):
            raise InvalidInput(f"{path}, line {number}: not query-id, corpus-id, score", field="DIR") from None
        gains.setdefault(query_id, {})[document_id] = gain
    found = []
    for row, place in _lines(folder / "queries.jsonl"):
        query_id = _text(row, "_id", place)
        judged = gains.get(query_id, {})
        found.append(
            Question(id=query_id, text=_question(row, place), gains=judged, span=_span(row.get("metadata"), judged))
        )
    if len({question.id for question in found}) < len(found):
        raise InvalidInput(f"{folder / 'queries.jsonl'}: two questions have the same _id", field="DIR")
    return tuple(found)


def _span(metadata: object, gains: Mapping[str, float]) -> Span | None:
    """The answer's place that a question's metadata name, in its one relevant document."""
    if not isinstance(metadata, dict):
        return None
    start, end = metadata.get("start"), metadata.get("end")
    relevant = [document_id for document_id, gain in gains.items() if gain > 0]
    if type(start) is not int or type(end) is not int or not 0 <= start < end or len(relevant) != 1:
        return None
    return Span(document_id=relevant[0], start=start, end=end)


def _lines(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The objects of a JSONL file, each with its place for messages."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise InvalidInput(f"{place}: not JSON", field="DIR") from error
            if not isinstance(row, dict):
                raise InvalidInput(f"{place}: not an object", field="DIR")
            yield row, place


def _text(row: Mapping[str, Any], name: str, place: str, default: str | None = None) -> str:
    value = row.get(name, default)
    if not isinstance(value, str):
        raise InvalidInput(f"{place}: {name} is missing, or no text", field="DIR")
    return value


def _question(row: Mapping[str, Any], place: str) -> str:
    text = _text(row, "text", place)
    try:
        check_question(text)
    except InvalidInput as error:
        raise InvalidInput(f"{place}: {error.message}", field="DIR") from error
    return text


# --- how it is run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A document that ingestion refuses, such as one without text."""

    document_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Documents as they are stored for the length of an evaluation."""

    principal: Principal
    stored: Mapping[UUID, Document]
    chunks: int
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What searches."""

    database: Database
    embedder: Embedder
    settings: Settings


@asynccontextmanager
async def stored(collection: Collection, *, engine: Engine, place: Deployment) -> AsyncIterator[Corpus]:
    """The documents of a collection, ingested into a tenant that is erased at the end.

    Erased by rag_operator where it can log in; else what remains is an empty class without any document.
    Raises the EmbeddingError and DatabaseError families.
    """
    principal = Principal(tenant_id=f"eval-{uuid4()}", user_id=1)
    destination = destination_of(principal, scope="user")
    kept: dict[UUID, Document] = {}
    left_out: list[LeftOut] = []
    chunks = 0
    turn = asyncio.Semaphore(PARALLEL_DOCUMENTS)

    async def one(document: Document, counter: screen.Counter) -> None:
        nonlocal chunks
        async with turn:
            counter.note(document.id)
            try:
                ingested = await ingest(
                    source_of(document),
                    principal=principal,
                    destination=destination,
                    database=engine.database,
                    embedder=engine.embedder,
                    max_bytes=engine.settings.rag_max_document_bytes,
                    chunking=engine.settings.rag_chunking,
                )
            except (InvalidInput, EmbeddingInvalid) as error:
                left_out.append(LeftOut(document_id=document.id, reason=error.message))
            else:
                kept[ingested.document_id] = document
                chunks += ingested.chunks
            counter.step()

    # The class first: two writers that both lack it would wait for each other.
    await look_up(engine.database, principal, destination, source_type="text", source_id="_")
    try:
        with screen.counting(len(collection.documents), f"{collection.corpus.name}: ingesting") as counter:
            try:
                async with asyncio.TaskGroup() as group:
                    for document in collection.documents:
                        group.create_task(one(document, counter))
            except* RAGServiceError as errors:
                raise first_of(errors) from errors
        yield Corpus(principal=principal, stored=kept, chunks=chunks, left_out=tuple(left_out))
    finally:
        await _remove(principal, list(kept), engine, place)


async def _remove(principal: Principal, documents: Sequence[UUID], engine: Engine, place: Deployment) -> None:
    operator_url = place.server.url(OPERATOR) if place.server is not None else None
    if operator_url is None and engine.settings.rag_operator_database_url is not None:
        operator_url = engine.settings.rag_operator_database_url.get_secret_value()
    if operator_url is not None:
        with Desk(operator_url=operator_url, administrator_url=None).session() as session:
            erase.forget(session, erase.Subject(tenant_id=principal.tenant_id))
        return
    async with engine.database.transaction(principal) as writing:
        for document_id in documents:
            row = await writing.row("get_document", {"id": document_id})
            assert row is not None
            await writing.run(
                "delete_document",
                {"tenant_id": principal.tenant_id, "access_id": row["access_id"], "id": document_id},
            )


def source_of(document: Document) -> Source:
    """A document as ingestion takes it.

    The id must not be searched, and the name of a document without title becomes its title: so the name
    is the same for all, and no word.
    """
    suffix = next((suffix for suffix in _TEXT_SUFFIXES if document.id.lower().endswith(suffix)), ".txt")
    title = " ".join(document.title.split())[:MAX_TITLE_CHARACTERS].strip()
    return Source(
        name=f"_{suffix}",
        source_id=document.id,
        source_type="markdown" if suffix in (".md", ".markdown") else "text",
        content=document.text,
        title=title or None,
    )


async def embed_questions(texts: Sequence[str], embedder: Embedder, what: str) -> list[list[float] | None]:
    """One vector a question, in order; None for one that the model cannot take, which keywords alone answer."""
    with screen.counting(len(texts), what) as counter:

        def step(count: int) -> None:
            for _ in range(count):
                counter.step()

        try:
            return list(await embedder.embed(texts, purpose="query", progress=step))
        except EmbeddingInvalid:
            pass
    vectors: list[list[float] | None] = []
    for text in texts:
        try:
            vectors += await embedder.embed([text], purpose="query")
        except EmbeddingInvalid:
            vectors.append(None)
    return vectors


async def search(
    question: str,
    vector: Sequence[float] | None,
    *,
    engine: Engine,
    principal: Principal,
    top_k: int,
    max_per_document: int,
    mode: Mode,
    fusion: Fusion,
    min_similarity: float | None = None,
) -> list[Passage]:
    """The passages that the product gives, with its own minimum unless one is given; keywords alone take no vector."""
    settings = engine.settings.model_copy(update={"rag_max_chunks_per_doc": max_per_document})
    passages, _, _ = await retrieve(
        question,
        None if mode == "keyword" else vector,
        principal=principal,
        database=engine.database,
        settings=settings,
        embedding_model=engine.embedder.model_id,
        min_similarity=settings.rag_min_similarity_score if min_similarity is None else min_similarity,
        model_min_similarity=engine.embedder.min_similarity,
        top_k=top_k,
        budget_tokens=None,
        mode=mode,
        fusion=fusion,
    )
    return passages


Places = Mapping[tuple[UUID, int], tuple[int, int]]


async def chunk_places(corpus: Corpus, documents: set[str], database: Database) -> Places:
    """Start and end in the body, by document and chunk index, of all chunks of these documents."""
    places = {}
    async with database.transaction(corpus.principal, read_only=True) as session:
        for document_id, document in corpus.stored.items():
            if document.id in documents:
                for row in await session.rows("chunk_spans", {"id": document_id}):
                    places[document_id, row["chunk_index"]] = (row["start_offset"], row["end_offset"])
    return places


def document_gains(found: Sequence[str], question: Question) -> list[float]:
    """The gain of each document in the order found, given that of each chunk: it stands where its best chunk does."""
    return [question.gains.get(document_id, 0.0) for document_id in dict.fromkeys(found)]


def span_gains(found: Sequence[tuple[str, int, int]], span: Span) -> list[float]:
    """The gain of each chunk in the order found: 1 for the first that covers the answer, 0 for all others.

    A chunk is its document with start and end. Chunks overlap, so a second one with the same answer finds
    nothing new.
    """
    gains = [
        1.0 if document_id == span.document_id and span.is_covered_by(start, end) else 0.0
        for document_id, start, end in found
    ]
    if 1.0 in gains:
        first = gains.index(1.0)
        gains[first + 1 :] = [0.0] * (len(gains) - first - 1)
    return gains


def in_body(span: Span, document: Document) -> Span:
    """The span where parsing put it: without a byte order mark, line ends as LF."""

    def moved(offset: int) -> int:
        return len(document.text[:offset].removeprefix("\ufeff").replace("\r\n", "\n"))

    return Span(document_id=span.document_id, start=moved(span.start), end=moved(span.end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusals:
    """Questions of one kind, and the share of them that the threshold refuses."""

    questions: int
    refused: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """How well the signal of `confidence.answerable` tells answerable questions from others."""

    threshold: float
    """The highest signal that `KEPT_SHARE` of the answerable questions reach; what is below is refused."""
    answerable: int
    kept: float
    others: Mapping[str, Refusals]
    """By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured of a collection. Latencies in milliseconds, from borrowing a connection to the last row."""

    name: str
    documents: int
    left_out: tuple[LeftOut, ...]
    chunks: int
    judged: int
    """Questions that the scores are means of."""
    unjudged: int
    """Questions without a relevant document, which are not asked."""
    by_span: int
    """Judged questions whose answer has a place: each chunk is an item, the first that covers half of it counts."""
    unreachable: int
    """Those of them whose answer no chunk covers; they count as not found."""
    scores: Scores | None
    abstention: Abstention | None
    latency_p50_ms: float
    latency_p95_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """All that a collection asks of its stored documents, with vectors: to be asked any number of times."""

    collection: Collection
    corpus: Corpus
    engine: Engine
    mode: Mode
    fusion: Fusion
    questions: tuple[Question, ...]
    """The judged ones. In `asked` and `vectors` the probes come after them."""
    asked: tuple[str, ...]
    vectors: Sequence[Sequence[float] | None]
    names: Mapping[UUID, str]
    """The collection's id of each stored document."""
    spans: Mapping[str, Span]
    """By question, where it has one, in the body."""
    places: Places

    @property
    def unreachable(self) -> int:
        """Questions with a span that no chunk covers."""
        covered = {
            question_id
            for question_id, span in self.spans.items()
            for (document_id, _), place in self.places.items()
            if self.names[document_id] == span.document_id and span.is_covered_by(*place)
        }
        return len(self.spans) - len(covered)

    async def ask(self, number: int, *, min_similarity: float | None = None) -> list[Passage]:
        """The passages for one of `asked`, as the service would find them, or with another minimum."""
        top_k, max_per_document = TOP_K, 1  # what is left of a document is its best chunk
        if number >= len(self.questions):
            # As the service would ask before it answers.
            top_k = self.engine.settings.rag_total_context_chunks
            max_per_document = self.engine.settings.rag_max_chunks_per_doc
        elif self.questions[number].id in self.spans:
            max_per_document = TOP_K
        return await search(
            self.asked[number],
            self.vectors[number],
            engine=self.engine,
            principal=self.corpus.principal,
            top_k=top_k,
            max_per_document=max_per_document,
            mode=self.mode,
            fusion=self.fusion,
            min_similarity=min_similarity,
        )

    def judge(self, number: int, passages: Sequence[Passage]) -> tuple[list[float], list[float]]:
        """The gain of each passage that was found for one of `questions`, and the gains of all that was judged."""
        question = self.questions[number]
        ids = [self.names[passage.document_id] for passage in passages]
        span = self.spans.get(question.id)
        if span is None:
            return document_gains(ids, question), list(question.gains.values())
        places = [self.places.get((passage.document_id, passage.chunk_index), (0, 0)) for passage in passages]
        found = [(document_id, *place) for document_id, place in zip(ids, places, strict=True)]
        return span_gains(found, span), [1.0]


async def prepare(
    collection: Collection, corpus: Corpus, *, engine: Engine, mode: Mode = "hybrid", fusion: Fusion = "rank"
) -> Examination:
    """Embed what a collection asks, and find its answers in the chunks. Raises as `measure`."""
    questions = tuple(question for question in collection.questions if question.is_judged)
    asked = (*(question.text for question in questions), *(probe.text for probe in collection.probes))
    vectors: Sequence[Sequence[float] | None] = [None] * len(asked)
    if mode != "keyword" and asked:
        vectors = await embed_questions(asked, engine.embedder, f"{collection.name}: embedding questions")
    texts = {document.id: document for document in corpus.stored.values()}
    spans = {
        question.id: in_body(question.span, texts[question.span.document_id])
        for question in questions
        if question.span is not None and question.span.document_id in texts
    }
    return Examination(
        collection=collection,
        corpus=corpus,
        engine=engine,
        mode=mode,
        fusion=fusion,
        questions=questions,
        asked=asked,
        vectors=vectors,
        names={document_id: document.id for document_id, document in corpus.stored.items()},
        spans=spans,
        places=await chunk_places(corpus, {span.document_id for span in spans.values()}, engine.database),
    )


async def measure(
    collection: Collection, corpus: Corpus, *, engine: Engine, mode: Mode = "hybrid", fusion: Fusion = "rank"
) -> Report:
    """Ask all that a collection asks of stored documents. Raises the EmbeddingError and DatabaseError families."""
    return await examine(await prepare(collection, corpus, engine=engine, mode=mode, fusion=fusion))


async def examine(examination: Examination) -> Report:
    """Ask everything once. Raises the DatabaseError family."""
    collection, corpus, asked = examination.collection, examination.corpus, examination.asked
    judged = len(examination.questions)
    for number in range(min(WARM_UP, len(asked))):
        await examination.ask(number)
    results: list[tuple[list[float], list[float]]] = []
    signals: dict[str, list[float]] = {}
    times_ms: list[float] = []
    with screen.counting(len(asked), f"{collection.name}: searching") as counter:
        for number in range(len(asked)):
            started = time.perf_counter()
            passages = await examination.ask(number)
            times_ms.append((time.perf_counter() - started) * 1000)
            if number >= judged:
                kind = collection.probes[number - judged].kind
                probable = confidence.answerable(
                    asked[number], passages, embedding_model=examination.engine.embedder.model_id
                )
                signals.setdefault(kind, []).append(probable)
            else:
                results.append(examination.judge(number, passages))
            counter.step()
    return Report(
        name=collection.name,
        documents=len(corpus.stored),
        left_out=corpus.left_out,
        chunks=corpus.chunks,
        judged=judged,
        unjudged=len(collection.questions) - judged,
        by_span=len(examination.spans),
        unreachable=examination.unreachable,
        scores=score(results),
        abstention=abstention(signals),
        latency_p50_ms=percentile(times_ms, 0.5) if times_ms else 0.0,
        latency_p95_ms=percentile(times_ms, 0.95) if times_ms else 0.0,
    )


def abstention(signals: Mapping[str, Sequence[float]]) -> Abstention | None:
    """How many questions of each kind stay below the threshold; None without an answerable one."""
    answerable = signals.get(ANSWERABLE, [])
    if not answerable:
        return None
    least = threshold(answerable)

    def refused(values: Sequence[float]) -> float:
        return sum(value < least for value in values) / len(values)

    return Abstention(
        threshold=least,
        answerable=len(answerable),
        kept=1 - refused(answerable),
        others={
            kind: Refusals(questions=len(values), refused=refused(values))
            for kind, values in signals.items()
            if kind != ANSWERABLE
        },
    )


async def evaluate(
    collections: Sequence[Collection],
    *,
    engine: Engine,
    place: Deployment,
    mode: Mode = "hybrid",
    fusion: Fusion = "rank",
) -> list[Report]:
    """Measure collections, in the order given; those with the same documents share one ingestion."""
    reports: dict[int, Report] = {}
    by_corpus: dict[Path, list[int]] = {}
    for number, collection in enumerate(collections):
        by_corpus.setdefault(collection.corpus, []).append(number)
    for numbers in by_corpus.values():
        async with stored(collections[numbers[0]], engine=engine, place=place) as corpus:
            for number in numbers:
                reports[number] = await measure(collections[number], corpus, engine=engine, mode=mode, fusion=fusion)
    return [reports[number] for number in range(len(collections))]
