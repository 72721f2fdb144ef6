"""Foreign rows around somebody's own: nearer to every question than these, more than a walk of a graph visits, and
full of the words that are asked for.

Three databases are copies of one, so that own rows and their indexes are the same down to the page. `without` has
nothing else. `near` and `elsewhere` have as many foreign rows besides, with the same keys, sizes and order; in
`elsewhere` these lie about other points and say other words. How many foreign rows there are may change the height of
a b-tree: so answers are compared with those of `without`, and reads between the other two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any
from uuid import UUID

import numpy as np
import psycopg
from numpy.typing import NDArray
from psycopg.rows import dict_row

from rag import maintain
from rag.maintain import Limits
from rag.operate import Desk
from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from tests.barrier.oracle_planting import Spoil
from tests.conftest import DIMENSIONS, Deployment, clone
from tests.sql.world import begin, protected_tables

SEED = 20261121
MODEL = "test-model"
TOP_K = 10
# The most that hnsw.ef_search can be, and the product sets it to.
WALK = 1000
# A halfvec holds whole numbers up to 2,048 exactly, so that numpy computes from what the database has.
SCALE = 6000

NewDeployment = Callable[[], AbstractContextManager[Deployment]]
Floats = NDArray[np.float64]
Directions = NDArray[np.float32]
Wholes = NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An access class, and its share of the rows."""

    access_id: int
    tenant_id: str = "acme"
    scope: str = "user"
    user_id: int | None = None
    project_id: str | None = None
    tags: tuple[str, ...] = ("public",)
    share: float


SMALL = Principal(tenant_id="acme", user_id=1, project_id="*")
LARGE = Principal(tenant_id="acme", user_id=2, project_id="*")
LARGE_CLASS = 500
# Who asks, and which classes that principal may read: all are small, or one of them has indexes of its own.
ASKERS: Mapping[str, tuple[Principal, tuple[int, ...]]] = {
    "small classes": (SMALL, (200, 300, 400)),
    "a large class": (LARGE, (400, 500, 600)),
}
OWN_SMALL = (
    Place(access_id=200, user_id=1, share=0.4),
    Place(access_id=300, scope="project", user_id=1, project_id="dock", share=0.2),
    Place(access_id=400, scope="public", share=0.25),
    Place(access_id=600, scope="project", user_id=2, project_id="dock", share=0.15),
)
OWN_LARGE = (Place(access_id=LARGE_CLASS, user_id=2, share=1.0),)
# Before, between and behind the own ones in every index. The first one gets indexes of its own as well.
FOREIGN = (
    Place(access_id=100, user_id=3, share=0.4),
    Place(access_id=250, user_id=1, tags=("hr",), share=0.1),
    Place(access_id=350, user_id=2, tags=("hr",), share=0.1),
    Place(access_id=450, scope="public", tags=("hr",), share=0.1),
    Place(access_id=550, scope="project", user_id=3, project_id="dock", share=0.1),
    Place(access_id=650, tenant_id="umbra", scope="public", share=0.08),
    Place(access_id=700, tenant_id="umbra", user_id=1, share=0.06),
    Place(access_id=750, tenant_id="umbra", user_id=2, share=0.06),
)

# How far rows lie from the middle of a cluster, as tangents: foreign rows in three densities, questions within the
# densest, and own rows beside them all.
DENSITIES = (0.02, 0.1, 0.25)
QUESTIONS = 0.02
BESIDE = (0.4, 0.8)

# Numbers of words. What foreign rows share with own ones is rare there where it is frequent here.
OWN_WORDS = range(300)
SHARED_WORDS = range(200)
FOREIGN_WORDS = range(300, 500)
# Kinds of questions: how many words of which.
KINDS: Mapping[str, tuple[tuple[range, int], ...]] = {
    "foreign alone": ((FOREIGN_WORDS, 4),),
    "foreign and own": ((FOREIGN_WORDS, 2), (OWN_WORDS, 2)),
    "rare here, frequent there": ((range(150, 200), 3),),
    "frequent here, rare there": ((range(20), 3),),
    "own alone": ((range(200, 300), 3),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Documents of one chunk each, in the order in which they are written."""

    ids: list[UUID]
    access_ids: NDArray[np.int64]
    languages: list[str | None]
    texts: list[str]
    vectors: Wholes

    def of(self, access_ids: Sequence[int]) -> Rows:
        """Those in some classes."""
        kept = np.flatnonzero(np.isin(self.access_ids, access_ids))
        return Rows(
            ids=[self.ids[row] for row in kept],
            access_ids=self.access_ids[kept],
            languages=[self.languages[row] for row in kept],
            texts=[self.texts[row] for row in kept],
            vectors=self.vectors[kept],
        )

    def cosines(self, questions: Sequence[Question]) -> Floats:
        """A row for each question, a column for each of these."""

        def normalised(vectors: Wholes) -> Floats:
            return vectors / np.linalg.norm(vectors.astype(float), axis=1, keepdims=True)

        cosines: Floats = normalised(np.array([question.vector for question in questions])) @ normalised(self.vectors).T
        return cosines


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked; the vector goes with it unless words alone are looked for."""

    kind: str
    text: str
    vector: Wholes
    arms: str
    fusion: str

    def parameters(self) -> dict[str, Any]:
        """Of sql/queries/search.sql."""
        unused = (
            *("scope", "document_ids", "min_similarity", "model_min_similarity", "budget_tokens", "only_domains"),
            *("only_doc_types", "only_source_types", "only_languages", "only_tags"),
            *("updated_from", "updated_before", "only_metadata"),
        )
        with_vector = self.arms != "keyword"
        return dict.fromkeys(unused) | {
            "question": self.text,
            "embedding": halfvec(self.vector) if with_vector else None,
            "embedding_model": MODEL if with_vector else None,
            "top_k": TOP_K,
            "max_per_document": 3,
            "duplicate_threshold": 0.9,
            "duplicate_candidates": 15,
            "include_dropped": True,
            "arms": self.arms,
            "fusion": self.fusion,
            "only_verified": False,
            "feedback_boost": 0.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    without: Deployment
    near: Deployment
    elsewhere: Deployment
    centres: Directions
    own: Rows
    foreign: Rows
    """Of `near`."""
    foreign_elsewhere: Rows


def halfvec(vector: Wholes) -> str:
    return "[" + ",".join(map(str, vector.tolist())) + "]"


# --- rows and questions ------------------------------------------------------------------------------


def directions(drawn: np.random.Generator, count: int) -> Directions:
    """Of length 1; any two of them are close to a right angle apart."""
    normal = drawn.standard_normal(size=(count, DIMENSIONS), dtype=np.float32)
    return normal / np.linalg.norm(normal, axis=1, keepdims=True)


def whole(vectors: Directions) -> Wholes:
    scaled = np.rint(SCALE * vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.int16)
    assert np.abs(scaled).max() <= 2048
    return scaled


def words(drawn: np.random.Generator, among: range, count: int) -> list[int]:
    """By Zipf's law, the first ones the most frequent."""
    weights = 1 / (np.arange(len(among)) + 5)
    return [among[place] for place in drawn.choice(len(among), size=count, p=weights / weights.sum())]


def spelled(stem: str, numbers: Sequence[int]) -> str:
    """Words of one length, in the same order in every index whatever the stem."""
    return " ".join(f"{stem}{number:03d}" for number in numbers)


def shared_out(drawn: np.random.Generator, places: Sequence[Place], count: int) -> NDArray[np.int64]:
    return drawn.choice([place.access_id for place in places], size=count, p=[place.share for place in places])


def own_rows(drawn: np.random.Generator, centres: Directions, *, small: int, large: int) -> Rows:
    """Half of them beside a cluster, the others anywhere."""
    access_ids = np.concatenate([shared_out(drawn, OWN_SMALL, small), shared_out(drawn, OWN_LARGE, large)])
    count = small + large
    topics = np.concatenate([centres, directions(drawn, 20)])
    beside, anywhere = (
        drawn.integers(*numbers, size=count) for numbers in ((0, len(centres)), (len(centres), len(topics)))
    )
    topic = np.where(drawn.random(count) < 0.5, beside, anywhere)
    away = drawn.uniform(*BESIDE, size=(count, 1)).astype(np.float32)
    return Rows(
        ids=[UUID(bytes=drawn.bytes(16), version=4) for _ in range(count)],
        access_ids=drawn.permutation(access_ids),
        languages=[None if drawn.random() < 0.2 else "en" for _ in range(count)],
        texts=[spelled("quay", words(drawn, OWN_WORDS, drawn.integers(8, 17))) for _ in range(count)],
        vectors=whole(topics[topic] + away * directions(drawn, count)),
    )


def foreign_rows(drawn: np.random.Generator, centres: Directions, *, around: int, stem: str, language: str) -> Rows:
    """So many about each centre; the same ones, about whatever centres and in whatever words, for the same state."""
    count = around * len(centres)
    texts = [
        words(drawn, FOREIGN_WORDS, 5) + words(drawn, SHARED_WORDS[::-1], drawn.integers(4, 10)) for _ in range(count)
    ]
    away = np.repeat(np.array(DENSITIES, dtype=np.float32), around)[:, None]
    order = drawn.permutation(count)
    return Rows(
        ids=[UUID(bytes=drawn.bytes(16), version=4) for _ in range(count)],
        access_ids=shared_out(drawn, FOREIGN, count),
        languages=[("en", None, language)[drawn.integers(3)] for _ in range(count)],
        texts=[spelled(stem, text) for text in texts],
        vectors=whole(np.repeat(centres, around, axis=0) + away * directions(drawn, count))[order],
    )


def questions(
    centres: Directions, count: int, *, kinds: Sequence[str] = tuple(KINDS), arms: Sequence[str] = ("hybrid", "keyword")
) -> Iterator[Question]:
    """Each within a cluster; of all kinds, arms and fusions in turn."""
    drawn = np.random.default_rng(SEED + 2)
    ways = [(kind, arm, fusion) for kind in kinds for arm in arms for fusion in ("rank", "score")]
    for _, (kind, arm, fusion) in zip(range(count), cycle(ways), strict=False):
        centre = centres[drawn.integers(len(centres))]
        yield Question(
            kind=kind,
            text=spelled("quay", [int(word) for among, many in KINDS[kind] for word in drawn.choice(among, many)]),
            vector=whole(centre[None] + QUESTIONS * directions(drawn, 1))[0],
            arms=arm,
            fusion=fusion,
        )


# --- databases ---------------------------------------------------------------------------------------

_CLASS = """
    insert into rag.rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest)
    values (%(tenant_id)s, %(access_id)s, %(scope)s, %(user_id)s, %(project_id)s, %(tags)s,
        sha256(convert_to(array_to_json(%(tags)s::text[])::text, 'UTF8')))
"""
_DOCUMENTS = """
    insert into rag.rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type, source_id,
        source_hash, title, body, language)
    select class.tenant_id, given.id, class.access_id, class.scope, class.user_id, class.project_id, class.tags, 'text',
        given.id::text, 'hash', 'A document', given.content, given.language
    from unnest(%(ids)s::uuid[], %(access_ids)s::bigint[], %(languages)s::text[], %(texts)s::text[])
        with ordinality as given (id, access_id, language, content, place)
    join rag.rag_access_classes as class on class.access_id = given.access_id
    order by given.place
"""
_CHUNKS = """
    insert into rag.rag_chunks (tenant_id, access_id, id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
        token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count, language)
    select class.tenant_id, class.access_id, given.id, given.id, 0, given.content, 'hash', 12, 'words', 0,
        length(given.content), given.embedding::rag.halfvec, %(model)s, words.tsv, rag.lexeme_total(words.tsv),
        given.language
    from unnest(
        %(ids)s::uuid[], %(access_ids)s::bigint[], %(languages)s::text[], %(texts)s::text[], %(embeddings)s::text[]
    ) with ordinality as given (id, access_id, language, content, embedding, place)
    join rag.rag_access_classes as class on class.access_id = given.access_id
    cross join lateral to_tsvector(rag.text_search_config(given.language), given.content) as words (tsv)
    order by given.place
"""
PER_STATEMENT = 500
# Autovacuum's of the catalog.
SNAPSHOTS_END_S = 120


def load(deployment: Deployment, places: Sequence[Place], rows: Rows) -> None:
    """Write classes and rows as the superuser, one after the other."""
    with deployment.cluster.superuser(deployment.name) as superuser, superuser.transaction():
        for place in places:
            superuser.execute(_CLASS, asdict(place) | {"tags": list(place.tags)})
        for first in range(0, len(rows.ids), PER_STATEMENT):
            some = slice(first, first + PER_STATEMENT)
            parameters = {
                "ids": rows.ids[some],
                "access_ids": rows.access_ids[some].tolist(),
                "languages": rows.languages[some],
                "texts": rows.texts[some],
                "embeddings": [halfvec(vector) for vector in rows.vectors[some]],
                "model": MODEL,
            }
            superuser.execute(_DOCUMENTS, parameters)
            superuser.execute(_CHUNKS, parameters)


def leave_alone(deployment: Deployment) -> None:
    """Keep autovacuum away, which would treat two databases at two times."""
    with deployment.cluster.superuser(deployment.name) as superuser:
        for table in protected_tables(superuser):
            superuser.execute(f"alter table rag.{table} set (autovacuum_enabled = off)".encode())


def settle(deployment: Deployment, settings: Settings, limits: Limits) -> None:
    """What the product's maintenance does for large classes, then what autovacuum would do."""
    desk = Desk(operator_url=deployment.url("rag_operator"), administrator_url=None)
    with maintain.alone(desk, settings, owner_url=deployment.url("rag_migrator"), limits=limits) as turn:
        assert turn is not None
        steps = maintain.plan(turn.survey(), limits, refresh=True).steps
        assert turn.carry_out(steps, lambda *_: None) == []
    unmarked = "select 1 from pg_class where relname ~ '^rag_' and relkind = 'r' and relallvisible < relpages"
    with deployment.cluster.superuser(deployment.name) as superuser:
        # A sample of all rows: by a smaller one, two tables of the same numbers would be judged differently.
        superuser.execute("set default_statistics_target = 10000")
        superuser.execute("vacuum analyze")
        # As long as somebody has an older snapshot, pages stay unmarked, which cost an index-only scan more.
        ends = time.monotonic() + SNAPSHOTS_END_S
        while superuser.execute(unmarked).fetchone():
            assert time.monotonic() < ends
            time.sleep(0.1)
            superuser.execute("vacuum analyze")


@contextmanager
def surrounded(new_deployment: NewDeployment, settings: Settings, *, large: int, around: int) -> Iterator[Site]:
    """A site of so many rows in the asker's large class, and so many foreign ones about each of three centres."""
    drawn = np.random.default_rng(SEED)
    centres = directions(drawn, 2 * len(DENSITIES))
    centres, centres_elsewhere = np.split(centres, 2)
    own = own_rows(drawn, centres, small=500, large=large)
    limits = Limits(threshold=min(maintain.THRESHOLD, large * 2 // 3), most_classes=2)
    with new_deployment() as without:
        leave_alone(without)
        load(without, OWN_SMALL + OWN_LARGE, own)
        settle(without, settings, limits)
        with clone(without.cluster, without.name) as near, clone(without.cluster, without.name) as elsewhere:
            foreign = []
            for deployment, points, stem, language in (
                (near, centres, "quay", "ru"),
                (elsewhere, centres_elsewhere, "pier", "fi"),
            ):
                made = np.random.default_rng(SEED + 1)
                foreign.append(foreign_rows(made, points, around=around, stem=stem, language=language))
                load(deployment, FOREIGN, foreign[-1])
                settle(deployment, settings, limits)
            yield Site(
                without=without,
                near=near,
                elsewhere=elsewhere,
                centres=centres,
                own=own,
                foreign=foreign[0],
                foreign_elsewhere=foreign[1],
            )


# --- what a search says, and what it reads -------------------------------------------------------------

Answer = list[dict[str, Any]]

_SEARCH = query("search").encode()
_EXPLAIN = b"explain (analyze, buffers, verbose, costs off, timing off, summary off, format json) "
# EXPLAIN sees one call of a function. What the plans inside of it did is in the session's own counters.
_COUNTERS = """
    select
        class.relname,
        array[
            pg_stat_get_xact_numscans(class.oid),
            pg_stat_get_xact_tuples_returned(class.oid),
            pg_stat_get_xact_tuples_fetched(class.oid),
            pg_stat_get_xact_blocks_fetched(class.oid)
        ]
    from pg_class as class
    where class.relnamespace = 'rag'::regnamespace and class.relkind in ('r', 'i')
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Whatever is the same for two searches that read alike."""

    plan: str
    """As EXPLAIN tells it, buffers apart."""
    buffers: int
    """Hit or read, of tables, indexes and the catalog."""
    relations: Mapping[str, tuple[int, ...]]
    """Of each table and index that was read: scans, entries read, rows fetched, blocks."""

    @property
    def entries(self) -> dict[str, tuple[int, ...]]:
        """The same without the blocks."""
        return {name: counts[:3] for name, counts in self.relations.items() if any(counts[:3])}


@contextmanager
def asking(deployment: Deployment, principal: Principal, leak: Spoil | None = None) -> Iterator[psycopg.Connection]:
    """A transaction of the service for a principal; with a leak, of a superuser who makes it, and then is the service.

    It is undone.
    """
    login = "rag_app" if leak is None else "postgres"
    with deployment.connect(login) as connection, connection.transaction(force_rollback=True):
        if leak is not None:
            leak(connection)
            connection.execute("set local session authorization rag_app")
            connection.execute("set local search_path = rag, pg_temp")
        begin(connection, principal, login="rag_app")
        yield connection


def answer(connection: psycopg.Connection, question: Question) -> Answer:
    """All candidates, those that were dropped last; scores rounded, since a plan may add their parts in any order."""
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_SEARCH, question.parameters()).fetchall()
    return [
        {name: round(value, 12) if isinstance(value, float) else value for name, value in row.items()} for row in rows
    ]


def found(answered: Answer) -> list[dict[str, Any]]:
    return [row for row in answered if row["rank"] is not None]


def reads(connection: psycopg.Connection, question: Question) -> Reads:
    before = dict(connection.execute(_COUNTERS).fetchall())
    ((explained,),) = connection.execute(_EXPLAIN + _SEARCH, question.parameters()).fetchall()
    after = dict(connection.execute(_COUNTERS).fetchall())
    plan = explained[0]["Plan"]
    blocks = {name: plan.pop(name) for name in list(plan) if name.startswith("Shared ")}
    counted = {name: tuple(np.subtract(after[name], before[name]).tolist()) for name in after}
    return Reads(
        plan=json.dumps(plan),
        buffers=blocks["Shared Hit Blocks"] + blocks["Shared Read Blocks"],
        relations={name: counts for name, counts in counted.items() if any(counts)},
    )
