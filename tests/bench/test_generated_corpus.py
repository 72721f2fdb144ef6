"""The corpora of the speed bench: what they promise, and that the product would have stored the same rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from bench import corpus as generated
from bench.arms import Fusion, Right, truths
from bench.corpus import Chunks, Corpus, Question
from tests.conftest import Deployment


@pytest.fixture(scope="module")
def small() -> Corpus:
    return Corpus(chunks=50_000, seed=1)


def test_a_fixed_principal_sees_the_same_rows_in_a_larger_corpus(small: Corpus) -> None:
    larger = Corpus(chunks=200_000, seed=1)

    for here, there in zip(small.readers[:2], larger.readers[:2], strict=True):
        assert here.fixed
        assert here.scopes == there.scopes
        ours, theirs = small.rows(here.scopes), larger.rows(there.scopes)
        assert np.array_equal(ours.ids, theirs.ids)
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.array_equal(ours.vectors, theirs.vectors)


def test_another_seed_makes_other_rows(small: Corpus) -> None:
    other = Corpus(chunks=50_000, seed=2)

    ours, theirs = small.rows(small.readers[0].scopes), other.rows(other.readers[0].scopes)

    assert not np.array_equal(ours.tokens[:100], theirs.tokens[:100])
    assert not np.array_equal(ours.ids, theirs.ids)


@pytest.mark.parametrize("chunks", [50_000, 200_000, 1_000_000])
def test_scopes_add_up_and_are_skewed(chunks: int) -> None:
    corpus = Corpus(chunks=chunks, seed=1)

    sizes = sorted((scope.chunks for scope in corpus.scopes), reverse=True)

    assert sum(sizes) == chunks
    assert sizes[:2] == [chunks // 5, max(chunks // 10, 9000)]
    assert sizes[-1] in (20, 21)
    assert len({scope.access_id for scope in corpus.scopes}) == len(sizes) > 250
    assert [reader.visible for reader in corpus.readers] == [500, 3000, 15000, chunks // 10 + 300, chunks // 5 + 300]


def test_waves_hold_every_row_of_a_scope_once(small: Corpus) -> None:
    scope = small.readers[2].scopes[0]

    rows = small.rows((scope,))

    assert len(rows) == scope.chunks == 2000
    assert len(np.unique(rows.ids, axis=0)) == 2000
    documents, counts = np.unique(rows.document_ids, axis=0, return_counts=True)
    assert len(documents) == 250
    assert set(counts.tolist()) == {8}


def test_the_database_would_have_made_the_same_lexemes(
    small: Corpus, new_deployment: Callable[[], AbstractContextManager[Deployment]]
) -> None:
    reader = small.readers[0]
    rows = small.rows(reader.scopes)
    tenants = {scope.access_id: scope.tenant_id for scope in reader.scopes}

    with new_deployment() as clone, clone.cluster.superuser(clone.name) as connection, connection.transaction():
        connection.execute("set local search_path = rag, pg_catalog")
        connection.execute("create temporary table loaded (like rag_chunks including constraints including defaults)")
        with (
            connection.cursor() as cursor,
            cursor.copy(f"copy loaded ({', '.join(generated.CHUNK_COLUMNS)}) from stdin (format binary)") as copy,
        ):
            copy.write(generated.COPY_HEADER)
            for line in small.copied(rows, tenants):
                copy.write(line)
            copy.write(generated.COPY_TRAILER)
        found = connection.execute(
            """
            select
                count(*),
                count(*) filter (where tsv = to_tsvector('english', chunk_text)),
                count(*) filter (where lexeme_count = lexeme_total(tsv)),
                count(*) filter (where abs(l2_norm(embedding) - 1) < 0.001),
                count(distinct document_id)
            from loaded
            """
        ).fetchone()

    # 300 chunks are 38 documents of up to 8, 200 are 25.
    assert found == (500, 500, 500, 500, 63)


def hand_made(*texts: list[int], vectors: list[list[float]]) -> Chunks:
    count = len(texts)
    return Chunks(
        access_ids=np.ones(count, dtype=np.int64),
        ids=np.arange(1, count + 1, dtype=np.uint8)[:, None].repeat(16, axis=1),
        document_ids=np.arange(1, count + 1, dtype=np.uint8)[:, None].repeat(16, axis=1),
        places=np.zeros(count, dtype=np.int64),
        lengths=np.array([len(text) for text in texts]),
        tokens=np.array([word for text in texts for word in text], dtype=np.int32),
        vectors=np.array(vectors, dtype=np.float16),
    )


def test_the_truth_scores_by_bm25_and_cosine() -> None:
    rows = hand_made([7, 7, 8, 9], [8, 9, 9, 9], [9, 9, 9, 9], vectors=[[0, 1], [1, 0], [0.6, 0.8]])
    question = Question(kind="near", text="", words=(7, 8), vector=np.array([1, 0], dtype=np.float32))

    (truth,) = truths(rows, [question], Fusion(keyword_k=10, vector_k=10, keyword_weight=1.5, vector_weight=1))

    first, second, third = (f"{number:02x}" * 16 for number in (1, 2, 3))
    # All lengths are the mean, so the denominator is tf + 1.2. Word 7: idf ln(1 + 2.5/1.5), twice in the first.
    # Word 8: idf ln(1 + 1.5/2.5), once in the first and in the second.
    assert truth.keyword.scores == pytest.approx({
        (first, 0): 0.980829 * 2 * 2.2 / 3.2 + 0.470004,
        (second, 0): 0.470004,
    })  # fmt: skip
    assert truth.vector.scores == pytest.approx({(first, 0): 0, (second, 0): 1, (third, 0): 0.6}, abs=1e-3)
    assert truth.fused.scores == pytest.approx({
        (first, 0): 1.5 + 11 / 13,
        (second, 0): 1.5 * 11 / 12 + 1,
        (third, 0): 11 / 12,
    })  # fmt: skip


def test_of_equal_scores_any_row_is_right() -> None:
    right = Right(scores={("a", 0): 3.0, ("b", 0): 2.0, ("c", 0): 2.0, ("d", 0): 1.0}, least=2.0 - 1e-7, count=2)

    assert right.share([("a", 0), ("b", 0)]) == right.share([("a", 0), ("c", 0)]) == 1
    assert right.share([("a", 0), ("d", 0)]) == right.share([("a", 0), ("x", 0)]) == 0.5
    assert right.share([("a", 0), ("a", 0)]) == 0.5
