"""Runs the application under uvicorn, after the barrier was checked and before a port is open."""

from __future__ import annotations

import asyncio
import ipaddress
import logging

import structlog
import uvicorn

from api.app import create_app
from api.identity import Door, loopback_door, new_token, service_door
from rag import deployment, screen
from rag.errors import AccessError
from rag.settings import Settings


def run(settings: Settings, *, host: str, port: int) -> None:
    """Serve until interrupted. Raises before listening when access control would not hold."""
    _log_as_json()
    door, token = _door(settings, host)
    place = deployment.locate(settings)
    asyncio.run(_check(place, settings))
    app = create_app(settings, database=place.open(settings), door=door)
    if token is not None:
        screen.out.print(f"url: http://{host if ':' not in host else f'[{host}]'}:{port}")
        screen.out.print(f"token: {token}")
        screen.out.print(f"docs: http://{host}:{port}/docs")
        if place.server is not None:
            screen.out.print("The embedded database works as tenant `default`.")
    uvicorn.run(app, host=host, port=port, log_config=None, access_log=False, server_header=False)


def _door(settings: Settings, host: str) -> tuple[Door, str | None]:
    """The trusted service's door when it has a key; else the loopback door, with its token."""
    if settings.rag_service_key_sha256 is not None or not _is_loopback(host):
        return service_door(settings), None
    token = new_token()
    return loopback_door(token), token


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise AccessError("--host must be an address or localhost", field="host") from None


async def _check(place: deployment.Deployment, settings: Settings) -> None:
    async with place.open(settings) as database:
        await database.check_barrier(dimensions=settings.rag_embedding_dimensions, strict=settings.rag_strict)


def _log_as_json() -> None:
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(),
    )
