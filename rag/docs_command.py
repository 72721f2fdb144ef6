"""`rag docs`: what somebody sees of the index, one document with where it came from, and taking documents out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import typer

from rag import screen
from rag.browse import MAX_PAGE, Wanted, browse
from rag.command import (
    JsonOption,
    ProjectOption,
    TagsOption,
    TenantOption,
    UserOption,
    YesOption,
    as_principal,
    cell,
    noun,
    print_rows,
    run,
)
from rag.errors import DocumentNotFound, ScopeForbidden

if TYPE_CHECKING:
    from rag.database import Database
    from rag.principal import Principal

docs = typer.Typer(help="Documents: list, show and remove them.", no_args_is_help=True)


@docs.command("list")
def docs_list(
    source: Annotated[str | None, typer.Option(help="Those whose source id begins like this: 'handbook:'.")] = None,
    source_type: Annotated[str | None, typer.Option("--type", help="Of this source type alone.")] = None,
    scope: Annotated[str | None, typer.Option(help="Only public, user or project.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="Documents of a page.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where the page begins, as the one before it says.")] = None,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the documents that somebody sees, by source id."""
    wanted = Wanted(prefix=source, source_type=source_type, scope=scope)

    async def work(database: Database, principal: Principal) -> int:
        page = await browse(database, principal, wanted, limit=limit, cursor=cursor)
        if as_json:
            _print({"documents": page.rows, "cursor": page.cursor})
            return 0
        shown = [
            {name: row[name] for name in ("id", "scope", "source_type", "source_id", "chunks")} for row in page.rows
        ]
        print_rows("documents", shown, as_json=False)
        if page.cursor is not None:
            screen.err.print(f"There are more: --cursor {page.cursor}")
        return 0

    run(as_principal(work, user, project, tags, tenant))


@docs.command("show")
def docs_show(
    document: Annotated[UUID, typer.Argument(help="The document's id.")],
    body: Annotated[bool, typer.Option("--body", help="Its text as well.")] = False,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a document: where it came from, who sees it, its chunks and what it says of itself."""
    from rag.store import read_document

    async def work(database: Database, principal: Principal) -> int:
        row = await read_document(database, principal, document)
        text = row.pop("body")
        # Opaque, and the digest of what only the service compares.
        for name in ("access_id", "source_hash"):
            del row[name]
        metadata: dict[str, Any] = row.pop("metadata")
        origin = metadata.pop("origin", None)
        told = row | {"origin": origin, "metadata": metadata, "body_characters": len(text)}
        if as_json:
            _print(told | ({"body": text} if body else {}))
            return 0
        nested = {"origin": origin or {}, "metadata": metadata}
        flat = {name: value for name, value in told.items() if name not in nested}
        flat |= {f"{name}.{key}": value for name, inside in nested.items() for key, value in inside.items()}
        width = max(map(len, flat))
        for name, value in flat.items():
            screen.out.print(screen.shown(f"{name:<{width}}  {_line(value)}"))
        if body:
            screen.out.print()
            for line in text.split("\n"):
                screen.out.print(screen.shown(line))
        return 0

    run(as_principal(work, user, project, tags, tenant))


@docs.command("rm")
def docs_rm(
    documents: Annotated[list[UUID], typer.Argument(help="Ids of documents.", metavar="DOCUMENT…")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: YesOption = False,
    user: UserOption = None,
    project: ProjectOption = None,
    tags: TagsOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove documents with their chunks. The source stays where it is: what is ingested again is there again.

    `rag invalidate` is for what must not come back. Exit code 1 when a document is not there, or not somebody's to
    remove; the others go.
    """
    from rag.store import read_document, remove_document

    wanted = list(dict.fromkeys(documents))

    async def work(database: Database, principal: Principal) -> int:
        found: list[dict[str, Any]] = []
        failures: list[tuple[UUID, str]] = []
        for document_id in wanted:
            try:
                row = await read_document(database, principal, document_id)
            except DocumentNotFound as error:
                failures.append((document_id, error.message))
            else:
                found.append({"id": row["id"], "source_id": row["source_id"], "chunks": row["chunk_count"]})
        if found and not as_json:
            print_rows("documents", found, as_json=False)
        if found and not dry_run and not yes:
            typer.confirm(f"Remove {len(found)} {noun(len(found), 'document')}?", abort=True, err=True)
        removed: list[dict[str, Any]] = []
        if not dry_run:
            with screen.counting(len(found), "removing") as counter:
                for row in found:
                    counter.note(row["source_id"])
                    try:
                        await remove_document(database, principal, row["id"], reason="deleted")
                    except (DocumentNotFound, ScopeForbidden) as error:
                        failures.append((row["id"], error.message))
                    else:
                        removed.append(row)
                    counter.step()
        if as_json:
            told = [{"id": document_id, "reason": reason} for document_id, reason in failures]
            _print(
                {
                    "dry_run": dry_run,
                    ("found" if dry_run else "removed"): found if dry_run else removed,
                    "failures": told,
                }
            )
        elif not dry_run:
            screen.out.print(f"Removed {len(removed)} {noun(len(removed), 'document')}.")
        for document_id, reason in failures:
            screen.err.print(f"[red]error:[/red] {document_id}: {screen.shown(reason)}")
        return 1 if failures else 0

    run(as_principal(work, user, project, tags, tenant))


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else cell(value)


def _print(told: dict[str, Any]) -> None:
    screen.print_json(json.dumps(told, default=str, ensure_ascii=False))
