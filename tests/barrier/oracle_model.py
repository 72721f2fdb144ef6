"""What every session may read and write, said a second time, in plain Python: what the database is compared with.

Nothing of the product takes part, neither its SQL nor its signatures: a mistake there has no twin here.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

LATEST_EXPIRY_S = 12 * 60 * 60  # what is valid for longer was not signed by the service
VARIABLES = ("app.tenant_id", "app.user_id", "app.project_id", "app.tags", "app.signature")

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_USER = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
_SIGNATURE = re.compile(r"([a-z0-9]{1,32})\.([1-9][0-9]{0,11})\.([0-9a-f]{64})", re.ASCII)
# Of JSON's escapes only those of the characters that cannot stand for themselves.
_FOREIGN_ESCAPE = re.compile(r'\\(?!["\\/])')


# --- rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessClass:
    """What a document belongs to; `tags` sorted."""

    tenant: str
    access_id: int
    scope: str
    owner: int | None
    project: str | None
    tags: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        return self.tenant, self.access_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    id: UUID
    index: int
    text: str
    words: frozenset[str]
    language: str | None
    embedding: tuple[float, ...]
    """The first components; the others are 0."""
    embedding_model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    id: UUID
    access: AccessClass
    source_type: str
    source_id: str
    title: str
    body: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    tenant: str
    owner: int
    project: str
    member: int
    may_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Analyst:
    """A person's own login, and what it was registered for."""

    role: str
    tenant: str
    tags: tuple[str, ...]
    projects: tuple[str, ...]
    user_scope: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedQuestion:
    """A question, and the documents that it got back, in order; `user` 0 asks for nobody in particular.

    What a reader may not know of it is None.
    """

    tenant: str
    id: UUID
    user: int | None
    project: str | None
    text: str | None
    hits: tuple[UUID, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    classes: tuple[AccessClass, ...]
    documents: tuple[Document, ...]
    memberships: tuple[Membership, ...]
    analysts: tuple[Analyst, ...] = ()
    questions: tuple[LoggedQuestion, ...] = ()


# --- who is asking ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom the database has to take a session for. `user` None: nobody in particular, public rows only."""

    tenant: str
    user: int | None
    project: str | None
    tags: tuple[str, ...]


def sign(secret: bytes, values: Sequence[str], *, key_id: str, expires: str) -> str:
    """`values`: login, tenant, user, project, and then the tags."""
    message = json.dumps([*values[:4], expires, *values[4:]], ensure_ascii=False, separators=(",", ":"))
    code = hmac.new(secret, message.encode("utf-8", "surrogatepass"), "sha256").hexdigest()
    return f"{key_id}.{expires}.{code}"


def parse_tags(text: str | None) -> tuple[str, ...] | None:
    """The tags of `app.tags`, None when it is no list of strings."""
    if text is None or len(text.encode()) > 65536 or not text.lstrip(" \t\r\n").startswith("["):
        return None
    try:
        tags = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not all(isinstance(tag, str) and not _CONTROL.search(tag) for tag in tags) or _FOREIGN_ESCAPE.search(
        text.replace("\\\\", "")
    ):
        return None
    return tuple(tags)


def identify(
    variables: Mapping[str, str], *, login: str, keys: Mapping[str, bytes], began_at: float
) -> Identity | None:
    """The identity that these session variables prove, None for nobody.

    `began_at` is the start of the transaction in unix seconds; `keys` are the valid ones, by their id.
    """
    tenant = variables.get("app.tenant_id", "")
    user = variables.get("app.user_id", "")
    project = variables.get("app.project_id", "")
    tags = parse_tags(variables.get("app.tags"))
    signature = _SIGNATURE.fullmatch(variables.get("app.signature", ""))
    if (
        login not in ("rag_app", "rag_publisher")
        or not 1 <= len(tenant) <= 128
        or _CONTROL.search(tenant)
        or not _USER.fullmatch(user)
        or len(project) > 128
        or _CONTROL.search(project)
        or tags is None
        or signature is None
    ):
        return None
    key_id, expires, _ = signature.groups()
    if key_id not in keys or not 0 <= int(expires) - began_at <= LATEST_EXPIRY_S:
        return None
    if sign(keys[key_id], (login, tenant, user, project, *tags), key_id=key_id, expires=expires) != signature.group():
        return None
    return Identity(tenant=tenant, user=int(user) or None, project=project or None, tags=tags or ("public",))


# --- what may be read and written ------------------------------------------------------------------


def _names_project(identity: Identity, project: str | None) -> bool:
    return identity.project is not None and identity.project in ("*", project)


def _shared(identity: Identity, access: AccessClass, memberships: Iterable[Membership], *, to_write: bool) -> bool:
    return any(
        membership.tenant == access.tenant
        and membership.owner == access.owner
        and membership.project == access.project
        and membership.member == identity.user
        and (membership.may_write or not to_write)
        for membership in memberships
    )


def may_read(identity: Identity | None, access: AccessClass, memberships: Iterable[Membership]) -> bool:
    if identity is None or identity.tenant != access.tenant or not set(identity.tags) & set(access.tags):
        return False
    if access.scope == "public":
        return True
    if identity.user is None:
        return False
    if access.scope == "user":
        return access.owner == identity.user
    return _names_project(identity, access.project) and (
        access.owner == identity.user or _shared(identity, access, memberships, to_write=False)
    )


def may_write(identity: Identity | None, access: AccessClass, memberships: Iterable[Membership], *, login: str) -> bool:
    """What one cannot read one cannot write either."""
    if identity is None or not may_read(identity, access, memberships):
        return False
    if access.scope == "public":
        return login == "rag_publisher"
    return access.owner == identity.user or _shared(identity, access, memberships, to_write=True)


def is_in_scope(scope: str | None, identity: Identity, access: AccessClass) -> bool:
    """Whether a readable class is within a request's scope."""
    if scope == "public":
        return access.scope == "public"
    if scope == "user":
        return identity.user is not None and access.owner == identity.user
    if scope == "project":
        return access.scope == "project" and identity.project not in (None, "*")
    return True


def analyst_reads(analyst: Analyst, access: AccessClass) -> str:
    """How much of a class an analyst reads: 'text', 'metadata' or 'none'."""
    if analyst.tenant != access.tenant or not set(analyst.tags) & set(access.tags):
        return "none"
    if access.scope == "public":
        return "text"
    if access.scope == "project":
        return "text" if "*" in analyst.projects or access.project in analyst.projects else "none"
    return analyst.user_scope


def analyst_learns(analyst: Analyst, question: LoggedQuestion) -> LoggedQuestion:
    """A question of the analyst's tenant, without what the registration does not give."""
    names_project = "*" in analyst.projects or question.project in analyst.projects
    return replace(
        question,
        user=question.user if analyst.user_scope != "none" else None,
        project=question.project if names_project else None,
        text=question.text if analyst.user_scope == "text" else None,
    )


# --- how a session becomes somebody ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginAs:
    """A call of begin_as()."""

    tenant: str
    user: int | None
    project: str | None
    tags: tuple[str, ...]
    signature: str

    def variables(self) -> dict[str, str]:
        return {
            "app.tenant_id": self.tenant,
            "app.user_id": str(self.user or 0),
            "app.project_id": self.project or "",
            "app.tags": json.dumps(self.tags, ensure_ascii=False, separators=(",", ":")),
            "app.signature": self.signature,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SetLocal:
    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A savepoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBack:
    """Back to the last savepoint, and without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The last savepoint is forgotten, what was set since then stays."""


Step = BeginAs | SetLocal | Mark | RollBack | Release


@dataclass(slots=True, kw_only=True)
class SessionVariables:
    """The variables of one transaction, as the steps leave them."""

    login: str
    keys: Mapping[str, bytes]
    began_at: float
    values: dict[str, str] = field(default_factory=dict)
    marks: list[dict[str, str]] = field(default_factory=list)

    def identity(self) -> Identity | None:
        return identify(self.values, login=self.login, keys=self.keys, began_at=self.began_at)

    def take(self, step: Step) -> frozenset[str]:
        """Take a step; the SQLSTATEs of which it has to fail with one, none when it succeeds."""
        if isinstance(step, BeginAs):
            wanted = step.variables()
            whose = [name for name in VARIABLES if name != "app.signature"]
            another = any(self.values.get(name) for name in whose) and any(
                self.values.get(name, "") != wanted[name] for name in whose
            )
            unsigned = identify(wanted, login=self.login, keys=self.keys, began_at=self.began_at) is None
            stranger = self.login not in ("rag_app", "rag_publisher")
            refusals = {"42501"} if another or stranger or not step.tenant else set()
            if unsigned and not stranger:
                refusals |= {"28000"}
            if not refusals:
                self.values |= wanted
            return frozenset(refusals)
        if isinstance(step, SetLocal):
            self.values[step.name] = step.value
        elif isinstance(step, Mark):
            self.marks.append(dict(self.values))
        elif isinstance(step, RollBack):
            self.values = self.marks.pop()
        else:
            self.marks.pop()
        return frozenset()


# --- what a session sees of a corpus ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """All that one session may learn of a corpus."""

    identity: Identity | None
    classes: tuple[tuple[AccessClass, bool], ...] = ()
    """With whether it may write there."""
    documents: tuple[Document, ...] = ()
    listed: tuple[Document, ...] = ()
    """Documents of which it may know that they exist, and no word of them: an analyst's."""
    memberships: tuple[Membership, ...] = ()
    questions: tuple[LoggedQuestion, ...] = ()

    @property
    def chunks(self) -> Iterator[tuple[Document, Chunk]]:
        return ((document, chunk) for document in self.documents for chunk in document.chunks)

    @property
    def hits(self) -> Iterator[tuple[LoggedQuestion, int, UUID]]:
        """With their ranks, from 1; once for each document of this id that may be read."""
        for question in self.questions:
            for rank, document_id in enumerate(question.hits, 1):
                for row in self.documents:
                    if (row.access.tenant, row.id) == (question.tenant, document_id):
                        yield question, rank, document_id

    def found(
        self,
        words: frozenset[str],
        *,
        embedding_model: str | None,
        scope: str | None,
        document_ids: Sequence[UUID] | None,
    ) -> tuple[str, list[tuple[Document, Chunk]]]:
        """The mode of a search, and all chunks with one of the words or a vector of the model."""
        if self.identity is None:
            return "keyword", []
        searched = [
            (document, chunk)
            for document, chunk in self.chunks
            if is_in_scope(scope, self.identity, document.access)
            and (document_ids is None or document.id in document_ids)
        ]
        comparable = sum(chunk.embedding_model == embedding_model for _, chunk in searched)
        mode = "keyword" if not comparable else "hybrid" if comparable == len(searched) else "partial"
        return mode, [
            (document, chunk)
            for document, chunk in searched
            if words & chunk.words or chunk.embedding_model == embedding_model
        ]


def sight_of(corpus: Corpus, identity: Identity | None, *, login: str) -> Sight:
    if identity is None:
        return Sight(identity=None)
    readable = {
        access.key: may_write(identity, access, corpus.memberships, login=login)
        for access in corpus.classes
        if may_read(identity, access, corpus.memberships)
    }
    return Sight(
        identity=identity,
        classes=tuple((access, readable[access.key]) for access in corpus.classes if access.key in readable),
        documents=tuple(document for document in corpus.documents if document.access.key in readable),
        memberships=tuple(
            row
            for row in corpus.memberships
            if row.tenant == identity.tenant and identity.user in (row.owner, row.member)
        ),
        questions=tuple(row for row in corpus.questions if (row.tenant, row.user) == (identity.tenant, identity.user)),
    )


def sight_of_analyst(corpus: Corpus, role: str) -> Sight:
    """An analyst is who the registration says, and no variable changes that; without one, nobody."""
    for analyst in corpus.analysts:
        if analyst.role == role:
            reads = {access.key: analyst_reads(analyst, access) for access in corpus.classes}
            return Sight(
                identity=Identity(tenant=analyst.tenant, user=None, project=None, tags=analyst.tags),
                classes=tuple((access, False) for access in corpus.classes if reads[access.key] == "text"),
                documents=tuple(row for row in corpus.documents if reads[row.access.key] == "text"),
                listed=tuple(row for row in corpus.documents if reads[row.access.key] == "metadata"),
                questions=tuple(
                    analyst_learns(analyst, row) for row in corpus.questions if row.tenant == analyst.tenant
                ),
            )
    return Sight(identity=None)


# --- what a comparison says ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One difference between model and database. `kind`: leak, hidden, error."""

    kind: str
    path: str
    where: str
    session: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} through {self.path} ({self.where})\n    session: {self.session}\n    {self.detail}"


@dataclass(slots=True, kw_only=True)
class Report:
    """Findings of a run; the first few in full, all of them counted."""

    seed: int
    checks: int = 0
    corpora: int = 0
    counts: dict[str, int] = field(default_factory=lambda: {"leak": 0, "hidden": 0, "error": 0})
    paths: dict[str, set[str]] = field(default_factory=lambda: {"leak": set(), "hidden": set(), "error": set()})
    sessions: dict[str, set[str]] = field(default_factory=lambda: {"leak": set(), "hidden": set(), "error": set()})
    """Kinds of sessions that took part."""
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding, *, session_kind: str) -> None:
        self.counts[finding.kind] += 1
        self.paths[finding.kind].add(finding.path)
        self.sessions[finding.kind].add(session_kind)
        if self.counts[finding.kind] <= 5:
            self.findings.append(finding)

    @property
    def is_clean(self) -> bool:
        return not any(self.counts.values())

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        first = "\n".join(f"  {finding}" for finding in self.findings)
        return f"{counted} in {self.checks} checks; repeat with RAG_TEST_SEED={self.seed}\n{first}"
