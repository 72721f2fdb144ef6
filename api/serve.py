"""Runs the application under uvicorn, after the barrier was checked and before a port is open."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog
import uvicorn

from api.app import create_app
from api.identity import Door, configured_door, loopback_door, new_token
from rag import command, deployment, screen, work
from rag.command import JOBS_AT_ONCE
from rag.database import MIXED_UP, Database
from rag.errors import AccessError, BarrierDown, RAGServiceError
from rag.log import as_json
from rag.settings import Settings

log = structlog.get_logger(__name__)


def run(settings: Settings, *, host: str, port: int) -> None:
    """Serve until interrupted. Raises before listening when access control would not hold."""
    door, token = _door(settings, host)
    as_json()
    place = deployment.locate(settings)
    asyncio.run(_check(place, settings))
    database = place.open(settings)
    app = create_app(settings, database=database, door=door)
    announcement = []
    if token is not None:
        url = f"http://{host if ':' not in host else f'[{host}]'}:{port}"
        announcement = [f"url: {url}", f"token: {token}", f"docs: {url}/docs"]
        if place.server is not None:
            announcement.append("The embedded database works as tenant `default`.")
    config = uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False, server_header=False)
    # An interrupt from the keyboard is how it is meant to end.
    with contextlib.suppress(KeyboardInterrupt):
        # Of the embedded database this is the worker as well: nobody has to start a second command for it.
        worker = None if place.server is None else partial(_work, place, settings)
        command.keep_what_is_loaded()
        _Server(config, announcement, database, worker).run()
    if database.is_down:
        raise BarrierDown(MIXED_UP)


class _Server(uvicorn.Server):
    """Announces itself once it listens: on a port that is taken, somebody else would get the token.

    Ends by itself when the barrier is down: started again, it is checked before the port is open.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        announcement: list[str],
        database: Database,
        worker: Callable[[asyncio.Event], Coroutine[Any, Any, None]] | None,
    ) -> None:
        super().__init__(config)
        self._announcement = announcement
        self._database = database
        self._worker = worker
        self._working: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for line in self._announcement:
            screen.out.print(line)
        if self._worker is not None and self.started:
            self._working = asyncio.create_task(self._worker(self._stopping))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        self._stopping.set()
        if self._working is not None:
            await self._working

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or self._database.is_down


async def _work(place: deployment.Deployment, settings: Settings, stopping: asyncio.Event) -> None:
    """Do jobs beside the requests. Whatever ends that does not end the service, which says in /health who works."""
    try:
        async with work.opened(settings, place.open_worker(settings)) as bench:
            await work.work(bench, url=place.worker_url, concurrency=JOBS_AT_ONCE, until_empty=False, stopping=stopping)
    except RAGServiceError as error:
        log.warning("worker_ended", reason=error.message)


def _door(settings: Settings, host: str) -> tuple[Door, str | None]:
    """The door for those that the settings let in; else, on loopback alone, one with a token of its own."""
    on_loopback = _is_loopback(host)
    door = configured_door(settings)
    if door is not None:
        return door, None
    if not on_loopback:
        raise AccessError("to serve beyond loopback, set RAG_SERVICE_KEYS=1 or RAG_JWT_ISSUER and what belongs to it")
    token = new_token()
    return loopback_door(token), token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise AccessError("--host must be an address or localhost", field="host") from None


async def _check(place: deployment.Deployment, settings: Settings) -> None:
    async with place.open(settings) as database:
        await database.prove_barrier(dimensions=settings.embedding_widths, strict=settings.rag_strict)
