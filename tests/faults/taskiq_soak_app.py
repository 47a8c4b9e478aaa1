"""Taskiq apps for soak tests: schedules of a second and of a day, and tasks that sometimes fail."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from taskiq.schedule_sources import LabelScheduleSource

from holdfast.integrations.taskiq import K8sScheduler, ResilientPullBroker
from holdfast.model.backoff import Backoff

URL = os.environ.get("TASKIQ_URL", "nats://127.0.0.1:4222")
NAMESPACE = os.environ.get("TASKIQ_NAMESPACE", "hf")
APP = os.environ.get("TASKIQ_APP", "app")
DAILY = [cron for cron in os.environ.get("TASKIQ_DAILY", "").split(",") if cron]
SECONDS = 3
"""How many schedules fire every second."""

broker = ResilientPullBroker(
    URL,
    subject=f"{NAMESPACE}_{APP}_tasks",
    stream_name=f"{NAMESPACE}_{APP}",
    namespace=NAMESPACE,
    pull_consume_batch=20,
    retry=Backoff.list([0.2, 0.2]),
    consumer_config={"ack_wait": 5_000_000_000},
    ready_file=os.environ.get("WORKER_READY", ""),
)
rules: list[dict[str, Any]] = [{"interval": 1, "args": [f"s{n}"]} for n in range(SECONDS)]
rules += [{"cron": cron, "args": [cron]} for cron in DAILY]


@broker.task(task_name="tick", schedule=rules)
async def tick(rule: str) -> None:
    """Due every second, or once today."""


@broker.task(task_name="step")
async def step(number: int) -> None:
    """One in fifty always fails, one in twenty the first time."""
    folder = Path(os.environ["EFFECTS"])
    first = not _has(folder / "started", number)
    _write(folder / "started", number)
    await asyncio.sleep(0.01 * (number % 4))
    if number % 50 == 0 or (number % 20 == 1 and first):
        raise RuntimeError("as planned")
    _write(folder / "done", number)


def _write(path: Path, number: int) -> None:
    with path.open("a") as lines:
        lines.write(f"{number}\n")


def _has(path: Path, number: int) -> bool:
    return number % 20 == 1 and path.exists() and str(number) in path.read_text().split()


scheduler = K8sScheduler(
    broker,
    [LabelScheduleSource(broker)],
    URL,
    f"{APP}-schedules",
    prefer="gap" if os.environ.get("TASKIQ_PREFER") == "gap" else "duplicate",
    ready_file=os.environ.get("READY_FILE", ""),
    namespace=NAMESPACE,
)
