"""Leases: the right to a role, won and renewed by compare-and-swap with a TTL.

The holder is the one that wrote the key expecting its newest revision: 0 if it never existed, that
of a marker if it was deleted or expired, or that of a holder known to be gone. Each renewal expects
the holder's own last revision and resets the TTL in one write: a lease that was taken cannot be
renewed, and one that is not renewed expires. `release` deletes the key, which notifies candidates.

`trusted` ends before anybody can see the lease expire (see `model.lease`). Not guaranteed: that
nobody else holds it. A holder that seems gone is replaced without waiting, so a leader must fence
its writes by its term (`ownership.election`).

The outcome of a write without an answer is unknown: the token shows later whether it was applied.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import Protocol

import msgspec

from holdfast.clock import Clock
from holdfast.errors import Conflict, LeaseLost, OutcomeUnknown
from holdfast.model import lease as leases
from holdfast.model.lease import LeaseRecord, TrustWindow
from holdfast.ownership.store import Stamped, Store


class LeaseStore(Store, Protocol):
    """What a lease needs from a bucket."""

    async def last(self, key: str) -> tuple[int, Stamped | None]:
        """The revision that the next write must expect, and the value if there is one."""
        ...

    async def remove(self, key: str, *, expected: int) -> None:
        """Delete the key if it is still at `expected`."""
        ...


class Lease:
    """One candidate's hold on one key."""

    def __init__(
        self, store: LeaseStore, key: str, holder: str, clock: Clock, *, ttl: float = 5.0
    ) -> None:
        self.key = key
        self.holder = holder
        self.ttl = ttl
        self.revision = 0
        self._store = store
        self._clock = clock
        self._window = TrustWindow(ttl)
        self._record: LeaseRecord | None = None

    @property
    def held(self) -> bool:
        """Whether it was won and not known to be lost; `trusted` says whether to act."""
        return self._record is not None

    @property
    def trusted(self) -> bool:
        return self._window.open(self._clock.monotonic())

    @property
    def trusted_seconds(self) -> float:
        """How long the holder may still act on it."""
        return self._window.left(self._clock.monotonic())

    @property
    def token(self) -> str:
        """Marks the writes of this tenure."""
        return self._record.token if self._record else ""

    async def look(self) -> tuple[int, LeaseRecord | None]:
        """The newest revision of the key and its holder, from the stream's leader."""
        revision, found = await self._store.last(self.key)
        return revision, self._store.read(leases.decode_lease, found) if found else None

    async def acquire(self, expected: int) -> bool:
        """Take the lease if its key is still at `expected`; False if another was faster."""
        record = LeaseRecord(self.holder, secrets.token_hex(8), since=self._clock.utc())
        sent = self._clock.monotonic()
        try:
            revision = await self._put(record, expected)
        except Conflict:
            return False
        except OutcomeUnknown:
            revision, found = await self.look()
            if found is None or found.token != record.token:
                return False
        self._hold(record, revision, sent)
        return True

    async def renew(self) -> None:
        """Extend the lease; raises `LeaseLost` if somebody else has written the key."""
        if self._record is None:
            raise LeaseLost(f"lease {self.key} is not held")
        record = msgspec.structs.replace(self._record, renewed=self._record.renewed + 1)
        sent = self._clock.monotonic()
        try:
            revision = await self._put(record, self.revision)
        except Conflict:
            sent, revision = self._clock.monotonic(), await self._renew_again(record)
        self._hold(record, revision, sent)

    async def _renew_again(self, record: LeaseRecord) -> int:
        """Renew after a conflict: not a loss if the key is at our own unanswered renewal."""
        revision, found = await self.look()
        if found is not None and found.token == record.token:
            self.revision = revision
            with contextlib.suppress(Conflict):
                return await self._put(record, revision)
        self.forget()
        raise LeaseLost(f"lease {self.key} was taken over")

    def _hold(self, record: LeaseRecord, revision: int, sent: float) -> None:
        self._record = record
        self.revision = revision
        self._window.confirmed(sent)

    async def _put(self, record: LeaseRecord, expected: int) -> int:
        body = leases.encode(record)
        return await self._store.put(self.key, body, expected=expected, ttl=self.ttl)

    async def release(self) -> None:
        """Delete the key, so that nobody waits for it to expire."""
        revision, held = self.revision, self.held
        self.forget()
        if held:
            try:
                await self._store.remove(self.key, expected=revision)
            except Conflict:
                return  # already taken by another candidate

    def forget(self) -> None:
        """Stop trusting it; leave the key to its new holder or to its TTL."""
        self._record = None
        self._window.ended()
