"""sql/schema/40_search.sql: arms, fusions, filters, classes with indexes of their own, and what explain() says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from random import Random
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from rag.principal import Principal
from tests.conftest import DIMENSIONS, Deployment, Store, unit_vector
from tests.sql.world import column, refused_with

Rows = list[dict[str, Any]]

ALICE = Principal(tenant_id="t1", user_id=1, project_id="*")
BOB = Principal(tenant_id="t1", user_id=2, project_id="*")
MODEL = "test-model"
EAST = unit_vector(1.0)
NORTH = unit_vector(0.0, 1.0)
CASTS = {"embedding": "halfvec", "document_ids": "uuid[]"}


def search(connection: psycopg.Connection, question: str, vector: str | None = None, **named: object) -> Rows:
    parameters = {"question": question, "embedding": vector, "embedding_model": vector and MODEL} | named
    listed = ", ".join(f"{name} => cast(%({name})s as {CASTS.get(name, _type(name))})" for name in parameters)
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"select * from rag.search({listed})", parameters).fetchall()


def _type(name: str) -> str:
    if name in ("top_k", "max_per_document", "budget_tokens", "duplicate_candidates"):
        return "integer"
    if name in ("include_dropped", "only_verified"):
        return "boolean"
    if name.startswith("updated_"):
        return "timestamptz"
    if name in ("min_similarity", "duplicate_threshold"):
        return "double precision"
    if name == "only_metadata":
        return "jsonb"
    return "text[]" if name.startswith("only_") else "text"


@pytest.fixture(scope="module")
def emptied(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        yield clone


@pytest.fixture
def deployment(emptied: Deployment) -> Iterator[Deployment]:
    yield emptied
    with emptied.cluster.superuser(emptied.name) as connection:
        connection.execute("delete from rag.rag_documents")
        connection.execute("delete from rag.rag_access_classes")
        for (index,) in connection.execute(
            "select indexrelid::regclass::text from pg_index"
            " where indrelid = 'rag.rag_chunks'::regclass and indpred is not null"
        ).fetchall():
            connection.execute(f"drop index {index}")


@pytest.fixture
def ask(deployment: Deployment) -> Callable[..., Rows]:
    def asked(principal: Principal, question: str, vector: str | None = None, **named: object) -> Rows:
        with deployment.transaction(principal) as connection:
            return search(connection, question, vector, **named)

    return asked


Ask = Callable[..., Rows]


def documents(rows: Rows) -> list[UUID]:
    return [row["document_id"] for row in rows]


# --- arms and fusions -----------------------------------------------------------------------------


def test_one_arm_alone_finds_what_the_other_would_have_added(ask: Ask, store: Store) -> None:
    said = store(ALICE, "ferry", embedding=NORTH)
    near = store(ALICE, "anchor", embedding=EAST)
    assert set(documents(ask(ALICE, "ferry", EAST))) == {said, near}
    (row,) = ask(ALICE, "ferry", EAST, arms="keyword")
    assert (row["document_id"], row["mode"], row["reason"]) == (said, "keyword", "keyword")
    rows = ask(ALICE, "ferry", EAST, arms="vector")
    assert documents(rows) == [near, said]
    assert [(row["mode"], row["keyword_score"], row["keyword_rank"]) for row in rows] == [("vector", 0, None)] * 2


def test_scores_fused_by_hand(ask: Ask, store: Store) -> None:
    """A share counts relative to the best one, with 0.4 of the weight, a cosine as it is, with 0.6."""
    said = store(ALICE, "ferry", embedding=NORTH)
    near = store(ALICE, "anchor", embedding=EAST)
    rows = ask(ALICE, "ferry", EAST, fusion="score")
    assert [(row["document_id"], row["score"]) for row in rows] == [
        (near, pytest.approx(0.6, abs=2e-3)),
        (said, pytest.approx(0.4, abs=2e-3)),
    ]


@pytest.mark.parametrize("model", ["local/all-MiniLM-L6-v2", "ollama/nomic-embed-text", "openai/bge-large-en-v1.5"])
def test_a_model_that_knows_english_alone_is_believed_less_elsewhere(superuser: psycopg.Connection, model: str) -> None:
    shares = (
        "select array[vector_share(%s, 'en', 'rank'), vector_share(%s, 'ru', 'rank'), vector_share(%s, null, 'rank')]"
    )
    assert column(superuser, shares, (model,) * 3) == [[0.46, 0.08, 0.46]]


def test_scores_of_a_language_in_the_script_of_english_are_believed(superuser: psycopg.Connection) -> None:
    shares = "select array[vector_share(%s, 'de', 'score'), vector_share(%s, 'ru', 'score')]"
    assert column(superuser, shares, ("local/all-MiniLM-L6-v2",) * 2) == [[0.6, 0.1]]


def test_ranks_of_two_languages_compare(ask: Ask, store: Store) -> None:
    """First in both arms is 1 in any language; without any word, a language that the model does not know is behind."""
    model = "local/all-MiniLM-L6-v2"
    english = store(ALICE, "ferry", embedding=unit_vector(0.6, 0.8), embedding_model=model)
    russian = store(ALICE, "паром", embedding=unit_vector(0.8, 0.6), embedding_model=model, language="ru")
    wordless = ask(ALICE, "gull", EAST, embedding_model=model)
    assert [(row["document_id"], row["score"]) for row in wordless] == [
        (english, pytest.approx(0.46 * 11 / 12)),
        (russian, pytest.approx(0.08)),
    ]
    first = ask(ALICE, "паром", EAST, embedding_model=model)[0]
    assert (first["document_id"], first["score"]) == (russian, pytest.approx(1.0))


@pytest.mark.parametrize("model", ["openai/text-embedding-3-small", "ollama/bge-m3", "ollama/nomic-embed-text-v2-moe"])
def test_a_model_of_many_languages_is_believed_alike(superuser: psycopg.Connection, model: str) -> None:
    assert column(superuser, "select vector_share(%s, 'ru', 'score')", (model,)) == [0.6]


Calibrate = Callable[..., None]


@pytest.fixture
def calibrate(deployment: Deployment) -> Iterator[Calibrate]:
    """`calibrate(vector_share, …)` writes a row of rag_calibrations as rag_operator; all are gone after the test."""

    def write(
        vector_share: float | None,
        *,
        tenant: str = "t1",
        model: str = MODEL,
        fusion: str = "score",
        language: str = "en",
        min_similarity: float | None = None,
    ) -> None:
        with deployment.connect("rag_operator") as operator:
            operator.execute(
                "insert into rag.rag_calibrations (tenant_id, embedding_model, fusion, language, vector_share,"
                " min_similarity, questions, ndcg_before, ndcg_after) values (%s, %s, %s, %s, %s, %s, 100, 0.8, 0.9)",
                (tenant, model, fusion, language, vector_share, min_similarity),
            )

    yield write
    with deployment.connect("rag_operator") as operator:
        operator.execute("delete from rag.rag_calibrations")


def scores(rows: Rows) -> dict[UUID, object]:
    return {row["document_id"]: pytest.approx(row["score"], abs=2e-3) for row in rows}


def test_a_calibrated_share_counts_instead_of_the_shipped_one(ask: Ask, store: Store, calibrate: Calibrate) -> None:
    """By score, that is the share itself for what only the vectors find, and the rest for what only the words find."""
    said = store(ALICE, "ferry", embedding=NORTH)
    near = store(ALICE, "anchor", embedding=EAST)
    calibrate(0.25)
    assert scores(ask(ALICE, "ferry", EAST, fusion="score")) == {said: 0.75, near: 0.25}
    # By rank nothing was calibrated: the words have .54, and second among the vectors is worth 11 / 12.
    assert scores(ask(ALICE, "ferry", EAST)) == {said: 0.54 + 0.46 * 11 / 12, near: 0.46}
    calibrate(1.0, fusion="rank")
    assert scores(ask(ALICE, "ferry", EAST)) == {said: 11 / 12, near: 1}


def test_explain_goes_by_the_calibrated_share_as_well(ask: Ask, store: Store, calibrate: Calibrate, deployment) -> None:
    said = store(ALICE, "ferry", embedding=NORTH)
    store(ALICE, "anchor", embedding=EAST)
    calibrate(0.25)
    with deployment.transaction(ALICE) as connection:
        fused = connection.execute(
            "select value from rag.explain('ferry', %s, %s::rag.halfvec, %s, fusion => 'score') where stage = 'fused'",
            (said, EAST, MODEL),
        ).fetchone()
    assert fused == (pytest.approx(0.75, abs=2e-3),)


@pytest.mark.parametrize(
    "other", [{"tenant": "t2"}, {"model": "another"}, {"fusion": "rank"}, {"language": "de"}, {"language": ""}]
)
def test_what_was_calibrated_for_something_else_changes_nothing(
    ask: Ask, store: Store, calibrate: Calibrate, other: dict[str, str]
) -> None:
    said = store(ALICE, "ferry", embedding=NORTH)
    near = store(ALICE, "anchor", embedding=EAST)
    calibrate(0.25, **other)
    assert scores(ask(ALICE, "ferry", EAST, fusion="score")) == {said: 0.4, near: 0.6}


def test_each_chunk_has_the_share_of_its_language(ask: Ask, store: Store, calibrate: Calibrate) -> None:
    english = store(ALICE, "anchor", embedding=EAST)
    german = store(ALICE, "Anker", embedding=EAST, language="de")
    unknown = store(ALICE, "ankura", embedding=EAST, language=None)
    calibrate(0.1)
    calibrate(0.2, language="de")
    calibrate(0.3, language="")
    assert scores(ask(ALICE, "ferry", EAST, fusion="score")) == {english: 0.1, german: 0.2, unknown: 0.3}


def test_one_arm_alone_has_nothing_to_weigh(ask: Ask, store: Store, calibrate: Calibrate) -> None:
    said = store(ALICE, "ferry", embedding=NORTH)
    calibrate(0.25)
    assert scores(ask(ALICE, "ferry", EAST, fusion="score", arms="keyword")) == {said: 1}
    assert scores(ask(ALICE, "ferry", NORTH, fusion="score", arms="vector")) == {said: 1}


def test_a_minimum_without_a_share_leaves_the_shipped_share(ask: Ask, store: Store, calibrate: Calibrate) -> None:
    said = store(ALICE, "ferry", embedding=NORTH)
    near = store(ALICE, "anchor", embedding=EAST)
    calibrate(None, min_similarity=0.5)
    # And a minimum counts only for whoever asks for it, as the service does.
    assert scores(ask(ALICE, "ferry", EAST, fusion="score")) == {said: 0.4, near: 0.6}


def test_a_question_has_the_lowest_minimum_of_its_tenant_and_model(
    deployment: Deployment, calibrate: Calibrate
) -> None:
    calibrate(None, min_similarity=0.2)
    calibrate(None, min_similarity=0.1, language="de", fusion="rank")
    calibrate(0.5, language="ru")
    calibrate(None, min_similarity=-0.5, tenant="t2")
    calibrate(None, min_similarity=-0.6, model="another")
    statement = "select rag.my_min_similarity(%s)"
    with deployment.transaction(ALICE) as connection:
        assert column(connection, statement, (MODEL,)) == [0.1]
        assert column(connection, statement, ("a third",)) == [None]
        assert column(connection, statement, (None,)) == [None]
    with deployment.connect("rag_app") as nobody:
        assert column(nobody, statement, (MODEL,)) == [None]


@pytest.mark.parametrize(
    "wrong",
    [
        {"vector_share": 1.01},
        {"vector_share": -0.01},
        {"vector_share": float("nan")},
        {"vector_share": None},
        {"vector_share": 0.5, "min_similarity": 1.01},
        {"vector_share": 0.5, "min_similarity": float("nan")},
        {"vector_share": 0.5, "fusion": "max"},
        {"vector_share": 0.5, "language": "eng"},
        {"vector_share": 0.5, "tenant": ""},
    ],
)
def test_a_calibration_that_means_nothing_is_refused(calibrate: Calibrate, wrong: dict[str, Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        calibrate(**wrong)


@pytest.mark.parametrize(
    "named", [{"arms": "both"}, {"arms": None}, {"fusion": "max"}, {"fusion": None}, {"arms": "vector"}]
)
def test_what_search_cannot_do_it_refuses(deployment: Deployment, named: dict[str, str | None]) -> None:
    with deployment.transaction(ALICE) as connection:
        listed = ", ".join(f"{name} => {'null' if value is None else repr(value)}" for name, value in named.items())
        assert refused_with(connection, f"select * from rag.search('ferry', {listed})") == "22023"


# --- filters --------------------------------------------------------------------------------------


def test_every_filter_takes_what_it_names_and_nothing_else(ask: Ask, store: Store, deployment: Deployment) -> None:
    wanted = store(ALICE, "ferry one", embedding=EAST, language="en", tags=("public",), verified=True)
    other = store(ALICE, "ferry two", embedding=EAST, language="de")
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute(
            """
            update rag.rag_documents set domain = 'harbour', doc_type = 'guide', source_type = 'pdf',
                source_updated_at = '2026-03-01', metadata = '{"team": "deck", "floor": 3}'
            where id = %s
            """,
            (wanted,),
        )
        superuser.execute("update rag.rag_documents set source_updated_at = '2026-05-01' where id = %s", (other,))
    for named in (
        {"only_verified": True},
        {"only_domains": ["harbour", "else"]},
        {"only_doc_types": ["guide"]},
        {"only_source_types": ["pdf"]},
        {"only_languages": ["en"]},
        {"updated_before": "2026-04-01"},
        {"only_metadata": Jsonb({"team": "deck"})},
        {"only_metadata": Jsonb({"team": "deck", "floor": 3})},
    ):
        for vector in (EAST, None):
            assert documents(ask(ALICE, "ferry", vector, **named)) == [wanted], named
    assert documents(ask(ALICE, "ferry", EAST, updated_from="2026-05-01")) == [other]
    assert ask(ALICE, "ferry", EAST, only_metadata=Jsonb({"team": "bridge"})) == []
    assert ask(ALICE, "ferry", EAST, only_languages=["en"], updated_from="2026-05-01") == []
    assert len(ask(ALICE, "ferry", EAST, only_tags=["public", "hr"])) == 2
    assert ask(ALICE, "ferry", EAST, only_tags=["hr"]) == []
    assert documents(ask(ALICE, "ferry", EAST, only_verified=True, document_ids=[other])) == []


def test_a_filter_finds_nothing_of_others(ask: Ask, store: Store) -> None:
    store(BOB, "ferry", embedding=EAST, verified=True)
    assert ask(ALICE, "ferry", EAST, only_verified=True) == []


# --- as many as were asked for --------------------------------------------------------------------


def test_when_many_drop_out_the_arms_reach_deeper(ask: Ask, store: Store, deployment: Deployment) -> None:
    """80 copies of one text come first in both arms, which nominate 50 each; two other chunks are far behind."""
    for number in range(80):
        store(ALICE, "ferry to the island", embedding=unit_vector(1.0, number / 1000), title=f"copy {number}")
    further = {store(ALICE, "a ferry among many other words here", embedding=NORTH) for _ in range(1)}
    further.add(store(ALICE, "and no word of it", embedding=unit_vector(0.0, 0.0, 1.0)))
    rows = ask(ALICE, "ferry island", EAST, top_k=3, duplicate_candidates=100)
    assert len(rows) == 3
    assert further < set(documents(rows))


def test_the_minimum_similarity_ends_the_search(ask: Ask, store: Store) -> None:
    for number in range(60):
        store(ALICE, f"anchor {number}", embedding=NORTH)
    near = store(ALICE, "anchor here", embedding=EAST)
    assert documents(ask(ALICE, "ferry", EAST, top_k=5, min_similarity=0.5)) == [near]


# --- classes with indexes of their own --------------------------------------------------------------


def make_ready(deployment: Deployment) -> list[int]:
    """Give every class what `rag maintain` gives a large one, and return them."""
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("set search_path = rag, pg_temp")
        classes = column(connection, "select access_id from rag_access_classes order by 1")
        for access_id in classes:
            for kind, what in (
                ("vector", "hnsw (embedding halfvec_cosine_ops)"),
                ("words", "gin (tsv) with (fastupdate = off)"),
            ):
                connection.execute(
                    f"create index rag_chunks_{kind}_{access_id} on rag_chunks using {what}"
                    f" where access_id = {access_id}"
                )
            connection.execute(
                "select measure_class(tenant_id, access_id, 1) from rag_access_classes where access_id = %s",
                (access_id,),
            )
        connection.execute("update rag_class_indexes set ready = true")
    return classes


WORDS = [f"{stem}{number}" for number in range(40) for stem in ("quay", "mast", "rope")]


def random_text(drawn: Random) -> str:
    return " ".join(WORDS[min(int(drawn.expovariate(0.05)), len(WORDS) - 1)] for _ in range(drawn.randint(5, 40)))


def random_vector(drawn: Random) -> str:
    return "[" + ",".join(f"{drawn.gauss(0, 1):.3f}" for _ in range(DIMENSIONS)) + "]"


def test_a_class_with_its_own_indexes_gives_the_same_answers(ask: Ask, store: Store, deployment: Deployment) -> None:
    drawn = Random(7)
    for number in range(120):
        scope: dict[str, Any] = {"scope": "project", "project_id": "dock"} if number % 3 else {}
        store(
            ALICE,
            random_text(drawn),
            embedding=random_vector(drawn),
            language=drawn.choice(["en", "de", None]),
            **scope,
        )
    store(BOB, " ".join(WORDS), embedding=EAST)
    questions = [
        (random_text(drawn), random_vector(drawn), arms) for arms in ("hybrid", "keyword", "vector") for _ in range(12)
    ]

    def answers() -> list[Any]:
        return [
            [
                (row["document_id"], row["chunk_index"], row["mode"], row["keyword_rank"], row["vector_rank"])
                for row in ask(ALICE, question, vector, arms=arms, top_k=10)
            ]
            for question, vector, arms in questions
        ]

    before = answers()
    assert {row["recall"] for row in ask(ALICE, *questions[0][:2])} == {"exact"}
    make_ready(deployment)
    after = answers()
    assert {row["recall"] for row in ask(ALICE, *questions[0][:2])} == {"approximate"}
    assert all(before)
    assert after == before


def test_stale_or_missing_statistics_never_change_what_matches(ask: Ask, store: Store, deployment: Deployment) -> None:
    stored = {store(ALICE, f"ferry {word}", embedding=EAST) for word in ("one", "two", "three")}
    make_ready(deployment)
    stored.add(store(ALICE, "ferry four, which came later", embedding=EAST))
    stored.add(store(ALICE, "die Fähre, ferry genannt", embedding=EAST, language="de"))
    stored.add(store(ALICE, "ferry of another model", embedding=EAST, embedding_model="another-model", language=None))
    assert set(documents(ask(ALICE, "ferry", None, top_k=10))) == stored
    assert {row["mode"] for row in ask(ALICE, "ferry", EAST, top_k=10)} == {"partial"}
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("update rag.rag_class_lexemes set chunks = 1000000")
        assert set(documents(ask(ALICE, "ferry", None, top_k=10))) == stored
        connection.execute("delete from rag.rag_class_lexemes")
        connection.execute("delete from rag.rag_class_languages")
    assert set(documents(ask(ALICE, "ferry", None, top_k=10))) == stored


def test_a_filter_that_few_pass_still_gets_all_of_them_from_a_large_class(
    ask: Ask, store: Store, deployment: Deployment
) -> None:
    drawn = Random(3)
    for _ in range(150):
        store(ALICE, random_text(drawn), embedding=random_vector(drawn))
    rare = {
        store(ALICE, f"quay1 {random_text(drawn)}", embedding=random_vector(drawn), verified=True) for _ in range(4)
    }
    make_ready(deployment)
    assert set(documents(ask(ALICE, "no word of these", random_vector(drawn), only_verified=True))) == rare
    assert set(documents(ask(ALICE, "quay1", None, only_verified=True))) == rare


def test_indexes_of_a_class_serve_nobody_else(ask: Ask, store: Store, deployment: Deployment) -> None:
    store(BOB, "ferry", embedding=EAST)
    store(ALICE, "anchor", embedding=EAST)
    make_ready(deployment)
    assert ask(ALICE, "ferry", None, arms="keyword") == []


def test_languages_of_others_are_not_told(store: Store, deployment: Deployment) -> None:
    store(BOB, "паром", language="ru")
    store(ALICE, "anchor", language="en")
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("grant execute on function rag.class_contents to rag_app")
    with deployment.transaction(ALICE) as connection:
        assert column(connection, "select language from rag.class_contents(null)") == ["en"]


@pytest.mark.parametrize("large", [False, True])
def test_a_nominee_of_somebody_else_has_no_score(store: Store, deployment: Deployment, large: bool) -> None:
    store(BOB, "ferry", embedding=EAST)
    mine = store(ALICE, "ferry", embedding=EAST)
    if large:
        make_ready(deployment)
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("grant execute on function rag.keyword_candidates to rag_app")
        chunks = connection.execute("select array_agg(access_id), array_agg(id) from rag.rag_chunks").fetchone()
    assert chunks is not None
    with deployment.transaction(ALICE) as connection:
        found = column(
            connection,
            "select chunk.document_id from rag.keyword_candidates('ferry', null, null, 1, %s::bigint[], %s::uuid[])"
            " as candidate join rag.rag_chunks as chunk on chunk.id = candidate.chunk_id",
            tuple(chunks),
        )
        count = column(
            connection,
            "select count(*) from rag.keyword_candidates('ferry', null, null, 1, %s::bigint[], %s::uuid[])",
            tuple(chunks),
        )
    assert (found, count) == ([mine], [1])


# --- explain --------------------------------------------------------------------------------------


def explained(deployment: Deployment, principal: Principal, question: str, document: UUID, **named: object) -> Rows:
    parameters = {"question": question, "document_id": document} | named
    casts = CASTS | {"document_id": "uuid", "chunk_index": "integer"}
    listed = ", ".join(f"{name} => cast(%({name})s as {casts.get(name, _type(name))})" for name in parameters)
    with deployment.transaction(principal) as connection, connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"select * from rag.explain({listed})", parameters).fetchall()


VECTOR = {"embedding": EAST, "embedding_model": MODEL}


def test_the_stages_of_a_chunk_that_is_returned(store: Store, deployment: Deployment) -> None:
    stored = store(ALICE, "the ferry of the island", embedding=EAST)
    rows = explained(deployment, ALICE, "ferry to an island at night", stored, **VECTOR)
    assert [row["stage"] for row in rows] == [
        *("visible", "embedded", "words", "vector arm", "keyword arm", "fused"),
        *("minimum similarity", "duplicate", "chunks of its document", "top_k", "token budget", "returned"),
    ]
    assert all(row["passed"] for row in rows)
    stages = {row["stage"]: row for row in rows}
    assert stages["visible"]["detail"] == f"{stored}:0"
    assert stages["words"]["detail"] == "matched: ferri, island; missed: night"
    assert stages["embedded"]["value"] == pytest.approx(1.0)
    assert stages["returned"]["value"] == 1


@pytest.mark.parametrize(
    ("stage", "named"),
    [
        ("minimum similarity", {"min_similarity": 0.9}),
        ("top_k", {"top_k": 1}),
        ("token budget", {"budget_tokens": 1}),
    ],
)
def test_the_stage_at_which_a_chunk_drops_out(
    store: Store, deployment: Deployment, stage: str, named: dict[str, object]
) -> None:
    store(ALICE, "ferry ferry ferry", embedding=EAST)
    stored = store(ALICE, "a ferry and an anchor", embedding=unit_vector(1.0, 1.0))
    last = explained(deployment, ALICE, "ferry", stored, **VECTOR, **named)[-1]
    assert (last["stage"], last["passed"]) == (stage, False)


def test_a_duplicate_names_the_chunk_that_is_kept(store: Store, deployment: Deployment) -> None:
    kept = store(ALICE, "the ferry leaves at nine", embedding=EAST, verified=True)
    dropped = store(ALICE, "the ferry leaves at nine", embedding=EAST)
    last = explained(deployment, ALICE, "ferry", dropped, **VECTOR)[-1]
    assert (last["stage"], last["passed"], last["detail"]) == ("duplicate", False, f"of {kept}:0")


def test_of_a_document_its_best_chunk_is_explained(store: Store, deployment: Deployment) -> None:
    stored = store(ALICE, "anchor", embedding=NORTH)
    store(ALICE, "ferry", embedding=EAST, document_id=stored, chunk_index=1)
    first = explained(deployment, ALICE, "ferry", stored, **VECTOR)[0]
    assert first["detail"] == f"{stored}:1"
    assert explained(deployment, ALICE, "ferry", stored, **VECTOR, chunk_index=0)[0]["detail"] == f"{stored}:0"


def test_what_one_may_not_read_is_explained_like_what_does_not_exist(store: Store, deployment: Deployment) -> None:
    foreign = store(BOB, "ferry", embedding=EAST)
    nowhere = UUID("00000000-0000-4000-8000-00000000beef")
    assert explained(deployment, ALICE, "ferry", foreign, **VECTOR) == []
    assert explained(deployment, ALICE, "ferry", nowhere, **VECTOR) == []
    assert explained(deployment, ALICE, "ferry", foreign, **VECTOR, chunk_index=0) == []
