"""One application for all tests, with a tenant for each: what one test stores no other can see."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
from starlette.testclient import TestClient

from api.identity import Door
from rag.keys import KeyRing
from rag.settings import Settings
from tests.api.running import Person, issued_key, running
from tests.conftest import Deployment

# The one tenant of the trusted service.
ACME = "acme"


@pytest.fixture(scope="session")
def site(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """The database behind `client` and `service`."""
    with new_deployment() as clone:
        yield clone


@pytest.fixture(scope="session")
def client(site: Deployment, settings: Settings) -> Iterator[TestClient]:
    """What `rag serve` runs on loopback, with its token."""
    with running(site, settings) as started:
        yield started


@pytest.fixture(scope="session")
def service(site: Deployment, settings: Settings) -> Iterator[TestClient]:
    """What `rag serve` runs for trusted services, with the key of one that speaks for people of acme, in two
    tags, and may not publish; logs in as rag_publisher as well.
    """
    key = issued_key(site, tenant_id=ACME, act_as=True, tags=["public", "hr"])
    # Asks for the keys so often that tests need not wait for those that they make.
    with running(site, settings, door=Door(keys=KeyRing(refresh_s=0.05)), credential=key.text) as started:
        yield started


@pytest.fixture
def tenant() -> str:
    return f"tenant-{secrets.token_hex(6)}"


@pytest.fixture
def mara(client: TestClient, tenant: str) -> Person:
    return Person(client=client, tenant_id=tenant, user_id=7)


@pytest.fixture
def jonas(client: TestClient, tenant: str) -> Person:
    return Person(client=client, tenant_id=tenant, user_id=8)


@pytest.fixture
def visitor(client: TestClient, tenant: str) -> Person:
    """Somebody of the tenant without a user."""
    return Person(client=client, tenant_id=tenant)


@pytest.fixture
def stored(site: Deployment) -> Iterator[Callable[..., int]]:
    """`stored(tenant)` counts a tenant's documents and chunks, `stored()` those of all, as the superuser sees them."""
    with site.cluster.superuser(site.name) as connection:

        def count(tenant_id: str | None = None) -> int:
            row = connection.execute(
                "select count(*) from ("
                "select tenant_id from rag.rag_documents union all select tenant_id from rag.rag_chunks"
                ") as row where %(tenant)s::text is null or tenant_id = %(tenant)s",
                {"tenant": tenant_id},
            ).fetchone()
            assert row is not None
            return int(row[0])

        yield count
