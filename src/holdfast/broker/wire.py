"""The wire: the NATS client with a fast path for messages in both directions, and the server's
answers.

The library passes each message through a queue and a task to a coroutine, after matching it against
patterns; that is most of the cost of a short run. A subscription made with `listen` instead calls a
plain function directly from the parser, which finds a message by its lengths. A listener must not
block and must not raise: it hands the message on. `write` appends a finished protocol line to the
library's buffer. Everything else is left to the library: other lines of the protocol, malformed
ones, and large messages that arrive in many pieces.

This relies on private members of nats-py, so its version is bounded, and
`tests/integration/test_wire.py` fails if a new version moves them.

A stream's confirmation is `Stored`; its refusal is `Conflict` (a comparison failed), `NotFound`,
`Unavailable` (never applied) or another `BrokerError`, with the server's text and error code. A
message is `Received`. Nothing here waits or retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import Future
from collections.abc import Callable
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import ConnectionClosedError
from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

from holdfast import errors
from holdfast.names import H_SEQUENCE

log = logging.getLogger("holdfast.broker")

Headers = dict[str, str]
Listener = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Subject, reply, body, raw headers."""
Refuse = Callable[[bytes, bytes, Exception], object]
"""Subject, body, and why the message could not be taken."""

LARGE_BYTES: Final = 64 * 1024
"""An incomplete message of this size is left to the library, which does not copy what has arrived
each time that more comes."""
ENVELOPE_BYTES: Final = 16 * 1024
"""Kept free below the server's limit, so that a dead letter can hold the body and its history."""

CAS_REFUSED: Final = frozenset({10071, 10164, 10077})
"""The server's error codes for a failed comparison; the last is for a subject that keeps its first
message and already has one."""
_ID_IN_PROCESS: Final = 10158
"""The server's error code for a repeat whose first copy is not stored yet; whether it will be is
unknown."""
_NO_SEQUENCE: Final = 10043
"""The server's error code for a sequence that is not in the stream."""
NO_STREAM: Final = 10059
"""The server's error code for a stream that does not exist."""

_END: Final = b"\r\n"
_NO_HEADERS: Headers = {}
_PLAIN: Final = b"NATS/1.0\r\n"


# ---- in and out


class WireParser(Parser):
    """nats-py's parser, with a fast path for messages that a plain function takes."""

    def __init__(self, client: Any, listeners: dict[bytes, Listener], refuse: Refuse) -> None:
        """`listeners` by subscription id; `refuse` is told of a message that one could not take."""
        self._listeners = listeners
        self._refuse = refuse
        self._resets = 0
        super().__init__(client)

    def reset(self) -> None:
        """Reset all state for a new connection."""
        self._resets += 1
        super().reset()

    async def parse(self, data: bytes = b"") -> None:
        """Parse what has arrived; incomplete data waits for more."""
        if self.state != AWAITING_CONTROL_LINE:
            left = self.needed + len(_END) - len(self.buf)
            await super().parse(data[:left])
            data = data[left:]
        elif self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        place, resets = self._messages(data, 0), self._resets
        while place < len(data):
            after = await self._other(data, place)
            if after == place or resets != self._resets:
                return
            place = self._messages(data, after)

    def _messages(self, data: bytes, place: int) -> int:
        """Hand complete messages to their listeners, one after another; returns where they end.

        Every answer and every delivery of a worker comes through here, so it makes few calls.
        """
        find, listeners = data.find, self._listeners
        while (line := find(_END, place)) > 0:
            words = data[place:line].split(b" ")
            count = len(words)
            head = 0
            try:
                if words[0] == b"HMSG" and 5 <= count <= 6:
                    reply = words[3] if count == 6 else b""
                    head = int(words[-2])
                elif words[0] == b"MSG" and 4 <= count <= 5:
                    reply = words[3] if count == 5 else b""
                else:
                    return place
                size = int(words[-1])
            except ValueError:
                return place
            listener = listeners.get(words[2])
            begin = line + 2
            end = begin + size
            if listener is None or len(data) < end + 2:
                return place
            place = end + 2
            headers = data[begin : begin + head] if head else None
            try:
                listener(words[1], reply, data[begin + head : end], headers)
            except Exception as error:  # noqa: BLE001 - no message may end the connection
                self._refuse(words[1], data[begin + head : end], error)
        return place

    async def _other(self, data: bytes, place: int) -> int:
        """Let the library parse the next line; incomplete data stays in the buffer."""
        line = data.find(_END, place)
        if line < 0:
            self.buf.extend(data[place:])
            return place
        after = line + 2
        size = data[place:line].rpartition(b" ")[2]
        if data.startswith((b"MSG ", b"HMSG "), place) and size.isdigit():
            after += int(size) + 2
            if after > len(data) and int(size) < LARGE_BYTES:
                self.buf.extend(data[place:])
                return place
        await super().parse(data[place:after])
        return after


def _ignore(_: bytes, __: bytes, ___: Exception) -> None:
    return None


class WireClient(Client):
    """nats-py's client, with `listen` and `write`."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[bytes, Listener] = {}
        """By subscription id, as the wire has it."""
        self.on_malformed: Refuse = _ignore
        self._ps = WireParser(self, self._listeners, self._malformed)
        self._writing = False

    async def listen(self, subject: str, listener: Listener) -> Subscription:
        """Subscribe with a plain function that the parser calls."""

        async def unused(_: object) -> None:
            return None

        subscription = await self.subscribe(subject, cb=unused)
        self._listeners[b"%d" % subscription._id] = listener
        return subscription

    def _malformed(self, subject: bytes, data: bytes, error: Exception) -> None:
        """Log and drop a message that could not be processed; the next one may be good."""
        log.debug("a message could not be taken in", exc_info=error)
        self.on_malformed(subject, data, error)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        listener = self._listeners.get(b"%d" % sid)
        try:
            if listener is not None:
                listener(subject, reply, data, headers)
            else:
                await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - the library would stop reading for good
            self._malformed(subject, data, error)

    def write(self, line: bytes) -> None:
        """Send a finished protocol line, with all others of this turn of the loop.

        Raises `NotConnected` before anything is buffered. The library would wake a task for each
        turn; a callback costs a quarter of that.
        """
        if not self.hears:
            raise errors.NotConnected("not connected to NATS right now")
        self._pending.append(line)
        self._pending_data_size += len(line)
        if not self._writing:
            self._writing = True
            asyncio.get_running_loop().call_soon(self._write_soon)

    def _write_soon(self) -> None:
        self._writing = False
        if isinstance(self._transport, TcpTransport) and self.is_connected:
            self._write_pending()
        else:
            self._wake_flusher()  # a websocket only sends when it is drained

    @property
    def hears(self) -> bool:
        """Whether connected and able to receive: an ending event loop stops our reader first."""
        reading = self._reading_task
        connected = self._status == self.CONNECTED or self.is_draining
        return connected and reading is not None and not reading.done()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Let the flusher write what is pending; with `force_flush` write it here.

        The library waits for its flusher without a limit and swallows a cancellation meanwhile: an
        ending loop cancels the flusher first, so the wait would never end.
        """
        if not force_flush:
            self._wake_flusher()
        elif self.is_connected and self._transport is not None and self._write_pending():
            await self._transport.drain()  # type: ignore[no-untyped-call]

    def _wake_flusher(self) -> None:
        if not self.is_connected or self._flush_queue is None:
            return
        flusher = self._flusher_task
        if flusher is None or flusher.done():
            self._write_pending()
        elif not self._flush_queue.full():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    def _write_pending(self) -> bool:
        pending, transport = self._pending, self._transport
        if pending and transport is not None:
            self._pending, self._pending_data_size = [], 0
            transport.write(b"".join(pending))
        return bool(pending)

    async def flush(self, timeout: int = 10) -> None:
        """Return when the server has processed everything.

        The library's own lets its PING overtake the buffer, and waits with `asyncio.wait_for`,
        which before Python 3.12 may swallow a cancellation.
        """
        if self.is_closed:
            raise ConnectionClosedError
        async with asyncio.timeout(timeout):
            await self._flush_pending(force_flush=True)
            if self.hears:
                pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                await self._send_ping(pong)
                await pong

    async def _process_pong(self) -> None:
        """Match a PONG to the PING that has waited longest.

        If its sender was cancelled or timed out, the library would fail to set the result, stop
        reading, and lose the connection.
        """
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _connect_to_server(self, server: Any) -> None:
        """Try one server; the library would leave the socket of the previous attempt open."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(server)

    def abandon(self) -> None:
        """Close the socket: after a failed handshake the library would wait forever for its end,
        and it leaves it open if closing fails half-way."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.close()  # type: ignore[no-untyped-call]
            self._transport = None

    def filenos(self) -> list[int]:
        """The descriptor of the connection, if there is one."""
        writer = getattr(self._transport, "_io_writer", None)
        socket = writer.get_extra_info("socket") if writer is not None else None
        return [socket.fileno()] if socket is not None and socket.fileno() >= 0 else []

    def forget(self, subscription: Subscription) -> None:
        """Remove the listener of a subscription that has ended."""
        self._listeners.pop(b"%d" % subscription._id, None)


# ---- headers


def parse_status(raw: bytes | None) -> tuple[str, str]:
    """The server's status and description: the text after `NATS/1.0` in the first line.

    A header of that name comes from the sender and is ignored.
    """
    if not raw or raw.startswith(_PLAIN):
        return "", ""
    first = raw[len(_PLAIN) - 2 : raw.find(b"\r\n")].decode("utf-8", "replace")
    status, _, description = first.strip().partition(" ")
    return status, description


def parse_headers(raw: bytes | None) -> Headers:
    """A header block as a dict, without the status in its first line."""
    if not raw:
        return _NO_HEADERS
    lines = raw.decode("utf-8", "replace").split("\r\n")
    found: Headers = {}
    for line in lines[1:]:
        name, sep, value = line.partition(":")
        if sep:
            found[name.strip()] = value.strip()
    return found


def header_block(headers: Headers) -> bytes:
    """Headers as they go over the wire. Names are checked by the caller, values here."""
    block = "NATS/1.0\r\n"
    for name, value in headers.items():
        if "\n" in value or "\r" in value:
            value = value.replace("\r", " ").replace("\n", " ")
        block += f"{name}: {value}\r\n"
    return block.encode("utf-8", "replace") + b"\r\n"


def publish_line(subject: str, reply: str, body: bytes, headers: Headers | bytes | None) -> bytes:
    """A publish as it goes over the wire; headers that are bytes are a finished block."""
    if not headers:
        return f"PUB {subject} {reply} {len(body)}\r\n".encode() + body + b"\r\n"
    head = headers if isinstance(headers, bytes) else header_block(headers)
    size = len(head)
    line = f"HPUB {subject} {reply} {size} {size + len(body)}\r\n".encode()
    return line + head + body + b"\r\n"


# ---- the server's answers


class Stored(msgspec.Struct, frozen=True):
    """A stream's confirmation: the sequence, and whether the message was a duplicate."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False


class ApiError(msgspec.Struct, frozen=True):
    """The server's description of a refusal."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class _Ack(msgspec.Struct, frozen=True):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: ApiError | None = None


_decode_ack = msgspec.json.Decoder(_Ack).decode


class Received:
    """A message as it arrived; with a `status` it is a status of the server, not a message."""

    __slots__ = ("body", "description", "headers", "reply", "status", "subject")

    def __init__(
        self, subject: str, body: bytes, headers: Headers, reply: str, status: str = ""
    ) -> None:
        self.subject = subject
        self.body = body
        self.headers = headers
        self.reply = reply
        self.status = status
        self.description = ""

    @classmethod
    def of(cls, msg: Msg) -> Received:
        """From the library's message, which mixes the status with the sender's headers."""
        headers = msg.headers or {}
        return cls(msg.subject, msg.data, headers, msg.reply, headers.get("Status", ""))

    @classmethod
    def parsed(cls, subject: str, body: bytes, raw: bytes | None, reply: str) -> Received:
        """From the bytes on the wire.

        A stored message counts as a message whatever its first line says: anybody may have written
        it.
        """
        if raw is None:
            return cls(subject, body, _NO_HEADERS, reply)
        found = cls(subject, body, parse_headers(raw), reply)
        if H_SEQUENCE not in found.headers:
            found.status, found.description = parse_status(raw)
        return found


def read_ack_now(answer: Received) -> Stored:
    """A stream's answer as `Stored`; raises the error that it contains."""
    if not answer.body:
        if answer.status == "503":
            raise errors.Unavailable("no stream takes this subject right now")
        raise errors.BrokerError(
            f"unexpected answer from the stream: {answer.status} {answer.description}"
        )
    ack = _read_ack(answer.body)
    if ack.error is not None:
        raise api_error(ack.error)
    return Stored(ack.stream, ack.seq, ack.duplicate)


def _read_ack(body: bytes) -> _Ack:
    try:
        return _decode_ack(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # Not from the stream: it is unknown whether the message was stored.
        raise errors.OutcomeUnknown(f"unreadable answer from the stream: {error}") from None


def sequence_of(body: bytes, headers: bytes | None) -> int:
    """The sequence in a stream's confirmation; raises the error that it contains instead."""
    if headers is not None or not body:
        return read_ack_now(Received.parsed("", body, headers, "")).seq
    ack = _read_ack(body)
    if ack.error is not None:
        raise api_error(ack.error)
    return ack.seq


async def read_ack(future: Future[Received]) -> Stored:
    """Wait for a stream's answer."""
    return read_ack_now(await future)


def api_error(error: ApiError) -> errors.BrokerError:
    """The server's refusal as one of our errors."""
    text = f"{error.description} ({error.err_code or error.code})"
    if error.err_code in CAS_REFUSED:
        return errors.Conflict(text)
    if error.err_code == _ID_IN_PROCESS:
        return errors.OutcomeUnknown(text)
    if error.code == 404 or error.err_code == _NO_SEQUENCE:
        return errors.NotFound(text)
    if error.code == 503:
        return errors.Unavailable(text)
    return errors.BrokerError(text)


def header_bytes(headers: Headers | bytes | None) -> int:
    """The size of headers on the wire, which counts towards the server's limit."""
    if not headers:
        return 0
    if isinstance(headers, bytes):
        return len(headers)
    return 12 + sum(len(k) + len(v.encode()) + 4 for k, v in headers.items())


def reason(error: BaseException | None) -> str:
    """The client's error in a few words."""
    return str(error).removeprefix("nats: ").strip("'") or type(error).__name__
