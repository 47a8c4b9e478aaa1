"""The line of a limit on NATS: one stored message for each run that waits, in the jobs' stream.

An entry has its own subject, `hf.later.<limit>.<key>.<run>`, without a consumer. So it does not
count as lag, and the server refuses a second entry for the same run. It contains the whole message
to send when the run gets a place. Anyone who may send runs may also write here, so a message that
cannot be a run's is removed when its turn comes.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from typing import Any, Final

from holdfast.broker import Broker
from holdfast.broker.kv import direct_page, parse_time
from holdfast.broker.wire import Headers, parse_headers
from holdfast.errors import BrokerError, Conflict, NotFound, TryAgain
from holdfast.model.limit import Entry
from holdfast.model.message import RunMessage, number_of, read_heading
from holdfast.names import H_EXPECTED, H_MSG_ID, H_SEQUENCE, H_SUBJECT, attempt_message_id
from holdfast.ownership.gates import GateKey, Waiter

log = logging.getLogger("holdfast.limits")

AHEAD: Final = 16
"""Messages of a line that are read together: a request costs more than a message, but a process
keeps them for each busy gate."""


class NatsLine:
    """The lines of one namespace."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._names = broker.names
        self._get = f"STREAM.MSG.GET.{broker.names.jobs}"

    async def add(self, gate: GateKey, run: str, message: RunMessage) -> Entry:
        """Store a message unless the line has one of the run; returns the entry in the line."""
        subject = self._names.line(*gate, run)
        headers = {k: v for k, v in message.headers.items() if k != H_MSG_ID}
        headers |= {H_EXPECTED: "0", H_SUBJECT: message.subject}
        while True:
            try:
                stored = await self._broker.store(subject, message.body, headers)
                return Entry(stored.seq, run, number_of(headers))
            except Conflict:
                found = await self._find({"last_by_subj": subject})
                if found is not None:
                    raw = base64.b64decode(found.get("hdrs", ""))
                    return Entry(int(found["seq"]), run, number_of(parse_headers(raw)))

    async def next(self, gate: GateKey, start: int) -> Waiter | None:
        """The first message of a gate's line from a sequence on, as the stream's leader knows."""
        pattern = self._names.line(*gate, "*")
        while True:
            found = await self._find({"seq": start, "next_by_subj": pattern})
            if found is None:
                return None
            headers = parse_headers(base64.b64decode(found.get("hdrs", "")))
            stored, body = parse_time(found["time"]), base64.b64decode(found.get("data", ""))
            waiter = self._waiter(found["subject"], int(found["seq"]), stored, headers, body)
            if waiter is not None:
                return waiter
            start = int(found["seq"]) + 1
            log.warning("%s is not a waiting run: removed", found["subject"][:200])
            await self._delete(start - 1)

    async def some(self, gate: GateKey, start: int) -> Sequence[Waiter]:
        """Some of the first messages of a gate's line from a sequence on, from any replica."""
        pattern = self._names.line(*gate, "*")
        page = await direct_page(self._broker, self._names.jobs, pattern, start, size=AHEAD)
        found = []
        for message in page.messages:
            headers = message.headers
            subject, sequence = headers["Nats-Subject"], int(headers[H_SEQUENCE])
            stored = parse_time(headers["Nats-Time-Stamp"])
            waiter = self._waiter(subject, sequence, stored, headers, message.body)
            if waiter is None:
                break  # `next` removes it
            found.append(waiter)
        return found

    async def last(self, gate: GateKey) -> int:
        """The sequence of the last message of a gate's line; 0: there is none."""
        found = await self._find({"last_by_subj": self._names.line(*gate, "*")})
        return int(found["seq"]) if found else 0

    async def send(self, waiter: Waiter) -> None:
        """Send a message to its job's queue; a repeat changes nothing."""
        await self._broker.store(*waiter.message)

    async def remove(self, gate: GateKey, entry: Entry) -> None:
        """Remove a message from the line, if it is there."""
        try:
            await self._delete(entry.sequence)
        except TryAgain:
            raise
        except BrokerError as error:  # the server has several errors for "no such message"
            log.debug("message %d is not in the line: %s", entry.sequence, error)

    async def _delete(self, sequence: int) -> None:
        request = {"seq": sequence, "no_erase": True}
        await self._broker.api(f"STREAM.MSG.DELETE.{self._names.jobs}", request)

    async def _find(self, request: dict[str, Any]) -> dict[str, Any] | None:
        try:
            answer = await self._broker.api(self._get, request)
        except NotFound as error:
            if "stream not found" in str(error):
                raise
            return None
        found: dict[str, Any] = answer["message"]
        return found

    def _waiter(
        self, subject: str, sequence: int, stored: float, headers: Headers, body: bytes
    ) -> Waiter | None:
        target, where = headers.get(H_SUBJECT, ""), self._names.parse_line(subject)
        run = read_heading(headers, sequence, round(stored * 1e9)).run
        if where is None or run != where[1] or not self._names.parse_job(target):
            return None
        number = number_of(headers)
        ours = {k: v for k, v in headers.items() if k != H_SUBJECT and not k.startswith("Nats-")}
        ours[H_MSG_ID] = f"{attempt_message_id(run, number)}-{sequence}"
        return Waiter(Entry(sequence, run, number), RunMessage(target, body, ours), stored)
