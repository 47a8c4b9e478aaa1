"""Gates on NATS: who holds a place of a limit, and who is next (`model.limit`).

Every change of a gate is one compare-and-swap. Changes that arrive while one is being written are
combined into the next write, so that a shared limit costs little. A process remembers what it wrote
last: most changes need no read, and a conflict shows when its memory is outdated.

One loop, `_apply`, serves parking, leaving, pacing and repair. It applies the changes, reads the
next of the line for each free place, writes the gate, and only then sends the messages of those
that got a place and removes them from the line. A crash in between leaves an entry at or below
`head` whose run is in `held`: `look` sends it again, with the same message id. It is called for
every message that is delivered again, and by coordinators and the doctor.

No run is forgotten: parking writes `tail` into the same record from which leaving reads it, so one
of the two sees the other. "The line is empty" is written only over the revision at which it was
found empty.

A limit of starts needs a clock: each process that has seen its line waits for the next token. The
one that serves the line keeps doing so; those that lost a race to it only check on it now and then.

Not guaranteed: that a place is freed at once when its run's record ends without its message (an
`at_most_once` run whose worker died, a purge): coordinators free it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from holdfast.clock import Clock
from holdfast.errors import BrokerError, Conflict, OutcomeUnknown, Unreadable
from holdfast.model import limit as limits
from holdfast.model.limit import GATE, Entry, Gate, Rule
from holdfast.model.message import RunMessage
from holdfast.names import gate_key

log = logging.getLogger("holdfast.limits")

MOST_GRANTED: Final = 64
"""Places granted in one write: each needs a read, and other changes wait for the write."""
AHEAD_SECONDS: Final = 10.0
"""How long a read part of a line is used. The record of a cancelled run, which stops a run that was
read before its cancellation, is kept far longer."""
REMEMBERED: Final = 20_000
"""Gates whose last revision is remembered: bounds memory."""
PASSIVE_SECONDS: Final = 0.2
"""How often a process checks on the one that serves a limit of starts."""
SOONEST_SECONDS: Final = 0.002
"""The shortest pause between tokens: those of a fast limit are granted several at a time."""
CONFLICT_SECONDS: Final = 0.002
"""Backoff per conflict, at most, for processes that change the same gate all the time."""

Change = Callable[[Gate], tuple[Gate, bool]]


class GateKey(NamedTuple):
    """Which gate: a limit, and one of its keys."""

    limit: str
    key: str


class Waiter(NamedTuple):
    """A message of the line."""

    entry: Entry
    message: RunMessage
    """The message to send when its run gets a place."""
    stored: float = 0.0


class Line(Protocol):
    """The stored messages of the runs that wait."""

    async def add(self, gate: GateKey, run: str, message: RunMessage) -> Entry:
        """Store a message unless the line has one of the run; returns the entry in the line."""
        ...

    async def next(self, gate: GateKey, start: int) -> Waiter | None:
        """The first message of a gate's line from a sequence on, as the stream's leader knows."""
        ...

    async def some(self, gate: GateKey, start: int) -> Sequence[Waiter]:
        """Some of the first messages of a gate's line from a sequence on, in order and without a
        gap; an empty answer is no proof that there are none."""
        ...

    async def last(self, gate: GateKey) -> int:
        """The sequence of the last message of a gate's line; 0: there is none."""
        ...

    async def send(self, waiter: Waiter) -> None:
        """Send a message to its job's queue; a repeat changes nothing."""
        ...

    async def remove(self, gate: GateKey, entry: Entry) -> None:
        """Remove a message from the line, if it is there."""
        ...


class GateStore(Protocol):
    """The bucket of the gates."""

    def put(
        self, key: str, value: bytes, *, expected: int, ttl: float | None = None
    ) -> Awaitable[int]: ...
    async def last(self, key: str) -> tuple[int, Any]: ...
    def read(self, decode: Callable[[bytes], Gate], entry: Any) -> Gate | None: ...


class _Asked(NamedTuple):
    change: Change
    sure: bool
    """Whether an answer that changes nothing must not come from memory."""
    done: asyncio.Future[bool]
    trusts: bool = False
    """Whether the answer `True` may still come from memory."""


class _Ahead(NamedTuple):
    """The first messages of a line after `head`, as read recently."""

    head: int
    waiters: Sequence[Waiter]
    until: float

    def after(self, head: int, now: float) -> Waiter | None:
        if head < self.head or now > self.until:
            return None
        return next((one for one in self.waiters if one.entry.sequence > head), None)


_NOBODY: Final = _Ahead(0, (), 0.0)


class _State:
    """What this process remembers of a gate."""

    __slots__ = (
        "ahead",
        "asked",
        "busy",
        "deep",
        "gate",
        "passive",
        "revision",
        "seen",
        "timer",
    )

    def __init__(self) -> None:
        self.gate = Gate()
        self.revision: int | None = None
        """The revision at which `gate` was read or written; None: unknown."""
        self.asked: list[_Asked] = []
        self.busy = False
        self.ahead = _NOBODY
        self.deep = False
        """Whether the line probably has more than one message."""
        self.seen = False
        """Whether this process has looked at it before."""
        self.passive = False
        """Whether another process serves it in time."""
        self.timer: asyncio.TimerHandle | None = None


def no_rules(_: str) -> tuple[Rule | None, int]:
    """Sends nothing; for gates that take their numbers from elsewhere."""
    return None, 0


class Gates:
    """Changes gates for one process."""

    def __init__(
        self,
        store: GateStore,
        line: Line,
        clock: Clock,
        *,
        now: Callable[[], float],
        rules: Callable[[str], tuple[Rule | None, int]] = no_rules,
    ) -> None:
        self._store = store
        self.line = line
        self._clock = clock
        self._now = now
        self._rules = rules
        self._states: dict[GateKey, _State] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._expects_new = True
        """Whether the last gate that was new to this process did not exist yet. Then the next new
        one is written without a read, and read only if the write is refused."""

    # ---- steps

    async def take(self, key: GateKey, run: str, number: int, *, again: bool = False) -> bool:
        """Ask for a place; `again`: the message may have one already.

        If memory says that a first delivery has a place, that is still true: only the end of the
        message or of its run can free the place.
        """
        sure = again or number > 1
        return await self._do(key, lambda gate: limits.take(gate, run, number), sure, not again)

    async def wait(
        self, key: GateKey, run: str, number: int, message: RunMessage, *, again: bool = False
    ) -> None:
        """Put a run into the line; when this returns, it is there or has a place.

        `number` is that of the message that will carry it. `again`: it may be there already.
        """
        while True:
            entry = await self.line.add(key, run, message)
            await self._park(key, entry.sequence, True)
            gate = self._states[key].gate
            served = entry.sequence <= gate.head and run not in gate.held
            if entry.number > number or (entry.number == number and (again or not served)):
                return
            await self.line.remove(key, entry)  # left over: a crash prevented its removal

    async def line_up(
        self, key: GateKey, run: str, number: int, message: RunMessage, *, again: bool = False
    ) -> None:
        """Put a run into the line even if there is a free place; a run that has a place is sent on
        at once."""
        held = 0
        if again or number > 2:  # only a run's first message cannot have a place yet

            def look(gate: Gate) -> tuple[Gate, bool]:
                nonlocal held
                held = gate.held.get(run, 0)
                return gate, True

            await self._do(key, look, True)
        if not held:
            await self.wait(key, run, number, message, again=again)
        elif held < number:
            await self.line.send(Waiter(Entry(0, run, number), message))
        else:
            await self.look(key)

    async def _park(self, key: GateKey, sequence: int, sure: bool) -> None:
        await self._do(key, lambda gate: (limits.park(gate, sequence), True), sure)

    async def leave(self, key: GateKey, run: str, number: int) -> None:
        """Free a run's place, and give it to the next."""
        await self._do(key, lambda gate: (limits.leave(gate, run, number), True), True)

    def is_paused(self, key: GateKey) -> bool:
        """Whether its limit was paused when this process last looked."""
        state = self._states.get(key)
        return state is not None and state.gate.paused

    async def restore(self, key: GateKey, run: str, number: int) -> None:
        """Name a running run again in a gate that was deleted."""
        await self._do(key, lambda gate: (limits.restore(gate, run, number), True), False)

    async def look(self, key: GateKey) -> Gate:
        """Finish what another process left half done, and grant free places."""
        last = await self.line.last(key)
        self._state(key).revision = None
        await self._park(key, last, True)
        gate = self._states[key].gate
        start = 1
        while waiter := await self.line.next(key, start):
            entry = waiter.entry
            if entry.sequence > gate.head:
                break
            if gate.held.get(entry.run) == entry.number:
                await self.line.send(waiter)
            await self.line.remove(key, entry)
            start = entry.sequence + 1
        return gate

    # ---- folding

    async def _do(self, key: GateKey, change: Change, sure: bool, trusts: bool = False) -> bool:
        state = self._state(key)
        asked = _Asked(change, sure, asyncio.get_running_loop().create_future(), trusts)
        state.asked.append(asked)
        if not state.busy:
            await self._serve(key, state)
        return await asked.done

    async def _serve(self, key: GateKey, state: _State) -> None:
        """Apply the changes; a task handles those that arrive meanwhile, and free places."""
        state.busy = True
        asked, state.asked = state.asked, []
        error: BaseException = OutcomeUnknown("a change of a limit was interrupted")
        answers: list[bool] = []
        try:
            answers = await self._apply(key, state, asked)
        except (BrokerError, Unreadable) as failed:
            error = failed
        finally:
            if not answers:
                state.revision = None
            for number, one in enumerate(asked):
                if one.done.done():
                    continue
                if answers:
                    one.done.set_result(answers[number])
                else:
                    one.done.set_exception(error)
                    one.done.exception()  # retrieved: its owner may have been cancelled
            gate = state.gate
            more = bool(answers) and gate.waiting and gate.has_room
            state.busy = more or bool(state.asked)
            if state.busy:
                self._spawn(
                    self._serve(key, state)
                )  # it stays busy: only one task writes at a time
            else:
                self._pace(key, state)

    async def _apply(self, key: GateKey, state: _State, asked: list[_Asked]) -> list[bool]:
        """Apply changes in one write, and grant free places; returns an answer for each."""
        conflicts = 0
        while True:
            known = await self._know(key, state)
            before = state.gate
            counted = limits.credited(limits.ruled(before, *self._rules(key.limit)), self._now())
            gate, answers = _changed(counted, asked)
            gate, granted = await self._grant(key, state, gate)
            if gate == counted and _same(counted, before):
                if known and (not state.seen or _unsure(asked, answers)):
                    state.revision, state.seen = None, True
                    continue
                return answers
            if not await self._write(key, state, gate):
                conflicts += 1
                if conflicts > 1:
                    pause = CONFLICT_SECONDS * min(conflicts, 10)
                    await self._clock.sleep(random.uniform(0, pause))
                continue
            state.passive = state.passive and not granted
            if granted:
                await self._send(key, granted)
            return answers

    async def _know(self, key: GateKey, state: _State) -> bool:
        """Make sure that the gate is known; False if it had to be read. One that may be new is
        assumed to be empty at first: if it is not, the write is refused."""
        if state.revision is not None:
            return True
        if state.seen or not self._expects_new:
            await self._read(key, state)
            return False
        state.gate, state.revision = Gate(), 0
        return True

    async def _write(self, key: GateKey, state: _State, gate: Gate) -> bool:
        """Write the gate, unless somebody else has changed it."""
        ttl = gate.kept_seconds if gate.idle else None
        expected, body = state.revision or 0, GATE.encode(gate)
        try:
            revision = await self._store.put(gate_key(*key), body, expected=expected, ttl=ttl)
        except Conflict:
            state.revision = None
            if state.seen:
                state.passive = True
            else:
                self._expects_new, state.seen = False, True
            return False
        state.gate, state.revision = limits.stamped(gate, self._now()), revision
        state.seen = True
        return True

    async def _read(self, key: GateKey, state: _State) -> None:
        revision, entry = await self._store.last(gate_key(*key))
        gate = self._store.read(GATE.decode, entry) if entry is not None else Gate()
        if gate is None:
            raise Unreadable(f"the gate {'/'.join(key)} cannot be read: see 'holdfast doctor'")
        stored = entry.stored if entry is not None else 0.0
        state.gate, state.revision = limits.stamped(gate, stored), revision
        if not state.seen:
            state.seen, self._expects_new = True, not revision

    async def _grant(self, key: GateKey, state: _State, gate: Gate) -> tuple[Gate, list[Waiter]]:
        granted: list[Waiter] = []
        while gate.waiting and gate.has_room and len(granted) < MOST_GRANTED:
            waiter = await self._next(key, state, gate.head)
            gate = limits.grant(gate, waiter.entry if waiter else None)
            if waiter is not None:
                granted.append(waiter)
        return gate, granted

    async def _next(self, key: GateKey, state: _State, head: int) -> Waiter | None:
        """The next message of the line. Sequences only grow, so nothing gets in between messages
        that were read before. Only the stream's leader can say that none are left."""
        if state.deep and not (found := state.ahead.after(head, self._clock.monotonic())):
            some = await self.line.some(key, head + 1)
            state.ahead = _Ahead(head, some, self._clock.monotonic() + AHEAD_SECONDS)
            found = some[0] if some else None
        if not state.deep or found is None:
            found = await self.line.next(key, head + 1)
            state.deep = found is not None
        return found

    async def _send(self, key: GateKey, granted: list[Waiter]) -> None:
        """Send the messages that got a place, and remove them from the line."""
        sent = await asyncio.gather(*map(self.line.send, granted), return_exceptions=True)
        for waiter, failed in zip(granted, sent, strict=True):
            if failed is None:
                self._spawn(self.line.remove(key, waiter.entry))
        if errors := [failed for failed in sent if failed is not None]:
            raise errors[0]

    # ---- limits of starts

    def _pace(self, key: GateKey, state: _State) -> None:
        """Wait for the next token, if a run waits for one."""
        gate = state.gate
        if state.timer is not None or not (gate.allowed.rate and gate.waiting and not gate.paused):
            return
        delay = max(SOONEST_SECONDS, limits.next_token(gate) - self._now())
        if state.passive or state.revision is None:
            delay += PASSIVE_SECONDS * random.uniform(0.75, 1.25)
        loop = asyncio.get_running_loop()
        state.timer = loop.call_later(delay, self._ring, key, state)

    def _ring(self, key: GateKey, state: _State) -> None:
        state.timer = None
        if self._closed or state.busy:
            return  # the busy task waits for the next token
        if state.passive:
            state.revision = None
        state.busy = True  # taken over by `_serve`
        self._spawn(self._serve(key, state))

    # ---- memory

    def _state(self, key: GateKey) -> _State:
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= REMEMBERED:
                self._forget_some()
            state = self._states[key] = _State()
        return state

    def _forget_some(self) -> None:
        for key, state in list(self._states.items())[: REMEMBERED // 4]:
            if not (state.busy or state.asked or state.timer):
                del self._states[key]

    def forget(self) -> None:
        """Read everything again: the bucket was deleted."""
        for state in self._states.values():
            state.revision = None

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name="holdfast-limits")
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.debug("a limit could not be served: %s", error)

    async def close(self) -> None:
        """Stop waiting for tokens; let changes in progress finish."""
        self._closed = True
        for state in self._states.values():
            if state.timer is not None:
                state.timer.cancel()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _changed(gate: Gate, asked: list[_Asked]) -> tuple[Gate, list[bool]]:
    """The gate after all changes, and their answers; one answer if there were no changes."""
    answers = []
    for one in asked:
        gate, answer = one.change(gate)
        answers.append(answer)
    return gate, answers or [True]


def _unsure(asked: list[_Asked], answers: list[bool]) -> bool:
    """Whether an answer that changes nothing must not come from memory."""
    found = zip(asked, answers, strict=False)
    return any(one.sure and not (one.trusts and yes) for one, yes in found)


def _same(gate: Gate, before: Gate) -> bool:
    """Whether the gates differ in nothing but accrued tokens."""
    timeless = limits.change(gate, tokens=before.tokens, at=before.at, taken=before.taken)
    return timeless == before
