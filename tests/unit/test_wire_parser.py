"""Our parser of the wire beside the library's: the same story, however the bytes are cut."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nats.errors import ProtocolError
from nats.protocol.parser import Parser

from holdfast.broker.wire import LARGE_BYTES, Listener, WireParser

LISTENED = (1, 2)


class Client:
    """Writes down what a parser tells it."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def take(self, sid: int, subject: bytes, reply: bytes, body: bytes, head: bytes | None) -> None:
        self.told.append(("message", sid, subject, reply, body, head or None))

    def listeners(self) -> dict[bytes, Listener]:
        """For two of the three subscriptions."""
        return {str(sid).encode(): functools.partial(self.take, sid) for sid in LISTENED}

    def refuse(self, subject: bytes, body: bytes, error: Exception) -> None:
        self.told.append(("refused", subject, body))

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, body: bytes, head: bytes | None
    ) -> None:
        self.take(sid, subject, reply, body, head)

    async def _process_ping(self) -> None:
        self.told.append(("ping",))

    async def _process_pong(self) -> None:
        self.told.append(("pong",))

    async def _process_err(self, error: str) -> None:
        self.told.append(("error", error))

    async def _process_info(self, info: dict[str, Any]) -> None:
        self.told.append(("info", info))


def message(sid: int, reply: str, headers: bytes, body: bytes) -> bytes:
    """A message as the server sends it."""
    to = f"a.b {sid} {reply} " if reply else f"a.b {sid} "
    if headers:
        head = b"NATS/1.0" + headers + b"\r\n\r\n"
        line = f"HMSG {to}{len(head)} {len(head) + len(body)}\r\n"
        return line.encode() + head + body + b"\r\n"
    return f"MSG {to}{len(body)}\r\n".encode() + body + b"\r\n"


tricky = st.sampled_from([b"", b"\r\n", b"MSG a 1 3\r\n", b"PING\r\n", b"HMSG ", b"x" * 300])
messages = st.builds(
    message,
    st.integers(1, 3),
    st.sampled_from(["", "_INBOX.x.1", "$JS.ACK.s.c.1.2.3.4.5"]),
    st.sampled_from([b"", b" 100 Idle", b"\r\nA: b", b"\r\nA: b\r\nC:d"]),
    st.one_of(st.binary(max_size=80), tricky),
)
others = st.sampled_from(
    [b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'no'\r\n", b'INFO {"max_payload":5}\r\n']
)


async def story(parser: Parser, client: Client, pieces: list[bytes]) -> list[tuple[Any, ...]]:
    for piece in pieces:
        await parser.parse(piece)
    return client.told


async def both(pieces: list[bytes]) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    theirs, ours = Client(), Client()
    return (
        await story(Parser(theirs), theirs, pieces),
        await story(WireParser(ours, ours.listeners(), ours.refuse), ours, pieces),
    )


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(st.one_of(messages, others), max_size=12), data=st.data())
def test_every_cut_tells_the_same_story(lines: list[bytes], data: st.DataObject) -> None:
    """Messages of listened and other subscriptions, all other lines, in pieces of any size."""
    stream = b"".join(lines)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8).map(sorted))
    edges = [0, *cuts, len(stream)]
    pieces = [stream[a:b] for a, b in itertools.pairwise(edges)]
    theirs, ours = asyncio.run(both(pieces))
    assert ours == theirs


@pytest.mark.parametrize("size", [LARGE_BYTES - 1, LARGE_BYTES, 5 * LARGE_BYTES])
async def test_large_message_in_many_pieces(size: int) -> None:
    """Between small ones, and of a size at which the way changes."""
    small = message(1, "", b"", b"small")
    stream = small + message(2, "r", b"\r\nA: b", b"x" * size) + small + b"PING\r\n" + small
    pieces = [stream[at : at + 10_000] for at in range(0, len(stream), 10_000)]
    theirs, ours = await both(pieces)
    assert ours == theirs
    assert len(ours) == 5


@pytest.mark.parametrize(
    "line", [b"MSG a b c\r\n", b"HMSG a 1 x 9\r\n", b"HELLO\r\n", b"MSG a 1 2 3 4 5\r\n"]
)
async def test_nonsense_is_refused_as_the_library_does(line: bytes) -> None:
    """The connection is given up, in the library's own way."""
    client = Client()
    with pytest.raises(ProtocolError):
        await Parser(client).parse(line + bytes(20))
    with pytest.raises(ProtocolError):
        await WireParser(client, client.listeners(), client.refuse).parse(line + bytes(20))


async def test_reset_in_the_middle_drops_the_rest() -> None:
    """What belongs to a connection that was given up is not read any more."""
    client = Client()
    parser = WireParser(client, client.listeners(), client.refuse)

    async def give_up(error: str) -> None:
        parser.reset()

    client._process_err = give_up  # type: ignore[method-assign]
    await parser.parse(b"-ERR 'stale'\r\n" + message(1, "", b"", b"of the past"))
    assert client.told == []
    await parser.parse(message(1, "", b"", b"new"))
    assert [told[4] for told in client.told] == [b"new"]
