"""Executing one held message, from its delivery to its last acknowledgement.

    claim ──► decode ──► handler ──► events (during) ──► settle ──► ack
                            │ failed, short wait   settle failed ──► nak(delay)
                            │ failed, long wait    park the next message ──► settle failed ──► ack
                            └ exhausted            dead letter ──► settle dead ──► ack

The one rule of acknowledgement: ack or nak only after our own settle succeeded. Once the claim is
lost nothing at all is sent, because the reply subject of an old delivery acts on the new one.

Each step that must not be lost is stored before the step that forgets it; a crash between two
steps therefore repeats an attempt, and never loses a run. Three ways to be interrupted, three
paths: shutdown gives the message back and counts nothing, a timeout is a failed attempt, a lost
claim stops in silence.

The same code runs over NATS and over memory (`holdfast.testing`).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from holdfast import durations
from holdfast.clock import Clock
from holdfast.context import Context
from holdfast.errors import (
    BrokerError,
    Discard,
    HoldfastError,
    InvalidInput,
    InvalidPayload,
    NoRecord,
    PayloadTooLarge,
    Retry,
    Signal,
    Snooze,
    Unavailable,
)
from holdfast.model import run as runs
from holdfast.model.run import Outcome, Progress, RunRecord, State, Verdict
from holdfast.names import H_CAUSE, H_MSG_ID, event_message_id
from holdfast.ownership.claims import Claim, ClaimLost, Claims
from holdfast.payload import encode_result, encode_value
from holdfast.telemetry import Telemetry
from holdfast.worker import envelope
from holdfast.worker.calling import Caller
from holdfast.worker.held import Held, Interrupt
from holdfast.worker.outbox import Outbox

log = logging.getLogger("holdfast.worker")

HELD_ELSEWHERE_SECONDS = 2.0
PROGRESS_SECONDS = 0.5
ACK_TRIES = 50

T = TypeVar("T")


class Execution:
    """One attempt, as its context sees it."""

    __slots__ = ("_events", "_executor", "_held", "_progressed")

    def __init__(self, executor: Executor, held: Held) -> None:
        self._executor = executor
        self._held = held
        self._events: dict[str, int] = {}
        self._progressed = -1e9

    async def publish(self, event: str, data: Any) -> None:
        if self._held.task is None or self._held.lost:
            raise ClaimLost(f"the attempt at run {self._held.run} is over: nothing is published")
        number = self._events.get(event, 0) + 1
        self._events[event] = number
        headers = {
            H_MSG_ID: event_message_id(self._held.run, event, number),
            H_CAUSE: self._held.run,
        }
        await self._executor.publish(event, encode_value(data), headers)

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
        return await self._executor.claims.owns(self._claim("still_owner()"))

    async def progress(self, fraction: float | None, note: str) -> None:
        claim = self._claim("progress()")
        now = self._executor.clock.monotonic()
        if now - self._progressed < PROGRESS_SECONDS and fraction != 1:
            return
        self._progressed = now
        at = self._executor.clock.utc()
        await self._executor.claims.progress(claim, Progress(fraction, note[:500], at))


class Executor:
    """Executes held messages for one node."""

    def __init__(
        self,
        claims: Claims,
        outbox: Outbox,
        caller: Caller,
        clock: Clock,
        telemetry: Telemetry,
        *,
        node: str,
        now: Any,
        short_wait: float = 10.0,
    ) -> None:
        self.claims = claims
        self.clock = clock
        self._outbox = outbox
        self._caller = caller
        self._telemetry = telemetry
        self._won = telemetry.claims.labels("won")
        self._node = node
        self._now = now
        self._short_wait = short_wait

    async def execute(self, held: Held) -> None:
        """Take one message all the way; errors of the broker end here, the message comes again."""
        envelope.identify(held)
        try:
            if await self._obtain(held):
                await self._attempt(held)
        except ClaimLost as error:
            log.warning("%s: its result was refused", error)
        except BrokerError as error:
            log.warning("run %s is left to its redelivery: %s", held.run, error)
        finally:
            if held.claim:
                self.claims.release(held.claim)

    async def give_back(self, held: Held) -> None:
        """Return a message that was never started."""
        await _quietly(held.message.nak())

    # ---- obtaining the right to run it

    async def _obtain(self, held: Held) -> bool:
        spec = held.job.spec
        redelivered = held.message.deliveries > 1
        if not envelope.is_recorded(held):
            return True
        fresh = RunRecord(
            "running",
            spec.group,
            spec.name,
            keyed=held.keyed,
            created=held.created,
            restart=spec.restart,
            failures=held.failures,
            crashes=envelope.crashes(held),
            cause=held.message.headers.get(H_CAUSE, ""),
            body=held.message.body if spec.delivery == "at_most_once" else b"",
        )
        found = await self.claims.claim(
            held.run, fresh, message=held.stamp, reply=held.message.reply, careful=redelivered
        )
        if found is Verdict.FOREIGN:
            envelope.scope(held)
            found = await self.claims.claim(
                held.run, fresh, message=held.stamp, reply=held.message.reply
            )
        if isinstance(found, Verdict):
            await self._refused(held, found)
            return False
        self._won.inc()
        envelope.adopt(held, found)
        return spec.delivery != "at_most_once" or await self._ack_first(held)

    async def _ack_first(self, held: Held) -> bool:
        """The message must be gone before the handler starts; asking twice is harmless.

        With its consumer gone it cannot be acknowledged, and is given back to come again.
        """
        tries = ACK_TRIES
        while tries:
            try:
                await held.message.ack_confirmed()
                return True
            except Unavailable:  # surely not applied; anything else is unknown
                tries -= 1
            except BrokerError as error:
                log.debug("run %s is not acknowledged yet: %s", held.run, error)
            await self.clock.sleep(0.1)
        await self._returned(held)
        return False

    async def _refused(self, held: Held, verdict: Verdict) -> None:
        self._telemetry.claims.labels(verdict.name.lower()).inc()
        if verdict in (Verdict.DUPLICATE, Verdict.SUPERSEDED):
            self._telemetry.duplicates.labels("claim").inc()
            log.info("run %s: %s", held.run, verdict.value)
            await held.message.ack()
        elif verdict is Verdict.HELD:
            await held.message.nak(HELD_ELSEWHERE_SECONDS)
        else:
            await self._abandon(held, verdict)

    async def _abandon(self, held: Held, verdict: Verdict) -> None:
        found = await self.claims.read(held.run)
        if not found or await self.claims.decide(found[0], held.stamp) is not verdict:
            await held.message.nak()  # it has moved on meanwhile
            return
        record, revision = found
        poison = verdict is Verdict.POISON
        error = (
            f"{record.crashes + 1} workers died while they held it"
            if poison
            else "its worker died and its restart strategy is 'never'"
        )
        crashed = runs.close_crashed(record, self._now())
        await self._bury(held, "crashed" if poison else "lost", error, "", crashed)
        state: State = "dead" if poison else "lost"
        if await self.claims.give_up(held.run, record, revision, state=state, error=error):
            await held.message.ack()
        else:
            await held.message.nak(HELD_ELSEWHERE_SECONDS)

    # ---- the attempt

    async def _attempt(self, held: Held) -> None:
        spec = held.job.spec
        deadline = self._deadline(held)
        if deadline is not None and deadline <= 0:
            await self._dead(held, "timeout", "the run's time was over before this attempt", "")
            return
        try:
            bound = held.job.signature.decode(held.message.body)
        except InvalidPayload as error:
            await self._dead(held, "invalid", f"InvalidPayload: {error}", "")
            return
        ctx = self._context(held, deadline)
        tally = self._telemetry.tally(spec.group, spec.name)
        tally.started += 1
        if held.attempt == 1:
            tally.waited.observe(max(0.0, self._now() - held.created))
        began = self.clock.monotonic()
        try:
            value = await self._run(held, ctx, bound, deadline)
        except asyncio.CancelledError:
            outcome = await self._interrupted(held)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a handler may raise anything
            outcome = await self._raised(held, error)
        else:
            outcome = await self._done(held, value)
        tally.finish(outcome, self.clock.monotonic() - began)

    async def _run(self, held: Held, ctx: Context, bound: Any, limit: Any) -> Any:
        if held.cause is not None:
            raise asyncio.CancelledError
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit, held.interrupt, Interrupt.TIMEOUT) if limit else None
        held.task = asyncio.current_task()
        try:
            return await self._caller.call(held.job, ctx, bound)
        finally:
            if timer:
                timer.cancel()
            held.over()

    def _deadline(self, held: Held) -> float | None:
        """Seconds that this attempt may take, or None."""
        spec = held.job.spec
        limit = spec.timeout_seconds
        if spec.run_timeout_seconds is not None:
            left = held.created + spec.run_timeout_seconds - self._now()
            limit = left if limit is None else min(limit, left)
        return limit

    def _context(self, held: Held, limit: float | None) -> Context:
        spec = held.job.spec
        return Context(
            Execution(self, held),
            run=held.run,
            spec=spec,
            group=spec.group,
            node=self._node,
            attempt=held.attempt,
            epoch=held.claim.epoch if held.claim else None,
            headers=held.message.headers,
            deadline=self.clock.utc() + limit if limit else None,
        )

    # ---- how it ended

    async def _done(self, held: Held, value: Any) -> Outcome:
        try:
            body = encode_result(value) if value is not None and held.job.spec.recorded else b""
        except InvalidPayload as error:
            await self._dead(held, "invalid", _line(error), _story(error))
            return "failed"
        if held.claim:
            name = ""
            if len(body) > self._outbox.largest_result:
                kept, name, body = body, f"result/{held.run}", b""
                await self._surely(held, lambda: self._outbox.keep(name, kept))
            await self.claims.settle(held.claim, "done", "done", result=body, result_object=name)
        await _quietly(held.message.ack())
        return "done"

    async def _interrupted(self, held: Held, story: str = "") -> Outcome:
        spec = held.job.spec
        if held.cause is None:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            return await self._failed(held, "CancelledError: the handler cancelled itself", "")
        if held.cause is Interrupt.TIMEOUT:
            limit = spec.timeout_seconds or spec.run_timeout_seconds or 0.0
            error = f"TimeoutError: the attempt took longer than {durations.text(limit)}"
            return await self._failed(held, error, story, "timeout")
        if held.cause is Interrupt.CANCEL:
            return await self._cancelled(held, "cancelled")
        if held.cause is Interrupt.SHUTDOWN and spec.delivery == "at_most_once":
            await self._dead(held, "lost", "its worker stopped, and it starts at most once", story)
            return "given_back"
        if held.cause is Interrupt.SHUTDOWN:
            return await self._returned(held)
        raise ClaimLost(f"run {held.run} was taken over by another node")

    async def _raised(self, held: Held, error: BaseException) -> Outcome:
        steers = isinstance(error, Signal) and held.cause is Interrupt.TIMEOUT
        if held.cause is not None and not steers:  # its answer to being stopped
            return await self._interrupted(held, _story(error))
        if isinstance(error, Discard):
            return await self._cancelled(held, _line(error).replace("Discard", "discarded", 1))
        delay = None
        try:
            if isinstance(error, (Retry, Snooze)) and error.delay is not None:
                delay = durations.seconds(error.delay, f"{type(error).__name__} delay")
        except InvalidInput as wrong:
            return await self._failed(held, _line(wrong), _story(error))
        if isinstance(error, Snooze) and held.job.spec.delivery != "at_most_once":
            return await self._snoozed(held, delay or 0.0)
        return await self._failed(held, _line(error), _story(error), "failed", delay)

    async def _cancelled(self, held: Held, why: str) -> Outcome:
        if held.claim:
            await self.claims.settle(held.claim, "cancelled", "cancelled", error=why)
        await _quietly(held.message.ack())
        return "cancelled"

    async def _returned(self, held: Held) -> Outcome:
        if held.claim:
            await self.claims.settle(held.claim, "failed", "given_back")
        await _quietly(held.message.nak())
        return "given_back"

    async def _snoozed(self, held: Held, delay: float) -> Outcome:
        await self._again(held, delay, "snoozed", "")
        return "snoozed"

    async def _failed(
        self,
        held: Held,
        error: str,
        story: str,
        outcome: Outcome = "failed",
        delay: float | None = None,
    ) -> Outcome:
        spec = held.job.spec
        failures = held.failures + 1
        wait = spec.retry.wait(failures, held.run)
        if wait is not None and delay is not None:
            wait = delay
        limit = spec.run_timeout_seconds
        if wait is not None and limit is not None and self._now() + wait > held.created + limit:
            wait = None
        if wait is None:
            await self._dead(held, outcome, error, story)
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
        stamp = held.stamp if short else await self._park(held, due)
        if held.claim:
            await self.claims.settle(
                held.claim, "failed", outcome, error=error, due=due, message=stamp
            )
        parked = stamp != held.stamp
        self._telemetry.retries.labels("parked" if parked else "nak").inc()
        await _quietly(held.message.ack() if parked else held.message.nak(wait))

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

    async def _dead(self, held: Held, reason: str, error: str, story: str) -> None:
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
        await self._bury(held, reason, error, story, record)
        if claim:
            await self.claims.settle(claim, state, outcome, error=error)
        await _quietly(held.message.ack())

    async def _bury(
        self, held: Held, reason: str, error: str, story: str, record: RunRecord | None
    ) -> None:
        if held.claim and not await self.claims.owns(held.claim):
            raise ClaimLost(f"run {held.run} was taken over by another node")
        headers = envelope.story_headers(held, reason, error, story, record, self._now())
        spec = held.job.spec
        body = held.message.body
        await self._surely(
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
            await self.clock.sleep(delay)
            delay = min(delay * 2, 5.0)

    # ---- events

    async def publish(self, event: str, body: bytes, headers: dict[str, str]) -> None:
        """Send an event; one that nobody subscribes to is not passed over in silence."""
        subscribed = await self._outbox.event(event, body, headers)
        self._telemetry.published.labels(event).inc()
        if not subscribed:
            self._telemetry.tell_unclaimed(event)


def _line(error: BaseException) -> str:
    """An error in one text that any record can carry, whatever the error itself is made of."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the user's own __str__ may do anything
        text = f"{type(error).__name__} (which cannot be shown)"
    return text.encode("utf-8", "backslashreplace").decode()


def _story(error: BaseException) -> str:
    """The traceback from the user's own first frame on."""
    frames = error.__traceback__
    while frames and "holdfast" in frames.tb_frame.f_globals.get("__name__", "").split("."):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


async def _quietly(acknowledgement: Any) -> None:
    """An acknowledgement that cannot be sent only means a redelivery, which the record answers."""
    try:
        await acknowledgement
    except HoldfastError as error:
        log.debug("acknowledgement not sent: %s", error)
