"""The queue in front of a model server, and the breaker that opens when it is down."""

from __future__ import annotations

import asyncio

import pytest

from rag.admit import FAILURES_TO_OPEN, PAUSE_S, Breaker, Queue
from rag.errors import LLMBusyError, LLMConnectionError, LLMError, LLMTimeoutError, ModelUnavailableError


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: Breaker, error: LLMError | None = None) -> None:
    error = error or LLMConnectionError()
    with pytest.raises(type(error)), breaker.watching():
        raise error


def refused(breaker: Breaker) -> float:
    """That the breaker is open, and the seconds that it names."""
    with pytest.raises(LLMConnectionError) as caught, breaker.watching():
        raise AssertionError("it was closed")
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock)


def opened(breaker: Breaker) -> None:
    for _ in range(FAILURES_TO_OPEN):
        fail(breaker)


# --- the breaker ---------------------------------------------------------------------------------


def test_it_opens_after_so_many_failures_in_a_row_and_says_for_how_long(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        fail(breaker)
    breaker.check()
    fail(breaker)
    assert refused(breaker) == PAUSE_S
    clock.now += PAUSE_S - 2
    assert refused(breaker) == 2
    with pytest.raises(LLMConnectionError):
        breaker.check()


def test_an_answer_in_between_begins_the_count_anew(breaker: Breaker) -> None:
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            fail(breaker)
        with breaker.watching():
            pass
    breaker.check()


def test_a_refusal_is_an_answer_as_well(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            fail(breaker)
        fail(breaker, LLMError("reports: out of memory"))
    breaker.check()
    opened(breaker)
    clock.now += PAUSE_S
    fail(breaker, ModelUnavailableError())
    breaker.check()


def test_after_the_pause_one_may_try_and_success_lets_everybody_in(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += PAUSE_S
    with breaker.watching():
        # While one tries, nobody else does.
        assert refused(breaker) >= 1
    breaker.check()
    # The count begins anew as well.
    fail(breaker)
    breaker.check()


def test_a_try_that_fails_opens_it_for_as_long_again(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += PAUSE_S
    fail(breaker)
    assert refused(breaker) == PAUSE_S
    clock.now += PAUSE_S
    breaker.check()


def test_a_try_that_is_cancelled_leaves_the_next_one_to_others(breaker: Breaker, clock: Clock) -> None:
    opened(breaker)
    clock.now += PAUSE_S
    with pytest.raises(asyncio.CancelledError), breaker.watching():
        raise asyncio.CancelledError
    breaker.check()
    fail(breaker)
    assert refused(breaker) == PAUSE_S


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (LLMConnectionError(), True),
        (LLMTimeoutError(silent=True), True),
        (LLMTimeoutError(silent=False), False),
        (LLMBusyError(), False),
        (ModelUnavailableError(), False),
        (LLMError("reports: out of memory"), False),
    ],
)
def test_only_a_server_that_does_not_answer_is_down(breaker: Breaker, error: LLMError, counts: bool) -> None:
    for _ in range(FAILURES_TO_OPEN):
        fail(breaker, error)
    if counts:
        refused(breaker)
    else:
        breaker.check()


def test_a_slow_answer_does_not_make_up_for_a_connection_that_failed(breaker: Breaker) -> None:
    for _ in range(FAILURES_TO_OPEN - 1):
        fail(breaker)
    fail(breaker, LLMTimeoutError(silent=False))
    fail(breaker)
    refused(breaker)


# --- the queue -----------------------------------------------------------------------------------

LATER = 3600.0


def deadline(seconds: float = LATER) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_places_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    queue = Queue(places=1, waiting=9)
    served: list[int] = []

    async def come(number: int) -> None:
        async with queue.place(deadline=deadline()):
            served.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(come(number) for number in range(10)))
    assert served == list(range(10))


async def test_without_room_to_wait_the_second_is_refused() -> None:
    queue = Queue(places=1, waiting=0)
    async with queue.place(deadline=deadline()):
        with pytest.raises(LLMBusyError):
            async with queue.place(deadline=deadline()):
                raise AssertionError("there were two")
    async with queue.place(deadline=deadline()):
        pass


async def test_a_place_is_free_again_however_its_block_ends() -> None:
    queue = Queue(places=1, waiting=0)
    for error in (LLMError, asyncio.CancelledError):
        with pytest.raises(error):
            async with queue.place(deadline=deadline()):
                raise error
    async with queue.place(deadline=deadline()):
        pass


async def test_whoever_waits_in_vain_is_told_so_and_is_no_longer_in_the_way() -> None:
    queue = Queue(places=1, waiting=1)
    async with queue.place(deadline=deadline()):
        for _ in range(3):
            with pytest.raises(LLMBusyError):
                async with queue.place(deadline=deadline(0.01)):
                    raise AssertionError("there were two")
    async with queue.place(deadline=deadline()):
        pass
