"""What ingestion knows of a source comes in one statement."""

from __future__ import annotations

from alembic import op

from rag.migrate import digest, run_frozen

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_frozen("0002_fewer_round_trips.up.sql")
    _record("0001_initial", "0002_fewer_round_trips")


def downgrade() -> None:
    run_frozen("0002_fewer_round_trips.down.sql")
    _record("0001_initial")


def _record(*names: str) -> None:
    digests = " ".join(f"{name}={digest(f'{name}.up.sql')}" for name in names)
    op.execute(f"comment on table rag.alembic_version is '{digests}'")
