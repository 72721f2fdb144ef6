"""Corpora for the speed bench: skewed over scopes, Zipfian in words, clustered in vectors, the same for a seed.

Nothing runs by itself; `speed.py` loads what is made here. Content is a function of the seed and of a scope's own
number, size and place, and of nothing else: scopes of fixed size hold the same rows in corpora of every size.

A chunk has about 100 words, 90 distinct: common ones by Zipf's law, those of its document's topic, and a few of
the document alone. Its vector is the topic's centre, moved by the document and again by the chunk. Chunks of all
scopes lie mixed in the table, as they come when many people write.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from rag.principal import Principal

DIMENSIONS = 512
MODEL = "bench-512"
LANGUAGE = "en"

VOCABULARY = 50_000
# Zipf and Mandelbrot: the word of rank r has a probability in proportion to 1/(r + SHIFT). At 25 the most common
# word is in about a quarter of all chunks, as in English once its stop words are gone.
SHIFT = 25
TOPICS = 300
TOPIC_WORDS = 300
DOCUMENT_WORDS = 5
TOPIC_SHARE, DOCUMENT_SHARE = 0.30, 0.08  # of a chunk's words; the others are common ones
WORDS_PER_CHUNK = (80, 125)

DOCUMENT_CHUNKS = 8
# In 512 independent directions all neighbours are equally far, and none is meaningful. Like vectors of text,
# these vary in a few dozen directions, in some more than in others; SPREAD holds lengths relative to the centre's.
LATENT = 48
SPREAD_DOCUMENT, SPREAD_CHUNK, SPREAD_REST = 0.55, 0.55, 0.15

WAVES = 16  # parts in which a corpus is made and loaded, each with a share of every scope

SMALL_SCOPES = 240
SMALLEST, LARGEST = 20, 20_000  # chunks

Integers = NDArray[np.int64]
Words = NDArray[np.int32]
Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """An access class: `number` seeds its content, `access_id` is what the database calls it."""

    number: int
    access_id: int
    tenant_id: str
    scope: str
    user_id: int | None
    project_id: str | None
    chunks: int

    @property
    def documents(self) -> int:
        return -(-self.chunks // DOCUMENT_CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A principal to ask as, and the scopes whose rows it sees."""

    name: str
    principal: Principal
    scopes: tuple[Scope, ...]
    fixed: bool
    """Whether it sees the same rows in corpora of every size."""

    @property
    def visible(self) -> int:
        return sum(scope.chunks for scope in self.scopes)


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """Rows of one scope or of several, in one order: `tokens` holds all their words one after the other."""

    access_ids: Integers
    ids: NDArray[np.uint8]
    """Shape (chunks, 16): UUIDs."""
    document_ids: NDArray[np.uint8]
    places: Integers
    """chunk_index within the document."""
    lengths: Integers
    tokens: Words
    vectors: NDArray[np.float16]

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ends(self) -> Integers:
        """Where each row's words end in `tokens`."""
        return np.cumsum(self.lengths)

    def words(self, row: int) -> Words:
        end = int(self.ends[row])
        return self.tokens[end - int(self.lengths[row]) : end]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked. Without words: a vector that has nothing to do with any chunk."""

    kind: str
    text: str
    words: tuple[int, ...]
    vector: Vectors


def joined(parts: list[Chunks]) -> Chunks:
    """Several blocks of rows as one."""
    return Chunks(
        access_ids=np.concatenate([part.access_ids for part in parts]),
        ids=np.concatenate([part.ids for part in parts]),
        document_ids=np.concatenate([part.document_ids for part in parts]),
        places=np.concatenate([part.places for part in parts]),
        lengths=np.concatenate([part.lengths for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        vectors=np.concatenate([part.vectors for part in parts]),
    )


def vocabulary() -> list[str]:
    """Words by rank, the most common first: syllables, all ending in a, o or u.

    No English suffix and no stop word ends so, so that the English stemmer leaves them as they are.
    """
    consonants, vowels, last = "bdfgklmnprstvz", "aeiou", "aou"
    opening = [first + second for first in consonants for second in vowels]
    closing = [first + second for first in consonants for second in last]
    short = [first + second for first in opening for second in closing]
    long = ["".join(parts) for parts in itertools.product(opening, opening, closing)]
    order = np.random.default_rng(0)
    order.shuffle(short)
    order.shuffle(long)
    return (short[:1000] + long)[:VOCABULARY]


def _zipf(words: int, shift: float) -> NDArray[np.float64]:
    """Cumulated probabilities of ranks 1 to `words`."""
    weights = 1.0 / (np.arange(1, words + 1) + shift)
    cumulated: NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    return cumulated


def _uuids(numbers: np.random.Generator, count: int) -> NDArray[np.uint8]:
    """Version 4, as the server makes them."""
    raw = numbers.integers(0, 256, (count, 16), dtype=np.uint8)
    raw[:, 6] = raw[:, 6] & 0x0F | 0x40
    raw[:, 8] = raw[:, 8] & 0x3F | 0x80
    return raw


def _unit(vectors: NDArray[np.float32]) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    scaled: Vectors = (vectors / lengths).astype(np.float32)
    return scaled


class Corpus:
    """`chunks` rows in scopes of several tenants: one project has 20 % of them, what one tenant has public 10 %."""

    def __init__(self, *, chunks: int, seed: int) -> None:
        self.chunks = chunks
        self.seed = seed
        self.words = vocabulary()
        numbers = np.random.default_rng([seed, 1])
        self._common = _zipf(VOCABULARY, SHIFT)
        self._in_topic = _zipf(TOPIC_WORDS, 3)
        # Words of a topic are rarer than the common ones, and several topics may share one.
        self._topic_words = numbers.integers(200, VOCABULARY, (TOPICS, TOPIC_WORDS)).astype(np.int32)
        self._centres = _unit(numbers.standard_normal((TOPICS, DIMENSIONS), dtype=np.float32))
        directions = np.linalg.qr(numbers.standard_normal((DIMENSIONS, LATENT)))[0].T
        strengths = np.arange(1, LATENT + 1) ** -0.5
        # Of length 1 in the mean.
        self._directions = (directions * (strengths / np.linalg.norm(strengths))[:, None]).astype(np.float32)
        self.scopes, self.readers = self._people()

    def _people(self) -> tuple[list[Scope], list[Reader]]:
        scopes: list[Scope] = []

        def add(tenant: str, scope: str, user: int | None, project: str | None, chunks: int, number: int) -> Scope:
            digest = hashlib.blake2b(f"{self.seed} {number}".encode(), digest_size=7).digest()
            scopes.append(
                Scope(
                    number=number,
                    access_id=int.from_bytes(digest),  # opaque, as the database makes it
                    tenant_id=tenant,
                    scope=scope,
                    user_id=user,
                    project_id=project,
                    chunks=chunks,
                )
            )
            return scopes[-1]

        def reader(name: str, tenant: str, user: int, held: list[Scope], *, fixed: bool) -> Reader:
            principal = Principal(tenant_id=tenant, user_id=user, project_id="*")
            return Reader(name=name, principal=principal, scopes=tuple(held), fixed=fixed)

        # Their tenant has nothing public: what they see depends on no size.
        small = [add("east", "user", 1, None, 300, 1), add("east", "project", 1, "a", 200, 2)]
        medium = [add("east", "user", 2, None, 600, 3)]
        medium += [add("east", "project", 2, f"p{index}", 200, 4 + index) for index in range(12)]
        large = [
            add("east", "user", 3, None, 2000, 20),
            add("east", "project", 3, "y", 4000, 21),
            add("east", "project", 3, "x", 9000, 22),
        ]
        public = [
            add("north", "user", 1, None, 300, 30),
            add("north", "public", None, None, self.chunks // 10, 31),
        ]
        biggest = [
            add("south", "user", 1, None, 300, 40),
            add("south", "project", 1, "big", self.chunks // 5, 41),
        ]
        readers = [
            reader("500", "east", 1, small, fixed=True),
            reader("3,000", "east", 2, medium, fixed=True),
            reader("15,000", "east", 3, large, fixed=True),
            reader("10 %", "north", 1, public, fixed=False),
            reader("20 %", "south", 1, biggest, fixed=False),
        ]
        rest = self.chunks - sum(scope.chunks for scope in scopes)
        for index, size in enumerate(_sizes(rest)):
            tenant = ("north", "south", "east", "west", "centre")[index % 5]
            project = None if index % 3 == 0 else f"q{index}"
            add(tenant, "user" if project is None else "project", 100 + index // 2, project, size, 100 + index)
        return scopes, readers

    # --- rows ------------------------------------------------------------------------------------

    def _latent(self, numbers: np.random.Generator, count: int) -> Vectors:
        moved: Vectors = numbers.standard_normal((count, LATENT), dtype=np.float32) @ self._directions
        return moved

    def block(self, scope: Scope, wave: int) -> Chunks | None:
        """The rows of a scope in one of the WAVES; None when it has none there."""
        first = (wave - scope.number) % WAVES
        documents = np.arange(first, scope.documents, WAVES)
        if not len(documents):
            return None
        numbers = np.random.default_rng([self.seed, 2, scope.number, wave])
        topics = self._topics(scope)
        topic = topics[np.searchsorted(_zipf(len(topics), 1), numbers.random(len(documents)))]
        own_words = numbers.integers(1000, VOCABULARY, (len(documents), DOCUMENT_WORDS))
        document_ids = _uuids(numbers, len(documents))
        document_move = self._latent(numbers, len(documents))

        sizes = np.minimum(DOCUMENT_CHUNKS, scope.chunks - documents * DOCUMENT_CHUNKS)
        of = np.repeat(np.arange(len(documents)), sizes)
        count = len(of)
        places = np.concatenate([np.arange(size) for size in sizes])
        lengths = numbers.integers(*WORDS_PER_CHUNK, count)
        total = int(lengths.sum())
        of_token = np.repeat(of, lengths)
        kind = numbers.random(total)
        common = np.searchsorted(self._common, numbers.random(total))
        in_topic = self._topic_words[topic[of_token], np.searchsorted(self._in_topic, numbers.random(total))]
        own = own_words[of_token, numbers.integers(0, DOCUMENT_WORDS, total)]
        tokens = np.where(
            kind < DOCUMENT_SHARE, own, np.where(kind < DOCUMENT_SHARE + TOPIC_SHARE, in_topic, common)
        ).astype(np.int32)
        rest = numbers.standard_normal((count, DIMENSIONS), dtype=np.float32)
        vectors = (
            self._centres[topic[of]]
            + SPREAD_DOCUMENT * document_move[of]
            + SPREAD_CHUNK * self._latent(numbers, count)
            + rest * np.float32(SPREAD_REST / DIMENSIONS**0.5)
        )
        return Chunks(
            access_ids=np.full(count, scope.access_id, dtype=np.int64),
            ids=_uuids(numbers, count),
            document_ids=document_ids[of],
            places=places,
            lengths=lengths,
            tokens=tokens,
            vectors=_unit(vectors).astype(np.float16),
        )

    def _topics(self, scope: Scope) -> Integers:
        """What people of a scope write about, the most frequent first."""
        numbers = np.random.default_rng([self.seed, 3, scope.number])
        chosen: Integers = numbers.choice(TOPICS, min(100, 4 + scope.chunks // 200), replace=False)
        return chosen

    def rows(self, scopes: tuple[Scope, ...]) -> Chunks:
        """All rows of these scopes."""
        blocks = [self.block(scope, wave) for scope in scopes for wave in range(WAVES)]
        return joined([block for block in blocks if block is not None])

    def wave(self, wave: int) -> Chunks:
        """A part of the corpus, its documents in random order."""
        blocks = [self.block(scope, wave) for scope in self.scopes]
        whole = joined([block for block in blocks if block is not None])
        starts = np.flatnonzero(whole.places == 0)
        stops = np.append(starts[1:], len(whole))
        order = np.random.default_rng([self.seed, 4, wave]).permutation(len(starts))
        picked = np.concatenate([np.arange(starts[index], stops[index]) for index in order])
        ends = whole.ends
        begins = ends - whole.lengths
        return Chunks(
            access_ids=whole.access_ids[picked],
            ids=whole.ids[picked],
            document_ids=whole.document_ids[picked],
            places=whole.places[picked],
            lengths=whole.lengths[picked],
            tokens=np.concatenate([whole.tokens[begins[row] : ends[row]] for row in picked]),
            vectors=whole.vectors[picked],
        )

    # --- questions -------------------------------------------------------------------------------

    def questions(self, reader: Reader, rows: Chunks, *, count: int) -> list[Question]:
        """`count` of kind `near`, and a third of it each of `random` and `common`.

        near: 3 to 8 words of a visible chunk, up to two of them common, and a vector near the chunk's. random: no
        words, a vector that has nothing to do with the corpus. common: words of the first 30 ranks alone.
        """
        numbers = np.random.default_rng([self.seed, 5, *reader.name.encode()])
        return [
            *(self._near(numbers, rows) for _ in range(count)),
            *(self._uncorrelated(numbers) for _ in range(-(-count // 3))),
            *(self._common_words(numbers, rows) for _ in range(-(-count // 3))),
        ]

    def _question(self, kind: str, words: list[int], vector: Vectors) -> Question:
        text = " ".join(self.words[word] for word in words)
        return Question(kind=kind, text=text, words=tuple(words), vector=_unit(vector))

    def _near(self, numbers: np.random.Generator, rows: Chunks) -> Question:
        row = int(numbers.integers(len(rows)))
        present = np.unique(rows.words(row))
        common, rare = present[present < 200], present[present >= 200]
        chosen = [
            *numbers.choice(rare, min(len(rare), int(numbers.integers(2, 7))), replace=False).tolist(),
            *numbers.choice(common, min(len(common), int(numbers.integers(1, 3))), replace=False).tolist(),
        ]
        return self._question("near", chosen, self._vector_near(numbers, rows, row))

    def _vector_near(self, numbers: np.random.Generator, rows: Chunks, row: int) -> Vectors:
        rest = numbers.standard_normal(DIMENSIONS, dtype=np.float32) * np.float32(0.4 / DIMENSIONS**0.5)
        near: Vectors = rows.vectors[row].astype(np.float32) + 0.4 * self._latent(numbers, 1)[0] + rest
        return near

    def _uncorrelated(self, numbers: np.random.Generator) -> Question:
        return self._question("random", [], numbers.standard_normal(DIMENSIONS, dtype=np.float32))

    def _common_words(self, numbers: np.random.Generator, rows: Chunks) -> Question:
        words = numbers.choice(30, int(numbers.integers(3, 6)), replace=False).tolist()
        return self._question("common", words, self._vector_near(numbers, rows, int(numbers.integers(len(rows)))))

    # --- for COPY --------------------------------------------------------------------------------

    @cached_property
    def _spelled(self) -> list[bytes]:
        return [word.encode("ascii") for word in self.words]

    @cached_property
    def _lexemes(self) -> list[bytes]:
        return [word + b"\0" for word in self._spelled]

    def copied(self, rows: Chunks, tenants: dict[int, str]) -> Iterator[bytes]:
        """Lines of `copy … from stdin (format binary)`, the columns being those of CHUNK_COLUMNS.

        `tenants`: of each access_id. tsvectors are built here, since parsing 90 words takes the server 0.3 ms.
        """
        vectors = rows.vectors.astype(">f2")
        ids, documents = rows.ids.tobytes(), rows.document_ids.tobytes()
        tokens = rows.tokens.tolist()
        spelled, lexemes = self._spelled, self._lexemes
        start = 0
        columns = zip(rows.access_ids.tolist(), rows.places.tolist(), rows.lengths.tolist(), strict=True)
        for row, (access_id, place, length) in enumerate(columns):
            words = tokens[start : start + length]
            start += length
            text = b" ".join([spelled[word] for word in words])
            positions: dict[int, bytes] = {}
            for position, word in enumerate(words, 1):
                positions[word] = positions.get(word, b"") + _POSITION[position]
            entries = [lexemes[word] + _POSITION[len(found) // 2] + found for word, found in positions.items()]
            yield _ROW.pack(len(CHUNK_COLUMNS)) + b"".join(
                [
                    *_field(tenants[access_id].encode()),
                    *_field(ids[16 * row : 16 * row + 16]),
                    *_field(access_id.to_bytes(8)),
                    *_field(documents[16 * row : 16 * row + 16]),
                    *_field(place.to_bytes(4)),
                    *_field(text),
                    *_field(b"generated"),
                    *_field((length * 2).to_bytes(4)),
                    *_field(b"two a word"),
                    *_field((0).to_bytes(4)),
                    *_field(len(text).to_bytes(4)),
                    *_field(_VECTOR.pack(DIMENSIONS, 0) + vectors[row].tobytes()),
                    *_field(MODEL.encode()),
                    *_field(len(entries).to_bytes(4) + b"".join(entries)),
                    *_field(length.to_bytes(4)),
                    *_field(LANGUAGE.encode()),
                ]
            )


COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
COPY_TRAILER = b"\xff\xff"
CHUNK_COLUMNS = (
    *("tenant_id", "id", "access_id", "document_id", "chunk_index", "chunk_text", "chunk_hash", "token_count"),
    *("token_counter", "start_offset", "end_offset", "embedding", "embedding_model", "tsv", "lexeme_count", "language"),
)
_ROW = struct.Struct("!h")
_VECTOR = struct.Struct("!hh")
_POSITION = [position.to_bytes(2) for position in range(WORDS_PER_CHUNK[1] + 1)]


def _field(value: bytes) -> tuple[bytes, bytes]:
    return len(value).to_bytes(4), value


def _sizes(total: int) -> list[int]:
    """SMALL_SCOPES sizes of this sum, in equal ratios from SMALLEST up to LARGEST, or less where that is too much."""
    steps = np.linspace(0, 1, SMALL_SCOPES)
    if total < SMALL_SCOPES * SMALLEST:
        raise ValueError(f"{total} chunks are too few for {SMALL_SCOPES} scopes of {SMALLEST}")
    # The largest one that fits, by halving the interval.
    low, high = float(SMALLEST), float(LARGEST)
    for _ in range(60):
        middle = (low + high) / 2
        if (SMALLEST * (middle / SMALLEST) ** steps).sum() > total:
            high = middle
        else:
            low = middle
    sizes = (SMALLEST * (low / SMALLEST) ** steps).astype(np.int64)
    # What rounding and the bound leave is spread evenly.
    missing = total - int(sizes.sum())
    sizes += missing // SMALL_SCOPES
    sizes[: missing % SMALL_SCOPES] += 1
    assert int(sizes.sum()) == total
    return [int(size) for size in sizes]


def uuid_of(raw: NDArray[np.uint8]) -> UUID:
    return UUID(bytes=raw.tobytes())
