"""A dispatcher: takes requests, fans commands out to agents, collects their returns.

Any number may run; none leads. A request goes to one of them; whoever takes it owns the run, by
compare-and-swap, until it has ended. One that dies is noticed by the coordinators within seconds,
and its runs are adopted by another (`adoption`); one that leaves hands its runs over; one that was
declared lost and is still running lets go and ends. When all of them are restarted, the first that
comes back goes on with every run.

Nothing that matters is kept here: runs and returns are on the server, and agents know what they
have executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Final

from holdfast.broker import Broker, Received
from holdfast.broker.streams import FLEET_BUCKETS, SETTINGS_BUCKETS, Topology
from holdfast.broker.upkeep import Upkeep
from holdfast.config import ConnectionConfig, DispatcherConfig, RecordConfig
from holdfast.dispatcher.adoption import Adoption
from holdfast.dispatcher.agents import AgentIndex
from holdfast.dispatcher.intake import Intake
from holdfast.dispatcher.records import FleetRecords
from holdfast.dispatcher.sending import Sender
from holdfast.dispatcher.watch import Watch
from holdfast.errors import BrokerError, HoldfastError, NodeLost, Unreadable
from holdfast.health import Health, HealthServer
from holdfast.identity import AccountSeed
from holdfast.identity.seed import generations_near
from holdfast.model.fleet import FleetRun
from holdfast.model.liveness import Liveness
from holdfast.model.node import NodeRecord
from holdfast.names import kv_stream
from holdfast.ownership.membership import Membership
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.dispatcher")

QUEUE: Final = "dispatchers"
HAND_OVER_SECONDS: Final = 5.0
TAKE_UP_SECONDS: Final = 1.0
NO_SEED: Final = (
    "no account seed is given: agents with credentials will refuse every command. Start with "
    "--seed FILE, or set HOLDFAST_DISPATCHER_SEED_FILE"
)


class Dispatcher:
    """Fans commands out until it is stopped."""

    def __init__(
        self,
        connection: ConnectionConfig,
        config: DispatcherConfig | None = None,
        *,
        records: RecordConfig | None = None,
        liveness: Liveness | None = None,
        telemetry: Telemetry | None = None,
    ) -> None:
        self.config = config or DispatcherConfig()
        self.telemetry = telemetry or Telemetry()
        seed = AccountSeed.load(self.config.seed_file) if self.config.seed_file else None
        self._signs = seed is not None
        self._will_be_refused = not self._signs and bool(connection.credentials_file)
        self._broker = Broker(connection, name="holdfast dispatcher")
        self._broker.unreadable.counter = self.telemetry.unreadable
        if seed and connection.credentials_file:
            near = generations_near(self.config.generation)
            self._broker.guard.trust({g: seed.verify_key(g) for g in near})
        self._topology = Topology(self._broker, records or RecordConfig())
        self._member = Membership(
            self._broker,
            "dispatcher",
            liveness=liveness,
            stop=self.stop,
            running=lambda: len(self._watches),
        )
        self.node = self._member.node
        self.ready = asyncio.Event()
        self._index = AgentIndex(self._broker, self._on_node)
        self._records = FleetRecords(self._broker, self.node)
        self._sender = Sender(self._broker, seed, self.config.generation)
        self._intake = Intake(
            self._broker, self.node, self._index, self._records, self._sender, self._own
        )
        self._adoption = Adoption(
            self._broker,
            self.node,
            self._records,
            self.telemetry,
            self._member.alive,
            self._own,
            self.config.kept_seconds,
        )
        self._upkeep = Upkeep(
            self._topology,
            buckets=FLEET_BUCKETS,
            optional=SETTINGS_BUCKETS,
            on_made=self._made_again,
        )
        self._stop = asyncio.Event()
        self._look = asyncio.Event()
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._leaving = False

    def stop(self) -> None:
        """End `run`."""
        self._stop.set()

    # ---- life

    async def run(self) -> None:
        """Dispatch until `stop` is called; raises when it was declared lost."""
        async with self._broker:
            await self._topology.ensure()
            for noun in FLEET_BUCKETS:
                await self._topology.ensure_bucket(noun)
            await self._member.start()
            await self._sender.open()
            await self._index.open()
            self._broker.on_reconnect(self._come_back)
            await self._broker.subscribe(self._broker.names.handover, self._on_handover)
            taking = await self._broker.subscribe(
                self._broker.names.dispatch("*"), self._on_request, queue=QUEUE
            )
            self._look.set()
            tasks = [
                asyncio.create_task(self._member.heartbeat.run(), name="holdfast-heartbeat"),
                asyncio.create_task(self._adopt(), name="holdfast-adopt"),
                asyncio.create_task(self._upkeep.run(), name="holdfast-upkeep"),
                asyncio.create_task(self._stop.wait(), name="holdfast-stop"),
                asyncio.create_task(self._broker.closed.wait(), name="holdfast-closed"),
            ]
            known, online = self._index.counts()
            how = "signed" if self._signs else "not signed"
            log.info("%s: dispatching, %d of %d agents online, %s", self.node, online, known, how)
            if self._will_be_refused:
                log.warning(NO_SEED)
            self.ready.set()
            try:
                async with HealthServer(
                    self.config.health_host, self.config.health_port, self._health
                ):
                    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if not self._member.heartbeat.lost.is_set():
                    await self._broker.unsubscribe(taking)
                    await self._leave()
            finally:
                await self._end(tasks)
            if self._member.heartbeat.lost.is_set():
                raise NodeLost("stopped after this node was declared lost")

    async def _leave(self) -> None:
        """Take nothing more; hand over what is not just ending."""
        self._leaving = True
        await asyncio.gather(*self._requests, return_exceptions=True)
        for watch, _ in self._watches.values():
            watch.detach()
        if self._watches:
            await asyncio.wait(
                [task for _, task in self._watches.values()], timeout=HAND_OVER_SECONDS
            )

    async def _end(self, tasks: list[asyncio.Task[Any]]) -> None:
        ending = [*tasks, *self._requests, *(task for _, task in self._watches.values())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)
        await self._member.stop()

    # ---- runs

    def _own(self, record: FleetRun, revision: int) -> None:
        """A run is ours from this revision on."""
        if record.run in self._watches:
            return
        watch = Watch(
            self._broker,
            self._records,
            self._sender,
            self.config,
            self.telemetry,
            record,
            revision,
            trusted=lambda: self._member.heartbeat.trusted,
            fresh=record.status == "claimed" and not record.adoptions,
        )
        task = asyncio.create_task(watch.run(), name=f"holdfast-run-{record.run}")
        self._watches[record.run] = (watch, task)
        self.telemetry.fleet_active.set(len(self._watches))
        if self._leaving:
            watch.detach()

        def over(ended: asyncio.Task[None]) -> None:
            self._watches.pop(record.run, None)
            self.telemetry.fleet_active.set(len(self._watches))
            if not ended.cancelled() and (error := ended.exception()):
                bug = None if isinstance(error, HoldfastError) else error
                log.error("run %s: %s; taking it up again", record.run, error, exc_info=bug)
                self._spawn(self._take_up(record.run))

        task.add_done_callback(over)

    async def _take_up(self, run: str) -> None:
        """A watch of ours has failed: begin again with what the record says."""
        await self._broker.clock.sleep(TAKE_UP_SECONDS)
        try:
            found = await self._records.read(run)
        except Unreadable:
            return
        if found and found[0].owner == self.node and not found[0].over:
            self._own(*found)

    def _come_back(self) -> None:
        """After a break: what we own may be another's, and much may have been missed."""
        for watch, _ in self._watches.values():
            watch.look_again()
        self._spawn(self._index.refresh())
        self._look.set()

    def _made_again(self, stream: str) -> None:
        """A bucket was deleted: write our runs again, then read it again."""
        if stream in {kv_stream(self._broker.names.bucket(noun)) for noun in FLEET_BUCKETS}:
            self._come_back()

    # ---- hearing

    async def _on_request(self, message: Received) -> None:
        self._spawn(self._intake.on_request(message))

    async def _on_handover(self, _: Received) -> None:
        self._look.set()

    def _on_node(self, record: NodeRecord) -> None:
        if record.role == "dispatcher" and not record.alive and record.id != self.node:
            self._look.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _adopt(self) -> None:
        """Look for orphans when somebody is gone, at the start, and once in a while."""
        pause = self._member.heartbeat.timeout / 2
        while True:
            try:
                async with asyncio.timeout(pause):
                    await self._look.wait()
            except TimeoutError:
                pass
            self._look.clear()
            known, online = self._index.counts()
            self.telemetry.agents.labels("online").set(online)
            self.telemetry.agents.labels("offline").set(known - online)
            with contextlib.suppress(BrokerError):
                await self._topology.measure_clock()
            able = self._broker.connected and self._member.heartbeat.trusted
            if not able or not await self._adoption.try_look():
                await self._broker.clock.sleep(0.5)
                self._look.set()

    def _health(self) -> Health:
        problems = [] if self._broker.connected else ["not connected to NATS"]
        if self._broker.connected and not self._member.heartbeat.trusted:
            problems.append("its own heartbeat is not confirmed: it sends nothing")
        problems += self._upkeep.problems
        facts = {**self._member.describe(), "runs": len(self._watches)}
        return Health(not problems, problems, self.telemetry.render, facts)
