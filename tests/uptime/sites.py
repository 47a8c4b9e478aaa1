"""Sites that come and go, and a receiver of notices: small servers on loopback, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

Mood = Literal["up", "slow", "broken", "away"]

SLOW_SECONDS = 0.6
_REASONS = {200: "OK", 503: "Service Unavailable", 204: "No Content"}


def response(status: int, body: bytes = b"", **headers: str) -> bytes:
    """An HTTP answer that ends its connection."""
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Other')}"]
    given = {"Content-Length": str(len(body)), "Connection": "close", **headers}
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in given.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Website:
    """One HTTP server whose behaviour can be changed; `away` closes its port."""

    def __init__(self) -> None:
        self.port = 0
        self.mood: Mood = "up"
        self.asked = 0
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._leave()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    async def become(self, mood: Mood) -> None:
        """Change its behaviour; returns when that is done."""
        self.mood = mood
        if mood == "away":
            await self._leave()
        elif self._server is None:
            await self._listen()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _leave(self) -> None:
        if self._server is not None:
            self._server.close()
            for task, writer in list(self._open.items()):
                writer.transport.abort()
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        me = cast("asyncio.Task[None]", asyncio.current_task())
        self._open[me] = writer
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            self.asked += 1
            writer.write(await self.answer(head, reader))
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has gone
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
            del self._open[me]

    async def answer(self, head: str, reader: asyncio.StreamReader) -> bytes:
        """Its answer, by its current behaviour."""
        if self.mood == "slow":
            await asyncio.sleep(SLOW_SECONDS)
        if self.mood == "broken":
            return response(503, b"out of order\n")
        return response(200, b"all is well\n")


@dataclass
class Told:
    """One delivered notice."""

    id: str
    attempt: int
    body: dict[str, Any]


class Receiver(Website):
    """A webhook: counts deliveries by their id."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []

    @property
    def counts(self) -> Counter[str]:
        return Counter(told.id for told in self.told)

    async def answer(self, head: str, reader: asyncio.StreamReader) -> bytes:
        lines = (line.partition(":") for line in head.splitlines()[1:])
        names = {name.lower(): value.strip() for name, _, value in lines}
        body = json.loads(await reader.readexactly(int(names["content-length"])))
        attempt = int(names["uptime-attempt"])
        self.told.append(Told(names["idempotency-key"], attempt, body))
        return response(204)
