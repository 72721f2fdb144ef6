"""Where the SQL and the migrations are: beside the package in a checkout, inside it in the wheel."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(checkout: str, packaged: str) -> Path:
    for candidate in (_PACKAGE / packaged, _PACKAGE.parent / checkout):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"neither {packaged} nor {checkout} is part of this installation")


def sql_folder() -> Path:
    """The folder with `schema/`, `queries/` and `bootstrap.sql`."""
    return _folder("sql", "_sql")


def migrations_folder() -> Path:
    """Alembic's folder: `env.py`, `versions/`, `frozen/`."""
    return _folder("alembic", "_migrations")


def sample_folder() -> Path:
    """The sample corpus and its manifest `corpus.yaml`."""
    return _PACKAGE / "_sample"


@cache
def query(name: str) -> str:
    """The statement in `sql/queries/{name}.sql`; read once per process."""
    return (sql_folder() / "queries" / f"{name}.sql").read_text(encoding="utf-8")
