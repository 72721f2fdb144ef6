"""Every way to read, asked by random sessions, and compared with the model.

Every second question carries a condition that eavesdrops: a function of the caller's that the planner takes for the
cheapest thing there is, and that remembers what it was called with.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from random import Random
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from tests.barrier.oracle_model import (
    AccessClass,
    Corpus,
    Document,
    Finding,
    Report,
    SessionVariables,
    Sight,
    sight_of,
    sight_of_analyst,
)
from tests.barrier.oracle_world import (
    MODELS,
    PLAN_MODES,
    WORDS,
    Keys,
    Names,
    Session,
    Speaker,
    apply_step,
    enlarge,
    plant,
    random_corpus,
    uuid,
    vector,
)
from tests.conftest import Deployment

Rows = Counter[tuple[Any, ...]]

# Costs nothing, says the catalogue: so the planner calls it first, where it may.
EAVESDROPPER = """
create function eavesdrop.heard(path text, value {type})
returns boolean
language plpgsql
volatile
cost 0.0000001
as $$
begin
    perform set_config(
        'eavesdrop.heard', current_setting('eavesdrop.heard', true) || path || chr(30) || value || chr(31), false
    );
    return true;
end
$$
"""
TAKE_HEARD = "select current_setting('eavesdrop.heard', true), set_config('eavesdrop.heard', '', false)"


# --- questions -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    path: str
    statement: str
    parameters: dict[str, Any]
    expected: Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a question is made from: a corpus, names, and chance."""

    random: Random
    names: Names
    corpus: Corpus

    def document_id(self) -> UUID:
        if self.corpus.documents and self.random.random() < 0.9:
            return self.random.choice(self.corpus.documents).id
        return uuid(self.random)

    def document_ids(self) -> list[UUID]:
        return [self.document_id() for _ in range(self.random.choice((0, 1, 3, 8)))]

    def access_ids(self) -> list[int]:
        known = [access.access_id for access in self.corpus.classes]
        return [*self.random.sample(known, min(len(known), 6)), self.random.getrandbits(60)]


Asked = tuple[dict[str, Any], Iterable[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A way to read. `statement` ends where a condition can be added; `overheard` is what that hears of a row.

    `ask` gives the parameters and, from what the session may see, the rows that have to come.
    """

    name: str
    statement: str
    overheard: str
    ask: Callable[[Place, Sight], Asked]
    weight: int = 1
    after: str = ""

    def question(self, place: Place, sight: Sight) -> Question:
        parameters, expected = self.ask(place, sight)
        statement = self.statement
        if place.random.random() < 0.5:
            condition = "and" if " where " in statement else "where"
            statement += f" {condition} eavesdrop.heard('{self.name}', {self.overheard})"
        return Question(
            path=self.name,
            statement=f"{statement} {self.after}",
            parameters=parameters,
            expected=Counter(expected),
        )


def _key(document: Document) -> tuple[str, int, UUID]:
    return document.access.tenant, document.access.access_id, document.id


def _without_parameters(rows: Callable[[Sight], Iterable[tuple[Any, ...]]]) -> Callable[[Place, Sight], Asked]:
    return lambda place, sight: ({}, rows(sight))


def _owned(access: AccessClass) -> tuple[Any, ...]:
    return access.scope, access.owner, access.project, access.tags


def _documents(sight: Sight) -> Iterator[tuple[Any, ...]]:
    for row in sight.documents:
        yield (*_key(row), *_owned(row.access), row.title, row.body, row.source_type, row.source_id)


def _chunks(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return ((*_key(document), chunk.index, chunk.text, chunk.embedding_model) for document, chunk in sight.chunks)


def _chunk_keys(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return ((*_key(document), chunk.id, chunk.index) for document, chunk in sight.chunks)


def _listed(sight: Sight) -> Iterator[tuple[Any, ...]]:
    for row in sight.documents:
        yield (row.access.tenant, row.id, *_owned(row.access), row.title, row.source_id, row.title, len(row.body))
    for row in sight.listed:
        access = row.access
        yield (access.tenant, row.id, access.scope, access.owner, None, access.tags, None, None, None, None)


def _told_of_chunks(sight: Sight) -> Iterator[tuple[Any, ...]]:
    for row, chunk in sight.chunks:
        source = f"{row.id}:{chunk.index}"
        yield (row.access.tenant, row.id, chunk.index, source, row.title, row.access.scope, chunk.text)


def _one_document(place: Place, sight: Sight) -> Asked:
    wanted = place.document_id()
    return {"id": wanted}, [
        (*_key(row), row.title, row.body, row.source_id) for row in sight.documents if row.id == wanted
    ]


def _chunks_of_one(place: Place, sight: Sight) -> Asked:
    wanted = place.document_id()
    return {"id": wanted}, [
        (*_key(document), chunk.id, chunk.index, chunk.text)
        for document, chunk in sight.chunks
        if document.id == wanted
    ]


def _listed_ids(place: Place, sight: Sight) -> Asked:
    wanted = place.document_ids()
    return {"ids": wanted}, [_key(row) for row in sight.documents if row.id in wanted]


def _among(place: Place, sight: Sight) -> Asked:
    wanted = place.document_ids()
    return {"ids": wanted}, [(row.id,) for row in sight.documents if row.id in wanted]


def _sources(place: Place, sight: Sight) -> Asked:
    wanted = place.random.sample(["docs/page-1.md", "docs/page-2.md", "docs/page-3.md", "docs/page-4.md"], 2)
    return {"sources": wanted}, [(row.source_id, row.id) for row in sight.documents if row.source_id in wanted]


def _count_in_classes(place: Place, sight: Sight) -> Asked:
    wanted = place.access_ids()
    return {"ids": wanted}, [(sum(row.access.access_id in wanted for row in sight.documents),)]


def _count_in_tenant(place: Place, sight: Sight) -> Asked:
    tenant = place.random.choice(place.names.tenants)
    return {"tenant": tenant}, [(sum(row.access.tenant == tenant for row in sight.documents),)]


def _per_class(place: Place, sight: Sight) -> Asked:
    counts = Counter((document.access.tenant, document.access.access_id) for document, _ in sight.chunks)
    return {}, [(*key, count) for key, count in counts.items()]


def _exists(place: Place, sight: Sight) -> Asked:
    wanted = place.document_id()
    return {"id": wanted}, [(any(row.id == wanted for row in sight.documents),)]


def _whoami(sight: Sight) -> Iterator[tuple[Any, ...]]:
    who = sight.identity
    if who is None:
        return
    told = (who.tenant, who.user, who.project, who.tags)
    if not sight.classes:
        yield (*told, None, None, None, None, None, None)
    for access, writable in sight.classes:
        yield (*told, access.access_id, *_owned(access), writable)


def _classes(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return ((*access.key, *_owned(access), writable) for access, writable in sight.classes)


def _members(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return ((row.owner, row.project, row.member, row.may_write) for row in sight.memberships)


def _questions(sight: Sight) -> Iterator[tuple[Any, ...]]:
    for row in sight.questions:
        yield (row.tenant, row.id, row.user, row.project, row.text, len(row.hits))


def _unanswered(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return (row[:5] for row in _questions(sight) if row[5] == 0)


def _hits(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return ((row.tenant, row.id, row.user, rank, document_id) for row, rank, document_id in sight.hits)


def _usage(sight: Sight) -> Iterator[tuple[Any, ...]]:
    hits = Counter((row.tenant, document_id) for row, _, document_id in sight.hits)
    usage: Counter[tuple[Any, ...]] = Counter()
    for row in sight.documents:
        usage[row.access.tenant, row.id, row.title, row.source_type, row.source_id] += hits[row.access.tenant, row.id]
    for row in sight.listed:
        usage[row.access.tenant, row.id, None, row.source_type, None] += hits[row.access.tenant, row.id]
    return ((*key, count) for key, count in usage.items())


def _stale(sight: Sight) -> Iterator[tuple[Any, ...]]:
    """Everything in a corpus is older than half a year."""
    return ((*row[:2], row[6], row[7]) for row in _listed(sight))


def _latency(sight: Sight) -> Iterator[tuple[Any, ...]]:
    return iter(Counter(row.tenant for row in sight.questions).items())


def _found_source(place: Place, sight: Sight) -> Asked:
    access = place.random.choice(place.corpus.classes)
    source = ("text", f"docs/page-{place.random.randint(1, 3)}.md")
    found = [
        (row.id, row.access.access_id, 0)
        for row in sight.documents
        if _owned(row.access)[:3] == _owned(access)[:3] and (row.source_type, row.source_id) == source
    ]
    return {
        "access": access.access_id,
        "scope": access.scope,
        "owner": access.owner,
        "project": access.project,
        "type": source[0],
        "source": source[1],
    }, found or [(None, None, 0)]


def _search(*, words: bool, vectors: bool) -> Callable[[Place, Sight], Asked]:
    def ask(place: Place, sight: Sight) -> Asked:
        random = place.random
        asked = frozenset(random.sample(WORDS, random.choice((1, 2, 5)))) if words else frozenset()
        model = random.choices((*MODELS, "model-c"), (5, 2, 1))[0] if vectors else None
        scope = random.choice((None, None, None, "public", "user", "project", "organization", "documents"))
        only = place.document_ids() if scope == "documents" or random.random() < 0.2 else None
        mode, found = sight.found(asked, embedding_model=model, scope=scope, document_ids=only)
        question = " ".join(sorted(asked))
        parameters = {
            "question": question.upper() if random.random() < 0.2 else question,
            "embedding": vector([float(random.randint(1, 9)) for _ in range(4)]) if vectors else None,
            "model": model,
            "scope": scope,
            "ids": only,
        }
        return parameters, [
            (row.id, chunk.index, chunk.id, chunk.text, row.title, row.access.scope, row.access.tags, mode)
            for row, chunk in found
        ]

    return ask


def _mode(place: Place, sight: Sight) -> Asked:
    random = place.random
    model = random.choice((*MODELS, "model-c"))
    scope = random.choice((None, "public", "user", "project", "organization", "documents"))
    only = place.document_ids() if random.random() < 0.5 else None
    mode, _ = sight.found(frozenset(), embedding_model=model, scope=scope, document_ids=only)
    _, all_of_it = sight.found(frozenset(WORDS), embedding_model=model, scope=scope, document_ids=only)
    return {"model": model, "scope": scope, "ids": only}, [(mode if all_of_it else "",)]


_SEARCH = """
select document_id, chunk_index, chunk_id, chunk_text, title, document_scope, tags, mode
from rag.search(
    %(question)s, embedding => cast(%(embedding)s as rag.halfvec), embedding_model => %(model)s,
    scope => %(scope)s, document_ids => cast(%(ids)s as uuid[]),
    top_k => 1000, max_per_document => 1000, duplicate_threshold => 1
)
"""
_HEARD_DOCUMENT = "tenant_id || '/' || access_id || '/' || id"
_HEARD_CHUNK = "tenant_id || '/' || access_id || '/' || document_id || ':' || chunk_index"

PATHS = (
    Path(
        name="search by keywords",
        statement=_SEARCH,
        overheard="chunk_text",
        ask=_search(words=True, vectors=False),
        weight=2,
    ),
    Path(
        name="search by vectors",
        statement=_SEARCH,
        overheard="title",
        ask=_search(words=False, vectors=True),
        weight=2,
    ),
    Path(
        name="hybrid search",
        statement=_SEARCH,
        overheard="chunk_text",
        ask=_search(words=True, vectors=True),
        weight=2,
    ),
    Path(
        name="search_mode",
        statement="""
            select replace(mode, 'none', '') from rag.search_mode(%(model)s, %(scope)s, cast(%(ids)s as uuid[])) as mode
        """,
        overheard="mode",
        ask=_mode,
    ),
    Path(
        name="my_document",
        statement="""
            select tenant_id, access_id, id, title, body, source_id from rag.my_document(%(id)s)
        """,
        overheard="body",
        ask=_one_document,
        weight=2,
    ),
    Path(
        name="my_document_chunks",
        statement="""
            select tenant_id, access_id, document_id, id, chunk_index, chunk_text
            from rag.my_document_chunks(%(id)s)
        """,
        overheard="chunk_text",
        ask=_chunks_of_one,
        weight=2,
    ),
    Path(
        name="my_documents_among",
        statement="select document_id from rag.my_documents_among(cast(%(ids)s as uuid[]))",
        overheard="document_id",
        ask=_among,
    ),
    Path(
        name="my_sources_among",
        statement="select source_id, document_id from rag.my_sources_among(cast(%(sources)s as text[]))",
        overheard="document_id",
        ask=_sources,
    ),
    Path(
        name="my_documents",
        statement="""
            select tenant_id, access_id, id, scope, user_id, project_id, tags, title, body, source_type, source_id
            from rag.my_documents()
        """,
        overheard="title",
        ask=_without_parameters(_documents),
    ),
    Path(
        name="my_chunks",
        statement="""
            select tenant_id, access_id, document_id, chunk_index, chunk_text, embedding_model from rag.my_chunks()
        """,
        overheard="chunk_text",
        ask=_without_parameters(_chunks),
    ),
    Path(
        name="v_documents",
        statement="""
            select tenant_id, document_id, scope, user_id, project_id, tags, title, source_id, metadata ->> 'title',
                body_characters
            from rag.v_documents
        """,
        overheard="coalesce(title, document_id::text)",
        ask=_without_parameters(_listed),
        weight=2,
    ),
    Path(
        name="v_chunks",
        statement="""
            select tenant_id, document_id, chunk_index, source_id, title, scope, chunk_text from rag.v_chunks
        """,
        overheard="chunk_text",
        ask=_without_parameters(_told_of_chunks),
        weight=2,
    ),
    Path(
        name="my_classes",
        statement="""
            select tenant_id, access_id, scope, user_id, project_id, tags, may_write from rag.my_classes()
        """,
        overheard="tenant_id || '/' || access_id",
        ask=_without_parameters(_classes),
    ),
    Path(
        name="whoami",
        statement="""
            select tenant_id, user_id, project_id, tags, access_id, scope, class_user_id, class_project_id, class_tags,
                may_write
            from rag.whoami()
        """,
        overheard="coalesce(tenant_id || '/' || access_id, '')",
        ask=_without_parameters(_whoami),
    ),
    Path(
        name="my_members",
        statement="select owner_user_id, project_id, member_user_id, may_write from rag.my_members()",
        overheard="owner_user_id || '>' || member_user_id",
        ask=_without_parameters(_members),
    ),
    Path(
        name="my_queries",
        statement="""
            select tenant_id, query_id, user_id, project_id, query_text, result_count from rag.my_queries()
        """,
        overheard="coalesce(query_text, '')",
        ask=_without_parameters(_questions),
    ),
    Path(
        name="my_query_chunks",
        statement="select tenant_id, query_id, user_id, rank, document_id from rag.my_query_chunks()",
        overheard="query_id",
        ask=_without_parameters(_hits),
    ),
    Path(
        name="v_empty_results",
        statement="select tenant_id, query_id, user_id, project_id, query_text from rag.v_empty_results",
        overheard="coalesce(query_text, '')",
        ask=_without_parameters(_unanswered),
    ),
    Path(
        name="v_source_usage",
        statement="""
            select tenant_id, document_id, title, source_type, source_id, times_retrieved from rag.v_source_usage
        """,
        overheard="coalesce(title, '')",
        ask=_without_parameters(_usage),
    ),
    Path(
        name="v_stale_documents",
        statement="select tenant_id, document_id, title, source_id from rag.v_stale_documents",
        overheard="coalesce(title, '')",
        ask=_without_parameters(_stale),
    ),
    Path(
        name="v_query_latency",
        statement="select tenant_id, queries from rag.v_query_latency",
        overheard="latency_max_ms::text",
        ask=_without_parameters(_latency),
    ),
    Path(
        name="find_source",
        statement="""
            select id, document_access_id, generation
            from rag.find_source(
                %(access)s, %(scope)s, cast(%(owner)s as bigint), %(project)s, %(type)s, %(source)s
            )
        """,
        overheard="coalesce(id::text, '')",
        ask=_found_source,
    ),
    Path(
        name="look_at_source",
        statement="""
            select id, document_access_id, generation
            from rag.look_at_source(
                %(access)s, %(scope)s, cast(%(owner)s as bigint), %(project)s, %(type)s, %(source)s, null
            )
        """,
        overheard="coalesce(id::text, '')",
        ask=_found_source,
    ),
    Path(
        name="my_access_ids",
        statement="select access_id from unnest(rag.my_access_ids()) as access_id",
        overheard="access_id",
        ask=_without_parameters(lambda sight: ((access.access_id,) for access, _ in sight.classes)),
    ),
    Path(
        name="my_writable_access_ids",
        statement="select access_id from unnest(rag.my_writable_access_ids()) as access_id",
        overheard="access_id",
        ask=_without_parameters(lambda sight: ((access.access_id,) for access, writable in sight.classes if writable)),
    ),
    Path(
        name="keys of rag_documents",
        statement="select tenant_id, access_id, id from rag.rag_documents",
        overheard="id",
        ask=_without_parameters(lambda sight: map(_key, sight.documents)),
    ),
    Path(
        name="rag_documents by id",
        statement="select tenant_id, access_id, id from rag.rag_documents where id = any(%(ids)s)",
        overheard=_HEARD_DOCUMENT,
        ask=_listed_ids,
    ),
    Path(
        name="count of rag_documents",
        statement="select count(*) from rag.rag_documents",
        overheard="access_id",
        ask=_without_parameters(lambda sight: [(len(sight.documents),)]),
    ),
    Path(
        name="count of rag_documents by class",
        statement="select count(*) from rag.rag_documents where access_id = any(%(ids)s)",
        overheard=_HEARD_DOCUMENT,
        ask=_count_in_classes,
    ),
    Path(
        name="count of rag_documents by tenant",
        statement="select count(*) from rag.rag_documents where tenant_id = %(tenant)s",
        overheard=_HEARD_DOCUMENT,
        ask=_count_in_tenant,
    ),
    Path(
        name="existence in rag_documents",
        statement="select exists (select from rag.rag_documents where id = %(id)s",
        overheard=_HEARD_DOCUMENT,
        ask=_exists,
        after=")",
    ),
    Path(
        name="keys of rag_chunks",
        statement="select tenant_id, access_id, document_id, id, chunk_index from rag.rag_chunks",
        overheard="id",
        ask=_without_parameters(_chunk_keys),
    ),
    Path(
        name="count of rag_chunks",
        statement="select count(*) from rag.rag_chunks",
        overheard="tenant_id",
        ask=_without_parameters(lambda sight: [(sum(1 for _ in sight.chunks),)]),
    ),
    Path(
        name="rag_chunks by class",
        statement="select tenant_id, access_id, count(*) from rag.rag_chunks",
        overheard=_HEARD_CHUNK,
        ask=_per_class,
        after="group by tenant_id, access_id",
    ),
    Path(
        name="rag_chunks joined with rag_documents",
        statement="""
            select document.tenant_id, document.access_id, document.id, chunk.id, chunk.chunk_index
            from rag.rag_chunks as chunk
            join rag.rag_documents as document
                on document.tenant_id = chunk.tenant_id
                and document.access_id = chunk.access_id
                and document.id = chunk.document_id
        """,
        overheard="chunk.tenant_id || '/' || chunk.access_id || '/' || chunk.document_id || ':' || chunk.chunk_index",
        ask=_without_parameters(_chunk_keys),
    ),
)
# What a person's own login may not call.
_FOR_THE_SERVICE = (
    *("my_document_chunks", "my_documents_among", "my_sources_among", "find_source", "my_members"),
    "look_at_source",
    "my_writable_access_ids",
)
PATHS_OF_ANALYSTS = tuple(
    path for path in PATHS if path.name not in _FOR_THE_SERVICE and "rag.rag_" not in path.statement
)


def audible(sight: Sight) -> set[str]:
    """All that the eavesdropper may be told."""
    return {
        "",
        "1",
        "none",
        "keyword",
        "partial",
        "hybrid",
        *(
            text
            for access, _ in sight.classes
            for text in (f"{access.tenant}/{access.access_id}", str(access.access_id))
        ),
        *(row.access.tenant for row in sight.documents),
        *(str(row.id) for row in sight.documents),
        *(str(chunk.id) for _, chunk in sight.chunks),
        *(f"{row.owner}>{row.member}" for row in sight.memberships),
        *("/".join(map(str, _key(row))) for row in sight.documents),
        *("/".join(map(str, _key(row))) + f":{chunk.index}" for row, chunk in sight.chunks),
        *(text for row in sight.documents for text in (row.title, row.body)),
        *(chunk.text for _, chunk in sight.chunks),
        *(str(row.id) for row in sight.listed),
        *(str(row.id) for row in sight.questions),
        *(row.text for row in sight.questions if row.text),
    }


# --- asking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A connection that many sessions use one after the other, without anything in between."""

    connection: psycopg.Connection
    login: str
    plan_mode: str
    prepared: bool
    in_workers: bool = False

    def __str__(self) -> str:
        workers = ", in parallel workers" if self.in_workers else ""
        return f"{self.plan_mode}, {'prepared' if self.prepared else 'not prepared'}{workers}"


# What any login may say to the planner: how rows are reached decides what is evaluated on them first.
_NO_INDEXES = ("enable_indexscan", "enable_indexonlyscan", "enable_bitmapscan")
_SWITCHED_OFF = {"auto": _NO_INDEXES, "force_generic_plan": (), "force_custom_plan": ("enable_seqscan",)}


@contextmanager
def lines(deployment: Deployment, logins: Sequence[str], *, only_prepared: bool = False) -> Iterator[list[Line]]:
    """Connections of each login: one for each plan-cache mode, with prepared statements and without, and one whose
    statements run in parallel workers wherever the planner takes that for safe."""
    ways: list[tuple[str, int | None, bool]] = [(mode, number % 2, False) for number, mode in enumerate(PLAN_MODES)]
    if not only_prepared:
        ways += [*((mode, None, False) for mode in PLAN_MODES), ("auto", 0, True)]
    with ExitStack() as stack:
        opened = []
        for login, (plan_mode, threshold, in_workers) in product(logins, ways):
            connection = stack.enter_context(deployment.connect(login))
            connection.prepare_threshold = threshold
            connection.execute(sql.SQL("set plan_cache_mode = {}").format(plan_mode))
            for switch in _SWITCHED_OFF[plan_mode] if threshold is None else ():
                connection.execute(sql.SQL("set {} = off").format(sql.Identifier(switch)))
            if in_workers:
                connection.execute("set debug_parallel_query = on")
            connection.execute("select set_config('eavesdrop.heard', '', false)")
            opened.append(
                Line(
                    connection=connection,
                    login=login,
                    plan_mode=plan_mode,
                    prepared=threshold is not None,
                    in_workers=in_workers,
                )
            )
        yield opened


@contextmanager
def analyst_logins(deployment: Deployment, roles: Sequence[str]) -> Iterator[None]:
    """Personal logins in the group rag_analyst, for as long as the block lasts."""
    with deployment.cluster.superuser(deployment.name) as superuser:
        for role in roles:
            superuser.execute(
                sql.SQL("create role {} login password {} in role rag_analyst").format(
                    sql.Identifier(role), deployment.cluster.password
                )
            )
        try:
            yield
        finally:
            for role in roles:
                superuser.execute(sql.SQL("drop role {}").format(sql.Identifier(role)))


@contextmanager
def read_oracle(
    deployment: Deployment,
    *,
    seed: int,
    only_prepared: bool = False,
    spoil: Callable[[psycopg.Connection], None] = lambda superuser: None,
) -> Iterator[ReadOracle]:
    """An oracle over a migrated database that nobody else uses. `spoil` breaks it first."""
    # Roles are shared by all databases of a server.
    analysts = [f"oracle_{secrets.token_hex(4)}" for _ in range(2)]
    with deployment.cluster.superuser(deployment.name) as superuser:
        superuser.execute("create schema eavesdrop")
        superuser.execute("grant usage on schema eavesdrop to public")
        for kind in ("text", "uuid", "bigint"):
            superuser.execute(sql.SQL(EAVESDROPPER).format(type=sql.SQL(kind)))
        spoil(superuser)
        keys = Keys.made(superuser)
        with (
            analyst_logins(deployment, analysts),
            lines(deployment, ["rag_app", "rag_publisher", *analysts], only_prepared=only_prepared) as opened,
        ):
            yield ReadOracle(superuser=superuser, keys=keys, lines=opened, analysts=analysts, seed=seed)


@dataclass(slots=True, kw_only=True)
class ReadOracle:
    """Asks, compares, reports."""

    superuser: psycopg.Connection
    keys: Keys
    lines: Sequence[Line]
    analysts: Sequence[str]
    seed: int
    report: Report = field(init=False)
    asked: Counter[tuple[str, str, bool]] = field(default_factory=Counter)
    """How often each path, by plan-cache mode and whether statements were prepared."""
    answered: int = 0
    """Questions that some row answers."""

    def __post_init__(self) -> None:
        self.report = Report(seed=self.seed)

    def run(
        self,
        *,
        triples: int,
        corpora: int,
        large: bool = False,
        until: Callable[[Report], bool] = lambda report: False,
    ) -> Report:
        """As many triples of session, corpus and question, spread over as many corpora, or fewer with `until`.

        `large`: in every other corpus some classes have indexes of their own.
        """
        per_corpus = -(-triples // corpora)
        # A worker takes milliseconds to start.
        weights = [1 if line.login in self.analysts or line.in_workers else 3 for line in self.lines]
        for number in range(corpora):
            random = Random(f"{self.seed} reading {number}")
            names = Names.chosen(random)
            corpus = random_corpus(random, names, analysts=self.analysts)
            plant(self.superuser, corpus)
            if large and number % 2:
                enlarge(self.superuser, corpus)
            self.report.corpora += 1
            end = min(self.report.checks + per_corpus, triples)
            while self.report.checks < end:
                if until(self.report):
                    return self.report
                line = random.choices(self.lines, weights)[0]
                speaker = Speaker(random=random, names=names, keys=self.keys, login=line.login)
                left = end - self.report.checks
                self.visit(line, speaker.any(), Place(random=random, names=names, corpus=corpus), most=left)
        return self.report

    def visit(self, line: Line, session: Session, place: Place, *, most: int) -> None:
        """One session: whom it becomes, what it asks, what it overhears."""
        connection = line.connection
        variables = SessionVariables(login=line.login, keys=self.keys.valid, began_at=self.keys.now())

        def differs(kind: str, path: str, detail: str) -> None:
            self.report.add(
                Finding(
                    kind=kind,
                    path=path,
                    where=f"corpus {self.report.corpora - 1}, {line}",
                    session=str(session),
                    detail=detail,
                ),
                session_kind=session.kind,
            )

        if session.in_transaction:
            connection.execute("begin")
        path = "begin_as"
        try:
            for step in session.steps:
                foreseen = variables.take(step)
                refused = apply_step(connection, step, place.random, refusal=bool(foreseen))
                if not session.in_transaction:
                    # A variable that is set for a transaction is gone with its own statement.
                    variables.values.clear()
                if bool(foreseen) != bool(refused) or refused not in foreseen | {None}:
                    differs("error", path, f"{step} gave {refused}, not one of {sorted(foreseen)}")
            sight = (
                sight_of_analyst(place.corpus, line.login)
                if line.login in self.analysts
                else sight_of(place.corpus, variables.identity(), login=line.login)
            )
            paths = PATHS_OF_ANALYSTS if line.login in self.analysts else PATHS
            weights = [path.weight for path in paths]
            # Whoever is nobody sees nothing soon.
            count = min(most, place.random.choice((6, 9, 12) if sight.documents else (2, 3, 4)))
            for chosen in place.random.choices(paths, weights, k=count):
                path = chosen.name
                question = chosen.question(place, sight)
                self.report.checks += 1
                self.asked[chosen.name, line.plan_mode, line.prepared] += 1
                self.answered += any(row != (0,) and row != (False,) for row in question.expected)
                rows = Counter(
                    tuple(tuple(value) if isinstance(value, list) else value for value in row)
                    for row in connection.execute(question.statement, question.parameters)
                )
                asked = {name: value for name, value in question.parameters.items() if name != "embedding"}
                for kind, detail in _differences(rows, question.expected):
                    differs(kind, path, f"{asked}: {detail}; seen by {sight.identity}")
            path = "eavesdropper"
            heard = connection.execute(TAKE_HEARD).fetchone()
            allowed = audible(sight)
            for entry in heard[0].split("\x1f")[:-1] if heard else ():
                listener, _, value = entry.partition("\x1e")
                if value not in allowed:
                    differs("leak", f"eavesdropper, {listener}", f"heard {value!r}")
        except psycopg.Error as error:
            differs("error", path, f"{error.sqlstate}: {error}")
            connection.execute("rollback")
            connection.execute(TAKE_HEARD)
        else:
            if session.in_transaction:
                connection.execute("commit" if session.committed else "rollback")


def _differences(rows: Rows, expected: Rows) -> Iterator[tuple[str, str]]:
    surplus, missing = rows - expected, expected - rows
    if len(surplus) == len(missing) == 1 and len(next(iter(surplus))) == 1 and [*surplus] < [*missing]:
        # One number instead of another, and too small.
        yield "hidden", f"{_some(surplus)} instead of {_some(missing)}"
    elif surplus:
        yield "leak", f"too much: {_some(surplus)}" + (f", missing: {_some(missing)}" if missing else "")
    elif missing:
        yield "hidden", f"missing: {_some(missing)}"


def _some(rows: Rows) -> str:
    return f"{list(rows)[:2]}" + (f" and {len(rows) - 2} more" if len(rows) > 2 else "")
