"""What a prompt remembers of the conversation, in three tiers: key facts, a summary, and the latest messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag.errors import InvalidInput
from rag.exchange import MAX_HISTORY_MESSAGES, ChatMessage, RAGRequest

# Of the tokens for history. What the first two leave, the messages take: they say what the question refers to.
FACTS_SHARE = 0.25
SUMMARY_SHARE = 0.25

MAX_MESSAGE_LENGTH = 32_768
"""Characters of a message, and of the summary."""
MAX_KEY_FACTS = 50
MAX_FACT_LENGTH = 1000

MEMORY_CUT = "the summary or some key facts of the conversation did not fit, and were left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What came before the latest messages, as the caller keeps it."""

    facts: tuple[str, ...] = ()
    """Most important first."""
    summary: str | None = None


NOTHING = Memory()


def memory_of(request: RAGRequest) -> Memory:
    """The older two tiers of a request."""
    return Memory(facts=tuple(request.key_facts or ()), summary=request.history_summary or None)


def fit(memory: Memory, budget: int, count: Callable[[str], int]) -> tuple[Memory, int]:
    """As many facts as their share holds, the first ones first, then the summary or nothing of it; and their tokens.

    The summary may use what the facts left of their share.
    """
    kept: list[str] = []
    total = 0
    for fact in memory.facts:
        tokens = count(f"- {fact}")
        if total + tokens > FACTS_SHARE * budget:
            break
        kept.append(fact)
        total += tokens
    summary = None
    if memory.summary is not None:
        tokens = count(f"summary: {memory.summary}")
        if total + tokens <= (FACTS_SHARE + SUMMARY_SHARE) * budget:
            summary = memory.summary
            total += tokens
    return Memory(facts=tuple(kept), summary=summary), total


def check_history(request: RAGRequest) -> None:
    """Raise InvalidInput for a conversation that is too long, has other roles, or is no text."""
    messages: Sequence[ChatMessage] = request.chat_history or []
    if len(messages) > MAX_HISTORY_MESSAGES:
        raise InvalidInput(f"at most {MAX_HISTORY_MESSAGES} messages of history", field="chat_history")
    for message in messages:
        if message.role not in ("user", "assistant"):
            raise InvalidInput("the role of a message is user or assistant", field="chat_history")
        _check_text(message.content, MAX_MESSAGE_LENGTH, "chat_history")
    facts = request.key_facts or []
    if isinstance(facts, str) or len(facts) > MAX_KEY_FACTS:
        raise InvalidInput(f"key_facts must be a list of at most {MAX_KEY_FACTS} texts", field="key_facts")
    for fact in facts:
        _check_text(fact, MAX_FACT_LENGTH, "key_facts")
    if request.history_summary is not None:
        _check_text(request.history_summary, MAX_MESSAGE_LENGTH, "history_summary")


def _check_text(text: object, max_length: int, field: str) -> None:
    if not isinstance(text, str) or len(text) > max_length:
        raise InvalidInput(f"a text of {field} has at most {max_length} characters", field=field)
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidInput(f"{field} contains a NUL character or a lone surrogate, which is no character", field=field)
