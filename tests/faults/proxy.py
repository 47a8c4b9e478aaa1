"""A TCP proxy in front of a server: a network that can be cut."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable


class Proxy:
    """Forwards to a local port while the `async with` lasts."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._handlers: set[asyncio.Task[object]] = set()
        self.port = 0
        self.deaf = False
        """While set, the server's answers are dropped."""
        self.fuse: tuple[int, Callable[[], None]] | None = None
        """Calls back after this many bytes were sent to the server."""

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server
        self._server.close()
        self._drop()
        await asyncio.gather(*self._handlers, return_exceptions=True)

    async def cut(self, seconds: float) -> None:
        """Reset every connection and refuse new ones for `seconds`."""
        self.down()
        await asyncio.sleep(seconds)
        await self.up()

    def down(self) -> None:
        """Reset every connection and refuse new ones."""
        assert self._server
        self._server.close()
        self._drop()

    async def up(self) -> None:
        """Accept new connections again."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def _burn(self, size: int) -> None:
        if self.fuse:
            left, act = self.fuse[0] - size, self.fuse[1]
            self.fuse = (left, act) if left > 0 else None
            if left <= 0:
                act()

    def fall_silent(self) -> None:
        """Drop every answer from now on."""
        self.deaf = True

    def hang_up(self) -> None:
        """Reset every connection, and refuse new ones until `pick_up`."""
        assert self._server
        self._server.close()
        self._drop()

    async def pick_up(self) -> None:
        """Accept connections again, and pass answers on."""
        self.deaf = False
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if handler := asyncio.current_task():
            self._handlers.add(handler)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        await asyncio.gather(
            self._pipe(reader, far_writer), self._pipe(far_reader, writer, answers=True)
        )

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                if answers and self.deaf:
                    continue
                writer.write(data)
                if not answers:
                    self._burn(len(data))
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
