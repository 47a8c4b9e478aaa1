"""What a handler logged and printed, as it is stored: messages with some lines of one run.

Lines are for people. They come from user code, so readers treat every text as untrusted.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from holdfast.model.codec import Codec, Count, Instant, Name

LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
"""Levels by name, with the numbers of the logging module."""


class Logged(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line as it is stored."""

    at: Instant
    text: str
    level: str = "info"
    logger: str = ""
    extra: dict[str, Any] = {}


class LogMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Lines of one attempt, in order."""

    lines: tuple[Logged, ...]
    job: Name = ""
    attempt: Count = 0
    node: Name = ""
    epoch: Count = 0
    dropped: Count = 0
    """Lines that were lost before these: the run logged too much at once."""


LOG_MESSAGE: Final = Codec[LogMessage](LogMessage, "log lines of a run")


class LogLine(msgspec.Struct, frozen=True):
    """One line that a run logged or printed."""

    at: float
    level: str
    logger: str
    """The logger's name; `print` for what was printed, `stderr` for what went there."""
    text: str
    """May have several lines, as a traceback has."""
    attempt: int
    node: str
    extra: dict[str, Any] = {}
    """The values of `extra=`."""
    position: int = 0
    """The sequence of its message; lines read later have the same or a higher one."""


def lines_of(message: LogMessage, position: int) -> list[LogLine]:
    """The lines of one message; the first one says how many were lost before it."""
    found = [
        LogLine(
            line.at,
            line.level,
            line.logger,
            line.text,
            message.attempt,
            message.node,
            line.extra,
            position,
        )
        for line in message.lines
    ]
    if message.dropped:
        at = found[0].at if found else 0.0
        text = f"{message.dropped} lines were dropped here: the run logged too much at once"
        lost = LogLine(at, "warning", "holdfast", text, message.attempt, message.node, {}, position)
        found.insert(0, lost)
    return found
