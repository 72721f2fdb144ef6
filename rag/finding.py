"""What is wrong with a deployment, and the SQL that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

Severity = Literal["error", "warning", "note"]
# Worst first. An error lets somebody reach what they must not, or keeps the service from working; a warning
# weakens a second line of defence or speed; a note is somebody's choice that harms nothing.
SEVERITIES: tuple[Severity, ...] = get_args(Severity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it must be."""

    severity: Severity
    object: str
    """What it is about, as a DBA calls it: `policy read_chunks on rag_chunks`."""
    message: str
    """What is the matter with it; one line."""
    mend: str | None = None
    """SQL that puts it right, to be run as a superuser; None when there is none."""

    def __str__(self) -> str:
        return f"{self.object}: {self.message}"


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """The findings by severity, otherwise in the order given."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
