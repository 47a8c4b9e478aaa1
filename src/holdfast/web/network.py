"""The network side of a web process: names it answers to, rate limits, and limits on connections.

    opened ──► head ──► body ──► answered ──► idle ──► head …
                 └────────┴── deadline ──► closed

Guaranteed: a client that opens connections and sends half a request holds none of them past a
deadline, and cannot keep later clients out. When a limit is reached, for one address or for all
together, the connection that has waited longest for the rest of its request is closed and the new
one is accepted. A connection whose request is complete is never closed for another; if only such
connections are left, the new one is closed. So `/health/live` is answered while thousands of
clients send nothing.

Addresses in `web.proxies` have no limit per address: all users come from there.

Not covered: an unfinished TLS handshake is not counted; asyncio ends it after a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections import Counter
from typing import Any, Final
from urllib.parse import urlsplit

import h11
from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from holdfast.config import WebConfig
from holdfast.errors import ConfigError

HEAD_SECONDS: Final = 10.0
"""Deadline from the first byte, or from the start of a connection, to the end of the headers. A
browser on a bad line takes one or two seconds."""
BODY_SECONDS: Final = 30.0
"""Deadline for a whole body of at most about 2 MB: 70 kB per second suffice."""
WRITE_SECONDS: Final = 30.0
"""How long a client may leave an answer unread, which stays in memory meanwhile."""
PROXIES: Final = "proxies"
SPARE_FILES: Final = 100
"""File descriptors kept free for NATS, files and the health port."""
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
PORTS: Final = {"http": 80, "https": 443}


def path_of(scope: Scope) -> str:
    """The path inside this app, wherever it is mounted."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


# ---- names and addresses


class Hosts:
    """The host names this process answers to.

    An IP address cannot be made to point elsewhere, so any address is accepted. The owner of a name
    can point it anywhere, so only our own names are accepted.
    """

    def __init__(self, given: str, bound: str) -> None:
        self._given = [name.strip().lower() for name in given.split(",") if name.strip()]
        self._own = {*LOOPBACK, bound.lower(), socket.gethostname().lower()} - {""}
        for name in self._given:
            if "/" in name or (":" in name and not name.startswith("[")):
                raise ConfigError(f"web.hosts: {name!r} must be a name without scheme and port")

    def known(self, host: str) -> bool:
        """Whether a Host header names this process."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if not name or any(c in host for c in "/\\?#@ "):
            return False
        return name in self._own or is_address(name) or any(_fits(name, g) for g in self._given)


def _fits(name: str, given: str) -> bool:
    if given.startswith("*."):
        return name.endswith(given[1:])
    return given == "*" or name == given


def is_address(name: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host.lower() == "localhost":
        return True
    return is_address(host) and ipaddress.ip_address(host).is_loopback


def source_of(address: str) -> str:
    """The key an address is limited under: itself, or its /64 network, which has one owner."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 4:
        return address
    inner = found.ipv4_mapped
    return str(inner) if inner else str(ipaddress.ip_network((found, 64), strict=False))


def same_origin(origin: str, host: str) -> bool:
    """Whether an Origin is the requested host; any scheme, since a proxy may end TLS."""
    try:
        parts = urlsplit(origin)
        if parts.scheme not in PORTS or not parts.hostname:
            return False
        own = urlsplit(f"{parts.scheme}://{host}")
        usual = PORTS[parts.scheme]
        return (parts.hostname, parts.port or usual) == (own.hostname, own.port or usual)
    except ValueError:
        return False


# ---- connections


class Door:
    """Counts connections, and decides which one to close when there are too many."""

    def __init__(self, config: WebConfig) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.most = max(10, min(config.connections, files - SPARE_FILES))
        self.most_each = config.connections_per_address
        self._proxies = [one.strip() for one in config.proxies.split(",") if one.strip()]
        self._open: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}
        """By address, connections with an incomplete request, the longest waiting first."""

    def enter(self, connection: Connection, address: str) -> bool:
        """Whether a new connection may stay."""
        if self._full(address) and not self._close_one(self._waiting.get(address, {})):
            return False
        if self._open.total() >= self.most and not self._close_one(self._oldest()):
            return False
        self._open[address] += 1
        return True

    def source(self, address: str) -> str:
        """The key an address is counted under; all proxies share one, which has no limit."""
        return PROXIES if any(is_in(address, one) for one in self._proxies) else source_of(address)

    def _full(self, address: str) -> bool:
        limited = bool(self.most_each) and address != PROXIES
        return limited and self._open[address] >= self.most_each

    def _oldest(self) -> dict[Connection, None]:
        """The waiting connections of the address that has most of them."""
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
        """A connection waits for a request, or the rest of one."""
        self._waiting.setdefault(address, {}).setdefault(connection)

    def answer(self, connection: Connection, address: str) -> None:
        """A connection's request is complete and being answered."""
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)


def is_in(address: str, place: str) -> bool:
    """Whether an address matches an entry of `web.proxies`: an address, a network, or `*`."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(place)
    except ValueError:
        return place in (address, "*")


class Connection(H11Protocol):
    """Uvicorn's connection, with deadlines and a limit on how many there are."""

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
        # Headers of proxies may replace the client's address; a login by proxy needs this one.
        self.app_state = {**self.app_state, "peer": self.client[0] if self.client else ""}
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
        """Close this connection to make room for another."""
        self._leave()
        self._close()

    def _leave(self) -> None:
        if self._inside:
            self._inside = False
            self.door.leave(self, self._address)

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    # ---- deadlines

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_deadline()

    def _update_deadline(self) -> None:
        """Start the deadline for what the connection is waiting for now."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            self._enter("body", BODY_SECONDS)
        elif state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._enter("head", HEAD_SECONDS)
        elif state is h11.IDLE:
            self._enter("idle", 0)  # uvicorn closes it after a few seconds
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

    # ---- clients that do not read

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
        """Answer invalid HTTP once, and end the body of a route that is still reading it.

        Without this, the route would answer too and fail with a traceback.
        """
        cycle: RequestResponseCycle | None = self.cycle
        with contextlib.suppress(h11.LocalProtocolError):  # its answer has begun, and is cut off
            super().send_400_response(msg)
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def connection_class(config: WebConfig) -> type[Connection]:
    """The connection class of one web process; its connections share a `Door`."""
    return type("WebConnection", (Connection,), {"door": Door(config)})
