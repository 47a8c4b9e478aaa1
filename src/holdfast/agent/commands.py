"""Commands as they arrive: verified, fenced, acknowledged, then executed.

    message ──► signature ──► epoch ──► place? ──► journal (on the disk) ──► execution, ack
                   │ refused     │ stale: refused     │ busy: a return says so
                   │             │ known: ack again, and its return again if it has ended
                   └─ counted    └─ counted

A command that ends at once gets no ack: its return says the same.

This agent executes a run at most once. The epoch shows which dispatcher owns the run: one below the
highest seen is refused. The same or a higher epoch for a known run executes nothing: it comes from
a dispatcher that missed our answer, or from the run's next owner, and gets the ack and the return
again.

A refusal is never answered to the sender. The agent publishes the reason, authenticated, on the
run's ack subject, which only dispatchers may read: they report it to the requester. The reason is
only informational, since a forged command would be answered as well.

A cancel is accepted from any dispatcher, even before the command: then the run is not executed.

Slots of the agent's own schedules are handled the same way from the journal on (`fire`, `skip`).
"""

from __future__ import annotations

import logging
import re
from typing import Any, Final

import msgspec

from holdfast.agent.execution import CommandExecutor
from holdfast.agent.functions import Call
from holdfast.agent.journal import Journal
from holdfast.agent.outbox import ReturnOutbox
from holdfast.broker import Broker
from holdfast.broker.wire import Headers, parse_headers
from holdfast.errors import BrokerError, HoldfastError, InvalidInput
from holdfast.identity.commands import (
    JOURNAL,
    MALFORMED,
    TOLD,
    CommandRefused,
    CommandVerifier,
    Refusal,
)
from holdfast.identity.reports import ReportSigner
from holdfast.model import fleet
from holdfast.model.fleet import Ack, Order, Outcome, Return
from holdfast.names import H_EPOCH, H_EXPIRES, H_RUN, check_run
from holdfast.rates import Sparse
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.agent")

EXEC: Final = "exec"
CANCEL: Final = "cancel"
LONGEST_ERROR: Final = 8_000
"""Characters: a traceback fits, and the return stays small enough to store."""
RETURNS_KEPT: Final = 100
"""Returns in memory for dispatchers that ask again; older ones are in the journal."""
_NUMBER: Final = re.compile(r"[0-9]{1,19}")


class Commands:
    """Takes the commands of one agent."""

    def __init__(
        self,
        broker: Broker,
        agent: str,
        journal: Journal,
        executor: CommandExecutor,
        outbox: ReturnOutbox,
        telemetry: Telemetry,
        *,
        verifier: CommandVerifier | None,
        signer: ReportSigner | None,
    ) -> None:
        self._broker = broker
        self._agent = agent
        self._journal = journal
        self._executor = executor
        self._outbox = outbox
        self._telemetry = telemetry
        self._verifier = verifier
        self._signer = signer
        self._refusals = Sparse(log, broker.clock)
        self._returns: dict[str, bytes] = {}
        """The newest returns of this process, for dispatchers that ask again."""
        self._counters: dict[str, Any] = {}
        self.closed = False

    # ---- arrival

    def on_message(self, subject: bytes, _: bytes, body: bytes, headers: bytes | None) -> None:
        """Called by the parser, one message at a time."""
        if self.closed:
            return  # the sender repeats it, or finds no responders
        kind = subject.rpartition(b".")[2].decode()
        handle = {EXEC: self._on_exec, CANCEL: self._on_cancel}.get(kind)
        if handle is None:
            return
        found: Headers = {}
        try:
            found = parse_headers(headers)
            run, epoch = self._checked(kind, found, body)
            handle(run, epoch, body)
        except CommandRefused as refused:
            self._count(f"refused: {refused.reason}")
            self._refusals.warn(refused.reason, "a command was refused: %s", refused)
            if refused.reason in TOLD:
                self._tell(kind, found, refused.reason)
        except HoldfastError as error:
            self._count("refused: malformed")
            self._refusals.warn("malformed", "a command was refused: %s", error)
            self._tell(kind, found, MALFORMED)
        except OSError as error:
            self._count("refused: journal")
            log.error("a command was refused, the journal cannot be written: %s", error)
            self._tell(kind, found, JOURNAL)

    def _checked(self, kind: str, headers: Headers, body: bytes) -> tuple[str, int]:
        """The run and epoch of a command, if it may be obeyed."""
        if self._verifier is not None:
            now = self._broker.server_now()
            command = self._verifier.verify(headers, body, kind=kind, now=now)
            return check_run(command.run), command.epoch
        run, epoch = headers.get(H_RUN, ""), headers.get(H_EPOCH, "")
        expires = headers.get(H_EXPIRES, "")
        if not _NUMBER.fullmatch(epoch) or not _NUMBER.fullmatch(expires):
            raise InvalidInput("it has no epoch or no expiry")
        if int(expires) <= self._broker.server_now() * 1000:
            raise CommandRefused(Refusal.EXPIRED)
        return check_run(run), int(epoch)

    # ---- executing

    def _on_exec(self, run: str, epoch: int, body: bytes) -> None:
        seen = self._journal.get(run)
        if seen is not None and epoch < seen.epoch:
            self._count("stale")
            log.warning("run %s: epoch %d is stale, %d was seen: refused", run, epoch, seen.epoch)
            self._answer(run, Ack("stale", epoch, seen.epoch))
            return
        if seen is not None:
            self._again(run, epoch)
            return
        order = fleet.decode_order(body)
        if self._executor.busy(order):
            self._count("busy")
            self._refuse(run, epoch, "the agent is busy: its queue is full")
            return
        try:
            self._journal.enter(run, epoch)
        except OSError as error:
            self._refuse_unwritten(run, epoch, error)
            return
        self._count("accepted")
        if not self._executor.submit(Call(run, self._agent, epoch, order.deadline), order):
            self._answer(run, Ack("accepted", epoch, epoch))

    def _again(self, run: str, epoch: int) -> None:
        """A known run: execute nothing, repeat the ack and the return."""
        self._count("known")
        seen = self._journal.get(run)
        assert seen is not None
        if epoch > seen.epoch:
            self._journal.raise_epoch(run, epoch)
        self._answer(run, Ack("known", epoch, max(epoch, seen.epoch)))
        if body := self._returns.get(run) or seen.body:
            self._outbox.send(run, body)

    def _refuse(self, run: str, epoch: int, why: str) -> None:
        self._journal.enter(run, epoch)
        self.finish(self._unexecuted(run, "busy", why, epoch))

    def _refuse_unwritten(self, run: str, epoch: int, error: OSError) -> None:
        """Refuse what cannot be recorded: it might be executed twice."""
        self._count("refused: journal")
        why = f"the agent cannot write its journal: {error.strerror}"
        log.error("run %s is not executed: %s", run, why)
        self._outbox.send(run, fleet.encode(self._unexecuted(run, "refused", why, epoch)))

    def _unexecuted(self, run: str, outcome: Outcome, why: str, epoch: int = 0) -> Return:
        now = self._broker.server_now()
        return Return(run, self._agent, outcome, None, why, 0.0, now, epoch)

    # ---- the agent's own schedules

    def fire(self, run: str, order: Order) -> None:
        """Execute a slot of a schedule, unless it is known. The queue's limit does not apply:
        schedules bound themselves."""
        if self._enter_slot(run):
            self._count("scheduled")
            self._executor.submit(Call(run, self._agent, 0, order.deadline), order)

    def skip(self, run: str, why: str) -> None:
        """Report a slot that is not executed, unless it is known."""
        if self._enter_slot(run):
            log.warning("slot %s is not executed: %s", run, why)
            self.finish(self._unexecuted(run, "skipped", why))

    def runs(self, run: str) -> bool:
        """Whether a slot waits or runs."""
        return self._executor.has(run)

    def _enter_slot(self, run: str) -> bool:
        """Record a slot; False if it is known, or cannot be recorded and so must not be
        executed."""
        if self.closed or self._journal.get(run) is not None:
            return False
        try:
            self._journal.enter(run, 0)
        except OSError as error:
            self._refuse_unwritten(run, 0, error)
            return False
        return True

    # ---- cancelling

    def _on_cancel(self, run: str, epoch: int, body: bytes) -> None:
        self._count("cancel")
        who = body[:200].decode("utf-8", "replace") or "somebody"
        if self._executor.cancel(run, f"cancelled by {who}"):
            log.info("run %s cancelled by %s", run, who)
        elif self._journal.get(run) is None:
            self._journal.enter(run, epoch, "cancelled")

    # ---- answering

    def finish(self, found: Return) -> None:
        """A command has ended: record its return, then send it."""
        if len(found.error) > LONGEST_ERROR:
            error = found.error[:LONGEST_ERROR] + " …"
            found = msgspec.structs.replace(found, error=error)
        body = fleet.encode(found)
        try:
            self._journal.done(found.run, body)
        except OSError as error:
            log.error("the return of run %s would not survive a restart: %s", found.run, error)
        self._returns[found.run] = body
        while len(self._returns) > RETURNS_KEPT:
            del self._returns[next(iter(self._returns))]
        self._count(f"returned: {found.outcome}")
        self._outbox.send(found.run, body)

    def resume(self) -> None:
        """After a restart: send unsent returns, and report interrupted commands."""
        self.send_again()
        for entry in self._journal.waiting():
            if entry.body:
                continue
            why = "the agent was restarted while it ran: it is not repeated"
            if entry.state == "done":
                why = "it ended, but its return was too large to survive a restart of the agent"
            self.finish(self._unexecuted(entry.run, "interrupted", why, entry.epoch))

    def send_again(self) -> None:
        """Send the returns that the server does not have, such as those that did not fit the outbox
        while it was away."""
        for entry in self._journal.waiting():
            if entry.body:
                self._outbox.send(entry.run, entry.body)

    def _answer(self, run: str, ack: Ack) -> None:
        body = fleet.encode(ack)
        headers = self._signer.sign(kind="ack", run=run, payload=body) if self._signer else None
        try:
            self._broker.tell(self._broker.names.ack(run, self._agent), body, headers)
        except BrokerError as error:
            log.debug("not acknowledged: %s", error)

    def _tell(self, kind: str, headers: Headers, reason: str) -> None:
        """Tell dispatchers why a command was refused; its headers are untrusted."""
        run, epoch = headers.get(H_RUN, ""), headers.get(H_EPOCH, "")
        try:
            check_run(run)
        except InvalidInput:
            return
        if kind == EXEC and "/" not in run and _NUMBER.fullmatch(epoch):
            self._answer(run, Ack("refused", int(epoch), reason=reason))

    def _count(self, verdict: str) -> None:
        counter = self._counters.get(verdict)
        if counter is None:  # looking up a label costs more than counting
            counter = self._counters[verdict] = self._telemetry.commands.labels(verdict)
        counter.inc()
