"""A real PostgreSQL for every test: RAG_TEST_DATABASE_URL (a superuser's), else Docker when
RAG_TEST_DOCKER=1, else the embedded one. One template database is migrated, each test gets a clone.
"""

from __future__ import annotations

import functools
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import UUID

import psycopg
import pytest
import typer.main
from psycopg import sql

from rag import embedded, migrate
from rag.database import Database
from rag.embed import Embedder, open_embedder
from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from rag.sign import Signer
from tests.lanes import Lanes, add_options, figure, scaled

__all__ = ["figure", "scaled"]

# A process puts the tree of its commands together once, in 0.1 s; tests run some thousand commands in one process.
typer.main.get_command = functools.cache(typer.main.get_command)

DIMENSIONS = 512
LOGINS = ("rag_migrator", "rag_app", "rag_publisher", "rag_worker", "rag_operator")
# The service's key in all test databases, and as RAG_SIGNING_KEY has it.
SIGNER = Signer(key_id="test", secret=bytes(range(32)))
SIGNING_KEY = f"test.{SIGNER.secret.hex()}"
IMAGE = "pgvector/pgvector:pg18"
MEMORY = Path("/dev/shm")
# What the databases of two workers may need, and as much for everybody else.
ROOM = 4 * 1024**3


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Lanes(), "lanes")


@dataclass(frozen=True)
class Cluster:
    """A PostgreSQL server, reached as its superuser; login roles share one password."""

    superuser_url: str
    password: str

    def url(self, role: str, database: str) -> str:
        parts = urlsplit(self.superuser_url)
        host = parts.netloc.rpartition("@")[2]
        login = parts.netloc.rpartition("@")[0] if role == "postgres" else f"{role}:{quote(self.password)}"
        return urlunsplit(parts._replace(netloc=f"{login}@{host}", path=f"/{database}"))

    def superuser(self, database: str) -> psycopg.Connection:
        return psycopg.connect(self.url("postgres", database), autocommit=True)


@dataclass(frozen=True)
class Deployment:
    """One migrated database."""

    cluster: Cluster
    name: str

    def url(self, role: str) -> str:
        return self.cluster.url(role, self.name)

    def connect(self, role: str = "rag_app") -> psycopg.Connection:
        """An autocommit connection without any identity."""
        return psycopg.connect(self.url(role), autocommit=True)

    @contextmanager
    def transaction(self, principal: Principal, *, role: str = "rag_app") -> Iterator[psycopg.Connection]:
        """A transaction that speaks for a principal, as the service opens one."""
        with self.connect(role) as connection, connection.transaction():
            begin(connection, principal)
            yield connection

    def pools(self, *, pool_size: int = 3) -> Database:
        """The service's pools on this database, not yet opened."""
        return Database(
            self.url("rag_app"),
            signer=SIGNER,
            publisher_url=self.url("rag_publisher"),
            pool_size=pool_size,
        )


def begin(connection: psycopg.Connection, principal: Principal) -> None:
    """Make the transaction speak for a principal, as the service does."""
    connection.execute(query("begin_as"), named(principal, role=connection.info.user))


def named(principal: Principal, *, role: str) -> dict[str, object]:
    """A principal as `begin_as.sql` is told of it, signed for a login."""
    return {
        "tenant_id": principal.tenant_id,
        "user_id": principal.user_id,
        "project_id": principal.project_id,
        "tags": list(principal.tags),
        "signature": SIGNER.sign(principal, role=role),
    }


def know_signer(superuser: psycopg.Connection) -> None:
    """Make SIGNER one of the keys of a migrated database."""
    padded = SIGNER.secret.ljust(64, b"\0")
    superuser.execute(
        "insert into rag.rag_signing_keys (key_id, inner_pad, outer_pad) values (%s, %s, %s)",
        (SIGNER.key_id, bytes(byte ^ 0x36 for byte in padded), bytes(byte ^ 0x5C for byte in padded)),
    )


@contextmanager
def _docker() -> Iterator[str]:
    docker = pytest.importorskip("docker", reason="RAG_TEST_DOCKER=1 needs the docker package")
    from testcontainers.community.postgres import PostgresContainer

    try:
        docker.from_env().ping()
    except docker.errors.DockerException:
        pytest.skip("RAG_TEST_DOCKER=1 is set, and no Docker engine answers")
    with PostgresContainer(IMAGE, username="postgres", driver=None) as container:
        yield container.get_connection_url()


@contextmanager
def _server() -> Iterator[str]:
    given = os.environ.get("RAG_TEST_DATABASE_URL")
    if given:
        yield given
    elif os.environ.get("RAG_TEST_DOCKER") == "1":
        with _docker() as url:
            yield url
    else:
        major = int(os.environ.get("RAG_TEST_POSTGRES_MAJOR", "18"))
        with embedded.ephemeral(major=major) as server, _databases_in_memory(server):
            yield server.url("postgres", "postgres")


@contextmanager
def _databases_in_memory(server: embedded.EmbeddedPostgres) -> Iterator[None]:
    """Put the databases that are made in the block on a file system in memory, where there is one with room.

    A database is some 350 files. For a minute ext4 gives no inode again that was freed, and looks at each such one
    whenever a file is made: after a hundred clones the next took 0.6 s of the kernel's time, in memory 0.03 s.
    """
    if not MEMORY.is_dir() or shutil.disk_usage(MEMORY).free < ROOM:
        yield
        return
    for left in MEMORY.glob("palisade-tests-*"):
        if left.stat().st_uid == os.geteuid() and not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
            shutil.rmtree(left)
    folder = MEMORY / f"palisade-tests-{os.getpid()}"
    folder.mkdir(mode=0o711)
    try:
        files = folder / "databases"
        files.mkdir(mode=0o700)
        owner = server.data.stat()
        os.chown(files, owner.st_uid, owner.st_gid)
        with psycopg.connect(server.url("postgres", "postgres"), autocommit=True) as connection:
            connection.execute(sql.SQL("create tablespace memory location {}").format(sql.Literal(str(files))))
            # Whose tablespace a new database gets.
            connection.execute("alter database template1 set tablespace memory")
        yield
    finally:
        shutil.rmtree(folder)


def create_database(cluster: Cluster, name: str, *, template: str = "template1") -> None:
    with cluster.superuser("postgres") as connection:
        connection.execute(
            sql.SQL("create database {} template {}").format(sql.Identifier(name), sql.Identifier(template))
        )


def drop_database(cluster: Cluster, name: str) -> None:
    with cluster.superuser("postgres") as connection:
        connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


@contextmanager
def clone(cluster: Cluster, template: str) -> Iterator[Deployment]:
    """A copy of a database that nobody is connected to, dropped at the end of the block."""
    name = f"palisade_{secrets.token_hex(6)}"
    create_database(cluster, name, template=template)
    # What belongs to a database and not to its content is not copied.
    migrate.bootstrap(cluster.url("postgres", name))
    yield Deployment(cluster, name)
    drop_database(cluster, name)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with _server() as url:
        yield Cluster(superuser_url=url, password=secrets.token_hex(8))


@pytest.fixture(scope="session")
def template(cluster: Cluster) -> Iterator[str]:
    """The name of a migrated database that nobody connects to."""
    name = f"palisade_template_{secrets.token_hex(4)}"
    create_database(cluster, name)
    migrate.bootstrap(cluster.url("postgres", name), dict.fromkeys(LOGINS, cluster.password))
    migrate.upgrade(cluster.url("rag_migrator", name), dimensions=DIMENSIONS)
    with cluster.superuser(name) as connection:
        know_signer(connection)
    yield name
    drop_database(cluster, name)


@pytest.fixture(scope="session")
def new_deployment(cluster: Cluster, template: str) -> Callable[[], AbstractContextManager[Deployment]]:
    """Clones of the template, each dropped at the end of its block."""
    return lambda: clone(cluster, template)


@pytest.fixture
def deployment(new_deployment: Callable[[], AbstractContextManager[Deployment]]) -> Iterator[Deployment]:
    """A migrated database of this test's own."""
    with new_deployment() as clone:
        yield clone


@pytest.fixture
async def database(deployment: Deployment) -> AsyncIterator[Database]:
    """The pools of the service on this test's database."""
    async with deployment.pools() as opened:
        yield opened


@pytest.fixture(scope="session")
def settings() -> Settings:
    """The defaults, whatever the environment says; answers quote their sources."""
    return Settings(_env_file=None, rag_llm_provider="extractive")


@pytest.fixture(scope="session")
def embedder(settings: Settings) -> Embedder:
    """The local model; loaded once, it takes no connection and keeps no state."""
    return open_embedder(settings)


def unit_vector(*components: float) -> str:
    """A vector in halfvec's notation: these components first, zeros after them."""
    return "[" + ",".join(str(value) for value in (*components, *[0.0] * (DIMENSIONS - len(components)))) + "]"


Store = Callable[..., UUID]


@pytest.fixture
def store(deployment: Deployment) -> Store:
    """`store(principal, text, …)` writes a document with one chunk, and returns its id.

    By plain SQL and not by the product's ingest, so that a test of one does not rest on the other.
    """
    count = 0

    def write(
        principal: Principal,
        text: str,
        *,
        scope: str = "user",
        project_id: str | None = None,
        owner_user_id: int | None = None,
        tags: tuple[str, ...] = ("public",),
        embedding: str | None = None,
        embedding_model: str = "test-model",
        title: str = "A document",
        language: str | None = "en",
        verified: bool = False,
        document_id: UUID | None = None,
        chunk_index: int = 0,
        role: str | None = None,
    ) -> UUID:
        nonlocal count
        count += 1
        owner = None if scope == "public" else owner_user_id or principal.user_id
        with deployment.transaction(
            principal, role=role or ("rag_publisher" if scope == "public" else "rag_app")
        ) as connection:
            access_id = connection.execute(
                "select access_class(%s, %s, %s, %s)", (scope, owner, project_id, list(tags))
            ).fetchone()[0]
            if document_id is None:
                document_id = connection.execute(
                    """
                    insert into rag_documents (
                        tenant_id, access_id, scope, user_id, project_id, tags,
                        source_type, source_id, source_hash, title, body, language, verified
                    )
                    select
                        tenant_id, access_id, scope, user_id, project_id, tags,
                        'text', %s, 'hash', %s, %s, %s, %s
                    from my_classes()
                    where access_id = %s
                    returning id
                    """,
                    (f"source-{count}", title, text, language, verified, access_id),
                ).fetchone()[0]
            connection.execute(
                """
                insert into rag_chunks (
                    tenant_id, access_id, document_id, chunk_index, chunk_text, chunk_hash, token_count,
                    token_counter, start_offset, end_offset, embedding, embedding_model, tsv, lexeme_count,
                    language
                )
                select
                    %(tenant)s, %(access)s, %(document)s, %(index)s, %(text)s, md5(%(text)s), %(tokens)s,
                    'words', 0, %(end)s, %(embedding)s::halfvec, %(model)s, tsv, lexeme_total(tsv), %(language)s
                from search_vector(%(language)s, %(text)s) as tsv
                """,
                {
                    "tenant": principal.tenant_id,
                    "access": access_id,
                    "document": document_id,
                    "index": chunk_index,
                    "text": text,
                    "tokens": len(text.split()),
                    "end": len(text),
                    "embedding": embedding or unit_vector(1.0),
                    "model": embedding_model,
                    "language": language,
                },
            )
        return document_id

    return write


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The public test collections, which are not part of the repository."""
    folder = Path(os.environ.get("RAG_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("the test collections are absent: set RAG_TEST_DATA to their folder")
    return folder
