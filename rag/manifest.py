"""What the catalog of a deployment must hold, fact by fact, and where one that is looked at differs.

`sql/manifest.json` is what the two catalog queries say of a database that was just migrated, the same on every
supported PostgreSQL; a test writes it and compares. Whatever else the queries find was added by somebody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from rag.errors import SchemaMismatch
from rag.finding import SEVERITIES, Finding, Severity, worst_first
from rag.frozen import other_draft
from rag.resources import sql_folder

if TYPE_CHECKING:
    from rag.database import Session

# The whole of a long line says no more than its beginning.
SHOWN_CHARACTERS = 160
# Of these the remark says what they are now; of all others the SQL that made them.
_REMARKED = {"schema", "owner", "row security", "statistics", "role", "membership", "setting"}
# That these changed or are gone weighs as much as the fact does; with all others the barrier itself is another.
_SOFT = {"index", "statistics", "setting", "right", "default right"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One fact of the catalog; the columns of `doctor_schema.sql`."""

    kind: str
    name: str
    part_of: str | None
    """The object that it goes with; when that is not there, there is no more to say."""
    state: str
    """A digest; equal when the fact is."""
    make: str | None
    unmake: str | None
    severity: Severity
    remark: str | None

    @property
    def object(self) -> str:
        return f"{self.kind} {self.name}"


@cache
def expected() -> Mapping[str, Fact]:
    """The manifest, by object. Raises SchemaMismatch when it was not made from the migrations that are here."""
    stored = json.loads((sql_folder() / "manifest.json").read_text(encoding="utf-8"))
    if other_draft(stored["migrations"]) is not None:
        raise SchemaMismatch("sql/manifest.json was made from another draft of the migrations")
    facts = (Fact(**entry, unmake=None, remark=None) for entry in stored["facts"])
    return {fact.object: fact for fact in facts}


async def differences(session: Session, *, dimensions: int) -> list[Finding]:
    """Where the connected database is not what the migrations of this version make, worst first."""
    async with session.attempt():
        facts = await read_catalog(session)
        row = await session.row("doctor_database", {})
    assert row is not None
    return compare(facts, expected(), values={"database": row["name"], "dimensions": dimensions})


async def read_catalog(session: Session) -> list[Fact]:
    """The facts of the connected database; inside a transaction, whose search path is empty afterwards."""
    await session.run("doctor_empty_path", {})
    rows = [*await session.rows("doctor_schema", {}), *await session.rows("doctor_surroundings", {})]
    return [Fact(**row) for row in rows]


def compare(found: Sequence[Fact], wanted: Mapping[str, Fact], *, values: Mapping[str, Any]) -> list[Finding]:
    """Where the facts differ from those wanted, worst first; of what is in the way before what is missing.

    `values` are what the SQL of the manifest leaves open: `database`, quoted, and `dimensions`.
    """
    present = {fact.object: fact for fact in found}
    added = [fact for name, fact in present.items() if name not in wanted and _stands_alone(fact, present, wanted)]
    lost = [fact for name, fact in wanted.items() if name not in present and _stands_alone(fact, wanted, present)]
    both = [(present[name], fact) for name, fact in wanted.items() if name in present]
    return worst_first(
        [
            *(_finding(fact.severity, fact, _joined("is not Palisade's", fact.remark), fact.unmake) for fact in added),
            *(
                _finding(
                    _weight(fact, now.severity),
                    fact,
                    _joined("is not as it was made", _now(now, fact)),
                    _filled(fact, values),
                )
                for now, fact in both
                if now.state != fact.state
            ),
            *(_finding(_weight(fact, "warning"), fact, "is missing", _filled(fact, values)) for fact in lost),
        ]
    )


def _weight(fact: Fact, severity: Severity) -> Severity:
    """How bad it is that what belongs here is another, or not there."""
    return min(fact.severity, severity, key=SEVERITIES.index) if fact.kind in _SOFT else "error"


def _stands_alone(fact: Fact, side: Mapping[str, Fact], other: Mapping[str, Fact]) -> bool:
    """Whether what it belongs to is on both sides: otherwise that is said, and says it all."""
    return fact.part_of is None or not (fact.part_of in side and fact.part_of not in other)


def _finding(severity: Severity, fact: Fact, message: str, mend: str | None) -> Finding:
    return Finding(severity=severity, object=fact.object, message=message, mend=mend)


def _joined(message: str, remark: str | None) -> str:
    return message if remark is None else f"{message}: {_shortened(remark)}"


def _now(now: Fact, wanted: Fact) -> str | None:
    """What a fact that changed has become, in one line."""
    if now.kind in _REMARKED:
        return now.remark
    before = set((wanted.make or "").splitlines())
    line = next((line for line in (now.make or "").splitlines() if line not in before), None)
    if line is None:
        gone = set((now.make or "").splitlines())
        line = next((line for line in (wanted.make or "").splitlines() if line not in gone), None)
        return None if line is None else f"without {_shortened(line)}"
    return _shortened(line)


def _shortened(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


def _filled(fact: Fact, values: Mapping[str, Any]) -> str | None:
    text = fact.make
    for name, value in values.items():
        text = text and text.replace("{" + name + "}", str(value))
    return text
