"""Every error that can reach a user's code, in one tree ordered by what the caller does about it.

Errors that stay inside one part (an embedded server, loading an app) live beside what raises them,
under the same root. A message says what was wrong and what to do next; facts that a program may
need are attributes. Errors of the NATS client never leave `holdfast.broker`.

    HoldfastError
    ├── ConfigError               a configuration value, or a mix of them, that cannot work
    │   └── DefinitionError       a job, hook or event defined in a way that cannot work
    ├── InvalidInput              change the input: it was rejected, and nothing was sent
    │   ├── InvalidName
    │   ├── InvalidPayload
    │   │   └── UnknownMember     it has a member that this version of the job does not know
    │   ├── PayloadTooLarge
    │   ├── UnknownJob
    │   └── NoWorker              the group has no live worker, and its fallback is `fail`
    ├── BrokerError               something between us and NATS
    │   ├── TryAgain              retry the same step: see `holdfast.retrying`
    │   │   ├── NotConnected      no connection right now; nothing was sent
    │   │   ├── Unavailable       no leader answers for the stream right now; nothing was applied
    │   │   └── OutcomeUnknown    no answer: the write may or may not have been applied
    │   │       └── PartlyStored  of many runs some are stored, and it says which
    │   ├── Replaced              stop and write nothing: somebody else has taken over
    │   │   ├── ClaimLost         another attempt holds the run
    │   │   ├── NodeLost          this node was declared lost
    │   │   ├── StaleTerm         another leader has a newer term
    │   │   └── LeaseLost         the lease is another's, or nobody's
    │   ├── Conflict              read again and decide: a compare-and-swap was refused
    │   ├── NotFound              stream, consumer, message or key does not exist
    │   ├── ServerTooOld
    │   └── PermissionDenied
    ├── Unreadable                skip it: a record is damaged, or a newer version wrote it
    ├── SettingsError             settings that cannot be published, read or rendered
    ├── HandlerError              what a handler in a process raised, as its middlewares see it
    ├── FlowError                 an operation of a flow failed
    │   ├── StepFailed            a step has used up its attempts
    │   ├── FlowTooLong           it has too many operations
    │   └── FlowStopped           it cannot continue now; it is kept
    │       └── FlowMismatch      its code no longer fits its journal
    └── RunError                  how a run ended, or why that is unknown
        ├── RunFailed
        ├── RunCancelled
        ├── DuplicateRun          the key has a run already; nothing was sent
        ├── StillHeld             somebody else does the work that `app.once` guards
        ├── RunLost
        ├── RunNotFound
        ├── ResultTimeout
        └── NoRecord              the delivery mode keeps no record, so this cannot be answered

    Signal                        raised by a handler to steer its own run; not an error
    ├── Retry
    ├── Snooze
    └── Discard
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal


class HoldfastError(Exception):
    """Root of every error that Holdfast raises."""

    requests: tuple[Any, ...] = ()
    """From `enqueue` and `enqueue_many`: the requests that failed.
    `app.enqueue_many(error.requests)` sends the same runs again; none is stored twice."""


class ConfigError(HoldfastError):
    """A configuration value, or a mix of values, cannot work."""


class DefinitionError(ConfigError):
    """A job, hook or subscription is defined in a way that cannot work."""


class InvalidInput(HoldfastError):
    """What was passed in is rejected; nothing was sent."""


class InvalidName(InvalidInput):
    """A name contains something that a NATS subject or bucket cannot carry."""


class InvalidPayload(InvalidInput):
    """A payload is not JSON, or does not fit the job's parameters."""


class UnknownMember(InvalidPayload):
    """A payload has a member that the job does not know; another version of the job may."""


class PayloadTooLarge(InvalidInput):
    """A message would exceed what the server accepts; sending it would cut the connection."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"the message is {size:,} bytes with its headers and the limit is {limit:,}: "
            "put the data into an object store and send its key, or raise max_payload on the server"
        )
        self.size = size
        self.limit = limit


class UnknownJob(InvalidInput):
    """No job of that name is registered."""


class NoWorker(InvalidInput):
    """The job's group has no live worker, and its fallback is `fail`."""


class BrokerError(HoldfastError):
    """Something between us and NATS went wrong."""


class TryAgain(BrokerError):
    """The same step may work in a moment; `holdfast.retrying` repeats it."""


class NotConnected(TryAgain):
    """There is no connection to NATS right now; nothing was sent."""


class Unavailable(TryAgain):
    """No leader answers for the stream right now, as during an election; nothing was applied."""


class OutcomeUnknown(TryAgain):
    """No answer came: the write may or may not have been applied."""


class Replaced(BrokerError):
    """Somebody else has taken over: stop, and write nothing more."""


class ClaimLost(Replaced):
    """Another attempt holds the run now: stop, and leave its effects alone."""


class NodeLost(Replaced):
    """This node was declared lost: it must end, since its runs may be running elsewhere."""


class StaleTerm(Replaced):
    """Another process leads with a higher epoch, and this write was refused."""


class LeaseLost(Replaced):
    """Somebody else holds the lease now, or nobody does."""


class Conflict(BrokerError):
    """A compare-and-swap was refused because somebody else wrote first."""


class NotFound(BrokerError):
    """A stream, consumer, message or key does not exist."""


class ServerTooOld(BrokerError):
    """The server would silently ignore what Holdfast relies on."""


class PermissionDenied(BrokerError):
    """The credentials do not allow this subject."""


class Unreadable(HoldfastError):
    """A record or message cannot be read: it is damaged, or a newer version wrote it.

    Asking again does not help, so this is no `BrokerError`. `holdfast doctor` lists such records
    and how to remove them.
    """


SendOutcome = Literal["stored", "not sent", "unknown"]


class PartlyStored(OutcomeUnknown):
    """Not all of many runs could be stored; `outcomes` says what happened to each.

    `requests` are all of them, in the order in which they were given; `unstored` are those that are
    not known to be stored.
    """

    def __init__(
        self, requests: tuple[Any, ...], outcomes: tuple[SendOutcome, ...], why: Exception
    ) -> None:
        counts = {word: outcomes.count(word) for word in ("stored", "unknown", "not sent")}
        super().__init__(
            f"of {len(requests):,} runs {counts['stored']:,} are stored, {counts['unknown']:,} may "
            f"be and {counts['not sent']:,} were not sent ({why}): send error.unstored again"
        )
        self.requests = requests
        self.outcomes = outcomes

    @property
    def unstored(self) -> tuple[Any, ...]:
        """The requests to be sent again."""
        pairs = zip(self.requests, self.outcomes, strict=True)
        return tuple(request for request, outcome in pairs if outcome != "stored")


class SettingsError(HoldfastError):
    """Settings that cannot be published, read or rendered; `reason` is one word for counting."""

    def __init__(self, message: str, *, reason: str = "invalid") -> None:
        super().__init__(message)
        self.reason = reason


class FlowError(HoldfastError):
    """An operation of a flow failed."""


class StepFailed(FlowError):
    """A step has used up its attempts; every later replay raises it too, with the same text."""

    def __init__(self, step: str, error: str, attempts: int = 1) -> None:
        super().__init__(f"step {step} failed after {attempts} attempt(s): {error}")
        self.step = step
        self.error = error
        """What the step raised, as one line: `ValueError: no such card`."""
        self.attempts = attempts


class FlowTooLong(FlowError):
    """A flow has too many operations, or too many children at a time: use child flows."""


class FlowStopped(FlowError):
    """A flow cannot continue until something is repaired; it is kept and can be resumed."""


class FlowMismatch(FlowStopped):
    """A flow's code no longer fits its journal; the flow is kept and can be resumed."""

    def __init__(self, message: str, *, operation: int = 0) -> None:
        super().__init__(message)
        self.operation = operation
        """Which operation, counted from 1."""


class RunError(HoldfastError):
    """How a run ended, or why that is unknown."""

    def __init__(self, message: str, *, run: str = "") -> None:
        super().__init__(message)
        self.run = run


class RunFailed(RunError):
    """The run was given up; it is a dead letter now."""


class RunCancelled(RunError):
    """The run was cancelled or discarded."""


class DuplicateRun(RunError):
    """The key has a run already, and `on_duplicate="raise"` was given; nothing was sent."""


class StillHeld(RunError):
    """Somebody else holds the key of `app.once`, and has not finished in time."""


class RunLost(RunError):
    """The run's process died and its restart strategy is `never`."""


class RunNotFound(RunError):
    """No record of that run exists, or it has expired."""


class ResultTimeout(RunError, TimeoutError):
    """The result did not arrive in time; the run itself continues."""


class NoRecord(RunError):
    """The job's delivery mode keeps no record, so this cannot be answered."""


class HandlerError(HoldfastError):
    """An exception of a handler with `execution="process"`.

    The exception itself stays in that process: this one has the name of its type, its message, and
    its traceback as a text.
    """

    def __init__(self, message: str, story: str = "") -> None:
        super().__init__(message)
        self.story = story


class Signal(Exception):
    """Raised by a handler to steer its own run."""


class Retry(Signal):
    """Try this run again: counts as a failed attempt, with the delay given here or by the
    policy."""

    def __init__(self, reason: str = "", *, delay: float | str | timedelta | None = None) -> None:
        super().__init__(reason or "the handler asked for a retry")
        self.delay = delay


class Snooze(Signal):
    """Run this again later; does not count as an attempt."""

    def __init__(self, delay: float | str | timedelta, reason: str = "") -> None:
        super().__init__(reason or "the handler snoozed the run")
        self.delay = delay


class Discard(Signal):
    """Give this run up for good: no retry and no dead letter."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler discarded the run")
