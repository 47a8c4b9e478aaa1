"""Health and metrics of one process over HTTP, on one port.

`/health/live`   the event loop responds.
`/health/ready`  messages flow: connected, every consumer heard from, a canary arrived recently.
`/health`        same as ready, for simple probes.
`/metrics`       Prometheus.

A process may add paths, e.g. a scheduler's `/lag/<group>` for autoscalers. Only GET and HEAD; only
the path of a request is used, and nothing here changes state. Slow or broken requests are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import ConfigError, HoldfastError
from holdfast.forks import closed_in_children

log = logging.getLogger("holdfast.health")

T = TypeVar("T")

READ_SECONDS = 5.0  # a probe is one packet; only a stalled or hostile client takes longer
MOST_READING = 100
"""Incomplete requests at once: idle connections must not exhaust descriptors."""
MOST_BYTES = 16 * 1024
"""Limit on a request's headers; a probe sends a few hundred bytes."""
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Health:
    """What a process reports about itself."""

    ready: bool
    problems: list[str]
    metrics: Callable[[], bytes] | Callable[[], Awaitable[bytes]]
    facts: dict[str, Any] = field(default_factory=dict)
    more: Callable[[str], Awaitable[dict[str, Any] | None]] | None = None
    """Answers additional paths; None means 404."""


class HealthServer:
    """Serves a process's health inside `async with`; port 0 without a path serves nothing."""

    def __init__(
        self,
        host: str,
        port: int,
        health: Callable[[], Health] | Callable[[], Awaitable[Health]],
        *,
        path: str | None = None,
    ) -> None:
        self._host = host
        self._port = port
        self._path = path
        self._health = health
        self._server: asyncio.Server | None = None
        self._reading: dict[asyncio.StreamWriter, None] = {}
        """Connections with an incomplete request, oldest first."""
        closed_in_children(self)

    def filenos(self) -> list[int]:
        """The descriptors it listens on."""
        return [socket.fileno() for socket in self._server.sockets] if self._server else []

    async def __aenter__(self) -> HealthServer:
        try:
            if self._path:
                self._server = await asyncio.start_unix_server(
                    self._serve, self._path, limit=MOST_BYTES
                )
            elif self._port:
                self._server = await asyncio.start_server(
                    self._serve, self._host, self._port, limit=MOST_BYTES
                )
        except OSError as error:
            why = error.strerror or error
            if self._path:
                raise ConfigError(
                    f"health socket {self._path} cannot be opened ({why}): choose a shorter "
                    "TMPDIR that this user may write to"
                ) from None
            raise ConfigError(
                f"health port {self._port} cannot be opened ({why}): "
                "choose another with --health-port, or 0 for none"
            ) from None
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._server:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._reading) >= MOST_READING:  # close the oldest to make room
            next(iter(self._reading)).transport.abort()
        self._reading[writer] = None
        try:
            async with asyncio.timeout(READ_SECONDS):
                try:
                    line = await _head(reader)
                finally:
                    self._reading.pop(writer, None)
            status, kind, body = await self._answer(line)
            head = (
                f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + (b"" if line[:1] == ["HEAD"] else body))
            async with asyncio.timeout(READ_SECONDS):
                await writer.drain()
        except (TimeoutError, OSError, ValueError):
            log.debug("a health request was cut off")
        finally:
            writer.close()

    async def _answer(self, line: list[str]) -> tuple[int, str, bytes]:
        if len(line) < 2 or line[0] not in ("GET", "HEAD"):
            return 405, "text/plain", b"GET only\n"
        path = line[1].split("?")[0]
        if path == "/health/live":
            return 200, "application/json", b'{"live": true}\n'
        if path in ("/health", "/health/ready"):
            health = await _result(self._health())
            answer = {"ready": health.ready, "problems": health.problems, **health.facts}
            return (200 if health.ready else 503), "application/json", _json(answer)
        if path == "/metrics":
            metrics = (await _result(self._health())).metrics
            return 200, "text/plain; version=0.0.4; charset=utf-8", await _result(metrics())
        return await self._answer_more(path)

    async def _answer_more(self, path: str) -> tuple[int, str, bytes]:
        more = (await _result(self._health())).more
        try:
            answer = await more(path) if more else None
        except HoldfastError as error:
            return 503, "text/plain", f"{error}\n".encode()
        if answer is None:
            return 404, "text/plain", b"try /health/live, /health/ready or /metrics\n"
        return 200, "application/json", _json(answer)


class ReadyFile:
    """A file that exists while a process is ready, for probes that can only check files.

    Does nothing without a path.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._exists: bool | None = None

    @property
    def wanted(self) -> bool:
        """Whether a path is configured."""
        return self._path is not None

    def set(self, ready: bool) -> None:
        """Create or remove the file, including one left behind by a killed process."""
        if self._path is None or ready == self._exists:
            return
        try:
            if ready:
                self._path.write_text(f"{os.getpid()}\n")
            else:
                self._path.unlink(missing_ok=True)
            self._exists = ready
        except OSError as error:
            log.error("cannot write the ready file %s: %s", self._path, error.strerror)


async def _head(reader: asyncio.StreamReader) -> list[str]:
    """The words of the request line; headers are read and discarded."""
    line = await reader.readline()
    taken = len(line)
    while (header := await reader.readline()).strip():
        taken += len(header)
        if taken > MOST_BYTES:
            raise ValueError("the headers are too long")
    return line.decode("latin-1").split()


async def _result(value: T | Awaitable[T]) -> T:
    return await value if isinstance(value, Awaitable) else value


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
