"""From the aliases in an answer to SourceIds and citations, and that nothing else in it counts as one."""

from __future__ import annotations

import time
import unicodedata
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import cite, prompt
from tests.rag.disguises import DISGUISES
from tests.rag.passages import WRITTEN_AT, document_id, passage

ONE, TWO, THREE = (passage(f"Text {number}.", number=number) for number in (1, 2, 3))
SOURCES = prompt.build("Why?", [ONE, TWO, THREE], [], nonce="0a1b2c").sources
ID_ONE = "00000001-0000-4000-8000-000000000000:0"
ID_TWO = "00000002-0000-4000-8000-000000000000:0"
ID_THREE = "00000003-0000-4000-8000-000000000000:0"
FOREIGN = "550e8400-e29b-41d4-a716-446655440000:0"


def marked(*source_ids: str) -> str:
    return " ".join(f"[SourceId: {source_id}]" for source_id in source_ids)


# --- aliases -------------------------------------------------------------------------------------


def test_an_alias_becomes_the_source_id_of_its_passage_and_is_found_again():
    resolved = cite.resolve("Backups run at night. [S2-0a1b2c]", SOURCES)
    assert resolved.text == f"Backups run at night. [SourceId: {ID_TWO}]"
    assert resolved.cited == (TWO,)
    assert resolved.refused == 0
    assert cite.extract(resolved.text) == [ID_TWO] == [TWO.source_id]


def test_passages_come_in_the_order_of_their_first_citation_each_once():
    resolved = cite.resolve("A [S3-0a1b2c]. B [S1-0a1b2c]. C [S3-0a1b2c].", SOURCES)
    assert resolved.text == f"A {marked(ID_THREE)}. B {marked(ID_ONE)}. C {marked(ID_THREE)}."
    assert resolved.cited == (THREE, ONE)
    assert cite.extract(resolved.text) == [ID_THREE, ID_ONE]


@pytest.mark.parametrize(
    "bracket",
    [
        "[S1-0a1b2c, S2-0a1b2c]",
        "[S1-0a1b2c; S2-0a1b2c]",
        "[S1-0a1b2c,S2-0a1b2c]",
        "[ S1-0a1b2c , S2-0a1b2c ]",
        "[S1-0a1b2c and S2-0a1b2c]",
        "[S1-0a1b2c S2-0a1b2c]",
        "[Sources: S1-0a1b2c, S2-0a1b2c]",
        "[S1-0a1b2c] [S2-0a1b2c]",
        "[S1-0a1b2c, S2-0a1b2c, S1-0a1b2c]",
    ],
)
def test_one_bracket_may_hold_several_aliases(bracket):
    resolved = cite.resolve(f"It is so {bracket}.", SOURCES)
    assert resolved.text == f"It is so {marked(ID_ONE, ID_TWO)}."
    assert resolved.cited == (ONE, TWO)


def test_no_space_is_added_and_none_is_lost():
    assert cite.resolve("so[S1-0a1b2c], and", SOURCES).text == f"so{marked(ID_ONE)}, and"
    assert cite.resolve("so [S9-0a1b2c], and", SOURCES).text == "so, and"


@pytest.mark.parametrize(
    "alias",
    [
        "S4-0a1b2c",  # there are three
        "S0-0a1b2c",
        "S01-0a1b2c",
        "S1-ffffff",  # another request's
        "S999-000000",
    ],
)
def test_an_unknown_alias_is_dropped_and_counted(alias):
    resolved = cite.resolve(f"It is so [{alias}].", SOURCES)
    assert resolved.text == "It is so."
    assert resolved.cited == ()
    assert resolved.refused == 1


def test_of_several_aliases_the_unknown_ones_are_dropped():
    resolved = cite.resolve("It is so [S9-0a1b2c, S2-0a1b2c, S2-ffffff].", SOURCES)
    assert resolved.text == f"It is so {marked(ID_TWO)}."
    assert resolved.cited == (TWO,)
    assert resolved.refused == 2


@pytest.mark.parametrize(
    "text",
    [
        "see [1] and [12]",
        "[see appendix]",
        "arr[0] = list[S1]",
        "[a link](https://example.com)",
        "- [ ] to do",
        "[]",
        "[S1-0a1b2]",
        "[S1-0a1b2c3]",
        "[S1-0A1B2C]",
        "[S١-0a1b2c]",
        "[S1–0a1b2c]",
        "an open [ bracket",
        "[SourceIdentity: x]",
        "[Source: handbook]",
        "(S1-0a1b2c)",
    ],
)
def test_other_brackets_are_left_alone(text):
    resolved = cite.resolve(text, SOURCES)
    assert resolved.text == text
    assert resolved.cited == ()
    assert resolved.refused == 0


# --- SourceIds that a model made -----------------------------------------------------------------


@pytest.mark.parametrize(
    "made",
    [
        f"[SourceId: {FOREIGN}]",
        f"[SourceId: {ID_ONE}]",  # even one that exists: the prompt never showed it
        f"[SourceId:{FOREIGN}]",
        f"[sourceid: {FOREIGN}]",
        f"[ SourceId: {FOREIGN} ]",
        f"[SourceId: {'-' * 36}:0]",
        "[SourceId: 550e8400-e29b-41d4-a716-446655440000:٣]",
        f"[SourceId: 550e8400-e29b-41d4-a716-446655440000:{'9' * 5000}]",
        "[SourceId: S1]",
        "[SourceId]",
        "[SourceId:]",
        f"[SourceId: {FOREIGN}",  # cut off
        "[SourceId: 550e8400-e29b",
        "[SourceId:",
        "[SourceId",
    ],
)
def test_a_source_id_that_the_model_made_is_removed_and_counted(made):
    resolved = cite.resolve(f"It is so {made}", SOURCES)
    assert resolved.text == "It is so"
    assert resolved.cited == ()
    assert resolved.refused == 1
    assert cite.extract(resolved.text) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"A [SourceId: {FOREIGN} and then B. More.", "A and then B. More."),
        ("A [SourceId: and then B. [1] More.", "A and then B. [1] More."),
        ("A [SourceId: 550e8400-e29b\n\nB (see the note] below).", "A\n\nB (see the note] below)."),
        ("A [SourceId: 550e8400-e29b [S1-0a1b2c] B", f"A {marked(ID_ONE)} B"),
    ],
)
def test_what_follows_a_source_id_that_was_cut_off_stays(text, expected):
    assert cite.resolve(text, SOURCES).text == expected


@pytest.mark.parametrize(
    "pieces",
    [
        f"[Source[SourceId: x]Id: {FOREIGN}]",
        f"[Source[S9-0a1b2c]Id: {FOREIGN}]",
        f"[Source[SourceId: {FOREIGN}]Id: {FOREIGN}]",
        f"[[SourceId: x]SourceId: {FOREIGN}]",
        f"[S[SourceId]ource[S1-ffffff]Id: {FOREIGN}]",
        f"[ [S9-0a1b2c]SourceId: {FOREIGN}]",
    ],
)
def test_what_is_removed_does_not_leave_the_halves_of_another_one(pieces):
    resolved = cite.resolve(f"It is so {pieces}.", SOURCES)
    assert cite.extract(resolved.text) == []
    answer, citations = cite.keep_readable(resolved, {})
    assert cite.extract(answer) == []
    assert citations == []


def test_a_revoked_citation_does_not_leave_the_halves_of_another_one():
    resolved = cite.resolve(f"It is so [Source[S1-0a1b2c]Id: {FOREIGN}].", SOURCES)
    answer, _ = cite.keep_readable(resolved, {})
    assert cite.extract(answer) == []


fragments = st.sampled_from(
    [
        *("[", "]", "[", "]", " ", "\n", ":", ",", "word"),
        *("Source", "Id", "SourceId", "[SourceId: ", FOREIGN, ID_ONE, ID_THREE),
        *("S1-0a1b2c", "S2-0a1b2c", "S9-0a1b2c", "S1-ffffff"),
    ]
)


@settings(max_examples=200, deadline=None)
@given(st.lists(fragments, max_size=30).map("".join))
def test_whatever_the_model_writes_its_source_ids_are_those_that_it_cited_by_alias(text):
    resolved = cite.resolve(text, SOURCES)
    cited = [found.source_id for found in resolved.cited]
    assert set(cite.extract(resolved.text)) <= set(cited)
    assert set(cited) <= {ID_ONE, ID_TWO}
    answer, citations = cite.keep_readable(resolved, {(TWO.document_id, 0): WRITTEN_AT})
    assert set(cite.extract(answer)) <= {citation.source_id for citation in citations} <= {ID_TWO}


HOSTILE = {
    "open": "[" * 300_000,
    "labels": "[SourceId: " * 30_000,
    "spaced": "[ " * 150_000,
    "space": "[" + " " * 300_000,
    "long id": "[SourceId: " + "a-" * 150_000,
    "nested": "[Source" * 30_000 + "Id]" * 30_000,
    "aliases": " [S1-0a1b2c" * 30_000,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_answer_is_resolved_in_linear_time(text):
    # Each takes 10 to 30 ms of processor time; were it quadratic, it would be minutes.
    started = time.process_time()
    cite.resolve(text, SOURCES)
    assert time.process_time() - started < 20


# --- extract -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        f"[SourceId: {'-' * 36}:0]",
        "[SourceId: 550e8400-e29b-41d4-a716-446655440000:٣]",
        f"[SourceId: 550e8400-e29b-41d4-a716-446655440000:{'9' * 5000}]",
        "[SourceId: 550e8400-e29b-41d4-a716-446655440000]",
        "[SourceId: 550e8400-e29b-41d4-a716-446655440000:-1]",
        "[SourceId: 550E8400-E29B-41D4-A716-446655440000:0]",
        "[SourceId: 550e8400e29b41d4a716446655440000:0]",
        f"SourceId: {FOREIGN}",
        f"[SourceId: {FOREIGN}",
        f"[Source: {FOREIGN}]",
    ],
)
def test_a_malformed_source_id_is_passed_over(text):
    assert cite.extract(text) == []


def test_source_ids_are_extracted_once_in_order_with_any_space_after_the_colon():
    text = f"A [SourceId: {ID_TWO}] B [SourceId:{ID_ONE}] C [SourceId:   {ID_TWO}] D"
    assert cite.extract(text) == [ID_TWO, ID_ONE]


# --- what the asker can still read ---------------------------------------------------------------


def test_a_citation_that_became_unreadable_goes_with_all_its_marks():
    resolved = cite.resolve("A [S1-0a1b2c]. B [S2-0a1b2c]. C [S1-0a1b2c, S2-0a1b2c].", SOURCES)
    answer, citations = cite.keep_readable(resolved, {(document_id(2), 0): WRITTEN_AT})
    assert answer == f"A. B {marked(ID_TWO)}. C {marked(ID_TWO)}."
    assert [citation.source_id for citation in citations] == [ID_TWO]


def test_another_chunk_of_the_same_document_does_not_keep_a_citation():
    resolved = cite.resolve("A [S1-0a1b2c].", SOURCES)
    assert cite.keep_readable(resolved, {(document_id(1), 1): WRITTEN_AT}) == ("A.", [])


def test_a_citation_is_stale_when_the_text_changed_after_it_was_read():
    resolved = cite.resolve("A [S1-0a1b2c]. B [S2-0a1b2c].", SOURCES)
    readable = {(document_id(1), 0): WRITTEN_AT + timedelta(microseconds=1), (document_id(2), 0): WRITTEN_AT}
    _, citations = cite.keep_readable(resolved, readable)
    assert [citation.stale for citation in citations] == [True, False]


def test_a_citation_says_where_its_text_stands():
    source = passage(
        "Text.", document_name="Handbook", section="Leave > Parental", page_number=4, chunk_index=3, cosine=0.75
    )
    resolved = cite.resolve("A [S1-0a1b2c].", {"S1-0a1b2c": source})
    _, (citation,) = cite.keep_readable(resolved, {(document_id(1), 3): WRITTEN_AT})
    assert citation.source_id == "00000001-0000-4000-8000-000000000000:3"
    assert citation.document_id == "00000001-0000-4000-8000-000000000000"
    assert citation.chunk_index == 3
    assert (citation.document_name, citation.section, citation.page_number) == ("Handbook", "Leave > Parental", 4)
    assert citation.relevance_score == 0.75
    assert citation.snippet == citation.snippet_full == "Text."


@pytest.mark.parametrize(
    ("cosine", "keyword_share", "expected"), [(0.75, 0.1, 0.75), (-0.2, 0.9, 0.0), (1.0001, 0.0, 1.0), (None, 0.4, 0.4)]
)
def test_relevance_is_the_cosine_or_else_the_share_of_bm25_from_0_to_1(cosine, keyword_share, expected):
    source = passage("Text.", cosine=cosine, keyword_share=keyword_share)
    resolved = cite.resolve("A [S1-0a1b2c].", {"S1-0a1b2c": source})
    _, (citation,) = cite.keep_readable(resolved, {(document_id(1), 0): WRITTEN_AT})
    assert citation.relevance_score == expected


@pytest.mark.parametrize(
    ("length", "snippet", "snippet_full"),
    [
        (199, "x" * 199, "x" * 199),
        (200, "x" * 200, "x" * 200),
        (201, "x" * 200 + "...", "x" * 201),
        (1000, "x" * 200 + "...", "x" * 1000),
        (1001, "x" * 200 + "...", "x" * 1000),
    ],
)
def test_snippets_have_200_characters_and_full_ones_1000(length, snippet, snippet_full):
    resolved = cite.resolve("A [S1-0a1b2c].", {"S1-0a1b2c": passage("x" * length)})
    _, (citation,) = cite.keep_readable(resolved, {(document_id(1), 0): WRITTEN_AT})
    assert citation.snippet == snippet
    assert citation.snippet_full == snippet_full


# --- marks in other letters ----------------------------------------------------------------------

FOREIGN = "550e8400-e29b-41d4-a716-446655440000:0"


@pytest.mark.parametrize("disguise", DISGUISES)
def test_a_mark_in_other_letters_is_none(disguise):
    source = passage("Text.")
    said = f"So it is [S1-0a1b2c]. {DISGUISES[disguise](f'[SourceId: {FOREIGN}]')}"
    resolved = cite.resolve(said, {"S1-0a1b2c": source})
    assert cite.extract(resolved.text) == [source.source_id]
    told = unicodedata.normalize("NFKD", resolved.text)
    told = "".join(c for c in told if unicodedata.category(c) not in ("Cf", "Mn"))
    assert "[" not in told.replace(f"[SourceId: {source.source_id}]", "")


@pytest.mark.parametrize(
    "said",
    [
        f"[sourceid : {FOREIGN}]",
        f"[SourceId: [SourceId: x]{FOREIGN}]",
        f"[Sour[SourceId: x]ceId: {FOREIGN}]",
        f"[SourceId: {FOREIGN.upper()} ]",
        f"(SourceId: {FOREIGN})",
        f"SourceId {FOREIGN}",
        f"[{FOREIGN}]",
        f"[see {FOREIGN} ]",
        f"[SourceId: {FOREIGN.replace(':0', ':' + '9' * 5000)}]",
    ],
)
def test_an_id_that_reads_like_a_mark_does_not_stay(said):
    text = cite.resolve(f"So it is. {said}", {}).text
    assert FOREIGN.partition(":")[0] not in text.lower()
    # Nor does it come out of what is left.
    assert cite.resolve(text, {}).text == text


def test_an_id_in_the_middle_of_a_sentence_is_a_word():
    said = f"The record 550e8400-e29b-41d4-a716-446655440000 and {FOREIGN}, of Ж."
    assert cite.resolve(said, {}).text == said
