"""Waiting for NATS: what is repeated, for how long, and what is logged."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from holdfast import errors
from holdfast.retrying import PATIENCE_SECONDS, repeating, retrying, starting
from holdfast.testing.clock import FakeClock


async def pass_time(clock: FakeClock, task: asyncio.Task[Any], pauses: int) -> None:
    """Let a task sleep and wake up to `pauses` times, a second each."""
    for _ in range(pauses):
        sleeping = asyncio.ensure_future(clock.sleepers(1))
        await asyncio.wait([sleeping, task], return_when=asyncio.FIRST_COMPLETED)
        sleeping.cancel()
        if task.done():
            return
        clock.advance(1)


class Steps:
    """Fails as it was told to, then works."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.calls = 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)
        return self.calls


@pytest.mark.parametrize(
    "kind", [errors.NotConnected, errors.Unavailable, errors.OutcomeUnknown, errors.PartlyStored]
)
def test_what_may_be_tried_again_is_one_kind(kind: type[errors.BrokerError]) -> None:
    """A caller that catches TryAgain catches all of them."""
    assert issubclass(kind, errors.TryAgain)


@pytest.mark.parametrize(
    "kind", [errors.ClaimLost, errors.NodeLost, errors.StaleTerm, errors.LeaseLost]
)
def test_being_replaced_is_never_tried_again(kind: type[errors.BrokerError]) -> None:
    """A holder that was replaced must stop: a loop that retries must not swallow it."""
    assert issubclass(kind, errors.Replaced)
    assert not issubclass(kind, errors.TryAgain)


async def test_start_waits_for_a_stream_that_the_cluster_does_not_know_yet() -> None:
    """After an election a stream that was just created may not be found; a role still starts."""
    clock = FakeClock()
    step = Steps(errors.NotFound("stream not found (10059)"), errors.Unavailable("no leader"))
    task = asyncio.create_task(starting(step, clock=clock, what="preparing"))
    await pass_time(clock, task, 4)
    assert await task == 3


async def test_start_gives_up_on_a_stream_that_never_appears() -> None:
    """A stream that nobody creates ends the start with its error, after a while."""
    clock = FakeClock()
    step = Steps(*[errors.NotFound("stream not found (10059)")] * 100)
    task = asyncio.create_task(starting(step, clock=clock, what="preparing"))
    await pass_time(clock, task, int(PATIENCE_SECONDS) + 2)
    with pytest.raises(errors.NotFound):
        await task


async def test_retrying_repeats_until_the_step_works(caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of TryAgain is repeated; the log has one line at the start and one at the end."""
    clock = FakeClock()
    step = Steps(errors.NotConnected("away"), errors.Unavailable("election"))
    with caplog.at_level(logging.INFO, "holdfast.retrying"):
        task = asyncio.create_task(retrying(step, clock=clock, what="starting"))
        await pass_time(clock, task, 2)
        assert await task == 3
    assert [r.message for r in caplog.records] == [
        "starting: away; trying again",
        "starting: done after 2.0 s",
    ]


async def test_retrying_raises_when_the_time_is_over() -> None:
    """A role that cannot start ends with the error, so that it is restarted."""
    clock = FakeClock()
    step = Steps(*[errors.Unavailable("no leader")] * 100)
    task = asyncio.create_task(retrying(step, clock=clock, what="starting", seconds=3))
    await pass_time(clock, task, 10)
    with pytest.raises(errors.Unavailable):
        await task
    assert step.calls > 2


async def test_retrying_stops_when_waiting_is_useless() -> None:
    """Once `until` holds, the error is raised at once."""
    step = Steps(*[errors.NotConnected("closed")] * 100)
    with pytest.raises(errors.NotConnected):
        await retrying(step, clock=FakeClock(), what="starting", until=lambda: True)
    assert step.calls == 1


@pytest.mark.parametrize("error", [errors.ClaimLost("theirs"), errors.Unreadable("damaged")])
async def test_retrying_raises_what_waiting_does_not_help(error: Exception) -> None:
    """Replaced and unreadable: asking again would only repeat the answer."""
    with pytest.raises(type(error)):
        await retrying(Steps(error), clock=FakeClock(), what="reading")


async def test_repeating_outlives_failures_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Upkeep that fails for an hour logs a line for each reason and one more, not thousands."""
    clock = FakeClock()
    step = Steps(*[errors.Unavailable("no leader")] * 3, *[errors.Unavailable("no stream")] * 2)
    with caplog.at_level(logging.INFO, "holdfast.retrying"):
        task = asyncio.create_task(repeating(step, clock=clock, every=1, what="upkeep"))
        await pass_time(clock, task, 8)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert step.calls >= 7
    assert [r.message for r in caplog.records] == [
        "upkeep failed: no leader; trying again",
        "upkeep failed: no stream; trying again",
        "upkeep works again",
    ]


async def test_repeating_wakes_before_its_time() -> None:
    """What may have been missed is looked at as soon as somebody says so."""
    wake, done = asyncio.Event(), asyncio.Event()

    async def step() -> None:
        done.set()

    task = asyncio.create_task(
        repeating(step, clock=FakeClock(), every=3600, what="upkeep", wake=wake)
    )
    wake.set()
    await asyncio.wait_for(done.wait(), 5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
