"""The tables, functions, policies and grants of the first version."""

from __future__ import annotations

from alembic import context, op

from rag.migrate import digest, run_frozen

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_frozen("0001_initial.up.sql", {"embedding_dimensions": context.config.attributes["dimensions"]})
    # The service compares the revision with its own before it starts.
    op.execute("grant select on rag.alembic_version to rag_migrator, rag_app, rag_publisher, rag_worker, rag_operator")
    op.execute(f"comment on table rag.alembic_version is '0001_initial={digest('0001_initial.up.sql')}'")


def downgrade() -> None:
    run_frozen("0001_initial.down.sql")
