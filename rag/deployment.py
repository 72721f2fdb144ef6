"""The database that a command works with: the one that the settings name, else the embedded one."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg

from rag import embedded, frozen
from rag.database import Database, translated_errors
from rag.errors import DatabaseUnavailable, InvalidInput, SchemaMismatch
from rag.resources import query
from rag.settings import Settings
from rag.sign import Signer

# Only the embedded database has one (DESIGN.md, section 2): it is one developer's own.
EMBEDDED_TENANT = "default"
LOGIN_ROLES = ("rag_app", "rag_publisher", "rag_worker", "rag_migrator", "rag_operator")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Where a database is; `server` is set for the embedded one."""

    app_url: str
    publisher_url: str | None
    signer: Signer
    server: embedded.EmbeddedPostgres | None

    @property
    def default_tenant(self) -> str | None:
        return None if self.server is None else EMBEDDED_TENANT

    def open(self, settings: Settings) -> Database:
        """The pools of the service, not yet opened."""
        return self._pools(settings, self.app_url, "rag_app")

    @property
    def worker_url(self) -> str:
        """RAG_DATABASE_URL, which for a worker logs in as rag_worker; the embedded database's."""
        return self.app_url if self.server is None else self.server.url("rag_worker")

    def open_worker(self, settings: Settings) -> Database:
        """The pools of a worker, not yet opened."""
        return self._pools(settings, self.worker_url, "rag_worker")

    def _pools(self, settings: Settings, url: str, role: str) -> Database:
        return Database(
            url,
            signer=self.signer,
            publisher_url=self.publisher_url,
            role=role,
            pool_size=settings.rag_pool_size,
            pool_timeout_s=settings.rag_pool_timeout_seconds,
            # No pooler is between a process and its own server.
            prepared_statements=settings.rag_prepared_statements or self.server is not None,
        )


def locate(settings: Settings) -> Deployment:
    """Find the database; start and migrate the embedded one when no other is named.

    Raises EmbeddedUnavailable, SchemaMismatch, DatabaseUnavailable, InvalidInput for a missing setting.
    """
    if settings.rag_database_url is not None:
        if settings.rag_signing_key is None:
            raise InvalidInput(
                "RAG_SIGNING_KEY must be set as well: the database takes no identity that is not signed; "
                "`rag keys sign` makes one",
                field="RAG_SIGNING_KEY",
            )
        publisher = settings.rag_publisher_database_url
        return Deployment(
            app_url=settings.rag_database_url.get_secret_value(),
            publisher_url=None if publisher is None else publisher.get_secret_value(),
            signer=Signer.parse(settings.rag_signing_key.get_secret_value()),
            server=None,
        )
    server = embedded.start(settings.rag_home)
    signer = prepare(server, settings)
    return Deployment(
        app_url=server.url("rag_app"), publisher_url=server.url("rag_publisher"), signer=signer, server=server
    )


def prepare(server: embedded.EmbeddedPostgres, settings: Settings) -> Signer:
    """Migrate an embedded database that is behind; returns its signing key.

    Raises SchemaMismatch for a database from another draft.
    """
    try:
        revision, same = frozen.state(server.url("postgres"))
    except DatabaseUnavailable as error:
        raise DatabaseUnavailable(f"the embedded database in {server.home} does not answer") from error
    if not same:
        raise SchemaMismatch(
            f"the embedded database in {server.home} was built by an earlier draft of this version's schema, "
            "which is not released yet; `rag db rebuild` makes it anew and deletes what is in it"
        )
    if revision != frozen.head_revision():
        from rag import migrate  # Alembic and SQLAlchemy: a fifth of a second that other commands are spared

        # Verifiers, so that no password stands in a statement, where a log or a view of activity shows it.
        verifiers = {role: embedded.scram_verifier(server.password(role)) for role in LOGIN_ROLES}
        migrate.bootstrap(server.url("postgres"), verifiers)
        migrate.upgrade(server.url("rag_migrator"), dimensions=settings.rag_embedding_dimensions)
    key = server.signing_key()
    # A new database does not know the key of one that was there before.
    if revision is None or key is None:
        key = add_signing_key(server.url("rag_operator"))
        server.keep_signing_key(key)
    return Signer.parse(key)


def add_signing_key(operator_url: str) -> str:
    """A new key of the database, as RAG_SIGNING_KEY takes it; shown this once. Raises the DatabaseError family."""
    with translated_errors(), psycopg.connect(operator_url, connect_timeout=10) as connection:
        row = connection.execute(query("add_signing_key").encode()).fetchone()
    assert row is not None
    return ".".join(row)


def rebuild(settings: Settings) -> embedded.EmbeddedPostgres:
    """Delete the embedded database with everything in it, and make it anew."""
    embedded.stop(settings.rag_home)
    embedded.remove(settings.rag_home)
    server = embedded.start(settings.rag_home)
    prepare(server, settings)
    return server
