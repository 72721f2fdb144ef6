"""What the commands print: progress, answers, tables."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rag.events import Done, Event, Retracted, Token
from rag.exchange import Passage, RAGResponse, Stage

out = Console(highlight=False, soft_wrap=True)
# Beyond the first few, candidates that fell out tell nothing about the order.
SHOWN_DROPPED = 15

err = Console(stderr=True, highlight=False, soft_wrap=True)

# ESC and its 8-bit kin: what a document says must not move the cursor or rename the window.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def shown(text: str) -> str:
    """`text` for `out` and `err`, without control characters and with nothing in it taken for markup."""
    return escape(_CONTROL.sub("�", text))


class Counter:
    """Progress over a known number of things; a bar on a terminal, lines elsewhere."""

    def __init__(self, progress: Progress | None, total: int, what: str) -> None:
        self._progress = progress
        self._total = total
        self._what = what
        self._done = 0
        self._task = None if progress is None else progress.add_task(what, total=total, note="")

    def note(self, text: str) -> None:
        """What is being worked on."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, note=shown(text[-48:]))

    def told(self, text: str, done: int, total: int) -> None:
        """How far it has got with that."""
        self.note(f"{text} {done}/{total}")

    def step(self) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
        # Ten lines are enough to see that a log moves.
        elif self._done == self._total or self._done % max(1, self._total // 10) == 0:
            err.print(f"{self._what}: {self._done}/{self._total}")


@contextmanager
def counting(total: int, what: str) -> Iterator[Counter]:
    """A counter for so many things; on a terminal its bar is gone at the end."""
    if not err.is_terminal:
        yield Counter(None, total, what)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}"),
        console=err,
        transient=True,
    ) as progress:
        yield Counter(progress, total, what)


class Watching:
    """What `rag.sync.Watcher` asks for: one counter after the other, each for so many things of one kind."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._counter: Counter | None = None

    def start(self, total: int, what: str) -> None:
        self._stack.close()
        self._counter = self._stack.enter_context(counting(total, what)) if total else None

    def note(self, text: str) -> None:
        if self._counter is not None:
            self._counter.note(text)

    def step(self) -> None:
        if self._counter is not None:
            self._counter.step()


@contextmanager
def watching() -> Iterator[Watching]:
    """Counters for a work of several kinds; none is left on the screen at the end."""
    with ExitStack() as stack:
        yield Watching(stack)


def as_json(response: RAGResponse) -> str:
    """A RAGResponse as one JSON object; ids and times as strings."""

    return json.dumps(dataclasses.asdict(response), default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(type(value).__name__)


def print_json(text: str) -> None:
    """Print without markup, wrapping or colour, so that a program can read it."""
    sys.stdout.write(text + "\n")


def print_answer(response: RAGResponse, *, indent: str = "") -> None:
    """Print an answer with its citations numbered, its confidence, and what it had to do without."""
    answer = response.answer
    for number, citation in enumerate(response.citations, start=1):
        answer = answer.replace(f"[SourceId: {citation.source_id}]", f"[{number}]")
    if response.route_to is not None:
        whom = response.route_to.owner_email or response.route_to.tag
        out.print(f"{indent}[yellow]{shown(response.route_to.reason)}: better ask {shown(whom)}[/yellow]")
    out.print(f"{indent}{shown(answer)}")
    print_sources(response, indent=indent)


def print_sources(response: RAGResponse, *, indent: str = "") -> None:
    """Print what an answer rests on."""
    for number, citation in enumerate(response.citations, start=1):
        place = _place(citation.document_name, citation.section, citation.page_number)
        stale = " [yellow](changed since)[/yellow]" if citation.stale else ""
        out.print(f"{indent}  [bold]\\[{number}][/bold] {shown(place)}{stale} [dim]{citation.source_id}[/dim]")
    score = response.confidence
    out.print(
        f"{indent}  {response.action} · confidence {score.overall} "
        f"[dim](retrieval {score.retrieval_score:.2f}, coverage {score.coverage_score:.2f}, "
        f"grade {score.llm_score}) · answered by {shown(response.model_used)} in "
        f"{response.generation_time_ms:.0f} ms[/dim]"
    )
    for note in response.degraded:
        out.print(f"{indent}  [yellow]note:[/yellow] {shown(note)}")


def print_event(event: Event, *, as_json: bool) -> None:
    """Print what is told of an answer that is being written: its text at once, its sources at the end."""
    if as_json:
        print_json(json.dumps({"event": event.name} | dataclasses.asdict(event), default=_plain, ensure_ascii=False))
    elif isinstance(event, Token):
        out.print(shown(event.text), end="", soft_wrap=True)
    elif isinstance(event, Retracted):
        out.print(f"\n[yellow]no longer said:[/yellow] {shown(event.reason)}\n{shown(event.text)}", end="")
    elif isinstance(event, Done):
        out.print("\n")
        print_sources(event.response)


def print_passages(found: Sequence[Passage], dropped: Sequence[Passage]) -> None:
    """The passages with the scores that put them where they are, and the nearest of those that fell out."""
    out.print(f"[dim]{'#':>3}  {'fused':>6}  {'keyword':>12}  {'vector':>11}  {'tokens':>6}  {'why':<20}  source[/dim]")
    for passage in [*found, *dropped[:SHOWN_DROPPED]]:
        rank = "–" if passage.rank is None else str(passage.rank)
        keyword = "–" if passage.keyword_rank is None else f"{passage.keyword_rank}. ({passage.keyword_score:.2f})"
        vector = "–" if passage.cosine is None else f"{passage.vector_rank}. ({passage.cosine:.2f})"
        place = _place(passage.document_name, passage.section, passage.page_number)
        if passage.duplicate_of is not None:
            place += f" (of {passage.duplicate_of})"
        out.print(
            f"{rank:>3}  {passage.score:>6.4f}  {keyword:>12}  {vector:>11}  {passage.token_count:>6}  "
            f"{passage.reason:<20}  {shown(place)}"
        )
    if len(dropped) > SHOWN_DROPPED:
        out.print(f"[dim]and {len(dropped) - SHOWN_DROPPED} further candidates[/dim]")


def print_stages(stages: Sequence[Stage]) -> None:
    """What became of one passage, stage by stage."""
    if not stages:
        err.print("[red]error:[/red] there is no such document")
        return
    for stage in stages:
        passed = "[green]yes[/green]" if stage.passed else "[red]no [/red]"
        value = "" if stage.value is None else f"{stage.value:.4g}"
        out.print(f"{stage.stage:<23} {passed}  {value:>9}  {shown(stage.detail or '')}")


def _place(document: str, section: str | None, page: int | None) -> str:
    """Document, section and page in words; the section's path usually begins with the title."""
    below = (section or "").removeprefix(document).removeprefix(" > ")
    return document + (f" › {below}" if below else "") + (f", page {page}" if page else "")
