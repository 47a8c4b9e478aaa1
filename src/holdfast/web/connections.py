"""Connections of a web process: how many there may be, and how long each may take to send its
request.

    opened ──► head ──► body ──► answered ──► idle ──► head …
                 └────────┴── deadline ──► closed

Guaranteed: whoever opens connections and sends half a request holds none for longer than a
deadline, and none against somebody who comes later. Where a limit is reached, by one address or by
all together, the connection that has waited longest for the rest of its request is closed, and the
new one is let in. One whose request is complete is never closed for another; when only such are
left, the new one is closed. So `/health/live` is answered while thousands send nothing.

Addresses in `web.proxies` have no limit of their own: everybody comes from there.

Not covered: a TLS handshake that is not finished is not counted; asyncio ends it after a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
from collections import Counter
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from holdfast.config import WebConfig
from holdfast.web.hosts import source_of

HEAD_SECONDS: Final = 10.0
"""From the first byte, or from the start of a connection, to the end of the headers: a browser on a
bad line takes one or two."""
BODY_SECONDS: Final = 30.0
"""For a body, of at most about 2 MB: 70 kB each second."""
WRITE_SECONDS: Final = 30.0
"""Without a byte being taken of an answer."""
PROXIES: Final = "proxies"
SPARE_FILES: Final = 100
"""Descriptors that are kept free for NATS, files and the health port."""


class Door:
    """Counts the connections, and says which must go."""

    def __init__(self, config: WebConfig) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = max(10, min(config.connections, files - SPARE_FILES))
        self.most_each = config.connections_per_address
        self._proxies = [one.strip() for one in config.proxies.split(",") if one.strip()]
        self._open: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}
        """By address, connections whose request is incomplete, the longest waiting first."""

    def enter(self, connection: Connection, address: str) -> bool:
        """Let a connection in, or not."""
        if self._full(address) and not self._close_one(self._waiting.get(address, {})):
            return False
        if self._open.total() >= self.most and not self._close_one(self._oldest()):
            return False
        self._open[address] += 1
        return True

    def source(self, address: str) -> str:
        """Under which name an address is counted; all proxies under one, which has no limit."""
        return PROXIES if any(_is_in(address, one) for one in self._proxies) else source_of(address)

    def _full(self, address: str) -> bool:
        limited = bool(self.most_each) and address != PROXIES
        return limited and self._open[address] >= self.most_each

    def _oldest(self) -> dict[Connection, None]:
        """Those that wait at the address which has most of them."""
        return max(self._waiting.values(), key=len, default={})

    def _close_one(self, waiting: dict[Connection, None]) -> bool:
        for connection in waiting:
            connection.drop()
            return True
        return False

    def leave(self, connection: Connection, address: str) -> None:
        """A connection was closed."""
        self.answer(connection, address)
        self._open[address] -= 1
        if self._open[address] <= 0:
            del self._open[address]

    def wait(self, connection: Connection, address: str) -> None:
        """A connection is waiting for a request, or the rest of one."""
        self._waiting.setdefault(address, {}).setdefault(connection)

    def answer(self, connection: Connection, address: str) -> None:
        """A connection's request is complete, and is being answered."""
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)


def _is_in(address: str, place: str) -> bool:
    """Whether an address is one of `web.proxies`: an address, a network, or `*`."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(place)
    except ValueError:
        return place in (address, "*")


class Connection(H11Protocol):
    """One connection: uvicorn's, with deadlines, and counted at the door."""

    door: Door
    """Set by `connection_class`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._address = ""
        self._inside = False
        self._phase = ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    # ---- opened and closed

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.door.source(self.client[0] if self.client else "")
        self._inside = self.door.enter(self, self._address)
        if self._inside:
            self._enter("head", HEAD_SECONDS)
        else:
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("closed", 0)
        self._leave()
        self._unset_stuck()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close it to make room for another one."""
        self._leave()
        self._close()

    def _leave(self) -> None:
        if self._inside:
            self._inside = False
            self.door.leave(self, self._address)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    # ---- what it waits for

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def _look(self) -> None:
        """Begin the deadline of what is waited for now."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._enter("body", BODY_SECONDS)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._enter("head", HEAD_SECONDS)
        elif state is h11.IDLE:
            self._enter("idle", 0)  # uvicorn's own, of a few seconds
        else:
            self._enter("answering", 0)

    def _enter(self, phase: str, seconds: float) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._deadline:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self._close) if seconds else None
        if not self._inside:
            return
        if phase in ("head", "body", "idle"):
            self.door.wait(self, self._address)
        else:
            self.door.answer(self, self._address)

    # ---- answers that nobody takes

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stuck is None:
            self._stuck = self.loop.call_later(WRITE_SECONDS, self._close)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stuck()

    def _unset_stuck(self) -> None:
        if self._stuck:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is answered once; a route that was reading the body learns that it ended.

        Without this, the route would answer too, and fail with a traceback.
        """
        cycle: RequestResponseCycle | None = self.cycle
        with contextlib.suppress(h11.LocalProtocolError):  # its answer has begun: it is cut off
            super().send_400_response(msg)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def connection_class(config: WebConfig) -> type[Connection]:
    """The protocol of one web process."""
    return type("WebConnection", (Connection,), {"door": Door(config)})
