"""Fan-out runs as an operator sees them: what is active, what has been, what each agent said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import msgspec

from holdfast import errors
from holdfast.broker import Bucket
from holdfast.broker.kv import direct_batch
from holdfast.client import Client
from holdfast.client.fleet import Fleet
from holdfast.model import fleet
from holdfast.model.fleet import FleetRun, Return, Step
from holdfast.names import active_key, check_run, fleet_key
from holdfast.status.audit import Audit


class FleetInfo(msgspec.Struct, frozen=True):
    """One fan-out run for people and programs."""

    run: str
    status: str
    function: str
    target: str
    targets: int
    returned: int
    succeeded: int
    unreachable: int
    unsent: int
    user: str
    owner: str
    epoch: int
    adoptions: int
    created: float
    deadline: float
    ended: float
    reason: str
    cancelled_by: str

    @classmethod
    def of(cls, record: FleetRun, returned: int | None = None) -> FleetInfo:
        request = record.request
        return cls(
            record.run,
            record.status,
            request.function,
            request.target,
            len(record.targets),
            record.returned if returned is None else returned,
            record.succeeded,
            len(record.unreachable),
            len(record.unsent),
            request.user,
            record.owner,
            record.epoch,
            record.adoptions,
            record.created,
            record.deadline,
            record.ended,
            record.reason,
            record.cancelled_by,
        )


class FleetStatus:
    """Reads and steers the fan-out runs of a namespace."""

    def __init__(self, client: Client, who: str | None = None) -> None:
        self._client = client
        self._bucket = Bucket(client.broker, client.broker.names.fleet)
        self.fleet = Fleet(client.broker)
        self._who = who

    async def list(self, *, most: int = 50, status: str = "") -> Sequence[FleetInfo]:
        """The newest runs first."""
        if status and status not in get_args(fleet.FleetStatus):
            known = ", ".join(get_args(fleet.FleetStatus))
            raise errors.InvalidInput(f"status {status!r} is not one of {known}")
        try:
            stored = self._bucket.records(fleet.decode, fleet_key("").rstrip("."))
            found = [record async for _, record in stored]
        except errors.NotFound:
            return []
        chosen = [FleetInfo.of(r) for r in found if not status or r.status == status]
        return sorted(chosen, key=lambda r: r.created, reverse=True)[:most]

    async def active(self) -> Sequence[FleetInfo]:
        """The runs that have not ended, oldest first, with what has been returned so far."""
        prefix = active_key("")
        try:
            runs = [e.key[len(prefix) :] async for e in self._bucket.entries(prefix.rstrip("."))]
        except errors.NotFound:
            return []
        found = []
        for run in runs:
            try:
                record = await self.fleet.read(run)
            except (errors.RunNotFound, errors.Unreadable):
                continue
            if not record.over:
                found.append(FleetInfo.of(record, len(await self.fleet.returns(run))))
        return sorted(found, key=lambda r: r.created)

    async def show(self, run: str) -> tuple[FleetRun, dict[str, Return]]:
        """A run's record and the returns that are stored."""
        return await self.fleet.read(run), await self.fleet.returns(run)

    async def history(self, run: str) -> Sequence[Step]:
        """What became of a run, oldest first: who dispatched, adopted, cancelled and ended it."""
        broker = self._client.broker
        subject = broker.names.log("fleet", check_run(run))
        found = direct_batch(broker, broker.names.ledger, subject)
        notes = broker.unreadable
        return [
            step
            async for message in found
            if (
                step := notes.read(
                    fleet.decode_step,
                    broker.names.ledger,
                    message.headers["Nats-Sequence"],
                    message.body,
                )
            )
        ]

    async def cancel(self, run: str, who: str = "") -> FleetRun:
        """Stop a run, wherever it is."""
        record = await self.fleet.cancel(run, who or self._who or "")
        if self._who:
            await Audit(self._client, self._who).write("cancel", runs=[run], detail="fleet")
        return record
