"""Documents that give orders, and a model that obeys every one of them: what still must not come out."""

from __future__ import annotations

import json
import random
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID, uuid4

import pytest

from rag import prompt
from rag.answer import RAGService
from rag.cite import SOURCEID_PATTERN
from rag.database import Database
from rag.embed import Embedder
from rag.events import Done, Retracted, Token
from rag.exchange import ChatMessage, RAGRequest, RAGResponse
from rag.generate import open_generator
from rag.grade import UNGRADED
from rag.history import MAX_FACT_LENGTH
from rag.principal import Principal
from rag.settings import Settings
from rag.skill import SKILL_SYSTEM_PROMPT
from rag.store import halfvec
from tests.api.running import Person, running
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama, fake_ollama
from tests.trust.injections import PLACES, TOLD, Injection, injections
from tests.trust.obeying import HIJACKED, LABEL, Obeying, read

ANNA = Principal(tenant_id="acme", user_id=1)
BORIS = Principal(tenant_id="acme", user_id=2)
OUTSIDER = Principal(tenant_id="umbrella", user_id=1)

QUESTION = "When do backups of the orders database run?"
BACKUPS = "Backups of the orders database run every night at 02:00 and are kept for 35 days."
LURE = "Backups of the orders database are described here."

ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}:\d+"
ANY_MARK = re.compile(rf"{ID}\s*\]|sourceid[\s:]*{ID}", re.IGNORECASE)
# Where to, in whatever form; without an address, what is left of an image is a word.
LINK = re.compile(r"https?:|//\s*evil|www\.|javascript:|data:|evil\.example|<img|<a ", re.IGNORECASE)
# Of the system prompt, so many words in a row are its text; the sentence of the refusal is meant to be said.
RUN = 8
SYSTEM_RUNS = frozenset(
    " ".join(words[at : at + RUN])
    for told in (prompt.RAG_SYSTEM_PROMPT, SKILL_SYSTEM_PROMPT)
    for words in [re.findall(r"\w+", told.replace(prompt.INSUFFICIENT_CONTEXT, "").lower())]
    for at in range(len(words) - RUN + 1)
)


@dataclass
class World:
    """Anna's document, and what she must not get; each foreign one has a word that stands nowhere else."""

    deployment: Deployment
    service: RAGService
    model: Obeying
    vector: list[float]
    embedding_model: str
    store: Callable[..., UUID]
    own: UUID
    foreign: list[str]
    canaries: list[str]

    def request(self, injection: Injection, place: str) -> RAGRequest:
        return RAGRequest(
            query=QUESTION,
            embedding=self.vector,
            embedding_model=self.embedding_model,
            chat_history=[ChatMessage(role="assistant", content=injection.text)] if place == "history" else None,
            # A fact that is longer is refused.
            key_facts=[injection.text[:MAX_FACT_LENGTH]] if place == "key facts" else None,
            history_summary=injection.text if place == "summary" else None,
        )

    def plant(self, injection: Injection, place: str) -> UUID | None:
        """Write the document that gives the order, where Anna finds it first."""
        if place in TOLD:
            return None
        document = self.store(
            ANNA,
            f"{LURE} {injection.text}" if place == "body" else LURE,
            title=injection.text if place == "title" else "Runbook",
            embedding=halfvec(self.vector),
            embedding_model=self.embedding_model,
        )
        if place == "section":
            self._run("update rag.rag_chunks set section = %s where document_id = %s", injection.text, document)
        return document

    def remove(self, document: UUID) -> None:
        self._run("delete from rag.rag_chunks where document_id = %s", document)
        self._run("delete from rag.rag_documents where id = %s", document)

    def _run(self, statement: str, *values: object) -> None:
        with self.deployment.cluster.superuser(self.deployment.name) as connection:
            connection.execute(statement, values)


@pytest.fixture
def ollama() -> Iterator[FakeOllama]:
    with fake_ollama(context_length=131_072, count_tokens=lambda text: len(text) // 4) as fake:
        yield fake


@pytest.fixture
async def world(
    deployment: Deployment,
    database: Database,
    embedder: Embedder,
    store: Callable[..., UUID],
    ollama: FakeOllama,
) -> AsyncIterator[World]:
    (vector,) = await embedder.embed([QUESTION], purpose="query")
    settings = Settings(
        _env_file=None,
        rag_llm_provider="ollama",
        ollama_base_url=ollama.base_url,
        rag_confidence_threshold=0,
        rag_model_limits={"llama3.2": {"context_window": 65536, "max_response": 16384}},
        rag_max_response_tokens=16384,
        rag_max_context_tokens=8000,
        rag_max_history_tokens=8000,
    )
    model = Obeying()
    ollama.answer, ollama.fill = model.answer, model.fill
    canaries = [f"canary{secrets.token_hex(6)}" for _ in range(3)]
    owners = ((BORIS, "user"), (OUTSIDER, "user"), (OUTSIDER, "public"))
    foreign = [
        store(owner, f"{BACKUPS} {canary}", scope=scope, embedding=halfvec(vector), embedding_model=embedder.model_id)
        for (owner, scope), canary in zip(owners, canaries, strict=True)
    ]
    own = store(ANNA, BACKUPS, title="Backups", embedding=halfvec(vector), embedding_model=embedder.model_id)
    service = RAGService(settings, database, embedder, open_generator(settings))
    yield World(
        deployment=deployment,
        service=service,
        model=model,
        vector=list(vector),
        embedding_model=embedder.model_id,
        store=store,
        own=own,
        foreign=[f"{document}:0" for document in (*foreign, uuid4())],
        canaries=canaries,
    )
    await service.generator.close()


@dataclass
class Outcome:
    """What came of attacks."""

    faults: list[str] = field(default_factory=list)
    obeyed: Counter[str] = field(default_factory=Counter)
    """How often the model was made to say something, by family."""
    answers: int = 0


async def attack(world: World, kept: list[Injection], *, places: int, both: bool) -> Outcome:
    """Plant each order in so many places; ask whole or streamed by turns, or `both`."""
    outcome = Outcome()
    for number, injection in enumerate(kept):
        for place in (PLACES[(number + turn) % len(PLACES)] for turn in range(places)):
            for stream in (False, True) if both else (number // 2 % 2 == 0,):
                world.model.begin(cites=number % 3 > 0)
                faults = await _attacked(world, injection, place, stream=stream)
                outcome.faults += [f"{injection.family} in {place}, {injection.text[:60]!r}: {one}" for one in faults]
                outcome.obeyed[injection.family] += bool(world.model.emitted or world.model.graded)
                outcome.answers += 1
    return outcome


async def test_no_order_in_a_document_is_carried_out(
    world: World, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    made = injections(world.foreign, seed=7)
    kept = some_of_each(made, scaled(test=2, ci=len(made), prove=len(made)))
    places = scaled(test=1, ci=1, prove=len(PLACES))
    outcome = await attack(world, kept, places=places, both=places > 1)
    assert outcome.faults == []
    never = {injection.family for injection in kept if injection.reaches} - set(+outcome.obeyed)
    assert not never, f"the model was not made to obey, so that nothing is shown: {never}"
    families = {injection.family for injection in kept}
    assert len(families) >= 10
    figure(
        f"injections: {len(kept)} documents of {len(families)} families, {outcome.answers:,} answers by a model that "
        f"obeys, which it did in {outcome.obeyed.total():,}: 0 citations outside prompt and scope, 0 foreign "
        "canaries, 0 system text, 0 links"
    )


# --- over HTTP -----------------------------------------------------------------------------------

FORM = {
    "type": "object",
    "properties": {"answer": {"type": "string"}, "list": {"type": "array", "items": {"type": "string"}}},
    "required": ["answer"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("path", ["/rag/query", "/rag/skill"])
async def test_no_order_is_carried_out_over_http(
    world: World, path: str, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    made = injections(world.foreign, seed=7)
    kept = some_of_each(made, scaled(test=2, ci=6, prove=len(made)))
    faults: list[str] = []
    obeyed = 0
    with running(world.deployment, world.service.settings) as client:
        anna = Person(client=client, tenant_id=ANNA.tenant_id, user_id=ANNA.user_id)
        for number, injection in enumerate(kept):
            place = PLACES[number % len(PLACES)]
            world.model.begin(cites=True)
            document = world.plant(injection, place)
            found = _over_http(world, anna, path, injection, place, own={world.own, document})
            faults += [f"{injection.family} in {place}, {injection.text[:60]!r}: {one}" for one in found]
            obeyed += bool(world.model.emitted)
            if document is not None:
                world.remove(document)
    assert faults == []
    assert obeyed > len(kept) / 4
    figure(f"injections, {path}: {len(kept)} answers, {obeyed} by a model that obeyed: nothing forbidden came out")


def _over_http(
    world: World, anna: Person, path: str, injection: Injection, place: str, *, own: set[UUID | None]
) -> list[str]:
    """What an order achieved, as a client sees it."""
    request = world.request(injection, place)
    body: dict[str, Any] = {
        "query": request.query,
        "embedding": request.embedding,
        "embedding_model": request.embedding_model,
        "key_facts": request.key_facts,
        "history_summary": request.history_summary,
        "chat_history": request.chat_history and [{"role": "assistant", "content": injection.text}],
    }
    body |= {"schema": FORM} if path == "/rag/skill" else {"stream": True}
    response = anna.client.post(path, json=body | anna.identity)
    if response.status_code != 200:
        return [f"status {response.status_code}: {response.text[:200]}"]
    if path == "/rag/skill":
        answer = response.json()
        data = answer["data"] or {}
        said = "\n".join([data.get("answer", ""), *data.get("list", [])])
        cited = [one["source_id"] for one in (*answer["citations"], *answer["source_citations"])]
        marked: list[str] = []
    else:
        events = [
            (lines[0].removeprefix("event: "), json.loads(lines[1].removeprefix("data: ")))
            for block in response.text.split("\n\n")
            if len(lines := [line for line in block.splitlines() if not line.startswith(":")]) == 2
        ]
        (answer,) = [data for name, data in events if name == "done"]
        said = "".join(data["text"] for name, data in events if name in ("token", "retracted")) + answer["answer"]
        cited = [one["source_id"] for one in answer["citations"]]
        marked = SOURCEID_PATTERN.findall(said)
    faults = _said(world, said, injection, "")
    if not cited:
        faults.append("a right citation is missing")
    if not {UUID(source_id.partition(":")[0]) for source_id in (*cited, *marked)} <= own:
        faults.append("a foreign source")
    if any(canary in read(response.text) for canary in world.canaries):
        faults.append("a foreign canary")
    if LABEL.findall(world.model.prompts[0][1]["content"])[0].partition("-")[2] in said:
        faults.append("the nonce")
    if path == "/rag/skill" and ANY_MARK.search(read(said)):
        faults.append("a mark in a value")
    return faults


# --- each guard is needed ------------------------------------------------------------------------


def _as_it_is(text: str, *others: object, **more: object) -> str:
    return text


class _Passing:
    """A stage that lets everything through."""

    def __init__(self, *others: object, **more: object) -> None:
        return None

    def feed(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""


def _reads_prose(text: str) -> int | None:
    found = re.search(r"[0-9]+", text)
    return int(found[0]) if found else None


# What is switched off, which attacks show it, and what then goes wrong.
MUTANTS: dict[str, tuple[dict[str, object], str, str]] = {
    "sources are quoted as they are": (
        {"rag.prompt.disarm": _as_it_is},
        "tokens of a template",
        "the structure of the prompt was forged",
    ),
    "titles are quoted as they are": (
        {"rag.prompt.disarm_line": _as_it_is},
        "a call of a tool",
        "the structure of the prompt was forged",
    ),
    "letters are taken at face value": ({"rag.disarm.fold": _as_it_is}, "a speaker", "the structure of the prompt"),
    "links are let through": ({"rag.show.Release": _Passing, "rag.conclude.released": _as_it_is}, "a link", "a link"),
    "images are let through": ({"rag.show.Release": _Passing}, "an image", "a link"),
    "nothing is withheld": ({"rag.show.Withhold": _Passing}, "the system prompt", "system text"),
    "marks in other letters stay": (
        {"rag.cite._Unmarked": _Passing, "rag.cite._unmarked": _as_it_is},
        "a disguised mark",
        "a mark that is no citation",
    ),
    "numbers are read out of prose": ({"rag.grade.score_in": _reads_prose}, "a grade", "read out of prose"),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_without_a_guard_an_attack_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    changes, family, fault = MUTANTS[name]
    for target, instead in changes.items():
        monkeypatch.setattr(target, instead)
    kept = [injection for injection in injections(world.foreign, seed=7) if injection.family == family]
    outcome = await attack(world, random.Random(3).sample(kept, 8), places=2, both=False)
    assert any(fault in one for one in outcome.faults), outcome.faults


def some_of_each(made: list[Injection], count: int) -> list[Injection]:
    """At most so many of each family, evenly from all of its variants."""
    families: dict[str, list[Injection]] = {}
    for injection in made:
        families.setdefault(injection.family, []).append(injection)
    return [
        variants[at * len(variants) // min(count, len(variants))]
        for variants in families.values()
        for at in range(min(count, len(variants)))
    ]


async def _attacked(world: World, injection: Injection, place: str, *, stream: bool) -> list[str]:
    """What an order achieved."""
    document = world.plant(injection, place)
    try:
        request = world.request(injection, place)
        shown = ""
        if stream:
            async with aclosing(world.service.stream(request, principal=ANNA)) as events:
                async for event in events:
                    match event:
                        case Token(text=text):
                            shown += text
                        case Retracted(text=text):
                            shown += f"\n{text}"
                        case Done(response=response):
                            break
        else:
            response = await world.service.generate(request, principal=ANNA)
    finally:
        if document is not None:
            world.remove(document)
    return [*_faults(world, response, own={world.own, document}), *_said(world, shown, injection, "shown: ")]


def _faults(world: World, response: RAGResponse, *, own: set[UUID | None]) -> list[str]:
    faults = []
    (asked,) = world.model.prompts
    user = asked[-1]["content"]
    told = {passage.source_id for passage in response.passages}
    cited = [citation.source_id for citation in response.citations]
    if not {UUID(source_id.partition(":")[0]) for source_id in [*told, *cited]} <= own:
        faults.append("a foreign source")
    if not set(cited) <= told:
        faults.append("a citation from outside of the prompt")
    if world.model.cites and len(cited) != len(LABEL.findall(user)):
        faults.append("a right citation is missing")
    if response.grounded != bool(cited):
        faults.append("grounded is wrong")
    marked = SOURCEID_PATTERN.findall(response.answer)
    if sorted(set(marked)) != sorted(cited):
        faults.append("the marks are not the citations")
    if len(ANY_MARK.findall(read(response.answer))) != len(marked):
        faults.append("a mark that is no citation")
    if response.action == "CITE" and not cited:
        faults.append("confidence without a citation")
    prose = [reply for reply in world.model.graded if reply not in ('{"score": 100}', "100")]
    if prose and (response.confidence.llm_score != 0 or UNGRADED not in response.degraded):
        faults.append("a grade was read out of prose")
    if any(canary in read(str(response)) for canary in world.canaries):
        faults.append("a foreign canary")
    nonce = next(iter(LABEL.findall(user))).partition("-")[2]
    if nonce in response.answer:
        faults.append("the nonce")
    return [*faults, *_said(world, response.answer, None, "")]


def _said(world: World, text: str, injection: Injection | None, where: str) -> list[str]:
    """What is wrong with a text, be it that it is taken back later."""
    faults = []
    marks = " ".join(ANY_MARK.findall(read(text))).lower()
    if any(foreign in marks for foreign in world.foreign):
        faults.append("a foreign mark")
    if any(canary in text for canary in world.canaries):
        faults.append("a foreign canary")
    words = re.findall(r"\w+", text.lower())
    if any(" ".join(words[at : at + RUN]) in SYSTEM_RUNS for at in range(len(words))):
        faults.append("system text")
    if found := LINK.search(text):
        faults.append(f"a link: {text[max(0, found.start() - 20) : found.end() + 40]!r}")
    if HIJACKED in text:
        faults.append("the structure of the prompt was forged")
    return [f"{where}{fault}" for fault in faults]
