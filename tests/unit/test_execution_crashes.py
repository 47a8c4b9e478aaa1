"""The real executor, with its process dying between any two steps.

`test_run_model` drives a model of these steps through all orders of several workers; here the code
itself runs in memory, and each read, write, publish and acknowledgement may be the last thing that
its process did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from holdfast import Backoff, Context, Discard, Holdfast, Snooze
from holdfast.config import WorkerConfig
from holdfast.testing import memory
from holdfast.testing.memory_app import Memory, ProcessDied
from holdfast.testing.queue import MemoryDelivery

RUNS = 12
CHANCE = 0.08


class Saboteur:
    """Kills the process before or after one of its steps, now and then, until it is sent home."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.active = True
        self.kills = 0

    def watch(self, target: Any, *methods: str) -> None:
        for method in methods:
            setattr(target, method, self._risky(getattr(target, method)))

    def _risky(self, step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def risky(*args: Any, **kwargs: Any) -> Any:
            self._perhaps()
            result = await step(*args, **kwargs)
            self._perhaps()
            return result

        return risky

    def _perhaps(self) -> None:
        if self.active and self._random.random() < CHANCE:
            self.kills += 1
            raise ProcessDied


def shop(effects: Counter[str], heard: Counter[int]) -> Holdfast:
    """Jobs of every temper; `effects` counts by run, as a user's own store would."""
    app = Holdfast("shop")

    @app.job(retry=Backoff.list(["1s", "1m", "1h"]))
    async def work(ctx: Context, n: int) -> int:
        effects[ctx.run] += 1
        if n % 4 == 1 and ctx.attempt < 4:
            raise ValueError("not yet")
        if n % 4 == 2 and effects[ctx.run] < 3:
            raise Snooze("5m" if n % 8 == 2 else "1s")
        if n % 4 == 3 and n > 9:
            raise Discard("unwanted")
        await ctx.progress(0.5)
        await ctx.publish("worked", {"n": n})
        return n

    @app.job(on="worked")
    async def listen(data: dict[str, int]) -> None:
        heard[data["n"]] += 1

    return app


@pytest.fixture
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Memory, Saboteur], None]:
    """Puts a saboteur between the executor and everything that it touches."""

    def apply(mem: Memory, saboteur: Saboteur) -> None:
        saboteur.watch(mem._store, "put", "get")
        saboteur.watch(mem._outbox, "park", "event", "dead_letter", "keep", "file")
        for method in ("ack", "nak"):
            real = getattr(MemoryDelivery, method)
            monkeypatch.setattr(MemoryDelivery, method, saboteur._risky(real))

    return apply


@pytest.mark.parametrize("seed", range(60))
async def test_no_run_is_lost_to_a_crash_between_two_steps(
    seed: int, sabotaged: Callable[[Memory, Saboteur], None]
) -> None:
    """Every accepted run ends, nothing is left over, and repeats are explained by deaths."""
    effects: Counter[str] = Counter()
    heard: Counter[int] = Counter()
    app = shop(effects, heard)
    saboteur = Saboteur(Random(seed))
    async with memory(app, worker=WorkerConfig(crash_limit=1000)) as mem:
        runs = [await app.jobs["work"].enqueue(n, key=f"key-{n}") for n in range(RUNS)]
        for n in range(0, RUNS, 3):
            assert (await app.jobs["work"].enqueue(n, key=f"key-{n}")).duplicate
        sabotaged(mem, saboteur)
        await mem.advance("2h")
        saboteur.active = False
        await mem.advance("10h")
        assert mem._queue.waiting() == 0
        records = [await mem.record(run.id) for run in runs]
        assert all(record is not None and record.terminal for record in records)
        for n, record in enumerate(records):
            assert record is not None
            assert record.state == ("cancelled" if n % 4 == 3 and n > 9 else "done")
        filed = [mem._outbox.history.get(run.id) for run in runs]
        assert filed == records, "each end is in the history, wherever its process died"
        done = {n for n, record in enumerate(records) if record and record.state == "done"}
        events = [e.data["n"] for e in mem.events]
    assert sorted(events) == sorted(done)  # each event once, however often its run was repeated
    assert set(heard) == done
    assert saboteur.kills > 0
    planned = sum(4 if n % 4 == 1 else 3 if n % 4 == 2 else 1 for n in range(RUNS))
    assert sum(effects.values()) + sum(heard.values()) <= planned + len(done) + saboteur.kills


@pytest.mark.parametrize("seed", range(20))
async def test_a_run_that_keeps_killing_is_given_up(
    seed: int, sabotaged: Callable[[Memory, Saboteur], None]
) -> None:
    """With deaths everywhere, a run is done or dead in the end, and a dead one has its letter."""
    effects: Counter[str] = Counter()
    app = shop(effects, Counter())
    saboteur = Saboteur(Random(-seed))
    async with memory(app, worker=WorkerConfig(crash_limit=2)) as mem:
        runs = [await app.jobs["work"].enqueue(n, key=f"key-{n}") for n in range(RUNS)]
        sabotaged(mem, saboteur)
        await mem.advance("2h")
        saboteur.active = False
        await mem.advance("10h")
        assert mem._queue.waiting() == 0
        letters = {letter.run for letter in mem.dead}
        for run in runs:
            record = await mem.record(run.id)
            assert record is not None
            assert record.terminal
            if record.state == "dead":
                assert run.id in letters
                assert record.crashes <= 2
