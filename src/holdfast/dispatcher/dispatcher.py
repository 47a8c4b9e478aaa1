"""A dispatcher: takes requests, fans commands out to agents, collects their returns.

Any number may run; there is no leader. The dispatcher that takes a request owns the run, by
compare-and-swap, until it has ended. If it dies, coordinators notice within seconds and another
adopts its runs (`adoption`); if it leaves, it hands them over; if it was declared lost but still
runs, it stops without writing. After a restart of all dispatchers, the first one back continues
every run.

No essential state is kept here: runs and returns are on the server, and agents know what they have
executed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine
from typing import Any, Final

from holdfast.broker import Broker, Received
from holdfast.broker.streams import FLEET_BUCKETS, SETTINGS_BUCKETS, Topology
from holdfast.broker.upkeep import Upkeep
from holdfast.client.commanding import Sender
from holdfast.config import ConnectionConfig, DispatcherConfig, RecordConfig
from holdfast.dispatcher.adoption import Adoption
from holdfast.dispatcher.agents import AgentIndex
from holdfast.dispatcher.intake import RequestIntake
from holdfast.dispatcher.joins import JoinIntake
from holdfast.dispatcher.records import FleetRecords
from holdfast.dispatcher.watch import Watch
from holdfast.errors import BrokerError, HoldfastError, Unavailable, Unreadable
from holdfast.identity.seed import AccountSeed, generations_near
from holdfast.model import node as nodes
from holdfast.model.fleet import FleetRun
from holdfast.model.liveness import Liveness
from holdfast.names import kv_stream, last_token
from holdfast.ownership.membership import Membership
from holdfast.retrying import repeating, retrying
from holdfast.role import Role
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.dispatcher")

QUEUE: Final = "dispatchers"
ADOPTING: Final = "looking for runs without an owner"
HAND_OVER_SECONDS: Final = 5.0
"""How long handing over runs may take (one write each); runs that are left are adopted as
orphans."""
TAKE_UP_SECONDS: Final = 1.0
"""The pause before resuming a run whose watch failed, so that a bug does not flood the log."""
NO_SEED: Final = (
    "no account seed is given: agents with credentials will refuse every command. Start with "
    "--seed FILE, or set HOLDFAST_DISPATCHER_SEED_FILE"
)


class Dispatcher(Role):
    """Fans commands out until stopped."""

    role = "dispatcher"
    member: Membership

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
        broker = Broker(connection, name="holdfast dispatcher")
        super().__init__(broker, telemetry or Telemetry(), self.config)
        seed = AccountSeed.load(self.config.seed_file) if self.config.seed_file else None
        self._signs = seed is not None
        self._will_be_refused = not self._signs and bool(connection.credentials_file)
        if seed and connection.credentials_file:
            near = generations_near(self.config.generation)
            broker.guard.trust({g: seed.verify_key(g) for g in near})
        self._watches: dict[str, tuple[Watch, asyncio.Task[None]]] = {}
        self._requests: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._taking: Any = None
        self._topology = Topology(broker, records or RecordConfig())
        self.upkeep = Upkeep(
            self._topology,
            buckets=FLEET_BUCKETS,
            optional=SETTINGS_BUCKETS,
            on_made=self._made_again,
        )
        self.member = Membership(
            broker,
            self.role,
            liveness=liveness,
            stop=self.stop,
            running=self._watches.__len__,
            runs=lambda: tuple(itertools.islice(self._watches, nodes.MOST_RUNS)),
        )
        self.node = self.member.node
        self._index = AgentIndex(broker)
        self._records = FleetRecords(broker, self.node)
        self._sender = Sender(broker, seed, self.config.generation)
        self._joins = JoinIntake(broker, seed, self.config.generation) if seed else None
        self._intake = RequestIntake(
            broker, self.node, self._index, self._records, self._sender, self._own
        )
        self._adoption = Adoption(
            broker,
            self.node,
            self._records,
            self.telemetry,
            self.member.alive,
            self._own,
            self.config.kept_seconds,
        )

    # ---- life

    async def prepare(self, ending: contextlib.AsyncExitStack) -> None:
        """Learn the agents, then take requests."""
        ending.push_async_callback(self._end_work)
        await self._sender.open()
        await self._index.open()
        self.broker.on_reconnect(self._come_back)
        names = self.broker.names
        await self.broker.subscribe(names.handover, self._on_handover)
        await self.broker.subscribe(names.changed(names.nodes, ">"), self._on_node)
        if self._joins:  # without the seed, hosts are left to dispatchers that have it
            await self.broker.subscribe(names.join, self._on_join, queue=QUEUE)
        requests = names.dispatch("*")
        self._taking = await self.broker.subscribe(requests, self._on_request, queue=QUEUE)
        self._look.set()
        known, online = self._index.counts()
        how = "signed" if self._signs else "not signed"
        log.info("%s: dispatching, %d of %d agents online, %s", self.node, online, known, how)
        if self._will_be_refused:
            log.warning(NO_SEED)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Follow the agents; take over the runs of dispatchers that are gone."""
        following = {name: mirror.run() for name, mirror in self._index.mirrors.items()}
        return {"adopt": self._adopt(), **following}

    async def drain(self) -> None:
        """Take no more requests; hand over runs that are not about to end."""
        if self.member.heartbeat.lost.is_set():
            return  # others have taken over our runs
        await self.broker.unsubscribe(self._taking)
        await asyncio.gather(*self._requests, return_exceptions=True)
        for watch, _ in self._watches.values():
            watch.detach()
        if self._watches:
            await asyncio.wait(
                [task for _, task in self._watches.values()], timeout=HAND_OVER_SECONDS
            )

    async def _end_work(self) -> None:
        ending = [*self._requests, *(task for _, task in self._watches.values())]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    # ---- runs

    def _own(self, record: FleetRun, revision: int) -> None:
        """This dispatcher owns the run from this revision on."""
        if record.run in self._watches:
            return
        watch = Watch(
            self.broker,
            self._records,
            self._sender,
            self.config,
            self.telemetry,
            record,
            revision,
            trusted=lambda: self.member.heartbeat.trusted,
            fresh=record.status == "claimed" and not record.adoptions,
        )
        task = asyncio.create_task(watch.run(), name=f"holdfast-run-{record.run}")
        self._watches[record.run] = (watch, task)
        self.telemetry.fleet_active.set(len(self._watches))
        if self.stopping.is_set():
            watch.detach()

        def over(ended: asyncio.Task[None]) -> None:
            self._watches.pop(record.run, None)
            self.telemetry.fleet_active.set(len(self._watches))
            if not ended.cancelled() and (error := ended.exception()):
                bug = None if isinstance(error, HoldfastError) else error
                log.error("run %s: %s; resuming it", record.run, error, exc_info=bug)
                self._spawn(self._take_up(record.run))

        task.add_done_callback(over)

    async def _take_up(self, run: str) -> None:
        """Resume a run whose watch failed, from its record."""
        await self.broker.clock.sleep(TAKE_UP_SECONDS)
        try:
            found = await self._records.read(run)
        except Unreadable:
            return
        if found and found[0].owner == self.node and not found[0].over:
            self._own(*found)

    def _come_back(self) -> None:
        """After a disconnect: others may own our runs, and messages may have been missed."""
        for watch, _ in self._watches.values():
            watch.look_again()
        self._look.set()

    def _made_again(self, stream: str) -> None:
        """A bucket was deleted and recreated: write our runs again, then read it again."""
        if stream in {kv_stream(self.broker.names.bucket(noun)) for noun in FLEET_BUCKETS}:
            self._come_back()

    # ---- messages

    async def _on_request(self, message: Received) -> None:
        self._spawn(self._intake.on_request(message))

    async def _on_join(self, message: Received) -> None:
        if self._joins:
            self._spawn(self._joins.on_request(message))

    async def _on_handover(self, _: Received) -> None:
        self._look.set()

    async def _on_node(self, message: Received) -> None:
        """A dispatcher that is gone leaves orphans; the notification only triggers a search."""
        key = last_token(message.subject)
        bucket = self.broker.names.nodes
        record = self.broker.unreadable.read(nodes.decode, bucket, key, message.body)
        if record and record.role == "dispatcher" and not record.alive and key != self.node:
            self._look.set()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _adopt(self) -> None:
        """Look for orphans at the start, when a dispatcher is gone, and regularly."""
        await repeating(
            lambda: retrying(self._look_for_orphans, clock=self.broker.clock, what=ADOPTING),
            clock=self.broker.clock,
            every=self.member.heartbeat.timeout / 2,
            what=ADOPTING,
            wake=self._look,
        )

    async def _look_for_orphans(self) -> None:
        known, online = self._index.counts()
        self.telemetry.agents.labels("online").set(online)
        self.telemetry.agents.labels("offline").set(known - online)
        with contextlib.suppress(BrokerError):
            await self._topology.measure_clock()
        if not self.member.heartbeat.trusted:
            raise Unavailable("this node's own heartbeat is not confirmed")
        await self._adoption.look()

    def trouble(self) -> list[str]:
        """Whether it may send."""
        if self.broker.connected and not self.member.heartbeat.trusted:
            return ["its own heartbeat is not confirmed: it sends nothing"]
        return []

    def describe(self) -> dict[str, Any]:
        """Adds the number of runs it owns."""
        return {**super().describe(), "runs": len(self._watches)}
