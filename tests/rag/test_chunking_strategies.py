"""The strategies of spec 003 beside the rules of spec 002: where each cuts, and what holds for all of them."""

from __future__ import annotations

import itertools
import random

import pytest

from rag.chunk import STRATEGIES, Strategy, split, units
from rag.embed import Embedder
from rag.ingest import Source, digest_of, ingest
from rag.parse import ParsedDocument, parse_text
from rag.principal import Principal
from rag.store import destination_of
from tests.conftest import Deployment
from tests.rag.stored import half_documents, rows

LIMIT = 64


def count(text: str) -> int:
    return len(text.split())


def document(text: str, name: str = "a.txt") -> ParsedDocument:
    return parse_text(text, name=name, max_bytes=10_000_000)


def cut(text: str, strategy: Strategy, *, name: str = "a.txt", limit: int = LIMIT, kinship=None) -> list[str]:
    parsed = document(text, name)
    if strategy == "semantic" and kinship is None:
        kinship = [0.5] * (len(units(parsed, limit_tokens=limit, count=count)) - 1)
    pieces = split(parsed, limit_tokens=limit, count=count, strategy=strategy, kinship=kinship or ())
    return [piece.text for piece in pieces]


WORDS = [f"w{number:03}" for number in range(200)]


# --- fixed ---------------------------------------------------------------------------------------


def test_fixed_windows_are_of_one_size_and_overlap_by_a_tenth():
    chunks = cut(" ".join(WORDS), "fixed")
    sizes = [len(chunk.split()) for chunk in chunks]
    # 56 is 7/8 of 64; of these the title in front takes one word.
    assert len(set(sizes[1:-1])) == 1
    assert sizes[1] == 55
    for before, after in itertools.pairwise(chunks):
        assert before.split()[-5:] == after.split()[:5]


def test_fixed_windows_do_not_care_for_sentences_and_headings():
    text = "# One\n\n" + "Short here. " * 20 + "\n\n# Two\n\n" + "More there. " * 20
    chunks = cut(text, "fixed", name="a.md")
    assert any("# Two" in chunk and not chunk.startswith("# Two") for chunk in chunks)


def test_a_window_ends_at_a_word_unless_there_is_none():
    assert all(chunk.split()[-1] in WORDS for chunk in cut(" ".join(WORDS), "fixed"))
    endless = "x" * 5_000
    assert "".join(split_exactly(endless)) == endless


def split_exactly(text: str) -> list[str]:
    pieces = split(document(text), limit_tokens=LIMIT, count=lambda part: len(part) // 4, strategy="fixed")
    done, end = [], 0
    for piece in pieces:
        done.append(text[max(piece.start, end) : piece.end])
        end = piece.end
    return done


# --- sentence ------------------------------------------------------------------------------------


def sentence(number: int, words: int = 12) -> str:
    return " ".join([f"Nr{number}", *(f"word{place}" for place in range(words - 2)), "end."])


def test_sentences_are_never_cut_and_chunks_overlap_by_whole_ones():
    text = " ".join(sentence(number, 5) for number in range(60))
    chunks = cut(text, "sentence")
    assert len(chunks) > 3
    for before, after in itertools.pairwise(chunks):
        assert after.startswith("Nr")
        assert before.endswith("end.")
        assert before.split()[-5:] == after.split()[:5]


def test_sentences_too_long_to_be_repeated_do_not_overlap():
    chunks = cut(" ".join(sentence(number) for number in range(30)), "sentence")
    assert " ".join(chunks) == " ".join(sentence(number) for number in range(30))
    assert {len(chunk.split()) for chunk in chunks[:-1]} == {48}


def test_a_heading_goes_with_what_follows():
    text = " ".join(sentence(number) for number in range(4)) + "\n\n# Next\n\n" + sentence(9)
    assert cut(text, "sentence", name="a.md")[1].startswith("# Next")


def test_a_sentence_that_is_larger_than_a_chunk_is_cut():
    assert all(len(chunk.split()) <= LIMIT for chunk in cut(" ".join(WORDS) + ".", "sentence"))


# --- semantic ------------------------------------------------------------------------------------


def test_semantic_cuts_where_neighbours_are_unlike():
    text = " ".join(sentence(number, 6) for number in range(8))
    kinship = [0.8, 0.8, 0.1, 0.8, 0.8, 0.8, 0.8]
    assert [chunk.split()[0] for chunk in cut(text, "semantic", kinship=kinship)] == ["Nr0", "Nr3"]


def test_semantic_cuts_what_is_too_large_where_it_is_least_alike():
    text = " ".join(sentence(number) for number in range(8))
    kinship = [0.8, 0.8, 0.8, 0.79, 0.8, 0.8, 0.8]
    starts = [chunk.split()[0] for chunk in cut(text, "semantic", kinship=kinship)]
    assert starts == ["Nr0", "Nr4"]


def test_semantic_joins_a_crumb_to_the_neighbour_that_it_is_more_like():
    text = " ".join(
        [*(sentence(number, 10) for number in range(3)), "Tiny bit.", *(sentence(number, 10) for number in range(4, 7))]
    )
    low, high = [0.9, 0.9, 0.1, 0.2, 0.9, 0.9], [0.9, 0.9, 0.2, 0.1, 0.9, 0.9]
    assert [chunk.split()[0] for chunk in cut(text, "semantic", kinship=low)] == ["Nr0", "Tiny"]
    assert [chunk.split()[-1] for chunk in cut(text, "semantic", kinship=high)] == ["bit.", "end."]


def test_semantic_begins_anew_at_headings():
    text = f"{sentence(0)}\n\n# Other\n\n{sentence(1)}\n"
    assert cut(text, "semantic", name="a.md") == [sentence(0), f"# Other\n\n{sentence(1)}"]


def test_semantic_wants_as_many_neighbours_as_there_are():
    with pytest.raises(ValueError, match="have 1 neighbours, not 3"):
        cut(f"{sentence(0)} {sentence(1)}", "semantic", kinship=[0.1, 0.2, 0.3])


# --- all of them ---------------------------------------------------------------------------------

ZOO = [
    " ".join(WORDS),
    "# A\n\n" + "Satz eins. Satz zwei! " * 40 + "\n\n## B\n\n```\ncode  here\n  more\n```\n\n- item\n- item two\n" * 10,
    "| a | b |\n|---|---|\n" + "| one | two |\n" * 300,
    "無料の昼食はない。" * 300,
    "x" * 20_000,
    "a\n\nb\n\nc\n\n" * 200,
    "".join(random.Random(1).choices("ab .\n!?\u3000é😀\t", k=20_000)),
    "word",
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", range(len(ZOO)))
def test_every_strategy_covers_the_text_within_the_limit(strategy: Strategy, place: int):
    def by_bytes(text: str) -> int:
        return len(text.encode()) // 3 + 2

    parsed = document(ZOO[place], "title of it.md")
    parts = units(parsed, limit_tokens=LIMIT, count=by_bytes)
    assert all(by_bytes(part) <= LIMIT for part in parts)
    chance = random.Random(place)
    kinship = [chance.random() for _ in parts[1:]]
    pieces = split(parsed, limit_tokens=LIMIT, count=by_bytes, strategy=strategy, kinship=kinship)
    end = 0
    for number, piece in enumerate(pieces):
        assert piece.index == number
        assert piece.text == parsed.body[piece.start : piece.end]
        assert by_bytes(piece.embedded_text) <= LIMIT
        assert not parsed.body[end : piece.start].strip()
        assert piece.end > end
        end = piece.end
    assert not parsed.body[end:].strip()


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_documents_are_stored_whole_with_every_strategy(
    strategy: Strategy, deployment: Deployment, embedder: Embedder
):
    text = "# Harbour\n\n" + "The ferry leaves at seven. The cook makes soup of fish. Tax is due in May. " * 30
    mara = Principal(tenant_id="acme", user_id=7)
    async with deployment.pools() as database:
        for expected in ("created", "unchanged"):
            done = await ingest(
                Source(name="a.md", source_id="a.md", content=text),
                principal=mara,
                destination=destination_of(mara, scope="user"),
                database=database,
                embedder=embedder,
                max_bytes=1_000_000,
                chunking=strategy,
            )
            assert done.status == expected
    assert half_documents(deployment.url("postgres")) == []
    (stored,) = rows(deployment.url("postgres"), "select count(*) as chunks from rag.rag_chunks")
    assert stored["chunks"] > 2


def test_another_strategy_makes_a_document_anew_and_the_rules_leave_it_alone(embedder: Embedder):
    source = Source(name="a.md", source_id="a.md", content="text")
    digests = {strategy: digest_of(source, embedder, chunking=strategy) for strategy in STRATEGIES}
    assert len(set(digests.values())) == 4
    assert digests["rules"] == digest_of(source, embedder)
