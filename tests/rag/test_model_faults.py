"""Everything that a model server can do wrong, many times over: a typed error in time, and never half an answer."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable

import pytest

from rag import prompt
from rag.errors import LLMError
from rag.generate import Draft, Generator, ServerGenerator
from rag.grade import SCHEMA, SYSTEM_PROMPT, lay_out
from tests.fakes import Exchange, refusing_url
from tests.fakes.chat import FAULTS
from tests.rag.model_servers import PROVIDERS, Listener, ModelServer, client_of, model_server
from tests.rag.passages import passage

PROMPT = prompt.build("When do backups run?", [passage("Backups run at night.")], [], nonce="0a1b2c")
GRADING = [
    {"role": "system", "content": SYSTEM_PROMPT},
    {"role": "user", "content": lay_out("When?", "At night.", [passage("Backups run at night.")], nonce="0a1b2c")},
]
# How a model is called: for an answer at once, for one that is followed, for a grade.
WAYS = ("written", "streamed", "graded")
# What one call is given. A fault that hangs takes all of it.
DEADLINE_S = 0.4
# What an error may come late.
GRACE_S = 1.0
AT_ONCE = 5
TICK_S = 0.02

DOWN = "down"  # nothing listens
CUT_ANYWHERE = "cut_anywhere"  # a good answer up to some byte, and then the end, in one of three ways
MODES = (*FAULTS, DOWN, CUT_ANYWHERE)


class Starvation:
    """The seconds that this process was not run at all: a machine that does other things is no late error.

    What the process itself did, its loop held up by its own work, is none of them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        while True:
            wall, processor = time.monotonic(), time.process_time()
            await asyncio.sleep(TICK_S)
            gap = time.monotonic() - wall - TICK_S - (time.process_time() - processor)
            # Less is what any timer is late.
            self.seconds += gap if gap > TICK_S else 0.0


@pytest.fixture
async def starvation() -> AsyncIterator[Starvation]:
    starvation = Starvation()
    watch = asyncio.create_task(starvation.watch())
    yield starvation
    watch.cancel()


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_every_fault_is_a_typed_error_in_time_and_never_an_answer(
    provider: str, starvation: Starvation, scaled: Callable[..., int], figure: Callable[[str], None]
) -> None:
    trials = scaled(test=3, ci=9, prove=100)
    numbers = random.Random(5)
    errors: set[str] = set()
    worst = 0.0
    with model_server(provider, answer=lambda messages: "Backups run at night. [S1-0a1b2c]") as server:
        client = server.client()
        nowhere = client_of(provider, refusing_url())
        census = len(asyncio.all_tasks())
        for mode in MODES:
            server.fake.fault = mode
            server.fake.server.answer_with = server.fake.serve
            if mode == CUT_ANYWHERE:
                server.plays(cutting(server, random.Random(numbers.random())))
            places = asyncio.Semaphore(AT_ONCE)

            async def once(way: str, mode: str = mode, places: asyncio.Semaphore = places) -> tuple[LLMError, float]:
                async with places:
                    # A generator of its own: the breaker of a shared one would answer for the server.
                    generator = ServerGenerator(server.settings(), nowhere if mode == DOWN else client)
                    starved = starvation.seconds
                    error, took_s = await failing(generator, mode, way)
                    await asyncio.sleep(2 * TICK_S)
                    return error, took_s - (starvation.seconds - starved)

            for error, took_s in await asyncio.gather(*(once(WAYS[trial % len(WAYS)]) for trial in range(trials))):
                assert took_s <= DEADLINE_S + GRACE_S, mode
                errors.add(type(error).__name__)
                worst = max(worst, took_s - DEADLINE_S)
            # Nothing goes on behind the error.
            assert len(asyncio.all_tasks()) == census, mode
        await client.close()
        await nowhere.close()
    figure(
        f"{provider}: {len(MODES)} faults × {trials}: {len(MODES) * trials} typed errors of {len(errors)} kinds,"
        f" 0 answers, at most {worst:.2f} s after the deadline of {DEADLINE_S} s"
    )


async def failing(generator: Generator, mode: str, way: str) -> tuple[LLMError, float]:
    """The error of a call that has to have one, and the seconds that it took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    draft: Draft | None = None
    try:
        if way == "graded":
            draft = await generator.ask(
                GRADING, model="llama3.2", response_tokens=32, schema=SCHEMA, deadline=started + DEADLINE_S
            )
        else:
            sink = Listener() if way == "streamed" else None
            draft = await generator.write(PROMPT, model="llama3.2", sink=sink, deadline=started + DEADLINE_S)
    except LLMError as error:
        return error, loop.time() - started
    raise AssertionError(f"{mode}, {way}, gave an answer: {draft}")


def cutting(server: ModelServer, numbers: random.Random) -> Callable[[Exchange], None]:
    """Streams of a good answer that end at a random byte before the one that completes it."""
    dialect = server.dialect
    words = [dialect.token(word) for word in ("Backups", " run", " at", " night.", " [S1-0a1b2c]")]
    last = dialect.end("stop")
    whole = b"".join(words) + last[: last.rindex(b"}", 0, len(last.partition(b"[DONE]")[0]))]
    assert json.loads(whole.splitlines()[-1].removeprefix(b"data: ") + b"}")

    def stream(exchange: Exchange) -> None:
        exchange.begin_stream(media_type=dialect.media_type)
        sent = whole[: numbers.randint(0, len(whole))]
        if sent:
            exchange.stream(sent)
        numbers.choice((exchange.end_stream, exchange.cut, exchange.reset))()

    return stream
