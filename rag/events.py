"""What happens while an answer is written, in the order in which it is told; docs/answers.md has the table.

`sources` `token`* (`retracted`) `citations` `confidence` `action` (`route`) `done`. What goes wrong is raised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rag.exchange import Action, Citation, ConfidenceScore, Passage, RAGResponse, RouteTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What the model is given to read, best first, before it is called. A second one replaces the first."""

    name: ClassVar[str] = "sources"
    query_id: str
    model: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """The next piece of the answer; joined, they are the answer, unless one `retracted` follows."""

    name: ClassVar[str] = "token"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retracted:
    """What was shown is no longer said: `text` is the whole answer instead."""

    name: ClassVar[str] = "retracted"
    text: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Citations:
    """The sources that the answer names, re-read after it was written."""

    name: ClassVar[str] = "citations"
    citations: tuple[Citation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure the answer is."""

    name: ClassVar[str] = "confidence"
    confidence: ConfidenceScore


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether the answer can be cited, or somebody should be asked."""

    name: ClassVar[str] = "action"
    action: Action
    grounded: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Whom to ask instead; only where the action is ROUTE."""

    name: ClassVar[str] = "route"
    route_to: RouteTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end, and the whole answer as `generate` returns it."""

    name: ClassVar[str] = "done"
    response: RAGResponse


Event = Sources | Token | Retracted | Citations | Confidence | Decision | Route | Done
