"""Rate limits: so many requests in one go, and so many each second after that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MOST_KEYS: Final = 10_000


class Limiter:
    """A bucket of permissions for each key; it fills by itself up to its size."""

    def __init__(self, rate: float, burst: float, now: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = burst
        self._now = now
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, key: str) -> float:
        """Take a permission: 0 when there was one, else the seconds until there will be."""
        if not self._rate:
            return 0.0
        now = self._now()
        left, at = self._left.pop(key, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        taken = left >= 1
        self._left[key] = (left - 1 if taken else left, now)
        if len(self._left) > MOST_KEYS:  # the one that has been quiet for longest is forgotten
            del self._left[next(iter(self._left))]
        return 0.0 if taken else (1 - left) / self._rate
