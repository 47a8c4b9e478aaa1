"""Buckets: keys with a revision, written only by compare-and-swap.

A bucket is a stream `KV_<bucket>` of subjects `$KV.<bucket>.<key>`, as every NATS tool knows it.
Each write names the revision it expects (0: the key must not exist), so the server decides who was
first; a write may carry a TTL, which a later write without one removes. Reads go to the stream's
leader and are advisory: only a write decides.

Listing uses paged direct gets: the client library's watch may report a full bucket as empty.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import math
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import msgspec

from holdfast import errors
from holdfast.broker.batch import Write
from holdfast.broker.connection import Broker
from holdfast.broker.wire import CAS_REFUSED, Headers, Received, parse_headers
from holdfast.names import (
    H_EXPECTED,
    H_KV_OPERATION,
    H_MARKER,
    H_SEQUENCE,
    H_TTL,
    is_literal,
    kv_key,
    kv_stream,
    kv_subject,
)

T = TypeVar("T")

_PAGE = 1000
"""Messages in one request of a listing; the server ends a page sooner if they are large."""
_EXPECTS = b"NATS/1.0\r\n" + H_EXPECTED.encode() + b": "
LOOK_SECONDS = 0.5
"""Timeout of asking whether a bucket that does not answer exists."""


class Entry(NamedTuple):
    """A key's value, the revision that wrote it, and when the server stored it."""

    key: str
    value: bytes
    revision: int
    stored: float


class Change(NamedTuple):
    """A write to a key; its value is None if it deleted the key."""

    key: str
    value: bytes | None
    revision: int


class State(NamedTuple):
    """A bucket's stream as its leader describes it."""

    keys: set[str]
    """Keys of a pattern that have a value or a deletion marker."""
    last: int
    """The newest revision of the whole bucket."""
    created: str
    """When the bucket was created: differs if it was deleted and created again."""


class Bucket:
    """One bucket."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = self._broker = broker
        self.name = name
        self.stream = kv_stream(name)
        self._prefix = kv_subject(name, "")

    def put(
        self, key: str, value: bytes, *, expected: int | None, ttl: float | None = None
    ) -> asyncio.Future[int]:
        """Write if the key is still at `expected` (None: always); gives the new revision."""
        return self._broker.put(self._prefix + key, value, write_head(expected, ttl))

    def _write(self, key: str, value: bytes, expected: int | None, ttl: float | None) -> Write:
        headers: Headers = {} if expected is None else {H_EXPECTED: str(expected)}
        if ttl is not None:
            headers[H_TTL] = ttl_text(ttl)
        return Write(self._prefix + key, value, headers)

    def raw(self, key: str, ttl: float, ended_ttl: float) -> dict[str, Any]:
        """What a keeper process needs to write and read one key as `put` and `get` do."""
        headers = "NATS/1.0\r\n" + H_EXPECTED + ": {expected}\r\n" + H_TTL + ": {ttl}\r\n\r\n"
        return {
            "record_subject": self._prefix + key,
            "read_subject": f"$JS.API.STREAM.MSG.GET.{self.stream}",
            "headers": headers,
            "ttl": ttl_text(ttl),
            "ended_ttl": ttl_text(ended_ttl),
            "markers": [H_KV_OPERATION, H_MARKER],
            "refused": sorted(CAS_REFUSED),
        }

    async def get(self, key: str) -> Entry | None:
        """Read from the stream's leader."""
        return (await self.last(key))[1]

    async def peek(self, key: str) -> Entry | None:
        """Read from any replica: the value may be stale. The key is part of the request's subject,
        so that a login can be limited to some keys."""
        subject = self._prefix + key
        found = await self._broker.request(f"$JS.API.DIRECT.GET.{self.stream}.{subject}")
        if H_SEQUENCE not in found.headers:
            if found.status in ("404", "408"):
                return None
            raise errors.BrokerError(f"a read of {key} failed: {found.status}")
        if is_marker(found.headers):
            return None
        stored = parse_time(found.headers["Nats-Time-Stamp"])
        return Entry(key, found.body, int(found.headers["Nats-Sequence"]), stored)

    async def last(self, key: str) -> tuple[int, Entry | None]:
        """The revision that the next write must expect, and the value unless it is gone.

        A key that was deleted or has expired may leave a marker, which has a revision too.
        """
        try:
            answer = await self._broker.api(
                f"STREAM.MSG.GET.{self.stream}", {"last_by_subj": self._prefix + key}
            )
        except errors.NotFound as error:
            if "stream not found" in str(error):
                raise
            return 0, None
        message = answer["message"]
        revision = int(message["seq"])
        if _is_marker(message.get("hdrs")):
            return revision, None
        value = base64.b64decode(message.get("data", ""))
        found = kv_key(self.name, message["subject"])
        return revision, Entry(found, value, revision, parse_time(message["time"]))

    async def has_after(self, revision: int) -> bool:
        """Whether the stream's leader has a record or a marker above a revision."""
        request = {"seq": revision + 1, "next_by_subj": self._prefix + ">"}
        try:
            await self._broker.api(f"STREAM.MSG.GET.{self.stream}", request)
        except errors.NotFound as error:
            if "stream not found" in str(error):
                raise
            return False
        return True

    async def page(self, start: int, *, markers: bool = False) -> MessagePage:
        """The next records from a revision on, by paged direct gets."""
        subject = self._prefix + ">"
        return await direct_page(self._broker, self.stream, subject, start, markers=markers)

    async def state(self, pattern: str) -> State:
        """The existing keys, from the stream's leader; `pattern` may have wildcards."""
        keys: set[str] = set()
        while True:
            request = {"subjects_filter": self._prefix + pattern, "offset": len(keys)}
            info = await self._broker.api(f"STREAM.INFO.{self.stream}", request)
            page = info["state"].get("subjects") or {}
            keys |= {kv_key(self.name, subject) for subject in page}
            if not page or len(keys) >= int(info.get("total", 0)):
                return State(keys, int(info["state"]["last_seq"]), info.get("created", ""))

    async def changes(self, pattern: str, start: int) -> AsyncIterator[Change]:
        """The newest write to each key since a revision; one leader read per key, no consumer."""
        while True:
            request = {"seq": start, "next_by_subj": self._prefix + pattern}
            try:
                answer = await self._broker.api(f"STREAM.MSG.GET.{self.stream}", request)
            except errors.NotFound as error:
                if "stream not found" in str(error):
                    raise
                return
            message = answer["message"]
            start = int(message["seq"]) + 1
            gone = _is_marker(message.get("hdrs"))
            value = None if gone else base64.b64decode(message.get("data", ""))
            yield Change(kv_key(self.name, message["subject"]), value, int(message["seq"]))

    async def remove(self, key: str, *, expected: int) -> None:
        """Delete a key that is still at `expected`, leaving a marker that notifies listeners."""
        headers = {H_EXPECTED: str(expected), H_KV_OPERATION: "DEL"}
        await self._broker.store(self._prefix + key, b"", headers)

    async def remove_stray(self, key: str) -> None:
        """Delete the record under a key that is a wildcard; its revision cannot be compared."""
        await self._broker.store(self._prefix + key, b"", {H_KV_OPERATION: "DEL"})

    async def delete(self, key: str) -> None:
        """Remove a key without leaving a marker."""
        if not is_literal(key):
            raise errors.InvalidName(f"key {key!r} is a wildcard: nothing was removed")
        await self._broker.api(f"STREAM.PURGE.{self.stream}", {"filter": self._prefix + key})

    async def entries(self, prefix: str = "") -> AsyncIterator[Entry]:
        """All keys that start with `prefix` (whole tokens), in the order of the last write."""
        subject = f"{self._prefix}{prefix}>" if not prefix else f"{self._prefix}{prefix}.>"
        async for message in direct_batch(self._broker, self.stream, subject):
            yield Entry(
                kv_key(self.name, message.headers["Nats-Subject"]),
                message.body,
                int(message.headers["Nats-Sequence"]),
                parse_time(message.headers["Nats-Time-Stamp"]),
            )

    def read(self, decode: Callable[[bytes], T], entry: Entry) -> T | None:
        """An entry's record; None if it cannot be read, which is counted and logged."""
        if not is_literal(entry.key):
            stray = errors.Unreadable("its key is a wildcard: it cannot be read back")
            self._broker.unreadable.note(self.name, entry.key, stray, entry.value)
            return None
        return self._broker.unreadable.read(decode, self.name, entry.key, entry.value)

    async def records(
        self,
        decode: Callable[[bytes], T],
        prefix: str = "",
        wanted: Callable[[bytes], bool] = bool,
    ) -> AsyncIterator[tuple[Entry, T]]:
        """Every entry with its record, without those that cannot be read.

        `wanted` looks at the bytes first: decoding is most of what a long listing costs.
        """
        async for entry in self.entries(prefix):
            if not wanted(entry.value):
                continue
            if (record := self.read(decode, entry)) is not None:
                yield entry, record


async def direct_get(broker: Broker, stream: str, request: dict[str, Any]) -> Received | None:
    """One stored message, from any replica; None if that replica has none."""
    answer = await broker.request(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request))
    if H_SEQUENCE in answer.headers:
        return answer
    if answer.status == "404":
        return None
    raise errors.BrokerError(f"{stream} cannot be read: {answer.status} {answer.description}")


async def certain_get(broker: Broker, stream: str, request: dict[str, Any]) -> Received | None:
    """The same, but None only if the leader has none either: a replica may lag."""
    if (found := await direct_get(broker, stream, request)) is not None:
        return found
    try:
        message = (await broker.api(f"STREAM.MSG.GET.{stream}", request))["message"]
    except errors.NotFound as error:
        if "stream not found" in str(error):
            raise
        return None
    body, raw = (base64.b64decode(message.get(part, "")) for part in ("data", "hdrs"))
    stored = {"Nats-Subject": message["subject"], H_SEQUENCE: str(message["seq"])}
    headers = parse_headers(raw) | stored | {"Nats-Time-Stamp": message["time"]}
    return Received(message["subject"], body, headers, "")


async def direct_batch(
    broker: Broker, stream: str, subject: str, start: int = 1
) -> AsyncIterator[Received]:
    """All stored messages of a subject, oldest first, page by page."""
    while True:
        page = await direct_page(broker, stream, subject, start)
        for message in page.messages:
            yield message
        if not page.more:
            return
        start = page.last + 1


class MessagePage(NamedTuple):
    """Part of a listing: its messages, the last sequence read, and how many follow."""

    messages: list[Received]
    last: int
    left: int

    @property
    def more(self) -> bool:
        return self.left > 0


async def direct_page(
    broker: Broker,
    stream: str,
    subject: str,
    start: int,
    size: int = _PAGE,
    *,
    markers: bool = False,
) -> MessagePage:
    """The next stored messages of a subject from a sequence on; a bucket's markers on request.

    Markers are filtered only in buckets, because in other streams senders may set such headers. The
    server ends a page before `size` when its messages are large, and says that more follow.
    """
    inbox = broker.new_inbox()
    arriving = _Arriving()
    subscription = await broker.listen(inbox, arriving.receive)
    try:
        request: dict[str, Any] = {"seq": start, "next_by_subj": subject, "batch": size}
        asked = f"$JS.API.DIRECT.GET.{stream}"
        await broker.publish(asked, msgspec.json.encode(request), reply=inbox)
        dropping = stream.startswith(kv_stream("")) and not markers
        return await arriving.page(broker.config.request_timeout_seconds, dropping)
    except errors.OutcomeUnknown:
        if asked.lower() in broker.denied:
            raise errors.PermissionDenied(f"this login may not read {stream}") from None
        raise
    except errors.Unavailable:
        with contextlib.suppress(errors.OutcomeUnknown, errors.Unavailable):
            await broker.api(f"STREAM.INFO.{stream}", timeout=LOOK_SECONDS)  # `NotFound` if missing
        raise
    finally:
        await broker.unsubscribe(subscription)


class _Arriving:
    """Collects a page as it arrives; its end is a status of the server."""

    def __init__(self) -> None:
        self._messages: list[Received] = []
        self._end: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

    def receive(self, to: bytes, reply: bytes, body: bytes, headers: bytes | None) -> None:
        message = Received.parsed(to.decode(), body, headers, reply.decode())
        if not message.status:
            self._messages.append(message)
        elif not self._end.done():
            self._end.set_result(message)

    async def page(self, timeout: float, dropping: bool) -> MessagePage:
        end = await self._until_end(timeout)
        if end.status == "503":
            raise errors.Unavailable("nobody answers for the bucket right now")
        if end.status not in ("204", "404"):
            raise errors.BrokerError(f"a listing failed: {end.status} {end.description}")
        found = self._messages
        last = int(found[-1].headers[H_SEQUENCE]) if found else 0
        if dropping:
            found = [message for message in found if not is_marker(message.headers)]
        return MessagePage(found, last, int(end.headers.get("Nats-Num-Pending", 0)))

    async def _until_end(self, timeout: float) -> Received:
        """Wait for the end, as long as messages keep arriving."""
        while True:
            before = len(self._messages)
            done, _ = await asyncio.wait([self._end], timeout=timeout)
            if done:
                return self._end.result()
            if len(self._messages) == before:
                raise errors.OutcomeUnknown("a listing was cut off: try again")


def write_head(expected: int | None, ttl: float | None) -> bytes | None:
    """The headers of a write, ready to be sent."""
    if expected is None and ttl is None:
        return None
    block = b"NATS/1.0\r\n" if expected is None else b"%s%d\r\n" % (_EXPECTS, expected)
    return block + (_ttl_line(ttl) if ttl is not None else b"\r\n")


@functools.lru_cache(maxsize=64)
def _ttl_line(ttl: float) -> bytes:
    """A process uses few TTLs, and writes each of them very often."""
    return f"{H_TTL}: {ttl_text(ttl)}\r\n\r\n".encode()


def ttl_text(ttl: float) -> str:
    """A TTL for the server, which knows whole seconds only: it would cut 1.9 s down to one.

    Rounded up, so that nothing expires while its owner still trusts it.
    """
    return f"{max(1, math.ceil(ttl))}s"


def parse_time(text: str) -> float:
    """The server's RFC 3339 time with nanoseconds, as seconds since the epoch."""
    head, _, tail = text.partition(".")
    if not tail:
        return _whole_second(text)
    digits = tail.rstrip("Z").split("+")[0].split("-")[0]
    return _whole_second(head + tail[len(digits) :]) + float("0." + digits)


@functools.lru_cache(maxsize=256)
def _whole_second(text: str) -> float:
    """Records are listed in the order of their writes, so that many have the same second."""
    return datetime.fromisoformat(text).timestamp()


def _is_marker(encoded: str | None) -> bool:
    if not encoded:
        return False
    text = base64.b64decode(encoded)
    return b"KV-Operation:" in text or b"Nats-Marker-Reason:" in text


def is_marker(headers: Headers) -> bool:
    """Whether a write only records that its key was deleted or has expired."""
    return bool(headers.get(H_KV_OPERATION)) or H_MARKER in headers


__all__ = ["Bucket", "Entry", "direct_batch", "parse_time", "ttl_text"]
