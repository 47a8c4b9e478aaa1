"""Adoption: a dispatcher takes over the runs of one that is gone.

Liveness decides who is gone: a coordinator has declared the owner lost, or the owner left, or its
heartbeat lapsed where no coordinator runs. A failed read decides nothing. Adoption is a
compare-and-swap on the run's record, so one dispatcher wins, and its revision is the new epoch.

A run that loses its owner more than `MOST_ADOPTIONS` times is given up: it may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.broker import Broker
from holdfast.dispatcher.records import FleetRecords
from holdfast.errors import Unreadable
from holdfast.model import fleet
from holdfast.model.fleet import MOST_ADOPTIONS, FleetRun
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.dispatcher")

Owned = Callable[[FleetRun, int], None]
SPREAD_SECONDS = 0.05
"""Dispatchers delay their search by a random part of this, so that they rarely compete for a
run."""


class Adoption:
    """Looks for runs without an owner, for one dispatcher."""

    def __init__(
        self,
        broker: Broker,
        node: str,
        records: FleetRecords,
        telemetry: Telemetry,
        alive: Callable[[str], Awaitable[bool]],
        owned: Owned,
        kept_seconds: float,
    ) -> None:
        self._broker = broker
        self._node = node
        self._records = records
        self._telemetry = telemetry
        self._alive = alive
        self._owned = owned
        self._kept_seconds = kept_seconds
        self._turn = asyncio.Lock()

    async def look(self) -> int:
        """Adopt every run whose owner is gone; returns how many. Raises if it cannot search."""
        async with self._turn:
            await self._broker.clock.sleep(random.uniform(0, SPREAD_SECONDS))
            known: dict[str, bool] = {self._node: True, "": False}
            count = 0
            runs = [found async for found in self._records.active()]
            for run, entry in runs:
                if entry.owner not in known:
                    known[entry.owner] = await self._alive(entry.owner)
                if not known[entry.owner]:
                    count += await self._try_adopt(run, entry.owner)
            return count

    async def _try_adopt(self, run: str, owner: str) -> bool:
        try:
            return await self._adopt(run, owner)
        except Unreadable:
            return False  # reported already; it must not keep other runs from being adopted

    async def _adopt(self, run: str, owner: str) -> bool:
        found = await self._records.read(run)
        if found is None or found[0].over:
            await self._records.forget(run)
            return False
        record, revision = found
        if record.owner != owner:
            return False  # another dispatcher was faster
        lost = bool(owner)
        if lost and record.adoptions >= MOST_ADOPTIONS:
            await self._give_up(record, revision)
            return False
        taken = fleet.adopted(
            record,
            owner=self._node,
            token=self._records.token(),
            now=self._broker.server_now(),
            lost=lost,
        )
        won = await self._records.write(taken, revision)
        if not won:
            return False
        self._telemetry.fleet_adoptions.labels("lost" if lost else "left").inc()
        log.warning(
            "run %s adopted from %s", run, f"{owner}, which is gone" if lost else "one that left"
        )
        self._owned(taken, won)
        await self._records.tell(run, "adopted", f"from {owner}" if owner else "")
        return True

    async def _give_up(self, record: FleetRun, revision: int) -> None:
        now = self._broker.server_now()
        reason = f"{record.adoptions + 1} dispatchers were lost while they owned it"
        ended = msgspec.structs.replace(
            record,
            status="failed",
            reason=reason,
            token=self._records.token(),
            updated=now,
            ended=now,
        )
        if await self._records.write(ended, revision, self._kept_seconds):
            self._telemetry.fleet_runs.labels("failed").inc()
            log.error("run %s is given up: %s", record.run, reason)
            await self._records.forget(record.run)
            await self._records.tell(record.run, "ended", f"failed: {reason}")
