"""Palisade: retrieval-augmented generation in which Postgres decides who may retrieve what."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_EXCHANGED = ("ChatMessage", "Citation", "ConfidenceScore", "Filters", "RAGRequest", "RAGResponse", "RouteTarget")
_MODULES = {
    "RAGService": "rag.answer",
    "Principal": "rag.principal",
    "SkillResponse": "rag.skill",
    **dict.fromkeys(_EXCHANGED, "rag.exchange"),
}


def __getattr__(name: str) -> object:
    # When it is first asked for: all of it takes a second, and the process of the local model needs none of it.
    if name not in __all__:
        raise AttributeError(f"module 'rag' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "rag.errors")), name)
