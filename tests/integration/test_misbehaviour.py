"""The zoo of misbehaviour on a real server: no run without an end, no bystander harmed."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from chaos.zoo import ZOO, swallows_cancellation
from holdfast import Backoff, Context, Holdfast
from holdfast.errors import RunCancelled, RunFailed
from holdfast.server import Server
from holdfast.worker.supervisor import _get
from tests import pooled_app
from tests.integration.support import Seen, dead_letters, metric, record_of, working
from tests.support import until

HARMLESS = ("failed", "done")
SLOW = ("blocks_the_loop", "holds_the_interpreter", "forks")
"""These have tests of their own, in `faults`."""


async def health(path: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await _get(path, "/health/ready"))
    return answer


async def test_zoo_harms_nobody(app: Holdfast) -> None:
    """Each misbehaviour ends its own run; bystanders of all kinds run once and end well."""
    noted: list[str] = []
    animals = {n: a for n, a in ZOO.items() if a.fate in HARMLESS and n not in SLOW}
    contract: dict[str, Any] = {"retry": Backoff.list([0.1])}
    for name, animal in animals.items():

        async def wild(animal: Any = animal) -> Any:
            return await animal.handler(noted.append)

        def tame(animal: Any = animal) -> Any:
            return animal.handler(noted.append)

        app.job(name=name, **contract)(_without_arguments(wild if animal.is_async else tame))
    starts: list[int] = []

    @app.job
    async def bystander(n: int) -> int:
        starts.append(n)
        await asyncio.sleep(0.05)
        return n

    async with working(app, concurrency=8):
        runs = {name: await app.jobs[name].enqueue() for name in animals}
        others = await bystander.enqueue_many(range(60))
        for name, run in runs.items():
            if animals[name].fate == "done":
                await run.result(60)
            else:
                with pytest.raises(RunFailed):
                    await run.result(60)
                record = await record_of(app, run.id)
                assert record is not None
                assert record.failures == 2
        assert [await run.result(60) for run in others] == list(range(60))
    assert sorted(starts) == list(range(60))


def _without_arguments(function: Any) -> Any:
    """The same function, called without its default argument: it is no payload."""
    if asyncio.iscoroutinefunction(function):

        async def called() -> Any:
            return await function()

        return called
    return lambda: function()


async def test_swallowed_cancellation_ends_at_its_timeout(app: Holdfast, tmp_path: Path) -> None:
    """A handler that does not stop is timed out all the same; it keeps its place until it ends."""
    noted: list[str] = []
    limit = asyncio.Event()

    @app.job(timeout=0.2, retry=Backoff.never())
    async def stubborn() -> None:
        while not limit.is_set():
            await swallows_cancellation(noted.append, 0.05)

    @app.job
    async def well() -> str:
        return "well"

    path = tmp_path / "health"
    async with working(app, concurrency=1, cleanup_seconds=0.2, health_path=str(path)) as worker:
        run = await stubborn.enqueue()
        with pytest.raises(RunFailed, match="longer than 200ms"):
            await run.result(60)
        labels = {"group": "default", "job": "stubborn"}
        try:
            await until(lambda: metric(worker, "holdfast_stuck_handlers", **labels) == 1)
            await until(lambda: _says(path, "all 1 places are stuck"), what="not ready")
            waiting = await well.enqueue()
        finally:
            limit.set()  # else the worker could not end
        assert await waiting.result(60) == "well"
        assert metric(worker, "holdfast_stuck_handlers", **labels) == 0
        await until(lambda: _is_ready(path), 10, "a worker that is ready again")


async def _says(path: Path, what: str) -> bool:
    found = await health(path)
    return not found["ready"] and any(what in problem for problem in found["problems"])


async def _is_ready(path: Path) -> bool:
    return bool((await health(path))["ready"])


async def test_cancelled_run_whose_handler_swallows_it_is_cancelled(app: Holdfast) -> None:
    """`cancel()` does not wait for ever for a handler that does not stop."""
    noted: list[str] = []
    limit, started = asyncio.Event(), asyncio.Event()

    @app.job
    async def stubborn() -> None:
        started.set()
        while not limit.is_set():
            await swallows_cancellation(noted.append, 0.05)

    async with working(app, cleanup_seconds=0.2):
        run = await stubborn.enqueue()
        await asyncio.wait_for(started.wait(), 10)
        assert await run.cancel()
        with pytest.raises(RunCancelled):
            await run.result(60)
        limit.set()


# ---- threads that do not come back


async def test_worker_without_free_threads_takes_nothing(
    app: Holdfast, seen: Seen, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Runs that find every thread stuck are nobody's attempt: they wait, and start elsewhere.

    The worker says so, is not ready, and recovers with the first thread that is free.
    """
    go = threading.Event()

    @app.job(timeout=0.2, retry=Backoff.never())
    def stuck() -> None:
        go.wait(30)

    @app.job(timeout=0.5, retry=Backoff.never())
    def quick(n: int) -> int:
        seen.append(n)
        return n

    path = tmp_path / "health"
    async with working(app, threads=2, health_path=str(path)) as worker:
        for run in [await stuck.enqueue() for _ in range(2)]:
            with pytest.raises(RunFailed):
                await run.result(60)
        await until(lambda: _says(path, "all 2 threads are stuck"), 5, "a worker that says so")
        await until(lambda: "all 2 threads are stuck" in caplog.text, 5, "a line in the log")
        runs = await quick.enqueue_many(range(6))
        cancelled = await quick.options(key="cancelled").enqueue(6)
        assert await cancelled.cancel()
        assert metric(worker, "holdfast_attempts_started_total", group="default", job="quick") == 0
        assert seen == []
        go.set()
        assert [await run.result(60) for run in runs] == list(range(6))
        await until(lambda: _is_ready(path), 10, "a worker that is ready again")
        with pytest.raises(RunCancelled):
            await cancelled.result(60)
        letters = await dead_letters(app)
        assert [letter.headers["Hf-Reason"] for letter in letters] == ["timeout"] * 2
    assert sorted(seen) == list(range(6))


async def test_runs_that_wait_for_a_thread_are_not_timed_out(app: Holdfast, seen: Seen) -> None:
    """A timeout counts from the handler's start: a queue before a few threads fails nobody."""

    @app.job(timeout=0.6, retry=Backoff.never())
    def steady(n: int) -> int:
        threading.Event().wait(0.25)
        seen.append(n)
        return n

    async with working(app, threads=2):
        runs = await steady.enqueue_many(range(10))
        assert [await run.result(30) for run in runs] == list(range(10))
    assert sorted(seen) == list(range(10))


async def test_runs_claimed_ahead_of_a_long_one_are_given_back(app: Holdfast, seen: Seen) -> None:
    """While plain handlers are short, the next runs are claimed before a thread is free.

    If one takes long after all, those behind it start elsewhere: once each, no attempt counted.
    """
    go, many, long = threading.Event(), 2_600, 2_000

    @app.job(retry=Backoff.never())
    def mixed(n: int) -> int:
        if n == long:
            go.wait(60)
        seen.append(n)
        return n

    async with app, working(app, threads=1) as first:
        runs = await mixed.enqueue_many(range(many))
        node = first.current
        assert node is not None
        lane = node._places.lanes["thread"]
        await until(lambda: len(seen) == long, 60, "the long one")
        waiting = lane.busy
        async with working(app, threads=1):
            try:
                await until(lambda: len(seen) == many - 1, 60, "all others")
            finally:
                go.set()  # else the first worker could not end
            assert await runs[long].result(60) == long
        assert waiting > 1
        assert sorted(seen) == list(range(many))
        for run in runs[long : long + waiting]:
            record = await record_of(app, run.id)
            assert record is not None
            assert (record.state, record.failures, record.crashes) == ("done", 0, 0)


# ---- what user code in a payload raises


async def test_context_of_a_bystander_is_its_own(app: Holdfast) -> None:
    """A middleware that misbehaves fails its own attempts, and no other."""

    @app.middleware
    async def wild(ctx: Context, call_next: Any) -> Any:
        if ctx.job == "unlucky":
            await ZOO[ctx.headers["animal"]].handler(lambda _: None)
        return await call_next()

    @app.job(retry=Backoff.never())
    async def unlucky() -> None: ...

    @app.job
    def lucky() -> str:
        return "well"

    names = [n for n, a in ZOO.items() if a.fate == "failed" and a.is_async]
    async with working(app, concurrency=4):
        bad = [await unlucky.options(headers={"animal": name}).enqueue() for name in names]
        good = [await lucky.enqueue() for _ in range(20)]
        for run in bad:
            with pytest.raises(RunFailed):
                await run.result(60)
        assert [await run.result(60) for run in good] == ["well"] * 20


# ---- processes of the pool


async def test_cancel_kills_the_process_of_a_handler(
    nats: Server, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled handler in a process is gone, and its run is cancelled; the next one is well."""
    app = pooled_app.app
    monkeypatch.setitem(app._overrides, "nats_url", nats.url)
    monkeypatch.setitem(app._overrides, "namespace", namespace)
    async with working(app, pool_processes=1):
        run = await pooled_app.hang_without_limit.enqueue(str(tmp_path))
        pids = tmp_path / "pids"
        await until(lambda: pids.exists() and pids.read_text(), 60, "a handler that runs")
        assert await run.cancel()
        stat = Path(f"/proc/{pids.read_text()}/stat")
        await until(lambda: not stat.exists(), 20, "the end of its process")
        well = await pooled_app.area.enqueue(pooled_app.Size(width=2))
        assert (await well.result(60))["area"] == 2
