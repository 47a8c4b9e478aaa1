"""A small world in which processes share one limit: every request may be the last of its process.

The gates are the real code (`ownership.gates`), on a store, a line and a queue in memory. Each of
their requests stops twice, before it is applied and before its answer arrives. A random source
decides which process goes on, and when one is killed. Messages are delivered again as a server
does: those of a dead process, and now and then one whose acknowledgement was lost.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.clock import SystemClock
from holdfast.errors import Conflict
from holdfast.model.limit import EVERYBODY, GATE, Entry, Gate, Numbers, Rule
from holdfast.model.message import RunMessage
from holdfast.names import gate_key
from holdfast.ownership.gates import GateKey, Gates, Waiter
from holdfast.ownership.store import MemoryEntry

T = TypeVar("T")

KEY = GateKey("stripe", EVERYBODY)


@dataclass
class Message:
    """A message in the queue."""

    run: str
    number: int
    id: str
    granted: bool = False
    """In the queue of an ordered job's runs that have their place."""
    holder: Process | None = None
    deliveries: int = 0


@dataclass
class Record:
    """A run's record."""

    state: str
    message: int
    holder: Process | None


@dataclass(eq=False)
class Process:
    """A worker process, or, without work, a coordinator."""

    world: World
    gates: Gates = field(init=False)
    alive: bool = True
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        rule = Rule(code=self.world.allowed)
        self.gates = Gates(
            Store(self),
            Line(self),
            Instant(),
            now=lambda: self.world.now,
            rules=lambda _: (rule, 0),
        )

    async def asks(self, apply: Callable[[], T]) -> T:
        """One request to the server."""
        await self.world.stop(self)
        found = apply()
        await self.world.stop(self)
        return found

    def start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def kill(self) -> None:
        self.alive = False
        for task in [*self.tasks, *self.gates._tasks]:
            task.cancel()
        self.gates._closed = True


class Instant(SystemClock):
    """Nobody waits."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class Store:
    """The bucket of the gates, as one process reaches it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    async def last(self, key: str) -> tuple[int, Any]:
        assert key == gate_key(*KEY)
        return await self._process.asks(
            lambda: (
                self._world.revision,
                MemoryEntry(key, self._world.gate, self._world.revision, stored=self._world.stored)
                if self._world.revision
                else None,
            )
        )

    def read(self, decode: Any, entry: Any) -> Gate:
        found: Gate = decode(entry.value)
        return found

    async def put(self, key: str, value: bytes, *, expected: int, ttl: float | None = None) -> int:
        def apply() -> int:
            if self._world.revision != expected:
                raise Conflict("somebody was faster")
            self._world.gate = value
            self._world.stored = self._world.now
            self._world.tokens_taken(GATE.decode(value).taken)
            self._world.revision += 1
            return self._world.revision

        return await self._process.asks(apply)


class Line:
    """The line, as one process reaches it."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._world = process.world

    async def add(self, gate: GateKey, run: str, message: RunMessage) -> Entry:
        def apply() -> Entry:
            for entry in self._world.line:
                if entry.run == run:
                    return entry
            self._world.sequence += 1
            entry = Entry(self._world.sequence, run, int(message.headers["number"]))
            self._world.line.append(entry)
            return entry

        return await self._process.asks(apply)

    async def next(self, gate: GateKey, start: int) -> Waiter | None:
        def apply() -> Waiter | None:
            for entry in self._world.line:
                if entry.sequence >= start:
                    return Waiter(entry, RunMessage("", b"", {}))
            return None

        return await self._process.asks(apply)

    async def some(self, gate: GateKey, start: int) -> list[Waiter]:
        def apply() -> list[Waiter]:
            found = [entry for entry in self._world.line if entry.sequence >= start]
            known = self._world.random.randrange(len(found) + 1)  # a replica is behind
            return [Waiter(entry, RunMessage("", b"", {})) for entry in found[:known][:3]]

        return await self._process.asks(apply)

    async def last(self, gate: GateKey) -> int:
        line = self._world.line
        return await self._process.asks(lambda: line[-1].sequence if line else 0)

    async def send(self, waiter: Waiter) -> None:
        entry = waiter.entry
        await self._process.asks(
            lambda: self._world.publish(
                entry.run,
                entry.number,
                f"{entry.run}.{entry.number}-{entry.sequence}",
                granted=self._world.ordered,
            )
        )

    async def remove(self, gate: GateKey, entry: Entry) -> None:
        def apply() -> None:
            line = self._world.line
            line[:] = [one for one in line if one.sequence != entry.sequence]

        await self._process.asks(apply)


class World:
    """The server, its processes, and what must hold."""

    def __init__(
        self, seed: int, *, runs: int, processes: int, allowed: Numbers, ordered: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.ordered = ordered
        self.allowed = allowed
        self.count = runs
        self.processes: list[Process] = []
        self.width = processes
        self.now = 1_000.0
        self.gate = b""
        self.stored = 0.0
        self.tokens: list[float] = []
        """When each token was taken: the instant of the write that took it."""
        self.revision = 0
        self.sequence = 0
        self.line: list[Entry] = []
        self.queue: list[Message] = []
        self.ids: set[str] = set()
        self.records: dict[str, Record] = {}
        self.started = 0
        self.waits: list[tuple[Process, asyncio.Future[None]]] = []

    # ---- the server

    def publish(self, run: str, number: int, id: str, *, granted: bool = False) -> None:
        if id not in self.ids:
            self.ids.add(id)
            self.queue.append(Message(run, number, id, granted))

    async def stop(self, process: Process) -> None:
        """Wait until this process may go on."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waits.append((process, future))
        await future

    def running(self) -> list[str]:
        return [run for run, record in self.records.items() if record.state == "running"]

    # ---- a worker

    async def work(self, process: Process, message: Message) -> None:
        """What a worker does with a message, in the same order as the real one."""
        run, number = message.run, message.number
        again = message.deliveries > 1
        if again:
            record = await process.asks(lambda: self.records.get(run))
            if record and (record.state == "done" or record.message > number):
                if self.allowed.rate:
                    await process.gates.leave(KEY, run, number)
                await self._over(process, message, again=record.state != "done")
                return
        if self.ordered and not message.granted:
            following = RunMessage("", b"", {"number": str(number + 1)})
            await process.gates.line_up(KEY, run, number + 1, following, again=again)
            await process.asks(lambda: self._ack(message))
            return
        taken = await process.gates.take(KEY, run, number, again=again)
        if again:
            await process.gates.look(KEY)
        if not taken:
            following = RunMessage("", b"", {"number": str(number + 1)})
            await process.gates.wait(KEY, run, number + 1, following, again=again)
            await process.asks(lambda: self._ack(message))
            return
        if not await process.asks(lambda: self._claim(process, run, number)):
            record = await process.asks(lambda: self.records[run])
            if record.state == "done" or record.message > number:
                await self._over(process, message, again=record.state != "done")
            else:
                message.holder = None  # another one holds it: given back
            return
        await process.asks(lambda: None)  # the handler
        fails = self.random.random() < 0.2
        if fails:
            id = f"{run}.{number + 1}"
            await process.asks(lambda: self.publish(run, number + 1, id, granted=message.granted))
        if await process.asks(lambda: self._settle(process, run, number, fails)):
            await self._over(process, message, again=fails)

    async def _over(self, process: Process, message: Message, again: bool = False) -> None:
        if self.allowed.running and not (self.ordered and again):
            await process.gates.leave(KEY, message.run, message.number)
            if message.deliveries > 1:
                await process.gates.look(KEY)
        await process.asks(lambda: self._ack(message))

    def _ack(self, message: Message) -> None:
        if self.random.random() < 0.05:
            message.holder = None  # the acknowledgement is lost
        elif message in self.queue:
            self.queue.remove(message)

    def _claim(self, process: Process, run: str, number: int) -> bool:
        record = self.records.get(run)
        if record and (record.state == "done" or record.message > number):
            return False
        if record and record.state == "running" and record.holder and record.holder.alive:
            return False
        if self.ordered:
            before = [f"r{n}" for n in range(int(run[1:]))]
            assert all(self._is_done(one) for one in before), f"{run} is out of order"
        self.records[run] = Record("running", number, process)
        self.started += 1
        if self.allowed.rate:
            assert self.started <= len(self.tokens), f"{run} started without a token"
        if self.allowed.running:
            assert len(self.running()) <= self.allowed.running, "one too many"
        return True

    def tokens_taken(self, count: int) -> None:
        """A write took tokens: never more than the rate and the burst, in any time."""
        self.tokens += [self.now] * count
        for number, since in enumerate(self.tokens):
            most = self.allowed.burst + self.allowed.rate * (self.now - since)
            taken = len(self.tokens) - number
            assert taken <= most + 1e-6, f"{taken} starts in {self.now - since:.3f} s"

    def _is_done(self, run: str) -> bool:
        return run in self.records and self.records[run].state == "done"

    def _settle(self, process: Process, run: str, number: int, fails: bool) -> bool:
        record = self.records[run]
        if record.holder is not process or record.state != "running":
            return False
        state, message = ("failed", number + 1) if fails else ("done", number)
        self.records[run] = Record(state, message, None)
        return True

    # ---- the course of events

    async def play(self, crashes: int) -> None:
        """Let everything happen in a random order until all runs are done."""
        for number in range(self.count):
            self.publish(f"r{number}", 1, f"r{number}")
        for _ in range(self.width):
            self.processes.append(Process(self))
        for turn in range(200_000):
            await _settled()
            if not self.queue and not self.line and not self.waits:
                break
            await self._turn(crashes)
            crashes -= self.crashed
            if turn % 50 == 49 and not crashes:
                self._look()
        for process in self.processes:
            process.kill()
        await _settled()
        gate = self.stored_gate()
        assert {run: r.state for run, r in self.records.items()} == {
            f"r{n}": "done" for n in range(self.count)
        }, f"stuck: {self.queue}, {self.line}, {gate}"
        assert not gate.held, f"leaked: {gate}"

    def stored_gate(self) -> Gate:
        """The gate as it is stored."""
        return GATE.decode(self.gate)

    async def finish(self) -> None:
        """Answer every request, in order, until nobody asks."""
        await _settled()
        while self.waits:
            self.waits.pop(0)[1].set_result(None)
            await _settled()

    async def _turn(self, crashes: int) -> None:
        self.crashed = 0
        frozen = self.random.random() < 0.02
        self.now += self.random.random() * (0.5 if frozen else 0.02)
        self.waits = [(p, f) for p, f in self.waits if p.alive and not f.done()]
        free = [m for m in self.queue if m.holder is None or not m.holder.alive]
        if self.ordered:  # its consumer has one arrival in flight at a time
            first = next((m for m in self.queue if not m.granted), None)
            free = [m for m in free if m.granted or m is first]
        if free and (not self.waits or self.random.random() < 0.3):
            message = self.random.choice(free[:4])
            process = self.random.choice(self.processes)
            message.holder = process
            message.deliveries += 1
            process.start(self.work(process, message))
        elif self.waits and crashes and self.random.random() < 0.02:
            self._crash()
        elif self.waits:
            for _ in range(self.random.choice((1, 1, 2, 5))):  # some answers arrive together
                if self.waits:
                    index = self.random.randrange(len(self.waits))
                    self.waits.pop(index)[1].set_result(None)
        else:
            self.now += 1.0
            self._look()

    def _crash(self) -> None:
        process = self.random.choice(self.processes)
        process.kill()
        self.processes.remove(process)
        self.processes.append(Process(self))
        self.crashed = 1

    def _look(self) -> None:
        """A coordinator looks."""
        process = self.processes[0]

        async def look() -> None:
            await process.gates.look(KEY)

        process.start(look())


async def _settled() -> None:
    for _ in range(6):
        await asyncio.sleep(0)
