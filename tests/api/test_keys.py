"""Keys of trusted services: how they are held, when they end, and that every use is recorded."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest
import structlog
from httpx2 import Response
from psycopg import sql

from api.identity import Door
from rag.database import Database
from rag.errors import BarrierDown, DatabaseTimeout, DatabaseUnavailable
from rag.keys import LOAD_TIMEOUT_S, REFRESH_S, STALE_S, KeyRing, NewKey, load, new_key
from rag.principal import Principal
from rag.settings import Settings
from tests.api.running import Person, database_of, issued_key, problem_of, running
from tests.conftest import Deployment

ACME = "acme"
MISSING = "00000000-0000-4000-8000-000000000001"
TEXT = "# Refunds\n\nA refund takes five working days."
# Far more than what is waited for takes.
PATIENCE_S = 60.0
# What the issue promises between a revocation and the first refusal.
PROMISED_S = 5.0


@pytest.fixture
async def opened(deployment: Deployment) -> AsyncIterator[Database]:
    async with database_of(deployment) as database:
        yield database


def revoke(deployment: Deployment, key: NewKey) -> None:
    with deployment.connect("rag_operator") as connection:
        connection.execute("update rag_service_keys set revoked_at = now() where key_id = %s", (key.key_id,))


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what comes by itself."""
    async with asyncio.timeout(PATIENCE_S):
        # A database sets no event of this loop.
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def attempt(ring: KeyRing, key: NewKey) -> str:
    """What becomes of a key."""
    try:
        return "refused" if ring.find(key.text) is None else "honoured"
    except DatabaseUnavailable:
        return "unknown"


# --- what a key is -------------------------------------------------------------------------------


def test_a_key_has_a_public_id_and_a_secret_of_which_only_the_digest_is_kept() -> None:
    key = new_key()
    parts = re.fullmatch(r"rag_([0-9a-f]{16})_([A-Za-z0-9_-]{48})", key.text)
    assert parts is not None
    assert parts[1] == key.key_id
    assert key.secret_sha256 == hashlib.sha256(parts[2].encode()).digest()
    assert parts[2] not in repr(key)
    assert len({new_key().text for _ in range(1000)}) == 1000


async def test_keys_are_loaded_with_what_they_may_do(deployment: Deployment, opened: Database) -> None:
    bounded = issued_key(
        deployment,
        tenant_id=ACME,
        actions=["query"],
        scopes=[],
        tags=["hr", "public"],
        act_as=True,
        user_ids=[7, 10**17],
        project_ids=["orion"],
    )
    plain = issued_key(deployment, tenant_id="globex", scopes=["public"])
    loaded = {key.key_id: key for key in await load(opened)}
    assert loaded.keys() == {bounded.key_id, plain.key_id}
    one = loaded[bounded.key_id]
    assert (one.tenant_id, one.secret_sha256, one.act_as) == (ACME, bounded.secret_sha256, True)
    assert (one.actions, one.scopes) == ({"query"}, frozenset())
    assert (one.tags, one.user_ids, one.project_ids) == ({"hr", "public"}, {7, 10**17}, {"orion"})
    other = loaded[plain.key_id]
    assert (other.tenant_id, other.act_as) == ("globex", False)
    assert (other.tags, other.user_ids, other.project_ids) == (None, None, None)
    assert plain.secret_sha256.hex() not in repr(other)
    assert repr(plain.secret_sha256) not in repr(other)


async def test_ended_keys_are_not_even_loaded(deployment: Deployment, opened: Database) -> None:
    revoke(deployment, issued_key(deployment, tenant_id=ACME))
    issued_key(deployment, tenant_id=ACME, valid_for="-1 second")
    assert await load(opened) == []


async def test_the_password_of_the_service_alone_loads_no_key(deployment: Deployment) -> None:
    issued_key(deployment, tenant_id=ACME)
    for role in ("rag_app", "rag_publisher"):
        with deployment.connect(role) as connection:
            for proof in (None, "", "x.1.y"):
                with pytest.raises(psycopg.errors.InvalidAuthorizationSpecification):
                    connection.execute("select * from load_service_keys(%s)", (proof,))
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute("select * from rag_service_keys")


# --- which keys are honoured ---------------------------------------------------------------------


async def test_two_tenants_may_have_keys_of_one_id(deployment: Deployment, opened: Database) -> None:
    ours, theirs = issued_key(deployment, tenant_id=ACME), issued_key(deployment, tenant_id="globex")
    with deployment.connect("rag_operator") as connection:
        connection.execute(
            "insert into rag_service_keys (tenant_id, key_id, name, secret_sha256, actions, scopes, expires_at)"
            " select 'globex', %s, name, secret_sha256, actions, scopes, expires_at"
            " from rag_service_keys where key_id = %s",
            (ours.key_id, theirs.key_id),
        )
    ring = KeyRing()
    async with ring.kept_current(opened):
        first, second = ring.find(ours.text), ring.find(f"rag_{ours.key_id}_{theirs.text[-48:]}")
        assert first is not None
        assert second is not None
        assert (first.tenant_id, second.tenant_id) == (ACME, "globex")


async def test_no_guessed_or_changed_key_is_honoured(
    deployment: Deployment, opened: Database, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    cases = scaled(test=20_000, ci=200_000, prove=5_000_000)
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    keys = [issued_key(deployment, tenant_id=ACME) for _ in range(3)]
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_. \x00é"
    ring = KeyRing()
    async with ring.kept_current(opened):
        for number in range(cases):
            key, other = chance.sample(keys, 2)
            if number % 100 == 0:
                found = ring.find(key.text)
                assert found is not None
                assert found.key_id == key.key_id
            place = chance.randrange(len(key.text))
            match chance.randrange(5):
                case 0:
                    text = key.text[:place] + chance.choice(alphabet.replace(key.text[place], ""))
                    text += key.text[place + 1 :]
                case 1:
                    text = key.text[:place] + key.text[place + 1 :]
                case 2:
                    text = key.text[: place + 1] + chance.choice(alphabet) + key.text[place + 1 :]
                case 3:
                    text = f"rag_{key.key_id}_{other.text[-48:]}"
                case _:
                    text = f"rag_{chance.randbytes(8).hex()}_{key.text[-48:]}"
            assert text == key.text or ring.find(text) is None, seed
    figure(f"{cases:,} guessed or changed service keys: 0 honoured (seed {seed})")


async def test_a_key_expires_when_it_says_and_not_when_keys_are_loaded(
    deployment: Deployment, opened: Database
) -> None:
    lasting, short = (
        issued_key(deployment, tenant_id=ACME),
        issued_key(deployment, tenant_id=ACME, valid_for="2 seconds"),
    )
    ring = KeyRing(refresh_s=10 * PATIENCE_S, stale_s=10 * PATIENCE_S)
    async with ring.kept_current(opened):
        assert attempt(ring, short) == "honoured"
        await until(lambda: attempt(ring, short) == "refused")
        assert attempt(ring, lasting) == "honoured"


async def test_a_revoked_key_ends_within_the_promised_time(
    deployment: Deployment, opened: Database, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    # One round of asking, and the longest answer that is waited for.
    assert REFRESH_S + LOAD_TIMEOUT_S < PROMISED_S
    rounds = scaled(test=2, ci=5, prove=50)
    keys = [issued_key(deployment, tenant_id=ACME) for _ in range(rounds + 1)]
    slowest_s = 0.0
    ring = KeyRing()
    async with ring.kept_current(opened):
        for key in keys[1:]:
            assert attempt(ring, key) == "honoured"
            revoke(deployment, key)
            began = time.monotonic()
            await until(lambda key=key: attempt(ring, key) == "refused")  # type: ignore[misc]
            slowest_s = max(slowest_s, time.monotonic() - began)
        assert attempt(ring, keys[0]) == "honoured"
        later = issued_key(deployment, tenant_id=ACME)
        await until(lambda: attempt(ring, later) == "honoured")
    figure(f"{rounds} revoked service keys: the slowest was refused after {slowest_s:.1f} s of {PROMISED_S:.0f}")


async def test_a_key_ends_while_requests_use_up_all_connections(deployment: Deployment) -> None:
    key = issued_key(deployment, tenant_id=ACME)
    ring = KeyRing(refresh_s=0.05)
    async with (
        database_of(deployment, publishes=False, pool_size=1, pool_timeout_s=0.2) as database,
        ring.kept_current(database),
        database.transaction(Principal(tenant_id=ACME)),
    ):
        with pytest.raises(DatabaseUnavailable):
            await database.ping()
        revoke(deployment, key)
        await until(lambda: attempt(ring, key) == "refused")


# --- without the database ------------------------------------------------------------------------


@contextmanager
def away(deployment: Deployment) -> Iterator[None]:
    """Nobody connects to the database until the block ends, and who is connected is not any more."""
    allow = sql.SQL("alter database {} with allow_connections {}")
    name = sql.Identifier(deployment.name)
    with deployment.cluster.superuser("postgres") as connection:
        connection.execute(allow.format(name, sql.SQL("false")))
        connection.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (deployment.name,)
        )
        try:
            yield
        finally:
            connection.execute(allow.format(name, sql.SQL("true")))


async def test_keys_that_cannot_be_checked_are_honoured_for_a_while_and_no_longer(
    deployment: Deployment, opened: Database
) -> None:
    key, stranger = issued_key(deployment, tenant_id=ACME), new_key()
    ring = KeyRing(refresh_s=0.05, stale_s=1.0)
    async with ring.kept_current(opened):
        with away(deployment):
            began = time.monotonic()
            assert attempt(ring, key) == "honoured"
            await until(lambda: attempt(ring, key) == "unknown")
            # Nor is anything said about a key that there is not.
            assert attempt(ring, stranger) == "unknown"
            assert time.monotonic() - began > 0.5
        # Together: what was asked before the connection was made again may be a second old when it is known.
        await until(lambda: (attempt(ring, key), attempt(ring, stranger)) == ("honoured", "refused"))


async def test_keys_are_not_honoured_for_as_long_as_nobody_would_notice() -> None:
    assert STALE_S <= 60
    assert attempt(KeyRing(), new_key()) == "unknown"


async def test_a_database_that_hangs_is_not_waited_for(deployment: Deployment, opened: Database) -> None:
    key = issued_key(deployment, tenant_id=ACME)
    ring = KeyRing(refresh_s=0.05, stale_s=1.0)
    async with ring.kept_current(opened):
        with deployment.cluster.superuser(deployment.name) as connection, connection.transaction():
            connection.execute("lock table rag.rag_service_keys in access exclusive mode")
            await until(lambda: attempt(ring, key) == "unknown")
        await until(lambda: attempt(ring, key) == "honoured")


async def test_who_waits_for_keys_gives_up_before_the_promise_is_broken(opened: Database) -> None:
    # There is one connection for this; the pool itself would wait longer for it.
    async with opened.proven():
        with pytest.raises(DatabaseTimeout):
            await load(opened)


async def test_keys_that_cannot_be_loaded_keep_the_service_from_starting(
    deployment: Deployment, opened: Database
) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("revoke execute on function rag.load_service_keys from rag_app")
    with pytest.raises(BarrierDown, match="may not execute load_service_keys"):
        async with KeyRing().kept_current(opened):
            pytest.fail("started")


def test_who_has_a_key_is_asked_to_come_back_while_it_cannot_be_checked(
    deployment: Deployment, settings: Settings
) -> None:
    key = issued_key(deployment, tenant_id=ACME)
    door = Door(keys=KeyRing(refresh_s=0.05, stale_s=0.5))
    with running(deployment, settings, door=door, credential=key.text, pool_timeout_s=0.2) as client:
        holder = Person(client=client)

        def until_answered(status: int, detail: str) -> Response:
            end = time.monotonic() + PATIENCE_S
            while detail not in (response := holder.read(MISSING)).json()["detail"]:
                # Before the keys are too old, it is the database itself that does not answer; and afterwards.
                problem_of(response, 503, "database_unavailable")
                assert time.monotonic() < end
                time.sleep(0.02)
            assert response.status_code == status
            return response

        # Loading the embedding model took longer than keys are believed here.
        until_answered(404, "No such document")
        with away(deployment):
            response = until_answered(503, "service keys could not be checked")
            problem_of(response, 503, "database_unavailable")
            problem_of(replace(holder, credential=new_key().text).read(MISSING), 503, "database_unavailable")
            problem_of(replace(holder, credential="no-key-at-all").read(MISSING), 401, "unauthenticated")
        until_answered(404, "No such document")


# --- what is recorded ----------------------------------------------------------------------------

Assertion = tuple[str, str, int, str | None, list[str], str]


@pytest.fixture
def recorded(deployment: Deployment) -> Callable[[], list[Assertion]]:
    """What has been recorded, oldest first, as the operator reads it."""

    def read() -> list[Assertion]:
        with deployment.connect("rag_operator") as connection:
            return connection.execute(
                "select tenant_id, key_id, user_id, project_id, tags, action from rag_assertions order by created_at"
            ).fetchall()

    return read


@pytest.fixture
def key(deployment: Deployment) -> NewKey:
    return issued_key(deployment, tenant_id=ACME, act_as=True, tags=["public", "hr"])


@pytest.fixture
def holder(deployment: Deployment, settings: Settings, key: NewKey) -> Iterator[Person]:
    """Whoever holds the key; names nobody."""
    with running(deployment, settings, door=Door(keys=KeyRing()), credential=key.text) as client:
        yield Person(client=client)


def test_for_every_request_it_is_recorded_who_spoke_for_whom(
    holder: Person, key: NewKey, recorded: Callable[[], list[Assertion]]
) -> None:
    mara = replace(holder, user_id=7, project_id="orion", user_tags=["hr", "public"])
    document = mara.store("refunds.md", TEXT)
    mara.ask("How long does a refund take?", generate=False)
    mara.ask("How long does a refund take?")
    mara.read(document)
    replace(holder, user_id="8").delete(document)
    holder.ask("anything", generate=False)
    as_mara = (ACME, key.key_id, 7, "orion", ["hr", "public"])
    assert recorded() == [
        (*as_mara, "ingest"),
        (*as_mara, "query"),
        (*as_mara, "query"),
        (*as_mara, "query"),
        # Recorded although there was nothing for Jonas to delete.
        (ACME, key.key_id, 8, None, ["public"], "delete"),
        (ACME, key.key_id, 0, None, ["public"], "query"),
    ]


def test_what_is_not_admitted_is_not_recorded(holder: Person, recorded: Callable[[], list[Assertion]]) -> None:
    problem_of(replace(holder, tenant_id="globex", user_id=7).ask("anything"), 403, "principal_mismatch")
    problem_of(replace(holder, user_tags=["finance"]).ask("anything"), 403, "principal_mismatch")
    problem_of(replace(holder, user_id=0).ask("anything"), 422, "invalid_input")
    problem_of(replace(holder, user_id=7).ask(""), 422, "invalid_input")
    problem_of(replace(holder, credential=new_key().text, user_id=7).ask("anything"), 401, "unauthenticated")
    assert holder.client.get("/health").status_code == 200
    assert recorded() == []


def test_what_cannot_be_recorded_is_not_carried_out(
    deployment: Deployment, holder: Person, recorded: Callable[[], list[Assertion]]
) -> None:
    mara = replace(holder, user_id=7)
    document = mara.store("refunds.md", TEXT)
    before = recorded()
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("revoke insert on rag.rag_assertions from rag_app")
        problem = problem_of(mara.ingest("second.md", TEXT), 500, "database_error")
        assert problem["detail"] == "the use of the key could not be recorded"
        problem_of(mara.ask("How long does a refund take?", generate=False), 500, "database_error")
        problem_of(mara.read(document), 500, "database_error")
        problem_of(mara.delete(document), 500, "database_error")
        sources = connection.execute("select source_id from rag.rag_documents").fetchall()
    assert sources == [("refunds.md",)]
    assert recorded() == before


def test_it_is_recorded_before_anything_is_done(
    deployment: Deployment, holder: Person, recorded: Callable[[], list[Assertion]]
) -> None:
    with deployment.cluster.superuser(deployment.name) as connection:
        connection.execute("revoke insert on rag.rag_documents from rag_app")
    assert replace(holder, user_id=7).ingest("refunds.md", TEXT).status_code == 403
    assert [action for *_, action in recorded()] == ["ingest"]


def test_neither_key_nor_digest_is_in_the_log(holder: Person, key: NewKey) -> None:
    with structlog.testing.capture_logs() as entries:
        replace(holder, user_id=7).ask("anything", generate=False)
        replace(holder, credential=key.text[:-1]).ask("anything")
    assert {entry["event"] for entry in entries} >= {"request", "credential_refused"}
    for secret in (key.text, key.text[-48:], key.text[21:40], key.secret_sha256.hex()):
        assert secret not in str(entries)
