"""Measures against values worked out by hand, collections as they are read, and an evaluation from end to end."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import SecretStr

from rag import cli, evaluate
from rag.database import Database
from rag.deployment import Deployment as Place
from rag.embed import Embedder, Purpose
from rag.errors import InvalidInput
from rag.evaluate import Engine, Question, Span
from rag.settings import Settings
from tests.conftest import SIGNER, SIGNING_KEY, Deployment

# --- the measures, by hand ------------------------------------------------------------------------


def test_recall_is_the_share_of_all_relevant_items():
    """Four are relevant; the order has them at ranks 2, 3 and 6."""
    found, judged = [0, 1, 3, 0, 0, 2], [3, 2, 1, 1, 0]
    assert evaluate.recall(found, judged, 1) == 0
    assert evaluate.recall(found, judged, 5) == 0.5
    assert evaluate.recall(found, judged, 10) == 0.75


def test_the_reciprocal_rank_looks_at_the_first_relevant_item_and_not_beyond_k():
    assert evaluate.reciprocal_rank([2, 1], [1, 2], 10) == 1
    assert evaluate.reciprocal_rank([0, 0, 1, 4], [4, 1], 10) == pytest.approx(1 / 3)
    assert evaluate.reciprocal_rank([0] * 10 + [1], [1], 10) == 0
    assert evaluate.reciprocal_rank([], [1], 10) == 0


def test_ndcg_weighs_graded_gains_by_the_logarithm_of_their_rank():
    """Found 3, 2, 3, 0, 1, 2; the textbook's ideal order is 3, 3, 2, 2, 1, 0. Linear gains:

    3/1 + 2/1.58496 + 3/2 + 0 + 1/2.58496 + 2/2.80735 = 6.86113
    3/1 + 3/1.58496 + 2/2 + 2/2.32193 + 1/2.58496 = 7.14100
    """
    assert evaluate.ndcg([3, 2, 3, 0, 1, 2], [3, 2, 3, 0, 1, 2], 10) == pytest.approx(6.86113 / 7.14100, abs=1e-5)


def test_ndcg_is_one_in_any_order_of_equal_gains():
    assert evaluate.ndcg([2, 2, 2, 1], [1, 2, 2, 2], 10) == 1


def test_ndcg_counts_what_was_not_found_against_the_order():
    """One of two relevant items, at rank 2: 1/log2(3) = 0.63093 of 1 + 0.63093."""
    assert evaluate.ndcg([0, 1], [1, 1], 10) == pytest.approx(0.63093 / 1.63093, abs=1e-5)


def test_ndcg_takes_no_more_than_k_items_for_the_ideal():
    """With 11 relevant items, 10 of them in front are all that the first 10 can hold."""
    assert evaluate.ndcg([1] * 10, [1] * 11, 10) == 1
    assert evaluate.ndcg([0, 5], [5], 1) == 0


def test_documents_judged_0_or_less_are_neither_relevant_nor_a_loss():
    for measure in (evaluate.recall, evaluate.reciprocal_rank, evaluate.ndcg):
        assert measure([1, 0], [1, 0, 0, -1], 10) == 1
    # Beside the gain at rank 2: nothing is taken off for the -1 in front of it.
    assert evaluate.ndcg([-1, 1], [1, -1], 10) == pytest.approx(1 / math.log2(3))


@pytest.mark.parametrize("measure", [evaluate.recall, evaluate.reciprocal_rank, evaluate.ndcg])
@pytest.mark.parametrize("judged", [[], [0, 0]], ids=["unjudged", "judged 0"])
def test_without_a_relevant_item_there_is_no_measure(measure, judged: list[float]):
    with pytest.raises(ValueError, match="no item is relevant"):
        measure([0, 0], judged, 10)


def test_scores_are_means_over_the_questions_that_have_something_relevant():
    """First at rank 1, first at rank 2, nothing found; two questions without anything relevant do not count."""
    scores = evaluate.score([([1], [1]), ([0, 1], [1]), ([0], [1]), ([0], []), ([0], [0])])
    assert scores is not None
    assert scores.recall_at_1 == pytest.approx(1 / 3)
    assert scores.recall_at_5 == scores.recall_at_10 == pytest.approx(2 / 3)
    assert scores.mrr_at_10 == pytest.approx(1.5 / 3)
    assert scores.ndcg_at_10 == pytest.approx((1 + 0.63093) / 3, abs=1e-5)
    assert evaluate.score([([0], []), ([0], [0])]) is None


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5, 1, 3], 0.5, 3),
        ([4, 1, 3, 2], 0.5, 2),
        (range(1, 21), 0.95, 19),
        (range(1, 101), 0.95, 95),
        ([7], 0.95, 7),
        ([1, 2], 0.95, 2),
    ],
)
def test_a_percentile_is_one_of_the_values(values: Sequence[float], share: float, expected: float):
    assert evaluate.percentile(values, share) == expected
    with pytest.raises(ValueError, match="no values"):
        evaluate.percentile([], share)


def test_the_threshold_keeps_95_percent_of_the_answerable():
    """The lowest of 20 signals may go, .06 is the second; equal signals stay together, on the side of those kept."""
    signals = {
        "answerable": [n / 100 for n in range(5, 25)],
        "foreign": [0.05, 0.059, 0.06, 0.9],
        "near": [0.0, 0.055],
    }
    measured = evaluate.abstention(signals)
    assert measured is not None
    assert (measured.threshold, measured.kept) == (0.06, 0.95)
    assert measured.others["foreign"] == evaluate.Refusals(questions=4, refused=0.5)
    assert measured.others["near"] == evaluate.Refusals(questions=2, refused=1.0)
    tied = evaluate.abstention({"answerable": [0.5] * 20, "foreign": [0.5, 0.4]})
    assert tied is not None
    assert (tied.threshold, tied.kept, tied.others["foreign"].refused) == (0.5, 1.0, 0.5)
    assert evaluate.abstention({"foreign": [0.1]}) is None


# --- what counts as found -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 100, True),
        (10, 20, True),  # all of it
        (50, 150, True),  # exactly half
        (49, 51, True),
        (51, 151, False),
        (100, 110, False),
        (300, 310, False),
        (0, 201, False),  # the chunk has less than half, though all of the chunk is answer
    ],
)
def test_a_chunk_answers_when_it_has_half_of_the_span(start: int, end: int, expected: bool):
    assert Span(document_id="a", start=start, end=end).is_covered_by(0, 100) is expected


def test_the_first_chunk_with_the_answer_counts_and_a_second_one_is_nothing_new():
    """Characters 90 to 100 are in two chunks; another document's chunk at the same place has another text."""
    span = Span(document_id="a", start=90, end=100)
    found = [("b", 0, 300), ("a", 200, 300), ("a", 90, 200), ("a", 0, 100)]
    assert evaluate.span_gains(found, span) == [0, 0, 1, 0]
    assert evaluate.span_gains(found[:2], span) == [0, 0]


def test_a_document_stands_where_its_first_chunk_does():
    question = Question(id="q", text="?", gains={"a": 2, "c": 1, "d": 3})
    assert evaluate.document_gains(["b", "a", "b", "a", "c"], question) == [0, 2, 1]


# --- collections as they are read -----------------------------------------------------------------


def jsonl(path: Path, *rows: object) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A collection of three documents and three questions, with probes."""
    made = tmp_path / "harbour"
    made.mkdir()
    jsonl(
        made / "corpus.jsonl",
        {"_id": "tides", "title": "Tides", "text": "High water is at noon, and low water at dusk."},
        {"_id": "cranes#1", "title": "", "text": "The red crane lifts forty tonnes of granite."},
        {"_id": "empty", "title": "", "text": ""},
    )
    jsonl(
        made / "queries.jsonl",
        {"_id": "q1", "text": "When is high water?", "metadata": {}},
        {"_id": "q2", "text": "How much does the red crane lift?"},
        {"_id": "q3", "text": "Who owns the ferry?"},
    )
    (made / "qrels.tsv").write_text(
        "query-id\tcorpus-id\tscore\nq1\ttides\t2\nq1\tcranes#1\t0\nq2\tcranes#1\t1\nq9\ttides\t1\n", encoding="utf-8"
    )
    jsonl(
        made / "abstain.jsonl",
        {"_id": "p1", "text": "When is low water?", "kind": "answerable", "gold_doc": "tides"},
        {"_id": "p2", "text": "Which sonata did the violinist rehearse?", "kind": "out_of_corpus", "gold_doc": None},
    )
    return made


def test_a_collection_is_read_with_its_judgements(folder: Path):
    collection = evaluate.load(folder)
    assert collection.name == "harbour"
    assert [document.id for document in collection.documents] == ["tides", "cranes#1", "empty"]
    assert [question.gains for question in collection.questions] == [{"tides": 2, "cranes#1": 0}, {"cranes#1": 1}, {}]
    assert [question.is_judged for question in collection.questions] == [True, True, False]
    assert [probe.kind for probe in collection.probes] == ["answerable", "out_of_corpus"]


def test_judgements_may_lie_where_beir_puts_them_and_have_no_header(folder: Path):
    (folder / "qrels").mkdir()
    (folder / "qrels.tsv").unlink()
    (folder / "qrels" / "test.tsv").write_text("q2\ttides\t3\n", encoding="utf-8")
    assert [question.gains for question in evaluate.load(folder).questions] == [{}, {"tides": 3}, {}]


def test_an_answers_place_is_read_where_one_document_is_relevant(folder: Path):
    jsonl(
        folder / "queries.jsonl",
        {"_id": "q1", "text": "When?", "metadata": {"start": 3, "end": 9}},
        {"_id": "q2", "text": "How much?", "metadata": {"start": 9, "end": 9}},
        {"_id": "q3", "text": "Who?", "metadata": {"start": 3, "end": 9}},
    )
    spans = [question.span for question in evaluate.load(folder).questions]
    assert spans == [Span(document_id="tides", start=3, end=9), None, None]


def test_probes_without_documents_are_about_the_neighbour_that_they_are_named_after(folder: Path):
    probes = folder.parent / "harbour_abstain"
    probes.mkdir()
    (folder / "abstain.jsonl").rename(probes / "abstain.jsonl")
    beside, named = evaluate.load(probes), evaluate.load(probes, corpus=folder)
    assert beside.corpus == named.corpus == evaluate.load(folder).corpus
    assert (len(beside.documents), len(beside.questions), len(beside.probes)) == (3, 0, 2)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("corpus.jsonl", None, "has no corpus.jsonl"),
        ("qrels.tsv", None, "has no qrels.tsv"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\nnonsense\n', "line 2: not JSON"),
        ("corpus.jsonl", '{"_id": "a"}\n', "line 1: text is missing"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, "two documents have the same _id"),
        ("queries.jsonl", '{"_id": "q", "text": "x"}\n' * 2, "two questions have the same _id"),
        ("queries.jsonl", '["q"]\n', "line 1: not an object"),
        ("queries.jsonl", '{"_id": "q", "text": " "}\n', "line 1: query must not be empty"),
        ("qrels.tsv", "q1\ttides\thigh\nq1\ttides\n", "line 1: not query-id, corpus-id, score"),
        ("abstain.jsonl", '{"_id": "p", "text": "x", "kind": "answerable", "gold_doc": "b"}\n', "gold_doc is not in"),
    ],
)
def test_what_is_malformed_is_named_with_its_place(folder: Path, file: str, text: str | None, message: str):
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        evaluate.load(folder)


# --- from end to end ------------------------------------------------------------------------------


@pytest.fixture
def place(deployment: Deployment) -> Place:
    """The test's database as a deployment that rag_operator cannot be reached in."""
    return Place(
        app_url=deployment.url("rag_app"), publisher_url=deployment.url("rag_publisher"), signer=SIGNER, server=None
    )


@pytest.fixture
def engine(database: Database, embedder: Embedder, settings: Settings) -> Engine:
    return Engine(database=database, embedder=embedder, settings=settings)


def rows_left(deployment: Deployment, table: str) -> int:
    with deployment.cluster.superuser(deployment.name) as connection:
        return connection.execute(f"select count(*) from rag.{table}").fetchone()[0]


async def test_a_collection_is_measured_and_leaves_no_document_behind(
    folder: Path, engine: Engine, place: Place, deployment: Deployment
):
    """Each question's words and meaning are in its own document alone, so all measures are 1."""
    (report,) = await evaluate.evaluate([evaluate.load(folder)], engine=engine, place=place)
    assert (report.documents, report.chunks, report.judged, report.unjudged) == (2, 2, 2, 1)
    assert [left_out.document_id for left_out in report.left_out] == ["empty"]
    assert report.scores == evaluate.Scores(recall_at_1=1, recall_at_5=1, recall_at_10=1, mrr_at_10=1, ndcg_at_10=1)
    assert report.abstention is not None
    assert report.abstention.others == {"out_of_corpus": evaluate.Refusals(questions=1, refused=1.0)}
    assert 0 < report.latency_p50_ms <= report.latency_p95_ms
    assert rows_left(deployment, "rag_documents") == rows_left(deployment, "rag_chunks") == 0


async def test_an_operator_erases_the_tenant_as_well(
    folder: Path, engine: Engine, place: Place, deployment: Deployment
):
    settings = engine.settings.model_copy(
        update={"rag_operator_database_url": SecretStr(deployment.url("rag_operator"))}
    )
    engine = Engine(database=engine.database, embedder=engine.embedder, settings=settings)
    await evaluate.evaluate([evaluate.load(folder)], engine=engine, place=place)
    assert rows_left(deployment, "rag_access_classes") == rows_left(deployment, "rag_documents") == 0


async def test_documents_go_when_the_evaluation_breaks_off(
    folder: Path, engine: Engine, place: Place, deployment: Deployment
):
    class Stopped(Exception):
        pass

    async def break_off() -> None:
        async with evaluate.stored(evaluate.load(folder), engine=engine, place=place) as corpus:
            assert len(corpus.stored) == rows_left(deployment, "rag_documents") == 2
            raise Stopped

    with pytest.raises(Stopped):
        await break_off()
    assert rows_left(deployment, "rag_documents") == 0


async def test_collections_of_the_same_documents_share_one_ingestion(folder: Path, engine: Engine, place: Place):
    probes = folder.parent / "harbour_abstain"
    probes.mkdir()
    (folder / "abstain.jsonl").rename(probes / "abstain.jsonl")
    counted = Counting(engine.embedder)
    engine = Engine(database=engine.database, embedder=counted, settings=engine.settings)
    reports = await evaluate.evaluate([evaluate.load(probes), evaluate.load(folder)], engine=engine, place=place)
    assert [report.name for report in reports] == ["harbour_abstain", "harbour"]
    assert [(report.judged, report.scores is None) for report in reports] == [(0, True), (2, False)]
    assert [report.abstention is None for report in reports] == [False, True]
    assert counted.texts["document"] == 2


class Counting:
    """The embedder, and how many texts it was given at once or one by one."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self.texts: Counter[Purpose] = Counter()
        self.calls: Counter[Purpose] = Counter()
        self.model_id = embedder.model_id
        self.max_input_tokens = embedder.max_input_tokens
        self.min_similarity = embedder.min_similarity
        self.token_counter = embedder.token_counter
        self.count_tokens = embedder.count_tokens
        self.close = embedder.close

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        self.texts[purpose] += len(texts)
        self.calls[purpose] += 1
        return await self._embedder.embed(texts, purpose=purpose, progress=progress)


async def test_questions_are_embedded_together_and_not_for_keywords_alone(folder: Path, engine: Engine, place: Place):
    """Two judged questions and two probes."""
    for mode, calls in (("hybrid", 1), ("keyword", 0)):
        counted = Counting(engine.embedder)
        counting = Engine(database=engine.database, embedder=counted, settings=engine.settings)
        await evaluate.evaluate([evaluate.load(folder)], engine=counting, place=place, mode=mode)
        assert (counted.calls["query"], counted.texts["query"]) == (calls, 4 * calls)


async def test_a_question_that_the_model_cannot_take_is_asked_by_keywords(folder: Path, engine: Engine, place: Place):
    """300 words are more than the model reads; the rarest of them is in one document."""
    jsonl(folder / "queries.jsonl", {"_id": "q2", "text": "granite " + "harbour " * 300}, {"_id": "q1", "text": "noon"})
    (report,) = await evaluate.evaluate([evaluate.load(folder)], engine=engine, place=place)
    assert report.scores is not None
    assert report.scores.recall_at_1 == 1


# Words that change from one paragraph to the next: equal chunks would be dropped as duplicates.
THINGS = ("ropes", "barrels", "lanterns", "anchors", "sails", "compasses", "hammers", "ledgers", "oars", "nets")


def paragraph(number: int) -> str:
    return " ".join(f"Shed {number} of the harbour holds {thing} and {number + 7} {thing[::-1]}." for thing in THINGS)


@pytest.fixture
def long_folder(tmp_path: Path) -> Path:
    """Two long documents, whose lines end as on Windows; the answer is at the end of the first one."""
    made = tmp_path / "long"
    made.mkdir()
    answer = "The lighthouse lamp is lit with whale oil every evening."
    text = "\r\n\r\n".join([*map(paragraph, range(4)), answer])
    jsonl(
        made / "corpus.jsonl",
        {"_id": "first", "title": "Ledger", "text": text},
        {"_id": "second", "title": "Ledger", "text": "\r\n\r\n".join(map(paragraph, range(4, 8)))},
    )
    start = text.index(answer)
    jsonl(
        made / "queries.jsonl",
        {
            "_id": "q",
            "text": "With what oil is the lighthouse lamp lit?",
            "metadata": {"start": start, "end": len(text)},
        },
    )
    (made / "qrels.tsv").write_text("q\tfirst\t1\n", encoding="utf-8")
    return made


async def test_an_answer_with_a_place_is_found_by_the_chunk_that_has_it(
    long_folder: Path, engine: Engine, place: Place
):
    (report,) = await evaluate.evaluate([evaluate.load(long_folder)], engine=engine, place=place)
    assert report.chunks > 6
    assert (report.by_span, report.unreachable) == (1, 0)
    assert report.scores is not None
    assert report.scores.recall_at_1 == 1


async def test_an_answer_that_no_chunk_has_half_of_is_not_found(long_folder: Path, engine: Engine, place: Place):
    """The span is the whole document, the chunks are pieces of it."""
    jsonl(
        long_folder / "queries.jsonl",
        {"_id": "q", "text": "With what oil is the lamp lit?", "metadata": {"start": 0, "end": 4000}},
    )
    (report,) = await evaluate.evaluate([evaluate.load(long_folder)], engine=engine, place=place)
    assert (report.by_span, report.unreachable) == (1, 1)
    assert report.scores is not None
    assert report.scores.recall_at_10 == 0


async def test_a_long_document_stands_where_its_best_chunk_does(long_folder: Path, engine: Engine, place: Place):
    """Without the place of the answer the documents are judged: eight chunks, and two places in the order."""
    jsonl(
        long_folder / "queries.jsonl",
        {"_id": "q", "text": "With what oil is the lighthouse lamp lit?"},
        {"_id": "r", "text": "Which shed of the harbour holds ropes, and which one oars?"},
    )
    (long_folder / "qrels.tsv").write_text("q\tsecond\t1\nr\tfirst\t1\nr\tsecond\t1\n", encoding="utf-8")
    (report,) = await evaluate.evaluate([evaluate.load(long_folder)], engine=engine, place=place)
    assert report.by_span == 0
    assert report.scores is not None
    # The first question's answer is in the other document, so that `second` comes second.
    assert report.scores.mrr_at_10 == (0.5 + 1) / 2
    assert report.scores.recall_at_5 == 1


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def rag(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], deployment: Deployment, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """`rag("eval", …)` on the test's database: exit code, standard output, standard error."""
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rag", *arguments])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        printed = capfd.readouterr()
        return code, printed.out, printed.err

    return run


def test_the_command_prints_one_line_a_collection_and_says_what_was_left_out(rag, folder: Path):
    code, out, err = rag("eval", str(folder))
    assert code == 0
    header, scores, kinds, refused = out.splitlines()
    assert re.split(" +", header)[:9] == [
        *("collection", "documents", "chunks", "questions"),
        *("R@1", "R@5", "R@10", "MRR@10", "nDCG@10"),
    ]
    assert re.split(" +", scores)[:9] == ["harbour", "2", "2", "2", *["1.000"] * 5]
    assert re.split(" +", kinds)[:4] == ["collection", "kind", "questions", "refused"]
    assert re.split(" +", refused)[:4] == ["harbour", "out_of_corpus", "1", "100.0%"]
    assert "harbour: ingesting: 3/3" in err
    assert "harbour: 1 documents were left out" in err
    assert "harbour: 1 questions without a relevant document were not asked" in err


def test_the_command_prints_one_json_object(rag, folder: Path):
    code, out, _ = rag("eval", str(folder), "--mode", "keyword", "--json")
    assert code == 0
    printed = json.loads(out)
    assert (printed["mode"], printed["fusion"]) == ("keyword", "rank")
    (report,) = printed["collections"]
    assert report["scores"]["ndcg_at_10"] == 1
    assert report["abstention"]["others"]["out_of_corpus"]["refused"] == 1
    assert report["left_out"][0]["document_id"] == "empty"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no directory"),
        (["harbour", "--mode", "magic"], "--mode must be one of hybrid, vector, keyword"),
        (["harbour", "--fusion", "magic"], "--fusion must be one of rank, score"),
        (["harbour", "--corpus", "elsewhere"], "harbour has no corpus.jsonl"),
    ],
)
def test_what_cannot_be_measured_is_one_line(rag, folder: Path, arguments: list[str], message: str):
    code, out, err = rag("eval", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1


# --- the public collections -----------------------------------------------------------------------


async def test_a_public_collection_is_found_as_it_should_be(shared_data: Path, engine: Engine, place: Place):
    """SQuAD's first 30 paragraphs, which are of one article, and 60 questions about them; of all 320, .89 is found."""
    whole = evaluate.load(shared_data / "squad")
    names = {document.id for document in whole.documents[:30]}
    part = dataclasses.replace(
        whole,
        documents=whole.documents[:30],
        questions=tuple(question for question in whole.questions if names.issuperset(question.gains))[:60],
    )
    (report,) = await evaluate.evaluate([part], engine=engine, place=place)
    assert (report.documents, report.judged, report.left_out) == (30, 60, ())
    assert report.scores is not None
    assert report.scores.ndcg_at_10 > 0.8


@pytest.mark.parametrize(
    ("name", "documents", "questions", "spans"),
    [
        ("squad", 320, 1440, 0),
        ("cranfield", 1400, 225, 0),
        ("covidqa_long", 49, 841, 841),
        ("fastapi_docs", 119, 20, 0),
        ("xquad_de", 240, 623, 0),
        ("xquad_ru", 240, 623, 0),
    ],
)
def test_every_public_collection_is_read_whole(
    shared_data: Path, name: str, documents: int, questions: int, spans: int
):
    """The counts that their own descriptions give; each span is the answer's text."""
    collection = evaluate.load(shared_data / name)
    assert len(collection.documents) == documents
    assert len(collection.questions) == sum(question.is_judged for question in collection.questions) == questions
    assert sum(question.span is not None for question in collection.questions) == spans


def test_the_public_probes_are_about_squad(shared_data: Path):
    collection = evaluate.load(shared_data / "squad_abstain")
    assert collection.corpus == (shared_data / "squad").resolve()
    kinds = Counter(probe.kind for probe in collection.probes)
    assert kinds == {"answerable": 300, "adversarial_unanswerable": 300, "out_of_corpus": 150}
