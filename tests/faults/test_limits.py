"""Limits while workers are killed and frozen: never one more, none stuck, nothing leaked."""

from __future__ import annotations

import signal
from itertools import pairwise
from pathlib import Path

from holdfast.server import Server
from holdfast.status.limits import Limits
from tests.faults.app import sender
from tests.faults.conftest import QUICK
from tests.faults.effects import Effects
from tests.faults.processes import until, worker_fleet
from tests.integration.support import client_of

RUNS = 60


def most_at_once(effects: Effects, key: str) -> int:
    """The most attempts of a key that had their effect and overlapped."""
    began = {(s["run"], s["epoch"]): s["at"] for s in effects.starts()}
    spans = [(began[d["run"], d["epoch"]], d["at"]) for d in effects.done() if d["key"] == key]
    return max(sum(a <= at < b for a, b in spans) for at, _ in spans)


async def test_limit_holds_while_workers_are_killed_and_frozen(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """kill -9 and SIGSTOP in the middle: at most two of a key at once, and all of them are done."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        narrow = app.jobs["narrow"]
        with worker_fleet(3, nats.url, namespace, tmp_path, **QUICK) as [killed, frozen, third]:
            for worker in (killed, frozen, third):
                await worker.ready()
            requests = [narrow.request(key=f"k{n % 2}", seconds=0.15) for n in range(RUNS)]
            await app.enqueue_many(requests)
            await until(lambda: len(effects.done()) > 6, what="some effects")
            killed.kill()
            frozen.signal(signal.SIGSTOP)
            await until(lambda: len(effects.done()) > 30, what="more effects")
            frozen.signal(signal.SIGCONT)
            killed.replace()
            await until(lambda: len(effects.done()) == RUNS, what="every effect")
            backend = await client_of(app)
            limits = Limits(backend)

            async def idle() -> bool:
                found = await limits.list()
                return bool(found) and not any(one.held or one.waiting for one in found)

            await until(idle, what="a limit that nobody holds")
            await limits.gates.close()
    assert [most_at_once(effects, key) for key in ("k0", "k1")] == [2, 2]


async def test_order_holds_while_workers_are_killed_and_frozen(
    nats: Server, namespace: str, tmp_path: Path
) -> None:
    """kill -9, SIGSTOP and failures: no run starts before the one before it has ended."""
    effects = Effects(tmp_path / "effects")
    async with sender(nats.url, namespace) as app:
        in_order = app.jobs["in_order"]
        with worker_fleet(3, nats.url, namespace, tmp_path, **QUICK) as [killed, frozen, third]:
            for worker in (killed, frozen, third):
                await worker.ready()
            requests = [
                in_order.request(key=f"k{n % 2}", number=n, seconds=0.05) for n in range(40)
            ]
            runs = [run.id for run in await app.enqueue_many(requests)]
            await until(lambda: len(effects.done()) > 6, what="some effects")
            killed.kill()
            frozen.signal(signal.SIGSTOP)
            await until(lambda: len(effects.done()) > 20, what="more effects")
            frozen.signal(signal.SIGCONT)
            killed.replace()
            await until(lambda: {d["run"] for d in effects.done()} == {*runs}, what="every effect")
    began = {s["run"]: s["at"] for s in reversed(effects.starts())}
    ended = {d["run"]: d["at"] for d in reversed(effects.done())}
    for lane in (runs[::2], runs[1::2]):
        for before, after in pairwise(lane):
            assert began[after] >= ended[before], (before, after)
