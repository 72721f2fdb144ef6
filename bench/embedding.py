"""How fast the local model embeds: one thread against one per processor, over the chunks of the sample corpus.

Run: `make bench`. Arms are interleaved, figures are medians; ratios hold where the machine's speed drifts.
All arms must return the same vectors, or this fails.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import yaml

from rag import chunk, parse
from rag.embed import LocalEmbedder, share_out
from rag.minilm import MAX_PIECES, WIDTH, MiniLM, installed_folder
from rag.resources import sample_folder
from rag.settings import Settings
from rag.word_pieces import WordPieces

ROUNDS = 5
TOLERANCE = 1e-5  # float32, summed in another order when texts are batched otherwise
RESULT = Path(__file__).parent / "results" / "embedding.md"


def sample_texts(word_pieces: WordPieces) -> list[str]:
    manifest = yaml.safe_load((sample_folder() / "corpus.yaml").read_text(encoding="utf-8"))
    texts = []
    for entry in manifest["documents"]:
        document = parse.parse(
            (sample_folder() / entry["path"]).read_bytes(), name=entry["path"], max_bytes=8 * 1024 * 1024
        )
        pieces = chunk.split(document, limit_tokens=MAX_PIECES, count=word_pieces.count)
        texts += [piece.embedded_text for piece in pieces]
    return texts


def main() -> None:
    folder = installed_folder()
    if folder is None:
        sys.exit("the local model is not installed")
    model, word_pieces = MiniLM(folder), WordPieces(folder)
    processors = len(os.sched_getaffinity(0))
    texts = sample_texts(word_pieces)
    pieces = [word_pieces.ids(text, cut=False) for text in texts]
    lengths = [len(ids) for ids in pieces]

    def batched(threads: int) -> np.ndarray:
        found = np.empty((len(pieces), WIDTH), dtype=np.float32)

        def run(batch: list[int]) -> None:
            found[batch] = model.embed([pieces[index] for index in batch])

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(run, share_out(lengths, workers=threads)))
        return found

    def singly() -> np.ndarray:
        return np.concatenate([model.embed([ids]) for ids in pieces])

    async def shipped() -> np.ndarray:
        embedder = LocalEmbedder(Settings(_env_file=None))
        vectors = await embedder.embed(texts, purpose="document")
        await embedder.close()
        return np.array(vectors, dtype=np.float32)[:, :WIDTH]

    arms: dict[str, Callable[[], np.ndarray]] = {
        "one text after the other": singly,
        "batches, one thread": lambda: batched(1),
        f"batches, {processors} threads": lambda: batched(processors),
        "as shipped, tokenizing and checks included": lambda: asyncio.run(shipped()),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    expected = singly()
    for number in range(ROUNDS + 1):
        for name, arm in arms.items():
            started = time.perf_counter()
            found = arm()
            elapsed = time.perf_counter() - started
            if np.abs(found - expected).max() > TOLERANCE:
                sys.exit(f"{name}: other vectors than one text after the other")
            if number:  # the first round warms up
                times[name].append(elapsed)

    base = statistics.median(times["batches, one thread"])
    lines = [
        "# Local embeddings",
        "",
        f"{datetime.date.today().isoformat()}, {processors} processors, {platform.machine()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}; "
        f"{len(texts)} chunks, {sum(lengths):,} word pieces, median of {ROUNDS} interleaved rounds.",
        "",
        "| Arm | s | chunks/s | against batches on one thread |",
        "|---|---|---|---|",
    ]
    for name, values in times.items():
        median = statistics.median(values)
        lines.append(f"| {name} | {median:.2f} | {len(texts) / median:.0f} | {median / base:.2f} |")
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
