"""One run in a model world: its record, its messages, and processes that can stop anywhere.

The world follows the server's rules (compare-and-swap, message ids, work queue, schedules) and the
order of steps in `worker/execution.py`, `ownership/claims.py`, `status/replaying.py` and
`client/client.py`. Every process is a generator that stops between steps, so that a crash, a freeze
or another process can intervene; the rules themselves are the real ones of `model`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import msgspec

from holdfast.model import run as runs
from holdfast.model.replay import Refused, again, decide_replay
from holdfast.model.run import Restart, RunRecord, Verdict

CRASH_LIMIT = 3
ATTEMPTS = 4
ENDINGS = ("done", "short retry", "long retry", "snooze", "discard", "give back", "hopeless")

Steps = Generator[None, None, None]


@dataclass(eq=False)
class Msg:
    """A message that carries the run."""

    stamp: int
    deliveries: int = 0
    out: bool = False
    """Delivered to a worker and not acknowledged."""


@dataclass(eq=False)
class Process:
    """Something that runs step by step, on a node or for an operator."""

    node: str
    steps: Steps
    epoch: int = 0
    """The epoch of the claim it believes it holds; 0 before and after."""
    revision: int = 0


@dataclass
class World:
    """The server's state, and the running processes."""

    restart: Restart
    record: RunRecord | None = None
    revision: int = 0
    """The record's revision; 0 when there is none."""
    writes: int = 0
    queue: list[Msg] = field(default_factory=list)
    later: dict[int, Msg] = field(default_factory=dict)
    known_ids: set[str] = field(default_factory=set)
    letters: list[int] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)
    """Nodes without a heartbeat: dead or frozen."""
    epochs: list[int] = field(default_factory=list)
    judged: set[int] = field(default_factory=set)
    """Revisions at which a process saw that the holder was gone."""

    # ---- the server

    def cas(
        self, record: RunRecord, expected: int, *, replay: bool = False, holder: bool = False
    ) -> int:
        """Write the record if it is still at that revision; 0 when refused."""
        if expected != self.revision:
            return 0
        if self.record is not None and self.record.state == "running" and not holder:
            assert self.revision in self.judged, "a holder was robbed that nobody saw gone"
        if self.record is not None and not replay:
            assert not self.record.terminal, f"{self.record.state} became {record.state}"
            assert record.failures >= self.record.failures, "a failure was forgotten"
            assert record.crashes >= self.record.crashes, "a crash was forgotten"
            assert record.message >= self.record.message, "an older message is expected again"
        self.writes += 1
        self.record, self.revision = record, self.writes
        return self.writes

    def publish(self, stamp: int, id: str) -> None:
        """Store a message to be delivered now, unless its id is a repeat."""
        if id not in self.known_ids:
            self.known_ids.add(id)
            self.queue.append(Msg(stamp))

    def park(self, stamp: int, id: str) -> None:
        """Store a message to be delivered when it fires, replacing one with the same stamp."""
        if id not in self.known_ids:
            self.known_ids.add(id)
            self.later[stamp] = Msg(stamp)

    def fire(self, stamp: int) -> None:
        self.queue.append(self.later.pop(stamp))

    def ack(self, msg: Msg) -> None:
        if msg in self.queue:
            self.queue.remove(msg)

    def nak(self, msg: Msg) -> None:
        msg.out = False

    def alive(self, node: str) -> bool:
        return node not in self.silent

    # ---- processes

    def start(self, node: str, make: Callable[[Process], Steps]) -> Process:
        process = Process(node, iter(()))  # type: ignore[arg-type]  # replaced in the next line
        process.steps = make(process)
        self.processes.append(process)
        return process

    def step(self, process: Process) -> None:
        try:
            next(process.steps)
        except StopIteration:
            self.processes.remove(process)

    def kill(self, node: str) -> None:
        """End a node's process, and its heartbeat."""
        self.silent.add(node)
        self.processes = [p for p in self.processes if p.node != node]

    # ---- a worker, as in execution.py and claims.py

    def attempt(self, me: Process, msg: Msg, ending: str) -> Steps:
        record, revision = (self.record, self.revision) if msg.deliveries > 1 else (None, 0)
        while True:
            verdict = self.decide(me, record, revision, msg)
            yield
            if verdict not in (Verdict.CLAIM, Verdict.TAKE_OVER):
                yield from self.refused(me, msg, verdict)
                return
            base = record or RunRecord("running", "g", "j", restart=self.restart)
            mine = runs.claimed(
                base,
                node=me.node,
                token=self.token(),
                reply="",
                message=msg.stamp,
                now=1.0,
                alone=runs.is_suspect(base, CRASH_LIMIT),
            )
            me.epoch = me.revision = self.cas(mine, revision)
            if me.epoch:
                break
            yield
            record, revision = self.record, self.revision
            yield
        assert all(me.epoch > e for e in self.epochs), "an epoch did not grow"
        self.epochs.append(me.epoch)
        yield
        yield from self.end(me, msg, mine, ending)
        me.epoch = me.revision = 0

    def decide(self, me: Process, record: RunRecord | None, revision: int, msg: Msg) -> Verdict:
        alive = record is None or record.node == me.node or self.alive(record.node)
        if not alive:
            self.judged.add(revision)
        return runs.decide(record, message=msg.stamp, holder_alive=alive, crash_limit=CRASH_LIMIT)

    def refused(self, me: Process, msg: Msg, verdict: Verdict) -> Steps:
        if verdict in (Verdict.DUPLICATE, Verdict.SUPERSEDED):
            self.ack(msg)
        elif verdict is Verdict.HELD:
            self.nak(msg)
        else:
            yield from self.abandon(me, msg, verdict)

    def abandon(self, me: Process, msg: Msg, verdict: Verdict) -> Steps:
        record, revision = self.record, self.revision
        yield
        if record is None or self.decide(me, record, revision, msg) is not verdict:
            self.nak(msg)
            return
        yield
        self.letters.append(msg.stamp)
        yield
        state = "dead" if verdict is Verdict.POISON else "lost"
        crashed = runs.close_crashed(record, 2.0)
        ended = msgspec.structs.replace(crashed, state=state, token=self.token(), ended=2.0)
        won = self.cas(ended, revision)
        yield
        if won:
            self.ack(msg)
        else:
            self.nak(msg)

    def end(self, me: Process, msg: Msg, mine: RunRecord, ending: str) -> Steps:
        failed = ending in ("short retry", "long retry", "hopeless")
        if ending == "hopeless" or (failed and mine.failures + 1 >= ATTEMPTS):
            yield from self.bury(me, msg, mine)
        elif ending in ("long retry", "snooze"):
            outcome: runs.Outcome = "failed" if failed else "snoozed"
            stamp = mine.message + 1
            self.park(stamp, f"run.{stamp}")
            yield
            if self.settle(me, mine, "failed", outcome, stamp):
                yield
                self.ack(msg)
        elif ending in ("short retry", "give back"):
            outcome = "failed" if failed else "given_back"
            if self.settle(me, mine, "failed", outcome):
                yield
                self.nak(msg)
        else:
            done = ending == "done"
            state: runs.State = "done" if done else "cancelled"
            if self.settle(me, mine, state, "done" if done else "cancelled"):
                yield
                self.ack(msg)

    def bury(self, me: Process, msg: Msg, mine: RunRecord) -> Steps:
        if self.revision != me.revision:
            return
        yield
        self.letters.append(mine.message)
        yield
        if self.settle(me, mine, "dead", "failed"):
            yield
            self.ack(msg)

    def settle(
        self,
        me: Process,
        mine: RunRecord,
        state: runs.State,
        outcome: runs.Outcome,
        message: int | None = None,
    ) -> int:
        ended = runs.settled(
            mine, state, outcome, epoch=me.epoch, token=self.token(), now=2.0, message=message
        )
        won = self.cas(ended, me.revision, holder=True)
        me.epoch = me.revision = 0
        return won

    def token(self) -> str:
        return f"t{self.writes}"

    # ---- an operator, as in status/replaying.py and client.py

    def replay(self, me: Process, stamp: int) -> Steps:
        while True:
            record, revision = self.record, self.revision
            yield
            decision = decide_replay(record, stamp)
            if isinstance(decision, Refused):
                return
            if not decision.write:
                break
            base = record or RunRecord("dead", "g", "j")
            record = again(base, message=decision.message, token=self.token(), now=3.0)
            if self.cas(record, revision, replay=True):
                break
        yield
        assert record is not None
        self.publish(decision.message, f"run.{decision.message}.{record.token}")
        yield
        if stamp in self.letters:
            self.letters.remove(stamp)

    def cancel(self, me: Process) -> Steps:
        record, revision = self.record, self.revision
        yield
        if record and (record.terminal or (record.state == "running" and self.alive(record.node))):
            return
        self.judged.add(revision)
        base = record or RunRecord("cancelled", "g", "j", keyed=True)
        if self.cas(msgspec.structs.replace(base, state="cancelled"), revision):
            yield
            self.later.pop(base.message, None)
            yield
            self.later.pop(base.message + 1, None)
