"""Which documents a list of ids or of paths stands for, looked up under the rights of who asks (spec 004).

A document that is hidden and one that does not exist are the same error, which does not say which of the
listed ones it was. A principal has one tenant: what it lists belongs to that organization, or is missing.
Only a caller who is somebody in several of them can list documents of more than one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from rag.database import Database
from rag.errors import DocumentNotFound, InvalidInput, MultipleOrganizations
from rag.principal import Principal, check_name

MAX_LISTED = 1000
# As long as a source_id may be, which is counted in bytes when it is stored.
MAX_PATH_LENGTH = 512
# An id as the service writes it. Whatever else UUID() takes, such as 32 digits in a row, may be a path.
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII | re.IGNORECASE)
_FIELD = "document_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScope:
    """Documents, each once, in the order in which they were listed, and the organization that has them all."""

    document_ids: tuple[UUID, ...]
    organization_id: str


async def validate_document_access(
    database: Database, principals: Sequence[Principal], document_ids: Sequence[UUID]
) -> dict[UUID, str]:
    """The organization of each document. `principals`: the caller, once for each organization they belong to.

    Raises DocumentNotFound unless every document may be read by one of them, MultipleOrganizations
    for an id that two organizations have, InvalidInput for a list that is empty or too long.
    """
    _check_length(document_ids)
    places: dict[UUID, set[str]] = {}
    for principal in principals:
        async with database.transaction(principal, read_only=True) as session:
            for row in await session.rows("documents_among", {"document_ids": list(document_ids)}):
                places.setdefault(row["document_id"], set()).add(principal.tenant_id)
    _refuse_missing(document_ids, places)
    return {document_id: _only(places[document_id]) for document_id in document_ids}


async def organization_of(database: Database, principals: Sequence[Principal], document_ids: Sequence[UUID]) -> str:
    """The organization that all of the documents belong to. Raises as `validate_document_access` does."""
    return _only(set((await validate_document_access(database, principals, document_ids)).values()))


async def resolve_scope_ids(
    database: Database, principals: Sequence[Principal], scope_ids: Sequence[UUID] | Sequence[str]
) -> ResolvedScope:
    """The documents that are listed by their ids, or by paths: the source_id that each was ingested under.

    A path stands for every document of that source that may be read, such as one's own and the public
    one. Raises as `validate_document_access` does, and InvalidInput for a list of both ids and paths.
    """
    _check_length(scope_ids)
    listed = [str(one) for one in scope_ids]
    ids = [UUID(one) for one in listed if _ID.fullmatch(one)]
    if not ids:
        return await _resolve_paths(database, principals, listed)
    if len(ids) < len(listed):
        raise InvalidInput(f"{_FIELD} must be ids or paths, not both", field=_FIELD)
    organization = await organization_of(database, principals, ids)
    return ResolvedScope(document_ids=tuple(dict.fromkeys(ids)), organization_id=organization)


async def _resolve_paths(database: Database, principals: Sequence[Principal], paths: Sequence[str]) -> ResolvedScope:
    for path in paths:
        check_name(path, field=_FIELD, max_length=MAX_PATH_LENGTH)
    places: dict[str, set[tuple[str, UUID]]] = {}
    for principal in principals:
        async with database.transaction(principal, read_only=True) as session:
            for row in await session.rows("sources_among", {"source_ids": list(paths)}):
                places.setdefault(row["source_id"], set()).add((principal.tenant_id, row["document_id"]))
    _refuse_missing(paths, places)
    listed = [place for path in paths for place in sorted(places[path])]
    return ResolvedScope(
        document_ids=tuple(dict.fromkeys(document_id for _, document_id in listed)),
        organization_id=_only({organization for organization, _ in listed}),
    )


def _check_length(listed: Collection[object]) -> None:
    if not 1 <= len(listed) <= MAX_LISTED:
        raise InvalidInput(f"{_FIELD} must list 1 to {MAX_LISTED} documents", field=_FIELD)


def _refuse_missing(listed: Collection[object], found: Collection[object]) -> None:
    if not set(listed) <= set(found):
        raise DocumentNotFound(field=_FIELD)


def _only(organizations: Collection[str]) -> str:
    if len(organizations) > 1:
        raise MultipleOrganizations(field=_FIELD)
    (organization,) = organizations
    return organization
