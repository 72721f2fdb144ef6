"""What is better and what is chance, by hand; and a calibration from end to end, for one tenant and no other."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from rag import calibrate, cli, evaluate
from rag.calibrate import MIN_QUESTIONS, SHARES, Weights
from rag.database import Database
from rag.deployment import Deployment as Place
from rag.embed import Purpose
from rag.errors import InvalidInput
from rag.evaluate import Engine
from rag.operate import Desk
from rag.principal import Principal
from rag.retrieve import retrieve
from rag.settings import Settings
from tests.conftest import DIMENSIONS, SIGNER, SIGNING_KEY, Deployment, Store, unit_vector

# --- what is better -------------------------------------------------------------------------------


def test_questions_about_one_document_stay_in_one_half():
    documents = [f"document {number % 30}" for number in range(100)]
    first, second = calibrate.halve(documents)
    assert sorted([*first, *second]) == list(range(100))
    assert not {documents[place] for place in first} & {documents[place] for place in second}
    # Ten documents have four questions, twenty have three.
    assert abs(len(first) - len(second)) <= 4


def test_halves_are_not_the_first_and_the_last_questions():
    """A collection may be in the order of its subjects."""
    first, second = calibrate.halve([str(number) for number in range(100)])
    assert all(20 <= sum(place < 50 for place in half) <= 30 for half in (first, second))


EACH_ITS_OWN = [str(number) for number in range(100)]


def test_a_share_that_is_better_in_both_halves_is_chosen_and_told_by_what_the_other_half_chose():
    """Each half has .6 with the share .4, and .7 with the one that the other half likes best; all together like .5."""
    first, second = calibrate.halve(EACH_ITS_OWN)
    measured = {share: [0.0] * 100 for share in (0.4, 0.5, 0.6, 0.7)}
    for half, best in ((first, 0.6), (second, 0.7)):
        other = 0.7 if best == 0.6 else 0.6
        for place in half:
            measured[0.4][place], measured[0.5][place] = 0.6, 0.78
            measured[best][place], measured[other][place] = 0.8, 0.7
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) == calibrate.Choice(vector_share=0.5, ndcg=pytest.approx(0.7))


def test_what_only_one_half_likes_is_not_chosen():
    first, second = calibrate.halve(EACH_ITS_OWN)
    measured = {0.4: [0.6] * 100, 0.5: [0.6] * 100}
    for place in first:
        measured[0.5][place] = 0.9
    for place in second:
        measured[0.5][place] = 0.55
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) is None


def test_what_the_halves_want_for_each_other_must_not_hurt_either():
    """With what the second one wants the first one gains .3; with what the first one wants the second one loses .05."""
    first, second = calibrate.halve(EACH_ITS_OWN)
    measured = {share: [0.6] * 100 for share in (0.4, 0.5, 0.6)}
    for place in first:
        measured[0.5][place], measured[0.6][place] = 0.95, 0.9
    for place in second:
        measured[0.5][place], measured[0.6][place] = 0.55, 0.65
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) is None


def test_among_equals_the_present_share_stays_and_then_the_nearest_one():
    measured = {share: [0.6] * 100 for share in SHARES}
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) is None
    for share in (0.0, 0.7, 0.9):
        measured[share] = [0.8] * 100
    choice = calibrate.choose(measured, EACH_ITS_OWN, 0.4)
    assert choice is not None
    assert choice.vector_share == 0.7


def test_a_gain_that_chance_alone_would_give_is_not_chosen():
    """Of 100 questions 52 gain .3 and 48 lose as much: .012 in the mean, with a standard error of .03."""
    measured = {0.4: [0.5] * 100, 0.5: [0.0] * 100}
    for half in calibrate.halve(EACH_ITS_OWN):
        for number, place in enumerate(half):
            measured[0.5][place] = 0.8 if number < 26 else 0.2
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) is None
    # Of 80 and 20 it is .18.
    for half in calibrate.halve(EACH_ITS_OWN):
        for number, place in enumerate(half):
            measured[0.5][place] = 0.8 if number < 40 else 0.2
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) == calibrate.Choice(vector_share=0.5, ndcg=pytest.approx(0.68))


def test_many_questions_about_one_document_are_one_witness():
    """The same gains again, 80 and 20: by four documents in all they are no more than chance."""
    by_document = [str(number // 25) for number in range(100)]
    measured = {0.4: [0.5] * 100, 0.5: [0.5] * 100}
    halves = calibrate.halve(by_document)
    assert [len(half) for half in halves] == [50, 50]
    for half in halves:
        # One of its two documents gains, the other one loses a fifth as much.
        for number, place in enumerate(half):
            measured[0.5][place] = 0.8 if number < 25 else 0.44
    assert calibrate.choose(measured, by_document, 0.4) is None
    assert calibrate.choose(measured, EACH_ITS_OWN, 0.4) is not None


def test_questions_about_a_single_document_cannot_be_halved():
    assert calibrate.choose({0.4: [0.1] * 100, 0.5: [0.9] * 100}, ["one"] * 100, 0.4) is None


def test_the_minimum_is_lowered_where_it_takes_right_passages_away():
    """The lowest of 100 may go; the second lowest is .1234, and what is written is no higher."""
    half = [0.05, *[0.4] * 49]
    assert calibrate.lower((half, [0.1234, *[0.4] * 49]), 0.3) == 0.12
    assert calibrate.lower((half, [0.1234, *[0.4] * 49]), 0.04) is None


@pytest.mark.parametrize(
    "cosines",
    [
        ([0.4] * 50, [0.1] * 50),  # one half alone
        ([0.4] * 50, []),
        ([0.29, *[0.4] * 99], [0.29, *[0.4] * 99]),  # one in a hundred
        ([0.9] * 50, [0.9] * 50),  # never raised
    ],
)
def test_the_minimum_stays_where_it_takes_next_to_nothing(cosines: tuple[list[float], list[float]]):
    assert calibrate.lower(cosines, 0.3) is None


# --- from end to end ------------------------------------------------------------------------------

TENANT, NEIGHBOUR = "acme", "other"
MODEL = "test-model"
# Fewer than the product takes, for each is asked a dozen times.
QUESTIONS = 20
# Names of records, which no stemmer changes.
NAMES = [f"{first}{second}x" for first in "bcdfghjklmnp" for second in "aeiouyrstv"]
ENGLISH = "This is what was written of a ship that came into the harbour in that year, and it was called"
GERMAN = "Das wurde von einem Schiff geschrieben, das in jenem Jahr in den Hafen kam, und es wurde so genannt:"


class Facing:
    """An embedder for which a question is as near to one record as `cosine` says, and at right angles to all others.

    That is the record whose name is in the question, or, `beside` it, the other one of its pair.
    """

    model_id = MODEL
    max_input_tokens = 256
    token_counter = "words"

    def __init__(self, *, cosine: float, min_similarity: float, beside: bool) -> None:
        self.min_similarity = min_similarity
        self._cosine = cosine
        self._beside = beside

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        return [self._vector(text, purpose) for text in texts]

    def _vector(self, text: str, purpose: Purpose) -> list[float]:
        vector = [0.0] * DIMENSIONS
        (place,) = (NAMES.index(word) for word in re.findall(r"\w+", text) if word in NAMES)
        if purpose == "query":
            vector[place ^ self._beside] = 1.0
        else:
            vector[place] = self._cosine
            vector[200 + place] = math.sqrt(1 - self._cosine**2)
        return vector

    async def close(self) -> None:
        pass


# The words of each question are those of its record's neighbour; its vector is right.
MISLED = Facing(cosine=1.0, min_similarity=-1.0, beside=True)
# The words are right, and the vector is below the model's minimum, as that of a model that was not measured.
UNMEASURED = Facing(cosine=0.2, min_similarity=0.3, beside=False)


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """`folder(embedder, texts)` writes a collection of records, each with a question that it answers."""

    def write(embedder: Facing, sentences: Sequence[str] = (ENGLISH,) * QUESTIONS) -> Path:
        made = tmp_path / "ships"
        made.mkdir()
        records, questions = [], []
        for number, (name, sentence) in enumerate(zip(NAMES, sentences, strict=False)):
            # Words that change from one to the next: equal chunks would be dropped as duplicates.
            text = f"{sentence} {name}. {name}q {name}w {name}k {name}z"
            records.append({"_id": f"r{number}", "title": "", "text": text})
            asked = NAMES[number ^ 1] if embedder is MISLED else name
            questions.append({"_id": f"q{number}", "text": f"Where is {asked}?"})
        for file, rows in (("corpus", records), ("queries", questions)):
            (made / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        (made / "qrels.tsv").write_text("".join(f"q{number}\tr{number}\t1\n" for number in range(len(sentences))))
        return made

    return write


@pytest.fixture
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "MIN_QUESTIONS", QUESTIONS)


@pytest.fixture
def place(deployment: Deployment) -> Place:
    return Place(
        app_url=deployment.url("rag_app"), publisher_url=deployment.url("rag_publisher"), signer=SIGNER, server=None
    )


@pytest.fixture
def desk(deployment: Deployment) -> Desk:
    return Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)


@pytest.fixture
def tenants(store: Store) -> None:
    """Two tenants with a document each: a question is answered by words in the one, by its vector in the other."""
    for tenant_id in (TENANT, NEIGHBOUR):
        store(Principal(tenant_id=tenant_id, user_id=1), "a ferry", embedding=unit_vector(0, 1))
        store(Principal(tenant_id=tenant_id, user_id=1), "an anchor", embedding=unit_vector(1))


Calibrated = Callable[..., Any]


@pytest.fixture
def calibrated(
    database: Database, settings: Settings, deployment: Deployment, place: Place, desk: Desk, fewer: None
) -> Calibrated:
    """`await calibrated(folder, embedder)` measures and calibrates for TENANT."""
    settings = settings.model_copy(update={"rag_operator_database_url": SecretStr(deployment.url("rag_operator"))})

    async def run(folder: Path, embedder: Facing, **changes: Any) -> Any:
        engine = Engine(database=database, embedder=embedder, settings=settings.model_copy(update=changes))
        return await calibrate.calibrate(evaluate.load(folder), engine=engine, place=place, desk=desk, tenant_id=TENANT)

    return run


def rows(deployment: Deployment) -> list[tuple[Any, ...]]:
    with deployment.connect("rag_operator") as operator:
        return operator.execute(
            "select tenant_id, embedding_model, fusion, language, vector_share, min_similarity, questions,"
            " round(ndcg_before::numeric, 3)::float, round(ndcg_after::numeric, 3)::float from rag.rag_calibrations"
        ).fetchall()


async def first(database: Database, settings: Settings, tenant_id: str) -> str:
    """What a search for ferry with the vector of the anchor puts first."""
    vector = [1.0] + [0.0] * (DIMENSIONS - 1)
    passages, _, _ = await retrieve(
        "ferry",
        vector,
        principal=Principal(tenant_id=tenant_id, user_id=1),
        database=database,
        settings=settings,
        embedding_model=MODEL,
        min_similarity=None,
        model_min_similarity=-1.0,
        top_k=2,
        budget_tokens=None,
    )
    return passages[0].text


async def test_a_better_share_is_written_for_the_tenant_named_and_counts_from_its_next_search_on(
    folder, calibrated: Calibrated, tenants: None, database: Database, settings: Settings, deployment: Deployment
):
    """Shipped are .7 for the vectors, so the words' record is first: .3/4 + .7/12 is more than .3/5 + .7/11.

    The right record is second, which is 1/log2(3). From .87 on, and so with .9, it is first.
    """
    assert [await first(database, settings, tenant) for tenant in (TENANT, NEIGHBOUR)] == ["a ferry", "a ferry"]
    report, found = await calibrated(folder(MISLED), MISLED)
    assert report.scores.ndcg_at_10 == pytest.approx(1 / math.log2(3))
    (refinement,) = found.refinements
    assert (refinement.language, refinement.questions, refinement.is_better) == ("en", QUESTIONS, True)
    assert refinement.before == Weights(vector_share=0.46, min_similarity=-1.0)
    assert refinement.after == Weights(vector_share=1.0, min_similarity=-1.0)
    assert (refinement.ndcg_before, refinement.ndcg_after) == (pytest.approx(1 / math.log2(3)), 1)
    # What was tried has gone with the tenant of the evaluation.
    assert rows(deployment) == [(TENANT, MODEL, "rank", "en", 1.0, None, QUESTIONS, 0.631, 1.0)]
    assert [await first(database, settings, tenant) for tenant in (TENANT, NEIGHBOUR)] == ["an anchor", "a ferry"]


async def test_what_counts_already_is_where_the_next_calibration_begins_and_is_not_measured_by(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment
):
    """The judged figures are those of what is shipped, although the tenant has a share that is as good as any."""
    written = (TENANT, MODEL, "rank", "en", 1.0, None, 77, 0.1, 0.2)
    with deployment.connect("rag_operator") as operator:
        operator.execute(
            "insert into rag.rag_calibrations (tenant_id, embedding_model, fusion, language, vector_share,"
            " min_similarity, questions, ndcg_before, ndcg_after) values (%s, %s, %s, %s, %s, %s, %s, %s, %s)",
            written,
        )
    report, found = await calibrated(folder(MISLED), MISLED)
    assert report.scores.ndcg_at_10 == pytest.approx(1 / math.log2(3))
    (refinement,) = found.refinements
    assert refinement.before == refinement.after == Weights(vector_share=1.0, min_similarity=-1.0)
    assert (refinement.ndcg_before, refinement.ndcg_after) == (1, 1)
    assert rows(deployment) == [written]


async def test_a_minimum_that_takes_the_right_passages_away_is_lowered(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment
):
    """All shares give the same then, so that the shipped one stays, and no row says anything of it."""
    made = folder(UNMEASURED)
    report, found = await calibrated(made, UNMEASURED)
    assert report.scores.ndcg_at_10 == 0
    (refinement,) = found.refinements
    assert refinement.before == Weights(vector_share=0.46, min_similarity=0.3)
    lowered = refinement.after.min_similarity
    assert 0.19 <= lowered <= 0.2
    assert refinement.after.vector_share == 0.46
    assert (refinement.ndcg_before, refinement.ndcg_after) == (0, 1)
    assert rows(deployment) == [(TENANT, MODEL, "rank", "en", None, lowered, QUESTIONS, 0.0, 1.0)]


async def test_a_minimum_that_is_configured_is_not_calibrated(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment
):
    _, found = await calibrated(folder(UNMEASURED), UNMEASURED, rag_min_similarity_score=0.3)
    assert not any(refinement.is_better for refinement in found.refinements)
    assert rows(deployment) == []


async def test_a_language_with_too_few_questions_is_left_alone(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment
):
    made = folder(UNMEASURED, [*[ENGLISH] * QUESTIONS, *[GERMAN] * 8])
    _, found = await calibrated(made, UNMEASURED)
    assert [refinement.language for refinement in found.refinements] == ["en"]
    assert found.too_few == {"de": 8}
    assert [row[3] for row in rows(deployment)] == ["en"]


async def test_when_no_language_has_enough_questions_nothing_is_measured(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment
):
    made = folder(MISLED, [*[ENGLISH] * 18, *[GERMAN] * 12])
    with pytest.raises(InvalidInput, match="20 judged questions of one language; there are 12 in de, 18 in en"):
        await calibrated(made, MISLED)
    assert rows(deployment) == []


async def test_nothing_is_written_for_a_tenant_that_was_erased_meanwhile(
    folder, calibrated: Calibrated, tenants: None, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
):
    measured = evaluate.examine

    async def erase_and_measure(examination: evaluate.Examination) -> evaluate.Report:
        with deployment.connect("rag_operator") as operator:
            operator.execute("select rag.forget(%s)", (TENANT,))
        return await measured(examination)

    monkeypatch.setattr(calibrate, "examine", erase_and_measure)
    with pytest.raises(InvalidInput, match="tenant acme has no document"):
        await calibrated(folder(MISLED), MISLED)
    assert rows(deployment) == []


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture
def rag(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], deployment: Deployment, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """`rag("eval", …)` on the test's database, embedding as MISLED: exit code, standard output, standard error."""
    monkeypatch.setenv("RAG_DATABASE_URL", deployment.url("rag_app"))
    monkeypatch.setenv("RAG_OPERATOR_DATABASE_URL", deployment.url("rag_operator"))
    monkeypatch.setenv("RAG_SIGNING_KEY", SIGNING_KEY)
    monkeypatch.setattr("rag.embed.open_embedder", lambda settings: MISLED)
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


def test_the_command_says_what_it_changed_and_how_to_undo_it(
    rag, folder, fewer: None, tenants: None, deployment: Deployment
):
    folder(MISLED)
    code, out, err = rag("eval", "ships", "--calibrate", "--tenant", TENANT)
    assert code == 0
    *_, header, line = out.splitlines()
    assert re.split("  +", header) == [
        *("language", "questions", "weight of the vectors", "minimum similarity", "nDCG@10", "written")
    ]
    assert re.split("  +", line) == ["en", "20", "0.46 → 1.00", "-1.00", "0.631 → 1.000", "yes"]
    undo = err.splitlines()[-1]
    assert undo == "rag calibration remove --tenant acme --model test-model --fusion rank"

    code, out, _ = rag("calibration", "list", "--json")
    (listed,) = json.loads(out)["calibrations"]
    assert (listed["tenant_id"], listed["vector_share"], listed["shipped_vector_share"]) == (TENANT, 1.0, 0.46)
    assert (listed["ndcg_before"], listed["ndcg_after"]) == (pytest.approx(1 / math.log2(3)), 1)

    code, out, err = rag("eval", "ships", "--calibrate", "--tenant", TENANT, "--json")
    (refinement,) = json.loads(out)["calibration"]["refinements"]
    assert refinement["before"] == refinement["after"] == {"vector_share": 1.0, "min_similarity": -1}

    assert rag(*undo.split()[1:])[:2] == (0, "Removed 1 of tenant acme.\n")
    assert rows(deployment) == []
    assert rag(*undo.split()[1:])[0] == 1


def test_the_command_says_when_nothing_is_better(rag, folder, fewer: None, tenants: None, deployment: Deployment):
    """The words are right and the vectors are not: with the shipped share each record is first already."""
    folder(UNMEASURED)
    code, out, err = rag("eval", "ships", "--calibrate", "--tenant", TENANT)
    assert code == 0
    assert re.split("  +", out.splitlines()[-1]) == ["en", "20", "0.46", "-1.00", "1.000", "no"]
    assert "nothing is changed" in err.splitlines()[-1]
    assert rows(deployment) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ships", "--calibrate"], "--tenant is required"),
        (["ships", "--tenant", TENANT], "--tenant goes with --calibrate"),
        (["ships", "--calibrate", "--tenant", "nobody"], "tenant nobody has no document"),
        (["ships", "--calibrate", "--tenant", TENANT, "--mode", "keyword"], "mode keyword has one"),
        (["ships", "--calibrate", "--tenant", TENANT, "--fusion", "max"], "--fusion must be one of"),
        (["ships", "ships", "--calibrate", "--tenant", TENANT], "--calibrate takes one directory"),
        (["few", "--calibrate", "--tenant", TENANT], "few has 99 judged questions"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(
    rag, folder, tenants: None, deployment: Deployment, arguments: list[str], message: str
):
    made = folder(MISLED, [ENGLISH] * MIN_QUESTIONS)
    few = made.parent / "few"
    few.mkdir()
    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"):
        (few / name).write_text((made / name).read_text())
    judged = (few / "qrels.tsv").read_text().splitlines(keepends=True)
    (few / "qrels.tsv").write_text("".join(judged[1:]))
    code, out, err = rag("eval", *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert rows(deployment) == []


def test_documents_of_another_model_are_not_calibrated_for(
    rag, folder, fewer: None, tenants: None, monkeypatch: pytest.MonkeyPatch
):
    folder(MISLED)
    another = Facing(cosine=1.0, min_similarity=-1.0, beside=True)
    monkeypatch.setattr(another, "model_id", "another-model", raising=False)
    monkeypatch.setattr("rag.embed.open_embedder", lambda settings: another)
    code, out, err = rag("eval", "ships", "--calibrate", "--tenant", TENANT)
    assert (code, out) == (1, "")
    assert "nothing of tenant acme is embedded with another-model" in err


def test_an_operator_calibrates_and_nobody_else(rag, folder, tenants: None, monkeypatch: pytest.MonkeyPatch):
    folder(MISLED)
    monkeypatch.delenv("RAG_OPERATOR_DATABASE_URL")
    code, _, err = rag("eval", "ships", "--calibrate", "--tenant", TENANT)
    assert code == 1
    assert "RAG_OPERATOR_DATABASE_URL must be set" in err
