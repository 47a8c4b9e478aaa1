"""Election: one leader per role; the server rejects the writes of a leader that was replaced.

Not guaranteed: that only one process *believes* it leads. Guaranteed: a write fenced by the epoch
is rejected once a later term has begun.

    candidate ──lease free──► lease won ──term written──► leader ──renewal refused, trust over──┐
        ▲                                                    │ release (SIGTERM)                │
        └────────────────────────────────────────────────────┴──────────────────────────────────┘

The lease (`ownership.lease`) decides who may begin a term. The term is a separate record that
changes only when a leader is elected: its revision is the epoch, and a leader fences its writes by
expecting the term to be at that epoch. The lease cannot be the fence: each renewal changes it.

A candidate takes the lease
- when its key is deleted (the leader left) or expires (a marker says so): at once;
- when the leader's process is gone: its node subject answers "no responders" several times in a
  row, so nobody waits for the TTL;
- when a role that sees overdue work (a slot that is due and not recorded) calls `take`.

Each is a compare-and-swap on the revision the candidate has seen, so a leader that renews meanwhile
keeps its lease. A leader replaced by mistake (it was reconnecting) loses its term and nothing else.

A leader stops before its lease can expire; until then it retries a failed renewal.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from holdfast.broker import Broker, Bucket, Received
from holdfast.errors import BrokerError, ConfigError, Conflict, LeaseLost, Unavailable
from holdfast.model import lease as leases
from holdfast.model.lease import LeaseRecord, TermRecord
from holdfast.names import H_KV_OPERATION, H_MARKER, term_key
from holdfast.ownership.lease import Lease
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.election")

LOOK_SECONDS: Final = 1.0
"""How often a candidate reads the lease, in case it missed a notification."""
RETRY_SECONDS: Final = 0.25
"""The pause after a failure: several attempts fit into the shortest trust window of a second."""
RELEASE_SECONDS: Final = 2.0
"""How long releasing a lease may delay the end of a process; after that the lease expires."""
HOLD_OFF_SECONDS: Final = 1.0
"""How long a leader that stood down lets other candidates go first, who need a few round trips."""
TERM_TRIES: Final = 5
"""Only another winner of the lease writes the term, so more conflicts mean the lease is lost."""


class LeaderElection:
    """One candidate for one role. `run` it as a task; ask `leader` before each piece of work."""

    def __init__(
        self,
        broker: Broker,
        role: str,
        node: str,
        *,
        ttl_seconds: float = 5.0,
        renew_seconds: float = 2.0,
        probe_seconds: float = 0.15,
        probe_misses: int = 3,
        term_bucket: str = "",
        telemetry: Telemetry | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """`term_bucket` is the bucket of the term, which fenced writes go to; by default that of
        the leases."""
        if ttl_seconds < 2 * renew_seconds or ttl_seconds < 1:
            raise ConfigError(
                f"a lease of {ttl_seconds:g} s renewed every {renew_seconds:g} s would lapse by "
                "one late renewal: the TTL must be at least a second and twice the renewal"
            )
        self.role = role
        self.node = node
        self.epoch = 0
        """The epoch of the current term; 0 unless leading."""
        self.holder = ""
        """The holder of the lease, as last heard."""
        self.terms = 0
        """Terms that this candidate has won."""
        self._broker = broker
        self._clock = broker.clock
        self._telemetry = telemetry or Telemetry()
        self._renew_seconds = renew_seconds
        self._probe_seconds = probe_seconds
        self._probe_misses = probe_misses
        bucket = Bucket(broker, broker.names.leases)
        self._subject = broker.names.changed(bucket.name, role)
        self._lease = Lease(bucket, role, node, broker.clock, ttl=ttl_seconds)
        self._terms = Bucket(broker, term_bucket) if term_bucket else bucket
        self._seen = 0
        """The newest known revision of the lease."""
        self._looked = False
        self._vacant = False
        """Whether a notification said that nobody holds the lease, at revision `_seen`."""
        self._held_off_until = 0.0
        self._wake = asyncio.Event()
        self._busy = asyncio.Lock()
        self._on_change = on_change
        self._stopped = False

    # ---- state

    @property
    def leader(self) -> bool:
        """Whether to act now. Advisory only; rely on the fence."""
        return bool(self.epoch) and self._lease.trusted

    @property
    def established(self) -> bool:
        """Whether this candidate knows its role: leading, or behind a known leader."""
        return self.leader or (self._looked and bool(self.holder))

    # ---- life

    async def run(self) -> None:
        """Take part until cancelled, then release the lease."""
        subscription = await self._broker.subscribe(self._subject, self._heard)
        probing = asyncio.create_task(self._probe(), name=f"holdfast-probe-{self.role}")
        try:
            while True:
                self._wake.clear()
                delay = await (self._lead() if self.epoch else self._stand_by())
                await self._sleep(delay)
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
            await self._broker.unsubscribe(subscription)
            await self.resign()

    async def resign(self) -> None:
        """Release the lease, so that another candidate takes over at once, and never lead again."""
        self._stopped = True
        await self._release()

    async def stand_down(self, why: str) -> None:
        """Stop leading, and let other candidates go first."""
        log.warning("%s stands down as leader: %s", self.node, why)
        self.hold_off()
        await self._release()

    async def _release(self) -> None:
        self._end_term()
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._lease.release()
        except (BrokerError, TimeoutError):
            log.debug("the lease of %s was not released: it will expire", self.role)

    def hold_off(self) -> None:
        """Do not become leader for `HOLD_OFF_SECONDS`."""
        self._held_off_until = self._clock.monotonic() + HOLD_OFF_SECONDS

    async def take(self, why: str) -> bool:
        """Take the lease from a leader that neglects its work; True if this node leads now."""
        if self.epoch or self._stopped or self._is_held_off() or self.holder == self.node:
            return bool(self.epoch)
        log.warning("%s takes over from %s: %s", self.node, self.holder or "nobody", why)
        return await self._try(self._seen)

    async def _sleep(self, delay: float) -> None:
        try:
            async with asyncio.timeout(delay):
                await self._wake.wait()
        except TimeoutError:
            return

    # ---- leading

    async def _lead(self) -> float:
        try:
            await self._lease.renew()
        except LeaseLost as lost:
            self._telemetry.fenced.labels("lease").inc()
            self._demoted(str(lost))
            return 0.0
        except BrokerError as error:
            if not self._lease.trusted:
                self._lease.forget()
                self._demoted(f"the lease could not be renewed in time ({error})")
                return RETRY_SECONDS
            return min(RETRY_SECONDS, self._lease.trusted_seconds)
        return self._renew_seconds

    def _demoted(self, why: str) -> None:
        log.warning("%s lost leadership of %s: %s", self.node, self.role, why)
        self._end_term()
        self.holder = ""

    def _end_term(self) -> None:
        if self.epoch:
            self.epoch = 0
            self._on_change()

    # ---- standing by

    async def _stand_by(self) -> float:
        if self._vacant and not self._is_held_off():
            self._vacant = False
            if await self._try(self._seen):
                return 0.0
        try:
            revision, record = await self._lease.look()
        except BrokerError:
            self._looked = False
            return RETRY_SECONDS
        self._note(revision, record)
        self._looked = True
        if record is None and not self._is_held_off():
            await self._try(revision)
        return LOOK_SECONDS if self.holder or self.epoch else RETRY_SECONDS

    def _is_held_off(self) -> bool:
        return self._clock.monotonic() < self._held_off_until

    def _is_stopped(self) -> bool:
        """A method, because mypy would assume that the attribute cannot change during an await."""
        return self._stopped

    async def _try(self, expected: int) -> bool:
        """Win the lease at this revision, then the term."""
        async with self._busy:
            if self.epoch or self._is_stopped():
                return bool(self.epoch)
            try:
                if not await self._lease.acquire(expected):
                    return False
                epoch = await self._begin_term()
            except BrokerError as error:
                log.debug("%s was not won: %s", self.role, error)
                self._lease.forget()
                return False
            if self._is_stopped():
                await self._lease.release()
                return False
            self.epoch = epoch
            self.holder = self.node
            self.terms += 1
            self._telemetry.terms.labels(self.role).inc()
            log.info("%s leads %s, epoch %d", self.node, self.role, epoch)
            self._wake.set()
            self._on_change()
            return True

    async def _begin_term(self) -> int:
        """Write the term; its revision is the epoch, higher than all before."""
        key = term_key(self.role)
        record = TermRecord(self.node, self._lease.token, since=self._clock.utc())
        for _ in range(TERM_TRIES):
            revision, found = await self._terms.last(key)
            known = self._terms.read(leases.decode_term, found) if found else None
            if known is not None and known.token == record.token:
                return revision  # written earlier, but the answer was lost
            if not self._lease.trusted:
                break
            try:
                return await self._terms.put(key, leases.encode(record), expected=revision)
            except Conflict:
                continue
        raise LeaseLost(f"the term of {self.role} could not be written")

    # ---- notifications

    async def _heard(self, message: Received) -> None:
        """The server republishes every write to the lease, including deletions and expiries."""
        revision = int(message.headers.get("Nats-Sequence", 0))
        if revision < self._seen:
            return
        gone = H_KV_OPERATION in message.headers or H_MARKER in message.headers
        record = None if gone else self._read(message.body)
        self._note(revision, record)
        self._vacant = record is None
        if record is None or (self.epoch and record.holder != self.node):
            self._wake.set()

    def _read(self, body: bytes) -> LeaseRecord | None:
        """An unreadable lease counts as free: the next holder writes a new one."""
        bucket = self._broker.names.leases
        return self._broker.unreadable.read(leases.decode_lease, bucket, self.role, body)

    def _note(self, revision: int, record: LeaseRecord | None) -> None:
        self._seen = max(self._seen, revision)
        holder = record.holder if record else ""
        if holder != self.holder and not self.epoch:
            self.holder = holder
            self._on_change()

    # ---- probing the leader's process

    async def _probe(self) -> None:
        """Ping the leader's node; after several "no responders" in a row, take over."""
        misses = 0
        while True:
            await self._clock.sleep(self._probe_seconds)
            holder = self.holder
            if self.epoch or not holder or holder == self.node or self._is_held_off():
                misses = 0
                continue
            misses = misses + 1 if await self._is_gone(holder) else 0
            if misses >= self._probe_misses and holder == self.holder:
                misses = 0
                await self.take("its process is gone")

    async def _is_gone(self, node: str) -> bool:
        try:
            # a ping in flight when the process dies is never answered: ping again soon
            await self._ping(node, 2 * self._probe_seconds)
        except Unavailable:
            return self._broker.connected
        except BrokerError:
            return False  # slow, frozen or cut off: the TTL decides
        return False

    async def answers(self, node: str, timeout: float) -> bool:
        """Whether a node answers a ping in time."""
        try:
            await self._ping(node, timeout)
        except BrokerError:
            return False
        return True

    async def _ping(self, node: str, timeout: float) -> None:
        await self._broker.request(self._broker.names.node(node, "ping"), timeout=timeout)
