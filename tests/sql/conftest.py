"""The world of `world.py` in a database, and connections of the login roles to it; tests leave it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import psycopg
import pytest

from tests.conftest import Deployment
from tests.sql.world import build


@pytest.fixture(scope="module")
def world(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    with new_deployment() as clone:
        with clone.cluster.superuser(clone.name) as connection, connection.transaction():
            build(connection)
        yield clone


@pytest.fixture(scope="module")
def app(world: Deployment) -> Iterator[psycopg.Connection]:
    with world.connect("rag_app") as connection:
        yield connection


@pytest.fixture(scope="module")
def publisher(world: Deployment) -> Iterator[psycopg.Connection]:
    with world.connect("rag_publisher") as connection:
        yield connection


@pytest.fixture(scope="module")
def worker(world: Deployment) -> Iterator[psycopg.Connection]:
    with world.connect("rag_worker") as connection:
        yield connection


@pytest.fixture(scope="module")
def operator(world: Deployment) -> Iterator[psycopg.Connection]:
    with world.connect("rag_operator") as connection:
        yield connection


@pytest.fixture(scope="module")
def superuser(world: Deployment) -> Iterator[psycopg.Connection]:
    with world.cluster.superuser(world.name) as connection:
        connection.execute("set search_path = rag, pg_temp")
        yield connection


@pytest.fixture(scope="module", params=["rag_app", "rag_publisher"])
def service(request: pytest.FixtureRequest) -> psycopg.Connection:
    """A connection of the service, as either of its roles."""
    return request.getfixturevalue({"rag_app": "app", "rag_publisher": "publisher"}[request.param])
