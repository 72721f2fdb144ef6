"""Palisade: retrieval-augmented generation in which Postgres decides who may retrieve what."""

from rag.answer import RAGService
from rag.errors import (
    ContextError,
    LLMConnectionError,
    LLMError,
    LLMTimeoutError,
    ModelNotAllowedError,
    ModelUnavailableError,
    OutputInvalidError,
    RAGServiceError,
    TokenBudgetExceededError,
)
from rag.exchange import ChatMessage, Citation, ConfidenceScore, Filters, RAGRequest, RAGResponse, RouteTarget
from rag.principal import Principal
from rag.skill import SkillResponse

__all__ = [
    "ChatMessage",
    "Citation",
    "ConfidenceScore",
    "ContextError",
    "Filters",
    "LLMConnectionError",
    "LLMError",
    "LLMTimeoutError",
    "ModelNotAllowedError",
    "ModelUnavailableError",
    "OutputInvalidError",
    "Principal",
    "RAGRequest",
    "RAGResponse",
    "RAGService",
    "RAGServiceError",
    "RouteTarget",
    "SkillResponse",
    "TokenBudgetExceededError",
]
