"""Everything that can go wrong, as one tree; HTTP numbers for it live in `api/errors.py` alone.

The docstring of a class is the default message. `field` names the input at fault where there is one.

Of spec 000's tree one is missing, ConfidenceError: a grade that fails costs no answer (`rag/grade.py`). It counts as 0,
`degraded` says so, the log has the cause as `grade_failed`, and the other parts of the confidence cannot fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rag.limits import Rate


class RAGServiceError(Exception):
    """The service could not do what was asked."""

    def __init__(self, message: str | None = None, *, field: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())
        self.field = field

    @property
    def message(self) -> str:
        return str(self.args[0])


# --- what the caller sent ------------------------------------------------------------------------


class InvalidInput(RAGServiceError):
    """The request is malformed."""


class EmptyDocument(InvalidInput):
    """The document has no text."""


class DocumentTooLarge(InvalidInput):
    """The document is larger than the limit."""


class UnreadableDocument(InvalidInput):
    """The document cannot be read in the format that its name says."""


class UnsupportedFormat(InvalidInput):
    """Documents of this format are not accepted."""


class MultipleOrganizations(InvalidInput):
    """The documents belong to more than one organization."""


# --- who is asking -------------------------------------------------------------------------------


class AccessError(RAGServiceError):
    """The operation is not permitted."""


class Unauthenticated(AccessError):
    """A valid credential is required."""


class IssuerUnavailable(RAGServiceError):
    """The keys of the identity provider cannot be had; try again shortly."""


class PrincipalMismatch(AccessError):
    """An identity field of the request differs from the principal that asks."""


class ScopeForbidden(AccessError):
    """The principal may not write to this scope."""


class RateLimited(AccessError):
    """The tenant has sent too many requests; try again later."""

    def __init__(self, message: str | None = None, *, rate: Rate | None = None) -> None:
        super().__init__(message)
        self.rate = rate
        """The limit, and how long to wait; None where nobody said."""


class QuotaExceeded(AccessError):
    """The tenant has stored as much as it may."""


class DocumentNotFound(RAGServiceError):
    """No such document."""


class QueryNotFound(RAGServiceError):
    """No such question of yours, or it did not return this source."""


class ConversationNotFound(RAGServiceError):
    """No such conversation of yours."""


class JobNotFound(RAGServiceError):
    """No such job."""


class QueueFull(RAGServiceError):
    """Too many jobs of this tenant are waiting; try again shortly."""

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class IdempotencyKeyReused(RAGServiceError):
    """This idempotency key was used for another request."""


class JobLost(RAGServiceError):
    """The job was cancelled, erased or given to another worker; nothing of it was stored."""


class MemberNotFound(RAGServiceError):
    """The project is not shared with this user."""


class SourceRetracted(RAGServiceError):
    """The source was deleted or changed while it was being ingested; send it again."""


class SourceInvalidated(RAGServiceError):
    """The source, or what it is derived of, was invalidated; it is refused until it is reinstated."""


class SourceOvertaken(SourceRetracted):
    """Somebody else wrote the source while it was being ingested; send it again."""


class SourceUnavailable(RAGServiceError):
    """The source of documents cannot be listed; nothing of it was changed."""


# --- the database --------------------------------------------------------------------------------


class DatabaseError(RAGServiceError):
    """The database could not carry out the statement."""


class DatabaseUnavailable(DatabaseError):
    """The database does not answer; try again shortly."""


class DatabaseTimeout(DatabaseError):
    """The database took longer than the statement may."""


class StorageFull(DatabaseError):
    """The database has no room left; reading goes on."""


class BarrierDown(DatabaseError):
    """The access barrier of this database would not hold, so the service does not start."""


class ModelNotActive(DatabaseError):
    """The database is searched with another embedding model than this service has; try again shortly."""


class ModelChanging(DatabaseError):
    """The embedding model is being changed, and nothing can be written for some seconds; try again shortly."""


class ModelChangeRefused(DatabaseError):
    """The embedding model cannot be changed like that now."""


class SignatureRefused(DatabaseError):
    """The database does not accept the service's signature: check RAG_SIGNING_KEY and the clocks."""


class SchemaMismatch(DatabaseError):
    """The schema of this database is not the one that this version works with."""


class EmbeddedUnavailable(DatabaseError):
    """The embedded database cannot run here."""


# --- embeddings ----------------------------------------------------------------------------------


class EmbeddingError(RAGServiceError):
    """The text could not be embedded."""


class EmbeddingUnavailable(EmbeddingError):
    """The embedding provider does not answer."""


class InsufficientQuota(EmbeddingUnavailable):
    """The account at the embedding provider has no quota left."""


class EmbeddingTimeout(EmbeddingError):
    """The embedding provider took too long."""


class EmbeddingInvalid(EmbeddingError):
    """The embedding provider returned vectors that cannot be used."""


# --- domain packs --------------------------------------------------------------------------------


class DomainPackInvalid(RAGServiceError):
    """A domain pack cannot be used, so the service does not start."""


# --- reranking -----------------------------------------------------------------------------------


class RerankUnavailable(RAGServiceError):
    """The reranker that is configured cannot be used, so the service does not start."""


# --- generation (names of spec 001) --------------------------------------------------------------


class LLMError(RAGServiceError):
    """The model gave no usable answer."""


class LLMConnectionError(LLMError):
    """AI service temporarily unavailable."""

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """In so many seconds the same may be sent again: nothing has been done. None = who knows."""


class LLMBusyError(LLMError):
    """Too many answers are being written; try again shortly."""

    def __init__(self, message: str | None = None, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        """As the model server asked for; None when it did not, or was not asked."""


class LLMTimeoutError(LLMError):
    """Response generation timed out. Please try again."""

    def __init__(self, message: str | None = None, *, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent
        """The server had its full time and sent nothing, as one that hangs."""


class LLMIncompleteError(LLMError):
    """The model stopped in the middle of its answer."""


class ContextOverflowError(LLMError):
    """The prompt is longer than the model's context window."""

    def __init__(
        self, message: str | None = None, *, prompt_tokens: int | None = None, window_tokens: int | None = None
    ) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        """The true length of the prompt as the server counted it, when it said so."""
        self.window_tokens = window_tokens
        """The window that the server has for prompt and answer, when it said so."""


class ModelNotAllowedError(LLMError):
    """Requested model not available."""


class ModelUnavailableError(LLMError):
    """The model is not installed on the model server."""


class ContextError(RAGServiceError):
    """Failed to retrieve or format context."""


class OutputInvalidError(RAGServiceError):
    """The model's structured answer does not fit the schema, nor did a second one."""


class TokenBudgetExceededError(RAGServiceError):
    """The system prompt and the reserve for the answer exceed the model's context window."""


def first_of(group: BaseExceptionGroup[RAGServiceError]) -> RAGServiceError:
    """The first error of tasks that failed together."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RAGServiceError)
    return error
