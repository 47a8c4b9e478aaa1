"""10,000 plain publishes about 1,000 documents, in random order, two processes, with kills:

    python -m benchmarks.documents           a job that computes its key
    python -m benchmarks.documents --guard   a consumer of nats-py's own, guarded by `app.once`
    … --unguarded                            the same without key or guard: the check must fail

Every execution of the work is a row in a database outside the system, with its process and time.
A process that is killed between its effect and the record of it leaves the work to be done again:
an execution may be repeated if its process was killed within `GAP_SECONDS` after it. Any other
repeat, and a document without an execution, is an error: exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import nats
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from holdfast import Holdfast
from holdfast.server import Server

DOCUMENTS, PUBLISHES, PROCESSES = 1_000, 10_000, 2
KILLS = 6
KILL_SECONDS = 3.0
"""Between two kills: long enough that a new process has begun to work."""
GAP_SECONDS = 1.0
"""How long the record of an effect may take on a busy machine; kills are further apart."""
UNGUARDED = "UNGUARDED"
SUBJECTS = {False: "hf.job.default.convert", True: "documents.scanned"}

app = Holdfast("documents")


class Execution(NamedTuple):
    """One execution of the work."""

    document: int
    pid: int
    at: float
    """On the clock that all processes of a machine share."""


class Verdict(NamedTuple):
    """What the executions say."""

    documents: int
    executions: int
    excused: int
    """Repeats of an execution whose process was killed right after it."""
    repeated: list[int]
    """Documents with another repeat."""


def judge(executions: Iterable[Execution], killed: Mapping[int, float]) -> Verdict:
    """Tell the repeats that a kill excuses from those that nothing does."""
    found: dict[int, list[Execution]] = defaultdict(list)
    for one in executions:
        found[one.document].append(one)
    excused, repeated = 0, []
    for document, ones in found.items():
        ones.sort(key=lambda one: one.at)
        good = sum(0 <= killed.get(o.pid, -1.0) - o.at <= GAP_SECONDS for o in ones[:-1])
        excused += good
        if good < len(ones) - 1:
            repeated.append(document)
    return Verdict(len(found), sum(map(len, found.values())), excused, repeated)


def effect(document: int) -> None:
    """The work itself: written down outside the system."""
    with sqlite3.connect(os.environ["EFFECTS"], timeout=60) as db:
        db.execute("BEGIN IMMEDIATE")  # waiting for the other writers comes before the effect
        row = Execution(document, os.getpid(), time.monotonic())
        db.execute("INSERT INTO effect VALUES (?, ?, ?)", row)


@app.job(key=None if UNGUARDED in os.environ else "document")
async def convert(document: int, page: int) -> None:
    await asyncio.sleep(random.uniform(0, 0.01))
    await asyncio.to_thread(effect, document)


async def consume(url: str) -> None:
    """A consumer as somebody else would write it."""
    guard = Holdfast("guard", nats_url=url)
    client = await nats.connect(url)
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=60, max_ack_pending=1000)
    pull = await client.jetstream().pull_subscribe(SUBJECTS[True], "converters", config=config)

    async def handle(message: Msg) -> None:
        document = json.loads(message.data)["document"]
        if UNGUARDED in os.environ:
            await asyncio.to_thread(effect, document)
        else:
            async with guard.once(f"document-{document}", ttl="1h") as first:
                if first:
                    await asyncio.to_thread(effect, document)
        await message.ack()

    while True:
        try:
            messages = await pull.fetch(100, timeout=1)
        except TimeoutError:
            continue
        await asyncio.gather(*map(handle, messages))


async def start(guard: bool, url: str) -> asyncio.subprocess.Process:
    me = [sys.executable, "-m", "benchmarks.documents", "--consume", url]
    worker = [sys.executable, "-m", "holdfast", "worker", "benchmarks.documents:app"]
    worker += ["--log-level", "warning"]
    return await asyncio.create_subprocess_exec(*(me if guard else [*worker, "--nats-url", url]))


async def measure(guard: bool, folder: Path) -> bool:
    """Publish, kill, wait until nothing is left, and judge; whether all is well."""
    os.environ["EFFECTS"] = str(folder / "effects.db")
    with sqlite3.connect(os.environ["EFFECTS"]) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE effect (document INTEGER, pid INTEGER, at REAL)")
    killed: dict[int, float] = {}
    with Server(store=folder / "store") as server:
        client = await nats.connect(server.url)
        stream = "DOCUMENTS" if guard else "HF_JOBS"
        if guard:
            await client.jetstream().add_stream(name=stream, subjects=[SUBJECTS[True]])
        processes = [await start(guard, server.url) for _ in range(PROCESSES)]
        while not await _exists(client, stream):  # noqa: ASYNC110 - the workers make it
            await asyncio.sleep(0.5)
        wanted = [n % DOCUMENTS for n in range(PUBLISHES)]
        random.shuffle(wanted)
        began = time.monotonic()
        publish = client.jetstream().publish
        bodies = [b'{"document":%d,"page":%d}' % (d, n) for n, d in enumerate(wanted)]
        sending = asyncio.create_task(_send(publish, SUBJECTS[guard], bodies))
        for n in range(KILLS):
            await asyncio.sleep(KILL_SECONDS)
            victim = processes[n % PROCESSES]
            victim.kill()
            await victim.wait()
            killed[victim.pid] = time.monotonic()
            processes[n % PROCESSES] = await start(guard, server.url)
        await sending
        while await _left(client, stream, guard):  # noqa: ASYNC110 - the server does not tell
            await asyncio.sleep(0.5)
        took = time.monotonic() - began
        for process in processes:
            process.terminate()
            await process.wait()
        await client.close()
    with sqlite3.connect(os.environ["EFFECTS"]) as db:
        found = judge(map(Execution._make, db.execute("SELECT * FROM effect")), killed)
    print(
        f"{'once' if guard else 'computed key'}: {PUBLISHES:,} publishes about {DOCUMENTS:,} "
        f"documents, {len(killed)} kills, {took:.0f} s: {found.documents:,} documents done, "
        f"{found.executions:,} executions, {found.excused} repeated after a kill, "
        f"{len(found.repeated)} documents repeated without one"
    )
    return found.documents == DOCUMENTS and not found.repeated


async def _send(publish: object, subject: str, bodies: list[bytes]) -> None:
    for start_at in range(0, len(bodies), 200):
        part = bodies[start_at : start_at + 200]
        await asyncio.gather(*(publish(subject, body) for body in part))  # type: ignore[operator]
        await asyncio.sleep(0.2)


async def _exists(client: Client, stream: str) -> bool:
    try:
        await client.jetstream().stream_info(stream)
    except nats.js.errors.NotFoundError:
        return False
    return True


async def _left(client: Client, stream: str, guard: bool) -> int:
    if guard:
        info = await client.jetstream().consumer_info(stream, "converters")
        return (info.num_pending or 0) + (info.num_ack_pending or 0)
    return (await client.jetstream().stream_info(stream)).state.messages


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--unguarded", action="store_true")
    parser.add_argument("--consume", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.consume:
        asyncio.run(consume(given.consume))
    else:
        if given.unguarded:
            os.environ[UNGUARDED] = "1"
        with tempfile.TemporaryDirectory() as name:
            sys.exit(not asyncio.run(measure(given.guard, Path(name))))
