"""The life of a role, written once: worker, scheduler, coordinator, dispatcher, agent, web.

    connect ─► streams ─► node ─► prepare ─► health ─► tasks ─► (stop) drain ─► leave ─► exit

A role supplies what is its own: `prepare`, `tasks`, `drain`, `trouble` and `describe`. Whatever it
opens in `prepare` it pushes onto a stack, which is unwound in reverse order however the role ends.

The first task that ends, ends the role. If it failed, the role ends at once with its error;
otherwise (the heartbeat of a node that was declared lost) it ends as after `stop`.

`run` returns after `stop`, and raises when the role cannot continue: its connection is closed for
good, a stream cannot be brought back, its node was declared lost. The command line turns that into
exit code 1, so that an orchestrator restarts the process.

`Together` runs several roles in one process; it is ready only while all of them are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, ClassVar, Final

from holdfast.broker import Broker
from holdfast.broker.upkeep import Upkeep
from holdfast.config.roles import Served
from holdfast.errors import NodeLost, NotConnected
from holdfast.health import Health, HealthServer, ReadyFile
from holdfast.ownership.membership import Membership
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.role")

READY_SECONDS: Final = 0.25
"""How often the ready file follows the role's health: probes look at it once a second at most."""


class Role:
    """Runs until it is stopped. Subclasses set `upkeep` and `member` if they need them."""

    role: ClassVar[str]
    """Its name in records and on the command line."""
    upkeep: Upkeep | None = None
    """The streams and buckets that it needs; created before anything else."""
    member: Membership | None = None
    """This process as a node; it leaves last."""

    def __init__(
        self,
        broker: Broker,
        telemetry: Telemetry,
        served: Served,
        *,
        health_path: str = "",
        ready_file: str = "",
    ) -> None:
        """Health is served as configured, or on a Unix socket at `health_path`."""
        self.broker = broker
        self.broker.unreadable.counter = telemetry.unreadable
        self.telemetry = telemetry
        self.started = asyncio.Event()
        self.stopping = asyncio.Event()
        self.forced = False
        """Whether something had to be interrupted at the end; the node's record says so."""
        self.running: dict[str, asyncio.Task[None]] = {}
        """The tasks of `tasks`, by name, while the role runs."""
        self._served = served
        self._health_path = health_path
        self._ready_file = ready_file

    # ---- what a role supplies

    async def connect(self, ending: contextlib.AsyncExitStack) -> None:
        """Open the connection."""
        await ending.enter_async_context(self.broker)

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """Get ready to work; the connection, the streams and the node exist. `ending` is unwound at
        the end."""

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs until the role is stopped."""
        return {}

    async def drain(self) -> None:
        """Stop taking work and finish what is under way; the tasks are cancelled afterwards."""

    def trouble(self) -> list[str]:
        """Why it is not ready, beyond what every role reports. Called once it has started."""
        return []

    def describe(self) -> dict[str, Any]:
        """For the health page. Called once it has started."""
        return self.member.describe() if self.member else {}

    async def answer(self, path: str) -> dict[str, Any] | None:
        """Answer another path on the health port; None: there is no such path."""
        return None

    # ---- life

    def stop(self) -> None:
        """Drain, then end `run`."""
        self.stopping.set()

    async def run(self, *, alone: bool = True) -> None:
        """Work until stopped. `alone`: serve health; `Together` does it for its roles."""
        async with contextlib.AsyncExitStack() as ending:
            await self.connect(ending)
            await self._join(ending)
            await self.prepare(ending)
            if alone:
                await ending.enter_async_context(self.probes(self.health))
                self.broker.on_reconnect(self.telemetry.reconnects.inc)
            ending.push_async_callback(self._end_tasks)
            self._start_tasks()
            self.started.set()
            await self._until_stopped()
            await self.drain()
        if self.member and self.member.heartbeat.lost.is_set():
            raise NodeLost("stopped after this node was declared lost")
        log.info("%s stopped", self.describe().get("node", self.role))

    async def _join(self, ending: contextlib.AsyncExitStack) -> None:
        if self.upkeep:
            await self.upkeep.ensure()
        if self.member:
            await self.member.start()
            ending.push_async_callback(self._leave, self.member)

    async def _leave(self, member: Membership) -> None:
        await member.stop(forced=self.forced)

    def _start_tasks(self) -> None:
        working = self.tasks()
        if self.upkeep:
            working["upkeep"] = self.upkeep.run()
        if self.member:
            working["heartbeat"] = self.member.heartbeat.run()
        for name, work in working.items():
            self.running[name] = asyncio.create_task(work, name=f"holdfast-{name}")

    async def _until_stopped(self) -> None:
        stopping = asyncio.create_task(self.stopping.wait(), name="holdfast-stop")
        closed = asyncio.create_task(self.broker.closed.wait(), name="holdfast-closed")
        try:
            ends = {stopping, closed, *self.running.values()}
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            closed.cancel()
        for task in done:
            task.result()
        if closed in done and not self.stopping.is_set():
            raise NotConnected("the connection to NATS is closed for good")
        self.stopping.set()

    async def cancel(self, *names: str) -> None:
        """End some of the tasks before the others."""
        tasks = [self.running.pop(name) for name in names]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _end_tasks(self) -> None:
        await self.cancel(*self.running)

    # ---- health

    def problems(self) -> list[str]:
        """Why it is not ready; empty when it is."""
        found = [] if self.broker.connected else ["not connected to NATS"]
        if not self.started.is_set():
            return [*found, "starting"]
        if self.stopping.is_set():
            found.append("stopping")
        return [*found, *self.trouble(), *(self.upkeep.problems if self.upkeep else ())]

    def health(self) -> Health:
        """For `/health` and `/metrics`."""
        problems = self.problems()
        facts = self.describe() if self.started.is_set() else {}
        return Health(not problems, problems, self.telemetry.render, facts, self.answer)

    @contextlib.asynccontextmanager
    async def probes(self, health: Callable[[], Health]) -> AsyncIterator[None]:
        """Serve health where this role is configured to, over HTTP and as a file."""
        at = (self._served.health_host, self._served.health_port)
        file = ReadyFile(self._ready_file)
        file.set(False)  # a killed process may have left one behind
        async with HealthServer(*at, health, path=self._health_path):
            following = asyncio.create_task(_follow(file, health), name="holdfast-ready-file")
            try:
                yield
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                file.set(False)


async def _follow(file: ReadyFile, health: Callable[[], Health]) -> None:
    while file.wanted:
        file.set(health().ready)
        await asyncio.sleep(READY_SECONDS)


class Together:
    """Several roles in one process: the end of any is the end of all.

    Health is served where the first role is configured to serve it, and is that of all of them.
    """

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = roles

    def stop(self) -> None:
        """Stop all of them."""
        for role in self._roles:
            role.stop()

    async def run(self) -> None:
        """Run them until all have ended."""
        first = self._roles[0]
        # All connections break together, so the break is counted once.
        first.broker.on_reconnect(first.telemetry.reconnects.inc)
        async with first.probes(self.health):
            tasks = [asyncio.create_task(role.run(alone=False)) for role in self._roles]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.stop()
                results = await asyncio.gather(*tasks, return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    def health(self) -> Health:
        """Ready while all are; the first role's facts, then every role's by its name."""
        found = {role.role: role.health() for role in self._roles}
        problems = [f"{name}: {p}" for name, health in found.items() for p in health.problems]
        first = next(iter(found.values()))
        roles = {
            name: {"ready": health.ready, "problems": health.problems, **health.facts}
            for name, health in found.items()
        }
        facts = {**first.facts, "roles": roles}
        return Health(not problems, problems, first.metrics, facts, self._answer)

    async def _answer(self, path: str) -> dict[str, Any] | None:
        for role in self._roles:
            answer = await role.answer(path)
            if answer is not None:
                return answer
        return None
