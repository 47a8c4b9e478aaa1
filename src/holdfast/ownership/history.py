"""History: the append-only stream of runs that have ended.

`append` returns when the server has stored the line, so that the run's message can be acknowledged
after it. Never append before the end is confirmed in the run's record: a holder that was replaced
would write history. Lines that arrive while others are being sent are stored together, in one
message per subject: the faster runs end, the less a line costs.

`find` looks for one run: in the index, which coordinators write, and in the part of the history
that is not indexed yet. Without a coordinator that part grows, and looking takes longer; nothing is
lost.

Not guaranteed: that a line is found for ever (the stream is bounded by age and bytes), or that
there is only one (see `holdfast.model.history`).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Final, NamedTuple

from holdfast.broker import Broker, Received
from holdfast.broker.kv import certain_get, direct_page
from holdfast.clock import rfc3339
from holdfast.errors import BrokerError, NotFound, PayloadTooLarge, PermissionDenied
from holdfast.model import history, totals
from holdfast.model.history import Ended
from holdfast.model.journal import parent_of
from holdfast.model.run import RunRecord
from holdfast.model.totals import Head
from holdfast.names import H_RUN, H_SEQUENCE
from holdfast.ownership.journals import NatsJournals
from holdfast.retrying import retrying

log = logging.getLogger("holdfast.history")

FLIGHTS: Final = 2
"""Messages in flight per subject: one is in transit while another is being stored."""
MOST_FLIGHTS: Final = 16
"""Messages in flight over all subjects: with many jobs and 2 ms to three replicas, 8,000 a second.
More would only make messages of fewer lines."""
MOST_LINES: Final = 64
"""Lines in one message: a reader that wants one line reads them all."""
MOST_BYTES: Final = 128 * 1024
"""Bytes of a message with several lines: far below what a server accepts."""
LARGEST: Final = 4
"""A payload is kept up to this fraction of what the server accepts in one message, because the line
must fit together with the record's result and errors."""
CLOCKS_SECONDS: Final = 5.0
"""How much earlier than the server's time of its line an end may be: the line may have waited, and
the time of the end is an estimate."""
LOOK_AGAIN_SECONDS: Final = 0.05
"""How long to wait for a line, which follows the end within milliseconds."""
TRY_SECONDS: Final = 5.0
"""How long callers try that cannot do anything about a failure: their own work must not wait for an
election."""


class _Waiting(NamedTuple):
    run: str
    line: bytes
    done: asyncio.Future[None]


class History:
    """Appends to and reads the history of one namespace."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._names = broker.names
        self._journals = NatsJournals(broker)
        self._denied = set[str]()
        """What this login may not do; checked again after a reconnect, as a login may be
        renewed."""
        self._flying: dict[str, int] = {}
        """The number of messages in flight, by subject."""
        self._gathering: dict[str, list[_Waiting]] = {}
        broker.on_reconnect(self._denied.clear)

    # ---- appending

    async def append(
        self,
        run: str,
        record: RunRecord,
        payload: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float = math.inf,
    ) -> None:
        """Store the line of an ended run, trying for `seconds`.

        A line that does not fit into a message is stored without payload and headers.
        """
        subject = self._names.ended(record.group, record.job, record.state)
        largest = self._broker.max_message_bytes // LARGEST
        line = history.line(run, record, payload, headers, largest)
        if record.parent:
            await self.tell(run, record, seconds)
        try:
            await self._append(subject, run, line)
            return
        except (BrokerError, PayloadTooLarge) as error:
            log.debug("the end of run %s is not stored yet: %s", run, error)

        async def step() -> None:
            nonlocal line
            try:
                await self._append(subject, run, line)
            except PayloadTooLarge:
                line = history.line(run, record, payload)
                await self._append(subject, run, line)
            except PermissionDenied as error:
                self._deny("write", error)

        await retrying(
            step,
            clock=self._broker.clock,
            what="writing history",
            seconds=seconds,
            on=BrokerError,
        )

    async def tell(self, run: str, record: RunRecord, seconds: float = math.inf) -> None:
        """Tell a flow that its child has ended. Every end passes here; a repeat is harmless."""
        parent = parent_of(record.parent)
        if parent is not None:
            await retrying(
                lambda: self._journals.tell(parent, run, record),
                clock=self._broker.clock,
                what="telling a flow of its child's end",
                seconds=seconds,
                on=BrokerError,
            )

    def _deny(self, what: str, error: PermissionDenied) -> None:
        """A login made by an earlier version may not use the history: continue without it."""
        if what not in self._denied:
            self._denied.add(what)
            log.error("cannot %s history: renew the login with 'holdfast auth': %s", what, error)

    async def try_append(self, run: str, record: RunRecord, payload: bytes | None = None) -> None:
        """Append, and only log a failure: for those whose work does not depend on it."""
        try:
            await self.append(run, record, payload, seconds=TRY_SECONDS)
        except BrokerError as error:
            log.warning("the end of run %s is missing in the history: %s", run, error)

    def _append(self, subject: str, run: str, line: bytes) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if "write" in self._denied:
            done.set_result(None)
            return done
        self._gathering.setdefault(subject, []).append(_Waiting(run, line, done))
        self._send(subject)
        return done

    def _send(self, subject: str) -> None:
        """Send gathered lines of a subject, up to the limit of messages in flight."""
        while subject in self._gathering and self._flying.get(subject, 0) < FLIGHTS:
            if sum(self._flying.values()) >= MOST_FLIGHTS:
                return
            self._send_one(subject)

    def _send_one(self, subject: str) -> None:
        waiting = self._gathering.pop(subject)
        count, size = 0, 0
        while count < len(waiting) and count < MOST_LINES and size < MOST_BYTES:
            size += len(waiting[count].line)
            count += 1
        if size > MOST_BYTES and count > 1:
            count -= 1
        if waiting[count:]:
            self._gathering[subject] = waiting[count:]
        self._store(subject, waiting[:count])

    def _store(self, subject: str, group: list[_Waiting]) -> None:
        runs = history.SEPARATOR.join(waiting.run for waiting in group)
        body = b"\n".join(waiting.line for waiting in group)  # JSON has no line breaks

        def over(stored: asyncio.Future[int]) -> None:
            if self._flying[subject] == 1:
                del self._flying[subject]
            else:
                self._flying[subject] -= 1
            _tell(group, stored.exception())
            for waiting in list(self._gathering):
                self._send(waiting)

        try:
            _ = self._broker.put(subject, body, {H_RUN: runs}, over)
            self._flying[subject] = self._flying.get(subject, 0) + 1
        except (BrokerError, PayloadTooLarge) as error:
            _tell(group, error)

    # ---- reading

    async def find(
        self, run: str, group: str = "*", job: str = "*", since: float = 0.0
    ) -> Ended | None:
        """The newest end of a run that was stored at or after `since`, by the server's clock."""
        try:
            found = [line async for line in self.find_all(run, group, job, since)]
        except PermissionDenied as error:
            self._deny("read", error)
            return None
        return max(found, key=lambda line: line.record.ended, default=None)

    async def find_all(
        self, name: str, group: str = "*", job: str = "*", since: float = 0.0
    ) -> AsyncIterator[Ended]:
        """Every end of a run, or of the runs with a key, that was stored at or after `since`."""
        indexed, rest = await self._places(name, since)
        for place in indexed:
            message = await certain_get(self._broker, self._names.history, {"seq": place})
            for line in self.lines(message, name) if message else ():
                yield line
        async for message in self._messages(self._names.ended(group, job, "*"), since, rest):
            for line in self.lines(message, name):
                yield line

    async def _places(self, name: str, since: float) -> tuple[list[int], int]:
        """Where the index says that a run may be, and up to where the history is indexed."""
        sum_ = totals.checksum(name)
        stream, subject = self._names.history_index, self._names.indexed(sum_ % totals.PARTS)
        found, last = set[int](), 0
        read = self._broker.unreadable.read
        async for message in stored_since(self._broker, stream, subject, since):
            place = message.headers.get(H_SEQUENCE, "")
            if block := read(totals.BLOCK.decode, stream, place, message.body):
                found.update(totals.places(block, sum_))
                last = max(last, block.last)
        return sorted(found), last

    async def line_of(self, run: str, record: RunRecord, patience: float = 0.0) -> Ended | None:
        """The line of an ended record; waits for it up to `patience` seconds after the end."""
        since = record.ended - CLOCKS_SECONDS
        while True:
            late = self._broker.server_now() > record.ended + patience
            found = await self.find(run, record.group, record.job, since)
            if found and found.record.ended == record.ended:
                return found
            if late:
                return None
            await self._broker.clock.sleep(LOOK_AGAIN_SECONDS)

    async def filed(self, ended: Mapping[str, RunRecord]) -> set[str]:
        """Which of these ended runs have their line."""
        found = set[str]()
        since = min(record.ended for record in ended.values()) - CLOCKS_SECONDS
        async for message in self._messages(self._names.ended("*", "*", "*"), since):
            for run in ended.keys() & message.headers.get(H_RUN, "").split(history.SEPARATOR):
                ends = {line.identity for line in self.lines(message, run)}
                found |= {run} if (run, ended[run].ended) in ends else set()
        return found

    async def all(self, since: float = 0.0, after: int = 0) -> AsyncIterator[Ended]:
        """Every line stored at or after `since` and after a sequence, oldest first."""
        async for message in self._messages(self._names.ended("*", "*", "*"), since, after):
            for line in self.lines(message):
                yield line

    def lines(self, message: Received, run: str = "") -> Iterator[Ended]:
        """The lines of a stored message, or those of one run or key; damaged ones are reported."""
        if not run or run in message.headers.get(H_RUN, ""):
            yield from self.read(message.headers.get(H_SEQUENCE, ""), message.body, run)

    def read(self, place: int | str, body: bytes, run: str = "") -> Iterator[Ended]:
        """The lines of the message at a place in the stream, or those of one run or key."""
        wanted = run.encode()
        for line in body.split(b"\n"):
            if wanted in line:
                note = self._broker.unreadable.read
                found = note(history.decode, self._names.history, str(place), line)
                if found and (not run or run in totals.names_of(found.run)):
                    yield found

    def _messages(self, subject: str, since: float, after: int = 0) -> AsyncIterator[Received]:
        return stored_since(self._broker, self._names.history, subject, since, after)


def _tell(group: list[_Waiting], failure: BaseException | None) -> None:
    for waiting in group:
        if waiting.done.done():  # its writer was cancelled
            continue
        if failure is None:
            waiting.done.set_result(None)
        else:
            waiting.done.set_exception(failure)


async def read_head(broker: Broker) -> tuple[Head, int]:
    """How far the history was counted and indexed, from the leader, and its revision."""
    names = broker.names
    get = f"STREAM.MSG.GET.{names.history_index}"
    try:
        answer = await broker.api(get, {"last_by_subj": names.indexed("head")})
    except NotFound as error:
        if "stream not found" in str(error):
            raise
        return Head(), 0
    message = answer["message"]
    body = base64.b64decode(message.get("data", ""))
    place = names.history_index, str(message["seq"])
    return broker.unreadable.read(totals.HEAD.decode, *place, body) or Head(), int(message["seq"])


async def stored_since(
    broker: Broker, stream: str, subject: str, since: float, after: int = 0
) -> AsyncIterator[Received]:
    """The messages of a subject at or after an instant and after a sequence, oldest first."""
    start = await first_since(broker, stream, subject, since) if since > 0 else 1
    start = max(start, after + 1) if start else 0
    while start:
        page = await direct_page(broker, stream, subject, start)
        for message in page.messages:
            yield message
        start = page.last + 1 if page.more else 0


async def first_since(broker: Broker, stream: str, subject: str, since: float) -> int:
    """The sequence of the first message at or after an instant; 0 when there is none."""
    request = {"next_by_subj": subject, "start_time": rfc3339(since)}
    found = await certain_get(broker, stream, request)
    return int(found.headers[H_SEQUENCE]) if found else 0
