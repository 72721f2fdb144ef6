"""What the commands print: progress, answers, tables."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rag.exchange import Passage, RAGResponse

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


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
            self._progress.update(self._task, note=escape(text[-48:]))

    def step(self) -> None:
        self._done += 1
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)
        # Ten lines are enough to see that a log moves.
        elif self._done == self._total or self._done % max(1, self._total // 10) == 0:
            err.print(f"{self._what}: {self._done}/{self._total}")


@contextmanager
def counting(total: int, what: str) -> Iterator[Counter]:
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


def as_json(response: RAGResponse) -> str:
    """A RAGResponse as one JSON object; ids and times as strings."""

    def plain(value: Any) -> Any:
        if isinstance(value, UUID):
            return str(value)
        if isinstance(value, datetime):
            return value.isoformat()
        raise TypeError(type(value).__name__)

    return json.dumps(dataclasses.asdict(response), default=plain, ensure_ascii=False)


def print_json(text: str) -> None:
    """Print without markup, wrapping or colour, so that a program can read it."""
    sys.stdout.write(text + "\n")


def print_answer(response: RAGResponse, *, indent: str = "") -> None:
    answer = response.answer
    for number, citation in enumerate(response.citations, start=1):
        answer = answer.replace(f"[SourceId: {citation.source_id}]", f"[{number}]")
    out.print(f"{indent}{escape(answer)}")
    for number, citation in enumerate(response.citations, start=1):
        place = ", ".join(
            part
            for part in (
                f"page {citation.page_number}" if citation.page_number else "",
                citation.section or "",
                "changed since" if citation.stale else "",
            )
            if part
        )
        out.print(
            f"{indent}  [bold]\\[{number}][/bold] {escape(citation.document_name)}"
            + (f" [dim]({escape(place)})[/dim]" if place else "")
            + f" [dim]{citation.source_id}[/dim]"
        )
    score = response.confidence
    out.print(
        f"{indent}  {response.action} · confidence {score.overall} "
        f"[dim](retrieval {score.retrieval_score:.2f}, coverage {score.coverage_score:.2f}, "
        f"grade {score.llm_score}) · answered by {escape(response.model_used)} in "
        f"{response.generation_time_ms:.0f} ms[/dim]"
    )
    if response.route_to is not None:
        out.print(
            f"{indent}  [dim]{escape(response.route_to.reason)}: ask {escape(response.route_to.owner_email or response.route_to.tag)}[/dim]"
        )
    for note in response.degraded:
        out.print(f"{indent}  [yellow]note:[/yellow] {escape(note)}")


def passage_table(passages: list[Passage]) -> Table:
    """The passages with the scores that put them where they are."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("#", "fused", "keyword", "vector", "tokens", "why", "source"):
        table.add_column(title, justify="left" if title in ("why", "source") else "right", no_wrap=title != "source")
    for passage in passages:
        where = passage.document_name
        if passage.page_number:
            where += f", page {passage.page_number}"
        elif passage.section and passage.section != passage.document_name:
            where += f" › {passage.section}"
        table.add_row(
            "–" if passage.rank is None else str(passage.rank),
            f"{passage.score:.4f}",
            "–" if passage.keyword_rank is None else f"{passage.keyword_rank}. ({passage.keyword_score:.2f})",
            "–" if passage.cosine is None else f"{passage.vector_rank}. ({passage.cosine:.2f})",
            str(passage.token_count),
            passage.reason + (f" {passage.duplicate_of}" if passage.duplicate_of else ""),
            escape(where),
        )
    return table
