"""Subscribers that moved to another group: what the old consumer has left is taken over.

A subscriber's consumer is named by its group. When a job moves to another group, the consumer of
the old one stays, and keeps collecting events that nobody pulls. The workers of the new group
empty it and then remove it: each event in it is executed once, under the run id of the new group,
by which an event that both consumers have is known as a repeat.

It is taken over only if it is certainly our own: the same app made it (its label
says so), for a job and an event that we subscribe to, and no live worker serves it in its group.
Consumers without a label (of other apps, or of versions before labels) are shown by the doctor.

Not prevented: while workers of both groups run, each group executes every event.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, Final

from holdfast.app import Job
from holdfast.broker import Bucket, Pull
from holdfast.broker.streams import APP_LABEL
from holdfast.client import Client
from holdfast.errors import BrokerError, NotFound
from holdfast.model import node as nodes
from holdfast.names import parse_consumer
from holdfast.worker.intake import Intake

log = logging.getLogger("holdfast.worker")

LOOK_SECONDS: Final = 10.0
"""A group that moves is rare, and listing consumers costs the server little at this rate."""


class Moved:
    """Empties and removes the consumers that our subscribers had in other groups."""

    def __init__(
        self, client: Client, intake: Intake, app: str, jobs: Iterable[Job[Any, Any]]
    ) -> None:
        self._client = client
        self._broker = client.broker
        self._stream = client.broker.names.events
        self._intake = intake
        self._app = app
        self._jobs = {job.spec.name: job for job in jobs if job.spec.on}
        self._draining: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Look every `LOOK_SECONDS` until cancelled."""
        try:
            while self._jobs:
                await self._broker.clock.sleep(LOOK_SECONDS)
                try:
                    await self._look()
                except BrokerError as error:
                    log.debug("search for moved subscribers failed, will retry: %s", error)
            await asyncio.Event().wait()
        finally:
            for name in list(self._draining):
                await self._stop(name)

    async def _look(self) -> None:
        left = {info["name"]: info for info in await self._left()}
        for name in [n for n in self._draining if n not in left]:
            await self._stop(name)
        for name, info in left.items():
            if info.get("num_pending") or info.get("num_ack_pending"):
                self._drain(name, info)
            else:
                await self._remove(name)

    async def _left(self) -> list[dict[str, Any]]:
        """The consumers of our subscribers in groups that have no worker for them."""
        found = [c for c in await self._client.topology.consumers(self._stream) if self._is_old(c)]
        if not found:
            return []
        bucket = Bucket(self._broker, self._broker.names.nodes)
        known = [node async for _, node in bucket.records(nodes.decode)]
        served = {(n.group, job) for n in known if n.alive and n.role == "worker" for job in n.jobs}
        return [c for c in found if parse_consumer(c["name"]) not in served]

    def _is_old(self, info: dict[str, Any]) -> bool:
        where = parse_consumer(info.get("name", ""))
        job = self._jobs.get(where[1]) if where else None
        if where is None or job is None or where[0] == job.spec.group:
            return False
        label = (info["config"].get("metadata") or {}).get(APP_LABEL)
        return label == self._app and self._event(info) in job.spec.on

    def _event(self, info: dict[str, Any]) -> str:
        return self._broker.names.parse_event(info["config"].get("filter_subject", "")) or ""

    def _drain(self, name: str, info: dict[str, Any]) -> None:
        if name in self._draining:
            return
        group, job_name = parse_consumer(name) or ("", "")
        job, event = self._jobs[job_name], self._event(info)
        log.info("job %s moved from group %s: taking over its events %s", job_name, group, event)

        async def ensure() -> None:
            await self._broker.api(f"CONSUMER.INFO.{self._stream}.{name}")

        pull = Pull(
            self._broker,
            self._stream,
            name,
            ensure=ensure,
            deliver=lambda delivery: self._intake.delivered(delivery, job, event),
            want=lambda: self._intake.wanted(pull, job.lane),
        )
        self._draining[name] = asyncio.create_task(pull.run(), name=f"holdfast-moved-{name}")

    async def _remove(self, name: str) -> None:
        await self._stop(name)
        try:
            await self._broker.api(f"CONSUMER.DELETE.{self._stream}.{name}")
        except NotFound:
            return  # another worker of our group was faster
        log.info("consumer %s is empty and its job has moved: removed", name)

    async def _stop(self, name: str) -> None:
        if task := self._draining.pop(name, None):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
