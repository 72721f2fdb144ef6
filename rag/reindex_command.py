"""`rag reindex`: cut documents anew after the rules or the settings of cutting changed, without their sources."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from rag import screen
from rag.command import (
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    as_principal,
    noun,
    read_settings,
    run,
)

if TYPE_CHECKING:
    from rag.database import Database
    from rag.principal import Principal
    from rag.reindex import Outcome

# Of what is kept as it is: the first few tell which they are, --json names all.
SHOWN_KEPT = 10


def reindex(
    source: Annotated[str | None, typer.Option(help="Those whose source id begins like this: 'handbook:'.")] = None,
    source_type: Annotated[str | None, typer.Option("--type", help="Of this source type alone.")] = None,
    per_minute: Annotated[
        int | None, typer.Option("--per-minute", min=1, max=1_000_000, help="Documents written a minute at most.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done; exit code 1 for anything.")
    ] = False,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cut somebody's documents anew, after RAG_CHUNKING, the model's input limit or a version changed how.

    Markdown, text and YAML from what is stored; all others stay, and are named, for a sync to fetch them. Chunks that
    are the same keep their embeddings. Searches go on, and see each document as it was or as it is. Stopped and run
    again, it goes on where it was.
    """

    async def work(database: Database, principal: Principal) -> int:
        from rag.active_model import active_model
        from rag.reindex import Reindexer

        settings = read_settings()
        async with active_model(settings, database) as model:
            with screen.watching() as watcher:
                outcome = await Reindexer(
                    database=database,
                    embedder=model.embedder,
                    chunking=settings.rag_chunking,
                    watcher=watcher,
                    per_minute=per_minute,
                ).reindex(principal, prefix=source, source_type=source_type, dry_run=dry_run)
        _report(outcome, dry_run=dry_run, as_json=as_json)
        return 1 if outcome.failures or (dry_run and outcome.recut) else 0

    run(as_principal(work, user, project, tags, tenant))


def _report(outcome: Outcome, *, dry_run: bool, as_json: bool) -> None:
    if as_json:
        screen.print_json(json.dumps({"dry_run": dry_run} | asdict(outcome), default=str, ensure_ascii=False))
    else:
        for each in outcome.recut:
            words = f", {each.words} with other words" if each.words else ""
            screen.out.print(
                f"  {screen.shown(each.source_id)}: {each.before} → {each.after} "
                f"{noun(each.after, 'chunk')}, {each.embedded} to embed{words}"
            )
        embedded = sum(each.embedded for each in outcome.recut)
        done = "; nothing was changed" if dry_run else f"; {embedded} chunks embedded"
        screen.out.print(
            f"{outcome.documents} {noun(outcome.documents, 'document')}: {len(outcome.recut)} cut anew, "
            f"{outcome.unchanged} as they should be, {len(outcome.kept)} kept{done}"
        )
        for kept in outcome.kept[:SHOWN_KEPT]:
            screen.out.print(f"  kept {screen.shown(kept.source_id)}: {screen.shown(kept.reason)}")
        if len(outcome.kept) > SHOWN_KEPT:
            screen.out.print(f"  and {len(outcome.kept) - SHOWN_KEPT} more")
        for name, count in sorted(Counter(kept.source for kept in outcome.kept if kept.source).items()):
            screen.out.print(f"  `rag sync` reads {count} of them anew from {screen.shown(name)}")
    for failure in outcome.failures:
        screen.err.print(f"[red]error:[/red] {screen.shown(failure.source_id)}: {screen.shown(failure.reason)}")
