"""How an attempt ends: each outcome, and the order of its steps.

    done        large result ──► settle done ──► history ──► ack
    failed      short wait: settle failed ──► nak(delay)
                long wait:  park the next message ──► settle failed ──► ack
    exhausted   dead letter ──► settle dead ──► history ──► ack
    shut down   settle failed, nothing counted ──► nak

Each step that must not be lost is stored before the step that forgets it; a crash between two steps
repeats an attempt and never loses a run. Nothing is acknowledged before our own settle succeeded;
`ClaimLost` leaves the message alone. The line in the history comes after the settle, which alone
decides who ended the run; after a crash in between, the redelivery finds the ended record and
writes the line (`filed_again`).

What is stored before the settle is not fenced by it, so its name contains the epoch: a replaced
holder overwrites nothing of its successor's, and what it wrote is removed, or expires if that
fails. Only the record decides which of them counts.
"""

from __future__ import annotations

import base64
import logging
import traceback
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from holdfast import durations
from holdfast.broker.wire import parse_headers
from holdfast.client import Client
from holdfast.clock import Clock
from holdfast.durations import DAY
from holdfast.errors import (
    BrokerError,
    ClaimLost,
    HandlerError,
    HoldfastError,
    InvalidInput,
    NotFound,
    PayloadTooLarge,
)
from holdfast.model import run as runs
from holdfast.model.dead import dead_headers
from holdfast.model.history import Ended
from holdfast.model.job import JobSpec
from holdfast.model.message import RunMessage, delayed, next_message, user_headers
from holdfast.model.run import ERROR_CHARS, Outcome, RunRecord, State
from holdfast.names import H_EXPECTED, H_MSG_ID, H_OBJECT, Names, dead_object, result_object
from holdfast.ownership.claims import Claim, Claims
from holdfast.payload import encode_result
from holdfast.redaction import told
from holdfast.telemetry import Telemetry

if TYPE_CHECKING:
    from holdfast.model.journal import JournalEntry
    from holdfast.worker.attempt import Held
    from holdfast.worker.flows import Park
    from holdfast.worker.limiting import Limiter

log = logging.getLogger("holdfast.worker")

T = TypeVar("T")

TRACE_CHARS: Final = 20_000
"""Characters kept of a traceback, from its end; a dead letter keeps fewer."""
RESULT_SECONDS: Final = 3_600.0
"""A large result is kept at least this long, for callers that come back later for it."""
SETTLE_SECONDS: Final = 60.0
"""How much longer than its record a large result lives: it is stored first and must not expire
first."""
CHILD_RESULT_SECONDS: Final = 30 * DAY
"""The same for a flow's child, whose siblings may take as long as flows usually live."""
STORE_PAUSES: Final = (0.1, 5.0)
"""First and longest pause between attempts to store something that must be stored."""


class Letter(NamedTuple):
    """A dead letter just written, so that it can be withdrawn; 0 if it existed before."""

    sequence: int = 0
    object: str = ""


class Quiet(NamedTuple):
    """The last run of a burst, which waits until it is quiet (`worker.debouncing`)."""

    sequence: int
    body: bytes
    headers: dict[str, str]


class Outbox(Protocol):
    """Where an execution's messages go."""

    names: Names

    @property
    def largest_result(self) -> int:
        """Larger results go to the object store."""
        ...

    async def park(self, spec: JobSpec, message: RunMessage, subject: str, due: float) -> None:
        """Store a message for delivery when due; while waiting it has its own subject."""
        ...

    async def is_parked(self, group: str, job: str, run: str) -> bool:
        """Whether a message of a run is parked."""
        ...

    async def quiet(self, subject: str) -> Quiet | None:
        """The run that waits under a subject until it is quiet."""
        ...

    async def make_quiet(
        self, message: RunMessage, subject: str, due: float, expected: int
    ) -> None:
        """Let a run wait until it is quiet, instead of the one with a sequence."""
        ...

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        """Publish an event; False if no job subscribes to it."""
        ...

    async def dead_letter(
        self, group: str, job: str, body: bytes, headers: dict[str, str]
    ) -> Letter:
        """Store a run that was given up."""
        ...

    async def withdraw(self, letter: Letter) -> None:
        """Remove a dead letter whose writer had lost the run. Best effort."""
        ...

    async def keep(self, name: str, body: bytes, ttl: float | None = None) -> str:
        """Put a large value into the object store, for `ttl` seconds; returns its name."""
        ...

    async def forget(self, name: str) -> None:
        """Remove a large value that nothing refers to. Best effort."""
        ...

    def file(
        self, run: str, record: RunRecord, payload: bytes | None, headers: dict[str, str]
    ) -> Awaitable[None]:
        """Append an ended run to the history, however long that takes."""
        ...

    async def is_filed(self, run: str, record: RunRecord) -> bool:
        """Whether the history has the line of an ended record."""
        ...

    async def recall(self, run: str, group: str, job: str, since: float) -> Ended | None:
        """A run's newest end in the history that was stored at or after `since`."""
        ...

    async def tell(self, run: str, record: RunRecord) -> None:
        """Tell the flow whose child has ended, however long that takes."""
        ...

    async def fetch(self, name: str) -> bytes:
        """A large value from the object store."""
        ...

    async def wake(self, spec: JobSpec, run: str, mark: str, due: float) -> None:
        """Wake a flow when it is due."""
        ...


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
        limiter: Limiter | None = None,
    ) -> None:
        self._limiter = limiter
        self._claims = claims
        self._outbox = outbox
        self._clock = clock
        self._telemetry = telemetry
        self._node = node
        self._now = now
        self._short_wait = short_wait

    def over(self, held: Held, *, again: bool = False) -> Awaitable[None]:
        """Give the run's places back, then acknowledge: a crash in between repeats both.

        `again`: there will be another attempt.
        """
        if held.places and self._limiter is not None:
            return self._leave(self._limiter, held, again)
        return held.message.ack()

    async def _leave(self, limiter: Limiter, held: Held, again: bool) -> None:
        try:
            await limiter.leave(held, again=again)
            await held.message.ack()
        except HoldfastError as error:  # its redelivery gives them back
            log.debug("the places of run %s are not given back yet: %s", held.run, error)

    async def done(self, held: Held, value: Any) -> Outcome:
        """The handler returned."""
        try:
            body = encode_result(value) if value is not None and held.job.spec.recorded else b""
            if held.claim and len(body) > self._outbox.largest_result:
                await self._settle_large(held, held.claim, body)
            elif held.claim:
                if held.flow is not None:
                    await held.flow.fold("done", value=body)
                await self._claims.settle(held.claim, "done", "done", result=body)
        except InvalidInput as error:  # its record could not be read again
            await self.dead(held, "invalid", *story_of(error, held))
            return "failed"
        if held.claim:
            await self.file(held, held.claim.record)
        await self.over(held)
        return "done"

    def file(self, held: Held, record: RunRecord) -> Awaitable[None]:
        """Append an ended record to the history, with what its message carries.

        The settle comes before it, and the ack after it.
        """
        message, keeps = held.message, held.job.spec.keep_payload
        headers = user_headers(message.headers) if keeps else {}
        return self._outbox.file(held.run, record, message.body if keeps else None, headers)

    async def filed_again(self, held: Held, record: RunRecord) -> None:
        """Append an ended run unless it has its line: its worker may have died before it wrote
        it."""
        if not await self._outbox.is_filed(held.run, record):
            await self.file(held, record)
        elif record.parent:
            await self._outbox.tell(held.run, record)

    async def _settle_large(self, held: Held, claim: Claim, body: bytes) -> None:
        name = result_object(held.run, claim.epoch)
        ttl = max(RESULT_SECONDS, self._claims.ttl_of(claim.record)) + SETTLE_SECONDS
        if claim.record.parent:
            ttl = max(ttl, CHILD_RESULT_SECONDS)
        try:
            await self._surely(held, lambda: self._outbox.keep(name, body, ttl))
            if held.flow is not None:
                await held.flow.fold("done", stored=name)
            await self._claims.settle(claim, "done", "done", result_object=name)
        except ClaimLost:
            await self._outbox.forget(name)
            raise

    async def cancelled(self, held: Held, why: str) -> Outcome:
        """It was cancelled, or discarded itself."""
        if held.claim:
            if held.flow is not None:
                await held.flow.fold("cancelled", error=why)
            await self._claims.settle(held.claim, "cancelled", "cancelled", error=why)
            await self.file(held, held.claim.record)
        await self.over(held)
        return "cancelled"

    async def parked(self, held: Held, park: Park, *, back: float | None = None) -> Outcome:
        """Park a flow; what wakes it is stored. `back`: give its message back instead, for
        redelivery after that many seconds."""
        assert held.claim is not None
        if park.error:
            spec, mark = held.job.spec, "tstopped"
            await self._surely(held, lambda: self._outbox.wake(spec, held.run, mark, park.due))
        number = held.stamp + 1 if held.places and back is None else None
        await self._claims.settle(
            held.claim,
            "parked",
            "parked",
            error=park.error,
            due=park.due,
            message=number,
            begun=False,
            waits=park.waits,
        )
        await (self.over(held) if back is None else held.message.nak(back))
        return "parked"

    async def ended_before(self, held: Held, end: JournalEntry) -> None:
        """A flow had ended, and its holder died before it settled the record."""
        assert held.claim is not None
        state: State = "dead"
        outcome: Outcome = "failed"
        if end.state == "done":
            state, outcome = "done", "done"
        elif end.state == "cancelled":
            state, outcome = "cancelled", "cancelled"
        body = b"" if end.value == runs.NO_RESULT else bytes(end.value)
        await self._claims.settle(
            held.claim, state, outcome, error=end.error, result=body, result_object=end.object
        )
        await self.file(held, held.claim.record)
        await self.over(held)

    async def returned(self, held: Held) -> Outcome:
        """Give it back; the attempt does not count."""
        if held.claim:
            await self._claims.settle(held.claim, "failed", "given_back")
        await held.message.nak()
        return "given_back"

    async def left(self, held: Held, why: str, delay: float) -> None:
        """Give it back for a worker that can execute it; nothing has started here."""
        if held.claim:
            await self._claims.settle(held.claim, "failed", "given_back", error=why, begun=False)
        await held.message.nak(delay)

    async def snoozed(self, held: Held, delay: float) -> Outcome:
        """Run again later; the attempt does not count."""
        await self._again(held, delay, "snoozed", "")
        return "snoozed"

    async def failed(
        self,
        held: Held,
        error: str,
        trace: str,
        outcome: Outcome = "failed",
        delay: float | None = None,
    ) -> Outcome:
        """The attempt failed: retry after a wait, or give up."""
        spec = held.job.spec
        failures = held.failures + 1
        wait = spec.retry.wait(failures, held.run)
        if wait is not None and delay is not None:
            wait = delay
        limit = spec.run_timeout_seconds
        if wait is not None and limit is not None and self._now() + wait > held.created + limit:
            wait = None
        if wait is None:
            await self.dead(held, outcome, error, trace)
            return outcome
        log.warning(
            "attempt %d of %s failed, next in %s: %s",
            held.attempt,
            held.run,
            durations.text(wait),
            trace.rstrip() or error,
            extra=held.log_fields(),
        )
        held.failures = failures
        await self._again(held, wait, outcome, error)
        return outcome

    async def _again(self, held: Held, wait: float, outcome: Outcome, error: str) -> None:
        """Run it again after `wait`: a short wait keeps the message, a long one parks a new one.

        A subscriber's next attempt always goes through its own job's subject. That of a job with
        limits is always a new message: the run gives its places back while it waits.
        """
        due = self._now() + wait
        short = held.claim is not None and not held.event and wait <= self._short_wait
        short = short and not held.places  # its next message asks for a place again
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
        await (self.over(held, again=True) if parked else held.message.nak(wait))

    async def _park(self, held: Held, due: float) -> int:
        """Store the message of the next attempt and return its stamp.

        One that has no room for our headers stays with its consumer, however long the wait. Without
        a record a key may be reused: the sequence in the message id keeps messages of the second
        run from being taken for repeats of the first.
        """
        spec, stamp = held.job.spec, held.stamp + 1
        mark = "" if spec.recorded else f"-{held.message.sequence}"
        message = next_message(
            self._outbox.names,
            spec.group,
            spec.name,
            held.run,
            held.message.body,
            held.message.headers,
            number=stamp,
            mark=mark,
            failures=held.failures,
            crashes=held.claim.record.crashes if held.claim and not spec.recorded else None,
            created=held.created,
            queue=self._outbox.names.parse_queue(held.message.subject),
        )
        waiting = self._outbox.names.later(spec.group, spec.name, held.run, f"{stamp}{mark}")
        try:
            await self._surely(held, lambda: self._outbox.park(spec, message, waiting, due))
        except PayloadTooLarge:
            return held.stamp
        return stamp

    async def dead(self, held: Held, reason: str, error: str, trace: str) -> None:
        """Give up: dead letter, settle, ack."""
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
        letter = await self.write_letter(held, reason, error, trace, record)
        if claim:
            try:
                if held.flow is not None:
                    await held.flow.fold("dead", error=error)
                await self._claims.settle(claim, state, outcome, error=error)
            except ClaimLost:
                await self._outbox.withdraw(letter)
                raise
            await self.file(held, claim.record)
        else:
            failures = held.failures + (reason in ("failed", "timeout"))
            self._telemetry.tally(held.job.spec.group, held.job.spec.name).end(state, failures)
        await self.over(held)

    async def gave_up(self, held: Held, fresh: RunRecord, error: str) -> None:
        """A run that nobody has claimed cannot be executed: dead letter, record, ack."""
        found = await self._claims.read(held.run)
        record, revision = found or (msgspec.structs.replace(fresh, state="failed"), 0)
        letter = await self.write_letter(held, "invalid", error, "", record)
        ended = await self._claims.give_up(held.run, record, revision, state="dead", error=error)
        if ended is None:
            await self._outbox.withdraw(letter)
            await held.message.nak()  # the run has changed meanwhile
            return
        await self.file(held, ended)
        await self.over(held)

    async def _check_owner(self, held: Held) -> None:
        """Check the claim before a write that no epoch fences; a replaced holder stops here."""
        if held.claim and not await self._claims.owns(held.claim):
            raise ClaimLost(f"run {held.run} was taken over by another node")

    async def write_letter(
        self, held: Held, reason: str, error: str, trace: str, record: RunRecord | None
    ) -> Letter:
        """Write the dead letter, unless the claim is lost."""
        await self._check_owner(held)
        spec, body = held.job.spec, held.message.body
        headers = self._letter_headers(held, reason, error, trace, record)
        letter = await self._surely(
            held, lambda: self._outbox.dead_letter(spec.group, spec.name, body, headers)
        )
        self._telemetry.dead.labels(spec.group, spec.name, reason).inc()
        log.error(
            "run %s is a dead letter (%s): %s",
            held.run,
            reason,
            trace.rstrip() or error,
            extra=held.log_fields(),
        )
        return letter

    def _letter_headers(
        self, held: Held, reason: str, error: str, trace: str, record: RunRecord | None
    ) -> dict[str, str]:
        """The user's own headers, and the history of the run."""
        headers = user_headers(held.message.headers) | dead_headers(
            run=held.run,
            message=held.stamp if held.claim else runs.believed(None, held.stamp),
            subject=held.message.subject,
            reason=reason,
            error=error,
            now=self._now(),
            traceback=trace,
            failures=held.failures + (reason in ("failed", "timeout")),
            crashes=record.crashes if record else held.crashes,
            attempts=record.attempts if record else (),
        )
        mark = "" if held.job.spec.recorded else f"-{held.message.sequence}"
        epoch = f".{held.claim.epoch}" if held.claim else ""
        headers[H_MSG_ID] = f"{held.run}.dead.{held.stamp}{mark}{epoch}"
        return headers

    async def _surely(self, held: Held, store: Callable[[], Awaitable[T]]) -> T:
        """Store it, however long that takes.

        The run is ours until it is settled: a redelivery would find it held by a live node, and
        nobody would execute it.
        """
        delay, longest = STORE_PAUSES
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
            delay = min(delay * 2, longest)


class NatsOutbox:
    """The outbox on NATS."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.names = client.broker.names

    @property
    def largest_result(self) -> int:
        return self._client.broker.max_message_bytes // 4

    async def park(self, spec: JobSpec, message: RunMessage, subject: str, due: float) -> None:
        await self._client.store_surely(*delayed(message, subject, due))

    async def is_parked(self, group: str, job: str, run: str) -> bool:
        subject = self.names.later(group, job, run, "*")
        get = f"STREAM.MSG.GET.{self.names.jobs}"
        try:
            await self._client.broker.api(get, {"last_by_subj": subject})
        except NotFound:
            return False
        return True

    async def quiet(self, subject: str) -> Quiet | None:
        get = f"STREAM.MSG.GET.{self.names.jobs}"
        try:
            found = (await self._client.broker.api(get, {"last_by_subj": subject}))["message"]
        except NotFound:
            return None
        headers = parse_headers(base64.b64decode(found.get("hdrs", "")))
        return Quiet(int(found["seq"]), base64.b64decode(found.get("data", "")), headers)

    async def make_quiet(
        self, message: RunMessage, subject: str, due: float, expected: int
    ) -> None:
        waiting = delayed(message, subject, due)
        await self._client.broker.store(
            subject, waiting.body, waiting.headers | {H_EXPECTED: str(expected)}
        )

    async def event(self, event: str, body: bytes, headers: dict[str, str]) -> bool:
        await self._client.store_event(event, body, headers)
        return await self._client.has_subscriber(event)

    async def dead_letter(
        self, group: str, job: str, body: bytes, headers: dict[str, str]
    ) -> Letter:
        subject = self.names.dead_letter(group, job)
        name = ""
        try:
            stored = await self._client.store_surely(subject, body, headers)
        except PayloadTooLarge:
            ttl = self._client.records.dead_days * DAY
            name = await self.keep(dead_object(headers[H_MSG_ID]), body, ttl)
            stored = await self._client.store_surely(subject, b"", {**headers, H_OBJECT: name})
        return Letter(0 if stored.duplicate else stored.seq, name)

    async def withdraw(self, letter: Letter) -> None:
        if letter.sequence:
            await self._client.drop_stored(self.names.dead, letter.sequence)
        if letter.object:
            await self.forget(letter.object)

    async def keep(self, name: str, body: bytes, ttl: float | None = None) -> str:
        return await self._client.objects.put(name, body, ttl)

    async def forget(self, name: str) -> None:
        await self._client.objects.delete(name)

    def file(
        self, run: str, record: RunRecord, payload: bytes | None, headers: dict[str, str]
    ) -> Awaitable[None]:
        return self._client.history.append(run, record, payload, headers)

    async def is_filed(self, run: str, record: RunRecord) -> bool:
        return await self._client.history.line_of(run, record) is not None

    async def recall(self, run: str, group: str, job: str, since: float) -> Ended | None:
        return await self._client.history.find(run, group, job, since)

    async def tell(self, run: str, record: RunRecord) -> None:
        await self._client.history.tell(run, record)

    async def fetch(self, name: str) -> bytes:
        return await self._client.objects.get(name)

    async def wake(self, spec: JobSpec, run: str, mark: str, due: float) -> None:
        await self._client.journals.wake(spec.group, spec.name, run, mark, due)


class Concealing(Protocol):
    """Hides the secrets of a payload; an attempt does."""

    def conceal(self, text: str) -> str: ...


def story_of(error: BaseException, held: Concealing) -> tuple[str, str]:
    """What a handler raised, for records and letters: one line, and the traceback."""
    return error_line(error, held), traceback_of(error, held)


def error_line(error: BaseException, held: Concealing | None = None) -> str:
    """An error in one line that any record can hold, even if its `__str__` fails."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the user's own __str__ may do anything
        text = f"{type(error).__name__} (which cannot be shown)"
    return told(held.conceal(text) if held else text, ERROR_CHARS)


def traceback_of(error: BaseException, held: Concealing | None = None) -> str:
    """The traceback, starting at the user's first frame."""
    if isinstance(error, HandlerError):
        text = error.story
    else:
        try:
            frames = error.__traceback__
            while frames and _is_ours(frames):
                frames = frames.tb_next
            shown = frames or error.__traceback__
            text = "".join(traceback.format_exception(type(error), error, shown))
        except Exception:  # noqa: BLE001 - an exception's members are its author's
            return error_line(error, held)
    return told(held.conceal(text) if held else text, TRACE_CHARS, end=True)


def _is_ours(frame: TracebackType) -> bool:
    return "holdfast" in str(frame.tb_frame.f_globals.get("__name__", "")).split(".")
