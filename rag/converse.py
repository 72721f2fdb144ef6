"""Takes in the messages of conversations, each its owner's alone, and asks for summaries of what has gathered.

What is said is stored and never searched. Once a thread has gathered enough, its messages are given to a job in the
transaction of the message that was one too many: the job exists when that has committed, and each message belongs
to one summary at most (`rag/summarise.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

import psycopg
import structlog

from rag import jobs, store, tasks
from rag.database import Database, Session
from rag.errors import ConversationNotFound, IdempotencyKeyReused, InvalidInput, QueueFull, RAGServiceError
from rag.generate import EXTRACTIVE
from rag.history import MAX_MESSAGE_LENGTH
from rag.jobs import Request
from rag.principal import Principal, check_name
from rag.settings import Settings
from rag.store import Destination

log = structlog.get_logger(__name__)

Role = Literal["user", "assistant"]
ROLES: tuple[Role, ...] = get_args(Role)

# Of one summary: eight of the longest messages. What is left over when the queue was full goes to the next.
MAX_SUMMARISED_CHARACTERS = 8 * MAX_MESSAGE_LENGTH
MAX_PAGE = 1000
# Of one thread, the latest; 100 summaries stand for some 200,000 tokens.
MAX_SUMMARIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A message as it arrives."""

    thread_id: str
    role: str
    content: str
    idempotency_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """What became of a message. `number` is its place in the thread, from 1."""

    id: UUID
    number: int
    created_at: datetime
    repeated: bool
    """It had been posted before, with the same idempotency key."""
    summary_job: UUID | None
    """The job that is to sum it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message as it is stored."""

    id: UUID
    number: int
    role: Role
    content: str
    tokens: int
    characters: int
    summarised_at: datetime | None
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary, and the document that it is found as."""

    id: UUID
    document_id: UUID
    summary_text: str
    message_ids: tuple[UUID, ...]
    model: str
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A page of a thread in its order, and its latest summaries, oldest first."""

    thread_id: str
    messages: tuple[Message, ...]
    summaries: tuple[Summary, ...]
    next_after: int | None
    """Where the next page begins; None on the last one."""


class _TwinError(RAGServiceError):
    """Another message with this key was posted meanwhile."""


async def post(
    said: Said,
    *,
    principal: Principal,
    destination: Destination,
    database: Database,
    settings: Settings,
    count: Callable[[str], int],
) -> Posted:
    """Add a message at the end of a thread. The same key with the same message adds nothing, while it is kept.

    `count` counts tokens. Raises InvalidInput for what is no message, IdempotencyKeyReused, ScopeForbidden for a scope
    that is not the principal's own.
    """
    check_thread(said.thread_id)
    if said.role not in ROLES:
        raise InvalidInput("the role of a message is user or assistant", field="role")
    _check_content(said.content)
    request = None
    if said.idempotency_key is not None:
        request = jobs.request_of(said.idempotency_key, said.thread_id, said.role, said.content)
    tokens = count(said.content)
    try:
        return await _post(said, request, tokens, principal, destination, database, settings)
    except _TwinError:
        return await _post(said, request, tokens, principal, destination, database, settings)


async def _post(
    said: Said,
    request: Request | None,
    tokens: int,
    principal: Principal,
    destination: Destination,
    database: Database,
    settings: Settings,
) -> Posted:
    async with database.transaction(principal) as session:
        access_id = await store.class_of(session, destination)
        try:
            row = await session.row(
                "post_message",
                {
                    "access_id": access_id,
                    "thread_id": said.thread_id,
                    "role": said.role,
                    "content": said.content,
                    "tokens": tokens,
                    "request_key": None if request is None else request.key,
                    "request_digest": None if request is None else request.digest,
                },
            )
        except psycopg.errors.UniqueViolation as error:
            raise _TwinError() from error
        assert row is not None
        repeated = row["repeated_digest"] is not None
        if repeated and (request is None or bytes(row["repeated_digest"]) != request.digest):
            raise IdempotencyKeyReused(field="Idempotency-Key")
        job_id = row["summary_id"]
        if not repeated and is_due(row["open_tokens"], row["open_characters"], settings):
            job_id = await _ask_for_summary(session, said.thread_id, access_id, principal, destination, settings)
    return Posted(
        id=row["id"], number=row["number"], created_at=row["created_at"], repeated=repeated, summary_job=job_id
    )


def is_due(open_tokens: int, open_characters: int, settings: Settings) -> bool:
    """Whether a thread that has gathered so much is summed up now."""
    # Where answers quote their sources no model is to be asked, and what gathers waits for one.
    if settings.rag_llm_provider == EXTRACTIVE:
        return False
    limits = (
        (open_tokens, settings.rag_summarise_after_tokens),
        (open_characters, settings.rag_summarise_after_characters),
    )
    return any(limit and gathered >= limit for gathered, limit in limits)


async def _ask_for_summary(
    session: Session,
    thread_id: str,
    access_id: int,
    principal: Principal,
    destination: Destination,
    settings: Settings,
) -> UUID | None:
    """Give what has gathered to a new job; None while the tenant's queue is full, and the next message asks again."""
    wanted = tasks.summary(thread_id, principal, destination)
    try:
        job_id = await jobs.enqueue(session, wanted, max_waiting=settings.rag_queue_max_size)
    except QueueFull:
        log.info("summary_put_off", cause="QueueFull")
        return None
    await session.run(
        "claim_messages",
        {
            "access_id": access_id,
            "thread_id": thread_id,
            "summary_id": job_id,
            "most_characters": MAX_SUMMARISED_CHARACTERS,
        },
    )
    return job_id


async def read(
    database: Database, principal: Principal, thread_id: str, *, after: int = 0, limit: int = 100
) -> Conversation:
    """A thread of the principal's own: at most `limit` messages behind the place `after`, and its summaries.

    Raises ConversationNotFound, the same for one that is missing and one of somebody else.
    """
    check_thread(thread_id)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidInput(f"limit must be from 1 to {MAX_PAGE}", field="limit")
    scope = "user" if principal.project_id is None else "project"
    named = {
        "project_id": store.destination_of(principal, scope=scope).project_id,
        "thread_id": thread_id,
    }
    async with database.transaction(principal, read_only=True) as session:
        # One more than is shown, to know whether there is a next page.
        rows = await session.rows("my_messages", named | {"after": after, "at_most": limit + 1})
        summaries = await session.rows("my_summaries", named | {"at_most": MAX_SUMMARIES})
        if not rows and not summaries:
            known = await session.rows("my_messages", named | {"after": 0, "at_most": 1})
            if not known:
                raise ConversationNotFound()
    page = [row for row in rows if len(rows) <= limit or row["number"] < rows[limit]["number"]]
    # Places are given twice only to what went in with different tags: such a page is longer, and never empty.
    page = page or rows
    more = len(page) < len(rows)
    return Conversation(
        thread_id=thread_id,
        messages=tuple(Message(**row) for row in page),
        summaries=tuple(_summary(row) for row in reversed(summaries)),
        next_after=page[-1]["number"] if more else None,
    )


def _summary(row: dict[str, Any]) -> Summary:
    return Summary(**row | {"message_ids": tuple(row["message_ids"])})


def check_thread(thread_id: str) -> str:
    """The name of a thread. Raises InvalidInput for what can be none."""
    return check_name(thread_id, field="thread_id")


def _check_content(content: str) -> None:
    if not content.strip() or len(content) > MAX_MESSAGE_LENGTH:
        raise InvalidInput(
            f"content must be 1 to {MAX_MESSAGE_LENGTH} characters, not all of them space", field="content"
        )
    if "\0" in content or any("\ud800" <= character <= "\udfff" for character in content):
        raise InvalidInput(
            "content contains a NUL character or a lone surrogate, which is no character", field="content"
        )
