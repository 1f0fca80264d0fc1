"""Log lines to stderr: transitions only, as key=value or as JSON; silence means nothing changed.

Each begins with its time, in UTC and to the millisecond.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum

_FIELDS = "fields"


class LogFormat(StrEnum):
    """How log lines look."""

    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    """The least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        # What is quoted and escaped can't add a line, nor reach a terminal.
        words = [f"{key}={_quoted(value)}" for key, value in fields.items()]
        return " ".join([_time(record), record.levelname.lower(), _quoted(record.getMessage())[1:-1], *words])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        head = {"time": _time(record), "level": record.levelname.lower(), "event": record.getMessage()}
        return _quoted(head | fields)


def _time(record: logging.LogRecord) -> str:
    made = datetime.fromtimestamp(record.created, UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: object) -> str:
    """Return JSON in printable ASCII alone."""
    return json.dumps(value, default=str).replace("\x7f", "\\u007f")


def configure(style: LogFormat, level: LogLevel) -> None:
    """Send this package's log to stderr in a format, from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if style is LogFormat.JSON else _TextFormatter())
    logger = logging.getLogger("kura_shaper")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())


def event(logger: logging.Logger, name: str, *, level: int = logging.INFO, **fields: object) -> None:
    """Write one event with its fields."""
    logger.log(level, name, extra={_FIELDS: fields})
