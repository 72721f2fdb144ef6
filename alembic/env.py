"""Runs the migrations as rag_owner, in one transaction, two runs at once one after the other."""

from __future__ import annotations

import sqlalchemy
from alembic import context

from rag.errors import SchemaMismatch
from rag.settings import Settings

# hashtext('palisade migration'), so that the lock means the same in every version.
BEGIN = (
    "select pg_advisory_xact_lock(hashtext('palisade migration'))",
    "set local role rag_owner",
    "set local search_path = rag, pg_temp",
    # A migration that waits for a long query makes every other query wait behind it.
    "set local lock_timeout = '10s'",
)


def url() -> str:
    given = context.config.attributes.get("url")
    if given is None:
        secret = Settings().rag_migration_database_url
        if secret is None:
            raise SchemaMismatch("RAG_MIGRATION_DATABASE_URL is not set")
        given = secret.get_secret_value()
    return str(given).replace("postgresql://", "postgresql+psycopg://", 1)


def run() -> None:
    with context.begin_transaction():
        for statement in BEGIN:
            context.execute(statement)
        context.run_migrations()


context.config.attributes.setdefault("dimensions", Settings().rag_embedding_dimensions)

if context.is_offline_mode():
    # `named`, or every % of the script would be printed twice.
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},
        version_table_schema="rag",
        literal_binds=True,
    )
    run()
else:
    engine = sqlalchemy.create_engine(url(), poolclass=sqlalchemy.pool.NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, version_table_schema="rag")
        run()
