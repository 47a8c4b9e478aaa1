"""The records of fan-out runs: every change is a compare-and-swap with a known outcome.

A run's record and its entry in the index of active runs are written as one atomic batch, so the
index is never behind. A write whose answer was lost is looked up: the token in the record shows
whether it was ours. The entry of an ended run is removed after its last write; if a crash left one
behind, the next search removes it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncIterator

from holdfast.broker import Broker, Bucket
from holdfast.broker.batch import Write, store_batch
from holdfast.broker.kv import ttl_text
from holdfast.errors import BrokerError, Conflict, TryAgain, Unreadable
from holdfast.model import fleet
from holdfast.model.fleet import Active, FleetRun, LedgerEntry
from holdfast.names import H_EXPECTED, H_TTL, active_key, fleet_key, kv_subject
from holdfast.retrying import retrying

log = logging.getLogger("holdfast.dispatcher")


class FleetRecords:
    """Reads and writes the records of one namespace, for one dispatcher."""

    def __init__(self, broker: Broker, node: str) -> None:
        self._broker = broker
        self._node = node
        self.bucket = Bucket(broker, broker.names.fleet)
        self._tokens = itertools.count(1)

    def token(self) -> str:
        """A token for one write."""
        return f"{self._node}.{next(self._tokens)}"

    async def read(self, run: str) -> tuple[FleetRun, int] | None:
        """A run's record and revision, from the leader; reports and raises `Unreadable`."""
        entry = await self.bucket.get(fleet_key(run))
        if entry is None:
            return None
        record = self.bucket.read(fleet.decode, entry)
        if record is None or record.run != run:
            raise Unreadable(f"the record of run {run} cannot be read: see 'holdfast doctor'")
        return record, entry.revision

    async def revision(self, run: str) -> int:
        """The revision that the next write must expect, even over an unreadable record."""
        return (await self.bucket.last(fleet_key(run)))[0]

    async def write(self, record: FleetRun, expected: int, ttl: float | None = None) -> int:
        """Write until the write is known to be applied (returns its revision) or rejected (0)."""

        async def step() -> int:
            try:
                return await self._put(record, expected, ttl)
            except (Conflict, TryAgain) as error:
                found = await self.read(record.run)
                if found and found[0].token == record.token:
                    return found[1]
                if isinstance(error, Conflict) or (found[1] if found else 0) != expected:
                    return 0
                raise  # not applied so far; the next try has the same token

        return await retrying(step, clock=self._broker.clock, what="writing a fleet run")

    async def _put(self, record: FleetRun, expected: int, ttl: float | None) -> int:
        body = fleet.encode(record)
        if record.over:
            return await self.bucket.put(fleet_key(record.run), body, expected=expected, ttl=ttl)
        headers = {H_EXPECTED: str(expected)}
        if ttl is not None:
            headers[H_TTL] = ttl_text(ttl)
        entry = fleet.encode(Active(record.owner, record.updated))
        name = self.bucket.name
        stored = await store_batch(
            self._broker,
            [
                Write(kv_subject(name, fleet_key(record.run)), body, headers),
                Write(kv_subject(name, active_key(record.run)), entry, {}),
            ],
        )
        return stored.seq - 1

    async def active(self) -> AsyncIterator[tuple[str, Active]]:
        """Runs that have not ended, with their owners."""
        prefix = active_key("")
        async for entry in self.bucket.entries(prefix.rstrip(".")):
            found = self.bucket.read(fleet.decode_active, entry)
            yield entry.key[len(prefix) :], found or Active("")  # its record names its owner

    async def tell(self, run: str, what: str, detail: str = "") -> None:
        """Record a step in the ledger; a lost entry is not a reason to fail."""
        step = LedgerEntry(run, what, self._node, self._broker.server_now(), detail)
        try:
            await self._broker.store(self._broker.names.log("fleet", run), fleet.encode(step))
        except BrokerError as error:
            log.warning("run %s: %s is not in the ledger: %s", run, what, error)

    async def forget(self, run: str) -> None:
        """Remove a run from the index."""
        try:
            await self.bucket.delete(active_key(run))
        except BrokerError:
            return  # the next search removes it
