"""How a worker handles the runs of jobs that have limits.

    message ──► place in each limit ──► claim ──► handler ──► settle ──► leave ──► ack
                   │ full: the message of the run is stored in the line ──► ack
                   └ when_full="drop": settled as cancelled ──► ack; not if the limit is paused,
                     nor a run that has begun

    ordered: message ──► line ──► ack, one at a time in the queue's order
             granted ──► message in the job's queue `granted` ──► as above

Places are taken before the claim and left after the settle, so a claimed run always has its places.
A run keeps its places while it waits for a later limit. All runs take limits in one fixed order, so
no two wait for each other.

A message that is given back keeps its places: it is redelivered with the same number. Every retry
gets a new message, so a run gives its places back while it waits for the next attempt; only its
place in an ordered limit stays, so that nobody overtakes it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from holdfast.errors import PayloadTooLarge, Unreadable
from holdfast.model.limit import Limit
from holdfast.model.message import RunMessage, next_message
from holdfast.model.run import RunRecord
from holdfast.names import GRANTED, H_CAUSE, H_PARENT, H_SLOT, Names
from holdfast.ownership.claims import Claims
from holdfast.ownership.gates import GateKey, Gates
from holdfast.telemetry import Telemetry
from holdfast.worker.attempt import Held

log = logging.getLogger("holdfast.worker")

NO_ROOM_SECONDS: Final = 2.0
"""Redelivery delay of a message that cannot wait in the line: our headers do not fit into it."""


File = Callable[[Held, RunRecord], Awaitable[None]]
GiveUp = Callable[[Held, RunRecord, str], Awaitable[None]]
Enter = Callable[..., Awaitable[None]]


async def _nowhere(*_: object) -> None:
    return None


class Limiter:
    """Takes and leaves places for one worker."""

    def __init__(self, gates: Gates, claims: Claims, names: Names, telemetry: Telemetry) -> None:
        self.gates = gates
        self.file: File = _nowhere
        """Appends an ended run to the history."""
        self.give_up: GiveUp = _nowhere
        """Ends a run that was never claimed, with a dead letter."""
        self._claims = claims
        self._names = names
        self._telemetry = telemetry

    async def admit(self, held: Held, fresh: RunRecord) -> bool:
        """Take a place in each limit of the job; False: the message was dealt with."""
        spec, again = held.job.spec, held.message.deliveries > 1
        parameters = held.job.signature.parameters
        keys = [
            GateKey(limit.name, limit.key_of(held.message.body, parameters))
            for limit in spec.limits
        ]
        held.limited = held.run
        held.places = tuple(
            key for key, limit in zip(keys, spec.limits, strict=True) if limit.running
        )
        arrives = spec.ordered and self._names.parse_queue(held.message.subject) != GRANTED
        if (again or (arrives and held.stamp > 1)) and await self._is_over(held):
            for key, limit in zip(keys, spec.limits, strict=True):
                if limit.starts:  # this start was granted, but will not happen
                    await self.gates.leave(key, held.run, held.stamp)
            return True  # the claim refuses it too, and the places are then given back
        if arrives:
            await self._arrive(held, fresh, keys[0])
            return False
        for key, limit in zip(keys, spec.limits, strict=True):
            taken = await self.gates.take(key, held.run, held.stamp, again=again)
            if again:
                await self.gates.look(key)
            if not taken:
                await self._full(held, fresh, key, limit)
                return False
        return True

    async def _arrive(self, held: Held, fresh: RunRecord, key: GateKey) -> None:
        """Line up a message of an ordered job.

        Its queue delivers the next message only after this one is acknowledged, so a problem of one
        run or one key must not keep it here.
        """
        try:
            await self._wait(held, key, self.gates.line_up)
        except PayloadTooLarge as error:
            await self.give_up(
                held, fresh, f"it has no room for the headers of a waiting run: {error}"
            )
        except Unreadable as error:
            log.warning("run %s waits until its gate can be read: %s", held.run, error)
            await self.gates.line.add(key, held.run, self._following(held))
            await held.message.ack()  # coordinators serve its line once the gate is removed

    async def _is_over(self, held: Held) -> bool:
        """Whether there is nothing left to do for a redelivered message."""
        try:
            found = await self._claims.read(held.run)
        except Unreadable:
            return False  # the claim decides
        if found is None or found[0].vacant:
            return False
        return found[0].terminal or found[0].message > held.stamp

    async def _full(self, held: Held, fresh: RunRecord, key: GateKey, limit: Limit) -> None:
        drops = limit.when_full == "drop" and not self.gates.is_paused(key)
        if not drops or not await self._drop(held, fresh, limit):
            try:
                await self._wait(held, key, self.gates.wait)
            except PayloadTooLarge:
                await held.message.nak(NO_ROOM_SECONDS)

    async def _wait(self, held: Held, key: GateKey, enter: Enter) -> None:
        """Put its run into a line, and acknowledge its message."""
        number, again = held.stamp + 1, held.message.deliveries > 1
        await enter(key, held.run, number, self._following(held), again=again)
        self._telemetry.claims.labels("waiting").inc()
        await held.message.ack()

    def _following(self, held: Held) -> RunMessage:
        """The message to send once the run has a place."""
        spec, message = held.job.spec, held.message
        found = next_message(
            self._names,
            spec.group,
            spec.name,
            held.run,
            message.body,
            message.headers,
            number=held.stamp + 1,
            failures=held.failures,
            created=held.created,
            queue=GRANTED if spec.ordered else self._names.parse_queue(message.subject),
        )
        origin = {k: v for k, v in message.headers.items() if k in (H_CAUSE, H_SLOT, H_PARENT)}
        return found._replace(headers=found.headers | origin)

    async def _drop(self, held: Held, fresh: RunRecord, limit: Limit) -> bool:
        """End a run that found its limit full; False if it has begun: it was not dropped then."""
        if await self._claims.read(held.run) is not None:
            return False
        record = msgspec.structs.replace(fresh, state="failed")
        error = f"dropped: limit {limit.name!r} was full"
        ended = await self._claims.give_up(held.run, record, 0, state="cancelled", error=error)
        if ended is None:
            return False
        await self.file(held, ended)
        self._telemetry.claims.labels("dropped").inc()
        log.info("run %s is dropped: limit %s is full", held.run, limit.name)
        await self.leave(held)
        await held.message.ack()
        return True

    async def leave(self, held: Held, *, again: bool = False) -> None:
        """Give the places back; each goes to the next in its line.

        `again`: there will be another attempt, which keeps its place in an ordered limit.
        """
        places = held.places[1:] if again and held.job.spec.ordered else held.places
        for key in places:  # one after the other: a task for each would cost more than its write
            await self.gates.leave(key, held.limited, held.stamp)
        if held.message.deliveries > 1:
            for key in places:
                await self.gates.look(key)

    async def restore(self, held: Held) -> None:
        """Record a running run again in gates that were deleted."""
        for key in held.places:
            if held.claim and not held.claim.settled:  # otherwise it is about to leave, or has left
                await self.gates.restore(key, held.limited, held.stamp)
