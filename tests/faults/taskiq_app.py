"""A taskiq app as a user writes it, for `taskiq worker` and `taskiq scheduler` processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from taskiq import TaskiqScheduler
from taskiq.schedule_sources import LabelScheduleSource

from holdfast.integrations.taskiq import K8sScheduler, ResilientPullBroker

URL = os.environ.get("TASKIQ_URL", "nats://127.0.0.1:4222")
NAMESPACE = os.environ.get("TASKIQ_NAMESPACE", "hf")
EVERY = [3, 4] * 10

broker = ResilientPullBroker(
    URL,
    subject=f"{NAMESPACE}_tasks",
    stream_name=f"{NAMESPACE}_stream",
    pull_consume_batch=10,
    namespace=NAMESPACE,
    ready_file=os.environ.get("WORKER_READY", ""),
    max_reconnect_attempts=int(os.environ.get("RECONNECTS", "-1")),
)


@broker.task(
    task_name="tick",
    schedule=[{"interval": gap, "args": [n]} for n, gap in enumerate(EVERY)],
)
async def tick(number: int) -> None:
    """Due every few seconds."""


@broker.task(task_name="note")
async def note(number: int, nap: float = 0.0) -> int:
    """Append a line outside the system."""
    await asyncio.sleep(nap)
    with Path(os.environ["EFFECTS"]).open("a") as effects:
        effects.write(f"{number}\n")
    return number


scheduler: TaskiqScheduler = K8sScheduler(
    broker,
    [LabelScheduleSource(broker)],
    URL,
    "ticks",
    ready_file=os.environ.get("READY_FILE", ""),
    namespace=NAMESPACE,
)
