"""Every way to write, tried by random sessions on random classes, and compared with the model row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from uuid import UUID

import psycopg

from tests.barrier.oracle_model import (
    AccessClass,
    Corpus,
    Finding,
    Identity,
    Membership,
    Report,
    SessionVariables,
    may_read,
    may_write,
)
from tests.barrier.oracle_world import Keys, Names, Session, Speaker, apply_step, plant, random_corpus, uuid, vector
from tests.conftest import Deployment

DocumentKey = tuple[str, int, UUID]


# --- what the tables hold --------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Store:
    """All rows that a write could touch."""

    classes: dict[tuple[str, int], AccessClass]
    documents: dict[DocumentKey, tuple[str, ...]]
    """title, body, source_type, source_id"""
    chunks: dict[tuple[str, int, UUID, int], tuple[UUID, str]]
    """id, text; by tenant, class, document and index"""
    members: dict[tuple[str, int, str, int], bool]
    tombstones: dict[tuple[str, int, str, str], int] = field(default_factory=dict)
    logs: Counter[tuple[str, int]] = field(default_factory=Counter)

    @classmethod
    def of(cls, corpus: Corpus) -> Store:
        return cls(
            classes={access.key: access for access in corpus.classes},
            documents={
                (*row.access.key, row.id): (row.title, row.body, row.source_type, row.source_id)
                for row in corpus.documents
            },
            chunks={
                (*row.access.key, row.id, chunk.index): (chunk.id, chunk.text)
                for row in corpus.documents
                for chunk in row.chunks
            },
            members={(row.tenant, row.owner, row.project, row.member): row.may_write for row in corpus.memberships},
            logs=Counter((row.tenant, row.user or 0) for row in corpus.questions),
        )

    def changed(self) -> Store:
        """A copy to change."""
        return Store(**{name: copy(getattr(self, name)) for name in self.__slots__})

    @property
    def memberships(self) -> list[Membership]:
        return [
            Membership(tenant=tenant, owner=owner, project=project, member=member, may_write=writes)
            for (tenant, owner, project, member), writes in self.members.items()
        ]

    def state(self) -> dict[str, Any]:
        """As `stored` reads it from the database."""
        generations: dict[tuple[str, int], list[int]] = {}
        for (tenant, access_id, _, _), generation in self.tombstones.items():
            generations.setdefault((tenant, access_id), []).append(generation)
        return {
            "classes": self.classes,
            "documents": {key: (*_owner(self.classes[key[:2]]), *content) for key, content in self.documents.items()},
            "chunks": self.chunks,
            "members": self.members,
            "tombstones": {key: sorted(values) for key, values in generations.items()},
            "logs": {key: count for key, count in self.logs.items() if count},
        }


def _owner(access: AccessClass) -> tuple[Any, ...]:
    return access.scope, access.owner, access.project, access.tags


def stored(superuser: psycopg.Connection) -> dict[str, Any]:
    """Every row that there is, in one round trip."""
    with superuser.pipeline():
        classes = superuser.execute(
            "select tenant_id, access_id, scope, user_id, project_id, tags from rag.rag_access_classes"
        )
        documents = superuser.execute(
            """
            select tenant_id, access_id, id, scope, user_id, project_id, tags, title, body, source_type, source_id
            from rag.rag_documents
            """
        )
        chunks = superuser.execute(
            "select tenant_id, access_id, document_id, chunk_index, id, chunk_text from rag.rag_chunks"
        )
        members = superuser.execute(
            "select tenant_id, owner_user_id, project_id, member_user_id, may_write from rag.rag_project_members"
        )
        tombstones = superuser.execute(
            """
            select tenant_id, access_id, array_agg(generation order by generation) from rag.rag_tombstones
            group by tenant_id, access_id
            """
        )
        logs = superuser.execute("select tenant_id, user_id, count(*) from rag.rag_query_logs group by 1, 2")
    return {
        "classes": {
            (tenant, access_id): AccessClass(
                tenant=tenant, access_id=access_id, scope=scope, owner=owner, project=project, tags=tuple(tags)
            )
            for tenant, access_id, scope, owner, project, tags in classes
        },
        "documents": {row[:3]: (*row[3:6], tuple(row[6]), *row[7:]) for row in documents},
        "chunks": {row[:4]: row[4:] for row in chunks},
        "members": {row[:4]: row[4] for row in members},
        "tombstones": {row[:2]: row[2] for row in tombstones},
        "logs": {row[:2]: row[2] for row in logs},
    }


# --- who writes where ------------------------------------------------------------------------------

RELATIONS = (
    *("public", "own", "own project", "own project, not named", "shared for reading", "shared for writing"),
    *("somebody else's", "tags apart", "another tenant's", "missing"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A session, the class that it aims at, and all rows as they are."""

    random: Random
    names: Names
    store: Store
    identity: Identity | None
    login: str
    target: AccessClass

    def writes(self, key: tuple[str, int]) -> bool:
        access = self.store.classes.get(key)
        return access is not None and may_write(self.identity, access, self.store.memberships, login=self.login)

    def reads(self, key: tuple[str, int]) -> bool:
        access = self.store.classes.get(key)
        return access is not None and may_read(self.identity, access, self.store.memberships)

    def writable(self, keys: Iterable[DocumentKey]) -> list[DocumentKey]:
        allowed = {key for key in self.store.classes if self.writes(key)}
        return [key for key in keys if key[:2] in allowed]

    def readable(self, keys: Iterable[DocumentKey]) -> list[DocumentKey]:
        allowed = {key for key in self.store.classes if self.reads(key)}
        return [key for key in keys if key[:2] in allowed]

    def document(self) -> UUID:
        """One of the target class when it has one, else any, sometimes none."""
        own = [key[2] for key in self.store.documents if key[:2] == self.target.key]
        everybody = [key[2] for key in self.store.documents]
        choice = self.random.choices((own, everybody, []), (7, 2, 1))[0] or everybody
        return self.random.choice(choice) if choice and self.random.random() < 0.95 else uuid(self.random)

    def word(self) -> str:
        return f"written {self.random.getrandbits(40)}"


def relation(identity: Identity | None, access: AccessClass, store: Store) -> str:
    """What the class is to the session; the first that fits."""
    if access.key not in store.classes:
        return "missing"
    if identity is None or identity.tenant != access.tenant:
        return "another tenant's"
    if not set(identity.tags) & set(access.tags):
        return "tags apart"
    if access.scope == "public":
        return "public"
    if access.owner == identity.user and identity.user is not None:
        if access.scope == "user":
            return "own"
        return "own project" if may_read(identity, access, []) else "own project, not named"
    shared = store.members.get((access.tenant, access.owner or 0, access.project or "", identity.user or 0))
    if shared is None or not may_read(identity, access, store.memberships):
        return "somebody else's"
    return "shared for writing" if shared else "shared for reading"


# --- acts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The statement has to fail with one of these SQLSTATEs."""

    codes: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The statement has to touch as many rows, and to leave the store that `after` makes of what it returns."""

    count: int
    after: Callable[[list[tuple[Any, ...]]], Store]
    returns: list[tuple[Any, ...]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    name: str
    statement: str
    parameters: dict[str, Any]
    foreseen: Refused | Done


def refused(*codes: str) -> Refused:
    return Refused(codes=frozenset(codes))


def unchanged(scene: Scene, *, count: int = 0, returns: list[tuple[Any, ...]] | None = None) -> Done:
    return Done(count=count, after=lambda rows: scene.store, returns=returns)


_INSERT_DOCUMENT = """
insert into rag.rag_documents (
    tenant_id, access_id, id, scope, user_id, project_id, tags, title, body, source_type, source_id, source_hash
)
values (
    %(tenant)s, %(access)s, %(id)s, %(scope)s, %(owner)s, %(project)s, %(tags)s, %(title)s, %(body)s, %(type)s,
    %(source)s, 'hash'
)
"""
_CONFLICTS = {
    "insert a document": "",
    "insert a document, or nothing": "on conflict do nothing",
    "insert a document, or nothing with its id": "on conflict (tenant_id, access_id, id) do nothing",
    "insert a document, or change it": """
        on conflict (tenant_id, access_id, id) do update set title = %(title)s, body = %(body)s
    """,
}


def insert_document(scene: Scene) -> Act:
    random, store = scene.random, scene.store
    name = random.choice(sorted(_CONFLICTS))
    told = scene.target
    if random.random() < 0.15:
        # What people read of scope, owner and tags is not what the class has.
        part = random.choice(("scope", "owner", "project", "tags"))
        told = replace(told, **{part: getattr(random.choice(list(store.classes.values())), part)})
    tenant = scene.target.tenant if random.random() < 0.9 else random.choice(scene.names.tenants)
    key: DocumentKey = (tenant, scene.target.access_id, scene.document() if random.random() < 0.4 else uuid(random))
    source = ("text", f"docs/page-{random.randint(1, 4)}.md")
    content = (scene.word(), scene.word(), *source)
    foreseen: Refused | Done
    same_id = key in store.documents
    same_source = [
        other for other, row in store.documents.items() if other[:2] == key[:2] and row[2:] == source and other != key
    ]
    if not scene.writes(key[:2]) or _owner(store.classes[key[:2]]) != _owner(told):
        foreseen = refused("42501")
    elif (same_id and "nothing" in name) or (same_source and name == "insert a document, or nothing"):
        foreseen = unchanged(scene)
    elif name == "insert a document, or change it" and same_id:
        old = store.documents[key]
        foreseen = _with_document(scene, key, (*content[:2], *old[2:]))
    elif same_id or same_source:
        foreseen = refused("23505")
    else:
        foreseen = _with_document(scene, key, content)
    return Act(
        name=name,
        statement=f"{_INSERT_DOCUMENT} {_CONFLICTS[name]} {random.choice(('', 'returning tenant_id, access_id, id'))}",
        parameters={
            **_named(key),
            "scope": told.scope,
            "owner": told.owner,
            "project": told.project,
            "tags": list(told.tags),
            "title": content[0],
            "body": content[1],
            "type": source[0],
            "source": source[1],
        },
        foreseen=foreseen,
    )


def _named(key: DocumentKey) -> dict[str, Any]:
    return {"tenant": key[0], "access": key[1], "id": key[2]}


def _with_document(scene: Scene, key: DocumentKey, content: tuple[str, ...]) -> Done:
    after = scene.store.changed()
    after.documents[key] = content
    return Done(count=1, after=lambda rows: after)


def insert_two_documents(scene: Scene) -> Act:
    """One where the session may write, if there is such a class, and one in the target: both or none."""
    own = [access for access in scene.store.classes.values() if scene.writes(access.key)]
    first = scene.random.choice(own) if own else scene.target
    keys: list[DocumentKey] = [(*access.key, uuid(scene.random)) for access in (first, scene.target)]
    titles = [scene.word(), scene.word()]
    foreseen: Refused | Done = refused("42501")
    if all(scene.writes(key[:2]) for key in keys):
        after = scene.store.changed()
        for key, title in zip(keys, titles, strict=True):
            after.documents[key] = (title, "body", "text", str(key[2]))
        foreseen = Done(count=2, after=lambda rows: after)
    parameters: dict[str, Any] = {}
    for number, (key, access, title) in enumerate(zip(keys, (first, scene.target), titles, strict=True)):
        parameters |= {
            f"{name}{number}": value
            for name, value in {
                **_named(key),
                "scope": access.scope,
                "owner": access.owner,
                "project": access.project,
                "tags": list(access.tags),
                "title": title,
                "source": str(key[2]),
            }.items()
        }
    row = """(
        %(tenant{0})s, cast(%(access{0})s as bigint), cast(%(id{0})s as uuid), %(scope{0})s,
        cast(%(owner{0})s as bigint), %(project{0})s, cast(%(tags{0})s as text[]), %(title{0})s, 'body', 'text',
        %(source{0})s, 'hash'
    )"""
    return Act(
        name="insert two documents",
        statement=f"""
            insert into rag.rag_documents (
                tenant_id, access_id, id, scope, user_id, project_id, tags, title, body, source_type, source_id,
                source_hash
            )
            values {row.format(0)}, {row.format(1)}
        """,
        parameters=parameters,
        foreseen=foreseen,
    )


def _chosen(scene: Scene, keys: Iterable[DocumentKey]) -> tuple[str, list[DocumentKey], dict[str, Any]]:
    """A condition, the keys among these that meet it, and its parameters."""
    keys = list(keys)
    target = (*scene.target.key, scene.document())
    conditions: tuple[tuple[str, Callable[[DocumentKey], bool]], ...] = (
        ("where tenant_id = %(tenant)s and access_id = %(access)s and {id} = %(id)s", lambda key: key == target),
        ("where {id} = %(id)s", lambda key: key[2] == target[2]),
        ("where access_id = %(access)s", lambda key: key[1] == target[1]),
        ("where access_id = %(access)s and {id} = %(id)s", lambda key: key[1:] == target[1:]),
        ("where tenant_id = %(tenant)s", lambda key: key[0] == target[0]),
        ("where true", lambda key: True),
        ("", lambda key: True),
    )
    text, holds = scene.random.choices(conditions, (6, 4, 3, 2, 1, 0.5, 0.5))[0]
    return text, [key for key in keys if holds(key)], _named(target)


def update_documents(scene: Scene) -> Act:
    condition, chosen, parameters = _chosen(scene, scene.store.documents)
    changed = scene.writable(chosen)
    title = scene.word()
    after = scene.store.changed()
    for key in changed:
        after.documents[key] = (title, *after.documents[key][1:])
    return Act(
        name="update documents",
        statement="update rag.rag_documents set title = %(title)s " + condition.format(id="id"),
        parameters={**parameters, "title": title},
        foreseen=Done(count=len(changed), after=lambda rows: after),
    )


def move_documents(scene: Scene) -> Act:
    """No class, tenant, id or readable owner is ever updated, not even to what it was."""
    condition, _, parameters = _chosen(scene, scene.store.documents)
    column, value = scene.random.choice(
        (
            ("access_id", "%(access)s"),
            ("tenant_id", "%(tenant)s"),
            ("id", "gen_random_uuid()"),
            ("scope", "'public'"),
            ("user_id", "1"),
            ("project_id", "'alpha'"),
            ("tags", "'{public}'"),
            ("source_id", "'elsewhere'"),
            ("created_at", "now()"),
        )
    )
    return Act(
        name="move documents",
        statement=f"update rag.rag_documents set {column} = {value} " + condition.format(id="id"),
        parameters=parameters,
        foreseen=refused("42501"),
    )


def delete_documents(scene: Scene) -> Act:
    condition, chosen, parameters = _chosen(scene, scene.store.documents)
    gone = scene.writable(chosen)
    after = scene.store.changed()
    for key in gone:
        del after.documents[key]
    after.chunks = {key: row for key, row in after.chunks.items() if key[:3] not in gone}
    return Act(
        name="delete documents",
        statement="delete from rag.rag_documents " + condition.format(id="id") + " returning tenant_id, access_id, id",
        parameters=parameters,
        foreseen=Done(count=len(gone), after=lambda rows: after, returns=list(gone)),
    )


def lock_documents(scene: Scene) -> Act:
    condition, chosen, parameters = _chosen(scene, scene.store.documents)
    strength = scene.random.choice(("update", "no key update", "share", "key share"))
    locked = scene.writable(chosen)
    return Act(
        name="lock documents",
        statement=f"select tenant_id, access_id, id from rag.rag_documents {condition.format(id='id')} for {strength}",
        parameters=parameters,
        foreseen=unchanged(scene, count=len(locked), returns=list(locked)),
    )


def merge_documents(scene: Scene) -> Act:
    """Matched and not writable is an error, not a row passed over; hidden is not matched."""
    key: DocumentKey = (*scene.target.key, scene.document())
    title = scene.word()
    removes = scene.random.random() < 0.3
    foreseen: Refused | Done
    if not scene.writes(key[:2]):
        foreseen = refused("42501")
    elif key not in scene.store.documents:
        foreseen = _with_document(scene, key, (title, "body", "text", str(key[2])))
    else:
        after = scene.store.changed()
        if removes:
            del after.documents[key]
            after.chunks = {other: row for other, row in after.chunks.items() if other[:3] != key}
        else:
            after.documents[key] = (title, *after.documents[key][1:])
        foreseen = Done(count=1, after=lambda rows: after)
    return Act(
        name="merge documents",
        statement=f"""
            merge into rag.rag_documents as document
            using (select %(tenant)s, cast(%(access)s as bigint), cast(%(id)s as uuid)) as wanted (tenant, access, id)
                on document.tenant_id = wanted.tenant
                and document.access_id = wanted.access
                and document.id = wanted.id
            when matched then {"delete" if removes else "update set title = %(title)s"}
            when not matched then insert (
                tenant_id, access_id, id, scope, user_id, project_id, tags, title, body, source_type, source_id,
                source_hash
            )
            values (
                wanted.tenant, wanted.access, wanted.id, %(scope)s, %(owner)s, %(project)s, %(tags)s, %(title)s,
                'body', 'text', %(source)s, 'hash'
            )
        """,
        parameters={
            **_named(key),
            "title": title,
            "scope": scene.target.scope,
            "owner": scene.target.owner,
            "project": scene.target.project,
            "tags": list(scene.target.tags),
            "source": str(key[2]),
        },
        foreseen=foreseen,
    )


_INSERT_CHUNK = """
insert into rag.rag_chunks (
    tenant_id, access_id, document_id, chunk_index, id, chunk_text, chunk_hash, token_count, token_counter,
    start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count
)
"""
_CHUNK_CONTENT = """
%(text)s, 'hash', 2, 'words', 0, 9, cast(%(embedding)s as rag.halfvec), 'model-a', cast('''zq1'':1' as tsvector), 1
"""


def insert_chunk(scene: Scene) -> Act:
    """Also to documents of other classes: neither the foreign key nor a unique constraint may tell of them."""
    random, store = scene.random, scene.store
    conflict = random.choice(("", "", "on conflict do nothing"))
    tenant = scene.target.tenant if random.random() < 0.9 else random.choice(scene.names.tenants)
    place = (tenant, scene.target.access_id, scene.document(), random.randint(0, 4))
    taken = [row[0] for row in store.chunks.values()]
    identifier = random.choice(taken) if taken and random.random() < 0.15 else uuid(random)
    text = scene.word()
    same_id = any(key[:2] == place[:2] and row[0] == identifier for key, row in store.chunks.items())
    foreseen: Refused | Done
    if not scene.writes(place[:2]):
        foreseen = refused("42501")
    elif place in store.chunks or same_id:
        foreseen = unchanged(scene) if conflict else refused("23505")
    elif place[:3] not in store.documents:
        foreseen = refused("23503")
    else:
        after = store.changed()
        after.chunks[place] = (identifier, text)
        foreseen = Done(count=1, after=lambda rows: after)
    return Act(
        name="insert a chunk, or nothing" if conflict else "insert a chunk",
        statement=f"""{_INSERT_CHUNK}
            values (%(tenant)s, %(access)s, %(id)s, %(index)s, %(chunk)s, {_CHUNK_CONTENT}) {conflict}
        """,
        parameters={
            **_named(place[:3]),
            "index": place[3],
            "chunk": identifier,
            "text": text,
            "embedding": vector([1.0]),
        },
        foreseen=foreseen,
    )


def insert_chunks_of_all(scene: Scene) -> Act:
    """A chunk for each document that the condition finds: what is read but not writable refuses them all."""
    condition, chosen, parameters = _chosen(scene, scene.store.documents)
    found = scene.readable(chosen)
    index, text = 5 + scene.random.getrandbits(20), scene.word()
    foreseen: Refused | Done = refused("42501")
    if len(scene.writable(found)) == len(found):
        count = len(found)

        def after(rows: list[tuple[Any, ...]]) -> Store:
            changed = scene.store.changed()
            changed.chunks |= {(*row[:3], index): (row[3], text) for row in rows}
            return changed

        foreseen = Done(count=count, after=after)
    return Act(
        name="insert a chunk of each document",
        statement=f"""{_INSERT_CHUNK}
            select tenant_id, access_id, id, %(index)s, gen_random_uuid(), {_CHUNK_CONTENT}
            from rag.rag_documents {condition.format(id="id")}
            returning tenant_id, access_id, document_id, id
        """,
        parameters={**parameters, "index": index, "text": text, "embedding": vector([1.0])},
        foreseen=foreseen,
    )


def change_chunks(scene: Scene) -> Act:
    """Chunks are replaced, never updated."""
    condition, _, parameters = _chosen(scene, scene.store.documents)
    return Act(
        name="update chunks",
        statement=scene.random.choice(
            (
                "update rag.rag_chunks set chunk_text = 'taken' " + condition.format(id="document_id"),
                "update rag.rag_chunks set access_id = %(access)s " + condition.format(id="document_id"),
                f"""{_INSERT_CHUNK} values (%(tenant)s, %(access)s, %(id)s, 0, gen_random_uuid(), {_CHUNK_CONTENT})
                on conflict (tenant_id, access_id, id) do update set chunk_text = 'taken'""",
            )
        ),
        parameters={**parameters, "text": "taken", "embedding": vector([1.0])},
        foreseen=refused("42501"),
    )


def delete_chunks(scene: Scene) -> Act:
    condition, chosen, parameters = _chosen(scene, {key[:3] for key in scene.store.chunks})
    gone = set(scene.writable(chosen))
    after = scene.store.changed()
    after.chunks = {key: row for key, row in after.chunks.items() if key[:3] not in gone}
    return Act(
        name="delete chunks",
        statement="delete from rag.rag_chunks " + condition.format(id="document_id"),
        parameters=parameters,
        foreseen=Done(count=len(scene.store.chunks) - len(after.chunks), after=lambda rows: after),
    )


def make_class(scene: Scene) -> Act:
    """access_class() for the target's owner and tags, or with one of them changed."""
    random, me, target = scene.random, scene.identity, scene.target
    scope, owner, project, tags = _owner(target)
    change = random.choice(("", "", "", "scope", "owner", "project", "tags"))
    if change == "scope":
        scope = random.choice(("public", "user", "project", "organization", ""))
    elif change == "owner":
        owner = random.choice((*scene.names.users, None, 0, -1))
    elif change == "project":
        project = random.choice((*scene.names.projects, None, "*", ""))
    elif change == "tags":
        tags = random.choice(((), scene.names.some_tags(random, 3), scene.names.tags))
    wanted = AccessClass(
        tenant=me.tenant if me else "",
        access_id=0,
        scope=scope,
        owner=owner,
        project=project,
        tags=tuple(sorted(set(tags))) or ("public",),
    )
    return Act(
        name="access_class",
        statement="select rag.access_class(%(scope)s, %(owner)s, %(project)s, %(tags)s)",
        parameters={
            "scope": scope,
            "owner": owner,
            "project": project,
            "tags": random.sample(tags, len(tags)) + random.sample(tags, min(1, len(tags))),
        },
        foreseen=_class_made(scene, wanted),
    )


def _class_made(scene: Scene, wanted: AccessClass) -> Refused | Done:
    me, store = scene.identity, scene.store
    if me is None or not set(wanted.tags) & set(me.tags):
        return refused("42501")
    shared = store.members.get((me.tenant, wanted.owner or 0, wanted.project or "", me.user or 0), False)
    owns = me.user is not None and wanted.owner == me.user
    allowed = {
        "public": scene.login == "rag_publisher",
        "user": owns,
        "project": me.project is not None
        and (me.project == "*" or wanted.project == me.project)
        and (owns or (shared and me.user is not None)),
    }.get(wanted.scope, False)
    if not allowed:
        return refused("42501")
    sound = {
        "public": wanted.owner is None and wanted.project is None,
        "user": wanted.project is None,
        "project": bool(wanted.project) and wanted.project != "*",
    }[wanted.scope]
    if not sound:
        return refused("23514")
    for key, access in store.classes.items():
        if key[0] == me.tenant and _owner(access) == _owner(wanted):
            return unchanged(scene, count=1, returns=[(access.access_id,)])

    def after(rows: list[tuple[Any, ...]]) -> Store:
        made = store.changed()
        number = rows[0][0]
        made.classes[me.tenant, number] = AccessClass(
            tenant=me.tenant,
            access_id=number,
            scope=wanted.scope,
            owner=wanted.owner,
            project=wanted.project,
            tags=wanted.tags,
        )
        return made

    return Done(count=1, after=after)


def share_project(scene: Scene) -> Act:
    """The only project that one can share is one's own, whatever its name."""
    random, me = scene.random, scene.identity
    project = scene.target.project or random.choice((*scene.names.projects, "", "*"))
    member = random.choice((*scene.names.users, 0, -1))
    writes = random.random() < 0.5
    foreseen: Refused | Done
    if me is None or me.user is None:
        foreseen = refused("42501")
    elif member == me.user or member <= 0 or project in ("", "*"):
        foreseen = refused("23514")
    else:
        after = scene.store.changed()
        after.members[me.tenant, me.user, project, member] = writes
        foreseen = Done(count=1, after=lambda rows: after)
    return Act(
        name="share_project",
        statement="select rag.share_project(%(project)s, %(member)s, %(writes)s)",
        parameters={"project": project, "member": member, "writes": writes},
        foreseen=foreseen,
    )


def unshare_project(scene: Scene) -> Act:
    random, me = scene.random, scene.identity
    _, _, project, member = (
        random.choice(list(scene.store.members))
        if scene.store.members and random.random() < 0.8
        else ("", 0, random.choice(scene.names.projects), random.choice(scene.names.users))
    )
    key = (me.tenant, me.user or 0, project, member) if me else ("", 0, "", 0)
    after = scene.store.changed()
    found = after.members.pop(key, None) is not None
    return Act(
        name="unshare_project",
        statement="select rag.unshare_project(%(project)s, %(member)s)",
        parameters={"project": project, "member": member},
        foreseen=Done(count=1, after=lambda rows: after, returns=[(found,)]),
    )


def bury_source(scene: Scene) -> Act:
    me = scene.identity
    access_id, source = scene.target.access_id, f"docs/page-{scene.random.randint(1, 2)}.md"
    foreseen: Refused | Done = refused("42501")
    # The class is looked for in the session's tenant, whoever else has one of this number.
    if me and scene.writes((me.tenant, access_id)):
        after = scene.store.changed()
        key = (me.tenant, access_id, "text", source)
        after.tombstones[key] = after.tombstones.get(key, 0) + 1
        foreseen = Done(count=1, after=lambda rows: after, returns=[(after.tombstones[key],)])
    return Act(
        name="bury_source",
        statement="select rag.bury_source(%(access)s, 'text', %(source)s, 'a test')",
        parameters={"access": access_id, "source": source},
        foreseen=foreseen,
    )


def log_question(scene: Scene) -> Act:
    random, me = scene.random, scene.identity
    tenant = random.choice((me.tenant if me else "", random.choice(scene.names.tenants)))
    user = random.choice((me.user or 0 if me else 0, random.choice((0, *scene.names.users))))
    foreseen: Refused | Done = refused("42501")
    if me and (tenant, user) == (me.tenant, me.user or 0):
        after = scene.store.changed()
        after.logs[tenant, user] += 1
        foreseen = Done(count=1, after=lambda rows: after)
    return Act(
        name="log a question",
        statement="""
            insert into rag.rag_query_logs (tenant_id, user_id, query_hash, query_length, mode, result_count,
                citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms)
            values (%(tenant)s, %(user)s, 'hash', 4, 'hybrid', 0, 0, 0, 1, 0, 1)
        """,
        parameters={"tenant": tenant, "user": user},
        foreseen=foreseen,
    )


# Tables that no service login touches itself, and verbs that none has.
_FORBIDDEN = (
    """
    insert into rag.rag_access_classes (tenant_id, scope, user_id, project_id, tags, tags_digest)
    values (%(tenant)s, 'public', null, null, '{public}', 'x')
    """,
    "update rag.rag_access_classes set tags = '{public}' where access_id = %(access)s",
    "update rag.rag_access_classes set tags = '{public}'",
    "delete from rag.rag_access_classes where access_id = %(access)s",
    "insert into rag.rag_project_members values (%(tenant)s, 1, 'alpha', 2, true)",
    "update rag.rag_project_members set may_write = true",
    "update rag.rag_project_members set member_user_id = 1",
    "delete from rag.rag_project_members",
    """
    insert into rag.rag_tombstones (tenant_id, access_id, source_digest, reason)
    values (%(tenant)s, %(access)s, sha256('x'), 'x')
    """,
    "update rag.rag_tombstones set generation = 1",
    "delete from rag.rag_tombstones",
    "update rag.rag_query_logs set user_id = 1",
    "delete from rag.rag_query_logs",
    "insert into rag.rag_analysts (tenant_id, role_name, projects) values (%(tenant)s, 'rag_app', '{*}')",
    "insert into rag.rag_signing_keys values ('mine', sha256('a') || sha256('b'), sha256('c') || sha256('d'))",
    "truncate rag.rag_documents cascade",
    "truncate rag.rag_chunks",
    "create policy mine on rag.rag_documents for select to public using (true)",
    "alter table rag.rag_documents disable row level security",
    "select body from rag.rag_documents for update",
    "update rag.rag_documents set title = body",
    "delete from rag.rag_documents where title = 'x'",
    "delete from rag.rag_documents returning body",
    "delete from rag.rag_chunks where chunk_text like 'passage%%'",
    "delete from rag.rag_chunks returning chunk_text",
    "set local role rag_owner",
    "set local session authorization rag_operator",
)


def forbidden(scene: Scene) -> Act:
    return Act(
        name="what nobody may",
        statement=scene.random.choice(_FORBIDDEN),
        parameters={"tenant": scene.target.tenant, "access": scene.target.access_id},
        foreseen=refused("42501"),
    )


ACTS: tuple[tuple[float, Callable[[Scene], Act]], ...] = (
    (8, insert_document),
    (2, insert_two_documents),
    (4, update_documents),
    (2, move_documents),
    (2, delete_documents),
    (2, lock_documents),
    (3, merge_documents),
    (5, insert_chunk),
    (1, insert_chunks_of_all),
    (1, change_chunks),
    (2, delete_chunks),
    (5, make_class),
    (2, share_project),
    (1, unshare_project),
    (2, bury_source),
    (1, log_question),
    (2, forbidden),
)


# --- trying ----------------------------------------------------------------------------------------


@contextmanager
def write_oracle(
    deployment: Deployment, *, seed: int, spoil: Callable[[psycopg.Connection], None] = lambda superuser: None
) -> Iterator[WriteOracle]:
    """An oracle over a migrated database that nobody else uses. `spoil` breaks it first."""
    with deployment.cluster.superuser(deployment.name) as superuser, ExitStack() as stack:
        spoil(superuser)
        yield WriteOracle(
            superuser=superuser,
            keys=Keys.made(superuser),
            connections={
                login: [_opened(stack.enter_context(deployment.connect(login)), threshold) for threshold in (0, None)]
                for login in ("rag_app", "rag_publisher")
            },
            seed=seed,
        )


def _opened(connection: psycopg.Connection, threshold: int | None) -> psycopg.Connection:
    connection.prepare_threshold = threshold
    return connection


@dataclass(slots=True, kw_only=True)
class WriteOracle:
    """Tries, compares every row, reports. A leak is a row that changed and must not, or a missing refusal."""

    superuser: psycopg.Connection
    keys: Keys
    connections: dict[str, Sequence[psycopg.Connection]]
    seed: int
    report: Report = field(init=False)
    met: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How often each act met each relation."""
    done: int = 0
    """Acts that the model allows."""

    def __post_init__(self) -> None:
        self.report = Report(seed=self.seed)

    def run(self, *, acts: int, corpora: int, until: Callable[[Report], bool] = lambda report: False) -> Report:
        per_corpus = -(-acts // corpora)
        for number in range(corpora):
            random = Random(f"{self.seed} writing {number}")
            names = Names.chosen(random)
            corpus = random_corpus(random, names)
            plant(self.superuser, corpus)
            store = Store.of(corpus)
            self.report.corpora += 1
            for _ in range(min(per_corpus, acts - self.report.checks)):
                if until(self.report):
                    return self.report
                login = random.choice(sorted(self.connections))
                speaker = Speaker(random=random, names=names, keys=self.keys, login=login)
                session = speaker.begun() if random.random() < 0.8 else speaker.any()
                found = self.report.counts.copy()
                store = self.attempt(session, names, store, random)
                if self.report.counts != found:
                    # What went wrong once must not go wrong again in each comparison that follows.
                    plant(self.superuser, corpus)
                    store = Store.of(corpus)
        return self.report

    def attempt(self, session: Session, names: Names, store: Store, random: Random) -> Store:
        """One session and one act, committed or rolled back; the store as it should be then."""
        connection = random.choice(self.connections[session.login])
        variables = SessionVariables(login=session.login, keys=self.keys.valid, began_at=self.keys.now())
        self.report.checks += 1
        if session.in_transaction:
            connection.execute("begin")
        act: Act | None = None
        problems: list[tuple[str, str]] = []
        after = store
        try:
            for step in session.steps:
                apply_step(connection, step, random, refusal=bool(variables.take(step)))
                if not session.in_transaction:
                    variables.values.clear()
            identity = variables.identity()
            target = _target(random, identity, store)
            scene = Scene(
                random=random, names=names, store=store, identity=identity, login=session.login, target=target
            )
            act = random.choices([make for _, make in ACTS], [weight for weight, _ in ACTS])[0](scene)
            self.met[act.name, relation(identity, target, store)] += 1
            self.done += isinstance(act.foreseen, Done)
            cursor = connection.execute(act.statement.encode(), act.parameters)
            rows = cursor.fetchall() if cursor.description else []
            if isinstance(act.foreseen, Refused):
                problems.append(("leak", f"succeeded with {cursor.rowcount} rows {rows[:3]}"))
            else:
                if cursor.rowcount != act.foreseen.count:
                    kind = "leak" if cursor.rowcount > act.foreseen.count else "hidden"
                    problems.append((kind, f"touched {cursor.rowcount} rows instead of {act.foreseen.count}"))
                elif act.foreseen.returns is not None and Counter(rows) != Counter(act.foreseen.returns):
                    problems.append(("leak", f"returned {rows[:3]} instead of {act.foreseen.returns[:3]}"))
                elif session.committed or not session.in_transaction:
                    after = act.foreseen.after(rows)
            if session.in_transaction:
                connection.execute("commit" if session.committed else "rollback")
        except psycopg.Error as error:
            connection.execute("rollback")
            if act is None:
                problems.append(("error", f"{error.sqlstate}: {error}"))
            elif isinstance(act.foreseen, Done):
                problems.append(("hidden", f"refused with {error.sqlstate}: {error}"))
            elif error.sqlstate not in act.foreseen.codes:
                problems.append(("error", f"{error.sqlstate} instead of {sorted(act.foreseen.codes)}: {error}"))
        wanted, present = after.state(), stored(self.superuser)
        for table in wanted:
            if present[table] != wanted[table]:
                problems.append(("leak", f"{table}: {_difference(wanted[table], present[table])}"))
        for kind, detail in problems:
            self.report.add(
                Finding(
                    kind=kind,
                    path=act.name if act else "begin_as",
                    where=f"corpus {self.report.corpora - 1}, act {self.report.checks}",
                    session=str(session),
                    detail=f"{detail}; {act and (act.statement, act.parameters, act.foreseen)}"[:2000],
                ),
                session_kind=session.kind,
            )
        return after


def _target(random: Random, identity: Identity | None, store: Store) -> AccessClass:
    """A class of any relation, each as likely as the others where there is one."""
    missing = AccessClass(
        tenant=identity.tenant if identity else "acme",
        access_id=random.getrandbits(60),
        scope="public",
        owner=None,
        project=None,
        tags=("public",),
    )
    by_relation: dict[str, list[AccessClass]] = {"missing": [missing]}
    for access in store.classes.values():
        by_relation.setdefault(relation(identity, access, store), []).append(access)
    chosen = random.choices(sorted(by_relation), [1 if name == "missing" else 3 for name in sorted(by_relation)])[0]
    return random.choice(by_relation[chosen])


def _difference(wanted: dict[Any, Any], present: dict[Any, Any]) -> str:
    changes = [
        f"{key}: {wanted.get(key, 'no row')} became {present.get(key, 'no row')}"
        for key in {**wanted, **present}
        if wanted.get(key) != present.get(key)
    ]
    return "; ".join(changes[:3])
