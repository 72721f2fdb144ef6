"""`rag invalidate`, `rag reinstate` and `rag retractions`: what is taken back, for how long, by whom and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated
from uuid import UUID

import typer

from rag import screen
from rag.command import (
    AllTenantsOption,
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    age_of,
    as_principal,
    noun,
    open_desk,
    print_rows,
    run,
)
from rag.errors import InvalidInput

if TYPE_CHECKING:
    from rag.database import Database
    from rag.principal import Principal
    from rag.store import Scope

DocumentsOption = Annotated[list[UUID] | None, typer.Option("--document", help="Id of a document; repeatable.")]
SourcesOption = Annotated[list[str] | None, typer.Option("--source", help="Id of a source; repeatable.")]
ProvenancesOption = Annotated[
    list[str] | None, typer.Option("--provenance", help="What documents were derived of; repeatable.")
]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; stays in the record.")]
OnlyScopeOption = Annotated[str | None, typer.Option("--scope", help="Only public, user or project.")]


def invalidate(
    reason: ReasonOption,
    document: DocumentsOption = None,
    source: SourcesOption = None,
    provenance: ProvenancesOption = None,
    cascade: Annotated[
        bool, typer.Option("--cascade/--no-cascade", help="Also what is derived of them, and so on.")
    ] = True,
    cascade_id: Annotated[
        str | None, typer.Option("--cascade-id", help="Names what is invalidated together; made when left out.")
    ] = None,
    scope: OnlyScopeOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove documents, and refuse their sources until they are reinstated."""
    from dataclasses import asdict

    from rag import invalidate as room
    from rag.store import destination_of

    targets = room.Targets(document_ids=document or (), source_ids=source or (), provenance_ids=provenance or ())

    async def work(database: Database, principal: Principal) -> int:
        done = await room.invalidate(
            targets,
            reason=reason,
            principal=principal,
            database=database,
            cascade_id=cascade_id,
            cascades=cascade,
            destination=None if scope is None else destination_of(principal, scope=scope),
            scopes=_scopes(scope),
        )
        if as_json:
            import json

            screen.print_json(json.dumps(asdict(done), default=str))
            return 0
        count = len(done.documents)
        screen.out.print(f"Removed {count} {noun(count, 'document')} ({done.chunks} {noun(done.chunks, 'chunk')}).")
        if done.kept:
            screen.err.print(f"Kept, since they are not yours to remove: {', '.join(map(str, done.kept))}")
        if done.generation is not None:
            screen.out.print(f"Cascade {screen.shown(done.cascade_id)}, generation {done.generation}.")
        return 0

    run(as_principal(work, user, project, tags, tenant))


def reinstate(
    reason: ReasonOption,
    document: DocumentsOption = None,
    source: SourcesOption = None,
    provenance: ProvenancesOption = None,
    cascade_id: Annotated[
        list[str] | None, typer.Option("--cascade-id", help="All that was invalidated under it; repeatable.")
    ] = None,
    scope: OnlyScopeOption = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let sources that were invalidated be ingested again; what was removed has to be sent again."""
    from rag import invalidate as room

    targets = room.Targets(
        document_ids=document or (),
        source_ids=source or (),
        provenance_ids=provenance or (),
        cascade_ids=cascade_id or (),
    )

    async def work(database: Database, principal: Principal) -> int:
        opened = await room.reinstate(
            targets, reason=reason, principal=principal, database=database, scopes=_scopes(scope)
        )
        if as_json:
            screen.print_json(f'{{"reinstated": {opened}}}')
        else:
            screen.out.print(f"Reinstated {opened}.")
        return 0

    run(as_principal(work, user, project, tags, tenant))


def retractions(
    tenant: AllTenantsOption = None,
    since: Annotated[str, typer.Option(help="How far back: 7d, 24h.")] = "7d",
    top: Annotated[int, typer.Option(min=1, max=100_000, help="Rows, newest first.")] = 100,
    as_json: JsonOption = False,
) -> None:
    """List who invalidated and reinstated what, and why."""
    wanted = {"tenant_id": tenant, "since": age_of(since, "since"), "top": top}
    with open_desk().session() as session:
        print_rows("retractions", session.rows("list_retractions", wanted), as_json=as_json)


def _scopes(scope: str | None) -> tuple[Scope, ...]:
    from rag.store import SCOPES

    found = tuple(one for one in SCOPES if scope in (None, one))
    if not found:
        raise InvalidInput(f"scope must be one of {', '.join(SCOPES)}", field="scope")
    return found
