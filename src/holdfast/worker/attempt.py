"""One attempt, as its context sees it: events, ownership, progress."""

from __future__ import annotations

from typing import Any

from holdfast import tracing
from holdfast.clock import Clock
from holdfast.errors import ClaimLost, NoRecord
from holdfast.model.run import Progress
from holdfast.names import H_CAUSE, H_MSG_ID, event_message_id
from holdfast.ownership.claims import Claim, Claims
from holdfast.payload import encode_value
from holdfast.redaction import told
from holdfast.telemetry import Telemetry
from holdfast.worker.held import Held
from holdfast.worker.outbox import Outbox

PROGRESS_SECONDS = 0.5
NOTE_CHARS = 500
TRUSTED_SECONDS = 1.0
"""No node is declared lost sooner, so a claim that was checked within this time is still ours."""


class CurrentAttempt:
    """One attempt, as its context sees it."""

    __slots__ = (
        "_claims",
        "_clock",
        "_events",
        "_held",
        "_outbox",
        "_owned_at",
        "_progressed",
        "_telemetry",
    )

    def __init__(
        self, held: Held, claims: Claims, outbox: Outbox, clock: Clock, telemetry: Telemetry
    ) -> None:
        self._held = held
        self._claims = claims
        self._outbox = outbox
        self._clock = clock
        self._telemetry = telemetry
        self._events: dict[str, int] = {}
        self._progressed = -1e9
        self._owned_at = clock.monotonic()

    async def publish(self, event: str, data: Any) -> None:
        if not self._held.running or self._held.lost:
            raise ClaimLost(f"the attempt at run {self._held.run} is over: nothing is published")
        await self._check_owner()
        number = self._events.get(event, 0) + 1
        self._events[event] = number
        headers = {
            H_MSG_ID: event_message_id(self._held.run, event, number),
            H_CAUSE: self._held.run,
        }
        tracing.sent(f"publish {event}", headers, event=event, run=self._held.run)
        subscribed = await self._outbox.event(event, encode_value(data), headers)
        self._telemetry.published.labels(event).inc()
        if not subscribed:
            self._telemetry.tell_unclaimed(event)

    async def _check_owner(self) -> None:
        """An event bears its run's id and no epoch, since a retry must not repeat it: a process
        that was frozen or cut off asks before it publishes, so that its successor's counts."""
        claim, now = self._held.claim, self._clock.monotonic()
        if claim is None or now - self._owned_at < TRUSTED_SECONDS:
            return
        if not await self._claims.owns(claim):
            raise ClaimLost(f"run {claim.run} was taken over by another node: nothing is published")
        self._owned_at = now

    def _claim(self, what: str) -> Claim:
        claim = self._held.claim
        if claim is None:
            raise NoRecord(
                f"{what} needs a claim, which job {self._held.job.name!r} does not make "
                "(delivery='at_least_once'): use delivery='effectively_once'",
                run=self._held.run,
            )
        return claim

    async def still_owner(self) -> bool:
        return await self._claims.owns(self._claim("still_owner()"))

    async def progress(self, fraction: float | None, note: str) -> None:
        claim = self._claim("progress()")
        now = self._clock.monotonic()
        if now - self._progressed < PROGRESS_SECONDS and fraction != 1:
            return
        self._progressed = now
        at = self._clock.utc()
        await self._claims.progress(claim, Progress(fraction, told(note, NOTE_CHARS), at))
