"""A node's heartbeat: keeps its record alive, moves its state, and bounds how long it is trusted.

A node writes its record under its id with a TTL and renews it by compare-and-swap. Only the node
writes it while alive; a coordinator that declares the node lost writes another state to the same
key, expecting the node's last heartbeat. Exactly one of them wins: if it is the coordinator, the
node's next renewal is rejected, and the node reads the verdict and ends (`lost`).

`trusted` holds for the timeout, measured on a monotonic clock from *before* the last acknowledged
renewal was sent: neither a slow answer nor a frozen process extends it. If the key has vanished and
nobody declared the node lost (an outage of NATS itself), the node registers again and calls
`on_gap`, which has to find out which claims were taken meanwhile.

Late ticks are distinguished from failed ones, and logged as such: a late tick means this process
was frozen; a wall clock that moved against the monotonic one has jumped; only punctual ticks whose
writes fail mean that NATS is unreachable.

Not guaranteed: that a silent node is dead. That is why claims are fenced.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.durations import text
from holdfast.errors import BrokerError, Conflict, NodeLost, OutcomeUnknown
from holdfast.model import node as nodes
from holdfast.model.lifecycle import NodeState
from holdfast.model.node import HeldRun, NodeRecord, Transition
from holdfast.ownership.store import Store
from holdfast.retrying import starting
from holdfast.version import __version__

log = logging.getLogger("holdfast.heartbeat")

STEADY = 0.75
"""The fraction of the timeout without a renewal after which heartbeats no longer count as steady:
leaves a margin, because the record expires at the timeout."""
FROZEN_SECONDS = 1.0
"""A tick this late means that the process did not run: a busy event loop is late by less."""
LEAP_SECONDS = 1.0
"""A difference between wall and monotonic clock within one tick that means a jump: NTP slews far
more slowly."""
ENDED_TTL_SECONDS = 86_400.0
"""How long the record of an ended node is kept; its history is in the ledger."""

FORGOTTEN_SECONDS = 1_800.0
"""A node that was silent for longer ends, because it cannot know whether it was declared lost: the
record of a verdict may have expired, after an hour at the earliest."""
LEAVE_SECONDS = 2.0
"""How long recording its end may delay a node; after that its record expires."""
AGAIN_SECONDS = 0.5
"""The pause after a failed beat: several attempts fit into the shortest timeout."""

FOLLOW_SECONDS = 0.25
"""How often a node checks what its deputy has done: reads shared memory, and finds a verdict
soon."""
WRITE_TRIES = 5
"""A deputy may write between our read and our write, once per heartbeat."""

Ledger = Callable[[Transition], Awaitable[None]]


class Deputy(Protocol):
    """Sends heartbeats for a node in place of its event loop: a worker's keeper."""

    @property
    def active(self) -> bool:
        """Whether it sends heartbeats and they are confirmed."""
        ...

    @property
    def acknowledged(self) -> float:
        """When its last confirmed beat was sent, on the monotonic clock."""
        ...

    @property
    def steady_since(self) -> float: ...

    @property
    def revision(self) -> int: ...

    @property
    def lost(self) -> bool:
        """Whether it found the node declared lost."""
        ...

    @property
    def gap(self) -> bool:
        """The record had lapsed: check claims before trusting the node again."""
        ...

    @property
    def blocked(self) -> bool:
        """Whether it has just reported a blocked event loop."""
        ...

    def verified(self) -> None:
        """Report that claims have been checked."""

    def proved(self) -> None:
        """Report that our own connection works."""


def new_node_id(role: str) -> str:
    """An id that is never reused."""
    host = "".join(c if c.isalnum() else "-" for c in socket.gethostname().split(".")[0])[:20]
    return f"{role}-{host.strip('-') or 'host'}-{os.getpid()}-{secrets.token_hex(3)}"


async def _no_ledger(_: Transition) -> None:
    return None


class Heartbeat:
    """Keeps one node's record alive while `run` runs."""

    def __init__(
        self,
        store: Store,
        record: NodeRecord,
        clock: Clock,
        *,
        now: Callable[[], float] | None = None,
        ledger: Ledger = _no_ledger,
        on_gap: Callable[[], Awaitable[None]] | None = None,
        leave: Callable[[], Awaitable[None]] | None = None,
        running: Callable[[], int] = lambda: 0,
        runs: Callable[[], tuple[str, ...]] = lambda: (),
        held: Callable[[], tuple[HeldRun, ...]] = lambda: (),
        metrics: Callable[[], dict[str, float]] = dict,
        connection: Callable[[], tuple[str, int]] = lambda: ("", 0),
        on_cut_off: Callable[[], None] | None = None,
    ) -> None:
        self._now = now or clock.utc
        self.record = msgspec.structs.replace(
            record,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            by=record.id,
        )
        self.lost: asyncio.Event = asyncio.Event()
        self.deputy: Deputy | None = None
        self._store = store
        self._clock = clock
        self._ledger = ledger
        self._on_gap = on_gap
        self._leave = leave
        self._leave_after = 0.0
        self._running = running
        self._runs = runs
        self._held = held
        self._metrics = metrics
        self._connection = connection
        self._on_cut_off = on_cut_off
        self._failing_since: float | None = None
        self._untold: list[Transition] = []
        self._revision = 0
        self._acknowledged = -1e9
        self._steady_since = 0.0
        self._unreachable = False
        self._proved = 0.0
        self._writing = asyncio.Lock()

    # ---- state

    @property
    def timeout(self) -> float:
        return self.record.liveness.timeout_seconds

    @property
    def acknowledged(self) -> float:
        """When the last confirmed renewal was sent, by this node or its deputy."""
        deputy = self.deputy
        return max(self._acknowledged, deputy.acknowledged) if deputy else self._acknowledged

    @property
    def revision(self) -> int:
        """The newest known revision of the record."""
        return max(self._revision, self.deputy.revision) if self.deputy else self._revision

    @property
    def steady_since(self) -> float:
        """When the current series of renewals without a gap began."""
        deputy = self.deputy
        return max(self._steady_since, deputy.steady_since) if deputy else self._steady_since

    @property
    def lasting_seconds(self) -> float:
        """The TTL of the record after a renewal."""
        return self.timeout if self.record.liveness.enabled else ENDED_TTL_SECONDS

    @property
    def _silence(self) -> float:
        return self._clock.monotonic() - self.acknowledged

    @property
    def _own_silence(self) -> float:
        """How long our own connection has been silent, regardless of the deputy's."""
        return self._clock.monotonic() - max(self._proved, self._acknowledged)

    @property
    def trusted(self) -> bool:
        """Whether nobody can have seen this node as gone yet."""
        if self.lost.is_set() or (self.deputy is not None and self.deputy.lost):
            return False
        return self._silence < self.timeout

    @property
    def may_judge(self) -> bool:
        """Whether the absence of another node's key means anything.

        After an outage every key has lapsed, even those of live nodes. A node that could not renew
        its own waits a whole timeout after it can again, to give the others time to renew theirs.
        """
        return self.trusted and self.acknowledged - self.steady_since >= self.timeout

    # ---- writing

    async def start(self) -> None:
        """Register: CREATED, then RUNNING."""
        now = self._now()
        self.record = msgspec.structs.replace(self.record, started=now, since=now)
        await self._start(self._register)
        await self._ledger(nodes.transition(self.record, self.record))
        await self._start(lambda: self.move("RUNNING"))

    async def _register(self) -> None:
        async with self._writing:
            await self._write(self.record)

    async def _start(self, step: Callable[[], Awaitable[None]]) -> None:
        """Retry: a bucket that another process has just created elects its leader first."""
        await starting(step, clock=self._clock, what="registering")

    async def beat(self) -> None:
        """Renew once; register again if the key is missing."""
        async with self._writing:
            await self._write(
                msgspec.structs.replace(
                    self.record,
                    beat=self.record.beat + 1,
                    running=self._running(),
                    runs=self._runs(),
                    held=self._held(),
                    metrics=self._metrics(),
                )
            )

    async def move(self, state: NodeState, reason: str = "") -> None:
        """Enter a state; raises `InvalidTransition` if the lifecycle does not allow it."""
        async with self._writing:
            before = self.record
            after = nodes.move(before, state, by=before.id, at=self._now(), reason=reason)
            await self._write(after, ttl=None if after.alive else ENDED_TTL_SECONDS)
        steps, self._untold = [*self._untold, nodes.transition(before, after)], []
        for step in steps:
            await self._ledger(step)

    async def _write(self, record: NodeRecord, ttl: float | None = None) -> None:
        """Write a successor of the newest record; serialized by `_writing`."""
        sent = self._clock.monotonic()
        server, client = self._connection()
        record = msgspec.structs.replace(record, server=server, client=client)
        body = nodes.encode(record)
        lasting = ttl or self.lasting_seconds
        try:
            self._revision = await self._put(body, self.revision, lasting)
        except Conflict:
            await self._resolve(body, lasting)
        self.record = record
        if sent - self.acknowledged > self.timeout * STEADY:
            self._steady_since = sent
        self._acknowledged = sent

    async def _put(self, body: bytes, expected: int, ttl: float) -> int:
        return await self._store.put(self.record.id, body, expected=expected, ttl=ttl)

    async def _resolve(self, body: bytes, ttl: float) -> None:
        """Resolve a conflict: our own lost answer, our deputy, a lapse, or a verdict."""
        for _ in range(WRITE_TRIES):
            entry = await self._store.get(self.record.id)
            if entry is None:
                break
            found = self._store.read(nodes.decode, entry)
            if found is not None and found.by != self.record.id and not found.alive:
                self._declared(found)
            with contextlib.suppress(Conflict):
                self._revision = await self._put(body, entry.revision, ttl)
                return
        else:
            raise OutcomeUnknown("the node's record keeps changing: somebody else writes it too")
        if self.record.beat and self._silence > FORGOTTEN_SECONDS:
            self._declared(
                nodes.move(
                    msgspec.structs.replace(self.record, state="RUNNING"),
                    "DISCONNECTED",
                    by="itself",
                    at=self._now(),
                    reason="it was silent for so long that a verdict on it may have expired",
                )
            )
        self._revision = await self._put(body, 0, ttl)
        self._steady_since = self._clock.monotonic()  # a new bucket lacks the records of others too
        log.warning(
            "this node's record had lapsed or was deleted, and nobody had declared it lost: "
            "registered again"
        )
        if self._on_gap:
            await self._on_gap()

    def _declared(self, found: NodeRecord) -> None:
        self.record = msgspec.structs.replace(self.record, state=found.state)
        text_ = f"this node was declared {found.state} by {found.by}: {found.reason}"
        if not self.lost.is_set():
            log.error("%s; it stops, because its runs may be running elsewhere", text_)
            self.lost.set()
        raise NodeLost(text_)

    # ---- the loop

    async def run(self) -> None:
        """Renew until cancelled; return when the node was declared lost."""
        while not self.lost.is_set():
            delay = self.record.liveness.heartbeat_seconds
            try:
                if self.record.state == "DISCONNECTED":
                    await self.move("TERMINATING", "NATS can be reached again; it ends")
                if self._followed:
                    await self._follow()
                    delay = min(FOLLOW_SECONDS, delay)
                else:
                    await self.beat()
                    self._prove()
                self._unreachable, self._failing_since = False, None
            except NodeLost:
                return
            except BrokerError as error:
                log.debug("heartbeat not written: %s", error)
                self._complain()
                self._cut_off()
                await self._try_elsewhere()
                delay = min(AGAIN_SECONDS, delay)
            await self._sleep(delay)

    @property
    def _followed(self) -> bool:
        deputy = self.deputy
        return deputy is not None and (deputy.active or deputy.lost or deputy.gap)

    def _prove(self) -> None:
        self._proved = self._clock.monotonic()
        if self.deputy is not None:
            self.deputy.proved()

    async def _follow(self) -> None:
        """Check the deputy's heartbeats, and prove that our own connection works."""
        deputy, now = self.deputy, self._clock.monotonic()
        if deputy is None:
            return
        due = now - self._proved >= self.record.liveness.heartbeat_seconds
        if not (due or deputy.lost or deputy.gap):
            return
        entry = await self._store.get(self.record.id)
        self._prove()
        found = self._store.read(nodes.decode, entry) if entry else None
        if found is not None and not found.alive:
            self._declared(found)
        if deputy.lost:
            # Not a transition: the record is gone, and this node may be TERMINATING or in ERROR.
            self._declared(
                msgspec.structs.replace(self.record, state="DISCONNECTED", by="its keeper")
            )
        if deputy.gap:
            log.warning("this node's heartbeat had lapsed and nobody had declared it lost")
            if self._on_gap:
                await self._on_gap()
            deputy.verified()

    async def _sleep(self, delay: float) -> None:
        ticked, wall = self._clock.monotonic(), self._clock.utc()
        await self._clock.sleep(delay)
        passed = self._clock.monotonic() - ticked
        leap = (self._clock.utc() - wall) - passed
        if abs(leap) > LEAP_SECONDS:
            log.warning("the clock of this machine jumped by %+.1f s", leap)
        told = self.deputy is not None and self.deputy.blocked
        if passed - delay > max(FROZEN_SECONDS, 0.1 * self.timeout):
            self._failing_since = None
            if told:
                return
            log.warning("this process was frozen for %.1f s", passed - delay)

    def _complain(self) -> None:
        silent = self._own_silence
        if not self._unreachable and self._acknowledged > 0 and silent > self.timeout:
            self._unreachable = True
            log.warning(
                "NATS could not be reached for %s: if other nodes can reach it, this node counts "
                "as lost",
                text(silent),
            )

    def _cut_off(self) -> None:
        """Declare this node DISCONNECTED if it is configured to stop when cut off.

        Only after attempts have failed for half of the timeout: a frozen process made no attempts.
        """
        now, silent = self._clock.monotonic(), self._own_silence
        if self._failing_since is None:
            self._failing_since = now
        if (
            self._on_cut_off is None
            or self.record.liveness.cut_off != "stop"
            or self.record.state != "RUNNING"
            or silent <= self.timeout
            or now - self._failing_since < 0.5 * self.timeout
        ):
            return
        reason = f"it could not reach NATS for {text(silent)}"
        before = self.record
        self.record = nodes.move(
            before, "DISCONNECTED", by=before.id, at=self._now(), reason=reason
        )
        self._untold.append(nodes.transition(before, self.record))
        log.error(
            "this node is DISCONNECTED: %s. It takes no more runs; its handlers have %s to end, "
            "and other workers may start their runs again. To let handlers continue, set "
            "liveness.cut_off = wait",
            reason,
            text(self.record.liveness.grace_seconds),
        )
        self._on_cut_off()

    async def _try_elsewhere(self) -> None:
        """Leave a server that is up but does not answer: it may have lost the rest of its cluster.

        Not before the timeout: an election ends sooner, and all nodes would leave at once.
        """
        now = self._clock.monotonic()
        if self._leave and self._unreachable and now >= self._leave_after:
            self._leave_after = now + self.timeout
            await self._leave()

    async def stop(self, *, forced: bool = False) -> None:
        """Leave: TERMINATED_GRACEFULLY, or TERMINATED_FORCED if something was not finished."""
        if self.lost.is_set():
            return
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                if self.record.state != "TERMINATING":
                    await self.move("TERMINATING")
                await self.move("TERMINATED_FORCED" if forced else "TERMINATED_GRACEFULLY")
        except (BrokerError, TimeoutError):
            log.debug("the end of this node was not recorded: its record will expire")
