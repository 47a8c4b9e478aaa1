"""Five ways in which taskiq on NATS goes quiet or sends twice, in the unmodified libraries (taskiq,
taskiq-nats, nats-py), and then the same with `holdfast.integrations.taskiq` in their place.

    python examples/taskiq_bugs.py             all of them, about a minute
    python examples/taskiq_bugs.py stall       some, by name

It starts nats-servers of its own and needs `pip install 'holdfast-jobs[taskiq]' taskiq-nats`. Each
line says what was seen, not what was expected; the exit code is 1 when Holdfast showed one of the
bugs, or when a library did not: then it has been mended, and the story here wants an update.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from nats.js import api
from taskiq import ScheduledTask
from taskiq_nats import NATSKeyValueScheduleSource, PullBasedJetStreamBroker

from holdfast.integrations.taskiq import (
    LeaderElection,
    ResilientNATSScheduleSource,
    ResilientPullBroker,
)
from holdfast.server import Server

Shown = tuple[bool, str]
"""Whether the bug was seen, and in which words."""


READS, KEYS = 600, 20


async def until(condition: Callable[[], bool], seconds: float = 6.0) -> None:
    """Wait for it, and no longer than that."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - others' conditions
        await asyncio.sleep(0.05)


# ---- 1. A worker that silently stops listening


async def stalls(make: Callable[..., Any]) -> Shown:
    """After a restart of the server the connection is back, and nothing is consumed any more."""
    with Server(fast=True) as server:
        broker = make([server.url], pull_consume_batch=1)
        await broker.startup()
        got: list[bytes] = []

        async def consume() -> None:
            async for message in broker.listen():
                got.append(message.data)
                await message.ack()

        consuming = asyncio.create_task(consume())
        await broker.client.publish("taskiq_tasks", b"before")
        await asyncio.sleep(0.5)
        server.kill()
        await asyncio.to_thread(server.restart)
        await until(lambda: broker.client.is_connected)
        began = time.monotonic()
        await broker.client.publish("taskiq_tasks", b"after")
        await until(lambda: b"after" in got)
        consuming.cancel()
        await asyncio.gather(consuming, return_exceptions=True)
        await broker.shutdown()
    if b"after" in got:
        return False, f"consumed {time.monotonic() - began:.1f} s after the restart"
    return True, "connected again, and nothing consumed for 6 s"


# ---- 2. Schedules that are not there


async def reads_empty(make: Callable[..., Any]) -> Shown:
    """Reading a bucket that has a schedule gives an empty list: "nothing pending" came first."""
    reads = empty = 0
    with Server(fast=True) as server:
        source = make(server.url)
        await source.startup()
        for number in range(KEYS):
            rule = {"interval": 60, "schedule_id": f"s{number}", "labels": {}, "kwargs": {}}
            await source.add_schedule(ScheduledTask(task_name="t", args=["x" * 50_000], **rule))
        while reads < READS and not empty:
            found = await asyncio.gather(*(source.get_schedules() for _ in range(KEYS)))
            reads += len(found)
            empty += sum(len(schedules) != KEYS for schedules in found)
        await source.shutdown()
    return bool(empty), f"{empty} of {reads} reads of {KEYS} schedules gave fewer"


async def reads_nothing_in_an_outage(make: Callable[..., Any]) -> Shown:
    """While the server is away a read fails, which taskiq takes for a list without schedules."""
    with Server(fast=True) as server:
        source = make(server.url)
        await source.startup()
        await source.add_schedule(
            ScheduledTask(task_name="t", labels={}, args=[], kwargs={}, interval=60)
        )
        before = len(await source.get_schedules())
        server.kill()
        await asyncio.sleep(0.3)
        try:
            during = len(await asyncio.wait_for(source.get_schedules(), 15))
        except Exception:  # noqa: BLE001 - as taskiq's loop does
            during = 0
        with contextlib.suppress(OSError):
            await source.shutdown()
    return during < before, f"{before} schedule before the outage, {during} during it"


# ---- 3. A leader that nobody can follow


async def cannot_take_over_plain(url: str) -> Shown:
    """A lease in a bucket: renewed without its TTL, and once expired `create` is refused."""
    client = await nats.connect(url)
    js = client.jetstream()
    kv = await js.create_key_value(api.KeyValueConfig(bucket="leader", limit_marker_ttl=60))
    try:
        revision = await kv.create("leader", b"one", msg_ttl=1)
        try:
            await kv.update("leader", b"one", last=revision, msg_ttl=1)  # type: ignore[call-arg]
            renewal = "update(msg_ttl=…) renews"
        except TypeError:
            renewal = "update() takes no TTL, so a renewed lease never expires"
        await asyncio.sleep(2)
        try:
            await kv.create("leader", b"two", msg_ttl=1)
            return False, "a free lease can be taken"
        except Exception as error:  # noqa: BLE001 - whichever it is in this version
            return True, f"{renewal}; create() on a lease that expired: {type(error).__name__}"
    finally:
        await client.close()


async def cannot_take_over_holdfast(url: str) -> Shown:
    """The same with `LeaderElection`: a leader that stops renewing is followed."""
    quick = {"ttl_seconds": 1.0, "renew_seconds": 0.3}
    one, two = LeaderElection(url, "demo", **quick), LeaderElection(url, "demo", **quick)
    await one.startup()
    await two.startup()
    began = time.monotonic()
    await one.connection.client.close()  # as if the process had died
    await asyncio.wait_for(two.wait_until_leader(), 10)
    took = time.monotonic() - began
    await two.shutdown()
    await one.shutdown()
    return False, f"the other one led {took:.1f} s later"


# ---- 4. SIGTERM ends the scheduler without its shutdown
# ---- 5. Two schedulers send every slot twice

SCHEDULERS = """
import os, sys
from taskiq import TaskiqScheduler
from taskiq.schedule_sources import LabelScheduleSource
from taskiq_nats import PullBasedJetStreamBroker
from holdfast.integrations.taskiq import K8sScheduler, ResilientPullBroker

url, ready = os.environ["URL"], os.environ["READY"]
plain, ours = PullBasedJetStreamBroker([url]), ResilientPullBroker([url])

class Loud(LabelScheduleSource):
    async def shutdown(self):
        print("shut down in good order", flush=True)

for broker in (plain, ours):
    @broker.task(task_name="tick", schedule=[{"interval": 2}])
    async def tick(): ...

before = TaskiqScheduler(plain, [Loud(plain)])
after = K8sScheduler(ours, [Loud(ours)], url, "demo", ready_file=ready)
"""


def start_scheduler(folder: Path, url: str, name: str) -> subprocess.Popen[str]:
    """One `taskiq scheduler` process of the program above."""
    (folder / "shown.py").write_text(SCHEDULERS, encoding="utf-8")
    env = os.environ | {"URL": url, "READY": str(folder / secrets.token_hex(4))}
    return subprocess.Popen(
        [sys.executable, "-m", "taskiq", "scheduler", f"shown:{name}"],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


async def ends_abruptly(name: str) -> Shown:
    """SIGTERM, as Kubernetes sends it, to `taskiq scheduler`."""
    with Server(fast=True) as server, tempfile.TemporaryDirectory() as folder:
        process = start_scheduler(Path(folder), server.url, name)
        await messages(server.url, 1)
        process.send_signal(signal.SIGTERM)
        said, _ = await asyncio.to_thread(process.communicate)
    if "in good order" in said:
        return False, f"shut down in good order, exit code {process.returncode}"
    return True, f"killed by the signal (exit code {process.returncode}), nothing was shut down"


async def sends_twice(name: str) -> Shown:
    """Two `taskiq scheduler` processes, one schedule every two seconds."""
    with Server(fast=True) as server, tempfile.TemporaryDirectory() as folder:
        fleet = [start_scheduler(Path(folder), server.url, name) for _ in range(2)]
        await messages(server.url, 2)
        await asyncio.sleep(2)
        before, began = await messages(server.url, 0), time.monotonic()
        await asyncio.sleep(6)
        sent = await messages(server.url, 0) - before
        slots = round((time.monotonic() - began) / 2)
        for process in fleet:
            process.kill()
            await asyncio.to_thread(process.communicate)
    return sent > slots + 1, f"{sent} messages in a time with {slots} slots"


async def messages(url: str, least: int) -> int:
    """Wait until so many messages were sent; gives how many there are."""
    client = await nats.connect(url)
    try:
        while True:
            try:
                info = await client.jetstream().stream_info("taskiq_jetstream")
                if info.state.messages >= least:
                    return int(info.state.messages)
            except nats.js.errors.NotFoundError:
                pass
            await asyncio.sleep(0.1)
    finally:
        await client.close()


# ---- and the pickles, which are no bug but a door


class Visitor:
    """Loading a pickle of this calls a function of the writer's choice."""

    def __reduce__(self) -> Any:
        return (os.putenv, ("TASKIQ_BUGS", "was here"))


async def executes(make: Callable[..., Any]) -> Shown:
    """Somebody who may write to the bucket of schedules runs code in the scheduler."""
    calls: list[str] = []
    sys.addaudithook(lambda event, _: calls.append(event) if event == "os.putenv" else None)
    with Server(fast=True) as server:
        source = make(server.url)
        await source.startup()
        client = await nats.connect(server.url)
        kv = await client.jetstream().key_value("taskiq_schedules")
        await kv.put("schedule.visitor", pickle.dumps(Visitor()))
        with contextlib.suppress(Exception):  # what it gives is no schedule
            await source.get_schedules()
        await client.close()
        await source.shutdown()
    return bool(calls), "code from the bucket was executed" if calls else "refused"


async def on_a_server(show: Callable[[str], Awaitable[Shown]]) -> Shown:
    with Server(fast=True) as server:
        return await show(server.url)


def careless(url: str) -> ResilientNATSScheduleSource:
    """Told to read pickles, which is as open as it can be."""
    return ResilientNATSScheduleSource(url, read_pickled=True)


STORIES: dict[str, tuple[str, Callable[[], Awaitable[Shown]], Callable[[], Awaitable[Shown]]]] = {
    "stall": (
        "1. After a restart of NATS the worker consumes nothing, and says nothing",
        lambda: stalls(PullBasedJetStreamBroker),
        lambda: stalls(ResilientPullBroker),
    ),
    "empty": (
        "2. A full bucket of schedules is read as empty",
        lambda: reads_empty(NATSKeyValueScheduleSource),
        lambda: reads_empty(ResilientNATSScheduleSource),
    ),
    "outage": (
        "2b. An outage of NATS is read as a bucket without schedules",
        lambda: reads_nothing_in_an_outage(NATSKeyValueScheduleSource),
        lambda: reads_nothing_in_an_outage(ResilientNATSScheduleSource),
    ),
    "lease": (
        "3. A leader's lease that expired cannot be taken by another",
        lambda: on_a_server(cannot_take_over_plain),
        lambda: on_a_server(cannot_take_over_holdfast),
    ),
    "sigterm": (
        "4. SIGTERM ends the scheduler without its shutdown",
        lambda: ends_abruptly("before"),
        lambda: ends_abruptly("after"),
    ),
    "twice": (
        "5. Two schedulers send every slot twice",
        lambda: sends_twice("before"),
        lambda: sends_twice("after"),
    ),
    "pickle": (
        "6. Who may write a schedule may run code in the scheduler",
        lambda: executes(NATSKeyValueScheduleSource),
        lambda: executes(careless),
    ),
}
CHANCE = frozenset({"empty"})
"""A race: it may not show itself."""


async def main(chosen: list[str]) -> int:
    """Show the stories; returns how many did not go as told."""
    wrong = 0
    for name in chosen or STORIES:
        title, before, after = STORIES[name]
        print(title)
        bug, words = await before()
        print(f"   as they are:    {'BUG' if bug else 'not seen'}: {words}")
        wrong += not bug and name not in CHANCE
        bug, words = await after()
        print(f"   with Holdfast:  {'BUG' if bug else 'fine'}: {words}", flush=True)
        wrong += bug
    return wrong


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    unknown = [name for name in sys.argv[1:] if name not in STORIES]
    if unknown:
        sys.exit(f"no story is called {unknown[0]}: {', '.join(STORIES)}")
    sys.exit(1 if asyncio.run(main(sys.argv[1:])) else 0)
