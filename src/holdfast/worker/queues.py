"""A job's additional queues, found when they are first used.

A run that is sent with another priority than its job's goes to a queue of that priority. Most jobs
never have one, and a consumer that nobody needs costs every worker a request and heartbeats. So a
worker checks once a second whether such a queue has messages, and pulls from it from then on.

Guaranteed: a message in any queue of a job is taken by the workers of its group, also after the
code has changed so that nothing is sent there now.

Not guaranteed: that the first run of a new priority starts within a second of being sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

from holdfast.broker import Broker
from holdfast.job import Job
from holdfast.retrying import repeating
from holdfast.status.messages import subject_counts
from holdfast.worker.intake import Intake

LOOK_SECONDS: Final = 1.0
"""How long the first run of a new priority may wait; one small request for each worker."""


class Queues:
    """Opens the queues of one worker's jobs."""

    def __init__(
        self, broker: Broker, intake: Intake, group: str, jobs: Mapping[str, Job[Any]]
    ) -> None:
        self._broker = broker
        self._intake = intake
        self._group = group
        self._jobs = jobs
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look for queues until cancelled."""
        try:
            await repeating(
                self._look,
                clock=self._broker.clock,
                every=LOOK_SECONDS,
                what="looking for queues of other priorities",
                at_once=True,
            )
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _look(self) -> None:
        names = self._broker.names
        pattern = names.job(self._group, "*", "*")
        for subject in await subject_counts(self._broker, names.jobs, pattern):
            where, queue = names.parse_job(subject), names.parse_queue(subject)
            job = self._jobs.get(where[1]) if where else None
            if job is not None and queue and (pull := self._intake.open(job, queue)):
                self._tasks[pull.consumer] = asyncio.create_task(
                    pull.run(), name=f"holdfast-{pull.consumer}"
                )
        for name, task in self._tasks.items():
            if task.done():
                task.result()
                raise RuntimeError(f"the pull of {name} ended")
