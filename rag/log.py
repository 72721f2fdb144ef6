"""How the service and its workers write their log."""

from __future__ import annotations

import logging
import sys

import structlog


def as_json() -> None:
    """Events of ours, and warnings of libraries, one JSON object a line on standard output."""
    steps: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    as_json = structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *steps, as_json],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.WriteLoggerFactory(),
    )
    libraries = logging.StreamHandler(sys.stdout)
    libraries.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=steps,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, as_json],
        )
    )
    logging.basicConfig(handlers=[libraries], level=logging.WARNING)
    logging.getLogger("psycopg.pool").setLevel(logging.WARNING)  # which the other commands leave out
