"""Sparse logging: messages that anybody can cause do not fill the log.

The first line of a kind is written at once, the next one a minute later at the earliest, with the
number of those that were left out.
"""

from __future__ import annotations

import logging
from typing import Final

from holdfast.clock import Clock

EVERY_SECONDS: Final = 60.0
MOST_KINDS: Final = 1_000
"""Kinds that are remembered; beyond that, all are forgotten, to bound the memory."""


class Sparse:
    """Warns once a minute for each kind."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._kinds: dict[object, tuple[float, int]] = {}

    def warn(self, kind: object, text: str, *args: object) -> None:
        """Write a warning unless one of its kind was written a moment ago."""
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
