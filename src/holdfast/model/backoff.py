"""How long a failed run waits before its next attempt, and how many attempts it gets.

A `Backoff` is a finished list of waits, one between each two attempts; `wait(failures)` is all that
retrying needs. It is pure: no clock, no randomness. The same run gets the same waits on every
worker and after every restart, because jitter is derived from a seed text.

The waits are the time *between* attempts; the attempts' own time comes on top. The default (linear,
1m to 24h, 15 attempts) has 14 waits and lasts about 7 days in all; `Backoff.exponential()` has 14
waits too (1s, 2s, 4s … 1h) and lasts about 3 hours 8 minutes.

It does not decide what counts as a failure, and it does not wait itself. A policy that cannot
work is refused with `InvalidInput` when it is made, never later inside a worker.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast import durations
from holdfast.durations import Duration
from holdfast.errors import InvalidInput

MOST_ATTEMPTS = 1000
"""More is a mistake: a job that has to repeat forever is a schedule."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """A retry policy. Make one with `linear`, `exponential`, `list` or `never`."""

    waits: tuple[float, ...]
    """Seconds after the first, second, … failure."""
    shape: str = "list"
    """`linear`, `exponential` or `list`; only used by `describe`."""
    jitter: float = 0.0
    """Fraction by which a wait may be shorter or longer, 0 to 1."""

    def __post_init__(self) -> None:
        _check_number(self.jitter, "jitter", 0.0, 1.0)
        if len(self.waits) >= MOST_ATTEMPTS:
            raise InvalidInput(f"a backoff has at most {MOST_ATTEMPTS} attempts")

    @classmethod
    def linear(
        cls,
        first: Duration = "1m",
        last: Duration = "24h",
        attempts: int = 15,
        *,
        jitter: float = 0.0,
    ) -> Backoff:
        """Waits that grow from first to last in equal steps."""
        low, high = _range(first, last)
        gaps = _check_attempts(attempts) - 1
        step = (high - low) / (gaps - 1) if gaps > 1 else 0.0
        return cls(tuple(min(low + step * n, high) for n in range(gaps)), "linear", jitter)

    @classmethod
    def exponential(
        cls,
        first: Duration = "1s",
        last: Duration = "1h",
        factor: float = 2.0,
        attempts: int = 15,
        *,
        jitter: float = 0.0,
    ) -> Backoff:
        """Waits that are multiplied by factor until they reach last, and stay there."""
        wait, high = _range(first, last)
        if wait == 0:
            raise InvalidInput("first must be above 0, because multiples of 0 are 0; write '1s'")
        _check_number(factor, "factor", 1.0, 1000.0)
        waits = []
        for _ in range(_check_attempts(attempts) - 1):
            waits.append(wait)
            wait = min(wait * factor, high)
        return cls(tuple(waits), "exponential", jitter)

    @classmethod
    def list(cls, waits: Sequence[Duration], *, jitter: float = 0.0) -> Backoff:
        """Exactly these waits: one attempt more than there are waits."""
        if isinstance(waits, (str, bytes)) or not isinstance(waits, Sequence):
            raise InvalidInput("waits must be a list of durations such as ['1s', '10s', '1m']")
        return cls(tuple(durations.seconds(w, "wait") for w in waits), "list", jitter)

    @classmethod
    def never(cls) -> Backoff:
        """One attempt: the first failure is final."""
        return cls(())

    @property
    def attempts(self) -> int:
        """How many attempts a run gets in all, the first one included."""
        return len(self.waits) + 1

    def wait(self, failures: int, seed: str = "") -> float | None:
        """Seconds to wait after the n-th failure, counted from 1; None when none is left.

        Jitter is applied when a seed (the run id) is given: same seed, same wait.
        """
        if failures < 1:
            raise InvalidInput(f"failures are counted from 1, not {failures}")
        if failures > len(self.waits):
            return None
        wait = self.waits[failures - 1]
        if not self.jitter or not seed:
            return wait
        return wait * (1 + self.jitter * _spread(f"{seed}.{failures}"))

    def describe(self) -> str:
        """One line for people: `15 attempts, 1m to 1d linear`."""
        if not self.waits:
            return "1 attempt, no retry"
        line = f"{self.attempts} attempts, {self._describe_waits()}"
        return f"{line}, jitter {self.jitter:.0%}" if self.jitter else line

    def _describe_waits(self) -> str:
        if self.shape == "list" or len(self.waits) == 1:
            shown = [durations.text(w) for w in self.waits[:6]]
            rest = len(self.waits) - len(shown)
            return "waits " + ", ".join(shown) + (f" and {rest} more" if rest else "")
        first, last = durations.text(self.waits[0]), durations.text(self.waits[-1])
        return f"{first} to {last} {self.shape}"


def _range(first: Duration, last: Duration) -> tuple[float, float]:
    low, high = durations.seconds(first, "first"), durations.seconds(last, "last")
    if low > high:
        raise InvalidInput(
            f"first ({durations.text(low)}) must not be longer than last ({durations.text(high)}): "
            "waits grow; use Backoff.list for any other order"
        )
    return low, high


def _check_attempts(attempts: object) -> int:
    if not isinstance(attempts, int) or isinstance(attempts, bool):
        raise InvalidInput(f"attempts must be a whole number, not {attempts!r}")
    if not 1 <= attempts <= MOST_ATTEMPTS:
        raise InvalidInput(
            f"attempts must be between 1 (never retry) and {MOST_ATTEMPTS}, not {attempts}"
        )
    return attempts


def _check_number(value: object, what: str, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(f"{what} must be a number, not {value!r}")
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidInput(f"{what} must be between {low:g} and {high:g}, not {value!r}")


def _spread(seed: str) -> float:
    """A number from -1 to 1 that depends on the seed only."""
    digest = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / (2**63) - 1


DEFAULT = Backoff.linear()
"""15 attempts over about 7 days."""
