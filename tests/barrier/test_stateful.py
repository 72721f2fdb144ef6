"""Random walks of six people through all that the service does with documents: after each step the database
holds what the model says, and each of the six sees what the model lets them see."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, ClassVar
from uuid import UUID, uuid5

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from pgvector import HalfVector

from rag import claim
from rag import database as product
from rag.chunk import Chunk
from rag.database import Database, Session
from rag.embed import Purpose
from rag.errors import EmbeddingUnavailable, RAGServiceError
from rag.ingest import Source, embed_missing, ingest
from rag.principal import Principal
from rag.retrieve import retrieve
from rag.settings import Settings
from rag.store import Destination, read_document, remove_document
from tests.barrier.oracle_model import AccessClass, Identity, Membership, is_in_scope
from tests.barrier.oracle_world import seed_of_run
from tests.barrier.stateful_model import Erasure, Model, Stored, access_class, type_place
from tests.conftest import DIMENSIONS, SIGNER, Deployment, begin
from tests.rag.stored import HALF_DOCUMENTS

NewDeployment = Callable[[], AbstractContextManager[Deployment]]

# User 1 is somebody in both tenants, owns projects, and shares them with 2 and 3.
PEOPLE: Mapping[str, Principal] = {
    "owner": Principal(tenant_id="acme", user_id=1, project_id="*", tags=("hr", "public")),
    "member": Principal(tenant_id="acme", user_id=2, project_id="*"),
    "colleague": Principal(tenant_id="acme", user_id=3, project_id="apollo", tags=("hr",)),
    "publisher": Principal(tenant_id="acme", tags=("hr", "public")),
    "namesake": Principal(tenant_id="globex", user_id=1, project_id="*", tags=("hr", "public")),
    "neighbour": Principal(tenant_id="globex", user_id=2, project_id="apollo"),
}
PUBLISHERS = ("publisher", "neighbour")
PROJECTS = ("apollo", "zeus")
TAGS = (("public",), ("hr",), ("hr", "public"))
SOURCES = ("a", "b")
WORDS = tuple(f"zq{number}" for number in range(6))


def readme(*sections: str) -> str:
    """Cut at every heading, so that versions of a source have chunks in common."""
    return "\n\n".join(["# Guide", *(f"## Part {number}\n\n{text}" for number, text in enumerate(sections))]) + "\n"


BODIES = (
    readme("zq0 zq1 zq1", "zq2"),
    readme("zq0 zq1 zq1", "zq3 zq4"),
    readme("zq5"),
    readme("zq2", "zq0 zq1 zq1", "zq5 zq0"),
)


def identity_of(principal: Principal) -> Identity:
    return Identity(
        tenant=principal.tenant_id, user=principal.user_id, project=principal.project_id, tags=principal.tags
    )


def vector_of(text: str) -> list[float]:
    """How often each of WORDS is in a text, beside a component that all texts share; of unit length."""
    counts = Counter(text.split())
    direction = [1.0, *(float(counts[word]) for word in WORDS)]
    length = math.hypot(*direction)
    return [value / length for value in direction] + [0.0] * (DIMENSIONS - len(direction))


class WordCounts:
    """An embedding model whose vectors can be worked out again."""

    model_id = "word-counts"
    max_input_tokens = 64
    min_similarity = 0.0
    token_counter = "words"

    def __init__(self) -> None:
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        """Done once, where chunks would be embedded, even if none is new."""

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    async def embed(
        self, texts: Sequence[str], *, purpose: Purpose, progress: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        return [vector_of(text) for text in texts]

    async def close(self) -> None:
        """Holds nothing."""


async def interrupted(
    chunks: Sequence[Chunk], kept: Collection[str], embedder: Any, progress: Callable[[int, int], None] | None = None
) -> dict[str, HalfVector]:
    """`embed_missing`, in whose time something else may happen."""
    meanwhile, embedder.meanwhile = embedder.meanwhile, None
    if meanwhile is not None:
        await meanwhile()
    return await embed_missing(chunks, kept, embedder, progress)


# --- what goes wrong ---------------------------------------------------------------------------------

DISTURBANCES = ("is cancelled", "is cancelled afterwards", "fails", "is terminated")


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What becomes of the n-th statement of a step, from 1; a step has up to 16."""

    kind: str
    statement: int


@dataclass(slots=True, kw_only=True)
class Disturber:
    """Sees every statement of the service that runs on `loop`.

    Other tests may have left a service running beside, in a thread of its own, that asks for its keys now and then.
    """

    superuser: psycopg.Connection
    loop: asyncio.AbstractEventLoop
    due: Disturbance | None = None
    statements: int = 0
    happened: str | None = None

    def expect(self, disturbance: Disturbance | None) -> None:
        self.due, self.statements, self.happened = disturbance, 0, None

    async def __call__(self, session: Session, statement: Coroutine[Any, Any, Any]) -> Any:
        if asyncio.get_running_loop() is not self.loop:
            return await statement
        self.statements += 1
        if self.due is None or self.statements != self.due.statement:
            return await statement
        self.happened = self.due.kind
        task = asyncio.current_task()
        assert task is not None
        if self.happened == "is cancelled":
            task.cancel()
            return await statement
        if self.happened == "is cancelled afterwards":
            answer = await statement
            task.cancel()
            return answer
        statement.close()
        if self.happened == "is terminated":
            self.superuser.execute("select pg_terminate_backend(%s, 5000)", (session._connection.info.backend_pid,))
        return await session._connection.execute("select 1 / 0")


def disturbed_session(disturber: Disturber) -> type[Session]:
    class DisturbedSession(Session):
        async def rows(self, name: str, parameters: Mapping[str, Any]) -> Any:
            return await disturber(self, super().rows(name, parameters))

        async def row(self, name: str, parameters: Mapping[str, Any]) -> Any:
            return await disturber(self, super().row(name, parameters))

        async def run(self, name: str, parameters: Mapping[str, Any]) -> None:
            await disturber(self, super().run(name, parameters))

    return DisturbedSession


# --- what is stored and seen -------------------------------------------------------------------------

STORED = """
    select
        class.tenant_id, class.scope, class.user_id, class.project_id, class.tags, class.access_id,
        document.source_id, document.id, document.body,
        (document.scope, document.user_id, document.project_id, document.tags)
            is not distinct from (class.scope, class.user_id, class.project_id, class.tags)
    from rag.rag_access_classes as class
    left join rag.rag_documents as document
        on (document.tenant_id, document.access_id) = (class.tenant_id, class.access_id)
"""
CHUNKS = """
    select chunk.document_id, chunk.chunk_index, chunk.chunk_text, cast(chunk.embedding as text), document.id is null
    from rag.rag_chunks as chunk
    left join rag.rag_documents as document
        on (document.tenant_id, document.access_id, document.id)
        = (chunk.tenant_id, chunk.access_id, chunk.document_id)
"""
GRAVES = """
    select class.tenant_id, class.scope, class.user_id, class.project_id, class.tags,
        encode(tombstone.source_digest, 'hex'), tombstone.generation
    from rag.rag_tombstones as tombstone
    join rag.rag_access_classes as class
        on (class.tenant_id, class.access_id) = (tombstone.tenant_id, tombstone.access_id)
"""
MEMBERSHIPS = "select tenant_id, owner_user_id, project_id, member_user_id, may_write from rag.rag_project_members"
ERASURES = "select tenant_id, kind, count(*) from rag.rag_erasures group by 1, 2"
SEEN = """
    select 'document' as kind, document.id::text as id, 0::bigint as detail from my_documents() as document
    union all
    select 'chunk', chunk.document_id::text, chunk.chunk_index from my_chunks() as chunk
    union all
    select 'by id', document.id::text, 0 from unnest(%(ids)s::uuid[]) as asked, my_document(asked) as document
    union all
    select 'key', document.id::text, 0 from rag_documents as document
    union all
    select 'key of a chunk', chunk.document_id::text, chunk.chunk_index from rag_chunks as chunk
    union all
    select 'in the view', document.document_id::text, 0 from v_documents as document
    union all
    select 'class', class.access_id::text, class.may_write::integer from my_classes() as class
    union all
    select 'membership', concat_ws('/', member.owner_user_id, member.project_id, member.member_user_id),
        member.may_write::integer
    from my_members() as member
"""
# By far the most expensive way to look.
FOUND = """
    union all
    select 'found', hit.document_id::text, hit.chunk_index
    from search('zq0', %(vector)s::halfvec, 'word-counts', top_k => 1000, max_per_document => 1000,
        duplicate_threshold => 1) as hit
"""
TABLES = ("access_classes", "documents", "chunks", "project_members", "tombstones", "erasures", "query_logs")
ABSENT = uuid5(UUID(int=0), "nobody's document")


def json_digest(*values: Any) -> str:
    return hashlib.sha256(json.dumps(values, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What the database holds, read as its superuser."""

    documents: Mapping[type_place, tuple[UUID, str]]
    classes: Mapping[AccessClass, int]
    chunks: Mapping[tuple[UUID, int], str]
    memberships: frozenset[Membership]
    graves: Counter[tuple[AccessClass, str]]
    erasures: Counter[tuple[str, str]]

    @classmethod
    def read(cls, superuser: psycopg.Connection) -> Holdings:
        documents: dict[type_place, tuple[UUID, str]] = {}
        classes: dict[AccessClass, int] = {}
        for *columns, access_id, source, document_id, body, agrees in superuser.execute(STORED):
            access = access_class(*columns)
            assert classes.setdefault(access, access_id) == access_id, f"two classes for {access}"
            if document_id is not None:
                assert agrees, f"{document_id} says something else than its class"
                documents[access, source] = (document_id, body)
        chunks: dict[tuple[UUID, int], str] = {}
        for document_id, index, text, embedding, orphaned in superuser.execute(CHUNKS):
            assert not orphaned, f"chunk {index} of {document_id} has no document"
            assert json.loads(embedding) == pytest.approx(vector_of(text), abs=1e-3)
            chunks[document_id, index] = text
        assert superuser.execute(HALF_DOCUMENTS.encode()).fetchall() == []
        return cls(
            documents=documents,
            classes=classes,
            chunks=chunks,
            memberships=frozenset(
                Membership(tenant=tenant, owner=owner, project=project, member=member, may_write=may_write)
                for tenant, owner, project, member, may_write in superuser.execute(MEMBERSHIPS)
            ),
            graves=Counter(
                {
                    (access_class(*columns), digest): generation
                    for *columns, digest, generation in superuser.execute(GRAVES)
                }
            ),
            erasures=Counter({(tenant, kind): count for tenant, kind, count in superuser.execute(ERASURES)}),
        )

    def difference(self, model: Model) -> str | None:
        """How the database differs from the model, None when it does not."""
        documents = {
            place: (stored.id or self.documents.get(place, (None, ""))[0], stored.body)
            for place, stored in model.documents.items()
        }
        needed = {place[0] for place in [*model.documents, *model.graves]}
        expected: Mapping[str, tuple[Any, Any]] = {
            "documents": (documents, self.documents),
            "memberships": (model.memberships, self.memberships),
            "tombstones": (
                Counter({(place[0], json_digest("readme", place[1])): n for place, n in model.graves.items()}),
                self.graves,
            ),
            "erasures": (
                Counter(
                    {
                        (json_digest("tenant", tenant) if kind == "tenant" else tenant, kind): count
                        for (tenant, kind), count in model.erasures.items()
                    }
                ),
                self.erasures,
            ),
            "missing classes": (set(), needed - set(self.classes)),
            "classes nobody asked for": (set(), set(self.classes) - model.classes),
        }
        differing = [
            f"{what}: the model has {ours}, the database {theirs}"
            for what, (ours, theirs) in expected.items()
            if ours != theirs
        ]
        return "\n".join(differing) or None


@dataclass(slots=True, kw_only=True)
class World:
    """The service on a database, and what a walk needs beside it."""

    runner: asyncio.Runner
    database: Database
    without_publisher: Database
    app: psycopg.Connection
    operator: psycopg.Connection
    superuser: psycopg.Connection
    disturber: Disturber
    settings: Settings
    searchers: int
    """Of six people, how many search after each step."""
    embedder: WordCounts = field(default_factory=WordCounts)
    steps: Counter[tuple[str, str]] = field(default_factory=Counter)
    disturbed: Counter[str] = field(default_factory=Counter)
    undo: bool = False
    """Whether the present step is to be rolled back."""

    def clear(self) -> None:
        self.superuser.execute(f"truncate {', '.join(f'rag.rag_{table}' for table in TABLES)} cascade".encode())

    def pools_of(self, who: str) -> Database:
        return self.database if who in PUBLISHERS else self.without_publisher

    def seen_by(self, principal: Principal, ids: Sequence[UUID], *, searching: bool) -> list[tuple[str, str, int]]:
        statement = SEEN + FOUND if searching else SEEN
        with self.app.transaction():
            begin(self.app, principal)
            return self.app.execute(
                statement.encode(), {"vector": json.dumps(vector_of("zq0")), "ids": list(ids)}
            ).fetchall()


@contextmanager
def world_on(deployment: Deployment, *, searchers: int) -> Iterator[World]:
    with (
        asyncio.Runner() as runner,
        deployment.connect("rag_app") as app,
        deployment.connect("rag_operator") as operator,
        deployment.cluster.superuser(deployment.name) as superuser,
        pytest.MonkeyPatch.context() as patch,
    ):
        disturber = Disturber(superuser=superuser, loop=runner.get_loop())
        patch.setattr(product, "Session", disturbed_session(disturber))
        patch.setattr("rag.ingest.embed_missing", interrupted)
        # Of two who write one source the second goes on as if the first had stalled; else it would wait for its end.
        patch.setattr(claim, "LEASE_S", 0.05)
        database = deployment.pools(pool_size=2)
        without_publisher = Database(deployment.url("rag_app"), signer=SIGNER, pool_size=2)
        runner.run(database.__aenter__())
        runner.run(without_publisher.__aenter__())
        try:
            yield World(
                runner=runner,
                database=database,
                without_publisher=without_publisher,
                app=app,
                operator=operator,
                superuser=superuser,
                disturber=disturber,
                searchers=searchers,
                settings=Settings(
                    _env_file=None,
                    rag_llm_provider="extractive",
                    rag_max_chunks_per_doc=1000,
                    rag_chunk_overlap_threshold=1.0,
                ),
            )
        finally:
            runner.run(without_publisher.__aexit__())
            runner.run(database.__aexit__())


# --- the walk ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """Where somebody would have a document go; owner 0 is the writer."""

    scope: str
    owner: int
    project: str | None
    tags: tuple[str, ...]

    def access(self, principal: Principal) -> AccessClass:
        owner = None if self.scope == "public" else self.owner or principal.user_id
        return access_class(principal.tenant_id, self.scope, owner, self.project, self.tags)


PLACES = (
    *(Place("public", 0, None, tags) for tags in TAGS),
    *(Place("user", owner, None, tags) for owner in (0, 1) for tags in TAGS),
    *(Place("project", owner, project, tags) for owner in (0, 1, 2) for project in PROJECTS for tags in TAGS),
)


def _may_go(who: str, place: Place) -> bool:
    """Whether somebody may write there, where user 1 shares all projects."""
    shared = (
        Membership(tenant=tenant, owner=1, project=project, member=member, may_write=True)
        for tenant in ("acme", "globex")
        for project in PROJECTS
        for member in (2, 3)
    )
    return (place.scope != "public" or who in PUBLISHERS) and Model(memberships=frozenset(shared)).writes(
        identity_of(PEOPLE[who]), place.access(PEOPLE[who])
    )


EVERYWHERE = [(who, place) for who in PEOPLE for place in PLACES]
ALLOWED = [way for way in EVERYWHERE if _may_go(*way)]


type_deed = tuple[str, Callable[[Model], str], Callable[[], Coroutine[Any, Any, str]]]
"""What is told of it, what it does in the model, and what it does in the database."""
WEIGHTS: Counter[str] = Counter()


def step(weight: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a method one of the steps of a walk."""

    def register(method: Callable[..., None]) -> Callable[..., None]:
        WEIGHTS[method.__name__] = weight
        return method

    return register


class Chance(Random):
    """What a step is made of."""

    def way(self) -> tuple[str, AccessClass]:
        """Who writes, and where to; three of four may, if things are shared."""
        who, place = self.choice(ALLOWED if self.random() < 0.75 else EVERYWHERE)
        return who, place.access(PEOPLE[who])

    def person(self) -> str:
        return self.choice(sorted(PEOPLE))

    def disturbance(self) -> Disturbance | None:
        if self.random() < 0.4:
            return None
        return Disturbance(self.choice(DISTURBANCES), self.randint(1, 16))

    def erasure(self, place: type_place | None = None) -> Erasure:
        """Some erasure, or one that takes `place`."""
        tenant, user, project = self.choice(("acme", "globex")), self.choice((1, 2)), self.choice(PROJECTS)
        possible = (
            *(Erasure(tenant=tenant, source=source) for source in SOURCES),
            Erasure(tenant=tenant, user=user),
            Erasure(tenant=tenant, project=project),
            Erasure(tenant=tenant, project=project, user=user),
            Erasure(tenant=tenant),
        )
        taking = [erasure for erasure in possible if place is None or erasure.takes(place)]
        return self.choice(taking or possible)


class Walk(RuleBasedStateMachine):
    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.world.clear()
        self.model = Model()
        self.ids: list[UUID] = []
        self.numbers: Counter[int] = Counter()
        self.holdings = Holdings.read(self.world.superuser)

    # --- steps of the service ---

    @step(10)
    def ingest(self, chance: Chance) -> None:
        who, access = chance.way()
        self.expect(
            "ingest",
            *self.ingesting(who, access, chance.choice(SOURCES), chance.choice(BODIES)),
            disturbance=chance.disturbance(),
        )

    @step(6)
    def ingest_again(self, chance: Chance) -> None:
        """With the same or other tags, the same or another text."""
        who = chance.person()
        for (access, source), stored in self.some_document(who, chance):
            other = replace(access, tenant=PEOPLE[who].tenant_id, tags=chance.choice((access.tags, *TAGS)))
            self.expect(
                "ingest again",
                *self.ingesting(who, other, source, chance.choice((stored.body, *BODIES[:2]))),
                disturbance=chance.disturbance(),
            )

    @step(1)
    def ingest_without_an_embedding(self, chance: Chance) -> None:
        who, access = chance.way()
        told, in_model, in_database = self.ingesting(who, access, chance.choice(SOURCES), chance.choice(BODIES))

        async def fail() -> None:
            raise EmbeddingUnavailable()

        def failing(model: Model) -> str:
            documents, clock = dict(model.documents), model.clock
            ending = in_model(model)
            model.documents, model.clock = documents, clock
            return "EmbeddingUnavailable" if ending in ("created", "updated", "moved") else ending

        self.world.embedder.meanwhile = fail
        self.expect("ingest without an embedding", told, failing, in_database)

    @step(2)
    def move(self, chance: Chance) -> None:
        """Into another scope, where it is another document; then the old one is deleted."""
        who, access = chance.way()
        for (_, source), stored in self.some_document(who, chance):
            ending = self.expect("move", *self.ingesting(who, access, source, stored.body))
            there = self.model.documents.get((access, source))
            if ending in ("created", "updated") and there is not None and there.id != stored.id:
                self.expect("delete what moved", *self.removing(who, stored.id))

    @step(4)
    def delete(self, chance: Chance) -> None:
        who = chance.person()
        self.expect("delete", *self.removing(who, self.some_id(who, chance)), disturbance=chance.disturbance())

    @step(1)
    def read(self, chance: Chance) -> None:
        who = chance.person()
        document_id = self.some_id(who, chance)
        place = self.model.find(document_id)
        visible = place is not None and self.model.reads(identity_of(PEOPLE[who]), place[0])

        async def read() -> str:
            row = await read_document(self.world.pools_of(who), PEOPLE[who], document_id)
            assert place is not None
            assert row["body"] == self.model.documents[place].body
            access = access_class(PEOPLE[who].tenant_id, row["scope"], row["user_id"], row["project_id"], row["tags"])
            assert access == place[0]
            assert row["chunk_count"] == sum(key[0] == document_id for key in self.holdings.chunks)
            return "read"

        self.expect("read", f"{who} {document_id}", lambda _: "read" if visible else "DocumentNotFound", read)

    @step(4)
    def query(self, chance: Chance) -> None:
        who = chance.person()
        words = chance.sample(WORDS, chance.randint(1, 3))
        scope = chance.choice((None, None, "public", "user", "project", "organization", "documents"))
        listed = {self.some_id(who, chance) for _ in range(3)} if scope == "documents" else None
        question = vector_of(" ".join(words)) if chance.random() < 0.5 else None
        identity = identity_of(PEOPLE[who])
        in_scope = {
            stored.id
            for place, stored in self.model.visible(identity)
            if is_in_scope(scope, identity, place[0]) and (listed is None or stored.id in listed)
        }
        searched = {key: text for key, text in self.holdings.chunks.items() if key[0] in in_scope}
        expected = {key for key, text in searched.items() if question or set(words) & set(text.split())}

        async def ask() -> str:
            passages, mode, _ = await retrieve(
                " ".join(words),
                question,
                principal=PEOPLE[who],
                database=self.world.pools_of(who),
                settings=self.world.settings,
                embedding_model=WordCounts.model_id,
                min_similarity=-1.0,
                model_min_similarity=WordCounts.min_similarity,
                top_k=1000,
                budget_tokens=None,
                scope=scope,
                document_ids=None if listed is None else sorted(listed),
            )
            assert {(passage.document_id, passage.chunk_index) for passage in passages} == expected
            assert len(passages) == len(expected)
            for passage in passages:
                assert passage.text == searched[passage.document_id, passage.chunk_index]
                if question is not None:
                    cosine = sum(map(float.__mul__, question, vector_of(passage.text)))
                    assert passage.cosine == pytest.approx(cosine, abs=2e-3)
            assert mode == ("none" if not searched else "keyword" if question is None else "hybrid")
            return "answered"

        self.expect("query", f"{who} for {words} in scope {scope} of {listed}", lambda _: "answered", ask)

    # --- steps in SQL ---

    @step(4)
    def share(self, chance: Chance) -> None:
        who, project, member = chance.person(), chance.choice(PROJECTS), chance.randint(1, 3)
        to_write = chance.random() < 0.7
        self.expect(
            "share",
            f"{project} by {who} with {member}, to write: {to_write}",
            lambda model: model.share(identity_of(PEOPLE[who]), project, member, to_write=to_write),
            lambda: self.asking(who, "share_project(%s, %s, %s)", (project, member, to_write)),
            undo=chance.random() < 0.2,
        )

    @step(2)
    def unshare(self, chance: Chance) -> None:
        row = chance.choice([*sorted(self.model.memberships, key=repr), None])
        whose = {(PEOPLE[who].tenant_id, PEOPLE[who].user_id): who for who in PEOPLE}
        if row is None or chance.random() < 0.3:
            arguments = (chance.person(), chance.choice(PROJECTS), chance.randint(1, 3))
        else:
            arguments = (whose[row.tenant, row.owner], row.project, row.member)
        self.expect("unshare", *self.unsharing(*arguments), undo=chance.random() < 0.2)

    @step(1)
    def forget(self, chance: Chance) -> None:
        erasure = chance.erasure()
        undo = chance.random() < 0.2
        self.expect("forget", *self.forgetting(erasure), undo=undo)
        if not undo:
            traces = self.world.operator.execute(
                "select table_name, rows_left from rag.count_traces(%s, %s, %s, null, %s) where rows_left > 0",
                (erasure.tenant, erasure.user, erasure.project, erasure.source),
            ).fetchall()
            assert traces == []

    # --- one step in the middle of another ---

    @step(6)
    def ingest_meanwhile(self, chance: Chance) -> None:
        """While the model embeds, somebody else does something, to the same source if they can."""
        who, access = chance.way()
        source, body = chance.choice(SOURCES), chance.choice(BODIES)
        for place, _ in self.some_document(who, chance) if chance.random() < 0.6 else ():
            access, source = replace(place[0], tenant=PEOPLE[who].tenant_id), place[1]
        other = chance.person()
        present = self.model.versions(identity_of(PEOPLE[who]), access, source)
        other_access = replace(access, tenant=PEOPLE[other].tenant_id, tags=chance.choice((access.tags, *TAGS)))
        deed = chance.choice(("delete", "delete", "forget", "ingest", "ingest", "unshare"))
        other_told, other_in_model, other_in_database = {
            "delete": lambda: self.removing(other, present[0][1].id if present else ABSENT),
            "forget": lambda: self.forgetting(chance.erasure((access, source))),
            "ingest": lambda: self.ingesting(other, other_access, source, BODIES[3]),
            "unshare": lambda: self.unsharing("owner", access.project or "apollo", 2),
        }[deed]()
        told, in_model, in_database = self.ingesting(who, access, source, body)

        async def meanwhile() -> None:
            await ending_of(other_in_database())

        def both(model: Model) -> str:
            begun = model.copy()
            if in_model(model.copy()) not in ("created", "updated", "moved"):
                return in_model(model)
            model.classes.add(access)
            other_in_model(model)
            # Now, since what the other one made is looked for by its id.
            adopt_ids(model, Holdings.read(self.world.superuser))
            return model.finish(identity_of(PEOPLE[who]), access, source, body, begun=begun)

        self.world.embedder.meanwhile = meanwhile
        self.expect(f"ingest, meanwhile {deed}", f"{told}; {other_told}", both, in_database)

    @rule(number=st.integers(0, 2**64 - 1))
    def take(self, number: int) -> None:
        """The step that a number stands for.

        Not drawn as one argument after the other: hypothesis repeats itself, and prefers what is simple.
        """
        self.numbers[number] += 1
        chance = Chance(f"{number} {self.numbers[number]}")
        taken = self.world.steps.total()
        getattr(self, chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])(chance)
        # Most steps have nothing to do while there is no document.
        if self.world.steps.total() == taken:
            self.ingest(chance)

    # --- what always holds ---

    @invariant()
    def everybody_sees_what_is_theirs(self) -> None:
        recent = [*self.ids[-30:], ABSENT]
        for place, (name, principal) in enumerate(PEOPLE.items()):
            identity = identity_of(principal)
            searching = (place + self.numbers.total()) % len(PEOPLE) < self.world.searchers
            visible = {str(stored.id) for _, stored in self.model.visible(identity)}
            chunks = {(str(document), index) for document, index in self.holdings.chunks if str(document) in visible}
            expected = [
                *((kind, document, 0) for kind in ("document", "key", "in the view") for document in visible),
                *(("by id", document, 0) for document in visible if UUID(document) in recent),
                *((kind, *chunk) for kind in ("chunk", "key of a chunk") for chunk in chunks),
                *(("found", *chunk) for chunk in chunks if searching),
                *(
                    ("class", str(access_id), int(access.scope != "public" and self.model.writes(identity, access)))
                    for access, access_id in self.holdings.classes.items()
                    if self.model.reads(identity, access)
                ),
                *(
                    ("membership", f"{row.owner}/{row.project}/{row.member}", int(row.may_write))
                    for row in self.model.memberships
                    if row.tenant == identity.tenant and identity.user in (row.owner, row.member)
                ),
            ]
            seen = self.world.seen_by(principal, recent, searching=searching)
            assert sorted(seen) == sorted(expected), f"{name} sees what they should not, or not what they should"

    # --- how a step is taken ---

    def expect(
        self,
        name: str,
        told: str,
        in_model: Callable[[Model], str],
        in_database: Callable[[], Coroutine[Any, Any, str]],
        *,
        disturbance: Disturbance | None = None,
        undo: bool = False,
    ) -> str:
        """Take a step and compare: how it ended, and what it left behind."""
        note(f"{name}: {told}{f'; {disturbance}' if disturbance else ''}{'; undone' if undo else ''}")
        self.world.undo = undo
        self.world.disturber.expect(disturbance)
        try:
            ending = self.world.runner.run(ending_of(in_database()))
        finally:
            happened = self.world.disturber.happened
            self.world.disturber.expect(None)
            self.world.embedder.meanwhile = None
        self.world.steps[name, ending] += 1
        before, after = self.model, self.model.copy()
        foreseen = in_model(after)
        self.holdings = Holdings.read(self.world.superuser)
        if undo:
            possible = [before]
        elif happened is None:
            possible = [after]
        else:
            before.classes |= after.classes
            # The driver asks the socket before it waits, so that a statement that is cancelled may end, and
            # the transaction be about to commit, or have. Whoever is told of success has what they were told.
            cancelled = happened.startswith("is cancelled")
            possible = [after] if cancelled and ending == foreseen else [before, after] if cancelled else [before]
            self.world.disturbed[happened] += 1
        if happened is None:
            assert ending == foreseen
        else:
            assert ending in ("CancelledError", "InvalidInput", "DatabaseUnavailable", foreseen)
        differences = [self.holdings.difference(model) for model in possible]
        assert None in differences, f"{name} ({happened}) ended as {ending!r}\n{differences[-1]}"
        self.model = possible[differences.index(None)]
        adopt_ids(self.model, self.holdings)
        self.ids += [stored.id for stored in self.model.documents.values() if stored.id not in self.ids]
        return ending

    def ingesting(self, who: str, access: AccessClass, source: str, body: str) -> type_deed:
        def in_model(model: Model) -> str:
            if access.scope == "public" and who not in PUBLISHERS:
                return "ScopeForbidden"
            return model.ingest(identity_of(PEOPLE[who]), access, source, body)

        async def in_database() -> str:
            ingested = await ingest(
                Source(name="README.md", source_id=source, content=body, language="en"),
                principal=PEOPLE[who],
                destination=Destination(
                    scope=access.scope, user_id=access.owner, project_id=access.project, tags=access.tags
                ),
                database=self.world.pools_of(who),
                embedder=self.world.embedder,
                max_bytes=10_000,
            )
            return ingested.status

        told = f"{who} puts {source} with text {BODIES.index(body)} into {access.scope} {access.owner}"
        return f"{told} {access.project} {access.tags}", in_model, in_database

    def removing(self, who: str, document_id: UUID | None) -> type_deed:
        assert document_id is not None

        def in_model(model: Model) -> str:
            place = model.find(document_id)
            if place is not None and place[0].scope == "public" and who not in PUBLISHERS:
                return "ScopeForbidden" if model.reads(identity_of(PEOPLE[who]), place[0]) else "DocumentNotFound"
            return model.remove(identity_of(PEOPLE[who]), document_id)

        async def in_database() -> str:
            await remove_document(self.world.pools_of(who), PEOPLE[who], document_id, reason="a walk")
            return "removed"

        return f"{who} removes {document_id}", in_model, in_database

    def unsharing(self, who: str, project: str, member: int) -> type_deed:
        return (
            f"{who} no longer shares {project} with {member}",
            lambda model: model.unshare(identity_of(PEOPLE[who]), project, member),
            lambda: self.asking(who, "unshare_project(%s, %s)", (project, member)),
        )

    def forgetting(self, erasure: Erasure) -> type_deed:
        async def in_database() -> str:
            with self.undone(self.world.operator):
                self.world.operator.execute(
                    "select * from rag.forget(%s, %s, %s, null, %s)",
                    (erasure.tenant, erasure.user, erasure.project, erasure.source),
                )
            return "forgotten"

        return str(erasure), lambda model: model.forget(erasure), in_database

    async def asking(self, who: str, call: str, arguments: tuple[Any, ...]) -> str:
        """Call a function as somebody, by SQL; returns its answer as text, or a SQLSTATE."""
        try:
            with self.undone(self.world.app):
                begin(self.world.app, PEOPLE[who])
                (answer,) = self.world.app.execute(f"select {call}::text".encode(), arguments).fetchone() or ()
                return str(answer)
        except psycopg.Error as error:
            return error.sqlstate or "no state"

    @contextmanager
    def undone(self, connection: psycopg.Connection) -> Iterator[None]:
        """A transaction, rolled back in the end when the step is to be undone."""
        with connection.transaction(force_rollback=self.world.undo):
            yield

    def some_document(self, who: str, chance: Chance) -> list[tuple[type_place, Stored]]:
        """One of the documents, three times of four one that they can see; none when there is none."""
        visible = list(self.model.visible(identity_of(PEOPLE[who])))
        among = visible if visible and chance.random() < 0.75 else list(self.model.documents.items())
        return chance.sample(sorted(among, key=lambda entry: entry[1].written), min(1, len(among)))

    def some_id(self, who: str, chance: Chance) -> UUID:
        """The id of a document; now and then, and when there is none, of one that is gone or never was."""
        for _, stored in self.some_document(who, chance):
            if stored.id is not None and chance.random() < 0.9:
                return stored.id
        return chance.choice([*self.ids, ABSENT])


async def ending_of(step: Coroutine[Any, Any, str]) -> str:
    """What a step returned, or the name of the error that it ended with."""
    try:
        return await step
    except asyncio.CancelledError:
        return "CancelledError"
    except RAGServiceError as error:
        return type(error).__name__


def adopt_ids(model: Model, holdings: Holdings) -> None:
    """Take over the ids that the database gave to new documents."""
    for place, stored in model.documents.items():
        if stored.id is None and place in holdings.documents:
            model.documents[place] = Stored(id=holdings.documents[place][0], body=stored.body, written=stored.written)


def walk(world: World, *, runs: int, steps: int, seed: int, shrink: bool = True) -> None:
    """Take `runs` walks of `steps` steps; raises what goes wrong, in the shortest walk that shows it if `shrink`."""

    class SeededWalk(Walk):
        pass

    SeededWalk.world = world
    run_state_machine_as_test(
        seeded(seed)(SeededWalk),
        settings=settings(
            max_examples=runs,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_six_people_do_the_database_is_as_the_model_says(
    new_deployment: NewDeployment, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    runs, steps = scaled(test=6, ci=50, prove=1_000), scaled(test=15, ci=30, prove=50)
    searchers = scaled(test=2, ci=2, prove=6)
    seed = seed_of_run()
    print(f"repeat with RAG_TEST_SEED={seed}")
    with new_deployment() as deployment, world_on(deployment, searchers=searchers) as world:
        walk(world, runs=runs, steps=steps, seed=seed)
    taken = sum(world.steps.values())
    assert taken >= runs * steps * 0.9
    figure(
        f"stateful model, seed {seed}: {runs:,} walks of {steps} steps, {sum(world.disturbed.values()):,} of them"
        " disturbed: the database was the model's after each, and so was what each of 6 people saw"
    )


# --- the model is believed because it notices what is wrong -----------------------------------------


PLANTS: Mapping[str, str] = {
    "a member's rights that do not end": """
        create or replace function rag.unshare_project(project_id text, member_user_id bigint) returns boolean
        language sql security definer set search_path = rag, pg_temp as 'select true'
    """,
    "a chunk that outlives its document": "alter table rag.rag_chunks drop constraint rag_chunks_document",
    "a deletion that is forgotten": """
        create or replace function rag.bury_source(access_id bigint, source_type text, source_id text, reason text)
        returns bigint language sql security definer set search_path = rag, pg_temp as 'select 1::bigint'
    """,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_defect_is_noticed(new_deployment: NewDeployment, plant: str) -> None:
    with new_deployment() as deployment, world_on(deployment, searchers=1) as world:
        world.superuser.execute(PLANTS[plant].encode())
        # Two steps at once may end the other way round when they are tried again: noticed all the same.
        with pytest.raises((AssertionError, FlakyFailure)):
            walk(world, runs=40, steps=30, seed=1, shrink=False)
        print(sum(world.steps.values()))
