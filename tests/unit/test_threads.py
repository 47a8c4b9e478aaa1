"""Threads that call plain functions for the event loop."""

from __future__ import annotations

import asyncio
import threading

from holdfast.threads import Threads
from tests.support import until


async def test_calls_run_in_the_order_of_submission() -> None:
    """Many calls may wait for one thread; each gets its own outcome, errors included."""
    pool, order = Threads(1, "test"), list[int]()

    def call(n: int) -> int:
        order.append(n)
        if n == 7:
            raise StopIteration
        return n

    works = [pool.submit(lambda n=n: call(n)) for n in range(500)]
    found = [await work.future for work in works]
    assert order == list(range(500))
    assert [value for value, _ in found] == [n if n != 7 else None for n in range(500)]
    assert [type(error) for _, error in found if error] == [StopIteration]
    assert pool.busy == 0
    pool.close()


async def test_call_is_either_made_or_withdrawn() -> None:
    """A call that a thread has taken cannot be withdrawn, and one withdrawn is never made."""
    pool, made = Threads(2, "test"), set[int]()
    works = [pool.submit(lambda n=n: made.add(n)) for n in range(2_000)]
    withdrawn = {n for n, work in enumerate(works) if n % 2 and work.withdraw()}
    for n, work in enumerate(works):
        if n not in withdrawn:
            await work.future
    assert made == set(range(2_000)) - withdrawn
    assert not any(works[n].began for n in withdrawn)
    assert pool.busy == 0
    pool.close()


async def test_outcome_of_a_call_whose_caller_left_is_still_told() -> None:
    """The thread cannot be stopped: it counts as busy until the call ends."""
    pool, go = Threads(1, "test"), threading.Event()
    work = pool.submit(lambda: go.wait(60))
    await until(lambda: work.began > 0, 60, "a thread")
    work.future.cancel()
    later = work.outlived()
    assert not work.withdraw()
    assert pool.busy == 1
    go.set()
    assert await asyncio.wait_for(later, 60) == (True, None)
    assert pool.busy == 0
    pool.close()


async def test_closed_threads_end() -> None:
    """What waits is not called; the thread that is busy ends after its call."""
    pool, go, made = Threads(1, "closing"), threading.Event(), list[int]()
    first = pool.submit(lambda: go.wait(60))
    await until(lambda: first.began > 0, 60, "a thread")
    pool.submit(lambda: made.append(1))
    pool.close()
    go.set()
    await first.future
    await until(lambda: not any(t.name == "closing" for t in threading.enumerate()), 60, "its end")
    assert made == []
