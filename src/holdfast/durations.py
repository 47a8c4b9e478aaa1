"""Parses durations and instants as people write them; nothing else in Holdfast does.

A duration: `30`, `1.5`, `"10m"`, `"1h30m"`, `timedelta(hours=1)`. An instant: a datetime with a
time zone, seconds since 1970, or `"2026-11-16T09:00:00+01:00"`. Inside Holdfast both are seconds.
Anything else raises `InvalidInput`.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import Final

from holdfast.errors import InvalidInput

Duration = float | int | str | timedelta

NANO: Final = 1_000_000_000
"""Nanoseconds in a second: the server's unit for durations and times."""
MINUTE: Final = 60
HOUR: Final = 60 * MINUTE
DAY: Final = 24 * HOUR
"""In seconds, like every duration inside Holdfast."""

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)")
_LONGEST = 100 * 366 * DAY  # a hundred years: longer is a mistake
_LONGEST_TEXT = 100  # matching takes quadratic time, and the text is untrusted
LATEST = 4_102_444_800
"""The year 2100: anything later is a wrong unit, such as milliseconds."""


def seconds(value: Duration, what: str = "duration") -> float:
    """Parse a duration to seconds; rejects negative, infinite and unreadable ones."""
    result = _read(value, what)
    if not math.isfinite(result) or result < 0 or result > _LONGEST:
        raise InvalidInput(f"{what} must be between 0 and 100 years, not {_shown(value)}")
    return result


def _read(value: Duration, what: str) -> float:
    if isinstance(value, bool):
        raise InvalidInput(f"{what} must be a number of seconds or a text such as '10m'")
    if isinstance(value, (int, float)):
        return float(value) if abs(value) <= _LONGEST else math.inf
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, str):
        return _read_text(value.strip(), what)
    raise InvalidInput(
        f"{what} must be seconds, a text such as '10m' or a timedelta, not {_shown(value)}"
    )


def _shown(value: object) -> str:
    """A short repr for messages; survives a broken `__repr__` and huge integers."""
    try:
        return repr(value)[:80]
    except Exception:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"a value of type {type(value).__name__}"


def _read_text(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        pass
    parts = _PART.findall(text) if len(text) <= _LONGEST_TEXT else []
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise InvalidInput(
            f"{what} {text[:_LONGEST_TEXT]!r} is not readable: write for example '500ms', '30s', "
            "'1h30m', '2d'"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def instant(value: object, what: str, latest: float = LATEST) -> float:
    """Parse an instant to seconds since 1970; rejects one without a time zone."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise InvalidInput(
                f"{what} {value!r} is not a time: write it as 2026-11-16T09:00:00+01:00"
            ) from None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidInput(
                f"{what} needs a time zone: 2026-11-16T09:00:00Z, or "
                "datetime(..., tzinfo=ZoneInfo('Europe/Paris'))"
            )
        value = value.timestamp()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < latest:
        raise InvalidInput(
            f"{what} must be a time between 1970 and 2100: a datetime with a time zone, or seconds "
            "since 1970"
        )
    return float(value)


def text(value: float) -> str:
    """Format seconds briefly: `90` → `1m30s`, `1.5` → `1.5s`, `0.25` → `250ms`.

    Exact to the millisecond below a minute and to the second above; `seconds` parses it back.
    """
    value = round(value, 3)
    if 0 < value < 1:
        return f"{round(value * 1000)}ms"
    if 1 <= value < 60:
        return f"{value:g}s"
    rest, out = round(value), ""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            out += f"{count}{unit}"
    return out or "0s"
