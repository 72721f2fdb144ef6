"""What limits cost: a request without one, let through and refused; many callers of one tenant; the charge of a write.

Run: `make bench BENCH=limits`. Arms take turns, so that a busy machine slows all of them; the floor beside them is
begin_as() and a commit, which every transaction of the service has anyway. Fails when an arm decides otherwise than it
must.
"""

from __future__ import annotations

import datetime
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg

from rag import deployment, embedded
from rag.principal import Principal
from rag.resources import query
from rag.settings import Settings
from rag.sign import Signer

ROUNDS = 500
CALLERS = 50
CALLS = 40  # of each caller
RESULT = Path(__file__).parent / "results" / "limits.md"

FREE = Principal(tenant_id="free", user_id=1)
LIMITED = Principal(tenant_id="limited", user_id=1)
REFUSED = Principal(tenant_id="refused", user_id=1)
LIMITS = """
    insert into rag_limits (tenant_id, queries_per_minute, query_burst, documents)
    values ('limited', 1000000, 1000000, 1000000000), ('refused', 0, null, 0)
"""


class Caller:
    """A connection of the service."""

    def __init__(self, url: str, signer: Signer) -> None:
        self.connection = psycopg.connect(url, autocommit=True)
        self.signer = signer

    def named(self, principal: Principal) -> dict[str, Any]:
        return {
            "tenant_id": principal.tenant_id,
            "user_id": principal.user_id,
            "project_id": None,
            "tags": list(principal.tags),
            "signature": self.signer.sign(principal, role="rag_app"),
        }

    def begin(self, principal: Principal) -> None:
        """The floor: one statement that is a transaction of its own."""
        self.connection.execute(query("begin_as").encode(), self.named(principal))

    def empty(self, principal: Principal) -> None:
        with self.connection.transaction():
            self.begin(principal)

    def take(self, principal: Principal) -> None:
        row = self.connection.execute(
            query("take_token").encode(), self.named(principal) | {"kind": "query"}
        ).fetchone()
        assert row is not None
        if row[0] is (principal is REFUSED):
            sys.exit(f"{principal.tenant_id}: granted is {row[0]}")

    def charge(self, principal: Principal) -> None:
        with self.connection.transaction():
            self.begin(principal)
            if self.connection.execute(query("charge_quota").encode(), {"documents": 1, "bytes": 1}).fetchone():
                sys.exit(f"{principal.tenant_id}: refused")


def alone(caller: Caller) -> dict[str, list[float]]:
    """Milliseconds of each call, one caller, arms in turn."""
    arms: dict[str, Callable[[], None]] = {
        "`begin_as()` and commit": lambda: caller.empty(FREE),
        "a request that nothing limits": lambda: caller.take(FREE),
        "one that is let through": lambda: caller.take(LIMITED),
        "one that is refused": lambda: caller.take(REFUSED),
        "a charge and commit, without a quota": lambda: caller.charge(FREE),
        "a charge and commit, with one": lambda: caller.charge(LIMITED),
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(ROUNDS + 50):
        for name, call in arms.items():
            started = time.perf_counter()
            call()
            if number >= 50:  # the first ones warm up
                times[name].append((time.perf_counter() - started) * 1000)
    return times


def together(callers: list[Caller], call: Callable[[Caller], None]) -> tuple[list[float], float]:
    """Milliseconds of each call of all at once, and calls a second."""
    ready = threading.Barrier(len(callers))

    def run(caller: Caller) -> list[float]:
        for _ in range(6):  # until the statement is prepared
            call(caller)
        ready.wait()
        found = []
        for _ in range(CALLS):
            started = time.perf_counter()
            call(caller)
            found.append((time.perf_counter() - started) * 1000)
        return found

    started = time.perf_counter()
    with ThreadPoolExecutor(len(callers)) as pool:
        found = [value for values in pool.map(run, callers) for value in values]
    return found, len(callers) * (CALLS + 6) / (time.perf_counter() - started)


def main() -> None:
    lines = [
        "# What limits cost",
        "",
        f"{datetime.date.today().isoformat()}, {platform.machine()}, PostgreSQL {max(embedded.MAJORS)}; milliseconds "
        "as the client sees them.",
        "",
        "| One caller | p50 | p95 |",
        "|---|---|---|",
    ]
    with embedded.ephemeral(major=max(embedded.MAJORS)) as server:
        signer = deployment.prepare(server, Settings(_env_file=None))
        with psycopg.connect(server.url("rag_operator"), autocommit=True) as operator:
            operator.execute(LIMITS)
        callers = [Caller(server.url("rag_app"), signer) for _ in range(CALLERS)]
        for name, values in alone(callers[0]).items():
            cuts = statistics.quantiles(values, n=20)
            lines.append(f"| {name} | {cuts[9]:.2f} | {cuts[18]:.2f} |")
        lines += ["", f"| {CALLERS} callers of one tenant at once | p50 | p95 | a second |", "|---|---|---|---|"]
        arms: dict[str, Callable[[Caller], None]] = {
            "`begin_as()` alone": lambda caller: caller.begin(LIMITED),
            "a token from one bucket": lambda caller: caller.take(LIMITED),
            "refused": lambda caller: caller.take(REFUSED),
            "a charge and commit, without a quota": lambda caller: caller.charge(FREE),
            "a charge and commit, with one": lambda caller: caller.charge(LIMITED),
        }
        for name, call in arms.items():
            found, rate = together(callers, call)
            cuts = statistics.quantiles(found, n=20)
            lines.append(f"| {name} | {cuts[9]:.2f} | {cuts[18]:.2f} | {rate:,.0f} |")
        for caller in callers:
            caller.connection.close()
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
