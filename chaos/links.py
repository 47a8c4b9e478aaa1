"""The network between a process and the servers, as TCP proxies that can be cut or go silent.

Each process reaches each server through a separate link, so one process can be partitioned from
some or all of them without root and without affecting others. Three ways to fail: `cut` resets
every connection and refuses new ones, like a firewall that rejects; `stall` stops all bytes and
leaves connections open, like a pulled cable, and what was in flight arrives late, when the stall
ends; `mute` passes requests and drops the answers, then resets the connections: what was sent has
happened, and the sender cannot know.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Final, Literal, Self

HOST: Final = "127.0.0.1"
CHUNK: Final = 65_536

LinkState = Literal["open", "cut", "stalled", "mute"]


class Link:
    """A path from one process to one local port; use it as `async with`."""

    def __init__(self, target: int = 0) -> None:
        """The target may be set later, before the first connection."""
        self.target = target
        self.port = 0
        self.state: LinkState = "open"
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"nats://{HOST}:{self.port}"

    async def open(self) -> None:
        """Listen on a free port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._server:
            self._server.close()
        self._drop()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def become(self, state: LinkState) -> None:
        """Cut it, silence it, or let it work again."""
        if self.state == "mute":
            self._drop()  # the missing answers would garble the rest
        self.state = state
        if state == "stalled":
            self._flowing.clear()
        else:
            self._flowing.set()
        if state == "cut":
            self._drop()

    def _drop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await self._connect(reader, writer)
        except OSError:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.state == "cut":
            writer.transport.abort()
            return
        self._writers.add(writer)
        await self._flowing.wait()
        far_reader, far_writer = await asyncio.open_connection(HOST, self.target)
        if writer not in self._writers:  # cut meanwhile
            far_writer.transport.abort()
            return
        self._writers.add(far_writer)
        await asyncio.gather(
            self._pipe(reader, far_writer), self._pipe(far_reader, writer, answers=True)
        )

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self._flowing.wait()
                if answers and self.state == "mute":
                    continue
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)


class Network:
    """The links of one process, one to each server."""

    def __init__(self, targets: int) -> None:
        self.links = [Link() for _ in range(targets)]

    @property
    def url(self) -> str:
        """All addresses, as a client takes them."""
        return ",".join(link.url for link in self.links)

    async def open(self) -> None:
        for link in self.links:
            await link.open()

    async def close(self) -> None:
        for link in self.links:
            await link.close()

    def become(self, state: LinkState) -> None:
        """All links at once."""
        for link in self.links:
            link.become(state)
