"""The app that the fault tests run in worker processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

from holdfast import Backoff, Context, Holdfast, Limit, SyncContext
from tests.faults.effects import Effects

app = Holdfast("faults")
effects = Effects(Path(os.environ["EFFECTS"]))


@app.job(retry=Backoff.list(["100ms", "200ms", "1s"]))
async def work(ctx: Context, key: str, seconds: float) -> str:
    """Takes a while, then has its effect once per run id."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds * random.uniform(0.5, 1.5))
    effects.apply(ctx.run, key=key, epoch=ctx.epoch)
    return key


@app.job(limits=[Limit(running=2, per="key")])
async def narrow(ctx: Context, key: str, seconds: float) -> str:
    """At most two at the same time of each key."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return key


@app.job(
    retry=Backoff.linear("200ms", "200ms", 30),
    limits=[Limit(running=1, per="key", ordered=True)],
)
async def in_order(ctx: Context, key: str, number: int, seconds: float) -> int:
    """One after the other of each key; every fifth fails at first."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    if number % 5 == 4 and ctx.attempt == 1:
        raise ValueError("not yet")
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return number


@app.job
async def slow(ctx: Context, key: str, seconds: float) -> str:
    """Outlasts every timeout in the system."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node


@app.job
async def bulky(ctx: Context, key: str, seconds: float) -> str:
    """Like `slow`, with a result too large for a record; it starts with the node."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node.ljust(1_000_000, ".")


@app.job
async def held(ctx: Context, key: str, gate: str) -> str:
    """Runs until a file exists: as long as the test wants."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    while not (effects.root / gate).exists():
        await asyncio.sleep(0.02)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node


@app.job
async def forking(ctx: Context, key: str, gate: str) -> str:
    """Leaves a child behind that inherits every socket of its worker, then waits for a file."""
    if fork_in_c() == 0:
        while True:
            time.sleep(60)
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    while not (effects.root / gate).exists():
        await asyncio.sleep(0.02)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node


def fork_in_c() -> int:
    """Fork as a C library would: without Python's fork hooks."""
    child = int(ctypes.PyDLL(None).fork())
    if child:
        with (effects.root / "children").open("a") as file:
            file.write(f"{child}\n")
    return child


@app.job(delivery="at_least_once")
async def loose(ctx: Context, key: str, seconds: float = 0.0) -> None:
    """Without a record."""
    effects.started(run=ctx.run, key=key, attempt=ctx.attempt)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(retry=Backoff.never())
async def poison(ctx: Context, how: str) -> None:
    """Kills its process."""
    effects.started(run=ctx.run, key=how, epoch=ctx.epoch, attempt=ctx.attempt)
    if how == "exit":
        os._exit(9)
    effects.apply(ctx.run, key=how)


@app.job
async def anything(ctx: Context, data: dict[str, Any]) -> None:
    """Takes any object."""
    effects.apply(ctx.run)


@app.job
async def typed(a: int, b: str = "x") -> int:
    """Takes exactly this."""
    return a


@app.job(restart="after_grace")
async def patient(ctx: Context, key: str, seconds: float) -> None:
    """Started again only after the grace period of its lost worker."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(restart="never")
async def fragile(ctx: Context, key: str, seconds: float) -> None:
    """Never started again."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(delivery="at_most_once")
async def once(ctx: Context, key: str, seconds: float) -> None:
    """Never a second start."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


async def _until(gate: str) -> None:
    while not (effects.root / gate).exists():
        await asyncio.sleep(0.02)


@app.job
async def block(ctx: Context, gate: str, seconds: float) -> None:
    """Blocks the event loop once a gate is open, at its first attempt."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    await _until(gate)
    if ctx.attempt == 1:
        time.sleep(seconds)


@app.job
async def hold_interpreter(ctx: Context, gate: str, seconds: int) -> None:
    """Runs C code that holds the interpreter lock, once a gate is open."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    await _until(gate)
    while seconds:  # a signal ends the call early; it returns what is left
        seconds = ctypes.PyDLL(None).sleep(seconds)


@app.job
async def many_threads(ctx: Context, gate: str, seconds: float) -> None:
    """Starts a hundred threads that compute, once a gate is open."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    await _until(gate)
    end = time.monotonic() + seconds

    def spin() -> None:
        while time.monotonic() < end:
            pass

    threads = [threading.Thread(target=spin) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@app.job
def compute(ctx: SyncContext, key: str, seconds: float) -> None:
    """Uses CPU time in a thread."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def sender(url: str, namespace: str) -> Holdfast:
    """An app with the same jobs that only sends, to one server."""
    made = Holdfast("sender", nats_url=url, namespace=namespace)
    for job in app.jobs.values():
        made.job(name=job.name, delivery=job.spec.delivery)(job.func)
    return made
