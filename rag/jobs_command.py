"""`rag jobs`: what waits for workers or failed, and having it done again or not at all."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer

from rag import screen
from rag.command import AllTenantsOption, JsonOption, noun, open_desk, print_rows

jobs = typer.Typer(help="What the service has put off for workers.", no_args_is_help=True)


@jobs.command("list")
def jobs_list(
    status: Annotated[str | None, typer.Option(help="pending, processing, succeeded, failed or cancelled.")] = None,
    tenant: AllTenantsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Jobs, latest first, and why those failed that did; as rag_operator."""
    from rag.jobs import listed

    with open_desk().session() as session:
        print_rows("jobs", listed(session, tenant_id=tenant, status=status), as_json=as_json)


@jobs.command("retry")
def jobs_retry(ids: Annotated[list[UUID], typer.Argument(help="Jobs that failed.")]) -> None:
    """Put jobs that failed into the queue again; as rag_operator."""
    from rag.jobs import resubmit

    with open_desk().session() as session:
        done = resubmit(session, ids)
    _tell_of(done, len(ids), "put into the queue again")


@jobs.command("cancel")
def jobs_cancel(ids: Annotated[list[UUID], typer.Argument(help="Jobs that have not succeeded.")]) -> None:
    """Cancel jobs, and remove what was sent with them; one that is under way stores nothing. As rag_operator."""
    from rag.jobs import cancel_all

    with open_desk().session() as session:
        done = cancel_all(session, ids)
    _tell_of(done, len(ids), "cancelled")


def _tell_of(done: int, wanted: int, what: str) -> None:
    screen.out.print(f"{done} of {wanted} {noun(wanted, 'job')} {what}.")
    if done < wanted:
        raise SystemExit(1)
