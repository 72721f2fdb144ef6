"""`rag maintain`: indexes and statistics of large access classes, and what is left for a DBA."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rag import screen
from rag.command import JsonOption, print_rows, read_settings
from rag.errors import InvalidInput


def maintain(
    refresh: Annotated[bool, typer.Option("--refresh", help="Count the words of every large class anew.")] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Also rebuild indexes that have bloated, while they are used.")
    ] = False,
    retention: Annotated[
        bool, typer.Option("--retention", help="Instead: remove questions and assertions that are too old.")
    ] = False,
    only_plan: Annotated[
        bool, typer.Option("--plan", "--dry-run", help="Print what would be done, and do nothing.")
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(min=1, max=1_048_576, help="MB for building an index of vectors; as it needs, at most 1,024."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Give large access classes indexes and statistics of their own, and take them from those that shrank.

    Reading and writing go on meanwhile. Exit code 1 when something is left for a DBA, whose SQL it prints.

    With --retention it goes by RAG_LOG_RETENTION_DAYS, RAG_AUDIT_RETENTION_DAYS and RAG_MESSAGE_RETENTION_DAYS, in all
    tenants.
    """
    from rag import maintain as care
    from rag import operate

    if retention:
        if refresh or rebuild or memory is not None:
            raise InvalidInput("--retention goes with --dry-run and --json alone", field="--retention")
        from rag.retention_command import retention as retain

        retain(dry_run=only_plan, as_json=as_json)
        return
    settings = read_settings()
    desk = operate.locate(settings)
    if only_plan:
        with desk.session() as session:
            found = care.survey(session, care.Limits())
        _print_care(care.plan(found, care.Limits(), refresh=refresh, rebuild=rebuild), None, found, as_json=as_json)
        return
    with care.alone(desk, settings, owner_url=care.owner_url(desk, settings), memory_mb=memory) as turn:
        if turn is None:
            screen.err.print("Another `rag maintain` is at work; nothing is done.")
            if as_json:
                screen.print_json('{"running": true}')
            return
        wanted = care.plan(turn.survey(), turn.limits, refresh=refresh, rebuild=rebuild)
        with screen.counting(len(wanted.steps), "maintaining") as counter:
            left = turn.carry_out(wanted.steps, _told(counter))
        found = turn.survey()
    _print_care(wanted, left, found, as_json=as_json)
    if left:
        raise SystemExit(1)


def _told(counter: screen.Counter) -> Any:
    """What is being done: on a terminal beside the bar, elsewhere a line for each step and each quarter of it."""
    last: list[object] = []

    def tell(step: object, phase: str, share: float | None) -> None:
        if not phase and share is not None:
            counter.step()
            return
        percent = "" if share is None else f" {share:.0%}"
        said = f"{step}" if not phase else f"{step} ({phase}{percent})"
        counter.note(said)
        now = [step, phase, None if share is None else int(share * 4)]
        if not screen.err.is_terminal and now != last:
            screen.err.print(screen.shown(said))
        last[:] = now

    return tell


def _print_care(plan: Any, left: Any, found: Any, *, as_json: bool) -> None:
    """What was done, or would be when `left` is None; what is left; and what there is."""
    from rag import maintain as care

    reports = care.as_rows(care.report(found))
    if as_json:
        import json

        steps = {
            "planned" if left is None else "done": [str(step) for step in plan.steps if step not in (left or ())],
            "left": [{"step": str(step), "statement": step.statement} for step in left or ()],
        }
        more = {
            "left_out": [{"access_id": each.access_id, "chunks": each.chunks} for each in plan.left_out],
            "bloated": care.bloated(found),
            "classes": reports,
        }
        screen.print_json(json.dumps(steps | more))
        return
    if left is None:
        for step in plan.steps:
            screen.out.print(screen.shown(str(step)))
    print_rows("classes_with_indexes_of_their_own", reports, as_json=False)
    for each in plan.left_out:
        screen.err.print(
            f"class {each.access_id} has {each.chunks} chunks and no room among the {care.MOST_CLASSES} that have "
            "indexes of their own: searches read all of it"
        )
    for statement in care.bloated(found):
        screen.err.print(f"An index has bloated; at a quiet hour --rebuild, or as its owner: {statement};")
    if left:
        screen.err.print(
            "RAG_MIGRATION_DATABASE_URL is not set, and only the owner of the tables builds indexes: run this as "
            "rag_owner, and `rag maintain` again afterwards"
        )
    for step in left or ():
        if step.statement is not None:
            screen.print_json(f"{step.statement};")
