"""Misbehaving servers, for checks to probe."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(
    handler: Handler,
    *,
    reads: bool = True,
    tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[int]:
    """A server on loopback; the handler gets the request's head. Yields its port."""
    open_now: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = cast("asyncio.Task[None]", asyncio.current_task())
        open_now[me] = writer
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1") if reads else ""
            await handler(head, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the check has given up
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            del open_now[me]

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task, writer in list(open_now.items()):
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*open_now, return_exceptions=True)
        await server.wait_closed()
