"""An answer over server-sent events while it is written: docs/answers.md has the table of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from starlette.types import Receive, Scope, Send

from api.contract import CitationOut, Confidence, Hit, QueryAnswer, Route
from api.errors import problem_in
from rag import events
from rag.errors import RAGServiceError
from rag.events import Event

# Proxies give up on a connection that is silent for 30 to 60.
HEARTBEAT_S = 10.0


async def tell(request: Request, told: AsyncGenerator[Event]) -> EventSourceResponse:
    """A response with all that is told. What fails before the first event is raised, and has a status of its own."""
    try:
        first = await anext(told)
    except BaseException:
        await told.aclose()
        raise
    return _Telling(request, first, told)


class _Telling(EventSourceResponse):
    """Ends with one `done` or one `error`, and stops the answer when its reader hangs up."""

    def __init__(self, request: Request, first: Event, told: AsyncGenerator[Event]) -> None:
        # A proxy that gathers what it forwards would show all of it at the end.
        super().__init__(self._frames(request, first, told), headers={"X-Accel-Buffering": "no"})
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            frames = self.body_iterator
            assert isinstance(frames, AsyncGenerator)
            # Not in this task, which may have been cancelled.
            waiting = asyncio.create_task(_close(frames, self._told))
            _CLOSING.add(waiting)
            waiting.add_done_callback(_CLOSING.discard)

    async def _frames(self, request: Request, first: Event, told: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
        request.state.ended = "hung_up"
        pending: asyncio.Task[Event] | None = None
        event = first
        try:
            while True:
                yield _frame(event.name, _data(event))
                if isinstance(event, events.Done):
                    request.state.ended = "done"
                    return
                pending = asyncio.ensure_future(anext(told))
                while not (await asyncio.wait({pending}, timeout=HEARTBEAT_S))[0]:
                    yield KEEPALIVE_COMMENT
                event = pending.result()
        except RAGServiceError as error:
            request.state.ended = "error"
            yield _frame("error", await problem_in(request, error))
        except Exception as error:
            request.state.ended = "error"
            yield _frame("error", await problem_in(request, error))
            raise
        finally:
            if pending is not None:
                pending.cancel()


_CLOSING: set[asyncio.Task[None]] = set()


async def _close(frames: AsyncGenerator[Any], told: AsyncGenerator[Event]) -> None:
    await frames.aclose()
    # Its task has been cancelled just now, and may still be about to end.
    for _ in range(100):
        try:
            await told.aclose()
        except RuntimeError:
            await asyncio.sleep(0.01)
        else:
            return


def _frame(name: str, data: str) -> bytes:
    return format_sse_event(event=name, data_str=data)


def _data(event: Event) -> str:
    """The event as JSON, in the shapes of the whole answer."""
    match event:
        case events.Sources():
            return json.dumps(
                {
                    "query_id": event.query_id,
                    "model": event.model,
                    "sources": [Hit.of(passage).model_dump(mode="json") for passage in event.passages],
                }
            )
        case events.Token():
            return json.dumps({"text": event.text}, ensure_ascii=False)
        case events.Retracted():
            return json.dumps({"text": event.text, "reason": event.reason}, ensure_ascii=False)
        case events.Citations():
            cited = [CitationOut.model_validate(one, from_attributes=True) for one in event.citations]
            return json.dumps({"citations": [one.model_dump(mode="json") for one in cited]}, ensure_ascii=False)
        case events.Confidence():
            return Confidence.model_validate(event.confidence, from_attributes=True).model_dump_json()
        case events.Decision():
            return json.dumps({"action": event.action, "grounded": event.grounded})
        case events.Route():
            return Route.model_validate(event.route_to, from_attributes=True).model_dump_json()
        case events.Done():
            return QueryAnswer.of(event.response).model_dump_json()
