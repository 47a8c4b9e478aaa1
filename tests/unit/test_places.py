"""Places: at most `limit` at a time, in order, and nothing forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.worker.places import YIELD_EVERY, Places


class Item:
    """Something to execute; what is plain needs a thread."""

    def __init__(self, name: Any) -> None:
        self.name = name
        self.since = 1.0
        self.quick = True
        self.rank = 1
        self.job = SimpleNamespace(lane="thread" if str(name).startswith("plain") else "loop")


def _names(items: Iterable[Any]) -> list[Any]:
    return [item.name for item in items]


class Work:
    """What the places execute, held back until it is let go."""

    def __init__(self, limit: int, threads: int = 0) -> None:
        self.started: list[Any] = []
        self.freed: list[Any] = []
        self.most = 0
        self.gates: dict[Any, asyncio.Event] = {}
        self.left: dict[Any, asyncio.Future[Any]] = {}
        self.changed = asyncio.Condition()
        self.places = Places(limit, {"thread": threads} if threads else None)
        self.places.open(self._execute, self._freed)

    async def _execute(self, item: Any) -> list[asyncio.Future[Any]]:
        held = item.name
        self.started.append(held)
        self.most = max(self.most, self.places.busy)
        async with self.changed:
            self.changed.notify_all()
        if held in self.gates:
            await self.gates[held].wait()
        if isinstance(held, BaseException):
            raise held
        return [self.left[held]] if held in self.left else []

    def _freed(self, held: Any) -> None:
        self.freed.append(held.name)

    def submit(self, *items: Any, gated: bool = False) -> None:
        for item in items:
            if gated:
                self.gates[item] = asyncio.Event()
            self.places.submit(Item(item))  # type: ignore[arg-type]  # all that it looks at

    def waiting(self) -> list[Any]:
        return _names(self.places.lanes["loop"].backlog)

    async def until_started(self, count: int) -> None:
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(lambda: len(self.started) >= count)


async def test_places_limit_what_runs_at_once() -> None:
    """Never more than the limit, and the rest waits in the order it came."""
    work = Work(2)
    work.submit("a", "b", "c", "d", gated=True)
    await work.until_started(2)
    assert work.started == ["a", "b"]
    assert (work.places.busy, work.waiting()) == (2, ["c", "d"])
    work.gates["b"].set()
    await work.until_started(3)
    assert work.started == ["a", "b", "c"]
    for gate in work.gates.values():
        gate.set()
    await work.until_started(4)
    assert work.most == 2
    await work.places.close()


async def test_places_take_up_work_after_being_idle() -> None:
    """A place that found nothing to do is woken; no message waits beside a free place."""
    work = Work(3)
    for number in range(20):
        work.submit(number)
        await work.until_started(number + 1)
    assert work.started == list(range(20))
    await work.places.close()
    assert work.freed == work.started


async def test_places_are_made_only_when_needed() -> None:
    """A worker with a high limit and little to do has few tasks."""
    work = Work(1000)
    for number in range(10):
        work.submit(number)
        await work.until_started(number + 1)
    assert len(work.places._tasks) <= 2
    await work.places.close()


async def test_places_let_others_run() -> None:
    """A long backlog of runs that never wait does not freeze the loop."""
    work = Work(1)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    work.submit(*range(YIELD_EVERY * 5))
    await work.until_started(YIELD_EVERY * 5)
    task.cancel()
    assert turns >= 4
    await work.places.close()


async def test_places_report_what_should_never_happen() -> None:
    """An error that execution did not expect is the worker's failure, and frees what was held."""
    work = Work(2)
    broken = RuntimeError("a bug")
    work.submit(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(work.places.failure, 60)
    assert work.freed == [broken]
    work.submit("next")
    await work.until_started(2)
    await work.places.close()


async def test_close_stops_every_place() -> None:
    """Closing cancels what runs, frees it, and leaves no task behind."""
    work = Work(2)
    work.submit("a", "b", "c", gated=True)
    await work.until_started(2)
    await work.places.close()
    assert sorted(work.freed) == ["a", "b"]
    assert work.waiting() == ["c"]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert work.places.failure.cancelled()


# ---- lanes


async def test_lanes_wait_for_their_own_places() -> None:
    """A full lane holds up what needs it, and nothing else."""
    work = Work(4, threads=1)
    work.submit("plain 1", "plain 2", gated=True)
    work.submit("a", "b")
    await work.until_started(3)
    assert sorted(work.started) == ["a", "b", "plain 1"]
    work.gates["plain 1"].set()
    await work.until_started(4)
    work.gates["plain 2"].set()
    work.submit("plain 3", "c")
    await work.until_started(6)
    await work.places.close()


async def test_place_stays_taken_until_what_is_left_in_it_ends() -> None:
    """A handler that was given up counts as freed and keeps its place; its end frees the place."""
    work = Work(4, threads=2)
    for name in ("plain 1", "plain 2"):
        work.left[name] = asyncio.get_running_loop().create_future()
    work.submit("plain 1", "plain 2", "plain 3", "a")
    await work.until_started(3)
    lane = work.places.lanes["thread"]
    assert sorted(work.started) == ["a", "plain 1", "plain 2"]
    assert (work.places.busy, work.places.stuck, lane.blocked) == (0, 2, True)
    assert _names(work.places.given_back(0.0)) == ["plain 3"]
    work.submit("plain 4")
    work.left["plain 1"].set_result(None)
    await work.until_started(4)
    assert work.started[-1] == "plain 4"
    assert (lane.stuck, lane.blocked) == (1, False)
    await work.places.close()


async def test_place_that_somebody_cancels_is_a_failure() -> None:
    """A worker whose places are cancelled by somebody's code ends, so that it is noticed."""
    work = Work(2)
    work.submit("a", gated=True)
    await work.until_started(1)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        await asyncio.wait_for(work.places.failure, 60)
    await work.places.close()
