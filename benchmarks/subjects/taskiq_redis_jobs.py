"""taskiq-redis: the stream broker, the one that acknowledges.

Tuned: arguments not parsed, 10 at a time where runs do nothing, uvloop, no log line per run.
"""

from __future__ import annotations

from taskiq_redis import RedisStreamBroker

from benchmarks import sending
from benchmarks.subjects.job import TUNED, URL, work
from benchmarks.subjects.taskiq_sending import TaskiqSender

broker = RedisStreamBroker(URL)
task = broker.task(task_name="work")(work)

if __name__ == "__main__":
    sending.main(TaskiqSender(broker, task), uvloop=TUNED)
