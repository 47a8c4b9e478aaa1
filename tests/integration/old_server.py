"""A server that claims to be some version of nats-server, and only answers PING."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

INFO = {
    "server_id": "OLD",
    "server_name": "old",
    "proto": 1,
    "headers": True,
    "max_payload": 1024 * 1024,
    "jetstream": True,
}


@asynccontextmanager
async def claiming(version: str) -> AsyncIterator[str]:
    """Its URL; a real old server would answer more and be refused because of the same line."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"INFO {json.dumps(INFO | {'version': version})}\r\n".encode())
        try:
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
