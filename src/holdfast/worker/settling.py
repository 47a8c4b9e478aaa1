"""How an attempt ends: each way out, and the order of its steps.

    done        large result ──► settle done ──► ack
    failed      short wait: settle failed ──► nak(delay)
                long wait:  park the next message ──► settle failed ──► ack
    exhausted   dead letter ──► settle dead ──► ack
    shut down   settle failed, nothing counted ──► nak

Each step that must not be lost is stored before the step that forgets it; a crash between two
steps repeats an attempt and never loses a run. Nothing is acknowledged before our own settle
succeeded; `ClaimLost` leaves the message alone.

What is stored before the settle is not fenced by it, so it has the epoch in its name: a holder that
was replaced meanwhile overwrites nothing of its successor's, and what it wrote is removed again, or
expires when that fails too. Only the record says which of them counts.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, TypeVar

from holdfast import durations
from holdfast.clock import Clock
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    HandlerError,
    HoldfastError,
    InvalidInput,
    PayloadTooLarge,
)
from holdfast.model import run as runs
from holdfast.model.run import ERROR_CHARS, Outcome, RunRecord, State
from holdfast.names import result_object
from holdfast.ownership.claims import Claim, Claims
from holdfast.payload import encode_result
from holdfast.redaction import told
from holdfast.telemetry import Telemetry
from holdfast.worker import envelope
from holdfast.worker.held import Held
from holdfast.worker.outbox import Buried, Outbox

log = logging.getLogger("holdfast.worker")

T = TypeVar("T")

STORY_CHARS = 20_000
"""Of a traceback, its end; a dead letter keeps less."""
SETTLE_SECONDS = 60.0
"""A large result is stored before the record that names it: it must not expire before that does."""


class Settler:
    """Ends attempts for one node."""

    def __init__(
        self,
        claims: Claims,
        outbox: Outbox,
        clock: Clock,
        telemetry: Telemetry,
        *,
        node: str,
        now: Callable[[], float],
        short_wait: float,
    ) -> None:
        self._claims = claims
        self._outbox = outbox
        self._clock = clock
        self._telemetry = telemetry
        self._node = node
        self._now = now
        self._short_wait = short_wait

    async def done(self, held: Held, value: Any) -> Outcome:
        """The handler returned."""
        try:
            body = encode_result(value) if value is not None and held.job.spec.recorded else b""
            if held.claim and len(body) > self._outbox.largest_result:
                await self._settle_large(held, held.claim, body)
            elif held.claim:
                await self._claims.settle(held.claim, "done", "done", result=body)
        except InvalidInput as error:  # nothing that could be read again
            await self.dead(held, "invalid", line_of(error), story_of(error))
            return "failed"
        await quietly(held.message.ack())
        return "done"

    async def _settle_large(self, held: Held, claim: Claim, body: bytes) -> None:
        name = result_object(held.run, claim.epoch)
        ttl = self._claims.ttl_of(claim.record) + SETTLE_SECONDS
        try:
            await self._surely(held, lambda: self._outbox.keep(name, body, ttl))
            await self._claims.settle(claim, "done", "done", result_object=name)
        except ClaimLost:
            await self._outbox.forget(name)
            raise

    async def cancelled(self, held: Held, why: str) -> Outcome:
        """It was cancelled, or discarded itself."""
        if held.claim:
            await self._claims.settle(held.claim, "cancelled", "cancelled", error=why)
        await quietly(held.message.ack())
        return "cancelled"

    async def returned(self, held: Held) -> Outcome:
        """Give it back; the attempt does not count."""
        if held.claim:
            await self._claims.settle(held.claim, "failed", "given_back")
        await quietly(held.message.nak())
        return "given_back"

    async def left(self, held: Held, why: str, delay: float) -> None:
        """Give it back for a worker that can execute it; nothing has started here."""
        if held.claim:
            await self._claims.settle(held.claim, "failed", "given_back", error=why, begun=False)
        await quietly(held.message.nak(delay))

    async def snoozed(self, held: Held, delay: float) -> Outcome:
        """Come again later; the attempt does not count."""
        await self._again(held, delay, "snoozed", "")
        return "snoozed"

    async def failed(
        self,
        held: Held,
        error: str,
        story: str,
        outcome: Outcome = "failed",
        delay: float | None = None,
    ) -> Outcome:
        """It failed: again after a wait, or never."""
        spec = held.job.spec
        failures = held.failures + 1
        wait = spec.retry.wait(failures, held.run)
        if wait is not None and delay is not None:
            wait = delay
        limit = spec.run_timeout_seconds
        if wait is not None and limit is not None and self._now() + wait > held.created + limit:
            wait = None
        if wait is None:
            await self.dead(held, outcome, error, story)
            return outcome
        log.warning(
            "attempt %d of %s failed, next in %s: %s",
            held.attempt,
            held.run,
            durations.text(wait),
            story.rstrip() or error,
            extra=envelope.log_fields(held, self._node),
        )
        held.failures = failures
        await self._again(held, wait, outcome, error)
        return outcome

    async def _again(self, held: Held, wait: float, outcome: Outcome, error: str) -> None:
        """Run it again after `wait`: a short wait keeps the message, a long one parks a new one.

        A subscriber's next attempt always goes through its own job's subject.
        """
        due = self._now() + wait
        short = held.claim is not None and not held.event and wait <= self._short_wait
        stamp = held.stamp
        if not short:
            await self._check_owner(held)
            stamp = await self._park(held, due)
        if held.claim:
            await self._claims.settle(
                held.claim, "failed", outcome, error=error, due=due, message=stamp
            )
        parked = stamp != held.stamp
        self._telemetry.retries.labels("parked" if parked else "nak").inc()
        await quietly(held.message.ack() if parked else held.message.nak(wait))

    async def _park(self, held: Held, due: float) -> int:
        """Store the message of the next attempt and return its stamp.

        One that has no room for our headers stays with its consumer, however long the wait.
        """
        stamp = held.stamp + 1
        headers = envelope.parked_headers(held, stamp)
        spec, body, mark = held.job.spec, held.message.body, envelope.mark(held, stamp)
        try:
            await self._surely(
                held,
                lambda: self._outbox.park(
                    spec.group, spec.name, held.run, mark, body, headers, due
                ),
            )
        except PayloadTooLarge:
            return held.stamp
        return stamp

    async def dead(self, held: Held, reason: str, error: str, story: str) -> None:
        """Give it up: dead letter, settle, ack."""
        claim = held.claim
        state: State = "lost" if reason == "lost" else "dead"
        outcome: Outcome = "timeout" if reason == "timeout" else "failed"
        record = None
        if claim:
            record = runs.settled(
                claim.record,
                state,
                outcome,
                epoch=claim.epoch,
                token="",
                now=self._now(),
                error=error,
            )
        buried = await self.bury(held, reason, error, story, record)
        if claim:
            try:
                await self._claims.settle(claim, state, outcome, error=error)
            except ClaimLost:
                await self._outbox.unbury(buried)
                raise
        await quietly(held.message.ack())

    async def _check_owner(self, held: Held) -> None:
        """Check the claim before a write that no epoch fences; a replaced holder stops here."""
        if held.claim and not await self._claims.owns(held.claim):
            raise ClaimLost(f"run {held.run} was taken over by another node")

    async def bury(
        self, held: Held, reason: str, error: str, story: str, record: RunRecord | None
    ) -> Buried:
        """Write the dead letter, unless the claim is lost."""
        await self._check_owner(held)
        headers = envelope.story_headers(held, reason, error, story, record, self._now())
        spec = held.job.spec
        body = held.message.body
        buried = await self._surely(
            held, lambda: self._outbox.dead_letter(spec.group, spec.name, body, headers)
        )
        self._telemetry.dead.labels(spec.group, spec.name, reason).inc()
        log.error(
            "run %s is a dead letter (%s): %s",
            held.run,
            reason,
            story.rstrip() or error,
            extra=envelope.log_fields(held, self._node),
        )
        return buried

    async def _surely(self, held: Held, store: Callable[[], Awaitable[T]]) -> T:
        """Store it, however long that takes.

        The run is ours until it is settled: left to its redelivery it would be found to be held by
        a node that is alive, and nobody would touch it.
        """
        delay = 0.1
        while True:
            try:
                return await store()
            except BrokerError as error:
                if held.claim is None:
                    raise
                if held.lost:
                    raise ClaimLost(f"run {held.run} was taken over by another node") from None
                log.warning("run %s cannot be settled yet: %s", held.run, error)
            await self._clock.sleep(delay)
            delay = min(delay * 2, 5.0)


def line_of(error: BaseException) -> str:
    """An error in one text that any record can carry, whatever the error itself is made of."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the user's own __str__ may do anything
        text = f"{type(error).__name__} (which cannot be shown)"
    return told(text, ERROR_CHARS)


def story_of(error: BaseException) -> str:
    """The traceback from the user's own first frame on."""
    if isinstance(error, HandlerError):
        return told(error.story, STORY_CHARS, end=True)
    try:
        frames = error.__traceback__
        while frames and _is_ours(frames):
            frames = frames.tb_next
        lines = traceback.format_exception(type(error), error, frames or error.__traceback__)
    except Exception:  # noqa: BLE001 - an exception's members are its author's
        return line_of(error)
    return told("".join(lines), STORY_CHARS, end=True)


def _is_ours(frame: TracebackType) -> bool:
    return "holdfast" in str(frame.tb_frame.f_globals.get("__name__", "")).split(".")


async def quietly(acknowledgement: Any) -> None:
    """An acknowledgement that cannot be sent only means a redelivery, which the record answers."""
    try:
        await acknowledgement
    except HoldfastError as error:
        log.debug("acknowledgement not sent: %s", error)
