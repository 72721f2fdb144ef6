"""A reader who reads along is shown the same as one who waits, wherever the draft is cut into pieces."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag import prompt
from rag.cite import extract
from rag.prompt import RAG_SYSTEM_PROMPT
from rag.release import REMOVED
from rag.show import Showing, show
from rag.withhold import WITHHELD
from tests.rag.passages import passage

GUIDE = "https://docs.acme.example/backup"
QUESTION = "When do backups run?"
PASSAGES = [passage(f"Backups run at night, see {GUIDE}.", number=1), passage("Use https://b.example/x.", number=2)]
NONCE = "0a1b2c"
SOURCES = prompt.build(QUESTION, PASSAGES, [], nonce=NONCE).sources
FOREIGN = "550e8400-e29b-41d4-a716-446655440000:0"
RULE = "Use only what the quoted sources say."

FRAGMENTS = [
    *("[", "]", "(", ")", "<", ">", " ", "  ", "\n", ":", "/", "//", ".", ",", "&#58;", "\u200b", "=", '"', "!", "S"),
    *("Source", "Id", "[SourceId: ", f"{FOREIGN}]", "[S1-0a1b2c]", "[S2-0a1b2c, S9-0a1b2c]", "0a1b2c", "0a1", "b2c"),
    *("http", "https://evil.example/x", "](https://evil.example/y)", GUIDE, f"[it]({GUIDE})", "www.", "evil.com"),
    *(
        "<img src=",
        "<b>",
        "data:text/html,",
        "word",
        "備份",
        "【",
        "ЅourceId:",
        "】",
        FOREIGN,
        "Копии",
        "x[1]",
        "\n[1]: ",
        "//b.example/x",
        "\ue000",
    ),
    *(RULE, "Use only ", "what the ", "quoted sources say"),
]
drafts = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


def shown(text: str) -> str:
    return show(text, SOURCES, system=RAG_SYSTEM_PROMPT, question=QUESTION, nonce=NONCE).text


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def streamed(pieces: list[str]) -> list[str]:
    showing = Showing(SOURCES, system=RAG_SYSTEM_PROMPT, question=QUESTION, nonce=NONCE)
    return [*(showing.feed(piece) for piece in pieces), showing.finish()]


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(drafts, st.lists(st.integers(0, 10_000), max_size=40))
def test_the_pieces_are_the_answer_wherever_the_draft_is_cut(text: str, cuts: list[int]) -> None:
    whole = shown(text)
    assert "".join(streamed(pieces_of(text, cuts))) == whole
    assert "".join(streamed(list(text))) == whole
    assert "0a1b2c" not in whole
    assert set(extract(whole)) <= {one.source_id for one in PASSAGES}


@settings(max_examples=500, deadline=None, derandomize=True)
@given(drafts, st.lists(st.integers(0, 10_000), max_size=40))
def test_nothing_is_shown_before_it_is_decided(text: str, cuts: list[int]) -> None:
    so_far = ""
    for piece in streamed(pieces_of(text, cuts)):
        so_far += piece
        # What a screen would show now must be as clean as the end.
        assert "0a1b2c" not in so_far
        assert "https://evil" not in so_far
        assert set(extract(so_far)) <= {one.source_id for one in PASSAGES}
        # No mark is cut in half.
        assert so_far.count("[SourceId: ") == len([*so_far.split("[SourceId: ")]) - 1
        tail = so_far.rpartition("[SourceId: ")[2] if "[SourceId: " in so_far else "]"
        assert "]" in tail


@pytest.mark.parametrize("cyrillic", [True, False])
@pytest.mark.parametrize("rest", ["[SourceId: ", "550e8400-e29b-41d4-a716-446655440000:0]", "  x", " [S1-0a1b2c]"])
def test_an_id_behind_the_word_goes_wherever_it_is_cut(cyrillic: bool, rest: str) -> None:
    text = f"{'Ѕ' if cyrillic else 'S'}\u200bourceId: 550e8400-e29b-41d4-a716-446655440000:0{rest}"
    assert "550e8400-" not in shown(text).removesuffix(f"[SourceId: {PASSAGES[0].source_id}]")
    for cut in range(len(text)):
        assert "".join(streamed([text[:cut], text[cut:]])) == shown(text)
    assert "".join(streamed(list(text))) == shown(text)


def test_a_link_waits_for_the_citation_of_its_source_and_everything_behind_it() -> None:
    pieces = ["Read ", GUIDE, " first", ", please ", "[S1-0a1b", "2c]", " and go", " on ", "then."]
    heard = streamed(pieces)
    assert heard[:5] == ["", "Read", "", "", ""]
    assert heard[5] == f" {GUIDE} first, please"
    assert "".join(heard) == shown("".join(pieces))


def test_a_link_of_a_source_that_is_not_cited_in_the_end_is_removed() -> None:
    assert shown(f"Read {GUIDE} [S2-0a1b2c].") == f"Read {REMOVED} [SourceId: {PASSAGES[1].source_id}]."


def test_other_text_is_shown_word_by_word() -> None:
    words = ["Back", "ups", " run", " at", " night", ", every", " day", "."]
    assert streamed(words) == ["", "", "Backups", " run", " at", " night,", " every", "", " day."]
    assert streamed(["備份", "每天", "兩點"]) == ["備份", "每天", "兩點", ""]


def test_the_nonce_and_the_prompt_are_never_said() -> None:
    assert shown("The digits are 0a1b2c, (S1-0a1b2c) and S2-0a1b2c.") == "The digits are , () and ."
    assert shown(f"Rules: {RULE}") == f"Rules: {WITHHELD}."


@pytest.mark.parametrize(
    ("draft", "left"),
    [
        ("htt0a1b2cps://evil.example/x", REMOVED),
        ("htt[S9-0a1b2c]ps://evil.example/x", REMOVED),
        (f"[Sour0a1b2cceId: {FOREIGN}]", "(SourceId: …]"),
        ("[S1-0a1b2c](https://evil.example/x)", f"[SourceId: {PASSAGES[0].source_id}] {REMOVED}"),
    ],
)
def test_what_is_taken_out_leaves_no_halves_of_something_else(draft: str, left: str) -> None:
    assert shown(draft) == left


@pytest.mark.parametrize("text", ["[" * 50_000, "[SourceId: " * 5_000, " " * 50_000, "a" * 100_000, "<a " * 20_000])
def test_a_hostile_stream_of_single_characters_costs_no_quadratic_time(text: str) -> None:
    started = time.process_time()
    streamed(list(text))
    assert time.process_time() - started < 20
