"""Counts tokens for chunks and prompts, with the best counter that is at hand without a download."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tiktoken

# tiktoken's own address and digest of each encoding (tiktoken_ext/openai_public.py). A cached file with
# another digest is deleted and downloaded again, so presence alone is not enough to be safe from that.
ENCODING_FILES = {
    "cl100k_base": (
        "https://openaipublic.blob.core.windows.net/encodings/cl100k_base.tiktoken",
        "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7",
    ),
}
# Of the encodings the one of OpenAI's embedding models; Llama 3's vocabulary grew out of it.
DEFAULT_ENCODING = "cl100k_base"


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """A way to count, with the name that is stored beside its counts (`rag_chunks.token_counter`)."""

    name: str
    count: Callable[[str], int]


def estimate_tokens(text: str) -> int:
    """A third of the UTF-8 bytes, rounded up: safe for prose in any script.

    Digits, hexadecimal and emoji may hold up to three times as many tokens (DESIGN.md section 5).
    """
    # A lone surrogate is no UTF-8, and a count is no place to refuse it.
    return -(-len(text.encode(errors="surrogatepass")) // 3)


ESTIMATE = TokenCounter("bytes/3", estimate_tokens)


def tiktoken_counter(encoding: str = DEFAULT_ENCODING) -> TokenCounter | None:
    """Count with tiktoken if its file for `encoding` is in the cache, intact; else None.

    Never downloads: tiktoken would, without a timeout.
    """
    url, sha256 = ENCODING_FILES[encoding]
    cached = _cache_file(url)
    try:
        if cached is None or hashlib.sha256(cached.read_bytes()).hexdigest() != sha256:
            return None
    except OSError:
        return None
    encode = tiktoken.get_encoding(encoding).encode_ordinary
    return TokenCounter(f"tiktoken/{encoding}", lambda text: len(encode(text)))


def open_counter(fallback: TokenCounter = ESTIMATE) -> TokenCounter:
    """The counter for prompts: tiktoken when cached, else `fallback`, the embedding model's own tokenizer."""
    return tiktoken_counter() or fallback


def _cache_file(url: str) -> Path | None:
    """Where tiktoken keeps a file; None when the environment turns its cache off."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if folder is None:
        folder = str(Path(tempfile.gettempdir()) / "data-gym-cache")
    if not folder:
        return None
    return Path(folder) / hashlib.sha1(url.encode(), usedforsecurity=False).hexdigest()
