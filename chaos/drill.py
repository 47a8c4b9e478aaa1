"""A whole chaos run: servers, processes, workload, nemesis, healing, waiting, checking.

    start everything ──► workload + nemesis ──► heal ──► wait until nothing waits ──► check
                            └─ a backup half-way ──────────────────► restored elsewhere ──┘

The wait ends when every accepted operation and every due slot has had its effect and the queues are
empty; if something is missing, once the queues have been empty for a while or the settling time is
over. Either way the checker decides, not the wait.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from chaos import flows
from chaos.app import POISON_CODE, make_app, slot_mark
from chaos.backup import Backup
from chaos.checker import Checker, Verdict
from chaos.effects import Effects, Line
from chaos.fleet import Exit, Member, find_faketime
from chaos.history import History, Operation
from chaos.links import Network
from chaos.measures import Measures, measure
from chaos.memory import Usage, usage, watch
from chaos.nemesis import Nemesis, Target, victims
from chaos.plan import ChaosPlan, Victim
from chaos.servers import ClusterTarget, NodeTarget, RoutedCluster
from chaos.targets import Records, Sender, Tap
from chaos.workload import Workload
from holdfast.broker import Broker, Bucket
from holdfast.client import Client
from holdfast.config import ConnectionConfig, RecordConfig
from holdfast.errors import BrokerError
from holdfast.model import run as runs
from holdfast.model import schedule as schedules
from holdfast.model.run import RunRecord
from holdfast.model.slot import slot_id
from holdfast.names import schedule_key
from holdfast.status.jobs import Jobs
from holdfast.status.limits import Limits

APP: Final = "chaos.app:app"
SETTLE_SECONDS: Final = 150.0
QUIET_SECONDS: Final = 60.0
"""Queues empty for this long with something missing: it will not come. Coordinators look at a flow
that was parked for 30 s."""
ENVIRONMENT: Final = {
    "HOLDFAST_REPLICAS": "3",  # the servers do not report how many they are
    "HOLDFAST_WORKER_CRASH_LIMIT": "100",  # repeated kills are not the run's fault
    "HOLDFAST_RECORD_KEYLESS_TTL_SECONDS": "86400",
}
CRASHES_COUNT: Final = {"HOLDFAST_WORKER_CRASH_LIMIT": "3"}
"""For workers that are not killed: there, only a run that kills them is given up."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many of each process."""

    servers: int = 3
    schedulers: int = 2
    coordinators: int = 2
    quick: int = 3
    steady: int = 2
    zoo: int = 2
    rate: float = 25.0
    window: float = 30.0
    """How long the servers remember message ids; a short run does not wait that long at its end."""


@dataclass(slots=True)
class Outcome:
    """Everything that a report needs."""

    plan: ChaosPlan
    verdict: Verdict
    measures: Measures
    history: History
    exits: Sequence[Exit]
    seconds: float
    settled_seconds: float
    left_out: Sequence[str]
    pulse: Sequence[float]
    """Effects in each second."""
    memory: Mapping[str, Usage]


class Drill:
    """One chaos run in one directory."""

    def __init__(
        self,
        root: Path,
        *,
        size: Size | None = None,
        fast: bool = False,
        tell: Callable[[str], None] = print,
    ) -> None:
        self.root = root
        self.size = size or Size()
        self._tell = tell
        self._faketime = find_faketime()
        self._namespace = f"chaos{secrets.token_hex(3)}"
        self._cluster = RoutedCluster(self.size.servers, root / "servers", fast=fast)
        self._members = self._make_members()
        self._effects = Effects(root)
        self._marks: set[str] = set()
        self._read = 0
        self._history = History(root / "history.jsonl")
        self._network = Network(self.size.servers)

    # ---- participants

    def _make_members(self) -> list[Member]:
        size, worker = self.size, ("worker", APP, "--concurrency", "40")
        wanted = [
            *(("scheduler", n, ("scheduler", APP)) for n in range(size.schedulers)),
            *(("coordinator", n, ("coordinator",)) for n in range(size.coordinators)),
            *(("quick", n, (*worker, "--group", "quick")) for n in range(size.quick)),
            *(("steady", n, (*worker, "--group", "steady")) for n in range(size.steady)),
            *(("zoo", n, (*worker, "--group", "zoo")) for n in range(size.zoo)),
        ]
        return [self._member(role, n + 1, command) for role, n, command in wanted]

    def _member(self, kind: str, number: int, command: tuple[str, ...]) -> Member:
        role = "worker" if kind in ("quick", "steady", "zoo") else kind
        zoo = kind == "zoo"
        own = {
            **(CRASHES_COUNT if zoo else {}),
            "HOLDFAST_NAMESPACE": self._namespace,
            "HOLDFAST_RECORD_DEDUP_WINDOW_SECONDS": str(self.size.window),
        }
        return Member(
            f"{kind}-{number}",
            role,
            command,
            self.root,
            env={**ENVIRONMENT, **own},
            servers=self.size.servers,
            faketime=self._faketime,
            ends_with=POISON_CODE if zoo else None,
        )

    @property
    def targets(self) -> list[Target]:
        """Everything that can be hit."""
        nodes = [NodeTarget(self._cluster, n) for n in range(self.size.servers)]
        return [
            *self._members,
            *nodes,
            ClusterTarget(self._cluster),
            Sender(self._network),
            Records(self._broker),
            Tap(self._broker),
        ]

    @property
    def victims(self) -> list[Victim]:
        """The targets, as a plan needs to know them."""
        return victims(self.targets)

    @property
    def left_out(self) -> list[str]:
        """Faults that this machine cannot inflict."""
        if self._faketime:
            return []
        return ["reclock: libfaketime is not installed (Debian: apt install libfaketime)"]

    # ---- the run

    async def run(self, plan: ChaosPlan) -> Outcome:
        """Run everything, from the first process to the verdict."""
        nemesis = Nemesis(plan, self.targets, tell=self._tell)
        memory: dict[str, list[float]] = {}
        watching = asyncio.create_task(watch(self._pids, memory), name="chaos-memory")
        try:
            await self._start()
            for member in self._members:
                member.exits.clear()  # exits do not count until everything runs
            began = time.monotonic()
            backup = await self._storm(nemesis, plan)
            healed = time.monotonic()
            due = await self._settle(healed)
            settled = time.monotonic() - healed
            records, results = await self._records()
        finally:
            watching.cancel()
            await self._close()
        lines = self._effects.lines()
        exits = [e for member in self._members for e in member.exits]
        operations = self._history.operations.values()
        checker = Checker(
            operations,
            lines,
            nemesis.wounds,
            exits=exits,
            slots=due,
            records=records,
            results=results,
        )
        await self._check_backup(backup, lines, checker)
        if self._stuck:
            checker.verdict.add("open", "queue", self._stuck)
        verdict = checker.check()
        return Outcome(
            plan,
            verdict,
            measure(lines, nemesis.wounds, began, due),
            self._history,
            exits,
            time.monotonic() - began,
            settled,
            self.left_out,
            _pulse(lines, began),
            usage(memory),
        )

    def _pids(self) -> dict[str, int]:
        """Every process that runs now."""
        found = {m.name: m.pid for m in self._members if m.pid}
        return found | {
            f"nats-{n}": node.pid for n, node in enumerate(self._cluster.nodes, 1) if node.running
        }

    async def _start(self) -> None:
        self._tell(f"starting {self.size.servers} servers and {len(self._members)} processes")
        await self._cluster.open()
        ports = [node.port for node in self._cluster.nodes]
        for link, port in zip(self._network.links, ports, strict=True):
            link.target = port
        await self._network.open()
        for member in self._members:
            await member.start(ports)
        await self._until_served()

    async def _until_served(self) -> None:
        """Wait until every job has its consumer, so that no event precedes its subscription."""
        wanted = set(make_app().jobs)
        async with asyncio.timeout(90), self._broker() as broker:
            client = Client(broker, RecordConfig())
            while True:
                try:
                    found = {info.job for info in await Jobs(client).list() if info.served}
                except BrokerError:
                    found = set()
                if wanted <= found:
                    return
                await asyncio.sleep(0.3)

    async def _storm(self, nemesis: Nemesis, plan: ChaosPlan) -> Backup:
        app = make_app(self._network.url, self._namespace)
        workload = Workload(app, self._history, plan.seed, self.size.rate, self.size.window)
        sending = asyncio.create_task(workload.run(), name="chaos-workload")
        backup = Backup(self.root, self._namespace)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(backup.take(self._cluster.url, plan.seconds / 2))
                await nemesis.run()
            await asyncio.sleep(max(0.0, nemesis.began + plan.seconds - time.monotonic()))
        finally:
            workload.stop()
            await sending
            await app.close()
        self._history.close()
        counts = self._history.counts()
        self._tell(f"healed; operations: {', '.join(f'{n} {s}' for s, n in counts.items())}")
        return backup

    async def _check_backup(self, backup: Backup, lines: list[Line], checker: Checker) -> None:
        """Restore the backup elsewhere, and check that everything in it ends there too."""
        happened = {line.mark for line in lines if line.what == "effect" and line.at < backup.ended}
        wanted = {
            mark
            for operation in self._history.operations.values()
            if _must_happen(operation) and operation.answered < backup.began
            for mark in operation.marks
        }
        self._tell(f"restoring: of {len(wanted)} effects {len(wanted - happened)} were to come")
        for mark in await backup.missing(wanted - happened):
            checker.verdict.add("unrestored", mark, "accepted before the backup began")

    # ---- settling

    async def _settle(self, healed: float) -> dict[str, float]:
        """Wait until nothing is missing; returns when each counted slot was due."""
        until = math.floor(time.time()) + 3
        self._stuck = ""
        quiet_since = 0.0
        async with self._broker() as broker:
            due = await self._due_slots(broker, until)
            wanted = {
                mark
                for operation in self._history.operations.values()
                if _must_happen(operation)
                for mark in operation.marks
            }
            while time.monotonic() < healed + SETTLE_SECONDS:
                missing = (wanted | due.keys()) - self._happened()
                waiting = await self._waiting(broker)
                if not waiting and not missing and not await self._undecided(broker):
                    return due
                if waiting:
                    quiet_since = 0.0
                elif not quiet_since:
                    quiet_since = time.monotonic()
                elif time.monotonic() - quiet_since > QUIET_SECONDS:
                    return due
                await asyncio.sleep(0.5)
            self._stuck = f"after {SETTLE_SECONDS:.0f} s still waiting: {waiting}"
        return due

    async def _undecided(self, broker: Broker) -> bool:
        """Whether a run that must not start twice is neither done nor written off yet, or a flow
        has not ended."""
        bucket, happened = Bucket(broker, broker.names.runs), self._happened()
        for operation in self._history.operations.values():
            open_end = operation.at_most_once or operation.doomed
            waits = open_end and not happened.issuperset(operation.marks)
            if waits or operation.kind in flows.KINDS:
                for run in operation.runs:
                    entry = await bucket.get(run)
                    if entry is not None and not runs.decode(entry.value).terminal:
                        return True
        return False

    def _happened(self) -> set[str]:
        lines, self._read = self._effects.tail(self._read)
        self._marks.update(line.mark for line in lines if line.what == "effect")
        return self._marks

    async def _waiting(self, broker: Broker) -> str:
        """What the queues still hold, apart from slots, which never end."""
        client = Client(broker, RecordConfig())
        try:
            found = await Jobs(client).list()
            limited = await Limits(client).list()
        except BrokerError as error:
            return f"queues unreadable: {error}"
        queues = [
            f"{i.job} {i.waiting} waiting {i.in_flight} in flight {i.parked} parked"
            for i in found
            if i.waiting + i.in_flight + i.parked and not i.job.startswith("tick")
        ]
        limits = [
            f"limit {i.name}: {i.held} places held, {i.waiting} in line"
            for i in limited
            if i.held + i.waiting
        ]
        return ", ".join(queues + limits)

    async def _due_slots(self, broker: Broker, until: int) -> dict[str, float]:
        """Every slot of every schedule since its rule took effect, with its time on our clock."""
        offset = time.monotonic() - time.time()
        due: dict[str, float] = {}
        async for entry in Bucket(broker, broker.names.schedules).entries():
            if not entry.key.startswith(schedule_key("")):
                continue
            schedule = schedules.decode(entry.value)
            first = math.floor(schedule.since / schedule.every) + 1
            for number in range(first, until // schedule.every + 1):
                instant = number * schedule.every
                due[slot_mark(slot_id(schedule.name, instant))] = instant + offset
        return due

    async def _records(self) -> tuple[dict[str, RunRecord], dict[str, int]]:
        """Every run's record, and the epochs that large results name."""
        large = {
            run for o in self._history.operations.values() if o.kind == "large" for run in o.runs
        }
        async with self._broker() as broker:
            client = Client(broker, RecordConfig())
            entries = Bucket(broker, broker.names.runs).entries()
            records = {entry.key: runs.decode(entry.value) async for entry in entries}
            results = {
                run: msgspec.json.decode(await client.result_bytes(record))["epoch"]
                for run, record in records.items()
                if run in large and record.state == "done"
            }
        return records, results

    def _broker(self) -> Broker:
        """A connection that bypasses the links: the checker is not part of the experiment."""
        config = ConnectionConfig(nats_url=self._cluster.url, namespace=self._namespace, replicas=3)
        return Broker(config, name="chaos checker")

    async def _close(self) -> None:
        self._tell("stopping")
        await asyncio.gather(*(member.close() for member in self._members))
        await self._network.close()
        await self._cluster.shut()


def _must_happen(operation: Operation) -> bool:
    return operation.required and not operation.at_most_once and not operation.doomed


def _pulse(lines: Sequence[Line], began: float) -> list[float]:
    """Effects in each second of the run."""
    seconds = [int(line.at - began) for line in lines if line.what == "effect" and line.at >= began]
    counts = [0.0] * (max(seconds, default=0) + 1)
    for second in seconds:
        counts[second] += 1
    return counts
