"""What the migrations run, frozen when each was written, and what a database was built from; without Alembic."""

from __future__ import annotations

import hashlib

import psycopg

from rag.errors import DatabaseUnavailable, SchemaMismatch
from rag.resources import migrations_folder


def frozen_sql(name: str) -> str:
    """What migration file `name` runs; raises SchemaMismatch when it is not what was frozen."""
    folder = migrations_folder() / "frozen"
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    sums = {file: recorded for recorded, file in (line.split() for line in lines)}
    if sums.get(name) != digest(name):
        raise SchemaMismatch(f"{name} is not what was frozen: a migration that was written never changes")
    return (folder / name).read_text(encoding="utf-8")


def digest(name: str) -> str:
    """SHA-256 of a frozen file, hexadecimal."""
    return hashlib.sha256((migrations_folder() / "frozen" / name).read_bytes()).hexdigest()


def head_revision() -> str:
    """The revision that this version of the code works with: the number of the newest frozen file."""
    return max(path.name for path in (migrations_folder() / "frozen").glob("*.up.sql")).partition("_")[0]


def other_draft(recorded: str | None) -> str | None:
    """The migration that a database was built by in another wording, from the comment of its version table.

    None when there is none. Raises SchemaMismatch for a database of a newer version.
    """
    for name, _, value in (entry.partition("=") for entry in (recorded or "").split()):
        if not (migrations_folder() / "frozen" / f"{name}.up.sql").is_file():
            raise SchemaMismatch("this database was migrated by a newer version of Palisade")
        if digest(f"{name}.up.sql") != value:
            return name
    return None


def state(url: str) -> tuple[str | None, bool]:
    """The revision of a database, and whether its migrations are the ones of this version.

    The second is False when an unreleased migration was rewritten after the database was built.
    Raises DatabaseUnavailable, SchemaMismatch for a database of a newer version.
    """
    try:
        with psycopg.connect(url, connect_timeout=10) as connection:
            found = connection.execute(
                "select obj_description(to_regclass('rag.alembic_version'), 'pg_class'),"
                " to_regclass('rag.alembic_version') is not null"
            ).fetchone()
            assert found is not None
            comment, migrated = found
            row = connection.execute("select version_num from rag.alembic_version").fetchone() if migrated else None
    except psycopg.OperationalError as error:
        raise DatabaseUnavailable() from error
    if row is None:
        return None, True
    return row[0], other_draft(comment) is None
