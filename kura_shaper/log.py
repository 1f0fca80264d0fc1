"""Log lines to stderr: transitions only, as key=value or as JSON; silence means nothing changed."""

from __future__ import annotations

import json
import logging
import sys
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
        # json.dumps quotes and escapes, so a hostile value can't add a line.
        words = [f"{key}={json.dumps(value, default=str)}" for key, value in fields.items()]
        return " ".join([record.levelname.lower(), json.dumps(record.getMessage())[1:-1], *words])


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        head = {"time": self.formatTime(record), "level": record.levelname.lower(), "event": record.getMessage()}
        return json.dumps(head | fields, default=str)


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
