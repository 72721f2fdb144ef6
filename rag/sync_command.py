"""`rag sync`, `rag reconcile` and `rag status`: what is stored of a source becomes what its files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag import screen
from rag.command import (
    FULL,
    DryRunOption,
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    as_principal,
    print_rows,
    read_settings,
    run,
    run_as_batch,
    tags_of,
    words_of,
)
from rag.errors import InvalidInput

if TYPE_CHECKING:
    from rag.database import Database
    from rag.principal import Principal
    from rag.sync import Outcome, SourceSpec

EmptyOption = Annotated[
    bool, typer.Option("--allow-empty", help="Let a source without any file remove all that came from it.")
]


def sync(
    place: Annotated[str, typer.Argument(help="A directory, or with --git a repository or its https address.")],
    name: Annotated[str, typer.Option(help="What to call the source, for good: it is in each document's source id.")],
    git: Annotated[bool, typer.Option("--git", help="Take the files of a commit and not of the folder.")] = False,
    ref: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "HEAD",
    include: Annotated[list[str] | None, typer.Option(help="Only paths like this: 'docs/**/*.md'.")] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No paths like this: 'drafts/'.")] = None,
    types: Annotated[
        str | None, typer.Option(help="Only these source types, comma-separated; v1 for spec 002's.")
    ] = None,
    scope: Annotated[str | None, typer.Option(help="public, user or project.")] = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    language: Annotated[str | None, typer.Option(help="ISO 639-1 code; detected when left out.")] = None,
    encoding: Annotated[str | None, typer.Option(help="Of text that is not UTF-8 and does not say so.")] = None,
    dry_run: DryRunOption = False,
    allow_empty: EmptyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make the documents of a source what its files are: new, changed, moved and removed ones.

    What was ingested otherwise is never touched. Exit code 1: something failed, or --dry-run found
    something to do. 3: a quota is full.
    """
    from pydantic import ValidationError

    from rag.principal import check_user_id
    from rag.sync import SourceSpec

    where: dict[str, Any] = {"git": place} if git else {"directory": Path(place)}
    try:
        spec = SourceSpec(
            name=name,
            **where,
            ref=ref,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            types=words_of(types),
            tenant=tenant,
            scope=scope or ("project" if project is not None else "user"),  # type: ignore[arg-type]
            user=None if user is None else check_user_id(user),
            project=project,
            tags=tags_of(tags),
            language=language,
            encoding=encoding,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"{field}: {first['msg']}", field=field) from error
    run(_synchronise([spec], dry_run=dry_run, allow_empty=allow_empty, thorough=False, as_json=as_json))


def reconcile(
    names: Annotated[list[str] | None, typer.Argument(help="Sources of RAG_SOURCES; all unless given.")] = None,
    dry_run: DryRunOption = False,
    allow_empty: EmptyOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find and mend what differs from the sources that RAG_SOURCES names, and what a search would miss of them.

    Exit code 0: nothing is left to mend. 1: something is, or failed. 2: a source could not be listed; of that one
    nothing was changed. 3: a quota is full.
    """
    from rag.sync import load_specs

    settings = read_settings()
    if settings.rag_sources is None:
        raise InvalidInput("RAG_SOURCES must name a file of sources (docs/sources.md)", field="RAG_SOURCES")
    specs = load_specs(settings.rag_sources)
    unknown = set(names or ()) - {spec.name for spec in specs}
    if unknown:
        raise InvalidInput(f"RAG_SOURCES has no source {sorted(unknown)[0]}", field="RAG_SOURCES")
    chosen = [spec for spec in specs if not names or spec.name in names]
    run(_synchronise(chosen, dry_run=dry_run, allow_empty=allow_empty, thorough=True, as_json=as_json))


async def _synchronise(
    specs: Sequence[SourceSpec], *, dry_run: bool, allow_empty: bool, thorough: bool, as_json: bool
) -> int:
    from rag import deployment
    from rag.active_model import close_models, find_active, open_models
    from rag.errors import SourceUnavailable
    from rag.sync import Synchroniser

    settings = read_settings()
    place = deployment.locate(settings)
    run_as_batch()
    opened = open_models(settings)
    outcomes: list[Outcome] = []
    unavailable: dict[str, str] = {}
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            with screen.watching() as watcher:
                synchroniser = Synchroniser(
                    settings=settings,
                    database=database,
                    embedder=embedder,
                    default_tenant=place.default_tenant,
                    watcher=watcher,
                )
                for spec in specs:
                    try:
                        outcomes.append(
                            await synchroniser.sync(spec, dry_run=dry_run, allow_empty=allow_empty, thorough=thorough)
                        )
                    except SourceUnavailable as error:
                        # The others are not to wait for it.
                        unavailable[spec.name] = error.message
    finally:
        await close_models(opened)
    _report_sources(outcomes, unavailable, dry_run=dry_run, as_json=as_json)
    if unavailable:
        return 2
    if any(outcome.full for outcome in outcomes):
        return FULL
    left = any(outcome.failures or outcome.kept or (dry_run and outcome.drift) for outcome in outcomes)
    return 1 if left else 0


def _report_sources(
    outcomes: Sequence[Outcome], unavailable: Mapping[str, str], *, dry_run: bool, as_json: bool
) -> None:
    if as_json:
        import json
        from dataclasses import asdict

        sources = [asdict(outcome) | {"drift": outcome.drift} for outcome in outcomes]
        broken = [{"source": name, "reason": reason} for name, reason in unavailable.items()]
        screen.print_json(json.dumps({"dry_run": dry_run, "sources": sources, "unavailable": broken}))
    else:
        for outcome in outcomes:
            counts: dict[str, int] = {}
            for change in outcome.changes:
                counts[change.reason] = counts.get(change.reason, 0) + 1
                former = "" if change.former_path is None else f" (was {change.former_path})"
                screen.out.print(f"  {change.reason:<11} {screen.shown(change.path + former)}")
            for path in outcome.gone:
                screen.out.print(f"  {'gone':<11} {screen.shown(path)}")
            counts |= {"gone": len(outcome.gone), "unchanged": outcome.unchanged}
            said = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "nothing"
            version = f" at {outcome.version[:12]}" if outcome.version else ""
            done = "; nothing was changed" if dry_run else f"; {outcome.embedded} chunks embedded"
            screen.out.print(f"{screen.shown(outcome.source)}{version}: {said}{done}")
            if outcome.left_out:
                screen.out.print(f"{outcome.left_out} files of other formats or types left out")
    for outcome in outcomes:
        if outcome.kept:
            screen.err.print(
                f"[red]error:[/red] {screen.shown(outcome.source)}: the source is empty, and its {len(outcome.kept)} "
                "documents stay; --allow-empty removes them"
            )
        for failure in outcome.failures:
            place = f"{outcome.source}:{failure.path}"
            screen.err.print(f"[red]error:[/red] {screen.shown(place)}: {screen.shown(failure.reason)}")
        if outcome.full is not None:
            said = f"{outcome.source}: {outcome.full}; {len(outcome.waiting)} documents were not taken in"
            screen.err.print(f"[red]error:[/red] {screen.shown(said)}")
    for name, reason in unavailable.items():
        screen.err.print(f"[red]error:[/red] {screen.shown(name)}: {screen.shown(reason)}")


def status(
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Count what somebody sees of each source: documents, chunks, and what is old, behind or not found by a search.

    Then what came of the last synchronisation of each; `succeeded_at` is of the last one without failures.
    """
    run(as_principal(partial(_status, as_json=as_json), user, project, tags, tenant))


async def _status(database: Database, principal: Principal, *, as_json: bool) -> int:
    from rag.active_model import active_model
    from rag.store import count_sources, list_synchronisations

    async with active_model(read_settings(), database) as model:
        rows = await count_sources(database, principal, embedding_model=model.id)
    runs = await list_synchronisations(database, principal)
    if as_json:
        import json

        found = {"sources": rows, "synchronisations": runs}
        screen.print_json(json.dumps(found, default=str, ensure_ascii=False))
        return 0
    print_rows("sources", rows, as_json=False)
    if runs:
        screen.out.print()
        print_rows("synchronisations", runs, as_json=False)
    return 0
