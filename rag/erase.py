"""Erases what is stored of somebody, looks afterwards whether it is gone, and ends logs by age; as rag_operator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import timedelta

from rag.errors import InvalidInput
from rag.operate import Session
from rag.principal import ALL_PROJECTS, check_name, check_user_id

# rag_documents allows as many bytes of source_id and characters of source_type.
MAX_SOURCE_ID_LENGTH = 512
MAX_SOURCE_TYPE_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A tenant; or its user, project (of all owners, or of one) or source (of all types, or of one).

    `user_id` is the user alone, and with a project its owner. Raises InvalidInput for anything else.
    """

    tenant_id: str
    user_id: int | None = None
    project_id: str | None = None
    source_type: str | None = None
    source_id: str | None = None

    def __post_init__(self) -> None:
        check_name(self.tenant_id, field="tenant_id")
        if self.user_id is not None:
            check_user_id(self.user_id)
        if self.project_id is not None:
            check_name(self.project_id, field="project_id")
        if self.project_id == ALL_PROJECTS:
            raise InvalidInput("a project has a name, and * is none; erase the user instead", field="project_id")
        if self.source_id is not None:
            check_name(self.source_id, field="source_id", max_length=MAX_SOURCE_ID_LENGTH)
        if self.source_type is not None:
            check_name(self.source_type, field="source_type", max_length=MAX_SOURCE_TYPE_LENGTH)
        if self.source_type is not None and self.source_id is None:
            raise InvalidInput("a type of source needs the source", field="source_type")
        if self.source_id is not None and (self.user_id is not None or self.project_id is not None):
            raise InvalidInput("a source is erased in all classes of the tenant, not of one owner", field="source_id")

    def __str__(self) -> str:
        within = f"tenant {self.tenant_id}"
        if self.source_id is not None:
            kind = "" if self.source_type is None else f" of type {self.source_type}"
            return f"source {self.source_id}{kind} in {within}"
        if self.project_id is not None:
            owner = "all owners" if self.user_id is None else f"user {self.user_id}"
            return f"project {self.project_id} of {owner} in {within}"
        if self.user_id is not None:
            return f"user {self.user_id} of {within}"
        return within


def count_traces(session: Session, subject: Subject) -> dict[str, int]:
    """Rows of each table that are about the subject."""
    return {row["table_name"]: row["rows_left"] for row in session.rows("count_traces", asdict(subject))}


def forget(session: Session, subject: Subject) -> dict[str, int]:
    """Erase the subject; rows removed from each table. Waits for those who are writing in the tenant."""
    return {row["table_name"]: row["rows_removed"] for row in session.rows("forget", asdict(subject))}


def expire_logs(session: Session, *, older_than: timedelta, tenant_id: str | None) -> int:
    """Remove questions with their hits, and assertions of service keys; how many of both."""
    row = session.row("expire_logs", {"older_than": older_than, "tenant_id": tenant_id})
    assert row is not None
    return int(row["rows_removed"])
