"""What is accepted as a citation, whatever a model writes, and that what is right is not refused along with it."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID, uuid4

import pytest
from psycopg import Connection

from rag import answer
from rag.answer import RAGService
from rag.cite import SOURCEID_PATTERN
from rag.database import Database
from rag.embed import Embedder
from rag.events import Citations, Done
from rag.exchange import Citation, Passage, RAGRequest, RAGResponse
from rag.generate import open_generator
from rag.principal import Principal
from rag.settings import Settings
from rag.store import halfvec
from tests.conftest import Deployment
from tests.fakes.ollama import FakeOllama, Message, fake_ollama
from tests.rag.disguises import DISGUISES
from tests.trust.obeying import LABEL

ANNA = Principal(tenant_id="acme", user_id=1)
BORIS = Principal(tenant_id="acme", user_id=2)
OUTSIDER = Principal(tenant_id="umbrella", user_id=1)

QUESTION = "When do backups of the orders database run?"
TOPICS = (
    "Backups of the orders database run every night at 02:00.",
    "The orders database is restored in 50 minutes; backups are encrypted with the key of the quarter.",
    "Backups are kept for 35 days, those of the orders database for a year.",
    "Who runs a backup of the orders database by hand writes it into the log.",
)


# How a model can cite; the first two are right.
KINDS = ("right", "several", "unknown", "old", "foreign", "own id", "disguised", "nested", "odd")


@dataclass
class Writer:
    """A model that cites at random, right and wrong, and what happens to its sources meanwhile."""

    chance: random.Random
    superuser: Connection
    """Kept open: what happens is shorter than the making of a connection."""
    own: list[str]
    """SourceIds that she may be given."""
    foreign: list[str]
    """SourceIds that Anna must not be given: of others, and of documents that are gone or never were."""
    fleeting: tuple[str, UUID] | None = None
    """What becomes of a document while the answer is written: `deleted`, `taken`, `cut` or `changed`."""
    expected: list[str] = field(default_factory=list)
    """What the next answer has to cite, by the labels that it was given; the writer's own account."""
    kinds: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)

    def answer(self, messages: list[Message]) -> str:
        user = messages[-1]["content"]
        labels = LABEL.findall(user)
        nonce = labels[0].partition("-")[2]
        self.expected = []
        said = []
        for _ in range(self.chance.randint(1, 8)):
            said.append(self.chance.choice(("Backups run at night", "So it is written", "Das steht dort", "Так")))
            said.append(self._mark(labels, nonce))
        if self.fleeting is not None:
            said.append(self._cite("[{}]", *labels))
            self.fates[self.fleeting[0]] += 1
            self.happen(*self.fleeting)
        return " ".join(said)

    def _mark(self, labels: list[str], nonce: str) -> str:
        kind = self.chance.choice(("right", "right", *KINDS))
        self.kinds[kind] += 1
        foreign = self.chance.choice(self.foreign)
        match kind:
            case "right":
                return self._cite("[{}]", self.chance.choice(labels))
            case "several":
                some = self.chance.sample(labels, k=min(2, len(labels)))
                form = self.chance.choice(("[{}]", "[see {}]", "[ {} ]"))
                return self._cite(form, *some) + self.chance.choice(("", f"[S{len(labels) + 1}-{nonce}]"))
            case "unknown":
                return f"[S{self.chance.choice((0, len(labels) + 1, 99, 999))}-{nonce}]"
            case "old":
                return f"[S1-{(int(nonce, 16) + 1) % 0x1000000:06x}]"
            case "foreign":
                return f"[SourceId: {foreign}]"
            case "own id":
                # Even a right one: a model cannot know it, so that it was told by somebody.
                return f"[SourceId: {self.chance.choice(self.own)}]"
            case "disguised":
                return DISGUISES[self.chance.choice(list(DISGUISES))](f"[SourceId: {foreign}]")
            case "nested":
                return f"[SourceId: [SourceId: x]{foreign}] [Sour[S99-{nonce}]ceId: {foreign}]"
        return self.chance.choice(
            (
                f"[s1-{nonce}]",
                f"[S1-{nonce.upper()}x]",
                "[S1]",
                f"(S1-{nonce})",
                f"[S1 {nonce}]",
                f"[SourceId: {foreign}",
            )
        )

    def _cite(self, form: str, *labels: str) -> str:
        self.expected += labels
        return form.format(", ".join(labels))

    def happen(self, fate: str, document: UUID) -> None:
        with self.superuser.transaction():
            for statement in FATES[fate]:
                self.superuser.execute(statement, {"document": document, "owner": BORIS.user_id})


FATES = {
    "deleted": (
        "delete from rag.rag_chunks where document_id = %(document)s",
        "delete from rag.rag_documents where id = %(document)s",
    ),
    "cut": ("delete from rag.rag_chunks where document_id = %(document)s",),
    "changed": (
        "update rag.rag_documents set content_updated_at = content_updated_at + interval '1 s' where id = %(document)s",
    ),
    # Document and chunk change their class at once, as when somebody moves them.
    "taken": (
        "set local session_replication_role = replica",
        """
        with taken as (
            update rag.rag_documents as document
            set access_id = other.access_id, user_id = other.user_id
            from rag.rag_documents as other
            where document.id = %(document)s and other.tenant_id = document.tenant_id
                and other.user_id = %(owner)s and other.scope = 'user'
            returning document.id, other.access_id
        )
        update rag.rag_chunks as chunk set access_id = taken.access_id from taken where chunk.document_id = taken.id
        """,
    ),
}
GONE = ("deleted", "cut", "taken")


@pytest.fixture
def ollama() -> Iterator[FakeOllama]:
    with fake_ollama() as fake:
        yield fake


@dataclass
class Tally:
    """What became of the citations of many answers."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    dropped: int = 0
    """Of revoked sources."""
    stale: int = 0
    faults: list[str] = field(default_factory=list)


@dataclass
class World:
    """A service, and the model behind it."""

    service: RAGService
    writer: Writer
    store: Callable[..., UUID]
    request: RAGRequest
    embedded: dict[str, str]

    async def cite_at_random(self, answers: int) -> Tally:
        """Ask so many times, whole and streamed by turns; every third time something happens to a source meanwhile."""
        tally = Tally()
        for number in range(answers):
            fate = self.writer.chance.choice(list(FATES))
            self.writer.fleeting = None
            if number % 3 == 0:
                document = self.store(ANNA, f"{TOPICS[number % len(TOPICS)]} Entry {number}.", **self.embedded)
                self.writer.fleeting = (fate, document)
            response, citations = await _answered(self.service, self.request, stream=number % 2 == 0)
            tally.faults += [f"answer {number}: {fault}" for fault in self._judge(response, citations, tally)]
            if self.writer.fleeting is not None:
                self.writer.happen("deleted", self.writer.fleeting[1])
        return tally

    def _judge(self, response: RAGResponse, citations: Sequence[Citation], tally: Tally) -> list[str]:
        expected, revoked = _expected(response, self.writer)
        accepted = [citation.source_id for citation in citations]
        stale = [citation.source_id for citation in citations if citation.stale]
        tally.right += len(set(accepted) & set(expected))
        tally.wrong += len(set(accepted) - set(expected))
        tally.missed += len(set(expected) - set(accepted))
        tally.dropped += len(revoked)
        tally.stale += len(stale)
        faults = []
        if accepted != expected:
            faults.append(f"cited {accepted}, and not in the order of the answer {expected}")
        if list(dict.fromkeys(SOURCEID_PATTERN.findall(response.answer))) != expected:
            faults.append(f"shows other sources than it cites: {response.answer}")
        if response.grounded != bool(expected):
            faults.append("grounded is wrong")
        if (answer.REVOKED in response.degraded) != bool(revoked):
            faults.append("what was revoked is not told, or what was not is")
        if stale != [one for one in expected if self.writer.fleeting == ("changed", UUID(one[:36]))]:
            faults.append("stale is wrong")
        return faults


@pytest.fixture
async def world(
    deployment: Deployment,
    database: Database,
    embedder: Embedder,
    store: Callable[..., UUID],
    ollama: FakeOllama,
) -> AsyncIterator[World]:
    (vector,) = await embedder.embed([QUESTION], purpose="query")
    embedded = {"embedding": halfvec(vector), "embedding_model": embedder.model_id}
    own = [f"{store(ANNA, topic, **embedded)}:0" for topic in TOPICS]
    gone = store(ANNA, TOPICS[0], **embedded)
    others = [store(BORIS, TOPICS[0], **embedded), store(OUTSIDER, TOPICS[1], scope="public", **embedded), gone]
    superuser = deployment.cluster.superuser(deployment.name)
    writer = Writer(random.Random(5), superuser, own, [f"{document}:0" for document in (*others, uuid4())])
    writer.happen("deleted", gone)
    ollama.answer = writer.answer
    ollama.fill = lambda schema, messages: '{"score": 100}'
    settings = Settings(
        _env_file=None, rag_llm_provider="ollama", ollama_base_url=ollama.base_url, rag_confidence_threshold=0
    )
    service = RAGService(settings, database, embedder, open_generator(settings))
    request = RAGRequest(query=QUESTION, embedding=list(vector), embedding_model=embedder.model_id)
    yield World(service=service, writer=writer, store=store, request=request, embedded=embedded)
    await service.generator.close()
    superuser.close()


async def test_every_citation_is_right_and_every_right_one_is_accepted(
    world: World, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    answers = scaled(test=100, ci=400, prove=10_000)
    tally = await world.cite_at_random(answers)
    assert tally.faults == []
    assert (tally.wrong, tally.missed) == (0, 0)
    assert min(tally.right, tally.dropped, tally.stale) > 0
    kinds = world.writer.kinds
    assert set(kinds) == set(KINDS)
    assert set(world.writer.fates) == set(FATES)
    figure(
        f"citations: {answers:,} answers with {kinds.total():,} marks of {len(kinds)} kinds: {tally.right:,} accepted, "
        f"all of them right, none of the right ones missed, {tally.dropped:,} of revoked sources dropped"
    )


# --- each guard is needed ------------------------------------------------------------------------


async def _all_readable(session: object, cited: Sequence[Passage]) -> dict[tuple[UUID, int], datetime]:
    return {(passage.document_id, passage.chunk_index): passage.content_updated_at for passage in cited}


class _Passing:
    """A stage that lets everything through."""

    def feed(self, text: str) -> str:
        return text

    def finish(self) -> str:
        return ""


# What is changed, and of what there is too much then.
MUTANTS: dict[str, tuple[dict[str, object], str]] = {
    "nothing is read again": ({"rag.conclude._readable": _all_readable}, "wrong"),
    "every mark is refused": ({"rag.cite._ALIAS": re.compile("(?!)")}, "missed"),
    "SourceIds of the model stay": (
        {
            "rag.cite._OWN_SOURCE_ID": re.compile("(?!)"),
            "rag.cite._Unmarked": _Passing,
            "rag.cite._only": lambda text, source_ids: text,
        },
        "faults",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_without_a_guard_it_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    changes, wrong = MUTANTS[name]
    for target, instead in changes.items():
        monkeypatch.setattr(target, instead)
    assert getattr(await world.cite_at_random(40), wrong)


async def _answered(
    service: RAGService, request: RAGRequest, *, stream: bool
) -> tuple[RAGResponse, Sequence[Citation]]:
    """An answer, and the citations as their reader got them."""
    if not stream:
        response = await service.generate(request, principal=ANNA)
        return response, response.citations
    async with aclosing(service.stream(request, principal=ANNA)) as events:
        told = [event async for event in events]
    (citations,) = [event.citations for event in told if isinstance(event, Citations)]
    (response,) = [event.response for event in told if isinstance(event, Done)]
    assert list(citations) == response.citations
    return response, citations


def _expected(response: RAGResponse, writer: Writer) -> tuple[list[str], list[str]]:
    """The SourceIds that have to be cited, in the order of the answer, and those that were revoked meanwhile."""
    named = [response.passages[int(label[1:].partition("-")[0]) - 1].source_id for label in writer.expected]
    gone = None if writer.fleeting is None or writer.fleeting[0] not in GONE else f"{writer.fleeting[1]}:0"
    once = list(dict.fromkeys(named))
    return [source_id for source_id in once if source_id != gone], [one for one in once if one == gone]
