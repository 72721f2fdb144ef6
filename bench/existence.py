"""Whether time tells a foreign document from a missing one: 5,000 pairs, read by id, one after the other in turn.

Run: `make bench`. AUC is the chance that a foreign one takes longer than a missing one: .5 says nothing. The two
arms must both find nothing, or this fails; as a check of the measurement itself, one's own document is timed too.
"""

from __future__ import annotations

import datetime
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from uuid import UUID, uuid4

import psycopg

from rag import deployment, embedded
from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from rag.sign import Signer

PAIRS = 5000
DOCUMENTS = 2000  # of each of the two users
PER_TRANSACTION = 100
RESULT = Path(__file__).parent / "results" / "existence.md"

ASKER = Principal(tenant_id="acme", user_id=1)
OTHER = Principal(tenant_id="acme", user_id=2)


def begin(connection: psycopg.Connection, signer: Signer, principal: Principal) -> None:
    connection.execute(
        query("begin_as").encode(),
        {
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "project_id": principal.project_id,
            "tags": list(principal.tags),
            "signature": signer.sign(principal, role="rag_app"),
        },
    )


def plant(connection: psycopg.Connection, signer: Signer, principal: Principal) -> list[UUID]:
    """Documents of a principal, without chunks; their ids."""
    ids = [uuid4() for _ in range(DOCUMENTS)]
    with connection.transaction():
        begin(connection, signer, principal)
        connection.execute("select access_class('user', %s, null, '{public}')", (principal.user_id,))
        with connection.cursor() as cursor:
            cursor.executemany(
                "insert into rag_documents (tenant_id, access_id, id, scope, user_id, tags, source_type, source_id,"
                " source_hash, title, body) select tenant_id, access_id, %s, scope, user_id, tags, 'text', %s, 'hash',"
                " 'A title', 'A text.' from my_classes()",
                [(one, str(one)) for one in ids],
            )
    return ids


def auc(longer: list[float], shorter: list[float]) -> float:
    """Mann and Whitney 1947: the share of pairs in which the first is larger, ties counted half."""
    ranked = sorted([(value, 1) for value in longer] + [(value, 0) for value in shorter])
    rank_sum = 0.0
    start = 0
    while start < len(ranked):
        end = start
        while end < len(ranked) and ranked[end][0] == ranked[start][0]:
            end += 1
        rank_sum += (start + 1 + end) / 2 * sum(kind for _, kind in ranked[start:end])
        start = end
    return (rank_sum - len(longer) * (len(longer) + 1) / 2) / (len(longer) * len(shorter))


def measure(server: embedded.EmbeddedPostgres) -> dict[str, list[float]]:
    signer = deployment.prepare(server, Settings(_env_file=None))
    numbers = random.Random(20261121)
    times: dict[str, list[float]] = {"foreign": [], "missing": [], "one's own": []}
    with psycopg.connect(server.url("rag_app"), autocommit=True, prepare_threshold=None) as connection:
        own, foreign = plant(connection, signer, ASKER), plant(connection, signer, OTHER)
        statement = query("get_document").encode()
        for number in range(PAIRS + PER_TRANSACTION):
            if number % PER_TRANSACTION == 0:
                connection.execute("rollback" if number else "select 1")
                connection.execute("begin")
                begin(connection, signer, ASKER)
            there = numbers.choice(foreign)
            arms = [("foreign", there), ("missing", UUID(int=there.int ^ 1)), ("one's own", numbers.choice(own))]
            numbers.shuffle(arms)
            for name, one in arms:
                started = time.perf_counter()
                found = connection.execute(statement, {"id": one}).fetchall()
                elapsed = time.perf_counter() - started
                if len(found) != (name == "one's own"):
                    sys.exit(f"{name}: {len(found)} rows")
                if number >= PER_TRANSACTION:  # the first ones warm up
                    times[name].append(elapsed * 1000)
        connection.execute("rollback")
    return times


def main() -> None:
    lines = [
        "# A foreign document against a missing one, read by id",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}; {PAIRS:,} of each, in turn, among {DOCUMENTS:,} "
        "documents of the asker's and as many of another user's; milliseconds as the client sees them.",
        "",
        "| PostgreSQL | Document | p50 | p95 | p99 | AUC against missing |",
        "|---|---|---|---|---|---|",
    ]
    for major in embedded.MAJORS:
        with embedded.ephemeral(major=major) as server:
            times = measure(server)
        for name, values in times.items():
            cuts = statistics.quantiles(values, n=100)
            against = "" if name == "missing" else f"{auc(values, times['missing']):.3f}"
            lines.append(f"| {major} | {name} | {cuts[49]:.3f} | {cuts[94]:.3f} | {cuts[98]:.3f} | {against} |")
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
