"""Plants documents and looks who can get at them: what no reading of the catalog can prove.

A policy may stand there word for word and be defeated by what it calls. So one transaction, which is undone,
writes documents of a tenant that nobody knows, through the statements of the product; reads them back through
every way of reading, as their owner and as a dozen others; and tries to write as those others.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg

from rag.errors import SignatureRefused
from rag.finding import Finding
from rag.principal import ALL_PROJECTS, Principal
from rag.sign import Signer

if TYPE_CHECKING:
    from rag.database import Session

TAG = "canary"
PROJECT = "canary"
SOURCE_TYPE = "text"
ANALYST = "canary_of_palisade"
# Longer than any signature is good for.
LONG_AGO_S = 24 * 60 * 60
# Stale, so that the view of stale documents shows them.
WRITTEN = datetime(2000, 1, 1, tzinfo=UTC)
OTHER_LOGIN = {"rag_app": "rag_publisher", "rag_publisher": "rag_app"}

# Ways of reading, as doctor_read and doctor_read_keys name them, by what they give out.
DOCUMENT_PATHS = (
    *("search", "search by words", "search by vector", "explain", "my_document", "my_documents", "my_chunks"),
    *("v_documents", "titles of v_documents", "v_chunks", "v_stale_documents", "v_source_usage"),
)
# Where an analyst may find that a document exists, without a word of it.
LISTING_PATHS = ("my_listed_documents", "v_documents", "v_stale_documents", "v_source_usage")
CLASS_PATHS = ("my_classes", "whoami", "my_access_ids")
QUERY_PATHS = ("my_queries", "v_query_latency", "v_empty_results", "v_routed_queries")
HIT_PATHS = ("my_query_chunks", "my_feedback", "v_feedback")
PEOPLES_PATHS = (*DOCUMENT_PATHS, "my_listed_documents", *CLASS_PATHS, *QUERY_PATHS, *HIT_PATHS, "search_mode")
SERVICE_DOCUMENT_PATHS = (
    *("rag_documents", "rag_chunks", "my_document_chunks", "my_documents_among", "my_sources_among", "look_at_source"),
    "derived_documents",
)
SERVICE_PATHS = (
    *(*SERVICE_DOCUMENT_PATHS, "look_at_source of a deleted one", "my_members", "my_tag_owner", "my_prompt"),
)
# More say no more.
NAMED_PATHS = 4

Deed = tuple[str, Callable[[], Awaitable[object]]]
"""What somebody does, in words, and how: refused, or without a row that it returns, it is not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A document of the canary."""

    scope: str
    access_id: int
    document_id: UUID


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Somebody who reads, and what they must see of it."""

    name: str
    principal: Principal | None
    """None = nobody: all variables are empty."""
    signature: str
    scopes: frozenset[str] = frozenset()
    """Scopes of the documents that they must see."""
    listed: frozenset[str] = frozenset()
    """Scopes of the documents of which they must see that they exist."""
    has_asked: bool = False
    """Whether they must see the logged questions."""
    shares: bool = False
    """Whether they share the project, or have been given it."""
    told: frozenset[str] = frozenset()
    """Of the prompt of the tenant and the owner of the tag, what they must see once both are there."""


class _NotPlanted(Exception):
    """Somebody cannot write where they have a class."""


def _user_id() -> int:
    return secrets.randbelow(10**17) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """What one run plants, and the login that plants and reads."""

    session: Session
    signer: Signer
    role: str
    """The login of the session."""
    now: float
    """The time of the database, in seconds since 1970."""
    dimensions: int
    thorough: bool = True
    """Otherwise half of the others stay away: each of them takes 10 to 20 milliseconds."""
    operated: bool = False
    """Whether operators have named an owner of the tag, and set a prompt of the tenant."""
    run: str = field(default_factory=lambda: f"canary{secrets.token_hex(8)}")
    """A word that is in no document, and names the tenant and the source."""
    owner_id: int = field(default_factory=_user_id)
    other_id: int = field(default_factory=_user_id)
    member_id: int = field(default_factory=_user_id)

    @property
    def owner(self) -> Principal:
        return Principal(tenant_id=self.run, user_id=self.owner_id, project_id=ALL_PROJECTS, tags=(TAG,))

    @property
    def other(self) -> Principal:
        return replace(self.owner, user_id=self.other_id)

    @property
    def member(self) -> Principal:
        return replace(self.owner, user_id=self.member_id)

    @property
    def stranger(self) -> Principal:
        return replace(self.owner, tenant_id=f"{self.run} elsewhere")

    async def findings(self) -> list[Finding]:
        """What does not hold; nothing of what was written for it stays."""

        async def look(found: list[Finding]) -> None:
            planted = await self.plant()
            found += self.as_findings(await self.misread(planted))
            found += self.as_findings(await self.miswritten(planted))

        return await _released(self.session, look, subject=f"canary as {self.role}")

    def as_findings(self, messages: Iterable[str]) -> list[Finding]:
        """What the login of the session has got and must not, or has not and must."""
        return _findings(f"canary as {self.role}", messages)

    # --- planting --------------------------------------------------------------------------------

    async def plant(self) -> list[Planted]:
        """Documents of each scope that the login may write, and what goes with them."""
        await self.session.run(
            "begin_as",
            {
                "tenant_id": self.owner.tenant_id,
                "user_id": self.owner.user_id,
                "project_id": self.owner.project_id,
                "tags": list(self.owner.tags),
                "signature": self._sign(self.owner),
            },
        )
        scopes = ("public", "user", "project") if self.role == "rag_publisher" else ("user", "project")
        planted = [await self._plant_document(scope) for scope in scopes]
        for hits in (planted, []):
            logged = self._logged(hits)
            await self.session.run("log_query", logged)
            for hit in hits:
                said = {"document_id": hit.document_id, "chunk_index": 0, "rating": 1, "clicked": True}
                await self.session.run("give_feedback", said | {"query_id": logged["id"]})
        await self.session.run("audit_assertion", self._asserted())
        await self.session.run("doctor_share", {"project_id": PROJECT, "member_user_id": self.member_id})
        buried = {"source_type": SOURCE_TYPE, "source_id": f"{self.run} deleted", "reason": "canary"}
        await self.session.run("bury_source", buried | {"access_id": _of_scope(planted, "user").access_id})
        return planted

    async def _plant_document(self, scope: str) -> Planted:
        granted = await self.session.row("access_class", self._owned(scope))
        assert granted is not None
        unset = (
            "id",
            "source_uri",
            "source_updated_at",
            "domain",
            "doc_type",
            "provenance_id",
            "task_id",
            "created_at",
        )
        written = await self.session.row(
            "insert_document",
            dict.fromkeys(unset)
            | {
                "tenant_id": self.owner.tenant_id,
                "access_id": granted["access_id"],
                "source_type": SOURCE_TYPE,
                "source_id": self.run,
                "source_hash": "canary",
                "language": "en",
                "title": "A canary",
                "body": self.run,
                "verified": False,
                "metadata": "{}",
                "content_updated_at": WRITTEN,
            },
        )
        if written is None:
            raise _NotPlanted
        planted = Planted(scope=scope, access_id=granted["access_id"], document_id=written["id"])
        await self.session.run("insert_chunks", self._chunk(planted, index=0))
        return planted

    def _owned(self, scope: str) -> dict[str, Any]:
        """What names the class of a scope."""
        return {
            "scope": scope,
            "user_id": None if scope == "public" else self.owner_id,
            "project_id": PROJECT if scope == "project" else None,
            "tags": [TAG],
        }

    def _chunk(self, planted: Planted, *, index: int) -> dict[str, Any]:
        return {
            "tenant_id": self.owner.tenant_id,
            "access_id": planted.access_id,
            "document_id": planted.document_id,
            "embedding_model": self.run,
            "token_counter": "bytes/3",
            "language": "en",
            "chunk_indexes": [index],
            "chunk_texts": [self.run],
            "chunk_hashes": ["canary"],
            "token_counts": [1],
            "start_offsets": [0],
            "end_offsets": [len(self.run)],
            "page_numbers": [None],
            "sections": [None],
            "indexed_texts": [self.run],
            "embeddings": [self._embedding],
        }

    @property
    def _embedding(self) -> str:
        return "[" + ",".join(["1", *["0"] * (self.dimensions - 1)]) + "]"

    def _logged(self, hits: Collection[Planted]) -> dict[str, Any]:
        unset = ("project_id", "scope", "model_used", "confidence", "route_tag", "route_fallback")
        return dict.fromkeys(unset) | {
            "tenant_id": self.owner.tenant_id,
            "id": uuid4(),
            "user_id": self.owner_id,
            "query_hash": "canary",
            "query_length": len(self.run),
            "query_text": self.run,
            "mode": "hybrid",
            "action": "ROUTE",
            "embedding_model": self.run,
            "result_count": len(hits),
            "citation_count": 0,
            "context_tokens": 0,
            "retrieval_ms": 0.0,
            "generation_ms": 0.0,
            "latency_ms": 0.0,
            "document_ids": [hit.document_id for hit in hits],
            "chunk_indexes": [0 for _ in hits],
            "scores": [0.0 for _ in hits],
            "cosines": [1.0 for _ in hits],
            "cited": [False for _ in hits],
        }

    def _asserted(self) -> dict[str, Any]:
        return {
            "tenant_id": self.owner.tenant_id,
            "key_id": "canary",
            "user_id": self.owner_id,
            "project_id": None,
            "tags": [TAG],
            "action": "query",
        }

    def _retracted(self) -> dict[str, Any]:
        return {
            "tenant_id": self.owner.tenant_id,
            "user_id": self.owner_id,
            "project_id": None,
            "action": "invalidate",
            "reason": "canary",
            "cascade_id": "canary",
            "sources": 0,
            "documents": 0,
            "chunks": 0,
        }

    # --- reading ---------------------------------------------------------------------------------

    async def misread(self, planted: Sequence[Planted]) -> list[str]:
        """Who sees what they must not, or does not see what they must."""
        messages: list[str] = []
        for speaker in self._speakers():
            await self.speak(speaker.principal, speaker.signature)
            seen = await self.read(planted)
            for path, things in (await self.read_keys(planted)).items():
                seen[path] = things
            messages += _differences(speaker, planted, seen, (*PEOPLES_PATHS, *SERVICE_PATHS))
        return messages

    def _speakers(self) -> Iterator[Speaker]:
        """Their owner and everybody else; those whose signature is not theirs must be nobody."""
        owner = self.owner

        def speaker(
            name: str, principal: Principal, scopes: str = "", *, shares: bool = False, has_asked: bool = False
        ) -> Speaker:
            signature = self._sign(principal)
            told = {"prompt"} if principal.tenant_id == self.run else set()
            if told and TAG in principal.tags:
                told.add("owner")
            return Speaker(
                name=name,
                principal=principal,
                signature=signature,
                scopes=frozenset(scopes.split()),
                shares=shares,
                has_asked=has_asked,
                told=frozenset(told if self.operated else ()),
            )

        def forger(name: str, signature: str) -> Speaker:
            return Speaker(name=name, principal=owner, signature=signature)

        yield speaker("their owner", owner, "public user project", has_asked=True, shares=True)
        yield speaker("their owner with other tags", replace(owner, tags=("other",)), has_asked=True, shares=True)
        yield speaker("another user", self.other, "public")
        yield speaker("the same user of another tenant", self.stranger)
        yield Speaker(name="nobody", principal=None, signature="")
        invented = replace(self.signer, secret=secrets.token_bytes(32))
        yield forger("somebody with a key of their own", self._sign(owner, signer=invented))
        if not self.thorough:
            return
        elsewhere = replace(owner, project_id=f"not {PROJECT}")
        yield speaker("their owner in another project", elsewhere, "public user", has_asked=True, shares=True)
        yield speaker("a member of the project", self.member, "public project", shares=True)
        yield speaker("a principal without a user", replace(owner, user_id=None), "public")
        yield forger("somebody without a signature", "")
        yield forger("somebody with another's signature", self._sign(self.other))
        yield forger("somebody with a signature for another login", self._sign(owner, role=OTHER_LOGIN[self.role]))
        yield forger("somebody with an old signature", self._sign(owner, now=self.now - LONG_AGO_S))

    def _sign(
        self, principal: Principal, *, role: str | None = None, signer: Signer | None = None, now: float | None = None
    ) -> str:
        return (signer or self.signer).sign(principal, role=role or self.role, now=now or self.now)

    async def speak(self, principal: Principal | None, signature: str) -> None:
        """Set the variables as somebody could who has the password of the service."""
        await self.session.run(
            "doctor_speak",
            {
                "tenant_id": "" if principal is None else principal.tenant_id,
                "user_id": "" if principal is None else str(principal.user_id or 0),
                "project_id": "" if principal is None else principal.project_id or "",
                "tags": "" if principal is None else json.dumps(list(principal.tags)),
                "signature": signature,
            },
        )

    async def read(self, planted: Sequence[Planted]) -> dict[str, set[str]]:
        """What comes through each of the ways that people have."""
        return _by_path(
            await self.session.rows(
                "doctor_read",
                {
                    "question": self.run,
                    "embedding": self._embedding,
                    "embedding_model": self.run,
                    "document_ids": [one.document_id for one in planted],
                },
            )
        )

    async def read_keys(self, planted: Sequence[Planted]) -> dict[str, set[str]]:
        """What comes through those that only the service has."""
        return _by_path(
            await self.session.rows(
                "doctor_read_keys",
                {
                    "tenant_id": self.owner.tenant_id,
                    "document_ids": [one.document_id for one in planted],
                    "access_ids": [one.access_id for one in planted],
                    "scopes": [one.scope for one in planted],
                    "user_id": self.owner_id,
                    "project_id": PROJECT,
                    "source_type": SOURCE_TYPE,
                    "source_id": self.run,
                    "tag": TAG,
                },
            )
        )

    # --- writing ---------------------------------------------------------------------------------

    async def miswritten(self, planted: Sequence[Planted]) -> list[str]:
        """Who writes what they must not, or cannot write what they may."""
        messages = []
        for name, principal, target in self._intruders(planted):
            await self.speak(principal, "" if principal is None else self._sign(principal))
            for words, deed in self._intrusions(principal, target):
                if await self._is_done(deed):
                    messages.append(f"{name} {words}")
        await self.speak(self.owner, self._sign(self.owner))
        for words, deed in self._lies(planted):
            if await self._is_done(deed):
                messages.append(f"their owner {words}")
        for words, deed in self._rightful_deeds(_of_scope(planted, "user")):
            if not await self._is_done(deed):
                messages.append(f"their owner cannot {words}")
        return messages

    async def _is_done(self, deed: Callable[[], Awaitable[object]]) -> bool:
        """Whether a statement does what it is for; undone either way."""
        try:
            async with self.session.attempt():
                return await deed() != []
        except psycopg.errors.InsufficientPrivilege:
            return False
        except psycopg.IntegrityError:
            # A policy comes first: what only a constraint has stopped, the policies have let through.
            return True

    def _intruders(self, planted: Sequence[Planted]) -> Iterator[tuple[str, Principal | None, Planted]]:
        user = _of_scope(planted, "user")
        yield "another user", self.other, user
        yield "the same user of another tenant", self.stranger, user
        yield "nobody", None, user
        if not self.thorough:
            return
        yield "a principal without a user", replace(self.owner, user_id=None), user
        yield "a member who may only read", self.member, _of_scope(planted, "project")

    def _intrusions(self, principal: Principal | None, target: Planted) -> Iterator[Deed]:
        session = self.session
        place = self._place(target)
        owned = self._owned(target.scope)
        source = {"source_type": SOURCE_TYPE, "source_id": f"{self.run} intruded"}
        if principal != self.stranger:  # who has a class with the same words
            yield "has their class for writing", lambda: session.run("access_class", owned)
        document = place | owned | source
        yield "adds a document to their class", lambda: session.run("doctor_add_document", document)
        chunk = self._chunk(target, index=1)
        yield "adds a chunk to their document", lambda: session.run("insert_chunks", chunk)
        yield "changes their document", lambda: session.rows("doctor_change_document", place)
        yield "removes their document", lambda: session.rows("doctor_remove_document", place)
        yield "removes their chunks", lambda: session.rows("doctor_remove_chunks", place)
        buried = place | source | {"reason": "canary"}
        yield "buries their source", lambda: session.run("bury_source", buried)
        closed = {
            "access_ids": [target.access_id],
            "source_ids": [self.run],
            "provenance_ids": [None],
            "document_ids": [None],
            "cascade_id": "canary",
        }
        yield "retracts their source", lambda: session.run("close_sources", closed)
        yield "logs a question as theirs", lambda: session.run("log_query", self._logged([]))
        yield "is audited as them", lambda: session.run("audit_assertion", self._asserted())
        yield "retracts in their name", lambda: session.run("audit_retraction", self._retracted())

    def _lies(self, planted: Sequence[Planted]) -> Iterator[Deed]:
        """What not even the owner may do."""
        session = self.session
        lie = {"source_type": SOURCE_TYPE, "source_id": f"{self.run} lied", "tags": ["public"]}
        document = self._place(_of_scope(planted, "user")) | self._owned("user") | lie
        yield "names other tags than those of the class", lambda: session.run("doctor_add_document", document)
        if self.role == "rag_publisher":
            return
        yield "publishes", lambda: session.run("access_class", self._owned("public"))
        published = [self._place(one) for one in planted if one.scope == "public"]
        if published:
            yield "changes what is public", lambda: session.rows("doctor_change_document", published[0])
            yield "removes what is public", lambda: session.rows("doctor_remove_document", published[0])

    def _rightful_deeds(self, target: Planted) -> Iterator[Deed]:
        session = self.session
        place = self._place(target)
        yield "change their document", lambda: session.rows("doctor_change_document", place)
        yield "remove their chunks", lambda: session.rows("doctor_remove_chunks", place)
        yield "remove their document", lambda: session.rows("doctor_remove_document", place)

    def _place(self, target: Planted) -> dict[str, Any]:
        return {
            "tenant_id": self.owner.tenant_id,
            "access_id": target.access_id,
            "document_id": target.document_id,
        }


# --- as everybody, in one transaction of a superuser -------------------------------------------------


async def findings_of_all_logins(
    session: Session, execute: Callable[[str], Awaitable[object]], *, now: float, dimensions: int
) -> list[Finding]:
    """What the logins of the service see of each other's documents, and what operators and analysts get.

    A superuser can be every login in turn, so that all of them meet in one transaction, which is undone. Needs
    no key of the service: it makes one that is gone with it. `execute` runs a statement that is not in
    sql/queries, because the database put it together.
    """

    async def look(found: list[Finding]) -> None:
        asking = await session.row("doctor_database", {})
        assert asking is not None
        superuser = asking["login"]
        await session.run("doctor_become", {"role_name": "rag_operator"})
        key = await session.row("add_signing_key", {})
        assert key is not None
        signer = Signer(key_id=key["key_id"], secret=bytes.fromhex(key["secret"]))
        publisher = Canary(
            session=session, signer=signer, role="rag_publisher", now=now, dimensions=dimensions, operated=True
        )
        place = {"tenant_id": publisher.run}
        owned = {"name": TAG, "owner_user_id": publisher.owner_id, "owner_email": None}
        await session.run("set_tag_owner", place | owned)
        await session.run("set_prompt", place | {"prompt": publisher.run, "replaces": False})
        await session.run("doctor_become", {"role_name": "rag_publisher"})
        planted = await publisher.plant()
        for canary in (publisher, replace(publisher, role="rag_app")):
            await session.run("doctor_become", {"role_name": canary.role})
            found += canary.as_findings(await canary.misread(planted))
            found += canary.as_findings(await canary.miswritten(planted))
        misread = await _misread_by_analysts(publisher, planted, superuser, execute)
        found += _findings(f"canary as {ANALYST}", misread)
        await session.run("doctor_become", {"role_name": "rag_operator"})
        found += _findings("canary as rag_operator", await _mishandled_by_operators(publisher, planted))

    return await _released(session, look, subject="canary as all logins")


async def _misread_by_analysts(
    canary: Canary, planted: Sequence[Planted], superuser: str, execute: Callable[[str], Awaitable[object]]
) -> list[str]:
    """What an analyst sees, admitted in several ways; the variables of the owner, signed, are set all the time."""
    session = canary.session
    await session.run("doctor_become", {"role_name": superuser})
    made = await session.row("doctor_make_analyst", {"role_name": ANALYST})
    assert made is not None
    await execute(made["statement"])
    everything = frozenset({"public", "user", "project"})
    own = {"tenant_id": canary.run, "tags": [TAG], "projects": [PROJECT], "user_scope": "text"}
    elsewhere = f"{canary.run} elsewhere"
    admissions: tuple[tuple[str, dict[str, Any], frozenset[str], frozenset[str], bool], ...] = (
        ("an analyst of all", own, everything, frozenset(), True),
        (
            "an analyst of no text of users",
            own | {"user_scope": "metadata"},
            everything - {"user"},
            frozenset({"user"}),
            True,
        ),
        ("an analyst of no users", own | {"user_scope": "none"}, everything - {"user"}, frozenset(), True),
        ("an analyst of no projects", own | {"projects": []}, everything - {"project"}, frozenset(), True),
        ("an analyst with other tags", own | {"tags": ["other"]}, frozenset(), frozenset(), True),
        ("an analyst of another tenant", own | {"tenant_id": elsewhere}, frozenset(), frozenset(), False),
    )
    await canary.speak(canary.owner, canary.signer.sign(canary.owner, role=ANALYST, now=canary.now))
    messages: list[str] = []
    for name, admission, scopes, listed, has_asked in admissions:
        async with session.attempt():
            await session.run("doctor_become", {"role_name": "rag_operator"})
            await session.run("doctor_admit_analyst", admission | {"role_name": ANALYST})
            await session.run("doctor_become", {"role_name": ANALYST})
            speaker = Speaker(
                name=name, principal=None, signature="", scopes=scopes, listed=listed, has_asked=has_asked
            )
            messages += _differences(speaker, planted, await canary.read(planted), PEOPLES_PATHS)
    return messages


async def _mishandled_by_operators(canary: Canary, planted: Sequence[Planted]) -> list[str]:
    """Operators explain, count and erase; they read nothing."""
    session = canary.session
    messages = []
    for name, reading in (("people", canary.read), ("the service", canary.read_keys)):
        try:
            async with session.attempt():
                await reading(planted)
            messages.append(f"an operator may read the way that {name} do")
        except psycopg.errors.InsufficientPrivilege:
            pass
    for one in planted:
        for principal, sees in ((canary.owner, True), (canary.stranger, False)):
            asked = {
                "document_id": one.document_id,
                "tenant_id": principal.tenant_id,
                "user_id": principal.user_id,
                "project_id": principal.project_id,
                "tags": list(principal.tags),
            }
            verdicts = {row["visible"] for row in await session.rows("explain_access", asked)}
            if verdicts != {sees}:
                messages.append(f"explain_access says the contrary of who sees the {one.scope} document")
    subject = dict.fromkeys(("user_id", "project_id", "source_type", "source_id")) | {"tenant_id": canary.run}
    counted = {row["table_name"]: row["rows_left"] for row in await session.rows("count_traces", subject)}
    if counted["rag_documents"] != len(planted) or counted["rag_chunks"] != len(planted):
        messages.append("count_traces does not count all that is stored")
    await session.run("forget", subject)
    left = [row["table_name"] for row in await session.rows("count_traces", subject) if row["rows_left"]]
    if left:
        messages.append(f"forget leaves rows in {', '.join(left)}")
    return messages


# --- what was seen, against what must be ---------------------------------------------------------------


async def _released(
    session: Session, look: Callable[[list[Finding]], Awaitable[None]], *, subject: str
) -> list[Finding]:
    """What `look` finds until it ends, or cannot go on; whatever it writes is undone."""
    found: list[Finding] = []
    try:
        async with session.attempt():
            await look(found)
    except _NotPlanted:
        found += _findings(subject, ["who has a class does not see it, and can write nothing"])
    except psycopg.errors.InvalidAuthorizationSpecification:
        found += _findings(subject, [SignatureRefused().message])
    except psycopg.Error as error:
        # Of what the canary itself sent: the message quotes nobody.
        found += _findings(subject, [f"cannot be planted or read: {error.diag.message_primary} ({error.sqlstate})"])
    return found


def _findings(subject: str, messages: Iterable[str]) -> list[Finding]:
    return [Finding(severity="error", object=subject, message=message) for message in messages]


def _by_path(rows: Sequence[Mapping[str, Any]]) -> dict[str, set[str]]:
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["path"], set()).add(row["thing"])
    return seen


def _of_scope(planted: Sequence[Planted], scope: str) -> Planted:
    return next(one for one in planted if one.scope == scope)


def _wanted(speaker: Speaker, planted: Sequence[Planted]) -> dict[str, set[str]]:
    """What has to come through each way of reading, and nothing else."""
    visible = [one for one in planted if one.scope in speaker.scopes]
    documents = {str(one.document_id) for one in visible}
    listed = {str(one.document_id) for one in planted if one.scope in speaker.listed}
    wanted = dict.fromkeys((*DOCUMENT_PATHS, *SERVICE_DOCUMENT_PATHS), documents)
    wanted |= {path: wanted.get(path, set()) | listed for path in LISTING_PATHS}
    wanted |= {path: {str(one.access_id) for one in visible} for path in CLASS_PATHS}
    wanted |= {path: {"query"} if speaker.has_asked else set() for path in QUERY_PATHS}
    wanted |= {path: documents if speaker.has_asked else set() for path in HIT_PATHS}
    wanted["my_tag_owner"] = set(speaker.told & {"owner"})
    wanted["my_prompt"] = set(speaker.told & {"prompt"})
    wanted["search_mode"] = {"something"} if visible else set()
    wanted["look_at_source of a deleted one"] = {str(one.access_id) for one in visible if one.scope == "user"}
    wanted["my_members"] = {"member"} if speaker.shares else set()
    return wanted


def _differences(
    speaker: Speaker, planted: Sequence[Planted], seen: Mapping[str, set[str]], paths: Sequence[str]
) -> Iterator[str]:
    """What comes and must not, and what does not come and must; one message for each thing."""
    names = {"query": "the logged question", "member": "the shared project", "something": "that there is something"}
    names |= {"owner": "the owner of the tag", "prompt": "the prompt"}
    names |= {str(one.document_id): f"the {one.scope} document" for one in planted}
    names |= {str(one.access_id): f"the class of the {one.scope} document" for one in planted}
    wanted = _wanted(speaker, planted)
    for verb, have, want in (("sees", seen, wanted), ("does not see", wanted, seen)):
        through: dict[str, list[str]] = {}
        for path in paths:
            for thing in sorted(have.get(path, set()) - want.get(path, set())):
                through.setdefault(names.get(thing, "what is not the canary's"), []).append(path)
        for name, ways in through.items():
            listed = ", ".join(dict.fromkeys(ways[:NAMED_PATHS]))
            more = f" and {len(ways) - NAMED_PATHS} more" if len(ways) > NAMED_PATHS else ""
            yield f"{speaker.name} {verb} {name} through {listed}{more}"
