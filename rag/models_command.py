"""`rag models`: a second embedding model is added, filled, compared and switched to."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from rag import screen
from rag.command import (
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    print_reports,
    read_settings,
    run,
    tags_of,
    tenant_of,
)
from rag.errors import InvalidInput

models = typer.Typer(no_args_is_help=True, help="Change the embedding model while the service goes on.")


@models.command("list")
def models_list(as_json: JsonOption = False) -> None:
    """List the embedding models of the database, and how far the second one is filled."""
    from rag import models as change

    with change.bench(change.owner_url(read_settings())) as at:
        state = at.state()
    if as_json:
        _print_state(state)
        return
    if not state.places:
        screen.out.print("No model was ever added beside the first one: RAG_EMBEDDING_MODEL is taken at its word.")
        return
    for place in state.places:
        kind = "active" if place.place == "active" else "former" if place.is_former else "coming"
        screen.out.print(screen.shown(f"{kind}: {place.model_id}, {place.dimensions} dimensions"))
    if state.second is not None:
        missing = f"; {state.missing_indexes} indexes are missing" if state.missing_indexes else ""
        screen.out.print(f"  {state.filled} of {state.chunks} chunks have its vector{missing}")


def _print_state(state: Any) -> None:
    import dataclasses
    import json

    screen.print_json(json.dumps(dataclasses.asdict(state) | {"is_ready": state.is_ready}, default=str))


def _two_models() -> tuple[Any, Any]:
    """The model of the settings and the one that is to come, opened."""
    from rag.active_model import open_models

    opened = open_models(read_settings())
    if len(opened) < 2:
        raise InvalidInput("RAG_EMBEDDING_NEXT_MODEL must name the other model", field="RAG_EMBEDDING_NEXT_MODEL")
    return opened[0], opened[1]


def _second_of(at: Any) -> Any:
    """The embedder of the second model, which may be either of the settings'."""
    from rag.active_model import open_models

    second = at.state().second
    if second is None:
        raise InvalidInput("there is no second model: `rag models add` adds it", field="RAG_EMBEDDING_NEXT_MODEL")
    for model in open_models(read_settings()):
        if model.id == second.model_id:
            return model.embedder
    raise InvalidInput(
        f"the second model is {second.model_id}, which neither RAG_EMBEDDING_MODEL nor RAG_EMBEDDING_NEXT_MODEL names",
        field="RAG_EMBEDDING_NEXT_MODEL",
    )


async def _closing(embedder: Any, step: Any) -> Any:
    """Do a step, and let go of the embedder's connections in the loop that opened them."""
    try:
        return await step
    finally:
        await embedder.close()


@models.command("add")
def models_add(as_json: JsonOption = False) -> None:
    """Add a column for the model that RAG_EMBEDDING_NEXT_MODEL names, beside the one of RAG_EMBEDDING_MODEL."""
    from rag import models as change

    settings = read_settings()
    active, coming = _two_models()
    with change.bench(change.owner_url(settings)) as at:
        asyncio.run(change.add(at, active=active, coming=coming))
        state = at.state()
    if as_json:
        _print_state(state)
        return
    screen.out.print(screen.shown(f"Added {coming.id} beside {active.id}: {state.chunks} chunks are to be filled."))
    screen.out.print("Next: rag models fill")


@models.command("fill")
def models_fill(
    chunks_per_minute: Annotated[int | None, typer.Option(min=1, help="As many chunks a minute at most.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="As many tokens a minute at most.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Give every chunk a vector of the second model; reading and writing go on. Run it again after whatever stopped it.

    Exit code 1 when it stopped before the end; what was filled stays.
    """
    import dataclasses
    import json

    from rag import models as change

    pace = change.Pace(chunks_per_minute=chunks_per_minute, tokens_per_minute=tokens_per_minute)
    with change.bench(change.owner_url(read_settings())) as at:
        embedder = _second_of(at)
        state = at.state()
        with screen.counting(max(state.chunks - state.filled, 1), "filling") as counter:
            before = state.filled

            def tell(done: int, total: int, what: str) -> None:
                nonlocal before
                counter.note(what)
                for _ in range(done - before):
                    counter.step()
                before = done

            found = asyncio.run(_closing(embedder, change.fill(at, embedder, pace=pace, tell=tell)))
    if as_json:
        screen.print_json(json.dumps(dataclasses.asdict(found)))
        return
    screen.out.print(f"Filled {found.chunks} chunks, {found.tokens} tokens, in {found.seconds:.0f} s.")
    if found.recomposed:
        screen.out.print(f"  {found.recomposed} of them with more or less of their headings than before.")


@models.command("compare")
def models_compare(
    questions: Annotated[
        Path | None, typer.Option(help="A file with a question a line; else what was asked last.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Chunks.")] = 10,
    judged: Annotated[
        list[Path] | None, typer.Option("--eval", help="A judged collection, as for `rag eval`; may be repeated.")
    ] = None,
    tenant: TenantOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare the second model with the active one: the share of nearest chunks in common, and `rag eval` on both.

    With --eval and without --questions it runs `rag eval` alone.
    """
    run(_compare_models(questions, top_k, judged or [], tenant, user, project, tags, as_json))


async def _compare_models(
    file: Path | None,
    top_k: int,
    folders: list[Path],
    tenant: str | None,
    user: str | None,
    project: str | None,
    tags: str | None,
    as_json: bool,
) -> int:
    import dataclasses
    import json

    from rag import compare_models as comparing
    from rag import deployment, evaluate
    from rag.active_model import close_models, find_active
    from rag.principal import Principal, check_user_id

    settings = read_settings()
    collections = [evaluate.load(folder) for folder in folders]
    opened = _two_models()
    place = deployment.locate(settings)
    agreement = None
    overlaps = []
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            active = await find_active(opened, database)
            (second,) = (model for model in opened if model is not active)
            if file is not None or not folders:
                principal = Principal(
                    tenant_id=tenant_of(tenant, place.default_tenant),
                    user_id=None if user is None else check_user_id(user),
                    project_id=project,
                    tags=tags_of(tags),
                )
                if file is None:
                    asked = await comparing.questions_of(database, principal)
                else:
                    asked = comparing.questions_in(file)
                overlaps = await comparing.compare(
                    asked, principal=principal, database=database, active=active, second=second, top_k=top_k
                )
                agreement = comparing.Agreement.of(overlaps)
        reports = await comparing.evaluate_both(collections, (active, second), mode="hybrid", fusion="rank")
    finally:
        await close_models(opened)
    if as_json:
        described = {
            "active": active.id,
            "second": second.id,
            "top_k": top_k,
            "overlap": None if agreement is None else dataclasses.asdict(agreement),
            "questions": [dataclasses.asdict(overlap) | {"share": overlap.share} for overlap in overlaps],
            "eval": {
                model.id: [dataclasses.asdict(report) for report in of]
                for model, of in zip((active, second), reports, strict=True)
            },
        }
        screen.print_json(json.dumps(described, default=str, ensure_ascii=False))
        return 0
    if agreement is not None:
        screen.out.print(screen.shown(f"{active.id} (active) and {second.id}, {agreement.questions} questions:"))
        screen.out.print(
            f"  overlap@{top_k}: mean {agreement.mean:.2f}, median {agreement.median:.2f}, least {agreement.least:.2f}"
        )
        for overlap in sorted(overlaps, key=lambda overlap: overlap.share)[:5]:
            screen.out.print(screen.shown(f"    {overlap.shared}/{overlap.active_found}  {overlap.question}"))
    for model, of in zip((active, second), reports, strict=True):
        if of:
            screen.out.print(screen.shown(f"{model.id}:"))
            print_reports(of)
    return 0


@models.command("switch")
def models_switch(as_json: JsonOption = False) -> None:
    """Make the second model the active one, in one short transaction; services that name both go over by themselves."""
    _switch(back=False, as_json=as_json)


@models.command("rollback")
def models_rollback(as_json: JsonOption = False) -> None:
    """Make the former model the active one again, after what was written since is filled."""
    _switch(back=True, as_json=as_json)


def _switch(*, back: bool, as_json: bool) -> None:
    from rag import models as change

    with change.bench(change.owner_url(read_settings())) as at:
        embedder = _second_of(at)
        state = asyncio.run(_closing(embedder, change.switch(at, embedder, back=back)))
    if as_json:
        _print_state(state)
        return
    assert state.active is not None
    assert state.second is not None
    screen.out.print(screen.shown(f"Active: {state.active.model_id}; {state.second.model_id} is kept for a way back."))


@models.command("drop")
def models_drop(as_json: JsonOption = False) -> None:
    """Remove the second model, former or coming, with its vectors and indexes. There is no way back from that."""
    from rag import models as change

    with change.bench(change.owner_url(read_settings())) as at:
        second = at.state().second
        asyncio.run(change.drop(at))
        state = at.state()
    if as_json:
        _print_state(state)
        return
    assert second is not None
    screen.out.print(screen.shown(f"Dropped {second.model_id}."))
