"""taskiq-nats: pull-based JetStream broker.

Tuned: batches of 100, prefetch, arguments not parsed, uvloop, no log line per run.
"""

from __future__ import annotations

from typing import Any

from taskiq_nats import PullBasedJetStreamBroker

from benchmarks import sending
from benchmarks.subjects.job import TUNED, URL, work
from benchmarks.subjects.taskiq_sending import TaskiqSender

tuning: dict[str, Any] = {"pull_consume_batch": 100, "pull_consume_timeout": 5} if TUNED else {}
broker = PullBasedJetStreamBroker([URL], **tuning)
task = broker.task(task_name="work")(work)

if __name__ == "__main__":
    sending.main(TaskiqSender(broker, task), uvloop=TUNED)
