"""Confidence by hand: 30 parts retrieval, 40 parts coverage, 30 parts grade."""

from __future__ import annotations

from dataclasses import replace

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


# --- whether the sources answer the question ------------------------------------------------------

MINILM = "local/all-MiniLM-L6-v2"
ASKED = "When are backups of the warehouse rehearsed?"  # terms: backups, warehouse, rehearsed
TABLES = [
    *confidence.WORDS.values(),
    confidence.OTHER_WORDS,
    *(w for t in confidence.COSINES.values() for w in t.values()),
]


def test_the_signals_are_the_best_of_the_passages():
    found = confidence.signals(
        ASKED,
        [
            passage("A backup of the warehouse.", number=1, cosine=0.4, keyword_share=0.3),
            passage("Rehearsals are on Monday.", number=2, cosine=0.6, keyword_share=0.2),
        ],
    )
    # "backup" is "backups", and "rehearsals" shares more than five letters with "rehearsed", but not the rest.
    assert found == confidence.Signals(cosine=0.6, share=0.3, found=2)


def test_title_and_section_are_searched_for_the_terms_too():
    source = passage("It is on Monday.", document_name="Warehouse", section="Backups")
    assert confidence.signals(ASKED, [source]).found == 2


def test_the_weights_by_hand():
    # 10 * .5 + 20 * .3 + 2 * ln(1 + 3) - 11 = 5 + 6 + 2.7726 - 11 = 2.7726; 1 / (1 + e^-2.7726) = 16 / 17
    weights = confidence.Weights(10.0, 20.0, 2.0, -11.0)
    assert weights.probability(confidence.Signals(cosine=0.5, share=0.3, found=3)) == pytest.approx(16 / 17)


def test_without_a_passage_nothing_is_answered():
    assert confidence.answerable(ASKED, [], embedding_model=MINILM) == 0.0


def test_what_has_all_the_words_and_a_near_vector_is_probable_and_what_has_nothing_is_not():
    near = passage("Backups of the warehouse are rehearsed.", cosine=0.8, keyword_share=0.7)
    far = passage("Zebras graze.", cosine=0.1, keyword_share=0.0)
    for model in (MINILM, "openai/text-embedding-3-small", None):
        for language in ("en", "de", "ru", "fi", None):
            sure, unsure = (
                confidence.answerable(ASKED, [replace(each, language=language)], embedding_model=model)
                for each in (near, far)
            )
            assert sure > 0.9, (model, language)
            assert unsure < 0.1, (model, language)


def test_the_words_alone_say_it_where_there_is_no_cosine_or_none_of_a_model_that_was_measured():
    compared = passage("Backups of the warehouse.", cosine=0.9, keyword_share=0.3)
    words = confidence.answerable(ASKED, [replace(compared, cosine=None)], embedding_model=MINILM)
    assert confidence.answerable(ASKED, [compared], embedding_model="ollama/nomic-embed-text") == words
    assert confidence.answerable(ASKED, [compared], embedding_model=None) == words
    assert confidence.answerable(ASKED, [compared], embedding_model=MINILM) > words
    # 20.6 * .3 + 3 * ln 3 - 9.6 = -.1242; 1 / (1 + e^.1242) = .469
    assert words == pytest.approx(0.469, abs=0.0005)


def test_the_language_that_answers_best_counts():
    russian = passage("Да.", cosine=0.6, keyword_share=0.05, language="ru")
    english = passage("Backups of the warehouse are rehearsed.", cosine=0.7, keyword_share=0.6, language="en")
    both = confidence.answerable(ASKED, [russian, english], embedding_model=MINILM)
    assert both == confidence.answerable(ASKED, [english], embedding_model=MINILM)
    assert both > confidence.answerable(ASKED, [russian], embedding_model=MINILM)


@pytest.mark.parametrize("weights", TABLES)
def test_no_signal_speaks_against_an_answer(weights):
    assert min(weights.cosine, weights.share, weights.found) >= 0


signal = st.builds(
    confidence.Signals,
    cosine=st.floats(min_value=-1, max_value=1),
    share=st.floats(min_value=0, max_value=1),
    found=st.integers(min_value=0, max_value=2000),
)


@settings(max_examples=300, deadline=None)
@given(
    weights=st.sampled_from(TABLES),
    less=signal,
    cosine=st.floats(min_value=0, max_value=1),
    share=st.floats(min_value=0, max_value=1),
    found=st.integers(min_value=0, max_value=20),
)
def test_more_of_a_signal_is_never_less_sure(weights, less, cosine, share, found):
    more = confidence.Signals(cosine=less.cosine + cosine, share=less.share + share, found=less.found + found)
    assert 0 <= weights.probability(less) <= weights.probability(more) <= 1


@settings(max_examples=100, deadline=None)
@given(
    question=st.text(max_size=60),
    texts=st.lists(st.text(max_size=60), max_size=4),
    cosine=st.none() | st.floats(min_value=-1, max_value=1),
    share=st.floats(min_value=0, max_value=1),
    model=st.sampled_from([MINILM, "other", None]),
    language=st.sampled_from(["en", "de", "ru", "zz", None]),
)
def test_another_passage_never_makes_it_less_sure(question, texts, cosine, share, model, language):
    before = -1.0
    passages = []
    for number, text in enumerate(texts, start=1):
        passages.append(passage(text, number=number, cosine=cosine, keyword_share=share / number, language=language))
        probable = confidence.answerable(question, passages, embedding_model=model)
        assert max(0.0, before) <= probable <= 1
        before = probable


# --- whether an answer stands for itself ----------------------------------------------------------


@pytest.mark.parametrize(
    ("overall", "llm_score", "grounded", "graded", "threshold", "stands"),
    [
        (60, 0, True, True, 60, True),
        (59, 100, True, True, 60, False),
        (100, 100, False, True, 60, False),
        (100, 100, False, True, 0, False),
        # An extract: as probably answered as not.
        (60, 50, True, False, 60, True),
        (90, 49, True, False, 60, False),
        (90, 49, True, False, 80, False),
        # Whoever wants less gets less.
        (60, 30, True, False, 30, True),
        (60, 29, True, False, 30, False),
        (60, 0, True, False, 0, True),
    ],
)
def test_an_answer_stands_at_its_threshold_and_an_extract_at_even_odds(
    overall, llm_score, grounded, graded, threshold, stands
):
    score = ConfidenceScore(overall=overall, retrieval_score=0.5, coverage_score=1.0, llm_score=llm_score)
    assert confidence.suffices(score, grounded=grounded, graded=graded, threshold=threshold) is stands


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
