"""One table from error classes to HTTP, and one shape for every error body (RFC 9457)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from api.contract import PROBLEM_JSON
from rag import errors

log = structlog.get_logger(__name__)

# The most specific class that an error is an instance of decides.
STATUS: Mapping[type[errors.RAGServiceError], tuple[int, str]] = {
    errors.RAGServiceError: (500, "internal_error"),
    errors.InvalidInput: (422, "invalid_input"),
    errors.EmptyDocument: (422, "empty_document"),
    errors.DocumentTooLarge: (413, "document_too_large"),
    errors.UnreadableDocument: (422, "unreadable_document"),
    errors.UnsupportedFormat: (415, "unsupported_format"),
    errors.MultipleOrganizations: (422, "multi_org"),
    errors.AccessError: (403, "forbidden"),
    errors.Unauthenticated: (401, "unauthenticated"),
    errors.IssuerUnavailable: (503, "issuer_unavailable"),
    errors.PrincipalMismatch: (403, "principal_mismatch"),
    errors.ScopeForbidden: (403, "scope_forbidden"),
    errors.RateLimited: (429, "rate_limited"),
    # RFC 9110, 15.5.4: understood and refused, and not to be repeated as it is. 507 would say that the server has no
    # room (RFC 4918), which has a code of its own, and 429 that waiting helps.
    errors.QuotaExceeded: (403, "quota_exceeded"),
    errors.DocumentNotFound: (404, "not_found"),
    errors.QueryNotFound: (404, "not_found"),
    errors.MemberNotFound: (404, "not_found"),
    errors.JobNotFound: (404, "not_found"),
    errors.ConversationNotFound: (404, "not_found"),
    errors.QueueFull: (429, "queue_full"),
    errors.IdempotencyKeyReused: (422, "idempotency_key_reused"),
    errors.JobLost: (409, "job_lost"),
    errors.SourceRetracted: (409, "source_changed"),
    errors.SourceOvertaken: (409, "source_changed"),
    errors.SourceUnavailable: (503, "source_unavailable"),
    errors.SourceInvalidated: (409, "source_invalidated"),
    errors.DatabaseError: (500, "database_error"),
    errors.DatabaseUnavailable: (503, "database_unavailable"),
    errors.DatabaseTimeout: (504, "database_timeout"),
    errors.StorageFull: (507, "storage_full"),
    errors.ModelNotActive: (503, "model_not_active"),
    errors.ModelChanging: (503, "model_changing"),
    errors.ModelChangeRefused: (409, "model_change_refused"),
    errors.BarrierDown: (503, "barrier_down"),
    errors.SignatureRefused: (503, "signature_refused"),
    errors.SchemaMismatch: (503, "schema_mismatch"),
    errors.EmbeddedUnavailable: (503, "database_unavailable"),
    errors.EmbeddingError: (502, "embedding_failed"),
    errors.EmbeddingUnavailable: (503, "embedding_unavailable"),
    errors.InsufficientQuota: (503, "insufficient_quota"),
    errors.EmbeddingTimeout: (504, "embedding_timeout"),
    errors.EmbeddingInvalid: (502, "embedding_invalid"),
    errors.DomainPackInvalid: (503, "domain_pack_invalid"),
    errors.RerankUnavailable: (503, "rerank_unavailable"),
    errors.LLMError: (502, "model_failed"),
    errors.LLMConnectionError: (503, "model_unreachable"),
    errors.LLMBusyError: (503, "model_busy"),
    errors.LLMTimeoutError: (504, "model_timeout"),
    errors.LLMIncompleteError: (502, "model_incomplete"),
    errors.ContextOverflowError: (502, "context_overflow"),
    errors.ModelNotAllowedError: (400, "model_not_allowed"),
    errors.ModelUnavailableError: (503, "model_unavailable"),
    errors.ContextError: (500, "context_failed"),
    errors.OutputInvalidError: (502, "output_invalid"),
    errors.TokenBudgetExceededError: (422, "token_budget_exceeded"),
}

CODES = {
    400: "bad_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
    421: "wrong_host",
    500: "internal_error",
    503: "unavailable",
}

# Spec 000 asks the user to come back; a connection or a model server takes about that long.
RETRY_AFTER_S = 5
MAX_RETRY_AFTER_S = 3600
RETRYABLE = {429, 503}

MAX_ECHO = 200
"""Characters of a caller's own field name that an error may repeat."""
MAX_FIELDS = 20


def problem(
    request: Request,
    *,
    status: int,
    code: str,
    title: str,
    detail: str,
    fields: list[dict[str, str]] | None = None,
    retry_after_s: float | None = None,
    may_retry: bool = True,
) -> Response:
    """An `application/problem+json` response; the request's id is in it and in its headers."""
    request_id = _request_id(request)
    body: dict[str, Any] = {
        "type": f"urn:palisade:problem:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "instance": f"urn:uuid:{request_id}",
        "code": code,
        "request_id": request_id,
        "errors": fields or [],
    }
    headers = {"X-Request-ID": request_id, "Cache-Control": "no-store"}
    if status in RETRYABLE and may_retry:
        headers["Retry-After"] = str(math.ceil(min(retry_after_s or RETRY_AFTER_S, MAX_RETRY_AFTER_S)))
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # Escaped to ASCII: a field name may be a lone surrogate, which no encoder would take.
    return Response(json.dumps(body), status_code=status, headers=headers, media_type=PROBLEM_JSON)


def _request_id(request: Request) -> str:
    return str(getattr(request.state, "request_id", ""))


def status_of(error: errors.RAGServiceError) -> tuple[int, str]:
    """The status and the code of an error: those of its class, else of the nearest one above."""
    for kind in type(error).__mro__:
        if kind in STATUS:
            return STATUS[kind]
    raise AssertionError("every error descends from RAGServiceError")


def add_handlers(app: FastAPI) -> None:
    """Make every error of the application a problem detail."""
    app.add_exception_handler(errors.RAGServiceError, _service_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def problem_in(request: Request, error: Exception) -> str:
    """The problem that a response would describe, for an answer that has begun; `retry_after` in seconds with it."""
    handle = _service_error if isinstance(error, errors.RAGServiceError) else _unexpected
    response = await handle(request, error)
    body: dict[str, Any] = json.loads(bytes(response.body))
    if "Retry-After" in response.headers:
        body["retry_after"] = int(response.headers["Retry-After"])
    return json.dumps(body)


async def _service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, errors.RAGServiceError)
    status, code = status_of(error)
    cause = error.__cause__ or error
    if status >= 500:
        log.warning("request_failed", request_id=_request_id(request), code=code, cause=type(cause).__name__)
    elif status == 401:
        # What was wrong with a credential is for the operator to know, and for nobody else.
        log.info(
            "credential_refused",
            request_id=_request_id(request),
            cause=type(cause).__name__,
            field=cause.field if isinstance(cause, errors.InvalidInput) else None,
        )
    fields = [{"field": error.field, "message": error.message}] if error.field else []
    title = (type(error).__doc__ or "").strip().rstrip(".")
    # When somebody knows: the breaker, or the model server.
    waits = errors.LLMConnectionError | errors.LLMBusyError | errors.QueueFull
    retry_after_s = error.retry_after_s if isinstance(error, waits) else None
    rate = error.rate if isinstance(error, errors.RateLimited) else None
    if rate is not None:
        request.state.rate = rate
        retry_after_s = rate.wait_s
    return problem(
        request,
        status=status,
        code=code,
        title=title,
        detail=error.message,
        fields=fields,
        retry_after_s=retry_after_s,
        # No wait is long enough where nothing is allowed.
        may_retry=rate is None or rate.wait_s is not None,
    )


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        return problem(
            request,
            status=400,
            code="malformed_json",
            title="The body is not JSON",
            detail=f"The body is not JSON at character {found[0]['loc'][-1]}.",
        )
    fields = []
    for entry in found[:MAX_FIELDS]:
        place, *inside = entry["loc"]
        name = ".".join(map(str, inside))[:MAX_ECHO]
        fields.append({"field": name or str(place), "message": entry["msg"][:MAX_ECHO]})
    return problem(
        request,
        status=422,
        code="invalid_input",
        title="The request is malformed",
        detail=fields[0]["field"] + ": " + fields[0]["message"],
        fields=fields,
    )


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = CODES.get(error.status_code, "error")
    response = problem(request, status=error.status_code, code=code, title=str(error.detail), detail=str(error.detail))
    if error.status_code == 405 and error.headers:
        response.headers.update(error.headers)
    return response


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("unexpected_error", request_id=_request_id(request), cause=type(error).__name__, exc_info=error)
    return problem(
        request,
        status=500,
        code="internal_error",
        title="Internal error",
        detail="The service failed; the request id finds the entry in its log.",
    )
