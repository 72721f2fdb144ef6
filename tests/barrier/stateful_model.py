"""What is stored after each step of a walk by several people, said a second time in plain Python.

Who may read and write is the oracle's rule; what a step does to what is stored is said here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from uuid import UUID

from tests.barrier.oracle_model import AccessClass, Identity, Membership, may_read, may_write

type_place = tuple[AccessClass, str]
"""Where a document stands: its class, and the name of its source."""


def access_class(tenant: str, scope: str, owner: int | None, project: str | None, tags: tuple[str, ...]) -> AccessClass:
    """A class as the model knows it; its number is the database's own affair."""
    return AccessClass(
        tenant=tenant, access_id=0, scope=scope, owner=owner, project=project, tags=tuple(sorted(set(tags)))
    )


def may_hold_the_same(one: AccessClass, other: AccessClass) -> bool:
    """Whether a source in the two classes is one source of one owner, with other tags."""
    return replace(one, tags=()) == replace(other, tags=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A document. `id` is None as long as only the database knows it; `written` grows with every write."""

    id: UUID | None
    body: str
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """What rag.forget() was asked to erase."""

    tenant: str
    user: int | None = None
    project: str | None = None
    source: str | None = None

    @property
    def kind(self) -> str:
        if self.source is not None:
            return "source"
        if self.project is not None:
            return "project"
        return "tenant" if self.user is None else "user"

    def takes_class(self, access: AccessClass) -> bool:
        return (
            self.source is None
            and access.tenant == self.tenant
            and self.user in (None, access.owner)
            and self.project in (None, access.project)
        )

    def takes(self, place: type_place) -> bool:
        access, source = place
        return self.takes_class(access) or (access.tenant == self.tenant and source == self.source)

    def takes_membership(self, row: Membership) -> bool:
        if row.tenant != self.tenant or self.source is not None:
            return False
        if self.project is not None:
            return row.project == self.project and self.user in (None, row.owner)
        return self.user in (None, row.owner, row.member)


@dataclass(slots=True, kw_only=True)
class Model:
    documents: dict[type_place, Stored] = field(default_factory=dict)
    memberships: frozenset[Membership] = frozenset()
    graves: Counter[type_place] = field(default_factory=Counter)
    """How often a source was deleted from a class, until the class itself was erased."""
    erasures: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Tenant and kind."""
    classes: set[AccessClass] = field(default_factory=set)
    """Those that somebody who may write there has asked for; a step that failed may have made one."""
    gone: list[type_place | Erasure] = field(default_factory=list)
    """All that was deleted and erased, in order."""
    clock: int = 0

    def copy(self) -> Model:
        return Model(
            documents=dict(self.documents),
            memberships=self.memberships,
            graves=Counter(self.graves),
            erasures=Counter(self.erasures),
            classes=set(self.classes),
            gone=list(self.gone),
            clock=self.clock,
        )

    # --- what is there ---

    def reads(self, identity: Identity, access: AccessClass) -> bool:
        return may_read(identity, access, self.memberships)

    def writes(self, identity: Identity, access: AccessClass) -> bool:
        return may_write(
            identity, access, self.memberships, login="rag_publisher" if access.scope == "public" else "rag_app"
        )

    def visible(self, identity: Identity) -> Iterator[tuple[type_place, Stored]]:
        return (entry for entry in self.documents.items() if self.reads(identity, entry[0][0]))

    def find(self, document_id: UUID) -> type_place | None:
        return next((place for place, stored in self.documents.items() if stored.id == document_id), None)

    def versions(self, identity: Identity, wanted: AccessClass, source: str) -> list[tuple[type_place, Stored]]:
        """What the writer finds of a source: in the wanted class first, then what was written last."""
        found = [
            (place, stored)
            for place, stored in self.visible(identity)
            if place[1] == source and may_hold_the_same(place[0], wanted)
        ]
        return sorted(found, key=lambda entry: (entry[0][0] != wanted, -entry[1].written))

    def known_id(self, identity: Identity, wanted: AccessClass, source: str) -> UUID | None:
        return next((stored.id for _, stored in self.versions(identity, wanted, source)), None)

    # --- what steps do; each returns how it ends, those of SQL the answer or the SQLSTATE ---

    def ingest(self, identity: Identity, wanted: AccessClass, source: str, body: str) -> str:
        if not self.writes(identity, wanted):
            return "ScopeForbidden"
        self.classes.add(wanted)
        versions = self.versions(identity, wanted, source)
        if [(place, stored.body) for place, stored in versions] == [((wanted, source), body)]:
            return "unchanged"
        for place, _ in versions:
            del self.documents[place]
        self.clock += 1
        self.documents[wanted, source] = Stored(
            id=versions[0][1].id if versions else None, body=body, written=self.clock
        )
        if not versions:
            return "created"
        return "updated" if versions[0][0][0] == wanted else "moved"

    def remove(self, identity: Identity, document_id: UUID) -> str:
        place = self.find(document_id)
        if place is None or not self.reads(identity, place[0]):
            return "DocumentNotFound"
        if not self.writes(identity, place[0]):
            return "ScopeForbidden"
        del self.documents[place]
        self.graves[place] += 1
        self.gone.append(place)
        return "removed"

    def share(self, owner: Identity, project: str, member: int, *, to_write: bool) -> str:
        if owner.user is None:
            return "42501"
        if owner.user == member:
            return "23514"
        row = Membership(tenant=owner.tenant, owner=owner.user, project=project, member=member, may_write=to_write)
        self.memberships = frozenset({row, *self.memberships - {replace(row, may_write=not to_write)}})
        return ""

    def unshare(self, owner: Identity, project: str, member: int) -> str:
        ended = {
            row
            for row in self.memberships
            if (row.tenant, row.owner, row.project, row.member) == (owner.tenant, owner.user, project, member)
        }
        self.memberships -= ended
        return "true" if ended else "false"

    def forget(self, erasure: Erasure) -> str:
        self.documents = {place: stored for place, stored in self.documents.items() if not erasure.takes(place)}
        self.memberships = frozenset(row for row in self.memberships if not erasure.takes_membership(row))
        self.graves = Counter(
            {place: count for place, count in self.graves.items() if not erasure.takes_class(place[0])}
        )
        self.classes = {access for access in self.classes if not erasure.takes_class(access)}
        if erasure.kind == "tenant":
            self.erasures = Counter(
                {
                    (tenant, kind): count
                    for (tenant, kind), count in self.erasures.items()
                    if tenant != erasure.tenant or kind == "tenant"
                }
            )
        self.erasures[erasure.tenant, erasure.kind] += 1
        self.gone.append(erasure)
        return "forgotten"

    def finish(self, identity: Identity, wanted: AccessClass, source: str, body: str, *, begun: Model) -> str:
        """The end of an ingest that began when the model was `begun`, after what was done in the meantime.

        What was deleted or erased since then stays away; otherwise the last one to end wins.
        """
        if not self.writes(identity, wanted):
            return "ScopeForbidden"
        known = begun.known_id(identity, wanted, source)
        if any(
            gone.takes((wanted, source)) if isinstance(gone, Erasure) else gone == (wanted, source)
            for gone in self.gone[len(begun.gone) :]
        ) or (known is not None and self.known_id(identity, wanted, source) != known):
            return "SourceRetracted"
        return self.ingest(identity, wanted, source, body)
