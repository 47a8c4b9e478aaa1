"""Gives back what a lost node held.

For each run in the node's index the claim is read again from the leader: only if the lost node
still holds it, its message is given back through its reply subject, and redelivery starts within
milliseconds. The worker that receives it applies the same rules as for any redelivery. Two things a
redelivery cannot do are done here: a run with `after_grace` is given back with a delay, and a run
whose message is gone already (`at_most_once`) is recorded as lost and dead-lettered. Messages held
without a claim are given back unchecked, while their reply subjects are certain to be current.

Then all records are scanned once for claims missing from the index, and for runs that ended just
before the death and are missing in the history (`unfiled`). Anything missed by both is redelivered
after `ack_wait`, if it has a message. `orphans` does the same for nodes that died while no
coordinator ran, or whose recovery failed half-way. `status.stranded` finds runs whose message
should exist and does not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

from holdfast.broker import Broker, Bucket, Entry
from holdfast.broker.pull import EXPIRES_SECONDS, nak_body
from holdfast.config import RecordConfig
from holdfast.coordinator.unfiled import Unfiled
from holdfast.errors import BrokerError, Conflict, HoldfastError
from holdfast.model import run as runs
from holdfast.model.dead import dead_headers
from holdfast.model.node import HeldRun, NodeRecord
from holdfast.model.run import RunRecord
from holdfast.names import H_OBJECT, inbox_probe, is_pull_inbox
from holdfast.ownership.history import History
from holdfast.telemetry import Telemetry

log = logging.getLogger("holdfast.coordinator")

KEPT_SECONDS: Final = 86_400.0
"""How long the record of a lost run is kept: the same as for a run with a key."""
LISTEN_SECONDS: Final = EXPIRES_SECONDS + 5.0
"""As long as a dead worker's last pull request can live, plus a margin."""


class Recovery:
    """Recovers the runs of lost nodes."""

    def __init__(
        self, broker: Broker, telemetry: Telemetry, records: RecordConfig | None = None
    ) -> None:
        self._broker = broker
        self._runs = Bucket(broker, broker.names.runs)
        self._history = History(broker)
        guard = (records or RecordConfig()).keyless_ttl_seconds
        self.unfiled = Unfiled(broker, self._history, guard)
        self._telemetry = telemetry
        self.unfinished = False
        """A run could not be recorded as lost: `orphans` has to look again."""

    async def recover(self, node: NodeRecord, index: list[HeldRun], grace_left: float) -> int:
        """Give back what a lost node held; returns the number of runs."""
        count = 0
        for held in index:
            entry = await self._runs.get(held.run) if held.revision else None
            if entry is not None:
                count += await self._judge(node, entry, grace_left)
        return count

    async def give_back_unclaimed(self, index: list[HeldRun]) -> int:
        """Give back what was held without a claim: runs without a record, and prefetched messages.

        Only within `ack_wait`, while the reply subjects are those of the last delivery: later a nak
        would take the message from its new holder.
        """
        unclaimed = [held.reply for held in index if not held.revision]
        for reply in unclaimed:
            await self._nak(reply)
        return len(unclaimed)

    async def _nak(self, reply: str, delay: float = 0.0) -> None:
        """Nak a message. The reply subject comes from a record, which may name any subject."""
        if self._broker.names.takes_acks(reply):
            await self._broker.publish(reply, nak_body(delay))

    async def sweep(self, node: NodeRecord, known: set[str], grace_left: float) -> int:
        """Scan all records for claims of the node that its index did not have, and for ends."""
        count, ended, mark = 0, dict[str, RunRecord](), node.id.encode()
        async for entry, record in self._runs.records(runs.decode, wanted=lambda b: mark in b):
            if record.node == node.id and self.unfiled.may_be(entry, record):
                ended[entry.key] = record
            if entry.key not in known:
                where = node, entry.key, record, entry.revision
                count += await self._give_back(*where, grace_left)
        await self.unfiled.add(ended)
        return count

    async def _judge(self, node: NodeRecord, entry: Entry, grace_left: float) -> int:
        record = self._runs.read(runs.decode, entry)
        if record is None:
            return 0
        return await self._give_back(node, entry.key, record, entry.revision, grace_left)

    async def orphans(self, alive: Callable[[str], Awaitable[bool]]) -> int:
        """Do what recovery does for nodes that died unobserved; returns how many runs were lost.

        Runs that have a message are redelivered.
        """
        self.unfinished = False
        count, ended, known = 0, dict[str, RunRecord](), dict[str, bool]()
        async for entry, record in self._runs.records(runs.decode):
            lost = record.state == "running" and (record.once or record.body)
            if not lost and not self.unfiled.may_be(entry, record):
                continue
            if record.node not in known:
                known[record.node] = await alive(record.node)
            if known[record.node]:
                continue
            if lost:
                node = NodeRecord(record.node, "worker")
                count += await self._give_back(node, entry.key, record, entry.revision, 0.0)
            else:
                ended[entry.key] = record
        await self.unfiled.add(ended)
        return count

    async def _give_back(
        self, node: NodeRecord, run: str, record: RunRecord, revision: int, grace_left: float
    ) -> int:
        if record.state != "running" or record.node != node.id:
            return 0
        self._telemetry.recovered.inc()
        if record.once or record.body:
            await self._end_lost(node, run, record, revision)
        elif record.reply:
            delay = grace_left if record.restart == "after_grace" else 0.0
            await self._nak(record.reply, delay)
        return 1

    async def _end_lost(self, node: NodeRecord, run: str, record: RunRecord, revision: int) -> None:
        """End a run whose message is gone: nobody else would ever do so.

        The leader is asked once more, because a dead letter cannot be taken back.
        """
        entry = await self._runs.get(run)
        if entry is None or entry.revision != revision:
            return
        now = self._broker.server_now()
        error = f"its worker {node.id} died and its restart strategy is 'never'"
        token = f"lost.{node.id}"
        ended = runs.ended(record, "lost", error=error, token=token, now=now)
        headers = dead_headers(
            run=run,
            message=record.message,
            subject=self._broker.names.job(record.group, record.job),
            reason="lost",
            error=error,
            now=now,
            failures=ended.failures,
            crashes=ended.crashes,
            attempts=ended.attempts,
        )
        if record.body_object:
            headers[H_OBJECT] = record.body_object
        subject = self._broker.names.dead_letter(record.group, record.job)
        try:
            await self._broker.store(subject, record.body, headers)
            self._telemetry.dead.labels(record.group, record.job, "lost").inc()
            await self._runs.put(run, runs.encode(ended), expected=revision, ttl=KEPT_SECONDS)
            await self._history.try_append(run, ended, record.body or None)
        except Conflict:
            log.info("run %s was settled at the last moment", run)
        except HoldfastError as failure:
            self.unfinished |= isinstance(failure, BrokerError)  # retrying would not help
            log.warning("run %s could not be recorded as lost: %s", run, failure)


class DeadInboxes:
    """Listens to the inboxes of lost workers.

    A pull request outlives its worker while anybody seems to listen to its inbox: a subscriber to
    every subject, or a child process that inherited the dead worker's socket. Until the request
    expires, the server delivers messages to it, even those just given back, and each would wait for
    `ack_wait`. So the coordinator that declared the worker lost listens to its inbox for as long as
    its requests can live, and gives back at once what arrives there.

    It listens only where somebody else does: its own subscription would keep requests alive that
    the server is about to drop, and if the streams are in another account, nobody would get the
    messages.

    Not covered: messages delivered between the death and the verdict. They return after `ack_wait`.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._open: dict[str, asyncio.Task[None]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    async def drain(self, inbox: str) -> None:
        """Give back what arrives in an inbox, for as long as its pull requests can live."""
        if inbox in self._open or not is_pull_inbox(inbox) or self._denied:
            return
        if not await self._is_heard(inbox):
            return
        subscription = await self._broker.listen(f"{inbox}.>", self._receive)
        self._open[inbox] = asyncio.create_task(
            self._forget_later(inbox, subscription), name="holdfast-dead-inbox"
        )

    @property
    def _denied(self) -> bool:
        """Whether a pull inbox was denied: the server would deny, and log, every other."""
        return any(".pull." in subject for subject in self._broker.denied)

    async def _is_heard(self, inbox: str) -> bool:
        """Whether anybody listens: "no responders" arrives before the answer to a later flush."""
        answer = await self._broker.send(inbox_probe(inbox), b"")
        await self._broker.flush()
        if not answer.done():
            answer.cancel()
            return True
        return answer.exception() is None and answer.result().status != "503"

    async def _forget_later(self, inbox: str, subscription: Any) -> None:
        await self._broker.clock.sleep(LISTEN_SECONDS)
        self._open.pop(inbox, None)
        await self._broker.unsubscribe(subscription)

    def _receive(self, subject: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        where = reply.decode("ascii", "replace")
        if self._broker.names.takes_acks(where):
            task = asyncio.create_task(self._give_back(where), name="holdfast-nak")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _give_back(self, reply: str) -> None:
        try:
            await self._broker.publish(reply, nak_body())
        except BrokerError as error:
            log.debug("could not give back a message of a dead worker: %s", error)

    async def close(self) -> None:
        """Stop listening; closing the connection ends the subscriptions."""
        tasks = [*self._open.values(), *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._open.clear()
