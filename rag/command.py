"""What all commands share: their options, whom they speak for, and tables on the terminal or JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag import screen
from rag.errors import InvalidInput
from rag.settings import Settings

if TYPE_CHECKING:
    from rag.database import Database
    from rag.evaluate import Report
    from rag.operate import Desk
    from rag.principal import Principal

TenantOption = Annotated[str | None, typer.Option("--tenant", help="Tenant; the embedded database has `default`.")]
UserOption = Annotated[str | None, typer.Option("--user", help="User id, a positive whole number.")]
ProjectOption = Annotated[str | None, typer.Option("--project", help="Project of the user; * for all of them.")]
TagsOption = Annotated[str | None, typer.Option("--tags", help="Comma-separated; `public` unless given.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]

AllTenantsOption = Annotated[str | None, typer.Option("--tenant", help="Of this tenant alone.")]
OwnerOption = Annotated[str, typer.Option("--owner", help="User id of who owns the project.")]
MemberOption = Annotated[str, typer.Option("--member", help="User id of whom it is shared with.")]
# While a model reads for one, another one is read, cut or written.
JOBS_AT_ONCE = 2

# Exit code when a quota is full.
FULL = 3

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done; exit code 1 for anything.")]


def read_settings() -> Settings:
    """The settings of the environment. Raises InvalidInput, which names the setting and not its value."""
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name, *inside = (str(part) for part in first["loc"])
        where = ".".join([name.upper(), *inside])
        raise InvalidInput(f"{where}: {first['msg']}", field=name.upper()) from error
    except SettingsError as error:
        # A list or a table that is no JSON; the message has the name of the setting, and not its value.
        raise InvalidInput(str(error)) from error


def run(work: Coroutine[Any, Any, int]) -> None:
    """Do the work of a command, and end with the exit code that it gives unless that is 0."""
    keep_what_is_loaded()
    code = asyncio.run(work)
    if code:
        raise SystemExit(code)


def keep_what_is_loaded() -> None:
    """Tell the garbage collector that what has been imported by now stays.

    It would look at all of it, some 100,000 objects, whenever a few thousand new ones are still there. With no
    collector at all, ingesting documents of 1 KB took 18 % less of the client's processor time.
    """
    gc.freeze()


def run_as_batch() -> None:
    """Tell the scheduler, where it can be told, that this program computes and nobody waits for its every step.

    It then interrupts neither the threads of the local model, whose matrices would have to come from memory again, nor
    the server. On 2 cores documents of 1 KB took 3 % less (5 rounds by turns). After the embedded server was started,
    which would be a batch as well, and for as long as it runs.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def tags_of(text: str | None) -> tuple[str, ...]:
    """Tags as an option lists them; `public` where it lists none. Raises InvalidInput."""
    from rag.principal import check_tags

    return check_tags([tag.strip() for tag in (text or "").split(",") if tag.strip()])


def tenant_of(given: str | None, default: str | None) -> str:
    """The tenant that was named, else the embedded database's. Raises InvalidInput where there is neither."""
    if given is None and default is None:
        raise InvalidInput("--tenant is required: only the embedded database has a default one", field="tenant_id")
    return given or default or ""


def open_desk() -> Desk:
    """From where the database of the settings is operated. Raises as `rag.operate.locate`."""
    from rag import operate

    return operate.locate(read_settings())


def words_of(text: str | None) -> tuple[str, ...]:
    """What an option lists with commas, each once."""
    return tuple(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def age_of(text: str, field: str) -> timedelta:
    """An age as an option names it, such as 90d. Raises InvalidInput."""
    match = re.fullmatch(r"([0-9]{1,5})([mhdw])", text, re.ASCII)
    if match is None:
        raise InvalidInput(f"{field} is a whole number and m, h, d or w: 90d", field=field)
    return timedelta(**{UNITS[match[2]]: int(match[1])})


def cell(value: object) -> str:
    """A value in a table for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ",".join(map(str, value)) or "–"
    return value.isoformat(" ", "seconds") if isinstance(value, datetime) else str(value)


def print_rows(name: str, found: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """A table with the columns' names, or `{name: [rows]}`; null means no bound or nothing."""
    if as_json:
        import json

        screen.print_json(json.dumps({name: found}, default=str, ensure_ascii=False))
        return
    if not found:
        screen.err.print(f"no {name.replace('_', ' ')}")
        return
    lines = [list(found[0]), *([cell(value) for value in row.values()] for row in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        text = screen.shown("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        screen.out.print(f"[dim]{text}[/dim]" if number == 0 else text)


def print_reports(reports: Sequence[Report]) -> None:
    """How well each collection was retrieved from, and what was told from foreign questions, as tables."""
    judged = [
        {
            "collection": report.name,
            "documents": report.documents,
            "chunks": report.chunks,
            "questions": report.judged,
            "R@1": f"{report.scores.recall_at_1:.3f}",
            "R@5": f"{report.scores.recall_at_5:.3f}",
            "R@10": f"{report.scores.recall_at_10:.3f}",
            "MRR@10": f"{report.scores.mrr_at_10:.3f}",
            "nDCG@10": f"{report.scores.ndcg_at_10:.3f}",
            "p50 ms": f"{report.latency_p50_ms:.1f}",
            "p95 ms": f"{report.latency_p95_ms:.1f}",
        }
        for report in reports
        if report.scores is not None
    ]
    refused = [
        {
            "collection": report.name,
            "kind": kind,
            "questions": group.questions,
            "refused": f"{group.refused:.1%}",
            "kept answerable": f"{report.abstention.kept:.1%} of {report.abstention.answerable}",
            "threshold": f"{report.abstention.threshold:.3f}",
            "p50 ms": f"{report.latency_p50_ms:.1f}",
            "p95 ms": f"{report.latency_p95_ms:.1f}",
        }
        for report in reports
        if report.abstention is not None
        for kind, group in sorted(report.abstention.others.items())
    ]
    if judged:
        print_rows("collections", judged, as_json=False)
    if refused:
        print_rows("kinds of questions", refused, as_json=False)
    for report in reports:
        for number, what in (
            (len(report.left_out), "documents were left out, such as those without text"),
            (report.unjudged, "questions without a relevant document were not asked"),
            (report.unreachable, "questions count as not found: no chunk has half of their answer"),
        ):
            if number:
                screen.err.print(f"{screen.shown(report.name)}: {number} {what}")


def noun(count: int, noun: str) -> str:
    """The noun as it follows the count."""
    return noun if count == 1 else noun + "s"


async def as_principal(
    work: Callable[[Database, Principal], Coroutine[Any, Any, int]],
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
) -> int:
    """Do something in the database that the settings name, for whom the options name."""
    from rag import deployment
    from rag.principal import Principal, check_user_id

    settings = read_settings()
    wanted_tags = tags_of(tags)
    user_id = None if user is None else check_user_id(user)
    place = deployment.locate(settings)
    principal = Principal(
        tenant_id=tenant_of(tenant, place.default_tenant), user_id=user_id, project_id=project, tags=wanted_tags
    )
    async with place.open(settings) as database:
        await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
        return await work(database, principal)
