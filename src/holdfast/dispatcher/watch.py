"""A watch: one fan-out run while this dispatcher owns it, from the claim to the last write.

    claimed ──► running (CAS, with the epoch) ──► commands ──► acks, returns ──► ended (CAS)

Nothing is sent before `running` is written. Returns are counted once the server has stored them, so
every return in the final count exists. Each write expects the owner's own last revision: a replaced
owner finds out by its next write, by a change of the record, or from an agent that has seen a
higher epoch, and then stops without writing. An owner that is not trusted sends nothing.

A watch that adopts a run reads the stored returns and sends to the remaining agents, with its own
epoch. Agents that know the run do not execute it again; they repeat their ack and their return.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from holdfast.broker import Broker, Bucket
from holdfast.broker.kv import direct_batch
from holdfast.broker.wire import Headers, parse_headers
from holdfast.client.commanding import Sender
from holdfast.config import DispatcherConfig
from holdfast.dispatcher.records import FleetRecords
from holdfast.errors import BrokerError, NotConnected, Replaced, Unreadable
from holdfast.identity.commands import UNVERIFIED, CommandRefused, known_reason
from holdfast.model import fleet
from holdfast.model.fleet import FanOut, FleetRun
from holdfast.names import fleet_key, kv_subject, last_token, return_key
from holdfast.rates import Sparse
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.dispatcher")

SENT_AT_ONCE: Final = 200
"""Commands signed without a pause, which takes 15 ms: ten thousand would block everything else for
a second."""
LATE_SECONDS: Final = 1.0
"""How long to wait for returns after the deadline, since agents stop at the deadline by
themselves."""
CANCEL_SECONDS: Final = 1.0
"""How long to wait for the returns of cancelled agents, which answer within milliseconds."""
RETURNING_SECONDS: Final = 35.0
"""How long to wait after a reconnect for agents that lost the same servers: they retry every 30 s
at the latest."""
AGAIN_SECONDS: Final = 0.5
"""How often to retry while it is unclear whether we own the run."""


class Lost(Replaced):
    """Another dispatcher owns the run."""


class Watch:
    """One run owned by this dispatcher."""

    def __init__(
        self,
        broker: Broker,
        records: FleetRecords,
        sender: Sender,
        config: DispatcherConfig,
        telemetry: Telemetry,
        record: FleetRun,
        revision: int,
        *,
        trusted: Callable[[], bool],
        fresh: bool,
    ) -> None:
        """`fresh`: just claimed, so nothing can have been returned yet."""
        self.record = record
        self.epoch = revision
        self._revision = revision
        self._broker = broker
        self._records = records
        self._sender = sender
        self._telemetry = telemetry
        self._trusted = trusted
        self._fresh = fresh
        self._kept_seconds = config.kept_seconds
        self._returns = Bucket(broker, broker.names.returns)
        request = record.request
        self._fan = FanOut(
            record.targets,
            batch=request.batch,
            max_failures=request.max_failures,
            ack_seconds=config.ack_seconds,
            grace_seconds=config.grace_seconds,
        )
        self._payload = fleet.encode(request.order(record.deadline))
        self._awake = asyncio.Event()
        self._detach = False
        self._doubt = False
        """We may not be the owner: check before anything else."""
        self._away = False
        """We were disconnected: acks may have been missed."""
        self._acked = False
        self._cut_short = 0
        """Returns that only report the cancellation."""
        self._reread = False
        """Returns may be stored without our having been notified."""
        self._cancelled_at: float | None = None
        self._forged: set[str] = set()
        self._drops = Sparse(log, broker.clock)
        self._purging: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Any] = []

    @property
    def run_id(self) -> str:
        return self.record.run

    # ---- life

    async def run(self) -> None:
        """Own the run until it has ended or another dispatcher owns it."""
        try:
            await self._listen()
            if self._fresh:
                request = self.record.request
                detail = f"{request.function} for {len(self.record.targets)} by {request.user}"
                await self._records.tell(self.run_id, "dispatched", detail)
            else:
                await self._read_back()
            if self.record.adoptions:
                self._start_over()  # the last owner may have died with the servers
            await self._write(status="running", epoch=self.epoch)
            await self._until_over()
            if self._detach and not self._fan.over:
                await self._hand_over()
            else:
                await self._finish()
        except Lost as lost:
            self._telemetry.fenced.labels("fleet").inc()
            log.warning("run %s is no longer ours: %s", self.run_id, lost)
        finally:
            self._sender.forget(self.run_id)
            for subscription in self._subscriptions:
                await self._broker.unsubscribe(subscription)

    async def _listen(self) -> None:
        names = self._broker.names
        self._sender.listen(self.run_id, self._on_nobody)
        for subject, listener in (
            (names.ack(self.run_id, "*"), self._on_ack),
            (names.changed(names.returns, return_key(self.run_id, "*")), self._on_return),
            (names.changed(names.fleet, fleet_key(self.run_id)), self._on_record),
        ):
            self._subscriptions.append(await self._broker.listen(subject, listener))

    def detach(self) -> None:
        """This dispatcher leaves: hand the run over unless it is about to end."""
        self._detach = True
        self._awake.set()

    def look_again(self) -> None:
        """We were disconnected: messages, or the run itself, may have been lost."""
        self._doubt = self._away = True
        self._awake.set()

    # ---- the loop

    async def _until_over(self) -> None:
        while not self._fan.over and not self._detach:
            self._awake.clear()
            if self._doubt or self._reread:
                await self._resolve_doubt()
            if self._time_left() <= 0:
                await self._read_back()
                return
            await self._send_due()
            await self._tell_acked()
            if not self._fan.over:
                await self._sleep()

    async def _tell_acked(self) -> None:
        """Note once in the ledger that every agent that got the command so far has acknowledged it
        or was given up."""
        if self._fan.heard_all and not self._acked:
            self._acked = True
            silent = len(self._fan.unreachable)
            sent = len(self._fan.targets) - len(self._fan.unsent)
            await self._records.tell(self.run_id, "acked", f"{sent - silent} of {sent} agents")

    async def _send_due(self) -> None:
        if self._doubt or not self._trusted():
            return  # if others consider us lost, another dispatcher may own the run
        now = self._broker.clock.monotonic()
        first, again = self._fan.due(now)
        forged = [a for a in self._forged if a not in self._fan.returned]
        self._forged.clear()
        try:
            await self._send([*first, *again, *forged])
        except NotConnected:
            self.look_again()
            return
        if first and self._fan.all_sent:
            took = self._broker.clock.monotonic() - now
            detail = f"{len(first)} commands in {took:.2f} s"
            await self._records.tell(self.run_id, "sent", detail)

    async def _send(self, agents: list[str]) -> None:
        """Send commands, with pauses for heartbeats, acks and returns."""
        for start in range(0, len(agents), SENT_AT_ONCE):
            if not self._trusted():
                return  # an agent that gets nothing stays silent, and the command is repeated
            some = agents[start : start + SENT_AT_ONCE]
            await self._sender.send("exec", self.run_id, self.epoch, self._payload, some)
            await asyncio.sleep(0)

    async def _sleep(self) -> None:
        due = self._fan.next_at()
        now = self._broker.clock.monotonic()
        limit = min(self._time_left(), due - now if due is not None else 3600.0)
        if self._doubt or not self._trusted():
            limit = min(limit, AGAIN_SECONDS)
        try:
            async with asyncio.timeout(max(0.0, limit)):
                await self._awake.wait()
        except TimeoutError:
            return

    def _time_left(self) -> float:
        if self._cancelled_at is not None:
            return self._cancelled_at + CANCEL_SECONDS - self._broker.clock.monotonic()
        return self.record.deadline + LATE_SECONDS - self._broker.server_now()

    async def _resolve_doubt(self) -> None:
        self._reread = False
        try:
            if self._doubt:
                await self._look()
            await self._read_back()
        except BrokerError as error:
            log.debug("run %s not checked: %s", self.run_id, error)
            self._doubt = True
            return
        self._doubt = False
        if self._away:
            self._away = False
            self._start_over()

    def _start_over(self) -> None:
        now = self._broker.clock.monotonic()
        self._fan.start_over(now, now + RETURNING_SECONDS)

    async def _look(self) -> None:
        """Check that the run is still ours; raises `Lost` if not.

        An unreadable record names no other owner: our next write replaces it. A record deleted with
        its bucket is written again.
        """
        try:
            found = await self._records.read(self.run_id)
        except Unreadable:
            self._revision = await self._records.revision(self.run_id)
            return
        self._check_owner(found)
        if found is None:
            await self._write()

    def _check_owner(self, found: tuple[FleetRun, int] | None) -> None:
        if found is None and self._trusted():
            self._revision = 0  # nobody can have ended it, or taken it from a trusted node
            return
        if found is None:
            raise Lost("its record is gone")
        record, revision = found
        if record.owner != self.record.owner or record.epoch not in (0, self.epoch):
            raise Lost(f"{record.owner or 'nobody'} owns it, with a later epoch")
        if record.over:
            raise Lost("it has ended")
        self._revision = max(self._revision, revision)
        self._hear_cancel(record)

    # ---- messages

    def _on_nobody(self, agent: str) -> None:
        self._fan.heard_nobody(agent)
        self._awake.set()

    def _on_ack(self, subject: bytes, _: bytes, body: bytes, headers: bytes | None) -> None:
        agent = last_token(subject.decode())
        try:
            self._verify("ack", agent, body, parse_headers(headers))
            ack = fleet.decode_ack(body)
        except (CommandRefused, Unreadable) as error:
            self._drop("ack", agent, error)
            if isinstance(error, CommandRefused) and agent not in self._fan.refusals:
                self._fan.heard_refusal(agent, UNVERIFIED)
            return
        if ack.status == "refused":
            if ack.epoch == self.epoch:
                self._fan.heard_refusal(agent, known_reason(ack.reason))
            return
        if self._fan.begun and not self._acked:
            self._awake.set()
        if ack.status == "stale" or ack.newest > self.epoch:
            self._doubt = True
            self._awake.set()
        else:
            self._fan.heard_ack(agent)
        if ack.status == "known":
            self._reread = True  # its return may be stored already, without another notification
            self._awake.set()

    def _on_return(self, subject: bytes, _: bytes, body: bytes, headers: bytes | None) -> None:
        self._take(last_token(subject.decode()), body, parse_headers(headers))

    def _take(self, agent: str, body: bytes, headers: Headers) -> None:
        found = fleet.return_of(self.run_id, agent, body)
        try:
            self._verify("return", agent, body, headers)
            if fleet.forged(found) and self._sender.verifier is None:
                raise Unreadable(found.error)
        except (CommandRefused, Unreadable) as error:
            self._drop("return", agent, error)
            self._replace_forged(agent)
            return
        if self._fan.heard_return(agent, found.ok):
            self._cut_short += found.outcome == "cancelled"
            self._awake.set()

    def _verify(self, kind: str, agent: str, body: bytes, headers: Headers) -> None:
        if self._sender.verifier is not None:
            self._sender.verifier.verify(headers, body, kind=kind, agent=agent, run=self.run_id)

    def _drop(self, what: str, agent: str, error: Exception) -> None:
        self._telemetry.fleet_refused.labels(what).inc()
        # Anybody may forge an ack for any run: limit the logging.
        self._drops.warn(
            (what, agent), "%s of agent %s to run %s dropped: %s", what, agent, self.run_id, error
        )

    def _replace_forged(self, agent: str) -> None:
        """Delete a forged return, so that the agent can store its own, and ask it to resend."""

        async def purge() -> None:
            try:
                await self._returns.delete(return_key(self.run_id, agent))
            except BrokerError as error:
                log.warning("a forged return of %s stays: %s", agent, error)
                return
            self._forged.add(agent)
            self._awake.set()

        if agent in self._fan.targets and agent not in self._fan.returned:
            purging = asyncio.create_task(purge(), name="holdfast-forged")
            self._purging.add(purging)
            purging.add_done_callback(self._purging.discard)

    def _on_record(self, _: bytes, __: bytes, body: bytes, headers: bytes | None) -> None:
        try:
            record = fleet.decode(body)
        except Unreadable:
            return
        cancelled = bool(record.cancelled_by) and self._cancelled_at is None
        if (record.owner != self.record.owner or cancelled) and not self._detach:
            self._doubt = True  # the notification can be forged: read the record
            self._awake.set()

    def _hear_cancel(self, record: FleetRun) -> None:
        if record.cancelled_by and self._cancelled_at is None:
            self._cancelled_at = self._broker.clock.monotonic()
            self.record = msgspec.structs.replace(self.record, cancelled_by=record.cancelled_by)
            self._fan.stop()
            self._awake.set()

    async def _read_back(self) -> None:
        """Count the returns that are already stored."""
        subject = kv_subject(self._returns.name, return_key(self.run_id, "*"))
        async for stored in direct_batch(self._broker, self._returns.stream, subject):
            self._take(last_token(stored.headers["Nats-Subject"]), stored.body, stored.headers)

    # ---- writes

    async def _write(self, ttl: float | None = None, **changes: Any) -> None:
        """Change the record; raises `Lost` if another dispatcher owns the run."""
        while True:
            record = msgspec.structs.replace(
                self.record,
                token=self._records.token(),
                updated=self._broker.server_now(),
                **changes,
            )
            try:
                won = await self._records.write(record, self._revision, ttl)
            except Unreadable:
                won = 0
            if won:
                self.record, self._revision = record, won
                return
            await self._look()

    async def _hand_over(self) -> None:
        owner = self.record.owner
        await self._write(owner="", epoch=0)
        log.info("run %s handed over by %s", self.run_id, owner)
        await self._records.tell(self.run_id, "handed over")
        await self._broker.publish(self._broker.names.handover, self.run_id.encode())

    async def _finish(self) -> None:
        fan = self._fan
        cancelled = bool(self.record.cancelled_by)
        unsent = fan.unsent if fan.begun or self._fresh else ()
        reason = ""
        if fan.stopped and not cancelled:
            reason = f"{fan.failures} failures, so {len(unsent)} agents did not get the command"
        status = fleet.final_status(
            len(fan.targets),
            len(fan.returned),
            fan.succeeded,
            cancelled=cancelled,
            cut_short=self._cut_short,
            given_up=bool(reason),
        )
        now = self._broker.server_now()
        await self._write(
            self._kept_seconds,
            status=status,
            reason=reason,
            returned=len(fan.returned),
            succeeded=fan.succeeded,
            unreachable=tuple(sorted(fan.unreachable)),
            unsent=unsent,
            refused=fan.refused,
            ended=now,
        )
        await self._records.forget(self.run_id)
        counts = f"{len(fan.returned)} of {len(fan.targets)} returned"
        if fan.returned:
            await self._records.tell(self.run_id, "returned", f"{counts}, {fan.succeeded} ok")
        await self._records.tell(self.run_id, "ended", f"{status}, {counts}")
        self._telemetry.fleet_runs.labels(status).inc()
        self._telemetry.fleet_seconds.observe(max(0.0, now - self.record.created))
        log.info(
            "run %s: %s, %d of %d returned, %d unreachable",
            self.run_id,
            status,
            len(fan.returned),
            len(fan.targets),
            len(fan.unreachable),
        )
