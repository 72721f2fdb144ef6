"""Random corpora and sessions for the oracle suites, and their way into a database.

Everything comes from one seed: RAG_TEST_SEED repeats a run. Rows are copied straight into the tables by a
superuser; sessions are opened with statements of this file alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any
from uuid import UUID

import psycopg
from psycopg import sql

from tests.barrier.oracle_model import (
    VARIABLES,
    AccessClass,
    Analyst,
    BeginAs,
    Chunk,
    Corpus,
    Document,
    LoggedQuestion,
    Mark,
    Membership,
    Release,
    RollBack,
    SetLocal,
    Step,
    sign,
)

PLAN_MODES = ("auto", "force_generic_plan", "force_custom_plan")
MODELS = ("model-a", "model-b")
DIMENSIONS = 512
DATED = "2026-01-01 00:00:00+00"

# Names that differ in what people and careless code overlook: case, spaces, scripts, quoting, patterns.
TENANTS = (
    *("acme", "Acme", "acme ", " acme", "аcme", "ａcme", "acme\u200b", "acmé", "acme\u0301"),
    *("%", "_", "*", "a%", "0", "null", "''", '"', "\\", "acme,umbrella", "{acme}", "t' or 'a'='a", "☃" * 128),
)
PROJECTS = (
    *("alpha", "Alpha", "alpha ", "аlpha", "alphа", "al%", "alpha,beta", "beta", "public", "**", "null", "\\"),
    *("'", "профиль", "1", "p" * 128),
)
TAGS = (
    *("public", "Public", "public ", "рublic", "hr", "HR", "hr,finance", "finance", "{hr}", '"hr"', "hr\\", "h/r"),
    *("null", "", "кадры", "🙂", "%", "'", "a" * 64),
)
USERS = (1, 2, 3, 11, 12, 10**9, 10**18 - 1)
WORDS = (*(f"zq{number}" for number in range(14)), "жq1", "ζq1")
LANGUAGES = (None, "en", "ru", "de", "zz")

# What is not well-formed, whatever a lenient reader may make of it; § stands for the well-formed value.
MALFORMED: Mapping[str, tuple[str, ...]] = {
    "app.tenant_id": ("", "t" * 129, "§\n", "\t§", "\x01§", "§\x7f"),
    "app.user_id": (
        *("", "abc", " § ", "§ ", "\u00a0§", "§\n", "0§", "+§", "-§", "§.0", "§e0", "0x§", "0b1", "1_0", "1e3", "-0"),
        *("００", "１", "١", "00", "NaN", "Infinity", "§,2", "§;2", "null", "true", "§' or '1'='1", "1" + "0" * 18),
        "9" * 20,
    ),
    "app.project_id": ("p" * 129, "§\n", "\x1f§", "\x0c§", "*\n"),
    "app.tags": (
        *("", " ", "null", "{}", "{public}", '"public"', "public", "public,hr", "[1]", "[null]", '["public", null]'),
        *("[true]", "[{}]", "[§]", "[", "]", "§,", ",§", "§§", "§ x", '["public', '["public"', '["public",]', "[,]"),
        *('[,"public"]', '["public" "hr"]', "['public']", '["\\u0070ublic"]', '["public", "\\n"]', '["\\u0000"]'),
        *('["\\ud800", "public"]', '["public\n"]', "[" * 5000, '["public", "' + "x" * 65536 + '"]'),
        *("\x0b§", "§\x0c", "\u00a0§", "§\u2003", "\ufeff§", '["public",\u2003"hr"]', "[public]"),
    ),
}


def seed_of_run() -> int:
    """RAG_TEST_SEED, else a new one; whoever fails prints it."""
    given = os.environ.get("RAG_TEST_SEED")
    return int(given) if given else secrets.randbits(32)


# --- corpora ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a corpus and the sessions on it choose from: few, so that they meet."""

    tenants: tuple[str, ...]
    users: tuple[int, ...]
    projects: tuple[str, ...]
    tags: tuple[str, ...]

    @classmethod
    def chosen(cls, random: Random) -> Names:
        return cls(
            tenants=tuple(random.sample(TENANTS, random.randint(2, 3))),
            users=tuple(random.sample(USERS, random.randint(2, 3))),
            projects=tuple(random.sample(PROJECTS, random.randint(2, 3))),
            tags=tuple(random.sample(TAGS, random.randint(2, 4))),
        )

    def some_tags(self, random: Random, most: int) -> tuple[str, ...]:
        return tuple(random.sample(self.tags, random.randint(1, min(most, len(self.tags)))))


def uuid(random: Random) -> UUID:
    return UUID(int=random.getrandbits(128), version=4)


def _classes(random: Random, names: Names, analysts: Sequence[str]) -> list[AccessClass]:
    numbers: list[int] = []
    made: dict[tuple[object, ...], AccessClass] = {}
    for tenant in names.tenants:
        own: set[int] = set()
        for _ in range(random.randint(8, 20)):
            scope = random.choices(("public", "user", "project"), (2, 3, 4))[0]
            tags = tuple(sorted(names.some_tags(random, 3)))
            owner = None if scope == "public" else random.choice(names.users)
            project = random.choice(names.projects) if scope == "project" else None
            # Numbers that another tenant has as well: only the tenant tells those classes apart.
            number = random.choice(numbers) if numbers and random.random() < 0.3 else random.getrandbits(60)
            if number not in own and (tenant, scope, owner, project, tags) not in made:
                own.add(number)
                made[tenant, scope, owner, project, tags] = AccessClass(
                    tenant=tenant, access_id=number, scope=scope, owner=owner, project=project, tags=tags
                )
        numbers += sorted(own)
    return list(made.values())


def _document(random: Random, access: AccessClass, identifier: UUID, number: int, page: int) -> Document:
    """`number` is its own in the corpus, `page` in its class: the same path is in many classes."""
    language = random.choice(LANGUAGES)
    chunks = []
    for index in range(random.choice((0, 1, 1, 2, 3))):
        words = random.sample(WORDS, random.randint(1, 4))
        chunks.append(
            Chunk(
                id=uuid(random),
                index=index,
                text=f"passage {number}.{index}: {' '.join(words)}",
                words=frozenset(words),
                language=language,
                embedding=tuple(float(random.choice((-1, 1)) * random.randint(1, 9)) for _ in range(4)),
                embedding_model=random.choices(MODELS, (4, 1))[0],
            )
        )
    return Document(
        id=identifier,
        access=access,
        source_type=random.choice(("text", "markdown")),
        source_id=f"docs/page-{page}.md",
        title=f"title {number}",
        body=f"body {number}",
        chunks=tuple(chunks),
    )


def random_corpus(random: Random, names: Names, *, analysts: Sequence[str] = ()) -> Corpus:
    classes = _classes(random, names, analysts)
    documents: list[Document] = []
    for access in classes:
        taken: set[UUID] = set()
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            identifier = uuid(random)
            if documents and random.random() < 0.1:
                identifier = random.choice(documents).id
            if identifier not in taken:
                taken.add(identifier)
                documents.append(_document(random, access, identifier, len(documents), len(taken)))
    memberships: list[Membership] = []
    for tenant, owner, member, project in product(names.tenants, names.users, names.users, names.projects):
        if owner != member and random.random() < 0.4:
            may_write = random.random() < 0.5
            memberships.append(
                Membership(tenant=tenant, owner=owner, project=project, member=member, may_write=may_write)
            )
    return Corpus(
        classes=tuple(classes),
        documents=tuple(documents),
        memberships=tuple(memberships),
        analysts=tuple(
            Analyst(
                role=role,
                tenant=random.choice(names.tenants),
                tags=names.some_tags(random, 3),
                projects=random.choice(((), ("*",), (random.choice(names.projects),), names.projects)),
                user_scope=random.choice(("none", "metadata", "text")),
            )
            for role in analysts
            if random.random() < 0.8
        ),
        questions=tuple(
            LoggedQuestion(
                tenant=tenant,
                id=uuid(random),
                user=random.choice((0, *names.users)),
                project=random.choice((None, "*", *names.projects)),
                text=f"question {tenant} {number}",
                hits=tuple(random.choice(documents).id for _ in range(random.choice((0, 1, 3)))) if documents else (),
            )
            for tenant in names.tenants
            for number in range(random.randint(0, 6))
        ),
    )


def _lexemes(words: frozenset[str]) -> str:
    return " ".join(f"'{word}':{place}" for place, word in enumerate(sorted(words), 1))


def vector(components: Sequence[float]) -> str:
    return "[" + ",".join(str(value) for value in (*components, *[0.0] * (DIMENSIONS - len(components)))) + "]"


def tags_digest(tags: Sequence[str]) -> bytes:
    return hashlib.sha256(json.dumps(tags, ensure_ascii=False, separators=(",", ":")).encode()).digest()


def plant(superuser: psycopg.Connection, corpus: Corpus) -> None:
    """Make the database hold this corpus and nothing else."""
    rows: dict[str, list[tuple[Any, ...]]] = {
        "rag_access_classes (tenant_id, access_id, scope, user_id, project_id, tags, tags_digest, created_at)": [
            (
                *(access.tenant, access.access_id, access.scope, access.owner, access.project, list(access.tags)),
                *(tags_digest(access.tags), DATED),
            )
            for access in corpus.classes
        ],
        "rag_project_members (tenant_id, owner_user_id, project_id, member_user_id, may_write, created_at)": [
            (row.tenant, row.owner, row.project, row.member, row.may_write, DATED) for row in corpus.memberships
        ],
        """rag_documents (tenant_id, id, access_id, scope, user_id, project_id, tags, source_type, source_id,
            source_hash, title, body, language, metadata, created_at, updated_at, content_updated_at)""": [
            (
                *(row.access.tenant, row.id, row.access.access_id, row.access.scope, row.access.owner),
                *(row.access.project, list(row.access.tags), row.source_type, row.source_id, "hash", row.title),
                *(row.body, "en", json.dumps({"title": row.title}), DATED, DATED, DATED),
            )
            for row in corpus.documents
        ],
        """rag_chunks (tenant_id, access_id, id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
            token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count, language,
            created_at)""": [
            (
                *(row.access.tenant, row.access.access_id, chunk.id, row.id, chunk.index, chunk.text, "hash"),
                *(len(chunk.words), "words", 0, len(chunk.text), vector(chunk.embedding), chunk.embedding_model),
                *(_lexemes(chunk.words), len(chunk.words), chunk.language, DATED),
            )
            for row in corpus.documents
            for chunk in row.chunks
        ],
        """rag_query_logs (tenant_id, id, user_id, project_id, query_hash, query_length, query_text, mode,
            result_count, citation_count, context_tokens, retrieval_ms, generation_ms, latency_ms, created_at)""": [
            (
                *(row.tenant, row.id, row.user, row.project, "hash", 20, row.text, "hybrid"),
                *(len(row.hits), 0, 0, 1.0, 0.0, 1.0, DATED),
            )
            for row in corpus.questions
        ],
        """rag_query_log_chunks (tenant_id, query_id, user_id, rank, document_id, chunk_index, score,
            cited)""": [
            (row.tenant, row.id, row.user, rank, document_id, 0, 0.5, False)
            for row in corpus.questions
            for rank, document_id in enumerate(row.hits, 1)
        ],
        "rag_analysts (tenant_id, role_name, tags, projects, user_scope, created_at)": [
            (row.tenant, row.role, list(row.tags), list(row.projects), row.user_scope, DATED) for row in corpus.analysts
        ],
    }
    with superuser.transaction(), superuser.cursor() as cursor:
        for (index,) in cursor.execute(
            "select indexrelid::regclass::text from pg_index"
            " where indrelid = 'rag.rag_chunks'::regclass and indpred is not null"
        ).fetchall():
            cursor.execute(f"drop index {index}".encode())
        for table in (
            *("rag_chunks", "rag_documents", "rag_tombstones", "rag_project_members", "rag_access_classes"),
            *("rag_analysts", "rag_query_logs"),
        ):
            cursor.execute(sql.SQL("delete from rag.{}").format(sql.Identifier(table)))
        for target, values in rows.items():
            with cursor.copy(f"copy rag.{target} from stdin".encode()) as copy:
                for value in values:
                    copy.write_row(value)


# The search takes another way to a class that has indexes of its own.
LARGE_CLASSES = 4
OWN_INDEXES = (
    ("vector", "hnsw (embedding rag.halfvec_cosine_ops)"),
    ("words", "gin (tsv) with (fastupdate = off)"),
)


def enlarge(superuser: psycopg.Connection, corpus: Corpus) -> None:
    """Give the classes with most chunks indexes of their own, whatever their size; `plant` takes them away again."""
    sizes: dict[tuple[str, int], int] = {}
    for row in corpus.documents:
        key = (row.access.tenant, row.access.access_id)
        sizes[key] = sizes.get(key, 0) + len(row.chunks)
    with superuser.transaction():
        for tenant, access_id in sorted(sizes, key=lambda key: (-sizes[key], key))[:LARGE_CLASSES]:
            for kind, what in OWN_INDEXES:
                superuser.execute(
                    f"create index if not exists rag_chunks_{kind}_{access_id} on rag.rag_chunks using {what}"
                    f" where access_id = '{access_id}'::bigint".encode()
                )
            superuser.execute("select rag.measure_class(%s, %s, 1)", (tenant, access_id))
        superuser.execute("update rag.rag_class_indexes set ready = true")


# --- keys ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """Two keys that are valid, one that is no more; the clock is the server's."""

    valid: Mapping[str, bytes]
    retired: tuple[str, bytes]
    clock_ahead_s: float

    @classmethod
    def made(cls, superuser: psycopg.Connection) -> Keys:
        made = {}
        for _ in range(3):
            key_id, secret = superuser.execute("select key_id, secret from rag.add_signing_key()").fetchone() or ()
            made[key_id] = bytes.fromhex(secret)
        retired = next(iter(made))
        superuser.execute("select rag.retire_signing_key(%s)", (retired,))
        (server,) = superuser.execute("select cast(extract(epoch from clock_timestamp()) as float8)").fetchone() or ()
        return cls(
            retired=(retired, made.pop(retired)),
            valid=made,
            clock_ahead_s=server - time.time(),
        )

    def now(self) -> float:
        return time.time() + self.clock_ahead_s


# --- sessions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """How a session becomes somebody, or fails to. `kind` says what is special about it."""

    kind: str
    login: str
    steps: tuple[Step, ...]
    in_transaction: bool = True
    committed: bool = True

    def __str__(self) -> str:
        where = "" if self.in_transaction else ", outside a transaction"
        return f"{self.login}, {self.kind}{where}: {[_shortened(step) for step in self.steps]}"


def _shortened(step: Step) -> Step:
    if isinstance(step, SetLocal) and len(step.value) > 300:
        return replace(step, value=step.value[:300] + "…")
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """Makes sessions of one login over the names of a corpus."""

    random: Random
    names: Names
    keys: Keys
    login: str

    def person(self) -> BeginAs:
        """Somebody who may exist, not signed yet."""
        random, names = self.random, self.names
        tags = random.choices(((), names.tags, names.some_tags(random, 4), (random.choice(TAGS),)), (1, 5, 6, 1))[0]
        return BeginAs(
            tenant=random.choice((*names.tenants * 8, random.choice(TENANTS))),
            user=random.choice((*names.users * 6, None, random.choice(USERS))),
            project=random.choice((*names.projects * 2, *("*",) * 6, None, random.choice(PROJECTS))),
            tags=tuple(random.sample(tags, len(tags))),
            signature="",
        )

    def signed(self, person: BeginAs, **how: Any) -> BeginAs:
        return replace(person, signature=self.signature_for(person, **how))

    def signature_for(
        self,
        person: BeginAs,
        *,
        key: tuple[str, bytes] | None = None,
        login: str | None = None,
        expires_in: int | None = None,
        values: Sequence[str] | None = None,
    ) -> str:
        key_id, secret = key or self.random.choice(sorted(self.keys.valid.items()))
        seconds = self.random.choice((60, 300, 43_000)) if expires_in is None else expires_in
        told = values or (person.tenant, str(person.user or 0), person.project or "", *person.tags)
        return sign(secret, (login or self.login, *told), key_id=key_id, expires=str(int(self.keys.now()) + seconds))

    def session(self, kind: str, *steps: Step, in_transaction: bool = True) -> Session:
        return Session(
            kind=kind,
            login=self.login,
            steps=steps,
            in_transaction=in_transaction,
            committed=self.random.random() < 0.7,
        )

    def raw(self, variables: Mapping[str, str]) -> list[Step]:
        """The variables one by one, in any order."""
        steps: list[Step] = [SetLocal(name=name, value=value) for name, value in variables.items()]
        self.random.shuffle(steps)
        return steps

    # Sessions of somebody.

    def begun(self) -> Session:
        return self.session("begin_as", self.signed(self.person()))

    def begun_twice(self) -> Session:
        person = self.person()
        return self.session("begin_as, again as the same", self.signed(person), self.signed(person))

    def begun_in_savepoint(self) -> Session:
        return self.session("begin_as in a released savepoint", Mark(), self.signed(self.person()), Release())

    def set_by_hand(self) -> Session:
        return self.session("set local", *self.raw(self.signed(self.person()).variables()))

    def set_without_project(self) -> Session:
        variables = self.signed(replace(self.person(), project=None)).variables()
        del variables["app.project_id"]
        return self.session("set local without app.project_id", *self.raw(variables))

    def spelled_otherwise(self) -> Session:
        person = self.signed(self.person())
        spaces = self.random.choice(("", " ", "\n", "\t ", "\r\n"))
        tags = [json.dumps(tag, ensure_ascii=False).replace("/", "\\/") for tag in person.tags]
        text = f"{spaces}[{spaces}" + f"{spaces},{spaces}".join(tags) + f"{spaces}]{spaces}"
        return self.session("tags in another spelling", *self.raw({**person.variables(), "app.tags": text}))

    def set_back(self) -> Session:
        person, other = self.signed(self.person()), self.signed(self.person())
        return self.session(
            "changed in a savepoint that was rolled back",
            *(person, Mark(), *self.raw(other.variables()), RollBack()),
        )

    def kept(self) -> Session:
        other = self.signed(self.person())
        return self.session("begin_as, then as somebody else", self.signed(self.person()), other)

    # Sessions of nobody, as a rule: the model decides.

    def unset(self) -> Session:
        return self.session("nothing set", in_transaction=self.random.random() < 0.4)

    def set_outside(self) -> Session:
        """Autocommit: what is set is over with its own statement."""
        steps = self.raw(self.signed(self.person()).variables())
        return self.session("set local outside a transaction", *steps, in_transaction=False)

    def missing(self) -> Session:
        variables = self.signed(self.person()).variables()
        for name in self.random.sample(VARIABLES, self.random.randint(1, 4)):
            if self.random.random() < 0.5:
                variables[name] = ""
            else:
                del variables[name]
        return self.session("variables missing", *self.raw(variables))

    def malformed(self) -> Session:
        person = self.person()
        name = self.random.choices(sorted(MALFORMED), (1, 2, 1, 3))[0]
        variables = person.variables()
        near = [value for value in MALFORMED[name] if "§" in value]
        value = self.random.choice(near if self.random.random() < 0.6 else MALFORMED[name])
        value = value.replace("§", variables[name])
        as_read = [person.tenant, str(person.user or 0), person.project or "", *person.tags]
        as_written = list(as_read)
        if name == "app.tags":
            as_written[3:] = [value]
        else:
            as_written[VARIABLES.index(name)] = value
        # Even with a signature over the very text, or over what a lenient reader makes of it.
        values = self.random.choice((as_read, as_written, as_written))
        variables |= {name: value, "app.signature": self.signature_for(person, values=values)}
        return self.session(f"malformed {name}", *self.raw(variables))

    def huge(self) -> Session:
        name = self.random.choice(VARIABLES)
        variables = self.signed(self.person()).variables()
        return self.session(f"a megabyte in {name}", *self.raw({**variables, name: "1" * 2**20}))

    def unsigned(self) -> Session:
        return self.session("unsigned", *self.raw(self.person().variables()))

    def falsely_signed(self) -> Session:
        person = self.person()
        other = "rag_app" if self.login != "rag_app" else "rag_publisher"
        kind, how = self.random.choices(
            (
                ("a key of one's own", {"key": (next(iter(self.keys.valid)), self.random.randbytes(32))}),
                ("an unknown key", {"key": ("0" * 16, next(iter(self.keys.valid.values())))}),
                ("an empty key", {"key": (next(iter(self.keys.valid)), b"")}),
                ("a retired key", {"key": self.keys.retired}),
                ("signed for the other login", {"login": other}),
                ("signed for the operator", {"login": "rag_operator"}),
                ("expired", {"expires_in": -self.random.randint(2, 3600)}),
                ("valid for too long", {"expires_in": self.random.randint(43_300, 10**6)}),
            ),
            (2, 1, 1, 2, 3, 1, 2, 1),
        )[0]
        return self._either_way(kind, self.signed(person, **how))

    def damaged(self) -> Session:
        person = self.signed(self.person())
        key_id, expires, code = person.signature.split(".")
        place = self.random.randrange(64)
        other = "0" if code[place] != "0" else "1"
        later = str(int(expires) + 1)
        damage = self.random.choice(
            (
                f"{key_id}.{expires}.{code[:place]}{other}{code[place + 1 :]}",
                f"{key_id}.{expires}.{code.upper()}" if code.upper() != code else f"{key_id}.{expires}.",
                f"{key_id}.{expires}.{code[:-1]}",
                f"{key_id}.{expires}.{code}0",
                f"{key_id}.{expires}.",
                f"{key_id}.{expires}",
                f"{key_id}.{later}.{code}",
                f"{key_id}.0{expires}.{code}",
                f"{key_id}.+{expires}.{code}",
                f"{key_id}. {expires}.{code}",
                f"{key_id}.{expires}.0.{code}",
                f" {person.signature}",
                f"{person.signature}\n",
                f"{person.signature} ",
                f"%.{expires}.{code}",
                f"{key_id}.{expires}.{'0' * 64}",
                f".{expires}.{code}",
                "." * 2,
                "x" * 129,
                code,
            )
        )
        return self._either_way("damaged signature", replace(person, signature=damage))

    def of_another(self) -> Session:
        """A good signature, of somebody who differs in one thing."""
        victim = self.person()
        part = self.random.choice(("tenant", "user", "project", "tags", "order of the tags", "borders"))
        if part == "tags":
            own = replace(victim, tags=(*victim.tags, self.random.choice(TAGS)))
        elif part == "order of the tags":
            own = replace(victim, tags=tuple(reversed(victim.tags)))
        elif part == "borders":
            # What stands next to each other must not flow into each other.
            own = replace(victim, tags=(",".join(victim.tags),))
        else:
            own = replace(victim, **{part: getattr(self.person(), part)})
        return self._either_way(
            f"signature of somebody with another {part}", replace(victim, signature=self.signature_for(own))
        )

    def changed(self) -> Session:
        """Somebody who is somebody, and goes on from there."""
        other = self.signed(self.person()).variables()
        names = self.random.sample(VARIABLES[:4], self.random.randint(1, 4))
        changes: list[Step] = [SetLocal(name=name, value=other[name]) for name in names]
        within = self.random.choice((changes, [Mark(), *changes, Release()]))
        return self.session("variables changed after begin_as", self.signed(self.person()), *within)

    def rolled_back(self) -> Session:
        return self.session(
            "begin_as in a savepoint that was rolled back", Mark(), self.signed(self.person()), RollBack()
        )

    def _either_way(self, kind: str, person: BeginAs) -> Session:
        if self.random.random() < 0.3:
            return self.session(f"begin_as, {kind}", person)
        return self.session(kind, *self.raw(person.variables()))

    def any(self) -> Session:
        ways: tuple[tuple[float, Callable[[], Session]], ...] = (
            (38, self.begun),
            (3, self.begun_twice),
            (3, self.begun_in_savepoint),
            (7, self.set_by_hand),
            (3, self.set_without_project),
            (4, self.spelled_otherwise),
            (4, self.set_back),
            (4, self.kept),
            (4, self.unset),
            (2, self.set_outside),
            (5, self.missing),
            (16, self.malformed),
            (0.3, self.huge),
            (3, self.unsigned),
            (14, self.falsely_signed),
            (6, self.damaged),
            (7, self.of_another),
            (4, self.changed),
            (2, self.rolled_back),
        )
        return self.random.choices([way for _, way in ways], [weight for weight, _ in ways])[0]()


def begin(connection: psycopg.Connection, person: BeginAs) -> None:
    connection.execute(
        "select rag.begin_as(%s, cast(%s as bigint), %s, cast(%s as text[]), %s)",
        (person.tenant, person.user, person.project, list(person.tags), person.signature),
    )


def apply_step(connection: psycopg.Connection, step: Step, random: Random, *, refusal: bool) -> str | None:
    """Take a step of a session; the SQLSTATE when begin_as() refuses.

    A `refusal` that is foreseen leaves the transaction as it was.
    """
    if isinstance(step, BeginAs):
        if not refusal:
            begin(connection, step)
            return None
        try:
            with connection.transaction():
                begin(connection, step)
        except psycopg.DatabaseError as error:
            return error.sqlstate
    elif isinstance(step, SetLocal):
        if random.random() < 0.5:
            connection.execute("select set_config(%s, %s, true)", (step.name, step.value))
        else:
            connection.execute(sql.SQL("set local {} = {}").format(sql.SQL(step.name), sql.Literal(step.value)))
    elif isinstance(step, Mark):
        connection.execute("savepoint mark")
    else:
        if isinstance(step, RollBack):
            connection.execute("rollback to savepoint mark")
        connection.execute("release savepoint mark")
    return None
