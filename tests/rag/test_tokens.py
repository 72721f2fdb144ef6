"""Counting tokens without a download."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public

from rag import tokens
from rag.tokens import ESTIMATE, TokenCounter, estimate_tokens, open_counter, tiktoken_counter


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 1),
        ("abc", 1),
        ("abcd", 2),
        ("да", 2),  # 2 letters of 2 bytes
        ("東京都", 3),  # 3 of 3 bytes
        ("🙂", 2),  # 1 of 4 bytes
        ("\ud800", 1),  # half a surrogate pair, 3 bytes
    ],
)
def test_the_estimate_is_a_third_of_the_bytes_rounded_up(text: str, expected: int) -> None:
    assert estimate_tokens(text) == expected


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("tiktoken was about to download")

    monkeypatch.setattr("tiktoken.load.read_file", refuse)


@pytest.fixture
def tiny_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An encoding of tiktoken's with 256 bytes and one merge, "ab"; returns where its cached file belongs."""
    url = "https://example.invalid/tiny.tiktoken"
    ranks = [*(bytes([byte]) for byte in range(256)), b"ab"]
    content = b"".join(base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(ranks))
    digest = hashlib.sha256(content).hexdigest()

    def construct() -> dict[str, Any]:
        merges = tiktoken.load.load_tiktoken_bpe(url, expected_hash=digest)
        return {"name": "tiny", "pat_str": r"\S+|\s+", "mergeable_ranks": merges, "special_tokens": {}}

    tiktoken.list_encoding_names()  # so that the table of constructors exists
    monkeypatch.setattr(
        "tiktoken.registry.ENCODING_CONSTRUCTORS",
        {**(tiktoken.registry.ENCODING_CONSTRUCTORS or {}), "tiny": construct},
    )
    monkeypatch.setattr("tiktoken.registry.ENCODINGS", {})
    monkeypatch.setitem(tokens.ENCODING_FILES, "tiny", (url, digest))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    cached = tmp_path / hashlib.sha1(url.encode()).hexdigest()
    cached.write_bytes(content)
    return cached


@pytest.mark.usefixtures("tiny_encoding", "no_network")
def test_a_cached_encoding_counts() -> None:
    counter = tiktoken_counter("tiny")
    assert counter is not None
    assert counter.name == "tiktoken/tiny"
    assert counter.count("abab c") == 4  # ab, ab, space, c
    assert counter.count("<|endoftext|>") == 13  # no special tokens: it is a text like any other


@pytest.mark.usefixtures("no_network")
def test_a_missing_file_means_no_counter_and_no_download(tiny_encoding: Path) -> None:
    tiny_encoding.unlink()
    assert tiktoken_counter("tiny") is None


@pytest.mark.usefixtures("no_network")
def test_a_damaged_file_means_no_counter_and_no_download(tiny_encoding: Path) -> None:
    tiny_encoding.write_bytes(tiny_encoding.read_bytes()[:-1])
    assert tiktoken_counter("tiny") is None
    assert tiny_encoding.exists()


@pytest.mark.usefixtures("tiny_encoding", "no_network")
def test_a_cache_that_is_turned_off_means_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    assert tiktoken_counter("tiny") is None


@pytest.mark.usefixtures("no_network")
def test_the_cache_is_looked_for_where_tiktoken_looks(tiny_encoding: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(tiny_encoding.parent))
    assert tiktoken_counter("tiny") is not None
    monkeypatch.delenv("DATA_GYM_CACHE_DIR")
    monkeypatch.setattr("tempfile.tempdir", str(tiny_encoding.parent / "tmp"))
    assert tiktoken_counter("tiny") is None
    (tiny_encoding.parent / "tmp" / "data-gym-cache").mkdir(parents=True)
    tiny_encoding.rename(tiny_encoding.parent / "tmp" / "data-gym-cache" / tiny_encoding.name)
    assert tiktoken_counter("tiny") is not None


def test_addresses_and_digests_are_those_of_the_installed_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def record(url: str, expected_hash: str) -> dict[bytes, int]:
        asked.append((url, expected_hash))
        return {}

    monkeypatch.setattr(tiktoken_ext.openai_public, "load_tiktoken_bpe", record)
    for name, expected in tokens.ENCODING_FILES.items():
        tiktoken_ext.openai_public.ENCODING_CONSTRUCTORS[name]()
        assert asked.pop() == expected


@pytest.mark.usefixtures("no_network")
def test_prompts_are_counted_by_the_best_counter_at_hand(monkeypatch: pytest.MonkeyPatch, tiny_encoding: Path) -> None:
    own = TokenCounter("minilm-wordpiece", len)
    assert open_counter().name == "bytes/3"
    assert open_counter() is ESTIMATE
    assert open_counter(own) is own
    monkeypatch.setitem(tokens.ENCODING_FILES, "cl100k_base", tokens.ENCODING_FILES["tiny"])
    monkeypatch.setitem(
        tiktoken.registry.ENCODING_CONSTRUCTORS,
        "cl100k_base",
        tiktoken.registry.ENCODING_CONSTRUCTORS["tiny"],
    )
    assert open_counter(own).name == "tiktoken/cl100k_base"
