"""Rate-limited logging, so that messages anyone can trigger do not fill the log.

The first line of a kind is logged at once, the next at least a minute later, with the number of
lines left out.
"""

from __future__ import annotations

import logging
from typing import Final

from holdfast.clock import Clock

EVERY_SECONDS: Final = 60.0
MOST_KINDS: Final = 1_000
"""Kinds remembered; beyond that all are forgotten, to bound memory."""


class Sparse:
    """Warns at most once a minute per kind."""

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
