"""all-MiniLM-L6-v2 on numpy, against what torch makes of the same weights."""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rag import minilm
from rag.embed import open_embedder
from rag.errors import EmbeddingInvalid, EmbeddingUnavailable
from rag.minilm import MiniLM, check_file, installed_folder
from rag.settings import Settings
from rag.word_pieces import REMEMBERED_CHARACTERS, WordPieces

# Recorded with torch 2.13.0 and transformers 5.23.0 (BertModel, mean over all tokens, L2 norm): number of
# word pieces that were read, and the first 8 of 384 components.
REFERENCE = {
    "What is the capital of France?": (
        9,
        [0.0820482, 0.0360555, -0.0038929, -0.0048811, 0.0256512, -0.0571434, 0.0121916, 0.0046789],
    ),
    "Paris is the capital of France.": (
        9,
        [0.1007048, 0.0371528, 0.0282255, -0.0416677, 0.0671917, -0.0477356, 0.0093689, -0.0108114],
    ),
    "A": (3, [-0.0364329, 0.0347035, -0.0459598, 0.0343256, -0.0808234, 0.0328386, 0.1169756, -0.0233093]),
    "Привет, как дела?": (
        17,
        [-0.0296392, 0.0768656, 0.0489588, -0.0282675, -0.0668707, 0.0069508, 0.0760759, -0.0099045],
    ),
    "naïve café — “quoted” ½": (
        9,
        [-0.0359134, 0.031131, 0.0052944, 0.0463829, 0.0250644, 0.012584, 0.0752564, 0.0053755],
    ),
    "def f(x: int) -> int:\n    return x + 1": (
        17,
        [0.0098123, 0.0832362, 0.0130459, -0.0214909, -0.0374018, -0.0548913, 0.0762733, -0.0080988],
    ),
    "lighthouse keeper " * 30: (
        62,
        [0.0200701, -0.0103823, 0.0047992, 0.0343858, 0.0230372, 0.0461083, 0.0907473, -0.0709621],
    ),
    "a b c " * 400: (  # 1,202 word pieces, cut to 256
        256,
        [-0.0635166, -0.042239, -0.0344517, -0.0233131, -0.1225874, -0.0628892, -0.0345888, -0.0157295],
    ),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    found = installed_folder()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> MiniLM:
    return MiniLM(folder)


@pytest.fixture(scope="module")
def word_pieces(folder: Path) -> WordPieces:
    return WordPieces(folder)


@pytest.fixture(scope="module")
def batch(word_pieces: WordPieces) -> list[list[int]]:
    return [word_pieces.ids(text, cut=True) for text in REFERENCE]


@pytest.mark.parametrize("text", REFERENCE)
def test_vectors_agree_with_torch(model: MiniLM, word_pieces: WordPieces, text: str) -> None:
    length, components = REFERENCE[text]
    pieces = word_pieces.ids(text, cut=True)
    assert len(pieces) == length
    assert model.embed([pieces])[0, :8] == pytest.approx(components, abs=1e-6)


def test_texts_of_a_batch_do_not_touch_each_other(model: MiniLM, batch: list[list[int]]) -> None:
    together = model.embed(batch)
    assert together.shape == (8, 384)
    for row, ids in zip(together, batch, strict=True):
        assert row == pytest.approx(model.embed([ids])[0], abs=1e-6)


def test_vectors_have_unit_length(model: MiniLM, batch: list[list[int]]) -> None:
    vectors = model.embed(batch)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(8), abs=1e-6)


def test_threads_may_share_the_model(model: MiniLM, batch: list[list[int]]) -> None:
    alone = model.embed(batch)
    with ThreadPoolExecutor(4) as pool:
        for vectors in pool.map(model.embed, [batch] * 8):
            assert np.array_equal(vectors, alone)


def test_gelu_is_exact_to_float32() -> None:
    values = np.linspace(-12, 12, 20_001, dtype=np.float32).reshape(1, -1)
    exact = [value * (1 + math.erf(value / math.sqrt(2))) for value in values[0].tolist()]
    minilm._twice_gelu(values, np.float32(0) * values[0])
    # Of twice gelu; at 12 the neighbouring float32 of 24 is 1.9e-6 away.
    assert np.abs(values[0] - exact).max() < 1.2e-6


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 2),  # [CLS] [SEP]
        ("Hello wörld", 4),
        ("x" * 100, 52),
        ("x" * 102, 36),  # no word to the model: one unknown piece, 34 × 3 bytes
        ("a 🙂 b", 6),  # 4 bytes of an unknown sign count as 2
    ],
)
def test_unknown_words_count_by_their_bytes(word_pieces: WordPieces, text: str, tokens: int) -> None:
    assert word_pieces.count(text) == tokens
    # It is remembered, and the same.
    assert word_pieces.count(text) == tokens
    assert len(word_pieces.ids(text, cut=False)) <= tokens


def test_a_text_is_never_cut_unasked(word_pieces: WordPieces) -> None:
    fits = "word " * 254
    assert len(word_pieces.ids(fits, cut=False)) == 256
    with pytest.raises(EmbeddingInvalid, match="257 word pieces"):
        word_pieces.ids(fits + "more", cut=False)
    assert word_pieces.ids(fits + "more", cut=True) == word_pieces.ids(fits, cut=False)


def test_what_is_remembered_of_a_text_is_what_it_reads(folder: Path, word_pieces: WordPieces) -> None:
    longer = "lighthouse keeper " * (REMEMBERED_CHARACTERS // 18 + 1)
    for text in (*REFERENCE, longer, *REFERENCE):
        fresh = WordPieces(folder)
        assert word_pieces.ids(text, cut=True) == fresh.ids(text, cut=True)
        assert word_pieces.count(text) == fresh.count(text)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(folder / name)
    return tmp_path


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_changed_file_is_refused(folder: Path, copy: Path, name: str) -> None:
    (copy / name).unlink()
    shutil.copyfile(folder / name, copy / name)
    with (copy / name).open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    with pytest.raises(EmbeddingUnavailable, match=f"{name} is not the pinned file"):
        check_file(copy, name)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_missing_or_empty_file_is_refused(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(EmbeddingUnavailable, match="cannot be read"):
        check_file(copy, name)
    (copy / name).touch()
    with pytest.raises(EmbeddingUnavailable, match="is not the pinned file"):
        check_file(copy, name)


def test_the_tokenizer_and_the_embedder_check_their_files(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "installed_folder", lambda: copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(EmbeddingUnavailable, match=r"model\.safetensors"):
        open_embedder(Settings(_env_file=None))
    (copy / "tokenizer.json").unlink()
    with pytest.raises(EmbeddingUnavailable, match=r"tokenizer\.json"):
        WordPieces(copy)


@pytest.mark.usefixtures("model")
def test_blas_keeps_to_the_thread_that_calls_it() -> None:
    libraries = list(Path(np.__file__).parent.parent.glob("numpy.libs/*openblas*"))
    if sys.platform == "linux":
        assert libraries
    for library in libraries:
        assert ctypes.CDLL(str(library)).scipy_openblas_get_num_threads64_() == 1


# In a process of its own: another test may have imported it here.
LOADING = """
import sys
from rag import minilm
minilm.MiniLM(minilm.installed_folder())
sys.exit(minilm.PACKAGE in sys.modules)
"""


@pytest.mark.usefixtures("model")
def test_the_package_of_the_weights_is_not_imported() -> None:
    assert subprocess.run([sys.executable, "-c", LOADING], check=False).returncode == 0
