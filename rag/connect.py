"""Connections of the service: how they are made, what they forget between two borrowers, and what a pooler
between the service and its database has to do."""

from __future__ import annotations

import psycopg
from pgvector.psycopg.halfvec import register_halfvec_info
from psycopg import AsyncConnection
from psycopg.rows import DictRow, dict_row
from psycopg.types import TypeInfo
from psycopg_pool import AsyncConnectionPool

from rag import errors
from rag.resources import query

# Requests that may wait for a connection, for each one that there is; more are refused at once.
WAITING_PER_CONNECTION = 20
# psycopg's own default: a statement is kept by the server from its sixth time on.
PREPARE_THRESHOLD = 5

# What a session can keep beyond its transactions: variables, rows, locks. Not by `discard all`, which also forgets
# the plans of rag.search and costs the next request 1.2 ms; this costs 0.1 ms more than asking nothing.
_FORGET = b"""
do $$ begin
    reset all;
    execute 'close all';
    perform pg_advisory_unlock_all();
end $$
"""


class Connection(AsyncConnection[DictRow]):
    """A connection of a pool."""

    direct = False
    """No pooler is in the path: the session of the server is this connection's alone."""


def pool(
    url: str, *, size: int, timeout_s: float, prepares: bool, min_size: int = 1
) -> AsyncConnectionPool[Connection]:
    """A pool that is not open yet. `prepares`: let the server keep statements that are asked often."""
    return AsyncConnectionPool(
        url,
        kwargs={
            "row_factory": dict_row,
            "application_name": "palisade",
            "connect_timeout": 10,
            # A pooler that does not keep track of prepared statements runs somebody else's SQL.
            "prepare_threshold": PREPARE_THRESHOLD if prepares else None,
            "autocommit": True,
        },
        connection_class=Connection,
        min_size=min_size,
        max_size=size,
        timeout=timeout_s,
        max_waiting=WAITING_PER_CONNECTION * size,
        configure=_configure,
        # When it is borrowed and not by `reset` when it is given back: a pool that is being closed leaves
        # connections open that wait for that.
        check=_forget,
        open=False,
    )


async def check_pooler(connection: Connection, *, prepares: bool) -> None:
    """Raise BarrierDown when a pooler in the path would not keep the requests of two principals apart."""
    if connection.direct:
        return
    transactions = set()
    prepared: list[DictRow] = []
    try:
        async with connection.transaction():
            for _ in range(2):
                cursor = await connection.execute(query("find_session").encode())
                transactions |= {(row["process"], row["began"]) for row in await cursor.fetchall()}
            if prepares:
                # Prepared itself: a pooler that keeps track of it has given it another name.
                cursor = await connection.execute(query("find_prepared").encode(), prepare=True)
                prepared = await cursor.fetchall()
    except psycopg.errors.ProtocolViolation as error:
        raise errors.BarrierDown(
            "the connection pooler refuses transactions: put it into transaction mode (pool_mode)"
        ) from error
    if len(transactions) > 1:
        raise errors.BarrierDown(
            "the connection pooler spreads a transaction over several connections: put it into transaction mode "
            "(pool_mode)"
        )
    if prepared:
        raise errors.BarrierDown(
            "the connection pooler does not keep track of prepared statements: set its max_prepared_statements, "
            "or RAG_PREPARED_STATEMENTS=0"
        )


async def _configure(connection: Connection) -> None:
    await _find_out_the_path(connection)
    # Vectors travel in binary: of 512 numbers 1 KB in 5 µs, where digits are 5.4 KB in 80 µs (CPython 3.11, x86_64).
    # Not by TypeInfo.fetch(), which opens a transaction: what a pooler makes of those is for check_pooler to tell.
    cursor = await connection.execute(query("find_vector_type").encode())
    found = await cursor.fetchone()
    if found is not None:
        known = TypeInfo("halfvec", oid=found["oid"], array_oid=found["array_oid"])
        register_halfvec_info(connection, known)


async def _find_out_the_path(connection: Connection) -> None:
    cursor = await connection.execute(query("find_session").encode())
    row = await cursor.fetchone()
    # PgBouncer gives its clients a process number of its own.
    connection.direct = row is not None and row["process"] == connection.info.backend_pid


async def _forget(connection: Connection) -> None:
    """End what the borrower before may have left; raises for a connection that died, which is replaced."""
    # Through a pooler it would reach whichever session is free; `begin_as` finds an identity there.
    await connection.execute(_FORGET if connection.direct else b"")
