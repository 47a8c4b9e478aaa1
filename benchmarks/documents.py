"""10,000 plain publishes about 1,000 documents, in random order, two processes, with kills:

    python -m benchmarks.documents           a job that computes its key
    python -m benchmarks.documents --guard   a consumer of nats-py's own, guarded by `app.once`

Every execution of the work is a line in a database outside the system. A process that is killed
between its effect and the record of it repeats the work: those are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import nats
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from holdfast import Context, Holdfast
from holdfast.server import Server

DOCUMENTS, PUBLISHES, PROCESSES = 1_000, 10_000, 2
KILLS = 6
KILL_SECONDS = 3.0
"""Between two kills: long enough that a new process has begun to work."""
SUBJECTS = {False: "hf.job.default.convert", True: "documents.scanned"}

app = Holdfast("documents")


def effect(document: int, run: str) -> None:
    """The work itself: written down outside the system."""
    with sqlite3.connect(os.environ["EFFECTS"], timeout=60) as db:
        db.execute("INSERT INTO effect VALUES (?, ?)", (document, run))


@app.job(key="document")
async def convert(ctx: Context, document: int, page: int) -> None:
    await asyncio.sleep(random.uniform(0, 0.01))
    await asyncio.to_thread(effect, document, ctx.run)


async def consume(url: str) -> None:
    """A consumer as somebody else would write it."""
    guard = Holdfast("guard", nats_url=url)
    client = await nats.connect(url)
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, ack_wait=60, max_ack_pending=1000)
    pull = await client.jetstream().pull_subscribe(SUBJECTS[True], "converters", config=config)

    async def handle(message: Msg) -> None:
        document = int(message.data.split(b":")[1].split(b",")[0])
        async with guard.once(f"document-{document}", ttl="1h") as first:
            if first:
                await asyncio.to_thread(effect, document, first.key)
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
    return await asyncio.create_subprocess_exec(*(me if guard else [*worker, "--nats-url", url]))


async def measure(guard: bool, folder: Path) -> None:
    os.environ["EFFECTS"] = str(folder / "effects.db")
    with sqlite3.connect(os.environ["EFFECTS"]) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE effect (document INTEGER, run TEXT)")
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
            processes[n % PROCESSES].kill()
            await processes[n % PROCESSES].wait()
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
        done = Counter(document for (document,) in db.execute("SELECT document FROM effect"))
        [(unique,)] = db.execute("SELECT count(DISTINCT run) FROM effect")
    print(
        f"{'once' if guard else 'computed key'}: {PUBLISHES:,} publishes, {KILLS} kills, "
        f"{took:.0f} s: {unique:,} effects by their run or key, for {len(done):,} documents; "
        f"{done.total():,} executions, of which {done.total() - unique} repeat one that was killed"
    )


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
    parser.add_argument("--consume", metavar="URL")
    given = parser.parse_args()
    if given.consume:
        asyncio.run(consume(given.consume))
    else:
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(measure(given.guard, Path(name)))
