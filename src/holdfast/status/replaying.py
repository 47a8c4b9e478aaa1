"""Sends a run again that was given up; however many operators do so, it becomes one run.

First the record moves to `failed` with the next message number, by compare-and-swap; then the
message is published under the id `<run>.<number>.<mark>`. The rule is `model.replay`. A crash, or a
lost answer, between the two steps leaves a record with the mark of a replay; replaying the same
letter again publishes that message, and the server or the claim drops a repeat. Before it died, a
worker may have parked a message with the same number, which was dropped because the run was dead.
The mark makes the ids differ, so the replay is not mistaken for a repeat of that message.

A run without a record (it expired, or its job is `at_least_once` and never had one) gets one that
expires on its own: it only has to arbitrate between operators and survive a crash between the two
steps. A worker's claim replaces it and removes its TTL. A worker of an `at_least_once` job makes no
claim at a first delivery and never reads the record, which then expires. If the message waits in
the queue for longer than that, the claim finds no record, as for a new run.
"""

from __future__ import annotations

import secrets
from typing import Final

from holdfast.broker import Broker
from holdfast.broker.wire import header_bytes
from holdfast.client import Client
from holdfast.errors import Conflict, OutcomeUnknown, PayloadTooLarge
from holdfast.model import run as runs
from holdfast.model.message import RunMessage, next_message, queue_of
from holdfast.model.replay import MARK, Refused, again, decide_replay
from holdfast.model.run import RunRecord
from holdfast.names import GRANTED, H_MSG_ID, H_QUEUE, H_REASON, H_SUBJECT
from holdfast.status.finding import Finder
from holdfast.status.messages import Kept

TRIES: Final = 20
"""Lost compare-and-swaps before giving up: more than operators replay one letter at once."""
ROOMY_NUMBER: Final = 10**15
"""As long as the longest message number, to measure a message before its number is known."""
REPLAY_SECONDS: Final = 3_600.0
"""How long the record of a replayed run without a key waits for a worker, at least."""
GONE: Final = "gone"
"""The reason of a dead letter without a payload: its run's message no longer existed."""
PAYLOAD_GONE: Final = "its payload is gone: enqueue it again"


def is_gone(letter: Kept) -> bool:
    """Whether a dead letter has no payload to send."""
    return letter.headers.get(H_REASON) == GONE


def foreign_refusal(broker: Broker, letter: Kept) -> str:
    """Why a message of a taskiq queue cannot be sent again; empty when it can.

    Its subject comes from a header, so it must not be one of the server's or of the namespace.
    """
    subject = letter.headers.get(H_SUBJECT, "")
    reserved = subject.startswith(("$", f"{broker.names.namespace}."))
    return "it does not say which queue it came from" if not subject or reserved else ""


async def resend(broker: Broker, letter: Kept, body: bytes) -> str:
    """Send a message back to its taskiq queue; the server drops a repeat."""
    why = foreign_refusal(broker, letter)
    if not why:
        id = f"replay.{broker.names.namespace}.{letter.sequence}-{letter.stored_ns}"
        await broker.store(letter.headers[H_SUBJECT], body, letter.user_headers | {H_MSG_ID: id})
    return why


class Replayer:
    """Sends given-up runs again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._broker = client.broker
        self._finder = Finder(client)
        self._token = secrets.token_hex(6)

    async def refusal(self, letter: Kept) -> str:
        """Why replaying a letter would be refused now; empty when it would not."""
        if H_QUEUE in letter.headers:
            return foreign_refusal(self._broker, letter)
        if is_gone(letter):
            return PAYLOAD_GONE
        record, _ = await self._record(letter)
        decision = decide_replay(record, letter.stamp)
        return decision.why if isinstance(decision, Refused) else ""

    async def replay(self, letter: Kept, group: str, job: str, body: bytes) -> str:
        """Send it again; returns why not, or an empty text."""
        if H_QUEUE in letter.headers:
            return await resend(self._broker, letter, body)
        if is_gone(letter) and not body:
            return PAYLOAD_GONE
        self._check_size(self._message(letter, group, job, body, ROOMY_NUMBER, self._token))
        for _ in range(TRIES):
            record, revision = await self._record(letter)
            if record and (record.group, record.job) != (group, job):
                return f"its run id belongs to job {record.job} of group {record.group}"
            decision = decide_replay(record, letter.stamp)
            if isinstance(decision, Refused):
                return decision.why
            mark = MARK + self._token if decision.write or not record else record.token
            if decision.write and not await self._write(
                letter.run, record, revision, group, job, decision.message
            ):
                continue
            message = self._message(letter, group, job, body, decision.message, mark)
            await self._client.store_surely(*message)
            return ""
        return "others keep changing the run: try again"

    async def _record(self, letter: Kept) -> tuple[RunRecord | None, int]:
        """The run's record or, once that has expired, its final record from the history."""
        record, revision = await self._finder.record(letter.run)
        if record is None:
            found = await self._client.history.find(letter.run, since=letter.stored)
            record = found.record if found else None
        return record, revision

    async def _write(
        self,
        run: str,
        record: RunRecord | None,
        revision: int,
        group: str,
        job: str,
        message: int,
    ) -> bool:
        base = record or RunRecord("dead", group, job, keyed="/" in run)
        now = self._broker.server_now()
        body = runs.encode(again(base, message=message, token=self._token, now=now))
        ttl = self._ttl(base) if not revision or base.state == "failed" else None
        try:
            await self._client.runs.put(run, body, expected=revision, ttl=ttl)
        except (Conflict, OutcomeUnknown):  # read again: an applied write has the mark
            return False
        return True

    def _ttl(self, record: RunRecord) -> float:
        records = self._client.records
        if record.keyed:
            return records.keyed_ttl_seconds
        return max(REPLAY_SECONDS, records.keyless_ttl_seconds)

    def _message(
        self, letter: Kept, group: str, job: str, body: bytes, number: int, mark: str
    ) -> RunMessage:
        names, headers = self._broker.names, letter.headers
        queue = queue_of(names, letter.subject, headers).replace(GRANTED, "")
        return next_message(
            names,
            group,
            job,
            letter.run,
            body,
            headers,
            number=number,
            mark=f".{mark}",
            queue=queue,
        )

    def _check_size(self, message: RunMessage) -> None:
        """Check before any write: a message too large to publish must not be recorded as sent."""
        size = len(message.body) + header_bytes(message.headers)
        if size > self._broker.max_message_bytes:
            raise PayloadTooLarge(size, self._broker.max_message_bytes)
