"""all-MiniLM-L6-v2's tokenizer: counts and numbers the word pieces that the model reads.

Needs the `local` extra. It is apart from `rag/minilm.py`, whose weights are loaded in another process.
"""

from __future__ import annotations

import functools
from pathlib import Path

from tokenizers import Tokenizer

from rag.errors import EmbeddingInvalid
from rag.minilm import MAX_PIECES, NAME, TOKENIZER, check_file

# A chunk is counted as it is cut, as it is stored with its prefix, and read once more to be embedded. Beyond a chunk's
# length hardly anything comes twice.
REMEMBERED_TEXTS = 256
REMEMBERED_CHARACTERS = 2_048


class WordPieces:
    """The tokenizer. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        """Load `tokenizer.json`. Raises EmbeddingUnavailable when it is missing or is not the one that was pinned."""
        check_file(folder, TOKENIZER)
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        # The file cuts and pads at 128 pieces.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self._separator = self._tokenizer.encode("").ids[-1]
        self._remembered = functools.lru_cache(REMEMBERED_TEXTS)(self._read)

    def count(self, text: str) -> int:
        """Word pieces of a text, [CLS] and [SEP] included; what the vocabulary lacks counts as bytes / 3.

        A run of more than 100 letters is one unknown piece to the model, although it may fill a page:
        counted as one, it would swell chunks and prompts without end.
        """
        ids, more = self._look_up(text)
        return len(ids) + more

    def ids(self, text: str, *, cut: bool) -> list[int]:
        """Ids of the word pieces, [CLS] and [SEP] included.

        A text of more than `MAX_PIECES` is cut as the original does it when `cut`; else EmbeddingInvalid.
        """
        ids, _ = self._look_up(text)
        if len(ids) <= MAX_PIECES:
            return ids
        if not cut:
            raise EmbeddingInvalid(f"a text of {len(ids)} word pieces exceeds {NAME}'s limit of {MAX_PIECES}")
        return [*ids[: MAX_PIECES - 1], self._separator]

    def _look_up(self, text: str) -> tuple[list[int], int]:
        return self._remembered(text) if len(text) <= REMEMBERED_CHARACTERS else self._read(text)

    def _read(self, text: str) -> tuple[list[int], int]:
        """The ids, and what is to be added to their number for what the vocabulary lacks."""
        encoded = self._tokenizer.encode(text)
        ids: list[int] = encoded.ids
        more = 0
        if self._unknown in ids:
            for piece, (start, end) in zip(ids, encoded.offsets, strict=True):
                if piece == self._unknown:
                    more += (len(text[start:end].encode(errors="replace")) - 1) // 3
        return ids, more
