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

from holdfast import Backoff, Context, Holdfast, SyncContext
from tests.faults.effects import Effects

app = Holdfast("faults")
effects = Effects(Path(os.environ["EFFECTS"]))


@app.job(retry=Backoff.list(["100ms", "200ms", "1s"]))
async def work(key: str, seconds: float, ctx: Context) -> str:
    """Takes a while, then has its effect once per run id."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds * random.uniform(0.5, 1.5))
    effects.apply(ctx.run, key=key, epoch=ctx.epoch)
    return key


@app.job
async def slow(key: str, seconds: float, ctx: Context) -> str:
    """Outlasts every timeout in the system."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node


@app.job
async def bulky(key: str, seconds: float, ctx: Context) -> str:
    """Like `slow`, with a result too large for a record; it starts with the node."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node.ljust(1_000_000, ".")


@app.job
async def held(key: str, gate: str, ctx: Context) -> str:
    """Runs until a file exists: as long as the test wants."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch, attempt=ctx.attempt, node=ctx.node)
    while not (effects.root / gate).exists():
        await asyncio.sleep(0.02)
    effects.apply(ctx.run, key=key, epoch=ctx.epoch, node=ctx.node)
    return ctx.node


@app.job
async def forking(key: str, gate: str, ctx: Context) -> str:
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
async def loose(key: str, ctx: Context, seconds: float = 0.0) -> None:
    """Without a record."""
    effects.started(run=ctx.run, key=key, attempt=ctx.attempt)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(retry=Backoff.never())
async def poison(how: str, ctx: Context) -> None:
    """Kills its process."""
    effects.started(run=ctx.run, key=how, epoch=ctx.epoch, attempt=ctx.attempt)
    if how == "exit":
        os._exit(9)
    effects.apply(ctx.run, key=how)


@app.job
async def anything(data: dict[str, Any], ctx: Context) -> None:
    """Takes any object."""
    effects.apply(ctx.run)


@app.job
async def typed(a: int, b: str = "x") -> int:
    """Takes exactly this."""
    return a


@app.job(restart="after_grace")
async def patient(key: str, seconds: float, ctx: Context) -> None:
    """Started again only after the grace period of its lost worker."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(restart="never")
async def fragile(key: str, seconds: float, ctx: Context) -> None:
    """Never started again."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


@app.job(delivery="at_most_once")
async def once(key: str, seconds: float, ctx: Context) -> None:
    """Never a second start."""
    effects.started(run=ctx.run, key=key, epoch=ctx.epoch)
    await asyncio.sleep(seconds)
    effects.apply(ctx.run, key=key)


async def _until(gate: str) -> None:
    while not (effects.root / gate).exists():
        await asyncio.sleep(0.02)


@app.job
async def block(gate: str, seconds: float, ctx: Context) -> None:
    """Blocks the event loop once a gate is open, at its first attempt."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    await _until(gate)
    if ctx.attempt == 1:
        time.sleep(seconds)


@app.job
async def hold_interpreter(gate: str, seconds: int, ctx: Context) -> None:
    """Runs C code that holds the interpreter lock, once a gate is open."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    await _until(gate)
    while seconds:  # a signal ends the call early; it returns what is left
        seconds = ctypes.PyDLL(None).sleep(seconds)


@app.job
async def many_threads(gate: str, seconds: float, ctx: Context) -> None:
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
def compute(key: str, seconds: float, ctx: SyncContext) -> None:
    """Uses CPU time in a thread."""
    effects.started(run=ctx.run, attempt=ctx.attempt, node=ctx.node)
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
