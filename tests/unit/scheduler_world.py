"""A server and schedulers in memory, which can be stopped and crashed between any two steps.

The schedulers run the real code (planner, lease, leader, overlap policies, the plan-and-mark logic
over the bucket); only the NATS side is replaced, by a server with the same semantics:
compare-and-swap, fences, atomic batches, TTLs, message ids. Every call has two steps, one before it
is applied and one before its answer arrives, so that a crash falls on either side; an answer may
also be lost, which leaves the caller with an unknown outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

from holdfast.errors import BrokerError, Conflict, LeaseLost, OutcomeUnknown, StaleTerm
from holdfast.model.planner import Planner
from holdfast.model.schedule import Schedule, due_at, instants
from holdfast.model.slot import SchedulerProgress, Slot
from holdfast.ownership.lease import Lease
from holdfast.scheduler.leader import Leader
from holdfast.scheduler.store import TOO_LARGE, Answer, NatsSlots, Planned, Sent
from holdfast.telemetry import Telemetry

TTL = 5.0
MISSED_AFTER = 10.0
START = 1_800_000_000.0
TELEMETRY = Telemetry()
LARGE = "large"
"""The schedule whose runs the jobs stream rejects."""


class Step:
    """Where a process may be stopped."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Value(NamedTuple):
    """A key's value."""

    key: str
    value: bytes
    revision: int


class World:
    """The server: one bucket for leases, one for slots and terms, and a jobs stream."""

    def __init__(self, schedules: Sequence[Schedule]) -> None:
        self.now = START
        self.schedules = {s.name: s for s in schedules}
        self.revision = 0
        self.lease: tuple[bytes | None, int, float] = (None, 0, 0.0)
        self.term = 0
        self.slots: dict[tuple[str, int], tuple[Slot, int]] = {}
        self.progress = SchedulerProgress()
        self.messages: list[tuple[str, int, float]] = []
        self.ids: set[str] = set()
        self.running: set[str] = set()
        self.refused = 0

    def next(self) -> int:
        self.revision += 1
        return self.revision

    def lease_now(self) -> tuple[bytes | None, int]:
        value, _, expires = self.lease
        if value is not None and self.now >= expires:
            self.lease = (None, self.next(), 0.0)  # the marker has its own revision
        return self.lease[0], self.lease[1]

    def send(self, planned: Planned) -> Answer:
        if planned.schedule == LARGE:
            return TOO_LARGE
        if planned.id in self.ids:
            return Sent(len(self.messages), True)
        self.ids.add(planned.id)
        self.messages.append((planned.schedule, planned.moment, self.now))
        self.running.add(planned.id)
        return Sent(len(self.messages), False)

    def commit(self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int) -> int:
        """Apply all or nothing, as the server does."""
        if epoch != self.term:
            self.refused += 1
            raise Conflict("stale term")
        for p in planned:
            if self.slots.get((p.schedule, p.moment), (None, 0))[1] != p.revision:
                raise Conflict("slot is not where expected")
        for p in planned:
            self.slots[p.schedule, p.moment] = (p.slot, self.next())
        assert progress.watermark >= self.progress.watermark
        self.progress = progress
        return self.next()


class Lost(Exception):
    """Thrown in by the driver to lose this answer."""


class Caller:
    """One process's connection: each call takes two steps, and its answer may be lost."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def call(self, apply: Callable[[], Any]) -> Any:
        try:
            await Step()
        except Lost:
            raise OutcomeUnknown("never arrived") from None
        result, error = None, None
        try:
            result = apply()
        except BrokerError as refused:
            error = refused
        try:
            await Step()
        except Lost:
            raise OutcomeUnknown("the answer was lost") from None
        if error is not None:
            raise error
        return result


class MemoryLeases:
    """The lease's bucket."""

    def __init__(self, caller: Caller) -> None:
        self._call = caller.call
        self._world = caller.world

    def read(self, decode: Callable[[bytes], Any], entry: Any) -> Any:
        return decode(entry.value)

    async def put(self, key: str, value: bytes, *, expected: int, ttl: float | None = None) -> int:
        def apply() -> int:
            if self._world.lease_now()[1] != expected:
                raise Conflict("lease")
            revision = self._world.next()
            self._world.lease = (value, revision, self._world.now + (ttl or 0.0))
            return revision

        return int(await self._call(apply))

    async def last(self, key: str) -> tuple[int, Value | None]:
        value, revision = await self._call(self._world.lease_now)
        return revision, Value(key, value, revision) if value is not None else None

    async def remove(self, key: str, *, expected: int) -> None:
        def apply() -> None:
            if self._world.lease_now()[1] != expected:
                raise Conflict("lease")
            self._world.lease = (None, self._world.next(), 0.0)

        await self._call(apply)


class MemorySlots(NatsSlots):
    """The real plan, mark and left-over logic over the in-memory server."""

    def __init__(self, caller: Caller) -> None:
        self._call = caller.call
        self._world = caller.world

    async def progress(self) -> SchedulerProgress:
        return await self._call(lambda: self._world.progress)

    def fits(self, planned: Planned) -> bool:
        return True

    async def _commit(
        self, planned: Sequence[Planned], progress: SchedulerProgress, epoch: int
    ) -> int:
        return int(await self._call(lambda: self._world.commit(planned, progress, epoch)))

    async def _check_term(self, epoch: int) -> None:
        if await self._call(lambda: self._world.term) != epoch:
            raise StaleTerm("over")

    async def _read(self, planned: Sequence[Planned]) -> list[Planned | None]:
        return [await self.get(p.schedule, p.moment) for p in planned]

    async def get(self, schedule: str, moment: int) -> Planned | None:
        found = await self._call(lambda: self._world.slots.get((schedule, moment)))
        return Planned(schedule, moment, *found) if found else None

    async def send(self, planned: Sequence[Planned]) -> list[Answer]:
        sent: list[Answer] = []
        for p in planned:
            try:
                sent.append(await self._call(lambda p=p: self._world.send(p)))
            except OutcomeUnknown:
                sent.append(None)
        return sent

    async def left_over(self, after: int, epoch: int) -> list[Planned]:
        def apply() -> list[Planned]:
            return [
                Planned(name, moment, slot, revision)
                for (name, moment), (slot, revision) in self._world.slots.items()
                if revision > after and slot.pending
            ]

        return list(await self._call(apply))

    async def active(self, planned: Sequence[Planned]) -> list[bool]:
        def one(p: Planned) -> bool:
            return p.id in self._world.running or (p.slot.pending and not p.slot.sequence)

        return [await self._call(lambda p=p: one(p)) for p in planned]

    async def last(self, schedule: str) -> Planned | None:
        def apply() -> Planned | None:
            mine = [
                Planned(name, moment, slot, revision)
                for (name, moment), (slot, revision) in self._world.slots.items()
                if name == schedule and slot.state != "skipped"
            ]
            return max(mine, key=lambda p: p.moment, default=None)

        return await self._call(apply)

    def cancel(self, planned: Planned) -> None:
        self._world.running.discard(planned.id)


class ProcessClock:
    """A process's monotonic clock, which may run slightly fast or slow."""

    def __init__(self, world: World, rate: float) -> None:
        self._world = world
        self._rate = rate

    def monotonic(self) -> float:
        return (self._world.now - START) * self._rate

    def utc(self) -> float:
        return self._world.now

    async def sleep(self, seconds: float) -> None:
        await Step()


class Scheduler:
    """One scheduler process: candidate, leader, candidate again, one step at a time."""

    def __init__(self, world: World, name: str, rate: float = 1.0) -> None:
        self.world = world
        self.name = name
        caller = Caller(world)
        self._leases = MemoryLeases(caller)
        self._store = MemorySlots(caller)
        self._caller = caller
        store: Any = self._leases  # as much of a store as a lease needs here
        self._lease = Lease(store, "lease", name, ProcessClock(world, rate), ttl=TTL)
        self._planner = Planner(MISSED_AFTER)
        for schedule in world.schedules.values():
            self._planner.add(schedule, world.progress.watermark)
        self.greedy = False
        """Takes the lease from any holder: a leader that only seemed to be gone."""
        self._life: Coroutine[Any, Any, None]
        self._start()

    def _start(self) -> None:
        self._life = self._live()
        self._life.send(None)

    def step(self, lose: bool = False) -> None:
        """Continue to the next step."""
        if lose:
            try:
                self._life.throw(Lost())
            except Lost:  # no answer to lose at this step: it restarts instead
                self._start()
        else:
            self._life.send(None)

    def crash(self) -> None:
        """kill -9."""
        self._life.close()

    async def _live(self) -> None:
        while True:
            await Step()
            try:
                epoch = await self._elected()
                if epoch:
                    await self._lead(epoch)
            except (BrokerError, LeaseLost):
                self._lease.forget()

    async def _elected(self) -> int:
        self._planner.follow((await self._store.progress()).watermark)
        revision, holder = await self._lease.look()
        if holder is not None and not self.greedy:
            return 0
        self.greedy = False
        if not await self._lease.acquire(revision):
            return 0
        return await self._begin_term()

    async def _begin_term(self) -> int:
        world = self.world
        before = await self._caller.call(lambda: world.term)

        def apply() -> int:
            if world.term != before:
                raise Conflict("term")
            world.term = world.next()
            return world.term

        return int(await self._caller.call(apply)) if self._lease.trusted else 0

    async def _lead(self, epoch: int) -> None:
        leader = Leader(
            self._store,
            self._planner,
            TELEMETRY,
            node=self.name,
            epoch=epoch,
            now=lambda: self.world.now,
        )
        await leader.begin()
        while self._lease.trusted:
            await Step()
            await leader.tick()
            if self._lease.trusted_seconds < TTL / 2:
                await self._lease.renew()


def check(world: World, until: float) -> None:
    """Every slot is sent once or skipped by its policy, and none was sent early."""
    count = Counter((name, moment) for name, moment, _ in world.messages)
    assert all(n == 1 for n in count.values())
    for name, moment, at in world.messages:
        assert at >= due_at(world.schedules[name], moment)
    for schedule in world.schedules.values():
        series = [
            (moment, slot)
            for (name, moment), (slot, _) in world.slots.items()
            if name == schedule.name and slot.state == "skipped"
        ]
        for moment in instants(schedule, START, until):
            if due_at(schedule, moment) > until:
                continue
            sent = (schedule.name, moment) in count
            skipped = [s for first, s in series if first <= moment <= max(first, s.last)]
            assert sent or skipped, (schedule.name, moment - START)
            if sent:
                slot = world.slots[schedule.name, moment][0]
                assert slot.state == "dispatched", (schedule.name, moment - START, slot.state)
            _check_policy(schedule, sent, skipped)


def _check_policy(schedule: Schedule, sent: bool, skipped: list[Slot]) -> None:
    reasons = {s.reason for s in skipped}
    assert not (sent and skipped)
    if schedule.catch_up == "all":
        reasons -= {"limit"}
    else:
        reasons -= {"catch_up"}
    if schedule.name == LARGE:
        assert not sent
        reasons -= {"too_large"}
    elif schedule.overlap in ("skip", "cancel"):
        reasons -= {"overlap"}
    assert not reasons, (schedule.name, reasons)
