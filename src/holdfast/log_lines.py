"""Log lines: as text or as JSON, without secrets.

They carry what was given as `extra=`, and lines of a run its run, job, attempt, node and epoch:
whatever a handler logs, through any logger, belongs to the attempt in `current_attempt`.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import time
from contextvars import ContextVar
from typing import Any, Final, Protocol

from holdfast import visible
from holdfast.redaction import scrub

RUN_FIELDS: Final = ("run", "job", "attempt", "node", "epoch")


class Attempted(Protocol):
    """The attempt that the current code belongs to."""

    printed: dict[str, str]
    """The unfinished lines that it has printed, by stream."""

    def log_fields(self) -> dict[str, Any]:
        """The fields of its log lines: `RUN_FIELDS`."""
        ...

    def conceal(self, text: str) -> str:
        """Removes the secrets of its payload from a text."""
        ...


current_attempt: ContextVar[Attempted | None] = ContextVar("holdfast_attempt", default=None)
"""Set while a handler runs, in its task or thread."""

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",  # from Python 3.12 on
    "color_message",  # uvicorn's second copy of its message
}


def extra_fields(record: logging.LogRecord) -> dict[str, Any]:
    """What was given as `extra=` with a log line."""
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


def traceback_in(record: logging.LogRecord) -> str:
    """The traceback of a line; one of another process comes as text."""
    if record.exc_info and not record.exc_text:
        return logging.Formatter().formatException(record.exc_info)
    return record.exc_text or ""


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of a line's run, and its extra ones."""
    attempt = current_attempt.get()
    return {**(attempt.log_fields() if attempt else {}), **extra_fields(record)}


def _concealed(text: str) -> str:
    attempt = current_attempt.get()
    return scrub(attempt.conceal(text) if attempt else text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line[f"extra_{name}" if name in line else name] = value
        if trace := traceback_in(record):
            line["traceback"] = trace
        return _concealed(json.dumps(line, default=str))


class TextFormatter(logging.Formatter):
    """One readable line, whatever is in its message, with its fields at the end."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        fields = " ".join(f"{k}={v}" for k, v in _fields(record).items())
        name = record.name.removeprefix("holdfast.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {name}: "
        line += record.getMessage() + (f"  [{fields}]" if fields else "")
        line = visible.one_line(_concealed(line))
        if trace := traceback_in(record):
            # Indented, so that no text in it can look like a log line.
            told = visible.block(_concealed(trace))
            line += "\n" + textwrap.indent(told, "  ", lambda _: True)
        return line


def configure_logging(level: str = "info", style: str = "text") -> None:
    """Log to standard error; called by the command line only, never on import."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("nats").setLevel(logging.CRITICAL)
