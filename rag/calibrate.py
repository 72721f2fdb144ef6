"""Finds what ranks a tenant's own collection better than what counts now, and writes it for that tenant.

How far the vectors are believed against the words is tried out with the product's own search: as rows of
rag_calibrations in the tenant of the evaluation, on questions that are judged. A change is written only when it is
better on questions that had no part in choosing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rag import screen
from rag.deployment import Deployment
from rag.errors import InvalidInput
from rag.evaluate import TOP_K, Collection, Engine, Examination, Report, examine, ndcg, prepare, stored, threshold
from rag.exchange import Fusion
from rag.operate import Desk, Session

MIN_QUESTIONS = 100
"""Of one language. One question's nDCG@10 scatters by .17 (SQuAD) to .26 (Cranfield), the mean of 100 by .02, which is
more than neighbours among SHARES differ by."""
SHARES = tuple(tenth / 10 for tenth in range(11))
"""What is tried. Between 0.4 and 0.5, about the shipped share, nDCG@10 differs by .001 (SQuAD) to .017 (CovidQA)."""
KEPT_RIGHT = 0.99
"""Of the right passages, by the minimum similarity: as MINILM_MIN_SIMILARITY does in all but one collection."""
CERTAIN = 2.0
"""Standard errors by which a gain must differ from nothing: once in 40 times chance alone does."""

Halves = tuple[Sequence[int], Sequence[int]]
"""Places in a list of questions."""


# --- what is better ------------------------------------------------------------------------------


def halve(documents: Sequence[str]) -> Halves:
    """Questions in two halves, by the document that each is about: those about one document stay together.

    As equal as the documents allow, and of all parts of a collection, which may be in the order of its subjects.
    """
    groups: dict[str, list[int]] = {}
    for place, document in enumerate(documents):
        groups.setdefault(document, []).append(place)
    halves: tuple[list[int], list[int]] = ([], [])
    for group in groups.values():
        min(halves, key=len).extend(group)
    return halves


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A share, and the mean nDCG@10 of each half with what the other half would have chosen."""

    vector_share: float
    ndcg: float


def choose(measured: Mapping[float, Sequence[float]], documents: Sequence[str], present: float) -> Choice | None:
    """The share that is better than the present one on questions that did not choose it; None when none is.

    `measured`: by share, the present one included, the nDCG of each question. `documents`: what each question is
    about; questions about one document are not taken for independent of each other.
    """
    halves = halve(documents)
    if not all(halves):
        return None

    def best(places: Sequence[int]) -> float:
        return max(
            measured,
            key=lambda share: (round(fmean(measured[share][place] for place in places), 9), -abs(share - present)),
        )

    found = [0.0] * len(documents)
    for half, other in (halves, halves[::-1]):
        share = best(other)
        for place in half:
            found[place] = measured[share][place]
    gains = [after - before for after, before in zip(found, measured[present], strict=True)]
    if any(fmean(gains[place] for place in half) <= 0 for half in halves):
        return None
    if fmean(gains) <= CERTAIN * _standard_error(gains, documents):
        return None
    chosen = best(range(len(documents)))
    return None if chosen == present else Choice(vector_share=chosen, ndcg=fmean(found))


def _standard_error(gains: Sequence[float], documents: Sequence[str]) -> float:
    """Of the mean, over clusters of questions about one document."""
    mean = fmean(gains)
    beside: dict[str, float] = {}
    for gain, document in zip(gains, documents, strict=True):
        beside[document] = beside.get(document, 0.0) + gain - mean
    scatter = math.fsum(sum_of_one**2 for sum_of_one in beside.values())
    return math.sqrt(scatter * len(beside) / (len(beside) - 1)) / len(gains)


def lower(cosines: Sequence[Sequence[float]], present: float) -> float | None:
    """A lower minimum similarity, when in each part more than one right passage in a hundred is below the present one.

    `cosines`: in each part, of right passages. None for: it stays. It is never raised: there is one for all of a
    tenant's languages, and what is harmless in one of them takes the right passages of another.
    """
    if not all(part and _share_from(part, present) < KEPT_RIGHT for part in cosines):
        return None
    return max(-1.0, math.floor(threshold([cosine for part in cosines for cosine in part], KEPT_RIGHT) * 100) / 100)


def _share_from(cosines: Sequence[float], minimum: float) -> float:
    return sum(cosine >= minimum for cosine in cosines) / len(cosines)


# --- how it is found and written -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What a language is searched with."""

    vector_share: float
    min_similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What rag_calibrations says of a language and a fusion; None is what is shipped."""

    vector_share: float | None = None
    min_similarity: float | None = None


Rows = Mapping[tuple[str, str], Row]
"""By fusion and language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """What was found for a language. Where nothing better was, before and after are equal, and nothing is written."""

    language: str
    """Empty where that of the documents is not known."""
    questions: int
    before: Weights
    after: Weights
    ndcg_before: float
    ndcg_after: float
    """Of another share: each half of the questions with what the other half chose."""

    @property
    def is_better(self) -> bool:
        return self.before != self.after


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was found for a tenant."""

    tenant_id: str
    embedding_model: str
    fusion: Fusion
    refinements: tuple[Refinement, ...]
    too_few: Mapping[str, int]
    """Questions of the languages that have not enough of them."""


Group = Sequence[tuple[int, str]]
"""Questions of one language: the number of each in the examination, and the document that it is about."""


def named(language: str) -> str:
    """A language, or the lack of one, for people."""
    return language or "no known language"


def check(session: Session, collection: Collection, *, tenant_id: str, embedding_model: str) -> None:
    """Raise InvalidInput for a tenant that has nothing of this model, and for a collection with too few questions."""
    judged = sum(question.is_judged for question in collection.questions)
    if judged < MIN_QUESTIONS:
        raise InvalidInput(
            f"{collection.name} has {judged} judged questions, and calibrating takes {MIN_QUESTIONS} of one language",
            field="DIR",
        )
    row = session.row("embeds_with", {"tenant_id": tenant_id, "embedding_model": embedding_model})
    if row is None or row["embeds_with"] is None:
        raise InvalidInput(f"tenant {tenant_id} has no document", field="--tenant")
    if not row["embeds_with"]:
        raise InvalidInput(
            f"nothing of tenant {tenant_id} is embedded with {embedding_model}, the model that "
            "RAG_EMBEDDING_PROVIDER and RAG_EMBEDDING_MODEL name",
            field="RAG_EMBEDDING_MODEL",
        )


async def calibrate(
    collection: Collection, *, engine: Engine, place: Deployment, desk: Desk, tenant_id: str, fusion: Fusion = "rank"
) -> tuple[Report, Calibration]:
    """Measure a collection with what is shipped; then find, and write for a tenant, what is better.

    Raises InvalidInput as `check` does and when no language has enough questions, and the EmbeddingError and
    DatabaseError families.
    """
    model = engine.embedder.model_id
    with desk.session() as session:
        check(session, collection, tenant_id=tenant_id, embedding_model=model)
        present = {
            (row["fusion"], row["language"]): Row(
                vector_share=row["vector_share"], min_similarity=row["min_similarity"]
            )
            for row in session.rows("list_calibrations", {"tenant_id": tenant_id})
            if row["embedding_model"] == model
        }
    async with stored(collection, engine=engine, place=place) as corpus:
        examination = await prepare(collection, corpus, engine=engine, fusion=fusion)
        groups = await by_language(examination)
        too_few = {language: len(group) for language, group in groups.items() if len(group) < MIN_QUESTIONS}
        if len(too_few) == len(groups):
            counted = ", ".join(f"{count} in {named(language)}" for language, count in too_few.items())
            raise InvalidInput(
                f"calibrating takes {MIN_QUESTIONS} judged questions of one language; there are {counted or 'none'}",
                field="DIR",
            )
        # Before anything is tried: the tenant of an evaluation has nothing but what is shipped.
        report = await examine(examination)
        trial = _Trial(examination, desk, present)
        found = [await trial.refine(language, groups[language]) for language in groups if language not in too_few]
    with desk.session() as session:
        # It may have been erased meanwhile, and nothing of it may come back.
        check(session, collection, tenant_id=tenant_id, embedding_model=model)
        for each in found:
            if each.is_better:
                trial.write(session, tenant_id, each)
    return report, Calibration(
        tenant_id=tenant_id, embedding_model=model, fusion=fusion, refinements=tuple(found), too_few=too_few
    )


async def by_language(examination: Examination) -> dict[str, Group]:
    """The judged questions, each by the language of the document that answers it best, if that is stored."""
    stored_as = {name: document_id for document_id, name in examination.names.items()}
    languages: dict[str, str] = {}
    groups: dict[str, list[tuple[int, str]]] = {}
    async with examination.engine.database.transaction(examination.corpus.principal, read_only=True) as session:
        for number, question in enumerate(examination.questions):
            right = [(gain, name) for name, gain in question.gains.items() if gain > 0 and name in stored_as]
            if not right:
                continue
            _, document = max(right)
            if document not in languages:
                row = await session.row("get_document", {"id": stored_as[document]})
                assert row is not None
                languages[document] = row["language"] or ""
            groups.setdefault(languages[document], []).append((number, document))
    return dict(sorted(groups.items()))


class _Trial:
    """What counts for a tenant, and what becomes of it, tried out in the tenant of an evaluation."""

    def __init__(self, examination: Examination, desk: Desk, rows: Rows) -> None:
        self._examination = examination
        self._desk = desk
        self._rows = dict(rows)
        for (fusion, language), row in rows.items():
            self._try(fusion, language, row)

    async def refine(self, language: str, group: Group) -> Refinement:
        """Find what is better for the questions of a language; the next one is tried on top of it."""
        fusion = self._examination.fusion
        row = self._rows.get((fusion, language), Row())
        before = Weights(
            vector_share=self._shipped_share(language) if row.vector_share is None else row.vector_share,
            min_similarity=self._min_similarity,
        )
        passes = len({*SHARES, before.vector_share}) + 1
        what = f"{self._examination.collection.name}: calibrating {named(language)}"
        with screen.counting(passes * len(group), what) as counter:
            at_first = await self._ndcgs(group, counter)
            after, ndcgs = await self._with_minimum(language, group, before, at_first, counter)
            measured = {before.vector_share: ndcgs}
            for share in SHARES:
                if share not in measured:
                    counter.note(f"{share} for the vectors")
                    self._try(fusion, language, replace(after, vector_share=share))
                    measured[share] = await self._ndcgs(group, counter)
        choice = choose(measured, [document for _, document in group], before.vector_share)
        if choice is not None:
            after = replace(after, vector_share=choice.vector_share)
        self._try(fusion, language, after)
        self._rows[fusion, language] = Row(
            vector_share=row.vector_share if choice is None else after.vector_share,
            min_similarity=row.min_similarity
            if after.min_similarity == before.min_similarity
            else after.min_similarity,
        )
        return Refinement(
            language=language,
            questions=len(group),
            before=before,
            after=after,
            ndcg_before=fmean(at_first),
            ndcg_after=fmean(ndcgs) if choice is None else choice.ndcg,
        )

    def write(self, session: Session, tenant_id: str, refinement: Refinement) -> None:
        """Write what was found for a language; where the share or the minimum is as it was, that stays as it is."""
        fusion = self._examination.fusion
        self._set(
            session,
            tenant_id,
            fusion,
            refinement.language,
            self._rows[fusion, refinement.language],
            questions=refinement.questions,
            ndcg_before=refinement.ndcg_before,
            ndcg_after=refinement.ndcg_after,
        )

    @property
    def _min_similarity(self) -> float:
        """Of every question of the tenant."""
        configured = self._examination.engine.settings.rag_min_similarity_score
        if configured is not None:
            return configured
        minima = [row.min_similarity for row in self._rows.values() if row.min_similarity is not None]
        return min(minima, default=self._examination.engine.embedder.min_similarity)

    def _shipped_share(self, language: str) -> float:
        wanted = {
            "embedding_model": self._examination.engine.embedder.model_id,
            "language": language,
            "fusion": self._examination.fusion,
        }
        with self._desk.session() as session:
            row = session.row("shipped_share", wanted)
        assert row is not None
        return float(row["vector_share"])

    async def _with_minimum(
        self, language: str, group: Group, before: Weights, at_first: Sequence[float], counter: screen.Counter
    ) -> tuple[Weights, Sequence[float]]:
        """With a lower minimum when that takes right passages away, and is no worse in either half; and its nDCG."""
        if self._examination.engine.settings.rag_min_similarity_score is not None:
            return before, at_first
        counter.note("minimum similarity")
        halves = halve([document for _, document in group])
        cosines = await self._right_cosines(group, counter)
        lowest = lower(
            [[cosine for place in half for cosine in cosines[place]] for half in halves], before.min_similarity
        )
        if lowest is None:
            return before, at_first
        after = replace(before, min_similarity=lowest)
        self._try(self._examination.fusion, language, after)
        ndcgs = await self._ndcgs(group, None)
        if any(fmean(ndcgs[place] - at_first[place] for place in half) < 0 for half in halves):
            return before, at_first
        return after, ndcgs

    async def _ndcgs(self, group: Group, counter: screen.Counter | None) -> list[float]:
        """The nDCG of each question, with what is tried at the moment."""
        found = []
        for number, _ in group:
            gains, judged = self._examination.judge(number, await self._examination.ask(number))
            found.append(ndcg(gains, judged, TOP_K))
            if counter is not None:
                counter.step()
        return found

    async def _right_cosines(self, group: Group, counter: screen.Counter) -> list[list[float]]:
        """For each question the cosines of the right passages that would be found without a minimum."""
        found = []
        for number, _ in group:
            passages = await self._examination.ask(number, min_similarity=-1.0)
            gains, _ = self._examination.judge(number, passages)
            found.append(
                [
                    passage.cosine
                    for passage, gain in zip(passages, gains, strict=True)
                    if gain > 0 and passage.cosine is not None
                ]
            )
            counter.step()
        return found

    def _try(self, fusion: str, language: str, row: Weights | Row) -> None:
        tenant_id = self._examination.corpus.principal.tenant_id
        with self._desk.session() as session:
            self._set(session, tenant_id, fusion, language, row, questions=1, ndcg_before=0, ndcg_after=0)

    def _set(
        self,
        session: Session,
        tenant_id: str,
        fusion: str,
        language: str,
        row: Weights | Row,
        *,
        questions: int,
        ndcg_before: float,
        ndcg_after: float,
    ) -> None:
        session.run(
            "set_calibration",
            {
                "tenant_id": tenant_id,
                "embedding_model": self._examination.engine.embedder.model_id,
                "fusion": fusion,
                "language": language,
                "vector_share": row.vector_share,
                "min_similarity": row.min_similarity,
                "questions": questions,
                "ndcg_before": ndcg_before,
                "ndcg_after": ndcg_after,
            },
        )
