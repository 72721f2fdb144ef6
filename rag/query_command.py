"""`rag query`: a question as somebody, and its answer or how each passage came to be read."""

from __future__ import annotations

import contextlib
from typing import Annotated
from uuid import UUID

import typer

from rag import screen
from rag.command import (
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    read_settings,
    run,
    tags_of,
    tenant_of,
)
from rag.errors import DatabaseUnavailable, InvalidInput


def query(
    question: Annotated[str, typer.Argument(help="The question.")],
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    scope: Annotated[str | None, typer.Option(help="Narrow to public, user, project or organization.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Passages to read.")] = None,
    model: Annotated[str | None, typer.Option(help="Another model of the allow-list.")] = None,
    mode: Annotated[str, typer.Option(help="hybrid, vector or keyword.")] = "hybrid",
    fusion: Annotated[str, typer.Option(help="rank or score.")] = "rank",
    as_json: JsonOption = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the answer while it is written; with --json an event a line.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show every candidate and why it was kept.")] = False,
    source: Annotated[
        str | None, typer.Option(help="With --explain: each stage of this document (its id) or passage (id:index).")
    ] = None,
) -> None:
    """Ask a question as somebody."""
    run(
        _query(
            question, user, project, tags, tenant, scope, top_k, model, mode, fusion, as_json, stream, explain, source
        )
    )


async def _query(
    question: str,
    user: str | None,
    project: str | None,
    tags: str | None,
    tenant: str | None,
    scope: str | None,
    top_k: int | None,
    model: str | None,
    mode: str,
    fusion: str,
    as_json: bool,
    stream: bool,
    explain: bool,
    source: str | None,
) -> int:
    from rag import deployment
    from rag.answer import RAGService, check_request
    from rag.exchange import RAGRequest
    from rag.principal import Principal, check_user_id

    if explain and as_json:
        raise InvalidInput("--explain is a table; --json has the same figures under `passages`", field="--explain")
    if explain and stream:
        raise InvalidInput("--explain is a table and writes no answer", field="--stream")
    if source is not None and not explain:
        raise InvalidInput("--source goes with --explain", field="--source")
    document_id, chunk_index = (None, None) if source is None else _source(source)
    settings = read_settings()
    request = RAGRequest(
        query=question,
        scope=scope,  # type: ignore[arg-type]
        max_context_chunks=top_k,
        model=model,
        mode=mode,  # type: ignore[arg-type]
        fusion=fusion,  # type: ignore[arg-type]
    )
    asker = {
        "user_id": None if user is None else check_user_id(user),
        "project_id": project,
        "tags": tags_of(tags),
    }
    check_request(request, Principal(tenant_id=tenant or "unchecked", **asker))  # type: ignore[arg-type]
    if settings.rag_database_url is None and not settings.rag_home.exists():
        # Made here it would be empty, and no answer would tell that it is the wrong one.
        home = settings.rag_home.absolute()
        raise DatabaseUnavailable(f"there is no embedded database in {home}; `rag ingest` makes one, or set RAG_HOME")
    place = deployment.locate(settings)
    principal = Principal(tenant_id=tenant_of(tenant, place.default_tenant), **asker)  # type: ignore[arg-type]
    async with place.open(settings) as database:
        await database.check_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
        async with RAGService(settings, database) as service:
            if document_id is not None:
                stages = await service.explain(request, document_id, chunk_index, principal=principal)
                screen.print_stages(stages)
                return 0 if stages else 1
            if explain:
                found = await service.search(request, principal=principal, include_dropped=True)
                screen.print_passages(found.passages, found.dropped)
                for note in found.degraded:
                    screen.out.print(f"[yellow]note:[/yellow] {screen.shown(note)}")
                return 0
            if stream:
                async with contextlib.aclosing(service.stream(request, principal=principal)) as told:
                    async for event in told:
                        screen.print_event(event, as_json=as_json)
                return 0
            response = await service.generate(request, principal=principal)
    if as_json:
        screen.print_json(screen.as_json(response))
    else:
        screen.print_answer(response)
    return 0


def _source(named: str) -> tuple[UUID, int | None]:
    document, colon, index = named.partition(":")
    try:
        if colon and not (index.isascii() and index.isdecimal() and len(index) < 10):
            raise ValueError(index)
        return UUID(document), int(index) if colon else None
    except ValueError as error:
        raise InvalidInput("--source must be a document's id, or a passage's: id:index", field="--source") from error
