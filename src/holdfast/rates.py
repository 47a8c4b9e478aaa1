"""Rates: how often somebody may send a request, and how often a log line may repeat."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from holdfast.clock import Clock

MOST_KEYS: Final = 10_000
"""Users and addresses a limiter remembers: about 1 MB, however many addresses an attacker has."""
EVERY_SECONDS: Final = 60.0
"""Pause between two lines: frequent enough for people to notice, and at most 1,440 lines a day."""
MOST_KINDS: Final = 1_000
"""Kinds remembered; beyond that all are forgotten, to bound memory."""


class RateLimiter:
    """A token bucket per key: `burst` requests at once, then `rate` per second."""

    def __init__(self, rate: float, burst: float, now: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = now
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, key: str = "") -> float:
        """Count a request; returns 0 if it is allowed, else the seconds to wait."""
        if not self._rate:
            return 0.0
        now = self._now()
        left, at = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        taken = left >= 1
        self._left[key] = (left - 1 if taken else left, now)
        if len(self._left) > MOST_KEYS:  # forget the key that has been quiet longest
            del self._left[next(iter(self._left))]
        return 0.0 if taken else (1 - left) / self._rate


class Sparse:
    """Warns at most once a minute per kind, so that what anyone can trigger does not fill a log."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[object, tuple[float, int]] = {}

    def warn(self, kind: object, text: str, *args: object) -> None:
        """Log a warning unless one of its kind was logged within `EVERY_SECONDS`."""
        now = self._clock.monotonic()
        last, left_out = self._kinds.get(kind, (-EVERY_SECONDS, 0))
        if now - last < EVERY_SECONDS:
            self._kinds[kind] = (last, left_out + 1)
            return
        if len(self._kinds) >= MOST_KINDS:
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        more = f" ({left_out:,} more like it since the last line)" if left_out else ""
        self._log.warning(text + more, *args)
