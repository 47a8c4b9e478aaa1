"""One timer for the deadlines of all attempts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from holdfast.worker.attempt import Call, Deadlines, Held, Interrupt


def held() -> Held:
    nothing: Any = SimpleNamespace()
    return Held(nothing, nothing, 0.0)


async def test_attempts_are_interrupted_in_the_order_of_their_deadlines() -> None:
    """Whatever the order in which they began; those that ended are left alone."""
    deadlines, told = Deadlines(), []
    all_held = {seconds: held() for seconds in (0.3, 0.1, 0.2, 0.05)}

    async def forever() -> tuple[Any, None]:
        await asyncio.Event().wait()
        return None, None

    for seconds, one in all_held.items():
        call = Call()
        call.task = asyncio.create_task(forever())
        _ = one.begin(call, 60)
        deadlines.begin(one, seconds)
    deadlines.end(all_held[0.05])

    async def wait(seconds: float) -> None:
        await all_held[seconds].waiter
        told.append(seconds)

    await asyncio.wait_for(asyncio.gather(*(wait(s) for s in (0.1, 0.2, 0.3))), 10)
    assert told == [0.1, 0.2, 0.3]
    assert [one.cause for one in all_held.values()] == [Interrupt.TIMEOUT] * 3 + [None]


async def test_deadline_after_all_others_ended_is_kept() -> None:
    """The timer that rang for nobody, or was never needed, does not keep a later one from it."""
    deadlines, early, late = Deadlines(), held(), held()
    deadlines.begin(early, 0.02)
    deadlines.end(early)
    await asyncio.sleep(0.05)
    deadlines.begin(late, 0.02)
    async with asyncio.timeout(60):
        while late.cause is None:
            await asyncio.sleep(0.01)
    assert early.cause is None


async def test_ending_twice_or_without_a_deadline_is_nothing() -> None:
    """An attempt without a limit ends like any other."""
    deadlines, one = Deadlines(), held()
    deadlines.end(one)
    deadlines.begin(one, 60)
    deadlines.end(one)
    deadlines.end(one)
    assert not deadlines._due
