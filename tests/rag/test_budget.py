"""Who gets the tokens of a window: the fixed parts, then the newest history, then the best passages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rag.budget import PASSAGE_OVERHEAD_TOKENS, Allocation, Limits, allocate
from rag.errors import TokenBudgetExceededError
from rag.exchange import ChatMessage
from tests.rag.passages import passage


def count_words(text: str) -> int:
    return len(text.split())


def words(count: int) -> str:
    return " ".join(["word"] * count)


def said(count: int) -> ChatMessage:
    """A message that costs `count` tokens: its role counts as a word."""
    return ChatMessage(role="user", content=words(count - 1))


def fit(
    *,
    system: int = 20,
    question: int = 10,
    history: list[int] | None = None,
    passages: list[int] | None = None,
    window: int,
    context: int = 3000,
    history_limit: int = 1000,
    response: int = 50,
) -> Allocation:
    """Allocate parts of these many tokens."""
    return allocate(
        system_prompt=words(system),
        question=words(question),
        history=[said(count) for count in history or []],
        passages=[passage(words(count), number=number) for number, count in enumerate(passages or [], start=1)],
        limits=Limits(window=window, context=context, history=history_limit, response=response),
        count=count_words,
    )


def history_sizes(allocation: Allocation) -> list[int]:
    return [count_words(f"{message.role}: {message.content}") for message in allocation.history]


def ranks(allocation: Allocation) -> list[int | None]:
    return [fitted.rank for fitted in allocation.passages]


def test_the_fixed_parts_come_first_then_the_newest_history_then_the_best_passages():
    # 500 - 20 - 10 - 50 = 420 are free; a third, 140, for history: 60 + 60 fit, the oldest 60 do not.
    # 300 remain. The first passage takes 100 + 60 for its labels, the second would make it
    # 100 + 90 + 120 = 310; the third makes it 100 + 80 + 120 = 300.
    fitted = fit(history=[60, 60, 60], passages=[100, 90, 80], window=500)
    assert history_sizes(fitted) == [60, 60]
    assert ranks(fitted) == [1, 3]
    assert fitted.context_tokens == 180


def test_history_takes_no_more_than_a_third_of_what_is_left():
    # 380 - 80 = 300 are free, and a third is 100.
    assert history_sizes(fit(history=[100], window=380)) == [100]
    assert history_sizes(fit(history=[101], window=380)) == []


def test_history_takes_no_more_than_its_own_limit():
    assert history_sizes(fit(history=[30, 30, 30], window=8000, history_limit=60)) == [30, 30]


def test_the_oldest_messages_are_dropped_and_the_order_stays():
    messages = [ChatMessage(role="user", content=name) for name in ("first", "second", "third")]
    fitted = allocate(
        system_prompt="",
        question="",
        history=messages,
        passages=[],
        # "user: third" and "user: second" have two words each.
        limits=Limits(window=1000, context=100, history=4, response=10),
        count=count_words,
    )
    assert [message.content for message in fitted.history] == ["second", "third"]


def test_history_has_no_gaps():
    # The newest 10 fit into 50, the 60 before them do not, and the 5 before those would.
    assert history_sizes(fit(history=[5, 60, 10], window=8000, history_limit=50)) == [10]


def test_without_a_budget_for_history_none_is_kept():
    fitted = fit(history=[2], passages=[100], window=8000, history_limit=0)
    assert fitted.history == ()
    assert ranks(fitted) == [1]


def test_without_history_its_share_goes_to_the_passages():
    # 300 are free: 240 of text and 60 of labels.
    fitted = fit(passages=[240], window=380)
    assert fitted.history == ()
    assert ranks(fitted) == [1]
    assert ranks(fit(passages=[241], window=380)) == []


def test_the_context_budget_bounds_the_text_of_the_passages_alone():
    assert ranks(fit(passages=[60, 40, 1], window=8000, context=100)) == [1, 2]


def test_a_passage_that_does_not_fit_is_passed_over_for_a_smaller_one():
    fitted = fit(passages=[101, 50, 51, 50], window=8000, context=100)
    assert ranks(fitted) == [2, 4]
    assert fitted.context_tokens == 100


def test_fixed_parts_that_exceed_the_window_are_an_error_with_the_numbers():
    with pytest.raises(TokenBudgetExceededError, match=r"\(30\).*\(50\).*\(79\)"):
        fit(window=79)


def test_fixed_parts_that_fill_the_window_leave_room_for_nothing_else():
    fitted = fit(history=[2], passages=[1], window=80)
    assert fitted == Allocation(history=(), passages=(), context_tokens=0)


sizes = st.lists(st.integers(min_value=1, max_value=400), max_size=8)


@settings(max_examples=200, deadline=None)
@given(
    history=sizes,
    passages=sizes,
    window=st.integers(min_value=80, max_value=3000),
    context=st.integers(min_value=0, max_value=1000),
    history_limit=st.integers(min_value=0, max_value=1000),
)
def test_whatever_is_asked_for_the_whole_stays_inside_the_window(history, passages, window, context, history_limit):
    fitted = fit(history=history, passages=passages, window=window, context=context, history_limit=history_limit)
    labels = PASSAGE_OVERHEAD_TOKENS * len(fitted.passages)
    assert 20 + 10 + 50 + sum(history_sizes(fitted)) + fitted.context_tokens + labels <= window
    assert fitted.context_tokens == sum(count_words(kept.text) for kept in fitted.passages) <= context
    kept = history_sizes(fitted)
    assert kept == history[len(history) - len(kept) :]
    assert ranks(fitted) == sorted(rank for rank in ranks(fitted) if rank is not None)
