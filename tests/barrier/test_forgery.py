"""Whoever has the password of a login can set every session variable to anything. Without the signing key it is for
nothing: each forgery here meets every function, view and table that the login may use."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import permutations, product
from random import Random
from typing import Any

import psycopg
import pytest
from psycopg import sql

from rag.principal import Principal
from tests.barrier.oracle_planting import altered, rewritten
from tests.barrier.oracle_reading import analyst_logins
from tests.barrier.oracle_world import MALFORMED, seed_of_run
from tests.barrier.surface import (
    OUTCOMES,
    Reachable,
    all_at_once,
    one_by_one,
    readings,
    says_something,
    writings,
)
from tests.conftest import SIGNER, Deployment
from tests.sql.world import (
    ANALYSTS,
    VARIABLES,
    begin,
    build,
    column,
    proof,
    protected_tables,
    refused_with,
    set_variables,
    signature,
)

Figure = Callable[[str], None]
Scaled = Callable[..., int]
Way = Callable[[Deployment, str, Mapping[str, str]], AbstractContextManager[psycopg.Connection]]
NewDeployment = Callable[[], AbstractContextManager[Deployment]]
Variables = Mapping[str, str]

# Another key that is known, and one that was retired before the tests.
SPARE = bytes(range(32, 64))
RETIRED = bytes(range(64, 96))
REFUSALS = ("42501", "28000")
SERVICE = ("rag_app", "rag_publisher")


@pytest.fixture(scope="module")
def world(new_deployment: NewDeployment) -> Iterator[Deployment]:
    """The world of tests/sql/world.py with a source retracted in every class, a second key, and a retired one."""
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            build(connection)
            connection.execute(
                "insert into rag.rag_tombstones (tenant_id, access_id, source_digest, reason, retracted)"
                " select tenant_id, access_id, rag.source_digest(null, 'the source'), 'a test', true"
                " from rag.rag_access_classes"
            )
            for key_id, secret in {"spare": SPARE, "retired": RETIRED}.items():
                padded = secret.ljust(64, b"\0")
                pads = (bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded))
                connection.execute("insert into rag.rag_signing_keys values (%s, %s, %s)", (key_id, *pads))
            assert column(connection, "select rag.retire_signing_key('retired')") == [True]
        yield clone


@pytest.fixture(scope="module")
def surfaces(world: Deployment) -> Mapping[str, Surface]:
    """Of either login of the service."""
    found = {}
    for role in SERVICE:
        with world.connect(role) as connection:
            found[role] = Surface(connection)
    return found


# --- what is forged -------------------------------------------------------------------------------

GENUINE = ("t1", "1", "*", ("public",))
# Principals that the service might sign for: another tenant, user, project, and other tags.
OTHERS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("t2", "1", "*", ("public",)),
    ("t1", "2", "*", ("public",)),
    ("t1", "0", "*", ("public",)),
    ("t1", "1", "alpha", ("public",)),
    ("t1", "1", "", ("public",)),
    ("t1", "1", "*", ("hr",)),
    ("t1", "1", "*", ("public", "hr")),
    ("t1", "1", "*", ("hr", "public")),
    ("t1", "1", "*", ()),
    ("t2", "2", "alpha", ("hr",)),
)


def variables(named: tuple[str, str, str, Sequence[str]], code: str) -> dict[str, str]:
    tenant, user, project, tags = named
    values = (tenant, user, project, json.dumps(list(tags), ensure_ascii=False), code)
    return dict(zip(VARIABLES, values, strict=True))


def signed(role: str, named: tuple[str, str, str, Sequence[str]] = GENUINE, **key: Any) -> str:
    return signature(role, *named, **key)


def never_signed(role: str) -> Iterator[tuple[str, Variables]]:
    """The right values, and for a signature whatever somebody without the key may think of."""
    yield "nothing was ever set", {}
    yield "everything is empty", dict.fromkeys(VARIABLES, "")
    yield "no signature", {name: value for name, value in variables(GENUINE, "").items() if name != "app.signature"}
    genuine = signed(role)
    key_id, until, code = genuine.split(".")
    soon = int(time.time()) + 3000
    message = json.dumps([role, *GENUINE[:3], until, *GENUINE[3]], separators=(",", ":")).encode()
    codes = {
        "empty": "",
        "a space": " ",
        "zeros": f"{key_id}.{until}.{'0' * 64}",
        "a line of SQL": "' or true --",
        "dots": "..",
        "only the code": code,
        "only key and expiry": f"{key_id}.{until}",
        "no key": f".{until}.{code}",
        "no expiry": f"{key_id}..{code}",
        "no code": f"{key_id}.{until}.",
        "four parts": f"{genuine}.{code}",
        "twice": f"{genuine}{genuine}",
        "capitals": f"{key_id}.{until}.{code.upper()}",
        "the key in capitals": f"{key_id.upper()}.{until}.{code}",
        "fullwidth digits": f"{key_id}.{until}.{code}".translate(str.maketrans("0123456789", "０１２３４５６７８９")),
        "fullwidth full stops": genuine.replace(".", "．"),
        "space before": f" {genuine}",
        "space after": f"{genuine} ",
        "line feed after": f"{genuine}\n",
        "a digit more": f"{genuine}0",
        "a pattern for the key": f"%.{until}.{code}",
        "an unknown key": f"none.{until}.{code}",
        "the other key's name": f"spare.{until}.{code}",
        "the code of the other key": signed(role, key_id=key_id, secret=SPARE),
        "the retired key": signed(role, key_id="retired", secret=RETIRED),
        "the code of the retired key": signed(role, key_id=key_id, secret=RETIRED),
        "a key of no bytes": signed(role, secret=b""),
        "a key of zeros": signed(role, secret=bytes(32)),
        "the name of the key for a key": signed(role, secret=key_id.encode()),
        "the digits of the key for a key": signed(role, secret=SIGNER.secret.hex().encode()),
        "a digest without key": f"{key_id}.{until}.{hashlib.sha256(message).hexdigest()}",
        "a digest with the key in front": f"{key_id}.{until}.{hashlib.sha256(SIGNER.secret + message).hexdigest()}",
        "another digest": f"{key_id}.{until}.{hmac.new(SIGNER.secret, message, 'sha512').hexdigest()[:64]}",
        "expired a second ago": signed(role, expires=int(time.time()) - 1),
        "expired a day ago": signed(role, expires=int(time.time()) - 86400),
        "expired in 2001": signed(role, expires=10**9),
        "expiry 1": signed(role, expires=1),
        "expiry 0": signed(role, expires=0),
        "negative expiry": signed(role, expires=-soon),
        "twelve hours and a minute ahead": signed(role, expires=int(time.time()) + 43260),
        "a year ahead": signed(role, expires=int(time.time()) + 31_536_000),
        "in milliseconds": signed(role, expires=soon * 1000),
        "in the year 33658": signed(role, expires=10**12 - 1),
        "an expiry of 30 digits": signed(role, expires=10**29),
        "expiry one later": f"{key_id}.{int(until) + 1}.{code}",
        "expiry one earlier": f"{key_id}.{int(until) - 1}.{code}",
        "expiry with a zero in front": f"{key_id}.0{until}.{code}",
        "expiry with a sign": f"{key_id}.+{until}.{code}",
        "expiry with a fraction": f"{key_id}.{until}.0.{code}",
        "expiry with an exponent": f"{key_id}.1e9.{code}",
        "expiry NaN": f"{key_id}.NaN.{code}",
        "expiry Infinity": f"{key_id}.Infinity.{code}",
        "expiry in Arabic digits": f"{key_id}.{until.translate(str.maketrans('0123456789', '٠١٢٣٤٥٦٧٨٩'))}.{code}",
        "a megabyte": "a" * 2**20,
        "a megabyte of full stops": "." * 2**20,
    }
    for name, text in codes.items():
        yield f"signature: {name}", variables(GENUINE, text)
    for length in range(len(genuine)):
        yield f"signature cut after {length}", variables(GENUINE, genuine[:length])
    start = len(genuine) - len(code)
    for place in range(start, len(genuine)):
        other = "0" if genuine[place] != "0" else "1"
        yield f"digit {place - start} changed", variables(GENUINE, genuine[:place] + other + genuine[place + 1 :])


def signed_for_somebody_else(role: str) -> Iterator[tuple[str, Variables]]:
    """What the service did sign, with other values beside it."""
    for other in ("rag_app", "rag_publisher", "rag_operator", "rag_migrator", "rag_search", "postgres", "RAG_APP", ""):
        if other != role:
            yield f"signed for {other or 'no login'}", variables(GENUINE, signed(other))
    for mine, theirs in permutations((GENUINE, *OTHERS), 2):
        yield f"signature of {mine} for {theirs}", variables(theirs, signed(role, mine))
    ours = variables(GENUINE, signed(role))
    for name in VARIABLES[:4]:
        for other in OTHERS:
            swapped = ours | {name: variables(other, "")[name]}
            if swapped != ours:
                yield f"{name} = {swapped[name]}", swapped
        yield f"{name} never set", {kept: value for kept, value in ours.items() if kept != name}
        yield f"{name} empty", ours | {name: ""}
    lists = [
        *(["public", "public"], ["public", "hr"], ["hr", "public"], ["publi"], ["publicx"], ["Public"], ["public "]),
        *([" public"], ["public,hr"], ['public","hr'], ["public", ""], ["pub", "lic"]),
        *(["рublic"], ["ｐublic"], ["public\u200b"], ["public\u0301"]),
    ]
    for tags in lists:
        yield f"tags {tags}", ours | {"app.tags": json.dumps(tags, ensure_ascii=False)}
    tenants = (
        *("T1", "t1 ", " t1", "t１", "ｔ1", "τ1", "t1,t2", 't1","1', "t%"),
        *("t1\u200b", "t1\u0301", "t1\u00ad", "t1\ufeff"),
    )
    for tenant in tenants:
        yield f"tenant {tenant!r}", ours | {"app.tenant_id": tenant}
    for user in ("01", "１", "1.0", " 1", "+1", "1e0", "0x1", "10", "11"):
        yield f"user {user!r}", ours | {"app.user_id": user}
    for project in ("＊", "* ", "**", "%", "*,alpha", "ａlpha", "alph\u0430", "Alpha"):
        yield f"project {project!r}", ours | {"app.project_id": project}
    # Values that run into their neighbours in the message, if anything in it were not quoted.
    until = int(time.time()) + 60
    shifts = {
        ("t1", "0", "1", ("public",)): ("t1", "01", "", ("public",)),
        ("t", "1", "1", ("public",)): ("t1", "1", "", ("public",)),
        ("t1", "0", '*"]', ("public",)): ("t1", "0", "*", ("public",)),
        ("t1", "0", f'","{until}","public', ()): ("t1", "0", "", ("public",)),
        ("t1", "0", "x", (f"{until}", "public")): ("t1", "0", "x", ("public",)),
        ('t1","1', "0", "*", ("public",)): ("t1", "1", "0", ("public",)),
        ("t1", "1", "*", ('public","hr',)): ("t1", "1", "*", ("public", "hr")),
        ("t1", "1", "*", ("public", "hr")): ("t1", "1", "*", ('public","hr',)),
        ("t1", "1", "0", (f"{until}", "public")): ('t1","1', "0", f"{until}", ("public",)),
        ("t1", "1", "*", ("public\\",)): ("t1", "1", "*", ("public",)),
    }
    for mine, theirs in shifts.items():
        yield f"{mine} shifted to {theirs}", variables(theirs, signed(role, mine, expires=until))


def malformed(role: str) -> Iterator[tuple[str, Variables]]:
    """SECURITY.md I3 to I5: values that name nobody, each signed by the service as it stands."""
    ours = dict(zip(VARIABLES, (*GENUINE[:3], '["public"]', ""), strict=True))
    for name, cases in MALFORMED.items():
        for text in (case.replace("§", "1") for case in cases):
            values = ours | {name: text}
            named = (values["app.tenant_id"], values["app.user_id"], values["app.project_id"])
            for tags in _readings(text) if name == "app.tags" else [["public"]]:
                code = signature(role, *named, tags)
                yield f"{name} = {text[:40]!r} as {str(tags)[:40]}", values | {"app.signature": code}
    for chosen in product((False, True), repeat=4):
        present = {name: ours[name] for name, is_there in zip(VARIABLES[:4], chosen, strict=True) if is_there}
        if not present.keys() >= {"app.tenant_id", "app.user_id", "app.tags"}:
            values = dict.fromkeys(VARIABLES, "") | present
            named = (values["app.tenant_id"], values["app.user_id"], values["app.project_id"])
            code = signature(role, *named, ["public"] if "app.tags" in present else [])
            yield f"only {sorted(present)}", present | {"app.signature": code}
            yield f"only {sorted(present)}, the others empty", values | {"app.signature": code}


def _readings(tags: str) -> list[list[str]]:
    """What a careless reader could take a text for."""
    found = [["public"], [], [tags]]
    try:
        parsed = json.loads(tags)
    except (ValueError, RecursionError):
        return found
    members = parsed if isinstance(parsed, list) else []
    return [*found, [str(member).encode(errors="replace").decode() for member in members]]


def forgeries(role: str) -> dict[str, Variables]:
    return dict((*never_signed(role), *signed_for_somebody_else(role), *malformed(role)))


# --- what they meet -------------------------------------------------------------------------------


def outcomes(connection: psycopg.Connection, reachable: Sequence[Reachable]) -> dict[str, Any]:
    """SQLSTATE, number of rows or rows of each, in this transaction."""
    connection.execute(one_by_one(reachable))
    (found,) = column(connection, OUTCOMES)
    return dict(found)


class Surface:
    """All that a login may use, and what of it refuses nobody, so that it is asked at once."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.readings = readings(connection)
        self.writings = writings(connection)
        with connection.transaction():
            refused = {name for name, found in outcomes(connection, self.readings).items() if found in REFUSALS}
        self._refusing = [entry for entry in self.readings if entry.name in refused]
        self._at_once = all_at_once([entry for entry in self.readings if entry.name not in refused])
        self._one_by_one = one_by_one([*self._refusing, *self.writings])

    @property
    def objects(self) -> set[str]:
        return {entry.object for entry in (*self.readings, *self.writings)}

    def leaks(self, connection: psycopg.Connection) -> dict[str, Any]:
        """What says something, or is done, in this transaction."""
        found = dict(connection.execute(self._at_once, prepare=True).fetchall())
        connection.execute(self._one_by_one)
        (tried,) = column(connection, OUTCOMES)
        return {
            name: outcome
            for name, outcome in (found | tried).items()
            if outcome not in REFUSALS and says_something(outcome)
        }


def everything(superuser: psycopg.Connection) -> dict[str, str]:
    """A digest of every table's rows."""
    digest = "select md5(string_agg(entry::text, '|' order by entry::text)) from rag.{} as entry"
    return {table: column(superuser, digest.format(table))[0] for table in protected_tables(superuser)}


@contextmanager
def unchanged(world: Deployment) -> Iterator[None]:
    with world.cluster.superuser(world.name) as superuser:
        before = everything(superuser)
        yield
        assert everything(superuser) == before


@pytest.mark.parametrize("role", SERVICE)
def test_the_genuine_identity_reaches_all_that_is_forged_for(
    world: Deployment, surfaces: Mapping[str, Surface], role: str
) -> None:
    """So that the zeros below are those of the forgeries. Analysts alone have a list, the service's keys and the
    queue's figures a proof, and nobody owns the tag that is genuinely held, which is public; no model was added beside
    another; and claims are kept and released without a word. No document is of a synchronised source, and no job
    waits any more once it was cancelled. No job is being done, which a service without a worker's proof cannot have
    begun. Of these tests/barrier/test_jobs_barrier.py says whose they are."""
    with world.connect(role) as connection, connection.transaction(force_rollback=True):
        set_variables(connection, variables(GENUINE, signed(role)))
        found = {name.rstrip(" 0123456789") for name in surfaces[role].leaks(connection)}
    assert surfaces[role].objects - found == {
        *("my_listed_documents()", "load_service_keys()", "queue_depth()", "my_tag_owner()"),
        *("active_model()", "check_model()", "compare_models()"),
        *("renew_claim()", "release_claim()"),
        *("my_origin()", "my_waiting_job()"),
        *(("settle_job()", "holds_job()") if role == "rag_publisher" else ()),
    }


@pytest.mark.parametrize("role", SERVICE)
def test_no_forgery_gets_or_changes_a_row(
    world: Deployment, surfaces: Mapping[str, Surface], role: str, scaled: Scaled, figure: Figure
) -> None:
    surface = surfaces[role]
    catalogue = forgeries(role)
    seed = seed_of_run()
    count = scaled(test=150, ci=len(catalogue), prove=len(catalogue))
    found: dict[str, dict[str, Any]] = {}
    with unchanged(world), world.connect(role) as connection:
        for name in Random(seed).sample(sorted(catalogue), count):
            with connection.transaction():
                set_variables(connection, catalogue[name])
                leaks = surface.leaks(connection)
            if leaks:
                found[name] = leaks
    assert found == {}, f"RAG_TEST_SEED={seed}"
    objects = f"{len(surface.objects)} functions, views, tables and commands"
    figure(f"{role}: {count} of {len(catalogue)} forgeries × {objects}: 0 rows")


@pytest.mark.parametrize("role", SERVICE)
def test_no_forgery_is_a_principal(world: Deployment, role: str) -> None:
    """All of them, in every lane: what the database takes the session for decides all the rest."""
    with world.connect(role) as connection:
        assert taken_for_somebody(connection, forgeries(role)) == []


def taken_for_somebody(connection: psycopg.Connection, catalogue: Mapping[str, Variables]) -> list[str]:
    """The forgeries that are a principal, or an error."""
    found = []
    for name, values in catalogue.items():
        with connection.transaction(force_rollback=True):
            set_variables(connection, values)
            try:
                principals = connection.execute("select from my_principal()", prepare=True).fetchall()
            except psycopg.Error as error:
                principals = [(error.sqlstate,)]
        if principals:
            found.append(name)
    return found


# --- and finds what it looks for ------------------------------------------------------------------

HOLDS = "coalesce(code = piece[3], false)"
SIGNED = "array[cast(session_user as text), tenant, users, project] || tags"
MESSAGE = "array_to_json(parts[1:4] || piece[2] || parts[5:])::text"
MESSAGE_WITHOUT_QUOTING = """'["' || array_to_string(parts[1:4] || piece[2] || parts[5:], '","') || '"]'"""
# A defect, and a forgery that shows it.
PLANTED = {
    "any signature": (rewritten("signature_holds", HOLDS, "true"), "signature: zeros"),
    "any unknown key": (rewritten("signature_holds", HOLDS, "coalesce(code = piece[3], true)"), "an unknown key"),
    "the start of a code": (
        rewritten("signature_holds", HOLDS, "coalesce(starts_with(code, piece[3]), false)"),
        "signature cut after 70",
    ),
    "no end": (rewritten("signature_holds", "not between 0 and 43200", "> 43200"), "expired a second ago"),
    "no latest end": (rewritten("signature_holds", "not between 0 and 43200", "< 0"), "a year ahead"),
    "any login": (rewritten("my_principal", SIGNED, SIGNED.replace("session_user", "'rag_app'")), "for rag_app"),
    "any tenant": (rewritten("my_principal", SIGNED, SIGNED.replace("tenant", "'t1'")), "app.tenant_id = t2"),
    "any user": (rewritten("my_principal", SIGNED, SIGNED.replace("users", "'1'")), "app.user_id = 2"),
    "any project": (rewritten("my_principal", SIGNED, SIGNED.replace("project", "'*'")), "app.project_id = alpha"),
    "any tags": (rewritten("my_principal", SIGNED, SIGNED.replace("|| tags", "|| array['public']")), "tags ['Public']"),
    "the first tag": (rewritten("my_principal", SIGNED, SIGNED + "[1:1]"), "tags ['public', 'hr']"),
    "tags in any order": (
        rewritten("my_principal", SIGNED, SIGNED.replace("tags", "array(select unnest(tags) order by 1)")),
        "('hr', 'public')",
    ),
    "a tag twice": (
        rewritten("my_principal", SIGNED, SIGNED.replace("tags", "array(select distinct unnest(tags))")),
        "tags ['public', 'public']",
    ),
    "outer spaces": (rewritten("my_principal", SIGNED, SIGNED.replace("tenant", "trim(tenant)")), "tenant ' t1'"),
    "capitals": (rewritten("my_principal", SIGNED, SIGNED.replace("tenant", "lower(tenant)")), "tenant 'T1'"),
    "full width": (
        rewritten("my_principal", SIGNED, SIGNED.replace("tenant", "normalize(tenant, nfkc)")),
        "tenant 't１'",
    ),
    "values that run together": (
        rewritten("signature_holds", MESSAGE, MESSAGE_WITHOUT_QUOTING),
        "shifted",
    ),
    "a malformed user": (rewritten("my_principal", "users ~ '^(0|[1-9][0-9]{0,17})$'", "users ~ '[0-9]'"), "'01'"),
    "a control character": (
        rewritten("my_principal", "and tenant !~ '[[:cntrl:]]'", ""),
        "app.tenant_id",
    ),
}


@contextmanager
def spoiled(world: Deployment, spoil: Callable[[psycopg.Connection], None], role: str) -> Iterator[psycopg.Connection]:
    """A session of a login in a database with a defect, which is gone at the end."""
    with world.cluster.superuser(world.name) as connection, connection.transaction(force_rollback=True):
        spoil(connection)
        connection.execute(sql.SQL("set local session authorization {}").format(sql.Identifier(role)))
        yield connection


@pytest.mark.parametrize("name", PLANTED)
def test_a_defect_of_signatures_would_have_been_found(world: Deployment, name: str) -> None:
    spoil, shown_by = PLANTED[name]
    role = "rag_publisher" if name == "any login" else "rag_app"
    catalogue = {forgery: values for forgery, values in forgeries(role).items() if shown_by in forgery}
    with world.connect(role) as connection:
        sound = taken_for_somebody(connection, catalogue)
    with spoiled(world, spoil, role) as connection:
        assert len(taken_for_somebody(connection, catalogue)) > len(sound)


LATER = {
    "a function of a superuser": (
        (
            "create function later() returns setof text language sql stable security definer"
            " as 'select title from rag.rag_documents'",
            "grant execute on function later() to rag_app",
        ),
        "later() 1",
    ),
    "a function with arguments": (
        (
            "create function later(document_id uuid, anything text) returns bigint language sql stable security definer"
            " as 'select count(*) from rag.rag_chunks as chunk where chunk.document_id = later.document_id'",
            "grant execute on function later(uuid, text) to rag_app",
        ),
        "later() 1",
    ),
    "a function that writes": (
        (
            "create function later(tenant_id text) returns void language sql volatile security definer"
            " as 'update rag.rag_documents set domain = tenant_id'",
            "grant execute on function later(text) to rag_app",
        ),
        "later() 1",
    ),
    "a view with the rights of a superuser": (
        ("create view v_later as select title from rag_documents", "grant select on v_later to rag_app"),
        "v_later",
    ),
    "a table": (
        (
            "create table rag_later (tenant_id text)",
            "insert into rag_later values ('t1')",
            "grant select, insert, update, delete on rag_later to rag_app",
        ),
        "rag_later",
    ),
    "a table that takes rows": (
        ("create table rag_later (tenant_id text)", "grant insert on rag_later to rag_app"),
        "insert rag_later 1",
    ),
    "a function that changes hands": (("alter function my_documents() owner to postgres",), "my_documents() 1"),
    "row security that is off": (("alter table rag_documents disable row level security",), "delete rag_documents"),
    "a policy for everybody": (
        (
            "create policy careless on rag_chunks for select to rag_principal using (true)",
            "drop policy own_tenant_reading_select on rag_chunks",
        ),
        "my_chunks() 1",
    ),
}


@pytest.mark.parametrize("name", LATER)
def test_what_is_added_later_is_attacked_as_well(world: Deployment, name: str) -> None:
    statements, place = LATER[name]
    with spoiled(world, altered(*statements), "rag_app") as connection:
        assert place in Surface(connection).leaks(connection)


# --- however it is set ----------------------------------------------------------------------------


def representative(role: str) -> dict[str, Variables]:
    theirs = ("t1", "2", "*", ("public",))
    (other,) = set(SERVICE) - {role}
    return {
        "no signature": variables(GENUINE, ""),
        "expired": variables(GENUINE, signed(role, expires=int(time.time()) - 5)),
        "a retired key": variables(GENUINE, signed(role, key_id="retired", secret=RETIRED)),
        "signed for the other login": variables(GENUINE, signed(other)),
        "signed for another user": variables(theirs, signed(role)),
        "signed for another tenant": variables(("t2", *GENUINE[1:]), signed(role)),
        "a tag more": variables((*GENUINE[:3], ("public", "hr")), signed(role)),
    }


@contextmanager
def by_set_local(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    with world.connect(role) as connection, connection.transaction():
        for name, value in values.items():
            connection.execute(sql.SQL("set local {} = {}").format(sql.Identifier(*name.split(".")), value))
        yield connection


@contextmanager
def by_set(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    """In another transaction of the same session."""
    with world.connect(role) as connection:
        for name, value in values.items():
            connection.execute(sql.SQL("set session {} = {}").format(sql.Identifier(*name.split(".")), value))
        with connection.transaction():
            yield connection


@contextmanager
def by_set_config(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    with world.connect(role) as connection:
        for name, value in values.items():
            connection.execute("select set_config(%s, %s, false)", (name, value))
        with connection.transaction():
            yield connection


@contextmanager
def by_do_block(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    with world.connect(role) as connection, connection.transaction():
        body = "".join(f"perform set_config('{name}', $v${value}$v$, true);" for name, value in values.items())
        connection.execute(f"do $do$ begin {body} end $do$")
        yield connection


@contextmanager
def by_options(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    """As PGOPTIONS does, or a connection string."""
    options = " ".join("-c " + f"{name}={value}".replace(" ", "\\ ") for name, value in values.items())
    with psycopg.connect(world.url(role), autocommit=True, options=options) as connection:
        assert column(connection, "select current_setting('app.user_id')") == [values["app.user_id"]]
        with connection.transaction():
            yield connection


@contextmanager
def by_savepoint(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    with world.connect(role) as connection, connection.transaction():
        with connection.transaction():
            set_variables(connection, values)
        yield connection


@contextmanager
def by_rolling_back_the_principal(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    """The service's own principal was valid in a savepoint, and the forgery was there before it."""
    with world.connect(role) as connection, connection.transaction():
        set_variables(connection, values)
        with connection.transaction(force_rollback=True):
            set_variables(connection, variables(GENUINE, signed(role)))
            assert column(connection, "select user_id from my_principal()") == [1]
        yield connection


@contextmanager
def over_a_principal(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    """As SQL that is injected after the service has begun."""
    with world.connect(role) as connection, connection.transaction():
        begin(connection, Principal(tenant_id="t1", user_id=1, project_id="*"))
        assert column(connection, "select user_id from my_principal()") == [1]
        set_variables(connection, values)
        yield connection


@contextmanager
def over_a_principal_in_a_savepoint(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    with world.connect(role) as connection, connection.transaction():
        begin(connection, Principal(tenant_id="t1", user_id=1, project_id="*"))
        with connection.transaction():
            set_variables(connection, values)
        yield connection


@contextmanager
def after_a_principal(world: Deployment, role: str, values: Variables) -> Iterator[psycopg.Connection]:
    """In the next transaction, chained to one in which the service's principal was valid."""
    with world.connect(role) as connection:
        connection.execute("begin")
        begin(connection, Principal(tenant_id="t1", user_id=1, project_id="*"))
        connection.execute("commit and chain")
        set_variables(connection, values)
        yield connection
        connection.execute("commit")


WAYS = (
    *(by_set_local, by_set, by_set_config, by_do_block, by_options, by_savepoint, by_rolling_back_the_principal),
    *(over_a_principal, over_a_principal_in_a_savepoint, after_a_principal),
)


@pytest.mark.parametrize("role", SERVICE)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_forgery_is_no_better_however_it_is_set(
    world: Deployment, surfaces: Mapping[str, Surface], role: str, way: Way
) -> None:
    found = {}
    with unchanged(world):
        for name, values in representative(role).items():
            with way(world, role, values) as connection:
                found[name] = surfaces[role].leaks(connection)
    assert {name: leaks for name, leaks in found.items() if leaks} == {}


@pytest.mark.parametrize("role", SERVICE)
@pytest.mark.parametrize("way", WAYS[:6], ids=lambda way: way.__name__)
def test_each_way_of_setting_sets(world: Deployment, role: str, way: Way) -> None:
    """What the service has signed holds in all of them, so the test above refuses the forgery and not the way."""
    with way(world, role, variables(GENUINE, signed(role))) as connection:
        assert column(connection, "select user_id from my_principal()") == [1]


@pytest.mark.parametrize("role", [*SERVICE, "rag_operator", "rag_migrator"])
@pytest.mark.parametrize("name", VARIABLES)
def test_a_login_cannot_make_a_variable_its_default(world: Deployment, role: str, name: str) -> None:
    with world.connect(role) as connection:
        for whom in (f"role {role}", "role all", f"role {role} in database {world.name}", f"database {world.name}"):
            assert refused_with(connection, f"alter {whom} set {name} = 't1'") == "42501"


def test_a_signature_that_has_expired_is_worth_nothing_in_the_next_transaction(
    world: Deployment, surfaces: Mapping[str, Surface]
) -> None:
    with world.connect("rag_app") as connection:
        (second,) = column(connection, "select cast(floor(extract(epoch from now())) as integer)")
        for name, value in variables(GENUINE, signed("rag_app", expires=second + 2)).items():
            connection.execute("select set_config(%s, %s, false)", (name, value))
        with connection.transaction():
            connection.execute("select pg_sleep(2.1)")
            assert column(connection, "select user_id from my_principal()") == [1]
        with unchanged(world), connection.transaction():
            assert surfaces["rag_app"].leaks(connection) == {}


# --- begin_as and proofs --------------------------------------------------------------------------


BEGIN_AS = "select begin_as(%s, %s::bigint, %s, array(select jsonb_array_elements_text(%s::jsonb)), %s)"
BEGUN = """
    select tenant_id, coalesce(user_id, 0)::text, coalesce(project_id, ''),
        array(select jsonb_array_elements_text(current_setting('app.tags')::jsonb))
    from my_principal()
"""


@pytest.mark.parametrize("role", SERVICE)
def test_begin_as_takes_no_forgery(world: Deployment, role: str, figure: Figure) -> None:
    """It begins for nobody whom the signature does not name, however the arguments were written."""
    catalogue = {name: values for name, values in forgeries(role).items() if values.keys() == set(VARIABLES)}
    refused = 0
    with world.connect(role) as connection:
        for name, values in catalogue.items():
            given = [values[variable] for variable in VARIABLES]
            with connection.transaction(force_rollback=True):
                state = refused_with(connection, BEGIN_AS, given)
                if state is not None:
                    # 22P02 and its like, 54001: no number or no list, so that it was not even called.
                    assert state in ("28000", "42501", "54001") or state.startswith("22"), (name, state)
                    refused += 1
                    continue
                connection.execute(BEGIN_AS, given)
                (begun,) = connection.execute(BEGUN).fetchall()
            assert given[-1] == signed(role, begun, expires=int(given[-1].split(".")[1])), name
    assert refused > 0.9 * len(catalogue)
    figure(f"{role}: begin_as() refused {refused} of {len(catalogue)}, and the others are what was signed")


@pytest.mark.parametrize("role", SERVICE)
def test_service_keys_are_given_for_a_proof_alone(world: Deployment, role: str) -> None:
    (other,) = set(SERVICE) - {role}
    genuine = proof(role)
    key_id, until, code = genuine.split(".")
    now = int(time.time())
    forged = [
        *(None, "", "..", proof(other), proof("rag_operator"), proof(role, expires=now - 1)),
        *(proof(role, expires=now + 43260), signed(role), signature(role, "service_keys", "", "", [])),
        *(f"{key_id}.{int(until) + 1}.{code}", f"none.{until}.{code}", f"spare.{until}.{code}", f"{genuine}0"),
        *(genuine[:length] for length in range(len(genuine))),
    ]
    with world.connect(role) as connection:
        assert len(connection.execute("select * from load_service_keys(%s)", (genuine,)).fetchall()) == 2
        with connection.transaction():
            set_variables(connection, variables(GENUINE, signed(role)))
            for text in forged:
                assert refused_with(connection, "select load_service_keys(%s)", (text,)) == "28000", text


@pytest.mark.parametrize("role", SERVICE)
def test_a_proof_is_no_identity(world: Deployment, surfaces: Mapping[str, Surface], role: str) -> None:
    """Its message has other values at the places of a tenant and a user."""
    until = int(time.time()) + 60
    code = proof(role, expires=until)
    with world.connect(role) as connection:
        for named in (
            GENUINE,
            ("service_keys", str(until), "", ()),
            ("service_keys", "0", "", ()),
            ("t1", "0", "service_keys", ()),
        ):
            with unchanged(world), connection.transaction():
                set_variables(connection, variables(named, code))
                # With a proof the keys are given, whatever else is set.
                assert set(surfaces[role].leaks(connection)) == {"load_service_keys() 1"}


# --- those whom the variables do not concern ------------------------------------------------------


# The analysts of the world, and one who is mapped to no tenant.
PEOPLE = (*ANALYSTS, "forgery_stranger")


def meant_for_others() -> Iterator[Variables]:
    """All that could be taken for an identity, each as genuine as it can be for its login."""
    for role in (*SERVICE, "rag_operator", "rag_migrator", "rag_analyst", *PEOPLE):
        for named in (GENUINE, ("t2", "1", "*", ("public",)), ("t1", "0", "", ("public", "hr"))):
            yield variables(named, signed(role, named))
    yield variables(GENUINE, "")


def repeatable(connection: psycopg.Connection, reachable: Sequence[Reachable]) -> dict[str, Any]:
    """Outcomes but for a new key, which is random."""
    found = outcomes(connection, reachable)
    return {name: outcome for name, outcome in found.items() if not name.startswith("add_signing_key()")}


@pytest.mark.parametrize("role", ["rag_operator", "rag_migrator", *PEOPLE])
def test_no_variable_has_an_effect_on_operators_migrators_and_analysts(
    world: Deployment, role: str, figure: Figure
) -> None:
    """Everything that they may call gives the same, with and without."""
    forged = list(meant_for_others())
    with analyst_logins(world, PEOPLE), unchanged(world), world.connect(role) as connection, connection.transaction():
        reachable = [*readings(connection), *writings(connection)]
        with connection.transaction(force_rollback=True):
            without = repeatable(connection, reachable)
        for values in forged:
            with connection.transaction(force_rollback=True):
                set_variables(connection, values)
                assert repeatable(connection, reachable) == without, values
    saying = [name for name, outcome in without.items() if outcome not in REFUSALS and says_something(outcome)]
    assert bool(saying) == (role in ("rag_operator", *ANALYSTS))
    figure(f"{role}: {len(forged)} identities × {len(reachable)} calls: no difference")


@pytest.mark.parametrize("role", ["rag_owner", "rag_search", "rag_principal", "rag_steward", "rag_embedder"])
def test_no_variable_has_an_effect_on_a_role_that_the_migrator_becomes(world: Deployment, role: str) -> None:
    with world.connect("rag_migrator") as connection:
        for values in ({}, *meant_for_others()):
            with connection.transaction(force_rollback=True):
                connection.execute(sql.SQL("set local role {}").format(sql.Identifier(role)))
                set_variables(connection, values)
                if role in ("rag_search", "rag_principal"):
                    assert connection.execute("select from my_principal()").fetchall() == []
                    assert column(connection, "select my_access_ids() || my_writable_access_ids()") == [[]]
                for table in ("rag_documents", "rag_chunks", "rag_query_logs", "rag_tombstones"):
                    if role in ("rag_owner", "rag_principal"):
                        assert column(connection, f"select count(*) from {table}") == [0]


# --- the key --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [*SERVICE, "rag_operator", "rag_migrator", *ANALYSTS])
def test_no_login_reads_or_adds_a_key_or_signs(world: Deployment, role: str) -> None:
    another = "postgres" if role == "rag_migrator" else "rag_search"
    with analyst_logins(world, ANALYSTS), world.connect(role) as connection:
        for statement in (
            *("select * from rag.rag_signing_keys", "select count(*) from rag.rag_signing_keys"),
            *("select key_id from rag.rag_signing_keys", "copy rag.rag_signing_keys to stdout"),
            *("insert into rag.rag_signing_keys values ('mine', '', '')", "delete from rag.rag_signing_keys"),
            *("update rag.rag_signing_keys set inner_pad = ''", "select rag.signature_holds('{}', '')"),
            *(f"set role {another}", f"set session authorization {another}"),
        ):
            assert refused_with(connection, statement) == "42501", statement
        expected = None if role == "rag_operator" else "42501"
        for call in ("add_signing_key()", "retire_signing_key('x')", "list_signing_keys()"):
            assert refused_with(connection, f"select rag.{call}") == expected, call


@pytest.mark.parametrize("role", [*SERVICE, "rag_operator", *ANALYSTS])
def test_nothing_that_a_login_may_call_gives_a_key(world: Deployment, role: str) -> None:
    """Neither the secrets of the keys that are there nor what they are stored as, in any notation."""
    told = ""
    with analyst_logins(world, ANALYSTS), world.connect(role) as connection:
        reachable = [*readings(connection), *writings(connection)]
        with connection.transaction(force_rollback=True):
            if role in SERVICE:
                set_variables(connection, variables(GENUINE, signed(role)))
            told = json.dumps(outcomes(connection, reachable))
    assert len(told) > 1000
    for secret in (SIGNER.secret, SPARE, RETIRED):
        padded = secret.ljust(64, b"\0")
        for stored in (secret, bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded)):
            assert stored.hex() not in told
            assert base64.b64encode(stored).decode()[:40] not in told


def test_a_key_that_is_added_is_shown_once(world: Deployment) -> None:
    with world.connect("rag_operator") as operator, operator.transaction(force_rollback=True):
        key_id, secret = operator.execute("select key_id, secret from rag.add_signing_key()").fetchone() or ("", "")
        assert len(bytes.fromhex(secret)) == 32
        listed = operator.execute("select * from rag.list_signing_keys()").fetchall()
    assert key_id in [row[0] for row in listed]
    assert secret not in str(listed)
