"""The runs that a run caused, counted by state.

The counts are exact if `complete`. Otherwise the search ran out of time: there are at least that
many, and `back_to` says how far it got. A run that was enqueued before its cause was accepted
cannot exist, so nothing older than the cause is read.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import msgspec

from holdfast.clock import Clock
from holdfast.model.run import TERMINAL
from holdfast.ownership.history import CLOCKS_SECONDS
from holdfast.status.listing import RunFilter, RunInfo, RunPages

PAGE: Final = 1_000
"""Runs per step; the time is checked between steps."""
SECONDS: Final = 0.25
"""How long a page may wait for this: a run may have caused thousands."""


class Children(msgspec.Struct, frozen=True):
    """The runs that one run led to."""

    counts: dict[str, int]
    """By state."""
    newest: list[RunInfo]
    """The first ones found, newest change first."""
    complete: bool
    back_to: float = 0.0
    """How far an incomplete search has read."""

    @property
    def open(self) -> bool:
        """Whether some have not ended."""
        return any(state not in TERMINAL for state in self.counts)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


async def children_of(
    pages: RunPages,
    clock: Clock,
    run: str,
    accepted: float,
    shown: int = 50,
    seconds: float = SECONDS,
) -> Children:
    """The runs whose cause is `run`, which was accepted at `accepted`."""
    wanted = RunFilter(cause=run, since=max(0.0, accepted - CLOCKS_SECONDS))
    found: dict[str, RunInfo] = {}
    deadline, cursor = clock.monotonic() + seconds, ""
    while True:
        page = await pages.page(wanted, PAGE, cursor)
        for info in page.runs:
            found.setdefault(info.run, info)  # a run that was sent again has several ends
        cursor = page.older
        if not cursor or clock.monotonic() > deadline:
            break
    counts = Counter(info.state for info in found.values())
    newest = list(found.values())[:shown]
    return Children(dict(counts), newest, not cursor, page.back_to if cursor else 0.0)
