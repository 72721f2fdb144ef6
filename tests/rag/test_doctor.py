"""`rag doctor`: the manifest, what is said of a difference, and the command with its exit codes.

After a change of the schema: `RAG_UPDATE_DOCS=1 pytest tests/rag/test_doctor.py -k manifest`, then read the diff.
"""

from __future__ import annotations

import dataclasses
import json
import os

from psycopg import AsyncConnection
from psycopg.rows import dict_row

from rag.database import Session
from rag.manifest import expected, read_catalog
from rag.resources import sql_folder
from tests.conftest import Deployment

MANIFEST = sql_folder() / "manifest.json"


async def described(deployment: Deployment) -> str:
    """The manifest of a deployment: a line for each fact, without what depends on it."""
    connection = await AsyncConnection.connect(deployment.url("rag_app"), autocommit=True, row_factory=dict_row)
    async with connection:
        session = Session(connection)
        revision = await session.row("schema_revision", {})
        async with session.attempt():
            facts = await read_catalog(session)
    lines = []
    for fact in facts:
        entry = dataclasses.asdict(fact)
        del entry["unmake"], entry["remark"]
        lines.append(json.dumps(entry, ensure_ascii=False))
    return f'{{"migrations": "{revision["digests"]}", "facts": [\n' + ",\n".join(lines) + "\n]}\n"


async def test_the_manifest_is_what_the_migrations_make(deployment: Deployment) -> None:
    """On every PostgreSQL that is supported: the lanes run this on the oldest and on the newest."""
    found = await described(deployment)
    if os.environ.get("RAG_UPDATE_DOCS") == "1":
        MANIFEST.write_text(found, encoding="utf-8")
        expected.cache_clear()
    assert MANIFEST.read_text(encoding="utf-8").splitlines() == found.splitlines()
