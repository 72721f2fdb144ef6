"""Rows of others next to one's own, and words of theirs, change nothing: not which rows a search returns, nor how many,
nor what they score, nor what it reads to find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import cycle

import numpy as np
import psycopg
import pytest

from rag.maintain import KINDS
from rag.settings import Settings
from tests.barrier.neighbourhood import (
    ASKERS,
    LARGE,
    LARGE_CLASS,
    TOP_K,
    WALK,
    NewDeployment,
    Question,
    Reads,
    Site,
    answer,
    asking,
    found,
    questions,
    reads,
    surrounded,
)
from tests.barrier.oracle_planting import Spoil, altered
from tests.barrier.oracle_world import PLAN_MODES

Figure = Callable[[str], None]

STATISTICS = ("rag_class_lexemes_pkey", "rag_class_languages_pkey")


@pytest.fixture(scope="module")
def site(new_deployment: NewDeployment, settings: Settings, scaled: Callable[..., int]) -> Iterator[Site]:
    large = scaled(test=600, ci=1_500, prove=6_000)
    around = scaled(test=1_100, ci=1_500, prove=17_000)
    with surrounded(new_deployment, settings, large=large, around=around) as made:
        yield made


@pytest.fixture(scope="module")
def count(scaled: Callable[..., int]) -> int:
    return scaled(test=40, ci=250, prove=500)


def near_questions(site: Site, count: int) -> list[Question]:
    """No own row has a word of theirs: what vectors alone decide, with a keyword arm and without."""
    return list(questions(site.centres, count, kinds=["foreign alone"], arms=["vector", "hybrid"]))


def word_questions(site: Site, count: int) -> list[Question]:
    return list(questions(site.centres, count))


@pytest.mark.parametrize("asker", ASKERS)
def test_the_nearest_rows_are_foreign_and_more_than_a_walk_visits(site: Site, count: int, asker: str) -> None:
    """Or the tests below would prove nothing."""
    own = site.own.of(ASKERS[asker][1])
    asked = near_questions(site, count)
    mine, near, elsewhere = (rows.cosines(asked) for rows in (own, site.foreign, site.foreign_elsewhere))
    assert np.all(np.sum(near > np.max(mine, axis=1, keepdims=True), axis=1) > WALK)
    assert np.all(np.max(elsewhere, axis=1) < np.sort(mine, axis=1)[:, -TOP_K])
    words = {word for question in asked for word in question.text.split()}
    assert words <= set(" ".join(site.foreign.texts).split())
    assert not words & set(" ".join(own.texts + site.foreign_elsewhere.texts).split())


@pytest.mark.parametrize("asker", ASKERS)
def test_the_own_nearest_rows_are_returned(site: Site, count: int, asker: str, figure: Figure) -> None:
    principal, access_ids = ASKERS[asker]
    own = site.own.of(access_ids)
    place = {identifier: row for row, identifier in enumerate(own.ids)}
    asked = near_questions(site, count)
    with asking(site.near, principal) as connection:
        for question, cosines in zip(asked, own.cosines(asked), strict=True):
            rows = found(answer(connection, question))
            assert len({row["document_id"] for row in rows}) == len(rows) == TOP_K
            assert {row["recall"] for row in rows} == {"exact" if asker == "small classes" else "approximate"}
            returned = cosines[[place[row["document_id"]] for row in rows]]
            # Two rows may be so nearly as far that four bytes do not tell which is the nearer one.
            assert returned == pytest.approx(np.sort(cosines)[::-1][:TOP_K], abs=1e-6), question
            assert [row["cosine"] for row in rows] == pytest.approx(returned, abs=1e-6)
    figure(
        f"{asker}: {count} questions with {len(site.foreign.ids) // len(site.centres):,} foreign rows nearer than any"
        f" of {len(own.ids):,} own ones: the own top {TOP_K} of numpy, each time"
    )


@pytest.mark.parametrize("asker", ASKERS)
def test_foreign_words_change_no_answer(site: Site, count: int, asker: str, figure: Figure) -> None:
    """All candidates, with their scores, ranks and reasons."""
    principal = ASKERS[asker][0]
    with asking(site.without, principal) as without, asking(site.near, principal) as near:
        for question in word_questions(site, count):
            expected = answer(without, question)
            assert answer(near, question) == expected, question
            if question.arms == "hybrid":
                assert len(found(expected)) == TOP_K
            else:
                assert bool(expected) is (question.kind != "foreign alone")
    foreign = f"{len(site.foreign.ids):,} foreign rows"
    figure(f"{asker}: {count} questions: the same rows and scores with {foreign} that say the words and without")


def compared(near: psycopg.Connection, elsewhere: psycopg.Connection, question: Question) -> tuple[Reads, Reads]:
    """Equal unless it reads something else three times in a row: whoever analyses a table meanwhile empties caches."""
    for _ in range(3):
        both = reads(near, question), reads(elsewhere, question)
        if both[0] == both[1]:
            break
    return both


@pytest.mark.parametrize("asker", ASKERS)
def test_foreign_rows_change_no_plan_and_no_buffer(site: Site, count: int, asker: str, figure: Figure) -> None:
    asked = near_questions(site, count) + word_questions(site, count)
    scanned = set()
    with asking(site.near, ASKERS[asker][0]) as near, asking(site.elsewhere, ASKERS[asker][0]) as elsewhere:
        for question, mode in zip(asked, cycle(PLAN_MODES), strict=False):
            for connection in (near, elsewhere):
                connection.execute(f"set local plan_cache_mode = {mode}")
            first, second = compared(near, elsewhere, question)
            assert first == second, (mode, question)
            scanned |= {name for name, (scans, *_) in first.relations.items() if scans}
    # The large class's own indexes are of use to whoever reads it, and those of a foreign one to nobody.
    indexes = {f"rag_chunks_{kind}_{LARGE_CLASS}" for kind in KINDS} if asker == "a large class" else set()
    assert {name for name in scanned if name[-1].isdigit()} == indexes
    figure(
        f"{asker}: {len(asked)} questions: the same plan, buffers and reads of each table and index, whether"
        f" {len(site.foreign.ids):,} foreign rows are near and say the words, or neither"
    )


@pytest.mark.parametrize("asker", ASKERS)
def test_statistics_of_foreign_classes_are_not_read(site: Site, asker: str) -> None:
    """Words of all large classes are counted in one table. How many there are of others, and which, is theirs."""
    principal = ASKERS[asker][0]
    total = 0
    with asking(site.without, principal) as without, asking(site.near, principal) as near:
        for question, mode in zip(word_questions(site, 60), cycle(PLAN_MODES), strict=False):
            entries = []
            for connection in (without, near):
                connection.execute(f"set local plan_cache_mode = {mode}")
                read = reads(connection, question).relations
                entries.append([read.get(name, (0, 0))[1] for name in STATISTICS])
            assert entries[0] == entries[1], (mode, question)
            total += sum(entries[0])
    assert (total > 0) is (asker == "a large class")


# --- what would be noticed --------------------------------------------------------------------------

# In the place of the large class's own indexes, ones that hold everybody's rows: answers stay right, or nearly so.
SHARED_INDEXES: Mapping[str, Spoil] = {
    "vectors": altered(
        f"drop index rag_chunks_vector_{LARGE_CLASS}",
        f"create index rag_chunks_vector_{LARGE_CLASS} on rag_chunks using hnsw (embedding halfvec_cosine_ops)"
        " with (m = 8, ef_construction = 32)",
    ),
    "words": altered(
        f"drop index rag_chunks_words_{LARGE_CLASS}",
        f"create index rag_chunks_words_{LARGE_CLASS} on rag_chunks using gin (tsv) with (fastupdate = off)",
    ),
}


@pytest.mark.parametrize("kind", SHARED_INDEXES)
def test_an_index_that_classes_share_is_noticed(site: Site, kind: str) -> None:
    """Not by its blocks: no two graphs of the same vectors have the same ones."""
    spoil = SHARED_INDEXES[kind]
    with asking(site.near, LARGE, spoil) as near, asking(site.elsewhere, LARGE, spoil) as elsewhere:
        assert any(
            reads(near, question).entries != reads(elsewhere, question).entries for question in near_questions(site, 4)
        )
