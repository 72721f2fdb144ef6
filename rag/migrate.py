"""Brings a database to the schema of this version: bootstrap once as superuser, then Alembic.

What a migration runs stands in `alembic/frozen/`, a copy made when the migration was written; its
digest is kept as the comment of the version table, so that a database built from an earlier draft
of an unreleased migration is recognised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import psycopg
import sqlalchemy
from alembic import command, op
from alembic.config import Config
from psycopg import sql

from rag.errors import DatabaseError, DatabaseUnavailable, SchemaMismatch
from rag.frozen import digest, frozen_sql, head_revision, state
from rag.resources import migrations_folder, sql_folder

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext

__all__ = ["bootstrap", "digest", "downgrade", "head_revision", "print_script", "run_frozen", "state", "upgrade"]

# The vector stays in its row, and a row in its page of 8 KiB; 3,900 were measured to fit, 4,000 not.
MAX_DIMENSIONS = 3800


def run_frozen(name: str, variables: Mapping[str, int] | None = None) -> None:
    """Run a frozen file inside the current Alembic migration, or print it in `--sql` mode.

    `variables` replace `:name`, the way `psql -v name=value` does.
    """
    script = frozen_sql(name)
    for variable, value in (variables or {}).items():
        if script.count(f":{variable}") == 0:
            raise SchemaMismatch(f"{name} does not use :{variable}")
        script = script.replace(f":{variable}", str(int(value)))
    context: MigrationContext = op.get_context()
    if context.as_sql:
        op.execute(sqlalchemy.text(script.replace(":", r"\:")))
        return
    driver = op.get_bind().connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    # Without parameters psycopg takes a script of several statements and leaves % and : alone.
    driver.execute(script.encode())


def alembic_config(url: str | None, *, dimensions: int) -> Config:
    """Alembic's configuration for a database; its folder is found wherever this is installed."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["url"] = url
    config.attributes["dimensions"] = dimensions
    return config


def bootstrap(superuser_url: str, passwords: Mapping[str, str] | None = None) -> None:
    """Run `sql/bootstrap.sql` and give the login roles their passwords, or SCRAM verifiers, where some are given."""
    script = (sql_folder() / "bootstrap.sql").read_text(encoding="utf-8")
    try:
        with psycopg.connect(superuser_url, connect_timeout=10) as connection:
            # The same lock as a migration's: both change what the schema's rights are. It is this
            # database's; roles, which databases share, are made with that in mind.
            connection.execute("select pg_advisory_xact_lock(hashtext('palisade migration'))")
            connection.execute(script.encode())
            for role, password in (passwords or {}).items():
                connection.execute(
                    sql.SQL("alter role {} password {}").format(sql.Identifier(role), sql.Literal(password))
                )
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable() from error


def upgrade(url: str, *, dimensions: int, revision: str = "head") -> None:
    """Run the pending migrations as rag_migrator. Raises DatabaseUnavailable, SchemaMismatch."""
    _run(command.upgrade, url, dimensions, revision)


def downgrade(url: str, *, dimensions: int, revision: str) -> None:
    """Undo migrations down to `revision`; `base` removes all tables and what is in them."""
    _run(command.downgrade, url, dimensions, revision)


def print_script(*, dimensions: int) -> None:
    """Print what `upgrade` would run on an empty database, for a DBA to read and run with psql."""
    command.upgrade(alembic_config(None, dimensions=dimensions), "head", sql=True)


def _run(action: object, url: str, dimensions: int, revision: str) -> None:
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise SchemaMismatch(f"RAG_EMBEDDING_DIMENSIONS must be from 1 to {MAX_DIMENSIONS}")
    try:
        action(alembic_config(url, dimensions=dimensions), revision)  # type: ignore[operator]
    except sqlalchemy.exc.OperationalError as error:
        raise DatabaseUnavailable() from error
    except sqlalchemy.exc.DBAPIError as error:
        raise DatabaseError(f"the migration failed: {error.orig}") from error
    # Frozen scripts go to the driver itself.
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable() from error
    except psycopg.Error as error:
        raise DatabaseError(f"the migration failed: {error}") from error
