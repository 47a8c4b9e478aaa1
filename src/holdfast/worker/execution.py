"""Executes one held message, from its delivery to its last acknowledgement.

    [limits] ──► claim ──► decode ──► handler, with its events ──► one of the ends in `settling`

The one rule of acknowledgement: ack or nak only after our own settle succeeded. Once the claim is
lost nothing is sent, because the reply subject of an old delivery acts on the new one.

An attempt is interrupted in three ways: a shutdown gives the message back and counts nothing, a
timeout is a failed attempt, a lost claim stops without sending anything.

The same code runs on NATS and in memory (`holdfast.testing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from holdfast import durations
from holdfast.clock import Clock
from holdfast.context import Context
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    Discard,
    FlowStopped,
    InvalidInput,
    InvalidPayload,
    Retry,
    Signal,
    Snooze,
    Unavailable,
    UnknownMember,
    Unreadable,
)
from holdfast.flow import Flow, Unwound
from holdfast.model import run as runs
from holdfast.model.run import Outcome, RunRecord, State, Verdict
from holdfast.model.settings import Settings
from holdfast.names import body_object
from holdfast.ownership.claims import Claim, Claims
from holdfast.payload import Bound
from holdfast.telemetry import Telemetry
from holdfast.worker.attempt import Call, Caller, CurrentAttempt, Deadlines, Held, Interrupt
from holdfast.worker.debouncing import Debouncer
from holdfast.worker.flows import FlowCall, FlowRunner, Park, busy_delay
from holdfast.worker.limiting import Limiter
from holdfast.worker.logs import RunLogs, finish_lines
from holdfast.worker.pool import ResultRefused
from holdfast.worker.settling import Outbox, Settler, error_line, story_of, traceback_of

log = logging.getLogger("holdfast.worker")

HELD_ELSEWHERE_SECONDS: Final = 2.0
"""Redelivery delay if another node holds the run: a dead holder is noticed by then."""
LEFT_SECONDS: Final = 2.0
"""Redelivery delay of a run that this worker cannot execute, so that others get it soon."""
FOREIGN_MOST: Final = 100_000
"""Most runs of other versions to remember: bounds memory."""
INPUT_CHANGED: Final = (
    "the input with which the flow began no longer fits its function; let the function accept it, "
    "for example by a default for a new parameter, then resume the flow"
)
HAS_BEGUN: Final = "it had begun before its job became at_most_once, and may not start again"
CROWDED_SECONDS: Final = 2.0
"""Redelivery delay of a suspect that must wait: as long as a short run takes."""
UNREADABLE_SECONDS: Final = 30.0
"""Redelivery delay if the run's record is unreadable: a person has to act first."""
ACK_TRIES: Final = 50
ACK_PAUSE_SECONDS: Final = 0.1
"""Together five seconds: a consumer without a leader has a new one by then."""
LOOK_AGAIN_SECONDS: Final = 15.0
"""Redelivery delay of a message whose run expects a newer one that cannot be found."""
SAME_MESSAGE_SECONDS: Final = 0.01
"""Two times of a run's first message that differ by less are equal: a record stores more digits
than a header."""


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
        now: Callable[[], float],
        short_wait: float = 10.0,
        unknown_seconds: float = 0.0,
        ack_wait: float = math.inf,
        cleanup: float = 10.0,
        settings: Callable[[], Settings] | None = None,
        logs: RunLogs | None = None,
        limiter: Limiter | None = None,
        flows: FlowRunner | None = None,
    ) -> None:
        self._limiter = limiter
        self._flows = flows
        self.claims = claims
        self._logs = logs
        self._clock = clock
        self._outbox = outbox
        self._caller = caller
        self._telemetry = telemetry
        self._won = telemetry.claims.labels("won")
        self._node = node
        self._settings = settings
        self._now = now
        self._cleanup = cleanup
        self._unknown_seconds = unknown_seconds
        self._ack_wait = ack_wait
        self._foreign: dict[str, float] = {}
        self._deadlines = Deadlines()
        self._debouncer = Debouncer(outbox, claims, telemetry)
        self._settle = Settler(
            claims,
            outbox,
            clock,
            telemetry,
            node=node,
            now=now,
            short_wait=short_wait,
            limiter=limiter,
        )
        if limiter is not None:
            limiter.file, limiter.give_up = self._settle.file, self._settle.gave_up

    async def execute(self, held: Held) -> Sequence[asyncio.Future[Any]]:
        """Process one message completely; after a broker error the message is redelivered.

        Returns what its handler has left running.
        """
        held.identify()
        held.node = self._node
        kept = ""
        try:
            if await self._obtain(held):
                held.show()
                kept = held.claim.record.body_object if held.claim else ""
                if held.flow is None or not await self._flow_is_over(held, held.flow):
                    await self._attempt(held)
        except ClaimLost as error:
            log.warning("%s: its result was refused", error)
        except (BrokerError, Unreadable) as error:
            log.warning("run %s is left to its redelivery: %s", held.run, error)
            await self._give_back(held)
        finally:
            if held.claim:
                self.claims.release(held.claim)
                if kept and held.claim.settled:
                    await self._outbox.forget(kept)
        # The call's task keeps its context, which names `held`: together they would be garbage that
        # only the collector finds, some fifteen objects for each run.
        call, held.call = held.call, None
        if call is None or (call.task.done() and not call.behind):
            return ()
        return self._leftovers(held, call)

    async def _give_back(self, held: Held) -> None:
        """End the claim of a flow whose call could not begin or end: it is called again.

        A redelivery would find it held by this living node, for as long as the node lives.
        """
        claim = held.claim
        if held.job.spec.flow and claim and not (claim.settled or claim.lost):
            with contextlib.suppress(BrokerError, ClaimLost):
                wait = busy_delay(held.message.deliveries)
                await self._settle.parked(held, Park("its next call"), back=wait)

    # ---- obtaining the claim

    async def _obtain(self, held: Held) -> bool:
        spec, began = held.job.spec, self._clock.monotonic()
        redelivered = held.message.deliveries > 1
        if not held.is_recorded and not await self._is_expected(held):
            return True
        if spec.flow and not await self._flow.found(held):
            return False
        fresh = RunRecord(
            "running",
            spec.group,
            spec.name,
            keyed=held.keyed,
            created=held.created,
            restart=spec.restart,
            failures=held.failures,
            crashes=held.crashes,
            cause=held.sender,
            alias=held.alias,
            flow=spec.flow,
            parent=held.parent,
            generation=held.generation,
        )
        if (spec.debounce or spec.limits) and not await self._admit(held, fresh):
            return False
        if spec.delivery == "at_most_once":
            fresh = await self._with_body(held, fresh)
        careful, reply = redelivered or held.wake != "", held.message.reply
        found: Claim | Verdict | None = await self.claims.claim(
            held.run, fresh, message=held.stamp, reply=reply, careful=careful
        )
        if not isinstance(found, Claim):
            found = await self._claim_again(held, fresh, found)
        if found is None:
            return False
        self._won.inc()
        held.adopt(found)
        late = self._clock.monotonic() - began > self._ack_wait
        if (redelivered or late) and await self._had_ended(held, found):
            return False
        if spec.flow:
            held.flow = await self._flow.begin(held)
        return spec.delivery != "at_most_once" or await self._may_begin(held, found)

    async def _may_begin(self, held: Held, claim: Claim) -> bool:
        """Whether an `at_most_once` run has not begun before, when it had no record."""
        if claim.record.failures and not claim.record.attempts:
            await self._settle.dead(held, "failed", HAS_BEGUN, "")
            return False
        return True

    async def _admit(self, held: Held, fresh: RunRecord) -> bool:
        """Debounce, and take a place in each limit; False: the message was dealt with.

        A flow whose journal cannot be read is only parked: it needs no place.
        """
        spec = held.job.spec
        if spec.debounce and self._debouncer.applies(held):
            await self._debouncer.take(held, spec.debounce, fresh)
            return False
        if not spec.limits or self._limiter is None or held.broken:
            return True
        return await self._limiter.admit(held, fresh)

    @property
    def _flow(self) -> FlowRunner:
        if self._flows is None:
            raise BrokerError("this worker was started without flows")
        return self._flows

    async def _claim_again(
        self, held: Held, fresh: RunRecord, found: Claim | Verdict | None
    ) -> Claim | None:
        """Look closer at a run that was not won; None: its message was dealt with."""
        if found is Verdict.FOREIGN:
            held.scope()
            found = await self.claims.claim(
                held.run, fresh, message=held.stamp, reply=held.message.reply
            )
        if found is Verdict.SUPERSEDED:
            found = await self._superseded(held, fresh)
        if isinstance(found, Claim):
            return found
        if fresh.body_object:
            await self._outbox.forget(fresh.body_object)
        if found is not None:
            await self._refused(held, found)
        return None

    async def _had_ended(self, held: Held, claim: Claim) -> bool:
        """Whether a run that was just claimed has ended before, and its record has expired since.

        TTLs run on while NATS is down, and while this process is frozen. The history knows; if it
        cannot answer, the message is given back. A younger message cannot have an expired record,
        and a run that waits for its next attempt has one.
        """
        stored, attempts = held.message.stored_ns / 1e9, claim.record.attempts
        young = self._now() - stored < self.claims.ttl_of(claim.record)
        if young or (attempts and attempts[-1].outcome != "crashed"):
            return False
        spec = held.job.spec
        try:
            found = await self._outbox.recall(held.run, spec.group, spec.name, stored)
        except BrokerError as error:
            why = f"it may have ended before, and the history cannot be read: {error}"
            await self._settle.left(held, why, LEFT_SECONDS)
            return True
        if found is None or found.record.vacant:
            return False
        log.info("run %s has ended before: its message is dropped", held.run)
        kept = claim.record.body_object
        await self.claims.put_back(claim, found.record)
        if kept:
            await self._outbox.forget(kept)
        await self._settle.over(held)
        return True

    async def _unknown(self, held: Held, error: str) -> None:
        """Leave a payload of another version to workers of that version, for a limited time."""
        now = self._clock.monotonic()
        since = self._foreign.setdefault(held.run, now)
        if now - since > 2 * self._unknown_seconds + LEFT_SECONDS:  # an earlier run of the same key
            since = self._foreign[held.run] = now
        if now - since < self._unknown_seconds:
            if since == now:
                log.warning(
                    "run %s is left to other workers for up to %s: %s",
                    held.run,
                    durations.text(self._unknown_seconds),
                    error,
                )
            while len(self._foreign) > FOREIGN_MOST:
                del self._foreign[next(iter(self._foreign))]
            await self._settle.left(held, error, min(LEFT_SECONDS, self._unknown_seconds))
            return
        self._foreign.pop(held.run, None)
        if self._unknown_seconds:
            waited = durations.text(self._unknown_seconds)
            error += f"; no worker that knows it took the run within {waited}"
        await self._settle.dead(held, "invalid", error, "")

    async def _is_expected(self, held: Held) -> bool:
        """Whether a record waits for this message, although its job keeps no records now.

        Only a later message of a run can have one: from when the job had another delivery mode, or
        from an operator's replay. Left alone, it would stay `failed` forever.
        """
        if held.stamp == 1:
            return False
        found = await self.claims.read(held.run)
        return found is not None and runs.waits_for(found[0], held.stamp)

    async def _superseded(self, held: Held, fresh: RunRecord) -> Claim | Verdict | None:
        """Handle a message older than the one the record expects: drop it only if it is not needed.

        After a restore or the deletion of a stream, the newer one may not exist. It certainly does
        while it is parked or running. Otherwise this one waits until the next attempt is due and
        then carries the run itself, if it is the run's own first message; one sent later under the
        same key waits until a coordinator finds that the newer one is gone.
        """
        found = await self.claims.read(held.run)
        record = found[0] if found else None
        if record is not None and record.state != "failed":
            return Verdict.SUPERSEDED
        if record and await self._outbox.is_parked(record.group, record.job, held.run):
            return Verdict.SUPERSEDED
        if record is None or (wait := self._wait_for_newer(held, record)) > 0:
            self._telemetry.claims.labels("superseded").inc()
            await held.message.nak(wait if record else 0.0)
            return None
        held.stamp = record.message  # it replaces that one from here on
        return await self.claims.claim(
            held.run, fresh, message=held.stamp, reply=held.message.reply, careful=True
        )

    def _wait_for_newer(self, held: Held, record: RunRecord) -> float:
        """How long an older message waits for a newer one that may not exist."""
        wait = record.due - self._now()
        again = held.stamp == 1 and abs(held.created - record.created) > SAME_MESSAGE_SECONDS
        return min(wait, LOOK_AGAIN_SECONDS) if wait > 0 else LOOK_AGAIN_SECONDS * again

    async def _with_body(self, held: Held, fresh: RunRecord) -> RunRecord:
        """Keep the payload in the record, because the message will be gone."""
        body, name = held.message.body, ""
        if len(body) > self._outbox.largest_result:
            name = body_object(held.run, secrets.token_hex(8))
            await self._outbox.keep(name, body)
            body = b""
        return msgspec.structs.replace(fresh, once=True, body=body, body_object=name)

    async def _ack_first(self, held: Held) -> bool:
        """Acknowledge before the handler starts; idempotent.

        If its consumer is gone the message cannot be acknowledged, and is given back.
        """
        tries = ACK_TRIES
        while tries:
            try:
                await held.message.ack_confirmed()
                return True
            except Unavailable:  # certainly not applied; the outcome of other errors is unknown
                tries -= 1
            except BrokerError as error:
                log.debug("run %s is not acknowledged yet: %s", held.run, error)
            await self._clock.sleep(ACK_PAUSE_SECONDS)
        await self._settle.returned(held)
        return False

    async def _refused(self, held: Held, verdict: Verdict) -> None:
        self._telemetry.claims.labels(verdict.name.lower()).inc()
        if verdict in (Verdict.DUPLICATE, Verdict.SUPERSEDED):
            self._telemetry.duplicates.labels("claim").inc()
            log.info("run %s: %s", held.run, verdict.value)
            if verdict is Verdict.DUPLICATE and held.message.deliveries > 1:
                found = await self.claims.read(held.run)
                if found and found[0].terminal:
                    await self._settle.filed_again(held, found[0])
            if verdict is Verdict.DUPLICATE and held.parent:
                await self._tell_parent(held)
            # A newer message has the place of an ordered run, even if it is not there yet.
            await self._settle.over(held, again=verdict is Verdict.SUPERSEDED)
        elif verdict is Verdict.HELD and held.wake:
            await held.message.nak(busy_delay(held.message.deliveries))
        elif verdict is Verdict.HELD:
            await held.message.nak(HELD_ELSEWHERE_SECONDS)
        elif verdict is Verdict.CROWDED:
            await held.message.nak(CROWDED_SECONDS)
        elif verdict is Verdict.UNREADABLE:
            await held.message.nak(UNREADABLE_SECONDS)
        else:
            await self._abandon(held, verdict)

    async def _tell_parent(self, held: Held) -> None:
        """A child was cancelled before it had a record, so only its message knows its flow; or a
        restored queue has the message of a child whose end is not in the restored journals."""
        found = await self.claims.read(held.run)
        filed = found and found[0].parent and held.message.deliveries > 1  # and told with that
        if found and found[0].terminal and not filed:
            record = msgspec.structs.replace(found[0], parent=held.parent)
            await self._outbox.tell(held.run, record)

    async def _abandon(self, held: Held, verdict: Verdict) -> None:
        found = await self.claims.read(held.run)
        once = held.job.spec.delivery == "at_most_once"
        if not found or await self.claims.decide(found[0], held.stamp, once=once) is not verdict:
            await held.message.nak()  # the run has changed meanwhile
            return
        record, revision = found
        reason, state, error = _ending(verdict, record)
        running = record.state == "running"
        told = runs.close_crashed(record, self._now()) if running else record
        letter = await self._settle.write_letter(held, reason, error, "", told)
        if ended := await self.claims.give_up(held.run, record, revision, state=state, error=error):
            if held.job.spec.flow:
                await self._flow.given_up(held, ended)
            await self._settle.file(held, ended)
            await self._settle.over(held)
        else:
            await self._outbox.withdraw(letter)
            await held.message.nak(HELD_ELSEWHERE_SECONDS)

    # ---- the attempt

    async def _attempt(self, held: Held) -> None:
        spec = held.job.spec
        deadline = self._deadline(held)
        if deadline is not None and deadline <= 0:
            await self._settle.dead(
                held, "timeout", "the run's time was over before this attempt", ""
            )
            return
        bound = await self._decoded(held)
        if bound is None:
            return
        if spec.delivery == "at_most_once" and not await self._ack_first(held):
            return
        tally = self._telemetry.tally(spec.group, spec.name)
        tally.started += 1
        if held.attempt == 1:
            tally.waited.observe(max(0.0, self._now() - held.created))
        began = self._clock.monotonic()
        await self._run(held, bound, deadline)
        if held.printed:
            finish_lines(held)
        if self._logs is not None:
            await self._logs.flush_attempt(held.run, held.attempt)
        outcome = await self._ended(held)
        tally.finish(outcome, self._clock.monotonic() - began)
        if held.claim is None and outcome in runs.TERMINAL:
            tally.end(outcome, held.failures)

    async def _decoded(self, held: Held) -> Bound | None:
        """The arguments of the call; None: they do not fit, and the message was dealt with."""
        flow = held.flow
        try:
            return held.decode()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the user's own types are made here
            fits_not = isinstance(error, InvalidPayload)
            line = held.conceal(f"InvalidPayload: {error}") if fits_not else error_line(error, held)
            if flow is not None and flow.has_done_something:
                log.error("flow %s is stopped: %s", held.run, line)
                await self._settle.parked(held, flow.stopped(f"{INPUT_CHANGED}: {line}"))
            elif isinstance(error, UnknownMember):
                await self._unknown(held, line)
            else:
                trace = "" if fits_not else traceback_of(error, held)
                await self._settle.dead(held, "invalid", line, trace)
        return None

    async def _run(self, held: Held, bound: Bound, limit: float | None) -> None:
        """Call the handler until it has ended or was given up."""
        if held.job.lane == "process":
            await self._caller.prepare(held.job)
        if held.interrupted:
            return
        call = self._caller.start(
            held.job, held.run, bound, lambda: self._context(held, limit), held
        )
        waiter = held.begin(call, self._cleanup)
        if limit:
            self._deadlines.begin(held, limit)
        try:
            await waiter
        except asyncio.CancelledError:
            call.task.cancel()
            self._closing(held)
        finally:
            self._deadlines.end(held)
            held.over()

    def _deadline(self, held: Held) -> float | None:
        """The time limit of this attempt in seconds, or None.

        A flow that has to end gets the time to undo what it did.
        """
        spec = held.job.spec
        limit = spec.timeout_seconds
        if held.flow is not None and (held.flow.unwinding or held.flow.deadline <= self._now()):
            return None
        if spec.run_timeout_seconds is not None:
            left = held.created + spec.run_timeout_seconds - self._now()
            limit = left if limit is None else min(limit, left)
        return limit

    def _context(self, held: Held, limit: float | None) -> Context:
        spec = held.job.spec
        made = Context if held.flow is None else Flow
        found = made(
            CurrentAttempt(held, self.claims, self._outbox, self._clock, self._telemetry),
            run=held.run,
            spec=spec,
            group=spec.group,
            node=self._node,
            attempt=held.attempt,
            epoch=held.claim.epoch if held.claim else None,
            headers=held.message.headers,
            deadline=self._clock.utc() + limit if limit else None,
            settings=self._settings,
        )
        if isinstance(found, Flow) and held.flow is not None:
            found.flowing = held.flow
        return found

    # ---- flows

    async def _flow_is_over(self, held: Held, flow: FlowCall) -> bool:
        """Whether a flow needs no call: it had ended, or its journal cannot be read."""
        if held.broken:
            await self._settle.parked(held, flow.stopped(held.broken))
            return True
        end = flow.journal.end
        if end is None or not flow.ended_before:
            return False
        await self._flow.clean(held)
        await self._settle.ended_before(held, end)
        return True

    async def _flow_ended(self, held: Held, flow: FlowCall, error: BaseException) -> Outcome | None:
        """How a call of a flow's function has ended; None if it ended like that of any job."""
        if flow.lost is not None:
            raise flow.lost
        if flow.again:
            wait = busy_delay(held.message.deliveries)
            return await self._settle.parked(held, Park("its next call"), back=wait)
        if flow.park is not None:
            return await self._settle.parked(held, flow.park)
        if isinstance(error, (FlowStopped, Unreadable)):
            log.error("flow %s is stopped: %s", held.run, error)
            return await self._settle.parked(held, flow.stopped(error))
        undone = flow.story_of_undo()
        if isinstance(error, Unwound):
            if error.reason == "cancelled" and flow.unwound_as != "failed":
                return await self._settle.cancelled(held, f"{error}{undone}")
            reason = "timeout" if error.reason == "timeout" else "failed"
            await self._settle.dead(held, reason, f"{error}{undone}", "")
            return "timeout" if reason == "timeout" else "failed"
        if held.cause is None and not isinstance(error, (Discard, ResultRefused)):
            line, trace = story_of(error, held)
            await self._settle.dead(held, "failed", line + undone, trace)
            return "failed"
        return None

    async def _flow_interrupted(self, held: Held) -> Outcome:
        """A flow was cancelled, or its time is over, while it ran: its next call unwinds it."""
        if held.cause is Interrupt.CANCEL:
            await self._flow.stop(held)
        return await self._settle.parked(held, Park("its end"), back=0.0)

    # ---- the end

    async def _ended(self, held: Held) -> Outcome:
        call = held.call
        if call is None or not call.task.done() or call.task.cancelled():
            return await self._interrupted(held)
        value, error = call.task.result()
        if error is not None and held.flow is not None:
            outcome = await self._flow_ended(held, held.flow, error)
            if outcome is not None:
                return outcome
        if error is not None:
            return await self._raised(held, error)
        return await self._settle.done(held, value)

    def _leftovers(self, held: Held, call: Call) -> Sequence[asyncio.Future[Any]]:
        """The parts of a handler that still run after its attempt; an async one is logged."""
        spec = held.job.spec
        if call.task.done():
            return call.leftovers
        fields = held.log_fields()
        gauge = self._telemetry.stuck_handlers.labels(spec.group, spec.name)
        log.warning(
            "the handler of run %s (job %s) still runs %s after it was cancelled (%s): its attempt "
            "is over, what it writes is refused, and its place stays taken until it ends",
            held.run,
            spec.name,
            durations.text(self._cleanup),
            held.cause.value if held.cause else "the worker closes",
            extra=fields,
        )
        gauge.inc()

        def gone(_: object) -> None:
            gauge.dec()
            log.info("the handler of run %s that did not stop has ended", held.run, extra=fields)

        call.task.add_done_callback(gone)
        return call.leftovers

    async def _interrupted(self, held: Held, trace: str = "") -> Outcome:
        spec = held.job.spec
        if held.cause is None:
            return await self._settle.failed(
                held, "CancelledError: the handler cancelled itself", ""
            )
        if held.cause is Interrupt.CROWDED:
            await self._settle.left(held, "", 0.0)
            return "given_back"
        if held.flow is not None and held.cause in (Interrupt.TIMEOUT, Interrupt.CANCEL):
            return await self._flow_interrupted(held)
        if held.cause is Interrupt.TIMEOUT:
            limit = spec.timeout_seconds or spec.run_timeout_seconds or 0.0
            error = f"TimeoutError: the attempt took longer than {durations.text(limit)}"
            return await self._settle.failed(held, error, trace, "timeout")
        if held.cause is Interrupt.CANCEL:
            return await self._settle.cancelled(held, "cancelled")
        if held.cause is Interrupt.SHUTDOWN and spec.delivery == "at_most_once":
            await self._settle.dead(
                held, "lost", "its worker stopped, and it starts at most once", trace
            )
            return "given_back"
        if held.cause is Interrupt.SHUTDOWN:
            return await self._settle.returned(held)
        raise ClaimLost(f"run {held.run} was taken over by another node")

    async def _raised(self, held: Held, error: BaseException) -> Outcome:
        if isinstance(error, ResultRefused):
            line = held.conceal(f"InvalidPayload: {error}")
            await self._settle.dead(held, "invalid", line, held.conceal(error.story))
            return "failed"
        steers = isinstance(error, Signal) and held.cause is Interrupt.TIMEOUT
        if held.cause is not None and not steers:  # its reaction to being stopped
            return await self._interrupted(held, traceback_of(error, held))
        if isinstance(error, Discard):
            return await self._settle.cancelled(
                held, error_line(error, held).replace("Discard", "discarded", 1)
            )
        delay = None
        try:
            if isinstance(error, (Retry, Snooze)) and error.delay is not None:
                delay = durations.seconds(error.delay, f"{type(error).__name__} delay")
        except InvalidInput as wrong:
            line = error_line(wrong, held)
            return await self._settle.failed(held, line, traceback_of(error, held))
        if isinstance(error, Snooze) and held.job.spec.delivery != "at_most_once":
            return await self._settle.snoozed(held, delay or 0.0)
        return await self._settle.failed(held, *story_of(error, held), "failed", delay)

    def _closing(self, held: Held) -> None:
        """The worker is closing: settle what was interrupted, leave everything else."""
        if not held.interrupted:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        while task is not None and task.uncancel():
            pass


def _ending(verdict: Verdict, record: RunRecord) -> tuple[str, State, str]:
    """How to end a run that must not be executed: the letter's reason, the state, the error."""
    if verdict is Verdict.POISON:
        return "crashed", "dead", f"{record.crashes + 1} workers died while they held it"
    if verdict is Verdict.BEGUN:
        last = f"; its last error: {record.error}" if record.error else ""
        return "failed", "dead", HAS_BEGUN + last
    return "lost", "lost", "its worker died and its restart strategy is 'never'"
