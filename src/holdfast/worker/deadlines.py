"""Deadlines of attempts: one timer for all of them.

Nearly every attempt ends long before its time is over. A timer of the loop for each would be the
most expensive part of a short run; so each only writes down its deadline, and the one timer, set to
the earliest, looks who is still there when it rings.
"""

from __future__ import annotations

import asyncio

from holdfast.worker.held import Held, Interrupt


class Deadlines:
    """Interrupts attempts whose time is over."""

    def __init__(self) -> None:
        self._due: dict[Held, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, held: Held, seconds: float) -> None:
        """Interrupt it after so long, unless it has ended."""
        loop = asyncio.get_running_loop()
        due = self._due[held] = loop.time() + seconds
        if self._timer is None or due < self._timer.when():
            self._set(loop, due)

    def end(self, held: Held) -> None:
        """It has ended."""
        self._due.pop(held, None)

    def _set(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(due, self._ring, loop)

    def _ring(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for held in [held for held, due in self._due.items() if due <= now]:
            del self._due[held]
            held.interrupt(Interrupt.TIMEOUT)
        if self._due:
            self._set(loop, min(self._due.values()))
