"""`K8sScheduler`: a `TaskiqScheduler` that runs in two replicas, so that a rollout costs no slot.

Works with `taskiq scheduler module:object` unchanged. Its sources are wrapped (`HAScheduleSource`),
and one election decides who sends.

    start      sources, election: role known, broker ──► ready file created
    run        the file exists while this process is connected, has a role and can record slots
    SIGTERM    file removed ──► what is being sent is finished and recorded ──► lease given back ──►
               broker and sources shut down, exit code 0

taskiq's scheduler does not handle SIGTERM; here it is treated like Ctrl-C.
"""

from __future__ import annotations

from typing import Any

from taskiq import ScheduledTask, ScheduleSource
from taskiq.abc.broker import AsyncBroker
from taskiq.scheduler.scheduler import TaskiqScheduler

from holdfast.integrations.taskiq.connection import Servers
from holdfast.integrations.taskiq.election import LeaderElection
from holdfast.integrations.taskiq.ha_source import HAScheduleSource, Prefer
from holdfast.integrations.taskiq.monitor import Monitor
from holdfast.names import DEFAULT_NAMESPACE


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
        health_port: int = 0,
        ttl_seconds: float = 5.0,
        renew_seconds: float = 2.0,
        namespace: str = DEFAULT_NAMESPACE,
        **connect_options: Any,
    ) -> None:
        """`leader_key`: schedulers with the same key replace each other. Give each app its own.

        `health_port`: port for health and metrics; 0 for none.
        """
        self.election = LeaderElection(
            servers,
            leader_key,
            ttl_seconds=ttl_seconds,
            renew_seconds=renew_seconds,
            namespace=namespace,
            handle_sigterm=True,
            **connect_options,
        )
        self._wrapped = [
            source
            if isinstance(source, HAScheduleSource)
            else HAScheduleSource(source, self.election, prefer=prefer)
            for source in sources
        ]
        super().__init__(broker, list[ScheduleSource](self._wrapped))
        for source in self._wrapped:
            source.attach(self)
        self._monitor = Monitor(ready_file, health_port, self.election.telemetry, self._look)

    def _look(self) -> list[str]:
        telemetry, election = self.election.telemetry, self.election
        telemetry.leading.labels(election.leader_key).set(election.is_leader)
        telemetry.slot_overdue.set(max((s.overdue_seconds for s in self._wrapped), default=0.0))
        telemetry.schedules.set(sum(s.count for s in self._wrapped))
        problems = [problem for source in self._wrapped for problem in source.problems]
        if not election.established:
            problems.append("not connected, or no leader is known")
        return problems

    async def startup(self) -> None:
        """Start the broker; taskiq starts the sources, and with them the election."""
        await super().startup()
        await self.election.startup()
        await self._monitor.start()

    async def on_ready(self, source: ScheduleSource, task: ScheduledTask) -> None:
        """A schedule is due: note it, and let the source send it if this process leads."""
        if isinstance(source, HAScheduleSource) and not source.is_sending:
            source.note(task)
            return
        await super().on_ready(source, task)

    async def shutdown(self) -> None:
        """Finish what is being sent, hand over, disconnect."""
        await self._monitor.stop()
        for source in self._wrapped:
            await source.finish()
        await self.election.resign()
        await self.election.shutdown()
        await super().shutdown()
