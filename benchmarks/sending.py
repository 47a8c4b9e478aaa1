"""The sending half of a subject: `python -m benchmarks.subjects.X send KIND NUMBER`.

One line of JSON on standard output tells how it went. Kinds:

    one SECONDS       enqueue one at a time, each confirmed, for so long
    bulk COUNT        enqueue so many in the fastest way that the system offers
    naps COUNT        the same, of runs that sleep for a tenth of a second
    hold COUNT        the same, of runs that sleep for an hour
    latency COUNT     once a worker runs: enqueue one every few milliseconds, stamped with the time

Only the sending itself is timed: not the interpreter, the imports or the connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from benchmarks import tally

TEXT = "x" * 60
NAP_SECONDS = 0.1
HOLD_SECONDS = 3600.0
GAP_SECONDS = 0.01
WARM_UP = 20

Payload = dict[str, Any]
"""The arguments of the one job that every subject has: `sent`, `nap`, `text`; about 100 bytes."""


class Sender(Protocol):
    """How a system is told to run jobs, from inside an event loop."""

    async def open(self) -> None:
        """Connect, and make sure that the queue exists."""
        ...

    async def one(self, payload: Payload) -> None:
        """Enqueue one run; the broker has it when this returns."""
        ...

    async def many(self, payloads: list[Payload]) -> None:
        """Enqueue many runs; the broker has them all when this returns."""
        ...

    async def close(self) -> None:
        """Disconnect."""
        ...


def payload(nap: float = 0.0, sent: int = 0) -> Payload:
    """The arguments of one run."""
    return {"sent": sent, "nap": nap, "text": TEXT}


def main(sender: Sender, *, uvloop: bool = True) -> None:
    """Do what the command line says, and print how long it took."""
    _, word, kind, number = sys.argv
    assert word == "send", word
    run = _runner(uvloop)
    print(json.dumps(run(_send(sender, kind, float(number)))), flush=True)


def _runner(uvloop: bool) -> Callable[[Coroutine[Any, Any, Payload]], Payload]:
    if uvloop:
        import uvloop as loops

        return loops.run
    return asyncio.run


async def _send(sender: Sender, kind: str, number: float) -> Payload:
    kinds: dict[str, Callable[[Sender, float], Awaitable[Payload]]] = {
        "one": _one,
        "bulk": lambda s, n: _many(s, int(n), 0.0),
        "naps": lambda s, n: _many(s, int(n), NAP_SECONDS),
        "hold": lambda s, n: _many(s, int(n), HOLD_SECONDS),
        "latency": _latency,
    }
    await sender.open()
    try:
        return await kinds[kind](sender, number)
    finally:
        await sender.close()


async def _one(sender: Sender, seconds: float) -> Payload:
    for _ in range(WARM_UP):
        await sender.one(payload())
    begin = time.monotonic()
    count = 0
    while time.monotonic() - begin < seconds:
        await sender.one(payload())
        count += 1
    return {"count": count, "seconds": time.monotonic() - begin}


async def _many(sender: Sender, count: int, nap: float) -> Payload:
    payloads = [payload(nap) for _ in range(count)]
    begin = time.monotonic()
    await sender.many(payloads)
    return {"count": count, "seconds": time.monotonic() - begin}


async def _latency(sender: Sender, count: float) -> Payload:
    await sender.one(payload())
    tallies = tally.Tallies(Path(os.environ[tally.FOLDER]))
    while not tallies.total(tally.ENDED):  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.05)
    for _ in range(WARM_UP):
        await sender.one(payload())
        await asyncio.sleep(GAP_SECONDS)
    begin = time.monotonic()
    for _ in range(int(count)):
        await sender.one(payload(sent=time.monotonic_ns()))
        await asyncio.sleep(GAP_SECONDS)
    return {"count": int(count), "seconds": time.monotonic() - begin}
