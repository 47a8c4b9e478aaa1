"""Executing a message when something is in the way: nothing is lost, and no worker stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Retry, Snooze
from holdfast.errors import BrokerError, NotConnected, PayloadTooLarge, RunCancelled, RunFailed
from holdfast.model import run as runs
from holdfast.model.run import RunRecord
from holdfast.names import H_MSG_ID
from holdfast.testing import FakeClock, Memory, memory


@pytest.fixture
def app() -> Holdfast:
    return Holdfast("shop")


def fail_times(target: Any, method: str, errors: list[Exception]) -> list[Exception]:
    """Let a method raise these first; what is left of them tells how often it was tried."""
    real = getattr(target, method)

    async def failing(*args: Any, **kwargs: Any) -> Any:
        if errors:
            raise errors.pop(0)
        return await real(*args, **kwargs)

    setattr(target, method, failing)
    return errors


async def drain_patiently(mem: Memory, clock: FakeClock, waits: int) -> None:
    """Drain while something has to be repeated so many times."""
    draining = asyncio.create_task(mem.drain())
    for _ in range(waits):
        await clock.sleepers(1)
        clock.advance(5)
    await draining


# ---- what cannot be stored yet


@pytest.mark.parametrize("method", ["park", "dead_letter", "keep"])
async def test_what_cannot_be_stored_is_repeated(app: Holdfast, method: str) -> None:
    """The run is held by a node that is alive: if that gave up, nobody would ever take it."""

    @app.job(retry=Backoff.list(["1m"]) if method == "park" else Backoff.never())
    async def job(ctx: Context) -> str:
        if method == "keep":
            return "x" * 600_000
        if method == "park" and ctx.attempt == 2:
            return "done"
        raise ValueError("no")

    clock = FakeClock()
    async with memory(app, clock) as mem:
        left = fail_times(
            mem._outbox, method, [NotConnected("away"), BrokerError("disk full"), NotConnected("")]
        )
        run = await job.enqueue()
        await drain_patiently(mem, clock, 3)
        assert left == []
        await mem.advance("2m")
        if method == "dead_letter":
            with pytest.raises(RunFailed, match="ValueError: no"):
                await run.result()
            assert len(mem.dead) == 1
        else:
            assert await run.result() in ("done", "x" * 600_000)


async def test_what_was_taken_over_meanwhile_is_not_repeated(app: Holdfast) -> None:
    """Once the claim is lost, nothing more is sent: not the retry, not even an acknowledgement."""

    @app.job(retry=Backoff.list(["1m"]))
    async def job() -> None:
        raise ValueError("no")

    clock = FakeClock()
    async with memory(app, clock) as mem:
        left = fail_times(mem._outbox, "park", [NotConnected("away")] * 9)
        run = await job.enqueue()
        draining = asyncio.create_task(mem.drain())
        await clock.sleepers(1)
        found = mem.held(run.id)
        assert found is not None
        found[0].claim.lost = True
        clock.advance(5)
        await draining
        assert len(left) == 7
        assert mem._queue.waiting() == 1
        record = await mem.record(run.id)
    assert record is not None
    assert (record.state, record.failures) == ("running", 0)


async def test_retry_that_no_message_can_carry_stays_in_the_queue(app: Holdfast) -> None:
    """A body with no room for our headers waits with its consumer instead of being lost."""

    @app.job(retry=Backoff.list(["1h"]))
    async def job(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise ValueError("no")
        return ctx.attempt

    async with memory(app) as mem:
        fail_times(mem._outbox, "park", [PayloadTooLarge(2, 1)])
        run = await job.enqueue()
        await mem.advance("59m")
        assert (await run.status()).state == "failed"
        await mem.advance("1m")
        assert await run.result() == 2


# ---- what handlers raise


class Unspeakable(Exception):
    """An error that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Unspeakable(), "Unspeakable"),
        (ValueError("caf\udce9"), r"caf\\udce9"),
        (ValueError("a\x00b\r\n" + "long " * 5_000), "long"),
        (SystemExit(3), "SystemExit: 3"),
        (Snooze("soon"), "Snooze delay"),
        (Retry(delay="tomorrow"), "Retry delay"),
        (Snooze(-5), "between 0 and 100 years"),
        (BaseExceptionGroup("several", [ValueError("x")]), "several"),
    ],
    ids=["unspeakable", "surrogate", "long", "exit", "snooze", "retry", "negative", "group"],
)
async def test_any_error_is_a_failed_attempt(
    app: Holdfast, error: BaseException, text: str
) -> None:
    """Whatever a handler raises ends its attempt, and never the worker."""

    @app.job(retry=Backoff.never())
    async def job() -> None:
        raise error

    async with memory(app) as mem:
        run = await job.enqueue()
        with pytest.raises(RunFailed, match=text):
            await run.result()
        assert [letter.reason for letter in mem.dead] == ["failed"]


async def test_discard_with_any_reason_ends_the_run(app: Holdfast) -> None:
    """Also one that no record could carry as it is."""

    @app.job
    async def job() -> None:
        raise Discard("caf\udce9")

    async with memory(app):
        with pytest.raises(RunCancelled, match="discarded"):
            await (await job.enqueue()).result()


async def test_result_that_is_no_json_is_a_dead_letter(app: Holdfast) -> None:
    """Trying again would not help: it is given up at once, with the reason."""

    @app.job
    async def job() -> object:
        return object()

    async with memory(app) as mem:
        with pytest.raises(RunFailed):
            await (await job.enqueue()).result()
        assert [letter.reason for letter in mem.dead] == ["invalid"]


# ---- what the wire brings


async def test_record_that_cannot_be_read_stops_no_worker(app: Holdfast) -> None:
    """A record by another hand leaves the message in the queue, for when it is put right."""

    @app.job
    async def job() -> int:
        return 1

    async with memory(app) as mem:
        revision = await mem._store.put("job/a", b'{"state": "dancing"}', expected=0)
        run = await job.options(key="a").enqueue()
        assert await mem.drain() == 1
        assert mem._queue.waiting() == 1
        good = runs.encode(RunRecord("failed", "default", "job"))
        await mem._store.put("job/a", good, expected=revision)
        mem._queue.returned(next(iter(mem._queue._messages)))
        assert await run.result() == 1


async def test_payload_that_does_not_fit_is_a_dead_letter(app: Holdfast) -> None:
    """Any bytes may come over the wire: they are kept, with the reason."""

    @app.job
    async def job(n: int) -> None: ...

    bodies = [b"\xff\xfe", b"[" * 5_000, b'{"n": "x"}', b"NaN", b"", b'{"n": 1, "m": 2}']
    async with memory(app) as mem:
        for number, body in enumerate(bodies):
            mem._queue.job("default", "job", body, {H_MSG_ID: f"run-{number}"})
        await mem.drain()
        assert [letter.body for letter in mem.dead] == bodies
        assert {letter.reason for letter in mem.dead} == {"invalid"}
