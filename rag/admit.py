"""Who may speak to a model server now: so many at once, some more in a queue, and nobody while it is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from rag.errors import LLMBusyError, LLMConnectionError, LLMError, LLMTimeoutError

# One refused connection is a restart; five in a row, without an answer in between, are a server that is gone.
FAILURES_TO_OPEN = 5
# As long as anybody can be refused although the server is back.
PAUSE_S = 10.0


class Queue:
    """At most `places` at once, in the order in which they came; `waiting` more may wait."""

    def __init__(self, *, places: int, waiting: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._room = waiting
        self._waiting = 0

    @asynccontextmanager
    async def place(self, *, deadline: float) -> AsyncIterator[None]:
        """Wait for a place, and have it until the block ends. `deadline` is a moment of the event loop's clock.

        Raises LLMBusyError when the queue is full, or no place becomes free in time.
        """
        if self._places.locked() and self._waiting >= self._room:
            raise LLMBusyError
        self._waiting += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._places.acquire()
        except TimeoutError as error:
            raise LLMBusyError from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._places.release()


class Breaker:
    """Refuses at once what would only run into a server that does not answer.

    It opens after `FAILURES_TO_OPEN` failed connections or silent timeouts in a row. After `PAUSE_S` one call
    may try; its success closes the breaker, and its failure opens it for as long again.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self._trying = False

    def check(self) -> None:
        """Raise LLMConnectionError while open."""
        if self._failures < FAILURES_TO_OPEN:
            return
        left_s = self._open_until - self._clock()
        if left_s > 0 or self._trying:
            raise LLMConnectionError(retry_after_s=max(left_s, 1.0))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a call to the server, and draw the conclusions. Raises LLMConnectionError while open."""
        self.check()
        self._trying = trying = self._failures >= FAILURES_TO_OPEN
        try:
            yield
        except LLMConnectionError:
            self._failed()
            raise
        except LLMTimeoutError as error:
            if error.silent:
                self._failed()
            raise
        except LLMError:
            # A refusal is an answer as well.
            self._failures = 0
            raise
        else:
            self._failures = 0
        finally:
            if trying:
                # Also when it was cancelled, and nothing is known: the next one may try.
                self._trying = False

    def _failed(self) -> None:
        self._failures += 1
        self._open_until = self._clock() + PAUSE_S
