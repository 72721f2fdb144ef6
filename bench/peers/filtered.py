"""Answers questions with langchain-postgres and a metadata filter; bench/speed.py runs it with its own venv's Python.

    python filtered.py SCHEMA TABLE LIMIT_MS

Reads lines of JSON, `embedding`, `filter` and `k`, and writes one for each: `spent_s` and `found`, documents and
places in them, nearest first; or `error`. The table is there already, with its indexes. PEER_DATABASE_URL is its
database. Nothing of the product is imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from urllib.parse import urlsplit, urlunsplit

from langchain_core.embeddings import FakeEmbeddings
from langchain_postgres import PGEngine, PGVectorStore
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine


async def serve(schema: str, table: str, limit_ms: str) -> None:
    url = urlsplit(os.environ["PEER_DATABASE_URL"])._replace(scheme="postgresql+asyncpg", query="")
    settings = {"search_path": f"{schema}, rag, public", "statement_timeout": limit_ms}
    engine = create_async_engine(urlunsplit(url), pool_size=1, connect_args={"server_settings": settings})
    store = await PGVectorStore.create(
        PGEngine.from_engine(engine),
        embedding_service=FakeEmbeddings(size=1),  # the vectors are given
        schema_name=schema,
        table_name=table,
        id_column="id",
        content_column="chunk_text",
        embedding_column="embedding",
        metadata_columns=["tenant_id", "scope", "user_id", "document_id", "chunk_index"],
        metadata_json_column=None,
    )
    for line in sys.stdin:
        asked = json.loads(line)
        started = time.perf_counter()
        try:
            found = await store.asimilarity_search_by_vector(asked["embedding"], k=asked["k"], filter=asked["filter"])
        except DBAPIError as error:
            print(json.dumps({"error": str(error)[:500]}), flush=True)
            continue
        spent_s = time.perf_counter() - started
        rows = [[document.metadata["document_id"].hex, document.metadata["chunk_index"]] for document in found]
        print(json.dumps({"spent_s": spent_s, "found": rows}), flush=True)


asyncio.run(serve(*sys.argv[1:]))
