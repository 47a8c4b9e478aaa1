"""Waiting for NATS, in one place: repeat a step until it works, or repeat it forever.

`retrying` is for a step that must succeed before its caller can continue, `starting` for one that a
role needs before it can work, `repeating` for upkeep that may fail now and then. All only repeat
idempotent steps: an unknown outcome is repeated too.

A failure is logged once when it begins and once when it is over, never for each attempt.
Cancellation always passes through.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from holdfast.clock import Clock
from holdfast.errors import HoldfastError, NotFound, TryAgain

log = logging.getLogger("holdfast.retrying")

T = TypeVar("T")
Kinds = type[HoldfastError] | tuple[type[HoldfastError], ...]

FIRST_PAUSE_SECONDS: Final = 0.1
"""The first pause: shorter than the election of a stream's leader, so that nothing waits much
longer than that."""
LONGEST_PAUSE_SECONDS: Final = 1.0
"""The longest pause: people would notice a longer one after an outage, and a shorter one burdens a
recovering server."""
PATIENCE_SECONDS: Final = 30.0
"""How long a role that starts waits for NATS: a cluster of three has elected its leaders by then.
Afterwards it ends with an error, and what started it starts it again."""


async def retrying(
    step: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    what: str,
    seconds: float = math.inf,
    on: Kinds = TryAgain,
    until: Callable[[], bool] | None = None,
    pause: float = FIRST_PAUSE_SECONDS,
) -> T:
    """Repeat a step until it works; raises its error after `seconds`, or once `until()` holds."""
    began = clock.monotonic()
    failed = False
    while True:
        try:
            found = await step()
        except on as error:
            if clock.monotonic() - began >= seconds or (until is not None and until()):
                raise
            if not failed:
                log.info("%s: %s; trying again", what, error)
                failed = True
        else:
            if failed:
                log.info("%s: done after %.1f s", what, clock.monotonic() - began)
            return found
        await clock.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def starting(step: Callable[[], Awaitable[T]], *, clock: Clock, what: str) -> T:
    """Repeat a step of a role's start for `PATIENCE_SECONDS`, also when a stream is not found.

    Roles create their streams first, but right after an election the cluster's leader may not know
    those that were created a moment ago.
    """
    return await retrying(
        step, clock=clock, what=what, seconds=PATIENCE_SECONDS, on=(TryAgain, NotFound)
    )


async def repeating(
    step: Callable[[], Awaitable[object]],
    *,
    clock: Clock,
    every: float | Callable[[], float],
    what: str,
    on: Kinds = HoldfastError,
    wake: asyncio.Event | None = None,
    at_once: bool = False,
) -> None:
    """Do a step `every` few seconds, and whenever `wake` is set, until cancelled.

    The first time comes after the first pause, unless `at_once`.
    """
    failing = ""
    while True:
        if not at_once:
            await _pause(clock, every() if callable(every) else every, wake)
        at_once = False
        try:
            await step()
        except on as error:
            if str(error) != failing:
                log.info("%s failed: %s; trying again", what, error)
            failing = str(error)
        else:
            if failing:
                log.info("%s works again", what)
            failing = ""


async def _pause(clock: Clock, seconds: float, wake: asyncio.Event | None) -> None:
    if wake is None:
        await clock.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await wake.wait()
    except TimeoutError:
        pass
    wake.clear()
