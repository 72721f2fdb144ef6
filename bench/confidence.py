"""How well the service knows what it does not know: confidence and ROUTE against questions with and without an answer.

Run: `make bench`, or `python bench/confidence.py`; the collections are those of RAG_TEST_DATA, by default
`../shared/data` beside the checkout. Every question is asked of the product, which quotes its sources. Without an
answer are, in English, the questions of squad_abstain about articles that are in no document; in German and Russian
those about the half of XQuAD's articles that is not stored, which then is stored while the other half is not.

The weights of rag/confidence.py come from here. They are fitted on one half of the questions, by article, and judged
on the other, both ways; those that are shipped are fitted on both. Fails when these miss what is promised.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rag import confidence, deployment, embedded, evaluate, screen
from rag.answer import RAGService
from rag.confidence import Signals, Weights
from rag.embed import open_embedder
from rag.exchange import ConfidenceScore, Mode, RAGRequest
from rag.settings import Settings

RESULT = Path(__file__).parent / "results" / "confidence.md"
MODES: tuple[Mode, ...] = ("hybrid", "keyword")
OUT_OF_CORPUS = "out_of_corpus"
# As many as a pool has connections for.
AT_ONCE = 3

# What the issue promises, of the default mode.
LEAST_AUC = 0.93
LEAST_ROUTED = 0.90
MOST_ROUTED = 0.10

# Of the sum of squares of the weights, on signals of variance 1: keeps what separates perfectly finite.
RIDGE = 1e-3
NEWTON_STEPS = 60


@dataclass(frozen=True)
class Trial:
    """A question, and how the product answered it."""

    article: str
    answerable: bool
    retrieved: bool
    """Whether the document that has the answer was among the sources."""
    signals: Signals | None
    """None without a passage."""
    language: str
    score: ConfidenceScore
    grounded: bool

    def routed(self, probability: float, threshold: int) -> bool:
        """Whether somebody would be asked instead, were the sources to answer with this probability."""
        llm_score = round(100 * probability) if self.grounded else 0
        whole = (
            self.score.retrieval_score * confidence.RETRIEVAL_WEIGHT
            + self.score.coverage_score * confidence.COVERAGE_WEIGHT
            + llm_score / 100 * confidence.LLM_WEIGHT
        )
        score = dataclasses.replace(self.score, llm_score=llm_score, overall=int(round(whole, 6)))
        return not confidence.suffices(score, grounded=self.grounded, graded=False, threshold=threshold)


@dataclass(frozen=True)
class Part:
    """Documents to be stored, and questions: text, the document that has the answer, whether it has one."""

    collection: evaluate.Collection
    questions: tuple[tuple[str, str | None, bool], ...]


# --- what is asked --------------------------------------------------------------------------------


def article(document_id: str) -> str:
    return document_id.rsplit("#", 1)[0]


def with_probes(data: Path) -> Iterator[Part]:
    """SQuAD's questions and those of squad_abstain; questions that look answerable and are not are left out."""
    collection = evaluate.load(data / "squad")
    asked: list[tuple[str, str | None, bool]] = [
        (question.text, gold(question), True) for question in collection.questions if question.is_judged
    ]
    for line in (data / "squad_abstain" / "abstain.jsonl").read_text(encoding="utf-8").splitlines():
        probe = json.loads(line)
        if probe["kind"] in (evaluate.ANSWERABLE, OUT_OF_CORPUS):
            asked.append((probe["text"], probe.get("gold_doc"), probe["kind"] == evaluate.ANSWERABLE))
    yield Part(collection, tuple(asked))


def by_halves(data: Path, name: str) -> Iterator[Part]:
    """All questions of a collection of every half of its articles, alternately of those that are asked about."""
    collection = evaluate.load(data / name)
    questions = [question for question in collection.questions if question.is_judged]
    asked_about = sorted({article(gold(question)) for question in questions})
    others = sorted({article(document.id) for document in collection.documents} - set(asked_about))
    for half in (0, 1):
        stored = {*asked_about[half::2], *others[half::2]}
        documents = tuple(document for document in collection.documents if article(document.id) in stored)
        yield Part(
            dataclasses.replace(collection, documents=documents),
            tuple((question.text, gold(question), article(gold(question)) in stored) for question in questions),
        )


def gold(question: evaluate.Question) -> str:
    return next(document for document, gain in question.gains.items() if gain > 0)


async def ask(part: Part, *, mode: Mode, engine: evaluate.Engine, place: deployment.Deployment) -> list[Trial]:
    async with evaluate.stored(part.collection, engine=engine, place=place) as corpus:
        service = RAGService(engine.settings, engine.database, engine.embedder)
        turn = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, counter: screen.Counter) -> Trial:
            text, source, answerable = part.questions[number]
            async with turn:
                answer = await service.generate(RAGRequest(query=text, mode=mode), principal=corpus.principal)
            counter.step()
            passages = answer.passages
            found = {corpus.stored[passage.document_id].id for passage in passages}
            return Trial(
                # Of what is in no document nobody says which article it is about.
                article=f"question {number}" if source is None else article(source),
                answerable=answerable,
                retrieved=answerable and source in found,
                signals=confidence.signals(text, passages) if passages else None,
                language=passages[0].language or "" if passages else "",
                score=answer.confidence,
                grounded=answer.grounded,
            )

        with screen.counting(len(part.questions), f"{part.collection.name}: asking, {mode}") as counter:
            return list(await asyncio.gather(*(one(number, counter) for number in range(len(part.questions)))))


# --- what is fitted -------------------------------------------------------------------------------


def halve(trials: Sequence[Trial]) -> tuple[list[Trial], list[Trial]]:
    """By article, alternately; those that nothing stored is about are shared out by themselves."""
    stored = sorted({trial.article for trial in trials if trial.answerable})
    others = sorted({trial.article for trial in trials} - set(stored))
    first = {*stored[::2], *others[::2]}
    return [trial for trial in trials if trial.article in first], [
        trial for trial in trials if trial.article not in first
    ]


def fit(trials: Sequence[Trial], *, with_cosine: bool) -> Weights:
    """Logistic regression by Newton's method; answerable questions and others weigh the same."""
    rows = [trial for trial in trials if trial.signals is not None]
    table = np.array([_inputs(trial.signals, with_cosine) for trial in rows if trial.signals is not None])
    right = np.array([trial.answerable for trial in rows], dtype=float)
    weight = np.where(right == 1, 0.5 / right.mean(), 0.5 / (1 - right.mean()))
    mean, spread = table.mean(axis=0), table.std(axis=0) + 1e-9
    inputs = np.column_stack([(table - mean) / spread, np.ones(len(table))])
    ridge = np.full(inputs.shape[1], RIDGE * len(table))
    ridge[-1] = 1e-9
    found = np.zeros(inputs.shape[1])
    for _ in range(NEWTON_STEPS):
        probable = 1 / (1 + np.exp(-inputs @ found))
        gradient = inputs.T @ (weight * (probable - right)) + ridge * found
        curvature = (inputs * (weight * probable * (1 - probable))[:, None]).T @ inputs + np.diag(ridge)
        found -= np.linalg.solve(curvature, gradient)
    weights = [float(value) for value in found[:-1] / spread]
    bias = float(found[-1] - (found[:-1] * mean / spread).sum())
    if min(weights) < 0:
        sys.exit("a signal speaks against an answer: the weights would not be monotone")
    return Weights(*(weights if with_cosine else [0.0, *weights]), bias)


def _inputs(signals: Signals, with_cosine: bool) -> list[float]:
    return [*([signals.cosine] if with_cosine else []), signals.share, math.log1p(signals.found)]


# --- what is judged -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgement:
    answerable: int
    out_of_corpus: int
    auc: float
    routed_out_of_corpus: float
    routed_retrieved: float


def judge(trials: Sequence[Trial], probable: Sequence[float], threshold: int) -> Judgement:
    routed = [trial.routed(each, threshold) for trial, each in zip(trials, probable, strict=True)]
    inside = [each for trial, each in zip(trials, probable, strict=True) if trial.answerable]
    outside = [each for trial, each in zip(trials, probable, strict=True) if not trial.answerable]
    return Judgement(
        answerable=len(inside),
        out_of_corpus=len(outside),
        auc=auc(inside, outside),
        routed_out_of_corpus=_share([each for trial, each in zip(trials, routed, strict=True) if not trial.answerable]),
        routed_retrieved=_share([each for trial, each in zip(trials, routed, strict=True) if trial.retrieved]),
    )


def probabilities(trials: Sequence[Trial], weights: Weights) -> list[float]:
    return [0.0 if trial.signals is None else weights.probability(trial.signals) for trial in trials]


def auc(inside: Sequence[float], outside: Sequence[float]) -> float:
    """How probably one of the first is above one of the second; equal ones count half."""
    ranked = np.sort(np.array(outside))
    below = np.searchsorted(ranked, inside, side="left")
    up_to = np.searchsorted(ranked, inside, side="right")
    return float((below + up_to).mean() / 2 / len(ranked))


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def shipped(model: str, language: str, mode: Mode) -> Weights:
    words = confidence.WORDS.get(language, confidence.OTHER_WORDS)
    return words if mode == "keyword" else confidence.COSINES.get(model, {}).get(language, words)


async def run(data: Path, modes: Sequence[Mode], output: Path) -> bool:
    """Write the page; whether what is promised holds."""
    settings = Settings(_env_file=None, rag_llm_provider="extractive")
    threshold = settings.rag_confidence_threshold
    asked: dict[tuple[Mode, str], list[Trial]] = {}
    with embedded.ephemeral() as server:
        signer = deployment.prepare(server, settings)
        place = deployment.Deployment(
            app_url=server.url("rag_app"), publisher_url=server.url("rag_publisher"), signer=signer, server=server
        )
        embedder = open_embedder(settings)
        async with place.open(settings) as database:
            engine = evaluate.Engine(database=database, embedder=embedder, settings=settings)
            for mode in modes:
                for name, parts in (
                    ("squad + squad_abstain", with_probes(data)),
                    ("xquad_de", by_halves(data, "xquad_de")),
                    ("xquad_ru", by_halves(data, "xquad_ru")),
                ):
                    asked[mode, name] = [
                        trial for part in parts for trial in await ask(part, mode=mode, engine=engine, place=place)
                    ]
        await embedder.close()
    text, holds = page(asked, model=embedder.model_id, threshold=threshold)
    output.write_text(text, encoding="utf-8")
    print(text)
    return holds


def page(asked: dict[tuple[Mode, str], list[Trial]], *, model: str, threshold: int) -> tuple[str, bool]:
    """The results in Markdown, and whether what is promised holds."""
    lines = [
        "# Confidence against truth",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, {model}, answers that quote their sources, "
        f"RAG_CONFIDENCE_THRESHOLD={threshold}. AUC is of the probability that the sources answer the question, "
        "answerable questions against questions out of the corpus. ROUTE is the service's decision to name somebody "
        "to ask instead; of the answerable questions those count whose source was retrieved.",
        "",
        f"Promised of hybrid search: AUC ≥ {LEAST_AUC}, ROUTE on ≥ {LEAST_ROUTED:.0%} of the questions out of the "
        f"corpus and on ≤ {MOST_ROUTED:.0%} of the others, by the weights as shipped and by those of the other half. "
        "Halves are of articles. The weights as shipped (`rag/confidence.py`) are those of all, rounded.",
        "",
        "| Questions | Search | Weights | answerable | out of corpus | AUC | ROUTE, out of corpus | "
        "ROUTE, source retrieved | cosine, share, found, bias |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    holds = True
    for (mode, name), trials in asked.items():
        languages = [trial.language for trial in trials if trial.language]
        language = max(set(languages), key=languages.count)
        with_cosine = mode != "keyword"
        first, second = halve(trials)
        present = shipped(model, language, mode)
        of_first, of_second = (fit(half, with_cosine=with_cosine) for half in (first, second))
        crossed = [*probabilities(first, of_second), *probabilities(second, of_first)]
        everything = fit(trials, with_cosine=with_cosine)
        rows = [
            ("**as shipped**", trials, probabilities(trials, present), numbers(present)),
            ("each half by those of the other", [*first, *second], crossed, ""),
            ("first half, fitted on the second", first, probabilities(first, of_second), numbers(of_second)),
            ("second half, fitted on the first", second, probabilities(second, of_first), numbers(of_first)),
            ("fitted on all", trials, probabilities(trials, everything), numbers(everything)),
        ]
        for place, (which, those, probable, weights) in enumerate(rows):
            found = judge(those, probable, threshold)
            if place < 2 and with_cosine:
                holds &= found.auc >= LEAST_AUC and found.routed_out_of_corpus >= LEAST_ROUTED
                holds &= found.routed_retrieved <= MOST_ROUTED
            lines.append(
                f"| {name} | {mode} | {which} | {found.answerable:,} | {found.out_of_corpus:,} | {found.auc:.3f} | "
                f"{found.routed_out_of_corpus:.1%} | {found.routed_retrieved:.1%} | {weights} |"
            )
    return "\n".join(lines) + "\n", holds


def numbers(weights: Weights) -> str:
    return ", ".join(f"{value:.1f}" for value in dataclasses.astuple(weights))


def main() -> None:
    checkout = Path(__file__).resolve().parents[1]
    data = Path(os.environ.get("RAG_TEST_DATA", checkout.parent / "shared" / "data"))
    parser = argparse.ArgumentParser(description="Confidence against truth")
    parser.add_argument("--modes", default=",".join(MODES), help="hybrid, keyword or both")
    parser.add_argument("--output", type=Path, help=f"instead of {RESULT.relative_to(checkout)}")
    arguments = parser.parse_args()
    modes = [mode for mode in MODES if mode in arguments.modes.split(",")]
    if not (data / "squad_abstain").is_dir():
        print("the test collections are absent: set RAG_TEST_DATA to their folder", file=sys.stderr)
        return
    # A part is not what the committed page stands for.
    output = arguments.output or (RESULT if tuple(modes) == MODES else Path(os.devnull))
    if not asyncio.run(run(data, modes, output)):
        sys.exit("the weights as shipped miss what is promised")


if __name__ == "__main__":
    main()
