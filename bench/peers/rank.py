"""Ranks the chunks of a collection with one peer; run by bench/ranking.py with the Python of the peer's own venv.

    python rank.py PEER FOLDER LIMIT

FOLDER has collection.json (`chunks`, `questions`, both texts, and the `language` of the chunks as the Snowball
stemmers name it) and their vectors, chunks.npy and questions.npy. Writes ranking.json there: for each question the
numbers of the chunks found, best first, at most LIMIT; null where the peer raised an error, and `error` the last
one. PEER_DATABASE_URL is a database of its own where one is needed. Nothing of the product is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Input:
    """The collection; rows of the vectors are in the order of the texts."""

    chunks: list[str]
    questions: list[str]
    chunk_vectors: np.ndarray
    question_vectors: np.ndarray
    language: str
    limit: int


Ask = Callable[[int], list[int]]


def bm25s_as_shipped(given: Input) -> Ask:
    """The README's first example: English stop words, no stemmer, k1 1.5, b .75."""
    return _bm25s(given, stopwords="en", stemmer=None)


def bm25s_stemmed(given: Input) -> Ask:
    """With the stop words and the stemmer of the collection's language, as its README recommends."""
    import Stemmer

    return _bm25s(given, stopwords=given.language, stemmer=Stemmer.Stemmer(given.language))


def _bm25s(given: Input, **words: object) -> Ask:
    import bm25s

    index = bm25s.BM25()
    index.index(bm25s.tokenize(given.chunks, show_progress=False, **words), show_progress=False)

    def ask(number: int) -> list[int]:
        tokens = bm25s.tokenize([given.questions[number]], show_progress=False, **words)
        found, scores = index.retrieve(tokens, k=min(given.limit, len(given.chunks)), show_progress=False)
        # It fills up with chunks that have none of the words.
        return [int(chunk) for chunk, score in zip(found[0], scores[0], strict=True) if score > 0]

    return ask


def langchain_as_shipped(given: Input) -> Ask:
    """Hybrid as its documentation sets it up: one configuration, given when the store is made."""
    from langchain_postgres.v2.hybrid_search_config import HybridSearchConfig

    store = _langchain(given, HybridSearchConfig(tsv_column="content_tsv"))

    def ask(number: int) -> list[int]:
        found = store.similarity_search(given.questions[number], k=given.limit)
        return [document.metadata["number"] for document in found]

    return ask


def langchain_helped(given: Input) -> Ask:
    """A new configuration for each question, and 50 candidates an arm instead of 4.

    The one given to the store keeps the words of the first question for all that follow.
    """
    from langchain_postgres.v2.hybrid_search_config import HybridSearchConfig

    store = _langchain(given, HybridSearchConfig(tsv_column="content_tsv"))

    def ask(number: int) -> list[int]:
        config = HybridSearchConfig(tsv_column="content_tsv", primary_top_k=50, secondary_top_k=50)
        found = store.similarity_search(given.questions[number], k=given.limit, hybrid_search_config=config)
        return [document.metadata["number"] for document in found]

    return ask


def _langchain(given: Input, config: object):
    from langchain_core.embeddings import Embeddings
    from langchain_postgres import PGEngine, PGVectorStore

    by_text = _by_text(given)

    class Known(Embeddings):
        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [by_text[text].tolist() for text in texts]

        def embed_query(self, text: str) -> list[float]:
            return by_text[text].tolist()

    engine = PGEngine.from_connection_string(_database_url("postgresql+asyncpg"))
    engine.init_vectorstore_table(
        "langchain_chunks",
        vector_size=given.chunk_vectors.shape[1],
        hybrid_search_config=config,
        overwrite_existing=True,
    )
    store = PGVectorStore.create_sync(
        engine, embedding_service=Known(), table_name="langchain_chunks", hybrid_search_config=config
    )
    store.add_texts(given.chunks, metadatas=[{"number": number} for number in range(len(given.chunks))])
    return store


def llama_index(given: Input) -> Ask:
    """Hybrid as its documentation sets it up."""
    from llama_index.core.schema import TextNode
    from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryMode
    from llama_index.vector_stores.postgres import PGVectorStore

    store = PGVectorStore.from_params(
        connection_string=_database_url("postgresql+psycopg2"),
        async_connection_string=_database_url("postgresql+asyncpg"),
        table_name="llama_chunks",
        hybrid_search=True,
        embed_dim=given.chunk_vectors.shape[1],
    )
    store.clear()
    store.add(
        [
            TextNode(id_=str(number), text=text, embedding=vector.tolist())
            for number, (text, vector) in enumerate(zip(given.chunks, given.chunk_vectors, strict=True))
        ]
    )

    def ask(number: int) -> list[int]:
        found = store.query(
            VectorStoreQuery(
                query_str=given.questions[number],
                query_embedding=given.question_vectors[number].tolist(),
                similarity_top_k=given.limit,
                mode=VectorStoreQueryMode.HYBRID,
            )
        )
        return [int(name) for name in found.ids]

    return ask


def txtai(given: Input) -> Ask:
    """Hybrid as its documentation sets it up: BM25 and vectors at equal weights."""
    from txtai import Embeddings

    by_text = _by_text(given)

    def transform(texts: list[str]) -> np.ndarray:
        return np.array([by_text[text] for text in texts], dtype=np.float32)

    index = Embeddings({"method": "external", "transform": transform, "hybrid": True})
    index.index([(number, text, None) for number, text in enumerate(given.chunks)])

    def ask(number: int) -> list[int]:
        return [int(name) for name, _ in index.search(given.questions[number], given.limit)]

    return ask


def _by_text(given: Input) -> dict[str, np.ndarray]:
    return dict(zip(given.chunks, given.chunk_vectors, strict=True)) | dict(
        zip(given.questions, given.question_vectors, strict=True)
    )


def _database_url(driver: str) -> str:
    return os.environ["PEER_DATABASE_URL"].replace("postgresql", driver, 1)


PEERS: dict[str, Callable[[Input], Ask]] = {
    "bm25s_as_shipped": bm25s_as_shipped,
    "bm25s_stemmed": bm25s_stemmed,
    "langchain_as_shipped": langchain_as_shipped,
    "langchain_helped": langchain_helped,
    "llama_index": llama_index,
    "txtai": txtai,
}


def main() -> None:
    name, folder, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    collection = json.loads((folder / "collection.json").read_text(encoding="utf-8"))
    given = Input(
        chunks=collection["chunks"],
        questions=collection["questions"],
        chunk_vectors=np.load(folder / "chunks.npy"),
        question_vectors=np.load(folder / "questions.npy"),
        language=collection["language"],
        limit=limit,
    )
    ask = PEERS[name](given)
    found: list[list[int] | None] = []
    error = None
    for number in range(len(given.questions)):
        try:
            found.append(ask(number)[:limit])
        except Exception as raised:  # noqa: BLE001 (whatever a peer raises at a question is its answer)
            found.append(None)
            error = f"{type(raised).__name__}: {raised}"
    (folder / "ranking.json").write_text(json.dumps({"found": found, "error": error}), encoding="utf-8")
    # Some leave threads with event loops behind, which would keep the process alive.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
