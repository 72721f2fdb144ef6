"""Confidence by hand: 30 parts retrieval, 40 parts coverage, 30 parts grade."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import confidence
from rag.exchange import ConfidenceScore
from tests.rag.passages import passage

# Its five terms: backups, run, nightly, berlin, oslo ("at" and "and" are stop words).
ANSWER = "Backups run nightly at Berlin and Oslo [SourceId: 550e8400-e29b-41d4-a716-446655440000:0]."
# Of these five it has backups and nightly: coverage is 2/5.
CONTEXT = [
    passage("Backups are made nightly.", number=1, cosine=0.8, document_name="A"),
    passage("Leave is requested.", number=2, cosine=0.6, document_name="B"),
]


# --- the weighted sum ----------------------------------------------------------------------------


def test_the_three_parts_are_weighted_30_40_30():
    # (0.8 + 0.6) / 2 = 0.7; 0.7 * 30 + 0.4 * 40 + 0.9 * 30 = 21 + 16 + 27
    assert confidence.score(ANSWER, CONTEXT, llm_score=90, grounded=True) == ConfidenceScore(
        overall=64, retrieval_score=pytest.approx(0.7), coverage_score=0.4, llm_score=90
    )


def test_without_a_citation_the_grade_does_not_count():
    # 21 + 16, and the grade is reported all the same
    score = confidence.score(ANSWER, CONTEXT, llm_score=90, grounded=False)
    assert score.overall == 37
    assert score.llm_score == 90


def test_the_best_grade_alone_lifts_nothing():
    score = confidence.score("Zebras.", [passage("Cats.", cosine=0.0)], llm_score=100, grounded=False)
    assert score.overall == 0


def test_without_results_confidence_is_zero():
    assert confidence.score(ANSWER, [], llm_score=100, grounded=True) == ConfidenceScore(
        overall=0, retrieval_score=0.0, coverage_score=0.0, llm_score=0
    )


def test_an_empty_answer_covers_nothing():
    # 0.7 * 30 + 0 + 0.5 * 30
    score = confidence.score("", CONTEXT, llm_score=50, grounded=True)
    assert score.coverage_score == 0.0
    assert score.overall == 36


@pytest.mark.parametrize(("given_score", "counted"), [(-5, 0), (0, 0), (100, 100), (101, 100), (10**9, 100)])
def test_a_grade_outside_of_0_to_100_is_clamped(given_score, counted):
    assert confidence.score(ANSWER, CONTEXT, llm_score=given_score, grounded=True).llm_score == counted


@pytest.mark.parametrize(("cosine", "expected"), [(1.0, 100), (1.5, 100), (-1.0, 70)])
def test_the_whole_stays_between_0_and_100(cosine, expected):
    # Everything covered and the best grade: 70, and 30 for retrieval.
    score = confidence.score("Backups.", [passage("Backups.", cosine=cosine)], llm_score=100, grounded=True)
    assert score.overall == expected
    assert 0 <= score.retrieval_score <= 1


@pytest.mark.parametrize(
    ("cosine", "grade", "expected"),
    [
        # 2.7 + 0.3 = 3, and 8.7 + 21.3 = 30; binary fractions come to just below both
        (0.09, 1, 3),
        (0.29, 71, 30),
        # 17.4 + 8.1 = 25.5 is cut, as the specification does it
        (0.58, 27, 25),
        (0.999, 0, 29),
    ],
)
def test_the_sum_is_cut_to_a_whole_number_without_losing_one_to_binary_fractions(cosine, grade, expected):
    score = confidence.score("Zebras.", [passage("Cats.", cosine=cosine)], llm_score=grade, grounded=True)
    assert score.overall == expected


@settings(max_examples=200, deadline=None)
@given(
    cosine=st.none() | st.floats(min_value=-1, max_value=1),
    share=st.floats(min_value=0, max_value=1),
    grade=st.integers(min_value=-1000, max_value=1000),
    grounded=st.booleans(),
    answer=st.text(max_size=40),
)
def test_whatever_comes_in_the_parts_stay_in_their_ranges(cosine, share, grade, grounded, answer):
    score = confidence.score(
        answer, [passage("Cats and dogs.", cosine=cosine, keyword_share=share)], llm_score=grade, grounded=grounded
    )
    assert 0 <= score.overall <= 100
    assert 0 <= score.retrieval_score <= 1
    assert 0 <= score.coverage_score <= 1
    assert 0 <= score.llm_score <= 100


# --- retrieval -----------------------------------------------------------------------------------


def test_where_no_cosine_was_computed_the_share_of_bm25_stands_in():
    # (0.8 + 0.2) / 2
    passages = [passage("A", cosine=0.8, keyword_share=0.9), passage("B", cosine=None, keyword_share=0.2)]
    assert confidence.similarity(passages) == pytest.approx(0.5)


def test_answerable_is_that_of_the_best_passage_half_cosine_half_bm25():
    passages = [
        passage("A", cosine=0.5, keyword_share=0.4),  # 0.45
        passage("B", cosine=0.3, keyword_share=0.9),  # 0.60
        passage("C", cosine=None, keyword_share=0.5),  # 0.50
    ]
    assert confidence.answerable(passages) == pytest.approx(0.6)
    assert confidence.answerable([]) == 0.0
    assert confidence.answerable([passage("A", cosine=-0.9, keyword_share=0.1)]) == 0.0


# --- coverage ------------------------------------------------------------------------------------


def test_terms_are_lower_case_words_of_three_letters_without_stop_words():
    assert confidence.key_terms("The HR team of 2026, at 09:30, must not do X1 or SQL.") == {"team", "2026", "sql"}


def test_the_marks_of_sources_are_no_terms():
    assert confidence.key_terms("So [SourceId: 550e8400-e29b-41d4-a716-446655440000:0] backups") == {"backups"}


def test_title_and_section_belong_to_the_context():
    source = passage("It takes an hour.", document_name="Restore guide", section="Berlin")
    # restore, berlin, hour of restore, berlin, hour, oslo
    assert confidence.coverage("Restore Berlin: hour, Oslo", [source]) == 0.75


def test_an_answer_of_stop_words_covers_nothing():
    assert confidence.coverage("They have been here.", [passage("They have been here.")]) == 0.0


def test_russian_words_count_and_its_stop_words_do_not():
    # не, с, который are stop words; отпуск, согласуется, руководителем, завтра remain.
    assert confidence.key_terms("Отпуск не согласуется с руководителем, который завтра", ["ru"]) >= {
        "отпуск",
        "согласуется",
        "руководителем",
    }
    source = passage("Отпуск согласуется с руководителем.", language="ru")
    assert confidence.coverage("Отпуск согласуется с директором.", [source]) == pytest.approx(2 / 3)
    assert confidence.coverage("Который с не.", [source]) == 0.0


def test_german_words_count_and_its_stop_words_do_not():
    assert confidence.key_terms("Der Urlaub wird nicht von Jörg genehmigt", ["de"]) == {"urlaub", "jörg", "genehmigt"}
    source = passage("Den Urlaub genehmigt die Leitung.", language="de")
    # urlaub and genehmigt of urlaub, genehmigt, jörg
    assert confidence.coverage("Der Urlaub wird von Jörg genehmigt.", [source]) == pytest.approx(2 / 3)


def test_stop_words_follow_the_languages_of_the_passages_and_english():
    # "nicht" is a word in an English context, and none in a German one.
    english = passage("Backups", language="en")
    german = passage("Backups", language="de")
    unknown = passage("Backups", language=None)
    assert confidence.coverage("Nicht the Backups", [english]) == 0.5
    assert confidence.coverage("Nicht the Backups", [unknown]) == 0.5
    assert confidence.coverage("Nicht the Backups", [german]) == 1.0
    assert confidence.coverage("Nicht the Backups", [english, german]) == 1.0
