"""The messages of a lane that were delivered and not started, and the order in which they start.

Three queues, one for each priority. Whenever more than one of them has a message, `low` gets its
share of the starts (`worker.low_share`), and of the rest one in five is `normal` and four are
`high`. So nobody starves, and a priority that has nothing to do costs the others nothing.

The shares are those of one lane of one worker. They apply while there is a message of each
priority, which the intake ensures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from holdfast.worker.attempt import Held

HIGH: Final = 0
NORMAL: Final = 1
LOW: Final = 2
RANKS: Final = {"high": HIGH, "normal": NORMAL, "low": LOW}

LOW_SHARE: Final = 0.1
"""One start in ten: enough to keep low runs moving, too little for the others to notice."""
NORMAL_SHARE: Final = 0.2
"""The share of `normal` where `high` waits too: one busy high job must not stop the rest."""


def shares(low: float) -> tuple[float, float, float]:
    """The share of starts that each rank gets while all of them have messages."""
    return (1 - low) * (1 - NORMAL_SHARE), (1 - low) * NORMAL_SHARE, low


class Backlog:
    """Messages that wait for a place, by priority and then in order of arrival.

    Nearly all messages are normal, so those cost little more than in a plain queue.
    """

    __slots__ = ("_high", "_low", "_low_share", "_low_turn", "_normal", "_normal_turn", "_others")

    def __init__(self, low_share: float = LOW_SHARE) -> None:
        self._normal: deque[Held] = deque()
        self._high: deque[Held] = deque()
        self._low: deque[Held] = deque()
        self._others = 0
        """How many are not normal."""
        self._low_share = low_share
        self._low_turn = 0.0
        self._normal_turn = 0.0
        """How much of a start each has earned; it is their turn at 1."""

    def __len__(self) -> int:
        return len(self._normal) + self._others

    def __iter__(self) -> Iterator[Held]:
        for rank in (HIGH, NORMAL, LOW):
            yield from self._of(rank)

    def _of(self, rank: int) -> deque[Held]:
        return self._normal if rank == NORMAL else self._high if rank == HIGH else self._low

    def waiting(self, rank: int) -> int:
        """How many messages of a rank wait."""
        return len(self._of(rank))

    def append(self, held: Held) -> None:
        """Add a message that was just delivered."""
        if held.rank == NORMAL:
            self._normal.append(held)
        else:
            self._of(held.rank).append(held)
            self._others += 1

    @property
    def first(self) -> Held:
        """The message whose turn it is."""
        return self._of(self._next())[0] if self._others else self._normal[0]

    def pop(self) -> Held:
        """Remove the message whose turn it is."""
        if not self._others:
            return self._normal.popleft()
        rank = self._next()
        if self._low and (self._high or self._normal):
            self._low_turn += self._low_share - (rank == LOW)
        if rank != LOW and self._high and self._normal:
            self._normal_turn += NORMAL_SHARE - (rank == NORMAL)
        self._others -= rank != NORMAL
        return self._of(rank).popleft()

    def _next(self) -> int:
        high, normal, low = self._high, self._normal, self._low
        if low and (not (high or normal) or self._low_turn + self._low_share >= 1):
            return LOW
        if normal and (not high or self._normal_turn + NORMAL_SHARE >= 1):
            return NORMAL
        return HIGH

    def late(self, before: float) -> Iterator[Held]:
        """Remove the messages that arrived before an instant, the oldest of each rank first."""
        for rank in (HIGH, NORMAL, LOW):
            waiting = self._of(rank)
            while waiting and waiting[0].since < before:
                self._others -= rank != NORMAL
                yield waiting.popleft()
