"""Shares a model's context window among the parts of a prompt (spec 001, "Token Budget Management")."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rag.errors import ContextOverflowError, TokenBudgetExceededError
from rag.exchange import ChatMessage, Passage
from rag.history import NOTHING, Memory, fit

# Labels, document name, page, section and the rules around a passage in the prompt.
PASSAGE_OVERHEAD_TOKENS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds in tokens."""

    window: int
    """What the model server is asked to reserve: prompt and answer together."""
    context: int
    history: int
    response: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What fits. History oldest first, passages best first."""

    history: tuple[ChatMessage, ...]
    passages: tuple[Passage, ...]
    context_tokens: int
    memory: Memory = NOTHING


def allocate(
    *,
    system_prompt: str,
    question: str,
    history: Sequence[ChatMessage],
    passages: Sequence[Passage],
    limits: Limits,
    count: Callable[[str], int],
    memory: Memory = NOTHING,
) -> Allocation:
    """Fit a prompt into its window: the system prompt whole, then the newest history, then the best passages.

    Key facts and the summary of the conversation have their shares of what history may take (`rag.history`).

    Raises TokenBudgetExceededError when the system prompt, the question and the reserve for the
    answer leave nothing.
    """
    fixed = count(system_prompt) + count(question)
    available = limits.window - fixed - limits.response
    if available < 0:
        raise TokenBudgetExceededError(
            f"system prompt and question ({fixed}) + response reserve ({limits.response}) "
            f"exceed the context window ({limits.window})"
        )
    # A third at most, so that a long conversation leaves room for sources.
    room = min(limits.history, available // 3)
    remembered, memory_tokens = fit(memory, room, count)
    kept, history_tokens = _newest(history, room - memory_tokens, count)
    available -= memory_tokens + history_tokens
    fitting, context_tokens = _best(passages, limits.context, available, count)
    return Allocation(history=kept, passages=fitting, context_tokens=context_tokens, memory=remembered)


def shrink(limits: Limits, ours: int, overflow: ContextOverflowError) -> Limits:
    """Limits under which a prompt fits that we counted as `ours` tokens and its server as too many.

    The window stands for what we may fill by our own count; the server is asked for the same one again.
    """
    theirs, window = overflow.prompt_tokens, overflow.window_tokens
    if window is None and theirs is not None and theirs >= limits.window:
        window = limits.window
    # Without a count, or with a window of the model's own that nobody names: who knows how much fits.
    room = ours // 2
    if theirs is not None and window is not None:
        # Some servers keep the answer's share free, and refuse a prompt that is shorter than the window.
        fits = min(window, limits.window) - limits.response
        if theirs > fits:
            # A tenth of slack: the count of the shorter prompt scales only roughly.
            room = int(0.9 * fits * ours / theirs)
    return dataclasses.replace(limits, window=limits.response + room)


def _newest(
    history: Sequence[ChatMessage], budget: int, count: Callable[[str], int]
) -> tuple[tuple[ChatMessage, ...], int]:
    kept: list[ChatMessage] = []
    total = 0
    for message in reversed(history):
        tokens = count(f"{message.role}: {message.content}")
        if total + tokens > budget:
            break
        kept.append(message)
        total += tokens
    return tuple(reversed(kept)), total


def _best(
    passages: Sequence[Passage], context_budget: int, available: int, count: Callable[[str], int]
) -> tuple[tuple[Passage, ...], int]:
    """`context_budget` bounds the text of the passages, `available` the text and what surrounds it."""
    fitting: list[Passage] = []
    total = 0
    for passage in passages:
        tokens = count(passage.text)
        surrounded = total + tokens + PASSAGE_OVERHEAD_TOKENS * (len(fitting) + 1)
        if total + tokens <= context_budget and surrounded <= available:
            fitting.append(passage)
            total += tokens
    return tuple(fitting), total
