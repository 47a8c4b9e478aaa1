"""Reading the wire: messages are cut out of the bytes as they came.

The library matches every message against patterns and moves the rest of its buffer along; that is a
sixth of what a short run costs. Here a message is found by its lengths, and one that is listened to
goes straight to its function. Everything else, the library's own parser reads: other lines of the
protocol, what is malformed, and large messages that arrive in many pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final

from nats.protocol.parser import AWAITING_CONTROL_LINE, Parser

Take = Callable[[int, bytes, bytes, bytes, bytes | None], object]
"""Sid, subject, reply, body, headers."""

LARGE_BYTES: Final = 64 * 1024
"""A message of this size that is not all there is put together by the library."""
_END: Final = b"\r\n"


class WireParser(Parser):
    """nats-py's parser with a short way."""

    def __init__(self, client: Any, listeners: Container[int], take: Take) -> None:
        """What comes for one of `listeners`, `take` gets."""
        self._listeners = listeners
        self._take = take
        self._resets = 0
        super().__init__(client)

    def reset(self) -> None:
        """Forget everything: the connection is another."""
        self._resets += 1
        super().reset()

    async def parse(self, data: bytes = b"") -> None:
        """Read what has arrived; what is not complete waits for more."""
        if self.state != AWAITING_CONTROL_LINE:
            left = self.needed + len(_END) - len(self.buf)
            await super().parse(data[:left])
            data = data[left:]
        elif self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        place, resets = 0, self._resets
        while place < len(data):
            after = self._message(data, place)
            if after == place:
                after = await self._other(data, place)
                if after == place or resets != self._resets:
                    return
            place = after

    def _message(self, data: bytes, place: int) -> int:
        """Take one whole message that is listened to; returns where the next thing begins."""
        line = data.find(_END, place)
        words = data[place:line].split(b" ") if line > 0 else []
        with_headers = len(words) in (5, 6) and words[0] == b"HMSG"
        if not with_headers and not (len(words) in (4, 5) and words[0] == b"MSG"):
            return place
        try:
            sid, size = int(words[2]), int(words[-1])
            head = int(words[-2]) if with_headers else 0
        except ValueError:
            return place
        begin = line + 2
        end = begin + size
        if sid not in self._listeners or len(data) < end + 2:
            return place
        reply = words[3] if len(words) == 5 + with_headers else b""
        headers = data[begin : begin + head] if head else None
        self._take(sid, words[1], reply, data[begin + head : end], headers)
        return end + 2

    async def _other(self, data: bytes, place: int) -> int:
        """Have the library read the next thing; what is not complete stays in the buffer."""
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
