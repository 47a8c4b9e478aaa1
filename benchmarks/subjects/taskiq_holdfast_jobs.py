"""taskiq on Holdfast's broker: taskiq-nats' row with one line changed, and the same batch sizes."""

from __future__ import annotations

from typing import Any

from benchmarks import sending
from benchmarks.subjects.job import TUNED, URL, work
from benchmarks.subjects.taskiq_sending import TaskiqSender
from holdfast.integrations.taskiq import ResilientPullBroker

tuning: dict[str, Any] = {"pull_consume_batch": 100, "pull_consume_timeout": 5} if TUNED else {}
broker = ResilientPullBroker([URL], **tuning)
task = broker.task(task_name="work")(work)

if __name__ == "__main__":
    sending.main(TaskiqSender(broker, task), uvloop=TUNED)
