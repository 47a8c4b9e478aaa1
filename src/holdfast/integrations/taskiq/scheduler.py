"""`K8sScheduler`: a `TaskiqScheduler` of which two run, and a rollout costs no slot.

Works with `taskiq scheduler module:object` unchanged. Its sources are wrapped (`HAScheduleSource`),
one election decides who sends.

    start      sources, election: role known, broker ──► ready file made
    run        the file exists while this process is connected and knows its place
    SIGTERM    file removed ──► what is being sent is finished and marked ──► lease given back ──►
               broker and sources shut down, exit code 0

taskiq's scheduler handles no SIGTERM by itself; here it takes the way of Ctrl-C.
A dispatch that fails is repeated every second while this process leads.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from taskiq import ScheduledTask, ScheduleSource
from taskiq.abc.broker import AsyncBroker
from taskiq.exceptions import SendTaskError
from taskiq.scheduler.scheduler import TaskiqScheduler

from holdfast.health import ReadyFile
from holdfast.integrations.taskiq.connection import Servers
from holdfast.integrations.taskiq.election import LeaderElection
from holdfast.integrations.taskiq.ha_source import HAScheduleSource, Prefer
from holdfast.names import DEFAULT_NAMESPACE

log = logging.getLogger("holdfast.taskiq")

LOOK_SECONDS: Final = 0.25
FINISH_SECONDS: Final = 5.0


class K8sScheduler(TaskiqScheduler):
    """A scheduler for more than one replica."""

    def __init__(
        self,
        broker: AsyncBroker,
        sources: list[ScheduleSource],
        servers: Servers,
        leader_key: str = "taskiq-scheduler",
        *,
        prefer: Prefer = "duplicate",
        ready_file: str = "/tmp/ready",
        ttl_seconds: float = 5.0,
        renew_seconds: float = 2.0,
        namespace: str = DEFAULT_NAMESPACE,
        **connect_options: Any,
    ) -> None:
        """`leader_key`: schedulers with the same one stand in for each other."""
        self.election = LeaderElection(
            servers,
            leader_key,
            ttl_seconds=ttl_seconds,
            renew_seconds=renew_seconds,
            namespace=namespace,
            handle_sigterm=True,
            **connect_options,
        )
        wrapped = [self._wrapped(source, prefer) for source in sources]
        super().__init__(broker, list[ScheduleSource](wrapped))
        for source in wrapped:
            source.attach(self)
        self._ready = ReadyFile(ready_file)
        self._ready_task: asyncio.Task[None] | None = None
        self._sending = 0

    def _wrapped(self, source: ScheduleSource, prefer: Prefer) -> HAScheduleSource:
        if isinstance(source, HAScheduleSource):
            return source
        return HAScheduleSource(source, self.election, prefer=prefer)

    async def startup(self) -> None:
        """Start the broker; the sources, and with them the election, are started by taskiq."""
        self._ready.set(False)
        self._sent = asyncio.Event()
        await super().startup()
        await self.election.startup()
        self._ready_task = asyncio.create_task(self._tell(), name="holdfast-taskiq-ready")

    async def on_ready(self, source: ScheduleSource, task: ScheduledTask) -> None:
        """Send what is due, if this process leads; what cannot be sent now is sent later."""
        self._sending += 1
        try:
            await super().on_ready(source, task)
        except SendTaskError as error:
            if not isinstance(source, HAScheduleSource):
                raise
            log.warning("%s could not be sent, trying again: %s", task.task_name, error.__cause__)
            source.remember(task)
        finally:
            self._sending -= 1
            if self._sending == 0:
                self._sent.set()

    async def shutdown(self) -> None:
        """Finish what is being sent, hand over, disconnect."""
        if self._ready_task:
            self._ready_task.cancel()
            await asyncio.gather(self._ready_task, return_exceptions=True)
        self._ready.set(False)
        await self._finish()
        await self.election.resign()
        await self.election.shutdown()
        await super().shutdown()

    async def _finish(self) -> None:
        self._sent.clear()
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                while self._sending:
                    await self._sent.wait()
        except TimeoutError:
            log.warning("%d dispatches did not end in time", self._sending)

    async def _tell(self) -> None:
        while True:
            self._ready.set(self.election.established)
            await asyncio.sleep(LOOK_SECONDS)
