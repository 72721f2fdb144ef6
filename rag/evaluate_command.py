"""`rag eval` and `rag calibration`: how well it retrieves, and what was better for a tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rag import screen
from rag.command import (
    AllTenantsOption,
    JsonOption,
    TenantOption,
    open_desk,
    print_reports,
    print_rows,
    read_settings,
    run,
    tenant_of,
)
from rag.errors import InvalidInput

if TYPE_CHECKING:
    from rag.calibrate import Calibration
    from rag.evaluate import Report

calibration = typer.Typer(help="What `rag eval --calibrate` wrote.", no_args_is_help=True)


def evaluate(
    folders: Annotated[list[Path], typer.Argument(help="Directories in BEIR's layout.", metavar="DIR…")],
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    fusion: Annotated[str, typer.Option(help="rank or score.")] = "rank",
    corpus: Annotated[
        Path | None, typer.Option(help="Whose corpus.jsonl the questions are about, when it is not the directory's.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Then find weights and a minimum similarity that are better for a tenant."),
    ] = False,
    tenant: Annotated[
        str | None,
        typer.Option(help="With --calibrate: whose searches go by them; the embedded database has `default`."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure retrieval on judged collections: recall, MRR, nDCG, latency, and what is told from foreign questions.

    A directory has corpus.jsonl, queries.jsonl and qrels.tsv, or abstain.jsonl, or both. It is ingested into a tenant
    of its own, which is erased at the end. What is measured is what is shipped, whatever was calibrated for a tenant.
    """
    if not calibrate:
        if tenant is not None:
            raise InvalidInput(
                "--tenant goes with --calibrate: a measurement has a tenant of its own", field="--tenant"
            )
        run(_evaluate(folders, mode, fusion, corpus, as_json))
        return
    if mode != "hybrid":
        raise InvalidInput(f"--calibrate weighs two arms, and mode {mode} has one", field="--mode")
    if len(folders) > 1:
        raise InvalidInput("--calibrate takes one directory, the tenant's own questions", field="DIR")
    run(_calibrate(folders[0], fusion, corpus, tenant, as_json))


async def _evaluate(folders: list[Path], mode: str, fusion: str, corpus: Path | None, as_json: bool) -> int:
    from rag import deployment, evaluate
    from rag.active_model import close_models, find_active, open_models
    from rag.exchange import FUSIONS, MODES

    if mode not in MODES:
        raise InvalidInput(f"--mode must be one of {', '.join(MODES)}", field="--mode")
    if fusion not in FUSIONS:
        raise InvalidInput(f"--fusion must be one of {', '.join(FUSIONS)}", field="--fusion")
    settings = read_settings()
    collections = [evaluate.load(folder, corpus=corpus) for folder in folders]
    place = deployment.locate(settings)
    opened = open_models(settings)
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            reports = await evaluate.evaluate(
                collections,
                engine=evaluate.Engine(database=database, embedder=embedder, settings=settings),
                place=place,
                mode=mode,
                fusion=fusion,
            )
    finally:
        await close_models(opened)
    if as_json:
        _print_measured(reports, embedder.model_id, mode, fusion, {})
    else:
        print_reports(reports)
    return 0


async def _calibrate(folder: Path, fusion: str, corpus: Path | None, tenant: str | None, as_json: bool) -> int:
    import dataclasses

    from rag import deployment, evaluate, operate
    from rag.active_model import close_models, find_active, open_models
    from rag.calibrate import calibrate
    from rag.exchange import FUSIONS
    from rag.principal import check_name

    if fusion not in FUSIONS:
        raise InvalidInput(f"--fusion must be one of {', '.join(FUSIONS)}", field="--fusion")
    settings = read_settings()
    collection = evaluate.load(folder, corpus=corpus)
    desk = operate.locate(settings)
    tenant_id = check_name(tenant_of(tenant, desk.default_tenant), field="--tenant")
    place = deployment.locate(settings)
    opened = open_models(settings)
    try:
        async with place.open(settings) as database:
            await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
            embedder = (await find_active(opened, database)).embedder
            report, found = await calibrate(
                collection,
                engine=evaluate.Engine(database=database, embedder=embedder, settings=settings),
                place=place,
                desk=desk,
                tenant_id=tenant_id,
                fusion=fusion,
            )
    finally:
        await close_models(opened)
    if as_json:
        _print_measured([report], embedder.model_id, "hybrid", fusion, {"calibration": dataclasses.asdict(found)})
    else:
        print_reports([report])
        _print_calibration(found)
    return 0


def _print_measured(
    reports: Sequence[Report], embedding_model: str, mode: str, fusion: str, more: Mapping[str, Any]
) -> None:
    import dataclasses
    import json

    described = {"embedding_model": embedding_model, "mode": mode, "fusion": fusion}
    collections = [dataclasses.asdict(report) for report in reports]
    screen.print_json(json.dumps({**described, "collections": collections, **more}, ensure_ascii=False))


def _print_calibration(found: Calibration) -> None:
    """What was found for each language, from what to what; what it was measured to be worth; and how to undo it."""
    import shlex

    from rag.calibrate import MIN_QUESTIONS, named

    def change(before: float, after: float, form: str) -> str:
        return format(before, form) if before == after else f"{before:{form}} → {after:{form}}"

    rows = [
        {
            "language": named(each.language),
            "questions": each.questions,
            "weight of the vectors": change(each.before.vector_share, each.after.vector_share, ".2f"),
            "minimum similarity": change(each.before.min_similarity, each.after.min_similarity, ".2f"),
            "nDCG@10": change(each.ndcg_before, each.ndcg_after, ".3f"),
            "written": each.is_better,
        }
        for each in found.refinements
    ]
    print_rows("calibration", rows, as_json=False)
    for language, questions in found.too_few.items():
        screen.err.print(
            f"{named(language)}: {questions} judged questions say nothing certain; it takes {MIN_QUESTIONS}"
        )
    if any(each.is_better for each in found.refinements):
        undo = ["rag", "calibration", "remove", "--tenant", found.tenant_id]
        undo += ["--model", found.embedding_model, "--fusion", found.fusion]
        screen.err.print(f"Searches of tenant {screen.shown(found.tenant_id)} go by it from now on.")
        screen.err.print("To go back to what is shipped:")
        screen.err.print(screen.shown(shlex.join(undo)))
    else:
        screen.err.print("Nothing was better on questions that did not choose it: nothing is changed.")


@calibration.command("list")
def calibration_list(tenant: AllTenantsOption = None, as_json: JsonOption = False) -> None:
    """List what counts for tenants instead of what is shipped, and what it was measured to be worth."""
    with open_desk().session() as session:
        print_rows("calibrations", session.rows("list_calibrations", {"tenant_id": tenant}), as_json=as_json)


@calibration.command("remove")
def calibration_remove(
    tenant: TenantOption = None,
    model: Annotated[str | None, typer.Option(help="Of this embedding model alone.")] = None,
    fusion: Annotated[str | None, typer.Option(help="Of this fusion alone: rank or score.")] = None,
) -> None:
    """Let what is shipped count again for a tenant, from its next search on."""
    desk = open_desk()
    wanted = {"tenant_id": tenant_of(tenant, desk.default_tenant), "embedding_model": model, "fusion": fusion}
    with desk.session() as session:
        removed = session.rows("remove_calibrations", wanted)
    if not removed:
        raise InvalidInput("there is no such calibration: `rag calibration list` has all of them", field="--tenant")
    screen.out.print(f"Removed {len(removed)} of tenant {screen.shown(wanted['tenant_id'] or '')}.")
