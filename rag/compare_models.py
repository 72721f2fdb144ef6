"""What a second embedding model would change: the nearest chunks of questions, and the scores of judged collections."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rag import deployment, embedded, evaluate
from rag.active_model import Model
from rag.database import Database
from rag.errors import InvalidInput, ModelChangeRefused
from rag.exchange import Fusion, Mode
from rag.principal import Principal
from rag.store import halfvec

# Of the principal's own questions, the last ones.
SAMPLE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """A question, and how many of its `top_k` nearest chunks both models agree on."""

    question: str
    active_found: int
    second_found: int
    shared: int

    @property
    def share(self) -> float:
        """Of those that the active model finds; 1 where it finds none."""
        return self.shared / self.active_found if self.active_found else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Overlap at k over all questions: 0 to 1."""

    questions: int
    mean: float
    median: float
    least: float

    @classmethod
    def of(cls, overlaps: Sequence[Overlap]) -> Agreement:
        shares = [overlap.share for overlap in overlaps]
        return cls(
            questions=len(shares), mean=statistics.fmean(shares), median=statistics.median(shares), least=min(shares)
        )


async def questions_of(database: Database, principal: Principal, *, at_most: int = SAMPLE) -> list[str]:
    """What the principal asked last, as far as the logs keep words. Raises InvalidInput when there is nothing."""
    async with database.transaction(principal, read_only=True) as session:
        rows = await session.rows("my_questions", {"at_most": at_most})
    if not rows:
        raise InvalidInput(
            "the principal has no questions in the logs, or their words are not kept: name a file with --questions",
            field="--questions",
        )
    return [row["query_text"] for row in rows]


def questions_in(file: Path) -> list[str]:
    """The lines of a file that are not empty. Raises InvalidInput when there are none, or it cannot be read."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}", field="--questions") from error
    questions = [line.strip() for line in lines if line.strip()]
    if not questions:
        raise InvalidInput(f"{file} has no question", field="--questions")
    return questions


async def compare(
    questions: Sequence[str],
    *,
    principal: Principal,
    database: Database,
    active: Model,
    second: Model,
    top_k: int,
) -> list[Overlap]:
    """Ask each question of both columns, exactly, among what the principal may read and both models have.

    Raises ModelChangeRefused when there are no such chunks, so that nothing would be compared, and the EmbeddingError
    and DatabaseError families.
    """
    before = await active.embedder.embed(questions, purpose="query")
    after = await second.embedder.embed(questions, purpose="query")
    found = []
    async with database.transaction(principal, read_only=True) as session:
        for question, one, other in zip(questions, before, after, strict=True):
            row = await session.row(
                "compare_models", {"embedding": halfvec(one), "second_embedding": halfvec(other), "top_k": top_k}
            )
            assert row is not None
            found.append(Overlap(question=question, **row))
    if not any(overlap.active_found for overlap in found):
        raise ModelChangeRefused(
            "no chunk that the principal may read has a vector of both models: `rag models list` says what is filled"
        )
    return found


async def evaluate_both(
    collections: Sequence[evaluate.Collection], models: Sequence[Model], *, mode: Mode, fusion: Fusion
) -> list[list[evaluate.Report]]:
    """`rag eval` with each model, in a database of its own that is gone afterwards; reports in the order given.

    Raises EmbeddedUnavailable, and the EmbeddingError and DatabaseError families.
    """
    found = []
    for model in models:
        with embedded.ephemeral() as server:
            signer = deployment.prepare(server, model.settings)
            place = deployment.Deployment(
                app_url=server.url("rag_app"),
                publisher_url=server.url("rag_publisher"),
                signer=signer,
                server=server,
            )
            async with place.open(model.settings) as database:
                engine = evaluate.Engine(database=database, embedder=model.embedder, settings=model.settings)
                found.append(await evaluate.evaluate(collections, engine=engine, place=place, mode=mode, fusion=fusion))
    return found
