"""sql/schema/40_search.sql: retrieval, with every number worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import cos, log, sin
from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg.rows import dict_row

from rag.principal import Principal
from tests.conftest import Deployment, unit_vector
from tests.sql.world import (
    REACHES,
    begin,
    column,
    document_id,
    refused_with,
    set_variables,
    signature,
    speaking,
)

Store = Callable[..., UUID]
Rows = list[dict[str, Any]]
Ask = Callable[..., Rows]

ALICE = Principal(tenant_id="t1", user_id=1, project_id="*")
BOB = Principal(tenant_id="t1", user_id=2, project_id="*")
NAMESAKE = Principal(tenant_id="t2", user_id=1, project_id="*")

MODEL = "test-model"
EAST = unit_vector(1.0)
# halfvec keeps 11 significant bits, so a cosine of it is right to about one in a thousand.
HALF = 2e-3


def search(connection: psycopg.Connection, question: str, vector: str | None = None, **named: object) -> Rows:
    """The rows of rag.search as dictionaries; `named` are further parameters by their name."""
    parameters = {"question": question, "embedding": vector, "embedding_model": vector and MODEL} | named
    casts = {"embedding": "halfvec", "document_ids": "uuid[]"}
    listed = ", ".join(
        f"{name} => %({name})s::{casts[name]}" if name in casts else f"{name} => %({name})s" for name in parameters
    )
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(f"select * from rag.search({listed})", parameters).fetchall()


@pytest.fixture(scope="module")
def emptied(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        yield clone


@pytest.fixture
def deployment(emptied: Deployment) -> Iterator[Deployment]:
    """One database for all tests of this file, empty for each: a clone takes longer than most of them."""
    yield emptied
    with emptied.cluster.superuser(emptied.name) as connection:
        connection.execute("delete from rag.rag_documents")
        connection.execute("delete from rag.rag_access_classes")


@pytest.fixture
def ask(deployment: Deployment) -> Ask:
    """`ask(principal, question, vector, …)`: what the principal finds."""

    def asked(principal: Principal, question: str, vector: str | None = None, **named: object) -> Rows:
        with deployment.transaction(principal) as connection:
            return search(connection, question, vector, **named)

    return asked


def documents(rows: Rows) -> list[UUID]:
    return [row["document_id"] for row in rows]


def reasons(rows: Rows) -> dict[UUID, str]:
    return {row["document_id"]: row["reason"] for row in rows}


def numbered(first: int, last: int) -> str:
    """Distinct words w<first> … w<last>."""
    return " ".join(f"w{number}" for number in range(first, last + 1))


# --- BM25 -----------------------------------------------------------------------------------------


def test_bm25_of_a_tiny_collection(ask: Ask, store: Store) -> None:
    """Three chunks of 2, 3 and 1 lexemes: N = 3, mean length 2; `apple` is in two of them.

    idf(apple) = ln(1 + (3 - 2 + 0.5) / (2 + 0.5)) = ln 1.6 = 0.470004
    first:  tf 1, length 2: 1 · 2.2 / (1 + 1.2 · (0.25 + 0.75 · 2/2)) = 2.2 / 2.2 = 1
    second: tf 2, length 3: 2 · 2.2 / (2 + 1.2 · (0.25 + 0.75 · 3/2)) = 4.4 / 3.65 = 1.205479
    No chunk can reach more than idf · 2.2, so the shares are 1 / 2.2 and 1.205479 / 2.2.
    """
    first = store(ALICE, "apple banana")
    second = store(ALICE, "apple apple cherry")
    store(ALICE, "durian")
    rows = ask(ALICE, "apple")
    assert documents(rows) == [second, first]
    assert [row["keyword_score"] for row in rows] == pytest.approx([0.470004 * 1.205479, 0.470004], abs=1e-5)
    assert [row["keyword_share"] for row in rows] == pytest.approx([0.547945, 0.454545], abs=1e-5)


def test_bm25_adds_the_words_of_a_question_up(ask: Ask, store: Store) -> None:
    """All chunks have two lexemes, so a word that occurs counts its idf: ln 1.6 for `apple` (2 of 3),
    ln(1 + 2.5 / 1.5) = 0.980829 for `banana` (1 of 3), ln(1 + 3.5 / 0.5) = ln 8 for `zebra` (0 of 3).

    `zebra` adds to what could be reached: (0.470004 + 0.980829 + 2.079442) · 2.2 = 7.766604.
    """
    both = store(ALICE, "apple banana")
    one = store(ALICE, "apple cherry")
    store(ALICE, "durian elder")
    rows = ask(ALICE, "banana zebra apple")
    assert documents(rows) == [both, one]
    assert [row["keyword_score"] for row in rows] == pytest.approx([1.450833, 0.470004], abs=1e-5)
    assert [row["keyword_share"] for row in rows] == pytest.approx([0.186804, 0.060516], abs=1e-5)


def test_a_word_said_twice_in_the_question_counts_twice(ask: Ask, store: Store) -> None:
    store(ALICE, "apple banana")
    store(ALICE, "cherry durian")
    (once,), (twice,) = ask(ALICE, "apple"), ask(ALICE, "apple, apple!")
    assert twice["keyword_score"] == pytest.approx(2 * once["keyword_score"])
    assert twice["keyword_share"] == pytest.approx(once["keyword_share"])


def test_a_word_that_every_chunk_has_still_counts_a_little(ask: Ask, store: Store) -> None:
    """idf = ln(1 + 0.5 / 2.5) = ln 1.2 = 0.182322 and never negative; both chunks of the mean length."""
    store(ALICE, "apple banana")
    store(ALICE, "apple cherry")
    assert [row["keyword_score"] for row in ask(ALICE, "apple")] == pytest.approx([log(1.2)] * 2)


def test_languages_are_collections_of_their_own(ask: Ask, store: Store) -> None:
    """One of one English chunk has `apple`: ln(1 + 0.5 / 1.5); the German chunk does not count."""
    store(ALICE, "apple", language="en")
    store(ALICE, "ein Schiff auf hoher See", language="de")
    (row,) = ask(ALICE, "apple")
    assert row["keyword_score"] == pytest.approx(log(4 / 3))


def test_words_of_other_principals_do_not_change_a_score(ask: Ask, store: Store) -> None:
    store(ALICE, "apple banana")
    store(ALICE, "apple apple cherry")
    store(ALICE, "durian")
    before = ask(ALICE, "apple cherry", EAST)
    for number in range(5):
        store(BOB, f"apple apple banana {number}")
        store(NAMESAKE, f"cherry cherry cherry {number}")
        store(BOB, f"apple {number}", scope="project", project_id="bobs")
    assert ask(ALICE, "apple cherry", EAST) == before


def test_frequencies_are_those_of_the_scope_that_was_asked_for(ask: Ask, store: Store) -> None:
    """Narrowed to public: N = 2, one has `apple`, equal lengths: ln(1 + 1.5 / 1.5) = ln 2."""
    store(ALICE, "apple banana", scope="public")
    store(ALICE, "cherry durian", scope="public")
    store(ALICE, "apple elder", scope="user")
    (row,) = ask(ALICE, "apple", scope="public")
    assert row["keyword_score"] == pytest.approx(log(2))


# --- fusion ---------------------------------------------------------------------------------------


def test_reciprocal_ranks_by_hand(ask: Ask, store: Store) -> None:
    """keywords: first, second, then third and fourth with none; cosines 0.6, 0.8, 1 and 0.

    first  0.54 * 4 / (3 + 1) + 0.46 * 11 / (10 + 3) = 0.929231
    second 0.54 * 4 / (3 + 2) + 0.46 * 11 / (10 + 2) = 0.853667
    third  0.46 * 11 / (10 + 1) = 0.46, with nothing from the words
    fourth 0.46 * 11 / (10 + 4) = 0.361429
    """
    first = store(ALICE, "ferry ferry anchor", embedding=unit_vector(0.6, 0.8))
    second = store(ALICE, "ferry boat crane", embedding=unit_vector(0.8, 0.6))
    third = store(ALICE, "dock engine fender", embedding=unit_vector(1.0))
    fourth = store(ALICE, "gull harbour island", embedding=unit_vector(0.0, 1.0))
    rows = ask(ALICE, "ferry", EAST)
    assert documents(rows) == [first, second, third, fourth]
    assert [row["score"] for row in rows] == pytest.approx([0.929231, 0.853667, 0.46, 0.361429], abs=1e-6)
    assert [row["rank"] for row in rows] == [1, 2, 3, 4]
    assert [row["keyword_rank"] for row in rows] == [1, 2, None, None]
    assert [row["vector_rank"] for row in rows] == [3, 2, 1, 4]
    assert [row["cosine"] for row in rows] == pytest.approx([0.6, 0.8, 1.0, 0.0], abs=HALF)
    assert [row["reason"] for row in rows] == ["keyword_and_vector", "keyword_and_vector", "vector", "vector"]
    assert {(row["mode"], row["recall"]) for row in rows} == {("hybrid", "exact")}


def test_a_keyword_hit_far_from_the_question_gets_its_place_among_the_vectors(ask: Ask, store: Store) -> None:
    """60 chunks are nearer, of which the vector arm nominates 50; the 51st candidate comes by its word.

    0.54 * 4 / (3 + 1) + 0.46 * 11 / (10 + 51) = 0.622951, though the vector arm never nominated it.
    """
    target = store(ALICE, "ferry", embedding=unit_vector(-1.0))
    for number in range(60):
        angle = number / 50
        store(ALICE, f"filler {number}", embedding=unit_vector(cos(angle), sin(angle)))
    rows = ask(ALICE, "ferry", EAST, top_k=5, include_dropped=True)
    assert len(rows) == 51
    (found,) = (row for row in rows if row["document_id"] == target)
    assert (found["keyword_rank"], found["vector_rank"]) == (1, 51)
    assert found["cosine"] == pytest.approx(-1.0, abs=HALF)
    assert found["score"] == pytest.approx(0.622951, abs=1e-6)


def test_a_near_chunk_with_a_weak_keyword_gets_its_place_among_the_keywords(ask: Ask, store: Store) -> None:
    """60 chunks say the word more densely, of which the keyword arm nominates 50; they have other vectors.

    0.54 * 4 / (3 + 51) + 0.46 * 11 / (10 + 1) = 0.5, with the BM25 score that it has.
    """
    target = store(ALICE, "ferry " + numbered(1, 30), language=None)
    for number in range(60):
        store(ALICE, f"ferry ferry {number}", embedding_model="another-model", language=None)
    rows = ask(ALICE, "ferry", EAST, include_dropped=True)
    assert len(rows) == 51
    (found,) = (row for row in rows if row["document_id"] == target)
    assert (found["keyword_rank"], found["vector_rank"]) == (51, 1)
    assert found["keyword_score"] > 0
    assert found["score"] == pytest.approx(0.5, abs=1e-6)


def test_equal_chunks_come_in_the_order_of_their_documents(ask: Ask, store: Store) -> None:
    stored = [store(ALICE, "ferry") for _ in range(6)]
    rows = ask(ALICE, "ferry", EAST, top_k=6, duplicate_threshold=1.0)
    assert documents(rows) == sorted(stored)
    assert [row["keyword_rank"] for row in rows] == [1] * 6
    assert [row["vector_rank"] for row in rows] == [1] * 6


# --- modes ----------------------------------------------------------------------------------------


def test_without_an_embedding_keywords_alone_decide(ask: Ask, store: Store) -> None:
    stored = store(ALICE, "ferry boat")
    store(ALICE, "anchor boat")
    (row,) = ask(ALICE, "ferry")
    assert row["document_id"] == stored
    assert (row["mode"], row["reason"], row["keyword_rank"]) == ("keyword", "keyword", 1)
    assert (row["cosine"], row["vector_rank"]) == (None, None)
    assert row["score"] == pytest.approx(1.0)


def test_vectors_of_another_model_are_never_compared(ask: Ask, store: Store) -> None:
    """Both have the question's vector, and only one has it from the question's model.

    other 0.54 * 4 / (3 + 1) + 0.46 * 11 / (10 + 2) = 0.961667, last among the vectors; same 0.54 * 4 / 5 + 0.46 = 0.892
    """
    other = store(ALICE, "ferry ferry anchor", embedding=EAST, embedding_model="another-model")
    same = store(ALICE, "ferry boat crane", embedding=EAST)
    rows = ask(ALICE, "ferry", EAST)
    assert documents(rows) == [other, same]
    assert [row["cosine"] for row in rows] == [None, 1.0]
    assert [row["vector_rank"] for row in rows] == [None, 1]
    assert [row["score"] for row in rows] == pytest.approx([0.961667, 0.892], abs=1e-6)
    assert [row["reason"] for row in rows] == ["keyword", "keyword_and_vector"]
    assert {row["mode"] for row in rows} == {"partial"}


def test_when_all_vectors_are_of_another_model_keywords_alone_decide(ask: Ask, store: Store) -> None:
    stored = store(ALICE, "ferry", embedding=EAST, embedding_model="another-model")
    store(ALICE, "anchor", embedding=EAST, embedding_model="another-model")
    (row,) = ask(ALICE, "ferry", EAST)
    assert (row["document_id"], row["mode"], row["cosine"]) == (stored, "keyword", None)
    assert row["score"] == pytest.approx(1.0)


def test_mode_is_about_the_chunks_that_were_asked_for(ask: Ask, store: Store) -> None:
    chosen = store(ALICE, "ferry", embedding=EAST)
    store(ALICE, "ferry anchor", embedding=EAST, embedding_model="another-model")
    assert [row["mode"] for row in ask(ALICE, "ferry", EAST, document_ids=[chosen])] == ["hybrid"]
    assert {row["mode"] for row in ask(ALICE, "ferry", EAST)} == {"partial"}


@pytest.mark.parametrize("question", ["the of and", "", "   ", "?!…", "-", "\u200b"])
def test_a_question_without_a_word_is_answered_by_vectors(ask: Ask, store: Store, question: str) -> None:
    near = store(ALICE, "the ferry of the island", embedding=EAST)
    far = store(ALICE, "and the anchor", embedding=unit_vector(0.0, 1.0))
    rows = ask(ALICE, question, EAST)
    assert documents(rows) == [near, far]
    assert [(row["mode"], row["reason"], row["keyword_score"]) for row in rows] == [("hybrid", "vector", 0)] * 2
    assert ask(ALICE, question) == []


# --- languages ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("language", "text", "question"),
    [
        ("ru", "Экипажи готовят паромы к отправлению", "паром и экипаж"),
        ("ru", "СПАСАТЕЛЬНЫЕ ЖИЛЕТЫ", "спасательный жилет"),
        ("de", "Die Häuser am Hafen wurden verkauft", "Haus verkaufen"),
        ("en", "The ferries were departing", "a ferry departs"),
        ("fr", "Les passagers embarquaient", "embarquement du passager"),
    ],
)
def test_words_are_found_by_their_stem_in_the_language_of_the_chunk(
    ask: Ask, store: Store, language: str, text: str, question: str
) -> None:
    store(ALICE, text, language=language)
    (row,) = ask(ALICE, question)
    assert row["language"] == language


@pytest.mark.parametrize("language", [None, "xx", "zh"])
def test_without_a_known_language_words_are_found_as_they_stand(ask: Ask, store: Store, language: str | None) -> None:
    store(ALICE, "Die Fähre legt ab", language=language)
    assert len(ask(ALICE, "FÄHRE")) == 1
    assert ask(ALICE, "Fähren") == []


def test_one_question_finds_chunks_of_several_languages(ask: Ask, store: Store) -> None:
    stored = {
        store(ALICE, "Der Fahrplan der Fähren", language="de"),
        store(ALICE, "Расписание паромов", language="ru"),
    }
    assert set(documents(ask(ALICE, "Fähre, паромы"))) == stored


# --- minimum similarity ---------------------------------------------------------------------------


def test_the_minimum_is_of_the_cosine_alone(ask: Ask, store: Store) -> None:
    """The best keyword hit is too far; a chunk that was not compared has no cosine to be too small."""
    near = store(ALICE, "anchor", embedding=unit_vector(0.8, 0.6))
    far = store(ALICE, "ferry ferry dock", embedding=unit_vector(0.5, 0.866))
    other = store(ALICE, "ferry boat", embedding=EAST, embedding_model="another-model")
    rows = ask(ALICE, "ferry", EAST, min_similarity=0.6, include_dropped=True)
    assert reasons(rows) == {near: "vector", other: "keyword", far: "below_min_similarity"}
    assert set(documents(ask(ALICE, "ferry", EAST, min_similarity=0.6))) == {near, other}
    assert set(documents(ask(ALICE, "ferry", EAST, min_similarity=0.4))) == {near, far, other}


def test_the_minimum_itself_is_enough(ask: Ask, store: Store) -> None:
    store(ALICE, "ferry", embedding=EAST)
    assert len(ask(ALICE, "ferry", EAST, min_similarity=1.0)) == 1


def test_the_minimum_does_not_apply_without_an_embedding(ask: Ask, store: Store) -> None:
    store(ALICE, "ferry")
    assert len(ask(ALICE, "ferry", min_similarity=0.99)) == 1


# --- near-duplicates ------------------------------------------------------------------------------


def test_of_two_near_duplicates_the_older_is_kept(ask: Ask, store: Store) -> None:
    """20 words each, 19 of them shared: 19 / 21 = 0.905. The newer one ranks first and goes all the same."""
    older = store(ALICE, numbered(1, 20), embedding=unit_vector(0.6, 0.8))
    newer = store(ALICE, numbered(2, 21), embedding=EAST)
    rows = ask(ALICE, "w2", EAST, include_dropped=True)
    assert [(row["document_id"], row["rank"], row["reason"]) for row in rows] == [
        (older, 1, "keyword_and_vector"),
        (newer, None, "duplicate"),
    ]
    assert [row["duplicate_of"] for row in rows] == [None, f"{older}:0"]
    assert documents(ask(ALICE, "w2", EAST)) == [older]


def test_a_verified_source_is_kept_though_it_is_newer(ask: Ask, store: Store) -> None:
    older = store(ALICE, numbered(1, 20), embedding=EAST)
    verified = store(ALICE, numbered(2, 21), embedding=unit_vector(0.6, 0.8), verified=True)
    rows = ask(ALICE, "w2", EAST, include_dropped=True)
    assert reasons(rows) == {verified: "keyword_and_vector", older: "duplicate"}


def test_age_is_what_the_source_says(ask: Ask, store: Store, deployment: Deployment) -> None:
    first = store(ALICE, numbered(1, 20))
    second = store(ALICE, numbered(1, 20))
    with deployment.transaction(ALICE) as connection:
        connection.execute("update rag_documents set source_updated_at = '2001-01-01' where id = %s", (second,))
    assert reasons(ask(ALICE, "w1", EAST, include_dropped=True)) == {second: "keyword_and_vector", first: "duplicate"}


@pytest.mark.parametrize(
    ("first", "second", "similar"),
    [
        (numbered(1, 19), numbered(2, 20), False),  # 18 / 20 = 0.9, and not more
        (numbered(1, 9), numbered(1, 10), False),  # 9 / 10 = 0.9
        (numbered(1, 10), numbered(1, 11), True),  # 10 / 11 = 0.909
        ("the gate may open now", "the gate may not open now", False),  # 5 / 6
        ("W1 w2\n w3", "w3 w2\tw1", True),  # the same words, raw and lower-cased
        ("w1 w2 w3.", "w1 w2 w3", False),  # 2 / 4: words are what stands between spaces
        ("w1 w1 w1 w2", "w1 w2 w2 w2", True),  # sets
        ("w1\tw2\vw3\fw4\u00a0w5", "w1 w2 w3 w4 w5", True),
        ("wv tv nv fv rv", "w t n f r", False),  # each letter is one, also those that escapes are written with
        (f"w1 {'x' * 3000} w2", f"{'x' * 3000} w1  w2", True),  # longer than a lexeme may be
    ],
)
def test_similarity_is_that_of_the_sets_of_words(
    ask: Ask, store: Store, first: str, second: str, similar: bool
) -> None:
    store(ALICE, first, language=None)
    store(ALICE, second, language=None)
    assert len(ask(ALICE, "unrelated", EAST)) == (1 if similar else 2)


def test_may_not_is_a_duplicate_of_may_when_all_else_is_the_same(ask: Ask, store: Store) -> None:
    """Spec 001 compares words alone: 12 distinct words, and the same with `not`: 12 / 13 = 0.923."""
    text = "crew members {} open the inner bow door while cars are aboard"
    kept = store(ALICE, text.format("may"))
    store(ALICE, text.format("may not"))
    assert documents(ask(ALICE, "bow door", EAST)) == [kept]


def test_what_resembles_only_a_dropped_chunk_is_kept(ask: Ask, store: Store) -> None:
    """20 words each: first and second share 19 of 21 (0.905), second and third too, first and third 18 of 22."""
    first = store(ALICE, numbered(1, 20))
    second = store(ALICE, numbered(2, 21))
    third = store(ALICE, numbered(3, 22))
    rows = ask(ALICE, "w5", EAST, include_dropped=True)
    assert {row["document_id"]: row["duplicate_of"] for row in rows} == {
        first: None,
        second: f"{first}:0",
        third: None,
    }


def test_only_the_first_candidates_are_compared(ask: Ask, store: Store) -> None:
    """In the order of their scores: near, middle, far; the last of the three is a duplicate of the second."""
    store(ALICE, "anchor", embedding=EAST)
    store(ALICE, numbered(1, 20), embedding=unit_vector(0.8, 0.6))
    far = store(ALICE, numbered(1, 20), embedding=unit_vector(0.6, 0.8))
    assert far in documents(ask(ALICE, "unrelated", EAST, duplicate_candidates=2))
    assert far not in documents(ask(ALICE, "unrelated", EAST, duplicate_candidates=3))


def test_the_threshold_is_a_parameter(ask: Ask, store: Store) -> None:
    """One shared word in a union of three: 0.333."""
    store(ALICE, "w1 w2", language=None)
    store(ALICE, "w2 w3", language=None)
    assert len(ask(ALICE, "w2", EAST, duplicate_threshold=0.33)) == 1
    assert len(ask(ALICE, "w2", EAST, duplicate_threshold=0.34)) == 2


def test_a_duplicate_that_one_may_not_see_is_none(ask: Ask, store: Store) -> None:
    store(BOB, numbered(1, 20))
    mine = store(ALICE, numbered(1, 20))
    rows = ask(ALICE, "w1", EAST, include_dropped=True)
    assert reasons(rows) == {mine: "keyword_and_vector"}


# --- per document, top_k, budget ------------------------------------------------------------------


def test_a_document_gives_at_most_so_many_chunks(ask: Ask, store: Store) -> None:
    """Four chunks of one document, the nearer the smaller their index, and one of another."""
    book = store(ALICE, "anchor", embedding=EAST)
    for index, near in ((1, 0.9), (2, 0.8), (3, 0.7)):
        store(
            ALICE,
            f"word{index}",
            document_id=book,
            chunk_index=index,
            embedding=unit_vector(near, (1 - near**2) ** 0.5),
        )
    leaflet = store(ALICE, "boat", embedding=unit_vector(0.0, 1.0))
    rows = ask(ALICE, "unrelated", EAST, include_dropped=True)
    assert [(row["document_id"], row["chunk_index"], row["reason"]) for row in rows] == [
        (book, 0, "vector"),
        (book, 1, "vector"),
        (book, 2, "vector"),
        (leaflet, 0, "vector"),
        (book, 3, "per_document_cap"),
    ]
    assert documents(ask(ALICE, "unrelated", EAST, max_per_document=1)) == [book, leaflet]
    assert documents(ask(ALICE, "unrelated", EAST, max_per_document=9)) == [book, book, book, book, leaflet]


def fan(store: Store, *sizes: int) -> list[UUID]:
    """A document of each size in words, each a little further away than the one before."""
    stored = []
    for number, size in enumerate(sizes):
        text = " ".join(f"d{number}w{word}" for word in range(size))
        stored.append(store(ALICE, text, embedding=unit_vector(cos(number / 5), sin(number / 5)), language=None))
    return stored


def test_top_k_is_the_number_of_rows(ask: Ask, store: Store) -> None:
    stored = fan(store, 1, 1, 1, 1)
    assert documents(ask(ALICE, "unrelated", EAST, top_k=2)) == stored[:2]
    rows = ask(ALICE, "unrelated", EAST, top_k=2, include_dropped=True)
    assert [row["reason"] for row in rows] == ["vector", "vector", "beyond_top_k", "beyond_top_k"]
    assert [row["rank"] for row in rows] == [1, 2, None, None]


def test_dropped_chunks_do_not_use_up_top_k(ask: Ask, store: Store) -> None:
    kept = store(ALICE, numbered(1, 20), embedding=EAST)
    store(ALICE, numbered(1, 20), embedding=EAST)
    other = store(ALICE, "anchor", embedding=unit_vector(0.0, 1.0))
    assert documents(ask(ALICE, "unrelated", EAST, top_k=2)) == [kept, other]


def test_a_chunk_that_does_not_fit_the_budget_is_passed_over(ask: Ask, store: Store) -> None:
    """Sizes 10, 50, 5, 6 and a budget of 20: 10 and 5 make 15; 50 and 6 would exceed it."""
    ten, fifty, five, six = fan(store, 10, 50, 5, 6)
    rows = ask(ALICE, "unrelated", EAST, budget_tokens=20, include_dropped=True)
    assert [(row["document_id"], row["rank"], row["tokens_total"], row["reason"]) for row in rows] == [
        (ten, 1, 10, "vector"),
        (five, 2, 15, "vector"),
        (fifty, None, None, "over_budget"),
        (six, None, None, "over_budget"),
    ]
    assert [row["token_count"] for row in rows] == [10, 5, 50, 6]


def test_a_budget_may_be_used_up_exactly(ask: Ask, store: Store) -> None:
    ten, five = fan(store, 10, 5)
    assert documents(ask(ALICE, "unrelated", EAST, budget_tokens=15)) == [ten, five]
    assert documents(ask(ALICE, "unrelated", EAST, budget_tokens=14)) == [ten]
    assert documents(ask(ALICE, "unrelated", EAST, budget_tokens=9)) == [five]
    assert ask(ALICE, "unrelated", EAST, budget_tokens=0) == []


def test_the_budget_is_for_the_best_top_k(ask: Ask, store: Store) -> None:
    """What fits is taken from the first top_k; a later chunk does not take the place of one too large."""
    _, small, _ = fan(store, 50, 5, 5)
    assert documents(ask(ALICE, "unrelated", EAST, top_k=2, budget_tokens=20)) == [small]


def test_every_candidate_has_exactly_one_reason(ask: Ask, store: Store) -> None:
    """One of each: taken, taken by its word alone, too far, a duplicate, one too many, beyond top_k, too long."""
    kept = store(ALICE, numbered(1, 20) + " boat", embedding=EAST, language=None)
    twin = store(ALICE, numbered(1, 20) + " boat", embedding=EAST, language=None)
    long = store(ALICE, numbered(100, 199), embedding=unit_vector(0.98, 0.2), language=None)
    word = store(ALICE, "boat", embedding_model="another-model", language=None)
    store(ALICE, "w300 w301", document_id=kept, chunk_index=1, embedding=unit_vector(0.95, 0.31), language=None)
    last = store(ALICE, "w400", embedding=unit_vector(0.6, 0.8), language=None)
    far = store(ALICE, "w500", embedding=unit_vector(0.0, 1.0), language=None)
    rows = ask(
        ALICE,
        "boat",
        EAST,
        top_k=3,
        max_per_document=1,
        budget_tokens=30,
        min_similarity=0.3,
        include_dropped=True,
    )
    assert {(row["document_id"], row["chunk_index"]): row["reason"] for row in rows} == {
        (kept, 0): "keyword_and_vector",
        (word, 0): "keyword",
        (twin, 0): "duplicate",
        (kept, 1): "per_document_cap",
        (long, 0): "over_budget",
        (last, 0): "beyond_top_k",
        (far, 0): "below_min_similarity",
    }
    assert [row["rank"] for row in rows] == [1, 2, None, None, None, None, None]


# --- what may be narrowed -------------------------------------------------------------------------

NARROWED = {
    "user 1": {"public": {1}, "user": {3}, "project": set()},
    "user 1, all projects": {"public": {1}, "user": {3, 6, 7}, "project": set()},
    "user 1, own project": {"public": {1}, "user": {3, 6}, "project": {6}},
    "user 1, shared for reading": {"public": {1}, "user": {3}, "project": {9}},
    "user 1, shared for writing": {"public": {1}, "user": {3}, "project": {10}},
    "user 1, unknown project": {"public": {1}, "user": {3}, "project": set()},
    "user 1, other tag": {"public": {2}, "user": {4}, "project": set()},
    "user 1, both tags": {"public": {1, 2}, "user": {3, 4}, "project": set()},
    "user 1, unknown tag": {"public": set(), "user": set(), "project": set()},
    "user 2, all projects": {"public": {1}, "user": {5, 8, 9, 10}, "project": set()},
    "user 2, project named as user 1's": {"public": {1}, "user": {5, 8}, "project": {8}},
    "user 3": {"public": {1}, "user": set(), "project": set()},
    "no user": {"public": {1}, "user": set(), "project": set()},
    "user 1 of the other tenant": {"public": {11}, "user": {12, 13}, "project": set()},
    "unknown tenant": {"public": set(), "user": set(), "project": set()},
}
LISTED = {1, 3, 5, 6, 9, 12}


def test_every_principal_of_the_world_is_narrowed() -> None:
    assert set(NARROWED) == set(REACHES)


@pytest.mark.parametrize("vector", [EAST, None], ids=["hybrid", "keyword"])
@pytest.mark.parametrize("name", REACHES)
def test_a_scope_narrows_what_is_visible(service: psycopg.Connection, name: str, vector: str | None) -> None:
    reach = REACHES[name]
    with speaking(service, reach.principal):
        found = {
            scope: {
                int(row["document_id"].hex[-12:])
                for row in search(service, "palisade", vector, top_k=20, scope=scope, document_ids=listed)
            }
            for scope, listed in (
                ("public", None),
                ("user", None),
                ("project", None),
                ("organization", None),
                (None, None),
                ("documents", list(map(document_id, LISTED))),
            )
        }
    assert found == NARROWED[name] | {
        "organization": set(reach.reads),
        None: set(reach.reads),
        "documents": set(reach.reads) & LISTED,
    }


def test_a_list_of_documents_narrows_any_scope(app: psycopg.Connection) -> None:
    listed = [document_id(access_id) for access_id in (1, 3, 5)]
    with speaking(app, ALICE):
        assert documents(search(app, "palisade", EAST, scope="user", document_ids=listed)) == [document_id(3)]
        assert len(search(app, "palisade", EAST, document_ids=listed)) == 2
        assert search(app, "palisade", EAST, document_ids=[]) == []
        assert search(app, "palisade", None, document_ids=[]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "scope => 'everything'",
        "scope => ''",
        "scope => 'PUBLIC'",
        "scope => 'documents'",
        "top_k => 0",
        "top_k => -1",
        "top_k => 1001",
        f"embedding => '{EAST}'",
        "embedding_model => 'test-model'",
    ],
)
def test_arguments_without_meaning_are_an_error(app: psycopg.Connection, arguments: str) -> None:
    with speaking(app, ALICE):
        assert refused_with(app, f"select from search('palisade', {arguments})") == "22023"


def test_an_embedding_of_another_width_is_an_error(app: psycopg.Connection) -> None:
    with speaking(app, ALICE):
        statement = "select from search('palisade', embedding => '[1,0,0]', embedding_model => 'test-model')"
        assert refused_with(app, statement) == "22000"


@pytest.mark.parametrize("name", ["user 2, all projects", "user 3", "no user", "user 1 of the other tenant"])
def test_outsiders_find_nothing_even_with_the_exact_text_and_vector(ask: Ask, store: Store, name: str) -> None:
    text = "the vault code is 4711"
    mine = store(ALICE, text, embedding=EAST)
    shared = store(ALICE, text, scope="project", project_id="vault", embedding=EAST)
    outsider = REACHES[name].principal
    for named in ({}, {"document_ids": [mine, shared]}, {"scope": "organization"}):
        assert ask(outsider, text, EAST, include_dropped=True, **named) == []
        assert ask(outsider, text, None, include_dropped=True, **named) == []
    assert set(documents(ask(ALICE, text, EAST, include_dropped=True))) == {mine, shared}


def test_the_candidate_function_gives_outsiders_nothing_either(superuser: psycopg.Connection) -> None:
    """Only search() calls it; here the service may as well."""
    statement = "select access_id from keyword_candidates('palisade', null, %s, 1000)"
    everything = [document_id(access_id) for access_id in range(1, 14)]
    for reach in REACHES.values():
        with superuser.transaction(force_rollback=True):
            superuser.execute("grant execute on function keyword_candidates to rag_app")
            superuser.execute("set local session authorization rag_app")
            assert column(superuser, statement, (everything,)) == []
            begin(superuser, reach.principal, login="rag_app")
            assert set(column(superuser, statement, (None,))) == reach.reads
            assert set(column(superuser, statement, (everything,))) == reach.reads


def test_the_search_mode_tells_which_arms_could_have_run(ask: Ask, store: Store, deployment: Deployment) -> None:
    """Where nothing was found; of what the principal sees, within the scope and the documents asked for."""
    first = store(ALICE, "ferry", embedding_model="model-a")
    second = store(ALICE, "anchor", embedding_model="model-b", scope="project", project_id="dock")
    store(BOB, "anchor", embedding_model="model-c")
    with deployment.transaction(ALICE) as connection:

        def mode(model: str | None, scope: str | None = None, documents: list[UUID] | None = None) -> str:
            (found,) = column(connection, "select search_mode(%s, %s, %s::uuid[])", (model, scope, documents))
            return found

        assert mode("model-a") == "partial"
        assert mode("model-c") == "keyword"
        assert mode(None) == "keyword"
        assert mode("model-a", "public") == "none"
        assert mode("model-a", None, [first]) == "hybrid"
        assert mode("model-a", None, [second]) == "keyword"
        assert mode("model-a", None, []) == "none"
    with deployment.transaction(NAMESAKE) as connection:
        assert column(connection, "select search_mode('model-a', null, %s::uuid[])", ([first],)) == ["none"]


# --- hostile questions ----------------------------------------------------------------------------

HOSTILE = [
    "'",
    "''",
    '"',
    "\\",
    "\\'",
    "'); drop table rag_chunks; --",
    "' or '1'='1",
    ":*",
    "palisade:*",
    "&",
    "|",
    "!",
    "<->",
    "<2>",
    "& | ! <-> ( ) :* \\ '",
    "((((",
    "))))",
    "a & !b | (c <-> d)",
    "!palisade",
    "-palisade",
    '"palisade record',
    "palisade %s %(question)s $1 :question ${x}",
    "\x01\x02\x1b",
    "\u202epalisade\u202c",
    "🏴‍☠️ 鍵 ключ",
    "http://example.com/it's?a=\\b&c=<d>",
    "/usr/lib/o'neill\\x",
    "it''s 'quoted''",
    "x" * 3000,
    "palisade " * 5000,
]


@pytest.mark.parametrize("question", HOSTILE, ids=lambda question: ascii(question[:24]))
def test_no_question_is_an_error(app: psycopg.Connection, question: str) -> None:
    with speaking(app, ALICE):
        search(app, question)
        rows = search(app, question, EAST, top_k=20)
        assert len(rows) == 6


def test_operators_of_a_query_language_are_only_characters(app: psycopg.Connection) -> None:
    with speaking(app, ALICE):
        found = documents(search(app, "!palisade & -record:* <-> 'three'", top_k=20))
    assert found[0] == document_id(3)
    assert len(found) == 6


def test_forty_thousand_words_are_a_question(app: psycopg.Connection) -> None:
    question = "three " + " ".join(f"word{number}" for number in range(40_000))
    with speaking(app, ALICE):
        assert documents(search(app, question)) == [document_id(3)]


def test_of_a_pasted_page_the_first_64_distinct_words_count(app: psycopg.Connection) -> None:
    with speaking(app, ALICE):
        assert documents(search(app, numbered(1, 63) + " three")) == [document_id(3)]
        assert search(app, numbered(1, 64) + " three") == []


@pytest.mark.parametrize("text", [text for text in HOSTILE if "/" in text])
def test_lexemes_with_quotes_and_backslashes_are_found(ask: Ask, store: Store, text: str) -> None:
    store(ALICE, text, language=None)
    store(ALICE, "something else", language=None)
    assert [row["chunk_text"] for row in ask(ALICE, text)] == [text]


@pytest.mark.parametrize(
    "lexeme",
    [
        "it's",
        "''",
        "\\",
        "a\\b",
        "\\'",
        "a:*",
        "a:AB",
        "a & b",
        "a | b",
        "!a",
        "a <-> b",
        "(a)",
        "'a'",
        " a ",
        "ключ",
        "%",
    ],
)
def test_lexeme_query_is_exactly_the_lexeme(superuser: psycopg.Connection, lexeme: str) -> None:
    statement = "select lexeme_query(%s) @@ array_to_tsvector(%s::text[]), numnode(lexeme_query(%s))"
    others = ["a", "b", "ab", "abc", "it", "s", "a b", "x" + lexeme, lexeme + "x"]
    rows = [
        superuser.execute(statement, (lexeme, words, lexeme)).fetchone()
        for words in ([*others, lexeme], [word for word in others if word != lexeme])
    ]
    assert rows == [(True, 1), (False, 1)]


@pytest.mark.parametrize(
    ("text", "total"),
    [("", 0), ("the of", 0), ("ferry", 1), ("ferry ferries ferry", 3), ("ferry " * 300, 255)],
)
def test_lexeme_total_counts_occurrences(app: psycopg.Connection, text: str, total: int) -> None:
    assert column(app, "select lexeme_total(to_tsvector('english', %s))", (text,)) == [total]


# --- cached plans ---------------------------------------------------------------------------------

# Alternating, so that each prepared statement meets another principal every time.
ROUND = ("user 1, all projects", "user 2, all projects", "user 1 of the other tenant", "user 1, other tag", None)
STATEMENTS = {
    "chunks": "select access_id from rag_chunks",
    "one chunk's row": "select access_id from rag_chunks where tenant_id = %(tenant)s and document_id = any(%(ids)s)",
    "view": "select access_id from v_documents join rag_documents on id = document_id",
    "classes": "select access_id from my_classes()",
    "documents": "select access_id from my_documents()",
    "document": "select access_id from unnest(%(ids)s::uuid[]) as id cross join lateral my_document(id)",
    "its chunks": "select access_id from unnest(%(ids)s::uuid[]) as id cross join lateral my_document_chunks(id)",
    "all chunks": "select access_id from my_chunks()",
    "search": """
        select access_id
        from search('palisade', %(vector)s::halfvec, 'test-model', top_k => 20)
        join rag_documents on id = document_id
    """,
}


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan", "force_custom_plan"])
def test_no_plan_remembers_a_principal(world: Deployment, mode: str) -> None:
    everything = [document_id(access_id) for access_id in range(1, 14)]
    with world.connect() as connection:
        connection.execute(f"set plan_cache_mode = {mode}")
        for _ in range(12):
            for name in ROUND:
                with connection.transaction():
                    if name is not None:
                        begin(connection, REACHES[name].principal)
                    tenant = REACHES[name].principal.tenant_id if name else "t1"
                    reads = sorted(REACHES[name].reads) if name else []
                    for label, statement in STATEMENTS.items():
                        parameters = {"tenant": tenant, "ids": everything, "vector": EAST}
                        used = {key: value for key, value in parameters.items() if f"%({key})s" in statement}
                        found = connection.execute(statement, used, prepare=True).fetchall()
                        assert sorted(row[0] for row in found) == reads, (label, name)
        plans = connection.execute(
            "select count(*), min(generic_plans), min(generic_plans + custom_plans),"
            # A statement without parameters has nothing to be customised for.
            " min(custom_plans) filter (where cardinality(parameter_types) > 0)"
            " from pg_prepared_statements where statement not like '%begin_as%'"
        ).fetchone()
    assert plans is not None
    prepared, generic, executions, custom = plans
    assert prepared == len(STATEMENTS)
    assert executions >= 60
    assert generic >= 60 or mode != "force_generic_plan"
    assert custom >= 60 or mode != "force_custom_plan"


def test_an_immutable_identity_would_have_been_noticed(superuser: psycopg.Connection) -> None:
    """The test above, on a function that a plan may fold: the second principal gets the first one's rows."""
    with superuser.transaction(force_rollback=True):
        superuser.execute("alter function my_access_ids() immutable")
        superuser.execute("set local session authorization rag_app")
        superuser.execute("set local plan_cache_mode = force_generic_plan")
        begin(superuser, ALICE, login="rag_app")
        alices = superuser.execute("select access_id from rag_chunks", prepare=True).fetchall()
        bob = {"app.user_id": "2", "app.signature": signature("rag_app", "t1", "2", "*", ["public"])}
        set_variables(superuser, bob)
        assert column(superuser, "select user_id from my_principal()") == [2]
        bobs = superuser.execute("select access_id from rag_chunks", prepare=True).fetchall()
    assert sorted(bobs) == sorted(alices) == [(1,), (3,), (6,), (7,), (9,), (10,)]


def test_a_search_reads_no_table_from_end_to_end(deployment: Deployment, store: Store) -> None:
    """With few classes the planner would; then the time of a search tells how much others have stored."""
    mine = Principal(tenant_id="t1", user_id=1)
    store(mine, "the vault code is 4711")
    for number in range(40):
        store(Principal(tenant_id="t2", user_id=2), f"a foreign note about vault {number}")
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute("analyze")
    with deployment.transaction(mine) as connection:
        found = connection.execute(
            "select chunk_text from search('vault code', %s::halfvec, 'test-model')", (unit_vector(1.0),)
        ).fetchall()
        scans = connection.execute(
            "select relname, seq_scan from pg_stat_xact_all_tables"
            " where relname in ('rag_chunks', 'rag_documents') order by relname"
        ).fetchall()
    assert found == [("the vault code is 4711",)]
    assert scans == [("rag_chunks", 0), ("rag_documents", 0)]
