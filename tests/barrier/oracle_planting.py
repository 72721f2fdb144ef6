"""Defects for a copy of the database: an oracle is believed after it has found them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import psycopg

from tests.barrier.oracle_model import Report

Spoil = Callable[[psycopg.Connection], None]


def rewritten(function: str, old: str, new: str, *, times: int = 1) -> Callable[[psycopg.Connection], None]:
    """A leak inside a function: its text with a passage replaced, as often as it is there."""

    def rewrite(superuser: psycopg.Connection) -> None:
        (text,) = (
            superuser.execute("select pg_get_functiondef(oid) from pg_proc where proname = %s", (function,)).fetchone()
            or ()
        )
        passage = re.compile(r"\s+".join(map(re.escape, old.split())))
        changed, found = passage.subn(lambda _: new, text)
        assert found == times, f"{function} has {old!r} {found} times"
        superuser.execute("set search_path = rag, pg_temp")
        superuser.execute(changed.encode())

    return rewrite


def altered(*statements: str) -> Callable[[psycopg.Connection], None]:
    def alter(superuser: psycopg.Connection) -> None:
        superuser.execute("set search_path = rag, pg_temp")
        for statement in statements:
            superuser.execute(statement.encode())

    return alter


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A defect, and where the oracle has to notice it: on a path, or in a kind of session."""

    make: Callable[[psycopg.Connection], None]
    kind: str = "leak"
    path: str = ""
    session: str = ""
    seed: int = 1
    """One that meets it soon, to save time: others find it as well."""

    def noticed(self, report: Report) -> bool:
        paths, sessions = report.paths[self.kind], report.sessions[self.kind]
        return any(self.path in path for path in paths) and any(self.session in session for session in sessions)
