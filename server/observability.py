"""Logs: events with fields, for people on a terminal and as JSON lines in the data folder."""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

import structlog


def configure_logs(level: str, file: Path) -> None:
    """Send every log line, the libraries' too, to stderr and to `file`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    shared = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
    )
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(_formatter(shared, structlog.dev.ConsoleRenderer(colors=False)))
    lines = RotatingFileHandler(file, maxBytes=20 * 2**20, backupCount=3)
    lines.setFormatter(_formatter(shared, structlog.processors.JSONRenderer()))
    root = logging.getLogger()
    root.handlers = [console, lines]
    root.setLevel(level.upper())
    for noisy in ("alembic", "aiosqlite", "sqlalchemy", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # What it would say of a failed request or start, the handlers here have said already.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)


def _formatter(shared: list, renderer: structlog.typing.Processor) -> logging.Formatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
