"""The NATS client with a short way in and a short way out, for what happens once per message.

The library hands each message through a queue and a task to a coroutine; that is most of what a
message costs. A subscription made with `listen` calls a plain function instead, straight from the
parser, with the headers still unparsed. `write` appends a finished protocol line to the library's
own buffer. Both rest on members of nats-py that are not public: `tests/integration/test_wire.py`
fails if a new version moves them, and the version is pinned.

A listener must not block and must not raise: it hands the message on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.subscription import Subscription

from holdfast.broker.parser import WireParser

log = logging.getLogger("holdfast.broker")

Headers = dict[str, str]
Listener = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Subject, reply, body, raw headers."""

_NO_HEADERS: Headers = {}
_PLAIN = b"NATS/1.0\r\n"


def _ignore(_: bytes, __: bytes, ___: Exception) -> None:
    return None


class WireClient(Client):
    """nats-py's client, with `listen` and `write`."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[int, Listener] = {}
        self.on_malformed: Callable[[bytes, bytes, Exception], object] = _ignore
        self._ps = WireParser(self, self._listeners, self._take)

    async def listen(self, subject: str, listener: Listener) -> Subscription:
        """Subscribe with a plain function that the parser calls."""

        async def unused(_: object) -> None:
            return None

        subscription = await self.subscribe(subject, cb=unused)
        self._listeners[subscription._id] = listener
        return subscription

    def _take(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> bool:
        listener = self._listeners.get(sid)
        if listener is None:
            return False
        try:
            listener(subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - no message may end the connection
            self._malformed(subject, data, error)
        return True

    def _malformed(self, subject: bytes, data: bytes, error: Exception) -> None:
        """Log and drop a message that could not be processed; the next one may be good."""
        log.debug("a message could not be taken in", exc_info=error)
        self.on_malformed(subject, data, error)

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if self._take(sid, subject, reply, data, headers):
            return
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except Exception as error:  # noqa: BLE001 - the library would stop reading for good
            self._malformed(subject, data, error)

    async def write(self, line: bytes) -> None:
        """Send a finished protocol line."""
        self._pending.append(line)
        self._pending_data_size += len(line)
        queue = self._flush_queue
        if queue is not None and queue.empty():
            await self._flush_pending()

    @property
    def hears(self) -> bool:
        """Connected, and an answer can arrive: an event loop that ends stops our reading first."""
        reading = self._reading_task
        return self.is_connected and reading is not None and not reading.done()

    async def _flush_pending(self, force_flush: bool = False) -> None:
        """Have the flusher write what is pending; with `force_flush` write it here.

        The library waits for its flusher without a limit, and swallows a cancellation meanwhile: a
        loop that ends cancels the flusher first, and whoever then waits for it waits for ever.
        """
        transport = self._transport
        if not self.is_connected or self._flush_queue is None or transport is None:
            return
        flusher = self._flusher_task
        if force_flush or flusher is None or flusher.done():
            pending, self._pending, self._pending_data_size = self._pending, [], 0
            if pending:
                transport.writelines(pending)
                await transport.drain()  # type: ignore[no-untyped-call]
        elif not self._flush_queue.full():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def flush(self, timeout: int = 10) -> None:
        """Return when the server has seen everything; the library's PING overtakes its buffer."""
        async with asyncio.timeout(timeout):
            await self._flush_pending(force_flush=True)
        await super().flush(timeout)

    async def _connect_to_server(self, server: Any) -> None:
        """Try one server; the library would leave the socket of the try before it open."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.close()  # type: ignore[no-untyped-call]
        await super()._connect_to_server(server)

    def abandon(self) -> None:
        """Let the socket go: after a failed handshake the library would wait for ever for its end,
        and it leaves it open when its own closing fails half-way."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.close()  # type: ignore[no-untyped-call]
            self._transport = None

    def filenos(self) -> list[int]:
        """The descriptor of the connection, unless there is none."""
        writer = getattr(self._transport, "_io_writer", None)
        socket = writer.get_extra_info("socket") if writer is not None else None
        return [socket.fileno()] if socket is not None and socket.fileno() >= 0 else []

    def forget(self, subscription: Subscription) -> None:
        """A subscription has ended."""
        self._listeners.pop(subscription._id, None)


def parse_status(raw: bytes | None) -> tuple[str, str]:
    """The server's status and its words: what follows `NATS/1.0` in the first line.

    A header of that name is its sender's and means nothing here.
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


def publish_line(subject: str, reply: str, body: bytes, headers: Headers | None) -> bytes:
    """A publish as it goes over the wire. Names are checked by the caller, values here."""
    if not headers:
        return f"PUB {subject} {reply} {len(body)}\r\n".encode() + body + b"\r\n"
    block = "NATS/1.0\r\n"
    for name, value in headers.items():
        if "\n" in value or "\r" in value:
            value = value.replace("\r", " ").replace("\n", " ")
        block += f"{name}: {value}\r\n"
    head = block.encode("utf-8", "replace") + b"\r\n"
    size = len(head)
    line = f"HPUB {subject} {reply} {size} {size + len(body)}\r\n".encode()
    return line + head + body + b"\r\n"
