"""The tests that specs 001 and 000 name, each with what its row says; `specified_tests.txt` lists them.

Named as there, and not as sentences. Integration tests run against a real database and the protocol-true fake of
Ollama alone: each asserts what is done with an answer that is known, and a model's own words are not. What the client
and the whole line do with an Ollama of one's own is in test_real_ollama.py, wherever OLLAMA_BASE_URL names one.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog

from rag import budget, cite, confidence, prompt
from rag.answer import RAGService
from rag.budget import Allocation, Limits
from rag.database import Database
from rag.direct import route_query
from rag.embed import Embedder
from rag.errors import ModelNotAllowedError, ModelUnavailableError, TokenBudgetExceededError
from rag.exchange import ChatMessage, Citation, ConfidenceScore, RAGRequest
from rag.generate import check_allowed, open_generator
from rag.principal import Principal
from rag.settings import Settings
from rag.store import halfvec
from tests.conftest import unit_vector
from tests.fakes import refusing_url
from tests.fakes.ollama import FakeOllama, Message, fake_ollama
from tests.rag.passages import document_id, passage

ANNA = Principal(tenant_id="acme", user_id=1)
OUTSIDER = Principal(tenant_id="umbrella", user_id=1)

BACKUPS = "Backups of the orders database run every night at 02:00 and are kept for 35 days."
RESTORE = "A restore of the orders database takes 50 minutes and is rehearsed each quarter."
QUESTION = "When do backups of the orders database run?"
FOREIGN = "Who painted the ceiling of the Sistine Chapel?"

# Spec 001, "ID Formats": a UUIDv4 in lower case, and the place of the chunk.
UUID4 = "[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
LABEL = re.compile(r"^\[(S\d+-[0-9a-f]{6})\]$", re.MULTILINE)

Keep = Callable[..., Awaitable[UUID]]
Open = Callable[..., RAGService]


@pytest.fixture
def keep(store: Callable[..., UUID], embedder: Embedder) -> Keep:
    """`await keep(principal, text, …)` writes a document with one chunk, embedded by the local model."""

    async def write(principal: Principal, text: str, **fields: Any) -> UUID:
        (vector,) = await embedder.embed([text], purpose="document")
        return store(principal, text, embedding=halfvec(vector), embedding_model=embedder.model_id, **fields)

    return write


@pytest.fixture
def ollama() -> Iterator[FakeOllama]:
    with fake_ollama(answer=quotes_the_first) as fake:
        yield fake


@pytest.fixture
async def opened(database: Database, embedder: Embedder, ollama: FakeOllama) -> AsyncIterator[Open]:
    """`opened(…)` is a service on this test's database and that server; keyword arguments are settings."""
    services: list[RAGService] = []

    def opens(**changes: Any) -> RAGService:
        given = {"rag_llm_provider": "ollama", "ollama_base_url": ollama.base_url} | changes
        settings = Settings(_env_file=None, **given)
        services.append(RAGService(settings, database, embedder, open_generator(settings)))
        return services[-1]

    yield opens
    for service in services:
        # The embedder is shared with other tests.
        await service.generator.close()


def labels(messages: list[Message]) -> list[str]:
    return LABEL.findall(messages[-1]["content"])


def quotes_the_first(messages: list[Message]) -> str:
    """What a good model writes: a sentence of the best source, and its label."""
    return f"{BACKUPS} [{labels(messages)[0]}]" if labels(messages) else "Hello! How can I help you?"


def chats(ollama: FakeOllama, *, forms: bool = False) -> list[dict[str, Any]]:
    """What was asked in chats; grades and other `forms` as well, or answers alone."""
    asked = [request.body for request in ollama.requests if request.path == "/api/chat"]
    return [chat for chat in asked if forms or "format" not in chat]


def words(first: int, last: int) -> str:
    return " ".join(f"w{number}" for number in range(first, last + 1))


def said(*contents: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content) for content in contents]


def fit(history: list[ChatMessage], *, history_tokens: int, window: int = 1000, system: str = "") -> Allocation:
    """What of a history fits; a word is a token, and a message's role is a word."""
    return budget.allocate(
        system_prompt=system,
        question="",
        history=history,
        passages=[],
        limits=Limits(window=window, context=100, history=history_tokens, response=10),
        count=lambda text: len(text.split()),
    )


# --- spec 001, unit tests ------------------------------------------------------------------------


def test_build_context_with_source_ids() -> None:
    """A source stands in the prompt under an alias of one request, which is a SourceId in the answer."""
    passages = [
        passage("Backups run at night.", number=1, chunk_index=3, document_name="Backups", page_number=12),
        passage("Leave is granted.", number=2, section="HR"),
    ]
    laid_out = prompt.build("When?", passages, [], nonce="0a1b2c")
    assert (
        "[S1-0a1b2c]\n[Document: Backups]\n[Page: 12] [Section: N/A]\n---\nBackups run at night.\n---" in laid_out.user
    )
    assert "[S2-0a1b2c]\n[Document: Document 2]\n[Page: N/A] [Section: HR]\n---\nLeave is granted." in laid_out.user
    resolved = cite.resolve("At night [S1-0a1b2c]. Granted [S2-0a1b2c].", laid_out.sources)
    assert resolved.text == f"At night [SourceId: {document_id(1)}:3]. Granted [SourceId: {document_id(2)}:0]."
    for each in passages:
        assert re.fullmatch(rf"{UUID4}:\d+", each.source_id)
    # There and back.
    assert cite.extract(resolved.text) == [each.source_id for each in passages]


def test_extract_citations_valid() -> None:
    sources = {"S1-0a1b2c": passage("A", number=1), "S2-0a1b2c": passage("B", number=2, chunk_index=7)}
    resolved = cite.resolve("First [S2-0a1b2c], then [S1-0a1b2c], and again [S2-0a1b2c].", sources)
    assert resolved.cited == (sources["S2-0a1b2c"], sources["S1-0a1b2c"])
    assert cite.extract(resolved.text) == [f"{document_id(2)}:7", f"{document_id(1)}:0"]


def test_extract_citations_invalid_format() -> None:
    sources = {"S1-0a1b2c": passage("A")}
    genuine = str(document_id(1))
    for malformed in (
        "[S1]",
        "[S1-0A1B2C]",
        "[S1-0a1b2c",
        "(S1-0a1b2c)",
        "[Source 1]",
        f"[SourceId: {genuine}]",
        f"[SourceId: {genuine}:]",
        f"[SourceId: {genuine}:x]",
        f"[SourceId: {genuine}:٣]",
        f"[SourceId: {genuine.upper()}:0]".replace("0000000", "000000A"),
        f"[SourceId: {'-' * 36}:0]",
        f"[SourceId: {genuine[:-1]}:0]",
        f"[source: {genuine}:0]",
    ):
        assert cite.extract(f"So it is {malformed}.") == [], malformed
        resolved = cite.resolve(f"So it is {malformed}.", sources)
        assert resolved.cited == (), malformed
        assert cite.extract(resolved.text) == [], malformed


async def test_extract_citations_unknown_id(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    backups = await keep(ANNA, BACKUPS)
    invented = f"{uuid4()}:0"
    ollama.answer = lambda messages: (
        f"{BACKUPS} [{labels(messages)[0]}] Really [S9-ffffff], it says so [SourceId: {invented}]."
    )
    with structlog.testing.capture_logs() as logs:
        response = await opened().generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert [citation.source_id for citation in response.citations] == [f"{backups}:0"]
    assert response.answer == f"{BACKUPS} [SourceId: {backups}:0] Really, it says so."
    (refused,) = [entry for entry in logs if entry["event"] == "citations_refused"]
    assert refused["count"] == 2
    assert refused["log_level"] == "warning"


def test_calculate_coverage() -> None:
    # backups, run, nightly, oslo; "they", "and" and "in" are stop words, "at" is too short as well.
    context = [passage("Backups are run nightly", number=1), passage("at Berlin.", number=2)]
    assert confidence.coverage("They run backups nightly, and in Oslo at 2.", context) == 0.75
    assert confidence.coverage("Zebras graze.", context) == 0.0
    assert confidence.coverage("BACKUPS", context) == 1.0


def test_calculate_coverage_empty_answer() -> None:
    context = [passage("Backups run nightly.")]
    assert confidence.coverage("", context) == 0.0
    assert confidence.coverage("It is so.", context) == 0.0


def test_calculate_confidence_zero_results() -> None:
    assert confidence.score("Backups run nightly.", [], llm_score=100, grounded=True) == ConfidenceScore(
        overall=0, retrieval_score=0.0, coverage_score=0.0, llm_score=0
    )


def test_calculate_confidence_hybrid() -> None:
    # (.9 + .5) / 2 = .7 of 30, two of four words are .5 of 40, and .8 of 30: 21 + 20 + 24
    context = [passage("Backups nightly", number=1, cosine=0.9), passage("Oslo", number=2, cosine=0.5)]
    assert confidence.score("Backups nightly: zebras graze", context, llm_score=80, grounded=True) == ConfidenceScore(
        overall=65, retrieval_score=pytest.approx(0.7), coverage_score=0.5, llm_score=80
    )


def test_truncate_history_overflow() -> None:
    # Three words each with the role: two of them fit into 7.
    fitted = fit(said("first one", "second one", "third one"), history_tokens=7)
    assert [message.content for message in fitted.history] == ["second one", "third one"]
    # What is dropped are the oldest, not whatever is long: nothing before the gap comes back.
    fitted = fit(said("short", "a long message of many words", "new"), history_tokens=6)
    assert [message.content for message in fitted.history] == ["new"]


def test_truncate_history_keeps_recent() -> None:
    conversation = said(*(f"message {number}" for number in range(10)))
    for kept in range(1, 11):
        assert list(fit(conversation, history_tokens=3 * kept).history) == conversation[-kept:]


def test_token_budget_exceeded() -> None:
    # 10 are reserved for the answer.
    assert fit([], history_tokens=0, window=100, system=words(1, 90)).history == ()
    with pytest.raises(TokenBudgetExceededError, match=r"91.*10.*100"):
        fit([], history_tokens=0, window=100, system=words(1, 91))


async def test_deduplicate_chunks(store: Callable[..., UUID], opened: Open) -> None:
    """Words in common: 19 of 21 in the first two (.905), 18 of 20 in the last two (.9, and not more)."""
    east = {"embedding": unit_vector(1.0), "embedding_model": "local/all-MiniLM-L6-v2"}
    older = store(ANNA, words(1, 20), **east)
    store(ANNA, words(2, 21), **east)
    others = [store(ANNA, words(101, 119), **east), store(ANNA, words(102, 120), **east)]
    request = RAGRequest(query="w2 w3 w102 w103", min_similarity=-1.0)
    found = await opened().search(request, principal=ANNA)
    assert {each.document_id for each in found.passages} == {older, *others}


async def test_deduplicate_respects_cap(store: Callable[..., UUID], opened: Open) -> None:
    """Of candidates that are all alike, those beyond the first 15 are not compared any more."""
    for _ in range(17):
        store(ANNA, words(1, 20), embedding=unit_vector(1.0), embedding_model="local/all-MiniLM-L6-v2")
    request = RAGRequest(query="w1", min_similarity=-1.0, max_context_chunks=20)
    service = opened()
    assert service.settings.rag_dedup_candidates_cap == 15
    found = await service.search(request, principal=ANNA)
    assert len(found.passages) == 1 + (17 - 15)


async def test_limit_per_document(store: Callable[..., UUID], opened: Open) -> None:
    vectors = {"embedding": unit_vector(1.0), "embedding_model": "local/all-MiniLM-L6-v2"}
    document = store(ANNA, f"orders {words(1, 9)}", **vectors)
    for index in range(1, 5):
        store(
            ANNA,
            f"orders {words(20 * index, 20 * index + 9)}",
            document_id=document,
            chunk_index=index,
            **vectors,
        )
    other = store(ANNA, f"orders {words(200, 209)}", **vectors)
    found = await opened().search(RAGRequest(query="orders", min_similarity=-1.0), principal=ANNA)
    documents = [each.document_id for each in found.passages]
    assert (documents.count(document), documents.count(other)) == (3, 1)


async def test_validate_model_allowed(opened: Open, ollama: FakeOllama) -> None:
    """On the list, and installed: the whole name counts, and the tag `latest` may be left out."""
    ollama.models = ("llama3.2:latest", "qwen3:8b")
    service = opened()
    assert await service.generator.choose("llama3.2") == "llama3.2"
    assert await service.generator.choose("qwen3:8b") == "qwen3:8b"
    assert check_allowed("deepseek-r1:32b", service.settings).context_window == 65_536
    # Another size of an installed model is another model.
    ollama.models = ("llama3.2:latest", "qwen3:32b")
    with pytest.raises(ModelUnavailableError, match="ollama pull qwen3:8b"):
        await service.generator.choose("qwen3:8b")


async def test_validate_model_not_allowed(opened: Open, ollama: FakeOllama) -> None:
    ollama.models = ("llama3.2:latest", "mistral:latest")
    with pytest.raises(ModelNotAllowedError, match=r"available: llama3\.2, qwen3:8b, deepseek-r1:32b"):
        await opened().generator.choose("mistral")
    # Refused before the server is asked anything.
    assert ollama.requests == []


async def test_grounded_true_with_citations(keep: Keep, opened: Open) -> None:
    await keep(ANNA, BACKUPS)
    # Independent of how sure the answer is.
    response = await opened(rag_confidence_threshold=100).generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert len(response.citations) == 1
    assert response.grounded is True
    assert response.action == "ROUTE"


async def test_grounded_false_no_citations(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    await keep(ANNA, BACKUPS)
    ollama.answer = lambda messages: BACKUPS
    response = await opened(rag_confidence_threshold=0).generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert response.citations == []
    assert response.grounded is False
    assert response.action == "ROUTE"


# --- spec 001, integration tests -----------------------------------------------------------------


async def test_generate_full_pipeline(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    backups = await keep(ANNA, BACKUPS, title="Backups")
    await keep(ANNA, RESTORE, title="Restores")
    response = await opened().generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert response.answer == f"{BACKUPS} [SourceId: {backups}:0]"
    (citation,) = response.citations
    assert citation.source_id == f"{backups}:0"
    assert (citation.document_name, citation.page_number, citation.section) == ("Backups", None, None)
    assert 0.5 < citation.relevance_score <= 1
    assert (citation.snippet, citation.snippet_full) == (BACKUPS, BACKUPS)
    assert (response.action, response.route_to, response.grounded) == ("CITE", None, True)
    assert response.model_used == "llama3.2"
    assert response.context_chunks_used == 2
    assert response.context_tokens_used > 20
    assert response.generation_time_ms > 0
    score = response.confidence
    assert score.overall >= 60
    assert score.coverage_score == 1.0
    weighted = 30 * score.retrieval_score + 40 * score.coverage_score + 0.3 * score.llm_score
    assert score.overall == int(round(weighted, 6))


async def test_generate_zero_context(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    await keep(OUTSIDER, BACKUPS)
    response = await opened(rag_admin_email="desk@acme.example").generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert response.answer == (
        "I don't have enough information in the available documents to answer this question. "
        "Please contact the relevant team for assistance."
    )
    assert response.confidence == ConfidenceScore(overall=0, retrieval_score=0.0, coverage_score=0.0, llm_score=0)
    assert response.citations == []
    assert response.action == "ROUTE"
    target = response.route_to
    assert target is not None
    assert (target.tag, target.owner_user_id, target.fallback) == ("system", None, True)
    assert target.owner_email == "desk@acme.example"
    assert target.reason == "No relevant documents found"
    assert response.model_used == "llama3.2"
    assert (response.context_chunks_used, response.context_tokens_used, response.grounded) == (0, 0, False)
    # The pipeline ends before the model.
    assert chats(ollama) == []


async def test_generate_low_confidence_routes(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    await keep(ANNA, BACKUPS)
    # Cited, and hardly a word of it is in the source.
    ollama.answer = lambda messages: f"Zebras graze quietly beside hippos under acacias [{labels(messages)[0]}]."
    response = await opened().generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert response.grounded
    assert response.confidence.overall < 60
    assert response.action == "ROUTE"
    assert response.route_to is not None
    assert f"Low confidence: {response.confidence.overall}%" in response.route_to.reason
    # The threshold decides, and nothing else.
    low = await opened(rag_confidence_threshold=response.confidence.overall).generate(
        RAGRequest(query=QUESTION), principal=ANNA
    )
    assert (low.action, low.route_to) == ("CITE", None)


async def test_generate_token_budget(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    """200 messages of about 20 tokens: the newest that fit into 300 tokens are told, in their order."""
    await keep(ANNA, BACKUPS)
    history = [
        ChatMessage(role=("user", "assistant")[number % 2], content=f"message {number} " + "filler " * 16)
        for number in range(200)
    ]
    service = opened(rag_max_history_tokens=300)
    response = await service.generate(RAGRequest(query=QUESTION, chat_history=history), principal=ANNA)
    (asked,) = chats(ollama)
    prompted = asked["messages"][-1]["content"]
    told = [int(number) for number in re.findall(r"^(?:user|assistant): message (\d+) ", prompted, re.MULTILINE)]
    assert told == list(range(200 - len(told), 200))
    assert 5 <= len(told) <= 16
    # The sources have not been pushed out.
    assert response.context_chunks_used == 1
    assert BACKUPS in prompted


async def test_health_check(opened: Open, ollama: FakeOllama) -> None:
    health = await opened().health_check()
    assert (health["healthy"], health["model"]) == (True, "llama3.2")
    assert 0 < health["latency_ms"] < 60_000
    assert ollama.requests[0].path == "/api/tags"
    # A server without the model, and none at all.
    ollama.models = ()
    assert (await opened().health_check())["healthy"] is False
    assert (await opened(ollama_base_url=refusing_url()).health_check())["healthy"] is False


async def test_model_override(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    await keep(ANNA, BACKUPS)
    ollama.models = ("llama3.2:latest", "qwen3:8b")
    service = opened()
    assert (await service.generate(RAGRequest(query=QUESTION), principal=ANNA)).model_used == "llama3.2"
    response = await service.generate(RAGRequest(query=QUESTION, model="qwen3:8b"), principal=ANNA)
    assert response.model_used == "qwen3:8b"
    assert [chat["model"] for chat in chats(ollama)] == ["llama3.2", "qwen3:8b"]
    with pytest.raises(ModelUnavailableError):
        await service.generate(RAGRequest(query=QUESTION, model="deepseek-r1:32b"), principal=ANNA)


async def test_tenant_isolation(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    """The tenant reaches the search: one question of two tenants has two answers, and no foreign word in either."""
    ours = await keep(ANNA, BACKUPS)
    theirs = await keep(OUTSIDER, "Backups of the orders database run at noon, says umbrella.")
    ollama.answer = lambda messages: f"So it is [{labels(messages)[0]}]."
    service = opened()
    for principal, document, canary in ((ANNA, ours, "umbrella"), (OUTSIDER, theirs, "35 days")):
        before = len(chats(ollama, forms=True))
        request = RAGRequest(query=QUESTION, tenant_id=principal.tenant_id)
        response = await service.generate(request, principal=principal)
        assert [each.document_id for each in response.passages] == [document]
        assert {citation.document_id for citation in response.citations} == {str(document)}
        asked = chats(ollama, forms=True)[before:]
        assert asked
        assert canary not in str([chat["messages"] for chat in asked])


# --- spec 000, unit tests ------------------------------------------------------------------------


def decides(schema: Mapping[str, Any], messages: list[Message]) -> str:
    """A model that tells greetings from questions."""
    return json.dumps({"way": "DIRECT" if "Hello" in messages[-1]["content"] else "RETRIEVE"})


async def way_of(service: RAGService, query: str) -> str:
    deadline = asyncio.get_running_loop().time() + 60
    return await route_query(RAGRequest(query=query), generator=service.generator, model="llama3.2", deadline=deadline)


async def test_route_query_retrieve(opened: Open, ollama: FakeOllama) -> None:
    ollama.fill = decides
    service = opened()
    assert await way_of(service, QUESTION) == "RETRIEVE"
    # What nobody can make sense of is searched for.
    for reply in ("", "DIRECT, I think", '{"way": "direct"}', '{"way": ["DIRECT"]}', '{"way": "BOTH"}', "RETRIEVE"):
        ollama.fill = lambda schema, messages, reply=reply: reply  # type: ignore[misc]
        assert await way_of(service, "Hello!") == "RETRIEVE", reply


async def test_route_query_direct(opened: Open, ollama: FakeOllama) -> None:
    ollama.fill = decides
    assert await way_of(opened(), "Hello! Who are you?") == "DIRECT"


def test_build_context() -> None:
    """Best first, each between its own labels, and what is not known is N/A."""
    passages = [passage("It is so.", number=1, section="Rules"), passage("It is not.", number=2, page_number=4)]
    laid_out = prompt.build("Is it?", passages, [], nonce="0a1b2c")
    assert laid_out.user == (
        "SOURCES (0a1b2c):\n"
        "[S1-0a1b2c]\n[Document: Document 1]\n[Page: N/A] [Section: Rules]\n---\nIt is so.\n---\n"
        "[S2-0a1b2c]\n[Document: Document 2]\n[Page: 4] [Section: N/A]\n---\nIt is not.\n---\n"
        "END OF SOURCES (0a1b2c)\n\n"
        "QUESTION: Is it?"
    )


def test_build_chat_history() -> None:
    history = [ChatMessage(role="user", content="Hello"), ChatMessage(role="assistant", content="Good day.")]
    laid_out = prompt.build("Is it?", [passage("It is.")], history, nonce="0a1b2c")
    assert laid_out.user.startswith(
        "EARLIER MESSAGES (0a1b2c):\nuser: Hello\nassistant: Good day.\nEND OF EARLIER MESSAGES (0a1b2c)\n\n"
    )
    assert "EARLIER MESSAGES" not in prompt.build("Is it?", [passage("It is.")], [], nonce="0a1b2c").user


def test_format_citations() -> None:
    """All that a reader is shown of a source: where it is, how near, and an excerpt of 200 and of 1,000 characters."""
    long = passage(
        "x" * 1500, number=2, chunk_index=5, document_name="Handbook", page_number=12, section="Leave", cosine=0.625
    )
    resolved = cite.resolve("So [S1-0a1b2c].", {"S1-0a1b2c": long})
    _, citations = cite.keep_readable(resolved, {(long.document_id, 5): long.content_updated_at})
    assert citations == [
        Citation(
            source_id=f"{document_id(2)}:5",
            document_id=str(document_id(2)),
            document_name="Handbook",
            chunk_index=5,
            page_number=12,
            section="Leave",
            relevance_score=0.625,
            snippet="x" * 200 + "...",
            snippet_full="x" * 1000,
            stale=False,
        )
    ]
    short = passage("y" * 200)
    resolved = cite.resolve("So [S1-0a1b2c].", {"S1-0a1b2c": short})
    _, (citation,) = cite.keep_readable(resolved, {(short.document_id, 0): short.content_updated_at})
    assert citation.snippet == citation.snippet_full == "y" * 200


async def test_determine_action_cite(keep: Keep, opened: Open) -> None:
    await keep(ANNA, BACKUPS)
    service = opened()
    sure = await service.generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert (sure.action, sure.route_to) == ("CITE", None)
    # At the threshold is enough.
    at = opened(rag_confidence_threshold=sure.confidence.overall)
    assert (await at.generate(RAGRequest(query=QUESTION), principal=ANNA)).action == "CITE"


async def test_determine_action_route(keep: Keep, opened: Open) -> None:
    await keep(ANNA, BACKUPS)
    sure = await opened().generate(RAGRequest(query=QUESTION), principal=ANNA)
    above = opened(rag_confidence_threshold=sure.confidence.overall + 1)
    response = await above.generate(RAGRequest(query=QUESTION), principal=ANNA)
    assert response.action == "ROUTE"
    assert response.route_to is not None
    assert response.route_to.owner_email == "admin@company.com"
    # Less sure, and not less said.
    assert response.answer == sure.answer


# --- spec 000, integration tests -----------------------------------------------------------------


async def test_generate_with_context(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    """What the model is given: our rules as the system's, the documents that were found as the user's."""
    await keep(ANNA, BACKUPS, title="Backup plan")
    response = await opened().generate(RAGRequest(query=QUESTION), principal=ANNA)
    (asked,) = chats(ollama)
    system, user = asked["messages"]
    assert (system["role"], user["role"]) == ("system", "user")
    assert "[Document: Backup plan]" in user["content"]
    assert BACKUPS in user["content"]
    assert user["content"].endswith(f"QUESTION: {QUESTION}")
    assert BACKUPS not in system["content"]
    assert asked["options"]["temperature"] == 0.1
    assert response.action == "CITE"
    assert response.citations[0].document_name == "Backup plan"


async def test_generate_direct(keep: Keep, opened: Open, ollama: FakeOllama) -> None:
    """A greeting needs no document, where that is allowed and asked for; nothing is cited and nothing is sure."""
    await keep(ANNA, BACKUPS)
    ollama.fill = decides
    ollama.answer = lambda messages: "Hello! How can I help you?"
    service = opened(rag_allow_direct=True)
    request = RAGRequest(query="Hello! Do backups of the orders database run?", direct=True)
    response = await service.generate(request, principal=ANNA)
    assert (response.action, response.answer) == ("DIRECT", "Hello! How can I help you?")
    assert (response.citations, response.grounded, response.context_chunks_used) == ([], False, 0)
    assert response.confidence.overall == 0
    assert BACKUPS not in str(chats(ollama, forms=True))
    # Who does not ask for it gets an answer from documents.
    await service.generate(RAGRequest(query=request.query), principal=ANNA)
    assert BACKUPS in str(chats(ollama)[-1])


async def test_generate_low_confidence(keep: Keep, opened: Open) -> None:
    """A question that the documents do not answer is passed on, even where a sentence shares a word with it."""
    await keep(ANNA, BACKUPS)
    await keep(ANNA, "The ceiling of the machine hall is painted every ten years.")
    service = opened(rag_llm_provider="extractive")
    response = await service.generate(RAGRequest(query=FOREIGN, min_similarity=-1.0), principal=ANNA)
    assert response.confidence.overall < 60
    assert response.action == "ROUTE"
    assert response.route_to is not None
